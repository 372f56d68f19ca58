package reclaim

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/garbage"
	"github.com/cleave-cri/cleave/engine/record"
	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/node"
	"github.com/cleave-cri/cleave/proxy/imagelock"
	"github.com/cleave-cri/cleave/reclaim"
	"github.com/cleave-cri/cleave/reclaim/reclaimtest"
	"github.com/cleave-cri/cleave/reclaim/seen"
)

// tortureEnv is how many random images the long form deletes.
const tortureEnv = "CLEAVE_RECLAIM_IMAGES"

// The suite that the runtime in memory passes, on a real containerd with each
// snapshotter.
func TestSuite(t *testing.T) {
	for _, snapshotter := range []string{"overlayfs", "cleave"} {
		t.Run(snapshotter, func(t *testing.T) {
			t.Parallel()
			n := start(t, disk.Ext4, snapshotter, 1<<30)
			reclaimtest.Suite(t, n.world)
		})
	}
}

// What comes free of random images that share layers is what was promised, on
// each filesystem and with each snapshotter; images that run or are pinned stay.
func TestRandomImages(t *testing.T) {
	count, long := 20, false
	if v := os.Getenv(tortureEnv); v != "" {
		var err error
		if count, err = strconv.Atoi(v); err != nil || count < 1 {
			t.Fatalf("%s=%q is no number of images", tortureEnv, v)
		}
		long = true
	}
	for _, c := range []struct {
		fs          disk.FS
		snapshotter string
	}{{disk.Ext4, "overlayfs"}, {disk.XFS, "cleave"}, {disk.XFS, "overlayfs"}, {disk.Ext4, "cleave"}} {
		if !long && (c.fs == disk.XFS) == (c.snapshotter == "overlayfs") {
			continue // two of four, unless it is the long form
		}
		t.Run(fmt.Sprintf("%s %s", c.fs, c.snapshotter), func(t *testing.T) {
			t.Parallel()
			seed := uint64(time.Now().UnixNano())
			t.Logf("seed %d", seed)
			n := start(t, c.fs, c.snapshotter, 8<<30)
			randomImages(t, n, rand.New(rand.NewPCG(seed, 0)), count)
		})
	}
}

func randomImages(t *testing.T, n *realNode, random *rand.Rand, count int) {
	t.Helper()
	w := n.world(t)
	keep := map[string]string{}
	for i := range count {
		layers := []garbage.Layer{}
		for range 1 + random.IntN(4) {
			// Of half as many layers as images, so that most are shared.
			id := random.IntN(1 + count/2)
			layers = append(layers, garbage.Layer{ID: fmt.Sprintf("layer-%d", id), Bytes: int64(1+id%8) * 256 << 10})
		}
		runs := i%10 == 3
		if runs {
			layers = append([]garbage.Layer{reclaimtest.Runs}, layers...)
		}
		id := w.Pull(t, fmt.Sprintf("registry.example/random/image-%d:1", i), layers...)
		switch {
		case runs:
			w.Run(t, fmt.Sprintf("uid-%d", i), "app", id)
			keep[id] = "it runs"
		case i%10 == 7:
			w.Pin(t, id)
			keep[id] = "it is pinned"
		}
	}
	n.settled(t)
	var promised, freed int64
	var took time.Duration
	for round := 0; ; round++ {
		choice, err := w.Images.Choice(bounded(t), garbage.ImagePolicy{Options: garbage.Cleave()}, n.inventory(t), int64(1+random.IntN(16))<<20)
		if err != nil {
			t.Fatal(err)
		}
		step := record.Step{Kind: engine.UnusedImages, Images: &choice, Items: choice.Items()}
		if len(step.Items) == 0 {
			t.Logf("%d rounds, %d bytes promised, %d came free, in %s", round, promised, freed, took)
			break
		}
		began := time.Now()
		done, err := w.Images.Run(bounded(t), step)
		took += time.Since(began)
		if err != nil {
			t.Fatalf("%+v: %v", done.Items, err)
		}
		var tried []record.Item
		for _, item := range done.Items {
			if item.ActualBytes != nil { // else it was enough before
				tried = append(tried, item)
				promised, freed = promised+*item.ExpectedBytes, freed+*item.ActualBytes
			}
		}
		done.Items = tried
		reclaimtest.Exact(t, done)
		there := map[string]bool{}
		for _, i := range n.list(t) {
			there[i.GetId()] = true
		}
		for id, why := range keep {
			if !there[id] {
				t.Fatalf("%s went, and %s", id, why)
			}
		}
	}
	if off := max(promised-freed, freed-promised); off > max(1<<20, promised/100) || promised == 0 {
		t.Errorf("%d bytes were promised, %d came free", promised, freed)
	}
}

