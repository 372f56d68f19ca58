package du

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/cleave-cri/cleave/agent/page"
)

// WriteText prints a report for people.
func (r Report) WriteText(w io.Writer, _ time.Time) error {
	out := page.NewWriter(w)
	name := r.UID
	if r.Pod != "" {
		name = r.Namespace + "/" + r.Pod + " (" + r.UID + ")"
	}
	if r.Container != "" {
		name = "Container " + r.Container + " of pod " + name
	} else {
		name = "Pod " + name
	}
	out.Printf("%s, looked at for %s\n", name, r.Finished.Sub(r.Started).Round(time.Millisecond))
	if r.Partial {
		out.Printf("! Not all of it was looked at: figures are lower bounds, and something larger may be missing.\n")
	}
	for _, p := range r.Problems {
		out.Printf("! %s\n", p)
	}
	out.Printf("\n")
	if err := r.writePlaces(out); err != nil {
		return err
	}
	if err := r.writeHeld(out, "LARGEST FOLDERS", func(f Found) []Held { return f.Folders }); err != nil {
		return err
	}
	if err := r.writeHeld(out, "LARGEST FILES", func(f Found) []Held { return f.Files }); err != nil {
		return err
	}
	if err := r.writeOpen(out); err != nil {
		return err
	}
	return out.Err()
}

// label names a place for people.
func (f Found) label() string {
	if f.Container == "" {
		return f.What
	}
	return f.What + " of " + f.Container
}

func (r Report) weight(bytes, inodes int64) int64 {
	if r.ByInodes {
		return inodes
	}
	return bytes
}

func (r Report) writePlaces(out *page.Writer) error {
	if len(r.Places) == 0 {
		out.Printf("It has nothing on disk that cleave knows.\n")
		return nil
	}
	places := slices.SortedStableFunc(slices.Values(r.Places), func(a, b Found) int {
		return cmp.Compare(r.weight(b.Bytes, b.Inodes), r.weight(a.Bytes, a.Inodes))
	})
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	tw := page.NewWriter(table)
	tw.Printf("PLACE\tTAKES\tINODES\tPATH\n")
	for _, f := range places {
		switch {
		case f.Gone:
			tw.Printf("%s\tis gone\t\t%s\n", f.label(), f.Path)
		default:
			tw.Printf("%s\t%s\t%s\t%s\n", f.label(), least(bytesOf(f.Bytes), f.Partial), least(fmt.Sprint(f.Inodes), f.Partial), f.Path)
		}
	}
	return table.Flush()
}

func (r Report) writeHeld(out *page.Writer, title string, of func(Found) []Held) error {
	var all []Held
	for _, f := range r.Places {
		for _, h := range of(f) {
			h.Path = f.Path + h.Path
			all = append(all, h)
		}
	}
	if len(all) == 0 {
		return nil
	}
	slices.SortStableFunc(all, func(a, b Held) int {
		return cmp.Or(cmp.Compare(r.weight(b.Bytes, b.Inodes), r.weight(a.Bytes, a.Inodes)), cmp.Compare(a.Path, b.Path))
	})
	out.Printf("\n")
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	tw := page.NewWriter(table)
	tw.Printf("TAKES\tINODES\t%s\n", title)
	for _, h := range all[:min(len(all), r.Most)] {
		tw.Printf("%s\t%d\t%s\n", bytesOf(h.Bytes), h.Inodes, h.Path)
	}
	if err := table.Flush(); err != nil {
		return err
	}
	if n := len(all) - r.Most; n > 0 {
		out.Printf("and %d more (--output json has all)\n", n)
	}
	return nil
}

func (r Report) writeOpen(out *page.Writer) error {
	if len(r.Open) == 0 {
		return nil
	}
	out.Printf("\n")
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	tw := page.NewWriter(table)
	tw.Printf("TAKES\tDELETED, STILL OPEN\tPROCESS\tCONTAINER\n")
	for _, f := range r.Open[:min(len(r.Open), r.Most)] {
		tw.Printf("%s\t%s\t%d\t%s\n", bytesOf(f.Bytes), f.Name, f.PID, f.Container)
	}
	if err := table.Flush(); err != nil {
		return err
	}
	if n := len(r.Open) - r.Most; n > 0 {
		out.Printf("and %d more (--output json has all)\n", n)
	}
	return nil
}

// least marks a lower bound.
func least(text string, partial bool) string {
	if partial {
		return "≥ " + text
	}
	return text
}

func bytesOf(n int64) string { return page.Bytes(uint64(max(n, 0))) } //nolint:gosec // not below zero
