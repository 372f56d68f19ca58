package agent

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/cleave-cri/cleave/agent/ephemeral"
	"github.com/cleave-cri/cleave/agent/owners"
	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/fsstats/index"
	"github.com/cleave-cri/cleave/proxy/diskstats"
	"github.com/cleave-cri/cleave/snapshot"
)

// The classes that bytes on a filesystem are counted by.
const (
	classImages     = "image layers"
	classUnpacking  = "layers being unpacked"
	classContainers = "container layers"
	classDead       = "layers of ended containers"
	classSandboxes  = "sandbox layers"
	classOther      = "other snapshots"
	classContent    = "content store"
	classLogs       = "pods' logs"
	classVolumes    = "pods' volumes"
	classPods       = "pods' other files"
	classDeadPods   = "pods that have ended"
	classKubelet    = "the kubelet's own files"
	classLocal      = "local volumes"
	classOpen       = "deleted files, still open"
)

// ClassUsage is what one class of things takes on a filesystem.
type ClassUsage struct {
	Class  string `json:"class"`
	Bytes  uint64 `json:"bytes"`
	Inodes uint64 `json:"inodes"`
	// Unmeasured is how many things of the class have no figure yet.
	Unmeasured int `json:"unmeasured,omitempty"`
}

// Account says who holds what is used on a filesystem. Always
//
//	OwnedBytes + UnattributedBytes = UsedBytes
//
// and the same of inodes where the kernel counts them.
type Account struct {
	// Classes add up to what is owned, the largest first.
	Classes []ClassUsage `json:"classes"`
	// OwnedBytes and OwnedInodes are their sums.
	OwnedBytes  uint64 `json:"ownedBytes"`
	OwnedInodes uint64 `json:"ownedInodes"`
	// UnattributedBytes is used and owned by nobody we know. It is below zero where
	// more is counted than is used: extents that files share, or figures that are
	// older than what was deleted since.
	UnattributedBytes int64 `json:"unattributedBytes"`
	// UnattributedInodes is nil where the kernel counts none.
	UnattributedInodes *int64 `json:"unattributedInodes,omitempty"`
	// Known are parts of it that have a name: folders of nobody, the largest first.
	Known []KnownUsage `json:"known,omitempty"`
	// ReservedBytes is what only root may still write; it is no part of what is used.
	ReservedBytes uint64 `json:"reservedBytes,omitempty"`
	// Unmeasured is how many things have no figure yet, Partial how many a lower
	// bound only.
	Unmeasured int `json:"unmeasured,omitempty"`
	Partial    int `json:"partial,omitempty"`
	// Oldest is how long all figures are known to hold at least; nil without any.
	Oldest *time.Time `json:"oldest,omitempty"`
}

// KnownUsage is a folder that belongs to nobody.
type KnownUsage struct {
	Path   string `json:"path"`
	Bytes  uint64 `json:"bytes"`
	Inodes uint64 `json:"inodes"`
}

// observation is all that a picture is made of.
type observation struct {
	survey *survey
	view   *index.View
	layout fsstats.Layout
	stuck  []fsstats.Standing
	// filesystems are those that figures may be on.
	filesystems map[index.FS]fsstats.Filesystem
	// seen gives the figure of the files of a part, as the kubelet looks at them.
	seen func(index.Key) (index.Figure, bool)
}

