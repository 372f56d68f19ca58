package engine

import (
	"slices"
	"time"
)

// Input is what one pass sees.
type Input struct {
	// Now is when the pass takes place.
	Now time.Time
	// Layout is how filesystems are shared; nil if that could not be told. It
	// is looked at only while State has none (LAY-8).
	Layout *Detected
	// Pods are the active ones, Pending and terminating ones included (SYN-4).
	Pods []Pod
	// Summary is what was measured; nil if anything of it failed (OBS-7).
	Summary *Summary
	// Unattributed is what is used and belongs to nobody who is known, for the
	// option HoldFire; a signal that is missing is not known.
	Unattributed []Unattributed `json:",omitempty"`
}

// Sync is one pass of the eviction loop: what to remember and what to do.
func (c Config) Sync(s State, in Input) (State, Decision) {
	if len(c.Thresholds) == 0 && !c.LimitIsolation {
		return s, Decision{Outcome: Off, Rule: "SYN-2"}
	}
	var d Decision
	detectedNow := s.Layout == nil
	if detectedNow || c.Options.FollowLayout {
		if in.Layout == nil {
			return s, Decision{Outcome: LayoutUnknown, Rule: "LAY-8"}
		}
		layout := *in.Layout
		layout.Refused = c.NoSeparateDiskGC && layout.ContainerApart
		if s.Layout != nil && c.Options.layout(layout) != c.Options.layout(*s.Layout) {
			detectedNow = true
			s.Met = withoutContainerFS(s.Met)
		}
		s.Layout = &layout
		if layout.Refused {
			return s, Decision{Outcome: Refused, Rule: "LAY-14"}
		}
		if detectedNow {
			_, d.Overwritten = WithContainerFS(c.Thresholds, c.Options.layout(layout))
		}
	}
	if in.Summary == nil {
		d.Outcome, d.Rule = Blind, "OBS-7"
		return s, d
	}
	seen := c.Options.believed(in.Summary.Observe())
	last := s.Observed
	s = c.watch(s, seen, c.effective(*s.Layout, detectedNow), in.Now)
	for _, t := range s.acting() {
		if o, ok := seen[t.Signal]; ok && o.fresh(last, t.Signal) { // SYN-16
			d.Due = append(d.Due, t)
		}
	}

	s = c.remember(s, seen, in)
	stats := c.Options.credible(in.Summary)
	if c.LimitIsolation {
		d.Limits, d.Barred = c.withinBounds(s, c.overLimit(*s.Layout, in.Pods, stats), in.Now)
		if len(d.Limits) > 0 {
			d.Outcome, d.Rule = OverLimit, "SYN-18"
			return s, d
		}
	}
	if len(d.Due) == 0 {
		d.Outcome, d.Rule = Calm, "SYN-19"
		return s, c.foresee(d, s, seen, last, in.Now)
	}
	d.Choices = c.Options.choices(d.Due, seen)
	if len(d.Choices) == 0 {
		d.Outcome, d.Rule = Calm, "DisksOnly"
		return s, c.foresee(d, s, seen, last, in.Now)
	}
	first := c.relieve(d, s, in, stats, seen, d.Choices[0])
	if !c.Options.MostUrgentFirst || first.Victim != nil {
		return s, first
	}
	layout := c.Options.layout(*s.Layout)
	before := first
	for _, t := range byUrgency(d.Due, seen) {
		if t.Signal.disk(layout) == "" || together(t.Signal, first.Threshold.Signal, layout) {
			continue
		}
		d.Choices = []Threshold{t}
		other := c.relieve(d, s, in, stats, seen, t)
		other.Reclaim, other.NeedBytes = both(before, other)
		if other.Victim != nil {
			return s, other
		}
		before = other
	}
	return s, first
}

