package snapshotter

import (
	"strings"
	"testing"
	"time"

	"github.com/cleave-cri/cleave/snapshot/split"
	"github.com/cleave-cri/cleave/snapshot/split/fence"
)

// TestProblemsSayWhatIsWrongAndWhatToDo: each state that keeps the snapshotter
// from its work is told, and a healthy one has nothing to tell.
func TestProblemsSayWhatIsWrongAndWhatToDo(t *testing.T) {
	t.Parallel()
	poked := time.Unix(1, 0)
	cases := []struct {
		name   string
		change func(*Status)
		want   string
	}{
		{"healthy", func(*Status) {}, ""},
		{"fence", func(s *Status) {
			s.Store.Fence.Reasons = []fence.Reason{{Root: "image", What: "it is not mounted", Remedy: "mount it"}}
		}, "mount it"},
		{"not compared because of the fence", func(s *Status) {
			s.Store.Fence = split.FenceStatus{Closed: true, Reasons: []fence.Reason{{Root: "image", What: "it is not mounted", Remedy: "mount it"}}}
			s.Containerd.PokedAt, s.Containerd.PokeProblem = nil, "the snapshotter refuses"
		}, "mount it"},
		{"containerd unknown", func(s *Status) { s.Containerd.PID = 0; s.Containerd.Reason = "it is another one" }, "it is another one"},
		{"containerd silent", func(s *Status) { s.Containerd.PID = 0 }, "not answered yet"},
		{"not compared", func(s *Status) { s.Containerd.PokedAt, s.Containerd.PokeProblem = nil, "no lease" }, "no lease"},
		{"alarm", func(s *Status) { s.Store.Alarm = &split.Alarm{Reason: "many"} }, "cleave snapshotter confirm"},
		{"trash", func(s *Status) { s.Store.Image.Trash.LastError = "a mount inside" }, "a mount inside"},
		{"a root can't be looked at", func(s *Status) { s.Store.Container.Errors = []string{"input/output error"} }, "input/output error"},
		{"a layer can't be measured", func(s *Status) {
			s.Store.Measuring = split.MeasuringStatus{Failing: 2, Failures: 5, Reason: "input/output error"}
		}, "usage of 2 layers"},
		{"the last clean-up failed", func(s *Status) { s.Store.LastSweep = &split.Sweep{Error: "no such folder"} }, "no such folder"},
		{"the clean-up waits for a confirmation", func(s *Status) {
			s.Store.Alarm, s.Store.LastSweep = &split.Alarm{Reason: "many"}, &split.Sweep{Error: "many"}
		}, "cleave snapshotter confirm"},
		{"no figures", func(s *Status) { s.Problem = "database" }, "database"},
		{"own fault", func(s *Status) { s.Calls.Panics = 2 }, "2 calls broke"},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			s := Status{Containerd: ContainerdStatus{PID: 7, PokedAt: &poked}}
			tc.change(&s)
			got := s.Problems()
			if tc.want == "" && len(got) > 0 || tc.want != "" && (len(got) != 1 || !strings.Contains(got[0], tc.want)) {
				t.Errorf("problems %q, want one with %q", got, tc.want)
			}
		})
	}
}

// TestTextOfARootThatIsAway: what is not known is not shown as zero.
func TestTextOfARootThatIsAway(t *testing.T) {
	t.Parallel()
	free := int64(1 << 30)
	s := Status{Store: split.Status{
		Fence: split.FenceStatus{Closed: true, Reasons: []fence.Reason{{Root: "/i", What: "it is not mounted", Remedy: "mount it"}}},
		Image: split.RootStatus{Path: "/i"}, Container: split.RootStatus{Path: "/c", Open: true, FreeBytes: &free},
	}}
	var text strings.Builder
	if err := s.WriteText(&text, time.Now()); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"image root /i, free space unknown", "container root /c, 1.0Gi free"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("%q is not in\n%s", want, text.String())
		}
	}
	if n := strings.Count(text.String(), "not mounted"); n != 1 {
		t.Errorf("the reason is told %d times:\n%s", n, text.String())
	}
}
