// Package split is a containerd snapshotter that puts image layers on one
// filesystem and everything else, above all the writable layers of containers,
// on another. It is a library: it serves no socket and knows neither containerd's
// configuration nor the CRI.
//
// The agent and the commands of cleave may import it; it imports fsstats/walk,
// fsstats/index, fsstats/quota and the packages below it. The design, with what a crash at each
// step leaves and who repairs it, is in docs/snapshotter-design.md.
//
// # What keeps it from deleting the wrong thing
//
// Where a snapshot lies is recorded in the transaction that makes it, and decided
// by the shape of its key. All work on files is relative to a root held open and
// known to be the right one (package fence). A removal takes the record first
// and the folder afterwards, to a trash on the same filesystem (package trash).
// A clean-up takes only folders that the database does not know, and only so
// many at once.
package split

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/storage"
	"github.com/containerd/errdefs"
	bolt "go.etcd.io/bbolt"
	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/snapshot/split/boltfile"
	"github.com/cleave-cri/cleave/snapshot/split/fault"
	"github.com/cleave-cri/cleave/snapshot/split/fence"
	"github.com/cleave-cri/cleave/snapshot/split/rootdir"
	"github.com/cleave-cri/cleave/snapshot/split/trash"
)

// Snapshotter serves one pair of roots. Its methods may be called from several
// goroutines. Errors are of containerd's classes (errdefs).
type Snapshotter struct {
	opts     Options
	log      *zap.Logger
	lock     *boltfile.Lock
	db       *database
	gate     *fence.Gate
	identity string
	meter    *meter
	holder   *holder
	projects *projects // nil without project quota
	filler   *filler
	bins     map[fence.Role]*trash.Bin
	options  []string // added to the options of an overlay
	// reopened holds a value when the fence has opened and what was due then is
	// done.
	reopened chan struct{}
	// stop ends the background work, stopped waits for it.
	stop    context.CancelFunc
	stopped sync.WaitGroup
	closing sync.Once
	closed  error

	mu sync.Mutex
	// making are the temporary folders that are being filled right now.
	making map[string]bool // guarded by mu
	// made are the IDs of the snapshots that this process made and that are still there: of these it knows that the database is
	// not older than they are.
	made map[string]bool // guarded by mu
	// confirmed: containerd's identity has been given and is the right one.
	confirmed bool // guarded by mu
	// refused is why the last identity was not the right one.
	refused   string          // guarded by mu
	alarm     *Alarm          // guarded by mu
	compared  bool            // guarded by mu; alarm is what a comparison since the start has found
	lastSweep *Sweep          // guarded by mu
	allowed   map[Folder]bool // guarded by mu; what a confirmed clean-up may take
}

var (
	_ snapshots.Snapshotter = (*Snapshotter)(nil)
	_ snapshots.Cleaner     = (*Snapshotter)(nil)
)

// usageSuffix is what the file of figures has behind the database's name.
const usageSuffix = ".usage"

// checkPeriod is how often the background looks after the fence, the ballast and
// the reserved space.
const checkPeriod = 15 * time.Second

// Open opens a snapshotter that [Init] has made. If a root is not the right one
// now, Open succeeds all the same, the fence is closed, and it opens by itself
// when the cause is gone; see [Snapshotter.Status].
//
// Errors wrap [ErrNotInitialised], [ErrNewerSchema], [boltfile.ErrDamaged],
// [boltfile.ErrLocked], [fence.ErrBusy] if another snapshotter works on a root, or
// tell what is wrong with the options.
func Open(ctx context.Context, opts Options) (_ *Snapshotter, err error) {
	opts = opts.withDefaults()
	if err := opts.validate(); err != nil {
		return nil, err
	}
	exists, err := boltfile.Exists(opts.Database)
	if err != nil {
		return nil, fmt.Errorf("open the snapshotter: %w", err)
	}
	if !exists {
		return nil, fmt.Errorf("open the snapshotter: there is no database %s: %w", opts.Database, ErrNotInitialised)
	}
	s := &Snapshotter{opts: opts, log: opts.Log, making: map[string]bool{}, made: map[string]bool{}, reopened: make(chan struct{}, 1), bins: map[fence.Role]*trash.Bin{}, stop: func() {}}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("open the snapshotter: %w", err), s.Close())
		}
	}()
	if s.lock, err = boltfile.TakeLock(opts.Database); err != nil {
		return nil, err
	}
	if s.db, err = openDatabase(opts); err != nil {
		return nil, err
	}
	want := map[fence.Role]fence.Want{}
	if err := s.db.read(ctx, func(_ context.Context, b *bolt.Bucket) error {
		s.identity = string(b.Get(identityKey))
		for _, role := range fence.Roles() {
			recorded, err := getRoot(b, role)
			if err != nil {
				return err
			}
			want[role] = fence.Want{Identity: s.identity, Role: role, MustBeMount: opts.RequireMountpoints, Recorded: recorded}
		}
		return nil
	}); err != nil {
		return nil, err
	}
	if s.gate, err = fence.NewGate(opts.roots(), want, opts.sources, opts.Log, prepared); err != nil {
		return nil, err
	}
	// Another reason is logged by the gate, and may go away.
	if err := s.gate.Verify(); errors.Is(err, fence.ErrBusy) {
		return nil, err
	}
	s.options, s.projects = mountOptions(opts.MountOptions), newProjects(opts)
	held := held{list: s.holdings, space: s.spaceOf, measure: s.measureAt, stateFile: opts.Database + usageSuffix}
	if s.holder, err = newHolder(held, opts.Log); err != nil {
		return nil, err
	}
	s.start(ctx)
	return s, nil
}

