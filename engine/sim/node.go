package sim

import (
	"fmt"
	"strings"
	"time"

	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/garbage"
)

// node is a world while it is played.
type node struct {
	world  *World
	now    int64 // tick
	disks  []*disk
	images []*image
	layers map[string]*layer
	pods   []*pod // those that are there, in the order in which they came
	hosts  []host
	dead   []*instance
	// hostPaths are what pods wrote to the host; it stays when they go.
	hostPaths map[string]*bag
	// keepers are who decides: the kubelet, and cleave beside it.
	kubelet, cleave *keeper
	result          *Result
	byName          map[string]*PodResult
	serial          int
	full            map[string]int64 // when somebody had no space last
	fates           map[string]garbage.PodFate
	// coming are pods that a controller or the world makes later.
	coming []comer
	// scanned is when the runtime looked at writable layers last.
	scanned int64
	// recorded says that records are kept.
	recorded bool
}

type image struct {
	spec *Image
	here bool
	// partial is what has arrived of a pull that is under way.
	partial bag
}

type layer struct {
	bag
	// images that are here and have it.
	images int
}

type host struct {
	spec *HostWriter
	bag  *bag
	flow flow
	lack int64 // ticks without space
}

type comer struct {
	at   int64
	spec *Pod
	anew bool
}

// pod is one life of a pod.
type pod struct {
	spec      *Pod
	engine    engine.Pod
	result    *PodResult
	instances []*instance // running ones, by the number of the container; nil for none
	next      []int64     // when to start it; < 0 for never
	lives     []int
	volumes   []*bag // of engine.Volumes
	// starting until all images are here; retry is when the pull is tried
	// again, backOff how long after the next failure.
	starting bool
	retry    int64
	backOff  int64
	endsAt   int64 // tick; < 0 while nobody ends it
	evicted  bool
	// ended is told when the pod has ended, with what came free on each disk.
	ended func(freed map[*disk]int64)
}

// instance is one life of a container.
type instance struct {
	id         string
	pod        *pod
	spec       *Container
	created    int64
	exitsAt    int64 // < 0 for never
	layer, log bag
	rotated    []rotated
	flows      []flow
}

type rotated struct {
	name      string
	bytes, at int64
}

func (i *instance) logBytes() int64 {
	sum := i.log.bytes
	for _, r := range i.rotated {
		sum += r.bytes
	}
	return sum
}

func (n *node) time() time.Time      { return began.Add(time.Duration(n.now) * Tick) }
func (n *node) since() time.Duration { return time.Duration(n.now) * Tick }
func (n *node) nodefs() *disk        { return n.disks[n.world.Node] }
func (n *node) imagefs() *disk       { return n.disks[n.world.Image] }
func (n *node) containerfs() *disk   { return n.disks[n.world.Container] }
func (n *node) event(e Event)        { e.At = n.since(); n.result.Events = append(n.result.Events, e) }

// newNode sets a world up at its first moment.
func newNode(w *World, profile Profile) *node {
	n := &node{
		world: w, layers: map[string]*layer{}, hostPaths: map[string]*bag{}, byName: map[string]*PodResult{},
		full: map[string]int64{}, fates: map[string]garbage.PodFate{}, result: &Result{Profile: profile},
	}
	for i := range w.Filesystems {
		n.disks = append(n.disks, newDisk(&w.Filesystems[i]))
	}
	for i := range w.Images {
		img := &image{spec: &w.Images[i], partial: bag{on: n.imagefs()}}
		n.images = append(n.images, img)
		if !img.spec.Absent {
			n.unpack(img)
		}
	}
	n.result.Pods = make([]PodResult, 0, len(w.Pods))
	for i := range w.Pods {
		spec := &w.Pods[i]
		n.result.Pods = append(n.result.Pods, PodResult{Name: spec.Spec.Name})
		n.byName[spec.Spec.Name] = &n.result.Pods[i]
		n.coming = append(n.coming, comer{at: ticks(spec.Starts), spec: spec})
	}
	for i := range w.Host {
		b := &bag{on: n.disks[w.Host[i].Filesystem]}
		n.hosts = append(n.hosts, host{spec: &w.Host[i], bag: b, flow: newFlow(&w.Host[i].Writer, b, 0)})
	}
	n.setUpKeepers(profile)
	return n
}

