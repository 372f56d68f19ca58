package h2relay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"strconv"
	"sync"
	"time"

	"go.uber.org/zap"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc/codes"
)

// caller is one caller's connection with those to the servers behind it.
//
// Lock order: an output's mu before caller.mu, which is never held while
// something is written or waited for, but for room in the caller's window.
type caller struct {
	relay *Relay
	conn  net.Conn
	in    *input
	out   *output
	loops sync.WaitGroup
	done  context.Context //nolint:containedctx // the end of the connection, for dials
	end   context.CancelFunc

	mu sync.Mutex
	// room is signalled when window grows, a stream ends, or the connection.
	room *sync.Cond
	// window is how many bytes of DATA the caller takes now; guarded by mu.
	window int64
	// uploaded is what has been passed on of the caller's DATA and not yet
	// given back to its window; guarded by mu.
	uploaded int64
	// streamWindow is the caller's SETTINGS_INITIAL_WINDOW_SIZE; guarded by mu.
	streamWindow uint32
	// streams are the calls in flight, by stream ID; guarded by mu.
	streams map[uint32]*stream
	// lastID is the highest stream ID seen; guarded by mu.
	lastID uint32
	// main and other are the connections for new calls, nil while there is
	// none; guarded by mu.
	main, other *server
	// servers are all that are open. The slice is not changed but replaced;
	// guarded by mu.
	servers []*server
	// drainBegan says that the caller was asked to go, refuses that streams
	// above lastID are not taken any more; guarded by mu.
	drainBegan, refuses bool
	closed              bool // guarded by mu
}

// stream is one call. Its fields are guarded by caller.mu.
type stream struct {
	id      uint32
	server  *server
	endless bool
	// answering says that the response's header went to the caller.
	answering bool
	// callerDone and serverDone say which side has sent its last frame.
	callerDone, serverDone bool
	// gone says that the stream is not in caller.streams any more.
	gone bool
	// queued is how many frames of the stream wait in server.queue.
	queued int
	// debt is what must not be given of the next credits for uploads.
	debt int64
	// finish ends the counting of the call.
	finish func()
}

// initialWindow is the size of every flow-control window until somebody says
// otherwise (RFC 9113, section 6.9.2).
const initialWindow = 65535

func newCaller(r *Relay, conn net.Conn) *caller {
	c := &caller{
		relay:        r,
		conn:         conn,
		in:           newInput(conn),
		out:          newOutput(conn),
		window:       initialWindow,
		streamWindow: initialWindow,
		streams:      map[uint32]*stream{},
	}
	c.room = sync.NewCond(&c.mu)
	// A connection begins with the settings, whatever else is to be said.
	c.out.do(func(f *http2.Framer) error { return f.WriteSettings() })
	c.out.credit(0, callerWindowBytes-initialWindow)
	c.done, c.end = context.WithCancel(context.Background()) //nolint:forbidigo // the root of a connection's life
	return c
}

// serve reads the caller's frames until the connection ends.
func (c *caller) serve() (err error) {
	defer c.loops.Wait()
	defer c.close()
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v", p)
			c.relay.cfg.Log.Error("forwarding broke and this connection ends, report this as a bug of cleave", zap.Any("panic", p), zap.Stack("stack"))
		}
	}()
	if err := c.greet(); err != nil {
		return err
	}
	for {
		if !c.in.ready() {
			c.flushAll()
		}
		frame, err := c.in.framer.ReadFrame()
		var streamErr http2.StreamError
		switch {
		case errors.As(err, &streamErr):
			// The block was decoded, so header compression is still in step.
			c.resetFromHere(streamErr.StreamID, streamErr.Code)
			continue
		case err != nil:
			return c.breakOff(err)
		}
		if err := c.take(frame); err != nil {
			return c.breakOff(err)
		}
	}
}

// greet takes what stands at the beginning of a connection.
func (c *caller) greet() error {
	c.out.flush()
	if err := c.conn.SetReadDeadline(time.Now().Add(prefaceTimeout)); err != nil {
		return err
	}
	preface := make([]byte, len(http2.ClientPreface))
	if _, err := io.ReadFull(c.in.buffer, preface); err != nil {
		return fmt.Errorf("wait for the caller to speak HTTP/2: %w", err)
	}
	if string(preface) != http2.ClientPreface {
		return errors.New("the caller does not speak HTTP/2")
	}
	frame, err := c.in.framer.ReadFrame()
	if err != nil {
		return err
	}
	settings, ok := frame.(*http2.SettingsFrame)
	if !ok || settings.IsAck() {
		return c.breakOff(http2.ConnectionError(http2.ErrCodeProtocol))
	}
	c.takeSettings(settings)
	return c.conn.SetReadDeadline(time.Time{})
}

