package snapshot

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"strings"
	"testing"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	introspectionapi "github.com/containerd/containerd/api/services/introspection/v1"
	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/api/types"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
)

func TestCTD26_ClassIsDecidedByKindOwnerAndKey(t *testing.T) {
	t.Parallel()
	chain := "sha256:" + strings.Repeat("a", 64)
	cases := []struct {
		name  string
		kind  snapshotsapi.Kind
		key   string
		owner *owner
		want  Class
	}{
		{"committed layer", snapshotsapi.Kind_COMMITTED, chain, nil, Image},
		{"container", snapshotsapi.Kind_ACTIVE, strings.Repeat("1", 64), &owner{id: "c"}, Container},
		{"sandbox", snapshotsapi.Kind_ACTIVE, strings.Repeat("2", 64), &owner{id: "s", sandbox: true}, Sandbox},
		{"extraction", snapshotsapi.Kind_ACTIVE, "extract-123-AbC_ " + chain, nil, Extraction},
		{"container named like an extraction", snapshotsapi.Kind_ACTIVE, "extract-foo", &owner{id: "c"}, Container},
		{"snapshot named like an extraction", snapshotsapi.Kind_ACTIVE, "extract-foo", nil, Other},
		{"extraction with something behind it", snapshotsapi.Kind_ACTIVE, "extract-1 " + chain + "/x", nil, Other},
		{"image volume", snapshotsapi.Kind_ACTIVE, "/run/containerd/io.containerd.grpc.v1.cri/image-volumes/s/d", nil, Other},
		{"view of a layer", snapshotsapi.Kind_VIEW, "extract-1 " + chain, nil, View},
		{"view that a container runs on", snapshotsapi.Kind_VIEW, "ro", &owner{id: "c"}, Container},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			var o owner
			if tc.owner != nil {
				o = *tc.owner
			}
			if got := classOf(tc.kind, tc.key, o, tc.owner != nil); got != tc.want {
				t.Errorf("class %q, want %q", got, tc.want)
			}
		})
	}
}

func TestCTD22_FoldersOfMounts(t *testing.T) {
	t.Parallel()
	cases := []struct {
		name   string
		mounts []*types.Mount
		want   Folders
	}{
		{"none", nil, Folders{}},
		{"overlay", []*types.Mount{{Type: "overlay", Source: "overlay", Options: []string{"workdir=/s/3/work", "upperdir=/s/3/fs", "lowerdir=/s/2/fs:/s/1/fs", "index=off"}}}, Folders{"/s/3/fs", "/s/2/fs"}},
		{"overlay without upper: a view", []*types.Mount{{Type: "overlay", Source: "overlay", Options: []string{"lowerdir=/s/2/fs:/s/1/fs"}}}, Folders{Lower: "/s/2/fs"}},
		{"no parent", []*types.Mount{{Type: "bind", Source: "/s/3/fs", Options: []string{"rw", "rbind"}}}, Folders{Upper: "/s/3/fs"}},
		{"view of one layer", []*types.Mount{{Type: "bind", Source: "/s/3/fs", Options: []string{"ro", "rbind"}}}, Folders{Lower: "/s/3/fs"}},
		{"block device", []*types.Mount{{Type: "ext4", Source: "/dev/mapper/x"}}, Folders{}},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			if got := foldersOf(tc.mounts); got != tc.want {
				t.Errorf("folders %+v, want %+v", got, tc.want)
			}
		})
	}
}

// The parts of containerd's API, with one snapshotter that works and one that
// does not.
type (
	twoPlugins struct {
		introspectionapi.UnimplementedIntrospectionServer
	}
	noContainers struct {
		containersapi.UnimplementedContainersServer
	}
	halfDeadSnapshots struct {
		snapshotsapi.UnimplementedSnapshotsServer
	}
)

func (twoPlugins) Plugins(context.Context, *introspectionapi.PluginsRequest) (*introspectionapi.PluginsResponse, error) {
	return &introspectionapi.PluginsResponse{Plugins: []*introspectionapi.Plugin{
		{Type: snapshotterType, ID: "a-dead-one", Exports: map[string]string{rootExport: "/dead"}},
		{Type: snapshotterType, ID: "works", Exports: map[string]string{rootExport: "/works"}},
	}}, nil
}

func (noContainers) ListStream(*containersapi.ListContainersRequest, containersapi.Containers_ListStreamServer) error {
	return nil
}

func (halfDeadSnapshots) List(r *snapshotsapi.ListSnapshotsRequest, out snapshotsapi.Snapshots_ListServer) error {
	if r.GetSnapshotter() != "works" {
		return status.Error(codes.Unavailable, "connection refused")
	}
	return out.Send(&snapshotsapi.ListSnapshotsResponse{Info: []*snapshotsapi.Info{{Name: "layer", Kind: snapshotsapi.Kind_COMMITTED}}})
}

func (halfDeadSnapshots) Usage(context.Context, *snapshotsapi.UsageRequest) (*snapshotsapi.UsageResponse, error) {
	return nil, status.Error(codes.NotFound, "no such snapshot")
}

func dialFake(t *testing.T) *grpc.ClientConn {
	t.Helper()
	server := grpc.NewServer()
	introspectionapi.RegisterIntrospectionServer(server, twoPlugins{})
	containersapi.RegisterContainersServer(server, noContainers{})
	snapshotsapi.RegisterSnapshotsServer(server, halfDeadSnapshots{})
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- server.Serve(l) }()
	t.Cleanup(func() {
		server.Stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	conn, err := grpc.NewClient("unix://"+l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	})
	return conn
}

// TestADeadSnapshotterHidesNotTheOthers: the process of one proxy snapshotter is
// down; what the others hold is still known, and which one is missing.
func TestADeadSnapshotterHidesNotTheOthers(t *testing.T) {
	t.Parallel()
	inv, err := NewStore(dialFake(t), "k8s.io").Inventory(t.Context())
	if !errors.Is(err, ErrUnread) || !strings.Contains(err.Error(), "a-dead-one") {
		t.Errorf("error %v, want ErrUnread that names a-dead-one", err)
	}
	if len(inv.Layers) != 1 || inv.Layers[0].Snapshotter != "works" {
		t.Errorf("layers %+v, want the one of the other snapshotter", inv.Layers)
	}
	if len(inv.Unread) != 1 || inv.Unread[0] != "a-dead-one" {
		t.Errorf("unread %q", inv.Unread)
	}
}

func TestASnapshotThatWasRemovedIsGone(t *testing.T) {
	t.Parallel()
	_, err := NewStore(dialFake(t), "k8s.io").Usage(t.Context(), Layer{Snapshotter: "works", Key: "layer"})
	if !errors.Is(err, ErrGone) || status.Code(err) != codes.NotFound {
		t.Errorf("error %v, want ErrGone and containerd's own code", err)
	}
}
