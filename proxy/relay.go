package proxy

import (
	"context"
	"errors"
	"io"
	"strings"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// endlessMethods are the calls that by their nature do not end by themselves;
// they are ended when cleave stops, so that the rest can be waited for.
// CRI v1: GetContainerEvents streams "container events" for as long as the
// caller listens; so does containerd's own stream of events, which callers have
// where cleave is in containerd's place.
var endlessMethods = map[string]bool{
	runtimeapi.RuntimeService_GetContainerEvents_FullMethodName: true,
	"/containerd.services.events.v1.Events/Subscribe":           true,
}

// relay takes calls from a grpc server and makes them on the runtime's
// connection, raw frame by raw frame.
type relay struct {
	upstream *grpc.ClientConn
	// socket is the path of the runtime's socket.
	socket string
	guard  *guard

	// aborted is set before the runtime's connection is closed under calls
	// that are still in flight.
	aborted atomic.Bool
	// pumps counts the goroutines that carry frames from callers to the
	// runtime; the server waits for them when it stops.
	pumps sync.WaitGroup

	// stopping is done when cleave stops: it ends the endless calls.
	stopping context.Context //nolint:containedctx // a signal to many calls, not the context of one
	stop     context.CancelFunc
}

var (
	errStopping = status.Error(codes.Unavailable, "cleave is stopping or was replaced by a new process; call again")
	errAborted  = status.Error(codes.Unavailable, "cleave stopped before the container runtime answered; call again")
)

func newRelay(upstream *grpc.ClientConn, socket string, g *guard) *relay {
	r := &relay{upstream: upstream, socket: socket, guard: g}
	r.stopping, r.stop = context.WithCancel(context.Background()) //nolint:forbidigo // the root of a signal; no work runs under it
	return r
}

// register makes the relay serve everything: the known unary and streaming
// methods of the CRI by descriptors derived from the API's own, so that each
// takes the shortest way through grpc, and what is left as streams in both
// directions.
func (r *relay) register(opts []grpc.ServerOption) *grpc.Server {
	opts = append(opts, grpc.UnknownServiceHandler(func(_ any, ss grpc.ServerStream) error {
		method, ok := grpc.MethodFromServerStream(ss)
		if !ok {
			return status.Error(codes.Internal, "cleave: a call without a method name")
		}
		return r.stream(ss, method, &bidirectional)
	}))
	srv := grpc.NewServer(opts...)
	for _, known := range []*grpc.ServiceDesc{&runtimeapi.RuntimeService_ServiceDesc, &runtimeapi.ImageService_ServiceDesc} {
		srv.RegisterService(r.passThrough(known), nil)
	}
	return srv
}

// bidirectional describes a call of which nothing is known.
var bidirectional = grpc.StreamDesc{StreamName: "pass-through", ServerStreams: true, ClientStreams: true}

// passThrough derives from the description of a typed service one that carries
// raw frames for the same methods.
func (r *relay) passThrough(known *grpc.ServiceDesc) *grpc.ServiceDesc {
	desc := &grpc.ServiceDesc{ServiceName: known.ServiceName, Metadata: known.Metadata}
	for _, m := range known.Methods {
		method := "/" + known.ServiceName + "/" + m.MethodName
		// As a stream of requests, for to grpc a unary method has one and no
		// other, while a runtime may take it otherwise.
		desc.Streams = append(desc.Streams, grpc.StreamDesc{
			StreamName:    m.MethodName,
			ClientStreams: true,
			Handler: func(_ any, ss grpc.ServerStream) error {
				return r.unary(ss, method)
			},
		})
	}
	for _, s := range known.Streams {
		method := "/" + known.ServiceName + "/" + s.StreamName
		shape := grpc.StreamDesc{StreamName: s.StreamName, ServerStreams: s.ServerStreams, ClientStreams: s.ClientStreams}
		desc.Streams = append(desc.Streams, grpc.StreamDesc{
			StreamName:    s.StreamName,
			ServerStreams: s.ServerStreams,
			ClientStreams: s.ClientStreams,
			Handler: func(_ any, ss grpc.ServerStream) error {
				return r.stream(ss, method, &shape)
			},
		})
	}
	return desc
}

// unary makes one call with one message each way, in the goroutine that grpc
// gave it. A call with none or several is ill-formed, and the runtime's to answer.
func (r *relay) unary(ss grpc.ServerStream, method string) error {
	var requests [2]frame
	defer requests[0].free()
	defer requests[1].free()
	for i := range requests {
		err := ss.RecvMsg(&requests[i])
		switch {
		case errors.Is(err, io.EOF) && i == 1:
			return r.oneEachWay(ss, method, &requests[0])
		case errors.Is(err, io.EOF):
			return r.carry(ss, method, &bidirectional, nil)
		case err != nil:
			return err
		}
	}
	return r.carry(ss, method, &bidirectional, requests[:])
}

func (r *relay) oneEachWay(ss grpc.ServerStream, method string, request *frame) error {
	var header, trailer metadata.MD
	ctx := ss.Context()
	if err := r.guard.pass(ctx, method); err != nil {
		return err
	}
	r.guard.ask(ctx, method, request)
	ended, err := r.guard.hold(ctx, method, request)
	if err != nil {
		return err
	}
	defer ended()
	out, opts := outgoing(ctx, grpc.Header(&header), grpc.Trailer(&trailer))
	answer := &lastFrame{}
	defer answer.free()
	err = r.upstream.Invoke(out, method, request, &answer.frame, opts...)
	// Neither call can fail but where the caller is gone: nothing has been sent yet.
	if len(header) > 0 {
		_ = grpc.SetHeader(ctx, header) //nolint:errcheck // see above
	}
	if len(trailer) > 0 {
		_ = grpc.SetTrailer(ctx, trailer) //nolint:errcheck // see above
	}
	if err != nil {
		return r.statusOf(err, len(header)+len(trailer) > 0)
	}
	r.guard.apply(ctx, method, &answer.frame)
	return ss.SendMsg(answer)
}

// stream carries frames both ways until the runtime ends the call.
func (r *relay) stream(ss grpc.ServerStream, method string, shape *grpc.StreamDesc) error {
	return r.carry(ss, method, shape, nil)
}

// carry is stream for a call of which some requests were received already.
func (r *relay) carry(ss grpc.ServerStream, method string, shape *grpc.StreamDesc, received []frame) error {
	ctx := ss.Context()
	endless := endlessMethods[method]
	if endless {
		if r.stopping.Err() != nil {
			return errStopping
		}
		var cancel context.CancelFunc
		ctx, cancel = context.WithCancel(ctx)
		defer cancel()
		defer context.AfterFunc(r.stopping, cancel)()
	}
	if err := r.guard.pass(ctx, method); err != nil {
		return err
	}
	for i := range received {
		r.guard.ask(ctx, method, &received[i])
		ended, err := r.guard.hold(ctx, method, &received[i])
		if err != nil {
			return err
		}
		defer ended()
	}
	out, opts := outgoing(ctx)
	// Cancelling ends the call towards the runtime however this function is left.
	out, cancel := context.WithCancel(out)
	defer cancel()

	cs, err := r.upstream.NewStream(out, shape, method, opts...)
	if err != nil {
		return r.statusOf(err, false)
	}
	for i := range received {
		if err := cs.SendMsg(&received[i]); errors.Is(err, io.EOF) {
			break // the runtime ended the call; its status comes with the answers
		} else if err != nil {
			return r.statusOf(err, false)
		}
	}
	if shape.ClientStreams {
		r.pumps.Add(1)
		go func() {
			defer r.pumps.Done()
			if err := r.pumpRequests(ss, cs, method); err != nil {
				// The caller is gone or the stream is broken. grpc tells the
				// receiving side below; cancelling makes sure the runtime
				// learns of it as well.
				cancel()
			}
		}()
	} else if err := r.passOneRequest(ss, cs, method); err != nil {
		return r.statusOf(err, false)
	}
	answered, err := r.passAnswers(ss, cs, method)
	if endless && r.stopping.Err() != nil {
		return errStopping
	}
	return r.statusOf(err, answered)
}

// passOneRequest carries the single request of a server-streaming call.
func (r *relay) passOneRequest(ss grpc.ServerStream, cs grpc.ClientStream, method string) error {
	var f frame
	defer f.free()
	if err := ss.RecvMsg(&f); err != nil {
		return err
	}
	r.guard.ask(ss.Context(), method, &f)
	if err := cs.SendMsg(&f); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	// io.EOF says that the runtime has ended the call already; its status
	// comes with the answers.
	return cs.CloseSend()
}

// pumpRequests carries requests until the caller half-closes, which it passes
// on as well. It returns nil when the call goes on or was ended by the runtime.
func (r *relay) pumpRequests(ss grpc.ServerStream, cs grpc.ClientStream, method string) error {
	var f frame
	defer f.free()
	for {
		err := ss.RecvMsg(&f)
		if errors.Is(err, io.EOF) {
			return cs.CloseSend()
		}
		if err != nil {
			return err
		}
		r.guard.ask(ss.Context(), method, &f)
		err = cs.SendMsg(&f)
		if errors.Is(err, io.EOF) {
			return nil // the runtime ended the call; its status comes with the answers
		}
		if err != nil {
			return err
		}
	}
}

// passAnswers carries header, answers and trailer, and returns the runtime's
// status as an error (nil for OK), and whether anything at all came from the
// runtime. The header goes out as soon as it is there, before and without any
// message.
func (r *relay) passAnswers(ss grpc.ServerStream, cs grpc.ClientStream, method string) (answered bool, _ error) {
	header, err := cs.Header()
	if err == nil && header != nil {
		answered = true
		// Not the stream's own SendHeader and SetTrailer, which look at what
		// is in them as the client's side does.
		if err := grpc.SendHeader(ss.Context(), header); err != nil {
			return answered, err
		}
	}
	var f frame
	defer f.free()
	for {
		err := cs.RecvMsg(&f)
		if err != nil {
			trailer := cs.Trailer()
			_ = grpc.SetTrailer(ss.Context(), trailer) //nolint:errcheck // fails only if the caller is gone
			if errors.Is(err, io.EOF) {
				err = nil
			}
			return answered || len(trailer) > 0, err
		}
		r.guard.apply(ss.Context(), method, &f)
		if err := ss.SendMsg(&f); err != nil {
			return true, err
		}
	}
}

// statusOf returns the error to answer with: the runtime's own, but for calls
// that cleave itself broke off when it stopped. Where nothing came from the
// runtime, an Unavailable is one that grpc made here, and is made to name the
// runtime's socket.
func (r *relay) statusOf(err error, answered bool) error {
	code := status.Code(err)
	switch {
	case err == nil:
		return nil
	case code == codes.Canceled && r.aborted.Load():
		// Closing the connection under a call makes grpc end it like this.
		return errAborted
	case code == codes.Unavailable && !answered:
		if message := status.Convert(err).Message(); !strings.Contains(message, r.socket) {
			return status.Errorf(code, "container runtime at unix://%s: %s; is runtime.endpoint its CRI socket?", r.socket, message)
		}
	}
	return err
}

// outgoing turns the metadata that came with a call into that of the call to
// the runtime. What belongs to one hop alone is left to grpc: the connection's
// user agent, and which compressions this hop understands.
func outgoing(ctx context.Context, opts ...grpc.CallOption) (context.Context, []grpc.CallOption) {
	md, ok := metadata.FromIncomingContext(ctx)
	if !ok {
		return ctx, opts
	}
	if subtype := contentSubtype(md["content-type"]); subtype != "" {
		opts = append(opts, grpc.CallContentSubtype(subtype))
	}
	delete(md, "grpc-accept-encoding")
	delete(md, "content-type")
	delete(md, "user-agent")
	delete(md, ":authority")
	var odds metadata.MD
	for key, values := range md {
		if !odd(key, values) {
			continue
		}
		if odds == nil {
			odds = metadata.MD{}
		}
		odds[key] = values
		delete(md, key)
	}
	if odds != nil {
		ctx = context.WithValue(ctx, oddKey{}, odds)
	}
	return metadata.NewOutgoingContext(ctx, md), opts
}

// contentSubtype returns what follows "application/grpc+" (or ";"), empty for
// the plain content type (gRPC over HTTP/2 protocol, "Content-Type").
func contentSubtype(contentType []string) string {
	if len(contentType) == 0 {
		return ""
	}
	const base = "application/grpc"
	if len(contentType[0]) <= len(base)+1 || !strings.HasPrefix(contentType[0], base) {
		return ""
	}
	return contentType[0][len(base)+1:]
}
