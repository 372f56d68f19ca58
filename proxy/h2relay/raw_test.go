package h2relay_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net"
	"strings"
	"testing"

	"golang.org/x/net/http2"
)

// noise returns bytes that differ everywhere, so that order matters.
func noise(n int) []byte {
	b := make([]byte, n)
	r := rand.NewChaCha8([32]byte{byte(n)})
	_, _ = r.Read(b) //nolint:errcheck // never fails
	return b
}

// TestAnswerLargerThanTheCallersWindow: the caller has the smallest window and
// gives it back only when it is used up. Never may more come than it gave.
func TestAnswerLargerThanTheCallersWindow(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	caller := w.caller(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 20})
	caller.call(1, "/test/large", true)
	server := w.server()
	server.untilKind(http2.FrameHeaders, 1)
	want := noise(600_000)
	go func() {
		server.headers(1, false, ":status", "200")
		for rest := want; len(rest) > 0; {
			n := min(len(rest), 16<<10)
			if err := server.f.WriteData(1, n == len(rest), rest[:n]); err != nil {
				t.Error(err)
				return
			}
			rest = rest[n:]
		}
	}()
	var got []byte
	room := 65535
	caller.until("the end", func(e event) bool {
		got = append(got, e.data...)
		if room -= len(e.data); room < 0 {
			t.Fatalf("%d bytes more than the connection's window", -room)
		}
		if room == 0 {
			room = 65535
			caller.must(caller.f.WriteWindowUpdate(0, 65535))
		}
		return e.end
	})
	if !bytes.Equal(got, want) {
		t.Errorf("got %d bytes that are not the %d sent", len(got), len(want))
	}
}

// TestResetInTheMiddleGivesTheWindowBack: calls that end while an answer waits for
// room must not take the room of later ones along.
func TestResetInTheMiddleGivesTheWindowBack(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	caller := w.caller()
	caller.call(1, "/test/first", true)
	server := w.server()
	frame := noise(16 << 10)
	id := uint32(1)
	for range 200 {
		server.untilKind(http2.FrameHeaders, id)
		server.headers(id, false, ":status", "200")
		for range 3 {
			server.must(server.f.WriteData(id, false, frame))
		}
		// What comes is given back, the reset meets the rest in the middle.
		e := caller.untilKind(http2.FrameData, id)
		caller.must(caller.f.WriteRSTStream(id, http2.ErrCodeCancel))
		given := len(e.data)
		id += 2
		caller.must(caller.f.WritePing(false, [8]byte{byte(id)}))
		caller.call(id, "/test/next", true)
		server.until("the reset", func(e event) bool { return e.kind == http2.FrameRSTStream })
		// The server's frames are all read when its ping is answered.
		server.must(server.f.WritePing(false, [8]byte{}))
		server.headers(id-2, true, "grpc-status", "0") // of a call that is over: decoded, not passed on
		caller.until("the pong", func(e event) bool {
			given += len(e.data)
			return e.kind == http2.FramePing
		})
		caller.must(caller.f.WriteWindowUpdate(0, uint32(given))) //nolint:gosec // some KiB
	}
	server.untilKind(http2.FrameHeaders, id)
	server.headers(id, false, ":status", "200")
	for range 3 {
		server.must(server.f.WriteData(id, false, frame))
	}
	server.must(server.f.WriteData(id, true, frame[:1000]))
	// Data of the calls before may still come; all of it fits into the window.
	if _, data := caller.answered(id); len(data) != 3*len(frame)+1000 {
		t.Errorf("the last answer has %d bytes", len(data))
	}
}

