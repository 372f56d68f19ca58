package quota

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Errors of an Assigner that callers can tell apart with errors.Is.
var (
	// ErrForeignProject says that a tree has a project ID that no Assigner gave it. Nothing is done to it.
	ErrForeignProject = errors.New("the tree has a project ID that cleave did not give it")
	// ErrNoProject says that a tree has no project ID.
	ErrNoProject = errors.New("the tree has no project ID")
	// ErrRangeUsed says that no ID of the range is free.
	ErrRangeUsed = errors.New("every project ID of the range is in use")
)

// Range is a range of project IDs, both ends included.
type Range struct{ First, Last uint32 }

func (r Range) check() error {
	if r.First == 0 || r.Last < r.First || r.Last == math.MaxUint32 {
		return fmt.Errorf("project IDs %d to %d: the range must begin at 1 or above, end at %d or below, and not be empty", r.First, r.Last, uint32(math.MaxUint32-1))
	}
	return nil
}

func (r Range) holds(id uint32) bool { return r.First <= id && id <= r.Last }

// AssignerOptions say which IDs an Assigner may give.
type AssignerOptions struct {
	// Range is what it chooses from. Nobody else should, on this filesystem.
	Range Range
	// ProjectFiles name IDs that people use, in the form of projects(5), which is ID:path, or projid(5), name:ID. One
	// that does not exist names none. nil means /etc/projects and /etc/projid.
	ProjectFiles []string
	// Ledger is the filesystem's account; nil means the filesystem's own.
	Ledger Ledger
}

// An Assigner gives trees project IDs of their own, and limits. It holds no state: what it gave is written on the tree, as
// the project ID of its folder and a record in an extended attribute that names that very folder, so that a restart goes on
// where the last process ended, and a copy of a tree is not taken for the tree. Which IDs are in use it asks the
// filesystem, each time. All Assigners of one filesystem have to open it by the same folder: a lock on that keeps them apart.
// Its methods may be called from several goroutines.
type Assigner struct {
	fs     *FS
	ledger Ledger
	o      AssignerOptions

	mu   sync.Mutex
	next uint32 // where the search for a free ID goes on, so that an ID is not given again at once; guarded by mu
}

// NewAssigner makes an Assigner. It changes nothing.
func NewAssigner(fs *FS, o AssignerOptions) (*Assigner, error) {
	if err := o.Range.check(); err != nil {
		return nil, err
	}
	if o.ProjectFiles == nil {
		o.ProjectFiles = []string{"/etc/projects", "/etc/projid"}
	}
	a := &Assigner{fs: fs, ledger: o.Ledger, o: o, next: o.Range.First}
	if a.ledger == nil {
		a.ledger = fs
	}
	return a, nil
}

// Assigned is what a tree has.
type Assigned struct {
	ID uint32
	// Left counts entries that could not be given the ID because they are no folders or regular files, or have other
	// names besides; their bytes are not counted, and the first of them is FirstLeft. What is made later inherits the ID.
	Left      int
	FirstLeft string
}

// Assign gives a tree a project ID, with everything in it, and returns it. A tree that has one of ours keeps it; a tree with
// another's is refused with ErrForeignProject. It is meant for new trees: one with many entries takes a moment for each,
// and while it is under way nobody can rename between its folders (EXDEV). After a crash in the middle the next call
// finishes it. An xfs that counts no projects is asked for all its inodes each time (half a microsecond each), to know the
// IDs in use. It fails with ErrNotSupported where nothing tells them.
func (a *Assigner) Assign(ctx context.Context, tree string) (_ Assigned, err error) {
	unlock, err := a.lock(ctx)
	if err != nil {
		return Assigned{}, err
	}
	defer func() { err = errors.Join(err, unlock()) }()
	dir, err := a.fs.openTree(tree)
	if err != nil {
		return Assigned{}, err
	}
	defer func() { err = errors.Join(err, dir.Close()) }()
	has, err := readMark(dir)
	if err != nil {
		return Assigned{}, err
	}
	switch {
	case has.project == 0:
		// Also after a crash right behind the record: nothing has the ID that it names, as far as we know.
		if has.record.id, err = a.choose(ctx); err != nil {
			return Assigned{}, fmt.Errorf("give %s a project ID: %w", dir.Name(), err)
		}
	case !has.ours():
		return Assigned{}, fmt.Errorf("give %s a project ID: it has %d: %w", dir.Name(), has.project, ErrForeignProject)
	case has.record.done:
		return Assigned{ID: has.project}, nil
	}
	record := record{id: has.record.id, inode: has.inode.number, born: has.inode.born}
	if err := record.write(dir); err != nil {
		return Assigned{}, err
	}
	result := Assigned{ID: record.id}
	if err := a.markTree(ctx, dir, &result); err != nil {
		return Assigned{}, err
	}
	record.done = true
	return result, record.write(dir)
}

