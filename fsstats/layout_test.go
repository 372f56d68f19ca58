package fsstats

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// fakeSource is a kernel with a fixed tree of files.
type fakeSource struct {
	table string            // in the form of mountinfo
	files map[string]spot   // by canonical path
	links map[string]string // symlinks: path and target, both canonical
	// measured counts the calls of look, so that figures can move: each look
	// takes one block more from free and available.
	measured uint64
	fills    bool
	reads    int
}

func (f *fakeSource) look(p string) (spot, error) {
	p = path.Clean(p)
	for range 10 {
		target, ok := f.links[p]
		if !ok {
			break
		}
		p = target
	}
	sp, ok := f.files[p]
	if !ok {
		return spot{}, fmt.Errorf("open %q: %w", p, fs.ErrNotExist)
	}
	sp.path = p
	if f.fills {
		f.measured++
		sp.space.free -= f.measured
		sp.space.available -= f.measured
	}
	return sp, nil
}

func (f *fakeSource) readlink(p string) (string, bool) {
	target, ok := f.links[p]
	return target, ok
}

func (f *fakeSource) mounts() (map[uint64]mount, error) {
	f.reads++
	return parseMounts(strings.NewReader(f.table))
}

var testTime = time.Date(2026, 8, 22, 10, 0, 0, 0, time.UTC)

func fakeProber(src source) *Prober {
	return &Prober{src: src, now: func() time.Time { return testTime }}
}

// disk is a filesystem of so many 4096-byte blocks, half of them free, a tenth
// of the free ones kept for root.
func disk(mountID, blocks uint64) spot {
	return spot{mountID: mountID, space: space{
		blockBytes: 4096, blocks: blocks, free: blocks / 2, available: blocks/2 - blocks/20,
		inodesTotal: 1000, inodesUnused: 900,
	}}
}

const twoDisks = `1 0 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
2 1 8:17 / /mnt/b rw,relatime - xfs /dev/sdb1 rw
3 1 8:1 /var/images /srv/images rw,relatime - ext4 /dev/sda1 rw
4 1 0:45 /vol /mnt/sub rw,relatime - btrfs /dev/sdc rw,subvol=/vol
5 1 0:45 /other /mnt/other rw,relatime - btrfs /dev/sdc rw,subvol=/other
6 1 0:5 / /proc rw - proc proc rw
7 1 8:33 / /mnt/with\040space\134and\011tab rw - ext4 /dev/my\040disk rw
8 1 8:49 / /mnt/third rw - ext4 /dev/sdd1 rw
`

