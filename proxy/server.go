package proxy

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"runtime"
	"sync"
	"syscall"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"
	_ "google.golang.org/grpc/encoding/gzip" // callers that compress are understood

	"github.com/cleave-cri/cleave/proxy/h2relay"
	"github.com/cleave-cri/cleave/proxy/unixsock"
)

const (
	// callerWindowBytes is the HTTP/2 flow-control window for what callers
	// send us; CRI requests are small.
	callerWindowBytes = 1 << 20

	// acceptPauseMin and acceptPauseMax bound the pause after a connection
	// could not be accepted because the process has no descriptor left.
	acceptPauseMin = 5 * time.Millisecond
	acceptPauseMax = time.Second
)

// Config is what a proxy needs.
type Config struct {
	// Upstream is the absolute path of the runtime's CRI socket. It need not
	// exist yet.
	Upstream string
	// Interceptors are the answers to improve, by full method name
	// ("/runtime.v1.ImageService/ImageFsInfo"). Only these, Requests
	// and Holds are ever decoded.
	Interceptors map[string]AnswerFunc
	// Fallbacks are for answers that must not pass unchanged when their interceptor
	// fails. Nothing guards against one that takes long, so it only picks a value
	// that is ready.
	Fallbacks map[string]AnswerFunc
	// Requests are the requests to change on their way to the runtime.
	Requests map[string]RequestFunc
	// Gates are the calls that may have to wait before they are made.
	Gates map[string]GateFunc
	// Holds are the calls that may have to wait because of what they ask for.
	Holds map[string]HoldFunc
	// Dial, if set, connects to the runtime instead of a plain dial of
	// Upstream. Callers get its error in the message of an Unavailable.
	Dial func(ctx context.Context) (net.Conn, error)
	// Admit, if set, sees each connection first, in the order of their arrival. It
	// must not block. What it returns is called in the connection's own goroutine
	// and reports whether the proxy is to serve it; otherwise the connection is
	// Admit's to close. All bytes must be left unread in one that is served. ctx is
	// done when the proxy stops, and Drain waits for the function to return.
	Admit func(conn *net.UnixConn) func(ctx context.Context) (serve bool)
	// Log takes the proxy's messages.
	Log *zap.Logger
}

// Server is a transparent proxy. Create it with [New], run [Server.Serve], end
// it with [Server.Drain].
//
// A call goes one of two ways. Most are forwarded as HTTP/2 frames (h2relay),
// each caller over a connection of its own to the runtime. Calls whose answers
// are to be improved, and all calls while the runtime can't be reached, go
// through a grpc server and client in this process (relay).
type Server struct {
	frames   *h2relay.Relay
	relay    *relay
	grpc     *grpc.Server
	inside   *inside
	admit    func(*net.UnixConn) func(context.Context) bool // nil: all
	served   sync.WaitGroup                                 // the grpc server's own serving
	counters *counters
	log      *zap.Logger

	mu        sync.Mutex
	listeners map[*net.UnixListener]struct{} // guarded by mu
	draining  bool                           // guarded by mu
	// accepting counts connections that are accepted and not yet with frames.
	accepting sync.WaitGroup
}

// New returns a proxy for a runtime's socket. It does not connect.
func New(cfg Config) (*Server, error) {
	log := cfg.Log
	if log == nil {
		log = zap.NewNop()
	}
	dial := cfg.Dial
	if dial == nil {
		dial = func(ctx context.Context) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", cfg.Upstream)
		}
	}
	upstream, err := dialUpstream(cfg.Upstream, dial)
	if err != nil {
		return nil, err
	}
	c := newCounters()
	guard := newGuard(cfg, c, log)
	r := newRelay(upstream, cfg.Upstream, guard)
	s := &Server{
		relay: r,
		grpc: r.register([]grpc.ServerOption{
			grpc.ForceServerCodecV2(frameCodec{name: codecName}),
			grpc.MaxRecvMsgSize(math.MaxInt32),
			grpc.MaxSendMsgSize(math.MaxInt32),
			grpc.StaticStreamWindowSize(callerWindowBytes),
			grpc.StaticConnWindowSize(callerWindowBytes),
			grpc.ReadBufferSize(ioBufferBytes),
			grpc.WriteBufferSize(ioBufferBytes),
			grpc.NumStreamWorkers(uint32(2 * runtime.GOMAXPROCS(0))), //nolint:gosec // a small positive number
			grpc.WaitForHandlers(true),
		}),
		inside:    newInside(),
		admit:     cfg.Admit,
		counters:  c,
		log:       log,
		listeners: map[*net.UnixListener]struct{}{},
	}
	s.frames = h2relay.New(h2relay.Config{
		Dial:      dial,
		DialOther: s.inside.dial,
		Other:     guard.knows,
		Endless:   func(method string) bool { return endlessMethods[method] },
		Begin:     c.begin,
		Peer:      "container runtime at unix://" + cfg.Upstream,
		Log:       log,
	})
	s.served.Go(func() { _ = s.grpc.Serve(s.inside) }) //nolint:errcheck // ends with Stop
	return s, nil
}

