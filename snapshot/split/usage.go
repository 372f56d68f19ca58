package split

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/storage"
	"github.com/containerd/errdefs"
	bolt "go.etcd.io/bbolt"

	"github.com/cleave-cri/cleave/fsstats/index"
	"github.com/cleave-cri/cleave/fsstats/walk"
	"github.com/cleave-cri/cleave/snapshot/split/fence"
	"github.com/cleave-cri/cleave/snapshot/split/rootdir"
)

// measuringAtOnce is how many snapshots of one root are measured at the same time.
// The roots do not wait for each other: one may hang.
const measuringAtOnce = 2

// Usage tells what a snapshot takes on its disk: its whole folder, as `du` counts
// it, so the work folder too, which holds files that are being copied up
// (CTD-125). Vanishing files are no error. For a layer it is measured once.
//
// For what can be written to it is the index's figure, if that is not older than
// UsageMaxAge, or nothing has changed on the filesystem since. If it is older, a
// new one is waited for a moment, and then the old one is given: the index does not
// measure more than its share of a core. One that is older than mayBeBehind is
// not given; it is measured now, however long that takes.
//
// What can't be measured as a whole is an error and never a part of the figure:
// containerd asks for a layer again after an error, and never after an answer
// (CTD-6).
func (s *Snapshotter) Usage(ctx context.Context, key string) (snapshots.Usage, error) {
	var (
		id   string
		info snapshots.Info
		rec  record
	)
	err := s.db.read(ctx, func(ctx context.Context, b *bolt.Bucket) error {
		var err error
		if id, info, _, err = storage.GetInfo(ctx, key); err != nil {
			return err
		}
		rec, err = mustRecord(b, id)
		return err
	})
	if err != nil {
		return snapshots.Usage{}, fmt.Errorf("usage of snapshot %q: %w", key, err)
	}
	if rec.Figure != nil {
		return rec.Figure.usage(), nil
	}
	f, err := s.usageOf(ctx, subject{id: id, root: rec.Root, committed: info.Kind == snapshots.KindCommitted})
	if err != nil {
		return snapshots.Usage{}, fmt.Errorf("usage of snapshot %q: %w", key, err)
	}
	return f.usage(), nil
}

// usageOf gives the figure of a snapshot that has none stored.
func (s *Snapshotter) usageOf(ctx context.Context, what subject) (figure, error) {
	switch {
	case what.committed:
		return s.meter.get(ctx, what, forever)
	case s.opts.UsageMaxAge < 0:
		return s.meter.get(ctx, what, s.opts.UsageMaxAge)
	}
	if f, ok := s.holder.fresh(ctx, what, s.opts.UsageMaxAge); ok {
		return f, nil
	}
	return s.meter.get(ctx, what, s.opts.UsageMaxAge)
}

func (f figure) usage() snapshots.Usage { return snapshots.Usage{Size: f.Bytes, Inodes: f.Inodes} }

// lastFigure gives the newest figure of a snapshot that has none stored, however
// old.
func (s *Snapshotter) lastFigure(what subject) (figure, bool) {
	f, known := s.meter.last(what)
	if h, ok := s.holder.last(what); ok && (!known || h.At.After(f.At)) {
		return h, true
	}
	return f, known
}

// measure walks a snapshot's folder, as fast as it goes.
func (s *Snapshotter) measure(ctx context.Context, what subject) (figure, error) {
	return s.measureAt(ctx, what, 0)
}

// measureAt finds out what a snapshot's folder takes: from the kernel's count of
// its project if it has one, else by a walk, at no more than so many entries a
// second unless that is 0. A figure is always that of all of it. Where there is time,
// which is where the pace is limited, the kernel's count is held against a walk.
func (s *Snapshotter) measureAt(ctx context.Context, what subject, entriesPerSecond int) (figure, error) {
	root, err := s.gate.Root(what.root)
	if err != nil {
		return figure{}, err
	}
	if s.projects == nil || what.root != fence.Container || what.committed {
		return s.walkFolder(ctx, root, what, entriesPerSecond)
	}
	before, counted := s.projects.usage(root, what.id)
	if counted && entriesPerSecond == 0 {
		return before, nil
	}
	walked, err := s.walkFolder(ctx, root, what, entriesPerSecond)
	if err != nil || !counted {
		return walked, err
	}
	after, counted := s.projects.usage(root, what.id)
	if counted && walked.Bytes <= max(before.Bytes, after.Bytes)+escapedBytes {
		return after, nil
	}
	if counted {
		s.projects.distrust(what.id, walked.Bytes-after.Bytes)
	}
	return walked, nil
}

