package split

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/testsuite"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest"

	"github.com/cleave-cri/cleave/lab/need"
)

// TestSuite runs containerd's own tests of a snapshotter with each set of
// options. The suite's folders are temporary ones, so here both roots are on one
// device; split_test.go has them on two.
func TestSuite(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		set  func(*Options)
	}{
		{"plain", func(*Options) {}},
		{"all", func(o *Options) { o.Rebase, o.RemapIDs, o.SyncOnCommit = true, true, true }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			need.Root(t)
			// The suite knows by this name that renaming a lower folder fails in an
			// overlay (Linux, overlayfs.rst: redirect_dir).
			const overlay = "overlayfs"
			testsuite.SnapshotterSuite(t, overlay, func(ctx context.Context, root string) (snapshots.Snapshotter, func() error, error) {
				o := Options{
					ImageRoot:     filepath.Join(root, "images"),
					ContainerRoot: filepath.Join(root, "containers"),
					Database:      filepath.Join(root, "state", "split.db"),
					DatabaseBytes: 1 << 20, BallastBytes: 64 << 10,
					AnyContainerd: true,
					Log:           zaptest.NewLogger(t, zaptest.Level(zap.WarnLevel)),
				}
				tc.set(&o)
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
			})
		})
	}
}
