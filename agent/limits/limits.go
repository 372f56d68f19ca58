// Package limits keeps containers' writable layers under the limits that they are
// to have: it compares what is wanted with the accounts that the snapshotter tells,
// and has that set what differs. It knows neither sockets nor the CRI; the agent
// supplies both, and alone may import it.
//
// What it compares is the state of now and not what it did before: after a restart
// of whatever part, a lost call or a changed configuration the next look puts right
// what is not.
package limits

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/agent/snapshotter"
	"github.com/cleave-cri/cleave/snapshot/split"
)

// Container is a container that may have a limit.
type Container struct {
	// ID is the runtime's, which is also the name of its snapshot.
	ID string
	// Name is its name in the pod; the pod's follow.
	Name                          string
	PodUID, PodName, PodNamespace string
}

// Source says how many bytes a container's writable layer may take, 0 for as many
// as there are. It is false while that is not known: then nothing is changed. The
// pod's own limit is one; it must not wait for anything.
type Source interface {
	WritableLayer(c Container) (bytes uint64, known bool)
}

// Same is the Source that gives each container the same limit.
type Same uint64

var _ Source = Same(0)

// WritableLayer implements [Source].
func (s Same) WritableLayer(Container) (uint64, bool) { return uint64(s), true }

// Layers is the snapshotter's word on writable layers.
type Layers interface {
	// Limits tells the accounts of those that have one.
	Limits(ctx context.Context) ([]split.LayerLimit, error)
	// SetLimit sets a limit, or says why not.
	SetLimit(ctx context.Context, r snapshotter.LimitRequest) (snapshotter.LimitAnswer, error)
}

const (
	// period is how often all containers are looked at without a reason.
	period = time.Minute
	// gap is the shortest time between the beginnings of two looks, however many
	// containers are made.
	gap = 200 * time.Millisecond
	// firstRetry and lastRetry are the pauses after looks that failed.
	firstRetry = time.Second
	lastRetry  = time.Minute
	// lookLimit bounds a look.
	lookLimit = 30 * time.Second
	// roundBytes is how much more than wanted the kernel may make of a limit: the
	// largest block of a filesystem.
	roundBytes = 64 << 10
)

// Options say what a Keeper works with; all are needed.
type Options struct {
	// Containers lists the runtime's containers, sandboxes not among them.
	Containers func(ctx context.Context) ([]Container, error)
	Layers     Layers
	// Namespace is containerd's in which the containers are.
	Namespace string
	// Source gives what is known now; it is called once a look, and must not wait.
	Source func() Source
	Log    *zap.Logger
}

// Keeper keeps limits.
type Keeper struct {
	opt  Options
	wake chan struct{}

	mu     sync.Mutex
	status Status // guarded by mu
}

// Status is how the limits are, as of the last look.
type Status struct {
	// At is when the last look ended that could tell, zero before the first.
	At time.Time `json:"at,omitzero"`
	// Limited counts containers whose layer has the limit that it is to have;
	// Without those that are to have one and can't, because the layer was made
	// without a project ID or lies elsewhere.
	Limited int `json:"limited"`
	Without int `json:"without"`
	// Set counts limits that were set or taken away since the start.
	Set int `json:"set"`
	// Problem is why limits may not be as wanted, empty if nothing is.
	Problem string `json:"problem,omitempty"`
}

// New returns a Keeper, which does nothing before Run.
func New(opt Options) *Keeper { return &Keeper{opt: opt, wake: make(chan struct{}, 1)} }

// Status tells how the limits are.
func (k *Keeper) Status() Status {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.status
}

// Created is told that a container was made. As an interceptor of the proxy it
// looks at no answer and changes none.
func (k *Keeper) Created(context.Context, []byte) ([]byte, error) {
	select {
	case k.wake <- struct{}{}:
	default: // one look is enough for all of them
	}
	return nil, nil
}

// Run keeps limits until ctx ends.
func (k *Keeper) Run(ctx context.Context) {
	retry := firstRetry
	for {
		began := time.Now()
		err := k.lookSafely(ctx)
		if ctx.Err() != nil {
			return
		}
		pause := period
		if err != nil {
			pause, retry = retry, min(2*retry, lastRetry)
		} else {
			retry = firstRetry
		}
		k.note(err)
		if !rest(ctx, gap-time.Since(began), nil) || !rest(ctx, pause, k.wake) {
			return
		}
	}
}

