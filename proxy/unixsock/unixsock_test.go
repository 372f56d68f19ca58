package unixsock

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestListenReplacesADeadSocketOnly(t *testing.T) {
	t.Parallel()
	live := func(t *testing.T, path string) {
		t.Helper()
		l, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() }) //nolint:errcheck // end of test
	}
	cases := []struct {
		name    string
		prepare func(t *testing.T, path string)
		want    error
	}{
		{"nothing there", func(*testing.T, string) {}, nil},
		{"dead socket", func(t *testing.T, path string) {
			t.Helper()
			l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
			if err != nil {
				t.Fatal(err)
			}
			l.SetUnlinkOnClose(false)
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
		}, nil},
		{"live socket", live, ErrInUse},
		{"live datagram socket", func(t *testing.T, path string) {
			t.Helper()
			c, err := net.ListenPacket("unixgram", path)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = c.Close() }) //nolint:errcheck // end of test
		}, ErrInUse},
		{"file", func(t *testing.T, path string) {
			t.Helper()
			if err := os.WriteFile(path, []byte("precious"), 0o600); err != nil {
				t.Fatal(err)
			}
		}, ErrNotSocket},
		{"folder", func(t *testing.T, path string) {
			t.Helper()
			if err := os.Mkdir(path, 0o700); err != nil {
				t.Fatal(err)
			}
		}, ErrNotSocket},
		{"symlink to a live socket", func(t *testing.T, path string) {
			t.Helper()
			live(t, path+".real")
			if err := os.Symlink(path+".real", path); err != nil {
				t.Fatal(err)
			}
		}, ErrNotSocket},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "s")
			tc.prepare(t, path)
			before, _ := os.Lstat(path) //nolint:errcheck // may not exist
			l, err := Listen(path, Access{UID: os.Getuid(), GID: os.Getgid(), Mode: 0o640})
			if !errors.Is(err, tc.want) {
				t.Fatalf("Listen: %v, want %v", err, tc.want)
			}
			if err != nil {
				if after, err := os.Lstat(path); err != nil || !os.SameFile(before, after) {
					t.Errorf("what was there is no longer: %v", err)
				}
				return
			}
			defer l.Close() //nolint:errcheck // end of test
			got, err := AccessOf(path)
			if want := (Access{UID: os.Getuid(), GID: os.Getgid(), Mode: 0o640}); err != nil || !cmp.Equal(want, got) {
				t.Errorf("access %v %v, want %v", got, err, want)
			}
			if alive, err := Alive(path); !alive || err != nil {
				t.Errorf("alive: %v %v", alive, err)
			}
		})
	}
}

func TestListenWithoutFolder(t *testing.T) {
	t.Parallel()
	_, err := Listen(filepath.Join(t.TempDir(), "missing", "s"), RootOnly)
	if !errors.Is(err, ErrNoDirectory) {
		t.Errorf("Listen: %v, want %v", err, ErrNoDirectory)
	}
}

