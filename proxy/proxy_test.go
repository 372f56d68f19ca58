package proxy_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	"github.com/cleave-cri/cleave/proxy"
	"github.com/cleave-cri/cleave/proxy/proxytest"
	"github.com/cleave-cri/cleave/proxy/unixsock"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// world is a runtime, a proxy before it, and a connection to each.
type world struct {
	dir             string
	upstreamPath    string
	path            string
	server          *proxy.Server
	direct, through *grpc.ClientConn
}

func newWorld(t testing.TB, cfg proxy.Config) *world {
	t.Helper()
	w := newProxy(t, cfg)
	w.startRuntime(t, proxytest.NewEchoRuntime())
	return w
}

// newProxy is a world without a runtime.
func newProxy(t testing.TB, cfg proxy.Config) *world {
	t.Helper()
	dir := t.TempDir()
	w := &world{dir: dir, upstreamPath: filepath.Join(dir, "runtime.sock"), path: filepath.Join(dir, "cleave.sock")}
	cfg.Upstream = w.upstreamPath
	var err error
	if w.server, err = proxy.New(cfg); err != nil {
		t.Fatal(err)
	}
	serve(t, w.server, listen(t, w.path))
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
		defer cancel()
		_ = w.server.Drain(ctx) //nolint:errcheck // a second Drain in some tests
	})
	w.direct, w.through = dial(t, w.upstreamPath), dial(t, w.path)
	return w
}

func (w *world) startRuntime(t testing.TB, e *proxytest.EchoRuntime) {
	t.Helper()
	l := listen(t, w.upstreamPath)
	var served sync.WaitGroup
	served.Go(func() { _ = e.Serve(l) }) //nolint:errcheck // ends with Stop
	t.Cleanup(func() { e.Stop(); served.Wait() })
}

func listen(t testing.TB, path string) *net.UnixListener {
	t.Helper()
	l, err := unixsock.Listen(path, unixsock.RootOnly)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func serve(t testing.TB, s *proxy.Server, l *net.UnixListener) {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	t.Cleanup(func() {
		if err := <-done; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
}

func dial(t testing.TB, path string) *grpc.ClientConn {
	t.Helper()
	conn, err := proxytest.Dial(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	})
	return conn
}

// bothWays are configurations with which all calls go one of the two ways: as
// frames, or decoded because somebody might improve the answer.
func bothWays() map[string]proxy.Config {
	leave := func(context.Context, []byte) ([]byte, error) { return nil, nil }
	decoded := proxy.Config{Interceptors: map[string]proxy.AnswerFunc{}}
	for _, call := range proxytest.EveryCRIMethod() {
		decoded.Interceptors[call.Method] = leave
	}
	for _, method := range []string{"MadeUp", "NoMessage", "Fails", "Chat"} {
		decoded.Interceptors["/future.v9.Service/"+method] = leave
	}
	decoded.Interceptors["/runtime.v1.RuntimeService/NotYetInvented"] = leave
	return map[string]proxy.Config{"frames": {}, "decoded": decoded}
}

func TestT24_EveryMethodAnswersAsDirectly(t *testing.T) {
	t.Parallel()
	for name, cfg := range bothWays() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			everyMethodAnswersAsDirectly(t, cfg)
		})
	}
}

