package crio

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/agent"
	"github.com/cleave-cri/cleave/agent/flight"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/engine/record"
	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/enclave"
	"github.com/cleave-cri/cleave/lab/image"
	"github.com/cleave-cri/cleave/lab/kube"
	"github.com/cleave-cri/cleave/lab/need"
	"github.com/cleave-cri/cleave/lab/node"
	"github.com/cleave-cri/cleave/lab/pod"
	"github.com/cleave-cri/cleave/lab/runtime"
)

// servesEnv is how many times the long form kills `cleave serve`; `make torture-reclaim` sets it.
const servesEnv = "CLEAVE_RECLAIM_SERVES"

// The disk on which images are collected, and by which marks of the kubelet. The kubelet itself would begin two points later than
// cleave, and asks only every five minutes.
const (
	killedDiskBytes = 1 << 30
	killedHigh      = 80
	killedLow       = 70
	killedImages    = 8
	killedLayer     = 10 << 20
)

// `cleave serve` is killed at any moment of a collection of images: nothing goes that should not, its files are whole, and the next
// one completes what was begun. The program has a shorter memory of names than the real one, which would wait two minutes after each
// start.
func TestServeIsKilledMidReclaim(t *testing.T) {
	kills := 1
	if v := os.Getenv(servesEnv); v != "" {
		var err error
		if kills, err = strconv.Atoi(v); err != nil || kills < 1 {
			t.Fatalf("%s=%q is no number", servesEnv, v)
		}
	}
	k := startKilled(t)
	killed := 0
	for i := range kills {
		k.fill(t, i)
		if k.collectAndKill(t, rand.N(k.whole)) {
			killed++
		}
		k.kept(t, i)
		if err := k.node.Cleave.Start(k.ctx); err != nil {
			t.Fatal(err)
		}
		k.completes(t, i)
		k.kept(t, i)
	}
	t.Logf("%d of %d collections were killed before their end", killed, kills)
}

// killedNode is a node whose cleave is killed.
type killedNode struct {
	ctx     context.Context //nolint:containedctx // the test's, bounded; each step needs it
	node    *node.Node
	kubelet *kube.Kubelet
	client  *pod.Client
	// keep are the images that must be there, by id.
	keep map[string]string
	// whole is about how long a collection takes.
	whole time.Duration
}

