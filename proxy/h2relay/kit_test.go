package h2relay_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/cleave-cri/cleave/proxy/h2relay"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds every wait of a test.
const patience = 10 * time.Second

// world is a relay whose peers are the test's.
type world struct {
	t     testing.TB
	relay *h2relay.Relay
	// servers and others are the far ends of the connections that the relay
	// makes to the server behind and to the other.
	servers, others chan net.Conn
	// down makes the server behind unreachable.
	down            atomic.Bool
	calls, inFlight atomic.Int64
	served          sync.WaitGroup

	mu    sync.Mutex
	conns []net.Conn // guarded by mu
	// statuses are those of calls that have ended, with their methods; guarded by mu.
	statuses []string
}

var errDown = errors.New("nobody listens")

// newWorld returns a relay. At the end of the test all connections are closed, and
// then nothing may be left: no goroutine of a caller, no call in flight.
func newWorld(t testing.TB) *world {
	w := &world{t: t, servers: make(chan net.Conn, 1000), others: make(chan net.Conn, 1000)}
	dialTo := func(far chan net.Conn) (net.Conn, error) {
		here, there := w.pair()
		far <- there
		return here, nil
	}
	w.relay = h2relay.New(h2relay.Config{
		Dial: func(context.Context) (net.Conn, error) {
			if w.down.Load() {
				return nil, errDown
			}
			return dialTo(w.servers)
		},
		DialOther: func() (net.Conn, error) { return dialTo(w.others) },
		Other:     func(method string) bool { return strings.HasPrefix(method, "/other/") },
		Endless:   func(method string) bool { return strings.HasSuffix(method, "/endless") },
		Begin: func(method string) func(int) {
			w.calls.Add(1)
			w.inFlight.Add(1)
			var ended atomic.Bool
			return func(code int) {
				w.mu.Lock()
				w.statuses = append(w.statuses, fmt.Sprintf("%s %d", method, code))
				w.mu.Unlock()
				if ended.Swap(true) {
					t.Error("a call was counted as ended twice")
				}
				w.inFlight.Add(-1)
			}
		},
		Peer: "the runtime",
		Log:  zap.NewNop(),
	})
	t.Cleanup(func() {
		w.mu.Lock()
		for _, c := range w.conns {
			_ = c.Close() //nolint:errcheck // may be closed
		}
		w.mu.Unlock()
		w.served.Wait()
		if n := w.inFlight.Load(); n != 0 {
			t.Errorf("%d calls in flight after all connections have ended", n)
		}
	})
	return w
}

// pair returns two connected unix sockets, which are closed at the end.
func (w *world) pair() (a, b net.Conn) {
	w.t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC|syscall.SOCK_NONBLOCK, 0)
	if err != nil {
		w.t.Fatal(err)
	}
	ends := make([]net.Conn, 2)
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair")
		if ends[i], err = net.FileConn(f); err != nil {
			w.t.Fatal(err)
		}
		_ = f.Close() //nolint:errcheck // duplicated
	}
	w.mu.Lock()
	w.conns = append(w.conns, ends...)
	w.mu.Unlock()
	return ends[0], ends[1]
}

// connect returns the caller's end of a connection that the relay serves.
func (w *world) connect() net.Conn {
	here, there := w.pair()
	taken := make(chan struct{})
	w.served.Go(func() { w.relay.ServeConn(there, func() { close(taken) }) })
	<-taken
	return here
}

// caller returns a caller that has greeted, with settings of its own.
func (w *world) caller(settings ...http2.Setting) *peer {
	p := newPeer(w.t, w.connect())
	p.greet(settings...)
	return p
}

func (p *peer) greet(settings ...http2.Setting) {
	p.t.Helper()
	p.raw([]byte(http2.ClientPreface))
	p.must(p.f.WriteSettings(settings...))
}

// server returns the server's end of the next connection to the server behind,
// when its settings are sent.
func (w *world) server(settings ...http2.Setting) *peer {
	w.t.Helper()
	p := newPeer(w.t, next(w.t, w.servers))
	p.accept(settings...)
	return p
}

// accept reads what callers begin with and sends the server's settings.
func (p *peer) accept(settings ...http2.Setting) {
	p.t.Helper()
	p.preface()
	p.settings(settings...)
}

func (p *peer) preface() {
	p.t.Helper()
	preface := make([]byte, len(http2.ClientPreface))
	p.deadline()
	if _, err := io.ReadFull(p.conn, preface); err != nil || string(preface) != http2.ClientPreface {
		p.t.Fatalf("the relay begins with %q, %v", preface, err)
	}
}

func (p *peer) settings(settings ...http2.Setting) {
	p.t.Helper()
	p.must(p.f.WriteSettings(settings...))
}

func next[T any](t testing.TB, from <-chan T) T {
	t.Helper()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case v := <-from:
		return v
	case <-timer.C:
		t.Fatalf("no %T came within %v", *new(T), patience)
		panic("not reached")
	}
}

// peer is one end of an HTTP/2 connection, frame by frame.
type peer struct {
	t     testing.TB
	conn  net.Conn
	f     *http2.Framer
	enc   *hpack.Encoder
	block bytes.Buffer
}

