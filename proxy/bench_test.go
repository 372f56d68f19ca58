package proxy_test

import (
	"context"
	"strconv"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/cleave-cri/cleave/proxy"
	"github.com/cleave-cri/cleave/proxy/proxytest"
)

// BenchmarkCall makes calls of one message each way: directly, forwarded, and
// decoded for an interceptor that leaves the answer as it is. Caller, proxy and
// runtime are one process, so allocations are those of all three; what the proxy
// adds is the difference to direct.
func BenchmarkCall(b *testing.B) {
	const method = "/runtime.v1.RuntimeService/ListContainers"
	for _, size := range []int{1 << 10, 512 << 10} {
		eachRoute(b, method, func(b *testing.B, conn *grpc.ClientConn) {
			b.Helper()
			ctx := metadata.AppendToOutgoingContext(b.Context(), proxytest.AnswerBytes, strconv.Itoa(size))
			b.SetBytes(int64(size))
			var answer []byte
			for b.Loop() {
				if err := conn.Invoke(ctx, method, []byte("request"), &answer); err != nil {
					b.Fatal(err)
				}
			}
			if len(answer) != size {
				b.Fatalf("an answer of %d bytes, want %d", len(answer), size)
			}
		}, strconv.Itoa(size>>10)+"KiB")
	}
}

// BenchmarkStream sends one message after the other on one stream and waits for
// the answer to each: what a message costs, without the beginning of a call.
func BenchmarkStream(b *testing.B) {
	const method = "/future.v9.Service/Chat"
	shape := &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}
	eachRoute(b, method, func(b *testing.B, conn *grpc.ClientConn) {
		b.Helper()
		ctx, cancel := context.WithCancel(b.Context())
		defer cancel()
		cs, err := conn.NewStream(ctx, shape, method)
		if err != nil {
			b.Fatal(err)
		}
		var answer []byte
		for b.Loop() {
			if err := cs.SendMsg([]byte("request")); err != nil {
				b.Fatal(err)
			}
			if err := cs.RecvMsg(&answer); err != nil {
				b.Fatal(err)
			}
		}
	}, "")
}

// eachRoute runs a benchmark directly and by each of the two ways through cleave.
func eachRoute(b *testing.B, method string, bench func(*testing.B, *grpc.ClientConn), suffix string) {
	b.Helper()
	leave := func(context.Context, []byte) ([]byte, error) { return nil, nil }
	forwards := newWorld(b, proxy.Config{})
	decodes := newWorld(b, proxy.Config{Interceptors: map[string]proxy.AnswerFunc{method: leave}})
	for _, route := range []struct {
		name string
		conn *grpc.ClientConn
	}{{"direct", forwards.direct}, {"forwarded", forwards.through}, {"decoded", decodes.through}} {
		b.Run(route.name+suffix, func(b *testing.B) {
			b.ReportAllocs()
			bench(b, route.conn)
		})
	}
}
