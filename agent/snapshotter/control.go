package snapshotter

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/containerd/errdefs"

	"github.com/cleave-cri/cleave/agent/control"
	"github.com/cleave-cri/cleave/snapshot/split"
)

const (
	// pathStatus is where the status socket answers with a [Status].
	pathStatus = "/v1/status"
	// pathConfirm does, on POST, the clean-up that waits to be confirmed.
	pathConfirm = "/v1/confirm-cleanup"
	// pathUsage answers with the usage of all snapshots, a [split.SnapshotUsage]
	// each.
	pathUsage = "/v1/usage"
	// pathLimits answers with the limits of writable layers, a [split.LayerLimit]
	// each. pathLimit sets one, on POST of a [LimitRequest], and answers with a
	// [LimitAnswer].
	pathLimits = "/v1/limits"
	pathLimit  = "/v1/limit"
)

// LimitRequest asks for a limit of a writable layer.
type LimitRequest struct {
	// Namespace is containerd's, Snapshot the snapshot's name there, which is the
	// ID of the container.
	Namespace string `json:"namespace"`
	Snapshot  string `json:"snapshot"`
	// Bytes is how much the layer may take, 0 for no limit.
	Bytes uint64 `json:"bytes"`
}

// LimitAnswer says what became of it.
type LimitAnswer struct {
	// Limit is the layer's account, nil if nothing was limited. Then either there
	// is no such writable layer, and Unknown says so, or it can't be limited, and
	// Refused says why in words for people.
	Limit   *split.LayerLimit `json:"limit,omitempty"`
	Unknown bool              `json:"unknown,omitempty"`
	Refused string            `json:"refused,omitempty"`
}

// ErrNotRunning says that no snapshotter answers on the status socket.
var ErrNotRunning = errors.New("the snapshotter is not running")

// controlServer answers on the status socket, for whoever may connect, which is
// root.
func (p *process) controlServer() *http.Server {
	return control.Server(map[string]control.Func{
		"GET " + pathStatus:   control.Without(func(ctx context.Context) (any, error) { return p.status(ctx), nil }),
		"POST " + pathConfirm: control.Without(func(ctx context.Context) (any, error) { return nil, p.backend.ConfirmCleanup(ctx) }),
		"GET " + pathUsage:    control.Without(func(ctx context.Context) (any, error) { return p.backend.Usages(ctx) }),
		"GET " + pathLimits:   control.Without(func(ctx context.Context) (any, error) { return p.backend.Limits(ctx) }),
		"POST " + pathLimit:   control.With(p.setLimit),
	})
}

// setLimit limits a writable layer, or says why not.
func (p *process) setLimit(ctx context.Context, r LimitRequest) (any, error) {
	limit, err := p.backend.SetLimit(ctx, r.Namespace, r.Snapshot, r.Bytes)
	switch {
	case errdefs.IsNotFound(err):
		return LimitAnswer{Unknown: true}, nil
	case errdefs.IsFailedPrecondition(err):
		return LimitAnswer{Refused: err.Error()}, nil
	case err != nil:
		return nil, err
	}
	return LimitAnswer{Limit: &limit}, nil
}

// FetchStatus asks the snapshotter that is running for its status. It returns
// [ErrNotRunning] if none answers on the socket.
func FetchStatus(ctx context.Context, socket string) (Status, error) {
	var status Status
	if err := ask(ctx, socket, http.MethodGet, pathStatus, &status); err != nil {
		return Status{}, fmt.Errorf("ask the snapshotter for its status on %s: %w", socket, err)
	}
	return status, nil
}

// ConfirmCleanup lets the snapshotter that is running do the clean-up that its
// alarm holds up. It returns [ErrNotRunning] if none answers on the socket.
func ConfirmCleanup(ctx context.Context, socket string) error {
	if err := ask(ctx, socket, http.MethodPost, pathConfirm, nil); err != nil {
		return fmt.Errorf("the snapshotter on %s: %w", socket, err)
	}
	return nil
}

// FetchUsage asks the snapshotter that is running what each of its snapshots
// takes, as far as it knows. It measures nothing for that.
func FetchUsage(ctx context.Context, socket string) (usage []split.SnapshotUsage, err error) {
	if err := ask(ctx, socket, http.MethodGet, pathUsage, &usage); err != nil {
		return nil, fmt.Errorf("ask the snapshotter for the usage of its snapshots on %s: %w", socket, err)
	}
	return usage, nil
}

// FetchLimits asks the snapshotter that is running for the accounts of writable
// layers that have a project ID.
func FetchLimits(ctx context.Context, socket string) (limits []split.LayerLimit, err error) {
	if err := ask(ctx, socket, http.MethodGet, pathLimits, &limits); err != nil {
		return nil, fmt.Errorf("ask the snapshotter for limits on %s: %w", socket, err)
	}
	return limits, nil
}

// SetLimit has the snapshotter that is running limit a writable layer. That it
// can't be limited, or is not there, is in the answer and no error.
func SetLimit(ctx context.Context, socket string, r LimitRequest) (answer LimitAnswer, err error) {
	if err := explained(control.Send(ctx, socket, http.MethodPost, pathLimit, r, &answer)); err != nil {
		return LimitAnswer{}, fmt.Errorf("have the snapshotter on %s limit the writable layer of container %s: %w", socket, r.Snapshot, err)
	}
	return answer, nil
}

// ask calls the status socket.
func ask(ctx context.Context, socket, method, path string, into any) error {
	return explained(control.Ask(ctx, socket, method, path, into))
}

// explained says what to do where nobody answers.
func explained(err error) error {
	if errors.Is(err, control.ErrNotRunning) {
		return fmt.Errorf("%w: start `cleave snapshotter`, or set snapshotter.statusEndpoint", ErrNotRunning)
	}
	return err
}
