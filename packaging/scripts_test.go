package packaging_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// fakeSystemctl writes down what it is told; the units in $ACTIVE are active, and
// what is in $FAILS fails.
const fakeSystemctl = `#!/bin/sh
echo "$*" >>"$LOG"
case "$*" in
"--quiet is-active "*) case " $ACTIVE " in *" $3 "*) exit 0 ;; esac; exit 3 ;;
esac
[ "$*" != "$FAILS" ]
`

// run runs a script on a node below a folder, as far as it knows.
func run(t *testing.T, script, arg, active, fails string, files ...string) (did []string, said string, failed bool) {
	t.Helper()
	root := t.TempDir()
	for _, f := range append(files, "run/systemd/system/x", "bin/systemctl") {
		path := filepath.Join(root, f)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(fakeSystemctl), 0o755); err != nil { //nolint:gosec // one of them is a program
			t.Fatal(err)
		}
	}
	text, err := os.ReadFile(filepath.Join("scripts", script+".sh"))
	if err != nil {
		t.Fatal(err)
	}
	here := strings.NewReplacer("/run/systemd", root+"/run/systemd", "/var/lib/cleave", root+"/var/lib/cleave").Replace(string(text))
	cmd := exec.CommandContext(t.Context(), "/bin/sh", "-c", here, script, arg)
	log := filepath.Join(root, "log")
	cmd.Env = append(os.Environ(), "PATH="+root+"/bin:"+os.Getenv("PATH"), "LOG="+log, "ACTIVE="+active, "FAILS="+fails)
	out, err := cmd.CombinedOutput()
	written, readErr := os.ReadFile(log)
	if readErr != nil && !os.IsNotExist(readErr) {
		t.Fatal(readErr)
	}
	for line := range strings.Lines(string(written)) {
		if line = strings.TrimSpace(line); !strings.HasPrefix(line, "--quiet is-active") {
			did = append(did, line)
		}
	}
	return did, string(out), err != nil
}

const installed = "var/lib/cleave/install/installed.json"

// TestScripts: an install starts nothing, an upgrade reloads what runs, a removal
// is refused while the node needs cleave.
func TestScripts(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name, script, arg, active, fails string
		files                            []string
		did, says                        string
		refused                          bool
	}{
		{name: "first install", script: "postinstall", arg: "configure", did: "daemon-reload"},
		{name: "upgrade", script: "postinstall", arg: "configure", active: "cleave.service cleave-snapshotter.service",
			did: "daemon-reload, reload cleave.service, try-restart cleave-snapshotter.service"},
		{name: "upgrade to one that does not start", script: "postinstall", arg: "2", active: "cleave.service", fails: "reload cleave.service",
			did: "daemon-reload, reload cleave.service", says: "the old one goes on"},
		{name: "upgrade of a pass-through", script: "postinstall", arg: "2", active: "cleave-passthrough.service", did: "daemon-reload", says: "cleave bypass --off"},
		{name: "removal of an installed one, deb", script: "preremove", arg: "remove", files: []string{installed}, refused: true, says: "cleave uninstall --yes"},
		{name: "removal of an installed one, rpm", script: "preremove", arg: "0", files: []string{installed}, refused: true, says: "cleave uninstall --yes"},
		{name: "removal with an install that was broken off", script: "preremove", arg: "remove", files: []string{"var/lib/cleave/install/journal.json"}, refused: true, says: "cleave uninstall --yes"},
		{name: "removal of one that was started by hand", script: "preremove", arg: "remove", active: "cleave-passthrough.service", refused: true, says: "cleave-passthrough.service runs"},
		{name: "upgrade of an installed one, deb", script: "preremove", arg: "upgrade", files: []string{installed}},
		{name: "upgrade of an installed one, rpm", script: "preremove", arg: "1", files: []string{installed}},
		{name: "removal", script: "preremove", arg: "remove",
			did: "--quiet disable cleave.service cleave.socket cleave-snapshotter.service cleave-snapshotter.socket, stop cleave.socket cleave-snapshotter.socket"},
		{name: "after a removal", script: "postremove", arg: "remove", did: "daemon-reload"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			did, said, refused := run(t, tc.script, tc.arg, tc.active, tc.fails, tc.files...)
			if got := strings.Join(did, ", "); got != tc.did || refused != tc.refused {
				t.Errorf("it did %q (refused %v), want %q (refused %v)", got, refused, tc.did, tc.refused)
			}
			if tc.says == "" && said != "" || !strings.Contains(said, tc.says) {
				t.Errorf("it said %q, want %q", said, tc.says)
			}
		})
	}
}
