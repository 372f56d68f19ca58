// Package index is the usage index: who holds how many bytes on which filesystem,
// kept up to date with as little work as possible. It is a library: the agent
// holds one for a node, the snapshotter one for its snapshots. It imports
// fsstats/walk of this module and nothing else.
//
// # What it knows
//
// Owners have parts: a container has a writable layer and a log folder. A part is
// a tree of files, or a figure that somebody else gives ([Index.Put]). A part below
// another one counts for itself only, so that nothing counts twice. Each figure
// tells bytes, inodes, when it was measured and how.
//
// # When it measures
//
// The order of work, not its truth, follows from cheap signs:
//
//   - Used bytes and inodes of a filesystem are asked for each second. Where they
//     have not moved since a part was measured, the part waits.
//   - Where they have, those come first whose owner has written something
//     ([Options.Written]), and of these the ones that grow most; then the others,
//     each less and less often while its figure stays the same.
//   - What was measured for that reason is brought up to date each second by a look
//     at what has changed in the tree ([Updated]), which costs a hundredth. Such a
//     look may miss something, so it never counts as a measurement: it follows
//     every few seconds all the same.
//   - Everything is measured again before it is MaxAge old, slowly, whatever the
//     signs say: a file that was replaced by one of the same size moves nothing.
//     This bounds the age of each figure, and the age is told.
//
// Measuring takes no more than CorePercent of one core, first figures aside. A
// filesystem that hangs holds up nobody but itself: each has its own workers.
//
// # What it costs when nothing happens
//
// A question about each filesystem each second, and the slow refresh.
package index

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cleave-cri/cleave/fsstats/walk"
)

// Kind says what sort of owner one is, such as "container". It is the caller's
// word.
type Kind string

// Owner is somebody who holds bytes.
type Owner struct {
	Kind Kind
	ID   string
	// Rank is how soon its first figures are wanted: a higher one first.
	Rank  int
	Parts []Part
}

// Part is something that an owner has on one filesystem.
type Part struct {
	// Name tells an owner's parts apart.
	Name string
	// Path is the folder that is measured: absolute, without symlinks. Empty means
	// that the figure comes by [Index.Put].
	Path string
}

// Key names a part.
type Key struct {
	Kind Kind   `json:"kind"`
	ID   string `json:"id"`
	Part string `json:"part"`
}

func (k Key) compare(o Key) int {
	return cmp.Or(cmp.Compare(k.Kind, o.Kind), cmp.Compare(k.ID, o.ID), cmp.Compare(k.Part, o.Part))
}

// String is for people and errors.
func (k Key) String() string { return fmt.Sprintf("%s %s, %s", k.Kind, k.ID, k.Part) }

// FS names a filesystem for as long as it is mounted: what the caller's Space
// says. Two filesystems that were mounted one after the other must not have the
// same name, even if they had the same device number.
type FS string

// Space is what is used on a filesystem at one moment, by everybody.
type Space struct {
	FS        FS    `json:"fs"`
	UsedBytes int64 `json:"usedBytes"`
	// UsedInodes is nil where the kernel does not count them (btrfs).
	UsedInodes *int64 `json:"usedInodes,omitempty"`
	// At is just before the kernel was asked.
	At time.Time `json:"at"`
}

// How a figure came about. Other words are the caller's.
const (
	// Walked: each file was looked at.
	Walked = "walk"
	// Updated: each file was looked at some seconds ago, at Figure.Proven, and what
	// has changed in the tree since then.
	Updated = "walk+changes"
	// Given: somebody else measured it.
	Given = "given"
)

// Figure is what a part takes.
type Figure struct {
	Bytes  int64 `json:"bytes"`
	Inodes int64 `json:"inodes"`
	// Started and Finished frame the measurement: what was written before Started
	// is in the figure, what was written later may be. Of an Updated figure that is
	// true of files that came, went or were being written to; of any other it is of
	// what was written before Proven.
	Started  time.Time `json:"started"`
	Finished time.Time `json:"finished"`
	// Proven is when the last measurement of everything began, if that was not at
	// Started.
	Proven time.Time `json:"proven,omitzero"`
	How    string    `json:"how"`
	// Partial says that it is a lower bound.
	Partial bool `json:"partial,omitempty"`
	// Cost is how long measuring has kept a processor busy. 0 is unknown: then it
	// is guessed from the number of inodes.
	Cost time.Duration `json:"-"`
	// Memory is what was remembered of the tree, nil for nothing. The index keeps it
	// to itself: a View's Figures have none.
	Memory Memory `json:"-"`
}

