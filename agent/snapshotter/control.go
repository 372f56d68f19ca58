package snapshotter

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/cleave-cri/cleave/agent/control"
)

const (
	// pathStatus is where the status socket answers with a [Status].
	pathStatus = "/v1/status"
	// pathConfirm does, on POST, the clean-up that waits to be confirmed.
	pathConfirm = "/v1/confirm-cleanup"
)

// ErrNotRunning says that no snapshotter answers on the status socket.
var ErrNotRunning = errors.New("the snapshotter is not running")

// controlServer answers on the status socket, for whoever may connect, which is
// root.
func controlServer(status func(context.Context) Status, confirm func(context.Context) error) *http.Server {
	return control.Server(map[string]func(context.Context) (any, error){
		"GET " + pathStatus:   func(ctx context.Context) (any, error) { return status(ctx), nil },
		"POST " + pathConfirm: func(ctx context.Context) (any, error) { return nil, confirm(ctx) },
	})
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

// ask calls the status socket.
func ask(ctx context.Context, socket, method, path string, into any) error {
	err := control.Ask(ctx, socket, method, path, into)
	if errors.Is(err, control.ErrNotRunning) {
		return fmt.Errorf("%w: start `cleave snapshotter`, or set snapshotter.statusEndpoint", ErrNotRunning)
	}
	return err
}
