package split

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/core/snapshots/storage"
	"github.com/containerd/errdefs"
	bolt "go.etcd.io/bbolt"
	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/snapshot/split/boltfile"
	"github.com/cleave-cri/cleave/snapshot/split/fence"
	"github.com/cleave-cri/cleave/snapshot/split/rootdir"
	"github.com/cleave-cri/cleave/snapshot/split/trash"
)

// Purge takes away all that [Init] made and a snapshotter left: what is in both
// roots, and the database. With dry it says what that is, and changes nothing.
// Folders of the roots themselves, and the lock beside the database, stay.
//
// It is refused while a snapshotter runs, while the database has any snapshot, if
// a root is not the one that the database knows, and if anything lies in a root
// that no snapshotter made. One that was broken off can be repeated, also when
// nothing but markers was left.
func Purge(ctx context.Context, opts Options, dry bool) (list []string, err error) {
	opts = opts.withDefaults()
	if exists, err := boltfile.Exists(opts.Database); err == nil && !exists {
		list, err := purgeMarkers(opts, dry)
		if err != nil {
			return list, fmt.Errorf("purge the snapshotter: there is no database %s: %w", opts.Database, err)
		}
		return list, nil
	}
	err = offline(ctx, opts, func(ctx context.Context, b *bolt.Bucket, gate *fence.Gate) error {
		p := purge{opts: opts, gate: gate, names: map[fence.Role][]string{}}
		if err := p.examine(ctx, b); err != nil {
			return err
		}
		list = p.list()
		if dry {
			return nil
		}
		return p.run(ctx)
	})
	if err != nil {
		return list, fmt.Errorf("purge the snapshotter: %w", err)
	}
	return list, nil
}

// purge is one purge. names are what is in each root and goes.
type purge struct {
	opts  Options
	gate  *fence.Gate
	names map[fence.Role][]string
}

// purgeOrder has what says whose a root is at its end.
var purgeOrder = []string{snapshotsDir, trash.Dir, emptyName, fence.ProbeName, fence.MarkerName + ".new", fence.MarkerName}

func (p *purge) examine(ctx context.Context, b *bolt.Bucket) error {
	for err := range b.Tx().Check() {
		return fmt.Errorf("the database %s: %w", p.opts.Database, err)
	}
	ids, err := storage.IDMap(ctx)
	if err := ignoringEmpty(err); err != nil {
		return err
	}
	if len(ids) > 0 {
		return classed(errdefs.ErrFailedPrecondition, "the database has %d snapshots: remove them through containerd first, as `cleave uninstall` does", len(ids))
	}
	if err := p.gate.Verify(); err != nil {
		return err
	}
	for _, role := range fence.Roles() {
		root, err := p.gate.Root(role)
		if err != nil {
			return err
		}
		if p.names[role], err = p.ours(root); err != nil {
			return fmt.Errorf("the %s root: %w", role, err)
		}
	}
	return nil
}

// ours lists what is in a root, if a snapshotter made all of it.
func (p *purge) ours(root *rootdir.Root) ([]string, error) {
	foreign := func(path ...string) error {
		return classed(errdefs.ErrFailedPrecondition, "%s was not made by a snapshotter: look at it and move it away; nothing was deleted",
			filepath.Join(append([]string{root.Path()}, path...)...))
	}
	there, err := root.Names(".")
	if err != nil {
		return nil, err
	}
	for _, name := range there {
		// A filesystem is born with lost+found, and keeps it.
		if name != "lost+found" && !slices.Contains(purgeOrder, name) {
			return nil, foreign(name)
		}
		if strings.HasPrefix(name, fence.MarkerName) {
			if place, err := root.Stat(name); err != nil || !place.IsFile() {
				return nil, errors.Join(foreign(name), err)
			}
		}
	}
	if err := fence.ProbeIsOurs(root); err != nil {
		return nil, err
	}
	for dir, known := range map[string]func(string, rootdir.Place) bool{
		snapshotsDir: func(n string, p rootdir.Place) bool {
			return p.IsDir() && (idName.MatchString(n) || strings.HasPrefix(n, temporaryPrefix))
		},
		trash.Dir: func(n string, p rootdir.Place) bool {
			return trash.IsEntry(n) || trash.IsSlot(n) && p.IsFile() && p.SizeBytes == 0
		},
		emptyName: func(string, rootdir.Place) bool { return false },
	} {
		inside, err := root.Names(dir)
		if errors.Is(err, fs.ErrNotExist) {
			continue // an earlier purge took it
		}
		if err != nil {
			return nil, err
		}
		for _, name := range inside {
			place, err := root.Stat(filepath.Join(dir, name))
			if err != nil {
				return nil, err
			}
			if !known(name, place) {
				return nil, foreign(dir, name)
			}
		}
	}
	return slices.DeleteFunc(slices.Clone(purgeOrder), func(n string) bool { return !slices.Contains(there, n) }), nil
}

func (p *purge) list() []string {
	var out []string
	for _, role := range fence.Roles() {
		for _, name := range p.names[role] {
			out = append(out, filepath.Join(p.opts.root(role), name))
		}
	}
	return append(out, p.opts.Database)
}

