package engine

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/resource"
	"pgregory.net/rapid"
)

// figure is anything that could be measured, contradictions included.
func figure() *rapid.Generator[*uint64] {
	return rapid.OneOf(
		rapid.Ptr(rapid.SampledFrom([]uint64{0, 1, uint64(gib), uint64(10 * gib), 10737418400, math.MaxInt64, math.MaxInt64 + 1, math.MaxUint64}), true),
		rapid.Ptr(rapid.Uint64Max(uint64(100*gib)), true),
	)
}

// TestValueText is what records and replays depend on: a value read back is
// the same one.
func TestValueText(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		v := Value{Share: rapid.Float32().Draw(t, "share")}
		if rapid.Bool().Draw(t, "fixed") {
			v = Value{Quantity: quantity(rapid.Int64().Draw(t, "quantity"))}
		}
		text, err := v.MarshalText()
		if err != nil {
			t.Fatal(err)
		}
		var back Value
		if err := back.UnmarshalText(text); err != nil || !back.Equal(v) {
			t.Fatalf("%s: %v, %v", text, back, err)
		}
	})
	for _, v := range []Value{{Share: float32(math.NaN())}, {Share: float32(math.Inf(1))}, {Quantity: q("0.5")}, {Quantity: q("12345678901234567890")}} {
		text, err := v.MarshalText()
		var back Value
		if err != nil || back.UnmarshalText(text) != nil || back.String() != v.String() {
			t.Errorf("%s: %s, %v", text, back, err)
		}
	}
	for _, text := range []string{"", "10%", "share", "share x", "x"} {
		if err := new(Value).UnmarshalText([]byte(text)); err == nil {
			t.Errorf("%q is read as a value", text)
		}
	}
}

// moment is any time, backwards and unknown included.
func moment() *rapid.Generator[time.Time] {
	return rapid.Custom(func(t *rapid.T) time.Time {
		switch rapid.IntRange(0, 5).Draw(t, "kind") {
		case 0:
			return time.Time{}
		case 1:
			return time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC)
		default:
			return start.Add(time.Duration(rapid.IntRange(-600, 600).Draw(t, "seconds")) * time.Second)
		}
	})
}

func filesystem() *rapid.Generator[*FSStats] {
	return rapid.Ptr(rapid.Custom(func(t *rapid.T) FSStats {
		return FSStats{
			Time:           moment().Draw(t, "time"),
			AvailableBytes: figure().Draw(t, "available"), CapacityBytes: figure().Draw(t, "capacity"), UsedBytes: figure().Draw(t, "used"),
			InodesFree: figure().Draw(t, "inodesFree"), Inodes: figure().Draw(t, "inodes"), InodesUsed: figure().Draw(t, "inodesUsed"),
		}
	}), true)
}

func amount() *rapid.Generator[*resource.Quantity] {
	return rapid.Ptr(rapid.Map(rapid.SampledFrom([]string{"0", "1", "0.5", "1Gi", "10Gi", "9223372036854775807", "1e18", "12345678901234567890"}), resource.MustParse), true)
}

func anyPod(i int) *rapid.Generator[Pod] {
	return rapid.Custom(func(t *rapid.T) Pod {
		p := Pod{
			UID: fmt.Sprintf("pod-%02d", i), Priority: rapid.Ptr(rapid.SampledFrom([]int32{-1, 0, 1, SystemCritical}), true).Draw(t, "priority"),
			Static: rapid.IntRange(0, 9).Draw(t, "static") == 0, PodLevel: rapid.Bool().Draw(t, "podLevel"),
			Overhead: Amounts{EphemeralStorage: amount().Draw(t, "overhead")},
		}
		for _, name := range []string{"a", "b"} {
			c := Container{Name: name, Requests: Amounts{EphemeralStorage: amount().Draw(t, "request"), Memory: amount().Draw(t, "memory")}, Limits: Amounts{EphemeralStorage: amount().Draw(t, "limit")}}
			if rapid.Bool().Draw(t, "init") {
				c.Sidecar = rapid.Bool().Draw(t, "sidecar")
				p.InitContainers = append(p.InitContainers, c)
			} else {
				p.Containers = append(p.Containers, c)
			}
		}
		p.Volumes = []Volume{{Name: "v", Kind: rapid.SampledFrom([]VolumeKind{EmptyDirDisk, EmptyDirMemory, HostPath, OtherVolume}).Draw(t, "kind"), SizeLimit: amount().Draw(t, "size")}}
		return p
	})
}

