package remains

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/cleave-cri/cleave/lab/need"
)

func write(path string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	return os.WriteFile(path, []byte("x"), 0o600)
}

// root is a folder on the filesystem of temporary folders; the test is skipped where that gives no handles, or they can't be used.
func root(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	f, err := Find(dir, []string{dir}, nil)
	if err != nil {
		need.Skip(t, "needs a temporary folder on a filesystem that gives handles: %v", err)
	}
	if _, err := f.Gone(); err != nil {
		need.Skip(t, "needs to open files by handle, as root may: %v", err)
	}
	return dir
}

func TestGone(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		change func(dir string) error
		// goes and stays are what is said of a folder that is to go, and of one that is to lose its files.
		goes, stays bool
	}{
		"it is gone":       {os.RemoveAll, true, true},
		"folders are left": {func(dir string) error { return os.Remove(filepath.Join(dir, "a/b/file")) }, false, true},
		"all is left":      {func(string) error { return nil }, false, false},
		// The split snapshotter and the kubelet do so before they delete.
		"it is renamed": {func(dir string) error { return os.Rename(dir, dir+".deleting") }, false, false},
		"it is renamed and deleted": {func(dir string) error {
			return errors.Join(os.Rename(dir, dir+".deleting"), os.RemoveAll(dir+".deleting"))
		}, true, true},
		"another of that name": {func(dir string) error {
			return errors.Join(os.RemoveAll(dir), write(filepath.Join(dir, "file")))
		}, true, true},
		"a link is left": {func(dir string) error {
			return errors.Join(os.RemoveAll(filepath.Join(dir, "a")), os.Symlink("/", filepath.Join(dir, "a")))
		}, false, false},
		"more than is looked at": {func(dir string) error {
			err := os.RemoveAll(filepath.Join(dir, "a"))
			for i := range mostFolders {
				err = errors.Join(err, os.Mkdir(filepath.Join(dir, fmt.Sprint(i)), 0o700))
			}
			return err
		}, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			mount := root(t)
			dir := filepath.Join(t.TempDir(), "folder")
			if err := write(filepath.Join(dir, "a/b/file")); err != nil {
				t.Fatal(err)
			}
			goes, err := Find(mount, []string{dir, "/proc"}, nil) // what is on another filesystem is no matter
			if err != nil || len(goes.handles) != 1 {
				t.Fatalf("%d folders are found, want 1: %v", len(goes.handles), err)
			}
			stays, err := Find(mount, []string{"/proc"}, []string{t.TempDir(), dir})
			if err != nil || len(stays.handles) != 2 {
				t.Fatalf("%d folders are found, want 2: %v", len(stays.handles), err)
			}
			for _, f := range []Folders{goes, stays} {
				if gone, err := f.Gone(); gone || err != nil {
					t.Fatalf("before anything goes: %v, %v", gone, err)
				}
			}
			if err := tc.change(dir); err != nil {
				t.Fatal(err)
			}
			if got, err := goes.Gone(); got != tc.goes || err != nil {
				t.Errorf("of one that is to go: %v, %v, want %v", got, err, tc.goes)
			}
			if got, err := stays.Gone(); got != tc.stays || err != nil {
				t.Errorf("of one that may stay: %v, %v, want %v", got, err, tc.stays)
			}
		})
	}
}

// A walk over a tree that somebody deletes meets folders that have just gone; that says nothing of the files beside them.
func TestAFolderThatGoesMeanwhileSaysNothing(t *testing.T) {
	t.Parallel()
	mount := root(t)
	dir := filepath.Join(t.TempDir(), "folder")
	const folders = 300
	for i := range folders {
		if err := os.MkdirAll(filepath.Join(dir, fmt.Sprint(i), "a"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := write(filepath.Join(dir, "z", "file")); err != nil {
		t.Fatal(err)
	}
	f, err := Find(mount, nil, []string{dir})
	if err != nil {
		t.Fatal(err)
	}
	deleted := make(chan error, 1)
	go func() {
		var err error
		for i := range folders {
			err = errors.Join(err, os.RemoveAll(filepath.Join(dir, fmt.Sprint(i))))
		}
		deleted <- err
	}()
	for {
		if gone, err := f.Gone(); gone || err != nil {
			t.Fatalf("the file is there, and it says %v, %v", gone, err)
		}
		select {
		case err := <-deleted:
			if err != nil {
				t.Fatal(err)
			}
			return
		default:
		}
	}
}

// While somebody has a deleted folder open, it has no name any more.
func TestAFolderThatIsOpenIsGone(t *testing.T) {
	t.Parallel()
	mount := root(t)
	dir := filepath.Join(t.TempDir(), "folder")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	f, err := Find(mount, []string{dir}, nil)
	if err != nil {
		t.Fatal(err)
	}
	open, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	if gone, err := f.Gone(); !gone || err != nil {
		t.Errorf("%v, %v", gone, err)
	}
	if err := open.Close(); err != nil {
		t.Error(err)
	}
}

func TestUnknown(t *testing.T) {
	t.Parallel()
	dir := root(t)
	none, link := filepath.Join(dir, "none"), filepath.Join(dir, "link")
	if err := os.Symlink(t.TempDir(), link); err != nil {
		t.Fatal(err)
	}
	for name, find := range map[string]func() (Folders, error){
		"no folder":             func() (Folders, error) { return Find(dir, nil, nil) },
		"one is gone before":    func() (Folders, error) { return Find(dir, []string{dir}, []string{none}) },
		"on another filesystem": func() (Folders, error) { return Find(dir, []string{"/proc"}, nil) },
		"without handles":       func() (Folders, error) { return Find("/proc", []string{"/proc/self"}, nil) },
		"no mount":              func() (Folders, error) { return Find(none, []string{dir}, nil) },
	} {
		if f, err := find(); !errors.Is(err, ErrUnknown) || len(f.handles) > 0 {
			t.Errorf("%s: %+v, %v", name, f, err)
		}
	}
	f, err := Find(dir, nil, []string{link})
	if err != nil {
		t.Fatal(err)
	}
	if empty, err := f.Gone(); empty || !errors.Is(err, ErrUnknown) {
		t.Errorf("a link is told to be an empty folder: %v, %v", empty, err)
	}
	if empty, err := (Folders{}).Gone(); empty || err == nil {
		t.Errorf("nothing is told to be empty: %v, %v", empty, err)
	}
}

func TestSettles(t *testing.T) {
	t.Parallel()
	if wait, ok := Settles("xfs"); !ok || wait < time.Second {
		t.Errorf("xfs: %s, %v", wait, ok)
	}
	if _, ok := Settles("btrfs"); ok {
		t.Error("btrfs frees at the end of a transaction, and it is not known when that is")
	}
}
