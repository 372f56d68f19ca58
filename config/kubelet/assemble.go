package kubelet

import (
	"path/filepath"
)

// files is how the kubelet sees files: it gives the file of --config, which is
// nil if there is none, and the drop-ins in their order.
type files interface {
	config(name string) (file, error)
	dropIns(folder string) ([]file, error)
}

// assemble puts settings together as cmd/kubelet/app/server.go of v1.37.2 does:
// defaults, the file, the drop-ins, then the flags once more over all.
func assemble(args []string, fs files) (Settings, error) {
	// A first reading, as the kubelet's own, to know about the files.
	var probe Settings
	line, err := parseArgs(args, schema(&probe))
	if err != nil {
		return Settings{}, err
	}

	var s Settings
	fields := schema(&s)
	fill := func() {
		for _, f := range fields {
			f.slot.fill()
		}
	}
	if line.config != "" {
		f, err := fs.config(line.config)
		if err != nil {
			return Settings{}, err
		}
		s.Sources = append(s.Sources, f.source)
		root, err := f.tree()
		if err != nil {
			return Settings{}, err
		}
		if err := decodeTree(root, fields, false); err != nil {
			return Settings{}, err
		}
		fill()
		s.resolve(filepath.Dir(f.source.Path))
		s.fillEvictionHard()
	} else {
		s.ReadOnlyPort = Setting[int32]{legacyReadOnlyPort, standardOrigin}
	}
	fill()

	if line.configDir != "" {
		dropIns, err := fs.dropIns(line.configDir)
		if err != nil {
			return Settings{}, err
		}
		for _, f := range dropIns {
			s.Sources = append(s.Sources, f.source)
		}
		if err := s.overlay(fields, dropIns); err != nil {
			return Settings{}, err
		}
		fill()
	}

	if _, err := parseArgs(args, fields); err != nil {
		return Settings{}, err
	}
	s.UnknownFlags = line.unknown
	return s, nil
}

// fillEvictionHard adds the default thresholds, which the kubelet does for the
// file of --config only (THR-14, THR-15).
func (s *Settings) fillEvictionHard() {
	given := s.EvictionHard.From.IsSet()
	if given && !s.MergeDefaultEviction.Value {
		return
	}
	if !given {
		s.EvictionHard = Map[string]{Entries: map[string]Setting[string]{}, From: standardOrigin}
	}
	for signal, threshold := range defaultHard() {
		if _, ok := s.EvictionHard.Entries[signal]; !ok {
			s.EvictionHard.Entries[signal] = Setting[string]{threshold, standardOrigin}
		}
	}
}

// overlay lays the drop-ins over s. The kubelet writes what it has as JSON for
// that, so that even a folder without drop-ins turns an empty list into one that
// was not given.
func (s *Settings) overlay(fields []field, dropIns []file) error {
	base := &node{kind: object}
	for _, f := range fields {
		if f.key == "" {
			continue
		}
		if n := f.slot.tree(); n != nil {
			base.entries = append(base.entries, entry{f.key, n})
		}
	}
	for _, f := range dropIns {
		patch, err := f.tree()
		if err != nil {
			return err
		}
		base = merge(base, patch)
	}
	for _, f := range fields {
		if f.key != "" {
			f.slot.reset()
		}
	}
	return decodeTree(base, fields, true)
}