// unpack puts an image's layers on its disk; false if they don't fit.
func (n *node) unpack(img *image) bool {
	var taken []*layer
	for _, l := range img.spec.Layers {
		have := n.layers[l.ID]
		if have == nil {
			have = &layer{bag: bag{on: n.imagefs()}}
			n.layers[l.ID] = have
		}
		if have.images == 0 {
			gotBytes, gotInodes, ok := have.on.take(l.Bytes, l.Inodes)
			have.bytes, have.inodes = gotBytes, gotInodes
			if !ok {
				have.on.give(n.now, have.bytes, have.inodes)
				have.bytes, have.inodes = 0, 0
				for _, t := range taken {
					if t.images--; t.images == 0 {
						t.clear(n.now)
					}
				}
				return false
			}
		}
		have.images++
		taken = append(taken, have)
	}
	img.here = true
	return true
}

// removeImage deletes an image and the layers that no other has.
func (n *node) removeImage(img *image) (freed int64) {
	img.here = false
	for _, l := range img.spec.Layers {
		if have := n.layers[l.ID]; have != nil && have.images > 0 {
			if have.images--; have.images == 0 {
				freed += have.clear(n.now)
			}
		}
	}
	return freed
}

// step plays one tick.
func (n *node) step() {
	for _, d := range n.disks {
		d.arrive(n.now)
	}
	n.comeAndGo()
	n.write()
	n.keep()
	n.now++
}

// comeAndGo starts and ends pods and containers.
func (n *node) comeAndGo() {
	for i := 0; i < len(n.coming); i++ {
		if c := n.coming[i]; c.at <= n.now {
			n.coming = append(n.coming[:i], n.coming[i+1:]...)
			i--
			n.appear(c)
		}
	}
	gone := false
	for _, p := range n.pods {
		switch {
		case p.endsAt >= 0 && p.endsAt <= n.now:
			n.end(p)
			gone = true
		case p.starting:
			n.pull(p)
		default:
			n.turn(p)
		}
	}
	if !gone {
		return
	}
	kept := n.pods[:0]
	for _, p := range n.pods {
		if p.endsAt < 0 || p.endsAt > n.now {
			kept = append(kept, p)
		}
	}
	clear(n.pods[len(kept):])
	n.pods = kept
}

// appear is a pod that comes to the node. The kubelet may not admit it.
func (n *node) appear(c comer) {
	result := n.byName[c.spec.Spec.Name]
	spec := c.spec.Spec
	n.serial++
	spec.UID = fmt.Sprintf("%s-%d", spec.Name, n.serial)
	newcomer := engine.Newcomer{Critical: spec.Critical()}
	if ok, rule := n.kubelet.state.Admit(newcomer); !ok {
		result.Rejections++
		n.event(Event{By: "kubelet", What: PodRejected, Subject: spec.Name, Rule: rule})
		n.anew(c.spec)
		return
	}
	if c.anew {
		n.event(Event{What: PodAnew, Subject: spec.Name})
	}
	p := &pod{
		spec: c.spec, engine: spec, result: result, endsAt: -1, starting: true, backOff: ticks(10 * time.Second),
		instances: make([]*instance, len(c.spec.Containers)), next: make([]int64, len(c.spec.Containers)), lives: make([]int, len(c.spec.Containers)),
	}
	for _, v := range spec.Volumes {
		b := &bag{on: n.nodefs()}
		if v.Kind == engine.HostPath {
			key := spec.Name + "/" + v.Name
			if n.hostPaths[key] == nil {
				n.hostPaths[key] = b
			}
			b = n.hostPaths[key]
		}
		p.volumes = append(p.volumes, b)
	}
	n.pods = append(n.pods, p)
	n.fates[spec.UID] = garbage.Alive
	n.pull(p)
}

// anew has the controller of a pod make another one.
func (n *node) anew(spec *Pod) {
	if spec.Anew != nil {
		n.coming = append(n.coming, comer{at: n.now + max(1, ticks(*spec.Anew)), spec: spec, anew: true})
	}
}

