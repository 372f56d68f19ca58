package control_test

import (
	"context"
	"errors"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cleave-cri/cleave/agent/control"
)

func listen(t *testing.T) (net.Listener, string) {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "socket")
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() }) //nolint:errcheck // a server may have closed it
	return l, socket
}

// Work may take ten minutes. That the process is stopped, or hangs, is told as soon as of anything else.
func TestWhoDoesNotAnswerIsNotWaitedForAsForWork(t *testing.T) {
	t.Parallel()
	_, socket := listen(t) // connections wait there, and nobody takes them
	began := time.Now()
	err := control.Send(t.Context(), socket, http.MethodPost, "/work", nil, nil)
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "does not answer within "+control.Timeout.String()) {
		t.Errorf("got %v", err)
	}
	if took := time.Since(began); took > 6*control.Timeout {
		t.Errorf("it took %s", took)
	}
	if err := control.Send(t.Context(), filepath.Join(t.TempDir(), "none"), http.MethodPost, "/work", nil, nil); !errors.Is(err, control.ErrNotRunning) {
		t.Errorf("without a socket: %v", err)
	}
}

// Whoever answers at all is asked to work, whatever it says to an unknown path.
func TestWorkIsAskedFor(t *testing.T) {
	t.Parallel()
	l, socket := listen(t)
	server := control.Server(map[string]control.Func{
		"POST /work": control.With(func(_ context.Context, asked string) (any, error) { return map[string]int{asked: 3}, nil }),
	})
	served := make(chan error, 1)
	go func() { served <- control.Serve(server, l) }()
	var got struct {
		Done int `json:"done"`
	}
	if err := control.Send(t.Context(), socket, http.MethodPost, "/work", "done", &got); err != nil || got.Done != 3 {
		t.Errorf("got %+v, %v", got, err)
	}
	if err := control.Send(t.Context(), socket, http.MethodPost, "/none", nil, nil); err == nil || !strings.Contains(err.Error(), "404") {
		t.Errorf("an unknown path gives %v", err)
	}
	if err := server.Close(); err != nil {
		t.Error(err)
	}
	if err := <-served; err != nil {
		t.Error(err)
	}
}