// prepared says whether a root has the folders it needs and can hold layers.
func prepared(role fence.Role, root *rootdir.Root) error {
	if _, err := root.Stat(snapshotsDir); err != nil {
		return fmt.Errorf("the %s root is incomplete: %w", role, err) // its remedy is by the error number
	}
	if err := makeFolders(root); err != nil {
		return err
	}
	return fence.Suits(root)
}

// start begins the background work.
func (s *Snapshotter) start(ctx context.Context) {
	ctx, s.stop = context.WithCancel(context.WithoutCancel(ctx))
	s.meter = newMeter(s.measure)
	s.filler = newFiller()
	for _, role := range fence.Roles() {
		bin := trash.NewBin(func() (*rootdir.Root, error) {
			if err := s.gate.Quick(); err != nil {
				return nil, err
			}
			return s.gate.Root(role)
		}, max(s.opts.DeletionRate, 0), s.log, s.opts.faults)
		s.bins[role] = bin
		s.stopped.Go(func() { bin.Run(ctx) })
		for range measuringAtOnce {
			s.stopped.Go(func() { s.meter.run(ctx, role) })
		}
	}
	select {
	case <-s.gate.Opened():
		s.opened(ctx)
	default:
	}
	s.stopped.Go(func() { s.holder.run(ctx) })
	s.stopped.Go(func() { s.fill(ctx) })
	s.stopped.Go(func() { s.watch(ctx) })
}

// opened does what is due when the fence opens: it notes where the roots are
// now, and sweeps what a crash has left. That it can't now is not an error.
func (s *Snapshotter) opened(ctx context.Context) {
	if err := s.recordRoots(ctx); err != nil {
		s.log.Warn("the place of the roots is not noted", zap.Error(err))
	}
	if err := s.markRecorded(ctx); err != nil {
		s.log.Warn("folders of snapshots may still look like those that nobody was given", zap.Error(err))
	}
	if err := s.sweep(ctx); err != nil {
		s.log.Error("the sweep at the start is incomplete", zap.Error(err))
	}
	for _, bin := range s.bins {
		bin.Wake()
	}
	s.holder.index.Moved()
	s.tidyProjects(ctx)
	s.tellReopened()
}

func (s *Snapshotter) tellReopened() {
	select {
	case s.reopened <- struct{}{}:
	default:
	}
}

// Reopened gives a value after the fence has opened, at the start too, and after
// the alarm about an older database has gone. What containerd wanted to remove
// before has failed, and containerd forgets that (CTD-63), so it has to be poked
// (CTD-64).
func (s *Snapshotter) Reopened() <-chan struct{} { return s.reopened }

// watch looks after what nobody calls for.
func (s *Snapshotter) watch(ctx context.Context) {
	ticker := time.NewTicker(checkPeriod)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.gate.Opened():
			s.opened(ctx)
			continue
		case <-ticker.C:
		}
		// While the fence is closed this verifies, and opens it if it can.
		if err := s.gate.Quick(); err != nil {
			continue // the gate has logged it
		}
		s.db.maintain()
		s.tidyProjects(ctx)
	}
}

