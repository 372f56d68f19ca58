package sim

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/garbage"
	"github.com/cleave-cri/cleave/engine/record"
)

// The kubelet's periods (DEF-9, DEF-10, DEF-12). A cleave looks at images as
// often as it looks at pods.
const (
	containerGCPeriod = time.Minute
	imageGCPeriod     = 5 * time.Minute
	cleaveImagePeriod = 10 * time.Second
	rotationPeriod    = 10 * time.Second
)

// keeper decides: the kubelet, or cleave beside it.
type keeper struct {
	name   string
	config engine.Config
	state  engine.State
	images garbage.Images
	policy garbage.ImagePolicy
	dead   garbage.ContainerPolicy
	// whole says that it sees all that is there, now: every filesystem, layers
	// of images, files that are deleted and open. The kubelet does not.
	whole bool
	began time.Time // when it was started

	nextPass, nextImages int64
	// waiting for evicted pods, at most until a tick (SYN-37).
	waiting   []*pod
	waitUntil int64

	last        *engine.Summary
	lastNobodys []engine.Unattributed
	// said is what was said last, so that only changes are.
	said, held, noted string
}

func (n *node) setUpKeepers(profile Profile) {
	w := n.world
	config := w.Kubelet.Config
	config.Options = engine.Options{}
	policy := w.Kubelet.Images
	policy.Options = garbage.ImageOptions{}
	n.kubelet = &keeper{
		name: "kubelet", config: config, policy: policy, images: n.knownImages(), began: began.Add(-7 * 24 * time.Hour),
		dead: garbage.ContainerPolicy{PerContainer: 1, Total: -1},
	}
	if profile != CleaveProfile {
		return
	}
	n.cleave = &keeper{
		name: "cleave", config: config, policy: policy, images: n.knownImages(), whole: true, began: n.kubelet.began,
		dead: garbage.ContainerPolicy{PerContainer: 1, Total: -1, NoneUnderPressure: true},
	}
	n.cleave.policy.Options = garbage.Cleave()
	c := &n.cleave.config
	c.Options = w.Cleave.Options
	c.OwnerPerHour, c.PerHour, c.HoldShare, c.HoldFloor = w.Cleave.OwnerPerHour, w.Cleave.PerHour, w.Cleave.HoldShare, w.Cleave.HoldFloor
	n.divide()
}

// divide gives cleave and the kubelet thresholds that don't overlap.
func (n *node) divide() {
	layout := thirdDisk(*n.detected(n.cleave))
	seen := n.summary(n.cleave).Observe()
	if last := n.world.Cleave.LastResort; last != nil {
		n.kubelet.config.Thresholds = last
	}
	theirs, _ := engine.WithContainerFS(n.kubelet.config.Thresholds, n.detected(n.kubelet).Layout())
	if n.world.Cleave.LastResort == nil {
		n.cleave.config.Thresholds, _ = engine.DefaultMargin().Above(theirs, layout, seen)
		return
	}
	ours := n.cleave.config.Thresholds
	for _, o := range engine.Overlaps(ours, theirs, layout, seen) {
		n.event(Event{By: "cleave", What: Overlap, Subject: string(o.Ours.Signal), Detail: o.String()})
		ours = slices.DeleteFunc(slices.Clone(ours), o.Ours.Same)
	}
	n.cleave.config.Thresholds = ours
}

// thirdDisk is a layout as the option ThirdDisk has it.
func thirdDisk(d engine.Detected) engine.Layout {
	switch {
	case !d.ContainerApart || !d.ContainerOffNode:
		return d.Layout()
	case d.ImageApart:
		return engine.Separate
	default:
		return engine.ContainersAlone
	}
}

// knownImages are the images as a kubelet knows them that runs for long.
func (n *node) knownImages() garbage.Images {
	out := garbage.Images{}
	for _, img := range n.images {
		if !img.here {
			continue
		}
		record := garbage.Image{ID: img.spec.Name, FirstSeen: began.Add(-24 * time.Hour), SizeBytes: img.reported(), Pinned: img.spec.Pinned}
		if img.spec.UnusedFor > 0 {
			record.LastUsed = began.Add(-img.spec.UnusedFor)
			record.FirstSeen = record.LastUsed.Add(-24 * time.Hour)
		}
		out[img.spec.Name] = record
	}
	return out
}

func (i *image) reported() int64 {
	if i.spec.ReportedBytes > 0 {
		return i.spec.ReportedBytes
	}
	var sum int64
	for _, l := range i.spec.Layers {
		sum += l.Bytes
	}
	return sum
}