func TestT1_LayoutGoesByDevice(t *testing.T) {
	t.Parallel()
	src := &fakeSource{
		table: twoDisks,
		files: map[string]spot{
			"/":                disk(1, 1000),
			"/var/lib/kubelet": disk(1, 1000),
			"/var/images":      disk(1, 1000),
			"/mnt/b/images":    disk(2, 2000),
			"/mnt/b/layers":    disk(2, 2000),
			"/mnt/third":       disk(8, 500),
			"/srv/images":      disk(3, 1000),
			"/mnt/sub":         disk(4, 3000),
			"/mnt/other":       disk(5, 3000),
		},
		links: map[string]string{"/link": "/mnt/b/images"},
	}
	for _, tc := range []struct {
		name                        string
		nodefs, imagefs, containers string
		want                        LayoutKind
		wantDevices                 string // nodefs, imagefs, containerfs
		wantReported                string // imagefs, containerfs
	}{
		{"one device", "/var/lib/kubelet", "/var/images", "/var/lib/kubelet", LayoutSingle, "8:1 8:1 8:1", "/var/images /var/images"},
		{"two devices", "/var/lib/kubelet", "/mnt/b/images", "/var/images", LayoutSplit, "8:1 8:17 8:1", "/mnt/b/images /var/images"},
		{"symlink to another device", "/var/lib/kubelet", "/link", "/var/images", LayoutSplit, "8:1 8:17 8:1", "/mnt/b/images /var/images"},
		{"bind mount", "/var/lib/kubelet", "/srv/images", "/var/images", LayoutSingle, "8:1 8:1 8:1", "/srv/images /srv/images"},
		{"dedicated", "/var/lib/kubelet", "/mnt/b/images", "/mnt/b/layers", LayoutDedicated, "8:1 8:17 8:17", "/mnt/b/images /mnt/b/images"},
		{"separate", "/var/lib/kubelet", "/mnt/b/images", "/mnt/third", LayoutSeparate, "8:1 8:17 8:49", "/mnt/b/images /mnt/third"},
		{"containers apart from a shared disk", "/var/lib/kubelet", "/var/images", "/mnt/third", LayoutSeparate, "8:1 8:1 8:49", "/var/images /mnt/third"},
		{"subvolumes mounted apart", "/var/lib/kubelet", "/mnt/sub", "/mnt/other", LayoutDedicated, "8:1 0:45 0:45", "/mnt/sub /mnt/sub"},
		{"no containerfs", "/var/lib/kubelet", "/mnt/sub", "", LayoutUnknown, "8:1 0:45 ?", "/mnt/sub ?"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			l, err := fakeProber(&fakeSource{table: src.table, files: src.files, links: src.links}).Resolve(map[Role]string{
				NodeFS: tc.nodefs, ImageFS: tc.imagefs, ContainerFS: tc.containers,
			})
			if err != nil {
				t.Fatal(err)
			}
			if got := l.Kind(); got != tc.want {
				t.Errorf("Kind() = %q, want %q", got, tc.want)
			}
			device := func(r Role) string {
				if p, ok := l.Get(r); ok {
					return p.Filesystem.Device.String()
				}
				return "?"
			}
			reported := func(r Role) string {
				if p, ok := l.Get(r); ok {
					return p.Reported
				}
				return "?"
			}
			if diff := cmp.Diff(tc.wantDevices, strings.Join([]string{device(NodeFS), device(ImageFS), device(ContainerFS)}, " ")); diff != "" {
				t.Errorf("devices (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tc.wantReported, reported(ImageFS)+" "+reported(ContainerFS)); diff != "" {
				t.Errorf("reported paths (-want +got):\n%s", diff)
			}
		})
	}
}

func TestT3_ZeroBlockMountpointFallsBackToParent(t *testing.T) {
	t.Parallel()
	src := &fakeSource{
		table: twoDisks,
		files: map[string]spot{
			"/":           disk(1, 25_000_000),
			"/proc":       {mountID: 6, space: space{blockBytes: 4096}},
			"/proc/sys":   {mountID: 6, space: space{blockBytes: 4096}},
			"/mnt":        disk(1, 25_000_000),
			"/mnt/b":      {mountID: 2, space: space{blockBytes: 4096}},
			"/mnt/b/deep": {mountID: 2, space: space{blockBytes: 4096}},
		},
	}
	l, err := fakeProber(src).Resolve(map[Role]string{ImageFS: "/mnt/b/deep", NodeFS: "/proc/sys"})
	if err != nil {
		t.Fatal(err)
	}
	node, _ := l.Get(NodeFS)
	if node.Reported != "/" {
		t.Errorf("nodefs reported as %q, want /", node.Reported)
	}
	images, _ := l.Get(ImageFS)
	if images.Reported != "/mnt" || images.Path != "/mnt/b/deep" || images.Missing {
		t.Errorf("imagefs: path %q reported as %q missing %v, want /mnt/b/deep reported as /mnt", images.Path, images.Reported, images.Missing)
	}
	if got, want := images.Filesystem.CapacityBytes, uint64(102_400_000_000); got != want {
		t.Errorf("capacity = %d, want %d", got, want)
	}
	if want := "/mnt/b/deep is on a filesystem without capacity (xfs, 8:17); /mnt stands for it"; images.Note != want {
		t.Errorf("note = %q, want %q", images.Note, want)
	}
}

