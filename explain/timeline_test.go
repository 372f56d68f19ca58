package explain

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/record"
)

// day is a day's records: a collection, and a pass in which too little could be deleted and a pod went.
func day(t *testing.T) (file string, noon time.Time) {
	t.Helper()
	noon = time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	bytes := func(n int64) *int64 { return &n }
	records := []record.Record{
		{
			Format: record.Format, Engine: engine.Version, Decider: "cleave", Input: engine.Input{Now: noon.Add(-time.Hour)}, Collection: &record.Collection{Name: "unused images", Asked: true},
			Steps: []record.Step{{Kind: engine.UnusedImages, Items: []record.Item{{ID: "a", Rule: "GAP-25", ExpectedBytes: bytes(2 << 20), ActualBytes: bytes(1 << 20)}, {ID: "b", Rule: "GAP-25", Error: "it is in use"}}}},
		},
		{
			Format: record.Format, Engine: engine.Version, Decider: "cleave",
			Input:    engine.Input{Now: noon, Pods: []engine.Pod{{UID: "u1", Namespace: "shop", Name: "web"}}},
			Decision: engine.Decision{Outcome: engine.Pressure, Threshold: engine.Threshold{Signal: engine.NodeFSAvailable}, Victim: &engine.Eviction{UID: "u1", Namespace: "shop", Name: "web", Cause: "nodefs.available"}},
			Steps:    []record.Step{{Kind: engine.DeadContainers}},
			Evicted:  []record.Evicted{{UID: "u1", At: noon.Add(time.Second), ExpectedBytes: bytes(3 << 30)}, {UID: "u9", At: noon.Add(2 * time.Second)}},
		},
	}
	var text []byte
	for _, r := range records {
		var err error
		if text, err = record.Append(text, r); err != nil {
			t.Fatal(err)
		}
	}
	file = filepath.Join(t.TempDir(), "records")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return file, noon
}

