package engine

import "slices"

// Reclaim is a way to free space without ending a pod.
type Reclaim string

const (
	// DeadContainers removes containers that nobody needs, of terminated pods
	// too (CGC-5).
	DeadContainers Reclaim = "dead containers"
	// UnusedImages removes every image that is neither used, pinned nor young
	// (IGC-20).
	UnusedImages Reclaim = "unused images"
	// OldLogs removes log directories of pods that are gone and rotated logs,
	// oldest first, as far as needed; the kubelet never does (GAP-1).
	OldLogs Reclaim = "old logs"
)

// ReclaimFor lists what the kubelet reclaims for a signal before a pod goes, in order.
// Bytes and inodes have the same lists.
func ReclaimFor(s Signal, layout Layout) []Reclaim {
	if r := s.Resource(); r != EphemeralStorage && r != Inodes {
		return nil
	}
	image := s == ImageFSAvailable || s == ImageFSInodesFree
	node := s == NodeFSAvailable || s == NodeFSInodesFree
	switch layout {
	case Single, Odd: // REC-1
		return []Reclaim{DeadContainers, UnusedImages}
	case Dedicated: // REC-2
		if node {
			return nil
		}
		return []Reclaim{DeadContainers, UnusedImages}
	case Split: // REC-3
		if image {
			return []Reclaim{UnusedImages}
		}
		return []Reclaim{DeadContainers}
	case Separate:
		switch {
		case node:
			return nil
		case image:
			return []Reclaim{UnusedImages}
		}
		return []Reclaim{DeadContainers}
	case ContainersAlone:
		if node || image {
			return []Reclaim{UnusedImages}
		}
		return []Reclaim{DeadContainers}
	default:
		return nil
	}
}

// Resolved says whether a decision's reclaim was enough, so that no pod has to
// go. after was measured when the reclaim had ended; nil if that failed. The
// kubelet asks much: not one configured threshold, of any signal and whatever
// its grace, may be below its value and minimum reclaim (REC-6). still lists
// those that are.
func (c Config) Resolved(s State, d Decision, after *Summary) (ok bool, still []Threshold) {
	if len(d.Reclaim) == 0 || s.Layout == nil { // REC-8
		return false, slices.Clone(d.Due)
	}
	if c.Options.JudgeOwnFilesystem {
		layout := c.Options.layout(*s.Layout)
		elsewhere := func(t Threshold) bool { return !together(t.Signal, d.Threshold.Signal, layout) }
		if after != nil {
			due := slices.DeleteFunc(slices.Clone(d.Due), elsewhere)
			seen := c.Options.believed(after.Observe())
			still = met(due, seen, true)
			if len(still) > 0 && c.awaited(s, d.Threshold, layout, seen, s.lastFreed()) > 0 {
				still = nil
			}
		}
		return len(still) == 0, still
	}
	if after == nil { // REC-5
		return false, slices.Clone(d.Due)
	}
	still = met(c.all(*s.Layout), c.Options.believed(after.Observe()), true)
	return len(still) == 0, still
}
