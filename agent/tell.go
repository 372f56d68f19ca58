package agent

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/agent/page"
	"github.com/cleave-cri/cleave/agent/pressure"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/record"
	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/kube"
	"github.com/cleave-cri/cleave/kube/report"
)

const (
	// tellEvery is how often conditions and the taint are looked after when nothing changes.
	tellEvery = time.Minute
	// taintEvery is how often it is looked whether the taint is still as it has to be: others may change it.
	taintEvery = 5 * time.Minute
	// tellMaxAge is how old what a pass saw may be when it is told: a pass that deletes takes some minutes.
	tellMaxAge = 10 * time.Minute
	// tellGrace is how long the end waits for conditions and the taint to be taken away.
	tellGrace = 2 * time.Second
)

// teller tells the cluster how this node's disks are. Nothing waits for it.
type teller struct {
	events     events // nil where none are wanted
	counters   func() report.EventCounters
	conditions conditions                               // keeps, or only takes away what an earlier process left
	taint      func(ctx context.Context, on bool) error // likewise; nil for an identity that may not
	// keepConditions and keepTaint say which of both are wanted.
	keepConditions, keepTaint bool
	log                       *zap.Logger
	woken                     chan struct{}

	mu      sync.Mutex
	picture pressure.Picture // guarded by mu
	status  TellStatus       // guarded by mu

	// Used by run only.
	tainted   *bool // nil while not known
	taintedAt time.Time
}

// conditions writes conditions of the node; report.Conditions does.
type conditions interface {
	Set(ctx context.Context, f report.Filesystem, pressure bool, message string) error
	Clear(ctx context.Context) error
}

// TellStatus is what the cluster was told last.
type TellStatus struct {
	// Events is nil where none are written.
	Events *report.EventCounters `json:"events,omitempty"`
	// Tainted is whether the node has the taint, nil where it is not cleave's to keep or not known.
	Tainted *bool `json:"tainted,omitempty"`
	// Problems say what could not be told; empty if all was.
	Problems []string `json:"problems,omitempty"`
}

// newTeller prepares what the configuration wants.
func newTeller(client *kube.Client, cfg config.Config, log *zap.Logger) *teller {
	acts := cfg.Mode == config.ModeCRI
	t := &teller{
		conditions: report.NewConditions(client), keepConditions: cfg.Kube.Conditions, keepTaint: cfg.Kube.Taint && acts,
		log: log, woken: make(chan struct{}, 1),
	}
	if cfg.Kube.Events {
		e := report.NewEvents(client, client.Node())
		t.events, t.counters = e, e.Counters
	}
	if client.ServiceAccount() {
		t.taint = func(ctx context.Context, on bool) error { return report.Taint(ctx, client, true, on) }
	}
	return t
}

// tell takes an event.
func (t *teller) tell(e report.Event) {
	if t != nil && t.events != nil {
		t.events.Tell(e)
	}
}

// show takes how the filesystems are now.
func (t *teller) show(p pressure.Picture) {
	if t == nil {
		return
	}
	t.mu.Lock()
	t.picture = p
	t.mu.Unlock()
	select {
	case t.woken <- struct{}{}:
	default:
	}
}

// run tells until ctx ends; then it takes back what nobody keeps up any more.
func (t *teller) run(ctx context.Context) {
	var parts sync.WaitGroup
	defer parts.Wait()
	if t.events != nil {
		parts.Go(func() { _ = t.events.Run(ctx) }) //nolint:errcheck // it ends with ctx, and counts its own failures
	}
	rest := leftover{clear: func() error { return t.clear(ctx, !t.keepConditions, !t.keepTaint) }}
	t.note(rest.look(time.Now()))
	tick := time.NewTicker(tellEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), tellGrace)
			defer cancel()
			if err := t.takeBack(closing); err != nil {
				t.log.Warn("the node keeps what cleave said of its disks", zap.Error(err))
			}
			return
		case <-t.woken:
		case <-tick.C:
		}
		err := rest.look(time.Now())
		if t.keepConditions || t.keepTaint {
			err = errors.Join(err, t.keep(ctx))
		}
		t.note(err)
	}
}

// leftover is what an earlier process kept up and this one does not. It is tried once in a while until it is gone: the API server may be
// away at the start.
type leftover struct {
	clear func() error
	done  bool
	next  time.Time
	err   error
}

