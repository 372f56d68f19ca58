// Package walk measures what a tree of files takes on its filesystem: the
// allocated blocks and the number of inodes, as `du` counts them, while others
// write to the tree. It imports nothing else of this module but fsstats/pace; any
// package that needs the size of a tree may import it.
//
// # What is counted
//
// The root directory and everything below it that is on the same mount: 512
// bytes for each of st_blocks (inode(7)), each inode once. Symlinks count, and
// are never followed. What is mounted inside the tree does not count, not even
// its root; a bind mount of the same filesystem is such a mount. Subvolumes of
// btrfs inside the tree do count (before Linux 5.8, which has no STATX_MNT_ID,
// the filesystem's st_dev is the border, and they do not).
//
// Not counted, because no walk can see it: files that are open but have no name
// any more, and what a mount covers. Extents shared by reflinks or snapshots
// count for each file that shares them.
//
// # Trees that change
//
// What disappears during the walk is left out without an error, and what appears
// may be counted or not. What is renamed may be counted twice or not at all;
// a hard-linked file is counted once even then.
//
// # What it costs
//
// One system call per entry and five more per directory. The calls go through
// the Go scheduler on purpose: raw calls would save about 4 %, but a slow disk
// would then stop the garbage collector, and with it every other goroutine of
// the process. Memory, for each worker: about 50 KiB, plus 128 bytes per level of
// depth, plus the names of the directories still to visit (at most 4 MiB and
// 2 KiB per level). For all together: some 20 bytes for each inode that has more
// than one name and is not a directory, up to maxLinked of those; what happens
// beyond that tells [Usage]. At most maxOpen + 3 descriptors are open per worker
// at any depth.
//
// A second worker halves the time where the tree is cached or the disk answers
// questions side by side. It takes a core's time for that: leave it out where
// nobody waits for the figure.
package walk

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cleave-cri/cleave/fsstats/pace"
)

const (
	// bufferBytes is how much of a directory is read at once, about 1 000
	// names. Larger buffers gain nothing (CTD-111 of the project's facts).
	bufferBytes = 32 << 10
	// smallBufferBytes is used instead once the names waiting take more than
	// waitingBytes. It must hold one entry, whose name has up to 1024 bytes on
	// a FUSE filesystem.
	smallBufferBytes = 2 << 10
	waitingBytes     = 4 << 20
	// maxOpen is how many of the deepest directories are kept open.
	maxOpen = 32
	// maxErrors is how many errors a Usage keeps.
	maxErrors = 8
	// maxLinked is how many inodes with several names are remembered: some
	// 20 MiB of memory.
	maxLinked = 1 << 20
	// maxWorkers is how many walk one tree at most: with more than two the
	// disk's queue and the kernel's locks gain nothing (CTD-113).
	maxWorkers = 2
)

// errMoved is what is wrong with a directory that can't be found again.
var errMoved = errors.New("moved away while it was being read")

// Options change how a tree is walked. The zero value is the fastest walk.
type Options struct {
	// EntriesPerSecond is how many entries are looked at per second at most,
	// over any stretch longer than about a tenth of a second. 0 or less means
	// no limit. An entry costs about 1.6 µs of one core when its inode is
	// cached, and a disk access when not.
	// It is one budget for all workers.
	EntriesPerSecond int
	// Workers is how many walk the tree at the same time, 1 or 2. Less means 1,
	// more means 2. A tree is divided only where there is something to divide:
	// a small one is walked by one alone.
	Workers int
	// Without are the paths of directories inside the tree that are left out, with
	// all below them, because somebody else counts them. They are found when the
	// walk begins; one that does not exist then, or is no directory, is ignored.
	// Unlike the root they may be reached through symlinks.
	Without []string
}