func newPeer(t testing.TB, conn net.Conn) *peer {
	p := &peer{t: t, conn: conn, f: http2.NewFramer(conn, conn)}
	p.f.AllowIllegalWrites = true
	p.f.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	p.enc = hpack.NewEncoder(&p.block)
	return p
}

func (p *peer) deadline() { p.must(p.conn.SetReadDeadline(time.Now().Add(patience))) }

func (p *peer) must(err error) {
	p.t.Helper()
	if err != nil {
		p.t.Fatal(err)
	}
}

func (p *peer) raw(b []byte) {
	p.t.Helper()
	_, err := p.conn.Write(b)
	p.must(err)
}

// headers sends a header of names and values by turns, in frames of 16 KiB.
func (p *peer) headers(id uint32, end bool, namesAndValues ...string) {
	p.t.Helper()
	p.block.Reset()
	for i := 0; i < len(namesAndValues); i += 2 {
		p.must(p.enc.WriteField(hpack.HeaderField{Name: namesAndValues[i], Value: namesAndValues[i+1]}))
	}
	const most = 16 << 10
	fragment := p.block.Next(most)
	p.must(p.f.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: fragment, EndStream: end, EndHeaders: p.block.Len() == 0}))
	for p.block.Len() > 0 {
		fragment := p.block.Next(most)
		p.must(p.f.WriteContinuation(id, p.block.Len() == 0, fragment))
	}
}

// call sends the header of a call.
func (p *peer) call(id uint32, method string, end bool, more ...string) {
	p.t.Helper()
	p.headers(id, end, append([]string{":method", "POST", ":scheme", "http", ":path", method, ":authority", "localhost",
		"content-type", "application/grpc", "te", "trailers"}, more...)...)
}

// answer sends a whole response.
func (p *peer) answer(id uint32, payload string) {
	p.t.Helper()
	p.headers(id, false, ":status", "200", "content-type", "application/grpc")
	p.must(p.f.WriteData(id, false, []byte(payload)))
	p.headers(id, true, "grpc-status", "0")
}

// event is a frame, copied.
type event struct {
	kind     http2.FrameType
	id       uint32
	end, ack bool
	fields   map[string]string
	data     []byte
	code     http2.ErrCode
	amount   uint32
	last     uint32
	settings map[http2.SettingID]uint32
	ping     [8]byte
}

// read returns the next frame, or why there is none.
func (p *peer) read() (event, error) {
	p.deadline()
	frame, err := p.f.ReadFrame()
	if err != nil {
		return event{}, err
	}
	e := event{kind: frame.Header().Type, id: frame.Header().StreamID}
	switch f := frame.(type) {
	case *http2.MetaHeadersFrame:
		e.end = f.StreamEnded()
		e.fields = map[string]string{}
		for _, h := range f.Fields {
			e.fields[h.Name] = h.Value
		}
	case *http2.DataFrame:
		e.end, e.data = f.StreamEnded(), bytes.Clone(f.Data())
	case *http2.RSTStreamFrame:
		e.code = f.ErrCode
	case *http2.GoAwayFrame:
		e.code, e.last = f.ErrCode, f.LastStreamID
	case *http2.WindowUpdateFrame:
		e.amount = f.Increment
	case *http2.PingFrame:
		e.ack, e.ping = f.IsAck(), f.Data
	case *http2.SettingsFrame:
		e.ack = f.IsAck()
		e.settings = map[http2.SettingID]uint32{}
		for i := range f.NumSettings() {
			e.settings[f.Setting(i).ID] = f.Setting(i).Val
		}
	}
	return e, nil
}

// until reads up to the first frame that fits and returns it.
func (p *peer) until(what string, fits func(event) bool) event {
	p.t.Helper()
	for {
		e, err := p.read()
		if err != nil {
			p.t.Fatalf("wait for %s: %v", what, err)
		}
		if fits(e) {
			return e
		}
	}
}

func (p *peer) untilKind(kind http2.FrameType, id uint32) event {
	p.t.Helper()
	return p.until(kind.String(), func(e event) bool { return e.kind == kind && e.id == id && !e.ack })
}

// answered reads a call's answer and returns its last header and all its bytes.
func (p *peer) answered(id uint32) (fields map[string]string, data []byte) {
	p.t.Helper()
	fields = map[string]string{}
	p.until("an answer", func(e event) bool {
		if e.id != id {
			return false
		}
		if e.kind == http2.FrameRSTStream {
			p.t.Fatalf("stream %d was reset: %v", id, e.code)
		}
		for k, v := range e.fields {
			fields[k] = v
		}
		data = append(data, e.data...)
		return e.end
	})
	return fields, data
}

// ends reads until the connection ends and returns the last frame before.
func (p *peer) ends() (last event) {
	p.t.Helper()
	for {
		e, err := p.read()
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			p.t.Fatalf("the connection does not end")
		case err != nil:
			return last
		}
		last = e
	}
}

// works checks that a connection serves a call from end to end.
func works(t testing.TB, caller, server *peer, id uint32) {
	t.Helper()
	caller.call(id, "/test/works", true)
	server.untilKind(http2.FrameHeaders, id)
	server.answer(id, "fine")
	if fields, data := caller.answered(id); string(data) != "fine" || fields["grpc-status"] != "0" {
		t.Fatalf("stream %d: got %q %v", id, data, fields)
	}
}
