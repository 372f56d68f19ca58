package inventory

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/metadata"
	"github.com/google/go-cmp/cmp"
	"go.etcd.io/bbolt"
	"pgregory.net/rapid"
)

// emptyStore is below containerd's database in this test, which is about records
// only.
type emptyStore struct{ content.Store }

func (emptyStore) Walk(context.Context, content.WalkFunc, ...string) error { return nil }
func (emptyStore) ListStatuses(context.Context, ...string) ([]content.Status, error) {
	return nil, nil
}

// random draws contents in which anything may refer to anything.
func random(t *rapid.T, now time.Time) *Contents {
	c := &Contents{At: now, Documents: map[string]Document{}}
	key := func(kind string) *rapid.Generator[string] {
		return rapid.Custom(func(t *rapid.T) string { return fmt.Sprintf("%s%d", kind, rapid.IntRange(0, 7).Draw(t, kind)) })
	}
	snapshotter := rapid.SampledFrom([]string{"one", "two"})
	time := rapid.SampledFrom([]string{now.Add(-time.Hour).Format(time.RFC3339), now.Add(time.Hour).Format(time.RFC3339)})
	reference := func(t *rapid.T) (label, value string) {
		suffix := rapid.SampledFrom([]string{"", ".l.0", "/x", "s"}).Draw(t, "suffix")
		switch rapid.IntRange(0, 9).Draw(t, "label") {
		case 0, 1:
			return "containerd.io/gc.ref.content" + suffix, key("blob").Draw(t, "to")
		case 2, 3:
			return "containerd.io/gc.ref.snapshot." + snapshotter.Draw(t, "of") + rapid.SampledFrom([]string{"", "/y"}).Draw(t, "end"), key("snap").Draw(t, "to")
		case 4:
			return "containerd.io/gc.ref.image" + suffix, key("image").Draw(t, "to")
		case 5:
			return "containerd.io/gc.bref.content" + suffix, key("blob").Draw(t, "to")
		case 6:
			return "containerd.io/gc.bref.image" + suffix, key("image").Draw(t, "to")
		case 7:
			return "containerd.io/gc.bref.snapshot." + snapshotter.Draw(t, "of"), key("snap").Draw(t, "to")
		case 8:
			return "containerd.io/gc.bref.container" + suffix, key("container").Draw(t, "to")
		default:
			return "containerd.io/gc.cond.snapshot." + snapshotter.Draw(t, "of"), rapid.SampledFrom([]string{"usedat<2h|", "usedat>2h|", "usedat<=2h|", "usedat<1m,usedat>30m|", "other=1|"}).Draw(t, "if") + key("snap").Draw(t, "to")
		}
	}
	labels := func(t *rapid.T, more ...string) map[string]string {
		out := map[string]string{}
		for range rapid.IntRange(0, 3).Draw(t, "labels") {
			label, value := reference(t)
			out[label] = value
		}
		for _, label := range more {
			if rapid.IntRange(0, 7).Draw(t, label) == 0 {
				out[label] = time.Draw(t, "value")
			}
		}
		return out
	}
	for n := range rapid.IntRange(1, 2).Draw(t, "namespaces") {
		ns := Namespace{Name: fmt.Sprintf("ns%d", n)}
		for i := range 8 {
			ns.Blobs = append(ns.Blobs, Blob{Digest: fmt.Sprintf("blob%d", i), Labels: labels(t, "containerd.io/gc.root", "containerd.io/gc.rootless")})
			ns.Images = append(ns.Images, Record{Name: fmt.Sprintf("image%d", i), Target: key("blob").Draw(t, "target"), Labels: labels(t, "containerd.io/gc.expire")})
			parent := ""
			if i > 0 && rapid.Bool().Draw(t, "has parent") {
				parent = fmt.Sprintf("snap%d", rapid.IntRange(0, i-1).Draw(t, "parent"))
			}
			for _, of := range []string{"one", "two"} {
				ns.Snapshots = append(ns.Snapshots, Snapshot{Snapshotter: of, Key: fmt.Sprintf("snap%d", i), Parent: parent, Labels: labels(t, "containerd.io/gc.root", "containerd.io/gc.cond.value-usedat")})
			}
		}
		for i := range rapid.IntRange(0, 2).Draw(t, "containers") {
			ns.Containers = append(ns.Containers, Container{ID: fmt.Sprintf("container%d", i), Snapshotter: snapshotter.Draw(t, "of"), SnapshotKey: key("snap").Draw(t, "on"), Labels: labels(t)})
		}
		for i := range rapid.IntRange(0, 1).Draw(t, "sandboxes") {
			ns.Sandboxes = append(ns.Sandboxes, Sandbox{ID: fmt.Sprintf("sandbox%d", i), Labels: labels(t)})
		}
		for i := range rapid.IntRange(0, 2).Draw(t, "leases") {
			l := Lease{ID: fmt.Sprintf("lease%d", i), Labels: labels(t, "containerd.io/gc.expire", "containerd.io/gc.flat", "containerd.io/gc.flat")}
			for range rapid.IntRange(0, 3).Draw(t, "resources") {
				r := rapid.SampledFrom([]Resource{{"content", key("blob").Draw(t, "r")}, {"images", key("image").Draw(t, "r")}, {"snapshots/one", key("snap").Draw(t, "r")}}).Draw(t, "resource")
				if !slices.Contains(l.Resources, r) {
					l.Resources = append(l.Resources, r)
				}
			}
			ns.Leases = append(ns.Leases, l)
		}
		c.Namespaces = append(c.Namespaces, ns)
	}
	return c
}

