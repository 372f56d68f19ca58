package agent

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cleave-cri/cleave/engine"
)

func TestFoldersOfAPodThatGoes(t *testing.T) {
	t.Parallel()
	s := twoPods()
	for uid, want := range map[string][]string{
		"u1":   {"/u/c1", "/u/c2", "/u/c3", "/logs/u1", "/pods/u1/volumes/cache"},
		"u2":   {"/u/c4"},
		"web":  nil, // a name
		"gone": nil, // nobody knows what it ran
		"new":  nil,
	} {
		if got := foldersOf(s, engine.Eviction{UID: uid}); !slices.Equal(got, want) {
			t.Errorf("%s has %q, want %q", uid, got, want)
		}
	}
	s.layers[1].folders.Upper = ""
	if got := foldersOf(s, engine.Eviction{UID: "u1"}); got != nil {
		t.Errorf("one layer is not known, and it has %q", got)
	}
}

func TestEmptied(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		make func(dir string) error
		want bool
	}{
		"it is gone":           {func(string) error { return nil }, true},
		"folders are left":     {func(dir string) error { return os.MkdirAll(filepath.Join(dir, "a/b"), 0o700) }, true},
		"a file is left":       {func(dir string) error { return write(filepath.Join(dir, "a/b/file")) }, false},
		"a link is left":       {func(dir string) error { return os.Symlink("/", dir) }, false},
		"it is a file":         {write, false},
		"a file is its parent": {func(dir string) error { return os.WriteFile(filepath.Dir(dir), nil, 0o600) }, false},
		"more than is looked at": {func(dir string) error {
			for i := range mostRemains {
				if err := os.MkdirAll(filepath.Join(dir, fmt.Sprint(i)), 0o700); err != nil {
					return err
				}
			}
			return nil
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := filepath.Join(t.TempDir(), "parent", "folder")
			if name != "a file is its parent" {
				if err := os.Mkdir(filepath.Dir(dir), 0o700); err != nil {
					t.Fatal(err)
				}
			}
			if err := tc.make(dir); err != nil {
				t.Fatal(err)
			}
			if got := emptied([]string{filepath.Join(t.TempDir(), "none"), dir}); got != tc.want {
				t.Errorf("emptied: %v, want %v", got, tc.want)
			}
		})
	}
}

func write(path string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	return os.WriteFile(path, []byte("x"), 0o600)
}

func TestRemainsAreWaitedFor(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name          string
		goes, settles time.Duration
		known, want   bool
		after         time.Duration
	}{
		{"gone before", 0, 0, true, true, 0},
		{"gone at last", 2200 * time.Millisecond, 0, true, true, 2500 * time.Millisecond},
		{"xfs", 0, 3 * time.Second, true, true, 3 * time.Second},
		{"it stays", time.Hour, 0, true, false, remainsWait},
		{"it goes too late to settle", 29 * time.Second, 3 * time.Second, true, false, remainsWait},
		{"nobody knows", 0, 0, false, false, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			dir := filepath.Join(t.TempDir(), "layer")
			if err := write(filepath.Join(dir, "file")); err != nil {
				t.Fatal(err)
			}
			synctest.Test(t, func(t *testing.T) {
				ctx, stop := context.WithCancel(t.Context())
				defer stop()
				going := time.AfterFunc(tc.goes, func() {
					if err := os.RemoveAll(dir); err != nil {
						t.Error(err)
					}
				})
				defer going.Stop()
				if tc.goes == 0 {
					synctest.Wait()
				}
				r := remains{settles: tc.settles}
				if tc.known {
					r.paths = []string{dir}
				}
				began := time.Now()
				got := r.gone(ctx)
				if took := time.Since(began); got != tc.want || took != tc.after {
					t.Errorf("gone: %v after %s, want %v after %s", got, took, tc.want, tc.after)
				}
				if stop(); r.gone(ctx) {
					t.Error("it is told to be gone at the end")
				}
			})
		})
	}
}