// assemble puts a picture together. It returns nil where the filesystem of
// images or of containers is unknown, without which there is no picture.
func assemble(o observation) *picture {
	images, okImages := o.layout.Get(fsstats.ImageFS)
	containers, okContainers := o.layout.Get(fsstats.ContainerFS)
	if !okImages || !okContainers {
		return nil
	}
	s := o.survey
	facts := &diskstats.Facts{
		Images:     storeOf(images),
		Containers: storeOf(containers),
		Devices:    maps.Clone(s.devices),
		Layers:     map[string]diskstats.Layer{},
	}
	facts.Images.Guessed, facts.Containers.Guessed = s.guessed, s.guessed
	if facts.Devices == nil {
		facts.Devices = map[string]string{}
	}
	for _, p := range o.layout.Places {
		facts.Devices[p.Reported] = p.Filesystem.Device.String()
	}
	p := &picture{facts: facts, layout: o.layout, stuck: o.stuck, readAt: s.readAt, measuredAt: s.ended, cost: s.ended.Sub(s.began)}
	figures := figuresOf(o.view)
	t := newTally(o, images, containers)
	for key, part := range figures {
		t.add(key, part)
	}
	for _, l := range s.layers {
		if l.layer.Class == snapshot.Container && l.filesystem != nil {
			l.used = usageOf(figures[l.key])
			facts.Layers[l.layer.ContainerID] = factOf(&l.layerState, images, containers)
		}
	}
	p.since = sinceOf(s, figures)
	if !s.readAt.IsZero() {
		facts.Images.Used = t.sum(images.Filesystem, classImages, classUnpacking, classContent)
		facts.Containers.Used = t.sum(containers.Filesystem, classContainers, classDead, classSandboxes, classOther)
	}
	p.accounts = t.accounts(o.layout)
	p.held = podsOn(o, figures)
	for _, pod := range p.held {
		p.pods = append(p.pods, ephemeral.Of(pod))
	}
	return p
}

// figuresOf are the parts of an index by key.
func figuresOf(v *index.View) map[index.Key]index.PartView {
	out := map[index.Key]index.PartView{}
	for _, owner := range v.Owners {
		for _, p := range owner.Parts {
			out[index.Key{Kind: owner.Kind, ID: owner.ID, Part: p.Name}] = p
		}
	}
	return out
}

// usageOf is a part's figure for an answer, nil without one. Its time is until when
// nothing is known to have changed it.
func usageOf(p index.PartView) *diskstats.Usage {
	if p.Figure == nil {
		return nil
	}
	return &diskstats.Usage{Bytes: unsigned(p.Figure.Bytes), Inodes: unsigned(p.Figure.Inodes), At: p.Unmoved}
}

