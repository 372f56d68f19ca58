package snapshotter

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/cleave-cri/cleave/agent/page"
	"github.com/cleave-cri/cleave/snapshot/split"
)

// Status is the answer of the status socket.
type Status struct {
	// Version is cleave's own.
	Version string `json:"version"`
	PID     int    `json:"pid"`
	// StartedAt is when this process started.
	StartedAt time.Time `json:"startedAt"`
	// Listen is the socket for containerd.
	Listen     string           `json:"listen"`
	Containerd ContainerdStatus `json:"containerd"`
	Calls      CallStatus       `json:"calls"`
	// Store is the snapshotter's own account; Problem says what is missing in
	// it, empty if nothing is.
	Store   split.Status `json:"store"`
	Problem string       `json:"problem,omitempty"`
}

// ContainerdStatus is about the containerd that is served.
type ContainerdStatus struct {
	Endpoint string `json:"endpoint"`
	// UUID is what containerd calls itself, empty before it was ever asked.
	UUID string `json:"uuid,omitempty"`
	// PID is its process, 0 while it may not delete snapshots; Reason then says
	// why.
	PID    int32  `json:"pid,omitempty"`
	Reason string `json:"reason,omitempty"`
	// PokedAt is when it was last made to compare its snapshots with ours, nil
	// if not since the last connect; PokeProblem says why.
	PokedAt     *time.Time `json:"pokedAt,omitempty"`
	PokeProblem string     `json:"pokeProblem,omitempty"`
}

// CallStatus counts calls since the start of the process.
type CallStatus struct {
	// Panics were faults of ours, Refused are deletions that somebody asked for
	// who may not.
	Panics  int64 `json:"panics"`
	Refused int64 `json:"refused"`
}

func (p *process) status(ctx context.Context) Status {
	known := p.watch.known()
	s := Status{
		Version:   p.opt.Version,
		PID:       os.Getpid(),
		StartedAt: p.startedAt,
		Listen:    p.cfg.Snapshotter.Endpoint.String(),
		Containerd: ContainerdStatus{
			Endpoint: p.cfg.Runtime.Endpoint.String(), UUID: known.uuid, PID: known.pid, Reason: known.reason, PokeProblem: known.pokeProblem,
		},
		Calls: CallStatus{Panics: p.counts.panics.Load(), Refused: p.counts.refused.Load()},
	}
	if !known.pokedAt.IsZero() {
		s.Containerd.PokedAt = &known.pokedAt
	}
	store, err := p.backend.Status(ctx)
	s.Store = store
	if err != nil {
		s.Problem = err.Error()
	}
	return s
}

// WriteText writes the status for people.
func (s Status) WriteText(out io.Writer, now time.Time) error {
	var b strings.Builder
	fmt.Fprintf(&b, "cleave snapshotter %s, process %d, up %s\n", s.Version, s.PID, now.Sub(s.StartedAt).Round(time.Second))
	s.writeContainerd(&b, now)
	if s.Store.Fence.Closed {
		fmt.Fprintf(&b, "fence:       CLOSED since %s; snapshots can be read, nothing is made or deleted\n", ago(now, s.Store.Fence.Since))
		for _, r := range s.Store.Fence.Reasons {
			fmt.Fprintf(&b, "  %s: %s\n    -> %s\n", r.Root, r.What, r.Remedy)
		}
	} else {
		fmt.Fprintf(&b, "fence:       open since %s\n", ago(now, s.Store.Fence.Since))
	}
	d := s.Store.Database
	fmt.Fprintf(&b, "database:    %s, %s of %s in use, ballast %s, %s free on its disk\n", d.Path, size(d.UsedBytes), size(d.AllocatedBytes), size(d.BallastBytes), size(d.FreeBytes))
	if a := s.Store.Alarm; a != nil {
		fmt.Fprintf(&b, "ALARM:       a clean-up is held up since %s: %s\n", ago(now, a.At), a.Reason)
		fmt.Fprintf(&b, "             it would take %d of %d folders (`-o json` lists them)\n             -> find out why, then run `cleave snapshotter confirm`\n", len(a.Folders), a.Total)
	}
	if m := s.Store.Measuring; m.Reason != "" {
		fmt.Fprintf(&b, "usage:       of %d layers it is not known, which is tried again (%d failures since the start): %s\n", m.Failing, m.Failures, m.Reason)
	}
	if sw := s.Store.LastSweep; sw != nil && sw.Error != "" && s.Store.Alarm == nil && !s.Store.Fence.Closed {
		fmt.Fprintf(&b, "clean-up:    the last one, %s, is incomplete: %s\n", ago(now, sw.At), sw.Error)
	}
	if p := s.Store.Projects; p != nil {
		switch {
		case p.Missing != "":
			fmt.Fprintf(&b, "limits:      none is kept: %s\n", p.Missing)
		case p.Problem != "":
			fmt.Fprintf(&b, "limits:      kept by project quota; %d failures since the start, the last: %s\n", p.Failures, p.Problem)
		default:
			b.WriteString("limits:      kept by project quota\n")
		}
	}
	for _, n := range s.Store.Notes {
		fmt.Fprintf(&b, "note:        %s\n", n)
	}
	if s.Problem != "" {
		fmt.Fprintf(&b, "problem:     %s\n", s.Problem)
	}
	if s.Calls.Panics > 0 {
		fmt.Fprintf(&b, "problem:     %d calls broke by a fault of cleave's own; look at the log and report it\n", s.Calls.Panics)
	}
	if s.Calls.Refused > 0 {
		fmt.Fprintf(&b, "note:        %d deletions were refused; the log says whose\n", s.Calls.Refused)
	}
	for _, r := range []struct {
		name string
		root split.RootStatus
	}{{"image root", s.Store.Image}, {"container root", s.Store.Container}} {
		if err := writeRoot(&b, r.name, r.root); err != nil {
			return err
		}
	}
	_, err := io.WriteString(out, b.String())
	return err
}

