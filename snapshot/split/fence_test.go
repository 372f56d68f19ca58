package split

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	bolt "go.etcd.io/bbolt"
	"golang.org/x/sys/unix"

	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/snapshot/split/fence"
)

// fenced makes sure that the fence is closed for a reason with want in it, that
// nothing is written or deleted, and that reads are answered.
func fenced(t *testing.T, s *Snapshotter, key, want string) {
	t.Helper()
	refused := map[string]error{
		"clean up": s.Cleanup(t.Context()),
		"remove":   s.Remove(t.Context(), key),
		"commit":   s.Commit(t.Context(), "committed", key),
	}
	_, refused["prepare"] = s.Prepare(t.Context(), containerKey(99), "")
	_, refused["view"] = s.View(t.Context(), containerKey(98), "")
	_, refused["update"] = s.Update(t.Context(), snapshots.Info{Name: key})
	for what, err := range refused {
		if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want it refused because of %q", what, err, want)
		}
	}
	if _, err := s.Stat(t.Context(), key); err != nil {
		t.Errorf("stat: %v", err)
	}
	if _, err := s.Mounts(t.Context(), key); err != nil {
		t.Errorf("mounts: %v", err)
	}
	if _, err := s.Usage(t.Context(), layerName(1)); err != nil {
		t.Errorf("usage of a layer: %v", err)
	}
	st, err := s.Status(t.Context())
	if err != nil || !st.Fence.Closed || len(st.Fence.Reasons) == 0 || st.Fence.Reasons[0].Remedy == "" {
		t.Errorf("status: %+v, %v", st.Fence, err)
	}
}

func sh(t *testing.T, name string, args ...string) {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %v: %v: %s", name, args, err, out)
	}
}

// TestFenceOnDisks takes roots away, swaps them and brings them back, both while
// the snapshotter runs and before it starts. Nothing may be deleted, and it must
// recover by itself.
func TestFenceOnDisks(t *testing.T) {
	t.Parallel()
	for _, kind := range []disk.FS{disk.Ext4, disk.XFS} {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			o, p := onDisks(t, kind, 64<<20, 64<<20)
			o.UsageMaxAge = 0
			s := initialised(t, o)
			base, layer := addLayer(t, s, 1, "")
			key, upper := addContainer(t, s, 2, base)
			settle(t, s)
			intact := func() {
				t.Helper()
				if !exists(filepath.Join(layer, "layer-1")) || !exists(upper) {
					t.Fatal("something was deleted")
				}
				if err := s.Cleanup(t.Context()); err != nil {
					t.Errorf("did not recover: %v", err)
				}
				if _, err := s.Usage(t.Context(), key); err != nil {
					t.Errorf("did not recover: %v", err)
				}
				if _, err := s.Prepare(t.Context(), "k8s.io/7/probe", base); err != nil {
					t.Errorf("did not recover: %v", err)
				}
				if err := s.Remove(t.Context(), "k8s.io/7/probe"); err != nil {
					t.Errorf("did not recover: %v", err)
				}
			}
			restart := func() {
				t.Helper()
				if err := s.Close(); err != nil {
					t.Fatal(err)
				}
				s = opened(t, o)
			}
			image := func() { sh(t, "mount", p.image.Device(), p.image.Path()) }
			container := func() { sh(t, "mount", p.container.Device(), p.container.Path()) }
			// The devices are freed with their last mount; a second mount holds them.
			for _, d := range []*disk.Disk{p.image, p.container} {
				hold := filepath.Join(p.dir, "hold-"+filepath.Base(filepath.Dir(d.Path())))
				if err := os.Mkdir(hold, 0o700); err != nil {
					t.Fatal(err)
				}
				sh(t, "mount", d.Device(), hold)
			}
			away := func(d *disk.Disk) { sh(t, "umount", "-l", d.Path()) }

			// While it runs.
			away(p.image)
			fenced(t, s, key, "not a mount point")
			image()
			intact()
			away(p.container)
			fenced(t, s, key, "not a mount point")
			container()
			intact()
			away(p.image)
			away(p.container)
			sh(t, "mount", p.image.Device(), p.container.Path())
			sh(t, "mount", p.container.Device(), p.image.Path())
			fenced(t, s, key, "this is the container root")
			away(p.image)
			away(p.container)
			image()
			container()
			intact()

			// An empty disk in its place, mounted over it.
			sh(t, "mount", "-t", "tmpfs", "tmpfs", p.image.Path())
			fenced(t, s, key, "has no cleave-root.json")
			away(p.image)
			intact()

			// Before it starts.
			away(p.image)
			restart()
			fenced(t, s, key, "not a mount point")
			image()
			intact()
			away(p.container)
			restart()
			fenced(t, s, key, "not a mount point")
			container()
			intact()
			mustBeClean(t, s, o)

			// After a reboot with other device numbers.
			boot := filepath.Join(p.dir, "boot_id")
			if err := os.WriteFile(boot, []byte("another-boot\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			o.sources = fence.Kernel()
			o.sources.BootID = boot
			away(p.image)
			away(p.container)
			for _, hold := range []string{"hold-images", "hold-containers"} {
				sh(t, "umount", filepath.Join(p.dir, hold))
			}
			// The other order, and one more device in between.
			spare := filepath.Join(p.dir, "spare")
			sh(t, "truncate", "-s", "1M", spare)
			out, err := exec.CommandContext(t.Context(), "losetup", "--find", "--show", spare).Output()
			if err != nil {
				t.Fatal(err)
			}
			defer sh(t, "losetup", "-d", strings.TrimSpace(string(out)))
			sh(t, "mount", "-o", "loop", p.container.Image(), p.container.Path())
			sh(t, "mount", "-o", "loop", p.image.Image(), p.image.Path())
			s = opened(t, o)
			intact()
			mustBeClean(t, s, o)
		})
	}
}

