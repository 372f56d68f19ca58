package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/fsstats/walk"
	"github.com/cleave-cri/cleave/proxy/diskstats"
	"github.com/cleave-cri/cleave/snapshot"
)

const (
	// storeTimeout bounds the reading of the runtime's store in one pass.
	storeTimeout = 30 * time.Second

	// passGapMin is the shortest time between the beginnings of two passes,
	// however often somebody wants something.
	passGapMin = time.Second

	// walkEntriesPerSecond keeps a walk from taking a core for seconds: at
	// 1.6 µs an entry (CTD-111) it leaves five sixths of it to others.
	walkEntriesPerSecond = 100_000

	// passSlow is how long a pass may take before that is told.
	passSlow = 30 * time.Second

	// fallbackImages is where containerd keeps its data unless told
	// otherwise; used until the runtime has said it itself.
	fallbackImages = "/var/lib/containerd"
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
}

// mountpointsFunc asks the runtime which mountpoints it names in ImageFsInfo,
// in its order: of images, of containers.
type mountpointsFunc func(ctx context.Context) (images, containers []string, err error)

// walkFunc measures a tree; walk.Measure is one.
type walkFunc func(ctx context.Context, root string, opt walk.Options) (walk.Usage, error)

// observer measures in the background and keeps the newest picture ready.
type observer struct {
	configured  config.Filesystems
	period      time.Duration
	corePercent int

	filesystems filesystems
	mountpoints mountpointsFunc
	log         *zap.Logger

	newest atomic.Pointer[picture]
	wanted chan struct{}
	// doing is what the pass under way is looking at.
	doing atomic.Pointer[string]

	// Used by the one goroutine of run only.
	book    *layerBook
	failing string
	// named is the path that the runtime names for images, a guess until
	// confirmed.
	named     string
	confirmed bool
	// splitContainers is the root of the split snapshotter for what containers
	// write, empty without one: they will be there before the first one is.
	splitContainers string
}

// newObserver returns an observer that has nothing but an empty picture yet.
func newObserver(cfg config.Config, parts observed, log *zap.Logger) *observer {
	o := &observer{
		configured:  cfg.Filesystems,
		period:      cfg.Measure.Period,
		corePercent: cfg.Measure.MaxCorePercent,
		filesystems: parts.filesystems,
		mountpoints: parts.mountpoints,
		log:         log,
		wanted:      make(chan struct{}, 1),
		named:       fallbackImages,
	}
	if cfg.Snapshotter.Enabled() {
		o.named, o.splitContainers = cfg.Snapshotter.ImageRoot, cfg.Snapshotter.ContainerRoot
	}
	o.book = &layerBook{
		store:       parts.store,
		filesystems: parts.filesystems,
		walk:        parts.walk,
		period:      o.period,
		log:         log,
		at:          o.at,
		layers:      map[layerID]*layerState{},
	}
	o.newest.Store(emptyPicture())
	return o
}

// observed is what an observer looks at.
type observed struct {
	store       store
	filesystems filesystems
	mountpoints mountpointsFunc
	walk        walkFunc
}

func (o *observer) at(what string) { o.doing.Store(&what) }

// picture is everything that is known at one moment. It is not changed once
// it is published.
type picture struct {
	facts  *diskstats.Facts
	layout fsstats.Layout
	// classes is what is used by class, for each filesystem.
	classes map[fsstats.Device][]ClassUsage
	// readAt is when the runtime's store was read, zero while it was not yet.
	readAt time.Time
	// measuredAt is the end of the pass, zero before the first.
	measuredAt time.Time
	// cost is how long the pass took.
	cost time.Duration
	// problem says why the picture is not whole, empty if it is.
	problem string
}

// emptyPicture is one in which nothing is known.
func emptyPicture() *picture {
	return &picture{facts: &diskstats.Facts{Images: diskstats.Store{Guessed: true}, Containers: diskstats.Store{Guessed: true}}}
}

// Facts implements [diskstats.Source].
func (o *observer) Facts() *diskstats.Facts { return o.newest.Load().facts }

