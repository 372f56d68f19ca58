package snapshot

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"

	introspectionapi "github.com/containerd/containerd/api/services/introspection/v1"
	"google.golang.org/protobuf/types/known/emptypb"
)

// Identity says which containerd it is.
type Identity struct {
	// UUID is a random name that containerd keeps in its root folder: the same
	// over restarts, another one for a fresh root.
	UUID string
	// PID is containerd's process as this process sees it.
	PID int32
}

// ErrOtherPIDs says that containerd lives in another PID namespace, so that its
// process can't be recognised by a number.
var ErrOtherPIDs = errors.New("containerd runs in another PID namespace")

// Identity asks containerd who it is. It returns [ErrOtherPIDs] if its process
// can't be told from others.
func (s *Store) Identity(ctx context.Context) (Identity, error) {
	answer, err := introspectionapi.NewIntrospectionClient(s.conn).Server(ctx, &emptypb.Empty{})
	if err != nil {
		return Identity{}, fmt.Errorf("ask containerd who it is: %w", err)
	}
	own, err := pidNamespace()
	if err != nil {
		return Identity{}, err
	}
	return identityOf(answer, own)
}

func identityOf(answer *introspectionapi.ServerResponse, ownNamespace uint64) (Identity, error) {
	id := Identity{UUID: answer.GetUUID(), PID: int32(answer.GetPid())} //nolint:gosec // a pid_t
	switch {
	case id.UUID == "" || id.PID <= 0:
		return Identity{}, fmt.Errorf("ask containerd who it is: it answers with UUID %q and process %d", id.UUID, answer.GetPid())
	case answer.GetPidns() != ownNamespace:
		return Identity{}, fmt.Errorf("ask containerd who it is: %w: run cleave in the same one", ErrOtherPIDs)
	}
	return id, nil
}

// pidNamespace returns the inode number by which namespaces are told apart
// (namespaces(7), "The /proc/pid/ns/ directory"), as containerd does too.
func pidNamespace() (uint64, error) {
	info, err := os.Stat("/proc/self/ns/pid")
	if err != nil {
		return 0, fmt.Errorf("find our PID namespace: %w", err)
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, errors.New("find our PID namespace: no inode in the answer of stat")
	}
	return st.Ino, nil
}
