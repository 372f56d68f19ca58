package walk

import (
	"context"
	"time"
)

// maxBehind is how far a walk may fall behind its budget and catch up later; a
// disk that was busy for long must not be followed by a burst.
const maxBehind = 100 * time.Millisecond

// pacer keeps a walk within its budget and looks whether it was cancelled.
type pacer struct {
	perEntry time.Duration // 0: no budget
	every    int           // entries between two looks at the clock
	left     int           // entries until the next look
	due      time.Time     // when the entries so far may have been looked at
}

func (p *pacer) start(entriesPerSecond int, now time.Time) {
	p.every, p.due = checkEvery, now
	if entriesPerSecond > 0 {
		p.perEntry = max(time.Second/time.Duration(entriesPerSecond), 1)
		p.every = min(max(entriesPerSecond/100, 1), checkEvery)
	}
	p.left = p.every
}

// entry is called before each entry. It waits if the walk is ahead of its
// budget and returns ctx's error if that has ended.
func (p *pacer) entry(ctx context.Context) error {
	if p.left > 0 {
		p.left--
		return nil
	}
	p.left = p.every - 1
	if err := ctx.Err(); err != nil || p.perEntry == 0 {
		return err
	}
	p.due = p.due.Add(time.Duration(p.every) * p.perEntry)
	ahead := time.Until(p.due)
	if ahead <= 0 {
		if ahead < -maxBehind {
			p.due = p.due.Add(-ahead - maxBehind)
		}
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
