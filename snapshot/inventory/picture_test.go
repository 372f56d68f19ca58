package inventory

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// now is when the stores of these tests are read.
var now = time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)

// shelf makes contents by hand. Each blob takes 10 bytes and each snapshot 1000,
// on the filesystems blobs and layers.
type shelf struct {
	c *Contents
}

func (shelf) Snapshot(string, *Snapshot) (Figure, bool) { return Figure{"layers", 1000, 3}, true }
func (shelf) Blob(*Blob) (Figure, bool)                 { return Figure{"blobs", 10, 1}, true }
func (shelf) Ingest(in *Ingest) (Figure, bool) {
	return Figure{"blobs", in.OffsetBytes, 1}, true
}

func newShelf() shelf {
	return shelf{&Contents{
		At: now, Documents: map[string]Document{}, Namespaces: []Namespace{{Name: "k8s.io"}, {Name: "moby"}},
		Snapshotters: []Snapshotter{{Name: "split"}},
	}}
}

func (s shelf) cri() *Namespace { return &s.c.Namespaces[0] }

// pulled puts an image with layers (which name their content) on the shelf, under
// names, as a pull from registry.example/REPO leaves it.
func (s shelf) pulled(ns *Namespace, repo string, layers []string, names ...string) Key {
	source := map[string]string{LabelSource + "registry.example": repo}
	with := func(labels map[string]string) map[string]string {
		for k, v := range source {
			labels[k] = v
		}
		return labels
	}
	blob := func(digest string, labels map[string]string) {
		if !slices.ContainsFunc(ns.Blobs, func(b Blob) bool { return b.Digest == digest }) {
			ns.Blobs = append(ns.Blobs, Blob{Digest: digest, SizeBytes: 7, Labels: labels, CreatedAt: now.Add(-time.Hour)})
		}
	}
	manifest, config, parent := "manifest-"+repo, "config-"+repo, ""
	manifestLabels := map[string]string{"containerd.io/gc.ref.content.config": config}
	var chain []string
	var descriptors []Descriptor
	for i, l := range layers {
		chain = append(chain, strings.Join(layers[:i+1], "+"))
		descriptors = append(descriptors, Descriptor{"layer-" + l, 7})
		manifestLabels[fmt.Sprintf("containerd.io/gc.ref.content.l.%d", i)] = "layer-" + l
		blob("layer-"+l, with(map[string]string{}))
		if !slices.ContainsFunc(ns.Snapshots, func(sn Snapshot) bool { return sn.Key == chain[i] }) {
			ns.Snapshots = append(ns.Snapshots, Snapshot{Snapshotter: "split", Key: chain[i], Parent: parent, CreatedAt: now.Add(-time.Hour)})
		}
		parent = chain[i]
	}
	blob(manifest, with(manifestLabels))
	blob(config, with(map[string]string{"containerd.io/gc.ref.snapshot.split": parent}))
	s.c.Documents[manifest] = Document{Config: config, ConfigSizeBytes: 5, Layers: descriptors, SizeBytes: 3}
	s.c.Documents[config] = Document{ChainIDs: chain, SizeBytes: 5}
	for _, name := range append(names, "registry.example/"+repo+"@"+manifest) {
		ns.Images = append(ns.Images, Record{Name: name, Target: manifest, CreatedAt: now.Add(-time.Hour)})
	}
	return Key{ns.Name, config}
}

func takes(t *testing.T, what string, a Amount, blobs, layers int64) {
	t.Helper()
	if a.On("blobs").Bytes != 10*blobs || a.On("layers").Bytes != 1000*layers || a.Unknown != 0 {
		t.Errorf("%s: %+v, want %d blobs and %d layers", what, a, blobs, layers)
	}
}

