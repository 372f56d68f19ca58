// Package writer writes as a scenario says: so many bytes or files at once, so
// many a second, from when to when, into a file that may be deleted while it is
// open. It counts for how long there was no space for it.
//
// It is what containers of the lab run, and processes of its host. It allocates
// what it writes: usage is allocated blocks.
package writer

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/cleave-cri/cleave/lab/scenario"
)

const (
	// pace is how often a steady writer writes.
	pace = 100 * time.Millisecond
	// chunkBytes is the most that one write(2) writes.
	chunkBytes = 1 << 20
	// filesPerFolder keeps folders small.
	filesPerFolder = 1000
)

// Report is told how long a writer has had no space, each time that grows.
type Report func(noSpace time.Duration)

// Run writes as w says, below dir or, for a log, to standard output, until ctx
// ends. name is for the names of its files. Having no space is no error.
func Run(ctx context.Context, w scenario.Write, dir, name string, report Report) error {
	one := &stream{spec: w, dir: filepath.Join(dir, name), report: report}
	if w.To != scenario.ToLog {
		// Until there is room for the folder nothing can be written.
		if err := one.retry(ctx, func() error { return os.MkdirAll(one.dir, 0o755) }); err != nil {
			return ended(ctx, err)
		}
	}
	err := one.run(ctx)
	if one.file != nil {
		err = errors.Join(err, one.file.Close())
	}
	return ended(ctx, err)
}

// ended takes the end of ctx for no error.
func ended(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// stream is one stream of writes on its way.
type stream struct {
	spec   scenario.Write
	dir    string
	report Report

	file          *os.File
	bytes, inodes int64
	lack          time.Duration
}

func (s *stream) run(ctx context.Context) error {
	began := time.Now()
	if s.spec.AtOnceBytes > 0 {
		if err := s.retry(ctx, func() error { return s.write(ctx, s.spec.AtOnceBytes-s.bytes) }); err != nil {
			return err
		}
	}
	if s.spec.AtOnceInodes > 0 {
		if err := s.retry(ctx, func() error { return s.flood(ctx, s.spec.AtOnceInodes-s.inodes) }); err != nil {
			return err
		}
	}
	atOnceBytes, atOnceInodes := s.bytes, s.inodes
	tick := time.NewTicker(pace)
	defer tick.Stop()
	unlinked := s.spec.UnlinksAfter == nil
	var lostBytes, lostInodes int64
	for {
		now := time.Since(began)
		if !unlinked && now >= *s.spec.UnlinksAfter && s.file != nil {
			if err := os.Remove(s.file.Name()); err != nil {
				return fmt.Errorf("delete the file that is written to: %w", err)
			}
			unlinked = true
		}
		due := active(s.spec, now).Seconds()
		wantBytes := s.bounded(atOnceBytes+int64(due*float64(s.spec.BytesPerSecond))) - s.bytes - lostBytes
		wantInodes := atOnceInodes + int64(due*float64(s.spec.InodesPerSecond)) - s.inodes - lostInodes
		var err error
		if wantBytes > 0 {
			err = s.write(ctx, wantBytes)
		}
		if wantInodes > 0 && err == nil {
			err = s.flood(ctx, wantInodes)
		}
		switch {
		case errors.Is(err, syscall.ENOSPC):
			// What does not fit is lost, as what a program logs is.
			s.short(pace)
			lostBytes += max(0, s.bounded(atOnceBytes+int64(due*float64(s.spec.BytesPerSecond)))-s.bytes-lostBytes)
			lostInodes += max(0, atOnceInodes+int64(due*float64(s.spec.InodesPerSecond))-s.inodes-lostInodes)
		case err != nil:
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// active is for how long a steady writer has written at a time after its start.
func active(w scenario.Write, now time.Duration) time.Duration {
	if w.Until > 0 {
		now = min(now, w.Until)
	}
	return max(0, now-w.From)
}

func (s *stream) bounded(bytes int64) int64 {
	if s.spec.AtMostBytes > 0 {
		return min(bytes, s.spec.AtMostBytes)
	}
	return bytes
}

func (s *stream) short(d time.Duration) {
	s.lack += d
	s.report(s.lack)
}

// retry does something until there is space for it.
func (s *stream) retry(ctx context.Context, do func() error) error {
	tick := time.NewTicker(pace)
	defer tick.Stop()
	for {
		err := do()
		if !errors.Is(err, syscall.ENOSPC) {
			return err
		}
		s.short(pace)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// write appends bytes to the stream's one file, or its log, until ctx ends.
func (s *stream) write(ctx context.Context, bytes int64) error {
	if s.file == nil && s.spec.To != scenario.ToLog {
		file, err := os.OpenFile(filepath.Join(s.dir, "data"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
		if err != nil {
			return fmt.Errorf("make the file to write to: %w", err)
		}
		s.file = file
	}
	to := s.file
	text := block()
	if s.spec.To == scenario.ToLog {
		to, text = os.Stdout, lines()
	}
	for bytes > 0 {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		n, err := to.Write(text[:min(bytes, int64(len(text)))])
		s.bytes, bytes = s.bytes+int64(n), bytes-int64(n)
		if err != nil {
			return fmt.Errorf("write: %w", err)
		}
	}
	return nil
}

// flood makes empty files, until ctx ends.
func (s *stream) flood(ctx context.Context, files int64) error {
	for range files {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		folder := filepath.Join(s.dir, fmt.Sprintf("files-%d", s.inodes/filesPerFolder))
		if s.inodes%filesPerFolder == 0 {
			if err := os.MkdirAll(folder, 0o755); err != nil {
				return fmt.Errorf("make a folder: %w", err)
			}
		}
		file, err := os.Create(filepath.Join(folder, fmt.Sprint(s.inodes)))
		if err != nil {
			return fmt.Errorf("make a file: %w", err)
		}
		if err := file.Close(); err != nil {
			return fmt.Errorf("make a file: %w", err)
		}
		s.inodes++
	}
	return nil
}

// block is what is written to files. It is not zeroes, which a filesystem may
// leave out.
func block() []byte {
	b := make([]byte, chunkBytes)
	for i := range b {
		b[i] = byte(i*7 + i>>8)
	}
	return b
}

// lines is what is written to logs: lines of 100 bytes.
func lines() []byte {
	const width = 100
	b := make([]byte, chunkBytes/width*width)
	for i := range b {
		b[i] = 'a' + byte(i*7%23)
		if i%width == width-1 {
			b[i] = '\n'
		}
	}
	return b
}
