package sim

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/garbage"
	"github.com/cleave-cri/cleave/engine/record"
)

const refused = "the runtime did not delete it"

// reclaim carries out what a decision wants reclaimed, and notes in r what was
// picked and what came of it.
func (n *node) reclaim(k *keeper, d engine.Decision, r *record.Record) {
	on := n.diskOf(k, engine.Eviction{Cause: engine.Cause(d.Threshold.Signal)})
	before := on.free()
	var freed int64
	for _, kind := range d.Reclaim {
		need := garbage.Everything
		if d.NeedBytes != nil {
			if need = *d.NeedBytes - freed; need <= 0 {
				break
			}
		}
		step := record.Step{Kind: kind}
		switch kind {
		case engine.DeadContainers:
			step.Containers = ptr(n.containerChoice(k, true))
			step.Items = step.Containers.Items()
			freed += n.removeContainers(k, step.Items, on)
		case engine.UnusedImages:
			step.Images = ptr(n.imageChoice(k, need))
			step.Items = step.Images.Items()
			freed += n.removeImages(k, step.Items, on)
		case engine.OldLogs:
			step.Logs = &record.LogChoice{Rotated: n.rotatedLogs(), NeedBytes: need}
			step.Items = step.Logs.Items()
			freed += n.removeLogs(k, step.Items, on)
		}
		r.Steps = append(r.Steps, step)
	}
	if k.config.Options.AwaitFreed {
		k.state = k.state.Freeing(d.Threshold.Signal, freed, before, n.time())
	}
}

func (n *node) podFates() garbage.Pods {
	fates := make(map[string]garbage.PodFate, len(n.fates))
	for uid, fate := range n.fates {
		fates[uid] = fate
	}
	return garbage.Pods{Fate: fates, SourcesReady: true, Synced: true}
}

func (n *node) containerChoice(k *keeper, pressure bool) record.ContainerChoice {
	c := record.ContainerChoice{Policy: k.dead, Pods: n.podFates(), Now: n.time(), Pressure: pressure, Bytes: map[string]int64{}}
	for _, p := range n.pods {
		for _, inst := range p.instances {
			if inst != nil {
				c.Containers = append(c.Containers, inst.listed(garbage.Running))
			}
		}
	}
	for _, d := range n.dead {
		c.Containers = append(c.Containers, d.listed(garbage.Exited))
		c.Bytes[d.id] = d.layer.bytes + d.logBytes()
	}
	if pressure && c.Policy.NoneUnderPressure {
		garbage.KeepLast(c.Containers, c.Pods)
	}
	return c
}

// removeContainers deletes dead containers; it returns what came free on a disk.
func (n *node) removeContainers(k *keeper, items []record.Item, on *disk) (freed int64) {
	for i := range items {
		if n.deletionFails(ContainersStay) {
			items[i].Error = refused
			continue
		}
		var dead *instance
		for _, d := range n.dead {
			if d.id == items[i].ID {
				dead = d
			}
		}
		if dead == nil {
			items[i].Error = "it is not there"
			continue
		}
		var here int64
		if n.containerfs() == on {
			here += dead.layer.bytes
		}
		if n.nodefs() == on {
			here += dead.logBytes()
		}
		bytes, _ := n.removeDead(dead.id)
		items[i].ActualBytes = &bytes
		freed += here
		n.event(Event{By: k.name, What: DeadRemoved, Subject: shortID(dead.id), Bytes: bytes, Rule: items[i].Rule})
	}
	n.tellRefusals(k, items, "dead containers")
	return freed
}

// look lists the images as the runtime does, for a keeper.
func (n *node) look(k *keeper, start time.Time) (inUse map[string]bool) {
	var list []garbage.Listed
	for _, img := range n.images {
		if img.here {
			list = append(list, garbage.Listed{ID: img.spec.Name, SizeBytes: img.reported(), Pinned: img.spec.Pinned})
		}
	}
	var users []garbage.ImageUser
	use := func(i *instance) {
		if i != nil {
			users = append(users, garbage.ImageUser{ImageID: n.images[i.spec.Image].spec.Name})
		}
	}
	for _, p := range n.pods {
		for _, i := range p.instances {
			use(i)
		}
		if p.starting && k.whole { // the kubelet does not see that a pod waits for it
			for i := range p.spec.Containers {
				users = append(users, garbage.ImageUser{ImageID: n.images[p.spec.Containers[i].Image].spec.Name})
			}
		}
	}
	for _, d := range n.dead {
		use(d)
	}
	k.images, inUse = k.images.Look(list, users, start, start)
	return inUse
}

