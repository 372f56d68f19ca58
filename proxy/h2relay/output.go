package h2relay

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"iter"
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
	o := &output{buffer: bufio.NewWriterSize(conn, outputBytes)}
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
	if o.block.Cap() > outputBytes {
		o.block = bytes.Buffer{} // one large header is not kept for the connection's life
	}
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

// dataLocked writes a DATA frame. The payload is copied once, into the buffer,
// where [http2.Framer.WriteData] would copy it twice.
// Preconditions: o.mu is held, the payload has at most frameBytes.
func (o *output) dataLocked(id uint32, endStream bool, payload []byte) {
	var flags http2.Flags
	if endStream {
		flags = http2.FlagDataEndStream
	}
	n := len(payload)
	header := append(o.buffer.AvailableBuffer(), byte(n>>16), byte(n>>8), byte(n), byte(http2.FrameData), byte(flags))
	header = binary.BigEndian.AppendUint32(header, id)
	_, _ = o.buffer.Write(header)  //nolint:errcheck // see output
	_, _ = o.buffer.Write(payload) //nolint:errcheck // see output
}

// framesLocked writes whole frames as they are. Where there are many they are not
// copied: the buffer's Write sends what is larger than it from where it is, if
// nothing else waits in it.
// Preconditions: o.mu is held.
func (o *output) framesLocked(frames []byte) {
	if len(frames) > outputBytes {
		_ = o.buffer.Flush() //nolint:errcheck // see output
	}
	_, _ = o.buffer.Write(frames) //nolint:errcheck // see output
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
	// data is what next has read when it returns no frame.
	data dataFrame
}

// dataFrame is a DATA frame, or a run of them. What it points to is valid until
// the next frame is read.
type dataFrame struct {
	id uint32
	// run are several frames of one stream as they stand in the buffer, headers
	// included: they came together and have no flags, so nothing but payload. nil if
	// it is one frame.
	run []byte
	// payload is the frame's, nil for a run.
	payload []byte
	// size is what it takes of the flow-control windows: all payload and its
	// padding (RFC 9113, section 6.9.1).
	size int64
	end  bool
}

// each are the frames one by one, for where they can't be passed on as they are.
func (f dataFrame) each() iter.Seq[dataFrame] {
	return func(yield func(dataFrame) bool) {
		if f.run == nil {
			yield(f)
			return
		}
		for rest := f.run; len(rest) > 0; {
			whole := rest[:frameHeaderBytes+payloadBytes(rest)]
			rest = rest[len(whole):]
			payload := whole[frameHeaderBytes:]
			if !yield(dataFrame{id: f.id, payload: payload, size: int64(len(payload))}) {
				return
			}
		}
	}
}

// headerListBytes bounds a header, counted as in RFC 9113, section 10.5.1. It is
// what grpc takes on both sides unless told otherwise.
const headerListBytes = 16 << 20

// headerTableBytes is the size of the table of header compression that peers may
// use towards us: the default (RFC 9113, section 6.5.2).
const headerTableBytes = 4096

// frameHeaderBytes precede each frame (RFC 9113, section 4.1).
const frameHeaderBytes = 9

func newInput(conn net.Conn) *input {
	in := &input{buffer: bufio.NewReaderSize(conn, inputBytes)}
	in.framer = http2.NewFramer(nil, in.buffer)
	in.framer.SetMaxReadFrameSize(frameBytes)
	in.framer.ReadMetaHeaders = hpack.NewDecoder(headerTableBytes, nil)
	in.framer.MaxHeaderListSize = headerListBytes
	return in
}

// ready reports whether a whole frame, or a header with all its frames, is in
// the buffer, so that reading it does not wait.
func (in *input) ready() bool {
	if in.buffer.Buffered() < frameHeaderBytes {
		return false
	}
	header, err := in.buffer.Peek(frameHeaderBytes)
	if err != nil {
		return false
	}
	if http2.FrameType(header[3]) == http2.FrameHeaders && !http2.Flags(header[4]).Has(http2.FlagHeadersEndHeaders) {
		return false // the rest may come late
	}
	return in.buffer.Buffered() >= frameHeaderBytes+payloadBytes(header)
}

// payloadBytes returns the length that stands in a frame's header.
func payloadBytes(header []byte) int {
	return int(header[0])<<16 | int(header[1])<<8 | int(header[2])
}

