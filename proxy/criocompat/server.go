package criocompat

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"golang.org/x/net/http2"

	"github.com/cleave-cri/cleave/proxy/unixsock"
)

// Informer knows what the kubelet may be told about the node's disks.
type Informer interface {
	// Info returns the answer to a process that asks, known by its number. It is
	// asked once or twice in a kubelet's life and never again (KSS-18), so who
	// asks is worth a look. It returns when ctx is done. An error is the answer
	// 503, with which this kubelet has no disk figures until it is restarted.
	Info(ctx context.Context, pid int32) (Info, error)
}

// Registry knows containers by their aliases.
type Registry interface {
	// Container returns the container with an alias, or an error, [ErrUnknown] for
	// one that there is not, or not yet. It is called again while a question is
	// held, five times a second, and so should answer from memory. It returns when
	// ctx is done.
	Container(ctx context.Context, alias string) (Container, error)
}

// ErrUnknown says that there is no container with an alias.
var ErrUnknown = errors.New("no container has this alias")

// Config is what a server needs.
type Config struct {
	Informer Informer
	Registry Registry
	// Log takes the server's messages.
	Log *zap.Logger
}

// limits bound what callers can take. All are set.
type limits struct {
	// waiting is how many connections may have said nothing sensible yet. The
	// next one takes the place of the oldest: those who mean it speak at once.
	waiting int
	// say is how long a connection may take to say it.
	say time.Duration
	// closing is how long it may still take when the proxy stops.
	closing time.Duration
	// requests is how many are answered at one time, held ones included.
	requests int
	// info bounds the question to the Informer.
	info time.Duration
	// hold is how long a question for an unknown container is held, holds how
	// many are.
	hold  time.Duration
	holds int
	// write is how long a caller may take to take its answer.
	write time.Duration
}

// usual are the limits outside of tests.
//
// hold is a compromise: kubelets up to 1.36 ask once and never again (KSS-9), so
// that too short a hold costs a container's figures; but cAdvisor takes one new
// container after the other, so that a container that never comes holds up those
// behind it for this long, six times over with a kubelet that asks again.
var usual = limits{
	waiting: 256, say: 10 * time.Second, closing: time.Second,
	requests: 512, info: 30 * time.Second,
	hold: 2 * time.Second, holds: 256,
	write: 10 * time.Second,
}

const (
	// headerBytes bounds a request's header; cAdvisor's are below 200 bytes.
	headerBytes = 4 << 10
	// pauseMin and pauseMax bound the pause between two looks for a container.
	pauseMin = 20 * time.Millisecond
	pauseMax = 200 * time.Millisecond
	// callsKept is how many calls of /info are remembered.
	callsKept = 32
)

// Server answers cAdvisor's questions and hands everything else to the proxy.
// Create it with [New], end it with [Server.Shutdown].
type Server struct {
	cfg    Config
	limits limits
	log    *zap.Logger
	http   *http.Server
	conns  *handed
	served sync.WaitGroup // the HTTP server's own serving

	requests chan struct{}
	holds    chan struct{}
	// asked, unknown and dropped count requests, answers 404 for a container, and
	// connections that had to make room or did not speak in time.
	asked, unknown, dropped atomic.Int64

	mu      sync.Mutex
	waiting []*guest   // guarded by mu; oldest first
	calls   []InfoCall // guarded by mu; newest last
}

// guest is a connection that was not sorted yet, or that speaks HTTP.
type guest struct {
	*net.UnixConn
	peer unixsock.Peer
}

// New returns a server that waits for connections from [Server.Admit].
func New(cfg Config) *Server { return newServer(cfg, usual) }

func newServer(cfg Config, l limits) *Server {
	log := cfg.Log
	if log == nil {
		log = zap.NewNop()
	}
	s := &Server{
		cfg: cfg, limits: l, log: log, conns: newHanded(),
		requests: make(chan struct{}, l.requests),
		holds:    make(chan struct{}, l.holds),
	}
	s.http = &http.Server{
		Handler:                      s,
		DisableGeneralOptionsHandler: true,
		ReadHeaderTimeout:            l.say,
		ReadTimeout:                  l.say,
		WriteTimeout:                 l.say + max(l.hold, l.info) + l.write,
		MaxHeaderBytes:               headerBytes,
		ConnContext: func(ctx context.Context, conn net.Conn) context.Context {
			return context.WithValue(ctx, guestKey{}, conn)
		},
		ConnState: func(conn net.Conn, state http.ConnState) {
			if g, ok := conn.(*guest); ok && state == http.StateClosed {
				s.heard(g)
			}
		},
	}
	if std, err := zap.NewStdLogAt(log, zap.DebugLevel); err == nil {
		s.http.ErrorLog = std
	}
	// cAdvisor asks for a container once or twice in its life: a connection that
	// is kept would mostly be kept for nothing.
	s.http.SetKeepAlivesEnabled(false)
	s.served.Go(func() { _ = s.http.Serve(s.conns) }) //nolint:errcheck // ends with Shutdown
	return s
}

type guestKey struct{}

