package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/cleave-cri/cleave/agent/owners"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/fsstats/index"
	"github.com/cleave-cri/cleave/fsstats/orphan"
	"github.com/cleave-cri/cleave/snapshot"
	"github.com/cleave-cri/cleave/snapshot/split"
)

// node is everything that an observer looks at, held by the test.
type node struct {
	mu     sync.Mutex
	layers []snapshot.Layer // guarded by mu
	bytes  map[string]int64 // by folder; guarded by mu
	fail   error            // of the store; guarded by mu
	walks  map[string]int   // guarded by mu
	read   int              // how often the store was; guarded by mu
	asked  int              // how often for usage; guarded by mu
	moved  uint64           // bytes used on each filesystem besides; guarded by mu
	broken bool             // a measurement panics; guarded by mu
	stuck  string           // a path that does not answer; guarded by mu
	hold   chan struct{}    // if not nil, a walk waits for it; guarded by mu
	took   time.Duration    // reading the store takes that long; guarded by mu
	lower  string           // a container's lower layer; not changed
	// walkFails are errors of walks by folder; guarded by mu
	walkFails map[string]error
	unread    []string          // snapshotters that can't be read; guarded by mu
	roots     map[string]string // of snapshotters, by name; not changed
	// places answers for single paths; not changed
	places map[string]func() (fsstats.Filesystem, error)
}

func (n *node) Inventory(context.Context) (snapshot.Inventory, error) {
	n.mu.Lock()
	n.read++
	took := n.took
	n.mu.Unlock()
	if took > 0 {
		time.Sleep(took) //nolint:forbidigo // time is the bubble's
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	inv := snapshot.Inventory{
		Snapshotters: []snapshot.Snapshotter{{Name: "overlayfs", Root: "/images"}},
		ContentRoot:  "/images/content",
		Unread:       n.unread,
	}
	for name, root := range n.roots {
		inv.Snapshotters = append(inv.Snapshotters, snapshot.Snapshotter{Name: name, Root: root})
	}
	for _, l := range n.layers {
		if !slices.Contains(n.unread, l.Snapshotter) {
			inv.Layers = append(inv.Layers, l)
		}
	}
	if n.fail == nil && len(n.unread) > 0 {
		return inv, fmt.Errorf("%w: %s", snapshot.ErrUnread, n.unread)
	}
	return inv, n.fail
}

func (n *node) Folders(_ context.Context, l snapshot.Layer) (snapshot.Folders, error) {
	return snapshot.Folders{Upper: "/layers/" + l.Key, Lower: n.lower}, nil
}

func (n *node) Usage(context.Context, snapshot.Layer) (snapshot.Usage, error) {
	n.mu.Lock()
	n.asked++
	n.mu.Unlock()
	return snapshot.Usage{Bytes: 1000, Inodes: 10}, nil
}

// walked returns how often a folder was walked.
func (n *node) walked(folder string) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.walks[folder]
}

// set says what a walk of a folder finds.
func (n *node) set(folder string, bytes int64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.bytes[folder] = bytes
}

// write changes what is used on all filesystems.
func (n *node) write() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.moved += 4096
}

var (
	imagesDevice     = fsstats.Device{Major: 8, Minor: 1}
	containersDevice = fsstats.Device{Major: 8, Minor: 17}
)

func (n *node) FilesystemOf(path string) (fsstats.Filesystem, error) {
	if f, ok := n.places[path]; ok {
		return f()
	}
	n.mu.Lock()
	moved, stuck := n.moved, n.stuck
	n.mu.Unlock()
	if path == stuck {
		return fsstats.Filesystem{}, fsstats.ErrNoAnswer
	}
	fs := fsstats.Filesystem{Device: imagesDevice, Mountpoint: "/images", CapacityBytes: 1 << 30, UsedBytes: 1<<20 + moved, MeasuredAt: time.Now()}
	if len(path) > 8 && path[:8] == "/layers/" || path == "/layers" {
		fs.Device, fs.Mountpoint = containersDevice, "/layers"
	}
	return fs, nil
}

func (n *node) Resolve(paths map[fsstats.Role]string) (fsstats.Layout, error) {
	var l fsstats.Layout
	var errs []error
	for _, role := range fsstats.Roles() {
		if paths[role] == "" {
			continue
		}
		fs, err := n.FilesystemOf(paths[role])
		if err != nil {
			errs = append(errs, err)
			continue
		}
		l.Places = append(l.Places, fsstats.Place{Role: role, Configured: paths[role], Path: paths[role], Reported: paths[role], Filesystem: fs})
	}
	return l, errors.Join(errs...)
}

func (n *node) Mounts() ([]fsstats.Mount, error) { return nil, nil }

func (n *node) measure(ctx context.Context, what index.Subject) (index.Figure, error) {
	root, began := what.Path, time.Now()
	n.mu.Lock()
	n.walks[root]++
	hold, bytes, fail, broken := n.hold, n.bytes[root], n.walkFails[root], n.broken
	n.mu.Unlock()
	if broken {
		panic("bug")
	}
	if fail != nil {
		return index.Figure{}, fail
	}
	if hold != nil {
		select {
		case <-hold:
		case <-ctx.Done():
			return index.Figure{}, ctx.Err()
		}
	}
	return index.Figure{Bytes: bytes, Inodes: 3, Started: began, Finished: time.Now(), How: index.Walked}, nil
}

