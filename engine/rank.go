package engine

import (
	"cmp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
)

// Ranked is one pod's place in the order of eviction, and what put it there.
type Ranked struct {
	UID string
	// Group numbers the places from 0. Pods of one group are equal to the
	// kubelet, which may take them in any order (RANK-12); the engine takes
	// them by UID.
	Group int
	// Measured says that there are figures of the pod, or that the option
	// UnmeasuredIsZero takes them for 0. Pods without go first (RANK-8).
	Measured bool
	// Exceeds says that the pod uses more than it requests (RANK-9, RANK-15).
	Exceeds  bool
	Priority int32
	// Usage is what counts for the signal on this layout, in its unit.
	Usage resource.Quantity
	// Over is Usage less what was requested; for inodes that is bytes, too
	// (RANK-16).
	Over resource.Quantity
	// Critical pods are ranked but never go.
	Critical bool

	pod       *Pod
	processes uint64
}

// part is something of a pod that takes space.
type part uint8

const (
	rootFS part = 1 << iota
	logs
	volumes
	images
)

// counted says what of a pod the kubelet counts on the filesystem of a signal.
// Image layers it never does (RANK-4).
func counted(s Signal, layout Layout) part {
	image := s == ImageFSAvailable || s == ImageFSInodesFree
	node := s == NodeFSAvailable || s == NodeFSInodesFree
	switch {
	case layout == Dedicated && node: // RANK-2
		return logs | volumes
	case layout == Dedicated:
		return rootFS
	case layout == Split && image: // RANK-3
		return 0
	case layout == Separate && image:
		return 0
	case layout == Separate && node, layout == ContainersAlone && (node || image):
		return logs | volumes
	case layout == Separate, layout == ContainersAlone:
		return rootFS
	default: // RANK-1, RANK-3
		return rootFS | logs | volumes
	}
}

// ranked says whether there is an order for a signal at all (LAY-14).
func ranked(s Signal, layout Layout) bool { return layout != Inert && s.Valid() }

// rank orders pods for eviction because of a signal, first to go first.
func (o Options) rank(s Signal, layout Layout, pods []Pod, stats podStats) []Ranked {
	order := compareUsage
	if s.Resource() == PIDs {
		order = compareProcesses
	}
	out := make([]Ranked, len(pods))
	sorted := make([]int, len(pods)) // places are large: numbers are moved, then each place once
	for i := range pods {
		out[i] = o.placed(s, layout, &pods[i], stats[pods[i].UID])
		sorted[i] = i
	}
	slices.SortFunc(sorted, func(i, j int) int {
		a, b := &out[i], &out[j]
		if c := order(a, b); c != 0 {
			return c
		}
		return cmp.Or(strings.Compare(a.UID, b.UID), cmp.Compare(i, j))
	})
	arrange(out, sorted)
	for i := 1; i < len(out); i++ {
		out[i].Group = out[i-1].Group
		if order(&out[i-1], &out[i]) != 0 {
			out[i].Group++
		}
	}
	return out
}

// arrange puts list[order[i]] in place i, for all i; order is used up.
func arrange[T any](list []T, order []int) {
	for start := range order {
		first, i := list[start], start
		for order[i] != i {
			from := order[i]
			order[i] = i
			if from == start {
				list[i] = first
				break
			}
			list[i] = list[from]
			i = from
		}
	}
}

// placed collects what decides about a pod's place.
func (o Options) placed(s Signal, layout Layout, pod *Pod, st *PodStats) Ranked {
	r := Ranked{UID: pod.UID, Priority: pod.priority(), Critical: pod.Critical(), pod: pod, Measured: st != nil}
	if st == nil {
		if !o.UnmeasuredIsZero {
			return r
		}
		r.Measured, st = true, &PodStats{}
	}
	what := s.Resource()
	switch what {
	case Memory:
		r.Usage = *quantity(known(st.MemoryBytes))
	case PIDs:
		r.processes = uint64(known(st.ProcessCount))
		r.Usage = *quantity(known(st.ProcessCount))
		return r
	default:
		r.Usage = diskUsage(pod, st, o.counted(s, layout), what)
	}
	request := pod.request(what, o.KeepRequests)
	r.Exceeds = r.Usage.Cmp(request) > 0
	if what == Inodes && !o.InodesByInodes {
		request = pod.request(EphemeralStorage, o.KeepRequests)
	}
	r.Over = r.Usage.DeepCopy()
	r.Over.Sub(request)
	return r
}

// diskUsage sums what a pod has of bytes or inodes in the given parts. Unknown
// parts count as 0 (RANK-7).
func diskUsage(pod *Pod, st *PodStats, parts part, what Resource) resource.Quantity {
	used := (*FSStats).usedBytes
	if what == Inodes {
		used = (*FSStats).inodesUsed
	}
	var sum resource.Quantity
	add := func(f *FSStats) {
		if v := used(f); v != 0 {
			sum.Add(*quantity(v))
		}
	}
	for i := range st.Containers {
		if parts&rootFS != 0 {
			add(st.Containers[i].RootFS)
		}
		if parts&logs != 0 {
			add(st.Containers[i].Logs)
		}
	}
	if parts&images != 0 {
		add(st.Images)
	}
	if parts&volumes == 0 {
		return sum
	}
	for _, v := range pod.Volumes {
		if !v.Kind.Local() {
			continue
		}
		for i := range st.Volumes {
			if st.Volumes[i].Name == v.Name { // the first of a name counts (RANK-5)
				add(&st.Volumes[i].FSStats)
				break
			}
		}
	}
	return sum
}

// compareUsage is the order for memory and disks: unmeasured first, then those
// above their request, then by priority, then by how far above (RANK-8 …
// RANK-11).
func compareUsage(a, b *Ranked) int {
	if c := first(!a.Measured, !b.Measured); c != 0 {
		return c
	}
	if c := first(a.Exceeds, b.Exceeds); c != 0 {
		return c
	}
	if c := cmp.Compare(a.Priority, b.Priority); c != 0 || !a.Measured {
		return c
	}
	return compare(&b.Over, &a.Over) // what is written must not depend on who was compared
}

// compareProcesses is the order for process ids: by priority, then unmeasured
// first, then by count. The kubelet subtracts counts; from 2^63 on its
// differences wrap and its order depends on where it began, ours does not.
func compareProcesses(a, b *Ranked) int {
	if c := cmp.Compare(a.Priority, b.Priority); c != 0 {
		return c
	}
	if c := first(!a.Measured, !b.Measured); c != 0 || !a.Measured {
		return c
	}
	return cmp.Compare(b.processes, a.processes)
}

// first puts true before false.
func first(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	default:
		return 1
	}
}
