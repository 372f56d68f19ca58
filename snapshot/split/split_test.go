package split

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"

	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/snapshot/split/fence"
	"github.com/cleave-cri/cleave/snapshot/split/trash"
)

// TestPlacement runs the life of an image and its containers on two disks, and
// asks the kernel on which of them the bytes are.
func TestPlacement(t *testing.T) {
	t.Parallel()
	for _, kind := range []disk.FS{disk.Ext4, disk.XFS} {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			o, p := onDisks(t, kind, 64<<20, 64<<20)
			o.SyncOnCommit = true
			s := initialised(t, o)
			imageDevice, containerDevice := deviceOf(t, o.ImageRoot), deviceOf(t, o.ContainerRoot)
			if imageDevice == containerDevice {
				t.Fatal("both disks are one device")
			}
			on := func(path string, want uint64) {
				t.Helper()
				if got := deviceOf(t, path); got != want {
					t.Errorf("%s is on device %d, want %d", path, got, want)
				}
			}
			base, baseUpper := addLayer(t, s, 1, "")
			top, topUpper := addLayer(t, s, 2, base)
			on(baseUpper, imageDevice)
			on(topUpper, imageDevice)

			key, upper := addContainer(t, s, 3, top)
			on(upper, containerDevice)
			mounts, err := s.Mounts(t.Context(), key)
			if err != nil {
				t.Fatal(err)
			}
			mounted(t, p.dir, mounts, func(root string) {
				for _, name := range []string{"layer-1", "layer-2"} {
					if _, err := os.Stat(filepath.Join(root, name)); err != nil {
						t.Error(err)
					}
				}
				if err := os.WriteFile(filepath.Join(root, "written"), make([]byte, 4<<20), 0o600); err != nil {
					t.Error(err)
				}
				if err := os.Remove(filepath.Join(root, "layer-1")); err != nil {
					t.Error(err)
				}
			})
			on(filepath.Join(upper, "written"), containerDevice)
			usage, err := s.Usage(t.Context(), key)
			if err != nil || usage.Size < 4<<20 {
				t.Errorf("usage of the container: %+v, %v", usage, err)
			}

			volume := "k8s.io/4//run/containerd/io.containerd.grpc.v1.cri/image-volumes/sandbox/" + layerDigest(2)
			mounts, err = s.Prepare(t.Context(), volume, top)
			if err != nil {
				t.Fatal(err)
			}
			on(upperOf(t, mounts), containerDevice)
			if mounts, err = s.View(t.Context(), "k8s.io/5/view", top); err != nil {
				t.Fatal(err)
			}
			mounted(t, p.dir, mounts, func(root string) {
				if err := os.WriteFile(filepath.Join(root, "x"), nil, 0o600); err == nil {
					t.Error("a view can be written to")
				}
			})

			// Commit of a container, as build tools do it: it keeps its place.
			if err := s.Commit(t.Context(), "k8s.io/6/built", key); err != nil {
				t.Fatal(err)
			}
			if mounts, err = s.Prepare(t.Context(), containerKey(7), "k8s.io/6/built"); err != nil {
				t.Fatal(err)
			}
			mounted(t, p.dir, mounts, func(root string) {
				if _, err := os.Stat(filepath.Join(root, "layer-1")); !os.IsNotExist(err) {
					t.Errorf("a removed file is back: %v", err)
				}
				if _, err := os.Stat(filepath.Join(root, "written")); err != nil {
					t.Error(err)
				}
			})
			settle(t, s)
			st, err := s.Status(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if st.Image.Layers.Count != 2 || st.Container.Layers.Count != 1 || st.Container.Writable.Count != 2 || st.Container.Views.Count != 1 || st.Image.Layers.Unmeasured != 0 {
				t.Errorf("status: %+v", st)
			}
			if len(st.Notes) > 0 {
				t.Errorf("notes: %v", st.Notes)
			}

			// And everything goes again.
			for _, k := range []string{containerKey(7), volume, "k8s.io/5/view", "k8s.io/6/built", top, base} {
				if err := s.Remove(t.Context(), k); err != nil {
					t.Fatal(err)
				}
			}
			settle(t, s)
			r := mustBeClean(t, s, o)
			if r.Folders != 0 || r.Trash != 0 || r.Snapshots != 0 {
				t.Errorf("left: %+v", r)
			}
		})
	}
}

