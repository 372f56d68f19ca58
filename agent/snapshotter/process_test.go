package snapshotter

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	imagesapi "github.com/containerd/containerd/api/services/images/v1"
	introspectionapi "github.com/containerd/containerd/api/services/introspection/v1"
	leasesapi "github.com/containerd/containerd/api/services/leases/v1"
	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/contrib/snapshotservice"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"go.uber.org/zap/zaptest"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/agent/control"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/proxy/unixsock"
	"github.com/cleave-cri/cleave/snapshot/split"
	"github.com/cleave-cri/cleave/systemd/activation"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fakeBackend notes what it is told. It embeds no real snapshotter: a call that
// it has no method for is a nil dereference, which is a panic of a handler.
type fakeBackend struct {
	snapshots.Snapshotter

	mu        sync.Mutex
	removed   []string // guarded by mu
	confirmed []string // guarded by mu; "" for each loss
	refuse    error    // guarded by mu; the answer to ConfirmContainerd
	closed    bool     // guarded by mu
	alarm     bool     // guarded by mu

	reopened chan struct{}
	hung     chan struct{} // a value for each call of Usage, which does not end by itself
}

// Usage hangs until its caller gives up.
func (b *fakeBackend) Usage(ctx context.Context, _ string) (snapshots.Usage, error) {
	b.hung <- struct{}{}
	<-ctx.Done()
	return snapshots.Usage{}, ctx.Err()
}

func (b *fakeBackend) Register(server grpc.ServiceRegistrar) {
	snapshotsapi.RegisterSnapshotsServer(server, snapshotservice.FromSnapshotter(b))
}

func (b *fakeBackend) Prepare(context.Context, string, string, ...snapshots.Opt) ([]mount.Mount, error) {
	return []mount.Mount{{Type: "bind", Source: "/x"}}, nil
}

func (b *fakeBackend) Remove(_ context.Context, key string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.removed = append(b.removed, key)
	return nil
}

func (b *fakeBackend) Cleanup(context.Context) error {
	return b.Remove(context.Background(), "cleanup")
}

func (b *fakeBackend) ConfirmContainerd(_ context.Context, uuid string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.confirmed = append(b.confirmed, uuid)
	return b.refuse
}

func (b *fakeBackend) LoseContainerd() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if n := len(b.confirmed); n > 0 && b.confirmed[n-1] != "" {
		b.confirmed = append(b.confirmed, "")
	}
}

func (b *fakeBackend) ConfirmCleanup(context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.alarm {
		return errors.New("no clean-up waits")
	}
	b.alarm = false
	return nil
}

func (b *fakeBackend) Usages(context.Context) ([]split.SnapshotUsage, error) {
	return []split.SnapshotUsage{{Namespace: "k8s.io", Name: "c", Kind: "writable", Figure: &split.SnapshotFigure{Bytes: 4096, Inodes: 3, How: "walk"}}}, nil
}

// SetLimit knows a layer that can be limited, one that can't, and one that is broken.
func (b *fakeBackend) SetLimit(_ context.Context, namespace, name string, bytes uint64) (split.LayerLimit, error) {
	switch name {
	case "c":
		return split.LayerLimit{Namespace: namespace, Name: name, Project: 7, LimitBytes: bytes}, nil
	case "old":
		return split.LayerLimit{}, fmt.Errorf("it was made before: %w", errdefs.ErrFailedPrecondition)
	case "broken":
		return split.LayerLimit{}, errors.New("input/output error")
	}
	return split.LayerLimit{}, errdefs.ErrNotFound
}

func (b *fakeBackend) Limits(context.Context) ([]split.LayerLimit, error) {
	return []split.LayerLimit{{Namespace: "k8s.io", Name: "c", Project: 7, LimitBytes: 1 << 20}}, nil
}

func (b *fakeBackend) Reopened() <-chan struct{} { return b.reopened }

func (b *fakeBackend) Status(context.Context) (split.Status, error) {
	return split.Status{Identity: "id", Notes: []string{"a note"}}, errors.New("a figure is missing")
}