// breakOff says why the connection ends, if it is the caller's fault.
func (c *caller) breakOff(err error) error {
	var connErr http2.ConnectionError
	if errors.As(err, &connErr) {
		c.mu.Lock()
		last := c.lastID
		c.mu.Unlock()
		c.out.do(func(f *http2.Framer) error { return f.WriteGoAway(last, http2.ErrCode(connErr), nil) })
		c.out.flush()
	}
	return err
}

// take acts on one of the caller's frames.
func (c *caller) take(frame http2.Frame) error {
	switch f := frame.(type) {
	case *http2.MetaHeadersFrame:
		return c.takeHeaders(f)
	case *http2.DataFrame:
		c.takeData(f)
	case *http2.RSTStreamFrame:
		c.takeReset(f.StreamID, f.ErrCode)
	case *http2.WindowUpdateFrame:
		c.takeCredit(f.StreamID, f.Increment)
	case *http2.SettingsFrame:
		c.takeSettings(f)
	case *http2.PingFrame:
		if f.IsAck() {
			c.takePong(f.Data)
		} else {
			c.out.do(func(w *http2.Framer) error { return w.WritePing(true, f.Data) })
		}
	}
	// PRIORITY says nothing to a relay, GOAWAY only that the caller will go,
	// and frames of unknown types are to be ignored (RFC 9113, section 5.5).
	return nil
}

// pingDrain marks the ping that tells that the caller has read the first GOAWAY.
var pingDrain = [8]byte{'c', 'l', 'e', 'a', 'v', 'e', ' ', '1'}

// drain asks the caller to go elsewhere with its next call, and makes the
// connection end after those that it has made. Calls that it makes before it has
// read that are still taken.
func (c *caller) drain() {
	c.mu.Lock()
	if c.drainBegan || c.closed {
		c.mu.Unlock()
		return
	}
	c.drainBegan = true
	var endless []*stream
	for _, s := range c.streams {
		if s.endless {
			endless = append(endless, s)
		}
	}
	// Under the lock, so that close comes before or after it. Writing may wait
	// for a caller that does not read, hence a goroutine.
	c.loops.Go(func() {
		c.out.do(func(f *http2.Framer) error {
			if err := f.WriteGoAway(1<<31-1, http2.ErrCodeNo, nil); err != nil {
				return err
			}
			return f.WritePing(false, pingDrain)
		})
		c.out.flush()
		for _, s := range endless {
			c.endEndless(s)
		}
		// One that does not answer pings is taken at its word after a while.
		timer := time.NewTimer(prefaceTimeout)
		defer timer.Stop()
		select {
		case <-timer.C:
			c.refuse()
		case <-c.done.Done():
		}
	})
	c.mu.Unlock()
}

func (c *caller) takePong(data [8]byte) {
	if data == pingDrain {
		c.refuse()
	}
}

// refuse takes no more calls on this connection and ends it after the last.
func (c *caller) refuse() {
	c.mu.Lock()
	if c.refuses || c.closed || !c.drainBegan {
		c.mu.Unlock()
		return
	}
	c.refuses = true
	last, empty := c.lastID, len(c.streams) == 0
	c.mu.Unlock()
	c.out.do(func(f *http2.Framer) error { return f.WriteGoAway(last, http2.ErrCodeNo, nil) })
	c.out.flush()
	if empty {
		c.close()
	}
}

// endEndless ends a call that does not end by itself.
func (c *caller) endEndless(s *stream) {
	if c.answerHere(s, codes.Unavailable, messageStopping) {
		s.server.out.reset(s.id, http2.ErrCodeCancel)
		s.server.out.flush()
	}
}

// abort answers all calls in flight and ends the connection.
func (c *caller) abort() {
	c.mu.Lock()
	streams := make([]*stream, 0, len(c.streams))
	for _, s := range c.streams {
		streams = append(streams, s)
	}
	c.mu.Unlock()
	for _, s := range streams {
		c.answerHere(s, codes.Unavailable, messageAborted)
	}
	c.out.flush()
	c.close()
}

