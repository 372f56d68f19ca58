package snapshot

import (
	"context"
	"net"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	introspectionapi "github.com/containerd/containerd/api/services/introspection/v1"
	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	versionapi "github.com/containerd/containerd/api/services/version/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/cleave-cri/cleave/doctor"
)

func TestJudgeVersion(t *testing.T) {
	t.Parallel()
	cases := []struct {
		version string
		want    doctor.Level
		remedy  string
	}{
		{"v2.4.2", doctor.Pass, ""},
		{"2.4.0", doctor.Pass, ""},
		{"v2.4.0-rc.1", doctor.Pass, ""},
		{"v2.40.0", doctor.Warn, "pass through all the same"},
		{"v2.1.4", doctor.Warn, "pass through all the same"},
		{"v3.0.0", doctor.Warn, "pass through all the same"},
		{"1.7.27~ds1", doctor.Fail, "upgrade containerd"},
		{"v1.7.0", doctor.Fail, "upgrade containerd"},
		{"0.2.9", doctor.Fail, "upgrade containerd"},
		{"10.0.0", doctor.Warn, "pass through all the same"},
		{"", doctor.Warn, "pass through all the same"},
	}
	for _, tc := range cases {
		t.Run(tc.version, func(t *testing.T) {
			t.Parallel()
			got := judgeVersion(tc.version)
			if got.Level != tc.want || !strings.Contains(got.Remedy, tc.remedy) || (tc.remedy == "") != (got.Remedy == "") {
				t.Errorf("got %+v, want %s with a remedy like %q", got, tc.want, tc.remedy)
			}
			if !strings.Contains(got.Reason, tc.version) {
				t.Errorf("the reason %q does not name the version", got.Reason)
			}
		})
	}
}

// node is a containerd as far as the checks ask: snapshotters with their roots,
// and what each holds.
type node struct {
	roots map[string]string
	// owned are containers ("c…") and sandboxes ("s…"), by snapshotter.
	owned map[string][]string
	// read counts the readings of the list of containers.
	read *atomic.Int32
}

type (
	nodeVersion struct {
		versionapi.UnimplementedVersionServer
	}
	nodePlugins struct {
		introspectionapi.UnimplementedIntrospectionServer
		node
	}
	nodeContainers struct {
		containersapi.UnimplementedContainersServer
		node
	}
	nodeSnapshots struct {
		snapshotsapi.UnimplementedSnapshotsServer
		node
	}
)

func (nodeVersion) Version(context.Context, *emptypb.Empty) (*versionapi.VersionResponse, error) {
	return &versionapi.VersionResponse{Version: "v2.4.2"}, nil
}

func (n nodePlugins) Plugins(context.Context, *introspectionapi.PluginsRequest) (*introspectionapi.PluginsResponse, error) {
	answer := &introspectionapi.PluginsResponse{}
	for name, root := range n.roots {
		p := &introspectionapi.Plugin{Type: snapshotterType, ID: name}
		if root != "" {
			p.Exports = map[string]string{rootExport: root}
		}
		answer.Plugins = append(answer.Plugins, p)
	}
	return answer, nil
}

func (n nodeContainers) ListStream(_ *containersapi.ListContainersRequest, out containersapi.Containers_ListStreamServer) error {
	n.read.Add(1)
	for snapshotter, ids := range n.owned {
		for _, id := range ids {
			c := &containersapi.Container{ID: id, Snapshotter: snapshotter, SnapshotKey: id, Labels: map[string]string{}}
			if strings.HasPrefix(id, "s") {
				c.Labels[kindLabel] = kindSandbox
			}
			if err := out.Send(&containersapi.ListContainerMessage{Container: c}); err != nil {
				return err
			}
		}
	}
	return nil
}

func (n nodeSnapshots) List(r *snapshotsapi.ListSnapshotsRequest, out snapshotsapi.Snapshots_ListServer) error {
	answer := &snapshotsapi.ListSnapshotsResponse{}
	for _, id := range n.owned[r.GetSnapshotter()] {
		answer.Info = append(answer.Info, &snapshotsapi.Info{Name: id, Kind: snapshotsapi.Kind_ACTIVE})
	}
	return out.Send(answer)
}

