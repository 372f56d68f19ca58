package walk

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

func makeDir(t *testing.T, path string) {
	t.Helper()
	must(t, os.MkdirAll(path, 0o755))
}

func paths(list []Holding) (out []string) {
	for _, h := range list {
		out = append(out, h.Path)
	}
	return out
}

// What takes most is named, and not the folders above it that only hold it.
func TestFindLargest(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	makeDir(t, filepath.Join(root, "a", "b", "cache"))
	for i := range 20 {
		write(t, filepath.Join(root, "a", "b", "cache", fmt.Sprintf("piece%02d", i)), 100<<10)
	}
	makeDir(t, filepath.Join(root, "dump"))
	write(t, filepath.Join(root, "dump", "core"), 5<<20)
	write(t, filepath.Join(root, "dump", "readme"), 10)
	must(t, os.Link(filepath.Join(root, "dump", "core"), filepath.Join(root, "a", "core again")))
	outside := t.TempDir()
	write(t, filepath.Join(outside, "secret"), 9<<20)
	must(t, os.Symlink(outside, filepath.Join(root, "a", "way out")))
	must(t, os.WriteFile(filepath.Join(root, "a", "odd\xff\nname"), make([]byte, 300<<10), 0o600))

	got, err := FindLargest(t.Context(), root, Options{Workers: 2}, ByBytes, 3)
	must(t, err)
	bytes, inodes := du(t, root)
	if got.Bytes != bytes || got.Inodes != inodes {
		t.Errorf("%d bytes, %d inodes; du has %d and %d", got.Bytes, got.Inodes, bytes, inodes)
	}
	if len(got.Files) != 3 {
		t.Fatalf("files: %v", got.Files)
	}
	// The file with two names counts where it is found first.
	if got.Files[0].Path != "/dump/core" && got.Files[0].Path != "/a/core again" || got.Files[0].Bytes < 5<<20 {
		t.Errorf("largest file: %+v", got.Files[0])
	}
	if got.Files[1].Path != "/a/odd\xff\nname" {
		t.Errorf("second file: %q", got.Files[1].Path)
	}
	folders := paths(got.Folders)
	if !slices.Contains(folders, "/a/b/cache") {
		t.Errorf("folders: %q, without the one with the pieces", folders)
	}
	for _, dull := range []string{"", "/", "/a/b"} {
		if slices.Contains(folders, dull) {
			t.Errorf("folders: %q, with one that only holds another", folders)
		}
	}
	for _, h := range slices.Concat(got.Folders, got.Files) {
		if strings.Contains(h.Path, "secret") || strings.Contains(h.Path, "way out") {
			t.Errorf("a symlink was followed: %+v", h)
		}
	}
	for _, list := range [][]Holding{got.Folders, got.Files} {
		if !slices.IsSortedFunc(list, func(a, b Holding) int { return int(b.Bytes - a.Bytes) }) {
			t.Errorf("not the largest first: %+v", list)
		}
	}
}

// Each folder is as large as du says, also below the depth to which directories are kept open.
func TestFindLargestFoldersAreAsDuSays(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	path := root
	for i := range maxOpen + 8 {
		path = filepath.Join(path, "d")
		makeDir(t, path)
		for j := range i % 4 { // none of them is nearly all of the one above
			write(t, filepath.Join(path, fmt.Sprint(j)), 20<<10)
		}
		makeDir(t, filepath.Join(path, "side"))
		write(t, filepath.Join(path, "side", "file"), 8<<10*(i+1))
		write(t, filepath.Join(path, "side", "more"), 8<<10*(i+1))
	}
	got, err := FindLargest(t.Context(), root, Options{}, ByBytes, mostHoldings)
	must(t, err)
	if len(got.Folders) < maxOpen {
		t.Fatalf("only %d folders", len(got.Folders))
	}
	for _, h := range got.Folders {
		at := filepath.Join(root, h.Path)
		if strings.Contains(h.Path, "…") {
			t.Fatalf("too deep for this test: %s", h.Path)
		}
		if bytes, inodes := du(t, at); h.Bytes != bytes || h.Inodes != inodes {
			t.Errorf("%s: %d bytes, %d inodes; du has %d and %d", h.Path, h.Bytes, h.Inodes, bytes, inodes)
		}
	}
}