// close ends the connection and those behind it.
func (c *caller) close() {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return
	}
	c.closed = true
	servers := c.servers
	c.servers = nil
	streams := c.streams
	c.streams = map[uint32]*stream{}
	for _, s := range streams {
		s.gone = true
		s.finish()
	}
	c.room.Broadcast()
	c.mu.Unlock()
	c.end()
	_ = c.conn.Close() //nolint:errcheck // it is over
	for _, s := range servers {
		_ = s.conn.Close() //nolint:errcheck // it is over
	}
}

// flushAll sends what the caller's frames have led to.
func (c *caller) flushAll() {
	c.mu.Lock()
	servers := c.servers
	c.mu.Unlock()
	for _, s := range servers {
		s.out.flush()
	}
	c.out.flush()
}

func (c *caller) takeHeaders(f *http2.MetaHeadersFrame) error {
	c.mu.Lock()
	s, last, refuses := c.streams[f.StreamID], c.lastID, c.refuses
	c.mu.Unlock()
	switch {
	case s != nil:
		// Trailers of a request, which gRPC does not have: only their end counts.
		if f.StreamEnded() {
			c.sendData(s, nil, 0, true)
		}
		return nil
	case f.StreamID%2 == 0 || f.StreamID <= last:
		return http2.ConnectionError(http2.ErrCodeProtocol)
	case refuses:
		return nil // the caller was told and makes the call again elsewhere
	}
	method := f.PseudoValue("path")
	server := c.route(method)
	s = &stream{id: f.StreamID, server: server, endless: c.relay.cfg.Endless(method), callerDone: f.StreamEnded()}

	c.mu.Lock()
	c.lastID = f.StreamID
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	s.finish = sync.OnceFunc(c.relay.cfg.Begin())
	c.streams[s.id] = s
	refusal := ""
	var extra int64
	switch {
	case server == nil:
		refusal = c.relay.cfg.Peer + ": no connection"
	case server.ended != nil:
		// It ended between the choice and now, and did not see this call.
		refusal = fmt.Sprintf("%s: %v", server.name, server.ended)
	case c.drainBegan && s.endless:
		refusal = messageStopping
	}
	if server != nil {
		server.open++
		extra = server.streamWindow - initialWindow
		if extra < 0 {
			s.debt, extra = -extra, 0
		}
	}
	c.mu.Unlock()
	if refusal != "" {
		c.answerHere(s, codes.Unavailable, refusal)
		return nil
	}
	server.out.headers(s.id, f.Fields, f.StreamEnded())
	// The server may take more than callers know of.
	c.out.credit(s.id, extra)
	return nil
}

// route returns the server for a new call of a method: the one behind if it can
// be reached, otherwise the other; nil if neither can.
func (c *caller) route(method string) *server {
	if !c.relay.cfg.Other(method) {
		c.mu.Lock()
		main := c.main
		c.mu.Unlock()
		if main != nil {
			return main
		}
		if conn, err := c.relay.cfg.Dial(c.done); err == nil {
			return c.connect(conn, &c.main, c.relay.cfg.Peer)
		}
	}
	c.mu.Lock()
	other := c.other
	c.mu.Unlock()
	if other != nil {
		return other
	}
	conn, err := c.relay.cfg.DialOther()
	if err != nil {
		c.relay.cfg.Log.Warn("a call finds no server", zap.String("method", method), zap.Error(err))
		return nil
	}
	return c.connect(conn, &c.other, "cleave")
}

func (c *caller) takeData(f *http2.DataFrame) {
	size := int64(f.Length)
	c.mu.Lock()
	s := c.streams[f.StreamID]
	c.mu.Unlock()
	if s == nil {
		c.creditUploads(size)
		return
	}
	c.sendData(s, f.Data(), size, f.StreamEnded())
}

// sendData passes a request's bytes on, or keeps them until the server has room.
// size is what they take of the caller's window, padding included.
func (c *caller) sendData(s *stream, payload []byte, size int64, end bool) {
	c.mu.Lock()
	if s.gone {
		c.mu.Unlock()
		c.creditUploads(size)
		return
	}
	s.callerDone = s.callerDone || end
	server := s.server
	if len(server.queue) > 0 || server.window < int64(len(payload)) {
		server.queue = append(server.queue, upload{stream: s, payload: append([]byte(nil), payload...), size: size, end: end})
		s.queued++
		c.mu.Unlock()
		return
	}
	server.window -= int64(len(payload))
	c.forgetIfDoneLocked(s)
	c.mu.Unlock()
	server.out.data(s.id, end, payload)
	c.creditUploads(size)
}

