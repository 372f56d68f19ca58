package h2relay_test

import (
	"io"
	"net"
	"testing"
	"time"

	"golang.org/x/net/http2"
)

// FuzzPeers feeds arbitrary bytes as a caller and as the server behind it, after a
// call that is well formed. The relay may end what it likes, but it must neither
// panic nor stay when both have gone (newWorld waits for it).
func FuzzPeers(f *testing.F) {
	f.Add([]byte{}, []byte{})
	f.Add([]byte{0, 0, 0, 0, 1, 0, 0, 0, 1}, []byte{0, 0, 1, 1, 5, 0, 0, 0, 1, 0x88})                   // end, trailers-only
	f.Add([]byte{0, 0, 4, 3, 0, 0, 0, 0, 1, 0, 0, 0, 8}, []byte{0, 0, 8, 7, 0, 0, 0, 0, 0, 0, 0, 0, 1}) // reset, half a GOAWAY
	f.Add([]byte{0, 0, 2, 0, 8, 0, 0, 0, 1, 9, 0}, []byte{0, 0, 1, 5, 4, 0, 0, 0, 1, 0x88})             // padding, push
	f.Add([]byte{0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0}, []byte{0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0})
	f.Add([]byte{0, 0, 1, 1, 0, 0, 0, 0, 3, 0x83, 0, 0, 1, 9, 4, 0, 0, 0, 3, 0x86}, []byte("HTTP/1.1 400 Bad Request\r\n\r\n"))
	run := []byte("\x00\x00\x01\x00\x00\x00\x00\x00\x01a\x00\x00\x02\x00\x00\x00\x00\x00\x01bc\x00\x00\x00\x00\x01\x00\x00\x00\x01")
	f.Add(run, append([]byte{0, 0, 1, 1, 4, 0, 0, 0, 1, 0x88}, run...)) // frames that are passed on together
	f.Fuzz(func(t *testing.T, up, down []byte) {
		w := newWorld(t)
		caller := w.caller()
		caller.call(1, "/test/call", false)
		server := w.server()
		for _, side := range []struct {
			conn net.Conn
			b    []byte
		}{{caller.conn, up}, {server.conn, down}} {
			w.served.Go(func() { _, _ = io.Copy(io.Discard, side.conn) }) //nolint:errcheck // until it ends
			_ = side.conn.SetWriteDeadline(time.Now().Add(patience))      //nolint:errcheck // may be closed
			_, _ = side.conn.Write(side.b)                                //nolint:errcheck // ditto
		}
		_ = caller.f.WritePing(false, [8]byte{}) //nolint:errcheck // ditto
		_ = server.conn.Close()                  //nolint:errcheck // ditto
		_ = caller.conn.Close()                  //nolint:errcheck // ditto
	})
}

// FuzzFirstBytes feeds arbitrary bytes as all that a caller or a server says.
func FuzzFirstBytes(f *testing.F) {
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Add([]byte(http2.ClientPreface))
	f.Add([]byte(http2.ClientPreface + "\x00\x00\x00\x04\x00\x00\x00\x00\x00\x00\x00\x01\x01\x05\x00\x00\x00\x01\x82"))
	f.Add([]byte("\x00\x00\x00\x04\x00\x00\x00\x00\x00\x00\x00\x01\x01\x05\x00\x00\x00\x01\x88"))
	f.Fuzz(func(t *testing.T, b []byte) {
		w := newWorld(t)
		bare := w.connect()
		caller := w.caller()
		caller.call(1, "/test/call", true)
		server := next(t, w.servers)
		for _, conn := range []net.Conn{bare, server} {
			_ = conn.SetWriteDeadline(time.Now().Add(patience)) //nolint:errcheck // may be closed
			_, _ = conn.Write(b)                                //nolint:errcheck // ditto
			_ = conn.Close()                                    //nolint:errcheck // ditto
		}
		_ = caller.conn.Close() //nolint:errcheck // ditto
	})
}
