package play

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/record"
	"github.com/cleave-cri/cleave/engine/sim"
	"github.com/cleave-cri/cleave/lab/scenario"
	"github.com/cleave-cri/cleave/simulate"
)

// facts are what came of a scenario on a real node.
type facts struct {
	// result is what the simulator would call it.
	result *sim.Result
	// Of what no simulator can tell.
	layout       string
	deadRemoved  int
	unattributed map[string]int64
	openDeleted  map[string]int64
	logs         map[string]int64
	running      map[string]bool
	said         map[string]bool
}

// check says what of the facts is not as expected. Of a cleave that only observes
// nothing is expected but that nothing goes.
func (f *facts) check(s *scenario.Scenario, observes bool) []string {
	var out []string
	fault := func(format string, args ...any) { out = append(out, fmt.Sprintf(format, args...)) }
	if observes {
		none := []string{}
		out = simulate.Check(scenario.Expect{Evicted: &none, ImagesRemoved: &none}, f.result)
		if f.deadRemoved > 0 {
			fault("%d dead containers are removed, and it only observes", f.deadRemoved)
		}
	} else {
		out = simulate.Check(s.Expect[string(f.result.Profile)], f.result)
	}
	l := s.Lab
	if l == nil {
		return out
	}
	if l.Layout != "" && f.layout != l.Layout {
		fault("the layout is %q, expected %s", f.layout, l.Layout)
	}
	if l.DeadRemovedAtLeast != nil && !observes && f.deadRemoved < *l.DeadRemovedAtLeast {
		fault("%d dead containers are removed, expected at least %d", f.deadRemoved, *l.DeadRemovedAtLeast)
	}
	for _, name := range slices.Sorted(maps.Keys(l.UnattributedAtLeast)) {
		if have := f.unattributed[name]; have < l.UnattributedAtLeast[name] {
			fault("cleave said of %s at most that %d bytes are nobody's, expected at least %d", name, have, l.UnattributedAtLeast[name])
		}
	}
	for _, name := range slices.Sorted(maps.Keys(l.OpenDeletedAtLeast)) {
		if have := f.openDeleted[name]; have < l.OpenDeletedAtLeast[name] {
			fault("cleave said of %s at most that it holds %d bytes in deleted files, expected at least %d", name, have, l.OpenDeletedAtLeast[name])
		}
	}
	for _, name := range slices.Sorted(maps.Keys(l.LogsAtMost)) {
		if have := f.logs[name]; have > l.LogsAtMost[name] {
			fault("the logs of %s take %d bytes at the end, expected at most %d", name, have, l.LogsAtMost[name])
		}
	}
	for _, name := range l.Running {
		if !f.running[name] {
			fault("%s does not run at the end", name)
		}
	}
	for _, text := range l.Says {
		if !f.said[text] {
			fault("`cleave status` never said %q", text)
		}
	}
	return out
}

// Against says where a real node and the simulator disagree on who was evicted and
// which images went.
func Against(lab, simulated *sim.Result) []string {
	var out []string
	for _, c := range []struct {
		what     string
		lab, sim []string
	}{
		{"evicted", lab.Evicted, simulated.Evicted},
		{"images removed", lab.ImagesRemoved, simulated.ImagesRemoved},
	} {
		a, b := set(c.lab), set(c.sim)
		if !slices.Equal(a, b) {
			out = append(out, fmt.Sprintf("%s: %s on the real node, %s in the simulator", c.what, listed(a), listed(b)))
		}
	}
	return out
}

func set(list []string) []string { return slices.Compact(slices.Sorted(slices.Values(list))) }

func listed(list []string) string {
	if len(list) == 0 {
		return "none"
	}
	return strings.Join(list, ", ")
}

// tell makes the simulator's events of records, as far as somebody expects anything
// of them: thresholds that became due, and what held evictions back. nameOf gives a
// pod's name by its UID. at is when the scenario began.
func tell(records []record.Record, began time.Time, nameOf func(uid string) string) (events []sim.Event, evicted []string, dead int) {
	said, held := "", ""
	for _, r := range records {
		d, at := r.Decision, r.Input.Now.Sub(began)
		event := func(e sim.Event) {
			e.At, e.By = at, "cleave"
			events = append(events, e)
		}
		now := ""
		if d.Outcome == engine.Pressure {
			now = d.Threshold.String()
		}
		if now != said && now != "" {
			event(sim.Event{What: sim.ThresholdDue, Subject: string(d.Threshold.Signal), Rule: d.Rule})
		}
		if d.Outcome == engine.Pressure || d.Outcome == engine.Calm {
			said = now
		}
		for _, step := range r.Steps {
			for _, item := range step.Items {
				if item.ActualBytes == nil {
					continue
				}
				switch step.Kind {
				case engine.DeadContainers:
					dead++
					event(sim.Event{What: sim.DeadRemoved, Subject: item.ID, Bytes: *item.ActualBytes, Rule: item.Rule})
				case engine.UnusedImages:
					event(sim.Event{What: sim.ImageRemoved, Subject: item.ID, Bytes: *item.ActualBytes, Rule: item.Rule})
				case engine.OldLogs:
					event(sim.Event{What: sim.LogRemoved, Subject: item.ID, Bytes: *item.ActualBytes, Rule: item.Rule})
				}
			}
		}
		rule := ""
		switch {
		case d.NoVictim == "HoldFire":
			rule = d.NoVictim
		case len(d.Barred) > 0 && d.Victim == nil && len(d.Limits) == 0:
			rule = "BreakStorms"
		}
		if rule != "" && rule != held {
			event(sim.Event{What: sim.HeldBack, Rule: rule})
		}
		if rule != "" || d.Outcome == engine.Calm {
			held = rule
		}
		for _, e := range r.Evicted {
			name := nameOf(e.UID)
			evicted = append(evicted, name)
			cause := d.Threshold.String()
			if d.Outcome == engine.OverLimit {
				cause = "a limit of its own"
			}
			event(sim.Event{What: sim.PodEvicted, Subject: name, Detail: cause, Rule: d.Rule})
		}
	}
	return events, evicted, dead
}
