package agent

import (
	"context"
	"errors"
	"time"

	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/fsstats/index"
	"github.com/cleave-cri/cleave/snapshot"
)

// givenBook asks containerd for the figures of layers that this process does not
// walk: committed ones, and those of a snapshotter that measures its own.
type givenBook struct {
	store store
	// maxAge is how old a figure may be that the snapshotter answers with.
	maxAge time.Duration
	// period is how often a layer is asked about while its filesystem changes.
	period time.Duration
	index  *index.Index
	tell   func()
	kicks  chan struct{}

	// Used by the one goroutine of run only.
	figures map[layerID]index.Figure
	spaces  map[fsstats.Device]givenSpace
}

// givenSpace is what was used on a filesystem, and when that was last seen to move.
type givenSpace struct {
	bytes, inodes uint64
	moved         time.Time
}

// givenMaxAge is when a figure is asked for again whatever the signs say.
const givenMaxAge = 10 * time.Minute

func newGivenBook(store store, maxAge, period time.Duration, x *index.Index, tell func()) *givenBook {
	return &givenBook{
		store: store, maxAge: maxAge, period: period, index: x, tell: tell, kicks: make(chan struct{}, 1),
		figures: map[layerID]index.Figure{}, spaces: map[fsstats.Device]givenSpace{},
	}
}

// kick says that there is a new survey.
func (b *givenBook) kick() {
	select {
	case b.kicks <- struct{}{}:
	default: // one is enough
	}
}

// run asks until ctx ends, after each kick.
func (b *givenBook) run(ctx context.Context, newest func() *survey) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-b.kicks:
		}
		b.round(ctx, newest())
	}
}

// round asks for what is due.
func (b *givenBook) round(ctx context.Context, s *survey) {
	there := map[layerID]bool{}
	asked := false
	for i := range s.layers {
		l := &s.layers[i]
		if !l.given || l.layer.Class == snapshot.View {
			continue
		}
		id := layerID{l.layer.Snapshotter, l.layer.Key, l.layer.CreatedAt}
		there[id] = true
		if ctx.Err() != nil {
			return
		}
		figure, known := b.figures[id]
		if !known || b.due(l, figure) {
			got, err := b.ask(ctx, l.layer)
			if err == nil {
				figure, asked = got, true
				b.figures[id] = figure
			} else if !known {
				continue
			}
		}
		// Each time: the index may have heard of the layer only now.
		var fs index.FS
		if l.filesystem != nil {
			fs = fsOf(*l.filesystem)
		}
		b.index.Put(l.key, fs, figure)
	}
	for id := range b.figures {
		if !there[id] {
			delete(b.figures, id)
		}
	}
	if asked {
		b.tell()
	}
}

// due says whether a figure has to be asked for again.
func (b *givenBook) due(l *surveyed, f index.Figure) bool {
	age := time.Since(f.Finished)
	if l.layer.Class == snapshot.Image || age < b.period { // a committed layer does not change
		return false
	}
	return age >= givenMaxAge || l.filesystem == nil || !b.movedAt(*l.filesystem).Before(f.Started)
}

// movedAt is when what is used on a filesystem was last seen to move.
func (b *givenBook) movedAt(f fsstats.Filesystem) time.Time {
	inodes, _ := f.InodesUsed()
	s, known := b.spaces[f.Device]
	if !known || s.bytes != f.UsedBytes || s.inodes != inodes {
		s = givenSpace{f.UsedBytes, inodes, f.MeasuredAt}
		b.spaces[f.Device] = s
	}
	return s.moved
}

// ask takes containerd's figure, which may have been measured up to maxAge ago.
func (b *givenBook) ask(ctx context.Context, l snapshot.Layer) (index.Figure, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	began := time.Now()
	used, err := b.store.Usage(ctx, l)
	if err != nil {
		return index.Figure{}, err
	}
	if used.Bytes < 0 || used.Inodes < 0 {
		return index.Figure{}, errors.New("a figure below zero")
	}
	return index.Figure{Bytes: used.Bytes, Inodes: used.Inodes, Started: began.Add(-b.maxAge), Finished: time.Now()}, nil
}
