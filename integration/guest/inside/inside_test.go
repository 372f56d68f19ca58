// Package inside is the tests that run in a guest that lab/guestnode has made a node. `make test-guest` and
// `make test-guest-crio` build them as a program and run that there; anywhere else they are skipped.
package inside

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/agent"
	"github.com/cleave-cri/cleave/agent/snapshotter"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/lab/du"
	"github.com/cleave-cri/cleave/lab/guestnode"
	"github.com/cleave-cri/cleave/lab/pod"
)

const (
	// insideEnv is set by the host's test. Without it this is not a node of our own, and nothing here may run.
	insideEnv = "CLEAVE_INSIDE_GUEST"

	cleaveSocket = "unix:///run/cleave/cleave.sock"
	podSlice     = "cleavetest.slice"
	// patience is for a processor that is emulated on a busy machine.
	patience = 15 * time.Minute
)

func inGuest(t *testing.T) {
	t.Helper()
	if os.Getenv(insideEnv) != "1" {
		t.Skip("runs in a guest only: `make test-guest` boots one")
	}
}

// tellAtEnd has a test that failed say how the guest is: what takes its memory and processors, and what the kernel killed.
func tellAtEnd(t *testing.T) {
	t.Helper()
	t.Cleanup(func() {
		if !t.Failed() {
			return
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Minute)
		defer cancel()
		for _, command := range []string{
			"free -m", "ps -eo pid,rss,pcpu,etime,args --sort=-rss | head -12 | cut -c1-160", "journalctl -k -o cat | grep -i 'killed process\\|out of memory' | tail -5",
			"systemctl --failed --no-legend", "journalctl -u kube-apiserver -u etcd -u cleave -u cleave-snapshotter -o cat -n 40 | cut -c1-300",
		} {
			out, err := exec.CommandContext(ctx, "sh", "-c", command).CombinedOutput()
			t.Logf("%s (%v):\n%s", command, err, out)
		}
	})
}

// run runs a program and returns what it prints.
func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience) // cleanups call it too
	defer cancel()
	var out, said bytes.Buffer
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdout, cmd.Stderr = &out, &said
	if err := cmd.Run(); err != nil {
		t.Fatalf("%s %s: %v\n%s%s", name, strings.Join(args, " "), err, out.Bytes(), said.Bytes())
	}
	return strings.TrimSpace(out.String())
}

// eventually waits until something is as it should be; what it is until then goes into the failure.
func eventually(t *testing.T, what string, ok func() error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		err := ok()
		if err == nil {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("%s: %v", what, err)
		}
	}
}

func property(t *testing.T, unit, name string) string {
	t.Helper()
	return run(t, "systemctl", "show", "--value", "-p", name, unit)
}

func number(t *testing.T, text string) int {
	t.Helper()
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func read(t *testing.T, path string) string {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(content))
}

// crictlPod is a pod that runs, made with crictl through cleave.
type crictlPod struct{ sandbox, container string }

const memoryLimitBytes = 64 << 20

// runPod runs a pod with one container that sleeps, as a person would by crictl. It is the caller's to remove.
func runPod(t *testing.T, name string) crictlPod {
	t.Helper()
	dir := t.TempDir()
	write := func(file string, value any) string {
		t.Helper()
		content, err := json.Marshal(value)
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, file)
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	network := &runtimeapi.NamespaceOption{Network: runtimeapi.NamespaceMode_NODE, Pid: runtimeapi.NamespaceMode_CONTAINER}
	sandboxFile := write("pod.json", &runtimeapi.PodSandboxConfig{
		Metadata:     &runtimeapi.PodSandboxMetadata{Name: name, Namespace: "default", Uid: name + "-uid"},
		LogDirectory: "/var/log/pods/" + name,
		Linux: &runtimeapi.LinuxPodSandboxConfig{
			CgroupParent:    podSlice,
			SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{NamespaceOptions: network},
		},
	})
	containerFile := write("container.json", &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: "main"},
		Image:    &runtimeapi.ImageSpec{Image: guestnode.BusyboxImage},
		Command:  []string{"/bin/sh", "-c", "echo started; exec sleep 86400"},
		LogPath:  "main.log",
		Linux: &runtimeapi.LinuxContainerConfig{
			Resources:       &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: memoryLimitBytes},
			SecurityContext: &runtimeapi.LinuxContainerSecurityContext{NamespaceOptions: network},
		},
	})
	p := crictlPod{sandbox: run(t, "crictl", "runp", sandboxFile)}
	p.container = run(t, "crictl", "create", p.sandbox, containerFile, sandboxFile)
	run(t, "crictl", "start", p.container)
	return p
}

