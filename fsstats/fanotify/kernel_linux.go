package fanotify

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// All system calls of this package are in this file.

const (
	metadataVersion = 3 // FANOTIFY_METADATA_VERSION of linux/fanotify.h
	// The handle is always a directory's, because only those are asked for. The record
	// says so of an event of names, and calls it a file's for the closing of one (seen
	// on Linux 6.18).
	recordDirectory = unix.FAN_EVENT_INFO_TYPE_DFID
	recordFile      = unix.FAN_EVENT_INFO_TYPE_FID
	maskOverflow    = unix.FAN_Q_OVERFLOW
	maskMoved       = unix.FAN_MOVED_FROM | unix.FAN_MOVED_TO
	maskDirectory   = unix.FAN_ONDIR
	// maskWatched leaves FAN_MODIFY and FAN_OPEN out: they make a small write take
	// 70 % longer (CTD-123).
	maskWatched = unix.FAN_CREATE | unix.FAN_DELETE | maskMoved | unix.FAN_CLOSE_WRITE | unix.FAN_ONDIR
)

// kernel is a group of fanotify with one mark.
type kernel struct {
	events *os.File
	// mount is a folder on the filesystem, for its handles.
	mount *os.File
}

func watch(path string) (_ *kernel, err error) {
	mount, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, mount.Close())
		}
	}()
	// Directories by handle: Linux 5.9. Non-blocking, for Go's poller.
	fd, err := unix.FanotifyInit(unix.FAN_CLASS_NOTIF|unix.FAN_CLOEXEC|unix.FAN_NONBLOCK|unix.FAN_REPORT_DIR_FID, unix.O_RDONLY|unix.O_CLOEXEC)
	if err != nil {
		return nil, unlessSupported("fanotify_init", "it needs Linux 5.9 and CAP_SYS_ADMIN", err)
	}
	events := os.NewFile(uintptr(fd), "fanotify")
	if err := unix.FanotifyMark(fd, unix.FAN_MARK_ADD|unix.FAN_MARK_FILESYSTEM, maskWatched, int(mount.Fd()), ""); err != nil {
		return nil, errors.Join(unlessSupported("fanotify_mark", "the filesystem must have an ID and file handles, which an overlay and a subvolume of btrfs have not", err), events.Close())
	}
	return &kernel{events: events, mount: mount}, nil
}

// unlessSupported makes an error one that says that it can't be done here, if it is.
func unlessSupported(call, need string, err error) error {
	err = os.NewSyscallError(call, err)
	for _, no := range []error{unix.EINVAL, unix.ENOSYS, unix.EPERM, unix.EOPNOTSUPP, unix.ENODEV, unix.EXDEV} {
		if errors.Is(err, no) {
			return fmt.Errorf("%w: %s: %w", ErrNotSupported, need, err)
		}
	}
	return err
}

func (k *kernel) read(buffer []byte) (int, error) { return k.events.Read(buffer) }

// interrupt ends a read that waits.
func (k *kernel) interrupt() {
	_ = k.events.SetReadDeadline(time.Unix(1, 0)) //nolint:errcheck // it fails only once it is closed
}

func (k *kernel) close() {
	_ = errors.Join(k.events.Close(), k.mount.Close()) //nolint:errcheck // only read
}

// pathOf gives the path of a directory by its struct file_handle, as it is now. gone
// says that there is none.
func (k *kernel) pathOf(handle []byte) (path string, gone bool) {
	if len(handle) < 8 {
		return "", true
	}
	h := unix.NewFileHandle(int32(binary.NativeEndian.Uint32(handle[4:])), handle[8:])
	fd, err := unix.OpenByHandleAt(int(k.mount.Fd()), h, unix.O_PATH|unix.O_CLOEXEC)
	if err != nil {
		return "", true
	}
	defer unix.Close(fd) //nolint:errcheck // nothing was written
	path, err = os.Readlink("/proc/self/fd/" + strconv.Itoa(fd))
	if err != nil {
		return "", true
	}
	return path, false
}