func TestNoParentWithCapacityIsAnError(t *testing.T) {
	t.Parallel()
	src := &fakeSource{table: twoDisks, files: map[string]spot{
		"/":     {mountID: 1},
		"/proc": {mountID: 6},
	}}
	l, err := fakeProber(src).Resolve(map[Role]string{ImageFS: "/proc"})
	if !errors.Is(err, ErrNoCapacity) || len(l.Places) != 0 {
		t.Errorf("Resolve = %v, %v; want no places and ErrNoCapacity", l, err)
	}
	if err != nil && !strings.Contains(err.Error(), "imagefs") {
		t.Errorf("error %q does not name the role", err)
	}
}

func TestT25_OneDiskHasOneSetOfFigures(t *testing.T) {
	t.Parallel()
	src := &fakeSource{
		table: twoDisks, fills: true,
		files: map[string]spot{
			"/var/lib/kubelet": disk(1, 1000),
			"/mnt/b/images":    disk(2, 100_000),
			"/mnt/b/layers":    disk(2, 100_000),
			"/srv/images":      disk(3, 1000),
		},
	}
	l, err := fakeProber(src).Resolve(map[Role]string{
		NodeFS: "/var/lib/kubelet", ImageFS: "/mnt/b/images", ContainerFS: "/mnt/b/layers", Logs: "/srv/images",
	})
	if err != nil {
		t.Fatal(err)
	}
	images, _ := l.Get(ImageFS)
	containers, _ := l.Get(ContainerFS)
	if diff := cmp.Diff(images.Filesystem, containers.Filesystem); diff != "" {
		t.Errorf("imagefs and containerfs differ (-imagefs +containerfs):\n%s", diff)
	}
	if images.Reported != containers.Reported {
		t.Errorf("reported as %q and %q, want the same", images.Reported, containers.Reported)
	}
	node, _ := l.Get(NodeFS)
	logs, _ := l.Get(Logs)
	if node.Filesystem.FreeBytes != logs.Filesystem.FreeBytes {
		t.Errorf("nodefs has %d bytes free and logs on the same disk %d", node.Filesystem.FreeBytes, logs.Filesystem.FreeBytes)
	}
	if logs.Filesystem.Mountpoint != "/srv/images" {
		t.Errorf("logs' mountpoint = %q, want that of its own mount", logs.Filesystem.Mountpoint)
	}
	if diff := cmp.Diff([]Role{NodeFS, Logs}, l.Sharing(Logs)); diff != "" {
		t.Errorf("sharing with logs (-want +got):\n%s", diff)
	}
}

func TestProjectQuotaKeepsItsOwnFigures(t *testing.T) {
	t.Parallel()
	src := &fakeSource{table: twoDisks, files: map[string]spot{
		"/var/lib/kubelet": disk(1, 1000),
		"/var/log":         disk(1, 100),
	}}
	l, err := fakeProber(src).Resolve(map[Role]string{NodeFS: "/var/lib/kubelet", Logs: "/var/log"})
	if err != nil {
		t.Fatal(err)
	}
	logs, _ := l.Get(Logs)
	if got, want := logs.Filesystem.CapacityBytes, uint64(409_600); got != want {
		t.Errorf("capacity = %d, want the quota's %d", got, want)
	}
}

