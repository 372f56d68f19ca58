// Package peaks remembers the most that each workload's pods have used of local storage on this node, over restarts of cleave, and says
// what they should request: a pod that uses more than it requests is the first to go when a disk is short (RANK-9), and one without a
// request is that always.
//
// It keeps figures and does arithmetic; its file is the only I/O. It imports agent/page and reclaim/slotfile; only agent may import it.
package peaks

import (
	"cmp"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/cleave-cri/cleave/reclaim/slotfile"
)

const (
	// FileName is the file's name below the state folder.
	FileName = "peaks.state"
	// version is that of the file's content.
	version = 1
	// slotBytes is room for maxWorkloads with long names. The file has two such slots.
	slotBytes = 512 << 10
	// maxWorkloads bounds how many are remembered; the one that was not seen for longest makes room. maxContainers bounds those of each.
	maxWorkloads, maxContainers = 500, 20
	// keepFor is how long a workload is remembered after its last pod was seen.
	keepFor = 30 * 24 * time.Hour
	// seenEvery is how often it is written down that nothing but the time has changed.
	seenEvery = 10 * time.Minute
)

// Use is what one pod uses now.
type Use struct {
	// Workload is what would make the pod anew, such as "ReplicaSet shop/web"; else "Pod shop/web".
	Workload string
	// RequestBytes and LimitBytes are the pod's of ephemeral storage; nil if it says nothing.
	RequestBytes, LimitBytes *int64
	// Bytes is the pod's local ephemeral storage as the kubelet counts it (ACC-1).
	Bytes uint64
	// Containers are the writable layers and logs, by container.
	Containers map[string]uint64
}

// Workload is what is remembered.
type Workload struct {
	Name string `json:"name"`
	// RequestBytes and LimitBytes are the newest pod's; nil if it says nothing.
	RequestBytes *int64 `json:"requestBytes,omitempty"`
	LimitBytes   *int64 `json:"limitBytes,omitempty"`
	// PeakBytes is the most that one pod used, at PeakAt.
	PeakBytes uint64    `json:"peakBytes"`
	PeakAt    time.Time `json:"peakAt"`
	// FirstSeen and LastSeen say between which times pods were looked at. Pods is how many there are now.
	FirstSeen time.Time `json:"firstSeen"`
	LastSeen  time.Time `json:"lastSeen"`
	Pods      int       `json:"pods"`
	// Containers are the peaks of writable layers and logs, by container; what is not theirs is in volumes.
	Containers map[string]uint64 `json:"containers,omitempty"`
}

// Store remembers. Its methods may be called from several goroutines.
type Store struct {
	mu        sync.Mutex
	workloads map[string]*Workload // guarded by mu
	changed   bool                 // guarded by mu
	saved     time.Time            // guarded by mu
	file      *slotfile.File       // guarded by mu
	note      string
}

// Open reads the file in the state folder, or makes it and takes its space. A file that can't be understood is no error: peaks begin
// anew, and Note says so.
func Open(stateDir string) (*Store, error) {
	var list []Workload
	f, note, err := slotfile.Restore(filepath.Join(stateDir, FileName), slotBytes, version, &list)
	if err != nil {
		return nil, fmt.Errorf("remember peaks: %w", err)
	}
	s := &Store{workloads: map[string]*Workload{}, file: f}
	if note != "" {
		s.note, list = "the peaks of workloads are forgotten, and begin anew: "+note, nil
	}
	for i := range list {
		w := &list[i]
		if w.Name != "" && len(s.workloads) < maxWorkloads {
			w.Pods = 0 // until they are seen
			s.workloads[w.Name] = w
		}
	}
	return s, nil
}

// Note says why what was remembered is lost; empty if nothing is.
func (s *Store) Note() string { return s.note }

// Add takes what all pods use at a time.
func (s *Store) Add(uses []Use, now time.Time) {
	now = now.UTC()
	s.mu.Lock()
	defer s.mu.Unlock()
	if now.Sub(s.saved) >= seenEvery {
		s.changed = true // for when workloads were seen last
	}
	for name, w := range s.workloads {
		w.Pods = 0
		w.notAfter(now)
		if now.Sub(w.LastSeen) > keepFor {
			delete(s.workloads, name)
			s.changed = true
		}
	}
	for _, u := range uses {
		w := s.workloads[u.Workload]
		if w == nil {
			s.makeRoomLocked()
			w = &Workload{Name: u.Workload, FirstSeen: now, PeakAt: now}
			s.workloads[u.Workload], s.changed = w, true
		}
		w.Pods++
		w.LastSeen = now
		w.RequestBytes, w.LimitBytes = u.RequestBytes, u.LimitBytes
		if u.Bytes > w.PeakBytes {
			w.PeakBytes, w.PeakAt, s.changed = u.Bytes, now, true
		}
		for name, bytes := range u.Containers {
			if old, ok := w.Containers[name]; (ok || len(w.Containers) < maxContainers) && bytes >= old {
				if w.Containers == nil {
					w.Containers = map[string]uint64{}
				}
				w.Containers[name] = bytes
			}
		}
	}
}

// notAfter takes times that are to come, because the clock was set back, for now: else a workload would be remembered, and written down
// as the one seen last, until that time comes.
func (w *Workload) notAfter(now time.Time) {
	for _, t := range []*time.Time{&w.FirstSeen, &w.LastSeen, &w.PeakAt} {
		if t.After(now) {
			*t = now
		}
	}
}

