// Package config holds cleave's configuration: one versioned YAML file, strictly
// decoded. It imports nothing else of this module and reads nothing but the file
// it is told to; commands and the agent may import it. config/kubelet, which
// reads the kubelet's configuration, is another matter and not imported here.
//
// All defaults are in Default, all rules in Config.Validate, all keys in the
// schema of schema.go; example.yaml says the same for people and is tested to be
// equal to Default.
package config

import (
	_ "embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"syscall"
	"time"
)

// Version is the version of the file's format that this package knows.
const Version = 1

// DefaultPath is where the file is unless a flag says otherwise.
const DefaultPath = "/etc/cleave/config.yaml"

// maxFileBytes is the largest file that is read; a real one has 2 kB.
const maxFileBytes = 1 << 20

// ErrMissing says that there is no configuration file at all. It also is
// fs.ErrNotExist. A file that is there and wrong gives Faults instead.
var ErrMissing error = missingError{}

type missingError struct{}

func (missingError) Error() string        { return "config file does not exist" }
func (missingError) Is(target error) bool { return target == fs.ErrNotExist }

// Config is the whole configuration. It is a plain value; flags may overwrite
// fields after Load, followed by another Validate.
type Config struct {
	// Version is the version of the format; it must be given and be 1.
	Version int
	// Mode is what cleave is towards the kubelet. Default: cri.
	Mode Mode
	// Runtime is the container runtime behind cleave.
	Runtime Runtime
	// Listen is where the kubelet reaches cleave.
	Listen Listen
	// Control is where cleave's own commands reach the running cleave.
	Control Control
	// StateDir is the folder for what must outlast a restart: an absolute path
	// other than the root directory; made if missing. One running cleave per
	// folder. Default: /var/lib/cleave.
	StateDir string
	// Filesystems are the paths whose filesystems cleave looks at.
	Filesystems Filesystems
	// Measure limits what measuring may cost.
	Measure Measure
	// Memory limits cleave's own memory.
	Memory Memory
	// Log is how cleave's log looks.
	Log Log
	// Metrics says where metrics are served besides the control socket.
	Metrics Metrics
	// CRIO is about mode crio only.
	CRIO CRIO
	// Reclaim says whether cleave frees space and evicts by itself.
	Reclaim Reclaim
	// Limits are how much what a container writes may take.
	Limits Limits
	// Kube is what the cluster is told of this node's disks.
	Kube Kube
	// Snapshotter is the split snapshotter, a process of its own.
	Snapshotter Snapshotter
}

// Mode is what cleave is towards the kubelet.
type Mode string

// The modes.
const (
	// ModeCRI: a proxy between the kubelet and the runtime.
	ModeCRI Mode = "cri"
	// ModeObserve: cleave reports and explains, and changes no answer.
	ModeObserve Mode = "observe"
	// ModeCRIO: a proxy that a kubelet takes for CRI-O, so that the kubelet itself
	// sees and handles two disks (docs/crio.md).
	ModeCRIO Mode = "crio"
)

// Runtime is the container runtime behind cleave.
type Runtime struct {
	// Endpoint is the runtime's CRI socket. cleave may start before it exists.
	// Default: unix:///run/containerd/containerd.sock.
	Endpoint Endpoint
	// Namespace is the containerd namespace that holds the kubelet's containers:
	// letters, digits and single . _ - between them, 76 bytes at most.
	// Default: k8s.io.
	Namespace string
}

// Listen is where the kubelet reaches cleave.
type Listen struct {
	// Endpoint is the socket that cleave makes. Its folder is made if it is
	// missing, with mode 0755, if nobody but root may write to the folder above.
	// It must differ from the other endpoints. Default:
	// unix:///run/cleave/cleave.sock; in mode crio unix:///run/crio/crio.sock, and
	// no other is possible there.
	Endpoint Endpoint
}

// CRIO is what mode crio needs besides.
type CRIO struct {
	// NRIEndpoint is the runtime's socket for NRI plugins, by which containers'
	// cgroups get names that the kubelet measures.
	// Default: unix:///run/nri/nri.sock.
	NRIEndpoint Endpoint
	// KubeletTokenFile is a file with a token that may get nodes/stats, by which cleave looks whether the kubelet's summary has the
	// disks as they are, and in every mode nodes/pods, by which pods are known while the API server is away: an absolute path. Empty means that the kubelet's own credentials are tried, which is enough where the kubelet
	// has a read-only port or does not ask the API server. Default: empty.
	KubeletTokenFile string
}