// settled returns when nothing is left to be written to the disk of images, so
// that its figures stand still.
func (n *realNode) settled(t *testing.T) {
	t.Helper()
	if err := n.store.Collect(bounded(t)); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(n.Disks[layersOn].Path())
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close() //nolint:errcheck // only synced
	if err := syncfs(f); err != nil {
		t.Fatal(err)
	}
}

// What only containerd's store knows: images that were imported, and users in
// other namespaces.
func TestFactsOfTheStore(t *testing.T) {
	t.Parallel()
	n := start(t, disk.Ext4, "overlayfs", 1<<30)
	w := n.world(t)
	id := w.Pull(t, "registry.example/facts/app:1", reclaimtest.Runs)
	facts, err := n.store.Image(bounded(t), []string{id})
	if err != nil || facts.NotPullable != "" || facts.Pinned || len(facts.Users) > 0 || len(facts.Names) != 3 {
		t.Errorf("a pulled image: %+v, %v", facts, err)
	}
	container := w.Run(t, "uid-facts", "app", id)
	if facts, err = n.store.Image(bounded(t), []string{id}); err != nil || len(facts.Users) != 1 || !strings.Contains(facts.Users[0], container) {
		t.Errorf("one in use: %+v, %v", facts, err)
	}
	for _, i := range n.list(t) {
		facts, err := n.store.Image(bounded(t), []string{i.GetId()})
		if pause := strings.Contains(fmt.Sprint(i.GetRepoTags()), node.PauseImage); err != nil || facts.Pinned != pause {
			t.Errorf("%v: %+v, %v", i.GetRepoTags(), facts, err)
		}
	}
	// A removal that was broken off: the id is gone, then all names but one.
	n.forget(t, id)
	if facts, err = n.store.Image(bounded(t), append([]string{id}, facts.Names...)); err != nil || len(facts.Names) != 2 || facts.NotPullable != "" {
		t.Errorf("one that is half removed: %+v, %v", facts, err)
	}
	n.rename(t, "registry.example/facts/app:1", "local/facts:1")
	if facts, err = n.store.Image(bounded(t), []string{"local/facts:1"}); err != nil || !strings.Contains(facts.NotPullable, "local/facts:1") {
		t.Errorf("one with a name of no registry: %+v, %v", facts, err)
	}
	n.forget(t, "local/facts:1")
	const name = "registry.example/facts/app:1" // CRI adds the id again when it likes
	n.unlabel(t, name)
	if facts, err = n.store.Image(bounded(t), []string{name}); err != nil || !strings.Contains(facts.NotPullable, "came from no registry") {
		t.Errorf("one whose blobs are of no registry: %+v, %v", facts, err)
	}
	n.useElsewhere(t, name)
	if facts, err = n.store.Image(bounded(t), []string{name}); err != nil || len(facts.Users) != 2 {
		t.Errorf("one that another namespace uses: %+v, %v", facts, err)
	}
	if _, err := n.store.Image(bounded(t), []string{"sha256:none"}); err == nil {
		t.Error("an image that is not there has facts")
	}
	if err := n.store.Ready(bounded(t)); err != nil {
		t.Error(err)
	}
}

