package proxy

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"
	_ "google.golang.org/grpc/encoding/gzip" // callers that compress are understood
)

const (
	// callerWindowBytes is the HTTP/2 flow-control window for what callers
	// send us; CRI requests are small.
	callerWindowBytes = 1 << 20

	// prefaceTimeout bounds how long a connection may stay silent before it
	// speaks HTTP/2, which callers on the same machine do at once. A graceful
	// stop of the grpc server waits that long for silent ones before it tells
	// the others to go elsewhere.
	prefaceTimeout = 2 * time.Second

	// abortGrace is how long broken-off calls have to get their status out.
	abortGrace = 2 * time.Second
)

// Config is what a proxy needs.
type Config struct {
	// Upstream is the absolute path of the runtime's CRI socket. It need not
	// exist yet.
	Upstream string
	// Interceptors are the answers to improve, by full method name
	// ("/runtime.v1.ImageService/ImageFsInfo"). Only these are ever decoded.
	Interceptors map[string]AnswerFunc
	// UpstreamConnected, if set, is called after each successful connect to
	// the runtime. It must not block.
	UpstreamConnected func()
	// Log takes the proxy's messages.
	Log *zap.Logger
}

// Server is a transparent proxy. Create it with [New], run [Server.Serve], end
// it with [Server.Drain].
type Server struct {
	relay    *relay
	grpc     *grpc.Server
	counters *counters
	log      *zap.Logger

	mu        sync.Mutex
	listeners map[*listener]struct{} // guarded by mu
	draining  bool                   // guarded by mu
}

// New returns a proxy for a runtime's socket. It does not connect.
func New(cfg Config) (*Server, error) {
	log := cfg.Log
	if log == nil {
		log = zap.NewNop()
	}
	connected := cfg.UpstreamConnected
	if connected == nil {
		connected = func() {}
	}
	upstream, err := dialUpstream(cfg.Upstream, connected)
	if err != nil {
		return nil, err
	}
	c := newCounters()
	r := newRelay(upstream, cfg.Upstream, newGuard(cfg.Interceptors, c, log), c)
	return &Server{
		relay: r,
		grpc: r.register([]grpc.ServerOption{
			grpc.Creds(peerCredentials{log}),
			grpc.ForceServerCodecV2(frameCodec{name: codecName}),
			grpc.MaxRecvMsgSize(math.MaxInt32),
			grpc.MaxSendMsgSize(math.MaxInt32),
			grpc.StaticStreamWindowSize(callerWindowBytes),
			grpc.StaticConnWindowSize(callerWindowBytes),
			grpc.ReadBufferSize(ioBufferBytes),
			grpc.WriteBufferSize(ioBufferBytes),
			grpc.ConnectionTimeout(prefaceTimeout),
			grpc.NumStreamWorkers(uint32(2 * runtime.GOMAXPROCS(0))), //nolint:gosec // a small positive number
			grpc.WaitForHandlers(true),
		}),
		counters:  c,
		log:       log,
		listeners: map[*listener]struct{}{},
	}, nil
}

// Counters returns what the proxy has counted since its start.
func (s *Server) Counters() Counters { return s.counters.snapshot() }

// Serve takes calls on a unix listener until [Server.Drain]; then it returns nil,
// while calls taken before go on. The listener is closed at return, its socket
// file stays.
func (s *Server) Serve(l *net.UnixListener) error {
	l.SetUnlinkOnClose(false)
	own := &listener{UnixListener: l, open: &s.counters.connections}
	s.mu.Lock()
	if s.draining {
		s.mu.Unlock()
		return l.Close()
	}
	s.listeners[own] = struct{}{}
	s.mu.Unlock()

	err := s.grpc.Serve(own)
	if errors.Is(err, net.ErrClosed) || errors.Is(err, grpc.ErrServerStopped) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("serve on %s: %w", l.Addr(), err)
	}
	return nil
}

// Drain stops taking connections, asks callers to go elsewhere with their next
// call, ends the calls that never end by themselves, and waits for all others.
// When ctx is done first, those still in flight are answered with Unavailable,
// and the context's error is returned. Afterwards the connection to the runtime
// is closed.
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
	for l := range listeners {
		l.waitHandedOver(ctx)
	}
	s.relay.stop()

	done := make(chan struct{})
	go func() {
		defer close(done)
		s.grpc.GracefulStop()
		s.relay.pumps.Wait()
	}()
	var err error
	select {
	case <-done:
	case <-ctx.Done():
		err = fmt.Errorf("wait for %d calls in flight and for answers on %d connections: %w",
			s.counters.inFlight.Load(), s.counters.connections.Load(), context.Cause(ctx))
		s.relay.aborted.Store(true)
	}
	// Closing it ends what is still in flight.
	closeErr := s.relay.upstream.Close()
	if err == nil {
		return closeErr
	}
	grace := time.NewTimer(abortGrace)
	defer grace.Stop()
	select {
	case <-done:
	case <-grace.C:
		// A caller that does not even take its answer.
		s.grpc.Stop()
		<-done
	}
	return errors.Join(err, closeErr)
}

// listener is a unix listener that knows which of its connections the grpc
// server has not yet taken over. grpc drops a connection that was accepted but
// not looked at when a graceful stop begins (grpc-go server.go:
// handleRawConn); Drain waits for those first.
type listener struct {
	*net.UnixListener
	open *atomic.Int64

	mu      sync.Mutex
	pending int           // connections accepted and not handed over; guarded by mu
	idle    chan struct{} // if not nil, closed when pending falls to 0; guarded by mu
}

// Accept implements [net.Listener].
func (l *listener) Accept() (net.Conn, error) {
	// Counted before the connection exists, so that no moment is left in
	// which it is accepted and not pending.
	l.addPending(1)
	conn, err := l.AcceptUnix()
	if err != nil {
		l.addPending(-1)
		return nil, err
	}
	l.open.Add(1)
	return &acceptedConn{Conn: conn, listener: l}, nil
}

func (l *listener) addPending(n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pending += n
	if l.pending == 0 && l.idle != nil {
		close(l.idle)
		l.idle = nil
	}
}

// waitHandedOver waits until the server has taken over every accepted
// connection, or ctx ends. The listener has to be closed, so that there is an end.
func (l *listener) waitHandedOver(ctx context.Context) {
	l.mu.Lock()
	if l.pending == 0 {
		l.mu.Unlock()
		return
	}
	idle := make(chan struct{})
	l.idle = idle
	l.mu.Unlock()
	select {
	case <-idle:
	case <-ctx.Done():
	}
}

// acceptedConn is a connection on the proxy's socket.
type acceptedConn struct {
	net.Conn
	listener *listener

	handed sync.Once
	closed sync.Once
}

// handedToServer says that the server has taken the connection over.
func (c *acceptedConn) handedToServer() { c.handed.Do(func() { c.listener.addPending(-1) }) }

// Close implements [net.Conn].
func (c *acceptedConn) Close() error {
	c.handedToServer()
	c.closed.Do(func() { c.listener.open.Add(-1) })
	return c.Conn.Close()
}
