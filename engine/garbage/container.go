package garbage

import (
	"cmp"
	"maps"
	"slices"
	"time"
)

// ContainerState is as the CRI has it.
type ContainerState string

// The states of a container.
const (
	Created ContainerState = "created"
	Running ContainerState = "running"
	Exited  ContainerState = "exited"
	Unknown ContainerState = "unknown"
)

// Container is one as the runtime lists it.
type Container struct {
	ID, PodUID, Name, SandboxID string
	State                       ContainerState
	CreatedAt                   time.Time
}

// Sandbox is one as the runtime lists it.
type Sandbox struct {
	ID, PodUID string
	Ready      bool
	CreatedAt  time.Time
}

// PodFate is what is to become of what a pod left behind.
type PodFate string

const (
	// Alive: the pod may start containers again. The zero PodFate is the same.
	Alive PodFate = "alive"
	// Ended: the pod has ended but is still in the API, such as a completed
	// job's (CGC-5).
	Ended PodFate = "ended"
	// Gone: evicted by the kubelet, or deleted and ended, or not known (CGC-4).
	Gone PodFate = "gone"
)

// Pods tells the fate of pods by UID.
type Pods struct {
	Fate map[string]PodFate
	// SourcesReady says that all sources of pods have been heard; before that
	// no container goes because of its pod.
	SourcesReady bool
	// Synced says that all pods have been looked at once since the start; a
	// pod that is not in Fate is Gone then, and Alive before.
	Synced bool
}

// leaves says whether all of a pod's content goes. Under pressure that is so
// for pods that have ended, too.
func (p Pods) leaves(uid string, pressure bool) bool {
	fate, known := p.Fate[uid]
	if !known {
		return p.Synced
	}
	return fate == Gone || fate == Ended && pressure
}

// ContainerPolicy is how many dead containers are kept.
type ContainerPolicy struct {
	// MinAge since creation, not since the end, before a dead container goes;
	// the kubelet's default is 0.
	MinAge time.Duration
	// PerContainer is how many dead instances of one container of one pod are
	// kept, default 1; Total how many on the node, default -1. Below 0 there
	// is no limit.
	PerContainer, Total int
	// NoneUnderPressure, an improvement on the kubelet, keeps no dead instance
	// of any pod when it is reclaim that asks (GAP-33), but what KeepLast marked
	// before.
	NoneUnderPressure bool
}

// Removal is one container to remove and the rule by which.
type Removal struct {
	Container Container
	Rule      string
	// StopFirst: it may be running, so it has to be stopped; if that fails it
	// stays (CGC-8).
	StopFirst bool
}

// Dead lists the containers to remove, in the order in which the kubelet's
// rules remove them, by rule oldest first. pressure says that it is reclaim
// that asks (CGC-5).
func (p ContainerPolicy) Dead(containers []Container, pods Pods, now time.Time, pressure bool) []Removal {
	type unit struct{ uid, name string }
	units := map[unit][]Container{} // newest first
	for _, c := range containers {
		if c.State == Running || now.Add(-p.MinAge).Before(c.CreatedAt) { // CGC-3
			continue
		}
		key := unit{c.PodUID, c.Name}
		units[key] = append(units[key], c)
	}
	for _, u := range units {
		slices.SortFunc(u, newestFirst)
	}
	keys := slices.SortedFunc(maps.Keys(units), func(a, b unit) int {
		return cmp.Or(cmp.Compare(a.uid, b.uid), cmp.Compare(a.name, b.name))
	})
	var out []Removal
	remove := func(list []Container, keep int, rule string) []Container {
		for i := len(list) - 1; i >= keep; i-- {
			out = append(out, Removal{Container: list[i], Rule: rule, StopFirst: list[i].State == Unknown})
		}
		return list[:min(keep, len(list))]
	}
	left := func() (n int) {
		for _, u := range units {
			n += len(u)
		}
		return n
	}

	if pods.SourcesReady { // CGC-4
		for _, key := range keys {
			if pods.leaves(key.uid, pressure) {
				remove(units[key], 0, "CGC-4")
				delete(units, key)
			}
		}
		keys = slices.DeleteFunc(keys, func(k unit) bool { _, ok := units[k]; return !ok })
	}
	perContainer, rule := p.PerContainer, "CGC-6"
	if p.NoneUnderPressure && pressure {
		perContainer, rule = 0, "GAP-33"
	}
	if perContainer >= 0 {
		for _, key := range keys {
			units[key] = remove(units[key], perContainer, rule)
		}
	}
	if p.Total < 0 || left() <= p.Total {
		return out
	}
	each := max(1, p.Total/len(keys)) // CGC-7
	for _, key := range keys {
		units[key] = remove(units[key], each, "CGC-7")
	}
	if left() > p.Total {
		var all []Container
		for _, key := range keys {
			all = append(all, units[key]...)
		}
		slices.SortFunc(all, newestFirst)
		remove(all, p.Total, "CGC-7")
	}
	return out
}

