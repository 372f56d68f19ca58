package lab

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// A node is made, looked at, and taken down, as docs/lab.md says; another one is not
// made meanwhile, and the first one does not notice.
func TestUpAndDown(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	if out, code := l.run(t, "ls"); code != 0 || !strings.Contains(out, "no lab is up") {
		t.Errorf("ls: %d: %s", code, out)
	}
	if out, code := l.run(t, "shell", "--", "true"); code == 0 || !strings.Contains(out, "no lab is up: make one with `cleave lab up`") {
		t.Errorf("shell: %d: %s", code, out)
	}
	out, code := l.run(t, "up", "--layout", "separate", "--size", "200Mi", "--images-size", "200Mi", "--containers-size", "100Mi")
	if code != 0 {
		t.Fatalf("up: %d: %s", code, out)
	}
	if again, code := l.run(t, "up"); code == 0 || !strings.Contains(again, "a lab is up already") || !strings.Contains(again, "`cleave lab down` ends it") {
		t.Errorf("a second one: %d: %s", code, again)
	}
	out, code = l.run(t, "ls")
	for _, want := range []string{"layout separate, mode cri", "containers  100.0Mi  ext4", "containerfs"} {
		if code != 0 || !strings.Contains(out, want) || strings.Contains(out, "has ended") {
			t.Errorf("ls: %d: no %q in %s", code, want, out)
		}
	}
	out, code = l.run(t, "shell", "--", "sh", "-c", `cleave status --control "$CLEAVE_CONTROL" && ctr -n k8s.io images ls -q && echo "$CONTAINER_RUNTIME_ENDPOINT"`)
	for _, want := range []string{"Layout: separate", "registry.lab/app:1", "cleave.sock"} {
		if code != 0 || !strings.Contains(out, want) {
			t.Errorf("shell: %d: no %q in %s", code, want, out)
		}
	}
	if out, code = l.run(t, "shell", "--", "false"); code == 0 {
		t.Errorf("a command that fails: %s", out)
	}
	if out, code = l.run(t, "down"); code != 0 || !strings.Contains(out, "took down "+l.tmp) {
		t.Errorf("down: %d: %s", code, out)
	}
	if left := l.left(); len(left) > 0 {
		t.Errorf("left: %s", left)
	}
	if out, code = l.run(t, "down"); code != 0 || !strings.Contains(out, "no lab is up") {
		t.Errorf("down again: %d: %s", code, out)
	}
}

// A node with a real kubelet is a node as any other, in namespaces of its own: its
// kubelet took cleave for CRI-O, its API server has the node, and the machine has no
// socket of CRI-O's.
func TestUpWithAKubelet(t *testing.T) {
	t.Parallel()
	if os.Getenv(allEnv) != "all" {
		t.Skip("integration/crio has kubelets at that time: `make lab-all` runs it")
	}
	const socket = "/var/run/crio/crio.sock"
	outside := exists(socket)
	l := newLab(t)
	l.addKubelet(t)
	if out, code := l.run(t, "up", "--kubelet", "--mode", "crio", "--layout", "split", "--size", "600Mi", "--images-size", "400Mi"); code != 0 {
		t.Fatalf("up: %d: %s", code, out)
	}
	out, code := l.run(t, "ls")
	for _, want := range []string{"layout split, mode crio, a real kubelet", "containerfs"} {
		if code != 0 || !strings.Contains(out, want) || strings.Contains(out, "has ended") {
			t.Errorf("ls: %d: no %q in %s", code, want, out)
		}
	}
	own, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		t.Fatal(err)
	}
	out, code = l.run(t, "shell", "--", "sh", "-ec", `readlink /proc/self/ns/mnt; test -S `+socket+`; cleave allocatable --control "$CLEAVE_CONTROL"; cleave status --control "$CLEAVE_CONTROL"`)
	for _, want := range []string{"Layout: split", "node publishes "} {
		if code != 0 || !strings.Contains(out, want) || strings.Contains(out, own) {
			t.Errorf("shell: %d: no %q, or the machine's own namespace %s, in %s", code, want, own, out)
		}
	}
	if exists(socket) != outside {
		t.Errorf("%s came up on the machine itself", socket)
	}
	if out, code = l.run(t, "down"); code != 0 || !strings.Contains(out, "took down "+l.tmp) {
		t.Errorf("down: %d: %s", code, out)
	}
	if left := l.left(); len(left) > 0 {
		t.Errorf("left: %s", left)
	}
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// Whatever ends a run, nothing is left of it.
func TestABrokenRunLeavesNothing(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name, at string
		signal   syscall.Signal
		code     int
	}{
		{"Ctrl-C while disks are made", "make 2 filesystems", syscall.SIGINT, 1},
		{"killed while images are pulled", "pull 2 images", syscall.SIGKILL, -1},
		{"Ctrl-C while it is played", "cleave decides", syscall.SIGINT, 1},
		{"killed while it is played", "cleave decides", syscall.SIGKILL, -1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t)
			cmd := l.command(t.Context(), "run", filepath.Join(folder, "greedy-split.yaml"))
			said, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			lines := bufio.NewScanner(said)
			for lines.Scan() && !strings.Contains(lines.Text(), tc.at) {
			}
			if err := cmd.Process.Signal(tc.signal); err != nil {
				t.Fatal(err)
			}
			for lines.Scan() {
			}
			_ = cmd.Wait() //nolint:errcheck // its code is looked at
			if code := cmd.ProcessState.ExitCode(); code != tc.code {
				t.Errorf("exit code %d, want %d", code, tc.code)
			}
			l.waitNothingLeft(t)
		})
	}
}

