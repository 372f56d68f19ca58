// Package fanotify tells who changes files on a filesystem, as the kernel reports
// it: a hint for fsstats/index that also moves when files are deleted, which no
// counter of a process does. It imports nothing else of this module; the agent may
// import it. It is an option: whoever does not make a Watcher pays nothing.
//
// # What is reported
//
// One mark on the whole filesystem (fanotify_mark(2), FAN_MARK_FILESYSTEM) for names
// that come, go or move, and for files that were open for writing and are closed.
// The kernel tells the directory of each, by its file handle, and not the name: what
// happens in one directory then is one event until it is read. The directory is an
// owner's if it is below the owner's folder.
//
// # What is not
//
//   - A file that is written to and stays open, and stores into a mapped file, until
//     it is closed (CTD-122). Use the hint beside fsstats/hint's, not instead of it.
//   - Before Linux 6.5, writes through overlayfs: the names that come and go are
//     reported, the closing is not (CTD-121).
//   - What happened in a directory that was gone before its event was read. That it
//     went is reported for the directory above.
//
// A hint orders work and proves nothing.
package fanotify

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
)

// ErrNotSupported is what is wrong where the kernel, the filesystem or our rights
// do not allow to watch it. The error that wraps it says which.
var ErrNotSupported = errors.New("watching this filesystem is not supported")

const (
	// bufferBytes is how much is read at once: some 1 000 events.
	bufferBytes = 64 << 10
	// mostDirectories is how many directories are remembered with their owner, at
	// some 120 bytes each. When there are more, all are forgotten.
	mostDirectories = 1 << 15
	// gather is how long events are left to gather after some were read: those of one
	// directory become one, and the reader wakes at most twenty times a second.
	gather = 50 * time.Millisecond
)

// Owner is somebody whose folders are watched.
type Owner struct{ Kind, ID string }

// Stats counts what was done since the start.
type Stats struct {
	// Events were read; Stale are those of directories that were gone by then,
	// Others those of directories of nobody.
	Events, Stale, Others int64
	// Overflows counts how often the kernel had no room for more events.
	Overflows int64
	// Lookups counts directories of which the owner had to be found out.
	Lookups int64
}

// Watcher watches one filesystem. Its methods may be called from several goroutines.
type Watcher struct {
	kernel *kernel

	mu sync.Mutex
	// folders are the owners' folders, in the order of their paths; guarded by mu, as
	// is all below.
	folders []folder
	// counters counts each owner's events, everyone those that may be anybody's.
	counters map[Owner]uint64
	everyone uint64
	// directories are those of which the owner is known, by handle. It is cleared
	// where it may be wrong: when a directory has moved or folders are set.
	directories map[string]place
	// set counts calls of SetFolders.
	set   int
	stats Stats
	ended bool
}

type folder struct {
	path  string
	owner Owner
}

// place is whose a directory is; nobody's if not known.
type place struct {
	owner Owner
	known bool
}

// Watch begins to watch the filesystem of a folder. Events are kept by the kernel
// until Run reads them, up to its limit (fs.fanotify.max_queued_events, 16 384).
// An error wraps [ErrNotSupported] where that is why.
func Watch(path string) (*Watcher, error) {
	k, err := watch(path)
	if err != nil {
		return nil, fmt.Errorf("watch the filesystem of %s: %w", path, err)
	}
	return &Watcher{kernel: k, counters: map[Owner]uint64{}, directories: map[string]place{}}, nil
}

