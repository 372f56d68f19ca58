package split

import (
	"cmp"
	"context"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/storage"
	bolt "go.etcd.io/bbolt"
	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/fsstats/index"
	"github.com/cleave-cri/cleave/snapshot/split/fence"
)

const (
	// usageWait is how long an answer waits for a new figure when there is an old
	// one. A small layer takes a millisecond.
	usageWait = 500 * time.Millisecond
	// mayBeBehind is how old a figure may be that is given while the index is
	// behind with its work.
	mayBeBehind = 5 * time.Minute
	// followGap is the shortest time between two lists of all snapshots: with
	// thousands of layers one takes some milliseconds, and a pull makes and commits
	// many in a second.
	followGap = time.Second
	// followRest is how many times as long as a list took the next one waits.
	followRest = 20
)

// Kinds of snapshots that can change, as the index knows them.
const (
	kindWritable   index.Kind = "writable"
	kindExtraction index.Kind = "extraction"
	kindView       index.Kind = "view"
)

// wholeFolder is the one part that a snapshot has in the index.
const wholeFolder = "folder"

// holder keeps figures of the snapshots that can change, by the usage index. Those
// of layers are measured once and lie in the database.
type holder struct {
	index *index.Index
	// list gives the snapshots there are.
	list func(context.Context) ([]holding, error)
	log  *zap.Logger
	// wake says that the list may have changed.
	wake chan struct{}

	mu sync.Mutex
	// keys are by ID, subjects by what the index calls them.
	keys     map[string]index.Key  // guarded by mu
	subjects map[index.Key]subject // guarded by mu
	// asked counts how often a figure was wanted that was too old. To the index
	// that is a hint that its snapshot may have been written to: of writers it
	// measures those first that grow most.
	asked map[string]uint64 // guarded by mu
	// changed is closed, and made anew, when the index has measured something.
	changed chan struct{} // guarded by mu
}

// holding is a snapshot that can change.
type holding struct {
	subject subject
	path    string
	kind    index.Kind
	// created tells it from another one that had its ID (CTD-61).
	created time.Time
}

// held is what a holder looks at.
type held struct {
	list    func(context.Context) ([]holding, error)
	space   func(path string) (index.Space, error)
	measure func(ctx context.Context, what subject, entriesPerSecond int) (figure, error)
	// stateFile is where figures survive a restart; empty: nowhere.
	stateFile string
}

// newHolder makes one that knows of no snapshot yet.
func newHolder(of held, log *zap.Logger) (*holder, error) {
	h := &holder{
		list: of.list, log: log, wake: make(chan struct{}, 1),
		keys: map[string]index.Key{}, subjects: map[index.Key]subject{}, asked: map[string]uint64{}, changed: make(chan struct{}),
	}
	var err error
	h.index, err = index.New(index.Options{
		Space:   of.space,
		Written: func(_ index.Kind, id string) (uint64, bool) { return h.asks(id) },
		Measure: func(ctx context.Context, what index.Subject) (index.Figure, error) {
			subject, ok := h.subject(what.Key)
			if !ok {
				return index.Figure{}, fmt.Errorf("snapshot %s is gone: %w", what.Key.ID, fs.ErrNotExist)
			}
			var f figure
			var err error
			cost := index.CostOf(func() { f, err = of.measure(ctx, subject, what.EntriesPerSecond) })
			return index.Figure{Bytes: f.Bytes, Inodes: f.Inodes, Started: f.started, Finished: f.At, How: f.how, Cost: cost}, err
		},
		StateFile: of.stateFile,
	})
	h.poke()
	return h, err
}

// poke says that the list of snapshots may have changed.
func (h *holder) poke() {
	select {
	case h.wake <- struct{}{}:
	default: // one is enough
	}
}

// run keeps the index going until ctx ends.
func (h *holder) run(ctx context.Context) {
	var parts sync.WaitGroup
	parts.Go(func() {
		if err := h.index.Run(ctx); err != nil {
			h.log.Warn("the usage index has not ended well", zap.Error(err))
		}
	})
	parts.Go(func() { h.tellChanges(ctx) })
	defer parts.Wait()
	retry := time.NewTicker(checkPeriod)
	defer retry.Stop()
	failing := ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-h.wake:
		case <-retry.C:
			if failing == "" {
				continue
			}
		}
		began, problem := time.Now(), ""
		if err := h.follow(ctx); err != nil && ctx.Err() == nil {
			problem = err.Error()
		}
		if problem != "" && problem != failing {
			h.log.Warn("new snapshots have no figures yet", zap.String("problem", problem))
		}
		failing = problem
		select {
		case <-ctx.Done():
			return
		case <-time.After(max(followGap, followRest*time.Since(began))): // it reads all labels, which may be large
		}
	}
}

