package snapshotter

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"strings"
	"syscall"
	"time"
)

const (
	// controlTimeout bounds how long a client of the status socket may take to
	// send its request and to take the answer.
	controlTimeout = 10 * time.Second
	// maxAnswerBytes is the largest answer that is read.
	maxAnswerBytes = 16 << 20
	// pathStatus is where the status socket answers with a [Status].
	pathStatus = "/v1/status"
	// pathConfirm does, on POST, the clean-up that waits to be confirmed.
	pathConfirm = "/v1/confirm-cleanup"
)

// ErrNotRunning says that no snapshotter answers on the status socket.
var ErrNotRunning = errors.New("the snapshotter is not running")

// controlServer answers on the status socket: HTTP and JSON, for whoever may
// connect, which is root.
func controlServer(status func(context.Context) Status, confirm func(context.Context) error) *http.Server {
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+pathConfirm, func(w http.ResponseWriter, r *http.Request) {
		if err := confirm(r.Context()); err != nil {
			http.Error(w, err.Error(), http.StatusConflict)
			return
		}
		w.WriteHeader(http.StatusNoContent)
	})
	mux.HandleFunc("GET "+pathStatus, func(w http.ResponseWriter, r *http.Request) {
		body, err := json.Marshal(status(r.Context()))
		if err != nil {
			http.Error(w, "encode the status: "+err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(body) //nolint:errcheck // the client is gone
	})
	return &http.Server{
		Handler:           mux,
		ReadHeaderTimeout: controlTimeout,
		ReadTimeout:       controlTimeout,
		WriteTimeout:      controlTimeout,
		IdleTimeout:       controlTimeout,
		MaxHeaderBytes:    16 << 10,
	}
}

func ignoreClosed(err error) error {
	if errors.Is(err, http.ErrServerClosed) || errors.Is(err, net.ErrClosed) {
		return nil
	}
	return fmt.Errorf("serve the status socket: %w", err)
}

// FetchStatus asks the snapshotter that is running for its status. It returns
// [ErrNotRunning] if none answers on the socket.
func FetchStatus(ctx context.Context, socket string) (Status, error) {
	body, err := ask(ctx, socket, http.MethodGet, pathStatus)
	if err != nil {
		return Status{}, fmt.Errorf("ask the snapshotter for its status on %s: %w", socket, err)
	}
	var status Status
	if err := json.Unmarshal(body, &status); err != nil {
		return Status{}, fmt.Errorf("read the snapshotter's status from %s: %w", socket, err)
	}
	return status, nil
}

// ConfirmCleanup lets the snapshotter that is running do the clean-up that its
// alarm holds up. It returns [ErrNotRunning] if none answers on the socket.
func ConfirmCleanup(ctx context.Context, socket string) error {
	if _, err := ask(ctx, socket, http.MethodPost, pathConfirm); err != nil {
		return fmt.Errorf("confirm a clean-up on %s: %w", socket, err)
	}
	return nil
}

// ask calls the status socket and returns the answer's body.
func ask(ctx context.Context, socket, method, path string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, controlTimeout)
	defer cancel()
	body, err := call(ctx, socket, method, path)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		return nil, fmt.Errorf("%w: start `cleave snapshotter`, or set snapshotter.statusEndpoint", ErrNotRunning)
	case errors.Is(err, context.DeadlineExceeded):
		return nil, fmt.Errorf("it is there and does not answer within %s; look at its log: %w", controlTimeout, context.DeadlineExceeded)
	}
	return body, err
}

func call(ctx context.Context, socket, method, path string) (_ []byte, err error) {
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		},
	}}
	request, err := http.NewRequestWithContext(ctx, method, "http://cleave"+path, nil)
	if err != nil {
		return nil, err
	}
	response, err := client.Do(request)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, response.Body.Close()) }()
	body, err := io.ReadAll(io.LimitReader(response.Body, maxAnswerBytes))
	if err != nil {
		return nil, err
	}
	if response.StatusCode >= http.StatusBadRequest {
		return nil, fmt.Errorf("answer %s: %s", response.Status, strings.TrimSpace(string(body)))
	}
	return body, nil
}