// recordRoots notes in which boot and by which device number the roots were seen
// last.
func (s *Snapshotter) recordRoots(ctx context.Context) error {
	changed := map[fence.Role]fence.Recorded{}
	if err := s.db.read(ctx, func(_ context.Context, b *bolt.Bucket) error {
		for _, role := range fence.Roles() {
			old, err := getRoot(b, role)
			if err != nil {
				return err
			}
			if now := s.gate.Recorded(role); now != old {
				changed[role] = now
			}
		}
		return nil
	}); err != nil || len(changed) == 0 {
		return err
	}
	return s.db.run(ctx, write{do: func(_ context.Context, b *bolt.Bucket) error {
		for role, r := range changed {
			if err := putJSON(b.Bucket(rootsBucket), string(role), r); err != nil {
				return err
			}
		}
		return nil
	}})
}

// Close ends the background work and lets go of everything. A second call does
// nothing.
func (s *Snapshotter) Close() error {
	s.closing.Do(func() {
		s.stop()
		s.stopped.Wait()
		var errs []error
		if s.db != nil {
			errs = append(errs, s.db.close())
		}
		if s.gate != nil {
			errs = append(errs, s.gate.Close())
		}
		if s.lock != nil {
			errs = append(errs, s.lock.Close())
		}
		s.closed = errors.Join(errs...)
	})
	return s.closed
}

// WaitIdle waits until the trash of both roots is empty, save for what can't be
// deleted, and every committed layer that can be measured is.
func (s *Snapshotter) WaitIdle(ctx context.Context) error {
	for _, role := range fence.Roles() {
		if err := s.bins[role].WaitIdle(ctx); err != nil {
			return fmt.Errorf("wait for the trash of the %s root: %w", role, err)
		}
	}
	if err := s.filler.waitIdle(ctx); err != nil {
		return fmt.Errorf("wait for the measuring of layers: %w", err)
	}
	return nil
}

// Stat tells about a snapshot.
func (s *Snapshotter) Stat(ctx context.Context, key string) (info snapshots.Info, err error) {
	err = s.db.read(ctx, func(ctx context.Context, _ *bolt.Bucket) error {
		_, info, _, err = storage.GetInfo(ctx, key)
		return err
	})
	return info, err
}

// Update replaces labels of a snapshot.
func (s *Snapshotter) Update(ctx context.Context, info snapshots.Info, fieldpaths ...string) (updated snapshots.Info, err error) {
	if err := s.gate.Quick(); err != nil {
		return snapshots.Info{}, err
	}
	err = s.db.run(ctx, write{do: func(ctx context.Context, _ *bolt.Bucket) error {
		updated, err = storage.UpdateInfo(ctx, info, fieldpaths...)
		return err
	}})
	return updated, err
}

// Walk calls visit with each snapshot that a filter matches. No transaction is
// open meanwhile: a slow visitor holds up nobody.
func (s *Snapshotter) Walk(ctx context.Context, visit snapshots.WalkFunc, filters ...string) error {
	var infos []snapshots.Info
	err := s.db.read(ctx, func(ctx context.Context, _ *bolt.Bucket) error {
		return ignoringEmpty(storage.WalkInfo(ctx, func(_ context.Context, info snapshots.Info) error {
			infos = append(infos, info)
			return nil
		}, filters...))
	})
	if err != nil {
		return err
	}
	for _, info := range infos {
		if err := visit(ctx, info); err != nil {
			return err
		}
	}
	return nil
}

// ignoringEmpty: storage says "not found" of all lists until the first snapshot
// is made.
func ignoringEmpty(err error) error {
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}