func (h *holder) tellChanges(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-h.index.Changed():
		}
		h.mu.Lock()
		close(h.changed)
		h.changed = make(chan struct{})
		h.mu.Unlock()
	}
}

// follow tells the index which snapshots there are.
func (h *holder) follow(ctx context.Context) error {
	list, err := h.list(ctx)
	if err != nil {
		return err
	}
	owners := make([]index.Owner, 0, len(list))
	keys, subjects, asked := map[string]index.Key{}, map[index.Key]subject{}, map[string]uint64{}
	h.mu.Lock()
	for _, l := range list {
		key := index.Key{Kind: l.kind, ID: fmt.Sprintf("%s.%d", l.subject.id, l.created.UnixNano()), Part: wholeFolder}
		keys[l.subject.id], subjects[key] = key, l.subject
		if n, ok := h.asked[key.ID]; ok {
			asked[key.ID] = n
		}
		rank := 0
		if l.kind == kindWritable {
			rank = 1
		}
		owners = append(owners, index.Owner{Kind: l.kind, ID: key.ID, Rank: rank, Parts: []index.Part{{Name: wholeFolder, Path: l.path}}})
	}
	h.keys, h.subjects, h.asked = keys, subjects, asked
	h.mu.Unlock()
	return h.index.SetOwners(owners)
}

func (h *holder) subject(key index.Key) (subject, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	what, ok := h.subjects[key]
	return what, ok
}

// asks gives how often a figure of an owner was wanted anew.
func (h *holder) asks(owner string) (uint64, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	n, ok := h.asked[owner]
	return n, ok
}

// part is what the index knows of a snapshot; next is closed at the next change.
func (h *holder) part(what subject) (p index.PartView, next <-chan struct{}, ok bool) {
	h.mu.Lock()
	key, known := h.keys[what.id]
	next = h.changed
	h.mu.Unlock()
	if !known {
		return index.PartView{}, next, false
	}
	owner, ok := h.index.View().Owner(key.Kind, key.ID)
	if !ok {
		return index.PartView{}, next, false
	}
	p, ok = owner.Part(key.Part)
	return p, next, ok
}

// last gives the last figure of a snapshot, however old.
func (h *holder) last(what subject) (figure, bool) {
	p, _, ok := h.part(what)
	if what.committed || !ok || p.Figure == nil {
		return figure{}, false
	}
	return heldFigure(p), true
}

func heldFigure(p index.PartView) figure {
	return figure{Bytes: p.Figure.Bytes, Inodes: p.Figure.Inodes, At: p.Figure.Finished, started: p.Figure.Started, how: p.Figure.How}
}

// fresh gives a figure that is not older than maxAge, or was not when something
// last changed on the filesystem. It has a newer one made if need be and waits for
// that a moment; then one will do that is not older than mayBeBehind.
func (h *holder) fresh(ctx context.Context, what subject, maxAge time.Duration) (figure, bool) {
	young := func(p index.PartView) bool {
		return time.Since(p.Unmoved) <= maxAge
	}
	p, next, ok := h.part(what)
	switch {
	case !ok || p.Figure == nil || p.Problem != "":
		return figure{}, false // to measure it now tells why
	case young(p):
		return heldFigure(p), true
	}
	h.mu.Lock()
	h.asked[h.keys[what.id].ID]++
	h.mu.Unlock()
	h.index.Kick()
	limit := time.NewTimer(usageWait)
	defer limit.Stop()
	for waiting := true; waiting; {
		select {
		case <-next:
		case <-limit.C:
			waiting = false
		case <-ctx.Done():
			waiting = false
		}
		if p, next, ok = h.part(what); !ok || p.Figure == nil || p.Problem != "" {
			return figure{}, false
		}
		if young(p) {
			return heldFigure(p), true
		}
	}
	return heldFigure(p), time.Since(p.Figure.Finished) <= max(mayBeBehind, maxAge)
}

// spaceOf says what is used on the filesystem of a snapshot's folder.
func (s *Snapshotter) spaceOf(path string) (index.Space, error) {
	role := fence.Container
	if within(path, s.opts.ImageRoot) {
		role = fence.Image
	}
	at := time.Now()
	space, err := s.gate.Space(role)
	if err != nil {
		return index.Space{}, err
	}
	return index.Space{
		FS:        index.FS(fmt.Sprintf("%x-%08x%08x", space.Device, uint32(space.ID[0]), uint32(space.ID[1]))), //nolint:gosec // a mere name
		UsedBytes: space.UsedBytes, UsedInodes: space.UsedInodes, At: at,
	}, nil
}

