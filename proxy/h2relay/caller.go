package h2relay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"slices"
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
	// mayUpload is how many bytes of DATA the caller may still send; guarded by mu.
	mayUpload int64
	// uploaded is what has been passed on of the caller's DATA and not yet
	// given back to its window; guarded by mu.
	uploaded int64
	// streamWindow is the caller's SETTINGS_INITIAL_WINDOW_SIZE; guarded by mu.
	streamWindow uint32
	// settling are the caller's SETTINGS that are not acknowledged, in order;
	// guarded by mu.
	settling []*settling
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
	// room is how many bytes of DATA the server takes on this stream now.
	room int64
	// waiting is what the caller sent and the server has no room for. While it
	// is not empty, the stream is in server.queue.
	waiting []byte
	// debt is what must not be given of the next credits for uploads, because
	// the caller counts with more than the server takes.
	debt int64
	// method is what is called, "/service/method".
	method string
	// counted ends the counting of the call, once; status is what it is then given.
	counted func(code int)
	status  int
}

// finish ends the counting of the call. Preconditions: caller.mu is held.
func (s *stream) finish() {
	if end := s.counted; end != nil {
		s.counted = nil
		end(s.status)
	}
}

// settling is a SETTINGS frame of the caller's. The caller may count with it once
// it is acknowledged, so where it lets servers send less they come first (RFC
// 9113, section 6.9.3).
type settling struct {
	// servers is how many have not acknowledged it; guarded by caller.mu.
	servers int
}

// settlingMax bounds how many SETTINGS of a caller wait for a server.
const settlingMax = 1000

