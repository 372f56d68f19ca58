package proxy

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc/mem"
)

// AnswerFunc looks at one encoded answer of the runtime and returns the one
// that the caller shall get, or nil to let the runtime's own pass byte for byte.
//
// It is called once for the answer of a unary call and once for each message
// of a stream. It reads values that are ready: no I/O, no waiting. It must not
// write to answer and may keep it. An error, a panic, or taking longer than
// [InterceptLimit] has the same effect as nil, and is counted.
type AnswerFunc func(ctx context.Context, answer []byte) ([]byte, error)

const (
	// InterceptLimit is how long an answer is held for an AnswerFunc, the wait
	// for one of the slots included. It guards against bugs: a good one takes microseconds.
	InterceptLimit = 50 * time.Millisecond

	// interceptsAtOnce bounds the AnswerFuncs that run at one time, those
	// that overran their time included, so that one that hangs can't pile up
	// goroutines.
	interceptsAtOnce = 32
)

// Reasons for which an interceptor did not get to answer.
const (
	reasonError = "error"
	reasonPanic = "panic"
	reasonSlow  = "slow"
	reasonBusy  = "busy"
)

// guard runs AnswerFuncs so that none of them can do harm.
type guard struct {
	funcs    map[string]AnswerFunc
	counters *counters
	log      *zap.Logger
	slots    chan struct{}
}

func newGuard(funcs map[string]AnswerFunc, c *counters, log *zap.Logger) *guard {
	return &guard{funcs: funcs, counters: c, log: log, slots: make(chan struct{}, interceptsAtOnce)}
}

// apply replaces the frame's content by what the method's AnswerFunc makes of
// it. Without one, or where that fails, the frame stays as it is.
func (g *guard) apply(ctx context.Context, method string, f *frame) {
	fn := g.funcs[method]
	if fn == nil {
		return
	}
	answer, reason, err := g.run(ctx, fn, f.data.Materialize())
	if reason != "" {
		if first := g.counters.fallBack(method, reason); first {
			g.log.Warn("an answer went through unchanged because its interceptor failed; further ones are only counted",
				zap.String("method", method), zap.String("reason", reason), zap.Error(err))
		}
		return
	}
	if answer == nil {
		return
	}
	f.free()
	f.data = mem.BufferSlice{mem.SliceBuffer(answer)}
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
			return nil, reasonError, r.err
		}
	case <-limit.C:
		return nil, reasonSlow, fmt.Errorf("no result within %s", InterceptLimit)
	}
}

// panicError is a recovered panic of an AnswerFunc.
type panicError struct{ value any }

func (e panicError) Error() string { return fmt.Sprintf("panic: %v", e.value) }