// The sockets for the kubelet. The second is the one path at which the kubelet's
// cAdvisor looks for CRI-O (KSS-4).
const (
	listenDefault Endpoint = "/run/cleave/cleave.sock"
	listenCRIO    Endpoint = "/run/crio/crio.sock"
)

// Settle gives what was left at its default the value that fits the mode: the
// socket for the kubelet.
func (c *Config) Settle() {
	if c.Mode == ModeCRIO && c.Listen.Endpoint == listenDefault {
		c.Listen.Endpoint = listenCRIO
	}
}

// Control is where cleave's own commands reach the running cleave.
type Control struct {
	// Endpoint is the socket that cleave makes, for root only. It must differ
	// from the other endpoints. Default: unix:///run/cleave/control.sock.
	Endpoint Endpoint
}

// Filesystems are paths whose filesystems cleave looks at. Paths are absolute
// and need not be mountpoints: the device a path is on counts.
type Filesystems struct {
	// NodeFS is the kubelet's root directory. Must be given.
	// Default: /var/lib/kubelet.
	NodeFS string
	// Logs is the folder of containers' logs. Must be given.
	// Default: /var/log/pods.
	Logs string
	// ImageFS is where image layers are. Empty means: the root folder of
	// containerd's snapshotter, found out by itself. Default: empty.
	ImageFS string
	// ContainerFS is where writable layers are. Empty means: where the upper
	// directories of containers really are, found out by itself. Default: empty.
	ContainerFS string
}

// Measure limits what measuring may cost.
type Measure struct {
	// Period is how often cleave looks who is on the node, and the shortest time
	// between two measurements of a folder while something on its filesystem
	// changes; one whose pod or container writes is measured up to ten times as
	// often, but at most once a second. 1s or more, no upper limit. When measuring
	// is slower than that, or MaxCorePercent is reached, the real period is longer.
	// Default: 10s.
	Period time.Duration
	// MaxCorePercent is how many percent of one processor core measuring may
	// take on average, first figures and the slow refresh of all aside: 1 to 100.
	// Default: 5.
	MaxCorePercent int
}

// Memory limits cleave's own memory.
type Memory struct {
	// LimitBytes is the soft limit that the Go runtime keeps its memory under,
	// by collecting garbage more often (GOMEMLIMIT); it does not stop cleave
	// from taking more. In the file, "limit" is a quantity as Kubernetes writes
	// it. 32Mi or more; 0 means no limit. Default: 128Mi.
	LimitBytes int64
}

// Log is how cleave's log looks.
type Log struct {
	// Level is the least level that is logged: debug, info, warn or error.
	// Default: info.
	Level string
	// Format is json, one object per line, or console, for people.
	// Default: json.
	Format string
}

// Metrics says where metrics are served besides the control socket.
type Metrics struct {
	// Address is a network address for Prometheus: IP:port, as 127.0.0.1:9753 or
	// [::1]:9753; 0.0.0.0 is all of this node's. Whoever reaches it can read the
	// metrics, without a password. Empty means none. Default: empty.
	Address string
}

// Limits are how much what a container writes may take. The kernel holds to them:
// who writes more is told that there is no space, and nobody else notices.
type Limits struct {
	// WritableLayerBytes is the limit of each container's writable layer. In the
	// file, "writableLayer" is a quantity as Kubernetes writes it: 1Mi or more; 0
	// means none. It needs Snapshotter.ProjectQuota, holds for containers made since
	// that was set, and has no effect in mode observe. Default: 0.
	WritableLayerBytes int64
	// FromPods gives a container that has a limit of ephemeral storage in its pod's
	// specification that limit, if it is not above WritableLayerBytes. It needs
	// Snapshotter.ProjectQuota, and Reclaim.Enabled, for that is what knows pods.
	// Default: false.
	FromPods bool
}

