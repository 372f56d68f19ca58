package web

import (
	"cmp"
	"maps"
	"slices"

	"github.com/prometheus/client_golang/prometheus"
)

// metric is one metric, what it means, and how it is got.
type metric struct {
	description *prometheus.Desc
	kind        kind
	name, help  string
	labels      []string
	collect     func(v *Values, put putter)
}

type kind string

// The kinds of metrics.
const (
	gauge     kind = "gauge"
	counter   kind = "counter"
	histogram kind = "histogram"
)

// putter takes the values of one metric.
type putter struct {
	value     func(value float64, labels ...string)
	histogram func(count uint64, sum float64, buckets map[float64]uint64, labels ...string)
}

var (
	filesystemLabels = []string{"role", "device", "mountpoint"}
	containerLabels  = []string{"namespace", "pod", "uid", "container"}
	podLabels        = []string{"namespace", "pod", "uid"}
)

// metrics are all of them, in the order of their names.
func metrics() []metric {
	all := slices.Concat(general(), ofFilesystems(), ofOwners(), ofProxy(), ofReclaim(), ofKubelet())
	slices.SortFunc(all, func(a, b metric) int { return cmp.Compare(a.name, b.name) })
	for i := range all {
		all[i].description = prometheus.NewDesc(all[i].name, all[i].help, all[i].labels, nil)
	}
	return all
}

