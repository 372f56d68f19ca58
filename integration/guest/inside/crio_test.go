package inside

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	stats "k8s.io/kubelet/pkg/apis/stats/v1alpha1"

	"github.com/cleave-cri/cleave/agent"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/lab/du"
	"github.com/cleave-cri/cleave/lab/guestnode"
	"github.com/cleave-cri/cleave/lab/kube"
	"github.com/cleave-cri/cleave/lab/runtime"
	"github.com/cleave-cri/cleave/proxy/criocompat"
)

// crioEnv is set where cleave is in mode crio.
const crioEnv = "CLEAVE_INSIDE_CRIO"

const (
	imagesDisk     = "/mnt/" + guestnode.ImagesDisk
	containersDisk = "/mnt/" + guestnode.ContainersDisk
	// containerdState is the folder that containerd has by default.
	containerdState = "/run/containerd"
)

// TestCRIO is a course over a node in mode crio as production has it: the unmodified kubelet sees two disks and each container's
// writable layer under the systemd driver and cgroup v2, enforces limits by that, and evicts the one that fills the disk. Its parts
// build on each other.
func TestCRIO(t *testing.T) {
	inGuest(t)
	if os.Getenv(crioEnv) != "1" {
		t.Skip("cleave is not in mode crio: the host's TestCRIO boots a node where it is")
	}
	tellAtEnd(t)
	plane, err := kube.Connect(guestnode.APIServerURL, guestnode.Token, guestnode.NodeName)
	if err != nil {
		t.Fatal(err)
	}
	waitForImages(t, "unix://"+guestnode.CRIOSocket)
	c := crioNode{plane}
	for _, part := range []struct {
		name string
		run  func(*testing.T)
	}{
		{"the kubelet is told of two disks", c.testTold},
		{"pods run", c.testPods},
		{"containers' scopes have names that cAdvisor takes for CRI-O's", c.testScopes},
		{"the kubelet's summary is what the disks say", c.testSummary},
		{"limits are enforced", c.testLimits},
		{"the filler is evicted, not the innocent", c.testEviction},
		{"cleave has nothing to complain of", c.testStatus},
	} {
		if !t.Run(part.name, part.run) {
			t.FailNow()
		}
	}
}

// crioNode is what the parts of TestCRIO share.
type crioNode struct{ plane *kube.ControlPlane }

// Pods of the course.
const (
	innocent = "innocent" // has 3 MiB in its writable layer and 100 MiB in a volume, and never writes again
	writer   = "writer"   // has 300 MiB in its writable layer, and later 500 more
	limited  = "limited"  // writes 40 MiB into its writable layer and may have 20
	bounded  = "bounded"  // writes 40 MiB into a volume that may have 20
)

func (c crioNode) testTold(t *testing.T) {
	eventually(t, "the node is ready", func() error {
		node, err := c.node(t.Context())
		if err != nil {
			return err
		}
		return condition(node, corev1.NodeReady, corev1.ConditionTrue)
	})
	eventually(t, "cleave has told the kubelet", func() error {
		s, err := c.status(t.Context())
		if err != nil {
			return err
		}
		told := s.Kubelet.Told
		if told == nil || !told.Split || told.Unsplit != "" || !s.Plugin.Registered || len(s.Problems) > 0 {
			return fmt.Errorf("told %+v, plugin %+v, problems %v", told, s.Plugin, s.Problems)
		}
		for where, named := range map[string]string{imagesDisk: told.Images.Mountpoint, containersDisk: told.Containers.Mountpoint} {
			if device(t, named) != device(t, where) {
				return fmt.Errorf("the kubelet was told %s for what is on %s", named, where)
			}
		}
		return nil
	})
}

func (c crioNode) testPods(t *testing.T) {
	c.create(t, kube.PodSpec{Name: innocent, EmptyDir: "/data", Command: shell("dd if=/dev/zero of=/f bs=1M count=3; dd if=/dev/zero of=/data/f bs=1M count=100; sleep 100000")})
	c.create(t, kube.PodSpec{Name: writer, Command: shell("dd if=/dev/zero of=/f bs=1M count=300; sleep 100000")})
	for _, name := range []string{innocent, writer} {
		c.wait(t, name, "run", kube.Runs)
	}
}

