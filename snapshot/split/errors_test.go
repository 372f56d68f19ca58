package split

import (
	"errors"
	"io/fs"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// TestClassIsNotInTheText: containerd tells the class apart, over its protocol
// too, and people read only what happened.
func TestClassIsNotInTheText(t *testing.T) {
	t.Parallel()
	err := classed(errdefs.ErrFailedPrecondition, "none waits for %q: %w", "x", fs.ErrNotExist)
	if got := err.Error(); got != `none waits for "x": file does not exist` {
		t.Errorf("it reads %q", got)
	}
	if !errdefs.IsFailedPrecondition(err) || !errors.Is(err, fs.ErrNotExist) {
		t.Error("the class or the cause is lost")
	}
	if got := status.Convert(errgrpc.ToGRPC(err)); got.Code() != codes.FailedPrecondition || got.Message() != err.Error() {
		t.Errorf("over gRPC: %v", got)
	}
	o := folders(t)
	s := initialised(t, o)
	if err := s.ConfirmCleanup(t.Context()); !errdefs.IsFailedPrecondition(err) || err.Error() != "confirm a clean-up: none is waiting to be confirmed" {
		t.Errorf("got %v", err)
	}
}
