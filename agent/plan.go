package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/cleave-cri/cleave/agent/control"
	"github.com/cleave-cri/cleave/agent/decide"
	"github.com/cleave-cri/cleave/agent/flight"
	"github.com/cleave-cri/cleave/agent/keeper"
	"github.com/cleave-cri/cleave/agent/page"
	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/garbage"
	"github.com/cleave-cri/cleave/engine/record"
	"github.com/cleave-cri/cleave/kube"
	"github.com/cleave-cri/cleave/reclaim"
)

const (
	// pathPlan answers with what would be reclaimed for each signal, a [Plan].
	pathPlan = "/v1/plan"
	// pathCollect tidies up now, or says what it would do: a [CollectRequest], answered with a [Collected].
	pathCollect = "/v1/collect"
)

// shownPods is how many pods a status names.
const shownPods = 10

// errNoReclaim says that this cleave does not reclaim.
var errNoReclaim = errors.New("this cleave does not reclaim: set reclaim.enabled in its configuration and restart it")

// errNotActing says that another process deletes.
var errNotActing = errors.New("tidy up: another cleave process, before or after this one, does that at the moment: ask again in a minute")

// Planned is what would be reclaimed if a signal were short.
type Planned struct {
	Signal engine.Signal `json:"signal"`
	Steps  []record.Step `json:"steps,omitempty"`
	// Problem says why it is not all that there is; empty if it is.
	Problem string `json:"problem,omitempty"`
}

// CollectRequest asks for tidying up.
type CollectRequest struct {
	// DryRun only says what would be done.
	DryRun bool `json:"dryRun,omitempty"`
}

// Collected is what was done, or would be.
type Collected struct {
	// DryRun says that nothing was done.
	DryRun  bool          `json:"dryRun,omitempty"`
	Steps   []record.Step `json:"steps,omitempty"`
	Problem string        `json:"problem,omitempty"`
}

// plan says for each signal of bytes what would be reclaimed now.
func (d *decisions) plan(ctx context.Context) (any, error) {
	if d == nil {
		return nil, errNoReclaim
	}
	detected := decide.Detected(d.observer.newest.Load().layout)
	if detected == nil {
		return nil, errors.New("it is not known how filesystems are shared")
	}
	out := Plan{}
	for _, signal := range []engine.Signal{engine.NodeFSAvailable, engine.ImageFSAvailable, engine.ContainerFSAvailable} {
		p := Planned{Signal: signal}
		var err error
		if p.Steps, err = d.keeper.Plan(ctx, signal, decide.Layout(*detected), garbage.Everything); err != nil {
			p.Problem = err.Error()
		}
		if len(p.Steps) > 0 || p.Problem != "" {
			out = append(out, p)
		}
	}
	return out, nil
}

func (d *decisions) collect(ctx context.Context, r CollectRequest) (any, error) {
	if d == nil {
		return nil, errNoReclaim
	}
	if !r.DryRun && !d.acts.Load() {
		return nil, errNotActing
	}
	steps, err := d.keeper.Collect(ctx, r.DryRun)
	c := Collected{DryRun: r.DryRun, Steps: steps}
	if err != nil {
		c.Problem = err.Error()
	}
	return c, nil
}

// FetchPlan asks the cleave that is running what would be reclaimed. It returns [ErrNotRunning] if none answers on the socket.
func FetchPlan(ctx context.Context, socket string) (plan Plan, err error) {
	err = control.Ask(ctx, socket, http.MethodGet, pathPlan, &plan)
	return plan, asked("ask what would be reclaimed", socket, err)
}

// Collect has the cleave that is running tidy up, or say what it would do. It returns [ErrNotRunning] if none answers on the socket.
func Collect(ctx context.Context, socket string, r CollectRequest) (done Collected, err error) {
	err = control.Send(ctx, socket, http.MethodPost, pathCollect, r, &done)
	return done, asked("have it tidy up", socket, err)
}

// asked says in words why a question on a socket had no answer.
func asked(what, socket string, err error) error {
	if errors.Is(err, control.ErrNotRunning) {
		err = fmt.Errorf("%w: start `cleave serve`, or name its control socket with --control", ErrNotRunning)
	}
	if err != nil {
		return fmt.Errorf("%s on %s: %w", what, socket, err)
	}
	return nil
}

// Plan is what would be reclaimed, for each signal.
type Plan []Planned

// WriteText prints a plan for people.
func (plan Plan) WriteText(w io.Writer, _ time.Time) error {
	out := page.NewWriter(w)
	if len(plan) == 0 {
		out.Printf("Nothing would be reclaimed for any filesystem.\n")
	}
	for _, p := range plan {
		out.Printf("If %s were short:\n", p.Signal)
		if err := writeSteps(out, p.Steps); err != nil {
			return err
		}
		if p.Problem != "" {
			out.Printf("! %s\n", p.Problem)
		}
	}
	return out.Err()
}

