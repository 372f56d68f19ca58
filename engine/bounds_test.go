package engine

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"
)

// looks plays a node: one pass for each amount available on nodefs, ten seconds
// apart, with so much that is nobody's on it.
func (n *node) looks(t *testing.T, passes ...[2]int64) Decision {
	t.Helper()
	var d Decision
	for i, p := range passes {
		s := Summary{NodeFS: disk(p[0]), Pods: n.stats}
		in := Input{
			Now: start.Add(time.Duration(i) * 10 * time.Second), Layout: &n.layout, Pods: n.pods, Summary: &s,
			Unattributed: []Unattributed{{Signal: NodeFSAvailable, Bytes: p[1], Who: []Suspect{{Name: "backup", Bytes: p[1]}}}},
		}
		n.State, d = n.Sync(n.State, in)
	}
	return d
}

func TestOptionHoldFire_GAP9(t *testing.T) {
	t.Parallel()
	story := func(nobodys int64, left int64) func(Options) string {
		return func(o Options) string {
			n := newNode(t, "nodefs.available<10Gi").with(o)
			d := n.looks(t, [2]int64{30 * gib, 5 * gib}, [2]int64{left, 5*gib + nobodys})
			return victim(d) + " " + d.NoVictim
		}
	}
	option := func(o *Options) { o.HoldFire = true }
	twice(t, option, story(20*gib, 8*gib), "pod ", "nobody HoldFire")
	twice(t, option, story(11*gib, 8*gib), "pod ", "pod ") // 11 of 22 GiB: not more than half
	twice(t, option, story(12*gib, 8*gib), "pod ", "nobody HoldFire")
	twice(t, option, story(24*gib, 4*gib), "pod ", "pod ") // below the floor, half of 10 GiB

	n := newNode(t, "nodefs.available<10Gi").with(Cleave())
	d := n.looks(t, [2]int64{30 * gib, 0}, [2]int64{8 * gib, 20 * gib})
	if h := d.Hold; h == nil || h.GrewBytes != 22*gib || h.NobodysBytes != 20*gib || h.Who[0].Name != "backup" || !h.Since.Equal(start) {
		t.Errorf("%+v", d.Hold)
	}
	// It still says so when it acts.
	d = n.looks(t, [2]int64{30 * gib, 0}, [2]int64{3 * gib, 27 * gib})
	if d.Victim == nil || !d.Hold.Holds {
		t.Errorf("%s, %+v", victim(d), d.Hold)
	}
	// What is not known holds nothing.
	n = newNode(t, "nodefs.available<10Gi").with(Cleave())
	if d := n.disk(0, gib*8); d.Victim == nil || d.Hold != nil {
		t.Errorf("%+v", d)
	}
	// Reclaim goes on all the same.
	n = newNode(t, "nodefs.available<10Gi").with(Cleave())
	if d := n.looks(t, [2]int64{30 * gib, 0}, [2]int64{8 * gib, 20 * gib}); len(d.Reclaim) == 0 {
		t.Error("nothing is reclaimed")
	}
}

