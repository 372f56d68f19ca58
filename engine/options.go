package engine

import (
	"cmp"
	"slices"
)

// Options are improvements on the kubelet, each to be switched by itself. With
// all of them off the decisions are the kubelet's. The GAP of each is the
// trouble that it ends; docs/engine.md has an example of each.
type Options struct {
	// DisksOnly leaves memory and process ids to the kubelet: their thresholds
	// are watched but never handled, and so never keep disks waiting.
	DisksOnly bool
	// MostUrgentFirst handles, of several thresholds that are due, a hard one
	// before a soft one and then the one of which the least part is left
	// (GAP-15, GAP-14). If nobody can go for that one, it is the next on another
	// filesystem: one disk that nobody can help keeps no other waiting.
	MostUrgentFirst bool
	// InodesByInodes ranks by inodes alone, without subtracting a request of
	// bytes (GAP-3).
	InodesByInodes bool
	// UnmeasuredIsZero ranks pods without figures as if they used nothing,
	// not before all others (GAP-18).
	UnmeasuredIsZero bool
	// KeepRequests keeps containers' requests of ephemeral storage in pods
	// with resources at pod level, which can't express them (GAP-19).
	KeepRequests bool
	// JudgeOwnFilesystem lets the victim live if reclaim has resolved what is
	// due on the filesystem under pressure, whatever is short elsewhere or
	// whose grace still runs (GAP-16). Without figures of it the victim lives,
	// too, until the next pass.
	JudgeOwnFilesystem bool
	// WholeContainerLimit counts the writable layer against a container's
	// limit in every layout (GAP-29).
	WholeContainerLimit bool
	// NoInodesNoThreshold takes a filesystem with a total of 0 inodes for one
	// that has no such limit (GAP-43).
	NoInodesNoThreshold bool
	// DoubtImpossible takes figures that can't be, such as more available than
	// there is, for not observed: nothing is deleted on their strength. Figures
	// that are older than others seen before are no news, even if they come
	// after them.
	DoubtImpossible bool
	// ContainerFSAtOnce looks at the thresholds of containerfs in the first
	// pass already (GAP-44).
	ContainerFSAtOnce bool
	// FollowLayout detects the layout in each pass, and does nothing in one in
	// which that fails (GAP-6).
	FollowLayout bool
	// ThirdDisk tells a containerfs on a disk of its own from nodefs: each
	// signal reclaims and ranks what is on its own filesystem (GAP-5).
	ThirdDisk bool
	// OldLogs removes, for what is short on nodefs, logs of pods that are gone
	// and rotated logs before any pod goes; with images apart the kubelet
	// removes nothing there (GAP-1).
	OldLogs bool
	// CountImages ranks a pod also by the images that become unused when it
	// goes, where images are on the filesystem under pressure (GAP-2). In the
	// kubelet's split every pod's usage of imagefs is 0.
	CountImages bool
	// HoldFire lets pods live while most of what grew on the filesystem under
	// pressure is nobody's: a hostPath, a daemon, files that are deleted and
	// open (GAP-9). For three seconds at most it also lets them live while what
	// is nobody's yet is more than the first pod is ahead of the second. See
	// Config.HoldShare and Config.HoldFloor.
	HoldFire bool
	// BreakStorms bounds how often pods of one owner, and pods at all, go:
	// evicting what a controller makes anew frees nothing for long. See
	// Config.OwnerPerHour, Config.PerHour and Config.BackOff.
	BreakStorms bool
	// AwaitFreed counts space that was set free and has not arrived yet as
	// available, for Config.FreedWait at most (GAP-17, GAP-32).
	AwaitFreed bool
	// StopAtTarget says how much reclaim is to free, instead of all that it
	// can (GAP-24).
	StopAtTarget bool
	// Forecast begins a hard threshold's reclaim when it will be met within
	// Config.Horizon (GAP-28). No pod goes for what has not come.
	Forecast bool
	// OnlyWhoHelps lets pods live that have nothing on the filesystem under
	// pressure, or of which that is not known: nothing would come free
	// (GAP-18).
	OnlyWhoHelps bool
	// Batch evicts as many pods in one pass as it takes to make up what is
	// short, instead of one (GAP-31). The cleave profile has it off: what
	// went can't be called back when the first pod would have been enough.
	Batch bool
}

// Cleave are the options of the cleave profile: all of them but Batch.
func Cleave() Options {
	return Options{
		DisksOnly: true, MostUrgentFirst: true, InodesByInodes: true, UnmeasuredIsZero: true, KeepRequests: true, JudgeOwnFilesystem: true,
		WholeContainerLimit: true, NoInodesNoThreshold: true, DoubtImpossible: true, ContainerFSAtOnce: true, FollowLayout: true, ThirdDisk: true,
		OldLogs: true, CountImages: true, HoldFire: true, BreakStorms: true, AwaitFreed: true, StopAtTarget: true, Forecast: true,
		OnlyWhoHelps: true,
	}
}

// believed drops observations that the options don't take for one.
func (o Options) believed(seen Observations) Observations {
	for signal, v := range seen {
		inodes := signal.Resource() == Inodes
		if o.NoInodesNoThreshold && inodes && v.Capacity == 0 ||
			o.DoubtImpossible && (v.Available < 0 || v.Available > v.Capacity || v.Capacity == 0 && !inodes) {
			delete(seen, signal)
		}
	}
	return seen
}

