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

// Gate holds each root open while it is the right one, and lets go of it when it
// is not: a root that was unmounted can then really go. It is open while both
// roots are right.
type Gate struct {
	sources Sources
	bootID  string
	log     *zap.Logger
	// suits says whether a right root can hold layers; it is asked each time
	// that a root is taken anew.
	suits func(Role, *rootdir.Root) error
	// opened holds a value when the gate has opened since somebody took one.
	opened chan struct{}

	mu      sync.RWMutex
	sides   map[Role]*side // guarded by mu
	reasons []Reason       // guarded by mu; empty: open
	since   time.Time      // guarded by mu; when it was last opened or closed
}

// side is one root.
type side struct {
	want Want
	path string
	// root, place and marker are what was held right last; root is nil else.
	root   *rootdir.Root
	place  rootdir.Place
	marker rootdir.Place
}

// NewGate makes a gate, closed until Verify says otherwise. The roots' paths
// and what they must be are by role.
func NewGate(paths map[Role]string, want map[Role]Want, sources Sources, log *zap.Logger, suits func(Role, *rootdir.Root) error) (*Gate, error) {
	bootID, err := sources.ReadBootID()
	if err != nil {
		return nil, fmt.Errorf("read the ID of this boot: %w", err)
	}
	g := &Gate{sources: sources, bootID: bootID, log: log, suits: suits, opened: make(chan struct{}, 1), sides: map[Role]*side{}, since: time.Now()}
	for role, path := range paths {
		g.sides[role] = &side{want: want[role], path: path}
	}
	g.reasons = []Reason{{What: "the roots have not been looked at yet", Remedy: "wait"}}
	return g, nil
}

// Roles are the two roles in a fixed order.
func Roles() []Role { return []Role{Image, Container} }

// Root is the open root, or why there is none.
func (g *Gate) Root(role Role) (*rootdir.Root, error) {
	g.mu.RLock()
	defer g.mu.RUnlock()
	if r := g.sides[role].root; r != nil {
		return r, nil
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
	g.mu.RLock()
	same := len(g.reasons) == 0
	for _, s := range g.sides {
		same = same && s.unchanged()
	}
	g.mu.RUnlock()
	if same {
		return nil
	}
	return g.Verify()
}

func (s *side) unchanged() bool {
	if s.root == nil {
		return false
	}
	now, err := rootdir.At(s.path)
	if err != nil || !now.Same(s.place) {
		return false
	}
	marker, err := s.root.Stat(MarkerName)
	return err == nil && marker.Same(s.marker) && marker.Changed == s.marker.Changed
}

// Verify looks at everything anew, and opens or closes the gate.
func (g *Gate) Verify() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	var reasons []Reason
	for _, role := range Roles() {
		reasons = append(reasons, g.verifyLocked(role)...)
	}
	if !slices.Equal(reasons, g.reasons) {
		g.since = time.Now()
		if len(reasons) == 0 {
			g.log.Info("the roots are the right ones")
			select {
			case g.opened <- struct{}{}:
			default: // nobody has looked since the last time
			}
		} else {
			g.log.Error("the roots are not those of this snapshotter; nothing is written or deleted", zap.Stringers("reasons", reasons))
		}
	}
	g.reasons = reasons
	if len(reasons) > 0 {
		return &Closed{Reasons: slices.Clone(reasons)}
	}
	return nil
}

func (g *Gate) verifyLocked(role Role) []Reason {
	s := g.sides[role]
	root, place, seen := g.sources.look(s.path, g.bootID)
	reasons := Judge(s.want, seen)
	var marker rootdir.Place
	if len(reasons) == 0 {
		var err error
		if marker, err = root.Stat(MarkerName); err == nil && (s.root == nil || !place.Same(s.place)) {
			err = g.suits(role, root)
		}
		if err != nil {
			reasons = append(reasons, Reason{Root: s.path, What: err.Error(), Remedy: "use a filesystem that overlayfs can work on"})
		}
	}
	if len(reasons) == 0 && s.root != nil && place.Same(s.place) {
		// The one held open is as good; others may be using it.
		s.marker = marker
		g.letGo(root)
		return nil
	}
	if s.root != nil {
		g.letGo(s.root)
		s.root = nil
	}
	if len(reasons) > 0 {
		if root != nil {
			g.letGo(root)
		}
		return reasons
	}
	s.root, s.place, s.marker = root, place, marker
	if s.want.Recorded.UUID != "" || s.want.Recorded.BootID != g.bootID {
		s.want.Recorded.BootID, s.want.Recorded.Device = g.bootID, place.Device
	}
	if s.want.Recorded.UUID == "" {
		s.want.Recorded.UUID = seen.UUID
	}
	return nil
}

func (g *Gate) letGo(root *rootdir.Root) {
	if err := root.Close(); err != nil {
		g.log.Warn("close a root", zap.String("root", root.Path()), zap.Error(err))
	}
}

// Recorded is what the database should know of a root from now on.
func (g *Gate) Recorded(role Role) Recorded {
	g.mu.RLock()
	defer g.mu.RUnlock()
	return g.sides[role].want.Recorded
}

// Close lets go of both roots; the gate stays closed.
func (g *Gate) Close() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	var errs []error
	for _, s := range g.sides {
		if s.root != nil {
			errs = append(errs, s.root.Close())
			s.root = nil
		}
	}
	g.reasons = []Reason{{What: "the snapshotter has been closed", Remedy: "start it again"}}
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
