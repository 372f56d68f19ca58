package lab

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cleave-cri/cleave/integration/documented"
	"github.com/cleave-cri/cleave/lab/need"
)

const checkout = "../.."

// typed is a command line of the documentation that is run on a node of the lab.
type typed struct {
	line string
	// says is part of what it prints.
	says string
	// code is its exit code.
	code int
}

// onNode are those that are run on one node, in this order. Its configuration and
// cleave's state are at their usual places there.
func onNode() []typed {
	const records = "/var/lib/cleave/flight.rec"
	return []typed{
		{"cleave status", "Layout: split", 0},
		{"cleave status -o json", `"layout": "split"`, 0},
		{"cleave doctor", "the container runtime answers on", 0},
		{"cleave config", "mode: cri", 0},
		{"cleave top", "nodefs.available <", 0},
		{"cleave top -o json", `"layout": "split"`, 0},
		{"cleave images", "registry.lab/unused:1", 0},
		{"cleave orphans", "", 0},
		{"cleave plan", "If imagefs.available were short", 0},
		{"cleave gc --dry-run", "Nothing was deleted", 0},
		{"cleave requests", "small-1", 0},
		{"cleave allocatable", "ephemeral-storage", 0},
		{"cleave timeline", "greedy", 0},
		{"cleave timeline --logs", "reclaim.keepLogs keeps those of pods", 1},
		{"cleave du web-7d4b9 --namespace shop", "writable layer", 0},
		{"cleave du web-7d4b9/main", "writable layer", 0},
		{"cleave du POD", "writable layer", 0},
		{"cleave du POD[/CONTAINER] [--namespace NS] [--top 10] [--inodes] [--limit 30s] [--entries-per-second 50000] [-o text|json|yaml]", "small-1", 0},
		{"cleave explain [POD]", "small-1", 0},
		{"cleave explain POD", "small-1", 0},
		{"cleave explain shop/web-7d4b9", "small-1", 0},
		{"cleave explain " + records, "default/greedy goes", 0},
		{"cleave explain " + records + " --pod web-7d4b9", "small-1", 0},
		{"cleave explain FILE [--pod NAME]", "small-1", 0},
		{"cleave replay FILE", " 0 otherwise", 0},
		{"cleave dump", ".tar.gz", 0},
		{"cleave dump -", "\x1f\x8b", 0}, // what gzip begins with (RFC 1952)
		{"cleave dump --journal 24h /mnt/report.tar.gz", "/mnt/report.tar.gz", 0},
		{"cleave snapshotter status", "fence:       open", 0},
		{"cleave snapshotter check", "another process holds the lock", 1},
		{"cleave snapshotter unpin", "another process holds the lock", 1},
		{"cleave snapshotter confirm", "none is waiting to be confirmed", 1},
		{"cleave gc", "dead containers: ", 0},
		{"cleave handover", "serves now", 0},
		{"cleave simulate docs/examples/host-process.yaml --compare", "as expected (cleave)", 0},
		{"cleave simulate docs/examples/inodes.yaml --profile kubelet --record /tmp/inodes.jsonl", "as expected (kubelet)", 0},
		{"cleave explain /tmp/inodes.jsonl --pod cache", "RANK-16", 0},
		{"cleave install", "this node is not run by systemd, and nothing was changed", 1},
		{"cleave uninstall", "this node is not run by systemd, and nothing was changed", 1},
		{"cleave bypass", "this node is not run by systemd, and nothing was changed", 1},
	}
}

// stand are what stands for something in the documentation, and what it is here.
var stand = strings.NewReplacer("[/CONTAINER]", "/app", "[--namespace NS]", "--namespace default", "[-o text|json|yaml]", "-o yaml",
	"[--pod NAME]", "--pod small-1", "[", "", "]", "",
	"shop/web-7d4b9", "default/small-1", "web-7d4b9/main", "small-1/app", "web-7d4b9", "small-1", "--namespace shop", "--namespace default",
	"POD", "small-1", "FILE", "/var/lib/cleave/flight.rec")

