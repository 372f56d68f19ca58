package walk

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"github.com/cleave-cri/cleave/fsstats/pace"
	"github.com/cleave-cri/cleave/lab/need"
)

// du gives what du(1) says of path: bytes allocated and inodes.
func du(t testing.TB, path string) (bytesUsed, inodes int64) {
	t.Helper()
	ask := func(args ...string) int64 {
		out, err := exec.Command("du", append(args, "-s", "-x", path)...).Output()
		if err != nil {
			t.Fatal(err)
		}
		n, err := strconv.ParseInt(strings.Fields(string(out))[0], 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	return ask("--block-size=1"), ask("--inodes")
}

// findCount is what `find path -xdev | wc -l` says, for any file names.
func findCount(t testing.TB, path string) int64 {
	t.Helper()
	out, err := exec.Command("find", path, "-xdev", "-printf", "x").Output()
	if err != nil {
		t.Fatal(err)
	}
	return int64(len(out))
}

// measureTree measures with one worker and with two, which must give the same.
func measureTree(t testing.TB, path string) Usage {
	t.Helper()
	one, err := Measure(t.Context(), path, Options{})
	must(t, err)
	two, err := Measure(t.Context(), path, Options{Workers: 2})
	must(t, err)
	ignored := cmpopts.IgnoreFields(Usage{}, "Started", "Finished", "Errors")
	if diff := cmp.Diff(one, two, ignored); diff != "" {
		t.Errorf("%s with two workers (-one +two):\n%s", path, diff)
	}
	return one
}

func write(t testing.TB, path string, size int) {
	t.Helper()
	if err := os.WriteFile(path, bytes.Repeat([]byte{'x'}, size), 0o600); err != nil {
		t.Fatal(err)
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// tempDir is t.TempDir for trees that os.RemoveAll may find too deep.
func tempDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "walk")
	must(t, err)
	t.Cleanup(func() {
		if out, err := exec.Command("rm", "-rf", dir).CombinedOutput(); err != nil {
			t.Errorf("remove %s: %v\n%s", dir, err, out)
		}
	})
	return dir
}

// makeChain makes directories one in another, each called name, with one file of
// 10 bytes in each.
func makeChain(t testing.TB, root, name string, levels int) {
	t.Helper()
	at, err := unix.Open(root, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	must(t, err)
	for range levels {
		must(t, unix.Mkdirat(at, name, 0o755))
		next, err := unix.Openat(at, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		must(t, err)
		file, err := unix.Openat(next, "file", unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o600)
		must(t, err)
		_, err = unix.Write(file, []byte("0123456789"))
		must(t, err)
		must(t, unix.Close(file))
		must(t, unix.Close(at))
		at = next
	}
	must(t, unix.Close(at))
}

func TestMeasureEqualsDu(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		make func(t *testing.T, dir string)
		// hardLinks is by how many names find counts more than there are inodes.
		hardLinks int64
	}{
		{"empty", func(*testing.T, string) {}, 0},
		{"files and folders", func(t *testing.T, dir string) {
			for i := range 20 {
				sub := filepath.Join(dir, fmt.Sprint("sub", i), "deeper")
				must(t, os.MkdirAll(sub, 0o755))
				for j := range 30 {
					write(t, filepath.Join(sub, fmt.Sprint(j)), j*1000)
				}
			}
		}, 0},
		{"hard links in one folder and across", func(t *testing.T, dir string) {
			must(t, os.MkdirAll(filepath.Join(dir, "a", "b"), 0o755))
			write(t, filepath.Join(dir, "one"), 100_000)
			must(t, os.Link(filepath.Join(dir, "one"), filepath.Join(dir, "two")))
			must(t, os.Link(filepath.Join(dir, "one"), filepath.Join(dir, "a", "b", "three")))
			must(t, os.Symlink("/etc/passwd", filepath.Join(dir, "link")))
			must(t, os.Link(filepath.Join(dir, "link"), filepath.Join(dir, "a", "link")))
		}, 3},
		{"sparse", func(t *testing.T, dir string) {
			path := filepath.Join(dir, "sparse")
			write(t, path, 5000)
			must(t, os.Truncate(path, 1<<40))
		}, 0},
		{"symlinks are not followed", func(t *testing.T, dir string) {
			must(t, os.Symlink("/", filepath.Join(dir, "root")))
			must(t, os.Symlink(".", filepath.Join(dir, "self")))
			must(t, os.Symlink("nowhere", filepath.Join(dir, "dangling")))
			must(t, os.Symlink(strings.Repeat("long/", 400), filepath.Join(dir, "long")))
		}, 0},
		{"special files", func(t *testing.T, dir string) {
			must(t, unix.Mkfifo(filepath.Join(dir, "fifo"), 0o600))
			must(t, unix.Mknod(filepath.Join(dir, "socket"), unix.S_IFSOCK|0o600, 0))
			if os.Geteuid() == 0 { // a whiteout of overlayfs
				must(t, unix.Mknod(filepath.Join(dir, "whiteout"), unix.S_IFCHR, 0))
			}
		}, 0},
		{"names", func(t *testing.T, dir string) {
			for i, name := range []string{
				strings.Repeat("n", 255), "\xff\xfe not UTF-8", "new\nline", "-rf", " ", "...", "..x", ".x", "\x01", "ünï",
			} {
				write(t, filepath.Join(dir, name), 100)
				must(t, os.Mkdir(filepath.Join(dir, name[:len(name)-1]+strconv.Itoa(i%10)), 0o755))
			}
			sub := filepath.Join(dir, strings.Repeat("ö", 127))
			must(t, os.Mkdir(sub, 0o755))
			write(t, filepath.Join(sub, "file"), 10_000)
		}, 0},
		{"folder larger than one portion, with folders in it", func(t *testing.T, dir string) {
			for i := range 3000 {
				if i%3 == 0 {
					sub := filepath.Join(dir, fmt.Sprintf("folder-%08d", i))
					must(t, os.Mkdir(sub, 0o755))
					write(t, filepath.Join(sub, "x"), 1)
				} else {
					write(t, filepath.Join(dir, fmt.Sprintf("file-%08d", i)), 1)
				}
			}
		}, 0},
		{"extended attributes", func(t *testing.T, dir string) {
			path := filepath.Join(dir, "file")
			write(t, path, 1)
			if err := unix.Setxattr(path, "user.big", bytes.Repeat([]byte{'x'}, 3000), 0); err != nil {
				t.Skipf("no extended attributes here: %v", err)
			}
		}, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			tc.make(t, dir)
			got := measureTree(t, dir)
			wantBytes, wantInodes := du(t, dir)
			want := Usage{Bytes: wantBytes, Inodes: wantInodes, Started: got.Started, Finished: got.Finished}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("(-du +got):\n%s", diff)
			}
			if names := findCount(t, dir); got.Inodes != names-tc.hardLinks {
				t.Errorf("inodes = %d, find counts %d names of which %d are further links", got.Inodes, names, tc.hardLinks)
			}
			if got.Finished.Before(got.Started) || got.Started.IsZero() {
				t.Errorf("started %v, finished %v", got.Started, got.Finished)
			}
		})
	}
}

func TestRootMustBeADirectory(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, filepath.Join(dir, "file"), 1)
	must(t, os.Symlink(".", filepath.Join(dir, "link")))
	for _, tc := range []struct {
		name, root string
		want       error
	}{
		{"missing", filepath.Join(dir, "missing"), fs.ErrNotExist},
		{"file", filepath.Join(dir, "file"), unix.ENOTDIR},
		{"symlink", filepath.Join(dir, "link"), unix.ENOTDIR},
		{"zero byte in the name", "x\x00y", unix.EINVAL},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			u, err := Measure(t.Context(), tc.root, Options{})
			if !errors.Is(err, tc.want) {
				t.Errorf("error = %v, want %v", err, tc.want)
			}
			if err != nil && !strings.Contains(err.Error(), strconv.Quote(tc.root)) {
				t.Errorf("error %q does not name the root", err)
			}
			if !u.Partial || u.Inodes != 0 {
				t.Errorf("usage = %+v, want a partial one of nothing", u)
			}
		})
	}
}

