// Package decide turns what the parts of cleave know into what the engine decides by: pods of kube, figures of ephemeral, settings of
// the kubelet. It is pure, and holds no opinion: what one side does not know the other is not told. Only agent may import it.
package decide

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cleave-cri/cleave/agent/ephemeral"
	"github.com/cleave-cri/cleave/config/kubelet"
	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/garbage"
	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/kube"
)

// Detected says how filesystems are shared, as the engine asks; nil if a role's place is not known.
func Detected(layout fsstats.Layout) *engine.Detected {
	node, okNode := layout.Get(fsstats.NodeFS)
	images, okImages := layout.Get(fsstats.ImageFS)
	containers, okContainers := layout.Get(fsstats.ContainerFS)
	if !okNode || !okImages || !okContainers || node.Missing || images.Missing || containers.Missing {
		return nil
	}
	n, i, c := node.Filesystem.Device, images.Filesystem.Device, containers.Filesystem.Device
	return &engine.Detected{ImageApart: i != n, ContainerApart: c != i, ContainerOffNode: c != n}
}

// Filesystem is a filesystem's own figures.
func Filesystem(f fsstats.Filesystem) *engine.FSStats {
	out := &engine.FSStats{Time: f.MeasuredAt, AvailableBytes: &f.AvailableBytes, CapacityBytes: &f.CapacityBytes, UsedBytes: &f.UsedBytes}
	if f.InodesTotal != nil && f.InodesFree != nil {
		used := *f.InodesTotal - min(*f.InodesFree, *f.InodesTotal)
		out.Inodes, out.InodesFree, out.InodesUsed = f.InodesTotal, f.InodesFree, &used
	}
	return out
}

// Thresholds are the kubelet's, with those of containerfs that it derives.
func Thresholds(s kubelet.Settings, layout engine.Layout) ([]engine.Threshold, error) {
	list, err := engine.Parse(engine.Settings{
		Hard: s.EvictionHard.Values(), Soft: s.EvictionSoft.Values(), SoftGrace: s.EvictionSoftGracePeriod.Values(),
		MinReclaim: s.EvictionMinimumReclaim.Values(), EnforcePods: slices.Contains(s.EnforceNodeAllocatable.Value, "pods"),
	})
	if err != nil {
		return nil, fmt.Errorf("read the kubelet's thresholds: %w", err)
	}
	list, _ = engine.WithContainerFS(list, layout)
	return list, nil
}

// horizon is how long before a threshold is met its reclaim may begin: the time that a deletion takes on a disk that is written to as fast
// as it goes, until the keeper has measured one. A minute before, a burst that ends would have cleared a node of its images.
const horizon = 2 * time.Second

// Config is how to decide beside a kubelet with these settings and thresholds of ours. Pods above limits of their own are the kubelet's
// alone to evict, so LimitIsolation is off: it sees emptyDirs' sizes and pods' limits in all modes, and a second opinion about the same
// figures would only end pods that it lets live. The layer that it does not see (GAP-29) is held by the kernel, see docs/reclaim.md.
func Config(s kubelet.Settings, ours []engine.Threshold) engine.Config {
	return engine.Config{
		Thresholds: ours, TransitionPeriod: s.EvictionPressureTransition.Value, MaxPodGraceSeconds: int64(s.EvictionMaxPodGraceSeconds.Value),
		Options: engine.Cleave(), Horizon: horizon,
	}
}

// Images is the kubelet's policy for images, with cleave's improvements.
func Images(s kubelet.Settings) garbage.ImagePolicy {
	return garbage.ImagePolicy{
		HighPercent: int(s.ImageGCHighPercent.Value), LowPercent: int(s.ImageGCLowPercent.Value),
		MinAge: s.ImageMinimumGCAge.Value, MaxAge: s.ImageMaximumGCAge.Value, Options: garbage.Cleave(),
	}
}