func everyMethodAnswersAsDirectly(t *testing.T, cfg proxy.Config) {
	t.Helper()
	w := newWorld(t, cfg)
	calls := proxytest.EveryCRIMethod()
	three := [][]byte{[]byte("one"), {}, []byte("three")}
	calls = append(calls,
		proxytest.Call{Method: "/future.v9.Service/MadeUp", Requests: three, Deadline: time.Minute},
		proxytest.Call{Method: "/future.v9.Service/NoMessage"},
		proxytest.Call{Method: "/runtime.v1.RuntimeService/NotYetInvented", Requests: three},
		proxytest.Call{Method: "/runtime.v1.RuntimeService/Version"},
		proxytest.Call{Method: "/runtime.v1.RuntimeService/Version", Requests: three},
		proxytest.Call{Method: "/runtime.v1.ImageService/PullImage", Requests: three, Metadata: metadata.MD{proxytest.StatusCode: {"9"}}},
		proxytest.Call{Method: "/future.v9.Service/Fails", Requests: three, Metadata: metadata.MD{proxytest.StatusCode: {"9"}}},
		proxytest.Call{Method: "/runtime.v1.RuntimeService/Version", Requests: [][]byte{{}}, Metadata: metadata.MD{proxytest.StatusCode: {"14"}}},
		proxytest.Call{Method: "/runtime.v1.RuntimeService/Version", Requests: [][]byte{{}}, Metadata: metadata.MD{proxytest.StatusCode: {"1"}}},
	)
	for i, call := range calls {
		t.Run(fmt.Sprintf("%d%s", i, strings.ReplaceAll(call.Method, "/", "_")), func(t *testing.T) {
			call.Metadata = metadata.Join(call.Metadata, metadata.MD{"x-twice": {"a", "b"}, "x-raw-bin": {string([]byte{0, 0xfe})}})
			want := proxytest.Do(t.Context(), w.direct, call)
			got := proxytest.Do(t.Context(), w.through, call)
			if want.Header.Get("echo-method") == nil {
				t.Fatalf("the runtime did not answer a direct call: %+v", want)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("through cleave differs from direct (-direct +through):\n%s", diff)
			}
			if ct := got.Header.Get("echo-content-type"); !cmp.Equal(ct, []string{"application/grpc"}) {
				t.Errorf("the runtime saw content type %q, want application/grpc", ct)
			}
		})
	}
}

func TestT24_ContentSubtypeOfTheCallerGoesOn(t *testing.T) {
	t.Parallel()
	for name, cfg := range bothWays() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			contentSubtypeOfTheCallerGoesOn(t, newWorld(t, cfg))
		})
	}
}

func contentSubtypeOfTheCallerGoesOn(t *testing.T, w *world) {
	t.Helper()
	var header metadata.MD
	var answer []byte
	err := w.through.Invoke(t.Context(), "/runtime.v1.RuntimeService/Version", []byte("x"), &answer,
		grpc.Header(&header), grpc.CallContentSubtype("proto"))
	if err != nil {
		t.Fatal(err)
	}
	if got := header.Get("echo-content-type"); !cmp.Equal(got, []string{"application/grpc+proto"}) {
		t.Errorf("the runtime saw content type %q, want application/grpc+proto", got)
	}
}

// TestMetadataThatGrpcRefusesPasses: what a caller or a runtime with another gRPC
// library sends and grpc-go would not, so that the call must not end with a status
// of grpc-go's own.
func TestMetadataThatGrpcRefusesPasses(t *testing.T) {
	t.Parallel()
	for name, cfg := range bothWays() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			metadataThatGrpcRefusesPasses(t, newWorld(t, cfg))
		})
	}
}

func metadataThatGrpcRefusesPasses(t *testing.T, w *world) {
	t.Helper()
	odd := metadata.MD{
		"x-odd-latin": {"na\xefve"}, "x-odd-utf8": {"ünï", "", "plain"}, "x-odd-tab": {"a\tb"},
		"x-odd!key": {"plain", "again"}, "x-odd~key-bin": {"\x00\xff", "\x01"},
	}
	for _, method := range []string{"/runtime.v1.RuntimeService/Version", "/runtime.v1.RuntimeService/GetContainerEvents", "/future.v9.Service/Chat"} {
		t.Run(filepath.Base(method), func(t *testing.T) {
			t.Parallel()
			call := proxytest.Call{
				Method: method, Requests: [][]byte{[]byte("x")}, Odd: odd,
				Metadata: metadata.MD{"x-odd-twice": {"a", "b"}, "x-plain": {"1"}},
			}
			want, got := proxytest.Do(t.Context(), w.direct, call), proxytest.Do(t.Context(), w.through, call)
			for key, values := range odd {
				if seen := want.Header["echo-"+key]; !cmp.Equal(seen, values) {
					t.Fatalf("the runtime did not see %q of a direct call: %+v", key, want)
				}
				if seen := want.Trailer["echo-"+key]; !cmp.Equal(seen, values) {
					t.Fatalf("a direct call's trailer has not %q: %q", key, seen)
				}
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("through cleave differs from direct (-direct +through):\n%s", diff)
			}
		})
	}
}

