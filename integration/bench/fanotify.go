package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/cleave-cri/cleave/fsstats/fanotify"
	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/janitor"
)

// A container that does nothing but write, through its overlay.
const (
	fanotifyRounds    = 10
	fanotifyFiles     = 5_000 // made, written to, closed and removed in each round
	fanotifyWrites    = 50_000
	fanotifyDiskBytes = 1 << 30
	helperFiles       = "files"
)

// benchFanotify measures what watching a filesystem costs the one who writes to it,
// and the reader of the events. Rounds with and without are interleaved.
func benchFanotify(ctx context.Context, scale float64) (err error) {
	run, err := janitor.Start(ctx, janitor.Options{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, run.Close(context.WithoutCancel(ctx))) }()
	d, err := disk.Make(ctx, run.Dir(), disk.Spec{Name: "containers", SizeBytes: fanotifyDiskBytes})
	if err != nil {
		return err
	}
	root := filepath.Join(run.Dir(), "root")
	snapshot := filepath.Join(d.Path(), "snapshot")
	for _, dir := range []string{filepath.Join(d.Path(), "lower"), filepath.Join(snapshot, "fs"), filepath.Join(snapshot, "work"), root} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	options := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", filepath.Join(d.Path(), "lower"), filepath.Join(snapshot, "fs"), filepath.Join(snapshot, "work"))
	if err := syscall.Mount("overlay", root, "overlay", 0, options); err != nil {
		return fmt.Errorf("mount an overlay: %w", err)
	}
	defer func() { err = errors.Join(err, syscall.Unmount(root, 0)) }()

	var without, with [3][]float64 // ns per create+write+close, unlink, pwrite
	var events int64
	var reading, watched time.Duration
	for round := range max(int(fanotifyRounds*scale), 1) {
		figures, _, _, err := fanotifyRound(ctx, root, nil)
		if err != nil {
			return err
		}
		for i := range without {
			without[i] = append(without[i], figures[i])
		}
		w, err := fanotify.Watch(d.Path())
		if errors.Is(err, fanotify.ErrNotSupported) {
			fmt.Fprintln(os.Stderr, "bench-fanotify: nothing to measure:", err)
			return err
		}
		if err != nil {
			return err
		}
		w.SetFolders(map[string]fanotify.Owner{snapshot: {Kind: "container", ID: "a"}})
		figures, cpu, took, err := fanotifyRound(ctx, root, w)
		if err != nil {
			return err
		}
		for i := range with {
			with[i] = append(with[i], figures[i])
		}
		s := w.Stats()
		events, reading, watched = events+s.Events, reading+cpu, watched+took
		if s.Overflows > 0 {
			fmt.Fprintf(os.Stderr, "bench-fanotify: round %d had %d overflows\n", round, s.Overflows)
		}
	}
	for i, name := range []string{"create", "unlink", "pwrite"} {
		plain, marked := middle(without[i]), middle(with[i])
		report("fanotify."+name+".without_ns", plain, "ns")
		report("fanotify."+name+".with_ns", marked, "ns")
		report("fanotify."+name+".percent", 100*(marked-plain)/plain, "% more, medians")
	}
	report("fanotify.events_per_second", float64(events)/watched.Seconds(), "events that were left after the kernel had put equal ones together")
	report("fanotify.reader_core_percent", 100*reading.Seconds()/watched.Seconds(), "% of one core")
	return nil
}

// fanotifyRound lets another process write, and gives its figures, and what this one
// has taken of the processors meanwhile.
func fanotifyRound(ctx context.Context, root string, w *fanotify.Watcher) (figures [3]float64, cpu, took time.Duration, err error) {
	if w != nil {
		reading, stop := context.WithCancel(ctx)
		ended := make(chan error, 1)
		go func() { ended <- w.Run(reading) }()
		defer func() {
			stop()
			err = errors.Join(err, <-ended)
		}()
	}
	before, began := cpuTime(), time.Now()
	out, err := outputOfHelper(ctx, helperFiles, root)
	if err != nil {
		return figures, 0, 0, err
	}
	cpu, took = cpuTime()-before, time.Since(began)
	fields := strings.Fields(out)
	if len(fields) != len(figures) {
		return figures, 0, 0, fmt.Errorf("the writer said %q", out)
	}
	for i, field := range fields {
		if figures[i], err = strconv.ParseFloat(field, 64); err != nil {
			return figures, 0, 0, err
		}
	}
	return figures, cpu, took, nil
}

// writeFiles is the writer: it prints ns per file that is made, written to and
// closed, per file that is removed, and per write of one byte.
func writeFiles(root string) error {
	dir := filepath.Join(root, "files")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	name := func(i int) string { return filepath.Join(dir, strconv.Itoa(i)) }
	each := func(n int, do func(i int) error) (float64, error) {
		began := time.Now()
		for i := range n {
			if err := do(i); err != nil {
				return 0, err
			}
		}
		return float64(time.Since(began).Nanoseconds()) / float64(n), nil
	}
	create, err := each(fanotifyFiles, func(i int) error { return os.WriteFile(name(i), []byte("x"), 0o600) })
	if err != nil {
		return err
	}
	unlink, err := each(fanotifyFiles, func(i int) error { return os.Remove(name(i)) })
	if err != nil {
		return err
	}
	f, err := os.Create(filepath.Join(root, "one"))
	if err != nil {
		return err
	}
	pwrite, err := each(fanotifyWrites, func(int) error {
		_, err := f.WriteAt([]byte("x"), 0)
		return err
	})
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	fmt.Printf("%f %f %f\n", create, unlink, pwrite)
	return nil
}

func middle(of []float64) float64 {
	sorted := slices.Sorted(slices.Values(of))
	return sorted[len(sorted)/2]
}
