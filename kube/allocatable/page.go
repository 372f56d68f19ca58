package allocatable

import (
	"fmt"
	"io"
	"math"
	"time"
)

// WriteText writes the report for people.
func (r Report) WriteText(w io.Writer, _ time.Time) error {
	p := &page{w: w}
	for _, res := range r.Resources {
		p.line("%s", res.Name)
		p.row("capacity", res.CapacityBytes, "")
		for _, t := range res.Terms {
			p.row("- "+t.Name, t.Bytes, t.From)
		}
		p.row("= allocatable", res.AllocatableBytes, "")
		if res.PublishedBytes != nil {
			same := "the same"
			if *res.PublishedBytes != res.AllocatableBytes {
				same = "NOT the same"
			}
			p.row("node publishes", *res.PublishedBytes, same)
		}
		if res.EnforcedBytes != nil {
			p.row("pods' cgroup, by settings", *res.EnforcedBytes, "")
		}
		if c, ok := r.Cgroups["pods"]; ok && res.Name == memory && c.LimitBytes != nil {
			p.row("pods' cgroup, really", int64(min(*c.LimitBytes, math.MaxInt64)), c.Path)
		}
		for _, n := range res.Notes {
			p.line("    %s", n)
		}
		p.line("")
	}
	for _, name := range r.Names() {
		if c := r.Cgroups[name]; c.UsedBytes != nil {
			p.line("cgroup of %s, %s: uses %s", name, c.Path, exact(int64(min(*c.UsedBytes, math.MaxInt64))))
		}
	}
	for _, u := range r.Unknown {
		p.line("not known: %s", u)
	}
	for _, f := range r.Findings {
		p.line("look: %s", f.Text)
		if f.Remedy != "" {
			p.line("      -> %s", f.Remedy)
		}
	}
	return p.err
}

// page keeps the first error.
type page struct {
	w   io.Writer
	err error
}

func (p *page) line(format string, args ...any) {
	if p.err == nil {
		_, p.err = fmt.Fprintf(p.w, format+"\n", args...)
	}
}

func (p *page) row(name string, bytes int64, from string) {
	text := fmt.Sprintf("  %-27s %15d  %9s", name, bytes, gib(bytes))
	if from != "" {
		text += "  " + from
	}
	p.line("%s", text)
}