func TestDeepTreeWithFewDescriptors(t *testing.T) {
	const levels = 4000
	dir := tempDir(t)
	makeChain(t, dir, "d", levels)
	// Branches on the way, so that directories have to be opened again.
	path := dir
	for range 200 {
		for i := range 3 {
			must(t, os.Mkdir(filepath.Join(path, fmt.Sprint("branch", i)), 0o755))
			write(t, filepath.Join(path, fmt.Sprint("branch", i), "file"), 10)
		}
		path = filepath.Join(path, "d")
	}
	wantBytes, wantInodes := du(t, dir)

	for workers := 1; workers <= 2; workers++ {
		walkWithFewDescriptors(t, dir, workers, wantBytes, wantInodes)
	}
}

func walkWithFewDescriptors(t *testing.T, dir string, workers int, wantBytes, wantInodes int64) {
	t.Helper()
	before := descriptors(t)
	synctest.Test(t, func(t *testing.T) {
		done := make(chan struct{})
		most := 0
		var watch sync.WaitGroup
		watch.Go(func() {
			tick := time.NewTicker(10 * time.Millisecond)
			defer tick.Stop()
			for {
				select {
				case <-done:
					return
				case <-tick.C:
					most = max(most, descriptors(t)-before)
				}
			}
		})
		got, err := Measure(t.Context(), dir, Options{EntriesPerSecond: 5000, Workers: workers})
		close(done)
		watch.Wait()
		must(t, err)
		if got.Bytes != wantBytes || got.Inodes != wantInodes || got.Partial {
			t.Errorf("usage = %+v, want %d bytes and %d inodes", got, wantBytes, wantInodes)
		}
		if bound := workers * (maxOpen + 4); most < 10 || most > bound {
			t.Errorf("%d descriptors at most, want between 10 and %d", most, bound)
		}
	})
	if after := descriptors(t); after > before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}

