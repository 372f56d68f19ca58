package engine

import (
	"testing"
	"time"
)

// The tests tell stories of a node with the helpers here.

// start is when stories begin.
var start = time.Date(2026, 1, 5, 12, 0, 0, 0, time.UTC)

func ptr[T any](v T) *T { return &v }

func bytes(v int64) *uint64 { return ptr(uint64(v)) }

// disk is a filesystem with so many bytes available of 100 GiB.
func disk(available int64) *FSStats {
	return &FSStats{AvailableBytes: bytes(available), CapacityBytes: bytes(100 * gib)}
}

func (f *FSStats) at(t time.Time) *FSStats {
	f.Time = t
	return f
}

// thresholds reads hard thresholds "signal<value,…" and soft ones
// "signal<value" with "signal=grace".
func thresholds(t *testing.T, hard string, more ...string) []Threshold {
	t.Helper()
	read := func(i int, separator string) map[string]string {
		if i >= len(more) {
			return nil
		}
		out, err := ParsePairs(more[i], separator)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	h, err := ParsePairs(hard, "<")
	if err != nil {
		t.Fatal(err)
	}
	list, err := Parse(Settings{Hard: h, Soft: read(0, "<"), SoftGrace: read(1, "="), MinReclaim: read(2, "=")})
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// node is a story's node: one pod, measured, and a layout already known unless
// the story is about that.
type node struct {
	Config
	State
	layout Detected
	pods   []Pod
	stats  []PodStats
	failed bool
}

func newNode(t *testing.T, hard string, more ...string) *node {
	t.Helper()
	return &node{
		Config: Config{Thresholds: thresholds(t, hard, more...), TransitionPeriod: 5 * time.Minute},
		pods:   []Pod{{UID: "pod"}},
		stats:  []PodStats{usage("pod", 1)},
	}
}

// settled detects the layout in a pass of its own.
func (n *node) settled(l Detected) *node {
	n.layout = l
	n.State, _ = n.Sync(n.State, Input{Now: start.Add(-time.Hour), Layout: &l})
	return n
}

// pass looks at the node after so many seconds.
func (n *node) pass(seconds int, s Summary) Decision {
	if s.Pods == nil {
		s.Pods = n.stats
	}
	in := Input{Now: start.Add(time.Duration(seconds) * time.Second), Layout: &n.layout, Pods: n.pods, Summary: &s}
	if n.failed {
		in.Summary = nil
	}
	var d Decision
	n.State, d = n.Sync(n.State, in)
	return d
}

func (n *node) disk(seconds int, available int64) Decision {
	return n.pass(seconds, Summary{NodeFS: disk(available)})
}

func wantOutcome(t *testing.T, d Decision, want Outcome) {
	t.Helper()
	if d.Outcome != want {
		t.Errorf("outcome %q by %s, want %q; due %v", d.Outcome, d.Rule, want, d.Due)
	}
}

func wantPressure(t *testing.T, s State, want bool) {
	t.Helper()
	if got := s.Reports(DiskPressure); got != want {
		t.Errorf("DiskPressure is %t, want %t", got, want)
	}
}

func victim(d Decision) string {
	if d.Victim == nil {
		return "nobody"
	}
	return d.Victim.UID
}
