// Package sim plays a node's disks in virtual time: filesystems that fill up,
// pods that write, a kubelet with its periods, cleave beside it, and what goes
// wrong on real nodes. Decisions are engine's, under either profile; that is the
// point of it.
//
// It is as pure as engine: no clock, no I/O, no chance. The same world plays the
// same each time. It imports nothing of ours but what is below engine; the
// format in which people write worlds is elsewhere (lab/scenario).
package sim

import (
	"time"

	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/garbage"
)

// Tick is one step of virtual time: the shortest rest of the engine. All times
// of a World are rounded up to it.
const Tick = engine.ShortestRest

// Began is when each world begins. It is some day: nothing depends on which.
var began = time.Date(2026, time.January, 1, 0, 0, 0, 0, time.UTC)

// World is a node and all that will happen on it by itself.
type World struct {
	// Lasts is how long it is played.
	Lasts       time.Duration
	Filesystems []Filesystem
	// Node, Image and Container are the numbers of the filesystems on which
	// nodefs, imagefs and containerfs are.
	Node, Image, Container int
	// Images are those that pods use or that are on the node.
	Images []Image
	Pods   []Pod
	// Host writes outside of all pods.
	Host    []HostWriter
	Faults  []Fault
	Kubelet Kubelet
	Cleave  Cleave
	// PullBytesPerSecond is how fast layers arrive; 0 for at once.
	PullBytesPerSecond int64
}

// Filesystem is one disk.
type Filesystem struct {
	Name          string
	CapacityBytes int64
	// Inodes in all; 0 for a filesystem that has no such limit.
	Inodes int64
	// UsedBytes and UsedInodes are taken from the beginning, by nobody who is
	// known.
	UsedBytes, UsedInodes int64
	// FreesAfter is how long deleted space takes to come free.
	FreesAfter time.Duration
}

// Image is an image as the runtime has it.
type Image struct {
	Name   string
	Layers []Layer
	// ReportedBytes is what the runtime says that it takes; 0 for the sum of
	// its layers.
	ReportedBytes int64
	Pinned        bool
	// Absent images are pulled when a pod needs them.
	Absent bool
	// UnusedFor is for how long it has not been used when the world begins; 0
	// for an image that was never used, and is known for a day.
	UnusedFor time.Duration
}

// Layer is one layer; layers with one ID share their bytes.
type Layer struct {
	ID            string
	Bytes, Inodes int64
}

// Pod is a pod and what its containers do.
type Pod struct {
	// Spec is what decisions see of it. Its UID is made of its name; if a
	// controller makes it anew, of its name and a number.
	Spec engine.Pod
	// Starts is when it appears.
	Starts time.Duration
	// Anew is how long after its end a controller makes it anew; nil for never.
	Anew *time.Duration
	// Containers of Spec, by name, and what they do.
	Containers []Container
}

// Container is what a container of a pod does.
type Container struct {
	Name string
	// Image is its number in World.Images.
	Image   int
	Writers []Writer
	// ExitsAfter is how long it runs; 0 for ever. RestartsAfter is how long
	// after that it is started again; nil for never.
	ExitsAfter    time.Duration
	RestartsAfter *time.Duration
}

// Place is where a container writes.
type Place string

// The places.
const (
	WritableLayer Place = "layer"
	Log           Place = "log"
	Volume        Place = "volume"
)

// Writer writes at a steady rate while its container runs.
type Writer struct {
	To Place
	// Volume is the name of one of the pod's volumes.
	Volume string
	// AtOnceBytes are written when the container starts, before the rate
	// begins to count.
	AtOnceBytes, AtOnceInodes int64
	// BytesPerSecond and InodesPerSecond are tried; what does not fit is lost.
	BytesPerSecond, InodesPerSecond int64
	// From and Until limit the rate to a time after the container's start; an
	// Until of 0 is for ever.
	From, Until time.Duration
	// AtMostBytes ends writing; 0 for no limit.
	AtMostBytes int64
	// UnlinksAfter is when the file is deleted, although it stays open and is
	// written to: from then on no walk finds its bytes. nil for never.
	UnlinksAfter *time.Duration
}

// HostWriter is a process of the node.
type HostWriter struct {
	Name       string
	Filesystem int
	Writer     Writer
}

// FaultKind says what goes wrong.
type FaultKind string

// The faults.
const (
	// StaleStats: figures and their times stay what they were.
	StaleStats FaultKind = "stale stats"
	// MissingStats: nothing can be measured (OBS-7).
	MissingStats FaultKind = "missing stats"
	// MissingPodStats: pods have no figures, or those named.
	MissingPodStats FaultKind = "missing pod stats"
	// ImagesStay and ContainersStay: the runtime fails to delete them.
	ImagesStay     FaultKind = "images stay"
	ContainersStay FaultKind = "containers stay"
	// KubeletRestart: the kubelet forgets all (SYN-43, IGC-5).
	KubeletRestart FaultKind = "kubelet restart"
)

// Fault is something that goes wrong for a time.
type Fault struct {
	Kind FaultKind
	// From and Until are since the beginning; an Until of 0 is the end. A
	// restart is at From.
	From, Until time.Duration
	// Pods are whom it is about, by name; empty for all.
	Pods []string
}

// Kubelet is how the kubelet is set up.
type Kubelet struct {
	// Config is that of its eviction; the options are left off.
	Config engine.Config
	Images garbage.ImagePolicy
	Logs   garbage.LogPolicy
	// CRIO says that it takes its figures from cAdvisor, up to 60 s old, and
	// tells a split; else it takes the runtime's, up to 10 s old, and can't
	// (LAY-1, LAY-7).
	CRIO bool
}

// Cleave is how cleave is set up beside the kubelet.
type Cleave struct {
	// Options are its improvements; engine.Cleave for all of them.
	Options engine.Options
	// LastResort are the thresholds that the kubelet has when cleave is there;
	// cleave then acts by those of Kubelet. nil leaves the kubelet its own, and
	// cleave stays engine.DefaultMargin above them.
	LastResort []engine.Threshold
	// LogBudgetBytes is for all logs of the node; 0 for a tenth of nodefs.
	LogBudgetBytes int64
	// Bounds of BreakStorms and HoldFire, as in engine.Config; 0 for defaults.
	OwnerPerHour, PerHour int
	HoldShare, HoldFloor  float64
}

// Profile is whose decisions are played.
type Profile string

// The profiles. With cleave the kubelet stays on, as the last resort.
const (
	KubeletProfile Profile = "kubelet"
	CleaveProfile  Profile = "cleave"
)