func descriptors(t testing.TB) int {
	t.Helper()
	names, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	return len(names)
}

// whilePaused walks dir with so small a budget that the walk stands still after
// each entry, and calls change when it has looked at entries of them.
func whilePaused(t *testing.T, dir string, entries int, change func()) (got Usage) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		const perSecond = 100
		var wg sync.WaitGroup
		wg.Go(func() {
			<-time.After(time.Duration(entries)*time.Second/perSecond - time.Second/perSecond/2)
			change()
		})
		var err error
		got, err = Measure(t.Context(), dir, Options{EntriesPerSecond: perSecond})
		wg.Wait()
		must(t, err)
	})
	return got
}

func TestT13_FilesRemovedDuringTheWalk(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for i := range 10_000 {
		write(t, filepath.Join(dir, fmt.Sprintf("%05d", i)), 4096)
	}
	got := whilePaused(t, dir, 5000, func() {
		for i := range 100 {
			must(t, os.Remove(filepath.Join(dir, fmt.Sprintf("%05d", i*100))))
		}
	})
	files := got.Inodes - 1
	if files < 9_900 || files > 10_000 {
		t.Errorf("%d files counted, want 9900 to 10000", files)
	}
	if got.Partial || got.Unreadable != 0 {
		t.Errorf("usage = %+v, want no errors", got)
	}
	if want := files * 4096; got.Bytes < want {
		t.Errorf("%d bytes, want at least %d", got.Bytes, want)
	}
}

