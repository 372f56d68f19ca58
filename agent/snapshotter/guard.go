package snapshotter

import (
	"context"
	"fmt"
	"runtime/debug"
	"strings"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// deletes says whether a method makes disk space free, and with it layers gone.
func deletes(method string) bool {
	service, name, _ := strings.Cut(strings.TrimPrefix(method, "/"), "/")
	return service == snapshotsapi.Snapshots_ServiceDesc.ServiceName && (name == "Remove" || name == "Cleanup")
}

// mayDelete says whether a process may call what deletes. Only the containerd
// that was identified may: another one would remove all snapshots that it does
// not know, which is all of them if its own root is fresh (CTD-32).
func mayDelete(pid int32, known knownContainerd) error {
	switch {
	case known.pid == 0:
		reason := known.reason
		if reason == "" {
			reason = "it has not been asked yet"
		}
		return status.Errorf(codes.Unavailable, "cleave deletes nothing before it knows which containerd asks for it: %s", reason)
	case pid != known.pid:
		return status.Errorf(codes.PermissionDenied, "cleave deletes for containerd (process %d) only, and process %d asks: let it use a snapshotter of its own", known.pid, pid)
	default:
		return nil
	}
}

// guardUnary turns a panic into an error and lets only containerd delete.
func (p *process) guardUnary(ctx context.Context, request any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (_ any, err error) {
	defer p.caught(info.FullMethod, &err)
	if deletes(info.FullMethod) {
		if err := mayDelete(callerOf(ctx), p.watch.known()); err != nil {
			p.refused(info.FullMethod, err)
			return nil, err
		}
	}
	return handle(ctx, request)
}

func (p *process) guardStream(server any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) (err error) {
	defer p.caught(info.FullMethod, &err)
	return handle(server, stream)
}

// caught is deferred: it makes a panic the call's error.
func (p *process) caught(method string, err *error) {
	r := recover()
	if r == nil {
		return
	}
	p.counts.panics.Add(1)
	p.opt.Log.Error("a call broke", zap.String("method", method), zap.Any("panic", r), zap.ByteString("stack", debug.Stack()))
	*err = status.Error(codes.Internal, fmt.Sprintf("cleave snapshotter: a fault of its own in %s: %v: report this as a bug of cleave", method, r))
}

// refused counts refusals, and logs those that differ from the one before.
func (p *process) refused(method string, err error) {
	p.counts.refused.Add(1)
	reason := err.Error()
	if last := p.lastRefusal.Swap(&reason); last == nil || *last != reason {
		p.opt.Log.Warn("a deletion is refused", zap.String("method", method), zap.Error(err))
	}
}
