package split

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/containerd/containerd/v2/core/snapshots/storage"
	bolt "go.etcd.io/bbolt"
	errbolt "go.etcd.io/bbolt/errors"
	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/snapshot/split/boltfile"
	"github.com/cleave-cri/cleave/snapshot/split/fault"
)

// database is containerd's MetaStore with our bucket beside its own, on a disk
// that may be full.
type database struct {
	path    string
	reserve int64
	store   *storage.MetaStore
	ballast boltfile.Ballast
	faults  func(fault.Point)
	log     *zap.Logger
	// stuck: bbolt has panicked while it was opened or began a transaction, and
	// may hold locks of its own for good.
	stuck atomic.Bool

	// turn holds a value while a writer is in: from before its transaction until
	// what belongs to it on disk is done or undone. It is taken before bbolt's own
	// lock. A disk can hang in there, so those who wait give up with their context.
	turn chan struct{}
}

// enter waits for the turn to write, leave gives it back.
func (d *database) enter(ctx context.Context) error {
	select {
	case d.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for the writer before to end: %w", ctx.Err())
	}
}

func (d *database) leave() { <-d.turn }

// lockTimeout is how long another opener of the database's file is waited for.
// Our own lock is held already, so it can only be a stranger.
const lockTimeout = 5 * time.Second

func boltOptions(o *bolt.Options) error {
	o.Timeout = lockTimeout
	o.FreelistType = bolt.FreelistMapType
	return nil
}

// openDatabase opens a database that exists.
func openDatabase(o Options) (*database, error) {
	exists, err := boltfile.Exists(o.Database)
	if err != nil {
		return nil, err
	}
	if !exists {
		return nil, fmt.Errorf("%s does not exist: %w", o.Database, ErrNotInitialised)
	}
	if err := verify(o.Database); err != nil {
		return nil, err
	}
	store, err := storage.NewMetaStore(o.Database, boltOptions)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", o.Database, err)
	}
	db := &database{
		path: o.Database, reserve: o.DatabaseBytes, store: store, turn: make(chan struct{}, 1),
		ballast: boltfile.NewBallast(o.Database, o.BallastBytes),
		faults:  o.faults, log: o.Log,
	}
	db.maintain()
	return db, nil
}

// verify reads a database before bbolt does, which would end the process or hang
// on one that is damaged.
func verify(path string) error {
	err := boltfile.Verify(path)
	if errors.Is(err, boltfile.ErrDamaged) {
		return fmt.Errorf("%w: %s", err, restore)
	}
	return err
}

// restore is what to do about a damaged database.
const restore = "stop containerd and restore it from a backup of this node, see docs/snapshotter.md; nothing on the disks was changed or deleted"

func damaged(path string, why any) error {
	return fmt.Errorf("%s: %w: %v: %s", path, boltfile.ErrDamaged, why, restore)
}

// close lets go of the database. If bbolt has panicked that would wait for ever;
// then the end of the process does it.
func (d *database) close() error {
	if d.stuck.Load() {
		return nil
	}
	return d.store.Close()
}

// maintain makes reserve and ballast whole where there is room. Neither is
// needed at once, so that it can't is only logged.
func (d *database) maintain() {
	// The ballast must not be what fills the disk.
	const room = 4
	if free, err := boltfile.Free(filepath.Dir(d.path)); err != nil || free < room*d.ballast.Want() {
		return
	}
	if err := boltfile.Reserve(d.path, d.reserve); err != nil {
		d.log.Warn("the database's space is not reserved", zap.Error(err))
	}
	if d.ballast.Bytes() < d.ballast.Want() {
		if err := d.ballast.Fill(); err != nil {
			d.log.Warn("the database has no ballast", zap.Error(err))
		}
	}
}

// read runs f in a transaction that reads.
func (d *database) read(ctx context.Context, f func(ctx context.Context, b *bolt.Bucket) error) (err error) {
	ctx, tx, err := d.begin(ctx, false)
	if err != nil {
		return err
	}
	// Also when f panics: the database can't be closed while it is read.
	defer func() { err = errors.Join(err, tx.Rollback()) }()
	b, err := own(tx)
	if err != nil {
		return err
	}
	return f(ctx, b)
}

