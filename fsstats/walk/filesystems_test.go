package walk

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/fuse"
	"github.com/cleave-cri/cleave/lab/need"
)

// onEach runs a test on a disk of its own of each filesystem.
func onEach(t *testing.T, test func(t *testing.T, fs disk.FS, root string)) {
	for _, fs := range disk.Filesystems() {
		t.Run(string(fs), func(t *testing.T) {
			t.Parallel()
			need.Loop(t)
			need.Tools(t, "mkfs."+string(fs))
			run := need.Lab(t)
			d, err := disk.Make(t.Context(), run.Dir(), disk.Spec{Name: "d", SizeBytes: 512 << 20, FS: fs})
			must(t, err)
			test(t, fs, d.Path())
		})
	}
}

// settle makes the kernel allocate what it has put off.
func settle(t testing.TB, root string) {
	t.Helper()
	f, err := os.Open(root)
	must(t, err)
	must(t, errors.Join(unix.Syncfs(int(f.Fd())), f.Close()))
}

// usedBytes is what statfs says is used.
func usedBytes(t testing.TB, root string) int64 {
	t.Helper()
	settle(t, root)
	var st unix.Statfs_t
	must(t, unix.Statfs(root, &st))
	return int64(st.Blocks-st.Bfree) * st.Bsize
}

// TestMeasureEqualsDuAndStatfs: what du says, to the byte, of everything that
// makes counting hard, and what came to be used on the filesystem with it.
func TestMeasureEqualsDuAndStatfs(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, fs disk.FS, root string) {
		before := usedBytes(t, root)
		tree := filepath.Join(root, "tree")
		must(t, os.MkdirAll(filepath.Join(tree, "a", "b"), 0o755))
		must(t, os.MkdirAll(filepath.Join(tree, "c"), 0o755))

		write(t, filepath.Join(tree, "a", "linked"), 3<<20)
		must(t, os.Link(filepath.Join(tree, "a", "linked"), filepath.Join(tree, "a", "b", "again")))
		must(t, os.Link(filepath.Join(tree, "a", "linked"), filepath.Join(tree, "c", "and again")))

		write(t, filepath.Join(tree, "sparse"), 5000)
		must(t, os.Truncate(filepath.Join(tree, "sparse"), 64<<30))
		write(t, filepath.Join(tree, "zero length"), 0)
		write(t, filepath.Join(tree, strings.Repeat("n", 255)), 70_000)
		write(t, filepath.Join(tree, "\xff\xfe\x80 not UTF-8"), 70_000)
		must(t, os.Symlink(strings.Repeat("x", 1000), filepath.Join(tree, "symlink with a block of its own")))

		// Beyond its end, as a database reserves room: no length, all blocks.
		reserved, err := os.Create(filepath.Join(tree, "reserved"))
		must(t, err)
		must(t, errors.Join(unix.Fallocate(int(reserved.Fd()), unix.FALLOC_FL_KEEP_SIZE, 0, 8<<20), reserved.Close()))

		mapped, err := os.Create(filepath.Join(tree, "mapped"))
		must(t, err)
		must(t, mapped.Truncate(4<<20))
		memory, err := unix.Mmap(int(mapped.Fd()), 0, 4<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		must(t, err)
		for i := 0; i < len(memory); i += 3 * os.Getpagesize() {
			memory[i] = 1
		}
		must(t, errors.Join(unix.Msync(memory, unix.MS_SYNC), unix.Munmap(memory), mapped.Close()))

		used := usedBytes(t, root) - before
		got := measureTree(t, tree)
		wantBytes, wantInodes := du(t, tree)
		if got.Bytes != wantBytes || got.Inodes != wantInodes || got.Partial {
			t.Errorf("usage = %+v, du says %d bytes and %d inodes", got, wantBytes, wantInodes)
		}
		if got.Bytes < 12<<20 {
			t.Errorf("%d bytes, the tree should have some 13 MiB", got.Bytes)
		}
		// ext4 has made room for its inodes beforehand. The others need some for
		// what they know about files, and btrfs keeps small files there.
		if around := map[disk.FS]int64{disk.XFS: 256 << 10, disk.Btrfs: 1 << 20}[fs]; used < got.Bytes-around || used > got.Bytes+around {
			t.Errorf("statfs says %d bytes more are used, the tree takes %d, want no more than %d between them", used, got.Bytes, around)
		}
	})
}