// KeepLast marks the newest instance of each container of a pod that lives as one that runs, so that NoneUnderPressure leaves it. It is all
// that tells the kubelet that a container has run: without it one that has completed, and is not to be restarted, runs a second time
// (kubelet, pkg/kubelet/container: ShouldContainerBeRestarted). A dead instance with a newer one beside it may go. So of a container that
// ends again and again the last dead instance stays until the next one has started.
func KeepLast(list []Container, pods Pods) {
	type unit struct{ uid, name string }
	newest := map[unit]int{}
	for i, c := range list {
		key := unit{c.PodUID, c.Name}
		if other, ok := newest[key]; !ok || c.CreatedAt.After(list[other].CreatedAt) {
			newest[key] = i
		}
	}
	for key, i := range newest {
		fate, known := pods.Fate[key.uid]
		if known && fate == Alive || !known && !(pods.SourcesReady && pods.Synced) {
			list[i].State = Running
		}
	}
}

func newestFirst(a, b Container) int {
	return cmp.Or(b.CreatedAt.Compare(a.CreatedAt), cmp.Compare(a.ID, b.ID))
}

// Sandboxes lists the sandboxes to stop and remove: not ready, without any
// container, and either of a pod whose content goes or not its pod's newest
// (CGC-9). They are not asked for their age, and whether all pods have been
// seen does not matter. Under pressure those of ended pods go, too.
func Sandboxes(sandboxes []Sandbox, containers []Container, pods Pods, pressure bool) []Sandbox {
	owners := map[string]bool{}
	for _, c := range containers {
		owners[c.SandboxID] = true
	}
	byPod := map[string][]Sandbox{}
	for _, s := range sandboxes {
		byPod[s.PodUID] = append(byPod[s.PodUID], s)
	}
	var out []Sandbox
	for _, uid := range slices.Sorted(maps.Keys(byPod)) {
		list := byPod[uid]
		slices.SortFunc(list, func(a, b Sandbox) int {
			return cmp.Or(b.CreatedAt.Compare(a.CreatedAt), cmp.Compare(a.ID, b.ID))
		})
		keep := 1
		if pods.leaves(uid, pressure) {
			keep = 0
		}
		for i := len(list) - 1; i >= keep; i-- {
			if s := list[i]; !s.Ready && !owners[s.ID] {
				out = append(out, s)
			}
		}
	}
	return out
}

// AfterDeath lists the containers that the kubelet removes when one has died,
// apart from garbage collection (CGC-13): older dead instances of the same
// name, of which the per-container maximum is kept, but never less than one;
// or all dead ones of a pod that was evicted or deleted.
func (p ContainerPolicy) AfterDeath(died string, ofPod []Container, podGone bool) []Container {
	var name string
	found := false
	for _, c := range ofPod {
		if c.ID == died {
			name, found = c.Name, true
		}
	}
	if !found && !podGone {
		return nil
	}
	var dead []Container
	for _, c := range ofPod {
		if c.State == Exited && (podGone || c.Name == name) {
			dead = append(dead, c)
		}
	}
	slices.SortFunc(dead, newestFirst)
	keep := max(1, p.PerContainer)
	if podGone {
		keep = 0
	}
	return dead[min(keep, len(dead)):]
}
