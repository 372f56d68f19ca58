package rootdir_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cleave-cri/cleave/lab/janitor"
	"github.com/cleave-cri/cleave/lab/need"
	"github.com/cleave-cri/cleave/snapshot/split/rootdir"
)

func TestMain(m *testing.M) {
	janitor.Main()
	os.Exit(m.Run())
}

func open(t *testing.T, path string) *rootdir.Root {
	t.Helper()
	r, err := rootdir.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil && !errors.Is(err, fs.ErrClosed) {
			t.Error(err)
		}
	})
	return r
}

func remove(r *rootdir.Root, name string) (inodes, bytes int64, err error) {
	err = r.RemoveTree(name, func() error { return nil }, func(g rootdir.Removed) {
		bytes += g.Bytes
		if g.LastName {
			inodes++
		}
	})
	return inodes, bytes, err
}

// TestConfinement: no name leads out of the root, by dots, symlinks or mounts.
func TestConfinement(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	outside, inside := filepath.Join(dir, "outside"), filepath.Join(dir, "root")
	if err := errors.Join(os.Mkdir(outside, 0o700), os.Mkdir(inside, 0o700), os.WriteFile(filepath.Join(outside, "f"), []byte("x"), 0o600),
		os.Symlink(outside, filepath.Join(inside, "link")), os.Symlink("../outside", filepath.Join(inside, "relative"))); err != nil {
		t.Fatal(err)
	}
	r := open(t, inside)
	for _, name := range []string{"../outside/x", "link/x", "relative/x", "/outside/x", "", "..", "a/.."} {
		if err := r.Mkdir(name, 0o700); err == nil {
			t.Errorf("made %q", name)
		}
		if _, err := r.Open(name); err == nil {
			t.Errorf("opened %q", name)
		}
		if err := r.Rename("link", name); err == nil {
			t.Errorf("renamed to %q", name)
		}
		if _, _, err := remove(r, name); err == nil {
			t.Errorf("removed %q", name)
		}
	}
	for _, name := range []string{"link/f", "relative/f"} {
		if _, err := r.ReadFile(name, 100); err == nil {
			t.Errorf("read %q", name)
		}
		if _, _, err := r.ReadEnd(name, 100); err == nil {
			t.Errorf("read the end of %q", name)
		}
		if _, err := r.Stat(name); err == nil {
			t.Errorf("looked at %q", name)
		}
	}
	for _, name := range []string{"link", "relative"} {
		if n, _, err := remove(r, name); err != nil || n != 1 {
			t.Errorf("remove %q: %d, %v", name, n, err)
		}
	}
	if _, err := os.Stat(filepath.Join(outside, "f")); err != nil {
		t.Errorf("what a symlink led to is gone: %v", err)
	}
}

// TestRemoveTree: wide, deep, linked and odd trees go, and are counted.
func TestRemoveTree(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	r := open(t, dir)
	top := filepath.Join(dir, "t")
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.Mkdir(top, 0o700))
	want := int64(1)
	for i := range 40 {
		sub := filepath.Join(top, fmt.Sprint("wide-", i))
		must(os.Mkdir(sub, 0o000))
		want++
		for j := range 60 {
			must(os.WriteFile(filepath.Join(sub, fmt.Sprint(j)), []byte("x"), 0o000))
			want++
		}
	}
	for i := range 3000 {
		must(os.WriteFile(filepath.Join(top, fmt.Sprint("many-", i)), nil, 0o600))
		want++
	}
	must(os.Link(filepath.Join(top, "many-1"), filepath.Join(top, "link")))
	must(os.Symlink("/", filepath.Join(top, "slash")))
	must(unix.Mkfifo(filepath.Join(top, "pipe"), 0o600))
	want += 2
	// Deeper than any path can be long, and than descriptors are allowed.
	deep, err := os.OpenRoot(top)
	must(err)
	for range 2500 {
		must(deep.Mkdir("d", 0o700))
		must(deep.WriteFile("f", []byte("x"), 0o600))
		next, err := deep.OpenRoot("d")
		must(errors.Join(err, deep.Close()))
		deep = next
		want += 2
	}
	must(deep.Close())
	n, bytes, err := remove(r, "t")
	if err != nil || n != want || bytes < 2500*4096 {
		t.Errorf("removed %d inodes with %d bytes, %v, want %d inodes", n, bytes, err, want)
	}
	if _, err := os.Lstat(top); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("it is still there: %v", err)
	}
	if _, _, err := remove(r, "t"); err != nil {
		t.Errorf("a second time: %v", err)
	}
}

