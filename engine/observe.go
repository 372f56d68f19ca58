package engine

import (
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
)

// Observation is what was seen of one signal (OBS-1), in its unit.
type Observation struct {
	Available, Capacity int64
	// Time of the measurement; the zero time if unknown.
	Time time.Time
}

// Observations holds the signals that were seen. One that is missing was not.
type Observations map[Signal]Observation

// Observe makes observations from figures. A signal is seen only when both
// what is available and the capacity are known (OBS-2). Figures beyond int64
// wrap around, as they do in the kubelet: nothing measures so much.
func (s *Summary) Observe() Observations {
	out := make(Observations, len(signals))
	memory := func(signal Signal, m *MemoryStats) {
		if m != nil && m.AvailableBytes != nil && m.WorkingSetBytes != nil {
			out[signal] = Observation{Available: signed(*m.AvailableBytes), Capacity: signed(*m.AvailableBytes + *m.WorkingSetBytes), Time: m.Time}
		}
	}
	filesystem := func(available, free Signal, f *FSStats) {
		if f == nil {
			return
		}
		if f.AvailableBytes != nil && f.CapacityBytes != nil {
			out[available] = Observation{Available: signed(*f.AvailableBytes), Capacity: signed(*f.CapacityBytes), Time: f.Time}
		}
		if f.InodesFree != nil && f.Inodes != nil {
			out[free] = Observation{Available: signed(*f.InodesFree), Capacity: signed(*f.Inodes), Time: f.Time}
		}
	}
	memory(MemoryAvailable, s.Memory)
	memory(AllocatableMemoryAvailable, s.AllocatableMemory)
	filesystem(NodeFSAvailable, NodeFSInodesFree, s.NodeFS)
	filesystem(ImageFSAvailable, ImageFSInodesFree, s.ImageFS)
	filesystem(ContainerFSAvailable, ContainerFSInodesFree, s.ContainerFS)
	if p := s.Processes; p != nil && p.MaxPID != nil && p.RunningCount != nil {
		out[PIDAvailable] = Observation{Available: *p.MaxPID - *p.RunningCount, Capacity: *p.MaxPID, Time: p.Time}
	}
	return out
}

// podStats finds records by pod.
type podStats map[string]*PodStats

func (s *Summary) podStats() podStats {
	out := make(podStats, len(s.Pods))
	for i := range s.Pods {
		out[s.Pods[i].UID] = &s.Pods[i]
	}
	return out
}

// fresh says whether o is news after what was seen last of its signal (SYN-16).
func (o Observation) fresh(last map[Signal]time.Time, signal Signal) bool {
	before, seen := last[signal]
	return !seen || o.Time.IsZero() || o.Time.After(before)
}

// signed is how the kubelet turns figures into quantities.
func signed(v uint64) int64 {
	return int64(v)
}

// known is *v, or 0 if that is unknown (RANK-7).
func known(v *uint64) int64 {
	if v == nil {
		return 0
	}
	return signed(*v)
}

func (f *FSStats) usedBytes() int64 {
	if f == nil {
		return 0
	}
	return known(f.UsedBytes)
}

func (f *FSStats) inodesUsed() int64 {
	if f == nil {
		return 0
	}
	return known(f.InodesUsed)
}

func quantity(v int64) *resource.Quantity {
	return resource.NewQuantity(v, resource.BinarySI)
}