// SetFolders says whose folders there are from now on: absolute paths without
// symlinks, as they are seen by the mount that Watch was given a path of. A folder in
// another one's is the inner one's.
func (w *Watcher) SetFolders(folders map[string]Owner) {
	sorted := make([]folder, 0, len(folders))
	for path, owner := range folders {
		sorted = append(sorted, folder{strings.TrimSuffix(path, "/"), owner})
	}
	slices.SortFunc(sorted, func(x, y folder) int { return strings.Compare(x.path, y.path) })
	owners := map[Owner]bool{}
	for _, f := range sorted {
		owners[f.owner] = true
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.folders = sorted
	w.set++
	clear(w.directories)
	for owner := range w.counters {
		if !owners[owner] {
			delete(w.counters, owner)
		}
	}
	for owner := range owners {
		w.counters[owner] += 0
	}
}

// Written gives a number that moves when something was changed in an owner's
// folders. ok is false for an owner without folders, and after Run has ended.
func (w *Watcher) Written(kind, id string) (counter uint64, ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	counter, ok = w.counters[Owner{kind, id}]
	return counter + w.everyone, ok && !w.ended
}

// Stats gives what was done so far.
func (w *Watcher) Stats() Stats {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.stats
}

// Run reads events until ctx ends, and ends the watch. The error is nil then.
func (w *Watcher) Run(ctx context.Context) error {
	defer func() {
		w.mu.Lock()
		w.ended = true
		w.mu.Unlock()
	}()
	stop := context.AfterFunc(ctx, w.kernel.interrupt)
	defer func() {
		stop()
		w.kernel.close()
	}()
	buffer := make([]byte, bufferBytes)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		n, err := w.kernel.read(buffer)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read what has changed on a filesystem: %w", err)
		}
		w.take(buffer[:n])
		if n > bufferBytes/2 {
			continue // there is more
		}
		timer.Reset(gather)
		select {
		case <-timer.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// Close ends a watch that Run was not called for.
func (w *Watcher) Close() { w.kernel.close() }

// take counts events.
func (w *Watcher) take(events []byte) {
	for len(events) > 0 {
		e, size, ok := parseEvent(events)
		if !ok { // can only be the kernel's fault: nothing is known of the rest
			w.all(func(*Stats) {})
			return
		}
		events = events[size:]
		switch {
		case e.overflow:
			w.all(func(s *Stats) { s.Overflows++ })
		case e.moved && e.directory:
			// What is below it is perhaps another owner's now.
			w.mu.Lock()
			clear(w.directories)
			w.mu.Unlock()
			w.count(e.handle)
		default:
			w.count(e.handle)
		}
	}
}

// all notes something that may be anybody's.
func (w *Watcher) all(note func(*Stats)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.everyone++
	w.stats.Events++
	note(&w.stats)
}

// count counts an event in a directory.
func (w *Watcher) count(handle []byte) {
	w.mu.Lock()
	p, ok := w.directories[string(handle)]
	set := w.set
	w.mu.Unlock()
	gone := false
	if !ok {
		var path string
		path, gone = w.kernel.pathOf(handle)
		w.mu.Lock()
		p = ownerOf(w.folders, path)
		w.mu.Unlock()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stats.Events++
	if !ok {
		w.stats.Lookups++
	}
	if gone {
		w.stats.Stale++
		return
	}
	if !ok && set == w.set {
		if len(w.directories) >= mostDirectories {
			clear(w.directories)
		}
		w.directories[string(handle)] = p
	}
	if !p.known {
		w.stats.Others++
		return
	}
	if _, there := w.counters[p.owner]; there {
		w.counters[p.owner]++
	}
}

// ownerOf finds the owner of a path: that of the innermost folder that it is, or is
// below of.
func ownerOf(folders []folder, path string) place {
	for path = strings.TrimSuffix(path, "/"); path != ""; {
		i, ok := slices.BinarySearchFunc(folders, path, func(f folder, path string) int { return strings.Compare(f.path, path) })
		if ok {
			return place{folders[i].owner, true}
		}
		path = path[:max(strings.LastIndexByte(path, '/'), 0)]
	}
	return place{}
}

// event is one of the kernel's.
type event struct {
	overflow, moved, directory bool
	// handle is the directory's struct file_handle; nil if there is none.
	handle []byte
}

// parseEvent takes the first event off b: struct fanotify_event_metadata and the
// records behind it (fanotify(7)).
func parseEvent(b []byte) (e event, size int, ok bool) {
	const head, recordHead, fsid, handleHead = 24, 4, 8, 8
	if len(b) < head {
		return event{}, 0, false
	}
	size, records := int(binary.NativeEndian.Uint32(b)), int(binary.NativeEndian.Uint16(b[6:]))
	if b[4] != metadataVersion || records < head || size < records || size > len(b) {
		return event{}, 0, false
	}
	mask := binary.NativeEndian.Uint64(b[8:])
	e.overflow, e.moved, e.directory = mask&maskOverflow != 0, mask&maskMoved != 0, mask&maskDirectory != 0
	for rest := b[records:size]; len(rest) > 0; {
		if len(rest) < recordHead {
			return event{}, 0, false
		}
		length := int(binary.NativeEndian.Uint16(rest[2:]))
		if length < recordHead || length > len(rest) {
			return event{}, 0, false
		}
		if rest[0] == recordDirectory || rest[0] == recordFile {
			const at = recordHead + fsid
			if length < at+handleHead {
				return event{}, 0, false
			}
			bytes := binary.NativeEndian.Uint32(rest[at:])
			if uint64(bytes) > uint64(length-at-handleHead) {
				return event{}, 0, false
			}
			e.handle = rest[at : at+handleHead+int(bytes)]
		}
		rest = rest[length:]
	}
	return e, size, true
}