// ProvenAt is when the last measurement of everything began.
func (f Figure) ProvenAt() time.Time {
	if f.Proven.IsZero() {
		return f.Started
	}
	return f.Proven
}

// Memory is what a measurement remembers of a tree, so that its figures can be
// brought up to date with little work. A [walk.Memory] is one. It is used by one
// goroutine at a time.
type Memory interface {
	// Again looks at what has changed in the tree since the last look, and at the
	// files at the paths of look, which are relative to the tree. After an error the
	// Memory is of no use.
	Again(ctx context.Context, opt walk.Options, look []string) (walk.Fresh, error)
	// Folders is how many directories are remembered.
	Folders() int
}

// Subject is what has to be measured.
type Subject struct {
	Key  Key
	Path string
	// Without are folders below Path that other parts count.
	Without []string
	// EntriesPerSecond is how fast to go, 0 for any.
	EntriesPerSecond int
	// RememberFolders is how many directories may be remembered in the Figure's
	// Memory; 0 if none is wanted. A MeasureFunc may always go without.
	RememberFolders int
}

// MeasureFunc measures a part. [Walk] is one; a caller may look for a quota of the
// kernel's first. A part that does not exist is an error; one that could be read in
// part is none, but a partial Figure.
type MeasureFunc func(ctx context.Context, what Subject) (Figure, error)

// Walk is the MeasureFunc that looks at each file.
func Walk(ctx context.Context, what Subject) (Figure, error) {
	var (
		u   walk.Usage
		m   *walk.Memory
		err error
	)
	opt := walk.Options{EntriesPerSecond: what.EntriesPerSecond, Without: what.Without}
	cost := CostOf(func() {
		if what.RememberFolders > 0 {
			u, m, err = walk.Remember(ctx, what.Path, opt, what.RememberFolders)
		} else {
			u, err = walk.Measure(ctx, what.Path, opt)
		}
	})
	f := Figure{Bytes: u.Bytes, Inodes: u.Inodes, Started: u.Started, Finished: u.Finished, How: Walked, Partial: u.Partial, Cost: cost}
	if m != nil {
		f.Memory = m
	}
	return f, err
}

// update gives the figure of what that a look at its changes since before makes.
// looked is how many inodes were looked at.
func update(ctx context.Context, what Subject, before Figure, memory Memory, look []string) (f Figure, looked int64, err error) {
	var fresh walk.Fresh
	cost := CostOf(func() { fresh, err = memory.Again(ctx, walk.Options{Without: what.Without}, look) })
	f = Figure{
		Bytes: fresh.Bytes, Inodes: fresh.Inodes, Started: fresh.Started, Finished: fresh.Finished,
		Proven: before.ProvenAt(), How: Updated, Cost: cost, Memory: memory,
	}
	return f, fresh.Looked, err
}

// Options say how an index works. Space is needed, everything else has a default.
type Options struct {
	// Space says what is used on the filesystem of a path. It is called from two
	// goroutines and has to return within seconds also where a filesystem hangs.
	// An error that wraps fs.ErrNotExist means that the path is not there, any
	// other that nothing is known at the moment.
	Space func(path string) (Space, error)
	// Measure measures a part; [Walk] unless set.
	Measure MeasureFunc
	// Written gives a number that grows when an owner may have written something,
	// and false where that is not known. It is a hint. It is asked only for owners
	// on a filesystem on which something has changed. nil knows of nobody.
	Written func(o Kind, id string) (counter uint64, ok bool)
	// Writing gives files that an owner's processes have open to write to, absolute
	// paths as the parts' are. It is a hint, and asked before each look at what has
	// changed: a file that nobody wrote to for half a minute and that is written to
	// again is then found at once, and without it by the next measurement. It must
	// be quick. nil knows of none.
	Writing func(o Kind, id string) []string
	// Known are parts of what nobody owns on a filesystem, for reports.
	Known func(fs FS) []Known

	// Period is the time between two looks at the filesystems. Default 1 s.
	Period time.Duration
	// HotEvery is the shortest time between two measurements of a part whose owner
	// writes. Default 1 s; more for a large tree, by CorePercent.
	HotEvery time.Duration
	// ProveEvery is that time where figures are brought up to date between two
	// measurements, which is then done each HotEvery. Default 5 s.
	ProveEvery time.Duration
	// MostFolders is how many directories are remembered for that, of all trees
	// together, at some 200 bytes each. Default 200 000; less than 0 is none.
	MostFolders int
	// SuspectEvery is the shortest time between two measurements of another part
	// while something on its filesystem changes. It doubles, up to SuspectMax, each
	// time that the figure has not changed. Defaults 10 s and 5 min.
	SuspectEvery, SuspectMax time.Duration
	// MaxAge is when every figure has been measured again, give or take what the
	// slow refresh takes. Default 1 h.
	MaxAge time.Duration
	// CorePercent is how much of one core measuring may take, in percent, first
	// figures and the slow refresh aside. Default 2.7.
	CorePercent float64
	// RefreshEntriesPerSecond is how fast the slow refresh goes, at about 0.15 % of
	// a core for 1 000. Default 1 000, or as much as MaxAge needs.
	RefreshEntriesPerSecond int
	// StateFile is where figures survive a restart; empty means nowhere.
	StateFile string
	// SaveEvery is how often it is written. Default 1 min.
	SaveEvery time.Duration
}

