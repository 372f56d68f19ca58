package split

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/core/snapshots/storage"
	"github.com/containerd/errdefs"
	bolt "go.etcd.io/bbolt"
	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/snapshot/split/fault"
	"github.com/cleave-cri/cleave/snapshot/split/fence"
	"github.com/cleave-cri/cleave/snapshot/split/trash"
)

// Folder is a folder of snapshots in a root.
type Folder struct {
	Root fence.Role `json:"root"`
	Name string     `json:"name"`
}

// Sweep is what a clean-up did.
type Sweep struct {
	At time.Time `json:"at"`
	// Moved went to the trash.
	Moved int `json:"moved"`
	// Error is why it is incomplete, empty if it is not.
	Error string `json:"error,omitempty"`
}

// Alarm is a clean-up that was not done because it would take too much.
type Alarm struct {
	At     time.Time `json:"at"`
	Reason string    `json:"reason"`
	// Older: the database is older than folders in the roots. Then no snapshot is
	// removed either: what it calls a half unpacked layer may be a whole one by now,
	// with containers on it.
	Older bool `json:"older,omitempty"`
	// Folders are what it would take.
	Folders []Folder `json:"folders"`
	// Total is how many folders with an ID there are in both roots, save for those
	// of removed snapshots that could not be moved.
	Total int `json:"total"`
}

// idName is the only form of a name, beside that of temporary folders, that a
// clean-up ever takes.
var idName = regexp.MustCompile(`^[0-9]+$`)

// sweepFacts is what a clean-up is planned from.
type sweepFacts struct {
	// found are all names in the snapshots folders of both roots.
	found []Folder
	// known are the IDs that the database has.
	known map[string]bool
	// highest is the highest ID that was ever given out, 0 if none was.
	highest uint64
	// unused are unknown folders above highest that nobody was ever given.
	unused map[Folder]bool
	// leaving are folders of snapshots whose removal is on record, and which
	// could not be moved then.
	leaving map[Folder]bool
	// making are the temporary folders that are being filled.
	making map[string]bool
	// maxShare and minCount bound what may go at once.
	maxShare float64
	minCount int
	// allowed are folders that somebody has looked at and confirmed.
	allowed map[Folder]bool
}

// sweepPlan is what a clean-up takes. With an alarm it takes only temporary
// folders.
type sweepPlan struct {
	take  []Folder
	alarm *Alarm
}

// planSweep decides what is a stray, and whether there are too many.
//
//   - A temporary folder that nobody is filling now is one. Nobody was ever given
//     it, so it does not count.
//   - A folder of a snapshot whose removal is on record is one. It does not count
//     either: somebody asked for it. With an older database it stays like all others.
//   - A folder with an ID that the database does not know is one. If the ID is
//     higher than any that was ever given out, the database is older than the
//     folder; save for the next one, if nobody was ever given that folder: a crash
//     leaves such a one.
//   - Everything else is not ours to take.
func planSweep(f sweepFacts) sweepPlan {
	var (
		plan    sweepPlan
		strays  []Folder
		removed []Folder
		total   int
		tooNew  []Folder
		allowed = len(f.allowed) > 0
	)
	for _, folder := range f.found {
		switch {
		case strings.HasPrefix(folder.Name, temporaryPrefix):
			if !f.making[folder.Name] {
				plan.take = append(plan.take, folder)
			}
		case idName.MatchString(folder.Name):
			if f.leaving[folder] && !f.known[folder.Name] && !newerThan(f.highest, folder.Name) {
				removed = append(removed, folder)
				continue
			}
			total++
			if f.known[folder.Name] {
				continue
			}
			strays = append(strays, folder)
			allowed = allowed && f.allowed[folder]
			if newerThan(f.highest, folder.Name) && (newerThan(f.highest+1, folder.Name) || !f.unused[folder]) {
				tooNew = append(tooNew, folder)
			}
		}
	}
	for _, list := range [][]Folder{plan.take, removed, strays, tooNew} {
		slices.SortFunc(list, func(a, b Folder) int {
			return cmp.Or(cmp.Compare(a.Root, b.Root), cmp.Compare(len(a.Name), len(b.Name)), cmp.Compare(a.Name, b.Name))
		})
	}
	reason := ""
	switch {
	case len(strays) == 0 || allowed:
	case len(tooNew) > 0 && f.highest == 0:
		reason = "the database has never had a snapshot, and the roots have folders of some"
	case len(tooNew) > 0:
		reason = fmt.Sprintf("%d folders are newer than the database, first %s in the %s root: it may have been restored from an older copy", len(tooNew), tooNew[0].Name, tooNew[0].Root)
	case len(strays) > f.minCount && float64(len(strays)) > f.maxShare*float64(total):
		reason = fmt.Sprintf("%d of %d folders are unknown to the database, which is more than the allowed share of %g", len(strays), total, f.maxShare)
	}
	if reason == "" || len(tooNew) == 0 {
		plan.take = append(plan.take, removed...)
	}
	if reason != "" {
		plan.alarm = &Alarm{Reason: reason, Older: len(tooNew) > 0, Folders: strays, Total: total}
		return plan
	}
	plan.take = append(plan.take, strays...)
	return plan
}

