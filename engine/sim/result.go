package sim

import (
	"time"

	"github.com/cleave-cri/cleave/engine/record"
)

// What says what an Event is about.
type What string

// What happens.
const (
	ThresholdDue    What = "threshold due"
	PressureOver    What = "pressure over"
	ReclaimForeseen What = "reclaim foreseen"
	ImageRemoved    What = "image removed"
	DeadRemoved     What = "dead container removed"
	LogRemoved      What = "log removed"
	NotRemoved      What = "not removed"
	PodEvicted      What = "evicted"
	PodRejected     What = "rejected"
	PodAnew         What = "made anew"
	VictimLives     What = "victim lives"
	HeldBack        What = "held back"
	NoSpace         What = "no space"
	PullFailed      What = "pull failed"
	NotRotated      What = "not rotated"
	Blind           What = "blind"
	Restarted       What = "restarted"
	Overlap         What = "overlap"
)

// Event is one thing that happened.
type Event struct {
	// At is since the beginning.
	At time.Duration
	// By is who did it: kubelet or cleave; empty for what happens by itself.
	By   string `json:",omitempty"`
	What What
	// Subject is the pod, image, container, log or filesystem.
	Subject string `json:",omitempty"`
	// Bytes that came free, are available, or, of HeldBack, are nobody's.
	Bytes int64 `json:",omitempty"`
	// Wanted is what would have to be available, in the unit of Bytes; of
	// HeldBack by how much less became available.
	Wanted int64 `json:",omitempty"`
	// Rule and Detail say why.
	Rule   string `json:",omitempty"`
	Detail string `json:",omitempty"`
}

// Result is what came of a world.
type Result struct {
	Profile Profile
	// Steps are ticks that were played.
	Steps  int
	Events []Event
	Pods   []PodResult
	// Host is how long writers of the host had no space, by name.
	Host        []HostResult `json:",omitempty"`
	Filesystems []FilesystemResult
	// ImagesRemoved in order, by name.
	ImagesRemoved []string `json:",omitempty"`
	// Evicted in order, by name; a pod that was made anew may be there again.
	Evicted []string `json:",omitempty"`
	// Records of all passes that decided something; only if asked for.
	Records []record.Record `json:"-"`
}

// PodResult is what became of a pod and of those that were made in its place.
type PodResult struct {
	Name string
	// Evictions, and Rejections by the kubelet's admission.
	Evictions, Rejections int `json:",omitempty"`
	// NoSpace is for how long it tried to write and had no space.
	NoSpace time.Duration `json:",omitempty"`
	// Runs says that it runs at the end.
	Runs bool
}

// HostResult is what became of a writer of the host.
type HostResult struct {
	Name    string
	NoSpace time.Duration
}

// FilesystemResult is how a filesystem ended, and how it was at its worst.
type FilesystemResult struct {
	Name                           string
	AvailableBytes, LeastAvailable int64
	InodesFree, LeastInodesFree    int64 `json:",omitempty"`
}

// Pod finds a pod's result by its name.
func (r *Result) Pod(name string) *PodResult {
	for i := range r.Pods {
		if r.Pods[i].Name == name {
			return &r.Pods[i]
		}
	}
	return nil
}
