// Package dump is `cleave dump`: one file for a report of a bug, with what cleave
// knows of itself and of the node, and without what is secret. It may import
// agent; only cmd may import it.
package dump

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/cleave-cri/cleave/agent"
	"github.com/cleave-cri/cleave/agent/flight"
	"github.com/cleave-cri/cleave/agent/page"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/engine/record"
)

const (
	// DefaultRecords is how many of the last records of the flight recorder are taken.
	DefaultRecords = 200
	// recordsBytes is the most that they may have together; older ones are left out.
	recordsBytes = 64 << 20
	// journalLines is the most that is taken of the journal.
	journalLines = 20_000
	// partTimeout bounds each part, so that one that hangs does not keep the others from being written.
	partTimeout = 30 * time.Second
)

// Options are what a dump is made of.
type Options struct {
	// Version is cleave's own.
	Version string
	Config  config.Config
	// ConfigProblem says why Config is not the one of the file; nil if it is.
	ConfigProblem error
	// Records is how many of the last records of the flight recorder are taken.
	Records int
	// JournalSince is how far back the journal's lines of cleave are taken, 0 for none of them.
	JournalSince time.Duration

	// examine and journal stand in for the node in tests.
	examine func(context.Context, config.Config) (any, error)
	journal func(context.Context, time.Duration) ([]byte, error)
}

// part is one file of a dump. What get gives is written also if there is an error.
type part struct {
	name string
	get  func(context.Context) ([]byte, error)
}

func (o Options) parts() []part {
	socket := o.Config.Control.Endpoint.Path()
	if o.examine == nil {
		o.examine = func(ctx context.Context, cfg config.Config) (any, error) { return agent.Examine(ctx, cfg) }
	}
	if o.journal == nil {
		o.journal = journal
	}
	parts := []part{
		{"versions.json", asJSON(func(context.Context) (any, error) { return o.versions() })},
		{"config.yaml", func(context.Context) ([]byte, error) {
			text, err := o.Config.YAML()
			return text, errors.Join(err, o.ConfigProblem)
		}},
		{"status.json", asJSON(func(ctx context.Context) (any, error) { return agent.FetchStatus(ctx, socket) })},
		{"usage.json", asJSON(func(ctx context.Context) (any, error) { return agent.FetchUsage(ctx, socket) })},
		{"metrics.txt", func(ctx context.Context) ([]byte, error) {
			text, err := agent.FetchMetrics(ctx, socket)
			return []byte(text), err
		}},
		{"doctor.json", asJSON(func(ctx context.Context) (any, error) { return o.examine(ctx, o.Config) })},
		{"flight.jsonl", func(context.Context) ([]byte, error) {
			return lastRecords(filepath.Join(o.Config.StateDir, flight.FileName), o.Records)
		}},
	}
	if o.JournalSince > 0 {
		parts = append(parts, part{"journal.txt", func(ctx context.Context) ([]byte, error) { return o.journal(ctx, o.JournalSince) }})
	}
	return parts
}

func asJSON(get func(context.Context) (any, error)) func(context.Context) ([]byte, error) {
	return func(ctx context.Context) ([]byte, error) {
		value, err := get(ctx)
		if err != nil {
			return nil, err
		}
		var b bytes.Buffer
		err = page.JSON(&b, value)
		return b.Bytes(), err
	}
}

// versions are those of what is known without asking. The runtime's is in the status.
func (o Options) versions() (any, error) {
	kernel, err := os.ReadFile("/proc/sys/kernel/osrelease")
	return struct {
		Cleave   string    `json:"cleave"`
		Go       string    `json:"go"`
		System   string    `json:"system"`
		Kernel   string    `json:"kernel"`
		DumpedAt time.Time `json:"dumpedAt"`
	}{o.Version, runtime.Version(), runtime.GOOS + "/" + runtime.GOARCH, strings.TrimSpace(string(kernel)), time.Now().UTC()}, err
}

// lastRecords are the last records of a flight recorder, a line each.
func lastRecords(path string, most int) (_ []byte, err error) {
	// Opening a named pipe would wait for a writer without O_NONBLOCK (fifo(7)).
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("read records: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("read records: %w", err)
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("read records: %s is not a regular file (%s)", path, info.Mode())
	}
	lines, err := flight.Lines(f, info.Size())
	if err != nil {
		return nil, fmt.Errorf("read records of %s: %w", path, err)
	}
	var kept [][]byte
	held := 0
	scanner := bufio.NewScanner(lines)
	scanner.Buffer(nil, record.MaxBytes+1)
	for scanner.Scan() {
		kept = append(kept, append(bytes.Clone(scanner.Bytes()), '\n'))
		held += len(kept[len(kept)-1])
		for len(kept) > most || held > recordsBytes {
			held -= len(kept[0])
			kept = kept[1:]
		}
	}
	if err := scanner.Err(); err != nil {
		return bytes.Join(kept, nil), fmt.Errorf("read records of %s: %w", path, err)
	}
	return bytes.Join(kept, nil), nil
}

