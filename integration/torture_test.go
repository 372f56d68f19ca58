package integration

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	leasesapi "github.com/containerd/containerd/api/services/leases/v1"
	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"go.uber.org/zap"
	"google.golang.org/grpc/metadata"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/agent/snapshotter"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/image"
	"github.com/cleave-cri/cleave/lab/layers"
	"github.com/cleave-cri/cleave/lab/node"
	"github.com/cleave-cri/cleave/lab/pod"
	"github.com/cleave-cri/cleave/lab/sweep"
	"github.com/cleave-cri/cleave/lab/tree"
	"github.com/cleave-cri/cleave/snapshot"
	"github.com/cleave-cri/cleave/snapshot/split"
	"github.com/cleave-cri/cleave/snapshot/split/ctdconfig"
	"github.com/cleave-cri/cleave/snapshot/split/fault"
	"github.com/cleave-cri/cleave/snapshot/split/trash"
)

const (
	// tortureEnv is how many crashes there are, tortureSeedEnv decides which, and
	// tortureBinaryEnv names the program to crash, built with the tag faultpoints.
	// Empty: few, any, and one that is built with the race detector.
	tortureEnv       = "CLEAVE_TORTURE"
	tortureSeedEnv   = "CLEAVE_TORTURE_SEED"
	tortureBinaryEnv = "CLEAVE_TORTURE_BINARY"
	// fewCrashes are enough for each kind once.
	fewCrashes = 16

	// crashPatience bounds the wait for a crash, and for the order after it.
	crashPatience = 60 * time.Second
	// callPatience bounds a call of the load.
	callPatience = 20 * time.Second
)

// Kinds of crashes that are no fault points: SIGKILL at any moment of the load,
// and right after the start.
const (
	killed        fault.Point = "killed"
	killedAtStart fault.Point = "killed-at-start"
)

// crashKinds are all kinds, and how often the moment is passed before the crash,
// at most: what a round of the load reaches.
func crashKinds() map[fault.Point]int {
	kinds := map[fault.Point]int{killed: 12, killedAtStart: 1}
	for _, p := range fault.Points() {
		kinds[p] = 6
	}
	kinds[fault.UsageMeasured] = 4
	kinds[fault.SweepMoving] = 3
	kinds[fault.TrashDeleting] = 60
	kinds[fault.InitMarked], kinds[fault.InitWritten] = 1, 1
	// It needs a full disk: TestFullDisksUnderContainerd has it under containerd,
	// TestCrash of snapshot/split without.
	delete(kinds, fault.BallastReleased)
	// It needs project quota: a guest has that (make test-quota-vm).
	delete(kinds, fault.CreateMarked)
	return kinds
}

// deal gives count crashes: each kind before any comes again, in random order.
func deal(random *rand.Rand, count int) []fault.Point {
	var out []fault.Point
	for len(out) < count {
		deck := slices.Sorted(maps.Keys(crashKinds()))
		random.Shuffle(len(deck), func(i, j int) { deck[i], deck[j] = deck[j], deck[i] })
		out = append(out, deck...)
	}
	return out[:count]
}

// TestCrashesUnderContainerd kills the snapshotter at every fault point, and at
// any moment, while containerd pulls, unpacks, runs and removes; containerd is
// killed too, now and then. After each crash nothing may be lost, nothing may
// stay, and a container that runs through all of it must not notice.
func TestCrashesUnderContainerd(t *testing.T) {
	t.Parallel()
	count := fewCrashes
	long := os.Getenv(tortureEnv) != ""
	if long {
		var err error
		if count, err = strconv.Atoi(os.Getenv(tortureEnv)); err != nil || count < 1 {
			t.Fatalf("%s=%q: want a number of crashes", tortureEnv, os.Getenv(tortureEnv))
		}
	}
	seed := rand.Uint64N(1_000_000) //nolint:gosec // not a secret
	if text := os.Getenv(tortureSeedEnv); text != "" {
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatalf("%s=%q: want a number", tortureSeedEnv, text)
		}
	}
	t.Logf("%d crashes; %s=%d repeats them", count, tortureSeedEnv, seed)
	began := time.Now()
	crashes := deal(rand.New(rand.NewPCG(seed, 0)), count) //nolint:gosec // it has to be the same each time
	kinds := []disk.FS{disk.Ext4, disk.XFS}
	results := make([]tally, len(kinds))
	t.Run("on", func(t *testing.T) {
		for i, kind := range kinds {
			results[i].crashes = map[fault.Point]int{}
			random := rand.New(rand.NewPCG(seed, uint64(i)+1)) //nolint:gosec // the same
			share := crashes[i*count/len(kinds) : (i+1)*count/len(kinds)]
			t.Run(string(kind), func(t *testing.T) {
				t.Parallel()
				startTorture(t, kind, random, &results[i]).run(t, share)
			})
		}
	})
	sum := tally{crashes: map[fault.Point]int{}}
	for _, r := range results {
		sum.add(r)
	}
	if !t.Failed() {
		for point := range crashKinds() {
			if sum.crashes[point] == 0 && count >= fewCrashes {
				t.Errorf("no crash at %s", point)
			}
		}
	}
	t.Logf("torture: %d crashes in %v, seed %d: %s", sum.total(), time.Since(began).Round(time.Second), seed, sum)
}

