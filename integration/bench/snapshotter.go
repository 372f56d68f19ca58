package main

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"google.golang.org/grpc/metadata"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/integration/toolchain/bin"
	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/image"
	"github.com/cleave-cri/cleave/lab/janitor"
	"github.com/cleave-cri/cleave/lab/node"
	"github.com/cleave-cri/cleave/lab/pod"
	"github.com/cleave-cri/cleave/lab/runtime"
	"github.com/cleave-cri/cleave/snapshot"
	"github.com/cleave-cri/cleave/snapshot/split/ctdconfig"
)

// The disks of each node, and what is pulled to them.
const (
	imagesDiskBytes     = 3 << 30
	containersDiskBytes = 1 << 30

	manyRef        = "registry.example/bench/many:1"
	manyLayers     = 12
	filesPerLayer  = 300
	manyFileBytes  = 16 << 10
	largeRef       = "registry.example/bench/large:1"
	largeFileBytes = 256 << 20
	containers     = 50
	usageFiles     = 20_000
	unpacksAtOnce  = 3
)

// side is one of the two nodes that are compared.
type side struct {
	name        string
	snapshotter string
	node        *node.Node
	client      *pod.Client
	base        v1.Image
	took        []time.Duration
}

// p50 is the median.
func (s *side) p50() time.Duration {
	slices.Sort(s.took)
	return s.took[len(s.took)/2]
}

// pair is a node on containerd's overlayfs and one on the split snapshotter,
// with disks of the same sizes.
type pair struct {
	builtin, split *side
	stops          []func() error
}

func (p *pair) stop() error {
	var errs []error
	for _, s := range slices.Backward(p.stops) {
		errs = append(errs, s())
	}
	return errors.Join(errs...)
}

func benchSnapshotter(ctx context.Context, cleave string, scale float64, only []string) error {
	var err error
	if cleave, err = filepath.Abs(cleave); err != nil {
		return err
	}
	fmt.Fprintf(os.Stderr, "bench-snapshotter: two nodes side by side, ext4, images on %d GiB, containers on %d GiB; overlayfs has both on the first; some 4 minutes\n",
		imagesDiskBytes>>30, containersDiskBytes>>30)
	for _, part := range []struct {
		name    string
		unpacks int
		do      func(context.Context, *pair, float64) error
	}{
		{"unpack_sequential", 1, benchUnpack("snap.unpack_sequential")},
		{"unpack_parallel", unpacksAtOnce, benchUnpack("snap.unpack_parallel")},
		{"create", 1, benchCreate},
		{"usage", 1, benchUsage},
		{"unmount", 1, benchUnmount},
	} {
		if !slices.Contains(only, part.name) {
			continue
		}
		p, err := startPair(ctx, cleave, part.unpacks)
		if err != nil {
			return fmt.Errorf("%s: %w", part.name, err)
		}
		if err := errors.Join(part.do(ctx, p, scale), p.stop()); err != nil {
			return fmt.Errorf("%s: %w", part.name, err)
		}
	}
	return nil
}

func startPair(ctx context.Context, cleave string, unpacks int) (_ *pair, err error) {
	p := &pair{}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.stop())
		}
	}()
	if p.builtin, err = p.startSide(ctx, "overlayfs", cleave, unpacks); err != nil {
		return nil, err
	}
	p.split, err = p.startSide(ctx, ctdconfig.Snapshotter, cleave, unpacks)
	return p, err
}

