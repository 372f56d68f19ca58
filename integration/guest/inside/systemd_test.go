package inside

import (
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
)

// etc is every file and link of the folders that an install changes.
func etc(t *testing.T) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, dir := range []string{"/etc/systemd/system", "/etc/cleave", "/etc/containerd"} {
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			if d.Type()&fs.ModeSymlink != 0 {
				out[path], err = os.Readlink(path)
				return err
			}
			content, err := os.ReadFile(path)
			out[path] = string(content)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return out
}

func differences(a, b map[string]string) []string {
	var out []string
	for _, path := range slices.Sorted(maps.Keys(a)) {
		if now, ok := b[path]; !ok || now != a[path] {
			out = append(out, path)
		}
	}
	for _, path := range slices.Sorted(maps.Keys(b)) {
		if _, ok := a[path]; !ok {
			out = append(out, path)
		}
	}
	return out
}

func becomes(t *testing.T, unit, state string) {
	t.Helper()
	eventually(t, unit+" is "+state, func() error {
		out, err := exec.CommandContext(t.Context(), "systemctl", "show", "--value", "-p", "ActiveState", unit).Output()
		if got := strings.TrimSpace(string(out)); err != nil || got != state {
			return fmt.Errorf("%s is %s: %w", unit, got, err)
		}
		return nil
	})
}

// TestSystemd is a course over cleave's units on a real systemd. Its parts build on each other.
func TestSystemd(t *testing.T) {
	inGuest(t)
	const config = "/etc/cleave/config.yaml"
	good := read(t, config) + "\n"
	configure := func(text string) {
		t.Helper()
		if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	answers := func() {
		t.Helper()
		run(t, "crictl", "version")
	}
	answers()
	t.Run("the socket is systemd's", func(t *testing.T) {
		if got := property(t, "cleave.socket", "SubState"); got != "running" {
			t.Errorf("cleave.socket is %s", got)
		}
		if got := property(t, "cleave", "StatusText"); got != "Serving the kubelet on /run/cleave/cleave.sock, mode cri" {
			t.Errorf("the status is %q", got)
		}
	})
	t.Run("a reload with a broken configuration fails, and the old process goes on", func(t *testing.T) {
		before := property(t, "cleave", "MainPID")
		configure(good + "nonsense: 1\n")
		if out, err := exec.CommandContext(t.Context(), "systemctl", "reload", "cleave").CombinedOutput(); err == nil {
			t.Errorf("the reload did not fail: %s", out)
		}
		if after := property(t, "cleave", "MainPID"); after != before {
			t.Errorf("the main process is %s, and was %s", after, before)
		}
		configure(good)
		run(t, "systemctl", "reload", "cleave")
		if after := property(t, "cleave", "MainPID"); after == before {
			t.Error("the reload made no new process")
		}
		answers()
	})
	t.Run("a cleave that hangs is replaced", func(t *testing.T) {
		before := property(t, "cleave", "MainPID")
		if err := syscall.Kill(number(t, before), syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		answersAgain := make(chan error, 1)
		go func() {
			answersAgain <- exec.CommandContext(t.Context(), "crictl", "--timeout", "300s", "version").Run()
		}()
		eventually(t, "another main process", func() error {
			if now := property(t, "cleave", "MainPID"); now == before || now == "0" {
				return fmt.Errorf("it is %s", now)
			}
			return nil
		})
		becomes(t, "cleave", "active")
		if err := <-answersAgain; err != nil {
			t.Logf("the call to the one that hung: %v", err) // it may have been taken, and then it is lost
		}
		answers()
	})
	t.Run("one that can't be started gives way to the pass-through", func(t *testing.T) {
		run(t, "systemctl", "reset-failed", "cleave")
		configure(good + "nonsense: 1\n")
		_ = exec.CommandContext(t.Context(), "systemctl", "restart", "cleave").Run() //nolint:errcheck // it can't succeed
		becomes(t, "cleave-passthrough", "active")
		answers()
		if got := property(t, "cleave", "ActiveState"); got != "failed" && got != "inactive" {
			t.Errorf("cleave is %s", got)
		}
		configure(good)
		run(t, "cleave", "bypass", "--off")
		becomes(t, "cleave", "active")
		becomes(t, "cleave-passthrough", "inactive")
		answers()
	})
	t.Run("by hand too", func(t *testing.T) {
		run(t, "cleave", "bypass")
		becomes(t, "cleave", "inactive")
		answers()
		run(t, "cleave", "bypass", "--off")
		answers()
	})
	t.Run("in and out with one command", func(t *testing.T) {
		before := etc(t)
		plan := run(t, "cleave", "install", "--mode", "observe")
		if d := differences(before, etc(t)); len(d) > 0 {
			t.Errorf("showing the plan changed %q", d)
		}
		if !strings.Contains(plan, "+mode: observe") {
			t.Errorf("the plan does not show the mode:\n%s", plan)
		}
		t.Log(run(t, "cleave", "install", "--mode", "observe", "--yes"))
		if got := property(t, "cleave", "StatusText"); !strings.HasSuffix(got, "mode observe") {
			t.Errorf("the status is %q", got)
		}
		if got := property(t, "cleave.socket", "UnitFileState"); got != "enabled" {
			t.Errorf("cleave.socket is %s", got)
		}
		answers()
		t.Log(run(t, "cleave", "uninstall", "--yes"))
		if d := differences(before, etc(t)); len(d) > 0 {
			t.Errorf("after the uninstall these differ from before: %q", d)
		}
		answers()
	})
}
