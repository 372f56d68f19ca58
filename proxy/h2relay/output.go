package h2relay

import (
	"bufio"
	"bytes"
	"net"
	"sync"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// frameBytes is the largest payload that every HTTP/2 peer takes (RFC 9113,
// section 4.2). Peers that offer to take more are not taken up on it.
const frameBytes = 16 << 10

// output writes frames to one connection, from several goroutines. Frames wait
// in a buffer until [output.flush]. Errors are not returned: they mean that the
// connection is broken, which its reader finds out as well.
type output struct {
	mu      sync.Mutex
	buffer  *bufio.Writer // guarded by mu
	framer  *http2.Framer // guarded by mu
	encoder *hpack.Encoder
	block   bytes.Buffer // guarded by mu
}

func newOutput(conn net.Conn) *output {
	o := &output{buffer: bufio.NewWriterSize(conn, bufferBytes)}
	o.framer = http2.NewFramer(o.buffer, nil)
	o.encoder = hpack.NewEncoder(&o.block)
	return o
}

// do writes frames; they stand next to each other on the wire.
func (o *output) do(write func(f *http2.Framer) error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	_ = write(o.framer) //nolint:errcheck // see output
}

// flush sends what is in the buffer.
func (o *output) flush() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.buffer.Buffered() > 0 {
		_ = o.buffer.Flush() //nolint:errcheck // see output
	}
}

// headersLocked writes a header block in as many frames as it needs.
// Preconditions: o.mu is held.
func (o *output) headersLocked(id uint32, fields []hpack.HeaderField, endStream bool) {
	o.block.Reset()
	for _, f := range fields {
		_ = o.encoder.WriteField(f) //nolint:errcheck // a bytes.Buffer takes everything
	}
	first := true
	for first || o.block.Len() > 0 {
		fragment := o.block.Next(frameBytes)
		last := o.block.Len() == 0
		if first {
			_ = o.framer.WriteHeaders(http2.HeadersFrameParam{ //nolint:errcheck // see output
				StreamID: id, BlockFragment: fragment, EndStream: endStream, EndHeaders: last,
			})
		} else {
			_ = o.framer.WriteContinuation(id, last, fragment) //nolint:errcheck // see output
		}
		first = false
	}
}

func (o *output) headers(id uint32, fields []hpack.HeaderField, endStream bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.headersLocked(id, fields, endStream)
}

func (o *output) data(id uint32, endStream bool, payload []byte) {
	o.do(func(f *http2.Framer) error { return f.WriteData(id, endStream, payload) })
}

func (o *output) reset(id uint32, code http2.ErrCode) {
	o.do(func(f *http2.Framer) error { return f.WriteRSTStream(id, code) })
}

// credit enlarges a flow-control window; stream 0 is the connection's.
func (o *output) credit(id uint32, amount int64) {
	if amount <= 0 {
		return
	}
	o.do(func(f *http2.Framer) error { return f.WriteWindowUpdate(id, uint32(amount)) }) //nolint:gosec // windows are below 2^31
}

// setTableSize bounds the table of header compression to what the peer keeps.
func (o *output) setTableSize(size uint32) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.encoder.SetMaxDynamicTableSizeLimit(size)
}

// input reads frames from one connection.
type input struct {
	buffer *bufio.Reader
	framer *http2.Framer
}

func newInput(conn net.Conn) *input {
	in := &input{buffer: bufio.NewReaderSize(conn, bufferBytes)}
	in.framer = http2.NewFramer(nil, in.buffer)
	in.framer.SetMaxReadFrameSize(frameBytes)
	in.framer.SetReuseFrames()
	in.framer.ReadMetaHeaders = hpack.NewDecoder(headerTableBytes, nil)
	return in
}

// headerTableBytes is the size of the table of header compression that peers may
// use towards us: the default (RFC 9113, section 6.5.2).
const headerTableBytes = 4096

// frameHeaderBytes precede each frame (RFC 9113, section 4.1).
const frameHeaderBytes = 9

// ready reports whether a whole frame is in the buffer, so that reading it does
// not wait.
func (in *input) ready() bool {
	if in.buffer.Buffered() < frameHeaderBytes {
		return false
	}
	header, err := in.buffer.Peek(frameHeaderBytes)
	if err != nil {
		return false
	}
	length := int(header[0])<<16 | int(header[1])<<8 | int(header[2])
	return in.buffer.Buffered() >= frameHeaderBytes+length
}