// Elsewhere is a config and a state for what is short on other filesystems than
// that of d's threshold, to reclaim there in the same pass: nothing is decided
// about d's. ok is false if nothing else is short.
func (c Config) Elsewhere(s State, d Decision) (_ Config, _ State, ok bool) {
	if s.Layout == nil || d.Outcome != Pressure {
		return c, s, false
	}
	layout := c.Options.layout(*s.Layout)
	same := func(t Threshold) bool {
		return t.Signal.disk(layout) == "" || together(t.Signal, d.Threshold.Signal, layout)
	}
	for _, t := range d.Due {
		ok = ok || !same(t)
	}
	c.Thresholds = slices.DeleteFunc(slices.Clone(c.Thresholds), same)
	s.Met = slices.DeleteFunc(slices.Clone(s.Met), func(m MetThreshold) bool { return same(m.Threshold) })
	return c, s, ok && len(c.Thresholds) > 0
}

// both is the reclaim of a decision that nobody goes for, then that of the next
// one: a victim elsewhere must not displace what is more urgent. Each kind is
// done once, and as much of it as either needs; without a need, all.
func both(before, next Decision) (list []Reclaim, needBytes *int64) {
	list = slices.Clone(before.Reclaim)
	for _, r := range next.Reclaim {
		if !slices.Contains(list, r) {
			list = append(list, r)
		}
	}
	switch {
	case len(before.Reclaim) == 0:
		return list, next.NeedBytes
	case len(next.Reclaim) == 0:
		return list, before.NeedBytes
	case before.NeedBytes == nil || next.NeedBytes == nil:
		return list, nil
	}
	most := max(*before.NeedBytes, *next.NeedBytes)
	return list, &most
}

// watch moves the state on by what was seen (SYN-7 … SYN-15).
func (c Config) watch(s State, seen Observations, thresholds []Threshold, now time.Time) State {
	next := State{
		Layout: s.Layout, Trend: s.Trend, Growth: s.Growth, Gone: s.Gone, Freed: s.Freed,
		ConditionSeen: make(map[Condition]time.Time, len(conditions)),
		Observed:      make(map[Signal]time.Time, len(seen)),
	}
	below := merge(met(thresholds, seen, false), met(s.acting(), seen, true))
	for _, t := range below {
		since := s.since(t, now)
		next.Met = append(next.Met, MetThreshold{Threshold: t, Since: since, Acting: now.Sub(since) >= t.Grace})
	}
	slices.SortStableFunc(next.Met, func(a, b MetThreshold) int { return compareThresholds(a.Threshold, b.Threshold) })

	for condition, at := range s.ConditionSeen {
		next.ConditionSeen[condition] = at
	}
	for _, t := range below {
		next.ConditionSeen[t.Signal.Condition()] = now // SYN-11: grace does not matter here
	}
	for _, condition := range conditions {
		if at, ok := next.ConditionSeen[condition]; ok && now.Sub(at) < c.TransitionPeriod {
			next.Conditions = append(next.Conditions, condition)
		}
	}
	for signal, o := range seen {
		next.Observed[signal] = o.Time
	}
	if !c.Options.DoubtImpossible {
		return next
	}
	for signal, at := range s.Observed { // what was seen once is no news later, whatever came between
		if at.After(now) { // the clock was set back: what is measured from now on is news
			at = now
		}
		if next.Observed[signal].Before(at) {
			next.Observed[signal] = at
		}
	}
	return next
}

