package sim

import (
	"cmp"
	"slices"
	"time"

	"github.com/cleave-cri/cleave/engine"
)

// How often figures are taken: the runtime looks at writable layers every 10 s,
// cAdvisor every 60 s, the kubelet at volumes every 60 s (LAY-3, ACC-12).
const (
	runtimeScan  = 10 * time.Second
	cadvisorScan = 60 * time.Second
	volumeScan   = 60 * time.Second
)

// walk takes the kubelet's figures. Logs it looks at with each pass.
func (n *node) walk() {
	layers, volumes := runtimeScan, volumeScan
	if n.world.Kubelet.CRIO {
		layers = cadvisorScan
	}
	if n.now%ticks(layers) == 0 {
		n.scanned = n.now
		for _, p := range n.pods {
			for _, inst := range p.instances {
				if inst != nil {
					inst.layer.walk()
				}
			}
		}
	}
	if n.now%ticks(volumes) == 0 {
		for _, p := range n.pods {
			for _, v := range p.volumes {
				v.walk()
			}
		}
	}
}

// detected is how filesystems are shared, as a keeper can tell.
func (n *node) detected(k *keeper) *engine.Detected {
	w := n.world
	d := engine.Detected{ImageApart: w.Image != w.Node}
	if k.whole || w.Kubelet.CRIO {
		d.ContainerApart = w.Container != w.Image
	}
	if k.whole {
		d.ContainerOffNode = w.Container != w.Node
	}
	return &d
}

// observe is what a keeper sees now.
func (n *node) observe(k *keeper) engine.Input {
	in := engine.Input{Now: n.time(), Layout: n.detected(k)}
	for _, p := range n.pods {
		if p.alive() {
			in.Pods = append(in.Pods, p.engine)
		}
	}
	switch {
	case n.faulty(MissingStats, ""):
	case n.faulty(StaleStats, "") && k.last != nil:
		in.Summary, in.Unattributed = k.last, k.lastNobodys
	default:
		in.Summary = n.summary(k)
		if k.whole {
			in.Unattributed = n.unattributed()
		}
		k.last, k.lastNobodys = in.Summary, in.Unattributed
	}
	return in
}

func (n *node) summary(k *keeper) *engine.Summary {
	now := n.time()
	s := &engine.Summary{NodeFS: n.nodefs().stats(now)}
	layers := now
	if !k.whole && !n.world.Kubelet.CRIO {
		layers = began.Add(time.Duration(n.scanned) * Tick) // OBS-6
	}
	s.ImageFS = n.imagefs().stats(layers)
	s.ContainerFS = s.ImageFS // LAY-2
	if k.whole || n.world.Kubelet.CRIO {
		s.ContainerFS = n.containerfs().stats(layers)
	}
	var images map[*pod]int64
	if k.whole {
		images = n.exclusiveImages()
	}
	for _, p := range n.pods {
		if n.faulty(MissingPodStats, p.engine.Name) {
			continue
		}
		if st := n.podStats(p, k, now, s.NodeFS); st != nil {
			if bytes, ok := images[p]; ok {
				st.Images = &engine.FSStats{Time: now, UsedBytes: ptr(uint64(bytes))}
			}
			s.Pods = append(s.Pods, *st)
		}
	}
	return s
}

// podStats are a pod's figures; nil if no container of it runs (ACC-4).
func (n *node) podStats(p *pod, k *keeper, now time.Time, nodefs *engine.FSStats) *engine.PodStats {
	st := &engine.PodStats{UID: p.engine.UID}
	figures := func(b *bag) *engine.FSStats {
		if k.whole {
			return &engine.FSStats{Time: now, UsedBytes: ptr(uint64(b.bytes + b.hiddenBytes)), InodesUsed: ptr(uint64(b.inodes))}
		}
		return &engine.FSStats{Time: now, UsedBytes: ptr(uint64(b.seenBytes)), InodesUsed: ptr(uint64(b.seenInodes))}
	}
	for _, inst := range p.instances {
		if inst == nil {
			continue
		}
		st.Containers = append(st.Containers, engine.ContainerStats{
			Name: inst.spec.Name, RootFS: figures(&inst.layer),
			Logs: &engine.FSStats{Time: now, UsedBytes: ptr(uint64(inst.logBytes())), InodesUsed: ptr(uint64(1 + len(inst.rotated)))},
		})
	}
	if len(st.Containers) == 0 {
		return nil
	}
	parts := engine.UsageParts{NodeFS: *nodefs, Containers: st.Containers}
	for i, v := range p.engine.Volumes {
		if !v.Kind.Ephemeral() { // of a hostPath nobody takes figures
			continue
		}
		vs := engine.VolumeStats{Name: v.Name, FSStats: *figures(p.volumes[i])}
		st.Volumes = append(st.Volumes, vs)
		parts.Volumes = append(parts.Volumes, vs)
	}
	usage := engine.PodUsage(parts)
	st.EphemeralStorage = &usage
	return st
}