// walkFolder looks at everything in a snapshot's folder.
func (s *Snapshotter) walkFolder(ctx context.Context, root *rootdir.Root, what subject, entriesPerSecond int) (figure, error) {
	dir, err := root.Open(idDir(what.id))
	if errors.Is(err, fs.ErrNotExist) {
		return figure{}, classed(errdefs.ErrNotFound, "its folder is gone: %w", err)
	}
	if err != nil {
		return figure{}, err
	}
	defer dir.Close() //nolint:errcheck // only read
	// The open folder is named through /proc, so that a root swapped behind our back is not measured instead.
	usage, err := s.opts.walk(ctx, rootdir.FDPath(dir)+"/.", walk.Options{EntriesPerSecond: entriesPerSecond})
	if err != nil {
		return figure{}, err
	}
	if usage.Partial {
		return figure{}, classed(errdefs.ErrUnavailable, "%d files or folders of it can't be read, so what it takes is not known: %w", usage.Unreadable, errors.Join(usage.Errors...))
	}
	return figure{Bytes: usage.Bytes, Inodes: usage.Inodes, At: usage.Finished, started: usage.Started, how: index.Walked}, nil
}

// subject is what is measured. A snapshot before and after its commit are two:
// what was measured before may be short of the last writes.
type subject struct {
	id        string
	root      fence.Role
	committed bool
}

// forever is an age that no figure reaches.
const forever = time.Duration(1<<63 - 1)

// errAbandoned is what those get who wait for a measurement whose first asker
// gave up before it began.
var errAbandoned = errors.New("nobody waits for the measurement any more")

// meter answers from memory, and measures each subject once at a time.
type meter struct {
	measure func(context.Context, subject) (figure, error)
	jobs    map[fence.Role]chan job

	mu      sync.Mutex
	figures map[subject]figure  // guarded by mu
	flights map[subject]*flight // guarded by mu
}

// flight is a measurement that somebody waits for.
type flight struct {
	done   chan struct{} // closed when figure and err are there
	figure figure
	err    error
}

type job struct {
	subject subject
	flight  *flight
}

func newMeter(measure func(context.Context, subject) (figure, error)) *meter {
	m := &meter{measure: measure, jobs: map[fence.Role]chan job{}, figures: map[subject]figure{}, flights: map[subject]*flight{}}
	for _, role := range fence.Roles() {
		m.jobs[role] = make(chan job)
	}
	return m
}

// get returns a figure that is not older than maxAge. It waits as long as ctx.
func (m *meter) get(ctx context.Context, what subject, maxAge time.Duration) (figure, error) {
	for {
		m.mu.Lock()
		if f, ok := m.figures[what]; ok && time.Since(f.At) <= maxAge {
			m.mu.Unlock()
			return f, nil
		}
		fl, running := m.flights[what]
		if !running {
			fl = &flight{done: make(chan struct{})}
			m.flights[what] = fl
		}
		m.mu.Unlock()
		if !running {
			select {
			case m.jobs[what.root] <- job{what, fl}:
			case <-ctx.Done():
				m.land(what, fl, figure{}, errAbandoned)
				return figure{}, ctx.Err()
			}
		}
		select {
		case <-fl.done:
			if !errors.Is(fl.err, errAbandoned) {
				return fl.figure, fl.err
			}
		case <-ctx.Done():
			return figure{}, ctx.Err()
		}
	}
}

// run measures snapshots of one root until ctx ends.
func (m *meter) run(ctx context.Context, role fence.Role) {
	for {
		select {
		case <-ctx.Done():
			return
		case j := <-m.jobs[role]:
			f, err := m.measure(ctx, j.subject)
			m.land(j.subject, j.flight, f, err)
		}
	}
}

// land ends a flight. Its figure is kept unless the subject was forgotten.
func (m *meter) land(what subject, fl *flight, f figure, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	fl.figure, fl.err = f, err
	if m.flights[what] == fl {
		delete(m.flights, what)
		if err == nil {
			m.figures[what] = f
		}
	}
	close(fl.done)
}

// forget drops all that is known of an ID; what is being measured now is not
// kept either.
func (m *meter) forget(id string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, root := range fence.Roles() {
		for _, committed := range []bool{false, true} {
			what := subject{id: id, root: root, committed: committed}
			delete(m.figures, what)
			delete(m.flights, what)
		}
	}
}

// last gives the last figure, however old.
func (m *meter) last(what subject) (figure, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f, ok := m.figures[what]
	return f, ok
}
