package main

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"github.com/cleave-cri/cleave/lab/pod"
)

const (
	// writeLimit is how long a workload may take to write.
	writeLimit = time.Minute
	// askEvery is the time between two questions.
	askEvery = 250 * time.Millisecond
	// settleLimit is how long both sides may take to know all figures.
	settleLimit = 25 * time.Second
)

// look asks the same questions directly and through cleave.
type look struct {
	*demo
	direct, through *pod.Client
	running         []running
}

// observe runs the workloads and returns what was written and what was said.
func (l *look) observe(ctx context.Context) (report, error) {
	// The one with the most files first: it has begun to churn when the others are done.
	for _, w := range slices.Backward(l.workloads) {
		r, err := l.start(ctx, w)
		if err != nil {
			return report{}, err
		}
		l.running = append([]running{r}, l.running...)
		l.progress.step("pod %-7swrites %s", w.name, w.does())
	}
	for _, r := range l.running {
		if err := l.waitWritten(ctx, r); err != nil {
			return report{}, err
		}
	}
	l.progress.step("all is written; the same is asked directly and through cleave, now and again")
	rep := report{dir: l.lab.Dir()}
	var err error
	if rep.atOnce, err = l.askLayers(ctx); err != nil {
		return report{}, err
	}
	if err := l.settle(ctx, &rep); err != nil {
		return report{}, err
	}
	return rep, nil
}

// say tells of news while one waits.
func (l *look) say(rep report, n news) {
	if n.through {
		l.progress.step("cleave has the right figures of all, %s after they were written", seconds(rep.throughKnew))
	}
	if n.direct {
		l.progress.step("containerd has looked too, %s after they were written", seconds(rep.directKnew))
	}
}

// askLayers asks both sides for every container's writable layer, and du.
func (l *look) askLayers(ctx context.Context) ([]layer, error) {
	var out []layer
	for _, r := range l.running {
		direct, err := layerOf(ctx, l.direct, r.containerID)
		if err != nil {
			return nil, err
		}
		through, err := layerOf(ctx, l.through, r.containerID)
		if err != nil {
			return nil, err
		}
		real, err := measure(ctx, r.upper)
		if err != nil {
			return nil, err
		}
		out = append(out, layer{name: r.name, wrote: r.does(), churn: r.churn, upper: r.upper, du: real, direct: direct, through: through})
	}
	return out, nil
}

// settle asks until both sides know all figures and what is claimed holds, for a
// limited time, and keeps the last answers.
func (l *look) settle(ctx context.Context, rep *report) error {
	written := time.Now()
	tick := time.NewTicker(askEvery)
	defer tick.Stop()
	for {
		layers, err := l.askLayers(ctx)
		if err != nil {
			return err
		}
		since := time.Since(written)
		l.say(*rep, rep.note(layers, since))
		if done(*rep, layers, since) {
			err := l.collect(ctx, rep, written)
			if err != nil || since > settleLimit || failed(rep.claims()) == nil {
				return err
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// done decides whether enough was asked.
func done(rep report, layers []layer, since time.Duration) bool {
	return since > settleLimit || rep.directKnew > 0 && known(layers, throughSide)
}

// collect asks everything once more, so that all figures are of one moment.
func (l *look) collect(ctx context.Context, rep *report, written time.Time) error {
	// containerd may have had the last figures first; cleave's own measurement shall be of after the writing too.
	if _, err := l.node.Cleave.WaitMeasuredAfter(ctx, written); err != nil {
		return err
	}
	var err error
	if rep.layers, err = l.askLayers(ctx); err != nil {
		return err
	}
	if rep.direct, err = imageFsInfo(ctx, l.direct); err != nil {
		return err
	}
	if rep.through, err = imageFsInfo(ctx, l.through); err != nil {
		return err
	}
	rep.later = time.Since(written)
	l.say(*rep, rep.note(rep.layers, rep.later))
	return l.weigh(ctx, rep)
}

// weigh measures with du and statfs what is on the disks.
func (l *look) weigh(ctx context.Context, rep *report) error {
	images, err := filepath.Glob(filepath.Join(l.node.Split.Config().Snapshotter.ImageRoot, "snapshots", "*", "diff"))
	if err != nil {
		return err
	}
	rep.volumeMiB, rep.logLines, rep.disks = 0, 0, nil
	var sandboxes, logs, volumes []string
	for _, r := range l.running {
		sandboxes = append(sandboxes, r.sandboxUpper)
		logs, volumes = append(logs, r.logs), append(volumes, r.volumes)
		rep.volumeMiB, rep.logLines = rep.volumeMiB+r.volumeMiB, rep.logLines+r.logLines
	}
	for _, m := range []struct {
		to    *amount
		paths []string
	}{
		{&rep.imageLayers, images},
		{&rep.sandboxes, sandboxes},
		{&rep.content, []string{filepath.Join(l.node.Runtime.Root(), "io.containerd.content.v1.content")}},
		{&rep.logs, logs},
		{&rep.volumes, volumes},
	} {
		if *m.to, err = measure(ctx, m.paths...); err != nil {
			return err
		}
	}
	for _, name := range []string{imagesDisk, nodeDisk} {
		d := filesystem{name: name, device: l.node.Disks[name].Device(), path: l.node.Disks[name].Path()}
		if d.used, err = statfs(l.node.Disks[name].Path()); err != nil {
			return fmt.Errorf("weigh the disk %s: %w", name, err)
		}
		rep.disks = append(rep.disks, d)
	}
	return nil
}
