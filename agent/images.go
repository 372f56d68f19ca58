package agent

import (
	"cmp"
	"context"
	"slices"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	imagestore "github.com/cleave-cri/cleave/agent/store"
)

const (
	// imageFiguresEvery is how often it is found out what each image alone takes, while somebody wants to know.
	imageFiguresEvery = 2 * time.Minute
	// imageFiguresFor is for how long somebody who has asked counts as wanting to know.
	imageFiguresFor = 10 * time.Minute
	// imageFiguresShare is how much longer than it took it is not done again.
	imageFiguresShare = 50
)

// imageBook keeps ready what would come free of each image alone. To find out takes containerd some work, so it is done only while
// somebody asks.
type imageBook struct {
	list func(context.Context) (imagestore.Images, error)
	log  *zap.Logger

	asked  chan struct{}
	newest atomic.Pointer[imagestore.Images]
}

func newImageBook(list func(context.Context) (imagestore.Images, error), log *zap.Logger) *imageBook {
	return &imageBook{list: list, log: log, asked: make(chan struct{}, 1)}
}

// images are those of which most comes free first; nil before it is known. It does not block, and has it found out anew.
func (b *imageBook) images() []imagestore.Image {
	if b == nil {
		return nil
	}
	select {
	case b.asked <- struct{}{}:
	default:
	}
	if list := b.newest.Load(); list != nil && time.Since(list.At) < imageFiguresFor {
		return list.Images
	}
	return nil
}

// run finds out until ctx ends.
func (b *imageBook) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-b.asked:
		}
		began := time.Now()
		list, err := b.list(ctx)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			b.log.Debug("what images take alone is not known", zap.Error(err))
		} else {
			list.At = began
			slices.SortStableFunc(list.Images, func(a, b imagestore.Image) int {
				return cmp.Or(cmp.Compare(b.Exclusive.TotalBytes(), a.Exclusive.TotalBytes()), cmp.Compare(a.ID, b.ID))
			})
			b.newest.Store(&list)
		}
		if !sleep(ctx, max(imageFiguresEvery, imageFiguresShare*time.Since(began)), nil) {
			return
		}
	}
}
