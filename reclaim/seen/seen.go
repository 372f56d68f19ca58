// Package seen remembers when each image was first seen and last used, over
// restarts. The kubelet forgets it with each restart, and then deletes nothing
// for its minimum age, and evicts pods instead (GAP-26).
//
// Times are compared by the monotonic clock as long as the process lives. What
// was read from the file has only the wall clock's: a time in the future, because
// the clock jumped back, counts as now.
//
// It imports engine/garbage and reclaim/slotfile. Only agent and the lab may import
// it.
package seen

import (
	"cmp"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/cleave-cri/cleave/engine/garbage"
	"github.com/cleave-cri/cleave/reclaim/slotfile"
)

const (
	// FileName is the file's name below the state folder.
	FileName = "images.state"
	// version is that of the file's content.
	version = 1
	// slotBytes is room for some 5 000 images. The file has two such slots.
	slotBytes = 1 << 20
)

// Mention is an image's name as a call spoke it, and when.
type Mention struct {
	Name string    `json:"name"`
	At   time.Time `json:"at"`
}

// Store remembers images. Its methods may be called from several goroutines.
type Store struct {
	mu     sync.Mutex
	images garbage.Images // guarded by mu
	file   *slotfile.File // guarded by mu
	kept   kept           // guarded by mu; what Open read
	note   string
}

// kept is the file's content.
type kept struct {
	// Images by key.
	Images map[string]image `json:"images"`
	// Mentions are those of the last minutes; Complete says that none came after
	// them.
	Mentions []Mention `json:"mentions,omitempty"`
	Complete bool      `json:"complete,omitempty"`
}

type image struct {
	FirstSeen time.Time `json:"firstSeen"`
	LastUsed  time.Time `json:"lastUsed,omitzero"`
}

// Open reads the file in the state folder, or makes it and takes its space. A
// file that can't be understood is no error: all images are seen for the first
// time then, so that none goes early, and Note says so.
func Open(stateDir string) (*Store, error) {
	s := &Store{images: garbage.Images{}}
	var note string
	var err error
	if s.file, note, err = slotfile.Restore(filepath.Join(stateDir, FileName), slotBytes, version, &s.kept); err != nil {
		return nil, fmt.Errorf("remember images: %w", err)
	}
	if note != "" {
		s.note, s.kept = "when images were first seen and last used is forgotten, and begins anew: "+note, kept{}
		return s, nil
	}
	now := time.Now()
	for key, i := range s.kept.Images {
		s.images[key] = garbage.Image{FirstSeen: notAfter(i.FirstSeen, now), LastUsed: notAfter(i.LastUsed, now)}
	}
	return s, nil
}

// notAfter is t, or now if t is later or never was.
func notAfter(t, now time.Time) time.Time {
	if t.After(now) {
		return now
	}
	return t
}

// Note says why what was remembered is lost; empty if nothing is.
func (s *Store) Note() string { return s.note }

// Mentions are what the process before saw, and whether it saw all.
func (s *Store) Mentions() ([]Mention, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.kept.Mentions), s.kept.Complete
}

// Look remembers what is listed and who uses it, as garbage.Images.Look does, and
// returns a copy of what is remembered.
func (s *Store) Look(list []garbage.Listed, users []garbage.ImageUser, began, now time.Time) (garbage.Images, map[string]bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, i := range s.images {
		// Only a clock that jumped while it was read from the file can do that.
		i.FirstSeen, i.LastUsed = notAfter(i.FirstSeen, now), notAfter(i.LastUsed, now)
		s.images[key] = i
	}
	next, inUse := s.images.Look(list, users, began, now)
	out := make(garbage.Images, len(next))
	for key, i := range next {
		if before := s.images[key]; before.ID == "" {
			// From the file, where it has no name but its key.
			i.ID, i.Handler = listedAs(list, key)
		}
		next[key], out[key] = i, i
	}
	s.images = next
	return out, inUse
}

func listedAs(list []garbage.Listed, key string) (id, handler string) {
	for _, l := range list {
		if (garbage.Image{ID: l.ID, Handler: l.Handler}).Key() == key {
			return l.ID, l.Handler
		}
	}
	return key, ""
}

// Save writes what is remembered, in space that was taken before. complete says
// that nobody can name an image any more before the next Open.
func (s *Store) Save(mentions []Mention, complete bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	// An image that does not fit is seen for the first time after a restart, so
	// the youngest are left out.
	keys := make([]string, 0, len(s.images))
	for key := range s.images {
		keys = append(keys, key)
	}
	slices.SortFunc(keys, func(a, b string) int {
		return cmp.Or(s.images[a].FirstSeen.Compare(s.images[b].FirstSeen), cmp.Compare(a, b))
	})
	for {
		k := kept{Images: make(map[string]image, len(keys)), Mentions: mentions, Complete: complete}
		for _, key := range keys {
			i := s.images[key]
			k.Images[key] = image{FirstSeen: i.FirstSeen.UTC(), LastUsed: i.LastUsed.UTC()}
		}
		value, err := json.Marshal(k)
		if err != nil {
			return fmt.Errorf("remember images: %w", err)
		}
		if len(value) <= s.file.MaxBytes() {
			return s.file.Save(value, version)
		}
		switch {
		case len(keys) > 0:
			keys = keys[:len(keys)*3/4]
		case complete || len(mentions) > 0:
			mentions, complete = nil, false
		default:
			return fmt.Errorf("remember images: %w", slotfile.ErrTooLarge)
		}
	}
}

// Close closes the file. Save first.
func (s *Store) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.file.Close()
}