// TestRemoveLeavesASuccessorsSocket: a process that ends late must not take away
// the socket of the one that came after it.
func TestRemoveLeavesASuccessorsSocket(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "s")
	first, err := Listen(path, RootOnly)
	if err != nil {
		t.Fatal(err)
	}
	own, err := IDOf(path)
	if err != nil {
		t.Fatal(err)
	}
	// The old file stays open by another name, so that its number can't be used again.
	if err := os.Link(path, path+".old"); err != nil {
		t.Fatal(err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	second, err := Listen(path, RootOnly)
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close() //nolint:errcheck // end of test
	if err := Remove(path, own); err != nil {
		t.Fatal(err)
	}
	if alive, err := Alive(path); !alive || err != nil {
		t.Errorf("the successor's socket is gone: %v %v", alive, err)
	}
	now, err := IDOf(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := Remove(path, now); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(path); !os.IsNotExist(err) {
		t.Errorf("its own socket is still there: %v", err)
	}
	if err := Remove(path, now); err != nil {
		t.Errorf("a second Remove: %v", err)
	}
}

// TestAccessGoesToOurSocketOnly: what stands where a socket of ours was, a
// symlink to somebody's file or a file, keeps its owner and mode.
func TestAccessGoesToOurSocketOnly(t *testing.T) {
	t.Parallel()
	open := Access{UID: os.Getuid(), GID: os.Getgid(), Mode: 0o666}
	for name, put := range map[string]func(precious, path string) error{
		"symlink": os.Symlink,
		"link":    os.Link,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), "s")
			l, err := Listen(path, RootOnly)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close() //nolint:errcheck // end of test
			own, err := IDOf(path)
			if err != nil {
				t.Fatal(err)
			}
			if err := open.Apply(path, own); err != nil {
				t.Fatal(err)
			}
			if got, err := AccessOf(path); err != nil || got != open {
				t.Errorf("our socket has %v %v, want %v", got, err, open)
			}
			precious := path + ".precious"
			if err := os.WriteFile(precious, []byte("precious"), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
			if err := put(precious, path); err != nil {
				t.Fatal(err)
			}
			if err := open.Apply(path, own); !errors.Is(err, ErrReplaced) {
				t.Errorf("Apply to another's file: %v, want %v", err, ErrReplaced)
			}
			if info, err := os.Stat(precious); err != nil || info.Mode().Perm() != 0o600 {
				t.Errorf("another's file has mode %v %v", info.Mode(), err)
			}
			if err := Remove(path, own); err != nil {
				t.Fatal(err)
			}
			if _, err := os.Lstat(path); err != nil {
				t.Errorf("another's file is gone: %v", err)
			}
		})
	}
}

// TestIDIsTheSameByAnyPath: by a symlink, and over the text that a successor is given.
func TestIDIsTheSameByAnyPath(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "s")
	l, err := Listen(path, RootOnly)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() //nolint:errcheck // end of test
	want, err := IDOf(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(path, path+".link"); err != nil {
		t.Fatal(err)
	}
	if got, err := Reached(path + ".link"); err != nil || got != want {
		t.Errorf("by a symlink: %v %v, want %v", got, err, want)
	}
	if got, err := IDOf(path + ".link"); err != nil || got == want {
		t.Errorf("the symlink itself: %v %v", got, err)
	}
	if got, err := ParseID(want.String()); err != nil || got != want {
		t.Errorf("read again: %v %v, want %v", got, err, want)
	}
	for _, bad := range []string{"", "1", "1:", ":1", "1:2:3", "-1:2"} {
		if got, err := ParseID(bad); err == nil {
			t.Errorf("%q was read as %v", bad, got)
		}
	}
}

// TestEnsureFolder: the socket's own folder is made, with its mode, in a folder
// that nobody else may write to; nothing else is made or changed.
func TestEnsureFolder(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name   string
		parent fs.FileMode // 0: there is none
		exists bool
		made   bool
		err    error
	}{
		{"missing", 0o755, false, true, nil},
		{"there", 0o755, true, false, nil},
		{"no parent", 0, false, false, nil},
		{"others may write to the parent", 0o777 | fs.ModeSticky, false, false, ErrNoDirectory},
		{"the group may write to the parent", 0o775, false, false, ErrNoDirectory},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			parent := filepath.Join(t.TempDir(), "run")
			folder := filepath.Join(parent, "cleave")
			if tc.parent != 0 {
				if err := errors.Join(os.Mkdir(parent, 0o700), os.Chmod(parent, tc.parent)); err != nil {
					t.Fatal(err)
				}
			}
			if tc.exists {
				if err := os.Mkdir(folder, 0o700); err != nil {
					t.Fatal(err)
				}
			}
			if err := EnsureFolder(filepath.Join(folder, "s.sock")); !errors.Is(err, tc.err) {
				t.Errorf("got %v, want %v", err, tc.err)
			}
			info, err := os.Stat(folder)
			switch {
			case tc.made && (err != nil || info.Mode().Perm() != 0o755):
				t.Errorf("the folder: %v, %v, want it with mode 0755", info, err)
			case tc.exists && (err != nil || info.Mode().Perm() != 0o700):
				t.Errorf("the folder that was there: %v, %v, want it as it was", info, err)
			case !tc.made && !tc.exists && err == nil:
				t.Error("a folder was made")
			}
		})
	}
}
