package split

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/cleave-cri/cleave/snapshot/split/fence"
)

// purgeable is a snapshotter that has had a snapshot, and has none.
func purgeable(t *testing.T) Options {
	t.Helper()
	o := optionsIn(t, t.TempDir())
	if err := Init(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	s, err := Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	_, err = s.Prepare(t.Context(), "one", "")
	err = errors.Join(err, s.Remove(t.Context(), "one"), s.Close())
	if err != nil {
		t.Fatal(err)
	}
	return o
}

// left is all that is in both roots and beside the database.
func left(t *testing.T, o Options) []string {
	t.Helper()
	var out []string
	for _, dir := range []string{o.ImageRoot, o.ContainerRoot, filepath.Dir(o.Database)} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			path := filepath.Join(dir, e.Name())
			if path != o.ImageRoot && path != o.ContainerRoot {
				out = append(out, path)
			}
		}
	}
	return out
}

// TestPurge takes away all that a snapshotter has made, and nothing else.
func TestPurge(t *testing.T) {
	t.Parallel()
	o := purgeable(t)
	if err := os.Mkdir(filepath.Join(o.ImageRoot, "lost+found"), 0o700); err != nil {
		t.Fatal(err)
	}
	before := left(t, o)
	planned, err := Purge(t.Context(), o, true)
	if err != nil {
		t.Fatal(err)
	}
	if now := left(t, o); !slices.Equal(before, now) {
		t.Errorf("showing it changed %q to %q", before, now)
	}
	done, err := Purge(t.Context(), o, false)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(planned, done) {
		t.Errorf("it planned %q and did %q", planned, done)
	}
	want := []string{filepath.Join(o.ImageRoot, "lost+found"), o.Database + ".lock"}
	if got := left(t, o); !slices.Equal(got, want) {
		t.Errorf("left are %q, want %q", got, want)
	}
	if _, err := Purge(t.Context(), o, false); !errors.Is(err, ErrNotInitialised) {
		t.Errorf("a second one ended with %v", err)
	}
	initialised(t, o) // the roots are as good as new
}

