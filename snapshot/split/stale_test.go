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
// snapshots, IDs are given out again whose folders are there. They are somebody's,
// and creations must not take them.
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
		// What this process made is certainly not older; else each poke would leave a snapshot.
		if err := s.Remove(t.Context(), key); err != nil {
			t.Errorf("the poke's own removal: %v", err)
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

// TestOlderDatabaseRemovesNothing: a database was saved while a layer was being
// unpacked. The layer was committed since, and a container runs on it. With the
// saved database containerd, which does not know that extraction any more, wants to
// remove it, and the layer's files lie in its folder.
func TestOlderDatabaseRemovesNothing(t *testing.T) {
	t.Parallel()
	o := folders(t)
	s := initialised(t, o)
	key, opt := extraction(1, "")
	mounts, err := s.Prepare(t.Context(), key, "", opt)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(upperOf(t, mounts), "libc")
	if err := errors.Join(os.WriteFile(file, []byte("x"), 0o600), s.Close()); err != nil {
		t.Fatal(err)
	}
	older, err := os.ReadFile(o.Database)
	if err != nil {
		t.Fatal(err)
	}
	s = opened(t, o)
	if err := s.Commit(t.Context(), layerName(1), key); err != nil {
		t.Fatal(err)
	}
	_, upper := addContainer(t, s, 2, layerName(1))
	settle(t, s)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	newer, err := os.ReadFile(o.Database)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(o.Database, older, 0o600); err != nil {
		t.Fatal(err)
	}

	for _, tc := range []struct {
		name   string
		closed bool // the fence, at the start
	}{{"from the start", false}, {"before the sweep after the fence opened", true}} {
		t.Run(tc.name, func(t *testing.T) {
			marker, away := filepath.Join(o.ImageRoot, "cleave-root.json"), filepath.Join(t.TempDir(), "marker")
			if tc.closed {
				if err := os.Rename(marker, away); err != nil {
					t.Fatal(err)
				}
			}
			s := opened(t, o)
			if tc.closed {
				if err := errors.Join(os.Rename(away, marker), s.gate.Verify()); err != nil {
					t.Fatal(err)
				}
			}
			if err := s.Remove(t.Context(), key); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "newer than the database") {
				t.Errorf("removal: %v, want it refused because of the older database", err)
			}
			if err := s.Cleanup(t.Context()); !errdefs.IsFailedPrecondition(err) {
				t.Errorf("clean up: %v, want it refused", err)
			}
			settle(t, s)
			if !exists(file) || !exists(upper) {
				t.Fatal("files of a layer with a container on it were deleted")
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
		})
	}

	// With the right database the layer is there.
	if err := os.WriteFile(o.Database, newer, 0o600); err != nil {
		t.Fatal(err)
	}
	s = opened(t, o)
	if info, err := s.Stat(t.Context(), layerName(1)); err != nil || !exists(file) {
		t.Errorf("the layer: %v, %v", info, err)
	}
	if err := errors.Join(s.Close(), os.WriteFile(o.Database, older, 0o600)); err != nil {
		t.Fatal(err)
	}

	// Once somebody has let the folder of the container go, removals are taken, and
	// containerd is asked for those that it has forgotten.
	s = opened(t, o)
	select {
	case <-s.Reopened():
	default:
		t.Fatal("the start is not told")
	}
	if err := s.ConfirmCleanup(t.Context()); err != nil {
		t.Fatal(err)
	}
	select {
	case <-s.Reopened():
	default:
		t.Error("nobody is told that removals are taken again")
	}
	if err := s.Remove(t.Context(), key); err != nil {
		t.Error(err)
	}
	settle(t, s)
	mustBeClean(t, s, o)
}

// TestDatabaseOlderByOneSnapshot: a backup that lacks just the last snapshot,
// whatever that is and however little is in it, takes nothing, neither at the
// start nor in a clean-up nor for a new snapshot.
func TestDatabaseOlderByOneSnapshot(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		make func(*testing.T, *Snapshotter, string) (folder string)
	}{
		{"layer", func(t *testing.T, s *Snapshotter, base string) string {
			_, upper := addLayer(t, s, 2, base)
			return upper
		}},
		{"container that wrote nothing", func(t *testing.T, s *Snapshotter, base string) string {
			_, upper := addContainer(t, s, 2, base)
			return upper
		}},
		{"container on an empty base", func(t *testing.T, s *Snapshotter, _ string) string {
			_, upper := addContainer(t, s, 2, "")
			return upper
		}},
		{"the one before was removed", func(t *testing.T, s *Snapshotter, base string) string {
			key, _ := addContainer(t, s, 3, base)
			_, upper := addContainer(t, s, 2, base)
			if err := s.Remove(t.Context(), key); err != nil {
				t.Fatal(err)
			}
			return upper
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			o := folders(t)
			s := initialised(t, o)
			base, layer := addLayer(t, s, 1, "")
			settle(t, s)
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			older, err := os.ReadFile(o.Database)
			if err != nil {
				t.Fatal(err)
			}
			s = opened(t, o)
			folder := tc.make(t, s, base)
			settle(t, s)
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			newer, err := os.ReadFile(o.Database)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(o.Database, older, 0o600); err != nil {
				t.Fatal(err)
			}

			s = opened(t, o)
			settle(t, s)
			if err := s.Cleanup(t.Context()); !errdefs.IsFailedPrecondition(err) {
				t.Errorf("clean up: %v, want it held up", err)
			}
			var refused error
			for n := range 3 {
				_, err := s.Prepare(t.Context(), containerKey(50+n), base)
				refused = errors.Join(refused, err)
			}
			if !errdefs.IsFailedPrecondition(refused) {
				t.Errorf("snapshots with the ID of another: %v, want them refused", refused)
			}
			settle(t, s)
			st, err := s.Status(t.Context())
			if err != nil || st.Alarm == nil || !strings.Contains(st.Alarm.Reason, "newer than the database") {
				t.Errorf("status: %+v, %v", st.Alarm, err)
			}
			if !exists(folder) || !exists(filepath.Join(layer, "layer-1")) {
				t.Fatal("something was deleted")
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			r, err := Check(t.Context(), o)
			if err != nil || len(r.Findings) == 0 || !strings.Contains(r.Findings[0].What, "newer") {
				t.Errorf("check: %v, %v", r.Findings, err)
			}

			// With the right database all is as it was; with a request the folder goes.
			if tc.name == "layer" {
				if err := os.WriteFile(o.Database, newer, 0o600); err != nil {
					t.Fatal(err)
				}
				mustBeClean(t, opened(t, o), o)
				return
			}
			if moved, err := Repair(t.Context(), o, r.Plan); err != nil || len(moved) != 1 {
				t.Errorf("repair: %v, %v", moved, err)
			}
			s = opened(t, o)
			settle(t, s)
			if exists(folder) {
				t.Error("what a repair moved is still there")
			}
			mustBeClean(t, s, o)
		})
	}
}

// TestMarkComesBack: a loss of power can bring a folder's mark of its creation
// back. With an older database it is kept all the same if anything is in it, and
// with the right one the mark goes.
func TestMarkComesBack(t *testing.T) {
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
	_, layer := addLayer(t, s, 1, "")
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	newer, err := os.ReadFile(o.Database)
	if err != nil {
		t.Fatal(err)
	}
	folder := filepath.Dir(layer)
	if err := errors.Join(os.Chmod(folder, 0o700|os.ModeSticky), os.WriteFile(o.Database, older, 0o600)); err != nil {
		t.Fatal(err)
	}
	s = opened(t, o)
	settle(t, s)
	if !exists(filepath.Join(layer, "layer-1")) {
		t.Fatal("a layer was deleted")
	}
	if err := errors.Join(s.Close(), os.WriteFile(o.Database, newer, 0o600)); err != nil {
		t.Fatal(err)
	}
	s = opened(t, o)
	if info, err := os.Stat(folder); err != nil || info.Mode().Perm() != 0o700 || info.Mode()&os.ModeSticky != 0 {
		t.Errorf("the folder has the mode %v, %v", info.Mode(), err)
	}
	mustBeClean(t, s, o)
}
