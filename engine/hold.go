package engine

import (
	"cmp"
	"maps"
	"slices"
	"time"
)

// Unattributed is what is used on a filesystem and belongs to nobody who is
// known: neither a pod nor an image.
type Unattributed struct {
	// Signal of the filesystem's bytes.
	Signal Signal
	Bytes  int64
	// Who may have it, as far as anybody knows; most bytes first.
	Who []Suspect `json:",omitempty"`
}

// Suspect is somebody outside all pods who has bytes on a filesystem.
type Suspect struct {
	Name  string
	Bytes int64
}

// GrowthSample is what was used and what of it was nobody's.
type GrowthSample struct {
	At                           time.Time
	AvailableBytes, NobodysBytes int64
}

// Hold says what the option HoldFire found on the filesystem under pressure.
type Hold struct {
	// Holds says that more of the growth is nobody's than Config.HoldShare.
	Holds bool
	// Since is from when on growth counts: some minutes before the pressure.
	Since time.Time
	// GrewBytes is by how much less is available, NobodysBytes what of it is
	// nobody's.
	GrewBytes, NobodysBytes int64
	// Late says that the bytes that are nobody's are more than the first pod is
	// ahead of the second, in the first moments of the pressure: accounts of who
	// wrote what are a second behind, and they may be the second one's.
	Late bool `json:",omitempty"`
	// Who is on the filesystem outside all pods.
	Who []Suspect `json:",omitempty"`
}

// accountsLate is for how long accounts may be behind what a filesystem shows:
// three looks of the index at what is being written to.
const accountsLate = 3 * time.Second

// How much of what is nobody's is remembered: about five minutes.
const (
	growthSamples = 10
	growthApart   = 30 * time.Second
)

// remember keeps what the options need later. While a threshold is met, growth
// is not sampled: what counts is what grew before and since.
func (c Config) remember(s State, seen Observations, in Input) State {
	if c.Options.Forecast {
		s.Trend = s.Trend.Add(seen, in.Now)
	}
	if c.Options.BreakStorms {
		s.Gone = recent(s.Gone, in.Now)
	}
	if c.Options.AwaitFreed {
		s.Freed = c.notArrived(s, c.Options.layout(*s.Layout), seen, in.Now)
	}
	if !c.Options.HoldFire || len(in.Unattributed) == 0 {
		return s
	}
	next := maps.Clone(s.Growth)
	if next == nil {
		next = map[Signal][]GrowthSample{}
	}
	for _, u := range inOrder(in.Unattributed) {
		o, ok := seen[u.Signal]
		pressed := slices.ContainsFunc(s.Met, func(m MetThreshold) bool { return m.Threshold.Signal == u.Signal })
		list := next[u.Signal]
		if len(list) > 0 && in.Now.Before(list[len(list)-1].At) {
			list = nil // the clock was set back
		}
		if !ok || pressed && len(list) > 0 || len(list) > 0 && in.Now.Sub(list[len(list)-1].At) < growthApart {
			next[u.Signal] = list
			continue
		}
		sample := GrowthSample{At: in.Now, AvailableBytes: o.Available, NobodysBytes: u.Bytes}
		next[u.Signal] = append(slices.Clone(list[max(0, len(list)+1-growthSamples):]), sample)
	}
	s.Growth = next
	return s
}

// hold looks at whose growth it is; nil if that is not known. Inodes have no
// owners outside pods that anybody counts.
func (c Config) hold(s State, in Input, t Threshold, layout Layout, seen Observations) *Hold {
	if !c.Options.HoldFire || t.Signal.Resource() != EphemeralStorage {
		return nil
	}
	for _, u := range inOrder(in.Unattributed) {
		list := s.Growth[u.Signal]
		o, ok := seen[u.Signal]
		if !ok || len(list) == 0 || !together(u.Signal, t.Signal, layout) {
			continue
		}
		base := list[0]
		h := &Hold{Since: base.At, GrewBytes: base.AvailableBytes - o.Available, NobodysBytes: u.Bytes - base.NobodysBytes, Who: u.Who}
		// If nothing grew on the whole, pods gave more than others took.
		h.Holds = h.NobodysBytes > 0 && float64(h.NobodysBytes) > or(c.HoldShare, 0.5)*max(0, float64(h.GrewBytes))
		return h
	}
	return nil
}

// late says whether the pod that would go first may be the wrong one, because
// what was written last is nobody's yet. It is only said of pods between which
// bytes decide, and only until accounts must have caught up.
func late(s State, d Decision, now time.Time) bool {
	if d.Hold == nil {
		return false
	}
	met := slices.IndexFunc(s.Met, func(m MetThreshold) bool { return m.Threshold.Signal == d.Threshold.Signal })
	if met < 0 || now.Sub(s.Met[met].Since) >= accountsLate || now.Before(s.Met[met].Since) {
		return false
	}
	var first *Ranked
	for i := range d.Ranking {
		r := &d.Ranking[i]
		switch {
		case r.Critical:
			continue
		case first == nil:
			first = r
			continue
		}
		return first.Measured == r.Measured && first.Exceeds == r.Exceeds && first.Priority == r.Priority &&
			d.Hold.NobodysBytes > first.Over.Value()-r.Over.Value()
	}
	return false
}

// OnlyLate says that accounts that are late are all that holds fire: in a
// moment they will have caught up.
func (h *Hold) OnlyLate() bool { return h != nil && h.Late && !h.Holds }

// inOrder is list by signal, most bytes first: which of several counts for a
// filesystem must not depend on the order in which somebody lists them.
func inOrder(list []Unattributed) []Unattributed {
	return slices.SortedStableFunc(slices.Values(list), func(a, b Unattributed) int {
		return cmp.Or(cmp.Compare(a.Signal.rank(), b.Signal.rank()), cmp.Compare(b.Bytes, a.Bytes))
	})
}

// belowFloor says whether so little is left that nothing is held any more: less
// than Config.HoldFloor of the hard threshold of the signal, or of t if there
// is none.
func (c Config) belowFloor(t Threshold, detected Detected, seen Observations) bool {
	o, ok := seen[t.Signal]
	if !ok {
		return false
	}
	for _, other := range c.all(detected) {
		if other.Signal == t.Signal && other.Hard() && !other.Inert {
			t = other
		}
	}
	line := t.Value.Of(o.Capacity)
	return float64(o.Available) < or(c.HoldFloor, 0.5)*line.AsApproximateFloat64()
}
