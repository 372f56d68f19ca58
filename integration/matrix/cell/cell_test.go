package cell

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/config/kubelet"
)

var (
	oldCRI   = Key{"v1.36.3", "v2.4.2", config.ModeCRI}
	oldCRIO  = Key{"v1.36.3", "v2.4.2", config.ModeCRIO}
	newCRI   = Key{"v1.37.2", "v2.4.2", config.ModeCRI}
	newCRIO  = Key{"v1.37.2", "v2.4.2", config.ModeCRIO}
	fourKeys = []Key{oldCRI, oldCRIO, newCRI, newCRIO}
)

func passed(k Key) Outcome {
	return Outcome{Key: k, Passed: true, APIServer: "v1.37.2", Machine: "Linux 6.1, cgroups v2, runc 1.3.0"}
}

func failed(k Key, reason string) Outcome {
	o := passed(k)
	o.Passed, o.Reason = false, reason
	return o
}

func TestOutcomesAreReadAsWritten(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "cells.jsonl")
	if none, err := Read(path); err != nil || len(none) != 0 {
		t.Fatalf("a missing file has %v, %v", none, err)
	}
	want := []Outcome{passed(newCRI), failed(newCRIO, `imageFs: capacity is 1, the disk "has" <2>`)}
	for _, o := range want {
		if err := Append(path, o); err != nil {
			t.Fatal(err)
		}
	}
	got, err := Read(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("read otherwise than written (-want +got):\n%s", diff)
	}
	text, err := Encode(want)
	if err != nil {
		t.Fatal(err)
	}
	again := filepath.Join(t.TempDir(), "again.jsonl")
	if err := os.WriteFile(again, text, 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := Read(again); err != nil || !cmp.Equal(want, got) {
		t.Errorf("encoded and read: %v, %v", got, err)
	}
}

func TestBadOutcomes(t *testing.T) {
	t.Parallel()
	for name, text := range map[string]string{
		"no JSON":               "passed\n",
		"half a line":           `{"kubelet":"v1.37.2",`,
		"unknown field":         `{"kubelet":"v1.37.2","verdict":"fine","passed":true}`,
		"passed with a reason":  `{"kubelet":"v1.37.2","passed":true,"reason":"it did not"}`,
		"failed without reason": `{"kubelet":"v1.37.2","passed":false}`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), "cells.jsonl")
			if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			if got, err := Read(path); err == nil || !strings.Contains(err.Error(), "outcome 1") {
				t.Errorf("read %v, %v", got, err)
			}
		})
	}
}

// A cell that is run anew replaces what it was; a version that is pinned no longer goes.
func TestMerge(t *testing.T) {
	t.Parallel()
	gone := Key{"v1.36.1", "v2.4.2", config.ModeCRI}
	got := Merge(fourKeys, []Outcome{failed(newCRIO, "it broke"), passed(oldCRI), passed(gone)}, []Outcome{passed(newCRIO), passed(newCRI)})
	if diff := cmp.Diff([]Outcome{passed(oldCRI), passed(newCRI), passed(newCRIO)}, got); diff != "" {
		t.Errorf("merged otherwise (-want +got):\n%s", diff)
	}
}

func TestProved(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		all  []Outcome
		want []string
	}{
		{"all passed", []Outcome{passed(oldCRI), passed(oldCRIO), passed(newCRI), passed(newCRIO)}, []string{"v1.36", "v1.37"}},
		{"mode cri alone proves nothing", []Outcome{passed(oldCRI), passed(newCRIO)}, []string{"v1.37"}},
		{"one failed", []Outcome{failed(oldCRIO, "no split"), passed(newCRIO)}, []string{"v1.37"}},
		{"a failure of mode cri is none of crio", []Outcome{passed(oldCRIO), failed(newCRI, "no pod"), passed(newCRIO)}, []string{"v1.36", "v1.37"}},
		{"nothing ran", nil, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			if diff := cmp.Diff(strings.Join(tc.want, " "), strings.Join(Proved(fourKeys, tc.all), " ")); diff != "" {
				t.Errorf("proved (-want +got):\n%s", diff)
			}
		})
	}
	t.Run("another containerd", func(t *testing.T) {
		t.Parallel()
		other := Key{"v1.37.2", "v2.1.9", config.ModeCRIO}
		if got := Proved(append([]Key{other}, fourKeys...), []Outcome{passed(newCRIO)}); len(got) != 1 {
			t.Errorf("proved are %v, though nothing failed", got)
		}
		if got := Proved(append([]Key{other}, fourKeys...), []Outcome{passed(newCRIO), failed(other, "no NRI")}); len(got) != 0 {
			t.Errorf("proved are %v", got)
		}
	})
}

func TestPage(t *testing.T) {
	t.Parallel()
	page := Page(fourKeys, []Outcome{passed(oldCRI), failed(oldCRIO, "imageFs:\n no `figures`"), passed(newCRIO)})
	for _, want := range []string{
		"| kubelet | containerd v2.4.2, `cri` | containerd v2.4.2, `crio` |\n| --- | --- | --- |\n",
		"| v1.36.3 | passed | **failed** (1) |\n",
		"| v1.37.2 | not run | passed |\n",
		"\n1. kubelet v1.36.3, containerd v2.4.2, mode `crio`: `imageFs: no 'figures'`\n",
		"Run with API server v1.37.2, on Linux 6.1, cgroups v2, runc 1.3.0.\n",
		"failed with no containerd: v1.37.",
	} {
		if !strings.Contains(page, want) {
			t.Errorf("the page lacks %q:\n%s", want, page)
		}
	}
	if again := Page(fourKeys, []Outcome{passed(newCRIO), failed(oldCRIO, "imageFs:\n no `figures`"), passed(oldCRI)}); again != page {
		t.Error("the page depends on the order of the outcomes")
	}
}

// What is told to people and what mode crio acts on are what was run: the page is that of the record, and a split is reported to the
// kubelets that passed, and to no other.
func TestTheRecordIsWhatIsActedOn(t *testing.T) {
	t.Parallel()
	cells, err := All()
	if err != nil {
		t.Fatal(err)
	}
	const checkout = "../../.."
	all, err := Read(filepath.Join(checkout, "integration/matrix/outcomes.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile(filepath.Join(checkout, "docs/compatibility.md"))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(Page(cells, all), string(page)); diff != "" {
		t.Errorf("docs/compatibility.md is not the page of the record; run `make matrix` (-want +got):\n%s", diff)
	}
	proved := Proved(cells, all)
	for minor := 32; minor < 45; minor++ {
		name := fmt.Sprintf("v1.%d", minor)
		version := kubelet.Version{Major: 1, Minor: minor, Text: name + ".0"}
		if ran := slices.Contains(proved, name); version.ProvedWithCRIO() != ran {
			t.Errorf("a split is reported to %s: %t; it passed: %t", name, !ran, ran)
		}
	}
}