func TestTimeline(t *testing.T) {
	t.Parallel()
	file, noon := day(t)
	all, err := ReadTimeline(file, time.Time{}, "")
	if err != nil {
		t.Fatal(err)
	}
	var got strings.Builder
	if err := all.WriteText(&got, noon); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"2026-05-01T11:00:00Z  collected  unused images, because somebody asked\n",
		"                      reclaimed  " + string(engine.UnusedImages) + ": 1 of 2 gone, 1.0Mi freed, 2.0Mi expected, 1 could not go\n",
		"2026-05-01T12:00:00Z  pressure   nodefs.available",
		"                      reclaimed  " + string(engine.DeadContainers) + ": nothing could go\n",
		"2026-05-01T12:00:01Z  evicted    shop/web by nodefs.available, had 3.0Gi there\n",
		"2026-05-01T12:00:02Z  evicted    u9 by nodefs.available\n",
	} {
		if !strings.Contains(got.String(), want) {
			t.Errorf("%q is missing:\n%s", want, got.String())
		}
	}
	for _, tc := range []struct {
		name  string
		since time.Time
		pod   string
		want  []string
	}{
		{"since", noon, "", []string{"pressure", "reclaimed", "evicted", "evicted"}},
		{"pod", time.Time{}, "web", []string{"evicted"}}, {"pod in a namespace", time.Time{}, "shop/web", []string{"evicted"}}, {"UID", time.Time{}, "u9", []string{"evicted"}},
		{"part of a name", time.Time{}, "eb", nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			part, err := ReadTimeline(file, tc.since, tc.pod)
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, e := range part.Events {
				got = append(got, e.What)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// A file that ends within a record tells so; one that is not there says what to do.
func TestTimelineOfOddFiles(t *testing.T) {
	t.Parallel()
	file, _ := day(t)
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, text[:len(text)-20], 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := ReadTimeline(file, time.Time{}, ""); err != nil || !strings.Contains(got.Note, "not whole") || len(got.Events) != 2 {
		t.Errorf("%+v, %v", got, err)
	}
	if _, err := ReadTimeline(filepath.Join(t.TempDir(), "none"), time.Time{}, ""); err == nil || !strings.Contains(err.Error(), "reclaim.enabled") {
		t.Errorf("got %v", err)
	}
}

// TestDepartures: how an eviction ended is said in the timeline and by explain, for the pod that it is about.
func TestDepartures(t *testing.T) {
	t.Parallel()
	told := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	bytes := func(n int64) *int64 { return &n }
	gone := record.Departure{UID: "u1", Namespace: "shop", Name: "web", Cause: "nodefs.available", Told: told}
	for _, tc := range []struct {
		name             string
		expected, actual *int64
		failure          string
		what, text       string
		sentence         string
	}{
		{"gone", bytes(3 << 30), bytes(1 << 30), "", "gone", "1.5s after it was told; 1.0Gi more available, had 3.0Gi there", "shop/web, evicted by nodefs.available, is gone, 1.5s after"},
		{"others wrote more", bytes(3 << 30), bytes(-5), "", "gone", "1.5s after it was told; 0 more available, had 3.0Gi there", "is gone"},
		{"not measured", nil, nil, "", "gone", "1.5s after it was told", "is gone"},
		{"stays", bytes(3 << 30), nil, "the API server is away", "stays", "1.5s after it was told: the API server is away", "shop/web, evicted by nodefs.available, stays, 1.5s after"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			d := gone
			d.ExpectedBytes, d.ActualBytes, d.Error = tc.expected, tc.actual, tc.failure
			r := record.Record{Format: record.Format, Engine: engine.Version, Decider: "cleave", Input: engine.Input{Now: told.Add(1500 * time.Millisecond)}, Departure: &d}
			want := []Event{{At: r.Input.Now, What: tc.what, Pod: "shop/web", UID: "u1", Text: tc.text}}
			if got := Events(r); !slices.Equal(got, want) {
				t.Errorf("events %+v, want %+v", got, want)
			}
			for _, pod := range []string{"", "web", "shop/web", "u1"} {
				if got := Sentences(r, pod); len(got) != 1 || !strings.Contains(got[0], tc.sentence) || !strings.Contains(got[0], tc.text) {
					t.Errorf("of %q it says %q", pod, got)
				}
			}
			d.Told = r.Input.Now.Add(time.Hour) // the clock was set back
			if _, got := departureText(r); !strings.HasPrefix(got, "told at 2026-05-01T13:00:01Z") {
				t.Errorf("it says %q", got)
			}
			if got := Sentences(r, "other"); len(got) != 0 {
				t.Errorf("of another pod it says %q", got)
			}
			if differences, err := record.Replay(r); err != nil || len(differences) > 0 {
				t.Errorf("made again: %v, %v", differences, err)
			}
		})
	}
}

// TestTimelineOfForeignText: what an API server or a runtime said is shown as one line, and changes no terminal; programs get it as it is.
func TestTimelineOfForeignText(t *testing.T) {
	t.Parallel()
	const said = "admission webhook \x1b[2J\nsays no\u202e"
	r := record.Record{
		Input:      engine.Input{Pods: []engine.Pod{{UID: "u1", Namespace: "shop", Name: "web\x1b"}}},
		Collection: &record.Collection{Name: "unused images"},
		Evicted:    []record.Evicted{{UID: "u1", Error: said}, {UID: "u2\r"}},
	}
	events := Events(r)
	if got := events[1].Text; !strings.HasSuffix(got, said) {
		t.Errorf("got %q", got)
	}
	var text strings.Builder
	if err := (Timeline{Events: events, Note: "a\tb"}).WriteText(&text, time.Time{}); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(text.String(), "\n"); n != len(events)+1 || strings.ContainsAny(text.String(), "\x1b\r\t\u202e") {
		t.Errorf("%d lines: %q", n, text.String())
	}
	if want := `shop/web\x1b`; !strings.Contains(text.String(), want) {
		t.Errorf("%s is missing in %s", want, text.String())
	}
}

// TestExplainForeignText: the same of cleave explain, for a file that somebody sends.
func TestExplainForeignText(t *testing.T) {
	t.Parallel()
	text, err := record.Append(nil, record.Record{Format: record.Format, Engine: engine.Version, Decider: "cleave\x1b[2J", Decision: engine.Decision{Rule: "a\nb"}})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "records")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	var got strings.Builder
	if err := Explain(&got, file, ""); err != nil || strings.Count(got.String(), "\n") != 1 || strings.Contains(got.String(), "\x1b") {
		t.Errorf("%q, %v", got.String(), err)
	}
}
