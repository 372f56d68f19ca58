// Package du finds what takes most of what a pod has on disk: the largest folders and files of places that it is told, within a
// budget, and answers in time even where a filesystem hangs. It imports fsstats/walk and agent/page of this module; only agent
// may import it.
package du

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"sync"
	"time"

	"github.com/cleave-cri/cleave/agent/page"
	"github.com/cleave-cri/cleave/fsstats/walk"
)

// What a request gets where it says nothing, and how much it may ask for.
const (
	DefaultMost, maxMost                         = 10, 100
	DefaultEntriesPerSecond, maxEntriesPerSecond = 50_000, 1_000_000
	DefaultLimit, maxLimit                       = 30 * time.Second, 5 * time.Minute
)

// hangGrace is how long a walk has to notice that its time is over. One that does not hangs in the kernel.
const hangGrace = time.Second

// ErrBusy says that another search is under way; there is one at a time.
var ErrBusy = errors.New("another search of a pod is under way")

// Request is what is asked for.
type Request struct {
	// Pod is the pod's name or UID, Namespace its namespace: empty for any, if there is one pod of that name only.
	Pod       string `json:"pod"`
	Namespace string `json:"namespace,omitempty"`
	// Container is the only one of its containers to look at: empty for all of them and the pod's volumes.
	Container string `json:"container,omitempty"`
	// Most is how many folders and how many files are listed of each place: 1 to 100; 0 means 10.
	Most int `json:"most,omitempty"`
	// EntriesPerSecond is how many entries are looked at in a second: 1 to 1 000 000; 0 means 50 000. One costs some µs of a
	// core, and an access to the disk where its inode is not cached.
	EntriesPerSecond int `json:"entriesPerSecond,omitempty"`
	// Limit is how long all of it may take, in nanoseconds: up to 5 min; 0 means 30 s. What was found until then is the answer.
	Limit time.Duration `json:"limit,omitempty"`
	// ByInodes looks for what takes inodes, not bytes.
	ByInodes bool `json:"byInodes,omitempty"`
}

// Settled is the request with what it leaves out filled in; an error says what is out of bounds.
func (r Request) Settled() (Request, error) {
	if r.Pod == "" {
		return r, errors.New("name a pod")
	}
	return r, errors.Join(
		settle("folders and files to list", &r.Most, DefaultMost, maxMost),
		settle("entries in a second", &r.EntriesPerSecond, DefaultEntriesPerSecond, maxEntriesPerSecond),
		settle("time", &r.Limit, DefaultLimit, maxLimit),
	)
}

func settle[T int | time.Duration](what string, value *T, otherwise, most T) error {
	if *value == 0 {
		*value = otherwise
	}
	if *value < 0 || *value > most {
		return fmt.Errorf("%s: %v is not above 0 and at most %v", what, *value, most)
	}
	return nil
}

// Place is a folder that a pod has.
type Place struct {
	// What says what it is, such as "writable layer" or "volume cache".
	What string
	// Container is whose it is; empty for the pod's.
	Container string
	Path      string
	// Without are folders in it that are places of their own.
	Without []string
}

// Report is what a pod has, as far as it was looked at. Names of files are as [page.Name] writes them.
type Report struct {
	Namespace string `json:"namespace,omitempty"`
	Pod       string `json:"pod,omitempty"`
	UID       string `json:"uid"`
	Container string `json:"container,omitempty"`
	// Started and Finished frame the search.
	Started  time.Time `json:"started"`
	Finished time.Time `json:"finished"`
	// Partial says that not all was looked at: figures are lower bounds, and larger things may be missing. Problems say why.
	Partial  bool     `json:"partial,omitempty"`
	Problems []string `json:"problems,omitempty"`
	Places   []Found  `json:"places"`
	// Open are deleted files that still take space because a process has them open, the largest first.
	Open []OpenFile `json:"openDeleted,omitempty"`
	// Most and ByInodes are the request's.
	Most     int  `json:"most"`
	ByInodes bool `json:"byInodes,omitempty"`
}

// Found is what was found in a place.
type Found struct {
	What      string `json:"what"`
	Container string `json:"container,omitempty"`
	Path      string `json:"path"`
	Bytes     int64  `json:"bytes"`
	Inodes    int64  `json:"inodes"`
	// Partial says that the figures are a lower bound, Gone that it was not there any more.
	Partial bool `json:"partial,omitempty"`
	Gone    bool `json:"gone,omitempty"`
	// Folders and Files are the largest, the largest first. A folder of which nine tenths are one thing in it is left out.
	Folders []Held `json:"folders,omitempty"`
	Files   []Held `json:"files,omitempty"`
}

// Held is a file or folder, a folder with all below it. Its path is below that of the place.
type Held struct {
	Path   string `json:"path"`
	Bytes  int64  `json:"bytes"`
	Inodes int64  `json:"inodes"`
}

// OpenFile is a deleted file that is still open.
type OpenFile struct {
	Container string `json:"container"`
	// Name is the last name that it had, PID a process that has it.
	Name  string `json:"name"`
	PID   int    `json:"pid"`
	Bytes int64  `json:"bytes"`
	// Device is the filesystem that it is on.
	Device string `json:"device"`
}

