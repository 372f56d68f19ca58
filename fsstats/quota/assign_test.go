package quota_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/cleave-cri/cleave/fsstats/quota"
	"github.com/cleave-cri/cleave/fsstats/quota/quotatest"
	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/need"
)

// assigner makes one whose IDs people have not named.
func assigner(t testing.TB, fs *quota.FS, r quota.Range, ledger quota.Ledger, files ...string) *quota.Assigner {
	t.Helper()
	a, err := quota.NewAssigner(fs, quota.AssignerOptions{Range: r, ProjectFiles: append([]string{}, files...), Ledger: ledger})
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func assign(t testing.TB, a *quota.Assigner, tree string) uint32 {
	t.Helper()
	got, err := a.Assign(t.Context(), tree)
	if err != nil {
		t.Fatal(err)
	}
	if got.Left != 0 {
		t.Errorf("%d entries were left, the first is %s", got.Left, got.FirstLeft)
	}
	return got.ID
}

// snapshot makes a tree as the snapshotter does: fs and work.
func snapshot(t testing.TB, dir, name string) string {
	t.Helper()
	tree := filepath.Join(dir, name)
	if err := errors.Join(os.Mkdir(tree, 0o711), os.Mkdir(filepath.Join(tree, "fs"), 0o755), os.Mkdir(filepath.Join(tree, "work"), 0o711)); err != nil {
		t.Fatal(err)
	}
	return tree
}

// wantProject checks the project of every folder and file in a tree.
func wantProject(t testing.TB, tree string, want uint32) {
	t.Helper()
	err := filepath.WalkDir(tree, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.IsDir() && !entry.Type().IsRegular() {
			return err
		}
		id, inherits, err := quota.ProjectOf(path)
		if id != want || inherits != (entry.IsDir() && want != 0) {
			t.Errorf("%s has project %d, inherits %v; want %d", path, id, inherits, want)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

var thousands = quota.Range{First: 1000, Last: 1999}

// TestAssign uses an xfs without quota: IDs in use are found by looking at all inodes. The guest's tests do the same with
// quota, on ext4 too.
func TestAssign(t *testing.T) {
	t.Parallel()
	run := need.Lab(t)
	filesystem, dir := make1(t, run, disk.Spec{Name: "x", FS: disk.XFS})
	testAssign(t, filesystem, dir, run.Dir())
}

// testAssign is everything about IDs that is the same with and without quota. outside is a folder on another filesystem.
func testAssign(t *testing.T, filesystem *quota.FS, dir, outside string) {
	t.Helper()
	inUse := filepath.Join(dir, "somebody-elses")
	if err := errors.Join(os.Mkdir(inUse, 0o700), quota.SetProject(inUse, 1000, true)); err != nil {
		t.Fatal(err)
	}
	named := filepath.Join(outside, "projects")
	if err := os.WriteFile(named, []byte("# people's\n1001:/export/builds\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	missing := filepath.Join(outside, "missing")
	a := assigner(t, filesystem, thousands, nil, named, missing)

	t.Run("the first free one", func(t *testing.T) {
		tree := snapshot(t, dir, "first")
		if err := os.WriteFile(filepath.Join(tree, "fs", "file"), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := a.ID("first"); !errors.Is(err, quota.ErrNoProject) {
			t.Errorf("before it has one: %v", err)
		}
		if id := assign(t, a, "first"); id != 1002 {
			t.Errorf("got %d, want 1002: 1000 has a folder, 1001 a name", id)
		}
		if err := os.WriteFile(filepath.Join(tree, "fs", "later"), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
		wantProject(t, tree, 1002)
		if id, err := a.ID("first"); id != 1002 || err != nil {
			t.Errorf("it has %d, %v", id, err)
		}
	})
	t.Run("it keeps its own, after a restart too", func(t *testing.T) {
		for _, b := range []*quota.Assigner{a, assigner(t, filesystem, thousands, nil), assigner(t, filesystem, quota.Range{First: 5, Last: 6}, nil)} {
			if id := assign(t, b, "first"); id != 1002 {
				t.Errorf("got %d, want 1002", id)
			}
		}
	})
	t.Run("others get others, after a restart too", func(t *testing.T) {
		snapshot(t, dir, "second")
		snapshot(t, dir, "third")
		if id := assign(t, a, "second"); id != 1003 {
			t.Errorf("got %d, want 1003", id)
		}
		if id := assign(t, assigner(t, filesystem, thousands, nil, named), "third"); id != 1004 {
			t.Errorf("got %d, want 1004", id)
		}
	})
	t.Run("a copy is another tree", func(t *testing.T) {
		if out, err := exec.CommandContext(t.Context(), "cp", "-a", filepath.Join(dir, "first"), filepath.Join(dir, "copy")).CombinedOutput(); err != nil {
			t.Fatalf("cp: %v\n%s", err, out)
		}
		value := make([]byte, 100)
		if _, err := unix.Getxattr(filepath.Join(dir, "copy"), quota.RecordAttribute, value); err != nil {
			t.Fatalf("cp did not take the record along: %v", err)
		}
		if id := assign(t, a, "copy"); id != 1005 {
			t.Errorf("got %d, want 1005", id)
		}
		wantProject(t, filepath.Join(dir, "copy"), 1005)
		wantProject(t, filepath.Join(dir, "first"), 1002)
	})
	t.Run("somebody else's is left alone", func(t *testing.T) {
		if _, err := a.Assign(t.Context(), "somebody-elses"); !errors.Is(err, quota.ErrForeignProject) {
			t.Errorf("got %v", err)
		}
		if _, err := a.SetLimit("somebody-elses", quota.Limit{Bytes: 1 << 20}); !errors.Is(err, quota.ErrForeignProject) {
			t.Errorf("limit: %v", err)
		}
		wantProject(t, inUse, 1000)
		inherited := filepath.Join(dir, "first", "fs", "folder")
		if err := os.Mkdir(inherited, 0o700); err != nil {
			t.Fatal(err)
		}
		if _, err := a.Assign(t.Context(), "first/fs/folder"); !errors.Is(err, quota.ErrForeignProject) {
			t.Errorf("part of a tree: %v", err)
		}
	})
	t.Run("a crash before the ID", func(t *testing.T) {
		tree := snapshot(t, dir, "crash1")
		// Its record names an ID that another tree has got since.
		if err := quota.WriteRecord(tree, 1002, false); err != nil {
			t.Fatal(err)
		}
		if id := assign(t, a, "crash1"); id == 1002 {
			t.Errorf("two trees have %d", id)
		}
		wantProject(t, filepath.Join(dir, "first"), 1002)
	})
	t.Run("a crash in the middle", func(t *testing.T) {
		tree := snapshot(t, dir, "crash2")
		if err := errors.Join(quota.WriteRecord(tree, 1500, false), quota.SetProject(tree, 1500, true)); err != nil {
			t.Fatal(err)
		}
		if _, err := a.SetLimit("crash2", quota.Limit{Bytes: 1 << 20}); !errors.Is(err, quota.ErrNoProject) {
			t.Errorf("half a tree can be limited: %v", err)
		}
		if id := assign(t, a, "crash2"); id != 1500 {
			t.Errorf("got %d, want 1500, which it had in part", id)
		}
		wantProject(t, tree, 1500)
	})
	t.Run("what can't have one is told", func(t *testing.T) {
		tree := snapshot(t, dir, "odd")
		file := filepath.Join(dir, "shared")
		err := errors.Join(os.Symlink("x", filepath.Join(tree, "fs", "symlink")), unix.Mkfifo(filepath.Join(tree, "fs", "pipe"), 0o600),
			unix.Mknod(filepath.Join(tree, "fs", "whiteout"), unix.S_IFCHR, 0),
			os.WriteFile(file, nil, 0o600), os.Link(file, filepath.Join(tree, "fs", "shared")))
		if err != nil {
			t.Fatal(err)
		}
		got, err := a.Assign(t.Context(), "odd")
		if err != nil || got.Left != 4 || !strings.HasPrefix(got.FirstLeft, tree) {
			t.Errorf("got %+v, %v, want 4 left", got, err)
		}
		if id, _, err := quota.ProjectOf(file); id != 0 || err != nil {
			t.Errorf("a file with a name outside of the tree has project %d, %v", id, err)
		}
	})
	t.Run("a mount in the tree stops it", func(t *testing.T) {
		tree := snapshot(t, dir, "mounted")
		other := filepath.Join(tree, "fs", "mount")
		if err := errors.Join(os.Mkdir(other, 0o700), unix.Mount("tmpfs", other, "tmpfs", 0, "")); err != nil {
			t.Fatal(err)
		}
		_, err := a.Assign(t.Context(), "mounted")
		if unmounted := unix.Unmount(other, 0); err == nil || unmounted != nil {
			t.Errorf("assign: %v, unmount: %v", err, unmounted)
		}
		assign(t, a, "mounted")
		wantProject(t, tree, mustID(t, a, "mounted"))
	})
	t.Run("names that lead elsewhere", func(t *testing.T) {
		if err := os.Symlink("first", filepath.Join(dir, "link")); err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"", ".", "..", "../x", "/", "first/../first", "link", "link/fs", "shared", "nothing"} {
			if _, err := a.Assign(t.Context(), name); err == nil {
				t.Errorf("%q was taken", name)
			}
		}
	})
	t.Run("many at once", func(t *testing.T) {
		var mu sync.Mutex
		ids := map[uint32]string{}
		group, ctx := errgroup.WithContext(t.Context())
		for i := range 16 {
			name := fmt.Sprintf("many-%d", i)
			snapshot(t, dir, name)
			own := a
			if i%2 == 0 {
				own = assigner(t, open(t, dir), thousands, nil, named) // as another process would
			}
			group.Go(func() error {
				got, err := own.Assign(ctx, name)
				mu.Lock()
				defer mu.Unlock()
				if other := ids[got.ID]; other != "" {
					t.Errorf("%s and %s have %d", name, other, got.ID)
				}
				ids[got.ID] = name
				return err
			})
		}
		if err := group.Wait(); err != nil {
			t.Error(err)
		}
	})
	t.Run("a range that is used up", func(t *testing.T) {
		snapshot(t, dir, "late")
		b := assigner(t, filesystem, quota.Range{First: 1000, Last: 1003}, nil, named)
		if _, err := b.Assign(t.Context(), "late"); !errors.Is(err, quota.ErrRangeUsed) {
			t.Errorf("got %v", err)
		}
		wantProject(t, filepath.Join(dir, "late"), 0)
	})
	t.Run("names that can't be read", func(t *testing.T) {
		if err := os.WriteFile(filepath.Join(outside, "rubbish"), []byte("rubbish\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		b := assigner(t, filesystem, thousands, nil, filepath.Join(outside, "rubbish"))
		if _, err := b.Assign(t.Context(), "late"); err == nil || !strings.Contains(err.Error(), "line 1") {
			t.Errorf("got %v", err)
		}
		wantProject(t, filepath.Join(dir, "late"), 0)
	})
	t.Run("a lock that is held", func(t *testing.T) {
		held, err := os.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Flock(int(held.Fd()), unix.LOCK_EX); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(errors.New("enough"))
		if _, err := a.Assign(ctx, "late"); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
		if err := held.Close(); err != nil {
			t.Fatal(err)
		}
		assign(t, a, "late")
	})
}

func mustID(t testing.TB, a *quota.Assigner, tree string) uint32 {
	t.Helper()
	id, err := a.ID(tree)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// TestAssignerWithALedger uses accounts in memory: limits by tree, and those that trees leave behind.
func TestAssignerWithALedger(t *testing.T) {
	t.Parallel()
	run := need.Lab(t)
	filesystem, dir := make1(t, run, disk.Spec{Name: "x", FS: disk.XFS})
	ledger := quotatest.NewFake()
	a := assigner(t, filesystem, thousands, ledger)
	write := func(id uint32) {
		t.Helper()
		if err := ledger.Write(id, 4096); err != nil {
			t.Fatal(err)
		}
	}
	for _, tree := range []string{"one", "two", "three"} {
		snapshot(t, dir, tree)
		write(assign(t, a, tree))
	}
	if p, err := a.SetLimit("one", quota.Limit{Bytes: 10<<20 + 1, Inodes: 7}); err != nil || p.ID != 1000 || p.Limit != (quota.Limit{Bytes: 10<<20 + 1024, Inodes: 7}) {
		t.Errorf("got %+v, %v", p, err)
	}
	if _, err := a.SetLimit("two", quota.Limit{Bytes: 1 << 20}); err != nil {
		t.Fatal(err)
	}
	if p, err := a.Project("two"); err != nil || p.Limit.Bytes != 1<<20 || p.Usage.Inodes != 1 {
		t.Errorf("got %+v, %v", p, err)
	}
	snapshot(t, dir, "none")
	if _, err := a.SetLimit("none", quota.Limit{Bytes: 1}); !errors.Is(err, quota.ErrNoProject) {
		t.Errorf("a tree without an ID: %v", err)
	}
	if err := errors.Join(ledger.SetLimit(999, quota.Limit{Bytes: 1024}), ledger.SetLimit(2000, quota.Limit{Bytes: 1024})); err != nil {
		t.Fatal(err)
	}
	if cleared, err := a.Tidy(t.Context()); err != nil || cleared != nil {
		t.Errorf("with all trees there %v were cleared, %v", cleared, err)
	}
	ledger.Remove(1001)
	// Its limit keeps the ID from being given again.
	if cleared, err := a.Tidy(t.Context()); err != nil || !slices.Equal(cleared, []uint32{1001}) {
		t.Errorf("%v were cleared, %v, want 1001", cleared, err)
	}
	for _, id := range []uint32{999, 2000, 1000} {
		if p, err := ledger.Project(id); err != nil || p.Limit.Bytes == 0 {
			t.Errorf("the limit of %d is gone: %+v, %v", id, p, err)
		}
	}

	broken := errors.New("the disk is gone")
	ledger.Fail(broken)
	for name, err := range map[string]error{
		"Assign": second(a.Assign(t.Context(), "none")), "Tidy": second(a.Tidy(t.Context())),
		"SetLimit": second(a.SetLimit("one", quota.Limit{})), "Project": second(a.Project("one")),
	} {
		if !errors.Is(err, broken) {
			t.Errorf("%s: %v", name, err)
		}
	}
	wantProject(t, filepath.Join(dir, "none"), 0)
}

// TestAssignNeedsToKnow: without any count of IDs, none is given.
func TestAssignNeedsToKnow(t *testing.T) {
	t.Parallel()
	run := need.Lab(t)
	filesystem, dir := make1(t, run, disk.Spec{Name: "e", FS: disk.Ext4})
	snapshot(t, dir, "tree")
	a := assigner(t, filesystem, thousands, nil)
	if _, err := a.Assign(t.Context(), "tree"); !errors.Is(err, quota.ErrNotSupported) {
		t.Errorf("got %v", err)
	}
	if _, err := unix.Getxattr(filepath.Join(dir, "tree"), quota.RecordAttribute, nil); !errors.Is(err, unix.ENODATA) {
		t.Errorf("a record was written: %v", err)
	}
	if _, err := a.Tidy(t.Context()); !errors.Is(err, quota.ErrNotSupported) {
		t.Errorf("tidy: %v", err)
	}
}

func TestRangesThatAreRefused(t *testing.T) {
	t.Parallel()
	for _, r := range []quota.Range{{}, {First: 0, Last: 5}, {First: 6, Last: 5}, {First: 5, Last: math.MaxUint32}} {
		if _, err := quota.NewAssigner(nil, quota.AssignerOptions{Range: r}); err == nil {
			t.Errorf("%+v was taken", r)
		}
	}
	if _, err := quota.NewAssigner(nil, quota.AssignerOptions{Range: quota.Range{First: 5, Last: 5}}); err != nil {
		t.Error(err)
	}
}
