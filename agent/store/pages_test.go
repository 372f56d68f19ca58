package store

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/cleave-cri/cleave/snapshot/inventory"
)

// fixed gives every part 4 KiB; what is told of more is unknown.
type fixed struct{}

func (fixed) Snapshot(_ string, s *inventory.Snapshot) (inventory.Figure, bool) {
	return inventory.Figure{Filesystem: "8:1", Bytes: 4096, Inodes: 1}, s.Kind == inventory.Committed
}

func (fixed) Blob(*inventory.Blob) (inventory.Figure, bool) {
	return inventory.Figure{Filesystem: "8:2", Bytes: 4096, Inodes: 1}, true
}

func (fixed) Ingest(*inventory.Ingest) (inventory.Figure, bool) { return inventory.Figure{}, false }

func TestPagesSayWhatIsNotKnown(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)
	c := &inventory.Contents{At: now, Namespaces: []inventory.Namespace{{
		Name:   "k8s.io",
		Images: []inventory.Record{{Name: "registry.example/a:1", Target: "sha256:m"}},
		Blobs:  []inventory.Blob{{Digest: "sha256:m"}},
		Snapshots: []inventory.Snapshot{
			{Snapshotter: "overlayfs", Key: "lost", Kind: inventory.Active, CreatedAt: now.Add(-time.Hour)},
		},
	}}}
	text := func(c *inventory.Contents) (images, orphans string) {
		t.Helper()
		p := inventory.Build(c, fixed{})
		var a, b strings.Builder
		if err := errors.Join(imagesOf(p, []error{errors.New("a figure is missing")}).WriteText(&a, now), orphansOf(p, p.Orphans(inventory.Surroundings{}), nil).WriteText(&b, now)); err != nil {
			t.Fatal(err)
		}
		return a.String(), b.String()
	}
	contains := func(what, text string, parts ...string) {
		t.Helper()
		for _, part := range parts {
			if !strings.Contains(text, part) {
				t.Errorf("%s has no %q:\n%s", what, part, text)
			}
		}
	}
	images, orphans := text(c)
	contains("images", images, "registry.example/a:1", "4.0Ki", "1 parts are not measured", "! a figure is missing")
	contains("orphans", orphans, "snapshot overlayfs/lost in namespace k8s.io: size unknown, 1h0m0s old", "Nothing was removed")

	c.Unread = []string{"snapshotter split is away"}
	images, orphans = text(c)
	contains("images", images, "not read: snapshotter split is away")
	contains("orphans", orphans, "Nothing is called an orphan", "not read")
	if strings.Contains(orphans, "lost") {
		t.Errorf("an orphan is told while a part is unread:\n%s", orphans)
	}
}