// pull gets a pod's images, one after the other, and starts it when all are
// there. Nobody asks how much is free (IGC-24).
func (n *node) pull(p *pod) {
	if n.now < p.retry {
		return
	}
	for i := range p.spec.Containers {
		img := n.images[p.spec.Containers[i].Image]
		if img.here {
			continue
		}
		switch n.arrived(img) {
		case pullDone:
			continue
		case pullFailed:
			n.event(Event{What: PullFailed, Subject: img.spec.Name, Detail: p.engine.Name})
			p.retry = n.now + p.backOff
			p.backOff = min(2*p.backOff, ticks(5*time.Minute))
		}
		return
	}
	p.starting = false
	n.turn(p)
}

type pullState int

const (
	pullGoesOn pullState = iota
	pullDone
	pullFailed
)

// arrived takes what arrives of an image in one tick. When all has arrived its
// layers take the place of what was there of them.
func (n *node) arrived(img *image) pullState {
	rate := n.world.PullBytesPerSecond / ticksPerSecond
	var missing int64
	for _, l := range img.spec.Layers {
		if have := n.layers[l.ID]; have == nil || have.images == 0 {
			missing += l.Bytes
		}
	}
	if rate > 0 && img.partial.bytes < missing {
		got, _, ok := img.partial.on.take(min(rate, missing-img.partial.bytes), 0)
		if img.partial.bytes += got; !ok {
			img.partial.clear(n.now)
			return pullFailed
		}
		if img.partial.bytes < missing {
			return pullGoesOn
		}
	}
	// Nobody else can take this space in between.
	img.partial.on.used -= img.partial.bytes
	img.partial.bytes = 0
	if !n.unpack(img) {
		return pullFailed
	}
	return pullDone
}

// turn starts and ends containers of a pod.
func (n *node) turn(p *pod) {
	for i := range p.instances {
		inst := p.instances[i]
		if inst != nil && inst.exitsAt >= 0 && inst.exitsAt <= n.now {
			n.exit(inst, i)
			inst = nil
		}
		if inst == nil && p.next[i] >= 0 && p.next[i] <= n.now {
			n.start(p, i)
		}
	}
}

func (n *node) start(p *pod, i int) {
	spec := &p.spec.Containers[i]
	inst := &instance{
		id: fmt.Sprintf("%s/%s.%d", p.engine.UID, spec.Name, p.lives[i]), pod: p, spec: spec, created: n.now, exitsAt: -1,
		layer: bag{on: n.containerfs()}, log: bag{on: n.nodefs()},
	}
	p.lives[i]++
	p.next[i] = -1
	if spec.ExitsAfter > 0 {
		inst.exitsAt = n.now + max(1, ticks(spec.ExitsAfter))
	}
	for j := range spec.Writers {
		w := &spec.Writers[j]
		to := &inst.layer
		switch w.To {
		case Log:
			to = &inst.log
		case Volume:
			for k, v := range p.engine.Volumes {
				if v.Name == w.Volume {
					to = p.volumes[k]
				}
			}
		}
		inst.flows = append(inst.flows, newFlow(w, to, n.now))
	}
	p.instances[i] = inst
}

// exit ends a container; what is left of it stays (ACC-3). When a container
// dies the kubelet removes older dead instances of its name (CGC-13).
func (n *node) exit(inst *instance, i int) {
	p := inst.pod
	p.instances[i] = nil
	inst.flows = nil
	inst.layer.on.give(n.now, inst.layer.hiddenBytes, 0)
	inst.layer.hiddenBytes = 0
	n.dead = append(n.dead, inst)
	if r := inst.spec.RestartsAfter; r != nil && p.endsAt < 0 {
		p.next[i] = n.now + max(1, ticks(*r))
	}
	if n.deletionFails(ContainersStay) {
		return
	}
	var list []garbage.Container
	for _, d := range n.dead {
		if d.pod == p {
			list = append(list, d.listed(garbage.Exited))
		}
	}
	for _, c := range (garbage.ContainerPolicy{PerContainer: 1}).AfterDeath(inst.id, list, p.evicted) {
		n.removeDead(c.ID)
	}
	if !p.alive() && n.fates[p.engine.UID] == garbage.Alive {
		n.fates[p.engine.UID] = garbage.Ended
	}
}

// alive says whether any container of the pod runs or will.
func (p *pod) alive() bool {
	if p.starting {
		return true
	}
	for i := range p.instances {
		if p.instances[i] != nil || p.next[i] >= 0 {
			return true
		}
	}
	return false
}

