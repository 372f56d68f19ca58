package engine

import (
	"slices"
	"time"
)

// Departure is a pod that was evicted.
type Departure struct {
	UID   string
	Owner string `json:",omitempty"`
	At    time.Time
}

// Bar is a pod that does not go because too many went lately.
type Bar struct {
	UID   string
	Owner string `json:",omitempty"`
	// Why says which bound is reached.
	Why Bound
	// Within the last hour so many went: of the owner, or in all.
	Went int
	// Until is when the pod may go.
	Until time.Time
	// Node says that no pod may go at all.
	Node bool `json:",omitempty"`
}

// Bound is what keeps evictions from becoming a storm.
type Bound string

// The bounds.
const (
	BackOff      Bound = "back-off"
	OwnerPerHour Bound = "owner's cap"
	PerHour      Bound = "node's cap"
)

// Evicted is the state after a pod went. Whoever evicts says so, because only
// that counts.
func (s State) Evicted(e Eviction, now time.Time) State {
	s.Gone = append(slices.Clone(s.Gone), Departure{UID: e.UID, Owner: e.Owner, At: now})
	return s
}

// recent drops what is longer ago than an hour. What lies in the future, because
// the clock was set back, counts as of now: it is not known when it was, and a
// bound must not be forgotten for that.
func recent(list []Departure, now time.Time) []Departure {
	out := slices.DeleteFunc(slices.Clone(list), func(d Departure) bool { return now.Sub(d.At) >= time.Hour })
	for i := range out {
		if out[i].At.After(now) {
			out[i].At = now
		}
	}
	slices.SortStableFunc(out, func(a, b Departure) int { return a.At.Compare(b.At) })
	return out
}

// barred says why a pod may not go now; nil if it may. s.Gone has the last
// hour only. A pod without owner is not made anew: only the node's cap holds
// for it.
func (c Config) barred(s State, pod *Pod, now time.Time) *Bar {
	if !c.Options.BreakStorms {
		return nil
	}
	if most := or(c.PerHour, 30); len(s.Gone) >= most {
		return &Bar{UID: pod.UID, Owner: pod.Owner, Why: PerHour, Went: len(s.Gone), Until: s.Gone[len(s.Gone)-most].At.Add(time.Hour), Node: true}
	}
	if pod.Owner == "" {
		return nil
	}
	var went []time.Time
	for _, d := range s.Gone {
		if d.Owner == pod.Owner {
			went = append(went, d.At)
		}
	}
	if len(went) == 0 {
		return nil
	}
	bar := &Bar{UID: pod.UID, Owner: pod.Owner, Went: len(went)}
	if most := or(c.OwnerPerHour, 4); len(went) >= most {
		bar.Why, bar.Until = OwnerPerHour, went[len(went)-most].Add(time.Hour)
		return bar
	}
	rest := or(c.BackOff, time.Minute)
	for range len(went) - 1 {
		rest = min(2*rest, time.Hour)
	}
	if bar.Why, bar.Until = BackOff, went[len(went)-1].Add(rest); bar.Until.After(now) {
		return bar
	}
	return nil
}

// withinBounds splits pods above their own limits into those that go and those
// that may not, because their owner only makes them anew.
func (c Config) withinBounds(s State, over []Eviction, now time.Time) (goes []Eviction, barred []Bar) {
	for _, e := range over {
		bar := c.barred(s, &Pod{UID: e.UID, Owner: e.Owner}, now)
		if bar == nil {
			goes = append(goes, e)
			s = s.Evicted(e, now) // two of one owner in one pass count as two
			continue
		}
		barred = append(barred, *bar)
	}
	return goes, barred
}
