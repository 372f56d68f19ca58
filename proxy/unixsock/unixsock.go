// Package unixsock makes the unix sockets that cleave listens on: it never
// takes a live server's socket away, never removes a file that is not a dead
// socket, and gives a socket its owner and mode before anybody can connect.
// It holds no protocol; proxy, agent and cmd may import it.
package unixsock

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Errors that callers can tell apart.
var (
	// ErrInUse says that a live server answers on the path.
	ErrInUse = errors.New("the socket is in use by a running server")
	// ErrNotSocket says that the path exists and is no socket.
	ErrNotSocket = errors.New("the path exists and is not a socket")
	// ErrNoDirectory says that the folder of the socket does not exist.
	ErrNoDirectory = errors.New("the socket's folder does not exist")
	// ErrReplaced says that the path names another file than the one meant.
	ErrReplaced = errors.New("another file is in the socket's place")
)

// dialTimeout bounds the question whether somebody lives at a socket. A
// listener whose queue is full makes a dial wait; that counts as alive.
const dialTimeout = time.Second

// Access is the owner and the permission bits of a socket.
type Access struct {
	UID, GID int
	// Mode holds permission bits only. To connect a process needs write
	// permission (unix(7), "Pathname socket ownership and permissions").
	Mode fs.FileMode
}

// RootOnly is the access of sockets that have no model to follow.
var RootOnly = Access{Mode: 0o600}

// AccessOf returns who may connect to an existing socket.
// The error is fs.ErrNotExist, [ErrNotSocket], or that of the system.
func AccessOf(path string) (Access, error) {
	info, err := os.Stat(path)
	if err != nil {
		return Access{}, fmt.Errorf("look at socket %s: %w", path, err)
	}
	if info.Mode()&fs.ModeSocket == 0 {
		return Access{}, fmt.Errorf("look at socket %s: %w", path, ErrNotSocket)
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return Access{}, fmt.Errorf("look at socket %s: no owner in the answer of stat", path)
	}
	return Access{UID: int(st.Uid), GID: int(st.Gid), Mode: info.Mode().Perm()}, nil
}

// Apply gives this owner and mode to the socket file at path, if it is the one
// that id names, and to no other file ([ErrReplaced]).
func (a Access) Apply(path string, id ID) error {
	// An O_PATH descriptor holds on to the file that was looked at; a symlink
	// is not followed (open(2)).
	fd, err := unix.Open(path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open socket %s: %w", path, err)
	}
	return errors.Join(a.applyTo(fd, path, id), unix.Close(fd))
}

func (a Access) applyTo(fd int, path string, id ID) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("look at socket %s: %w", path, err)
	}
	if (ID{Device: st.Dev, Inode: st.Ino}) != id {
		return fmt.Errorf("set the owner and mode of socket %s: %w", path, ErrReplaced)
	}
	if err := unix.Fchownat(fd, "", a.UID, a.GID, unix.AT_EMPTY_PATH); err != nil {
		return fmt.Errorf("set the owner of socket %s to %d:%d: %w", path, a.UID, a.GID, err)
	}
	// The mode can't be set by such a descriptor before Linux 6.6 (fchmodat2(2)),
	// but by its name in /proc, which leads to the file itself (proc_pid_fd(5)).
	if err := os.Chmod("/proc/self/fd/"+strconv.Itoa(fd), a.Mode.Perm()); err != nil {
		return fmt.Errorf("set the mode of socket %s to %#o: %w", path, a.Mode.Perm(), err)
	}
	return nil
}

// Listen makes a listening socket at an absolute path. A socket file that
// nobody answers on is replaced; a live one is not ([ErrInUse]), nor is
// anything else ([ErrNotSocket]).
//
// Between the question whether a socket is dead and its removal another
// process could bind the path and would lose its socket file. cleave's own
// processes exclude that by the lock on their state folder.
//
// Closing the listener leaves the file; see [Remove]. Listen changes the
// process's umask for a moment, so it belongs to start-up.
func Listen(path string, access Access) (*net.UnixListener, error) {
	if err := makeWay(path); err != nil {
		return nil, err
	}
	// Nobody may connect before the socket has its owner and mode.
	umask := syscall.Umask(0o777)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	syscall.Umask(umask)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	l.SetUnlinkOnClose(false)
	id, err := IDOf(path)
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	if err := access.Apply(path, id); err != nil {
		return nil, errors.Join(err, l.Close(), Remove(path, id))
	}
	return l, nil
}

// folderMode is the mode of a folder that is made for sockets. Each socket in it
// has a mode of its own.
const folderMode = 0o755