func TestExclusiveBytesOfImagesAndSets(t *testing.T) {
	t.Parallel()
	s := newShelf()
	a := s.pulled(s.cri(), "a", []string{"base", "a1"}, "registry.example/a:1", "config-a")
	b := s.pulled(s.cri(), "b", []string{"base", "b1", "b2"})
	c := s.pulled(s.cri(), "c", []string{"other"})
	p := Build(s.c, s)
	if got := len(p.Images); got != 3 {
		t.Fatalf("%d images, want 3: several records are one image", got)
	}
	image, _ := p.Image(a)
	if diff := cmp.Diff([]string{"config-a", "registry.example/a:1", "registry.example/a@manifest-a"}, image.Names); diff != "" {
		t.Error(diff)
	}
	if image.ReportedBytes != 3+5+2*7 {
		t.Errorf("the CRI reports %d bytes, want those of manifest, configuration and compressed layers", image.ReportedBytes)
	}
	takes(t, "all of a", image.Nominal, 4, 2)
	takes(t, "a alone", image.Exclusive, 3, 1) // its layer base stays, packed and unpacked
	takes(t, "what a has twice", image.Duplicate, 2, 0)
	takes(t, "what there is twice", p.Duplicate, 5, 0)
	takes(t, "a and c", p.Freed(a, c), 6, 2)
	takes(t, "a and b: the shared layer goes too", p.Freed(a, b), 8, 4)
	takes(t, "a twice", p.Freed(a, a), 3, 1)
	takes(t, "an image that is not there", p.Freed(Key{"k8s.io", "x"}), 0, 0)

	r := p.Removal()
	takes(t, "first b", r.Remove(b), 4, 2)
	takes(t, "then a, the last with base", r.Remove(a), 4, 2)
	takes(t, "both", r.Freed(), 8, 4)
	takes(t, "the picture stays", p.Freed(a), 3, 1)

	var ids []string
	for _, part := range p.Parts(a) {
		ids = append(ids, fmt.Sprint(part.ID, " ", part.Held))
	}
	slices.Sort(ids)
	want := []string{"config-a false", "k8s.io/split/base false", "k8s.io/split/base+a1 false", "layer-a1 false", "layer-base false", "manifest-a false"}
	if diff := cmp.Diff(want, ids); diff != "" {
		t.Errorf("parts (-want +got):\n%s", diff)
	}
}

// keeper is a Keeper without what it keeps.
type keeper struct {
	kind          KeeperKind
	namespace, id string
}

func TestCTD81_WhatIsHeldDoesNotComeFree(t *testing.T) {
	t.Parallel()
	cases := []struct {
		name   string
		change func(s shelf)
		// what a, with two layers, frees
		blobs, layers int64
		keeper        keeper
	}{
		{"nothing", func(shelf) {}, 4, 2, keeper{}},
		{"a container", func(s shelf) {
			s.cri().Containers = append(s.cri().Containers, Container{ID: "c", Image: "x", Snapshotter: "split", SnapshotKey: "c"})
			s.cri().Snapshots = append(s.cri().Snapshots, Snapshot{Snapshotter: "split", Key: "c", Parent: "l1+l2", Kind: Active})
		}, 4, 0, keeper{KeeperContainer, "k8s.io", "c"}},
		{"a lease on a layer", func(s shelf) {
			s.cri().Leases = append(s.cri().Leases, Lease{ID: "l", Resources: []Resource{{"snapshots/split", "l1"}}})
		}, 4, 1, keeper{KeeperLease, "k8s.io", "l"}},
		{"a lease that has ended", func(s shelf) {
			s.cri().Leases = append(s.cri().Leases, Lease{ID: "l", Labels: map[string]string{labelExpire: now.Add(-time.Second).Format(time.RFC3339)}, Resources: []Resource{{"snapshots/split", "l1"}}})
		}, 4, 2, keeper{}},
		{"a flat lease on the manifest", func(s shelf) {
			s.cri().Leases = append(s.cri().Leases, Lease{ID: "l", Labels: map[string]string{labelFlat: ""}, Resources: []Resource{{"content", "manifest-a"}}})
		}, 3, 2, keeper{KeeperLease, "k8s.io", "l"}},
		{"the same blobs in another namespace", func(s shelf) {
			s.pulled(&s.c.Namespaces[1], "a", []string{"l1", "l2"})
		}, 0, 2, keeper{KeeperImage, "moby", "config-a"}},
		{"a download of a blob that is there", func(s shelf) {
			s.c.Namespaces[1].Ingests = append(s.c.Namespaces[1].Ingests, Ingest{Ref: "in", Expected: "layer-l2"})
		}, 3, 2, keeper{KeeperIngest, "moby", "in"}},
		{"a label of its own", func(s shelf) {
			s.cri().Blobs[0].Labels[labelRoot] = ""
		}, 3, 2, keeper{KeeperBlob, "k8s.io", "layer-l1"}},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			s := newShelf()
			a := s.pulled(s.cri(), "a", []string{"l1", "l2"})
			tc.change(s)
			p := Build(s.c, s)
			takes(t, "a", p.Freed(a), tc.blobs, tc.layers)
			keepers := p.Keepers(a)
			if tc.keeper == (keeper{}) {
				if len(keepers) > 0 {
					t.Errorf("kept by %+v, want by nobody", keepers)
				}
				return
			}
			if len(keepers) != 1 || (keeper{keepers[0].Kind, keepers[0].Namespace, keepers[0].ID}) != tc.keeper {
				t.Fatalf("kept by %+v, want by %+v", keepers, tc.keeper)
			}
			takes(t, "what is kept", keepers[0].Kept, 4-tc.blobs, 2-tc.layers)
		})
	}
}

