package proxy

import (
	"fmt"

	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
)

// frame is one gRPC message as it came from the wire, still encoded. It owns
// one reference to its buffers; whoever is done with a frame calls free.
type frame struct {
	data mem.BufferSlice
}

// free gives the buffers back to their pool. The frame is empty afterwards.
func (f *frame) free() {
	f.data.Free()
	f.data = nil
}

// lastFrame is a frame that its holder hands to grpc and never sees again: the
// answer of a unary call, which grpc encodes after the handler has returned.
type lastFrame struct {
	frame
}

// codecName is the name of the codec towards callers, that of protobuf: grpc
// picks the codec of a call by the sub-type in its content type, and "proto" is
// what a plain application/grpc means.
const codecName = "proto"

// frameCodec passes frames through without looking at or copying the bytes.
//
// Its name is the content sub-type that grpc writes on the wire of an outgoing
// call: the empty name yields the plain "application/grpc" that the runtime
// would get from the caller itself (grpc-go, rpc_util.go: setCallInfoCodec).
type frameCodec struct {
	name string
}

var _ encoding.CodecV2 = frameCodec{}

// Name implements [encoding.CodecV2].
func (c frameCodec) Name() string { return c.name }

// Marshal hands out the frame's own buffers, which grpc frees once they are
// written: of a frame with one more reference, of a lastFrame with its only one.
func (c frameCodec) Marshal(v any) (mem.BufferSlice, error) {
	switch f := v.(type) {
	case *frame:
		f.data.Ref()
		return f.data, nil
	case *lastFrame:
		data := f.data
		f.data = nil
		return data, nil
	default:
		return nil, fmt.Errorf("encode %T: the pass-through codec takes raw frames only", v)
	}
}

// Unmarshal keeps the received buffers, with a reference of the frame's own.
func (c frameCodec) Unmarshal(data mem.BufferSlice, v any) error {
	f, ok := v.(*frame)
	if !ok {
		return fmt.Errorf("decode into %T: the pass-through codec takes raw frames only", v)
	}
	data.Ref()
	f.free()
	f.data = data
	return nil
}
