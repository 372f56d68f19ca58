package engine

import (
	"cmp"
	"slices"

	"k8s.io/apimachinery/pkg/api/resource"
)

// overLimit lists the pods that use more than they may, by UID (LSE-1). A pod
// without figures is passed over, and so is a critical one.
func (c Config) overLimit(layout Detected, pods []Pod, stats podStats) []Eviction {
	var out []Eviction
	for i := range pods {
		pod := &pods[i]
		st := stats[pod.UID]
		if st == nil || pod.Critical() {
			continue
		}
		e := c.emptyDirOver(pod, st)
		if e == nil {
			e = podOver(pod, st)
		}
		if e == nil {
			e = containerOver(!layout.ImageApart || c.Options.WholeContainerLimit, pod, st)
		}
		if e == nil {
			continue
		}
		e.UID, e.Namespace, e.Name, e.Owner, e.GraceSeconds = pod.UID, pod.Namespace, pod.Name, pod.Owner, 1
		out = append(out, *e)
	}
	slices.SortStableFunc(out, func(a, b Eviction) int { return cmp.Compare(a.UID, b.UID) })
	return out
}

// emptyDirOver finds the first emptyDir above its size (LSE-4). One in memory
// counts, too (LSE-5). Of two figures with one name the later counts.
func (c Config) emptyDirOver(pod *Pod, st *PodStats) *Eviction {
	for _, v := range pod.Volumes {
		memory := v.Kind == EmptyDirMemory
		if v.Kind != EmptyDirDisk && !memory || memory && c.MemoryVolumesByKernel {
			continue
		}
		if v.SizeLimit == nil || v.SizeLimit.Sign() <= 0 {
			continue
		}
		for i := len(st.Volumes) - 1; i >= 0; i-- {
			s := &st.Volumes[i]
			if s.Name != v.Name {
				continue
			}
			if s.UsedBytes != nil && quantity(signed(*s.UsedBytes)).Cmp(*v.SizeLimit) > 0 {
				return &Eviction{Cause: EmptyDirLimit, Subject: v.Name, Limit: *v.SizeLimit}
			}
			break
		}
	}
	return nil
}

// podOver compares all that a pod uses with all that its containers may use
// (LSE-7). A declared limit of 0 is a limit (LSE-8).
func podOver(pod *Pod, st *PodStats) *Eviction {
	limit := pod.limit()
	if !limit.given || limit.q.Cmp(*quantity(st.EphemeralStorage.usedBytes())) >= 0 {
		return nil
	}
	return &Eviction{Cause: PodLimit, Limit: limit.q}
}

// containerOver finds the first container above its own limit (LSE-9). To the
// kubelet its writable layer counts only while imagefs is not apart, even where
// the layer is on nodefs: withLayer. Here a limit of 0 is none (LSE-8).
func containerOver(withLayer bool, pod *Pod, st *PodStats) *Eviction {
	for i := range st.Containers {
		s := &st.Containers[i]
		limit := pod.containerLimit(s.Name)
		if limit == nil {
			continue
		}
		used := *quantity(s.Logs.usedBytes())
		if withLayer {
			used.Add(*quantity(s.RootFS.usedBytes()))
		}
		if used.Cmp(*limit) > 0 {
			return &Eviction{Cause: ContainerLimit, Subject: s.Name, Limit: *limit}
		}
	}
	return nil
}

// containerLimit is the limit of a regular container or a sidecar; nil if there
// is none above 0. Of two with one name the later counts.
func (p *Pod) containerLimit(name string) *resource.Quantity {
	var limit *resource.Quantity
	note := func(c *Container) {
		if q := c.Limits.EphemeralStorage; c.Name == name && q != nil && q.Value() != 0 {
			limit = q
		}
	}
	for i := range p.Containers {
		note(&p.Containers[i])
	}
	for i := range p.InitContainers {
		if p.InitContainers[i].Sidecar {
			note(&p.InitContainers[i])
		}
	}
	return limit
}
