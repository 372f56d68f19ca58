package proxy

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"net"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
)

const (
	// reconnectDelayMax bounds the pause between two attempts to reach a
	// runtime that is down, and so how long after its return the first call
	// may still fail. Dialling a unix socket that nobody listens on costs
	// microseconds, so a short pause burdens nobody.
	reconnectDelayMax = 500 * time.Millisecond

	// connectTimeout bounds one attempt, for a runtime that accepts the
	// connection and then says nothing.
	connectTimeout = 5 * time.Second

	// upstreamWindowBytes is the HTTP/2 flow-control window towards us, per
	// stream and for the whole connection. A list answer of a large node (half
	// a megabyte and more) then arrives without a pause for window updates.
	upstreamWindowBytes = 4 << 20

	// ioBufferBytes is the size of the read and write buffers of one
	// connection: two HTTP/2 frames of 16 KiB and their headers.
	ioBufferBytes = 64 << 10
)

// dialUpstream returns a connection to the runtime's socket. Nothing is dialled
// before the first call, the runtime may come later or go away and come back;
// while it is away calls fail at once with Unavailable and a message that names
// the socket.
func dialUpstream(path string, dial func(context.Context) (net.Conn, error)) (*grpc.ClientConn, error) {
	conn, err := grpc.NewClient("passthrough:///localhost",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			c, err := dial(ctx)
			if err != nil {
				return nil, fmt.Errorf("container runtime at unix://%s: %s", path, dialReason(err))
			}
			return c, nil
		}),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{
				BaseDelay:  50 * time.Millisecond,
				Multiplier: 1.6,
				Jitter:     0.2,
				MaxDelay:   reconnectDelayMax,
			},
			MinConnectTimeout: connectTimeout,
		}),
		grpc.WithDefaultCallOptions(
			grpc.ForceCodecV2(frameCodec{}),
			// The peers' own limits rule: with one of ours a message that
			// the runtime gave would turn into a status that it did not give.
			grpc.MaxCallRecvMsgSize(math.MaxInt32),
			grpc.MaxCallSendMsgSize(math.MaxInt32),
		),
		grpc.WithStatsHandler(oddSender{}),
		grpc.WithDisableRetry(),
		grpc.WithDisableServiceConfig(),
		grpc.WithIdleTimeout(0),
		grpc.WithNoProxy(),
		grpc.WithStaticStreamWindowSize(upstreamWindowBytes),
		grpc.WithStaticConnWindowSize(upstreamWindowBytes),
		grpc.WithReadBufferSize(ioBufferBytes),
		grpc.WithWriteBufferSize(ioBufferBytes),
	)
	if err != nil {
		return nil, fmt.Errorf("prepare the connection to the container runtime at %s: %w", path, err)
	}
	return conn, nil
}

// dialReason says in words why a unix socket could not be dialled.
func dialReason(err error) string {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "the socket does not exist; is the runtime running, and is runtime.endpoint its socket?"
	case errors.Is(err, syscall.ECONNREFUSED):
		return "nobody listens on the socket, or it is not a socket; is the runtime running?"
	case errors.Is(err, syscall.ENOTSOCK), errors.Is(err, syscall.EPROTOTYPE):
		return "not a stream socket; set runtime.endpoint to the runtime's CRI socket"
	case errors.Is(err, fs.ErrPermission):
		return "permission denied; cleave has to run as root"
	default:
		return err.Error()
	}
}
