package engine

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

// Each test here tells one story twice: what the kubelet does, and what it
// comes to with the option.

// twice runs a story without and with an option.
func twice(t *testing.T, option func(*Options), story func(Options) string, kubelet, cleave string) {
	t.Helper()
	var o Options
	if got := story(o); got != kubelet {
		t.Errorf("kubelet profile: %s, want %s", got, kubelet)
	}
	option(&o)
	if got := story(o); got != cleave {
		t.Errorf("with the option: %s, want %s", got, cleave)
	}
	if got := story(Cleave()); got != cleave {
		t.Errorf("cleave profile: %s, want %s", got, cleave)
	}
}

// with gives a node options.
func (n *node) with(o Options) *node {
	n.Options = o
	return n
}

func TestOptionDisksOnly(t *testing.T) {
	t.Parallel()
	twice(t, func(o *Options) { o.DisksOnly = true }, func(o Options) string {
		n := newNode(t, "memory.available<1Gi,nodefs.available<10Gi").with(o)
		d := n.pass(0, Summary{Memory: &MemoryStats{AvailableBytes: bytes(1), WorkingSetBytes: bytes(1)}, NodeFS: disk(gib)})
		return string(d.Threshold.Signal)
	}, "memory.available", "nodefs.available")

	n := newNode(t, "memory.available<1Gi").with(Cleave())
	d := n.pass(0, Summary{Memory: &MemoryStats{AvailableBytes: bytes(1), WorkingSetBytes: bytes(1)}})
	if wantOutcome(t, d, Calm); !n.Reports(MemoryPressure) || d.Victim != nil {
		t.Errorf("%+v", d)
	}
}

func TestOptionMostUrgentFirst_GAP15_GAP14(t *testing.T) {
	t.Parallel()
	twice(t, func(o *Options) { o.MostUrgentFirst = true }, func(o Options) string {
		n := newNode(t, "nodefs.available<10Gi,imagefs.available<10Gi", "nodefs.available<30Gi", "nodefs.available=0s").with(o)
		d := n.pass(0, Summary{NodeFS: disk(9 * gib), ImageFS: disk(gib)})
		var all []string
		for _, c := range d.Choices {
			all = append(all, c.String())
		}
		return strings.Join(all, "; ")
	}, "nodefs.available < 10Gi; nodefs.available < 30Gi; imagefs.available < 10Gi", "imagefs.available < 10Gi")

	n := newNode(t, "imagefs.available<10Gi", "nodefs.available<30Gi", "nodefs.available=1ns").with(Cleave())
	n.pass(0, Summary{NodeFS: disk(0), ImageFS: disk(9 * gib)})
	if d := n.pass(10, Summary{NodeFS: disk(0), ImageFS: disk(9 * gib)}); !d.Threshold.Hard() || len(d.Due) != 2 {
		t.Errorf("%s before the hard one", d.Threshold)
	}
}

// TestElsewhere: what is short on another filesystem is decided about without the
// one that a decision is about, and without anybody who goes.
func TestElsewhere(t *testing.T) {
	t.Parallel()
	c := Config{Options: Cleave()}
	for _, s := range []Signal{NodeFSAvailable, ImageFSAvailable} {
		c.Thresholds = append(c.Thresholds, Threshold{Signal: s, Value: Value{Quantity: quantity(10 * gib)}})
	}
	before := State{Layout: &Detected{ImageApart: true}}
	pass := func(nodefs, imagefs int64) (Input, Decision) {
		in := Input{Now: start, Layout: before.Layout, Summary: &Summary{NodeFS: disk(nodefs), ImageFS: disk(imagefs)}}
		_, d := c.Sync(before, in)
		return in, d
	}
	in, d := pass(gib, 9*gib)
	other, state, ok := c.Elsewhere(before, d)
	if !ok || d.Threshold.Signal != NodeFSAvailable {
		t.Fatalf("%s, %v", d.Threshold, ok)
	}
	if _, next := other.Sync(state, in); next.Threshold.Signal.disk(Dedicated) != "imagefs" || next.Victim != nil || !slices.Contains(next.Reclaim, UnusedImages) {
		t.Errorf("elsewhere: %+v", next)
	}
	for name, shorts := range map[string][2]int64{"one is short": {gib, 50 * gib}, "none is": {50 * gib, 50 * gib}} {
		_, d := pass(shorts[0], shorts[1])
		if _, _, ok := c.Elsewhere(before, d); ok {
			t.Errorf("%s, and there is something elsewhere", name)
		}
	}
}