func (n *node) imageChoice(k *keeper, need int64) record.ImageChoice {
	c := record.ImageChoice{Policy: k.policy, InUse: n.look(k, n.time()), NeedBytes: need, Began: n.time()}
	c.Known = k.images
	if k.whole {
		c.Layers = map[string][]garbage.Layer{}
		for _, img := range n.images {
			if !img.here {
				continue
			}
			list := make([]garbage.Layer, 0, len(img.spec.Layers))
			for _, l := range img.spec.Layers {
				list = append(list, garbage.Layer{ID: l.ID, Bytes: n.layers[l.ID].bytes})
			}
			c.Layers[img.spec.Name] = list
		}
	}
	return c
}

func (n *node) removeImages(k *keeper, items []record.Item, on *disk) (freed int64) {
	for i := range items {
		if n.deletionFails(ImagesStay) {
			items[i].Error = refused
			continue
		}
		for _, img := range n.images {
			if img.spec.Name != items[i].ID || !img.here {
				continue
			}
			bytes := n.removeImage(img)
			items[i].ActualBytes = &bytes
			if n.imagefs() == on {
				freed += bytes
			}
			n.result.ImagesRemoved = append(n.result.ImagesRemoved, img.spec.Name)
			n.event(Event{By: k.name, What: ImageRemoved, Subject: img.spec.Name, Bytes: bytes, Rule: items[i].Rule})
		}
	}
	n.tellRefusals(k, items, "images")
	return freed
}

// tellRefusals tells once a minute that things could not be deleted.
func (n *node) tellRefusals(k *keeper, items []record.Item, what string) {
	count := 0
	for _, i := range items {
		if i.Error != "" {
			count++
		}
	}
	if count == 0 {
		return
	}
	key := k.name + " deletes " + what
	last, before := n.full[key]
	n.full[key] = n.now
	if !before || n.now-last > ticks(time.Minute) {
		n.event(Event{By: k.name, What: NotRemoved, Subject: what, Detail: fmt.Sprintf("%d of %d", count, len(items))})
	}
}

// collectImages is the periodic collection of images.
func (n *node) collectImages(k *keeper) {
	period := imageGCPeriod
	if k.whole {
		period = cleaveImagePeriod
	}
	k.nextImages = n.now + ticks(period)
	if !k.policy.Runs() || n.faulty(MissingStats, "") {
		return
	}
	d := n.imagefs()
	need, err := k.policy.Need(ptr(uint64(d.free())), ptr(uint64(d.spec.CapacityBytes)))
	if err != nil || k.whole && !need.Over && k.policy.MaxAge == 0 {
		return
	}
	choice := n.imageChoice(k, need.Bytes)
	old, _ := k.policy.TooOld(k.images.Unused(choice.InUse), n.time(), k.began)
	items := make([]record.Item, 0, len(old))
	for _, image := range old {
		items = append(items, record.Item{ID: image.Key(), Rule: "IGC-11"})
	}
	n.removeImages(k, items, d)
	if !need.Over {
		return
	}
	if len(old) > 0 {
		choice = n.imageChoice(k, need.Bytes)
	}
	n.removeImages(k, choice.Items(), d)
}

// removeOldContainers is the kubelet's periodic collection of containers.
func (n *node) removeOldContainers() {
	if len(n.dead) == 0 {
		return
	}
	choice := n.containerChoice(n.kubelet, false)
	n.removeContainers(n.kubelet, choice.Items(), n.nodefs())
}

// compressesTo is what compression makes of a log: a tenth.
const compressesTo = 10

