package rootbind

import (
	"bufio"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/janitor"
	"github.com/cleave-cri/cleave/lab/need"
)

func TestMain(m *testing.M) {
	janitor.Main()
	os.Exit(m.Run())
}

// bench is a folder of roots and a disk with writable layers.
type bench struct {
	*Roots
	disk *disk.Disk
}

func newBench(t *testing.T) *bench {
	t.Helper()
	need.Loop(t)
	run := need.Lab(t)
	d, err := disk.Make(t.Context(), run.Dir(), disk.Spec{Name: "containers", SizeBytes: 32 << 20})
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{Roots: open(t, filepath.Join(run.Dir(), "roots")), disk: d}
	return b
}

func open(t *testing.T, path string) *Roots {
	t.Helper()
	r, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() }) //nolint:errcheck // it may be closed
	return r
}

// layer makes a writable layer with one file.
func (b *bench) layer(t *testing.T, name string) string {
	t.Helper()
	upper := filepath.Join(b.disk.Path(), name, "fs")
	if err := os.MkdirAll(upper, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(upper, "file"), []byte(name), 0o600); err != nil {
		t.Fatal(err)
	}
	return upper
}

func (b *bench) bind(t *testing.T, id, upper string) string {
	t.Helper()
	root, err := b.Bind(id, upper)
	if err != nil {
		t.Fatal(err)
	}
	return root
}

func read(t *testing.T, path string) string {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return string(content)
}

// mounts are the mounts below a folder: where, and what else mountinfo says before
// the dash.
func mounts(t *testing.T, below string) map[string]string {
	t.Helper()
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close() //nolint:errcheck // read only
	found := map[string]string{}
	for lines := bufio.NewScanner(f); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		if inside, err := filepath.Rel(below, fields[4]); err == nil && inside != ".." && !strings.HasPrefix(inside, "../") {
			options, _, _ := strings.Cut(strings.Join(fields[5:], " "), " - ")
			found[inside] = options
		}
	}
	return found
}