func TestFindLargestByInodes(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	makeDir(t, filepath.Join(root, "many", "small"))
	for i := range 50 {
		write(t, filepath.Join(root, "many", "small", fmt.Sprint(i)), 0)
	}
	makeDir(t, filepath.Join(root, "few"))
	write(t, filepath.Join(root, "few", "large"), 1<<20)
	got, err := FindLargest(t.Context(), root, Options{}, ByInodes, 2)
	must(t, err)
	want := []Holding{{Path: "/many/small", Inodes: 51}, {Path: "/few", Inodes: 2}}
	for i := range got.Folders {
		got.Folders[i].Bytes = 0
	}
	if diff := cmp.Diff(want, got.Folders); diff != "" {
		t.Error(diff)
	}
	if len(got.Files) > 0 {
		t.Errorf("files are listed: %v", got.Files)
	}
}

// endingLister ends the walk after some entries.
type endingLister struct {
	kernelLister
	left   int
	cancel context.CancelFunc
}

func (l *endingLister) statAt(at int, name *byte, a *attributes) error {
	if l.left--; l.left == 0 {
		l.cancel()
	}
	return l.kernelLister.statAt(at, name, a)
}

// What was found until a walk is broken off is told, and that it is not all.
func TestFindLargestBrokenOff(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	makeDir(t, filepath.Join(root, "a", "b"))
	for i := range 2000 {
		write(t, filepath.Join(root, "a", "b", fmt.Sprint(i)), 4096)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	got, err := findLargest(ctx, root, Options{}, ByBytes, 10, &endingLister{left: 700, cancel: cancel})
	if !errors.Is(err, context.Canceled) || !got.Partial {
		t.Fatalf("%+v, %v: not told that it is partial", got, err)
	}
	if len(got.Files) != 10 || len(got.Folders) != 1 || got.Folders[0].Path != "/a/b" || got.Folders[0].Inodes < 100 || got.Folders[0].Inodes > 1000 {
		t.Errorf("folders %+v, %d files", got.Folders, len(got.Files))
	}
}

func TestFindLargestOfNothing(t *testing.T) {
	t.Parallel()
	if _, err := FindLargest(t.Context(), filepath.Join(t.TempDir(), "none"), Options{}, ByBytes, 10); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v", err)
	}
	if _, err := FindLargest(t.Context(), t.TempDir(), Options{}, ByBytes, mostHoldings+1); err == nil {
		t.Error("any number can be asked for")
	}
}

// A folder that can't be read is told, and what else there is is found.
func TestFindLargestUnreadable(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	makeDir(t, filepath.Join(root, "good"))
	write(t, filepath.Join(root, "good", "file"), 64<<10)
	makeDir(t, filepath.Join(root, "bad"))
	got, err := findLargest(t.Context(), root, Options{}, ByBytes, 10, failingOn{"bad"})
	must(t, err)
	if !got.Partial || got.Unreadable != 1 {
		t.Errorf("%+v: nothing is said of what can't be read", got.Usage)
	}
	if diff := cmp.Diff([]string{"/good/file"}, paths(got.Files)); diff != "" {
		t.Error(diff)
	}
}

// failingOn can't look at entries of a name.
type failingOn struct{ name string }

func (f failingOn) readDir(fd int, buffer []byte) (int, error) {
	return kernelLister{}.readDir(fd, buffer)
}

func (f failingOn) statAt(at int, name *byte, a *attributes) error {
	err := kernelLister{}.statAt(at, name, a)
	if err == nil && a.isDir && unix.BytePtrToString(name) == f.name {
		return os.ErrPermission
	}
	return err
}
