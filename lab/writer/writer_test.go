package writer

import (
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/janitor"
	"github.com/cleave-cri/cleave/lab/need"
	"github.com/cleave-cri/cleave/lab/scenario"
)

func TestMain(m *testing.M) {
	janitor.Main()
	Main()
	os.Exit(m.Run())
}

const kib = 1 << 10

// runFor runs a writer for a time and returns for how long it said it had no space.
func runFor(t *testing.T, dir string, w scenario.Write, d time.Duration) (noSpace time.Duration) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	if err := Run(ctx, w, dir, "w", func(n time.Duration) { noSpace = n }); err != nil {
		t.Error(err)
	}
	return noSpace
}

// found is what lies below a folder: bytes of files, and how many files there are.
func found(t *testing.T, dir string) (bytes, files int64) {
	t.Helper()
	err := filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		bytes, files = bytes+info.Size(), files+1
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return bytes, files
}

// After a time there is what was to be written by then, in virtual time.
func TestAmounts(t *testing.T) {
	t.Parallel()
	soon := time.Second
	for _, tc := range []struct {
		name         string
		write        scenario.Write
		after        time.Duration
		bytes, files int64
		slackBytes   int64
		slackFiles   int64
	}{
		{name: "at once", write: scenario.Write{To: "layer", AtOnceBytes: 100 * kib}, after: time.Second, bytes: 100 * kib, files: 1},
		{name: "steadily", write: scenario.Write{To: "layer", BytesPerSecond: 10 * kib}, after: 10 * time.Second, bytes: 100 * kib, files: 1, slackBytes: kib},
		{name: "from and until", write: scenario.Write{To: "layer", BytesPerSecond: 10 * kib, From: 2 * time.Second, Until: 5 * time.Second}, after: 20 * time.Second, bytes: 30 * kib, files: 1},
		{name: "at most", write: scenario.Write{To: "layer", AtOnceBytes: 10 * kib, BytesPerSecond: 10 * kib, AtMostBytes: 35 * kib}, after: 20 * time.Second, bytes: 35 * kib, files: 1},
		{name: "files at once", write: scenario.Write{To: "layer", AtOnceInodes: 1500}, after: time.Second, files: 1500},
		{name: "files steadily", write: scenario.Write{To: "layer", InodesPerSecond: 50}, after: 10 * time.Second, files: 500, slackFiles: 5},
		{name: "a file that is deleted", write: scenario.Write{To: "layer", BytesPerSecond: 10 * kib, UnlinksAfter: &soon}, after: 10 * time.Second},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			synctest.Test(t, func(t *testing.T) {
				if lack := runFor(t, dir, tc.write, tc.after); lack != 0 {
					t.Errorf("no space for %s", lack)
				}
			})
			bytes, files := found(t, dir)
			if bytes > tc.bytes || bytes < tc.bytes-tc.slackBytes || files > tc.files || files < tc.files-tc.slackFiles {
				t.Errorf("%d bytes in %d files, want %d in %d", bytes, files, tc.bytes, tc.files)
			}
		})
	}
}

// On a full disk a writer goes on, counts, and what it could not write is lost.
func TestNoSpace(t *testing.T) {
	t.Parallel()
	need.Loop(t)
	run := need.Lab(t)
	d, err := disk.Make(t.Context(), run.Dir(), disk.Spec{Name: "d", SizeBytes: 32 << 20})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	var before syscall.Statfs_t
	if err := syscall.Statfs(d.Path(), &before); err != nil {
		t.Fatal(err)
	}
	free := int64(before.Bfree) * before.Bsize //nolint:gosec // of a small disk
	synctest.Test(t, func(t *testing.T) {
		// It is full after about 10 s of 30.
		lack := runFor(t, d.Path(), scenario.Write{To: "layer", BytesPerSecond: free / 10}, 30*time.Second)
		if lack < 19*time.Second || lack > 21*time.Second {
			t.Errorf("no space for %s, want about 20s", lack)
		}
	})
	bytes, _ := found(t, filepath.Join(d.Path(), "w"))
	if bytes < free*9/10 {
		t.Errorf("%d bytes of %d", bytes, free)
	}
}

// What containers note is found again by their names.
func TestNotes(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if got, err := Noted(filepath.Join(dir, "none")); err != nil || len(got) > 0 {
		t.Errorf("%v, %v", got, err)
	}
	note(filepath.Join(dir, "web-1.app-0"), 300*time.Millisecond)
	note(filepath.Join(dir, "web-1.app-1"), 2*time.Second)
	note(filepath.Join(dir, "web-2.app-0"), time.Second)
	got, err := Noted(dir)
	if err != nil || len(got) != 2 || got["web-1.app"] != 2*time.Second || got["web-2.app"] != time.Second {
		t.Errorf("%v, %v", got, err)
	}
}

// Logs are lines, or nobody could read them.
func TestLines(t *testing.T) {
	t.Parallel()
	for i, line := range strings.SplitAfter(string(lines()), "\n") {
		if len(line) != 100 && line != "" {
			t.Fatalf("line %d has %d bytes", i, len(line))
		}
	}
}

// TestEndOfWhatIsEndless: what would take years ends with its context, as SIGTERM to its container or the end of the scene.
func TestEndOfWhatIsEndless(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		w    scenario.Write
	}{
		{"bytes", scenario.Write{To: scenario.ToLayer, AtOnceBytes: 1 << 50}},
		{"files", scenario.Write{To: scenario.ToLayer, AtOnceInodes: 1 << 50}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			if err := Run(ctx, tc.w, t.TempDir(), "x", func(time.Duration) {}); err != nil {
				t.Error(err)
			}
		})
	}
}
