package engine

import (
	"slices"
	"testing"
	"time"
)

func TestSYN2_NothingToWatch(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	wantOutcome(t, n.disk(0, 0), Off)
	if n.State.Layout != nil {
		t.Error("the layout was detected for nothing")
	}
	n.LimitIsolation = true
	wantOutcome(t, n.disk(0, 0), Calm)
}

func TestSYN3_LAY8_LayoutIsKept(t *testing.T) {
	t.Parallel()
	n := newNode(t, "nodefs.available<10Gi")
	_, d := n.Sync(n.State, Input{Now: start, Summary: &Summary{NodeFS: disk(0)}})
	wantOutcome(t, d, LayoutUnknown)
	n.layout = Detected{ImageApart: true}
	n.disk(10, 50*gib)
	n.layout = Detected{} // repaired, but nobody looks again
	n.disk(20, 50*gib)
	if got := n.State.Layout.Layout(); got != Dedicated {
		t.Errorf("layout %s, want that of the first answer", got)
	}
}

func TestSYN7_StrictlyLess(t *testing.T) {
	t.Parallel()
	n := newNode(t, "nodefs.available<10Gi", "", "", "nodefs.available=500Mi")
	wantOutcome(t, n.disk(0, 10737418240), Calm) // minimum reclaim does not matter yet
	wantOutcome(t, n.disk(10, 10737418239), Pressure)
}

func TestSYN8_MinReclaimIsSticky(t *testing.T) {
	t.Parallel()
	n := newNode(t, "nodefs.available<10Gi", "", "", "nodefs.available=500Mi")
	wantOutcome(t, n.disk(0, 5*gib), Pressure)
	wantOutcome(t, n.disk(10, 11261706239), Pressure)
	wantOutcome(t, n.disk(20, 11261706240), Calm)
	wantOutcome(t, n.disk(30, 11261706239), Calm)
}

func TestSYN9_SameThreshold(t *testing.T) {
	t.Parallel()
	a := Threshold{Signal: NodeFSAvailable, Value: Value{Quantity: q("10Gi")}}
	for _, tc := range []struct {
		name   string
		change func(*Threshold)
		want   bool
	}{
		{"other spelling", func(x *Threshold) { x.Value.Quantity = q("10737418240") }, true},
		{"other minimum reclaim", func(x *Threshold) { x.MinReclaim = &Value{Share: 1} }, true},
		{"other signal", func(x *Threshold) { x.Signal = ImageFSAvailable }, false},
		{"other grace", func(x *Threshold) { x.Grace = 1 }, false},
		{"other value", func(x *Threshold) { x.Value.Quantity = q("10737418241") }, false},
		{"share", func(x *Threshold) { x.Value = Value{Share: 0.1} }, false},
	} {
		b := a
		tc.change(&b)
		if got := a.Same(b); got != tc.want {
			t.Errorf("%s: same is %t", tc.name, got)
		}
	}
	n := newNode(t, "nodefs.available<10Gi", "", "", "nodefs.available=500Mi")
	n.disk(0, gib)
	if n.disk(10, gib); len(n.Met) != 1 {
		t.Errorf("met and not yet resolved are counted apart: %v", n.Met)
	}
}

func TestSYN10_GraceStartsAnewAfterABreak(t *testing.T) {
	t.Parallel()
	n := newNode(t, "", "nodefs.available<10Gi", "nodefs.available=90s")
	for at := 0; at <= 70; at += 10 {
		wantOutcome(t, n.disk(at, gib), Calm)
	}
	n.pass(80, Summary{}) // not observed
	for at := 90; at < 180; at += 10 {
		wantOutcome(t, n.disk(at, gib), Calm)
	}
	wantOutcome(t, n.disk(180, gib), Pressure)
}

func TestSYN11_ConditionBeforeGrace(t *testing.T) {
	t.Parallel()
	n := newNode(t, "", "nodefs.available<10Gi", "nodefs.available=1h")
	wantOutcome(t, n.disk(0, gib), Calm)
	wantPressure(t, n.State, true)
}

