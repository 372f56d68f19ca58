package split

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/containerd/errdefs"
	bolt "go.etcd.io/bbolt"

	"github.com/cleave-cri/cleave/snapshot/split/boltfile"
	"github.com/cleave-cri/cleave/snapshot/split/fault"
	"github.com/cleave-cri/cleave/snapshot/split/fence"
	"github.com/cleave-cri/cleave/snapshot/split/rootdir"
	"github.com/cleave-cri/cleave/snapshot/split/trash"
)

// Init makes two empty roots and a database those of a new snapshotter. The roots
// must exist and hold nothing but lost+found. One that was interrupted can be
// repeated: the database gets its name last, and until then the roots hold nothing but
// a marker and empty folders. An existing database is errdefs.ErrAlreadyExists.
func Init(ctx context.Context, opts Options) (err error) {
	opts = opts.withDefaults()
	if err := opts.validate(); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("initialise the snapshotter: %w", err)
		}
	}()
	if err := os.MkdirAll(filepath.Dir(opts.Database), 0o700); err != nil {
		return err
	}
	lock, err := boltfile.TakeLock(opts.Database)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lock.Close()) }()
	exists, err := boltfile.Exists(opts.Database)
	if err != nil {
		return err
	}
	if exists {
		return classed(errdefs.ErrAlreadyExists, "there is a database %s already: remove it only together with all that is in both roots", opts.Database)
	}

	roots := map[fence.Role]*rootdir.Root{}
	defer func() {
		for _, root := range roots {
			err = errors.Join(err, root.Close())
		}
	}()
	for _, role := range fence.Roles() {
		root, err := rootdir.Open(opts.root(role))
		if err != nil {
			return fmt.Errorf("the %s root: %w: make it, or mount its filesystem", role, err)
		}
		roots[role] = root
		if opts.RequireMountpoints {
			if err := opts.sources.MustBeMount(root); err != nil {
				return fmt.Errorf("the %s root: %w", role, err)
			}
		}
		if err := fence.Lock(role, root); err != nil {
			return err
		}
		if err := mustBeEmpty(root); err != nil {
			return fmt.Errorf("the %s root: %w", role, err)
		}
	}
	identity := rand.Text()
	recorded := map[fence.Role]fence.Recorded{}
	for _, role := range fence.Roles() {
		root := roots[role]
		if err := root.Ensure(snapshotsDir, 0o700); err != nil {
			return err
		}
		if err := makeFolders(root); err != nil {
			return err
		}
		if err := fence.Suits(root); err != nil {
			return err
		}
		if err := fence.WriteMarker(root, identity, role); err != nil {
			return err
		}
		if recorded[role], err = fence.Record(root, opts.sources); err != nil {
			return err
		}
	}
	opts.faults(fault.InitMarked)
	return createDatabase(ctx, opts, identity, recorded)
}

// makeFolders makes the folders of a root beside that of the snapshots.
func makeFolders(root *rootdir.Root) error {
	for _, name := range []string{trash.Dir, emptyName} {
		if err := root.Ensure(name, 0o700); err != nil {
			return err
		}
	}
	if err := trash.Provide(root); err != nil {
		return err
	}
	names, err := root.Names(emptyName)
	if err != nil {
		return err
	}
	if len(names) > 0 {
		return &fence.Unfit{
			What:   fmt.Sprintf("%s must stay empty, it would be in each layer that is unpacked", filepath.Join(root.Path(), emptyName)),
			Remedy: fmt.Sprintf("remove what is in it, %q first", names[0]),
		}
	}
	return nil
}

// mustBeEmpty lets pass what a filesystem is born with, and what an interrupted
// Init leaves.
func mustBeEmpty(root *rootdir.Root) error {
	names, err := root.Names(".")
	if err != nil {
		return err
	}
	for _, name := range names {
		switch name {
		case "lost+found", fence.MarkerName, fence.MarkerName + ".new", "probe":
			continue
		}
		if slices.Contains([]string{snapshotsDir, trash.Dir, emptyName}, name) {
			inside, err := root.Names(name)
			if err == nil && !slices.ContainsFunc(inside, func(n string) bool { return name != trash.Dir || !trash.IsSlot(n) }) {
				continue
			}
		}
		return classed(errdefs.ErrFailedPrecondition, "%s is not empty, it has %q: a snapshotter begins on empty roots only, to make sure that it never takes anything for its own", root.Path(), name)
	}
	return nil
}

// createDatabase makes the database under a temporary name, with its space
// reserved, and gives it its name when all of it is on disk.
func createDatabase(ctx context.Context, opts Options, identity string, recorded map[fence.Role]fence.Recorded) (err error) {
	temporary := opts.Database + ".new"
	if err := os.Remove(temporary); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	f, err := os.OpenFile(temporary, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(temporary))
		}
	}()
	if err := errors.Join(f.Chmod(0o600), boltfile.OverwriteInPlace(f), f.Close()); err != nil {
		return err
	}
	var options bolt.Options
	if err := boltOptions(&options); err != nil {
		return err
	}
	db, err := bolt.Open(temporary, 0o600, &options)
	if err != nil {
		return err
	}
	err = db.Update(func(tx *bolt.Tx) error { return initialise(tx, identity, recorded) })
	if err := errors.Join(err, db.Close()); err != nil {
		return err
	}
	if err := boltfile.Reserve(temporary, opts.DatabaseBytes); err != nil && !errors.Is(err, errors.ErrUnsupported) {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	opts.faults(fault.InitWritten)
	if err := os.Rename(temporary, opts.Database); err != nil {
		return err
	}
	return boltfile.SyncDir(filepath.Dir(opts.Database))
}
