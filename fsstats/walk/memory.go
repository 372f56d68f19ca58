package walk

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cleave-cri/cleave/fsstats/pace"
)

// How a tree that was walked is brought up to date by looking at what has changed.

const (
	// mostLevels is how deep a tree may be of which something is remembered: a
	// descriptor is open for each level while it is brought up to date.
	mostLevels = 64
	// mostLinked is how many inodes with several names may be in it.
	mostLinked = 1 << 16
	// mostLive is how many files are looked at each time because they were written
	// to lately, mostLiveLately how many before only those count that were written
	// to just now. A file that was written to within the time named is one.
	mostLive, mostLiveLately = 1024, 512
	liveFor, liveForLately   = 30 * time.Second, 2 * time.Second
	// clockTick is more than the time that a file's time may be behind: the
	// kernel's clock for them moves with each tick of at most 10 ms (CONFIG_HZ).
	clockTick = 20 * time.Millisecond
)

// ErrForgotten is what is wrong with a Memory that can't tell any more.
var ErrForgotten = errors.New("the tree has changed in a way that only a walk can follow")

// Memory is what a walk remembers of a tree: for each directory the sum of what
// is directly in it and its time of change (st_ctime, which moves with each name
// that comes or goes; inode(7)), and which files were being written to.
//
// It takes about 200 bytes for each directory and nothing for a file, save those
// that were written to in the last half minute (at most 1 024) and those with
// several names. It is used by one goroutine at a time.
type Memory struct {
	root string
	tree *folder
	// folders and lives are how many there are, mostFolders how many there may be.
	folders, lives, mostFolders int
	linked                      linkSet
	// A file that was written to between since and until, or lately and until,
	// counts as live; in nanoseconds since 1970.
	since, lately, until int64
	// looks counts walks and calls of Again.
	looks int
	// reading is the directory that is being read again, before are the children
	// that it had.
	reading *folder
	before  []*folder
	// doubt is why the memory is not to be used any more; nil if it is good.
	doubt error
}

// folder is a directory that is remembered.
type folder struct {
	name []byte // with the zero byte at its end
	identity
	level int
	// walked is the look in which it was found.
	walked int
	// changed is its st_ctime in nanoseconds; 0: look again.
	changed int64
	// ownBytes is what the directory itself takes; bytes and inodes are what is
	// directly in it, other directories and inodes with several names aside.
	ownBytes, bytes, inodes int64
	linked                  []identity
	live                    []liveFile
	children                []*folder
}

// liveFile is a file that was written to a moment ago.
type liveFile struct {
	name   []byte // with the zero byte at its end
	inode  uint64
	linked bool
	blocks uint64
}

// Fresh is what a tree took after a look at what has changed in it.
type Fresh struct {
	// Bytes and Inodes are as those of a Usage.
	Bytes  int64
	Inodes int64
	// Started and Finished frame the look.
	Started  time.Time
	Finished time.Time
	// Looked is how many inodes were looked at.
	Looked int64
}

// Remember walks a tree as [Measure] does, by one worker, and remembers what is
// needed to bring its Usage up to date later. mostFolders bounds the memory. There
// is no Memory, and no error for that, of a tree with more directories, with more
// than 64 levels or 65 536 inodes of several names, or that could be read in part
// only.
func Remember(ctx context.Context, root string, opt Options, mostFolders int) (Usage, *Memory, error) {
	now := time.Now()
	m := &Memory{root: root, mostFolders: mostFolders, linked: linkSet{files: map[identity]linkedFile{}}}
	m.begin(now)
	opt.Workers = 1
	u, err := measureInto(ctx, root, opt, kernelLister{mask: timesMask}, maxLinked, m, nil)
	if err != nil || u.Partial || u.Apportioned > 0 || m.doubt != nil || m.tree == nil {
		return u, nil, err
	}
	m.linked.settle()
	return u, m, nil
}

// Folders is how many directories are remembered.
func (m *Memory) Folders() int { return m.folders }