func TestSYN12_SYN13_TransitionPeriod(t *testing.T) {
	t.Parallel()
	n := newNode(t, "nodefs.available<10Gi")
	n.disk(-10, gib)
	n.disk(0, gib) // last met
	n.disk(299, 50*gib)
	wantPressure(t, n.State, true)
	n.disk(300, 50*gib)
	wantPressure(t, n.State, false)

	none := newNode(t, "nodefs.available<10Gi")
	none.TransitionPeriod = 0
	wantOutcome(t, none.disk(0, gib), Pressure)
	wantPressure(t, none.State, false)
}

func TestSYN14_GraceIsReachedWithEquality(t *testing.T) {
	t.Parallel()
	n := newNode(t, "", "nodefs.available<10Gi", "nodefs.available=90s")
	n.disk(0, gib)
	wantOutcome(t, n.disk(89, gib), Calm)
	wantOutcome(t, n.disk(90, gib), Pressure)
}

func TestSYN15_StateIsForTheNextPassOnly(t *testing.T) {
	t.Parallel()
	n := newNode(t, "nodefs.available<10Gi")
	n.disk(0, gib)
	before := n.State
	met, seen := slices.Clone(before.Met), len(before.ConditionSeen)
	n.disk(10, 50*gib)
	if len(before.Met) != len(met) || before.Met[0].Since != met[0].Since || len(before.ConditionSeen) != seen {
		t.Error("a pass changed the state that it was given")
	}
	if len(n.Met) != 0 {
		t.Errorf("still met: %v", n.Met)
	}
}

func TestSYN16_StaleFigures(t *testing.T) {
	t.Parallel()
	look := func(n *node, seconds int, measured time.Time) Decision {
		return n.pass(seconds, Summary{NodeFS: disk(gib).at(measured)})
	}
	n := newNode(t, "nodefs.available<10Gi")
	wantOutcome(t, look(n, 0, start), Pressure)
	wantOutcome(t, look(n, 10, start), Calm)
	wantPressure(t, n.State, true)
	wantOutcome(t, look(n, 20, start.Add(time.Second)), Pressure)
	wantOutcome(t, look(n, 30, start.Add(-time.Hour)), Calm) // back in time
	wantOutcome(t, look(n, 40, time.Time{}), Pressure)       // unknown counts as new
	n.pass(50, Summary{})
	wantOutcome(t, look(n, 60, start), Pressure) // nothing before it
}

func TestSYN17_OneSlowScanStopsOnlyItsSignal(t *testing.T) {
	t.Parallel()
	n := newNode(t, "nodefs.available<10Gi,imagefs.available<10Gi")
	pass := func(seconds int) Decision {
		now := start.Add(time.Duration(seconds) * time.Second)
		return n.pass(seconds, Summary{NodeFS: disk(gib).at(now), ImageFS: disk(gib).at(start)})
	}
	if d := pass(0); len(d.Due) != 2 {
		t.Fatalf("due %v", d.Due)
	}
	if d := pass(10); len(d.Due) != 1 || d.Due[0].Signal != NodeFSAvailable {
		t.Errorf("due %v, want nodefs alone: imagefs is as old as before", d.Due)
	}
}

func TestSYN18_LimitsFirst(t *testing.T) {
	t.Parallel()
	n := newNode(t, "nodefs.available<10Gi")
	n.LimitIsolation = true
	n.pods = []Pod{{UID: "a", Containers: []Container{{Name: "c", Limits: Amounts{EphemeralStorage: q("1Gi")}}}}}
	n.stats = []PodStats{{UID: "a", EphemeralStorage: &FSStats{UsedBytes: bytes(2 * gib)}}}
	d := n.disk(0, gib)
	wantOutcome(t, d, OverLimit)
	if d.Victim != nil || len(d.Reclaim) > 0 {
		t.Errorf("thresholds are handled as well: %+v", d)
	}
	wantPressure(t, n.State, true)
}