// record writes contents into a database of containerd's own form (containerd,
// core/metadata/buckets.go).
func record(tx *bbolt.Tx, c *Contents) (err error) {
	bucket := func(path ...string) *bbolt.Bucket {
		var b *bbolt.Bucket
		for i, part := range path {
			if err != nil {
				return nil
			}
			if i == 0 {
				b, err = tx.CreateBucketIfNotExists([]byte(part))
			} else {
				b, err = b.CreateBucketIfNotExists([]byte(part))
			}
		}
		return b
	}
	put := func(b *bbolt.Bucket, key, value string) {
		if err == nil {
			err = b.Put([]byte(key), []byte(value))
		}
	}
	labels := func(all map[string]string, path ...string) {
		b := bucket(append(path, "labels")...)
		for label, value := range all {
			put(b, label, value)
		}
	}
	for _, ns := range c.Namespaces {
		for _, i := range ns.Images {
			labels(i.Labels, "v1", ns.Name, "images", i.Name)
			put(bucket("v1", ns.Name, "images", i.Name, "target"), "digest", i.Target)
		}
		for _, b := range ns.Blobs {
			labels(b.Labels, "v1", ns.Name, "content", "blob", b.Digest)
		}
		for _, s := range ns.Snapshots {
			labels(s.Labels, "v1", ns.Name, "snapshots", s.Snapshotter, s.Key)
			put(bucket("v1", ns.Name, "snapshots", s.Snapshotter, s.Key), "parent", s.Parent)
		}
		for _, ct := range ns.Containers {
			labels(ct.Labels, "v1", ns.Name, "containers", ct.ID)
			put(bucket("v1", ns.Name, "containers", ct.ID), "snapshotter", ct.Snapshotter)
			put(bucket("v1", ns.Name, "containers", ct.ID), "snapshotKey", ct.SnapshotKey)
		}
		for _, sb := range ns.Sandboxes {
			labels(sb.Labels, "v1", ns.Name, "sandboxes", sb.ID)
		}
		for _, l := range ns.Leases {
			labels(l.Labels, "v1", ns.Name, "leases", l.ID)
			for _, r := range l.Resources {
				switch name, ok := r.Snapshotter(); {
				case ok:
					put(bucket("v1", ns.Name, "leases", l.ID, "snapshots", name), r.ID, "")
				default:
					put(bucket("v1", ns.Name, "leases", l.ID, r.Type), r.ID, "")
				}
			}
		}
	}
	return err
}

// left lists the blobs and snapshots that a database has.
func left(tx *bbolt.Tx, c *Contents) (out []string) {
	for _, ns := range c.Namespaces {
		b := tx.Bucket([]byte("v1")).Bucket([]byte(ns.Name))
		for _, blob := range ns.Blobs {
			if b.Bucket([]byte("content")).Bucket([]byte("blob")).Bucket([]byte(blob.Digest)) != nil {
				out = append(out, ns.Name+"/"+blob.Digest)
			}
		}
		for _, s := range ns.Snapshots {
			if b.Bucket([]byte("snapshots")).Bucket([]byte(s.Snapshotter)).Bucket([]byte(s.Key)) != nil {
				out = append(out, ns.Name+"/"+s.Snapshotter+"/"+s.Key)
			}
		}
	}
	slices.Sort(out)
	return out
}