// TestOneDiskKeepsNoOtherWaiting: nobody has anything on the disk that is most
// urgent; the pod that fills the other one goes.
func TestOneDiskKeepsNoOtherWaiting(t *testing.T) {
	t.Parallel()
	n := newNode(t, "nodefs.available<10Gi,imagefs.available<10Gi").with(Cleave()).settled(Detected{ImageApart: true})
	if d := n.pass(0, Summary{NodeFS: disk(0), ImageFS: disk(gib)}); d.Threshold.Signal != ImageFSAvailable || victim(d) != "pod" || len(d.Choices) != 1 {
		t.Errorf("%s, %s", d.Threshold, victim(d))
	}
	if d := n.pass(10, Summary{NodeFS: disk(0), ImageFS: disk(20 * gib)}); d.Threshold.Signal != NodeFSAvailable || d.NoVictim != "OnlyWhoHelps" {
		t.Errorf("%s, %s", d.Threshold, d.NoVictim)
	}
}

// TestOneDiskDisplacesNoReclaim_GAP15: imagefs is most short, by a hard
// threshold, and no pod has anything there. While pods go for a soft one of
// nodefs, its images go as well, and first.
func TestOneDiskDisplacesNoReclaim_GAP15(t *testing.T) {
	t.Parallel()
	n := newNode(t, "imagefs.available<10Gi", "nodefs.available<20Gi", "nodefs.available=1s").with(Cleave()).settled(Detected{ImageApart: true})
	n.pods, n.stats = nil, nil
	for _, uid := range []string{"p1", "p2", "p3"} {
		n.pods = append(n.pods, Pod{UID: uid, Volumes: []Volume{{Name: "v", Kind: EmptyDirDisk}}})
		n.stats = append(n.stats, PodStats{UID: uid, Volumes: []VolumeStats{{Name: "v", FSStats: FSStats{UsedBytes: bytes(gib)}}}})
	}
	low := Summary{NodeFS: disk(19 * gib), ImageFS: disk(gib)}
	n.pass(0, low)
	d := n.pass(10, low)
	want := []Reclaim{DeadContainers, UnusedImages, OldLogs}
	if victim(d) != "p1" || d.Threshold.Signal != NodeFSAvailable || !slices.Equal(d.Reclaim, want) || d.NeedBytes == nil || *d.NeedBytes != 11*gib {
		t.Errorf("%s, %s, %v", d.Threshold, victim(d), d.Reclaim)
	}
	// Nothing has changed, and so it is as urgent as before.
	if again := n.pass(20, low); !slices.Equal(again.Reclaim, want) {
		t.Errorf("%v", again.Reclaim)
	}
}

func TestOptionInodesByInodes_GAP3_UnmeasuredIsZero_GAP18(t *testing.T) {
	t.Parallel()
	story := func(o Options) string { // T19
		stats := Summary{Pods: []PodStats{usage("A", 5_000_000), usage("B", 10)}}
		return order(o.rank(NodeFSInodesFree, Single, []Pod{request("A", "1Gi"), {UID: "B"}, {UID: "C"}}, stats.podStats()))
	}
	for _, tc := range []struct {
		o    Options
		want string
	}{
		{Options{}, "C B A"},
		{Options{InodesByInodes: true}, "C A B"},
		{Options{UnmeasuredIsZero: true}, "B A C"},
		{Cleave(), "A B C"},
	} {
		if got := story(tc.o); got != tc.want {
			t.Errorf("%+v: %s, want %s", tc.o, got, tc.want)
		}
	}
}

func TestOptionKeepRequests_GAP19(t *testing.T) {
	t.Parallel()
	twice(t, func(o *Options) { o.KeepRequests = true }, func(o Options) string {
		behaved := request("behaved", "10Gi")
		behaved.PodLevel = true
		stats := Summary{Pods: []PodStats{usage("behaved", 9*gib), usage("greedy", gib)}}
		return order(o.rank(NodeFSAvailable, Single, []Pod{behaved, {UID: "greedy"}}, stats.podStats()))
	}, "behaved greedy", "greedy behaved")
}

