package crio

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// KSS-18: what the kubelet makes of the answer is looked at after each of its starts.
func TestKSS18_TheSummaryIsLookedAt(t *testing.T) {
	t.Parallel()
	capacities := map[string]uint64{diskA.Device: 100 << 30, diskB.Device: 50 << 30, diskC.Device: 100 << 30}
	alike := Disks{Known: true, Images: diskA, Containers: diskC, NodeDevice: diskC.Device}
	right := Figures{ImagesBytes: 100 << 30, ContainersBytes: 50 << 30}
	refused := proved
	refused.Refused = "it is too old"
	for _, tc := range []struct {
		name    string
		kubelet Kubelet
		disks   Disks
		figures Figures
		err     error
		problem string
		unknown string
	}{
		{name: "right", kubelet: proved, disks: split, figures: right},
		{name: "a disk that has grown a little", kubelet: proved, disks: split, figures: Figures{ImagesBytes: 101<<30 - 1<<29, ContainersBytes: 50 << 30}},
		{name: "one disk", kubelet: proved, disks: one, figures: Figures{ImagesBytes: 50 << 30, ContainersBytes: 50 << 30}},
		{name: "unsplit figures", kubelet: proved, disks: split, figures: Figures{ImagesBytes: 100 << 30, ContainersBytes: 100 << 30},
			problem: "it gives containerFs 107374182400 bytes, and /var/lib/containers has 53687091200"},
		{name: "two disks of one size", kubelet: proved, disks: alike, figures: Figures{ImagesBytes: 100 << 30, ContainersBytes: 100 << 30}},
		{name: "unsplit figures of two disks of one size", kubelet: proved, disks: alike, figures: Figures{ImagesBytes: 100 << 30, ContainersBytes: 100 << 30, Alike: true},
			problem: "it gives imageFs and containerFs the same figures"},
		{name: "one disk, twice", kubelet: proved, disks: one, figures: Figures{ImagesBytes: 50 << 30, ContainersBytes: 50 << 30, Alike: true}},
		{name: "no containerFs", kubelet: proved, disks: split, figures: Figures{ImagesBytes: 100 << 30}, problem: "it has no containerFs, which is /var/lib/containers"},
		{name: "nothing at all", kubelet: proved, disks: split, problem: "it has no imageFs"},
		{name: "KSS-19: it fails", kubelet: proved, disks: split, err: errors.New("it answers 500"), problem: "it answers 500"},
		{name: "not shown", kubelet: proved, disks: split, err: ErrNotAllowed, unknown: "does not show"},
		{name: "a kubelet that is told of one disk", kubelet: refused, disks: split, figures: Figures{ImagesBytes: 100 << 30, ContainersBytes: 100 << 30}, problem: "too old"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			now, mounted, running := tc.disks, all, []Kubelet{tc.kubelet}
			k := keeperOf(t, filepath.Join(t.TempDir(), "told.json"), &now, &mounted, &running)
			k.sources.Summary = func(_ context.Context, pid int32) (Figures, error) {
				if pid != tc.kubelet.PID {
					t.Errorf("asked process %d", pid)
				}
				return tc.figures, tc.err
			}
			k.sources.Capacity = func(device string) (uint64, bool) { c, ok := capacities[device]; return c, ok }
			if _, err := k.Info(t.Context(), tc.kubelet.PID); err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			k.look(t.Context(), began)
			if p := k.Status().Problems; len(p) > 0 && tc.kubelet.Refused == "" {
				t.Errorf("right after its start: %q", p)
			}
			k.look(t.Context(), began.Add(summaryGrace))
			s := k.Status()
			if got := strings.Join(s.Problems, "; "); !strings.Contains(got, tc.problem) || (tc.problem == "") != (got == "") {
				t.Errorf("problem %q, want %q", got, tc.problem)
			}
			if s.Summary == nil || (s.Summary.Unknown == "") != (tc.unknown == "") || !strings.Contains(s.Summary.Unknown, tc.unknown) {
				t.Errorf("summary %+v, want unknown %q", s.Summary, tc.unknown)
			}
		})
	}
}

// A kubelet whose server is not there yet is asked again soon, and one that never shows its summary is left in peace.
func TestSummaryThatIsNotShownYet(t *testing.T) {
	t.Parallel()
	now, mounted, running := split, all, []Kubelet{proved}
	k := keeperOf(t, filepath.Join(t.TempDir(), "told.json"), &now, &mounted, &running)
	asked := 0
	k.sources.Summary = func(context.Context, int32) (Figures, error) { asked++; return Figures{}, ErrNotAllowed }
	if _, err := k.Info(t.Context(), proved.PID); err != nil {
		t.Fatal(err)
	}
	at := time.Now()
	for range 2 {
		at = at.Add(WatchPeriod)
		k.look(t.Context(), at)
	}
	if asked != 2 {
		t.Errorf("asked %d times while it starts, want 2", asked)
	}
	for range 3 {
		at = at.Add(summaryGrace)
		k.look(t.Context(), at)
	}
	if asked != 2 {
		t.Errorf("asked %d times, want no more than while it starts", asked)
	}
	if s := k.Status(); len(s.Problems) != 0 || s.Summary.Unknown == "" {
		t.Errorf("got %+v", s)
	}
}

// A summary that was right is asked for rarely, one that is not soon again, and another kubelet's anew.
func TestSummaryIsAskedForWhenItMatters(t *testing.T) {
	t.Parallel()
	now, mounted, running := split, all, []Kubelet{proved}
	k := keeperOf(t, filepath.Join(t.TempDir(), "told.json"), &now, &mounted, &running)
	asked, figures := 0, Figures{}
	k.sources.Summary = func(context.Context, int32) (Figures, error) { asked++; return figures, nil }
	k.sources.Capacity = func(string) (uint64, bool) { return 10, true }
	at := time.Now()
	look := func(after time.Duration, want int) {
		t.Helper()
		at = at.Add(after)
		k.look(t.Context(), at)
		if asked != want {
			t.Errorf("asked %d times, want %d", asked, want)
		}
	}
	look(0, 0) // nobody was told anything
	if _, err := k.Info(t.Context(), proved.PID); err != nil {
		t.Fatal(err)
	}
	look(time.Second, 1)
	look(WatchPeriod, 2)
	figures = Figures{ImagesBytes: 10, ContainersBytes: 10}
	look(WatchPeriod, 3)
	look(WatchPeriod, 3)
	look(summaryPeriod, 4)
	figures = Figures{}
	look(summaryPeriod, 5)
	if p := k.Status().Problems; len(p) != 0 {
		t.Errorf("after it was wrong once: %q", p)
	}
	look(summaryGrace, 6)
	if p := k.Status().Problems; len(p) != 1 {
		t.Errorf("after it was wrong for %s: %q", summaryGrace, p)
	}
	figures = Figures{ImagesBytes: 10, ContainersBytes: 10}
	look(WatchPeriod, 7)
	if p := k.Status().Problems; len(p) != 0 {
		t.Errorf("once it is right again: %q", p)
	}
	// A kubelet that was started anew is told and looked at anew.
	running[0].PID++
	if _, err := k.Info(t.Context(), running[0].PID); err != nil {
		t.Fatal(err)
	}
	look(WatchPeriod, 8)
	if s := k.Status().Summary; s == nil || s.RightAt == nil || !s.RightAt.Equal(at) {
		t.Errorf("got %+v", s)
	}
	// One that has ended is not asked.
	running = nil
	look(summaryPeriod, 8)
	if s := k.Status().Summary; s != nil {
		t.Errorf("of one that has ended it is still said: %+v", s)
	}
}
