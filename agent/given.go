package agent

import (
	"context"
	"errors"
	"time"

	"github.com/cleave-cri/cleave/agent/snapshotter"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/fsstats/index"
	"github.com/cleave-cri/cleave/snapshot"
	"github.com/cleave-cri/cleave/snapshot/split"
)

// givenBook asks for the figures of layers that this process does not walk: the split
// snapshotter for its own, which it knows the age of, and containerd for others.
type givenBook struct {
	store store
	// usages are the figures that the split snapshotter has of its snapshots in the
	// runtime's namespace, by key; nil where there is none.
	usages usagesFunc
	// maxAge is how old a figure may be that the snapshotter answers with.
	maxAge time.Duration
	// period is how often a layer is asked about while its filesystem changes.
	period time.Duration
	index  *index.Index
	tell   func()
	kicks  chan struct{}

	// Used by the one goroutine of run only.
	// theirsAfter is when the split snapshotter may be asked again: it takes no more than a twentieth of its time, for it reads all
	// of its database for an answer.
	theirsAfter time.Time
	figures     map[layerID]index.Figure
	spaces      map[fsstats.Device]givenSpace
}

// givenSpace is what was used on a filesystem, and when that was last seen to move.
type givenSpace struct {
	bytes, inodes uint64
	moved         time.Time
}

// givenMaxAge is when a figure is asked for again whatever the signs say.
const givenMaxAge = 10 * time.Minute

// usagesFunc asks the split snapshotter for its figures. It measures nothing.
type usagesFunc func(ctx context.Context) (map[string]index.Figure, error)

func newGivenBook(store store, usages usagesFunc, maxAge, period time.Duration, x *index.Index, tell func()) *givenBook {
	return &givenBook{
		store: store, usages: usages, maxAge: maxAge, period: period, index: x, tell: tell, kicks: make(chan struct{}, 1),
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

// theirsEvery is how often the split snapshotter is asked, and theirsRest how many times as long as an answer takes it rests then.
const (
	theirsEvery = 2 * time.Second
	theirsRest  = 20
)

// run asks until ctx ends, after each kick, and now and then what does not measure.
func (b *givenBook) run(ctx context.Context, newest func() *survey) {
	var tick <-chan time.Time
	if b.usages != nil {
		ticker := time.NewTicker(theirsEvery)
		defer ticker.Stop()
		tick = ticker.C
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-b.kicks:
		case <-tick:
			if time.Now().Before(b.theirsAfter) {
				continue
			}
		}
		b.round(ctx, newest())
	}
}

// round asks for what is due.
func (b *givenBook) round(ctx context.Context, s *survey) {
	there := map[layerID]bool{}
	asked := false
	var figures []index.Put
	put := time.Now()
	theirs := b.theirs(ctx)
	for i := range s.layers {
		l := &s.layers[i]
		if time.Since(put) >= publishPeriod { // who is slow holds up no other's figure
			b.index.PutAll(figures)
			figures, put = nil, time.Now()
		}
		if !l.given || l.layer.Class == snapshot.View {
			continue
		}
		id := layerID{l.layer.Snapshotter, l.layer.Key, l.layer.CreatedAt}
		there[id] = true
		if ctx.Err() != nil {
			return
		}
		figure, known := b.figures[id]
		if own, ok := theirs[l.layer.Key]; ok && l.theirs && !isOfTheFuture(own) && (own.Started.After(figure.Started) || isOfTheFuture(figure)) {
			figure, known, asked = own, true, true
			b.figures[id] = own
		}
		// Asked by containerd the snapshotter measures anew what is too old.
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
		figures = append(figures, index.Put{Key: l.key, FS: fs, Figure: figure})
	}
	b.index.PutAll(figures)
	for id := range b.figures {
		if !there[id] {
			delete(b.figures, id)
		}
	}
	if asked {
		b.tell()
	}
}

// splitUsages asks the configured split snapshotter; nil if there is none.
func splitUsages(cfg config.Config) usagesFunc {
	if !cfg.Snapshotter.Enabled() {
		return nil
	}
	return func(ctx context.Context) (map[string]index.Figure, error) {
		usages, err := snapshotter.FetchUsage(ctx, cfg.Snapshotter.StatusEndpoint.Path())
		if err != nil {
			return nil, err
		}
		out := make(map[string]index.Figure, len(usages))
		for _, u := range usages {
			if u.Namespace == cfg.Runtime.Namespace && u.Figure != nil {
				out[u.Name] = figureOf(*u.Figure)
			}
		}
		return out, nil
	}
}

// figureOf is a figure of the split snapshotter's. Where nothing has changed since, it is one of the moment up to when that is known.
func figureOf(f split.SnapshotFigure) index.Figure {
	out := index.Figure{Bytes: f.Bytes, Inodes: f.Inodes, Started: f.Started, Finished: f.Finished, How: f.How}
	if out.Started.IsZero() { // a committed layer, which does not change
		out.Started = f.Finished
	}
	if f.StillAt.After(f.Finished) {
		out.Started, out.Finished = f.StillAt, f.StillAt
	}
	return out
}

// theirs are the figures of the split snapshotter; none if it does not answer, then
// containerd is asked.
func (b *givenBook) theirs(ctx context.Context) map[string]index.Figure {
	began := time.Now()
	if b.usages == nil || began.Before(b.theirsAfter) {
		return nil
	}
	defer func() {
		if took := time.Since(began); took*theirsRest > theirsEvery {
			b.theirsAfter = time.Now().Add(theirsRest * took)
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	figures, err := b.usages(ctx)
	if err != nil {
		return nil
	}
	return figures
}

// isOfTheFuture says that the clock was set back since another process gave a figure.
// Until it is there again any later figure would seem older.
func isOfTheFuture(f index.Figure) bool { return time.Until(f.Finished) > 0 }

// due says whether a figure has to be asked for again.
func (b *givenBook) due(l *surveyed, f index.Figure) bool {
	age := time.Since(f.Finished)
	if isOfTheFuture(f) {
		return true
	}
	if l.layer.Class == snapshot.Image || age < b.period { // a committed layer does not change
		return false
	}
	if l.theirs && b.usages != nil {
		return time.Since(f.Started) > b.maxAge // its own figure would be younger if nothing had moved
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
