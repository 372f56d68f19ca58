// Package trash deletes folders of one root later: a rename takes them out of
// the way at once, a budgeted deletion in the background frees their space. The
// trash is a folder of the root itself, so it survives a restart, and is
// measured, so that what it still takes is known.
//
// It imports rootdir, fault and fsstats/walk. Only snapshot/split may import it.
package trash

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/fsstats/walk"
	"github.com/cleave-cri/cleave/snapshot/split/fault"
	"github.com/cleave-cri/cleave/snapshot/split/rootdir"
)

// Dir is the name of the trash in a root.
const Dir = "trash"

// entryName is what the names in the trash look like: what it was, and a
// random part. Nothing else there is deleted.
var entryName = regexp.MustCompile(`^[0-9a-zA-Z-]{1,64}\.[0-9A-Z]{26}$`)

// retryAfter is how long an entry that can't be deleted rests.
const retryAfter = time.Minute

// Move takes the folder called name out of the way: from now on it is nothing
// but space to be freed. what is the part of its new name that people can read,
// of letters, digits and dashes.
func Move(root *rootdir.Root, name, what string) (entry string, err error) {
	entry = what + "." + rand.Text()
	if !entryName.MatchString(entry) {
		return "", fmt.Errorf("move %q to the trash as %q: not a name for the trash", name, what)
	}
	err = root.Rename(name, filepath.Join(Dir, entry))
	for i := 0; i < slots && isFull(err); i++ {
		// The name would need a block more. A slot's name is at least as long,
		// and in the block that is there.
		if slotErr := root.RemoveFile(slotName(i)); slotErr != nil {
			return "", fmt.Errorf("move %q to the trash: %w", name, errors.Join(err, slotErr))
		}
		err = root.Rename(name, filepath.Join(Dir, entry))
	}
	if err != nil {
		return "", fmt.Errorf("move %q to the trash: %w", name, err)
	}
	return entry, nil
}

// slots is how many empty files keep room for names in the trash. All of them
// fit into one block of a folder, so that names can come and go in it on a disk
// that has no block left. Once something is deleted there is room anyway.
const slots = 32

func slotName(i int) string {
	return filepath.Join(Dir, fmt.Sprintf("%s%0*d", slotPrefix, 91-len(slotPrefix), i))
}

const slotPrefix = "slot-"

// IsSlot reports whether a name in the trash only keeps room.
func IsSlot(name string) bool { return strings.HasPrefix(name, slotPrefix) }

// IsEntry reports whether a name in the trash is that of something moved there.
func IsEntry(name string) bool { return entryName.MatchString(name) }

// Provide makes the slots that are missing. On a full disk some stay so.
func Provide(root *rootdir.Root) error {
	for i := range slots {
		err := root.Touch(slotName(i))
		if isFull(err) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("keep room in the trash: %w", err)
		}
	}
	return nil
}

func isFull(err error) bool { return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) }

// Stats is what the trash of a root holds.
type Stats struct {
	Entries int `json:"entries"`
	// Bytes and Inodes are what the measured entries still take.
	Bytes  int64 `json:"bytes"`
	Inodes int64 `json:"inodes"`
	// Unmeasured is how many entries are not in Bytes yet.
	Unmeasured int `json:"unmeasured,omitempty"`
	// FreedBytes and DeletedEntries count since the start of the process.
	FreedBytes     int64 `json:"freedBytes"`
	DeletedEntries int64 `json:"deletedEntries"`
	// LastError is why an entry could not be deleted, empty if the last one was or
	// none is left.
	LastError string `json:"lastError,omitempty"`
}

// Bin deletes what is in the trash of one root.
type Bin struct {
	// root gives the root, or why it may not be worked on now.
	root func() (*rootdir.Root, error)
	rate int
	log  *zap.Logger
	// reach is told of fault points.
	reach func(fault.Point)
	wake  chan struct{}

	mu      sync.Mutex
	entries map[string]*entry // guarded by mu
	stats   Stats             // guarded by mu: what is not in entries
	idle    chan struct{}     // guarded by mu; closed while nothing can be deleted
}

