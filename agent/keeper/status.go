package keeper

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/record"
)

// Status is what a keeper did last, for people and metrics. It is not changed once it is given out.
type Status struct {
	// LookedAt is when the last pass took place, nil before the first.
	LookedAt *time.Time `json:"lookedAt,omitempty"`
	// Outcome, Rule and Threshold say how it ended.
	Outcome   engine.Outcome `json:"outcome,omitempty"`
	Rule      string         `json:"rule,omitempty"`
	Threshold string         `json:"threshold,omitempty"`
	// Thresholds are those that count at the moment, for people.
	Thresholds []string `json:"thresholds,omitempty"`
	// Overlaps are thresholds by which nobody is evicted, because the kubelet's lie as high.
	Overlaps []string `json:"overlaps,omitempty"`
	// Missing are signals for which there is no threshold at the moment.
	Missing []engine.Signal `json:"missing,omitempty"`
	// Leaving are the pods that are on their way out.
	Leaving []string `json:"leaving,omitempty"`
	// Held says why nobody is evicted although space is short: a reclaim that is not done; empty if that is not so.
	Held string `json:"held,omitempty"`
	// Problem says why nothing could be decided; empty if something was.
	Problem string `json:"problem,omitempty"`
	// Notes are the last things that did not free what was expected, with who holds it as far as that is known; newest last.
	Notes []Note `json:"notes,omitempty"`
	// Coming are the hard thresholds that will be met within a day at the present speed, soonest first.
	Coming []engine.Coming `json:"coming,omitempty"`
	// Counts since the start.
	Counts Counts `json:"counts"`
	// Last is the last pass in which something was done or decided anew; nil before that.
	Last *record.Record `json:"-"`
}

// keptNotes is how many notes a status has.
const keptNotes = 3

// Note is what came to light about something that was deleted.
type Note struct {
	At   time.Time      `json:"at"`
	Kind engine.Reclaim `json:"kind"`
	ID   string         `json:"id"`
	Text string         `json:"text"`
}

// noted is s with what came to light in a step. What others wrote meanwhile is no news.
func (s Status) noted(step record.Step) Status {
	for _, i := range step.Items {
		if i.Note != "" && !i.OthersWrote {
			s.Notes = append(slices.Clone(s.Notes[max(0, len(s.Notes)+1-keptNotes):]), Note{At: time.Now(), Kind: step.Kind, ID: i.ID, Text: i.Note})
		}
	}
	return s
}

// Counts count what a keeper did.
type Counts struct {
	Passes, Acted, Deleted, Evicted int64
	ExpectedBytes, GainedBytes      int64
	// EvictionsFailed counts pods that were told to go and stay.
	EvictionsFailed int64
	// Outcomes count passes by what they came to, Causes pods that were told to go by why. Neither is changed once it is given out.
	Outcomes map[engine.Outcome]int64
	Causes   map[engine.Cause]int64
	// Rules count deletions by kind and rule, in that order; the same holds for it.
	Rules []RuleCount
}

// RuleCount counts what was deleted of one kind by one rule.
type RuleCount struct {
	Kind engine.Reclaim
	Rule string
	// Failed are still there.
	Deleted, Failed            int64
	ExpectedBytes, GainedBytes int64
}

// add counts what came of a step.
func (c *Counts) add(step record.Step) {
	for _, i := range step.Items {
		if i.ActualBytes == nil && i.Error == "" {
			continue
		}
		rule := c.rule(step.Kind, i.Rule)
		if i.Error != "" {
			rule.Failed++
		}
		if i.ActualBytes == nil {
			continue
		}
		c.Deleted++
		rule.Deleted++
		c.GainedBytes += *i.ActualBytes
		rule.GainedBytes += max(0, *i.ActualBytes)
		if i.ExpectedBytes != nil {
			c.ExpectedBytes += *i.ExpectedBytes
			rule.ExpectedBytes += *i.ExpectedBytes
		}
	}
}

// rule is the count of a kind and rule, in a list that nobody else has.
func (c *Counts) rule(kind engine.Reclaim, rule string) *RuleCount {
	c.Rules = slices.Clone(c.Rules)
	at, there := slices.BinarySearchFunc(c.Rules, RuleCount{Kind: kind, Rule: rule}, func(a, b RuleCount) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Rule, b.Rule))
	})
	if !there {
		c.Rules = slices.Insert(c.Rules, at, RuleCount{Kind: kind, Rule: rule})
	}
	return &c.Rules[at]
}

// plus is a map of counts with one more.
func plus[K comparable](m map[K]int64, key K) map[K]int64 {
	m = maps.Clone(m)
	if m == nil {
		m = map[K]int64{}
	}
	m[key]++
	return m
}

// forecastFor is how far ahead it is told what will be short.
const forecastFor = 24 * time.Hour