// rest waits, until early is received from at most, and reports whether ctx is
// still good.
func rest(ctx context.Context, d time.Duration, early <-chan struct{}) bool {
	timer := time.NewTimer(max(d, 0))
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	case <-early:
	}
	return ctx.Err() == nil
}

// note keeps why limits are not as wanted, nil for nothing, and logs it if it is
// new.
func (k *Keeper) note(err error) {
	problem := ""
	if err != nil {
		problem = err.Error()
	}
	k.mu.Lock()
	changed := k.status.Problem != problem
	k.status.Problem = problem
	k.mu.Unlock()
	switch {
	case changed && problem != "":
		k.opt.Log.Warn("writable layers may not have their limits", zap.String("problem", problem))
	case changed:
		k.opt.Log.Info("writable layers have their limits again")
	}
}

// lookSafely turns a panic into an error: this can't take the proxy down.
func (k *Keeper) lookSafely(ctx context.Context) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("keeping limits broke, report this as a bug of cleave: %v", r)
		}
	}()
	return k.look(ctx)
}

// look compares once and sets what differs.
func (k *Keeper) look(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, lookLimit)
	defer cancel()
	containers, err := k.opt.Containers(ctx)
	if err != nil {
		return fmt.Errorf("list the containers that may have a limit: %w", err)
	}
	accounts, err := k.opt.Layers.Limits(ctx)
	if err != nil {
		return err
	}
	p := planned(containers, accounts, k.opt.Namespace, k.opt.Source())
	var errs []error
	for _, c := range p.changes {
		answer, err := k.opt.Layers.SetLimit(ctx, snapshotter.LimitRequest{Namespace: k.opt.Namespace, Snapshot: c.id, Bytes: c.bytes})
		switch {
		case err != nil:
			errs = append(errs, err)
			if ctx.Err() != nil {
				return errors.Join(errs...)
			}
		case answer.Limit != nil:
			k.opt.Log.Info("a writable layer's limit is set", zap.String("container_id", c.id), zap.Uint64("bytes", answer.Limit.LimitBytes))
			k.mu.Lock()
			k.status.Set++
			k.mu.Unlock()
			if c.bytes > 0 {
				p.limited++
			}
		case answer.Refused != "":
			errs = append(errs, errors.New(answer.Refused))
			p.without++
		}
	}
	k.mu.Lock()
	k.status.At, k.status.Limited, k.status.Without = time.Now(), p.limited, p.without
	k.mu.Unlock()
	return summary(errs)
}

// summary tells the first of many errors.
func summary(errs []error) error {
	if len(errs) < 2 {
		return errors.Join(errs...)
	}
	return fmt.Errorf("%w; and %d more", errs[0], len(errs)-1)
}

// change is a limit that differs.
type change struct {
	id    string
	bytes uint64
}

// plan is what a look has to do.
type plan struct {
	changes []change
	// limited counts containers that have the limit they are to have, without
	// those whose layers have no account.
	limited, without int
}

// planned compares. There may be several accounts of one name, of snapshots that
// are not cleared away yet: if one differs the limit is set again, on the newest.
func planned(containers []Container, accounts []split.LayerLimit, namespace string, source Source) plan {
	has := map[string][]uint64{}
	for _, a := range accounts {
		if a.Namespace == namespace {
			has[a.Name] = append(has[a.Name], a.LimitBytes)
		}
	}
	var p plan
	for _, c := range containers {
		want, known := source.WritableLayer(c)
		now, ok := has[c.ID]
		switch {
		case !known:
		case !ok && want > 0:
			p.without++
		case !ok:
		case slices.ContainsFunc(now, func(l uint64) bool { return !meets(l, want) }):
			p.changes = append(p.changes, change{c.ID, want})
		case want > 0:
			p.limited++
		}
	}
	slices.SortFunc(p.changes, func(a, b change) int { return cmp.Compare(a.id, b.id) })
	return p
}

// meets says whether a limit is the wanted one, as the kernel rounds it.
func meets(limit, want uint64) bool {
	if want == 0 || limit == 0 {
		return limit == want
	}
	return limit >= want && limit-want < roundBytes
}