// holdings lists the snapshots that can change.
func (s *Snapshotter) holdings(ctx context.Context) (list []holding, err error) {
	err = s.eachSnapshot(ctx, func(id string, info snapshots.Info, rec record) error {
		if info.Kind != snapshots.KindCommitted {
			list = append(list, holding{subject: subject{id: id, root: rec.Root}, path: s.folder(rec.Root, id), kind: indexKind(info, rec), created: info.Created})
		}
		return nil
	})
	return list, err
}

// folder is the path of a snapshot's folder.
func (s *Snapshotter) folder(role fence.Role, id string) string {
	return filepath.Join(s.opts.root(role), idDir(id))
}

func indexKind(info snapshots.Info, rec record) index.Kind {
	switch {
	case info.Kind == snapshots.KindView:
		return kindView
	case rec.Root == fence.Image:
		return kindExtraction
	}
	return kindWritable
}

// eachSnapshot visits all snapshots, with their IDs and records.
func (s *Snapshotter) eachSnapshot(ctx context.Context, visit func(id string, info snapshots.Info, rec record) error) error {
	return s.db.read(ctx, func(ctx context.Context, b *bolt.Bucket) error {
		ids, err := idsByKey(ctx)
		if err != nil {
			return ignoringEmpty(err)
		}
		return ignoringEmpty(storage.WalkInfo(ctx, func(_ context.Context, info snapshots.Info) error {
			rec, err := mustRecord(b, ids[info.Name])
			if err != nil {
				return err
			}
			return visit(ids[info.Name], info, rec)
		}))
	})
}

// SnapshotUsage is what a snapshot takes, as far as that is known.
type SnapshotUsage struct {
	// Namespace and Name are containerd's for it: the name of a container's is the
	// container's ID.
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name"`
	// Kind is layer, extraction, writable or view, Root where it lies, and Folder
	// the whole folder that is counted.
	Kind   string     `json:"kind"`
	Root   fence.Role `json:"root"`
	Folder string     `json:"folder"`
	// Figure is nil while unknown; Problem then says why, or why there is no newer
	// one.
	Figure  *SnapshotFigure `json:"figure,omitempty"`
	Problem string          `json:"problem,omitempty"`
}

// SnapshotFigure is a measured usage.
type SnapshotFigure struct {
	Bytes  int64 `json:"bytes"`
	Inodes int64 `json:"inodes"`
	// Started and Finished frame the measurement. Started is zero for a layer.
	Started  time.Time `json:"started,omitzero"`
	Finished time.Time `json:"finished"`
	// StillAt is up to when nothing has changed on the filesystem since Started,
	// zero if something has, or it is not known.
	StillAt time.Time `json:"stillAt,omitzero"`
	// How is "walk", each file looked at, or "quota", the kernel's own count.
	How string `json:"how"`
}

// Usages tells what every snapshot takes, by the names. It measures nothing.
func (s *Snapshotter) Usages(ctx context.Context) ([]SnapshotUsage, error) {
	out := []SnapshotUsage{}
	err := s.eachSnapshot(ctx, func(id string, info snapshots.Info, rec record) error {
		u := SnapshotUsage{Root: rec.Root, Folder: s.folder(rec.Root, id), Kind: "layer"}
		u.Namespace, u.Name = splitKey(info.Name)
		what := subject{id: id, root: rec.Root, committed: info.Kind == snapshots.KindCommitted}
		switch {
		case rec.Figure != nil:
			u.Figure = rec.Figure.shown()
		case what.committed:
			if f, ok := s.meter.last(what); ok {
				u.Figure = f.shown()
			}
		default:
			u.Kind = string(indexKind(info, rec))
			if f, ok := s.lastFigure(what); ok {
				u.Figure = f.shown()
			}
			if p, _, ok := s.holder.part(what); ok {
				u.Problem = p.Problem
				if u.Figure != nil && p.Figure != nil && u.Figure.Finished.Equal(p.Figure.Finished) && p.Unmoved.After(p.Figure.Finished) {
					u.Figure.StillAt = p.Unmoved
				}
			}
		}
		out = append(out, u)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("usage of all snapshots: %w", err)
	}
	slices.SortFunc(out, func(a, b SnapshotUsage) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name), strings.Compare(a.Folder, b.Folder))
	})
	return out, nil
}

func (f figure) shown() *SnapshotFigure {
	return &SnapshotFigure{Bytes: f.Bytes, Inodes: f.Inodes, Started: f.started, Finished: f.At, How: cmp.Or(f.how, index.Walked)}
}