func TestUsersPinnedRepullable(t *testing.T) {
	t.Parallel()
	s := newShelf()
	ns := s.cri()
	used := s.pulled(ns, "used", []string{"l1"}, "registry.example/used:1")
	twin := s.pulled(ns, "twin", []string{"l1"})
	pause := s.pulled(ns, "pause", []string{"p"}, "registry.example/pause:3")
	volume := s.pulled(ns, "volume", []string{"v"})
	remapped := s.pulled(ns, "remapped", []string{"r"})
	base := s.pulled(ns, "base", []string{"v", "b"})
	renamed := s.pulled(ns, "renamed", []string{"n"}, "registry.example:5000/renamed:1", "other.example/renamed:1")
	ported := s.pulled(ns, "ported", []string{"o"}, "registry.example:5000/ported:1")
	imported := s.pulled(ns, "imported", []string{"i"}, "registry.example/imported:1")
	elsewhere := s.pulled(ns, "elsewhere", []string{"e"})
	s.pulled(&s.c.Namespaces[1], "elsewhere", []string{"e"}, "e")
	ns.Images[slices.IndexFunc(ns.Images, func(r Record) bool { return r.Name == "registry.example/pause:3" })].Labels = map[string]string{LabelPinned: PinnedValue}
	for i := range ns.Blobs {
		if ns.Blobs[i].Digest == "layer-i" {
			ns.Blobs[i].Labels = nil
		}
	}
	active := func(key, parent string) {
		ns.Snapshots = append(ns.Snapshots, Snapshot{Snapshotter: "split", Key: key, Parent: parent, Kind: Active})
	}
	active("c1", "l1")
	active("/run/image-volumes/s/d", "v")
	ns.Snapshots = append(ns.Snapshots, Snapshot{Snapshotter: "split", Key: "r-remap", Parent: "r"})
	active("c2", "r-remap")
	ns.Containers = []Container{
		{ID: "c1", Image: "registry.example/used:1", Snapshotter: "split", SnapshotKey: "c1"},
		{ID: "c2", Image: "gone", Snapshotter: "split", SnapshotKey: "c2"},
		{ID: "s1", Image: "registry.example/pause:3", Labels: map[string]string{LabelKind: KindSandbox}},
	}
	s.c.Namespaces[1].Containers = []Container{{ID: "m", Image: "e"}}
	p := Build(s.c, s)
	for _, tc := range []struct {
		key        Key
		users      []User
		repullable bool
		pinned     bool
	}{
		{used, []User{{UserContainer, "k8s.io", "c1"}}, true, false},
		{twin, []User{{UserContainer, "k8s.io", "c1"}}, true, false}, // the same layers: it can't be told which
		{pause, []User{{UserSandbox, "k8s.io", "s1"}}, true, true},
		{volume, []User{{UserVolume, "k8s.io", "/run/image-volumes/s/d"}}, true, false},
		{remapped, []User{{UserContainer, "k8s.io", "c2"}}, true, false},
		{base, nil, true, false},
		{ported, nil, true, false},
		{renamed, nil, false, false}, // it can't be had by its other name
		{imported, nil, false, false},
		{elsewhere, []User{{UserContainer, "moby", "m"}}, true, false},
	} {
		image, ok := p.Image(tc.key)
		if !ok {
			t.Errorf("%s is missing", tc.key.ID)
			continue
		}
		if diff := cmp.Diff(tc.users, image.Users); diff != "" {
			t.Errorf("users of %s (-want +got):\n%s", tc.key.ID, diff)
		}
		if image.Repullable != tc.repullable || image.Pinned != tc.pinned || image.Repullable != (image.NotRepullable == "") {
			t.Errorf("%s: re-pullable %t (%s), pinned %t", tc.key.ID, image.Repullable, image.NotRepullable, image.Pinned)
		}
	}
}

