// Package pressure says which of a node's filesystems are short, one by one, from what each pass of the engine leaves. The kubelet has
// one condition for all of them (GAP-39). It does no I/O and reads no clock; only agent may import it.
package pressure

import (
	"fmt"
	"slices"
	"time"

	"github.com/cleave-cri/cleave/agent/page"
	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/record"
	"github.com/cleave-cri/cleave/fsstats"
)

// Filesystem is how one is.
type Filesystem struct {
	Role fsstats.Role
	// Short says that it is below a threshold, whatever its grace, or was within the transition period (SYN-11); Hard that one of those
	// is a hard one.
	Short, Hard bool
	// Text has the figures, for people.
	Text string
}

// Picture is how all are whose figures are known, at one time.
type Picture struct {
	At          time.Time
	Filesystems []Filesystem
}

// Hard lists those below a hard threshold.
func (p Picture) Hard() []Filesystem {
	return slices.DeleteFunc(slices.Clone(p.Filesystems), func(f Filesystem) bool { return !f.Hard })
}

// Book remembers when each filesystem was last short. The zero Book has seen nothing; it is for one caller at a time.
type Book struct {
	short, hard map[fsstats.Role]time.Time
}

// roles are the filesystems with their signals.
var roles = []struct {
	role          fsstats.Role
	bytes, inodes engine.Signal
}{
	{fsstats.NodeFS, engine.NodeFSAvailable, engine.NodeFSInodesFree},
	{fsstats.ImageFS, engine.ImageFSAvailable, engine.ImageFSInodesFree},
	{fsstats.ContainerFS, engine.ContainerFSAvailable, engine.ContainerFSInodesFree},
}

// Passed adds a pass and returns how the filesystems are now. One without figures is left out: nobody knows.
func (b *Book) Passed(r record.Record) Picture {
	if b.short == nil {
		b.short, b.hard = map[fsstats.Role]time.Time{}, map[fsstats.Role]time.Time{}
	}
	now := r.Input.Now
	p := Picture{At: now}
	if r.Input.Summary == nil {
		return p
	}
	seen := r.Input.Summary.Observe()
	for _, of := range roles {
		o, ok := seen[of.bytes]
		if !ok {
			continue
		}
		f := Filesystem{Role: of.role, Text: left(of.bytes, o)}
		for _, m := range r.Next.Met {
			if m.Threshold.Signal != of.bytes && m.Threshold.Signal != of.inodes {
				continue
			}
			b.short[of.role] = now
			if m.Threshold.Hard() {
				b.hard[of.role] = now
			}
			f.Text = fmt.Sprintf("%s: %s", m.Threshold, left(m.Threshold.Signal, seen[m.Threshold.Signal]))
		}
		f.Short, f.Hard = within(b.short, of.role, now, r.Config.TransitionPeriod), within(b.hard, of.role, now, r.Config.TransitionPeriod)
		if at := b.short[of.role]; f.Short && at.Before(now) {
			f.Text += fmt.Sprintf("; it was short at %s, and has to be well for %s", at.UTC().Format(time.TimeOnly), r.Config.TransitionPeriod)
		}
		p.Filesystems = append(p.Filesystems, f)
	}
	return p
}

// within says whether something was so now or within the last while. What lies in the future, because the clock was set back, is over.
func within(last map[fsstats.Role]time.Time, role fsstats.Role, now time.Time, while time.Duration) bool {
	at, ok := last[role]
	return ok && !at.After(now) && (at.Equal(now) || now.Sub(at) < while)
}

// left says what is available of a signal.
func left(s engine.Signal, o engine.Observation) string {
	if s.Resource() == engine.Inodes {
		return fmt.Sprintf("%d of %d inodes left", o.Available, o.Capacity)
	}
	return fmt.Sprintf("%s of %s left", bytes(o.Available), bytes(o.Capacity))
}

func bytes(n int64) string { return page.Bytes(uint64(max(n, 0))) } //nolint:gosec // not below zero