// tally counts crashes and remembers the worst of what came after.
type tally struct {
	crashes map[fault.Point]int
	// containerd is how often that was killed too.
	containerd int
	// leakBytes is the most that a filesystem had more than before, in the end;
	// recovery the longest time from a start to a containerd that is known and
	// has compared its snapshots.
	leakBytes int64
	recovery  time.Duration
}

func (a *tally) add(b tally) {
	for point, n := range b.crashes {
		a.crashes[point] += n
	}
	a.containerd += b.containerd
	a.leakBytes = max(a.leakBytes, b.leakBytes)
	a.recovery = max(a.recovery, b.recovery)
}

func (a *tally) total() int {
	n := 0
	for _, c := range a.crashes {
		n += c
	}
	return n
}

func (a tally) String() string {
	var points []string
	for _, p := range slices.Sorted(maps.Keys(a.crashes)) {
		points = append(points, fmt.Sprintf("%s %d", p, a.crashes[p]))
	}
	return fmt.Sprintf("%s; containerd killed too %d; worst leak %d bytes; worst recovery %v", strings.Join(points, ", "), a.containerd, a.leakBytes, a.recovery.Round(time.Millisecond))
}

// torture is a node under load whose snapshotter crashes again and again.
type torture struct {
	*node.Node
	client *pod.Client
	store  *snapshot.Store
	random *rand.Rand
	tally  *tally
	// kept is an image that stays; loads are pulled and removed, one by each
	// worker of the load. trees are their root filesystems.
	kept  string
	loads []string
	trees map[string]tree.Tree
	// witness is a container that runs through all of it.
	witness witness
	// usedBytes are those of the disks, and snapshots the number, when nothing
	// but what stays is there.
	usedBytes map[string]int64
	snapshots int
	rounds    int
}

// faultyBinary is the program with fault points.
func faultyBinary(t testing.TB) string {
	t.Helper()
	if binary := os.Getenv(tortureBinaryEnv); binary != "" {
		return binary
	}
	binary, err := buildFaulty()
	if err != nil {
		t.Fatal(err)
	}
	return binary
}

