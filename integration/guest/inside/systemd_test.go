package inside

import (
	"context"
	"errors"
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

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/lab/guestnode"
	"github.com/cleave-cri/cleave/lab/pod"
)

// etc is every file and link of the folders that an install changes.
func etc(t *testing.T) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, dir := range []string{"/etc/systemd/system", "/etc/cleave", "/etc/containerd", "/etc/kubernetes"} {
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
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
	t.Run("in containerd's place and back, with one command", func(t *testing.T) { inContainerdsPlace(t, config) })
	t.Run("without memory calls pass through", func(t *testing.T) {
		run(t, "systemctl", "reset-failed", "cleave")
		run(t, "systemctl", "set-property", "--runtime", "cleave.service", "MemoryMax=4M")
		_ = exec.CommandContext(t.Context(), "systemctl", "restart", "cleave").Run() //nolint:errcheck // it can't succeed
		becomes(t, "cleave-passthrough", "active")
		answers()
		if said := run(t, "sh", "-c", "journalctl -k -o cat | grep -c 'Memory cgroup out of memory.*cleave'"); number(t, said) == 0 {
			t.Error("the kernel ended no cleave for want of memory")
		}
		run(t, "systemctl", "set-property", "--runtime", "cleave.service", "MemoryMax=infinity")
		run(t, "cleave", "bypass", "--off")
		becomes(t, "cleave", "active")
		answers()
	})
	t.Run("as a package, upgraded under load", packaged)
}

// inContainerdsPlace has cleave take containerd's socket and give it back.
func inContainerdsPlace(t *testing.T, config string) {
	const socket, behind = "/run/containerd/containerd.sock", "/run/containerd/behind-cleave.sock"
	p := runPod(t, "stays")
	pid := p.pid(t)
	refused, err := exec.CommandContext(t.Context(), "cleave", "install", "--mode", "observe", "--redirect", "--yes").CombinedOutput()
	if err == nil || !strings.Contains(string(refused), "systemctl stop") {
		t.Errorf("with a cleave that runs the install ended with %v: %s", err, refused)
	}
	run(t, "systemctl", "stop", "cleave.socket", "cleave.service")
	t.Setenv("CONTAINER_RUNTIME_ENDPOINT", "unix://"+socket)
	t.Setenv("IMAGE_SERVICE_ENDPOINT", "unix://"+socket)
	before := etc(t)
	t.Log(run(t, "cleave", "install", "--mode", "observe", "--redirect", "--yes"))
	if got := property(t, "cleave", "StatusText"); got != "Serving the kubelet on "+socket+", mode observe" {
		t.Errorf("the status is %q", got)
	}
	if now := p.pid(t); now != pid {
		t.Errorf("the container's process was %d and is %d", pid, now)
	}
	if got := p.exec(t, "/bin/echo", "hello"); got != "hello" {
		t.Errorf("in the container: %q", got)
	}
	for _, address := range []string{socket, behind} {
		run(t, "ctr", "--address", address, "--namespace", "k8s.io", "images", "ls", "-q")
	}
	q := runPod(t, "another")
	q.remove(t)
	run(t, "cleave", "bypass")
	run(t, "crictl", "version")
	run(t, "cleave", "bypass", "--off")
	// From here on the runtime's socket is the one that was always there.
	p.remove(t)
	t.Log(run(t, "cleave", "uninstall", "--yes"))
	if d := differences(before, etc(t)); len(d) > 0 {
		t.Errorf("after the uninstall these differ from before: %q", d)
	}
	run(t, "crictl", "version")
	if _, err := os.Lstat(behind); err == nil {
		if out, err := exec.CommandContext(t.Context(), "ctr", "--address", behind, "--connect-timeout", "2s", "version").CombinedOutput(); err == nil {
			t.Errorf("somebody still answers on %s: %s", behind, out)
		}
	}
	if text := read(t, config); strings.Contains(text, "behind-cleave") {
		t.Errorf("the configuration is %s", text)
	}
	run(t, "systemctl", "start", "cleave.socket", "cleave.service")
}

// packaged goes over to the package, upgrades it under load, and removes it.
func packaged(t *testing.T) {
	units, err := filepath.Glob("/etc/systemd/system/cleave*.s*")
	if err != nil || len(units) != 5 {
		t.Fatalf("the units are %q, %v", units, err)
	}
	for _, path := range units {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
	config := read(t, "/etc/cleave/config.yaml")
	install := func(name string) string {
		t.Helper()
		return run(t, "dpkg", "--force-confold", "-i", guestnode.PackagesDir+"/"+name)
	}
	t.Log(install("1.deb"))
	if now := read(t, "/etc/cleave/config.yaml"); now != config {
		t.Error("the package has changed the configuration")
	}
	run(t, "systemctl", "restart", "cleave")
	if err := os.Remove("/usr/local/bin/cleave"); err != nil { // the one from before
		t.Fatal(err)
	}
	version := func() string {
		t.Helper()
		status := run(t, "cleave", "status")
		for _, v := range []string{"guest-1", "guest-2"} {
			if strings.Contains(status, v) {
				return v
			}
		}
		return status
	}
	if got := version(); got != "guest-1" {
		t.Errorf("the version that answers is %s", got)
	}

	client, err := pod.Dial(cleaveSocket)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close() //nolint:errcheck // only asked
	ctx, cancel := context.WithCancel(t.Context())
	served, ended := 0, make(chan error, 1)
	go func() {
		for ctx.Err() == nil {
			if _, err := client.Runtime.Version(context.WithoutCancel(ctx), &runtimeapi.VersionRequest{}); err != nil {
				ended <- err
				return
			}
			served++
		}
		ended <- nil
	}()
	before := property(t, "cleave", "MainPID")
	t.Log(install("2.deb"))
	cancel()
	if err := <-ended; err != nil || served == 0 {
		t.Errorf("across the upgrade %d calls were answered, and one was lost: %v", served, err)
	}
	if after := property(t, "cleave", "MainPID"); after == before {
		t.Error("the upgrade made no new process")
	}
	if got := version(); got != "guest-2" {
		t.Errorf("the version that answers is %s", got)
	}

	if out, err := exec.CommandContext(t.Context(), "dpkg", "-r", "cleave").CombinedOutput(); err == nil || !strings.Contains(string(out), "runs: see that nobody uses it") {
		t.Errorf("removing it while it runs ended with %v: %s", err, out)
	}
	run(t, "systemctl", "stop", "cleave.socket", "cleave.service", "containerd.service", "cleave-snapshotter.socket", "cleave-snapshotter.service")
	t.Log(run(t, "dpkg", "-r", "cleave"))
	if _, err := os.Stat("/usr/bin/cleave"); !os.IsNotExist(err) {
		t.Errorf("the program is still there: %v", err)
	}
	if now := read(t, "/etc/cleave/config.yaml"); now != config {
		t.Error("the removal has changed the configuration")
	}
}