func (c crioNode) testScopes(t *testing.T) {
	for _, name := range []string{innocent, writer} {
		id, err := c.container(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		want := "crio-" + criocompat.Alias(id) + "-" + id + ".scope"
		found, err := filepath.Glob("/sys/fs/cgroup/kubepods.slice/kubepods-*.slice/kubepods-*-pod*.slice/" + want)
		if err != nil || len(found) != 1 {
			t.Fatalf("of cgroups called %s there are %v, %v", want, found, err)
		}
		if procs := read(t, filepath.Join(found[0], "cgroup.procs")); procs == "" {
			t.Errorf("nobody is in %s", found[0])
		}
		// It is systemd's, not only a folder of that name.
		if state := property(t, want, "ActiveState"); state != "active" {
			t.Errorf("the unit %s is %s", want, state)
		}
	}
}

func (c crioNode) testSummary(t *testing.T) {
	eventually(t, "the kubelet's summary is right", func() error {
		s, err := summary(t.Context())
		if err != nil {
			return err
		}
		if s.Node.Runtime == nil {
			return errors.New("it has no figures of the runtime's disks")
		}
		said := []string{}
		for _, p := range s.Pods {
			if len(p.Containers) > 1 || len(p.Containers) == 1 && p.Containers[0].Name != "main" {
				return fmt.Errorf("pod %s has containers %+v", p.PodRef.Name, p.Containers)
			}
			text, err := c.podIsRight(t.Context(), p)
			if err != nil {
				return fmt.Errorf("pod %s: %w", p.PodRef.Name, err)
			}
			said = append(said, text)
		}
		if len(said) != 2 {
			return fmt.Errorf("it has %d of two pods", len(said))
		}
		for what, is := range map[string]struct {
			got  *stats.FsStats
			disk string
		}{
			"imageFs": {s.Node.Runtime.ImageFs, imagesDisk}, "containerFs": {s.Node.Runtime.ContainerFs, containersDisk}, "node.fs": {s.Node.Fs, containersDisk},
		} {
			if err := kube.EqualsDisk(is.got, is.disk); err != nil {
				return fmt.Errorf("%s: %w", what, err)
			}
		}
		t.Logf("images: %s; containers: %s; %s", figures(s.Node.Runtime.ImageFs), figures(s.Node.Runtime.ContainerFs), strings.Join(said, "; "))
		return nil
	})
}

// podIsRight holds a pod's figures against its layer, and says for people what they are.
func (c crioNode) podIsRight(ctx context.Context, p stats.PodStats) (string, error) {
	if p.Network == nil || p.Network.RxBytes == nil {
		return "", errors.New("no network figures")
	}
	if len(p.Containers) != 1 || p.Containers[0].Rootfs == nil || p.Containers[0].Rootfs.UsedBytes == nil {
		return "", errors.New("no figure for the writable layer")
	}
	id, err := c.container(ctx, p.PodRef.Name)
	if err != nil {
		return "", err
	}
	upper, err := runtime.UpperIn(containerdState, id)
	if err != nil {
		return "", err
	}
	want, _, err := du.Measure(ctx, upper)
	if err != nil {
		return "", err
	}
	used := *p.Containers[0].Rootfs.UsedBytes
	text := fmt.Sprintf("pod %s: the kubelet has %d bytes, du %d; received %d", p.PodRef.Name, used, want, *p.Network.RxBytes)
	return text, kube.Within("rootfs.usedBytes", used, want)
}

// Limits are the kubelet's to enforce, on the writable layer and on volumes.
func (c crioNode) testLimits(t *testing.T) {
	c.create(t, kube.PodSpec{Name: limited, EphemeralStorage: "20Mi", Command: shell("dd if=/dev/zero of=/f bs=1M count=40; sleep 100000")})
	c.create(t, kube.PodSpec{Name: bounded, EmptyDir: "/data", SizeLimit: "20Mi", Command: shell("dd if=/dev/zero of=/data/f bs=1M count=40; sleep 100000")})
	for name, reason := range map[string]string{limited: "exceeds the total limit of containers", bounded: "exceeds the limit"} {
		p := c.evicted(t, name)
		if !strings.Contains(strings.ToLower(p.Status.Message), reason) {
			t.Errorf("pod %s was evicted because %q", name, p.Status.Message)
		}
		t.Logf("pod %s: %s", name, p.Status.Message)
	}
	c.stillRuns(t, innocent)
	c.stillRuns(t, writer)
}

// testEviction is KSS-24 with a fill that the kubelet's figures can follow: it knows what the writer holds before the disk is too
// full.
func (c crioNode) testEviction(t *testing.T) {
	node, err := c.node(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := condition(node, corev1.NodeDiskPressure, corev1.ConditionFalse); err != nil {
		t.Fatalf("too early: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := c.plane.Exec(ctx, writer, "dd", "if=/dev/zero", "of=/g", "bs=1M", "count=500"); err != nil {
		t.Fatal(err)
	}
	p := c.evicted(t, writer)
	if !strings.Contains(p.Status.Message, "ephemeral-storage") {
		t.Errorf("the writer was evicted because %q", p.Status.Message)
	}
	t.Logf("the writer was evicted: %s", p.Status.Message)
	eventually(t, "the pressure is over", func() error {
		node, err := c.node(t.Context())
		if err != nil {
			return err
		}
		return condition(node, corev1.NodeDiskPressure, corev1.ConditionFalse)
	})
	c.stillRuns(t, innocent)
}

func (c crioNode) testStatus(t *testing.T) {
	s, err := c.status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(s.Problems) > 0 || len(s.Unmeasured) > 0 {
		t.Errorf("problems %v, containers without figures %+v", s.Problems, s.Unmeasured)
	}
	for _, unit := range []string{"cleave", "containerd", "cleave-snapshotter", "kubelet"} {
		if n := property(t, unit, "NRestarts"); n != "0" {
			t.Errorf("%s was restarted %s times", unit, n)
		}
	}
}

func (c crioNode) node(ctx context.Context) (*corev1.Node, error) {
	return c.plane.Client().CoreV1().Nodes().Get(ctx, guestnode.NodeName, metav1.GetOptions{})
}

// status is cleave's own on mode crio.
func (c crioNode) status(ctx context.Context) (agent.CRIOStatus, error) {
	s, err := agent.FetchStatus(ctx, config.Default().Control.Endpoint.Path())
	if err != nil {
		return agent.CRIOStatus{}, err
	}
	if s.CRIO == nil {
		return agent.CRIOStatus{}, errors.New("cleave is not in mode crio")
	}
	return *s.CRIO, nil
}

// create creates a pod that is not started again when it has ended.
func (c crioNode) create(t *testing.T, s kube.PodSpec) {
	t.Helper()
	s.Image, s.Once = guestnode.BusyboxImage, true
	if err := c.plane.Create(t.Context(), s); err != nil {
		t.Fatal(err)
	}
}

func shell(script string) []string { return []string{"sh", "-c", script} }

// container is the ID of a pod's only container.
func (c crioNode) container(ctx context.Context, name string) (string, error) {
	p, err := c.plane.Pod(ctx, name)
	if err != nil {
		return "", err
	}
	if len(p.Status.ContainerStatuses) != 1 {
		return "", fmt.Errorf("pod %s has containers %+v", name, p.Status.ContainerStatuses)
	}
	_, id, _ := strings.Cut(p.Status.ContainerStatuses[0].ContainerID, "://")
	return id, nil
}

// wait waits until a pod is as ok wants it; what says for people what that is.
func (c crioNode) wait(t *testing.T, name, what string, ok func(*corev1.Pod) bool) *corev1.Pod {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	p, err := c.plane.WaitPod(ctx, name, what, ok)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func (c crioNode) evicted(t *testing.T, name string) *corev1.Pod {
	t.Helper()
	return c.wait(t, name, "be evicted", func(p *corev1.Pod) bool { return p.Status.Phase == corev1.PodFailed && p.Status.Reason == "Evicted" })
}

// stillRuns fails the test if a pod is not as it was started.
func (c crioNode) stillRuns(t *testing.T, name string) {
	t.Helper()
	p, err := c.plane.Pod(t.Context(), name)
	if err != nil || len(p.Status.ContainerStatuses) != 1 {
		t.Fatalf("pod %s: %v, %v", name, p.Status.ContainerStatuses, err)
	}
	if p.Status.Phase != corev1.PodRunning || p.Status.ContainerStatuses[0].RestartCount != 0 {
		t.Errorf("pod %s is %s (%s %s), restarted %d times", name, p.Status.Phase, p.Status.Reason, p.Status.Message, p.Status.ContainerStatuses[0].RestartCount)
	}
}

// condition is an error if a node's condition is not as it should be.
func condition(node *corev1.Node, kind corev1.NodeConditionType, want corev1.ConditionStatus) error {
	for _, c := range node.Status.Conditions {
		if c.Type != kind {
			continue
		}
		if c.Status != want {
			return fmt.Errorf("%s is %s: %s: %s", kind, c.Status, c.Reason, c.Message)
		}
		return nil
	}
	return fmt.Errorf("the node has no condition %s", kind)
}

// summary is the kubelet's.
func summary(ctx context.Context) (*stats.Summary, error) {
	var s stats.Summary
	if err := ask(ctx, http.MethodGet, guestnode.KubeletURL+"/stats/summary", nil, &s); err != nil {
		return nil, err
	}
	return &s, nil
}

func figures(f *stats.FsStats) string {
	return fmt.Sprintf("%d bytes, %d available", *f.CapacityBytes, *f.AvailableBytes)
}
