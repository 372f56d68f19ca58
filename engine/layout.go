package engine

import "slices"

// Layout is how nodefs, imagefs and containerfs share filesystems, as far as
// decisions depend on it.
type Layout string

const (
	// Single: nodefs = imagefs = containerfs (LAY-9).
	Single Layout = "single"
	// Dedicated: imagefs = containerfs, nodefs is apart (LAY-10).
	Dedicated Layout = "dedicated"
	// Split: containerfs = nodefs, imagefs is apart (LAY-11).
	Split Layout = "split"
	// Odd is what the kubelet believes when it finds containers apart but
	// not images; it decides as in Single, but leaves containerfs thresholds
	// alone (LAY-12).
	Odd Layout = "odd"
	// Separate: three filesystems, which only the option ThirdDisk knows.
	Separate Layout = "separate"
	// ContainersAlone: nodefs = imagefs, containerfs is apart; that, too,
	// only ThirdDisk knows.
	ContainersAlone Layout = "containers alone"
	// Inert is what is left of a kubelet that found a split which its feature
	// gate forbids: thresholds are watched, nothing is reclaimed or ranked
	// (LAY-14).
	Inert Layout = "inert"
)

// Detected is the kubelet's answer to how filesystems are shared. It keeps its
// first answer for good (LAY-8).
type Detected struct {
	// ImageApart: imagefs is on another device than nodefs.
	ImageApart bool
	// ContainerApart: containerfs is on another device than imagefs.
	ContainerApart bool
	// ContainerOffNode: containerfs is on another device than nodefs. The
	// kubelet never asks that (LAY-13); the option ThirdDisk does.
	ContainerOffNode bool
	// Refused: there was a split, and the gate KubeletSeparateDiskGC was off.
	// Sync sets it.
	Refused bool
}

// Layout is what decisions are made for.
func (d Detected) Layout() Layout {
	switch {
	case d.Refused:
		return Inert
	case d.ImageApart && d.ContainerApart:
		return Split
	case d.ImageApart:
		return Dedicated
	case d.ContainerApart:
		return Odd
	default:
		return Single
	}
}

// WithContainerFS completes thresholds by those of containerfs. Nobody can
// choose them: hard and soft, bytes and inodes are those of the filesystem on
// which the layout has containerfs (THR-20). What was written for containerfs
// is overwritten in its place; overwritten names those signals.
// The list itself stays as it is.
func WithContainerFS(list []Threshold, layout Layout) (out []Threshold, overwritten []Signal) {
	out = slices.Clone(list)
	var bytes, inodes Signal
	switch layout {
	case Single, Split:
		bytes, inodes = NodeFSAvailable, NodeFSInodesFree
	case Dedicated:
		bytes, inodes = ImageFSAvailable, ImageFSInodesFree
	default:
		return out, nil // THR-22
	}
	for _, pair := range []struct{ signal, source Signal }{
		{ContainerFSAvailable, bytes},
		{ContainerFSInodesFree, inodes},
	} {
		for _, hard := range []bool{true, false} {
			// Of several the last counts: a soft threshold without grace is
			// a hard one, too.
			want := Threshold{Signal: pair.signal, Inert: true}
			place := -1
			for i, t := range list {
				if t.Hard() != hard {
					continue
				}
				switch t.Signal {
				case pair.source:
					want = t
					want.Signal = pair.signal
				case pair.signal:
					place = i
				}
			}
			if place < 0 {
				out = append(out, want)
				continue
			}
			out[place] = want
			overwritten = append(overwritten, pair.signal)
		}
	}
	return out, overwritten
}

// effective lists the thresholds that a pass looks at. In the pass that
// detects the layout the kubelet still goes through the list that it took
// before: what is overwritten counts at once, what is added does not (THR-23).
func (c Config) effective(d Detected, detectedNow bool) []Threshold {
	all := c.all(d)
	if detectedNow && !c.Options.ContainerFSAtOnce {
		return all[:len(c.Thresholds)]
	}
	return all
}

// all lists the configured thresholds with those of containerfs.
func (c Config) all(d Detected) []Threshold {
	out, _ := WithContainerFS(c.Thresholds, c.Options.layout(d))
	return out
}