// Counters returns what the proxy has counted since its start.
func (s *Server) Counters() Counters { return s.counters.snapshot() }

// Serve takes calls on a unix listener until [Server.Drain]; then it returns nil,
// while calls taken before go on. The listener is closed at return, its socket
// file stays.
func (s *Server) Serve(l *net.UnixListener) error {
	l.SetUnlinkOnClose(false)
	s.mu.Lock()
	if s.draining {
		s.mu.Unlock()
		return l.Close()
	}
	s.listeners[l] = struct{}{}
	// Counted before the connection exists, so that no moment is left in which
	// it is accepted and Drain does not wait for it.
	s.accepting.Add(1)
	s.mu.Unlock()
	defer s.accepting.Done()

	pause := acceptPauseMin
	for {
		conn, err := l.AcceptUnix()
		switch {
		case err == nil:
			pause = acceptPauseMin
		case errors.Is(err, net.ErrClosed):
			return nil
		case errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE), errors.Is(err, syscall.ENOMEM), errors.Is(err, syscall.ECONNABORTED):
			s.log.Warn("a connection can't be accepted now", zap.Error(err), zap.Duration("pause", pause))
			if !s.pause(pause) {
				return l.Close()
			}
			pause = min(2*pause, acceptPauseMax)
			continue
		default:
			return errors.Join(fmt.Errorf("serve on %s: %w", l.Addr(), err), l.Close())
		}
		s.accepting.Add(1)
		taken := sync.OnceFunc(s.accepting.Done)
		var admitted func(context.Context) bool
		if s.admit != nil {
			admitted = s.admit(conn)
		}
		go func() {
			defer taken()
			if admitted == nil || admitted(s.relay.stopping) {
				s.serveConn(conn, taken)
			}
		}()
	}
}

// pause waits, and reports whether it was not for the end of the proxy.
func (s *Server) pause(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-s.relay.stopping.Done():
		return false
	}
}

// serveConn serves one connection; taken is called when Drain need not wait for
// it any more, because frames does.
func (s *Server) serveConn(conn *net.UnixConn, taken func()) {
	info, err := unixsock.PeerOf(conn)
	if err != nil {
		s.log.Warn("a connection is refused", zap.Error(err))
		_ = conn.Close() //nolint:errcheck // it is refused
		return
	}
	s.log.Info("connection accepted", zap.Int32("pid", info.PID), zap.Uint32("uid", info.UID),
		zap.String("command", commandOf(info.PID)))
	s.counters.connections.Add(1)
	defer s.counters.connections.Add(-1)
	s.frames.ServeConn(conn, taken)
}

// Drain stops taking connections, asks callers to go elsewhere with their next
// call, ends the calls that never end by themselves, and waits for all others.
// When ctx is done first, those still in flight are answered with Unavailable,
// and the context's error is returned. Afterwards the connections to the runtime
// are closed.
//
// No accepted connection is dropped: each either gets its calls answered or is
// told (HTTP/2 GOAWAY) that they were not taken, which grpc callers then make
// again elsewhere by themselves.
func (s *Server) Drain(ctx context.Context) error {
	s.mu.Lock()
	s.draining = true
	listeners := s.listeners
	s.listeners = nil
	s.mu.Unlock()

	for l := range listeners {
		// Fails only when it is closed already, which is what we want.
		_ = l.Close() //nolint:errcheck // see above
	}
	s.relay.stop()
	s.accepting.Wait()
	err := s.frames.Drain(ctx)
	if err != nil {
		err = fmt.Errorf("wait for %d calls in flight and for answers on %d connections: %w",
			s.counters.inFlight.Load(), s.counters.connections.Load(), err)
		s.relay.aborted.Store(true)
	}
	// All callers are gone; what is left in here ends with the connections.
	closeErr := s.relay.upstream.Close()
	s.grpc.Stop()
	s.served.Wait()
	s.relay.pumps.Wait()
	return errors.Join(err, closeErr)
}