func TestSYN19_SYN21_OneThresholdAtATime(t *testing.T) {
	t.Parallel()
	n := newNode(t, "nodefs.available<10Gi,imagefs.available<10Gi")
	wantOutcome(t, n.disk(0, 50*gib), Calm)
	d := n.pass(10, Summary{NodeFS: disk(gib), ImageFS: disk(gib)})
	if len(d.Due) != 2 || d.Threshold.Signal != NodeFSAvailable || d.Victim == nil {
		t.Errorf("%+v", d)
	}
}

func TestSYN20_MemoryFirstElseAny(t *testing.T) {
	t.Parallel()
	n := newNode(t, "nodefs.available<10Gi,imagefs.available<10Gi,memory.available<1Gi,nodefs.inodesFree<10,pid.available<10")
	full := Summary{NodeFS: disk(gib), ImageFS: disk(gib), Processes: &ProcessLimits{MaxPID: ptr[int64](100), RunningCount: ptr[int64](99)}}
	full.NodeFS.InodesFree, full.NodeFS.Inodes = bytes(1), bytes(100)
	if d := n.pass(0, full); len(d.Choices) != 4 || len(n.Alternatives(n.State, Input{Now: start, Pods: n.pods, Summary: &full}, d)) != 4 {
		t.Errorf("choices %v, want all of disks and pids", d.Choices)
	}
	full.Memory = &MemoryStats{AvailableBytes: bytes(mib), WorkingSetBytes: bytes(gib)}
	if d := n.pass(10, full); len(d.Choices) != 1 || d.Threshold.Signal != MemoryAvailable {
		t.Errorf("choices %v, want memory alone", d.Choices)
	}
}

func TestSYN23_REC6_ReclaimThatWasEnough(t *testing.T) {
	t.Parallel()
	n := newNode(t, "nodefs.available<10Gi")
	d := n.disk(0, gib)
	if len(d.Reclaim) == 0 || d.Victim == nil {
		t.Fatalf("%+v", d)
	}
	if ok, still := n.Resolved(n.State, d, &Summary{NodeFS: disk(50 * gib)}); !ok {
		t.Errorf("still %v", still)
	}
	if ok, _ := n.Resolved(n.State, d, &Summary{NodeFS: disk(9 * gib)}); ok {
		t.Error("9 GiB pass for enough of 10")
	}
}

func TestSYN24_NobodyToRank(t *testing.T) {
	t.Parallel()
	n := newNode(t, "nodefs.available<10Gi")
	n.pods = nil
	if d := n.disk(0, gib); d.Victim != nil || d.NoVictim != "SYN-24" {
		t.Errorf("%+v", d)
	}
}

func TestSYN25_RankedByFiguresFromBefore(t *testing.T) {
	t.Parallel()
	n := newNode(t, "nodefs.available<10Gi")
	n.pods = []Pod{{UID: "a"}, {UID: "b"}}
	n.stats = []PodStats{usage("a", 9*gib), usage("b", gib)}
	d := n.disk(0, gib)
	if ok, _ := n.Resolved(n.State, d, &Summary{NodeFS: disk(gib), Pods: []PodStats{usage("a", 0), usage("b", gib)}}); ok {
		t.Fatal("resolved")
	}
	if victim(d) != "a" { // what it had is gone by now
		t.Errorf("victim %s", victim(d))
	}
}

