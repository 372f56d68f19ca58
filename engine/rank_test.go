package engine

import (
	"math/rand/v2"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"
)

// usage is a pod whose writable layers take so many bytes.
func usage(uid string, rootFS int64) PodStats {
	return PodStats{UID: uid, Containers: []ContainerStats{{Name: "c", RootFS: &FSStats{UsedBytes: bytes(rootFS), InodesUsed: bytes(rootFS)}}}}
}

func request(uid, ephemeral string) Pod {
	return Pod{UID: uid, Containers: []Container{{Name: "c", Requests: Amounts{EphemeralStorage: q(ephemeral)}}}}
}

// order is the ranking, equal pods in brackets.
func order(list []Ranked) string {
	var out []string
	for i, r := range list {
		if i > 0 && r.Group == list[i-1].Group {
			out[len(out)-1] += "=" + r.UID
		} else {
			out = append(out, r.UID)
		}
	}
	return strings.Join(out, " ")
}

func ranking(s Signal, layout Layout, pods []Pod, stats []PodStats) []Ranked {
	summary := Summary{Pods: stats}
	return Options{}.rank(s, layout, pods, summary.podStats())
}

func TestRANK_WhatIsCounted(t *testing.T) {
	t.Parallel()
	pod := Pod{UID: "a", Volumes: []Volume{{Name: "v", Kind: EmptyDirDisk}, {Name: "m", Kind: EmptyDirMemory}, {Name: "h", Kind: HostPath}, {Name: "x", Kind: OtherVolume}}}
	f := func(b, i int64) *FSStats { return &FSStats{UsedBytes: bytes(b), InodesUsed: bytes(i)} }
	st := PodStats{
		UID:        "a",
		Containers: []ContainerStats{{Name: "c", RootFS: f(1, 2), Logs: f(10, 20)}},
		Volumes: []VolumeStats{
			{Name: "v", FSStats: *f(100, 200)}, {Name: "v", FSStats: *f(1e6, 1e6)}, {Name: "m", FSStats: *f(1e7, 1e7)}, {Name: "h", FSStats: *f(1000, 2000)}, {Name: "x", FSStats: *f(1e8, 1e8)},
		},
		EphemeralStorage: f(1e9, 1e9),
	}
	for _, tc := range []struct {
		name                   string
		layout                 Layout
		node, image, container int64
	}{
		{"RANK-1: single counts all everywhere", Single, 1111, 1111, 1111},
		{"RANK-1: so does the odd one", Odd, 1111, 1111, 1111},
		{"RANK-2: dedicated", Dedicated, 1110, 1, 1},
		{"RANK-3: split; RANK-4: images count nothing", Split, 1111, 0, 1111},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			for signal, want := range map[Signal]int64{
				NodeFSAvailable: tc.node, ImageFSAvailable: tc.image, ContainerFSAvailable: tc.container,
				NodeFSInodesFree: 2 * tc.node, ImageFSInodesFree: 2 * tc.image, ContainerFSInodesFree: 2 * tc.container,
			} {
				if got := ranking(signal, tc.layout, []Pod{pod}, []PodStats{st})[0].Usage; got.Value() != want {
					t.Errorf("%s: %s, want %d", signal, &got, want)
				}
			}
		})
	}
}

func TestRANK5_RANK6_LocalVolumesByName(t *testing.T) {
	t.Parallel()
	for kind, want := range map[VolumeKind]bool{EmptyDirDisk: true, ConfigMap: true, GitRepo: true, HostPath: true, EmptyDirMemory: false, OtherVolume: false} {
		if kind.Local() != want {
			t.Errorf("%s: local is %t", kind, kind.Local())
		}
	}
	// Files directly in the log directory and etc-hosts are only in the sum.
	st := PodStats{UID: "a", EphemeralStorage: &FSStats{UsedBytes: bytes(gib)}}
	if got := ranking(NodeFSAvailable, Single, []Pod{{UID: "a"}}, []PodStats{st})[0].Usage; !got.IsZero() {
		t.Errorf("usage %s", &got)
	}
}

func TestRANK7_UnknownIsNothing(t *testing.T) {
	t.Parallel()
	st := PodStats{UID: "a", Containers: []ContainerStats{{RootFS: &FSStats{UsedBytes: bytes(gib)}, Logs: &FSStats{}}, {}}}
	if got := ranking(NodeFSAvailable, Single, []Pod{{UID: "a"}}, []PodStats{st})[0].Usage; got.Value() != gib {
		t.Errorf("usage %s", &got)
	}
}

