package fsstats

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

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
		fsid:         fsidOf(st.Fsid),
	}
}

func fsidOf(id unix.Fsid) string {
	if id.Val == [2]int32{} {
		return ""
	}
	return fmt.Sprintf("%08x%08x", uint32(id.Val[0]), uint32(id.Val[1]))
}

// cachedSource is the kernel with a mount table that is read again only after it
// has changed: on a node with hundreds of pods reading takes milliseconds.
type cachedSource struct {
	kernelSource
	// watched is a mountinfo of its own: the kernel remembers per open file
	// which changes were told (proc_pid_mounts(5)).
	watched *os.File

	mu     sync.Mutex
	table  map[uint64]mount // guarded by mu; nil: has to be read
	closed bool             // guarded by mu
}

var _ source = (*cachedSource)(nil)

func newCachedSource() (*cachedSource, error) {
	f, err := openMountinfo()
	if err != nil {
		return nil, err
	}
	return &cachedSource{watched: f}, nil
}

// close makes whoever still asks get os.ErrClosed.
func (c *cachedSource) close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	return c.watched.Close()
}

// mounts asks each time whether the table has changed, which is exact and takes
// less than a microsecond.
func (c *cachedSource) mounts() (map[uint64]mount, error) {
	c.mu.Lock()
	err := c.forgetChangedLocked()
	table := c.table
	c.mu.Unlock()
	if err != nil || table != nil {
		return table, err
	}
	if table, err = c.kernelSource.mounts(); err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.table = table
	return table, c.forgetChangedLocked() // it may have changed while it was read
}

func (c *cachedSource) forgetChangedLocked() error {
	if c.closed {
		return fmt.Errorf("watch the mount table: %w", os.ErrClosed)
	}
	changed, err := pollMounts(int(c.watched.Fd()), -1, 0)
	if changed {
		c.table = nil
	}
	return err
}

// openMountinfo opens the mount table for poll(2) alone: not through Go's poller,
// which would take the changes for itself.
func openMountinfo() (*os.File, error) {
	fd, err := retryInterrupted(func() (int, error) {
		return unix.Open("/proc/self/mountinfo", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	})
	if err != nil {
		return nil, fmt.Errorf("watch the mount table: %w", &os.PathError{Op: "open", Path: "/proc/self/mountinfo", Err: err})
	}
	return os.NewFile(uintptr(fd), "/proc/self/mountinfo"), nil
}

// pollMounts waits until the mount table has changed since fd, a mountinfo, was
// opened or last asked about, until something can be read from stop, or for a
// number of milliseconds; -1 is for ever.
func pollMounts(fd, stop, milliseconds int) (changed bool, err error) {
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLPRI}, {Fd: int32(stop), Events: unix.POLLIN}}
	_, err = retryInterrupted(func() (int, error) { return unix.Poll(fds, milliseconds) })
	if err != nil {
		return false, fmt.Errorf("watch the mount table: %w", os.NewSyscallError("poll", err))
	}
	return fds[0].Revents&(unix.POLLPRI|unix.POLLERR) != 0, nil
}

// watchMounts calls changed after each change of the mount table, until ctx ends.
// A thread waits in the kernel meanwhile.
func watchMounts(ctx context.Context, changed func()) (err error) {
	f, err := openMountinfo()
	if err != nil {
		return err
	}
	defer f.Close() //nolint:errcheck // only read
	stop, end, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("watch the mount table: %w", err)
	}
	defer stop.Close() //nolint:errcheck // nothing was written to it
	over := context.AfterFunc(ctx, func() {
		_ = end.Close() //nolint:errcheck // it wakes the thread up
	})
	defer func() {
		if over() {
			err = errors.Join(err, end.Close())
		}
	}()
	for ctx.Err() == nil {
		is, err := pollMounts(int(f.Fd()), int(stop.Fd()), -1)
		if err != nil {
			return err
		}
		if is {
			changed()
		}
	}
	return nil
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
