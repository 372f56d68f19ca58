package reclaim

import (
	"fmt"
	"io"

	"github.com/cleave-cri/cleave/agent/page"
	"github.com/cleave-cri/cleave/engine/record"
)

// Page writes a step for people: what is to go and by which rule, what that is
// to free, and, after Run, what came of it.
func Page(w io.Writer, step record.Step) error {
	out := page.NewWriter(w)
	var expected, actual int64
	unknown := 0
	for _, item := range step.Items {
		size := "unknown"
		if item.ExpectedBytes == nil {
			unknown++
		} else {
			size = amount(*item.ExpectedBytes)
			expected += *item.ExpectedBytes
		}
		out.Printf("  %s  %s  %s", item.ID, item.Rule, size)
		if item.ActualBytes != nil {
			actual += *item.ActualBytes
			out.Printf("  freed %s", amount(*item.ActualBytes))
		}
		if item.Error != "" {
			out.Printf("  stays: %s", item.Error)
		}
		if item.Note != "" {
			out.Printf("  (%s)", item.Note)
		}
		out.Printf("\n")
	}
	summary := fmt.Sprintf("%s: %d to go, to free %s", step.Kind, len(step.Items), amount(expected))
	if len(step.Items) == 0 {
		summary = fmt.Sprintf("%s: nothing can go", step.Kind)
	}
	if unknown > 0 {
		summary += fmt.Sprintf(" and what %d of them have, which is not known", unknown)
	}
	if actual != 0 {
		summary += ", freed " + amount(actual)
	}
	out.Printf("%s\n", summary)
	return out.Err()
}

func amount(bytes int64) string {
	if bytes < 0 {
		return "-" + page.Bytes(uint64(-bytes))
	}
	return page.Bytes(uint64(bytes))
}