// keep does what is due in this tick, in a fixed order.
func (n *node) keep() {
	n.walk()
	for i := range n.world.Faults {
		if f := &n.world.Faults[i]; f.Kind == KubeletRestart && n.now == ticks(f.From) {
			n.kubelet.state, n.kubelet.images, n.kubelet.began, n.kubelet.nextImages = engine.State{}, nil, n.time(), n.now
			n.kubelet.said, n.kubelet.held, n.kubelet.waiting, n.kubelet.nextPass = "", "", nil, n.now
			n.event(Event{By: "kubelet", What: Restarted})
		}
	}
	if n.now%ticks(rotationPeriod) == 0 {
		n.rotateAll()
	}
	if n.now%ticks(containerGCPeriod) == 0 {
		n.removeOldContainers()
	}
	for _, k := range []*keeper{n.cleave, n.kubelet} { // cleave first: its thresholds lie above
		if k == nil {
			continue
		}
		if k.nextImages <= n.now {
			n.collectImages(k)
		}
		if k.nextPass <= n.now && !n.waits(k) {
			n.pass(k)
		}
	}
}

// waits says whether a keeper still waits for pods that it evicted (SYN-37).
func (n *node) waits(k *keeper) bool {
	if len(k.waiting) == 0 {
		return false
	}
	for _, p := range k.waiting {
		if p.endsAt > n.now && n.now < k.waitUntil {
			k.nextPass = n.now + ticks(time.Second)
			return true
		}
	}
	k.waiting = nil
	return false
}

// pass is one look of a keeper, and what it does then.
func (n *node) pass(k *keeper) {
	in := n.observe(k)
	r := record.Record{Format: record.Format, Engine: engine.Version, Decider: k.name, Config: k.config, State: k.state, Input: in}
	var d engine.Decision
	k.state, d = k.config.Sync(k.state, in)
	r.Next, r.Decision = k.state, d
	n.say(k, in, d)
	evicted := 0
	number := len(n.result.Records)
	evict := func(e engine.Eviction) {
		if p := n.find(e.UID); p != nil && !p.evicted {
			n.evict(k, p, e, &r, number)
			evicted++
		}
	}
	switch d.Outcome {
	case engine.OverLimit:
		for _, e := range d.Limits {
			evict(e)
		}
	case engine.Foreseen:
		n.reclaim(k, d, &r)
	case engine.Pressure:
		lives := false
		if len(d.Reclaim) > 0 {
			n.reclaim(k, d, &r)
			after := n.observe(k)
			r.After, r.Verdict = after.Summary, &record.Verdict{Freed: k.state.Freed}
			r.Verdict.Resolved, r.Verdict.Still = k.config.Resolved(k.state, d, after.Summary)
			if lives = r.Verdict.Resolved; lives && d.Victim != nil {
				n.event(Event{By: k.name, What: VictimLives, Subject: d.Victim.Name, Rule: "REC-6", Detail: string(d.Threshold.Signal)})
			}
		}
		if !lives && d.Victim != nil {
			evict(*d.Victim)
			for _, e := range d.Further {
				evict(e)
			}
		}
	}
	n.note(k, r, evicted)
	if evicted > 0 {
		k.waitUntil = n.now + ticks(30*time.Second)
		k.nextPass = n.now + ticks(time.Second)
		return
	}
	rest := engine.LongestRest
	if k.whole && in.Summary != nil {
		rest = k.config.Rest(k.state.Trend, k.state, in.Summary.Observe(), in.Now)
	}
	k.nextPass = n.now + max(1, ticks(rest))
}

// note keeps the record of a pass that decided something new.
func (n *node) note(k *keeper, r record.Record, evicted int) {
	picked := 0
	for _, s := range r.Steps {
		picked += len(s.Items)
	}
	if n.recorded && (evicted > 0 || picked > 0 || r.Decision.NoVictim != "" && k.held != "" && r.Decision.Outcome == engine.Pressure && k.fresh(r.Decision)) {
		n.result.Records = append(n.result.Records, r)
	}
}

// fresh says whether a decision that does nothing is another one than the last.
func (k *keeper) fresh(d engine.Decision) bool {
	said := string(d.Threshold.Signal) + d.NoVictim
	if k.noted == said {
		return false
	}
	k.noted = said
	return true
}

