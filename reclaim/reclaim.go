// Package reclaim deletes what the engine picked: dead containers and sandboxes,
// unused images, logs of pods that are gone and rotated logs. Nothing is decided
// here. A plan is a value, a step of engine/record: what there was to pick from
// and what was picked. It is made by Choice and its Items, shown by Page, and
// carried out by Run, item by item:
//
//   - Just before it acts it looks at the item again. What is not as the plan has
//     it is a surprise, and ends the step (ErrSurprise): a new plan is needed.
//   - A fact that can't be had is a surprise, too. Nothing is deleted for want of
//     a reason not to.
//   - After each deletion it waits for the space, for some seconds in all, and
//     notes what came free. What did not is explained, if somebody knows.
//
// Check does the same without deleting.
//
// It imports engine, engine/record and engine/garbage, agent/page, and
// snapshot/split/rootdir for confined deletions in the pods' log directory. Only
// agent may import it, which supplies the interfaces that it asks.
package reclaim

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cleave-cri/cleave/engine/record"
)

const (
	// patience is how long one step waits in all for space to come free:
	// filesystems and runtimes free in the background.
	patience = 5 * time.Second
	// pollFirst and pollLast are the first and the longest pause between two
	// looks at the filesystem.
	pollFirst = time.Millisecond
	pollLast  = 100 * time.Millisecond
	// hurryAfter is the pause before which nobody is hurried who has freed most.
	hurryAfter = 16 * time.Millisecond
	// watchEvery is how often the filesystem is looked at during a deletion.
	watchEvery = 20 * time.Millisecond
	// othersWait is how long nothing more must have come until it is not waited
	// for while others write.
	othersWait = 50 * time.Millisecond
	// lateWait is the same for what a runtime frees after it has answered, as
	// long as less than half of it has come, and it is worth a wait: what is near
	// to nothing can't be seen to come while others write.
	lateWait = time.Second
	// nearBytes is how much less than expected may come free without an
	// explanation, or a hundredth of it if that is more: filesystems keep some
	// blocks of their own.
	nearBytes = 1 << 20

	// askTimeout bounds a question, deleteTimeout a deletion: a layer of 200 000
	// files takes 5 s (CTD-84), on a busy disk a multiple of that.
	askTimeout    = 15 * time.Second
	deleteTimeout = 3 * time.Minute
	// explainTimeout bounds the question who holds what did not come free.
	explainTimeout = 10 * time.Second
)

// ErrSurprise says that something is not as the plan has it, or could not be
// looked at. Items behind it were not tried.
var ErrSurprise = errors.New("the plan does not hold any more")

// Space is the filesystem that a step is to free. It may be asked by several at a
// time.
type Space interface {
	// AvailableBytes asks the kernel (statfs(2), f_bavail).
	AvailableBytes(ctx context.Context) (int64, error)
}

// Holders knows who may hold space.
type Holders interface {
	// Holders says in a few words who holds what did not come free when an item
	// was deleted; empty if it does not know.
	Holders(ctx context.Context, kind string, item record.Item, missingBytes int64) string
}

// Site is where an executor works. Space is required.
type Site struct {
	Space   Space
	Holders Holders
}

// removal is an item that was looked at and may go.
type removal struct {
	// what names it to people and to Holders: "image", "container".
	what string
	// delete does it. nil: there is nothing to do.
	delete func(ctx context.Context) error
	// hurry, if it is set, is called once if the space does not come at once.
	hurry func(ctx context.Context) error
	// late says that the space comes after delete has returned (CTD-31), and nobody can
	// be hurried.
	late bool
	// release is called when it is over; may be nil.
	release func()
}

func (r removal) done() {
	if r.release != nil {
		r.release()
	}
}

// examine looks at an item just before it goes. Its error is a surprise.
type examine func(ctx context.Context, item record.Item) (removal, error)

// check looks at all items and deletes nothing.
func check(ctx context.Context, step record.Step, look examine) (record.Step, error) {
	step.Items = append([]record.Item(nil), step.Items...)
	for i := range step.Items {
		r, err := look(ctx, step.Items[i])
		if err != nil {
			return surprise(step, i, err)
		}
		r.done()
	}
	return step, nil
}

func surprise(step record.Step, i int, err error) (record.Step, error) {
	step.Items[i].Error = err.Error()
	return step, fmt.Errorf("reclaim %s: %w: %s: %w", step.Kind, ErrSurprise, step.Items[i].ID, err)
}

// run carries out a step and returns it with what came of each item. It ends
// early when the step's need is met.
func (s Site) run(ctx context.Context, step record.Step, look examine) (record.Step, error) {
	step.Items = append([]record.Item(nil), step.Items...)
	left := patience
	need, limited := step.Need()
	var gained int64
	for i := range step.Items {
		if limited && gained >= need {
			break
		}
		item := &step.Items[i]
		if err := ctx.Err(); err != nil {
			return step, fmt.Errorf("reclaim %s: %w", step.Kind, err)
		}
		r, err := look(ctx, *item)
		if err != nil {
			return surprise(step, i, err)
		}
		err = s.remove(ctx, item, r, &left)
		r.done()
		if item.ActualBytes != nil {
			gained += *item.ActualBytes
		}
		if err != nil {
			item.Error = err.Error()
			return step, fmt.Errorf("reclaim %s: %s: %w", step.Kind, item.ID, err)
		}
	}
	return step, nil
}

