package installer

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/lab/need"
)

// TestWithoutSystemd nothing is done, and it says what to do by hand and how to go
// back.
func TestWithoutSystemd(t *testing.T) {
	t.Parallel()
	need.Root(t)
	dir := t.TempDir()
	cfg := config.Default()
	cfg.StateDir = filepath.Join(dir, "state")
	_, err := newInstaller(cfg, io.Discard, filepath.Join(dir, "missing"))
	if err == nil {
		t.Fatal("it goes on")
	}
	for _, want := range []string{"not run by systemd", "nothing was changed", "cleave serve", cfg.Listen.Endpoint.String(), "To go back", cfg.Runtime.Endpoint.String()} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in: %v", want, err)
		}
	}
	if _, err := os.Stat(cfg.StateDir); !os.IsNotExist(err) {
		t.Errorf("its state folder was made: %v", err)
	}
	if _, err := newInstaller(cfg, io.Discard, dir); err != nil {
		t.Errorf("with systemd: %v", err)
	}
}

// TestPurgeWithoutSnapshotter says that there is nothing, and deletes nothing.
func TestPurgeWithoutSnapshotter(t *testing.T) {
	t.Parallel()
	need.Root(t)
	in, err := newInstaller(config.Default(), io.Discard, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{in.ShowPurge(), in.Purge(t.Context(), true), in.Purge(t.Context(), false)} {
		if err == nil {
			t.Error("it goes on without roots")
		}
	}
}
