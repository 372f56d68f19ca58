// Package reclaim tests deletions on a real containerd with runc: what may go
// goes, frees what was promised, and nothing else goes. It needs root; what it
// runs against is pinned in integration/toolchain.
package reclaim

import (
	"context"
	"fmt"
	"hash/fnv"
	"math/rand"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/types"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/agent/stock"
	"github.com/cleave-cri/cleave/engine/garbage"
	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/integration/toolchain/bin"
	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/image"
	"github.com/cleave-cri/cleave/lab/janitor"
	"github.com/cleave-cri/cleave/lab/need"
	"github.com/cleave-cri/cleave/lab/node"
	"github.com/cleave-cri/cleave/lab/pod"
	labruntime "github.com/cleave-cri/cleave/lab/runtime"
	"github.com/cleave-cri/cleave/reclaim"
	"github.com/cleave-cri/cleave/reclaim/ctdstore"
	"github.com/cleave-cri/cleave/reclaim/reclaimtest"
)

// See package integration.
func init() { runtime.LockOSThread() }

func TestMain(m *testing.M) {
	janitor.Main()
	if dir := os.Getenv(childEnv); dir != "" {
		if err := child(context.Background(), dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "cleave-reclaim")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir) //nolint:errcheck,forbidigo // holds one program of ours
	buildCleave = sync.OnceValues(func() (string, error) { return node.BuildCleave(context.Background(), dir, false) })
	return m.Run()
}

var buildCleave func() (string, error)

// patience bounds what a test waits for.
const patience = 5 * time.Minute

func bounded(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

const (
	namespace = "k8s.io"
	layersOn  = "images" // the disk of layers and blobs
)

// realNode is a containerd whose layers and blobs are on a disk of their own, and
// executors for it.
type realNode struct {
	*node.Node
	client *pod.Client
	store  *ctdstore.Store
	stock  *stock.Stock
	space  space
	// logs is the pods' log directory.
	logs  string
	fates *reclaimtest.Fates
	// pods are those that run, by container.
	mu   sync.Mutex
	pods map[string]*pod.Pod // guarded by mu
}

// space is what statfs says of a disk.
type space struct {
	prober *fsstats.Prober
	path   string
}

func start(t *testing.T, kind disk.FS, snapshotter string, diskBytes int64) *realNode {
	t.Helper()
	need.Root(t)
	need.Loop(t)
	need.Tools(t, "runc")
	peers, err := bin.Get(bounded(t), os.Stderr, "containerd", "shim")
	if err != nil {
		t.Fatal(err)
	}
	o := node.Options{
		Containerd: peers[0], Shim: peers[1],
		Disks: []disk.Spec{{Name: layersOn, SizeBytes: diskBytes, FS: kind}, {Name: "containers", SizeBytes: 400 << 20, FS: kind}},
		Runtime: func(r *labruntime.Options, disks map[string]*disk.Disk) {
			r.Root = disks[layersOn].Path() + "/containerd"
		},
	}
	if snapshotter != "overlayfs" {
		if o.Cleave, err = buildCleave(); err != nil {
			t.Fatal(err)
		}
		o.Split = &node.SplitOptions{Images: layersOn, Containers: "containers"}
	}
	n := &realNode{pods: map[string]*pod.Pod{}}
	if n.Node, err = node.Start(bounded(t), need.Lab(t), o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("containerd's log:\n%s", n.Runtime.LogTail(40))
		}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := n.Close(ctx); err != nil {
			t.Errorf("take the node down: %v", err)
		}
	})
	if n.client, err = pod.Dial(n.Runtime.Endpoint()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.client.Close(); err != nil {
			t.Error(err)
		}
	})
	n.stock = stock.New(n.client.Conn())
	n.store = ctdstore.New(n.client.Conn(), namespace, snapshotter)
	n.space = space{fsstats.NewProber(), n.Disks[layersOn].Path()}
	n.logs = n.Run.Dir() + "/pods"
	return n
}

func (n *realNode) images(lock reclaim.ImageLock, memory reclaim.Memory) *reclaim.Images {
	return &reclaim.Images{Site: reclaim.Site{Space: n.space}, CRI: n.client.Images, Runtime: n.client.Runtime, Store: n.store, Lock: lock, Memory: memory}
}

// world is what the suite needs, with nothing in it.
func (n *realNode) world(t *testing.T) *reclaimtest.World {
	t.Helper()
	n.empty(t)
	n.fates = &reclaimtest.Fates{}
	return &reclaimtest.World{
		Images:     n.images(reclaimtest.Unlocked{}, &reclaimtest.Memory{}),
		Containers: &reclaim.Containers{Site: reclaim.Site{Space: n.space}, Runtime: n.client.Runtime, Pods: n.fates, LogDir: n.logs},
		Fates:      n.fates,
		Pull:       n.pull,
		Pin:        n.pin,
		Remove: func(t testing.TB, id string) {
			if _, err := n.client.Images.RemoveImage(bounded(t), &runtimeapi.RemoveImageRequest{Image: &runtimeapi.ImageSpec{Image: id}}); err != nil {
				t.Error(err)
			}
		},
		Run:       n.start,
		End:       n.end,
		Inventory: n.inventory,
	}
}

