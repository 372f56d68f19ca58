package engine

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestREC_Lists(t *testing.T) {
	t.Parallel()
	both := []Reclaim{DeadContainers, UnusedImages}
	for _, tc := range []struct {
		name                   string
		layout                 Layout
		node, image, container []Reclaim
	}{
		{"REC-1: single", Single, both, both, both},
		{"REC-1: odd", Odd, both, both, both},
		{"REC-2: dedicated", Dedicated, nil, both, both},
		{"REC-3: split", Split, both[:1], both[1:], both[:1]},
		{"inert", Inert, nil, nil, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			for signal, want := range map[Signal][]Reclaim{
				NodeFSAvailable: tc.node, ImageFSAvailable: tc.image, ContainerFSAvailable: tc.container,
				NodeFSInodesFree: tc.node, ImageFSInodesFree: tc.image, ContainerFSInodesFree: tc.container,
				MemoryAvailable: nil, AllocatableMemoryAvailable: nil, PIDAvailable: nil,
			} {
				if diff := cmp.Diff(want, ReclaimFor(signal, tc.layout)); diff != "" {
					t.Errorf("%s: %s", signal, diff)
				}
			}
		})
	}
}

func TestREC4_ContainersBeforeImages(t *testing.T) {
	t.Parallel()
	if got := newNode(t, "nodefs.available<10Gi").disk(0, gib).Reclaim; len(got) != 2 || got[0] != DeadContainers {
		t.Errorf("reclaim %v: images of dead containers would still be in use", got)
	}
}

func TestREC5_NoFiguresAfterReclaim(t *testing.T) {
	t.Parallel()
	n := newNode(t, "nodefs.available<10Gi")
	if ok, _ := n.Resolved(n.State, n.disk(0, gib), nil); ok {
		t.Error("unknown passes for enough")
	}
}

func TestREC6_EverythingHasToBeClear(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name  string
		node  *node
		after Summary
		want  bool
	}{
		{"soft threshold, long before its grace is over", newNode(t, "nodefs.available<10Gi", "nodefs.available<20Gi", "nodefs.available=1h"), Summary{NodeFS: disk(15 * gib)}, false},
		{"memory", newNode(t, "nodefs.available<10Gi,memory.available<1Gi"), Summary{NodeFS: disk(50 * gib), Memory: &MemoryStats{AvailableBytes: bytes(1), WorkingSetBytes: bytes(1)}}, false},
		{"minimum reclaim", newNode(t, "nodefs.available<10Gi", "", "", "nodefs.available=1Gi"), Summary{NodeFS: disk(11*gib - 1)}, false},
		{"all clear", newNode(t, "nodefs.available<10Gi", "", "", "nodefs.available=1Gi"), Summary{NodeFS: disk(11 * gib)}, true},
		{"not seen counts as clear", newNode(t, "nodefs.available<10Gi"), Summary{}, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			d := tc.node.disk(0, 8*gib)
			if ok, still := tc.node.Resolved(tc.node.State, d, &tc.after); ok != tc.want {
				t.Errorf("resolved is %t, still %v", ok, still)
			}
		})
	}
}

func TestREC7_StaleFiguresCountHere(t *testing.T) {
	t.Parallel()
	n := newNode(t, "nodefs.available<10Gi")
	d := n.pass(0, Summary{NodeFS: disk(gib).at(start)})
	if ok, _ := n.Resolved(n.State, d, &Summary{NodeFS: disk(50 * gib).at(start)}); !ok {
		t.Error("figures of the same moment are not taken")
	}
	if ok, _ := n.Resolved(n.State, d, &Summary{NodeFS: disk(gib).at(start)}); ok {
		t.Error("figures of the same moment count for nothing")
	}
}

func TestREC8_NothingToReclaim(t *testing.T) {
	t.Parallel()
	n := newNode(t, "nodefs.available<10Gi").settled(Detected{ImageApart: true})
	d := n.disk(0, gib)
	if len(d.Reclaim) != 0 || d.Victim == nil {
		t.Fatalf("%+v", d)
	}
	if ok, _ := n.Resolved(n.State, d, &Summary{NodeFS: disk(50 * gib)}); ok {
		t.Error("it was enough without having been done")
	}
}

func TestREC9_TheSameAgainEachPass(t *testing.T) {
	t.Parallel()
	n := newNode(t, "nodefs.available<10Gi")
	first := n.disk(0, gib)
	if diff := cmp.Diff(first.Reclaim, n.disk(10, gib).Reclaim); diff != "" {
		t.Error(diff)
	}
}

func TestREC11_PressureOutlivesReclaim(t *testing.T) {
	t.Parallel()
	n := newNode(t, "nodefs.available<10Gi")
	n.disk(0, gib)
	n.disk(10, 50*gib)
	wantPressure(t, n.State, true)
}