func TestChangesDuringTheWalk(t *testing.T) {
	t.Parallel()
	t.Run("all files vanish after they were listed", func(t *testing.T) {
		t.Parallel()
		dir := t.TempDir()
		for i := range 100 {
			write(t, filepath.Join(dir, fmt.Sprint(i)), 1)
		}
		got := whilePaused(t, dir, 40, func() {
			for i := range 100 {
				must(t, os.Remove(filepath.Join(dir, fmt.Sprint(i))))
			}
		})
		if got.Inodes != 41 || got.Vanished != 60 || got.Partial {
			t.Errorf("usage = %+v, want 41 inodes, 60 vanished", got)
		}
	})
	t.Run("the tree itself is removed", func(t *testing.T) {
		t.Parallel()
		dir := filepath.Join(tempDir(t), "tree")
		must(t, os.Mkdir(dir, 0o755))
		makeChain(t, dir, "d", 100)
		got := whilePaused(t, dir, 120, func() { // level 60: the first ones are closed
			if out, err := exec.Command("rm", "-rf", dir).CombinedOutput(); err != nil {
				t.Errorf("rm: %v\n%s", err, out)
			}
		})
		if got.Inodes < 100 || got.Inodes > 122 || got.Partial {
			t.Errorf("usage = %+v, want a good 120 inodes and no errors", got)
		}
	})
	t.Run("a directory becomes a symlink", func(t *testing.T) {
		t.Parallel()
		dir, elsewhere := t.TempDir(), t.TempDir()
		for i := range 10 {
			must(t, os.Mkdir(filepath.Join(dir, fmt.Sprint(i)), 0o755))
			write(t, filepath.Join(elsewhere, fmt.Sprint(i)), 1)
		}
		got := whilePaused(t, dir, 9, func() {
			for i := range 10 {
				must(t, os.Remove(filepath.Join(dir, fmt.Sprint(i))))
				must(t, os.Symlink(elsewhere, filepath.Join(dir, fmt.Sprint(i))))
			}
		})
		if got.Inodes != 11 || got.Vanished != 9 || got.Partial {
			t.Errorf("usage = %+v, want 11 inodes, 9 vanished", got)
		}
	})
	t.Run("the way back is moved inside the tree", func(t *testing.T) {
		t.Parallel()
		dir := tempDir(t)
		makeChain(t, dir, "d", 100)
		high := dir
		for range 20 {
			high = filepath.Join(high, "d")
		}
		// Levels 1 to 20 have more to visit after the walk comes back to them.
		for path := dir; path != high; path = filepath.Join(path, "d") {
			must(t, os.Mkdir(filepath.Join(path, "d", "e"), 0o755))
		}
		// At level 60, level 30 moves up to the root: ".." of it is wrong then,
		// and so are the names that lead to level 30 and below it; those above
		// are found by their names.
		got := whilePaused(t, dir, 150, func() {
			from := high
			for range 10 {
				from = filepath.Join(from, "d")
			}
			must(t, os.Rename(from, filepath.Join(dir, "moved")))
		})
		if got.Inodes != 221 || got.Partial {
			t.Errorf("usage = %+v, want all 221 inodes", got)
		}
		if after := measureTree(t, dir); after.Inodes != 221 {
			t.Fatalf("tree has %d inodes, the test is wrong", after.Inodes)
		}
	})
	// twenty chains of 60 levels hang on level 30 of a chain; after 181 entries
	// the walk is about 50 levels down one of them, and level 30 is closed.
	chains := func(t *testing.T) (dir, level30, outside string) {
		dir, outside = tempDir(t), tempDir(t)
		makeChain(t, dir, "d", 30)
		level30 = dir + strings.Repeat("/d", 30)
		for i := range 20 {
			x := filepath.Join(level30, fmt.Sprint("x", i))
			must(t, os.Mkdir(x, 0o755))
			makeChain(t, x, "d", 60)
		}
		return dir, level30, outside
	}
	const all = 1 + 2*30 + 20 + 20*2*60
	t.Run("a part is moved out of the tree", func(t *testing.T) {
		t.Parallel()
		dir, level30, outside := chains(t)
		got := whilePaused(t, dir, 181, func() {
			must(t, os.Rename(level30, filepath.Join(outside, "moved")))
		})
		if got.Inodes != all || got.Partial {
			t.Errorf("usage = %+v, want all %d inodes", got, all)
		}
	})
	t.Run("an unfinished directory can't be found again", func(t *testing.T) {
		t.Parallel()
		dir, level30, outside := chains(t)
		got := whilePaused(t, dir, 181, func() {
			for i := range 20 {
				name := fmt.Sprint("x", i)
				must(t, os.Rename(filepath.Join(level30, name), filepath.Join(outside, name)))
			}
			must(t, os.Rename(level30, filepath.Join(outside, "moved")))
		})
		if want := int64(1 + 2*30 + 20 + 2*60); got.Inodes != want || !got.Partial || got.Unreadable != 1 {
			t.Errorf("usage = %+v, want %d inodes and one unreadable directory", got, want)
		}
		if len(got.Errors) != 1 || !errors.Is(got.Errors[0], errMoved) {
			t.Errorf("errors = %v, want errMoved", got.Errors)
		}
	})
}

