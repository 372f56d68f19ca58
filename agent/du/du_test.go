package du

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

func settled(t *testing.T, r Request) Request {
	t.Helper()
	r, err := r.Settled()
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func write(t *testing.T, path string, size int) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, bytes.Repeat([]byte{'x'}, size), 0o600)); err != nil {
		t.Fatal(err)
	}
}

func TestSettled(t *testing.T) {
	t.Parallel()
	got := settled(t, Request{Pod: "web"})
	if want := (Request{Pod: "web", Most: 10, EntriesPerSecond: 50_000, Limit: 30 * time.Second}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	for _, tc := range []struct {
		name string
		r    Request
		want []string
	}{
		{"no pod", Request{}, []string{"name a pod"}},
		{"all", Request{Pod: "web", Most: -1, EntriesPerSecond: 2_000_000, Limit: time.Hour}, []string{"to list: -1", "in a second: 2000000", "time: 1h0m0s"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			_, err := tc.r.Settled()
			for _, want := range tc.want {
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("got %v, want %q in it", err, want)
				}
			}
		})
	}
}

// A pod's places are told with what is largest in each, names that are no text too.
func TestSearch(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, filepath.Join(dir, "layer", "cache", "big"), 3<<20)
	write(t, filepath.Join(dir, "layer", "cache", "small"), 5)
	write(t, filepath.Join(dir, "volume", "a\xff\x1b[2J"), 1<<20)
	write(t, filepath.Join(dir, "volume", "inner", "counted elsewhere"), 9<<20)
	var s Searcher
	report, err := s.Search(t.Context(), settled(t, Request{Pod: "web"}), Report{Namespace: "default", Pod: "web", UID: "u"}, []Place{
		{What: "writable layer", Container: "c", Path: filepath.Join(dir, "layer")},
		{What: "volume cache", Path: filepath.Join(dir, "volume"), Without: []string{filepath.Join(dir, "volume", "inner")}},
		{What: "logs", Container: "c\x1b[2J\xff", Path: filepath.Join(dir, "none")},
	}, func(context.Context) ([]OpenFile, error) {
		return []OpenFile{{Container: "c", Name: "/tmp/x\ny", PID: 7, Bytes: 1 << 30, Device: "8:1"}}, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if report.Partial || len(report.Problems) > 0 || len(report.Places) != 3 {
		t.Fatalf("%+v", report)
	}
	if f := report.Places[0].Files; len(f) != 2 || f[0].Path != "/cache/big" || f[0].Bytes < 3<<20 {
		t.Errorf("layer: %+v", report.Places[0])
	}
	if f := report.Places[1].Files; len(f) != 1 || f[0].Path != `/a\xff\x1b[2J` {
		t.Errorf("volume: %+v", report.Places[1])
	}
	if !report.Places[2].Gone || report.Places[2].Container != `c\x1b[2J\xff` {
		t.Errorf("logs that are gone: %+v", report.Places[2])
	}
	var text strings.Builder
	if err := report.WriteText(&text, time.Now()); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"Pod default/web (u)", "writable layer of c", "/layer/cache/big", `/volume/a\xff\x1b[2J`, `/tmp/x\ny`, "1.0Gi", "is gone"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("%q is missing:\n%s", want, text.String())
		}
	}
	if strings.Contains(text.String(), "\x1b") || strings.Contains(text.String(), "counted elsewhere") {
		t.Errorf("what must not be there is:\n%q", text.String())
	}
	// It goes over the control socket as it is.
	encoded, err := json.Marshal(report)
	if err != nil {
		t.Fatal(err)
	}
	var back Report
	if err := json.Unmarshal(encoded, &back); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(report.Places, back.Places); diff != "" {
		t.Error(diff)
	}
}

// When the time is over, what was found is told and that it is not all.
func TestSearchWithoutTime(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for i := range 600 {
		write(t, filepath.Join(dir, "layer", fmt.Sprint(i)), 10)
	}
	synctest.Test(t, func(t *testing.T) {
		var s Searcher
		// 100 entries a second, of which 6 s are needed.
		report, err := s.Search(t.Context(), settled(t, Request{Pod: "web", EntriesPerSecond: 100, Limit: time.Second}), Report{UID: "u"}, []Place{
			{What: "writable layer", Path: filepath.Join(dir, "layer")}, {What: "logs", Path: filepath.Join(dir, "logs")},
		}, func(context.Context) ([]OpenFile, error) {
			t.Error("deleted files are looked for without time")
			return nil, nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if !report.Partial || len(report.Places) != 1 || !report.Places[0].Partial || report.Places[0].Inodes < 50 || report.Places[0].Inodes > 300 {
			t.Errorf("%+v", report)
		}
		said := strings.Join(report.Problems, "\n")
		for _, want := range []string{"--limit", "1 places of 2", "deleted files"} {
			if !strings.Contains(said, want) {
				t.Errorf("%q is not said:\n%s", want, said)
			}
		}
		if took := report.Finished.Sub(report.Started); took > 3*time.Second {
			t.Errorf("it took %s", took)
		}
		var text strings.Builder
		if err := report.WriteText(&text, time.Now()); err != nil || !strings.Contains(text.String(), "! Not all of it was looked at") || !strings.Contains(text.String(), "≥") {
			t.Errorf("%v:\n%s", err, text.String())
		}
	})
}

// What hangs holds nobody up; only one such search can be.
func TestSearchThatHangs(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, filepath.Join(dir, "file"), 1<<20)
	synctest.Test(t, func(t *testing.T) {
		var s Searcher
		release := make(chan struct{})
		hangs := func(context.Context) ([]OpenFile, error) { <-release; return nil, nil }
		ask := func(open OpenFunc) (Report, error) {
			return s.Search(t.Context(), settled(t, Request{Pod: "web", Limit: time.Second}), Report{UID: "u"}, []Place{{What: "volume", Path: dir}}, open)
		}
		report, err := ask(hangs)
		if err != nil || !report.Partial || len(report.Places) != 1 || !strings.Contains(strings.Join(report.Problems, ""), "open files of its processes does not answer") {
			t.Errorf("%+v, %v", report, err)
		}
		if took := report.Finished.Sub(report.Started); took != 2*time.Second {
			t.Errorf("it took %s, want the limit and the grace", took)
		}
		if _, err := ask(nil); !errors.Is(err, ErrBusy) || !strings.Contains(err.Error(), "open files") {
			t.Errorf("a second one: %v", err)
		}
		close(release)
		synctest.Wait()
		if report, err := ask(nil); err != nil || report.Partial {
			t.Errorf("after it: %+v, %v", report, err)
		}
	})
}