// next reads a frame. DATA is in in.data and the result is nil, and it may be
// several frames; that is the way of nearly all bytes, and they stay in the buffer
// they were read to.
//
// After an [http2.StreamError] reading can go on. All other errors end the
// connection; those that are the peer's fault are an [http2.ConnectionError].
func (in *input) next() (http2.Frame, error) {
	header, err := in.buffer.Peek(frameHeaderBytes)
	if err != nil {
		if len(header) > 0 && errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return nil, err
	}
	if http2.FrameType(header[3]) == http2.FrameData {
		return nil, in.nextData(header)
	}
	head, err := in.framer.ReadFrameHeader()
	if errors.Is(err, http2.ErrFrameTooLarge) {
		return nil, fmt.Errorf("%w: %w", http2.ConnectionError(http2.ErrCodeFrameSize), err)
	}
	if err != nil {
		return nil, err
	}
	frame, err := in.framer.ReadFrameForHeader(head)
	if err != nil {
		var streamErr http2.StreamError
		if errors.As(err, &streamErr) && streamErr.Cause == nil && head.Type == http2.FrameHeaders {
			// The framer gave up before it decoded the header (its padding is
			// longer than it), so the compression of what follows is lost.
			return nil, http2.ConnectionError(http2.ErrCodeProtocol)
		}
		return nil, err
	}
	switch f := frame.(type) {
	case *http2.PushPromiseFrame:
		// Callers must not, servers were told not to (RFC 9113, section 8.4);
		// and the header in it is not decoded.
		return nil, http2.ConnectionError(http2.ErrCodeProtocol)
	case *http2.MetaHeadersFrame:
		if f.Truncated {
			// As grpc answers it (internal/transport: operateHeaders).
			return nil, http2.StreamError{StreamID: f.StreamID, Code: http2.ErrCodeFrameSize, Cause: errHeaderTooLarge}
		}
	}
	return frame, nil
}

var errHeaderTooLarge = errors.New("the header is too large")

// nextData reads a DATA frame (RFC 9113, section 6.1).
func (in *input) nextData(header []byte) error {
	size := payloadBytes(header)
	padded := http2.Flags(header[4]).Has(http2.FlagDataPadded)
	in.data = dataFrame{
		id:   binary.BigEndian.Uint32(header[5:]) & (1<<31 - 1),
		size: int64(size),
		end:  http2.Flags(header[4]).Has(http2.FlagDataEndStream),
	}
	switch {
	case size > frameBytes:
		return http2.ConnectionError(http2.ErrCodeFrameSize)
	case in.data.id == 0:
		return http2.ConnectionError(http2.ErrCodeProtocol)
	}
	whole, err := in.buffer.Peek(frameHeaderBytes + size)
	if err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return err
	}
	if run, size := in.runAfter(whole); size > 0 {
		in.data.run, in.data.size, whole = run, size, run
	}
	// The bytes stay where they are until the buffer is read into again.
	if _, err := in.buffer.Discard(len(whole)); err != nil {
		return err
	}
	if in.data.run != nil {
		return nil
	}
	payload := whole[frameHeaderBytes:]
	if padded {
		if len(payload) == 0 || int(payload[0]) >= len(payload) {
			return http2.ConnectionError(http2.ErrCodeProtocol)
		}
		payload = payload[1 : len(payload)-int(payload[0])]
	}
	in.data.payload = payload
	return nil
}

// runAfter returns the run that begins with a DATA frame, which stands first in the
// buffer, and its payload's size, 0 if there is none.
func (in *input) runAfter(first []byte) (run []byte, size int64) {
	if !onlyPayload(first) {
		return nil, 0
	}
	all, err := in.buffer.Peek(in.buffer.Buffered())
	if err != nil {
		return nil, 0
	}
	end := len(first)
	size = int64(payloadBytes(first))
	for rest := all[end:]; len(rest) >= frameHeaderBytes; rest = all[end:] {
		n := payloadBytes(rest)
		// The same but for its length: a DATA frame of the same stream without flags.
		if !bytes.Equal(rest[3:frameHeaderBytes], first[3:frameHeaderBytes]) || n == 0 || n > frameBytes || len(rest) < frameHeaderBytes+n {
			break
		}
		end += frameHeaderBytes + n
		size += int64(n)
	}
	if end == len(first) {
		return nil, 0
	}
	return all[:end], size
}

// onlyPayload reports whether a DATA frame has some, and no flags.
func onlyPayload(frame []byte) bool { return frame[4] == 0 && payloadBytes(frame) > 0 }

// lastSetting returns the value that a setting has after a frame; of several the
// last counts (RFC 9113, section 6.5.3).
func lastSetting(f *http2.SettingsFrame, id http2.SettingID) (value uint32, ok bool) {
	for i := range f.NumSettings() {
		if s := f.Setting(i); s.ID == id {
			value, ok = s.Val, true
		}
	}
	return value, ok
}