// newerThan says whether a folder's name is an ID above the highest.
func newerThan(highest uint64, name string) bool {
	if !idName.MatchString(name) {
		return false
	}
	n, err := strconv.ParseUint(name, 10, 64)
	return err != nil || n > highest // what is no uint64 is higher than all
}

// Cleanup moves folders that the database does not know to the trash. Removed
// snapshots are there already; what it finds was left by a crash or a full disk.
func (s *Snapshotter) Cleanup(ctx context.Context) error {
	if err := s.mayDelete(); err != nil {
		return fmt.Errorf("clean up: %w", err)
	}
	if err := s.sweep(ctx); err != nil {
		return fmt.Errorf("clean up: %w", err)
	}
	s.waitForSpace(ctx)
	return nil
}

// waitForSpace waits until what was removed is deleted, at most CleanupWait. containerd cleans up at the end of an image's removal
// and answers after that; a kubelet that frees space looks at the disk at once then, and evicts a pod if the space is not there yet
// (GAP-16).
func (s *Snapshotter) waitForSpace(ctx context.Context) {
	if s.opts.CleanupWait < 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, s.opts.CleanupWait)
	defer cancel()
	if err := s.WaitIdle(ctx); err != nil {
		s.log.Debug("the space of what was removed is not free yet", zap.Error(err))
	}
}

// ConfirmCleanup does the clean-up that the alarm in Status is about, with
// exactly the folders named there. Without an alarm it is a failed precondition.
func (s *Snapshotter) ConfirmCleanup(ctx context.Context) error {
	s.mu.Lock()
	alarm := s.alarm
	if alarm != nil {
		s.allowed = map[Folder]bool{}
		for _, f := range alarm.Folders {
			s.allowed[f] = true
		}
	}
	s.mu.Unlock()
	if alarm == nil {
		return classed(errdefs.ErrFailedPrecondition, "confirm a clean-up: none is waiting to be confirmed")
	}
	s.log.Warn("a clean-up was confirmed", zap.Int("folders", len(alarm.Folders)))
	err := s.Cleanup(ctx)
	s.mu.Lock()
	s.allowed = nil
	s.mu.Unlock()
	return err
}

func (s *Snapshotter) sweep(ctx context.Context) error {
	if err := s.gate.Verify(); err != nil {
		return err
	}
	var (
		moved  int
		failed []error
		gone   []Folder // noted as leaving, and not there any more
	)
	// Nothing is created or removed meanwhile: what the database does not know
	// now is nobody's.
	err := s.db.exclusive(ctx, func(ctx context.Context, b *bolt.Bucket) error {
		facts, err := s.sweepFacts(ctx, b)
		if err != nil {
			return err
		}
		plan := planSweep(facts)
		s.raise(plan.alarm)
		for folder := range facts.leaving {
			if !slices.Contains(facts.found, folder) {
				gone = append(gone, folder)
			}
		}
		for _, folder := range plan.take {
			if err := ctx.Err(); err != nil {
				return err
			}
			// One that can't be moved, as with a mount on it, holds up no other.
			if err := s.moveStray(folder); err != nil {
				failed = append(failed, err)
				continue
			}
			moved++
			if facts.leaving[folder] {
				gone = append(gone, folder)
			}
			s.opts.faults(fault.SweepMoving)
		}
		if plan.alarm != nil {
			return classed(errdefs.ErrFailedPrecondition, "%s; look at `cleave snapshotter status` and confirm it if it is right", plan.alarm.Reason)
		}
		return nil
	})
	err = errors.Join(err, joinFirst(failed))
	s.forgetLeaving(ctx, gone)
	did := &Sweep{At: time.Now(), Moved: moved}
	if err != nil {
		did.Error = err.Error()
	}
	s.mu.Lock()
	s.lastSweep = did
	s.mu.Unlock()
	for _, bin := range s.bins {
		if moved > 0 {
			bin.Wake()
		}
	}
	return err
}

// forgetLeaving forgets that folders were to go, once they are gone. If it can't,
// the next clean-up does.
func (s *Snapshotter) forgetLeaving(ctx context.Context, gone []Folder) {
	if len(gone) == 0 {
		return
	}
	err := s.db.run(ctx, write{do: func(_ context.Context, b *bolt.Bucket) error { return deleteLeaving(b, gone) }})
	if err != nil {
		s.log.Warn("folders of removed snapshots are gone and still noted", zap.Int("folders", len(gone)), zap.Error(err))
	}
}

// joinFirst joins errors as far as somebody would read them.
func joinFirst(errs []error) error {
	const most = 5
	if more := len(errs) - most; more > 0 {
		errs = append(slices.Clip(errs[:most]), fmt.Errorf("%d more folders can't be moved to the trash", more))
	}
	return errors.Join(errs...)
}

