package plane

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/moby/sys/mountinfo"
)

// makeCgroups makes a cgroup below the root of every hierarchy. The lab's janitor removes it.
func makeCgroups(name string) error {
	if name == "" {
		return errors.New("prepare a kubelet: it needs a cgroup of its own")
	}
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	if err != nil {
		return fmt.Errorf("list cgroup hierarchies: %w", err)
	}
	for _, m := range mounts {
		dir := filepath.Join(m.Mountpoint, name)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("make a cgroup: %w", err)
		}
		if !strings.Contains(","+m.VFSOptions+",", ",cpuset,") {
			continue
		}
		// In version 1 a new cpuset is empty, and nothing can run in it (cpusets(7)).
		for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
			from, err := os.ReadFile(filepath.Join(m.Mountpoint, file))
			if err != nil {
				return fmt.Errorf("read what the parent of a cpuset has: %w", err)
			}
			if err := os.WriteFile(filepath.Join(dir, file), bytes.TrimSpace(from), 0o644); err != nil {
				return fmt.Errorf("fill a cpuset: %w", err)
			}
		}
	}
	return nil
}
