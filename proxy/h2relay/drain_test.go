package h2relay_test

import (
	"context"
	"errors"
	"sync"
	"testing"

	"golang.org/x/net/http2"
)

// drain begins and returns its result.
func (w *world) drain(ctx context.Context) <-chan error {
	done := make(chan error, 1)
	var ended sync.WaitGroup
	ended.Go(func() { done <- w.relay.Drain(ctx) })
	w.t.Cleanup(ended.Wait)
	return done
}

// TestDrain: callers in every state are told and leave, the calls that end by
// themselves are finished, those that don't are ended.
func TestDrain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	idle, silent, endless := w.caller(), newPeer(t, w.connect()), w.caller()
	endless.call(1, "/test/endless", true)
	events := w.server()
	events.untilKind(http2.FrameHeaders, 1)
	events.headers(1, false, ":status", "200")
	endless.untilKind(http2.FrameHeaders, 1)
	busy := w.caller()
	busy.call(1, "/test/long", true)
	server := w.server()
	server.untilKind(http2.FrameHeaders, 1)

	done := w.drain(t.Context())
	var pings [][8]byte
	for _, p := range []*peer{idle, endless, busy} {
		if e := p.untilKind(http2.FrameGoAway, 0); e.last != 1<<31-1 || e.code != http2.ErrCodeNo {
			t.Errorf("told %+v", e)
		}
		pings = append(pings, p.untilKind(http2.FramePing, 0).ping)
	}
	if e := endless.untilKind(http2.FrameHeaders, 1); !e.end || e.fields["grpc-status"] != "14" || e.fields[":status"] != "" {
		t.Errorf("the endless call ends with %+v", e)
	}
	events.untilKind(http2.FrameRSTStream, 1)
	// One that was on its way is served still, an endless one is not begun.
	busy.call(3, "/test/late", true)
	server.untilKind(http2.FrameHeaders, 3)
	busy.call(5, "/test/endless", true)
	if fields, _ := busy.answered(5); fields["grpc-status"] != "14" {
		t.Errorf("a late endless call: %v", fields)
	}
	for i, p := range []*peer{idle, endless, busy} {
		p.must(p.f.WritePing(true, pings[i]))
	}
	idle.ends()
	endless.ends()
	if e := busy.untilKind(http2.FrameGoAway, 0); e.last != 5 {
		t.Errorf("the last stream is %d, want 5", e.last)
	}
	// Not taken any more, and known to be not taken.
	busy.call(7, "/test/refused", true)
	busy.must(busy.f.WriteData(7, true, []byte("refused")))
	server.answer(3, "late")
	if _, data := busy.answered(3); string(data) != "late" {
		t.Errorf("got %q", data)
	}
	server.answer(1, "long")
	if _, data := busy.answered(1); string(data) != "long" {
		t.Errorf("got %q", data)
	}
	busy.ends()
	for e, err := server.read(); err == nil; e, err = server.read() {
		if e.id == 7 {
			t.Errorf("the refused call arrived: %+v", e)
		}
	}
	silent.ends() // after two seconds
	if err := next(t, done); err != nil {
		t.Error(err)
	}
}

// TestDrainWithoutPong: a caller that answers no pings is taken at its word after
// a while, and what it sent before it was told is either answered or refused.
func TestDrainWithoutPong(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	caller := w.caller()
	caller.call(1, "/test/call", true)
	server := w.server()
	server.untilKind(http2.FrameHeaders, 1)
	done := w.drain(t.Context())
	if e := caller.until("the last", func(e event) bool { return e.kind == http2.FrameGoAway && e.last != 1<<31-1 }); e.last != 1 {
		t.Errorf("the last stream is %d", e.last)
	}
	server.answer(1, "")
	caller.answered(1)
	caller.ends()
	if err := next(t, done); err != nil {
		t.Error(err)
	}
}