// Problems are what keeps the snapshotter from working as it should, each with
// what to do.
func (s Status) Problems() []string {
	var out []string
	for _, r := range s.Store.Fence.Reasons {
		out = append(out, fmt.Sprintf("nothing is made or deleted, %s: %s: %s", r.Root, r.What, r.Remedy))
	}
	if s.Containerd.PID == 0 {
		out = append(out, "nothing is deleted, containerd is not recognised: "+cmp.Or(s.Containerd.Reason, "it has not answered yet"))
	} else if s.Containerd.PokedAt == nil && s.Containerd.PokeProblem != "" && !s.Store.Fence.Closed { // else that is why
		out = append(out, "what was removed while the snapshotter was away keeps its space: "+s.Containerd.PokeProblem)
	}
	if a := s.Store.Alarm; a != nil {
		out = append(out, fmt.Sprintf("a clean-up of %d folders is held up: %s: find out why, then run `cleave snapshotter confirm`", len(a.Folders), a.Reason))
	}
	for _, r := range []split.RootStatus{s.Store.Image, s.Store.Container} {
		if r.Trash.LastError != "" {
			out = append(out, "something in the trash can't be deleted: "+r.Trash.LastError)
		}
		out = append(out, r.Errors...)
	}
	if m := s.Store.Measuring; m.Reason != "" && !s.Store.Fence.Closed {
		out = append(out, fmt.Sprintf("the usage of %d layers is not known: %s", m.Failing, m.Reason))
	}
	if p := s.Store.Projects; p != nil && !s.Store.Fence.Closed {
		if p.Missing != "" {
			out = append(out, "writable layers have no limits: "+p.Missing)
		} else if p.Problem != "" {
			out = append(out, "a writable layer may have no limit: "+p.Problem)
		}
	}
	if sw := s.Store.LastSweep; sw != nil && sw.Error != "" && s.Store.Alarm == nil && !s.Store.Fence.Closed {
		out = append(out, "the last clean-up is incomplete: "+sw.Error)
	}
	if s.Problem != "" {
		out = append(out, s.Problem)
	}
	if s.Calls.Panics > 0 {
		out = append(out, fmt.Sprintf("%d calls broke by a fault of cleave's own: look at its log and report it", s.Calls.Panics))
	}
	return out
}

func (s Status) writeContainerd(b *strings.Builder, now time.Time) {
	c := s.Containerd
	if c.PID == 0 {
		reason := c.Reason
		if reason == "" {
			reason = "it has not answered yet"
		}
		fmt.Fprintf(b, "containerd:  %s, may not delete: %s\n", c.Endpoint, reason)
		return
	}
	fmt.Fprintf(b, "containerd:  %s, %s, process %d\n", c.Endpoint, c.UUID, c.PID)
	switch {
	case c.PokedAt != nil:
		fmt.Fprintf(b, "             compared its snapshots with ours %s\n", ago(now, *c.PokedAt))
	case c.PokeProblem != "":
		fmt.Fprintf(b, "             has not compared its snapshots with ours yet: %s\n", c.PokeProblem)
	default:
		fmt.Fprintf(b, "             is comparing its snapshots with ours\n")
	}
}

func writeRoot(b *strings.Builder, name string, r split.RootStatus) error {
	free := "free space unknown"
	if r.FreeBytes != nil {
		free = size(*r.FreeBytes) + " free"
	}
	if !r.Open {
		free += ": it is not there or not the right one"
	}
	fmt.Fprintf(b, "\n%s %s, %s\n", name, r.Path, free)
	table := tabwriter.NewWriter(b, 0, 0, 2, ' ', tabwriter.AlignRight)
	for _, l := range []struct {
		what string
		sum  split.Sum
	}{{"layers", r.Layers}, {"extractions", r.Extractions}, {"writable", r.Writable}, {"views", r.Views}} {
		note := ""
		if l.sum.Unmeasured > 0 {
			note = fmt.Sprintf("  + %d not measured", l.sum.Unmeasured)
		}
		fmt.Fprintf(table, "  %s\t%d\t%s\t%d inodes\t%s\n", l.what, l.sum.Count, size(l.sum.Bytes), l.sum.Inodes, note)
	}
	note := ""
	if r.Trash.Unmeasured > 0 {
		note = fmt.Sprintf("  + %d not measured", r.Trash.Unmeasured)
	}
	fmt.Fprintf(table, "  %s\t%d\t%s\t%d inodes\t%s\n", "trash", r.Trash.Entries, size(r.Trash.Bytes), r.Trash.Inodes, note)
	if err := table.Flush(); err != nil {
		return err
	}
	if r.Trash.LastError != "" {
		fmt.Fprintf(b, "  trash: %s\n", r.Trash.LastError)
	}
	for _, e := range r.Errors {
		fmt.Fprintf(b, "  %s\n", e)
	}
	return nil
}

// size writes an amount, which is never negative.
func size(n int64) string { return page.Bytes(uint64(max(n, 0))) } //nolint:gosec // see above

func ago(now, t time.Time) string {
	if t.IsZero() {
		return "never"
	}
	return now.Sub(t).Round(time.Second).String() + " ago"
}
