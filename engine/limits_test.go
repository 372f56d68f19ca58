package engine

import (
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"
)

// limited has a container with a limit of ephemeral storage.
func limited(limit string) Pod {
	return Pod{UID: "pod", Containers: []Container{{Name: "a", Limits: Amounts{EphemeralStorage: q(limit)}}}}
}

func over(t *testing.T, layout Detected, pod Pod, st PodStats) *Eviction {
	t.Helper()
	st.UID = pod.UID
	list := Config{}.overLimit(layout, []Pod{pod}, (&Summary{Pods: []PodStats{st}}).podStats())
	if len(list) == 0 {
		return nil
	}
	return &list[0]
}

func wantOver(t *testing.T, e *Eviction, cause Cause, subject, limit string) {
	t.Helper()
	if e == nil || e.Cause != cause || e.Subject != subject || e.Limit.String() != limit || e.GraceSeconds != 1 {
		t.Errorf("got %+v, want %s of %q above %s", e, cause, subject, limit)
	}
}

func TestLSE1_WithoutAnyThreshold(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	n.LimitIsolation = true
	n.pods, n.stats = []Pod{limited("1Gi")}, []PodStats{{UID: "pod", EphemeralStorage: &FSStats{UsedBytes: bytes(2 * gib)}}}
	wantOutcome(t, n.pass(0, Summary{}), OverLimit)
	if len(n.Conditions) != 0 {
		t.Errorf("conditions %v", n.Conditions)
	}
	n.LimitIsolation = false
	wantOutcome(t, n.pass(10, Summary{}), Off)
}

func TestLSE2_AllOffendersEachOnce(t *testing.T) {
	t.Parallel()
	pod := limited("1Gi")
	pod.Volumes = []Volume{{Name: "v", Kind: EmptyDirDisk, SizeLimit: q("1")}}
	st := PodStats{EphemeralStorage: &FSStats{UsedBytes: bytes(2 * gib)}, Volumes: []VolumeStats{{Name: "v", FSStats: FSStats{UsedBytes: bytes(2)}}}}
	var pods []Pod
	var stats []PodStats
	for _, uid := range []string{"c", "a", "unmeasured", "b"} {
		pod.UID = uid
		pods = append(pods, pod)
		if st.UID = uid; uid != "unmeasured" {
			stats = append(stats, st)
		}
	}
	got := Config{}.overLimit(Detected{}, pods, (&Summary{Pods: stats}).podStats())
	if len(got) != 3 || got[0].UID != "a" || got[2].UID != "c" || got[0].Cause != EmptyDirLimit {
		t.Errorf("%+v", got)
	}
}

func TestLSE3_CriticalPodsStay(t *testing.T) {
	t.Parallel()
	pod := limited("1")
	pod.Static = true
	if e := over(t, Detected{}, pod, PodStats{EphemeralStorage: &FSStats{UsedBytes: bytes(gib)}}); e != nil {
		t.Errorf("%+v", e)
	}
	wantOver(t, over(t, Detected{}, limited("1Gi"), PodStats{EphemeralStorage: &FSStats{UsedBytes: bytes(2 * gib)}}), PodLimit, "", "1Gi")
}

func TestLSE4_LSE5_EmptyDirs(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name   string
		volume Volume
		used   int64
		want   bool
	}{
		{"LSE-4: at the limit", Volume{Kind: EmptyDirDisk, SizeLimit: q("1Gi")}, 1073741824, false},
		{"LSE-4: above", Volume{Kind: EmptyDirDisk, SizeLimit: q("1Gi")}, 1073741825, true},
		{"LSE-4: 0 is no limit", Volume{Kind: EmptyDirDisk, SizeLimit: q("0")}, gib, false},
		{"LSE-4: none", Volume{Kind: EmptyDirDisk}, gib, false},
		{"LSE-5: memory", Volume{Kind: EmptyDirMemory, SizeLimit: q("1Gi")}, 2 * gib, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			tc.volume.Name = "v"
			pod := Pod{UID: "pod", Volumes: []Volume{tc.volume}}
			st := PodStats{Volumes: []VolumeStats{{Name: "v", FSStats: FSStats{UsedBytes: bytes(tc.used)}}}}
			e := over(t, Detected{}, pod, st)
			if (e != nil) != tc.want {
				t.Fatalf("%+v", e)
			}
			if e != nil {
				wantOver(t, e, EmptyDirLimit, "v", "1Gi")
			}
			st.Volumes[0].Name = "other"
			if e := over(t, Detected{}, pod, st); e != nil {
				t.Errorf("without figures: %+v", e)
			}
		})
	}
	pod := Pod{UID: "pod", Volumes: []Volume{{Name: "v", Kind: EmptyDirMemory, SizeLimit: q("1")}}}
	stats := podStats{"pod": {Volumes: []VolumeStats{{Name: "v", FSStats: FSStats{UsedBytes: bytes(2)}}}}}
	if got := (Config{MemoryVolumesByKernel: true}).overLimit(Detected{}, []Pod{pod}, stats); len(got) != 0 {
		t.Errorf("LSE-5 with the gate: %+v", got)
	}
}