// Again brings the tree's figures up to date. It looks at
//
//   - each directory: what is in those whose time of change has moved is looked at
//     again, and new ones are walked;
//   - each file that was written to lately;
//   - what is beside the files of look, paths below the root that somebody knows to
//     be written to.
//
// What it can't see is a file that was last written to half a minute before it was
// last looked at, and is written to again in place, unless look names it; and
// blocks that the filesystem takes back from files by itself. Those the next walk
// finds. An error means that the Memory is of no use any more.
func (m *Memory) Again(ctx context.Context, opt Options, look []string) (Fresh, error) {
	f := Fresh{Started: time.Now()}
	if m.doubt != nil {
		return f, fmt.Errorf("bring the figures of %q up to date: %w", m.root, m.doubt)
	}
	m.begin(f.Started)
	for _, path := range look {
		m.mark(path)
	}
	p := &pass{Memory: m, survey: &survey{
		list: kernelLister{mask: timesMask}, linked: inodeSet{most: mostLinked}, budget: pace.NewBudget(opt.EntriesPerSecond),
		without: withoutOf(opt.Without), memory: m,
	}}
	p.worker = p.survey.worker()
	err := p.run(ctx)
	if err == nil && !m.linked.settle() {
		err = fmt.Errorf("%w: a file has got one more name", ErrForgotten)
	}
	err = cmp.Or(err, m.doubt)
	if err != nil {
		m.doubt = err
		return f, fmt.Errorf("bring the figures of %q up to date: %w", m.root, err)
	}
	f.Bytes, f.Inodes, f.Looked = p.bytes+m.linked.bytes, p.inodes+int64(len(m.linked.files)), p.looked+p.survey.usage.Inodes
	f.Finished = time.Now()
	return f, nil
}

func (m *Memory) begin(now time.Time) {
	m.looks++
	// A time in the future is not one at which somebody wrote.
	m.since, m.lately, m.until = now.Add(-liveFor).UnixNano(), now.Add(-liveForLately).UnixNano(), now.Add(liveFor).UnixNano()
}

// mark has the directory of a file read again. A path that leads nowhere is
// ignored.
func (m *Memory) mark(path string) {
	at := m.tree
	names := strings.Split(strings.Trim(path, "/"), "/")
	for _, name := range names[:len(names)-1] {
		i := slices.IndexFunc(at.children, func(f *folder) bool { return unix.ByteSliceToString(f.name) == name })
		if i < 0 {
			return
		}
		at = at.children[i]
	}
	at.changed = 0
}

// enter remembers a directory whose entries are read next; nil if nothing is
// remembered (any more).
func (m *Memory) enter(parent *folder, name []byte, a *attributes) *folder {
	if m == nil || m.doubt != nil {
		return nil
	}
	f := &folder{name: bytes.Clone(name), identity: a.identity, walked: m.looks}
	f.begin(a)
	switch {
	case parent != nil:
		f.level = parent.level + 1
		parent.children = append(parent.children, f)
	case m.tree == nil:
		m.tree = f
	default: // what was given away by another worker
		m.giveUp("it was walked by two")
		return nil
	}
	m.folders++
	switch {
	case m.folders > m.mostFolders:
		m.giveUp("it has too many directories")
	case f.level >= mostLevels:
		m.giveUp("it is too deep")
	}
	return f
}

// begin makes f a directory of which nothing is known but its attributes, taken
// before its entries are read.
func (f *folder) begin(a *attributes) {
	f.ownBytes, f.bytes, f.inodes = int64(a.blocks)*512, 0, 0
	f.linked, f.live = f.linked[:0], f.live[:0]
	f.changed = a.changed
	if a.changed > time.Now().Add(-clockTick).UnixNano() {
		f.changed = 0 // what comes in the same tick would not move it
	}
}

// giveUp ends the memory.
func (m *Memory) giveUp(why string) {
	if m != nil && m.doubt == nil {
		m.doubt = fmt.Errorf("%w: %s", ErrForgotten, why)
	}
}

// keeps says that a directory found in f is known, and needs no walk.
func (m *Memory) keeps(f *folder, name []byte, a *attributes) bool {
	if m == nil || f == nil || f != m.reading {
		return false
	}
	i, ok := slices.BinarySearchFunc(m.before, name, func(f *folder, name []byte) int { return bytes.Compare(f.name, name) })
	if !ok || m.before[i].identity != a.identity {
		return false
	}
	f.children = append(f.children, m.before[i])
	m.before = slices.Delete(m.before, i, i+1)
	return true
}

