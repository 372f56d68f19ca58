package split

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/storage"
	bolt "go.etcd.io/bbolt"

	"github.com/cleave-cri/cleave/snapshot/split/boltfile"
	"github.com/cleave-cri/cleave/snapshot/split/fence"
	"github.com/cleave-cri/cleave/snapshot/split/trash"
)

// Status is the state of a snapshotter at one moment, for people and metrics.
type Status struct {
	Identity  string         `json:"identity"`
	Image     RootStatus     `json:"image"`
	Container RootStatus     `json:"container"`
	Fence     FenceStatus    `json:"fence"`
	Client    ClientStatus   `json:"containerd"`
	Database  DatabaseStatus `json:"database"`
	// Alarm is a clean-up that waits to be confirmed, LastSweep the last one.
	Alarm     *Alarm `json:"alarm,omitempty"`
	LastSweep *Sweep `json:"lastSweep,omitempty"`
	// Unstored is how many layers wait for their usage to be measured and stored;
	// Measuring tells of those for which that has failed.
	Unstored  int             `json:"unstored"`
	Measuring MeasuringStatus `json:"measuring"`
	// Projects is about project quota, nil if it is not turned on.
	Projects *ProjectStatus `json:"projects,omitempty"`
	// Notes are what an operator should know and nothing has to be done about.
	Notes []string `json:"notes,omitempty"`
}

// RootStatus is one root.
type RootStatus struct {
	Path string `json:"path"`
	// Open: the root is held open, so the figures below are of the right one.
	Open bool `json:"open"`
	// Device is st_dev now, 0 if that is not known; UUID the filesystem's, as
	// recorded, empty if it has none.
	Device uint64 `json:"device,omitempty"`
	UUID   string `json:"uuid,omitempty"`
	// FreeBytes is what root can still write on the filesystem; nil: not known,
	// because the root is not open or does not answer.
	FreeBytes *int64 `json:"freeBytes,omitempty"`
	// Layers are committed snapshots, Extractions layers being unpacked,
	// Writable all other active ones, Views read-only ones.
	Layers      Sum         `json:"layers"`
	Extractions Sum         `json:"extractions"`
	Writable    Sum         `json:"writable"`
	Views       Sum         `json:"views"`
	Trash       trash.Stats `json:"trash"`
	// Errors are what could not be found out.
	Errors []string `json:"errors,omitempty"`
}

// Sum adds up snapshots.
type Sum struct {
	Count int `json:"count"`
	// Bytes and Inodes are those of the measured ones; Unmeasured are not in.
	Bytes      int64 `json:"bytes"`
	Inodes     int64 `json:"inodes"`
	Unmeasured int   `json:"unmeasured,omitempty"`
	// Oldest is the oldest figure in Bytes; zero: there is none.
	Oldest time.Time `json:"oldest,omitzero"`
}

func (s *Sum) add(f figure, known bool) {
	s.Count++
	if !known {
		s.Unmeasured++
		return
	}
	s.Bytes += f.Bytes
	s.Inodes += f.Inodes
	if s.Oldest.IsZero() || f.At.Before(s.Oldest) {
		s.Oldest = f.At
	}
}

// FenceStatus says whether the roots are the right ones.
type FenceStatus struct {
	Closed  bool           `json:"closed"`
	Reasons []fence.Reason `json:"reasons,omitempty"`
	Since   time.Time      `json:"since"`
}

// ClientStatus is about containerd.
type ClientStatus struct {
	// Pinned is the identity of the containerd that the snapshots belong to,
	// empty if none was ever confirmed.
	Pinned    string `json:"pinned,omitempty"`
	Confirmed bool   `json:"confirmed"`
	// Refused is why the last one was not the right one.
	Refused string `json:"refused,omitempty"`
}

// DatabaseStatus is about the database's file.
type DatabaseStatus struct {
	Path      string `json:"path"`
	SizeBytes int64  `json:"sizeBytes"`
	// AllocatedBytes are those that have blocks; UsedBytes goes up to the highest
	// page that is or was in use.
	AllocatedBytes int64 `json:"allocatedBytes"`
	UsedBytes      int64 `json:"usedBytes"`
	BallastBytes   int64 `json:"ballastBytes"`
	FreeBytes      int64 `json:"freeBytes"`
}

