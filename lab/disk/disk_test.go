package disk_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/need"
)

func TestMakeAndClose(t *testing.T) {
	t.Parallel()
	for _, fs := range disk.Filesystems() {
		t.Run(string(fs), func(t *testing.T) {
			t.Parallel()
			need.Loop(t)
			need.Tools(t, "mkfs."+string(fs))
			run := need.Lab(t)

			const sizeBytes = 320 << 20
			d, err := disk.Make(t.Context(), run.Dir(), disk.Spec{Name: "d", SizeBytes: sizeBytes, FS: fs})
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(d.Path(), "file"), make([]byte, 1<<20), 0o600); err != nil {
				t.Fatal(err)
			}
			var st syscall.Statfs_t
			if err := syscall.Statfs(d.Path(), &st); err != nil {
				t.Fatal(err)
			}
			total := st.Blocks * uint64(st.Bsize)
			if total > sizeBytes || total < sizeBytes*3/4 {
				t.Errorf("the filesystem has %d bytes, want about %d", total, sizeBytes)
			}
			if !strings.HasPrefix(d.Device(), "/dev/loop") {
				t.Errorf("device is %q, want a loop device", d.Device())
			}
			var image syscall.Stat_t
			if err := syscall.Stat(d.Image(), &image); err != nil {
				t.Fatal(err)
			}
			if used := image.Blocks * 512; used > sizeBytes/2 {
				t.Errorf("the file uses %d bytes, want a sparse one", used)
			}
			if err := d.Close(t.Context()); err != nil {
				t.Fatal(err)
			}
			assertGone(t, filepath.Dir(d.Image()))
		})
	}
}

// A process that still works in the filesystem must neither make Close fail at once nor leave the device behind.
func TestCloseWhileInUse(t *testing.T) {
	t.Parallel()
	need.Loop(t)
	run := need.Lab(t)
	d, err := disk.Make(t.Context(), run.Dir(), disk.Spec{Name: "d", SizeBytes: 32 << 20})
	if err != nil {
		t.Fatal(err)
	}
	file, err := os.Create(filepath.Join(d.Path(), "open"))
	if err != nil {
		t.Fatal(err)
	}
	closed := make(chan error, 1)
	go func() { closed <- d.Close(context.WithoutCancel(t.Context())) }()
	for mounted(t, d.Path()) { // detached first; the device is free only when the file is closed
		if t.Context().Err() != nil {
			t.Fatal("the filesystem was not detached")
		}
	}
	if err := file.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-closed; err != nil {
		t.Fatal(err)
	}
	assertGone(t, filepath.Dir(d.Image()))
}

func TestMakeUndoesAfterFailure(t *testing.T) {
	t.Parallel()
	need.Loop(t)
	run := need.Lab(t)
	for _, tc := range []struct {
		name string
		spec disk.Spec
	}{
		{"mount option unknown", disk.Spec{Name: "a", SizeBytes: 32 << 20, Options: []string{"no-such-option"}}},
		{"filesystem unknown", disk.Spec{Name: "b", SizeBytes: 32 << 20, FS: "nofs"}},
		{"xfs too small", disk.Spec{Name: "c", SizeBytes: 32 << 20, FS: disk.XFS}},
		{"no room for a filesystem", disk.Spec{Name: "d", SizeBytes: 512}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if _, err := disk.Make(t.Context(), run.Dir(), tc.spec); err == nil {
				t.Fatal("want an error")
			}
			assertGone(t, filepath.Join(run.Dir(), tc.spec.Name))
		})
	}
	if _, err := disk.Make(t.Context(), run.Dir(), disk.Spec{Name: "../x", SizeBytes: 32 << 20}); err == nil {
		t.Error("a name with a slash was taken")
	}
}

func assertGone(t *testing.T, dir string) {
	t.Helper()
	if _, err := os.Lstat(dir); !os.IsNotExist(err) {
		t.Errorf("%s is still there (%v)", dir, err)
	}
	if mounted(t, dir) {
		t.Errorf("something is still mounted below %s", dir)
	}
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if backing, err := os.ReadFile(f); err == nil && strings.HasPrefix(string(backing), dir) {
			t.Errorf("%s still has %s", f, backing)
		}
	}
}

func mounted(t *testing.T, dir string) bool {
	t.Helper()
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Contains(string(table), dir)
}