// startTorture makes the node, with everything in it that stays.
func startTorture(t *testing.T, kind disk.FS, random *rand.Rand, counts *tally) *torture {
	t.Helper()
	x := &torture{random: random, tally: counts, kept: "example.org/kept:1", loads: []string{"example.org/load:0", "example.org/load:1"}, trees: map[string]tree.Tree{}, usedBytes: map[string]int64{}}
	x.Node = startSplitNode(t, node.Options{Disks: twoDisks(kind)}, node.SplitOptions{Images: "images", Containers: "containers", Binary: faultyBinary(t), MaxConcurrentUnpacks: 4})
	x.client = dial(t, x.Runtime.Endpoint())
	x.store = snapshot.NewStore(x.client.Conn(), "k8s.io")
	ctx := limited(t, patience)
	refs := append([]string{x.kept}, x.loads...)
	for i, ref := range refs {
		// The lowest layer is each image's own, too.
		base, err := image.Busybox(ctx, image.Config{Files: map[string]string{"/payload": strings.Repeat(ref+"\n", 50_000)}})
		if err != nil {
			t.Fatal(err)
		}
		img, err := layers.Append(base, uint64(i)+1, 5)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := x.Registry.Push(ctx, ref, img); err != nil {
			t.Fatal(err)
		}
	}
	// What each image is like.
	for _, ref := range refs {
		if _, err := x.client.Pull(ctx, ref); err != nil {
			t.Fatal(err)
		}
	}
	p, err := x.client.Run(ctx, x.PodSpec("first"))
	if err != nil {
		t.Fatal(err)
	}
	for i, ref := range refs {
		id, err := p.Start(ctx, pod.ContainerSpec{Name: fmt.Sprint("c", i), Image: ref, Command: []string{"sh", "-c", "exec sleep 100000"}})
		if err != nil {
			t.Fatal(err)
		}
		x.trees[ref] = rootfs(t, x.Runtime, id)
		if len(x.trees[ref]) < 300 || len(layersOf(x.trees[ref])) != 5 {
			t.Fatalf("%s has %d names and the layers %v, which is not the image", ref, len(x.trees[ref]), layersOf(x.trees[ref]))
		}
	}
	x.witness = startWitness(ctx, t, x.Node, x.client, x.kept)
	x.tidy(ctx, t)
	x.waitTrash(ctx, t)
	for name, d := range x.Disks {
		x.usedBytes[name] = usedBytes(t, d)
	}
	if err := x.Split.Stop(ctx); err != nil {
		t.Fatal(err)
	}
	x.snapshots = examine(ctx, t, x.Split.Config()).Snapshots
	return x
}

// run crashes the snapshotter in each of the ways, one after the other.
func (x *torture) run(t *testing.T, crashes []fault.Point) {
	for i, point := range crashes {
		ctx := limited(t, 3*crashPatience)
		n := 1 + x.random.IntN(crashKinds()[point])
		what := fmt.Sprintf("crash %d, %s:%d", i, point, n)
		if point == fault.InitMarked || point == fault.InitWritten {
			x.crashInit(ctx, t, point)
		} else {
			x.crash(ctx, t, what, point, n)
		}
		if t.Failed() {
			t.Fatalf("after %s", what)
		}
		x.tally.crashes[point]++
		if (i+1)%10 == 0 {
			t.Logf("torture: %d of %d crashes; %s", i+1, len(crashes), x.tally)
		}
	}
	// The node's end wants a snapshotter.
	if err := x.Split.Start(limited(t, patience)); err != nil {
		t.Fatal(err)
	}
}

