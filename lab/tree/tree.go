// Package tree reads a folder with all that is below it into a value, so that
// two of them can be compared file by file: type and mode, owner, content,
// symlinks, devices, extended attributes, and which names are one file.
//
// For integration tests and the lab. It needs root to see all of it.
package tree

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

// Entry is one name.
type Entry struct {
	// Mode has the type, the permissions and the bits beside them.
	Mode     fs.FileMode
	UID, GID uint32
	// SizeBytes and Content, a SHA-256 in hex, are of regular files.
	SizeBytes int64
	Content   string
	// Target is where a symlink points to.
	Target string
	// Device is the number of a device.
	Device uint64
	// Xattrs are by name; symlinks are not asked.
	Xattrs map[string]string
	// SameAs is the first name of the file in the order of names; a file with one
	// name has its own.
	SameAs string
	// ModSeconds is the time of the last change of a regular file with content,
	// seconds since 1970. Empty ones and folders may be made by a runtime.
	ModSeconds int64
}

// Tree is by path below the folder; the folder itself is ".".
type Tree map[string]Entry

// Read reads a folder. It does not follow symlinks, and does not go into other
// filesystems that are mounted in it.
func Read(root string) (Tree, error) {
	t := Tree{}
	first := map[uint64]string{}
	var device uint64
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		st, ok := info.Sys().(*syscall.Stat_t)
		if !ok {
			return errors.New("stat gives no inode")
		}
		if rel == "." {
			device = st.Dev
		}
		e := Entry{Mode: info.Mode(), UID: st.Uid, GID: st.Gid, SameAs: rel}
		switch {
		case info.IsDir() && st.Dev != device:
			return fs.SkipDir
		case info.IsDir():
		case st.Nlink > 1:
			if name, ok := first[st.Ino]; ok {
				e.SameAs = name
			} else {
				first[st.Ino] = rel
			}
		}
		if err := e.fill(path, info, st); err != nil {
			return err
		}
		t[rel] = e
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read the tree %s: %w", root, err)
	}
	return t, nil
}

func (e *Entry) fill(path string, info fs.FileInfo, st *syscall.Stat_t) error {
	var err error
	switch info.Mode().Type() {
	case 0:
		if e.SizeBytes = info.Size(); e.SizeBytes > 0 {
			e.ModSeconds = info.ModTime().Unix()
		}
		e.Content, err = hash(path)
	case fs.ModeSymlink:
		e.Target, err = os.Readlink(path)
		return err
	case fs.ModeDevice, fs.ModeDevice | fs.ModeCharDevice:
		e.Device = st.Rdev
	}
	if err != nil {
		return err
	}
	e.Xattrs, err = xattrs(path)
	return err
}

func hash(path string) (_ string, err error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

func xattrs(path string) (map[string]string, error) {
	buffer := make([]byte, 64<<10) // the most that the kernel gives (xattr(7))
	n, err := syscall.Listxattr(path, buffer)
	if err != nil {
		return nil, &fs.PathError{Op: "listxattr", Path: path, Err: err}
	}
	var out map[string]string
	for name := range strings.SplitSeq(string(buffer[:n]), "\x00") {
		if name == "" {
			continue
		}
		value := make([]byte, 64<<10)
		n, err := syscall.Getxattr(path, name, value)
		if err != nil {
			return nil, &fs.PathError{Op: "getxattr " + name, Path: path, Err: err}
		}
		if out == nil {
			out = map[string]string{}
		}
		out[name] = string(value[:n])
	}
	return out, nil
}

// Compare says what differs between two trees, one line each, in the order of
// names. Nothing means that they are equal.
func Compare(a, b Tree) []string {
	names := map[string]bool{}
	for _, t := range []Tree{a, b} {
		for name := range t {
			names[name] = true
		}
	}
	var out []string
	for _, name := range slices.Sorted(maps.Keys(names)) {
		ea, inA := a[name]
		eb, inB := b[name]
		switch {
		case !inA:
			out = append(out, fmt.Sprintf("%s is in the second only: %v", name, eb.Mode))
		case !inB:
			out = append(out, fmt.Sprintf("%s is in the first only: %v", name, ea.Mode))
		default:
			for _, d := range ea.differences(eb) {
				out = append(out, name+": "+d)
			}
		}
	}
	return out
}

func (e Entry) differences(o Entry) []string {
	var out []string
	differ := func(what string, a, b any, equal bool) {
		if !equal {
			out = append(out, fmt.Sprintf("%s %v against %v", what, a, b))
		}
	}
	differ("mode", e.Mode, o.Mode, e.Mode == o.Mode)
	differ("owner", e.UID, o.UID, e.UID == o.UID)
	differ("group", e.GID, o.GID, e.GID == o.GID)
	differ("size", e.SizeBytes, o.SizeBytes, e.SizeBytes == o.SizeBytes)
	differ("content", e.Content, o.Content, e.Content == o.Content)
	differ("target", e.Target, o.Target, e.Target == o.Target)
	differ("device", e.Device, o.Device, e.Device == o.Device)
	differ("attributes", e.Xattrs, o.Xattrs, maps.Equal(e.Xattrs, o.Xattrs))
	differ("is the file", e.SameAs, o.SameAs, e.SameAs == o.SameAs)
	differ("changed at", e.ModSeconds, o.ModSeconds, e.ModSeconds == o.ModSeconds)
	return out
}