// elsewhere are those that another test runs, as what its file has in it.
func elsewhere() map[string][2]string {
	const systemd, split, use, played = "integration/guest/inside/systemd_test.go", "integration/snapshotter_test.go", "integration/lab/use_test.go", "integration/lab/scenarios_test.go"
	return map[string][2]string{
		"cleave":                                    {"cmd/cleave/cleave_test.go", "root()"}, // a word of the lab's shell
		"cleave serve":                              {"lab/node/cleave.go", `"serve", "--config"`},
		"cleave serve --passthrough":                {"lab/node/cleave.go", `"serve", "--passthrough"`},
		"cleave snapshotter":                        {"lab/node/split.go", `"snapshotter", "--config"`},
		"cleave snapshotter init":                   {split, `"snapshotter", "init"`},
		"cleave containerd-config":                  {"cmd/cleave/snapshotter_test.go", `{"containerd-config"}`},
		"cleave containerd-config --write":          {split, `"containerd-config", "--write"`},
		"cleave containerd-config --remove":         {split, `"containerd-config", "--remove"`},
		"cleave install --yes":                      {systemd, `"install", "--mode", "observe", "--yes"`},
		"cleave install --yes --resume":             {"systemd/install/install_test.go", "Resume"},
		"cleave uninstall --yes":                    {systemd, `"uninstall", "--yes"`},
		"cleave uninstall --purge":                  {"snapshot/split/purge_test.go", "TestPurge"},
		"cleave bypass --off":                       {systemd, `"bypass", "--off"`},
		"cleave explain":                            {"integration/lab/documented_test.go", "cleave explain FILE"},
		"cleave replay":                             {"integration/lab/documented_test.go", "cleave replay FILE"},
		"cleave simulate":                           {"cmd/cleave/simulate_test.go", `"simulate"`},
		"cleave simulate FILE":                      {"cmd/cleave/simulate_test.go", `"simulate", example`},
		"cleave lab":                                {use, `"up"`},
		"cleave lab up":                             {use, `"up"`},
		"cleave lab ls":                             {use, `"ls"`},
		"cleave lab down":                           {use, `"down"`},
		"cleave lab shell":                          {use, `"shell"`},
		"cleave lab shell [-- COMMAND]":             {use, `"shell", "--", "true"`},
		"cleave lab run SCENARIO":                   {use, `"run"`},
		"cleave lab run --keep":                     {"integration/lab/documented_test.go", `"--keep"`},
		"cleave lab run --against-sim":              {played, `"--against-sim"`},
		"cleave lab run --kubelet --mode crio":      {played, `"--kubelet"`},
		"cleave lab run docs/lab/host-process.yaml": {played, `"host-process"`},
		"cleave lab run --kubelet --mode crio --against-sim docs/lab/greedy-split.yaml":       {played, `"greedy-split", crio`},
		"cleave lab run --kubelet --mode crio --profile kubelet docs/lab/kubelet-evicts.yaml": {played, `"kubelet-evicts", append(`},
		"cleave lab up --layout split --size 1Gi --images-size 2Gi":                           {use, `"up", "--layout"`},
		`cleave lab shell -- sh -c 'cleave status --control "$CLEAVE_CONTROL"'`:               {use, `cleave status --control "$CLEAVE_CONTROL"`},
	}
}

// usual puts the lab's configuration and cleave's state where a node has them, for
// what is run in it, in a mount namespace of its own.
const usual = `mount --make-rprivate /
mount -t tmpfs tmpfs /run
for dir in etc var/lib; do
	mkdir -p /run/over/$dir/upper /run/over/$dir/work
	mount -t overlay overlay -o lowerdir=/$dir,upperdir=/run/over/$dir/upper,workdir=/run/over/$dir/work /$dir
done
mkdir -p /etc/cleave /var/lib/cleave
cp "$CLEAVE_CONFIG" /etc/cleave/config.yaml
mount --bind "$CLEAVE_LAB/cleave/state" /var/lib/cleave
mount -t tmpfs tmpfs /mnt
exec sh -c "$1"`

// Every command line of the documentation is run by a test: here on a node on which a
// pod was evicted, or elsewhere.
func TestDocumentedCommands(t *testing.T) {
	t.Parallel()
	pages, err := documented.Pages(checkout)
	if err != nil {
		t.Fatal(err)
	}
	run := map[string]bool{}
	for _, c := range onNode() {
		run[c.line] = false
	}
	others := elsewhere()
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, line := range documented.Lines(string(text)) {
			if _, here := run[line]; here {
				run[line] = true
			} else if _, there := others[line]; !there {
				t.Errorf("%s: no test runs %q", page, line)
			}
		}
	}
	for line, found := range run {
		if !found {
			t.Errorf("the documentation does not have %q any more", line)
		}
	}
	for line, where := range others {
		text, err := os.ReadFile(filepath.Join(checkout, where[0]))
		if err != nil || !strings.Contains(string(text), where[1]) {
			t.Errorf("%q is not run by %s any more: there is no %q, or %v", line, where[0], where[1], err)
		}
	}

	l := newLab(t)
	need.Tools(t, "unshare")
	if out, code := l.run(t, "run", "--keep", "--against-sim", filepath.Join(folder, "greedy-split.yaml")); code != 0 || !strings.Contains(out, "as expected, and as in the simulator") {
		t.Fatalf("exit code %d:\n%s", code, out)
	}
	scratch := t.TempDir()
	for _, name := range []string{"docs"} {
		path, err := filepath.Abs(filepath.Join(checkout, name))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(path, filepath.Join(scratch, name)); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range onNode() {
		line := strings.ReplaceAll(stand.Replace(c.line), "/tmp/", scratch+"/")
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		cmd := l.command(ctx, "shell", "--", "unshare", "--mount", "sh", "-ec", usual, "sh", line)
		cmd.Dir = scratch
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &out
		err := cmd.Run()
		cancel()
		if code := cmd.ProcessState.ExitCode(); code != c.code || !strings.Contains(out.String(), c.says) {
			t.Errorf("%s (%s): exit code %d, want %d, and %q in\n%.2000s\n%v", c.line, line, code, c.code, c.says, out.String(), err)
		}
	}
	// As docs/metrics.md has it.
	curl, err := exec.LookPath("curl")
	if err != nil {
		t.Fatal(err)
	}
	metrics, code := l.run(t, "shell", "--", "sh", "-c", curl+` -s --unix-socket "$CLEAVE_CONTROL" http://cleave/metrics`)
	if lines := strings.Split(metrics, "\n"); code != 0 || !slices.ContainsFunc(lines, func(line string) bool { return strings.HasPrefix(line, "cleave_build_info{") }) {
		t.Errorf("exit code %d:\n%.2000s", code, metrics)
	}
}