func TestMissingPathStandsForItsNearestParent(t *testing.T) {
	t.Parallel()
	src := &fakeSource{
		table: twoDisks,
		files: map[string]spot{
			"/":                  disk(1, 1000),
			"/var":               disk(1, 1000),
			"/mnt/b":             disk(2, 2000),
			"/mnt/b/exists":      disk(2, 2000),
			"/mnt/third":         disk(8, 500),
			"/mnt/third/present": disk(8, 500),
		},
		links: map[string]string{
			"/var/dangling": "/mnt/b/not/there",
			"/var/relative": "../mnt/third/not/there",
			"/var/loop":     "/var/loop",
		},
	}
	for _, tc := range []struct {
		name, path         string
		wantPath, wantNote string
		wantDevice         Device
	}{
		{"one level", "/mnt/b/x", "/mnt/b", "/mnt/b/x does not exist; its nearest existing parent is /mnt/b", Device{8, 17}},
		{"many levels and slashes", "/mnt/b//x/y///z/", "/mnt/b", "/mnt/b//x/y///z/ does not exist; its nearest existing parent is /mnt/b", Device{8, 17}},
		{"up to the root", "/nothing/here", "/", "/nothing/here does not exist; its nearest existing parent is /", Device{8, 1}},
		{"symlink without target", "/var/dangling", "/mnt/b", "/var/dangling does not exist; its nearest existing parent is /mnt/b", Device{8, 17}},
		{"below a symlink without target", "/var/relative/x", "/mnt/third", "/var/relative/x does not exist; its nearest existing parent is /mnt/third", Device{8, 49}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			src := *src
			l, err := fakeProber(&src).Resolve(map[Role]string{ContainerFS: tc.path})
			if err != nil {
				t.Fatal(err)
			}
			p, _ := l.Get(ContainerFS)
			if !p.Missing {
				t.Error("Missing is false")
			}
			if diff := cmp.Diff([]any{tc.wantPath, tc.wantPath, tc.wantNote, tc.wantDevice},
				[]any{p.Path, p.Reported, p.Note, p.Filesystem.Device}); diff != "" {
				t.Errorf("place (-want +got):\n%s", diff)
			}
		})
	}
	t.Run("circle of symlinks", func(t *testing.T) {
		t.Parallel()
		src := *src
		if _, err := fakeProber(&src).Resolve(map[Role]string{ContainerFS: "/var/loop"}); err == nil {
			t.Error("no error")
		}
	})
}

func TestT30_NoInodeLimitIsNotZero(t *testing.T) {
	t.Parallel()
	one, two := uint64(1000), uint64(900)
	for _, tc := range []struct {
		name     string
		space    space
		want     Filesystem
		wantUsed uint64
		wantOK   bool
	}{
		{"btrfs", space{blockBytes: 4096, blocks: 100, free: 60, available: 50}, Filesystem{
			CapacityBytes: 409600, AvailableBytes: 204800, FreeBytes: 245760, UsedBytes: 163840,
		}, 0, false},
		{"ext4", space{blockBytes: 1024, blocks: 100, free: 60, available: 50, inodesTotal: 1000, inodesUnused: 900}, Filesystem{
			CapacityBytes: 102400, AvailableBytes: 51200, FreeBytes: 61440, UsedBytes: 40960, InodesTotal: &one, InodesFree: &two,
		}, 100, true},
		{"filled beyond root's reserve", space{blockBytes: 1024, blocks: 100, available: 1<<64 - 5}, Filesystem{
			CapacityBytes: 102400, UsedBytes: 102400,
		}, 0, false},
		{"nonsense never wraps", space{blockBytes: 1 << 32, blocks: 1 << 40, free: 1 << 41}, Filesystem{
			CapacityBytes: 1<<64 - 1, FreeBytes: 1<<64 - 1,
		}, 0, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			got := newFilesystem(mount{}, tc.space, time.Time{})
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if used, ok := got.InodesUsed(); used != tc.wantUsed || ok != tc.wantOK {
				t.Errorf("InodesUsed() = %d, %v; want %d, %v", used, ok, tc.wantUsed, tc.wantOK)
			}
		})
	}
}