// begin begins a transaction of storage, which is one of bbolt.
func (d *database) begin(ctx context.Context, writable bool) (_ context.Context, _ *bolt.Tx, err error) {
	defer func() {
		if p := recover(); p != nil {
			d.stuck.Store(true)
			err = damaged(d.path, p)
		}
	}()
	ctx, transactor, err := d.store.TransactionContext(ctx, writable)
	if err != nil {
		return ctx, nil, fmt.Errorf("open the database %s: %w", d.path, err)
	}
	tx, ok := transactor.(*bolt.Tx)
	if !ok {
		return ctx, nil, errors.Join(fmt.Errorf("the storage package's transaction is a %T, not one of bbolt", transactor), transactor.Rollback())
	}
	return ctx, tx, nil
}

// write is one change of the database and of what belongs to it on disk.
type write struct {
	// do runs in the transaction. It runs a second time if the disk was full at
	// the commit, after undo.
	do func(ctx context.Context, b *bolt.Bucket) error
	// undo takes back what do did on disk; nil: nothing. It is called only when
	// the transaction is surely not in the database.
	undo func()
	// happened tells in a reading transaction whether the change is in the
	// database after all, which after a failed commit is not certain. nil: no
	// need to know.
	happened func(ctx context.Context, b *bolt.Bucket) (bool, error)
	// before is a fault point just before the commit.
	before fault.Point
	// then runs after the commit, before the next writer is let in. It can't
	// fail: the change has happened.
	then func()
}

// run makes the change. If the disk is full it gives up the ballast and tries
// once more. A nil error means that the change is in the database.
func (d *database) run(ctx context.Context, w write) error {
	if err := d.enter(ctx); err != nil {
		return err
	}
	defer d.leave()
	committing, err := d.attempt(ctx, w)
	if err == nil {
		w.finish()
		return nil
	}
	if committing {
		if in, unknown := d.isIn(ctx, w); in || unknown != nil {
			// The change is there, or may be: what is on disk must stay.
			return errors.Join(err, unknown)
		}
	}
	w.takeBack()
	if !committing || !boltfile.IsFull(err, d.path) || d.ballast.Bytes() == 0 {
		return err
	}
	d.log.Warn("the database's disk is full; its ballast is given up", zap.String("database", d.path), zap.Error(err))
	if releaseErr := d.ballast.Release(); releaseErr != nil {
		return errors.Join(err, releaseErr)
	}
	d.faults(fault.BallastReleased)
	committing, err = d.attempt(ctx, w)
	if err != nil {
		if committing {
			if in, unknown := d.isIn(ctx, w); in || unknown != nil {
				return errors.Join(err, unknown)
			}
		}
		w.takeBack()
		return err
	}
	w.finish()
	return nil
}

func (w write) finish() {
	if w.then != nil {
		w.then()
	}
}

func (w write) takeBack() {
	if w.undo != nil {
		w.undo()
	}
}

// attempt tells whether it came as far as the commit.
func (d *database) attempt(ctx context.Context, w write) (committing bool, err error) {
	ctx, tx, err := d.begin(ctx, true)
	if err != nil {
		return false, err
	}
	b, err := own(tx)
	if err == nil {
		err = w.do(ctx, b)
	}
	if err != nil {
		return false, errors.Join(err, tx.Rollback())
	}
	if w.before != "" {
		d.faults(w.before)
	}
	if err := tx.Commit(); err != nil {
		// bbolt has rolled it back, save for one case: freelist or sync failed
		// late; then this is a second, harmless rollback.
		rollbackErr := tx.Rollback()
		if errors.Is(rollbackErr, errbolt.ErrTxClosed) {
			rollbackErr = nil
		}
		return true, errors.Join(fmt.Errorf("commit to the database %s: %w", d.path, err), rollbackErr)
	}
	return true, nil
}

// isIn asks whether a change whose commit failed is in the database: if only
// the last sync failed, it is, and may or may not survive a loss of power.
func (d *database) isIn(ctx context.Context, w write) (in bool, err error) {
	if w.happened == nil {
		return false, nil
	}
	err = d.read(ctx, func(ctx context.Context, b *bolt.Bucket) error {
		var err error
		in, err = w.happened(ctx, b)
		return err
	})
	return in, err
}

// exclusive runs f in a writing transaction that changes nothing: no snapshot
// comes or goes meanwhile.
func (d *database) exclusive(ctx context.Context, f func(ctx context.Context, b *bolt.Bucket) error) error {
	if err := d.enter(ctx); err != nil {
		return err
	}
	defer d.leave()
	ctx, tx, err := d.begin(ctx, true)
	if err != nil {
		return err
	}
	b, err := own(tx)
	if err == nil {
		err = f(ctx, b)
	}
	return errors.Join(err, tx.Rollback())
}