// note counts an inode in f that is no directory.
func (m *Memory) note(f *folder, name []byte, a *attributes) {
	if m == nil || m.doubt != nil || f == nil {
		return
	}
	if a.links > 1 {
		f.linked = append(f.linked, a.identity)
		m.linked.add(a)
		if len(m.linked.files) > mostLinked {
			m.giveUp("it has too many files with several names")
		}
	} else {
		f.bytes += int64(a.blocks) * 512
		f.inodes++
	}
	if m.isLive(a) {
		f.live = append(f.live, liveFile{name: bytes.Clone(name), inode: a.inode, linked: a.links > 1, blocks: a.blocks})
		m.lives++
	}
}

// isLive says whether a file was written to lately.
func (m *Memory) isLive(a *attributes) bool {
	switch {
	case a.modified > m.until || m.lives >= mostLive:
		return false
	case m.lives >= mostLiveLately:
		return a.modified >= m.lately
	}
	return a.modified >= m.since
}

// drop forgets a directory and all below it.
func (m *Memory) drop(f *folder) {
	m.folders--
	m.empty(f)
	for _, child := range f.children {
		m.drop(child)
	}
}

// empty forgets what is directly in a directory.
func (m *Memory) empty(f *folder) {
	m.lives -= len(f.live)
	for _, id := range f.linked {
		m.linked.remove(id)
	}
}

// pass is one call of Again.
type pass struct {
	*Memory
	survey *survey
	worker *walker
	attr   attributes
	// Sums over all directories so far, inodes with several names aside.
	bytes, inodes int64
	looked        int64
}

func (p *pass) run(ctx context.Context) error {
	fd, err := openRoot(p.root)
	if err != nil {
		return err
	}
	defer closeFD(fd)
	if err := statChanges(fd, &p.attr); err != nil {
		return err
	}
	if p.attr.identity != p.tree.identity {
		return fmt.Errorf("%w: it is another directory", ErrForgotten)
	}
	p.survey.top = p.attr.identity
	return p.visit(ctx, fd, p.tree)
}

// visit brings an open directory and all below it up to date. p.attr are its
// attributes.
func (p *pass) visit(ctx context.Context, fd int, f *folder) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	p.looked++
	f.ownBytes = int64(p.attr.blocks) * 512
	again := f.changed == 0 || f.changed != p.attr.changed
	if !again {
		var err error
		if again, err = p.lookAtLive(fd, f); err != nil {
			return err
		}
	}
	if again {
		if err := statChanges(fd, &p.attr); err != nil {
			return err
		}
		if err := p.read(ctx, fd, f); err != nil {
			return err
		}
	}
	p.sum(f)
	gone := false
	for i, child := range f.children {
		there, err := p.visitChild(ctx, fd, child)
		if err != nil {
			return err
		}
		if !there {
			p.drop(child)
			f.children[i], gone = nil, true
		}
	}
	if gone {
		f.children = slices.DeleteFunc(f.children, func(f *folder) bool { return f == nil })
		f.changed = 0
	}
	return nil
}

// sum counts what is directly in a directory, and itself.
func (p *pass) sum(f *folder) {
	p.bytes += f.ownBytes + f.bytes
	p.inodes += 1 + f.inodes
}

// sumAll counts a directory and all below it.
func (p *pass) sumAll(f *folder) {
	p.sum(f)
	for _, child := range f.children {
		p.sumAll(child)
	}
}

// visitChild says whether a directory is still there, and brings it up to date.
func (p *pass) visitChild(ctx context.Context, at int, f *folder) (there bool, err error) {
	if f.walked == p.looks { // found a moment ago
		p.sumAll(f)
		return true, nil
	}
	if len(f.children) == 0 && len(f.live) == 0 && f.changed != 0 {
		// Most are like this, and most have not changed: not even opened.
		err := p.survey.list.statAt(at, &f.name[0], &p.attr)
		switch {
		case err != nil && isGone(err):
			return false, nil
		case err != nil:
			return false, err
		case p.attr.identity != f.identity:
			return false, nil
		case p.attr.changed == f.changed:
			p.looked++
			f.ownBytes = int64(p.attr.blocks) * 512
			p.sum(f)
			return true, nil
		}
	}
	fd, err := openDir(at, &f.name[0])
	if err != nil {
		if isGone(err) {
			return false, nil
		}
		return false, err
	}
	defer closeFD(fd)
	if err := statChanges(fd, &p.attr); err != nil {
		return false, err
	}
	if p.attr.identity != f.identity {
		return false, nil
	}
	return true, p.visit(ctx, fd, f)
}

