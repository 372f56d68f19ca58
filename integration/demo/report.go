package main

import (
	"slices"
	"strings"
	"time"
)

// amount is what something takes on a disk.
type amount struct{ bytes, inodes uint64 }

func (a amount) plus(b amount) amount { return amount{a.bytes + b.bytes, a.inodes + b.inodes} }

// figure is an amount as an answer gives it.
type figure struct {
	amount
	// given is false if the answer has no figure, which is not 0.
	given bool
	// timestamp is when it was measured, in nanoseconds since 1970; CRI says that it is above 0.
	timestamp  int64
	mountpoint string
}

// blind tells whether this is no measurement.
func (f figure) blind() bool { return f.given && f.timestamp <= 0 }

// near tells whether a figure is right: by 1 % or 64 KiB, since a layer may
// change between two looks.
func (f figure) near(want uint64) bool {
	return f.given && f.timestamp > 0 && near(f.bytes, want)
}

func near(got, want uint64) bool {
	const slackBytes = 64 << 10
	return max(got, want)-min(got, want) <= max(want/100, slackBytes)
}

// fsInfo is an answer to ImageFsInfo.
type fsInfo struct{ images, containers []figure }

// layer is a container's writable layer: what it takes, and what is said.
type layer struct {
	name, wrote     string
	churn           bool
	upper           string // its folder
	du              amount
	direct, through figure
}

// filesystem is a disk as the kernel sees it.
type filesystem struct {
	name, device, path string
	used               amount
}

// report is everything that was seen.
type report struct {
	// dir is the run's folder, which all paths begin with.
	dir string
	// atOnce are the answers right after everything was written, layers those of some time later.
	atOnce, layers []layer
	later          time.Duration
	// directKnew and throughKnew are how long after that each side had the right figures of all, 0 if never.
	directKnew, throughKnew time.Duration
	// direct and through are the answers to ImageFsInfo.
	direct, through fsInfo
	// By du: the images' layers unpacked and as they were pulled, the pause containers, logs and volumes.
	imageLayers, content, sandboxes, logs, volumes amount
	// volumeMiB and logLines are what the pods wrote of those.
	volumeMiB, logLines int
	disks               []filesystem
}

// side chooses one of the two answers about a layer.
type side func(layer) figure

func directSide(l layer) figure  { return l.direct }
func throughSide(l layer) figure { return l.through }

// known tells whether one side has the right figure for every layer.
func known(layers []layer, s side) bool {
	return !slices.ContainsFunc(layers, func(l layer) bool { return !s(l).near(l.du.bytes) })
}

// diskOf returns the name of the disk that a path is on, or the path itself.
func (r report) diskOf(path string) string {
	for _, d := range r.disks {
		if path == d.path || strings.HasPrefix(path, d.path+"/") {
			return d.name
		}
	}
	return path
}

// news is which side has come to know.
type news struct{ direct, through bool }

// note keeps when each side first knew, and says whether that was now.
func (r *report) note(layers []layer, since time.Duration) (n news) {
	if r.directKnew == 0 && known(layers, directSide) {
		r.directKnew, n.direct = since, true
	}
	if r.throughKnew == 0 && known(layers, throughSide) {
		r.throughKnew, n.through = since, true
	}
	return n
}

// writable is what all writable layers take, those of pause containers too.
func (r report) writable() amount {
	sum := r.sandboxes
	for _, l := range r.layers {
		sum = sum.plus(l.du)
	}
	return sum
}