func (p crictlPod) remove(t *testing.T) {
	t.Helper()
	run(t, "crictl", "stopp", p.sandbox)
	run(t, "crictl", "rmp", p.sandbox)
	if _, err := os.Stat(p.cgroup()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its cgroup is still there: %v", err)
	}
}

func (p crictlPod) exec(t *testing.T, command ...string) string {
	t.Helper()
	return run(t, "crictl", append([]string{"exec", p.container}, command...)...)
}

// pid is the process of the container, from containerd itself.
func (p crictlPod) pid(t *testing.T) int {
	t.Helper()
	fields := strings.Fields(run(t, "sh", "-c", "ctr --namespace k8s.io tasks list | grep "+p.container))
	if len(fields) < 3 || fields[2] != "RUNNING" {
		t.Fatalf("the container's task is %q", fields)
	}
	return number(t, fields[1])
}

func (p crictlPod) cgroup() string {
	return "/sys/fs/cgroup/" + podSlice + "/cri-containerd-" + p.container + ".scope"
}

// waitForImages waits until images that were imported are told of on cleave's socket.
func waitForImages(t *testing.T, socket string) {
	t.Helper()
	client, err := pod.Dial(socket)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close() //nolint:errcheck // only asked
	eventually(t, "containerd tells of the images that were imported", func() error {
		for _, image := range []string{guestnode.PauseImage, guestnode.BusyboxImage} {
			answer, err := client.Images.ImageStatus(t.Context(), &runtimeapi.ImageStatusRequest{Image: &runtimeapi.ImageSpec{Image: image}})
			if err != nil || answer.GetImage() == nil {
				return fmt.Errorf("%s: %v, %w", image, answer.GetImage(), err)
			}
		}
		return nil
	})
}

// TestNode is one course over a node as production runs them. Its parts build on each other.
func TestNode(t *testing.T) {
	inGuest(t)
	t.Run("systemd has everything up", func(t *testing.T) {
		if comm := read(t, "/proc/1/comm"); comm != "systemd" {
			t.Errorf("process 1 is %s", comm)
		}
		if state := run(t, "systemctl", "is-system-running", "--wait"); state != "running" {
			t.Errorf("the system is %s:\n%s", state, run(t, "systemctl", "--failed"))
		}
		for _, unit := range []string{"cleave-snapshotter", "containerd", "cleave"} {
			if state := property(t, unit, "ActiveState"); state != "active" {
				t.Errorf("%s is %s", unit, state)
			}
			if n := property(t, unit, "NRestarts"); n != "0" {
				t.Errorf("%s was restarted %s times", unit, n)
			}
		}
		if _, err := os.Stat("/etc/containerd/conf.d/99-cleave-snapshotter.toml"); err != nil {
			t.Error(err)
		}
	})
	waitForImages(t, cleaveSocket)
	var p crictlPod
	if !t.Run("a pod runs under the systemd driver", func(t *testing.T) {
		p = runPod(t, "smoke")
		if got := p.exec(t, "/bin/sh", "-c", "cat /etc/hosts; cat /proc/1/cmdline | tr '\\0' ' '"); !strings.Contains(got, "localhost") || !strings.Contains(got, "sleep 86400") {
			t.Errorf("in the container there is %q", got)
		}
		if got := read(t, filepath.Join(p.cgroup(), "memory.max")); got != strconv.Itoa(memoryLimitBytes) {
			t.Errorf("its memory.max is %s", got)
		}
		if got := read(t, filepath.Join(p.cgroup(), "cgroup.procs")); !strings.Contains(got, strconv.Itoa(p.pid(t))) {
			t.Errorf("process %d is not among %q of its cgroup", p.pid(t), got)
		}
		if got := read(t, "/var/log/pods/smoke/main.log"); !strings.Contains(got, "started") {
			t.Errorf("its log is %q", got)
		}
	}) {
		return
	}
	t.Run("its layer is on the containers' disk, and cleave says so", func(t *testing.T) { testDisks(t, p) })
	t.Run("restarts leave it alone", func(t *testing.T) { testRestarts(t, p) })
	t.Run("a second pod after all that", func(t *testing.T) {
		q := runPod(t, "second")
		if got := q.exec(t, "/bin/echo", "hello"); got != "hello" {
			t.Errorf("got %q", got)
		}
		q.remove(t)
	})
	t.Run("it goes away", p.remove)
}