// exclusiveImages is what of images comes free with each pod: layers of images
// that no other pod uses.
func (n *node) exclusiveImages() map[*pod]int64 {
	type user struct {
		pod  *pod
		many bool
	}
	users := map[string]user{}
	each := func(visit func(p *pod, l *Layer)) {
		for _, p := range n.pods {
			for i := range p.spec.Containers {
				if img := n.images[p.spec.Containers[i].Image]; img.here {
					for j := range img.spec.Layers {
						visit(p, &img.spec.Layers[j])
					}
				}
			}
		}
	}
	each(func(p *pod, l *Layer) {
		u, ok := users[l.ID]
		users[l.ID] = user{pod: p, many: ok && (u.many || u.pod != p)}
	})
	out := map[*pod]int64{}
	counted := map[string]bool{}
	each(func(p *pod, l *Layer) {
		if !users[l.ID].many && !counted[l.ID] {
			counted[l.ID] = true
			out[p] += n.layers[l.ID].bytes
		}
	})
	return out
}

// unattributed is what nobody who is known has, on each filesystem.
func (n *node) unattributed() []engine.Unattributed {
	known := map[*disk]int64{}
	for _, l := range n.layers {
		known[l.on] += l.bytes
	}
	for _, img := range n.images {
		known[n.imagefs()] += img.partial.bytes
	}
	instance := func(i *instance) {
		if i != nil {
			known[n.containerfs()] += i.layer.bytes + i.layer.hiddenBytes
			known[n.nodefs()] += i.logBytes()
		}
	}
	for _, p := range n.pods {
		for _, i := range p.instances {
			instance(i)
		}
		for i, v := range p.engine.Volumes {
			if v.Kind != engine.HostPath {
				known[n.nodefs()] += p.volumes[i].bytes + p.volumes[i].hiddenBytes
			}
		}
	}
	for _, i := range n.dead {
		instance(i)
	}
	for _, d := range n.disks { // being freed is known, too
		for _, a := range d.arriving {
			known[d] += a.bytes
		}
	}
	var out []engine.Unattributed
	for _, s := range []struct {
		signal engine.Signal
		on     *disk
	}{{engine.NodeFSAvailable, n.nodefs()}, {engine.ImageFSAvailable, n.imagefs()}, {engine.ContainerFSAvailable, n.containerfs()}} {
		out = append(out, engine.Unattributed{Signal: s.signal, Bytes: s.on.used - known[s.on], Who: n.suspects(s.on)})
	}
	return out
}

// suspects are those outside all pods who have bytes on a disk.
func (n *node) suspects(on *disk) []engine.Suspect {
	var out []engine.Suspect
	for i := range n.hosts {
		if h := &n.hosts[i]; h.bag.on == on && h.bag.bytes+h.bag.hiddenBytes > 0 {
			out = append(out, engine.Suspect{Name: h.spec.Name, Bytes: h.bag.bytes + h.bag.hiddenBytes})
		}
	}
	for name, b := range n.hostPaths {
		if b.on == on && b.bytes > 0 {
			out = append(out, engine.Suspect{Name: "hostPath of " + name, Bytes: b.bytes})
		}
	}
	slices.SortFunc(out, func(a, b engine.Suspect) int {
		return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.Name, b.Name))
	})
	return out
}

func (d *disk) stats(at time.Time) *engine.FSStats {
	s := &engine.FSStats{
		Time: at, AvailableBytes: ptr(uint64(d.free())), CapacityBytes: ptr(uint64(d.spec.CapacityBytes)), UsedBytes: ptr(uint64(d.used)),
		InodesFree: ptr(uint64(0)), Inodes: ptr(uint64(0)), InodesUsed: ptr(uint64(d.inodes)),
	}
	if d.spec.Inodes > 0 { // OBS-11: 0 of 0 where there is no limit
		s.InodesFree, s.Inodes = ptr(uint64(d.freeInodes())), ptr(uint64(d.spec.Inodes))
	}
	return s
}

func ptr[T any](v T) *T { return &v }
