package peaks

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

const mib = 1 << 20

var start = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func number(n int64) *int64 { return &n }

func open(t *testing.T, dir string) *Store {
	t.Helper()
	s, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() }) //nolint:errcheck // a test may have closed it
	return s
}

// The most that any pod of a workload used is what counts, over restarts; the newest pod says what is requested.
func TestPeaksOutlastPodsAndRestarts(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := open(t, dir)
	web := "ReplicaSet shop/web"
	s.Add([]Use{
		{Workload: web, Bytes: 100 * mib, Containers: map[string]uint64{"main": 90 * mib, "log": 1 * mib}},
		{Workload: web, Bytes: 50 * mib, RequestBytes: number(10), Containers: map[string]uint64{"main": 20 * mib, "log": 2 * mib}},
	}, start)
	s.Add([]Use{{Workload: web, Bytes: 300 * mib, RequestBytes: number(20), LimitBytes: number(30), Containers: map[string]uint64{"main": 200 * mib}}}, start.Add(time.Hour))
	s.Add([]Use{{Workload: web, Bytes: 30 * mib, RequestBytes: number(20), LimitBytes: number(30)}, {Workload: "Pod shop/other"}}, start.Add(2*time.Hour))
	want := []Workload{
		{
			Name: web, RequestBytes: number(20), LimitBytes: number(30), PeakBytes: 300 * mib, PeakAt: start.Add(time.Hour), FirstSeen: start,
			LastSeen: start.Add(2 * time.Hour), Pods: 1, Containers: map[string]uint64{"main": 200 * mib, "log": 2 * mib},
		},
		{Name: "Pod shop/other", PeakAt: start.Add(2 * time.Hour), FirstSeen: start.Add(2 * time.Hour), LastSeen: start.Add(2 * time.Hour), Pods: 1, Containers: map[string]uint64{}},
	}
	if diff := cmp.Diff(want, s.List()); diff != "" {
		t.Error(diff)
	}
	if err := s.Save(); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	again := open(t, dir)
	want[0].Pods, want[1].Pods = 0, 0
	if diff := cmp.Diff(want, again.List()); diff != "" || again.Note() != "" {
		t.Error(again.Note(), diff)
	}
	again.Add(nil, start.Add(2*time.Hour+keepFor+1))
	if left := again.List(); len(left) != 0 {
		t.Errorf("long gone: %+v", left)
	}
}

// A workload that was seen by a clock that was far ahead is not remembered until that time comes, and does not take the others' place.
func TestAClockThatWasFarAhead(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := open(t, dir)
	s.Add([]Use{{Workload: "Pod shop/ahead", Bytes: mib}}, start.Add(1000*keepFor))
	if err := s.Save(); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	again := open(t, dir)
	again.Add([]Use{{Workload: "Pod shop/now"}}, start)
	for _, w := range again.List() {
		if w.FirstSeen.After(start) || w.LastSeen.After(start) || w.PeakAt.After(start) {
			t.Errorf("seen in the future: %+v", w)
		}
	}
	again.Add([]Use{{Workload: "Pod shop/now"}}, start.Add(keepFor+time.Second))
	if left := again.List(); len(left) != 1 || left[0].Name != "Pod shop/now" {
		t.Errorf("what is remembered: %+v", left)
	}
}

// However many workloads come, what is kept has a bound, in memory and in the file, and it is those of now that stay.
func TestTooManyWorkloads(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := open(t, dir)
	for i := range 3 * maxWorkloads {
		containers := map[string]uint64{}
		for c := range 2 * maxContainers {
			containers[strings.Repeat("c", 60)+fmt.Sprint(c)] = uint64(i)
		}
		s.Add([]Use{{Workload: fmt.Sprintf("Job %s/%04d", strings.Repeat("n", 250), i), Bytes: 1, Containers: containers}}, start.Add(time.Duration(i)*time.Second))
	}
	list := s.List()
	if len(list) != maxWorkloads || len(list[0].Containers) != maxContainers {
		t.Fatalf("%d workloads, %d containers", len(list), len(list[0].Containers))
	}
	if err := s.Save(); err != nil {
		t.Fatal(err)
	}
	again := open(t, dir)
	kept := again.List()
	if len(kept) == 0 || !strings.HasSuffix(kept[len(kept)-1].Name, fmt.Sprintf("/%04d", 3*maxWorkloads-1)) {
		t.Errorf("%d are left after a restart", len(kept))
	}
}

func TestAFileThatIsNone(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, FileName), []byte(strings.Repeat("x", 2*slotBytes)), 0o600); err != nil {
		t.Fatal(err)
	}
	s := open(t, dir)
	if len(s.List()) != 0 || !strings.Contains(s.Note(), "begin anew") {
		t.Errorf("%+v, %q", s.List(), s.Note())
	}
	s.Add([]Use{{Workload: "Pod a/b", Bytes: 5}}, start)
	if err := s.Save(); err != nil || open(t, dir).List()[0].PeakBytes != 5 {
		t.Errorf("after it was made anew: %v", err)
	}
}

func TestSuggestions(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		w    Workload
		want Suggestion
	}{
		{"uses nothing, requests nothing", Workload{}, Suggestion{Verdict: Set, RequestBytes: 16 * mib}},
		{"requests nothing", Workload{PeakBytes: 100 * mib}, Suggestion{Verdict: Set, RequestBytes: 128 * mib}},
		{"requests too little", Workload{PeakBytes: 100 * mib, RequestBytes: number(99 * mib)}, Suggestion{Verdict: Raise, RequestBytes: 128 * mib}},
		{"requests enough", Workload{PeakBytes: 100 * mib, RequestBytes: number(100 * mib)}, Suggestion{Verdict: Keep, RequestBytes: 100 * mib}},
		{"requests much", Workload{PeakBytes: 100 * mib, RequestBytes: number(257 * mib), LastSeen: start.Add(young), FirstSeen: start}, Suggestion{Verdict: Lower, RequestBytes: 128 * mib}},
		{"requests much, and was not seen for long", Workload{PeakBytes: 100 * mib, RequestBytes: number(257 * mib)}, Suggestion{Verdict: Keep, RequestBytes: 257 * mib}},
		{"comes near its limit", Workload{PeakBytes: 100 * mib, RequestBytes: number(100 * mib), LimitBytes: number(110 * mib)}, Suggestion{Verdict: RaiseLimit, RequestBytes: 100 * mib, LimitBytes: number(208 * mib)}},
		{"far from its limit", Workload{PeakBytes: 10 * mib, LimitBytes: number(110 * mib)}, Suggestion{Verdict: Set, RequestBytes: 16 * mib, LimitBytes: number(110 * mib)}},
		{"more than there is", Workload{PeakBytes: 1 << 63}, Suggestion{Verdict: Set, RequestBytes: above(1<<63, requestPercent)}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			got := tc.w.Suggest()
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Error(diff)
			}
			if got.RequestBytes <= 0 || got.LimitBytes != nil && *got.LimitBytes < got.RequestBytes {
				t.Errorf("no API server takes it: %+v", got)
			}
		})
	}
}
