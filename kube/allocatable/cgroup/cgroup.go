// Package cgroup reads what the kernel really limits a cgroup's memory to, and what it uses, in both versions. It imports
// kube/allocatable for the value; agent may import it. It changes nothing.
package cgroup

import (
	"errors"
	"io/fs"
	"math"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/containerd/cgroups/v3"
	"github.com/containerd/cgroups/v3/cgroup1"
	"github.com/containerd/cgroups/v3/cgroup2"

	"github.com/cleave-cri/cleave/kube/allocatable"
)

// Reader reads cgroups below a mount point.
type Reader struct {
	// Mount is where cgroups are; empty means /sys/fs/cgroup.
	Mount string
	// Unified says that it is version 2 alone.
	Unified bool
}

// System is the reader for this machine.
func System() Reader { return Reader{Unified: cgroups.Mode() == cgroups.Unified} }

func (r Reader) mount() string {
	if r.Mount == "" {
		return "/sys/fs/cgroup"
	}
	return r.Mount
}

// Read reads one cgroup by its path from the root.
func (r Reader) Read(name string) *allocatable.Cgroup {
	name = path.Clean("/" + name)
	out := &allocatable.Cgroup{Path: name}
	dir := filepath.Join(r.mount(), name)
	if !r.Unified {
		dir = filepath.Join(r.mount(), "memory", name)
	}
	info, err := os.Stat(dir)
	exists := err == nil && info.IsDir()
	switch {
	case errors.Is(err, fs.ErrNotExist):
		out.Exists = &exists
		return out
	case err != nil:
		out.Problem = err.Error()
		return out
	}
	out.Exists = &exists
	limit, used, err := r.memory(name)
	if err != nil {
		out.Problem = err.Error()
		return out
	}
	out.UsedBytes = &used
	if limit < unlimited {
		out.LimitBytes = &limit
	}
	return out
}

// unlimited is what version 1 shows without a limit: the largest multiple of a page of 64 KiB in an int64 or more. Version 2 shows
// "max", which the library makes the largest number.
const unlimited = math.MaxInt64 - 64<<10 + 1

// memory gives the limit, and what the kubelet calls the working set: what is used without file pages that nobody has asked for
// for a while.
func (r Reader) memory(name string) (limit, used uint64, _ error) {
	if r.Unified {
		m, err := cgroup2.Load(name, cgroup2.WithMountpoint(r.mount()))
		if err != nil {
			return 0, 0, err
		}
		stat, err := m.Stat()
		if err != nil {
			return 0, 0, err
		}
		if stat.GetMemory() == nil {
			return 0, 0, errNoMemory
		}
		m2 := stat.GetMemory()
		return m2.GetUsageLimit(), m2.GetUsage() - min(m2.GetUsage(), m2.GetInactiveFile()), nil
	}
	only := func() ([]cgroup1.Subsystem, error) { return []cgroup1.Subsystem{cgroup1.NewMemory(r.mount())}, nil }
	c, err := cgroup1.Load(cgroup1.StaticPath(name), cgroup1.WithHierarchy(only))
	if err != nil {
		return 0, 0, err
	}
	stat, err := c.Stat()
	if err != nil {
		return 0, 0, err
	}
	usage := stat.GetMemory().GetUsage()
	if usage == nil {
		return 0, 0, errNoMemory
	}
	return usage.GetLimit(), usage.GetUsage() - min(usage.GetUsage(), stat.GetMemory().GetTotalInactiveFile()), nil
}

var errNoMemory = errors.New("the cgroup has no memory controller")

// Of is the cgroup of a process, as proc names it: the one of the memory controller. Empty if it is not known.
func (r Reader) Of(procCgroup []byte) string {
	for line := range strings.Lines(string(procCgroup)) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3) // cgroups(7)
		if len(parts) != 3 {
			continue
		}
		if r.Unified && parts[0] == "0" && parts[1] == "" || !r.Unified && strings.Contains(","+parts[1]+",", ",memory,") {
			return parts[2]
		}
	}
	return ""
}

// Pods is the path of the cgroup of all pods: kubepods below the kubelet's cgroupRoot, which systemd's driver names as a slice.
func Pods(driver, root string) string {
	if driver != "systemd" {
		return path.Join("/", root, "kubepods")
	}
	var parts []string
	for part := range strings.FieldsFuncSeq(root, func(c rune) bool { return c == '/' }) {
		parts = append(parts, strings.ReplaceAll(strings.TrimSuffix(part, ".slice"), "-", "_"))
	}
	return Slice(strings.Join(append(parts, "kubepods"), "-") + ".slice")
}

// Slice is the path of a slice of systemd: a-b.slice lies in a.slice (systemd.slice(5)).
func Slice(name string) string {
	base := strings.TrimSuffix(name, ".slice")
	out, at := "/", ""
	for part := range strings.SplitSeq(base, "-") {
		if at != "" {
			at += "-"
		}
		at += part
		out = path.Join(out, at+".slice")
	}
	return out
}
