// Package walk measures what a tree of files takes on its filesystem: the
// allocated blocks and the number of inodes, as `du` counts them, while others
// write to the tree. It imports nothing else of this module; any package that
// needs the size of a tree may import it.
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
// the process. Memory: about 50 KiB, plus 128 bytes per level of depth, plus the
// names of the directories still to visit (at most 4 MiB and 2 KiB per level),
// plus some 20 bytes for each inode that has more than one name and is not a
// directory. At most maxOpen + 3 descriptors are open at any depth.
package walk

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
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
	// checkEvery is after how many entries at most cancellation and budget are
	// looked at.
	checkEvery = 256
)

// errMoved is what is wrong with a directory that can't be found again.
var errMoved = errors.New("moved away while it was being read")

// Options change how a tree is walked. The zero value is the fastest walk.
type Options struct {
	// EntriesPerSecond is how many entries are looked at per second at most,
	// over any stretch longer than about a tenth of a second. 0 or less means
	// no limit. An entry costs about 1.6 µs of one core when its inode is
	// cached, and a disk access when not.
	EntriesPerSecond int
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
}

// Measure walks the tree below root. root must be a directory itself, not a
// symlink to one; a mount on it counts as the tree.
//
// An error means that root could not be read (it wraps the error number, so
// fs.ErrNotExist if root does not exist) or that ctx ended (it wraps ctx's
// error); with the latter the Usage holds what was counted so far. What can't be
// read inside the tree is no error: it is told in the Usage.
//
// Cancellation is noticed within 256 entries, or at once while the walk waits
// for its budget, but not while the kernel itself hangs on a dead disk.
func Measure(ctx context.Context, root string, opt Options) (Usage, error) {
	w := &walker{
		root:   root,
		buffer: make([]byte, bufferBytes),
	}
	w.usage.Started = time.Now()
	w.pace.start(opt.EntriesPerSecond, w.usage.Started)
	err := w.run(ctx)
	for i := range w.stack {
		w.closeDir(&w.stack[i])
	}
	w.usage.Finished = time.Now()
	w.usage.Partial = err != nil || w.usage.Unreadable > 0
	if err != nil {
		return w.usage, fmt.Errorf("walk %q: %w", root, err)
	}
	return w.usage, nil
}

// walker is one walk. The stack holds the directories from the root to the one
// being read.
type walker struct {
	root   string
	usage  Usage
	stack  []dir
	linked inodeSet
	pace   pacer
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
}

func (w *walker) run(ctx context.Context) error {
	fd, err := openRoot(w.root)
	if err != nil {
		return err
	}
	w.push(fd, 0)
	d := w.top()
	if err := statFD(fd, &w.attr); err != nil {
		return err
	}
	d.id = w.attr.identity
	w.count(&w.attr)
	for len(w.stack) > 0 {
		d := w.top()
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

func (w *walker) top() *dir { return &w.stack[len(w.stack)-1] }

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
	done := *w.top()
	w.stack = w.stack[:len(w.stack)-1]
	w.names = w.names[:done.first]
	for len(w.stack) > 0 && w.top().fd < 0 {
		parent := w.top()
		err := w.reopen(parent, done.fd)
		if err == nil {
			break
		}
		if parent.next < parent.end || !parent.atEnd {
			w.unreadable(len(w.stack)-1, "open", err)
		}
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
	if err := statFD(fd, &w.attr); err != nil {
		closeFD(fd)
		w.unreadableName(d, "stat", name, err)
		return nil
	}
	if !w.attr.sameMount(&w.stack[0].id) { // mounted since its name was read
		closeFD(fd)
		w.usage.MountsSkipped++
		return nil
	}
	w.push(fd, name)
	w.top().id = w.attr.identity
	return nil
}

// readPortion looks at the next entries of d, the top of the stack, and keeps
// the names of the directories among them.
func (w *walker) readPortion(ctx context.Context, d *dir) error {
	w.names = w.names[:d.first]
	buffer := w.buffer
	if len(w.names) > waitingBytes {
		buffer = buffer[:smallBufferBytes]
	}
	n, err := readDir(d.fd, buffer)
	if err != nil && !isGone(err) {
		w.unreadable(len(w.stack)-1, "read", err)
	}
	d.atEnd = err != nil || n == 0
	for rest := buffer[:max(n, 0)]; len(rest) > 0; {
		entry, size, ok := parseEntry(rest)
		if !ok {
			w.unreadable(len(w.stack)-1, "read", errBadEntry)
			d.atEnd = true
			break
		}
		rest = rest[size:]
		d.offset = entry.offset
		if entry.isDots() {
			continue
		}
		if err := w.look(ctx, d, entry.name); err != nil {
			return err
		}
	}
	d.next, d.end = d.first, len(w.names)
	return nil
}

// look counts one entry of d. name ends with a zero byte.
func (w *walker) look(ctx context.Context, d *dir, name []byte) error {
	if err := w.pace.entry(ctx); err != nil {
		return err
	}
	err := statAt(d.fd, &name[0], &w.attr)
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
	if !w.attr.sameMount(&w.stack[0].id) {
		w.usage.MountsSkipped++
		return nil
	}
	if w.attr.isDir {
		w.names = append(w.names, name...)
	} else if w.attr.links > 1 && !w.linked.add(w.attr.identity) {
		return nil
	}
	w.count(&w.attr)
	return nil
}

func (w *walker) count(a *attributes) {
	w.usage.Inodes++
	w.usage.Bytes += int64(a.blocks) * 512
}

// unreadable notes that the directory at a level of the stack can't be read.
func (w *walker) unreadable(level int, op string, err error) {
	w.usage.Unreadable++
	if len(w.usage.Errors) < maxErrors {
		w.usage.Errors = append(w.usage.Errors, fmt.Errorf("%s %q: %w", op, w.path(level), err))
	}
}

// unreadableName notes that an entry of d, the top of the stack, can't be read.
func (w *walker) unreadableName(d *dir, op string, name int, err error) {
	w.usage.Unreadable++
	if len(w.usage.Errors) < maxErrors {
		path := w.path(len(w.stack)-1) + "/" + w.nameAt(name)
		w.usage.Errors = append(w.usage.Errors, fmt.Errorf("%s %q: %w", op, path, err))
	}
}

// path is that of a level of the stack, for people.
func (w *walker) path(level int) string {
	const most = 64 // levels that are named
	path := w.root
	from := 1
	if level > most {
		path, from = path+"/…", level-most+1
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
// because nearly always all are on one device.
type inodeSet struct {
	byDevice map[uint64]map[uint64]struct{}
}

// add says whether id was not in the set before.
func (s *inodeSet) add(id identity) bool {
	inodes := s.byDevice[id.device]
	if inodes == nil {
		inodes = make(map[uint64]struct{})
		if s.byDevice == nil {
			s.byDevice = make(map[uint64]map[uint64]struct{})
		}
		s.byDevice[id.device] = inodes
	}
	before := len(inodes)
	inodes[id.inode] = struct{}{}
	return len(inodes) > before
}