func (l *leftover) look(now time.Time) error {
	if l.done || now.Before(l.next) {
		return l.err
	}
	err := l.clear()
	if l.done = err == nil || kube.Denied(err); l.done {
		l.err = nil
		return err // that the right is missing is said once
	}
	l.err, l.next = err, now.Add(tellEvery)
	return err
}

// takeBack ends what this process kept up, also if it is not known whether the API server took it. Who never looked at the disks kept
// nothing: another process may.
func (t *teller) takeBack(ctx context.Context) error {
	t.mu.Lock()
	looked := !t.picture.At.IsZero()
	t.mu.Unlock()
	return t.clear(ctx, looked && t.keepConditions, looked && t.keepTaint && (t.tainted == nil || *t.tainted))
}

// clear takes conditions and the taint away, those of an earlier process, too.
func (t *teller) clear(ctx context.Context, conditions, taint bool) error {
	var errs []error
	if conditions {
		errs = append(errs, t.conditions.Clear(ctx))
	}
	if taint && t.taint != nil {
		errs = append(errs, t.taint(ctx, false))
	}
	err := errors.Join(errs...)
	if !t.keepConditions && !t.keepTaint && kube.Denied(err) {
		return nil // who has no right to them never set any
	}
	return err
}

// keep writes how the filesystems are.
func (t *teller) keep(ctx context.Context) error {
	t.mu.Lock()
	p := t.picture
	t.mu.Unlock()
	if p.At.IsZero() {
		return nil
	}
	if time.Since(p.At) > tellMaxAge {
		return fmt.Errorf("the disks have not been looked at since %s: what the node says of them is as old", p.At.UTC().Format(time.TimeOnly))
	}
	var errs []error
	for _, f := range p.Filesystems {
		if name, ok := conditionOf[f.Role]; ok && t.keepConditions {
			errs = append(errs, t.conditions.Set(ctx, name, f.Short, f.Text))
		}
	}
	on, was := len(p.Hard()) > 0, t.tainted
	switch {
	case !t.keepTaint:
	case t.taint == nil:
		errs = append(errs, fmt.Errorf("taint the node: %w", report.ErrIdentity))
	case t.tainted == nil || *t.tainted != on || time.Since(t.taintedAt) >= taintEvery:
		if err := t.taint(ctx, on); err != nil {
			t.tainted = nil // it may have been taken all the same
			errs = append(errs, err)
			break
		}
		if on && (was == nil || !*was) {
			t.log.Warn("the node is tainted: a disk is full", zap.String("filesystem", string(p.Hard()[0].Role)), zap.String("reason", p.Hard()[0].Text))
		}
		t.tainted, t.taintedAt = &on, time.Now()
	}
	return errors.Join(errs...)
}

var conditionOf = map[fsstats.Role]report.Filesystem{fsstats.NodeFS: report.NodeFS, fsstats.ImageFS: report.ImageFS, fsstats.ContainerFS: report.ContainerFS}

// note keeps what went wrong for status, and logs it if it is news.
func (t *teller) note(err error) {
	t.mu.Lock()
	before := t.status.Problems
	t.status = TellStatus{Tainted: t.tainted}
	if err != nil {
		t.status.Problems = []string{err.Error()}
	}
	t.mu.Unlock()
	if err != nil && (len(before) == 0 || before[0] != err.Error()) {
		t.log.Warn("the cluster is not told all of this node's disks", zap.Error(err))
	}
}

// Status is what was told last.
func (t *teller) Status() *TellStatus {
	if t == nil || t.events == nil && !t.keepConditions && !t.keepTaint {
		return nil
	}
	t.mu.Lock()
	s := t.status
	t.mu.Unlock()
	if t.counters != nil {
		c := t.counters()
		s.Events = &c
	}
	return &s
}

func (s *TellStatus) writeText(out *page.Writer) {
	if s == nil {
		return
	}
	if s.Tainted != nil && *s.Tainted {
		out.Printf("! The node is tainted %s:NoSchedule: a disk is full.\n", report.TaintKey)
	}
	problems := s.Problems
	if s.Events != nil && s.Events.Problem != "" {
		problems = append(problems[:len(problems):len(problems)], s.Events.Problem)
	}
	for _, p := range problems {
		out.Printf("! The cluster is not told: %s\n", p)
	}
}