// remove deletes one item and measures what came free.
func (s Site) remove(ctx context.Context, item *record.Item, r removal, left *time.Duration) error {
	before, err := s.Space.AvailableBytes(ctx)
	if err != nil {
		// Without it nobody could say what came free.
		return fmt.Errorf("%w: read the free space: %w", ErrSurprise, err)
	}
	deleting, cancel := context.WithTimeout(ctx, deleteTimeout)
	defer cancel()
	came := &rise{low: before}
	if err := s.watched(deleting, came, r.delete); err != nil {
		// It may be gone all the same.
		if after, measureErr := s.Space.AvailableBytes(context.WithoutCancel(ctx)); measureErr == nil {
			came.see(after)
		}
		if came.most > 0 {
			item.ActualBytes = &came.most
		}
		return err
	}
	gain, others, err := s.settle(ctx, before, came, item.ExpectedBytes, r, left)
	if err != nil {
		item.Note = fmt.Sprintf("what came free is not known: %v", err)
		return nil
	}
	item.ActualBytes, item.OthersWrote = &gain, others
	if item.ExpectedBytes == nil {
		return nil
	}
	missing := *item.ExpectedBytes - gain
	if missing <= near(*item.ExpectedBytes) {
		return nil
	}
	item.Note = fmt.Sprintf("%d bytes did not come free", missing)
	if others {
		// Who holds how much can't be told from what they wrote.
		item.Note += ": others wrote meanwhile"
		return nil
	}
	if s.Holders != nil {
		asking, cancel := context.WithTimeout(ctx, explainTimeout)
		defer cancel()
		if who := s.Holders.Holders(asking, r.what, *item, missing); who != "" {
			item.Note += ": " + who
		}
	}
	return nil
}

func near(expectedBytes int64) int64 { return max(nearBytes, expectedBytes/100) }

// rise is the largest rise of what is available, from a low before: what came
// free, even while others write all the time.
type rise struct{ low, most int64 }

// see takes a figure and says whether more has come.
func (r *rise) see(available int64) bool {
	r.low = min(r.low, available)
	if available-r.low <= r.most {
		return false
	}
	r.most = available - r.low
	return true
}

// watched does something that takes time, such as a deletion on a disk that is
// written to, and looks at the filesystem meanwhile.
func (s Site) watched(ctx context.Context, came *rise, do func(context.Context) error) error {
	ended, looked := make(chan struct{}), make(chan struct{})
	go func() { // ends when do has
		defer close(looked)
		tick := time.NewTicker(watchEvery)
		defer tick.Stop()
		for {
			select {
			case <-ended:
				return
			case <-tick.C:
			}
			if available, err := s.Space.AvailableBytes(ctx); err == nil {
				came.see(available)
			}
		}
	}()
	err := do(ctx)
	close(ended)
	<-looked
	return err
}

// settle waits until what was expected has come free, as long as there is time
// left, and returns the most that had come at a time. While others write that may
// never be all, and the disk may fill up meanwhile: then it waits only as long as
// more comes, or has begun to. others says that they did.
func (s Site) settle(ctx context.Context, before int64, came *rise, expected *int64, r removal, left *time.Duration) (gain int64, others bool, _ error) {
	pause, hurry := pollFirst, r.hurry
	last, first := int64(0), true
	rose := time.Now()
	for {
		available, err := s.Space.AvailableBytes(ctx)
		if err != nil {
			return 0, others, err
		}
		now := available - before
		if came.see(available) {
			rose = time.Now()
		}
		gain = came.most
		others = others || gain-now > nearBytes
		if expected == nil || gain >= *expected || !first && now == last && gain >= *expected-near(*expected) || *left <= 0 {
			return gain, others, nil
		}
		// What came by half is on its way: then it is not hurried at once. With
		// others not at all: nobody knows what of it came, hurrying takes seconds on
		// a disk that is written to so fast, and the next deletion does the same.
		most := gain >= *expected/2
		if hurry != nil && !others && (!most || pause > hurryAfter) {
			if err := hurry(ctx); err != nil {
				return gain, others, nil // then it comes when it comes
			}
			hurry, last, first = nil, now, false
			continue
		}
		atMost := othersWait
		if r.late && !most && *expected > near(*expected) {
			atMost = lateWait
		}
		if others && time.Since(rose) >= atMost {
			return gain, others, nil
		}
		last, first = now, false
		wait := min(pause, *left)
		pause = min(2*pause, pollLast)
		*left -= wait
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return gain, others, nil
		}
	}
}
