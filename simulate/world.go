// Package simulate plays scenario files in the simulator and shows what came of
// it; it also shows recorded decisions. It is what `cleave simulate`, `cleave
// explain` and `cleave replay` do: the scenario format (lab/scenario), the
// simulator (engine/sim) and records (engine/record) don't know each other, and
// meet here. Nothing that acts on a node imports it.
package simulate

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/garbage"
	"github.com/cleave-cri/cleave/engine/sim"
	"github.com/cleave-cri/cleave/lab/scenario"
)

// World is a scenario as the simulator plays it.
func World(s *scenario.Scenario) *sim.World {
	w := &sim.World{Lasts: s.Lasts, PullBytesPerSecond: s.PullBytesPerSecond, Kubelet: kubelet(s), Cleave: cleave(s)}
	disks, images := map[string]int{}, map[string]int{}
	for i, f := range s.Filesystems {
		disks[f.Name] = i
		w.Filesystems = append(w.Filesystems, sim.Filesystem{
			Name: f.Name, CapacityBytes: f.SizeBytes, Inodes: f.Inodes, UsedBytes: f.UsedBytes, UsedInodes: f.UsedInodes, FreesAfter: f.FreesAfter,
		})
	}
	w.Node, w.Image, w.Container = disks[s.Layout.NodeFS], disks[s.Layout.ImageFS], disks[s.Layout.ContainerFS]
	for i, image := range s.Images {
		images[image.Name] = i
		to := sim.Image{Name: image.Name, ReportedBytes: image.ReportedBytes, Pinned: image.Pinned, Absent: !image.OnNode, UnusedFor: image.UnusedFor}
		for _, l := range image.Layers {
			to.Layers = append(to.Layers, sim.Layer{ID: l.Name, Bytes: l.Bytes, Inodes: l.Inodes})
		}
		w.Images = append(w.Images, to)
	}
	for i := range s.Pods {
		w.Pods = append(w.Pods, pod(&s.Pods[i], images))
	}
	for _, h := range s.Host {
		w.Host = append(w.Host, sim.HostWriter{Name: h.Name, Filesystem: disks[h.Filesystem], Writer: writer(h.Write)})
	}
	for _, f := range s.Faults {
		fault(w, s, f, disks)
	}
	return w
}

// fault makes of what goes wrong on a real node what of it decisions notice: a
// runtime that is away deletes nothing, a disk that is away has no figures.
func fault(w *sim.World, s *scenario.Scenario, f scenario.Fault, disks map[string]int) {
	kinds := []sim.FaultKind{sim.FaultKind(f.Kind)}
	switch f.Kind {
	case scenario.ContainerdKilled:
		kinds = []sim.FaultKind{sim.ImagesStay, sim.ContainersStay}
	case scenario.SnapshotterKilled:
		kinds = []sim.FaultKind{sim.ImagesStay}
	case scenario.RootUnmounted:
		kinds = []sim.FaultKind{sim.MissingStats}
	case scenario.DiskFull:
		size := s.Filesystems[disks[f.On]].SizeBytes
		w.Host = append(w.Host, sim.HostWriter{
			Name: f.Kind + ": " + f.On, Filesystem: disks[f.On], Writer: sim.Writer{BytesPerSecond: size, AtMostBytes: size, From: f.From, Until: f.From + time.Second},
		})
		return
	}
	for _, kind := range kinds {
		w.Faults = append(w.Faults, sim.Fault{Kind: kind, From: f.From, Until: f.Until, Pods: f.Pods})
	}
}

func pod(p *scenario.Pod, images map[string]int) sim.Pod {
	out := sim.Pod{Starts: p.Starts, Anew: p.AnewAfter}
	out.Spec = engine.Pod{Namespace: p.Namespace, Name: p.Name, Owner: p.Owner, Priority: &p.Priority, Static: p.Static}
	if p.Grace != nil {
		seconds := int64(p.Grace.Seconds())
		out.Spec.GraceSeconds = &seconds
	}
	if p.PodLevelMemoryBytes > 0 {
		out.Spec.PodLevel, out.Spec.PodLevelMemory = true, amount(&p.PodLevelMemoryBytes)
	}
	for _, v := range p.Volumes {
		volume := engine.Volume{Name: v.Name, Kind: v.Kind}
		if v.SizeLimitBytes > 0 {
			volume.SizeLimit = amount(&v.SizeLimitBytes)
		}
		out.Spec.Volumes = append(out.Spec.Volumes, volume)
	}
	for _, c := range p.Containers {
		spec := engine.Container{Name: c.Name}
		spec.Requests.EphemeralStorage, spec.Limits.EphemeralStorage = amount(c.RequestBytes), amount(c.LimitBytes)
		out.Spec.Containers = append(out.Spec.Containers, spec)
		to := sim.Container{Name: c.Name, Image: images[c.Image], ExitsAfter: c.ExitsAfter, RestartsAfter: c.RestartsAfter}
		for _, w := range c.Writes {
			to.Writers = append(to.Writers, writer(w))
		}
		out.Containers = append(out.Containers, to)
	}
	return out
}