// crash lets the snapshotter die under load, starts it again and looks whether
// all is well. The snapshotter is down before and after.
func (x *torture) crash(ctx context.Context, t *testing.T, what string, point fault.Point, n int) {
	t.Helper()
	var env []string
	if point != killed && point != killedAtStart {
		env = []string{fmt.Sprintf("CLEAVE_FAULT=%s:%d", point, n)}
	}
	if point == fault.SweepMoving {
		// What crashes at create-made leave.
		for i := range n {
			for _, root := range []string{x.Split.Config().Snapshotter.ImageRoot, x.Split.Config().Snapshotter.ContainerRoot} {
				if err := os.MkdirAll(filepath.Join(root, "snapshots", fmt.Sprintf("new-STRAY%d", i), "diff"), 0o700); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	err := x.Split.Start(ctx, env...)
	dead := x.Split.Ended()
	if err == nil && point != killedAtStart {
		err = x.Split.WaitKnown(ctx, x.Runtime.PID())
	}
	select {
	case <-dead: // a start reaches some of the points
		err = nil
	default:
	}
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	if point == killedAtStart {
		x.kill(ctx, t)
	}

	// The load goes on until the crash, and each worker's round to its end.
	calls, finish := x.load(ctx, dead)
	containerd := x.random.IntN(8) // 0: killed under load; 1, 2: after the crash
	killAt := 0
	if point == killed {
		killAt = n
	}
	restartAt := 0
	if containerd == 0 {
		restartAt = 1 + x.random.IntN(6)
	}
	limit := time.NewTimer(crashPatience)
	defer limit.Stop()
	for count, waiting := 1, true; waiting; count++ {
		select {
		case <-dead:
			waiting = false
		case <-calls:
			if count == restartAt {
				x.killContainerd(t)
				x.startContainerd(ctx, t)
			}
			if count == killAt {
				x.kill(ctx, t)
			}
		case <-limit.C:
			x.kill(ctx, t)
			t.Fatalf("%s: not reached in %v; the last call that failed: %v", what, crashPatience, finish())
		}
	}
	// Either what the load still removes is removed while nobody is there, or not.
	if x.random.IntN(2) == 0 {
		_ = finish() //nolint:errcheck // calls may fail in a crash
	}
	if containerd == 1 || containerd == 2 {
		x.killContainerd(t)
	}
	began := time.Now()
	if containerd == 1 {
		x.startContainerd(ctx, t)
	}
	if err := x.Split.Start(ctx); err != nil {
		t.Fatalf("%s: start again: %v", what, err)
	}
	if containerd == 2 {
		x.startContainerd(ctx, t)
	}
	if err := x.Split.WaitKnown(ctx, x.Runtime.PID()); err != nil {
		t.Fatalf("%s: start again: %v", what, err)
	}
	x.tally.recovery = max(x.tally.recovery, time.Since(began))
	_ = finish() //nolint:errcheck // calls may fail in a crash
	x.nothingLost(ctx, t)
	x.tidy(ctx, t)
	x.nothingLeft(ctx, t)
	x.witness.undisturbed(ctx, t)
	if err := x.Split.Stop(ctx); err != nil {
		t.Fatal(err)
	}
	if r := examine(ctx, t, x.Split.Config()); r.Snapshots != x.snapshots || r.Folders != x.snapshots || r.Trash != 0 {
		t.Errorf("%d snapshots, %d folders and %d entries in the trash, want %d, %d and 0", r.Snapshots, r.Folders, r.Trash, x.snapshots, x.snapshots)
	}
	noRaceIn(t, x.Split.LogFile())
}

func (x *torture) kill(ctx context.Context, t *testing.T) {
	t.Helper()
	if err := x.Split.Signal(ctx, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
}

func (x *torture) killContainerd(t *testing.T) {
	t.Helper()
	if err := x.Runtime.Kill(); err != nil {
		t.Fatal(err)
	}
	x.tally.containerd++
}

func (x *torture) startContainerd(ctx context.Context, t *testing.T) {
	t.Helper()
	if err := x.Runtime.Start(ctx); err != nil {
		t.Fatal(err)
	}
	x.client.Conn().ResetConnectBackoff()
}

// load pulls images, runs containers that write, asks for their usage and
// removes all again, side by side. Of calls there is a value for each that has
// ended. A round is the last one if dead was closed before its end; finish waits
// for that. Calls may fail: what counts is how things are afterwards.
func (x *torture) load(ctx context.Context, dead <-chan struct{}) (calls <-chan struct{}, finish func() error) {
	ended := make(chan struct{})
	var (
		workers sync.WaitGroup
		mu      sync.Mutex
		last    error // guarded by mu
	)
	call := func(f func(context.Context) error) {
		ctx, cancel := context.WithTimeout(ctx, callPatience)
		defer cancel()
		if err := f(ctx); err != nil {
			mu.Lock()
			last = err
			mu.Unlock()
		}
		select {
		case ended <- struct{}{}:
		case <-dead:
		case <-ctx.Done():
		}
	}
	for w, ref := range x.loads {
		first := x.rounds
		x.rounds += 1000
		workers.Go(func() {
			for round := first; ctx.Err() == nil; round++ {
				x.round(fmt.Sprintf("load-%d-%d", w, round), ref, call)
				select {
				case <-dead:
					return
				default:
				}
			}
		})
	}
	return ended, func() error {
		workers.Wait()
		mu.Lock()
		defer mu.Unlock()
		return last
	}
}

// round is one round of a worker.
func (x *torture) round(name, ref string, call func(func(context.Context) error)) {
	var p *pod.Pod
	var id string
	call(func(ctx context.Context) error { _, err := x.client.Pull(ctx, ref); return err })
	call(func(ctx context.Context) (err error) { p, err = x.client.Run(ctx, x.PodSpec(name)); return err })
	if p != nil {
		call(func(ctx context.Context) (err error) {
			id, err = p.Start(ctx, pod.ContainerSpec{Name: "c", Image: ref, Command: []string{"sh", "-c",
				"mkdir /many; for i in 1 2 3 4 5 6 7 8; do dd if=/dev/zero of=/many/$i bs=64k count=4; done; exec sleep 100000"}})
			return err
		})
	}
	if id != "" {
		call(func(ctx context.Context) error {
			ctx = metadata.AppendToOutgoingContext(ctx, "containerd-namespace", "k8s.io")
			_, err := snapshotsapi.NewSnapshotsClient(x.client.Conn()).Usage(ctx, &snapshotsapi.UsageRequest{Snapshotter: ctdconfig.Snapshotter, Key: id})
			return err
		})
		call(func(ctx context.Context) error { return x.client.RemoveContainer(ctx, id) })
	}
	if p != nil {
		call(p.Remove)
	}
	call(func(ctx context.Context) error {
		_, err := x.client.Images.RemoveImage(ctx, &runtimeapi.RemoveImageRequest{Image: &runtimeapi.ImageSpec{Image: ref}})
		return err
	})
}

// nothingLost: the images that stay are listed, and a container of each image
// that is listed has the files that it should have.
func (x *torture) nothingLost(ctx context.Context, t *testing.T) {
	t.Helper()
	var listed []string
	eventually(ctx, t, "the images that stay", func() (string, bool) {
		answer, err := x.client.Images.ListImages(ctx, &runtimeapi.ListImagesRequest{})
		listed = nil
		for _, i := range answer.GetImages() {
			listed = append(listed, i.GetRepoTags()...)
		}
		return fmt.Sprint(listed, err), err == nil && slices.Contains(listed, x.kept) && slices.Contains(listed, node.PauseImage)
	})
	p, err := x.client.Run(ctx, x.PodSpec(fmt.Sprintf("verify-%d", x.rounds)))
	if err != nil {
		t.Errorf("run a pod: %v", err)
		return
	}
	for i, ref := range listed {
		want, known := x.trees[ref]
		if !known {
			continue
		}
		id, err := p.Start(ctx, pod.ContainerSpec{Name: fmt.Sprint("c", i), Image: ref, Command: []string{"sh", "-c", "exec sleep 100000"}})
		if err != nil {
			t.Errorf("%s is listed: %v", ref, err)
			continue
		}
		if d := tree.Compare(want, rootfs(t, x.Runtime, id)); len(d) > 0 {
			t.Errorf("%s is not as it was in %d points:\n%s", ref, len(d), strings.Join(d[:min(20, len(d))], "\n"))
		}
	}
}

// tidy removes all that does not stay. Leases are those of pulls that a killed
// containerd had begun: it would keep their layers for a day.
func (x *torture) tidy(ctx context.Context, t *testing.T) {
	t.Helper()
	in := metadata.AppendToOutgoingContext(ctx, "containerd-namespace", "k8s.io")
	leases := leasesapi.NewLeasesClient(x.client.Conn())
	eventually(ctx, t, "to remove what the load has left", func() (string, bool) {
		var errs []error
		pods, err := x.client.Runtime.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
		errs = append(errs, err)
		for _, p := range pods.GetItems() {
			if p.GetId() == x.witness.pod {
				continue
			}
			_, stopErr := x.client.Runtime.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: p.GetId()})
			_, removeErr := x.client.Runtime.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: p.GetId()})
			errs = append(errs, stopErr, removeErr)
		}
		images, err := x.client.Images.ListImages(ctx, &runtimeapi.ListImagesRequest{})
		errs = append(errs, err)
		for _, i := range images.GetImages() {
			if slices.Contains(i.GetRepoTags(), x.kept) || slices.Contains(i.GetRepoTags(), node.PauseImage) {
				continue
			}
			_, err := x.client.Images.RemoveImage(ctx, &runtimeapi.RemoveImageRequest{Image: &runtimeapi.ImageSpec{Image: i.GetId()}})
			errs = append(errs, err)
		}
		held, err := leases.List(in, &leasesapi.ListRequest{})
		errs = append(errs, err)
		for _, l := range held.GetLeases() {
			_, err := leases.Delete(in, &leasesapi.DeleteRequest{ID: l.GetID()})
			errs = append(errs, err)
		}
		err = errors.Join(errs...)
		return fmt.Sprint(err), err == nil
	})
}

