package fence

import (
	"errors"
	"fmt"
	"sync"
	"time"
)

// ErrNoAnswer says that the kernel has not answered about a root in time: a disk
// or a server that is gone. Nothing can cancel a question to the kernel.
var ErrNoAnswer = errors.New("the filesystem does not answer")

// askLimit is how long a question about a root may take. All of them take some
// microseconds on a healthy disk.
const askLimit = 2 * time.Second

// asker puts questions about one root, one at a time, each in a goroutine of its
// own. One that takes longer than its limit is left behind, and until it is
// answered no other is put: a root that hangs holds one goroutine and one thread.
type asker struct {
	// turn holds a value while a question is out.
	turn chan struct{}

	mu sync.Mutex
	// late is when the question was put that is out and was left behind; zero:
	// there is none. guarded by mu
	late time.Time
}

func newAsker() *asker { return &asker{turn: make(chan struct{}, 1)} }

// ask puts a question and waits for its answer. drop, if it is not nil, is given
// an answer that comes too late.
func ask[T any](a *asker, limit time.Duration, question func() T, drop func(T)) (T, error) {
	var none T
	if err := a.hangs(); err != nil {
		return none, err
	}
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case a.turn <- struct{}{}:
	case <-timer.C:
		// The one before us is late, or has been just now.
		if err := a.hangs(); err != nil {
			return none, err
		}
		return none, fmt.Errorf("%w: too many questions wait", ErrNoAnswer)
	}
	began := time.Now()
	answers := make(chan T, 1)
	go func() {
		answer := question()
		a.mu.Lock()
		left := !a.late.IsZero()
		a.late = time.Time{}
		if !left {
			answers <- answer
		}
		a.mu.Unlock()
		<-a.turn
		if left && drop != nil {
			drop(answer)
		}
	}()
	select {
	case answer := <-answers:
		return answer, nil
	case <-timer.C:
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	select {
	case answer := <-answers: // just now
		return answer, nil
	default:
	}
	a.late = began
	return none, noAnswer(began)
}

// hangs is why no question can be put now, nil if one can.
func (a *asker) hangs() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.late.IsZero() {
		return nil
	}
	return noAnswer(a.late)
}

// noAnswer has the same words as long as a root hangs: what is logged on change
// is logged once.
func noAnswer(since time.Time) error {
	return fmt.Errorf("%w since %s", ErrNoAnswer, since.UTC().Format("2006-01-02 15:04:05Z"))
}
