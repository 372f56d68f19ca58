package engine

import (
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
)

// Outcome says in a word how a pass ended.
type Outcome string

const (
	// Off: there is nothing to watch (SYN-2).
	Off Outcome = "off"
	// LayoutUnknown: how filesystems are shared could not be detected (LAY-8).
	LayoutUnknown Outcome = "layout unknown"
	// Refused: the layout is a split that the kubelet's gate forbids (LAY-14).
	Refused Outcome = "layout refused"
	// Blind: nothing could be measured, so nothing was decided (OBS-7).
	Blind Outcome = "blind"
	// Calm: no threshold is due (SYN-19).
	Calm Outcome = "calm"
	// OverLimit: pods above their own limits go; thresholds wait for the next
	// pass (SYN-18).
	OverLimit Outcome = "over limit"
	// Pressure: a threshold is due; see Reclaim and Victim.
	Pressure Outcome = "pressure"
	// Foreseen: a hard threshold will be met soon; see Coming and Reclaim.
	// Nobody goes for it.
	Foreseen Outcome = "foreseen"
)

// Decision is what a pass wants done. It is a plan: whoever carries it out
// checks each item again just before acting.
type Decision struct {
	Outcome Outcome
	// Rule is the rule that ended the pass.
	Rule string
	// Overwritten are signals whose thresholds were set by somebody and are
	// now others, because containerfs has none of its own (THR-20). Only the
	// pass that detects the layout says so.
	Overwritten []Signal
	// Limits are the pods to evict because of their own limits, in the order
	// of their UIDs; the kubelet has none (LSE-2).
	Limits []Eviction
	// Due are the thresholds that are met, whose grace is over and about
	// which there is news, in the engine's order.
	Due []Threshold
	// Threshold is the one of Due that is handled (SYN-21). The kubelet could
	// have taken any of Choices (SYN-20).
	Threshold Threshold
	Choices   []Threshold
	// Reclaim is to be done first, in this order. Then everything is measured
	// again, and Resolved says whether Victim may live. Where nobody can go for
	// what is most urgent, its reclaim comes first, whatever Threshold is.
	Reclaim []Reclaim
	// NeedBytes is how much the reclaim is to free under the option
	// StopAtTarget; nil for all that it can.
	NeedBytes *int64 `json:",omitempty"`
	// Coming is what the option Forecast sees coming; the first one's reclaim
	// begins.
	Coming []Coming `json:",omitempty"`
	// Ranking is the order in which pods would go, by figures from before
	// the reclaim (SYN-25).
	Ranking []Ranked
	// Victim goes if the reclaim was not enough. It is nil if nobody can go.
	Victim *Eviction
	// NoVictim is the rule, or the option, because of which Victim is nil.
	NoVictim string
	// Further go together with Victim under the option Batch.
	Further []Eviction `json:",omitempty"`
	// Hold says what of the growth is nobody's, if HoldFire looked at it.
	Hold *Hold `json:",omitempty"`
	// Barred are pods that BreakStorms passed over or waits for.
	Barred []Bar `json:",omitempty"`
	// AwaitedBytes was set free and has not arrived; because of it NoVictim is
	// AwaitFreed.
	AwaitedBytes int64 `json:",omitempty"`
}

// Eviction is one pod that is to go, and why.
type Eviction struct {
	UID, Namespace, Name string
	// Owner is the pod's.
	Owner string `json:",omitempty"`
	// Cause is the threshold's signal or the limit that the pod is above.
	Cause Cause
	// GraceSeconds is what the pod worker is asked for; it and the runtime
	// have floors of their own, see EffectiveGrace.
	GraceSeconds int64
	// Subject is the volume or container that is above its limit; empty for
	// the pod as a whole and for thresholds.
	Subject string
	// Limit is what Subject or the pod is above, in bytes; for a threshold
	// the amount that has to be available, in the signal's unit.
	Limit resource.Quantity
	// Available was left of the signal, in its unit; for thresholds only.
	Available int64
	// Explained says that there are figures of the pod, so that Offenders are
	// all that there are (SYN-40).
	Explained bool
	// Offenders are the containers that use more than they request (SYN-39).
	Offenders []Offender
	// PodOffends is the pod as a whole: memory with pod-level requests only.
	PodOffends *Offender
	// Disrupts says that the pod gets the condition DisruptionTarget (SYN-36).
	Disrupts bool
}

// Cause is why a pod is evicted: a Signal's name or one of the limits (LSE-11).
type Cause string

// The limits; the kubelet's metric has the same names.
const (
	EmptyDirLimit  Cause = "emptydirfs.limit"
	PodLimit       Cause = "ephemeralpodfs.limit"
	ContainerLimit Cause = "ephemeralcontainerfs.limit"
)

// Offender uses more of a resource than it requests.
type Offender struct {
	Name           string
	Usage, Request resource.Quantity
}

// EffectiveGrace is how many seconds the runtime is told to wait at least when
// a pod with a grace period of its own (30 by default) is evicted with
// overrideSeconds: the pod worker only shortens and never goes below 1
// (SYN-30), and stopping a container takes at least 2 (SYN-31).
func EffectiveGrace(overrideSeconds, podSeconds int64) (worker, runtime int64) {
	worker = max(1, min(overrideSeconds, podSeconds))
	return worker, max(2, worker)
}

// KillTimeout is how long the kubelet waits for a pod to be gone before it
// says that the grace period was exceeded; the eviction counts all the same
// (SYN-35).
func KillTimeout(graceSeconds int64) time.Duration {
	return time.Duration(max(10, graceSeconds+graceSeconds/2)) * time.Second
}

// NextPass is how long the kubelet waits after a pass: it polls for evicted
// pods once a second for up to 30 s and looks again as soon as all are gone
// (SYN-37), else it rests for its interval, 10 s (SYN-1). gone is how long the
// clean-up takes.
func NextPass(evicted int, gone, interval time.Duration) time.Duration {
	const poll, patience = time.Second, 30 * time.Second
	switch {
	case evicted == 0:
		return interval
	case gone > patience-poll:
		return patience
	default:
		return max(poll, (gone + poll - 1).Truncate(poll))
	}
}
