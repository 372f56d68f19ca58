package integration

import (
	"context"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	snapshotevents "github.com/containerd/containerd/api/events"
	eventsapi "github.com/containerd/containerd/api/services/events/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/image"
	"github.com/cleave-cri/cleave/lab/layers"
	"github.com/cleave-cri/cleave/lab/node"
	"github.com/cleave-cri/cleave/lab/pod"
	"github.com/cleave-cri/cleave/lab/runtime"
	"github.com/cleave-cri/cleave/lab/tree"
)

// extractions notes the parents of the extraction snapshots that containerd
// prepares, until the function returned is called.
func extractions(ctx context.Context, t *testing.T, conn grpc.ClientConnInterface) (parents func() []string) {
	t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	// The first event says that the subscription holds.
	const ready = "/lab/ready"
	client := eventsapi.NewEventsClient(conn)
	stream, err := client.Subscribe(ctx, &eventsapi.SubscribeRequest{Filters: []string{`topic=="/snapshot/prepare"`, `topic=="` + ready + `"`}})
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	holds := make(chan struct{})
	done := make(chan error, 1)
	go func() {
		for {
			e, err := stream.Recv()
			if err != nil {
				done <- err
				return
			}
			if e.GetTopic() == ready {
				select {
				case <-holds:
				default:
					close(holds)
				}
				continue
			}
			var prepare snapshotevents.SnapshotPrepare
			if err := proto.Unmarshal(e.GetEvent().GetValue(), &prepare); err != nil {
				done <- err
				return
			}
			if strings.HasPrefix(prepare.GetKey(), "extract-") {
				out = append(out, prepare.GetParent())
			}
		}
	}()
	eventually(ctx, t, "the subscription", func() (string, bool) {
		in := metadata.AppendToOutgoingContext(ctx, "containerd-namespace", "k8s.io")
		_, err := client.Publish(in, &eventsapi.PublishRequest{Topic: ready, Event: &anypb.Any{}})
		select {
		case <-holds:
			return "", true
		default:
			return fmt.Sprint(err), false
		}
	})
	return func() []string {
		t.Helper()
		cancel()
		if err := <-done; status.Code(err) != codes.Canceled {
			t.Error(err)
		}
		return out
	}
}

// rootfs reads the root filesystem of a container as it is mounted.
func rootfs(t *testing.T, c *runtime.Containerd, id string) tree.Tree {
	t.Helper()
	got, err := tree.Read(filepath.Join(c.State(), "io.containerd.runtime.v2.task", "k8s.io", id, "rootfs"))
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// unpackSeedEnv decides what is in the layers of TestUnpackedImagesEqualOverlayfs;
// empty: anything.
const unpackSeedEnv = "CLEAVE_UNPACK_SEED"

// TestUnpackedImagesEqualOverlayfs unpacks an image of 13 awkward layers by
// containerd's own overlayfs and by the split snapshotter, one layer after the
// other and side by side, on each filesystem, and side by side when the container
// is created (CTD-34: for an image that was pulled for another snapshotter), and
// compares the containers' root filesystems.
func TestUnpackedImagesEqualOverlayfs(t *testing.T) {
	t.Parallel()
	const count = 13
	seed := rand.Uint64N(1_000_000) //nolint:gosec // not a secret
	if text := os.Getenv(unpackSeedEnv); text != "" {
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatalf("%s=%q: want a number", unpackSeedEnv, text)
		}
	}
	t.Logf("%s=%d repeats it", unpackSeedEnv, seed)
	ctx := bounded(t)
	base, err := image.Busybox(ctx, image.Config{})
	if err != nil {
		t.Fatal(err)
	}
	plain := startBare(t, node.Options{})
	client := dial(t, plain.Runtime.Endpoint())
	img, err := layers.Append(base, seed, count-1)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := plain.Registry.Push(ctx, awkward(seed), img); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Pull(ctx, awkward(seed)); err != nil {
		t.Fatal(err)
	}
	want := rootfs(t, plain.Runtime, runOf(ctx, t, plain, client, seed)())
	if marks := layersOf(want); len(want) < 300 || len(marks) != count-1 {
		t.Fatalf("%d names and the layers %v, which is not the image", len(want), marks)
	}
	for _, tc := range []struct {
		name    string
		kind    disk.FS
		unpacks int
		// late: the image is pulled before the split snapshotter is there.
		late bool
		// apart: all layers are begun without a parent.
		apart bool
	}{
		{"sequential on ext4", disk.Ext4, 1, false, false},
		{"sequential on xfs", disk.XFS, 1, false, false},
		{"parallel on ext4", disk.Ext4, 4, false, true},
		{"parallel on xfs", disk.XFS, 4, false, true},
		{"at creation", disk.XFS, 1, true, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			n := prepareSplit(t, tc.kind)
			ctx := bounded(t)
			if _, err := n.Registry.Push(ctx, awkward(seed), img); err != nil {
				t.Fatal(err)
			}
			if tc.late {
				n.pull(ctx, t, awkward(seed))
			}
			n.migrate(ctx, t, tc.unpacks)
			start := runOf(ctx, t, n.Node, n.client, seed)
			parents := extractions(ctx, t, n.client.Conn())
			if !tc.late {
				n.pull(ctx, t, awkward(seed))
			}
			id := start()
			begun := parents()
			if d := tree.Compare(want, rootfs(t, n.Runtime, id)); len(d) > 0 {
				t.Errorf("%s=%d: the split snapshotter's (second) differs from overlayfs's (first) in %d points:\n%s", unpackSeedEnv, seed, len(d), strings.Join(d[:min(20, len(d))], "\n"))
			}
			without := 0
			for _, p := range begun {
				if p == "" {
					without++
				}
			}
			if tc.apart && without != len(begun) || !tc.apart && without > 1 || len(begun) < count-1 {
				t.Errorf("%s=%d: %d of %d layers were begun without a parent", unpackSeedEnv, seed, without, len(begun))
			}
		})
	}
}

// runOf runs a pod, with which the sandbox's image is unpacked, and returns what
// starts a container of an awkward image in it.
func runOf(ctx context.Context, t *testing.T, n *node.Node, client *pod.Client, seed uint64) (start func() (id string)) {
	t.Helper()
	p, err := client.Run(ctx, n.PodSpec(fmt.Sprintf("p%d", seed)))
	if err != nil {
		t.Fatal(err)
	}
	return func() string {
		t.Helper()
		id, err := p.Start(ctx, pod.ContainerSpec{Name: "c", Image: awkward(seed), Command: []string{"sh", "-c", "exec sleep 100000"}})
		if err != nil {
			t.Fatal(err)
		}
		return id
	}
}

func awkward(seed uint64) string { return fmt.Sprintf("example.org/awkward:%d", seed) }

// layersOf lists the marks that each layer of the image leaves.
func layersOf(t tree.Tree) []string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(t)) {
		if strings.HasPrefix(name, layers.Top+"/layer-") && t[name].Mode.Type() == fs.FileMode(0) {
			out = append(out, name)
		}
	}
	return out
}