// Status tells the state from memory and the database; nothing is measured for
// it.
func (s *Snapshotter) Status(ctx context.Context) (Status, error) {
	st := Status{Identity: s.identity}
	st.Unstored, st.Measuring = s.filler.status()
	st.Projects = s.projects.status()
	st.Fence.Reasons, st.Fence.Since = s.gate.State()
	st.Fence.Closed = len(st.Fence.Reasons) > 0
	s.mu.Lock()
	st.Client.Confirmed, st.Client.Refused = s.confirmed, s.refused
	st.Alarm, st.LastSweep = s.alarm, s.lastSweep
	s.mu.Unlock()
	sums := map[fence.Role]*RootStatus{fence.Image: &st.Image, fence.Container: &st.Container}
	for role, r := range sums {
		s.rootStatus(role, r)
	}
	err := s.db.read(ctx, func(ctx context.Context, b *bolt.Bucket) error {
		st.Client.Pinned = string(b.Get(containerdKey))
		st.Database.UsedBytes = b.Tx().Size()
		// Labels can be large and are read with each look at a snapshot; so it is one look.
		ids, err := idsByKey(ctx)
		if err != nil {
			return ignoringEmpty(err)
		}
		return ignoringEmpty(storage.WalkInfo(ctx, func(_ context.Context, info snapshots.Info) error {
			return s.count(b, ids[info.Name], info, sums)
		}))
	})
	if err != nil {
		return st, fmt.Errorf("status of the snapshotter: %w", err)
	}
	db := &st.Database
	db.Path, db.BallastBytes = s.db.path, s.db.ballast.Bytes()
	db.SizeBytes, db.AllocatedBytes, err = boltfile.Allocated(s.db.path)
	free, freeErr := boltfile.Free(s.db.path)
	db.FreeBytes = free
	if err := errors.Join(err, freeErr); err != nil {
		return st, fmt.Errorf("status of the snapshotter: %w", err)
	}
	if problem := s.holder.index.View().Problem; problem != "" {
		st.Notes = append(st.Notes, "figures of writable layers are measured anew after a restart: "+problem)
	}
	if st.Image.shares(st.Container) {
		st.Notes = append(st.Notes, "both roots are on one filesystem: layers and containers still share their space")
	}
	if st.Image.Open && st.Image.UUID == "" || st.Container.Open && st.Container.UUID == "" {
		st.Notes = append(st.Notes, "a root's filesystem has no UUID: only its marker and, within one boot, its device number tell it from another")
	}
	return st, nil
}

func (s *Snapshotter) rootStatus(role fence.Role, r *RootStatus) {
	r.Path = s.opts.root(role)
	r.Trash = s.bins[role].Stats()
	recorded := s.gate.Recorded(role)
	r.UUID = recorded.UUID
	space, err := s.gate.Space(role)
	if closed := (*fence.Closed)(nil); errors.As(err, &closed) {
		return // the fence's reasons say why
	}
	r.Open = true
	if err != nil {
		r.Errors = append(r.Errors, err.Error())
		return
	}
	r.Device, r.FreeBytes = space.Device, &space.FreeBytes
}

// shares says whether both roots are now known to be on one filesystem.
func (r RootStatus) shares(other RootStatus) bool {
	if r.FreeBytes == nil || other.FreeBytes == nil {
		return false
	}
	return r.Device == other.Device || r.UUID != "" && r.UUID == other.UUID
}

// idsByKey lists the IDs of all snapshots.
func idsByKey(ctx context.Context) (map[string]string, error) {
	keys, err := storage.IDMap(ctx)
	if err != nil {
		return nil, err
	}
	ids := make(map[string]string, len(keys))
	for id, key := range keys {
		ids[key] = id
	}
	return ids, nil
}

func (s *Snapshotter) count(b *bolt.Bucket, id string, info snapshots.Info, roots map[fence.Role]*RootStatus) error {
	rec, err := mustRecord(b, id)
	if err != nil {
		return err
	}
	what := subject{id: id, root: rec.Root, committed: info.Kind == snapshots.KindCommitted}
	f, known := s.lastFigure(what)
	if rec.Figure != nil {
		f, known = *rec.Figure, true
	}
	r := roots[rec.Root]
	switch {
	case info.Kind == snapshots.KindCommitted:
		r.Layers.add(f, known)
	case info.Kind == snapshots.KindView:
		r.Views.add(f, known)
	case rec.Root == fence.Image:
		r.Extractions.add(f, known)
	default:
		r.Writable.add(f, known)
	}
	return nil
}
