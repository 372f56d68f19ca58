package proxy

import (
	"context"
	"fmt"
	"net"
	"os"
	"strconv"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/credentials"
)

// PeerInfo says which process is at the other end of a connection, as the
// kernel saw it when the process connected (unix(7), SO_PEERCRED). It is the
// AuthInfo of every call that the proxy takes.
type PeerInfo struct {
	PID int32
	UID uint32
	GID uint32
}

var _ credentials.AuthInfo = PeerInfo{}

// AuthType implements [credentials.AuthInfo].
func (PeerInfo) AuthType() string { return "unix-peer" }

// peerCredentials is the "handshake" of a connection on our socket: it asks
// the kernel who is there and logs it. It rejects nobody, the socket's mode
// has done that.
type peerCredentials struct {
	log *zap.Logger
}

var _ credentials.TransportCredentials = peerCredentials{}

// ServerHandshake implements [credentials.TransportCredentials].
func (p peerCredentials) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	accepted, ok := conn.(*acceptedConn)
	if !ok {
		return nil, nil, fmt.Errorf("connection of type %T did not come from the proxy's listener", conn)
	}
	// From here on a graceful stop of the server takes care of the connection.
	accepted.handedToServer()
	info, err := peerOf(accepted.Conn)
	if err != nil {
		return nil, nil, err
	}
	p.log.Info("connection accepted", zap.Int32("pid", info.PID), zap.Uint32("uid", info.UID),
		zap.String("command", commandOf(info.PID)))
	return accepted, info, nil
}

// ClientHandshake implements [credentials.TransportCredentials]; the proxy
// listens only.
func (peerCredentials) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, fmt.Errorf("peer credentials are for the listening side only")
}

// Info implements [credentials.TransportCredentials].
func (peerCredentials) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "unix-peer"}
}

// Clone implements [credentials.TransportCredentials].
func (p peerCredentials) Clone() credentials.TransportCredentials { return p }

// OverrideServerName implements [credentials.TransportCredentials].
func (peerCredentials) OverrideServerName(string) error { return nil }

func peerOf(conn net.Conn) (PeerInfo, error) {
	uc, ok := conn.(*net.UnixConn)
	if !ok {
		return PeerInfo{}, fmt.Errorf("ask who is at the other end: a %T is not a unix connection", conn)
	}
	raw, err := uc.SyscallConn()
	if err != nil {
		return PeerInfo{}, fmt.Errorf("ask who is at the other end: %w", err)
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return PeerInfo{}, fmt.Errorf("ask who is at the other end: %w", err)
	}
	if credErr != nil {
		return PeerInfo{}, fmt.Errorf("ask who is at the other end: %w", credErr)
	}
	return PeerInfo{PID: cred.Pid, UID: cred.Uid, GID: cred.Gid}, nil
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
