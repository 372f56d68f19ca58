package engine

import (
	"fmt"

	"k8s.io/apimachinery/pkg/api/resource"
)

// NodeResources are what a node has or keeps back, in bytes.
type NodeResources struct {
	Memory, EphemeralStorage resource.Quantity
}

// Reservation is what a kubelet withholds from pods.
type Reservation struct {
	// KubeReserved and SystemReserved are the settings of those names.
	KubeReserved, SystemReserved NodeResources
	// Hard is what evictionHard alone comes to (NAL-2); with the kubelet's
	// experimental-allocatable-ignore-eviction it is empty (NAL-4).
	Hard []Threshold
	// HugePages is the capacity of all huge pages, which is taken off memory.
	HugePages resource.Quantity
}

// eviction is what hard thresholds withhold: memory.available of memory and
// nodefs.available of ephemeral storage, nothing else (NAL-2). Shares are of
// the capacity, with the same rounding as everywhere (NAL-3).
func (r Reservation) eviction(capacity NodeResources) NodeResources {
	var out NodeResources
	for _, t := range r.Hard {
		switch t.Signal {
		case MemoryAvailable:
			out.Memory = t.Value.Of(capacity.Memory.Value())
		case NodeFSAvailable:
			out.EphemeralStorage = t.Value.Of(capacity.EphemeralStorage.Value())
		default:
		}
	}
	return out
}

// Allocatable is what pods can request of a node, never less than 0 (NAL-1).
// Capacity of ephemeral storage is the size of nodefs when the kubelet
// started; an imagefs of its own adds nothing (NAL-5).
func (r Reservation) Allocatable(capacity NodeResources) NodeResources {
	hard := r.eviction(capacity)
	return NodeResources{
		Memory:           withhold(withhold(capacity.Memory, r.KubeReserved.Memory, r.SystemReserved.Memory, hard.Memory), r.HugePages),
		EphemeralStorage: withhold(capacity.EphemeralStorage, r.KubeReserved.EphemeralStorage, r.SystemReserved.EphemeralStorage, hard.EphemeralStorage),
	}
}

// Enforced is the memory that the pods' cgroup is limited to: eviction is to
// happen before it is reached, so its part is not withheld. Nothing of the
// kind holds for ephemeral storage (NAL-7).
func (r Reservation) Enforced(capacity NodeResources) resource.Quantity {
	return withhold(capacity.Memory, r.KubeReserved.Memory, r.SystemReserved.Memory)
}

// Validate says with which reservation the kubelet would not start: one that
// is more than there is (NAL-6), or less than 0 (NAL-10).
func (r Reservation) Validate(capacity NodeResources) error {
	hard := r.eviction(capacity)
	for _, c := range []struct {
		name             string
		all              resource.Quantity
		kube, system, ev resource.Quantity
	}{
		{"memory", capacity.Memory, r.KubeReserved.Memory, r.SystemReserved.Memory, hard.Memory},
		{"ephemeral-storage", capacity.EphemeralStorage, r.KubeReserved.EphemeralStorage, r.SystemReserved.EphemeralStorage, hard.EphemeralStorage},
	} {
		if c.kube.Sign() < 0 || c.system.Sign() < 0 {
			return fmt.Errorf("reserve %s: less than 0 is reserved", c.name)
		}
		sum := c.kube.DeepCopy()
		sum.Add(c.system)
		sum.Add(c.ev)
		if sum.Cmp(c.all) > 0 {
			return fmt.Errorf("reserve %s: %s is withheld from pods, the node has %s", c.name, &sum, &c.all)
		}
	}
	return nil
}

// withhold subtracts, down to 0.
func withhold(from resource.Quantity, amounts ...resource.Quantity) resource.Quantity {
	out := from.DeepCopy()
	for _, a := range amounts {
		out.Sub(a)
	}
	if out.Sign() < 0 {
		out.Set(0)
	}
	return out
}