// say tells what is new.
func (n *node) say(k *keeper, in engine.Input, d engine.Decision) {
	said := ""
	switch d.Outcome {
	case engine.Pressure:
		said = d.Threshold.String()
	case engine.Blind, engine.Foreseen:
		said = string(d.Outcome)
	}
	if said != k.said {
		pressed := k.said != "" && k.said != string(engine.Blind) && k.said != string(engine.Foreseen)
		switch d.Outcome {
		case engine.Pressure:
			o := in.Summary.Observe()[d.Threshold.Signal]
			n.event(Event{By: k.name, What: ThresholdDue, Subject: string(d.Threshold.Signal), Bytes: o.Available, Wanted: wanted(d.Threshold, o), Rule: d.Rule})
		case engine.Blind:
			n.event(Event{By: k.name, What: Blind, Rule: d.Rule})
		case engine.Foreseen:
			if o := in.Summary.Observe()[d.Threshold.Signal]; !pressed {
				n.event(Event{By: k.name, What: ReclaimForeseen, Subject: string(d.Threshold.Signal), Bytes: o.Available, Wanted: wanted(d.Threshold, o), Rule: d.Rule, Detail: d.Coming[0].In.Round(time.Second).String()})
			}
		case engine.Calm:
			if pressed && len(k.state.Met) == 0 {
				n.event(Event{By: k.name, What: PressureOver})
			} else if pressed {
				said = k.said // its figures are old, or another threshold is met
			}
		default:
			said = k.said
		}
		k.said = said
	}
	held, detail := "", ""
	switch {
	case d.NoVictim == "HoldFire":
		held = d.NoVictim
		who := make([]string, 0, len(d.Hold.Who))
		for _, w := range d.Hold.Who {
			who = append(who, w.Name)
		}
		detail = cmp.Or(strings.Join(who, ", "), "somebody unknown")
	case len(d.Barred) > 0 && d.Victim == nil && len(d.Limits) == 0:
		b := d.Barred[0]
		held = "BreakStorms" + b.UID
		detail = fmt.Sprintf("%s: %d of %s went within the hour", b.Why, b.Went, cmp.Or(b.Owner, "the node"))
		if b.Node {
			detail = fmt.Sprintf("%s: %d pods went within the hour", b.Why, b.Went)
		}
	}
	if held != "" && held != k.held {
		e := Event{By: k.name, What: HeldBack, Rule: d.NoVictim, Detail: detail}
		if len(d.Barred) > 0 && d.NoVictim != "HoldFire" {
			if e.Rule = "BreakStorms"; n.find(d.Barred[0].UID) != nil {
				e.Subject = n.find(d.Barred[0].UID).engine.Name
			}
		} else {
			e.Bytes, e.Wanted = d.Hold.NobodysBytes, d.Hold.GrewBytes
		}
		n.event(e)
	}
	k.held = held
}

func wanted(t engine.Threshold, o engine.Observation) int64 {
	q := t.Value.Of(o.Capacity)
	return q.Value()
}

func (n *node) find(uid string) *pod {
	for _, p := range n.pods {
		if p.engine.UID == uid {
			return p
		}
	}
	return nil
}

// evict ends a pod after its grace period, of which its containers take all.
func (n *node) evict(k *keeper, p *pod, e engine.Eviction, r *record.Record, number int) {
	k.state = k.state.Evicted(e, n.time())
	if !k.config.Options.BreakStorms {
		k.state.Gone = nil
	}
	p.evicted = true
	n.fates[p.engine.UID] = garbage.Gone
	own := int64(30)
	if p.engine.GraceSeconds != nil {
		own = *p.engine.GraceSeconds
	}
	_, grace := engine.EffectiveGrace(e.GraceSeconds, own)
	p.endsAt = n.now + ticks(time.Duration(grace)*time.Second)
	k.waiting = append(k.waiting, p)
	p.result.Evictions++
	n.result.Evicted = append(n.result.Evicted, p.engine.Name)
	on := n.diskOf(k, e)
	had := n.has(p)[on]
	rule := r.Decision.Rule
	if r.Decision.Outcome == engine.OverLimit {
		rule = "LSE-11"
	}
	n.event(Event{By: k.name, What: PodEvicted, Subject: p.engine.Name, Bytes: had, Rule: rule, Detail: string(e.Cause)})
	done := record.Evicted{UID: e.UID, At: n.time()}
	for i := range r.Decision.Ranking {
		if ranked := &r.Decision.Ranking[i]; ranked.UID == e.UID && r.Decision.Threshold.Signal.Resource() == engine.EphemeralStorage {
			done.ExpectedBytes = ptr(ranked.Usage.Value())
		}
	}
	r.Evicted = append(r.Evicted, done)
	place := len(r.Evicted) - 1
	p.ended = func(freed map[*disk]int64) {
		if k.config.Options.AwaitFreed {
			k.state = k.state.Freeing(n.signalOf(on), freed[on], on.free(), n.time())
		}
		if number < len(n.result.Records) && len(n.result.Records[number].Evicted) > place {
			n.result.Records[number].Evicted[place].ActualBytes = ptr(freed[on])
		}
	}
}

// diskOf is the disk because of which a pod goes.
func (n *node) diskOf(k *keeper, e engine.Eviction) *disk {
	switch engine.Signal(e.Cause) {
	case engine.ImageFSAvailable, engine.ImageFSInodesFree:
		return n.imagefs()
	case engine.ContainerFSAvailable, engine.ContainerFSInodesFree:
		if !k.whole && !n.world.Kubelet.CRIO {
			return n.imagefs()
		}
		return n.containerfs()
	default:
		return n.nodefs()
	}
}

func (n *node) signalOf(d *disk) engine.Signal {
	switch d {
	case n.nodefs():
		return engine.NodeFSAvailable
	case n.imagefs():
		return engine.ImageFSAvailable
	default:
		return engine.ContainerFSAvailable
	}
}
