package engine

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/resource"
)

func TestADM_Admission(t *testing.T) {
	t.Parallel()
	memory, disks := []Condition{MemoryPressure}, []Condition{DiskPressure}
	both := []Condition{MemoryPressure, DiskPressure}
	for _, tc := range []struct {
		name       string
		conditions []Condition
		pod        Newcomer
		want       bool
		rule       string
	}{
		{"ADM-1: no pressure", nil, Newcomer{BestEffort: true}, true, "ADM-1"},
		{"ADM-1: critical", both, Newcomer{Critical: true, BestEffort: true}, true, "ADM-1"},
		{"ADM-2: memory, requests something", memory, Newcomer{}, true, "ADM-2"},
		{"ADM-2: memory, best effort", memory, Newcomer{BestEffort: true}, false, "ADM-2"},
		{"ADM-2: memory, tolerated", memory, Newcomer{BestEffort: true, ToleratesMemoryPressure: true}, true, "ADM-2"},
		{"ADM-3: disk, whatever is tolerated", disks, Newcomer{ToleratesMemoryPressure: true}, false, "ADM-3"},
		{"ADM-3: both", both, Newcomer{ToleratesMemoryPressure: true}, false, "ADM-3"},
		{"ADM-3: pids", []Condition{PIDPressure}, Newcomer{}, false, "ADM-3"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			if ok, rule := (State{Conditions: tc.conditions}).Admit(tc.pod); ok != tc.want || rule != tc.rule {
				t.Errorf("%t by %s", ok, rule)
			}
		})
	}
}

func TestADM5_TheViewOfTheLoop(t *testing.T) {
	t.Parallel()
	n := newNode(t, "nodefs.available<10Gi")
	n.disk(0, gib)
	n.disk(10, 50*gib) // long gone, but the transition period holds
	if ok, _ := n.Admit(Newcomer{}); ok {
		t.Error("admitted within the transition period")
	}
	if ok, _ := (State{}).Admit(Newcomer{}); !ok {
		t.Error("rejected before the first pass")
	}
}

func TestNAL1_NAL2_NAL3_NAL4_NAL5_NAL9_Allocatable(t *testing.T) {
	t.Parallel()
	capacity := NodeResources{Memory: *q("34359738368"), EphemeralStorage: *q("107374182400")}
	oneGi := NodeResources{Memory: *q("1Gi"), EphemeralStorage: *q("1Gi")}
	for _, tc := range []struct {
		name              string
		r                 Reservation
		memory, ephemeral string
	}{
		{"NAL-9: disk", Reservation{KubeReserved: oneGi, SystemReserved: oneGi, Hard: thresholds(t, "nodefs.available<10%")}, "32212254720", "94489280352"},
		{"NAL-3: a share of memory", Reservation{Hard: thresholds(t, "memory.available<5%")}, "32641751424", "107374182400"},
		{"NAL-2: nothing else counts, NAL-5: imagefs neither", Reservation{Hard: thresholds(t, "imagefs.available<15%,nodefs.inodesFree<5%,containerfs.available<1Gi")}, "34359738368", "107374182400"},
		{"NAL-4: without the eviction term", Reservation{KubeReserved: oneGi}, "33285996544", "106300440576"},
		{"NAL-1: never below 0", Reservation{KubeReserved: NodeResources{Memory: *q("1Ti"), EphemeralStorage: *q("1Ti")}}, "0", "0"},
		{"NAL-1: huge pages come off memory", Reservation{HugePages: *q("1Gi")}, "33285996544", "107374182400"},
		{"NAL-1: and not below 0", Reservation{HugePages: *q("1Ti")}, "0", "107374182400"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			got := tc.r.Allocatable(capacity)
			if got.Memory.Cmp(resource.MustParse(tc.memory)) != 0 || got.EphemeralStorage.Cmp(resource.MustParse(tc.ephemeral)) != 0 {
				t.Errorf("memory %s, ephemeral storage %s", got.Memory.AsDec(), got.EphemeralStorage.AsDec())
			}
		})
	}
}

func TestNAL7_NAL8_TheDocumentedExample(t *testing.T) {
	t.Parallel()
	capacity := NodeResources{Memory: *q("32Gi")}
	r := Reservation{KubeReserved: NodeResources{Memory: *q("2Gi")}, SystemReserved: NodeResources{Memory: *q("1Gi")}, Hard: thresholds(t, "memory.available<100Mi")}
	if got := r.Allocatable(capacity).Memory; got.Value() != 31033655296 { // 28.9 GiB
		t.Errorf("allocatable %d", got.Value())
	}
	if got := r.Enforced(capacity); got.Value() != 31138512896 { // 29 GiB
		t.Errorf("enforced %d", got.Value())
	}
}

func TestNAL6_NAL10_WhatDoesNotStart(t *testing.T) {
	t.Parallel()
	capacity := NodeResources{Memory: *q("32Gi"), EphemeralStorage: *q("8Gi")}
	for _, tc := range []struct {
		name string
		r    Reservation
		ok   bool
	}{
		{"NAL-6: more than there is", Reservation{KubeReserved: NodeResources{EphemeralStorage: *q("10Gi")}}, false},
		{"NAL-6: all there is", Reservation{KubeReserved: NodeResources{EphemeralStorage: *q("8Gi")}}, true},
		{"NAL-6: eviction counts", Reservation{KubeReserved: NodeResources{EphemeralStorage: *q("8Gi")}, Hard: thresholds(t, "nodefs.available<1")}, false},
		{"NAL-10: negative", Reservation{SystemReserved: NodeResources{Memory: *q("-1")}}, false},
	} {
		if err := tc.r.Validate(capacity); (err == nil) != tc.ok {
			t.Errorf("%s: %v", tc.name, err)
		}
	}
}

