package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
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

	// fallbackImages is where containerd keeps its data unless told
	// otherwise; used until the runtime has said it itself.
	fallbackImages = "/var/lib/containerd"
)

// store is the runtime's store; snapshot.Store has it.
type store interface {
	Inventory(ctx context.Context) (snapshot.Inventory, error)
	Upper(ctx context.Context, l snapshot.Layer) (string, error)
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

	store       store
	filesystems filesystems
	mountpoints mountpointsFunc
	walk        walkFunc
	log         *zap.Logger

	newest atomic.Pointer[picture]
	wanted chan struct{}

	// Used by the one goroutine of run only.
	layers  map[layerID]*layerState
	failing string
	// imagePath is where images are, a guess until confirmed.
	imagePath string
	confirmed bool
	// contentRoot and storeRead are from when the store was last read.
	contentRoot string
	storeRead   time.Time
}

// layerID names a snapshot for as long as it lives.
type layerID struct {
	snapshotter, key string
	created          time.Time
}

// layerState is what is remembered of a snapshot between two passes.
type layerState struct {
	layer snapshot.Layer
	// folder holds what is written, empty if there is none to be walked.
	folder string
	// noFolder says that there is none, so that the runtime has to measure.
	noFolder bool
	// filesystem is the one that the folder is on, nil while unknown.
	filesystem *fsstats.Filesystem
	used       *diskstats.Usage
}

