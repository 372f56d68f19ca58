package fsstats

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/cleave-cri/cleave/lab/need"
)

// mountLoop makes a filesystem in a sparse file and mounts it on a new folder.
func mountLoop(t *testing.T, size int64, mkfs ...string) (mountpoint string) {
	t.Helper()
	need.Root(t)
	need.Tools(t, mkfs[0])
	dir := t.TempDir()
	image, mountpoint := filepath.Join(dir, "image"), filepath.Join(dir, "mnt")
	if err := os.WriteFile(image, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(image, size); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(mountpoint, 0o755); err != nil {
		t.Fatal(err)
	}
	command(t, mkfs[0], append(mkfs[1:], image)...)
	attach(t, mountpoint, "-o", "loop", image, mountpoint)
	return mountpoint
}

// attach runs mount(8) and unmounts target when the test ends.
func attach(t *testing.T, target string, args ...string) {
	t.Helper()
	command(t, "mount", args...)
	t.Cleanup(func() {
		if err := unix.Unmount(target, 0); err != nil {
			t.Errorf("unmount %s: %v", target, err)
		}
	})
}

func command(t *testing.T, name string, args ...string) {
	t.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
}

func mkdir(t *testing.T, elem ...string) string {
	t.Helper()
	path := filepath.Join(elem...)
	if err := os.MkdirAll(path, 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

func filesystemOf(t *testing.T, path string) Filesystem {
	t.Helper()
	f, err := NewProber().FilesystemOf(path)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// df gives the figures of df(1) for path: total, used, available.
func df(t *testing.T, path string) (figures [3]uint64) {
	t.Helper()
	out, err := exec.Command("df", "--block-size=1", "--output=size,used,avail", path).Output()
	if err != nil {
		t.Fatal(err)
	}
	for i, field := range strings.Fields(strings.SplitN(string(out), "\n", 2)[1]) {
		if figures[i], err = strconv.ParseUint(field, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	return figures
}

func TestKernel_Filesystems(t *testing.T) {
	t.Parallel()
	const mib = 1 << 20
	for _, tc := range []struct {
		name       string
		size       int64
		mkfs       []string
		wantInodes bool
	}{
		{"ext4", 64 * mib, []string{"mkfs.ext4", "-q"}, true},
		{"xfs", 320 * mib, []string{"mkfs.xfs", "-q"}, true},
		{"btrfs", 256 * mib, []string{"mkfs.btrfs", "-q"}, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			mnt := mountLoop(t, tc.size, tc.mkfs...)
			got := filesystemOf(t, mnt)
			if got.Type != tc.name || got.Mountpoint != mnt {
				t.Errorf("%s on %q, want %s on %q", got.Type, got.Mountpoint, tc.name, mnt)
			}
			if !strings.HasPrefix(got.Source, "/dev/loop") {
				t.Errorf("source = %q, want a loop device", got.Source)
			}
			if diff := cmp.Diff(df(t, mnt), [3]uint64{got.CapacityBytes, got.UsedBytes, got.AvailableBytes}); diff != "" {
				t.Errorf("capacity, used, available (-df +got):\n%s", diff)
			}
			if has := got.InodesTotal != nil; has != tc.wantInodes {
				t.Errorf("limit of inodes: %v, want %v", has, tc.wantInodes)
			}
			if tc.name == "ext4" && got.FreeBytes <= got.AvailableBytes {
				t.Errorf("free = %d, available = %d: want root's reserve between them", got.FreeBytes, got.AvailableBytes)
			}
			outside := filesystemOf(t, filepath.Dir(mnt))
			if outside.Device == got.Device {
				t.Error("the mount and its parent are taken for one filesystem")
			}
		})
	}
}

func TestT1_KernelResolvesPathsToTheirDevice(t *testing.T) {
	t.Parallel()
	a := mountLoop(t, 64<<20, "mkfs.ext4", "-q")
	b := mountLoop(t, 64<<20, "mkfs.ext4", "-q")
	p := NewProber()

	dirA, dirB := mkdir(t, a, "with space", "x"), mkdir(t, b, "y")
	link := filepath.Join(a, "link")
	if err := os.Symlink(dirB, link); err != nil {
		t.Fatal(err)
	}
	bind := mkdir(t, b, "bind of a")
	attach(t, bind, "--bind", dirA, bind)
	nested := mkdir(t, a, "nested")
	attach(t, nested, "-t", "tmpfs", "-o", "size=1m", "none", nested)
	inNested := mkdir(t, nested, "deep", "er")
	dangling := filepath.Join(a, "dangling")
	if err := os.Symlink(filepath.Join(b, "not", "made", "yet"), dangling); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(bind, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}

	for _, tc := range []struct {
		name, path, like, wantPath, wantMountpoint string
	}{
		{"symlink to another device", link, b, dirB, b},
		{"through the symlink and back up", link + "/../y", b, dirB, b},
		{"bind mount", bind, a, bind, bind},
		{"file in a bind mount", file, a, file, bind},
		{"nested mount", inNested, nested, inNested, nested},
		{"missing in a nested mount", filepath.Join(inNested, "no"), nested, inNested, nested},
		{"symlink without target", dangling, b, b, b},
	} {
		t.Run(tc.name, func(t *testing.T) {
			l, err := p.Resolve(map[Role]string{ImageFS: tc.path})
			if err != nil {
				t.Fatal(err)
			}
			got, _ := l.Get(ImageFS)
			want := filesystemOf(t, tc.like)
			if diff := cmp.Diff([]any{want.Device, want.CapacityBytes, tc.wantPath, tc.wantMountpoint},
				[]any{got.Filesystem.Device, got.Filesystem.CapacityBytes, got.Path, got.Filesystem.Mountpoint}); diff != "" {
				t.Errorf("device, capacity, path, mountpoint (-want +got):\n%s", diff)
			}
		})
	}

	for _, tc := range []struct {
		name                    string
		node, images, container string
		want                    LayoutKind
	}{
		{"bind mount is no split", a, bind, dirA, LayoutSingle},
		{"symlink to another device is a split", a, link, dirA, LayoutSplit},
		{"dedicated", a, b, link, LayoutDedicated},
		{"three", a, b, nested, LayoutSeparate},
	} {
		t.Run(tc.name, func(t *testing.T) {
			l, err := p.Resolve(map[Role]string{NodeFS: tc.node, ImageFS: tc.images, ContainerFS: tc.container})
			if err != nil {
				t.Fatal(err)
			}
			if got := l.Kind(); got != tc.want {
				t.Errorf("Kind() = %q, want %q", got, tc.want)
			}
		})
	}
}

func TestKernel_BtrfsSubvolumesAreOneFilesystem(t *testing.T) {
	t.Parallel()
	mnt := mountLoop(t, 256<<20, "mkfs.btrfs", "-q")
	one, two := filepath.Join(mnt, "one"), filepath.Join(mnt, "two")
	command(t, "btrfs", "subvolume", "create", one)
	command(t, "btrfs", "subvolume", "create", two)
	apart := mkdir(t, t.TempDir(), "apart")
	attach(t, apart, "-o", "subvol=two", filesystemOf(t, mnt).Source, apart)

	var st [3]unix.Stat_t
	for i, path := range []string{mnt, one, apart} {
		if err := unix.Stat(path, &st[i]); err != nil {
			t.Fatal(err)
		}
	}
	if st[0].Dev == st[1].Dev || st[1].Dev == st[2].Dev {
		t.Fatal("subvolumes share st_dev; this test shows nothing")
	}
	l, err := NewProber().Resolve(map[Role]string{NodeFS: mnt, ImageFS: one, ContainerFS: apart, Logs: two})
	if err != nil {
		t.Fatal(err)
	}
	if got := l.Kind(); got != LayoutSingle {
		t.Errorf("Kind() = %q, want single", got)
	}
	if diff := cmp.Diff([]Role{NodeFS, ImageFS, ContainerFS, Logs}, l.Sharing(NodeFS)); diff != "" {
		t.Errorf("roles sharing (-want +got):\n%s", diff)
	}
	f := filesystemOf(t, one)
	if f.InodesTotal != nil || f.InodesFree != nil {
		t.Error("T30: btrfs has a number of inodes")
	}
}

func TestT3_KernelFilesystemWithoutCapacity(t *testing.T) {
	t.Parallel()
	l, err := NewProber().Resolve(map[Role]string{ImageFS: "/proc/sys/kernel"})
	if err != nil {
		t.Fatal(err)
	}
	got, _ := l.Get(ImageFS)
	if got.Reported != "/" || got.Path != "/proc/sys/kernel" || got.Filesystem.CapacityBytes == 0 {
		t.Errorf("place = %+v, want / reported for /proc/sys/kernel", got)
	}
}

func TestKernel_Errors(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	circle := filepath.Join(dir, "circle")
	if err := os.Symlink(circle, circle); err != nil {
		t.Fatal(err)
	}
	p := NewProber()
	for _, tc := range []struct {
		name, path string
		want       error
	}{
		{"missing", filepath.Join(dir, "missing"), fs.ErrNotExist},
		{"below a file", filepath.Join(file, "x"), unix.ENOTDIR},
		{"circle of symlinks", circle, unix.ELOOP},
		{"relative", "x", ErrNotAbsolute},
		{"empty", "", ErrNotAbsolute},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			if _, err := p.FilesystemOf(tc.path); !errors.Is(err, tc.want) {
				t.Errorf("error = %v, want %v", err, tc.want)
			}
		})
	}
	t.Run("a name like that of a removed file", func(t *testing.T) {
		t.Parallel()
		if _, err := p.FilesystemOf(mkdir(t, dir, "x (deleted)")); err != nil {
			t.Error(err)
		}
	})
}

func TestKernel_MountIDFromFdinfo(t *testing.T) {
	t.Parallel()
	f, err := os.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close() //nolint:errcheck // only read
	want, _, err := mountID(int(f.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	got, err := mountIDFromFdinfo(int(f.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	if got != want {
		t.Errorf("fdinfo says mount %d, statx says %d", got, want)
	}
}

func TestKernel_NoDescriptorsLeft(t *testing.T) {
	// Not parallel: counts the descriptors of the whole process.
	count := func() int {
		names, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(names)
	}
	p := NewProber()
	dir := t.TempDir()
	probe := func() {
		_, _ = p.Resolve(map[Role]string{NodeFS: dir, ImageFS: dir + "/no", ContainerFS: "/proc", Logs: "x"}) //nolint:errcheck // that it opened and closed descriptors counts
	}
	probe()
	before := count()
	for range 50 {
		probe()
	}
	if after := count(); after > before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}

func BenchmarkResolve(b *testing.B) {
	p := NewProber()
	paths := map[Role]string{NodeFS: "/usr", ImageFS: "/usr/lib", ContainerFS: "/var", Logs: "/var/log"}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := p.Resolve(paths); err != nil {
			b.Fatal(err)
		}
	}
}
