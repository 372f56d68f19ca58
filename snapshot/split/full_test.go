package split

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	bolt "go.etcd.io/bbolt"
	"golang.org/x/sys/unix"

	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/need"
	"github.com/cleave-cri/cleave/snapshot/split/boltfile"
	"github.com/cleave-cri/cleave/snapshot/split/fault"
)

// fillUp takes all space of a filesystem, down to the last block and, where they
// are counted, inode.
func fillUp(t *testing.T, dir string) {
	t.Helper()
	full := func(err error) bool { return errors.Is(err, unix.ENOSPC) }
	f, err := os.Create(filepath.Join(dir, "filler"))
	if err != nil {
		t.Fatal(err)
	}
	for size := int64(64 << 20); size >= 1<<20; size /= 2 {
		for err = nil; err == nil; {
			end, seekErr := f.Seek(0, 2)
			if err = seekErr; err == nil {
				if err = unix.Fallocate(int(f.Fd()), 0, end, size); err == nil {
					_, err = f.Seek(0, 2)
				}
			}
		}
		if !full(err) {
			t.Fatal(err)
		}
	}
	for _, size := range []int{1 << 20, 64 << 10, 4 << 10, 512, 1} {
		for err = nil; err == nil; {
			_, err = f.Write(make([]byte, size))
		}
		if !full(err) {
			t.Fatal(err)
		}
	}
	if err := f.Sync(); err != nil && !full(err) {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil && !full(err) {
		t.Fatal(err)
	}
	for i := 0; err == nil || !full(err); i++ {
		if err = os.WriteFile(filepath.Join(dir, fmt.Sprint("filler-", i)), []byte("x"), 0o600); err != nil && !full(err) {
			t.Fatal(err)
		}
	}
}

func freeOf(t *testing.T, path string) int64 {
	t.Helper()
	free, err := boltfile.Free(path)
	if err != nil {
		t.Fatal(err)
	}
	return free
}

// TestFullRoots: with both roots at 100 %, containers and layers can be removed,
// their space comes free, also over a restart, and the store stays right.
func TestFullRoots(t *testing.T) {
	t.Parallel()
	for _, kind := range []disk.FS{disk.Ext4, disk.XFS} {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			o, _ := onDisks(t, kind, 64<<20, 64<<20)
			s := initialised(t, o)
			const count = 8
			for n := range count {
				_, upper := addLayer(t, s, n, "")
				if err := os.WriteFile(filepath.Join(upper, "big"), make([]byte, 1<<20), 0o600); err != nil {
					t.Fatal(err)
				}
				_, upper = addContainer(t, s, 100+n, "")
				if err := os.WriteFile(filepath.Join(upper, "big"), make([]byte, 1<<20), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			settle(t, s)
			fillUp(t, o.ImageRoot)
			fillUp(t, o.ContainerRoot)
			// xfs may still have room for a folder; then the snapshot is a whole one.
			_, err := s.Prepare(t.Context(), containerKey(999), "")
			_, statErr := s.Stat(t.Context(), containerKey(999))
			switch {
			case err == nil && statErr != nil:
				t.Errorf("a snapshot that was made on a full disk is not there: %v", statErr)
			case err != nil && !errors.Is(err, unix.ENOSPC):
				t.Errorf("a snapshot on a full disk: %v, want it made or no space", err)
			case err != nil && !errdefs.IsNotFound(statErr):
				t.Errorf("a snapshot that could not be made: %v, want none", statErr)
			}
			before := [2]int64{freeOf(t, o.ImageRoot), freeOf(t, o.ContainerRoot)}
			for n := range count {
				if n == count/2 {
					// A snapshotter that starts on full disks comes up, and works.
					if err := s.Close(); err != nil {
						t.Fatal(err)
					}
					s = opened(t, o)
				}
				if err := errors.Join(s.Remove(t.Context(), containerKey(100+n)), s.Remove(t.Context(), layerName(n)), s.Cleanup(t.Context())); err != nil {
					t.Fatal(err)
				}
			}
			settle(t, s)
			for i, path := range []string{o.ImageRoot, o.ContainerRoot} {
				// xfs frees late, but a sync makes it.
				unix.Sync()
				if freed := freeOf(t, path) - before[i]; freed < count<<20 {
					t.Errorf("%s: %d bytes came free, want at least %d", path, freed, count<<20)
				}
			}
			for _, root := range []string{o.ImageRoot, o.ContainerRoot} {
				names, err := filepath.Glob(filepath.Join(root, "filler*"))
				if err != nil {
					t.Fatal(err)
				}
				for _, name := range names {
					if err := os.Remove(name); err != nil {
						t.Fatal(err)
					}
				}
			}
			_ = s.Remove(t.Context(), containerKey(999)) //nolint:errcheck // xfs may have had room for it
			settle(t, s)
			if r := mustBeClean(t, s, o); r.Snapshots != 0 || r.Folders != 0 || r.Trash != 0 {
				t.Errorf("left: %+v", r)
			}
		})
	}
}

// TestFullDatabaseDisk: with the database's own disk at 100 %, removals go on
// in the reserved space; and when even that is used up, in that of the ballast.
func TestFullDatabaseDisk(t *testing.T) {
	t.Parallel()
	for _, kind := range []disk.FS{disk.Ext4, disk.XFS} {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			need.Loop(t)
			o, p := onDisks(t, kind, 64<<20, 64<<20)
			size := int64(32 << 20)
			if kind == disk.XFS {
				size = 300 << 20
			}
			d, err := disk.Make(t.Context(), p.dir, disk.Spec{Name: "db", SizeBytes: size, FS: kind})
			if err != nil {
				t.Fatal(err)
			}
			o.Database = filepath.Join(d.Path(), "state", "split.db")
			o.DatabaseBytes, o.BallastBytes = 1<<20, 2<<20
			var released atomic.Int32
			o.faults = func(p fault.Point) {
				if p == fault.BallastReleased {
					released.Add(1)
				}
			}
			s := initialised(t, o)
			for n := range 10 {
				addContainer(t, s, n, "")
			}
			fillUp(t, d.Path())
			for n := range 5 {
				if err := s.Remove(t.Context(), containerKey(n)); err != nil {
					t.Fatal(err)
				}
			}
			if released.Load() != 0 {
				t.Error("the ballast was released although space was reserved")
			}
			// Now use the reserve up: labels are part of the database.
			label := snapshots.WithLabels(map[string]string{"x": string(make([]byte, 30_000))})
			n := 1000
			for ; n < 3000 && released.Load() == 0; n++ {
				if _, err := s.Prepare(t.Context(), containerKey(n), "", label); err != nil {
					t.Fatalf("snapshot %d: %v", n, err)
				}
			}
			if released.Load() != 1 {
				t.Fatalf("the ballast was released %d times after %d snapshots", released.Load(), n-1000)
			}
			for n := 5; n < 10; n++ {
				if err := s.Remove(t.Context(), containerKey(n)); err != nil {
					t.Fatal(err)
				}
			}
			// Without any space left a creation fails and changes nothing; removals still work.
			fillUp(t, d.Path())
			var full error
			for ; n < 6000 && full == nil; n++ {
				_, full = s.Prepare(t.Context(), containerKey(n), "", label)
			}
			if !errors.Is(full, unix.ENOSPC) {
				t.Errorf("on a disk with nothing left: %v", full)
			}
			if _, err := s.Stat(t.Context(), containerKey(n-1)); err == nil {
				t.Error("the snapshot that could not be made is there")
			}
			if err := s.Remove(t.Context(), containerKey(1000)); err != nil {
				t.Errorf("remove on a disk with nothing left: %v", err)
			}
			settle(t, s)
			mustBeClean(t, s, o)
			s = opened(t, o)
			if err := s.Remove(t.Context(), containerKey(1001)); err != nil {
				t.Errorf("remove after a restart: %v", err)
			}
			st, err := s.Status(t.Context())
			if err != nil || st.Database.BallastBytes != 0 {
				t.Errorf("status: %+v, %v", st.Database, err)
			}
			// With room again the ballast is made whole.
			names, err := filepath.Glob(filepath.Join(d.Path(), "filler*"))
			if err != nil {
				t.Fatal(err)
			}
			for _, name := range names {
				if err := os.Remove(name); err != nil {
					t.Fatal(err)
				}
			}
			for range 100 {
				unix.Sync() // xfs frees late, but a sync makes it
				if s.db.maintain(); s.db.ballast.Bytes() >= o.BallastBytes {
					break
				}
			}
			if got := s.db.ballast.Bytes(); got < o.BallastBytes {
				t.Errorf("the ballast has %d bytes, want %d", got, o.BallastBytes)
			}
			settle(t, s)
			mustBeClean(t, s, o)
		})
	}
}