func anyStats(uid string) *rapid.Generator[PodStats] {
	return rapid.Custom(func(t *rapid.T) PodStats {
		st := PodStats{UID: uid, EphemeralStorage: filesystem().Draw(t, "ephemeral"), MemoryBytes: figure().Draw(t, "memory"), ProcessCount: figure().Draw(t, "processes"), Images: filesystem().Draw(t, "images")}
		for _, name := range []string{"a", "b"} {
			st.Containers = append(st.Containers, ContainerStats{Name: name, RootFS: filesystem().Draw(t, "rootfs"), Logs: filesystem().Draw(t, "logs"), MemoryBytes: figure().Draw(t, "containerMemory")})
		}
		st.Volumes = []VolumeStats{{Name: "v", FSStats: FSStats{UsedBytes: figure().Draw(t, "volume"), InodesUsed: figure().Draw(t, "volumeInodes")}}}
		return st
	})
}

// anyConfig is any kubelet's, anyInput anything that it may see.
func anyConfig(t *rapid.T) Config {
	value := rapid.SampledFrom([]string{"10%", "100.0%", "NaN%", "10Gi", "0.5", "9223372036854775807", "5%", "1"})
	s := Settings{Hard: map[string]string{}, Soft: map[string]string{}, SoftGrace: map[string]string{}, MinReclaim: map[string]string{}}
	for _, signal := range signals {
		key := string(signal)
		if rapid.Bool().Draw(t, "hard") {
			s.Hard[key] = value.Draw(t, "hardValue")
		}
		if rapid.Bool().Draw(t, "soft") {
			s.Soft[key], s.SoftGrace[key] = value.Draw(t, "softValue"), rapid.SampledFrom([]string{"0s", "10s", "1m"}).Draw(t, "grace")
		}
		if rapid.IntRange(0, 3).Draw(t, "reclaim") == 0 {
			s.MinReclaim[key] = rapid.SampledFrom([]string{"0", "1Gi", "1e30%", "Inf%", "NaN%", "50%"}).Draw(t, "minReclaim")
		}
	}
	list, err := Parse(s)
	if err != nil {
		t.Fatal(err)
	}
	return Config{
		Thresholds: list, TransitionPeriod: rapid.SampledFrom([]time.Duration{0, time.Minute}).Draw(t, "transition"),
		LimitIsolation: rapid.Bool().Draw(t, "isolation"), NoSeparateDiskGC: rapid.IntRange(0, 9).Draw(t, "gate") == 0,
		MaxPodGraceSeconds: rapid.Int64().Draw(t, "maxGrace"),
		Options:            anyOptions(t),
	}
}

// anyOptions switches each option by itself, or has one of the two profiles.
func anyOptions(t *rapid.T) Options {
	var o Options
	switch rapid.IntRange(0, 2).Draw(t, "profile") {
	case 0:
	case 1:
		o = Cleave()
	default:
		for v, i := reflect.ValueOf(&o).Elem(), 0; i < v.NumField(); i++ {
			v.Field(i).SetBool(rapid.Bool().Draw(t, v.Type().Field(i).Name))
		}
	}
	return o
}

