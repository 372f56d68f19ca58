// Package h2relay forwards calls as HTTP/2 frames: each caller's connection has
// one of its own to the server behind it, and what arrives on one goes out on
// the other in the goroutine that read it. Messages are not looked at, and a
// header only as far as it names the method. That is the shortest way through a
// process that can still tell calls apart: some methods can be given to a second
// server (the one that decodes and improves their answers), and when the server
// behind goes away only the calls end, not the callers' connections.
//
// What belongs to a connection is handled here, hop by hop: header compression,
// the connection's flow-control window, pings, going away. What belongs to a
// call passes from end to end: header fields, messages, trailers, resets, and
// the stream's flow-control window, so that a caller that does not read holds up
// the server that writes, and nobody else (RFC 9113, sections 4.3, 5.2, 6).
//
// It knows gRPC only where it has to answer itself, and nothing of the CRI. Only
// proxy may import it.
package h2relay

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"

	"go.uber.org/zap"
)

// NoStatus is the status of a call that ended without one: it was reset, or its
// connection ended.
const NoStatus = -1

// Config is what a relay needs.
type Config struct {
	// Dial connects to the server behind. It must not take long: the calls of
	// the connection that needs it wait meanwhile.
	Dial func(context.Context) (net.Conn, error)
	// DialOther connects to the server for calls that Other picks, and for all
	// calls while Dial fails.
	DialOther func() (net.Conn, error)
	// Other reports whether calls of a method, "/service/method", go to
	// DialOther's server.
	Other func(method string) bool
	// Endless reports whether calls of a method do not end by themselves. Such
	// calls are ended when draining begins.
	Endless func(method string) bool
	// Begin counts a call of a method, "/service/method"; the function that it
	// returns ends it, with the status by which the caller's side ended, NoStatus
	// if there was none. Both are called under a lock: they must not block, nor
	// call the relay.
	Begin func(method string) func(code int)
	// Peer is what the server behind is called in messages, for instance
	// "container runtime at unix:///run/containerd/containerd.sock".
	Peer string
	// Log takes messages.
	Log *zap.Logger
}

const (
	// prefaceTimeout bounds how long a caller may stay silent before it speaks
	// HTTP/2. Callers on the same machine do so at once, unless they are starved.
	prefaceTimeout = 20 * time.Second

	// drainTimeout bounds how long a caller may take to answer that it was asked
	// to go.
	drainTimeout = 2 * time.Second

	// settingsTimeout bounds how long the server behind may stay silent after
	// it has accepted a connection; it has to speak first as well.
	settingsTimeout = 5 * time.Second

	// abortGrace is how long callers have to take the status of calls that
	// were broken off.
	abortGrace = 2 * time.Second

	// callerWindowBytes is the connection's flow-control window for what a
	// caller sends: it bounds what is kept for a server that does not read.
	callerWindowBytes = 1 << 20

	// serverWindowBytes is the connection's window for what servers send.
	// Nothing is kept of that: it only has to be large enough not to be in the
	// way.
	serverWindowBytes = 4 << 20

	// inputBytes is what is read of a connection at most in one go: seven frames
	// of 16 KiB, the largest that a peer may send unasked, and part of another.
	inputBytes = 128 << 10

	// outputBytes is how much of what is to be written is put together. What is
	// larger is written from where it was read to.
	outputBytes = 32 << 10

	// sendBytes is what the kernel may keep of what a connection's other side has
	// not read; it keeps twice that for its own use, and never more than the node
	// allows (net.core.wmem_max, usually 208 KiB). Where it is full the relay waits
	// and is woken for each piece that is read: the more fits, the fewer the changes
	// between processes, which are most of what bulk costs here.
	sendBytes = 2 << 20
)

// The words for calls that end here.
const (
	messageStopping = "cleave is stopping or was replaced by a new process; call again"
	messageAborted  = "cleave stopped before the container runtime answered; call again"
)

// Relay forwards the calls of many callers. Create it with [New].
type Relay struct {
	cfg Config

	mu       sync.Mutex
	callers  map[*caller]struct{} // guarded by mu
	draining bool                 // guarded by mu
	ended    sync.WaitGroup
}

// New returns a relay without callers.
func New(cfg Config) *Relay {
	return &Relay{cfg: cfg, callers: map[*caller]struct{}{}}
}

// ServeConn serves a caller's connection until it ends, and closes it. taken is
// called as soon as [Relay.Drain] takes care of the connection.
func (r *Relay) ServeConn(conn net.Conn, taken func()) {
	roomy(conn)
	c := newCaller(r, conn)
	r.mu.Lock()
	r.callers[c] = struct{}{}
	r.ended.Add(1)
	draining := r.draining
	r.mu.Unlock()
	taken()
	defer r.ended.Done()
	defer func() {
		r.mu.Lock()
		delete(r.callers, c)
		r.mu.Unlock()
	}()
	if draining {
		c.drain()
	}
	if err := c.serve(); err != nil && !errors.Is(err, net.ErrClosed) {
		r.cfg.Log.Debug("a caller's connection ended", zap.Error(err))
	}
}

// Drain tells all callers to go elsewhere with their next call (HTTP/2 GOAWAY),
// ends the endless calls, and waits for all others. When ctx is done first those
// still in flight are answered with Unavailable and the context's cause is
// returned. No more connections may be given to ServeConn than are already on
// their way; those are told at once.
func (r *Relay) Drain(ctx context.Context) error {
	r.mu.Lock()
	r.draining = true
	for c := range r.callers {
		c.drain()
	}
	r.mu.Unlock()

	done := make(chan struct{})
	go func() { defer close(done); r.ended.Wait() }()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
	}
	r.mu.Lock()
	callers := make([]*caller, 0, len(r.callers))
	for c := range r.callers {
		callers = append(callers, c)
	}
	r.mu.Unlock()
	var aborts sync.WaitGroup
	defer aborts.Wait()
	for _, c := range callers {
		// A caller that does not take its answer must not hold up the others.
		aborts.Go(c.abort)
	}
	grace := time.NewTimer(abortGrace)
	defer grace.Stop()
	select {
	case <-done:
	case <-grace.C:
		for _, c := range callers {
			c.close()
		}
		<-done
	}
	return context.Cause(ctx)
}

// roomy lets the kernel keep more of what is written to a connection.
func roomy(conn net.Conn) {
	if c, ok := conn.(interface{ SetWriteBuffer(bytes int) error }); ok {
		_ = c.SetWriteBuffer(sendBytes) //nolint:errcheck // it is only slower then
	}
}
