package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/agent/ephemeral"
	"github.com/cleave-cri/cleave/agent/owners"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/fsstats/index"
	"github.com/cleave-cri/cleave/proxy/diskstats"
	"github.com/cleave-cri/cleave/snapshot"
)

const (
	// storeTimeout bounds the reading of the runtime's store in one pass.
	storeTimeout = 30 * time.Second

	// passGapMin is the shortest time between the beginnings of two passes,
	// however often somebody wants something.
	passGapMin = time.Second

	// passSlow is how long a pass or a measurement may take before that is told.
	passSlow = 30 * time.Second

	// publishPeriod is how often a picture is made though nothing was measured:
	// filesystems fill all the same. publishGap is the time between two at least.
	publishPeriod = time.Second
	publishGap    = 200 * time.Millisecond

	// fallbackImages is where containerd keeps its data unless told
	// otherwise; used until the runtime has said it itself.
	fallbackImages = "/var/lib/containerd"

	// indexFile is where the usage index keeps its figures, in the state folder.
	indexFile = "usage.json"
)

// store is the runtime's store; snapshot.Store has it.
type store interface {
	Inventory(ctx context.Context) (snapshot.Inventory, error)
	Folders(ctx context.Context, l snapshot.Layer) (snapshot.Folders, error)
	Usage(ctx context.Context, l snapshot.Layer) (snapshot.Usage, error)
}

// filesystems is the kernel; fsstats.Prober has it.
type filesystems interface {
	FilesystemOf(path string) (fsstats.Filesystem, error)
	Resolve(paths map[fsstats.Role]string) (fsstats.Layout, error)
	Mounts() ([]fsstats.Mount, error)
}

// layouts keeps the roles' places fresh; fsstats.Watcher does.
type layouts interface {
	SetPaths(paths map[fsstats.Role]string)
	View() *fsstats.View
	Moved() <-chan struct{}
	Run(ctx context.Context) error
}

// mountpointsFunc asks the runtime which mountpoints it names in ImageFsInfo,
// in its order: of images, of containers.
type mountpointsFunc func(ctx context.Context) (images, containers []string, err error)

// observer keeps the newest picture ready. It finds out who there is, pass by pass;
// a usage index finds out what each of them takes, by need.
type observer struct {
	configured  config.Filesystems
	period      time.Duration
	corePercent int

	filesystems filesystems
	layouts     layouts // nil without
	mountpoints mountpointsFunc
	workloads   workloadsFunc // nil without
	index       *index.Index
	seen        *seenFiles
	writers     *writers
	given       *givenBook
	open        *openBook
	log         *zap.Logger

	newest   atomic.Pointer[picture]
	surveyed atomic.Pointer[survey]
	wanted   chan struct{}
	// news says that there is something for a new picture.
	news chan struct{}
	// doing is what the pass under way is looking at.
	doing atomic.Pointer[string]
	// watched says that layouts is kept fresh.
	watched atomic.Bool

	// Used by the one goroutine that surveys only.
	book    *layerBook
	folders *folderBook
	pids    *pidBook
	// named is the path that the runtime names for images, a guess until
	// confirmed.
	named     string
	confirmed bool
	// splitContainers is the root of the split snapshotter for what containers
	// write, empty without one: they will be there before the first one is.
	splitContainers string
	// projects says that the split snapshotter's figures are the kernel's counters of
	// projects. Not changed.
	projects bool

	naming     sync.Mutex // held while the index is told who there is
	publishing sync.Mutex
	failing    string // guarded by publishing

	spaces sync.Mutex
	// places are the filesystems that the index was told of; guarded by spaces.
	places map[index.FS]fsstats.Filesystem
}

// observed is what an observer looks at.
type observed struct {
	store       store
	filesystems filesystems
	layouts     layouts
	mountpoints mountpointsFunc
	workloads   workloadsFunc
	pid         pidFunc
	// usages are the split snapshotter's figures; nil where there is none.
	usages usagesFunc
	// measure measures a part of the index.
	measure index.MeasureFunc
	// stateFile is where the index keeps its figures; empty for nowhere.
	stateFile string
}