// lookAtLive looks at the files of a directory that were written to lately. again
// says that the directory has to be read.
func (p *pass) lookAtLive(fd int, f *folder) (again bool, err error) {
	var a attributes
	kept := f.live[:0]
	for i, file := range f.live {
		p.looked++
		err := p.survey.list.statAt(fd, &file.name[0], &a)
		if err != nil && !isGone(err) {
			return false, err
		}
		if err != nil || a.inode != file.inode || a.isDir || !a.sameMount(&p.survey.top) || (a.links > 1) != file.linked {
			kept = append(kept, f.live[i:]...) // p.empty counts them
			f.live = kept
			return true, nil
		}
		if file.linked {
			p.linked.update(&a)
		} else {
			f.bytes += (int64(a.blocks) - int64(file.blocks)) * 512
		}
		file.blocks = a.blocks
		if a.modified < p.since {
			p.lives--
			continue
		}
		kept = append(kept, file)
	}
	f.live = kept
	return false, nil
}

// read looks at all that is directly in a directory, and walks the directories in
// it that are new. p.attr are its attributes, taken just now.
func (p *pass) read(ctx context.Context, fd int, f *folder) error {
	p.empty(f)
	f.begin(&p.attr)
	p.reading, p.before, f.children = f, f.children, nil
	slices.SortFunc(p.before, func(x, y *folder) int { return bytes.Compare(x.name, y.name) })
	own, err := openDir(fd, &dot[0])
	if err != nil {
		return err
	}
	w := p.worker
	w.root = p.root // for errors, of which there is but one: it can't be read
	w.push(own, 0)
	w.last().id, w.last().folder = f.identity, f
	err = w.visit(ctx)
	p.survey.retire(w, err)
	p.survey.spare = p.survey.spare[:0]
	if err != nil {
		return err
	}
	for _, child := range p.before {
		p.drop(child)
	}
	p.reading, p.before = nil, nil
	return p.doubt
}

// linkSet are the inodes with several names.
type linkSet struct {
	files map[identity]linkedFile
	bytes int64
	// fresh are those that have been found since settle, gone those of which no
	// name was left since then: a directory that is read again gives its names up
	// first.
	fresh, gone []identity
}

// linkedFile is one of them: how many of its names are in the tree, and how many
// it has.
type linkedFile struct {
	blocks       uint64
	names, links uint32
}

func (s *linkSet) add(a *attributes) {
	file, ok := s.files[a.identity]
	if !ok {
		s.fresh = append(s.fresh, a.identity)
	}
	file.names++
	s.set(a, file)
}

func (s *linkSet) update(a *attributes) {
	if file, ok := s.files[a.identity]; ok {
		s.set(a, file)
	}
}

func (s *linkSet) set(a *attributes, file linkedFile) {
	s.bytes += (int64(a.blocks) - int64(file.blocks)) * 512
	file.blocks, file.links = a.blocks, a.links
	s.files[a.identity] = file
}

// remove forgets one name.
func (s *linkSet) remove(id identity) {
	file, ok := s.files[id]
	if !ok || file.names == 0 {
		return
	}
	if file.names--; file.names == 0 {
		s.bytes -= int64(file.blocks) * 512
		file.blocks = 0
		s.gone = append(s.gone, id)
	}
	s.files[id] = file
}

// settle ends a look at the tree. ok is false if a file was found whose other names
// may be where nobody has looked: it may have counted there as one with one name.
// After a walk that looked everywhere that does not matter.
func (s *linkSet) settle() (ok bool) {
	for _, id := range s.gone {
		if s.files[id].names == 0 {
			delete(s.files, id)
		}
	}
	ok = true
	for _, id := range s.fresh {
		file, there := s.files[id]
		ok = ok && (!there || file.names == file.links)
	}
	s.fresh, s.gone = nil, nil
	return ok
}