func TestFilesystemOf(t *testing.T) {
	t.Parallel()
	src := &fakeSource{table: twoDisks, files: map[string]spot{
		"/mnt/strange": disk(7, 1000),
		"/mnt/gone":    disk(99, 1000),
	}}
	p := fakeProber(src)

	got, err := p.FilesystemOf("/mnt/strange")
	if err != nil {
		t.Fatal(err)
	}
	total, free := uint64(1000), uint64(900)
	if diff := cmp.Diff(Filesystem{
		Device: Device{8, 33}, Source: "/dev/my disk", Type: "ext4", Mountpoint: "/mnt/with space\\and\ttab",
		CapacityBytes: 4_096_000, AvailableBytes: 1_843_200, FreeBytes: 2_048_000, UsedBytes: 2_048_000,
		InodesTotal: &total, InodesFree: &free, MeasuredAt: testTime,
	}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}

	if _, err := p.FilesystemOf("mnt/strange"); !errors.Is(err, ErrNotAbsolute) {
		t.Errorf("relative path: %v, want ErrNotAbsolute", err)
	}
	if _, err := p.FilesystemOf("/none"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("missing path: %v, want fs.ErrNotExist", err)
	}
	before := src.reads
	if _, err := p.FilesystemOf("/mnt/gone"); !errors.Is(err, ErrMountUnknown) {
		t.Errorf("mount not in the table: %v, want ErrMountUnknown", err)
	}
	if got := src.reads - before; got != 2 {
		t.Errorf("mount table read %d times, want 2", got)
	}
}

func TestResolveKeepsWhatItFound(t *testing.T) {
	t.Parallel()
	src := &fakeSource{table: twoDisks, files: map[string]spot{"/var": disk(1, 1000)}}
	l, err := fakeProber(src).Resolve(map[Role]string{NodeFS: "/var", ImageFS: "relative", Logs: ""})
	if !errors.Is(err, ErrNotAbsolute) {
		t.Errorf("error = %v, want ErrNotAbsolute", err)
	}
	if len(l.Places) != 1 || l.Places[0].Role != NodeFS {
		t.Errorf("places = %+v, want nodefs alone", l.Places)
	}
	if got := l.Kind(); got != LayoutUnknown {
		t.Errorf("Kind() = %q, want unknown", got)
	}
}

func TestParseMounts(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("lowerdir+=/very/long/path,", 8000)
	for _, tc := range []struct {
		name, in string
		want     map[uint64]mount
		wantErr  bool
	}{
		{"empty", "", map[uint64]mount{}, false},
		{"no newline at the end", "36 35 98:0 /r /m rw master:1 - ext3 /dev/root rw", map[uint64]mount{36: {Device{98, 0}, "/m", "ext3", "/dev/root", "/r"}}, false},
		{"escapes", `36 35 98:0 / /a\040b\011c\012d\134e rw - ext3 /dev/x\040y rw` + "\n", map[uint64]mount{36: {Device{98, 0}, "/a b\tc\nd\\e", "ext3", "/dev/x y", "/"}}, false},
		{"two mounts at one place", "1 0 8:1 / /m rw - ext4 a rw\n2 1 8:2 / /m rw - ext4 b rw\n", map[uint64]mount{
			1: {Device{8, 1}, "/m", "ext4", "a", "/"}, 2: {Device{8, 2}, "/m", "ext4", "b", "/"},
		}, false},
		{"line of 200 kB", "1 0 0:9 / /m rw - overlay overlay " + long + "\n2 1 8:2 / /n rw - ext4 b rw\n", map[uint64]mount{
			1: {Device{0, 9}, "/m", "overlay", "overlay", "/"}, 2: {Device{8, 2}, "/n", "ext4", "b", "/"},
		}, false},
		{"not a mount table", "hello\n", nil, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			got, err := parseMounts(strings.NewReader(tc.in))
			if (err != nil) != tc.wantErr {
				t.Fatalf("error = %v, want error: %v", err, tc.wantErr)
			}
			if diff := cmp.Diff(tc.want, got, cmp.AllowUnexported(mount{})); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func FuzzParseMounts(f *testing.F) {
	f.Add(twoDisks)
	f.Add(`36 35 98:0 / /a\040b rw - ext3 /dev/x rw`)
	f.Fuzz(func(t *testing.T, in string) {
		_, _ = parseMounts(strings.NewReader(in)) //nolint:errcheck // it must not panic
	})
}
