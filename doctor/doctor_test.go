package doctor

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
)

func TestWorst(t *testing.T) {
	t.Parallel()
	cases := []struct {
		name   string
		levels []Level
		want   Level
	}{
		{"none", nil, Pass},
		{"all good", []Level{Pass, Pass}, Pass},
		{"a warning", []Level{Pass, Warn, Pass}, Warn},
		{"a failure before a warning", []Level{Fail, Warn}, Fail},
		{"a failure after a warning", []Level{Warn, Pass, Fail}, Fail},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			results := make([]Result, 0, len(tc.levels))
			for _, l := range tc.levels {
				results = append(results, Result{Level: l})
			}
			if got := Worst(results); got != tc.want {
				t.Errorf("got %s, want %s", got, tc.want)
			}
		})
	}
}

// TestRunGoesOnAfterABadCheck: one that breaks and one that hangs are told, and
// the others run all the same, in their order.
func TestRunGoesOnAfterABadCheck(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		hang := make(chan struct{})
		results := Run(t.Context(), []Check{
			{"good", func(context.Context) Result { return Passed("%d of %d", 2, 2) }},
			{"breaks", func(context.Context) Result { panic("oops") }},
			{"hangs", func(context.Context) Result { <-hang; return Passed("late") }},
			{"warns", func(context.Context) Result { return Warned("hm", "look") }},
		})
		close(hang)
		want := []Result{
			{"good", Pass, "2 of 2", ""},
			{"breaks", Fail, "the check itself broke: oops", "report this as a bug of cleave"},
			{"hangs", Fail, "no result within 10s", "look for a file system or a runtime that hangs"},
			{"warns", Warn, "hm", "look"},
		}
		if diff := cmp.Diff(want, results); diff != "" {
			t.Errorf("results (-want +got):\n%s", diff)
		}
	})
}

func TestWrite(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	if err := Write(&out, []Result{{"root", Pass, "running as root", ""}, {"layout", Fail, "not known", "correct it"}}); err != nil {
		t.Fatal(err)
	}
	want := "pass  root                   running as root\n" +
		"fail  layout                 not known\n" +
		"                             -> correct it\n"
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("text (-want +got):\n%s", diff)
	}
}
