package main

import (
	"fmt"
	"strings"

	"github.com/cleave-cri/cleave/agent/page"
)

// explainLayers says in words why the answers about writable layers differ, and
// only what was really seen.
func (r report) explainLayers() []string {
	return []string{r.explainFirst(), r.explainChurn(), r.explainPlace()}
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
			seconds(r.throughKnew), names(r.layers, anyLayer), seconds(r.directKnew))
	case r.throughKnew > 0:
		text += fmt.Sprintf(" cleave had the right figures after %s, containerd not even then.", seconds(r.throughKnew))
	}
	return text
}

// explainChurn is about CTD-13.
func (r report) explainChurn() string {
	const why = "Files that are deleted while a layer is counted make containerd's own snapshotters give up, and it then says 0 bytes"
	if gone := names(r.layers, func(l layer) bool { return l.churn && l.direct.blind() }); gone != "" {
		return why + ". On this run " + gone + " has no figure, though cleave's snapshotter goes on where a file has gone."
	}
	return why + ". cleave's snapshotter goes on, so containerd has a figure for " +
		names(r.layers, func(l layer) bool { return l.churn }) + " too."
}

// explainPlace is about CTD-4.
func (r report) explainPlace() string {
	wrong := names(r.layers, func(l layer) bool {
		return l.direct.mountpoint != "" && r.diskOf(l.direct.mountpoint) != r.diskOf(l.upper)
	})
	if wrong == "" {
		return "containerd named the right disk for every layer, which versions up to 2.4 can't."
	}
	return fmt.Sprintf("containerd has one path per snapshotter, that of image layers, and names it for writable layers too: it puts %s "+
		"on the disk %s, where they are not.", wrong, imagesDisk)
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
		parts += " Both lists name the same filesystem."
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
		without = ", but not that of " + l + ", which it does not know"
	}
	given := entry(r.direct.images, 0)
	if !near(given.bytes, want.bytes) {
		return fmt.Sprintf("What containerd calls images should hold the writable layers too, which would be %s. It says %s, "+
			"so on this run some of its figures are older.", want.size(), given.size())
	}
	return fmt.Sprintf("What containerd calls images (%s) is image layers %s plus the writable layers that it knows, %s%s, though those "+
		"are on the disk %s. The content store, %s on the disk %s, is not in it. So a container that writes looks like images that grow, "+
		"on a disk that it does not touch.",
		given.size(), r.imageLayers.size(), page.Bytes(want.bytes-r.imageLayers.bytes), without, nodeDisk, r.content.size(), imagesDisk)
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
