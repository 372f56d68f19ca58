package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	continuity "github.com/containerd/continuity/fs"

	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/fsstats/hint"
	"github.com/cleave-cri/cleave/fsstats/index"
	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/janitor"
)

// A node of forty containers.
const (
	idleTrees      = 40
	idleFolders    = 250 // in each
	idleFiles      = 99  // in each of those
	idleDiskBytes  = 8 << 30
	idleSeconds    = 60
	busyPerSecond  = 50_000_000
	helperWriter   = "writer"
	writerEveryMS  = 100
	writerFileSize = 1 << 30 // then it begins anew
	// containerdPeriod is stats_collect_period of containerd's CRI plugin, unless
	// set.
	containerdPeriod = 10 * time.Second
)

// benchIdle measures what the usage index takes of a core on a node where nothing
// is written, and on one where one of forty containers writes.
func benchIdle(ctx context.Context, scale float64) (err error) {
	run, err := janitor.Start(ctx, janitor.Options{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, run.Close(context.WithoutCancel(ctx))) }()
	d, err := disk.Make(ctx, run.Dir(), disk.Spec{Name: "containers", SizeBytes: idleDiskBytes, MkfsArgs: []string{"-N", "1200000"}})
	if err != nil {
		return err
	}
	fmt.Fprintf(os.Stderr, "bench-idle: %d trees with %d inodes in all; making them takes a minute or two, then twice %.0f s of measuring\n",
		idleTrees, idleTrees*(1+idleFolders*(1+idleFiles)), idleSeconds*scale)
	var owners []index.Owner
	for i := range idleTrees {
		root := filepath.Join(d.Path(), fmt.Sprintf("container-%02d", i))
		if err := makeTree(ctx, root, idleFolders, idleFiles); err != nil {
			return err
		}
		owners = append(owners, index.Owner{Kind: "container", ID: strconv.Itoa(i), Parts: []index.Part{{Name: "writable", Path: root}}})
	}
	syscall.Sync()

	prober := fsstats.NewProber()
	var writer int
	x, err := index.New(index.Options{
		Space: func(path string) (index.Space, error) {
			f, err := prober.FilesystemOf(path)
			if err != nil {
				return index.Space{}, err
			}
			s := index.Space{FS: index.FS(f.ID()), UsedBytes: int64(f.UsedBytes), At: f.MeasuredAt}
			if used, ok := f.InodesUsed(); ok {
				inodes := int64(used)
				s.UsedInodes = &inodes
			}
			return s, nil
		},
		Written: func(_ index.Kind, id string) (uint64, bool) {
			if id != "0" || writer == 0 {
				return 0, true // a container whose processes write nothing
			}
			return hint.OfProcesses([]int{writer})
		},
	})
	if err != nil {
		return err
	}
	if err := x.SetOwners(owners); err != nil {
		return err
	}
	during, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- x.Run(during) }()
	defer func() {
		stop()
		err = errors.Join(err, <-ended)
	}()
	if err := untilMeasured(ctx, x); err != nil {
		return err
	}
	long := time.Duration(idleSeconds * scale * float64(time.Second))

	before, began := x.View().Entries, cpuTime()
	if err := pause(ctx, long); err != nil {
		return err
	}
	work, took := x.View().Entries, cpuTime()-began
	report("idle.core_percent", 100*took.Seconds()/long.Seconds(), "% of one core")
	report("idle.inodes_per_min", float64(work.Update+work.Hot+work.Suspect+work.First-before.Update-before.Hot-before.Suspect-before.First)/long.Minutes(), "inodes")
	report("idle.refresh_inodes_per_min", float64(work.Refresh-before.Refresh)/long.Minutes(), "inodes")

	// What containerd does on the same node: its walk of every container, each time
	// that its period is over, whether something was written or not.
	began = cpuTime()
	for _, o := range owners {
		if _, err := continuity.DiskUsage(ctx, o.Parts[0].Path); err != nil {
			return err
		}
	}
	report("idle.containerd_core_percent", 100*(cpuTime()-began).Seconds()/containerdPeriod.Seconds(), "% of one core, by its own walk every 10 s")

	cmd, err := startWriter(ctx, filepath.Join(d.Path(), "container-00", "log"))
	if err != nil {
		return err
	}
	defer func() {
		_ = cmd.Process.Kill() //nolint:errcheck // it may have ended with an error already
		_ = cmd.Wait()         //nolint:errcheck // killed
	}()
	writer = cmd.Process.Pid
	if err := pause(ctx, 5*time.Second); err != nil {
		return err
	}
	before, began = x.View().Entries, cpuTime()
	worst, sum, samples, unproven := time.Duration(0), time.Duration(0), 0, time.Duration(0)
	for end := time.Now().Add(long); time.Now().Before(end); samples++ {
		if err := pause(ctx, 50*time.Millisecond); err != nil {
			return err
		}
		o, ok := x.View().Owner("container", "0")
		if !ok || o.Parts[0].Figure == nil {
			return errors.New("the writer has no figure")
		}
		lag := time.Since(o.Parts[0].Figure.Started)
		worst, sum = max(worst, lag), sum+lag
		unproven = max(unproven, time.Since(o.Parts[0].Figure.ProvenAt()))
	}
	work, took = x.View().Entries, cpuTime()-began
	report("busy.lag_seconds", worst.Seconds(), "s, the oldest that the writer's figure got")
	report("busy.mean_lag_seconds", (sum / time.Duration(max(samples, 1))).Seconds(), "s")
	report("busy.proof_lag_seconds", unproven.Seconds(), "s, the oldest that the last walk of all of the writer's files got")
	report("busy.core_percent", 100*took.Seconds()/long.Seconds(), "% of one core")
	report("busy.writer_inodes_per_min", float64(work.Hot+work.Update-before.Hot-before.Update)/long.Minutes(), "inodes")
	report("busy.other_inodes_per_min", float64(work.Suspect+work.First+work.Refresh-before.Suspect-before.First-before.Refresh)/long.Minutes(), "inodes")
	return nil
}

