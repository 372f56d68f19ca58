package snapshot

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	introspectionapi "github.com/containerd/containerd/api/services/introspection/v1"
	leasesapi "github.com/containerd/containerd/api/services/leases/v1"
	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
)

// fake is a containerd that notes its calls and fails those it is told to.
type fake struct {
	mu    sync.Mutex
	calls []string          // guarded by mu
	names map[string]bool   // guarded by mu; the names that were used
	lease map[string]string // guarded by mu; labels of the lease
	fails map[string]error  // not changed after the start
	hook  func(call string) // called for each call
}

type (
	fakeLeases struct {
		leasesapi.UnimplementedLeasesServer
		*fake
	}
	fakeSnapshots struct {
		snapshotsapi.UnimplementedSnapshotsServer
		*fake
	}
)

func (f *fake) note(ctx context.Context, call, name string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	get := func(key string) string { return strings.Join(metadata.ValueFromIncomingContext(ctx, key), ",") }
	f.calls = append(f.calls, call+" in "+get(namespaceHeader)+" lease "+strings.ReplaceAll(get(leaseHeader), name, "NAME"))
	f.names[name] = true
	if f.hook != nil {
		f.hook(call)
	}
	return f.fails[call]
}

func (f fakeLeases) Create(ctx context.Context, r *leasesapi.CreateRequest) (*leasesapi.CreateResponse, error) {
	f.lease = r.GetLabels()
	return &leasesapi.CreateResponse{}, f.note(ctx, "create lease", r.GetID())
}

func (f fakeLeases) Delete(ctx context.Context, r *leasesapi.DeleteRequest) (*emptypb.Empty, error) {
	if !r.GetSync() {
		return nil, status.Error(codes.InvalidArgument, "the deletion does not wait")
	}
	return &emptypb.Empty{}, f.note(ctx, "delete lease", r.GetID())
}

func (f fakeSnapshots) Prepare(ctx context.Context, r *snapshotsapi.PrepareSnapshotRequest) (*snapshotsapi.PrepareSnapshotResponse, error) {
	if r.GetParent() != "" {
		return nil, status.Error(codes.InvalidArgument, "there is a parent")
	}
	return &snapshotsapi.PrepareSnapshotResponse{}, f.note(ctx, "prepare "+r.GetSnapshotter(), r.GetKey())
}

func (f fakeSnapshots) Remove(ctx context.Context, r *snapshotsapi.RemoveSnapshotRequest) (*emptypb.Empty, error) {
	return &emptypb.Empty{}, f.note(ctx, "remove "+r.GetSnapshotter(), r.GetKey())
}

// serve starts the fake and returns a store on it.
func (f *fake) serve(t *testing.T) *Store {
	t.Helper()
	f.names = map[string]bool{}
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	leasesapi.RegisterLeasesServer(server, fakeLeases{fake: f})
	snapshotsapi.RegisterSnapshotsServer(server, fakeSnapshots{fake: f})
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(l) }()
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
		server.Stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return NewStore(conn, "k8s.io")
}

func TestCTD64_Poke(t *testing.T) {
	t.Parallel()
	const (
		create  = "create lease in k8s.io lease "
		prepare = "prepare cleave in k8s.io lease NAME"
		remove  = "remove cleave in k8s.io lease "
		del     = "delete lease in k8s.io lease "
	)
	broken := status.Error(codes.Internal, "broken")
	cases := []struct {
		name  string
		fails map[string]error
		calls []string
		want  []string // pieces of the error; none: no error
	}{
		{"all goes well", nil, []string{create, prepare, remove, del}, nil},
		{"no lease", map[string]error{"create lease": broken}, []string{create}, []string{"poke snapshotter cleave: make a lease:", "broken"}},
		{"no snapshot", map[string]error{"prepare cleave": broken}, []string{create, prepare, del}, []string{"make an empty snapshot:", "broken"}},
		{"no removal", map[string]error{"remove cleave": broken}, []string{create, prepare, remove, del}, []string{"remove the empty snapshot:", "broken"}},
		{"no end of the lease", map[string]error{"delete lease": broken}, []string{create, prepare, remove, del}, []string{"delete the lease:", "broken"}},
		{"two failures are both told", map[string]error{"remove cleave": broken, "delete lease": broken}, []string{create, prepare, remove, del}, []string{"remove the empty snapshot:", "delete the lease:"}},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			f := &fake{fails: tc.fails}
			err := f.serve(t).Poke(t.Context(), "cleave")
			if (err == nil) != (len(tc.want) == 0) {
				t.Errorf("got error %v", err)
			}
			for _, piece := range tc.want {
				if err == nil || !strings.Contains(err.Error(), piece) {
					t.Errorf("got error %v, want %q in it", err, piece)
				}
			}
			if diff := cmp.Diff(tc.calls, f.calls); diff != "" {
				t.Errorf("calls (-want +got):\n%s", diff)
			}
			if len(f.names) != 1 {
				t.Errorf("names %v, want one for all", f.names)
			}
			expires, err := time.Parse(time.RFC3339, f.lease[expireLabel])
			if left := time.Until(expires); err != nil || left <= 0 || left > pokeLife {
				t.Errorf("the lease ends in %v (%v), want at most %v", left, err, pokeLife)
			}
		})
	}
}

func TestPokesHaveNamesOfTheirOwn(t *testing.T) {
	t.Parallel()
	f := &fake{}
	s := f.serve(t)
	for range 3 {
		if err := s.Poke(t.Context(), "cleave"); err != nil {
			t.Fatal(err)
		}
	}
	if len(f.names) != 3 {
		t.Errorf("3 pokes used the names %v", f.names)
	}
}

// A caller that gives up in the middle leaves nothing behind.
func TestPokeCleansUpWhenBrokenOff(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	f := &fake{hook: func(call string) {
		if strings.HasPrefix(call, "prepare") {
			cancel()
		}
	}}
	_ = f.serve(t).Poke(ctx, "cleave") //nolint:errcheck // whether the answer came before the end is chance
	f.mu.Lock()
	defer f.mu.Unlock()
	if last := f.calls[len(f.calls)-1]; !strings.HasPrefix(last, "delete lease") {
		t.Errorf("the last call is %q, want the deletion of the lease", last)
	}
}

func TestIdentityOf(t *testing.T) {
	t.Parallel()
	const ours = 4026531836
	cases := []struct {
		name    string
		answer  *introspectionapi.ServerResponse
		want    Identity
		wantErr string
	}{
		{"whole", &introspectionapi.ServerResponse{UUID: "u", Pid: 7, Pidns: ours}, Identity{"u", 7}, ""},
		{"other PID namespace", &introspectionapi.ServerResponse{UUID: "u", Pid: 7, Pidns: 1}, Identity{}, "another PID namespace"},
		{"no UUID", &introspectionapi.ServerResponse{Pid: 7, Pidns: ours}, Identity{}, `UUID ""`},
		{"no process", &introspectionapi.ServerResponse{UUID: "u", Pidns: ours}, Identity{}, "process 0"},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			got, err := identityOf(tc.answer, ours)
			if (err == nil) != (tc.wantErr == "") || err != nil && !strings.Contains(err.Error(), tc.wantErr) {
				t.Errorf("got error %v, want %q", err, tc.wantErr)
			}
			if got != tc.want {
				t.Errorf("got %v, want %v", got, tc.want)
			}
			if tc.name == "other PID namespace" && !errors.Is(err, ErrOtherPIDs) {
				t.Errorf("%v is not ErrOtherPIDs", err)
			}
		})
	}
}