// ID returns the project ID that an Assigner gave a tree. It fails with ErrNoProject if it has none or is not finished, and
// with ErrForeignProject.
func (a *Assigner) ID(tree string) (_ uint32, err error) {
	dir, err := a.fs.openTree(tree)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, dir.Close()) }()
	has, err := readMark(dir)
	switch {
	case err != nil:
		return 0, err
	case has.project == 0:
		return 0, fmt.Errorf("%s: %w", dir.Name(), ErrNoProject)
	case !has.ours():
		return 0, fmt.Errorf("%s has project ID %d: %w", dir.Name(), has.project, ErrForeignProject)
	case !has.record.done:
		return 0, fmt.Errorf("%s was not given all of its project ID: %w; assign it again", dir.Name(), ErrNoProject)
	}
	return has.project, nil
}

// Project reads the account of a tree.
func (a *Assigner) Project(tree string) (Project, error) {
	id, err := a.ID(tree)
	if err != nil {
		return Project{}, err
	}
	return a.ledger.Project(id)
}

// SetLimit limits a tree that has a project ID of ours, or takes its limit away, and returns the account as it then is: the
// kernel rounds limits up.
func (a *Assigner) SetLimit(tree string, l Limit) (Project, error) {
	id, err := a.ID(tree)
	if err != nil {
		return Project{}, fmt.Errorf("limit a tree: %w", err)
	}
	if err := a.ledger.SetLimit(id, l); err != nil {
		return Project{}, err
	}
	return a.ledger.Project(id)
}

// Tidy takes the limits off those IDs of the range that no inode has any more: their trees are gone. It returns the IDs,
// which can then be given again. It fails with ErrNotSupported where the kernel does not count.
func (a *Assigner) Tidy(ctx context.Context) (cleared []uint32, err error) {
	unlock, err := a.lock(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, unlock()) }()
	named, err := a.named()
	if err != nil {
		return nil, err
	}
	for from := a.o.Range.First; ctx.Err() == nil; {
		p, found, err := a.ledger.NextProject(from)
		if err != nil || !found || p.ID > a.o.Range.Last {
			return cleared, err
		}
		// A folder with the ID is an inode of it, so without one there is no tree.
		if p.Usage == (Usage{}) && !named[p.ID] {
			if err := a.ledger.SetLimit(p.ID, Limit{}); err != nil {
				return cleared, err
			}
			cleared = append(cleared, p.ID)
		}
		from = p.ID + 1
	}
	return cleared, ctx.Err()
}

// lock keeps Assigners of this and other processes apart.
func (a *Assigner) lock(ctx context.Context) (func() error, error) {
	const retryEvery = 20 * time.Millisecond
	tick := time.NewTicker(retryEvery)
	defer tick.Stop()
	for {
		unlock, taken, err := a.fs.tryLock()
		if err != nil {
			return nil, err
		}
		if taken {
			return unlock, nil
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for the lock on %s: %w", a.fs.Path(), ctx.Err())
		case <-tick.C:
		}
	}
}

// choose finds an ID that nobody uses. The lock is held.
func (a *Assigner) choose(ctx context.Context) (uint32, error) {
	used, err := a.named()
	if err != nil {
		return 0, err
	}
	if err := a.counted(ctx, used); err != nil {
		return 0, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	r := a.o.Range
	for range uint64(r.Last-r.First) + 1 {
		id := a.next
		if a.next++; a.next > r.Last {
			a.next = r.First
		}
		if !used[id] {
			return id, nil
		}
	}
	return 0, fmt.Errorf("choose from %d to %d on %s: %w; Tidy frees those whose trees are gone", r.First, r.Last, a.fs.Path(), ErrRangeUsed)
}

// counted adds the IDs of the range that the filesystem knows: by its accounts, else by looking at every inode.
func (a *Assigner) counted(ctx context.Context, used map[uint32]bool) error {
	for from := a.o.Range.First; ; {
		p, found, err := a.ledger.NextProject(from)
		if errors.Is(err, ErrNotSupported) {
			bulk, bulkErr := a.fs.BulkUsage(ctx)
			if bulkErr != nil {
				return fmt.Errorf("find out which project IDs are in use: %w", errors.Join(err, bulkErr))
			}
			for id := range bulk {
				used[id] = true
			}
			return nil
		}
		if err != nil {
			return err
		}
		if !found || !a.o.Range.holds(p.ID) {
			return nil
		}
		used[p.ID] = true
		from = p.ID + 1 // no overflow: the range ends below the last ID
	}
}

// named reads the IDs that people have given names or paths.
func (a *Assigner) named() (map[uint32]bool, error) {
	ids := make(map[uint32]bool)
	for _, file := range a.o.ProjectFiles {
		content, err := os.ReadFile(file)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("find out which project IDs have a name: %w", err)
		}
		if err := parseProjects(string(content), ids); err != nil {
			return nil, fmt.Errorf("find out which project IDs have a name: %s: %w", file, err)
		}
	}
	return ids, nil
}