// empty removes all pods and all images but the sandboxes'.
func (n *realNode) empty(t testing.TB) {
	t.Helper()
	ctx := bounded(t)
	boxes, err := n.client.Runtime.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range boxes.GetItems() {
		if _, err := n.client.Runtime.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: b.GetId()}); err != nil {
			t.Fatal(err)
		}
		if _, err := n.client.Runtime.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: b.GetId()}); err != nil {
			t.Fatal(err)
		}
	}
	for _, i := range n.list(t) {
		if strings.Contains(fmt.Sprint(i.GetRepoTags()), node.PauseImage) {
			continue
		}
		if _, err := n.client.Images.RemoveImage(ctx, &runtimeapi.RemoveImageRequest{Image: &runtimeapi.ImageSpec{Image: i.GetId()}}); err != nil {
			t.Fatal(err)
		}
	}
}

func (n *realNode) list(t testing.TB) []*runtimeapi.Image {
	t.Helper()
	answer, err := n.client.Images.ListImages(bounded(t), &runtimeapi.ListImagesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	return answer.GetImages()
}

func (n *realNode) inventory(t testing.TB) reclaim.ImageInventory {
	t.Helper()
	p, err := n.stock.Picture(bounded(t), 0, nil)
	if err != nil {
		t.Fatal(err)
	}
	f, err := n.space.prober.FilesystemOf(n.space.path)
	if err != nil {
		t.Fatal(err)
	}
	return stock.For(p, namespace, f.Device.String())
}

// pull makes an image of random layers and pulls it.
func (n *realNode) pull(t testing.TB, name string, layers ...garbage.Layer) string {
	t.Helper()
	built := empty.Image
	for _, l := range layers {
		layer, err := layerOf(t, l)
		if err != nil {
			t.Fatal(err)
		}
		if built, err = mutate.AppendLayers(built, layer); err != nil {
			t.Fatal(err)
		}
	}
	file, err := built.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	file = file.DeepCopy()
	file.Architecture, file.OS = runtime.GOARCH, "linux"
	file.Config.Cmd = []string{"/bin/sleep", "86400"}
	file.Config.Labels = map[string]string{"name": name} // two images are never the same
	if built, err = mutate.ConfigFile(built, file); err != nil {
		t.Fatal(err)
	}
	if _, err := n.Registry.Push(bounded(t), name, built); err != nil {
		t.Fatal(err)
	}
	id, err := n.client.Pull(bounded(t), name)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func layerOf(t testing.TB, l garbage.Layer) (v1.Layer, error) {
	if l.ID != reclaimtest.Runs.ID {
		seed := fnv.New64()
		fmt.Fprint(seed, l.ID)
		return random.Layer(l.Bytes, types.DockerUncompressedLayer, random.WithSource(rand.NewSource(int64(seed.Sum64()>>1)))) //nolint:gosec // half of it fits
	}
	busybox, err := image.Busybox(bounded(t), image.Config{})
	if err != nil {
		return nil, err
	}
	layers, err := busybox.Layers()
	if err != nil {
		return nil, err
	}
	return layers[0], nil
}

func (n *realNode) pin(t testing.TB, id string) {
	t.Helper()
	if err := n.client.Pin(bounded(t), id); err != nil {
		t.Fatal(err)
	}
}

// start runs a container in a pod of its own.
func (n *realNode) start(t testing.TB, uid, name, imageID string) string {
	t.Helper()
	labels := map[string]string{"io.kubernetes.pod.uid": uid, "io.kubernetes.container.name": name}
	spec := n.PodSpec("pod-" + uid)
	spec.UID, spec.Labels = uid, labels
	spec.LogDir = n.logs + "/default_" + spec.Name + "_" + uid
	p, err := n.client.Run(bounded(t), spec)
	if err != nil {
		t.Fatal(err)
	}
	id, err := p.Start(bounded(t), pod.ContainerSpec{Name: name, Image: imageID, Labels: labels, Edit: func(c *runtimeapi.ContainerConfig) { c.LogPath = name + "/0.log" }})
	if err != nil {
		t.Fatal(err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.pods[id] = p
	return id
}

func (n *realNode) end(t testing.TB, id string) {
	t.Helper()
	if _, err := n.client.Runtime.StopContainer(bounded(t), &runtimeapi.StopContainerRequest{ContainerId: id}); err != nil {
		t.Fatal(err)
	}
	if _, err := n.client.Wait(bounded(t), id); err != nil {
		t.Fatal(err)
	}
}

// AvailableBytes implements [reclaim.Space].
func (s space) AvailableBytes(context.Context) (int64, error) {
	f, err := s.prober.FilesystemOf(s.path)
	return int64(f.AvailableBytes), err //nolint:gosec // of a small disk
}