// newsOf are the events of a pass that is news: what is short, and why nobody goes for it. evicts says that cleave may.
func newsOf(r record.Record, evicts bool) (out []report.Event) {
	d := r.Decision
	if d.Outcome != engine.Pressure || r.Input.Summary == nil {
		return nil
	}
	figures := leftOf(d.Threshold, r.Input.Summary.Observe()[d.Threshold.Signal])
	out = append(out, report.Event{Reason: report.ThresholdMet, Warning: true, About: string(d.Threshold.Signal), Note: figures})
	why, held := holds[d.NoVictim]
	if d.Victim != nil && !evicts {
		why, held = fmt.Sprintf("cleave is set up not to; it would be %s/%s", d.Victim.Namespace, d.Victim.Name), true
	}
	if !held || d.NoVictim == "HoldFire" && d.Hold.OnlyLate() || r.Verdict != nil && r.Verdict.Resolved {
		return out
	}
	if d.NoVictim == "HoldFire" && d.Hold != nil && d.Hold.Holds {
		why += fmt.Sprintf(" (%s of %s)", page.Bytes(positive(d.Hold.NobodysBytes)), page.Bytes(positive(d.Hold.GrewBytes)))
	}
	for _, b := range d.Barred {
		why += fmt.Sprintf("; %s: %d went within the hour, the next may at %s", b.Why, b.Went, b.Until.UTC().Format(time.TimeOnly))
		break
	}
	return append(out, report.Event{Reason: report.HeldFire, Warning: true, About: string(d.Threshold.Signal), Note: "No pod is evicted, because " + why + ". " + figures})
}

// holds are the reasons for which nobody goes, in words for people. Space that is on its way is none: that takes seconds, as late accounts do.
var holds = map[string]string{
	"HoldFire": "most of what grew is no pod's", "BreakStorms": "too many went lately",
	"SYN-24": "there is no pod to rank", "SYN-28": "all pods are critical", "OnlyWhoHelps": "no pod has anything there that would come free",
}

// leftOf says what is left and how much has to be.
func leftOf(t engine.Threshold, o engine.Observation) string {
	want := t.Value.Of(o.Capacity)
	if t.Signal.Resource() == engine.Inodes {
		return fmt.Sprintf("%s: %d of %d inodes are left, less than %d.", t, o.Available, o.Capacity, want.Value())
	}
	return fmt.Sprintf("%s: %s of %s are left, less than %s (%d of %d bytes, less than %d).", t,
		page.Bytes(positive(o.Available)), page.Bytes(positive(o.Capacity)), page.Bytes(positive(want.Value())), o.Available, o.Capacity, want.Value())
}

func positive(n int64) uint64 { return uint64(max(n, 0)) } //nolint:gosec // not below zero

// evictionNote says why a pod goes.
func evictionNote(e engine.Eviction, hard bool) string {
	how := "after a soft threshold's grace"
	if hard {
		how = "at once"
	}
	var note string
	switch what := engine.Signal(e.Cause).Resource(); what {
	case engine.EphemeralStorage:
		note = fmt.Sprintf("Evicted %s: of %s %s are left, less than %s (%d bytes, less than %d).", how, e.Cause, page.Bytes(positive(e.Available)),
			page.Bytes(positive(e.Limit.Value())), e.Available, e.Limit.Value())
	case engine.Inodes:
		note = fmt.Sprintf("Evicted %s: of %s %d are left, less than %d.", how, e.Cause, e.Available, e.Limit.Value())
	default:
		subject := "the pod"
		if e.Subject != "" {
			subject = e.Subject
		}
		note = fmt.Sprintf("Evicted %s: %s is above its limit of %s (%s).", how, subject, page.Bytes(positive(e.Limit.Value())), e.Cause)
	}
	for _, o := range e.Offenders {
		note += fmt.Sprintf(" Container %s uses %s and requests %s.", o.Name, o.Usage.String(), o.Request.String())
	}
	return note
}

// removedEvent tells what came of removing images, with exact bytes; nil if none went.
func removedEvent(step record.Step) *report.Event {
	var images int
	var expected, actual int64
	known := true
	for _, i := range step.Items {
		if i.ActualBytes == nil {
			continue
		}
		images++
		actual += *i.ActualBytes
		if i.ExpectedBytes == nil {
			known = false
			continue
		}
		expected += *i.ExpectedBytes
	}
	if images == 0 {
		return nil
	}
	note := fmt.Sprintf("Removed %d images: %s came free (%d bytes", images, page.Bytes(positive(actual)), actual)
	if known {
		note += fmt.Sprintf("; %d were expected", expected)
	}
	return &report.Event{Reason: report.ImagesRemoved, Note: note + ")."}
}