// parseProjects reads lines of ID:path or name:ID. A line that is neither could be meant as one of them, so it is an error.
func parseProjects(content string, ids map[uint32]bool) error {
	number := 0
	for line := range strings.Lines(content) {
		number++
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		before, after, _ := strings.Cut(line, ":")
		id, err := strconv.ParseUint(strings.TrimSpace(before), 10, 32)
		if err != nil {
			if id, err = strconv.ParseUint(strings.TrimSpace(after), 10, 32); err != nil {
				return fmt.Errorf("line %d, %q, is neither ID:path nor name:ID", number, line)
			}
		} else if other, err := strconv.ParseUint(strings.TrimSpace(after), 10, 32); err == nil {
			ids[uint32(other)] = true // a name of digits only: it may be either
		}
		ids[uint32(id)] = true
	}
	return nil
}

// recordAttribute is where a tree's record is. Only CAP_SYS_ADMIN sees it. On the folder of a snapshot it is not visible
// in a container, whose own folders are below that.
const recordAttribute = "trusted.cleave.project"

// record is what an Assigner writes on a tree before it gives the ID, and once more when everything in it has the ID. It
// names the folder, because copies take extended attributes along.
type record struct {
	id    uint32
	inode uint64
	born  int64
	done  bool
}

func (r record) write(dir *os.File) error {
	state := "begun"
	if r.done {
		state = "done"
	}
	return writeAttribute(dir, recordAttribute, fmt.Sprintf("1 %d %d %d %s", r.id, r.inode, r.born, state))
}

// parseRecord gives an empty record for text that is none of version 1: then the ID counts as somebody else's.
func parseRecord(text string) record {
	fields := strings.Fields(text)
	if len(fields) != 5 || fields[0] != "1" || fields[4] != "done" && fields[4] != "begun" {
		return record{}
	}
	id, err1 := strconv.ParseUint(fields[1], 10, 32)
	inode, err2 := strconv.ParseUint(fields[2], 10, 64)
	born, err3 := strconv.ParseInt(fields[3], 10, 64)
	if errors.Join(err1, err2, err3) != nil {
		return record{}
	}
	return record{id: uint32(id), inode: inode, born: born, done: fields[4] == "done"}
}

// mark is what a tree's folder says about its project.
type mark struct {
	project uint32
	record  record
	inode   inode
}

// ours tells whether the record is about this folder and this ID.
func (m mark) ours() bool {
	return m.project != 0 && m.record.id == m.project && m.record.inode == m.inode.number && m.record.born == m.inode.born
}

func readMark(dir *os.File) (mark, error) {
	var m mark
	attributes, err := projectOf(dir)
	if err != nil {
		return m, err
	}
	m.project = attributes.project
	if m.inode, err = inodeOf(dir.Fd()); err != nil {
		return m, err
	}
	text, _, err := readAttribute(dir, recordAttribute)
	if err != nil {
		return m, err
	}
	m.record = parseRecord(text)
	return m, nil
}

// markTree gives a folder and everything in it the ID. Each folder gets it before it is listed: what is made in it from
// then on inherits, and what was there before is in the list.
func (a *Assigner) markTree(ctx context.Context, dir *os.File, result *Assigned) error {
	if err := setProject(dir, result.ID, true); err != nil {
		return err
	}
	for {
		names, err := dir.Readdirnames(1024)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("list %s: %w", dir.Name(), err)
		}
		for _, name := range names {
			if err := ctx.Err(); err != nil {
				return fmt.Errorf("give %s the project %d: %w", dir.Name(), result.ID, err)
			}
			if err := a.markEntry(ctx, dir, name, result); err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
		}
	}
}

func (a *Assigner) markEntry(ctx context.Context, dir *os.File, name string, result *Assigned) (err error) {
	file, node, err := a.openEntry(dir, name)
	if err != nil {
		return err
	}
	if file == nil {
		if result.Left++; result.Left == 1 {
			result.FirstLeft = filepath.Join(dir.Name(), name)
		}
		return nil
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	if node.isDir() {
		return a.markTree(ctx, file, result)
	}
	return setProject(file, result.ID, false)
}

// openEntry opens a folder, or a regular file that has no other name: its ID is nobody else's business. Of others the
// file is nil.
func (a *Assigner) openEntry(dir *os.File, name string) (_ *os.File, _ inode, err error) {
	place, err := openPlace(dir, name)
	if err != nil {
		return nil, inode{}, err
	}
	defer func() { err = errors.Join(err, place.Close()) }()
	node, err := inodeOf(place.Fd())
	switch {
	case err != nil:
		return nil, inode{}, err
	case node.device != a.fs.dev:
		return nil, inode{}, fmt.Errorf("look at %s: another filesystem is mounted there", place.Name())
	case !node.isDir() && (!node.isRegular() || node.links > 1):
		return nil, node, nil
	}
	file, err := reopen(place)
	return file, node, err
}