// TestAbort: when the time is over calls in flight get a status, in every state,
// and a caller that does not read holds up nobody.
func TestAbort(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	late := errors.New("time is over")

	half := w.caller()
	half.call(1, "/test/half", false)
	server := w.server()
	server.untilKind(http2.FrameHeaders, 1)
	server.headers(1, false, ":status", "200")
	half.untilKind(http2.FrameHeaders, 1)

	unreading := w.caller(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1<<31 - 1})
	unreading.must(unreading.f.WriteWindowUpdate(0, 1<<30))
	unreading.call(1, "/test/unread", true)
	flood := w.server()
	var flooding sync.WaitGroup
	defer func() { _ = flood.conn.Close(); flooding.Wait() }() //nolint:errcheck // the relay may have been first
	full := make(chan struct{})
	flooding.Go(func() { // until nothing goes any more
		frame := noise(16 << 10)
		for i := 0; ; i++ {
			if i == 15 { // more than one socket's buffer holds
				close(full)
			}
			if err := flood.f.WriteData(1, false, frame); err != nil {
				return
			}
		}
	})
	waiting := w.caller() // has no room for its answer
	waiting.call(1, "/test/waiting", true)
	slow := w.server()
	slow.untilKind(http2.FrameHeaders, 1)
	slow.headers(1, false, ":status", "200")
	for range 5 {
		slow.must(slow.f.WriteData(1, false, noise(16<<10)))
	}
	got := 0
	waiting.until("its window to be full", func(e event) bool { got += len(e.data); return got == 65535 })
	next(t, full)

	done := w.drain(ctx)
	half.untilKind(http2.FrameGoAway, 0)
	cancel(late)
	for _, p := range []*peer{half, waiting} {
		if fields, _ := p.answered(1); fields["grpc-status"] != "14" {
			t.Errorf("got %v", fields)
		}
		p.ends()
	}
	if err := next(t, done); !errors.Is(err, late) {
		t.Errorf("got %v, want the reason", err)
	}
	w.served.Wait()
}

// TestAbortMeetsAnswers: answers and ends that come while the relay gives its own
// must not be written after them.
func TestAbortMeetsAnswers(t *testing.T) {
	t.Parallel()
	for range 30 {
		w := newWorld(t)
		ctx, cancel := context.WithCancel(t.Context())
		caller := w.caller()
		for id := uint32(1); id < 40; id += 2 {
			caller.call(id, "/test/call", true)
		}
		server := w.server()
		server.untilKind(http2.FrameHeaders, 39)
		done := w.drain(ctx)
		caller.untilKind(http2.FrameGoAway, 0)
		var answering sync.WaitGroup
		answering.Go(func() {
			for id := uint32(1); id < 40; id += 2 {
				_ = server.f.WriteRawFrame(http2.FrameHeaders, http2.FlagHeadersEndHeaders, id, []byte{0x88})                            //nolint:errcheck // it may be over
				_ = server.f.WriteData(id, false, []byte("answer"))                                                                      //nolint:errcheck // ditto
				_ = server.f.WriteRawFrame(http2.FrameHeaders, http2.FlagHeadersEndHeaders|http2.FlagHeadersEndStream, id, []byte{0x88}) //nolint:errcheck // ditto
			}
		})
		cancel()
		ended := map[uint32]bool{}
		for e, err := caller.read(); err == nil; e, err = caller.read() {
			if ended[e.id] && (e.kind == http2.FrameHeaders || e.kind == http2.FrameData) {
				t.Errorf("stream %d: %v after its end", e.id, e.kind)
			}
			ended[e.id] = ended[e.id] || e.end
		}
		for id := uint32(1); id < 40; id += 2 {
			if !ended[id] {
				t.Errorf("call %d got no end", id)
			}
		}
		answering.Wait()
		if err := next(t, done); err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		w.served.Wait()
	}
}

// TestNoServerAtAll: with the server behind down the other answers; with a call
// for the other too, and both on one connection.
func TestNoServerAtAll(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.down.Store(true)
	caller := w.caller()
	caller.call(1, "/test/call", true)
	other := newPeer(t, next(t, w.others))
	other.accept()
	other.untilKind(http2.FrameHeaders, 1)
	other.answer(1, "other")
	if _, data := caller.answered(1); string(data) != "other" {
		t.Errorf("got %q", data)
	}
	w.down.Store(false)
	caller.call(3, "/other/call", true)
	other.untilKind(http2.FrameHeaders, 3)
	caller.call(5, "/test/call", true)
	server := w.server()
	server.untilKind(http2.FrameHeaders, 5)
	server.answer(5, "server")
	other.answer(3, "other")
	got := map[uint32]string{}
	ends := 0
	caller.until("both", func(e event) bool {
		got[e.id] += string(e.data)
		if e.end {
			ends++
		}
		return ends == 2
	})
	if got[3] != "other" || got[5] != "server" {
		t.Errorf("got %v", got)
	}
}

