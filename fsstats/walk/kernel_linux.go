package walk

import (
	"encoding/binary"
	"errors"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// All system calls of this package are in this file. Names go to the kernel as
// pointers to zero-terminated bytes: a walk then allocates nothing per entry.

// identity is an inode: st_dev and st_ino. mount is the mount it was reached
// by, 0 on kernels that don't tell.
type identity struct {
	mount, device, inode uint64
}

// attributes is what a walk wants to know of an inode.
type attributes struct {
	identity
	blocks uint64
	links  uint32
	isDir  bool
	// changed and modified are st_ctime and st_mtime in nanoseconds since 1970, 0
	// where they were not asked for or the filesystem doesn't tell.
	changed, modified int64
}

// sameMount says whether a is on the mount of root, the tree's root directory.
func (a *attributes) sameMount(root *identity) bool {
	if root.mount != 0 || a.mount != 0 {
		return a.mount == root.mount
	}
	return a.device == root.device
}

// isGone says whether a name that was just listed leads nowhere any more, or to
// another kind of file, or a directory that is open was removed.
func isGone(err error) bool {
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP), errors.Is(err, unix.ESTALE):
		return true
	}
	return false
}

// openFlags: O_NONBLOCK is for the case that the name has become a pipe.
const openFlags = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC | unix.O_NONBLOCK

func openRoot(path string) (int, error) {
	name, err := unix.ByteSliceFromString(path)
	if err != nil {
		return -1, err
	}
	fd, err := openDir(unix.AT_FDCWD, &name[0])
	if err != nil {
		return -1, os.NewSyscallError("open", err)
	}
	return fd, nil
}

// directoryAt gives device and inode of a directory, following symlinks.
func directoryAt(path string) (identity, bool) {
	name, err := unix.ByteSliceFromString(path)
	if err != nil {
		return identity{}, false
	}
	var a attributes
	if err := statx(unix.AT_FDCWD, &name[0], statFlags&^unix.AT_SYMLINK_NOFOLLOW, 0, &a); err != nil || !a.isDir {
		return identity{}, false
	}
	return identity{device: a.device, inode: a.inode}, true
}

// openDir opens a directory of the directory at, without moving its access time
// if that is allowed (O_NOATIME needs the owner or CAP_FOWNER; open(2)).
func openDir(at int, name *byte) (int, error) {
	fd, err := openat(at, name, openFlags|unix.O_NOATIME)
	if errors.Is(err, unix.EPERM) {
		fd, err = openat(at, name, openFlags)
	}
	return fd, err
}

func openat(at int, name *byte, flags int) (int, error) {
	for {
		fd, _, errno := unix.Syscall6(unix.SYS_OPENAT, uintptr(at), uintptr(unsafe.Pointer(name)), uintptr(flags), 0, 0, 0)
		switch errno {
		case 0:
			return int(fd), nil
		case unix.EINTR:
		default:
			return -1, errno
		}
	}
}

// closeFD closes a directory, which can't fail in a way that matters.
func closeFD(fd int) {
	_ = unix.Close(fd) //nolint:errcheck // see above
}

func seek(fd int, offset int64) error {
	_, err := unix.Seek(fd, offset, unix.SEEK_SET)
	return err
}

// kernelLister is the lister that asks the kernel.
type kernelLister struct {
	// mask is what more than statMask it asks for.
	mask uint32
}

var _ lister = kernelLister{}

func (kernelLister) readDir(fd int, buffer []byte) (int, error) {
	for {
		n, err := unix.Getdents(fd, buffer)
		if !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}

// What is asked of statx(2). AT_STATX_DONT_SYNC and AT_NO_AUTOMOUNT: a hung FUSE
// or network mount inside the tree is looked at without asking its server.
const (
	statMask = unix.STATX_TYPE | unix.STATX_NLINK | unix.STATX_INO | unix.STATX_BLOCKS | unix.STATX_MNT_ID
	// timesMask is asked for too where changes are looked for, and only there: it
	// has the kernel give the file's next change a time of its own (multigrain
	// timestamps, Linux 6.13).
	timesMask = unix.STATX_CTIME | unix.STATX_MTIME
	statFlags = unix.AT_SYMLINK_NOFOLLOW | unix.AT_NO_AUTOMOUNT | unix.AT_STATX_DONT_SYNC
)

// statFD looks at an open file.
func statFD(fd int, a *attributes) error { return statOpen(fd, 0, a) }

// statChanges looks at an open file, times included.
func statChanges(fd int, a *attributes) error { return statOpen(fd, timesMask, a) }

func statOpen(fd int, mask uint32, a *attributes) error {
	var noName byte
	return statx(fd, &noName, statFlags|unix.AT_EMPTY_PATH, mask, a)
}

func (l kernelLister) statAt(at int, name *byte, a *attributes) error {
	return statx(at, name, statFlags, l.mask, a)
}

// statx asks for statMask and for mask.
func statx(at int, name *byte, flags int, mask uint32, a *attributes) error {
	var stx unix.Statx_t
	for {
		_, _, errno := unix.Syscall6(unix.SYS_STATX, uintptr(at), uintptr(unsafe.Pointer(name)), uintptr(flags),
			uintptr(statMask|mask), uintptr(unsafe.Pointer(&stx)), 0)
		if errno == unix.EINTR {
			continue
		}
		if errno != 0 {
			return errno
		}
		break
	}
	*a = attributes{
		identity: identity{
			device: unix.Mkdev(stx.Dev_major, stx.Dev_minor),
			inode:  stx.Ino,
		},
		blocks: stx.Blocks,
		links:  stx.Nlink,
		isDir:  stx.Mode&unix.S_IFMT == unix.S_IFDIR,
	}
	if stx.Mask&unix.STATX_MNT_ID != 0 {
		a.mount = stx.Mnt_id
	}
	if stx.Mask&unix.STATX_CTIME != 0 {
		a.changed = stx.Ctime.Sec*1e9 + int64(stx.Ctime.Nsec)
	}
	if stx.Mask&unix.STATX_MTIME != 0 {
		a.modified = stx.Mtime.Sec*1e9 + int64(stx.Mtime.Nsec)
	}
	return nil
}

// errBadEntry can only be the kernel's fault.
var errBadEntry = errors.New("directory entry is malformed")

// entry is one name of a directory.
type entry struct {
	offset int64
	name   []byte // with the zero byte at its end
}

func (e entry) isDots() bool {
	n := e.name
	return n[0] == '.' && (n[1] == 0 || n[1] == '.' && n[2] == 0)
}

// parseEntry takes the first struct linux_dirent64 (getdents(2)) off b: inode
// and offset (8 bytes each), size (2), type (1), name with a zero byte, padding.
func parseEntry(b []byte) (e entry, size int, ok bool) {
	const header = 19
	if len(b) < header+2 {
		return entry{}, 0, false
	}
	size = int(binary.NativeEndian.Uint16(b[16:]))
	if size < header+2 || size > len(b) {
		return entry{}, 0, false
	}
	e.offset = int64(binary.NativeEndian.Uint64(b[8:]))
	name := b[header:size]
	for i, c := range name {
		if c == 0 {
			e.name = name[:i+1]
			return e, size, i > 0
		}
	}
	return entry{}, 0, false
}
