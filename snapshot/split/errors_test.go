package split

import (
	"errors"
	"io/fs"
	"strings"
	"testing"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/contrib/snapshotservice"
	"github.com/containerd/errdefs"
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
	s := initialised(t, folders(t))
	_, err = snapshotservice.FromSnapshotter(s).Prepare(t.Context(), &snapshotsapi.PrepareSnapshotRequest{})
	if got := status.Convert(err); got.Code() != codes.InvalidArgument || strings.Contains(got.Message(), "invalid argument") || !strings.HasSuffix(got.Message(), "this one 0") {
		t.Errorf("over gRPC: %v", got)
	}
	if err := s.ConfirmCleanup(t.Context()); !errdefs.IsFailedPrecondition(err) || err.Error() != "confirm a clean-up: none is waiting to be confirmed" {
		t.Errorf("got %v", err)
	}
}
