package h2relay_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// rawCodec carries messages as they are.
type rawCodec struct{}

var _ encoding.CodecV2 = rawCodec{}

func (rawCodec) Name() string { return "" }

func (rawCodec) Marshal(v any) (mem.BufferSlice, error) {
	b, ok := v.([]byte)
	if !ok {
		return nil, fmt.Errorf("encode %T", v)
	}
	return mem.BufferSlice{mem.SliceBuffer(b)}, nil
}

func (rawCodec) Unmarshal(data mem.BufferSlice, v any) error {
	b, ok := v.(*[]byte)
	if !ok {
		return fmt.Errorf("decode into %T", v)
	}
	*b = data.Materialize()
	return nil
}

// far is a listener for what a relay dials.
type far struct {
	conns <-chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func (f *far) Accept() (net.Conn, error) {
	select {
	case c := <-f.conns:
		return c, nil
	case <-f.done:
		return nil, net.ErrClosed
	}
}

func (f *far) Close() error   { f.once.Do(func() { close(f.done) }); return nil }
func (f *far) Addr() net.Addr { return &net.UnixAddr{Name: "far"} }

// serveGRPC serves what the relay dials with one handler for all methods.
func (w *world) serveGRPC(handler grpc.StreamHandler, opts ...grpc.ServerOption) *grpc.Server {
	srv := grpc.NewServer(append([]grpc.ServerOption{grpc.ForceServerCodecV2(rawCodec{}), grpc.MaxRecvMsgSize(1 << 30), grpc.UnknownServiceHandler(handler)}, opts...)...)
	var serving sync.WaitGroup
	serving.Go(func() {
		if err := srv.Serve(&far{conns: w.servers, done: make(chan struct{})}); err != nil {
			w.t.Error(err)
		}
	})
	w.t.Cleanup(func() { srv.Stop(); serving.Wait() })
	return srv
}

// dialGRPC returns a grpc client of the relay.
func (w *world) dialGRPC(opts ...grpc.DialOption) *grpc.ClientConn {
	w.t.Helper()
	conn, err := grpc.NewClient("passthrough:///localhost", append([]grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return w.connect(), nil }),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(rawCodec{}), grpc.MaxCallRecvMsgSize(1<<30)),
	}, opts...)...)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = conn.Close() }) //nolint:errcheck // end of test
	return conn
}

var both = &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}

// echo answers each message with itself.
func echo(_ any, ss grpc.ServerStream) error {
	for {
		var b []byte
		err := ss.RecvMsg(&b)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := ss.SendMsg(b); err != nil {
			return err
		}
	}
}

// TestEchoOfManyStreams: random numbers of messages of random sizes on many
// streams at a time come back as they were sent, with windows of all kinds.
func TestEchoOfManyStreams(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		server []grpc.ServerOption
		caller []grpc.DialOption
	}{
		"as grpc has them": {},
		"small":            {[]grpc.ServerOption{grpc.StaticStreamWindowSize(65535), grpc.StaticConnWindowSize(65535)}, []grpc.DialOption{grpc.WithStaticStreamWindowSize(65535), grpc.WithStaticConnWindowSize(65535)}},
		"large":            {[]grpc.ServerOption{grpc.StaticStreamWindowSize(1 << 20), grpc.StaticConnWindowSize(65535)}, []grpc.DialOption{grpc.WithStaticStreamWindowSize(8 << 20), grpc.WithStaticConnWindowSize(8 << 20)}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.serveGRPC(echo, tc.server...)
			conn := w.dialGRPC(tc.caller...)
			var streams sync.WaitGroup
			for seed := range uint64(20) {
				streams.Go(func() {
					r := rand.New(rand.NewPCG(seed, 1))
					cs, err := conn.NewStream(t.Context(), both, "/test/echo")
					if err != nil {
						t.Error(err)
						return
					}
					for i := range 1 + r.IntN(20) {
						want := noise(r.IntN(1 << (1 + r.IntN(18))))
						if err := cs.SendMsg(want); err != nil {
							t.Error(err)
							return
						}
						var got []byte
						if err := cs.RecvMsg(&got); err != nil || !bytes.Equal(got, want) {
							t.Errorf("seed %d, message %d: got %d bytes for %d, %v", seed, i, len(got), len(want), err)
							return
						}
					}
					if err := cs.CloseSend(); err != nil {
						t.Error(err)
					}
					if err := cs.RecvMsg(new([]byte)); !errors.Is(err, io.EOF) {
						t.Errorf("seed %d ends with %v", seed, err)
					}
				})
			}
			streams.Wait()
		})
	}
}

