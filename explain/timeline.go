package explain

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/cleave-cri/cleave/agent/page"
	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/record"
)

// Event is one thing that happened, or was decided.
type Event struct {
	At time.Time `json:"at"`
	// What is its kind: an outcome of a decision, "collected", "reclaimed", "evicted" or "enough".
	What string `json:"what"`
	// Pod is namespace/name of the pod that it is about, UID its UID; empty if it is about none.
	Pod string `json:"pod,omitempty"`
	UID string `json:"uid,omitempty"`
	// Text is the rest, for people.
	Text string `json:"text"`
}

// Timeline is what happened, the oldest first.
type Timeline struct {
	Events []Event `json:"events"`
	// Note says why something is missing at the end; empty if nothing is.
	Note string `json:"note,omitempty"`
}

// ReadTimeline makes a timeline of a file of records, of a flight recorder too. since leaves out what is older; with a pod's name,
// "name" or "namespace/name", or its UID, there is only what is about that one.
func ReadTimeline(file string, since time.Time, pod string) (t Timeline, _ error) {
	var note strings.Builder
	err := each(page.NewWriter(&note), file, func(r record.Record, _ int) error {
		for _, e := range Events(r) {
			if !e.At.Before(since) && (pod == "" || e.UID == pod || e.Pod == pod || strings.HasSuffix(e.Pod, "/"+pod)) {
				t.Events = append(t.Events, e)
			}
		}
		return nil
	})
	if err != nil && len(t.Events) > 0 { // what stands before is good
		note.WriteString(err.Error())
		err = nil
	}
	if errors.Is(err, os.ErrNotExist) {
		err = fmt.Errorf("%w: cleave records there with reclaim.enabled; name another file", err)
	}
	t.Note = strings.TrimSpace(note.String())
	slices.SortStableFunc(t.Events, func(a, b Event) int { return a.At.Compare(b.At) })
	return t, err
}

// Events are what happened in one record.
func Events(r record.Record) (out []Event) {
	if gone := r.Departure; gone != nil {
		what, text := departureText(r)
		return []Event{{At: r.Input.Now, What: what, UID: gone.UID, Pod: gone.Namespace + "/" + gone.Name, Text: text}}
	}
	d := r.Decision
	add := func(at time.Time, what, text string) { out = append(out, Event{At: at, What: what, Text: text}) }
	if c := r.Collection; c != nil {
		text := c.Name
		if c.Asked {
			text += ", because somebody asked"
		}
		add(r.Input.Now, "collected", text)
	} else {
		add(r.Input.Now, string(d.Outcome), situation(r))
	}
	for _, s := range r.Steps {
		add(r.Input.Now, "reclaimed", stepText(s))
	}
	if r.Verdict != nil && r.Verdict.Resolved {
		add(r.Input.Now, "enough", "nobody had to go")
	}
	for _, gone := range r.Evicted {
		e := Event{At: gone.At, What: "evicted", UID: gone.UID, Text: evictionText(r, gone)}
		for _, p := range r.Input.Pods {
			if p.UID == gone.UID {
				e.Pod = p.Namespace + "/" + p.Name
			}
		}
		out = append(out, e)
	}
	return out
}

// situation says what was short.
func situation(r record.Record) string {
	d := r.Decision
	if d.Outcome != engine.Pressure && d.Outcome != engine.Foreseen {
		return d.Rule
	}
	text := d.Threshold.String()
	if r.Input.Summary != nil {
		if o, ok := r.Input.Summary.Observe()[d.Threshold.Signal]; ok {
			text += fmt.Sprintf(", %s of %s available", amount(d.Threshold.Signal, o.Available), amount(d.Threshold.Signal, o.Capacity))
		}
	}
	if d.Outcome == engine.Pressure && d.Victim != nil && len(r.Evicted) == 0 && (r.Verdict == nil || !r.Verdict.Resolved) {
		text += fmt.Sprintf("; %s/%s would go", d.Victim.Namespace, d.Victim.Name)
	}
	return text
}

func stepText(s record.Step) string {
	var gone, failed int
	var expected, gained int64
	for _, i := range s.Items {
		if i.ActualBytes != nil {
			gone++
			gained += *i.ActualBytes
		}
		if i.Error != "" {
			failed++
		}
		if i.ExpectedBytes != nil {
			expected += *i.ExpectedBytes
		}
	}
	if len(s.Items) == 0 {
		return fmt.Sprintf("%s: nothing could go", s.Kind)
	}
	text := fmt.Sprintf("%s: %d of %d gone, %s freed, %s expected", s.Kind, gone, len(s.Items), page.Bytes(uint64(max(0, gained))), page.Bytes(uint64(max(0, expected))))
	if failed > 0 {
		text += fmt.Sprintf(", %d could not go", failed)
	}
	return text
}

func evictionText(r record.Record, gone record.Evicted) string {
	d := r.Decision
	text := "by " + string(d.Threshold.Signal)
	for _, e := range slices.Concat(d.Limits, d.Further) {
		if e.UID == gone.UID {
			text = "by " + string(e.Cause)
		}
	}
	if gone.ExpectedBytes != nil {
		text += fmt.Sprintf(", had %s there", page.Bytes(uint64(max(0, *gone.ExpectedBytes))))
	}
	if gone.Error != "" {
		text += ", stays: " + gone.Error
	}
	return text
}

// departureText says how an eviction ended.
func departureText(r record.Record) (what, text string) {
	gone := r.Departure
	after := fmt.Sprintf("told at %s", gone.Told.UTC().Format(time.RFC3339))
	if took := r.Input.Now.Sub(gone.Told); took >= 0 && took < 24*time.Hour { // else the clock was set
		after = fmt.Sprintf("%s after it was told", took.Round(100*time.Millisecond))
	}
	if gone.Error != "" {
		return "stays", after + ": " + gone.Error
	}
	if gone.ActualBytes != nil {
		after += fmt.Sprintf("; %s more available", page.Bytes(uint64(max(0, *gone.ActualBytes))))
	}
	if gone.ExpectedBytes != nil {
		after += fmt.Sprintf(", had %s there", page.Bytes(uint64(max(0, *gone.ExpectedBytes))))
	}
	return "gone", after
}

// WriteText prints a timeline for people. API servers, runtimes and whoever sends a file have their words in it: nothing of that
// makes a line of its own or changes the terminal.
func (t Timeline) WriteText(w io.Writer, _ time.Time) error {
	out := page.NewWriter(w)
	if len(t.Events) == 0 {
		out.Printf("Nothing is recorded for that.\n")
	}
	var last time.Time
	for _, e := range t.Events {
		at := ""
		if !e.At.Equal(last) {
			at, last = e.At.UTC().Format(time.RFC3339), e.At
		}
		what := e.Text
		if who := e.Pod; who != "" || e.UID != "" {
			if who == "" {
				who = e.UID
			}
			what = who + " " + what
		}
		out.Printf("%-20s  %-9s  %s\n", at, page.Name(e.What), page.Name(what))
	}
	if t.Note != "" {
		out.Printf("! %s\n", page.Name(t.Note))
	}
	return out.Err()
}
