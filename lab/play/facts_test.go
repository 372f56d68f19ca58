package play

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/record"
	"github.com/cleave-cri/cleave/engine/sim"
	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/scenario"
	"github.com/cleave-cri/cleave/lab/stage"
	"github.com/cleave-cri/cleave/simulate"
)

func ptr[T any](v T) *T { return &v }

// TestTell makes of records what the simulator would have said.
func TestTell(t *testing.T) {
	t.Parallel()
	began := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	short := engine.Threshold{Signal: engine.NodeFSAvailable}
	at := func(seconds int, d engine.Decision) record.Record {
		return record.Record{Input: engine.Input{Now: began.Add(time.Duration(seconds) * time.Second)}, Decision: d}
	}
	first := at(1, engine.Decision{Outcome: engine.Pressure, Threshold: short, Rule: "SYN-21"})
	first.Steps = []record.Step{
		{Kind: engine.DeadContainers, Items: []record.Item{{ID: "c1", ActualBytes: ptr(int64(5))}, {ID: "c2", Error: "it runs"}}},
		{Kind: engine.OldLogs, Items: []record.Item{{ID: "l", ActualBytes: ptr(int64(7))}}},
	}
	second := at(2, engine.Decision{Outcome: engine.Pressure, Threshold: short, Rule: "SYN-21"})
	second.Evicted = []record.Evicted{{UID: "u1"}}
	records := []record.Record{
		first, second, at(3, engine.Decision{Outcome: engine.Calm}),
		at(4, engine.Decision{Outcome: engine.Pressure, Threshold: short, NoVictim: "HoldFire"}),
		at(5, engine.Decision{Outcome: engine.Foreseen}),
		at(6, engine.Decision{Outcome: engine.Pressure, Threshold: short, NoVictim: "HoldFire"}),
		at(7, engine.Decision{Outcome: engine.Pressure, Threshold: short, Barred: []engine.Bar{{UID: "u2"}}}),
	}
	events, evicted, dead := tell(records, began, func(uid string) string { return "pod-" + uid })
	var got []string
	for _, e := range events {
		got = append(got, e.At.String()+" "+string(e.What)+" "+e.Subject+" "+e.Rule)
	}
	want := []string{
		"1s threshold due nodefs.available SYN-21", "1s dead container removed c1 ", "1s log removed l ", "2s evicted pod-u1 SYN-21",
		"4s threshold due nodefs.available ", "4s held back  HoldFire", "7s held back  BreakStorms",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{"pod-u1"}, evicted); diff != "" || dead != 1 {
		t.Errorf("%s, %d dead", diff, dead)
	}
}

// TestCheck finds each thing that is not as expected, and nothing else.
func TestCheck(t *testing.T) {
	t.Parallel()
	good := func() *facts {
		return &facts{
			result: &sim.Result{Profile: sim.CleaveProfile, Evicted: []string{"greedy"}, ImagesRemoved: []string{"old"}},
			layout: "split", deadRemoved: 2, unattributed: map[string]int64{"node": 50}, openDeleted: map[string]int64{"web": 60},
			logs: map[string]int64{"web": 70}, running: map[string]bool{"web": true}, said: map[string]bool{"Layout": true},
		}
	}
	s := &scenario.Scenario{
		Expect: map[string]scenario.Expect{"cleave": {Evicted: &[]string{"greedy"}, ImagesRemoved: &[]string{"old"}}},
		Lab: &scenario.LabExpect{
			Layout: "split", DeadRemovedAtLeast: ptr(2), UnattributedAtLeast: map[string]int64{"node": 50}, OpenDeletedAtLeast: map[string]int64{"web": 60},
			LogsAtMost: map[string]int64{"web": 70}, Running: []string{"web"}, Says: []string{"Layout"},
		},
	}
	if got := good().check(s, false); len(got) > 0 {
		t.Errorf("good: %q", got)
	}
	for _, tc := range []struct {
		name, want string
		change     func(*facts)
	}{
		{"another is evicted", "evicted are web, expected greedy", func(f *facts) { f.result.Evicted = []string{"web"} }},
		{"another image goes", "images removed are none, expected old", func(f *facts) { f.result.ImagesRemoved = nil }},
		{"another layout", `the layout is "single", expected split`, func(f *facts) { f.layout = "single" }},
		{"no dead removed", "0 dead containers are removed", func(f *facts) { f.deadRemoved = 0 }},
		{"all has owners", "49 bytes are nobody's, expected at least 50", func(f *facts) { f.unattributed["node"] = 49 }},
		{"deleted files unseen", "holds 0 bytes in deleted files", func(f *facts) { f.openDeleted = nil }},
		{"logs too large", "the logs of web take 71 bytes", func(f *facts) { f.logs["web"] = 71 }},
		{"a pod does not run", "web does not run at the end", func(f *facts) { f.running["web"] = false }},
		{"it said nothing", `never said "Layout"`, func(f *facts) { f.said = nil }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			f := good()
			tc.change(f)
			if got := f.check(s, false); len(got) != 1 || !strings.Contains(got[0], tc.want) {
				t.Errorf("got %q, want %q", got, tc.want)
			}
		})
	}
	observed := good()
	if got := observed.check(s, true); len(got) != 3 {
		t.Errorf("it deletes and evicts where it only observes: %q", got)
	}
	observed.result, observed.deadRemoved = &sim.Result{}, 0
	if got := observed.check(s, true); len(got) > 0 {
		t.Errorf("it only observes: %q", got)
	}
}

func TestAgainst(t *testing.T) {
	t.Parallel()
	lab := &sim.Result{Evicted: []string{"b", "a", "a"}, ImagesRemoved: []string{"i"}}
	if got := Against(lab, &sim.Result{Evicted: []string{"a", "b"}, ImagesRemoved: []string{"i"}}); len(got) > 0 {
		t.Errorf("the same: %q", got)
	}
	want := []string{"evicted: a, b on the real node, a in the simulator", "images removed: i on the real node, none in the simulator"}
	if diff := cmp.Diff(want, Against(lab, &sim.Result{Evicted: []string{"a"}})); diff != "" {
		t.Error(diff)
	}
}

// TestShippedScenarios: each can be played on a real node, says what it is about and
// what it expects, comes out as it expects in the simulator, and is in the
// documentation.
func TestShippedScenarios(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("../../docs/lab/*.yaml")
	if err != nil || len(files) < 15 {
		t.Fatalf("%d scenarios, %v", len(files), err)
	}
	page, err := os.ReadFile("../../docs/lab.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			t.Parallel()
			s, err := scenario.Load(file)
			if err != nil {
				t.Fatal(err)
			}
			if err := stage.Playable(s, disk.Ext4); err != nil {
				t.Error(err)
			}
			if s.Lab == nil && len(s.Expect["cleave"].HeldBackBy) == 0 || s.Expect["cleave"].Evicted == nil {
				t.Error("it does not say who is evicted, and what only a real node shows")
			}
			text, err := os.ReadFile(file)
			if err != nil || !strings.HasPrefix(string(text), "# ") {
				t.Errorf("it does not begin with what it is about: %v", err)
			}
			outcome, err := simulate.Play(s, sim.CleaveProfile)
			if err != nil || len(outcome.Unexpected) > 0 {
				t.Errorf("in the simulator: %q, %v", outcome.Unexpected, err)
			}
			if !strings.Contains(string(page), "`"+filepath.Base(file)+"`") {
				t.Errorf("docs/lab.md does not name %s", filepath.Base(file))
			}
		})
	}
}
