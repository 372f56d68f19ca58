package split

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"

	"github.com/cleave-cri/cleave/snapshot/split/fence"
)

func TestPlaceOf(t *testing.T) {
	t.Parallel()
	chain := layerDigest(1)
	ref := map[string]string{snapshots.LabelSnapshotRef: chain}
	for _, tc := range []struct {
		name   string
		kind   snapshots.Kind
		key    string
		labels map[string]string
		want   fence.Role
	}{
		{"extraction", snapshots.KindActive, "k8s.io/3/extract-12-Ab_9 " + chain, ref, fence.Image},
		{"extraction by a bare key", snapshots.KindActive, "extract-12-Ab_9 " + chain, ref, fence.Image},
		{"extraction as a view", snapshots.KindView, "k8s.io/3/extract-12-Ab_9 " + chain, ref, fence.Container},
		{"no label", snapshots.KindActive, "k8s.io/3/extract-12-Ab_9 " + chain, nil, fence.Container},
		{"label of another layer", snapshots.KindActive, "k8s.io/3/extract-12-Ab_9 " + chain, map[string]string{snapshots.LabelSnapshotRef: layerDigest(2)}, fence.Container},
		{"container", snapshots.KindActive, containerKey(3), nil, fence.Container},
		{"container with the label", snapshots.KindActive, containerKey(3), ref, fence.Container},
		{"sandbox with every label", snapshots.KindActive, containerKey(4), map[string]string{
			snapshots.LabelSnapshotRef: chain, "containerd.io/snapshot/cleave-root": "image", "cleave.io/root": "image", "root": "image",
		}, fence.Container},
		{"container called extract-", snapshots.KindActive, "k8s.io/3/extract-foo", ref, fence.Container},
		{"name that ends like an extraction", snapshots.KindActive, "k8s.io/3/my extract-12 " + chain, ref, fence.Container},
		{"name that goes on", snapshots.KindActive, "k8s.io/3/extract-12 " + chain + "0", ref, fence.Container},
		{"name with a line end", snapshots.KindActive, "k8s.io/3/extract-12 " + chain + "\n", ref, fence.Container},
		{"namespace called extract", snapshots.KindActive, "extract-1 " + chain + "/3/web", ref, fence.Container},
		{"path with an extraction in it", snapshots.KindActive, "k8s.io/3//run/extract-1 " + chain, ref, fence.Container},
		{"dots", snapshots.KindActive, "k8s.io/3/../../../etc", ref, fence.Container},
		{"short digest", snapshots.KindActive, "k8s.io/3/extract-1 sha256:abc", map[string]string{snapshots.LabelSnapshotRef: "sha256:abc"}, fence.Container},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			if got := placeOf(tc.kind, tc.key, tc.labels); got != tc.want {
				t.Errorf("on the %s root, want the %s root", got, tc.want)
			}
		})
	}
}

// FuzzPlaceOf: whatever the key, only one with a space goes to the image root,
// and none without the label that agrees.
func FuzzPlaceOf(f *testing.F) {
	f.Add("k8s.io/3/extract-1 "+layerDigest(1), layerDigest(1))
	f.Add("k8s.io/3/x", "")
	f.Fuzz(func(t *testing.T, key, ref string) {
		if placeOf(snapshots.KindActive, key, map[string]string{snapshots.LabelSnapshotRef: ref}) != fence.Image {
			return
		}
		if !strings.HasSuffix(key, " "+ref) || !strings.Contains(key, "extract-") {
			t.Errorf("key %q with label %q went to the image root", key, ref)
		}
	})
}

func TestCheckKey(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name, key  string
		namespaces []string
		refused    bool
	}{
		{"any namespace", "moby/1/x", nil, false},
		{"bare", "x", nil, false},
		{"served", "k8s.io/1/x", []string{"k8s.io"}, false},
		{"not served", "moby/1/x", []string{"k8s.io"}, true},
		{"bare where namespaces are named", "x", []string{"k8s.io"}, true},
		{"no number", "k8s.io/x/y", []string{"k8s.io"}, true},
		{"namespace with dots", "../1/x", []string{"k8s.io"}, true},
		{"empty", "", nil, true},
		{"too long", strings.Repeat("x", maxKeyBytes+1), nil, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			err := checkKey(tc.key, tc.namespaces)
			if tc.refused != (err != nil) || err != nil && !errdefs.IsInvalidArgument(err) {
				t.Errorf("got %v, want refused %v", err, tc.refused)
			}
		})
	}
}

