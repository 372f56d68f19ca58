package agent

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"runtime/debug"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"

	"github.com/cleave-cri/cleave/agent/handover"
	"github.com/cleave-cri/cleave/agent/limits"
	"github.com/cleave-cri/cleave/agent/settle"
	imagestore "github.com/cleave-cri/cleave/agent/store"
	"github.com/cleave-cri/cleave/agent/upstream"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/doctor"
	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/fsstats/index"
	"github.com/cleave-cri/cleave/proxy"
	"github.com/cleave-cri/cleave/proxy/criocompat"
	"github.com/cleave-cri/cleave/proxy/diskstats"
	"github.com/cleave-cri/cleave/proxy/unixsock"
	"github.com/cleave-cri/cleave/snapshot"
	"github.com/cleave-cri/cleave/systemd/activation"
	"github.com/cleave-cri/cleave/systemd/notify"
	"github.com/cleave-cri/cleave/web"
)

const (
	// stopGrace is how long calls in flight have when cleave is told to stop.
	stopGrace = 10 * time.Second
	// handoverGrace is how long they have when a new process has taken over:
	// pulling a large image or stopping a container takes minutes.
	handoverGrace = 15 * time.Minute
	// observerGrace is how long the end waits for a measurement to notice it.
	observerGrace = 2 * time.Second
)

// The names under which a process passes its files to its successor.
const (
	fileListen  = "listen"
	fileControl = "control"
	fileLock    = "lock"
)

// Options are what a serving process is told besides its configuration.
type Options struct {
	// Version is cleave's own, for people.
	Version string
	// Passthrough serves the proxy alone: no interceptors, no measuring, no
	// control socket, no state folder.
	Passthrough bool
	// Handover asks, with each value, for a new process of this program to
	// take over the sockets. The channel is not closed.
	Handover <-chan os.Signal
	// Executable and Args start the new process.
	Executable string
	Args       []string
	// Log takes the messages.
	Log *zap.Logger
}

// agent is the one struct that holds the parts of a serving process.
type agent struct {
	cfg       config.Config
	opt       Options
	log       *zap.Logger
	startedAt time.Time

	// listening says that cleave's socket is there and still this process's.
	listening atomic.Bool

	// manager is the service manager, offered the sockets that it listens on.
	manager *notify.Notifier
	offered activation.Sockets
	// wishes are asked for by `cleave handover`.
	wishes chan wish

	lock     *os.File
	listen   *socket
	control  *socket
	left     []*socket // of the predecessor, not served on
	upstream *grpc.ClientConn
	proxy    *proxy.Server
	observer *observer
	watcher  *fsstats.Watcher
	crio     *crioMode // nil in other modes
	metrics  http.Handler
	limits   *limits.Keeper  // nil where none are kept
	settler  *settle.Settler // nil in mode observe
	// decisions reclaims and evicts; nil where that is not configured.
	decisions *decisions
	images    *imageBook // nil in a pass-through
}

// Serve runs cleave until ctx ends or a successor has taken over, and returns
// when the calls that it had are answered. The error says why it could not start
// or go on.
func Serve(ctx context.Context, cfg config.Config, opt Options) error {
	if os.Geteuid() != 0 {
		return errors.New("serve: cleave needs root to read containers' files and to reach the runtime's socket: run it as root")
	}
	inherited, err := handover.Inherit()
	if err != nil {
		return err
	}
	if cfg.Memory.LimitBytes > 0 {
		debug.SetMemoryLimit(cfg.Memory.LimitBytes)
	}
	offered, err := activation.Offered()
	if err != nil {
		return err
	}
	a := &agent{cfg: cfg, opt: opt, log: opt.Log, startedAt: time.Now(), offered: offered, wishes: make(chan wish)}
	a.manager = notify.New(func(err error) { a.log.Warn("the service manager does not listen", zap.Error(err)) })
	if a.metrics, err = web.Metrics(a.values); err != nil {
		return err
	}
	if err := a.open(ctx, inherited); err != nil {
		return errors.Join(err, a.giveUp(), a.close())
	}
	return errors.Join(a.serve(ctx, inherited), a.close())
}