// TestHoldFireUntilAccountsHaveCaughtUp_GAP9: what one pod has written in the
// last second is nobody's yet, and then the other seems to be the larger one.
func TestHoldFireUntilAccountsHaveCaughtUp_GAP9(t *testing.T) {
	t.Parallel()
	type pod struct {
		bytes    int64
		priority int32
	}
	play := func(nobodys int64, met time.Duration, pods ...pod) string {
		n := newNode(t, "nodefs.available<10Gi").with(Cleave())
		n.pods, n.stats = nil, nil
		for i, p := range pods {
			uid := fmt.Sprintf("pod-%d", i)
			n.pods = append(n.pods, Pod{UID: uid, Priority: &p.priority})
			n.stats = append(n.stats, usage(uid, p.bytes))
		}
		var d Decision
		for _, look := range []struct {
			at            time.Duration
			left, nobodys int64
		}{{0, 30 * gib, gib}, {time.Minute, 9 * gib, gib + nobodys}, {time.Minute + met, 9 * gib, gib + nobodys}} {
			s := Summary{NodeFS: disk(look.left), Pods: n.stats}
			n.State, d = n.Sync(n.State, Input{
				Now: start.Add(look.at), Layout: &n.layout, Pods: n.pods, Summary: &s,
				Unattributed: []Unattributed{{Signal: NodeFSAvailable, Bytes: look.nobodys}},
			})
		}
		return victim(d) + " " + d.NoVictim
	}
	for name, tc := range map[string]struct {
		nobodys int64
		met     time.Duration
		pods    []pod
		want    string
	}{
		"it may be the second":             {3 * gib, time.Second, []pod{{8 * gib, 0}, {6 * gib, 0}}, "nobody HoldFire"},
		"it can't be":                      {3 * gib, time.Second, []pod{{10 * gib, 0}, {6 * gib, 0}}, "pod-0 "},
		"accounts have caught up":          {3 * gib, 3 * time.Second, []pod{{8 * gib, 0}, {6 * gib, 0}}, "pod-0 "},
		"priority decides, not bytes":      {3 * gib, time.Second, []pod{{8 * gib, 0}, {6 * gib, 9}}, "pod-0 "},
		"there is no second":               {3 * gib, time.Second, []pod{{8 * gib, 0}}, "pod-0 "},
		"nothing is nobody's but at first": {0, time.Second, []pod{{8 * gib, 0}, {6 * gib, 0}}, "pod-0 "},
	} {
		if got := play(tc.nobodys, tc.met, tc.pods...); got != tc.want {
			t.Errorf("%s: %q, want %q", name, got, tc.want)
		}
	}
}

// storm evicts the only pod of an owner again and again, once a minute, and
// says at which minutes it went.
func storm(t *testing.T, o Options, owner string, minutes int, available int64) string {
	t.Helper()
	n := newNode(t, "nodefs.available<10Gi").with(o)
	var went []string
	for i := range minutes {
		n.pods = []Pod{{UID: fmt.Sprintf("pod-%d", i), Owner: owner}}
		n.stats = []PodStats{usage(n.pods[0].UID, gib)}
		d := n.disk(60*i, available)
		if d.Victim != nil {
			went = append(went, fmt.Sprint(i))
			n.State = n.Evicted(*d.Victim, start.Add(time.Duration(i)*time.Minute))
		}
	}
	return strings.Join(went, " ")
}

func TestOptionBreakStorms(t *testing.T) {
	t.Parallel()
	option := func(o *Options) { o.BreakStorms = true }
	story := func(owner string, minutes int) func(Options) string {
		return func(o Options) string { return storm(t, o, owner, minutes, 8*gib) }
	}
	// Rests of 1, 2 and 4 minutes, then the cap of 4 within an hour.
	twice(t, option, story("ReplicaSet web", 9), "0 1 2 3 4 5 6 7 8", "0 1 3 7")
	n := strings.Fields(storm(t, Cleave(), "ReplicaSet web", 75, 8*gib))
	if got := strings.Join(n, " "); got != "0 1 3 7 60 63 67 71" {
		t.Errorf("went at %s", got)
	}
	// Who has no owner is not made anew; only the node's cap holds.
	if got := len(strings.Fields(storm(t, Cleave(), "", 50, 8*gib))); got != 30 {
		t.Errorf("%d of 50 went", got)
	}

	// While the next one has to wait nobody goes in its place, above the floor;
	// below it the next one does.
	for _, tc := range []struct {
		available int64
		want      string
	}{{8 * gib, "nobody"}, {4 * gib, "innocent"}} {
		n := newNode(t, "nodefs.available<10Gi").with(Cleave())
		n.pods = []Pod{{UID: "again", Owner: "ReplicaSet web"}, {UID: "innocent"}}
		n.stats = []PodStats{usage("again", gib), usage("innocent", 1)}
		n.State = n.Evicted(Eviction{UID: "before", Owner: "ReplicaSet web"}, start)
		d := n.disk(30, tc.available)
		if victim(d) != tc.want || len(d.Barred) != 1 || d.Barred[0].Why != BackOff || !d.Barred[0].Until.Equal(start.Add(time.Minute)) {
			t.Errorf("%d: %s, %+v", tc.available, victim(d), d.Barred)
		}
	}

	// Pods above their own limits are no exception.
	limited := newNode(t, "nodefs.available<1Gi").with(Cleave())
	limited.LimitIsolation = true
	limited.pods = []Pod{{UID: "pod", Owner: "ReplicaSet web", Containers: []Container{{Name: "c", Limits: Amounts{EphemeralStorage: q("1Gi")}}}}}
	limited.stats = []PodStats{{UID: "pod", EphemeralStorage: &FSStats{UsedBytes: bytes(2 * gib)}}}
	if d := limited.disk(0, 50*gib); len(d.Limits) != 1 {
		t.Fatalf("%+v", d)
	}
	limited.State = limited.Evicted(Eviction{UID: "before", Owner: "ReplicaSet web"}, start)
	if d := limited.disk(10, 50*gib); len(d.Limits) != 0 || len(d.Barred) != 1 {
		t.Errorf("%+v", d)
	}
}

