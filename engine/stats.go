package engine

import "time"

// Summary is what was measured on a node at one moment. A nil pointer means
// unknown, never zero.
type Summary struct {
	// Memory of the node, AllocatableMemory that of the pods' cgroup.
	Memory, AllocatableMemory *MemoryStats
	// NodeFS, ImageFS and ContainerFS are the filesystems of a node.
	NodeFS, ImageFS, ContainerFS *FSStats
	// Processes of the node.
	Processes *ProcessLimits
	// Pods has one record for each pod that was measured. Of two records with
	// one UID the later counts (OBS-13).
	Pods []PodStats
}

// FSStats is what is known of a filesystem, or of something's share of it.
type FSStats struct {
	// Time of the measurement; the zero time if unknown.
	Time time.Time
	// AvailableBytes can be written without being root, CapacityBytes is the
	// filesystem's size, UsedBytes is allocated blocks.
	AvailableBytes, CapacityBytes, UsedBytes *uint64
	// InodesFree, Inodes and InodesUsed are counts.
	InodesFree, Inodes, InodesUsed *uint64
}

// MemoryStats is what is known of a cgroup's memory.
type MemoryStats struct {
	Time                            time.Time
	AvailableBytes, WorkingSetBytes *uint64
}

// ProcessLimits is how many processes a node has and can have.
type ProcessLimits struct {
	Time         time.Time
	MaxPID       *int64
	RunningCount *int64
}

// PodStats is one pod's measured usage.
type PodStats struct {
	UID string
	// Containers are the running ones (ACC-3).
	Containers []ContainerStats
	Volumes    []VolumeStats
	// EphemeralStorage is the pod's whole usage (ACC-1); PodUsage makes it.
	EphemeralStorage *FSStats
	// MemoryBytes is the pod's working set.
	MemoryBytes *uint64
	// Images is what comes free of images when the pod goes and nobody else
	// uses them: exclusive bytes and their inodes. The kubelet does not know
	// it; the option CountImages uses it.
	Images *FSStats
	// ProcessCount is how many processes the pod has.
	ProcessCount *uint64
}

// ContainerStats is one container's measured usage.
type ContainerStats struct {
	Name string
	// RootFS is the writable layer, Logs the container's log files.
	RootFS, Logs *FSStats
	// MemoryBytes is the container's working set.
	MemoryBytes *uint64
}

// VolumeStats is one volume's measured usage.
type VolumeStats struct {
	Name string
	FSStats
}
