package h2relay

import (
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"go.uber.org/zap"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc/codes"
)

// server is one connection to a server behind a caller.
type server struct {
	caller *caller
	conn   net.Conn
	name   string
	in     *input
	out    *output

	// Guarded by caller.mu.

	// window is how many bytes of DATA the server takes now.
	window int64
	// streamWindow is the server's SETTINGS_INITIAL_WINDOW_SIZE.
	streamWindow int64
	// queue are the streams with bytes of the caller's that the server has no
	// room for.
	queue []*stream
	// told are the SETTINGS that the server has not acknowledged, in order: the
	// caller's that wait for it, nil for those that nobody waits for.
	told []*settling
	// open is how many calls are in flight on it.
	open int
	// leaving says that it takes no new calls.
	leaving bool

	// consumed is what was passed on of its DATA and not yet given back to its
	// window. Used by its reading goroutine only.
	consumed int64
}

// connect makes a connection the one for new calls, and reads it in a goroutine
// of its own. place is where the caller keeps it.
func (c *caller) connect(conn net.Conn, place **server, name string) *server {
	roomy(conn)
	s := &server{
		caller: c, conn: conn, name: name,
		in: newInput(conn), out: newOutput(conn),
		window: initialWindow, streamWindow: initialWindow,
		told: []*settling{nil},
	}
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		_ = conn.Close() //nolint:errcheck // it is over
		return nil
	}
	*place = s
	c.servers = append(slices.Clip(c.servers), s)
	window := c.streamWindow
	c.mu.Unlock()

	s.out.do(func(f *http2.Framer) error {
		if _, err := s.out.buffer.WriteString(http2.ClientPreface); err != nil {
			return err
		}
		if err := f.WriteSettings(
			http2.Setting{ID: http2.SettingEnablePush, Val: 0},
			http2.Setting{ID: http2.SettingInitialWindowSize, Val: window},
		); err != nil {
			return err
		}
		return f.WriteWindowUpdate(0, serverWindowBytes-initialWindow)
	})
	c.loops.Go(s.serve)
	return s
}

// serve reads the server's frames until the connection ends, and then ends the
// calls that were on it.
func (s *server) serve() {
	err := s.read()
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET):
		err = errors.New("the connection ended before the answer")
	}
	c := s.caller
	_ = s.conn.Close() //nolint:errcheck // it is over
	c.mu.Lock()
	s.leaveLocked()
	c.servers = slices.DeleteFunc(slices.Clone(c.servers), func(other *server) bool { return other == s })
	var streams []*stream
	for _, st := range c.streams {
		if st.server == s {
			streams = append(streams, st)
		}
	}
	for _, told := range s.told {
		if told != nil {
			told.servers--
		}
	}
	s.told = nil
	c.mu.Unlock()
	c.acknowledge()
	for _, st := range streams {
		if !c.answerHere(st, codes.Unavailable, fmt.Sprintf("%s: %v", s.name, err)) {
			// It has its answer, only the request was not at its end.
			s.takeReset(st.id, http2.ErrCodeNo)
		}
	}
	c.out.flush()
}

// hangUp ends the connection, on which nothing is any more.
func (s *server) hangUp() {
	s.out.flush()
	_ = s.conn.Close() //nolint:errcheck // it is over
}

// begin takes a new call: it is in flight and its header on the way, in one go, so
// that no reset comes first. It reports false if another server is needed.
func (s *server) begin(st *stream, fields []hpack.HeaderField) bool {
	c := s.caller
	s.out.mu.Lock()
	c.mu.Lock()
	if s.leaving {
		c.mu.Unlock()
		s.out.mu.Unlock()
		return false
	}
	if !c.admitLocked(st) {
		c.mu.Unlock()
		s.out.mu.Unlock()
		return true
	}
	if c.drainBegan && st.endless {
		c.mu.Unlock()
		s.out.mu.Unlock()
		c.answerHere(st, codes.Unavailable, messageStopping)
		return true
	}
	st.server = s
	s.open++
	st.room = s.streamWindow
	// The caller counts with the window that all begin with.
	extra := s.streamWindow - initialWindow
	st.debt = max(-extra, 0)
	end := st.callerDone
	c.mu.Unlock()
	s.out.headersLocked(st.id, fields, end)
	s.out.mu.Unlock()
	c.out.credit(st.id, extra)
	return true
}

// leaveLocked gives no new calls to the server. Preconditions: caller.mu is held.
func (s *server) leaveLocked() {
	s.leaving = true
	if s.caller.main == s {
		s.caller.main = nil
	}
	if s.caller.other == s {
		s.caller.other = nil
	}
}

