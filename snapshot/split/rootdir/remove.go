package rootdir

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// maxOpen is how many of the deepest folders a removal keeps open; those above
// are found again through "..".
const maxOpen = 32

// Removed is one inode that a removal took away.
type Removed struct {
	// Bytes are those of its allocated blocks, 0 if it has other names.
	Bytes int64
	// LastName says that the inode went with this name.
	LastName bool
}

// RemoveTree removes what is called name below the root, and everything below
// that. Symlinks are removed, not followed. A mount inside ends it with an
// error, before anything of that mount is touched. Before each entry it calls
// step, whose error ends it too; after each entry it calls done.
//
// Other processes must not add to the tree meanwhile. Depth is not limited; at
// most maxOpen + 3 descriptors are open. A file that is immutable or
// append-only (chattr(1)) loses that attribute first. A missing tree is no error.
func (r *Root) RemoveTree(name string, step func() error, done func(Removed)) error {
	return r.on("remove", name, func(dir int, base string) error {
		p, err := statx(dir, base, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT)
		if errors.Is(err, unix.ENOENT) {
			return nil
		}
		if err != nil {
			return err
		}
		t := remover{step: step, done: done, buffer: make([]byte, 32<<10)}
		defer t.close()
		if !p.IsDir() {
			return t.unlink(dir, base)
		}
		return t.tree(dir, base)
	})
}

// remover is one removal. The stack holds the folders from the top of the tree
// to the one being emptied.
type remover struct {
	step   func() error
	done   func(Removed)
	buffer []byte
	stack  []level
}

type level struct {
	fd   int // -1: closed for the time being
	name string
	// device and inode tell the folder again.
	device, inode uint64
	// offset is the kernel's cookie of where to go on; rescanned: it was read
	// once more because something was left.
	offset    int64
	rescanned bool
}

func (t *remover) close() {
	for _, l := range t.stack {
		closeFD(l.fd)
	}
}

// tree empties and removes the folder called base in dir.
func (t *remover) tree(dir int, base string) error {
	if err := t.descend(dir, base); err != nil {
		return err
	}
	for len(t.stack) > 0 {
		top := &t.stack[len(t.stack)-1]
		next, err := t.empty(top)
		if err != nil {
			return fmt.Errorf("in %q: %w", t.where(), err)
		}
		if next != "" {
			if err := t.descend(top.fd, next); err != nil {
				return fmt.Errorf("in %q: %w", t.where(), err)
			}
			continue
		}
		if err := t.ascend(dir); err != nil {
			return err
		}
	}
	return nil
}

// where names the folder being emptied, for people: its deepest elements.
func (t *remover) where() string {
	var path string
	for i := max(0, len(t.stack)-8); i < len(t.stack); i++ {
		path = filepath.Join(path, t.stack[i].name)
	}
	return path
}