func TestRANK_Order(t *testing.T) {
	t.Parallel()
	prio := func(uid string, p int32) Pod { return Pod{UID: uid, Priority: &p} }
	for _, tc := range []struct {
		name   string
		signal Signal
		pods   []Pod
		stats  []PodStats
		want   string
	}{
		{"RANK-8: unmeasured first, RANK-13: also one that waits for its image", NodeFSAvailable, []Pod{prio("big", 0), prio("waits", 1000)}, []PodStats{usage("big", 1<<40)}, "waits big"},
		{"RANK-8: two unmeasured go by priority", NodeFSAvailable, []Pod{prio("a", 5), prio("b", 1)}, nil, "b a"},
		{"RANK-9: equal to the request is within", NodeFSAvailable, []Pod{request("within", "1Gi"), prio("over", 5)}, []PodStats{usage("within", gib), usage("over", 1)}, "over within"},
		{"RANK-9: one byte more is not", NodeFSAvailable, []Pod{request("exceeds", "1Gi"), prio("other", 0)}, []PodStats{usage("exceeds", gib+1), usage("other", 0)}, "exceeds other"},
		{"RANK-10: lower priority first, none is 0", NodeFSAvailable, []Pod{prio("a", 100), {UID: "b"}, prio("c", -5)}, []PodStats{usage("a", 9), usage("b", 9), usage("c", 9)}, "c b a"},
		{"RANK-11: farther above its request first", NodeFSAvailable, []Pod{request("a", "4Gi"), request("b", "0")}, []PodStats{usage("a", 5*gib), usage("b", 3*gib)}, "b a"},
		{"RANK-12: equals by UID", NodeFSAvailable, []Pod{{UID: "b"}, {UID: "a"}, {UID: "c"}}, []PodStats{usage("a", 7), usage("b", 7), usage("c", 8)}, "c a=b"},
		{"RANK-14: QoS plays no part", NodeFSAvailable, []Pod{{UID: "best-effort"}, {UID: "guaranteed", Containers: []Container{{Requests: Amounts{Memory: q("1Gi")}}}}}, []PodStats{usage("best-effort", 7), usage("guaranteed", 7)}, "best-effort=guaranteed"},
		{"RANK-15: one inode exceeds, none does not", NodeFSInodesFree, []Pod{request("one", "1Gi"), request("none", "0")}, []PodStats{usage("one", 1), usage("none", 0)}, "one none"},
		{"pids: priority before missing figures", PIDAvailable, []Pod{prio("a", 1), prio("b", 0), prio("c", 0)}, []PodStats{{UID: "b", ProcessCount: bytes(5)}}, "c b a"},
		{"pids: more first", PIDAvailable, []Pod{{UID: "a"}, {UID: "b"}}, []PodStats{{UID: "a", ProcessCount: bytes(5)}, {UID: "b", ProcessCount: bytes(6)}}, "b a"},
		{"memory: usage above request", MemoryAvailable, []Pod{{UID: "a", Containers: []Container{{Requests: Amounts{Memory: q("2Gi")}}}}, {UID: "b"}}, []PodStats{{UID: "a", MemoryBytes: bytes(3 * gib)}, {UID: "b", MemoryBytes: bytes(2 * gib)}}, "b a"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			if got := order(ranking(tc.signal, Single, tc.pods, tc.stats)); got != tc.want {
				t.Errorf("order %s, want %s", got, tc.want)
			}
		})
	}
}

func TestRANK16_InodeRankSubtractsByteRequest(t *testing.T) {
	t.Parallel()
	pods := []Pod{request("a", "1Gi"), {UID: "b"}}
	got := ranking(NodeFSInodesFree, Single, pods, []PodStats{usage("a", 1_000_000), usage("b", 10)})
	if order(got) != "b a" || got[0].Over.Value() != 10 || got[1].Over.Value() != -1_072_741_824 {
		t.Errorf("%s: %s, %s", order(got), &got[0].Over, &got[1].Over)
	}
}

// TestSeedT19 is a node that ran out of inodes: the pod that had taken nearly
// all of them was protected by its request of bytes.
func TestSeedT19(t *testing.T) {
	t.Parallel()
	pods := []Pod{request("A", "1Gi"), {UID: "B"}, {UID: "C"}}
	stats := []PodStats{usage("A", 5_000_000), usage("B", 10)}
	for range 1000 {
		rand.Shuffle(len(pods), func(i, j int) { pods[i], pods[j] = pods[j], pods[i] })
		if got := order(ranking(NodeFSInodesFree, Single, pods, stats)); got != "C B A" {
			t.Fatalf("order %s", got)
		}
	}
}

func TestRANK17_RANK18_RANK19_RANK20_Requests(t *testing.T) {
	t.Parallel()
	c := func(amount string, sidecar bool) Container {
		return Container{Sidecar: sidecar, Requests: Amounts{EphemeralStorage: q(amount)}}
	}
	for _, tc := range []struct {
		name string
		pod  Pod
		want string
	}{
		{"RANK-17: the largest need at any one time", Pod{
			Containers:     []Container{c("1Gi", false), c("2Gi", false)},
			InitContainers: []Container{c("4Gi", false), c("512Mi", true), c("5Gi", false)},
		}, "5632Mi"},
		{"RANK-17: sidecars stay", Pod{Containers: []Container{c("1Gi", false)}, InitContainers: []Container{c("1Gi", true), c("1Gi", true)}}, "3Gi"},
		{"RANK-18: overhead on top", Pod{Containers: []Container{c("10Gi", false)}, Overhead: Amounts{EphemeralStorage: q("1Gi")}}, "11Gi"},
		{"RANK-18: but not on nothing", Pod{Containers: []Container{c("0", false)}, Overhead: Amounts{EphemeralStorage: q("1Gi")}}, "0"},
		{"RANK-19: pod-level resources wipe it", Pod{Containers: []Container{c("10Gi", false)}, PodLevel: true, PodLevelMemory: q("1Gi"), Overhead: Amounts{EphemeralStorage: q("1Gi")}}, "0"},
		{"RANK-20: nothing but the specification", Pod{}, "0"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			want := resource.MustParse(tc.want)
			for range 2 { // asking must not change the pod
				if got := tc.pod.Request(EphemeralStorage); got.Cmp(want) != 0 {
					t.Errorf("request %s, want %s", &got, &want)
				}
			}
		})
	}
	pod := Pod{Containers: []Container{{Requests: Amounts{Memory: q("3Gi")}}}, PodLevel: true, PodLevelMemory: q("1Gi")}
	if got := pod.Request(Memory); got.Value() != gib {
		t.Errorf("memory at pod level: %s", &got)
	}
}