// newObserver returns an observer that has nothing but an empty picture yet.
func newObserver(cfg config.Config, parts observed, log *zap.Logger) (*observer, error) {
	o := &observer{
		configured:  cfg.Filesystems,
		period:      cfg.Measure.Period,
		corePercent: cfg.Measure.MaxCorePercent,
		filesystems: parts.filesystems,
		layouts:     parts.layouts,
		mountpoints: parts.mountpoints,
		workloads:   parts.workloads,
		writers:     newWriters(),
		seen:        newSeenFiles(parts.measure),
		log:         log,
		wanted:      make(chan struct{}, 1),
		news:        make(chan struct{}, 1),
		named:       fallbackImages,
		places:      map[index.FS]fsstats.Filesystem{},
		folders:     &folderBook{mounts: parts.filesystems.Mounts},
		pids:        &pidBook{ask: parts.pid},
	}
	o.book = &layerBook{
		store:       parts.store,
		filesystems: parts.filesystems,
		log:         log,
		at:          o.at,
		layers:      map[layerID]*layerState{},
	}
	if cfg.Snapshotter.Enabled() {
		o.named, o.splitContainers = cfg.Snapshotter.ImageRoot, cfg.Snapshotter.ContainerRoot
		o.projects = cfg.Snapshotter.ProjectQuota
		o.book.theirs = []string{cfg.Snapshotter.ImageRoot, cfg.Snapshotter.ContainerRoot}
	}
	var err error
	o.index, err = index.New(index.Options{
		Space:        o.space,
		Measure:      o.seen.Measure,
		Written:      o.writers.written,
		Writing:      o.writers.writing,
		HotEvery:     max(o.period/hotOftener, time.Second),
		SuspectEvery: o.period,
		CorePercent:  float64(o.corePercent),
		StateFile:    parts.stateFile,
	})
	if err != nil {
		return nil, err
	}
	o.given = newGivenBook(parts.store, parts.usages, cfg.Snapshotter.UsageMaxAge, o.period, o.index, o.tell)
	o.open = newOpenBook(o.writers.processesOf, parts.filesystems.FilesystemOf)
	o.newest.Store(emptyPicture())
	o.surveyed.Store(&survey{})
	return o, nil
}

// hotOftener is how much more often than the others those are measured that have
// written.
const hotOftener = 10

func (o *observer) at(what string) { o.doing.Store(&what) }

// tell says that there is something for a new picture.
func (o *observer) tell() {
	select {
	case o.news <- struct{}{}:
	default: // one is enough
	}
}

// fsOf names a filesystem for the index.
func fsOf(f fsstats.Filesystem) index.FS { return index.FS(f.ID()) }

// space is the index's question what is used on the filesystem of a path.
func (o *observer) space(path string) (index.Space, error) {
	f, err := o.filesystems.FilesystemOf(path)
	if err != nil {
		return index.Space{}, err
	}
	s := index.Space{FS: fsOf(f), UsedBytes: signed(f.UsedBytes), At: f.MeasuredAt}
	if used, ok := f.InodesUsed(); ok {
		inodes := signed(used)
		s.UsedInodes = &inodes
	}
	o.spaces.Lock()
	defer o.spaces.Unlock()
	o.places[s.FS] = f
	return s, nil
}

// picture is everything that is known at one moment. It is not changed once
// it is published.
type picture struct {
	facts *diskstats.Facts
	// layout has each role's last good place; stuck are the roles that do not
	// answer, which nothing may be deleted on the strength of.
	layout fsstats.Layout
	// readAt is when the runtime's store was read, zero while it was not yet.
	readAt time.Time
	stuck  []fsstats.Standing
	// accounts say who holds what, for each filesystem.
	accounts map[fsstats.Device]Account
	// pods are what pods use.
	pods []ephemeral.Usage
	// held are the same pods, with their parts.
	held []ephemeral.Pod
	// measuredAt is the end of the pass, zero before the first.
	measuredAt time.Time
	// cost is how long the pass took.
	cost time.Duration
	// since is the moment before which all that running containers wrote is in the
	// figures; zero while a figure is missing.
	since time.Time
	// problem says why the picture is not whole, empty if it is.
	problem string
}

// emptyPicture is one in which nothing is known.
func emptyPicture() *picture {
	return &picture{facts: &diskstats.Facts{Images: diskstats.Store{Guessed: true}, Containers: diskstats.Store{Guessed: true}}}
}

// Facts implements [diskstats.Source].
func (o *observer) Facts() *diskstats.Facts { return o.newest.Load().facts }

// Wanted implements [diskstats.Source]: it brings the next pass forward. What that
// finds new is measured at once.
func (o *observer) Wanted() {
	select {
	case o.wanted <- struct{}{}:
	default: // one wish is enough
	}
}

var _ diskstats.Source = (*observer)(nil)

