// Package scenario is the format in which people write down a node and what
// happens on it: filesystems, images, pods that write, what goes wrong, and what
// is expected of it. `cleave simulate` plays such files in virtual time; nothing
// in the format says that a node can't be a real one.
//
// It reads and checks, and knows nobody who plays. Of ours it imports what reads
// strictly (config/strict) and the words of decisions (engine).
package scenario

import (
	"time"

	"github.com/cleave-cri/cleave/engine"
)

// Version of the format.
const Version = 1

// Scenario is one file. Names are unique among things of one kind, and are kept
// in the order of the file.
type Scenario struct {
	// Title says in a sentence what happens.
	Title string
	// Lasts is for how long it goes on.
	Lasts       time.Duration
	Filesystems []Filesystem
	// Layout has the names of the filesystems that are nodefs, imagefs and
	// containerfs.
	Layout Layout
	Images []Image
	Pods   []Pod
	Host   []HostProcess
	Faults []Fault
	// Kubelet and Cleave are how both are set up.
	Kubelet Kubelet
	Cleave  Cleave
	// PullBytesPerSecond is how fast images arrive; 0 for at once.
	PullBytesPerSecond int64
	// Expect is what has to come of it, for each profile.
	Expect map[string]Expect
	// Lab is what has to come of it on a real node besides; nil for nothing.
	Lab *LabExpect
}

// Layout is which filesystem is what.
type Layout struct{ NodeFS, ImageFS, ContainerFS string }

// Filesystem is a disk.
type Filesystem struct {
	Name      string
	SizeBytes int64
	// Inodes in all; 0 for no such limit.
	Inodes int64
	// UsedBytes and UsedInodes are taken from the beginning, by the system.
	UsedBytes, UsedInodes int64
	// FreesAfter is how long deleted space takes to come free.
	FreesAfter time.Duration
	// Type is ext4, xfs or btrfs where a real one is made; empty leaves the choice
	// to whoever makes it.
	Type string
}

// Image is an image.
type Image struct {
	Name   string
	Layers []Layer
	// ReportedBytes is what the runtime says that it takes; 0 for the sum.
	ReportedBytes int64
	Pinned        bool
	// OnNode is false for an image that has to be pulled.
	OnNode bool
	// UnusedFor is how long ago it was last used; 0 for never.
	UnusedFor time.Duration
}

// Layer is a layer of an image; layers with one name share their bytes.
type Layer struct {
	Name          string
	Bytes, Inodes int64
}

// Pod is a pod.
type Pod struct {
	Name, Namespace string
	Priority        int32
	Static          bool
	// Owner is its controller; AnewAfter is how long after its end that makes
	// it anew, nil for never.
	Owner     string
	AnewAfter *time.Duration
	// Grace is its termination grace period; nil for the usual 30s.
	Grace      *time.Duration
	Starts     time.Duration
	Volumes    []Volume
	Containers []Container
	// PodLevelMemoryBytes is a request of memory for the pod as a whole; 0 for
	// none.
	PodLevelMemoryBytes int64
}

// Volume is a volume of a pod.
type Volume struct {
	Name string
	Kind engine.VolumeKind
	// SizeLimitBytes of an emptyDir; 0 for none.
	SizeLimitBytes int64
}

// Container is a container of a pod.
type Container struct {
	Name, Image string
	// RequestBytes and LimitBytes are of ephemeral storage; nil for none.
	RequestBytes, LimitBytes *int64
	Writes                   []Write
	// ExitsAfter is how long it runs, 0 for ever; RestartsAfter how long after
	// that it is started anew, nil for never.
	ExitsAfter    time.Duration
	RestartsAfter *time.Duration
}

// Where a container writes: its writable layer, its log, or a volume, which is
// written as "volume NAME".
const (
	ToLayer  = "layer"
	ToLog    = "log"
	ToVolume = "volume "
)

// Write is a steady stream of writes.
type Write struct {
	// To is where; empty for processes of the host.
	To string
	// AtOnceBytes and AtOnceInodes are written at the start, the others from
	// From to Until after it; an Until of 0 is for ever.
	AtOnceBytes, AtOnceInodes       int64
	BytesPerSecond, InodesPerSecond int64
	From, Until                     time.Duration
	// AtMostBytes in all; 0 for no limit.
	AtMostBytes int64
	// UnlinksAfter is when the file is deleted while it is open; nil for never.
	UnlinksAfter *time.Duration
}

