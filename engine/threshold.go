package engine

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

// Threshold is met when less than Value is available.
type Threshold struct {
	Signal Signal
	// Value that has to be available. "Less than" is the only comparison
	// there is, whatever the signal (SIG-2).
	Value Value
	// Grace is how long the threshold has to be met before anything is
	// evicted. 0 makes it a hard threshold (THR-11).
	Grace time.Duration
	// MinReclaim is how much more than Value has to be available before an
	// acting threshold counts as resolved; nil for nothing more. A share is
	// one of the capacity.
	MinReclaim *Value
	// Inert marks the containerfs threshold for which its source filesystem
	// has none. It is never met (THR-21).
	Inert bool
}

// Hard says whether the threshold acts without waiting.
func (t Threshold) Hard() bool { return t.Grace == 0 }

// Same says whether t and o are one threshold to the kubelet: signal, grace
// and value agree; minimum reclaim is left out (SYN-9).
func (t Threshold) Same(o Threshold) bool {
	return t.Signal == o.Signal && t.Grace == o.Grace && t.Inert == o.Inert && t.Value.Equal(o.Value)
}

// String is the threshold for people: "nodefs.available < 10% for 1m30s".
func (t Threshold) String() string {
	if t.Inert {
		return fmt.Sprintf("%s: none", t.Signal)
	}
	s := fmt.Sprintf("%s < %s", t.Signal, t.Value)
	if !t.Hard() {
		s += fmt.Sprintf(" for %s", t.Grace)
	}
	return s
}

// met says whether less than t asks for is available, with or without its
// minimum reclaim. Values compare exactly, fractions and sums beyond int64
// included.
func (t Threshold) met(o Observation, withMinReclaim bool) bool {
	if t.Inert {
		return false
	}
	want := t.Value.Of(o.Capacity)
	if withMinReclaim && t.MinReclaim != nil {
		want.Add(t.MinReclaim.Of(o.Capacity))
	}
	return want.Cmp(*quantity(o.Available)) > 0
}

// compareThresholds is the engine's order of thresholds; the kubelet has none
// (THR-13, SYN-20): by signal, hard before soft, shorter grace first, then by
// value as written.
func compareThresholds(a, b Threshold) int {
	return cmp.Or(
		cmp.Compare(a.Signal.rank(), b.Signal.rank()),
		cmp.Compare(a.Grace, b.Grace),
		cmp.Compare(a.Value.String(), b.Value.String()),
	)
}

// met returns the thresholds of list that are met and observed. A threshold
// whose signal is not observed is left out; that is no error (OBS-2).
func met(list []Threshold, seen Observations, withMinReclaim bool) []Threshold {
	var out []Threshold
	for _, t := range list {
		if o, ok := seen[t.Signal]; ok && t.met(o, withMinReclaim) {
			out = append(out, t)
		}
	}
	return out
}

// merge appends to a what b has besides (SYN-9).
func merge(a, b []Threshold) []Threshold {
	for _, t := range b {
		if !slices.ContainsFunc(a, t.Same) {
			a = append(a, t)
		}
	}
	return a
}
