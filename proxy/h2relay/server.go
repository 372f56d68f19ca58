package h2relay

import (
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"time"

	"go.uber.org/zap"
	"golang.org/x/net/http2"
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
	// queue holds what callers sent and the server has no room for. The
	// caller's own window bounds it.
	queue []upload
	// open is how many calls are in flight on it.
	open int
	// ended is why the connection is over, nil before.
	ended error

	// consumed is what was passed on of its DATA and not yet given back to its
	// window. Used by its reading goroutine only.
	consumed int64
}

// upload is a part of a request that waits.
type upload struct {
	stream  *stream
	payload []byte
	size    int64
	end     bool
}

// connect makes a connection the one for new calls, and reads it in a goroutine
// of its own. place is where the caller keeps it.
func (c *caller) connect(conn net.Conn, place **server, name string) *server {
	s := &server{
		caller: c, conn: conn, name: name,
		in: newInput(conn), out: newOutput(conn),
		window: initialWindow, streamWindow: initialWindow,
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
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		err = errors.New("the connection ended before the answer")
	}
	c := s.caller
	_ = s.conn.Close() //nolint:errcheck // it is over
	c.mu.Lock()
	s.ended = err
	s.leaveLocked()
	c.servers = slices.DeleteFunc(slices.Clone(c.servers), func(other *server) bool { return other == s })
	var streams []*stream
	for _, st := range c.streams {
		if st.server == s {
			streams = append(streams, st)
		}
	}
	s.queue = nil
	c.mu.Unlock()
	for _, st := range streams {
		c.answerHere(st, codes.Unavailable, fmt.Sprintf("%s: %v", s.name, err))
	}
}

// leaveLocked gives no new calls to the server. Preconditions: caller.mu is held.
func (s *server) leaveLocked() {
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
		frame, err := s.in.framer.ReadFrame()
		var streamErr http2.StreamError
		switch {
		case errors.As(err, &streamErr):
			s.resetFromHere(streamErr.StreamID, streamErr.Code)
			continue
		case err != nil && !greeted:
			return fmt.Errorf("it does not speak HTTP/2: %w", err)
		case err != nil:
			return err
		}
		if _, ok := frame.(*http2.SettingsFrame); ok && !greeted {
			greeted = true
			if err := s.conn.SetReadDeadline(time.Time{}); err != nil {
				return err
			}
		}
		s.take(frame)
	}
}

// take acts on one of the server's frames.
func (s *server) take(frame http2.Frame) {
	switch f := frame.(type) {
	case *http2.MetaHeadersFrame:
		s.takeHeaders(f)
	case *http2.DataFrame:
		s.takeData(f)
	case *http2.RSTStreamFrame:
		s.takeReset(f.StreamID, f.ErrCode)
	case *http2.WindowUpdateFrame:
		s.takeCredit(f.StreamID, f.Increment)
	case *http2.SettingsFrame:
		s.takeSettings(f)
	case *http2.PingFrame:
		if !f.IsAck() {
			s.out.do(func(w *http2.Framer) error { return w.WritePing(true, f.Data) })
		}
	case *http2.GoAwayFrame:
		s.takeGoAway(f.LastStreamID)
	}
}

// stream returns a call in flight on this server, nil if it is over.
func (s *server) stream(id uint32) *stream {
	c := s.caller
	c.mu.Lock()
	defer c.mu.Unlock()
	if st := c.streams[id]; st != nil && st.server == s {
		return st
	}
	return nil
}

func (s *server) takeHeaders(f *http2.MetaHeadersFrame) {
	st := s.stream(f.StreamID)
	if st == nil {
		return
	}
	c := s.caller
	c.out.mu.Lock()
	defer c.out.mu.Unlock()
	c.mu.Lock()
	gone := st.gone
	st.answering = true
	c.mu.Unlock()
	if gone {
		return
	}
	c.out.headersLocked(st.id, f.Fields, f.StreamEnded())
	if f.StreamEnded() {
		c.serverDone(st)
	}
}

// serverDone notes that the response is whole.
func (c *caller) serverDone(st *stream) {
	c.mu.Lock()
	defer c.mu.Unlock()
	st.serverDone = true
	st.finish()
	c.forgetIfDoneLocked(st)
}

func (s *server) takeData(f *http2.DataFrame) {
	size, payload := int64(f.Length), f.Data()
	c := s.caller
	st := s.stream(f.StreamID)
	for st != nil && len(payload) > 0 {
		n := s.takeRoom(st, len(payload))
		if n == 0 {
			st = nil // it has ended meanwhile
			break
		}
		c.write(st, payload[:n], f.StreamEnded() && n == len(payload))
		payload = payload[n:]
	}
	if st != nil && f.StreamEnded() && len(f.Data()) == 0 {
		c.write(st, nil, true)
	}
	if st != nil {
		// Padding does not go on, so the caller can't give it back.
		s.out.credit(st.id, size-int64(len(f.Data())))
	}
	s.consumed += size
	if s.consumed >= serverWindowBytes/4 {
		s.out.credit(0, s.consumed)
		s.consumed = 0
	}
}

