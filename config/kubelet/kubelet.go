// Package kubelet reads what the node's kubelet really runs with: the arguments
// of its process, the file and the drop-ins that they name, and the kubelet's
// own defaults, put together as the kubelet puts them together. It also holds
// the checks of `cleave doctor` about that. It changes nothing and runs nothing.
// Of this module it imports only doctor; agent may import it.
//
// It has its own reading of the keys it needs, over yaml nodes: the kubelet's
// types (k8s.io/kubelet) would bring in the whole Kubernetes API, and know no
// line numbers. integration/kubeletoracle holds the result against the kubelet's
// own code.
//
// Facts about the kubelet were read in v1.37.2, and compared with it. Names such
// as THR-14 mark single rules; docs/kubelet.md has those that people meet.
package kubelet

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"
)

// Settings are what a kubelet runs with. It is a plain value.
//
// They are read after the kubelet was started. If a file was changed since, the
// kubelet runs with what the file said before: see ChangedSince.
type Settings struct {
	// PID is the process as this process's PID namespace numbers it.
	PID int
	// StartTicks is when the process started, in 1/100 s since boot (proc(5),
	// starttime): together with PID it names one process for good.
	StartTicks uint64
	// Started is StartTicks as a time of day, exact to about a second.
	Started time.Time
	// Version is the kubelet's version, as far as its program tells it.
	Version Version
	// Sources are the files that were read, in the order of their precedence.
	Sources []Source
	// UnknownFlags are flags that kubelet v1.37 has not. Another version's; what
	// they do is not known.
	UnknownFlags []string

	// RuntimeEndpoint is containerRuntimeEndpoint, as written: its text alone
	// decides about the stats provider (KSS-1).
	RuntimeEndpoint Setting[string]
	// ImageEndpoint is imageServiceEndpoint; empty means RuntimeEndpoint.
	ImageEndpoint Setting[string]
	// RootDir is --root-dir, whose filesystem is nodefs (OBS-3); absolute.
	RootDir Setting[string]
	// PodLogsDir is podLogsDir.
	PodLogsDir Setting[string]
	// StaticPodPath is staticPodPath; empty means that there are none.
	StaticPodPath Setting[string]

	// Address, Port and ReadOnlyPort are where the kubelet's own server listens: address, port with TLS, readOnlyPort without;
	// 0 is no port. Without a file of --config the read-only port is 10255.
	Address      Setting[string]
	Port         Setting[int32]
	ReadOnlyPort Setting[int32]
	// Kubeconfig is --kubeconfig; absolute, empty if there is none.
	Kubeconfig Setting[string]

	// EvictionHard is evictionHard after defaulting (THR-14, THR-15): signal to
	// threshold, as text. It is not set if the kubelet has none.
	EvictionHard Map[string]
	// EvictionSoft, EvictionSoftGracePeriod and EvictionMinimumReclaim are the
	// settings of those names.
	EvictionSoft            Map[string]
	EvictionSoftGracePeriod Map[string]
	EvictionMinimumReclaim  Map[string]
	// MergeDefaultEviction is mergeDefaultEvictionSettings. In a drop-in it has
	// no effect (THR-17).
	MergeDefaultEviction Setting[bool]
	// EvictionPressureTransition is evictionPressureTransitionPeriod; with 0 no
	// condition is ever reported (SYN-13).
	EvictionPressureTransition Setting[time.Duration]
	// EvictionMaxPodGraceSeconds is evictionMaxPodGracePeriod.
	EvictionMaxPodGraceSeconds Setting[int32]
	// AllocatableIgnoresEviction is --experimental-allocatable-ignore-eviction
	// (NAL-4).
	AllocatableIgnoresEviction Setting[bool]

	// ImageGCHighPercent and ImageGCLowPercent are of the capacity of imagefs.
	ImageGCHighPercent Setting[int32]
	ImageGCLowPercent  Setting[int32]
	// ImageMinimumGCAge and ImageMaximumGCAge are the settings of those names;
	// a maximum of 0 means none.
	ImageMinimumGCAge Setting[time.Duration]
	ImageMaximumGCAge Setting[time.Duration]

	// MinimumContainerTTL is --minimum-container-ttl-duration.
	MinimumContainerTTL Setting[time.Duration]
	// MaxDeadPerContainer is --maximum-dead-containers-per-container, and
	// MaxDeadContainers --maximum-dead-containers; below 0 means no limit.
	MaxDeadPerContainer Setting[int32]
	MaxDeadContainers   Setting[int32]

	// ContainerLogMaxSize is containerLogMaxSize, a quantity as text.
	ContainerLogMaxSize  Setting[string]
	ContainerLogMaxFiles Setting[int32]

	// FeatureGates are those that somebody set, by flag or file; Gate knows
	// about the rest.
	FeatureGates Map[bool]

	// CgroupDriver is cgroupDriver. Since 1.36 the kubelet takes the runtime's
	// answer instead, if the runtime gives one.
	CgroupDriver Setting[string]
	CgroupRoot   Setting[string]
	// SystemReserved and KubeReserved map a resource to a quantity as text.
	SystemReserved Map[string]
	KubeReserved   Map[string]
	// EnforceNodeAllocatable is the list of that name; "none" stands for none.
	EnforceNodeAllocatable Setting[[]string]
	// SystemReservedCgroup and KubeReservedCgroup are the settings of those names: what the tokens of EnforceNodeAllocatable are
	// about.
	SystemReservedCgroup Setting[string]
	KubeReservedCgroup   Setting[string]
	// NodeName is --hostname-override; empty means the machine's name in lower case.
	NodeName Setting[string]
	// LocalStorageCapacityIsolation is the setting of that name.
	LocalStorageCapacityIsolation Setting[bool]
}

