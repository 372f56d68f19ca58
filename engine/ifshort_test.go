package engine

import (
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// On each filesystem it is said who would go, by what is on that one, and nothing is changed by asking.
func TestIfShort(t *testing.T) {
	t.Parallel()
	zero := int32(0)
	pod := func(uid string, layer, volume int64) (Pod, PodStats) {
		return Pod{UID: uid, Name: uid, Priority: &zero, Containers: []Container{{Name: "c"}}, Volumes: []Volume{{Name: "v", Kind: EmptyDirDisk}}}, PodStats{
			UID: uid, Containers: []ContainerStats{{Name: "c", RootFS: &FSStats{UsedBytes: bytes(layer)}}}, Volumes: []VolumeStats{{Name: "v", FSStats: FSStats{UsedBytes: bytes(volume)}}},
		}
	}
	a, aStats := pod("a", gib, 20*gib)
	b, bStats := pod("b", 10*gib, 2*gib)
	list := thresholds(t, "nodefs.available<10Gi,imagefs.available<10Gi", "nodefs.available<30Gi", "nodefs.available=1h")
	for _, tc := range []struct {
		name   string
		layout Detected
		want   []string
	}{
		{"single", Detected{}, []string{"imagefs.available < 10Gi a"}},
		{"split", Detected{ImageApart: true, ContainerApart: true}, []string{"nodefs.available < 10Gi a", "imagefs.available < 10Gi nobody: OnlyWhoHelps"}},
		{"dedicated", Detected{ImageApart: true}, []string{"nodefs.available < 10Gi a", "imagefs.available < 10Gi b"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			c := Config{Thresholds: list, Options: Cleave()}
			in := Input{Now: start, Layout: &tc.layout, Pods: []Pod{a, b}, Summary: &Summary{NodeFS: disk(50 * gib), ImageFS: disk(40 * gib), ContainerFS: disk(50 * gib), Pods: []PodStats{aStats, bStats}}}
			if tc.layout == (Detected{}) {
				in.Summary.ImageFS, in.Summary.ContainerFS = disk(50*gib), disk(50*gib)
			}
			// What grew is nobody's: no reason as long as nothing is short.
			in.Unattributed = []Unattributed{{Signal: NodeFSAvailable, Bytes: 0}}
			s, d := c.Sync(State{}, in)
			wantOutcome(t, d, Calm)
			in.Now, in.Unattributed[0].Bytes = start.Add(time.Second), 49*gib
			s, d = c.Sync(s, in)
			wantOutcome(t, d, Calm)
			before, _ := c.Sync(s, in)
			var got []string
			for _, d := range c.IfShort(s, in) {
				who := "nobody: " + d.NoVictim
				if d.Victim != nil {
					who = d.Victim.UID
				}
				got = append(got, d.Threshold.String()+" "+who)
			}
			if tc.name == "single" { // all are of one disk and equally urgent: one of them
				if len(got) != 1 || got[0][len(got[0])-2:] != " a" {
					t.Errorf("%q", got)
				}
			} else if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Error(diff)
			}
			after, _ := c.Sync(s, in)
			if diff := cmp.Diff(before, after); diff != "" {
				t.Errorf("asking changed what comes next: %s", diff)
			}
		})
	}
}

// What is short in fact has the answer of the pass itself, and where nothing is known there is none.
func TestIfShortInFact(t *testing.T) {
	t.Parallel()
	n := newNode(t, "nodefs.available<10Gi").with(Cleave())
	n.pass(0, Summary{NodeFS: disk(50 * gib)})
	in := Input{Now: start, Layout: &n.layout, Summary: &Summary{NodeFS: disk(5 * gib)}}
	s, d := n.Sync(n.State, in)
	wantOutcome(t, d, Pressure)
	got := n.IfShort(s, in)
	if i := slices.IndexFunc(got, func(o Decision) bool { return o.Threshold.Same(d.Threshold) }); i < 0 || got[i].NoVictim != d.NoVictim {
		t.Errorf("%+v, want %+v", got, d)
	}
	if got := n.IfShort(State{}, in); got != nil {
		t.Errorf("without a layout: %+v", got)
	}
	if got := n.IfShort(s, Input{Now: start}); got != nil {
		t.Errorf("without figures: %+v", got)
	}
}