func observerOf(t *testing.T, n *node) *observer {
	t.Helper()
	n.walks, n.bytes = map[string]int{}, map[string]int64{}
	cfg := config.Default()
	cfg.Measure = config.Measure{Period: 10 * time.Second, MaxCorePercent: 50}
	return made(t, cfg, observed{
		store:       n,
		filesystems: n,
		mountpoints: func(context.Context) ([]string, []string, error) { return []string{"/images"}, nil, nil },
		measure:     n.measure,
	})
}

func made(t *testing.T, cfg config.Config, parts observed) *observer {
	t.Helper()
	o, err := newObserver(cfg, parts, zap.NewNop())
	if err != nil {
		t.Fatal(err)
	}
	return o
}

func container(id string) snapshot.Layer {
	return snapshot.Layer{Snapshotter: "overlayfs", Key: id, Class: snapshot.Container, ContainerID: id, CreatedAt: time.Unix(1, 0)}
}

// start primes and runs an observer in a bubble of fake time.
func start(t *testing.T, o *observer) {
	t.Helper()
	o.prime()
	ctx, cancel := context.WithCancel(t.Context())
	var done sync.WaitGroup
	done.Go(func() { o.run(ctx) })
	t.Cleanup(func() { cancel(); done.Wait() })
	time.Sleep(settled) //nolint:forbidigo // time is the bubble's
	synctest.Wait()
}

// settled is when a picture has what was known a moment before.
const settled = 3 * publishGap

func TestFactsAreThereBeforeTheFirstMeasurement(t *testing.T) {
	t.Parallel()
	o := observerOf(t, &node{})
	o.prime()
	f := o.Facts()
	if f.Images.Mountpoint == "" || f.Containers.Mountpoint == "" || f.Images.Used != nil || f.Containers.Used != nil {
		t.Errorf("facts %+v, want mountpoints and no usage", f)
	}
}

// TestLayersAreMeasuredByNeed: while nothing moves on a filesystem nothing on it is
// looked at, and its figures stay as good as new; when something does, it is.
func TestLayersAreMeasuredByNeed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := &node{layers: []snapshot.Layer{container("a"), {Snapshotter: "overlayfs", Key: "image", Class: snapshot.Image}}}
		o := observerOf(t, n)
		n.set("/layers/a", 5000)
		start(t, o)
		check := func(bytes uint64) {
			t.Helper()
			got := o.Facts().Layers["a"]
			if got.Used == nil || got.Used.Bytes != bytes || got.Used.Inodes != 3 || got.Mountpoint != "/layers" || got.CapacityBytes != 1<<30 {
				t.Fatalf("layer %+v (%+v), want %d bytes", got, got.Used, bytes)
			}
			if age := time.Since(got.Used.At); age > 3*time.Second {
				t.Errorf("the figure is from %s ago, want one that holds now", age)
			}
			if got := o.Facts().Images.Used; got == nil || got.Bytes != 1000 {
				t.Errorf("images use %+v, want the committed layer's 1000", got)
			}
			if got := o.Facts().Containers.Used; got == nil || got.Bytes != bytes {
				t.Errorf("containers use %+v, want %d", got, bytes)
			}
		}
		check(5000)
		time.Sleep(100 * time.Second) //nolint:forbidigo // time is the bubble's
		synctest.Wait()
		// Time stands still in a bubble: what was seen when the first one began may
		// have happened after it.
		if got := n.walked("/layers/a"); got > 2 {
			t.Errorf("%d walks in 100 s in which nothing moved, want the first and at most one more", got)
		}
		check(5000)
		n.set("/layers/a", 6000)
		n.write()
		time.Sleep(12 * time.Second) //nolint:forbidigo // time is the bubble's
		synctest.Wait()
		check(6000)
	})
}

func TestANewContainerIsMeasuredSoonWhenWanted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := &node{layers: []snapshot.Layer{container("a")}}
		o := observerOf(t, n)
		start(t, o)
		n.mu.Lock()
		n.layers = append(n.layers, container("b"))
		n.mu.Unlock()
		for range 100 {
			o.Wanted() // never blocks
		}
		time.Sleep(2 * passGapMin) //nolint:forbidigo // time is the bubble's
		synctest.Wait()
		if o.Facts().Layers["b"].Used == nil {
			t.Error("the new container is not measured")
		}
		if n.walked("/layers/a") != 1 {
			t.Errorf("the old container was measured %d times, want 1: its period is not over", n.walked("/layers/a"))
		}
	})
}

// TestLookingKeepsToItsShare: a store that takes long to read is read less often.
func TestLookingKeepsToItsShare(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := &node{layers: []snapshot.Layer{container("a")}, took: 20 * time.Second}
		o := observerOf(t, n)
		o.corePercent = 10
		start(t, o)
		time.Sleep(1000 * time.Second) //nolint:forbidigo // time is the bubble's
		n.mu.Lock()
		defer n.mu.Unlock()
		// With a tenth of a core there is one pass each 220 s.
		if n.read < 4 || n.read > 6 {
			t.Errorf("%d passes of 20 s in 1000 s with 10 %% of a core", n.read)
		}
	})
}

