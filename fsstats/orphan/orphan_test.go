package orphan

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/fuse"
	"github.com/cleave-cri/cleave/lab/janitor"
	"github.com/cleave-cri/cleave/lab/need"
)

func TestMain(m *testing.M) {
	janitor.Main()
	if len(os.Args) > 2 && os.Args[1] == "hold" {
		if err := hold(os.Args[2], os.Args[3:]); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// hold is a process of a container: it opens or maps files, says so, and keeps
// them until its input ends.
func hold(how string, paths []string) error {
	for _, path := range paths {
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close() //nolint:errcheck // only read
		if how == "map" {
			if _, err := unix.Mmap(int(f.Fd()), 0, os.Getpagesize(), unix.PROT_READ, unix.MAP_SHARED); err != nil {
				return err
			}
			if err := f.Close(); err != nil {
				return err
			}
		}
	}
	fmt.Println("held")
	_, err := bufio.NewReader(os.Stdin).ReadByte()
	if err == nil {
		return errors.New("somebody wrote to the input")
	}
	return nil
}

// holder starts a process that holds files, until the test ends or it is let go.
func holder(t *testing.T, how string, paths ...string) (pid int, letGo func()) {
	t.Helper()
	self, err := os.Executable()
	must(t, err)
	cmd := exec.Command(self, append([]string{"hold", how}, paths...)...)
	in, err := cmd.StdinPipe()
	must(t, err)
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	done := false
	letGo = func() {
		if done {
			return
		}
		done = true
		if err := errors.Join(in.Close(), cmd.Wait()); err != nil {
			t.Errorf("a process that held files: %v", err)
		}
	}
	t.Cleanup(letGo)
	line, err := bufio.NewReader(out).ReadString('\n')
	if line != "held\n" {
		t.Fatalf("a process that should hold files said %q, %v", line, err)
	}
	return cmd.Process.Pid, letGo
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func makeDisk(t *testing.T, spec disk.Spec) (path string, device fsstats.Device) {
	t.Helper()
	need.Loop(t)
	need.Tools(t, "mkfs."+string(spec.FS))
	spec.Name = "d"
	d, err := disk.Make(t.Context(), need.Lab(t).Dir(), spec)
	must(t, err)
	return d.Path(), deviceOf(t, d.Path())
}

func deviceOf(t testing.TB, path string) fsstats.Device {
	t.Helper()
	f, err := fsstats.NewProber().FilesystemOf(path)
	must(t, err)
	return f.Device
}

func options() Options {
	prober := fsstats.NewProber()
	return Options{DeviceOf: func(path string) (fsstats.Device, error) {
		f, err := prober.FilesystemOf(path)
		return f.Device, err
	}}
}

func find(t *testing.T, holders ...Holder) Report {
	t.Helper()
	r, err := Find(t.Context(), holders, options())
	must(t, err)
	if r.Partial || r.Unreadable > 0 {
		t.Errorf("partial: %v", r.Errors)
	}
	return r
}

// allocate makes a file that takes exactly so many bytes, without writing them.
func allocate(t testing.TB, path string, size int64) {
	t.Helper()
	f, err := os.Create(path)
	must(t, err)
	must(t, errors.Join(unix.Fallocate(int(f.Fd()), 0, 0, size), f.Close()))
}

// TestT14_EightGiBDeletedAndHeld: du does not see it, the disk is full of it, and
// it is container X's.
func TestT14_EightGiBDeletedAndHeld(t *testing.T) {
	t.Parallel()
	for _, fs := range []disk.FS{disk.XFS, disk.Btrfs} { // ext4 counts what it needs to find 8 GiB too
		t.Run(string(fs), func(t *testing.T) {
			t.Parallel()
			const size = 8 << 30
			root, device := makeDisk(t, disk.Spec{SizeBytes: 10 << 30, FS: fs})
			path := filepath.Join(root, "large")
			allocate(t, path, size)
			pid, letGo := holder(t, "open", path)
			must(t, os.Remove(path))

			r := find(t, Holder{"other", []int{os.Getpid()}}, Holder{"X", []int{pid}})
			if got := r.Sums[Place{"X", device}]; got != (Sum{Bytes: 8589934592, Files: 1}) {
				t.Errorf("X holds %+v, want one file of 8589934592 bytes; all: %v", got, r.Sums)
			}
			i := slices.IndexFunc(r.Files, func(f File) bool { return f.Holder == "X" })
			if i < 0 || r.Files[i].Name != path || r.Files[i].PID != pid || r.Files[i].Mapped {
				t.Errorf("files = %+v, want %s of process %d", r.Files, path, pid)
			}
			letGo()
			if r := find(t, Holder{"X", []int{pid}}); len(r.Sums) != 0 {
				t.Errorf("after it was let go: %v", r.Sums)
			}
		})
	}
}

// TestEachFileOnce: by several descriptors, mappings, processes and owners; what
// has a name or lies in memory is none.
func TestEachFileOnce(t *testing.T) {
	t.Parallel()
	root, device := makeDisk(t, disk.Spec{SizeBytes: 320 << 20, FS: disk.Ext4})
	in := func(name string) string { return filepath.Join(root, name) }
	for i, name := range []string{"shared", "mapped", "named", "linked", "really (deleted)", "zero"} {
		allocate(t, in(name), int64(i+1)<<20)
	}
	must(t, os.Truncate(in("zero"), 0))
	must(t, os.Link(in("linked"), in("other name")))
	memory := filepath.Join(t.TempDir(), "tmpfs")
	must(t, os.Mkdir(memory, 0o755))
	must(t, unix.Mount("none", memory, "tmpfs", 0, ""))
	t.Cleanup(func() { must(t, unix.Unmount(memory, 0)) })
	must(t, os.WriteFile(filepath.Join(memory, "file"), make([]byte, 1<<20), 0o600))

	one, _ := holder(t, "open", in("shared"), in("shared"), in("named"), in("linked"), in("really (deleted)"), in("zero"), in("mapped"))
	two, _ := holder(t, "open", in("shared"), filepath.Join(memory, "file"))
	three, _ := holder(t, "map", in("mapped"), in("named"))
	four, letFour := holder(t, "map", in("shared"))
	letFour()
	for _, path := range []string{in("shared"), in("mapped"), in("linked"), in("zero"), filepath.Join(memory, "file")} {
		must(t, os.Remove(path))
	}

	sizes := map[string]int64{"shared": 1 << 20, "mapped": 2 << 20, "zero": 0}
	r := find(t, Holder{"C", []int{three}}, Holder{"A", []int{one, two, four}}, Holder{"B", []int{two}})
	got := map[string]int64{}
	for _, f := range r.Files {
		got[filepath.Base(f.Name)] = f.Bytes
		if f.Device != device || f.StatDevice.Major == 0 {
			t.Errorf("%+v is not on %v", f, device)
		}
	}
	if diff := cmp.Diff(sizes, got); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
	want := map[Place]Sum{{"C", device}: {2 << 20, 1}, {"A", device}: {1 << 20, 2}}
	if diff := cmp.Diff(want, r.Sums); diff != "" {
		t.Errorf("sums (-want +got):\n%s", diff)
	}
	if r.Unplaced != (Sum{}) || len(r.Overlays) != 0 {
		t.Errorf("unplaced: %+v, in overlays: %v", r.Unplaced, r.Overlays)
	}
}

// TestOverlay: what a container deleted in its writable layer is on that layer's
// disk; what it deleted of its image takes nothing more than before.
func TestOverlay(t *testing.T) {
	t.Parallel()
	root, device := makeDisk(t, disk.Spec{SizeBytes: 320 << 20, FS: disk.Ext4})
	in := func(names ...string) string { return filepath.Join(append([]string{root, "with space"}, names...)...) }
	for _, name := range []string{"lower", "upper", "work", "merged"} {
		must(t, os.MkdirAll(in(name), 0o755))
	}
	allocate(t, in("lower", "of the image"), 4<<20)
	must(t, unix.Mount("overlay", in("merged"), "overlay", 0, fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", in("lower"), in("upper"), in("work"))))
	t.Cleanup(func() { must(t, unix.Unmount(in("merged"), unix.MNT_DETACH)) })
	allocate(t, in("merged", "written"), 3<<20)
	allocate(t, in("merged", "mapped"), 2<<20)
	one, letOne := holder(t, "open", in("merged", "of the image"), in("merged", "written"))
	two, letTwo := holder(t, "map", in("merged", "mapped"))
	defer letTwo()
	defer letOne()
	for _, name := range []string{"of the image", "written", "mapped"} {
		must(t, os.Remove(in("merged", name)))
	}
	// A volume on the same disk is no part of the layer.
	allocate(t, in("in a volume"), 1<<20)
	three, letThree := holder(t, "open", in("in a volume"))
	defer letThree()
	must(t, os.Remove(in("in a volume")))

	r := find(t, Holder{"X", []int{one, two, three}})
	if diff := cmp.Diff(map[Place]Sum{{"X", device}: {6 << 20, 3}}, r.Sums); diff != "" {
		t.Errorf("sums (-want +got):\n%s\nfiles: %+v", diff, r.Files)
	}
	if diff := cmp.Diff(map[Place]Sum{{"X", device}: {5 << 20, 2}}, r.Overlays); diff != "" {
		t.Errorf("in overlays (-want +got):\n%s\nfiles: %+v", diff, r.Files)
	}
	without, err := Find(t.Context(), []Holder{{"X", []int{one, two}}}, Options{})
	must(t, err)
	if len(without.Sums) != 0 || without.Unplaced != (Sum{5 << 20, 2}) {
		t.Errorf("without somebody to ask: %v, unplaced %+v", without.Sums, without.Unplaced)
	}
}

// TestHungServer: a process that has a file of a server which does not answer
// any more is looked at without asking it.
func TestHungServer(t *testing.T) {
	t.Parallel()
	need.FUSE(t)
	dir := t.TempDir()
	m, err := fuse.New(dir, fuse.Hangs)
	must(t, err)
	t.Cleanup(func() { must(t, m.Close()) })
	// The root of the mount as a mere place, which asks nobody.
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_CLOEXEC, 0)
	must(t, err)
	t.Cleanup(func() { must(t, unix.Close(fd)) })
	find(t, Holder{"X", []int{os.Getpid()}})
	// And one whose name is gone, looked at as a deleted file would be.
	p, err := openProcess(os.Getpid())
	must(t, err)
	defer p.close()
	if _, err := p.stat("fd/" + strconv.Itoa(fd)); err != nil {
		t.Errorf("look at a file of it: %v", err)
	}
	if asked := m.Asked(); asked != 0 {
		t.Errorf("the server was asked %d times", asked)
	}
}

func TestBudgetAndEnd(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	// So few a second that the deadline comes first.
	r, err := Find(ctx, []Holder{{"X", []int{os.Getpid()}}}, Options{EntriesPerSecond: 1})
	if !errors.Is(err, context.DeadlineExceeded) || !r.Partial {
		t.Errorf("Find = %+v, %v, want a partial report and the deadline", r, err)
	}
	r, err = Find(t.Context(), []Holder{{"X", []int{1 << 30}}}, Options{})
	if err != nil || r.Partial || r.Entries != 0 {
		t.Errorf("a process that is gone: %+v, %v, want nothing and no error", r, err)
	}
}

func TestProcesses(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	for path, content := range map[string]string{
		"cgroup.procs": "1\n", "pod/cgroup.procs": "", "pod/a/cgroup.procs": "12\n13\n", "pod/b/deeper/cgroup.procs": "0\n99\n",
		"pod/b/memory.max": "max\n",
	} {
		must(t, os.MkdirAll(filepath.Join(root, filepath.Dir(path)), 0o755))
		must(t, os.WriteFile(filepath.Join(root, path), []byte(content), 0o600))
	}
	got, err := Processes(filepath.Join(root, "pod"))
	must(t, err)
	if diff := cmp.Diff([]int{12, 13, 99}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got, err := Processes(filepath.Join(root, "gone")); err != nil || len(got) != 0 {
		t.Errorf("a cgroup that is gone: %v, %v", got, err)
	}
	must(t, os.WriteFile(filepath.Join(root, "pod/a/cgroup.procs"), []byte("x\n"), 0o600))
	if _, err := Processes(root); err == nil {
		t.Error("no error where there is no number")
	}
}

func TestParseMapping(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name, line            string
		area, file, wantNamed string
		ok                    bool
	}{
		{"deleted", "7f0c1000-7f0c2000 r--s 00000000 08:01 1234                       /data/a b (deleted)", "7f0c1000-7f0c2000", "08:01 1234", "/data/a b (deleted)", true},
		{"leading zeros", "00400000-00452000 r-xp 00000000 fd:00 5 /bin/x (deleted)", "400000-452000", "fd:00 5", "/bin/x (deleted)", true},
		{"has a name", "00400000-00452000 r-xp 00000000 fd:00 5 /bin/x", "", "", "", false},
		{"memory", "7f0c1000-7f0c2000 rw-s 00000000 00:01 1234 /memfd:x (deleted)", "", "", "", false},
		{"nothing", "", "", "", "", false},
		{"no file", "7f0c1000-7f0c2000 rw-p 00000000 00:00 0", "", "", "", false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			area, file, name, ok := parseMapping([]byte(tc.line))
			if diff := cmp.Diff([]any{tc.area, tc.file, tc.wantNamed, tc.ok}, []any{area, file, name, ok}); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestParseMounts(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("/some/lower/layer:", 10_000)
	table := `22 1 8:17 / /mnt/with\040space rw,relatime shared:1 - ext4 /dev/sdb1 rw
not a line
23 22 0:45 / /merged rw - overlay overlay rw,lowerdir=` + long + `,upperdir=/mnt/with\040space/upper,workdir=/w
24 22 0:46 / /view ro - overlay overlay ro,lowerdir=/a:/b
25 22 0:47 / /odd rw - overlay overlay rw,upperdir=relative`
	got, err := parseMounts(strings.NewReader(table))
	must(t, err)
	want := mountTable{
		22: {device: fsstats.Device{Major: 8, Minor: 17}, fstype: "ext4"},
		23: {device: fsstats.Device{Minor: 45}, fstype: "overlay", upper: "/mnt/with space/upper"},
		24: {device: fsstats.Device{Minor: 46}, fstype: "overlay"},
		25: {device: fsstats.Device{Minor: 47}, fstype: "overlay"},
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(mount{})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func FuzzParseMount(f *testing.F) {
	f.Add(`23 22 0:45 / /merged rw - overlay overlay rw,lowerdir=/l,upperdir=/u\040x,workdir=/w`)
	f.Add(" - ")
	f.Fuzz(func(t *testing.T, line string) {
		if _, m, ok := parseMount(line); ok && m.upper != "" && m.fstype != "overlay" {
			t.Errorf("%q has an upper folder and is no overlay", line)
		}
	})
}

func FuzzParseMapping(f *testing.F) {
	f.Add([]byte("7f0c1000-7f0c2000 r--s 00000000 08:01 1234   /data/a b (deleted)"))
	f.Fuzz(func(t *testing.T, line []byte) {
		area, file, name, ok := parseMapping(line)
		if ok && (!strings.Contains(area, "-") || file == "" || !strings.HasSuffix(name, deleted) || bytes.IndexByte([]byte(area), '/') >= 0 && !bytes.Contains(line, []byte("/"))) {
			t.Errorf("%q: area %q, file %q, name %q", line, area, file, name)
		}
	})
}
