package kubeletoracle

import (
	"fmt"
	"math/rand/v2"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/cleave-cri/cleave/engine"
)

// scenario is one node's story. It is a plain value, so that it can be cut
// down and printed when kubelet and engine disagree.
type scenario struct {
	Settings           engine.Settings
	TransitionPeriod   time.Duration
	MaxPodGraceSeconds int64
	LimitIsolation     bool
	NoSeparateDiskGC   bool
	MemoryByKernel     bool
	Steps              []step

	// made are pods as an API server has them, by UID; the kubelet gets those, not what is made of Steps.
	made map[string]*corev1.Pod
}

// step is what the node looks like during one pass.
type step struct {
	// Layout is nil when detection fails.
	Layout *engine.Detected
	Pods   []engine.Pod
	// Summary is nil when measuring fails; After is what is measured after a
	// reclaim.
	Summary, After *engine.Summary
	// CleanUp is how long evicted pods take to be gone.
	CleanUp time.Duration
	// Newcomer asks to be admitted after the pass.
	Newcomer newcomer
}

type newcomer struct {
	Pod                   engine.Pod
	BestEffort, Tolerates bool
}

// The sizes are few and close together, so that ties and edges are common.
const (
	gib      = int64(1) << 30
	capacity = 100 * gib
	inodes   = int64(6553600)
)

// dice makes scenarios.
type dice struct{ *rand.Rand }

func (d dice) chance(percent int) bool { return d.IntN(100) < percent }

func pick[T any](d dice, from ...T) T { return from[d.IntN(len(from))] }

func ptr[T any](v T) *T { return &v }

// maybe is nil in the given share of cases.
func maybe[T any](d dice, percentNil int, v T) *T {
	if d.chance(percentNil) {
		return nil
	}
	return &v
}

func quantity(text string) *resource.Quantity {
	q := resource.MustParse(text)
	return &q
}

// amount is a request or limit.
func (d dice) amount(percentNil int) *resource.Quantity {
	text := pick(d, "0", "1Gi", "2Gi", "1", "500m", "1536Mi", "1073741825", "100Gi", "9223372036854775807", "3Gi", "10")
	if d.chance(percentNil) {
		return nil
	}
	return quantity(text)
}

// used is an amount of bytes that something takes.
func (d dice) used() uint64 {
	switch d.IntN(10) {
	case 0:
		return 0
	case 1:
		return uint64(gib) + uint64(d.IntN(3)) - 1
	case 2:
		return d.Uint64N(uint64(20 * gib))
	case 3:
		return pick(d, uint64(1)<<62, 1<<63, 1<<63-1, 1<<64-1)
	default:
		return uint64(d.IntN(5)) * uint64(gib) / 2
	}
}

func (d dice) count() uint64 {
	return pick(d, 0, 1, 2, 10, 1000, 1000000, uint64(d.IntN(5000000)))
}

func (d dice) fsUsage() *engine.FSStats {
	if d.chance(8) {
		return nil
	}
	return &engine.FSStats{UsedBytes: maybe(d, 8, d.used()), InodesUsed: maybe(d, 8, d.count())}
}

func (d dice) settings() engine.Settings {
	s := engine.Settings{
		Hard: map[string]string{}, Soft: map[string]string{}, SoftGrace: map[string]string{}, MinReclaim: map[string]string{},
		EnforcePods: d.chance(50),
	}
	bytes := func() string {
		return pick(d, "10Gi", "10%", "15%", "20Gi", "5%", "100%", "0%", "10737418240", "1.5Gi", "0.5", "0.0%", "100.0%", "NaN%", "50%")
	}
	counts := func() string { return pick(d, "5%", "1000", "1k", "10%", "327680", "100.0%") }
	reclaim := func() string {
		return pick(d, "0", "500Mi", "1Gi", "1%", "200%", "0.5", "9223372036854775807", "Inf%", "1e30%")
	}
	for _, signal := range engine.Signals() {
		value := bytes
		switch signal.Resource() {
		case engine.Inodes, engine.PIDs:
			value = counts
		case engine.Memory:
			if !d.chance(30) {
				continue
			}
		default:
		}
		if d.chance(45) {
			s.Hard[string(signal)] = value()
		}
		if d.chance(30) {
			s.Soft[string(signal)] = value()
		}
		if _, soft := s.Soft[string(signal)]; soft || d.chance(20) {
			s.SoftGrace[string(signal)] = pick(d, "0s", "10s", "11s", "30s", "90s", "10ns")
		}
		if d.chance(25) {
			s.MinReclaim[string(signal)] = reclaim()
		}
	}
	return s
}