func TestOptionJudgeOwnFilesystem_GAP16(t *testing.T) {
	t.Parallel()
	lives := func(ok bool) string {
		if ok {
			return "lives"
		}
		return "dies"
	}
	option := func(o *Options) { o.JudgeOwnFilesystem = true }
	twice(t, option, func(o Options) string {
		n := newNode(t, "nodefs.available<10Gi", "nodefs.available<20Gi", "nodefs.available=1h").with(o)
		ok, _ := n.Resolved(n.State, Decision{}, nil)
		if ok {
			return "lives without a reclaim"
		}
		d := n.disk(0, 8*gib)
		ok, _ = n.Resolved(n.State, d, &Summary{NodeFS: disk(15 * gib)})
		return lives(ok)
	}, "dies", "lives")
	elsewhere := func(layout Detected) func(Options) string {
		return func(o Options) string {
			n := newNode(t, "nodefs.available<10Gi,imagefs.available<10Gi").with(o).settled(layout)
			d := n.pass(0, Summary{NodeFS: disk(50 * gib), ImageFS: disk(gib)})
			n.Thresholds[0], n.Thresholds[1] = n.Thresholds[1], n.Thresholds[0] // whatever their order
			ok, _ := n.Resolved(n.State, d, &Summary{NodeFS: disk(gib), ImageFS: disk(50 * gib)})
			return lives(ok)
		}
	}
	twice(t, option, elsewhere(Detected{ImageApart: true}), "dies", "lives")
	twice(t, option, func(o Options) string { // no figures after the reclaim
		n := newNode(t, "nodefs.available<10Gi").with(o)
		ok, _ := n.Resolved(n.State, n.disk(0, gib), nil)
		return lives(ok)
	}, "dies", "lives")
	twice(t, option, func(o Options) string { // still short itself
		n := newNode(t, "nodefs.available<10Gi").with(o)
		ok, _ := n.Resolved(n.State, n.disk(0, gib), &Summary{NodeFS: disk(9 * gib)})
		return lives(ok)
	}, "dies", "dies")
}

func TestOptionWholeContainerLimit_GAP29(t *testing.T) {
	t.Parallel()
	twice(t, func(o *Options) { o.WholeContainerLimit = true }, func(o Options) string { // T16
		pod := Pod{UID: "pod", Containers: []Container{
			{Name: "writer", Limits: Amounts{EphemeralStorage: q("524288000")}}, {Name: "sidecar", Limits: Amounts{EphemeralStorage: q("524288000")}},
		}}
		stats := Summary{Pods: []PodStats{{
			UID:              "pod",
			Containers:       []ContainerStats{{Name: "writer", RootFS: &FSStats{UsedBytes: bytes(734003200)}}, {Name: "sidecar", RootFS: &FSStats{UsedBytes: bytes(0)}}},
			EphemeralStorage: &FSStats{UsedBytes: bytes(734003200)},
		}}}
		list := Config{Options: o}.overLimit(Detected{ImageApart: true}, []Pod{pod}, stats.podStats())
		if len(list) == 0 {
			return "nobody"
		}
		return list[0].Subject
	}, "nobody", "writer")
}

func TestOptionNoInodesNoThreshold_GAP43(t *testing.T) {
	t.Parallel()
	twice(t, func(o *Options) { o.NoInodesNoThreshold = true }, func(o Options) string { // T30
		n := newNode(t, "nodefs.inodesFree<1000").with(o)
		return string(n.pass(0, Summary{NodeFS: &FSStats{InodesFree: bytes(0), Inodes: bytes(0)}}).Outcome)
	}, "pressure", "calm")
}

func TestOptionDoubtImpossible(t *testing.T) {
	t.Parallel()
	twice(t, func(o *Options) { o.DoubtImpossible = true }, func(o Options) string {
		n := newNode(t, "nodefs.available<100Gi").with(o)
		return string(n.pass(0, Summary{NodeFS: &FSStats{AvailableBytes: bytes(20 * gib), CapacityBytes: bytes(10 * gib)}}).Outcome)
	}, "pressure", "calm")
}

// TestOptionDoubtImpossibleOfPods: a layer of 1 EiB on a disk of 100 GiB is a wrong
// figure; the pod goes neither for it nor for its own limit.
func TestOptionDoubtImpossibleOfPods(t *testing.T) {
	t.Parallel()
	option := func(o *Options) { o.DoubtImpossible = true }
	story := func(available int64) func(Options) string {
		return func(o Options) string {
			n := newNode(t, "nodefs.available<10Gi").with(o)
			n.LimitIsolation = true
			n.pods = []Pod{{UID: "wrong", Containers: []Container{{Name: "c", Limits: Amounts{EphemeralStorage: q("200Gi")}}}}, {UID: "large"}}
			n.stats = []PodStats{
				{
					UID: "wrong", EphemeralStorage: &FSStats{UsedBytes: bytes(1 << 60)},
					Containers: []ContainerStats{{Name: "c", RootFS: &FSStats{UsedBytes: bytes(1 << 60)}, Logs: &FSStats{UsedBytes: bytes(1)}}},
				},
				usage("large", 150*gib), // with holes: more than the disk, and believed
			}
			d := n.disk(0, available)
			if *n.stats[0].EphemeralStorage.UsedBytes != 1<<60 || n.stats[0].Containers[0].RootFS == nil {
				t.Error("the input was changed")
			}
			if len(d.Limits) > 0 {
				return d.Limits[0].UID + " for its limit"
			}
			return victim(d)
		}
	}
	twice(t, option, story(50*gib), "wrong for its limit", "nobody")
	twice(t, option, story(gib), "wrong for its limit", "large")
}

