package split

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/storage"
	"github.com/containerd/errdefs"
	bolt "go.etcd.io/bbolt"
	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/snapshot/split/fault"
	"github.com/cleave-cri/cleave/snapshot/split/fence"
	"github.com/cleave-cri/cleave/snapshot/split/rootdir"
	"github.com/cleave-cri/cleave/snapshot/split/trash"
)

// Prepare makes a snapshot that can be written to.
func (s *Snapshotter) Prepare(ctx context.Context, key, parent string, opts ...snapshots.Opt) ([]mount.Mount, error) {
	mounts, err := s.create(ctx, snapshots.KindActive, key, parent, opts)
	if err != nil {
		return nil, fmt.Errorf("prepare snapshot %q: %w", shortKey(key), err)
	}
	return mounts, nil
}

// View makes a snapshot that can only be read. It has a folder of its own, an
// empty one, and that on the container root: a full image root holds up no view.
func (s *Snapshotter) View(ctx context.Context, key, parent string, opts ...snapshots.Opt) ([]mount.Mount, error) {
	mounts, err := s.create(ctx, snapshots.KindView, key, parent, opts)
	if err != nil {
		return nil, fmt.Errorf("view snapshot %q: %w", shortKey(key), err)
	}
	return mounts, nil
}

// shortKey keeps a message readable.
func shortKey(key string) string {
	const longest = 256
	if len(key) > longest {
		return key[:longest] + "…"
	}
	return key
}

// create makes a snapshot: a temporary folder first, then, in the transaction
// that records it, the folder's final name. A crash in between leaves a folder
// without a record, which the sweep takes, or the next creation that is given
// the same ID.
func (s *Snapshotter) create(ctx context.Context, kind snapshots.Kind, key, parent string, opts []snapshots.Opt) (_ []mount.Mount, err error) {
	if err := checkKey(key, s.opts.Namespaces); err != nil {
		return nil, err
	}
	var base snapshots.Info
	for _, opt := range opts {
		if err := opt(&base); err != nil {
			return nil, err
		}
	}
	ids, err := s.idsOf(base.Labels)
	if err != nil {
		return nil, err
	}
	if err := s.gate.Quick(); err != nil {
		return nil, err
	}
	role := placeOf(kind, key, base.Labels)
	root, err := s.gate.Root(role)
	if err != nil {
		return nil, err
	}
	var temporary string
	if kind == snapshots.KindActive && role == fence.Container {
		temporary, err = s.makeWritable(ctx, root)
	} else {
		temporary, err = s.makeTemporary(root, kind)
	}
	defer s.dropTemporary(root, temporary)
	if err != nil {
		return nil, err
	}
	s.opts.faults(fault.CreateMade)

	var (
		l       layers
		final   string // the ID's folder once the temporary one is there
		finalID string
	)
	err = s.db.run(ctx, write{
		do: func(ctx context.Context, b *bolt.Bucket) error {
			snap, err := storage.CreateSnapshot(ctx, kind, key, parent, opts...)
			if err != nil {
				return err
			}
			if err := errors.Join(putRecord(b, snap.ID, record{Root: role}), putHighest(b, snap.ID)); err != nil {
				return err
			}
			if l, err = s.layersOf(ctx, b, key, snap); err != nil {
				return err
			}
			if err := s.own(b, root, temporary, snap.ParentIDs, ids); err != nil {
				return err
			}
			if err := s.clearStale(snap.ID); err != nil {
				return err
			}
			if err := root.Rename(temporary, idDir(snap.ID)); err != nil {
				return err
			}
			final, finalID = idDir(snap.ID), snap.ID
			return nil
		},
		before: fault.CreateRenamed,
		happened: func(ctx context.Context, _ *bolt.Bucket) (bool, error) {
			id, _, _, err := storage.GetInfo(ctx, key)
			if errdefs.IsNotFound(err) {
				return false, nil
			}
			return id == finalID, err
		},
		undo: func() {
			if final == "" {
				return
			}
			if err := root.Rename(final, temporary); err != nil {
				s.log.Warn("the folder of a snapshot that was not made stays for the next clean-up", zap.String("folder", final), zap.Error(err))
			}
			final, finalID = "", ""
		},
	})
	if err != nil {
		return nil, err
	}
	s.noteMade(finalID)
	s.holder.poke()
	s.opts.faults(fault.CreateCommitted)
	if err := root.Chmod(final, recordedMode); err != nil {
		s.log.Warn("the folder of a new snapshot still looks like one that nobody was given", zap.String("folder", final), zap.Error(err))
	}
	return l.mounts(), nil
}

