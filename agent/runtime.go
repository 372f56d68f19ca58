package agent

import (
	"context"
	"fmt"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// askTimeout bounds a single question to the runtime.
const askTimeout = 5 * time.Second

// dialFunc connects to the runtime.
type dialFunc func(ctx context.Context) (net.Conn, error)

// plainDial connects to a unix socket.
func plainDial(path string) dialFunc {
	return func(ctx context.Context) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", path)
	}
}

// dialRuntime returns a connection for the agent's own questions to the
// runtime; it is not the proxy's. Nothing is dialled yet; dial does it.
func dialRuntime(path string, dial dialFunc) (*grpc.ClientConn, error) {
	// The path is no part of the target, which is read as a URL: a % in it
	// would stand for something else.
	conn, err := grpc.NewClient("passthrough:///localhost",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return dial(ctx) }),
		grpc.WithDisableServiceConfig(),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 5 * time.Second},
			MinConnectTimeout: askTimeout,
		}),
	)
	if err != nil {
		return nil, fmt.Errorf("prepare questions to the container runtime at %s: %w", path, err)
	}
	return conn, nil
}

// mountpoints asks the runtime itself, not through the proxy, which mountpoints
// it names in ImageFsInfo. The first of images is that of the snapshotter that
// CRI uses by default (CTD-3).
func mountpoints(conn grpc.ClientConnInterface) mountpointsFunc {
	return func(ctx context.Context) (images, containers []string, _ error) {
		ctx, cancel := context.WithTimeout(ctx, askTimeout)
		defer cancel()
		info, err := runtimeapi.NewImageServiceClient(conn).ImageFsInfo(ctx, &runtimeapi.ImageFsInfoRequest{})
		if err != nil {
			return nil, nil, err
		}
		return pathsOf(info.GetImageFilesystems()), pathsOf(info.GetContainerFilesystems()), nil
	}
}

func pathsOf(list []*runtimeapi.FilesystemUsage) []string {
	var paths []string
	for _, u := range list {
		if p := u.GetFsId().GetMountpoint(); p != "" {
			paths = append(paths, p)
		}
	}
	return paths
}

// runtimeStatus asks the runtime who it is.
func runtimeStatus(ctx context.Context, conn grpc.ClientConnInterface, endpoint string) RuntimeStatus {
	s := RuntimeStatus{Endpoint: endpoint}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	v, err := runtimeapi.NewRuntimeServiceClient(conn).Version(ctx, &runtimeapi.VersionRequest{})
	if err != nil {
		s.Error = err.Error()
		return s
	}
	s.Name, s.Version = v.GetRuntimeName(), v.GetRuntimeVersion()
	return s
}