// Wanted implements [diskstats.Source]: it brings the next pass forward.
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
	layout, err := o.filesystems.Resolve(o.paths(o.named, "", ""))
	p := assemble(observation{layout: layout, guessed: o.guessed()})
	if p == nil {
		p = emptyPicture()
		p.layout = layout
	}
	if err != nil {
		p.problem = err.Error()
	}
	o.logOnChange(p.problem)
	o.newest.Store(p)
}

// guessed reports whether the place of images is known from nobody.
func (o *observer) guessed() bool { return o.configured.ImageFS == "" && !o.confirmed }

// run measures until ctx ends.
func (o *observer) run(ctx context.Context) {
	for {
		began := time.Now()
		o.pass(ctx)
		cost := time.Since(began)
		// Rest long enough that measuring takes no more than its share.
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

// pass measures what is due and publishes a new picture.
func (o *observer) pass(ctx context.Context) {
	began := time.Now()
	slow := time.AfterFunc(passSlow, func() { o.tellSlow(began) })
	p, err := o.lookSafely(ctx, began)
	slow.Stop()
	if ctx.Err() != nil {
		return
	}
	problem := ""
	if err != nil {
		problem = err.Error()
	}
	o.logOnChange(problem)
	if p == nil {
		// Keep the last good figures, they carry their age.
		old := *o.newest.Load()
		old.problem = problem
		p = &old
	} else {
		p.measuredAt, p.cost, p.problem = time.Now(), time.Since(began), problem
	}
	o.newest.Store(p)
}

// tellSlow says in the picture, while a pass is still under way, what it waits
// for.
func (o *observer) tellSlow(began time.Time) {
	old := o.newest.Load() // first of all: what comes after it is newer than what is told here
	what := "something"
	if doing := o.doing.Load(); doing != nil {
		what = *doing
	}
	problem := fmt.Sprintf("the measurement that began %s has not ended and looks at %s: it is very large, or its filesystem does not answer",
		began.UTC().Format("2006-01-02 15:04:05Z"), what)
	o.log.Warn("measuring takes long, the last good figures stay", zap.String("problem", problem))
	told := *old
	told.problem = problem
	o.newest.CompareAndSwap(old, &told) // not if the pass has just ended
}

func (o *observer) logOnChange(problem string) {
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
func (o *observer) lookSafely(ctx context.Context, now time.Time) (p *picture, err error) {
	defer func() {
		if r := recover(); r != nil {
			p, err = nil, fmt.Errorf("measuring broke, report this as a bug of cleave: %v", r)
		}
	}()
	return o.look(ctx, now)
}

// look returns a new picture. With a nil picture the error says why there is
// none, otherwise what is missing in it.
func (o *observer) look(ctx context.Context, now time.Time) (*picture, error) {
	o.at("the runtime's ImageFsInfo")
	images, containers, err := o.mountpoints(ctx)
	if err != nil {
		return nil, fmt.Errorf("ask the runtime where images are: %w", err)
	}
	if len(images) > 0 {
		o.named, o.confirmed = images[0], true
	}
	// Without the store the layers known so far are still measured, and
	// mountpoints are still right.
	problems := o.book.refresh(ctx, now)

	imagePath := o.book.imagePath(o.named)
	o.at("the filesystems of all roles")
	layout, err := o.filesystems.Resolve(o.paths(imagePath, o.book.containerPath(imagePath), o.book.contentRoot))
	if err != nil {
		problems = append(problems, err)
	}
	content, err := o.book.measureContent(ctx)
	if err != nil {
		problems = append(problems, err)
	}
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	p := assemble(observation{
		at:      o.book.readAt,
		stored:  o.book.contentRoot != "",
		guessed: o.guessed(),
		layout:  layout,
		layers:  o.book.sorted(),
		content: content,
		devices: o.devices(slices.Concat(images, containers)),
	})
	return p, summary(problems)
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

// saturatingAdd keeps absurd figures of a broken filesystem from wrapping.
func saturatingAdd(a, b uint64) uint64 {
	if a > math.MaxUint64-b {
		return math.MaxUint64
	}
	return a + b
}
