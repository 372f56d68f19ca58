package agent

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/agent/handover"
	"github.com/cleave-cri/cleave/agent/upstream"
	"github.com/cleave-cri/cleave/systemd/notify"
)

const (
	// lookPeriod is how often calls are looked at when no watchdog says more.
	lookPeriod = 10 * time.Second
	// looksPerWatchdog is how many looks fit into the watchdog's time: one that
	// fails by chance costs nothing.
	looksPerWatchdog = 3
	// firstLookPause is the pause between looks until calls are answered.
	firstLookPause = 100 * time.Millisecond
)

// asker makes one small call and returns when it is answered, whatever the
// answer, or with ctx's error.
type asker func(ctx context.Context) error

// askVersion calls Version on a connection. It waits for a connection: that
// there is none is no answer.
func askVersion(conn grpc.ClientConnInterface) asker {
	return func(ctx context.Context) error {
		_, err := runtimeapi.NewRuntimeServiceClient(conn).Version(ctx, &runtimeapi.VersionRequest{}, grpc.WaitForReady(true))
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return err
	}
}

// pulse tells whether calls are answered.
type pulse struct {
	// through calls by way of cleave's own socket, direct calls the runtime.
	through, direct asker
	// limit bounds each of the two.
	limit time.Duration
}

// beat is what a pulse found. cleave is to blame if a call through it gets no
// answer while the runtime gives one; that the runtime is not there or hangs is
// no reason to start cleave anew.
type beat struct {
	// answered says that cleave is not to blame for anything.
	answered bool
	// runtime says what is wrong with the runtime, nil if nothing is.
	runtime error
}

func (p pulse) look(ctx context.Context) beat {
	err := p.ask(ctx, p.through)
	if err == nil || !errors.Is(err, context.DeadlineExceeded) {
		return beat{answered: true, runtime: err}
	}
	if err := p.ask(ctx, p.direct); err != nil {
		return beat{answered: true, runtime: err}
	}
	return beat{}
}

func (p pulse) ask(ctx context.Context, ask asker) error {
	ctx, cancel := context.WithTimeout(ctx, p.limit)
	defer cancel()
	return ask(ctx)
}

// supervision is what the service manager is told while cleave serves.
type supervision struct {
	manager *notify.Notifier
	pulse   pulse
	period  time.Duration
	// well is the status while all is well.
	well string
	log  *zap.Logger
	// conns are the pulse's.
	conns []*grpc.ClientConn
}

// supervise prepares telling the service manager how it goes; nil if there is
// none.
func (a *agent) supervise(successor bool) (*supervision, error) {
	if !notify.Managed() {
		return nil, nil
	}
	watchdog, err := notify.WatchdogPeriod(successor)
	if err != nil {
		return nil, err
	}
	s := &supervision{
		manager: a.manager,
		period:  lookPeriod,
		well:    fmt.Sprintf("Serving the kubelet on %s, mode %s", a.cfg.Listen.Endpoint.Path(), a.mode()),
		log:     a.log.Named("supervision"),
	}
	if watchdog > 0 {
		s.period = watchdog / looksPerWatchdog
	}
	s.pulse.limit = s.period / 2
	for to, dial := range map[*asker]upstream.DialFunc{
		&s.pulse.through: upstream.Plain(a.listen.path),
		&s.pulse.direct:  upstream.Plain(a.cfg.Runtime.Endpoint.Path()),
	} {
		conn, err := upstream.Connect(a.cfg.Runtime.Endpoint.Path(), dial)
		if err != nil {
			return nil, errors.Join(err, s.close())
		}
		s.conns = append(s.conns, conn)
		*to = askVersion(conn)
	}
	return s, nil
}

func (s *supervision) close() error {
	var errs []error
	for _, c := range s.conns {
		errs = append(errs, c.Close())
	}
	return errors.Join(errs...)
}

// run says READY when the first call is answered, and then, until ctx ends, that
// cleave is alive as long as calls are, and how it goes.
func (s *supervision) run(ctx context.Context) {
	b := s.first(ctx)
	if ctx.Err() != nil {
		return
	}
	s.manager.Ready(s.status(b))
	tick := time.NewTicker(s.period)
	defer tick.Stop()
	for {
		if b.answered {
			s.manager.Alive()
		} else {
			s.log.Error("a call got no answer from cleave, while the runtime answers; the watchdog ends cleave if that goes on")
		}
		s.manager.Status(s.status(b))
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if b = s.pulse.look(ctx); ctx.Err() != nil {
			return
		}
	}
}

// first looks until a call is answered.
func (s *supervision) first(ctx context.Context) beat {
	pause := time.NewTimer(0)
	defer pause.Stop()
	for {
		select {
		case <-ctx.Done():
			return beat{}
		case <-pause.C:
		}
		b := s.pulse.look(ctx)
		if b.answered {
			return b
		}
		s.manager.Status("Starting: no call is answered yet")
		pause.Reset(firstLookPause)
	}
}

func (s *supervision) status(b beat) string {
	switch {
	case !b.answered:
		return "Calls get no answer, while the runtime itself answers"
	case b.runtime != nil:
		return s.well + "; the container runtime does not answer: " + b.runtime.Error()
	}
	return s.well
}

// A wish for a successor, and where its outcome is told.
type wish chan<- outcome

type outcome struct {
	pid int
	err error
}

// Handover is the answer to a wish for a successor.
type Handover struct {
	// PID is the new process.
	PID int `json:"pid"`
}

// wishHandover asks the process to hand over, and returns when it has, or why
// it goes on.
func (a *agent) wishHandover(ctx context.Context) (any, error) {
	told := make(chan outcome, 1)
	select {
	case a.wishes <- told:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	select {
	case o := <-told:
		return Handover{PID: o.pid}, o.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// succeed starts a successor and says so to the service manager.
func (a *agent) succeed(ctx context.Context) (*handover.Successor, error) {
	a.manager.Reloading("A new process takes over")
	successor, err := a.handOver(ctx)
	if err != nil {
		a.log.Error("no new process took over, this one goes on", zap.Error(err))
		a.manager.Ready("No new process took over, the old one goes on: " + err.Error())
		return nil, err
	}
	a.log.Info("a new process has taken over", zap.Int("successor", successor.PID), zap.Duration("grace", handoverGrace))
	return successor, nil
}

// follow calls died when a successor ends otherwise than it should. systemd does
// not see that as long as this process is its parent; so this one takes the
// role of the main process back, and ends soon.
func (a *agent) follow(successor *handover.Successor, died func(error)) {
	go func() { // it ends with the process: there is nothing to wait for
		if err := successor.Wait(); err != nil {
			a.log.Error("the new process is gone; this one ends soon, so that another is started", zap.Error(err))
			a.manager.Main("The new process is gone; the old one answers its last calls, then another is started")
			died(err)
		}
	}()
}