func TestOptionAwaitFreed_GAP17_GAP32(t *testing.T) {
	t.Parallel()
	story := func(seconds int, freed, available int64) func(Options) string {
		return func(o Options) string {
			n := newNode(t, "nodefs.available<10Gi").with(o)
			n.disk(0, 8*gib)
			n.State = n.Freeing(NodeFSAvailable, freed, 8*gib, start)
			d := n.disk(seconds, available)
			return victim(d) + " " + d.NoVictim
		}
	}
	option := func(o *Options) { o.AwaitFreed = true }
	twice(t, option, story(1, 5*gib, 8*gib), "pod ", "nobody AwaitFreed")
	twice(t, option, story(29, 5*gib, 9*gib), "pod ", "nobody AwaitFreed") // 1 of 5 GiB has arrived
	twice(t, option, story(30, 5*gib, 8*gib), "pod ", "pod ")              // waited long enough
	twice(t, option, story(1, gib, 8*gib), "pod ", "pod ")                 // it would not be enough

	n := newNode(t, "nodefs.available<10Gi").with(Cleave())
	d := n.disk(0, 8*gib)
	n.State = n.Freeing(NodeFSAvailable, 5*gib, 8*gib, start)
	if ok, still := n.Resolved(n.State, d, &Summary{NodeFS: disk(8 * gib)}); !ok {
		t.Errorf("the pod dies for space that is arriving: %v", still)
	}
	if n.disk(5, 14*gib); len(n.Freed) != 0 {
		t.Errorf("it has arrived and is waited for: %+v", n.Freed)
	}
}

// TestArrivalsCountOnce_GAP17: twice 5 GiB were set free at 2 GiB, so 12 will be
// there. However much of it has arrived, and whenever it was noted, nobody goes
// while the rest is waited for.
func TestArrivalsCountOnce_GAP17(t *testing.T) {
	t.Parallel()
	for _, second := range []int64{2, 3, 5} { // what was there when the second was set free
		for _, looks := range [][]int64{{2}, {5}, {6}, {7}, {8}, {9}, {6, 7, 8, 9}} {
			n := newNode(t, "nodefs.available<10Gi").with(Cleave())
			n.disk(0, 2*gib)
			n.State = n.Freeing(NodeFSAvailable, 5*gib, 2*gib, start)
			n.State = n.Freeing(ImageFSAvailable, 5*gib, second*gib, start.Add(time.Second)) // one disk, by its other name
			for i, available := range looks {
				low := Summary{NodeFS: disk(available * gib), ImageFS: disk(available * gib)}
				d := n.pass(2+i, low)
				if want := (12 - available) * gib; d.Victim != nil || d.NoVictim != "AwaitFreed" || d.AwaitedBytes != want {
					t.Errorf("noted at 2 and %d, %v, look %d: %s goes, %d awaited of %d", second, looks, i, victim(d), d.AwaitedBytes, want)
				}
			}
		}
	}

	// The first is waited for no more; what the second has is still to come.
	n := newNode(t, "nodefs.available<10Gi").with(Cleave())
	n.disk(0, 2*gib)
	n.State = n.Freeing(NodeFSAvailable, 5*gib, 2*gib, start)
	n.State = n.Freeing(NodeFSAvailable, 5*gib, 2*gib, start.Add(20*time.Second))
	if d := n.disk(35, 7*gib); d.AwaitedBytes != 5*gib || len(n.Freed) != 1 {
		t.Errorf("%d awaited, %+v", d.AwaitedBytes, n.Freed)
	}
	if d := n.disk(50, 7*gib); victim(d) != "pod" {
		t.Errorf("it never came, and %s goes", victim(d))
	}
}