// TestFenceOfFiles: what can go wrong with markers and databases.
func TestFenceOfFiles(t *testing.T) {
	t.Parallel()
	setUp := func(t *testing.T) (Options, *Snapshotter, string, string) {
		t.Helper()
		o := folders(t)
		s := initialised(t, o)
		base, layer := addLayer(t, s, 1, "")
		key, _ := addContainer(t, s, 2, base)
		settle(t, s)
		return o, s, key, layer
	}
	t.Run("marker altered", func(t *testing.T) {
		t.Parallel()
		o, s, key, layer := setUp(t)
		marker := filepath.Join(o.ImageRoot, fence.MarkerName)
		good, err := os.ReadFile(marker)
		if err != nil {
			t.Fatal(err)
		}
		for _, bad := range []string{
			strings.Replace(string(good), s.identity, "ANOTHERANOTHERANOTHERANOTH", 1),
			strings.Replace(string(good), `"role": "image"`, `"role": "container"`, 1),
			strings.Replace(string(good), `"format": 1`, `"format": 2`, 1),
			"", "{", strings.Repeat("x", 10_000),
		} {
			if err := os.WriteFile(marker, []byte(bad), 0o600); err != nil {
				t.Fatal(err)
			}
			fenced(t, s, key, "")
		}
		if err := errors.Join(os.Remove(marker), os.Symlink("/etc/passwd", marker)); err != nil {
			t.Fatal(err)
		}
		fenced(t, s, key, "can't be read")
		if err := errors.Join(os.Remove(marker)); err != nil {
			t.Fatal(err)
		}
		fenced(t, s, key, "has no cleave-root.json")
		if err := os.WriteFile(marker, good, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := s.Cleanup(t.Context()); err != nil || !exists(layer) {
			t.Errorf("did not recover: %v", err)
		}
	})
	t.Run("root missing", func(t *testing.T) {
		t.Parallel()
		o, s, key, layer := setUp(t)
		if err := os.Rename(o.ContainerRoot, o.ContainerRoot+"-away"); err != nil {
			t.Fatal(err)
		}
		fenced(t, s, key, "does not exist")
		if err := os.Mkdir(o.ContainerRoot, 0o700); err != nil {
			t.Fatal(err)
		}
		fenced(t, s, key, "has no cleave-root.json")
		if err := errors.Join(os.Remove(o.ContainerRoot), os.Rename(o.ContainerRoot+"-away", o.ContainerRoot)); err != nil {
			t.Fatal(err)
		}
		if err := s.Cleanup(t.Context()); err != nil || !exists(layer) {
			t.Errorf("did not recover: %v", err)
		}
	})
	t.Run("database of another node", func(t *testing.T) {
		t.Parallel()
		o, s, _, layer := setUp(t)
		other, otherS, otherKey, _ := setUp(t)
		if err := errors.Join(s.Close(), otherS.Close(), os.Rename(other.Database, o.Database)); err != nil {
			t.Fatal(err)
		}
		s = opened(t, o)
		fenced(t, s, otherKey, "belongs to snapshotter")
		if !exists(layer) {
			t.Error("a layer was deleted")
		}
	})
	t.Run("database removed", func(t *testing.T) {
		t.Parallel()
		o, s, _, layer := setUp(t)
		if err := errors.Join(s.Close(), os.Remove(o.Database)); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(t.Context(), o); !errors.Is(err, ErrNotInitialised) {
			t.Errorf("open: %v", err)
		}
		if err := Init(t.Context(), o); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("init on roots that are not empty: %v", err)
		}
		if _, err := Check(t.Context(), o); !errors.Is(err, ErrNotInitialised) {
			t.Errorf("check: %v", err)
		}
		if !exists(layer) {
			t.Error("a layer was deleted")
		}
	})
	for _, content := range []string{"", "not a database, but long enough to be looked at as one"} {
		t.Run("database overwritten", func(t *testing.T) {
			t.Parallel()
			o, s, _, layer := setUp(t)
			if err := errors.Join(s.Close(), os.WriteFile(o.Database, []byte(content), 0o600)); err != nil {
				t.Fatal(err)
			}
			if _, err := Open(t.Context(), o); err == nil {
				t.Error("it was opened")
			}
			if !exists(layer) {
				t.Error("a layer was deleted")
			}
		})
	}
	t.Run("database emptied", func(t *testing.T) {
		t.Parallel()
		// The records are gone, the identity is not: the worst case for a clean-up.
		o, s, _, layer := setUp(t)
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		change(t, o, func(tx *bolt.Tx) error {
			own := tx.Bucket(ownBucket)
			_, err := own.CreateBucketIfNotExists([]byte("x"))
			return errors.Join(err, tx.DeleteBucket([]byte("v1")), own.DeleteBucket(snapshotsBucket), own.Delete(highestKey), func() error {
				_, err := own.CreateBucket(snapshotsBucket)
				return err
			}())
		})
		s = opened(t, o)
		if err := s.Cleanup(t.Context()); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "never had a snapshot") {
			t.Errorf("clean up: %v", err)
		}
		st, err := s.Status(t.Context())
		if err != nil || st.Alarm == nil || len(st.Alarm.Folders) != 2 {
			t.Errorf("status: %+v, %v", st.Alarm, err)
		}
		if !exists(layer) {
			t.Error("a layer was deleted")
		}
	})
	t.Run("database of a newer cleave", func(t *testing.T) {
		t.Parallel()
		o, s, _, _ := setUp(t)
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		change(t, o, func(tx *bolt.Tx) error { return tx.Bucket(ownBucket).Put(schemaKey, []byte("2")) })
		if _, err := Open(t.Context(), o); !errors.Is(err, ErrNewerSchema) {
			t.Errorf("open: %v", err)
		}
		if _, err := Check(t.Context(), o); !errors.Is(err, ErrNewerSchema) {
			t.Errorf("check: %v", err)
		}
	})
	t.Run("not a mount point", func(t *testing.T) {
		t.Parallel()
		o, s, key, _ := setUp(t)
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		o.RequireMountpoints = true
		s = opened(t, o)
		fenced(t, s, key, "not a mount point")
		fresh := folders(t)
		fresh.RequireMountpoints = true
		if err := Init(t.Context(), fresh); err == nil || !strings.Contains(err.Error(), "not a mount point") {
			t.Errorf("init: %v", err)
		}
	})
}

