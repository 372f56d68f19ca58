package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cleave-cri/cleave/integration/matrix/cell"
)

// Two runs of a cell each fill the record and the page together; the second run of one replaces the first.
func TestRunsAddUp(t *testing.T) {
	t.Parallel()
	checkout := t.TempDir()
	for _, file := range []string{recordFile, pageFile} {
		if err := os.MkdirAll(filepath.Join(checkout, filepath.Dir(file)), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	cells, err := cell.All()
	if err != nil {
		t.Fatal(err)
	}
	ran := func(outcomes ...cell.Outcome) string {
		path := filepath.Join(t.TempDir(), "new.jsonl")
		for _, o := range outcomes {
			if err := cell.Append(path, o); err != nil {
				t.Fatal(err)
			}
		}
		var out bytes.Buffer
		if err := run([]string{path}, checkout, &out); err != nil {
			t.Fatal(err)
		}
		return out.String()
	}
	if got := ran(cell.Outcome{Key: cells[0], Reason: "no node"}); !strings.Contains(got, "1 run, 0 passed") {
		t.Errorf("it says %q", got)
	}
	ran(cell.Outcome{Key: cells[1], Passed: true})
	if got := ran(cell.Outcome{Key: cells[0], Passed: true}); !strings.Contains(got, "2 run, 2 passed") {
		t.Errorf("it says %q", got)
	}
	page, err := os.ReadFile(filepath.Join(checkout, pageFile))
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(page), "**failed**") || strings.Count(string(page), "passed |") != 2 {
		t.Errorf("the page is\n%s", page)
	}
}

func TestNothingRan(t *testing.T) {
	t.Parallel()
	checkout := t.TempDir()
	for _, args := range [][]string{nil, {filepath.Join(checkout, "absent.jsonl")}} {
		if err := run(args, checkout, &bytes.Buffer{}); err == nil {
			t.Errorf("%v is taken for a run", args)
		}
	}
	if files, err := os.ReadDir(checkout); err != nil || len(files) > 0 {
		t.Errorf("it wrote %v, %v", files, err)
	}
}