func TestMapping(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name, uids, gids string
		want             *mapping
	}{
		{"one line", "0:65536:65536", "0:131072:65536", &mapping{uids: "0:65536:65536", gids: "0:131072:65536", rootUID: 65536, rootGID: 131072}},
		{"several lines", "1:1:10,0:1000:1", "0:5:1", &mapping{uids: "1:1:10,0:1000:1", gids: "0:5:1", rootUID: 1000, rootGID: 5}},
		{"only users", "0:1:1", "", nil},
		{"option smuggled in", "0:1000:1,upperdir=/etc", "0:1000:1", nil},
		{"another separator", "0:1000:1;1:2:3", "0:1000:1", nil},
		{"trailing comma", "0:1000:1,", "0:1000:1", nil},
		{"line end", "0:1000:1\n", "0:1000:1", nil},
		{"sign", "+0:1000:1", "0:1000:1", nil},
		{"leading zero", "00:1000:1", "0:1000:1", nil},
		{"negative", "0:-1:1", "0:1000:1", nil},
		{"nothing mapped", "0:1000:0", "0:1000:1", nil},
		{"root not mapped", "1:1000:10", "0:1000:1", nil},
		{"the number that means none", "0:4294967295:1", "0:1000:1", nil},
		{"beyond the highest", "0:4294967290:100", "0:1000:1", nil},
		{"too large a number", "0:4294967296:1", "0:1000:1", nil},
		{"overlap inside", "0:1000:10,5:5000:10", "0:1000:1", nil},
		{"overlap outside", "0:1000:10,100:1005:10", "0:1000:1", nil},
		{"too many lines", strings.Repeat("0:1:1,", maxMappings+1) + "9:9:1", "0:1:1", nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			got, err := mappingOf(map[string]string{snapshots.LabelSnapshotUIDMapping: tc.uids, snapshots.LabelSnapshotGIDMapping: tc.gids})
			if tc.want == nil {
				if !errdefs.IsInvalidArgument(err) {
					t.Errorf("got %+v, %v, want it refused as an invalid argument", got, err)
				}
				return
			}
			if diff := cmp.Diff(tc.want, got, cmp.AllowUnexported(mapping{})); err != nil || diff != "" {
				t.Errorf("%v (-want +got)\n%s", err, diff)
			}
		})
	}
	if got, err := mappingOf(map[string]string{"containerd.io/snapshot/x": "0:1:1"}); got != nil || err != nil {
		t.Errorf("without the labels: %v, %v", got, err)
	}
}

