package split

import (
	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/contrib/snapshotservice"
	"google.golang.org/grpc"
)

// Register makes the snapshotter one of a server's services, in the form that
// containerd's proxy plugins of type "snapshot" speak.
func (s *Snapshotter) Register(server grpc.ServiceRegistrar) {
	snapshotsapi.RegisterSnapshotsServer(server, snapshotservice.FromSnapshotter(s))
}
