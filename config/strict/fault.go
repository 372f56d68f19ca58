// Package strict reads YAML files that people write, so that nothing in them is
// passed over: an unknown key, a key given twice, a second document, a value of
// another kind, an anchor. All faults are reported together, each with file,
// line and column. It knows no format; config and lab/scenario have theirs on
// it. It imports nothing of ours.
package strict

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Fault is one thing that is wrong with a file.
type Fault struct {
	// File is the name given to New; empty for what was not read from a file, or
	// was changed since.
	File string
	// Line and Column count from 1; 0 means that no place is known. Column
	// counts characters.
	Line, Column int
	// Key is the path of the key, such as "measure.period"; empty if the fault
	// is that of the file as a whole.
	Key string
	// Message says what is wrong and what would be right.
	Message string

	// Other is a second key that the fault is about, whose place is taken if
	// Key is not in the file.
	Other string
}

// String gives "file:line:column: key: message", without the parts that are not
// known.
func (f Fault) String() string {
	var b strings.Builder
	if f.File != "" {
		b.WriteString(f.File + ":")
		if f.Line > 0 {
			fmt.Fprintf(&b, "%d:%d:", f.Line, f.Column)
		}
		b.WriteByte(' ')
	}
	if f.Key != "" {
		b.WriteString(f.Key + ": ")
	}
	b.WriteString(f.Message)
	return b.String()
}

// Faults are all things that are wrong with a file, in the order of the
// file. As an error it is never empty.
type Faults []Fault

// Error gives one line for each fault.
func (f Faults) Error() string {
	lines := make([]string, len(f))
	for i, fault := range f {
		lines[i] = fault.String()
	}
	return strings.Join(lines, "\n")
}

// Sorted returns f in the order of the file.
func (f Faults) Sorted() Faults {
	return slices.SortedStableFunc(slices.Values(f), func(a, b Fault) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
}
