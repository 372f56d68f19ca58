package unixsock

import (
	"fmt"
	"net"

	"golang.org/x/sys/unix"
)

// Peer says which process is at the other end of a connection, as the kernel saw
// it when the process connected (unix(7), SO_PEERCRED).
type Peer struct {
	PID int32
	UID uint32
	GID uint32
}

// PeerOf asks the kernel who is at the other end.
func PeerOf(conn *net.UnixConn) (Peer, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return Peer{}, fmt.Errorf("ask who is at the other end: %w", err)
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return Peer{}, fmt.Errorf("ask who is at the other end: %w", err)
	}
	if credErr != nil {
		return Peer{}, fmt.Errorf("ask who is at the other end: %w", credErr)
	}
	return Peer{PID: cred.Pid, UID: cred.Uid, GID: cred.Gid}, nil
}