// TestUploadBeyondTheServersWindow: what the server does not take waits in order,
// stream by stream; a reset drops its own part only and gives its window back.
func TestUploadBeyondTheServersWindow(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	caller := w.caller()
	caller.call(1, "/test/upload", false)
	server := w.server(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 8 << 20})
	caller.until("more room on the stream", func(e event) bool { return e.kind == http2.FrameWindowUpdate && e.id == 1 })
	send := func(id uint32, b []byte, end bool) {
		for len(b) > 0 {
			n := min(len(b), 10_000)
			caller.must(caller.f.WriteData(id, end && n == len(b), b[:n]))
			b = b[n:]
		}
	}
	want := noise(400_000)
	id := uint32(1)
	// 20 times a megabyte's third: were dropped bytes not given back, the
	// caller's window would be gone.
	for range 20 {
		dropped, kept := id, id+2
		caller.call(kept, "/test/upload", false)
		send(dropped, noise(300_000), false)
		send(kept, want, true)
		caller.must(caller.f.WriteRSTStream(dropped, http2.ErrCodeCancel))
		var got []byte
		room, reset := 65535, false
		server.until("the upload", func(e event) bool {
			switch {
			case e.id == dropped && e.kind == http2.FrameData:
				if reset {
					t.Fatal("DATA after the reset")
				}
				room -= len(e.data)
			case e.id == dropped && e.kind == http2.FrameRSTStream:
				reset = true
			case e.id == kept:
				got = append(got, e.data...)
				room -= len(e.data)
			}
			if room < 0 {
				t.Fatalf("%d bytes more than the server's window", -room)
			}
			if reset {
				if n := 65535 - room; n > 0 {
					room = 65535
					server.must(server.f.WriteWindowUpdate(0, uint32(n))) //nolint:gosec // at most 65535
				}
			}
			return e.id == kept && e.end
		})
		if !bytes.Equal(got, want) {
			t.Fatalf("got %d bytes that are not the %d sent", len(got), len(want))
		}
		if n := 65535 - room; n > 0 {
			server.must(server.f.WriteWindowUpdate(0, uint32(n))) //nolint:gosec // at most 65535
		}
		server.answer(kept, "")
		caller.answered(kept)
		id = kept + 2
		caller.call(id, "/test/upload", false)
		caller.until("more room on the stream", func(e event) bool { return e.kind == http2.FrameWindowUpdate && e.id == id })
	}
}

// TestServersStreamWindow: servers with windows of all sizes that change in the
// middle get no more than they gave, and callers learn of all of it.
func TestServersStreamWindow(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name          string
		initial, then uint32
	}{
		{"large", 1 << 20, 1 << 20},
		{"default", 65535, 65535},
		{"grows", 65535, 1 << 20},
		{"small", 1000, 1000},
		{"small and grows", 1000, 100_000},
		{"shrinks", 200_000, 10_000},
		{"shrinks below zero", 100_000, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			caller := w.caller()
			caller.call(1, "/test/upload", false)
			server := w.server(http2.Setting{ID: http2.SettingInitialWindowSize, Val: tc.initial})
			server.must(server.f.WriteWindowUpdate(0, 16<<20))
			server.must(server.f.WritePing(false, [8]byte{}))
			server.until("the pong", func(e event) bool { return e.kind == http2.FramePing }) // its settings are in force
			want := noise(500_000)
			sent := make(chan struct{})
			go func() { // a caller that keeps to what it is told
				defer close(sent)
				stream, conn := 65535, 65535
				rest := want
				for {
					for n := min(len(rest), stream, conn, 16<<10); n > 0; n = min(len(rest), stream, conn, 16<<10) {
						if err := caller.f.WriteData(1, n == len(rest), rest[:n]); err != nil {
							t.Error(err)
							return
						}
						rest, stream, conn = rest[n:], stream-n, conn-n
					}
					if len(rest) == 0 {
						return
					}
					e, err := caller.read()
					if err != nil {
						t.Errorf("%d bytes are left: %v", len(rest), err)
						return
					}
					if e.kind == http2.FrameWindowUpdate && e.id == 1 {
						stream += int(e.amount)
					} else if e.kind == http2.FrameWindowUpdate {
						conn += int(e.amount)
					}
				}
			}()
			var got []byte
			room, changed, ended := int(tc.initial), false, false
			server.until("the upload", func(e event) bool {
				if e.kind != http2.FrameData {
					return false
				}
				got = append(got, e.data...)
				if room -= len(e.data); room < 0 && !changed {
					t.Errorf("%d bytes more than the stream's window", -room)
				}
				if !changed && len(got) >= min(int(tc.initial), 50_000) {
					changed = true
					server.must(server.f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: tc.then}))
					server.until("the acknowledgement", func(e event) bool { // what is on its way is by the old window
						got = append(got, e.data...)
						room -= len(e.data)
						ended = ended || e.end
						return e.kind == http2.FrameSettings && e.ack
					})
					room += int(tc.then) - int(tc.initial)
				}
				if changed && room <= 0 {
					n := 20_000 - room
					room = 20_000
					server.must(server.f.WriteWindowUpdate(1, uint32(n))) //nolint:gosec // below 2 MiB
				}
				return e.end || ended
			})
			<-sent
			if !bytes.Equal(got, want) {
				t.Errorf("got %d bytes that are not the %d sent", len(got), len(want))
			}
		})
	}
}

