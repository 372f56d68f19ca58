package integration

import (
	"fmt"
	"syscall"
	"testing"

	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/node"
)

// GAP-32: while the disk of the containers is short, whoever removes a container through cleave finds its space back when the call ends.
// Directly, containerd answers first and deletes with its next collection.
func TestGAP32_ARemovedContainersSpaceIsBack(t *testing.T) {
	t.Parallel()
	const mebibytes = 120
	n := startNode(t, node.Options{Disks: []disk.Spec{{Name: "images", SizeBytes: 300 << 20}, {Name: "containers", SizeBytes: 400 << 20}},
		Split: &node.SplitOptions{Images: "images", Containers: "containers"}})
	c := dial(t, n.Cleave.Endpoint())
	ctx := bounded(t)
	available := func() int64 {
		t.Helper()
		var s syscall.Statfs_t
		if err := syscall.Statfs(n.Disks["containers"].Path(), &s); err != nil {
			t.Fatal(err)
		}
		return int64(s.Bavail) * s.Bsize //nolint:gosec // less than the disk
	}
	fill := fmt.Sprintf("dd if=/dev/zero of=/f bs=1M count=%d && sync && touch /done; exec sleep 100000", mebibytes)
	var ids []string
	for i := range 3 { // with two of them the disk is short
		id := startWriter(ctx, t, n, c, fmt.Sprintf("writer-%d", i), fill)
		eventually(ctx, t, "the container has written", func() (string, bool) {
			out, err := c.Exec(ctx, id, "ls", "/done")
			return fmt.Sprint(out, err), err == nil
		})
		ids = append(ids, id)
		if i == 0 {
			continue
		}
		if _, err := n.Cleave.WaitMeasured(ctx); err != nil {
			t.Fatal(err)
		}
		before := available()
		if err := c.RemoveContainer(ctx, ids[0]); err != nil {
			t.Fatal(err)
		}
		if freed := available() - before; freed < mebibytes<<20*99/100 {
			t.Errorf("%d bytes came free of %d MiB when the removal had ended", freed, mebibytes)
		}
		ids = ids[1:]
	}
}