// creditUploads gives the caller its window back, some at a time.
func (c *caller) creditUploads(size int64) {
	c.mu.Lock()
	c.uploaded += size
	amount := int64(0)
	if c.uploaded >= callerWindowBytes/4 {
		amount, c.uploaded = c.uploaded, 0
	}
	c.mu.Unlock()
	c.out.credit(0, amount)
}

func (c *caller) takeReset(id uint32, code http2.ErrCode) {
	c.mu.Lock()
	s := c.streams[id]
	if s != nil {
		c.forgetLocked(s)
	}
	c.mu.Unlock()
	if s != nil && s.server != nil {
		s.server.out.reset(id, code)
	}
}

// resetFromHere ends a stream whose frames are ill-formed, on both sides.
func (c *caller) resetFromHere(id uint32, code http2.ErrCode) {
	c.takeReset(id, code)
	c.mu.Lock()
	c.lastID = max(c.lastID, id)
	c.mu.Unlock()
	c.out.reset(id, code)
}

func (c *caller) takeCredit(id, amount uint32) {
	c.mu.Lock()
	if id == 0 {
		c.window += int64(amount)
		c.room.Broadcast()
		c.mu.Unlock()
		return
	}
	s := c.streams[id]
	c.mu.Unlock()
	if s != nil && s.server != nil {
		s.server.out.credit(id, int64(amount))
	}
}

func (c *caller) takeSettings(f *http2.SettingsFrame) {
	if f.IsAck() {
		return
	}
	if size, ok := f.Value(http2.SettingHeaderTableSize); ok {
		c.out.setTableSize(size)
	}
	if window, ok := f.Value(http2.SettingInitialWindowSize); ok {
		c.mu.Lock()
		c.streamWindow = window
		servers := c.servers
		c.mu.Unlock()
		for _, s := range servers {
			s.out.do(func(w *http2.Framer) error {
				return w.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: window})
			})
		}
	}
	c.out.do(func(w *http2.Framer) error { return w.WriteSettingsAck() })
}

// forgetLocked takes a stream out. Preconditions: c.mu is held.
func (c *caller) forgetLocked(s *stream) {
	if s.gone {
		return
	}
	s.gone = true
	s.finish()
	delete(c.streams, s.id)
	if s.server != nil {
		s.server.open--
	}
	c.room.Broadcast()
	if c.refuses && len(c.streams) == 0 {
		// In its own goroutine: what has just been written must go out first.
		c.loops.Go(func() { c.out.flush(); c.close() })
	}
}

// forgetIfDoneLocked takes a stream out when both sides have sent their last.
// Preconditions: c.mu is held.
func (c *caller) forgetIfDoneLocked(s *stream) {
	if s.callerDone && s.serverDone && s.queued == 0 {
		c.forgetLocked(s)
	}
}

// answerHere ends a call with a status of the relay's own, and reports whether
// it was still in flight.
func (c *caller) answerHere(s *stream, code codes.Code, message string) bool {
	c.out.mu.Lock()
	c.mu.Lock()
	if s.gone || s.serverDone {
		c.mu.Unlock()
		c.out.mu.Unlock()
		return false
	}
	answering, callerDone := s.answering, s.callerDone
	c.mu.Unlock()
	c.out.headersLocked(s.id, statusFields(answering, code, message), true)
	if !callerDone {
		// Nothing more is wanted of the request (RFC 9113, section 8.1).
		_ = c.out.framer.WriteRSTStream(s.id, http2.ErrCodeNo) //nolint:errcheck // see output
	}
	c.out.mu.Unlock()
	c.mu.Lock()
	c.forgetLocked(s)
	c.mu.Unlock()
	c.out.flush()
	return true
}

// statusFields are the trailer of a call that ends here, or the whole response
// if its header has not gone out (gRPC over HTTP/2, "Trailers-Only").
func statusFields(answering bool, code codes.Code, message string) []hpack.HeaderField {
	var fields []hpack.HeaderField
	if !answering {
		fields = append(fields, hpack.HeaderField{Name: ":status", Value: "200"}, hpack.HeaderField{Name: "content-type", Value: "application/grpc"})
	}
	return append(fields,
		hpack.HeaderField{Name: "grpc-status", Value: strconv.Itoa(int(code))},
		hpack.HeaderField{Name: "grpc-message", Value: url.PathEscape(message)})
}