// TestTimesThatJumpBack: figures that were acted on are not news a second time
// because older ones, or none, came in between.
func TestTimesThatJumpBack(t *testing.T) {
	t.Parallel()
	at := func(n *node, seconds, measured int) string {
		f := disk(gib).at(start.Add(time.Duration(measured) * time.Second))
		return victim(n.pass(seconds, Summary{NodeFS: f}))
	}
	option := func(o *Options) { o.DoubtImpossible = true }
	twice(t, option, func(o Options) string {
		n := newNode(t, "nodefs.available<10Gi").with(o)
		return at(n, 0, 0) + " " + at(n, 10, -60) + " " + at(n, 20, 0) + " " + at(n, 30, 30)
	}, "pod nobody pod pod", "pod nobody nobody pod")
	twice(t, option, func(o Options) string {
		n := newNode(t, "nodefs.available<10Gi").with(o)
		first := at(n, 0, 0)
		n.pass(10, Summary{})
		return first + " " + at(n, 20, 0) + " " + at(n, 30, 30)
	}, "pod pod pod", "pod nobody pod")
}

func TestOptionContainerFSAtOnce_GAP44(t *testing.T) {
	t.Parallel()
	twice(t, func(o *Options) { o.ContainerFSAtOnce = true }, func(o Options) string {
		n := newNode(t, "nodefs.available<10Gi").with(o)
		return string(n.pass(0, Summary{NodeFS: disk(50 * gib), ContainerFS: disk(gib)}).Outcome)
	}, "calm", "pressure")
}

func TestOptionFollowLayout_GAP6(t *testing.T) {
	t.Parallel()
	option := func(o *Options) { o.FollowLayout = true }
	twice(t, option, func(o Options) string {
		n := newNode(t, "nodefs.available<10Gi,imagefs.available<15Gi").with(o).settled(Detected{ImageApart: true})
		low := Summary{NodeFS: disk(50 * gib), ImageFS: disk(50 * gib), ContainerFS: disk(12 * gib)}
		n.pass(0, low) // imagefs's 15 Gi hold for containerfs
		n.layout = Detected{ImageApart: true, ContainerApart: true}
		n.pass(10, low)
		return string(n.pass(20, low).Outcome) // nodefs's 10 Gi would
	}, "pressure", "calm")
	twice(t, option, func(o Options) string {
		n := newNode(t, "nodefs.available<10Gi").with(o).settled(Detected{})
		_, d := n.Sync(n.State, Input{Now: start, Pods: n.pods, Summary: &Summary{NodeFS: disk(gib)}})
		return string(d.Outcome)
	}, "pressure", "layout unknown")
}

func TestOptionThirdDisk_GAP5(t *testing.T) {
	t.Parallel()
	option := func(o *Options) { o.ThirdDisk = true }
	for _, layout := range []Detected{
		{ImageApart: true, ContainerApart: true, ContainerOffNode: true},
		{ContainerApart: true, ContainerOffNode: true},
	} {
		twice(t, option, func(o Options) string {
			n := newNode(t, "containerfs.available<10%").with(o).settled(layout)
			n.pods = []Pod{{UID: "innocent", Volumes: []Volume{{Name: "v", Kind: EmptyDirDisk}}}, {UID: "writer"}}
			n.stats = []PodStats{{UID: "innocent", Volumes: []VolumeStats{{Name: "v", FSStats: FSStats{UsedBytes: bytes(60 * gib)}}}}, usage("writer", 50*gib)}
			if layout.ImageApart && !o.ThirdDisk {
				n.Thresholds = thresholds(t, "nodefs.available<10%") // which the kubelet takes for containerfs
			}
			d := n.pass(0, Summary{NodeFS: disk(90 * gib), ImageFS: disk(90 * gib), ContainerFS: disk(gib)})
			return victim(d)
		}, "innocent", "writer")
	}
	for _, tc := range []struct {
		layout                 Layout
		node, image, container int
	}{{Separate, 0, 1, 1}, {ContainersAlone, 1, 1, 1}} {
		got := [3]int{len(ReclaimFor(NodeFSAvailable, tc.layout)), len(ReclaimFor(ImageFSAvailable, tc.layout)), len(ReclaimFor(ContainerFSAvailable, tc.layout))}
		if got != [3]int{tc.node, tc.image, tc.container} || ReclaimFor(ContainerFSAvailable, tc.layout)[0] != DeadContainers || ReclaimFor(ImageFSInodesFree, tc.layout)[0] != UnusedImages {
			t.Errorf("%s: %v", tc.layout, got)
		}
	}
	if together(NodeFSAvailable, ImageFSAvailable, Separate) || !together(NodeFSAvailable, ImageFSInodesFree, ContainersAlone) || together(NodeFSAvailable, ContainerFSAvailable, ContainersAlone) ||
		!together(NodeFSAvailable, ContainerFSAvailable, Split) || !together(ImageFSAvailable, ContainerFSAvailable, Dedicated) || together(NodeFSAvailable, ImageFSAvailable, Dedicated) {
		t.Error("signals are taken for the wrong filesystems")
	}
}