func (s *server) read() (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v", p)
			s.caller.relay.cfg.Log.Error("forwarding broke and this connection ends, report this as a bug of cleave", zap.Any("panic", p), zap.Stack("stack"))
		}
	}()
	if err := s.conn.SetReadDeadline(time.Now().Add(settingsTimeout)); err != nil {
		return err
	}
	greeted := false
	for {
		if !s.in.ready() {
			s.caller.out.flush()
			s.out.flush()
		}
		frame, err := s.in.next()
		if err != nil {
			var streamErr http2.StreamError
			switch {
			case !greeted:
				return fmt.Errorf("it does not speak HTTP/2: %w", err)
			case !errors.As(err, &streamErr):
				return s.breakOff(err)
			}
			if s.takeReset(streamErr.StreamID, streamErr.Code) {
				s.out.reset(streamErr.StreamID, streamErr.Code)
			}
			continue
		}
		if !greeted {
			if settings, ok := frame.(*http2.SettingsFrame); !ok || settings.IsAck() {
				return errors.New("it does not speak HTTP/2: it does not begin with its settings")
			}
			greeted = true
			if err := s.conn.SetReadDeadline(time.Time{}); err != nil {
				return err
			}
		}
		if err := s.take(frame); err != nil {
			return s.breakOff(err)
		}
	}
}

// breakOff tells the server why the connection ends, if it is its fault.
func (s *server) breakOff(err error) error {
	var connErr http2.ConnectionError
	if errors.As(err, &connErr) {
		s.out.do(func(f *http2.Framer) error { return f.WriteGoAway(0, http2.ErrCode(connErr), nil) })
		s.out.flush()
	}
	return err
}

// take acts on one of the server's frames; nil stands for DATA.
func (s *server) take(frame http2.Frame) error {
	switch f := frame.(type) {
	case nil:
		s.takeData(s.in.data)
	case *http2.MetaHeadersFrame:
		s.takeHeaders(f)
	case *http2.RSTStreamFrame:
		s.takeReset(f.StreamID, f.ErrCode)
	case *http2.WindowUpdateFrame:
		return s.takeCredit(f.StreamID, f.Increment)
	case *http2.SettingsFrame:
		return s.takeSettings(f)
	case *http2.PingFrame:
		if !f.IsAck() {
			s.out.do(func(w *http2.Framer) error { return w.WritePing(true, f.Data) })
		}
	case *http2.GoAwayFrame:
		s.takeGoAway(f.LastStreamID)
	}
	return nil
}

// streamLocked returns a call in flight on this server whose response goes on,
// nil if there is none. Preconditions: caller.mu is held.
func (s *server) streamLocked(id uint32) *stream {
	if st := s.caller.streams[id]; st != nil && st.server == s && !st.serverDone {
		return st
	}
	return nil
}

func (s *server) takeHeaders(f *http2.MetaHeadersFrame) {
	c := s.caller
	c.out.mu.Lock()
	defer c.out.mu.Unlock()
	c.mu.Lock()
	st := s.streamLocked(f.StreamID)
	if st == nil {
		c.mu.Unlock()
		return
	}
	if !strings.HasPrefix(f.PseudoValue("status"), "1") { // RFC 9110, section 15.2
		st.answering = true
	}
	if f.StreamEnded() {
		st.status = statusIn(f.Fields)
		c.serverDoneLocked(st)
	}
	c.mu.Unlock()
	c.out.headersLocked(f.StreamID, f.Fields, f.StreamEnded())
}

// statusIn is the status in trailers, NoStatus if there is none that is a number.
func statusIn(fields []hpack.HeaderField) int {
	for _, f := range fields {
		if f.Name == "grpc-status" {
			if code, err := strconv.Atoi(f.Value); err == nil && code >= 0 {
				return code
			}
			break
		}
	}
	return NoStatus
}

// serverDoneLocked notes that the response is whole; its last frame is written
// before c.out is unlocked. Preconditions: c.out.mu and c.mu are held.
func (c *caller) serverDoneLocked(st *stream) {
	st.serverDone = true
	st.finish()
	c.forgetIfDoneLocked(st)
}

func (s *server) takeData(f dataFrame) {
	if f.run == nil || !s.passRun(f) {
		for one := range f.each() {
			s.passPieces(one)
		}
	}
	s.consumed += f.size
	if s.consumed >= serverWindowBytes/4 {
		s.out.credit(0, s.consumed)
		s.consumed = 0
	}
}