func TestMountsInsideAreLeftOut(t *testing.T) {
	t.Parallel()
	need.Root(t)
	dir := t.TempDir()
	for _, name := range []string{"tmpfs", "bind", "data"} {
		must(t, os.Mkdir(filepath.Join(dir, name), 0o755))
	}
	write(t, filepath.Join(dir, "data", "file"), 1<<20)
	write(t, filepath.Join(dir, "file"), 0)
	attach := func(source, target, fstype string, flags uintptr) {
		t.Helper()
		must(t, unix.Mount(source, target, fstype, flags, ""))
		t.Cleanup(func() {
			if err := unix.Unmount(target, 0); err != nil {
				t.Errorf("unmount %s: %v", target, err)
			}
		})
	}
	attach("none", filepath.Join(dir, "tmpfs"), "tmpfs", 0)
	write(t, filepath.Join(dir, "tmpfs", "file"), 1<<20)
	attach(filepath.Join(dir, "data"), filepath.Join(dir, "bind"), "", unix.MS_BIND)
	attach(filepath.Join(dir, "data", "file"), filepath.Join(dir, "file"), "", unix.MS_BIND)

	got := measureTree(t, dir)
	if got.Inodes != 3 || got.MountsSkipped != 3 || got.Partial {
		t.Errorf("usage = %+v, want 3 inodes (root, data, data/file) and 3 mounts", got)
	}
	if got.Bytes < 1<<20 || got.Bytes > 1<<20+64<<10 {
		t.Errorf("%d bytes, want 1 MiB once", got.Bytes)
	}
	if inside := measureTree(t, filepath.Join(dir, "tmpfs")); inside.Inodes != 2 {
		t.Errorf("the mount itself as root: %+v, want 2 inodes", inside)
	}
}

func TestLeftOutDirectories(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, sub := range []string{"mine", "theirs/deeper", "theirs too", "mine/theirs"} {
		must(t, os.MkdirAll(filepath.Join(dir, sub), 0o755))
		write(t, filepath.Join(dir, sub, "file"), 100_000)
	}
	write(t, filepath.Join(dir, "a file"), 100_000)
	must(t, os.Symlink("theirs too", filepath.Join(dir, "link")))
	without := []string{"theirs", "link", "mine/theirs", "missing", "a file", "mine/file"}
	for i := range without {
		without[i] = filepath.Join(dir, without[i])
	}
	for workers := 1; workers <= 2; workers++ {
		got, err := Measure(t.Context(), dir, Options{Without: without, Workers: workers})
		must(t, err)
		if got.Inodes != 5 || got.LeftOut != 3 || got.Partial { // root, mine, its file, a file, link
			t.Errorf("usage = %+v, want 5 inodes and 3 directories left out", got)
		}
		theirs := int64(0)
		for _, sub := range []string{"theirs", "theirs too", "mine/theirs"} {
			theirs += measureTree(t, filepath.Join(dir, sub)).Bytes
		}
		if all := measureTree(t, dir); all.Bytes != got.Bytes+theirs {
			t.Errorf("%d bytes without %d, all together %d", got.Bytes, theirs, all.Bytes)
		}
	}
}

func TestBtrfsSubvolumesCount(t *testing.T) {
	t.Parallel()
	need.Root(t)
	need.Tools(t, "mkfs.btrfs")
	dir := t.TempDir()
	image, mnt := filepath.Join(dir, "image"), filepath.Join(dir, "mnt")
	write(t, image, 0)
	must(t, os.Truncate(image, 256<<20))
	must(t, os.Mkdir(mnt, 0o755))
	run := func(name string, args ...string) {
		t.Helper()
		if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", name, err, out)
		}
	}
	run("mkfs.btrfs", "-q", image)
	run("mount", "-o", "loop", image, mnt)
	t.Cleanup(func() {
		if err := unix.Unmount(mnt, 0); err != nil {
			t.Errorf("unmount: %v", err)
		}
	})
	for _, name := range []string{"one", "two"} {
		// Both first files have the same inode number.
		run("btrfs", "subvolume", "create", filepath.Join(mnt, name))
		write(t, filepath.Join(mnt, name, "file"), 1<<20)
		must(t, os.Link(filepath.Join(mnt, name, "file"), filepath.Join(mnt, name, "again")))
	}
	unix.Sync()
	got := measureTree(t, mnt)
	// Without -x: du takes a subvolume for another filesystem, by its st_dev.
	out, err := exec.Command("du", "--block-size=1", "-s", mnt).Output()
	must(t, err)
	want, err := strconv.ParseInt(strings.Fields(string(out))[0], 10, 64)
	must(t, err)
	if got.Inodes != 5 || got.Bytes != want || want < 2<<20 || got.MountsSkipped != 0 {
		t.Errorf("usage = %+v, want 5 inodes and %d bytes", got, want)
	}
}

