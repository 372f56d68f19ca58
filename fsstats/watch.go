package fsstats

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
)

const (
	// watchPeriod is how often a Watcher asks for figures. A question is a
	// handful of system calls that touch no disk.
	watchPeriod = time.Second
	// watchGap is the least time between two questions about one role: starting
	// a pod changes the mount table some ten times.
	watchGap = 50 * time.Millisecond
)

// Standing is what is known of one role's filesystem.
type Standing struct {
	Role Role `json:"role"`
	// Configured is the path that was asked about.
	Configured string `json:"configured"`
	// Last is the last good answer, nil before the first. Its figures are as old
	// as their MeasuredAt says. It is not forgotten when the path stops
	// answering, and is replaced by whatever the path leads to later.
	Last *Place `json:"last,omitempty"`
	// Problem says why the last question had no answer, nil if it had one. It
	// wraps [ErrNoAnswer] if the filesystem is stuck.
	Problem error `json:"-"`
	// ProblemSince is when the questions began to have none.
	ProblemSince time.Time `json:"problemSince,omitzero"`
}

// Good says whether the last question was answered.
func (s Standing) Good() bool { return s.Problem == nil && s.Last != nil }

// Stuck says whether the filesystem does not answer at all.
func (s Standing) Stuck() bool { return errors.Is(s.Problem, ErrNoAnswer) }

// View is what a Watcher knows at one moment. It is not changed once it is
// published.
type View struct {
	// Layout has the roles whose last question was answered. What deletes or
	// evicts uses this one.
	Layout Layout
	// LastGood has the same and, for the other roles, their last good places. It
	// is for reports and for answers that carry their age.
	LastGood Layout
	// Standings has every role with a path, in the order of [Roles].
	Standings []Standing
	// Moves counts how often a role's place became known or became another one.
	Moves uint64
}

// Standing gives what is known of a role; ok is false if it has no path.
func (v *View) Standing(r Role) (s Standing, ok bool) {
	i := slices.IndexFunc(v.Standings, func(s Standing) bool { return s.Role == r })
	if i < 0 {
		return Standing{}, false
	}
	return v.Standings[i], true
}

// Watcher keeps the figures of all roles fresh. Each role is looked after by a
// worker of its own: one whose filesystem hangs is marked so and holds up no
// other. A change of the mount table is noticed at once, so that the layout is
// never older than what it describes.
type Watcher struct {
	prober *Prober
	// mounts calls changed after each change of the mount table, until ctx ends.
	mounts func(ctx context.Context, changed func()) error
	kicks  map[Role]chan struct{}
	moved  chan struct{}
	newest atomic.Pointer[View]

	mu    sync.Mutex
	known map[Role]*Standing // guarded by mu
	moves uint64             // guarded by mu
}

// NewWatcher returns a Watcher for this process's mount namespace that has no
// paths yet. Close ends it when Run has returned.
func NewWatcher() (*Watcher, error) {
	src, err := newCachedSource()
	if err != nil {
		return nil, err
	}
	return newWatcher(&Prober{src: src, now: time.Now, limit: probeLimit}, watchMounts), nil
}

func newWatcher(p *Prober, mounts func(context.Context, func()) error) *Watcher {
	w := &Watcher{
		prober: p,
		mounts: mounts,
		kicks:  map[Role]chan struct{}{},
		moved:  make(chan struct{}, 1),
		known:  map[Role]*Standing{},
	}
	for _, r := range Roles() {
		w.kicks[r] = make(chan struct{}, 1)
	}
	w.newest.Store(&View{})
	return w
}

// Close frees what NewWatcher took. It is called after Run has returned; a question
// that its Prober is still asked then ends with os.ErrClosed.
func (w *Watcher) Close() error {
	if c, ok := w.prober.src.(interface{ close() error }); ok {
		return c.close()
	}
	return nil
}

// Prober gives a Prober that reads the mount table only after it has changed. It
// is good until Close.
func (w *Watcher) Prober() *Prober { return w.prober }