func TestT22_LargeMessagesBothWays(t *testing.T) {
	t.Parallel()
	for name, cfg := range bothWays() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			largeMessagesBothWays(t, newWorld(t, cfg))
		})
	}
}

func largeMessagesBothWays(t *testing.T, w *world) {
	t.Helper()
	for _, method := range []string{"/runtime.v1.RuntimeService/ListContainers", "/future.v9.Service/Stream"} {
		for _, size := range []int{0, 4195017, 16944430} {
			t.Run(fmt.Sprintf("%s_%d", filepath.Base(method), size), func(t *testing.T) {
				t.Parallel()
				got := proxytest.Do(t.Context(), w.through, proxytest.Call{
					Method: method, Requests: [][]byte{{}}, Metadata: metadata.MD{proxytest.AnswerBytes: {strconv.Itoa(size)}},
				})
				if got.Code != codes.OK || len(got.Answers) != 1 || len(got.Answers[0]) != size {
					t.Errorf("answer of %d bytes came as code %v, %d answers", size, got.Code, len(got.Answers))
				}
				request := make([]byte, size)
				got = proxytest.Do(t.Context(), w.through, proxytest.Call{
					Method: method, Requests: [][]byte{request}, Metadata: metadata.MD{proxytest.AnswerBytes: {"1"}},
				})
				if want := []string{strconv.Itoa(size)}; !cmp.Equal(want, got.Trailer.Get("echo-bytes")) {
					t.Errorf("the runtime got %v bytes, want %v", got.Trailer.Get("echo-bytes"), want)
				}
			})
		}
	}
}

func TestHeaderArrivesBeforeFirstMessage(t *testing.T) {
	t.Parallel()
	w := newWorld(t, proxy.Config{})
	ctx, cancel := context.WithCancel(metadata.AppendToOutgoingContext(t.Context(), proxytest.Hold, "1h"))
	defer cancel()
	cs, err := w.through.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, "/future.v9.Service/Held")
	if err != nil {
		t.Fatal(err)
	}
	header, err := cs.Header()
	if err != nil || header.Get("echo-method") == nil {
		t.Fatalf("header %v, error %v", header, err)
	}
}

func TestDeadlineAndCancelReachTheRuntime(t *testing.T) {
	t.Parallel()
	for _, method := range []string{"/runtime.v1.RuntimeService/StopContainer", "/runtime.v1.RuntimeService/GetContainerEvents", "/future.v9.Service/Chat"} {
		t.Run(filepath.Base(method), func(t *testing.T) {
			t.Parallel()
			w := newProxy(t, proxy.Config{})
			seen := make(chan context.Context, 1)
			echo := proxytest.NewEchoRuntime()
			echo.Seen = func(ctx context.Context, _ string) { seen <- ctx }
			w.startRuntime(t, echo)

			ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
			defer cancel()
			done := make(chan proxytest.Outcome, 1)
			go func() {
				done <- proxytest.Do(ctx, w.through, proxytest.Call{Method: method, Requests: [][]byte{{}}, Metadata: metadata.MD{proxytest.Hold: {"1h"}}})
			}()
			atRuntime := <-seen
			if d, ok := atRuntime.Deadline(); !ok || time.Until(d) < 50*time.Minute {
				t.Errorf("deadline at the runtime: %v %v, want about an hour", d, ok)
			}
			cancel()
			<-atRuntime.Done() // or the test times out
			if got := <-done; got.Code != codes.Canceled {
				t.Errorf("the caller got %v, want Canceled", got.Code)
			}
		})
	}
}

