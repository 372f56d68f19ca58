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

// few are those that are played each time, besides the one of TestDocumentedCommands:
// for trouble from a process with an open file, and from outside of pods.
func few() []string { return []string{"deleted-open", "disk-full"} }

// onXFS are those that are played on xfs too: each layout, and each kind of fault.
func onXFS() []string {
	return []string{
		"dead-containers", "demo", "disk-full", "greedy-separate", "greedy-single", "greedy-split", "host-process", "images-first", "root-unmounted", "snapshotter-killed",
	}
}

// withKubelet are those that are played with a real kubelet and API server: those of
// layout split in mode crio, and some others. Not rotation, where the disk is to go
// below the kubelet's own threshold, and not root-unmounted, where a kubelet measures
// the machine's disk, whatever cleave says, and evicts if that is short.
func withKubelet() []played {
	crio := []string{"--mode", "crio"}
	return []played{
		{"demo", crio},
		{"disk-full", crio},
		{"greedy-split", crio},
		{"host-process", crio},
		{"kubelet-evicts", crio},
		{"kubelet-evicts", append(crio[:2:2], "--profile", "kubelet")},
		{"snapshotter-killed", crio},
		{"greedy-single", nil},
		{"volumes", crio},
	}
}

// played is a scenario and with what it is played.
type played struct {
	name string
	args []string
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
	for _, played := range withKubelet() {
		if !slices.ContainsFunc(files, func(file string) bool { return filepath.Base(file) == played.name+".yaml" }) {
			t.Errorf("there is no scenario %s to be played with a kubelet", played.name)
		}
	}
	all := os.Getenv(allEnv) == "all"
	for _, played := range withKubelet() {
		if !all {
			continue // integration/crio has kubelets at that time
		}
		t.Run(strings.Join(append([]string{played.name, "with a kubelet"}, played.args...), " "), func(t *testing.T) {
			t.Parallel()
			l := newLab(t)
			l.addKubelet(t)
			args := append([]string{"run", "--against-sim", "--kubelet"}, played.args...)
			out, code := l.run(t, append(args, filepath.Join(folder, played.name+".yaml"))...)
			if code != 0 || !strings.Contains(out, "as expected, and as in the simulator") {
				t.Errorf("exit code %d:\n%s", code, out)
			}
			if left := l.left(); len(left) > 0 {
				t.Errorf("left: %s", left)
			}
		})
	}
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
