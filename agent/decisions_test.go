package agent

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/agent/decide"
	"github.com/cleave-cri/cleave/agent/ephemeral"
	"github.com/cleave-cri/cleave/agent/flight"
	"github.com/cleave-cri/cleave/agent/keeper"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/config/kubelet"
	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/garbage"
	"github.com/cleave-cri/cleave/engine/record"
	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/kube"
	"github.com/cleave-cri/cleave/reclaim"
	"github.com/cleave-cri/cleave/reclaim/reclaimtest"
)

// disks answer about paths.
type disks map[string]fsstats.Filesystem

func (d disks) FilesystemOf(path string) (fsstats.Filesystem, error) {
	f, ok := d[path]
	if !ok {
		return f, errors.New(path + " is not there")
	}
	return f, nil
}

func (disks) Resolve(map[fsstats.Role]string) (fsstats.Layout, error) { return fsstats.Layout{}, nil }

func (disks) Mounts() ([]fsstats.Mount, error) { return nil, nil }

func disk(minor uint32) fsstats.Filesystem {
	return fsstats.Filesystem{Device: fsstats.Device{Major: 8, Minor: minor}, AvailableBytes: 1 << 30, CapacityBytes: 10 << 30, MeasuredAt: time.Now()}
}

// deciding is what decides on a node whose roles are on these disks, by their minor numbers; each role's path is its name.
func deciding(roles map[fsstats.Role]uint32) (*decisions, disks, *picture) {
	p, kernel := emptyPicture(), disks{}
	p.readAt = time.Now()
	for role, minor := range roles {
		kernel[string(role)] = disk(minor)
		p.layout.Places = append(p.layout.Places, fsstats.Place{Role: role, Path: string(role), Filesystem: disk(minor)})
	}
	d := &decisions{observer: &observer{filesystems: kernel}, log: zap.NewNop()}
	d.space = &signalSpace{free: d.free}
	d.observer.newest.Store(p)
	return d, kernel, p
}

func oneDisk() map[fsstats.Role]uint32 {
	return map[fsstats.Role]uint32{fsstats.NodeFS: 1, fsstats.ImageFS: 1, fsstats.ContainerFS: 1, fsstats.Logs: 1, fsstats.Content: 1}
}

// Nothing is decided by the figures of a filesystem that is another one by now, or does not answer.
func TestNothingIsDecidedByAnotherDisk(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(disks, *picture){
		"another disk is mounted there": func(d disks, _ *picture) { d["imagefs"] = disk(7) },
		"the path is gone":              func(d disks, _ *picture) { delete(d, "imagefs") },
		"its place is missing":          func(_ disks, p *picture) { p.layout.Places = nil },
		"its filesystem does not answer": func(_ disks, p *picture) {
			p.stuck = []fsstats.Standing{{Role: fsstats.ImageFS, Problem: fsstats.ErrNoAnswer}}
		},
	} {
		d, kernel, p := deciding(oneDisk())
		if _, err := d.look(t.Context()); err != nil {
			t.Fatal(err)
		}
		change(kernel, p)
		if _, err := d.look(t.Context()); err == nil {
			t.Errorf("%s: it is looked at all the same", name)
		}
		if _, err := d.glance(t.Context()); err == nil {
			t.Errorf("%s: it is glanced at all the same", name)
		}
		d.space.of(engine.ImageFSAvailable)
		if _, err := d.space.AvailableBytes(t.Context()); err == nil {
			t.Errorf("%s: what comes free is measured there", name)
		}
	}
}

// Nobody is ranked by what pods had when they could be looked at last.
func TestNobodyIsRankedByOldFigures(t *testing.T) {
	t.Parallel()
	for age, want := range map[time.Duration]int{time.Second: 1, podsMaxAge + time.Second: 0} {
		d, _, p := deciding(oneDisk())
		p.readAt, p.held = time.Now().Add(-age), []ephemeral.Pod{{UID: "1"}}
		in, err := d.look(t.Context())
		if err != nil || in.Summary.NodeFS == nil {
			t.Fatalf("%+v, %v", in.Summary, err)
		}
		if len(in.Summary.Pods) != want || len(in.Pods) != 0 {
			t.Errorf("figures of %s ago: %d pods, want %d", age, len(in.Summary.Pods), want)
		}
	}
}