// maybe puts a value that may not be known.
func maybe[T int64 | uint64 | float64](put putter, value *T, labels ...string) {
	if value != nil {
		put.value(float64(*value), labels...)
	}
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

func general() []metric {
	return []metric{
		{
			kind: gauge, name: "cleave_build_info", help: "Always 1; the label is cleave's version.", labels: []string{"version"},
			collect: func(v *Values, put putter) { put.value(1, v.Version) },
		},
		{
			kind: gauge, name: "cleave_heap_bytes", help: "What cleave's heap holds.",
			collect: func(v *Values, put putter) { maybe(put, v.HeapBytes) },
		},
		{
			kind: gauge, name: "cleave_series_left_out", help: "Containers, pods and images without series of their own, because there are too many: the smallest.", labels: []string{"kind"},
			collect: func(v *Values, put putter) {
				for _, of := range []struct {
					kind      string
					all, most int
				}{{"container", len(v.Containers), MaxContainers}, {"image", len(v.Images), MaxImages}, {"pod", len(v.Pods), MaxPods}} {
					put.value(float64(max(0, of.all-of.most)), of.kind)
				}
			},
		},
		{
			kind: gauge, name: "cleave_survey_age_seconds", help: "How long ago it was last found out which images, containers and pods there are.",
			collect: func(v *Values, put putter) {
				if v.Survey != nil {
					maybe(put, v.Survey.AgeSeconds)
				}
			},
		},
		{
			kind: gauge, name: "cleave_survey_seconds", help: "How long it took the last time to find out which images, containers and pods there are.",
			collect: func(v *Values, put putter) {
				if v.Survey != nil {
					maybe(put, v.Survey.Seconds)
				}
			},
		},
		{
			kind: counter, name: "cleave_walk_entries_total", help: "Inodes that were looked at to measure what takes how much, by reason.", labels: []string{"reason"},
			collect: func(v *Values, put putter) {
				if v.Survey != nil {
					byName(v.Survey.Entries, func(name string, n int64) { put.value(float64(n), name) })
				}
			},
		},
	}
}

// byName goes through a map in the order of names.
func byName[V any](m map[string]V, do func(name string, v V)) {
	for _, name := range slices.Sorted(maps.Keys(m)) {
		do(name, m[name])
	}
}

// filesystem is a metric of each filesystem.
func filesystem(name, help string, value func(*Filesystem) *float64) metric {
	return metric{
		kind: gauge, name: "cleave_filesystem_" + name, help: help, labels: filesystemLabels,
		collect: func(v *Values, put putter) {
			for i := range v.Filesystems {
				f := &v.Filesystems[i]
				maybe(put, value(f), f.Role, f.Device, f.Mountpoint)
			}
		},
	}
}

func known[T int | int64 | uint64](n T) *float64 { f := float64(n); return &f }

func ifKnown[T int64 | uint64](n *T) *float64 {
	if n == nil {
		return nil
	}
	return known(*n)
}

func ofFilesystems() []metric {
	class := func(name, help string, value func(Class) uint64) metric {
		return metric{
			kind: gauge, name: "cleave_filesystem_class_" + name, help: help, labels: []string{"role", "device", "class"},
			collect: func(v *Values, put putter) {
				for i := range v.Filesystems {
					for _, c := range v.Filesystems[i].Classes {
						put.value(float64(value(c)), v.Filesystems[i].Role, v.Filesystems[i].Device, c.Class)
					}
				}
			},
		}
	}
	return []metric{
		filesystem("available_bytes", "What anybody may still write to the filesystem of a role.", func(f *Filesystem) *float64 { return known(f.AvailableBytes) }),
		filesystem("capacity_bytes", "The size of the filesystem of a role.", func(f *Filesystem) *float64 { return known(f.CapacityBytes) }),
		class("used_bytes", "What one class of things takes on the filesystem of a role.", func(c Class) uint64 { return c.Bytes }),
		class("used_inodes", "The inodes of one class of things on the filesystem of a role.", func(c Class) uint64 { return c.Inodes }),
		filesystem("figures_age_seconds", "How old the oldest figure of the filesystem of a role may be.", func(f *Filesystem) *float64 { return f.OldestSeconds }),
		filesystem("inodes", "The inodes of the filesystem of a role; missing where it has no limit.", func(f *Filesystem) *float64 { return ifKnown(f.Inodes) }),
		filesystem("inodes_free", "The free inodes of the filesystem of a role; missing where it has no limit.", func(f *Filesystem) *float64 { return ifKnown(f.InodesFree) }),
		filesystem("open_deleted_bytes", "What deleted files take that containers still have open.", func(f *Filesystem) *float64 { return ifKnown(f.OpenDeletedBytes) }),
		filesystem("reserved_bytes", "What only root may still write to the filesystem of a role.", func(f *Filesystem) *float64 { return known(f.ReservedBytes) }),
		filesystem("stuck", "1 if the filesystem of a role does not answer or is away: its figures are then old. Else 0.", func(f *Filesystem) *float64 {
			x := truth(f.Stuck)
			return &x
		}),
		filesystem("unattributed_bytes", "Used on the filesystem of a role, and owned by nobody that cleave knows. Below zero where files share extents.", func(f *Filesystem) *float64 {
			return ifKnown(f.UnattributedBytes)
		}),
		filesystem("unmeasured", "Things on the filesystem of a role that have no figure yet.", func(f *Filesystem) *float64 { return known(f.Unmeasured) }),
		filesystem("used_bytes", "What is used on the filesystem of a role.", func(f *Filesystem) *float64 { return known(f.UsedBytes) }),
	}
}

func ofOwners() []metric {
	container := func(name, help string, value func(*Container) *uint64) metric {
		return metric{
			kind: gauge, name: "cleave_container_" + name, help: help, labels: containerLabels,
			collect: func(v *Values, put putter) {
				for i := range v.Containers[:min(len(v.Containers), MaxContainers)] {
					c := &v.Containers[i]
					maybe(put, value(c), c.Namespace, c.Pod, c.UID, c.Container)
				}
			},
		}
	}
	pod := func(name, help string, value func(*Pod) *uint64) metric {
		return metric{
			kind: gauge, name: "cleave_pod_" + name, help: help, labels: podLabels,
			collect: func(v *Values, put putter) {
				for i := range v.Pods[:min(len(v.Pods), MaxPods)] {
					p := &v.Pods[i]
					maybe(put, value(p), p.Namespace, p.Pod, p.UID)
				}
			},
		}
	}
	return []metric{
		container("logs_bytes", "What the logs of a running container take.", func(c *Container) *uint64 { return c.LogsBytes }),
		container("open_deleted_bytes", "What deleted files take that a running container still has open.", func(c *Container) *uint64 { return c.OpenDeletedBytes }),
		container("rootfs_bytes", "What the writable layer of a running container takes, with those of its earlier instances.", func(c *Container) *uint64 { return c.RootFSBytes }),
		{
			kind: gauge, name: "cleave_image_exclusive_bytes", help: "What would come free if this image alone were removed; of the images of which that is most.", labels: []string{"image"},
			collect: func(v *Values, put putter) {
				for _, i := range v.Images[:min(len(v.Images), MaxImages)] {
					put.value(float64(i.ExclusiveBytes), i.Image)
				}
			},
		},
		pod("empty_dir_bytes", "What the emptyDir volumes of a pod take on disk.", func(p *Pod) *uint64 { return p.EmptyDirBytes }),
		pod("held_bytes", "What would come free on all filesystems if the pod went, as far as that is known.", func(p *Pod) *uint64 { return &p.HeldBytes }),
		pod("kubelet_bytes", "What the kubelet counts as the pod's ephemeral storage.", func(p *Pod) *uint64 { return p.KubeletBytes }),
		pod("logs_bytes", "What the logs of a pod's containers take, and its own.", func(p *Pod) *uint64 { return p.LogsBytes }),
	}
}

func ofProxy() []metric {
	of := func(m metric, collect func(p *Proxy, put putter)) metric {
		m.collect = func(v *Values, put putter) {
			if v.Proxy != nil {
				collect(v.Proxy, put)
			}
		}
		return m
	}
	return []metric{
		of(metric{
			kind: histogram, name: "cleave_proxy_call_duration_seconds", labels: []string{"method"},
			help: "How long CRI calls took through cleave, from the header of the request to the end of the answer. Those that do not end by themselves are left out.",
		}, func(p *Proxy, put putter) {
			for _, m := range p.Methods {
				if len(m.Within) != len(p.Bounds)+1 {
					continue
				}
				buckets := map[float64]uint64{}
				for i, bound := range p.Bounds {
					buckets[bound] = count(m.Within[i])
				}
				put.histogram(count(m.Within[len(p.Bounds)]), m.Seconds, buckets, m.Method)
			}
		}),
		of(metric{kind: gauge, name: "cleave_proxy_calls_in_flight", help: "CRI calls that are not answered yet."}, func(p *Proxy, put putter) {
			put.value(float64(p.InFlight))
		}),
		of(metric{
			kind: counter, name: "cleave_proxy_calls_total", labels: []string{"method", "code"},
			help: "CRI calls that have ended, by method and gRPC status. Method other is all that are not the CRI's; code none is for calls that were broken off.",
		}, func(p *Proxy, put putter) {
			for _, m := range p.Methods {
				byName(m.Codes, func(code string, n int64) { put.value(float64(n), m.Method, code) })
			}
		}),
		of(metric{kind: gauge, name: "cleave_proxy_connections", help: "Open connections to cleave's CRI socket."}, func(p *Proxy, put putter) {
			put.value(float64(p.Connections))
		}),
		of(metric{
			kind: counter, name: "cleave_proxy_fallbacks_total", labels: []string{"method", "reason"},
			help: "Answers and requests that went through uncorrected, because their interceptor failed.",
		}, func(p *Proxy, put putter) {
			for _, f := range p.Fallbacks {
				put.value(float64(f.Count), f.Method, f.Reason)
			}
		}),
	}
}

func count(n int64) uint64 { return uint64(max(n, 0)) } //nolint:gosec // not below zero

func ofReclaim() []metric {
	of := func(m metric, collect func(r *Reclaim, put putter)) metric {
		m.collect = func(v *Values, put putter) {
			if v.Reclaim != nil {
				collect(v.Reclaim, put)
			}
		}
		return m
	}
	deletion := func(name, help string, value func(Deletion) int64) metric {
		return of(metric{kind: counter, name: "cleave_deletion" + name, help: help, labels: []string{"kind", "rule"}}, func(r *Reclaim, put putter) {
			for _, d := range r.Deletions {
				put.value(float64(value(d)), d.Kind, d.Rule)
			}
		})
	}
	return []metric{
		of(metric{kind: gauge, name: "cleave_decider_blind", help: "1 if nothing can be decided about the disks at the moment, else 0; missing where reclaim is off. cleave status says why."}, func(r *Reclaim, put putter) {
			put.value(truth(r.Blind))
		}),
		of(metric{kind: counter, name: "cleave_decisions_total", labels: []string{"outcome"}, help: "Decisions about the disks, by what they came to; missing where reclaim is off."}, func(r *Reclaim, put putter) {
			byName(r.Decisions, func(outcome string, n int64) { put.value(float64(n), outcome) })
		}),
		deletion("_expected_bytes_total", "What deletions were expected to free, by kind and rule.", func(d Deletion) int64 { return d.ExpectedBytes }),
		deletion("_gained_bytes_total", "What came free in deletions, by the filesystem's own figures.", func(d Deletion) int64 { return max(0, d.GainedBytes) }),
		deletion("s_failed_total", "Things that were to be deleted and are still there.", func(d Deletion) int64 { return d.Failed }),
		deletion("s_total", "Things that were deleted, by kind and rule (docs/engine.md).", func(d Deletion) int64 { return d.Count }),
		of(metric{kind: counter, name: "cleave_evictions_failed_total", help: "Pods that were told to go and stay."}, func(r *Reclaim, put putter) {
			put.value(float64(r.EvictionsFailed))
		}),
		of(metric{kind: counter, name: "cleave_evictions_total", labels: []string{"reason"}, help: "Pods that were told to go, by signal or limit."}, func(r *Reclaim, put putter) {
			byName(r.Evictions, func(reason string, n int64) { put.value(float64(n), reason) })
		}),
		of(metric{
			kind: gauge, name: "cleave_forecast_seconds", labels: []string{"signal"},
			help: "Seconds until a hard threshold of cleave is met at the present speed; missing for what does not fall, and beyond a day.",
		}, func(r *Reclaim, put putter) {
			byName(r.Forecast, func(signal string, seconds float64) { put.value(seconds, signal) })
		}),
		of(metric{
			kind: counter, name: "cleave_records_total", labels: []string{"result"},
			help: "Records of decisions, by what became of them: written, dropped because too many waited, or failed.",
		}, func(r *Reclaim, put putter) {
			byName(r.Records, func(result string, n uint64) { put.value(float64(n), result) })
		}),
	}
}

func ofKubelet() []metric {
	of := func(name, help string, value func(Kubelet) (float64, bool)) metric {
		return metric{kind: gauge, name: "cleave_kubelet_" + name, help: help, collect: func(v *Values, put putter) {
			if v.Kubelet == nil {
				return
			}
			if x, ok := value(*v.Kubelet); ok {
				put.value(x)
			}
		}}
	}
	return []metric{
		of("problems", "In mode crio: how many things keep the kubelet from seeing the disks as they are. cleave status names them.", func(k Kubelet) (float64, bool) {
			return float64(k.Problems), true
		}),
		of("summary_right", "In mode crio: 1 if the kubelet's summary has the disks as they are, 0 if not; missing while that is not known.", func(k Kubelet) (float64, bool) {
			if k.SummaryRight == nil {
				return 0, false
			}
			return truth(*k.SummaryRight), true
		}),
		of("told_split", "In mode crio: 1 if the kubelet was told that images and containers are on two disks, 0 if of one.", func(k Kubelet) (float64, bool) {
			return truth(k.Split), true
		}),
		of("unmeasured_containers", "In mode crio: containers that the kubelet does not measure until they are created anew.", func(k Kubelet) (float64, bool) {
			return float64(k.Unmeasured), true
		}),
	}
}