// problem notes why something was not looked at.
func (r *Report) problem(err error) {
	r.Partial = true
	if text := page.Name(err.Error()); len(r.Problems) < maxProblems {
		r.Problems = append(r.Problems, text)
	}
}

// maxProblems is how many are told.
const maxProblems = 20

// Searcher searches, one pod at a time. The zero Searcher is ready.
type Searcher struct {
	mu sync.Mutex
	// at is what the search under way looks at, empty while there is none; guarded by mu.
	at string
}

// OpenFunc finds deleted files that are open. An error comes with what was found all the same.
type OpenFunc func(ctx context.Context) ([]OpenFile, error)

// Search looks at places, in their order, and then for deleted files, with open; nil looks for none. The request has to be
// settled. It returns [ErrBusy] while another search is under way, also one that hangs.
func (s *Searcher) Search(ctx context.Context, r Request, report Report, places []Place, open OpenFunc) (Report, error) {
	if !s.begin() {
		return report, fmt.Errorf("%w, at %s: ask again when it has ended; if it never does, its filesystem hangs", ErrBusy, s.where())
	}
	report.Started, report.Most, report.ByInodes = time.Now(), r.Most, r.ByInodes
	ctx, cancel := context.WithTimeout(ctx, r.Limit)
	defer cancel()
	// What hangs in the kernel is left behind; what was found before is told.
	steps, ended := make(chan step), make(chan struct{})
	defer close(ended)
	go func() { // ends when its walk does; there is one at most
		defer s.end()
		defer close(steps)
		s.search(ctx, r, places, open, func(st step) {
			select {
			case steps <- st:
			case <-ended:
			}
		})
	}()
	report.gather(ctx, steps, s.where)
	report.Finished = time.Now()
	return report, nil
}

// gather adds up what comes, until all has or its time is over.
func (r *Report) gather(ctx context.Context, steps <-chan step, where func() string) {
	hung := make(<-chan time.Time)
	over := ctx.Done()
	for {
		select {
		case st, more := <-steps:
			if !more {
				return
			}
			if st.found != nil {
				r.Places = append(r.Places, *st.found)
				r.Partial = r.Partial || st.found.Partial
			}
			r.Open = append(r.Open, st.open...)
			for _, err := range st.errs {
				r.problem(err)
			}
		case <-over:
			over = nil
			timer := time.NewTimer(hangGrace)
			defer timer.Stop()
			hung = timer.C
		case <-hung:
			r.problem(fmt.Errorf("%s does not answer, so neither it nor what comes after it was looked at", where()))
			return
		}
	}
}

func (s *Searcher) begin() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.at != "" {
		return false
	}
	s.at = "the beginning"
	return true
}

func (s *Searcher) look(at string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.at = at
}

func (s *Searcher) end() { s.look("") }

func (s *Searcher) where() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.at
}

// step is what was found at one place.
type step struct {
	found *Found
	open  []OpenFile
	errs  []error
}

func (s *Searcher) search(ctx context.Context, r Request, places []Place, open OpenFunc, tell func(step)) {
	for i, p := range places {
		if err := ctx.Err(); err != nil {
			tell(step{errs: []error{fmt.Errorf("%d places of %d were not looked at: %w", len(places)-i, len(places), overBudget(err))}})
			break
		}
		s.look(p.Path)
		tell(lookAt(ctx, r, p))
	}
	if open == nil {
		return
	}
	if err := ctx.Err(); err != nil {
		tell(step{errs: []error{fmt.Errorf("deleted files that are open were not looked for: %w", overBudget(err))}})
		return
	}
	s.look("the open files of its processes")
	files, err := open(ctx)
	st := step{open: files}
	if err != nil {
		st.errs = []error{overBudget(err)}
	}
	for i := range st.open {
		st.open[i].Name = page.Name(st.open[i].Name)
	}
	tell(st)
}

// overBudget says in words that time is over.
func overBudget(err error) error {
	if errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("the time for it is over (--limit gives more, --entries-per-second looks at more in it): %w", err)
	}
	return err
}

func lookAt(ctx context.Context, r Request, p Place) step {
	order := walk.ByBytes
	if r.ByInodes {
		order = walk.ByInodes
	}
	got, err := walk.FindLargest(ctx, p.Path, walk.Options{EntriesPerSecond: r.EntriesPerSecond, Without: p.Without}, order, r.Most)
	// Folders are named by whoever may make them there, as pods that mount the logs of all.
	f := &Found{What: page.Name(p.What), Container: page.Name(p.Container), Path: page.Name(p.Path), Bytes: got.Bytes, Inodes: got.Inodes, Partial: got.Partial}
	if errors.Is(err, fs.ErrNotExist) {
		f.Gone, f.Partial = true, false
		return step{found: f}
	}
	st := step{found: f, errs: got.Errors}
	if err != nil {
		st.errs = append(st.errs, overBudget(err))
		f.Partial = true
	}
	f.Folders, f.Files = held(got.Folders), held(got.Files)
	return st
}

func held(list []walk.Holding) (out []Held) {
	for _, h := range list {
		out = append(out, Held{Path: page.Name(h.Path), Bytes: h.Bytes, Inodes: h.Inodes})
	}
	return out
}
