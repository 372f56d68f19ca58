package proxy

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
)

// AnswerFunc looks at one encoded answer of the runtime and returns the one
// that the caller shall get, or nil to let the runtime's own pass byte for byte.
//
// It is called once for the answer of a unary call and once for each message
// of a stream. It reads values that are ready: no I/O, no waiting. It must not
// write to answer and may keep it. An error, a panic, or taking longer than
// [InterceptLimit] has the same effect as nil, and is counted.
type AnswerFunc func(ctx context.Context, answer []byte) ([]byte, error)

// RequestFunc is to the requests of a call what an [AnswerFunc] is to its answers,
// in all points.
type RequestFunc func(ctx context.Context, request []byte) ([]byte, error)

// GateFunc holds up a call until it may be made, at most [GateLimit], when ctx is
// done. Its error is the answer: a grpc status as it is, anything else as
// Unavailable. A panic lets the call pass, and is counted.
type GateFunc func(ctx context.Context) error

// HoldFunc holds up a call until it may be made, as a [GateFunc] does, by its
// request, which it must not write to. What it returns is called when the call
// has ended, and the caller has the end when it returns; nil if nobody has to know. It is called once for each request of a
// unary call, which has one unless it is ill-formed, and not for streams.
type HoldFunc func(ctx context.Context, request []byte) (ended func(), err error)

// Chain returns an AnswerFunc that applies two, the second to what the first made
// of the answer, or to the answer itself where the first failed.
func Chain(first, second AnswerFunc) AnswerFunc {
	return func(ctx context.Context, answer []byte) ([]byte, error) {
		better, err := first(ctx, answer)
		if err != nil {
			better = nil
			if half := (halfError{}); errors.As(err, &half) {
				better = half.answer
			}
		}
		if better != nil {
			answer = better
		}
		best, nextErr := second(ctx, answer)
		if best == nil || nextErr != nil {
			best = better
		}
		if err = errors.Join(err, nextErr); err != nil && best != nil {
			return nil, halfError{best, err}
		}
		return best, err
	}
}

// ChainHolds returns a HoldFunc of two: the second is asked if the first lets the call be made. Should the second panic, the call is made
// and the first never hears of its end.
func ChainHolds(first, second HoldFunc) HoldFunc {
	return func(ctx context.Context, request []byte) (func(), error) {
		ended, err := first(ctx, request)
		if err != nil {
			return nil, err
		}
		if ended == nil {
			ended = func() {}
		}
		later, err := second(ctx, request)
		if err != nil {
			ended()
			return nil, err
		}
		if later == nil {
			return ended, nil
		}
		return func() { later(); ended() }, nil
	}
}

// halfError is that of one of two chained AnswerFuncs, with the answer of the other.
type halfError struct {
	answer []byte
	error
}

const (
	// InterceptLimit is how long an answer is held for an AnswerFunc, the wait
	// for one of the slots included. It guards against bugs: a good one takes microseconds.
	InterceptLimit = 50 * time.Millisecond

	// GateLimit is how long a GateFunc or a HoldFunc may hold up a call.
	GateLimit = 5 * time.Second

	// interceptsAtOnce bounds the AnswerFuncs that run at one time, those
	// that overran their time included, so that one that hangs can't pile up
	// goroutines.
	interceptsAtOnce = 32
)

// Reasons for which an interceptor did not get to answer. Those for requests and
// gates follow a word that says so.
const (
	reasonError = "error"
	reasonPanic = "panic"
	reasonSlow  = "slow"
	reasonBusy  = "busy"

	ofRequest = "request "
	ofGate    = "gate "
	ofHold    = "hold "
)

// guard runs AnswerFuncs and their like so that none of them can do harm.
type guard struct {
	answers   map[string]AnswerFunc
	fallbacks map[string]AnswerFunc
	requests  map[string]RequestFunc
	gates     map[string]GateFunc
	holds     map[string]HoldFunc

	counters *counters
	log      *zap.Logger
	slots    chan struct{}
}

func newGuard(cfg Config, c *counters, log *zap.Logger) *guard {
	return &guard{
		answers: cfg.Interceptors, fallbacks: cfg.Fallbacks, requests: cfg.Requests, gates: cfg.Gates, holds: cfg.Holds,
		counters: c, log: log, slots: make(chan struct{}, interceptsAtOnce),
	}
}

// knows reports whether there is anything to do for a method.
func (g *guard) knows(method string) bool {
	return g.answers[method] != nil || g.requests[method] != nil || g.gates[method] != nil || g.holds[method] != nil
}