// doubtful is how many times the node's filesystems together a pod's figure has
// to be to be taken for wrong. Compression, holes and shared blocks make true
// figures larger than the disk, but not by so much.
const doubtful = 8

// credible are the pods' figures without those that can't be, which are not
// known then. The Summary stays as it is.
func (o Options) credible(s *Summary) podStats {
	stats := s.podStats()
	if !o.DoubtImpossible {
		return stats
	}
	var bytes, inodes float64 // no overflow
	for _, f := range []*FSStats{s.NodeFS, s.ImageFS, s.ContainerFS} {
		if f != nil && f.CapacityBytes != nil {
			bytes += doubtful * float64(*f.CapacityBytes)
		}
		if f != nil && f.Inodes != nil {
			inodes += doubtful * float64(*f.Inodes)
		}
	}
	wrong := func(f *FSStats) bool {
		above := func(v *uint64, most float64) bool { return v != nil && most > 0 && float64(*v) > most }
		return f != nil && (above(f.UsedBytes, bytes) || above(f.InodesUsed, inodes))
	}
	for uid, st := range stats {
		bad := wrong(st.EphemeralStorage) || wrong(st.Images)
		for i := range st.Containers {
			bad = bad || wrong(st.Containers[i].RootFS) || wrong(st.Containers[i].Logs)
		}
		for i := range st.Volumes {
			bad = bad || wrong(&st.Volumes[i].FSStats)
		}
		if !bad {
			continue
		}
		believed := func(f *FSStats) *FSStats {
			if wrong(f) {
				return nil
			}
			return f
		}
		pod := *st
		pod.EphemeralStorage, pod.Images = believed(st.EphemeralStorage), believed(st.Images)
		pod.Containers = slices.Clone(st.Containers)
		for i := range pod.Containers {
			c := &pod.Containers[i]
			c.RootFS, c.Logs = believed(c.RootFS), believed(c.Logs)
		}
		pod.Volumes = slices.DeleteFunc(slices.Clone(st.Volumes), func(v VolumeStats) bool { return wrong(&v.FSStats) })
		stats[uid] = &pod
	}
	return stats
}

// layout is what d means under the options.
func (o Options) layout(d Detected) Layout {
	if !o.ThirdDisk || !d.ContainerApart || !d.ContainerOffNode {
		return d.Layout()
	}
	if d.ImageApart {
		return Separate
	}
	return ContainersAlone
}

// reclaim lists what is reclaimed for a signal, in order. What is on the disk
// of nodefs counts, whatever the signal's name; dead containers have logs, too.
func (o Options) reclaim(s Signal, layout Layout) []Reclaim {
	list := ReclaimFor(s, layout)
	if !o.OldLogs || layout == Inert || !together(s, NodeFSAvailable, layout) {
		return list
	}
	if !slices.Contains(list, DeadContainers) {
		list = append([]Reclaim{DeadContainers}, list...)
	}
	i := slices.Index(list, DeadContainers) + 1
	return slices.Insert(list, i, OldLogs)
}

// counted says what of a pod is on the filesystem of a signal.
func (o Options) counted(s Signal, layout Layout) part {
	parts := counted(s, layout)
	if o.CountImages && together(s, ImageFSAvailable, layout) {
		parts |= images
	}
	return parts
}

// choices are those of the due thresholds that may be handled: any of memory if
// there is one, else any (SYN-20); under the options the most urgent alone.
func (o Options) choices(due []Threshold, seen Observations) []Threshold {
	if o.DisksOnly {
		due = slices.DeleteFunc(slices.Clone(due), func(t Threshold) bool {
			return t.Signal.Resource() != EphemeralStorage && t.Signal.Resource() != Inodes
		})
	}
	var memory []Threshold
	for _, t := range due {
		if t.Signal.Resource() == Memory {
			memory = append(memory, t)
		}
	}
	if len(memory) > 0 {
		due = memory
	}
	if !o.MostUrgentFirst || len(due) == 0 {
		return due
	}
	return byUrgency(due, seen)[:1]
}

// byUrgency orders thresholds: hard ones first, then those of which the least
// part is left.
func byUrgency(due []Threshold, seen Observations) []Threshold {
	left := func(t Threshold) float64 {
		want := t.Value.Of(seen[t.Signal].Capacity)
		return float64(seen[t.Signal].Available) / want.AsApproximateFloat64()
	}
	return slices.SortedFunc(slices.Values(due), func(a, b Threshold) int {
		return cmp.Or(first(a.Hard(), b.Hard()), cmp.Compare(left(a), left(b)), compareThresholds(a, b))
	})
}

// together says whether two signals are about one filesystem, or neither about
// any.
func together(a, b Signal, layout Layout) bool {
	return a.disk(layout) == b.disk(layout)
}

// disk names the filesystem of a signal, the same name for the same one; empty
// for memory and process ids.
func (s Signal) disk(layout Layout) string {
	const node, image, container = "nodefs", "imagefs", "containerfs"
	switch s {
	case NodeFSAvailable, NodeFSInodesFree:
		return node
	case ImageFSAvailable, ImageFSInodesFree:
		if layout == Single || layout == ContainersAlone {
			return node
		}
		return image
	case ContainerFSAvailable, ContainerFSInodesFree:
		switch layout {
		case Single, Split:
			return node
		case Dedicated:
			return image
		default:
			return container
		}
	default:
		return ""
	}
}
