package engine

import "slices"

// Signal names one thing of a node that can run short.
type Signal string

// The signals that thresholds can be about; there are no others (SIG-1).
const (
	// MemoryAvailable is the node's memory that is not in a working set, in bytes.
	MemoryAvailable Signal = "memory.available"
	// AllocatableMemoryAvailable is the same below the pods' cgroup, in bytes.
	AllocatableMemoryAvailable Signal = "allocatableMemory.available"
	// NodeFSAvailable is free space where the kubelet's root directory is, in bytes.
	NodeFSAvailable Signal = "nodefs.available"
	// NodeFSInodesFree is free inodes there.
	NodeFSInodesFree Signal = "nodefs.inodesFree"
	// ImageFSAvailable is free space where image layers are, in bytes.
	ImageFSAvailable Signal = "imagefs.available"
	// ImageFSInodesFree is free inodes there.
	ImageFSInodesFree Signal = "imagefs.inodesFree"
	// ContainerFSAvailable is free space where writable layers are, in bytes.
	ContainerFSAvailable Signal = "containerfs.available"
	// ContainerFSInodesFree is free inodes there.
	ContainerFSInodesFree Signal = "containerfs.inodesFree"
	// PIDAvailable is how many more processes the node can have.
	PIDAvailable Signal = "pid.available"
)

// signals is the order in which the engine lists signals. Memory stands first,
// because it is handled first (SYN-20).
var signals = []Signal{
	MemoryAvailable, AllocatableMemoryAvailable,
	NodeFSAvailable, ContainerFSAvailable, ImageFSAvailable,
	NodeFSInodesFree, ContainerFSInodesFree, ImageFSInodesFree,
	PIDAvailable,
}

// Signals returns all signals in the engine's order.
func Signals() []Signal { return slices.Clone(signals) }

// Valid says whether s is one of the signals.
func (s Signal) Valid() bool { return slices.Contains(signals, s) }

// Resource names what is short when a signal's threshold is met. The kubelet
// uses the same names in its events and annotations.
type Resource string

// Inodes and PIDs exist only inside the kubelet: no pod can request them (SIG-3).
const (
	Memory           Resource = "memory"
	EphemeralStorage Resource = "ephemeral-storage"
	Inodes           Resource = "inodes"
	PIDs             Resource = "pids"
)

// Resource says what is short when a threshold of s is met; empty for no signal.
func (s Signal) Resource() Resource {
	switch s {
	case MemoryAvailable, AllocatableMemoryAvailable:
		return Memory
	case NodeFSAvailable, ImageFSAvailable, ContainerFSAvailable:
		return EphemeralStorage
	case NodeFSInodesFree, ImageFSInodesFree, ContainerFSInodesFree:
		return Inodes
	case PIDAvailable:
		return PIDs
	default:
		return ""
	}
}

// Condition is a node condition as the Kubernetes API names it.
type Condition string

// The conditions that signals lead to. All six disk signals lead to the same
// one, so it does not tell which filesystem is short (CON-1).
const (
	MemoryPressure Condition = "MemoryPressure"
	DiskPressure   Condition = "DiskPressure"
	PIDPressure    Condition = "PIDPressure"
)

// conditions is the order in which the engine lists conditions.
var conditions = []Condition{MemoryPressure, DiskPressure, PIDPressure}

// Condition says which node condition a met threshold of s raises; empty for
// no signal.
func (s Signal) Condition() Condition {
	switch s.Resource() {
	case Memory:
		return MemoryPressure
	case EphemeralStorage, Inodes:
		return DiskPressure
	case PIDs:
		return PIDPressure
	default:
		return ""
	}
}

// rank is the signal's place in the engine's order.
func (s Signal) rank() int { return slices.Index(signals, s) }
