package play

import (
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/cleave-cri/cleave/agent/page"
	"github.com/cleave-cri/cleave/engine/sim"
	"github.com/cleave-cri/cleave/lab/scenario"
)

// report is what came of a scenario, for people.
type report struct {
	scenario *scenario.Scenario
	facts    *facts
	observes bool
	// unexpected says what is not as the scenario expects, against where the
	// simulator comes to something else.
	unexpected, against []string
	// simulated is nil if the simulator was not asked.
	simulated *sim.Result
}

// mostEvents is how much of what happened is shown.
const mostEvents = 40

func (r *report) write(w io.Writer) {
	fmt.Fprintf(w, "\n%s\n%s on a real node\n\n", page.Name(r.scenario.Title), r.scenario.Lasts)
	for i, e := range r.facts.result.Events {
		if i == mostEvents {
			fmt.Fprintf(w, "%10s  %d more\n", "…", len(r.facts.result.Events)-i)
			break
		}
		fmt.Fprintf(w, "%10s  %s\n", e.At.Round(100*time.Millisecond), sentence(e))
	}
	if len(r.facts.result.Events) == 0 {
		fmt.Fprintf(w, "there was nothing to do\n")
	}
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	row := func(name, value, simulated string) {
		if r.simulated != nil {
			fmt.Fprintf(t, "  %s\t%s\t%s\n", name, value, simulated)
		} else {
			fmt.Fprintf(t, "  %s\t%s\n", name, value)
		}
	}
	other := r.simulated
	if other == nil {
		other = &sim.Result{}
	}
	if r.simulated != nil {
		row("", "real node", "simulator")
	}
	row("layout", r.facts.layout, "")
	row("evicted", counted(r.facts.result.Evicted), counted(other.Evicted))
	row("images removed", listed(r.facts.result.ImagesRemoved), listed(other.ImagesRemoved))
	row("dead containers removed", fmt.Sprint(r.facts.deadRemoved), "")
	for _, f := range r.facts.result.Filesystems {
		simulated := ""
		for _, o := range other.Filesystems {
			if o.Name == f.Name {
				simulated = size(o.LeastAvailable)
			}
		}
		row("least available: "+f.Name, size(f.LeastAvailable), simulated)
	}
	for _, p := range r.facts.result.Pods {
		o := other.Pod(p.Name)
		if p.NoSpace > 0 || o != nil && o.NoSpace > 0 {
			simulated := ""
			if o != nil {
				simulated = o.NoSpace.String()
			}
			row("no space: "+p.Name, p.NoSpace.String(), simulated)
		}
	}
	_ = t.Flush() //nolint:errcheck // lines for people
	for _, line := range r.unexpected {
		fmt.Fprintf(w, "\nNOT AS EXPECTED: %s\n", line)
	}
	for _, line := range r.against {
		fmt.Fprintf(w, "\nNOT AS IN THE SIMULATOR: %s\n", line)
	}
	switch {
	case len(r.unexpected) > 0 || len(r.against) > 0:
	case r.observes:
		fmt.Fprintf(w, "\nas expected: it only observed\n")
	case r.simulated != nil:
		fmt.Fprintf(w, "\nas expected, and as in the simulator\n")
	default:
		fmt.Fprintf(w, "\nas expected\n")
	}
}

func size(bytes int64) string { return page.Bytes(uint64(max(0, bytes))) }

// sentence is an event for people.
func sentence(e sim.Event) string {
	rule := ""
	if e.Rule != "" {
		rule = " (" + e.Rule + ")"
	}
	switch e.What {
	case sim.ThresholdDue:
		return e.Subject + " is short" + rule
	case sim.PodEvicted:
		if e.By == byKubelet {
			return "the kubelet evicts " + e.Subject + ": " + e.Detail
		}
		return "evicts " + e.Subject + " because of " + e.Detail + rule
	case sim.HeldBack:
		return "nobody goes" + rule
	default:
		return fmt.Sprintf("%s: %s came free%s", e.What, size(e.Bytes), rule)
	}
}

// counted lists names, each once, with how often it is there.
func counted(list []string) string {
	var parts []string
	for _, name := range set(list) {
		n := 0
		for _, other := range list {
			if other == name {
				n++
			}
		}
		if n > 1 {
			name = fmt.Sprintf("%s (%d times)", name, n)
		}
		parts = append(parts, name)
	}
	const most = 6
	if len(parts) > most {
		parts = append(slices.Clone(parts[:most]), fmt.Sprintf("%d more", len(parts)-most))
	}
	return listed(parts)
}