// write passes a part of a response on.
func (c *caller) write(st *stream, payload []byte, end bool) {
	c.out.mu.Lock()
	defer c.out.mu.Unlock()
	c.mu.Lock()
	gone := st.gone
	c.mu.Unlock()
	if gone {
		return
	}
	_ = c.out.framer.WriteData(st.id, end, payload) //nolint:errcheck // see output
	if end {
		c.serverDone(st)
	}
}

// takeRoom waits until the caller's window has room and takes up to want bytes of
// it. It returns 0 if the call has ended meanwhile.
func (s *server) takeRoom(st *stream, want int) int {
	c := s.caller
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.window <= 0 && !st.gone {
		// What waits in the buffers is what the caller would make room for.
		c.mu.Unlock()
		c.out.flush()
		s.out.flush()
		c.mu.Lock()
	}
	for c.window <= 0 && !st.gone {
		c.room.Wait()
	}
	if st.gone {
		return 0
	}
	n := min(int64(want), c.window)
	c.window -= n
	return int(n)
}

func (s *server) takeReset(id uint32, code http2.ErrCode) {
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
}

// resetFromHere ends a stream whose frames are ill-formed, on both sides.
func (s *server) resetFromHere(id uint32, code http2.ErrCode) {
	s.out.reset(id, code)
	s.takeReset(id, code)
}

func (s *server) takeCredit(id, amount uint32) {
	c := s.caller
	if id != 0 {
		c.mu.Lock()
		st := c.streams[id]
		give := int64(amount)
		if st != nil && st.server == s {
			paid := min(st.debt, give)
			st.debt -= paid
			give -= paid
		} else {
			give = 0
		}
		c.mu.Unlock()
		c.out.credit(id, give)
		return
	}
	c.mu.Lock()
	s.window += int64(amount)
	c.mu.Unlock()
	s.sendQueued()
}

// sendQueued sends what has waited, as far as there is room now. Only the
// server's reading goroutine calls it, so the order of a stream's frames stays.
func (s *server) sendQueued() {
	c := s.caller
	for {
		c.mu.Lock()
		if len(s.queue) == 0 {
			c.mu.Unlock()
			return
		}
		head := s.queue[0]
		if !head.stream.gone && s.window < int64(len(head.payload)) {
			c.mu.Unlock()
			return
		}
		gone := head.stream.gone
		if !gone {
			s.window -= int64(len(head.payload))
		}
		c.mu.Unlock()
		// It stays in the queue until it is written, so that nothing overtakes it.
		if !gone {
			s.out.data(head.stream.id, head.end, head.payload)
		}
		c.mu.Lock()
		s.queue = s.queue[1:]
		head.stream.queued--
		if !head.stream.gone {
			c.forgetIfDoneLocked(head.stream)
		}
		c.mu.Unlock()
		c.creditUploads(head.size)
	}
}

func (s *server) takeSettings(f *http2.SettingsFrame) {
	if f.IsAck() {
		return
	}
	c := s.caller
	if size, ok := f.Value(http2.SettingHeaderTableSize); ok {
		s.out.setTableSize(size)
	}
	if window, ok := f.Value(http2.SettingInitialWindowSize); ok {
		type credit struct {
			id     uint32
			amount int64
		}
		var credits []credit
		c.mu.Lock()
		delta := int64(window) - s.streamWindow
		s.streamWindow = int64(window)
		for id, st := range c.streams {
			if st.server != s {
				continue
			}
			paid := min(st.debt, max(delta, 0))
			st.debt += -paid - min(delta, 0)
			if delta-paid > 0 {
				credits = append(credits, credit{id, delta - paid})
			}
		}
		c.mu.Unlock()
		for _, cr := range credits {
			c.out.credit(cr.id, cr.amount)
		}
	}
	if limit, ok := f.Value(http2.SettingMaxConcurrentStreams); ok && s.name == c.relay.cfg.Peer {
		c.out.do(func(w *http2.Framer) error {
			return w.WriteSettings(http2.Setting{ID: http2.SettingMaxConcurrentStreams, Val: limit})
		})
	}
	s.out.do(func(w *http2.Framer) error { return w.WriteSettingsAck() })
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
	if idle {
		_ = s.conn.Close() //nolint:errcheck // nothing is on it
	}
}
