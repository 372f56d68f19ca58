package web

// Values are what the metrics show at one moment. What is nil or empty is not known, and is not shown: unknown is not zero.
type Values struct {
	// Version is cleave's own.
	Version string
	// Kubelet is about the kubelet in mode crio, nil in other modes.
	Kubelet *Kubelet
	// Filesystems are those of the roles, a filesystem once for each of its roles.
	Filesystems []Filesystem
	// Containers that run and Pods are in the order of what they hold, the largest first: only the first [MaxContainers] and
	// [MaxPods] are shown. Each has labels of its own.
	Containers []Container
	Pods       []Pod
	// Images are those of which most comes free first; [MaxImages] are shown.
	Images []Image
	// Proxy is about calls, Reclaim about decisions, nil where nothing is decided.
	Proxy   *Proxy
	Reclaim *Reclaim
	// Survey is about finding out who there is and what they take.
	Survey *Survey
	// HeapBytes is what cleave's heap holds.
	HeapBytes *uint64
}

// How many series there may be of what a node can have any number of. What is more is counted by cleave_series_left_out.
const (
	MaxContainers = 2000
	MaxPods       = 1000
	MaxImages     = 50
)

// Filesystem is what is known of the filesystem of a role.
type Filesystem struct {
	Role, Device, Mountpoint                 string
	CapacityBytes, AvailableBytes, UsedBytes uint64
	Inodes, InodesFree                       *uint64
	ReservedBytes                            uint64
	Classes                                  []Class
	// UnattributedBytes is used and owned by nobody that is known; nil while nobody is.
	UnattributedBytes *int64
	OpenDeletedBytes  *uint64
	// Unmeasured is how many things have no figure yet, OldestSeconds how old the oldest figure may be.
	Unmeasured    int
	OldestSeconds *float64
	// Stuck says that it does not answer, or is away.
	Stuck bool
}

// Class is what one class of things takes.
type Class struct {
	Class         string
	Bytes, Inodes uint64
}

// Container is one that runs. Those of one name in a pod are one.
type Container struct {
	Namespace, Pod, UID, Container           string
	RootFSBytes, LogsBytes, OpenDeletedBytes *uint64
}

// Pod is a pod that the kubelet counts.
type Pod struct {
	Namespace, Pod, UID string
	// HeldBytes is what would come free without it, on all filesystems, as far as that is known.
	HeldBytes                uint64
	EmptyDirBytes, LogsBytes *uint64
	// KubeletBytes is what the kubelet counts for it.
	KubeletBytes *uint64
}

// Image is an image.
type Image struct {
	Image          string
	ExclusiveBytes uint64
}

// Proxy is what the proxy has counted.
type Proxy struct {
	InFlight, Connections int64
	Methods               []Method
	Fallbacks             []Fallback
	// Bounds are those of Method.Within, in seconds.
	Bounds []float64
}

// Method is what was counted of one method. Codes are gRPC's, by name.
type Method struct {
	Method string
	Codes  map[string]int64
	// Seconds is what the calls took together, Within how many took no longer than each bound, and at its end all; empty for calls
	// that do not end by themselves.
	Seconds float64
	Within  []int64
}

// Fallback counts answers that went through uncorrected.
type Fallback struct {
	Method, Reason string
	Count          int64
}

// Reclaim is what was decided and done since the start.
type Reclaim struct {
	// Decisions count passes by what they came to.
	Decisions map[string]int64
	Deletions []Deletion
	// Evictions count pods that were told to go, by reason, EvictionsFailed those that stay.
	Evictions       map[string]int64
	EvictionsFailed int64
	// Forecast are seconds until a threshold is met at the present speed, by signal; without those that don't fall.
	Forecast map[string]float64
	// Blind says that nothing can be decided at the moment.
	Blind bool
	// Records count what was written to the flight recorder, by result; nil while another process records.
	Records map[string]uint64
}

// Deletion counts what was deleted of one kind, by one rule.
type Deletion struct {
	Kind, Rule                 string
	Count, Failed              int64
	ExpectedBytes, GainedBytes int64
}

// Survey is what it costs to know.
type Survey struct {
	// Entries count inodes that were looked at, by reason.
	Entries map[string]int64
	// Seconds is how long it took to find out who there is, AgeSeconds how long ago that ended; nil before the first time.
	Seconds, AgeSeconds *float64
}
