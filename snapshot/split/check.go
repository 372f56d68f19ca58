package split

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/storage"
	"github.com/containerd/errdefs"
	bolt "go.etcd.io/bbolt"
	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/snapshot/split/boltfile"
	"github.com/cleave-cri/cleave/snapshot/split/fence"
	"github.com/cleave-cri/cleave/snapshot/split/rootdir"
	"github.com/cleave-cri/cleave/snapshot/split/trash"
)

// Report is what [Check] found.
type Report struct {
	Identity string `json:"identity"`
	// Snapshots is how many the database has, Folders how many folders with an
	// ID the roots have, Trash how many entries wait to be deleted.
	Snapshots int `json:"snapshots"`
	Folders   int `json:"folders"`
	Trash     int `json:"trash"`
	// Findings are what is not as it should be; Notes what is worth knowing.
	Findings []Finding `json:"findings,omitempty"`
	Notes    []Finding `json:"notes,omitempty"`
	// Plan is what [Repair] would move to the trash.
	Plan []Folder `json:"plan,omitempty"`
}

// Clean reports whether nothing was found.
func (r Report) Clean() bool { return len(r.Findings) == 0 }

// Finding is one thing, with the invariant of docs/snapshotter-design.md that it is
// about.
type Finding struct {
	Invariant string `json:"invariant"`
	// Path is the file or folder, or the ID of a snapshot.
	Path string `json:"path"`
	What string `json:"what"`
}

func (f Finding) String() string { return f.Invariant + ": " + f.Path + ": " + f.What }

// Check compares both roots with the database while no snapshotter runs; it is
// refused with [boltfile.ErrLocked] or [fence.ErrBusy] while one does. It changes nothing. An error
// means that it could not look; what it saw is in the Report.
func Check(ctx context.Context, opts Options) (Report, error) {
	var report Report
	err := offline(ctx, opts, func(ctx context.Context, b *bolt.Bucket, gate *fence.Gate) error {
		var err error
		report, err = inspect(ctx, opts, b, gate)
		return err
	})
	if err != nil {
		return Report{}, fmt.Errorf("check the snapshotter: %w", err)
	}
	return report, nil
}

// Repair moves the folders of a plan that [Check] made to the trash, from where
// the next start deletes them. Each is looked at again just before; at the first
// that is not in a plan made now it stops. It returns what it moved.
func Repair(ctx context.Context, opts Options, plan []Folder) (moved []Folder, err error) {
	err = offline(ctx, opts, func(ctx context.Context, b *bolt.Bucket, gate *fence.Gate) error {
		if err := gate.Verify(); err != nil {
			return err
		}
		for _, folder := range plan {
			now, err := inspect(ctx, opts, b, gate)
			if err != nil {
				return err
			}
			if !slices.Contains(now.Plan, folder) {
				return classed(errdefs.ErrFailedPrecondition, "folder %s of the %s root is not a stray any more: check again", folder.Name, folder.Root)
			}
			root, err := gate.Root(folder.Root)
			if err != nil {
				return err
			}
			what := "repair-" + folder.Name
			if !idName.MatchString(folder.Name) {
				what = "repair-new"
			}
			entry, err := trash.Move(root, idDir(folder.Name), what)
			if err != nil {
				return err
			}
			opts.Log.Info("moved to the trash", zap.String("root", root.Path()), zap.String("folder", folder.Name), zap.String("entry", entry))
			moved = append(moved, folder)
		}
		return nil
	})
	if err != nil {
		return moved, fmt.Errorf("repair the snapshotter: %w", err)
	}
	return moved, nil
}

// Unpin forgets to which containerd the snapshots belong, while no snapshotter
// runs: the next one that is confirmed is pinned. For a node whose containerd was
// really replaced; that containerd then removes all snapshots that it does not
// know.
func Unpin(ctx context.Context, opts Options) (err error) {
	opts = opts.withDefaults()
	if err := opts.validate(); err != nil {
		return err
	}
	lock, err := boltfile.TakeLock(opts.Database)
	if err != nil {
		return fmt.Errorf("unpin containerd: %w", err)
	}
	defer func() { err = errors.Join(err, lock.Close()) }()
	db, err := openDatabase(opts)
	if err != nil {
		return fmt.Errorf("unpin containerd: %w", err)
	}
	defer func() { err = errors.Join(err, db.close()) }()
	return db.run(ctx, write{do: func(_ context.Context, b *bolt.Bucket) error { return b.Delete(containerdKey) }})
}

