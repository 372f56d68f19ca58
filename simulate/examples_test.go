package simulate

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/cleave-cri/cleave/engine/record"
	"github.com/cleave-cri/cleave/engine/sim"
	"github.com/cleave-cri/cleave/lab/scenario"
)

var update = flag.Bool("update", false, "write the outcomes in docs/examples/README.md anew")

const folder = "../docs/examples"

func examples(t testing.TB) []string {
	t.Helper()
	files, err := filepath.Glob(folder + "/*.yaml")
	if err != nil || len(files) < 12 {
		t.Fatalf("%d examples, %v", len(files), err)
	}
	return files
}

// TestExamples plays each under both profiles. Each expects something of both,
// and the profiles come to something else, or it would show nothing.
func TestExamples(t *testing.T) {
	t.Parallel()
	for _, file := range examples(t) {
		t.Run(filepath.Base(file), func(t *testing.T) {
			t.Parallel()
			s, err := scenario.Load(file)
			if err != nil {
				t.Fatal(err)
			}
			var shown []string
			results := map[sim.Profile]*sim.Result{}
			for _, profile := range []sim.Profile{sim.KubeletProfile, sim.CleaveProfile} {
				o, err := Play(s, profile)
				if err != nil {
					t.Fatal(err)
				}
				if !o.Expected || len(o.Unexpected) > 0 {
					t.Errorf("%s: expects anything: %t; not as expected: %q", profile, o.Expected, o.Unexpected)
				}
				results[profile] = o.Result
				shown = append(shown, fmt.Sprint(facts(o.Result)))
			}
			if shown[0] == shown[1] {
				t.Error("both profiles come to the same")
			}
			// What is expected of one does not hold for the other: else no
			// difference is expected.
			kubelet, cleave := s.Expect["kubelet"], s.Expect["cleave"]
			swapped := 0
			for profile, expect := range map[sim.Profile]scenario.Expect{sim.KubeletProfile: cleave, sim.CleaveProfile: kubelet} {
				if len(Check(expect, results[profile])) > 0 {
					swapped++
				}
			}
			if swapped == 0 {
				t.Error("what is expected does not tell the profiles apart")
			}
		})
	}
}

// TestExamplesReadme holds docs/examples/README.md to the real output: each
// example has a section that ends in what `--compare` prints.
func TestExamplesReadme(t *testing.T) {
	t.Parallel()
	readme := folder + "/README.md"
	text, err := os.ReadFile(readme)
	if err != nil {
		t.Fatal(err)
	}
	got := string(text)
	for _, file := range examples(t) {
		name := filepath.Base(file)
		_, section, ok := strings.Cut(got, "\n## "+name+"\n")
		if !ok {
			t.Errorf("README.md has no section %s", name)
			continue
		}
		section, _, _ = strings.Cut(section, "\n## ")
		explanation, _, _ := strings.Cut(section, "\n```\n")
		if len(strings.Fields(explanation)) < 20 {
			t.Errorf("README.md explains %s in %d words", name, len(strings.Fields(explanation)))
		}
		if !strings.Contains(explanation, "GAP-") && !strings.Contains(explanation, "`BreakStorms`") {
			t.Errorf("README.md does not say which GAP or option %s is about", name)
		}
		var out bytes.Buffer
		if err := Run(&out, file, Options{Compare: true}); err != nil {
			t.Error(err)
		}
		want := explanation + "\n```\n" + strings.TrimRight(out.String(), "\n") + "\n```\n"
		if strings.TrimRight(section, "\n") != strings.TrimRight(want, "\n") {
			if !*update {
				t.Errorf("README.md, %s (-README +real): %s", name, cmp.Diff(section, want))
			}
			got = strings.Replace(got, section, strings.TrimRight(want, "\n")+"\n", 1)
		}
	}
	if *update {
		if err := os.WriteFile(readme, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for line := range strings.Lines(got) {
		if name, ok := strings.CutPrefix(strings.TrimSpace(line), "## "); ok && !slices.Contains(examples(t), filepath.Join(folder, name)) {
			t.Errorf("README.md has a section %s, and there is no such file", name)
		}
	}
}

// TestExamplesCanBeReplayed makes all decisions of all examples again, from
// what was written down.
func TestExamplesCanBeReplayed(t *testing.T) {
	t.Parallel()
	for _, file := range examples(t) {
		t.Run(filepath.Base(file), func(t *testing.T) {
			t.Parallel()
			var written bytes.Buffer
			if err := Run(new(bytes.Buffer), file, Options{Compare: true, Record: &written}); err != nil {
				t.Fatal(err)
			}
			reader, n := record.NewReader(&written), 0
			for {
				r, err := reader.Next()
				if err != nil {
					break
				}
				differences, err := record.Replay(r)
				if err != nil || len(differences) > 0 {
					t.Fatalf("record %d: %v, %v", reader.Line(), differences, err)
				}
				n++
			}
			if n == 0 {
				t.Error("nothing was recorded")
			}
		})
	}
}