// The kubelet's page counts while nothing is heard of the API server; else a pod that was evicted a moment ago would be ranked again.
func TestTheKubeletsPageStandsIn(t *testing.T) {
	t.Parallel()
	now := time.Now()
	pod := func(uid string) []*kube.Pod {
		return []*kube.Pod{{UID: uid, APIUID: uid, Namespace: "shop", Name: "web-" + uid}}
	}
	for _, tc := range []struct {
		name      string
		api, page time.Duration // ago; below 0: never
		want      []string
	}{
		{"both are fresh", time.Minute, time.Second, []string{"api"}},
		{"the API server is silent", 3 * time.Minute, time.Second, []string{"api", "page"}},
		{"it never answered", -1, time.Second, []string{"page"}},
		{"the kubelet never answered", 3 * time.Minute, -1, []string{"api"}},
		{"both are silent", time.Hour, time.Hour, []string{"api"}},
	} {
		at := func(ago time.Duration) (t time.Time) {
			if ago >= 0 {
				t = now.Add(-ago)
			}
			return t
		}
		v := viewOf(kube.Snapshot{Source: kube.SourceAPIServer, AsOf: at(tc.api), Pods: pod("api")}, kube.Snapshot{Source: kube.SourceKubelet, AsOf: at(tc.page), Pods: pod("page")}, kube.Snapshot{Source: kube.SourceManifests, AsOf: now}, now)
		var got []string
		for _, k := range v.All() {
			got = append(got, k.Pod.UID)
		}
		if !slices.Equal(got, tc.want) || len(v.Sources) != 3 {
			t.Errorf("%s: known are %q, want %q", tc.name, got, tc.want)
		}
	}
}