type entry struct {
	measured      bool
	bytes, inodes int64
	failed        time.Time
}

// NewBin makes a Bin that deletes at most entriesPerSecond names a second; 0 means
// no limit. root is asked before each entry.
func NewBin(root func() (*rootdir.Root, error), entriesPerSecond int, log *zap.Logger, reach func(fault.Point)) *Bin {
	return &Bin{
		root: root, rate: entriesPerSecond, log: log, reach: reach,
		wake: make(chan struct{}, 1), entries: map[string]*entry{}, idle: make(chan struct{}),
	}
}

// Wake says that something was moved to the trash.
func (b *Bin) Wake() {
	b.mu.Lock()
	defer b.mu.Unlock()
	select {
	case <-b.idle:
		b.idle = make(chan struct{})
	default:
	}
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

// Stats tells what is there.
func (b *Bin) Stats() Stats {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.stats
	s.Entries = len(b.entries)
	for _, e := range b.entries {
		if !e.measured {
			s.Unmeasured++
		}
		s.Bytes += max(e.bytes, 0)
		s.Inodes += max(e.inodes, 0)
	}
	return s
}

// WaitIdle waits until everything that could be deleted is.
func (b *Bin) WaitIdle(ctx context.Context) error {
	b.mu.Lock()
	idle := b.idle
	b.mu.Unlock()
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Run deletes until ctx ends. What is in the trash at the start comes first.
func (b *Bin) Run(ctx context.Context) {
	retry := time.NewTicker(retryAfter)
	defer retry.Stop()
	for {
		b.pass(ctx)
		if ctx.Err() != nil {
			return
		}
		b.mu.Lock()
		if len(b.wake) == 0 {
			select {
			case <-b.idle:
			default:
				close(b.idle)
			}
		}
		b.mu.Unlock()
		select {
		case <-ctx.Done():
			return
		case <-b.wake:
		case <-retry.C:
		}
	}
}

// pass measures all entries, then deletes them one by one, until there is none
// left that may be tried.
func (b *Bin) pass(ctx context.Context) {
	for ctx.Err() == nil {
		root, err := b.root()
		if err != nil {
			return // the fence says why, and that is nothing about the trash
		}
		names, err := b.list(root)
		if err != nil {
			b.note(err)
			return
		}
		for _, name := range names {
			if b.unmeasured(name) {
				b.measure(ctx, root, name)
			}
		}
		next := b.next(names)
		if next == "" {
			if err := Provide(root); err != nil {
				b.note(err)
			} else if len(names) == 0 {
				b.clean()
			}
			return
		}
		if err := b.delete(ctx, root, next); err != nil {
			if ctx.Err() != nil {
				return
			}
			b.failed(next, err)
		}
	}
}

// list reads the names in the trash and forgets entries that are gone.
func (b *Bin) list(root *rootdir.Root) ([]string, error) {
	all, err := root.Names(Dir)
	if errors.Is(err, fs.ErrNotExist) {
		all, err = nil, nil
	}
	if err != nil {
		return nil, err
	}
	names := slices.DeleteFunc(all, func(n string) bool { return !entryName.MatchString(n) })
	slices.Sort(names)
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, n := range names {
		if b.entries[n] == nil {
			b.entries[n] = &entry{}
		}
	}
	for n := range b.entries {
		if _, found := slices.BinarySearch(names, n); !found {
			delete(b.entries, n)
		}
	}
	return names, nil
}

func (b *Bin) unmeasured(name string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return !b.entries[name].measured
}

func (b *Bin) measure(ctx context.Context, root *rootdir.Root, name string) {
	dir, err := root.Open(filepath.Join(Dir, name))
	if err != nil {
		return // a file, or gone: deleting it will tell
	}
	defer dir.Close() //nolint:errcheck // only read
	usage, err := walk.Measure(ctx, rootdir.FDPath(dir)+"/.", walk.Options{EntriesPerSecond: b.rate * 4})
	if err != nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if e := b.entries[name]; e != nil {
		e.measured, e.bytes, e.inodes = true, usage.Bytes, usage.Inodes
	}
}

// next is the first entry that may be tried now.
func (b *Bin) next(names []string) string {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, n := range names {
		if e := b.entries[n]; e.failed.IsZero() || time.Since(e.failed) >= retryAfter {
			return n
		}
	}
	return ""
}

func (b *Bin) delete(ctx context.Context, root *rootdir.Root, name string) error {
	b.mu.Lock()
	expected := b.entries[name].bytes
	b.mu.Unlock()
	var freed, inodes int64
	pace := newPacer(b.rate)
	err := root.RemoveTree(filepath.Join(Dir, name),
		func() error {
			b.reach(fault.TrashDeleting)
			return pace.step(ctx)
		},
		func(r rootdir.Removed) {
			if r.LastName {
				inodes++
			}
			freed += r.Bytes
			b.gone(name, r)
		})
	b.mu.Lock()
	b.stats.FreedBytes += freed
	b.stats.DeletedEntries += inodes
	if err == nil {
		delete(b.entries, name)
		b.stats.LastError = ""
	}
	b.mu.Unlock()
	if err != nil {
		return fmt.Errorf("delete %q in the trash of %s: %w", name, root.Path(), err)
	}
	b.log.Info("deleted from the trash", zap.String("root", root.Path()), zap.String("entry", name),
		zap.Int64("expected_bytes", expected), zap.Int64("bytes", freed), zap.Int64("inodes", inodes))
	return nil
}

func (b *Bin) gone(name string, r rootdir.Removed) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if e := b.entries[name]; e != nil && e.measured {
		e.bytes -= r.Bytes
		if r.LastName {
			e.inodes--
		}
	}
}

func (b *Bin) failed(name string, err error) {
	b.mu.Lock()
	if e := b.entries[name]; e != nil && !errors.Is(err, fs.ErrClosed) {
		e.failed = time.Now()
	}
	b.mu.Unlock()
	b.note(err)
}

// clean forgets the last error: the root is there, and nothing is left.
func (b *Bin) clean() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.stats.LastError = ""
}