// TestGAP17_WhatIsThereIsNotAwaited: a pod's 5 GiB came back and others took
// them; what another pod had on that disk is still to come.
func TestGAP17_WhatIsThereIsNotAwaited(t *testing.T) {
	t.Parallel()
	n := newNode(t, "nodefs.available<10Gi").with(Cleave())
	n.disk(0, 2*gib)
	n.State = n.FreeingOf("a", NodeFSAvailable, 5*gib, 2*gib, start)
	n.State = n.FreeingOf("b", ImageFSAvailable, 9*gib, 2*gib, start) // one disk, by its other name
	low := Summary{NodeFS: disk(2 * gib), ImageFS: disk(2 * gib)}
	if d := n.pass(1, low); d.AwaitedBytes != 14*gib {
		t.Errorf("at first %d awaited: %+v", d.AwaitedBytes, n.Freed)
	}
	if n.State = n.Arrived("somebody"); n.pass(2, low).AwaitedBytes != 14*gib {
		t.Errorf("another pod's arrival counts: %+v", n.Freed)
	}
	// 5 of 14 are there, and others have them: with 9 more it would be 11.
	n.State = n.Arrived("a")
	low = Summary{NodeFS: disk(7 * gib), ImageFS: disk(7 * gib)}
	if d := n.pass(3, low); d.AwaitedBytes != 9*gib || len(n.Freed) != 1 {
		t.Errorf("%d awaited of what the other had: %+v", d.AwaitedBytes, n.Freed)
	}
	n.State = n.Arrived("b")
	if d := n.pass(4, low); victim(d) != "pod" || len(n.Freed) != 0 {
		t.Errorf("all is there, and %s goes: %+v", victim(d), n.Freed)
	}
	n.State = n.Freeing(NodeFSAvailable, 5*gib, 7*gib, start.Add(4*time.Second)).Arrived("")
	if d := n.pass(5, low); d.AwaitedBytes != 5*gib {
		t.Errorf("what no pod had is not awaited: %+v", n.Freed)
	}
}

func TestOptionStopAtTarget_GAP24(t *testing.T) {
	t.Parallel()
	twice(t, func(o *Options) { o.StopAtTarget = true }, func(o Options) string {
		n := newNode(t, "nodefs.available<10Gi", "", "", "nodefs.available=1Gi").with(o)
		d := n.disk(0, 8*gib)
		if d.NeedBytes == nil {
			return "all"
		}
		return fmt.Sprint(*d.NeedBytes / gib)
	}, "all", "5") // 2 short, 1 of minimum reclaim, 2 so that it is not short again at once

	n := newNode(t, "nodefs.inodesFree<1000").with(Cleave())
	if d := n.pass(0, Summary{NodeFS: &FSStats{InodesFree: bytes(1), Inodes: bytes(9000)}}); d.NeedBytes != nil || d.Victim == nil {
		t.Errorf("inodes: %+v", d)
	}
}

