// Package rootdir holds one root of the split snapshotter, or another folder of
// ours, open and does all work on files below it relative to that open folder: nothing is written
// through a path, so a root that was unmounted or swapped behind our back can't
// be written to by mistake. Names below the root are resolved by openat2(2)
// with RESOLVE_BENEATH, RESOLVE_NO_SYMLINKS and RESOLVE_NO_XDEV (Linux 5.6): no
// symlink is followed and no mount is crossed, whoever planted it.
//
// It imports nothing else of this module. Only snapshot/split, the packages below
// it, agent/rootbind and reclaim may import it.
package rootdir

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Place is where a folder is, as long as it is held open: the kernel gives none
// of these numbers to another mount or inode meanwhile.
type Place struct {
	// Mount is the mount's ID as in /proc/self/mountinfo, 0 on kernels before
	// 5.8, which don't tell.
	Mount uint64
	// Device and Inode are st_dev and st_ino.
	Device, Inode uint64
	// Changed is the time of the last change of the inode (st_ctime) in
	// nanoseconds since 1970.
	Changed int64
	// Modified is the time of the last change of the content (st_mtime), likewise.
	Modified int64
	// IsMountRoot says that the folder is the root of its mount; IsMountRootKnown
	// that the kernel told (Linux 5.8).
	IsMountRoot, IsMountRootKnown bool
	// UID, GID and Mode are the owner and st_mode.
	UID, GID uint32
	Mode     uint32
	// Blocks are the allocated blocks of 512 bytes, Links the number of names.
	Blocks uint64
	Links  uint32
	// SizeBytes is the length.
	SizeBytes int64
}

// Same reports whether both are the same folder on the same mount.
func (p Place) Same(q Place) bool {
	return p.Mount == q.Mount && p.Device == q.Device && p.Inode == q.Inode
}

// IsDir reports whether it is a folder.
func (p Place) IsDir() bool { return p.Mode&unix.S_IFMT == unix.S_IFDIR }

// IsFile reports whether it is a regular file.
func (p Place) IsFile() bool { return p.Mode&unix.S_IFMT == unix.S_IFREG }

// Root is an open folder. Its methods may be called from several goroutines,
// also while it is closed: they then fail with an error that wraps
// fs.ErrClosed.
type Root struct {
	path string
	file *os.File
	// locked: Lock has taken the lock, and Unlock has not given it back.
	locked atomic.Bool
}

// ErrLocked says that the folder is locked through another open descriptor.
var ErrLocked = errors.New("another process holds the lock")

// Open opens the folder at path, following symlinks in it.
func Open(path string) (*Root, error) {
	fd, err := retryInterrupted(func() (int, error) {
		return unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	})
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return &Root{path: path, file: os.NewFile(uintptr(fd), path)}, nil
}

// Path is the path that the root was opened by.
func (r *Root) Path() string { return r.path }

// Close lets go of the folder, and of its lock.
func (r *Root) Close() error { return errors.Join(r.Unlock(), r.file.Close()) }

// Lock takes the lock of the folder itself (flock(2)), without waiting, until
// Unlock or Close. It needs no file, and so neither space nor a writable disk. Two
// open roots of one folder are two holders, whatever mount they were opened
// through. On a filesystem without such locks it says so with
// errors.ErrUnsupported.
func (r *Root) Lock() error {
	err := r.do(func(fd int) error { return unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB) })
	switch {
	case err == nil:
		r.locked.Store(true)
		return nil
	case errors.Is(err, unix.EWOULDBLOCK):
		err = ErrLocked
	case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENOSYS), errors.Is(err, unix.EINVAL), errors.Is(err, unix.EBADF):
		// EBADF: NFS wants a descriptor to write, which no folder has (flock(2)).
		err = fmt.Errorf("%w (%w)", errors.ErrUnsupported, err)
	}
	return r.named("lock", ".", err)
}

// Unlock gives the lock back, if it is held. Closing alone would not do while
// another goroutine is starting a process, which for a moment has all our
// descriptors.
func (r *Root) Unlock() error {
	if !r.locked.Swap(false) {
		return nil
	}
	return r.named("unlock", ".", r.do(func(fd int) error { return unix.Flock(fd, unix.LOCK_UN) }))
}

