package engine

import (
	"math"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
)

// Freed is space that was set free on a filesystem. It may arrive late:
// filesystems free in the background, and so do runtimes.
type Freed struct {
	// Signal of the filesystem's bytes.
	Signal Signal
	// Bytes were set free, AvailableBytes were available before.
	Bytes, AvailableBytes int64
	At                    time.Time
	// Of is who had it: a pod's UID, empty if it was no pod.
	Of string `json:",omitempty"`
	// Arrived says that it is there, whatever others took of it meanwhile.
	Arrived bool `json:",omitempty"`
}

// Freeing is the state after bytes were set free on the filesystem of a signal,
// when availableBytes were available. Whoever deletes says so; under the option
// AwaitFreed it counts.
func (s State) Freeing(signal Signal, bytes, availableBytes int64, now time.Time) State {
	if bytes > 0 {
		s.Freed = append(slices.Clone(s.Freed), Freed{Signal: signal, Bytes: bytes, AvailableBytes: availableBytes, At: now})
	}
	return s
}

// FreeingOf is Freeing for what a pod had that is gone.
func (s State) FreeingOf(uid string, signal Signal, bytes, availableBytes int64, now time.Time) State {
	before := len(s.Freed)
	s = s.Freeing(signal, bytes, availableBytes, now)
	if len(s.Freed) > before {
		s.Freed[before].Of = uid
	}
	return s
}

// Arrived is the state after all that a pod had has arrived: it is waited for no
// more.
func (s State) Arrived(uid string) State {
	s.Freed = slices.Clone(s.Freed)
	for i := range s.Freed {
		s.Freed[i].Arrived = s.Freed[i].Arrived || uid != "" && s.Freed[i].Of == uid
	}
	return s
}

// lastFreed is when space was set free last.
func (s State) lastFreed() time.Time {
	if len(s.Freed) == 0 {
		return time.Time{}
	}
	return s.Freed[len(s.Freed)-1].At
}

// notArrived drops what has arrived, and what is waited for no more. On each
// filesystem what arrived is shared out among all that was set free, oldest
// first, so that it counts once. What stays counts from behind what was dropped.
func (c Config) notArrived(s State, layout Layout, seen Observations, now time.Time) []Freed {
	arrived, taken := map[string]int64{}, map[string]int64{}
	before := map[string]int64{}
	for _, f := range s.Freed {
		disk := f.Signal.disk(layout)
		if first, ok := before[disk]; !ok || f.AvailableBytes < first {
			before[disk] = f.AvailableBytes
		}
		if o, ok := seen[f.Signal]; ok {
			arrived[disk] = max(arrived[disk], more(o.Available, before[disk]))
		}
	}
	var out []Freed
	for _, f := range s.Freed {
		disk := f.Signal.disk(layout)
		part := min(f.Bytes, arrived[disk])
		arrived[disk] -= part
		if f.Arrived {
			part = f.Bytes
		}
		if now.Before(f.At) || now.Sub(f.At) >= or(c.FreedWait, 30*time.Second) || part == f.Bytes {
			taken[disk] += part // no more than has arrived
			continue
		}
		if t := taken[disk]; t > 0 {
			f.AvailableBytes = max(f.AvailableBytes, before[disk]+t)
		}
		out = append(out, f)
	}
	return out
}

// more is by how much a is more than b, at most half of what there can be.
func more(a, b int64) int64 {
	return truncate(min(math.MaxInt64/2, max(0, float64(a)-float64(b)))) // no overflow
}

// missing is what of list has not arrived yet on the filesystem of t, where o
// was seen.
func missing(list []Freed, t Threshold, layout Layout, o Observation) int64 {
	var sum int64
	var before *int64
	for i := range list {
		if f := &list[i]; together(f.Signal, t.Signal, layout) {
			sum += min(f.Bytes, math.MaxInt64/2-sum)
			if before == nil || f.AvailableBytes < *before {
				before = &f.AvailableBytes
			}
		}
	}
	if before == nil {
		return 0
	}
	return more(sum, more(o.Available, *before))
}

// awaited is what is still to arrive on the filesystem of t, if with it t would
// be resolved; else 0: then waiting would not help.
func (c Config) awaited(s State, t Threshold, layout Layout, seen Observations, now time.Time) int64 {
	o, ok := seen[t.Signal]
	if !c.Options.AwaitFreed || !ok || t.Signal.Resource() != EphemeralStorage {
		return 0
	}
	sum := missing(c.notArrived(s, layout, seen, now), t, layout, o)
	if sum == 0 || o.Available > math.MaxInt64/2 {
		return 0
	}
	o.Available += sum
	if t.met(o, true) {
		return 0
	}
	return sum
}

// short is how much more has to be available to resolve t, in the signal's
// unit.
func (c Config) short(t Threshold, o Observation) resource.Quantity {
	want := t.Value.Of(o.Capacity)
	if t.MinReclaim != nil {
		want.Add(t.MinReclaim.Of(o.Capacity))
	}
	want.Sub(*quantity(o.Available))
	return want
}

// need is how many bytes the reclaim for t is to free under the option
// StopAtTarget: what resolves all that is due on its filesystem, and the
// default margin on top, so that it is not short again at once. nil for all
// that can go: for inodes nobody knows how many come free.
func (c Config) need(due []Threshold, t Threshold, layout Layout, seen Observations) *int64 {
	if !c.Options.StopAtTarget || t.Signal.Resource() != EphemeralStorage {
		return nil
	}
	most := c.short(t, seen[t.Signal])
	for _, other := range due {
		if o, ok := seen[other.Signal]; ok && other.Signal.Resource() == EphemeralStorage && together(other.Signal, t.Signal, layout) {
			if short := c.short(other, o); short.Cmp(most) > 0 {
				most = short
			}
		}
	}
	most.Add(*quantity(DefaultMargin().of(t.Signal, seen[t.Signal].Capacity)))
	bytes := int64(math.MaxInt64)
	if most.CmpInt64(math.MaxInt64) < 0 { // beyond that Value wraps around
		bytes = most.Value()
	}
	return &bytes
}

// foresee plans the reclaim of what will be short soon, where there is news
// after what was seen last: a second look at the same figures plans nothing.
func (c Config) foresee(d Decision, s State, seen Observations, last map[Signal]time.Time, now time.Time) Decision {
	if !c.Options.Forecast {
		return d
	}
	news := make(Observations, len(seen))
	for signal, o := range seen {
		if o.fresh(last, signal) {
			news[signal] = o
		}
	}
	d.Coming = c.Coming(s.Trend, s, news, now, or(c.Horizon, time.Minute))
	if len(d.Coming) == 0 || len(d.Coming[0].Reclaim) == 0 {
		return d
	}
	t := d.Coming[0].Threshold
	d.Outcome, d.Rule, d.NoVictim = Foreseen, "Forecast", "Forecast"
	d.Threshold, d.Reclaim = t, d.Coming[0].Reclaim
	// What is needed is what will be short then: nothing yet, so the margin.
	if need := c.need(nil, t, c.Options.layout(*s.Layout), seen); need != nil {
		*need = max(*need, DefaultMargin().of(t.Signal, seen[t.Signal].Capacity))
		d.NeedBytes = need
	}
	return d
}
