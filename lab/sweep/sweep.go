// Package sweep finds what belongs to a folder of the lab and ends it: processes, mounts, loop devices, cgroups, and
// at last the files. It knows a thing as the lab's own by the folder, the cgroup, or descent from such a process, and
// never by a program's name, because other containerds may run on the same machine.
//
// It is meant for lab/janitor and lab/runtime.
package sweep

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// MarkEnv is the environment variable by which a process is known as the lab's: its value is the folder it belongs
// to. Children inherit it, which is how containerd's shims come to carry it.
const MarkEnv = "CLEAVE_LAB_RUN"

// patience bounds each kind of ending, for callers whose context has no deadline.
const patience = 20 * time.Second

// Scope says what is to be ended.
type Scope struct {
	// Dir is the folder, absolute. Everything in it and below it belongs to the scope.
	Dir string
	// Cgroup names a cgroup below the root of every hierarchy, without slashes at its ends. Empty: none.
	Cgroup string
	// Last names a file of the folder that is removed after all others, such as its lock. Empty: none.
	Last string
}

// All ends the processes of the scope, then its mounts, loop devices and cgroups. It goes on after a failure and
// reports all of them. Files stay.
func All(ctx context.Context, s Scope) error {
	if err := s.check(); err != nil {
		return err
	}
	return errors.Join(Processes(ctx, s), Mounts(ctx, s), Loops(ctx, s), Cgroups(ctx, s))
}

// Files removes the scope's folder. It refuses while anything is mounted below it: removing a tree with a mount in it
// would remove what somebody else keeps there.
func Files(s Scope) (err error) {
	if err := s.check(); err != nil {
		return err
	}
	mounts, err := mountsOf(s, nil)
	if err != nil {
		return err
	}
	if len(mounts) > 0 {
		return fmt.Errorf("remove %s: %s is still mounted; unmount it first", s.Dir, mounts[0].path)
	}
	parent, err := os.OpenRoot(filepath.Dir(s.Dir))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("remove %s: %w", s.Dir, err)
	}
	defer func() { err = errors.Join(err, parent.Close()) }()
	entries, err := os.ReadDir(s.Dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("remove %s: %w", s.Dir, err)
	}
	for _, e := range entries {
		if e.Name() != s.Last {
			err = errors.Join(err, parent.RemoveAll(filepath.Join(filepath.Base(s.Dir), e.Name())))
		}
	}
	if err != nil {
		return err
	}
	return parent.RemoveAll(filepath.Base(s.Dir)) //nolint:wrapcheck // it names the path
}

// check refuses scopes that could reach what isn't the lab's.
func (s Scope) check() error {
	if !filepath.IsAbs(s.Dir) || filepath.Clean(s.Dir) != s.Dir || strings.Count(s.Dir, "/") < 2 {
		return fmt.Errorf("sweep %q: the folder must be a clean absolute path at least two levels deep", s.Dir)
	}
	if s.Cgroup != "" && (s.Cgroup != filepath.Clean(s.Cgroup) || strings.HasPrefix(s.Cgroup, "/") || strings.HasPrefix(s.Cgroup, ".")) {
		return fmt.Errorf("sweep cgroup %q: the name must be relative and clean", s.Cgroup)
	}
	return nil
}

// holds tells whether path is the scope's folder or in it.
func (s Scope) holds(path string) bool {
	return path == s.Dir || strings.HasPrefix(path, s.Dir+"/")
}

// until calls done until it is content, ctx ends or patience runs out. done returns what is still in the way.
func until(ctx context.Context, done func() (left string, err error)) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		left, err := done()
		if left == "" && err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			if err != nil {
				return err
			}
			return fmt.Errorf("%s: %w", left, ctx.Err())
		case <-tick.C:
		}
	}
}
