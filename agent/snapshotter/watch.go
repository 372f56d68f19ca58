package snapshotter

import (
	"context"
	"sync"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"

	"github.com/cleave-cri/cleave/snapshot"
)

const (
	// askTimeout bounds one question to containerd.
	askTimeout = 5 * time.Second
	// pokeTimeout bounds a poke, which waits for containerd's own clean-up.
	pokeTimeout = 2 * time.Minute
	// firstRetry and lastRetry are the pauses between tries that fail.
	firstRetry = 500 * time.Millisecond
	lastRetry  = 30 * time.Second
)

// knownContainerd is what is known of the containerd at the other end.
type knownContainerd struct {
	// pid is its process, 0 while it may not delete; reason then says why.
	pid    int32
	uuid   string
	reason string
	// pokedAt is when the last poke succeeded, zero if none has since the last
	// connect; pokeProblem says why the last one failed.
	pokedAt     time.Time
	pokeProblem string
}

// watcher keeps the acquaintance with containerd: at each connect it asks who
// that is, has it confirmed, and pokes it. It pokes it again each time that the
// fence opens.
type watcher struct {
	conn *grpc.ClientConn
	// identify asks containerd who it is, confirm and lose tell the backend, and
	// poke makes containerd clean up.
	identify func(context.Context) (snapshot.Identity, error)
	confirm  func(ctx context.Context, uuid string) error
	lose     func()
	poke     func(context.Context) error
	// announce makes CRI take in images that it left out while the snapshotter
	// was away, and returns their number.
	announce func(context.Context) (int, error)
	// reopened gives a value after the fence has opened.
	reopened <-chan struct{}
	log      *zap.Logger

	mu  sync.Mutex
	now knownContainerd // guarded by mu
}

func (w *watcher) known() knownContainerd {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.now
}

func (w *watcher) set(change func(*knownContainerd)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	change(&w.now)
}

// run watches until ctx ends.
func (w *watcher) run(ctx context.Context) {
	for ctx.Err() == nil {
		state := w.conn.GetState()
		switch state {
		case connectivity.Ready:
			w.meet(ctx)
		case connectivity.Idle:
			w.conn.Connect()
		case connectivity.Connecting, connectivity.TransientFailure, connectivity.Shutdown:
		}
		w.conn.WaitForStateChange(ctx, state)
		if state == connectivity.Ready {
			w.lost("containerd has gone away")
		}
	}
	w.lost("the snapshotter is stopping")
}

func (w *watcher) lost(reason string) {
	w.set(func(k *knownContainerd) { *k = knownContainerd{uuid: k.uuid, reason: reason} })
	w.lose()
}

// meet gets to know the containerd that has just been connected to, and pokes it
// whenever there is reason to. It returns when that connection breaks.
func (w *watcher) meet(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan struct{})
	defer func() { <-done }()
	defer cancel()
	go func() {
		defer close(done)
		w.conn.WaitForStateChange(ctx, connectivity.Ready)
		cancel()
	}()
	if !w.retry(ctx, w.identifyOnce) {
		return
	}
	w.forgetReopened()
	if !w.retry(ctx, w.pokeOnce) {
		return
	}
	// Now containerd reaches the snapshotter.
	if !w.retry(ctx, w.announceOnce) {
		return
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.reopened:
		}
		if !w.retry(ctx, w.pokeOnce) {
			return
		}
	}
}

// forgetReopened takes what the next poke is good for anyway.
func (w *watcher) forgetReopened() {
	select {
	case <-w.reopened:
	default:
	}
}

// retry calls try until it succeeds, with growing pauses, and reports whether it
// has.
func (w *watcher) retry(ctx context.Context, try func(context.Context) bool) bool {
	pause := firstRetry
	for {
		if try(ctx) {
			return true
		}
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return false
		case <-timer.C:
		}
		pause = min(2*pause, lastRetry)
	}
}

func (w *watcher) identifyOnce(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	id, err := w.identify(ctx)
	if err == nil {
		err = w.confirm(ctx, id.UUID)
	}
	if err != nil {
		w.problem("containerd may not delete snapshots", err, func(k *knownContainerd) *string { return &k.reason })
		return false
	}
	w.set(func(k *knownContainerd) { *k = knownContainerd{pid: id.PID, uuid: id.UUID} })
	w.log.Info("containerd is known", zap.String("uuid", id.UUID), zap.Int32("pid", id.PID))
	return true
}

func (w *watcher) pokeOnce(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, pokeTimeout)
	defer cancel()
	if err := w.poke(ctx); err != nil {
		w.problem("containerd was not made to clean up", err, func(k *knownContainerd) *string { return &k.pokeProblem })
		return false
	}
	w.set(func(k *knownContainerd) { k.pokedAt, k.pokeProblem = time.Now(), "" })
	w.log.Info("containerd has compared its snapshots with ours")
	return true
}

func (w *watcher) announceOnce(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	n, err := w.announce(ctx)
	if err != nil {
		w.log.Warn("CRI was not told of images that it may have left out", zap.Error(err))
		return false
	}
	if n > 0 {
		w.log.Info("CRI had left out images because the snapshotter was away, and was told", zap.Int("images", n))
	}
	return true
}

// problem keeps a reason, and logs it if it is a new one.
func (w *watcher) problem(message string, err error, where func(*knownContainerd) *string) {
	w.mu.Lock()
	slot := where(&w.now)
	changed := *slot != err.Error()
	*slot = err.Error()
	w.mu.Unlock()
	if changed {
		w.log.Warn(message, zap.Error(err))
	}
}