func (b *fakeBackend) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	return nil
}

func (b *fakeBackend) get(what func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	what()
}

// fakeContainerd answers the questions of the watcher.
type fakeContainerd struct {
	introspectionapi.UnimplementedIntrospectionServer

	uuid  string
	pid   int
	pokes chan string
	// announced are images that CRI is told of.
	announced chan string
	noPoke    error
	server    *grpc.Server
	ended     chan error
}

type (
	leases struct {
		leasesapi.UnimplementedLeasesServer
	}
	criImages struct {
		runtimeapi.UnimplementedImageServiceServer
		*fakeContainerd
	}
	ctImages struct {
		imagesapi.UnimplementedImagesServer
		*fakeContainerd
	}
	ctSnapshots struct {
		snapshotsapi.UnimplementedSnapshotsServer
		*fakeContainerd
	}
)

func (c *fakeContainerd) Server(context.Context, *emptypb.Empty) (*introspectionapi.ServerResponse, error) {
	info, err := os.Stat("/proc/self/ns/pid")
	if err != nil {
		return nil, err
	}
	return &introspectionapi.ServerResponse{UUID: c.uuid, Pid: uint64(c.pid), Pidns: inode(info)}, nil
}

func (leases) Create(context.Context, *leasesapi.CreateRequest) (*leasesapi.CreateResponse, error) {
	return &leasesapi.CreateResponse{}, nil
}

func (leases) Delete(context.Context, *leasesapi.DeleteRequest) (*emptypb.Empty, error) {
	return &emptypb.Empty{}, nil
}

func (c criImages) ListImages(context.Context, *runtimeapi.ListImagesRequest) (*runtimeapi.ListImagesResponse, error) {
	return &runtimeapi.ListImagesResponse{Images: []*runtimeapi.Image{{Id: "sha256:1", RepoTags: []string{"a:1"}, RepoDigests: []string{"a@sha256:2"}}}}, nil
}

func (c ctImages) List(context.Context, *imagesapi.ListImagesRequest) (*imagesapi.ListImagesResponse, error) {
	labels := map[string]string{"io.cri-containerd.image": "managed"}
	answer := &imagesapi.ListImagesResponse{}
	for _, name := range []string{"sha256:1", "a:1", "a@sha256:2", "lost:1"} {
		answer.Images = append(answer.Images, &imagesapi.Image{Name: name, Labels: labels})
	}
	return answer, nil
}

func (c ctImages) Update(_ context.Context, r *imagesapi.UpdateImageRequest) (*imagesapi.UpdateImageResponse, error) {
	c.announced <- r.GetImage().GetName()
	return &imagesapi.UpdateImageResponse{}, nil
}

func (c ctSnapshots) Prepare(context.Context, *snapshotsapi.PrepareSnapshotRequest) (*snapshotsapi.PrepareSnapshotResponse, error) {
	return &snapshotsapi.PrepareSnapshotResponse{}, c.noPoke
}

func (c ctSnapshots) Remove(_ context.Context, r *snapshotsapi.RemoveSnapshotRequest) (*emptypb.Empty, error) {
	c.pokes <- r.GetSnapshotter()
	return &emptypb.Empty{}, nil
}

func (c *fakeContainerd) start(t *testing.T, path string) {
	t.Helper()
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	c.server, c.ended = grpc.NewServer(), make(chan error, 1)
	introspectionapi.RegisterIntrospectionServer(c.server, c)
	leasesapi.RegisterLeasesServer(c.server, leases{})
	snapshotsapi.RegisterSnapshotsServer(c.server, ctSnapshots{fakeContainerd: c})
	imagesapi.RegisterImagesServer(c.server, ctImages{fakeContainerd: c})
	runtimeapi.RegisterImageServiceServer(c.server, criImages{fakeContainerd: c})
	go func() { c.ended <- c.server.Serve(l) }()
	t.Cleanup(func() { c.stop(t) })
}