// Reclaim says whether cleave frees space by itself, before the kubelet has to:
// by the kubelet's own settings, a margin earlier (docs/reclaim.md).
type Reclaim struct {
	// Enabled switches it on; in mode observe it then decides and records only.
	// Default: false.
	Enabled bool
	// Evict lets it evict pods through the Kubernetes API where nothing else is
	// left to free. Default: false.
	Evict bool
	// EvictBy is how a pod is ended: kubernetes, through the API server; or
	// standalone, by cleave itself through the runtime, for labs without an API
	// server. Default: kubernetes.
	EvictBy EvictBy
	// KeepLogs keeps the last 64 KiB of each container's log when its pod is
	// evicted, of the last 120 such logs, in a file of 8 MiB in StateDir that only
	// root may read: logs may hold secrets. Default: false.
	KeepLogs bool
	// Kubeconfig says as whom the API server is asked: an absolute path of a file
	// with a service account's token. Empty means as the kubelet. Default: empty.
	Kubeconfig string
}

// EvictBy is how a pod is ended.
type EvictBy string

// The ways.
const (
	// EvictByKubernetes: the API server is asked, and the kubelet ends the pod.
	EvictByKubernetes EvictBy = "kubernetes"
	// EvictStandalone: the runtime is told to stop the pod's sandbox.
	EvictStandalone EvictBy = "standalone"
)

// Kube is what the cluster is told of this node's disks, and how new containers
// are kept away from one that is full (docs/kube.md). All of it needs
// Reclaim.Enabled and goes by its thresholds.
type Kube struct {
	// Admission refuses containers (ResourceExhausted) while a filesystem is below a
	// hard threshold, but for critical pods and those that tolerate
	// node.kubernetes.io/disk-pressure. Mode cri only. Default: false.
	Admission bool
	// Conditions keeps a condition of the node for each filesystem, such as
	// CleaveImageFSPressure. Default: false.
	Conditions bool
	// Events writes events on pods and on the node. Default: false.
	Events bool
	// Taint keeps new pods from the node while a filesystem is below a hard
	// threshold: cleave-cri.github.io/disk-pressure:NoSchedule. Mode cri only; it needs
	// Reclaim.Kubeconfig, because a kubelet may not change its node's taints.
	// Default: false.
	Taint bool
}

// Snapshotter is the split snapshotter (`cleave snapshotter`), which puts image
// layers on one filesystem and everything that is written to on another. Without
// roots it is not used.
type Snapshotter struct {
	// ImageRoot is the folder for image layers: an absolute path other than the
	// root directory, not inside ContainerRoot nor around it, without comma,
	// colon and backslash, which overlayfs's options can't hold. Given together
	// with ContainerRoot. Default: empty.
	ImageRoot string
	// ContainerRoot is the folder for what containers write, by the same rules.
	// Default: empty.
	ContainerRoot string
	// Database is the file that says what lies where: an absolute path. Its
	// folder is made if missing and also holds the lock and the ballast. It is
	// inside neither root and should be on neither's filesystem: a full one
	// would keep it from growing (CTD-66). Default: /var/lib/cleave/snapshotter/metadata.db.
	Database string
	// Endpoint is the socket for containerd, made by the snapshotter, for root
	// only. Default: unix:///run/cleave/snapshotter.sock.
	Endpoint Endpoint
	// StatusEndpoint is the socket for `cleave snapshotter status`, for root
	// only. Default: unix:///run/cleave/snapshotter-status.sock.
	StatusEndpoint Endpoint
	// RequireMountpoints refuses roots that are not mount points themselves.
	// Default: false, because containers' layers may well be on the node's own
	// filesystem; a root whose filesystem is not mounted is noticed all the same.
	RequireMountpoints bool
	// Namespaces are the containerd namespaces that are served; others are
	// refused. Empty means all. Default: k8s.io.
	Namespaces []string
	// RemapIDs maps user and group ids at the mount for pods with a user
	// namespace. Without it containerd copies the whole image for such a pod.
	// Default: true.
	RemapIDs bool
	// ParallelUnpack lets containerd unpack layers of one image side by side;
	// how many at a time is containerd's max_concurrent_unpacks. Default: true.
	ParallelUnpack bool
	// SyncOnCommit writes the image filesystem to disk before a layer counts as
	// unpacked. Without it a power cut soon after a pull can leave a layer with
	// missing content; with it pulls are slower. Default: false, as containerd's.
	SyncOnCommit bool
	// MountOptions are added to each overlay mount, such as volatile; none that
	// the snapshotter sets itself. Default: none.
	MountOptions []string
	// ProjectQuota gives each new writable layer a project ID, by which the kernel
	// counts it and can hold it to a limit. It needs ext4 or xfs with project quota
	// below ContainerRoot; where that is missing nothing is limited, and the status
	// says why. Default: false.
	ProjectQuota bool
	// UsageMaxAge is how old a figure for a layer that is written to may be
	// before it is measured anew: 1s to 1h. While nothing changes on its filesystem
	// it may be older. Default: 10s.
	UsageMaxAge time.Duration
	// DeletionsPerSecond is how many files and folders are deleted in a second,
	// so that clearing up leaves the disk to the pods: 1 or more, 0 means no
	// limit. Default: 20000.
	DeletionsPerSecond int
	// CleanupMaxPercent is how many percent of the folders in both roots one
	// clean-up may take away; beyond that it stops and waits for confirmation,
	// because then something else is probably wrong: 1 to 100. Default: 10.
	CleanupMaxPercent int
}