// nothing has no figures.
type nothing struct{}

func (nothing) Snapshot(string, *Snapshot) (Figure, bool) { return Figure{}, false }
func (nothing) Blob(*Blob) (Figure, bool)                 { return Figure{}, false }
func (nothing) Ingest(*Ingest) (Figure, bool)             { return Figure{}, false }

// TestCTD80_AsContainerdCollects compares with containerd's own collector: what is
// left of any store, and what is left of it when images are removed.
func TestCTD80_AsContainerdCollects(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "meta.db")
	now := time.Now()
	rapid.Check(t, func(t *rapid.T) {
		db, err := bbolt.Open(file, 0o600, &bbolt.Options{NoSync: true})
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := db.Close(); err != nil {
				t.Fatal(err)
			}
		}()
		c := random(t, now)
		if err := db.Update(func(tx *bbolt.Tx) error {
			if tx.Bucket([]byte("v1")) != nil {
				if err := tx.DeleteBucket([]byte("v1")); err != nil {
					return err
				}
			}
			return record(tx, c)
		}); err != nil {
			t.Fatal(err)
		}
		collector := metadata.NewDB(db, emptyStore{}, nil)
		collect := func() (out []string) {
			if _, err := collector.GarbageCollect(context.Background()); err != nil {
				t.Fatal(err)
			}
			if err := db.View(func(tx *bbolt.Tx) error { out = left(tx, c); return nil }); err != nil {
				t.Fatal(err)
			}
			return out
		}
		p := Build(c, nothing{})
		lives := func(dead map[int32]bool) (out []string) {
			for i, o := range p.store.objects {
				node := int32(i)
				if o.kind != nodeBlob && o.kind != nodeSnapshot {
					continue
				}
				carrier := p.store.carrier(node)
				if flat, ok := p.store.flat[node]; ok {
					carrier = flat // the bytes may be shared; this is about the record
				} else if o.kind == nodeBlob {
					carrier = node
				}
				if !p.store.graph.lives(carrier) || dead[carrier] {
					continue
				}
				ns := c.Namespaces[o.namespace]
				if o.kind == nodeBlob {
					out = append(out, ns.Name+"/"+ns.Blobs[o.index].Digest)
				} else {
					out = append(out, ns.Name+"/"+ns.Snapshots[o.index].Snapshotter+"/"+ns.Snapshots[o.index].Key)
				}
			}
			slices.Sort(out)
			return out
		}
		if diff := cmp.Diff(collect(), lives(nil)); diff != "" {
			t.Fatalf("what containerd has left (-) and what is said to live (+):\n%s", diff)
		}

		// Now remove images that are roots, some at a time.
		death, dead := p.store.graph.death(), map[int32]bool{}
		for range rapid.IntRange(1, 3).Draw(t, "rounds") {
			var nodes []int32
			for i := range p.Images {
				for _, node := range p.groups[i].records {
					if p.store.rootRecord(node) && rapid.Bool().Draw(t, "remove") {
						nodes = append(nodes, node)
					}
				}
			}
			if err := db.Update(func(tx *bbolt.Tx) error {
				for _, node := range nodes {
					o := p.store.objects[node]
					ns := c.Namespaces[o.namespace]
					images := tx.Bucket([]byte("v1")).Bucket([]byte(ns.Name)).Bucket([]byte("images"))
					if images.Bucket([]byte(ns.Images[o.index].Name)) == nil {
						continue
					}
					if err := images.DeleteBucket([]byte(ns.Images[o.index].Name)); err != nil {
						return err
					}
				}
				return nil
			}); err != nil {
				t.Fatal(err)
			}
			for _, node := range death.remove(nodes) {
				if dead[node] {
					t.Fatal("something died twice")
				}
				dead[node] = true
			}
			if diff := cmp.Diff(collect(), lives(dead)); diff != "" {
				t.Fatalf("after images were removed, what containerd has left (-) and what is said to live (+):\n%s", diff)
			}
		}
	})
}