// EnsureFolder makes the folder of a socket if it is missing: that one only, not
// its parents, and only where the parent belongs to root or to this user and
// nobody else may write to it, who could put something else in its place. Where
// it makes none, [Listen] says what is missing.
func EnsureFolder(path string) error {
	folder := filepath.Dir(path)
	if _, err := os.Lstat(folder); !errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	info, err := os.Stat(filepath.Dir(folder))
	if err != nil {
		return nil
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	const others = 0o022
	if !ok || !info.IsDir() || int(st.Uid) != 0 && int(st.Uid) != os.Geteuid() || info.Mode().Perm()&others != 0 {
		return fmt.Errorf("listen on %s: %w, and others may write to %s: create it, or choose another path", path, ErrNoDirectory, filepath.Dir(folder))
	}
	err = os.Mkdir(folder, folderMode)
	if errors.Is(err, fs.ErrExist) {
		return nil // somebody else was faster
	}
	if err == nil {
		err = os.Chmod(folder, folderMode) // whatever the umask
	}
	if err != nil {
		return fmt.Errorf("make the folder of socket %s: %w", path, err)
	}
	return nil
}

// makeWay removes a dead socket from path, and says why it can't be listened on.
func makeWay(path string) error {
	folder := filepath.Dir(path)
	if info, err := os.Stat(folder); errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("listen on %s: %w: create %s or choose another path", path, ErrNoDirectory, folder)
	} else if err != nil {
		return fmt.Errorf("listen on %s: %w", path, err)
	} else if !info.IsDir() {
		return fmt.Errorf("listen on %s: %w: %s is not a folder", path, ErrNoDirectory, folder)
	}
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("listen on %s: %w", path, err)
	}
	if info.Mode()&fs.ModeSocket == 0 {
		return fmt.Errorf("listen on %s: %w: move it away or choose another path", path, ErrNotSocket)
	}
	alive, err := Alive(path)
	if err != nil {
		return fmt.Errorf("listen on %s: %w", path, err)
	}
	if alive {
		return fmt.Errorf("listen on %s: %w: stop it first or choose another path", path, ErrInUse)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove dead socket %s: %w", path, err)
	}
	return nil
}

// Alive reports whether somebody accepts connections on a socket. The error
// says why that could not be found out; then it must be taken for alive.
func Alive(path string) (bool, error) {
	ctx, cancel := context.WithTimeout(context.Background(), dialTimeout) //nolint:forbidigo // only a time limit: a dial so short is not worth stopping
	defer cancel()
	dialer := net.Dialer{}
	conn, err := dialer.DialContext(ctx, "unix", path)
	switch {
	case err == nil:
		return true, conn.Close()
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, fs.ErrNotExist):
		return false, nil
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, syscall.EAGAIN),
		errors.Is(err, syscall.EPROTOTYPE):
		// Its queue is full, or it is a socket of another type: occupied.
		return true, nil
	default:
		return true, fmt.Errorf("ask whether anybody listens on %s: %w", path, err)
	}
}

// Remove takes away the socket file at path, but only while the path still
// names the socket that id does: a successor's, or anybody else's file, stays.
func Remove(path string, id ID) error {
	now, err := IDOf(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if now != id {
		return nil
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove socket %s: %w", path, err)
	}
	return nil
}

// ID names a socket file by its device and inode, whatever path leads to it.
// While anybody listens on the socket or has it open no other file gets the same.
type ID struct {
	Device, Inode uint64
}

// String gives the form that [ParseID] reads.
func (id ID) String() string { return fmt.Sprintf("%d:%d", id.Device, id.Inode) }

// ParseID reads what [ID.String] wrote.
func ParseID(s string) (ID, error) {
	device, inode, _ := strings.Cut(s, ":")
	d, err := strconv.ParseUint(device, 10, 64)
	i, inodeErr := strconv.ParseUint(inode, 10, 64)
	if err = errors.Join(err, inodeErr); err != nil {
		return ID{}, fmt.Errorf("read %q as device:inode of a socket: %w", s, err)
	}
	return ID{Device: d, Inode: i}, nil
}

// IDOf returns the ID of the file at path itself; of a symlink its own.
func IDOf(path string) (ID, error) {
	return idOf(path, os.Lstat)
}

// Reached returns the ID of the file that a dial of path gets to, by symlinks
// and mounts.
func Reached(path string) (ID, error) {
	return idOf(path, os.Stat)
}

func idOf(path string, stat func(string) (fs.FileInfo, error)) (ID, error) {
	info, err := stat(path)
	if err != nil {
		return ID{}, fmt.Errorf("look at socket %s: %w", path, err)
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return ID{}, fmt.Errorf("look at socket %s: no inode in the answer of stat", path)
	}
	return ID{Device: st.Dev, Inode: st.Ino}, nil
}