// Enabled says whether the split snapshotter is set up.
func (s Snapshotter) Enabled() bool { return s.ImageRoot != "" && s.ContainerRoot != "" }

// Default returns the configuration with all defaults. It is valid.
func Default() Config {
	return Config{
		Version:     Version,
		Mode:        ModeCRI,
		Runtime:     Runtime{Endpoint: "/run/containerd/containerd.sock", Namespace: "k8s.io"},
		Listen:      Listen{Endpoint: listenDefault},
		Control:     Control{Endpoint: "/run/cleave/control.sock"},
		StateDir:    "/var/lib/cleave",
		Filesystems: Filesystems{NodeFS: "/var/lib/kubelet", Logs: "/var/log/pods"},
		Measure:     Measure{Period: 10 * time.Second, MaxCorePercent: 5},
		Memory:      Memory{LimitBytes: 128 << 20},
		Log:         Log{Level: "info", Format: "json"},
		CRIO:        CRIO{NRIEndpoint: "/run/nri/nri.sock"},
		Reclaim:     Reclaim{EvictBy: EvictByKubernetes},
		Snapshotter: Snapshotter{
			Database:           "/var/lib/cleave/snapshotter/metadata.db",
			Endpoint:           "/run/cleave/snapshotter.sock",
			StatusEndpoint:     "/run/cleave/snapshotter-status.sock",
			Namespaces:         []string{"k8s.io"},
			RemapIDs:           true,
			ParallelUnpack:     true,
			UsageMaxAge:        10 * time.Second,
			DeletionsPerSecond: 20_000,
			CleanupMaxPercent:  10,
		},
	}
}

//go:embed example.yaml
var example string

// Example returns the file to install: all keys with their defaults, and what
// they mean.
func Example() []byte { return []byte(example) }

// Load reads the file at path; keys that are not in it have their defaults.
//
// Errors are ErrMissing if there is no such file, Faults (see errors.As) if it
// is wrong, and otherwise the reason why it could not be read.
func Load(path string) (Config, error) {
	// Opening a named pipe would wait for a writer without O_NONBLOCK (fifo(7)).
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return Config{}, fmt.Errorf("read config %q: %w", path, ErrMissing)
	}
	if err != nil {
		return Config{}, fmt.Errorf("read config: %w", err)
	}
	defer f.Close() //nolint:errcheck // only read
	info, err := f.Stat()
	if err != nil {
		return Config{}, fmt.Errorf("read config: %w", err)
	}
	if !info.Mode().IsRegular() {
		return Config{}, fmt.Errorf("read config %q: it is not a regular file (%s): write the configuration to one and name that", path, info.Mode())
	}
	data, err := io.ReadAll(io.LimitReader(f, maxFileBytes+1))
	if err != nil {
		return Config{}, fmt.Errorf("read config: %w", err)
	}
	return Parse(path, data)
}