func TestRepoDigest(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ name, host, repository, digest string }{
		{"docker.io/library/busybox@sha256:1", "docker.io", "library/busybox", "sha256:1"},
		{"localhost:5000/a/b@sha256:1", "localhost", "a/b", "sha256:1"},
		{"[::1]:5000/a@sha256:1", "::1", "a", "sha256:1"},
		{"r.example/a:v1@sha256:1", "r.example", "a", "sha256:1"},
		{"docker.io/library/busybox:1", "", "", ""},
		{"sha256:1", "", "", ""},
		{"busybox@sha256:1", "", "", ""},
	} {
		if host, repository, digest := repoDigest(tc.name); host != tc.host || repository != tc.repository || digest != tc.digest {
			t.Errorf("%s: %q %q %q", tc.name, host, repository, digest)
		}
	}
}

func TestUnknownFiguresAreCounted(t *testing.T) {
	t.Parallel()
	s := newShelf()
	a := s.pulled(s.cri(), "a", []string{"l"})
	if got := Build(s.c, nothing{}).Freed(a); got.Unknown != 4 || len(got.PerFilesystem) != 0 {
		t.Errorf("%+v, want 4 parts that nobody knows", got)
	}
}

func TestOrphans(t *testing.T) {
	t.Parallel()
	const uid = "0f5c2e9a-1111-2222-3333-444455556666"
	gone := strings.Repeat("ab", 32)
	long, young := now.Add(-3*time.Hour), now.Add(-time.Second)
	build := func() (shelf, Surroundings) {
		s := newShelf()
		ns := s.cri()
		s.pulled(ns, "a", []string{"l"})
		ns.Snapshots = append(ns.Snapshots,
			Snapshot{Snapshotter: "split", Key: "lost", CreatedAt: long},
			Snapshot{Snapshotter: "split", Key: "new", CreatedAt: young},
			Snapshot{Snapshotter: "split", Key: "leased", CreatedAt: long})
		ns.Blobs = append(ns.Blobs, Blob{Digest: "lost", CreatedAt: long}, Blob{Digest: "new", CreatedAt: young})
		ns.Images = append(ns.Images, Record{Name: "broken", Target: "lost-manifest", CreatedAt: long})
		ns.Leases = []Lease{
			{ID: gone, CreatedAt: long, Resources: []Resource{{"snapshots/split", "leased"}}},
			{ID: strings.Repeat("cd", 32), CreatedAt: long},
			{ID: "by-hand", CreatedAt: long},
		}
		ns.Sandboxes = []Sandbox{{ID: strings.Repeat("cd", 32)}}
		ns.Ingests = []Ingest{{Ref: "stale", OffsetBytes: 5, UpdatedAt: long}, {Ref: "running", UpdatedAt: young}}
		ns.Containers = []Container{{ID: "c", Labels: map[string]string{LabelPodUID: "99999999-1111-2222-3333-444455556666"}}}
		folder := func(name string) Folder { return Folder{Path: "/logs/" + name, Name: name, ModifiedAt: long} }
		return s, Surroundings{
			CRINamespace: "k8s.io", StateDir: "/run/ctd", Pods: map[string]bool{"88888888-1111-2222-3333-444455556666": true},
			Logs: []Folder{
				folder("ns_gone_" + uid), folder("ns_here_99999999-1111-2222-3333-444455556666"), folder("ns_starting_88888888-1111-2222-3333-444455556666"), folder("lost+found"),
				{Path: "/logs/x", Name: "ns_young_77777777-1111-2222-3333-444455556666", ModifiedAt: young},
			},
			Mounts: []string{
				"/run/ctd/io.containerd.runtime.v2.task/k8s.io/gone/rootfs", "/run/ctd/io.containerd.runtime.v2.task/k8s.io/c/rootfs",
				"/run/ctd/io.containerd.runtime.v2.task/moby/c/rootfs", "/run/ctd/io.containerd.grpc.v1.cri/sandboxes/gone/shm",
				"/run/ctdx/io.containerd.runtime.v2.task/k8s.io/gone/rootfs", "/run/ctd",
			},
			Blobs: []Folder{{Path: "/b/manifest-a", Name: "manifest-a", ModifiedAt: long}, {Path: "/b/stray", Name: "stray", ModifiedAt: long, Takes: Figure{"blobs", 3, 1}, Known: true}},
		}
	}
	s, around := build()
	var got []string
	for _, o := range Build(s.c, s).Orphans(around) {
		if o.Proof == "" {
			t.Errorf("no proof for %+v", o)
		}
		got = append(got, fmt.Sprintf("%s %s %s %d", o.Kind, o.Namespace, o.ID, o.Takes.Bytes()))
	}
	want := []string{
		"lease k8s.io " + gone + " 1000", "snapshot k8s.io split/lost 1000", "blob k8s.io lost 10", "ingest k8s.io stale 5", "file  /b/stray 3",
		"image k8s.io broken 0", "logs  /logs/ns_gone_" + uid + " 0",
		"mount  /run/ctd/io.containerd.grpc.v1.cri/sandboxes/gone/shm 0",
		"mount  /run/ctd/io.containerd.runtime.v2.task/k8s.io/gone/rootfs 0", "mount  /run/ctd/io.containerd.runtime.v2.task/moby/c/rootfs 0",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("orphans (-want +got):\n%s", diff)
	}

	s, around = build()
	s.c.Unread = []string{"snapshotter split does not answer"}
	if got := Build(s.c, s).Orphans(around); len(got) > 0 {
		t.Errorf("with a part unread there are %d orphans; its owner could be there", len(got))
	}
	s, around = build()
	around.Pods = nil
	if got := Build(s.c, s).Orphans(around); slices.ContainsFunc(got, func(o Orphan) bool { return o.Kind == OrphanLogs }) {
		t.Error("logs are judged without knowing the kubelet's pods")
	}
}