func TestMounts(t *testing.T) {
	t.Parallel()
	overlay := func(options ...string) []mount.Mount {
		return []mount.Mount{{Type: "overlay", Source: "overlay", Options: options}}
	}
	bind := func(source string, options ...string) []mount.Mount {
		return []mount.Mount{{Type: "bind", Source: source, Options: options}}
	}
	ids := &mapping{uids: "0:1:1", gids: "0:2:1"}
	for _, tc := range []struct {
		name string
		in   layers
		want []mount.Mount
	}{
		{"no parent", layers{kind: snapshots.KindActive, upper: "/u"}, bind("/u", "rw", "rbind")},
		{"view of nothing", layers{kind: snapshots.KindView, upper: "/u"}, bind("/u", "ro", "rbind")},
		{"view of one", layers{kind: snapshots.KindView, upper: "/u", lowers: []string{"/a"}}, bind("/a", "ro", "rbind")},
		{"view of two", layers{kind: snapshots.KindView, upper: "/u", lowers: []string{"/a", "/b"}, options: []string{"index=off"}}, overlay("lowerdir=/a:/b", "index=off")},
		{"container", layers{kind: snapshots.KindActive, upper: "/u", work: "/w", lowers: []string{"/a"}, options: []string{"volatile"}}, overlay("workdir=/w", "upperdir=/u", "lowerdir=/a", "volatile")},
		{"mapped container", layers{kind: snapshots.KindActive, upper: "/u", work: "/w", lowers: []string{"/a"}, ids: ids}, overlay("uidmap=0:1:1", "gidmap=0:2:1", "workdir=/w", "upperdir=/u", "lowerdir=/a")},
		{"mapped without parent", layers{kind: snapshots.KindActive, upper: "/u", ids: ids}, bind("/u", "uidmap=0:1:1", "gidmap=0:2:1", "rw", "rbind")},
		{"layer whose parent comes at commit", layers{kind: snapshots.KindActive, upper: "/u", work: "/w", empty: "/e"}, overlay("workdir=/w", "upperdir=/u", "lowerdir=/e")},
		{"layer that has its parent", layers{kind: snapshots.KindActive, upper: "/u", work: "/w", lowers: []string{"/a"}, empty: "/e"}, overlay("workdir=/w", "upperdir=/u", "lowerdir=/a")},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			if diff := cmp.Diff(tc.want, tc.in.mounts()); diff != "" {
				t.Errorf("(-want +got)\n%s", diff)
			}
		})
	}
}

