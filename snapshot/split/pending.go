package split

import (
	"context"
	"errors"
	"io/fs"
	"path/filepath"

	bolt "go.etcd.io/bbolt"
	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/snapshot/split/rootdir"
)

// A folder of a snapshot is made with the sticky bit, and loses it when the
// snapshot is on record, before anybody hears of it. So a folder that the database
// does not know tells by itself whether a crash left it, or an older database
// has taken the place of the one that knew it. The bit is part of the inode: to
// take it away needs no space.
const (
	recordedMode = 0o700
	pendingBit   = 0o1000
	pendingMode  = recordedMode | pendingBit
)

// neverGiven says whether surely nobody was ever given the folder of an ID: it
// has the bit, and is empty. A loss of power can bring the bit back; overlayfs
// leaves something in a work folder from its first mount on. A folder that is
// missing is fs.ErrNotExist.
func neverGiven(root *rootdir.Root, id string) (bool, error) {
	p, err := root.Stat(idDir(id))
	if err != nil || !p.IsDir() || p.Mode&pendingBit == 0 {
		return false, err
	}
	for _, name := range []string{upperName, workName} {
		names, err := root.Names(filepath.Join(idDir(id), name))
		if errors.Is(err, fs.ErrNotExist) {
			continue // a view has no work folder
		}
		if err != nil || len(names) > 0 {
			return false, err
		}
	}
	return true, nil
}

// markRecorded takes the bit from folders whose snapshots are on record and which
// have it still, after a crash or a loss of power.
func (s *Snapshotter) markRecorded(ctx context.Context) error {
	places := map[string]record{}
	if err := s.db.read(ctx, func(_ context.Context, b *bolt.Bucket) error {
		return eachRecord(b, func(id string, r record) error {
			places[id] = r
			return nil
		})
	}); err != nil {
		return err
	}
	for id, r := range places {
		root, err := s.gate.Root(r.Root)
		if err != nil {
			return err
		}
		p, err := root.Stat(idDir(id))
		if errors.Is(err, fs.ErrNotExist) || err == nil && p.Mode&pendingBit == 0 {
			continue // a folder that is missing is for the check
		}
		if err == nil {
			err = root.Chmod(idDir(id), recordedMode)
		}
		if err != nil {
			s.log.Warn("the folder of a snapshot still looks like one that nobody was given", zap.String("id", id), zap.Error(err))
		}
	}
	return nil
}