func TestRuntimeDownIsUnavailableAtOnceAndNamesTheSocket(t *testing.T) {
	t.Parallel()
	w := newProxy(t, proxy.Config{})
	version := proxytest.Call{Method: "/runtime.v1.RuntimeService/Version", Requests: [][]byte{{}}}
	for range 3 {
		got := proxytest.Do(t.Context(), w.through, version)
		if got.Code != codes.Unavailable || !strings.Contains(got.Message, w.upstreamPath) {
			t.Fatalf("got %v %q, want Unavailable naming %s", got.Code, got.Message, w.upstreamPath)
		}
	}
	// A caller that can wait is served within a second of the runtime's coming.
	w.startRuntime(t, proxytest.NewEchoRuntime())
	came := time.Now()
	for {
		got := proxytest.Do(t.Context(), w.through, version)
		if got.Code == codes.OK {
			break
		}
		if time.Since(came) > 10*time.Second {
			t.Fatalf("still %v %q", got.Code, got.Message)
		}
		runtime.Gosched()
	}
}

func TestInterceptorThatFailsLetsTheRuntimesBytesPass(t *testing.T) {
	t.Parallel()
	const method = "/runtime.v1.ImageService/ImageFsInfo"
	hang := make(chan struct{})
	cases := []struct {
		name   string
		fn     proxy.AnswerFunc
		reason string
		want   string
	}{
		{"answers", func(context.Context, []byte) ([]byte, error) { return []byte("better"), nil }, "", "better"},
		{"unchanged", func(context.Context, []byte) ([]byte, error) { return nil, nil }, "", "\x00request"},
		{"error", func(context.Context, []byte) ([]byte, error) { return []byte("no"), errors.New("bug") }, "error", "\x00request"},
		{"panic", func(context.Context, []byte) ([]byte, error) { panic("bug") }, "panic", "\x00request"},
		{"slow", func(context.Context, []byte) ([]byte, error) { <-hang; return []byte("late"), nil }, "slow", "\x00request"},
	}
	t.Cleanup(func() { close(hang) })
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			logs, seen := observer.New(zap.WarnLevel)
			w := newWorld(t, proxy.Config{Interceptors: map[string]proxy.AnswerFunc{method: tc.fn}, Log: zap.New(logs)})
			for range 2 {
				got := proxytest.Do(t.Context(), w.through, proxytest.Call{Method: method, Requests: [][]byte{[]byte("request")}})
				if len(got.Answers) != 1 || string(got.Answers[0]) != tc.want {
					t.Fatalf("got %q, want %q", got.Answers, tc.want)
				}
			}
			var want []proxy.Fallback
			if tc.reason != "" {
				want = []proxy.Fallback{{Method: method, Reason: tc.reason, Count: 2}}
			}
			if diff := cmp.Diff(want, w.server.Counters().Fallbacks); diff != "" {
				t.Errorf("fallbacks (-want +got):\n%s", diff)
			}
			if n := seen.Len(); n != len(want) {
				t.Errorf("%d warnings, want %d: repeated conditions are only counted", n, len(want))
			}
		})
	}
}

func TestInterceptorsThatHangAreBounded(t *testing.T) {
	t.Parallel()
	const method = "/runtime.v1.ImageService/ImageFsInfo"
	hang := make(chan struct{})
	w := newWorld(t, proxy.Config{Interceptors: map[string]proxy.AnswerFunc{
		method: func(context.Context, []byte) ([]byte, error) { <-hang; return nil, nil },
	}})
	t.Cleanup(func() { close(hang) })
	var calls sync.WaitGroup
	for range 64 {
		calls.Go(func() {
			got := proxytest.Do(t.Context(), w.through, proxytest.Call{Method: method, Requests: [][]byte{{}}})
			if got.Code != codes.OK {
				t.Errorf("got %v %s", got.Code, got.Message)
			}
		})
	}
	calls.Wait()
	reasons := map[string]int64{}
	for _, f := range w.server.Counters().Fallbacks {
		reasons[f.Reason] += f.Count
	}
	if want := map[string]int64{"slow": 32, "busy": 32}; !cmp.Equal(want, reasons) {
		t.Errorf("fallbacks %v, want %v", reasons, want)
	}
}