// picture is everything that is known at one moment. It is not changed once
// it is published.
type picture struct {
	facts  *diskstats.Facts
	layout fsstats.Layout
	// classes is what is used by class, for each filesystem.
	classes map[fsstats.Device][]ClassUsage
	// measuredAt is the end of the pass, zero before the first.
	measuredAt time.Time
	// cost is how long the pass took.
	cost time.Duration
	// problem says why the picture is not whole, empty if it is.
	problem string
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

// prime publishes a first picture from the configured paths alone, so that
// there always is one. It fails if the filesystem of images or of containers
// can't be looked at; a path that is only missing stands for its parent.
func (o *observer) prime() error {
	o.imagePath = cmp.Or(o.configured.ImageFS, fallbackImages)
	layout, err := o.filesystems.Resolve(o.paths("", ""))
	if err != nil {
		o.log.Warn("some filesystems can't be looked at", zap.Error(err))
	}
	if _, ok := layout.Get(fsstats.ImageFS); !ok {
		return fmt.Errorf("look at the filesystem of %s: %w", o.imagePath, err)
	}
	if _, ok := layout.Get(fsstats.ContainerFS); !ok {
		return fmt.Errorf("look at the filesystem of containers: %w", err)
	}
	o.newest.Store(assemble(observation{layout: layout, guessed: o.guessed()}))
	return nil
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
	p, err := o.lookSafely(ctx, began)
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
	storeCtx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	images, containers, err := o.mountpoints(storeCtx)
	if err != nil {
		return nil, fmt.Errorf("ask the runtime where images are: %w", err)
	}
	if len(images) > 0 {
		o.imagePath, o.confirmed = images[0], true
	}
	var problems []error
	// Without the store the layers known so far are still measured, and
	// mountpoints are still right.
	if inv, err := o.store.Inventory(storeCtx); err != nil {
		problems = append(problems, err)
	} else {
		o.contentRoot, o.storeRead = inv.ContentRoot, now
		o.follow(storeCtx, inv.Layers)
	}
	problems = append(problems, o.measureLayers(ctx, now)...)

	layout, err := o.filesystems.Resolve(o.paths(o.containerPath(), o.contentRoot))
	if err != nil {
		problems = append(problems, err)
	}
	content, err := o.measureContent(ctx, o.contentRoot)
	if err != nil {
		problems = append(problems, err)
	}
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	layers := make([]layerState, 0, len(o.layers))
	for _, l := range o.layers {
		layers = append(layers, *l)
	}
	p := assemble(observation{
		at:      o.storeRead,
		guessed: o.guessed(),
		layout:  layout,
		layers:  layers,
		content: content,
		devices: o.devices(slices.Concat(images, containers)),
	})
	if p == nil {
		return nil, errors.Join(problems...)
	}
	return p, errors.Join(problems...)
}

// paths are the paths of all roles. containers and content are what was found
// out, empty while unknown.
func (o *observer) paths(containers, content string) map[fsstats.Role]string {
	return map[fsstats.Role]string{
		fsstats.NodeFS:      o.configured.NodeFS,
		fsstats.Logs:        o.configured.Logs,
		fsstats.ImageFS:     cmp.Or(o.configured.ImageFS, o.imagePath),
		fsstats.ContainerFS: cmp.Or(o.configured.ContainerFS, containers, o.imagePath),
		fsstats.Content:     content,
	}
}

// containerPath is where the writable layers really are: the filesystem that
// holds most of them, empty if there are none. Where that is the filesystem of
// images the path of images names it best.
func (o *observer) containerPath() string {
	counts := map[fsstats.Device]int{}
	places := map[fsstats.Device]string{}
	for _, l := range o.layers {
		if l.filesystem == nil || (l.layer.Class != snapshot.Container && l.layer.Class != snapshot.Sandbox) {
			continue
		}
		counts[l.filesystem.Device]++
		places[l.filesystem.Device] = l.filesystem.Mountpoint
	}
	best, most := "", 0
	for device, n := range counts {
		if n > most || (n == most && places[device] < best) {
			best, most = places[device], n
		}
	}
	if best == "" {
		return ""
	}
	image, err := o.filesystems.FilesystemOf(o.imagePath)
	if err == nil && places[image.Device] == best {
		return o.imagePath
	}
	return best
}

// devices says on which filesystem each of the paths is that the runtime names.
func (o *observer) devices(paths []string) map[string]string {
	devices := make(map[string]string, len(paths))
	for _, path := range paths {
		fs, err := o.filesystems.FilesystemOf(path)
		if err != nil {
			// A path that does not exist is on no filesystem: named to the
			// kubelet it would be wrong (CTD-4).
			devices[path] = ""
			continue
		}
		devices[path] = fs.Device.String()
	}
	return devices
}

// follow brings the remembered layers up to date with the store: forgets those
// that are gone and finds the folders of new ones.
func (o *observer) follow(ctx context.Context, layers []snapshot.Layer) {
	seen := make(map[layerID]bool, len(layers))
	for _, l := range layers {
		id := layerID{l.Snapshotter, l.Key, l.CreatedAt}
		seen[id] = true
		state := o.layers[id]
		if state == nil {
			state = &layerState{layer: l}
			o.layers[id] = state
		}
		// An owner may come after its snapshot.
		state.layer = l
		if l.Class == snapshot.Image || l.Class == snapshot.View || state.folder != "" || state.noFolder {
			continue
		}
		folder, err := o.store.Upper(ctx, l)
		if errors.Is(err, snapshot.ErrNoFolder) {
			state.noFolder = true
			continue
		}
		if err != nil {
			// It may be gone by now; the next pass knows.
			o.log.Debug("a snapshot has no folder", zap.String("key", l.Key), zap.Error(err))
			continue
		}
		state.folder = folder
	}
	for id := range o.layers {
		if !seen[id] {
			delete(o.layers, id)
		}
	}
}

// measureLayers measures what was never measured or is older than the period.
func (o *observer) measureLayers(ctx context.Context, now time.Time) (problems []error) {
	for _, state := range o.layers {
		if ctx.Err() != nil {
			return append(problems, ctx.Err())
		}
		var err error
		switch {
		case state.layer.Class == snapshot.Image:
			if state.used == nil { // a committed layer does not change
				err = o.askUsage(ctx, state)
			}
		case state.noFolder && (state.used == nil || now.Sub(state.used.At) >= o.period):
			err = o.askUsage(ctx, state)
		case state.folder != "" && (state.used == nil || now.Sub(state.used.At) >= o.period):
			err = o.walkLayer(ctx, state)
		}
		if err != nil {
			problems = append(problems, err)
		}
	}
	return problems
}

func (o *observer) askUsage(ctx context.Context, state *layerState) error {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	used, err := o.store.Usage(ctx, state.layer)
	if err != nil {
		// Most likely removed since it was listed.
		o.log.Debug("a layer has no usage", zap.String("key", state.layer.Key), zap.Error(err))
		return nil
	}
	state.used = &diskstats.Usage{Bytes: unsigned(used.Bytes), Inodes: unsigned(used.Inodes), At: time.Now()}
	return nil
}

func (o *observer) walkLayer(ctx context.Context, state *layerState) error {
	fs, err := o.filesystems.FilesystemOf(state.folder)
	if err != nil {
		o.log.Debug("a layer's folder is gone", zap.String("folder", state.folder), zap.Error(err))
		return nil
	}
	used, err := o.walk(ctx, state.folder, walk.Options{EntriesPerSecond: walkEntriesPerSecond})
	if err != nil {
		o.log.Debug("a layer can't be measured", zap.String("folder", state.folder), zap.Error(err))
		return nil
	}
	state.filesystem = &fs
	if used.Partial {
		// A lower bound is not the figure; the last good one stays.
		return fmt.Errorf("measure %s: %w", state.folder, errors.Join(used.Errors...))
	}
	state.used = usageOf(used)
	return nil
}

func (o *observer) measureContent(ctx context.Context, root string) (*diskstats.Usage, error) {
	if root == "" {
		return nil, nil
	}
	used, err := o.walk(ctx, root, walk.Options{EntriesPerSecond: walkEntriesPerSecond})
	if err != nil {
		return nil, fmt.Errorf("measure the content store: %w", err)
	}
	if used.Partial {
		return nil, fmt.Errorf("measure the content store %s: %w", root, errors.Join(used.Errors...))
	}
	return usageOf(used), nil
}

func usageOf(u walk.Usage) *diskstats.Usage {
	return &diskstats.Usage{Bytes: unsigned(u.Bytes), Inodes: unsigned(u.Inodes), At: u.Finished}
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
