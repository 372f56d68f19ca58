package snapshotter

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"slices"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/agent/control"
	"github.com/cleave-cri/cleave/agent/upstream"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/snapshot"
	"github.com/cleave-cri/cleave/snapshot/split"
	"github.com/cleave-cri/cleave/snapshot/split/ctdconfig"
	"github.com/cleave-cri/cleave/systemd/activation"
	"github.com/cleave-cri/cleave/systemd/notify"
)

// stopGrace is how long calls in flight have at the end. All are short, and new
// pods wait for the next start.
const stopGrace = 5 * time.Second

// Options are what the process is told besides its configuration.
type Options struct {
	// Version is cleave's own, for people.
	Version string
	// Log takes the messages.
	Log *zap.Logger

	// grace is how long calls in flight have at the end; 0 means stopGrace.
	grace time.Duration
}

// Backend is what is served: [split.Snapshotter], or a fake in tests.
type Backend interface {
	// Register makes it one of a server's services.
	Register(server grpc.ServiceRegistrar)
	// ConfirmContainerd is told which containerd is there; until it has agreed,
	// nothing is deleted. LoseContainerd takes that back.
	ConfirmContainerd(ctx context.Context, uuid string) error
	LoseContainerd()
	// ConfirmCleanup does the clean-up that an alarm holds up.
	ConfirmCleanup(ctx context.Context) error
	// Reopened gives a value after the fence has opened.
	Reopened() <-chan struct{}
	// Usages tells what each snapshot takes.
	Usages(ctx context.Context) ([]split.SnapshotUsage, error)
	// SetLimit limits a writable layer, Limits tells all limits.
	SetLimit(ctx context.Context, namespace, name string, bytes uint64) (split.LayerLimit, error)
	Limits(ctx context.Context) ([]split.LayerLimit, error)
	// Status is for the status socket.
	Status(ctx context.Context) (split.Status, error)
	Close() error
}

var _ Backend = (*split.Snapshotter)(nil)

// process is the one struct that holds the parts.
type process struct {
	cfg       config.Config
	opt       Options
	backend   Backend
	watch     *watcher
	startedAt time.Time

	counts struct {
		panics, refused atomic.Int64
	}
	lastRefusal atomic.Pointer[string]
}

// Serve opens the snapshotter's store and serves it to containerd until ctx
// ends. The error says why it could not start or go on.
func Serve(ctx context.Context, cfg config.Config, opt Options) error {
	o, err := StoreOptions(cfg, opt.Log)
	if err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return errors.New("serve the snapshotter: it needs root to make and remove layers: run it as root")
	}
	if cfg.Memory.LimitBytes > 0 {
		debug.SetMemoryLimit(cfg.Memory.LimitBytes)
	}
	backend, err := split.Open(ctx, o)
	if err != nil {
		return err
	}
	offered, err := activation.Offered()
	if err != nil {
		return errors.Join(err, backend.Close())
	}
	return run(ctx, cfg, backend, offered, opt)
}

// run serves a backend, and closes it and the offered activation.Sockets at the end.
func run(ctx context.Context, cfg config.Config, backend Backend, offered activation.Sockets, opt Options) (err error) {
	defer func() { err = errors.Join(err, offered.Close(), backend.Close()) }()
	conn, err := upstream.Connect(cfg.Runtime.Endpoint.Path(), upstream.Plain(cfg.Runtime.Endpoint.Path()))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	store := snapshot.NewStore(conn, pokeNamespace(cfg))
	p := &process{
		cfg: cfg, opt: opt, backend: backend, startedAt: time.Now(),
		watch: &watcher{
			conn:     conn,
			identify: store.Identity,
			confirm:  backend.ConfirmContainerd,
			lose:     backend.LoseContainerd,
			poke:     func(ctx context.Context) error { return store.Poke(ctx, ctdconfig.Snapshotter) },
			announce: func(ctx context.Context) (int, error) { return announceImages(ctx, conn, cfg.Runtime.Namespace) },
			reopened: backend.Reopened(),
			log:      opt.Log,
		},
	}
	// The backend's lock keeps a second process from getting here.
	listen, err := takeOrListen(offered, cfg.Snapshotter.Endpoint.Path())
	if err != nil {
		return err
	}
	status, err := takeOrListen(offered, cfg.Snapshotter.StatusEndpoint.Path())
	if err != nil {
		return errors.Join(err, listen.remove(), listen.Close())
	}
	return p.serve(ctx, listen, status)
}

// announceImages makes CRI take in those of its images that it does not list.
func announceImages(ctx context.Context, conn *grpc.ClientConn, namespace string) (int, error) {
	answer, err := runtimeapi.NewImageServiceClient(conn).ListImages(ctx, &runtimeapi.ListImagesRequest{})
	if err != nil {
		return 0, fmt.Errorf("list CRI's images: %w", err)
	}
	known := map[string]bool{}
	for _, image := range answer.GetImages() {
		known[image.GetId()] = true
		for _, name := range append(image.GetRepoTags(), image.GetRepoDigests()...) {
			known[name] = true
		}
	}
	return snapshot.NewStore(conn, namespace).AnnounceImages(ctx, func(name string) bool { return known[name] })
}

// pokeNamespace is a namespace in which the snapshotter takes a snapshot.
func pokeNamespace(cfg config.Config) string {
	served := cfg.Snapshotter.Namespaces
	if len(served) == 0 || slices.Contains(served, cfg.Runtime.Namespace) {
		return cfg.Runtime.Namespace
	}
	return served[0]
}

func (p *process) serve(ctx context.Context, listen, status socket) error {
	server := grpc.NewServer(
		grpc.Creds(askCaller{}),
		grpc.UnaryInterceptor(p.guardUnary),
		grpc.StreamInterceptor(p.guardStream),
	)
	p.backend.Register(server)
	answers := p.controlServer()
	// The parts end when this function does, not when ctx does: calls in flight
	// are still answered after that.
	work, endWork := context.WithCancel(context.WithoutCancel(ctx))
	defer endWork()
	parts, work := errgroup.WithContext(work)
	parts.Go(func() error { return server.Serve(listen) })
	parts.Go(func() error { return control.Serve(answers, status) })
	parts.Go(func() error { p.watch.run(work); return nil })
	manager := notify.New(func(err error) { p.opt.Log.Warn("the service manager does not listen", zap.Error(err)) })
	manager.Ready("Serving snapshots to containerd on " + p.cfg.Snapshotter.Endpoint.Path())
	p.opt.Log.Info("serving snapshots", zap.Stringer("listen", p.cfg.Snapshotter.Endpoint), zap.Stringer("runtime", p.cfg.Runtime.Endpoint),
		zap.String("image_root", p.cfg.Snapshotter.ImageRoot), zap.String("container_root", p.cfg.Snapshotter.ContainerRoot),
		zap.Int("pid", os.Getpid()), zap.String("version", p.opt.Version))

	select {
	case <-ctx.Done():
	case <-work.Done():
	}
	grace := cmp.Or(p.opt.grace, stopGrace)
	p.opt.Log.Info("stopping", zap.Duration("grace", grace))
	manager.Stopping("Answering the last calls; pods run on, new ones wait for the next start")
	// While they are listened on, nobody else's socket can have their inode numbers.
	removed := errors.Join(listen.remove(), status.remove())
	endWork()
	hard := time.AfterFunc(grace, server.Stop)
	server.GracefulStop()
	hard.Stop()
	return errors.Join(answers.Close(), parts.Wait(), removed)
}
