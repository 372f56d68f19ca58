// Package upstream makes the connections on which cleave's own processes ask the
// container runtime, beside the calls that the proxy passes on. It knows no
// question and imports nothing of this module; agent and agent/snapshotter may
// import it.
package upstream

import (
	"context"
	"fmt"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
)

const (
	// connectTimeout is how long a try to connect has at least.
	connectTimeout = 5 * time.Second
	// lastRetry is the longest pause between two tries.
	lastRetry = 3 * time.Second
	// maxAnswer is the largest answer that containerd sends, in bytes (its
	// default max_send_message_size); a list of images may be large.
	maxAnswer = 16 << 20
)

// DialFunc connects to the runtime.
type DialFunc func(ctx context.Context) (net.Conn, error)

// Plain connects to a unix socket.
func Plain(path string) DialFunc {
	return func(ctx context.Context) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", path)
	}
}

// Connect returns a connection that dial makes when it is used, and makes again
// when it breaks. It stays while nobody uses it: its breaking tells that the
// runtime went away. path is for messages.
func Connect(path string, dial DialFunc) (*grpc.ClientConn, error) {
	// The path is no part of the target, which is read as a URL: a % in it
	// would stand for something else.
	conn, err := grpc.NewClient("passthrough:///localhost",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return dial(ctx) }),
		grpc.WithDisableServiceConfig(),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswer)),
		grpc.WithIdleTimeout(0),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: lastRetry},
			MinConnectTimeout: connectTimeout,
		}),
	)
	if err != nil {
		return nil, fmt.Errorf("prepare questions to the container runtime at %s: %w", path, err)
	}
	return conn, nil
}