func anyInput(t *rapid.T) Input {
	in := Input{Now: moment().Draw(t, "now"), Layout: &Detected{ImageApart: rapid.Bool().Draw(t, "imageApart"), ContainerApart: rapid.Bool().Draw(t, "containerApart"), ContainerOffNode: rapid.Bool().Draw(t, "offNode")}}
	s := &Summary{
		NodeFS: filesystem().Draw(t, "nodefs"), ImageFS: filesystem().Draw(t, "imagefs"), ContainerFS: filesystem().Draw(t, "containerfs"),
		Memory:    &MemoryStats{Time: moment().Draw(t, "memoryTime"), AvailableBytes: figure().Draw(t, "memory"), WorkingSetBytes: figure().Draw(t, "workingSet")},
		Processes: &ProcessLimits{MaxPID: ptr(rapid.Int64().Draw(t, "maxPID")), RunningCount: ptr(rapid.Int64().Draw(t, "running"))},
	}
	for i := range rapid.IntRange(0, 5).Draw(t, "pods") {
		p := anyPod(i).Draw(t, "pod")
		in.Pods = append(in.Pods, p)
		if rapid.IntRange(0, 4).Draw(t, "measured") > 0 {
			s.Pods = append(s.Pods, anyStats(p.UID).Draw(t, "stats"))
		}
	}
	in.Summary = s
	return in
}

// said is a decision without what is only inside.
func said(t *rapid.T, s State, d Decision) string {
	text, err := json.Marshal(struct {
		S State
		D Decision
	}{s, d})
	if err != nil {
		t.Fatal(err)
	}
	var tree any
	if err := json.Unmarshal(text, &tree); err != nil {
		t.Fatal(err)
	}
	if text, err = json.Marshal(plain(tree)); err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// plain writes quantities as numbers: "8Ei" and "9223372036854775808" are one
// amount, and which of them a Quantity says depends on how it came about.
func plain(tree any) any {
	switch v := tree.(type) {
	case string:
		if q, err := resource.ParseQuantity(v); err == nil {
			return q.AsDec().String()
		}
	case []any:
		for i := range v {
			v[i] = plain(v[i])
		}
	case map[string]any:
		for key := range v {
			v[key] = plain(v[key])
		}
	}
	return tree
}

func TestPropertyOrderOfInputDoesNotMatter(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		config := anyConfig(t)
		first, second := anyInput(t), anyInput(t)
		play := func(shuffle bool) string {
			var state State
			var out string
			for _, in := range []Input{first, second} {
				if shuffle {
					summary := *in.Summary
					in.Pods, summary.Pods = slices.Clone(in.Pods), slices.Clone(summary.Pods)
					rand.Shuffle(len(in.Pods), func(i, j int) { in.Pods[i], in.Pods[j] = in.Pods[j], in.Pods[i] })
					rand.Shuffle(len(summary.Pods), func(i, j int) { summary.Pods[i], summary.Pods[j] = summary.Pods[j], summary.Pods[i] })
					in.Summary = &summary
				}
				var d Decision
				state, d = config.Sync(state, in)
				out += said(t, state, d)
			}
			return out
		}
		if diff := cmp.Diff(play(false), play(true)); diff != "" {
			t.Fatal(diff)
		}
	})
}

func TestPropertySameInputSameAnswerNothingChanged(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		config, in := anyConfig(t), anyInput(t)
		before := string(must(t, in))
		state, d := config.Sync(State{}, in)
		again, e := config.Sync(State{}, in)
		if said(t, state, d) != said(t, again, e) {
			t.Fatalf("first %s, then %s", said(t, state, d), said(t, again, e))
		}
		given := said(t, state, Decision{})
		config.Sync(state, in)
		if said(t, state, Decision{}) != given || string(must(t, in)) != before {
			t.Fatal("a pass changed what it was given")
		}
	})
}

func must(t *rapid.T, v any) []byte {
	text, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// TestPropertyOldFiguresEvictNobodyAgain holds where figures carry their time:
// a second look at them moves no threshold to act.
func TestPropertyOldFiguresEvictNobodyAgain(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		config, in := anyConfig(t), anyInput(t)
		config.LimitIsolation = false   // limits have no memory: they report each time
		config.NoSeparateDiskGC = false // a refused layout keeps the first pass from looking
		in.Summary.Processes.Time = start
		for _, f := range []*FSStats{in.Summary.NodeFS, in.Summary.ImageFS, in.Summary.ContainerFS} {
			if f != nil {
				f.Time = start
			}
		}
		in.Summary.Memory.Time = start
		state, _ := config.Sync(State{}, in)
		in.Now = in.Now.Add(time.Hour)
		if _, d := config.Sync(state, in); len(d.Due) > 0 || d.Victim != nil {
			t.Fatalf("%+v", d)
		}
	})
}