// pass returns when a call may be made, or the error to answer with.
func (g *guard) pass(ctx context.Context, method string) (err error) {
	gate := g.gates[method]
	if gate == nil {
		return nil
	}
	defer func() {
		if p := recover(); p != nil {
			g.count(method, ofGate+reasonPanic, panicError{p})
			err = nil
		}
	}()
	limited, cancel := context.WithTimeout(ctx, GateLimit)
	defer cancel()
	return refusal(ctx, gate(limited))
}

// hold returns when a call with this request may be made, and what to call when
// it has ended; or the error to answer with.
func (g *guard) hold(ctx context.Context, method string, request *frame) (ended func(), err error) {
	fn := g.holds[method]
	if fn == nil {
		return func() {}, nil
	}
	defer func() {
		if p := recover(); p != nil {
			g.count(method, ofHold+reasonPanic, panicError{p})
			err = nil
		}
		if ended == nil {
			ended = func() {}
		}
	}()
	limited, cancel := context.WithTimeout(ctx, GateLimit)
	defer cancel()
	ended, err = fn(limited, request.data.Materialize())
	return ended, refusal(ctx, err)
}

// refusal is what a caller whose call is not made gets for the error of a gate
// or hold.
func refusal(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return status.FromContextError(ctx.Err()).Err()
	}
	if _, ok := status.FromError(err); ok {
		return err
	}
	return status.Errorf(codes.Unavailable, "cleave: %v", err)
}

// ask replaces a request by what the method's RequestFunc makes of it.
func (g *guard) ask(ctx context.Context, method string, f *frame) {
	if fn := g.requests[method]; fn != nil {
		g.replace(ctx, method, ofRequest, AnswerFunc(fn), nil, f)
	}
}

// apply replaces the frame's content by what the method's AnswerFunc makes of
// it. Without one, or where that fails, the frame stays as it is, or becomes what
// the method's fallback makes of it.
func (g *guard) apply(ctx context.Context, method string, f *frame) {
	if fn := g.answers[method]; fn != nil {
		g.replace(ctx, method, "", fn, g.fallbacks[method], f)
	}
}

func (g *guard) replace(ctx context.Context, method, kind string, fn, fallback AnswerFunc, f *frame) {
	old := f.data.Materialize()
	better, reason, err := g.run(ctx, fn, old)
	if reason != "" {
		g.count(method, kind+reason, err)
		if better == nil && fallback != nil {
			better = g.fallBack(ctx, method, fallback, old)
		}
	}
	if better == nil {
		return
	}
	f.free()
	f.data = mem.BufferSlice{mem.SliceBuffer(better)}
}

// fallBack runs a fallback where it is: all slots may be taken.
func (g *guard) fallBack(ctx context.Context, method string, fn AnswerFunc, answer []byte) (better []byte) {
	defer func() {
		if p := recover(); p != nil {
			g.count(method, reasonPanic, panicError{p})
			better = nil
		}
	}()
	better, err := fn(ctx, answer)
	if err != nil {
		g.count(method, reasonError, err)
	}
	return better
}

func (g *guard) count(method, reason string, err error) {
	if first := g.counters.fallBack(method, reason); first {
		g.log.Warn("a call went through unchanged because its interceptor failed; further ones are only counted",
			zap.String("method", method), zap.String("reason", reason), zap.Error(err))
	}
}

// run returns what fn answers, or the reason why it doesn't.
func (g *guard) run(ctx context.Context, fn AnswerFunc, answer []byte) (_ []byte, reason string, _ error) {
	limit := time.NewTimer(InterceptLimit)
	defer limit.Stop()
	select {
	case g.slots <- struct{}{}:
	case <-limit.C:
		return nil, reasonBusy, fmt.Errorf("%d interceptors are running already", interceptsAtOnce)
	}
	type result struct {
		answer []byte
		err    error
	}
	// The channel holds one result, so that a late fn never blocks on it.
	done := make(chan result, 1)
	// A fn that overruns its time can't be stopped, only left behind: its
	// goroutine ends with it, and the slot bounds how many there are.
	go func() {
		defer func() { <-g.slots }()
		defer func() {
			if p := recover(); p != nil {
				done <- result{err: panicError{p}}
			}
		}()
		a, err := fn(ctx, answer)
		done <- result{a, err}
	}()
	select {
	case r := <-done:
		switch {
		case r.err == nil:
			return r.answer, "", nil
		case errors.As(r.err, &panicError{}):
			return nil, reasonPanic, r.err
		default:
			half := halfError{}
			errors.As(r.err, &half)
			return half.answer, reasonError, r.err
		}
	case <-limit.C:
		return nil, reasonSlow, fmt.Errorf("no result within %s", InterceptLimit)
	}
}

// panicError is a recovered panic of an AnswerFunc.
type panicError struct{ value any }

func (e panicError) Error() string { return fmt.Sprintf("panic: %v", e.value) }