// TestAnswersNeverWaitForAWalk holds the walker and asks for facts.
func TestAnswersNeverWaitForAWalk(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := &node{layers: []snapshot.Layer{container("a")}}
		o := observerOf(t, n)
		n.set("/layers/a", 5000)
		start(t, o)
		n.mu.Lock()
		n.hold = make(chan struct{})
		n.mu.Unlock()
		held := time.Now()
		n.write()
		time.Sleep(60 * time.Second) //nolint:forbidigo // time is the bubble's
		synctest.Wait()
		if n.walked("/layers/a") != 2 {
			t.Fatalf("%d walks, want a second one that is held", n.walked("/layers/a"))
		}
		asked := time.Now()
		got := o.Facts().Layers["a"].Used
		if !time.Now().Equal(asked) {
			t.Error("the answer took its time")
		}
		if got == nil || got.Bytes != 5000 || got.At.After(held) {
			t.Errorf("facts %+v, want the last good ones of no later than %s", got, held)
		}
	})
}

func TestLastGoodFiguresStayWhileTheStoreFails(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := &node{layers: []snapshot.Layer{container("a")}}
		o := observerOf(t, n)
		n.set("/layers/a", 5000)
		start(t, o)
		n.mu.Lock()
		n.fail = errors.New("runtime is down")
		n.mu.Unlock()
		time.Sleep(30 * time.Second) //nolint:forbidigo // time is the bubble's
		synctest.Wait()
		if got := o.Facts().Layers["a"].Used; got == nil || got.Bytes != 5000 {
			t.Errorf("facts %+v, want the last good ones", got)
		}
		if p := o.newest.Load(); p.problem != "runtime is down" {
			t.Errorf("problem %q", p.problem)
		}
		n.mu.Lock()
		n.fail, n.layers = nil, nil
		n.mu.Unlock()
		time.Sleep(30 * time.Second) //nolint:forbidigo // time is the bubble's
		synctest.Wait()
		if got, ok := o.Facts().Layers["a"]; ok {
			t.Errorf("a container that is gone is still told of: %+v", got)
		}
		if p := o.newest.Load(); p.problem != "" {
			t.Errorf("problem %q after it was over", p.problem)
		}
	})
}

func TestContainersAreWhereMostLayersAre(t *testing.T) {
	t.Parallel()
	fs := func(d fsstats.Device, mountpoint string) *fsstats.Filesystem {
		return &fsstats.Filesystem{Device: d, Mountpoint: mountpoint}
	}
	cases := []struct {
		name  string
		where []*fsstats.Filesystem
		want  string
	}{
		{"no containers", nil, ""},
		{"with the images: named as the images are", []*fsstats.Filesystem{fs(imagesDevice, "/images")}, "/images"},
		{"all elsewhere", []*fsstats.Filesystem{fs(containersDevice, "/layers"), fs(containersDevice, "/layers")}, "/layers"},
		{"most elsewhere", []*fsstats.Filesystem{fs(imagesDevice, "/images"), fs(containersDevice, "/layers"), fs(containersDevice, "/layers")}, "/layers"},
		{"as many here as there: the same each time", []*fsstats.Filesystem{fs(imagesDevice, "/images"), fs(containersDevice, "/layers")}, "/images"},
		{"not looked at yet", []*fsstats.Filesystem{nil}, ""},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			o := observerOf(t, &node{})
			for i, f := range tc.where {
				l := container(fmt.Sprint(i))
				o.book.layers[layerID{key: l.Key}] = &layerState{layer: l, filesystem: f}
			}
			if got := o.book.containerPath("/images"); got != tc.want {
				t.Errorf("containers are at %q, want %q", got, tc.want)
			}
		})
	}
}