// causeOf is why a pod goes.
func causeOf(d engine.Decision, uid string) engine.Cause {
	for _, e := range slices.Concat(d.Limits, d.Further) {
		if e.UID == uid {
			return e.Cause
		}
	}
	if d.Victim != nil && d.Victim.UID == uid {
		return d.Victim.Cause
	}
	return engine.Cause(d.Threshold.Signal)
}

// tidied counts, tells and records what came of a collection. asked says that somebody asked for it.
func (k *Keeper) tidied(c Collector, step record.Step, asked bool) {
	if len(step.Items) > 0 && k.parts.Record != nil {
		k.parts.Record(record.Record{
			Format: record.Format, Engine: engine.Version, Decider: k.parts.Decider, Input: engine.Input{Now: time.Now()},
			Steps: []record.Step{step}, Collection: &record.Collection{Name: c.Name(), Asked: asked},
		}, gone(step))
	}
	var n Counts
	n.add(step)
	if n.Deleted == 0 {
		return
	}
	k.parts.Log.Info("tidied up", zap.String("what", c.Name()), zap.Int64("deleted", n.Deleted), zap.Int64("bytes", n.GainedBytes))
	k.mu.Lock()
	defer k.mu.Unlock()
	k.status.Counts.add(step)
	k.status = k.status.noted(step)
}

// besides counts and records what came of a reclaim on another filesystem than the one that a pass is about.
func (k *Keeper) besides(r record.Record, acted bool) {
	if acted && k.parts.Record != nil {
		k.parts.Record(r, acted)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, step := range r.Steps {
		k.status.Counts.add(step)
		k.status = k.status.noted(step)
	}
	if acted {
		k.status.Counts.Acted++
	}
}

// Status gives what is known now. It does not block.
func (k *Keeper) Status() Status {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.status
}

// blind notes that nothing could be decided.
func (k *Keeper) blind(err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.status.Problem != err.Error() {
		k.parts.Log.Warn("nothing is decided about the disks", zap.Error(err))
	}
	k.status.Problem = err.Error()
	k.last = nil
}

// IfShort says for each filesystem who would go first if it were short and nothing could be reclaimed, by what the last pass saw: records
// of decisions that nobody made. There are none before a pass, and while nothing can be decided. It does not block.
func (k *Keeper) IfShort() (out []record.Record) {
	k.mu.Lock()
	last := k.last
	k.mu.Unlock()
	if last == nil {
		return nil
	}
	for _, d := range last.Config.IfShort(last.Next, last.Input) {
		r := *last
		r.Decision = d
		out = append(out, r)
	}
	return out
}

// note keeps what a pass came to, and records it if it is news.
func (k *Keeper) note(setup Setup, in engine.Input, r record.Record, acted bool) {
	d := r.Decision
	said := fmt.Sprint(d.Outcome, d.Rule, d.Threshold, d.NoVictim, r.Verdict != nil && r.Verdict.Resolved)
	news := acted || said != k.said && (k.said != "" || d.Outcome != engine.Calm)
	k.said = said
	if news && k.parts.Record != nil {
		k.parts.Record(r, acted)
	}

	k.mu.Lock()
	defer k.mu.Unlock()
	s := k.status
	if s.Problem != "" {
		k.parts.Log.Info("the disks are looked after again")
	}
	s.LookedAt, s.Outcome, s.Rule, s.Threshold, s.Problem = &in.Now, d.Outcome, d.Rule, "", ""
	if d.Outcome == engine.Pressure || d.Outcome == engine.Foreseen {
		s.Threshold = d.Threshold.String()
	}
	s.Thresholds, s.Overlaps, s.Missing, s.Leaving, s.Held = nil, nil, setup.Missing, nil, k.held
	for _, t := range setup.Config.Thresholds {
		s.Thresholds = append(s.Thresholds, t.String())
	}
	for _, o := range setup.Overlaps {
		s.Overlaps = append(s.Overlaps, o.String())
	}
	for uid := range k.leaving {
		s.Leaving = append(s.Leaving, uid)
	}
	s.Coming = nil
	if in.Summary != nil {
		s.Coming = setup.Config.Coming(k.state.Trend, k.state, in.Summary.Observe(), in.Now, forecastFor)
	}
	s.Counts.Passes++
	s.Counts.Outcomes = plus(s.Counts.Outcomes, d.Outcome)
	s.Counts.Evicted += int64(len(r.Evicted))
	for _, e := range r.Evicted {
		s.Counts.Causes = plus(s.Counts.Causes, causeOf(d, e.UID))
	}
	for _, step := range r.Steps {
		s.Counts.add(step)
		s = s.noted(step)
	}
	if acted {
		s.Counts.Acted++
	}
	if news {
		s.Last = &r
	}
	k.status = s
	k.last = &record.Record{Format: record.Format, Engine: engine.Version, Decider: k.parts.Decider, Config: setup.Config, Input: in, Next: k.state}
}