func TestOptionForecast_GAP28(t *testing.T) {
	t.Parallel()
	twice(t, func(o *Options) { o.Forecast = true }, func(o Options) string {
		n := newNode(t, "nodefs.available<10Gi").with(o)
		var d Decision
		for i := range int64(6) {
			d = n.disk(int(10*i), (20-i)*gib)
		}
		return fmt.Sprint(d.Outcome, " ", slices.Contains(d.Reclaim, UnusedImages), " ", victim(d))
	}, "calm false nobody", "foreseen true nobody")

	slow := newNode(t, "nodefs.available<10Gi").with(Cleave())
	slow.Horizon = 49 * time.Second
	for i := range int64(6) {
		if d := slow.disk(int(10*i), (20-i)*gib); d.Outcome != Calm {
			t.Errorf("beyond the horizon: %+v", d)
		}
	}
}

func TestOptionOnlyWhoHelps_GAP18(t *testing.T) {
	t.Parallel()
	option := func(o *Options) { o.OnlyWhoHelps = true }
	story := func(stats ...PodStats) func(Options) string {
		return func(o Options) string {
			n := newNode(t, "nodefs.available<10Gi").with(o)
			n.stats = stats
			d := n.disk(0, gib)
			return victim(d) + " " + d.NoVictim
		}
	}
	twice(t, option, story(usage("pod", 0)), "pod ", "nobody OnlyWhoHelps")
	twice(t, option, story(usage("other", gib)), "pod ", "nobody OnlyWhoHelps")
	twice(t, option, story(usage("pod", 1)), "pod ", "pod ")
}

func TestOptionBatch_GAP31(t *testing.T) {
	t.Parallel()
	story := func(o Options) string {
		n := newNode(t, "nodefs.available<10Gi").with(o)
		n.pods = []Pod{{UID: "a"}, {UID: "b"}, {UID: "c"}}
		n.stats = []PodStats{usage("a", 3*gib), usage("b", 2*gib), usage("c", gib)}
		d := n.disk(0, 6*gib)
		out := victim(d)
		for _, e := range d.Further {
			out += " " + e.UID
		}
		return out
	}
	if got := story(Options{}); got != "a" {
		t.Errorf("kubelet: %s", got)
	}
	if got := story(Cleave()); got != "a" {
		t.Errorf("cleave has it off: %s", got)
	}
	if got := story(Options{Batch: true}); got != "a b" {
		t.Errorf("4 GiB are short: %s", got)
	}
}

// TestBatchTakesWhoHelps_GAP31: pods that have nothing there, or of which that is
// not known, don't go by the dozen because none of them makes up what is short.
func TestBatchTakesWhoHelps_GAP31(t *testing.T) {
	t.Parallel()
	n := newNode(t, "nodefs.available<10Gi").with(Options{Batch: true})
	n.pods = []Pod{{UID: "unknown-1"}, {UID: "unknown-2"}, {UID: "nothing"}, {UID: "a"}, {UID: "b"}, {UID: "c"}}
	n.stats = []PodStats{usage("nothing", 0), usage("a", 3*gib), usage("b", 2*gib), usage("c", gib)}
	d := n.disk(0, 6*gib)
	out := victim(d)
	for _, e := range d.Further {
		out += " " + e.UID
	}
	if out != "unknown-1 a b" { // the first is the kubelet's
		t.Errorf("%s go", out)
	}
}

// TestBatchKeepsTheBounds_GAP31: what goes in one pass counts for the caps like
// what goes in several.
func TestBatchKeepsTheBounds_GAP31(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name   string
		config func(*Config)
		owner  func(int) string
		want   int
	}{
		{"back-off", func(*Config) {}, func(int) string { return "ReplicaSet web" }, 1},
		{"owner's cap", func(c *Config) { c.BackOff = 1; c.OwnerPerHour = 2 }, func(int) string { return "ReplicaSet web" }, 1},
		{"node's cap", func(c *Config) { c.PerHour = 3 }, func(int) string { return "" }, 3},
		{"no bound is reached", func(*Config) {}, func(i int) string { return fmt.Sprint("Job ", i) }, 9},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			o := Cleave()
			o.Batch = true
			n := newNode(t, "nodefs.available<10Gi").with(o)
			tc.config(&n.Config)
			n.pods, n.stats = nil, nil
			for i := range 12 {
				uid := fmt.Sprintf("pod-%02d", i)
				n.pods = append(n.pods, Pod{UID: uid, Owner: tc.owner(i)})
				n.stats = append(n.stats, usage(uid, gib))
			}
			d := n.disk(0, gib)
			if got := 1 + len(d.Further); d.Victim == nil || got != tc.want {
				t.Errorf("%d go at once, want %d: %v", got, tc.want, d.Barred)
			}
		})
	}
}

