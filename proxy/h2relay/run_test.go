package h2relay_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"golang.org/x/net/http2"
)

// bulk is DATA of several streams as it may stand in a socket: many frames of one
// stream after each other, between them such with padding, without payload, and
// the last of streams.
type bulk struct {
	wire []byte
	want map[uint32][]byte
}

func newBulk(seed uint64, ids ...uint32) bulk {
	r := rand.New(rand.NewPCG(seed, 9)) //nolint:gosec // a test's input
	b := bulk{want: map[uint32][]byte{}}
	var wire bytes.Buffer
	f := http2.NewFramer(&wire, nil)
	left := slices.Clone(ids)
	for len(left) > 0 {
		i := r.IntN(len(left))
		id := left[i]
		for range r.IntN(12) {
			payload := noise([]int{0, 1, 100, 10_000, 16_384, 16_384, 16_384}[r.IntN(7)])
			b.want[id] = append(b.want[id], payload...)
			if r.IntN(8) == 0 && len(payload) <= 10_000 {
				_ = f.WriteDataPadded(id, false, payload, make([]byte, r.IntN(256))) //nolint:errcheck // to memory
			} else {
				_ = f.WriteData(id, false, payload) //nolint:errcheck // ditto
			}
		}
		if len(b.want[id]) > 80_000 {
			b.want[id] = append(b.want[id], "end"...)
			_ = f.WriteData(id, true, []byte("end")) //nolint:errcheck // ditto
			left = slices.Delete(left, i, i+1)
		}
	}
	b.wire = wire.Bytes()
	return b
}

// take reads the bulk's streams to their ends, with a window of the connection that
// it gives back in pieces of any size, and fails when more comes than it gave.
func (b bulk) take(t *testing.T, p *peer, seed uint64) {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 10)) //nolint:gosec // a test's input
	got, ends := map[uint32][]byte{}, 0
	room, taken := 65535, 0
	for ends < len(b.want) {
		e := p.until("data", func(e event) bool { return e.kind == http2.FrameData })
		if room -= len(e.data); room < 0 {
			t.Fatalf("%d bytes more than the window", -room)
		}
		got[e.id] = append(got[e.id], e.data...)
		taken += len(e.data)
		if e.end {
			ends++
		}
		if room == 0 || r.IntN(6) == 0 && taken > 0 {
			// More than there was, sometimes: windows grow.
			n := taken + r.IntN(100_000)
			room, taken = room+n, 0
			p.must(p.f.WriteWindowUpdate(0, uint32(n))) //nolint:gosec // some KiB
		}
	}
	for id, want := range b.want {
		if !bytes.Equal(got[id], want) {
			t.Errorf("stream %d: got %d bytes that are not the %d sent", id, len(got[id]), len(want))
		}
	}
}

// TestFramesThatComeTogether: frames that are read in one go arrive in order and
// whole, stream by stream, and never beyond a window, in both directions.
func TestFramesThatComeTogether(t *testing.T) {
	t.Parallel()
	for seed := range uint64(25) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			wide := http2.Setting{ID: http2.SettingInitialWindowSize, Val: 8 << 20}
			caller := w.caller(wide)
			ids := []uint32{1, 3, 5}
			for _, id := range ids {
				caller.call(id, "/test/bulk", false)
			}
			server := w.server(wide)
			for _, id := range ids {
				server.untilKind(http2.FrameHeaders, id)
				server.headers(id, false, ":status", "200")
			}
			// An upload is less than callers may send unasked, so that it can be written
			// blindly; what the server has no window for waits in the relay.
			for _, way := range []struct {
				from, to *peer
				b        bulk
			}{{server, caller, newBulk(seed, ids...)}, {caller, server, newBulk(seed+1000, ids...)}} {
				w.served.Go(func() { _, _ = way.from.conn.Write(way.b.wire) }) //nolint:errcheck // take finds what is missing
				way.b.take(t, way.to, seed)
			}
		})
	}
}
