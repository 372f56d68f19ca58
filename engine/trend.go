package engine

import (
	"cmp"
	"math"
	"slices"
	"time"
)

// Trend remembers the last observations of each signal, to tell how fast they
// fall. It is plain data; a Trend never changes, Add returns another.
type Trend map[Signal][]Sample

// Sample is one observation.
type Sample struct {
	At                  time.Time
	Available, Capacity int64
}

// How much a Trend remembers: enough for a middle that one burst does not move,
// and nothing that was measured longer ago than trendFor, or that claims to be
// of a time further ahead than clockSlack.
const (
	remembered = 8
	trendFor   = 5 * time.Minute
	clockSlack = 10 * time.Second
)

// The rests between two looks.
const (
	// LongestRest is the kubelet's: 10 s when nothing moves.
	LongestRest = 10 * time.Second
	// ShortestRest is for a disk that fills up within a second.
	ShortestRest = 100 * time.Millisecond
	// metRest is for when a threshold is met already.
	metRest = time.Second
)

// Add remembers what was seen. Each sample is of the time when it was measured,
// or of now if that is not known. One that is not later than the last is no
// news; one that is earlier than all, because the clock was set back, begins
// anew, as does a filesystem of another size. What is old, or of a time to come,
// is neither taken nor kept: one wrong date must not stop the others.
func (t Trend) Add(seen Observations, now time.Time) Trend {
	next := make(Trend, len(seen))
	for signal, o := range seen {
		at := o.Time
		if at.IsZero() {
			at = now
		}
		// A record has no monotonic clock, whose seconds are a little longer or shorter; what is made of it is to be the same.
		at = at.Round(0)
		unfit := func(s Sample) bool { return s.At.After(now.Add(clockSlack)) || now.Sub(s.At) > trendFor }
		list := slices.DeleteFunc(slices.Clone(t[signal]), unfit)
		sample := Sample{At: at, Available: o.Available, Capacity: o.Capacity}
		switch {
		case unfit(sample):
		case len(list) == 0 || at.Before(list[0].At) || list[0].Capacity != o.Capacity:
			list = []Sample{sample}
		case at.After(list[len(list)-1].At):
			list = append(slices.Clone(list[max(0, len(list)+1-remembered):]), sample)
		}
		if len(list) > 0 {
			next[signal] = list
		}
	}
	return next
}

// falls are the speeds at which a signal fell between its samples, in its unit
// per second; negative where it rose.
func (t Trend) falls(s Signal) []float64 {
	var out []float64
	for i, list := 1, t[s]; i < len(list); i++ {
		if seconds := list[i].At.Sub(list[i-1].At).Seconds(); seconds > 0 {
			out = append(out, (float64(list[i-1].Available)-float64(list[i].Available))/seconds)
		}
	}
	return out
}

// until is how long what is available above t lasts at a speed.
func until(t Threshold, o Observation, fall float64) time.Duration {
	line := t.Value.Of(o.Capacity)
	seconds := (float64(o.Available) - line.AsApproximateFloat64()) / fall
	if fall <= 0 || math.IsNaN(seconds) || seconds > math.MaxInt64/float64(time.Second)/2 {
		return math.MaxInt64
	}
	return time.Duration(max(0, seconds) * float64(time.Second))
}

// Rest is when to look again: at half of the time until the next threshold is
// met at the latest speed, so that it is seen coming, within ShortestRest and
// LongestRest. Looking costs little, so one burst is reason enough. While a
// threshold is met it is a second, or when its grace is over.
func (c Config) Rest(t Trend, s State, seen Observations, now time.Time) time.Duration {
	rest := LongestRest
	for _, m := range s.Met {
		left := metRest
		if !m.Acting {
			left = min(left, m.Since.Add(m.Threshold.Grace).Sub(now))
		}
		rest = min(rest, left)
	}
	if s.Layout == nil {
		return rest
	}
	for _, th := range c.all(*s.Layout) {
		o, ok := seen[th.Signal]
		falls := t.falls(th.Signal)
		if ok && !th.Inert && len(falls) > 0 && !th.met(o, false) {
			rest = min(rest, until(th, o, falls[len(falls)-1])/2)
		}
	}
	return max(ShortestRest, rest)
}

// Coming is a hard threshold that will be met soon.
type Coming struct {
	Threshold Threshold
	// In is how long it will take.
	In time.Duration
	// Reclaim may begin now; no pod goes for what has not come.
	Reclaim []Reclaim
}

// Coming lists the hard thresholds of disks that will be met within horizon at
// the speed in the middle of those remembered, or at the latest if that is less:
// what has stopped is not coming. Soonest first. At least four are asked for, so
// that a burst does not clear a node of its images. The latest sample has to be
// what was seen: what Add did not take tells of nothing to come.
// The time since then counts.
func (c Config) Coming(t Trend, s State, seen Observations, now time.Time, horizon time.Duration) []Coming {
	const enough = 4
	if s.Layout == nil {
		return nil
	}
	layout := c.Options.layout(*s.Layout)
	var out []Coming
	for _, th := range c.all(*s.Layout) {
		o, ok := seen[th.Signal]
		falls := t.falls(th.Signal)
		if !ok || th.Inert || !th.Hard() || th.met(o, false) || len(falls) < enough || th.Signal.disk(layout) == "" {
			continue
		}
		latest := t[th.Signal][len(t[th.Signal])-1]
		age := max(0, now.Sub(latest.At))
		if age > trendFor || !o.Time.IsZero() && !o.Time.Equal(latest.At) || o.Available != latest.Available {
			continue
		}
		last := falls[len(falls)-1]
		slices.Sort(falls)
		if in := max(0, until(th, o, min(last, falls[(len(falls)-1)/2]))-age); in <= horizon {
			out = append(out, Coming{Threshold: th, In: in, Reclaim: c.Options.reclaim(th.Signal, layout)})
		}
	}
	slices.SortStableFunc(out, func(a, b Coming) int {
		return cmp.Or(cmp.Compare(a.In, b.In), compareThresholds(a.Threshold, b.Threshold))
	})
	return out
}