// bigStore has 1 000 images with 5 layers each, of which two images share the
// lower two.
func bigStore() shelf {
	s := newShelf()
	ns := s.cri()
	random := rand.New(rand.NewPCG(1, 2))
	digest := func() string {
		return fmt.Sprintf("sha256:%016x%016x%016x%016x", random.Uint64(), random.Uint64(), random.Uint64(), random.Uint64())
	}
	long := now.Add(-time.Hour)
	for i := range 1000 {
		var chain []string
		parent := ""
		manifest, config := digest(), digest()
		source := map[string]string{LabelSource + "registry.example": fmt.Sprintf("team/app%d", i)}
		manifestLabels := map[string]string{LabelSource + "registry.example": fmt.Sprintf("team/app%d", i), "containerd.io/gc.ref.content.config": config}
		var descriptors []Descriptor
		for l := range 5 {
			layer, key := digest(), digest()
			ns.Blobs = append(ns.Blobs, Blob{Digest: layer, SizeBytes: 1 << 20, Labels: source, CreatedAt: long})
			ns.Snapshots = append(ns.Snapshots, Snapshot{Snapshotter: "split", Key: key, Parent: parent, CreatedAt: long})
			parent, chain = key, append(chain, key)
			manifestLabels[fmt.Sprintf("containerd.io/gc.ref.content.l.%d", l)] = layer
			descriptors = append(descriptors, Descriptor{layer, 1 << 20})
		}
		if i%2 == 1 { // the odd ones have the lower layers of the one before, too
			manifestLabels["containerd.io/gc.ref.content.l.5"] = ns.Blobs[len(ns.Blobs)-12].Digest
			manifestLabels["containerd.io/gc.ref.content.l.6"] = ns.Blobs[len(ns.Blobs)-11].Digest
		}
		ns.Blobs = append(ns.Blobs,
			Blob{Digest: manifest, SizeBytes: 2000, Labels: manifestLabels, CreatedAt: long},
			Blob{Digest: config, SizeBytes: 4000, Labels: map[string]string{LabelSource + "registry.example": fmt.Sprintf("team/app%d", i), "containerd.io/gc.ref.snapshot.split": parent}, CreatedAt: long})
		s.c.Documents[manifest] = Document{Config: config, Layers: descriptors, SizeBytes: 2000}
		s.c.Documents[config] = Document{ChainIDs: chain, SizeBytes: 4000}
		for _, name := range []string{fmt.Sprintf("registry.example/team/app%d:1", i), fmt.Sprintf("registry.example/team/app%d@%s", i, manifest), config} {
			ns.Images = append(ns.Images, Record{Name: name, Target: manifest, CreatedAt: long})
		}
	}
	return s
}