func change(t *testing.T, o Options, f func(*bolt.Tx) error) {
	t.Helper()
	db, err := bolt.Open(o.Database, 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(db.Update(f), db.Close()); err != nil {
		t.Fatal(err)
	}
}

// TestReopeningIsTold: whoever it is that finds the root back, the sweep is made
// up for and it is told, once.
func TestReopeningIsTold(t *testing.T) {
	t.Parallel()
	o := folders(t)
	s := initialised(t, o)
	told := func(when string) {
		t.Helper()
		select {
		case <-s.Reopened():
		case <-time.After(20 * time.Second):
			t.Fatalf("the opening is not told %s", when)
		}
	}
	told("at the start")
	away := o.ContainerRoot + "-away"
	if err := os.Rename(o.ContainerRoot, away); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Prepare(t.Context(), containerKey(1), ""); !errdefs.IsFailedPrecondition(err) {
		t.Fatalf("got %v, want it refused", err)
	}
	stray := filepath.Join(away, snapshotsDir, "new-X")
	if err := errors.Join(os.Mkdir(stray, 0o700), os.Rename(away, o.ContainerRoot)); err != nil {
		t.Fatal(err)
	}
	// Not the background but a call finds it.
	if _, err := s.Prepare(t.Context(), containerKey(1), ""); err != nil {
		t.Fatal(err)
	}
	told("when the root is back")
	if exists(filepath.Join(o.ContainerRoot, snapshotsDir, "new-X")) {
		t.Error("it was told before the sweep was made up for")
	}
	select {
	case <-s.Reopened():
		t.Error("one opening is told twice")
	default:
	}
}

// TestUnfitFilesystem: procfs-like or attribute-less filesystems are refused at
// the first look.
func TestUnfitFilesystem(t *testing.T) {
	t.Parallel()
	o, p := onDisks(t, disk.Ext4, 32<<20, 32<<20)
	// An overlay can hold no whiteout of its own as an upper folder of another.
	o.RequireMountpoints = false
	lower, upper, work, merged := filepath.Join(p.dir, "l"), filepath.Join(p.container.Path(), "u"), filepath.Join(p.container.Path(), "w"), filepath.Join(p.dir, "merged")
	for _, dir := range []string{lower, upper, work, merged} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mount("overlay", merged, "overlay", 0, "lowerdir="+lower+",upperdir="+upper+",workdir="+work); err != nil {
		t.Fatal(err)
	}
	o.ContainerRoot = merged
	err := Init(t.Context(), o)
	if err == nil || !strings.Contains(err.Error(), "overlay") {
		t.Errorf("got %v, want it refused", err)
	}
	if exists(o.Database) {
		t.Error("there is a database")
	}
}

// TestFilesystemsWithoutWhatOverlayfsNeeds: names without kinds, and no trusted
// attributes; each is refused with what is missing, and is no root afterwards.
func TestFilesystemsWithoutWhatOverlayfsNeeds(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		make func(*testing.T, pair) string // returns the root
		want string
	}{
		{"no d_type", func(t *testing.T, p pair) string {
			d, err := disk.Make(t.Context(), p.dir, disk.Spec{Name: "untyped", SizeBytes: 32 << 20, MkfsArgs: []string{"-O", "^filetype"}})
			if err != nil {
				t.Fatal(err)
			}
			return d.Path()
		}, "d_type"},
		{"no trusted attributes", func(t *testing.T, p pair) string {
			at := filepath.Join(p.dir, "ramfs")
			if err := errors.Join(os.Mkdir(at, 0o700), unix.Mount("ramfs", at, "ramfs", 0, "")); err != nil {
				t.Fatal(err)
			}
			return at
		}, "trusted.overlay"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			o, p := onDisks(t, disk.Ext4, 32<<20, 32<<20)
			o.ContainerRoot = tc.make(t, p)
			err := Init(t.Context(), o)
			if err == nil || !strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), o.ContainerRoot) {
				t.Errorf("got %v, want a refusal that names %q and the root", err, tc.want)
			}
			if exists(o.Database) || exists(filepath.Join(o.ContainerRoot, "cleave-root.json")) {
				t.Error("there is a database or a marker")
			}
		})
	}
}

func TestInitOnlyOnEmptyRoots(t *testing.T) {
	t.Parallel()
	o := folders(t)
	foreign := filepath.Join(o.ContainerRoot, "somebody's")
	if err := os.WriteFile(foreign, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Init(t.Context(), o); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "somebody's") {
		t.Errorf("got %v", err)
	}
	if err := errors.Join(os.Remove(foreign), Init(t.Context(), o)); err != nil {
		t.Fatal(err)
	}
	if err := Init(t.Context(), o); !errdefs.IsAlreadyExists(err) {
		t.Errorf("a second time: %v", err)
	}
	missing := folders(t)
	missing.ImageRoot += "-missing"
	if err := Init(t.Context(), missing); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a missing root: %v", err)
	}
}