// trashed lists what is in the trash of both roots.
func (x *torture) trashed(t *testing.T) []string {
	t.Helper()
	var out []string
	for _, root := range []string{x.Split.Config().Snapshotter.ImageRoot, x.Split.Config().Snapshotter.ContainerRoot} {
		names, err := filepath.Glob(filepath.Join(root, "trash", "*"))
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range names {
			if !trash.IsSlot(filepath.Base(name)) { // those keep room for names and stay
				out = append(out, name)
			}
		}
	}
	return out
}

// waitTrash waits until all that was removed is deleted.
func (x *torture) waitTrash(ctx context.Context, t *testing.T) {
	t.Helper()
	eventually(ctx, t, "the trash to empty", func() (string, bool) {
		if err := x.store.Poke(ctx, ctdconfig.Snapshotter); err != nil {
			return err.Error(), false
		}
		left := x.trashed(t)
		return fmt.Sprint(left), len(left) == 0
	})
}

// nothingLeft waits until just that is there what stays.
func (x *torture) nothingLeft(ctx context.Context, t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(ctx, crashPatience)
	defer cancel()
	over := map[string]int64{}
	var again bool
	eventually(ctx, t, "the space to come back", func() (string, bool) {
		// What is removed while containerd collects waits for its next collection.
		if again {
			if err := x.store.Poke(ctx, ctdconfig.Snapshotter); err != nil {
				return err.Error(), false
			}
		}
		again = true
		s, err := x.Split.Status(ctx)
		if err != nil {
			return err.Error(), false
		}
		if s.Store.Alarm != nil || s.Store.Fence.Closed {
			t.Fatalf("the snapshotter says: %+v %+v", s.Store.Alarm, s.Store.Fence)
		}
		count := 0
		for _, r := range []split.RootStatus{s.Store.Image, s.Store.Container} {
			count += r.Layers.Count + r.Extractions.Count + r.Writable.Count + r.Views.Count
		}
		trashed := x.trashed(t)
		ok := count == x.snapshots && len(trashed) == 0
		for name, before := range x.usedBytes {
			over[name] = usedBytes(t, x.Disks[name]) - before
			ok = ok && over[name] <= leakBytes
		}
		return fmt.Sprintf("%d snapshots, want %d; over: %v; trash: %v", count, x.snapshots, over, trashed), ok
	})
	for _, bytes := range over {
		x.tally.leakBytes = max(x.tally.leakBytes, bytes)
	}
}