func (s *Snapshotter) sweepFacts(ctx context.Context, b *bolt.Bucket) (sweepFacts, error) {
	f := sweepFacts{known: map[string]bool{}, unused: map[Folder]bool{}, making: map[string]bool{}, maxShare: s.opts.CleanupMaxShare, minCount: s.opts.CleanupMinCount}
	ids, err := storage.IDMap(ctx)
	if err := ignoringEmpty(err); err != nil {
		return f, err
	}
	for id := range ids {
		f.known[id] = true
	}
	// What only our own part knows is not nobody's either.
	if err := eachRecord(b, func(id string, _ record) error {
		f.known[id] = true
		return nil
	}); err != nil {
		return f, err
	}
	if f.highest, err = getHighest(b); err != nil {
		return f, err
	}
	if f.leaving, err = getLeaving(b); err != nil {
		return f, err
	}
	for _, role := range fence.Roles() {
		root, err := s.gate.Root(role)
		if err != nil {
			return f, err
		}
		names, err := root.Names(snapshotsDir)
		if err != nil {
			return f, err
		}
		for _, name := range names {
			folder := Folder{Root: role, Name: name}
			f.found = append(f.found, folder)
			if f.known[name] || !newerThan(f.highest, name) {
				continue
			}
			if f.unused[folder], err = neverGiven(root, name); err != nil {
				return f, err
			}
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for name := range s.making {
		f.making[name] = true
	}
	f.allowed = s.allowed
	return f, nil
}

func (s *Snapshotter) moveStray(folder Folder) error {
	root, err := s.gate.Root(folder.Root)
	if err != nil {
		return err
	}
	what := "stray-" + folder.Name
	if strings.HasPrefix(folder.Name, temporaryPrefix) {
		what = "stray-new"
	}
	entry, err := trash.Move(root, idDir(folder.Name), what)
	if err != nil {
		return err
	}
	s.log.Info("a folder that the database does not know went to the trash",
		zap.String("root", root.Path()), zap.String("folder", folder.Name), zap.String("entry", entry))
	return nil
}

// compare sees to it that the folders were compared with the database since the
// start, so that it is known whether that is older than they are. If the fence was
// closed at the start, they are compared once it has opened, and a removal can come
// before that.
func (s *Snapshotter) compare(ctx context.Context) error {
	known := func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.compared
	}
	if known() {
		return nil
	}
	if err := s.sweep(ctx); !known() {
		return fmt.Errorf("compare the folders with the database: %w", err)
	}
	return nil
}

func (s *Snapshotter) noteMade(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.made[id] = true
}

func (s *Snapshotter) forgetMade(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.made, id)
}

// notOlder says why a snapshot may not be removed if the database is older than the folders. One that this process made may: each
// poke makes one.
func (s *Snapshotter) notOlder(id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.alarm == nil || !s.alarm.Older || s.made[id] {
		return nil
	}
	return classed(errdefs.ErrFailedPrecondition, "nothing is deleted: %s; put the right database back, or look at `cleave snapshotter status` and confirm the clean-up", s.alarm.Reason)
}

// raise sets or clears the alarm, and logs it when it changes. When removals are
// taken again, containerd is to be poked: it has forgotten those that were refused
// (CTD-63).
func (s *Snapshotter) raise(alarm *Alarm) {
	s.mu.Lock()
	old := s.alarm
	s.alarm, s.compared = alarm, true
	if alarm != nil {
		alarm.At = time.Now()
		if old != nil && old.Reason == alarm.Reason {
			alarm.At = old.At
		}
	}
	s.mu.Unlock()
	if alarm != nil && (old == nil || old.Reason != alarm.Reason) {
		s.log.Error("a clean-up is not done until it is confirmed", zap.String("reason", alarm.Reason), zap.Int("folders", len(alarm.Folders)), zap.Int("total", alarm.Total))
	}
	if alarm == nil && old != nil {
		s.log.Info("no clean-up waits to be confirmed any more")
	}
	if old != nil && old.Older && (alarm == nil || !alarm.Older) {
		s.tellReopened()
	}
}

var highestKey = []byte("highest")

// putHighest notes the highest ID that was given out.
func putHighest(b *bolt.Bucket, id string) error {
	n, err := strconv.ParseUint(id, 10, 64)
	if err != nil {
		return err
	}
	old, err := getHighest(b)
	if err != nil || n <= old {
		return err
	}
	return b.Put(highestKey, []byte(id))
}

func getHighest(b *bolt.Bucket) (uint64, error) {
	text := b.Get(highestKey)
	if text == nil {
		return 0, nil
	}
	n, err := strconv.ParseUint(string(text), 10, 64)
	if err != nil {
		return 0, errors.Join(errors.New("read the highest ID in the database"), err)
	}
	return n, nil
}
