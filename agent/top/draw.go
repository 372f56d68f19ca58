package top

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
	"unicode/utf8"

	"github.com/cleave-cri/cleave/agent"
	"github.com/cleave-cri/cleave/agent/page"
	"github.com/cleave-cri/cleave/engine"
)

// style is how a line looks on a terminal with colours.
type style string

// Styles, as parameters of ECMA-48's SGR.
const (
	plain  style = ""
	bold   style = "1"
	green  style = "32"
	yellow style = "33"
	red    style = "31"
	faint  style = "2"
)

// line is one of a screen.
type line struct {
	text string
	style
}

// Screen is a view for a terminal of so many columns and lines: at most height lines, none wider than width.
func (v View) Screen(width, height int, colour bool) []string {
	lines := v.filesystemLines(width, true)
	if len(lines)+2*leastSection > height {
		lines = v.filesystemLines(width, false)
	}
	holders := section("HOLDS", "DEVICE", "WHO", v.holderLines())
	next := section("FREES", "KIND", "WHAT WOULD GO FIRST, BY WHICH RULE, IF WHAT IS SHORT", v.nextLines())
	// Each gets half of what is left, and what the other does not need; one that would have no row is left out.
	left := max(0, height-len(lines))
	first := max(left-left/2, left-len(next))
	if left < 2*leastSection {
		first = left
	}
	for _, s := range []struct {
		lines []line
		most  int
	}{{holders, first}, {next, left}} {
		if most := min(s.most, height-len(lines)); most >= leastSection {
			lines = append(lines, s.lines[:min(len(s.lines), most)]...)
		}
	}

	out := make([]string, 0, height)
	for _, l := range lines[:min(len(lines), height)] {
		text := clip(l.text, width)
		if colour && l.style != plain && text != "" {
			text = "\x1b[" + string(l.style) + "m" + text + "\x1b[0m"
		}
		out = append(out, text)
	}
	return out
}

// leastSection is an empty line, a title and one row.
const leastSection = 3

// shownProblems is how many problems a screen names: filesystems matter more.
const shownProblems = 3

// filesystemLines are those above the sections; pods asks for who would go first on each filesystem.
func (v View) filesystemLines(width int, pods bool) []line {
	out := v.top()
	for _, f := range v.Filesystems {
		out = append(out, f.lines(width)...)
		if next := f.nextPods(); pods && next != "" {
			out = append(out, line{"  " + next, plain})
		}
	}
	return out
}

// shownPods is how many pods a line names.
const shownPods = 3

// nextPods says in a line who would go first; empty while that is not known.
func (f Filesystem) nextPods() string {
	if f.Next == nil || f.Next.Nobody == "" && len(f.Next.Pods) == 0 {
		return ""
	}
	if f.Next.Nobody != "" {
		return "no pod would go: " + page.Name(f.Next.Nobody)
	}
	pods := f.Next.Pods[:min(len(f.Next.Pods), shownPods)]
	names := make([]string, len(pods))
	for i, p := range pods {
		names[i] = fmt.Sprintf("%s (%s)", page.Name(p.Namespace+"/"+p.Name), used(f.Next.Signal, p))
	}
	if more := f.Next.Count - len(pods); more > 0 {
		names = append(names, fmt.Sprintf("%d more", more))
	}
	return "pods that would go first: " + strings.Join(names, ", ")
}

func used(s engine.Signal, p agent.NextPod) string {
	switch {
	case p.Used == nil:
		return "no figures"
	case s.Resource() == engine.Inodes:
		return fmt.Sprintf("%d inodes", *p.Used)
	default:
		return page.Bytes(positive(*p.Used))
	}
}

func (v View) top() (out []line) {
	head := fmt.Sprintf("cleave %s  mode %s  layout %s  %s", v.Version, v.Mode, v.Layout, v.At.UTC().Format("15:04:05 UTC"))
	if v.Outcome != "" {
		head += "  " + v.Outcome
	}
	out = append(out, line{head, bold})
	for _, p := range v.Problems[:min(len(v.Problems), shownProblems)] {
		out = append(out, line{"! " + page.Name(p), red})
	}
	if more := len(v.Problems) - shownProblems; more > 0 {
		out = append(out, line{fmt.Sprintf("! and %d more problems (`cleave status`)", more), red})
	}
	if len(v.Leaving) > 0 {
		out = append(out, line{fmt.Sprintf("pods on their way out: %d", len(v.Leaving)), yellow})
	}
	return append(out, line{})
}

func (f Filesystem) roles() string {
	names := make([]string, len(f.Roles))
	for i, r := range f.Roles {
		names[i] = string(r)
	}
	return strings.Join(names, ", ")
}