// TestLargeMessages: 16 MiB each way, while grpc's estimate lets the windows grow.
func TestLargeMessages(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveGRPC(echo)
	conn := w.dialGRPC()
	want := noise(16 << 20)
	var got []byte
	if err := conn.Invoke(t.Context(), "/test/echo", want, &got); err != nil || !bytes.Equal(got, want) {
		t.Fatalf("got %d bytes, %v", len(got), err)
	}
}

// TestStalledReaderHoldsUpNobody: a stream that is not read stands still alone.
func TestStalledReaderHoldsUpNobody(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveGRPC(func(srv any, ss grpc.ServerStream) error {
		if method, _ := grpc.MethodFromServerStream(ss); method != "/test/flood" {
			return echo(srv, ss)
		}
		for {
			if err := ss.SendMsg(noise(100_000)); err != nil {
				return err
			}
		}
	})
	conn := w.dialGRPC()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stalled, err := conn.NewStream(ctx, both, "/test/flood")
	if err != nil {
		t.Fatal(err)
	}
	if err := stalled.RecvMsg(new([]byte)); err != nil {
		t.Fatal(err)
	}
	want := noise(100_000)
	for range 100 {
		var got []byte
		if err := conn.Invoke(t.Context(), "/test/echo", want, &got); err != nil || !bytes.Equal(got, want) {
			t.Fatalf("got %d bytes, %v", len(got), err)
		}
	}
}

// TestCancelledAnswersLeaveTheWindow: calls given up in the middle of large
// answers take nothing of the connection's window along.
func TestCancelledAnswersLeaveTheWindow(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveGRPC(func(_ any, ss grpc.ServerStream) error { return ss.SendMsg(make([]byte, 300_000)) })
	conn := w.dialGRPC(grpc.WithStaticStreamWindowSize(1<<20), grpc.WithStaticConnWindowSize(65535))
	var callers sync.WaitGroup
	for range 4 {
		callers.Go(func() {
			for range 50 {
				ctx, cancel := context.WithCancel(t.Context())
				cs, err := conn.NewStream(ctx, both, "/test/large")
				if err != nil {
					t.Error(err)
				} else if _, err := cs.Header(); err != nil {
					t.Error(err)
				}
				cancel() // while the answer is on its way
			}
		})
	}
	callers.Wait()
	for range 10 {
		var got []byte
		if err := conn.Invoke(t.Context(), "/test/large", []byte{}, &got); err != nil || len(got) != 300_000 {
			t.Fatalf("got %d bytes, %v", len(got), err)
		}
	}
}

// TestEarlyEnd: the server ends while the caller still sends.
func TestEarlyEnd(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveGRPC(func(_ any, ss grpc.ServerStream) error {
		ss.SetTrailer(metadata.MD{"why-bin": {"\x00\xff"}})
		return status.Error(codes.ResourceExhausted, "enough: ünd schluß")
	})
	conn := w.dialGRPC()
	for range 20 {
		cs, err := conn.NewStream(t.Context(), both, "/test/upload")
		if err != nil {
			t.Fatal(err)
		}
		for err == nil {
			err = cs.SendMsg(make([]byte, 50_000))
		}
		err = cs.RecvMsg(new([]byte))
		if status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "ünd schluß") || cs.Trailer().Get("why-bin")[0] != "\x00\xff" {
			t.Fatalf("got %v, trailer %v", err, cs.Trailer())
		}
	}
}