// idsOf reads the mapping of IDs from labels, if they are to mean anything.
func (s *Snapshotter) idsOf(labels map[string]string) (*mapping, error) {
	if !s.opts.RemapIDs {
		return nil, nil //nolint:nilnil // no mapping is not an error
	}
	return mappingOf(labels)
}

// makeTemporary makes the folder of a snapshot under a temporary name, which it
// returns in any case.
func (s *Snapshotter) makeTemporary(root *rootdir.Root, kind snapshots.Kind) (string, error) {
	name := temporaryPrefix + rand.Text()
	s.mu.Lock()
	s.making[name] = true
	s.mu.Unlock()
	path := filepath.Join(snapshotsDir, name)
	if err := root.Mkdir(path, pendingMode); err != nil {
		return path, err
	}
	if err := root.Mkdir(filepath.Join(path, upperName), 0o755); err != nil {
		return path, err
	}
	if kind != snapshots.KindActive {
		return path, nil
	}
	return path, root.Mkdir(filepath.Join(path, workName), 0o711)
}

// dropTemporary removes what is still called by the temporary name.
func (s *Snapshotter) dropTemporary(root *rootdir.Root, path string) {
	err := root.RemoveTree(path, func() error { return nil }, func(rootdir.Removed) {})
	if err != nil {
		s.log.Warn("a temporary folder stays for the next clean-up", zap.String("folder", path), zap.Error(err))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.making, filepath.Base(path))
}

// own gives the upper folder its owner, which becomes that of the root folder in
// the container: the mapped root, or the owner of the parent's.
func (s *Snapshotter) own(b *bolt.Bucket, root *rootdir.Root, folder string, parents []string, ids *mapping) error {
	upper := filepath.Join(folder, upperName)
	switch {
	case ids != nil:
		return root.Chown(upper, ids.rootUID, ids.rootGID)
	case len(parents) == 0:
		return nil
	}
	rec, err := mustRecord(b, parents[0])
	if err != nil {
		return err
	}
	parentRoot, err := s.gate.Root(rec.Root)
	if err != nil {
		return err
	}
	p, err := parentRoot.Stat(filepath.Join(idDir(parents[0]), upperName))
	if err != nil {
		return fmt.Errorf("look at the parent's folder: %w", err)
	}
	if p.UID == 0 && p.GID == 0 {
		return nil
	}
	return root.Chown(upper, p.UID, p.GID)
}

// clearStale moves a folder of an ID that is about to be given out to the trash,
// in whichever root it is: a crash between the folder's renaming and the commit
// leaves one, and the ID is given out again (CTD-61). Where somebody may have been
// given that folder, the database is older than it, and it is not taken.
func (s *Snapshotter) clearStale(id string) error {
	for _, role := range fence.Roles() {
		root, err := s.gate.Root(role)
		if err != nil {
			return err
		}
		free, err := neverGiven(root, id)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		if !free {
			return classed(errdefs.ErrFailedPrecondition, "the folder %s is newer than the database, which would give out ID %s now: it may have been restored from an older copy, so nothing is made; put the right database back, or look at `cleave snapshotter status` and confirm the clean-up",
				filepath.Join(root.Path(), idDir(id)), id)
		}
		entry, err := trash.Move(root, idDir(id), "stale-"+id)
		if err != nil {
			return err
		}
		s.log.Warn("a folder without record had the ID of a new snapshot; it went to the trash",
			zap.String("root", root.Path()), zap.String("id", id), zap.String("entry", entry))
		s.bins[role].Wake()
	}
	return nil
}