// TestASumWithoutOneFigureIsNoSum: while one layer is not measured the total
// would be too small, so there is none.
func TestASumWithoutOneFigureIsNoSum(t *testing.T) {
	t.Parallel()
	n := &node{}
	layout, err := n.Resolve(map[fsstats.Role]string{fsstats.NodeFS: "/", fsstats.ImageFS: "/images", fsstats.ContainerFS: "/layers"})
	if err != nil {
		t.Fatal(err)
	}
	for i := range layout.Places {
		layout.Places[i].Filesystem.MeasuredAt = time.Unix(7, 0)
	}
	there, _ := n.FilesystemOf("/layers/x") //nolint:errcheck // never fails
	layer := func(id string, fs *fsstats.Filesystem) surveyed {
		l := surveyed{layerState: layerState{layer: container(id), filesystem: fs}}
		l.key = l.snapshot(false).Key()
		return l
	}
	measured, unmeasured := layer("a", &there), layer("b", nil) // on images' or containers' disk? not known yet
	view := func(figures map[string]*index.Figure) *index.View {
		v := &index.View{}
		for _, id := range []string{"a", "b"} {
			if f, ok := figures[id]; ok {
				v.Owners = append(v.Owners, index.OwnerView{Kind: owners.Container, ID: id, Parts: []index.PartView{{Name: owners.Layer, Figure: f}}})
			}
		}
		return v
	}
	five := &index.Figure{Bytes: 5, Inodes: 1}
	o := observation{survey: &survey{readAt: time.Unix(9, 0), layers: []surveyed{measured}}, layout: layout, view: view(map[string]*index.Figure{"a": five})}
	p := assemble(o)
	if got := p.facts.Containers.Used; got == nil || got.Bytes != 5 || !got.At.Equal(time.Unix(7, 0)) {
		t.Errorf("one layer: %+v, want 5 bytes at the time of the filesystem's own figures", got)
	}
	o.survey = &survey{readAt: time.Unix(9, 0), layers: []surveyed{measured, unmeasured}}
	o.view = view(map[string]*index.Figure{"a": five, "b": nil})
	p = assemble(o)
	if got := p.facts.Containers.Used; got != nil {
		t.Errorf("one of two layers measured: %+v, want nothing", got)
	}
	a := p.accounts[containersDevice]
	if diff := cmp.Diff([]ClassUsage{{Class: classContainers, Bytes: 5, Inodes: 1, Unmeasured: 1}}, a.Classes); diff != "" {
		t.Errorf("classes (-want +got):\n%s", diff)
	}
	if a.OwnedBytes != 5 || a.UnattributedBytes != 1<<20-5 || a.Unmeasured != 1 {
		t.Errorf("account %+v, want 5 owned, the rest of 1 MiB not, one not measured", a)
	}
}

// TestAViewTakesNothing: looking at an image must not make the containers'
// figure unknown.
func TestAViewTakesNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := &node{layers: []snapshot.Layer{container("a"), {Snapshotter: "overlayfs", Key: "look", Class: snapshot.View}}}
		o := observerOf(t, n)
		n.set("/layers/a", 5000)
		start(t, o)
		if got := o.Facts().Containers.Used; got == nil || got.Bytes != 5000 {
			t.Errorf("containers use %+v beside a view, want 5000", got)
		}
	})
}

// TestAPanicWhileMeasuringIsAProblemNotTheEnd: the last good figures stay.
func TestAPanicWhileMeasuringIsAProblemNotTheEnd(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := &node{layers: []snapshot.Layer{container("a")}}
		o := observerOf(t, n)
		n.set("/layers/a", 5000)
		start(t, o)
		n.mu.Lock()
		n.broken = true
		n.mu.Unlock()
		n.write()
		time.Sleep(30 * time.Second) //nolint:forbidigo // time is the bubble's
		synctest.Wait()
		if got := o.Facts().Layers["a"].Used; got == nil || got.Bytes != 5000 {
			t.Errorf("facts %+v, want the last good ones", got)
		}
		if p := o.newest.Load(); !strings.Contains(p.problem, "report this as a bug") {
			t.Errorf("problem %q, want one that says so", p.problem)
		}
	})
}

// on answers that a path is on a filesystem.
func on(device fsstats.Device, mountpoint string) func() (fsstats.Filesystem, error) {
	return func() (fsstats.Filesystem, error) {
		return fsstats.Filesystem{Device: device, Mountpoint: mountpoint, CapacityBytes: 1 << 30, UsedBytes: 1 << 20, MeasuredAt: time.Now()}, nil
	}
}

// says answers with an error.
func says(err error) func() (fsstats.Filesystem, error) {
	return func() (fsstats.Filesystem, error) { return fsstats.Filesystem{}, err }
}

var thirdDevice = fsstats.Device{Major: 8, Minor: 33}

// TestImagesAreWhereLayersAre: the runtime names the snapshotter's root, but the
// layers below it are on a disk of their own, or the root does not exist (CTD-4).
func TestImagesAreWhereLayersAre(t *testing.T) {
	t.Parallel()
	type places = map[string]func() (fsstats.Filesystem, error)
	cases := []struct {
		name   string
		places places
		lower  string
		want   string
		device fsstats.Device
	}{
		{"below the root", nil, "", "/images", imagesDevice},
		{"snapshots is another disk, nothing runs", places{"/images/snapshots": on(thirdDevice, "/images/snapshots")}, "", "/images/snapshots", thirdDevice},
		{"snapshots is another disk, a container runs",
			places{"/images/snapshots": on(thirdDevice, "/images/snapshots"), "/images/snapshots/7/fs": on(thirdDevice, "/images/snapshots")},
			"/images/snapshots/7/fs", "/images/snapshots", thirdDevice},
		{"a container's lower layer is elsewhere", places{"/elsewhere": on(thirdDevice, "/elsewhere"), "/elsewhere/7/fs": on(thirdDevice, "/elsewhere")}, "/elsewhere/7/fs", "/elsewhere", thirdDevice},
		{"the root does not exist", places{"/images": says(fs.ErrNotExist), "/images/snapshots": says(fs.ErrNotExist), "/elsewhere": on(thirdDevice, "/elsewhere"), "/elsewhere/7/fs": on(thirdDevice, "/elsewhere")},
			"/elsewhere/7/fs", "/elsewhere", thirdDevice},
		{"the lower layer does not answer", places{"/elsewhere/7/fs": says(fsstats.ErrNoAnswer)}, "/elsewhere/7/fs", "/images", imagesDevice},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				n := &node{
					layers: []snapshot.Layer{container("a"), {Snapshotter: "overlayfs", Key: "image", Class: snapshot.Image}},
					places: tc.places, lower: tc.lower,
				}
				o := observerOf(t, n)
				n.set("/layers/a", 5000)
				start(t, o)
				images := o.Facts().Images
				if images.Mountpoint != tc.want || images.Device != tc.device.String() {
					t.Errorf("images are at %s on %s, want %s on %s", images.Mountpoint, images.Device, tc.want, tc.device)
				}
				if images.Used == nil || images.Used.Bytes != 1000 {
					t.Errorf("images use %+v, want the committed layer's 1000", images.Used)
				}
			})
		})
	}
}