// hold makes a call that the runtime answers after some time, and says on the
// second channel that it has arrived there.
func hold(t *testing.T, conn *grpc.ClientConn, method, duration string) <-chan proxytest.Outcome {
	t.Helper()
	done := make(chan proxytest.Outcome, 1)
	go func() {
		done <- proxytest.Do(context.WithoutCancel(t.Context()), conn, proxytest.Call{
			Method: method, Requests: [][]byte{{}}, Metadata: metadata.MD{proxytest.Hold: {duration}},
		})
	}()
	return done
}

func arrivals(e *proxytest.EchoRuntime) <-chan string {
	ch := make(chan string, 1000)
	e.Seen = func(_ context.Context, method string) { ch <- method }
	return ch
}

func TestDrainAnswersWhatIsInFlightThenUnavailable(t *testing.T) {
	t.Parallel()
	w := newProxy(t, proxy.Config{})
	echo := proxytest.NewEchoRuntime()
	arrived := arrivals(echo)
	w.startRuntime(t, echo)
	short := hold(t, w.through, "/runtime.v1.RuntimeService/StopContainer", "200ms")
	long := hold(t, w.through, "/runtime.v1.ImageService/PullImage", "1h")
	chat := hold(t, w.through, "/future.v9.Service/Chat", "1h")
	events := hold(t, w.through, "/runtime.v1.RuntimeService/GetContainerEvents", "1h")
	for range 4 {
		<-arrived
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if err := w.server.Drain(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Drain returned %v, want its context's error", err)
	}
	if got := <-short; got.Code != codes.OK {
		t.Errorf("the short call got %v %s, want OK", got.Code, got.Message)
	}
	for name, ch := range map[string]<-chan proxytest.Outcome{"long": long, "chat": chat, "events": events} {
		if got := <-ch; got.Code != codes.Unavailable || !strings.Contains(got.Message, "cleave") {
			t.Errorf("the %s call got %v %q, want Unavailable from cleave", name, got.Code, got.Message)
		}
	}
}

// TestHandoverUnderLoadLosesNothing replaces the proxy 20 times on one listener
// under 8 callers, with a long call in flight at each of them.
func TestHandoverUnderLoadLosesNothing(t *testing.T) {
	t.Parallel()
	w := newProxy(t, proxy.Config{})
	echo := proxytest.NewEchoRuntime()
	w.startRuntime(t, echo)
	// Before anybody connects: what waits in the queue of the first listener,
	// which has no successor, would be lost with it.
	current, listener := w.server, listenerOf(t, w)

	var stop atomic.Bool
	var ok atomic.Int64
	var callers sync.WaitGroup
	for range 8 {
		conn := dial(t, w.path)
		callers.Go(func() {
			for !stop.Load() {
				got := proxytest.Do(t.Context(), conn, proxytest.Call{Method: "/runtime.v1.RuntimeService/Version", Requests: [][]byte{{}}})
				if got.Code != codes.OK {
					t.Errorf("a call was lost: %v %s", got.Code, got.Message)
					return
				}
				ok.Add(1)
			}
		})
	}
	// Fresh connections all the time are the hard case: accepted by one
	// process, to be served by it or the next.
	callers.Go(func() {
		for !stop.Load() {
			conn, err := proxytest.Dial(w.path)
			if err != nil {
				t.Error(err)
				return
			}
			got := proxytest.Do(t.Context(), conn, proxytest.Call{Method: "/runtime.v1.RuntimeService/Version", Requests: [][]byte{{}}})
			if got.Code != codes.OK {
				t.Errorf("a call on a fresh connection was lost: %v %s", got.Code, got.Message)
			}
			_ = conn.Close() //nolint:errcheck // test over
		}
	})

	for i := range 20 {
		before := ok.Load()
		long := hold(t, w.through, "/runtime.v1.ImageService/PullImage", "30ms")
		next, err := proxy.New(proxy.Config{Upstream: w.upstreamPath})
		if err != nil {
			t.Fatal(err)
		}
		dup := duplicate(t, listener)
		serve(t, next, dup)
		if err := current.Drain(t.Context()); err != nil {
			t.Errorf("handover %d: %v", i, err)
		}
		if got := <-long; got.Code != codes.OK {
			t.Errorf("handover %d: the long call got %v %s", i, got.Code, got.Message)
		}
		current = next
		for ok.Load() < before+20 && !t.Failed() {
			runtime.Gosched()
		}
	}
	stop.Store(true)
	callers.Wait()
	if err := current.Drain(t.Context()); err != nil {
		t.Error(err)
	}
	t.Logf("%d calls across 20 handovers", ok.Load())
}

// listenerOf returns a second handle on the world's listening socket, as a
// successor process would inherit it.
func listenerOf(t *testing.T, w *world) *os.File {
	t.Helper()
	// The first server listens on its own handle; take the path over with a
	// new one that is then shared by all successors.
	if err := os.Remove(w.path); err != nil {
		t.Fatal(err)
	}
	l := listen(t, w.path)
	f, err := l.File()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() }) //nolint:errcheck // end of test
	serve(t, w.server, l)
	return f
}