// offline holds the lock, the database for reading, and the roots.
func offline(ctx context.Context, opts Options, f func(context.Context, *bolt.Bucket, *fence.Gate) error) (err error) {
	opts = opts.withDefaults()
	if err := opts.validate(); err != nil {
		return err
	}
	exists, err := boltfile.Exists(opts.Database)
	if err != nil {
		return err
	}
	if !exists {
		return fmt.Errorf("there is no database %s: %w", opts.Database, ErrNotInitialised)
	}
	lock, err := boltfile.TakeLock(opts.Database)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lock.Close()) }()
	// bbolt panics on pages that make no sense.
	defer func() {
		if p := recover(); p != nil {
			err = errors.Join(err, damaged(opts.Database, p))
		}
	}()
	if err := verify(opts.Database); err != nil {
		return err
	}
	store, err := storage.NewMetaStore(opts.Database, boltOptions, func(o *bolt.Options) error {
		o.ReadOnly = true
		return nil
	})
	if err != nil {
		return err
	}
	db := &database{path: opts.Database, store: store, log: opts.Log, faults: opts.faults}
	defer func() { err = errors.Join(err, db.close()) }()
	return db.read(ctx, func(ctx context.Context, b *bolt.Bucket) error {
		want := map[fence.Role]fence.Want{}
		for _, role := range fence.Roles() {
			recorded, err := getRoot(b, role)
			if err != nil {
				return err
			}
			want[role] = fence.Want{Identity: string(b.Get(identityKey)), Role: role, MustBeMount: opts.RequireMountpoints, Recorded: recorded}
		}
		nothing := func(fence.Role, *rootdir.Root) error { return nil }
		gate, err := fence.NewGate(opts.roots(), want, opts.sources, zap.NewNop(), nothing)
		if err != nil {
			return err
		}
		err = f(ctx, b, gate)
		return errors.Join(err, gate.Close())
	})
}

// known is what the database says of an ID.
type known struct {
	key       string
	kind      snapshots.Kind
	record    record
	hasRecord bool
}

// inspector gathers findings.
type inspector struct {
	report Report
	known  map[string]known
	// highest is the highest ID that was given out.
	highest uint64
}

func (i *inspector) fault(invariant, path, what string, args ...any) {
	i.report.Findings = append(i.report.Findings, Finding{invariant, path, fmt.Sprintf(what, args...)})
}

func (i *inspector) note(invariant, path, what string, args ...any) {
	i.report.Notes = append(i.report.Notes, Finding{invariant, path, fmt.Sprintf(what, args...)})
}

func inspect(ctx context.Context, opts Options, b *bolt.Bucket, gate *fence.Gate) (Report, error) {
	i := &inspector{known: map[string]known{}}
	i.report.Identity = string(b.Get(identityKey))
	for err := range b.Tx().Check() {
		i.fault("database", opts.Database, "%v: restore it from a backup of this node", err)
	}
	if err := i.database(ctx, b); err != nil {
		return Report{}, err
	}
	var closed *fence.Closed
	if err := gate.Verify(); errors.Is(err, fence.ErrBusy) {
		return Report{}, err
	} else if errors.As(err, &closed) {
		for _, r := range closed.Reasons {
			i.fault("I3", r.Root, "%s; %s", r.What, r.Remedy)
		}
	} else if err != nil {
		return Report{}, err
	}
	folders := map[fence.Role]map[string]bool{}
	for _, role := range fence.Roles() {
		root, err := gate.Root(role)
		if err != nil {
			i.note("I3", opts.root(role), "not looked at, since it is not the right root")
			continue
		}
		names, err := i.names(root)
		if err != nil {
			return Report{}, err
		}
		folders[role] = names
	}
	if len(folders) == len(fence.Roles()) {
		if err := i.places(gate, folders); err != nil {
			return Report{}, err
		}
	}
	i.sort()
	return i.report, nil
}

// database compares containerd's part of the database with ours.
func (i *inspector) database(ctx context.Context, b *bolt.Bucket) error {
	ids, err := storage.IDMap(ctx)
	if err := ignoringEmpty(err); err != nil {
		return err
	}
	if i.highest, err = getHighest(b); err != nil {
		return err
	}
	unfilled := 0
	for id, key := range ids {
		_, info, _, err := storage.GetInfo(ctx, key)
		if err != nil {
			return err
		}
		k := known{key: key, kind: info.Kind}
		if k.record, k.hasRecord, err = getRecord(b, id); err != nil {
			return err
		}
		i.known[id] = k
		if !k.hasRecord {
			i.fault("I1", id, "snapshot %q has no record of its place", key)
			continue
		}
		if n, err := strconv.ParseUint(id, 10, 64); err != nil || n > i.highest {
			i.fault("I1", id, "the ID is higher than the highest that was noted, %d", i.highest)
		}
		committed := info.Kind == snapshots.KindCommitted
		switch {
		case committed && k.record.Root == fence.Container:
			i.note("I2", id, "layer %q lies on the container root", key)
		case !committed && k.record.Figure != nil:
			i.fault("I7", id, "snapshot %q can still be written to and has a final usage", key)
		}
		if committed && k.record.Figure == nil {
			unfilled++
		}
	}
	if unfilled > 0 {
		i.note("I6", "database", "%d layers wait for their usage", unfilled)
	}
	i.report.Snapshots = len(ids)
	return eachRecord(b, func(id string, _ record) error {
		if _, ok := i.known[id]; !ok {
			i.fault("I1", id, "there is a place on record for a snapshot that does not exist")
			i.known[id] = known{}
		}
		return nil
	})
}

