package proxy

import (
	"context"
	"strings"

	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/stats"
)

// odd reports whether grpc-go refuses to send a metadata key with these values,
// ending the call with a status of its own: a key with anything but a-z 0-9 . - _
// or, unless the key ends in -bin, a value with anything but printable ASCII
// (grpc-go, internal/metadata: ValidatePair). HTTP/2 takes more, tabs and bytes
// from 0x80 among them (RFC 9113, 8.2.1), and so do callers with other libraries
// and every server, grpc-go's too.
func odd(key string, values []string) bool {
	for i := range len(key) {
		c := key[i]
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '.' && c != '-' && c != '_' {
			return true
		}
	}
	if strings.HasSuffix(key, "-bin") {
		return false
	}
	for _, value := range values {
		for i := range len(value) {
			if value[i] < 0x20 || value[i] > 0x7e {
				return true
			}
		}
	}
	return false
}

// oddKey is the key of a context under which a call's odd metadata waits.
type oddKey struct{}

// oddSender adds a call's odd metadata to the rest. grpc-go looks at the metadata
// of the context that a call is made with, and makes the call with the one that
// TagRPC returns (stats.Handler, "the context used for the rest lifetime of the
// RPC").
type oddSender struct{}

var _ stats.Handler = oddSender{}

// TagRPC implements [stats.Handler].
func (oddSender) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context {
	odd, ok := ctx.Value(oddKey{}).(metadata.MD)
	if !ok {
		return ctx
	}
	rest, _ := metadata.FromOutgoingContext(ctx)
	return metadata.NewOutgoingContext(ctx, metadata.Join(rest, odd))
}

// HandleRPC implements [stats.Handler].
func (oddSender) HandleRPC(context.Context, stats.RPCStats) {}

// TagConn implements [stats.Handler].
func (oddSender) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

// HandleConn implements [stats.Handler].
func (oddSender) HandleConn(context.Context, stats.ConnStats) {}