// TestSmallerWindowIsInForceWhenAcknowledged: a caller that lets its windows shrink
// may count with it from the acknowledgement on (RFC 9113, section 6.9.3), so it
// comes after everything that the server sent by the old window.
func TestSmallerWindowIsInForceWhenAcknowledged(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	caller := w.caller()
	caller.until("the first acknowledgement", func(e event) bool { return e.kind == http2.FrameSettings && e.ack })
	caller.call(1, "/test/answer", true)
	server := w.server()
	server.untilKind(http2.FrameHeaders, 1)
	caller.must(caller.f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 10}))
	server.until("the window", func(e event) bool {
		v, ok := e.settings[http2.SettingInitialWindowSize]
		return ok && v == 10
	})
	server.headers(1, false, ":status", "200")
	server.must(server.f.WriteData(1, false, noise(1000)))
	server.must(server.f.WriteSettingsAck()) // of the relay's first
	server.must(server.f.WriteSettingsAck())
	seen := 0
	caller.until("the acknowledgement", func(e event) bool {
		seen += len(e.data)
		return e.kind == http2.FrameSettings && e.ack
	})
	if seen != 1000 {
		t.Errorf("acknowledged after %d bytes, want 1000", seen)
	}
	// A server that goes without a word holds up no acknowledgement.
	caller.must(caller.f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 5}))
	server.until("the window", func(e event) bool { return e.settings[http2.SettingInitialWindowSize] == 5 })
	server.must(server.conn.Close())
	caller.until("the acknowledgement", func(e event) bool { return e.kind == http2.FrameSettings && e.ack })
}

// TestPadding: it goes no further, and whoever sent it gets its window back.
func TestPadding(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	caller := w.caller()
	caller.call(1, "/test/padded", false)
	server := w.server()
	pad := make([]byte, 255)
	caller.must(caller.f.WriteDataPadded(1, false, []byte("up"), pad))
	caller.must(caller.f.WriteDataPadded(1, false, nil, pad))
	caller.must(caller.f.WriteDataPadded(1, true, []byte("load"), pad))
	var up []byte
	server.until("the request", func(e event) bool { up = append(up, e.data...); return e.end })
	server.headers(1, false, ":status", "200")
	server.must(server.f.WriteDataPadded(1, false, []byte("down"), pad))
	server.must(server.f.WriteDataPadded(1, true, nil, pad))
	credit := uint32(0)
	var down []byte
	caller.until("the answer", func(e event) bool {
		if e.kind == http2.FrameWindowUpdate && e.id == 1 {
			credit += e.amount
		}
		down = append(down, e.data...)
		return e.end
	})
	if string(up) != "upload" || string(down) != "down" {
		t.Errorf("passed %q and %q", up, down)
	}
	if credit != 2*256 {
		t.Errorf("the caller's stream got %d bytes back, want 512", credit)
	}
	back := server.until("the window", func(e event) bool { return e.kind == http2.FrameWindowUpdate && e.id == 1 })
	if back.amount != 256 {
		t.Errorf("the server's stream got %d bytes back, want 256", back.amount)
	}
}