// journal asks systemd's journal for what cleave's units said.
func journal(ctx context.Context, since time.Duration) ([]byte, error) {
	cmd := exec.CommandContext(ctx, "journalctl", "--unit=cleave.service", "--unit=cleave-snapshotter.service", "--no-pager", "--output=short-iso-precise",
		fmt.Sprintf("--since=-%ds", int64(since.Seconds())), fmt.Sprintf("--lines=%d", journalLines))
	out, err := cmd.Output()
	var failed *exec.ExitError
	if errors.As(err, &failed) {
		err = fmt.Errorf("%w: %s", err, bytes.TrimSpace(failed.Stderr))
	}
	if err != nil {
		err = fmt.Errorf("ask the journal: %w", err)
	}
	return out, err
}

// Write writes a dump: a tar archive, compressed with gzip. What can't be had is told in its index.txt; the error is about writing
// alone.
func Write(ctx context.Context, w io.Writer, o Options) error {
	clean := cleaner(o.Config)
	compressed := gzip.NewWriter(w)
	archive := tar.NewWriter(compressed)
	now := time.Now()
	add := func(name string, content []byte) error {
		err := archive.WriteHeader(&tar.Header{Name: "cleave-dump/" + name, Mode: 0o600, Size: int64(len(content)), ModTime: now})
		if err == nil {
			_, err = archive.Write(content)
		}
		if err != nil {
			return fmt.Errorf("write %s of the dump: %w", name, err)
		}
		return nil
	}
	var index strings.Builder
	index.WriteString("Names of pods, images, folders and this node are in here. Tokens, passwords and keys, kubeconfigs and the logs of evicted pods are not.\n\n")
	for _, p := range o.parts() {
		content, err := limited(ctx, p)
		if ctx.Err() != nil {
			return fmt.Errorf("write a dump: %w", context.Cause(ctx))
		}
		content, removed := clean.remove(content)
		fmt.Fprintf(&index, "%s: %d bytes", p.name, len(content))
		if removed > 0 {
			fmt.Fprintf(&index, ", %d secrets removed", removed)
		}
		if err != nil {
			why, _ := clean.remove([]byte(strings.ReplaceAll(err.Error(), "\n", "; ")))
			fmt.Fprintf(&index, ", not whole: %s", why)
		}
		index.WriteString("\n")
		if len(content) == 0 && err != nil {
			continue
		}
		if err := add(p.name, content); err != nil {
			return err
		}
	}
	if err := add("index.txt", []byte(index.String())); err != nil {
		return err
	}
	if err := errors.Join(archive.Close(), compressed.Close()); err != nil {
		return fmt.Errorf("write the end of the dump: %w", err)
	}
	return nil
}

// limited gets a part, or gives up: a read of a disk that hangs does not look at ctx.
func limited(ctx context.Context, p part) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, partTimeout)
	defer cancel()
	type answer struct {
		content []byte
		err     error
	}
	got := make(chan answer, 1)
	go func() { // ends when the part answers, at the latest with the process
		content, err := p.get(ctx)
		got <- answer{content, err}
	}()
	select {
	case a := <-got:
		return a.content, a.err
	case <-ctx.Done():
	}
	select {
	case a := <-got: // at the last moment, or it does look at ctx
		return a.content, a.err
	case <-time.After(time.Second):
		return nil, fmt.Errorf("it does not answer within %s", partTimeout)
	}
}

// Create writes a dump into a new file that only root may read. An empty name is one with node and time, in this folder; the name is
// returned. Nothing is left of a dump that could not be written.
func Create(ctx context.Context, name string, o Options) (_ string, err error) {
	if name == "" {
		host, err := os.Hostname()
		if err != nil {
			return "", fmt.Errorf("name the dump: %w: give a name", err)
		}
		name = fmt.Sprintf("cleave-dump-%s-%s.tar.gz", host, time.Now().UTC().Format("20060102T150405Z"))
	}
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL|syscall.O_NOFOLLOW, 0o600)
	if errors.Is(err, os.ErrExist) {
		return "", fmt.Errorf("make the dump: %w: choose another name", err)
	}
	if err != nil {
		return "", fmt.Errorf("make the dump: %w", err)
	}
	if err := errors.Join(Write(ctx, f, o), f.Close()); err != nil {
		err = errors.Join(err, os.Remove(name))
		if errors.Is(err, syscall.ENOSPC) {
			err = fmt.Errorf("%w: choose a name on a disk that has space, or - for standard output", err)
		}
		return "", err
	}
	return name, nil
}
