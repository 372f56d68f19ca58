package install

import (
	"fmt"
	"strings"
)

// contextLines is how many lines are shown around a change.
const contextLines = 3

// diffCells bounds the work of a comparison; larger files are shown whole.
const diffCells = 4 << 20

// diff shows two texts as people know it from diff -u, without the lines that
// name the files.
func diff(before, after string) string {
	a, b := lines(before), lines(after)
	ops := compare(a, b)
	var out strings.Builder
	for i := 0; i < len(ops); {
		if ops[i].kind == ' ' {
			i++
			continue
		}
		from := max(i-contextLines, 0)
		to, quiet := i, 0
		for to < len(ops) && quiet <= 2*contextLines {
			if ops[to].kind == ' ' {
				quiet++
			} else {
				quiet = 0
			}
			to++
		}
		to -= max(quiet-contextLines, 0)
		hunk := ops[from:to]
		fmt.Fprintf(&out, "@@ -%s +%s @@\n", span(hunk, '+', ops[:from]), span(hunk, '-', ops[:from]))
		for _, op := range hunk {
			text, whole := strings.CutSuffix(op.line, "\n")
			fmt.Fprintf(&out, "%c%s\n", op.kind, text)
			if !whole {
				out.WriteString("\\ No newline at end of file\n")
			}
		}
		i = to
	}
	return out.String()
}

type op struct {
	kind byte // ' ', '-' or '+'
	line string
}

// span is "first line,lines" of one side; without are the other side's.
func span(hunk []op, without byte, before []op) string {
	count := func(ops []op) (n int) {
		for _, o := range ops {
			if o.kind != without {
				n++
			}
		}
		return n
	}
	first, n := count(before), count(hunk)
	if n > 0 {
		first++
	}
	return fmt.Sprintf("%d,%d", first, n)
}

func lines(s string) []string {
	if s == "" {
		return nil
	}
	out := strings.SplitAfter(s, "\n")
	if out[len(out)-1] == "" {
		out = out[:len(out)-1]
	}
	return out
}

// compare finds the longest common lines.
func compare(a, b []string) []op {
	var out []op
	start := 0
	for start < len(a) && start < len(b) && a[start] == b[start] {
		out = append(out, op{' ', a[start]})
		start++
	}
	endA, endB := len(a), len(b)
	for endA > start && endB > start && a[endA-1] == b[endB-1] {
		endA, endB = endA-1, endB-1
	}
	x, y := a[start:endA], b[start:endB]
	var common [][]int
	if len(x)*len(y) <= diffCells {
		common = make([][]int, len(x)+1)
		for i := range common {
			common[i] = make([]int, len(y)+1)
		}
		for i := len(x) - 1; i >= 0; i-- {
			for j := len(y) - 1; j >= 0; j-- {
				if x[i] == y[j] {
					common[i][j] = common[i+1][j+1] + 1
				} else {
					common[i][j] = max(common[i+1][j], common[i][j+1])
				}
			}
		}
	}
	i, j := 0, 0
	for i < len(x) || j < len(y) {
		switch {
		case common != nil && i < len(x) && j < len(y) && x[i] == y[j]:
			out = append(out, op{' ', x[i]})
			i, j = i+1, j+1
		case i < len(x) && (j == len(y) || common == nil || common[i+1][j] >= common[i][j+1]):
			out = append(out, op{'-', x[i]})
			i++
		default:
			out = append(out, op{'+', y[j]})
			j++
		}
	}
	for _, line := range a[endA:] {
		out = append(out, op{' ', line})
	}
	return out
}
