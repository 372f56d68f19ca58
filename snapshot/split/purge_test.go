package split

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/cleave-cri/cleave/snapshot/split/boltfile"
	"github.com/cleave-cri/cleave/snapshot/split/fence"
	"github.com/cleave-cri/cleave/snapshot/split/trash"
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

// onlyMarkersLeft is what a purge leaves that was killed when the database was
// gone.
func onlyMarkersLeft(t *testing.T) Options {
	t.Helper()
	o := purgeable(t)
	for _, path := range []string{o.Database, o.Database + usageSuffix, boltfile.NewBallast(o.Database, o.BallastBytes).Path()} {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
	}
	for _, root := range []string{o.ImageRoot, o.ContainerRoot} {
		for _, dir := range []string{snapshotsDir, trash.Dir, emptyName} {
			if err := os.RemoveAll(filepath.Join(root, dir)); err != nil {
				t.Fatal(err)
			}
		}
	}
	return o
}

// TestPurgeOfMarkersAlone: killed after the database was gone, it is finished by
// doing the same again.
func TestPurgeOfMarkersAlone(t *testing.T) {
	t.Parallel()
	for name, before := range map[string]func(o Options) error{
		"both markers": func(Options) error { return nil },
		"one marker":   func(o Options) error { return os.Remove(filepath.Join(o.ImageRoot, fence.MarkerName)) },
		"a marker that was being written": func(o Options) error {
			return os.WriteFile(filepath.Join(o.ContainerRoot, fence.MarkerName+".new"), nil, 0o600)
		},
		"a filesystem's own folder": func(o Options) error { return os.Mkdir(filepath.Join(o.ImageRoot, "lost+found"), 0o700) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := onlyMarkersLeft(t)
			if err := before(o); err != nil {
				t.Fatal(err)
			}
			there := left(t, o)
			planned, err := Purge(t.Context(), o, true)
			if now := left(t, o); err != nil || !slices.Equal(there, now) {
				t.Fatalf("showing it: %v, changed %q to %q", err, there, now)
			}
			done, err := Purge(t.Context(), o, false)
			if err != nil || len(done) == 0 || !slices.Equal(planned, done) {
				t.Fatalf("it planned %q and did %q, %v", planned, done, err)
			}
			for _, path := range left(t, o) {
				if base := filepath.Base(path); base != "lost+found" && path != o.Database+".lock" {
					t.Errorf("left is %s", path)
				}
			}
			if _, err := Purge(t.Context(), o, false); !errors.Is(err, ErrNotInitialised) {
				t.Errorf("a third one ended with %v", err)
			}
			initialised(t, o)
		})
	}
}

// TestPurgeWithoutDatabase: without a database nothing is deleted of roots that have
// more than markers, or others than one snapshotter's.
func TestPurgeWithoutDatabase(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(t *testing.T) (Options, error){
		"a snapshotter's roots": func(t *testing.T) (Options, error) {
			t.Helper()
			o := purgeable(t)
			return o, os.Remove(o.Database)
		},
		"another file": func(t *testing.T) (Options, error) {
			t.Helper()
			o := onlyMarkersLeft(t)
			return o, os.WriteFile(filepath.Join(o.ContainerRoot, "mine"), nil, 0o600)
		},
		"another snapshotter's marker": func(t *testing.T) (Options, error) {
			t.Helper()
			o, other := onlyMarkersLeft(t), onlyMarkersLeft(t)
			return o, os.Rename(filepath.Join(other.ImageRoot, fence.MarkerName), filepath.Join(o.ImageRoot, fence.MarkerName))
		},
		"roots that are exchanged": func(t *testing.T) (Options, error) {
			t.Helper()
			o := onlyMarkersLeft(t)
			o.ImageRoot, o.ContainerRoot = o.ContainerRoot, o.ImageRoot
			return o, nil
		},
		"a marker that says nothing": func(t *testing.T) (Options, error) {
			t.Helper()
			o := onlyMarkersLeft(t)
			return o, os.WriteFile(filepath.Join(o.ImageRoot, fence.MarkerName), []byte("{}"), 0o600)
		},
		"a folder in a marker's place": func(t *testing.T) (Options, error) {
			t.Helper()
			o := onlyMarkersLeft(t)
			marker := filepath.Join(o.ImageRoot, fence.MarkerName)
			return o, errors.Join(os.Remove(marker), os.Mkdir(marker, 0o700))
		},
		"no root": func(t *testing.T) (Options, error) {
			t.Helper()
			o := onlyMarkersLeft(t)
			return o, os.Rename(o.ImageRoot, o.ImageRoot+".away")
		},
		"roots that are not mounted": func(t *testing.T) (Options, error) {
			t.Helper()
			o := onlyMarkersLeft(t)
			o.RequireMountpoints = true
			return o, nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o, err := spoil(t)
			if err != nil {
				t.Fatal(err)
			}
			tree := filepath.Dir(filepath.Dir(o.Database))
			before := names(t, tree)
			if list, err := Purge(t.Context(), o, false); !errors.Is(err, ErrNotInitialised) || len(list) > 0 {
				t.Errorf("it ended with %v and says that it deleted %q", err, list)
			}
			if now := names(t, tree); !slices.Equal(before, now) {
				t.Errorf("it changed %q to %q", before, now)
			}
		})
	}
}

// names is all that is below a folder.
func names(t *testing.T, dir string) []string {
	t.Helper()
	var out []string
	err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		out = append(out, path)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
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