// passRun writes frames of a response as they are, and reports whether the caller
// had room for all of them.
func (s *server) passRun(f dataFrame) bool {
	c := s.caller
	c.out.mu.Lock()
	defer c.out.mu.Unlock()
	c.mu.Lock()
	if s.streamLocked(f.id) == nil {
		c.mu.Unlock()
		return true // nobody wants it
	}
	if f.size > c.window {
		c.mu.Unlock()
		return false
	}
	c.window -= f.size
	c.mu.Unlock()
	c.out.framesLocked(f.run)
	return true
}

// passPieces writes one frame of a response in as many as the caller's room needs.
func (s *server) passPieces(f dataFrame) {
	payload := f.payload
	wanted := len(payload) > 0 || f.end
	for wanted {
		var n int
		n, wanted = s.pass(f.id, payload, f.end)
		payload = payload[n:]
		if len(payload) == 0 {
			break
		}
	}
	if padding := f.size - int64(len(f.payload)); padding > 0 && !f.end {
		// It does not go on, so the caller can't give it back.
		s.out.credit(f.id, padding)
	}
}

// pass writes as much of a response's bytes as the caller has room for, but at
// least one: it waits for room. It reports false if the call has ended meanwhile.
func (s *server) pass(id uint32, payload []byte, end bool) (n int, ok bool) {
	c := s.caller
	for {
		c.out.mu.Lock()
		c.mu.Lock()
		st := s.streamLocked(id)
		if st == nil {
			c.mu.Unlock()
			c.out.mu.Unlock()
			return 0, false
		}
		if c.window > 0 || len(payload) == 0 {
			n := int(min(int64(len(payload)), max(c.window, 0)))
			c.window -= int64(n)
			last := end && n == len(payload)
			if last {
				c.serverDoneLocked(st)
			}
			c.mu.Unlock()
			c.out.dataLocked(id, last, payload[:n])
			c.out.mu.Unlock()
			return n, true
		}
		c.mu.Unlock()
		c.out.mu.Unlock()
		s.awaitRoom(id)
	}
}

// awaitRoom waits until the caller's window has room or the call has ended.
func (s *server) awaitRoom(id uint32) {
	c := s.caller
	// What waits in the buffers is what the caller would make room for.
	c.out.flush()
	s.out.flush()
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.window <= 0 && s.streamLocked(id) != nil {
		c.room.Wait()
	}
}

// takeReset ends a call, and reports whether it was in flight.
func (s *server) takeReset(id uint32, code http2.ErrCode) bool {
	c := s.caller
	c.mu.Lock()
	st := c.streams[id]
	if st != nil && st.server == s {
		c.forgetLocked(st)
	} else {
		st = nil
	}
	c.mu.Unlock()
	if st != nil {
		c.out.reset(id, code)
	}
	c.creditUploads(0)
	return st != nil
}

func (s *server) takeCredit(id, amount uint32) error {
	c := s.caller
	if id == 0 {
		c.mu.Lock()
		s.window += int64(amount)
		over := s.window > windowMax
		c.mu.Unlock()
		if over {
			return http2.ConnectionError(http2.ErrCodeFlowControl)
		}
		s.sendWaiting()
		return nil
	}
	c.mu.Lock()
	st := c.streams[id]
	if st == nil || st.server != s {
		c.mu.Unlock()
		return nil
	}
	st.room += int64(amount)
	paid := min(st.debt, int64(amount))
	st.debt -= paid
	waits := len(st.waiting) > 0
	c.mu.Unlock()
	c.out.credit(id, int64(amount)-paid)
	if waits {
		s.sendWaiting()
	}
	return nil
}

// sendRun writes frames of a request as they are, and reports whether the server
// had room for all of them.
func (s *server) sendRun(st *stream, f dataFrame) bool {
	c := s.caller
	s.out.mu.Lock()
	defer s.out.mu.Unlock()
	c.mu.Lock()
	if st.gone {
		c.mu.Unlock()
		return true // nobody wants it
	}
	if len(st.waiting) > 0 || f.size > min(st.room, s.window) {
		c.mu.Unlock()
		return false
	}
	st.room -= f.size
	s.window -= f.size
	c.mu.Unlock()
	s.out.framesLocked(f.run)
	return true
}