// HostProcess writes outside of all pods.
type HostProcess struct {
	Name       string
	Filesystem string
	Write      Write
}

// The faults.
const (
	StaleStats      = "stale stats"
	MissingStats    = "missing stats"
	MissingPodStats = "missing pod stats"
	ImagesStay      = "images stay"
	ContainersStay  = "containers stay"
	KubeletRestart  = "kubelet restart"

	// ContainerdKilled and SnapshotterKilled end the process at From and start it
	// again at Until.
	ContainerdKilled  = "containerd killed"
	SnapshotterKilled = "snapshotter killed"
	// RootUnmounted takes the filesystem On away from its place until Until.
	RootUnmounted = "root unmounted"
	// DiskFull takes all that is left of the filesystem On, from outside of all
	// pods, and keeps it.
	DiskFull = "disk full"
)

func faultKinds() []string {
	return []string{
		StaleStats, MissingStats, MissingPodStats, ImagesStay, ContainersStay, KubeletRestart,
		ContainerdKilled, SnapshotterKilled, RootUnmounted, DiskFull,
	}
}

// Fault is something that goes wrong from From to Until, 0 for the end.
type Fault struct {
	Kind        string
	From, Until time.Duration
	// Pods are whom it is about; empty for all.
	Pods []string
	// On is the filesystem that it is about.
	On string
}

// Kubelet is the kubelet's configuration, under its own names.
type Kubelet struct {
	Thresholds                    []engine.Threshold
	PressureTransitionPeriod      time.Duration
	MaxPodGraceSeconds            int64
	ImageGCHighPercent            int
	ImageGCLowPercent             int
	ImageMinimumAge, ImageMaximum time.Duration
	ContainerLogMaxSizeBytes      int64
	ContainerLogMaxFiles          int
	// CRIO says that it believes to speak to CRI-O, and so takes figures from
	// cAdvisor.
	CRIO bool
}

// Cleave is how cleave is set up.
type Cleave struct {
	// LastResort are the kubelet's thresholds where cleave is there; nil leaves
	// them as they are.
	LastResort []engine.Threshold
	// Options that are switched otherwise than in the cleave profile, by name.
	Options        map[string]bool
	LogBudgetBytes int64
	OwnerPerHour   int
	PerHour        int
}

// Expect is what has to come of a scenario under one profile. What is nil or
// empty is not looked at.
type Expect struct {
	// Evicted are exactly the pods that are evicted, in any order, each once
	// or more often; an empty list for none.
	Evicted *[]string
	// NotEvicted are pods that stay.
	NotEvicted []string
	// EvictionsAtLeast and EvictionsAtMost count all.
	EvictionsAtLeast, EvictionsAtMost *int
	// PressureAtLeast and PressureAtMost count how often a threshold became
	// due.
	PressureAtLeast, PressureAtMost *int
	// ImagesRemoved are exactly the images that go; ImagesKept are there still.
	ImagesRemoved *[]string
	ImagesKept    []string
	// NoSpaceAtLeast and NoSpaceAtMost are how long somebody tried to write and
	// could not, by name of the pod or process.
	NoSpaceAtLeast, NoSpaceAtMost map[string]time.Duration
	// AvailableAtLeast is what is available at the end, by filesystem.
	AvailableAtLeast map[string]int64
	// HeldBackBy are rules or options because of which nobody went.
	HeldBackBy []string
}

// LabExpect is what has to come of a scenario on a real node, besides what is
// expected of the cleave profile. No simulator can tell.
type LabExpect struct {
	// Layout is what cleave calls the node: single, dedicated, split or separate.
	Layout string
	// DeadRemovedAtLeast counts containers that had ended and were removed.
	DeadRemovedAtLeast *int
	// UnattributedAtLeast is what cleave at some time said that nobody has, by
	// filesystem.
	UnattributedAtLeast map[string]int64
	// OpenDeletedAtLeast is what cleave at some time said that a pod holds in files
	// that are deleted and open, by pod.
	OpenDeletedAtLeast map[string]int64
	// LogsAtMost is what the logs of a pod, rotated ones too, took at most at the
	// end, by pod.
	LogsAtMost map[string]int64
	// Running are pods that run at the end.
	Running []string
	// Says are texts that were on the page of `cleave status` at some time.
	Says []string
}