// TestFieldsPassUnchanged: every byte that HTTP allows in a value, in both
// directions, with and without continuation.
func TestFieldsPassUnchanged(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	caller := w.caller()
	var every strings.Builder
	for c := 0x20; c < 0x100; c++ {
		if c != 0x7f {
			every.WriteByte(byte(c))
		}
	}
	long := strings.Repeat("0123456789abcde\xff", 40<<10/16)
	fields := []string{"x-every", every.String() + "\t.", "x-long", long, "x-bin", "AAH/", "x-empty", ""}
	var server *peer
	// Twice, the second time out of the tables of header compression.
	for id := uint32(1); id < 6; id += 2 {
		caller.call(id, "/test/fields", true, fields...)
		if server == nil {
			server = w.server()
		}
		e := server.untilKind(http2.FrameHeaders, id)
		for i := 0; i < len(fields); i += 2 {
			if e.fields[fields[i]] != fields[i+1] {
				t.Errorf("request's %s: got %.300q", fields[i], e.fields[fields[i]])
			}
		}
		server.headers(id, false, append([]string{":status", "200"}, fields...)...)
		server.headers(id, true, append([]string{"grpc-status", "0"}, fields...)...)
		for range 2 {
			e := caller.untilKind(http2.FrameHeaders, id)
			for i := 0; i < len(fields); i += 2 {
				if e.fields[fields[i]] != fields[i+1] {
					t.Errorf("response's %s: got %.300q", fields[i], e.fields[fields[i]])
				}
			}
		}
	}
}

// TestHeaderTooLarge: 16 MiB are more than grpc takes; it costs the call only.
func TestHeaderTooLarge(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	caller := w.caller()
	caller.call(1, "/test/works", true)
	server := w.server()
	server.untilKind(http2.FrameHeaders, 1)
	server.answer(1, "")
	caller.answered(1)
	// A field that is in the table costs one byte each time, and 3 KiB here.
	fields := []string{}
	for range 6000 {
		fields = append(fields, "x-large", strings.Repeat("a", 3<<10))
	}
	caller.call(3, "/test/large", true, fields...)
	if e := caller.untilKind(http2.FrameRSTStream, 3); e.code != http2.ErrCodeFrameSize {
		t.Errorf("got %v", e.code)
	}
	caller.call(5, "/test/large", true)
	server.untilKind(http2.FrameHeaders, 5)
	server.headers(5, true, append([]string{":status", "200"}, fields...)...)
	if e := caller.untilKind(http2.FrameRSTStream, 5); e.code != http2.ErrCodeFrameSize {
		t.Errorf("got %v", e.code)
	}
	server.untilKind(http2.FrameRSTStream, 5)
	works(t, caller, server, 7)
}

// TestSmallTable: peers that keep no table of header compression get none.
func TestSmallTable(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	caller := w.caller(http2.Setting{ID: http2.SettingHeaderTableSize, Val: 0})
	caller.f.ReadMetaHeaders.SetAllowedMaxDynamicTableSize(0)
	caller.call(1, "/test/works", true)
	server := w.server(http2.Setting{ID: http2.SettingHeaderTableSize, Val: 100})
	server.untilKind(http2.FrameHeaders, 1)
	server.answer(1, "")
	caller.answered(1)
	server.must(server.f.WritePing(false, [8]byte{}))
	server.until("the pong", func(e event) bool { return e.kind == http2.FramePing && e.ack })
	server.f.ReadMetaHeaders.SetAllowedMaxDynamicTableSize(100)
	for id := uint32(3); id < 20; id += 2 {
		works(t, caller, server, id)
	}
}

// TestTrailersOnly: an answer of one header stays one.
func TestTrailersOnly(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	caller := w.caller()
	caller.call(1, "/test/denied", true)
	server := w.server()
	server.untilKind(http2.FrameHeaders, 1)
	server.headers(1, true, ":status", "200", "grpc-status", "7")
	if e := caller.untilKind(http2.FrameHeaders, 1); !e.end || e.fields["grpc-status"] != "7" || e.fields[":status"] != "200" {
		t.Errorf("got %+v", e)
	}
}

// TestServerGoesAway: calls above the last are told to be untouched, those below
// are finished, new ones go to a new connection, and the old one is closed.
func TestServerGoesAway(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	caller := w.caller()
	for _, id := range []uint32{1, 3, 5} {
		caller.call(id, "/test/call", true)
	}
	server := w.server()
	server.untilKind(http2.FrameHeaders, 5)
	server.must(server.f.WriteGoAway(1<<31-1, http2.ErrCodeNo, nil))
	server.must(server.f.WriteGoAway(3, http2.ErrCodeNo, nil))
	if e := caller.untilKind(http2.FrameRSTStream, 5); e.code != http2.ErrCodeRefusedStream {
		t.Errorf("stream 5: %v", e.code)
	}
	caller.call(7, "/test/call", true)
	second := w.server()
	second.untilKind(http2.FrameHeaders, 7)
	second.answer(7, "second")
	if _, data := caller.answered(7); string(data) != "second" {
		t.Errorf("got %q", data)
	}
	server.answer(1, "first")
	caller.answered(1)
	server.answer(3, "first")
	if _, data := caller.answered(3); string(data) != "first" {
		t.Errorf("got %q", data)
	}
	server.ends()
	works(t, caller, second, 9)
	second.must(second.f.WriteGoAway(9, http2.ErrCodeNo, nil))
	second.ends()
}

