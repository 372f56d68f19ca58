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
	// Options are the improvements on the kubelet.
	Options Options
}