// While the snapshotter is away nothing is deleted: it would not come free
// (CTD-63). When containerd restarts in the middle of a step, the step ends and
// the next one completes it.
func TestRuntimeAndSnapshotterComeAndGo(t *testing.T) {
	t.Parallel()
	n := start(t, disk.Ext4, "cleave", 1<<30)
	w := n.world(t)
	for _, name := range []string{"a", "b", "c"} {
		w.Pull(t, "registry.example/away/"+name+":1", garbage.Layer{ID: name, Bytes: 4 << 20})
	}
	pick := func() record.Step {
		choice, err := w.Images.Choice(bounded(t), garbage.ImagePolicy{Options: garbage.Cleave()}, n.inventory(t), garbage.Everything)
		if err != nil {
			t.Fatal(err)
		}
		return record.Step{Kind: engine.UnusedImages, Images: &choice, Items: choice.Items()}
	}
	step := pick()
	if err := n.Split.Stop(bounded(t)); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Images.Run(bounded(t), step); !errors.Is(err, reclaim.ErrSurprise) || len(n.list(t)) != 3 {
		t.Errorf("the snapshotter is away: %v, %d images are left", err, len(n.list(t)))
	}
	if err := n.Split.Start(bounded(t)); err != nil {
		t.Fatal(err)
	}
	n.ready(t)
	// containerd is killed after the first image has gone.
	w.Images.CRI = beforeSecond{n.client.Images, step.Items[0].ID, sync.OnceFunc(func() {
		if err := n.Runtime.Kill(); err != nil {
			t.Error(err)
		}
	})}
	done, err := w.Images.Run(bounded(t), step)
	if err == nil || done.Items[0].ActualBytes == nil || done.Items[2].ActualBytes != nil || done.Items[2].Error != "" {
		t.Errorf("containerd is away: %v: %+v", err, done.Items)
	}
	if err := n.Runtime.Start(bounded(t)); err != nil {
		t.Fatal(err)
	}
	w.Images.CRI = n.client.Images
	n.ready(t)
	if done, err = w.Images.Run(bounded(t), pick()); err != nil || len(done.Items) != 2 {
		t.Errorf("the next step: %+v, %v", done.Items, err)
	}
}

// ready waits until containerd reaches the snapshotter again, which it tries every
// three seconds (CTD-54).
func (n *realNode) ready(t *testing.T) {
	t.Helper()
	ctx := bounded(t)
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		err := n.store.Ready(ctx)
		if err == nil {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatal(err)
		}
	}
}

// beforeSecond calls do when an image other than the first is about to go.
type beforeSecond struct {
	runtimeapi.ImageServiceClient
	first string
	do    func()
}

func (s beforeSecond) ImageStatus(ctx context.Context, r *runtimeapi.ImageStatusRequest, o ...grpc.CallOption) (*runtimeapi.ImageStatusResponse, error) {
	if r.GetImage().GetImage() != s.first {
		s.do()
	}
	return s.ImageServiceClient.ImageStatus(ctx, r, o...)
}

