// Package settle lets the removal of a container end when its space is back. containerd answers RemoveContainer when its records say
// so, and deletes the writable layer in a later collection, seconds after on a busy node. A kubelet that has just evicted a pod looks
// at the disk meanwhile, finds it as full as before, and evicts the next one, who is innocent (GAP-32).
//
// So each removal asks containerd to collect at once, several removals together, and while a disk is short the caller gets its answer
// when that is done, for some seconds at most. Nothing is deleted that containerd would not delete itself.
//
// It imports nothing else of this module. Only agent may import it.
package settle

import (
	"context"
	"sync"
	"time"

	"go.uber.org/zap"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const (
	// Patience is how long an answer is held back at most.
	Patience = 5 * time.Second
	// collectTimeout bounds one collection.
	collectTimeout = 30 * time.Second
	// restFactor bounds the share of time in which containerd collects because of us, while nothing is short: containerd writes
	// nothing to its database meanwhile.
	restFactor = 4
)

// Settler asks for collections. Its methods may be called from several goroutines.
type Settler struct {
	collect func(context.Context) error
	short   func() bool
	log     *zap.Logger
	asked   chan struct{}
	ended   chan struct{}

	mu   sync.Mutex
	next *round // guarded by mu; the one that has not begun, nil if nobody asked
}

// round is one collection; done is closed when it is over.
type round struct{ done chan struct{} }

// New returns a settler. collect has containerd collect and returns when that is done; short says whether a disk that containers write
// to is short of space, and does not block.
func New(collect func(context.Context) error, short func() bool, log *zap.Logger) *Settler {
	return &Settler{collect: collect, short: short, log: log, asked: make(chan struct{}, 1), ended: make(chan struct{})}
}

// ask asks for a collection that has not begun yet.
func (s *Settler) ask() *round {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.next == nil {
		s.next = &round{done: make(chan struct{})}
		select {
		case s.asked <- struct{}{}:
		default:
		}
	}
	return s.next
}

func (s *Settler) begin() *round {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.next
	s.next = nil
	return r
}

// Run collects when it is asked to, until ctx ends. It is called once.
func (s *Settler) Run(ctx context.Context) {
	defer close(s.ended)
	failing := false
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.asked:
		}
		began := time.Now()
		r := s.begin()
		limited, cancel := context.WithTimeout(ctx, collectTimeout)
		err := s.collect(limited)
		cancel()
		close(r.done)
		if ctx.Err() != nil {
			return
		}
		if failed := err != nil; failed != failing {
			failing = failed
			if failed {
				s.log.Warn("the space of removed containers comes free when containerd gets to it", zap.Error(err))
			} else {
				s.log.Info("the space of removed containers comes free at once again")
			}
		}
		if s.short() {
			continue
		}
		rest := time.NewTimer(restFactor * time.Since(began))
		select {
		case <-ctx.Done():
		case <-rest.C:
		}
		rest.Stop()
	}
}

// settled returns when the space of what was removed until now is back, if a disk is short of it; else at once.
func (s *Settler) settled() {
	r := s.ask()
	if !s.short() {
		return
	}
	patience := time.NewTimer(Patience)
	defer patience.Stop()
	select {
	case <-r.done:
	case <-patience.C:
	case <-s.ended:
	}
}

// Hold has the form of the proxy's HoldFunc.
type Hold = func(ctx context.Context, request []byte) (ended func(), err error)

// Holds are the calls that remove, by full method name. A caller has the end of its call when the space is back.
func (s *Settler) Holds() map[string]Hold {
	hold := func(context.Context, []byte) (func(), error) { return s.settled, nil }
	return map[string]Hold{
		runtimeapi.RuntimeService_RemoveContainer_FullMethodName:  hold,
		runtimeapi.RuntimeService_RemovePodSandbox_FullMethodName: hold,
	}
}