func TestPropertyWhoMayGo(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		config := anyConfig(t)
		var state State
		for range rapid.IntRange(1, 4).Draw(t, "passes") {
			in := anyInput(t)
			if rapid.IntRange(0, 5).Draw(t, "blind") == 0 {
				in.Summary = nil
			}
			var d Decision
			state, d = config.Sync(state, in)
			if d.Outcome == "" || d.Rule == "" || d.Outcome == Pressure && (d.Victim == nil) == (d.NoVictim == "") {
				t.Fatalf("a decision without a rule: %+v", d)
			}
			going := slices.Clone(d.Limits)
			if d.Victim != nil {
				going = append(going, *d.Victim)
			}
			if in.Summary == nil && (len(going) > 0 || len(d.Reclaim) > 0) {
				t.Fatalf("without figures: %+v", d)
			}
			for _, e := range going {
				i := slices.IndexFunc(in.Pods, func(p Pod) bool { return p.UID == e.UID })
				if i < 0 || in.Pods[i].Critical() {
					t.Fatalf("%+v must not go", e)
				}
			}
			for _, a := range config.Alternatives(state, in, d) {
				if a.Victim != nil && len(a.Choices) != len(d.Choices) {
					t.Fatalf("%+v is no alternative to %+v", a, d)
				}
			}
			if d.Outcome == Pressure {
				config.Resolved(state, d, anyInput(t).Summary)
			}
		}
	})
}

// TestPropertyImpossibleFiguresDeleteNothing holds for the option that doubts
// them.
func TestPropertyImpossibleFiguresDeleteNothing(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		config, in := anyConfig(t), anyInput(t)
		config.LimitIsolation, config.Options.DoubtImpossible = false, true
		wrong := func() *FSStats {
			available := rapid.Uint64Range(1, math.MaxUint64).Draw(t, "available")
			capacity := rapid.Uint64Range(0, available-1).Draw(t, "capacity")
			return &FSStats{AvailableBytes: &available, CapacityBytes: &capacity, InodesFree: &available, Inodes: &capacity}
		}
		in.Summary.NodeFS, in.Summary.ImageFS, in.Summary.ContainerFS = wrong(), wrong(), wrong()
		var state State
		for range 2 {
			var d Decision
			state, d = config.Sync(state, in)
			if r := d.Threshold.Signal.Resource(); r == EphemeralStorage || r == Inodes {
				t.Fatalf("%+v", d)
			}
		}
	})
}

// TestPropertyMoreSpaceMeetsNoMoreThresholds is about a fresh state: with one
// the kubelet's hysteresis comes in.
func TestPropertyMoreSpaceMeetsNoMoreThresholds(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		list := anyConfig(t).Thresholds
		less := Observation{Available: rapid.Int64().Draw(t, "available"), Capacity: rapid.Int64().Draw(t, "capacity")}
		more := less
		if more.Available < math.MaxInt64 {
			more.Available += rapid.Int64Range(0, math.MaxInt64-max(0, more.Available)).Draw(t, "more")
		}
		for _, th := range list {
			for _, reclaim := range []bool{false, true} {
				if th.met(more, reclaim) && !th.met(less, reclaim) {
					t.Fatalf("%s is met with %d, not with %d", th, more.Available, less.Available)
				}
			}
		}
	})
}