// checked runs the checks against the node and returns their results by name.
func (n node) checked(t *testing.T) map[string]doctor.Result {
	t.Helper()
	n.read = &atomic.Int32{}
	server := grpc.NewServer()
	versionapi.RegisterVersionServer(server, nodeVersion{})
	introspectionapi.RegisterIntrospectionServer(server, nodePlugins{node: n})
	containersapi.RegisterContainersServer(server, nodeContainers{node: n})
	snapshotsapi.RegisterSnapshotsServer(server, nodeSnapshots{node: n})
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- server.Serve(l) }()
	conn, err := grpc.NewClient("unix://"+l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	results := map[string]doctor.Result{}
	for _, r := range doctor.Run(t.Context(), NewStore(conn, "k8s.io").ReadOnce().Checks()) {
		results[r.Check] = r
	}
	if err := conn.Close(); err != nil {
		t.Error(err)
	}
	server.Stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if n := n.read.Load(); n != 1 {
		t.Errorf("the store is read %d times, want once for all checks", n)
	}
	return results
}

func TestChecksOfTheStore(t *testing.T) {
	t.Parallel()
	there, missing := t.TempDir(), filepath.Join(t.TempDir(), "missing")
	cases := []struct {
		name        string
		node        node
		roots, one  doctor.Level
		rootsReason string
	}{
		{"healthy", node{roots: map[string]string{"overlayfs": there}, owned: map[string][]string{"overlayfs": {"s1", "c1"}}}, doctor.Pass, doctor.Pass, "overlayfs at " + there},
		{"nothing runs yet", node{roots: map[string]string{"overlayfs": missing}, owned: nil}, doctor.Pass, doctor.Pass, "no snapshotter is in use"},
		{"CTD-4: a root that does not exist", node{roots: map[string]string{"overlayfs": missing}, owned: map[string][]string{"overlayfs": {"c1"}}}, doctor.Fail, doctor.Pass, missing},
		{"a root that is not said", node{roots: map[string]string{"proxied": ""}, owned: map[string][]string{"proxied": {"c1"}}}, doctor.Warn, doctor.Pass, "proxied"},
		{"an unused one may be wrong", node{roots: map[string]string{"overlayfs": there, "native": missing}, owned: map[string][]string{"overlayfs": {"c1"}}}, doctor.Pass, doctor.Pass, "overlayfs at"},
		{"CTD-14: containers on two", node{roots: map[string]string{"overlayfs": there, "native": there}, owned: map[string][]string{"overlayfs": {"s1"}, "native": {"c1"}}}, doctor.Pass, doctor.Warn, "native at"},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			got := tc.node.checked(t)
			if r := got["containerd version"]; r.Level != doctor.Pass {
				t.Errorf("version: %+v", r)
			}
			if r := got["snapshotter roots"]; r.Level != tc.roots || !strings.Contains(r.Reason, tc.rootsReason) || (r.Level == doctor.Pass) != (r.Remedy == "") {
				t.Errorf("roots: %+v, want %s and %q", r, tc.roots, tc.rootsReason)
			}
			if r := got["one snapshotter"]; r.Level != tc.one || (r.Level == doctor.Pass) != (r.Remedy == "") {
				t.Errorf("one snapshotter: %+v, want %s", r, tc.one)
			}
		})
	}
}

// TestChecksWithoutContainerd: nobody answers, which is told by each check.
func TestChecksWithoutContainerd(t *testing.T) {
	t.Parallel()
	conn, err := grpc.NewClient("unix://"+filepath.Join(t.TempDir(), "nobody"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close() //nolint:errcheck // end of test
	for _, r := range doctor.Run(t.Context(), NewStore(conn, "k8s.io").Checks()) {
		if r.Level != doctor.Fail || !strings.Contains(r.Remedy, "start containerd") {
			t.Errorf("%+v, want a failure that says to start containerd", r)
		}
	}
}
