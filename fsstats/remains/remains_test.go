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
	f, err := Find(dir, []string{dir})
	if err != nil {
		need.Skip(t, "needs a temporary folder on a filesystem that gives handles: %v", err)
	}
	if _, err := f.Emptied(); err != nil {
		need.Skip(t, "needs to open files by handle, as root may: %v", err)
	}
	return dir
}

func TestEmptied(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		change func(dir string) error
		want   bool
	}{
		"it is gone":       {os.RemoveAll, true},
		"folders are left": {func(dir string) error { return os.Remove(filepath.Join(dir, "a/b/file")) }, true},
		"all is left":      {func(string) error { return nil }, false},
		// The split snapshotter and the kubelet do so before they delete.
		"it is renamed": {func(dir string) error { return os.Rename(dir, dir+".deleting") }, false},
		"it is renamed and deleted": {func(dir string) error {
			return errors.Join(os.Rename(dir, dir+".deleting"), os.RemoveAll(dir+".deleting"))
		}, true},
		"another of that name": {func(dir string) error {
			return errors.Join(os.RemoveAll(dir), write(filepath.Join(dir, "file")))
		}, true},
		"a link is left": {func(dir string) error {
			return errors.Join(os.RemoveAll(filepath.Join(dir, "a")), os.Symlink("/", filepath.Join(dir, "a")))
		}, false},
		"more than is looked at": {func(dir string) error {
			err := os.RemoveAll(filepath.Join(dir, "a"))
			for i := range mostEntries {
				err = errors.Join(err, os.Mkdir(filepath.Join(dir, fmt.Sprint(i)), 0o700))
			}
			return err
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			mount, other := root(t), t.TempDir()
			dir := filepath.Join(t.TempDir(), "folder")
			if err := write(filepath.Join(dir, "a/b/file")); err != nil {
				t.Fatal(err)
			}
			f, err := Find(mount, []string{other, dir, "/proc"}) // what is on another filesystem is no matter
			if err != nil || len(f.handles) != 2 {
				t.Fatalf("%d folders are found, want 2: %v", len(f.handles), err)
			}
			if empty, err := f.Emptied(); empty || err != nil {
				t.Fatalf("before anything goes: %v, %v", empty, err)
			}
			if err := tc.change(dir); err != nil {
				t.Fatal(err)
			}
			if got, err := f.Emptied(); got != tc.want || err != nil {
				t.Errorf("emptied: %v, %v, want %v", got, err, tc.want)
			}
		})
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
		"no folder":             func() (Folders, error) { return Find(dir, nil) },
		"one is gone before":    func() (Folders, error) { return Find(dir, []string{dir, none}) },
		"on another filesystem": func() (Folders, error) { return Find(dir, []string{"/proc"}) },
		"without handles":       func() (Folders, error) { return Find("/proc", []string{"/proc/self"}) },
		"no mount":              func() (Folders, error) { return Find(none, []string{dir}) },
	} {
		if f, err := find(); !errors.Is(err, ErrUnknown) || len(f.handles) > 0 {
			t.Errorf("%s: %+v, %v", name, f, err)
		}
	}
	f, err := Find(dir, []string{link})
	if err != nil {
		t.Fatal(err)
	}
	if empty, err := f.Emptied(); empty || !errors.Is(err, ErrUnknown) {
		t.Errorf("a link is told to be an empty folder: %v, %v", empty, err)
	}
	if empty, err := (Folders{}).Emptied(); empty || err == nil {
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