// makeRoomLocked forgets the workload that was not seen for longest, if there are too many.
func (s *Store) makeRoomLocked() {
	if len(s.workloads) < maxWorkloads {
		return
	}
	var oldest *Workload
	for _, w := range s.workloads {
		if oldest == nil || cmp.Or(w.LastSeen.Compare(oldest.LastSeen), cmp.Compare(w.Name, oldest.Name)) < 0 {
			oldest = w
		}
	}
	delete(s.workloads, oldest.Name)
}

// List is what is remembered, those that should change most urgently first: above their request by most, then by name.
func (s *Store) List() []Workload {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]Workload, 0, len(s.workloads))
	for _, w := range s.workloads {
		c := *w
		c.Containers = make(map[string]uint64, len(w.Containers))
		for name, bytes := range w.Containers {
			c.Containers[name] = bytes
		}
		out = append(out, c)
	}
	slices.SortFunc(out, func(a, b Workload) int { return cmp.Or(cmp.Compare(b.over(), a.over()), cmp.Compare(a.Name, b.Name)) })
	return out
}

// Save writes what is remembered, in space that was taken before, if there is news. What does not fit was not seen for longest.
func (s *Store) Save() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.changed {
		return nil
	}
	list := make([]*Workload, 0, len(s.workloads))
	for _, w := range s.workloads {
		list = append(list, w)
	}
	slices.SortFunc(list, func(a, b *Workload) int {
		return cmp.Or(b.LastSeen.Compare(a.LastSeen), cmp.Compare(a.Name, b.Name))
	})
	for {
		value, err := json.Marshal(list)
		if err != nil {
			return fmt.Errorf("remember peaks: %w", err)
		}
		if len(value) <= s.file.MaxBytes() || len(list) == 0 {
			if err := s.file.Save(value, version); err != nil {
				return fmt.Errorf("remember peaks: %w", err)
			}
			s.changed, s.saved = false, time.Now()
			return nil
		}
		list = list[:len(list)*3/4]
	}
}

// Close closes the file. Save first.
func (s *Store) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.file.Close()
}

// over is by how much the peak is above the request; what is not requested counts as 0 to the kubelet.
func (w Workload) over() int64 {
	var request int64
	if w.RequestBytes != nil {
		request = *w.RequestBytes
	}
	return int64(min(w.PeakBytes, 1<<62)) - request //nolint:gosec // bounded
}

// How much a suggestion is above the peak, and its steps. A third of a pod's peak is a day's noise; a limit ends a pod, so it is farther off.
const (
	requestPercent, limitPercent = 120, 200
	step                         = int64(16) << 20
	// young is how long a workload has to have been seen for a suggestion to lower anything.
	young = 24 * time.Hour
)

// Verdict says in a word what to do about a workload's request.
type Verdict string

// The verdicts.
const (
	// Set: there is no request, so that whatever the pod uses is more than that.
	Set Verdict = "set"
	// Raise: pods have used more than they request.
	Raise Verdict = "raise"
	// RaiseLimit: pods have come near their limit, above which they are evicted, whatever is free.
	RaiseLimit Verdict = "raise limit"
	// Lower: more than twice as much is requested as would do.
	Lower Verdict = "lower"
	// Keep: it fits.
	Keep Verdict = "keep"
)

// Suggestion is what a workload should say.
type Suggestion struct {
	Verdict Verdict `json:"verdict"`
	// RequestBytes is enough for the peak and a fifth more. LimitBytes is twice the peak, or as much as there is now if that is more;
	// nil where there is none: who has no limit needs none.
	RequestBytes int64  `json:"requestBytes"`
	LimitBytes   *int64 `json:"limitBytes,omitempty"`
}

// Suggest says what the workload should request.
func (w Workload) Suggest() Suggestion {
	s := Suggestion{Verdict: Keep, RequestBytes: above(w.PeakBytes, requestPercent)}
	peak := int64(min(w.PeakBytes, 1<<62)) //nolint:gosec // bounded
	near := false
	if w.LimitBytes != nil {
		near = peak > *w.LimitBytes/10*9
		limit := *w.LimitBytes
		if near {
			limit = max(limit, above(w.PeakBytes, limitPercent))
		}
		// The API server takes no request above the limit.
		limit = max(limit, s.RequestBytes)
		s.LimitBytes = &limit
	}
	switch {
	case w.RequestBytes == nil:
		s.Verdict = Set
	case peak > *w.RequestBytes:
		s.Verdict = Raise
	case near:
		s.Verdict = RaiseLimit
	case *w.RequestBytes > 2*s.RequestBytes && w.LastSeen.Sub(w.FirstSeen) >= young:
		s.Verdict = Lower
	default:
		s.RequestBytes = *w.RequestBytes
	}
	if s.Verdict == RaiseLimit {
		s.RequestBytes = *w.RequestBytes
	}
	return s
}

// above is a share of an amount, rounded up to a whole step, and at least one.
func above(bytes uint64, percent int64) int64 {
	whole := int64(min(bytes, 1<<62/uint64(percent))) * percent / 100 //nolint:gosec // bounded
	return max(1, (whole+step-1)/step) * step
}
