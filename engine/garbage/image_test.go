package garbage

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

const gib = int64(1) << 30

// at is a time of day.
func at(clock string) time.Time {
	t, err := time.Parse(time.TimeOnly, clock)
	if err != nil {
		panic(err)
	}
	return t.AddDate(2026, 0, 0)
}

func ids(list []Image) string {
	var out []string
	for _, i := range list {
		out = append(out, i.ID)
	}
	return strings.Join(out, " ")
}

func ptr(v int64) *uint64 {
	u := uint64(v)
	return &u
}

func listed(names ...string) []Listed {
	var out []Listed
	for _, n := range names {
		out = append(out, Listed{ID: n, SizeBytes: gib})
	}
	return out
}

func TestIGC1_IGC2_IGC3_WhatIsInUse(t *testing.T) {
	t.Parallel()
	users := []ImageUser{{ImageID: "dead-container"}, {ImageID: "app", Volumes: []string{"mounted", "not-listed"}}}
	known, inUse := Images(nil).Look(listed("dead-container", "app", "mounted", "pause", "idle"), users, at("10:00:00"), at("10:00:01"))
	if got := ids(known.Unused(inUse)); got != "idle pause" { // a sandbox is no user
		t.Errorf("unused %s", got)
	}
	if inUse["not-listed"] {
		t.Error("an image that is not there is in use")
	}
	pinned := listed("pause")
	pinned[0].Pinned = true
	known, inUse = known.Look(pinned, nil, at("10:05:00"), at("10:05:00"))
	if got := ids(known.Unused(inUse)); got != "" {
		t.Errorf("pinned and still unused: %s", got)
	}
}

func TestIGC4_IGC5_IGC6_Memory(t *testing.T) {
	t.Parallel()
	first, _ := Images(nil).Look(listed("a", "b"), []ImageUser{{ImageID: "a"}}, at("10:00:00"), at("10:00:01"))
	want := Images{"a": {ID: "a", FirstSeen: at("10:00:00"), LastUsed: at("10:00:01"), SizeBytes: gib}, "b": {ID: "b", FirstSeen: at("10:00:00"), SizeBytes: gib}}
	if diff := cmp.Diff(want, first); diff != "" {
		t.Error(diff)
	}
	grown := listed("a")
	grown[0].SizeBytes, grown[0].Pinned = 2*gib, true
	// A container of b's lived from 10:01 to 10:03: nobody looked.
	second, _ := first.Look(append(grown, listed("b")...), nil, at("10:05:00"), at("10:05:00"))
	want = Images{"a": {ID: "a", FirstSeen: at("10:00:00"), LastUsed: at("10:00:01"), SizeBytes: 2 * gib, Pinned: true}, "b": first["b"]}
	if diff := cmp.Diff(want, second); diff != "" {
		t.Error(diff)
	}
	third, _ := second.Look(listed("b"), nil, at("10:10:00"), at("10:10:00"))
	fourth, _ := third.Look(listed("a", "b"), nil, at("10:15:00"), at("10:15:00"))
	if got := fourth["a"]; !got.FirstSeen.Equal(at("10:15:00")) || !got.LastUsed.IsZero() {
		t.Errorf("an image that came back is remembered: %+v", got)
	}
}

func TestIGC7_PerHandler(t *testing.T) {
	t.Parallel()
	list := []Listed{{ID: "a", Handler: "runc"}, {ID: "a", Handler: "kata"}, {ID: "b", Handler: "kata"}, {ID: "b"}}
	known, inUse := Images(nil).Look(list, []ImageUser{{ImageID: "a", Handler: "kata", Volumes: []string{"b"}}}, at("10:00:00"), at("10:00:00"))
	var got []string
	for _, i := range known.Unused(inUse) {
		got = append(got, i.Key())
	}
	if diff := cmp.Diff([]string{"a,runc", "b,kata"}, got); diff != "" {
		t.Error(diff)
	}
}

func TestIGC8_Order(t *testing.T) {
	t.Parallel()
	known := Images{
		"A": {ID: "A", FirstSeen: at("10:00:00")},
		"B": {ID: "B", FirstSeen: at("09:00:00")},
		"C": {ID: "C", FirstSeen: at("07:00:00"), LastUsed: at("08:00:00")},
		"E": {ID: "E", FirstSeen: at("07:00:00"), LastUsed: at("08:00:00")},
		"D": {ID: "D", FirstSeen: at("06:00:00"), LastUsed: at("08:00:00")},
	}
	if got := ids(known.Unused(nil)); got != "B A D C E" {
		t.Errorf("order %s", got)
	}
	if !known["C"].Equal(known["E"]) || known["C"].Equal(known["D"]) {
		t.Error("equals are not told")
	}
}