// names lists a root's folders, and looks at the rest of the root.
func (i *inspector) names(root *rootdir.Root) (map[string]bool, error) {
	names, err := root.Names(snapshotsDir)
	if err != nil {
		return nil, err
	}
	entries, err := root.Names(trash.Dir)
	if err != nil {
		return nil, err
	}
	i.report.Trash += len(slices.DeleteFunc(entries, trash.IsSlot))
	inEmpty, err := root.Names(emptyName)
	if err != nil {
		return nil, err
	}
	for _, name := range inEmpty {
		i.fault("I2", filepath.Join(root.Path(), emptyName, name), "this folder must stay empty, it is below each layer that is unpacked without its parent")
	}
	set := map[string]bool{}
	for _, name := range names {
		set[name] = true
	}
	return set, nil
}

// places compares the folders of both roots with the database.
func (i *inspector) places(gate *fence.Gate, folders map[fence.Role]map[string]bool) error {
	other := map[fence.Role]fence.Role{fence.Image: fence.Container, fence.Container: fence.Image}
	for _, role := range fence.Roles() {
		root, err := gate.Root(role)
		if err != nil {
			return err
		}
		for name := range folders[role] {
			path := filepath.Join(root.Path(), idDir(name))
			stray := Folder{Root: role, Name: name}
			k, isKnown := i.known[name]
			switch {
			case strings.HasPrefix(name, temporaryPrefix):
				i.fault("I4", path, "a temporary folder that a crash has left")
				i.report.Plan = append(i.report.Plan, stray)
			case !idName.MatchString(name):
				i.note("I4", path, "not a folder of the snapshotter; it is never deleted")
			case !isKnown:
				i.report.Folders++
				what := "a folder that the database does not know"
				if newerThan(i.highest, name) {
					unused, err := neverGiven(root, name)
					if err != nil {
						return err
					}
					if !unused {
						what += ", and that is newer than it: the database may be an older copy; put the right one back before anything is repaired"
					}
				}
				i.fault("I1", path, "%s", what)
				i.report.Plan = append(i.report.Plan, stray)
			case k.hasRecord && k.record.Root != role:
				i.report.Folders++
				i.fault("I1", path, "its snapshot is on the %s root", k.record.Root)
				if folders[other[role]][name] {
					i.report.Plan = append(i.report.Plan, stray)
				}
			default:
				i.report.Folders++
			}
		}
	}
	for id, k := range i.known {
		if !k.hasRecord {
			continue
		}
		if err := i.folder(gate, folders, id, k); err != nil {
			return err
		}
	}
	return nil
}

// folder looks at the folder that a snapshot should have.
func (i *inspector) folder(gate *fence.Gate, folders map[fence.Role]map[string]bool, id string, k known) error {
	root, err := gate.Root(k.record.Root)
	if err != nil {
		return err
	}
	path := filepath.Join(root.Path(), idDir(id))
	if !folders[k.record.Root][id] {
		i.fault("I1", path, "the folder of snapshot %q is missing", k.key)
		return nil
	}
	want := []string{upperName}
	if k.kind == snapshots.KindActive {
		want = append(want, workName)
	}
	for _, name := range want {
		p, err := root.Stat(filepath.Join(idDir(id), name))
		if err != nil || !p.IsDir() {
			i.fault("I1", filepath.Join(path, name), "the folder is missing in that of snapshot %q", k.key)
		}
	}
	return nil
}

func (i *inspector) sort() {
	for _, list := range [][]Finding{i.report.Findings, i.report.Notes} {
		slices.SortFunc(list, func(a, b Finding) int {
			return cmp.Or(cmp.Compare(a.Invariant, b.Invariant), cmp.Compare(a.Path, b.Path), cmp.Compare(a.What, b.What))
		})
	}
	slices.SortFunc(i.report.Plan, func(a, b Folder) int {
		return cmp.Or(cmp.Compare(a.Root, b.Root), cmp.Compare(len(a.Name), len(b.Name)), cmp.Compare(a.Name, b.Name))
	})
}
