package integration

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/metadata"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/lab/janitor"
	"github.com/cleave-cri/cleave/lab/need"
	"github.com/cleave-cri/cleave/lab/node"
	"github.com/cleave-cri/cleave/proxy/proxytest"
	"github.com/cleave-cri/cleave/proxy/unixsock"
)

// beforeEcho starts a cleave in front of an echo runtime.
func beforeEcho(t *testing.T) (*janitor.Run, *node.Cleave) {
	t.Helper()
	need.Root(t)
	run := need.Lab(t)
	socket := filepath.Join(run.Dir(), "echo.sock")
	l, err := unixsock.Listen(socket, unixsock.RootOnly)
	if err != nil {
		t.Fatal(err)
	}
	echo := proxytest.NewEchoRuntime()
	var served sync.WaitGroup
	served.Go(func() { _ = echo.Serve(l) }) //nolint:errcheck // ends with Stop
	t.Cleanup(func() { echo.Stop(); served.Wait() })
	c := startAlone(t, run, socket)
	return run, c
}

func rawDial(t *testing.T, c *node.Cleave) *grpc.ClientConn {
	t.Helper()
	conn, err := proxytest.Dial(c.Socket())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() }) //nolint:errcheck // end of test
	return conn
}

var version = proxytest.Call{Method: runtimeapi.RuntimeService_Version_FullMethodName, Requests: [][]byte{{}}}

// TestCallersThatMisbehaveDoNotHoldUpTheEnd: connections that say nothing, half
// a greeting or nonsense, and a caller that never takes its large answer, while
// cleave is told to stop. It serves others meanwhile and is gone within its time.
func TestCallersThatMisbehaveDoNotHoldUpTheEnd(t *testing.T) {
	t.Parallel()
	_, c := beforeEcho(t)
	ctx := bounded(t)
	for i, greeting := range []string{"", "PRI * HTTP/2.0\r\n", "GET / HTTP/1.1\r\n\r\n", strings.Repeat("\xff", 100_000)} {
		for range 5 {
			conn, err := net.Dial("unix", c.Socket())
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = conn.Close() }) //nolint:errcheck // end of test
			if _, err := conn.Write([]byte(greeting)); err != nil && i < 3 {
				t.Fatal(err)
			}
		}
	}
	idle := rawDial(t, c)
	cs, err := idle.NewStream(metadata.AppendToOutgoingContext(ctx, proxytest.AnswerBytes, "16777216"),
		&grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, "/future.v9.Service/Large")
	if err != nil {
		t.Fatal(err)
	}
	if err := cs.SendMsg([]byte{}); err != nil {
		t.Fatal(err)
	}
	if _, err := cs.Header(); err != nil { // and never RecvMsg
		t.Fatal(err)
	}
	if got := proxytest.Do(ctx, rawDial(t, c), version); got.Code != codes.OK {
		t.Errorf("another caller got %v %s", got.Code, got.Message)
	}
	if err := c.Signal(ctx, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if err := c.Stop(ctx); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took > 30*time.Second {
		t.Errorf("cleave took %s to end", took)
	}
}

// TestDescriptorsRunOutAndComeBack connects far more often than cleave may open
// descriptors; when the crowd is gone it serves as before.
func TestDescriptorsRunOutAndComeBack(t *testing.T) {
	t.Parallel()
	_, c := beforeEcho(t)
	ctx := bounded(t)
	s, err := c.Status(ctx)
	if err != nil {
		t.Fatal(err)
	}
	few := &unix.Rlimit{Cur: 64, Max: 64}
	if err := unix.Prlimit(s.PID, unix.RLIMIT_NOFILE, few, nil); err != nil {
		t.Fatal(err)
	}
	var crowd []net.Conn
	for range 300 {
		conn, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "unix", c.Socket())
		if err != nil {
			break // the queue of the socket is full
		}
		crowd = append(crowd, conn)
	}
	if len(crowd) < 64 {
		t.Fatalf("only %d connections", len(crowd))
	}
	for _, conn := range crowd {
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	}
	conn := rawDial(t, c)
	eventually(ctx, t, "a caller after the crowd", func() (string, bool) {
		got := proxytest.Do(ctx, conn, version)
		return fmt.Sprint(got.Code, got.Message), got.Code == codes.OK
	})
}

// TestOddCallsPass: compressed requests, a megabyte of metadata, an end before
// the beginning, and answers of the corrected methods that can't be decoded.
func TestOddCallsPass(t *testing.T) {
	t.Parallel()
	run, c := beforeEcho(t)
	ctx := bounded(t)
	direct, err := proxytest.Dial(filepath.Join(run.Dir(), "echo.sock"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = direct.Close() }) //nolint:errcheck // end of test
	through := rawDial(t, c)

	var compressed []byte
	if err := through.Invoke(ctx, version.Method, []byte(strings.Repeat("x", 10_000)), &compressed, grpc.UseCompressor(gzip.Name)); err != nil || len(compressed) != 10_001 {
		t.Errorf("a compressed request: %v, an answer of %d bytes", err, len(compressed))
	}
	large := version
	large.Metadata = metadata.MD{"x-large": {strings.Repeat("m", 1<<20)}}
	if want, got := proxytest.Do(ctx, direct, large), proxytest.Do(ctx, through, large); want.Code != got.Code || len(want.Header.Get("echo-x-large")) != len(got.Header.Get("echo-x-large")) {
		t.Errorf("a megabyte of metadata: %v %s through cleave, %v directly", got.Code, got.Message, want.Code)
	}
	// The echo runtime answers with the request behind a zero byte, which is no
	// message of the CRI: it comes through as it is, and is counted.
	info := proxytest.Call{Method: runtimeapi.ImageService_ImageFsInfo_FullMethodName, Requests: [][]byte{[]byte("garbage")}}
	if got := proxytest.Do(ctx, through, info); got.Code != codes.OK || string(got.Answers[0]) != "\x00garbage" {
		t.Errorf("an answer that can't be decoded came as %v %q", got.Code, got.Answers)
	}
	s, err := c.Status(ctx)
	if err != nil || len(s.Proxy.Fallbacks) != 1 || s.Proxy.Fallbacks[0].Reason != "error" {
		t.Errorf("fallbacks %v %v, want one error of ImageFsInfo", s.Proxy.Fallbacks, err)
	}
}

// TestRuntimeThatAcceptsAndSaysNothing: the caller's own deadline holds.
func TestRuntimeThatAcceptsAndSaysNothing(t *testing.T) {
	t.Parallel()
	need.Root(t)
	run := need.Lab(t)
	socket := filepath.Join(run.Dir(), "silent.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() }) //nolint:errcheck // end of test
	ctx := bounded(t)
	c := startAlone(t, run, socket)
	short, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	got := proxytest.Do(short, rawDial(t, c), version)
	if got.Code != codes.DeadlineExceeded && got.Code != codes.Unavailable {
		t.Errorf("got %v %s", got.Code, got.Message)
	}
	if _, err := c.Status(ctx); err != nil {
		t.Errorf("status: %v", err)
	}
}