func TestIGC9_IGC23_Policies(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name   string
		policy ImagePolicy
		runs   bool
		faults int
	}{
		{"the defaults", ImagePolicy{HighPercent: 85, LowPercent: 80, MinAge: 2 * time.Minute}, true, 0},
		{"switched off", ImagePolicy{HighPercent: 100, LowPercent: 80}, false, 0},
		{"by age only", ImagePolicy{HighPercent: 100, LowPercent: 80, MaxAge: time.Hour}, true, 0},
		{"low = high", ImagePolicy{HighPercent: 80, LowPercent: 80}, true, 1},
		{"all wrong", ImagePolicy{HighPercent: 101, LowPercent: 102, MinAge: -1, MaxAge: -2}, true, 6},
		{"oldest before youngest", ImagePolicy{HighPercent: 85, LowPercent: 80, MinAge: time.Hour, MaxAge: time.Hour}, true, 1},
	} {
		err := tc.policy.Validate()
		faults := 0
		if err != nil {
			faults = strings.Count(err.Error(), "\n") + 1
		}
		if faults != tc.faults || tc.policy.Runs() != tc.runs {
			t.Errorf("%s: runs %t, %v", tc.name, tc.policy.Runs(), err)
		}
	}
}

func TestIGC10_IGC11_IGC12_Age(t *testing.T) {
	t.Parallel()
	now := at("12:00:00")
	policy := ImagePolicy{HighPercent: 85, LowPercent: 80, MinAge: 2 * time.Minute, MaxAge: 24 * time.Hour}
	old := Image{ID: "old", LastUsed: now.Add(-24*time.Hour - time.Minute)}
	edge := Image{ID: "edge", LastUsed: now.Add(-24 * time.Hour)}
	pulled := Image{ID: "just-pulled", FirstSeen: now}
	unused := []Image{pulled, old, edge}
	remove, rest := policy.TooOld(unused, now, now.Add(-25*time.Hour))
	if ids(remove) != "just-pulled old" || ids(rest) != "edge" {
		t.Errorf("too old %s, rest %s", ids(remove), ids(rest))
	}
	if remove, _ := policy.TooOld(unused, now, now.Add(-24*time.Hour)); len(remove) > 0 {
		t.Errorf("the kubelet is not older than the maximum age: %s", ids(remove))
	}
	policy.MaxAge = 0
	if remove, _ := policy.TooOld(unused, now, now.Add(-1000*time.Hour)); len(remove) > 0 {
		t.Errorf("switched off: %s", ids(remove))
	}
}

func TestIGC13_IGC14_IGC15_IGC16_Need(t *testing.T) {
	t.Parallel()
	policy := ImagePolicy{HighPercent: 85, LowPercent: 80}
	for _, tc := range []struct {
		name                string
		available, capacity *uint64
		want                Need
		err                 error
	}{
		{"IGC-13: no capacity", ptr(5), ptr(0), Need{}, ErrNoCapacity},
		{"IGC-13: unknown capacity", ptr(5), nil, Need{}, ErrNoCapacity},
		{"IGC-13: more available than there is", ptr(12), ptr(10), Need{UsedPercent: 0}, nil},
		{"IGC-13: unknown available counts as none", nil, ptr(1000), Need{UsedPercent: 100, Over: true, Bytes: 200}, nil},
		{"IGC-14: 16 %", ptr(1600), ptr(10000), Need{UsedPercent: 84}, nil},
		{"IGC-14: less than 16 %", ptr(1599), ptr(10000), Need{UsedPercent: 85, Over: true, Bytes: 401}, nil},
		{"IGC-15: 15.5 of 100 GiB", ptr(16642998272), ptr(100 * gib), Need{UsedPercent: 85, Over: true, Bytes: 4831838208}, nil},
		{"IGC-16: an empty disk with 5 % for root", ptr(95 * gib), ptr(100 * gib), Need{UsedPercent: 5}, nil},
		{"T5", ptr(12884901888), ptr(107374182400), Need{UsedPercent: 88, Over: true, Bytes: 8589934592}, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			got, err := policy.Need(tc.available, tc.capacity)
			if got != tc.want || !errors.Is(err, tc.err) {
				t.Errorf("%+v, %v; want %+v", got, err, tc.want)
			}
		})
	}
}

// sized are unused images of so many GiB, known for long.
func sized(sizes ...int64) []Image {
	var out []Image
	for i, s := range sizes {
		out = append(out, Image{ID: string(rune('a' + i)), FirstSeen: at("08:00:00"), SizeBytes: s * gib})
	}
	return out
}