func (p *pair) startSide(ctx context.Context, snapshotter, cleave string, unpacks int) (*side, error) {
	peers, err := bin.Get(ctx, os.Stderr, "containerd", "shim")
	if err != nil {
		return nil, err
	}
	run, err := janitor.Start(ctx, janitor.Options{})
	if err != nil {
		return nil, err
	}
	p.stops = append(p.stops, func() error { return run.Close(context.WithoutCancel(ctx)) })
	o := node.Options{
		Containerd: peers[0], Shim: peers[1], Cleave: cleave, Configure: quiet,
		Disks: []disk.Spec{{Name: "images", SizeBytes: imagesDiskBytes}, {Name: "containers", SizeBytes: containersDiskBytes}},
		Runtime: func(r *runtime.Options, disks map[string]*disk.Disk) {
			r.Root = filepath.Join(disks["images"].Path(), "containerd")
			r.Imports = []string{filepath.Join(r.Dir, "conf.d", "*.toml")}
		},
	}
	if snapshotter == ctdconfig.Snapshotter {
		o.Split = &node.SplitOptions{Images: "images", Containers: "containers", MaxConcurrentUnpacks: unpacks}
	} else if err := writeUnpacks(filepath.Join(run.Dir(), "ctd", "conf.d"), unpacks); err != nil {
		return nil, err
	}
	n, err := node.Start(ctx, run, o)
	if err != nil {
		return nil, err
	}
	p.stops = append(p.stops, func() error { return n.Close(context.WithoutCancel(ctx)) })
	client, err := pod.Dial(n.Runtime.Endpoint())
	if err != nil {
		return nil, err
	}
	p.stops = append(p.stops, client.Close)
	base, err := image.Busybox(ctx, image.Config{})
	return &side{name: snapshotter, snapshotter: snapshotter, node: n, client: client, base: base}, err
}

// writeUnpacks gives the node on overlayfs the same number of unpacks at a time.
func writeUnpacks(dir string, unpacks int) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	text := fmt.Sprintf("version = 4\n[plugins.'io.containerd.transfer.v1.local']\nmax_concurrent_unpacks = %d\n", unpacks)
	return os.WriteFile(filepath.Join(dir, "unpacks.toml"), []byte(text), 0o600)
}

// rounds does the same in turn on both sides, each first as often, and keeps how
// long it took. do returns the time that counts.
func (p *pair) rounds(ctx context.Context, count int, do func(context.Context, *side) (time.Duration, error)) error {
	sides := []*side{p.builtin, p.split}
	for i := range count + 1 {
		for j := range sides {
			s := sides[(i+j)%len(sides)]
			// What the round before has written is on disk, for both alike.
			syscall.Sync()
			took, err := do(ctx, s)
			if err != nil {
				return fmt.Errorf("%s: %w", s.name, err)
			}
			if i > 0 { // the first warms up
				s.took = append(s.took, took)
			}
		}
	}
	return nil
}

func (p *pair) report(name string) {
	builtin, split := p.builtin.p50(), p.split.p50()
	report(name+".overlayfs_p50", float64(builtin)/float64(time.Millisecond), "ms")
	report(name+".split_p50", float64(split)/float64(time.Millisecond), "ms")
	report(name+".ratio", float64(split)/float64(builtin), "x")
}

// benchUnpack pulls an image of many layers, which is mostly unpacking.
func benchUnpack(name string) func(context.Context, *pair, float64) error {
	return func(ctx context.Context, p *pair, scale float64) error {
		many, err := layersOfFiles(manyLayers, filesPerLayer, func(r *rand.ChaCha8) []byte { return halfRandom(r, manyFileBytes) })
		if err != nil {
			return err
		}
		for _, s := range []*side{p.builtin, p.split} {
			if _, err := s.node.Registry.Push(ctx, manyRef, many); err != nil {
				return err
			}
		}
		if err := p.rounds(ctx, max(int(15*scale), 3), func(ctx context.Context, s *side) (time.Duration, error) {
			took, err := s.pull(ctx, manyRef)
			return took, errors.Join(err, s.remove(ctx, manyRef))
		}); err != nil {
			return err
		}
		p.report(name)
		return nil
	}
}

func (s *side) pull(ctx context.Context, ref string) (time.Duration, error) {
	began := time.Now()
	_, err := s.client.Pull(ctx, ref)
	return time.Since(began), err
}