// Usage is what a tree took between Started and Finished.
type Usage struct {
	// Bytes is 512 × the sum of st_blocks, each inode once.
	Bytes int64 `json:"bytes"`
	// Inodes is how many inodes were counted, the root directory included.
	Inodes int64 `json:"inodes"`
	// Started and Finished frame the walk. The figures are right for no single
	// moment: each entry was looked at at its own time in between.
	Started  time.Time `json:"started"`
	Finished time.Time `json:"finished"`

	// Partial says that the figures are a lower bound, because something in the
	// tree could not be read or the walk was cancelled. Entries that vanished
	// do not make a Usage partial.
	Partial bool `json:"partial,omitempty"`
	// Unreadable is how many entries or directories could not be read.
	Unreadable int64 `json:"unreadable,omitempty"`
	// Errors are the first few of the reasons, with paths.
	Errors []error `json:"-"`
	// Vanished is how many entries were listed and were gone, or had been
	// replaced by something else, when they were looked at.
	Vanished int64 `json:"vanished,omitempty"`
	// MountsSkipped is how many mounts inside the tree were left out.
	MountsSkipped int64 `json:"mountsSkipped,omitempty"`
	// LeftOut is how many directories of Options.Without were met.
	LeftOut int64 `json:"leftOut,omitempty"`
	// Apportioned is how many names of files counted for their share only:
	// there were more than a million (maxLinked) files with several names, and
	// for a file beyond those each name counts 1/st_nlink of it. The figures
	// are then right if all names of those files are in the tree, and a lower
	// bound otherwise.
	Apportioned int64 `json:"apportioned,omitempty"`
}

// Measure walks the tree below root. root must be a directory itself, not a
// symlink to one; a mount on it counts as the tree.
//
// An error means that root could not be read (it wraps the error number, so
// fs.ErrNotExist if root does not exist) or that ctx ended (it wraps ctx's
// error); with the latter the Usage holds what was counted so far. What can't be
// read inside the tree is no error: it is told in the Usage.
//
// A deadline is one of ctx. Cancellation is noticed within 256 entries, or at
// once while the walk waits for its budget, but not while the kernel itself
// hangs on a dead disk.
func Measure(ctx context.Context, root string, opt Options) (Usage, error) {
	return measure(ctx, root, opt, kernelLister{}, maxLinked)
}

// lister is the part of the kernel that says what is in a directory.
type lister interface {
	// readDir fills buffer with the next entries of fd, as getdents64 does.
	readDir(fd int, buffer []byte) (int, error)
	// statAt looks at an entry of the directory at; its name ends with a zero
	// byte.
	statAt(at int, name *byte, a *attributes) error
}

func measure(ctx context.Context, root string, opt Options, list lister, most int) (Usage, error) {
	return measureInto(ctx, root, opt, list, most, nil, nil)
}

// measureInto measures a tree, remembers it in memory and ranks what is in it, each if it is not nil.
func measureInto(ctx context.Context, root string, opt Options, list lister, most int, memory *Memory, rank *ranking) (Usage, error) {
	started := time.Now()
	s := &survey{
		list: list, linked: inodeSet{most: most}, budget: pace.NewBudget(opt.EntriesPerSecond),
		without: withoutOf(opt.Without), memory: memory, rank: rank,
	}
	s.idle.Store(int32(min(max(opt.Workers, 1), maxWorkers) - 1))

	first := s.worker()
	first.root = root
	err := first.run(ctx)
	s.helpers.Wait()
	rank.end(first)
	s.retire(first, err)
	if s.panicked != nil {
		panic(s.panicked)
	}
	usage := s.usage
	usage.Started, usage.Finished = started, time.Now()
	if err == nil {
		err = s.err
	}
	usage.Bytes += int64(math.Round(s.shareBytes))
	usage.Inodes += int64(math.Round(s.shareInodes))
	usage.Partial = err != nil || usage.Unreadable > 0
	if err != nil {
		return usage, fmt.Errorf("walk %q: %w", root, err)
	}
	return usage, nil
}

// withoutOf finds the directories that are left out; the mount does not matter.
func withoutOf(paths []string) map[identity]bool {
	var without map[identity]bool
	for _, path := range paths {
		if id, ok := directoryAt(path); ok {
			if without == nil {
				without = map[identity]bool{}
			}
			without[id] = true
		}
	}
	return without
}