func writer(w scenario.Write) sim.Writer {
	out := sim.Writer{
		AtOnceBytes: w.AtOnceBytes, AtOnceInodes: w.AtOnceInodes, BytesPerSecond: w.BytesPerSecond, InodesPerSecond: w.InodesPerSecond,
		From: w.From, Until: w.Until, AtMostBytes: w.AtMostBytes, UnlinksAfter: w.UnlinksAfter,
	}
	switch volume, ok := strings.CutPrefix(w.To, scenario.ToVolume); {
	case ok:
		out.To, out.Volume = sim.Volume, volume
	case w.To == scenario.ToLog:
		out.To = sim.Log
	default:
		out.To = sim.WritableLayer
	}
	return out
}

func amount(bytes *int64) *resource.Quantity {
	if bytes == nil {
		return nil
	}
	return resource.NewQuantity(*bytes, resource.BinarySI)
}

func kubelet(s *scenario.Scenario) sim.Kubelet {
	k := s.Kubelet
	return sim.Kubelet{
		Config: engine.Config{
			Thresholds: k.Thresholds, TransitionPeriod: k.PressureTransitionPeriod, MaxPodGraceSeconds: k.MaxPodGraceSeconds, LimitIsolation: true,
		},
		Images: garbage.ImagePolicy{HighPercent: k.ImageGCHighPercent, LowPercent: k.ImageGCLowPercent, MinAge: k.ImageMinimumAge, MaxAge: k.ImageMaximum},
		Logs:   garbage.LogPolicy{MaxSizeBytes: k.ContainerLogMaxSizeBytes, MaxFiles: k.ContainerLogMaxFiles},
		CRIO:   k.CRIO,
	}
}

func cleave(s *scenario.Scenario) sim.Cleave {
	c := sim.Cleave{
		Options: engine.Cleave(), LastResort: s.Cleave.LastResort, LogBudgetBytes: s.Cleave.LogBudgetBytes,
		OwnerPerHour: s.Cleave.OwnerPerHour, PerHour: s.Cleave.PerHour,
	}
	options := reflect.ValueOf(&c.Options).Elem()
	for _, name := range slices.Sorted(maps.Keys(s.Cleave.Options)) {
		options.FieldByName(name).SetBool(s.Cleave.Options[name])
	}
	return c
}

// Check says what of a result is not as a scenario expects it.
func Check(e scenario.Expect, r *sim.Result) []string {
	var out []string
	fault := func(format string, args ...any) { out = append(out, fmt.Sprintf(format, args...)) }
	set := func(list []string) []string { return slices.Compact(slices.Sorted(slices.Values(list))) }
	listed := func(list []string) string {
		if len(list) == 0 {
			return "none"
		}
		return strings.Join(list, ", ")
	}
	if e.Evicted != nil && !slices.Equal(set(*e.Evicted), set(r.Evicted)) {
		fault("evicted are %s, expected %s", listed(set(r.Evicted)), listed(set(*e.Evicted)))
	}
	for _, name := range e.NotEvicted {
		if slices.Contains(r.Evicted, name) {
			fault("%s is evicted", name)
		}
	}
	if e.EvictionsAtLeast != nil && len(r.Evicted) < *e.EvictionsAtLeast {
		fault("%d evictions, expected at least %d", len(r.Evicted), *e.EvictionsAtLeast)
	}
	if e.EvictionsAtMost != nil && len(r.Evicted) > *e.EvictionsAtMost {
		fault("%d evictions, expected at most %d", len(r.Evicted), *e.EvictionsAtMost)
	}
	pressure := 0
	for _, event := range r.Events {
		if event.What == sim.ThresholdDue {
			pressure++
		}
	}
	if e.PressureAtLeast != nil && pressure < *e.PressureAtLeast {
		fault("a threshold became due %d times, expected at least %d", pressure, *e.PressureAtLeast)
	}
	if e.PressureAtMost != nil && pressure > *e.PressureAtMost {
		fault("a threshold became due %d times, expected at most %d", pressure, *e.PressureAtMost)
	}
	if e.ImagesRemoved != nil && !slices.Equal(set(*e.ImagesRemoved), set(r.ImagesRemoved)) {
		fault("images removed are %s, expected %s", listed(set(r.ImagesRemoved)), listed(set(*e.ImagesRemoved)))
	}
	for _, name := range e.ImagesKept {
		if slices.Contains(r.ImagesRemoved, name) {
			fault("image %s is removed", name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(e.NoSpaceAtLeast)) {
		if had := noSpace(r, name); had < e.NoSpaceAtLeast[name] {
			fault("%s had no space for %s, expected at least %s", name, had, e.NoSpaceAtLeast[name])
		}
	}
	for _, name := range slices.Sorted(maps.Keys(e.NoSpaceAtMost)) {
		if had := noSpace(r, name); had > e.NoSpaceAtMost[name] {
			fault("%s had no space for %s, expected at most %s", name, had, e.NoSpaceAtMost[name])
		}
	}
	for _, f := range r.Filesystems {
		if least, ok := e.AvailableAtLeast[f.Name]; ok && f.AvailableBytes < least {
			fault("%d bytes are available on %s at the end, expected at least %d", f.AvailableBytes, f.Name, least)
		}
	}
	for _, rule := range e.HeldBackBy {
		if !slices.ContainsFunc(r.Events, func(e sim.Event) bool { return e.What == sim.HeldBack && e.Rule == rule }) {
			fault("nothing was held back by %s", rule)
		}
	}
	return out
}

func noSpace(r *sim.Result, name string) time.Duration {
	if p := r.Pod(name); p != nil {
		return p.NoSpace
	}
	for _, h := range r.Host {
		if h.Name == name {
			return h.NoSpace
		}
	}
	return 0
}
