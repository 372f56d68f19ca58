package fence

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/cleave-cri/cleave/snapshot/split/rootdir"
)

// probeName is the folder in a root in which Suits tries things.
const probeName = "probe"

// Suits tries for real whether overlayfs can have its layers in a root: names
// with their kind (d_type), attributes of the namespace trusted.overlay,
// whiteouts (device 0/0), and a mount with upper and work folder there, which is
// made and never attached anywhere. On a full or read-only disk nothing can be
// tried; that is no error, since the snapshotter must come up there too.
func Suits(root *rootdir.Root) (err error) {
	clean := func() error {
		if err := ProbeIsOurs(root); err != nil {
			return err
		}
		return root.RemoveTree(probeName, func() error { return nil }, func(rootdir.Removed) {})
	}
	if err := clean(); err != nil {
		return fmt.Errorf("remove what an earlier probe has left: %w", err)
	}
	defer func() {
		err = errors.Join(err, clean())
		if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) || errors.Is(err, unix.EROFS) {
			err = nil
		}
	}()
	for _, name := range []string{probeName, probeName + "/lower", probeName + "/upper", probeName + "/work"} {
		if err := root.Mkdir(name, 0o700); err != nil {
			return err
		}
	}
	dir, err := root.Open(probeName)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dir.Close()) }()
	fd := int(dir.Fd())
	if err := unix.Fsetxattr(fd, "trusted.overlay.opaque", []byte("y"), 0); err != nil {
		return fmt.Errorf("%s: the filesystem takes no attribute trusted.overlay.opaque, which overlayfs needs: %w", root.Path(), err)
	}
	if err := unix.Mknodat(fd, "upper/whiteout", unix.S_IFCHR, 0); err != nil {
		return fmt.Errorf("%s: the filesystem takes no whiteout (device 0/0), which overlayfs needs: %w", root.Path(), err)
	}
	if typed, err := namesHaveKinds(fd); err != nil {
		return err
	} else if !typed {
		return fmt.Errorf("%s: the filesystem does not tell the kind of names (d_type), which overlayfs needs; for xfs make it anew with `mkfs.xfs -n ftype=1`", root.Path())
	}
	if err := mountsOverlay(filepath.Join(root.Path(), probeName)); err != nil {
		return fmt.Errorf("%s: an overlay with its upper folder there can't be mounted: %w", root.Path(), err)
	}
	return nil
}

// probeParts are the folders of a probe, and what may be in each: overlayfs makes folders in its work folder, which it leaves empty.
var probeParts = map[string][]string{"lower": nil, "upper": {"whiteout"}, "work": {"work", "index"}}

// ProbeName is what a probe that was broken off leaves in a root.
const ProbeName = probeName

// ProbeIsOurs makes sure that what is in the root under the probe's name is nothing but what a probe makes, before it is deleted.
func ProbeIsOurs(root *rootdir.Root) error {
	foreign := func(name string) error {
		return fmt.Errorf("%s has %q, which no probe made: move the folder %q out of the root", root.Path(), name, probeName)
	}
	parts, err := root.Names(probeName)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, part := range parts {
		known, ok := probeParts[part]
		if !ok {
			return foreign(filepath.Join(probeName, part))
		}
		names, err := root.Names(filepath.Join(probeName, part))
		if err != nil {
			return err
		}
		for _, name := range names {
			path := filepath.Join(probeName, part, name)
			if !slices.Contains(known, name) {
				return foreign(path)
			}
			if part != "work" {
				continue
			}
			if inside, err := root.Names(path); err != nil || len(inside) > 0 {
				return errors.Join(foreign(path), err)
			}
		}
	}
	return nil
}

// namesHaveKinds says whether getdents64(2) tells that "lower" is a folder.
func namesHaveKinds(dir int) (bool, error) {
	buffer := make([]byte, 4<<10)
	n, err := unix.Getdents(dir, buffer)
	if err != nil {
		return false, err
	}
	const kindAt, sizeAt = 18, 16
	typed := true
	for rest := buffer[:n]; len(rest) > kindAt; {
		typed = typed && rest[kindAt] != unix.DT_UNKNOWN
		size := int(rest[sizeAt]) | int(rest[sizeAt+1])<<8
		if size == 0 || size > len(rest) {
			break
		}
		rest = rest[size:]
	}
	return typed, nil
}

// mountsOverlay makes an overlay of the probe's folders (fsopen(2), Linux 5.2).
func mountsOverlay(probe string) (err error) {
	fd, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unix.Close(fd)) }()
	for _, option := range [][2]string{
		{"source", "overlay"},
		{"lowerdir", filepath.Join(probe, "lower")},
		{"upperdir", filepath.Join(probe, "upper")},
		{"workdir", filepath.Join(probe, "work")},
	} {
		if err := unix.FsconfigSetString(fd, option[0], option[1]); err != nil {
			return fmt.Errorf("%s: %w", option[0], err)
		}
	}
	if err := unix.FsconfigCreate(fd); err != nil {
		return err
	}
	mount, err := unix.Fsmount(fd, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return err
	}
	return unix.Close(mount)
}