// available is an amount near what thresholds ask for.
func (d dice) available(total int64, urgency int) uint64 {
	edges := []int64{
		0, total / 20, total/20 + 1, total / 10, total/10 - 1, 10 * gib, 10*gib - 1, 10*gib + 1, 10*gib + 500<<20, 15 * gib, 20 * gib,
		10737418400, 10737418399, total, total - 1, total + 1, 1, 327680, 327679, 1000, 999, 2 * total,
	}
	if d.chance(urgency) {
		return uint64(pick(d, edges...))
	}
	if d.chance(1) {
		return pick(d, uint64(1)<<63, 1<<64-1, 1<<63-1)
	}
	return uint64(total/2) + d.Uint64N(uint64(total/2))
}

func (d dice) filesystem(now time.Time, urgency int) *engine.FSStats {
	if d.chance(4) {
		return nil
	}
	size := pick(d, capacity, capacity, capacity, 500*gib, 0)
	count := pick(d, inodes, inodes, inodes, 0)
	return &engine.FSStats{
		Time:           d.moment(now),
		AvailableBytes: maybe(d, 4, d.available(capacity, urgency)),
		CapacityBytes:  maybe(d, 4, uint64(size)),
		InodesFree:     maybe(d, 4, d.available(inodes, urgency)),
		Inodes:         maybe(d, 4, uint64(count)),
	}
}

// moment is a time of measurement: mostly new, sometimes stale, backwards or
// unknown.
func (d dice) moment(now time.Time) time.Time {
	switch d.IntN(20) {
	case 0:
		return time.Time{}
	case 1, 2, 3:
		return time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)
	case 4:
		return now.Add(-time.Duration(d.IntN(60)) * time.Second)
	default:
		return now
	}
}

func (d dice) summary(now time.Time, pods []engine.Pod, urgency int) *engine.Summary {
	if d.chance(5) {
		return nil
	}
	s := &engine.Summary{
		NodeFS:      d.filesystem(now, urgency),
		ImageFS:     d.filesystem(now, urgency),
		ContainerFS: d.filesystem(now, urgency),
	}
	switch d.IntN(5) {
	case 0:
		s.ContainerFS = s.ImageFS
	case 1:
		s.ContainerFS = s.NodeFS
	default:
	}
	memory := func() *engine.MemoryStats {
		return &engine.MemoryStats{Time: d.moment(now), AvailableBytes: maybe(d, 4, d.available(capacity, urgency/8)), WorkingSetBytes: maybe(d, 4, d.used())}
	}
	if d.chance(90) {
		s.Memory = memory()
	}
	if d.chance(90) {
		s.AllocatableMemory = memory()
	}
	if d.chance(90) {
		s.Processes = &engine.ProcessLimits{Time: d.moment(now), MaxPID: maybe(d, 4, int64(32768)), RunningCount: maybe(d, 4, int64(d.IntN(33000)))}
	}
	for i := range pods {
		if d.chance(15) {
			continue
		}
		s.Pods = append(s.Pods, d.podStats(&pods[i]))
		if d.chance(2) {
			s.Pods = append(s.Pods, d.podStats(&pods[i]))
		}
	}
	return s
}

func (d dice) podStats(p *engine.Pod) engine.PodStats {
	st := engine.PodStats{UID: p.UID, EphemeralStorage: d.fsUsage(), MemoryBytes: maybe(d, 10, d.used()), ProcessCount: maybe(d, 10, d.count())}
	for _, c := range append(append([]engine.Container(nil), p.Containers...), p.InitContainers...) {
		if d.chance(80) {
			st.Containers = append(st.Containers, engine.ContainerStats{Name: c.Name, RootFS: d.fsUsage(), Logs: d.fsUsage(), MemoryBytes: maybe(d, 10, d.used())})
		}
	}
	for _, v := range p.Volumes {
		// The kubelet ends itself over a volume without used bytes, which its
		// own figures never have (SUM-8): there is nothing to compare.
		record := engine.VolumeStats{Name: v.Name, FSStats: engine.FSStats{UsedBytes: ptr(d.used()), InodesUsed: maybe(d, 5, d.count())}}
		if d.chance(80) {
			st.Volumes = append(st.Volumes, record)
		}
		if d.chance(3) {
			record.UsedBytes = ptr(d.used())
			st.Volumes = append(st.Volumes, record)
		}
	}
	return st
}