// TestCallsWhileServersGo: a call that meets a server's end is answered or told to
// be untouched, never forgotten.
func TestCallsWhileServersGo(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	caller := w.caller()
	stop := make(chan struct{})
	served := make(chan struct{})
	go func() { // servers that go away without having taken anything
		defer close(served)
		for i := 0; ; i++ {
			var conn net.Conn
			select {
			case conn = <-w.servers:
			case <-stop:
				return
			}
			p := newPeer(t, conn)
			if i%2 == 0 {
				_ = p.f.WriteSettings()                                 //nolint:errcheck // the relay may be gone
				_ = p.f.WriteGoAway(0, http2.ErrCodeNo, nil)            //nolint:errcheck // ditto
				for _, err := p.read(); err == nil; _, err = p.read() { //nolint:revive // until it ends
				}
			}
			_ = conn.Close() //nolint:errcheck // end
		}
	}()
	for id := uint32(1); id < 1000; id += 2 {
		caller.call(id, "/test/call", true)
		caller.until(fmt.Sprintf("the end of call %d", id), func(e event) bool {
			return e.id == id && (e.end || e.kind == http2.FrameRSTStream)
		})
	}
	close(stop)
	<-served
}

// TestServerDies: at every moment the caller gets a status that names the server,
// and its connection goes on.
func TestServerDies(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		die  func(p *peer)
		want string
	}{
		{"before it speaks", func(*peer) {}, "ended before the answer"},
		{"HTTP/1", func(p *peer) { p.raw([]byte("HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n400 Bad Request")) }, "does not speak HTTP/2"},
		{"garbage", func(p *peer) { p.raw(bytes.Repeat([]byte{0xff}, 100)) }, "does not speak HTTP/2"},
		{"other than settings first", func(p *peer) { p.must(p.f.WritePing(false, [8]byte{})); p.untilAny() }, "does not speak HTTP/2"},
		{"acknowledges first", func(p *peer) { p.must(p.f.WriteSettingsAck()); p.untilAny() }, "does not speak HTTP/2"},
		{"after its settings", func(p *peer) { p.settings() }, "ended before the answer"},
		{"with the call", func(p *peer) { p.settings() }, "ended before the answer"},
		{"after the header", func(p *peer) { p.settings(); p.headers(1, false, ":status", "200") }, "ended before the answer"},
		{"in a message", func(p *peer) {
			p.settings()
			p.headers(1, false, ":status", "200")
			p.must(p.f.WriteData(1, false, []byte("half")))
		}, "ended before the answer"},
		{"in a frame", func(p *peer) {
			p.settings()
			p.headers(1, false, ":status", "200")
			p.raw([]byte{0, 1, 0, 0, 0, 0, 0, 0, 1, 'x'})
		}, "ended before the answer"},
		{"in a header", func(p *peer) { p.settings(); p.raw([]byte{0, 1, 0, 1, 4, 0, 0, 0, 1, 0x88}) }, "ended before the answer"},
		{"in words", func(p *peer) {
			p.settings()
			p.must(p.f.WritePushPromise(http2.PushPromiseParam{StreamID: 1, PromiseID: 2, EndHeaders: true}))
			p.ends()
		}, "PROTOCOL_ERROR"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			caller := w.caller()
			caller.call(1, "/test/call", false)
			conn := next(t, w.servers)
			p := newPeer(t, conn)
			p.preface()
			p.untilKind(http2.FrameHeaders, 1) // else the call is given to another
			tc.die(p)
			_ = conn.Close() //nolint:errcheck // the relay may have been first
			fields, _ := caller.answered(1)
			message := strings.ReplaceAll(fields["grpc-message"], "%20", " ")
			message = strings.ReplaceAll(message, "%2F", "/")
			if fields["grpc-status"] != "14" || !strings.HasPrefix(message, "the runtime: ") || !strings.Contains(message, tc.want) {
				t.Errorf("got %q, want Unavailable with %q", fields, tc.want)
			}
			if fields[":status"] != "200" {
				t.Error("the response has no status of HTTP")
			}
			if e := caller.untilKind(http2.FrameRSTStream, 1); e.code != http2.ErrCodeNo {
				t.Errorf("the request ends with %v", e.code)
			}
			caller.call(3, "/test/works", true)
			second := w.server()
			second.untilKind(http2.FrameHeaders, 3)
			second.answer(3, "")
			caller.answered(3)
		})
	}
}

