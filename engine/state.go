package engine

import (
	"slices"
	"time"
)

// State is what one pass leaves to the next. The zero State is that of a
// kubelet just started, which has forgotten all (SYN-43). A pass never changes
// the State that it was given.
type State struct {
	// Layout is what was detected; nil until a detection succeeds (LAY-8).
	Layout *Detected
	// Met are the thresholds that were below their value, or acting and below
	// value and minimum reclaim.
	Met []MetThreshold
	// Conditions are those that the node reports now, in the engine's order.
	Conditions []Condition
	// ConditionSeen is when a condition was last seen; entries stay for good.
	ConditionSeen map[Condition]time.Time
	// Observed is the time of the last observation of each signal that the
	// last pass saw.
	Observed map[Signal]time.Time

	// What the options remember; the kubelet profile leaves all of it empty.

	// Trend is what was seen lately (Forecast).
	Trend Trend `json:",omitempty"`
	// Growth is what was seen lately of bytes that are nobody's (HoldFire).
	Growth map[Signal][]GrowthSample `json:",omitempty"`
	// Gone are the pods that went within the last hour (BreakStorms).
	Gone []Departure `json:",omitempty"`
	// Freed is space that was set free and may not have arrived (AwaitFreed).
	Freed []Freed `json:",omitempty"`
}

// MetThreshold is a threshold that is met since some time.
type MetThreshold struct {
	Threshold Threshold
	// Since is when it was first seen to be met without a break (SYN-10).
	Since time.Time
	// Acting says that its grace period is over (SYN-14).
	Acting bool
}

// Reports says whether the node reports a condition now.
func (s State) Reports(c Condition) bool { return slices.Contains(s.Conditions, c) }

// since is when t was first met without a break, now if it was not met before.
func (s State) since(t Threshold, now time.Time) time.Time {
	for _, m := range s.Met {
		if m.Threshold.Same(t) {
			return m.Since
		}
	}
	return now
}

// acting lists the thresholds that drove the last pass.
func (s State) acting() []Threshold {
	var out []Threshold
	for _, m := range s.Met {
		if m.Acting {
			out = append(out, m.Threshold)
		}
	}
	return out
}

// withoutContainerFS forgets what containerfs thresholds did: with another
// layout they are others.
func withoutContainerFS(list []MetThreshold) []MetThreshold {
	return slices.DeleteFunc(slices.Clone(list), func(m MetThreshold) bool {
		return m.Threshold.Signal == ContainerFSAvailable || m.Threshold.Signal == ContainerFSInodesFree
	})
}