func (o Options) withDefaults() Options {
	if o.Measure == nil {
		o.Measure = Walk
	}
	if o.Written == nil {
		o.Written = func(Kind, string) (uint64, bool) { return 0, false }
	}
	if o.Known == nil {
		o.Known = func(FS) []Known { return nil }
	}
	o.Period = cmp.Or(o.Period, time.Second)
	if o.Writing == nil {
		o.Writing = func(Kind, string) []string { return nil }
	}
	o.HotEvery = cmp.Or(o.HotEvery, time.Second)
	o.ProveEvery = max(cmp.Or(o.ProveEvery, 5*time.Second), o.HotEvery)
	o.MostFolders = max(cmp.Or(o.MostFolders, 200_000), 0)
	o.SuspectEvery = cmp.Or(o.SuspectEvery, 10*time.Second)
	o.SuspectMax = max(cmp.Or(o.SuspectMax, 5*time.Minute), o.SuspectEvery)
	o.MaxAge = cmp.Or(o.MaxAge, time.Hour)
	o.CorePercent = cmp.Or(o.CorePercent, 2.7)
	o.RefreshEntriesPerSecond = cmp.Or(o.RefreshEntriesPerSecond, 1000)
	o.SaveEvery = cmp.Or(o.SaveEvery, time.Minute)
	return o
}

// View is everything that is known at one moment. It is not changed once it is
// published.
type View struct {
	// At is when it was made; each figure has its own time.
	At time.Time
	// Owners are in the order of kind and ID.
	Owners []OwnerView
	// Filesystems are those that parts are on, in the order of their names.
	Filesystems []Attribution
	// Problem says what keeps the index as a whole from working well, such as a
	// state file that can't be read; empty if nothing does.
	Problem string
	// Entries counts the inodes that were looked at since the start, by reason.
	Entries Entries
}

// Entries counts work. Update is looks at what has changed.
type Entries struct {
	First, Update, Hot, Suspect, Refresh int64
}

// OwnerView is one owner.
type OwnerView struct {
	Kind  Kind
	ID    string
	Parts []PartView
}

// PartView is one part of an owner.
type PartView struct {
	Name string
	Path string
	// FS is where it is, empty while unknown.
	FS FS
	// Figure is the last good figure, nil before the first: unknown is not zero.
	Figure *Figure
	// Unmoved is until when what is used on its filesystem has not moved since the
	// figure was begun, as far as was looked: a figure that is older than its last
	// measurement looks. It is Figure.Finished where it has moved, and for a figure
	// that is given; zero without a figure.
	Unmoved time.Time
	// Gone says that its folder is not there.
	Gone bool
	// Problem says why there is no newer one.
	Problem string
	// Measuring is since when it is being measured, zero if it is not: a long time
	// means a very large tree or a disk that hangs. The slow refresh, which may take
	// long, does not count.
	Measuring time.Time
}

// Owner finds an owner; ok is false if there is none.
func (v *View) Owner(kind Kind, id string) (o OwnerView, ok bool) {
	i, ok := slices.BinarySearchFunc(v.Owners, Key{Kind: kind, ID: id}, func(o OwnerView, k Key) int {
		return Key{Kind: o.Kind, ID: o.ID}.compare(k)
	})
	if !ok {
		return OwnerView{}, false
	}
	return v.Owners[i], true
}

// Part finds a part of an owner.
func (o OwnerView) Part(name string) (p PartView, ok bool) {
	i := slices.IndexFunc(o.Parts, func(p PartView) bool { return p.Name == name })
	if i < 0 {
		return PartView{}, false
	}
	return o.Parts[i], true
}

// Index is a usage index. Its methods may be called from several goroutines and
// never wait for a measurement.
type Index struct {
	opt     Options
	wake    chan struct{}
	changed chan struct{}
	newest  atomic.Pointer[View]

	mu   sync.Mutex
	book *book // guarded by mu
}