// TestCTD14_LayersOfASecondSnapshotterAreWhereThatIs: they are no image bytes on
// the first one's disk.
func TestCTD14_LayersOfASecondSnapshotterAreWhereThatIs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := &node{
			layers: []snapshot.Layer{{Snapshotter: "overlayfs", Key: "image", Class: snapshot.Image}, {Snapshotter: "second", Key: "image", Class: snapshot.Image}},
			roots:  map[string]string{"second": "/second"},
			places: map[string]func() (fsstats.Filesystem, error){
				"/second/snapshots": on(containersDevice, "/second"), "/second": on(containersDevice, "/second"),
			},
		}
		o := observerOf(t, n)
		start(t, o)
		if got := o.Facts().Images.Used; got == nil || got.Bytes != 1000 {
			t.Errorf("images use %+v, want 1000: one layer is on another disk", got)
		}
	})
}

// TestLayersOfASnapshotterThatCantBeReadAreKept: its process is down; what it
// held is still there, and the others' figures go on.
func TestLayersOfASnapshotterThatCantBeReadAreKept(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		other := container("b")
		other.Snapshotter = "second"
		n := &node{layers: []snapshot.Layer{container("a"), other}, roots: map[string]string{"second": "/second"}}
		o := observerOf(t, n)
		n.set("/layers/a", 5000)
		n.set("/layers/b", 7000)
		start(t, o)
		n.mu.Lock()
		n.unread = []string{"second"}
		n.layers = []snapshot.Layer{other}
		n.mu.Unlock()
		time.Sleep(30 * time.Second) //nolint:forbidigo // time is the bubble's
		synctest.Wait()
		layers := o.Facts().Layers
		if got := layers["b"].Used; got == nil || got.Bytes != 7000 {
			t.Errorf("the layer of the snapshotter that can't be read: %+v, want 7000 bytes", got)
		}
		if _, ok := layers["a"]; ok {
			t.Error("a layer that is gone from a snapshotter that was read is still told of")
		}
		if problem := o.newest.Load().problem; !strings.Contains(problem, "second") {
			t.Errorf("problem %q, want one that names the snapshotter", problem)
		}
	})
}

// TestAFilesystemThatDoesNotAnswerIsNoReasonNotToServe: at the start nothing is
// known of the images' place, later it is.
func TestAFilesystemThatDoesNotAnswerIsNoReasonNotToServe(t *testing.T) {
	t.Parallel()
	n := &node{places: map[string]func() (fsstats.Filesystem, error){fallbackImages: says(fsstats.ErrNoAnswer)}}
	o := observerOf(t, n)
	o.prime()
	p := o.newest.Load()
	if p.facts == nil || p.facts.Images.Mountpoint != "" || !p.facts.Images.Guessed {
		t.Errorf("facts %+v, want none", p.facts)
	}
	if _, ok := p.layout.Get(fsstats.NodeFS); !ok {
		t.Error("nodefs answers and is not in the layout")
	}
	if p.problem == "" {
		t.Error("no problem is told")
	}
	o.pass(t.Context())
	if got := o.newest.Load().facts.Images.Mountpoint; got != "/images" {
		t.Errorf("images at %q after the runtime has named them, want /images", got)
	}
}

// TestALayerThatCantBeMeasuredIsAProblemUnlessItIsGone.
func TestALayerThatCantBeMeasuredIsAProblemUnlessItIsGone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := &node{layers: []snapshot.Layer{container("a"), container("b")}}
		o := observerOf(t, n)
		n.walkFails = map[string]error{"/layers/a": errors.New("input/output error"), "/layers/b": fs.ErrNotExist}
		start(t, o)
		problem := o.newest.Load().problem
		if !strings.Contains(problem, "/layers/a") || strings.Contains(problem, "/layers/b") {
			t.Errorf("problem %q, want one of /layers/a alone", problem)
		}
	})
}

func TestProblemsAreToldTheSameWayEachTime(t *testing.T) {
	t.Parallel()
	errs := []error{errors.New("d"), errors.New("b"), errors.New("a"), errors.New("c"), errors.New("a"), errors.New("e")}
	const want = "a; b; c; and 2 more"
	for range 10 {
		errs = append(errs[1:], errs[0])
		if got := summary(errs); got.Error() != want {
			t.Errorf("told %q, want %q", got, want)
		}
	}
	if summary(nil) != nil {
		t.Error("no problem is told as one")
	}
}

