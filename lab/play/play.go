// Package play plays scenarios on a real node (lab/stage) and says whether what came
// of them is what they expect, and what the simulator says of the same file. It is
// `cleave lab run`.
package play

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/engine/sim"
	"github.com/cleave-cri/cleave/lab/janitor"
	"github.com/cleave-cri/cleave/lab/scenario"
	"github.com/cleave-cri/cleave/lab/stage"
	"github.com/cleave-cri/cleave/simulate"
)

// Options say how a scenario is played.
type Options struct {
	Stage stage.Options
	// AgainstSim also plays it in the simulator, and a difference is a failure.
	AgainstSim bool
	// Keep leaves the node running.
	Keep bool
}

// ErrUnexpected says that a scenario came out otherwise than it expects; what is in
// the report.
var ErrUnexpected = errors.New("not as the scenario expects")

// closeLimit bounds the taking down of everything.
const closeLimit = 2 * time.Minute

// Run plays a scenario file and writes progress and a report. Everything is taken
// down again, unless it is to be kept.
func Run(ctx context.Context, out io.Writer, file string, o Options) (err error) {
	s, err := scenario.Load(file)
	if err != nil {
		return err
	}
	if err := stage.Ready(s, &o.Stage); err != nil {
		return fmt.Errorf("play %s: %w", file, err)
	}
	lab, err := janitor.Start(ctx, janitor.Options{Log: out})
	if err != nil {
		return err
	}
	p := &progress{out: out, began: time.Now()}
	o.Stage.Step = p.step
	p.step("%s: %s", file, s.Title)
	run := &run{Scenario: s, progress: p, dir: lab.Dir()}
	report, err := run.play(ctx, lab, o)
	kept := o.Keep && run.stage != nil && report != nil && ctx.Err() == nil
	if kept {
		again := run.stage.Node.Cleave.Start(ctx) // it was stopped for its records
		if again == nil {
			again = run.awaitDecisions(ctx)
		}
		err = errors.Join(err, again)
		about, keepErr := run.stage.Keep(ctx)
		about.Write(out)
		about.Hints(out)
		err = errors.Join(err, keepErr)
	} else {
		err = errors.Join(err, run.close(ctx, lab))
	}
	if ctx.Err() != nil {
		return errors.Join(errors.New("interrupted"), err)
	}
	if report == nil {
		return err
	}
	report.write(out)
	if len(report.unexpected) > 0 || len(report.against) > 0 {
		err = errors.Join(err, fmt.Errorf("%s: %w", file, ErrUnexpected))
	}
	return err
}

// play makes the node, plays, and looks at what came of it. There is a report as
// soon as the scenario has been played.
func (r *run) play(ctx context.Context, lab *janitor.Run, o Options) (*report, error) {
	var err error
	if r.stage, err = stage.Start(ctx, lab, r.Scenario, o.Stage); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(r.notes(), 0o755); err != nil {
		return nil, fmt.Errorf("make a folder for what containers note: %w", err)
	}
	if err := r.awaitDecisions(ctx); err != nil {
		return nil, err
	}
	if err := r.perform(ctx); err != nil {
		return nil, errors.Join(err, r.logs())
	}
	f, err := r.facts(ctx)
	if err != nil {
		return nil, errors.Join(err, r.logs())
	}
	// A cleave that observes leaves it to the kubelet, and one that does is none of cleave's business.
	observes := r.stage.Mode == config.ModeObserve && r.stage.Profile == sim.CleaveProfile
	rep := &report{scenario: r.Scenario, facts: f, observes: observes, unexpected: f.check(r.Scenario, observes)}
	if o.AgainstSim {
		// As the kubelet does here.
		r.Kubelet.CRIO = r.Kubelet.CRIO || r.stage.Mode == config.ModeCRIO
		outcome, err := simulate.Play(r.Scenario, r.stage.Profile)
		if err != nil {
			return nil, fmt.Errorf("play it in the simulator: %w", err)
		}
		rep.simulated = outcome.Result
		rep.against = Against(f.result, outcome.Result)
		for _, u := range outcome.Unexpected {
			rep.against = append(rep.against, "in the simulator "+u)
		}
	}
	return rep, nil
}

func (r *run) notes() string { return filepath.Join(r.dir, "notes") }

// logs is an error with the ends of logs, for whoever has to find out.
func (r *run) logs() error {
	if r.stage == nil || r.stage.Node == nil {
		return nil
	}
	return fmt.Errorf("cleave's log ends with\n%s", r.stage.Node.Cleave.LogTail(15))
}

func (r *run) close(ctx context.Context, lab *janitor.Run) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeLimit)
	defer cancel()
	r.step("take everything down")
	var err error
	if r.stage != nil {
		err = r.stage.Close(ctx)
	}
	// What could not be closed the janitor ends; only what that leaves is an error.
	if cleaned := lab.Close(ctx); cleaned != nil {
		return errors.Join(err, cleaned)
	}
	if err != nil {
		r.step("the janitor had to help: %v", err)
	}
	r.step("nothing is left: no process, no mount, no loop device, no cgroup, no file")
	return nil
}

// progress says what is done now, with the time since the start.
type progress struct {
	out   io.Writer
	began time.Time
}

func (p *progress) step(format string, args ...any) {
	fmt.Fprintf(p.out, "%6.1fs  %s\n", time.Since(p.began).Seconds(), fmt.Sprintf(format, args...))
}