// New returns an index without owners. Figures of a state file are used for the
// owners that come; a file that can't be used is told in the View's Problem, and
// the index starts fresh.
func New(opt Options) (*Index, error) {
	if opt.Space == nil {
		return nil, errors.New("make a usage index: nobody says what is used on a filesystem")
	}
	opt = opt.withDefaults()
	x := &Index{opt: opt, wake: make(chan struct{}, 1), changed: make(chan struct{}, 1), book: newBook(opt)}
	if opt.StateFile != "" {
		var err error
		if x.book.kept, x.book.keptSpaces, err = load(opt.StateFile); err != nil {
			x.book.problem = err.Error()
		}
	}
	x.publish()
	return x, nil
}

// View gives the newest that is known. It never waits.
func (x *Index) View() *View { return x.newest.Load() }

// Changed is received from after a measurement has ended, well or not. Several may
// be told as one.
func (x *Index) Changed() <-chan struct{} { return x.changed }

// SetOwners says who there is from now on. Figures of parts that stay are kept;
// those of owners that are gone are forgotten. A part that can't be one, because
// its path is not absolute or somebody else has the same, is left out and told in
// the error; all others count.
func (x *Index) SetOwners(owners []Owner) error {
	x.mu.Lock()
	err := x.book.setOwners(owners)
	x.mu.Unlock()
	x.publish()
	x.Kick()
	return err
}

// Put gives the figure of a part without a path. fs is where it lies. Nobody with
// that name is no error: it went away meanwhile.
func (x *Index) Put(key Key, fs FS, f Figure) { x.PutAll([]Put{{key, fs, f}}) }

// Put is a figure that somebody else has measured, for [Index.PutAll].
type Put struct {
	Key    Key
	FS     FS
	Figure Figure
}

// PutAll is Put for many. They come in one View, which costs as much as one for a
// single figure, and no new one is made of figures that are known already.
func (x *Index) PutAll(all []Put) {
	changed := false
	x.mu.Lock()
	for _, p := range all {
		p.Figure.How = cmp.Or(p.Figure.How, Given)
		changed = x.book.give(p.Key, p.FS, p.Figure) || changed
	}
	x.mu.Unlock()
	if changed {
		x.publish()
	}
}

// Moved says that the mount table has changed: each part may be on another
// filesystem now.
func (x *Index) Moved() {
	x.mu.Lock()
	x.book.forgetPlaces()
	x.mu.Unlock()
	x.Kick()
}

// Want has a part measured next, however young its figure is.
func (x *Index) Want(key Key) {
	x.mu.Lock()
	if p := x.book.parts[key]; p != nil {
		p.stale = true
	}
	x.mu.Unlock()
	x.Kick()
}

// Kick has the index look at once whether there is something to do.
func (x *Index) Kick() {
	select {
	case x.wake <- struct{}{}:
	default: // one is enough
	}
}