func startKilled(t *testing.T) *killedNode {
	t.Helper()
	need.Root(t)
	need.Loop(t)
	need.Tools(t, "runc")
	run := need.Lab(t)
	limit := 3 * patience // another node may be there first
	if os.Getenv(servesEnv) != "" {
		limit = 2 * time.Hour
	}
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	p, err := options{}.programs(ctx)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	hasty, err := node.BuildCleave(ctx, dir, false, "hasty")
	if err != nil {
		t.Fatal(err)
	}
	alone, err := enclave.Alone(ctx, func() { t.Log("waits for another node with a kubelet to end") })
	if err != nil {
		t.Fatal(err)
	}
	k := &killedNode{ctx: ctx, keep: map[string]string{}, whole: 2 * time.Second}
	k.node, err = node.Start(ctx, run, node.Options{
		Containerd: p.containerd, Shim: p.shim, Cleave: hasty,
		Disks: []disk.Spec{{Name: diskImages, FS: disk.Ext4, SizeBytes: killedDiskBytes, MkfsArgs: []string{"-m", "0"}}},
		Configure: func(cfg *config.Config, _ map[string]*disk.Disk) {
			cfg.Reclaim.Enabled = true
		},
		Runtime: func(r *runtime.Options, disks map[string]*disk.Disk) {
			r.Root = filepath.Join(disks[diskImages].Path(), "containerd")
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience)
		defer cancel()
		if t.Failed() {
			t.Logf("cleave's log:\n%s", k.node.Cleave.LogTail(40))
		}
		if k.kubelet != nil {
			err = errors.Join(err, k.kubelet.Stop(ctx))
		}
		err = errors.Join(err, alone.Close())
		if k.client != nil {
			err = errors.Join(err, k.client.Close())
		}
		if err = errors.Join(err, k.node.Close(ctx)); err != nil {
			t.Error(err)
		}
	})
	if k.client, err = pod.Dial(k.node.Runtime.Endpoint()); err != nil {
		t.Fatal(err)
	}
	if k.kubelet, err = kube.NewKubelet(nil, kube.KubeletOptions{
		Binary: p.kubelet, Dir: filepath.Join(run.Dir(), "kubelet"), Env: run.Env(), Endpoint: k.node.Cleave.Endpoint(), Containerd: k.node.Runtime.Socket(), Cgroup: run.Cgroup(),
		Settings: map[string]any{
			"evictionHard": map[string]string{"imagefs.available": "1%"}, "imageMinimumGCAge": "1ms",
			"imageGCHighThresholdPercent": killedHigh, "imageGCLowThresholdPercent": killedLow,
		},
	}); err != nil {
		t.Fatal(err)
	}
	manifest := fmt.Sprintf(`{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "runs"}, "spec": {"hostNetwork": true, "terminationGracePeriodSeconds": 1,
		"containers": [{"name": "main", "image": %q, "command": ["sleep", "100000"]}]}}`, node.BusyboxImage)
	if err := os.WriteFile(filepath.Join(k.kubelet.Manifests(), "runs.json"), []byte(manifest), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := k.kubelet.Start(ctx); err != nil {
		t.Fatal(err)
	}
	eventually(ctx, t, "the pod runs", func() error {
		answer, err := k.client.Runtime.ListContainers(ctx, &runtimeapi.ListContainersRequest{})
		if err == nil && (len(answer.GetContainers()) != 1 || answer.GetContainers()[0].GetState() != runtimeapi.ContainerState_CONTAINER_RUNNING) {
			err = fmt.Errorf("containers: %v", answer.GetContainers())
		}
		return err
	})
	if err := k.client.Pin(ctx, k.pull(t, "registry.example/killed/pinned:1")); err != nil {
		t.Fatal(err)
	}
	for _, i := range k.images(t) { // the pod's, the sandbox's and the pinned one
		k.keep[i.GetId()] = strings.Join(i.GetRepoTags(), " ")
	}
	k.ballast(t)
	return k
}

func (k *killedNode) images(t *testing.T) []*runtimeapi.Image {
	t.Helper()
	answer, err := k.client.Images.ListImages(k.ctx, &runtimeapi.ListImagesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	return answer.GetImages()
}

func (k *killedNode) pull(t *testing.T, name string) (id string) {
	t.Helper()
	img, err := image.Random(time.Now().UnixNano(), 1, killedLayer)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := k.node.Registry.Push(k.ctx, name, img); err != nil {
		t.Fatal(err)
	}
	if id, err = k.client.Pull(k.ctx, name); err != nil {
		t.Fatal(err)
	}
	return id
}

// space is what is available on the disk, in bytes, and of how many.
func (k *killedNode) space(t *testing.T) (available, capacity int64) {
	t.Helper()
	var st syscall.Statfs_t
	if err := syscall.Statfs(k.node.Disks[diskImages].Path(), &st); err != nil {
		t.Fatal(err)
	}
	return int64(st.Bavail) * st.Bsize, int64(st.Blocks) * st.Bsize //nolint:gosec // of a disk of 1 GiB
}

// ballast fills the disk so far that all images together bring it above the high mark, and half of them below the low one.
func (k *killedNode) ballast(t *testing.T) {
	t.Helper()
	available, capacity := k.space(t)
	// An image takes twice its layer: packed and unpacked.
	bytes := available - capacity*(100-killedLow)/100 - killedImages/2*2*killedLayer
	f, err := os.Create(filepath.Join(k.node.Disks[diskImages].Path(), "ballast"))
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(syscall.Fallocate(int(f.Fd()), 0, 0, bytes), f.Close()); err != nil {
		t.Fatal(err)
	}
}

// fill pulls images until the disk is above the high mark.
func (k *killedNode) fill(t *testing.T, round int) {
	t.Helper()
	for n := 0; ; n++ {
		if available, capacity := k.space(t); available < capacity*(100-killedHigh+1)/100 {
			return
		}
		k.pull(t, fmt.Sprintf("registry.example/killed/unused:%d-%d", round, n))
	}
}

// collectAndKill has cleave collect, and kills it after a time. It says whether the collection had not ended.
func (k *killedNode) collectAndKill(t *testing.T, after time.Duration) (killed bool) {
	t.Helper()
	k.collects(t)
	ended := make(chan error, 1)
	go func() {
		_, err := agent.Collect(k.ctx, k.node.Cleave.Config().Control.Endpoint.Path(), agent.CollectRequest{})
		ended <- err
	}()
	timer := time.NewTimer(after)
	defer timer.Stop()
	select {
	case err := <-ended:
		if err != nil {
			t.Fatal(err)
		}
		ended <- nil
	case <-timer.C:
		killed = true
	case <-k.ctx.Done():
		t.Fatal(k.ctx.Err())
	}
	if err := k.node.Cleave.Signal(k.ctx, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := k.node.Cleave.WaitGone(k.ctx); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err == nil && killed {
		killed = false // it ended in the same moment
	}
	return killed
}

// collects waits until cleave would delete images.
func (k *killedNode) collects(t *testing.T) {
	t.Helper()
	eventually(k.ctx, t, "cleave would collect images", func() error {
		done, err := agent.Collect(k.ctx, k.node.Cleave.Config().Control.Endpoint.Path(), agent.CollectRequest{DryRun: true})
		if err != nil {
			return err
		}
		for _, s := range done.Steps {
			if s.Images != nil && len(s.Items) > 0 {
				return nil
			}
		}
		return fmt.Errorf("it would do %+v, %s", done.Steps, done.Problem)
	})
}

// completes waits until the disk is at the low mark, by whatever is left to do.
func (k *killedNode) completes(t *testing.T, round int) {
	t.Helper()
	began := time.Now()
	eventually(k.ctx, t, fmt.Sprintf("the run after kill %d completes", round), func() error {
		if available, capacity := k.space(t); available >= capacity*(100-killedLow)/100 {
			return nil
		}
		done, err := agent.Collect(k.ctx, k.node.Cleave.Config().Control.Endpoint.Path(), agent.CollectRequest{})
		available, capacity := k.space(t)
		if available >= capacity*(100-killedLow)/100 {
			return nil
		}
		// Below the high mark nothing is due: what was killed had freed as much. It goes on when there is a need.
		if err == nil && done.Problem == "" && available >= capacity*(100-killedHigh+2)/100 {
			return nil
		}
		return fmt.Errorf("%d of %d bytes are available, %+v, %w", available, capacity, done, err)
	})
	k.whole = min(max(time.Since(began), 300*time.Millisecond), 3*time.Second)
}

// kept fails the test if anything went that had to stay, or if a file of cleave's can't be read.
func (k *killedNode) kept(t *testing.T, round int) {
	t.Helper()
	there := map[string]bool{}
	for _, i := range k.images(t) {
		there[i.GetId()] = true
	}
	for id, name := range k.keep {
		if !there[id] {
			t.Fatalf("kill %d: %s (%s) went", round, name, id)
		}
	}
	containers, err := k.client.Runtime.ListContainers(k.ctx, &runtimeapi.ListContainersRequest{})
	if err != nil || len(containers.GetContainers()) != 1 || containers.GetContainers()[0].GetState() != runtimeapi.ContainerState_CONTAINER_RUNNING {
		t.Fatalf("kill %d: containers %v, %v", round, containers.GetContainers(), err)
	}
	for _, note := range []string{"earlier records are lost", "what was known of images is lost"} {
		if text, err := os.ReadFile(k.node.Cleave.LogFile()); err != nil || strings.Contains(string(text), note) {
			t.Fatalf("kill %d: cleave says %q, or its log can't be read: %v", round, note, err)
		}
	}
	f, err := os.Open(filepath.Join(k.node.Cleave.Config().StateDir, flight.FileName))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close() //nolint:errcheck // only read
	lines, err := flight.Lines(f, flight.SizeBytes)
	if err != nil {
		t.Fatal(err)
	}
	for reader := record.NewReader(lines); ; {
		if _, err := reader.Next(); errors.Is(err, io.EOF) {
			return
		} else if err != nil {
			t.Fatalf("kill %d: %v", round, err)
		}
	}
}