// note remembers an error and logs it if it is another than the last.
func (b *Bin) note(err error) {
	if errors.Is(err, fs.ErrClosed) {
		return // the fence has let go of the root meanwhile, and says why
	}
	b.mu.Lock()
	news := b.stats.LastError != err.Error()
	b.stats.LastError = err.Error()
	b.mu.Unlock()
	if news {
		b.log.Warn("the trash can't be emptied for now", zap.Error(err))
	}
}

// pacer keeps a deletion within its budget.
type pacer struct {
	perStep time.Duration
	every   int
	left    int
	due     time.Time
}

func newPacer(perSecond int) *pacer {
	p := &pacer{every: 64}
	if perSecond > 0 {
		p.perStep = max(time.Second/time.Duration(perSecond), 1)
		p.every = min(max(perSecond/100, 1), 64)
	}
	p.left, p.due = p.every, time.Now()
	return p
}

// step waits if the deletion is ahead of its budget, and looks whether it is to
// end.
func (p *pacer) step(ctx context.Context) error {
	if p.left--; p.left > 0 {
		return nil
	}
	p.left = p.every
	if err := ctx.Err(); err != nil || p.perStep == 0 {
		return err
	}
	// What was missed while the disk was busy is not caught up.
	now := time.Now()
	p.due = p.due.Add(time.Duration(p.every) * p.perStep)
	if p.due.Before(now) {
		p.due = now
		return nil
	}
	timer := time.NewTimer(p.due.Sub(now))
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}
