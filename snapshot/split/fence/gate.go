package fence

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/snapshot/split/rootdir"
)

// Gate holds each root open and locked while it is the right one, and lets go of it when it
// is not: a root that was unmounted can then really go. It is open while both
// roots are right.
//
// The kernel is asked about a root within a limit of time ([ErrNoAnswer]) and
// never under mu, so a root that hangs closes the gate and holds up nobody who
// does not need that root.
type Gate struct {
	sources Sources
	bootID  string
	log     *zap.Logger
	// suits says whether a right root can hold layers; it is asked each time
	// that a root is taken anew.
	suits func(Role, *rootdir.Root) error
	// opened holds a value when the gate has opened since somebody took one.
	opened chan struct{}
	askers map[Role]*asker

	// verifying lets one Verify at a time ask and then say what it saw, so that
	// nobody says something older last. Taken before mu; held for as long as
	// questions may take.
	verifying sync.Mutex

	mu      sync.RWMutex
	sides   map[Role]*side // the map never changes; what is in a side is guarded by mu
	reasons []Reason       // guarded by mu; empty: open
	since   time.Time      // guarded by mu; when it was last opened or closed
	closed  bool           // guarded by mu; for good
}

// side is one root.
type side struct {
	want Want
	path string
	held
	// hangs: it did not answer when it was last asked. What is held may be right.
	hangs bool
}

// held is what was held right last; root is nil if nothing is.
type held struct {
	root   *rootdir.Root
	place  rootdir.Place
	marker rootdir.Place
}

// suitsLimit is how long the look may take at a root that is not held yet, and
// whether it can hold layers. It reads from the disk and writes, and a busy disk
// lets that wait.
const suitsLimit = 10 * time.Second

// NewGate makes a gate, closed until Verify says otherwise. The roots' paths
// and what they must be are by role.
func NewGate(paths map[Role]string, want map[Role]Want, sources Sources, log *zap.Logger, suits func(Role, *rootdir.Root) error) (*Gate, error) {
	bootID, err := sources.ReadBootID()
	if err != nil {
		return nil, fmt.Errorf("read the ID of this boot: %w", err)
	}
	g := &Gate{
		sources: sources, bootID: bootID, log: log, suits: suits, opened: make(chan struct{}, 1),
		askers: map[Role]*asker{}, sides: map[Role]*side{}, since: time.Now(),
	}
	for role, path := range paths {
		g.sides[role], g.askers[role] = &side{want: want[role], path: path}, newAsker()
	}
	g.reasons = []Reason{{What: "the roots have not been looked at yet", Remedy: "wait"}}
	return g, nil
}

// Roles are the two roles in a fixed order.
func Roles() []Role { return []Role{Image, Container} }

// Root is the open root, or why there is none. A root that is known to hang is
// not given.
func (g *Gate) Root(role Role) (*rootdir.Root, error) {
	g.mu.RLock()
	defer g.mu.RUnlock()
	if s := g.sides[role]; s.root != nil && !s.hangs {
		return s.root, nil
	}
	return nil, &Closed{Reasons: slices.Clone(g.reasons)}
}

// Opened gives a value after the gate has opened, whoever it was that looked.
func (g *Gate) Opened() <-chan struct{} { return g.opened }

// State is whether the gate is closed, why, and since when.
func (g *Gate) State() (reasons []Reason, since time.Time) {
	g.mu.RLock()
	defer g.mu.RUnlock()
	return slices.Clone(g.reasons), g.since
}

// Quick is for every write: with four system calls it makes sure that both paths
// still lead to the roots held open, and that the markers are the ones read.
// While something is not as it was, it verifies.
func (g *Gate) Quick() error {
	if g.unchanged() {
		return nil
	}
	return g.Verify()
}

func (g *Gate) unchanged() bool {
	var sides [2]side
	g.mu.RLock()
	open := len(g.reasons) == 0
	for i, role := range Roles() {
		sides[i] = *g.sides[role]
	}
	g.mu.RUnlock()
	for i, role := range Roles() {
		if !open || sides[i].root == nil {
			return false
		}
		same, err := ask(g.askers[role], askLimit, func() bool { return g.sources.same(sides[i].path, sides[i].held) }, nil)
		if err != nil || !same {
			return false
		}
	}
	return true
}