// View gives the newest that is known. It never waits.
func (w *Watcher) View() *View { return w.newest.Load() }

// Moved is received from after a role's place became known or became another
// one. Several moves may be told as one.
func (w *Watcher) Moved() <-chan struct{} { return w.moved }

// SetPaths says which path each role has from now on. A role without a path is
// forgotten; one with another path than before is asked about at once, and what
// was known of the old path is dropped.
func (w *Watcher) SetPaths(paths map[Role]string) {
	w.mu.Lock()
	for _, r := range Roles() {
		path, before := paths[r], w.known[r]
		switch {
		case path == "":
			delete(w.known, r)
		case before == nil || before.Configured != path:
			w.known[r] = &Standing{Role: r, Configured: path}
			w.kick(r)
		}
	}
	w.publishLocked()
	w.mu.Unlock()
}

// Kick has all roles asked about at once.
func (w *Watcher) Kick() {
	for _, r := range Roles() {
		w.kick(r)
	}
}

func (w *Watcher) kick(r Role) {
	select {
	case w.kicks[r] <- struct{}{}:
	default: // one is waiting already
	}
}

// Run keeps the figures fresh until ctx ends. An error is that changes of the
// mount table can't be noticed; figures are then not kept fresh any more.
func (w *Watcher) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return w.mounts(ctx, w.Kick) })
	for _, r := range Roles() {
		g.Go(func() error {
			w.look(ctx, r)
			return nil
		})
	}
	return g.Wait()
}

// look looks after one role.
func (w *Watcher) look(ctx context.Context, r Role) {
	for {
		began := time.Now()
		if path := w.path(r); path != "" {
			layout, err := w.prober.Resolve(map[Role]string{r: path})
			w.record(r, path, layout, err)
		}
		if !wait(ctx, watchPeriod, w.kicks[r]) || !wait(ctx, time.Until(began.Add(watchGap)), nil) {
			return
		}
	}
}

// wait waits for d or until early is received from; false means that ctx ended.
func wait(ctx context.Context, d time.Duration, early <-chan struct{}) bool {
	timer := time.NewTimer(max(d, 0))
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-early:
	case <-timer.C:
	}
	return ctx.Err() == nil
}

func (w *Watcher) path(r Role) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	if s := w.known[r]; s != nil {
		return s.Configured
	}
	return ""
}

// record notes the answer to a question about a role's path, unless the role has
// another one meanwhile.
func (w *Watcher) record(r Role, path string, answer Layout, problem error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	before := w.known[r]
	if before == nil || before.Configured != path {
		return
	}
	s := *before
	place, ok := answer.Get(r)
	switch {
	case ok:
		if s.Last == nil || !s.Last.sameSpot(place) {
			w.moves++
			defer w.tellMoved()
		}
		s.Last, s.Problem, s.ProblemSince = &place, nil, time.Time{}
	default:
		if s.Problem == nil {
			s.ProblemSince = w.prober.now()
		}
		s.Problem = problem
	}
	w.known[r] = &s
	w.publishLocked()
}

func (w *Watcher) tellMoved() {
	select {
	case w.moved <- struct{}{}:
	default:
	}
}

// sameSpot says whether p and q are one place; the figures don't matter.
func (p Place) sameSpot(q Place) bool {
	return p.Path == q.Path && p.Missing == q.Missing && p.Reported == q.Reported && p.Filesystem.Same(q.Filesystem)
}

func (w *Watcher) publishLocked() {
	v := &View{Moves: w.moves}
	for _, r := range Roles() {
		s := w.known[r]
		if s == nil {
			continue
		}
		v.Standings = append(v.Standings, *s)
		if s.Last == nil {
			continue
		}
		v.LastGood.Places = append(v.LastGood.Places, *s.Last)
		if s.Problem == nil {
			v.Layout.Places = append(v.Layout.Places, *s.Last)
		}
	}
	v.Layout, v.LastGood = unify(v.Layout), unify(v.LastGood)
	w.newest.Store(v)
}
