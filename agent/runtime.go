package agent

import (
	"context"
	"time"

	"google.golang.org/grpc"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// askTimeout bounds a single question to the runtime.
const askTimeout = 5 * time.Second

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
