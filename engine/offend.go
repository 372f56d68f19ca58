package engine

import "k8s.io/apimachinery/pkg/api/resource"

// offenders lists the containers that use more of r than they request, in the
// order of the figures (SYN-39). Of ephemeral storage usage is the writable
// layer and the logs, both known, in every layout; volumes belong to no
// container. pod is the pod as a whole where it has a request of its own.
func offenders(p *Pod, st *PodStats, r Resource) (pod *Offender, containers []Offender) {
	if r == Memory && p.PodLevel && p.PodLevelMemory != nil && st.MemoryBytes != nil {
		pod = &Offender{Name: p.Name, Usage: *quantity(known(st.MemoryBytes)), Request: *p.PodLevelMemory}
	}
	for _, cs := range st.Containers {
		c := p.container(cs.Name)
		if c == nil {
			continue
		}
		usage, request := cs.usage(r), resource.Quantity{}
		if get := amountsOf(r); get != nil {
			if q := get(&c.Requests); q != nil {
				request = *q
			}
		}
		if usage != nil && usage.Cmp(request) > 0 {
			containers = append(containers, Offender{Name: c.Name, Usage: *usage, Request: request})
		}
	}
	return pod, containers
}

// container finds a container by name, regular ones before init containers.
func (p *Pod) container(name string) *Container {
	for _, list := range [][]Container{p.Containers, p.InitContainers} {
		for i := range list {
			if list[i].Name == name {
				return &list[i]
			}
		}
	}
	return nil
}

// usage is what a container is blamed for; nil if it is not known or if nobody
// is blamed for this resource.
func (c *ContainerStats) usage(r Resource) *resource.Quantity {
	switch {
	case r == Memory && c.MemoryBytes != nil:
		return quantity(known(c.MemoryBytes))
	case r == EphemeralStorage && c.RootFS != nil && c.RootFS.UsedBytes != nil && c.Logs != nil && c.Logs.UsedBytes != nil:
		return quantity(signed(*c.RootFS.UsedBytes + *c.Logs.UsedBytes))
	default:
		return nil
	}
}