func TestOneDeviceIsSaid(t *testing.T) {
	t.Parallel()
	s := initialised(t, folders(t))
	st, err := s.Status(t.Context())
	if err != nil || len(st.Notes) == 0 || !strings.Contains(st.Notes[0], "one filesystem") {
		t.Errorf("status %+v, %v, want a note", st.Notes, err)
	}
}

// TestHostileKeysAndLabels: whatever a pod or an image puts into keys and
// labels, folders are named by number, and land where they belong.
func TestHostileKeysAndLabels(t *testing.T) {
	t.Parallel()
	o := folders(t)
	s := initialised(t, o)
	hostile := map[string]string{
		"containerd.io/snapshot/x": strings.Repeat("y", 4<<10), "cleave.io/root": "image", "root": "image",
		"containerd.io/snapshot/cleave.root": "image", snapshots.LabelSnapshotRef: layerDigest(1), labelParentChain: layerDigest(0),
		snapshots.LabelSnapshotUIDMapping: "0:0:1,lowerdir=/etc",
	}
	for i, key := range []string{
		"k8s.io/1/extract-x", "k8s.io/2/../../../../etc/passwd", "k8s.io/3/..", "k8s.io/4//", "../1/x", "..", "/", "k8s.io/5/new-x",
		"k8s.io/6/" + strings.Repeat("k", 4<<10), "k8s.io/7/a,upperdir=/etc:b\\", "k8s.io/8/\x00\n", "k8s.io/9/7",
	} {
		mounts, err := s.Prepare(t.Context(), key, "", snapshots.WithLabels(hostile))
		if err != nil {
			t.Errorf("key %d: %v", i, err)
			continue
		}
		if want := filepath.Join(o.ContainerRoot, "snapshots", fmt.Sprint(i+1), "diff"); len(mounts) != 1 || mounts[0].Type != "bind" || mounts[0].Source != want || len(mounts[0].Options) != 2 {
			t.Errorf("key %d: %+v, want a plain mount of %s", i, mounts, want)
		}
		info, err := s.Stat(t.Context(), key)
		if err != nil || info.Labels["cleave.io/root"] != "image" {
			t.Errorf("key %d: labels are the caller's own, got %v, %v", i, info.Labels, err)
		}
		if _, err := s.Update(t.Context(), snapshots.Info{Name: key, Labels: map[string]string{"cleave.io/root": "image"}}, "labels"); err != nil {
			t.Errorf("key %d: %v", i, err)
		}
		if after, err := s.Mounts(t.Context(), key); err != nil || after[0].Source != mounts[0].Source {
			t.Errorf("key %d: after an update at %v, %v", i, after, err)
		}
	}
	if _, err := s.Prepare(t.Context(), strings.Repeat("k", maxKeyBytes+1), ""); !errdefs.IsInvalidArgument(err) {
		t.Errorf("a key that is too long: %v", err)
	}
	mustBeClean(t, s, o)
}

func TestNamespaceNotServed(t *testing.T) {
	t.Parallel()
	o := folders(t)
	o.Namespaces = []string{"k8s.io"}
	s := initialised(t, o)
	if _, err := s.Prepare(t.Context(), "moby/1/x", ""); !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), "serves only k8s.io") {
		t.Errorf("got %v", err)
	}
	if _, err := s.View(t.Context(), "moby/1/x", ""); !errdefs.IsInvalidArgument(err) {
		t.Errorf("got %v", err)
	}
	if _, err := s.Prepare(t.Context(), "k8s.io/1/x", ""); err != nil {
		t.Error(err)
	}
}

