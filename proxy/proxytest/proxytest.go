// Package proxytest holds what shows that a proxy is transparent: raw calls
// whose whole outcome (answers, header, trailer, status with details) can be
// compared, a list of every method of the CRI, and an echo runtime that answers
// any method, made-up ones too. Tests only; it speaks to a real runtime and to
// the echo runtime with the same code.
package proxytest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Call is one raw call.
type Call struct {
	// Method is the full name, "/service/method".
	Method string
	// Metadata goes with the call.
	Metadata metadata.MD
	// Odd goes with it as well: keys and values that grpc-go refuses to send
	// as metadata and other libraries don't.
	Odd metadata.MD
	// Requests are the encoded messages, sent in order and then half-closed.
	Requests [][]byte
	// Deadline, if not zero, bounds the call.
	Deadline time.Duration
}

// Outcome is all that a caller can see of a call.
type Outcome struct {
	Answers         [][]byte
	Header, Trailer metadata.MD
	Code            codes.Code
	Message         string
	// Details is the encoded google.rpc.Status, empty for OK.
	Details []byte
}

// Do makes a call as a stream in both directions, which on the wire is the same
// as a call of any other shape, and returns what came back.
func Do(ctx context.Context, conn *grpc.ClientConn, call Call) Outcome {
	ctx, cancel := context.WithCancel(metadata.NewOutgoingContext(ctx, call.Metadata))
	defer cancel()
	if call.Deadline > 0 {
		ctx, cancel = context.WithTimeout(ctx, call.Deadline)
		defer cancel()
	}
	if len(call.Odd) > 0 {
		ctx = context.WithValue(ctx, oddKey{}, call.Odd)
	}
	var out Outcome
	cs, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, call.Method)
	if err != nil {
		return out.ended(err)
	}
	for _, r := range call.Requests {
		if err := cs.SendMsg(r); err != nil {
			break // the status comes with RecvMsg
		}
	}
	if err := cs.CloseSend(); err != nil {
		return out.ended(err)
	}
	for {
		var answer []byte
		err := cs.RecvMsg(&answer)
		if err != nil {
			// Header of a stream that has ended does not wait; where there
			// was none it is empty.
			out.Header, _ = cs.Header() //nolint:errcheck // the status has it
			out.Trailer = cs.Trailer()
			if errors.Is(err, io.EOF) {
				err = nil
			}
			return out.ended(err)
		}
		out.Answers = append(out.Answers, answer)
	}
}

func (o Outcome) ended(err error) Outcome {
	st, _ := status.FromError(err)
	o.Code, o.Message = st.Code(), st.Message()
	if err != nil {
		o.Details, _ = proto.MarshalOptions{Deterministic: true}.Marshal(st.Proto()) //nolint:errcheck // can't fail for a status
	}
	return o
}

// oddKey is the key of a context under which odd metadata waits.
type oddKey struct{}

// oddSender sends it: what TagRPC adds to the context of a call is not examined.
type oddSender struct{}

func (oddSender) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context {
	odd, ok := ctx.Value(oddKey{}).(metadata.MD)
	if !ok {
		return ctx
	}
	rest, _ := metadata.FromOutgoingContext(ctx)
	return metadata.NewOutgoingContext(ctx, metadata.Join(rest, odd))
}

func (oddSender) HandleRPC(context.Context, stats.RPCStats) {}

func (oddSender) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

func (oddSender) HandleConn(context.Context, stats.ConnStats) {}

// Dial connects raw frames to a unix socket.
func Dial(path string) (*grpc.ClientConn, error) {
	return grpc.NewClient("unix://"+path,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithStatsHandler(oddSender{}),
		grpc.WithDefaultCallOptions(
			grpc.ForceCodecV2(bytesCodec{}),
			grpc.MaxCallRecvMsgSize(math.MaxInt32),
			grpc.MaxCallSendMsgSize(math.MaxInt32)),
	)
}

// EveryCRIMethod returns a call with an empty request for each method of the
// CRI, in a fixed order.
func EveryCRIMethod() []Call {
	var calls []Call
	for _, service := range []grpc.ServiceDesc{runtimeapi.RuntimeService_ServiceDesc, runtimeapi.ImageService_ServiceDesc} {
		for _, m := range service.Methods {
			calls = append(calls, Call{Method: "/" + service.ServiceName + "/" + m.MethodName, Requests: [][]byte{{}}})
		}
		for _, s := range service.Streams {
			calls = append(calls, Call{Method: "/" + service.ServiceName + "/" + s.StreamName, Requests: [][]byte{{}}})
		}
	}
	slices.SortFunc(calls, func(a, b Call) int { return strings.Compare(a.Method, b.Method) })
	return calls
}

// Metadata keys by which a call tells the echo runtime how to answer.
const (
	// AnswerBytes makes each answer that many zero bytes long.
	AnswerBytes = "echo-answer-bytes"
	// StatusCode ends the call with that code (a number), a message and
	// details. A method of the CRI then sends no answer before it, as no unary
	// method can.
	StatusCode = "echo-status-code"
	// Hold makes the call wait after the header until the caller or the
	// runtime goes away, or for as long as the value, a duration, says.
	Hold = "echo-hold"
)