// A dead pod's container, sandbox and logs go, those of a living one stay, and so
// does what is not the kubelet's (T29, GAP-1, GAP-37).
func TestDeadPodsAndTheirLogs(t *testing.T) {
	t.Parallel()
	n := start(t, disk.Ext4, "overlayfs", 1<<30)
	w := n.world(t)
	const gone, alive = "aaaaaaaa-1111-2222-3333-444444444444", "bbbbbbbb-1111-2222-3333-444444444444"
	image := w.Pull(t, "registry.example/logs/app:1", reclaimtest.Runs)
	dead, living := w.Run(t, gone, "app", image), w.Run(t, alive, "app", image)
	w.End(t, dead)
	if _, err := n.client.Runtime.StopPodSandbox(bounded(t), &runtimeapi.StopPodSandboxRequest{PodSandboxId: n.pods[dead].ID}); err != nil {
		t.Fatal(err)
	}
	dirs := map[string]string{gone: "default_pod-" + gone + "_" + gone, alive: "default_pod-" + alive + "_" + alive}
	for _, f := range []string{
		dirs[gone] + "/app/0.log.20260101-000000", dirs[gone] + "/other/0.log",
		dirs[alive] + "/app/0.log.20260101-000000.gz", dirs[alive] + "/app/0.log.20260101-000100", "backup/app/0.log.20260101-000000",
	} {
		path := filepath.Join(n.logs, f)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, make([]byte, 1<<20), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	w.Fates.Set(gone, garbage.Gone)
	w.Fates.Set(alive, garbage.Alive)
	logs := &reclaim.Logs{Site: reclaim.Site{Space: space{n.space.prober, n.Run.Dir()}}, Runtime: n.client.Runtime, Pods: w.Fates, Dir: n.logs}
	old, _, err := logs.Choice(bounded(t), garbage.Everything)
	if err != nil || len(old.Gone) > 0 {
		t.Errorf("while the runtime has something of the pod its logs stay: %+v, %v", old.Gone, err)
	}
	choice, err := w.Containers.Choice(bounded(t), garbage.ContainerPolicy{PerContainer: 1, Total: -1}, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	step := record.Step{Kind: engine.DeadContainers, Containers: &choice, Items: choice.Items()}
	if done, err := w.Containers.Run(bounded(t), step); err != nil || len(done.Items) != 2 {
		t.Errorf("a container and a sandbox: %+v, %v", done.Items, err)
	}
	boxes, err := n.client.Runtime.ListPodSandbox(bounded(t), &runtimeapi.ListPodSandboxRequest{})
	if err != nil || len(boxes.GetItems()) != 1 || boxes.GetItems()[0].GetId() != n.pods[living].ID {
		t.Errorf("sandboxes %v, %v", boxes.GetItems(), err)
	}
	if _, err := os.Stat(filepath.Join(n.logs, dirs[gone], "app", "0.log.20260101-000000")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the container's logs did not go with it: %v", err)
	}
	old, left, err := logs.Choice(bounded(t), garbage.Everything)
	if err != nil || len(old.Gone) != 1 || len(old.Rotated) != 1 || len(left) != 1 {
		t.Fatalf("%+v, left %+v, %v", old, left, err)
	}
	step = record.Step{Kind: engine.OldLogs, Logs: &old, Items: old.Items()}
	if done, err := logs.Run(bounded(t), step); err != nil {
		t.Fatalf("%+v: %v", done.Items, err)
	}
	for path, there := range map[string]bool{
		dirs[gone]: false, "backup/app/0.log.20260101-000000": true, dirs[alive] + "/app/0.log": true,
		dirs[alive] + "/app/0.log.20260101-000100": true, dirs[alive] + "/app/0.log.20260101-000000.gz": false,
	} {
		if _, err := os.Stat(filepath.Join(n.logs, path)); (err == nil) != there {
			t.Errorf("%s: %v", path, err)
		}
	}
	if out, err := n.client.Exec(bounded(t), living, "/bin/echo", "alive"); err != nil || out != "alive\n" {
		t.Errorf("the living container: %q, %v", out, err)
	}
}

// An image that a pod is about to use does not go, over a restart too (KSS-22).
func TestImagesThatWereNamed(t *testing.T) {
	t.Parallel()
	n := start(t, disk.Ext4, "overlayfs", 1<<30)
	w := n.world(t)
	id := w.Pull(t, "docker.io/library/named:1", garbage.Layer{ID: "named", Bytes: 1 << 20})
	book := imagelock.New()
	book.Restore(nil, true)
	dir := t.TempDir()
	memory, err := seen.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer memory.Close() //nolint:errcheck // a temporary file's
	x := n.images(book, memory)
	pick := func() []record.Item {
		choice, err := x.Choice(bounded(t), garbage.ImagePolicy{Options: garbage.Cleave()}, n.inventory(t), garbage.Everything)
		if err != nil {
			t.Fatal(err)
		}
		return choice.Items()
	}
	if items := pick(); len(items) != 1 || items[0].ID != id {
		t.Fatalf("picked %+v", items)
	}
	book.Restore([]imagelock.Mention{{Name: "named:1", Method: "ImageStatus", At: time.Now()}}, true)
	if items := pick(); len(items) > 0 {
		t.Errorf("picked %+v", items)
	}
}