func duplicate(t *testing.T, f *os.File) *net.UnixListener {
	t.Helper()
	l, err := net.FileListener(f)
	if err != nil {
		t.Fatal(err)
	}
	ul, ok := l.(*net.UnixListener)
	if !ok {
		t.Fatalf("%T is not a unix listener", l)
	}
	return ul
}

func TestAbandonedStreamsLeaveNothing(t *testing.T) {
	t.Parallel()
	w := newProxy(t, proxy.Config{})
	echo := proxytest.NewEchoRuntime()
	arrived := arrivals(echo)
	w.startRuntime(t, echo)
	for range 4 {
		conn := dial(t, w.path)
		ctx, cancel := context.WithCancel(t.Context())
		for i := range 50 {
			method := []string{"/runtime.v1.RuntimeService/GetContainerEvents", "/future.v9.Service/Chat"}[i%2]
			md := metadata.AppendToOutgoingContext(ctx, proxytest.Hold, "1h")
			cs, err := conn.NewStream(md, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method)
			if err != nil {
				t.Fatal(err)
			}
			if err := cs.SendMsg([]byte{}); err != nil {
				t.Fatal(err)
			}
			<-arrived
		}
		cancel()
	}
	deadline := time.Now().Add(10 * time.Second)
	for w.server.Counters().CallsInFlight > 0 {
		if time.Now().After(deadline) {
			t.Fatalf("%d calls still in flight", w.server.Counters().CallsInFlight)
		}
		runtime.Gosched()
	}
	// goleak in TestMain sees the goroutines.
}

func TestCountersAndPeers(t *testing.T) {
	t.Parallel()
	logs, seen := observer.New(zap.InfoLevel)
	w := newWorld(t, proxy.Config{Log: zap.New(logs)})
	proxytest.Do(t.Context(), w.through, proxytest.Call{Method: "/runtime.v1.RuntimeService/Version", Requests: [][]byte{{}}})
	if got := w.server.Counters(); got.Calls != 1 || got.Connections != 1 {
		t.Errorf("counters %+v, want 1 call on 1 connection", got)
	}
	entries := seen.FilterMessage("connection accepted").All()
	if len(entries) != 1 || entries[0].ContextMap()["pid"] != int32(os.Getpid()) || entries[0].ContextMap()["uid"] != uint32(os.Getuid()) {
		t.Errorf("log of the connection: %v", entries)
	}
}