func TestSYN27_SYN28_SYN33_CriticalPodsNeverGo(t *testing.T) {
	t.Parallel()
	n := newNode(t, "nodefs.available<10Gi")
	n.pods = []Pod{
		{UID: "static", Static: true}, {UID: "mirror", Mirror: true}, {UID: "critical", Priority: ptr(SystemCritical)},
		{UID: "a", Priority: ptr(SystemCritical - 1)}, {UID: "b", Priority: ptr(SystemCritical - 1)},
	}
	n.stats = []PodStats{usage("static", 50*gib), usage("mirror", 40*gib), usage("critical", 30*gib), usage("a", 2*gib), usage("b", gib)}
	d := n.disk(0, gib)
	if victim(d) != "a" {
		t.Errorf("victim %s", victim(d))
	}
	if n.EvictionOf(Input{Pods: n.pods, Summary: &Summary{}}, d, "critical") != nil {
		t.Error("a critical pod has an eviction")
	}
	n.pods = n.pods[:3]
	if d := n.disk(10, gib); d.Victim != nil || d.NoVictim != "SYN-28" {
		t.Errorf("%+v", d)
	}
}

func TestSYN29_GracePeriods(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name     string
		max, pod int64
		unset    bool
		want     int64
	}{
		{"the pod's is less", 60, 30, false, 30},
		{"the maximum is less", 60, 300, false, 60},
		{"default maximum", 0, 30, false, 0},
		{"no period of its own", 60, 0, true, 60},
		{"negative", -1, 30, false, -1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, "", "nodefs.available<10Gi", "nodefs.available=1s")
			n.MaxPodGraceSeconds = tc.max
			if !tc.unset {
				n.pods[0].GraceSeconds = &tc.pod
			}
			n.disk(0, gib)
			if d := n.disk(10, gib); d.Victim == nil || d.Victim.GraceSeconds != tc.want {
				t.Errorf("%+v, want %d s", d.Victim, tc.want)
			}
			hard := newNode(t, "nodefs.available<10Gi")
			hard.MaxPodGraceSeconds, hard.pods = tc.max, n.pods
			if d := hard.disk(0, gib); d.Victim.GraceSeconds != 1 {
				t.Errorf("hard: %d s", d.Victim.GraceSeconds)
			}
		})
	}
}

func TestSYN30_SYN31_FloorsBehindTheOverride(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ override, pod, worker, runtime int64 }{{1, 30, 1, 2}, {0, 30, 1, 2}, {-1, 30, 1, 2}, {60, 30, 30, 30}, {60, 300, 60, 60}} {
		if w, r := EffectiveGrace(tc.override, tc.pod); w != tc.worker || r != tc.runtime {
			t.Errorf("%+v: worker %d, runtime %d", tc, w, r)
		}
	}
}

func TestSYN32_SoftMayWinOverHard(t *testing.T) {
	t.Parallel()
	n := newNode(t, "nodefs.available<10Gi", "nodefs.available<30Gi", "nodefs.available=1m")
	n.MaxPodGraceSeconds = 60
	n.pods[0].GraceSeconds = ptr[int64](300)
	n.disk(0, gib)
	d := n.disk(60, gib)
	grace := map[int64]bool{}
	for _, a := range n.Alternatives(n.State, Input{Pods: n.pods, Summary: &Summary{NodeFS: disk(gib), Pods: n.stats}}, d) {
		grace[a.Victim.GraceSeconds] = true
	}
	if len(grace) != 2 || !grace[1] || !grace[60] {
		t.Errorf("possible grace periods %v, want 1 s and 60 s", grace)
	}
	if d.Victim.GraceSeconds != 1 {
		t.Errorf("the engine gives %d s, though the hard line is crossed", d.Victim.GraceSeconds)
	}
}

func TestSYN35_KillTimeout(t *testing.T) {
	t.Parallel()
	for grace, want := range map[int64]time.Duration{1: 10 * time.Second, 6: 10 * time.Second, 7: 10 * time.Second, 8: 12 * time.Second, 60: 90 * time.Second} {
		if got := KillTimeout(grace); got != want {
			t.Errorf("grace %d: %s, want %s", grace, got, want)
		}
	}
}

