package snapshot

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	leasesapi "github.com/containerd/containerd/api/services/leases/v1"
	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"google.golang.org/grpc/metadata"
)

const (
	// leaseHeader names the lease that holds what a call makes (containerd,
	// core/leases: GRPCHeader).
	leaseHeader = "containerd-lease"
	// expireLabel ends a lease at a time (containerd, pkg/gc: labels of leases).
	expireLabel = "containerd.io/gc.expire"
	// pokeLife is how long a poke that was broken off leaves its lease behind.
	pokeLife = 5 * time.Minute
	// pokeCleanup bounds taking the scratch snapshot and lease away when the
	// caller has given up.
	pokeCleanup = 5 * time.Second
	// pokeName begins the names of both.
	pokeName = "cleave-poke-"
)

// Poke makes containerd compare a snapshotter with its own records and remove
// what it no longer knows. Without it, what was removed while the snapshotter
// was away keeps its disk space until another snapshot is removed (CTD-63,
// CTD-64). It makes an empty snapshot of its own and removes that, and returns
// when containerd has cleaned up.
func (s *Store) Poke(ctx context.Context, snapshotter string) error {
	name := pokeName + rand.Text()
	if err := s.poke(s.in(ctx), snapshotter, name); err != nil {
		return fmt.Errorf("poke snapshotter %s: %w", snapshotter, err)
	}
	return nil
}

func (s *Store) poke(ctx context.Context, snapshotter, name string) error {
	leases := leasesapi.NewLeasesClient(s.conn)
	snapshots := snapshotsapi.NewSnapshotsClient(s.conn)
	if _, err := leases.Create(ctx, &leasesapi.CreateRequest{ID: name, Labels: map[string]string{
		expireLabel: time.Now().Add(pokeLife).UTC().Format(time.RFC3339),
	}}); err != nil {
		return fmt.Errorf("make a lease: %w", err)
	}
	// Without the lease the snapshot could be collected before it is removed.
	_, err := snapshots.Prepare(metadata.AppendToOutgoingContext(ctx, leaseHeader, name),
		&snapshotsapi.PrepareSnapshotRequest{Snapshotter: snapshotter, Key: name})
	if err != nil {
		err = fmt.Errorf("make an empty snapshot: %w", err)
	}
	prepared := err == nil
	if ctx.Err() != nil {
		// What was made goes all the same.
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), pokeCleanup)
		defer cancel()
	}
	if prepared {
		// This marks the snapshotter; the cleaning up comes with the next
		// collection, which the deletion of the lease waits for.
		if _, removeErr := snapshots.Remove(ctx, &snapshotsapi.RemoveSnapshotRequest{Snapshotter: snapshotter, Key: name}); removeErr != nil {
			err = fmt.Errorf("remove the empty snapshot: %w", removeErr)
		}
	}
	if _, leaseErr := leases.Delete(ctx, &leasesapi.DeleteRequest{ID: name, Sync: true}); leaseErr != nil {
		err = errors.Join(err, fmt.Errorf("delete the lease: %w", leaseErr))
	}
	return err
}
