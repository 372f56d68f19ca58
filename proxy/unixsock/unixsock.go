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
	"syscall"
	"time"
)

// Errors that callers can tell apart.
var (
	// ErrInUse says that a live server answers on the path.
	ErrInUse = errors.New("the socket is in use by a running server")
	// ErrNotSocket says that the path exists and is no socket.
	ErrNotSocket = errors.New("the path exists and is not a socket")
	// ErrNoDirectory says that the folder of the socket does not exist.
	ErrNoDirectory = errors.New("the socket's folder does not exist")
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

// Apply gives the socket at path this owner and mode.
func (a Access) Apply(path string) error {
	if err := os.Chown(path, a.UID, a.GID); err != nil {
		return fmt.Errorf("set the owner of socket %s to %d:%d: %w", path, a.UID, a.GID, err)
	}
	if err := os.Chmod(path, a.Mode.Perm()); err != nil {
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
	if err := access.Apply(path); err != nil {
		return nil, errors.Join(err, l.Close(), os.Remove(path))
	}
	return l, nil
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

// Remove takes away the socket file of a listener, but only while the path
// still names the socket that the listener was given: a successor's stays.
func Remove(path string, inode uint64) error {
	now, err := Inode(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if now != inode {
		return nil
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove socket %s: %w", path, err)
	}
	return nil
}

// Inode returns the inode number of the socket file at path.
func Inode(path string) (uint64, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return 0, fmt.Errorf("look at socket %s: %w", path, err)
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, fmt.Errorf("look at socket %s: no inode in the answer of stat", path)
	}
	return st.Ino, nil
}