// remove removes an image and waits until its layers are gone.
func (s *side) remove(ctx context.Context, ref string) error {
	if _, err := s.client.Images.RemoveImage(ctx, &runtimeapi.RemoveImageRequest{Image: &runtimeapi.ImageSpec{Image: ref}}); err != nil {
		return err
	}
	return snapshot.NewStore(s.client.Conn(), namespace).Poke(ctx, s.snapshotter)
}

const namespace = "k8s.io"

// benchCreate makes, starts and removes containers.
func benchCreate(ctx context.Context, p *pair, scale float64) error {
	const atOnce = 5
	pods := map[*side]*pod.Pod{}
	for _, s := range []*side{p.builtin, p.split} {
		if _, err := s.client.Pull(ctx, node.BusyboxImage); err != nil {
			return err
		}
		var err error
		if pods[s], err = s.client.Run(ctx, s.node.PodSpec("bench")); err != nil {
			return err
		}
	}
	count := 0
	if err := p.rounds(ctx, max(int(containers/atOnce*scale), 2), func(ctx context.Context, s *side) (time.Duration, error) {
		began := time.Now()
		for range atOnce {
			count++
			id, err := pods[s].Start(ctx, pod.ContainerSpec{Name: fmt.Sprint("c", count), Image: node.BusyboxImage, Command: []string{"/bin/sleep", "1000"}})
			if err != nil {
				return 0, err
			}
			if err := s.client.RemoveContainer(ctx, id); err != nil {
				return 0, err
			}
		}
		return time.Since(began) / atOnce, nil
	}); err != nil {
		return err
	}
	p.report("snap.create")
	return nil
}

// benchUsage asks containerd for the usage of a container with many files, in
// which some come and go.
func benchUsage(ctx context.Context, p *pair, scale float64) error {
	script := fmt.Sprintf("mkdir /f; cd /f; i=0; while [ $i -lt %d ]; do echo x >$i; i=$((i+1)); done; touch /done; while :; do touch a b c; rm -f a b c; usleep 1000; done", usageFiles)
	keys := map[*side]string{}
	for _, s := range []*side{p.builtin, p.split} {
		if _, err := s.client.Pull(ctx, node.BusyboxImage); err != nil {
			return err
		}
		own, err := s.client.Run(ctx, s.node.PodSpec("bench"))
		if err != nil {
			return err
		}
		if keys[s], err = own.Start(ctx, pod.ContainerSpec{Name: "churn", Image: node.BusyboxImage, Command: []string{"/bin/sh", "-c", script}}); err != nil {
			return err
		}
		if err := s.waitDone(ctx, keys[s]); err != nil {
			return err
		}
	}
	lost := map[*side]int{}
	asked := max(int(100*scale), 10)
	if err := p.rounds(ctx, asked, func(ctx context.Context, s *side) (time.Duration, error) {
		began := time.Now()
		_, err := snapshotsapi.NewSnapshotsClient(s.client.Conn()).Usage(inNamespace(ctx), &snapshotsapi.UsageRequest{Snapshotter: s.snapshotter, Key: keys[s]})
		if err != nil {
			lost[s]++ // a file went while it was counted (CTD-13)
		}
		return time.Since(began), nil
	}); err != nil {
		return err
	}
	p.report("snap.usage")
	report("snap.usage.overlayfs_failed", float64(lost[p.builtin])/float64(asked+1), "share")
	report("snap.usage.split_failed", float64(lost[p.split])/float64(asked+1), "share")
	return nil
}

func inNamespace(ctx context.Context) context.Context {
	return metadata.AppendToOutgoingContext(ctx, "containerd-namespace", namespace)
}