func TestUnreadableDirectoryMakesItPartial(t *testing.T) {
	t.Parallel()
	// Root may read everything, so this runs as nobody in a child process.
	if dir := os.Getenv("WALK_TEST_DIR"); dir != "" {
		u, err := Measure(t.Context(), dir, Options{})
		fmt.Printf("RESULT %d %v %d %v %v\n", u.Inodes, u.Partial, u.Unreadable, u.Errors, err)
		return
	}
	dir, err := os.MkdirTemp("", "walk")
	must(t, err)
	t.Cleanup(func() { must(t, os.RemoveAll(dir)) })
	must(t, os.Chmod(dir, 0o755))
	must(t, os.Mkdir(filepath.Join(dir, "closed"), 0o755))
	write(t, filepath.Join(dir, "closed", "file"), 1)
	must(t, os.Mkdir(filepath.Join(dir, "open"), 0o755))
	must(t, os.Chmod(filepath.Join(dir, "closed"), 0))
	t.Cleanup(func() { must(t, os.Chmod(filepath.Join(dir, "closed"), 0o755)) })

	// The test binary lies where nobody may not go: run it by descriptor.
	self, err := os.Open("/proc/self/exe")
	must(t, err)
	defer self.Close() //nolint:errcheck // only read
	cmd := exec.Command("/proc/self/fd/3", "-test.run=^TestUnreadableDirectoryMakesItPartial$", "-test.v")
	cmd.ExtraFiles = []*os.File{self}
	cmd.Env = append(os.Environ(), "WALK_TEST_DIR="+dir)
	cmd.Dir = "/"
	if os.Geteuid() == 0 {
		cmd.SysProcAttr = asNobody()
	}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	want := fmt.Sprintf("RESULT 3 true 1 [open %q: permission denied] <nil>", filepath.Join(dir, "closed"))
	if !strings.Contains(string(out), want) {
		t.Errorf("want %s in:\n%s", want, out)
	}
}

func TestErrorsAreBounded(t *testing.T) {
	t.Parallel()
	w := (&survey{budget: pace.NewBudget(0)}).worker()
	w.root = "/r"
	w.push(-1, 0)
	for range 100 {
		w.unreadable(0, "read", unix.EIO)
	}
	if w.usage.Unreadable != 100 || len(w.usage.Errors) != maxErrors {
		t.Errorf("%d unreadable with %d errors, want 100 with %d", w.usage.Unreadable, len(w.usage.Errors), maxErrors)
	}
}

func TestCancel(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for i := range 1000 {
		write(t, filepath.Join(dir, fmt.Sprint(i)), 1)
	}
	t.Run("before", func(t *testing.T) {
		t.Parallel()
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		u, err := Measure(ctx, dir, Options{})
		if !errors.Is(err, context.Canceled) || !u.Partial || u.Inodes > 256+1 {
			t.Errorf("Measure = %+v, %v", u, err)
		}
	})
	t.Run("while it waits", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			defer cancel()
			u, err := Measure(ctx, dir, Options{EntriesPerSecond: 100})
			if !errors.Is(err, context.DeadlineExceeded) || !u.Partial {
				t.Errorf("Measure = %+v, %v", u, err)
			}
			if u.Inodes < 495 || u.Inodes > 505 {
				t.Errorf("%d inodes in 5 s at 100 per second", u.Inodes)
			}
			if took := u.Finished.Sub(u.Started); took != 5*time.Second {
				t.Errorf("ended after %v, want 5s", took)
			}
		})
	})
}