func (d dice) pod(i int) engine.Pod {
	p := engine.Pod{
		UID: fmt.Sprintf("uid-%02d", i), Namespace: "default", Name: fmt.Sprintf("pod-%02d", i),
		Priority:     maybe(d, 40, pick[int32](d, 0, 0, 100, -5, 1000)),
		GraceSeconds: maybe(d, 20, pick[int64](d, 0, 1, 30, 300)),
		Static:       d.chance(3),
		Mirror:       d.chance(3),
	}
	if d.chance(4) {
		p.Priority = ptr(pick(d, engine.SystemCritical, engine.SystemCritical-1, engine.SystemCritical+1))
	}
	limits := d.chance(25)
	container := func(name string) engine.Container {
		c := engine.Container{Name: name, Requests: engine.Amounts{EphemeralStorage: d.amount(50), Memory: d.amount(60)}}
		if limits {
			c.Limits.EphemeralStorage = d.amount(30)
			if d.chance(60) { // high ones, or every pass would end with them
				c.Limits.EphemeralStorage = quantity("9223372036854775807")
			}
		}
		return c
	}
	for j := range 1 + d.IntN(3) {
		p.Containers = append(p.Containers, container(fmt.Sprintf("c%d", j)))
	}
	for j := range d.IntN(3) {
		c := container(fmt.Sprintf("i%d", j))
		c.Sidecar = d.chance(50)
		p.InitContainers = append(p.InitContainers, c)
	}
	if d.chance(20) {
		p.Overhead = engine.Amounts{EphemeralStorage: d.amount(30), Memory: d.amount(30)}
	}
	if d.chance(20) {
		p.PodLevel = true
		p.PodLevelMemory = d.amount(40)
	}
	for j := range d.IntN(4) {
		v := engine.Volume{Name: fmt.Sprintf("v%d", j), Kind: pick(d, engine.EmptyDirDisk, engine.EmptyDirDisk, engine.EmptyDirMemory, engine.ConfigMap, engine.GitRepo, engine.HostPath, engine.OtherVolume)}
		if (v.Kind == engine.EmptyDirDisk || v.Kind == engine.EmptyDirMemory) && d.chance(15) {
			v.SizeLimit = d.amount(0)
		}
		p.Volumes = append(p.Volumes, v)
	}
	return p
}

func newScenario(seed uint64) scenario {
	d := dice{rand.New(rand.NewPCG(seed, 6))}
	sc := scenario{
		Settings:           d.settings(),
		TransitionPeriod:   pick(d, 0, 10*time.Second, 30*time.Second, 5*time.Minute),
		MaxPodGraceSeconds: pick[int64](d, 0, 60, -1, 30),
		LimitIsolation:     d.chance(70),
		NoSeparateDiskGC:   d.chance(5),
		MemoryByKernel:     d.chance(10),
	}
	if d.chance(3) {
		sc.Settings = engine.Settings{}
	}
	layout := engine.Detected{ImageApart: d.chance(60), ContainerApart: d.chance(40)}
	pods := d.IntN(12)
	if d.chance(20) {
		pods = d.IntN(40)
	}
	urgency := pick(d, 5, 15, 40)
	for i := range 5 + d.IntN(40) {
		now := time.Date(2000, 1, 1, 0, 0, 10*i+1, 0, time.UTC)
		st := step{Layout: &layout, CleanUp: pick(d, 0, 0, time.Second, 4200*time.Millisecond, 40*time.Second)}
		if d.chance(10) {
			st.Layout = nil
		}
		for j := range pods {
			if d.chance(90) {
				st.Pods = append(st.Pods, d.pod(j))
			}
		}
		d.Shuffle(len(st.Pods), func(a, b int) { st.Pods[a], st.Pods[b] = st.Pods[b], st.Pods[a] })
		st.Summary = d.summary(now, st.Pods, urgency)
		st.After = d.summary(now, nil, urgency/3)
		st.Newcomer = newcomer{Pod: d.pod(99), BestEffort: d.chance(50), Tolerates: d.chance(50)}
		sc.Steps = append(sc.Steps, st)
	}
	return sc
}