func TestUpperFolderIsKnownAsDiff(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	upper := b.layer(t, "1")
	root := b.bind(t, "c1", upper)
	diff := filepath.Join(root, "diff")
	info, err := os.Lstat(diff)
	if err != nil || !info.IsDir() {
		t.Fatalf("%s is no folder: %v, %v", diff, info, err)
	}
	want, err := os.Stat(upper)
	if err != nil || !os.SameFile(info, want) {
		t.Errorf("it is not the upper folder: %v", err)
	}
	// What the container writes now is seen, and nobody writes by this name.
	if err := os.WriteFile(filepath.Join(upper, "new"), []byte("new"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := read(t, filepath.Join(diff, "new")); got != "new" {
		t.Errorf("a new file has %q", got)
	}
	if err := os.WriteFile(filepath.Join(diff, "other"), nil, 0o600); !errors.Is(err, syscall.EROFS) {
		t.Errorf("a write: %v", err)
	}
	// A second time, and for another layer.
	if again := b.bind(t, "c1", upper); again != root || root != b.Path("c1") {
		t.Errorf("roots %s and %s", root, again)
	}
	b.bind(t, "c1", b.layer(t, "2"))
	if got := read(t, filepath.Join(diff, "file")); got != "2" {
		t.Errorf("the new layer's file has %q", got)
	}
	got := mounts(t, b.path)
	for place, options := range got {
		if !strings.Contains(options, "unbindable") || strings.Contains(options, "shared:") {
			t.Errorf("%s can get elsewhere: %s", place, options)
		}
	}
	if options := got["c1/diff"]; len(got) != 2 || !strings.HasPrefix(options, "ro,nosuid,nodev,noexec") {
		t.Errorf("mounts %v", got)
	}
}

// The layer stays, and its disk is free.
func TestRemove(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	upper := b.layer(t, "1")
	b.bind(t, "c1", upper)
	for range 2 {
		if err := b.Remove("c1"); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := os.Lstat(b.Path("c1")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the root is still there: %v", err)
	}
	if got := read(t, filepath.Join(upper, "file")); got != "1" {
		t.Errorf("the layer's file has %q", got)
	}
	if err := b.disk.Close(t.Context()); err != nil {
		t.Errorf("the disk is in use: %v", err)
	}
}

// After a crash the next one finds all roots, those of containers that have gone
// meanwhile go, and the others are where they were.
func TestTidyAfterACrash(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	for _, id := range []string{"gone", "here", "lost"} {
		b.bind(t, id, b.layer(t, id))
	}
	// One that died halfway: a root without a mount.
	if err := os.MkdirAll(filepath.Join(b.path, "half", "diff"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	next := open(t, b.path)
	if list, err := next.List(); err != nil || !cmp.Equal(list, []string{"gone", "half", "here", "lost"}) {
		t.Fatalf("found %v, %v", list, err)
	}
	removed, err := next.Tidy(func(id string) bool { return id == "here" })
	if err != nil || !cmp.Equal(removed, []string{"gone", "half", "lost"}) {
		t.Errorf("removed %v, %v", removed, err)
	}
	if got := read(t, filepath.Join(next.Path("here"), "diff", "file")); got != "here" {
		t.Errorf("the one that is here has %q", got)
	}
	if got := mounts(t, b.path); len(got) != 2 {
		t.Errorf("mounts %v, want the folder's and one", got)
	}
	for _, id := range []string{"gone", "here", "lost"} {
		if got := read(t, filepath.Join(b.disk.Path(), id, "fs", "file")); got != id {
			t.Errorf("the layer of %s has %q", id, got)
		}
	}
	if err := next.Clear(); err != nil {
		t.Fatal(err)
	}
	if got := mounts(t, b.path); len(got) != 0 {
		t.Errorf("mounts %v", got)
	}
	if _, err := os.Lstat(b.path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the folder is still there: %v", err)
	}
}

// What somebody else put into the folder is not deleted, not followed and not
// unmounted, and it does not hold up the rest.
func TestOthersThingsStay(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	precious := b.layer(t, "precious")
	b.bind(t, "gone", b.layer(t, "gone"))
	for _, name := range []string{"full", "full/diff", "mount", "linked"} {
		if err := os.Mkdir(filepath.Join(b.path, name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(b.path, "full", "diff", "file"), []byte("theirs"), 0o600); err != nil {
		t.Fatal(err)
	}
	for link, to := range map[string]string{"link": filepath.Dir(precious), "linked/diff": precious, "not an id": precious} {
		if err := os.Symlink(to, filepath.Join(b.path, link)); err != nil {
			t.Fatal(err)
		}
	}
	if err := syscall.Mount(b.disk.Path(), filepath.Join(b.path, "mount"), "", syscall.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	removed, err := b.Tidy(func(string) bool { return false })
	if !cmp.Equal(removed, []string{"gone"}) || err == nil {
		t.Errorf("removed %v, %v", removed, err)
	}
	for _, name := range []string{"full", "link", "linked", "mount"} {
		if err == nil || !strings.Contains(err.Error(), filepath.Join(b.path, name)) {
			t.Errorf("nothing is said of %s: %v", name, err)
		}
	}
	if got := read(t, filepath.Join(b.path, "full", "diff", "file")); got != "theirs" {
		t.Errorf("their file has %q", got)
	}
	if got := read(t, filepath.Join(precious, "file")); got != "precious" {
		t.Errorf("the file behind a link has %q", got)
	}
	if got := mounts(t, b.path); got["mount"] == "" || len(got) != 2 {
		t.Errorf("mounts %v, want theirs and the folder's", got)
	}
	if _, err := b.Bind("linked", precious); err == nil {
		t.Error("a root with a symlink for its diff was bound")
	}
}

// Mounts on top of ours go with it: they would hide that the root is gone.
func TestMountedOver(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	root := b.bind(t, "c1", b.layer(t, "1"))
	for range 3 {
		if err := syscall.Mount(b.disk.Path(), filepath.Join(root, "diff"), "", syscall.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
	}
	b.bind(t, "c1", b.layer(t, "1"))
	if got := read(t, filepath.Join(root, "diff", "file")); got != "1" {
		t.Errorf("the layer's file has %q", got)
	}
	if got := mounts(t, b.path); len(got) != 2 {
		t.Errorf("mounts %v", got)
	}
}

func TestBadArguments(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	upper := b.layer(t, "1")
	for _, id := range []string{"", ".", "..", "a/b", "../x", "/", "a\x00b", "-a", "a..b", strings.Repeat("a", idMax+1)} {
		if _, err := b.Bind(id, upper); !errors.Is(err, ErrID) {
			t.Errorf("Bind(%q): %v", id, err)
		}
		if err := b.Remove(id); !errors.Is(err, ErrID) {
			t.Errorf("Remove(%q): %v", id, err)
		}
	}
	link := filepath.Join(b.disk.Path(), "link")
	if err := os.Symlink(upper, link); err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{link, filepath.Join(upper, "file"), filepath.Join(upper, "missing"), ""} {
		if _, err := b.Bind("c1", bad); err == nil {
			t.Errorf("%q was bound", bad)
		}
	}
	if list, err := b.List(); err != nil || len(list) != 0 {
		t.Errorf("left behind: %v, %v", list, err)
	}
	if _, err := Open(filepath.Join(upper, "file")); err == nil {
		t.Error("a file was opened as the folder of roots")
	}
}