// survey is one call of Measure: what its workers share.
type survey struct {
	list   lister
	budget *pace.Budget
	linked inodeSet
	// top is the root directory of the tree.
	top identity
	// without are directories that are left out; the mount does not matter.
	without map[identity]bool
	// memory keeps what is found; nil if nobody wants that. It has one worker.
	memory *Memory
	// rank lists the largest of what is found; nil if nobody wants that. It has one worker.
	rank *ranking
	// idle is how many more workers may be busy. Who has much to do and sees one
	// idle gives half of it away.
	idle    atomic.Int32
	helpers sync.WaitGroup

	mu       sync.Mutex
	usage    Usage // guarded by mu: the sum of what retired workers counted
	err      error // guarded by mu: the first error of a helper
	panicked any   // guarded by mu
	// The sums of the shares; guarded by mu.
	shareBytes, shareInodes float64
	// spare are workers that have nothing to do, for their buffers; guarded by
	// mu.
	spare []*walker
}

// worker gives a walker that has nothing on its stack.
func (s *survey) worker() *walker {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := len(s.spare); n > 0 {
		w := s.spare[n-1]
		s.spare = s.spare[:n-1]
		return w
	}
	return &walker{survey: s, buffer: make([]byte, bufferBytes), pace: s.budget.Worker()}
}

// retire adds up what a walker counted and keeps it for later.
func (s *survey) retire(w *walker, err error) {
	for i := range w.stack {
		w.closeDir(&w.stack[i])
	}
	w.stack, w.names = w.stack[:0], w.names[:0]

	s.mu.Lock()
	defer s.mu.Unlock()
	sum, add := &s.usage, &w.usage
	sum.Bytes += add.Bytes
	sum.Inodes += add.Inodes
	sum.Unreadable += add.Unreadable
	sum.Vanished += add.Vanished
	sum.MountsSkipped += add.MountsSkipped
	sum.LeftOut += add.LeftOut
	sum.Apportioned += add.Apportioned
	sum.Errors = append(sum.Errors, add.Errors[:min(len(add.Errors), maxErrors-len(sum.Errors))]...)
	s.shareBytes += w.shareBytes
	s.shareInodes += w.shareInodes
	if s.err == nil {
		s.err = err
	}
	w.usage, w.shareBytes, w.shareInodes = Usage{}, 0, 0
	s.spare = append(s.spare, w)
}

// gift is work that one worker gives to another: a directory, and what of it has
// still to be done. Nothing else of the directory is looked at.
type gift struct {
	// fd is the directory, owned by the gift; path is its name for people.
	fd   int
	id   identity
	path string
	// entries are as getdents64 gave them, not looked at yet.
	entries []byte
	// names are directories that were counted and have to be visited.
	names []byte
}

// claim says whether somebody is idle; that one then has to get a gift, or be
// released.
func (s *survey) claim() bool {
	for {
		n := s.idle.Load()
		if n <= 0 {
			return false
		}
		if s.idle.CompareAndSwap(n, n-1) {
			return true
		}
	}
}

func (s *survey) release() { s.idle.Add(1) }

// start lets a claimed worker do what is in a gift.
func (s *survey) start(ctx context.Context, g gift) {
	s.helpers.Go(func() {
		w := s.worker()
		var err error
		defer func() {
			if r := recover(); r != nil { // Measure's caller is the one to catch it
				s.mu.Lock()
				s.panicked = r
				s.mu.Unlock()
			}
			s.retire(w, err)
			s.release()
		}()
		err = w.runGift(ctx, g)
	})
}

// walker is one worker. The stack holds the directories from the one that it
// began with to the one being read.
type walker struct {
	*survey
	// root is the path of the lowest directory on the stack.
	root  string
	usage Usage
	// Sums of shares of inodes that have other names; see Usage.Apportioned.
	shareBytes, shareInodes float64

	stack []dir
	pace  *pace.Worker
	// buffer is what getdents64 fills.
	buffer []byte
	// names are the directories still to visit, of all levels of the stack, in
	// its order: each name ends with a zero byte, as the kernel wants it.
	names []byte
	attr  attributes
}