// TestServerStopsGracefully: calls in flight are finished, those after go to the
// next connection, none fails.
func TestServerStopsGracefully(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	conn := w.dialGRPC()
	for range 5 {
		srv := grpc.NewServer(grpc.ForceServerCodecV2(rawCodec{}), grpc.UnknownServiceHandler(echo))
		l := &far{conns: w.servers, done: make(chan struct{})}
		served := make(chan error, 1)
		go func() { served <- srv.Serve(l) }()
		stop := make(chan struct{})
		var callers sync.WaitGroup
		for range 3 {
			callers.Go(func() {
				for i := range 50 {
					if i == 20 {
						select {
						case stop <- struct{}{}:
						default:
						}
					}
					var got []byte
					if err := conn.Invoke(t.Context(), "/test/echo", []byte("x"), &got); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		next(t, stop)
		// The listener goes on: the next server's connections are its as well.
		second := grpc.NewServer(grpc.ForceServerCodecV2(rawCodec{}), grpc.UnknownServiceHandler(echo))
		go func() { served <- second.Serve(&far{conns: w.servers, done: make(chan struct{})}) }()
		srv.GracefulStop()
		callers.Wait()
		second.GracefulStop()
		for range 2 {
			if err := next(t, served); err != nil {
				t.Error(err)
			}
		}
	}
}

// BenchmarkUnary measures calls through a relay in this process, answers of
// several sizes; direct is the same without the relay.
func BenchmarkUnary(b *testing.B) {
	for _, size := range []int{100, 100_000, 500_000} {
		answer := make([]byte, size)
		handler := func(_ any, ss grpc.ServerStream) error {
			if err := ss.RecvMsg(new([]byte)); err != nil {
				return err
			}
			return ss.SendMsg(answer)
		}
		for _, way := range []string{"direct", "relay"} {
			b.Run(fmt.Sprintf("%s/%d", way, size), func(b *testing.B) {
				w := newWorld(b)
				w.serveGRPC(handler)
				opts := []grpc.DialOption{grpc.WithStaticStreamWindowSize(4 << 20), grpc.WithStaticConnWindowSize(4 << 20)}
				if way == "direct" {
					opts = append(opts, grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
						here, there := w.pair()
						w.servers <- there
						return here, nil
					}))
				}
				conn := w.dialGRPC(opts...)
				b.ReportAllocs()
				b.SetBytes(int64(size))
				for b.Loop() {
					if err := conn.Invoke(b.Context(), "/test/call", []byte{}, new([]byte)); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

// Each call that ends is counted with the status that its caller got, one without a status too.
func TestStatusesAreCounted(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	held := make(chan struct{})
	w.serveGRPC(func(_ any, ss grpc.ServerStream) error {
		method, _ := grpc.Method(ss.Context())
		switch method {
		case "/s/missing":
			return status.Error(codes.NotFound, "it is not there")
		case "/s/odd":
			return status.Error(42, "a code of the future")
		case "/s/held":
			close(held)
			<-ss.Context().Done()
			return ss.Context().Err()
		}
		return ss.SendMsg([]byte("answer"))
	})
	conn := w.dialGRPC()
	call := func(ctx context.Context, method string) {
		var answer []byte
		if err := conn.Invoke(ctx, method, []byte("request"), &answer); (err == nil) != (method == "/s/good") {
			t.Errorf("%s: %v", method, err)
		}
	}
	for _, method := range []string{"/s/good", "/s/missing", "/s/odd"} {
		call(t.Context(), method)
	}
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-held; cancel() }()
	call(ctx, "/s/held")
	want := []string{"/s/good 0", "/s/missing 5", "/s/odd 42", "/s/held -1"}
	deadline := time.Now().Add(patience)
	for {
		w.mu.Lock()
		got := slices.Clone(w.statuses)
		w.mu.Unlock()
		if slices.Equal(want, got) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("counted %q, want %q", got, want)
		}
		runtime.Gosched()
	}
}