// waitDone waits for the file /done of a container.
func (s *side) waitDone(ctx context.Context, id string) error {
	upper, err := s.node.Runtime.UpperOf(id)
	if err != nil {
		return err
	}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		if _, err := os.Stat(filepath.Join(upper, "done")); err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// benchUnmount unmounts a container's root filesystem just when a large image
// has been unpacked: the kernel then syncs all of the filesystem that the
// writable layer is on (CTD-40).
func benchUnmount(ctx context.Context, p *pair, scale float64) error {
	zeros := make([]byte, largeFileBytes)
	large, err := layersOfFiles(1, 1, func(*rand.ChaCha8) []byte { return zeros })
	if err != nil {
		return err
	}
	for _, s := range []*side{p.builtin, p.split} {
		if _, err := s.node.Registry.Push(ctx, largeRef, large); err != nil {
			return err
		}
		if _, err := s.client.Pull(ctx, node.BusyboxImage); err != nil {
			return err
		}
	}
	round := 0
	if err := p.rounds(ctx, max(int(7*scale), 3), func(ctx context.Context, s *side) (time.Duration, error) {
		round++
		return s.unmountDuringPull(ctx, fmt.Sprint("bench-", round))
	}); err != nil {
		return err
	}
	p.report("snap.unmount_during_pull")
	return nil
}

func (s *side) unmountDuringPull(ctx context.Context, key string) (took time.Duration, err error) {
	config, err := s.base.ConfigFile()
	if err != nil {
		return 0, err
	}
	snapshots := snapshotsapi.NewSnapshotsClient(s.client.Conn())
	prepared, err := snapshots.Prepare(inNamespace(ctx), &snapshotsapi.PrepareSnapshotRequest{
		Snapshotter: s.snapshotter, Key: key, Parent: config.RootFS.DiffIDs[0].String(),
		Labels: map[string]string{"containerd.io/gc.root": time.Now().UTC().Format(time.RFC3339)},
	})
	if err != nil {
		return 0, err
	}
	target := filepath.Join(s.node.Run.Dir(), key)
	if err := os.Mkdir(target, 0o700); err != nil {
		return 0, err
	}
	m := prepared.GetMounts()[0]
	if out, err := exec.CommandContext(ctx, "mount", "-t", m.GetType(), "-o", strings.Join(m.GetOptions(), ","), m.GetSource(), target).CombinedOutput(); err != nil {
		return 0, fmt.Errorf("mount %s: %w: %s", key, err, out)
	}
	if err := os.WriteFile(filepath.Join(target, "written"), []byte("x"), 0o600); err != nil {
		return 0, errors.Join(err, syscall.Unmount(target, 0))
	}
	_, pullErr := s.client.Pull(ctx, largeRef)
	began := time.Now()
	unmountErr := syscall.Unmount(target, 0)
	took = time.Since(began)
	if err := errors.Join(pullErr, unmountErr); err != nil {
		return 0, err
	}
	if _, err := snapshots.Remove(inNamespace(ctx), &snapshotsapi.RemoveSnapshotRequest{Snapshotter: s.snapshotter, Key: key}); err != nil {
		return 0, err
	}
	return took, s.remove(ctx, largeRef)
}

// layersOfFiles builds an image of layers with files.
func layersOfFiles(layers, files int, content func(*rand.ChaCha8) []byte) (v1.Image, error) {
	random := rand.NewChaCha8([32]byte{})
	built := v1.Image(empty.Image)
	for l := range layers {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		for f := range files {
			body := content(random)
			if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: fmt.Sprintf("d%d/f%d", l, f), Mode: 0o644, Size: int64(len(body))}); err != nil {
				return nil, err
			}
			if _, err := w.Write(body); err != nil {
				return nil, err
			}
		}
		if err := w.Close(); err != nil {
			return nil, err
		}
		layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b.Bytes())), nil })
		if err != nil {
			return nil, err
		}
		if built, err = mutate.AppendLayers(built, layer); err != nil {
			return nil, err
		}
	}
	return built, nil
}

// halfRandom returns bytes that compress to about half, as programs do.
func halfRandom(r *rand.ChaCha8, size int) []byte {
	content := make([]byte, size)
	_, _ = r.Read(content[:size/2]) //nolint:errcheck // never fails, says its documentation
	return content
}