// send writes a request's bytes, or keeps them until there is room. It reports
// whether they are done with: written, or not wanted any more.
func (s *server) send(st *stream, payload []byte, end bool) bool {
	c := s.caller
	size := int64(len(payload))
	s.out.mu.Lock()
	defer s.out.mu.Unlock()
	c.mu.Lock()
	if st.gone {
		c.mu.Unlock()
		return true
	}
	st.callerDone = end
	if len(st.waiting) > 0 || size > 0 && size > min(st.room, s.window) {
		if len(st.waiting) == 0 {
			s.queue = append(s.queue, st)
		}
		st.waiting = append(st.waiting, payload...)
		c.mu.Unlock()
		return false
	}
	st.room -= size
	s.window -= size
	c.forgetIfDoneLocked(st)
	c.mu.Unlock()
	s.out.dataLocked(st.id, end, payload)
	return true
}

// sendWaiting sends what has waited, as far as there is room now, a frame of each
// stream in turn.
func (s *server) sendWaiting() {
	for {
		n := s.sendNext()
		if n == 0 {
			return
		}
		s.caller.creditUploads(int64(n))
	}
}

// sendNext sends a frame of the first stream that waits and has room, and returns
// how many bytes it was.
func (s *server) sendNext() int {
	c := s.caller
	s.out.mu.Lock()
	defer s.out.mu.Unlock()
	c.mu.Lock()
	i := -1
	if s.window > 0 {
		i = slices.IndexFunc(s.queue, func(st *stream) bool { return st.room > 0 })
	}
	if i < 0 {
		c.mu.Unlock()
		return 0
	}
	st := s.queue[i]
	n := min(len(st.waiting), frameBytes, int(s.window), int(st.room))
	payload := st.waiting[:n]
	st.waiting = st.waiting[n:]
	st.room -= int64(n)
	s.window -= int64(n)
	s.queue = slices.Delete(s.queue, i, i+1)
	end := false
	if len(st.waiting) > 0 {
		s.queue = append(s.queue, st)
	} else {
		st.waiting = nil
		end = st.callerDone
		c.forgetIfDoneLocked(st)
	}
	c.mu.Unlock()
	s.out.dataLocked(st.id, end, payload)
	return n
}

func (s *server) takeSettings(f *http2.SettingsFrame) error {
	c := s.caller
	if f.IsAck() {
		c.mu.Lock()
		if len(s.told) > 0 {
			if s.told[0] != nil {
				s.told[0].servers--
			}
			s.told = s.told[1:]
		}
		c.mu.Unlock()
		c.acknowledge()
		return nil
	}
	if size, ok := lastSetting(f, http2.SettingHeaderTableSize); ok {
		s.out.setTableSize(size)
	}
	if window, ok := lastSetting(f, http2.SettingInitialWindowSize); ok {
		if window > windowMax {
			return http2.ConnectionError(http2.ErrCodeFlowControl)
		}
		s.takeStreamWindow(int64(window))
	}
	if limit, ok := lastSetting(f, http2.SettingMaxConcurrentStreams); ok && s.name == c.relay.cfg.Peer {
		c.out.do(func(w *http2.Framer) error {
			return w.WriteSettings(http2.Setting{ID: http2.SettingMaxConcurrentStreams, Val: limit})
		})
	}
	s.out.do(func(w *http2.Framer) error { return w.WriteSettingsAck() })
	return nil
}

// takeStreamWindow changes what the server takes on all its streams, and lets the
// caller know. The caller can't be told to send less than it counts with, so that
// becomes a debt, and what it sends meanwhile waits here.
func (s *server) takeStreamWindow(window int64) {
	c := s.caller
	credits := map[uint32]int64{}
	c.mu.Lock()
	delta := window - s.streamWindow
	s.streamWindow = window
	for id, st := range c.streams {
		if st.server != s {
			continue
		}
		st.room += delta
		st.debt -= delta
		if st.debt < 0 {
			credits[id], st.debt = -st.debt, 0
		}
	}
	c.mu.Unlock()
	for id, amount := range credits {
		c.out.credit(id, amount)
	}
	s.sendWaiting()
}

// takeGoAway gives the server no more calls, and tells callers which ones it did
// not take.
func (s *server) takeGoAway(last uint32) {
	c := s.caller
	c.mu.Lock()
	s.leaveLocked()
	var refused []uint32
	for id, st := range c.streams {
		if st.server == s && id > last {
			c.forgetLocked(st)
			refused = append(refused, id)
		}
	}
	idle := s.open == 0
	c.mu.Unlock()
	for _, id := range refused {
		c.out.reset(id, http2.ErrCodeRefusedStream)
	}
	c.creditUploads(0)
	if idle {
		s.hangUp()
	}
}