// TestRemoveTreeStopsAtMounts: a filesystem that is mounted in the tree loses
// nothing.
func TestRemoveTreeStopsAtMounts(t *testing.T) {
	t.Parallel()
	need.Root(t)
	dir := need.Lab(t).Dir()
	inside := filepath.Join(dir, "t", "m")
	if err := os.MkdirAll(inside, 0o700); err != nil {
		t.Fatal(err)
	}
	outside := filepath.Join(dir, "precious")
	if err := errors.Join(os.Mkdir(outside, 0o700), os.WriteFile(filepath.Join(outside, "f"), nil, 0o600), unix.Mount(outside, inside, "", unix.MS_BIND, "")); err != nil {
		t.Fatal(err)
	}
	r := open(t, dir)
	if _, _, err := remove(r, "t"); !errors.Is(err, unix.EXDEV) {
		t.Errorf("got %v, want it to stop at the mount", err)
	}
	if _, err := os.Stat(filepath.Join(outside, "f")); err != nil {
		t.Error(err)
	}
	if err := unix.Unmount(inside, 0); err != nil {
		t.Fatal(err)
	}
	if _, _, err := remove(r, "t"); err != nil {
		t.Error(err)
	}
}

// TestRemoveTreeStops when it is told to, and goes on later.
func TestRemoveTreeStops(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for i := range 10 {
		if err := os.MkdirAll(filepath.Join(dir, "t", fmt.Sprint(i), "x"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	r := open(t, dir)
	stop := errors.New("stop")
	left := 7
	err := r.RemoveTree("t", func() error {
		if left--; left < 0 {
			return stop
		}
		return nil
	}, func(rootdir.Removed) {})
	if !errors.Is(err, stop) {
		t.Errorf("got %v", err)
	}
	if n, _, err := remove(r, "t"); err != nil || n != 21-7 {
		t.Errorf("then removed %d, %v, want 14", n, err)
	}
}

// TestImmutable files, which a privileged container can make, go too.
func TestImmutable(t *testing.T) {
	t.Parallel()
	need.Root(t)
	dir := t.TempDir()
	tree := filepath.Join(dir, "t", "sub")
	if err := errors.Join(os.MkdirAll(tree, 0o700), os.WriteFile(filepath.Join(tree, "f"), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{filepath.Join(tree, "f"), tree} {
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		err = unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, 0x10)
		if err := errors.Join(err, f.Close()); err != nil {
			need.Skip(t, "needs a filesystem with immutable files: %v", err)
		}
	}
	if err := os.Remove(filepath.Join(tree, "f")); !errors.Is(err, fs.ErrPermission) {
		t.Fatalf("the file is not immutable: %v", err)
	}
	if n, _, err := remove(open(t, dir), "t"); err != nil || n != 3 {
		t.Errorf("removed %d, %v", n, err)
	}
}

func TestRenameReplacesNothing(t *testing.T) {
	t.Parallel()
	r := open(t, t.TempDir())
	if err := errors.Join(r.Mkdir("a", 0o700), r.Mkdir("b", 0o700)); err != nil {
		t.Fatal(err)
	}
	if err := r.Rename("a", "b"); !errors.Is(err, fs.ErrExist) {
		t.Errorf("got %v", err)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Stat("a"); !errors.Is(err, fs.ErrClosed) {
		t.Errorf("after closing: %v", err)
	}
}

// TestModesWhateverTheUmask is not parallel: the umask is the process's. A part
// that makes a socket sets it to 0777 for a moment.
func TestModesWhateverTheUmask(t *testing.T) {
	root := open(t, t.TempDir())
	old := unix.Umask(0o777)
	err := errors.Join(root.Touch("file"), root.WriteFile("whole", []byte("x"), 0o640), root.Mkdir("folder", 0o711), root.Chmod("folder", 0o1700))
	unix.Umask(old)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]uint32{"file": 0o600, "whole": 0o640, "folder": 0o1700} {
		p, err := root.Stat(name)
		if err != nil || p.Mode&0o7777 != want {
			t.Errorf("%s: mode %#o, %v, want %#o", name, p.Mode&0o7777, err, want)
		}
	}
}