// Containers is the kubelet's policy for dead containers, with cleave's improvement.
func Containers(s kubelet.Settings) garbage.ContainerPolicy {
	return garbage.ContainerPolicy{
		MinAge: s.MinimumContainerTTL.Value, PerContainer: int(s.MaxDeadPerContainer.Value), Total: int(s.MaxDeadContainers.Value), NoneUnderPressure: true,
	}
}

// Pods are the active ones among those that are known (SYN-4), if they are known from not longer ago than maxAge. left says why others
// are left out, for people.
func Pods(view kube.View, now time.Time, maxAge time.Duration) (pods []engine.Pod, left []string) {
	for _, known := range view.All() {
		p := known.Pod
		switch {
		case p.Phase == "Succeeded" || p.Phase == "Failed":
		case p.UID == "":
			left = append(left, fmt.Sprintf("%s: its UID is not known", p))
		case known.Age(now) > maxAge:
			left = append(left, fmt.Sprintf("%s: known from %s ago", p, known.Age(now).Round(time.Second)))
		case len(p.Faults) > 0:
			left = append(left, fmt.Sprintf("%s: %s", p, strings.Join(p.Faults, ", ")))
		default:
			pods = append(pods, Pod(p, view.StaticName(p.Namespace, p.Name)))
		}
	}
	return pods, left
}

// Sandboxes are pods as far as the runtime knows them, where no API server says more: those that run, with nothing requested and no
// priority. Those that a file of the node makes are static, which never go. Of kube-system none is told, because its pods' priority,
// by which most of them never go, is not known.
func Sandboxes(sandboxes []ephemeral.Sandbox, list []ephemeral.Container) (pods []engine.Pod) {
	for _, s := range sandboxes {
		if !s.Ready || s.UID == "" || s.Namespace == "kube-system" {
			continue
		}
		pod := engine.Pod{UID: s.UID, Namespace: s.Namespace, Name: s.Name, Static: s.Static}
		for _, c := range list {
			if c.SandboxID == s.ID && c.Running {
				pod.Containers = append(pod.Containers, engine.Container{Name: c.Name})
			}
		}
		pods = append(pods, pod)
	}
	return pods
}

// Pod is a pod as the engine has it. static says that a file makes a pod of that name.
func Pod(p *kube.Pod, static bool) engine.Pod {
	out := engine.Pod{
		UID: p.UID, Namespace: p.Namespace, Name: p.Name, Owner: p.Owner, Priority: p.Priority, Static: p.Static || static, Mirror: p.Mirror,
		GraceSeconds: p.GraceSeconds, Overhead: engine.Amounts(p.Overhead), PodLevel: p.PodLevel, PodLevelMemory: p.PodLevelMemory,
		Containers: containers(p.Containers), InitContainers: containers(p.InitContainers),
	}
	for _, v := range p.Volumes {
		out.Volumes = append(out.Volumes, engine.Volume{Name: v.Name, Kind: engine.VolumeKind(v.Kind), SizeLimit: v.SizeLimit})
	}
	return out
}

func containers(list []kube.Container) []engine.Container {
	var out []engine.Container
	for _, c := range list {
		out = append(out, engine.Container{Name: c.Name, Sidecar: c.Sidecar, Requests: engine.Amounts(c.Requests), Limits: engine.Amounts(c.Limits)})
	}
	return out
}

// Complete says whether all pods of this node are known: every source has answered within maxAge, none has a problem or left a pod
// out, and of each static pod, by namespace/name, the UID is known. Else a pod that is not known is not gone. What the kubelet itself
// says is neither needed for that, as it often may not be asked, nor enough: one that was just started does not know all pods yet.
func Complete(view kube.View, static []string, now time.Time, maxAge time.Duration) bool {
	sources := slices.DeleteFunc(slices.Clone(view.Sources), func(s kube.SourceState) bool { return s.Name == kube.SourceKubelet })
	if len(sources) == 0 {
		return false
	}
	for _, s := range sources {
		if s.AsOf == nil || now.Sub(*s.AsOf) > maxAge || s.Problem != "" {
			return false
		}
	}
	known := map[string]bool{}
	for _, k := range view.All() {
		known[k.Pod.String()] = known[k.Pod.String()] || k.Pod.UID != ""
	}
	return !slices.ContainsFunc(static, func(name string) bool { return !known[name] })
}