// open makes all parts, without serving anybody yet.
func (a *agent) open(ctx context.Context, inherited *handover.Inheritance) error {
	var err error
	if !a.opt.Passthrough {
		if a.upstream, err = upstream.Connect(a.cfg.Runtime.Endpoint.Path(), a.dialRuntime); err != nil {
			return err
		}
		if err := a.openState(inherited); err != nil {
			return err
		}
	}
	wanted, err := a.proxyConfig()
	if err != nil {
		return err
	}
	a.proxy, err = proxy.New(wanted)
	if err != nil {
		return err
	}
	if !a.opt.Passthrough {
		if a.control, err = a.takeOrListen(inherited, fileControl, a.cfg.Control.Endpoint.Path(), unixsock.RootOnly); err != nil {
			return err
		}
	}
	access, err := unixsock.AccessOf(a.cfg.Runtime.Endpoint.Path())
	if err != nil {
		// It may come later; until then only root gets in.
		a.log.Warn("the runtime's socket is not there yet", zap.Error(err))
		access = unixsock.RootOnly
	}
	if a.listen, err = a.takeOrListen(inherited, fileListen, a.cfg.Listen.Endpoint.Path(), access); err != nil {
		return err
	}
	if err := a.notOurs(); err != nil {
		return err
	}
	if a.crio != nil {
		// A kubelet would get no figures, for the rest of its life.
		if r := criocompat.CheckReached(a.listen.path).Run(ctx); r.Level == doctor.Fail {
			return fmt.Errorf("serve in mode crio: %s: %s", r.Reason, r.Remedy)
		}
	}
	a.listening.Store(true)
	return nil
}

// openState locks the state folder.
func (a *agent) openState(inherited *handover.Inheritance) error {
	lock, _ := inherited.Take(fileLock)
	if lock != nil && isLockOf(lock, a.cfg.StateDir) {
		a.lock = lock // the note of the owner follows when it is this process
		return nil
	}
	var closeErr error
	if lock != nil {
		closeErr = lock.Close() // of a folder that is no longer configured
	}
	var err error
	a.lock, err = lockState(a.cfg.StateDir)
	return errors.Join(err, closeErr)
}

// proxyConfig makes the observer, and in mode crio what that has besides, and returns how the proxy shall be.
func (a *agent) proxyConfig() (proxy.Config, error) {
	c := proxy.Config{
		Upstream:     a.cfg.Runtime.Endpoint.Path(),
		Interceptors: map[string]proxy.AnswerFunc{},
		Dial:         a.dialRuntime,
		Log:          a.log.Named("proxy"),
	}
	if a.opt.Passthrough {
		return c, nil
	}
	var err error
	if a.watcher, err = fsstats.NewWatcher(); err != nil {
		return c, err
	}
	a.observer, err = newObserver(a.cfg, observed{
		store:       snapshot.NewStore(a.upstream, a.cfg.Runtime.Namespace),
		filesystems: a.watcher.Prober(),
		layouts:     a.watcher,
		mountpoints: mountpoints(a.upstream),
		workloads:   askWorkloads(a.upstream),
		pid:         askPID(a.upstream, a.cfg.Runtime.Namespace),
		usages:      splitUsages(a.cfg),
		measure:     index.Walk,
		stateFile:   filepath.Join(a.cfg.StateDir, indexFile),
	}, a.log.Named("observer"))
	if err != nil {
		return c, err
	}
	a.observer.prime()
	a.images = newImageBook(imagestore.NewMeasurer(a.upstream).Images, a.log.Named("images"))
	if err := a.openDecisions(&c); err != nil {
		return c, err
	}
	var facts diskstats.Source = a.observer
	switch a.cfg.Mode {
	case config.ModeObserve:
		return c, nil
	case config.ModeCRIO:
		if reason := threeDisks(a.observer.newest.Load().layout); reason != "" {
			return c, fmt.Errorf("serve in mode crio: %s: %s", reason, threeDisksRemedy)
		}
		if a.crio, err = a.openCRIO(); err != nil {
			return c, err
		}
		facts = told{observer: a.observer, keeper: a.crio.keeper}
	case config.ModeCRI:
	}
	for method, fn := range diskstats.Rewrites(facts) {
		c.Interceptors[method] = fn
	}
	if a.crio != nil {
		a.crio.configure(&c)
	}
	a.openLimits(&c)
	a.openSettler(&c)
	return c, nil
}

