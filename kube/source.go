package kube

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Source is a place that pods are known from. Pods gives the last value and never waits.
type Source interface {
	Pods() Snapshot
}

// Snapshot is what a source knew at one time.
type Snapshot struct {
	// Source is its name, for people: "API server", "kubelet", "static pods".
	Source string
	// AsOf is when this was true for sure, by this machine's clock; zero before the first answer.
	AsOf time.Time
	Pods []*Pod
	// Static lists namespace/name of pods that come from files, when no UID is known for them.
	Static []string
	// Problem says why nothing newer is known, or what was left out; empty if all is well.
	Problem string
}

// View is what all sources together know.
type View struct {
	// Sources are what the view was made from, in the order of [Merge].
	Sources []SourceState
	byUID   map[string]Known
	static  map[string]bool // namespace/name
}

// SourceState says how a source is.
type SourceState struct {
	Name string `json:"name"`
	// AsOf is nil before the first answer.
	AsOf *time.Time `json:"asOf,omitempty"`
	// Pods is how many it knows.
	Pods    int    `json:"pods"`
	Problem string `json:"problem,omitempty"`
}

// Known is a pod and since when that is so.
type Known struct {
	Pod *Pod
	// AsOf is when a source last said so, by this machine's clock.
	AsOf time.Time
	// Source is the one that it is from.
	Source string
}

// Age is how old it is at a time, never less than 0. It is what a decision has to bound: docs/kube.md says by what.
func (k Known) Age(now time.Time) time.Duration { return max(0, now.Sub(k.AsOf)) }

// Merge makes one view of snapshots. Where several know a pod, the newest is believed, and of equally old ones the first; but
// what protects a pod from being evicted counts whoever says it.
func Merge(snapshots ...Snapshot) View {
	v := View{byUID: map[string]Known{}, static: map[string]bool{}}
	for _, s := range snapshots {
		state := SourceState{Name: s.Source, Pods: len(s.Pods) + len(s.Static), Problem: s.Problem}
		if s.AsOf.IsZero() {
			state.Problem = cmp.Or(state.Problem, "it has not answered yet")
		} else {
			state.AsOf = &s.AsOf
		}
		v.Sources = append(v.Sources, state)
		if s.AsOf.IsZero() {
			continue
		}
		for _, name := range s.Static {
			v.static[name] = true
		}
		for _, p := range s.Pods {
			news := Known{Pod: p, AsOf: s.AsOf, Source: s.Source}
			old, ok := v.byUID[p.UID]
			switch {
			case !ok:
				v.byUID[p.UID] = news
			case news.AsOf.After(old.AsOf):
				v.byUID[p.UID] = news.protectedAs(old.Pod)
			default:
				v.byUID[p.UID] = old.protectedAs(p)
			}
		}
	}
	return v
}

// protectedAs is k with what protects the same pod elsewhere.
func (k Known) protectedAs(other *Pod) Known {
	p := *k.Pod
	p.Static, p.Mirror = p.Static || other.Static, p.Mirror || other.Mirror
	if other.Priority != nil && *other.Priority >= SystemCritical {
		p.Priority = other.Priority
	}
	p.APIUID = cmp.Or(p.APIUID, other.APIUID)
	k.Pod = &p
	return k
}

// Pod is the pod with a UID; namespace and name are those that the runtime has for it. It is not known if no source has that
// UID, or if a source has another name for it.
func (v View) Pod(uid, namespace, name string) (Known, bool) {
	k, ok := v.byUID[uid]
	if !ok || k.Pod.Namespace != namespace || k.Pod.Name != name {
		return Known{}, false
	}
	if v.static[k.Pod.String()] && !k.Pod.Static {
		p := *k.Pod
		p.Static = true
		k.Pod = &p
	}
	return k, true
}

// StaticName says whether a file makes a pod of that name on this node: then no pod of that name may be evicted, whatever its
// UID.
func (v View) StaticName(namespace, name string) bool { return v.static[namespace+"/"+name] }

// All are the known pods, in the order of their names, then UIDs.
func (v View) All() []Known {
	out := make([]Known, 0, len(v.byUID))
	for _, k := range v.byUID {
		if known, ok := v.Pod(k.Pod.UID, k.Pod.Namespace, k.Pod.Name); ok {
			out = append(out, known)
		}
	}
	slices.SortFunc(out, func(a, b Known) int {
		return cmp.Or(cmp.Compare(a.Pod.String(), b.Pod.String()), cmp.Compare(a.Pod.UID, b.Pod.UID))
	})
	return out
}

// problems puts a few of many together.
func problems(list []string) string {
	const most = 3
	if len(list) <= most {
		return strings.Join(list, "; ")
	}
	return fmt.Sprintf("%s; and %d more", strings.Join(list[:most], "; "), len(list)-most)
}