// cleaveOn is the cleave profile with thresholds of one signal.
func cleaveOn(t *rapid.T) Config {
	list, err := Parse(Settings{
		Hard:       map[string]string{"nodefs.available": rapid.SampledFrom([]string{"10%", "5Gi", "50%"}).Draw(t, "hard")},
		MinReclaim: map[string]string{"nodefs.available": rapid.SampledFrom([]string{"0", "1Gi"}).Draw(t, "reclaim")},
	})
	if err != nil {
		t.Fatal(err)
	}
	return Config{Thresholds: list, TransitionPeriod: time.Minute, Options: Cleave()}
}

// roomy is a node with so much available, a possible figure.
func roomy(t *rapid.T, in Input, available uint64) Input {
	s := *in.Summary
	capacity := uint64(100 * gib)
	f := &FSStats{Time: start, AvailableBytes: &available, CapacityBytes: &capacity}
	s.NodeFS, s.ImageFS, s.ContainerFS = f, f, f
	in.Summary, in.Layout, in.Now = &s, &Detected{}, start
	return in
}

// TestPropertyMoreSpaceNoMoreVictims holds for the cleave profile: what goes
// with more space goes with less, too.
func TestPropertyMoreSpaceNoMoreVictims(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		config, in := cleaveOn(t), anyInput(t)
		less := rapid.Uint64Max(uint64(60*gib)).Draw(t, "less")
		more := less + rapid.Uint64Max(uint64(40*gib)).Draw(t, "more")
		_, a := config.Sync(State{}, roomy(t, in, less))
		_, b := config.Sync(State{}, roomy(t, in, more))
		if b.Victim != nil && a.Victim == nil {
			t.Fatalf("with %d nobody goes (%s), with %d %s does", less, a.NoVictim, more, b.Victim.UID)
		}
		if a.NeedBytes != nil && b.NeedBytes != nil && *b.NeedBytes > *a.NeedBytes {
			t.Fatalf("with %d %d are needed, with %d %d", less, *a.NeedBytes, more, *b.NeedBytes)
		}
	})
}

// TestPropertyEnoughReclaimedNobodyGoes holds for the cleave profile: when what
// was due is no longer short, the victim lives, and the next pass wants nothing.
func TestPropertyEnoughReclaimedNobodyGoes(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		config, in := cleaveOn(t), anyInput(t)
		state, d := config.Sync(State{}, roomy(t, in, rapid.Uint64Max(uint64(5*gib)-1).Draw(t, "available")))
		if d.Outcome != Pressure || d.NeedBytes == nil {
			t.Fatalf("%+v", d)
		}
		now := roomy(t, in, uint64(51*gib))
		now.Summary.NodeFS.Time, now.Now = start.Add(time.Second), start.Add(time.Second)
		if ok, still := config.Resolved(state, d, now.Summary); !ok {
			t.Fatalf("still %v", still)
		}
		if _, next := config.Sync(state, now); next.Victim != nil || len(next.Reclaim) > 0 {
			t.Fatalf("%+v", next)
		}
	})
}

// TestPropertyWhoGoesHelps holds for the cleave profile: whoever goes has
// something on the filesystem, and no more go than it takes.
func TestPropertyWhoGoesHelps(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		config, in := cleaveOn(t), anyInput(t)
		config.Options.Batch = rapid.Bool().Draw(t, "batch")
		in = roomy(t, in, rapid.Uint64Max(uint64(60*gib)).Draw(t, "available"))
		_, d := config.Sync(State{}, in)
		if d.Victim == nil {
			return
		}
		usage := map[string]resource.Quantity{}
		for _, r := range d.Ranking {
			usage[r.UID] = r.Usage
		}
		short := config.short(d.Threshold, in.Summary.Observe()[d.Threshold.Signal])
		for _, e := range append([]Eviction{*d.Victim}, d.Further...) {
			u := usage[e.UID]
			if u.Sign() <= 0 {
				t.Fatalf("%s has nothing there", e.UID)
			}
			if short.Sign() <= 0 {
				t.Fatalf("%s goes and is not needed", e.UID)
			}
			short.Sub(u)
		}
		if len(d.Further) > 0 && !config.Options.Batch {
			t.Fatal("more than one goes")
		}
	})
}
