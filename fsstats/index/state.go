package index

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"
)

const (
	// stateVersion is that of the state file. Another one is not read: its figures
	// are cheap to measure again.
	stateVersion = 1
	// maxStateBytes is far above what ten thousand parts need.
	maxStateBytes = 64 << 20
)

// state is the state file.
type state struct {
	Version int         `json:"version"`
	SavedAt time.Time   `json:"savedAt"`
	Spaces  []keptSpace `json:"spaces"`
	Parts   []keptPart  `json:"parts"`
}

// keptSpace is what was used on a filesystem, and when that was last seen to move.
type keptSpace struct {
	Space   Space     `json:"space"`
	Changed time.Time `json:"changed"`
}

// keptPart is a figure that survives a restart.
type keptPart struct {
	Key      Key           `json:"key"`
	Path     string        `json:"path"`
	FS       FS            `json:"fs"`
	Figure   Figure        `json:"figure"`
	Interval time.Duration `json:"intervalNanoseconds"`
}

// load reads a state file. One that is missing is an empty one. With an error
// there is nothing to go on with, and it says why.
func load(path string) (map[Key]keptPart, map[FS]keptSpace, error) {
	content, err := readBounded(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, fmt.Errorf("read the usage index's state, which starts fresh now: %w", err)
	}
	s, err := decode(content)
	if err != nil {
		return nil, nil, fmt.Errorf("read the usage index's state in %s, which starts fresh now: %w", path, err)
	}
	now := time.Now()
	if s.SavedAt.After(now) {
		return nil, nil, fmt.Errorf("read the usage index's state in %s, which starts fresh now: it is of %s, and the clock was set back since",
			path, s.SavedAt.UTC().Format("2006-01-02 15:04:05Z"))
	}
	kept := make(map[Key]keptPart, len(s.Parts))
	for _, p := range s.Parts {
		f := &p.Figure
		f.Started, f.Finished, f.Proven = monotonic(f.Started, now), monotonic(f.Finished, now), monotonic(f.Proven, now)
		kept[p.Key] = p
	}
	spaces := make(map[FS]keptSpace, len(s.Spaces))
	for _, space := range s.Spaces {
		space.Changed = monotonic(space.Changed, now)
		spaces[space.Space.FS] = space
	}
	return kept, spaces, nil
}

// monotonic is the same time as one of this process, whose age the clock does not
// change when it is set (package time, monotonic clocks).
func monotonic(t, now time.Time) time.Time {
	if t.IsZero() {
		return t
	}
	return now.Add(t.Sub(now))
}

func readBounded(path string) (content []byte, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close() //nolint:errcheck // only read
	content, err = io.ReadAll(io.LimitReader(f, maxStateBytes+1))
	if err == nil && len(content) > maxStateBytes {
		err = fmt.Errorf("%s has more than %d bytes", path, maxStateBytes)
	}
	return content, err
}

// decode is strict: a file that is not just what encode writes is not trusted.
func decode(content []byte) (state, error) {
	var head struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(content, &head); err != nil {
		return state{}, err
	}
	if head.Version != stateVersion {
		return state{}, fmt.Errorf("it has version %d, this program writes %d", head.Version, stateVersion)
	}
	d := json.NewDecoder(bytes.NewReader(content))
	d.DisallowUnknownFields()
	var s state
	if err := d.Decode(&s); err != nil {
		return state{}, err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return state{}, errors.New("there is something behind its end")
	}
	for _, p := range s.Parts {
		if f := p.Figure; f.Bytes < 0 || f.Inodes < 0 || f.Started.After(s.SavedAt) || f.Finished.Before(f.Started) || f.How == "" || p.Interval < 0 {
			return state{}, fmt.Errorf("the figure of %s can't be one", p.Key)
		}
	}
	return s, nil
}

// save writes the state file, if there is to be one.
func (x *Index) save() error {
	if x.opt.StateFile == "" {
		return nil
	}
	s := state{Version: stateVersion, SavedAt: time.Now()}
	x.mu.Lock()
	for _, key := range x.book.keys() {
		if p := x.book.parts[key]; p.figure != nil && !p.stale && !p.figure.Partial {
			s.Parts = append(s.Parts, keptPart{Key: key, Path: p.path, FS: p.fs, Figure: *p.figure, Interval: p.interval})
		}
	}
	// Figures that nobody has asked for yet may be asked for after the next start,
	// if that comes soon.
	for _, p := range x.book.kept {
		if s.SavedAt.Sub(p.Figure.Finished) < x.opt.MaxAge {
			s.Parts = append(s.Parts, p)
		}
	}
	for _, fs := range slices.Sorted(maps.Keys(x.book.spaces)) {
		of := x.book.spaces[fs]
		s.Spaces = append(s.Spaces, keptSpace{Space: of.last, Changed: of.changed})
	}
	x.mu.Unlock()
	slices.SortFunc(s.Parts, func(a, b keptPart) int { return a.Key.compare(b.Key) })
	content, err := json.Marshal(s)
	if err == nil {
		err = replace(x.opt.StateFile, content)
	}
	if err != nil {
		return fmt.Errorf("write the usage index's state: %w", err)
	}
	return nil
}

// replace writes a file so that after a crash there is the old one or the new one.
func replace(path string, content []byte) (err error) {
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, filepath.Base(path)+".new-*") // 0600
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	_, err = f.Write(content)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err = os.Rename(f.Name(), path); err != nil {
		return err
	}
	d, errDir := os.Open(dir)
	if errDir != nil {
		return nil //nolint:nilerr // the new file is there; only a crash right now could undo that
	}
	_ = errors.Join(d.Sync(), d.Close()) //nolint:errcheck // ditto
	return nil
}
