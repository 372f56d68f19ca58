package fanotify

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/janitor"
	"github.com/cleave-cri/cleave/lab/need"
)

func TestMain(m *testing.M) {
	janitor.Main()
	os.Exit(m.Run())
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// container is an overlay with its upper folder on a disk of its own.
type container struct {
	disk string
	// upper is where its writes end up, root what it sees.
	upper, root string
	// other is a folder of somebody else, fence one that orders: when its event has
	// been read, all before it have.
	other, fence string
	w            *Watcher
	fences       int
}

var (
	owner  = Owner{"container", "a"}
	other  = Owner{"container", "b"}
	fenced = Owner{"test", "fence"}
)

func newContainer(t *testing.T, fs disk.FS) *container {
	t.Helper()
	need.Loop(t)
	need.Tools(t, "mkfs."+string(fs))
	run := need.Lab(t)
	d, err := disk.Make(t.Context(), run.Dir(), disk.Spec{Name: "d", SizeBytes: 512 << 20, FS: fs})
	must(t, err)
	c := &container{disk: d.Path()}
	lower, work := filepath.Join(c.disk, "lower"), filepath.Join(c.disk, "a", "work")
	c.upper, c.other, c.fence = filepath.Join(c.disk, "a", "fs"), filepath.Join(c.disk, "b"), filepath.Join(c.disk, "fence")
	c.root = filepath.Join(run.Dir(), "root")
	for _, dir := range []string{filepath.Join(lower, "etc"), c.upper, work, c.other, c.fence, c.root} {
		must(t, os.MkdirAll(dir, 0o755))
	}
	must(t, os.WriteFile(filepath.Join(lower, "etc", "passwd"), make([]byte, 5000), 0o600))
	must(t, unix.Mount("overlay", c.root, "overlay", 0, fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", lower, c.upper, work)))
	t.Cleanup(func() {
		if err := unix.Unmount(c.root, 0); err != nil {
			t.Errorf("unmount %s: %v", c.root, err)
		}
	})
	c.w, err = Watch(c.disk)
	must(t, err)
	t.Cleanup(c.w.Close)
	c.w.SetFolders(map[string]Owner{filepath.Join(c.disk, "a"): owner, c.other: other, c.fence + "/": fenced})
	return c
}

// run reads events until the test ends.
func (c *container) run(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- c.w.Run(ctx) }()
	t.Cleanup(func() { // before the disk goes
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
		if _, ok := c.w.Written(owner.Kind, owner.ID); ok {
			t.Error("a watch that has ended still gives hints")
		}
	})
}

// settled waits until everything before has been read, and gives the owner's
// counter.
func (c *container) settled(t *testing.T, of Owner) uint64 {
	t.Helper()
	c.fences++
	before, _ := c.w.Written(fenced.Kind, fenced.ID)
	must(t, os.Mkdir(filepath.Join(c.fence, strconv.Itoa(c.fences)), 0o755))
	deadline := time.NewTimer(time.Minute)
	defer deadline.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		if now, _ := c.w.Written(fenced.Kind, fenced.ID); now != before {
			n, ok := c.w.Written(of.Kind, of.ID)
			if !ok {
				t.Fatalf("%v has no counter", of)
			}
			return n
		}
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatal("a folder that was made has not been reported in a minute")
		}
	}
}