func (t *remover) descend(dir int, name string) error {
	fd, err := openat2(dir, name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if errors.Is(err, unix.EXDEV) {
		return fmt.Errorf("%q is a mount: unmount it first: %w", name, err)
	}
	if err != nil {
		return fmt.Errorf("open %q: %w", name, err)
	}
	p, err := statx(fd, "", unix.AT_EMPTY_PATH)
	if err != nil {
		closeFD(fd)
		return err
	}
	t.stack = append(t.stack, level{fd: fd, name: name, device: p.Device, inode: p.Inode})
	if far := len(t.stack) - 1 - maxOpen; far >= 0 {
		closeFD(t.stack[far].fd)
		t.stack[far].fd = -1
	}
	return nil
}

// ascend leaves the folder at the top of the stack, which is empty, and removes
// it. outside is the folder that the tree lies in.
func (t *remover) ascend(outside int) error {
	child := t.stack[len(t.stack)-1]
	parent := outside
	if len(t.stack) > 1 {
		p := &t.stack[len(t.stack)-2]
		if p.fd < 0 {
			if err := reopen(p, child.fd); err != nil {
				return err
			}
		}
		parent = p.fd
	}
	stx, err := statx(child.fd, "", unix.AT_EMPTY_PATH)
	if err != nil {
		return err
	}
	if err := t.step(); err != nil {
		return err
	}
	err = unix.Unlinkat(parent, child.name, unix.AT_REMOVEDIR)
	if errors.Is(err, unix.EPERM) && clearAttributes(parent, child.name) == nil {
		err = unix.Unlinkat(parent, child.name, unix.AT_REMOVEDIR)
	}
	if errors.Is(err, unix.ENOTEMPTY) && !child.rescanned {
		// Some filesystems skip names when others go while a folder is read.
		top := &t.stack[len(t.stack)-1]
		top.rescanned, top.offset = true, 0
		_, err := unix.Seek(top.fd, 0, unix.SEEK_SET)
		return err
	}
	if err != nil {
		return fmt.Errorf("remove folder %q: %w", child.name, err)
	}
	t.done(Removed{Bytes: int64(stx.Blocks) * 512, LastName: true})
	closeFD(child.fd)
	t.stack = t.stack[:len(t.stack)-1]
	if len(t.stack) > 0 {
		// Go on after the name that led to the child.
		top := &t.stack[len(t.stack)-1]
		if _, err := unix.Seek(top.fd, top.offset, unix.SEEK_SET); err != nil {
			return err
		}
	}
	return nil
}

// reopen opens a folder again through its child's "..".
func reopen(l *level, child int) error {
	// RESOLVE_BENEATH would refuse ".."; the identity is checked instead.
	fd, err := unix.Openat(child, "..", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	p, err := statx(fd, "", unix.AT_EMPTY_PATH)
	if err == nil && (p.Device != l.device || p.Inode != l.inode) {
		err = fmt.Errorf("folder %q was moved away while its tree was being removed: %w", l.name, unix.ESTALE)
	}
	if err != nil {
		closeFD(fd)
		return err
	}
	l.fd = fd
	return nil
}

// empty removes the entries of a folder that are no folders, and those that are
// empty ones. It returns the first that is not, or "" at the end.
func (t *remover) empty(l *level) (next string, err error) {
	for {
		n, err := unix.Getdents(l.fd, t.buffer)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return "", fmt.Errorf("list: %w", err)
		}
		if n == 0 {
			return "", nil
		}
		for rest := t.buffer[:n]; len(rest) > 0; {
			e, size, ok := parseEntry(rest)
			if !ok {
				return "", fmt.Errorf("list: %w", unix.EBADMSG)
			}
			rest = rest[size:]
			if e.name == "." || e.name == ".." {
				continue
			}
			isDir, err := t.isDir(l.fd, e)
			if errors.Is(err, unix.ENOENT) {
				continue
			}
			if err != nil {
				return "", fmt.Errorf("look at %q: %w", e.name, err)
			}
			if isDir {
				l.offset = e.offset
				return e.name, nil
			}
			if err := t.unlink(l.fd, e.name); err != nil {
				return "", err
			}
		}
	}
}

func (t *remover) isDir(dir int, e entry) (bool, error) {
	if e.kind != unix.DT_UNKNOWN {
		return e.kind == unix.DT_DIR, nil
	}
	p, err := statx(dir, e.name, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT)
	return p.IsDir(), err
}

func (t *remover) unlink(dir int, name string) error {
	if err := t.step(); err != nil {
		return err
	}
	p, err := statx(dir, name, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT)
	if err == nil {
		err = unix.Unlinkat(dir, name, 0)
	}
	if errors.Is(err, unix.EPERM) {
		if cleared := errors.Join(clearAttributes(dir, "."), clearAttributes(dir, name)); cleared == nil {
			err = unix.Unlinkat(dir, name, 0)
		}
	}
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("remove %q: %w", name, err)
	}
	last := p.Links <= 1
	gone := Removed{LastName: last}
	if last {
		gone.Bytes = int64(p.Blocks) * 512
	}
	t.done(gone)
	return nil
}

// clearAttributes takes immutable and append-only (chattr(1)) from a regular
// file or folder; other kinds have no such attributes.
func clearAttributes(dir int, name string) error {
	fd, err := openat2(dir, name, unix.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer closeFD(fd)
	p, err := statx(fd, "", unix.AT_EMPTY_PATH)
	if err != nil {
		return err
	}
	if kind := p.Mode & unix.S_IFMT; kind != unix.S_IFREG && kind != unix.S_IFDIR {
		return nil
	}
	flags, err := unix.IoctlGetInt(fd, unix.FS_IOC_GETFLAGS)
	if err != nil {
		return err
	}
	const stuck = 0x10 | 0x20 // FS_IMMUTABLE_FL and FS_APPEND_FL of linux/fs.h
	if flags&stuck == 0 {
		return nil
	}
	return unix.IoctlSetPointerInt(fd, unix.FS_IOC_SETFLAGS, flags&^stuck)
}

// entry is one name of a folder.
type entry struct {
	name   string
	kind   byte
	offset int64 // the cookie of what comes after it
}

// parseEntry reads a linux_dirent64 (getdents64(2)): inode (8 bytes), offset
// (8), size (2), type (1), name with a zero byte, padding.
func parseEntry(b []byte) (e entry, size int, ok bool) {
	const header = 19
	if len(b) < header+2 {
		return entry{}, 0, false
	}
	size = int(binary.NativeEndian.Uint16(b[16:]))
	if size < header+2 || size > len(b) {
		return entry{}, 0, false
	}
	name, _, ended := bytes.Cut(b[header:size], []byte{0})
	if !ended || len(name) == 0 {
		return entry{}, 0, false
	}
	return entry{name: string(name), kind: b[18], offset: int64(binary.NativeEndian.Uint64(b[8:]))}, size, true
}

func closeFD(fd int) {
	if fd >= 0 {
		_ = unix.Close(fd) //nolint:errcheck // a folder that was only read
	}
}
