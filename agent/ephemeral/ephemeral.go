// Package ephemeral does the arithmetic of pods' local storage: what a pod uses as
// the kubelet counts it, and what it really holds on each filesystem. It is pure
// and imports nothing else of this module; only agent may import it.
//
// Rules (ACC-n) are those of the project's kubelet facts.
package ephemeral

import (
	"cmp"
	"maps"
	"slices"
	"time"
)

// Use is what something takes on one filesystem.
type Use struct {
	// Device identifies the filesystem.
	Device string `json:"device"`
	Bytes  uint64 `json:"bytes"`
	Inodes uint64 `json:"inodes"`
	// At is when it was measured.
	At time.Time `json:"at"`
}

// Sandbox is a pod's sandbox in the CRI's list.
type Sandbox struct {
	ID, Namespace, Name, UID string
	Ready                    bool
	CreatedAt                time.Time
	// Static says that a file of the node makes the pod, and not the API server.
	Static bool
}

// Container is a container in the CRI's list.
type Container struct {
	ID, Name string
	// SandboxID is its pod's.
	SandboxID string
	Running   bool
}

// Current gives the sandboxes that the kubelet counts (ACC-5): of several with one
// namespace and name those that are ready, or the newest if none is; a single one
// in any state. They are in the order of namespace, name and ID.
func Current(all []Sandbox) []Sandbox {
	type ref struct{ namespace, name string }
	groups := map[ref][]Sandbox{}
	for _, s := range all {
		r := ref{s.Namespace, s.Name}
		groups[r] = append(groups[r], s)
	}
	var out []Sandbox
	for _, group := range groups {
		ready := slices.DeleteFunc(slices.Clone(group), func(s Sandbox) bool { return !s.Ready })
		switch {
		case len(group) == 1:
			out = append(out, group[0])
		case len(ready) > 0:
			out = append(out, ready...)
		default:
			out = append(out, slices.MaxFunc(group, func(a, b Sandbox) int {
				return cmp.Or(a.CreatedAt.Compare(b.CreatedAt), cmp.Compare(a.ID, b.ID))
			}))
		}
	}
	slices.SortFunc(out, func(a, b Sandbox) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name), cmp.Compare(a.ID, b.ID))
	})
	return out
}

// Pod is what is known of a pod. A nil Use is not known, or not there.
type Pod struct {
	Namespace, Name, UID string
	Containers           []ContainerUse
	Volumes              []VolumeUse
	// LogFiles are the files directly in the pod's log folder, each for itself
	// (ACC-10).
	LogFiles *Use
	// EtcHosts is the kubelet's file (ACC-22).
	EtcHosts *Use
	// Besides is what the pod holds apart from layers and volumes: its sandbox's
	// layer, its log folders with all below them, the rest of its folder. What the
	// kubelet sees of it is in LogFiles and EtcHosts once more.
	Besides []Use
}

// ContainerUse is a container of a pod, dead ones included.
type ContainerUse struct {
	Name    string
	Running bool
	// Layer is its writable layer (ACC-8).
	Layer *Use
	// LogFiles are the files directly in the container's log folder, each for
	// itself (ACC-9). Containers of one name share it.
	LogFiles *Use
	// OpenDeleted are deleted files that it has open (ACC-16).
	OpenDeleted []Use
}

// VolumeUse is a volume in the pod's folder.
type VolumeUse struct {
	// Counted says that it is of a kind that the kubelet counts for the pod: an
	// emptyDir that is not in memory, or a configMap (ACC-2).
	Counted bool
	Use     *Use
	// Name is the volume's in the pod.
	Name string
	// EmptyDir says that it is one, and on disk.
	EmptyDir bool
}

// Usage is a pod's local storage.
type Usage struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	UID       string `json:"uid"`
	// Kubelet is what the kubelet's summary says the pod uses ("ephemeral-storage",
	// ACC-1), given figures as fresh as ours; nil if it has no record of the pod
	// (ACC-4). Device is empty: it adds up all filesystems.
	Kubelet *Use `json:"kubelet,omitempty"`
	// KubeletOn is the same by filesystem, in the order of devices.
	KubeletOn []Use `json:"kubeletOn,omitempty"`
	// HeldOn is what comes free if the pod goes, by filesystem: dead containers'
	// layers (ACC-3), deleted files that are still open (ACC-16) and the rest that
	// the kubelet does not see.
	HeldOn []Use `json:"heldOn,omitempty"`
	// Unknown is how many figures are missing: both are lower bounds then.
	Unknown int `json:"unknown,omitempty"`
}

// Of counts.
func Of(p Pod) Usage {
	out := Usage{Namespace: p.Namespace, Name: p.Name, UID: p.UID}
	counted, held := sums{}, sums{}
	record := false
	for _, c := range p.Containers {
		out.Unknown += missing(c.Layer)
		held.add(c.Layer)
		for _, u := range c.OpenDeleted {
			held.add(&u)
		}
		if !c.Running || c.Layer == nil {
			// ACC-3; and without a layer's figure the kubelet leaves the logs out too.
			continue
		}
		record = true // ACC-4
		counted.add(c.Layer)
		counted.add(c.LogFiles) // for each container of that name (ACC-9)
	}
	for _, v := range p.Volumes {
		out.Unknown += missing(v.Use)
		held.add(v.Use)
		if v.Counted {
			counted.add(v.Use)
		}
	}
	counted.add(p.LogFiles)
	counted.add(p.EtcHosts)
	for _, u := range p.Besides {
		held.add(&u)
	}
	out.HeldOn = held.list()
	if !record {
		return out
	}
	out.KubeletOn = counted.list()
	out.Kubelet = &Use{}
	for _, u := range out.KubeletOn {
		out.Kubelet.Bytes = saturatingAdd(out.Kubelet.Bytes, u.Bytes)
		out.Kubelet.Inodes = saturatingAdd(out.Kubelet.Inodes, u.Inodes) // ACC-23
		if u.At.After(out.Kubelet.At) {
			out.Kubelet.At = u.At // ACC-7
		}
	}
	return out
}

func missing(u *Use) int {
	if u == nil {
		return 1
	}
	return 0
}

// sums adds up by device.
type sums map[string]Use

func (s sums) add(u *Use) {
	if u == nil {
		return
	}
	sum := s[u.Device]
	sum.Device = u.Device
	sum.Bytes = saturatingAdd(sum.Bytes, u.Bytes)
	sum.Inodes = saturatingAdd(sum.Inodes, u.Inodes)
	if u.At.After(sum.At) {
		sum.At = u.At
	}
	s[u.Device] = sum
}

func (s sums) list() []Use {
	out := make([]Use, 0, len(s))
	for _, device := range slices.Sorted(maps.Keys(s)) {
		out = append(out, s[device])
	}
	return out
}

// saturatingAdd keeps absurd figures of a broken filesystem from wrapping.
func saturatingAdd(a, b uint64) uint64 {
	if sum := a + b; sum >= a {
		return sum
	}
	return ^uint64(0)
}