func testDisks(t *testing.T, p crictlPod) {
	const written = 8 << 20
	p.exec(t, "/bin/sh", "-c", fmt.Sprintf("dd if=/dev/zero of=/written bs=65536 count=%d && sync", written>>16))
	onDisk, _, err := du.Measure(t.Context(), "/mnt/containers/cleave")
	if err != nil || onDisk < written {
		t.Errorf("the containers' disk has %d bytes of layers, %v", onDisk, err)
	}
	client, err := pod.Dial(cleaveSocket)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close() //nolint:errcheck // only asked
	eventually(t, "the container's figures", func() error {
		stats, err := client.Stats(t.Context(), p.container)
		if err != nil {
			return err
		}
		layer := stats.GetWritableLayer()
		if layer.GetUsedBytes().GetValue() < written || layer.GetFsId().GetMountpoint() != "/mnt/containers" {
			return fmt.Errorf("its layer is %v", layer)
		}
		return nil
	})
	answer, err := client.Images.ImageFsInfo(t.Context(), &runtimeapi.ImageFsInfoRequest{})
	if err != nil || len(answer.GetImageFilesystems()) != 1 || len(answer.GetContainerFilesystems()) != 1 {
		t.Fatalf("got %v, %v", answer, err)
	}
	// What counts is the device: containerd names the image root itself, which is right (docs/proxy.md).
	for where, named := range map[string]string{
		"/mnt/images":     answer.GetImageFilesystems()[0].GetFsId().GetMountpoint(),
		"/mnt/containers": answer.GetContainerFilesystems()[0].GetFsId().GetMountpoint(),
	} {
		if device(t, named) != device(t, where) {
			t.Errorf("what is on %s is said to be on %s", where, named)
		}
	}
	eventually(t, "cleave's status", func() error {
		s, err := agent.FetchStatus(t.Context(), config.Default().Control.Endpoint.Path())
		if err == nil && (s.Layout != fsstats.LayoutSeparate || s.Problem != "" || s.Runtime.Error != "" || s.Snapshotter == nil || len(s.Snapshotter.Problems) > 0) {
			err = fmt.Errorf("layout %s, problem %q, runtime %+v, snapshotter %+v", s.Layout, s.Problem, s.Runtime, s.Snapshotter)
		}
		return err
	})
}

func device(t *testing.T, path string) uint64 {
	t.Helper()
	var st syscall.Stat_t
	if err := syscall.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return uint64(st.Dev) //nolint:unconvert // its size differs between architectures
}

// testRestarts: cleave by systemd and by a handover, containerd by SIGKILL, the snapshotter by SIGKILL.
func testRestarts(t *testing.T, p crictlPod) {
	pid := p.pid(t)
	answers := func(t *testing.T) {
		t.Helper()
		eventually(t, "the pod answers through cleave", func() error {
			// exec has its own context: run would end the test at the first failure.
			out, err := exec.CommandContext(t.Context(), "crictl", "exec", p.container, "/bin/echo", "hello").CombinedOutput()
			if err == nil && strings.TrimSpace(string(out)) != "hello" {
				err = errors.New("it said something else")
			}
			if err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
			return nil
		})
		if now := p.pid(t); now != pid {
			t.Errorf("the container's process was %d and is %d", pid, now)
		}
	}
	another := func(t *testing.T, unit string, was int) {
		t.Helper()
		eventually(t, unit+" is active with another process", func() error {
			if now, state := property(t, unit, "MainPID"), property(t, unit, "ActiveState"); state != "active" || now == strconv.Itoa(was) || now == "0" {
				return fmt.Errorf("it is %s with process %s", state, now)
			}
			return nil
		})
	}
	for _, tc := range []struct {
		name, unit string
		act        func(t *testing.T, pid int)
	}{
		{"cleave is restarted", "cleave", func(t *testing.T, _ int) { t.Helper(); run(t, "systemctl", "restart", "cleave") }},
		{"cleave hands over", "cleave", func(t *testing.T, _ int) { t.Helper(); run(t, "systemctl", "reload", "cleave") }},
		{"cleave is killed", "cleave", kill},
		{"containerd is restarted", "containerd", func(t *testing.T, _ int) { t.Helper(); run(t, "systemctl", "restart", "containerd") }},
		{"containerd is killed", "containerd", kill},
		{"the snapshotter is killed", "cleave-snapshotter", kill},
	} {
		t.Run(tc.name, func(t *testing.T) {
			was := number(t, property(t, tc.unit, "MainPID"))
			tc.act(t, was)
			another(t, tc.unit, was)
			answers(t)
		})
	}
	eventually(t, "the snapshotter knows its containerd again", func() error {
		s, err := snapshotter.FetchStatus(t.Context(), config.Default().Snapshotter.StatusEndpoint.Path())
		if err == nil && len(s.Problems()) > 0 {
			err = fmt.Errorf("%v", s.Problems())
		}
		return err
	})
}

func kill(t *testing.T, pid int) {
	t.Helper()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
}