// TestWhatAContainerDoesIsReported: through its overlay, to its owner and to nobody
// else; and what is not reported, which is why this is a hint.
func TestWhatAContainerDoesIsReported(t *testing.T) {
	t.Parallel()
	for _, fs := range []disk.FS{disk.Ext4, disk.XFS} {
		t.Run(string(fs), func(t *testing.T) {
			t.Parallel()
			c := newContainer(t, fs)
			c.run(t)
			in := func(names ...string) string { return filepath.Join(append([]string{c.root}, names...)...) }
			var open *os.File
			for _, step := range []struct {
				name string
				do   func() error
				// silent: no event is made. needs is the least kernel for one.
				silent bool
				needs  [2]int
			}{
				{"make a file", func() error { return os.WriteFile(in("f"), []byte("x"), 0o600) }, false, [2]int{}},
				{"append to it", func() error {
					f, err := os.OpenFile(in("f"), os.O_WRONLY|os.O_APPEND, 0)
					if err != nil {
						return err
					}
					_, err = f.WriteString("y")
					return errors.Join(err, f.Close())
				}, false, [2]int{6, 5}},
				{"read it", func() error { _, err := os.ReadFile(in("f")); return err }, true, [2]int{}},
				{"make folders", func() error { return os.MkdirAll(in("d", "e"), 0o755) }, false, [2]int{}},
				{"make a file below", func() error { return os.WriteFile(in("d", "e", "f"), nil, 0o600) }, false, [2]int{}},
				{"rename a folder", func() error { return os.Rename(in("d"), in("g")) }, false, [2]int{}},
				{"remove a file below", func() error { return os.Remove(in("g", "e", "f")) }, false, [2]int{}},
				{"remove folders", func() error { return os.RemoveAll(in("g")) }, false, [2]int{}},
				{"copy up", func() error { return os.Chmod(in("etc", "passwd"), 0o644) }, false, [2]int{}},
				{"hide a file of the image", func() error { return os.Remove(in("etc", "passwd")) }, false, [2]int{}},
				{"open a file", func() (err error) {
					open, err = os.OpenFile(in("f"), os.O_RDWR, 0)
					return err
				}, true, [2]int{}},
				{"write without closing", func() error { _, err := open.WriteString("zz"); return err }, true, [2]int{}},
				{"store into it, mapped", func() error {
					if err := open.Truncate(1 << 20); err != nil {
						return err
					}
					memory, err := syscall.Mmap(int(open.Fd()), 0, 1<<20, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
					if err != nil {
						return err
					}
					for at := 0; at < len(memory); at += os.Getpagesize() {
						memory[at] = 1
					}
					return errors.Join(unix.Msync(memory, unix.MS_SYNC), syscall.Munmap(memory))
				}, true, [2]int{}},
				{"close it", func() error { return open.Close() }, false, [2]int{6, 5}},
			} {
				if !need65(step.needs) {
					t.Logf("%s: not before Linux %v", step.name, step.needs)
					must(t, step.do())
					continue
				}
				before, beforeOther := c.settled(t, owner), c.settled(t, other)
				must(t, step.do())
				after, afterOther := c.settled(t, owner), c.settled(t, other)
				if moved := before != after; moved == step.silent {
					t.Errorf("%s: the counter went from %d to %d, want moved = %t", step.name, before, after, !step.silent)
				}
				if beforeOther != afterOther {
					t.Errorf("%s: somebody else's counter went from %d to %d", step.name, beforeOther, afterOther)
				}
			}
			if s := c.w.Stats(); s.Overflows != 0 || s.Events == 0 || s.Lookups == 0 || s.Lookups > s.Events {
				t.Errorf("stats = %+v", s)
			}
		})
	}
}

// need65 says whether the kernel has at least a version.
func need65(version [2]int) bool {
	var name unix.Utsname
	if unix.Uname(&name) != nil {
		return false
	}
	var major, minor int
	if _, err := fmt.Sscanf(unix.ByteSliceToString(name.Release[:]), "%d.%d", &major, &minor); err != nil {
		return false
	}
	return major > version[0] || major == version[0] && minor >= version[1]
}

// TestOwnersComeAndMove: a folder that moves from one owner to another takes its
// events along, and one whose owner is gone has nobody's.
func TestOwnersComeAndMove(t *testing.T) {
	t.Parallel()
	c := newContainer(t, disk.Ext4)
	c.run(t)
	write := func(path string) {
		t.Helper()
		must(t, os.WriteFile(path, nil, 0o600))
	}
	must(t, os.MkdirAll(filepath.Join(c.disk, "a", "d", "e"), 0o755))
	write(filepath.Join(c.disk, "a", "d", "e", "f"))
	a := c.settled(t, owner)
	must(t, os.Rename(filepath.Join(c.disk, "a", "d"), filepath.Join(c.other, "d")))
	if n := c.settled(t, owner); n == a {
		t.Error("the one that lost a folder was not told")
	}
	a, b := c.settled(t, owner), c.settled(t, other)
	write(filepath.Join(c.other, "d", "e", "g"))
	if n := c.settled(t, other); n == b {
		t.Error("a file in a folder that had moved was not told to its new owner")
	}
	if n := c.settled(t, owner); n != a {
		t.Error("a file in a folder that had moved was told to its old owner")
	}

	c.w.SetFolders(map[string]Owner{filepath.Join(c.other, "d", "e"): owner, c.other: other, c.fence: fenced})
	a, b = c.settled(t, owner), c.settled(t, other)
	write(filepath.Join(c.other, "d", "e", "h"))
	if n := c.settled(t, owner); n == a {
		t.Error("a file in the inner of two folders was not told to its owner")
	}
	if n := c.settled(t, other); n != b {
		t.Error("a file in the inner of two folders was told to the outer one's owner")
	}
	c.w.SetFolders(map[string]Owner{c.fence: fenced})
	if _, ok := c.w.Written(owner.Kind, owner.ID); ok {
		t.Error("an owner without folders still has a counter")
	}
	before := c.w.Stats().Others
	write(filepath.Join(c.other, "d", "e", "i"))
	c.settled(t, fenced)
	if c.w.Stats().Others == before {
		t.Error("what happens to nobody's files is not counted as that")
	}
}

// TestOverflow: more happens than the kernel has room for before anybody reads; all
// count as having written.
func TestOverflow(t *testing.T) {
	t.Parallel()
	content, err := os.ReadFile("/proc/sys/fs/fanotify/max_queued_events")
	must(t, err)
	room, err := strconv.Atoi(strings.TrimSpace(string(content)))
	must(t, err)
	if room > 50_000 {
		t.Skipf("the kernel keeps %d events: making more takes too long", room)
	}
	c := newContainer(t, disk.Ext4)
	b, _ := c.w.Written(other.Kind, other.ID)
	// Events in different folders are not made one.
	file := filepath.Join(c.upper, "f")
	must(t, os.WriteFile(file, nil, 0o600))
	for i := range room + 100 {
		folder := filepath.Join(c.upper, strconv.Itoa(i))
		must(t, os.Mkdir(folder, 0o755))
		must(t, os.Rename(file, filepath.Join(folder, "f")))
		file = filepath.Join(folder, "f")
	}
	c.run(t)
	deadline := time.NewTimer(2 * time.Minute)
	defer deadline.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for c.w.Stats().Overflows == 0 {
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatalf("no overflow was told: %+v", c.w.Stats())
		}
	}
	if n := c.settled(t, other); n == b {
		t.Error("after an overflow one that may have written does not count as such")
	}
}