// dir is a directory that is being read. It is read in portions: the entries of
// one portion are all looked at, then its directories are visited one by one,
// then comes the next portion.
type dir struct {
	fd int // -1: closed for the time being
	id identity
	// name is where in walker.names its own name starts.
	name int
	// next and end are the part of walker.names with the directories still to
	// visit of this portion; first is where that part started.
	first, next, end int
	// offset is the kernel's cookie for the next portion; atEnd: there is none.
	offset int64
	atEnd  bool
	// folder is what is remembered of it, nil if nothing is.
	folder *folder
}

func (w *walker) run(ctx context.Context) error {
	fd, err := openRoot(w.root)
	if err != nil {
		return err
	}
	w.push(fd, 0)
	d := w.last()
	if err := w.statDir(fd); err != nil {
		return err
	}
	d.id = w.attr.identity
	d.folder = w.memory.enter(nil, nil, &w.attr)
	w.survey.top = d.id
	w.count(&w.attr)
	w.rank.enter(&w.attr)
	return w.visit(ctx)
}

// runGift does what is in a gift.
func (w *walker) runGift(ctx context.Context, g gift) error {
	w.root = g.path
	w.push(g.fd, 0)
	d := w.last()
	d.id, d.atEnd = g.id, true
	w.names = append(w.names, g.names...)
	if err := w.lookAll(ctx, d, g.entries); err != nil {
		return err
	}
	d.end = len(w.names)
	return w.visit(ctx)
}

// visit does all that is left on the stack.
func (w *walker) visit(ctx context.Context) error {
	for len(w.stack) > 0 {
		d := w.last()
		switch {
		case d.next < d.end:
			if err := w.descend(ctx, d); err != nil {
				return err
			}
		case !d.atEnd:
			if err := w.readPortion(ctx, d); err != nil {
				return err
			}
		default:
			w.pop()
		}
	}
	return nil
}

// last is the directory at the top of the stack.
func (w *walker) last() *dir { return &w.stack[len(w.stack)-1] }

// push puts an open directory on the stack. The one that thereby gets too far
// from the top is closed; the root stays open, to find the way back from.
func (w *walker) push(fd, name int) {
	here := len(w.names)
	w.stack = append(w.stack, dir{fd: fd, name: name, first: here, next: here, end: here})
	if far := len(w.stack) - 1 - maxOpen; far > 0 {
		w.closeDir(&w.stack[far])
	}
}

// pop leaves the directory at the top, and opens its parent if that is closed.
func (w *walker) pop() {
	w.rank.leave(w)
	done := *w.last()
	w.stack = w.stack[:len(w.stack)-1]
	w.names = w.names[:done.first]
	for len(w.stack) > 0 && w.last().fd < 0 {
		parent := w.last()
		err := w.reopen(parent, done.fd)
		if err == nil {
			break
		}
		if parent.next < parent.end || !parent.atEnd {
			w.unreadable(len(w.stack)-1, "open", err)
		}
		w.rank.leave(w)
		w.names = w.names[:parent.first]
		w.stack = w.stack[:len(w.stack)-1]
	}
	if done.fd >= 0 {
		closeFD(done.fd)
	}
}

// reopen opens d, which is the top of the stack, again, by way of its child's
// ".." or, if that leads elsewhere by now, by the names from the root. A
// directory that has been removed meanwhile is empty and still leads upwards.
func (w *walker) reopen(d *dir, child int) error {
	dotdot := [...]byte{'.', '.', 0}
	fd, err := openDir(child, &dotdot[0])
	if err == nil && !w.isDir(fd, d.id) {
		closeFD(fd)
		err = errMoved
	}
	if err != nil {
		if fd, err = w.reopenByNames(d); err != nil {
			return err
		}
	}
	d.fd = fd
	if w.attr.links == 0 {
		d.next, d.atEnd = d.end, true
	}
	if !d.atEnd {
		if err := seek(fd, d.offset); err != nil {
			w.unreadable(len(w.stack)-1, "seek", err)
			d.atEnd = true
		}
	}
	return nil
}

