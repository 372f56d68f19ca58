package split

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/testsuite"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest"

	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/need"
)

// suiteCase is one set of options. With a filesystem its roots are on two disks,
// without one on one device.
type suiteCase struct {
	name                  string
	fs                    disk.FS
	rebase, remap, synced bool
	mountOptions          []string
}

// suiteCases are all sets if CLEAVE_SUITE=all says so (`make test-snapshotter`),
// otherwise the two that differ in everything.
func suiteCases() []suiteCase {
	cases := []suiteCase{
		{name: "plain, one device"},
		{name: "all options, ext4", fs: disk.Ext4, rebase: true, remap: true, synced: true},
	}
	if os.Getenv("CLEAVE_SUITE") != "all" {
		return cases
	}
	cases = append(cases, suiteCase{name: "volatile, ext4", fs: disk.Ext4, mountOptions: []string{"volatile"}})
	for _, fs := range []disk.FS{disk.Ext4, disk.XFS, disk.Btrfs} {
		for bits := range 8 {
			c := suiteCase{fs: fs, rebase: bits&1 != 0, remap: bits&2 != 0, synced: bits&4 != 0}
			c.name = fmt.Sprintf("%s, rebase %t, remap %t, sync %t", fs, c.rebase, c.remap, c.synced)
			cases = append(cases, c)
		}
	}
	return cases
}

// TestSuite runs containerd's own tests of a snapshotter with each set of
// options.
func TestSuite(t *testing.T) {
	t.Parallel()
	for _, tc := range suiteCases() {
		t.Run(tc.name, func(t *testing.T) {
			if os.Getenv("CLEAVE_SUITE") != "all" {
				t.Parallel() // many sets at a time would need as many disks
			}
			need.Root(t)
			// The suite knows by this name that renaming a lower folder fails in an
			// overlay (Linux, overlayfs.rst: redirect_dir).
			const overlay = "overlayfs"
			testsuite.SnapshotterSuite(t, overlay, tc.factory(t))
		})
	}
}

func (tc suiteCase) factory(t *testing.T) func(context.Context, string) (snapshots.Snapshotter, func() error, error) {
	var image, container string
	if tc.fs != "" {
		o, _ := onDisks(t, tc.fs, 256<<20, 256<<20)
		image, container = o.ImageRoot, o.ContainerRoot
	}
	var made atomic.Int32
	return func(ctx context.Context, root string) (snapshots.Snapshotter, func() error, error) {
		o := Options{
			ImageRoot:     filepath.Join(root, "images"),
			ContainerRoot: filepath.Join(root, "containers"),
			Database:      filepath.Join(root, "state", "split.db"),
			DatabaseBytes: 1 << 20, BallastBytes: 64 << 10,
			Rebase: tc.rebase, RemapIDs: tc.remap, SyncOnCommit: tc.synced, MountOptions: tc.mountOptions,
			AnyContainerd: true,
			Log:           zaptest.NewLogger(t, zaptest.Level(zap.WarnLevel)),
		}
		if tc.fs != "" {
			name := fmt.Sprint(made.Add(1)) // the suite's tests run at a time
			o.ImageRoot, o.ContainerRoot = filepath.Join(image, name), filepath.Join(container, name)
		}
		if err := errors.Join(os.Mkdir(o.ImageRoot, 0o700), os.Mkdir(o.ContainerRoot, 0o700)); err != nil {
			return nil, nil, err
		}
		if err := Init(ctx, o); err != nil {
			return nil, nil, err
		}
		s, err := Open(ctx, o)
		if err != nil {
			return nil, nil, err
		}
		return s, s.Close, nil
	}
}