// serve answers calls until it is time to end, and then drains.
func (a *agent) serve(ctx context.Context, inherited *handover.Inheritance) error {
	// The parts end when this function does, not when ctx does: calls in
	// flight are still answered after that.
	work, endWork := context.WithCancel(context.WithoutCancel(ctx))
	defer endWork()
	parts, work := errgroup.WithContext(work)
	parts.Go(func() error { return a.proxy.Serve(a.listen.UnixListener) })
	observed := make(chan struct{})
	if a.observer != nil {
		go func() { defer close(observed); a.observer.run(work) }()
	} else {
		close(observed)
	}
	if a.crio != nil {
		parts.Go(func() error { return a.crio.run(work) })
	}
	if a.limits != nil {
		parts.Go(func() error { a.limits.Run(work); return nil })
	}
	if a.settler != nil {
		parts.Go(func() error { a.settler.Run(work); return nil })
	}
	if a.decisions != nil {
		parts.Go(func() error { return a.decisions.run(work) })
	}
	if a.images != nil {
		parts.Go(func() error { a.images.run(work); return nil })
	}
	if a.observer != nil && a.cfg.Metrics.Address != "" {
		parts.Go(func() error { return serveMetrics(work, a.cfg.Metrics.Address, a.values, a.log) })
	}
	if a.control != nil {
		server := controlServer(answers{status: a.status, usage: a.observer.usage, handOver: a.wishHandover, metrics: a.metrics, largest: newLargest(a.observer).find, decisions: a.decisions})
		parts.Go(func() error { serveControl(server, a.control, a.log); return nil })
		parts.Go(func() error { endControl(work, server); return nil })
	}
	if err := inherited.Done(); err != nil {
		// The old process has died meanwhile; then this one is all there is.
		a.log.Warn("the old process was not told that this one serves", zap.Error(err))
	}
	a.removeLeft()
	if a.lock != nil {
		writeOwner(a.lock)
	}
	a.refuseOffered()
	supervised, err := a.supervise(inherited.Inherited())
	if err != nil {
		a.log.Warn("the service manager is not told how it goes", zap.Error(err))
	}
	if supervised != nil {
		parts.Go(func() error { supervised.run(work); return supervised.close() })
	}
	a.log.Info("serving", zap.Stringer("listen", a.cfg.Listen.Endpoint), zap.Stringer("runtime", a.cfg.Runtime.Endpoint),
		zap.String("mode", a.mode()), zap.Int("pid", os.Getpid()), zap.String("version", a.opt.Version))

	grace, successor := a.waitForEnd(ctx, work)
	a.listening.Store(false)
	var removed error
	orphaned, orphan := context.WithCancelCause(ctx)
	defer orphan(nil)
	if successor != nil {
		a.follow(successor, orphan)
	} else {
		a.manager.Stopping(fmt.Sprintf("Calls in flight have %s", stopGrace))
		// While they are listened on, nobody else's socket can have their
		// inode numbers.
		removed = removeFiles(a.sockets())
	}
	endWork()
	drain, cancel := drainContext(orphaned, grace)
	defer cancel()
	if err := a.proxy.Drain(drain); err != nil {
		a.log.Warn("calls were broken off", zap.Error(err))
	}
	err = parts.Wait()
	if ctx.Err() == nil && orphaned.Err() != nil {
		err = errors.Join(err, context.Cause(orphaned))
	}
	if a.crio != nil {
		err = errors.Join(err, a.crio.close(drain))
	}
	// A measurement that hangs in the kernel can't be ended but by the end of
	// the process, and must not hold that up.
	hung := time.NewTimer(observerGrace)
	defer hung.Stop()
	select {
	case <-observed:
	case <-hung.C:
		a.watcher = nil // it may still be used
		a.log.Warn("a measurement hangs and is left behind; look for a file system that does not answer")
	}
	return errors.Join(err, removed)
}