// layersOf gathers what the mounts of a snapshot are made of.
func (s *Snapshotter) layersOf(ctx context.Context, b *bolt.Bucket, key string, snap storage.Snapshot) (layers, error) {
	_, info, _, err := storage.GetInfo(ctx, key)
	if err != nil {
		return layers{}, err
	}
	rec, err := mustRecord(b, snap.ID)
	if err != nil {
		return layers{}, err
	}
	l := layers{kind: snap.Kind, options: s.options}
	if l.ids, err = s.idsOf(info.Labels); err != nil {
		return layers{}, err
	}
	folder := filepath.Join(s.opts.root(rec.Root), idDir(snap.ID))
	l.upper, l.work = filepath.Join(folder, upperName), filepath.Join(folder, workName)
	var on []fence.Role
	for _, id := range snap.ParentIDs {
		parent, err := mustRecord(b, id)
		if err != nil {
			return layers{}, err
		}
		l.lowers = append(l.lowers, filepath.Join(s.opts.root(parent.Root), idDir(id), upperName))
		if !slices.Contains(on, parent.Root) {
			on = append(on, parent.Root)
		}
	}
	if l.ids != nil && len(on) > 1 {
		// containerd maps the nearest folder that holds all of them, as one mount
		// (core/mount: prepareIDMappedOverlay).
		return layers{}, classed(errdefs.ErrFailedPrecondition, "its layers lie on both roots, and IDs can't be mapped over two mounts: push the image and pull it again, so that all of it is on the image root")
	}
	if s.opts.Rebase && rec.Root == fence.Image && info.Labels[labelParentChain] != "" {
		l.empty = filepath.Join(s.opts.ImageRoot, emptyName)
	}
	return l, nil
}

// Commit makes an active snapshot a layer. It measures nothing; the usage is
// found out afterwards.
func (s *Snapshotter) Commit(ctx context.Context, name, key string, opts ...snapshots.Opt) error {
	if err := s.commit(ctx, name, key, opts); err != nil {
		return fmt.Errorf("commit snapshot %q as %q: %w", shortKey(key), shortKey(name), err)
	}
	return nil
}

func (s *Snapshotter) commit(ctx context.Context, name, key string, opts []snapshots.Opt) error {
	if err := checkKey(name, s.opts.Namespaces); err != nil {
		return err
	}
	if err := s.gate.Quick(); err != nil {
		return err
	}
	if s.opts.SyncOnCommit {
		if err := s.syncLayer(ctx, key); err != nil {
			return err
		}
	}
	s.opts.faults(fault.CommitSynced)
	var id string
	err := s.db.run(ctx, write{before: fault.CommitOpen, do: func(ctx context.Context, _ *bolt.Bucket) error {
		var err error
		id, err = storage.CommitActive(ctx, key, name, snapshots.Usage{}, opts...)
		return err
	}})
	if err != nil {
		return err
	}
	s.meter.forget(id)
	s.holder.poke()
	s.filler.add(id)
	s.opts.faults(fault.CommitCommitted)
	return nil
}

// syncLayer writes a layer's data out before the database says that it is whole.
// That of a container's snapshot can be lost with the container.
func (s *Snapshotter) syncLayer(ctx context.Context, key string) error {
	var rec record
	if err := s.db.read(ctx, func(ctx context.Context, b *bolt.Bucket) error {
		id, _, _, err := storage.GetInfo(ctx, key)
		if err != nil {
			return err
		}
		rec, err = mustRecord(b, id)
		return err
	}); err != nil {
		return err
	}
	if rec.Root != fence.Image {
		return nil
	}
	root, err := s.gate.Root(rec.Root)
	if err != nil {
		return err
	}
	return root.SyncFilesystem()
}

// mountOptions are those added to each overlay. An index would bind a lower
// folder to one upper folder (Linux, overlayfs.rst), and layers are shared.
func mountOptions(configured []string) []string {
	for _, option := range configured {
		for part := range strings.SplitSeq(option, ",") {
			if key, _, _ := strings.Cut(part, "="); key == "index" {
				return configured
			}
		}
	}
	if _, err := os.Stat("/sys/module/overlay/parameters/index"); err != nil {
		return configured
	}
	return append([]string{"index=off"}, configured...)
}