// TestIllFormed: what breaks a rule ends what it must and nothing else.
func TestIllFormed(t *testing.T) {
	t.Parallel()
	raw := func(kind http2.FrameType, flags http2.Flags, id uint32, payload ...byte) func(*peer) {
		return func(p *peer) { p.must(p.f.WriteRawFrame(kind, flags, id, payload)) }
	}
	large := func(p *peer) {
		_ = p.f.WriteRawFrame(http2.FrameData, 0, 1, make([]byte, 16<<10+1)) //nolint:errcheck // may be cut off
	}
	connection := []struct {
		name string
		send func(*peer)
		code http2.ErrCode
		// of is whose fault it can be: c of the caller, s of the server.
		of string
	}{
		{"data on stream 0", raw(http2.FrameData, 0, 0, 'x'), http2.ErrCodeProtocol, "cs"},
		{"header on stream 0", raw(http2.FrameHeaders, http2.FlagHeadersEndHeaders, 0, 0x88), http2.ErrCodeProtocol, "cs"},
		{"padding longer than data", raw(http2.FrameData, http2.FlagDataPadded, 1, 5, 'x'), http2.ErrCodeProtocol, "cs"},
		{"padding without length", raw(http2.FrameData, http2.FlagDataPadded, 1), http2.ErrCodeProtocol, "cs"},
		{"padding longer than header", raw(http2.FrameHeaders, http2.FlagHeadersPadded|http2.FlagHeadersEndHeaders, 1, 9, 0x88), http2.ErrCodeProtocol, "cs"},
		{"frame too large", large, http2.ErrCodeFrameSize, "cs"},
		{"header compression", raw(http2.FrameHeaders, http2.FlagHeadersEndHeaders, 1, 0xff, 0xff, 0xff, 0xff), http2.ErrCodeCompression, "cs"},
		{"continuation of nothing", raw(http2.FrameContinuation, 0, 1), http2.ErrCodeProtocol, "cs"},
		{"header interrupted", func(p *peer) {
			raw(http2.FrameHeaders, 0, 1, 0x88)(p)
			raw(http2.FramePing, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8)(p)
		}, http2.ErrCodeProtocol, "cs"},
		{"push", raw(http2.FramePushPromise, http2.FlagPushPromiseEndHeaders, 1, 0, 0, 0, 2, 0x88), http2.ErrCodeProtocol, "cs"},
		{"short ping", raw(http2.FramePing, 0, 0, 1), http2.ErrCodeFrameSize, "cs"},
		{"short settings", raw(http2.FrameSettings, 0, 0, 1), http2.ErrCodeFrameSize, "cs"},
		{"window too large", raw(http2.FrameSettings, 0, 0, 0, 4, 0xff, 0xff, 0xff, 0xff), http2.ErrCodeFlowControl, "cs"},
		{"window too large at last", raw(http2.FrameSettings, 0, 0, 0, 4, 0, 0, 0xff, 0xff, 0, 4, 0xff, 0xff, 0xff, 0xff), http2.ErrCodeFlowControl, "cs"},
		{"credit of nothing", raw(http2.FrameWindowUpdate, 0, 0, 0, 0, 0, 0), http2.ErrCodeProtocol, "cs"},
		{"credit too large", func(p *peer) {
			raw(http2.FrameWindowUpdate, 0, 0, 0x7f, 0xff, 0xff, 0xff)(p)
		}, http2.ErrCodeFlowControl, "cs"},
		{"even stream", raw(http2.FrameHeaders, http2.FlagHeadersEndHeaders, 2, 0x82), http2.ErrCodeProtocol, "c"},
		{"more than its window", func(p *peer) {
			for range 70 {
				if p.f.WriteData(1, false, make([]byte, 16<<10)) != nil {
					return
				}
			}
		}, http2.ErrCodeFlowControl, "c"},
	}
	for _, tc := range connection {
		for _, of := range tc.of {
			t.Run(tc.name+map[rune]string{'c': " of the caller", 's': " of the server"}[of], func(t *testing.T) {
				t.Parallel()
				w := newWorld(t)
				caller := w.caller()
				caller.call(1, "/test/call", false)
				server := w.server()
				server.untilKind(http2.FrameHeaders, 1)
				server.must(server.f.WritePing(false, [8]byte{}))
				server.until("the pong", func(e event) bool { return e.kind == http2.FramePing && e.ack })
				if of == 'c' {
					tc.send(caller)
					if e := caller.untilKind(http2.FrameGoAway, 0); e.code != tc.code {
						t.Errorf("told %v, want %v", e.code, tc.code)
					}
					caller.ends()
					server.ends()
					return
				}
				tc.send(server)
				if e := server.untilKind(http2.FrameGoAway, 0); e.code != tc.code {
					t.Errorf("told %v, want %v", e.code, tc.code)
				}
				if fields, _ := caller.answered(1); fields["grpc-status"] != "14" {
					t.Errorf("the caller got %v", fields)
				}
				server.ends()
				caller.call(3, "/test/call", true)
				second := w.server()
				second.untilKind(http2.FrameHeaders, 3)
				second.answer(3, "")
				caller.answered(3)
			})
		}
	}

	onStream := []struct {
		name string
		send func(*peer)
		code http2.ErrCode
		of   string
	}{
		{"credit of nothing", raw(http2.FrameWindowUpdate, 0, 1, 0, 0, 0, 0), http2.ErrCodeProtocol, "cs"},
		{"capital letters", func(p *peer) { p.headers(1, true, "X-Capital", "1") }, http2.ErrCodeProtocol, "cs"},
		{"control characters", func(p *peer) { p.headers(1, true, "x-control", "\x00\n") }, http2.ErrCodeProtocol, "cs"},
		{"pseudo field after others", func(p *peer) { p.headers(1, true, "x", "1", ":status", "200") }, http2.ErrCodeProtocol, "cs"},
		{"unknown pseudo field", func(p *peer) { p.headers(1, true, ":x", "1") }, http2.ErrCodeProtocol, "cs"},
		{"trailer that goes on", func(p *peer) { p.headers(1, false, "x", "1") }, http2.ErrCodeProtocol, "c"},
		{"data after the end", func(p *peer) {
			p.must(p.f.WriteData(1, true, nil))
			p.must(p.f.WriteData(1, false, []byte("x")))
		}, http2.ErrCodeStreamClosed, "c"},
		{"header after the end", func(p *peer) {
			p.must(p.f.WriteData(1, true, nil))
			p.headers(1, true, "x", "1")
		}, http2.ErrCodeStreamClosed, "c"},
	}
	for _, tc := range onStream {
		for _, of := range tc.of {
			t.Run(tc.name+map[rune]string{'c': " of the caller", 's': " of the server"}[of], func(t *testing.T) {
				t.Parallel()
				w := newWorld(t)
				caller := w.caller()
				caller.call(1, "/test/call", false)
				server := w.server()
				server.untilKind(http2.FrameHeaders, 1)
				sender := map[rune]*peer{'c': caller, 's': server}[of]
				tc.send(sender)
				for _, p := range []*peer{caller, server} {
					if e := p.untilKind(http2.FrameRSTStream, 1); e.code != tc.code {
						t.Errorf("reset with %v, want %v", e.code, tc.code)
					}
				}
				works(t, caller, server, 3)
			})
		}
	}
}

