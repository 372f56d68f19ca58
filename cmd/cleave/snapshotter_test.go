package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cleave-cri/cleave/agent/snapshotter"
	"github.com/cleave-cri/cleave/integration/toolchain/bin"
	"github.com/cleave-cri/cleave/snapshot/split/ctdconfig"
)

// cleave runs a command in this process and returns what it printed.
func cleave(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	cmd := root()
	cmd.SetOut(&out)
	cmd.SetErr(&out)
	cmd.SetArgs(args)
	err := cmd.ExecuteContext(t.Context())
	return out.String(), err
}

func write(t *testing.T, path, format string, args ...any) {
	t.Helper()
	if err := os.WriteFile(path, fmt.Appendf(nil, format, args...), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestSnapshotterCommandsWithoutRoots(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "config.yaml")
	write(t, file, "version: 1\n")
	for _, args := range [][]string{
		{"snapshotter"}, {"snapshotter", "init"}, {"snapshotter", "check"}, {"snapshotter", "unpin"},
		{"containerd-config"}, {"containerd-config", "--write"},
	} {
		t.Run(strings.Join(args, " "), func(t *testing.T) {
			t.Parallel()
			if _, err := cleave(t, append(args, "--config", file)...); !errors.Is(err, snapshotter.ErrNotConfigured) {
				t.Errorf("got %v, want ErrNotConfigured", err)
			}
		})
	}
}

func TestSnapshotterNotRunning(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "config.yaml")
	write(t, file, "version: 1\nsnapshotter: {statusEndpoint: %s/s.sock}\n", dir)
	for _, command := range []string{"status", "confirm"} {
		if _, err := cleave(t, "snapshotter", command, "--config", file); !errors.Is(err, snapshotter.ErrNotRunning) {
			t.Errorf("%s: got %v, want ErrNotRunning", command, err)
		}
	}
	for _, command := range []string{"status", "check"} {
		if _, err := cleave(t, "snapshotter", command, "-o", "xml", "--config", file); err == nil || !strings.Contains(err.Error(), "choose text, json or yaml") {
			t.Errorf("%s -o xml: %v", command, err)
		}
	}
}

// TestFlagsThatDoSomething: a command offers no flag that it does not look at.
func TestFlagsThatDoSomething(t *testing.T) {
	t.Parallel()
	for command, want := range map[string][]string{
		"snapshotter":         {"runtime-endpoint", "log-level", "log-format"},
		"snapshotter init":    {"log-level", "log-format"},
		"snapshotter check":   {"log-level", "log-format", "output", "repair"},
		"snapshotter unpin":   {"log-level", "log-format"},
		"snapshotter status":  {"output"},
		"snapshotter confirm": nil,
		"containerd-config":   {"state-dir", "write", "drop-in"},
	} {
		out, err := cleave(t, append(strings.Fields(command), "--help")...)
		if err != nil {
			t.Fatal(err)
		}
		for _, flag := range append(want, "config") {
			if !strings.Contains(out, "--"+flag+" ") {
				t.Errorf("%s offers no --%s", command, flag)
			}
		}
		for _, flag := range []string{"runtime-endpoint", "listen", "control", "state-dir", "mode", "log-level", "log-format"} {
			if !slices.Contains(want, flag) && strings.Contains(out, "--"+flag+" ") {
				t.Errorf("%s offers --%s, which does nothing there", command, flag)
			}
		}
	}
}

// TestContainerdConfig prints, writes and removes, with the real containerd.
func TestContainerdConfig(t *testing.T) {
	t.Parallel()
	containerd, err := bin.Path(t.Context(), "containerd")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	file, main, dropIn := filepath.Join(dir, "config.yaml"), filepath.Join(dir, "main.toml"), filepath.Join(dir, "conf.d", "99-cleave-snapshotter.toml")
	write(t, file, "version: 1\nstateDir: %s/state\nsnapshotter: {imageRoot: /mnt/i, containerRoot: /mnt/c, remapIDs: false}\n", dir)
	args := func(more ...string) []string {
		return append([]string{"containerd-config", "--config", file, "--containerd", containerd, "--containerd-config", main}, more...)
	}
	if _, err := cleave(t, args("--write", "--remove")...); err == nil {
		t.Error("--write and --remove together are taken")
	}

	write(t, main, "version = 3\n")
	out, err := cleave(t, args()...)
	if !errors.Is(err, ctdconfig.ErrConflict) || !strings.Contains(err.Error(), `conf.d/*.toml"]`) || !strings.Contains(out, `root = "/mnt/i"`) {
		t.Errorf("without imports it prints %q and says %v, want the file and the missing line", out, err)
	}
	write(t, main, "version = 3\nimports = [\"%s/conf.d/*.toml\"]\n", dir)
	out, err = cleave(t, args("--max-concurrent-unpacks", "3")...)
	if err != nil || !strings.Contains(out, "is not there yet") || !strings.Contains(out, "max_concurrent_unpacks = 3") || !strings.Contains(out, `capabilities = ["rebase"]`) {
		t.Errorf("it prints %q and says %v", out, err)
	}
	if _, err := os.Stat(dropIn); !os.IsNotExist(err) {
		t.Errorf("printing has written something: %v", err)
	}
	for _, step := range []struct{ flag, want string }{
		{"--write", "is written"}, {"--write", "nothing was changed"}, {"--remove", "is removed"}, {"--remove", "nothing was changed"},
	} {
		if out, err := cleave(t, args(step.flag)...); err != nil || !strings.Contains(out, step.want) {
			t.Errorf("%s prints %q and says %v, want %q", step.flag, out, err, step.want)
		}
	}
}