func (c *fakeContainerd) stop(t *testing.T) {
	t.Helper()
	if c.server == nil {
		return
	}
	c.server.Stop()
	if err := <-c.ended; err != nil {
		t.Error(err)
	}
	c.server = nil
}

func inode(info fs.FileInfo) uint64 {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return st.Ino
	}
	return 0
}

func newContainerd(uuid string, pid int) *fakeContainerd {
	return &fakeContainerd{uuid: uuid, pid: pid, pokes: make(chan string, 10), announced: make(chan string, 10)}
}

// bench is a process that runs in this one, with its client.
type bench struct {
	cfg     config.Config
	backend *fakeBackend
	client  snapshotsapi.SnapshotsClient
	stop    func() error
	stopped time.Duration // how long the end took
}

func configFor(t *testing.T) config.Config {
	t.Helper()
	dir := t.TempDir()
	cfg := config.Default()
	cfg.Snapshotter.ImageRoot, cfg.Snapshotter.ContainerRoot = "/images", "/containers"
	cfg.Snapshotter.Endpoint = config.Endpoint(filepath.Join(dir, "s.sock"))
	cfg.Snapshotter.StatusEndpoint = config.Endpoint(filepath.Join(dir, "t.sock"))
	cfg.Runtime.Endpoint = config.Endpoint(filepath.Join(dir, "100%c.sock")) // not a URL
	return cfg
}

func startBench(t *testing.T, cfg config.Config) *bench {
	t.Helper()
	return startBenchOn(t, cfg, nil)
}

// startBenchOn starts it with sockets from a service manager.
func startBenchOn(t *testing.T, cfg config.Config, offered activation.Sockets) *bench {
	t.Helper()
	b := &bench{cfg: cfg, backend: &fakeBackend{hung: make(chan struct{}, 1), reopened: make(chan struct{})}}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- run(ctx, cfg, b.backend, offered, Options{Version: "test", Log: zaptest.NewLogger(t), grace: 200 * time.Millisecond})
	}()
	stopped := false
	b.stop = func() error {
		if stopped {
			return nil
		}
		stopped = true
		began := time.Now()
		cancel()
		err := <-ended
		b.stopped = time.Since(began)
		return err
	}
	t.Cleanup(func() {
		if err := b.stop(); err != nil {
			t.Error(err)
		}
	})
	eventually(t, "the process serves", func() bool {
		_, err := FetchStatus(ctx, cfg.Snapshotter.StatusEndpoint.Path())
		return err == nil
	})
	conn, err := grpc.NewClient("unix://"+cfg.Snapshotter.Endpoint.Path(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	})
	b.client = snapshotsapi.NewSnapshotsClient(conn)
	return b
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("waited in vain until %s", what)
		}
	}
}

func (b *bench) remove(t *testing.T) codes.Code {
	t.Helper()
	_, err := b.client.Remove(t.Context(), &snapshotsapi.RemoveSnapshotRequest{Key: "k"})
	return status.Code(err)
}