func (x *Index) publish() {
	x.mu.Lock()
	filesystems := slices.Collect(maps.Keys(x.book.spaces))
	x.mu.Unlock()
	known := map[FS][]Known{}
	for _, fs := range filesystems {
		known[fs] = x.opt.Known(fs)
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.newest.Store(x.book.view(time.Now(), known))
}

// endGrace is how long Run waits for measurements after its context ended: one on
// a disk that hangs can't be called back.
const endGrace = 5 * time.Second

// Run measures until ctx ends. An error says which measurements did not end with
// it.
func (x *Index) Run(ctx context.Context) error {
	results := make(chan result)
	running, saved := 0, time.Now()
	for {
		wait := x.step(ctx, results, &running)
		timer := time.NewTimer(max(wait, 0))
		select {
		case <-ctx.Done():
			timer.Stop()
			return errors.Join(x.drain(ctx, results, running), x.save())
		case r := <-results:
			running--
			x.finish(r)
		case <-x.wake:
		case <-timer.C:
		}
		timer.Stop()
		if x.opt.StateFile != "" && time.Since(saved) >= x.opt.SaveEvery {
			saved = time.Now()
			x.note(x.save())
		}
	}
}

// result is a measurement that has ended, or the end of a round of questions where
// parts are.
type result struct {
	placed bool
	job    job
	figure Figure
	// looked is how many inodes were looked at to bring a figure up to date.
	looked int64
	err    error
}

// step looks at filesystems if it is time for that, starts what has to be
// measured, and gives how long nothing else is to be done.
func (x *Index) step(ctx context.Context, results chan<- result, running *int) time.Duration {
	now := time.Now()
	x.mu.Lock()
	questions := x.book.questions(now)
	places := x.book.placeQuestions(now)
	x.mu.Unlock()
	x.ask(ctx, questions)
	if len(places) > 0 {
		// Beside all else: there may be many, on a filesystem that does not answer.
		*running++
		go func() { // ends with a result that Run waits for
			var all sync.WaitGroup
			for part := range slices.Chunk(places, (len(places)+mostAskers-1)/mostAskers) {
				all.Go(func() { x.ask(ctx, part) })
			}
			all.Wait()
			x.mu.Lock()
			x.book.placing = false
			x.mu.Unlock()
			deliver(ctx, results, result{placed: true})
		}()
	}
	x.mu.Lock()
	asked := x.book.hintsWanted()
	x.mu.Unlock()
	for _, o := range asked {
		counter, ok := x.opt.Written(o.Kind, o.ID)
		x.mu.Lock()
		x.book.hint(o, counter, ok)
		x.mu.Unlock()
	}
	x.mu.Lock()
	jobs, wait := x.book.next(time.Now())
	x.mu.Unlock()
	for _, j := range jobs {
		*running++
		go func() { // ends with a result that Run waits for
			deliver(ctx, results, x.do(ctx, j))
		}()
	}
	if len(questions) > 0 || len(jobs) > 0 {
		x.publish()
	}
	return wait
}

// mostAskers is how many paths are asked about at once: each that hangs takes its
// time.
const mostAskers = 8

func (x *Index) ask(ctx context.Context, questions []question) {
	for _, q := range questions {
		if ctx.Err() != nil {
			return
		}
		space, err := x.opt.Space(q.path)
		x.mu.Lock()
		x.book.answer(q, space, err, time.Now())
		x.mu.Unlock()
	}
}

// deliver hands a result to Run, which waits for a while after its end.
func deliver(ctx context.Context, results chan<- result, r result) {
	select {
	case results <- r:
		return
	case <-ctx.Done():
	}
	timer := time.NewTimer(endGrace)
	defer timer.Stop()
	select {
	case results <- r:
	case <-timer.C:
	}
}

// do does a job. It turns a panic into an error: a measurement can't take down more
// than itself.
func (x *Index) do(ctx context.Context, j job) (r result) {
	r.job = j
	defer func() {
		if p := recover(); p != nil {
			r.err = fmt.Errorf("measuring %s broke, report this as a bug of cleave: %v", j.subject.Path, p)
		}
	}()
	if j.why == updating {
		r.figure, r.looked, r.err = update(ctx, j.subject, j.figure, j.memory, x.writing(j.subject))
		return r
	}
	r.figure, r.err = x.opt.Measure(ctx, j.subject)
	if r.err != nil || r.figure.Memory == nil {
		r.figure.Memory = nil
		return r
	}
	// The walk took its time, and another figure is perhaps younger than its
	// beginning: this one shall be of now.
	f, looked, err := update(ctx, j.subject, r.figure, r.figure.Memory, nil)
	if err != nil {
		r.figure.Memory = nil
		return r
	}
	f.Cost += r.figure.Cost
	r.figure, r.looked = f, looked
	return r
}

// writing gives the files below a subject's folder that its owner writes to, by
// their path from there.
func (x *Index) writing(what Subject) (look []string) {
	for _, path := range x.opt.Writing(what.Key.Kind, what.Key.ID) {
		if isBelow(path, what.Path) {
			look = append(look, strings.TrimPrefix(path, what.Path))
		}
	}
	return look
}

func (x *Index) finish(r result) {
	if !r.placed {
		x.mu.Lock()
		x.book.finish(r, time.Now())
		x.mu.Unlock()
	}
	x.publish()
	select {
	case x.changed <- struct{}{}:
	default: // one is waiting to be taken
	}
}

func (x *Index) note(err error) {
	x.mu.Lock()
	x.book.problem = ""
	if err != nil {
		x.book.problem = err.Error()
	}
	x.mu.Unlock()
}

// drain waits for what is still being measured.
func (x *Index) drain(ctx context.Context, results <-chan result, running int) error {
	timer := time.NewTimer(endGrace)
	defer timer.Stop()
	for ; running > 0; running-- {
		select {
		case r := <-results:
			if r.err == nil {
				x.finish(r)
			} else if ctx.Err() != nil {
				x.mu.Lock()
				x.book.drop(r.job)
				x.mu.Unlock()
			}
		case <-timer.C:
			x.mu.Lock()
			defer x.mu.Unlock()
			return fmt.Errorf("measuring has not ended: %s", strings.Join(x.book.measuring(), "; "))
		}
	}
	return nil
}