func TestPlanSweep(t *testing.T) {
	t.Parallel()
	at := func(root fence.Role, names ...string) (list []Folder) {
		for _, n := range names {
			list = append(list, Folder{root, n})
		}
		return list
	}
	set := func(names ...string) map[string]bool {
		m := map[string]bool{}
		for _, n := range names {
			m[n] = true
		}
		return m
	}
	numbers := func(from, to int) (names []string) {
		for i := from; i <= to; i++ {
			names = append(names, fmt.Sprint(i))
		}
		return names
	}
	leaving := func(from, to int) map[Folder]bool {
		m := map[Folder]bool{}
		for _, f := range at(fence.Image, numbers(from, to)...) {
			m[f] = true
		}
		return m
	}
	for _, tc := range []struct {
		name  string
		facts sweepFacts
		take  []Folder
		alarm string
	}{
		{name: "nothing there"},
		{name: "all known", facts: sweepFacts{found: at(fence.Image, "1", "2"), known: set("1", "2"), highest: 2}},
		{name: "one stray", facts: sweepFacts{found: at(fence.Image, "1", "2"), known: set("1"), highest: 2, minCount: 1}, take: at(fence.Image, "2")},
		{name: "the crash of a creation", facts: sweepFacts{found: at(fence.Image, "1", "2"), known: set("1"), highest: 1, minCount: 1, unused: map[Folder]bool{{fence.Image, "2"}: true}}, take: at(fence.Image, "2")},
		{name: "newer by one that was given out", facts: sweepFacts{found: at(fence.Image, "1", "2"), known: set("1"), highest: 1, minCount: 16}, alarm: "newer than the database"},
		{name: "the crash of the first creation", facts: sweepFacts{found: at(fence.Image, "1"), minCount: 16, unused: map[Folder]bool{{fence.Image, "1"}: true}}, take: at(fence.Image, "1")},
		{name: "two that nobody was given", facts: sweepFacts{found: at(fence.Image, "1", "2", "3"), known: set("1"), highest: 1, minCount: 16, unused: map[Folder]bool{{fence.Image, "2"}: true, {fence.Image, "3"}: true}}, alarm: "newer than the database"},
		{name: "newer than the database", facts: sweepFacts{found: at(fence.Image, "1", "9"), known: set("1"), highest: 1, minCount: 16}, alarm: "newer than the database"},
		{name: "an empty database", facts: sweepFacts{found: at(fence.Image, "1"), minCount: 16}, alarm: "never had a snapshot"},
		{name: "left-overs of creations", facts: sweepFacts{found: at(fence.Container, "new-A", "new-B"), making: set("new-B")}, take: at(fence.Container, "new-A")},
		{name: "left-overs do not count, and go beside an alarm", facts: sweepFacts{found: append(at(fence.Image, "1"), at(fence.Container, "new-A")...)}, take: at(fence.Container, "new-A"), alarm: "never"},
		{name: "foreign names", facts: sweepFacts{found: at(fence.Image, "1x", "-1", "0x1", "lost+found", ".", "1 ", "١"), highest: 5, minCount: 16}},
		{name: "a number that is none", facts: sweepFacts{found: at(fence.Image, strings.Repeat("9", 40)), highest: 5, minCount: 16}, alarm: "newer"},
		{name: "too large a share", facts: sweepFacts{found: at(fence.Image, numbers(1, 40)...), known: set(numbers(1, 20)...), highest: 40, minCount: 16, maxShare: 0.1}, alarm: "20 of 40"},
		{name: "a large share, of removals that are on record", facts: sweepFacts{found: at(fence.Image, numbers(1, 40)...), known: set(numbers(1, 20)...), leaving: leaving(21, 40), highest: 40, minCount: 16, maxShare: 0.1}, take: at(fence.Image, numbers(21, 40)...)},
		{name: "removals on record go beside an alarm about others", facts: sweepFacts{found: at(fence.Image, numbers(1, 40)...), known: set(numbers(1, 10)...), leaving: leaving(39, 40), highest: 40, minCount: 16, maxShare: 0.1}, take: at(fence.Image, "39", "40"), alarm: "28 of 38"},
		{name: "removals on record stay with an older database", facts: sweepFacts{found: at(fence.Image, "1", "2", "9"), known: set("1"), leaving: leaving(2, 2), highest: 2, minCount: 16}, alarm: "newer than the database"},
		{name: "removals on record that the database knows, or can't know", facts: sweepFacts{found: at(fence.Image, "1", "2"), known: set("1"), leaving: leaving(1, 2), highest: 1, minCount: 16}, alarm: "newer than the database"},
		{name: "removals on record of the other root", facts: sweepFacts{found: at(fence.Container, numbers(1, 40)...), known: set(numbers(1, 20)...), leaving: leaving(21, 40), highest: 40, minCount: 16, maxShare: 0.1}, alarm: "20 of 40"},
		{name: "a large share of few", facts: sweepFacts{found: at(fence.Image, numbers(1, 4)...), highest: 4, minCount: 16, maxShare: 0.1}, take: at(fence.Image, numbers(1, 4)...)},
		{name: "a small share of many", facts: sweepFacts{found: at(fence.Image, numbers(1, 300)...), known: set(numbers(1, 280)...), highest: 300, minCount: 16, maxShare: 0.1}, take: at(fence.Image, numbers(281, 300)...)},
		{name: "confirmed", facts: sweepFacts{found: at(fence.Image, "1"), minCount: 16, allowed: map[Folder]bool{{fence.Image, "1"}: true}}, take: at(fence.Image, "1")},
		{name: "confirmed, and then one more", facts: sweepFacts{found: at(fence.Image, "1", "2"), minCount: 16, allowed: map[Folder]bool{{fence.Image, "1"}: true}}, alarm: "never"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			plan := planSweep(tc.facts)
			if diff := cmp.Diff(tc.take, plan.take); diff != "" {
				t.Errorf("taken (-want +got)\n%s", diff)
			}
			switch {
			case tc.alarm == "" && plan.alarm != nil:
				t.Errorf("alarm: %s", plan.alarm.Reason)
			case tc.alarm != "" && (plan.alarm == nil || !strings.Contains(plan.alarm.Reason, tc.alarm)):
				t.Errorf("alarm %+v, want one with %q", plan.alarm, tc.alarm)
			}
		})
	}
}