// TestRuntimeThatSpeaksSomethingElseIsNamed: the socket can be connected to, but
// is no CRI socket.
func TestRuntimeThatSpeaksSomethingElseIsNamed(t *testing.T) {
	t.Parallel()
	for name, greeting := range map[string]string{"closes": "", "HTTP/1": "HTTP/1.1 400 Bad Request\r\n\r\n", "garbage": strings.Repeat("\xff", 100)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newProxy(t, proxy.Config{})
			l := listen(t, w.upstreamPath)
			var served sync.WaitGroup
			served.Go(func() {
				for {
					conn, err := l.Accept()
					if err != nil {
						return
					}
					_, _ = conn.Write([]byte(greeting)) //nolint:errcheck // the caller may be gone
					_ = conn.Close()                    //nolint:errcheck // ditto
				}
			})
			t.Cleanup(func() { _ = l.Close(); served.Wait() }) //nolint:errcheck // end of test
			got := proxytest.Do(t.Context(), w.through, proxytest.Call{Method: "/runtime.v1.RuntimeService/Version", Requests: [][]byte{{}}})
			if got.Code != codes.Unavailable || !strings.Contains(got.Message, w.upstreamPath) {
				t.Errorf("got %v %q, want Unavailable naming %s", got.Code, got.Message, w.upstreamPath)
			}
		})
	}
}

// Calls are counted by method and status, and how long they took, whichever of the two ways they go.
func TestCallsAreCountedByMethodAndCode(t *testing.T) {
	t.Parallel()
	const list, version, events = "/runtime.v1.RuntimeService/ListContainers", "/runtime.v1.RuntimeService/Version", "/runtime.v1.RuntimeService/GetContainerEvents"
	w := newProxy(t, proxy.Config{Interceptors: map[string]proxy.AnswerFunc{list: func(_ context.Context, b []byte) ([]byte, error) { return b, nil }}})
	echo := proxytest.NewEchoRuntime()
	begun := make(chan struct{}, 10)
	echo.Seen = func(context.Context, string) { begun <- struct{}{} }
	w.startRuntime(t, echo)
	call := func(ctx context.Context, method string, md metadata.MD) {
		proxytest.Do(ctx, w.through, proxytest.Call{Method: method, Requests: [][]byte{{}}, Metadata: md})
	}
	notFound := metadata.MD{proxytest.StatusCode: {fmt.Sprint(int(codes.NotFound))}}
	for _, method := range []string{list, version} {
		call(t.Context(), method, nil)
		call(t.Context(), method, nil)
		call(t.Context(), method, notFound)
	}
	call(t.Context(), "/future.v9.Service/Chat", nil)
	call(t.Context(), "/future.v9.Service/Another", nil)
	for len(begun) > 0 {
		<-begun
	}
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-begun; cancel() }()
	call(ctx, events, metadata.MD{proxytest.Hold: {"1h"}})
	want := map[string]map[string]int64{
		"ListContainers": {"OK": 2, "NotFound": 1}, "Version": {"OK": 2, "NotFound": 1}, "other": {"OK": 2}, "GetContainerEvents": {"none": 1},
	}
	deadline := time.Now().Add(10 * time.Second)
	for {
		got, within := map[string]map[string]int64{}, map[string][]int64{}
		for _, m := range w.server.Counters().Methods {
			got[m.Method], within[m.Method] = m.ByCode, m.Within
			if (m.Seconds > 0) != (m.Method != "GetContainerEvents") {
				t.Errorf("%s took %g s", m.Method, m.Seconds)
			}
		}
		diff := cmp.Diff(want, got)
		if diff == "" {
			if n := within["ListContainers"]; len(n) != len(proxy.LatencyBounds())+1 || n[len(n)-1] != 3 || !slices.IsSorted(n) {
				t.Errorf("within the bounds %v", n)
			}
			if n := within["GetContainerEvents"]; len(n) > 0 {
				t.Errorf("a call that does not end by itself is within %v", n)
			}
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(diff)
		}
		runtime.Gosched()
	}
}