// untilAny reads one frame or the end.
func (p *peer) untilAny() { _, _ = p.read() } //nolint:errcheck // either

// TestServersThatDieKeepNoWindow: what waited for a server that dies is given back
// to the caller, so its uploads don't come to a halt after some restarts.
func TestServersThatDieKeepNoWindow(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	caller := w.caller()
	credit, sent := 65535, 0
	for id := uint32(1); id < 60; id += 2 {
		caller.call(id, "/test/upload", false)
		server := w.server(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 20})
		caller.until("room on the stream", func(e event) bool {
			if e.kind == http2.FrameWindowUpdate && e.id == 0 {
				credit += int(e.amount)
			}
			return e.kind == http2.FrameWindowUpdate && e.id == id
		})
		for range 20 { // 200,000 bytes, of which the server's window takes a third
			for credit < 10_000 {
				e := caller.until("room on the connection", func(e event) bool { return e.kind == http2.FrameWindowUpdate && e.id == 0 })
				credit += int(e.amount)
			}
			caller.must(caller.f.WriteData(id, false, noise(10_000)))
			credit -= 10_000
			sent += 10_000
		}
		caller.must(caller.f.WritePing(false, [8]byte{}))
		caller.until("the pong", func(e event) bool {
			if e.kind == http2.FrameWindowUpdate && e.id == 0 {
				credit += int(e.amount)
			}
			return e.kind == http2.FramePing
		})
		server.must(server.conn.Close())
		caller.until("the status", func(e event) bool {
			if e.kind == http2.FrameWindowUpdate && e.id == 0 {
				credit += int(e.amount)
			}
			return e.id == id && e.kind == http2.FrameRSTStream
		})
	}
	t.Logf("%d bytes sent to servers that died", sent)
}

// TestCallerVanishes: at every moment the server sees the connection end.
func TestCallerVanishes(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		then func(caller, server *peer)
	}{
		{"after the call", func(_, server *peer) { server.untilKind(http2.FrameHeaders, 1) }},
		{"in the upload", func(caller, _ *peer) {
			for range 6 { // more than the server's window
				caller.must(caller.f.WriteData(1, false, noise(16<<10)))
			}
		}},
		{"in a frame", func(caller, _ *peer) { caller.raw([]byte{0, 1, 0, 0, 0, 0, 0, 0, 1, 'x'}) }},
		{"in a header", func(caller, _ *peer) { caller.raw([]byte{0, 0, 1, 1, 0, 0, 0, 0, 3, 0x83}) }},
		{"while the answer waits for its window", func(caller, server *peer) {
			server.untilKind(http2.FrameHeaders, 1)
			server.headers(1, false, ":status", "200")
			for range 6 {
				server.must(server.f.WriteData(1, false, noise(16<<10)))
			}
			caller.untilKind(http2.FrameData, 1)
		}},
		{"after a reset", func(caller, _ *peer) { caller.must(caller.f.WriteRSTStream(1, http2.ErrCodeCancel)) }},
		{"after going away", func(caller, _ *peer) { caller.must(caller.f.WriteGoAway(0, http2.ErrCodeNo, nil)) }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			caller := w.caller()
			caller.call(1, "/test/call", false)
			server := w.server()
			tc.then(caller, server)
			caller.must(caller.conn.Close())
			server.ends()
			w.served.Wait()
		})
	}
	for name, first := range map[string]string{"at once": "", "in the preface": http2.ClientPreface[:5], "without settings": http2.ClientPreface, "HTTP/1": "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			p := newPeer(t, w.connect())
			p.raw([]byte(first))
			p.must(p.conn.Close())
			w.served.Wait()
		})
	}
}