func TestT12_BudgetOfEntries(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for i := range 10_000 {
		if i%100 == 0 {
			must(t, os.Mkdir(filepath.Join(dir, fmt.Sprint("d", i/100)), 0o755))
		} else {
			write(t, filepath.Join(dir, fmt.Sprint("d", i/100), fmt.Sprint(i)), 0)
		}
	}
	for _, tc := range []struct {
		perSecond int
		want      time.Duration
	}{
		{500, 20 * time.Second}, {50_000, 200 * time.Millisecond}, {7, 10_000 * time.Second / 7},
	} {
		t.Run(fmt.Sprint(tc.perSecond), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				u, err := Measure(t.Context(), dir, Options{EntriesPerSecond: tc.perSecond})
				must(t, err)
				if u.Inodes != 10_001 {
					t.Errorf("%d inodes, want 10001", u.Inodes)
				}
				if took := u.Finished.Sub(u.Started); took < tc.want*9/10 || took > tc.want*11/10 {
					t.Errorf("took %v, want %v ± 10 %%", took, tc.want)
				}
			})
		})
	}
}

func TestManyWaitingNames(t *testing.T) {
	t.Parallel()
	// With the arena full from the start, directories are read in small portions.
	dir := t.TempDir()
	for i := range 500 {
		must(t, os.MkdirAll(filepath.Join(dir, fmt.Sprintf("%0200d", i), "sub"), 0o755))
	}
	s := &survey{list: kernelLister{}, linked: inodeSet{most: maxLinked}, budget: pace.NewBudget(0)}
	w := s.worker()
	w.root, w.names = dir, make([]byte, waitingBytes+1)
	must(t, w.run(t.Context()))
	if w.usage.Inodes != 1001 {
		t.Errorf("%d inodes, want 1001", w.usage.Inodes)
	}
	if grown := cap(w.names) - waitingBytes; grown > 3<<20 {
		t.Errorf("names grew by %d bytes", grown)
	}
}

func FuzzParseEntry(f *testing.F) {
	f.Add([]byte("\x01\x00\x00\x00\x00\x00\x00\x00\x02\x00\x00\x00\x00\x00\x00\x00\x18\x00\x08abc\x00\x00"))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		e, size, ok := parseEntry(b)
		if !ok {
			return
		}
		if size <= 0 || size > len(b) || len(e.name) < 2 || e.name[len(e.name)-1] != 0 {
			t.Errorf("entry %q of %d bytes from %d", e.name, size, len(b))
		}
		_ = e.isDots()
	})
}

// makeTree makes folders × files empty files.
func makeTree(b *testing.B, folders, files int) string {
	b.Helper()
	dir := b.TempDir()
	for i := range folders {
		sub := filepath.Join(dir, fmt.Sprint("folder", i))
		must(b, os.Mkdir(sub, 0o755))
		for j := range files {
			write(b, filepath.Join(sub, fmt.Sprint("file", j)), 0)
		}
	}
	return dir
}

func BenchmarkMeasure(b *testing.B) {
	for _, size := range []struct{ folders, files int }{{1, 10}, {200, 100}} {
		for workers := range 2 {
			b.Run(fmt.Sprintf("entries=%d/workers=%d", size.folders*(size.files+1), workers+1), func(b *testing.B) {
				dir := makeTree(b, size.folders, size.files)
				var u Usage
				b.ReportAllocs()
				for b.Loop() {
					var err error
					u, err = Measure(b.Context(), dir, Options{Workers: workers + 1})
					must(b, err)
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(u.Inodes), "ns/inode")
			})
		}
	}
}

// BenchmarkWalkDir is the standard library's way, to compare.
func BenchmarkWalkDir(b *testing.B) {
	dir := makeTree(b, 200, 100)
	var inodes int
	b.ReportAllocs()
	for b.Loop() {
		inodes = 0
		must(b, filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
			if err == nil {
				_, err = d.Info()
			}
			inodes++
			return err
		}))
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(inodes), "ns/inode")
}
