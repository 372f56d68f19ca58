package integration

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	imagesapi "github.com/containerd/containerd/api/services/images/v1"
	leasesapi "github.com/containerd/containerd/api/services/leases/v1"
	"github.com/google/go-cmp/cmp"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/metadata"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/agent/store"
	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/integration/toolchain/bin"
	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/image"
	"github.com/cleave-cri/cleave/lab/node"
	"github.com/cleave-cri/cleave/lab/pod"
	"github.com/cleave-cri/cleave/lab/runtime"
	"github.com/cleave-cri/cleave/snapshot"
	"github.com/cleave-cri/cleave/snapshot/inventory"
)

const (
	// inventoryImagesEnv is how many images each node of TestPredictedBytesComeFree
	// gets; empty: 12.
	inventoryImagesEnv = "CLEAVE_INVENTORY_IMAGES"
	// inventorySeedEnv repeats a run of it.
	inventorySeedEnv = "CLEAVE_INVENTORY_SEED"
)

func numberFrom(t *testing.T, env string, otherwise uint64) uint64 {
	t.Helper()
	text := os.Getenv(env)
	if text == "" {
		return otherwise
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatalf("%s=%q: want a number", env, text)
	}
	return n
}

// shelfNode is a node with random images.
type shelfNode struct {
	*node.Node
	client *pod.Client
	// follower reads by events, measurer knows what it has measured.
	follower *snapshot.Reader
	measurer *store.Measurer
	// running is the image of a container.
	running string
	// repullable are the images that can be had again.
	repullable map[string]bool
}

// TestPredictedBytesComeFree puts random images that share layers on a node, by
// pull and by import, removes them some at a time as the CRI does, and compares
// what came free on each filesystem with what was said before: within 1 % or
// 1 MiB, each time and in the sum.
func TestPredictedBytesComeFree(t *testing.T) {
	t.Parallel()
	count := int(numberFrom(t, inventoryImagesEnv, 12)) //nolint:gosec // a small number
	seed := numberFrom(t, inventorySeedEnv, rand.Uint64N(1_000_000))
	images := sync.OnceValues(func() ([]v1.Image, error) { return image.Sharing(seed, count, 2<<20) })
	for _, fs := range []disk.FS{disk.Ext4, disk.XFS} {
		for _, split := range []bool{false, true} {
			name := map[bool]string{false: "overlayfs", true: "split"}[split]
			t.Run(string(fs)+" "+name, func(t *testing.T) {
				t.Parallel()
				t.Logf("%s=%d repeats it", inventorySeedEnv, seed)
				n := startShelf(t, fs, split)
				images, err := images()
				if err != nil {
					t.Fatal(err)
				}
				n.fill(t, images)
				n.clear(t, rand.New(rand.NewPCG(seed, 4))) //nolint:gosec // it has to be the same each time
			})
		}
	}
}

// startShelf makes the node: containerd's root on one disk, and for the split
// snapshotter layers and writable layers on two more.
func startShelf(t *testing.T, fs disk.FS, split bool) *shelfNode {
	t.Helper()
	const size = 4 << 30 // sparse
	o := node.Options{
		Disks: []disk.Spec{{Name: "ctd", SizeBytes: size, FS: fs}},
		Runtime: func(o *runtime.Options, disks map[string]*disk.Disk) {
			o.Root = filepath.Join(disks["ctd"].Path(), "root")
		},
	}
	if split {
		o.Disks = append(o.Disks, disk.Spec{Name: "images", SizeBytes: size, FS: fs}, disk.Spec{Name: "containers", SizeBytes: size, FS: fs})
		o.Split = &node.SplitOptions{Images: "images", Containers: "containers"}
	}
	n := &shelfNode{Node: startNode(t, o)}
	n.client = dial(t, n.Runtime.Endpoint())
	n.follower, n.measurer = snapshot.NewReader(n.client.Conn()), store.NewMeasurer(n.client.Conn())
	ctx, cancel := context.WithCancel(t.Context())
	var following errgroup.Group
	following.Go(func() error { return n.follower.Follow(ctx) })
	t.Cleanup(func() {
		cancel()
		if err := following.Wait(); err != nil {
			t.Error(err)
		}
	})
	return n
}

