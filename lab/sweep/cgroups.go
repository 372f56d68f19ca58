package sweep

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"

	"github.com/moby/sys/mountinfo"
)

// Cgroups removes the scope's cgroup and those below it from every hierarchy. They must be empty of processes.
func Cgroups(ctx context.Context, s Scope) error {
	if s.Cgroup == "" {
		return nil
	}
	hierarchies, err := hierarchies()
	if err != nil {
		return err
	}
	for _, h := range hierarchies {
		top := filepath.Join(h.mountpoint, s.Cgroup)
		err := until(ctx, func() (string, error) {
			err := removeCgroups(top)
			if errors.Is(err, syscall.EBUSY) {
				return "remove cgroup " + top + ", which still has processes", nil
			}
			return "", err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// removeCgroups removes a tree of cgroups from the bottom up. Their files go with them; they can't be removed singly.
func removeCgroups(top string) error {
	var dirs []string
	err := filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		if d.IsDir() {
			dirs = append(dirs, path)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("list cgroups below %s: %w", top, err)
	}
	for _, dir := range slices.Backward(dirs) {
		if err := syscall.Rmdir(dir); err != nil && !errors.Is(err, syscall.ENOENT) {
			return fmt.Errorf("remove cgroup %s: %w", dir, err)
		}
	}
	return nil
}

// containerCgroup matches what containerd calls a container's cgroup: 64 hexadecimal digits, nobody else's name.
var containerCgroup = regexp.MustCompile(`/[0-9a-f]{64}$`)

// removeContainerCgroups removes cgroups that ended processes were in, where the name can only be one container's.
// A client of CRI that names no parent (critest does so) has its containers in a cgroup shared by all containerds.
func removeContainerCgroups(seen map[string]bool) error {
	hierarchies, err := hierarchies()
	if err != nil {
		return err
	}
	var errs []error
	for entry := range seen {
		controllers, path, _ := strings.Cut(entry, ":")
		if !containerCgroup.MatchString(path) {
			continue
		}
		for _, h := range hierarchies {
			if !h.is(controllers) {
				continue
			}
			err := syscall.Rmdir(filepath.Join(h.mountpoint, path))
			if err != nil && !errors.Is(err, syscall.ENOENT) && !errors.Is(err, syscall.EBUSY) {
				errs = append(errs, fmt.Errorf("remove cgroup %s of %s: %w", path, h.mountpoint, err))
			}
		}
	}
	return errors.Join(errs...)
}

// A hierarchy is one mounted cgroup tree.
type hierarchy struct {
	mountpoint string
	// controllers is empty for version 2.
	controllers string
}

// is tells whether the hierarchy is the one that a line of /proc/PID/cgroup means by its second field.
func (h hierarchy) is(controllers string) bool {
	if controllers == "" || h.controllers == "" {
		return controllers == h.controllers
	}
	options := strings.Split(h.controllers, ",")
	for c := range strings.SplitSeq(controllers, ",") {
		if !slices.Contains(options, c) {
			return false
		}
	}
	return true
}

func hierarchies() ([]hierarchy, error) {
	infos, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	if err != nil {
		return nil, fmt.Errorf("list cgroup hierarchies: %w", err)
	}
	var all []hierarchy
	for _, i := range infos {
		h := hierarchy{mountpoint: i.Mountpoint}
		if i.FSType == "cgroup" {
			h.controllers = i.VFSOptions
		}
		if _, err := os.Stat(i.Mountpoint); err == nil {
			all = append(all, h)
		}
	}
	return all, nil
}