// TestRemap: the upper folder belongs to the mapped root, and the mount has the
// mapping; hostile mappings leave nothing behind.
func TestRemap(t *testing.T) {
	t.Parallel()
	o := folders(t)
	o.RemapIDs = true
	s := initialised(t, o)
	base, _ := addLayer(t, s, 1, "")
	mapped := snapshots.WithLabels(map[string]string{
		snapshots.LabelSnapshotUIDMapping: "0:70000:65536", snapshots.LabelSnapshotGIDMapping: "0:80000:65536",
	})
	mounts, err := s.Prepare(t.Context(), containerKey(2), base, mapped)
	if err != nil {
		t.Fatal(err)
	}
	if option(mounts, "uidmap") != "0:70000:65536" || option(mounts, "gidmap") != "0:80000:65536" {
		t.Errorf("mounts: %v", mounts)
	}
	again, err := s.Mounts(t.Context(), containerKey(2))
	if err != nil || option(again, "uidmap") != "0:70000:65536" {
		t.Errorf("mounts later: %v, %v", again, err)
	}
	var st syscall.Stat_t
	if err := syscall.Stat(upperOf(t, mounts), &st); err != nil || st.Uid != 70000 || st.Gid != 80000 {
		t.Errorf("the upper folder belongs to %d:%d, %v", st.Uid, st.Gid, err)
	}
	mounted(t, t.TempDir(), mounts, func(root string) {
		if err := syscall.Stat(filepath.Join(root, "layer-1"), &st); err != nil || st.Uid != 70000 || st.Gid != 80000 {
			t.Errorf("a file of the layer belongs to %d:%d in the mount, %v", st.Uid, st.Gid, err)
		}
	})
	_, err = s.Prepare(t.Context(), containerKey(3), base, snapshots.WithLabels(map[string]string{
		snapshots.LabelSnapshotUIDMapping: "0:1:1,upperdir=/etc", snapshots.LabelSnapshotGIDMapping: "0:1:1",
	}))
	if !errdefs.IsInvalidArgument(err) {
		t.Errorf("a hostile mapping: %v", err)
	}

	// Layers on both roots can't be mapped as one.
	mounts, err = s.Prepare(t.Context(), containerKey(4), base)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.WriteFile(filepath.Join(upperOf(t, mounts), "f"), nil, 0o600), s.Commit(t.Context(), "built", containerKey(4))); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Prepare(t.Context(), containerKey(5), "built", mapped); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("layers on both roots: %v", err)
	}
	mustBeClean(t, s, o)
}

// TestRootFolderKeepsTheOwnerOfTheImage: the upper folder hides the root folder
// of the layers below.
func TestRootFolderKeepsTheOwnerOfTheImage(t *testing.T) {
	t.Parallel()
	s := initialised(t, folders(t))
	base, upper := addLayer(t, s, 1, "")
	if err := os.Chown(upper, 5, 6); err != nil {
		t.Fatal(err)
	}
	_, upper = addContainer(t, s, 2, base)
	var st syscall.Stat_t
	if err := syscall.Stat(upper, &st); err != nil || st.Uid != 5 || st.Gid != 6 || st.Mode&0o7777 != 0o755 {
		t.Errorf("owner %d:%d, mode %o, %v, want 5:6 and 755", st.Uid, st.Gid, st.Mode&0o7777, err)
	}
}

// TestUsageEqualsDu: sparse files, hard links and odd files count as du counts
// them, for what is written to and for layers.
func TestUsageEqualsDu(t *testing.T) {
	t.Parallel()
	for _, kind := range []disk.FS{disk.Ext4, disk.XFS} {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			o, _ := onDisks(t, kind, 64<<20, 64<<20)
			s := initialised(t, o)
			fill := func(upper string) {
				t.Helper()
				for i := range 300 {
					if err := os.WriteFile(filepath.Join(upper, fmt.Sprint(i)), make([]byte, i*100), 0o600); err != nil {
						t.Fatal(err)
					}
				}
				sparse, err := os.Create(filepath.Join(upper, "sparse"))
				if err != nil {
					t.Fatal(err)
				}
				_, err = sparse.WriteAt([]byte("end"), 1<<30)
				if err := errors.Join(
					err, sparse.Truncate(2<<30), sparse.Close(),
					os.Link(filepath.Join(upper, "299"), filepath.Join(upper, "link")),
					os.Symlink("/etc/passwd", filepath.Join(upper, "symlink")),
					syscall.Mknod(filepath.Join(upper, "whiteout"), syscall.S_IFCHR, 0),
					os.MkdirAll(filepath.Join(upper, "a", "b", "c"), 0o700),
				); err != nil {
					t.Fatal(err)
				}
				syscall.Sync()
			}
			same := func(key, folder string) {
				t.Helper()
				usage, err := s.Usage(t.Context(), key)
				bytes, inodes := du(t, folder)
				if err != nil || usage.Size != bytes || usage.Inodes != inodes {
					t.Errorf("usage of %q is %+v (%v), du says %d bytes, %d inodes", key, usage, err, bytes, inodes)
				}
			}
			key, opt := extraction(1, "")
			mounts, err := s.Prepare(t.Context(), key, "", opt)
			if err != nil {
				t.Fatal(err)
			}
			upper := upperOf(t, mounts)
			fill(upper)
			same(key, filepath.Dir(upper))
			if err := s.Commit(t.Context(), layerName(1), key); err != nil {
				t.Fatal(err)
			}
			same(layerName(1), filepath.Dir(upper))
			settle(t, s)
			same(layerName(1), filepath.Dir(upper))

			container, cUpper := addContainer(t, s, 2, layerName(1))
			same(container, filepath.Dir(cUpper))
			fill(cUpper)
			same(container, filepath.Dir(cUpper))

			// A layer's figure is stored: it is the same after a restart, and needs no walk.
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			s = opened(t, o)
			s.meter.measure = func(context.Context, subject) (figure, error) {
				return figure{}, errors.New("a layer was measured again")
			}
			same(layerName(1), filepath.Dir(upper))
		})
	}
}