// TestAMeasurementThatHangsIsTold says what it waits for, and is over when it ends.
// Nothing else waits for it.
func TestAMeasurementThatHangsIsTold(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := &node{layers: []snapshot.Layer{container("a")}}
		o := observerOf(t, n)
		n.set("/layers/a", 5000)
		start(t, o)
		hold := make(chan struct{})
		n.mu.Lock()
		n.hold = hold
		n.mu.Unlock()
		n.write()
		time.Sleep(2 * passSlow) //nolint:forbidigo // time is the bubble's
		synctest.Wait()
		p := o.newest.Load()
		if !strings.Contains(p.problem, "/layers/a") {
			t.Errorf("problem %q, want one that names /layers/a", p.problem)
		}
		if p.facts.Layers["a"].Used == nil {
			t.Error("the last good figures are gone")
		}
		if age := time.Since(p.measuredAt); age > 11*time.Second {
			t.Errorf("who is there was found out %s ago: that waits for the measurement", age)
		}
		n.mu.Lock()
		n.hold = nil
		n.mu.Unlock()
		close(hold)
		time.Sleep(settled) //nolint:forbidigo // time is the bubble's
		synctest.Wait()
		if p := o.newest.Load(); p.problem != "" {
			t.Errorf("problem %q after it was over", p.problem)
		}
	})
}

// TestAStoreThatHangsIsTold: the last good figures stay meanwhile.
func TestAStoreThatHangsIsTold(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := &node{layers: []snapshot.Layer{container("a")}}
		o := observerOf(t, n)
		n.set("/layers/a", 5000)
		start(t, o)
		n.mu.Lock()
		n.took = 10 * passSlow
		n.mu.Unlock()
		time.Sleep(2 * passSlow) //nolint:forbidigo // time is the bubble's
		synctest.Wait()
		p := o.newest.Load()
		if !strings.Contains(p.problem, "containerd's store") || p.facts.Layers["a"].Used == nil {
			t.Errorf("problem %q and figures %+v, want one that names the store, and the last good figures", p.problem, p.facts.Layers["a"].Used)
		}
		n.mu.Lock()
		n.took = 0
		n.mu.Unlock()
		time.Sleep(200 * passSlow) //nolint:forbidigo // time is the bubble's
		synctest.Wait()
		if p := o.newest.Load(); p.problem != "" {
			t.Errorf("problem %q after it was over", p.problem)
		}
	})
}

// TestASplitNodeIsSplitBeforeItsFirstContainer: the kubelet keeps the first layout
// that it sees (LAY-8), so it must not hear of one disk while nothing runs yet.
func TestASplitNodeIsSplitBeforeItsFirstContainer(t *testing.T) {
	t.Parallel()
	n := &node{layers: []snapshot.Layer{{Snapshotter: "overlayfs", Key: "image", Class: snapshot.Image}}, walks: map[string]int{}, bytes: map[string]int64{}}
	cfg := config.Default()
	cfg.Snapshotter.ImageRoot, cfg.Snapshotter.ContainerRoot = "/images", "/layers"
	o := made(t, cfg, observed{
		store: n, filesystems: n, measure: n.measure,
		mountpoints: func(context.Context) ([]string, []string, error) { return []string{"/images"}, nil, nil },
	})
	for _, step := range []func(){o.prime, func() { o.pass(t.Context()) }} {
		step()
		f := o.Facts()
		if f.Images.Mountpoint != "/images" || f.Containers.Mountpoint != "/layers" || f.Images.Device == f.Containers.Device {
			t.Errorf("images on %s (%s), containers on %s (%s), want /images and /layers", f.Images.Mountpoint, f.Images.Device, f.Containers.Mountpoint, f.Containers.Device)
		}
	}
}

// TestAContentStoreThatCantBeFoundIsNotNothing: the images' sum may lack it, so
// there is none.
func TestAContentStoreThatCantBeFoundIsNotNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		places := map[string]func() (fsstats.Filesystem, error){}
		n := &node{layers: []snapshot.Layer{{Snapshotter: "overlayfs", Key: "image", Class: snapshot.Image}}, places: places}
		o := observerOf(t, n)
		places["/images/content"] = says(fsstats.ErrNoAnswer)
		start(t, o)
		if got := o.Facts().Images.Used; got != nil {
			t.Errorf("images use %+v without the content store, want no figure", got)
		}
	})
}

