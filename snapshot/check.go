package snapshot

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/cleave-cri/cleave/doctor"
)

// provedVersion is the containerd release that cleave's tests run with.
const provedVersion = "2.4."

// Checks are about containerd and its store.
func (s *Store) Checks() []doctor.Check {
	return []doctor.Check{
		{Name: "containerd version", Run: s.checkVersion},
		{Name: "snapshotter roots", Run: s.checkRoots},
		{Name: "one snapshotter", Run: s.checkOneSnapshotter},
	}
}

func (s *Store) checkVersion(ctx context.Context) doctor.Result {
	version, err := s.Version(ctx)
	if err != nil {
		return doctor.Failed(err.Error(), "start containerd, or set runtime.endpoint to its socket")
	}
	return judgeVersion(version)
}

func judgeVersion(version string) doctor.Result {
	plain := strings.TrimPrefix(version, "v")
	switch {
	case strings.HasPrefix(plain, provedVersion):
		return doctor.Passed("containerd %s", version)
	case strings.HasPrefix(plain, "0."), strings.HasPrefix(plain, "1."):
		return doctor.Failed(fmt.Sprintf("containerd %s: releases before 2.0 are not supported", version), "upgrade containerd to "+provedVersion+"x")
	default:
		return doctor.Warned(fmt.Sprintf("containerd %s: cleave's tests run with %sx", version, provedVersion), "calls pass through all the same; look at the figures of `cleave status` with care")
	}
}

// unreadable judges a store of which not all could be read.
func unreadable(inv Inventory, err error) doctor.Result {
	if errors.Is(err, ErrUnread) {
		return doctor.Failed(err.Error(), "start the process of snapshotter "+strings.Join(inv.Unread, ", ")+" (for the split one: `cleave snapshotter`)")
	}
	return doctor.Failed(err.Error(), "start containerd, or set runtime.endpoint to its socket")
}

// checkRoots looks for snapshotters that name a folder which does not exist:
// the kubelet's pod statistics fail on such a name (CTD-4).
func (s *Store) checkRoots(ctx context.Context) doctor.Result {
	inv, err := s.Inventory(ctx)
	if err != nil {
		return unreadable(inv, err)
	}
	var names []string
	for _, sn := range inv.Snapshotters {
		if !inUse(inv, sn.Name) {
			continue
		}
		if sn.Root == "" {
			return doctor.Warned("snapshotter "+sn.Name+" does not say where its data is",
				"set exports.root of the proxy plugin in containerd's configuration to an existing folder")
		}
		if _, err := os.Stat(sn.Root); err != nil {
			return doctor.Failed(fmt.Sprintf("snapshotter %s names a folder that can't be looked at: %v", sn.Name, err),
				"set exports.root of the plugin in containerd's configuration to an existing folder")
		}
		names = append(names, sn.Name+" at "+sn.Root)
	}
	if len(names) == 0 {
		return doctor.Passed("no snapshotter is in use yet")
	}
	return doctor.Passed("%s", strings.Join(names, ", "))
}

func inUse(inv Inventory, snapshotter string) bool {
	return slices.ContainsFunc(inv.Layers, func(l Layer) bool { return l.Snapshotter == snapshotter })
}

// checkOneSnapshotter looks for containers on different snapshotters: containerd
// itself reports those outside the default one as empty (CTD-14).
func (s *Store) checkOneSnapshotter(ctx context.Context) doctor.Result {
	inv, err := s.Inventory(ctx)
	if err != nil {
		return unreadable(inv, err)
	}
	counts := map[string]int{}
	for _, l := range inv.Layers {
		if l.Class == Container || l.Class == Sandbox {
			counts[l.Snapshotter]++
		}
	}
	if len(counts) <= 1 {
		return doctor.Passed("all containers use one snapshotter")
	}
	return doctor.Warned(fmt.Sprintf("containers use %d snapshotters: %v", len(counts), counts),
		"set one snapshotter for all runtimes in containerd's configuration; containerd reports 0 bytes for the others, cleave corrects that")
}