// relieve plans against one of the thresholds that are due.
func (c Config) relieve(d Decision, s State, in Input, stats podStats, seen Observations, t Threshold) Decision {
	layout := c.Options.layout(*s.Layout)
	d.Outcome, d.Rule, d.Threshold = Pressure, "SYN-21", t
	d.Reclaim = c.Options.reclaim(t.Signal, layout)
	d.NeedBytes = c.need(d.Due, t, layout, seen)
	if !ranked(t.Signal, layout) || len(in.Pods) == 0 {
		d.NoVictim = "SYN-24"
		return d
	}
	d.Ranking = c.Options.rank(t.Signal, layout, in.Pods, stats)
	d.Hold = c.hold(s, in, t, layout, seen)
	low := c.belowFloor(t, *s.Layout, seen)
	if late(s, d, in.Now) {
		d.Hold.Late = true
	}
	if d.Hold != nil && (d.Hold.Holds || d.Hold.Late) && !low {
		d.NoVictim = "HoldFire"
		return d
	}
	if d.AwaitedBytes = c.awaited(s, t, layout, seen, in.Now); d.AwaitedBytes > 0 {
		d.NoVictim = "AwaitFreed"
		return d
	}
	short := c.short(t, seen[t.Signal])
	for i := range d.Ranking {
		r := &d.Ranking[i]
		helps := r.Usage.Sign() > 0
		if r.Critical || c.Options.OnlyWhoHelps && !helps || d.Victim != nil && !helps {
			continue
		}
		if bar := c.barred(s, r.pod, in.Now); bar != nil && d.Victim == nil {
			d.Barred = append(d.Barred, *bar)
			if d.NoVictim = "BreakStorms"; low && !bar.Node {
				continue
			}
			return d
		} else if bar != nil {
			continue
		}
		e := c.evict(r.pod, t, stats[r.UID], seen[t.Signal])
		if d.Victim == nil {
			d.Victim, d.NoVictim = e, ""
		} else {
			d.Further = append(d.Further, *e)
		}
		if helps {
			short.Sub(r.Usage)
		}
		if !c.Options.Batch || short.Sign() <= 0 {
			return d
		}
		s = s.Evicted(*e, in.Now) // for the bounds it has gone
	}
	if d.Victim == nil && d.NoVictim == "" {
		d.NoVictim = "SYN-28"
		if slices.ContainsFunc(d.Ranking, func(r Ranked) bool { return !r.Critical }) {
			d.NoVictim = "OnlyWhoHelps"
		}
	}
	return d
}

// Alternatives are the decisions that the kubelet could have come to instead
// of d, d itself among them: one for each of its Choices. s and in are the
// state that Sync returned with d and the input that it was given.
func (c Config) Alternatives(s State, in Input, d Decision) []Decision {
	switch len(d.Choices) {
	case 0:
		return nil
	case 1:
		return []Decision{d}
	}
	stats, seen := c.Options.credible(in.Summary), c.Options.believed(in.Summary.Observe())
	out := make([]Decision, len(d.Choices))
	for i, t := range d.Choices {
		out[i] = c.relieve(Decision{Overwritten: d.Overwritten, Due: d.Due, Choices: d.Choices}, s, in, stats, seen, t)
	}
	return out
}

// EvictionOf is how another pod of d's ranking would be evicted: when Victim
// has ended by itself, or when the kubelet took another pod of its group. It
// is nil for a pod that is not in the ranking or never goes.
func (c Config) EvictionOf(in Input, d Decision, uid string) *Eviction {
	for i := range d.Ranking {
		if r := &d.Ranking[i]; r.UID == uid && !r.Critical {
			return c.evict(r.pod, d.Threshold, in.Summary.podStats()[uid], in.Summary.Observe()[d.Threshold.Signal])
		}
	}
	return nil
}

// evict says why pod goes for t, when o was seen of the node and st of the pod.
func (c Config) evict(pod *Pod, t Threshold, st *PodStats, o Observation) *Eviction {
	e := &Eviction{
		UID: pod.UID, Namespace: pod.Namespace, Name: pod.Name, Owner: pod.Owner,
		Cause: Cause(t.Signal), GraceSeconds: 1,
		Limit: t.Value.Of(o.Capacity), Available: o.Available,
		Disrupts: true,
	}
	if !t.Hard() { // SYN-29
		e.GraceSeconds = c.MaxPodGraceSeconds
		if pod.GraceSeconds != nil {
			e.GraceSeconds = min(e.GraceSeconds, *pod.GraceSeconds)
		}
	}
	if st != nil {
		e.Explained = true
		e.PodOffends, e.Offenders = offenders(pod, st, t.Signal.Resource())
	}
	return e
}