// TestLocateGuessesNothing: where images are is what the runtime or the
// configuration says, and the containers' place is that of their layers.
func TestLocateGuessesNothing(t *testing.T) {
	t.Parallel()
	says := func(images []string, err error) mountpointsFunc {
		return func(context.Context) ([]string, []string, error) { return images, nil, err }
	}
	down := errors.New("the runtime does not answer")
	for _, tc := range []struct {
		name        string
		mountpoints mountpointsFunc
		configure   func(*observer)
		layers      []snapshot.Layer
		images      string // empty: not known
		containers  string
	}{
		{"the runtime says it", says([]string{"/images"}, nil), func(*observer) {}, []snapshot.Layer{container("c")}, "/images", "/layers"},
		{"no container yet", says([]string{"/images"}, nil), func(*observer) {}, nil, "/images", "/images"},
		{"the runtime is down", says(nil, down), func(*observer) {}, nil, "", ""},
		{"it is down, the configuration says it", says(nil, down), func(o *observer) { o.configured.ImageFS = "/images/here" }, nil, "/images/here", "/images/here"},
		{"it is down, the split snapshotter has roots", says(nil, down), func(o *observer) { o.named, o.splitContainers = "/images", "/layers" }, nil, "/images", "/layers"},
		{"it names nothing", says(nil, nil), func(*observer) {}, nil, "", ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			n := &node{layers: tc.layers}
			o := observerOf(t, n)
			o.mountpoints = tc.mountpoints
			tc.configure(o)
			layout, err := o.locate(t.Context())
			if tc.images == "" {
				if !errors.Is(err, errNotSaid) || len(layout.Places) > 0 {
					t.Errorf("%+v, %v, want nothing known", layout, err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			for role, want := range map[fsstats.Role]string{fsstats.ImageFS: tc.images, fsstats.ContainerFS: tc.containers} {
				if p, _ := layout.Get(role); p.Configured != want {
					t.Errorf("%s at %q, want %q", role, p.Configured, want)
				}
			}
			if n.walked("/layers/c") > 0 || n.walked("/images/content") > 0 {
				t.Error("something was measured")
			}
		})
	}
}

// TestSlowPassThatEndsWhileItIsTold: the news of the pass must not be replaced by
// what was known before it.
func TestSlowPassThatEndsWhileItIsTold(t *testing.T) {
	t.Parallel()
	o := observerOf(t, &node{})
	o.prime()
	newer := &survey{ended: time.Now()}
	o.log = zap.New(zapcore.NewCore(zapcore.NewJSONEncoder(zapcore.EncoderConfig{}), zapcore.AddSync(io.Discard), zap.WarnLevel),
		zap.Hooks(func(zapcore.Entry) error { o.surveyed.Store(newer); return nil }))
	o.tellSlow(time.Now())
	if got := o.surveyed.Load(); got != newer {
		t.Errorf("the newest survey is %+v, want that of the pass that has ended", got)
	}
}

// TestLayersOfTheSplitSnapshotterAreAskedForNotWalked: who has the files measures
// them; while nothing moves on their filesystem nobody is asked again.
func TestLayersOfTheSplitSnapshotterAreAskedForNotWalked(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := &node{layers: []snapshot.Layer{container("a")}, walks: map[string]int{}, bytes: map[string]int64{}}
		cfg := config.Default()
		cfg.Snapshotter.ImageRoot, cfg.Snapshotter.ContainerRoot = "/images", "/layers"
		o := made(t, cfg, observed{
			store: n, filesystems: n, measure: n.measure,
			mountpoints: func(context.Context) ([]string, []string, error) { return []string{"/images"}, nil, nil },
		})
		start(t, o)
		if got := o.Facts().Layers["a"].Used; got == nil || got.Bytes != 1000 {
			t.Errorf("the layer takes %+v, want the 1000 that its snapshotter says", got)
		}
		time.Sleep(5 * time.Minute) //nolint:forbidigo // time is the bubble's
		synctest.Wait()
		n.mu.Lock()
		quiet := n.asked
		n.mu.Unlock()
		if quiet > 5 { // there are 30 looks at who is there
			t.Errorf("asked %d times in 5 min in which nothing moved", quiet)
		}
		n.write()
		time.Sleep(25 * time.Second) //nolint:forbidigo // time is the bubble's
		synctest.Wait()
		n.mu.Lock()
		defer n.mu.Unlock()
		if n.asked == quiet {
			t.Error("not asked again after something has moved")
		}
		if n.walks["/layers/a"] > 0 {
			t.Error("the layer was walked")
		}
	})
}

// TestWhoIsOnADiskThatHangsIsNotForgotten: its figures stay, with their age, and
// all others go on.
func TestWhoIsOnADiskThatHangsIsNotForgotten(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := &node{layers: []snapshot.Layer{container("a")}}
		o := observerOf(t, n)
		n.set("/images/content", 7000)
		start(t, o)
		content := func() (f *index.Figure) {
			owner, _ := o.index.View().Owner(owners.Content, "")
			p, _ := owner.Part(owners.Blobs)
			return p.Figure
		}
		if f := content(); f == nil || f.Bytes != 7000 {
			t.Fatalf("the content store takes %+v, want 7000", f)
		}
		n.mu.Lock()
		n.stuck = "/images/content"
		n.mu.Unlock()
		n.set("/layers/a", 9000)
		n.write()
		time.Sleep(time.Minute) //nolint:forbidigo // time is the bubble's
		synctest.Wait()
		if f := content(); f == nil || f.Bytes != 7000 {
			t.Errorf("the content store takes %+v while its disk hangs, want the last 7000", f)
		}
		if got := o.Facts().Layers["a"].Used; got == nil || got.Bytes != 9000 {
			t.Errorf("the layer elsewhere takes %+v, want the new 9000", got)
		}
		if problem := o.newest.Load().problem; !strings.Contains(problem, fsstats.ErrNoAnswer.Error()) {
			t.Errorf("problem %q, want one that says that a disk does not answer", problem)
		}
	})
}