// At looks at a path anew, following symlinks: it tells whether the path still
// leads to an open root.
func At(path string) (Place, error) {
	p, err := statx(unix.AT_FDCWD, path, unix.AT_NO_AUTOMOUNT|unix.AT_STATX_DONT_SYNC)
	if err != nil {
		return Place{}, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	return p, nil
}

// Place looks at the root itself.
func (r *Root) Place() (Place, error) { return r.Stat(".") }

// Stat looks at what is called name below the root, not following a symlink.
func (r *Root) Stat(name string) (p Place, err error) {
	err = r.on("stat", name, func(dir int, base string) error {
		p, err = statx(dir, base, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT|unix.AT_STATX_DONT_SYNC)
		return err
	})
	return p, err
}

// Mkdir makes a folder with exactly this mode, whatever the umask.
func (r *Root) Mkdir(name string, mode uint32) error {
	return r.on("mkdir", name, func(dir int, base string) error {
		if err := unix.Mkdirat(dir, base, mode); err != nil {
			return err
		}
		return unix.Fchmodat(dir, base, mode, 0)
	})
}

// Ensure makes a folder unless there is one.
func (r *Root) Ensure(name string, mode uint32) error {
	err := r.Mkdir(name, mode)
	if !errors.Is(err, fs.ErrExist) {
		return err
	}
	p, err := r.Stat(name)
	if err != nil {
		return err
	}
	if !p.IsDir() {
		return &os.PathError{Op: "mkdir", Path: filepath.Join(r.path, name), Err: unix.ENOTDIR}
	}
	return nil
}

// Chmod sets the mode of a folder.
func (r *Root) Chmod(name string, mode uint32) error {
	return r.in("chmod", name, func(dir int) error { return unix.Fchmod(dir, mode) })
}

// Chown sets the owner of what is called name, not following a symlink.
func (r *Root) Chown(name string, uid, gid uint32) error {
	return r.on("chown", name, func(dir int, base string) error {
		return unix.Fchownat(dir, base, int(uid), int(gid), unix.AT_SYMLINK_NOFOLLOW)
	})
}

// Rename gives what is called from the name to, which must be free
// (RENAME_NOREPLACE of renameat2(2)).
func (r *Root) Rename(from, to string) error {
	return r.on("rename", from, func(fromDir int, fromBase string) error {
		return r.on("rename", to, func(toDir int, toBase string) error {
			return unix.Renameat2(fromDir, fromBase, toDir, toBase, unix.RENAME_NOREPLACE)
		})
	})
}

// Names lists a folder, in the order that the filesystem gives.
func (r *Root) Names(name string) ([]string, error) {
	dir, err := r.Open(name)
	if err != nil {
		return nil, err
	}
	names, err := dir.Readdirnames(-1)
	return names, r.named("list", name, errors.Join(err, dir.Close()))
}

// ReadFile reads a regular file of at most limit bytes.
func (r *Root) ReadFile(name string, limit int) (content []byte, err error) {
	err = r.on("read", name, func(dir int, base string) error {
		fd, err := openat2(dir, base, unix.O_RDONLY|unix.O_NONBLOCK, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd) //nolint:errcheck // only read
		p, err := statx(fd, "", unix.AT_EMPTY_PATH)
		if err != nil {
			return err
		}
		if p.Mode&unix.S_IFMT != unix.S_IFREG || p.SizeBytes > int64(limit) {
			return unix.EFBIG
		}
		content = make([]byte, limit)
		n := 0
		for n < limit {
			m, err := unix.Read(fd, content[n:])
			if errors.Is(err, unix.EINTR) {
				continue
			}
			if err != nil {
				return err
			}
			if m == 0 {
				break
			}
			n += m
		}
		content = content[:n]
		return nil
	})
	return content, err
}

// ReadEnd reads the last limit bytes of a regular file, and says what size the whole has.
func (r *Root) ReadEnd(name string, limit int) (end []byte, sizeBytes int64, err error) {
	err = r.on("read", name, func(dir int, base string) error {
		fd, err := openat2(dir, base, unix.O_RDONLY|unix.O_NONBLOCK, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd) //nolint:errcheck // only read
		p, err := statx(fd, "", unix.AT_EMPTY_PATH)
		if err != nil {
			return err
		}
		if p.Mode&unix.S_IFMT != unix.S_IFREG {
			return unix.EINVAL
		}
		sizeBytes = p.SizeBytes
		end = make([]byte, min(int64(limit), sizeBytes))
		for n := 0; n < len(end); {
			m, err := unix.Pread(fd, end[n:], sizeBytes-int64(len(end))+int64(n))
			if errors.Is(err, unix.EINTR) {
				continue
			}
			if err != nil {
				return err
			}
			if m == 0 { // it was made shorter meanwhile
				end = end[:n]
				break
			}
			n += m
		}
		return nil
	})
	return end, sizeBytes, err
}

// WriteFile puts a file in place as a whole: it is written beside its place,
// synced, renamed over what was there, and the folder synced. It has exactly this
// mode, whatever the umask, which other parts of the process change for a moment.
func (r *Root) WriteFile(name string, content []byte, mode uint32) error {
	temporary := name + ".new"
	return r.on("write", temporary, func(dir int, base string) error {
		if err := unix.Unlinkat(dir, base, 0); err != nil && !errors.Is(err, unix.ENOENT) {
			return err
		}
		fd, err := openat2(dir, base, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL, mode)
		if err != nil {
			return err
		}
		err = unix.Fchmod(fd, mode)
		for rest := content; len(rest) > 0 && err == nil; {
			var n int
			if n, err = unix.Write(fd, rest); errors.Is(err, unix.EINTR) {
				err = nil
			}
			rest = rest[max(n, 0):]
		}
		if err == nil {
			err = unix.Fsync(fd)
		}
		if err = errors.Join(err, unix.Close(fd)); err != nil {
			return errors.Join(err, unix.Unlinkat(dir, base, 0))
		}
		if err := unix.Renameat(dir, base, dir, filepath.Base(name)); err != nil {
			return err
		}
		return fsyncDir(dir)
	})
}

// Touch makes an empty file of mode 0600 unless there is something of that name.
func (r *Root) Touch(name string) error {
	return r.on("make", name, func(dir int, base string) error {
		fd, err := openat2(dir, base, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL, 0o600)
		if errors.Is(err, unix.EEXIST) {
			return nil
		}
		if err != nil {
			return err
		}
		return errors.Join(unix.Fchmod(fd, 0o600), unix.Close(fd))
	})
}

// RemoveFile removes one name that is no folder. A missing one is no error.
func (r *Root) RemoveFile(name string) error {
	return r.on("remove", name, func(dir int, base string) error {
		if err := unix.Unlinkat(dir, base, 0); err != nil && !errors.Is(err, unix.ENOENT) {
			return err
		}
		return nil
	})
}

// RemoveDir removes an empty folder. A missing one is no error.
func (r *Root) RemoveDir(name string) error {
	return r.on("remove", name, func(dir int, base string) error {
		if err := unix.Unlinkat(dir, base, unix.AT_REMOVEDIR); err != nil && !errors.Is(err, unix.ENOENT) {
			return err
		}
		return nil
	})
}

// SyncDir makes the names in a folder survive a loss of power.
func (r *Root) SyncDir(name string) error { return r.in("sync", name, unix.Fsync) }

// SyncFilesystem writes out all of the root's filesystem (syncfs(2)).
func (r *Root) SyncFilesystem() error { return r.in("syncfs", ".", unix.Syncfs) }

// Open opens a folder below the root for a walk. The caller closes it.
func (r *Root) Open(name string) (dir *os.File, err error) {
	err = r.on("open", name, func(at int, base string) error {
		fd, err := openat2(at, base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK, 0)
		if err != nil {
			return err
		}
		dir = os.NewFile(uintptr(fd), filepath.Join(r.path, name))
		return nil
	})
	return dir, err
}

// Space is how full a filesystem is (statfs(2)).
type Space struct {
	// FreeBytes is what root can still write, UsedBytes what has been by anybody.
	FreeBytes int64
	UsedBytes int64
	// UsedInodes is nil where the kernel does not count them.
	UsedInodes *int64
	// ID is the kernel's name of the filesystem (f_fsid).
	ID [2]int32
}

// Space is what the root's filesystem has.
func (r *Root) Space() (s Space, err error) {
	err = r.in("statfs", ".", func(dir int) error {
		var st unix.Statfs_t
		if err := unix.Fstatfs(dir, &st); err != nil {
			return err
		}
		s = Space{FreeBytes: int64(st.Bfree) * st.Bsize, UsedBytes: int64(st.Blocks-st.Bfree) * st.Bsize, ID: st.Fsid.Val}
		if st.Files > 0 {
			used := int64(st.Files - st.Ffree)
			s.UsedInodes = &used
		}
		return nil
	})
	return s, err
}

// Do calls f with the root's own descriptor, which stays open meanwhile.
func (r *Root) Do(op string, f func(fd int) error) error {
	if err := r.do(f); err != nil {
		return &os.PathError{Op: op, Path: r.path, Err: err}
	}
	return nil
}

// on opens the folder that name is in, and calls f with it and the last element
// of name. For "." that is the root itself.
func (r *Root) on(op, name string, f func(dir int, base string) error) error {
	err := r.do(func(root int) error {
		dir, base := filepath.Split(name)
		if name == "" || strings.HasPrefix(name, "/") || base == "" || base == ".." {
			return unix.EINVAL
		}
		if dir == "" {
			return f(root, base)
		}
		fd, err := openat2(root, filepath.Clean(dir), unix.O_PATH|unix.O_DIRECTORY, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd) //nolint:errcheck // a mere place: nothing is lost
		return f(fd, base)
	})
	return r.named(op, name, err)
}

// in opens the folder called name and calls f with it.
func (r *Root) in(op, name string, f func(dir int) error) error {
	err := r.do(func(root int) error {
		fd, err := openat2(root, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK, 0)
		if err != nil {
			return err
		}
		err = f(fd)
		_ = unix.Close(fd) //nolint:errcheck // a folder: what matters was synced
		return err
	})
	return r.named(op, name, err)
}

func (r *Root) do(f func(fd int) error) error {
	conn, err := r.file.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	if conn.Control(func(fd uintptr) { inner = f(int(fd)) }) != nil {
		return fs.ErrClosed // the only way that it fails
	}
	return inner
}

func (r *Root) named(op, name string, err error) error {
	var already *os.PathError
	if err == nil || errors.As(err, &already) {
		return err
	}
	return &os.PathError{Op: op, Path: filepath.Join(r.path, name), Err: err}
}

// How names are resolved; O_NOFOLLOW is for the last element.
func openat2(dir int, name string, flags int, mode uint32) (int, error) {
	how := unix.OpenHow{
		Flags:   uint64(flags) | unix.O_CLOEXEC | unix.O_NOFOLLOW,
		Mode:    uint64(mode),
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV,
	}
	for {
		fd, err := unix.Openat2(dir, name, &how)
		// EAGAIN: a rename elsewhere made the kernel unsure whether a ".." stays beneath (openat2(2)).
		if errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN) {
			continue
		}
		if errors.Is(err, unix.ENOSYS) {
			return -1, fmt.Errorf("openat2 needs Linux 5.6: %w", errors.ErrUnsupported)
		}
		return fd, err
	}
}

