package installer

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/lab/need"
	"github.com/cleave-cri/cleave/systemd/install/transaction"
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

// TestBrokenOffIsSaidFirst: where an install was broken off, showing a plan says so and
// what to do, before anything of the node is looked at; while one is under way it says
// that.
func TestBrokenOffIsSaidFirst(t *testing.T) {
	t.Parallel()
	need.Root(t)
	cfg := config.Default()
	cfg.StateDir = t.TempDir()
	in, err := newInstaller(cfg, io.Discard, cfg.StateDir)
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(cfg.StateDir, stateName)
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "journal.json"), []byte(`{"version":1,"kind":"cleave install","steps":[]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	plans := map[string]func() error{
		"install":   func() error { _, err := in.Plan(t.Context(), Options{Mode: config.ModeCRI}); return err },
		"uninstall": func() error { _, err := in.UninstallPlan(t.Context()); return err },
	}
	for name, plan := range plans {
		if err := plan(); !errors.Is(err, transaction.ErrUnfinished) || !strings.Contains(err.Error(), "--resume") || !strings.Contains(err.Error(), "--revert") {
			t.Errorf("%s says %v", name, err)
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 {
		t.Errorf("showing it made %v, %v", entries, err)
	}
	lock, err := os.Create(filepath.Join(dir, "lock"))
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close() //nolint:errcheck // a test's own
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	for name, plan := range plans {
		if err := plan(); !errors.Is(err, transaction.ErrBusy) {
			t.Errorf("while another is at it %s says %v", name, err)
		}
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