// cpuTime is what this process has taken of the processors.
func cpuTime() time.Duration {
	var use syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &use); err != nil {
		return 0
	}
	return time.Duration(use.Utime.Nano() + use.Stime.Nano())
}

func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// untilMeasured waits until all parts have a figure and nothing is done any more.
func untilMeasured(ctx context.Context, x *index.Index) error {
	for quiet, last := 0, (index.Entries{}); quiet < 15; {
		if err := pause(ctx, time.Second); err != nil {
			return err
		}
		v := x.View()
		if len(v.Filesystems) == 1 && v.Filesystems[0].Unmeasured == 0 && v.Entries == last {
			quiet++
		} else {
			quiet = 0
		}
		last = v.Entries
	}
	return nil
}

// makeTree makes folders with empty files.
func makeTree(ctx context.Context, root string, folders, files int) error {
	for i := range folders {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		folder := filepath.Join(root, fmt.Sprintf("folder-%05d", i))
		if err := os.MkdirAll(folder, 0o755); err != nil {
			return err
		}
		for j := range files {
			f, err := os.Create(filepath.Join(folder, fmt.Sprintf("file-%05d", j)))
			if err != nil {
				return err
			}
			if err := f.Close(); err != nil {
				return err
			}
		}
	}
	return nil
}

// startWriter starts a process that writes, as a container would.
func startWriter(ctx context.Context, path string) (*exec.Cmd, error) {
	executable, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, executable, helperWriter, path)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the writer: %w", err)
	}
	return cmd, nil
}

// write writes busyPerSecond bytes a second until ctx ends.
func write(ctx context.Context, path string) error {
	portion := []byte(strings.Repeat("0123456789abcde\n", busyPerSecond*writerEveryMS/1000/16))
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	tick := time.NewTicker(writerEveryMS * time.Millisecond)
	defer tick.Stop()
	for written := 0; ; {
		select {
		case <-ctx.Done():
			return f.Close()
		case <-tick.C:
		}
		if written += len(portion); written > writerFileSize {
			written = 0
			if err := f.Truncate(0); err != nil {
				return err
			}
			if _, err := f.Seek(0, 0); err != nil {
				return err
			}
		}
		if _, err := f.Write(portion); err != nil {
			return err
		}
	}
}