// TestReflinksCountForEachFile: both of two files that share all their blocks
// count, as du has it; that the sum is more than what is used has to be told
// where sums are shown.
func TestReflinksCountForEachFile(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, fs disk.FS, root string) {
		if fs == disk.Ext4 {
			return // it has no such files
		}
		tree := filepath.Join(root, "tree")
		must(t, os.Mkdir(tree, 0o755))
		write(t, filepath.Join(tree, "file"), 8<<20)
		settle(t, root)
		before, one := usedBytes(t, root), measureTree(t, tree)
		from, err := os.Open(filepath.Join(tree, "file"))
		must(t, err)
		to, err := os.Create(filepath.Join(tree, "copy"))
		must(t, err)
		must(t, errors.Join(unix.IoctlFileClone(int(to.Fd()), int(from.Fd())), from.Close(), to.Close()))
		used := usedBytes(t, root) - before

		got := measureTree(t, tree)
		wantBytes, wantInodes := du(t, tree)
		if got.Bytes != wantBytes || got.Inodes != wantInodes {
			t.Errorf("usage = %+v, du says %d bytes and %d inodes", got, wantBytes, wantInodes)
		}
		if more := got.Bytes - one.Bytes; more < 8<<20 || used > 1<<20 {
			t.Errorf("the copy counts %d bytes and takes %d, want 8 MiB and next to nothing", more, used)
		}
	})
}

// TestDeepTrees: 4 000 levels, whose path no system call would take.
func TestDeepTrees(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, _ disk.FS, root string) {
		const levels = 4000
		tree := filepath.Join(root, "tree")
		must(t, os.Mkdir(tree, 0o755))
		makeChain(t, tree, strings.Repeat("d", 100), levels)
		settle(t, root)
		got := measureTree(t, tree)
		wantBytes, wantInodes := du(t, tree)
		if got.Bytes != wantBytes || got.Inodes != wantInodes || got.Inodes != 1+2*levels || got.Partial {
			t.Errorf("usage = %+v, du says %d bytes and %d inodes", got, wantBytes, wantInodes)
		}
	})
}

// TestRootsByOtherWays: a tree is the same by a bind mount and through symlinks
// on the way; the mount's border is that of the way that was taken.
func TestRootsByOtherWays(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, _ disk.FS, root string) {
		tree, bind := filepath.Join(root, "tree"), filepath.Join(root, "bind")
		must(t, os.MkdirAll(filepath.Join(tree, "inside"), 0o755))
		must(t, os.Mkdir(bind, 0o755))
		write(t, filepath.Join(tree, "inside", "file"), 1<<20)
		must(t, os.Symlink(root, filepath.Join(root, "link")))
		settle(t, root)
		allBytes, allInodes := du(t, root)
		coveredBytes, _ := du(t, bind)
		must(t, unix.Mount(tree, bind, "", unix.MS_BIND, ""))

		wantBytes, wantInodes := du(t, tree)
		for _, way := range []string{tree, bind, filepath.Join(root, "link", "tree"), tree + "/", filepath.Join(root, "link", "bind") + "/."} {
			if got := measureTree(t, way); got.Bytes != wantBytes || got.Inodes != wantInodes || got.MountsSkipped != 0 {
				t.Errorf("by %s: usage = %+v, want %d bytes and %d inodes", way, got, wantBytes, wantInodes)
			}
		}
		// All of the disk counts the tree once, and leaves the bind mount out. (du
		// counts both ways.)
		if all := measureTree(t, root); all.MountsSkipped != 1 || all.Bytes != allBytes-coveredBytes || all.Inodes != allInodes-1 {
			t.Errorf("the disk: usage = %+v, want %d bytes and %d inodes, without the folder that is covered", all, allBytes-coveredBytes, allInodes-1)
		}
	})
}

// TestHungFilesystemInside: a volume whose server does not answer any more is
// not even asked.
func TestHungFilesystemInside(t *testing.T) {
	t.Parallel()
	need.FUSE(t)
	dir := t.TempDir()
	volume := filepath.Join(dir, "volume")
	must(t, os.Mkdir(volume, 0o755))
	write(t, filepath.Join(dir, "file"), 100_000)
	settle(t, dir)
	m, err := fuse.New(volume, fuse.Hangs)
	must(t, err)
	t.Cleanup(func() { must(t, m.Close()) })

	got := measureTree(t, dir) // would hang until the test's time is over
	if got.Inodes != 2 || got.MountsSkipped != 1 || got.Partial || got.Bytes < 100_000 {
		t.Errorf("usage = %+v, want the folder and its file, and one mount left out", got)
	}
	if asked := m.Asked(); asked != 0 {
		t.Errorf("the server was asked %d times", asked)
	}
}

// TestFilesystemOfZeros: a server that answers zeros makes nothing up and nothing
// fail.
func TestFilesystemOfZeros(t *testing.T) {
	t.Parallel()
	need.FUSE(t)
	dir := t.TempDir()
	m, err := fuse.New(dir, fuse.Zeros)
	must(t, err)
	t.Cleanup(func() { must(t, m.Close()) })
	if got := measureTree(t, dir); got.Inodes != 1 || got.Bytes != 0 || got.Partial {
		t.Errorf("usage = %+v, want one inode without bytes", got)
	}
}