func TestLSE6_LSE7_LSE8_PodLimit(t *testing.T) {
	t.Parallel()
	sum := limited("2Gi")
	sum.Overhead.EphemeralStorage = q("1Gi")
	init := Pod{InitContainers: []Container{{Limits: Amounts{EphemeralStorage: q("0")}}}}
	podLevel := limited("1Gi")
	podLevel.PodLevel = true
	for _, tc := range []struct {
		name string
		pod  Pod
		want string
	}{
		{"LSE-6: overhead on top", sum, "3Gi"},
		{"LSE-6: any container's counts, even 0", init, "0"},
		{"LSE-6: pod level does not erase it", podLevel, "1Gi"},
	} {
		if got := tc.pod.Limit(); got == nil || got.Cmp(resource.MustParse(tc.want)) != 0 {
			t.Errorf("%s: %s", tc.name, got)
		}
	}
	if got := (&Pod{Containers: []Container{{}}, Overhead: Amounts{EphemeralStorage: q("1Gi")}}).Limit(); got != nil {
		t.Errorf("LSE-6: nobody sets one: %s", got)
	}

	neighbour := limited("1Gi")
	neighbour.Containers = append(neighbour.Containers, Container{Name: "b"})
	wantOver(t, over(t, Detected{}, neighbour, PodStats{EphemeralStorage: &FSStats{UsedBytes: bytes(2 * gib)}}), PodLimit, "", "1Gi") // LSE-7
	if e := over(t, Detected{}, neighbour, PodStats{EphemeralStorage: &FSStats{UsedBytes: bytes(gib)}}); e != nil {
		t.Errorf("LSE-7: at the limit: %+v", e)
	}
	wantOver(t, over(t, Detected{}, limited("0"), PodStats{EphemeralStorage: &FSStats{UsedBytes: bytes(1)}}), PodLimit, "", "0") // LSE-8
	if e := over(t, Detected{}, limited("0"), PodStats{Containers: []ContainerStats{{Name: "a", Logs: &FSStats{UsedBytes: bytes(1)}}}}); e != nil {
		t.Errorf("LSE-8: a container's 0 is no limit, and of the pod nothing is known: %+v", e)
	}
}

func TestLSE9_LSE10_ContainerLimitForgetsTheWritableLayer(t *testing.T) {
	t.Parallel()
	st := PodStats{Containers: []ContainerStats{{Name: "a", RootFS: &FSStats{UsedBytes: bytes(2 * gib)}, Logs: &FSStats{UsedBytes: bytes(gib / 2)}}}}
	wantOver(t, over(t, Detected{}, limited("1Gi"), st), ContainerLimit, "a", "1Gi")
	for _, layout := range []Detected{{ImageApart: true}, {ImageApart: true, ContainerApart: true}} {
		if e := over(t, layout, limited("1Gi"), st); e != nil {
			t.Errorf("%s: %+v", layout.Layout(), e)
		}
	}
	st.EphemeralStorage = &FSStats{UsedBytes: bytes(5 * gib / 2)}
	wantOver(t, over(t, Detected{ImageApart: true}, limited("1Gi"), st), PodLimit, "", "1Gi") // LSE-10
	roomy := limited("1Gi")
	roomy.Containers = append(roomy.Containers, Container{Name: "b", Limits: Amounts{EphemeralStorage: q("5Gi")}})
	if e := over(t, Detected{ImageApart: true}, roomy, st); e != nil {
		t.Errorf("LSE-10: the neighbour's limit hides it: %+v", e)
	}
	init := Pod{UID: "pod", InitContainers: []Container{{Name: "a", Limits: Amounts{EphemeralStorage: q("1Gi")}}}}
	st.EphemeralStorage = nil
	if e := over(t, Detected{}, init, st); e != nil {
		t.Errorf("LSE-9: an init container: %+v", e)
	}
	init.InitContainers[0].Sidecar = true
	wantOver(t, over(t, Detected{}, init, st), ContainerLimit, "a", "1Gi")
}

// TestSeedT16 is a container far above its limit on a node with its images
// apart: nobody notices, because the writable layer is not looked at and the
// pod's limit is the sum of two.
func TestSeedT16(t *testing.T) {
	t.Parallel()
	pod := Pod{UID: "pod", Containers: []Container{
		{Name: "writer", Limits: Amounts{EphemeralStorage: q("524288000")}}, {Name: "sidecar", Limits: Amounts{EphemeralStorage: q("524288000")}},
	}}
	st := PodStats{
		Containers:       []ContainerStats{{Name: "writer", RootFS: &FSStats{UsedBytes: bytes(734003200)}}, {Name: "sidecar", RootFS: &FSStats{UsedBytes: bytes(0)}}},
		EphemeralStorage: &FSStats{UsedBytes: bytes(734003200)},
	}
	if e := over(t, Detected{ImageApart: true}, pod, st); e != nil {
		t.Errorf("%+v", e)
	}
}

func TestLSE11_SYN41_WhatALimitEvictionSays(t *testing.T) {
	t.Parallel()
	want := map[Cause]string{EmptyDirLimit: "emptydirfs.limit", PodLimit: "ephemeralpodfs.limit", ContainerLimit: "ephemeralcontainerfs.limit"}
	for cause, name := range want {
		if string(cause) != name {
			t.Errorf("%s is called %s", name, cause)
		}
	}
	e := over(t, Detected{}, limited("1Gi"), PodStats{EphemeralStorage: &FSStats{UsedBytes: bytes(2 * gib)}})
	if e.Explained || len(e.Offenders) > 0 || e.Available != 0 {
		t.Errorf("it tells of usage: %+v", e)
	}
}