func inNamespace(ctx context.Context) context.Context {
	return metadata.AppendToOutgoingContext(ctx, "containerd-namespace", "k8s.io")
}

// fill pulls two of three images and imports the third, runs a container, and
// takes a lease on an image's layers.
func (n *shelfNode) fill(t *testing.T, images []v1.Image) {
	t.Helper()
	ctx := bounded(t)
	ctr, err := bin.Path(ctx, "ctr")
	if err != nil {
		t.Fatal(err)
	}
	snapshotter := "overlayfs"
	if n.Split != nil {
		snapshotter = "cleave"
	}
	// A layer that was imported is not downloaded again by a pull, so that nobody
	// knows where it can be had.
	imported, came := map[string]bool{}, map[string]bool{}
	n.repullable = map[string]bool{}
	for i, made := range images {
		byImport := i%3 == 2
		layers, err := made.Layers()
		if err != nil {
			t.Fatal(err)
		}
		ref := fmt.Sprintf("registry.example/random/%d:1", i)
		n.repullable[ref] = !byImport
		for _, l := range layers {
			digest, err := l.Digest()
			if err != nil {
				t.Fatal(err)
			}
			if !came[digest.String()] {
				came[digest.String()], imported[digest.String()] = true, byImport
			}
			n.repullable[ref] = n.repullable[ref] && !imported[digest.String()]
		}
		if byImport {
			file := filepath.Join(t.TempDir(), "image.tar")
			if err := image.Save(file, ref, made); err != nil {
				t.Fatal(err)
			}
			out, err := exec.CommandContext(ctx, ctr, "--address", n.Runtime.Socket(), "--namespace", "k8s.io", "images", "import", "--snapshotter", snapshotter, file).CombinedOutput()
			if err != nil {
				t.Fatalf("import %s: %v: %s", ref, err, out)
			}
			continue
		}
		if _, err := n.Registry.Push(ctx, ref, made); err != nil {
			t.Fatal(err)
		}
		if _, err := n.client.Pull(ctx, ref); err != nil {
			t.Fatal(err)
		}
	}
	if n.running, err = n.client.Pull(ctx, node.BusyboxImage); err != nil {
		t.Fatal(err)
	}
	p, err := n.client.Run(ctx, n.PodSpec("runs"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Start(ctx, pod.ContainerSpec{Name: "c", Image: node.BusyboxImage, Command: []string{"sleep", "100000"}}); err != nil {
		t.Fatal(err)
	}
	n.lease(ctx, t, snapshotter)
}

// lease holds the layers of one image, as a pull of another image on top of it
// would.
func (n *shelfNode) lease(ctx context.Context, t *testing.T, snapshotter string) {
	t.Helper()
	p := n.picture(ctx, t)
	i := slices.IndexFunc(p.Images, func(i inventory.Image) bool { return isRandom(i) && i.Exclusive.Bytes() > 64<<10 }) // some free only their documents
	leases := leasesapi.NewLeasesClient(n.client.Conn())
	if _, err := leases.Create(inNamespace(ctx), &leasesapi.CreateRequest{ID: "held"}); err != nil {
		t.Fatal(err)
	}
	for _, part := range p.Parts(p.Images[i].Key) {
		if key, ok := strings.CutPrefix(part.ID, "k8s.io/"+snapshotter+"/"); ok {
			if _, err := leases.AddResource(inNamespace(ctx), &leasesapi.AddResourceRequest{ID: "held", Resource: &leasesapi.Resource{ID: key, Type: "snapshots/" + snapshotter}}); err != nil {
				t.Fatal(err)
			}
		}
	}
	held, _ := n.picture(ctx, t).Image(p.Images[i].Key)
	if held.Exclusive.Bytes() >= p.Images[i].Exclusive.Bytes() {
		t.Errorf("a lease on its layers changes nothing: %+v, before %+v", held.Exclusive, p.Images[i].Exclusive)
	}
}

func isRandom(i inventory.Image) bool {
	return slices.ContainsFunc(i.Names, func(name string) bool { return strings.Contains(name, "/random/") })
}

// picture reads by events and measures, and fails if not all of it is known.
func (n *shelfNode) picture(ctx context.Context, t *testing.T) *inventory.Picture {
	t.Helper()
	c, err := n.follower.Read(ctx)
	if err != nil {
		t.Fatal(err)
	}
	figures, problems := n.measurer.Measure(ctx, c)
	p := inventory.Build(c, figures)
	if len(problems) > 0 || len(p.Unread) > 0 {
		t.Fatalf("not all is known: %v %v", problems, p.Unread)
	}
	return p
}

// used is what is used on each disk, by the name that figures have for it.
func (n *shelfNode) used(t *testing.T) map[string]int64 {
	t.Helper()
	out := map[string]int64{}
	for _, d := range n.Disks {
		fs, err := fsstats.NewProber().FilesystemOf(d.Path())
		if err != nil {
			t.Fatal(err)
		}
		out[fs.Device.String()] = usedBytes(t, d)
	}
	return out
}

// near says whether what came free is what was said.
func near(said, got int64) bool {
	return max(said-got, got-said) <= max(said/100, 1<<20)
}

// clear removes all images but the running container's and the sandbox's.
func (n *shelfNode) clear(t *testing.T, random *rand.Rand) {
	t.Helper()
	var saidSum, gotSum, most int64
	rounds := 0
	for {
		ctx := bounded(t)
		p := n.picture(ctx, t)
		var left []inventory.Image
		for _, i := range p.Images {
			if isRandom(i) {
				left = append(left, i)
			}
		}
		if len(left) == 0 {
			break
		}
		random.Shuffle(len(left), func(i, j int) { left[i], left[j] = left[j], left[i] })
		var keys []inventory.Key
		for _, i := range left[:min(len(left), 1+random.IntN(3))] {
			keys = append(keys, i.Key)
			n.checkImage(t, i)
		}
		said := p.Freed(keys...)
		if said.Unknown > 0 {
			t.Fatalf("%d parts of %v have no figure", said.Unknown, keys)
		}
		if len(keys) == 1 {
			if diff := cmp.Diff(left[0].Exclusive, said); diff != "" {
				t.Errorf("exclusive bytes of one image and what removing it frees (-exclusive +freed):\n%s", diff)
			}
		}
		before := n.used(t)
		for _, k := range keys {
			if _, err := n.client.Images.RemoveImage(ctx, &runtimeapi.RemoveImageRequest{Image: &runtimeapi.ImageSpec{Image: k.ID}}); err != nil {
				t.Fatal(err)
			}
		}
		var after map[string]int64
		eventually(ctx, t, fmt.Sprintf("the space of %d images, %+v", len(keys), said.PerFilesystem), func() (string, bool) {
			after = n.used(t)
			for device, was := range before {
				if want := said.On(device).Bytes; !near(want, was-after[device]) {
					return fmt.Sprintf("%d of %d bytes on %s; kept by %+v", was-after[device], want, device, p.Keepers(keys[0])), false
				}
			}
			return "", true
		})
		for device, was := range before {
			saidSum, gotSum = saidSum+said.On(device).Bytes, gotSum+was-after[device]
			most = max(most, said.On(device).Bytes-was+after[device], was-after[device]-said.On(device).Bytes)
		}
		rounds++
		n.checkKept(ctx, t)
	}
	t.Logf("%d removals: said %d bytes, came free %d; at most %d apart", rounds, saidSum, gotSum, most)
	if !near(saidSum, gotSum) {
		t.Errorf("said %d bytes in all, %d came free", saidSum, gotSum)
	}
	n.checkEnd(t)
}

// checkImage checks what is said of a random image besides its bytes.
func (n *shelfNode) checkImage(t *testing.T, i inventory.Image) {
	t.Helper()
	for _, name := range i.Names {
		if want, ok := n.repullable[name]; ok && i.Repullable != want {
			t.Errorf("%s: re-pullable %t (%s), want %t", name, i.Repullable, i.NotRepullable, want)
		}
	}
	if len(i.Users) > 0 || i.Pinned {
		t.Errorf("%v is pinned (%t) or used by %+v", i.Names, i.Pinned, i.Users)
	}
}

// checkKept: the images of the container and the sandbox are known as used and
// pinned, and still there.
func (n *shelfNode) checkKept(ctx context.Context, t *testing.T) {
	t.Helper()
	for _, i := range n.picture(ctx, t).Images {
		switch {
		case i.ID == n.running:
			if !slices.ContainsFunc(i.Users, func(u inventory.User) bool { return u.Kind == inventory.UserContainer }) {
				t.Errorf("the running container's image is used by %+v", i.Users)
			}
		case slices.Contains(i.Names, node.PauseImage):
			if !i.Pinned || !slices.ContainsFunc(i.Users, func(u inventory.User) bool { return u.Kind == inventory.UserSandbox }) {
				t.Errorf("the sandbox's image is pinned (%t), used by %+v", i.Pinned, i.Users)
			}
		}
	}
}

// checkEnd: what events told is what a fresh reading finds, also after a restart
// of containerd; the lease is what still holds something; and the commands show it.
func (n *shelfNode) checkEnd(t *testing.T) {
	t.Helper()
	ctx := bounded(t)
	same := func(when string) *inventory.Contents {
		t.Helper()
		var followed, fresh *inventory.Contents
		eventually(ctx, t, "two settled readings "+when, func() (string, bool) {
			var err error
			if followed, err = n.follower.Read(ctx); err != nil {
				return err.Error(), false
			}
			if fresh, err = snapshot.ReadContents(ctx, n.client.Conn()); err != nil {
				return err.Error(), false
			}
			followed.At = fresh.At
			return cmp.Diff(fresh, followed), cmp.Equal(fresh, followed) && !followed.Unsettled
		})
		return followed
	}
	same("at the end")
	if err := n.Runtime.Restart(ctx); err != nil {
		t.Fatal(err)
	}
	c := same("after a restart of containerd")
	if len(c.Namespaces) == 0 || len(c.Namespaces[slices.IndexFunc(c.Namespaces, func(ns inventory.Namespace) bool { return ns.Name == "k8s.io" })].Leases) == 0 {
		t.Error("the lease is not in the contents")
	}
	records, err := imagesapi.NewImagesClient(n.client.Conn()).List(inNamespace(ctx), &imagesapi.ListImagesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	var list store.Images
	n.command(ctx, t, &list, "images")
	names := 0
	for _, i := range list.Images {
		names += len(i.Names)
	}
	if names != len(records.GetImages()) || len(list.Problems) > 0 {
		t.Errorf("`cleave images` has %d names and problems %v, containerd %d", names, list.Problems, len(records.GetImages()))
	}
	var orphans store.Orphans
	n.command(ctx, t, &orphans, "orphans")
	if len(orphans.Orphans) > 0 || orphans.Unread {
		t.Errorf("`cleave orphans` on a tidy node: %+v", orphans)
	}
}

// command runs cleave with -o json and reads what it says.
func (n *shelfNode) command(ctx context.Context, t *testing.T, into any, name string) {
	t.Helper()
	out, err := exec.CommandContext(ctx, cleaveBinary(t), name, "-o", "json", "--config", n.Cleave.ConfigFile()).Output()
	if err != nil {
		t.Fatalf("cleave %s: %v: %s", name, err, out)
	}
	if err := json.Unmarshal(out, into); err != nil {
		t.Fatalf("cleave %s: %v: %s", name, err, out)
	}
}
