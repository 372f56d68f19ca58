package snapshotter

import (
	"context"
	"fmt"
	"net"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"

	"github.com/cleave-cri/cleave/proxy/unixsock"
)

// caller is the process at the other end of a connection, as the kernel saw it
// when it connected (unix(7), SO_PEERCRED).
type caller struct{ pid int32 }

var _ credentials.AuthInfo = caller{}

// AuthType implements [credentials.AuthInfo].
func (caller) AuthType() string { return "unix-peer" }

// callerOf returns the process that made a call, 0 if that is not known.
func callerOf(ctx context.Context) int32 {
	if p, ok := peer.FromContext(ctx); ok {
		if c, ok := p.AuthInfo.(caller); ok {
			return c.pid
		}
	}
	return 0
}

// askCaller is the "handshake" of a connection: it asks the kernel who is there.
// It rejects nobody, the socket's mode has done that.
type askCaller struct{}

var _ credentials.TransportCredentials = askCaller{}

// ServerHandshake implements [credentials.TransportCredentials].
func (askCaller) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	uc, ok := conn.(*net.UnixConn)
	if !ok {
		return nil, nil, fmt.Errorf("ask who is at the other end: a %T is not a unix connection", conn)
	}
	peer, err := unixsock.PeerOf(uc)
	if err != nil {
		return nil, nil, err
	}
	return conn, caller{pid: peer.PID}, nil
}

// ClientHandshake implements [credentials.TransportCredentials]; this side
// listens only.
func (askCaller) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, fmt.Errorf("peer credentials are for the listening side only")
}

// Info implements [credentials.TransportCredentials].
func (askCaller) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "unix-peer"}
}

// Clone implements [credentials.TransportCredentials].
func (askCaller) Clone() credentials.TransportCredentials { return askCaller{} }

// OverrideServerName implements [credentials.TransportCredentials].
func (askCaller) OverrideServerName(string) error { return nil }