// EchoRuntime serves any method on a listener and answers in a way that shows
// what arrived: the header names the content type and carries the caller's
// metadata, each message comes back with its number, the trailer counts them
// and carries the caller's metadata whose key begins with x-odd.
type EchoRuntime struct {
	server *grpc.Server
	// Seen gets the full method name of each call, if not nil.
	Seen func(ctx context.Context, method string)
}

// NewEchoRuntime returns a runtime that is not yet serving.
func NewEchoRuntime() *EchoRuntime {
	e := &EchoRuntime{}
	e.server = grpc.NewServer(
		grpc.ForceServerCodecV2(bytesCodec{}),
		grpc.MaxRecvMsgSize(math.MaxInt32),
		grpc.MaxSendMsgSize(math.MaxInt32),
		grpc.UnknownServiceHandler(func(_ any, ss grpc.ServerStream) error { return e.echo(ss) }),
	)
	return e
}

// Serve answers calls until [EchoRuntime.Stop].
func (e *EchoRuntime) Serve(l net.Listener) error { return e.server.Serve(l) }

// Stop ends all connections at once, as a killed runtime would.
func (e *EchoRuntime) Stop() { e.server.Stop() }

func (e *EchoRuntime) echo(ss grpc.ServerStream) error {
	ctx := ss.Context()
	method, _ := grpc.MethodFromServerStream(ss)
	if e.Seen != nil {
		e.Seen(ctx, method)
	}
	md, _ := metadata.FromIncomingContext(ctx)
	header := metadata.MD{"echo-method": {method}, "echo-content-type": md["content-type"]}
	for key, values := range md {
		if strings.HasPrefix(key, "x-") {
			header["echo-"+key] = values
		}
	}
	_, hasDeadline := ctx.Deadline()
	header.Set("echo-deadline", strconv.FormatBool(hasDeadline))
	// The stream's own SendHeader refuses what a server of another library may send.
	if err := grpc.SendHeader(ctx, header); err != nil {
		return err
	}
	if hold := md.Get(Hold); len(hold) > 0 {
		if err := wait(ctx, hold[0]); err != nil {
			return err
		}
	}
	silent := len(md.Get(StatusCode)) > 0 && strings.HasPrefix(method, "/runtime.v1.")
	count, bytes := 0, 0
	for {
		var request []byte
		err := ss.RecvMsg(&request)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		bytes += len(request)
		answer := append([]byte{byte(count)}, request...)
		if size := md.Get(AnswerBytes); len(size) > 0 {
			n, err := strconv.Atoi(size[0])
			if err != nil {
				return status.Errorf(codes.InvalidArgument, "%s: %v", AnswerBytes, err)
			}
			answer = make([]byte, n)
		}
		count++
		if silent {
			continue
		}
		if err := ss.SendMsg(answer); err != nil {
			return err
		}
	}
	trailer := metadata.MD{"echo-count": {strconv.Itoa(count)}, "echo-bytes": {strconv.Itoa(bytes)}, "echo-bin": {string([]byte{0, 1, 0xff})}}
	for key, values := range md {
		if strings.HasPrefix(key, "x-odd") {
			trailer["echo-"+key] = values
		}
	}
	if err := grpc.SetTrailer(ctx, trailer); err != nil {
		return err
	}
	return endWith(md)
}

func wait(ctx context.Context, hold string) error {
	d, err := time.ParseDuration(hold)
	if err != nil {
		return status.Errorf(codes.InvalidArgument, "%s: %v", Hold, err)
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return status.FromContextError(ctx.Err()).Err()
	}
}

func endWith(md metadata.MD) error {
	code := md.Get(StatusCode)
	if len(code) == 0 {
		return nil
	}
	n, err := strconv.ParseUint(code[0], 10, 32)
	if err != nil {
		return status.Errorf(codes.InvalidArgument, "%s: %v", StatusCode, err)
	}
	st, err := status.New(codes.Code(n), "as asked: naïve ünïcode").WithDetails(durationpb.New(90 * time.Second))
	if err != nil {
		return err
	}
	return st.Err()
}

// bytesCodec carries messages as byte slices. Its empty name keeps the plain
// content type application/grpc on the wire.
type bytesCodec struct{}

func (bytesCodec) Name() string { return "" }

func (bytesCodec) Marshal(v any) (mem.BufferSlice, error) {
	b, ok := v.([]byte)
	if !ok {
		return nil, fmt.Errorf("encode %T: raw calls take byte slices", v)
	}
	return mem.BufferSlice{mem.SliceBuffer(b)}, nil
}

func (bytesCodec) Unmarshal(data mem.BufferSlice, v any) error {
	b, ok := v.(*[]byte)
	if !ok {
		return fmt.Errorf("decode into %T: raw calls take byte slices", v)
	}
	*b = data.Materialize()
	return nil
}
