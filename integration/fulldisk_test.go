package integration

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/image"
	"github.com/cleave-cri/cleave/lab/node"
	"github.com/cleave-cri/cleave/lab/pod"
	"github.com/cleave-cri/cleave/snapshot"
	"github.com/cleave-cri/cleave/snapshot/split/ctdconfig"
	"github.com/cleave-cri/cleave/snapshot/split/fault"
)

// fillDisk takes all space of a disk, and returns what gives it back.
func fillDisk(t *testing.T, d *disk.Disk) (empty func()) {
	t.Helper()
	path := filepath.Join(d.Path(), "filler")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	for size := int64(64 << 20); size >= 4<<10; size /= 2 {
		for err = nil; err == nil; {
			end, seekErr := f.Seek(0, 2)
			if err = seekErr; err == nil {
				if err = unix.Fallocate(int(f.Fd()), 0, end, size); err == nil {
					_, err = f.Seek(0, 2)
				}
			}
		}
		if !errors.Is(err, unix.ENOSPC) {
			t.Fatal(err)
		}
	}
	for err = nil; err == nil; { // the rest of the last block
		_, err = f.Write(make([]byte, 512))
	}
	if err := f.Close(); err != nil && !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	return func() {
		t.Helper()
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
}

// TestFullDisksUnderContainerd fills the filesystem of the containers, that of
// the images and that of the database in turn: what can't be done says why,
// removing things still frees their space, and new work succeeds in it. At the
// end the snapshotter is killed just when it has given up the database's
// ballast, and starts again on the full disk.
func TestFullDisksUnderContainerd(t *testing.T) {
	t.Parallel()
	n := &splitOnly{Node: startSplitNode(t, node.Options{Disks: []disk.Spec{
		{Name: "images", SizeBytes: 300 << 20}, {Name: "containers", SizeBytes: 300 << 20, FS: disk.XFS}, {Name: "db", SizeBytes: 80 << 20},
	}}, node.SplitOptions{Images: "images", Containers: "containers", Database: "db", Binary: faultyBinary(t)})}
	n.client = dial(t, n.Runtime.Endpoint())
	n.store = snapshot.NewStore(n.client.Conn(), "k8s.io")
	ctx := bounded(t)
	for i := range 3 {
		size := int64(1 << 20)
		if i == 0 {
			size = 2 << 20 // more comes free with it than the next one needs
		}
		img, err := image.Random(int64(i), 3, size)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := n.Registry.Push(ctx, random(i), img); err != nil {
			t.Fatal(err)
		}
	}
	for _, ref := range []string{node.BusyboxImage, random(0)} {
		if _, err := n.client.Pull(ctx, ref); err != nil {
			t.Fatal(err)
		}
	}
	stays := n.run(ctx, t, "stays")
	n.fullContainers(ctx, t, stays)
	n.fullImages(ctx, t)
	n.fullDatabase(ctx, t)
	if out, err := n.client.Exec(ctx, stays, "cat", "/note"); err != nil || out != "there\n" {
		t.Errorf("the container that stays says %q, %v", out, err)
	}
	if err := n.Split.Stop(ctx); err != nil {
		t.Fatal(err)
	}
	examine(ctx, t, n.Split.Config())
	if err := n.Split.Start(ctx); err != nil {
		t.Fatal(err)
	}
	// The ballast is made whole by itself.
	if s, err := n.Split.Status(ctx); err != nil || s.Store.Database.BallastBytes < 4<<20 {
		t.Errorf("with room again: %+v, %v", s.Store.Database, err)
	}
}

func random(i int) string { return fmt.Sprintf("example.org/random:%d", i) }

// splitOnly is a node on the split snapshotter, without a proxy in between.
type splitOnly struct {
	*node.Node
	client *pod.Client
	store  *snapshot.Store
	pods   map[string]*pod.Pod
}

// run runs a pod with a container that has written a note.
func (n *splitOnly) run(ctx context.Context, t *testing.T, name string) (id string) {
	t.Helper()
	p, err := n.client.Run(ctx, n.PodSpec(name))
	if err != nil {
		t.Fatal(err)
	}
	if id, err = p.Start(ctx, pod.ContainerSpec{Name: "c", Image: node.BusyboxImage, Command: []string{"sh", "-c", "echo there > /note; exec sleep 100000"}}); err != nil {
		t.Fatal(err)
	}
	if n.pods == nil {
		n.pods = map[string]*pod.Pod{}
	}
	n.pods[name] = p
	return id
}

func (n *splitOnly) remove(ctx context.Context, t *testing.T, name string) {
	t.Helper()
	if err := n.pods[name].Remove(ctx); err != nil {
		t.Error(err)
	}
}

func (n *splitOnly) removeImage(ctx context.Context, t *testing.T, ref string) {
	t.Helper()
	if _, err := n.client.Images.RemoveImage(ctx, &runtimeapi.RemoveImageRequest{Image: &runtimeapi.ImageSpec{Image: ref}}); err != nil {
		t.Errorf("remove %s: %v", ref, err)
	}
}

// waitFree waits until a disk has this many bytes to give.
func (n *splitOnly) waitFree(ctx context.Context, t *testing.T, name string, bytes int64) {
	t.Helper()
	eventually(ctx, t, "space to come free on the disk of the "+name, func() (string, bool) {
		free := freeBytes(t, n.Disks[name])
		return fmt.Sprintf("%d bytes, want %d", free, bytes), free >= bytes
	})
}

// freeBytes is what a disk has for root, once all of it is written.
func freeBytes(t *testing.T, d *disk.Disk) int64 {
	t.Helper()
	usedBytes(t, d) // writes all of it
	var st unix.Statfs_t
	if err := unix.Statfs(d.Path(), &st); err != nil {
		t.Fatal(err)
	}
	return int64(st.Bfree) * st.Bsize //nolint:gosec // far below 2^63
}

func (n *splitOnly) fullContainers(ctx context.Context, t *testing.T, stays string) {
	t.Helper()
	big := n.run(ctx, t, "big")
	if _, err := n.client.Exec(ctx, big, "dd", "if=/dev/zero", "of=/big", "bs=1M", "count=20"); err != nil {
		t.Fatal(err)
	}
	usedBytes(t, n.Disks["containers"]) // written
	empty := fillDisk(t, n.Disks["containers"])
	if _, err := n.client.Exec(ctx, stays, "dd", "if=/dev/zero", "of=/more", "bs=1M", "count=20"); err == nil || !strings.Contains(err.Error(), "No space left") {
		t.Errorf("a container that writes to a full disk: %v", err)
	}
	if _, err := n.client.Exec(ctx, stays, "rm", "-f", "/more"); err != nil {
		t.Error(err)
	}
	n.remove(ctx, t, "big")
	n.waitFree(ctx, t, "containers", 20<<20)
	id := n.run(ctx, t, "in what came free")
	if _, err := n.client.Exec(ctx, id, "dd", "if=/dev/zero", "of=/big", "bs=1M", "count=10"); err != nil {
		t.Error(err)
	}
	n.remove(ctx, t, "in what came free")
	empty()
}

func (n *splitOnly) fullImages(ctx context.Context, t *testing.T) {
	t.Helper()
	empty := fillDisk(t, n.Disks["images"])
	if _, err := n.client.Pull(ctx, random(1)); err == nil || !strings.Contains(err.Error(), "no space left on device") {
		t.Errorf("a pull to a full disk: %v", err)
	}
	// Containers need nothing of it.
	n.run(ctx, t, "images full")
	n.remove(ctx, t, "images full")
	n.removeImage(ctx, t, random(0))
	n.waitFree(ctx, t, "images", 5<<20)
	if _, err := n.client.Pull(ctx, random(1)); err != nil {
		t.Errorf("a pull into what came free: %v", err)
	}
	n.removeImage(ctx, t, random(1))
	n.waitFree(ctx, t, "images", 3<<20)
	empty()
}

func (n *splitOnly) fullDatabase(ctx context.Context, t *testing.T) {
	t.Helper()
	empty := fillDisk(t, n.Disks["db"])
	work := func(name string, i int) {
		t.Helper()
		n.run(ctx, t, name)
		if _, err := n.client.Pull(ctx, random(i)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		n.remove(ctx, t, name)
		n.removeImage(ctx, t, random(i))
	}
	work("database full", 0)
	if out, err := n.Split.Run(ctx, "snapshotter", "status"); err != nil || !strings.Contains(out, "ballast 4.0Mi") {
		t.Errorf("status says %v\n%s", err, out)
	}
	// Its reserve is used up by snapshots with long labels, until the ballast goes.
	if err := n.Split.Stop(ctx); err != nil {
		t.Fatal(err)
	}
	if err := n.Split.Start(ctx, fmt.Sprintf("CLEAVE_FAULT=%s:1", fault.BallastReleased)); err != nil {
		t.Fatal(err)
	}
	conn := dial(t, "unix://"+n.Split.Config().Snapshotter.Endpoint.Path())
	client := snapshotsapi.NewSnapshotsClient(conn.Conn())
	label := strings.Repeat("x", 100_000)
	count := 0
	for ; count < 1000; count++ {
		if _, err := client.Prepare(ctx, &snapshotsapi.PrepareSnapshotRequest{
			Snapshotter: ctdconfig.Snapshotter, Key: fmt.Sprintf("k8s.io/%d/hog", 1_000_000+count), Labels: map[string]string{"hog": label},
		}); err != nil {
			break
		}
	}
	select {
	case <-n.Split.Ended():
	case <-ctx.Done():
		t.Fatalf("the ballast was not given up after %d snapshots", count)
	}
	if err := n.Split.Start(ctx); err != nil {
		t.Fatalf("a start on a full disk, without reserve and ballast: %v", err)
	}
	if err := n.Split.WaitKnown(ctx, n.Runtime.PID()); err != nil {
		t.Fatal(err)
	}
	// containerd knows none of them, and has them removed.
	eventually(ctx, t, "the snapshots with long labels to go", func() (string, bool) {
		s, err := n.Split.Status(ctx)
		left := s.Store.Container.Writable.Count
		return fmt.Sprint(left, err), err == nil && left <= 2
	})
	work("reserve used up", 1)
	empty()
	work("room again", 2)
}