func TestSYN36_WhoGetsADisruptionTarget(t *testing.T) {
	t.Parallel()
	n := newNode(t, "nodefs.available<10Gi")
	n.LimitIsolation = true
	if d := n.disk(0, gib); !d.Victim.Disrupts {
		t.Error("evicted for a threshold without the condition")
	}
	n.pods[0].Containers = []Container{{Limits: Amounts{EphemeralStorage: q("1")}}}
	n.stats[0].EphemeralStorage = &FSStats{UsedBytes: bytes(2)}
	if d := n.disk(10, gib); len(d.Limits) != 1 || d.Limits[0].Disrupts {
		t.Errorf("%+v", d.Limits)
	}
}

func TestSYN1_SYN37_NextPass(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name    string
		evicted int
		gone    time.Duration
		want    time.Duration
	}{
		{"nobody evicted", 0, 0, 10 * time.Second},
		{"gone at once", 1, 0, time.Second},
		{"between two polls", 1, 4200 * time.Millisecond, 5 * time.Second},
		{"at a poll", 2, 4 * time.Second, 4 * time.Second},
		{"never", 1, time.Hour, 30 * time.Second},
	} {
		if got := NextPass(tc.evicted, tc.gone, 10*time.Second); got != tc.want {
			t.Errorf("%s: %s, want %s", tc.name, got, tc.want)
		}
	}
}

func TestSYN39_SYN40_WhatAnEvictionSays(t *testing.T) {
	t.Parallel()
	n := newNode(t, "nodefs.available<10%")
	n.pods = []Pod{{UID: "pod", Containers: []Container{{Name: "app"}, {Name: "quiet", Requests: Amounts{EphemeralStorage: q("10Gi")}}, {Name: "half"}}}}
	n.stats = []PodStats{{UID: "pod", Containers: []ContainerStats{
		{Name: "app", RootFS: &FSStats{UsedBytes: bytes(5 * gib)}, Logs: &FSStats{UsedBytes: bytes(gib)}},
		{Name: "quiet", RootFS: &FSStats{UsedBytes: bytes(5 * gib)}, Logs: &FSStats{UsedBytes: bytes(gib)}},
		{Name: "half", RootFS: &FSStats{UsedBytes: bytes(5 * gib)}},
	}}}
	e := n.disk(0, gib).Victim
	if got := e.Limit.String(); got != "10737418400" || e.Available != gib || e.Cause != Cause(NodeFSAvailable) {
		t.Errorf("threshold %s, %d available, %s", got, e.Available, e.Cause)
	}
	if len(e.Offenders) != 1 || e.Offenders[0].Name != "app" || e.Offenders[0].Usage.Value() != 6*gib || !e.Offenders[0].Request.IsZero() || !e.Explained {
		t.Errorf("%+v", e)
	}
	n.pods[0].Containers[1].Requests.EphemeralStorage = q("6Gi")
	if e := n.disk(5, gib).Victim; len(e.Offenders) != 1 {
		t.Errorf("usage equal to the request is an offence: %+v", e.Offenders)
	}
	n.stats = []PodStats{}
	if e := n.disk(10, gib).Victim; e.Explained || len(e.Offenders) > 0 {
		t.Errorf("a pod without figures: %+v", e)
	}
	inodes := newNode(t, "nodefs.inodesFree<10")
	inodes.pods, inodes.stats = n.pods, []PodStats{{UID: "pod", Containers: []ContainerStats{{Name: "app", RootFS: &FSStats{InodesUsed: bytes(99), UsedBytes: bytes(1)}, Logs: &FSStats{UsedBytes: bytes(1)}}}}}
	if e := inodes.pass(0, Summary{NodeFS: &FSStats{InodesFree: bytes(1), Inodes: bytes(100)}}).Victim; len(e.Offenders) > 0 || !e.Explained {
		t.Errorf("of inodes somebody is blamed: %+v", e)
	}
	memory := newNode(t, "memory.available<1Gi")
	memory.pods, memory.stats = []Pod{{UID: "pod", Name: "p", PodLevel: true, PodLevelMemory: q("1Mi")}}, []PodStats{{UID: "pod", MemoryBytes: bytes(5)}}
	if e := memory.pass(0, Summary{Memory: &MemoryStats{AvailableBytes: bytes(1), WorkingSetBytes: bytes(1)}}).Victim; e.PodOffends == nil || e.PodOffends.Name != "p" {
		t.Errorf("memory at pod level: %+v", e)
	}
}

