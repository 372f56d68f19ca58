package simulate

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/cleave-cri/cleave/agent/page"
	"github.com/cleave-cri/cleave/engine/record"
	"github.com/cleave-cri/cleave/engine/sim"
	"github.com/cleave-cri/cleave/lab/scenario"
)

// Options are how a scenario is played and shown.
type Options struct {
	// Profile is kubelet or cleave.
	Profile string
	// Compare plays both profiles and shows the difference.
	Compare bool
	// JSON shows results as JSON.
	JSON bool
	// Record, if not nil, gets the records of what was decided.
	Record io.Writer
}

// ErrUnexpected says that something came out otherwise than the scenario
// expects; what is on the page.
var ErrUnexpected = errors.New("not as the scenario expects")

// Outcome is one run and what of it was not expected.
type Outcome struct {
	Result *sim.Result
	// Expected says that the scenario expects anything of this profile.
	Expected   bool
	Unexpected []string `json:",omitempty"`
}

// Play plays a scenario under a profile.
func Play(s *scenario.Scenario, profile sim.Profile) (Outcome, error) {
	result, err := sim.PlayRecorded(World(s), profile)
	if err != nil {
		return Outcome{}, err
	}
	expect, ok := s.Expect[string(profile)]
	return Outcome{Result: result, Expected: ok, Unexpected: Check(expect, result)}, nil
}

// Run plays a scenario file and shows what came of it. The error is
// ErrUnexpected if it is not what the file expects.
func Run(w io.Writer, file string, o Options) error {
	profiles := []sim.Profile{sim.Profile(o.Profile)}
	switch {
	case o.Compare:
		profiles = []sim.Profile{sim.KubeletProfile, sim.CleaveProfile}
	case o.Profile != string(sim.KubeletProfile) && o.Profile != string(sim.CleaveProfile):
		return fmt.Errorf("--profile %q: choose kubelet or cleave", o.Profile)
	}
	s, err := scenario.Load(file)
	if err != nil {
		return err
	}
	var outcomes []Outcome
	for _, profile := range profiles {
		outcome, err := Play(s, profile)
		if err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		outcomes = append(outcomes, outcome)
	}
	if o.Record != nil {
		if err := writeRecords(o.Record, outcomes); err != nil {
			return err
		}
	}
	out := page.NewWriter(w)
	switch {
	case o.JSON:
		encoder := json.NewEncoder(out)
		encoder.SetIndent("", "  ")
		if err := encoder.Encode(outcomes); err != nil {
			return fmt.Errorf("show results: %w", err)
		}
	case o.Compare:
		writeComparison(out, s, outcomes)
	default:
		writeTimeline(out, s, outcomes[0])
	}
	if err := out.Err(); err != nil {
		return err
	}
	for _, outcome := range outcomes {
		if len(outcome.Unexpected) > 0 {
			return fmt.Errorf("%s under the %s profile: %w: %s", file, outcome.Result.Profile, ErrUnexpected, strings.Join(outcome.Unexpected, "; "))
		}
	}
	return nil
}

func writeRecords(w io.Writer, outcomes []Outcome) error {
	var line []byte
	for _, o := range outcomes {
		for _, r := range o.Result.Records {
			var err error
			if line, err = record.Append(line[:0], r); err != nil {
				return err
			}
			if _, err := w.Write(line); err != nil {
				return fmt.Errorf("write records: %w", err)
			}
		}
	}
	return nil
}

// mostLines is how much of a timeline is shown.
const mostLines = 80

func writeTimeline(w *page.Writer, s *scenario.Scenario, o Outcome) {
	r := o.Result
	w.Printf("%s\n%s under the %s profile\n\n", page.Name(s.Title), s.Lasts, r.Profile)
	lines := timeline(r.Events)
	for i, l := range lines {
		if i == mostLines {
			w.Printf("%10s  %d more; --json has all\n", "…", len(lines)-i)
			break
		}
		w.Printf("%10s  %-8s %s\n", l.at, l.by, l.text)
	}
	if len(lines) == 0 {
		w.Printf("nothing happens\n")
	}
	w.Printf("\n")
	for _, f := range facts(r) {
		w.Printf("%-28s %s\n", f.name, f.value)
	}
	writeExpectations(w, []Outcome{o})
}