func (b *bench) status(t *testing.T) Status {
	t.Helper()
	s, err := FetchStatus(t.Context(), b.cfg.Snapshotter.StatusEndpoint.Path())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestCTD32_OnlyTheKnownContainerdDeletes goes through a node's day: no
// containerd yet, one that comes, restarts, and another one with a fresh root.
func TestCTD32_OnlyTheKnownContainerdDeletes(t *testing.T) {
	t.Parallel()
	cfg := configFor(t)
	b := startBench(t, cfg)
	prepares := func() {
		t.Helper()
		if _, err := b.client.Prepare(t.Context(), &snapshotsapi.PrepareSnapshotRequest{Key: "k"}); err != nil {
			t.Errorf("Prepare is refused: %v", err)
		}
	}
	prepares()
	if got := b.remove(t); got != codes.Unavailable {
		t.Errorf("Remove without containerd gives %v, want Unavailable", got)
	}
	if _, err := b.client.Cleanup(t.Context(), &snapshotsapi.CleanupRequest{}); status.Code(err) != codes.Unavailable {
		t.Errorf("Cleanup without containerd gives %v, want Unavailable", err)
	}

	first := newContainerd("first", os.Getpid())
	first.start(t, cfg.Runtime.Endpoint.Path())
	if got := <-first.pokes; got != "cleave" {
		t.Errorf("snapshotter %q is poked", got)
	}
	if got := <-first.announced; got != "lost:1" {
		t.Errorf("image %q is announced to CRI, want the one that it does not list", got)
	}
	if got := b.remove(t); got != codes.OK {
		t.Errorf("Remove by the known containerd gives %v", got)
	}
	if _, err := b.client.Cleanup(t.Context(), &snapshotsapi.CleanupRequest{}); err != nil {
		t.Errorf("Cleanup by the known containerd: %v", err)
	}
	eventually(t, "the poke is in the status", func() bool { return b.status(t).Containerd.PokedAt != nil })
	if s := b.status(t); s.Containerd.UUID != "first" || s.Containerd.PID != int32(os.Getpid()) || s.Calls.Refused != 2 {
		t.Errorf("status: %+v %+v", s.Containerd, s.Calls)
	}

	first.stop(t)
	eventually(t, "the loss is noticed", func() bool { return b.status(t).Containerd.PID == 0 })
	if got := b.remove(t); got != codes.Unavailable {
		t.Errorf("Remove after the loss gives %v, want Unavailable", got)
	}
	if s := b.status(t); !strings.Contains(s.Containerd.Reason, "gone away") {
		t.Errorf("reason %q", s.Containerd.Reason)
	}
	prepares()
	first.start(t, cfg.Runtime.Endpoint.Path())
	<-first.pokes
	if got := b.remove(t); got != codes.OK {
		t.Errorf("Remove after the restart gives %v", got)
	}

	// Its process is another one: that of this test may not delete.
	first.stop(t)
	eventually(t, "the loss is noticed", func() bool { return b.status(t).Containerd.PID == 0 })
	elsewhere := newContainerd("first", os.Getppid())
	elsewhere.start(t, cfg.Runtime.Endpoint.Path())
	<-elsewhere.pokes
	if got := b.remove(t); got != codes.PermissionDenied {
		t.Errorf("Remove by another process gives %v, want PermissionDenied", got)
	}
	elsewhere.stop(t)
	eventually(t, "the loss is noticed", func() bool { return b.status(t).Containerd.PID == 0 })

	// The backend refuses its UUID: nobody may delete, and it is not poked.
	b.backend.get(func() { b.backend.refuse = errors.New("not my containerd") })
	fresh := newContainerd("fresh", os.Getpid())
	fresh.start(t, cfg.Runtime.Endpoint.Path())
	eventually(t, "the refusal is in the status", func() bool {
		return strings.Contains(b.status(t).Containerd.Reason, "not my containerd")
	})
	if got := b.remove(t); got != codes.Unavailable {
		t.Errorf("Remove by a refused containerd gives %v, want Unavailable", got)
	}
	select {
	case <-fresh.pokes:
		t.Error("a refused containerd is poked")
	default:
	}
	b.backend.get(func() { b.backend.refuse = nil })
	<-fresh.pokes // it is asked again
	fresh.stop(t)
	eventually(t, "the loss is noticed", func() bool { return b.status(t).Containerd.PID == 0 })

	b.backend.get(func() {
		if diff := cmp.Diff([]string{"k", "cleanup", "k"}, b.backend.removed); diff != "" {
			t.Errorf("what reached the backend (-want +got):\n%s", diff)
		}
		confirmed := strings.Join(b.backend.confirmed, " ")
		if !strings.HasPrefix(confirmed, "first  first  first  fresh fresh") {
			t.Errorf("the backend was told %q", confirmed)
		}
	})
}

// A poke that fails is tried again until it succeeds.
func TestCTD64_PokeIsRepeated(t *testing.T) {
	t.Parallel()
	cfg := configFor(t)
	c := newContainerd("u", os.Getpid())
	c.noPoke = status.Error(codes.NotFound, "snapshotter not loaded: cleave")
	c.start(t, cfg.Runtime.Endpoint.Path())
	b := startBench(t, cfg)
	eventually(t, "the problem is in the status", func() bool {
		return strings.Contains(b.status(t).Containerd.PokeProblem, "not loaded")
	})
	if got := b.remove(t); got != codes.OK {
		t.Errorf("Remove waits for the poke: %v", got)
	}
	c.stop(t)
	c.noPoke = nil
	c.start(t, cfg.Runtime.Endpoint.Path())
	<-c.pokes
}

// What containerd wanted to remove while the fence was closed it has forgotten, so
// it is poked when the fence opens, though the connection never broke.
func TestCTD64_PokeWhenTheFenceOpens(t *testing.T) {
	t.Parallel()
	cfg := configFor(t)
	c := newContainerd("u", os.Getpid())
	c.start(t, cfg.Runtime.Endpoint.Path())
	b := startBench(t, cfg)
	<-c.pokes
	for range 3 {
		select {
		case b.backend.reopened <- struct{}{}:
		case <-time.After(20 * time.Second):
			t.Fatal("nobody looks whether the fence opens")
		}
		select {
		case <-c.pokes:
		case <-time.After(20 * time.Second):
			t.Fatal("containerd is not poked")
		}
	}
	if got := b.remove(t); got != codes.OK {
		t.Errorf("Remove after it: %v", got)
	}
}

func TestPanicIsAnError(t *testing.T) {
	t.Parallel()
	b := startBench(t, configFor(t))
	_, err := b.client.Stat(t.Context(), &snapshotsapi.StatSnapshotRequest{Key: "k"})
	if status.Code(err) != codes.Internal || !strings.Contains(err.Error(), "report this") {
		t.Errorf("got %v, want Internal", err)
	}
	stream, err := b.client.List(t.Context(), &snapshotsapi.ListSnapshotsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); status.Code(err) != codes.Internal {
		t.Errorf("got %v, want Internal", err)
	}
	if s := b.status(t); s.Calls.Panics != 2 {
		t.Errorf("%d panics are counted, want 2", s.Calls.Panics)
	}
}

func TestSocketsAreOursAlone(t *testing.T) {
	t.Parallel()
	cfg := configFor(t)
	b := startBench(t, cfg)
	for _, path := range []string{cfg.Snapshotter.Endpoint.Path(), cfg.Snapshotter.StatusEndpoint.Path()} {
		info, err := os.Stat(path)
		if err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v %v, want 0600", path, info.Mode(), err)
		}
	}
	second := &fakeBackend{}
	if err := run(t.Context(), cfg, second, nil, Options{Log: zaptest.NewLogger(t)}); !errors.Is(err, unixsock.ErrInUse) {
		t.Errorf("a second one on the same socket: %v, want ErrInUse", err)
	}
	if !second.closed {
		t.Error("the second one's store is not closed")
	}
	// Only the status socket is taken: the other must not stay behind.
	half := cfg
	half.Snapshotter.Endpoint += "2"
	if err := run(t.Context(), half, &fakeBackend{}, nil, Options{Log: zaptest.NewLogger(t)}); !errors.Is(err, unixsock.ErrInUse) {
		t.Errorf("a second one on the same status socket: %v, want ErrInUse", err)
	}
	if _, err := os.Stat(half.Snapshotter.Endpoint.Path()); !os.IsNotExist(err) {
		t.Errorf("its first socket stayed: %v", err)
	}
	b.status(t)
	if err := b.stop(); err != nil {
		t.Error(err)
	}
	for _, path := range []string{cfg.Snapshotter.Endpoint.Path(), cfg.Snapshotter.StatusEndpoint.Path()} {
		if _, err := os.Lstat(path); !os.IsNotExist(err) {
			t.Errorf("%s stayed: %v", path, err)
		}
	}
	if !b.backend.closed {
		t.Error("the store is not closed")
	}
}