// sinceOf is before when everything that containers wrote is in their figures: the
// earliest time at which one of these measurements was begun, or up to which
// nothing has moved since; zero while a figure is missing.
func sinceOf(s *survey, figures map[index.Key]index.PartView) time.Time {
	since := s.began
	for _, l := range s.layers {
		if l.layer.Class != snapshot.Container {
			continue
		}
		p := figures[l.key]
		switch {
		case p.Gone:
		case p.Figure == nil:
			return time.Time{}
		case p.Unmoved.After(p.Figure.Finished): // nothing has moved since
			since = earlier(since, p.Unmoved)
		default:
			since = earlier(since, p.Figure.Started)
		}
	}
	return since
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

func storeOf(p fsstats.Place) diskstats.Store {
	whole := diskstats.Usage{Bytes: p.Filesystem.UsedBytes, At: p.Filesystem.MeasuredAt}
	if used, ok := p.Filesystem.InodesUsed(); ok {
		whole.Inodes = used
	}
	return diskstats.Store{Mountpoint: p.Reported, Device: p.Filesystem.Device.String(), Whole: whole}
}

func factOf(l *layerState, images, containers fsstats.Place) diskstats.Layer {
	fs := *l.filesystem
	mountpoint := fs.Mountpoint
	switch fs.Device {
	case containers.Filesystem.Device:
		mountpoint, fs = containers.Reported, containers.Filesystem
	case images.Filesystem.Device:
		mountpoint, fs = images.Reported, images.Filesystem
	}
	return diskstats.Layer{
		Mountpoint:    mountpoint,
		Used:          l.used,
		CapacityBytes: fs.CapacityBytes,
		InodesTotal:   fs.InodesTotal,
		InodesFree:    fs.InodesFree,
	}
}

// tally adds up usage by filesystem and class.
type tally struct {
	o                        observation
	images, containers, node index.FS
	content                  index.FS
	// layers are where snapshots are, as far as the survey knows.
	layers map[index.Key]surveyed
	// ended are containers and pods that have ended, by ID and UID.
	ended map[string]bool
	books map[index.FS]*fsBook
}

// fsBook is what is added up of one filesystem.
type fsBook struct {
	Account
	classes map[string]*ClassUsage
}

func newTally(o observation, images, containers fsstats.Place) *tally {
	t := &tally{
		o: o, images: fsOf(images.Filesystem), containers: fsOf(containers.Filesystem),
		layers: map[index.Key]surveyed{}, ended: endedOf(o.survey), books: map[index.FS]*fsBook{},
	}
	t.node, t.content = t.containers, t.images // where that can't be found out now
	if place, ok := o.layout.Get(fsstats.NodeFS); ok {
		t.node = fsOf(place.Filesystem)
	}
	if place, ok := o.layout.Get(fsstats.Content); ok {
		t.content = fsOf(place.Filesystem)
	}
	for _, l := range o.survey.layers {
		t.layers[l.key] = l
	}
	if o.survey.stored && pathOf(o.layout, fsstats.Content) == "" {
		// It is somewhere, and nobody can say what it takes.
		t.book(t.content).class(classContent).Unmeasured++
	}
	return t
}

// endedOf are the containers that don't run and the pods of which nothing does, by
// ID and UID; none while the runtime has not said.
func endedOf(s *survey) map[string]bool {
	ended := map[string]bool{}
	if !s.asked {
		return ended
	}
	alive := map[string]bool{}
	uids := map[string]string{}
	for _, sandbox := range s.workloads.sandboxes {
		uids[sandbox.ID] = sandbox.UID
		alive[sandbox.UID] = alive[sandbox.UID] || sandbox.Ready
	}
	for _, c := range s.workloads.containers {
		ended[c.ID] = !c.Running
		alive[uids[c.SandboxID]] = alive[uids[c.SandboxID]] || c.Running
	}
	for _, p := range s.folders.Pods {
		ended[p.UID] = !alive[p.UID]
	}
	for _, l := range s.folders.Logs {
		ended[l.UID] = !alive[l.UID]
	}
	return ended
}

func (t *tally) book(fs index.FS) *fsBook {
	b := t.books[fs]
	if b == nil {
		b = &fsBook{classes: map[string]*ClassUsage{}}
		t.books[fs] = b
	}
	return b
}

func (b *fsBook) class(name string) *ClassUsage {
	c := b.classes[name]
	if c == nil {
		c = &ClassUsage{Class: name}
		b.classes[name] = c
	}
	return c
}

// place is the filesystem that a part counts for. What could not be looked at yet
// counts where things of its kind are.
func (t *tally) place(key index.Key, p index.PartView) index.FS {
	if _, ok := t.o.filesystems[p.FS]; ok {
		return p.FS
	}
	if l, ok := t.layers[key]; ok && l.filesystem != nil {
		return fsOf(*l.filesystem)
	}
	switch key.Kind {
	case owners.Image, owners.Unpacking:
		return t.images
	case owners.Container, owners.Sandbox, owners.Other:
		return t.containers
	case owners.Content:
		return t.content
	}
	return t.node
}

// classOf names the class of a part.
func (t *tally) classOf(key index.Key) string {
	switch key.Kind {
	case owners.Image:
		return classImages
	case owners.Unpacking:
		return classUnpacking
	case owners.Sandbox:
		return classSandboxes
	case owners.Content:
		return classContent
	case owners.Kubelet:
		return classKubelet
	case owners.Volume:
		return classLocal
	case owners.Container:
		switch {
		case strings.HasPrefix(key.Part, owners.OpenDeleted):
			return classOpen
		case t.ended[key.ID]:
			return classDead
		}
		return classContainers
	case owners.Pod:
		switch {
		case t.ended[key.ID]:
			return classDeadPods
		case key.Part == owners.Logs, strings.HasPrefix(key.Part, owners.ContainerLogs("")):
			return classLogs
		case key.Part == owners.Rest:
			return classPods
		}
		return classVolumes
	}
	return classOther
}

func (t *tally) add(key index.Key, p index.PartView) {
	if p.Gone {
		return
	}
	b := t.book(t.place(key, p))
	var used ClassUsage
	if p.Figure != nil {
		used = ClassUsage{Bytes: unsigned(p.Figure.Bytes), Inodes: unsigned(p.Figure.Inodes)}
		if p.Figure.Partial {
			b.Partial++
		}
		if b.Oldest == nil || p.Unmoved.Before(*b.Oldest) {
			b.Oldest = &p.Unmoved
		}
	} else {
		b.Unmeasured++
	}
	if key.Kind == owners.Unknown {
		b.Known = append(b.Known, KnownUsage{Path: p.Path, Bytes: used.Bytes, Inodes: used.Inodes})
		return
	}
	c := b.class(t.classOf(key))
	if p.Figure == nil {
		c.Unmeasured++
		return
	}
	c.Bytes = saturatingAdd(c.Bytes, used.Bytes)
	c.Inodes = saturatingAdd(c.Inodes, used.Inodes)
}

// sum returns what some classes take on a filesystem; nil while one of them is not measured, since a
// sum without it would be too small. Its time is that at which the kernel was asked about the
// filesystem: by it the kubelet judges whether there is news of the disk (SYN-17, GAP-23).
func (t *tally) sum(f fsstats.Filesystem, classes ...string) *diskstats.Usage {
	total := diskstats.Usage{At: f.MeasuredAt}
	b := t.books[fsOf(f)]
	for _, class := range classes {
		if b == nil || b.classes[class] == nil {
			continue
		}
		c := b.classes[class]
		if c.Unmeasured > 0 {
			return nil
		}
		total.Bytes = saturatingAdd(total.Bytes, c.Bytes)
		total.Inodes = saturatingAdd(total.Inodes, c.Inodes)
	}
	return &total
}

// accounts returns the account of each filesystem in the layout.
func (t *tally) accounts(layout fsstats.Layout) map[fsstats.Device]Account {
	out := map[fsstats.Device]Account{}
	for _, p := range layout.Places {
		f := p.Filesystem
		if _, done := out[f.Device]; done {
			continue
		}
		a := Account{}
		if b := t.books[fsOf(f)]; b != nil {
			a = b.Account
			for _, c := range b.classes {
				a.Classes = append(a.Classes, *c)
				a.OwnedBytes = saturatingAdd(a.OwnedBytes, c.Bytes)
				a.OwnedInodes = saturatingAdd(a.OwnedInodes, c.Inodes)
			}
		}
		a.UnattributedBytes = signed(f.UsedBytes) - signed(a.OwnedBytes)
		if used, ok := f.InodesUsed(); ok {
			rest := signed(used) - signed(a.OwnedInodes)
			a.UnattributedInodes = &rest
		}
		a.ReservedBytes = f.FreeBytes - min(f.FreeBytes, f.AvailableBytes)
		slices.SortFunc(a.Classes, func(x, y ClassUsage) int {
			return cmp.Or(cmp.Compare(y.Bytes, x.Bytes), cmp.Compare(x.Class, y.Class))
		})
		slices.SortFunc(a.Known, func(x, y KnownUsage) int {
			return cmp.Or(cmp.Compare(y.Bytes, x.Bytes), cmp.Compare(x.Path, y.Path))
		})
		out[f.Device] = a
	}
	return out
}

// gaps are what nobody owns, by filesystem.
func (p *picture) gaps() map[index.FS]int64 {
	out := map[index.FS]int64{}
	for _, place := range p.layout.Places {
		out[fsOf(place.Filesystem)] = p.accounts[place.Filesystem.Device].UnattributedBytes
	}
	return out
}

// podsOn are the pods that the kubelet counts (ACC-5), with what each has.
func podsOn(o observation, figures map[index.Key]index.PartView) []ephemeral.Pod {
	if !o.survey.asked {
		return nil
	}
	use := func(p index.PartView, f *index.Figure) *ephemeral.Use {
		if f == nil || p.Gone {
			return nil
		}
		return &ephemeral.Use{Device: o.filesystems[p.FS].Device.String(), Bytes: unsigned(f.Bytes), Inodes: unsigned(f.Inodes), At: f.Finished}
	}
	whole := func(key index.Key) *ephemeral.Use { return use(figures[key], figures[key].Figure) }
	files := func(key index.Key) *ephemeral.Use {
		f, ok := o.seen(key)
		if !ok {
			return nil
		}
		return use(figures[key], &f)
	}
	open := map[string][]ephemeral.Use{}
	parts := map[string][]index.Key{} // of pods, by UID
	for _, owner := range o.view.Owners {
		for _, p := range owner.Parts {
			key := index.Key{Kind: owner.Kind, ID: owner.ID, Part: p.Name}
			switch {
			case owner.Kind == owners.Pod:
				parts[owner.ID] = append(parts[owner.ID], key)
			case owner.Kind == owners.Container && strings.HasPrefix(p.Name, owners.OpenDeleted):
				if u := use(p, p.Figure); u != nil {
					open[owner.ID] = append(open[owner.ID], *u)
				}
			}
		}
	}
	containers := map[string][]ephemeral.Container{}
	for _, c := range o.survey.workloads.containers {
		containers[c.SandboxID] = append(containers[c.SandboxID], c)
	}
	// Of several sandboxes of one pod each has its containers; the pod is one.
	pods := map[string]*ephemeral.Pod{}
	var order []string
	for _, s := range ephemeral.Current(o.survey.workloads.sandboxes) {
		p := pods[s.UID]
		if p == nil {
			p = &ephemeral.Pod{Namespace: s.Namespace, Name: s.Name, UID: s.UID}
			pods[s.UID] = p
			order = append(order, s.UID)
			p.LogFiles = files(index.Key{Kind: owners.Pod, ID: s.UID, Part: owners.Logs})
			p.EtcHosts = files(index.Key{Kind: owners.Pod, ID: s.UID, Part: owners.Rest})
			for _, key := range parts[s.UID] {
				if key.Part == owners.Logs || key.Part == owners.Rest || strings.HasPrefix(key.Part, owners.ContainerLogs("")) {
					if u := whole(key); u != nil {
						p.Besides = append(p.Besides, *u)
					}
					continue
				}
				if figures[key].Gone {
					continue
				}
				plugin, name, _ := strings.Cut(key.Part, "/")
				p.Volumes = append(p.Volumes, ephemeral.VolumeUse{
					Counted: plugin == owners.PluginEmptyDir || plugin == owners.PluginConfigMap, Use: whole(key), Name: name, EmptyDir: plugin == owners.PluginEmptyDir,
				})
			}
		}
		if u := whole(index.Key{Kind: owners.Sandbox, ID: s.ID, Part: owners.Layer}); u != nil {
			p.Besides = append(p.Besides, *u)
		}
		for _, c := range containers[s.ID] {
			p.Containers = append(p.Containers, ephemeral.ContainerUse{
				Name: c.Name, Running: c.Running,
				Layer:       whole(index.Key{Kind: owners.Container, ID: c.ID, Part: owners.Layer}),
				LogFiles:    files(index.Key{Kind: owners.Pod, ID: s.UID, Part: owners.ContainerLogs(c.Name)}),
				OpenDeleted: open[c.ID],
			})
		}
	}
	var out []ephemeral.Pod
	for _, uid := range order {
		out = append(out, *pods[uid])
	}
	return out
}