// TestRenameFails: a removal whose folder can't be moved is a removal, and the
// next clean-up takes the folder.
func TestRenameFails(t *testing.T) {
	t.Parallel()
	o := folders(t)
	s := initialised(t, o)
	key, upper := addContainer(t, s, 1, "")
	trashDir := filepath.Join(o.ContainerRoot, "trash")
	// Slots may still be made in it.
	for tries := 0; ; tries++ {
		err := errors.Join(os.RemoveAll(trashDir), os.WriteFile(trashDir, nil, 0o600))
		if err == nil {
			break
		}
		if tries == 1000 {
			t.Fatal(err)
		}
	}
	if err := s.Remove(t.Context(), key); err != nil {
		t.Fatal(err)
	}
	if !exists(upper) {
		t.Fatal("it is gone without a trash")
	}
	if err := errors.Join(os.Remove(trashDir), os.Mkdir(trashDir, 0o700), s.Cleanup(t.Context())); err != nil {
		t.Fatal(err)
	}
	settle(t, s)
	if exists(upper) {
		t.Error("the stray is still there")
	}
}

// TestOwnRemovalsRaiseNoAlarm: half of all snapshots were removed while no folder
// could be moved. Nobody has to confirm that, also after a restart; and the notes
// about it end with the folders.
func TestOwnRemovalsRaiseNoAlarm(t *testing.T) {
	t.Parallel()
	o := folders(t)
	s := initialised(t, o)
	var uppers []string
	for n := range 40 {
		_, upper := addContainer(t, s, n, "")
		uppers = append(uppers, upper)
	}
	// A mount on a folder: it can't be renamed.
	for _, upper := range uppers[:20] {
		folder := filepath.Dir(upper)
		if err := unix.Mount(folder, folder, "", unix.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := unix.Unmount(folder, unix.MNT_DETACH); err != nil && exists(folder) && !errors.Is(err, unix.EINVAL) {
				t.Error(err)
			}
		})
	}
	for n := range 20 {
		if err := s.Remove(t.Context(), containerKey(n)); err != nil {
			t.Fatal(err)
		}
	}
	noted := func(s *Snapshotter) (n int) {
		t.Helper()
		if err := s.db.read(t.Context(), func(_ context.Context, b *bolt.Bucket) error {
			leaving, err := getLeaving(b)
			n = len(leaving)
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return n
	}
	// A clean-up that can't move them either changes nothing.
	if err := s.Cleanup(t.Context()); err == nil {
		t.Error("a clean-up that moved nothing says that it did")
	}
	if got := noted(s); got != 20 {
		t.Errorf("%d folders are noted, want 20", got)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	for _, upper := range uppers[:20] {
		if err := unix.Unmount(filepath.Dir(upper), 0); err != nil {
			t.Fatal(err)
		}
	}
	s = opened(t, o)
	settle(t, s)
	if st, err := s.Status(t.Context()); err != nil || st.Alarm != nil {
		t.Errorf("an alarm about own removals: %+v, %v", st.Alarm, err)
	}
	for n, upper := range uppers {
		if stays := n >= 20; exists(upper) != stays {
			t.Errorf("container %d's folder: there is %v, want %v", n, !stays, stays)
		}
	}
	if got := noted(s); got != 0 {
		t.Errorf("%d folders are still noted", got)
	}
	mustBeClean(t, s, o)
}

// TestOneStrayHoldsUpNoOther: a folder that can't be moved, here because of a mount
// on it, stays and is told of; the others go.
func TestOneStrayHoldsUpNoOther(t *testing.T) {
	t.Parallel()
	o := folders(t)
	s := initialised(t, o)
	for n := range 8 {
		addContainer(t, s, n, "")
		if err := s.Remove(t.Context(), containerKey(n)); err != nil {
			t.Fatal(err)
		}
	}
	settle(t, s)
	stray := func(id int) string { return filepath.Join(o.ContainerRoot, snapshotsDir, fmt.Sprint(id)) }
	for id := 1; id <= 8; id++ {
		if err := os.MkdirAll(filepath.Join(stray(id), upperName), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	// The first two, so that all others come after them.
	for id := 1; id <= 2; id++ {
		if err := unix.Mount(stray(id), stray(id), "", unix.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := unix.Unmount(stray(id), unix.MNT_DETACH); err != nil && exists(stray(id)) {
				t.Error(err)
			}
		})
	}
	err := s.Cleanup(t.Context())
	if err == nil || !strings.Contains(err.Error(), "snapshots/1\"") || !strings.Contains(err.Error(), "snapshots/2\"") {
		t.Errorf("clean up: %v, want both folders that stay named", err)
	}
	settle(t, s)
	for id := 1; id <= 8; id++ {
		if stays := id <= 2; exists(filepath.Join(stray(id), upperName)) != stays {
			t.Errorf("folder %d: there is %v, want %v", id, !stays, stays)
		}
	}
	st, err := s.Status(t.Context())
	if err != nil || st.LastSweep == nil || st.LastSweep.Moved != 6 || !strings.Contains(st.LastSweep.Error, "snapshots/1") {
		t.Errorf("the last clean-up: %+v, %v", st.LastSweep, err)
	}
	for id := 1; id <= 2; id++ {
		if err := unix.Unmount(stray(id), 0); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Cleanup(t.Context()); err != nil {
		t.Error(err)
	}
	settle(t, s)
	mustBeClean(t, s, o)
}

// TestAlarm: too many strays at once stay until somebody confirms exactly them.
func TestAlarm(t *testing.T) {
	t.Parallel()
	o := folders(t)
	s := initialised(t, o)
	for n := range 30 {
		addContainer(t, s, n, "")
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	// A database that was restored from an older copy: it knows 10 of 30.
	s = opened(t, o)
	old := map[string]bool{}
	for n := range 20 {
		if err := s.Remove(t.Context(), containerKey(n)); err != nil {
			t.Fatal(err)
		}
	}
	settle(t, s)
	for n := 1; n <= 20; n++ {
		dir := filepath.Join(o.ContainerRoot, snapshotsDir, fmt.Sprint(n))
		if err := os.MkdirAll(filepath.Join(dir, upperName), 0o700); err != nil {
			t.Fatal(err)
		}
		old[dir] = true
	}
	allThere := func() {
		t.Helper()
		for dir := range old {
			if !exists(dir) {
				t.Fatalf("%s is gone", dir)
			}
		}
	}
	for range 2 {
		if err := s.Cleanup(t.Context()); err == nil {
			t.Error("20 of 30 folders went without a question")
		}
		allThere()
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = opened(t, o)
	allThere()
	st, err := s.Status(t.Context())
	if err != nil || st.Alarm == nil || len(st.Alarm.Folders) != 20 || st.Alarm.Total != 30 {
		t.Fatalf("status: %+v, %v", st.Alarm, err)
	}
	// One more appears before it is confirmed: that is another plan.
	late := filepath.Join(o.ImageRoot, snapshotsDir, "5")
	if err := os.Mkdir(late, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := s.ConfirmCleanup(t.Context()); err == nil {
		t.Error("a clean-up was done that nobody confirmed")
	}
	allThere()
	if err := errors.Join(os.Remove(late), s.ConfirmCleanup(t.Context())); err != nil {
		t.Fatal(err)
	}
	settle(t, s)
	for dir := range old {
		if exists(dir) {
			t.Errorf("%s is still there", dir)
		}
	}
	if err := s.ConfirmCleanup(t.Context()); err == nil {
		t.Error("a clean-up was confirmed twice")
	}
	mustBeClean(t, s, o)
}

// TestCheckAndRepair: the offline checker sees what is wrong, and repairs only
// what it has shown.
func TestCheckAndRepair(t *testing.T) {
	t.Parallel()
	o := folders(t)
	s := initialised(t, o)
	base, layer := addLayer(t, s, 1, "")
	_, upper := addContainer(t, s, 2, base)
	settle(t, s)
	if _, err := Check(t.Context(), o); !errors.Is(err, boltfile.ErrLocked) {
		t.Errorf("check while it runs: %v", err)
	}
	if _, err := Repair(t.Context(), o, nil); !errors.Is(err, boltfile.ErrLocked) {
		t.Errorf("repair while it runs: %v", err)
	}
	if _, err := Open(t.Context(), o); !errors.Is(err, boltfile.ErrLocked) {
		t.Errorf("a second one: %v", err)
	}
	mustBeClean(t, s, o)
	in := func(root string, elem ...string) string {
		return filepath.Join(append([]string{root, snapshotsDir}, elem...)...)
	}
	for _, dir := range []string{in(o.ImageRoot, "77", "diff"), in(o.ContainerRoot, "new-A"), in(o.ContainerRoot, "1", "diff"), in(o.ImageRoot, "foreign"), filepath.Join(o.ImageRoot, emptyName, "x")} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Rename(in(o.ContainerRoot, "2", "work"), in(o.ContainerRoot, "2", "gone")); err != nil {
		t.Fatal(err)
	}
	r, err := Check(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]string{}
	for _, f := range append(r.Findings, r.Notes...) {
		found[f.Path] = f.Invariant
	}
	for path, invariant := range map[string]string{
		in(o.ImageRoot, "77"): "I1", in(o.ContainerRoot, "new-A"): "I4", in(o.ContainerRoot, "1"): "I1",
		in(o.ContainerRoot, "2", "work"): "I1", filepath.Join(o.ImageRoot, emptyName, "x"): "I2", in(o.ImageRoot, "foreign"): "I4",
	} {
		if found[path] != invariant {
			t.Errorf("%s: found %q, want %s; all: %v", path, found[path], invariant, r)
		}
	}
	if len(r.Plan) != 3 {
		t.Fatalf("plan: %v", r.Plan)
	}
	// A plan that is not true any more, or never was, is not carried out.
	for _, plan := range [][]Folder{{{"container", "2"}}, {{"image", "foreign"}}, {{"image", "../snapshots"}}, {{"image", "1"}}} {
		if moved, err := Repair(t.Context(), o, plan); err == nil || len(moved) > 0 {
			t.Errorf("repaired %v, %v", moved, err)
		}
	}
	moved, err := Repair(t.Context(), o, r.Plan)
	if err != nil || len(moved) != 3 {
		t.Fatalf("repair: %v, %v", moved, err)
	}
	if !exists(filepath.Join(layer, "layer-1")) || !exists(upper) || !exists(in(o.ImageRoot, "foreign")) {
		t.Error("too much was taken")
	}
	if err := errors.Join(os.Rename(in(o.ContainerRoot, "2", "gone"), in(o.ContainerRoot, "2", "work")), os.Remove(filepath.Join(o.ImageRoot, emptyName, "x"))); err != nil {
		t.Fatal(err)
	}
	s = opened(t, o)
	settle(t, s)
	if r := mustBeClean(t, s, o); r.Trash != 0 || r.Folders != 2 {
		t.Errorf("after the repair: %+v", r)
	}
}

// TestDeletionIsPaced: a slow rate neither holds up a removal nor the end.
func TestDeletionIsPaced(t *testing.T) {
	t.Parallel()
	o := folders(t)
	o.DeletionRate = 100
	s := initialised(t, o)
	key, upper := addContainer(t, s, 1, "")
	for i := range 1000 {
		if err := os.WriteFile(filepath.Join(upper, fmt.Sprint(i)), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	began := time.Now()
	if err := s.Remove(t.Context(), key); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := s.WaitIdle(ctx); err == nil {
		t.Errorf("1000 names were deleted in %v at 100 a second", time.Since(began))
	}
	st, err := s.Status(t.Context())
	if err != nil || st.Container.Trash.Entries != 1 {
		t.Errorf("trash: %+v, %v", st.Container.Trash, err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	// It goes on after a restart.
	o.DeletionRate = -1
	s = opened(t, o)
	settle(t, s)
	if r := mustBeClean(t, s, o); r.Trash != 0 {
		t.Errorf("left: %+v", r)
	}
}