// Mounts gives the mounts of an active snapshot or a view.
func (s *Snapshotter) Mounts(ctx context.Context, key string) ([]mount.Mount, error) {
	var l layers
	err := s.db.read(ctx, func(ctx context.Context, b *bolt.Bucket) error {
		snap, err := storage.GetSnapshot(ctx, key)
		if err != nil {
			return err
		}
		l, err = s.layersOf(ctx, b, key, snap)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("mounts of snapshot %q: %w", key, err)
	}
	return l.mounts(), nil
}

// Remove forgets a snapshot, and frees its space soon after. While the database is
// older than the folders it is a failed precondition, which containerd's garbage
// collection passes over.
func (s *Snapshotter) Remove(ctx context.Context, key string) error {
	if err := s.mayDelete(); err != nil {
		return fmt.Errorf("remove snapshot %q: %w", key, err)
	}
	if err := s.gate.Quick(); err != nil {
		return fmt.Errorf("remove snapshot %q: %w", key, err)
	}
	if err := s.compare(ctx); err != nil {
		return fmt.Errorf("remove snapshot %q: %w", key, err)
	}
	var (
		id    string
		rec   record
		moved bool
	)
	err := s.db.run(ctx, write{before: fault.RemoveOpen, do: func(ctx context.Context, b *bolt.Bucket) error {
		var err error
		if id, _, err = storage.Remove(ctx, key); err != nil {
			return err
		}
		// In here no clean-up changes the answer.
		if err := s.notOlder(id); err != nil {
			return err
		}
		if rec, err = mustRecord(b, id); err != nil {
			return err
		}
		return deleteRecord(b, id)
	}, then: func() {
		s.opts.faults(fault.RemoveCommitted)
		moved = s.discard(id, rec.Root)
		s.opts.faults(fault.RemoveTrashed)
	}})
	if err != nil {
		return fmt.Errorf("remove snapshot %q: %w", shortKey(key), err)
	}
	s.forgetMade(id)
	s.meter.forget(id)
	s.holder.poke()
	s.projects.removed(id)
	s.filler.done(id)
	s.bins[rec.Root].Wake()
	if !moved {
		s.noteLeaving(ctx, Folder{Root: rec.Root, Name: id})
	}
	return nil
}

// discard moves the folder of a snapshot that has been removed to the trash. If
// it can't, the folder is a stray, which the next clean-up takes.
func (s *Snapshotter) discard(id string, role fence.Role) (moved bool) {
	root, err := s.gate.Root(role)
	if err == nil {
		_, err = trash.Move(root, idDir(id), id)
	}
	if err != nil {
		s.log.Warn("the folder of a removed snapshot stays for the next clean-up", zap.String("id", id), zap.Error(err))
	}
	return err == nil
}

// noteLeaving notes that a folder is that of a removed snapshot, so that many of
// them, as after removals on a filesystem that was read-only, raise no alarm.
// Without the note the folder is a stray like any other.
func (s *Snapshotter) noteLeaving(ctx context.Context, f Folder) {
	err := s.db.run(ctx, write{do: func(_ context.Context, b *bolt.Bucket) error { return putLeaving(b, f) }})
	if err != nil {
		s.log.Warn("the folder of a removed snapshot counts as an unknown one in the next clean-up", zap.String("id", f.Name), zap.Error(err))
	}
}

// ConfirmContainerd is told the identity of the containerd that is the client:
// any text that stays the same over its restarts and differs between two. The
// first one ever is pinned; another one later is refused, since a containerd
// removes every snapshot that it does not know (CTD-32). Until it is confirmed,
// removals and clean-ups are refused with errdefs.ErrUnavailable.
func (s *Snapshotter) ConfirmContainerd(ctx context.Context, id string) error {
	if id == "" {
		return classed(errdefs.ErrInvalidArgument, "confirm containerd: its identity is empty")
	}
	pinned, err := s.pin(ctx, id)
	if err != nil {
		s.LoseContainerd()
		return fmt.Errorf("confirm containerd: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if pinned != id {
		s.confirmed = false
		s.refused = fmt.Sprintf("this is containerd %s, the snapshots belong to %s: connect that one, or run `cleave snapshotter unpin` if it is gone for good", id, pinned)
		return classed(errdefs.ErrFailedPrecondition, "confirm containerd: %s", s.refused)
	}
	s.confirmed, s.refused = true, ""
	return nil
}

// LoseContainerd says that the connection to containerd is lost, so that it has
// to be confirmed again.
func (s *Snapshotter) LoseContainerd() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.confirmed, s.refused = false, ""
}

// pin gives the identity that is pinned, and pins id if there is none yet.
func (s *Snapshotter) pin(ctx context.Context, id string) (pinned string, err error) {
	err = s.db.read(ctx, func(_ context.Context, b *bolt.Bucket) error {
		pinned = string(b.Get(containerdKey))
		return nil
	})
	if err != nil || pinned != "" {
		return pinned, err
	}
	if err := s.gate.Quick(); err != nil {
		return "", err
	}
	err = s.db.run(ctx, write{do: func(_ context.Context, b *bolt.Bucket) error {
		if pinned = string(b.Get(containerdKey)); pinned != "" {
			return nil // another call was faster
		}
		pinned = id
		return b.Put(containerdKey, []byte(id))
	}})
	return pinned, err
}

// mayDelete says why nothing may be removed now, as far as containerd is
// concerned.
func (s *Snapshotter) mayDelete() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.confirmed || s.opts.AnyContainerd:
		return nil
	case s.refused != "":
		return classed(errdefs.ErrUnavailable, "nothing is deleted: %s", s.refused)
	default:
		return classed(errdefs.ErrUnavailable, "nothing is deleted until containerd has been recognised; wait, or look at `cleave snapshotter status`")
	}
}
