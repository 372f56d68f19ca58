package engine

import (
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
)

// UsageParts is all of which a pod's ephemeral storage is made up (ACC-1).
// Images are no part of it (ACC-6).
type UsageParts struct {
	// NodeFS is the filesystem whose free space the pod's record shows, on
	// whatever disk its parts are (ACC-7), with the time of its figures.
	NodeFS FSStats
	// Containers are the running ones only: what dead ones left behind is
	// nobody's (ACC-3).
	Containers []ContainerStats
	// Volumes are those of kinds that are Ephemeral (ACC-2).
	Volumes []VolumeStats
	// PodLogs are files directly in the pod's log directory; those of
	// containers are below it and not counted twice (ACC-10).
	PodLogs *FSStats
	// EtcHosts is the file that the kubelet writes for the pod (ACC-22).
	EtcHosts *FSStats
	// NoLogInodes leaves inodes of container logs out, as the kubelet does
	// when its figures come from cAdvisor (ACC-23).
	NoLogInodes bool
}

// PodUsage is a pod's ephemeral storage as limits and requests mean it. A part
// that is not known adds nothing; if none is known, neither is the sum. A
// container whose writable layer is not known has no logs either. The time is
// that of the latest part (ACC-7).
func PodUsage(p UsageParts) FSStats {
	sum := FSStats{
		Time:           p.NodeFS.Time,
		AvailableBytes: p.NodeFS.AvailableBytes, CapacityBytes: p.NodeFS.CapacityBytes,
		InodesFree: p.NodeFS.InodesFree, Inodes: p.NodeFS.Inodes,
	}
	add := func(f *FSStats, withInodes bool) {
		if f == nil {
			return
		}
		sum.UsedBytes = total(sum.UsedBytes, f.UsedBytes)
		if withInodes {
			sum.InodesUsed = total(sum.InodesUsed, f.InodesUsed)
		}
		if f.Time.After(sum.Time) {
			sum.Time = f.Time
		}
	}
	for i := range p.Containers {
		if c := &p.Containers[i]; c.RootFS != nil {
			add(c.RootFS, true)
			add(c.Logs, !p.NoLogInodes)
		}
	}
	for i := range p.Volumes {
		add(&p.Volumes[i].FSStats, true)
	}
	add(p.PodLogs, true)
	add(p.EtcHosts, true)
	return sum
}

// total adds figures of which either may not be known.
func total(a, b *uint64) *uint64 {
	if a == nil || b == nil {
		if a == nil {
			return b
		}
		return a
	}
	sum := *a + *b
	return &sum
}

// SandboxRecord is a pod's sandbox as the runtime lists it.
type SandboxRecord struct {
	ID, Namespace, Name string
	Ready               bool
	CreatedAt           time.Time
}

// MeasuredSandboxes picks the sandboxes that pods are measured by (ACC-5): of
// several with one namespace and name all that are ready, or else only the
// newest. A pod's only one counts in any state. They stay in their order.
func MeasuredSandboxes(list []SandboxRecord) []SandboxRecord {
	type name struct{ namespace, name string }
	ready, newest := map[name]bool{}, map[name]int{}
	for i, s := range list {
		k := name{s.Namespace, s.Name}
		ready[k] = ready[k] || s.Ready
		if j, ok := newest[k]; !ok || s.CreatedAt.After(list[j].CreatedAt) {
			newest[k] = i
		}
	}
	var out []SandboxRecord
	for i, s := range list {
		k := name{s.Namespace, s.Name}
		if s.Ready || !ready[k] && newest[k] == i {
			out = append(out, s)
		}
	}
	return out
}

// QuotaSize is the size that the kubelet notes for an emptyDir with a project
// quota: the lesser of the pod's limit and the volume's, of which 0 or nothing
// means none. It is only noted: the quota never blocks a write (ACC-20).
func QuotaSize(podLimit, sizeLimit *resource.Quantity) *resource.Quantity {
	var out *resource.Quantity
	for _, q := range []*resource.Quantity{podLimit, sizeLimit} {
		if q != nil && q.Sign() > 0 && (out == nil || compare(q, out) < 0) {
			out = q
		}
	}
	return out
}

// MemoryVolumeSize is how large an emptyDir in memory can grow; the kernel sees
// to it (ACC-21).
func MemoryVolumeSize(nodeAllocatable resource.Quantity, podLimit, sizeLimit *resource.Quantity) resource.Quantity {
	out := &nodeAllocatable
	for _, q := range []*resource.Quantity{podLimit, sizeLimit} {
		if q != nil && q.Sign() > 0 && compare(q, out) < 0 {
			out = q
		}
	}
	return out.DeepCopy()
}
