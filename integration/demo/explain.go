package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/cleave-cri/cleave/agent"
)

// explainLayers says in words why the answers about writable layers differ, and
// only what was really seen.
func (r report) explainLayers() []string {
	return []string{r.explainFirst(), r.explainLost()}
}

// explainFirst is about CTD-10.
func (r report) explainFirst() string {
	early := names(r.atOnce, func(l layer) bool { return l.direct.blind() })
	if early == "" {
		return "Before its first look at a container, containerd says 0 bytes at timestamp 0 (CTD-10). Not on this run: it " +
			"happened to look just in time."
	}
	text := fmt.Sprintf("At first containerd says 0 bytes at timestamp 0 about %s, though all was written: it has not looked "+
		"yet, and says 0 for \"unknown\".", early)
	if waiting := names(r.atOnce, func(l layer) bool { return !l.through.given }); waiting != "" {
		text += fmt.Sprintf(" cleave gives no figure for %s until it has one.", waiting)
	}
	switch {
	case r.directKnew > 0 && r.throughKnew > 0:
		text += fmt.Sprintf(" cleave had the right figures of all after %s, containerd those of %s after %s (it looks every 10 s).",
			seconds(r.throughKnew), names(calm(r.layers), anyLayer), seconds(r.directKnew))
	case r.throughKnew > 0:
		text += fmt.Sprintf(" cleave had the right figures after %s, containerd not even then.", seconds(r.throughKnew))
	}
	return text
}

// explainLost is about CTD-13.
func (r report) explainLost() string {
	if !lost(r.layers) {
		return "Files that go while containerd counts a layer make it give up and say 0 bytes at timestamp 0. Not on this run: " +
			"its walks were lucky, though a container creates and deletes files all the time. Run it again."
	}
	gone := slices.DeleteFunc(slices.Clone(r.layers), func(l layer) bool { return !l.churn || !l.direct.blind() })
	text := fmt.Sprintf("containerd has looked since, but about %s it still says 0 bytes at timestamp 0, and %s are missing: a "+
		"file that is deleted while it walks the layer makes it give up. To the kubelet such a container takes nothing, and a "+
		"limit on its ephemeral storage does not hold it.",
		names(gone, anyLayer), agent.Bytes(sum(gone)))
	if known(gone, throughSide) {
		text += " cleave measures it with a walk that goes on."
	}
	return text
}

// explainFsInfo does the same for ImageFsInfo.
func (r report) explainFsInfo() []string {
	// CTD-1.
	first := "containerd gives no container filesystem at all, so it can't tell a kubelet of a split."
	if len(r.direct.containers) > 0 {
		first = "containerd gives a container filesystem itself, which versions up to 2.4 don't."
	}
	return []string{first, r.explainImages(), r.explainThrough()}
}

// explainThrough says what cleave's answer is made of.
func (r report) explainThrough() string {
	images, containers := r.imageLayers.plus(r.content), r.writable()
	parts := fmt.Sprintf("images are what would come back if all images went, layers %s + content store %s = %s; containers are "+
		"the writable layers, those of the pause containers too, %s.",
		r.imageLayers.size(), r.content.size(), images.size(), containers.size())
	if !entry(r.through.images, 0).near(images.bytes) || !entry(r.through.containers, 0).near(containers.bytes) {
		return "Through cleave it should be like this, and is not: " + parts
	}
	if r.through.images[0].mountpoint == r.through.containers[0].mountpoint {
		parts += " Both lists name the same filesystem, because in this layout it is one."
	}
	return "Through cleave " + parts
}

// explainImages is about CTD-2: it does the sum and says whether it comes out.
func (r report) explainImages() string {
	want := r.imageLayers.plus(r.sandboxes)
	for _, l := range r.layers {
		if !l.direct.blind() {
			want = want.plus(l.du)
		}
	}
	without := ""
	if l := names(r.layers, func(l layer) bool { return l.direct.blind() }); l != "" {
		without = ", but not that of " + l + ", which it has lost"
	}
	given := entry(r.direct.images, 0)
	if !near(given.bytes, want.bytes) {
		return fmt.Sprintf("What containerd calls images should hold the writable layers too, which would be %s. It says %s, "+
			"so on this run some of its figures are older.", want.size(), given.size())
	}
	return fmt.Sprintf("What containerd calls images (%s) is image layers %s plus the writable layers that it knows, %s%s. The "+
		"content store, %s on the same disk, is not in it. So a container that writes looks like images that grow.",
		given.size(), r.imageLayers.size(), agent.Bytes(want.bytes-r.imageLayers.bytes), without, r.content.size())
}

func sum(layers []layer) (bytes uint64) {
	for _, l := range layers {
		bytes += l.du.bytes
	}
	return bytes
}

func anyLayer(layer) bool { return true }

// names lists the containers that a condition holds for, as one says it.
func names(layers []layer, holds func(layer) bool) string {
	var all []string
	for _, l := range layers {
		if holds(l) {
			all = append(all, l.name)
		}
	}
	if len(all) < 2 {
		return strings.Join(all, "")
	}
	return strings.Join(all[:len(all)-1], ", ") + " and " + all[len(all)-1]
}