// TestPurgeRefused: nothing is deleted while anything is not as it has to be.
func TestPurgeRefused(t *testing.T) {
	t.Parallel()
	write := func(path ...string) func(*testing.T, Options) {
		return func(t *testing.T, o Options) {
			t.Helper()
			full := filepath.Join(append([]string{o.ContainerRoot}, path...)...)
			if err := os.WriteFile(full, []byte("somebody's"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	for name, tc := range map[string]struct {
		spoil func(*testing.T, Options)
		want  string
	}{
		"a snapshotter runs": {func(t *testing.T, o Options) { t.Helper(); opened(t, o) }, "another process holds the lock"},
		"there is a snapshot": {func(t *testing.T, o Options) {
			t.Helper()
			s, err := Open(t.Context(), o)
			if err != nil {
				t.Fatal(err)
			}
			_, err = s.Prepare(t.Context(), "kept", "")
			if err = errors.Join(err, s.Close()); err != nil {
				t.Fatal(err)
			}
		}, "has 1 snapshots"},
		"something else in a root":       {write("database"), "database was not made by a snapshotter"},
		"something else among snapshots": {write(snapshotsDir, "backup"), "snapshots/backup was not made by"},
		"something else in the trash":    {write("trash", "backup"), "trash/backup was not made by"},
		"something in the empty folder":  {write(emptyName, "backup"), "backup was not made by"},
		"a folder called like a slot of the trash": {func(t *testing.T, o Options) {
			t.Helper()
			if err := os.MkdirAll(filepath.Join(o.ContainerRoot, "trash", "slot-backup", "inside"), 0o700); err != nil {
				t.Fatal(err)
			}
		}, "trash/slot-backup was not made by"},
		"a file called like a slot of the trash": {write("trash", "slot-backup"), "trash/slot-backup was not made by"},
		"a file called like a snapshot":          {write(snapshotsDir, "20261130"), "snapshots/20261130 was not made by"},
		"a file in place of a folder": {func(t *testing.T, o Options) {
			t.Helper()
			if err := os.Remove(filepath.Join(o.ContainerRoot, emptyName)); err != nil {
				t.Fatal(err)
			}
			write(emptyName)(t, o)
		}, emptyName},
		"a folder called like a new marker": {func(t *testing.T, o Options) {
			t.Helper()
			if err := os.MkdirAll(filepath.Join(o.ContainerRoot, fence.MarkerName+".new", "inside"), 0o700); err != nil {
				t.Fatal(err)
			}
		}, fence.MarkerName + ".new was not made by"},
		"something else in a probe": {func(t *testing.T, o Options) {
			t.Helper()
			if err := os.MkdirAll(filepath.Join(o.ContainerRoot, "probe", "backup"), 0o700); err != nil {
				t.Fatal(err)
			}
		}, "probe"},
		"a root that has another marker": {write(fence.MarkerName), "root"},
		"a root that has lost its marker": {func(t *testing.T, o Options) {
			t.Helper()
			if err := os.Remove(filepath.Join(o.ImageRoot, fence.MarkerName)); err != nil {
				t.Fatal(err)
			}
		}, "root"},
		"a database that is none": {func(t *testing.T, o Options) {
			t.Helper()
			if err := os.WriteFile(o.Database, []byte("nonsense"), 0o600); err != nil {
				t.Fatal(err)
			}
		}, refusal},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := purgeable(t)
			tc.spoil(t, o)
			before := left(t, o)
			for _, dry := range []bool{true, false} {
				if _, err := Purge(t.Context(), o, dry); err == nil || !strings.Contains(err.Error(), tc.want) {
					t.Errorf("dry %v: got %v, want %q in it", dry, err, tc.want)
				}
			}
			if now := left(t, o); !slices.Equal(before, now) {
				t.Errorf("it changed %q to %q", before, now)
			}
		})
	}
}

// refusal is how each begins.
const refusal = "purge the snapshotter: "

// TestPurgeTakesAProbe that a snapshotter left when it was killed at its start.
func TestPurgeTakesAProbe(t *testing.T) {
	t.Parallel()
	o := purgeable(t)
	if err := os.MkdirAll(filepath.Join(o.ImageRoot, "probe", "work", "work"), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := Purge(t.Context(), o, false); err != nil {
		t.Fatal(err)
	}
	if got := left(t, o); !slices.Equal(got, []string{o.Database + ".lock"}) {
		t.Errorf("left are %q", got)
	}
}

// TestPurgeWithoutDatabase: killed between the last two steps, it left markers and no
// database. What is left is not purged, and can be a snapshotter's again.
func TestPurgeWithoutDatabase(t *testing.T) {
	t.Parallel()
	o := purgeable(t)
	if err := os.Remove(o.Database); err != nil {
		t.Fatal(err)
	}
	before := left(t, o)
	if _, err := Purge(t.Context(), o, false); !errors.Is(err, ErrNotInitialised) {
		t.Errorf("it ended with %v", err)
	}
	if now := left(t, o); !slices.Equal(before, now) {
		t.Errorf("it changed %q to %q", before, now)
	}
}

// TestPurgeBrokenOff can be repeated, however far it came.
func TestPurgeBrokenOff(t *testing.T) {
	t.Parallel()
	for steps := range 6 {
		o := purgeable(t)
		ctx := &countdown{Context: t.Context(), left: steps}
		_, err := Purge(ctx, o, false)
		if err == nil {
			continue
		}
		if !errors.Is(err, context.Canceled) && !errdefs.IsFailedPrecondition(err) {
			t.Errorf("broken off after %d steps: %v", steps, err)
		}
		if _, err := Purge(t.Context(), o, false); err != nil {
			t.Errorf("repeated after %d steps: %v", steps, err)
		}
		if got := left(t, o); !slices.Equal(got, []string{o.Database + ".lock"}) {
			t.Errorf("after %d steps and another run %q are left", steps, got)
		}
	}
}

// TestPurgeNeverFollowsLinks that lie among the snapshots.
func TestPurgeNeverFollowsLinks(t *testing.T) {
	t.Parallel()
	o := purgeable(t)
	outside := t.TempDir()
	if err := os.WriteFile(filepath.Join(outside, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	folder := filepath.Join(o.ContainerRoot, snapshotsDir, "77")
	if err := errors.Join(os.Mkdir(folder, 0o700), os.Symlink(outside, filepath.Join(folder, "fs"))); err != nil {
		t.Fatal(err)
	}
	if _, err := Purge(t.Context(), o, false); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(outside, "file")); err != nil {
		t.Errorf("what a link leads to is gone: %v", err)
	}
}

// countdown is a context that ends after it was asked so often.
type countdown struct {
	context.Context //nolint:containedctx // it is one
	left            int
}

func (c *countdown) Err() error {
	if c.left--; c.left < 0 {
		return context.Canceled
	}
	return c.Context.Err()
}