// Logs on a disk of their own are no help to another one.
func TestLogsGoForTheirOwnDiskOnly(t *testing.T) {
	t.Parallel()
	const pod = "shop_web_11111111-1111-1111-1111-111111111111"
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, pod, "app"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"0.log", "0.log.20260101-000000", "0.log.20260102-000000"} {
		if err := os.WriteFile(filepath.Join(dir, pod, "app", name), []byte("a line\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	before := time.Now().Add(-time.Hour)
	if err := os.Chtimes(filepath.Join(dir, pod, "app", "0.log.20260101-000000"), before, before); err != nil {
		t.Fatal(err)
	}
	for logs, want := range map[uint32]int{1: 1, 2: 0} {
		roles := oneDisk()
		roles[fsstats.Logs] = logs
		d, _, _ := deciding(roles)
		runtime := reclaimtest.NewRuntime()
		r := logReclaimer{d, &reclaim.Logs{Site: reclaim.Site{Space: d.space}, Runtime: runtime.Containers, Pods: d, Dir: dir}}
		step, err := r.Plan(t.Context(), keeper.Want{Signal: engine.NodeFSAvailable, NeedBytes: garbage.Everything, Pressure: true})
		if err != nil || len(step.Items) != want || step.Kind != engine.OldLogs {
			t.Errorf("logs on disk %d: %+v, %v; want %d items", logs, step.Items, err, want)
		}
	}
}

// Where the API server is not known no pod is, and none is gone.
func TestCGC4_WithoutAPIServerNobodyIsGone(t *testing.T) {
	t.Parallel()
	d, _, _ := deciding(oneDisk())
	if f, err := d.Pods(t.Context()); err != nil || f.SourcesReady || f.Synced || len(f.Fate) != 0 {
		t.Errorf("%+v, %v", f, err)
	}
	d.cluster.Store(&cluster{page: &kube.KubeletPods{}, watch: kube.NewWatch(nil), static: kube.NewManifests(t.TempDir(), "n1", time.Second)})
	if f, err := d.Pods(t.Context()); err != nil || f.SourcesReady || f.Synced {
		t.Errorf("before the first answer: %+v, %v", f, err)
	}
}

// Without a kubelet nobody would end the containers of a pod that is evicted.
func TestNobodyIsEvictedWithoutAKubelet(t *testing.T) {
	t.Parallel()
	d, _, _ := deciding(oneDisk())
	e := engine.Eviction{UID: "1", Namespace: "shop", Name: "web"}
	if _, err := d.Evict(t.Context(), e, true); err == nil {
		t.Error("evicted without an API server")
	}
	d.cluster.Store(&cluster{page: &kube.KubeletPods{}, watch: kube.NewWatch(nil), static: kube.NewManifests(t.TempDir(), "n1", time.Second)})
	ticks, err := kubelet.Reader{}.Started(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	for start, want := range map[uint64]string{ticks + 1: "does not run", ticks: "knows no pod"} {
		d.kubelet.Store(&kubelet.Settings{PID: os.Getpid(), StartTicks: start})
		if _, err := d.Evict(t.Context(), e, true); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("a kubelet that began at %d, this process at %d: %v, want %q", start, ticks, err, want)
		}
	}
}

// Without the kubelet's settings nothing is planned and nothing decided.
func TestWithoutSettingsNothingIsPlanned(t *testing.T) {
	t.Parallel()
	d, _, _ := deciding(oneDisk())
	in, err := d.look(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.config(in); err == nil {
		t.Error("there are thresholds")
	}
	for _, r := range []keeper.Reclaimer{containerReclaimer{d: d}, imageReclaimer{d}} {
		if step, err := r.Plan(t.Context(), keeper.Want{Signal: engine.NodeFSAvailable}); !errors.Is(err, errNoKubelet) {
			t.Errorf("%+v, %v", step, err)
		}
	}
	for _, c := range []keeper.Collector{&imageCollector{d: d}, containerCollector{d: d}} {
		if step, err := c.Plan(t.Context()); !errors.Is(err, errNoKubelet) {
			t.Errorf("%s: %+v, %v", c.Name(), step, err)
		}
	}
}

func TestRolesOfSignals(t *testing.T) {
	t.Parallel()
	for signal, role := range map[engine.Signal]fsstats.Role{
		engine.NodeFSAvailable: fsstats.NodeFS, engine.NodeFSInodesFree: fsstats.NodeFS,
		engine.ImageFSAvailable: fsstats.ImageFS, engine.ImageFSInodesFree: fsstats.ImageFS,
		engine.ContainerFSAvailable: fsstats.ContainerFS, engine.ContainerFSInodesFree: fsstats.ContainerFS,
	} {
		if got := roleOf(signal); got != role {
			t.Errorf("%s is about %s, want %s", signal, got, role)
		}
	}
}

// During a handover the new process acts when the old one has stopped, not before.
func TestOneProcessActsAtATime(t *testing.T) {
	t.Parallel()
	d, _, _ := deciding(oneDisk())
	d.cfg.StateDir = t.TempDir()
	old, err := flight.Open(filepath.Join(d.cfg.StateDir, flight.FileName), flight.SizeBytes)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*takeOverEvery)
	defer cancel()
	if d.takeOver(ctx) || d.acts.Load() {
		t.Error("it acts beside the process before it")
	}
	if _, err := d.collect(t.Context(), CollectRequest{}); !errors.Is(err, errNotActing) {
		t.Errorf("asked to tidy up: %v", err)
	}
	took := make(chan bool)
	go func() { took <- d.takeOver(t.Context()) }()
	if err := old.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !<-took || !d.acts.Load() || d.recorder.Load() == nil {
		t.Error("it does not act when the process before it has ended")
	}
	if err := d.recorder.Load().Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// KSS-22: the images that a kubelet is about to use are known from its calls alone.
func TestKSS22_NoImageGoesIfTheKubeletAsksPastCleave(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	ours, other := filepath.Join(dir, "cleave.sock"), filepath.Join(dir, "containerd.sock")
	for _, path := range []string{ours, other} {
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, tc := range []struct {
		runtime, images string
		past            bool
	}{{ours, "", false}, {ours, ours, false}, {other, "", true}, {ours, other, true}, {"", "", true}} {
		d, _, _ := deciding(oneDisk())
		d.cfg.Listen.Endpoint = config.Endpoint(ours)
		runtime := reclaimtest.NewRuntime()
		d.removal = &reclaim.Images{Site: reclaim.Site{Space: d.space}, CRI: away{}, Runtime: runtime.Containers, Store: runtime}
		s := kubelet.Settings{PID: os.Getpid()}
		s.RuntimeEndpoint.Value, s.ImageEndpoint.Value = tc.runtime, tc.images
		_, err := d.imageChoice(t.Context(), s, fsstats.ImageFS, garbage.Everything)
		if errors.Is(err, errPastCleave) != tc.past || errors.Is(err, errAway) == tc.past {
			t.Errorf("runtime %q, images %q: %v", tc.runtime, tc.images, err)
		}
	}
}

// Where images are the kubelet's to delete, pods wait for it; not for images that there are not.
func TestImagesThatAreLeftToTheKubelet(t *testing.T) {
	t.Parallel()
	now := time.Now()
	choice := record.ImageChoice{
		Known: garbage.Images{"a": {ID: "a", SizeBytes: 1, FirstSeen: now.Add(-time.Hour)}}, NeedBytes: garbage.Everything, Began: now,
	}
	if _, err := leftToKubelet(choice, nil, kubelet.Settings{}); !errors.Is(err, errPastCleave) {
		t.Errorf("there is an image: %v", err)
	}
	if _, err := leftToKubelet(choice, errAway, kubelet.Settings{}); !errors.Is(err, errPastCleave) {
		t.Errorf("nobody knows: %v", err)
	}
	choice.InUse = map[string]bool{"a": true}
	if got, err := leftToKubelet(choice, nil, kubelet.Settings{}); err != nil || len(got.Known) != 1 {
		t.Errorf("there is none that nobody uses: %+v, %v", got, err)
	}
	if _, err := noPlan(errPastCleave); !errors.Is(err, keeper.ErrUnknown) || !errors.Is(err, errPastCleave) {
		t.Errorf("a plan that can't be made: %v", err)
	}
}

var errAway = errors.New("containerd is away")

// away is a runtime that does not answer.
type away struct{ runtimeapi.ImageServiceClient }

func (away) ListImages(context.Context, *runtimeapi.ListImagesRequest, ...grpc.CallOption) (*runtimeapi.ListImagesResponse, error) {
	return nil, errAway
}

// aging is a node whose images go after a day without use, and none for space.
func aging(t *testing.T, maxAge time.Duration) (*imageCollector, *reclaimtest.Runtime) {
	t.Helper()
	d, kernel, _ := deciding(oneDisk())
	images := kernel[string(fsstats.ImageFS)]
	images.AvailableBytes = images.CapacityBytes / 2
	kernel[string(fsstats.ImageFS)] = images
	runtime := reclaimtest.NewRuntime()
	d.space = &signalSpace{free: d.free}
	d.removal = &reclaim.Images{
		Site: reclaim.Site{Space: runtime}, CRI: runtime.Images, Runtime: runtime.Containers, Store: runtime, Lock: reclaimtest.Unlocked{}, Memory: &reclaimtest.Memory{},
	}
	s := kubelet.Settings{PID: os.Getpid()}
	s.ImageGCHighPercent.Value, s.ImageGCLowPercent.Value = 85, 80
	s.ImageMinimumGCAge.Value, s.ImageMaximumGCAge.Value = 2*time.Minute, maxAge
	d.kubelet.Store(&s)
	return &imageCollector{d: d, since: time.Now(), choice: func(ctx context.Context, s kubelet.Settings, _ fsstats.Role, need int64) (record.ImageChoice, error) {
		return d.removal.Choice(ctx, decide.Images(s), runtime.Inventory(), need)
	}}, runtime
}

// IGC-12: images that nobody has used for the kubelet's maximum age go, and no other; nobody goes before it was watched for as long.
func TestIGC12_ImagesGoByAge(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c, runtime := aging(t, 24*time.Hour)
		old := runtime.Pull("old:1", garbage.Layer{ID: "base", Bytes: 10 << 20}, garbage.Layer{ID: "old", Bytes: 5 << 20})
		used := runtime.Pull("used:1", garbage.Layer{ID: "base", Bytes: 10 << 20}, garbage.Layer{ID: "used", Bytes: 1 << 20})
		pinned := runtime.Pull("pinned:1", garbage.Layer{ID: "pinned", Bytes: 1 << 20})
		runtime.Pin(pinned)
		lately := runtime.Pull("lately:1", garbage.Layer{ID: "lately", Bytes: 1 << 20})
		runtime.RunContainer("u1", "app", used)
		briefly := runtime.RunContainer("u1", "job", lately)
		plan := func() record.Step {
			t.Helper()
			step, err := c.Plan(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			return step
		}
		if step := plan(); len(step.Items) > 0 {
			t.Fatalf("at the beginning %+v go", step.Items)
		}
		time.Sleep(12 * time.Hour) //nolint:forbidigo // in synctest
		plan()
		runtime.Exit(briefly)
		if err := reclaimtest.Remove(t.Context(), runtime, briefly); err != nil {
			t.Fatal(err)
		}
		time.Sleep(11 * time.Hour) //nolint:forbidigo // in synctest
		if step := plan(); len(step.Items) > 0 {
			t.Fatalf("after 23 h %+v go", step.Items)
		}
		time.Sleep(2 * time.Hour) //nolint:forbidigo // in synctest
		step := plan()
		if len(step.Items) != 1 || step.Items[0].ID != old || step.Items[0].Rule != "IGC-12" || *step.Items[0].ExpectedBytes != 5<<20 {
			t.Fatalf("after 25 h %+v go, want only %s, and what it alone has", step.Items, old)
		}
		step, err := c.Run(t.Context(), step)
		if err != nil || step.Items[0].ActualBytes == nil || *step.Items[0].ActualBytes != 5<<20 {
			t.Fatalf("%+v, %v", step.Items, err)
		}
		if differences, err := record.Replay(record.Record{Format: record.Format, Steps: []record.Step{step}, Collection: &record.Collection{Name: c.Name()}}); err != nil || len(differences) > 0 {
			t.Errorf("made again: %v, %v", differences, err)
		}
		time.Sleep(2 * time.Minute) //nolint:forbidigo // in synctest
		if step := plan(); len(step.Items) > 0 {
			t.Errorf("a second time %+v go", step.Items)
		}
	})
}

// 0 is the kubelet's default: for ever.
func TestIGC12_WithoutAMaximumAgeNoneGoes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c, runtime := aging(t, 0)
		runtime.Pull("old:1", garbage.Layer{ID: "old", Bytes: 5 << 20})
		for range 3 {
			if step, err := c.Plan(t.Context()); err != nil || len(step.Items) > 0 {
				t.Errorf("%+v, %v", step.Items, err)
			}
			time.Sleep(1000 * time.Hour) //nolint:forbidigo // in synctest
		}
	})
}

// What was written after the account was made, and what has no figure, is nobody's: of a pod's bytes it is not known yet that they are
// its.
func TestNobodysIsWhatIsNotKnownYet(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		used uint64
		of   Account
		want int64
	}{
		{"the account is of now", 100, Account{OwnedBytes: 60, UnattributedBytes: 40}, 40},
		{"30 were written since", 130, Account{OwnedBytes: 60, UnattributedBytes: 40}, 70},
		{"something has no figure", 100, Account{OwnedBytes: 60, UnattributedBytes: 40, Unmeasured: 1}, 40},
		{"more is owned than used", 50, Account{OwnedBytes: 60, UnattributedBytes: -10}, 0},
	} {
		if got := nobodys(tc.used, tc.of); got != tc.want {
			t.Errorf("%s: %d bytes, want %d", tc.name, got, tc.want)
		}
	}
}
