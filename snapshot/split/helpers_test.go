package split

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/opencontainers/go-digest"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest"
	"golang.org/x/sys/unix"

	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/need"
)

// folders gives options for a snapshotter in plain folders.
func folders(t *testing.T) Options {
	t.Helper()
	need.Root(t)
	return optionsIn(t, t.TempDir())
}

func optionsIn(t *testing.T, dir string) Options {
	t.Helper()
	o := Options{
		ImageRoot:     filepath.Join(dir, "images"),
		ContainerRoot: filepath.Join(dir, "containers"),
		Database:      filepath.Join(dir, "state", "split.db"),
		DatabaseBytes: 1 << 20, BallastBytes: 64 << 10,
		AnyContainerd: true, UsageMaxAge: -1, DeletionRate: -1,
		Log: zaptest.NewLogger(t, zaptest.Level(zap.DPanicLevel)),
	}
	if err := errors.Join(os.MkdirAll(o.ImageRoot, 0o700), os.MkdirAll(o.ContainerRoot, 0o700)); err != nil {
		t.Fatal(err)
	}
	return o
}

// pair is two disks and a folder for the database.
type pair struct {
	dir              string
	image, container *disk.Disk
}

// onDisks gives options for a snapshotter on two filesystems.
func onDisks(t *testing.T, kind disk.FS, imageBytes, containerBytes int64) (Options, pair) {
	t.Helper()
	need.Loop(t)
	need.Tools(t, "mkfs."+string(kind))
	run := need.Lab(t)
	make := func(name string, size int64) *disk.Disk {
		if kind == disk.XFS {
			size = max(size, 300<<20)
		}
		d, err := disk.Make(t.Context(), run.Dir(), disk.Spec{Name: name, SizeBytes: size, FS: kind})
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	p := pair{dir: run.Dir(), image: make("images", imageBytes), container: make("containers", containerBytes)}
	o := optionsIn(t, filepath.Join(run.Dir(), "plain"))
	o.ImageRoot, o.ContainerRoot = p.image.Path(), p.container.Path()
	o.RequireMountpoints = true
	return o, p
}

// initialised makes a snapshotter and opens it.
func initialised(t *testing.T, o Options) *Snapshotter {
	t.Helper()
	if err := Init(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	return opened(t, o)
}

func opened(t *testing.T, o Options) *Snapshotter {
	t.Helper()
	s, err := Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("close the snapshotter: %v", err)
		}
	})
	return s
}

// extraction gives the key that containerd unpacks a layer by, and the labels.
func extraction(n int, parent string) (key string, opt snapshots.Opt) {
	chain := layerDigest(n)
	labels := map[string]string{
		snapshots.LabelSnapshotRef:    chain,
		snapshots.LabelSnapshotDiffID: digest.FromString("diff").String(),
	}
	if parent != "" {
		labels[labelParentChain] = parent
	}
	return fmt.Sprintf("k8s.io/%d/extract-%d-Ab_9 %s", n, n, chain), snapshots.WithLabels(labels)
}

func layerDigest(n int) string { return digest.FromString(strconv.Itoa(n)).String() }

// layerName is what a committed layer is called.
func layerName(n int) string { return fmt.Sprintf("k8s.io/%d/%s", n, layerDigest(n)) }

// containerKey is what CRI calls a container's snapshot.
func containerKey(n int) string {
	return fmt.Sprintf("k8s.io/%d/%s", n, digest.FromString("container "+strconv.Itoa(n)).Encoded())
}

// addLayer unpacks and commits a layer with one file.
func addLayer(t *testing.T, s *Snapshotter, n int, parent string) (name, upper string) {
	t.Helper()
	key, opt := extraction(n, "")
	mounts, err := s.Prepare(t.Context(), key, parent, opt)
	if err != nil {
		t.Fatal(err)
	}
	upper = upperOf(t, mounts)
	if err := os.WriteFile(filepath.Join(upper, fmt.Sprintf("layer-%d", n)), []byte(strings.Repeat("x", 10_000)), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := s.Commit(t.Context(), layerName(n), key); err != nil {
		t.Fatal(err)
	}
	return layerName(n), upper
}

func addContainer(t *testing.T, s *Snapshotter, n int, parent string) (key, upper string) {
	t.Helper()
	key = containerKey(n)
	mounts, err := s.Prepare(t.Context(), key, parent)
	if err != nil {
		t.Fatal(err)
	}
	return key, upperOf(t, mounts)
}

// upperOf finds the folder that is written to.
func upperOf(t *testing.T, mounts []mount.Mount) string {
	t.Helper()
	if len(mounts) == 1 && mounts[0].Type == "bind" {
		return mounts[0].Source
	}
	if upper := option(mounts, "upperdir"); upper != "" {
		return upper
	}
	t.Fatalf("no upper folder in %v", mounts)
	return ""
}

func option(mounts []mount.Mount, key string) string {
	for _, m := range mounts {
		for _, o := range m.Options {
			if value, ok := strings.CutPrefix(o, key+"="); ok {
				return value
			}
		}
	}
	return ""
}

// settle waits until trash and measuring are done.
func settle(t *testing.T, s *Snapshotter) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := s.WaitIdle(ctx); err != nil {
		st, _ := s.Status(t.Context()) //nolint:errcheck // for the message only
		t.Fatalf("%v; %+v", err, st)
	}
}

// mustBeClean closes the snapshotter and checks it.
func mustBeClean(t *testing.T, s *Snapshotter, o Options) Report {
	t.Helper()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	r, err := Check(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range r.Findings {
		t.Errorf("check: %v", f)
	}
	return r
}

// du is what coreutils says about a folder.
func du(t *testing.T, path string) (bytes, inodes int64) {
	t.Helper()
	get := func(args ...string) int64 {
		out, err := exec.CommandContext(t.Context(), "du", append(args, path)...).Output()
		if err != nil {
			t.Fatal(err)
		}
		n, err := strconv.ParseInt(strings.Fields(string(out))[0], 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	return get("-s", "--block-size=1"), get("-s", "--inodes")
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, fs.ErrNotExist)
}

func deviceOf(t *testing.T, path string) uint64 {
	t.Helper()
	var st syscall.Stat_t
	if err := syscall.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st.Dev
}

// mounted mounts what a snapshotter gave, and unmounts it at the end of f.
func mounted(t *testing.T, dir string, mounts []mount.Mount, f func(path string)) {
	t.Helper()
	target, err := os.MkdirTemp(dir, "m")
	if err != nil {
		t.Fatal(err)
	}
	if err := mount.All(mounts, target); err != nil {
		t.Fatalf("mount %v: %v", mounts, err)
	}
	defer func() {
		if err := errors.Join(mount.UnmountAll(target, unix.MNT_DETACH), os.Remove(target)); err != nil {
			t.Error(err)
		}
	}()
	f(target)
}

// eventually waits until something has become so.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.After(60 * time.Second)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("waited in vain until %s", what)
		}
	}
}