// A call that hangs is broken off when its time is over.
func TestStopBreaksOffWhatHangs(t *testing.T) {
	t.Parallel()
	b := startBench(t, configFor(t))
	answer := make(chan error, 1)
	go func() {
		_, err := b.client.Usage(t.Context(), &snapshotsapi.UsageRequest{Key: "k"})
		answer <- err
	}()
	<-b.backend.hung
	if err := b.stop(); err != nil {
		t.Error(err)
	}
	if b.stopped < 200*time.Millisecond || b.stopped > 10*time.Second {
		t.Errorf("the end took %v, want the 200ms of grace", b.stopped)
	}
	if err := <-answer; err == nil {
		t.Error("the call that hung was answered")
	}
}

// TestOfferedSockets are used and left where they are; one that nobody wants is
// closed.
func TestOfferedSockets(t *testing.T) {
	t.Parallel()
	cfg := configFor(t)
	offered := activation.Sockets{}
	for _, path := range []string{cfg.Snapshotter.Endpoint.Path(), cfg.Snapshotter.Endpoint.Path() + ".other"} {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		l.SetUnlinkOnClose(false)
		offered[path] = l
	}
	other := offered[cfg.Snapshotter.Endpoint.Path()+".other"]
	b := startBenchOn(t, cfg, offered)
	if _, err := b.client.Prepare(t.Context(), &snapshotsapi.PrepareSnapshotRequest{Key: "k"}); err != nil {
		t.Error(err)
	}
	if err := b.stop(); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(cfg.Snapshotter.Endpoint.Path()); err != nil {
		t.Errorf("the service manager's socket was taken away: %v", err)
	}
	if _, err := os.Lstat(cfg.Snapshotter.StatusEndpoint.Path()); !os.IsNotExist(err) {
		t.Errorf("our own socket stayed: %v", err)
	}
	if err := other.Close(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("a socket that nobody wants is not closed: %v", err)
	}
}

