package proxy

import (
	"bytes"
	"testing"

	"google.golang.org/grpc/mem"
)

// FuzzFrames sends arbitrary bytes, cut into buffers anywhere, through the codec
// and back: they come out as they went in, twice, and every buffer that was
// borrowed is given back exactly once.
func FuzzFrames(f *testing.F) {
	f.Add([]byte{}, uint8(0))
	f.Add([]byte("hello"), uint8(2))
	f.Fuzz(func(t *testing.T, message []byte, cut uint8) {
		pool := &countingPool{}
		in := pieces(pool, message, int(cut)+1)
		codec := frameCodec{name: codecName}

		var received frame
		if err := codec.Unmarshal(in, &received); err != nil {
			t.Fatal(err)
		}
		in.Free() // as grpc does after decoding
		for range 2 {
			out, err := codec.Marshal(&received)
			if err != nil {
				t.Fatal(err)
			}
			if got := out.Materialize(); !bytes.Equal(got, message) {
				t.Fatalf("came out as %q, want %q", got, message)
			}
			out.Free()
		}
		last := &lastFrame{frame: received}
		out, err := codec.Marshal(last)
		if err != nil {
			t.Fatal(err)
		}
		if got := out.Materialize(); !bytes.Equal(got, message) {
			t.Fatalf("came out last as %q, want %q", got, message)
		}
		out.Free()
		last.free() // must not give back what grpc has given back
		if pool.out != 0 {
			t.Errorf("%d buffers are still out", pool.out)
		}
	})
}

func TestCodecTakesFramesOnly(t *testing.T) {
	t.Parallel()
	codec := frameCodec{}
	if _, err := codec.Marshal("text"); err == nil {
		t.Error("encoding a string went well")
	}
	if err := codec.Unmarshal(nil, new(string)); err == nil {
		t.Error("decoding into a string went well")
	}
}

// pieces cuts a message into pooled buffers of at most size bytes.
func pieces(pool mem.BufferPool, message []byte, size int) mem.BufferSlice {
	var out mem.BufferSlice
	for len(message) > 0 {
		n := min(size, len(message))
		b := pool.Get(n)
		copy(*b, message[:n])
		out = append(out, mem.NewBuffer(b, pool))
		message = message[n:]
	}
	return out
}

// countingPool counts the buffers that are out and spoils those that come back,
// so that a use after that is seen. Small buffers never come back (grpc does not
// pool them).
type countingPool struct{ out int }

func (p *countingPool) Get(n int) *[]byte {
	if !mem.IsBelowBufferPoolingThreshold(n) {
		p.out++
	}
	b := make([]byte, n)
	return &b
}

func (p *countingPool) Put(b *[]byte) {
	p.out--
	for i := range *b {
		(*b)[i] = 0xdb
	}
}
