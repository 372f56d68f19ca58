package lab

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// allEnv has all scenarios played: all of them on ext4, half of them on xfs.
const allEnv = "CLEAVE_LAB"

const folder = "../../docs/lab"

// few are those that are played each time: one for each kind of disk trouble that
// comes from a pod, from a process with an open file, and from outside.
func few() []string { return []string{"greedy-split", "deleted-open", "disk-full"} }

// onXFS are those that are played on xfs too: each layout, and each kind of fault.
func onXFS() []string {
	return []string{
		"dead-containers", "disk-full", "greedy-separate", "greedy-single", "greedy-split", "host-process", "images-first", "root-unmounted", "snapshotter-killed",
	}
}

// TestScenarios plays shipped scenarios on real nodes. Each comes out as it expects,
// and as in the simulator, and leaves nothing.
func TestScenarios(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob(folder + "/*.yaml")
	if err != nil || len(files) < 15 {
		t.Fatalf("%d scenarios, %v", len(files), err)
	}
	if half := (len(files) + 1) / 2; len(onXFS()) < half {
		t.Fatalf("%d scenarios on xfs, want %d", len(onXFS()), half)
	}
	all := os.Getenv(allEnv) == "all"
	for _, fs := range []string{"ext4", "xfs"} {
		for _, file := range files {
			name := strings.TrimSuffix(filepath.Base(file), ".yaml")
			if !all && (fs != "ext4" || !slices.Contains(few(), name)) || fs == "xfs" && !slices.Contains(onXFS(), name) {
				continue
			}
			t.Run(name+" on "+fs, func(t *testing.T) {
				t.Parallel()
				l := newLab(t)
				out, code := l.run(t, "run", "--against-sim", "--fs", fs, file)
				if code != 0 || !strings.Contains(out, "as expected, and as in the simulator") {
					t.Errorf("exit code %d:\n%s", code, out)
				}
				if left := l.left(); len(left) > 0 {
					t.Errorf("left: %s", left)
				}
			})
		}
	}
}