// prime publishes a first picture from the configured paths alone. A path that
// is only missing stands for its parent. Where the filesystem of images or of
// containers can't be looked at there is an empty picture, and the runtime's own
// answers go through.
func (o *observer) prime() {
	s := &survey{paths: o.paths(o.named, "", ""), guessed: o.guessed()}
	var err error
	if s.layout, err = o.filesystems.Resolve(s.paths); err != nil {
		s.problems = []error{err}
	}
	if o.layouts != nil {
		o.layouts.SetPaths(s.paths)
	}
	o.surveyed.Store(s)
	o.publish()
}

// guessed reports whether the place of images is known from nobody.
func (o *observer) guessed() bool { return o.configured.ImageFS == "" && !o.confirmed }

// run observes until ctx ends.
func (o *observer) run(ctx context.Context) {
	var parts sync.WaitGroup
	defer parts.Wait()
	parts.Go(func() {
		if err := o.index.Run(ctx); err != nil {
			o.log.Warn("the usage index did not end well", zap.Error(err))
		}
	})
	var moved <-chan struct{}
	if o.layouts != nil {
		moved = o.layouts.Moved()
		o.watched.Store(true)
		parts.Go(func() {
			err := o.layouts.Run(ctx)
			o.watched.Store(false)
			if err != nil && ctx.Err() == nil {
				o.log.Warn("changes of the mount table are not noticed at once any more", zap.Error(err))
			}
		})
	}
	parts.Go(func() { o.survey(ctx) })
	parts.Go(func() { o.given.run(ctx, o.surveyed.Load) })
	parts.Go(func() { o.watchGap(ctx) })
	tick := time.NewTicker(publishPeriod)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-moved:
			o.index.Moved()
			o.Wanted() // what is on it may be elsewhere too
		case <-o.index.Changed():
		case <-o.news:
		case <-tick.C:
		}
		o.publish()
		if !sleep(ctx, publishGap, nil) {
			return
		}
	}
}

// survey finds out who there is, again and again until ctx ends.
func (o *observer) survey(ctx context.Context) {
	for {
		began := time.Now()
		o.pass(ctx)
		cost := time.Since(began)
		// Rest long enough that looking takes no more than its share.
		rest := max(cost*100/time.Duration(max(o.corePercent, 1)), passGapMin)
		if !sleep(ctx, rest, nil) {
			return
		}
		// While the runtime has said nothing yet everything waits for it.
		if !o.confirmed {
			continue
		}
		if !sleep(ctx, o.period-rest, o.wanted) {
			return
		}
	}
}

// sleep waits for the duration or until early is received from, and reports
// whether ctx is still good.
func sleep(ctx context.Context, d time.Duration, early <-chan struct{}) bool {
	timer := time.NewTimer(max(d, 0))
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
	case <-early:
	}
	return ctx.Err() == nil
}

// survey is what one pass found out: who there is and where, not what it takes. It
// is not changed once it is there.
type survey struct {
	// began and ended frame the pass, zero before the first.
	began, ended time.Time
	// readAt is when the store was read, zero while it was not yet.
	readAt time.Time
	// guessed says that the place of images is not confirmed.
	guessed bool
	// paths are the roles', layout is where they were.
	paths  map[fsstats.Role]string
	layout fsstats.Layout
	layers []surveyed
	// stored says that there is a content store.
	stored bool
	// devices are the filesystems of the paths that the runtime names.
	devices map[string]string
	folders owners.Folders
	// asked says that the runtime has told its pods.
	asked     bool
	workloads workloads
	problems  []error
}

// surveyed is a layer in a survey.
type surveyed struct {
	layerState
	given bool
	// theirs says that it is the split snapshotter's.
	theirs bool
	key    index.Key
}

// pass surveys once and publishes a new picture.
func (o *observer) pass(ctx context.Context) {
	began := time.Now()
	slow := time.AfterFunc(passSlow, func() { o.tellSlow(began) })
	s, err := o.lookSafely(ctx, began)
	slow.Stop()
	if ctx.Err() != nil {
		return
	}
	if s == nil {
		// Keep who was there; figures carry their age.
		old := *o.surveyed.Load()
		old.problems = []error{err}
		s = &old
	} else {
		s.began, s.ended = began, time.Now()
	}
	o.surveyed.Store(s)
	o.setOwners()
	o.given.kick()
	o.publish()
}

