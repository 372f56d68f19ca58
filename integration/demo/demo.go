package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/cleave-cri/cleave/lab/janitor"
	"github.com/cleave-cri/cleave/lab/node"
	"github.com/cleave-cri/cleave/lab/pod"
	"github.com/cleave-cri/cleave/lab/scenario"
)

// options are what the command line says.
type options struct {
	// cleave is the program to show; empty means that it is built.
	cleave string
	// file is the scenario that is played.
	file string
	// keep leaves the node running.
	keep bool
	// down takes down what was kept, and does nothing else: all demos, or those in the folders.
	down    bool
	folders []string
}

// closeLimit bounds the taking down of everything.
const closeLimit = time.Minute

// run is the demo.
func run(ctx context.Context, o options, out io.Writer) (err error) {
	if os.Geteuid() != 0 {
		return errors.New("it makes filesystems and runs containers: run it as root")
	}
	if o.down {
		return takeDown(ctx, o.folders, out)
	}
	s, err := scenario.Load(o.file)
	if err != nil {
		return err
	}
	works, err := workloads(s)
	if err != nil {
		return fmt.Errorf("%s: %w", o.file, err)
	}
	fmt.Fprint(out, intro(o.keep))
	lab, err := janitor.Start(ctx, janitor.Options{Log: out})
	if err != nil {
		return err
	}
	p := progress{out: out, began: time.Now()}
	d := &demo{options: o, scenario: s, workloads: works, lab: lab, progress: p}
	err = d.show(ctx)
	if o.keep && ctx.Err() == nil && d.node != nil && d.shown {
		return errors.Join(err, d.keepRunning(ctx))
	}
	if ctx.Err() != nil {
		err = errors.New("interrupted")
	}
	return errors.Join(err, d.close(ctx))
}

// demo is one run of it.
type demo struct {
	options
	scenario  *scenario.Scenario
	workloads []workload
	progress  progress
	lab       *janitor.Run
	node      *node.Node
	// shown is set once everything has been printed.
	shown bool
}

// show makes the node, uses it and prints what came out.
func (d *demo) show(ctx context.Context) error {
	d.progress.step("everything of this run is in %s", d.lab.Dir())
	binary, err := d.binary(ctx)
	if err != nil {
		return err
	}
	if err := d.startNode(ctx, binary); err != nil {
		return err
	}
	through, err := pod.Dial(d.node.Cleave.Endpoint())
	if err != nil {
		return err
	}
	direct, err := pod.Dial(d.node.Runtime.Endpoint())
	if err != nil {
		return errors.Join(err, through.Close())
	}
	l := &look{demo: d, direct: direct, through: through}
	r, err := l.observe(ctx)
	if err := errors.Join(err, direct.Close(), through.Close()); err != nil {
		return err
	}
	fmt.Fprint(d.progress.out, r.render())
	page, err := d.status(ctx)
	if err != nil {
		return err
	}
	claims := append(r.claims(), d.expected(page)...)
	fmt.Fprint(d.progress.out, renderClaims(claims))
	d.shown = true
	return failed(claims)
}

// binary returns the path of cleave.
func (d *demo) binary(ctx context.Context) (string, error) {
	if d.cleave != "" {
		return filepath.Abs(d.cleave)
	}
	d.progress.step("build cleave")
	return node.BuildCleave(ctx, d.lab.Dir(), false)
}

// status prints what the command prints that an operator would use.
func (d *demo) status(ctx context.Context) (string, error) {
	control := d.node.Cleave.Config().Control.Endpoint.Path()
	fmt.Fprint(d.progress.out, heading("cleave status --control "+control))
	cmd := exec.CommandContext(ctx, d.node.Cleave.Binary(), "status", "--control", control) //nolint:gosec // our own program
	text, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("cleave status: %w\n%s", err, text)
	}
	_, err = d.progress.out.Write(text)
	return string(text), err
}

// close takes everything down; after an interruption too.
func (d *demo) close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeLimit)
	defer cancel()
	d.progress.step("take everything down")
	var err error
	if d.node != nil {
		err = d.node.Close(ctx)
	}
	if err = errors.Join(err, d.lab.Close(ctx)); err != nil {
		return err
	}
	d.progress.step("nothing is left: no process, no mount, no loop device, no cgroup, no file")
	return nil
}

// progress prints what is done now, with the time since the start.
type progress struct {
	out   io.Writer
	began time.Time
}

func (p progress) step(format string, args ...any) {
	fmt.Fprintf(p.out, "%5.1fs  %s\n", time.Since(p.began).Seconds(), fmt.Sprintf(format, args...))
}