// TestUsageUnderChurn: a container that makes and deletes files all the time is
// still measured (CTD-13).
func TestUsageUnderChurn(t *testing.T) {
	t.Parallel()
	o := folders(t)
	s := initialised(t, o)
	key, upper := addContainer(t, s, 1, "")
	if err := os.WriteFile(filepath.Join(upper, "big"), make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var churn sync.WaitGroup
	churn.Go(func() {
		for {
			for i := range 50 {
				dir := filepath.Join(upper, fmt.Sprint("d", i))
				if err := errors.Join(os.MkdirAll(dir, 0o700), os.WriteFile(filepath.Join(dir, "f"), []byte("x"), 0o600), os.RemoveAll(dir)); err != nil {
					t.Error(err)
					return
				}
			}
			select {
			case <-stop:
				return
			default:
			}
		}
	})
	for range 100 {
		if usage, err := s.Usage(t.Context(), key); err != nil || usage.Size < 1<<20 {
			t.Errorf("usage %+v, %v", usage, err)
		}
	}
	close(stop)
	churn.Wait()
}

// TestUsageFromMemory: within the allowed age nothing is measured; a removed
// snapshot's figure is nobody's; one measurement serves all who ask.
func TestUsageFromMemory(t *testing.T) {
	t.Parallel()
	started, goOn := make(chan struct{}, 8), make(chan struct{})
	m := newMeter(func(ctx context.Context, _ subject) (figure, error) {
		started <- struct{}{}
		select {
		case <-goOn:
			return figure{Bytes: 7, At: time.Now()}, nil
		case <-ctx.Done():
			return figure{}, ctx.Err()
		}
	})
	ctx, stop := context.WithCancel(t.Context())
	var workers sync.WaitGroup
	defer workers.Wait()
	defer stop()
	workers.Go(func() { m.run(ctx, fence.Image) })

	what := subject{id: "1", root: fence.Image}
	var askers sync.WaitGroup
	for range 20 {
		askers.Go(func() {
			if f, err := m.get(t.Context(), what, time.Hour); err != nil || f.Bytes != 7 {
				t.Errorf("got %+v, %v", f, err)
			}
		})
	}
	<-started
	short, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := m.get(short, what, 0); !errors.Is(err, context.Canceled) {
		t.Errorf("an asker whose time is over got %v", err)
	}
	if _, err := m.get(short, subject{id: "2"}, 0); !errors.Is(err, context.Canceled) {
		t.Errorf("a first asker whose time is over got %v", err)
	}
	goOn <- struct{}{}
	askers.Wait()
	if len(started) > 0 {
		t.Error("it was measured more than once")
	}
	if f, err := m.get(t.Context(), what, forever); err != nil || f.Bytes != 7 {
		t.Errorf("got %+v, %v", f, err)
	}
	m.forget("1")
	if f, ok := m.last(what); ok {
		t.Errorf("a forgotten figure is there: %+v", f)
	}
	// What is measured while it is forgotten is not kept.
	done := make(chan struct{})
	go func() {
		defer close(done)
		if _, err := m.get(t.Context(), what, math.MaxInt64); err != nil {
			t.Error(err)
		}
	}()
	<-started
	m.forget("1")
	goOn <- struct{}{}
	<-done
	if f, ok := m.last(what); ok {
		t.Errorf("the figure of a removed snapshot was kept: %+v", f)
	}
}

// TestConcurrentUse: creations, commits, removals, clean-ups and questions at
// once leave a store that is right.
func TestConcurrentUse(t *testing.T) {
	t.Parallel()
	o := folders(t)
	s := initialised(t, o)
	base, _ := addLayer(t, s, 1, "")
	var all sync.WaitGroup
	for worker := range 6 {
		all.Go(func() {
			for i := range 12 {
				n := 1000*(worker+1) + i
				key := containerKey(n)
				mounts, err := s.Prepare(t.Context(), key, base)
				if err != nil {
					t.Error(err)
					return
				}
				if err := os.WriteFile(filepath.Join(upperOf(t, mounts), "f"), []byte("x"), 0o600); err != nil {
					t.Errorf("the folder of a living snapshot: %v", err)
				}
				if _, err := s.Usage(t.Context(), key); err != nil {
					t.Error(err)
				}
				if i%3 == 0 {
					name := fmt.Sprint("built-", n)
					if err := s.Commit(t.Context(), name, key); err != nil {
						t.Error(err)
					}
					key = name
				}
				if i%2 == 0 {
					if err := s.Cleanup(t.Context()); err != nil {
						t.Error(err)
					}
				}
				if i%4 != 3 {
					if err := s.Remove(t.Context(), key); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	all.Go(func() {
		for range 50 {
			if _, err := s.Status(t.Context()); err != nil {
				t.Error(err)
			}
			if err := s.Walk(t.Context(), func(context.Context, snapshots.Info) error { return nil }); err != nil {
				t.Error(err)
			}
		}
	})
	all.Wait()
	settle(t, s)
	if r := mustBeClean(t, s, o); r.Snapshots != 6*3+1 || r.Folders != r.Snapshots || r.Trash != 0 {
		t.Errorf("left: %+v", r)
	}
}

func TestWalkBeforeTheFirstSnapshot(t *testing.T) {
	t.Parallel()
	s := initialised(t, folders(t))
	if err := errors.Join(s.Walk(t.Context(), func(context.Context, snapshots.Info) error { return errors.New("something is there") }), s.Cleanup(t.Context())); err != nil {
		t.Error(err)
	}
	if err := s.Remove(t.Context(), "nothing"); !errdefs.IsNotFound(err) {
		t.Errorf("removing nothing: %v", err)
	}
	if _, err := s.Usage(t.Context(), "nothing"); !errdefs.IsNotFound(err) {
		t.Errorf("usage of nothing: %v", err)
	}
}

// TestContainerd: nothing is removed until the right containerd is known.
func TestContainerd(t *testing.T) {
	t.Parallel()
	o := folders(t)
	o.AnyContainerd = false
	s := initialised(t, o)
	key, upper := addContainer(t, s, 1, "")
	refused := func() {
		t.Helper()
		if err := s.Remove(t.Context(), key); !errdefs.IsUnavailable(err) {
			t.Errorf("remove: %v", err)
		}
		if err := s.Cleanup(t.Context()); !errdefs.IsUnavailable(err) {
			t.Errorf("clean up: %v", err)
		}
		if _, err := s.Stat(t.Context(), key); err != nil || !exists(upper) {
			t.Errorf("it is gone: %v", err)
		}
	}
	refused()
	if err := s.ConfirmContainerd(t.Context(), "one"); err != nil {
		t.Fatal(err)
	}
	if err := s.Cleanup(t.Context()); err != nil {
		t.Error(err)
	}
	s.LoseContainerd()
	refused()
	if err := s.ConfirmContainerd(t.Context(), "two"); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "belong to one") {
		t.Errorf("another containerd: %v", err)
	}
	refused()
	if err := s.ConfirmContainerd(t.Context(), ""); !errdefs.IsInvalidArgument(err) {
		t.Errorf("no containerd: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = opened(t, o)
	refused()
	if err := s.ConfirmContainerd(t.Context(), "two"); err == nil {
		t.Error("the pin did not survive a restart")
	}
	if err := errors.Join(s.Close(), Unpin(t.Context(), o)); err != nil {
		t.Fatal(err)
	}
	s = opened(t, o)
	if err := errors.Join(s.ConfirmContainerd(t.Context(), "two"), s.Remove(t.Context(), key)); err != nil {
		t.Error(err)
	}
}

// TestRemoveWhatIsInUse: a parent stays as long as it has children.
func TestRemoveWhatIsInUse(t *testing.T) {
	t.Parallel()
	o := folders(t)
	s := initialised(t, o)
	base, upper := addLayer(t, s, 1, "")
	key, _ := addContainer(t, s, 2, base)
	if err := s.Remove(t.Context(), base); !errdefs.IsFailedPrecondition(err) || !exists(filepath.Join(upper, "layer-1")) {
		t.Errorf("got %v", err)
	}
	if err := errors.Join(s.Remove(t.Context(), key), s.Remove(t.Context(), base)); err != nil {
		t.Fatal(err)
	}
	settle(t, s)
	if exists(filepath.Dir(upper)) {
		t.Error("the layer's folder is still there")
	}
}

// Whoever removed an image looks at the disk next: the kubelet does at once, and evicts a pod if the space is not there (GAP-16).
func TestGAP16_CleanupWaitsForTheSpace(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		rate int
		wait time.Duration
		gone bool
	}{
		{"as fast as it goes", -1, time.Minute, true},
		{"longer than it waits", 1, time.Millisecond, false},
		{"no waiting", 1, -1, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			o := folders(t)
			o.DeletionRate, o.CleanupWait = tc.rate, tc.wait
			s := initialised(t, o)
			base, upper := addLayer(t, s, 1, "")
			for n := range 50 {
				if err := os.WriteFile(filepath.Join(upper, fmt.Sprint("more-", n)), []byte("x"), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if err := errors.Join(s.Remove(t.Context(), base), s.Cleanup(t.Context())); err != nil {
				t.Fatal(err)
			}
			entries, err := os.ReadDir(filepath.Join(o.ImageRoot, trash.Dir))
			if err != nil {
				t.Fatal(err)
			}
			entries = slices.DeleteFunc(entries, func(e os.DirEntry) bool { return trash.IsSlot(e.Name()) })
			if gone := len(entries) == 0; gone != tc.gone {
				t.Errorf("when Cleanup has answered the trash holds %d layers", len(entries))
			}
		})
	}
}

func TestOpenMakesNothing(t *testing.T) {
	t.Parallel()
	o := folders(t)
	if _, err := Open(t.Context(), o); !errors.Is(err, ErrNotInitialised) {
		t.Errorf("open before init: %v", err)
	}
	if exists(o.Database) || exists(filepath.Join(o.ImageRoot, "snapshots")) {
		t.Error("opening made something")
	}
}

// Somebody's folder with the name that the probe uses is somebody's: neither init nor a start deletes it.
func TestI4_AFolderCalledProbeIsNotOurs(t *testing.T) {
	t.Parallel()
	o := folders(t)
	theirs := filepath.Join(o.ImageRoot, "probe", "data")
	write := func() {
		t.Helper()
		if err := errors.Join(os.MkdirAll(filepath.Dir(theirs), 0o755), os.WriteFile(theirs, []byte("precious"), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	write()
	if err := Init(t.Context(), o); err == nil || !strings.Contains(err.Error(), "probe") {
		t.Errorf("init says %v", err)
	}
	if !exists(theirs) {
		t.Fatal("init deleted it")
	}
	if err := os.RemoveAll(filepath.Dir(theirs)); err != nil {
		t.Fatal(err)
	}
	s := initialised(t, o)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	write()
	s = opened(t, o)
	if _, err := s.Prepare(t.Context(), "k8s.io/1/x", ""); err == nil {
		t.Error("something is made on a root that somebody else uses")
	}
	if !exists(theirs) {
		t.Error("a start deleted it")
	}
}
