package installer

import (
	"context"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	contentapi "github.com/containerd/containerd/api/services/content/v1"
	leasesapi "github.com/containerd/containerd/api/services/leases/v1"
	namespacesapi "github.com/containerd/containerd/api/services/namespaces/v1"
	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/cleave-cri/cleave/agent/upstream"
)

// fakeContainerd has one namespace, and refuses what containerd refuses.
type fakeContainerd struct {
	users     []*containersapi.Container
	blobs     []*contentapi.Info
	snapshots []*snapshotsapi.Info
	did       []string
}

type (
	fakeNamespaces struct {
		namespacesapi.UnimplementedNamespacesServer
	}
	fakeContainers struct {
		containersapi.UnimplementedContainersServer
		f *fakeContainerd
	}
	fakeContent struct {
		contentapi.UnimplementedContentServer
		f *fakeContainerd
	}
	fakeSnapshots struct {
		snapshotsapi.UnimplementedSnapshotsServer
		f *fakeContainerd
	}
	fakeLeases struct {
		leasesapi.UnimplementedLeasesServer
		f *fakeContainerd
	}
)

func (s fakeLeases) Create(_ context.Context, r *leasesapi.CreateRequest) (*leasesapi.CreateResponse, error) {
	// One is left of an earlier try.
	return nil, status.Errorf(codes.AlreadyExists, "lease %s", r.GetID())
}

func (s fakeLeases) Delete(_ context.Context, r *leasesapi.DeleteRequest) (*emptypb.Empty, error) {
	if r.GetID() == leaseName && r.GetSync() {
		s.f.did = append(s.f.did, "collect")
	}
	return &emptypb.Empty{}, nil
}

func (fakeNamespaces) List(context.Context, *namespacesapi.ListNamespacesRequest) (*namespacesapi.ListNamespacesResponse, error) {
	return &namespacesapi.ListNamespacesResponse{Namespaces: []*namespacesapi.Namespace{{Name: "k8s.io"}}}, nil
}

func wrongSpace(ctx context.Context) error {
	md, _ := metadata.FromIncomingContext(ctx)
	if got := md.Get(namespaceHeader); !slices.Equal(got, []string{"k8s.io"}) {
		return status.Errorf(codes.InvalidArgument, "namespace %q", got)
	}
	return nil
}

func (s fakeContainers) List(ctx context.Context, _ *containersapi.ListContainersRequest) (*containersapi.ListContainersResponse, error) {
	return &containersapi.ListContainersResponse{Containers: s.f.users}, wrongSpace(ctx)
}

func (s fakeContent) List(r *contentapi.ListContentRequest, stream contentapi.Content_ListServer) error {
	if want := `labels."containerd.io/gc.ref.snapshot.cleave"`; !slices.Equal(r.GetFilters(), []string{want}) {
		return status.Errorf(codes.InvalidArgument, "filters %q", r.GetFilters())
	}
	return stream.Send(&contentapi.ListContentResponse{Info: s.f.blobs})
}

func (s fakeContent) Update(_ context.Context, r *contentapi.UpdateRequest) (*contentapi.UpdateResponse, error) {
	s.f.did = append(s.f.did, "unlabel "+r.GetInfo().GetDigest()+" "+strings.Join(r.GetUpdateMask().GetPaths(), ","))
	return &contentapi.UpdateResponse{}, nil
}

func (s fakeSnapshots) List(r *snapshotsapi.ListSnapshotsRequest, stream snapshotsapi.Snapshots_ListServer) error {
	if r.GetSnapshotter() != "cleave" {
		return status.Error(codes.InvalidArgument, r.GetSnapshotter())
	}
	return stream.Send(&snapshotsapi.ListSnapshotsResponse{Info: s.f.snapshots})
}

func (s fakeSnapshots) Remove(_ context.Context, r *snapshotsapi.RemoveSnapshotRequest) (*emptypb.Empty, error) {
	for _, i := range s.f.snapshots {
		if i.GetParent() == r.GetKey() {
			return nil, status.Errorf(codes.FailedPrecondition, "cannot remove snapshot with child")
		}
	}
	s.f.did = append(s.f.did, "remove "+r.GetKey())
	s.f.snapshots = slices.DeleteFunc(s.f.snapshots, func(i *snapshotsapi.Info) bool { return i.GetName() == r.GetKey() })
	if r.GetKey() == "b" {
		return nil, status.Error(codes.NotFound, "garbage collection was faster")
	}
	return &emptypb.Empty{}, nil
}

func serveFake(t *testing.T, f *fakeContainerd) *store {
	t.Helper()
	path := filepath.Join(t.TempDir(), "c.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	namespacesapi.RegisterNamespacesServer(server, fakeNamespaces{})
	containersapi.RegisterContainersServer(server, fakeContainers{f: f})
	contentapi.RegisterContentServer(server, fakeContent{f: f})
	snapshotsapi.RegisterSnapshotsServer(server, fakeSnapshots{f: f})
	leasesapi.RegisterLeasesServer(server, fakeLeases{f: f})
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	t.Cleanup(func() {
		server.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	conn, err := upstream.Connect(path, upstream.Plain(path))
	if err != nil {
		t.Fatal(err)
	}
	st := newStore(conn, conn)
	t.Cleanup(func() {
		if err := st.close(); err != nil {
			t.Error(err)
		}
	})
	return st
}

func committed(name, parent string) *snapshotsapi.Info {
	return &snapshotsapi.Info{Name: name, Parent: parent, Kind: snapshotsapi.Kind_COMMITTED}
}

// TestRelease takes labels off first, then snapshots, children before parents.
func TestRelease(t *testing.T) {
	t.Parallel()
	f := &fakeContainerd{
		users:     []*containersapi.Container{{ID: "other", Snapshotter: "overlayfs"}},
		blobs:     []*contentapi.Info{{Digest: "sha256:1", Labels: map[string]string{gcLabel: "c"}}, {Digest: "sha256:2"}},
		snapshots: []*snapshotsapi.Info{committed("a", ""), committed("b", "a"), committed("c", "b"), committed("d", "a")},
	}
	if err := serveFake(t, f).release(t.Context()); err != nil {
		t.Fatal(err)
	}
	want := []string{"unlabel sha256:1 labels." + gcLabel, "remove c", "remove b", "remove d", "remove a", "collect"}
	if !slices.Equal(f.did, want) {
		t.Errorf("it did %q, want %q", f.did, want)
	}
}

// TestReleaseStopsWhileInUse: nothing is removed while anything uses or writes a
// snapshot.
func TestReleaseStopsWhileInUse(t *testing.T) {
	t.Parallel()
	for name, f := range map[string]*fakeContainerd{
		"a container":               {users: []*containersapi.Container{{ID: "mine", Snapshotter: "cleave"}}},
		"a snapshot that is active": {snapshots: []*snapshotsapi.Info{committed("a", ""), {Name: "mine", Parent: "a", Kind: snapshotsapi.Kind_ACTIVE}}},
		"a view":                    {snapshots: []*snapshotsapi.Info{{Name: "mine", Kind: snapshotsapi.Kind_VIEW}}},
		"a kind that is not known":  {snapshots: []*snapshotsapi.Info{{Name: "mine", Kind: snapshotsapi.Kind_UNKNOWN}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			err := serveFake(t, f).release(t.Context())
			if err == nil || !strings.Contains(err.Error(), "mine") || len(f.did) > 0 {
				t.Errorf("it ended with %v and did %q", err, f.did)
			}
		})
	}
}
