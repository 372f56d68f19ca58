package stock

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cleave-cri/cleave/snapshot"
	"github.com/cleave-cri/cleave/snapshot/inventory"
)

// shelf is an empty store that counts readings.
type shelf struct {
	mu       sync.Mutex
	readings int
	changed  bool
	err      error
	takes    time.Duration
}

func (s *shelf) Read(context.Context) (*inventory.Contents, error) {
	time.Sleep(s.takes) //nolint:forbidigo // time is the bubble's
	s.mu.Lock()
	defer s.mu.Unlock()
	s.readings++
	if s.err != nil {
		return nil, s.err
	}
	s.changed = false
	return &inventory.Contents{At: time.Now()}, nil
}

func (*shelf) Follow(ctx context.Context) error { <-ctx.Done(); return nil }
func (*shelf) Mark() snapshot.Mark              { return snapshot.Mark{} }
func (s *shelf) Since(snapshot.Mark) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.changed
}

func (s *shelf) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.readings
}

func (s *shelf) change() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.changed = true
}

// A picture is made when something has changed and nobody says that the last one is
// good enough, and not otherwise.
func TestPictureIsMadeByNeed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &shelf{}
		x := newStock(s, nil)
		yes := func(*inventory.Picture) bool { return true }
		for _, step := range []struct {
			what     string
			happens  func()
			enough   func(*inventory.Picture) bool
			readings int
		}{
			{"the first", nil, yes, 1},
			{"nothing has changed", nil, nil, 1},
			{"changed, and the last one is not good enough", func() { s.changed = true }, func(*inventory.Picture) bool { return false }, 2},
			{"changed, and nobody says whether it is", func() { s.changed = true }, nil, 3},
			{"changed, and it is", func() { s.changed = true }, yes, 3},
			{"changed, it is, and it is too old", func() { time.Sleep(6 * time.Second) }, yes, 4}, //nolint:forbidigo // time is the bubble's
			{"it was forgotten", func() { x.Forget(t.Context()) }, yes, 5},
			{"leases have no events", func() { time.Sleep(2 * time.Minute) }, nil, 6}, //nolint:forbidigo // time is the bubble's
		} {
			if step.happens != nil {
				step.happens()
			}
			if p, err := x.Picture(t.Context(), 5*time.Second, step.enough); p == nil || err != nil || s.readings != step.readings {
				t.Errorf("%s: %d readings, want %d (%v)", step.what, s.readings, step.readings, err)
			}
		}
		s.err, s.changed = errors.New("containerd is away"), true
		if p, err := x.Picture(t.Context(), 0, nil); p != nil || !errors.Is(err, s.err) {
			t.Errorf("while it is away: %v, %v", p, err)
		}
		if p, err := x.Picture(t.Context(), time.Hour, yes); p != nil || !errors.Is(err, s.err) {
			t.Errorf("a picture from before it went away is no picture: %v, %v", p, err)
		}
	})
}

// In the background it is kept up to date, for at most 2 % of the time.
func TestRunKeepsItUpToDate(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &shelf{takes: 100 * time.Millisecond}
		x := newStock(s, nil)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- x.Run(ctx) }()
		time.Sleep(30 * time.Second) //nolint:forbidigo // time is the bubble's
		if n := s.count(); n != 1 {
			t.Errorf("%d readings while nothing changed", n)
		}
		for range 60 {
			s.change()
			time.Sleep(time.Second) //nolint:forbidigo // time is the bubble's
		}
		if n := s.count(); n < 10 || n > 14 {
			t.Errorf("%d readings in a minute of changes, each of 0.1 s", n-1)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}