// waitForEnd returns when ctx or one of the parts ends, or when a successor
// has taken over, which is returned. It says how long calls in flight may go on.
func (a *agent) waitForEnd(ctx, work context.Context) (grace time.Duration, _ *handover.Successor) {
	for {
		tell := func(outcome) {}
		select {
		case <-ctx.Done():
			a.log.Info("stopping", zap.Duration("grace", stopGrace))
			return stopGrace, nil
		case <-work.Done():
			return stopGrace, nil
		case told := <-a.wishes:
			tell = func(o outcome) { told <- o }
		case <-a.opt.Handover:
		}
		if err := ctx.Err(); err != nil {
			tell(outcome{err: err})
			continue // told to stop at the same time: that goes first
		}
		successor, err := a.succeed(ctx)
		if err != nil {
			tell(outcome{err: err})
			continue
		}
		tell(outcome{pid: successor.PID})
		a.giveUpLock()
		return handoverGrace, successor
	}
}

// giveUpLock closes this process's descriptor of the lock. The lock is the
// successor's from then on and goes with it: should it die while this process
// still drains, a new cleave can be started.
func (a *agent) giveUpLock() {
	if a.lock == nil {
		return
	}
	if err := a.lock.Close(); err != nil {
		a.log.Warn("the lock of the state folder is not given up", zap.Error(err))
	}
	a.lock = nil
}

// handOver starts a successor on the same sockets.
func (a *agent) handOver(ctx context.Context) (*handover.Successor, error) {
	var files []handover.File
	defer func() {
		for _, f := range files {
			if f.Name != fileLock {
				_ = f.File.Close() //nolint:errcheck // the successor has its own
			}
		}
	}()
	for name, s := range map[string]*socket{fileListen: a.listen, fileControl: a.control} {
		if s == nil {
			continue
		}
		f, err := handover.Duplicate(name, s)
		if err != nil {
			return nil, err
		}
		f.Note = s.note()
		files = append(files, f)
	}
	if a.lock != nil {
		files = append(files, handover.File{Name: fileLock, File: a.lock})
	}
	return handover.Start(ctx, a.opt.Executable, a.opt.Args, files)
}

// drainContext ends after grace, or stopGrace after ctx has ended if that is
// earlier.
func drainContext(ctx context.Context, grace time.Duration) (context.Context, context.CancelFunc) {
	drain, cancel := context.WithTimeout(context.WithoutCancel(ctx), grace)
	stop := context.AfterFunc(ctx, func() {
		timer := time.AfterFunc(stopGrace, cancel)
		context.AfterFunc(drain, func() { timer.Stop() })
	})
	return drain, func() { stop(); cancel() }
}

func (a *agent) close() error {
	errs := []error{a.offered.Close()}
	if a.watcher != nil {
		errs = append(errs, a.watcher.Close())
	}
	if a.upstream != nil {
		errs = append(errs, a.upstream.Close())
	}
	if a.lock != nil {
		errs = append(errs, a.lock.Close())
	}
	return errors.Join(errs...)
}

func (a *agent) mode() string {
	if a.opt.Passthrough {
		return "passthrough"
	}
	return string(a.cfg.Mode)
}

// status answers the control socket.
func (a *agent) status(ctx context.Context) Status {
	p := a.observer.newest.Load()
	s := Status{
		Version:     a.opt.Version,
		Mode:        a.mode(),
		PID:         os.Getpid(),
		StartedAt:   a.startedAt,
		Listen:      a.cfg.Listen.Endpoint.String(),
		Runtime:     runtimeStatus(ctx, a.upstream, a.cfg.Runtime.Endpoint.String()),
		Layout:      p.layout.Kind(),
		Roles:       p.layout.Places,
		Stuck:       stuckRoles(p),
		Filesystems: filesystemsOf(p),
		Pods:        p.pods,
		Problem:     p.problem,
		Proxy:       a.proxy.Counters(),
		Memory:      memoryStatus(),
	}
	if a.cfg.Snapshotter.Enabled() {
		s.Snapshotter = snapshotterStatus(ctx, a.cfg.Snapshotter.StatusEndpoint)
		s.withoutRootsAway()
	}
	if a.crio != nil {
		s.CRIO = a.crio.status(a.observer.disks(), a.observer.newest.Load())
	}
	if a.decisions != nil {
		s.Reclaim = a.decisions.status()
	}
	if a.limits != nil {
		kept := a.limits.Status()
		s.Limits = &kept
	}
	if !p.measuredAt.IsZero() {
		s.MeasuredAt = &p.measuredAt
		s.MeasureSeconds = p.cost.Seconds()
	}
	if !p.since.IsZero() {
		s.FiguresSince = &p.since
	}
	return s
}
