package crio

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/integration/matrix/cell"
	"github.com/cleave-cri/cleave/integration/toolchain/bin"
	"github.com/cleave-cri/cleave/lab/kube"
	"github.com/cleave-cri/cleave/lab/need"
	"github.com/cleave-cri/cleave/lab/node"
)

// matrixEnv asks for the compatibility matrix and names the file that its outcomes are added to; `make matrix` sets it.
const matrixEnv = "CLEAVE_MATRIX"

// Every kubelet with every containerd in both modes. A cell that fails is an outcome like another, with its reason, and fails its
// subtest too.
func TestMatrix(t *testing.T) {
	path := os.Getenv(matrixEnv)
	if path == "" {
		t.Skip("sixteen nodes, a quarter of an hour: `make matrix` runs them")
	}
	need.Root(t)
	need.Loop(t)
	need.Tools(t, "runc")
	apiserver, err := bin.Version("apiserver")
	if err != nil {
		t.Fatal(err)
	}
	machine, err := thisMachine(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, kubelet := range cell.Kubelets() {
		for _, containerd := range cell.Containerds() {
			for _, mode := range cell.Modes() {
				t.Run(fmt.Sprintf("%s/%s/%s", kubelet, containerd.Name, mode), func(t *testing.T) {
					o := options{mode: mode, kubelet: kubelet, containerd: containerd}
					key, err := runCell(t, o)
					outcome := cell.Outcome{Key: key, Passed: err == nil, APIServer: apiserver, Machine: machine}
					if err != nil {
						outcome.Reason = firstLine(err)
						t.Error(err)
					}
					if err := cell.Append(path, outcome); err != nil {
						t.Fatal(err)
					}
				})
			}
		}
	}
}

// runCell starts a node and returns what is wrong with it.
func runCell(t *testing.T, o options) (cell.Key, error) {
	t.Helper()
	key := cell.Key{Mode: o.mode}
	var err, err2 error
	key.Kubelet, err = bin.Version(o.kubelet)
	key.Containerd, err2 = bin.Version(o.containerd.Name)
	if err := errors.Join(err, err2); err != nil {
		t.Fatal(err)
	}
	// What can't be built says nothing about the cell.
	if _, err := o.programs(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	c := &cluster{}
	run := need.Lab(t)
	t.Cleanup(func() { c.close(t) })
	if err := c.launch(ctx, t, run, o); err != nil {
		return key, err
	}
	if err := c.runs(ctx, key); err != nil {
		return key, err
	}
	pod := kube.PodSpec{Name: "writer", Image: node.BusyboxImage, Command: []string{"sh", "-c", "dd if=/dev/zero of=/f bs=1M count=20; exec sleep 100000"}}
	if _, err := c.plane.Run(ctx, pod); err != nil {
		return key, err
	}
	if out, err := c.plane.Exec(ctx, "writer", "echo", "hello"); err != nil || out != "hello\n" {
		return key, fmt.Errorf("a command in the pod prints %q: %w", out, err)
	}
	// It measures at its start, and then once a minute.
	if err := c.kubelet.Stop(ctx); err != nil {
		return key, err
	}
	if err := c.kubelet.Start(ctx); err != nil {
		return key, err
	}
	right, what := c.summaryIsRight, "the kubelet's summary is right"
	if o.mode == config.ModeCRI {
		right, what = c.summaryIsUnsplit, "the kubelet's summary is right, without a split"
	}
	if err := until(ctx, what, func() error { return right(ctx) }); err != nil {
		return key, err
	}
	if err := until(ctx, "cleave's status names no problem", func() error { return c.noProblem(ctx, o.mode) }); err != nil {
		return key, err
	}
	p, err := c.plane.Pod(ctx, "writer")
	if err != nil {
		return key, err
	}
	if n := p.Status.ContainerStatuses[0].RestartCount; n != 0 {
		return key, fmt.Errorf("the pod was restarted %d times", n)
	}
	return key, nil
}

// runs holds what the node says that it runs against what the toolchain pins.
func (c *cluster) runs(ctx context.Context, want cell.Key) error {
	n, err := c.kubelet.Node(ctx)
	if err != nil {
		return err
	}
	info := n.Status.NodeInfo
	if info.KubeletVersion != want.Kubelet {
		return fmt.Errorf("the kubelet says that it is %s, not %s", info.KubeletVersion, want.Kubelet)
	}
	_, containerd, _ := strings.Cut(info.ContainerRuntimeVersion, "://")
	if "v"+strings.TrimPrefix(containerd, "v") != want.Containerd {
		return fmt.Errorf("the runtime says that it is %s, not %s", info.ContainerRuntimeVersion, want.Containerd)
	}
	return nil
}

// summaryIsUnsplit holds the summary of a kubelet in mode cri against the disks: figures of the images' disk, which the kubelet takes
// for the containers' too (KSS-2), and each container's writable layer.
func (c *cluster) summaryIsUnsplit(ctx context.Context) error {
	s, err := c.kubelet.Summary(ctx)
	if err != nil {
		return err
	}
	if s.Node.Runtime == nil {
		return errors.New("no figures of the runtime's disks")
	}
	images := c.node.Disks[diskImages].Path()
	if err := kube.EqualsDisk(s.Node.Runtime.ImageFs, images); err != nil {
		return fmt.Errorf("imageFs: %w", err)
	}
	if s.Node.Runtime.ContainerFs != nil {
		if err := kube.EqualsDisk(s.Node.Runtime.ContainerFs, images); err != nil {
			return fmt.Errorf("containerFs: %w", err)
		}
	}
	if len(s.Pods) == 0 {
		return errors.New("no pods")
	}
	for _, p := range s.Pods {
		if len(p.Containers) != 1 || p.Containers[0].Name == "" {
			return fmt.Errorf("pod %s has containers %+v", p.PodRef.Name, p.Containers)
		}
		if err := c.rootfsIsRight(ctx, p); err != nil {
			return fmt.Errorf("pod %s: %w", p.PodRef.Name, err)
		}
	}
	return nil
}

// noProblem asks `cleave status` as people do: lines of things that are wrong begin with an exclamation mark.
func (c *cluster) noProblem(ctx context.Context, mode config.Mode) error {
	page, err := c.node.Split.Run(ctx, "status")
	if err != nil {
		return err
	}
	for line := range strings.Lines(page) {
		if line = strings.TrimSpace(line); strings.HasPrefix(line, "!") {
			return errors.New(line)
		}
	}
	s, err := c.node.Cleave.Status(ctx)
	if err != nil {
		return err
	}
	if mode != config.ModeCRIO {
		return nil
	}
	if s.CRIO == nil || s.CRIO.Kubelet.Told == nil || !s.CRIO.Kubelet.Told.Split {
		return fmt.Errorf("the kubelet was not told of two disks: %+v", s.CRIO)
	}
	if len(s.CRIO.Unmeasured) > 0 {
		return fmt.Errorf("%d containers are not measured", len(s.CRIO.Unmeasured))
	}
	return nil
}

// thisMachine says what the matrix runs on.
func thisMachine(ctx context.Context) (string, error) {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return "", fmt.Errorf("ask for the kernel's version: %w", err)
	}
	var s unix.Statfs_t
	if err := unix.Statfs("/sys/fs/cgroup", &s); err != nil {
		return "", fmt.Errorf("ask for the version of cgroups: %w", err)
	}
	cgroups := "v1"
	if s.Type == unix.CGROUP2_SUPER_MAGIC {
		cgroups = "v2"
	}
	runc, err := exec.CommandContext(ctx, "runc", "--version").Output()
	if err != nil {
		return "", fmt.Errorf("ask for runc's version: %w", err)
	}
	first, _, _ := strings.Cut(strings.TrimSpace(string(runc)), "\n")
	return fmt.Sprintf("Linux %s, cgroups %s, %s", unix.ByteSliceToString(name.Release[:]), cgroups, strings.Replace(first, "runc version", "runc", 1)), nil
}

// firstLine is an error without the logs that follow it.
func firstLine(err error) string {
	first, _, _ := strings.Cut(err.Error(), "\n")
	return first
}