// TestServiceManagerIsTold is not parallel: the socket's name is in the
// environment.
func TestServiceManagerIsTold(t *testing.T) {
	path := filepath.Join(t.TempDir(), "notify")
	manager, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer manager.Close() //nolint:errcheck // the test is over
	t.Setenv("NOTIFY_SOCKET", path)
	b := startBench(t, configFor(t))
	if err := b.stop(); err != nil {
		t.Error(err)
	}
	for _, want := range []string{"READY=1", "STOPPING=1"} {
		message := make([]byte, 4096)
		if err := manager.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
			t.Fatal(err)
		}
		n, err := manager.Read(message)
		if first, _, _ := strings.Cut(string(message[:n]), "\n"); err != nil || first != want {
			t.Errorf("the service manager is told %q (%v), want first %q", message[:n], err, want)
		}
	}
}

func TestStatusSocket(t *testing.T) {
	t.Parallel()
	cfg := configFor(t)
	path := cfg.Snapshotter.StatusEndpoint.Path()
	if _, err := FetchStatus(t.Context(), path); !errors.Is(err, ErrNotRunning) {
		t.Errorf("got %v, want ErrNotRunning", err)
	}
	b := startBench(t, cfg)
	s := b.status(t)
	if s.Store.Identity != "id" || s.Problem != "a figure is missing" || s.PID != os.Getpid() || s.Version != "test" {
		t.Errorf("status: %+v", s)
	}
	var text strings.Builder
	if err := s.WriteText(&text, time.Now()); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"may not delete: ", "problem:     a figure is missing", "note:        a note", "image root"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("%q is not in the status:\n%s", want, text.String())
		}
	}
	if err := ConfirmCleanup(t.Context(), path); err == nil || strings.Contains(err.Error(), "409") || !strings.HasSuffix(err.Error(), ": no clean-up waits") {
		t.Errorf("confirm without an alarm: %v", err)
	}
	b.backend.get(func() { b.backend.alarm = true })
	if err := ConfirmCleanup(t.Context(), path); err != nil {
		t.Error(err)
	}
}