// windowMax is the largest that a flow-control window may become (RFC 9113,
// section 6.9.1).
const windowMax = 1<<31 - 1

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
		mayUpload:    callerWindowBytes,
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
		frame, err := c.in.next()
		if err != nil {
			var streamErr http2.StreamError
			if !errors.As(err, &streamErr) {
				return c.breakOff(err)
			}
			c.resetFromHere(streamErr.StreamID, streamErr.Code)
			continue
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
	frame, err := c.in.next()
	if err != nil {
		return c.breakOff(err)
	}
	settings, ok := frame.(*http2.SettingsFrame)
	if !ok || settings.IsAck() {
		return c.breakOff(http2.ConnectionError(http2.ErrCodeProtocol))
	}
	if err := c.takeSettings(settings); err != nil {
		return c.breakOff(err)
	}
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

// take acts on one of the caller's frames; nil stands for DATA.
func (c *caller) take(frame http2.Frame) error {
	switch f := frame.(type) {
	case nil:
		return c.takeData(c.in.data)
	case *http2.MetaHeadersFrame:
		return c.takeHeaders(f)
	case *http2.RSTStreamFrame:
		c.takeReset(f.StreamID, f.ErrCode)
	case *http2.WindowUpdateFrame:
		return c.takeCredit(f.StreamID, f.Increment)
	case *http2.SettingsFrame:
		return c.takeSettings(f)
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
		timer := time.NewTimer(drainTimeout)
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
	// In one go with the frame, so that no call is taken that it says was not,
	// and the connection does not end before it is out.
	c.out.mu.Lock()
	c.mu.Lock()
	if c.refuses || c.closed || !c.drainBegan {
		c.mu.Unlock()
		c.out.mu.Unlock()
		return
	}
	c.refuses = true
	last, empty := c.lastID, len(c.streams) == 0
	c.mu.Unlock()
	_ = c.out.framer.WriteGoAway(last, http2.ErrCodeNo, nil) //nolint:errcheck // see output
	c.out.mu.Unlock()
	c.out.flush()
	if empty {
		c.close()
	}
}

// endEndless ends a call that does not end by itself.
func (c *caller) endEndless(s *stream) {
	if c.answerHere(s, codes.Unavailable, messageStopping) && s.server != nil {
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
	ended := s != nil && s.callerDone
	c.mu.Unlock()
	switch {
	case ended:
		c.resetFromHere(f.StreamID, http2.ErrCodeStreamClosed)
		return nil
	case s != nil && !f.StreamEnded():
		c.resetFromHere(f.StreamID, http2.ErrCodeProtocol)
		return nil
	case s != nil:
		// Trailers of a request, which gRPC does not have: only their end counts.
		c.sendData(s, nil, true)
		return nil
	case f.StreamID%2 == 0:
		return http2.ConnectionError(http2.ErrCodeProtocol)
	case f.StreamID <= last:
		// Of a call that has ended meanwhile (RFC 9113, section 5.1, "closed").
		c.out.reset(f.StreamID, http2.ErrCodeStreamClosed)
		return nil
	case refuses:
		return nil // the caller was told and makes the call again elsewhere
	}
	method := f.PseudoValue("path")
	s = &stream{id: f.StreamID, method: method, status: NoStatus, endless: c.relay.cfg.Endless(method), callerDone: f.StreamEnded()}
	for range routesMax {
		server := c.route(method)
		if server == nil {
			break
		}
		if server.begin(s, f.Fields) {
			return nil
		}
	}
	c.mu.Lock()
	taken := c.admitLocked(s)
	c.mu.Unlock()
	if taken {
		c.answerHere(s, codes.Unavailable, c.relay.cfg.Peer+": no connection")
	}
	return nil
}

// routesMax bounds how many servers a call is given to that then go away before
// they have it.
const routesMax = 3

// admitLocked makes a call one of those in flight, unless the caller was told
// that it is not taken. Preconditions: c.mu is held.
func (c *caller) admitLocked(s *stream) bool {
	if c.closed || c.refuses {
		return false
	}
	c.lastID = s.id
	s.counted = c.relay.cfg.Begin(s.method)
	c.streams[s.id] = s
	return true
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

func (c *caller) takeData(f dataFrame) error {
	c.mu.Lock()
	if f.size > c.mayUpload {
		c.mu.Unlock()
		return http2.ConnectionError(http2.ErrCodeFlowControl)
	}
	c.mayUpload -= f.size
	s := c.streams[f.id]
	ended := s != nil && s.callerDone
	c.mu.Unlock()
	switch {
	case ended:
		c.resetFromHere(f.id, http2.ErrCodeStreamClosed)
		fallthrough
	case s == nil:
		c.creditUploads(f.size)
		return nil
	}
	if f.run != nil && s.server.sendRun(s, f) {
		c.creditUploads(f.size)
		return nil
	}
	for one := range f.each() {
		c.takePieces(s, one)
	}
	return nil
}

// takePieces passes one frame of a request on.
func (c *caller) takePieces(s *stream, f dataFrame) {
	if padding := f.size - int64(len(f.payload)); padding > 0 {
		// It does not go on, so the server can't give it back.
		c.creditUploads(padding)
		if !f.end {
			c.out.credit(f.id, padding)
		}
	}
	c.sendData(s, f.payload, f.end)
}

// sendData passes a request's bytes on, or keeps them until the server has room.
// What is kept is bounded by the caller's window.
func (c *caller) sendData(s *stream, payload []byte, end bool) {
	if len(payload) == 0 && !end {
		return
	}
	if s.server.send(s, payload, end) {
		c.creditUploads(int64(len(payload)))
	} else {
		s.server.sendWaiting() // the part of it that there is room for
	}
}

// creditUploads gives the caller its window back, some at a time.
func (c *caller) creditUploads(size int64) {
	c.mu.Lock()
	c.uploaded += size
	amount := int64(0)
	if c.uploaded >= callerWindowBytes/4 {
		amount, c.uploaded = c.uploaded, 0
		c.mayUpload += amount
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
	c.creditUploads(0)
}

// resetFromHere ends a stream whose frames are ill-formed, on both sides.
func (c *caller) resetFromHere(id uint32, code http2.ErrCode) {
	c.takeReset(id, code)
	c.mu.Lock()
	c.lastID = max(c.lastID, id)
	c.mu.Unlock()
	c.out.reset(id, code)
}

func (c *caller) takeCredit(id, amount uint32) error {
	c.mu.Lock()
	if id == 0 {
		defer c.mu.Unlock()
		c.window += int64(amount)
		if c.window > windowMax {
			return http2.ConnectionError(http2.ErrCodeFlowControl)
		}
		c.room.Broadcast()
		return nil
	}
	s := c.streams[id]
	c.mu.Unlock()
	if s != nil && s.server != nil {
		s.server.out.credit(id, int64(amount))
	}
	return nil
}

func (c *caller) takeSettings(f *http2.SettingsFrame) error {
	if f.IsAck() {
		return nil
	}
	if size, ok := lastSetting(f, http2.SettingHeaderTableSize); ok {
		c.out.setTableSize(size)
	}
	window, ok := lastSetting(f, http2.SettingInitialWindowSize)
	if ok && window > windowMax {
		return http2.ConnectionError(http2.ErrCodeFlowControl)
	}
	c.mu.Lock()
	if len(c.settling) >= settlingMax {
		c.mu.Unlock()
		return http2.ConnectionError(http2.ErrCodeEnhanceYourCalm)
	}
	mine := &settling{}
	c.settling = append(c.settling, mine)
	var tell []*server
	if ok && window != c.streamWindow {
		tell = c.servers
		for _, s := range tell {
			if window < c.streamWindow {
				mine.servers++
				s.told = append(s.told, mine)
			} else {
				s.told = append(s.told, nil)
			}
		}
		c.streamWindow = window
	}
	c.mu.Unlock()
	for _, s := range tell {
		s.out.do(func(w *http2.Framer) error {
			return w.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: window})
		})
	}
	c.acknowledge()
	return nil
}

// acknowledge tells the caller which of its SETTINGS are in force.
func (c *caller) acknowledge() {
	c.out.mu.Lock()
	defer c.out.mu.Unlock()
	for {
		c.mu.Lock()
		if len(c.settling) == 0 || c.settling[0].servers > 0 {
			c.mu.Unlock()
			return
		}
		c.settling = c.settling[1:]
		c.mu.Unlock()
		_ = c.out.framer.WriteSettingsAck() //nolint:errcheck // see output
	}
}

// forgetLocked takes a stream out. What waits of its request is not sent; the
// caller gets it back with the next creditUploads, which has to follow.
// Preconditions: c.mu is held.
func (c *caller) forgetLocked(s *stream) {
	if s.gone {
		return
	}
	s.gone = true
	s.finish()
	delete(c.streams, s.id)
	if len(s.waiting) > 0 {
		c.uploaded += int64(len(s.waiting)) // whoever called gives it back
		s.waiting = nil
		s.server.queue = slices.DeleteFunc(s.server.queue, func(other *stream) bool { return other == s })
	}
	if s.server != nil {
		s.server.open--
		if s.server.leaving && s.server.open == 0 {
			c.loops.Go(s.server.hangUp)
		}
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
	if s.callerDone && s.serverDone && len(s.waiting) == 0 {
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
	s.status = int(code)
	c.forgetLocked(s) // before anybody else can write to it
	c.mu.Unlock()
	c.out.headersLocked(s.id, statusFields(answering, code, message), true)
	if !callerDone {
		// Nothing more is wanted of the request (RFC 9113, section 8.1).
		_ = c.out.framer.WriteRSTStream(s.id, http2.ErrCodeNo) //nolint:errcheck // see output
	}
	c.out.mu.Unlock()
	c.creditUploads(0)
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
