package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/agent/control"
	"github.com/cleave-cri/cleave/agent/du"
)

// pathStatus is where the control socket answers with a [Status].
const pathStatus = "/v1/status"

// pathHandover is where it is told to hand over to a new process.
const pathHandover = "/v1/handover"

// endGrace is how long requests have that are being answered at the end.
const endGrace = 2 * time.Second

// pathMetrics is where it answers with metrics.
const pathMetrics = "/metrics"

// answers are what the control socket answers with.
type answers struct {
	status   func(context.Context) Status
	usage    func() Usage
	handOver func(context.Context) (any, error)
	metrics  http.Handler
	largest  func(context.Context, du.Request) (any, error)
	// decisions is nil where cleave does not reclaim.
	decisions *decisions
}

// controlServer answers on the control socket, for `cleave status`, for programs that collect metrics and whoever else may connect,
// which is root.
func controlServer(a answers) *http.Server {
	server := control.Server(map[string]control.Func{
		"GET " + pathStatus:    control.Without(func(ctx context.Context) (any, error) { return a.status(ctx), nil }),
		"GET " + pathUsage:     control.Without(func(context.Context) (any, error) { return a.usage(), nil }),
		"POST " + pathHandover: control.Without(a.handOver),
		"GET " + pathPlan:      control.Without(a.decisions.plan),
		"GET " + pathRequests:  control.Without(a.decisions.requests),
		"POST " + pathCollect:  control.With(a.decisions.collect),
		"POST " + pathExplain:  control.With(a.decisions.explain),
		"POST " + pathLargest:  control.With(a.largest),
	})
	mux := http.NewServeMux()
	mux.Handle("GET "+pathMetrics, a.metrics)
	mux.Handle("/", server.Handler)
	server.Handler = mux
	return server
}

// serveControl answers on the control socket until the server is closed. If it
// can't go on, that is told and no reason for the proxy to end.
func serveControl(server *http.Server, l net.Listener, log *zap.Logger) {
	if err := control.Serve(server, l); err != nil {
		log.Error("the control socket is not served any more; calls still pass, SIGHUP makes a new one", zap.Error(err))
	}
}

// endControl closes the server when ctx ends. Who asked for a handover still gets
// the answer.
func endControl(ctx context.Context, server *http.Server) {
	<-ctx.Done()
	limit, cancel := context.WithTimeout(context.WithoutCancel(ctx), endGrace)
	defer cancel()
	if server.Shutdown(limit) != nil {
		_ = server.Close() //nolint:errcheck // it is over
	}
}

// AskHandover tells the cleave that is running to hand over to a new process of
// its program, with the configuration as it is now, and returns the new one's
// PID when that answers calls. If there is none the error says why, and the old
// one goes on.
func AskHandover(ctx context.Context, socket string) (pid int, _ error) {
	var h Handover
	err := control.Ask(ctx, socket, http.MethodPost, pathHandover, &h)
	if errors.Is(err, control.ErrNotRunning) {
		err = fmt.Errorf("%w: nobody answers on its control socket; if control.endpoint was changed, restart cleave instead", ErrNotRunning)
	}
	if err != nil {
		return 0, fmt.Errorf("hand over to a new cleave on %s: %w", socket, err)
	}
	return h.PID, nil
}

// ErrNotRunning says that no cleave answers on the control socket.
var ErrNotRunning = errors.New("cleave is not running")

// FetchMetrics asks the cleave that is running for its metrics, as they are for Prometheus. It returns [ErrNotRunning] if none
// answers on the socket.
func FetchMetrics(ctx context.Context, socket string) (string, error) {
	var text strings.Builder
	err := control.Ask(ctx, socket, http.MethodGet, pathMetrics, &text)
	if errors.Is(err, control.ErrNotRunning) {
		err = ErrNotRunning
	}
	if err != nil {
		return "", fmt.Errorf("ask for the metrics on %s: %w", socket, err)
	}
	return text.String(), nil
}

// FetchStatus asks the cleave that is running for its status. It returns
// [ErrNotRunning] if none answers on the socket.
func FetchStatus(ctx context.Context, socket string) (Status, error) {
	var status Status
	err := control.Ask(ctx, socket, http.MethodGet, pathStatus, &status)
	if errors.Is(err, control.ErrNotRunning) {
		err = fmt.Errorf("%w: start `cleave serve`, or name its control socket with --control", ErrNotRunning)
	}
	if err != nil {
		return Status{}, fmt.Errorf("ask for the status on %s: %w", socket, err)
	}
	return status, nil
}
