package main

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cleave-cri/cleave/simulate"
)

// TestSimulateRecordExplainReplay goes the whole way: play, write down, explain,
// decide again.
func TestSimulateRecordExplainReplay(t *testing.T) {
	t.Parallel()
	const example = "../../docs/examples/inodes.yaml"
	records := filepath.Join(t.TempDir(), "records.jsonl")
	out, err := run(t, "simulate", example, "--profile", "kubelet", "--record", records)
	if err != nil || !strings.Contains(out, "evicts database because of nodefs.inodesFree") || !strings.Contains(out, "as expected (kubelet)") {
		t.Errorf("%v\n%s", err, out)
	}
	if out, err = run(t, "explain", records, "--pod", "cache"); err != nil || !strings.Contains(out, "RANK-16") {
		t.Errorf("%v\n%s", err, out)
	}
	if out, err = run(t, "replay", records); err != nil || !strings.Contains(out, " 0 otherwise") {
		t.Errorf("%v\n%s", err, out)
	}
	if _, err := run(t, "simulate", example, "--record", records); !errors.Is(err, fs.ErrExist) {
		t.Errorf("records are written over: %v", err)
	}
	if out, err = run(t, "simulate", example, "--json", "--compare"); err != nil {
		t.Error(err)
	}
	var outcomes []simulate.Outcome
	if err := json.Unmarshal([]byte(out), &outcomes); err != nil || len(outcomes) != 2 || len(outcomes[0].Result.Evicted) != 2 || len(outcomes[1].Result.Evicted) != 1 {
		t.Errorf("%v, %s", err, out)
	}
}

func TestSimulateFails(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "scenario.yaml")
	text := "version: 1\nlasts: 1m\nfilesystems: {disk: {size: 1Gi}}\nexpect: {cleave: {evictionsAtLeast: 1}}\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := run(t, "simulate", file)
	if !errors.Is(err, simulate.ErrUnexpected) || !strings.Contains(out, "NOT AS EXPECTED (cleave): 0 evictions, expected at least 1") {
		t.Errorf("%v\n%s", err, out)
	}
	if _, err := run(t, "simulate", file, "--profile", "other"); err == nil || !strings.Contains(err.Error(), "choose kubelet or cleave") {
		t.Error(err)
	}
	records := filepath.Join(t.TempDir(), "records.jsonl")
	if _, err := run(t, "simulate", filepath.Join(t.TempDir(), "missing.yaml"), "--record", records); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	if _, err := os.Stat(records); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a file without records is left: %v", err)
	}
	if _, err := run(t, "simulate"); err == nil {
		t.Error("no file is taken for one")
	}
}
