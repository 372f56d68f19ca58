package proxy

import (
	"fmt"
	"net"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// peerInfo says which process is at the other end of a connection, as the
// kernel saw it when the process connected (unix(7), SO_PEERCRED).
type peerInfo struct {
	PID int32
	UID uint32
	GID uint32
}

func peerOf(conn *net.UnixConn) (peerInfo, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return peerInfo{}, fmt.Errorf("ask who is at the other end: %w", err)
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return peerInfo{}, fmt.Errorf("ask who is at the other end: %w", err)
	}
	if credErr != nil {
		return peerInfo{}, fmt.Errorf("ask who is at the other end: %w", credErr)
	}
	return peerInfo{PID: cred.Pid, UID: cred.Uid, GID: cred.Gid}, nil
}

// commandOf returns the short name of a process for the log, empty when it is
// gone or hidden.
func commandOf(pid int32) string {
	name, err := os.ReadFile("/proc/" + strconv.Itoa(int(pid)) + "/comm")
	if err != nil || len(name) == 0 {
		return ""
	}
	return string(name[:len(name)-1])
}
