// Package boltfile looks after the file of a bbolt database on a disk that may
// be full: its lock, its space reserved beforehand, and a ballast beside it
// that can be given up. It knows files, not what is in them, and imports
// nothing else of this module. Only snapshot/split may import it.
package boltfile

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// fileMode is the mode of all files. It is set after their making: other parts of
// the process change the umask for a moment, to make sockets.
const fileMode = 0o600

// ErrLocked says that another process holds the lock.
var ErrLocked = errors.New("another process holds the lock")

// Lock is held until it is closed or the process ends.
type Lock struct{ file *os.File }

// TakeLock takes the lock beside the database at path, without waiting. The
// lock's file is never removed: another process could lock the removed one.
func TakeLock(path string) (*Lock, error) {
	name := path + ".lock"
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, fileMode)
	if errors.Is(err, unix.EROFS) || errors.Is(err, unix.ENOSPC) {
		// A lock that is there from before does as well.
		if old, oldErr := os.Open(name); oldErr == nil {
			f, err = old, nil
		}
	}
	if err != nil {
		return nil, fmt.Errorf("open the lock: %w", err)
	}
	_ = f.Chmod(fileMode) //nolint:errcheck // on a read-only disk it stays as it is, which does no harm
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			err = fmt.Errorf("%w (process %s): stop it first", ErrLocked, owner(name))
		}
		return nil, errors.Join(fmt.Errorf("lock %s: %w", name, err), f.Close())
	}
	// For messages only: on a full disk the note is missing or old.
	note := strconv.Itoa(os.Getpid()) + "\n"
	if _, err := f.WriteAt([]byte(note), 0); err == nil {
		_ = f.Truncate(int64(len(note))) //nolint:errcheck // for messages only
	}
	return &Lock{file: f}, nil
}

// Close gives the lock back. Closing alone would not do while another goroutine
// is starting a process, which for a moment has all our descriptors.
func (l *Lock) Close() error {
	return errors.Join(unix.Flock(int(l.file.Fd()), unix.LOCK_UN), l.file.Close())
}

func owner(name string) string {
	note, err := os.ReadFile(name)
	first, _, _ := strings.Cut(string(note), "\n")
	if err != nil || first == "" {
		return "unknown"
	}
	return first
}

// Reserve makes the file at path at least sizeBytes long and gives it all its
// blocks, so that overwriting any of it needs no space. It says so with
// errors.ErrUnsupported where the filesystem can't.
//
// bbolt maps the file as it finds it and grows it only when its highest page
// lies beyond the end (bbolt 1.5, db.go: grow), so a reserved file is not
// touched until it is used up. What bbolt adds then is a hole; Reserve called
// again fills it.
func Reserve(path string, sizeBytes int64) (err error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	return allocate(f, max(sizeBytes, info.Size()))
}

func allocate(f *os.File, sizeBytes int64) error {
	for {
		err := unix.Fallocate(int(f.Fd()), 0, 0, sizeBytes)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EOPNOTSUPP):
			return fmt.Errorf("reserve %d bytes for %s: the filesystem has no fallocate: %w", sizeBytes, f.Name(), errors.ErrUnsupported)
		case err != nil:
			return fmt.Errorf("reserve %d bytes for %s: %w", sizeBytes, f.Name(), err)
		}
		return f.Sync()
	}
}

// btrfsMagic is statfs's f_type of btrfs (statfs(2)).
const btrfsMagic = 0x9123683e

// OverwriteInPlace asks btrfs not to copy the blocks of a new, empty file when
// they are overwritten (chattr +C): else the reserved space would serve only
// once. Other filesystems do so anyway, or don't have the attribute.
func OverwriteInPlace(f *os.File) error {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
		return err
	}
	if st.Type != btrfsMagic {
		return nil
	}
	flags, err := unix.IoctlGetInt(int(f.Fd()), unix.FS_IOC_GETFLAGS)
	if err != nil {
		return err
	}
	const noCopy = 0x00800000 // FS_NOCOW_FL of linux/fs.h
	return unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, flags|noCopy)
}

// IsFull says whether an error is about missing space, or the disk of the file
// at path has next to none: bbolt does not wrap each error of the kernel.
func IsFull(err error, path string) bool {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return true
	}
	const nextToNone = 64 << 10
	free, statErr := Free(path)
	return statErr == nil && free < nextToNone
}

// Free is how many bytes root can still write on the filesystem of path.
func Free(path string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return 0, &os.PathError{Op: "statfs", Path: path, Err: err}
	}
	return int64(st.Bfree) * st.Bsize, nil
}

// Ballast is a file whose only use is to be given up.
type Ballast struct {
	path      string
	sizeBytes int64
}

// NewBallast describes the ballast beside the database at path.
func NewBallast(path string, sizeBytes int64) Ballast {
	return Ballast{path: path + ".ballast", sizeBytes: sizeBytes}
}

// Path is where it lies.
func (b Ballast) Path() string { return b.path }

// Want is its full size.
func (b Ballast) Want() int64 { return b.sizeBytes }

// Bytes is how much of it is there.
func (b Ballast) Bytes() int64 {
	var st unix.Stat_t
	if unix.Stat(b.path, &st) != nil {
		return 0
	}
	return st.Blocks * 512
}

// Fill makes the ballast whole. On error it gives up what it took.
func (b Ballast) Fill() (err error) {
	f, err := os.OpenFile(b.path, os.O_RDWR|os.O_CREATE, fileMode)
	if err != nil {
		return fmt.Errorf("make the ballast: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if err := f.Chmod(fileMode); err != nil {
		return fmt.Errorf("make the ballast: %w", err)
	}
	if err := allocate(f, b.sizeBytes); err != nil {
		return errors.Join(fmt.Errorf("make the ballast: %w", err), f.Truncate(0))
	}
	return nil
}

// Release gives the space back, and waits until the filesystem can use it: ext4
// and xfs hand freed blocks out again only when their journal has the freeing.
func (b Ballast) Release() (err error) {
	f, err := os.OpenFile(b.path, os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("release the ballast: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if err := f.Truncate(0); err != nil {
		return fmt.Errorf("release the ballast: %w", err)
	}
	return f.Sync()
}

// Allocated is the length of the file at path, and how much of that has blocks.
func Allocated(path string) (sizeBytes, blockBytes int64, err error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return 0, 0, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	return st.Size, st.Blocks * 512, nil
}

// SyncDir makes the names in a folder survive a loss of power.
func SyncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// Exists reports whether there is a file at path.
func Exists(path string) (bool, error) {
	_, err := os.Lstat(path)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look for %s: %w", filepath.Base(path), err)
	}
	return true, nil
}
