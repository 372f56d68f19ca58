package split

import (
	"context"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/storage"
	bolt "go.etcd.io/bbolt"
	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/snapshot/split/fault"
)

// maxQueued is how many committed layers the filler remembers. If there are
// more, it looks through the database for all that have no figure.
const maxQueued = 1024

// A layer whose figure could not be found out or stored is tried again after
// firstRetry, and after twice as long each time, up to lastRetry.
const (
	firstRetry = time.Second
	lastRetry  = 5 * time.Minute
)

// filler knows which committed layers have no stored figure yet.
type filler struct {
	wake chan struct{}

	mu     sync.Mutex
	queued map[string]bool // guarded by mu
	all    bool            // guarded by mu: look through the database
	idle   chan struct{}   // guarded by mu; closed while there is nothing to do
	// failed are layers that are tried again, by ID; the ID "" stands for the
	// look through the database. guarded by mu
	failed map[string]attempt
	// failures counts since the start. guarded by mu
	failures int64
}

// attempt is what is known of a layer that has failed.
type attempt struct {
	tries int
	again time.Time
	why   error
}

// newFiller begins with all layers.
func newFiller() *filler {
	f := &filler{wake: make(chan struct{}, 1), queued: map[string]bool{}, all: true, idle: make(chan struct{}), failed: map[string]attempt{}}
	f.wake <- struct{}{}
	return f
}

func (f *filler) add(id string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.queued) >= maxQueued {
		f.all = true
	} else {
		f.queued[id] = true
	}
	select {
	case <-f.idle:
		f.idle = make(chan struct{})
	default:
	}
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// take gives what is to be done now. What has failed stays known as such until it
// succeeds or is gone.
func (f *filler) take(now time.Time) (ids []string, all bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for id := range f.queued {
		ids = append(ids, id)
	}
	all, f.all = f.all, false
	for id, a := range f.failed {
		switch {
		case a.again.After(now) || f.queued[id]:
		case id == "":
			all = true
		default:
			ids = append(ids, id)
		}
	}
	clear(f.queued)
	return ids, all
}

// fail notes that a layer has to be tried again. It reports whether it is the
// first time.
func (f *filler) fail(id string, why error, now time.Time) (first bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	a := f.failed[id]
	pause := lastRetry
	if shift := a.tries; shift < 16 {
		pause = min(firstRetry<<shift, lastRetry)
	}
	f.failed[id] = attempt{tries: a.tries + 1, again: now.Add(pause), why: why}
	f.failures++
	return a.tries == 0
}

// done forgets that a layer has failed.
func (f *filler) done(id string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.failed, id)
}

// untilRetry is how long it is until something is to be tried again.
func (f *filler) untilRetry(now time.Time) time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	pause := lastRetry
	for _, a := range f.failed {
		pause = min(pause, a.again.Sub(now))
	}
	return max(pause, 0)
}

func (f *filler) rest() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.queued) > 0 || f.all {
		return
	}
	select {
	case <-f.idle:
	default:
		close(f.idle)
	}
}

// MeasuringStatus is about layers whose usage is not known.
type MeasuringStatus struct {
	// Failing is how many can't be measured or stored now; each is tried again
	// within 5 minutes. Their usage is not in any sum and is given to nobody.
	Failing int `json:"failing"`
	// Failures counts since the start of the process.
	Failures int64 `json:"failures"`
	// Reason is that of one of those that fail now.
	Reason string `json:"reason,omitempty"`
}

// status tells how many layers wait, and what has failed.
func (f *filler) status() (waiting int, m MeasuringStatus) {
	f.mu.Lock()
	defer f.mu.Unlock()
	m.Failures = f.failures
	first := ""
	for id, a := range f.failed {
		if id != "" {
			m.Failing++
		}
		if m.Reason == "" || id < first {
			first, m.Reason = id, a.why.Error()
		}
	}
	return len(f.queued) + m.Failing, m
}

func (f *filler) waitIdle(ctx context.Context) error {
	f.mu.Lock()
	idle := f.idle
	f.mu.Unlock()
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// fill measures committed layers and stores their figures, until ctx ends.
func (s *Snapshotter) fill(ctx context.Context) {
	for {
		retry := time.NewTimer(s.filler.untilRetry(time.Now()))
		select {
		case <-ctx.Done():
			retry.Stop()
			return
		case <-s.filler.wake:
		case <-retry.C:
		}
		retry.Stop()
		ids, all := s.filler.take(time.Now())
		if len(ids) > 0 || all {
			s.fillOnce(ctx, ids, all)
		}
		s.filler.rest()
	}
}

func (s *Snapshotter) fillOnce(ctx context.Context, ids []string, all bool) {
	fail := func(id string, err error) {
		if ctx.Err() == nil && s.filler.fail(id, err, time.Now()) {
			s.log.Warn("the usage of a layer is not known yet, it is tried again", zap.String("id", id), zap.Error(err))
		}
	}
	subjects, err := s.unfilled(ctx, ids, all)
	if err != nil {
		for _, id := range ids {
			fail(id, err)
		}
		if all {
			fail("", err)
		}
		return
	}
	s.filler.done("")
	gone := map[string]bool{}
	for _, id := range ids {
		gone[id] = true
	}
	figures := map[string]figure{}
	flush := func() {
		if len(figures) == 0 {
			return
		}
		s.opts.faults(fault.UsageMeasured)
		err := s.storeFigures(ctx, figures)
		for id := range figures {
			if err != nil {
				fail(id, err) // the figure is remembered
			} else {
				s.filler.done(id)
			}
		}
		clear(figures)
	}
	const batch = 64
	for _, what := range subjects {
		delete(gone, what.id)
		f, err := s.meter.get(ctx, what, forever)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			fail(what.id, err)
			continue
		}
		if figures[what.id] = f; len(figures) == batch {
			flush()
		}
	}
	flush()
	for id := range gone {
		s.filler.done(id) // removed meanwhile, or somebody else has stored it
	}
}

// unfilled finds the committed layers without a figure: all of them, or those of
// ids.
func (s *Snapshotter) unfilled(ctx context.Context, ids []string, all bool) (subjects []subject, err error) {
	wanted := map[string]bool{}
	for _, id := range ids {
		wanted[id] = true
	}
	err = s.db.read(ctx, func(ctx context.Context, b *bolt.Bucket) error {
		if !all {
			for id := range wanted {
				rec, found, err := getRecord(b, id)
				if err != nil {
					return err
				}
				if found && rec.Figure == nil {
					subjects = append(subjects, subject{id: id, root: rec.Root, committed: true})
				}
			}
			return nil
		}
		byKey, err := idsByKey(ctx)
		if err != nil {
			return ignoringEmpty(err)
		}
		return ignoringEmpty(storage.WalkInfo(ctx, func(_ context.Context, info snapshots.Info) error {
			id := byKey[info.Name]
			rec, found, err := getRecord(b, id)
			if err == nil && found && rec.Figure == nil {
				subjects = append(subjects, subject{id: id, root: rec.Root, committed: true})
			}
			return err
		}, "kind==committed"))
	})
	return subjects, err
}

func (s *Snapshotter) storeFigures(ctx context.Context, figures map[string]figure) error {
	err := s.db.run(ctx, write{do: func(_ context.Context, b *bolt.Bucket) error {
		for id, f := range figures {
			rec, found, err := getRecord(b, id)
			if err != nil {
				return err
			}
			if !found {
				continue // removed meanwhile
			}
			rec.Figure = &f
			if err := putRecord(b, id, rec); err != nil {
				return err
			}
		}
		return nil
	}})
	return err
}
