package tree_test

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cleave-cri/cleave/lab/need"
	"github.com/cleave-cri/cleave/lab/tree"
)

// plant makes a folder with one thing of each kind.
func plant(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	at := func(name string) string { return filepath.Join(root, name) }
	then := time.Unix(1_000_000_000, 0)
	for _, step := range []func() error{
		func() error { return os.Mkdir(at("dir"), 0o750) },
		func() error { return os.WriteFile(at("dir/file"), []byte("content"), 0o640) },
		func() error { return os.WriteFile(at("other"), []byte("content"), 0o640) },
		func() error { return os.Link(at("dir/file"), at("link")) },
		func() error { return os.Symlink("dir/file", at("symlink")) },
		func() error { return syscall.Mknod(at("device"), syscall.S_IFCHR|0o600, 1<<8|3) },
		func() error { return syscall.Mkfifo(at("fifo"), 0o600) },
		func() error { return syscall.Setxattr(at("dir/file"), "user.a", []byte("1"), 0) },
		func() error { return os.Chtimes(at("dir/file"), then, then) },
		func() error { return os.Chtimes(at("other"), then, then) },
	} {
		if err := step(); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func read(t *testing.T, root string) tree.Tree {
	t.Helper()
	got, err := tree.Read(root)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

func TestCompareSeesEachDifference(t *testing.T) {
	t.Parallel()
	need.Root(t)
	if d := tree.Compare(read(t, plant(t)), read(t, plant(t))); len(d) != 0 {
		t.Errorf("equal trees differ: %v", d)
	}
	cases := []struct {
		name   string
		change func(root string) error
		want   string
	}{
		{"mode", func(r string) error { return os.Chmod(r+"/dir", 0o751) }, "dir: mode"},
		{"setuid", func(r string) error { return os.Chmod(r+"/other", 0o640|os.ModeSetuid) }, "other: mode"},
		{"owner", func(r string) error { return os.Lchown(r+"/symlink", 7, 0) }, "symlink: owner"},
		{"group", func(r string) error { return os.Lchown(r+"/fifo", 0, 7) }, "fifo: group"},
		{"content", func(r string) error { return os.WriteFile(r+"/other", []byte("CONTENT"), 0o640) }, "other: content"},
		{"size", func(r string) error { return os.Truncate(r+"/other", 3) }, "other: size"},
		{"time", func(r string) error { return os.Chtimes(r+"/other", time.Unix(5, 0), time.Unix(5, 0)) }, "other: changed at"},
		{"symlink", func(r string) error {
			if err := os.Remove(r + "/symlink"); err != nil {
				return err
			}
			return os.Symlink("dir", r+"/symlink")
		}, "symlink: target"},
		{"device", func(r string) error {
			if err := os.Remove(r + "/device"); err != nil {
				return err
			}
			return syscall.Mknod(r+"/device", syscall.S_IFCHR|0o600, 1<<8|5)
		}, "device: device"},
		{"attribute", func(r string) error { return syscall.Setxattr(r+"/link", "user.b", []byte("2"), 0) }, "link: attributes"},
		{"attribute of a folder", func(r string) error { return syscall.Setxattr(r+"/dir", "trusted.x", []byte("2"), 0) }, "dir: attributes"},
		{"link broken", func(r string) error {
			text, err := os.ReadFile(r + "/link")
			if err != nil {
				return err
			}
			if err := os.Remove(r + "/link"); err != nil {
				return err
			}
			return os.WriteFile(r+"/link", text, 0o640)
		}, "link: is the file"},
		{"one more", func(r string) error { return os.Mkdir(r+"/more", 0o700) }, "more is in the second only"},
		{"one less", func(r string) error { return os.Remove(r + "/other") }, "other is in the first only"},
		{"another type", func(r string) error {
			if err := os.Remove(r + "/fifo"); err != nil {
				return err
			}
			return os.Mkdir(r+"/fifo", 0o600)
		}, "fifo: mode"},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			a, b := plant(t), plant(t)
			if err := tc.change(b); err != nil {
				t.Fatal(err)
			}
			got := strings.Join(tree.Compare(read(t, a), read(t, b)), "\n")
			if !strings.Contains(got, tc.want) {
				t.Errorf("got %q, want %q in it", got, tc.want)
			}
		})
	}
}

func TestReadOfNothing(t *testing.T) {
	t.Parallel()
	if _, err := tree.Read(filepath.Join(t.TempDir(), "missing")); !os.IsNotExist(err) && (err == nil || !strings.Contains(err.Error(), "no such file")) {
		t.Errorf("got %v, want an error", err)
	}
}
