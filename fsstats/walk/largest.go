package walk

import (
	"cmp"
	"context"
	"errors"
	"slices"

	"golang.org/x/sys/unix"
)

// mostHoldings is how many folders and how many files are listed at most.
const mostHoldings = 1000

// Holding is a file or a folder and what it takes, a folder with all below it.
type Holding struct {
	// Path is below the root of the walk and begins with a slash. Its bytes are the names as the filesystem has them,
	// which need be no text. Of more than 64 levels the last are named, behind an ellipsis.
	Path  string
	Bytes int64
	// Inodes is 1 for a file.
	Inodes int64
}

// Largest is what a tree took and what takes most in it.
type Largest struct {
	Usage
	// Folders and Files are the largest, the largest first. A folder of which nine tenths are one thing in it is left out,
	// for that thing is what is looked for; so is the root.
	Folders, Files []Holding
}

// Order is what Largest sorts by.
type Order int

// The orders.
const (
	// ByBytes looks for what takes the space.
	ByBytes Order = iota
	// ByInodes looks for what takes the inodes: files are then not listed.
	ByInodes
)

// FindLargest walks like [Measure], with one worker, and lists the most largest folders and files. When ctx ends it returns
// its error with what was found until then; a folder's figures are then a lower bound.
func FindLargest(ctx context.Context, root string, opt Options, order Order, most int) (Largest, error) {
	return findLargest(ctx, root, opt, order, most, kernelLister{})
}

func findLargest(ctx context.Context, root string, opt Options, order Order, most int, list lister) (Largest, error) {
	if most < 0 || most > mostHoldings {
		return Largest{}, errors.New("list the largest: 0 to 1000 can be listed")
	}
	opt.Workers = 1
	rank := &ranking{order: order, most: most}
	usage, err := measureInto(ctx, root, opt, list, maxLinked, nil, rank)
	return Largest{Usage: usage, Folders: sorted(rank.folders, order), Files: sorted(rank.files, order)}, err
}

// ranking keeps the largest of what a walk finds. The zero pointer keeps nothing.
type ranking struct {
	order          Order
	most           int
	levels         []sum // of the directories on the walker's stack
	folders, files []Holding
}

// sum is what was found so far in a directory that is being walked.
type sum struct {
	bytes, inodes int64
	// most is that of the one thing in it that has most of what is sorted by.
	most int64
}

func (r *ranking) of(bytes, inodes int64) int64 {
	if r.order == ByInodes {
		return inodes
	}
	return bytes
}

// enter is called when a directory is put on the stack.
func (r *ranking) enter(a *attributes) {
	if r != nil {
		r.levels = append(r.levels, sum{bytes: int64(a.blocks) * 512, inodes: 1})
	}
}

// leave is called just before the directory at the top of the walker's stack is taken off it.
func (r *ranking) leave(w *walker) {
	if r == nil || len(r.levels) == 0 {
		return // the root could not be looked at
	}
	level := len(r.levels) - 1
	s := r.levels[level]
	r.levels = r.levels[:level]
	if level == 0 {
		return
	}
	value := r.of(s.bytes, s.inodes)
	above := &r.levels[level-1]
	above.bytes += s.bytes
	above.inodes += s.inodes
	above.most = max(above.most, value)
	if s.most < value-value/10 && r.fits(r.folders, value) {
		r.folders = r.insert(r.folders, Holding{Path: w.below(level), Bytes: s.bytes, Inodes: s.inodes})
	}
}

// end leaves what a walk that was broken off has not left.
func (r *ranking) end(w *walker) {
	for r != nil && len(r.levels) > 0 {
		r.leave(w)
	}
}

// file notes an entry of the directory at the top that is none itself. name ends with a zero byte.
func (r *ranking) file(w *walker, name []byte, a *attributes) {
	if r == nil {
		return
	}
	level := len(r.levels) - 1
	s := &r.levels[level]
	bytes := int64(a.blocks) * 512
	s.bytes += bytes
	s.inodes++
	s.most = max(s.most, r.of(bytes, 1))
	if r.order == ByBytes && r.fits(r.files, bytes) {
		r.files = r.insert(r.files, Holding{Path: w.below(level) + "/" + unix.ByteSliceToString(name), Bytes: bytes, Inodes: 1})
	}
}

// fits says whether something of that size is to be listed.
func (r *ranking) fits(list []Holding, value int64) bool {
	if value == 0 || r.most == 0 {
		return false
	}
	return len(list) < r.most || value > r.of(list[len(list)-1].Bytes, list[len(list)-1].Inodes)
}

// insert keeps the list sorted, the largest first, and no longer than it may be.
func (r *ranking) insert(list []Holding, h Holding) []Holding {
	value := r.of(h.Bytes, h.Inodes)
	at, _ := slices.BinarySearchFunc(list, value, func(l Holding, v int64) int {
		if r.of(l.Bytes, l.Inodes) >= v {
			return -1
		}
		return 1
	})
	list = slices.Insert(list, at, h)
	return list[:min(len(list), r.most)]
}

// sorted puts what is of one size in the order of paths.
func sorted(list []Holding, order Order) []Holding {
	r := &ranking{order: order}
	slices.SortFunc(list, func(a, b Holding) int {
		return cmp.Or(cmp.Compare(r.of(b.Bytes, b.Inodes), r.of(a.Bytes, a.Inodes)), cmp.Compare(a.Path, b.Path))
	})
	return list
}