// run deletes the trees, then the database with what belongs to it, and the markers at the
// end. Until the database goes it can be repeated as it is; from then on see
// purgeMarkers.
func (p *purge) run(ctx context.Context) error {
	for _, last := range []bool{false, true} {
		for _, role := range fence.Roles() {
			for _, name := range p.names[role] {
				marker := strings.HasPrefix(name, fence.MarkerName)
				if marker == last {
					if err := p.remove(ctx, role, name, marker); err != nil {
						return err
					}
				}
			}
		}
		if !last {
			if err := p.removeDatabase(); err != nil {
				return err
			}
		}
	}
	return nil
}

func (p *purge) remove(ctx context.Context, role fence.Role, name string, marker bool) error {
	root, err := p.gate.Root(role)
	if err != nil {
		return err
	}
	if marker {
		return errors.Join(root.RemoveFile(name), root.SyncDir("."))
	}
	// Looked at once more: is it still the right disk?
	if err := p.gate.Verify(); err != nil {
		return err
	}
	var inodes, bytes int64
	err = root.RemoveTree(name, ctx.Err, func(r rootdir.Removed) {
		bytes += r.Bytes
		if r.LastName {
			inodes++
		}
	})
	if err != nil {
		return err
	}
	p.opts.Log.Info("purged", zap.String("root", root.Path()), zap.String("folder", name), zap.Int64("bytes", bytes), zap.Int64("inodes", inodes))
	return root.SyncDir(".")
}

func (p *purge) removeDatabase() (err error) {
	dir, err := rootdir.Open(filepath.Dir(p.opts.Database))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dir.Close()) }()
	for _, path := range []string{boltfile.NewBallast(p.opts.Database, p.opts.BallastBytes).Path(), p.opts.Database + usageSuffix, p.opts.Database} {
		if err := dir.RemoveFile(filepath.Base(path)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return dir.SyncDir(".")
}

// purgeMarkers does the rest of a purge that was broken off after the database was
// gone. Then the roots hold nothing but markers, and nothing else leaves them so: those
// of a snapshotter, and of an Init that was broken off, have folders too. Anything
// else, or nothing at all, is ErrNotInitialised.
func purgeMarkers(opts Options, dry bool) (list []string, err error) {
	if err := opts.validate(); err != nil {
		return nil, err
	}
	if _, err := os.Stat(filepath.Dir(opts.Database)); err != nil {
		return nil, errors.Join(ErrNotInitialised, err) // its disk may not be mounted
	}
	lock, err := boltfile.TakeLock(opts.Database)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, lock.Close()) }()
	roots, markers := map[fence.Role]*rootdir.Root{}, map[fence.Role][]string{}
	defer func() {
		for _, root := range roots {
			err = errors.Join(err, root.Close())
		}
	}()
	identity := ""
	for _, role := range fence.Roles() {
		root, err := rootdir.Open(opts.root(role))
		if err == nil {
			roots[role] = root
			markers[role], err = onlyMarkers(opts, role, root, &identity)
		}
		if err != nil {
			return nil, fmt.Errorf("%w, and the %s root: %w", ErrNotInitialised, role, err)
		}
	}
	if identity == "" {
		return nil, ErrNotInitialised
	}
	for _, role := range fence.Roles() {
		for _, name := range markers[role] {
			list = append(list, filepath.Join(opts.root(role), name))
			if dry {
				continue
			}
			if err := errors.Join(roots[role].RemoveFile(name), roots[role].SyncDir(".")); err != nil {
				return list, err
			}
		}
	}
	return list, nil
}

// onlyMarkers are the markers in a root, the one that counts last; none if the root is
// empty. It is an error if anything else is in it, or a marker of another snapshotter
// than that of the identity, which it sets.
func onlyMarkers(opts Options, role fence.Role, root *rootdir.Root, identity *string) ([]string, error) {
	if opts.RequireMountpoints {
		if err := opts.sources.MustBeMount(root); err != nil {
			return nil, err
		}
	}
	if err := fence.Lock(role, root); err != nil {
		return nil, err
	}
	there, err := root.Names(".")
	if err != nil {
		return nil, err
	}
	var markers []string
	for _, name := range []string{fence.MarkerName + ".new", fence.MarkerName} {
		if !slices.Contains(there, name) {
			continue
		}
		if place, err := root.Stat(name); err != nil || !place.IsFile() {
			return nil, errors.Join(fmt.Errorf("%s is no marker", filepath.Join(root.Path(), name)), err)
		}
		markers = append(markers, name)
	}
	for _, name := range there {
		if name != "lost+found" && !slices.Contains(markers, name) {
			return nil, fmt.Errorf("%s was not left by a purge", filepath.Join(root.Path(), name))
		}
	}
	if len(markers) == 0 {
		return nil, nil
	}
	m, err := fence.ReadMarker(root)
	if err != nil {
		return nil, err
	}
	if m.Role != role || m.Identity == "" || *identity != "" && m.Identity != *identity {
		return nil, fmt.Errorf("%s is not the marker of the %s root of the same snapshotter", filepath.Join(root.Path(), fence.MarkerName), role)
	}
	*identity = m.Identity
	return markers, nil
}