// Fates say what is to become of what pods left behind. Where not all pods are known, nothing is known to be gone.
func Fates(view kube.View, complete bool) garbage.Pods {
	fates := garbage.Pods{Fate: map[string]garbage.PodFate{}, SourcesReady: complete, Synced: complete}
	for _, known := range view.All() {
		fate := garbage.Alive
		if known.Pod.Phase == "Succeeded" || known.Pod.Phase == "Failed" {
			fate = garbage.Ended
		}
		fates.Fate[known.Pod.UID] = fate
	}
	return fates
}

// PodStats is what a pod uses, as the kubelet looks at it: running containers alone (ACC-3), and the deleted files that they have open,
// which the kubelet does not see (ACC-16): they come free when the pod goes, and else a pod goes that has less. Those on the filesystem of
// the container's layer count with it, others, such as an emptyDir's, with its logs, which are on nodefs as volumes are. What dead
// containers left is not the pod's: it goes before any pod does, but for the newest instance, whose bytes nobody is ended for.
func PodStats(p ephemeral.Pod) engine.PodStats {
	out := engine.PodStats{UID: p.UID}
	for _, c := range p.Containers {
		if !c.Running {
			continue
		}
		layer, logs := use(c.Layer), use(c.LogFiles)
		for _, u := range c.OpenDeleted {
			if c.Layer != nil && c.Layer.Device == u.Device {
				layer = with(layer, u)
			} else {
				logs = with(logs, u)
			}
		}
		out.Containers = append(out.Containers, engine.ContainerStats{Name: c.Name, RootFS: layer, Logs: logs})
	}
	for _, v := range p.Volumes {
		if u := use(v.Use); u != nil {
			out.Volumes = append(out.Volumes, engine.VolumeStats{Name: v.Name, FSStats: *u})
		}
	}
	out.EphemeralStorage = use(ephemeral.Of(p).Kubelet)
	return out
}

// with is f with more bytes; f may be unknown.
func with(f *engine.FSStats, u ephemeral.Use) *engine.FSStats {
	if f == nil {
		return use(&u)
	}
	bytes, inodes := *f.UsedBytes+u.Bytes, *f.InodesUsed+u.Inodes
	return &engine.FSStats{Time: f.Time, UsedBytes: &bytes, InodesUsed: &inodes}
}

func use(u *ephemeral.Use) *engine.FSStats {
	if u == nil {
		return nil
	}
	return &engine.FSStats{Time: u.At, UsedBytes: &u.Bytes, InodesUsed: &u.Inodes}
}

// Layout is how filesystems are shared for an engine that tells a third disk apart (its option ThirdDisk).
func Layout(d engine.Detected) engine.Layout {
	switch {
	case !d.ContainerApart || !d.ContainerOffNode:
		return d.Layout()
	case d.ImageApart:
		return engine.Separate
	default:
		return engine.ContainersAlone
	}
}

// Beside derives thresholds that lie above the kubelet's. Those that don't are overlaps and left out: by them nobody may be evicted.
func Beside(kubelet []engine.Threshold, d engine.Detected, seen engine.Observations) (ours []engine.Threshold, overlaps []engine.Overlap, missing []engine.Signal) {
	layout := Layout(d)
	ours, missing = engine.DefaultMargin().Above(kubelet, layout, seen)
	overlaps = engine.Overlaps(ours, kubelet, layout, seen)
	for _, o := range overlaps {
		ours = slices.DeleteFunc(slices.Clone(ours), o.Ours.Same)
	}
	return ours, overlaps, missing
}
