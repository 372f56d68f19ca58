package runtime_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cleave-cri/cleave/integration/toolchain/bin"
	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/image"
	"github.com/cleave-cri/cleave/lab/janitor"
	"github.com/cleave-cri/cleave/lab/need"
	"github.com/cleave-cri/cleave/lab/pod"
	"github.com/cleave-cri/cleave/lab/runtime"
)

const (
	pauseImage   = "registry.k8s.io/pause:3.10"
	busyboxImage = "docker.io/library/busybox:1"
)

// setUp makes a registry with the two images and a containerd that is not started yet.
func setUp(t *testing.T, run *janitor.Run, o runtime.Options) (*runtime.Containerd, *image.Registry) {
	t.Helper()
	need.Tools(t, "runc")
	registry, err := image.Serve(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := registry.Close(); err != nil {
			t.Error(err)
		}
	})
	pause, err := image.Pause(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	busybox, err := image.Busybox(t.Context(), image.Config{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := registry.Push(t.Context(), pauseImage, pause); err != nil {
		t.Fatal(err)
	}
	if _, err := registry.Push(t.Context(), busyboxImage, busybox); err != nil {
		t.Fatal(err)
	}
	o.Dir = filepath.Join(run.Dir(), "ctd")
	o.CertsDir = filepath.Join(run.Dir(), "certs")
	o.Cgroup = run.Cgroup()
	if err := registry.WriteHosts(o.CertsDir); err != nil {
		t.Fatal(err)
	}
	if o.Containerd, err = bin.Path(t.Context(), "containerd"); err != nil {
		t.Fatal(err)
	}
	if o.Shim, err = bin.Path(t.Context(), "shim"); err != nil {
		t.Fatal(err)
	}
	c, err := runtime.New(o)
	if err != nil {
		t.Fatal(err)
	}
	return c, registry
}

func TestPodOnItsOwnDiskSurvivesRestarts(t *testing.T) {
	t.Parallel()
	need.Loop(t)
	run := need.Lab(t)
	ctx := t.Context()
	writable, err := disk.Make(ctx, run.Dir(), disk.Spec{Name: "w", SizeBytes: 128 << 20})
	if err != nil {
		t.Fatal(err)
	}
	c, registry := setUp(t, run, runtime.Options{SnapshotterRoots: map[string]string{"overlayfs": filepath.Join(writable.Path(), "snapshots")}})
	if err := c.Start(ctx); err != nil {
		t.Fatal(err)
	}
	if err := c.Start(ctx); err == nil {
		t.Error("a second start of a running containerd was taken")
	}
	client, err := pod.Dial(c.Endpoint())
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := client.Close(); err != nil {
			t.Error(err)
		}
	}()
	if _, err := client.Pull(ctx, busyboxImage); err != nil {
		t.Fatal(err)
	}
	p, err := client.Run(ctx, pod.Spec{Name: "p", CgroupParent: c.CgroupParent(), LogDir: filepath.Join(run.Dir(), "logs", "p")})
	if err != nil {
		t.Fatalf("%v\n%s", err, c.LogTail(20))
	}
	id, err := p.Start(ctx, pod.ContainerSpec{Name: "c", Image: busyboxImage, Env: map[string]string{"WHO": "lab"}, Command: []string{"sh", "-c", "echo hello $WHO; exec sleep 3600"}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.Exec(ctx, id, "dd", "if=/dev/zero", "of=/data", "bs=1M", "count=3"); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Exec(ctx, id, "sh", "-c", "echo oops >&2; exit 3"); err == nil || !strings.Contains(err.Error(), "exit code 3: oops") {
		t.Errorf("a failing command gave %v, want its exit code and what it said", err)
	}
	found, err := filepath.Glob(filepath.Join(writable.Path(), "snapshots", "snapshots", "*", "fs", "data"))
	if err != nil || len(found) != 1 {
		t.Errorf("the container's file is not on the disk of the snapshotter: %v %v", found, err)
	}
	for i := range 3 {
		if err := c.Kill(); err != nil {
			t.Fatal(err)
		}
		if c.PID() != 0 {
			t.Fatal("killed, but it has a pid")
		}
		if err := c.Start(ctx); err != nil {
			t.Fatalf("start %d after a kill: %v", i, err)
		}
	}
	if err := c.Restart(ctx); err != nil {
		t.Fatal(err)
	}
	out, err := client.Exec(ctx, id, "stat", "-c", "%s", "/data")
	if err != nil {
		t.Fatal(err)
	}
	if want := strconv.Itoa(3<<20) + "\n"; out != want {
		t.Errorf("after restarts the file has %q bytes, want %q", out, want)
	}
	if _, err := client.Stats(ctx, id); err != nil {
		t.Error(err)
	}
	logged, err := os.ReadFile(filepath.Join(run.Dir(), "logs", "p", "c.log"))
	if err != nil || !strings.Contains(string(logged), "hello lab") {
		t.Errorf("log is %q (%v), want hello lab in it", logged, err)
	}
	short, err := p.Start(ctx, pod.ContainerSpec{Name: "short", Image: busyboxImage, Command: []string{"sh", "-c", "exit 7"}})
	if err != nil {
		t.Fatal(err)
	}
	if code, err := client.Wait(ctx, short); err != nil || code != 7 {
		t.Errorf("exit code is %d (%v), want 7", code, err)
	}
	slow, err := image.Random(1, 2, 100_000)
	if err != nil {
		t.Fatal(err)
	}
	const slowImage = "example.org/slow:1"
	if _, err := registry.Push(ctx, slowImage, slow); err != nil {
		t.Fatal(err)
	}
	if err := registry.Slow(slowImage, time.Second); err != nil {
		t.Fatal(err)
	}
	pulling := time.Now()
	if _, err := client.Pull(ctx, slowImage); err != nil {
		t.Error(err)
	}
	if took := time.Since(pulling); took < 900*time.Millisecond {
		t.Errorf("a slow pull took %s, want about a second at least", took)
	}
	if err := p.Remove(ctx); err != nil {
		t.Error(err)
	}
	if err := c.Close(ctx); err != nil {
		t.Error(err)
	}
}

// Whoever runs a pod and goes away without a word must leave no process and no mount behind, not even of a pod that
// named no cgroup.
func TestCloseEndsPodsThatStillRun(t *testing.T) {
	t.Parallel()
	need.Root(t)
	run := need.Lab(t)
	ctx := t.Context()
	c, _ := setUp(t, run, runtime.Options{})
	if err := c.Start(ctx); err != nil {
		t.Fatal(err)
	}
	client, err := pod.Dial(c.Endpoint())
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := client.Close(); err != nil {
			t.Error(err)
		}
	}()
	if _, err := client.Pull(ctx, busyboxImage); err != nil {
		t.Fatal(err)
	}
	unique := strconv.Itoa(os.Getpid()) + "77"
	for name, parent := range map[string]string{"named": c.CgroupParent(), "unnamed": ""} {
		p, err := client.Run(ctx, pod.Spec{Name: name, CgroupParent: parent})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := p.Start(ctx, pod.ContainerSpec{Name: "c", Image: busyboxImage, Command: []string{"sh", "-c", "sleep " + unique + " & exec sleep " + unique}}); err != nil {
			t.Fatal(err)
		}
	}
	if n := count(t, unique); n < 4 {
		t.Fatalf("%d processes run, want 4", n)
	}
	if err := c.Close(ctx); err != nil {
		t.Fatal(err)
	}
	if n := count(t, unique); n != 0 {
		t.Errorf("%d of the pods' processes still run", n)
	}
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(table), run.Dir()) {
		t.Errorf("something is still mounted below %s", run.Dir())
	}
}

// count counts processes that have an argument with this text in it.
func count(t *testing.T, text string) int {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, f := range files {
		if args, err := os.ReadFile(f); err == nil && strings.Contains(string(args), text) {
			n++
		}
	}
	return n
}

func TestStartTellsWhyItFailed(t *testing.T) {
	t.Parallel()
	need.Root(t)
	run := need.Lab(t)
	c, _ := setUp(t, run, runtime.Options{ExtraConfig: "this is no TOML"})
	err := c.Start(t.Context())
	if err == nil || !strings.Contains(err.Error(), "it ended with exit status") || !strings.Contains(err.Error(), "TOML") && !strings.Contains(err.Error(), "toml") {
		t.Errorf("got %v, want the exit status and the end of the log", err)
	}
	if err := c.Close(context.WithoutCancel(t.Context())); err != nil {
		t.Error(err)
	}
}

// Two containerds on one machine must share nothing: the last one to start would take the other's NRI socket, say.
func TestNothingIsShared(t *testing.T) {
	t.Parallel()
	need.Root(t)
	run := need.Lab(t)
	c, _ := setUp(t, run, runtime.Options{SnapshotterRoots: map[string]string{"overlayfs": "/elsewhere/o", "native": "/elsewhere/n"}})
	containerd, err := bin.Path(t.Context(), "containerd")
	if err != nil {
		t.Fatal(err)
	}
	dump, err := exec.CommandContext(t.Context(), containerd, "--config", c.ConfigFile(), "config", "dump").Output()
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(dump)) {
		_, value, ok := strings.Cut(strings.TrimSpace(line), " = ")
		value = strings.Trim(value, "[]'\"")
		// Not ours: ocicrypt's are for a program that is not there, and of imports only what a file itself lists is read.
		if !ok || !strings.HasPrefix(value, "/") || strings.Contains(line, "ocicrypt") || strings.HasPrefix(line, "imports") {
			continue
		}
		if !strings.HasPrefix(value, run.Dir()+"/") && !strings.HasPrefix(value, "/elsewhere/") {
			t.Errorf("outside the run's folder: %s", strings.TrimSpace(line))
		}
	}
	for _, want := range []string{"/elsewhere/o", "/elsewhere/n", run.Dir() + "/ctd/nri.sock", run.Dir() + "/certs", run.Dir() + "/ctd/root"} {
		if !strings.Contains(string(dump), want) {
			t.Errorf("the configuration does not name %s", want)
		}
	}
}

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	shim := filepath.Join(t.TempDir(), "containerd-shim-runc-v2")
	if err := os.WriteFile(shim, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	good := runtime.Options{Dir: "/tmp/x", Containerd: shim, Shim: shim}
	for _, tc := range []struct {
		name string
		edit func(*runtime.Options)
		want string
	}{
		{"relative folder", func(o *runtime.Options) { o.Dir = "x" }, "absolute"},
		{"folder too long for sockets", func(o *runtime.Options) { o.Dir = "/" + strings.Repeat("x", 60) }, "21 bytes too long"},
		{"no containerd", func(o *runtime.Options) { o.Containerd = "/nowhere" }, "make toolchain"},
		{"shim by another name", func(o *runtime.Options) { o.Shim = "/nowhere" }, "containerd-shim-runc-v2"},
		{"line break in a path", func(o *runtime.Options) { o.Root = "/a\nb" }, "control characters"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			o := good
			tc.edit(&o)
			if _, err := runtime.New(o); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want an error with %q", err, tc.want)
			}
		})
	}
}