func TestIGC17_IGC18_UntilEnoughIsFreed(t *testing.T) {
	t.Parallel()
	policy := ImagePolicy{HighPercent: 85, LowPercent: 80, MinAge: 2 * time.Minute}
	plan := policy.ForSpace(sized(1, 2, 3, 4), 9*gib/2, at("12:00:00"))
	if ids(plan.Remove) != "a b c" || ids(plan.Reserve) != "d" {
		t.Errorf("%+v", plan)
	}
	list := sized(1, 1, 1)
	list[0].LastUsed = at("12:00:00")  // seen in use in this run
	list[1].FirstSeen = at("11:58:01") // a second too young
	list[2].FirstSeen = at("11:58:00")
	plan = policy.ForSpace(list, 100*gib, at("12:00:00"))
	if ids(plan.Remove) != "c" || ids(plan.Young) != "b" {
		t.Errorf("%+v", plan)
	}
	// IGC-18: reported sizes are taken for gains, shared layers each time (T4).
	if plan := policy.ForSpace(sized(5, 6, 4), 11*gib, at("12:00:00")); ids(plan.Remove) != "a b" {
		t.Errorf("%+v", plan)
	}
	// T6: a need below 0 still costs one image.
	if plan := policy.ForSpace(sized(1, 1), -gib, at("12:00:00")); ids(plan.Remove) != "a" {
		t.Errorf("%+v", plan)
	}
}

// TestSeedT7 is a node whose oldest unused image is that of the sandboxes.
func TestSeedT7(t *testing.T) {
	t.Parallel()
	known := Images{
		"pause": {ID: "pause", FirstSeen: at("06:00:00"), SizeBytes: 298685, Pinned: true},
		"big":   {ID: "big", FirstSeen: at("07:00:00"), SizeBytes: 9_000_000_000},
		"small": {ID: "small", FirstSeen: at("08:00:00"), SizeBytes: 1},
	}
	plan := ImagePolicy{}.ForSpace(known.Unused(nil), 8078762803, at("12:00:00"))
	if ids(plan.Remove) != "big" {
		t.Errorf("%+v", plan)
	}
}

func TestIGC19_HowARunIsTaken(t *testing.T) {
	t.Parallel()
	failed := errors.New("read-only file system")
	n := Need{UsedPercent: 90, Over: true, Bytes: 10 * gib}
	for _, tc := range []struct {
		name     string
		need     Need
		freed    int64
		removals error
		tidy     bool
		err      error
	}{
		{"nothing to do", Need{UsedPercent: 50}, 0, nil, false, nil},
		{"enough", n, 10 * gib, nil, true, nil},
		{"too little", n, 100, nil, true, ErrFreedTooLittle},
		{"enough, but one failed", n, 10 * gib, failed, false, failed},
	} {
		if tidy, err := tc.need.Judge(tc.freed, tc.removals); tidy != tc.tidy || !errors.Is(err, tc.err) {
			t.Errorf("%s: %t, %v", tc.name, tidy, err)
		}
	}
	if _, err := n.Judge(100, nil); !strings.Contains(err.Error(), "90%") || !strings.Contains(err.Error(), "100 of 10737418240 bytes") {
		t.Errorf("it does not say how much: %v", err)
	}
}

func TestIGC20_IGC21_AllThatCanGo(t *testing.T) {
	t.Parallel()
	policy := ImagePolicy{HighPercent: 100, LowPercent: 80, MinAge: 2 * time.Minute}
	if plan := policy.ForSpace(sized(1, 2, 3), Everything, at("12:00:00")); ids(plan.Remove) != "a b c" {
		t.Errorf("%+v", plan)
	}
	// A kubelet that has just started knows every image since then only.
	known, inUse := Images(nil).Look(listed("a", "b"), nil, at("12:00:00"), at("12:00:00"))
	if plan := policy.ForSpace(known.Unused(inUse), Everything, at("12:01:59")); len(plan.Remove) != 0 || len(plan.Young) != 2 {
		t.Errorf("%+v", plan)
	}
	if plan := policy.ForSpace(known.Unused(inUse), Everything, at("12:02:00")); len(plan.Remove) != 2 {
		t.Errorf("%+v", plan)
	}
}

func TestOptionStartEarlier_GAP28(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		high, low      int
		available      uint64
		kubelet, early bool
	}{
		{85, 80, 18, false, false}, {85, 80, 17, false, true}, {85, 80, 16, false, true}, {85, 80, 15, true, true},
		{81, 80, 20, false, false}, {81, 80, 19, true, true}, // never as low as where it stops
	} {
		for _, early := range []bool{false, true} {
			n, err := ImagePolicy{HighPercent: tc.high, LowPercent: tc.low, Options: ImageOptions{StartEarlier: early}}.Need(&tc.available, ptr(100))
			if want := early && tc.early || !early && tc.kubelet; err != nil || n.Over != want {
				t.Errorf("%+v, early %t: %+v, %v", tc, early, n, err)
			}
		}
	}
}
