package fuse_test

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/cleave-cri/cleave/lab/fuse"
	"github.com/cleave-cri/cleave/lab/need"
)

func mounted(t *testing.T, kind fuse.Server) (string, *fuse.Mount) {
	t.Helper()
	need.FUSE(t)
	dir := t.TempDir()
	m, err := fuse.New(dir, kind)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // if the test did not come so far
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return dir, m
}

func TestHangs(t *testing.T) {
	t.Parallel()
	dir, m := mounted(t, fuse.Hangs)
	answered := make(chan error, 1)
	go func() {
		_, err := os.ReadDir(dir)
		answered <- err
	}()
	for ctx := t.Context(); m.Asked() == 0; {
		if ctx.Err() != nil {
			t.Fatal("nobody asked")
		}
		tick(t)
	}
	select {
	case err := <-answered:
		t.Fatalf("a server that hangs answered: %v", err)
	default:
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-answered; err == nil {
		t.Error("no error after the server's end")
	}
}

// tick waits a little, in a way that the clock of a loaded machine does not matter.
func tick(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
	defer cancel()
	<-ctx.Done()
}

func TestZeros(t *testing.T) {
	t.Parallel()
	dir, m := mounted(t, fuse.Zeros)
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 0 {
		t.Errorf("ReadDir = %v, %v, want nothing", entries, err)
	}
	if _, err := os.Lstat(filepath.Join(dir, "x")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("error %v, want that it does not exist", err)
	}
	out, err := exec.CommandContext(t.Context(), "stat", "-f", "-c", "%b %f %c", dir).Output()
	if err != nil || string(out) != "0 0 0\n" {
		t.Errorf("statfs says %q, %v, want zeros", out, err)
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
}
