package settle

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// run lets a settler work in a bubble, with a collection that takes a while.
func run(t *testing.T, takes time.Duration, short bool, fails error, f func(t *testing.T, s *Settler, collected *atomic.Int64)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		var collected atomic.Int64
		ctx, stop := context.WithCancel(t.Context())
		s := New(func(ctx context.Context) error {
			timer := time.NewTimer(takes)
			defer timer.Stop()
			select {
			case <-timer.C:
			case <-ctx.Done():
				return ctx.Err()
			}
			collected.Add(1)
			return fails
		}, func() bool { return short }, zap.NewNop())
		ended := make(chan struct{})
		go func() { defer close(ended); s.Run(ctx) }()
		f(t, s, &collected)
		stop()
		<-ended
	})
}

// remove is a call that removes a container. It returns how long its end was held back.
func remove(t *testing.T, s *Settler) time.Duration {
	t.Helper()
	ended, err := s.Holds()[runtimeapi.RuntimeService_RemoveContainer_FullMethodName](t.Context(), nil)
	if err != nil {
		t.Error(err)
		return 0
	}
	began := time.Now()
	ended()
	return time.Since(began)
}

func TestGAP32_ARemovalEndsWhenItsSpaceIsBack(t *testing.T) {
	t.Parallel()
	run(t, 2*time.Second, true, nil, func(t *testing.T, s *Settler, collected *atomic.Int64) {
		if took := remove(t, s); took != 2*time.Second || collected.Load() != 1 {
			t.Errorf("the end came after %s and %d collections", took, collected.Load())
		}
	})
}

// One that begins while a collection is under way may not be in it.
func TestACollectionThatHasBegunDoesNotCount(t *testing.T) {
	t.Parallel()
	run(t, 2*time.Second, true, nil, func(t *testing.T, s *Settler, _ *atomic.Int64) {
		go remove(t, s)
		time.Sleep(time.Second) //nolint:forbidigo // in synctest
		if took := remove(t, s); took != 3*time.Second {
			t.Errorf("the end came after %s, want the rest of one and a whole one", took)
		}
	})
}

func TestManyRemovalsShareCollections(t *testing.T) {
	t.Parallel()
	run(t, time.Second, true, nil, func(t *testing.T, s *Settler, collected *atomic.Int64) {
		var all sync.WaitGroup
		for range 100 {
			all.Go(func() { remove(t, s) })
		}
		all.Wait()
		if n := collected.Load(); n > 2 {
			t.Errorf("%d collections for 100 removals at one time", n)
		}
	})
}

func TestNobodyWaitsWhileNothingIsShort(t *testing.T) {
	t.Parallel()
	run(t, time.Second, false, nil, func(t *testing.T, s *Settler, collected *atomic.Int64) {
		for range 60 { // one each half second
			if took := remove(t, s); took != 0 {
				t.Errorf("the end came after %s", took)
			}
			time.Sleep(time.Second / 2) //nolint:forbidigo // in synctest
		}
		// It is asked for all the same, a fifth of the time.
		if n := collected.Load(); n < 5 || n > 7 {
			t.Errorf("%d collections of a second in 30 s", n)
		}
	})
}

func TestNobodyWaitsForEver(t *testing.T) {
	t.Parallel()
	run(t, time.Hour, true, nil, func(t *testing.T, s *Settler, _ *atomic.Int64) {
		if took := remove(t, s); took != Patience {
			t.Errorf("the end came after %s, want %s", took, Patience)
		}
	})
	run(t, time.Millisecond, true, errors.New("containerd is away"), func(t *testing.T, s *Settler, _ *atomic.Int64) {
		if took := remove(t, s); took > time.Second {
			t.Errorf("where a collection fails the end came after %s", took)
		}
	})
}

func TestTheEndHoldsNobodyUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := New(func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }, func() bool { return true }, zap.NewNop())
		ctx, stop := context.WithCancel(t.Context())
		go s.Run(ctx)
		time.AfterFunc(time.Second, stop)
		if took := remove(t, s); took > time.Second {
			t.Errorf("the end came after %s", took)
		}
		// After it nothing is asked for.
		if took := remove(t, s); took > 0 {
			t.Errorf("after the end: %s", took)
		}
	})
}