func statx(dir int, name string, flags int) (Place, error) {
	const mask = unix.STATX_BASIC_STATS | unix.STATX_MNT_ID
	var stx unix.Statx_t
	for {
		err := unix.Statx(dir, name, flags, mask, &stx)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return Place{}, err
		}
		break
	}
	p := Place{
		Device: unix.Mkdev(stx.Dev_major, stx.Dev_minor), Inode: stx.Ino,
		Changed: stx.Ctime.Sec*1e9 + int64(stx.Ctime.Nsec), Modified: stx.Mtime.Sec*1e9 + int64(stx.Mtime.Nsec),
		UID: stx.Uid, GID: stx.Gid, Mode: uint32(stx.Mode),
		Blocks: stx.Blocks, Links: stx.Nlink, SizeBytes: int64(stx.Size),
	}
	if stx.Mask&unix.STATX_MNT_ID != 0 {
		p.Mount = stx.Mnt_id
	}
	p.IsMountRootKnown = stx.Attributes_mask&unix.STATX_ATTR_MOUNT_ROOT != 0
	p.IsMountRoot = p.IsMountRootKnown && stx.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0
	return p, nil
}

// fsyncDir syncs a folder that may be open as a mere place (O_PATH).
func fsyncDir(dir int) error {
	fd, err := openat2(dir, ".", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	return errors.Join(unix.Fsync(fd), unix.Close(fd))
}

func retryInterrupted[T any](call func() (T, error)) (T, error) {
	for {
		v, err := call()
		if !errors.Is(err, unix.EINTR) {
			return v, err
		}
	}
}

// FDPath is a path to an open folder, for functions that take only paths.
func FDPath(f *os.File) string { return "/proc/self/fd/" + strconv.Itoa(int(f.Fd())) }
