package integration

import (
	"context"
	"fmt"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/du"
	"github.com/cleave-cri/cleave/lab/node"
	"github.com/cleave-cri/cleave/lab/pod"
	"github.com/cleave-cri/cleave/lab/runtime"
)

// onImagesDisk puts containerd's snapshotter on a disk of its own.
func onImagesDisk(o *runtime.Options, disks map[string]*disk.Disk) {
	o.SnapshotterRoots = map[string]string{"overlayfs": disks["images"].Path() + "/overlayfs"}
}

func startWriter(ctx context.Context, t *testing.T, n *node.Node, c *pod.Client, name string, script string) string {
	t.Helper()
	if _, err := c.Pull(ctx, node.BusyboxImage); err != nil {
		t.Fatal(err)
	}
	p, err := c.Run(ctx, n.PodSpec(name))
	if err != nil {
		t.Fatal(err)
	}
	id, err := p.Start(ctx, pod.ContainerSpec{Name: "writer", Image: node.BusyboxImage, Command: []string{"/bin/sh", "-c", script}})
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// eventually repeats a question until it has the right answer.
func eventually(ctx context.Context, t *testing.T, what string, ok func() (string, bool)) {
	t.Helper()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		got, done := ok()
		if done {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("%s: still %s", what, got)
		}
	}
}

// TestStatsTellTheTruth writes known amounts through the proxy and compares
// what cleave answers with du, and with what containerd says itself.
func TestStatsTellTheTruth(t *testing.T) {
	for _, fs := range []disk.FS{disk.Ext4, disk.XFS} {
		t.Run(string(fs), func(t *testing.T) {
			t.Parallel()
			n := startNode(t, node.Options{Disks: twoDisks(fs), Runtime: onImagesDisk})
			ctx := bounded(t)
			through, direct := dial(t, n.Cleave.Endpoint()), dial(t, n.Runtime.Endpoint())
			id := startWriter(ctx, t, n, through, "writer", "dd if=/dev/zero of=/big bs=1M count=20; mkdir /small; for i in $(seq 50); do echo x > /small/$i; done; sync; touch /done; sleep 1000")
			eventually(ctx, t, "the writer", func() (string, bool) {
				_, err := through.Exec(ctx, id, "/bin/cat", "/done")
				return fmt.Sprint(err), err == nil
			})
			if _, err := n.Cleave.WaitMeasured(ctx); err != nil {
				t.Fatal(err)
			}
			upper := upperOf(ctx, t, n, id)
			wantBytes, wantInodes := measure(ctx, t, upper)
			if wantBytes < 20<<20 {
				t.Fatalf("du says %d for %s", wantBytes, upper)
			}

			eventually(ctx, t, "writable layer through cleave", func() (string, bool) {
				s, err := through.Stats(ctx, id)
				got := fmt.Sprint(s.GetWritableLayer(), err)
				w := s.GetWritableLayer()
				return got, err == nil && w.GetUsedBytes().GetValue() == wantBytes && w.GetInodesUsed().GetValue() == wantInodes && w.GetTimestamp() > 0
			})

			info, err := through.Images.ImageFsInfo(ctx, &runtimeapi.ImageFsInfoRequest{})
			if err != nil {
				t.Fatal(err)
			}
			own, err := direct.Images.ImageFsInfo(ctx, &runtimeapi.ImageFsInfoRequest{})
			if err != nil {
				t.Fatal(err)
			}
			if len(own.GetContainerFilesystems()) != 0 {
				t.Errorf("CTD-1 no longer holds: containerd fills container_filesystems: %v", own)
			}
			if len(info.GetImageFilesystems()) == 0 || len(info.GetContainerFilesystems()) == 0 {
				t.Fatalf("an empty list: %v", info)
			}
			img, ctr := info.GetImageFilesystems()[0], info.GetContainerFilesystems()[0]
			if img.GetFsId().GetMountpoint() != own.GetImageFilesystems()[0].GetFsId().GetMountpoint() || ctr.GetFsId().GetMountpoint() != img.GetFsId().GetMountpoint() {
				t.Errorf("one filesystem has several names: images %v, containers %v, containerd %v", img, ctr, own)
			}
			if got := ctr.GetUsedBytes().GetValue(); got < wantBytes || got > wantBytes+1<<20 {
				t.Errorf("containers use %d, want the writer's %d and a sandbox", got, wantBytes)
			}
			if img.GetUsedBytes().GetValue() > 20<<20 {
				t.Errorf("images use %d: containers' layers are in it (CTD-2)", img.GetUsedBytes().GetValue())
			}
			// The kubelet looks for the layer's filesystem under the same name.
			s, err := through.Stats(ctx, id)
			if err != nil {
				t.Fatal(err)
			}
			if got := s.GetWritableLayer().GetFsId().GetMountpoint(); got != ctr.GetFsId().GetMountpoint() {
				t.Errorf("the layer is on %q, containers on %q", got, ctr.GetFsId().GetMountpoint())
			}
		})
	}
}

func upperOf(_ context.Context, t *testing.T, n *node.Node, id string) string {
	t.Helper()
	upper, err := n.Runtime.UpperOf(id)
	if err != nil {
		t.Fatal(err)
	}
	return upper
}

func measure(ctx context.Context, t *testing.T, path string) (usedBytes, inodes uint64) {
	t.Helper()
	usedBytes, inodes, err := du.Measure(ctx, path)
	if err != nil {
		t.Fatal(err)
	}
	return usedBytes, inodes
}