// crashInit kills `cleave snapshotter init` on roots of its own: half an
// initialisation is none, and can be done again.
func (x *torture) crashInit(ctx context.Context, t *testing.T, point fault.Point) {
	t.Helper()
	dir := filepath.Join(x.Run.Dir(), "init")
	cfg := x.Split.Config()
	s := &cfg.Snapshotter
	scratch := []string{dir}
	for _, p := range []struct {
		path *string
		disk string
	}{{&s.ImageRoot, "images"}, {&s.ContainerRoot, "containers"}} {
		*p.path = filepath.Join(x.Disks[p.disk].Path(), "init")
		scratch = append(scratch, *p.path)
	}
	s.Database = filepath.Join(dir, "db", "metadata.db")
	s.Endpoint, s.StatusEndpoint = config.Endpoint(filepath.Join(dir, "s.sock")), config.Endpoint(filepath.Join(dir, "t.sock"))
	for _, d := range scratch {
		if err := os.Mkdir(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	text, err := cfg.YAML()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "config.yaml")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	cleave := func(env string, args ...string) (string, error) {
		cmd := exec.CommandContext(ctx, x.Split.Binary(), append(args, "--config", file)...)
		cmd.Env = append(x.Run.Env(), env)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	out, err := cleave(fmt.Sprintf("CLEAVE_FAULT=%s:1", point), "snapshotter", "init")
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != -1 {
		t.Errorf("init was not killed at %s: %v\n%s", point, err, out)
	}
	if out, err := cleave("", "snapshotter"); err == nil || !strings.Contains(out, "cleave snapshotter init") {
		t.Errorf("after half an initialisation a start says: %v\n%s", err, out)
	}
	if out, err := cleave("", "snapshotter", "init"); err != nil {
		t.Errorf("initialise again: %v\n%s", err, out)
	}
	examine(ctx, t, cfg)
	for _, d := range scratch {
		if err := sweep.Files(sweep.Scope{Dir: d}); err != nil {
			t.Fatal(err)
		}
	}
}

// witness is a container that counts.
type witness struct {
	client *pod.Client
	pod    string
	id     string
	pid    int
	// started is when its process started, in clock ticks since the boot.
	started string
	// upper is the folder that it writes to, count what it has counted to.
	upper string
	count int
}

func startWitness(ctx context.Context, t *testing.T, n *node.Node, client *pod.Client, ref string) witness {
	t.Helper()
	p, err := client.Run(ctx, n.PodSpec("witness"))
	if err != nil {
		t.Fatal(err)
	}
	w := witness{client: client, pod: p.ID}
	w.id, err = p.Start(ctx, pod.ContainerSpec{Name: "c", Image: ref, Command: []string{"sh", "-c",
		"i=0; while :; do i=$((i+1)); echo $i > /next; mv /next /count; sleep 0.2; done"}})
	if err != nil {
		t.Fatal(err)
	}
	if w.upper, err = n.Runtime.UpperOf(w.id); err != nil {
		t.Fatal(err)
	}
	w.pid, w.started = w.process(ctx, t)
	w.advance(ctx, t)
	return w
}

// process is the pid that the CRI names for it, and when that was started
// (proc(5), stat, field 22).
func (w *witness) process(ctx context.Context, t *testing.T) (pid int, started string) {
	t.Helper()
	answer, err := w.client.Runtime.ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: w.id, Verbose: true})
	if err != nil {
		t.Fatal(err)
	}
	var info struct {
		PID int `json:"pid"`
	}
	if err := json.Unmarshal([]byte(answer.GetInfo()["info"]), &info); err != nil {
		t.Fatal(err)
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", info.PID))
	if err != nil {
		t.Fatalf("the container's process: %v", err)
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	return info.PID, strings.Fields(rest)[22-3]
}

// advance waits until it has counted on, as it sees that itself.
func (w *witness) advance(ctx context.Context, t *testing.T) {
	t.Helper()
	eventually(ctx, t, "the container to count on", func() (string, bool) {
		text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(w.pid), "root", "count"))
		if err != nil {
			return err.Error(), false
		}
		n, err := strconv.Atoi(strings.TrimSpace(string(text)))
		if err != nil || n <= w.count {
			return fmt.Sprintf("%q, %d before", text, w.count), false
		}
		w.count = n
		return "", true
	})
}