// BenchmarkBuild is the picture of 1 000 images with 5 000 layers. heap_MiB is
// what contents and picture hold together.
func BenchmarkBuild(b *testing.B) {
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	s := bigStore()
	p := Build(s.c, s)
	held := heap() - before
	if len(p.Images) != 1000 {
		b.Fatalf("%d images", len(p.Images))
	}
	b.ReportAllocs()
	for b.Loop() {
		p = Build(s.c, s)
	}
	b.ReportMetric(float64(held)/(1<<20), "heap_MiB")
	runtime.KeepAlive(p)
}

func TestCTD80_ExpiredOrNot(t *testing.T) {
	t.Parallel()
	for value, want := range map[string]bool{
		"2026-11-30T11:59:59Z": true, "2026-11-30T12:00:01Z": false, "2026-11-30T13:00:00+02:00": true,
		"tomorrow": false, "": false, // as if it said nothing
	} {
		if got := expired(map[string]string{labelExpire: value}, now); got != want {
			t.Errorf("%q: expired %t, want %t", value, got, want)
		}
	}
	if expired(nil, now) {
		t.Error("expired without saying when")
	}
}

// What is left of an image that has gone is found by its parts: who keeps them, and
// what containerd has not collected yet.
func TestLeftover(t *testing.T) {
	t.Parallel()
	s := newShelf()
	ns := s.cri()
	gone := s.pulled(ns, "gone", []string{"base", "own", "top"})
	other := s.pulled(ns, "other", []string{"base"}, "registry.example/other:1")
	var ids []string
	for _, part := range Build(s.c, s).Parts(gone) {
		ids = append(ids, part.ID)
	}
	ns.Images = slices.DeleteFunc(ns.Images, func(r Record) bool { return strings.Contains(r.Name, "/gone") })
	ns.Leases = []Lease{{ID: "somebody", Resources: []Resource{{Type: "snapshots/split", ID: "base+own"}}}}
	left := Build(s.c, s).Leftover(ids)
	takes(t, "what is there", left.There, 5, 3)               // manifest, configuration and three layers, packed and unpacked
	takes(t, "what is not collected", left.Uncollected, 4, 1) // but the layer that the other has too
	if len(left.Keepers) != 2 || left.Keepers[0].ID != "somebody" || left.Keepers[1].ID != other.ID {
		t.Fatalf("keepers %+v", left.Keepers)
	}
	takes(t, "what the lease keeps", left.Keepers[0].Kept, 0, 2)
	takes(t, "what the other image keeps", left.Keepers[1].Kept, 1, 1)
	if left := Build(s.c, s).Leftover([]string{"no such thing"}); len(left.Keepers) > 0 || left.There.Bytes() > 0 {
		t.Errorf("of nothing: %+v", left)
	}
}

func TestAllPartsAreThePartsOfEach(t *testing.T) {
	t.Parallel()
	s := newShelf()
	s.pulled(s.cri(), "a", []string{"base", "a"})
	s.pulled(s.cri(), "b", []string{"base", "b"})
	p := Build(s.c, s)
	for i, parts := range p.AllParts() {
		byID := func(a, b Part) int { return strings.Compare(a.ID, b.ID) }
		one := p.Parts(p.Images[i].Key)
		slices.SortFunc(one, byID)
		slices.SortFunc(parts, byID)
		if diff := cmp.Diff(one, parts); diff != "" || len(parts) == 0 {
			t.Errorf("%v (-alone +all):\n%s", p.Images[i].Key, diff)
		}
	}
}
