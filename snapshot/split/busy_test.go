package split

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cleave-cri/cleave/lab/need"
	"github.com/cleave-cri/cleave/snapshot/split/fence"
	"github.com/cleave-cri/cleave/snapshot/split/rootdir"
)

// copied gives the options of a second snapshotter on the same roots, with a copy
// of the database.
func copied(t *testing.T, o Options) Options {
	t.Helper()
	content, err := os.ReadFile(o.Database)
	if err != nil {
		t.Fatal(err)
	}
	o.Database = filepath.Join(t.TempDir(), "copy.db")
	if err := os.WriteFile(o.Database, content, 0o600); err != nil {
		t.Fatal(err)
	}
	return o
}

// TestTwoDatabases: whoever starts a second snapshotter or a repair with a copy of
// the database, while the first works, is refused; each would take the other's
// layers for strays.
func TestTwoDatabases(t *testing.T) {
	t.Parallel()
	o := folders(t)
	s := initialised(t, o)
	addLayer(t, s, 1, "")
	settle(t, s)
	second := copied(t, o)
	_, layer := addLayer(t, s, 2, "")

	refused := func(what string, err error) {
		t.Helper()
		if !errors.Is(err, fence.ErrBusy) || !strings.Contains(err.Error(), o.ImageRoot) || !strings.Contains(err.Error(), "stop it") {
			t.Errorf("%s: %v", what, err)
		}
	}
	other, err := Open(t.Context(), second)
	refused("open", err)
	if err == nil {
		_ = other.Close() //nolint:errcheck // it should not be there
	}
	_, err = Check(t.Context(), second)
	refused("check", err)
	_, err = Repair(t.Context(), second, []Folder{{Root: fence.Image, Name: "2"}})
	refused("repair", err)
	if !exists(layer) {
		t.Error("a layer was deleted")
	}
	// The first goes on, and after its end the lock is free.
	addLayer(t, s, 3, "")
	mustBeClean(t, s, o)
	if _, err := Check(t.Context(), second); err != nil {
		t.Errorf("after the end of the first: %v", err)
	}
}

// TestRootTakenWhileAway: a root that comes back and that somebody else works on
// keeps the fence closed until that one is gone.
func TestRootTakenWhileAway(t *testing.T) {
	t.Parallel()
	o := folders(t)
	if err := initialised(t, o).Close(); err != nil {
		t.Fatal(err)
	}
	away := o.ImageRoot + "-away"
	if err := os.Rename(o.ImageRoot, away); err != nil {
		t.Fatal(err)
	}
	s := opened(t, o)
	stranger, err := rootdir.Open(away)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(stranger.Lock(), os.Rename(away, o.ImageRoot)); err != nil {
		t.Fatal(err)
	}
	if err := s.Cleanup(t.Context()); !errors.Is(err, fence.ErrBusy) {
		t.Errorf("while another one has the root: %v", err)
	}
	if err := stranger.Close(); err != nil {
		t.Fatal(err)
	}
	if err := s.Cleanup(t.Context()); err != nil {
		t.Errorf("afterwards: %v", err)
	}
	second := copied(t, o)
	if _, err := Check(t.Context(), second); !errors.Is(err, fence.ErrBusy) {
		t.Errorf("the root that came back is not locked: %v", err)
	}
}

// TestLockFollowsMount: a root that is mounted anew over itself is the same folder,
// and no stranger's; the lock moves to it.
func TestLockFollowsMount(t *testing.T) {
	t.Parallel()
	run := need.Lab(t)
	o := optionsIn(t, filepath.Join(run.Dir(), "plain"))
	s := initialised(t, o)
	addLayer(t, s, 1, "")
	settle(t, s)
	if err := unix.Mount(o.ImageRoot, o.ImageRoot, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(o.ImageRoot, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}()
	if err := s.Cleanup(t.Context()); err != nil {
		t.Errorf("after the mount: %v", err)
	}
	if _, err := Check(t.Context(), copied(t, o)); !errors.Is(err, fence.ErrBusy) {
		t.Errorf("the lock is lost: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}