// TestStrayFrames: frames on streams that are over or never were end nothing, and
// header compression stays in step.
func TestStrayFrames(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	caller := w.caller()
	caller.call(1, "/test/call", true)
	server := w.server()
	server.untilKind(http2.FrameHeaders, 1)
	server.answer(1, "")
	caller.answered(1)
	caller.call(1, "/test/again", true, "x-in-the-table", "1")
	if e := caller.untilKind(http2.FrameRSTStream, 1); e.code != http2.ErrCodeStreamClosed {
		t.Errorf("got %v", e.code)
	}
	for _, p := range []*peer{caller, server} {
		p.must(p.f.WriteData(1, false, []byte("x")))
		p.must(p.f.WriteRSTStream(1, http2.ErrCodeCancel))
		p.must(p.f.WriteRSTStream(99, http2.ErrCodeCancel))
		p.must(p.f.WriteWindowUpdate(99, 1))
		p.must(p.f.WriteRawFrame(0x77, 0xff, 99, []byte("unknown")))
		p.must(p.f.WritePriority(99, http2.PriorityParam{Weight: 1}))
	}
	server.headers(99, true, ":status", "200", "x-in-the-table", "1")
	works(t, caller, server, 3)
	caller.call(5, "/test/call", true, "x-in-the-table", "1")
	if e := server.untilKind(http2.FrameHeaders, 5); e.fields["x-in-the-table"] != "1" {
		t.Errorf("header compression is out of step: %v", e.fields)
	}
	server.headers(5, true, ":status", "200", "x-in-the-table", "1")
	if e := caller.untilKind(http2.FrameHeaders, 5); e.fields["x-in-the-table"] != "1" {
		t.Errorf("header compression is out of step: %v", e.fields)
	}
}

// TestFloods: what costs its sender nothing is not kept here. All of it is read
// and the calls go on.
func TestFloods(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	caller := w.caller()
	caller.call(1, "/test/call", false)
	server := w.server()
	for range 5 { // no room is left at the server
		caller.must(caller.f.WriteData(1, false, noise(16<<10)))
	}
	// No more SETTINGS than the sockets hold: a server that reads none of them
	// rightly holds up the caller that goes on sending.
	for i := range 1_000 {
		caller.must(caller.f.WriteData(1, false, nil))
		if i%10 == 0 {
			caller.must(caller.f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 65535}))
		}
	}
	caller.must(caller.f.WritePing(false, [8]byte{1}))
	acks := 0
	caller.until("the pong", func(e event) bool {
		if e.kind == http2.FrameSettings && e.ack {
			acks++
		}
		return e.kind == http2.FramePing
	})
	if acks != 101 {
		t.Errorf("%d acknowledgements, want 101", acks)
	}
	server.must(server.f.WriteWindowUpdate(0, 1<<20))
	server.must(server.f.WriteWindowUpdate(1, 1<<20))
	got := 0
	server.until("the rest", func(e event) bool {
		if e.kind == http2.FrameData && len(e.data) == 0 {
			t.Fatal("an empty frame was passed on")
		}
		got += len(e.data)
		return got == 5*16<<10
	})
}
