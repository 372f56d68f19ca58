package sim

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/record"
)

// one is a node of one disk of 100 GiB and pods of one container each.
func one(t testing.TB, hard string, pods ...Pod) *World {
	t.Helper()
	return &World{
		Lasts: time.Hour, Filesystems: []Filesystem{{Name: "disk", CapacityBytes: 100 * gib, Inodes: 1_000_000}},
		Images: []Image{{Name: "app", Layers: []Layer{{ID: "app", Bytes: gib}}}}, Pods: pods,
		Kubelet: kubelet(t, map[string]string{"nodefs.available": hard}), Cleave: Cleave{Options: engine.Cleave()},
	}
}

// writes is a pod that writes to one place.
func writes(name string, w Writer) Pod {
	return Pod{
		Spec:       engine.Pod{Name: name, Containers: []engine.Container{{Name: "c"}}, Volumes: []engine.Volume{{Name: "v", Kind: engine.EmptyDirDisk}, {Name: "h", Kind: engine.HostPath}}},
		Containers: []Container{{Name: "c", Writers: []Writer{w}}},
	}
}

func played(t testing.TB, w *World, p Profile) *Result {
	t.Helper()
	r, err := Play(w, p)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func has(r *Result, what What) (out []Event) {
	for _, e := range r.Events {
		if e.What == what {
			out = append(out, e)
		}
	}
	return out
}

// TestNoSpaceIsCounted is arithmetic: a disk of 100 GiB with 1 GiB of image is
// full after 99 s at 1 GiB a second; nobody may go.
func TestNoSpaceIsCounted(t *testing.T) {
	t.Parallel()
	for _, to := range []Writer{{To: WritableLayer}, {To: Log}, {To: Volume, Volume: "v"}, {To: Volume, Volume: "h"}} {
		w := one(t, "10%", writes("writer", to))
		w.Pods[0].Spec.Static = true
		w.Pods[0].Containers[0].Writers[0].BytesPerSecond = gib
		w.Kubelet.Logs.MaxSizeBytes = -1
		w.Lasts = 3 * time.Minute
		r := played(t, w, KubeletProfile)
		if got := r.Pods[0].NoSpace; got != 81*time.Second {
			t.Errorf("%s %s: %s without space", to.To, to.Volume, got)
		}
		if r.Filesystems[0].LeastAvailable != 0 || len(has(r, NoSpace)) != 1 || has(r, NoSpace)[0].At != 99*time.Second {
			t.Errorf("%s: %+v, %+v", to.To, r.Filesystems[0], has(r, NoSpace))
		}
	}
}

// TestBytesAddUp: rates that are no whole number per step lose nothing.
func TestBytesAddUp(t *testing.T) {
	t.Parallel()
	w := one(t, "1", writes("writer", Writer{To: WritableLayer, BytesPerSecond: 7, InodesPerSecond: 3, From: 10 * time.Second, Until: 70 * time.Second}))
	r := played(t, w, KubeletProfile)
	if f := r.Filesystems[0]; f.AvailableBytes != 99*gib-7*60 || f.InodesFree != 1_000_000-3*60 {
		t.Errorf("%+v", f)
	}
}

// TestTheKubeletsPeriods: it looks every 10 s, sees layers as they were up to
// 10 s or, by cAdvisor, 60 s ago, and collects images every 5 minutes.
func TestTheKubeletsPeriods(t *testing.T) {
	t.Parallel()
	// 10 GiB are left after 89 s; the next look is at 90 s.
	w := one(t, "10%", writes("writer", Writer{To: WritableLayer, BytesPerSecond: gib}), writes("other", Writer{To: WritableLayer, AtOnceBytes: 1}))
	r := played(t, w, KubeletProfile)
	if e := has(r, ThresholdDue); len(e) == 0 || e[0].At != 90*time.Second {
		t.Fatalf("%+v", e)
	}
	if diff := cmp.Diff([]string{"writer"}, r.Evicted); diff != "" {
		t.Error(diff)
	}
	// With figures of cAdvisor, taken at 60 s, the one that was larger then goes.
	fast := writes("fast", Writer{To: WritableLayer, AtOnceBytes: 0, BytesPerSecond: 4 * gib, From: 61 * time.Second})
	steady := writes("steady", Writer{To: WritableLayer, AtOnceBytes: 20 * gib})
	for crio, want := range map[bool]string{false: "fast", true: "steady"} {
		w := one(t, "10%", fast, steady)
		w.Kubelet.CRIO = crio
		if r := played(t, w, KubeletProfile); len(r.Evicted) == 0 || r.Evicted[0] != want {
			t.Errorf("crio %t: %v went", crio, r.Evicted)
		}
	}
	// Images: 80 of 100 are used from 1 s on, 88 from 6 minutes on.
	w = one(t, "1", writes("writer", Writer{To: WritableLayer, AtOnceBytes: 69 * gib}), writes("second", Writer{To: WritableLayer, AtOnceBytes: 8 * gib}))
	w.Pods[1].Starts = 6 * time.Minute
	w.Images = append(w.Images, Image{Name: "old", Layers: []Layer{{ID: "old", Bytes: 10 * gib}}, UnusedFor: time.Hour})
	r = played(t, w, KubeletProfile)
	if e := has(r, ImageRemoved); len(e) != 1 || e[0].At != 10*time.Minute || e[0].Rule != "IGC-17" {
		t.Errorf("%+v", e)
	}
}

// TestFaults: what goes wrong, and what follows for whoever decides.
func TestFaults(t *testing.T) {
	t.Parallel()
	world := func() *World {
		w := one(t, "10%", writes("writer", Writer{To: WritableLayer, BytesPerSecond: gib / 4}), writes("quiet", Writer{To: WritableLayer, AtOnceBytes: 1}))
		w.Images = append(w.Images, Image{Name: "old", Layers: []Layer{{ID: "old", Bytes: gib}}, UnusedFor: time.Hour})
		return w
	}
	for _, tc := range []struct {
		name  string
		fault Fault
		check func(t *testing.T, r *Result)
	}{
		{"none", Fault{Kind: "none"}, func(t *testing.T, r *Result) {
			if len(r.Evicted) != 1 || len(r.ImagesRemoved) != 1 {
				t.Errorf("%v, %v", r.Evicted, r.ImagesRemoved)
			}
		}},
		{"blind: nothing is decided (OBS-7)", Fault{Kind: MissingStats}, func(t *testing.T, r *Result) {
			if len(r.Evicted) > 0 || len(r.ImagesRemoved) > 0 || len(has(r, Blind)) == 0 || r.Pod("writer").NoSpace < 50*time.Minute {
				t.Errorf("%v, %v, %s", r.Evicted, r.ImagesRemoved, r.Pod("writer").NoSpace)
			}
		}},
		{"stale figures: nobody goes (SYN-16)", Fault{Kind: StaleStats, From: time.Minute}, func(t *testing.T, r *Result) {
			if len(r.Evicted) > 0 {
				t.Errorf("%v", r.Evicted)
			}
		}},
		{"no figures of a pod (RANK-8)", Fault{Kind: MissingPodStats, Pods: []string{"quiet"}}, func(t *testing.T, r *Result) {
			want := "writer"
			if r.Profile == KubeletProfile {
				want = "quiet"
			}
			if len(r.Evicted) == 0 || r.Evicted[0] != want {
				t.Errorf("%v", r.Evicted)
			}
		}},
		{"images stay", Fault{Kind: ImagesStay}, func(t *testing.T, r *Result) {
			if len(r.ImagesRemoved) > 0 || len(has(r, NotRemoved)) == 0 || len(r.Evicted) != 1 {
				t.Errorf("%v, %v", r.ImagesRemoved, r.Evicted)
			}
		}},
		{"the kubelet restarts: it knows no old image for two minutes (IGC-21)", Fault{Kind: KubeletRestart, From: 4 * time.Minute}, func(t *testing.T, r *Result) {
			if len(has(r, Restarted)) != 1 {
				t.Error("it did not restart")
			}
		}},
	} {
		for _, profile := range []Profile{KubeletProfile, CleaveProfile} {
			t.Run(tc.name+"/"+string(profile), func(t *testing.T) {
				t.Parallel()
				w := world()
				w.Faults = []Fault{tc.fault}
				tc.check(t, played(t, w, profile))
			})
		}
	}
}

// TestRestartForgetsImages: the old image could have made room; a kubelet just
// started does not dare to delete it (GAP-26).
func TestRestartForgetsImages(t *testing.T) {
	t.Parallel()
	for restart, want := range map[bool]int{false: 0, true: 1} {
		w := one(t, "10%", writes("writer", Writer{To: WritableLayer, BytesPerSecond: 100 * gib, From: 5*time.Minute + 15*time.Second, AtMostBytes: 60 * gib}))
		w.Images = append(w.Images, Image{Name: "old", Layers: []Layer{{ID: "old", Bytes: 30 * gib}}, UnusedFor: time.Hour})
		if restart {
			w.Faults = []Fault{{Kind: KubeletRestart, From: 5*time.Minute + 10*time.Second}}
		}
		w.Kubelet.Images.HighPercent = 100
		if r := played(t, w, KubeletProfile); len(r.Evicted) != want {
			t.Errorf("restart %t: %v went, images %v", restart, r.Evicted, r.ImagesRemoved)
		}
	}
}

// TestContainersThatStay is a crash loop whose dead containers can't be removed.
func TestContainersThatStay(t *testing.T) {
	t.Parallel()
	again := 10 * time.Second
	crash := writes("crash", Writer{To: WritableLayer, AtOnceBytes: gib})
	crash.Containers[0].ExitsAfter, crash.Containers[0].RestartsAfter = 50*time.Second, &again
	for stay, want := range map[bool]int64{false: 98 * gib, true: 39 * gib} {
		w := one(t, "1%", crash)
		if stay {
			w.Faults = []Fault{{Kind: ContainersStay}}
		}
		if r := played(t, w, KubeletProfile); r.Filesystems[0].AvailableBytes != want {
			t.Errorf("stay %t: %d GiB left", stay, r.Filesystems[0].AvailableBytes/gib)
		}
	}
}

// TestWhoKnowsAThirdDisk: containerfs on a disk of its own fills up. The kubelet
// can't see it (GAP-4, GAP-5); cleave can.
func TestWhoKnowsAThirdDisk(t *testing.T) {
	t.Parallel()
	w := one(t, "10%", writes("layer", Writer{To: WritableLayer, BytesPerSecond: gib / 10, AtMostBytes: 60 * gib}), writes("volume", Writer{To: Volume, Volume: "v", AtOnceBytes: 30 * gib}))
	w.Filesystems = append(w.Filesystems, Filesystem{Name: "images", CapacityBytes: 100 * gib}, Filesystem{Name: "containers", CapacityBytes: 50 * gib})
	w.Image, w.Container = 1, 2
	w.Kubelet = kubelet(t, map[string]string{"nodefs.available": "10%", "containerfs.available": "10%"})
	w.Cleave.LastResort = []engine.Threshold{}
	if r := played(t, w, KubeletProfile); len(r.Evicted) > 0 || r.Pod("layer").NoSpace == 0 {
		t.Errorf("kubelet: %v, %s", r.Evicted, r.Pod("layer").NoSpace)
	}
	if r := played(t, w, CleaveProfile); !slices.Equal(r.Evicted, []string{"layer"}) || r.Pod("layer").NoSpace > 0 {
		t.Errorf("cleave: %v, %s", r.Evicted, r.Pod("layer").NoSpace)
	}
}

// TestPulls: layers arrive at a rate, shared ones once; a pull that does not fit
// is tried again; its space comes back.
func TestPulls(t *testing.T) {
	t.Parallel()
	w := one(t, "1", writes("a", Writer{To: WritableLayer, AtOnceBytes: 1}), writes("b", Writer{To: WritableLayer, AtOnceBytes: 1}))
	w.PullBytesPerSecond = gib
	w.Images = []Image{
		{Name: "a", Absent: true, Layers: []Layer{{ID: "base", Bytes: 10 * gib}}}, {Name: "b", Absent: true, Layers: []Layer{{ID: "base", Bytes: 10 * gib}, {ID: "own", Bytes: 5 * gib}}},
	}
	w.Pods[1].Containers[0].Image = 1
	w.Pods[1].Starts = time.Minute
	w.Lasts = 2 * time.Minute
	r := played(t, w, KubeletProfile)
	if !r.Pod("a").Runs || !r.Pod("b").Runs || r.Filesystems[0].AvailableBytes != 85*gib-2 {
		t.Errorf("%+v", r)
	}
	w.Filesystems[0].CapacityBytes = 12 * gib
	w.Kubelet.Config.Thresholds = nil
	r = played(t, w, KubeletProfile)
	if r.Pod("b").Runs || len(has(r, PullFailed)) < 2 || r.Filesystems[0].AvailableBytes < 0 {
		t.Errorf("%+v", r)
	}
}

// TestRejectedUnderPressure: while the condition stays nothing new is let in,
// and the controller tries on (GAP-38).
func TestRejectedUnderPressure(t *testing.T) {
	t.Parallel()
	anew := 10 * time.Second
	p := writes("again", Writer{To: WritableLayer, BytesPerSecond: gib, AtMostBytes: 95 * gib})
	p.Anew, p.Spec.Owner = &anew, "ReplicaSet again"
	r := played(t, one(t, "10%", p), KubeletProfile)
	if got := r.Pod("again"); got.Evictions < 2 || got.Rejections < 25*(got.Evictions-1) {
		t.Errorf("%+v", got)
	}
}

func TestOverlapIsTold(t *testing.T) {
	t.Parallel()
	w := one(t, "10%", writes("writer", Writer{To: WritableLayer, BytesPerSecond: gib}))
	w.Cleave.LastResort = w.Kubelet.Config.Thresholds // not below cleave's own
	r := played(t, w, CleaveProfile)
	if len(has(r, Overlap)) == 0 {
		t.Error("nothing was said")
	}
	for _, e := range has(r, PodEvicted) {
		if e.By != "kubelet" {
			t.Errorf("%+v", e)
		}
	}
}

func TestValidate(t *testing.T) {
	t.Parallel()
	for name, breaks := range map[string]func(w *World){
		"none of 1 filesystems": func(w *World) { w.Image = 1 },
		"bytes used":            func(w *World) { w.Filesystems[0].UsedBytes = 101 * gib },
		"there twice":           func(w *World) { w.Pods = append(w.Pods, w.Pods[0]) },
		"has no image":          func(w *World) { w.Pods[0].Containers[0].Image = 7 },
		"which it has not":      func(w *World) { w.Pods[0].Containers[0].Writers[0] = Writer{To: Volume, Volume: "x"} },
		"on no filesystem":      func(w *World) { w.Host = []HostWriter{{Filesystem: -1}} },
		"images and what": func(w *World) {
			for _, id := range []string{"x", "y", "z", "zz"} { // four times 2^62: the sum wraps around to nothing
				w.Images[0].Layers = append(w.Images[0].Layers, Layer{ID: id, Bytes: 1 << 62})
			}
		},
		"do not fit": func(w *World) { w.Filesystems[0].UsedBytes = 99*gib + 1 },
	} {
		w := one(t, "10%", writes("p", Writer{To: Log}))
		breaks(w)
		if _, err := Play(w, KubeletProfile); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// anyWorld is any small one.
func anyWorld(t *rapid.T) *World {
	thresholds, err := engine.Parse(engine.Settings{
		Hard: map[string]string{"nodefs.available": rapid.SampledFrom([]string{"10%", "5Gi", "30%"}).Draw(t, "nodefs"), "imagefs.available": "15%", "nodefs.inodesFree": "5%"},
		Soft: map[string]string{"nodefs.available": "40%"}, SoftGrace: map[string]string{"nodefs.available": "1m"},
	})
	if err != nil {
		t.Fatal(err)
	}
	w := &World{Lasts: 10 * time.Minute, Cleave: Cleave{Options: engine.Cleave()}, PullBytesPerSecond: rapid.SampledFrom([]int64{0, gib}).Draw(t, "pull")}
	w.Kubelet.Config = engine.Config{Thresholds: thresholds, TransitionPeriod: time.Minute, LimitIsolation: true}
	w.Kubelet.Images.HighPercent, w.Kubelet.Images.LowPercent = 85, 80
	w.Kubelet.Logs.MaxSizeBytes, w.Kubelet.Logs.MaxFiles = 10<<20, 5
	w.Kubelet.CRIO = rapid.Bool().Draw(t, "crio")
	disks := rapid.IntRange(1, 3).Draw(t, "disks")
	for i := range disks {
		w.Filesystems = append(w.Filesystems, Filesystem{
			Name: string(rune('a' + i)), CapacityBytes: 20 * gib, Inodes: rapid.SampledFrom([]int64{0, 100_000}).Draw(t, "inodes"),
			FreesAfter: rapid.SampledFrom([]time.Duration{0, 7 * time.Second}).Draw(t, "frees"),
		})
	}
	w.Image, w.Container = rapid.IntRange(0, disks-1).Draw(t, "image"), rapid.IntRange(0, disks-1).Draw(t, "container")
	for i := range 4 {
		w.Images = append(w.Images, Image{Name: string(rune('p' + i)), Layers: []Layer{{ID: "base", Bytes: gib}, {ID: string(rune('p' + i)), Bytes: gib / 2}}, Absent: rapid.Bool().Draw(t, "absent")})
	}
	for i := range rapid.IntRange(0, 4).Draw(t, "pods") {
		p := writes("pod-"+string(rune('0'+i)), Writer{
			To: rapid.SampledFrom([]Place{WritableLayer, Log, Volume}).Draw(t, "to"), Volume: rapid.SampledFrom([]string{"v", "h"}).Draw(t, "volume"),
			AtOnceBytes: rapid.Int64Range(0, 8*gib).Draw(t, "atOnce"), BytesPerSecond: rapid.Int64Range(0, gib/4).Draw(t, "rate"), InodesPerSecond: rapid.Int64Range(0, 500).Draw(t, "inodeRate"),
		})
		p.Containers[0].Image = rapid.IntRange(0, 3).Draw(t, "uses")
		if rapid.Bool().Draw(t, "crashes") {
			p.Containers[0].ExitsAfter, p.Containers[0].RestartsAfter = 30*time.Second, ptr(10*time.Second)
		}
		if rapid.Bool().Draw(t, "anew") {
			p.Anew, p.Spec.Owner = ptr(time.Second), "owner"
		}
		p.Spec.Static = rapid.IntRange(0, 5).Draw(t, "static") == 0
		w.Pods = append(w.Pods, p)
	}
	if rapid.Bool().Draw(t, "fault") {
		w.Faults = []Fault{{Kind: rapid.SampledFrom([]FaultKind{StaleStats, MissingStats, MissingPodStats, ImagesStay, ContainersStay, KubeletRestart}).Draw(t, "kind"), From: time.Minute, Until: 5 * time.Minute}}
	}
	return w
}

// TestPropertyOfAnyWorld: nothing is created or lost, static pods stay, the same
// world plays the same, and each decision can be made again.
func TestPropertyOfAnyWorld(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		w := anyWorld(t)
		profile := rapid.SampledFrom([]Profile{KubeletProfile, CleaveProfile}).Draw(t, "profile")
		n := newNode(w, profile)
		n.recorded = true
		for end := ticks(w.Lasts); n.now < end; {
			n.step()
			if n.now%97 == 0 {
				balance(t, n)
			}
		}
		balance(t, n)
		for _, p := range w.Pods {
			if p.Spec.Static && slices.Contains(n.result.Evicted, p.Spec.Name) {
				t.Fatalf("static pod %s went", p.Spec.Name)
			}
		}
		for _, r := range n.result.Records {
			if r.Verdict != nil && r.Verdict.Resolved && len(r.Evicted) > 0 {
				t.Fatalf("%s goes although the reclaim was enough", r.Evicted[0].UID)
			}
		}
		for i := range n.result.Records {
			if i%8 != 0 {
				continue
			}
			if differences, err := record.Replay(n.result.Records[i]); err != nil || len(differences) > 0 {
				t.Fatalf("record %d: %v, %v", i, differences, err)
			}
		}
		again, err := Play(w, profile)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(text(t, n.result.Events), text(t, again.Events)); diff != "" {
			t.Fatal(diff)
		}
	})
}

func text(t *rapid.T, v any) string {
	out, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// balance compares what disks say with what everybody has.
func balance(t *rapid.T, n *node) {
	have := map[*disk]int64{}
	for i, d := range n.disks {
		have[d] += n.world.Filesystems[i].UsedBytes
		for _, a := range d.arriving {
			have[d] += a.bytes
		}
		if d.free() < 0 || d.used < 0 {
			t.Fatalf("%s has %d of %d bytes", d.spec.Name, d.used, d.spec.CapacityBytes)
		}
	}
	add := func(b *bag) { have[b.on] += b.bytes + b.hiddenBytes }
	instance := func(i *instance) {
		if i != nil {
			add(&i.layer)
			have[i.log.on] += i.logBytes()
		}
	}
	for _, l := range n.layers {
		add(&l.bag)
	}
	for _, i := range n.images {
		add(&i.partial)
	}
	for _, p := range n.pods {
		for _, i := range p.instances {
			instance(i)
		}
		for k, v := range p.engine.Volumes {
			if v.Kind != engine.HostPath {
				add(p.volumes[k])
			}
		}
	}
	for _, i := range n.dead {
		instance(i)
	}
	for _, b := range n.hostPaths {
		add(b)
	}
	for i := range n.hosts {
		add(n.hosts[i].bag)
	}
	for _, d := range n.disks {
		if d.used != have[d] {
			t.Fatalf("at %s %s has %d bytes used, of which %d are somebody's", n.since(), d.spec.Name, d.used, have[d])
		}
	}
}
