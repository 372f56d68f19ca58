package split

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
)

// TestOlderDatabaseTakesNoFolders: with a database from before there were
// snapshots, IDs are given out again whose folders are there. A crash leaves one
// such folder at most; more are somebody's, and creations must not take them.
func TestOlderDatabaseTakesNoFolders(t *testing.T) {
	t.Parallel()
	o := folders(t)
	s := initialised(t, o)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	older, err := os.ReadFile(o.Database)
	if err != nil {
		t.Fatal(err)
	}
	s = opened(t, o)
	if _, err := s.Prepare(t.Context(), "k8s.io/1/gone", ""); err != nil {
		t.Fatal(err)
	}
	base, layer := addLayer(t, s, 1, "")
	_, upper := addContainer(t, s, 2, base)
	if err := s.Remove(t.Context(), "k8s.io/1/gone"); err != nil {
		t.Fatal(err)
	}
	settle(t, s)
	if err := errors.Join(s.Close(), os.WriteFile(o.Database, older, 0o600)); err != nil {
		t.Fatal(err)
	}

	s = opened(t, o)
	// ID 1 is free, as it was when a poke had it; 2 is the layer's.
	var refused error
	for n := range 4 {
		key := fmt.Sprintf("k8s.io/%d/poke", n)
		if _, err := s.Prepare(t.Context(), key, ""); err != nil {
			refused = err
			continue
		}
		if err := s.Remove(t.Context(), key); err != nil {
			t.Fatal(err)
		}
	}
	if !errdefs.IsFailedPrecondition(refused) || !strings.Contains(refused.Error(), "newer than the database") {
		t.Errorf("a snapshot with the ID of another: %v, want it refused", refused)
	}
	if err := s.Cleanup(t.Context()); err == nil {
		t.Error("a clean-up with the older database was done")
	}
	settle(t, s)
	if !exists(filepath.Join(layer, "layer-1")) || !exists(upper) {
		t.Fatal("something was deleted")
	}

	// Somebody decides that they can go; then it works.
	if err := s.ConfirmCleanup(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Prepare(t.Context(), "k8s.io/9/new", ""); err != nil {
		t.Fatal(err)
	}
	settle(t, s)
	if exists(upper) {
		t.Error("what was confirmed is still there")
	}
	mustBeClean(t, s, o)
}
