package agent

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/proxy/diskstats"
	"github.com/cleave-cri/cleave/snapshot"
)

// The classes that bytes on a filesystem are counted by.
const (
	classImages     = "image layers"
	classUnpacking  = "layers being unpacked"
	classContainers = "container layers"
	classSandboxes  = "sandbox layers"
	classOther      = "other snapshots"
	classContent    = "content store"
	// classRest is what is used and belongs to nothing that was measured.
	classRest = "not attributed"
)

// ClassUsage is what one class of things takes on a filesystem.
type ClassUsage struct {
	Class  string `json:"class"`
	Bytes  uint64 `json:"bytes"`
	Inodes uint64 `json:"inodes"`
	// Unmeasured is how many things of the class have no figure yet.
	Unmeasured int `json:"unmeasured,omitempty"`
}

// observation is what one pass found out.
type observation struct {
	// at is when the store was read, zero while it was not yet.
	at time.Time
	// guessed says that the place of images is not confirmed.
	guessed bool
	layout  fsstats.Layout
	layers  []*layerState
	// stored says that there is a content store; content is nil while it is not
	// measured.
	stored  bool
	content *diskstats.Usage
	// devices are the filesystems of the paths that the runtime names.
	devices map[string]string
}

// assemble puts a picture together. It returns nil where the filesystem of
// images or of containers is unknown, without which there is no picture.
func assemble(o observation) *picture {
	images, okImages := o.layout.Get(fsstats.ImageFS)
	containers, okContainers := o.layout.Get(fsstats.ContainerFS)
	if !okImages || !okContainers {
		return nil
	}
	facts := &diskstats.Facts{
		Images:     storeOf(images),
		Containers: storeOf(containers),
		Devices:    maps.Clone(o.devices),
		Layers:     map[string]diskstats.Layer{},
	}
	facts.Images.Guessed, facts.Containers.Guessed = o.guessed, o.guessed
	if facts.Devices == nil {
		facts.Devices = map[string]string{}
	}
	for _, p := range o.layout.Places {
		facts.Devices[p.Reported] = p.Filesystem.Device.String()
	}
	t := tally{oldest: o.at, byClass: map[fsstats.Device]map[string]*ClassUsage{}}
	for _, l := range o.layers {
		if l.layer.Class == snapshot.View {
			continue // it has nothing of its own
		}
		t.add(deviceOf(l, images, containers), classOf(l.layer.Class), l.used)
		if l.layer.Class == snapshot.Container && l.filesystem != nil {
			facts.Layers[l.layer.ContainerID] = factOf(l, images, containers)
		}
	}
	if place, ok := o.layout.Get(fsstats.Content); ok {
		t.add(place.Filesystem.Device, classContent, o.content)
	} else if o.stored {
		// Where it is can't be found out now: it may be with the images.
		t.add(images.Filesystem.Device, classContent, nil)
	}
	if !o.at.IsZero() {
		facts.Images.Used = t.sum(images.Filesystem.Device, classImages, classUnpacking, classContent)
		facts.Containers.Used = t.sum(containers.Filesystem.Device, classContainers, classSandboxes, classOther)
	}
	return &picture{facts: facts, layout: o.layout, classes: t.list(o.layout), readAt: o.at}
}

func storeOf(p fsstats.Place) diskstats.Store {
	whole := diskstats.Usage{Bytes: p.Filesystem.UsedBytes, At: p.Filesystem.MeasuredAt}
	if used, ok := p.Filesystem.InodesUsed(); ok {
		whole.Inodes = used
	}
	return diskstats.Store{Mountpoint: p.Reported, Device: p.Filesystem.Device.String(), Whole: whole}
}

// deviceOf is the filesystem of a layer. What could not be looked at yet counts
// where things of its kind are: image layers with the images, all else with the
// containers.
func deviceOf(l *layerState, images, containers fsstats.Place) fsstats.Device {
	switch {
	case l.filesystem != nil:
		return l.filesystem.Device
	case l.layer.Class == snapshot.Image, l.layer.Class == snapshot.Extraction:
		return images.Filesystem.Device
	default:
		return containers.Filesystem.Device
	}
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

func classOf(c snapshot.Class) string {
	switch c {
	case snapshot.Image:
		return classImages
	case snapshot.Extraction:
		return classUnpacking
	case snapshot.Container:
		return classContainers
	case snapshot.Sandbox:
		return classSandboxes
	case snapshot.View, snapshot.Other:
	}
	return classOther
}

// tally adds up usage by filesystem and class.
type tally struct {
	byClass map[fsstats.Device]map[string]*ClassUsage
	// oldest is the time of the oldest figure among those that can change.
	oldest time.Time
}

func (t *tally) add(device fsstats.Device, class string, used *diskstats.Usage) {
	classes := t.byClass[device]
	if classes == nil {
		classes = map[string]*ClassUsage{}
		t.byClass[device] = classes
	}
	c := classes[class]
	if c == nil {
		c = &ClassUsage{Class: class}
		classes[class] = c
	}
	if used == nil {
		c.Unmeasured++
		return
	}
	c.Bytes = saturatingAdd(c.Bytes, used.Bytes)
	c.Inodes = saturatingAdd(c.Inodes, used.Inodes)
	if class != classImages && used.At.Before(t.oldest) {
		t.oldest = used.At
	}
}

// sum returns what some classes take on a filesystem; nil while one of them is not measured, since a
// sum without it would be too small.
func (t *tally) sum(device fsstats.Device, classes ...string) *diskstats.Usage {
	total := diskstats.Usage{At: t.oldest}
	for _, class := range classes {
		c := t.byClass[device][class]
		if c == nil {
			continue
		}
		if c.Unmeasured > 0 {
			return nil
		}
		total.Bytes = saturatingAdd(total.Bytes, c.Bytes)
		total.Inodes = saturatingAdd(total.Inodes, c.Inodes)
	}
	return &total
}

// list returns the classes of each filesystem in the layout, the largest first,
// and at the end what is used and not attributed.
func (t *tally) list(layout fsstats.Layout) map[fsstats.Device][]ClassUsage {
	out := map[fsstats.Device][]ClassUsage{}
	for _, p := range layout.Places {
		device := p.Filesystem.Device
		if out[device] != nil {
			continue
		}
		rest := ClassUsage{Class: classRest, Bytes: p.Filesystem.UsedBytes}
		rest.Inodes, _ = p.Filesystem.InodesUsed()
		list := []ClassUsage{}
		for _, c := range t.byClass[device] {
			list = append(list, *c)
			rest.Bytes -= min(rest.Bytes, c.Bytes)
			rest.Inodes -= min(rest.Inodes, c.Inodes)
		}
		slices.SortFunc(list, func(a, b ClassUsage) int {
			return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.Class, b.Class))
		})
		out[device] = append(list, rest)
	}
	return out
}
