package agent

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

	"go.uber.org/zap"
)

// controlTimeout bounds how long a client of the control socket may take to
// send its request and to take the answer.
const controlTimeout = 10 * time.Second

// pathStatus is where the control socket answers with a [Status].
const pathStatus = "/v1/status"

// controlServer answers on the control socket: HTTP and JSON, for `cleave
// status` and whoever else may connect, which is root.
func controlServer(status func(context.Context) Status) *http.Server {
	mux := http.NewServeMux()
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

// serveControl answers on the control socket until the server is closed. If it
// can't go on, that is told and no reason for the proxy to end.
func serveControl(server *http.Server, l net.Listener, log *zap.Logger) {
	err := server.Serve(l)
	if errors.Is(err, http.ErrServerClosed) || errors.Is(err, net.ErrClosed) {
		return
	}
	log.Error("the control socket is not served any more; calls still pass, SIGHUP makes a new one",
		zap.Stringer("socket", l.Addr()), zap.Error(err))
}

// ErrNotRunning says that no cleave answers on the control socket.
var ErrNotRunning = errors.New("cleave is not running")

// FetchStatus asks the cleave that is running for its status. It returns
// [ErrNotRunning] if none answers on the socket.
func FetchStatus(ctx context.Context, socket string) (Status, error) {
	ctx, cancel := context.WithTimeout(ctx, controlTimeout)
	defer cancel()
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		},
	}}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://cleave"+pathStatus, nil)
	if err != nil {
		return Status{}, fmt.Errorf("ask for the status: %w", err)
	}
	response, err := client.Do(request)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) {
		return Status{}, fmt.Errorf("ask for the status on %s: %w: start `cleave serve`, or name its control socket with --control", socket, ErrNotRunning)
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return Status{}, fmt.Errorf("ask for the status on %s: cleave is there and does not answer within %s; look at its log: %w", socket, controlTimeout, context.DeadlineExceeded)
	}
	if err != nil {
		return Status{}, fmt.Errorf("ask for the status on %s: %w", socket, err)
	}
	status, err := readStatus(response)
	if err = errors.Join(err, response.Body.Close()); err != nil {
		return Status{}, fmt.Errorf("ask for the status on %s: %w", socket, err)
	}
	return status, nil
}

// errorBodyBytes is how much of an answer that is no status goes into a message.
const errorBodyBytes = 500

func readStatus(response *http.Response) (Status, error) {
	if response.StatusCode != http.StatusOK {
		// What it says is for the message; that it can't be read changes nothing.
		body, _ := io.ReadAll(io.LimitReader(response.Body, errorBodyBytes)) //nolint:errcheck // see above
		return Status{}, fmt.Errorf("it answers %s: %s", response.Status, strings.TrimSpace(string(body)))
	}
	var status Status
	if err := json.NewDecoder(response.Body).Decode(&status); err != nil {
		return Status{}, fmt.Errorf("read the answer: %w", err)
	}
	return status, nil
}
