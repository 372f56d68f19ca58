package inside

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cleave-cri/cleave/lab/guestnode"
)

// plainEnv is set where the node has containerd and a kubelet, and no cleave yet.
const plainEnv = "CLEAVE_INSIDE_PLAIN"

const containerdSocket = "unix:///run/containerd/containerd.sock"

// kubeletUses waits until the kubelet itself says that it runs with a runtime's socket.
func kubeletUses(t *testing.T, socket string) {
	t.Helper()
	eventually(t, "the kubelet uses "+socket, func() error {
		var config struct {
			Kubeletconfig struct{ ContainerRuntimeEndpoint string }
		}
		if err := ask(t.Context(), http.MethodGet, guestnode.KubeletURL+"/configz", nil, &config); err != nil {
			return err
		}
		if got := config.Kubeletconfig.ContainerRuntimeEndpoint; got != socket {
			return fmt.Errorf("it says %q", got)
		}
		return nil
	})
}

func manifest(name string) string { return filepath.Join(guestnode.ManifestsDir, name+".yaml") }

// staticPod has the kubelet run a pod, and returns its container when that runs.
func staticPod(t *testing.T, name string) (container string) {
	t.Helper()
	text := fmt.Sprintf(`apiVersion: v1
kind: Pod
metadata: {name: %s}
spec:
  hostNetwork: true
  terminationGracePeriodSeconds: 1
  containers:
  - {name: %s, image: %q, imagePullPolicy: Never, command: [/bin/sleep, "86400"]}
`, name, name, guestnode.BusyboxImage)
	if err := os.WriteFile(manifest(name), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the kubelet runs "+name, func() error {
		out, err := exec.CommandContext(t.Context(), "crictl", "ps", "-q", "--no-trunc", "--name", "^"+name+"$").Output()
		if container = strings.TrimSpace(string(out)); err != nil || container == "" || strings.Contains(container, "\n") {
			return fmt.Errorf("its containers are %q: %w", container, err)
		}
		return nil
	})
	return container
}

// TestInstall is a course over a node that gets cleave and loses it again, twice, while a kubelet runs pods. Its parts build on each
// other.
func TestInstall(t *testing.T) {
	inGuest(t)
	if os.Getenv(plainEnv) != "1" {
		t.Skip("the node has cleave: the host's TestInstall boots one that has none")
	}
	tellAtEnd(t)
	waitForImages(t, containerdSocket)
	kubeletUses(t, containerdSocket)
	first := crictlPod{container: staticPod(t, "first")}
	pid := first.pid(t)
	before := etc(t)
	asBefore := func(t *testing.T) {
		t.Helper()
		if d := differences(before, etc(t)); len(d) > 0 {
			t.Errorf("after the uninstall these differ from before: %q", d)
		}
		kubeletUses(t, containerdSocket)
		for _, unit := range []string{"cleave", "cleave-snapshotter", "cleave-passthrough"} {
			if got := property(t, unit, "LoadState"); got != "not-found" {
				t.Errorf("%s.service is %s", unit, got)
			}
		}
	}
	goesOn := func(t *testing.T) {
		t.Helper()
		if now := first.pid(t); now != pid {
			t.Errorf("the first pod's process was %d and is %d", pid, now)
		}
	}
	t.Run("the plan shows the kubelet's line and changes nothing", func(t *testing.T) {
		plan := run(t, "cleave", "install")
		for _, want := range []string{"-containerRuntimeEndpoint: \"unix:///run/containerd/containerd.sock\"   # the runtime", "+containerRuntimeEndpoint: \"" + cleaveSocket + "\"   # the runtime", "restart kubelet.service"} {
			if !strings.Contains(plan, want) {
				t.Errorf("the plan does not show %q:\n%s", want, plan)
			}
		}
		if d := differences(before, etc(t)); len(d) > 0 {
			t.Errorf("showing the plan changed %q", d)
		}
	})
	if !t.Run("the kubelet is told cleave's socket", func(t *testing.T) {
		t.Log(run(t, "cleave", "install", "--yes"))
		kubeletUses(t, cleaveSocket)
		goesOn(t)
		staticPod(t, "second")
		if again, err := exec.CommandContext(t.Context(), "cleave", "install", "--yes").CombinedOutput(); err == nil {
			t.Errorf("a second install ended well: %s", again)
		}
	}) {
		return
	}
	t.Run("and containerd's again", func(t *testing.T) {
		t.Log(run(t, "cleave", "uninstall", "--yes"))
		asBefore(t)
		goesOn(t)
	})
	if !t.Run("with the split snapshotter", func(t *testing.T) {
		run(t, "cleave", "snapshotter", "init")
		t.Log(run(t, "cleave", "install", "--snapshotter", "split", "--yes"))
		kubeletUses(t, cleaveSocket)
		goesOn(t)
		third := staticPod(t, "third")
		if got := run(t, "ctr", "--namespace", "k8s.io", "snapshots", "--snapshotter", "cleave", "ls"); !strings.Contains(got, third) {
			t.Errorf("the third pod's container %s is not among its snapshots:\n%s", third, got)
		}
		out, err := exec.CommandContext(t.Context(), "cleave", "uninstall", "--purge", "--yes").CombinedOutput()
		if err == nil || !strings.Contains(string(out), "containers use the split snapshotter") || !strings.Contains(string(out), third) {
			t.Errorf("while a pod uses it the uninstall ended with %v: %s", err, out)
		}
		kubeletUses(t, cleaveSocket)
	}) {
		return
	}
	t.Run("and all of it away", func(t *testing.T) {
		for _, name := range []string{"first", "second", "third"} {
			if err := os.Remove(manifest(name)); err != nil {
				t.Fatal(err)
			}
		}
		eventually(t, "no container is left", func() error {
			if out, err := exec.CommandContext(t.Context(), "crictl", "rmp", "-fa").CombinedOutput(); err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
			if left, err := exec.CommandContext(t.Context(), "ctr", "--namespace", "k8s.io", "containers", "ls", "-q").Output(); err != nil || len(left) > 0 {
				return fmt.Errorf("left are %s: %w", left, err)
			}
			return nil
		})
		t.Log(run(t, "cleave", "uninstall", "--purge", "--yes"))
		asBefore(t)
		for _, root := range []string{"/mnt/images/cleave", "/mnt/containers/cleave"} {
			if left, err := os.ReadDir(root); err != nil || len(left) > 0 {
				t.Errorf("in %s are %v, %v", root, left, err)
			}
		}
		if out, err := exec.CommandContext(t.Context(), "cleave", "uninstall", "--yes").CombinedOutput(); err == nil {
			t.Errorf("a second uninstall ended well: %s", out)
		}
		staticPod(t, "last")
		if _, err := os.Stat("/etc/containerd/conf.d/99-cleave-snapshotter.toml"); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("containerd's drop-in is still there: %v", err)
		}
	})
}
