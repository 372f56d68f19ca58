package sim

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cleave-cri/cleave/engine"
)

// Play plays a world under a profile.
func Play(w *World, profile Profile) (*Result, error) { return play(w, profile, false) }

// PlayRecorded is Play that keeps the records of what was decided.
func PlayRecorded(w *World, profile Profile) (*Result, error) { return play(w, profile, true) }

func play(w *World, profile Profile, recorded bool) (*Result, error) {
	if err := w.Validate(); err != nil {
		return nil, fmt.Errorf("play: %w", err)
	}
	n := newNode(w, profile)
	n.recorded = recorded
	for end := ticks(w.Lasts); n.now < end; {
		n.step()
	}
	r := n.result
	r.Steps = int(n.now)
	for _, p := range n.pods {
		p.result.Runs = p.result.Runs || !p.starting && p.endsAt < 0 && p.alive()
	}
	for i := range n.hosts {
		h := &n.hosts[i]
		r.Host = append(r.Host, HostResult{Name: h.spec.Name, NoSpace: time.Duration(h.lack) * Tick})
	}
	for _, d := range n.disks {
		f := FilesystemResult{Name: d.spec.Name, AvailableBytes: d.free(), LeastAvailable: d.least}
		if d.spec.Inodes > 0 {
			f.InodesFree, f.LeastInodesFree = d.freeInodes(), d.leastInodes
		}
		r.Filesystems = append(r.Filesystems, f)
	}
	return r, nil
}

// Validate says what in a world can't be played: all of it, joined.
func (w *World) Validate() error {
	var faults []error
	fault := func(format string, args ...any) { faults = append(faults, fmt.Errorf(format, args...)) }
	is := func(i int) bool { return i >= 0 && i < len(w.Filesystems) }
	if !is(w.Node) || !is(w.Image) || !is(w.Container) {
		fault("nodefs, imagefs or containerfs is none of %d filesystems", len(w.Filesystems))
	}
	for _, f := range w.Filesystems {
		if f.CapacityBytes <= 0 || f.Inodes < 0 || f.UsedBytes < 0 || f.UsedBytes > f.CapacityBytes {
			fault("filesystem %s: %d of %d bytes used, %d inodes", f.Name, f.UsedBytes, f.CapacityBytes, f.Inodes)
		}
	}
	names := map[string]bool{}
	for i := range w.Pods {
		p := &w.Pods[i]
		if names[p.Spec.Name] {
			fault("pod %s is there twice", p.Spec.Name)
		}
		names[p.Spec.Name] = true
		for _, c := range p.Containers {
			if c.Image < 0 || c.Image >= len(w.Images) {
				fault("pod %s: container %s has no image", p.Spec.Name, c.Name)
			}
			for _, writer := range c.Writers {
				if writer.To == Volume && !slices.ContainsFunc(p.Spec.Volumes, func(v engine.Volume) bool { return v.Name == writer.Volume }) {
					fault("pod %s: container %s writes to volume %s, which it has not", p.Spec.Name, c.Name, writer.Volume)
				}
			}
		}
	}
	for _, h := range w.Host {
		if !is(h.Filesystem) {
			fault("process %s is on no filesystem", h.Name)
		}
	}
	n := 0
	for _, i := range w.Images {
		if !i.Absent {
			n++
		}
	}
	if len(faults) == 0 && n > 0 && !w.fits() {
		fault("images and what is used do not fit on filesystem %s", w.Filesystems[w.Image].Name)
	}
	return errors.Join(faults...)
}

// fits says whether the images that are there have room.
func (w *World) fits() bool {
	f := w.Filesystems[w.Image]
	bytes, inodes := f.UsedBytes, f.UsedInodes
	seen := map[string]bool{}
	for _, i := range w.Images {
		for _, l := range i.Layers {
			if !i.Absent && !seen[l.ID] {
				seen[l.ID] = true
				if bytes, inodes = bytes+l.Bytes, inodes+l.Inodes; bytes < 0 || inodes < 0 { // the sum is beyond 64 bits
					return false
				}
			}
		}
	}
	return bytes <= f.CapacityBytes && (f.Inodes == 0 || inodes <= f.Inodes)
}
