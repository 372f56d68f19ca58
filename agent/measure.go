package agent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"github.com/cleave-cri/cleave/agent/owners"
	"github.com/cleave-cri/cleave/fsstats/index"
)

// seenFiles are the figures of single files as the kubelet looks at them: those
// directly in log folders (ACC-9, ACC-10) and the pods' etc-hosts (ACC-22). They
// are looked at whenever the part that they belong to is measured.
type seenFiles struct {
	measure index.MeasureFunc

	mu   sync.Mutex
	seen map[index.Key]index.Figure // guarded by mu
}

func newSeenFiles(measure index.MeasureFunc) *seenFiles {
	return &seenFiles{measure: measure, seen: map[index.Key]index.Figure{}}
}

// of gives the figure of the files of a part; ok is false if there is none.
func (s *seenFiles) of(key index.Key) (f index.Figure, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f, ok = s.seen[key]
	return f, ok
}

// forget drops the figures of parts that are gone.
func (s *seenFiles) forget(there func(index.Key) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key := range s.seen {
		if !there(key) {
			delete(s.seen, key)
		}
	}
}

// Measure is the index's MeasureFunc.
func (s *seenFiles) Measure(ctx context.Context, what index.Subject) (index.Figure, error) {
	f, err := s.measure(ctx, what)
	if err != nil || what.Key.Kind != owners.Pod {
		return f, err
	}
	var names []string
	switch part := what.Key.Part; {
	case part == owners.Rest:
		names = []string{etcHosts}
	case part == owners.Logs || strings.HasPrefix(part, owners.ContainerLogs("")):
		if names, err = filesIn(what.Path); err != nil {
			return f, unlessGone(err)
		}
	default:
		return f, nil
	}
	bytes, inodes, err := eachFile(what.Path, names)
	if err != nil {
		return f, fmt.Errorf("look at the files of %s: %w", what.Path, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen[what.Key] = index.Figure{Bytes: bytes, Inodes: inodes, Started: f.Started, Finished: f.Finished, How: f.How}
	return f, nil
}

// etcHosts is the kubelet's file for a pod, in the pod's folder.
const etcHosts = "etc-hosts"

// filesIn lists what is in a folder and is no folder.
func filesIn(folder string) (names []string, _ error) {
	entries, err := os.ReadDir(folder)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if !e.IsDir() {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// eachFile adds up files, each for itself: a file with two names counts twice
// (ACC-15), a symlink is itself (ACC-18). One that has gone meanwhile is left out,
// where the kubelet drops the whole figure (ACC-11).
func eachFile(folder string, names []string) (bytes, inodes int64, _ error) {
	for _, name := range names {
		info, err := os.Lstat(filepath.Join(folder, name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return 0, 0, err
		}
		st, ok := info.Sys().(*syscall.Stat_t)
		if !ok {
			return 0, 0, fmt.Errorf("stat %s: no blocks in the answer", name)
		}
		bytes += 512 * st.Blocks
		inodes++
	}
	return bytes, inodes, nil
}