func writeExpectations(w *page.Writer, outcomes []Outcome) {
	for _, o := range outcomes {
		switch {
		case len(o.Unexpected) > 0:
			for _, line := range o.Unexpected {
				w.Printf("\nNOT AS EXPECTED (%s): %s\n", o.Result.Profile, line)
			}
		case o.Expected:
			w.Printf("\nas expected (%s)\n", o.Result.Profile)
		}
	}
}

// writeComparison shows where both profiles come to something else.
func writeComparison(w *page.Writer, s *scenario.Scenario, outcomes []Outcome) {
	w.Printf("%s\n\n", page.Name(s.Title))
	a, b := facts(outcomes[0].Result), facts(outcomes[1].Result)
	names := make([]string, 0, len(a))
	for _, f := range slices.Concat(a, b) {
		if !slices.Contains(names, f.name) {
			names = append(names, f.name)
		}
	}
	value := func(list []fact, name string) string {
		for _, f := range list {
			if f.name == name {
				return f.value
			}
		}
		return "-"
	}
	width := len("kubelet")
	for _, name := range names {
		width = max(width, len([]rune(value(a, name))))
	}
	width = min(width, 44)
	w.Printf("  %-28s %-*s %s\n", "", width, "kubelet", "cleave")
	for _, name := range names {
		mark := " "
		if value(a, name) != value(b, name) {
			mark = "*"
		}
		w.Printf("%s %-28s %-*s %s\n", mark, name, width, value(a, name), value(b, name))
	}
	writeExpectations(w, outcomes)
}

type fact struct{ name, value string }

// facts are what came of a run.
func facts(r *sim.Result) []fact {
	rejected, due := 0, 0
	var out []fact
	for _, e := range r.Events {
		if e.What == sim.ThresholdDue {
			due++
		}
	}
	for _, p := range r.Pods {
		rejected += p.Rejections
	}
	out = append(out, fact{"evicted", counted(r.Evicted)}, fact{"images removed", counted(r.ImagesRemoved)})
	out = append(out, fact{"thresholds due", fmt.Sprintf("%d times", due)})
	if rejected > 0 {
		out = append(out, fact{"pods rejected", fmt.Sprint(rejected)})
	}
	for _, p := range r.Pods {
		if p.NoSpace > 0 {
			out = append(out, fact{"no space: " + p.Name, p.NoSpace.String()})
		}
	}
	for _, h := range r.Host {
		if h.NoSpace > 0 {
			out = append(out, fact{"no space: " + h.Name, h.NoSpace.String()})
		}
	}
	for _, f := range r.Filesystems {
		out = append(out, fact{"least available: " + f.Name, page.Bytes(uint64(max(0, f.LeastAvailable)))})
		if f.LeastInodesFree > 0 && f.InodesFree != f.LeastInodesFree {
			out = append(out, fact{"least inodes free: " + f.Name, fmt.Sprint(f.LeastInodesFree)})
		}
	}
	var held []string
	for _, e := range r.Events {
		if e.What == sim.HeldBack && !slices.Contains(held, e.Rule) {
			held = append(held, e.Rule)
		}
	}
	if len(held) > 0 {
		out = append(out, fact{"held back by", strings.Join(held, ", ")})
	}
	return out
}

// counted lists names, each once, with how often it is there.
func counted(list []string) string {
	if len(list) == 0 {
		return "none"
	}
	var names []string
	count := map[string]int{}
	for _, name := range list {
		if count[name]++; count[name] == 1 {
			names = append(names, name)
		}
	}
	const most = 4
	var parts []string
	for i, name := range names {
		if i == most {
			parts = append(parts, fmt.Sprintf("%d more", len(names)-most))
			break
		}
		if count[name] > 1 {
			name = fmt.Sprintf("%s (%d times)", name, count[name])
		}
		parts = append(parts, name)
	}
	return strings.Join(parts, ", ")
}

type line struct{ at, by, text string }

// timeline makes lines of events; what happens to several things at once is one
// line.
func timeline(events []sim.Event) []line {
	var out []line
	for i := 0; i < len(events); {
		e, j := events[i], end(events, i)
		l := line{at: clock(e.At), by: e.By, text: sentence(events[i:j])}
		// What goes on in the same way is told once.
		k, more := j, 0
		for again := end(events, k); k < len(events) && alike(e, events[k]); again = end(events, k) {
			k, more = again, more+1
		}
		if more > 2 {
			l.text += fmt.Sprintf("; and so on, %d times until %s", more+1, clock(events[k-1].At))
			j = k
		}
		out = append(out, l)
		i = j
	}
	return out
}

