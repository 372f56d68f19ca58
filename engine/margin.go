package engine

import (
	"cmp"
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/api/resource"
)

// Margin is how far above the kubelet's thresholds ours lie, so that two who
// evict on one node don't get in each other's way and the kubelet stays the
// last resort.
type Margin struct {
	// Share of the capacity, at most AtMostBytes of bytes; of inodes the share
	// alone counts.
	Share       float64
	AtMostBytes int64
}

// DefaultMargin is 2 % of the capacity, at most 2 GiB.
func DefaultMargin() Margin { return Margin{Share: 0.02, AtMostBytes: 2 << 30} }

// of is the margin at a capacity, in the signal's unit.
func (m Margin) of(s Signal, capacity int64) int64 {
	above := truncate(float64(capacity) * m.Share)
	if s.Resource() == EphemeralStorage {
		above = min(above, m.AtMostBytes)
	}
	return above
}

// Above derives thresholds from the kubelet's: the same signals, grace and
// minimum reclaim, a margin more. kubelet are those that it goes by, with those
// of containerfs; seen tells the capacities. What can't be derived is left out
// and named in missing: a signal that is not seen has no capacity. Thresholds of
// memory and process ids are the kubelet's business.
func (m Margin) Above(kubelet []Threshold, layout Layout, seen Observations) (ours []Threshold, missing []Signal) {
	for _, t := range kubelet {
		if t.Inert || t.Signal.Resource() != EphemeralStorage && t.Signal.Resource() != Inodes {
			continue
		}
		o, ok := seen[t.Signal]
		if !ok || o.Capacity <= 0 {
			if !slices.Contains(missing, t.Signal) {
				missing = append(missing, t.Signal)
			}
			continue
		}
		line := strictest(kubelet, t, layout, seen)
		line.Add(*quantity(m.of(t.Signal, o.Capacity)))
		t.Value = Value{Quantity: &line}
		ours = append(ours, t)
	}
	slices.SortStableFunc(ours, compareThresholds)
	return ours, missing
}

// strictest is the highest amount that the kubelet asks for on the filesystem
// of t, hard or soft: on one disk imagefs's 15 % act before nodefs's 10 %
// (GAP-14).
func strictest(kubelet []Threshold, t Threshold, layout Layout, seen Observations) resource.Quantity {
	line := t.Value.Of(seen[t.Signal].Capacity)
	for _, other := range kubelet {
		o, ok := seen[other.Signal]
		if !ok || other.Inert || other.Signal.Resource() != t.Signal.Resource() || !together(other.Signal, t.Signal, layout) {
			continue
		}
		if v := other.Value.Of(o.Capacity); v.Cmp(line) > 0 {
			line = v
		}
	}
	return line
}

// Overlap is a filesystem on which the kubelet would act as early as we do.
type Overlap struct {
	Ours, Kubelet Threshold
	// OursAt and KubeletAt are the amounts that have to be available.
	OursAt, KubeletAt resource.Quantity
}

func (o Overlap) String() string {
	return fmt.Sprintf("%s is at %s, the kubelet's %s at %s: raise the first or lower the second", o.Ours, &o.OursAt, o.Kubelet, &o.KubeletAt)
}

// Overlaps lists where ours are not above the kubelet's on the same filesystem.
// There nothing may be evicted by us. A threshold of ours about whose signal
// nothing is known overlaps with none and acts on nothing (OBS-2).
func Overlaps(ours, kubelet []Threshold, layout Layout, seen Observations) []Overlap {
	var out []Overlap
	for _, a := range ours {
		oa, ok := seen[a.Signal]
		if !ok || a.Inert {
			continue
		}
		for _, b := range kubelet {
			ob, ok := seen[b.Signal]
			if !ok || b.Inert || a.Signal.Resource() != b.Signal.Resource() || a.Signal.disk(layout) == "" || !together(a.Signal, b.Signal, layout) {
				continue
			}
			at, kubeletAt := a.Value.Of(oa.Capacity), b.Value.Of(ob.Capacity)
			if at.Cmp(kubeletAt) <= 0 {
				out = append(out, Overlap{Ours: a, Kubelet: b, OursAt: at, KubeletAt: kubeletAt})
			}
		}
	}
	slices.SortStableFunc(out, func(a, b Overlap) int {
		return cmp.Or(compareThresholds(a.Ours, b.Ours), compareThresholds(a.Kubelet, b.Kubelet))
	})
	return out
}