// TestNotSupported: an overlay can't be watched as a filesystem (CTD-122), and
// says so.
func TestNotSupported(t *testing.T) {
	t.Parallel()
	c := newContainer(t, disk.Ext4)
	_, err := Watch(c.root)
	if !errors.Is(err, ErrNotSupported) || !strings.Contains(err.Error(), c.root) {
		t.Errorf("error %v, want ErrNotSupported, and where", err)
	}
	if _, err := Watch(filepath.Join(c.root, "none")); !errors.Is(err, os.ErrNotExist) || errors.Is(err, ErrNotSupported) {
		t.Errorf("error %v, want that it does not exist", err)
	}
}

func TestOwnerOf(t *testing.T) {
	t.Parallel()
	folders := []folder{{"/a", owner}, {"/a/b", other}, {"/ab", fenced}}
	for path, want := range map[string]place{
		"/a": {owner, true}, "/a/": {owner, true}, "/a/c": {owner, true}, "/a/b": {other, true}, "/a/b/c/d": {other, true}, "/a/bc": {owner, true},
		"/ab/c": {fenced, true}, "/abc": {}, "/": {}, "": {}, "a": {}, "/c/a/b": {},
	} {
		if got := ownerOf(folders, path); got != want {
			t.Errorf("%q: %+v, want %+v", path, got, want)
		}
	}
}

// FuzzParseEvent: whatever the bytes, it ends, within them, and goes on.
func FuzzParseEvent(f *testing.F) {
	good := []byte{44, 0, 0, 0, 3, 0, 24, 0, 0, 1, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255, 0, 0, 0, 0, 3, 0, 20, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0, 1, 0, 0, 0}
	f.Add(good)
	f.Add(append(good[:len(good):len(good)], good...))
	f.Add(good[:43])
	f.Fuzz(func(t *testing.T, b []byte) {
		for rest := b; len(rest) > 0; {
			e, size, ok := parseEvent(rest)
			if !ok {
				return
			}
			if size < 24 || size > len(rest) || len(e.handle) > size {
				t.Fatalf("size %d of %d, handle of %d bytes", size, len(rest), len(e.handle))
			}
			rest = rest[size:]
		}
	})
}

func TestParseEvent(t *testing.T) {
	t.Parallel()
	b := []byte{
		46, 0, 0, 0, 3, 0, 24, 0, 0x80, 0, 0, 0x40, 0, 0, 0, 0, 255, 255, 255, 255, 9, 0, 0, 0, // moved to, a directory
		3, 0, 22, 0, 1, 2, 3, 4, 5, 6, 7, 8, 2, 0, 0, 0, 1, 0, 0, 0, 7, 8,
	}
	e, size, ok := parseEvent(append(b, 1, 2))
	want := event{moved: true, directory: true, handle: []byte{2, 0, 0, 0, 1, 0, 0, 0, 7, 8}}
	if diff := cmp.Diff(want, e, cmp.AllowUnexported(event{})); diff != "" || size != 46 || !ok {
		t.Errorf("size %d, ok %t (-want +got):\n%s", size, ok, diff)
	}
	for cut := range b {
		if _, _, ok := parseEvent(b[:cut]); ok {
			t.Errorf("%d of %d bytes are an event", cut, len(b))
		}
	}
}
