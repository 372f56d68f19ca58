package hint

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/janitor"
	"github.com/cleave-cri/cleave/lab/need"
)

func TestMain(m *testing.M) {
	janitor.Main()
	os.Exit(m.Run())
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestOfProcesses: writing moves it, through descriptors and through memory.
func TestOfProcesses(t *testing.T) { // not parallel: the test's own process writes
	need.Loop(t)
	d, err := disk.Make(t.Context(), need.Lab(t).Dir(), disk.Spec{Name: "d", SizeBytes: 64 << 20})
	must(t, err)
	path := filepath.Join(d.Path(), "file")
	f, err := os.Create(path)
	must(t, err)
	must(t, f.Truncate(1<<20))
	t.Cleanup(func() { must(t, f.Close()) })
	for _, tc := range []struct {
		name string
		do   func() error
	}{
		{"a write", func() error { _, err := f.WriteAt(make([]byte, 100_000), 0); return err }},
		{"a store into a mapped file", func() error {
			memory, err := unix.Mmap(int(f.Fd()), 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
			if err != nil {
				return err
			}
			memory[500_000] = 1
			return unix.Munmap(memory)
		}},
	} {
		before, ok := OfProcesses([]int{os.Getpid(), 1 << 30})
		if !ok {
			t.Fatal("nothing is known of this process")
		}
		must(t, tc.do())
		if after, _ := OfProcesses([]int{os.Getpid()}); after == before {
			t.Errorf("%s moved nothing", tc.name)
		}
	}
	if _, ok := OfProcesses([]int{1 << 30}); ok {
		t.Error("something is known of a process that is not there")
	}
}

func TestOfCgroup(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	hint := func() uint64 {
		t.Helper()
		n, ok := OfCgroup(dir)
		if !ok {
			t.Fatal("nothing is known")
		}
		return n
	}
	write := func(name, content string) {
		t.Helper()
		must(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600))
	}
	if _, ok := OfCgroup(dir); ok {
		t.Error("something is known of a cgroup of version 1")
	}
	write("memory.stat", "anon 1\nfile 10\nfile_dirty 4096\nfile_writeback 0\n")
	first := hint()
	write("memory.stat", "anon 2\nfile 20\nfile_dirty 4096\nfile_writeback 0\n")
	if hint() != first {
		t.Error("reading moved the hint")
	}
	write("memory.stat", "anon 2\nfile 20\nfile_dirty 8192\nfile_writeback 0\n")
	second := hint()
	write("io.stat", "8:16 rbytes=1 wbytes=0 rios=1 wios=0 dbytes=0 dios=0\n8:0 rbytes=1 wbytes=5\n")
	third := hint()
	write("io.stat", "8:16 rbytes=9 wbytes=0 rios=9 wios=0 dbytes=0 dios=0\n8:0 rbytes=9 wbytes=5\n")
	if hint() != third {
		t.Error("reading moved the hint")
	}
	write("io.stat", "8:16 rbytes=1 wbytes=0 rios=1 wios=0 dbytes=0 dios=0\n8:0 rbytes=1 wbytes=6\n")
	if fourth := hint(); first == second || second == third || third == fourth {
		t.Errorf("hints %d %d %d %d, want all different", first, second, third, fourth)
	}
}