func (w *walker) reopenByNames(d *dir) (int, error) {
	at, mine := w.stack[0].fd, false
	for i := 1; i < len(w.stack); i++ {
		fd, err := openDir(at, &w.names[w.stack[i].name])
		if mine {
			closeFD(at)
		}
		if err != nil {
			if isGone(err) {
				err = errMoved
			}
			return -1, err
		}
		at, mine = fd, true
	}
	if !w.isDir(at, d.id) {
		closeFD(at)
		return -1, errMoved
	}
	return at, nil
}

// isDir says whether fd is the directory id, and leaves its attributes in w.attr.
func (w *walker) isDir(fd int, id identity) bool {
	return statFD(fd, &w.attr) == nil && w.attr.identity == id
}

func (w *walker) closeDir(d *dir) {
	if d.fd >= 0 {
		closeFD(d.fd)
		d.fd = -1
	}
}

// descend opens the next directory of d and puts it on the stack. The directory
// itself was counted when its name was read.
func (w *walker) descend(ctx context.Context, d *dir) error {
	if w.idle.Load() > 0 {
		w.giveNames(ctx)
	}
	name := d.next
	for w.names[d.next] != 0 {
		d.next++
	}
	d.next++
	if err := ctx.Err(); err != nil {
		return err
	}
	fd, err := openDir(d.fd, &w.names[name])
	switch {
	case err == nil:
	case isGone(err):
		w.usage.Vanished++
		return nil
	default:
		w.unreadableName(d, "open", name, err)
		return nil
	}
	if err := w.statDir(fd); err != nil {
		closeFD(fd)
		w.unreadableName(d, "stat", name, err)
		return nil
	}
	if !w.attr.sameMount(&w.survey.top) { // mounted since its name was read
		closeFD(fd)
		w.usage.MountsSkipped++
		return nil
	}
	parent, end := d.folder, d.next
	w.push(fd, name)
	w.last().id = w.attr.identity
	w.rank.enter(&w.attr)
	if parent != nil {
		w.last().folder = w.memory.enter(parent, w.names[name:end], &w.attr)
	}
	return nil
}

// statDir looks at an open directory before it is read.
func (w *walker) statDir(fd int) error {
	if w.memory != nil {
		return statChanges(fd, &w.attr)
	}
	return statFD(fd, &w.attr)
}

// readPortion looks at the next entries of d, the top of the stack, and keeps
// the names of the directories among them.
func (w *walker) readPortion(ctx context.Context, d *dir) error {
	w.names = w.names[:d.first]
	buffer := w.buffer
	if len(w.names) > waitingBytes {
		buffer = buffer[:smallBufferBytes]
	}
	n, err := w.list.readDir(d.fd, buffer)
	if err != nil && !isGone(err) {
		w.unreadable(len(w.stack)-1, "read", err)
	}
	d.atEnd = err != nil || n == 0
	if err := w.lookAll(ctx, d, buffer[:max(n, 0)]); err != nil {
		return err
	}
	d.next, d.end = d.first, len(w.names)
	return nil
}

// lookAll looks at a portion of d's entries.
func (w *walker) lookAll(ctx context.Context, d *dir, rest []byte) error {
	offset := d.offset
	for given := false; len(rest) > 0; {
		entry, size, ok := parseEntry(rest)
		if !ok {
			w.unreadable(len(w.stack)-1, "read", errBadEntry)
			d.atEnd = true
			break
		}
		rest = rest[size:]
		if !given { // else it is behind what was given away
			offset = entry.offset
		}
		if entry.isDots() {
			continue
		}
		if err := w.look(ctx, d, entry.name); err != nil {
			return err
		}
		if len(rest) > leastGiftBytes && w.idle.Load() > 0 {
			keep, last, ok := w.giveEntries(ctx, d, rest)
			if ok && !given {
				given, offset = true, last
			}
			rest = rest[:keep]
		}
	}
	d.offset = offset
	return nil
}