// TestADiskThatHangsIsAskedOnceForAllItsLayers: each question takes seconds and a thread
// that waits.
func TestADiskThatHangsIsAskedOnceForAllItsLayers(t *testing.T) {
	t.Parallel()
	asked, hanging := map[string]int{}, false
	n := &node{lower: "/lower", places: map[string]func() (fsstats.Filesystem, error){}}
	on := func(path string, d fsstats.Device, mayHang bool) {
		n.places[path] = func() (fsstats.Filesystem, error) {
			asked[path]++
			if mayHang && hanging {
				return fsstats.Filesystem{}, fmt.Errorf("%s: %w", path, fsstats.ErrNoAnswer)
			}
			return fsstats.Filesystem{Device: d, Mountpoint: "/", MeasuredAt: time.Unix(int64(asked[path]), 0)}, nil
		}
	}
	on("/lower", imagesDevice, true)
	for i := range 20 {
		id := fmt.Sprintf("c%02d", i)
		n.layers = append(n.layers, container(id))
		d, mayHang := containersDevice, true
		if i >= 10 {
			d, mayHang = imagesDevice, false // another disk
		}
		on("/layers/"+id, d, mayHang)
	}
	b := &layerBook{store: n, filesystems: n, log: zap.NewNop(), at: func(string) {}, layers: map[layerID]*layerState{}}
	for _, round := range []struct {
		name           string
		hanging        bool
		lower, its, of int // how often the lower layer, and those of each disk, are asked together
	}{
		{"all is well", false, 1, 10, 10},
		{"the disk hangs", true, 1, 1, 10},
		{"it answers again", false, 1, 10, 10},
	} {
		clear(asked)
		hanging = round.hanging
		if problems := b.refresh(t.Context(), time.Unix(1, 0)); len(problems) > 0 {
			t.Fatal(problems)
		}
		its, of := 0, 0
		for i, l := range n.layers {
			if i < 10 {
				its += asked["/layers/"+l.Key]
			} else {
				of += asked["/layers/"+l.Key]
			}
		}
		if asked["/lower"] != round.lower || its != round.its || of != round.of {
			t.Errorf("%s: asked %d times for the lower layer, %d and %d for the others, want %d, %d, %d",
				round.name, asked["/lower"], its, of, round.lower, round.its, round.of)
		}
		for _, l := range b.sorted() {
			if l.filesystem == nil {
				t.Errorf("%s: it is not known any more where %s is", round.name, l.layer.Key)
			}
		}
	}
	// At a start nothing is known of any.
	clear(asked)
	hanging, b.layers, n.layers = true, map[layerID]*layerState{}, n.layers[:10]
	b.refresh(t.Context(), time.Unix(2, 0))
	if its := asked["/layers/c00"]; its != 1 || len(asked) != 2 {
		t.Errorf("asked %v at a start, want one upper and one lower layer", asked)
	}
}

// TestDeletedFilesOfAProjectCountOnce: the kernel's counter of the layer has them. It
// has none of a volume on the same filesystem, and a layer without a project has none.
func TestDeletedFilesOfAProjectCountOnce(t *testing.T) {
	t.Parallel()
	there := &fsstats.Filesystem{Device: containersDevice}
	s := &survey{}
	figures := map[index.Key]index.PartView{}
	for id, how := range map[string]string{"project": split.HowQuota, "no project": index.Walked} {
		l := surveyed{layerState: layerState{layer: container(id), filesystem: there}, given: true}
		l.key = l.snapshot(true).Key()
		s.layers, figures[l.key] = append(s.layers, l), index.PartView{Figure: &index.Figure{How: how}}
	}
	s.layers = append(s.layers, surveyed{layerState: layerState{layer: container("ours"), filesystem: there}})
	at := func(id string, d fsstats.Device) orphan.Place { return orphan.Place{Holder: id, Device: d} }
	r := orphan.Report{
		Sums: map[orphan.Place]orphan.Sum{
			at("project", containersDevice): {Bytes: 15, Files: 3}, at("project", imagesDevice): {Bytes: 7, Files: 1},
			at("no project", containersDevice): {Bytes: 15, Files: 3}, at("ours", containersDevice): {Bytes: 15, Files: 3},
		},
		Overlays: map[orphan.Place]orphan.Sum{
			at("project", containersDevice): {Bytes: 5, Files: 2}, at("no project", containersDevice): {Bytes: 5, Files: 2},
			at("ours", containersDevice): {Bytes: 5, Files: 2},
		},
	}
	want := maps.Clone(r.Sums)
	want[at("project", containersDevice)] = orphan.Sum{Bytes: 10, Files: 1}
	leaveOut(&r, s.counted(figures))
	if diff := cmp.Diff(want, r.Sums); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	all := orphan.Report{Sums: map[orphan.Place]orphan.Sum{at("project", containersDevice): {Bytes: 5, Files: 2}}, Overlays: r.Overlays}
	if leaveOut(&all, s.counted(figures)); len(all.Sums) != 0 {
		t.Errorf("there is %v, want nothing", all.Sums)
	}
}