// lines are a filesystem's: what it is, a bar of its bytes, one of its inodes if they are by far the shorter, and what its
// thresholds are.
func (f Filesystem) lines(width int) (out []line) {
	stuck := ""
	if f.Stuck {
		stuck = "DOES NOT ANSWER, was: "
	}
	out = append(out, line{fmt.Sprintf("%s  %s%s of %s used, %s available  %s %s on %s", f.roles(), stuck,
		page.Bytes(f.UsedBytes), page.Bytes(f.CapacityBytes), page.Bytes(f.AvailableBytes), f.Device, f.Type, page.Name(f.Mountpoint)), bold})
	out = append(out, f.bar("space ", width, f.CapacityBytes, f.UsedBytes, f.AvailableBytes, "available"))
	if f.InodesTotal != nil && f.InodesFree != nil {
		total, free := *f.InodesTotal, min(*f.InodesFree, *f.InodesTotal)
		if b := f.bar("inodes", width, total, total-free, free, "inodesFree"); b.style != green || share(total-free, total) > share(f.CapacityBytes-min(f.AvailableBytes, f.CapacityBytes), f.CapacityBytes) {
			out = append(out, b)
		}
	}
	if marks := f.marks(); marks != "" {
		out = append(out, line{"  " + marks, faint})
	}
	return out
}

// marks are the thresholds of bytes, and those of inodes that are met or come; what is met stands first.
func (f Filesystem) marks() string {
	rank := func(m Mark) int {
		switch {
		case m.Met:
			return 0
		case m.InSeconds != nil:
			return 1
		default:
			return 2
		}
	}
	var out []string
	for _, m := range slices.SortedStableFunc(slices.Values(f.Marks), func(a, b Mark) int { return cmp.Compare(rank(a), rank(b)) }) {
		amount := page.Bytes(m.Least)
		if m.inodes() {
			if !m.Met && m.InSeconds == nil {
				continue
			}
			amount = fmt.Sprint(m.Least)
		}
		text := m.Text
		if strings.Contains(text, "%") {
			text += " (" + amount + ")"
		}
		switch {
		case m.Met:
			text += " MET"
		case m.InSeconds != nil:
			text += " in " + time.Duration(*m.InSeconds*float64(time.Second)).Round(time.Second).String()
		}
		out = append(out, text)
	}
	return strings.Join(out, "; ")
}

func (m Mark) inodes() bool { return strings.HasSuffix(string(m.Signal), ".inodesFree") }

// bar draws what of a capacity is used (#), kept for root (~) and available (.), with thresholds where they are met when it gets
// there: | for one that acts at once, : for one that waits.
func (f Filesystem) bar(name string, width int, capacity, used, available uint64, what string) line {
	const around = len("  space  [] 100%")
	cells := min(max(width-around, 10), 160)
	taken := capacity - min(available, capacity)
	bar := []byte(strings.Repeat(".", cells))
	for i := range bar[:cellsOf(taken, capacity, cells)] {
		bar[i] = '~'
	}
	for i := range bar[:min(cellsOf(used, capacity, cells), cellsOf(taken, capacity, cells))] {
		bar[i] = '#'
	}
	s := green
	for _, m := range f.Marks {
		if !strings.HasSuffix(string(m.Signal), "."+what) {
			continue
		}
		at := min(cellsOf(capacity-min(m.Least, capacity), capacity, cells), cells-1)
		if m.GraceSeconds == 0 {
			bar[at] = '|'
		} else if bar[at] != '|' {
			bar[at] = ':'
		}
		switch {
		case m.Met && m.GraceSeconds == 0:
			s = red
		case (m.Met || m.InSeconds != nil) && s == green:
			s = yellow
		}
	}
	return line{fmt.Sprintf("  %s [%s] %3d%%", name, bar, int(100*share(taken, capacity))), s}
}

// share is which part n is of a capacity, 0 of none.
func share(n, capacity uint64) float64 {
	if capacity == 0 {
		return 0
	}
	return float64(n) / float64(capacity)
}

// cellsOf is how many cells of a bar n takes. Not all but of the whole.
func cellsOf(n, capacity uint64, cells int) int {
	return min(int(share(n, capacity)*float64(cells)), cells)
}

// section is a table with a line above it; columns have the widths of what they hold.
func section(first, second, third string, rows [][3]string) []line {
	out := []line{{}, {fmt.Sprintf("%9s  %-15s  %s", first, second, third), bold}}
	for _, r := range rows {
		out = append(out, line{fmt.Sprintf("%9s  %-15s  %s", r[0], r[1], r[2]), plain})
	}
	return out
}

func (v View) holderLines() (out [][3]string) {
	where := map[string]string{}
	for _, f := range v.Filesystems {
		where[f.Device] = f.Device + " " + string(f.Roles[0])
	}
	for _, h := range v.Holders {
		amount := page.Bytes(h.Bytes)
		if h.AtLeast {
			amount = ">=" + amount
		}
		device := where[h.Device]
		if device == "" {
			device = h.Device
		}
		out = append(out, [3]string{amount, device, strings.TrimSpace(h.Kind + " " + page.Name(h.Name))})
	}
	if len(out) == 0 {
		out = append(out, [3]string{"-", "", "nobody, as far as is known"})
	}
	return out
}

