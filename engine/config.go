package engine

import "time"

// Config is how a node's decisions are set up. It does not change while State
// goes from one pass to the next.
type Config struct {
	// Thresholds in the engine's order, as Parse returns them.
	Thresholds []Threshold
	// TransitionPeriod is how long a condition stays after it was last seen;
	// the kubelet's default is 5m. With 0 none is ever reported (SYN-13).
	TransitionPeriod time.Duration
	// MaxPodGraceSeconds bounds the grace period of pods that a soft
	// threshold evicts; the kubelet's default is 0.
	MaxPodGraceSeconds int64
	// LimitIsolation evicts pods that are above their local storage limits;
	// localStorageCapacityIsolation, on by default in the kubelet.
	LimitIsolation bool
	// NoSeparateDiskGC is the kubelet's gate KubeletSeparateDiskGC turned off
	// (LAY-14).
	NoSeparateDiskGC bool
	// MemoryVolumesByKernel is the kubelet's gate
	// InPlacePodVerticalScalingMemoryBackedVolumes turned on: the size of
	// emptyDirs in memory is then no longer looked at (LSE-5).
	MemoryVolumesByKernel bool
	// HoldShare is the share of growth from which on the option HoldFire
	// holds fire; 0 for the default, 0.5.
	HoldShare float64
	// HoldFloor is the share of the hard threshold below which nothing is held
	// any more, neither by HoldFire nor by a back-off; 0 for the default, 0.5.
	HoldFloor float64
	// OwnerPerHour is how many pods of one owner, PerHour how many in all may
	// go within an hour under the option BreakStorms; 0 for the defaults, 4 and
	// 30.
	OwnerPerHour, PerHour int
	// BackOff is how long an owner's pods are left alone after one went; each
	// further one within the hour doubles it. 0 for the default, 1m.
	BackOff time.Duration
	// FreedWait is how long the option AwaitFreed waits for freed space; 0 for
	// the default, 30s.
	FreedWait time.Duration
	// Horizon is how far the option Forecast looks; 0 for the default, 1m.
	Horizon time.Duration
	// Options are the improvements on the kubelet.
	Options Options
}

// or is v, or what holds without one.
func or[T comparable](v, otherwise T) T {
	var zero T
	if v == zero {
		return otherwise
	}
	return v
}
