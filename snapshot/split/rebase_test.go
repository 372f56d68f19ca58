package split

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/pkg/archive"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/cleave-cri/cleave/lab/disk"
)

// tarEntry is one entry of a layer.
type tarEntry struct {
	name string
	kind byte // tar's type flag
	mode int64
	body string
	link string
	uid  int
	attr map[string]string
}

func layerTar(t *testing.T, entries []tarEntry) []byte {
	t.Helper()
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, e := range entries {
		h := &tar.Header{
			Typeflag: e.kind, Name: e.name, Mode: e.mode, Size: int64(len(e.body)), Linkname: e.link, Uid: e.uid, Gid: e.uid,
			ModTime: time.Unix(1_700_000_000, 0), Devmajor: 1, Devminor: 3,
		}
		for k, v := range e.attr {
			if h.PAXRecords == nil {
				h.PAXRecords = map[string]string{}
			}
			h.PAXRecords["SCHILY.xattr."+k] = v
		}
		if e.kind != tar.TypeChar {
			h.Devmajor, h.Devminor = 0, 0
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(e.body)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// imageLayers deletes, replaces, links and marks what lower layers have.
func imageLayers(t *testing.T) [][]byte {
	t.Helper()
	return [][]byte{
		layerTar(t, []tarEntry{
			{name: "a", kind: tar.TypeReg, mode: 0o644, body: "a of 1"},
			{name: "b/", kind: tar.TypeDir, mode: 0o750, uid: 7},
			{name: "b/old", kind: tar.TypeReg, mode: 0o600, body: "hidden later"},
			{name: "b/older/", kind: tar.TypeDir, mode: 0o700},
			{name: "b/older/deep", kind: tar.TypeReg, mode: 0o600, body: "hidden later"},
			{name: "c/", kind: tar.TypeDir, mode: 0o755},
			{name: "c/gone", kind: tar.TypeReg, mode: 0o644, body: "deleted later"},
			{name: "c/stays", kind: tar.TypeReg, mode: 0o4755, body: "setuid"},
			{name: "link", kind: tar.TypeLink, link: "c/stays"},
			{name: "becomes-dir", kind: tar.TypeReg, mode: 0o644, body: "file"},
			{name: "becomes-file/", kind: tar.TypeDir, mode: 0o755},
			{name: "becomes-file/x", kind: tar.TypeReg, mode: 0o644, body: "x"},
			{name: "s", kind: tar.TypeSymlink, link: "/a"},
			{name: "null", kind: tar.TypeChar, mode: 0o666},
		}),
		layerTar(t, []tarEntry{
			{name: ".wh.a", kind: tar.TypeReg},
			{name: "b/", kind: tar.TypeDir, mode: 0o751, uid: 8},
			{name: "b/.wh..wh..opq", kind: tar.TypeReg},
			{name: "b/new", kind: tar.TypeReg, mode: 0o600, body: "new", attr: map[string]string{"user.x": "y"}},
			{name: "c/", kind: tar.TypeDir, mode: 0o755},
			{name: "c/.wh.gone", kind: tar.TypeReg},
			{name: "becomes-dir/", kind: tar.TypeDir, mode: 0o700},
			{name: "becomes-dir/y", kind: tar.TypeReg, mode: 0o644, body: "y"},
			{name: "becomes-file", kind: tar.TypeReg, mode: 0o644, body: "now a file"},
		}),
		layerTar(t, []tarEntry{
			{name: "a", kind: tar.TypeReg, mode: 0o600, body: "a of 3"},
			{name: ".wh.link", kind: tar.TypeReg},
			{name: "b/", kind: tar.TypeDir, mode: 0o751, uid: 8},
			{name: "b/old", kind: tar.TypeReg, mode: 0o600, body: "old again"},
			{name: "b/.wh.new", kind: tar.TypeReg},
			{name: ".wh.s", kind: tar.TypeReg},
		}),
	}
}

// apply writes a layer as containerd's applier does: into the upper folder of an
// overlay with whiteouts in overlayfs's form, or else through a mount.
func apply(t *testing.T, dir string, mounts []mount.Mount, layer []byte) {
	t.Helper()
	if mounts[0].Type == "overlay" {
		_, err := archive.Apply(t.Context(), option(mounts, "upperdir"), bytes.NewReader(layer),
			archive.WithConvertWhiteout(archive.OverlayConvertWhiteout), archive.WithParents(strings.Split(option(mounts, "lowerdir"), ":")))
		if err != nil {
			t.Fatal(err)
		}
		return
	}
	mounted(t, dir, mounts, func(root string) {
		if _, err := archive.Apply(t.Context(), root, bytes.NewReader(layer)); err != nil {
			t.Fatal(err)
		}
	})
}

// treeOf describes each file below root in one line.
func treeOf(t *testing.T, root string) map[string]string {
	t.Helper()
	tree := map[string]string{}
	inodes := map[uint64]string{}
	err := filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st syscall.Stat_t
		if err := syscall.Lstat(path, &st); err != nil {
			return err
		}
		rel, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		line := fmt.Sprintf("mode %o owner %d:%d device %d links-with %q", st.Mode, st.Uid, st.Gid, st.Rdev, inodes[st.Ino])
		if st.Nlink > 1 && st.Mode&syscall.S_IFMT == syscall.S_IFREG {
			inodes[st.Ino] += rel + " "
		}
		switch st.Mode & syscall.S_IFMT {
		case syscall.S_IFREG:
			content, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" content %x", sha256.Sum256(content))
		case syscall.S_IFLNK:
			target, err := os.Readlink(path)
			if err != nil {
				return err
			}
			line += " to " + target
		}
		names := make([]byte, 4096)
		n, err := unix.Llistxattr(path, names)
		if err != nil {
			return err
		}
		attrs := strings.Split(strings.Trim(string(names[:n]), "\x00"), "\x00")
		slices.Sort(attrs)
		for _, a := range attrs {
			if a == "" {
				continue
			}
			value := make([]byte, 4096)
			m, err := unix.Lgetxattr(path, a, value)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" %s=%q", a, value[:m])
		}
		tree[rel] = line
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return tree
}

// TestRebase unpacks an image whose layers delete and hide things, one layer on
// the other, and all of them beside each other with their parents given at the
// end. What a container sees must be the same, and what the image means.
func TestRebase(t *testing.T) {
	t.Parallel()
	for _, kind := range []disk.FS{disk.Ext4, disk.XFS} {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			o, p := onDisks(t, kind, 64<<20, 64<<20)
			o.Rebase = true
			s := initialised(t, o)
			image := imageLayers(t)

			parent := ""
			for n, layer := range image {
				key, opt := extraction(n, "")
				mounts, err := s.Prepare(t.Context(), key, parent, opt)
				if err != nil {
					t.Fatal(err)
				}
				apply(t, p.dir, mounts, layer)
				if err := s.Commit(t.Context(), layerName(n), key); err != nil {
					t.Fatal(err)
				}
				parent = layerName(n)
			}
			sequential := parent

			const beside = 100
			for n := len(image) - 1; n >= 0; n-- { // in the worst order
				before := ""
				if n > 0 {
					before = layerDigest(beside + n - 1)
				}
				key, opt := extraction(beside+n, before)
				mounts, err := s.Prepare(t.Context(), key, "", opt)
				if err != nil {
					t.Fatal(err)
				}
				if want := map[bool]string{true: "overlay", false: "bind"}[n > 0]; mounts[0].Type != want {
					t.Errorf("layer %d is a mount of type %s, want %s", n, mounts[0].Type, want)
				}
				if again, err := s.Mounts(t.Context(), key); err != nil || cmp.Diff(mounts, again) != "" {
					t.Errorf("mounts asked for again: %v, %v", again, err)
				}
				apply(t, p.dir, mounts, image[n])
			}
			for n := range image {
				key, _ := extraction(beside+n, "")
				var opts []snapshots.Opt
				if n > 0 {
					opts = append(opts, snapshots.WithParent(layerName(beside+n-1)))
				}
				if err := s.Commit(t.Context(), layerName(beside+n), key, opts...); err != nil {
					t.Fatal(err)
				}
			}
			trees := map[string]map[string]string{}
			for i, top := range []string{sequential, layerName(beside + len(image) - 1)} {
				mounts, err := s.Prepare(t.Context(), containerKey(500+i), top)
				if err != nil {
					t.Fatal(err)
				}
				mounted(t, p.dir, mounts, func(root string) { trees[[]string{"sequential", "beside"}[i]] = treeOf(t, root) })
			}
			if diff := cmp.Diff(trees["sequential"], trees["beside"]); diff != "" {
				t.Errorf("the two ways differ (-sequential +beside)\n%s", diff)
			}
			var names []string
			for name := range trees["beside"] {
				names = append(names, name)
			}
			slices.Sort(names)
			want := []string{".", "a", "b", "b/old", "becomes-dir", "becomes-dir/y", "becomes-file", "c", "c/stays", "null"}
			if diff := cmp.Diff(want, names); diff != "" {
				t.Errorf("names (-want +got)\n%s", diff)
			}
			settle(t, s)
			mustBeClean(t, s, o)
		})
	}
}

// TestRebaseNeedsItsOption: the label alone, which an image can set, changes
// nothing, neither without the option nor for a container.
func TestRebaseNeedsItsOption(t *testing.T) {
	t.Parallel()
	for _, rebase := range []bool{false, true} {
		o := folders(t)
		o.Rebase = rebase
		s := initialised(t, o)
		key, opt := extraction(1, layerDigest(0))
		mounts, err := s.Prepare(t.Context(), key, "", opt)
		if err != nil || (mounts[0].Type == "overlay") != rebase {
			t.Errorf("rebase %v: extraction has %v, %v", rebase, mounts, err)
		}
		mounts, err = s.Prepare(t.Context(), containerKey(2), "", opt)
		if err != nil || mounts[0].Type != "bind" || !strings.HasPrefix(mounts[0].Source, o.ContainerRoot) {
			t.Errorf("rebase %v: container has %v, %v", rebase, mounts, err)
		}
		if err := errors.Join(s.Remove(t.Context(), key), s.Remove(t.Context(), containerKey(2))); err != nil {
			t.Error(err)
		}
		settle(t, s)
	}
}
