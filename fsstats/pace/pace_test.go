package pace

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func TestNoBurstAfterALongStall(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := NewBudget(1000).Worker()
		<-time.After(time.Hour) // a disk that hung
		began := time.Now()
		for range 1000 {
			if err := p.Entry(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if took := time.Since(began); took < 800*time.Millisecond || took > time.Second {
			t.Errorf("1000 entries took %v, want 1s less the %v that may be made up for", took, maxBehind)
		}
	})
}

// TestWorkersShareABudget: two workers together get no more than one alone.
func TestWorkersShareABudget(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b, began := NewBudget(1000), time.Now()
		var workers sync.WaitGroup
		for range 2 {
			workers.Go(func() {
				for p, i := b.Worker(), 0; i < 5000; i++ {
					if err := p.Entry(t.Context()); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		workers.Wait()
		if took := time.Since(began); took < 9900*time.Millisecond || took > 10100*time.Millisecond {
			t.Errorf("10000 entries took %v, want 10s", took)
		}
	})
}

func TestEndOfContext(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		began := time.Now()
		p := NewBudget(1).Worker()
		var err error
		for err == nil {
			err = p.Entry(ctx)
		}
		if took := time.Since(began); !errors.Is(err, context.DeadlineExceeded) || took != time.Minute {
			t.Errorf("%v after %v, want the deadline after a minute", err, took)
		}
		unpaced := NewBudget(0).Worker()
		for i := 0; ; i++ {
			if unpaced.Entry(ctx) != nil {
				break
			}
			if i > 2*checkEvery {
				t.Fatal("the end is not noticed")
			}
		}
	})
}