// same says whether a path leads to what is held.
func (s Sources) same(path string, h held) bool {
	s.about(path)
	now, err := rootdir.At(path)
	if err != nil || !now.Same(h.place) {
		return false
	}
	marker, err := h.root.Stat(MarkerName)
	return err == nil && marker.Same(h.marker) && marker.Changed == h.marker.Changed
}

// Verify looks at everything anew, and opens or closes the gate.
func (g *Gate) Verify() error {
	g.verifying.Lock()
	defer g.verifying.Unlock()
	var found [2]finding
	var both sync.WaitGroup
	for i, role := range Roles() {
		both.Go(func() { found[i] = g.find(role) })
	}
	both.Wait()

	g.mu.Lock()
	if g.closed {
		g.mu.Unlock()
		for _, f := range found {
			g.letGo(f.root)
		}
		return errClosed()
	}
	var reasons []Reason
	var free []*rootdir.Root
	for i, role := range Roles() {
		free = append(free, g.takeLocked(g.sides[role], found[i])...)
		if found[i].wrong {
			reasons = append(reasons, found[i].reason)
		}
	}
	changed, opens := !slices.Equal(reasons, g.reasons), len(reasons) == 0
	if changed {
		g.since = time.Now()
	}
	g.reasons = reasons
	g.mu.Unlock()

	for _, root := range free {
		g.letGo(root)
	}
	switch {
	case changed && opens:
		g.log.Info("the roots are the right ones")
		select {
		case g.opened <- struct{}{}:
		default: // nobody has looked since the last time
		}
	case changed:
		g.log.Error("a root is not there or not the right one; nothing is written or deleted", zap.Stringers("reasons", reasons))
	}
	if opens {
		return nil
	}
	return &Closed{Reasons: slices.Clone(reasons)}
}

// finding is what one look at a root has found.
type finding struct {
	held
	// uuid is the filesystem's.
	uuid string
	// wrong: the root is not the right one, for this reason; hangs: it does not
	// answer, so what is held may still be.
	wrong, hangs bool
	// unlocked: what is held is not locked any more.
	unlocked bool
	reason   Reason
}

// find looks at a root anew. What it holds in the end is the caller's.
func (g *Gate) find(role Role) finding {
	g.mu.RLock()
	s := *g.sides[role]
	g.mu.RUnlock()
	drop := func(f finding) { g.letGo(f.root) }
	limit := askLimit
	if s.root == nil {
		limit = suitsLimit // nothing is in memory yet of a disk that was just mounted
	}
	f, err := ask(g.askers[role], limit, func() finding { return g.sources.examine(s, g.bootID) }, drop)
	if err != nil {
		return noFinding(s, err)
	}
	if f.wrong || s.root != nil && f.place.Same(s.place) {
		return f
	}
	// It would be taken anew, and is looked at thoroughly; from the beginning, so
	// that all of it is about one root.
	drop(f)
	// The same folder by another mount: it could not be locked while the one held
	// is.
	unlocked := s.root != nil && f.place.Device == s.place.Device && f.place.Inode == s.place.Inode
	f, err = ask(g.askers[role], suitsLimit, func() finding {
		if unlocked {
			if err := s.root.Unlock(); err != nil {
				return finding{}.because(s, err)
			}
		}
		f := g.sources.examine(s, g.bootID)
		if f.wrong {
			return f
		}
		if err := Lock(role, f.root); err != nil {
			return f.because(s, err)
		}
		if err := g.suits(role, f.root); err != nil {
			return f.because(s, err)
		}
		return f
	}, drop)
	if err != nil {
		f = noFinding(s, err)
		f.unlocked = unlocked
	}
	return f
}

func noFinding(s side, err error) finding {
	return finding{wrong: true, hangs: true, reason: Reason{
		Root: s.path, What: fmt.Sprintf("the %s root: %v", s.want.Role, err), hangs: true,
		Remedy: "look after its disk or server (the kernel's log names it); it is noticed without a restart when it answers again",
	}}
}

