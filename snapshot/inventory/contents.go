// Package inventory says what in containerd's store belongs to whom: what each
// image takes, what comes free when it goes, who keeps the rest, and what has no
// owner at all. It is pure: the contents of a store and figures of what takes how
// much go in, a [Picture] comes out. Package snapshot reads the contents.
//
// What comes free is what containerd's garbage collector would remove, by its
// rules (CTD-80, CTD-94; containerd, core/metadata/gc.go). It imports nothing of
// ours; snapshot and agent may import it.
package inventory

import "time"

// Contents is what a store held. It is read in parts, so whoever reads it has to
// say what is missing in it.
type Contents struct {
	// At is when the reading began; what expires is judged by it.
	At time.Time
	// Namespaces are all of containerd's, by name: they share blobs.
	Namespaces []Namespace
	// Snapshotters are those that containerd could start, by name.
	Snapshotters []Snapshotter
	// ContentRoot is where the content store is, empty if containerd does not
	// say.
	ContentRoot string
	// Documents are the indexes, manifests and configurations that the images
	// lead to, by digest, as far as they are in the store.
	Documents map[string]Document
	// Unread says what could not be read, a sentence each. While there is any,
	// nobody may conclude that something is not referred to.
	Unread []string
	// Unsettled says that the store was changing all the time while it was read:
	// parts may be of different moments.
	Unsettled bool
}

// Namespace is one of containerd's namespaces. Apart from the bytes of blobs it
// shares nothing with others.
type Namespace struct {
	Name       string
	Images     []Record
	Blobs      []Blob
	Ingests    []Ingest
	Leases     []Lease
	Snapshots  []Snapshot
	Containers []Container
	Sandboxes  []Sandbox
}

// Snapshotter is a snapshot plugin of containerd.
type Snapshotter struct {
	Name string
	// Root is where it says that its data is, empty if it does not say.
	Root string
}

// Record is one of containerd's images: a name for a target. One image of the
// CRI has several, for its tag, its digest and its ID.
type Record struct {
	Name string
	// Target is the digest of an index or a manifest.
	Target    string
	Labels    map[string]string
	CreatedAt time.Time
}

// Blob is an entry of the content store.
type Blob struct {
	Digest string
	// SizeBytes is its length.
	SizeBytes int64
	Labels    map[string]string
	CreatedAt time.Time
}

// Ingest is a download, running or broken off.
type Ingest struct {
	Ref string
	// OffsetBytes are there already, of TotalBytes; 0 if that is not known.
	OffsetBytes, TotalBytes int64
	// Expected is the digest that it is to have, if that is known.
	Expected             string
	StartedAt, UpdatedAt time.Time
}

// Lease keeps things from the garbage collector.
type Lease struct {
	ID        string
	Labels    map[string]string
	CreatedAt time.Time
	Resources []Resource
}

// Resource is something that a lease holds: Type is content, ingests, images or
// snapshots/NAME (containerd, core/metadata/leases.go).
type Resource struct {
	Type, ID string
}

// Kind is what a snapshot is to its snapshotter.
type Kind uint8

// The kinds.
const (
	Committed Kind = iota
	Active
	View
)

// Snapshot is one snapshot. Of its labels only those count that containerd's
// collector reads: pods and images can set others (CTD-25).
type Snapshot struct {
	Snapshotter, Key, Parent string
	Kind                     Kind
	Labels                   map[string]string
	CreatedAt                time.Time
}

// Container is a container or a pod's sandbox that containerd has a record of,
// running or not.
type Container struct {
	ID string
	// Image is the name that it was made from; it may be gone.
	Image                    string
	Snapshotter, SnapshotKey string
	// SandboxID is the sandbox that it belongs to, if any.
	SandboxID string
	Labels    map[string]string
}

// Sandbox is an entry of containerd's sandbox store.
type Sandbox struct {
	ID     string
	Labels map[string]string
}

// Document is what matters of an index, a manifest or an image's configuration.
type Document struct {
	// Manifests of an index are those for this node's platform, the best first.
	Manifests []string
	// Config and Layers are those of a manifest; Config is empty for anything
	// else.
	Config string
	Layers []Descriptor
	// ConfigSizeBytes is the length of the configuration by the manifest.
	ConfigSizeBytes int64
	// ChainIDs of a configuration are the names of its layers' snapshots, the
	// lowest first.
	ChainIDs []string
	// SizeBytes is the document's own length.
	SizeBytes int64
}

// Descriptor is a blob as a manifest names it.
type Descriptor struct {
	Digest    string
	SizeBytes int64
}

// Labels that CRI sets (containerd, internal/cri/labels).
const (
	LabelPinned  = "io.cri-containerd.pinned"
	PinnedValue  = "pinned"
	LabelKind    = "io.cri-containerd.kind"
	KindSandbox  = "sandbox"
	LabelPodUID  = "io.kubernetes.pod.uid"
	LabelPodName = "io.kubernetes.pod.name"
)

// LabelSource begins the labels that name the repositories of a registry that a
// blob was pulled from (containerd, core/remotes/docker/handler.go).
const LabelSource = "containerd.io/distribution.source."
