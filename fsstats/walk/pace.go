package walk

import (
	"context"
	"sync"
	"time"
)

// maxBehind is how far a walk may fall behind its budget and catch up later; a
// disk that was busy for long must not be followed by a burst.
const maxBehind = 100 * time.Millisecond

// budget is how many entries may be looked at, by all workers together.
type budget struct {
	perEntry time.Duration // 0: no budget
	every    int           // entries between two looks at the clock

	mu  sync.Mutex
	due time.Time // when the entries so far may have been looked at; guarded by mu
}

func (b *budget) start(entriesPerSecond int, now time.Time) {
	b.every, b.due = checkEvery, now
	if entriesPerSecond > 0 {
		b.perEntry = max(time.Second/time.Duration(entriesPerSecond), 1)
		b.every = min(max(entriesPerSecond/100, 1), checkEvery)
	}
}

// take takes the next entries out of the budget and gives how long to wait
// before they are looked at.
func (b *budget) take(entries int) time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.due = b.due.Add(time.Duration(entries) * b.perEntry)
	ahead := time.Until(b.due)
	if ahead < -maxBehind {
		b.due = b.due.Add(-ahead - maxBehind)
	}
	return ahead
}

// pacer keeps one worker within the budget and looks whether the walk was
// cancelled.
type pacer struct {
	budget *budget
	left   int // entries until the next look
}

// entry is called before each entry. It waits if the walk is ahead of its
// budget and returns ctx's error if that has ended.
func (p *pacer) entry(ctx context.Context) error {
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