// Setting is a value and where it came from.
type Setting[T any] struct {
	Value T
	From  Origin
}

// Map is a setting of several entries, each of which may come from elsewhere.
type Map[T any] struct {
	// Entries is nil if nobody set any and there is no default.
	Entries map[string]Setting[T]
	// From is where the setting as a whole was last given.
	From Origin
}

// Values gives the entries without their origins.
func (m Map[T]) Values() map[string]T {
	if m.Entries == nil {
		return nil
	}
	out := make(map[string]T, len(m.Entries))
	for k, v := range m.Entries {
		out[k] = v.Value
	}
	return out
}

// Keys gives the names of the entries in order.
func (m Map[T]) Keys() []string { return slices.Sorted(maps.Keys(m.Entries)) }

// Kind says what sort of place a value came from.
type Kind string

// The kinds of origin. The zero Origin is of a setting that nobody gave and
// that has no default.
const (
	// Default is the kubelet's own default.
	Default Kind = "default"
	// Flag is an argument of the process.
	Flag Kind = "flag"
	// File is the file that --config names.
	File Kind = "file"
	// DropIn is a file below the folder that --config-dir names.
	DropIn Kind = "drop-in"
)

// Origin is where a value came from.
type Origin struct {
	Kind Kind
	// Name is the flag with its dashes, or the path of the file as the kubelet
	// sees it.
	Name string
	// Line counts from 1; 0 means that no line is known.
	Line int
}

// IsSet says whether there is a value at all.
func (o Origin) IsSet() bool { return o.Kind != "" }

// String is for people: "flag --root-dir", "/var/lib/kubelet/config.yaml:12".
func (o Origin) String() string {
	switch {
	case o.Kind == "":
		return "not set"
	case o.Kind == Default:
		return "the kubelet's default"
	case o.Kind == Flag:
		return "flag " + o.Name
	case o.Line == 0:
		return o.Name
	default:
		return fmt.Sprintf("%s:%d", o.Name, o.Line)
	}
}

// Source is a file that settings came from.
type Source struct {
	// Kind is File or DropIn.
	Kind Kind
	// Path is as the kubelet sees it.
	Path string
	// Modified is the file's time of last modification.
	Modified time.Time
}

// startedWithin is how far Started may be off: the time of boot is known to a
// second only, and moves when the clock is set.
const startedWithin = 2 * time.Second

// ChangedSince lists the files that were modified after the kubelet was
// started: it does not read them again.
func (s Settings) ChangedSince() []string {
	var out []string
	for _, source := range s.Sources {
		if source.Modified.After(s.Started.Add(startedWithin)) {
			out = append(out, source.Path)
		}
	}
	return out
}

// The feature gates that cleave asks about.
const (
	// GateStatsFromCRI forces the CRI stats provider, whatever the endpoint
	// (KSS-1).
	GateStatsFromCRI = "PodAndContainerStatsFromCRI"
	// GateSeparateDiskGC lets the kubelet reclaim on a split filesystem.
	GateSeparateDiskGC = "KubeletSeparateDiskGC"
)

// stage is how a gate stands in a minor version 1.x and those after it.
type stage struct {
	since    int
	group    string // the gate that switches all of this stage
	standard bool
}

// stages are from pkg/features/kube_features.go of v1.37.2, newest first.
var stages = map[string][]stage{
	GateStatsFromCRI:   {{37, "AllBeta", false}, {23, "AllAlpha", false}},
	GateSeparateDiskGC: {{31, "AllBeta", true}, {29, "AllAlpha", false}},
}

// Gate says whether a feature gate is on. It is known if it was set, or if it is
// one of those named above and the kubelet's version is known.
func (s Settings) Gate(name string) (on, known bool) {
	if set, ok := s.FeatureGates.Entries[name]; ok {
		return set.Value, true
	}
	if !s.Version.Known() {
		return false, false
	}
	for _, st := range stages[name] {
		if s.Version.Major == 1 && s.Version.Minor >= st.since {
			// "AllAlpha=true" and "AllBeta=true" leave alone what is set by name.
			if all, ok := s.FeatureGates.Entries[st.group]; ok {
				return all.Value, true
			}
			return st.standard, true
		}
	}
	return false, false
}

// EffectiveImageEndpoint is the endpoint that the kubelet asks about images.
func (s Settings) EffectiveImageEndpoint() string {
	return cmp.Or(s.ImageEndpoint.Value, s.RuntimeEndpoint.Value)
}
