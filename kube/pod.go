package kube

import "k8s.io/apimachinery/pkg/api/resource"

// SystemCritical is the priority from which on the kubelet evicts no pod (SYN-33).
const SystemCritical int32 = 2_000_000_000

// Pod is what decisions need of a pod's specification, as allocated (SYN-4). Nobody may change one that a source or a [View]
// gave away.
type Pod struct {
	// UID is the one that the kubelet and the runtime know the pod by.
	UID string
	// APIUID is the one of the object at the API server. It is another one for a mirror pod, and empty for a static pod that no
	// API server has told about.
	APIUID          string
	Namespace, Name string
	// Owner is what would make the pod anew, such as "ReplicaSet shop/web"; empty if nothing would.
	Owner string
	// Priority is nil if none is set, which counts as 0 (RANK-10).
	Priority *int32
	// Static pods come from a file or a page that the kubelet reads; Mirror ones stand for them at the API server.
	Static, Mirror bool
	// GraceSeconds is terminationGracePeriodSeconds; nil if it is not set.
	GraceSeconds *int64
	// Containers and InitContainers are in the order of the specification.
	Containers, InitContainers []Container
	// Overhead is the runtime class's, on top of the containers'.
	Overhead Amounts
	// PodLevel says that cpu, memory or huge pages are requested or limited for the pod as a whole (RANK-19); PodLevelMemory is
	// such a request of memory.
	PodLevel       bool
	PodLevelMemory *resource.Quantity
	Volumes        []Volume
	// QoS is Guaranteed, Burstable or BestEffort; empty if it is not known. It takes no part in ranking (RANK-14).
	QoS string
	// Phase is status.phase, empty if it is not known. Terminating says that the pod is being deleted.
	Phase       string
	Terminating bool
	// ToleratesDiskPressure says that the pod tolerates the taint node.kubernetes.io/disk-pressure with NoSchedule (GAP-38).
	ToleratesDiskPressure bool
	// Faults say what of the specification could not be read, for people. A pod with faults must not be taken for one that
	// requests nothing.
	Faults []string
}

// Container is what decisions need of a container's specification.
type Container struct {
	Name string
	// Sidecar is an init container that restarts always.
	Sidecar          bool
	Requests, Limits Amounts
}

// Amounts of resources, in bytes. Nil means that nothing is said, which is not 0 (LSE-8).
type Amounts struct {
	EphemeralStorage, Memory *resource.Quantity
}

// VolumeKind says where a volume's bytes are and whose they are.
type VolumeKind string

// The kinds that decisions tell apart (RANK-5, ACC-2).
const (
	EmptyDirDisk   VolumeKind = "emptyDir"
	ConfigMap      VolumeKind = "configMap"
	GitRepo        VolumeKind = "gitRepo"
	HostPath       VolumeKind = "hostPath"
	EmptyDirMemory VolumeKind = "emptyDir in memory"
	// OtherVolume is any other: secrets and tokens in memory, claims, CSI, images.
	OtherVolume VolumeKind = "other"
)

// Volume is what decisions need of a volume's specification.
type Volume struct {
	Name string
	Kind VolumeKind
	// SizeLimit is an emptyDir's; nil for none.
	SizeLimit *resource.Quantity
}

// Protected says why the pod must never be evicted (SYN-33), empty if nothing is against it.
func (p *Pod) Protected() string {
	switch {
	case p.Static:
		return "it is a static pod"
	case p.Mirror:
		return "it stands for a static pod"
	case p.Priority != nil && *p.Priority >= SystemCritical:
		return "its priority is system-critical"
	}
	return ""
}

// String is namespace/name.
func (p *Pod) String() string { return p.Namespace + "/" + p.Name }