func TestACC1_ACC2_ACC6_ACC7_ACC22_ACC23_PodUsage(t *testing.T) {
	t.Parallel()
	f := func(seconds int, b, i int64) *FSStats {
		return &FSStats{Time: start.Add(time.Duration(seconds) * time.Second), UsedBytes: bytes(b), InodesUsed: bytes(i)}
	}
	parts := UsageParts{
		NodeFS:     FSStats{Time: start.Add(-30 * time.Second), AvailableBytes: bytes(50 * gib), CapacityBytes: bytes(100 * gib), UsedBytes: bytes(50 * gib)},
		Containers: []ContainerStats{{Name: "a", RootFS: f(5, 314572800, 300), Logs: f(9, 20971520, 3)}},
		Volumes:    []VolumeStats{{Name: "v", FSStats: *f(1, 1073741824, 11)}, {Name: "config", FSStats: *f(1, 8192, 0)}},
		EtcHosts:   f(0, 4096, 1),
	}
	got := PodUsage(parts)
	want := FSStats{Time: start.Add(9 * time.Second), AvailableBytes: bytes(50 * gib), CapacityBytes: bytes(100 * gib), UsedBytes: bytes(1409298432), InodesUsed: bytes(315)}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	parts.NoLogInodes = true
	if got := PodUsage(parts); *got.InodesUsed != 312 {
		t.Errorf("ACC-23: %d inodes from cAdvisor", *got.InodesUsed)
	}
	for kind, want := range map[VolumeKind]bool{EmptyDirDisk: true, ConfigMap: true, GitRepo: true, HostPath: false, EmptyDirMemory: false, OtherVolume: false} {
		if kind.Ephemeral() != want {
			t.Errorf("ACC-2: %s: %t", kind, kind.Ephemeral())
		}
	}
	if got := PodUsage(UsageParts{}); got.UsedBytes != nil || got.InodesUsed != nil {
		t.Errorf("nothing known comes to %v bytes", got.UsedBytes)
	}
	if got := PodUsage(UsageParts{Containers: []ContainerStats{{Logs: f(0, 5, 5)}}}); got.UsedBytes != nil {
		t.Errorf("logs without a writable layer count: %d", *got.UsedBytes)
	}
}

func TestACC3_ACC4_ACC11_WhatIsNotMeasuredCountsNothing(t *testing.T) {
	t.Parallel()
	pods := []Pod{{UID: "crash-loop"}, {UID: "runs"}}
	logsUnknown := usage("runs", gib) // ACC-11: one of its log files vanished
	got := ranking(NodeFSAvailable, Single, pods, []PodStats{logsUnknown})
	if order(got) != "crash-loop runs" || got[1].Usage.Value() != gib || got[0].Measured {
		t.Errorf("%s: %+v", order(got), got)
	}
}

func TestACC5_Sandboxes(t *testing.T) {
	t.Parallel()
	at := func(id, name string, ready bool, seconds int) SandboxRecord {
		return SandboxRecord{ID: id, Name: name, Ready: ready, CreatedAt: start.Add(time.Duration(seconds) * time.Second)}
	}
	got := MeasuredSandboxes([]SandboxRecord{
		at("only", "a", false, 0),
		at("dead", "b", false, 9), at("ready1", "b", true, 1), at("ready2", "b", true, 2),
		at("newest", "c", false, 5), at("older", "c", false, 4),
	})
	var ids []string
	for _, s := range got {
		ids = append(ids, s.ID)
	}
	if diff := cmp.Diff([]string{"only", "ready1", "ready2", "newest"}, ids); diff != "" {
		t.Error(diff)
	}
}

func TestACC10_PodLogsAreNotContainerLogs(t *testing.T) {
	t.Parallel()
	got := PodUsage(UsageParts{
		Containers: []ContainerStats{{RootFS: &FSStats{}, Logs: &FSStats{UsedBytes: bytes(10)}}}, PodLogs: &FSStats{UsedBytes: bytes(1)},
	})
	if *got.UsedBytes != 11 {
		t.Errorf("%d bytes", *got.UsedBytes)
	}
}

func TestACC20_ACC21_SizesOfVolumes(t *testing.T) {
	t.Parallel()
	if got := QuotaSize(q("4Gi"), q("1Gi")); got.String() != "1Gi" {
		t.Errorf("quota %s", got)
	}
	if got := QuotaSize(q("4Gi"), q("0")); got.String() != "4Gi" {
		t.Errorf("quota %s", got)
	}
	if got := QuotaSize(nil, nil); got != nil {
		t.Errorf("quota %s", got)
	}
	for _, tc := range []struct{ pod, size, want string }{{"4Gi", "8Gi", "4Gi"}, {"4Gi", "1Gi", "1Gi"}, {"0", "0", "28.9Gi"}} {
		if got := MemoryVolumeSize(*q("28.9Gi"), q(tc.pod), q(tc.size)); got.Cmp(resource.MustParse(tc.want)) != 0 {
			t.Errorf("%+v: %s", tc, &got)
		}
	}
}