func TestSYN43_AFreshStateHasForgottenAll(t *testing.T) {
	t.Parallel()
	n := newNode(t, "nodefs.available<10Gi", "", "", "nodefs.available=500Mi")
	n.disk(0, gib)
	n.State = State{} // the kubelet starts anew
	wantOutcome(t, n.disk(10, 10*gib), Calm)
	wantPressure(t, n.State, false)
}

func TestOBS1_OBS2_BothFiguresOrNone(t *testing.T) {
	t.Parallel()
	s := Summary{
		NodeFS:  &FSStats{Time: start, AvailableBytes: bytes(5), CapacityBytes: bytes(10), InodesFree: bytes(3)},
		ImageFS: &FSStats{AvailableBytes: bytes(5 * gib), InodesFree: bytes(1), Inodes: bytes(2)},
		Memory:  &MemoryStats{AvailableBytes: bytes(3), WorkingSetBytes: bytes(4)},
	}
	seen := s.Observe()
	if got := seen[NodeFSAvailable]; got != (Observation{5, 10, start}) {
		t.Errorf("nodefs %+v", got)
	}
	if got := seen[MemoryAvailable]; got.Capacity != 7 {
		t.Errorf("memory %+v", got)
	}
	for _, absent := range []Signal{NodeFSInodesFree, ImageFSAvailable, ContainerFSAvailable, PIDAvailable, AllocatableMemoryAvailable} {
		if o, ok := seen[absent]; ok {
			t.Errorf("%s is seen: %+v", absent, o)
		}
	}
	n := newNode(t, "imagefs.available<10Gi")
	wantOutcome(t, n.pass(0, s), Calm)
	wantPressure(t, n.State, false)
}

func TestOBS7_BlindDoesNothing(t *testing.T) {
	t.Parallel()
	n := newNode(t, "nodefs.available<10Gi")
	n.disk(0, gib)
	before := n.State
	n.failed = true
	wantOutcome(t, n.disk(1000, 0), Blind)
	if !n.Reports(DiskPressure) || n.Observed[NodeFSAvailable] != before.Observed[NodeFSAvailable] {
		t.Error("a pass without figures changed something")
	}
}

func TestOBS11_NoInodesAtAll(t *testing.T) {
	t.Parallel()
	btrfs := Summary{NodeFS: &FSStats{InodesFree: bytes(0), Inodes: bytes(0)}}
	wantOutcome(t, newNode(t, "nodefs.inodesFree<5%").pass(0, btrfs), Calm)
	wantOutcome(t, newNode(t, "nodefs.inodesFree<1000").pass(0, btrfs), Pressure)
}

func TestOBS13_TheLaterRecordCounts(t *testing.T) {
	t.Parallel()
	n := newNode(t, "nodefs.available<10Gi")
	n.pods = []Pod{{UID: "a"}, {UID: "b"}}
	n.stats = []PodStats{usage("a", 0), usage("b", 2*gib), usage("a", 5*gib)}
	if d := n.disk(0, gib); victim(d) != "a" {
		t.Errorf("victim %s", victim(d))
	}
}

func TestOBS18_ImageThresholdHoldsOnASingleDisk(t *testing.T) {
	t.Parallel()
	n := newNode(t, "nodefs.available<10%,imagefs.available<15%").settled(Detected{})
	d := n.pass(0, Summary{NodeFS: disk(14 * gib), ImageFS: disk(14 * gib), ContainerFS: disk(14 * gib)})
	if len(d.Due) != 1 || d.Due[0].Signal != ImageFSAvailable {
		t.Errorf("due %v", d.Due)
	}
}
