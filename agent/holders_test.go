package agent

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cleave-cri/cleave/fsstats"
)

// Whoever has a deleted file of the disk open is named, with what that takes; nobody is where nobody has.
func TestHoldersOfDeletedFiles(t *testing.T) {
	t.Parallel()
	prober := fsstats.NewProber()
	path := filepath.Join(t.TempDir(), "layer-file")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close() //nolint:errcheck // a temporary file
	if _, err := f.Write(make([]byte, 8<<20)); err != nil {
		t.Fatal(err)
	}
	if err := f.Sync(); err != nil { // its blocks are allocated
		t.Fatal(err)
	}
	place, err := prober.FilesystemOf(path)
	if err != nil {
		t.Fatal(err)
	}
	h := holders{&decisions{observer: &observer{filesystems: prober}}}
	ask := func() (string, int64) {
		found, bytes, err := h.open(t.Context(), place.Device, []int{os.Getpid()})
		if err != nil {
			t.Error(err)
		}
		return strings.Join(found, "; "), bytes
	}
	mine := fmt.Sprintf("(process %d) has deleted files open, 8.0Mi", os.Getpid())
	if got, bytes := ask(); strings.Contains(got, mine) || bytes >= 8<<20 {
		t.Errorf("while it has a name: %q, %d bytes", got, bytes)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if got, bytes := ask(); !strings.Contains(got, mine) || bytes != 8<<20 {
		t.Errorf("said %q of %d bytes, want %q", got, bytes, mine)
	}
}

// Who holds space is told to people. A filesystem that hangs, as one of a FUSE snapshotter that is stopped, must hold no deletion up for it.
func TestExplanationsHoldNothingUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var busy atomic.Bool
		answers := make(chan struct{})
		ask := func() (string, time.Duration) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			began := time.Now()
			text := inTime(ctx, &busy, func() string { <-answers; return "found" })
			return text, time.Since(began)
		}
		if text, took := ask(); !strings.Contains(text, "does not answer") || took != time.Minute+holdersGrace {
			t.Errorf("of a filesystem that hangs: %q after %s", text, took)
		}
		if text, took := ask(); !strings.Contains(text, "did not answer") || took != 0 {
			t.Errorf("while it still hangs: %q after %s", text, took)
		}
		close(answers)
		synctest.Wait()
		if text, _ := ask(); text != "found" {
			t.Errorf("when it answers again: %q", text)
		}
	})
}
