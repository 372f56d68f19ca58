//go:build !race

// The race detector makes sync.Pool drop buffers at random, so these figures
// mean something without it only.

package proxy_test

import (
	"runtime"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/cleave-cri/cleave/proxy"
	"github.com/cleave-cri/cleave/proxy/proxytest"
)

// TestAllocationDoesNotGrowWithTheBody compares what the process allocates for
// a call through the proxy with a direct one: the difference is the proxy's,
// and it may not follow the size of the message, which the proxy never copies.
func TestAllocationDoesNotGrowWithTheBody(t *testing.T) {
	w := newWorld(t, proxy.Config{})
	small, large := share(t, w, "1024"), share(t, w, "524288")
	t.Logf("the proxy allocates %d bytes for a call with an answer of 1 KiB, %d with 512 KiB", small, large)
	if large > small+128<<10 {
		t.Errorf("the proxy allocates %d bytes more for 512 KiB: it copies", large-small)
	}
}

func share(t *testing.T, w *world, answerBytes string) int64 {
	t.Helper()
	direct, through := allocated(t, w.direct, answerBytes), allocated(t, w.through, answerBytes)
	return through - direct
}

// allocated returns how many bytes this process allocates for one call.
func allocated(t *testing.T, conn *grpc.ClientConn, answerBytes string) int64 {
	t.Helper()
	const calls = 200
	call := proxytest.Call{
		Method: "/runtime.v1.RuntimeService/ListContainers", Requests: [][]byte{{}},
		Metadata: metadata.MD{proxytest.AnswerBytes: {answerBytes}},
	}
	var before, after runtime.MemStats
	for i := range calls + 20 {
		if i == 20 {
			runtime.ReadMemStats(&before)
		}
		proxytest.Do(t.Context(), conn, call)
	}
	runtime.ReadMemStats(&after)
	return int64(after.TotalAlloc-before.TotalAlloc) / calls
}
