package fsstats

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// kernelSource is the source that asks the kernel. All system calls of this
// package are in this file.
type kernelSource struct{}

var _ source = kernelSource{}

// look opens path as a mere place (O_PATH: no permission on the file itself is
// needed, no device is touched, no automount triggered; open(2)), so that the
// answers below are all about one place whatever happens to the path meanwhile.
func (kernelSource) look(path string) (spot, error) {
	fd, err := retryInterrupted(func() (int, error) {
		return unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	})
	if err != nil {
		return spot{}, &os.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd) //nolint:errcheck // a mere place: nothing is lost

	self := "/proc/self/fd/" + strconv.Itoa(fd)
	name, err := os.Readlink(self)
	if err != nil {
		return spot{}, err
	}
	id, links, err := mountID(fd)
	if err != nil {
		return spot{}, err
	}
	// The kernel appends " (deleted)" to the name of a file without one; a file
	// may also really be called so.
	if links == 0 && strings.HasSuffix(name, " (deleted)") {
		return spot{}, &os.PathError{Op: "open", Path: path, Err: unix.ENOENT}
	}
	if !filepath.IsAbs(name) {
		return spot{}, fmt.Errorf("%s is outside of the root directory (%s): %w", path, name, ErrMountUnknown)
	}

	var st unix.Statfs_t
	if _, err := retryInterrupted(func() (int, error) { return 0, unix.Fstatfs(fd, &st) }); err != nil {
		return spot{}, &os.PathError{Op: "statfs", Path: path, Err: err}
	}
	return spot{path: name, mountID: id, space: spaceOf(&st)}, nil
}

func (kernelSource) readlink(path string) (string, bool) {
	target, err := os.Readlink(path)
	return target, err == nil
}

func (kernelSource) mounts() (map[uint64]mount, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	defer f.Close() //nolint:errcheck // only read
	return parseMounts(f)
}

// mountID gives the ID of the mount that fd is on, as in field 1 of mountinfo,
// and the number of names of the file.
func mountID(fd int) (id uint64, links uint32, err error) {
	var stx unix.Statx_t
	// DONT_SYNC: a network filesystem need not ask its server (statx(2)).
	const flags = unix.AT_EMPTY_PATH | unix.AT_STATX_DONT_SYNC
	_, err = retryInterrupted(func() (int, error) {
		return 0, unix.Statx(fd, "", flags, unix.STATX_NLINK|unix.STATX_MNT_ID, &stx)
	})
	if err != nil {
		return 0, 0, os.NewSyscallError("statx", err)
	}
	if stx.Mask&unix.STATX_MNT_ID != 0 {
		return stx.Mnt_id, stx.Nlink, nil
	}
	id, err = mountIDFromFdinfo(fd)
	return id, stx.Nlink, err
}

// mountIDFromFdinfo is for kernels before 5.8.
func mountIDFromFdinfo(fd int) (uint64, error) {
	f, err := os.Open("/proc/self/fdinfo/" + strconv.Itoa(fd))
	if err != nil {
		return 0, err
	}
	defer f.Close() //nolint:errcheck // only read
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if value, ok := strings.CutPrefix(lines.Text(), "mnt_id:"); ok {
			return strconv.ParseUint(strings.TrimSpace(value), 10, 64)
		}
	}
	if err := lines.Err(); err != nil {
		return 0, err
	}
	return 0, fmt.Errorf("%s has no mnt_id: %w", f.Name(), errors.ErrUnsupported)
}

// spaceOf takes what is needed from statfs's answer. The unit of its blocks is
// f_frsize, as in statvfs(3); some filesystems leave that at 0 and mean f_bsize.
func spaceOf(st *unix.Statfs_t) space {
	unit := st.Frsize
	if unit <= 0 {
		unit = st.Bsize
	}
	return space{
		blockBytes:   uint64(max(unit, 0)),
		blocks:       st.Blocks,
		free:         st.Bfree,
		available:    st.Bavail,
		inodesTotal:  st.Files,
		inodesUnused: st.Ffree,
	}
}

// retryInterrupted repeats a call that a signal interrupted: the Go runtime
// sends itself signals, and slow filesystems give up on any.
func retryInterrupted[T any](call func() (T, error)) (T, error) {
	for {
		v, err := call()
		if !errors.Is(err, unix.EINTR) {
			return v, err
		}
	}
}