func TestOptionOldLogs_GAP1(t *testing.T) {
	t.Parallel()
	option := func(o *Options) { o.OldLogs = true }
	plan := func(signal Signal, layout Layout) func(Options) string {
		return func(o Options) string {
			var out []string
			for _, r := range o.reclaim(signal, layout) {
				out = append(out, string(r))
			}
			return strings.Join(out, ", ")
		}
	}
	twice(t, option, plan(NodeFSAvailable, Dedicated), "", "dead containers, old logs")
	twice(t, option, plan(NodeFSInodesFree, Separate), "", "dead containers, old logs")
	twice(t, option, plan(ContainerFSAvailable, Split), "dead containers", "dead containers, old logs")
	twice(t, option, plan(ImageFSAvailable, Single), "dead containers, unused images", "dead containers, old logs, unused images")
	twice(t, option, plan(NodeFSAvailable, ContainersAlone), "unused images", "dead containers, old logs, unused images")
	twice(t, option, plan(ImageFSAvailable, Dedicated), "dead containers, unused images", "dead containers, unused images")
	twice(t, option, plan(MemoryAvailable, Single), "", "")
	twice(t, option, plan(NodeFSAvailable, Inert), "", "")

	n := newNode(t, "nodefs.available<10Gi").with(Cleave()).settled(Detected{ImageApart: true})
	d := n.disk(0, gib)
	if ok, _ := n.Resolved(n.State, d, &Summary{NodeFS: disk(11 * gib)}); !ok || len(d.Reclaim) != 2 {
		t.Errorf("the logs were enough, and the pod dies: %v", d.Reclaim)
	}
}

func TestOptionCountImages_GAP2(t *testing.T) {
	t.Parallel()
	large, small := usage("large-image", 0), usage("small-image", gib)
	large.Images, small.Images = &FSStats{UsedBytes: bytes(40 * gib)}, &FSStats{UsedBytes: bytes(gib)}
	stats := Summary{Pods: []PodStats{large, small}}
	rankOn := func(signal Signal, layout Layout) func(Options) string {
		return func(o Options) string {
			return order(o.rank(signal, layout, []Pod{{UID: "large-image"}, {UID: "small-image"}}, stats.podStats()))
		}
	}
	option := func(o *Options) { o.CountImages = true }
	twice(t, option, rankOn(ImageFSAvailable, Split), "large-image=small-image", "large-image small-image")
	twice(t, option, rankOn(ContainerFSAvailable, Dedicated), "small-image large-image", "large-image small-image")
	twice(t, option, rankOn(NodeFSAvailable, Single), "small-image large-image", "large-image small-image")
	twice(t, option, rankOn(NodeFSAvailable, Split), "small-image large-image", "small-image large-image")
}

// TestEveryOptionIsDocumented holds options, tests and docs/engine.md together.
func TestEveryOptionIsDocumented(t *testing.T) {
	t.Parallel()
	docs, err := os.ReadFile("../docs/engine.md")
	if err != nil {
		t.Fatal(err)
	}
	var tests []string
	for _, file := range []string{"options_test.go", "bounds_test.go"} {
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range parsed.Decls {
			if f, ok := d.(*ast.FuncDecl); ok {
				tests = append(tests, f.Name.Name)
			}
		}
	}
	all := reflect.ValueOf(Cleave())
	for i := range all.NumField() {
		name := all.Type().Field(i).Name
		if all.Field(i).Bool() == (name == "Batch") { // Batch is off by default
			t.Errorf("%s: the cleave profile has it wrong", name)
		}
		if !strings.Contains(string(docs), "| `"+name+"` |") {
			t.Errorf("docs/engine.md does not tell of %s", name)
		}
		if !strings.Contains(strings.Join(tests, " "), name) {
			t.Errorf("no test has %s in its name", name)
		}
	}
}