// setOwners tells the index who there is.
func (o *observer) setOwners() {
	o.naming.Lock()
	defer o.naming.Unlock()
	s := o.surveyed.Load()
	if s.readAt.IsZero() {
		return // what was known before a restart would be forgotten
	}
	list := owners.List(s.known(o.open.held()))
	if err := o.index.SetOwners(list); err != nil {
		o.log.Debug("some owners are left out", zap.Error(err))
	}
	there := map[index.Key]bool{}
	for _, owner := range list {
		for _, p := range owner.Parts {
			there[index.Key{Kind: owner.Kind, ID: owner.ID, Part: p.Name}] = true
		}
	}
	o.seen.forget(func(k index.Key) bool { return there[k] })
}

// known is what a survey says about owners.
func (s *survey) known(open []owners.OpenFile) owners.Known {
	k := owners.Known{Folders: s.folders, Open: open}
	if s.stored {
		k.ContentRoot = pathOf(s.layout, fsstats.Content)
	}
	for _, l := range s.layers {
		if l.layer.Class == snapshot.View {
			continue // it has nothing of its own
		}
		k.Snapshots = append(k.Snapshots, l.snapshot(l.given))
	}
	for _, role := range []fsstats.Role{fsstats.ImageFS, fsstats.ContainerFS} {
		if path := pathOf(s.layout, role); path != "" {
			k.Foreign = append(k.Foreign, path)
		}
	}
	return k
}

// tellSlow says in the picture, while a pass is still under way, what it waits
// for.
func (o *observer) tellSlow(began time.Time) {
	old := o.surveyed.Load() // first of all: what comes after it is newer than what is told here
	what := "something"
	if doing := o.doing.Load(); doing != nil {
		what = *doing
	}
	problem := fmt.Errorf("the look at who is there that began %s has not ended and waits for %s: it is very much, or its filesystem does not answer",
		began.UTC().Format("2006-01-02 15:04:05Z"), what)
	o.log.Warn("looking takes long, the last good figures stay", zap.Error(problem))
	told := *old
	told.problems = append(slices.Clone(old.problems), problem)
	if o.surveyed.CompareAndSwap(old, &told) { // not if the pass has just ended
		o.tell()
	}
}

func (o *observer) logOnChangeLocked(problem string) {
	if problem == o.failing {
		return
	}
	o.failing = problem
	if problem == "" {
		o.log.Info("measuring works again")
		return
	}
	o.log.Warn("measuring is incomplete, the last good figures stay", zap.String("problem", problem))
}

// lookSafely turns a panic into an error: the observer can't take the proxy down.
func (o *observer) lookSafely(ctx context.Context, now time.Time) (s *survey, err error) {
	defer func() {
		if r := recover(); r != nil {
			s, err = nil, fmt.Errorf("looking at who is there broke, report this as a bug of cleave: %v", r)
		}
	}()
	return o.look(ctx, now)
}

// look makes a survey. Without one the error says why there is none.
func (o *observer) look(ctx context.Context, now time.Time) (*survey, error) {
	o.at("the runtime's ImageFsInfo")
	images, containers, err := o.mountpoints(ctx)
	if err != nil {
		return nil, fmt.Errorf("ask the runtime where images are: %w", err)
	}
	if len(images) > 0 {
		o.named, o.confirmed = images[0], true
	}
	// Without the store the layers known so far are still there, and
	// mountpoints are still right.
	s := &survey{problems: o.book.refresh(ctx, now), guessed: o.guessed()}
	s.readAt, s.stored = o.book.readAt, o.book.contentRoot != ""

	imagePath := o.book.imagePath(o.named)
	o.at("the filesystems of all roles")
	s.paths = o.paths(imagePath, o.book.containerPath(imagePath), o.book.contentRoot)
	if s.layout, err = o.filesystems.Resolve(s.paths); err != nil {
		s.problems = append(s.problems, err)
		s.keepPlaces(o.surveyed.Load())
	}
	if o.layouts != nil {
		o.layouts.SetPaths(s.paths)
	}
	s.devices = o.devices(slices.Concat(images, containers))
	for _, l := range o.book.sorted() {
		given := o.book.given(l)
		s.layers = append(s.layers, surveyed{layerState: *l, given: given, theirs: o.book.split(l), key: l.snapshot(given).Key()})
	}
	o.writers.setLayers(s.walkedLayers())
	o.lookAtPods(ctx, s)
	return s, ctx.Err()
}

// walkedLayers are the folders of containers' layers that are walked, by container.
func (s *survey) walkedLayers() map[string]string {
	out := map[string]string{}
	for _, l := range s.layers {
		if l.layer.Class == snapshot.Container && !l.given {
			out[l.layer.ContainerID] = l.folders.Upper
		}
	}
	return out
}