func (v View) nextLines() (out [][3]string) {
	for _, c := range v.Next {
		amount := "unknown"
		if c.ExpectedBytes != nil {
			amount = page.Bytes(positive(*c.ExpectedBytes))
		}
		signals := make([]string, len(c.Signals))
		for i, s := range c.Signals {
			signals[i], _ = strings.CutSuffix(string(s), ".available")
		}
		out = append(out, [3]string{amount, string(c.Kind), fmt.Sprintf("%s  %s  %s", page.Name(c.ID), c.Rule, strings.Join(signals, ", "))})
	}
	switch {
	case len(out) > 0:
	case !v.Reclaims:
		out = append(out, [3]string{"-", "", "nothing: this cleave does not reclaim (reclaim.enabled)"})
	default:
		out = append(out, [3]string{"-", "", "nothing that cleave could delete"})
	}
	return out
}

// podLines are for a page, which has room for why.
func (v View) podLines() (out [][3]string) {
	for _, f := range v.Filesystems {
		if f.Next == nil {
			continue
		}
		device := f.Device + " " + string(f.Roles[0])
		if f.Next.Nobody != "" {
			out = append(out, [3]string{"-", device, "none: " + page.Name(f.Next.Nobody)})
			continue
		}
		for _, p := range f.Next.Pods[:min(len(f.Next.Pods), shownPods)] {
			out = append(out, [3]string{used(f.Next.Signal, p), device, page.Name(p.Namespace+"/"+p.Name) + "  " + page.Name(p.Why)})
		}
	}
	if len(out) == 0 {
		out = append(out, [3]string{"-", "", "none, as far as is known"})
	}
	return out
}

// clip cuts a line where the screen ends.
func clip(text string, width int) string {
	columns := 0
	for i, r := range text {
		wide := 1
		if r >= 0x1100 { // where letters of two columns begin; better too early than a second line
			wide = 2
		}
		if columns+wide > width {
			if i == 0 {
				return ""
			}
			_, last := utf8.DecodeLastRuneInString(text[:i])
			return text[:i-last] + ">"
		}
		columns += wide
	}
	return text
}

// listed is how many holders and candidates a page names.
const listed = 20

// WriteText prints a view as tables, for what is no terminal.
func (v View) WriteText(w io.Writer, _ time.Time) error {
	out := page.NewWriter(w)
	for _, l := range v.top() {
		out.Printf("%s\n", l.text)
	}
	var table strings.Builder
	tw := tabwriter.NewWriter(&table, 0, 0, 2, ' ', 0)
	row := func(columns ...string) { fmt.Fprintln(tw, strings.Join(columns, "\t")) }
	row("DEVICE", "CAPACITY", "USED", "AVAILABLE", "INODES FREE", "ROLES", "MOUNTED ON")
	for _, f := range v.Filesystems {
		inodes := "no limit"
		if f.InodesFree != nil {
			inodes = fmt.Sprint(*f.InodesFree)
		}
		roles := f.roles()
		if f.Stuck {
			roles += " (does not answer)"
		}
		row(f.Device, page.Bytes(f.CapacityBytes), page.Bytes(f.UsedBytes), page.Bytes(f.AvailableBytes), inodes, roles, page.Name(f.Mountpoint))
	}
	row()
	row("THRESHOLD", "AT", "DEVICE", "STATE")
	for _, f := range v.Filesystems {
		for _, m := range f.Marks {
			least, state := page.Bytes(m.Least), "-"
			if m.inodes() {
				least = fmt.Sprint(m.Least)
			}
			switch {
			case m.Met:
				state = "met"
			case m.InSeconds != nil:
				state = "in " + time.Duration(*m.InSeconds*float64(time.Second)).Round(time.Second).String()
			}
			row(m.Text, least, f.Device, state)
		}
	}
	row()
	row("HOLDS", "DEVICE", "WHO")
	for _, r := range cut(v.holderLines()) {
		row(r[:]...)
	}
	row()
	row("FREES", "KIND", "WHAT WOULD GO FIRST, BY WHICH RULE, IF WHAT IS SHORT")
	for _, r := range cut(v.nextLines()) {
		row(r[:]...)
	}
	row()
	row("HAS", "DEVICE", "POD THAT WOULD GO IF THAT IS NOT ENOUGH, AND WHY")
	for _, r := range v.podLines() {
		row(r[:]...)
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	for text := range strings.Lines(table.String()) {
		out.Printf("%s\n", strings.TrimRight(text, " \n"))
	}
	return out.Err()
}

func cut(rows [][3]string) [][3]string { return rows[:min(len(rows), listed)] }
