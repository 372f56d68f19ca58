package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"
	zaptest "go.uber.org/zap/zaptest/observer"
	"google.golang.org/grpc"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/agent/control"
	"github.com/cleave-cri/cleave/agent/upstream"
)

// onSocket serves HTTP on a unix socket and returns its path.
func onSocket(t *testing.T, handler http.Handler) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "control.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: handler, ReadHeaderTimeout: control.Timeout}
	var served sync.WaitGroup
	served.Go(func() { _ = server.Serve(l) }) //nolint:errcheck // ends with Close
	t.Cleanup(func() {
		if err := server.Close(); err != nil {
			t.Error(err)
		}
		served.Wait()
	})
	return path
}

// TestAnswerThatIsNoStatus: what the server says is told, and not that it is no JSON.
func TestAnswerThatIsNoStatus(t *testing.T) {
	t.Parallel()
	cases := []struct {
		name    string
		handler http.HandlerFunc
		want    []string
		not     string
	}{
		{"error in words", func(w http.ResponseWriter, _ *http.Request) {
			http.Error(w, "encode the status: too odd", http.StatusInternalServerError)
		}, []string{"500 Internal Server Error", "encode the status: too odd"}, "invalid character"},
		{"error as JSON", func(w http.ResponseWriter, _ *http.Request) {
			http.Error(w, `{"pid": 1}`, http.StatusNotFound)
		}, []string{"404 Not Found"}, ""},
		{"not JSON", func(w http.ResponseWriter, _ *http.Request) {
			_, _ = w.Write([]byte("hello")) //nolint:errcheck // the test fails then
		}, []string{"read the answer", "invalid character"}, ""},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			path := onSocket(t, tc.handler)
			_, err := FetchStatus(t.Context(), path)
			if err == nil {
				t.Fatal("it is taken for a status")
			}
			for _, want := range append(tc.want, path) {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("got %q without %q", err, want)
				}
			}
			if tc.not != "" && strings.Contains(err.Error(), tc.not) {
				t.Errorf("got %q, which is beside the point", err)
			}
		})
	}
}

// brokenListener can't accept.
type brokenListener struct{ net.Listener }

var errBroken = errors.New("broken")

func (brokenListener) Accept() (net.Conn, error) { return nil, errBroken }

// TestControlSocketThatBreaksIsTold: the proxy goes on without it.
func TestControlSocketThatBreaksIsTold(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "control.sock"))
	if err != nil {
		t.Fatal(err)
	}
	logs, seen := zaptest.New(zap.ErrorLevel)
	serveControl(controlServer(answers{metrics: http.NotFoundHandler()}), brokenListener{l}, zap.New(logs))
	if seen.Len() != 1 || !strings.Contains(fmt.Sprint(seen.All()[0].ContextMap()["error"]), errBroken.Error()) {
		t.Errorf("the log says %v, want one error %v", seen.All(), errBroken)
	}
	// A server that was closed is no fault.
	closed := controlServer(answers{metrics: http.NotFoundHandler()})
	if err := closed.Close(); err != nil {
		t.Fatal(err)
	}
	serveControl(closed, l, zap.New(logs))
	if seen.Len() != 1 {
		t.Errorf("the log says %v, want nothing of the closed one", seen.All()[1:])
	}
}

// namedRuntime is a runtime that says its name.
type namedRuntime struct {
	runtimeapi.UnimplementedRuntimeServiceServer
}

func (namedRuntime) Version(context.Context, *runtimeapi.VersionRequest) (*runtimeapi.VersionResponse, error) {
	return &runtimeapi.VersionResponse{RuntimeName: "named", RuntimeVersion: "7"}, nil
}

// TestRuntimeSocketWithOddLetters: a path is no URL.
func TestRuntimeSocketWithOddLetters(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"100%.sock", "a%41b.sock", "what?.sock", "no#1.sock", "with space.sock"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			// The folder of the test has its name in it, too long for a socket.
			dir, err := os.MkdirTemp("", "odd")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := os.RemoveAll(dir); err != nil {
					t.Error(err)
				}
			})
			path := filepath.Join(dir, name)
			l, err := net.Listen("unix", path)
			if err != nil {
				t.Fatal(err)
			}
			server := grpc.NewServer()
			runtimeapi.RegisterRuntimeServiceServer(server, namedRuntime{})
			var served sync.WaitGroup
			served.Go(func() { _ = server.Serve(l) }) //nolint:errcheck // ends with Stop
			t.Cleanup(func() { server.Stop(); served.Wait() })
			conn, err := upstream.Connect(path, upstream.Plain(path))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = conn.Close() }) //nolint:errcheck // end of test
			if s := runtimeStatus(t.Context(), conn, path); s.Error != "" || s.Name != "named" {
				t.Errorf("the runtime says %+v", s)
			}
		})
	}
}

// TestWorkMayTakeLong: what is done by POST goes on while a question that takes
// as long is broken off.
func TestWorkMayTakeLong(t *testing.T) {
	t.Parallel()
	working, goOn := make(chan struct{}), make(chan struct{})
	path := filepath.Join(t.TempDir(), "control.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	server := control.Server(map[string]control.Func{
		"POST /work": control.Without(func(ctx context.Context) (any, error) {
			close(working)
			<-goOn
			return nil, ctx.Err()
		}),
		"GET /question": control.Without(func(ctx context.Context) (any, error) {
			ctx, cancel := context.WithTimeout(ctx, 300*time.Millisecond) // three times the limit
			defer cancel()
			<-ctx.Done()
			return nil, nil
		}),
	})
	server.ReadTimeout, server.WriteTimeout = 100*time.Millisecond, 100*time.Millisecond
	served := make(chan error, 1)
	go func() { served <- control.Serve(server, l) }()
	worked := make(chan error, 1)
	go func() { worked <- control.Ask(t.Context(), path, http.MethodPost, "/work", nil) }()
	<-working
	// It begins later and is broken off; the work is not.
	if err := control.Ask(t.Context(), path, http.MethodGet, "/question", nil); err == nil {
		t.Error("a question that takes long was answered")
	}
	close(goOn)
	if err := <-worked; err != nil {
		t.Errorf("the work was broken off: %v", err)
	}
	if err := errors.Join(server.Close(), <-served); err != nil {
		t.Error(err)
	}
}