func (w *witness) undisturbed(ctx context.Context, t *testing.T) {
	t.Helper()
	if pid, started := w.process(ctx, t); pid != w.pid || started != w.started {
		t.Errorf("the container that stays is process %d, started at %s; it was %d, started at %s", pid, started, w.pid, w.started)
	}
	w.advance(ctx, t)
}

// examine does what `cleave snapshotter check` does, and wants nothing found.
func examine(ctx context.Context, t *testing.T, cfg config.Config) split.Report {
	t.Helper()
	e, err := snapshotter.Examine(ctx, cfg, zap.NewNop(), false, func(snapshotter.Examination) error { return nil })
	if err == nil {
		err = e.Err()
	}
	if err != nil {
		t.Errorf("check: %v\n%v", err, e.Found.Findings)
	}
	return e.Found
}

// startSplitNode makes a node on the split snapshotter.
func startSplitNode(t *testing.T, o node.Options, s node.SplitOptions) *node.Node {
	t.Helper()
	configure := o.Configure
	o.Configure = func(cfg *config.Config, disks map[string]*disk.Disk) {
		cfg.Measure.Period = time.Hour // its walks are not what is tested
		if configure != nil {
			configure(cfg, disks)
		}
	}
	o.Split = &s
	n := startNode(t, o)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the snapshotter's log:\n%s", n.Split.LogTail(60))
		}
		noRaceIn(t, n.Split.LogFile())
	})
	return n
}

// noRaceIn fails the test if the race detector has written to a log.
func noRaceIn(t testing.TB, log string) {
	t.Helper()
	text, err := os.ReadFile(log)
	if err != nil {
		t.Error(err)
	}
	if _, race, found := strings.Cut(string(text), "WARNING: DATA RACE"); found {
		t.Errorf("data race, in %s:\n%s", log, race)
	}
}

// limited is a context with a limit of its own, for tests that take longer than
// most.
func limited(t testing.TB, limit time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	return ctx
}