// Admit takes a new connection. What it returns looks at the first bytes and reports
// whether they are gRPC, which is left to the caller, untouched. Everything else the
// server takes over: HTTP is answered, what says nothing in time is closed. When ctx
// is done, the time is nearly over.
//
// It has the form of the proxy's Admit.
func (s *Server) Admit(conn *net.UnixConn) func(ctx context.Context) (grpc bool) {
	peer, err := unixsock.PeerOf(conn)
	if err != nil {
		return func(context.Context) bool {
			s.log.Warn("a connection is refused", zap.Error(err))
			_ = conn.Close() //nolint:errcheck // it is refused
			return false
		}
	}
	g := &guest{UnixConn: conn, peer: peer}
	s.wait(g)
	return func(ctx context.Context) bool { return s.sort(ctx, g) }
}

func (s *Server) sort(ctx context.Context, g *guest) (grpc bool) {
	grpc, err := s.ask(ctx, g.UnixConn)
	switch {
	case err != nil:
		if s.heard(g) {
			s.dropped.Add(1)
		}
		_ = g.Close() //nolint:errcheck // nothing was said on it
		s.log.Debug("a connection was closed before it said anything", zap.Int32("pid", g.peer.PID), zap.Error(err))
		return false
	case grpc:
		// If it just had to make room it is closed, and its caller connects again.
		s.heard(g)
		return true
	default:
		if !s.conns.give(g) {
			s.heard(g)
			_ = g.Close() //nolint:errcheck // the server has stopped
		}
		return false
	}
}

// ask waits for the bytes that tell gRPC from the rest.
func (s *Server) ask(ctx context.Context, conn *net.UnixConn) (grpc bool, _ error) {
	if err := conn.SetReadDeadline(time.Now().Add(s.limits.say)); err != nil {
		return false, err
	}
	hurried := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(hurried)
		_ = conn.SetReadDeadline(time.Now().Add(s.limits.closing)) //nolint:errcheck // fails only when it is closed
	})
	err := unixsock.Peek(conn, len(http2.ClientPreface), func(first []byte) (decided bool) {
		grpc, decided = speaksGRPC(first)
		return decided
	})
	if !stop() {
		<-hurried // so that it does not set its deadline after ours
	}
	return grpc, errors.Join(err, conn.SetReadDeadline(time.Time{}))
}

// speaksGRPC says what the first bytes of a connection tell: gRPC clients send
// HTTP/2's preface before anything else (RFC 9113, section 3.4).
func speaksGRPC(first []byte) (grpc, decided bool) {
	n := min(len(first), len(http2.ClientPreface))
	if string(first[:n]) != http2.ClientPreface[:n] {
		return false, true
	}
	return true, n == len(http2.ClientPreface)
}

// wait notes a connection that has said nothing yet, and closes the oldest if
// there are too many.
func (s *Server) wait(g *guest) {
	s.mu.Lock()
	var oldest *guest
	if len(s.waiting) >= s.limits.waiting {
		oldest = s.waiting[0]
		s.waiting = slices.Delete(s.waiting, 0, 1)
	}
	s.waiting = append(s.waiting, g)
	s.mu.Unlock()
	if oldest == nil {
		return
	}
	_ = oldest.Close() //nolint:errcheck // nothing was said on it
	if s.dropped.Add(1) == 1 {
		s.log.Warn("a silent connection was closed to make room; further ones are only counted",
			zap.Int32("pid", oldest.peer.PID), zap.Int("limit", s.limits.waiting))
	}
}

// heard notes that a connection has said what it wants, or is closed, and reports
// whether it was still waited for.
func (s *Server) heard(g *guest) (waited bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.Index(s.waiting, g)
	if i < 0 {
		return false
	}
	s.waiting = slices.Delete(s.waiting, i, i+1)
	return true
}

// Shutdown ends the server: connections that speak HTTP and were not answered yet
// have until ctx is done, then they are closed. The proxy that calls Admit has to
// be drained before.
func (s *Server) Shutdown(ctx context.Context) error {
	err := s.conns.Close()
	if shutErr := s.http.Shutdown(ctx); shutErr != nil {
		err = errors.Join(err, fmt.Errorf("wait for questions of the kubelet's cAdvisor: %w", shutErr), s.http.Close())
	}
	s.served.Wait()
	return err
}

// handed is the HTTP server's listener: connections that were sorted.
type handed struct {
	conns chan *guest
	once  sync.Once
	done  chan struct{}
}

var _ net.Listener = (*handed)(nil)

func newHanded() *handed {
	return &handed{conns: make(chan *guest), done: make(chan struct{})}
}

// give hands a connection on and reports whether there was anybody to take it.
func (h *handed) give(g *guest) bool {
	select {
	case h.conns <- g:
		return true
	case <-h.done:
		return false
	}
}

// Accept implements [net.Listener].
func (h *handed) Accept() (net.Conn, error) {
	select {
	case g := <-h.conns:
		return g, nil
	case <-h.done:
		return nil, net.ErrClosed
	}
}

// Close implements [net.Listener].
func (h *handed) Close() error {
	h.once.Do(func() { close(h.done) })
	return nil
}

// Addr implements [net.Listener].
func (h *handed) Addr() net.Addr { return &net.UnixAddr{Name: "handed on", Net: "unix"} }