// TestPlanSweepProperties: whatever the facts, a plan takes nothing that the
// database knows or that is being made, does not depend on the order of what
// was found, and leaves nothing to a second plan.
func TestPlanSweepProperties(t *testing.T) {
	t.Parallel()
	for seed := range uint64(2000) {
		r := rand.New(rand.NewPCG(seed, 0))
		f := sweepFacts{known: map[string]bool{}, making: map[string]bool{}, leaving: map[Folder]bool{}, highest: r.Uint64N(30), minCount: r.IntN(20), maxShare: r.Float64()}
		for range r.IntN(40) {
			name := fmt.Sprint(1 + r.IntN(25))
			switch r.IntN(4) {
			case 0:
				name = temporaryPrefix + name
				f.making[name] = r.IntN(2) == 0
			case 1:
				f.known[name] = true
			}
			folder := Folder{fence.Roles()[r.IntN(2)], name}
			if !slices.Contains(f.found, folder) {
				f.found = append(f.found, folder)
			}
			f.leaving[folder] = r.IntN(5) == 0
		}
		plan := planSweep(f)
		strays := 0
		for _, folder := range plan.take {
			if f.known[folder.Name] || f.making[folder.Name] {
				t.Fatalf("seed %d: took %v", seed, folder)
			}
			if idName.MatchString(folder.Name) && !f.leaving[folder] {
				strays++
			}
		}
		if plan.alarm != nil && plan.alarm.Older && slices.ContainsFunc(plan.take, func(folder Folder) bool { return f.leaving[folder] && idName.MatchString(folder.Name) }) {
			t.Fatalf("seed %d: an older database, and %v taken", seed, plan.take)
		}
		if plan.alarm != nil && strays > 0 {
			t.Fatalf("seed %d: an alarm, and %d folders taken", seed, strays)
		}
		mixed := f
		mixed.found = slices.Clone(f.found)
		r.Shuffle(len(mixed.found), func(i, j int) { mixed.found[i], mixed.found[j] = mixed.found[j], mixed.found[i] })
		if diff := cmp.Diff(plan.take, planSweep(mixed).take); diff != "" {
			t.Fatalf("seed %d: depends on the order\n%s", seed, diff)
		}
		after := f
		after.found = slices.DeleteFunc(slices.Clone(f.found), func(folder Folder) bool { return slices.Contains(plan.take, folder) })
		if again := planSweep(after); len(again.take) > 0 {
			t.Fatalf("seed %d: a second plan takes %v", seed, again.take)
		}
	}
}

func TestOptions(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	valid := optionsIn(t, dir)
	for _, tc := range []struct {
		name string
		set  func(*Options)
		want string // part of the error; empty: none
	}{
		{"valid", func(*Options) {}, ""},
		{"no roots", func(o *Options) { o.ImageRoot, o.ContainerRoot = "", "" }, "ContainerRoot is missing"},
		{"relative", func(o *Options) { o.ImageRoot = "images" }, "absolute"},
		{"not in its shortest form", func(o *Options) { o.ImageRoot += "/" }, "shortest"},
		{"colon", func(o *Options) { o.ImageRoot += ":x" }, "colon"},
		{"same root twice", func(o *Options) { o.ContainerRoot = o.ImageRoot }, "one in the other"},
		{"containers in images", func(o *Options) { o.ContainerRoot = o.ImageRoot + "/c" }, "one in the other"},
		{"images in containers", func(o *Options) { o.ImageRoot = o.ContainerRoot + "/i" }, "one in the other"},
		{"a name that begins alike", func(o *Options) { o.ContainerRoot = o.ImageRoot + "foo" }, ""},
		{"nested by a symlink", func(o *Options) { o.ContainerRoot = dir + "/link/c" }, "one in the other"},
		{"database in a root", func(o *Options) { o.Database = o.ImageRoot + "/db" }, "outside of both"},
		{"own mount option", func(o *Options) { o.MountOptions = []string{"ro,upperdir=/x"} }, "snapshotter's own"},
		{"share beyond one", func(o *Options) { o.CleanupMaxShare = 2 }, "share"},
		{"tiny database", func(o *Options) { o.DatabaseBytes = 1 }, "DatabaseBytes"},
	} {
		if tc.name == "nested by a symlink" {
			if err := os.Symlink(valid.ImageRoot, dir+"/link"); err != nil {
				t.Fatal(err)
			}
		}
		o := valid
		tc.set(&o)
		err := o.withDefaults().validate()
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%s: got %v, want an error with %q", tc.name, err, tc.want)
		}
	}
}