// What can't be is refused with a line that says what to do, and nothing is left.
func TestBadInput(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	write := func(name, text string) string {
		path := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil { //nolint:gosec // somebody else reads it
			t.Fatal(err)
		}
		return path
	}
	const good = "version: 1\ntitle: t\nlasts: 1s\nfilesystems: {disk: {size: 100Mi}}\n"
	plain := write("good.yaml", good)
	bare := t.TempDir() // a PATH without containerd
	for _, tool := range []string{"mount", "umount", "runc", "mkfs.ext4"} {
		path, err := exec.LookPath(tool)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(path, filepath.Join(bare, tool)); err != nil {
			t.Fatal(err)
		}
	}
	full := t.TempDir()                                                                                                                                                 // a mount that finds no loop device
	if err := os.WriteFile(filepath.Join(full, "mount"), []byte("#!/bin/sh\necho 'mount: failed to setup loop device for image.' >&2\nexit 32\n"), 0o700); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name, path string
		args       []string
		want       string
		nobody     bool
	}{
		{"no such file", "", []string{"run", "none.yaml"}, "read scenario: open none.yaml: no such file", false},
		{"an unknown key", "", []string{"run", write("key.yaml", good+"pods: {web: {conainers: {}}}\n")}, `key.yaml:5:14: pods.web.conainers: unknown key; did you mean "containers"?`, false},
		{"a disk that is too small", "", []string{"run", write("small.yaml", strings.Replace(good, "100Mi", "1Mi", 1))}, "filesystems.disk: 1Mi is too small for ext4, which wants at least 32Mi", false},
		{"a disk that is too small for xfs", "", []string{"run", "--fs", "xfs", plain}, "filesystems.disk: 100Mi is too small for xfs, which wants at least 300Mi", false},
		{"a disk that is too large", "", []string{"run", write("large.yaml", strings.Replace(good, "100Mi", "1Pi", 1))}, "the disks may grow to", false},
		{"what only the simulator can do", "", []string{"run", write("sim.yaml", good+"faults: [{kind: stale stats}]\n")}, `faults[0]: "stale stats" is for the simulator`, false},
		{"a layout that is none", "", []string{"up", "--layout", "triple"}, `--layout "triple": choose single, dedicated, split or separate`, false},
		{"a size that is none", "", []string{"up", "--size", "much"}, `--size "much": "much" must be a number of bytes`, false},
		{"a filesystem that is none", "", []string{"up", "--fs", "fat"}, `--fs "fat": choose ext4, xfs or btrfs`, false},
		{"mode crio with a stand-in", "", []string{"up", "--mode", "crio"}, "only a real kubelet takes cleave for CRI-O: add --kubelet", false},
		{"mode crio on three disks", "", []string{"up", "--kubelet", "--mode", "crio", "--layout", "separate"}, "can't know three disks apart: choose cri, or another layout", false},
		{"the decisions of a stand-in", "", []string{"run", "--profile", "kubelet", plain}, "the lab's stand-in for a kubelet evicts nobody: add --kubelet", false},
		{"what a real kubelet does not do", "", []string{"run", "--kubelet", folder + "/dead-containers.yaml"}, "pods.crashing.app: restartsAfter: a real kubelet waits", false},
		{"no kubelet", bare, []string{"up", "--kubelet"}, "there is no kubelet in PATH: name the folder that has it with --bin-dir", false},
		{"no containerd", bare, []string{"up"}, "there is no containerd in PATH: install it, or name it with --containerd", false},
		{"another containerd that is not there", "", []string{"up", "--containerd", "/none/containerd"}, "--containerd /none/containerd: there is no such program", false},
		{"a program that needs libraries", "", []string{"up", "--cleave", "/bin/sh"}, "needs libraries, and containers of the lab run it", false},
		{"no loop device", full + ":" + l.path, []string{"run", plain}, "no loop device can be had", false},
		{"nobody in particular", "", []string{"run", plain}, "run it as root", true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cmd := l.command(t.Context(), tc.args...)
			if tc.path != "" {
				cmd.Env = append(cmd.Env, "PATH="+tc.path)
			}
			if tc.nobody {
				cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
				open(t, l.cleave, plain)
			}
			out, err := cmd.CombinedOutput()
			if code := cmd.ProcessState.ExitCode(); err == nil || code != 1 || !strings.Contains(string(out), tc.want) {
				t.Errorf("exit code %d, want 1 and %q:\n%s", code, tc.want, out)
			}
			if left := l.left(); len(left) > 0 {
				t.Errorf("left: %s", left)
			}
		})
	}
}

// open lets everybody reach a file.
func open(t *testing.T, files ...string) {
	t.Helper()
	for _, f := range files {
		for dir := filepath.Dir(f); dir != "/" && dir != "/tmp"; dir = filepath.Dir(dir) {
			if err := os.Chmod(dir, 0o755); err != nil { //nolint:gosec // the test's own folders
				t.Fatal(err)
			}
		}
	}
}