// look counts one entry of d. name ends with a zero byte.
func (w *walker) look(ctx context.Context, d *dir, name []byte) error {
	if err := w.pace.Entry(ctx); err != nil {
		return err
	}
	err := w.list.statAt(d.fd, &name[0], &w.attr)
	switch {
	case err == nil:
	case isGone(err):
		w.usage.Vanished++
		return nil
	default:
		here := len(w.names)
		w.names = append(w.names, name...)
		w.unreadableName(d, "stat", here, err)
		w.names = w.names[:here]
		return nil
	}
	if !w.attr.sameMount(&w.survey.top) {
		w.usage.MountsSkipped++
		return nil
	}
	if w.attr.isDir {
		if w.without != nil && w.without[identity{device: w.attr.device, inode: w.attr.inode}] {
			w.usage.LeftOut++
			return nil
		}
		if w.memory.keeps(d.folder, name, &w.attr) {
			return nil
		}
		w.names = append(w.names, name...)
		w.count(&w.attr)
		return nil
	}
	w.memory.note(d.folder, name, &w.attr)
	if w.attr.links > 1 {
		switch w.linked.add(w.attr.identity) {
		case known:
			return nil
		case full:
			w.countShare(&w.attr)
			return nil
		}
	}
	w.count(&w.attr)
	w.rank.file(w, name, &w.attr)
	return nil
}

func (w *walker) count(a *attributes) {
	w.usage.Inodes++
	w.usage.Bytes += int64(a.blocks) * 512
}

// countShare counts one of the names of an inode that can't be remembered.
func (w *walker) countShare(a *attributes) {
	w.usage.Apportioned++
	w.shareInodes += 1 / float64(a.links)
	w.shareBytes += float64(a.blocks) * 512 / float64(a.links)
}

// unreadable notes that the directory at a level of the stack can't be read.
func (w *walker) unreadable(level int, op string, err error) {
	w.memory.giveUp("it can be read in part only")
	w.usage.Unreadable++
	if len(w.usage.Errors) < maxErrors {
		w.usage.Errors = append(w.usage.Errors, fmt.Errorf("%s %q: %w", op, w.path(level), err))
	}
}

// unreadableName notes that an entry of d, the top of the stack, can't be read.
func (w *walker) unreadableName(d *dir, op string, name int, err error) {
	w.memory.giveUp("it can be read in part only")
	w.usage.Unreadable++
	if len(w.usage.Errors) < maxErrors {
		path := w.path(len(w.stack)-1) + "/" + w.nameAt(name)
		w.usage.Errors = append(w.usage.Errors, fmt.Errorf("%s %q: %w", op, path, err))
	}
}

// path is that of a level of the stack, for people.
func (w *walker) path(level int) string { return w.root + w.below(level) }

// below is the path without that of the root.
func (w *walker) below(level int) string {
	const most = 64 // levels that are named
	path := ""
	from := 1
	if level > most {
		path, from = "/…", level-most+1
	}
	for i := from; i <= level; i++ {
		path += "/" + w.nameAt(w.stack[i].name)
	}
	return path
}

func (w *walker) nameAt(i int) string {
	return unix.ByteSliceToString(w.names[i:])
}

// inodeSet is the inodes that have been counted already. It is two levels deep
// because nearly always all are on one device. Several goroutines may use it.
type inodeSet struct {
	// most is how many it holds at most.
	most int

	mu       sync.Mutex
	byDevice map[uint64]map[uint64]struct{} // guarded by mu
	size     int                            // guarded by mu
}

// membership is what an inodeSet says of an inode.
type membership int

const (
	fresh membership = iota // it was not in the set, and is now
	known                   // it was in the set
	full                    // it was not, and there is no room
)

func (s *inodeSet) add(id identity) membership {
	s.mu.Lock()
	defer s.mu.Unlock()
	inodes := s.byDevice[id.device]
	if _, ok := inodes[id.inode]; ok {
		return known
	}
	if s.size >= s.most {
		return full
	}
	if inodes == nil {
		inodes = make(map[uint64]struct{})
		if s.byDevice == nil {
			s.byDevice = make(map[uint64]map[uint64]struct{})
		}
		s.byDevice[id.device] = inodes
	}
	inodes[id.inode] = struct{}{}
	s.size++
	return fresh
}