// WriteText prints for people what was tidied up, or would be.
func (c Collected) WriteText(w io.Writer, _ time.Time) error {
	out := page.NewWriter(w)
	switch {
	case len(c.Steps) == 0 && c.Problem == "":
		out.Printf("There is nothing to tidy up by the kubelet's marks and ages.\n")
	case c.DryRun:
		out.Printf("Nothing was deleted; this would be:\n")
	}
	if err := writeSteps(out, c.Steps); err != nil {
		return err
	}
	if c.Problem != "" {
		out.Printf("! %s\n", c.Problem)
	}
	return out.Err()
}

func writeSteps(out *page.Writer, steps []record.Step) error {
	for _, s := range steps {
		if err := reclaim.Page(out, s); err != nil {
			return err
		}
	}
	return nil
}

// ReclaimStatus is how what reclaims and evicts is.
type ReclaimStatus struct {
	keeper.Status
	// LeftOut are pods that are not ranked, so that none of them is evicted, and why; at most shownPods of them, and LeftOutCount all.
	LeftOut      []string `json:"leftOut,omitempty"`
	LeftOutCount int      `json:"leftOutCount,omitempty"`
	// Sources are where pods are known from, and from when; none while no API server is known.
	Sources []kube.SourceState `json:"sources,omitempty"`
	// Next are the pods that would go first if a filesystem were short, for each of them.
	Next []NextPods `json:"next,omitempty"`
	// ReportsOnly says that cleave evicts nobody, whatever is short.
	ReportsOnly bool `json:"reportsOnly,omitempty"`
	// KubeletPID is the process whose settings hold, 0 while none is known.
	KubeletPID int `json:"kubeletPID,omitempty"`
	// Records counts what was written to the flight recorder, nil while another process records.
	Records *flight.Counters `json:"records,omitempty"`
	// Kube is what the cluster was told, nil where nothing is to be.
	Kube *TellStatus `json:"kube,omitempty"`
}

func (d *decisions) status() *ReclaimStatus {
	s := &ReclaimStatus{Status: d.keeper.Status(), Next: next(d.keeper.IfShort()), ReportsOnly: d.reportsOnly()}
	if k := d.kubelet.Load(); k != nil {
		s.KubeletPID = k.PID
	}
	if c := d.cluster.Load(); c != nil {
		s.Kube, s.Sources = c.teller.Status(), c.view().Sources
	}
	if left := d.left.Load(); left != nil {
		s.LeftOut, s.LeftOutCount = (*left)[:min(len(*left), shownPods)], len(*left)
	}
	if recorder := d.recorder.Load(); recorder != nil {
		c := recorder.Counters()
		s.Records = &c
	}
	return s
}

func (s *ReclaimStatus) writeText(out *page.Writer, now time.Time) {
	switch {
	case s.Problem != "":
		out.Printf("! Reclaim: nothing is decided: %s\n", s.Problem)
	case s.LookedAt == nil:
		out.Printf("Reclaim: not looked yet.\n")
	default:
		what := string(s.Outcome)
		if s.Threshold != "" {
			what += ", " + s.Threshold
		}
		out.Printf("Reclaim: %s (%s ago); since the start %d things deleted, %s freed, %d pods evicted.\n", what, now.Sub(*s.LookedAt).Round(time.Second),
			s.Counts.Deleted, page.Bytes(uint64(max(s.Counts.GainedBytes, 0))), s.Counts.Evicted) //nolint:gosec // not below zero
		out.Printf("  begins at: %s\n", strings.Join(s.Thresholds, ", "))
		for _, n := range s.Next {
			n.writeText(out)
		}
		if s.ReportsOnly {
			out.Printf("  %s\n", reportsOnly)
		}
	}
	if s.Held != "" {
		out.Printf("! Reclaim: nobody is evicted before it is known whether images and containers are enough: %s\n", s.Held)
	}
	for _, of := range s.Sources {
		known := "nothing is known of it yet"
		if of.AsOf != nil {
			known = fmt.Sprintf("%d, %s ago", of.Pods, now.Sub(*of.AsOf).Round(time.Second))
		}
		if of.Problem != "" {
			known += " (" + of.Problem + ")"
		}
		out.Printf("  pods by the %s: %s\n", of.Name, known)
	}
	if s.LeftOutCount > 0 {
		out.Printf("! Reclaim: %d pods are not ranked, so none of them is evicted:\n", s.LeftOutCount)
		for _, left := range s.LeftOut {
			out.Printf("    %s\n", left)
		}
		if more := s.LeftOutCount - len(s.LeftOut); more > 0 {
			out.Printf("    and %d more\n", more)
		}
	}
	for _, n := range s.Notes {
		out.Printf("  %s ago %s %s: %s\n", now.Sub(n.At).Round(time.Second), n.Kind, n.ID, n.Text)
	}
	for _, o := range s.Overlaps {
		out.Printf("! Reclaim: nobody is evicted by a threshold that is not above the kubelet's: %s\n", o)
	}
	s.Kube.writeText(out)
}
