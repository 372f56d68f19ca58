package stock_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/cleave-cri/cleave/agent/stock"
	"github.com/cleave-cri/cleave/engine/garbage"
	"github.com/cleave-cri/cleave/snapshot/inventory"
)

// figures put layers and blobs on two disks; of one layer nothing is known.
type figures struct{}

func (figures) Snapshot(_ string, s *inventory.Snapshot) (inventory.Figure, bool) {
	return inventory.Figure{Filesystem: "8:1", Bytes: 1000, Inodes: 1}, s.Key != "unmeasured"
}

func (figures) Blob(*inventory.Blob) (inventory.Figure, bool) {
	return inventory.Figure{Filesystem: "8:2", Bytes: 10, Inodes: 1}, true
}

func (figures) Ingest(*inventory.Ingest) (inventory.Figure, bool) { return inventory.Figure{}, false }

// What a choice is made from has what would come free on one disk: nothing that a
// lease holds, and of a layer that nobody has measured no bytes, but that it is
// shared.
func TestForOneFilesystem(t *testing.T) {
	t.Parallel()
	const label = inventory.LabelSource + "registry.example"
	blob := func(digest, repository, snapshot string) inventory.Blob {
		return inventory.Blob{Digest: digest, Labels: map[string]string{label: repository, "containerd.io/gc.ref.content.config": "config-" + repository, "containerd.io/gc.ref.snapshot.overlayfs": snapshot}}
	}
	c := &inventory.Contents{
		Snapshotters: []inventory.Snapshotter{{Name: "overlayfs"}},
		Documents: map[string]inventory.Document{
			"manifest-a": {Config: "config-a"}, "config-a": {ChainIDs: []string{"held", "a"}},
			"manifest-b": {Config: "config-b"}, "config-b": {ChainIDs: []string{"unmeasured"}},
		},
		Namespaces: []inventory.Namespace{{
			Name: "k8s.io",
			Images: []inventory.Record{
				{Name: "registry.example/a@manifest-a", Target: "manifest-a", Labels: map[string]string{inventory.LabelPinned: inventory.PinnedValue}},
				{Name: "registry.example/b:1", Target: "manifest-b"},
				{Name: "registry.example/broken:1", Target: "nothing"},
			},
			Blobs: []inventory.Blob{
				blob("manifest-a", "a", ""), {Digest: "config-a", Labels: map[string]string{label: "a", "containerd.io/gc.ref.snapshot.overlayfs": "a"}},
				blob("manifest-b", "b", ""), {Digest: "config-b", Labels: map[string]string{label: "b", "containerd.io/gc.ref.snapshot.overlayfs": "unmeasured"}},
			},
			Snapshots: []inventory.Snapshot{
				{Snapshotter: "overlayfs", Key: "held", Kind: inventory.Committed}, {Snapshotter: "overlayfs", Key: "a", Parent: "held", Kind: inventory.Committed},
				{Snapshotter: "overlayfs", Key: "unmeasured", Kind: inventory.Committed},
			},
			Leases:     []inventory.Lease{{ID: "l", Resources: []inventory.Resource{{Type: "snapshots/overlayfs", ID: "held"}}}},
			Containers: []inventory.Container{{ID: "c", Image: "registry.example/b:1"}},
		}},
	}
	got := stock.For(inventory.Build(c, figures{}), "k8s.io", "8:1")
	want := map[string][]garbage.Layer{"config-a": {{ID: "k8s.io/overlayfs/a", Bytes: 1000}}, "config-b": {{ID: "k8s.io/overlayfs/unmeasured"}}}
	if diff := cmp.Diff(want, got.Layers, cmpopts.SortSlices(func(a, b garbage.Layer) bool { return a.ID < b.ID })); diff != "" {
		t.Errorf("layers (-want +got):\n%s", diff)
	}
	a, b := got.Facts["config-a"], got.Facts["config-b"]
	if len(got.Facts) != 2 || !a.Pinned || a.NotPullable != "" || len(a.Users) > 0 {
		t.Errorf("facts of %d images; of a %+v", len(got.Facts), a)
	}
	if diff := cmp.Diff([]string{"container c of namespace k8s.io"}, b.Users); diff != "" || b.NotPullable == "" {
		t.Errorf("of b %+v", b)
	}
	blobs := stock.For(inventory.Build(c, figures{}), "k8s.io", "8:2")
	for id, layers := range blobs.Layers {
		n := 0
		for _, l := range layers {
			if l.Bytes > 0 {
				n++
			}
		}
		if n != 2 {
			t.Errorf("%s has %d blobs on their disk: %+v", id, n, layers)
		}
	}
	if other := stock.For(inventory.Build(c, figures{}), "moby", "8:1"); len(other.Facts) > 0 {
		t.Errorf("another namespace has %v", other.Facts)
	}
}