func TestPokeNamespace(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name   string
		served []string
		want   string
	}{
		{"all", nil, "k8s.io"},
		{"the kubelet's among others", []string{"a", "k8s.io"}, "k8s.io"},
		{"others only", []string{"a", "b"}, "a"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			cfg := config.Default()
			cfg.Snapshotter.Namespaces = tc.served
			if got := pokeNamespace(cfg); got != tc.want {
				t.Errorf("got %q, want %q", got, tc.want)
			}
		})
	}
}

func TestOptions(t *testing.T) {
	t.Parallel()
	cfg := config.Default()
	if _, err := StoreOptions(cfg, zaptest.NewLogger(t)); !errors.Is(err, ErrNotConfigured) {
		t.Errorf("got %v, want ErrNotConfigured", err)
	}
	if _, err := ContainerdOptions(cfg, "/x", 0); !errors.Is(err, ErrNotConfigured) {
		t.Errorf("got %v, want ErrNotConfigured", err)
	}
	cfg.Snapshotter.ImageRoot, cfg.Snapshotter.ContainerRoot, cfg.Snapshotter.DeletionsPerSecond = "/a//b/", "/c", 0
	o, err := StoreOptions(cfg, zaptest.NewLogger(t))
	if err != nil {
		t.Fatal(err)
	}
	if o.ImageRoot != "/a/b" || o.DeletionRate >= 0 || o.CleanupMaxShare != 0.1 {
		t.Errorf("options: %+v", o)
	}
}

// TestLimitsAndUsageBySocket: what the agent asks for on the status socket. That a layer can't be limited is an answer; that
// it could not be tried is an error.
func TestLimitsAndUsageBySocket(t *testing.T) {
	t.Parallel()
	b := startBench(t, configFor(t))
	socket := b.cfg.Snapshotter.StatusEndpoint.Path()
	usage, err := FetchUsage(t.Context(), socket)
	if err != nil || len(usage) != 1 || usage[0].Figure == nil || usage[0].Figure.Bytes != 4096 || usage[0].Figure.How != "walk" {
		t.Errorf("usage %+v, %v", usage, err)
	}
	limits, err := FetchLimits(t.Context(), socket)
	if err != nil || len(limits) != 1 || limits[0].LimitBytes != 1<<20 {
		t.Errorf("limits %+v, %v", limits, err)
	}
	for _, tc := range []struct {
		snapshot string
		want     LimitAnswer
		fault    string
	}{
		{snapshot: "c", want: LimitAnswer{Limit: &split.LayerLimit{Namespace: "k8s.io", Name: "c", Project: 7, LimitBytes: 5 << 20}}},
		{snapshot: "old", want: LimitAnswer{Refused: "it was made before: failed precondition"}},
		{snapshot: "nobody", want: LimitAnswer{Unknown: true}},
		{snapshot: "broken", fault: "input/output error"},
	} {
		t.Run(tc.snapshot, func(t *testing.T) {
			got, err := SetLimit(t.Context(), socket, LimitRequest{Namespace: "k8s.io", Snapshot: tc.snapshot, Bytes: 5 << 20})
			if diff := cmp.Diff(tc.want, got); diff != "" || (err != nil) != (tc.fault != "") {
				t.Errorf("got %+v, %v", got, err)
			}
			if err != nil && !strings.HasSuffix(err.Error(), tc.fault) {
				t.Errorf("the error is %v", err)
			}
		})
	}
	for name, sent := range map[string]any{
		"an unknown field": map[string]any{"snapshot": "c", "byte": 5},
		"a fraction":       map[string]any{"snapshot": "c", "bytes": 0.5},
		"a negative one":   map[string]any{"snapshot": "c", "bytes": -1},
		"no object":        []string{"c"},
		"too much":         map[string]any{"snapshot": strings.Repeat("c", 100_000)},
	} {
		if err := control.Send(t.Context(), socket, http.MethodPost, pathLimit, sent, nil); err == nil || !strings.Contains(err.Error(), "read what is sent along") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