// keepPlaces takes the places of roles that do not answer from the last survey, so
// that who has something there is not forgotten.
func (s *survey) keepPlaces(last *survey) {
	for _, role := range fsstats.Roles() {
		if _, ok := s.layout.Get(role); ok || s.paths[role] == "" || last.paths[role] != s.paths[role] {
			continue
		}
		if place, ok := last.layout.Get(role); ok {
			s.layout.Places = append(s.layout.Places, place)
		}
	}
}

// lookAtPods adds pods, containers and their folders to a survey. What can't be
// found out stays as it was.
func (o *observer) lookAtPods(ctx context.Context, s *survey) {
	last := o.surveyed.Load()
	s.asked, s.workloads = last.asked, last.workloads
	if o.workloads != nil {
		o.at("the runtime's pods and containers")
		if w, err := o.workloads(ctx); err != nil {
			s.problems = append(s.problems, err)
		} else {
			s.asked, s.workloads = true, w
			o.writers.set(o.pids.of(ctx, w), podsOf(w))
		}
	}
	o.at("the folders of pods")
	var err error
	s.folders, err = o.folders.list(ctx, pathOf(s.layout, fsstats.NodeFS), pathOf(s.layout, fsstats.Logs), devicesOf(s.layout))
	if err != nil {
		s.problems = append(s.problems, err)
	}
}

// layoutOf is the newest that is known of where a survey's roles are, and the roles
// that do not answer.
func (o *observer) layoutOf(s *survey) (good fsstats.Layout, stuck []fsstats.Standing) {
	if o.layouts == nil || !o.watched.Load() {
		return s.layout, nil
	}
	v := o.layouts.View()
	for role, path := range s.paths {
		if path == "" {
			continue
		}
		standing, ok := v.Standing(role)
		if !ok || standing.Configured != path || standing.Last == nil && standing.Problem == nil {
			return s.layout, nil // it has not looked there yet
		}
		if standing.Problem != nil {
			stuck = append(stuck, standing)
		}
	}
	return v.LastGood, stuck
}

// publish makes a picture of what is known now.
func (o *observer) publish() {
	o.publishing.Lock()
	defer o.publishing.Unlock()
	p, err := o.assembleSafely()
	old := o.newest.Load()
	if p == nil {
		// Keep the last good figures, they carry their age.
		kept := *old
		p = &kept
	} else {
		// What has just been made has no figure for a moment.
		keepSum(&p.facts.Images, old.facts.Images)
		keepSum(&p.facts.Containers, old.facts.Containers)
	}
	p.problem = ""
	if err != nil {
		p.problem = err.Error()
	}
	o.logOnChangeLocked(p.problem)
	o.newest.Store(p)
}

// sumKept is for how long the sum without what is new stands for the one with it.
const sumKept = 10 * time.Second

// keepSum keeps a store's sum while there is none.
func keepSum(s *diskstats.Store, old diskstats.Store) {
	if s.Used == nil && old.Used != nil && s.Device == old.Device && time.Since(old.Used.At) < sumKept {
		s.Used = old.Used
	}
}

// assembleSafely is assemble with what is known now. Without a picture the old one
// stays; the error says what is missing.
func (o *observer) assembleSafely() (p *picture, err error) {
	defer func() {
		if r := recover(); r != nil {
			p, err = nil, fmt.Errorf("putting the figures together broke, report this as a bug of cleave: %v", r)
		}
	}()
	s, v := o.surveyed.Load(), o.index.View()
	in := observation{survey: s, view: v, seen: o.seen.of, filesystems: o.known(s)}
	in.layout, in.stuck = o.layoutOf(s)
	problems := append(slices.Clone(s.problems), problemsOf(v, time.Now())...)
	for _, standing := range in.stuck {
		problems = append(problems, fmt.Errorf("%s: %w", standing.Role, standing.Problem))
	}
	p = assemble(in)
	if p == nil && s.ended.IsZero() {
		p = emptyPicture()
		p.layout = in.layout
	}
	return p, summary(problems)
}

// known are all filesystems that figures may be on, as they were last seen.
func (o *observer) known(s *survey) map[index.FS]fsstats.Filesystem {
	o.spaces.Lock()
	defer o.spaces.Unlock()
	out := maps.Clone(o.places)
	for _, p := range s.layout.Places {
		out[fsOf(p.Filesystem)] = p.Filesystem
	}
	for _, l := range s.layers {
		if l.filesystem != nil {
			if fs := fsOf(*l.filesystem); out[fs].MeasuredAt.Before(l.filesystem.MeasuredAt) {
				out[fs] = *l.filesystem
			}
		}
	}
	return out
}

