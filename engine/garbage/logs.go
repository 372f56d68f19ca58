package garbage

import (
	"cmp"
	"slices"
	"strings"
	"time"
)

// LogDirs lists the entries of the pods' log directory to delete with all that
// is in them (CGC-10). An entry is taken for the pod whose UID is the part
// after the last "_", so that one which is no pod's at all counts as that of an
// unknown pod. Nothing goes before all pods have been seen; pods that have
// ended keep their logs, even under pressure.
func LogDirs(entries []string, pods Pods) []string {
	if !pods.SourcesReady {
		return nil
	}
	var out []string
	for _, entry := range entries {
		if pods.leaves(entry[strings.LastIndexByte(entry, '_')+1:], false) {
			out = append(out, entry)
		}
	}
	return out
}

// LogDirsOfPods is LogDirs without what the kubelet did not name: a namespace, a
// name and a UID, none empty, with "_" between them (GAP-37).
func LogDirsOfPods(entries []string, pods Pods) []string {
	return LogDirs(slices.DeleteFunc(slices.Clone(entries), func(entry string) bool {
		parts := strings.Split(entry, "_")
		return len(parts) != 3 || slices.Contains(parts, "")
	}), pods)
}

// LogFile is a rotated log of a container that may still run.
type LogFile struct {
	Path string
	// Bytes are allocated blocks, what comes free.
	Bytes int64
	// WrittenAt is when it was last written to.
	WrittenAt time.Time
}

// RotatedLogs picks rotated logs to delete until needBytes come free, oldest
// first; for a need of 0 or less none. Nobody writes to them any more, but
// somebody may not have read them: what the kubelet would keep for kubectl is
// lost, a pod is not.
func RotatedLogs(files []LogFile, needBytes int64) []LogFile {
	sorted := slices.SortedFunc(slices.Values(files), func(a, b LogFile) int {
		return cmp.Or(a.WrittenAt.Compare(b.WrittenAt), cmp.Compare(a.Path, b.Path))
	})
	freed := int64(0)
	for i, f := range sorted {
		if freed >= needBytes {
			return sorted[:i]
		}
		freed += f.Bytes
	}
	return sorted
}

// LogLink says whether a link in /var/log/containers whose target is missing
// is removed (CGC-12). state asks the runtime for the container that its name
// ends in; false for one that it does not know. A link that names no container
// goes, too. Rotation breaks links for moments, so that of a container that
// has not exited stays.
func LogLink(name string, state func(containerID string) (ContainerState, bool)) bool {
	id, ok := strings.CutSuffix(name[strings.LastIndexByte(name, '-')+1:], ".log")
	if !ok || len(id) < 6 {
		return true
	}
	s, found := state(id)
	return !found || s == Exited
}

// LogPolicy is how the logs of running containers are rotated.
type LogPolicy struct {
	// MaxSizeBytes of the file that is written to; the kubelet's default is
	// 10Mi. 0 rotates at each visit, below 0 nothing is rotated and a
	// container's logs stay when it is removed (LOG-3).
	MaxSizeBytes int64
	// MaxFiles of one container, the one written to included; default 5.
	MaxFiles int
	// RenameFirst, an improvement on the kubelet, lets rotation need no space:
	// the log is renamed before anything is compressed, and only what fits is
	// (GAP-34).
	RenameFirst bool
}

// Due says whether a log is rotated: by length, not by blocks (LOG-4).
func (p LogPolicy) Due(lengthBytes int64) bool {
	return p.MaxSizeBytes >= 0 && lengthBytes >= p.MaxSizeBytes
}

// Rotation is what rotating one log does, in this order. The first step that
// fails ends it, so without space to compress in the log is not rotated, and
// grows on (LOG-11).
type Rotation struct {
	// RenameFirst: the log is renamed before all this, and what can't be
	// compressed stays as it is.
	RenameFirst bool
	// Stale files are half-written, or were compressed and not yet removed.
	Stale []string
	// Excess are the oldest rotated files beyond the number allowed.
	Excess []string
	// Compress needs space beside each file, then frees it.
	Compress []string
}

// Plan says what to do before log is renamed and opened anew. others are the
// names beside it that begin with its name and a dot. Name order is taken for
// age (LOG-14).
func (p LogPolicy) Plan(others []string) Rotation {
	const compressed, temporary = ".gz", ".tmp"
	r := Rotation{RenameFirst: p.RenameFirst}
	var kept []string
	for _, name := range others {
		done := strings.HasSuffix(name, compressed)
		if strings.HasSuffix(name, temporary) || !done && slices.Contains(others, name+compressed) {
			r.Stale = append(r.Stale, name) // LOG-6
		} else {
			kept = append(kept, name)
		}
	}
	slices.Sort(kept)
	excess := max(0, len(kept)-max(0, p.MaxFiles-2)) // LOG-7: the log and its next rotated file come on top
	r.Excess = kept[:excess]
	for _, name := range kept[excess:] {
		if !strings.HasSuffix(name, compressed) { // LOG-8
			r.Compress = append(r.Compress, name)
		}
	}
	return r
}

// Removed lists what goes with a container's log: all names beside it that
// begin with its own (LOG-16). With rotation off nothing does (LOG-3).
func (p LogPolicy) Removed(log string, names []string) []string {
	if p.MaxSizeBytes < 0 {
		return nil
	}
	var out []string
	for _, name := range names {
		if strings.HasPrefix(name, log) {
			out = append(out, name)
		}
	}
	return out
}