// listed is the container as the runtime lists it.
func (i *instance) listed(state garbage.ContainerState) garbage.Container {
	return garbage.Container{ID: i.id, PodUID: i.pod.engine.UID, Name: i.spec.Name, State: state, CreatedAt: began.Add(time.Duration(i.created) * Tick)}
}

// removeDead deletes a dead container, its layer and its logs (LOG-16).
func (n *node) removeDead(id string) (freed int64, what *instance) {
	for k, d := range n.dead {
		if d.id != id {
			continue
		}
		n.dead = append(n.dead[:k], n.dead[k+1:]...)
		freed = d.layer.clear(n.now)
		freed += d.clearLogs(n.now)
		return freed, d
	}
	return 0, nil
}

func (i *instance) clearLogs(tick int64) (freed int64) {
	for _, r := range i.rotated {
		i.log.on.give(tick, r.bytes, 0)
		freed += r.bytes
	}
	i.rotated = nil
	return freed + i.log.clear(tick)
}

// end ends a pod: its containers die, its own volumes go.
func (n *node) end(p *pod) {
	freed := n.has(p)
	n.fates[p.engine.UID] = garbage.Gone
	for i := range p.instances {
		p.next[i] = -1
		if p.instances[i] != nil {
			n.exit(p.instances[i], i)
		}
	}
	for k, v := range p.engine.Volumes {
		if v.Kind != engine.HostPath {
			p.volumes[k].clear(n.now)
		}
	}
	if p.ended != nil {
		p.ended(freed)
	}
	if p.evicted {
		n.anew(p.spec)
	}
}

// has is what comes free on each disk when a pod ends.
func (n *node) has(p *pod) map[*disk]int64 {
	sum := map[*disk]int64{}
	for k, v := range p.engine.Volumes {
		if v.Kind != engine.HostPath {
			sum[n.nodefs()] += p.volumes[k].bytes + p.volumes[k].hiddenBytes
		}
	}
	add := func(i *instance) {
		if i != nil && i.pod == p {
			sum[n.containerfs()] += i.layer.bytes + i.layer.hiddenBytes
			sum[n.nodefs()] += i.logBytes()
		}
	}
	for _, i := range p.instances {
		add(i)
	}
	for _, i := range n.dead {
		add(i)
	}
	return sum
}

// write lets everybody write.
func (n *node) write() {
	for _, p := range n.pods {
		short := false
		for _, inst := range p.instances {
			if inst == nil {
				continue
			}
			for j := range inst.flows {
				if !inst.flows[j].step(n.now) {
					short = true
				}
			}
		}
		if short {
			p.result.NoSpace += Tick
		}
		n.noteSpace(p.engine.Name, short)
	}
	for i := range n.hosts {
		h := &n.hosts[i]
		ok := h.flow.step(n.now)
		if !ok {
			h.lack++
		}
		n.noteSpace(h.spec.Name, !ok)
	}
}

// noteSpace tells when somebody has no space, after a minute in which there was
// some.
func (n *node) noteSpace(who string, short bool) {
	if !short {
		return
	}
	last, before := n.full[who]
	n.full[who] = n.now
	if !before || n.now-last > ticks(time.Minute) {
		n.event(Event{What: NoSpace, Subject: who})
	}
}

// faulty says whether a fault holds now, for a pod or for all.
func (n *node) faulty(kind FaultKind, pod string) bool {
	for i := range n.world.Faults {
		f := &n.world.Faults[i]
		if f.Kind != kind || n.now < ticks(f.From) || f.Until > 0 && n.now >= ticks(f.Until) {
			continue
		}
		if len(f.Pods) == 0 {
			return true
		}
		for _, name := range f.Pods {
			if name == pod {
				return true
			}
		}
	}
	return false
}

func (n *node) deletionFails(kind FaultKind) bool { return n.faulty(kind, "") }

// shortID leaves the pod's number out of an instance's id, for people.
func shortID(id string) string {
	uid, rest, _ := strings.Cut(id, "/")
	if i := strings.LastIndexByte(uid, '-'); i >= 0 {
		uid = uid[:i]
	}
	return uid + "/" + rest
}