// problemsOf are what keeps figures of an index from being whole. That something
// is gone is none.
func problemsOf(v *index.View, now time.Time) (problems []error) {
	if v.Problem != "" {
		problems = append(problems, errors.New(v.Problem))
	}
	for _, owner := range v.Owners {
		for _, p := range owner.Parts {
			switch {
			case p.Gone:
			case p.Problem != "":
				problems = append(problems, fmt.Errorf("measure %s: %s", p.Path, p.Problem))
			case !p.Measuring.IsZero() && now.Sub(p.Measuring) > passSlow:
				problems = append(problems, fmt.Errorf("the measurement of %s that began %s has not ended: it is very large, or its filesystem does not answer",
					p.Path, p.Measuring.UTC().Format("2006-01-02 15:04:05Z")))
			}
		}
	}
	return problems
}

// errNotSaid says that it is not known where images are: neither the runtime nor
// the configuration says it.
var errNotSaid = errors.New("nobody says where images are")

// locate finds out where all roles are, without measuring anything. A path that
// is only guessed is not used.
func (o *observer) locate(ctx context.Context) (fsstats.Layout, error) {
	images, _, err := o.mountpoints(ctx)
	if len(images) > 0 {
		o.named, o.confirmed = images[0], true
	} else if o.guessed() && o.splitContainers == "" {
		return fsstats.Layout{}, errors.Join(errNotSaid, err)
	}
	// What can't be read of the store has a check of its own.
	_ = o.book.readStore(ctx, time.Now())
	o.book.findCommitted()
	o.book.findUppers()
	imagePath := o.book.imagePath(o.named)
	return o.filesystems.Resolve(o.paths(imagePath, o.book.containerPath(imagePath), o.book.contentRoot))
}

// maxProblems is how many different problems are told one by one.
const maxProblems = 3

// summary joins errors in an order that does not depend on chance: what is told
// on change only must not change by itself.
func summary(problems []error) error {
	texts := make([]string, 0, len(problems))
	for _, err := range problems {
		texts = append(texts, err.Error())
	}
	slices.Sort(texts)
	texts = slices.Compact(texts)
	if len(texts) == 0 {
		return nil
	}
	if more := len(texts) - maxProblems; more > 0 {
		texts = append(texts[:maxProblems], fmt.Sprintf("and %d more", more))
	}
	return errors.New(strings.Join(texts, "; "))
}

// paths are the paths of all roles. containers and content are what was found
// out, empty while unknown.
func (o *observer) paths(images, containers, content string) map[fsstats.Role]string {
	images = cmp.Or(o.configured.ImageFS, images)
	return map[fsstats.Role]string{
		fsstats.NodeFS:      o.configured.NodeFS,
		fsstats.Logs:        o.configured.Logs,
		fsstats.ImageFS:     images,
		fsstats.ContainerFS: cmp.Or(o.configured.ContainerFS, containers, o.splitContainers, images),
		fsstats.Content:     content,
	}
}

// devices says on which filesystem each of the paths is that the runtime names.
// A path that does not answer is left out: nothing is known of it.
func (o *observer) devices(paths []string) map[string]string {
	devices := make(map[string]string, len(paths))
	for _, path := range paths {
		o.at("the filesystem of " + path)
		fs, err := o.filesystems.FilesystemOf(path)
		switch {
		case err == nil:
			devices[path] = fs.Device.String()
		case errors.Is(err, fsstats.ErrNoAnswer):
		default:
			// A path that does not exist is on no filesystem: named to the
			// kubelet it would be wrong (CTD-4).
			devices[path] = ""
		}
	}
	return devices
}

// unsigned turns a count, which is never negative, into the CRI's type.
func unsigned(n int64) uint64 {
	if n < 0 {
		return 0
	}
	return uint64(n)
}

// signed turns an amount of bytes or inodes into the index's type.
func signed(n uint64) int64 {
	if n > math.MaxInt64 {
		return math.MaxInt64
	}
	return int64(n)
}

// saturatingAdd keeps absurd figures of a broken filesystem from wrapping.
func saturatingAdd(a, b uint64) uint64 {
	if a > math.MaxUint64-b {
		return math.MaxUint64
	}
	return a + b
}
