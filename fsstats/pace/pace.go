// Package pace keeps work on many small things within a budget: so many entries a
// second, by all workers together. It imports nothing else of this module; walks
// and scans below fsstats may import it.
package pace

import (
	"context"
	"sync"
	"time"
)

const (
	// maxBehind is how far the work may fall behind its budget and catch up
	// later; a disk that was busy for long must not be followed by a burst.
	maxBehind = 100 * time.Millisecond
	// checkEvery is after how many entries at most cancellation and budget are
	// looked at.
	checkEvery = 256
)

// Budget is how many entries may be looked at, by all workers together.
type Budget struct {
	perEntry time.Duration // 0: no budget
	every    int           // entries between two looks at the clock

	mu  sync.Mutex
	due time.Time // when the entries so far may have been looked at; guarded by mu
}

// NewBudget returns a budget of so many entries a second, over any stretch longer
// than about a tenth of a second. 0 or less means no limit.
func NewBudget(entriesPerSecond int) *Budget {
	b := &Budget{every: checkEvery, due: time.Now()}
	if entriesPerSecond > 0 {
		b.perEntry = max(time.Second/time.Duration(entriesPerSecond), 1)
		b.every = min(max(entriesPerSecond/100, 1), checkEvery)
	}
	return b
}

// Worker returns the pace of one more worker.
func (b *Budget) Worker() *Worker { return &Worker{budget: b, left: b.every} }

// take takes the next entries out of the budget and gives how long to wait
// before they are looked at.
func (b *Budget) take(entries int) time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.due = b.due.Add(time.Duration(entries) * b.perEntry)
	ahead := time.Until(b.due)
	if ahead < -maxBehind {
		b.due = b.due.Add(-ahead - maxBehind)
	}
	return ahead
}

// Worker is the pace of one worker. One goroutine uses it.
type Worker struct {
	budget *Budget
	left   int // entries until the next look
}

// Entry is called before each entry. It waits if the work is ahead of its budget,
// and returns ctx's error if that has ended; it notices so within 256 entries, or
// at once while it waits.
func (p *Worker) Entry(ctx context.Context) error {
	if p.left > 0 {
		p.left--
		return nil
	}
	p.left = p.budget.every - 1
	if err := ctx.Err(); err != nil || p.budget.perEntry == 0 {
		return err
	}
	ahead := p.budget.take(p.budget.every)
	if ahead <= 0 {
		return nil
	}
	timer := time.NewTimer(ahead)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}