// because says that a root can't be used because of an error.
func (f finding) because(s side, err error) finding {
	f.wrong = true
	f.reason = Reason{Root: s.path, What: err.Error(), Remedy: remedy(err, s.want.Role, "use a filesystem that overlayfs can work on")}
	if special := (*Unfit)(nil); errors.As(err, &special) {
		f.reason.What, f.reason.Remedy, f.reason.busy = special.What, special.Remedy, special.busy
	}
	return f
}

// examine opens a root and judges it.
func (s Sources) examine(side side, bootID string) finding {
	s.about(side.path)
	root, place, seen := s.look(side.path, bootID)
	f := finding{held: held{root: root, place: place}, uuid: seen.UUID}
	if f.reason, f.wrong = Judge(side.want, seen); f.wrong {
		return f
	}
	var err error
	if f.marker, err = root.Stat(MarkerName); err != nil {
		return f.because(side, err)
	}
	return f
}

// takeLocked makes what was found what is held. It returns the roots that are
// not needed any more, some of them nil.
func (g *Gate) takeLocked(s *side, f finding) (free []*rootdir.Root) {
	s.hangs = f.hangs
	switch {
	case f.hangs && !f.unlocked:
		return nil
	case f.wrong:
		free = []*rootdir.Root{s.root, f.root}
		s.held = held{}
		return free
	case s.root != nil && f.place.Same(s.place):
		// The one held open is as good; others may be using it.
		s.marker = f.marker
		return []*rootdir.Root{f.root}
	}
	free, s.held = []*rootdir.Root{s.root}, f.held
	if s.want.Recorded.UUID != "" || s.want.Recorded.BootID != g.bootID {
		s.want.Recorded.BootID, s.want.Recorded.Device = g.bootID, f.place.Device
	}
	if s.want.Recorded.UUID == "" {
		s.want.Recorded.UUID = f.uuid
	}
	return free
}

// letGo closes a root, nil too.
func (g *Gate) letGo(root *rootdir.Root) {
	if root == nil {
		return
	}
	if err := root.Close(); err != nil {
		g.log.Warn("close a root", zap.String("root", root.Path()), zap.Error(err))
	}
}

// Space is what a root's filesystem has now.
type Space struct {
	rootdir.Space
	// Device is st_dev.
	Device uint64
}

// Space measures the filesystem of a root that is held open. The error is why it
// is unknown.
func (g *Gate) Space(role Role) (Space, error) {
	root, err := g.Root(role)
	if err != nil {
		return Space{}, err
	}
	type answer struct {
		Space
		err error
	}
	a, err := ask(g.askers[role], askLimit, func() (a answer) {
		g.sources.about(root.Path())
		if a.Space.Space, a.err = root.Space(); a.err != nil {
			return a
		}
		place, err := root.Place()
		a.Device, a.err = place.Device, err
		return a
	}, nil)
	if err != nil {
		return Space{}, fmt.Errorf("measure the %s root: %w", role, err)
	}
	return a.Space, a.err
}

// Recorded is what the database should know of a root from now on.
func (g *Gate) Recorded(role Role) Recorded {
	g.mu.RLock()
	defer g.mu.RUnlock()
	return g.sides[role].want.Recorded
}

func errClosed() error {
	return &Closed{Reasons: []Reason{{What: "the snapshotter has been closed", Remedy: "start it again"}}}
}

// Close lets go of both roots; the gate stays closed.
func (g *Gate) Close() error {
	g.mu.Lock()
	g.closed = true
	g.reasons = []Reason{{What: "the snapshotter has been closed", Remedy: "start it again"}}
	var roots []*rootdir.Root
	for _, s := range g.sides {
		roots = append(roots, s.root)
		s.held = held{}
	}
	g.mu.Unlock()
	var errs []error
	for _, root := range roots {
		if root != nil {
			errs = append(errs, root.Close())
		}
	}
	return errors.Join(errs...)
}

// Record describes the filesystem of a root as it is now.
func Record(root *rootdir.Root, sources Sources) (Recorded, error) {
	bootID, err := sources.ReadBootID()
	if err != nil {
		return Recorded{}, err
	}
	place, err := root.Place()
	if err != nil {
		return Recorded{}, err
	}
	uuid, err := UUID(root)
	if err != nil && !errors.Is(err, errors.ErrUnsupported) {
		return Recorded{}, err
	}
	return Recorded{UUID: uuid, BootID: bootID, Device: place.Device}, nil
}