// end is where the events end that are told together with event i.
func end(events []sim.Event, i int) int {
	j := i + 1
	for j < len(events) && together(events[i], events[j]) {
		j++
	}
	return j
}

// alike says whether b is the same again, later.
func alike(a, b sim.Event) bool {
	return a.By == b.By && a.What == b.What && a.Rule == b.Rule && a.Subject == b.Subject && a.Detail == b.Detail
}

func together(a, b sim.Event) bool {
	return a.At == b.At && a.By == b.By && a.What == b.What && a.Rule == b.Rule && a.Detail == b.Detail
}

func clock(d time.Duration) string { return d.Round(time.Second / 10).String() }

// sentence says what events of one kind at one time are about.
func sentence(events []sim.Event) string {
	e := events[0]
	subjects := make([]string, 0, len(events))
	var bytes int64
	for _, one := range events {
		subjects = append(subjects, one.Subject)
		bytes += one.Bytes
	}
	who := counted(subjects)
	size := page.Bytes(uint64(max(0, bytes)))
	rule := ""
	if e.Rule != "" {
		rule = " (" + e.Rule + ")"
	}
	switch e.What {
	case sim.ThresholdDue:
		return fmt.Sprintf("%s is short: %s left, less than %s%s", who, inUnit(e, e.Bytes), inUnit(e, e.Wanted), rule)
	case sim.PressureOver:
		return "pressure is over"
	case sim.ReclaimForeseen:
		return fmt.Sprintf("%s will be short in %s: %s left, %s wanted; reclaim begins%s", who, e.Detail, inUnit(e, e.Bytes), inUnit(e, e.Wanted), rule)
	case sim.ImageRemoved:
		return fmt.Sprintf("removes images %s: %s%s", who, size, rule)
	case sim.DeadRemoved:
		return fmt.Sprintf("removes dead containers %s: %s%s", who, size, rule)
	case sim.LogRemoved:
		return fmt.Sprintf("removes rotated logs of %s: %s%s", who, size, rule)
	case sim.NotRemoved:
		return fmt.Sprintf("could not remove %s: %s", who, e.Detail)
	case sim.PodEvicted:
		return fmt.Sprintf("evicts %s because of %s: %s%s", who, e.Detail, size, rule)
	case sim.PodRejected:
		return fmt.Sprintf("rejects %s%s", who, rule)
	case sim.PodAnew:
		return fmt.Sprintf("%s is made anew", who)
	case sim.VictimLives:
		return fmt.Sprintf("%s may stay: the reclaim was enough for %s%s", who, e.Detail, rule)
	case sim.HeldBack:
		if e.Wanted > 0 {
			return fmt.Sprintf("nobody goes: of %s that are gone %s are nobody's, perhaps of %s%s", page.Bytes(uint64(e.Wanted)), size, e.Detail, rule)
		}
		return fmt.Sprintf("nobody goes%s: %s%s", about(e.Subject), e.Detail, rule)
	case sim.NoSpace:
		return fmt.Sprintf("no space for %s", who)
	case sim.PullFailed:
		return fmt.Sprintf("no space to pull %s for %s", who, e.Detail)
	case sim.NotRotated:
		return fmt.Sprintf("could not rotate the log of %s%s", who, rule)
	case sim.Blind:
		return "has no figures and does nothing" + rule
	case sim.Restarted:
		return "restarts, and has forgotten all"
	default:
		return strings.Join(slices.DeleteFunc([]string{string(e.What), who, e.Detail}, func(s string) bool { return s == "" }), " ") + rule
	}
}

func about(subject string) string {
	if subject == "" {
		return ""
	}
	return ", not even " + subject
}

// inUnit writes a number in the unit of an event's signal.
func inUnit(e sim.Event, n int64) string {
	if strings.Contains(e.Subject, "inodesFree") {
		return fmt.Sprintf("%d inodes", n)
	}
	return page.Bytes(uint64(max(0, n)))
}