// TestHoldFireWhateverTheOrder_GAP9: two signals of one disk, of which one tells
// that the growth is a backup's. Each order comes to the same.
func TestHoldFireWhateverTheOrder_GAP9(t *testing.T) {
	t.Parallel()
	story := func(turned bool) Decision {
		n := newNode(t, "nodefs.available<10Gi").with(Cleave())
		var d Decision
		for i, p := range [][2]int64{{30 * gib, 0}, {8 * gib, 20 * gib}} {
			in := Input{
				Now: start.Add(time.Duration(i) * 10 * time.Second), Layout: &n.layout, Pods: n.pods,
				Summary:      &Summary{NodeFS: disk(p[0]), ImageFS: disk(p[0]), Pods: n.stats},
				Unattributed: []Unattributed{{Signal: NodeFSAvailable, Bytes: p[1]}, {Signal: ImageFSAvailable}, {Signal: NodeFSAvailable, Bytes: 1}}, // the larger counts
			}
			if turned {
				slices.Reverse(in.Unattributed)
			}
			n.State, d = n.Sync(n.State, in)
		}
		return d
	}
	for _, turned := range []bool{false, true} {
		if d := story(turned); d.NoVictim != "HoldFire" || d.Hold.NobodysBytes != 20*gib-1 {
			t.Errorf("turned %t: %s goes, %+v", turned, victim(d), d.Hold)
		}
	}
}

// TestHoldFireMoreFreeNoMoreVictims_GAP9: what holds fire with little available
// holds it with more.
func TestHoldFireMoreFreeNoMoreVictims_GAP9(t *testing.T) {
	t.Parallel()
	held := false
	for available := int64(4); available < 10; available++ {
		n := newNode(t, "nodefs.available<10Gi").with(Cleave())
		d := n.looks(t, [2]int64{7 * gib, 0}, [2]int64{available * gib, gib})
		if held && d.Victim != nil {
			t.Errorf("with %d GiB %s goes, with less nobody", available, victim(d))
		}
		held = held || d.NoVictim == "HoldFire"
	}
	if !held {
		t.Error("nothing is held at all")
	}
}

// TestNeedBytesSaturates_GAP24: a threshold near the largest number asks for all,
// not for less than nothing.
func TestNeedBytesSaturates_GAP24(t *testing.T) {
	t.Parallel()
	n := newNode(t, "nodefs.available<9223372036854775807", "", "", "nodefs.available=1Ei").with(Cleave())
	if d := n.disk(0, gib); d.NeedBytes == nil || *d.NeedBytes != math.MaxInt64 {
		t.Errorf("%+v", d.NeedBytes)
	}
}

// TestStormBoundsOutliveTheClock: a clock that is set back does not let a storm
// begin anew.
func TestStormBoundsOutliveTheClock(t *testing.T) {
	t.Parallel()
	n := newNode(t, "nodefs.available<10Gi").with(Cleave())
	n.pods = []Pod{{UID: "pod", Owner: "ReplicaSet web"}}
	for i := range 4 {
		n.State = n.Evicted(Eviction{UID: "before", Owner: "ReplicaSet web"}, start.Add(time.Duration(i)*10*time.Minute))
	}
	n.disk(31*60, 50*gib)
	back := -24 * 60 * 60
	d := n.disk(back, 8*gib)
	if d.Victim != nil || len(d.Barred) != 1 || d.Barred[0].Why != OwnerPerHour || len(n.Gone) != 4 {
		t.Errorf("%s goes, %+v", victim(d), d.Barred)
	}
	if d := n.disk(back+3600, 8*gib); d.Victim == nil {
		t.Errorf("an hour later it is still barred: %+v", d.Barred)
	}
}
