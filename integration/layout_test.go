package integration

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/node"
	"github.com/cleave-cri/cleave/lab/runtime"
)

// TestLayersBelowAMountAreWhereTheyAre: the snapshotter's root is on one disk, but
// its folder for layers is a mount of another. containerd names the root; the
// layers' disk is the truth, before anything was pulled and after.
func TestLayersBelowAMountAreWhereTheyAre(t *testing.T) {
	t.Parallel()
	n := startNode(t, node.Options{
		Disks: twoDisks(disk.Ext4),
		Runtime: func(o *runtime.Options, disks map[string]*disk.Disk) {
			root := filepath.Join(disks["images"].Path(), "overlayfs")
			o.SnapshotterRoots = map[string]string{"overlayfs": root}
			at, from := filepath.Join(root, "snapshots"), filepath.Join(disks["containers"].Path(), "layers")
			for _, folder := range []string{at, from} {
				if err := os.MkdirAll(folder, 0o700); err != nil {
					t.Fatal(err)
				}
			}
			if out, err := exec.CommandContext(t.Context(), "mount", "--bind", from, at).CombinedOutput(); err != nil {
				t.Fatalf("mount: %v: %s", err, out)
			}
		},
	})
	ctx := bounded(t)
	through, direct := dial(t, n.Cleave.Endpoint()), dial(t, n.Runtime.Endpoint())
	want, err := fsstats.NewProber().FilesystemOf(n.Disks["containers"].Path())
	if err != nil {
		t.Fatal(err)
	}
	check := func(when string) {
		t.Helper()
		if _, err := n.Cleave.WaitMeasured(ctx); err != nil {
			t.Fatal(err)
		}
		eventually(ctx, t, when+": images and containers on one disk", func() (string, bool) {
			status, err := n.Cleave.Status(ctx)
			if err != nil {
				t.Fatal(err)
			}
			layout := fsstats.Layout{Places: status.Roles}
			images, _ := layout.Get(fsstats.ImageFS)
			return string(status.Layout), images.Filesystem.Device == want.Device && layout.Kind() == fsstats.LayoutDedicated
		})
		info, err := through.Images.ImageFsInfo(ctx, &runtimeapi.ImageFsInfoRequest{})
		if err != nil {
			t.Fatal(err)
		}
		img, ctr := info.GetImageFilesystems()[0], info.GetContainerFilesystems()[0]
		fs, err := fsstats.NewProber().FilesystemOf(img.GetFsId().GetMountpoint())
		if err != nil || fs.Device != want.Device || ctr.GetFsId().GetMountpoint() != img.GetFsId().GetMountpoint() {
			t.Errorf("%s: images at %v (%s, %v), containers at %v, want both by one name on %s", when, img.GetFsId(), fs.Device, err, ctr.GetFsId(), want.Device)
		}
	}
	check("with nothing pulled")
	own, err := direct.Images.ImageFsInfo(ctx, &runtimeapi.ImageFsInfoRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if fs, err := fsstats.NewProber().FilesystemOf(own.GetImageFilesystems()[0].GetFsId().GetMountpoint()); err != nil || fs.Device == want.Device {
		t.Errorf("containerd itself names the layers' disk (%v, %v): this test shows nothing", fs.Device, err)
	}
	startWriter(ctx, t, n, through, "writer", "sleep 1000")
	check("with a container")
}
