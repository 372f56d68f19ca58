// Package stock keeps a picture of containerd's store at hand for whoever plans
// deletions: which images there are, what comes free with them on which filesystem,
// who uses them. It only looks. Only agent and tests of reclaim may import it.
package stock

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc"

	"github.com/cleave-cri/cleave/agent/store"
	"github.com/cleave-cri/cleave/engine/garbage"
	"github.com/cleave-cri/cleave/reclaim"
	"github.com/cleave-cri/cleave/snapshot"
	"github.com/cleave-cri/cleave/snapshot/inventory"
)

const (
	// renewEvery is how often it is looked whether the picture is out of date.
	renewEvery = time.Second
	// renewRest is how long no other picture is made in the background, as a
	// multiple of what the last one took: 2 % of a core at most.
	renewRest = 50
	// renewMost is how long it is at most where there is none: nothing can be
	// planned without.
	renewMost = 10 * time.Second
	// currentFor is for how long a picture counts as current if no event told of
	// a change: leases, downloads and views have none (CTD-92).
	currentFor = time.Minute
)

// reader reads a store and follows its events: a [snapshot.Reader].
type reader interface {
	Read(ctx context.Context) (*inventory.Contents, error)
	Follow(ctx context.Context) error
	Mark() snapshot.Mark
	Since(m snapshot.Mark) bool
}

var _ reader = (*snapshot.Reader)(nil)

// Stock keeps a picture of containerd's store at hand, so that a plan need not
// wait for one to be made.
type Stock struct {
	reader   reader
	measurer *store.Measurer

	// turn is taken by whoever makes a picture, or looks at the last one.
	turn chan struct{}
	// The last one, as long as turn is held; nil before the first and after
	// Forget.
	last *inventory.Picture
	mark snapshot.Mark
	took time.Duration
}

// New returns a Stock on a connection to containerd's socket. It has no
// picture yet.
func New(conn grpc.ClientConnInterface) *Stock {
	return newStock(snapshot.NewReader(conn), conn)
}

func newStock(r reader, conn grpc.ClientConnInterface) *Stock {
	return &Stock{reader: r, measurer: store.NewMeasurer(conn), turn: make(chan struct{}, 1)}
}

// Run follows containerd's events and keeps the picture up to date until ctx
// ends. Without it each picture is made when somebody asks.
func (s *Stock) Run(ctx context.Context) error {
	following := make(chan error, 1)
	go func() { following <- s.reader.Follow(ctx) }()
	tick := time.NewTicker(renewEvery)
	defer tick.Stop()
	for next := time.Now(); ctx.Err() == nil; {
		if now := time.Now(); !now.Before(next) && s.take(ctx) == nil {
			if !s.currentLocked(now) {
				_ = s.renewLocked(ctx) //nolint:errcheck // whoever needs one tries again, and is told
			}
			rest := renewRest * s.took
			if s.last == nil {
				rest = min(rest, renewMost)
			}
			next = time.Now().Add(rest)
			s.give()
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
	return <-following
}

func (s *Stock) take(ctx context.Context) error {
	select {
	case s.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("look at containerd's store: %w", ctx.Err())
	}
}

func (s *Stock) give() { <-s.turn }

func (s *Stock) currentLocked(now time.Time) bool {
	return s.last != nil && now.Sub(s.last.At) < currentFor && s.reader.Since(s.mark)
}

// renewLocked makes another picture.
func (s *Stock) renewLocked(ctx context.Context) error {
	began, mark := time.Now(), s.reader.Mark()
	s.last = nil
	p, _, err := store.Picture(ctx, s.reader.Read, s.measurer)
	s.took = time.Since(began)
	if err != nil {
		return err
	}
	s.last, s.mark = p, mark
	return nil
}

// Picture is what the store holds. One that is at most maxAge old is good enough
// if enough says so, and any one if no event has told of a change since; else
// another is made. enough must not change the picture; nil is never.
func (s *Stock) Picture(ctx context.Context, maxAge time.Duration, enough func(*inventory.Picture) bool) (*inventory.Picture, error) {
	if err := s.take(ctx); err != nil {
		return nil, err
	}
	defer s.give()
	now := time.Now()
	if s.currentLocked(now) {
		return s.last, nil
	}
	if s.last != nil && enough != nil && now.Sub(s.last.At) <= maxAge && enough(s.last) {
		return s.last, nil
	}
	if err := s.renewLocked(ctx); err != nil {
		return nil, err
	}
	return s.last, nil
}

// Forget makes the next picture a new one: something was not as the last one
// had it.
func (s *Stock) Forget(ctx context.Context) {
	if s.take(ctx) == nil {
		s.last = nil
		s.give()
	}
}

// For is what a choice among images is made from, for space on one filesystem,
// as its device is called: "major:minor". An image with the CRI's id that the
// picture does not have is not in it either, so that it stays. What is unread of
// the store is no reason for all images to stay: a layer that was not read frees
// nothing here, and who uses an image is looked at again just before it goes.
func For(p *inventory.Picture, namespace, filesystem string) reclaim.ImageInventory {
	out := reclaim.ImageInventory{Facts: map[string]reclaim.ImageFacts{}, Layers: map[string][]garbage.Layer{}}
	for i, parts := range p.AllParts() {
		image := &p.Images[i]
		if image.Namespace != namespace || !image.Resolved {
			continue
		}
		facts := reclaim.ImageFacts{Names: image.Names, Pinned: image.Pinned, NotPullable: image.NotRepullable}
		for _, u := range image.Users {
			facts.Users = append(facts.Users, fmt.Sprintf("%s %s of namespace %s", u.Kind, u.ID, u.Namespace))
		}
		layers := []garbage.Layer{}
		for _, part := range parts {
			if part.Held || part.Known && part.Figure.Filesystem != filesystem {
				continue
			}
			layer := garbage.Layer{ID: part.ID}
			if part.Known { // else it frees nothing that anybody could promise, and is shared all the same
				layer.Bytes = part.Figure.Bytes
			}
			layers = append(layers, layer)
		}
		out.Facts[image.ID], out.Layers[image.ID] = facts, layers
	}
	return out
}