// rotateAll rotates the logs of running containers, and keeps them within the
// node's budget where cleave is there.
func (n *node) rotateAll() {
	policy := n.world.Kubelet.Logs
	policy.RenameFirst = n.cleave != nil
	for _, p := range n.pods {
		for _, inst := range p.instances {
			if inst != nil && inst.log.bytes > 0 && policy.Due(inst.log.bytes) && !n.rotate(policy, inst) {
				key := "rotation of " + p.engine.Name
				last, before := n.full[key]
				n.full[key] = n.now
				if !before || n.now-last > ticks(time.Minute) {
					n.event(Event{By: "kubelet", What: NotRotated, Subject: shortID(inst.id), Rule: "LOG-11"})
				}
			}
		}
	}
	if n.cleave == nil {
		return
	}
	budget := n.world.Cleave.LogBudgetBytes
	if budget == 0 {
		budget = n.nodefs().spec.CapacityBytes / 10
	}
	var logs []garbage.PodLogs
	for _, p := range n.pods {
		l := garbage.PodLogs{UID: p.engine.UID}
		for _, inst := range p.instances {
			if inst != nil {
				l.WrittenBytes += inst.log.bytes
				l.Rotated = append(l.Rotated, inst.rotatedFiles()...)
			}
		}
		logs = append(logs, l)
	}
	var items []record.Item
	for _, f := range garbage.LogBudget(logs, budget) {
		items = append(items, record.Item{ID: f.Path, Rule: "GAP-36"})
	}
	n.removeLogs(n.cleave, items, n.nodefs())
}

// rotate rotates one log; false if a step failed.
func (n *node) rotate(policy garbage.LogPolicy, inst *instance) bool {
	names := make([]string, 0, len(inst.rotated))
	for _, r := range inst.rotated {
		names = append(names, r.name)
	}
	plan := policy.Plan(names)
	rename := func() {
		inst.rotated = append(inst.rotated, rotated{name: fmt.Sprintf("%s.%012d", inst.logName(), n.now), bytes: inst.log.bytes, at: n.now})
		inst.log.bytes = 0
	}
	if plan.RenameFirst {
		rename()
	}
	for _, name := range plan.Excess {
		n.dropLog(inst, name)
	}
	for _, name := range plan.Compress {
		i := slices.IndexFunc(inst.rotated, func(r rotated) bool { return r.name == name })
		small := inst.rotated[i].bytes / compressesTo
		got, _, ok := inst.log.on.take(small, 0)
		if !ok {
			inst.log.on.give(n.now, got, 0)
			if plan.RenameFirst {
				continue
			}
			return false
		}
		inst.log.on.give(n.now, inst.rotated[i].bytes, 0)
		inst.rotated[i].bytes = small
		inst.rotated[i].name += ".gz"
	}
	if !plan.RenameFirst {
		rename()
	}
	return true
}

func (i *instance) logName() string { return i.id + ".log" }

func (n *node) dropLog(inst *instance, name string) (freed int64) {
	for i, r := range inst.rotated {
		if r.name == name {
			inst.rotated = append(inst.rotated[:i], inst.rotated[i+1:]...)
			inst.log.on.give(n.now, r.bytes, 0)
			return r.bytes
		}
	}
	return 0
}

func (i *instance) rotatedFiles() []garbage.LogFile {
	out := make([]garbage.LogFile, 0, len(i.rotated))
	for _, r := range i.rotated {
		out = append(out, garbage.LogFile{Path: r.name, Bytes: r.bytes, WrittenAt: began.Add(time.Duration(r.at) * Tick)})
	}
	return out
}

func (n *node) rotatedLogs() []garbage.LogFile {
	var out []garbage.LogFile
	for _, p := range n.pods {
		for _, inst := range p.instances {
			if inst != nil {
				out = append(out, inst.rotatedFiles()...)
			}
		}
	}
	return out
}

func (n *node) removeLogs(k *keeper, items []record.Item, on *disk) (freed int64) {
	for i := range items {
		for _, p := range n.pods {
			for _, inst := range p.instances {
				if inst == nil || !strings.HasPrefix(items[i].ID, inst.logName()) {
					continue
				}
				bytes := n.dropLog(inst, items[i].ID)
				items[i].ActualBytes = &bytes
				if n.nodefs() == on {
					freed += bytes
				}
				n.event(Event{By: k.name, What: LogRemoved, Subject: shortID(inst.logName()), Bytes: bytes, Rule: items[i].Rule})
			}
		}
	}
	return freed
}
