package crio

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	stats "k8s.io/kubelet/pkg/apis/stats/v1alpha1"

	"github.com/cleave-cri/cleave/lab/du"
	"github.com/cleave-cri/cleave/lab/kube"
	"github.com/cleave-cri/cleave/lab/node"
)

// longEnv asks for the runs that take minutes; `make test-crio` sets it.
const longEnv = "CLEAVE_CRIO"

func long() bool { return os.Getenv(longEnv) != "" }

// KSS-5, KSS-10, KSS-11: the kubelet sees two disks, each as it is, and each container's writable layer, whichever of cAdvisor's
// handlers it asks first (KSS-8: that is random at each start).
func TestKSS5_TheKubeletSeesTwoDisks(t *testing.T) {
	c := start(t, options{})
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for name, mebibytes := range map[string]int{"twenty": 20, "three": 3} {
		_, err := c.plane.Run(ctx, kube.PodSpec{Name: name, Image: node.BusyboxImage, Command: []string{"sh", "-c",
			fmt.Sprintf("dd if=/dev/zero of=/f bs=1M count=%d; exec sleep 100000", mebibytes)}})
		if err != nil {
			t.Fatal(err)
		}
	}
	most := 2
	if long() {
		most = 20
	}
	orders := map[string]int{}
	for n := range most {
		// A kubelet that starts measures at once; one that runs does so once a minute.
		if err := c.kubelet.Stop(ctx); err != nil {
			t.Fatal(err)
		}
		from := logSize(t, c)
		if err := c.kubelet.Start(ctx); err != nil {
			t.Fatal(err)
		}
		eventually(ctx, t, "the kubelet's summary is right", func() error { return c.summaryIsRight(ctx) })
		order := factoryOrder(t, c, from)
		orders[order]++
		t.Logf("start %d: %s", n+1, order)
		if len(orders) == 2 {
			break
		}
	}
	if long() && len(orders) < 2 {
		t.Errorf("in %d starts cAdvisor asked its handlers in one order only: %v", most, orders)
	}
	// KSS-18: cleave looks at what the kubelet made of the answer.
	eventually(ctx, t, "cleave has seen that the summary is right", func() error {
		status, err := c.node.Cleave.Status(ctx)
		switch {
		case err != nil:
			return err
		case status.CRIO == nil || status.CRIO.Kubelet.Summary == nil:
			return errors.New("it has not looked")
		}
		seen := status.CRIO.Kubelet.Summary
		if told := status.CRIO.Kubelet.Told; seen.RightAt == nil || seen.Wrong != "" || seen.Unknown != "" || told == nil || int(told.Kubelet.PID) != c.kubelet.PID() {
			return fmt.Errorf("it says %+v of the summary, and was asked by %+v", seen, told)
		}
		return nil
	})
	metrics, err := c.node.Cleave.Metrics(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{"cleave_kubelet_told_split 1", "cleave_kubelet_summary_right 1", "cleave_kubelet_problems 0", "cleave_kubelet_unmeasured_containers 0"} {
		if !strings.Contains(metrics, "\n"+line+"\n") {
			t.Errorf("metrics have no line %q:\n%s", line, metrics)
		}
	}
	if status, err := c.node.Cleave.Status(ctx); err != nil || status.CRIO == nil || len(status.CRIO.Problems) > 0 || len(status.CRIO.Unmeasured) > 0 {
		t.Errorf("cleave's status: %+v, %v", status.CRIO, err)
	}
}

// summaryIsRight holds the kubelet's summary against the disks themselves.
func (c *cluster) summaryIsRight(ctx context.Context) error {
	s, err := c.kubelet.Summary(ctx)
	if err != nil {
		return err
	}
	if s.Node.Runtime == nil {
		return fmt.Errorf("no figures of the runtime's disks")
	}
	if err := kube.EqualsDisk(s.Node.Runtime.ImageFs, c.node.Disks[diskImages].Path()); err != nil {
		return fmt.Errorf("imageFs: %w", err)
	}
	if err := kube.EqualsDisk(s.Node.Runtime.ContainerFs, c.node.Disks[diskContainers].Path()); err != nil {
		return fmt.Errorf("containerFs: %w", err)
	}
	if len(s.Pods) == 0 {
		return fmt.Errorf("no pods")
	}
	for _, p := range s.Pods {
		if p.Network == nil || p.Network.RxBytes == nil {
			return fmt.Errorf("pod %s has no network figures", p.PodRef.Name)
		}
		if len(p.Containers) != 1 || p.Containers[0].Name == "" {
			return fmt.Errorf("pod %s has containers %+v", p.PodRef.Name, p.Containers)
		}
		if err := c.rootfsIsRight(ctx, p); err != nil {
			return fmt.Errorf("pod %s: %w", p.PodRef.Name, err)
		}
	}
	return nil
}

func (c *cluster) rootfsIsRight(ctx context.Context, p stats.PodStats) error {
	pod, err := c.plane.Pod(ctx, p.PodRef.Name)
	if err != nil {
		return err
	}
	_, id, _ := strings.Cut(pod.Status.ContainerStatuses[0].ContainerID, "://")
	upper, err := c.node.Runtime.UpperOf(id)
	if err != nil {
		return err
	}
	want, _, err := du.Measure(ctx, upper)
	if err != nil {
		return err
	}
	rootfs := p.Containers[0].Rootfs
	if rootfs == nil || rootfs.UsedBytes == nil {
		return fmt.Errorf("no figure for the writable layer")
	}
	return kube.Within("rootfs.usedBytes", *rootfs.UsedBytes, want)
}

func logSize(t *testing.T, c *cluster) int64 {
	t.Helper()
	info, err := os.Stat(c.kubelet.LogFile())
	if err != nil {
		t.Fatal(err)
	}
	return info.Size()
}

// factoryOrder reads from the kubelet's log in which order cAdvisor registered the two handlers of containers.
func factoryOrder(t *testing.T, c *cluster, from int64) string {
	t.Helper()
	text, err := os.ReadFile(c.kubelet.LogFile())
	if err != nil {
		t.Fatal(err)
	}
	log := string(text[from:])
	crio, containerd := strings.Index(log, "Registration of the crio container factory successfully"), strings.Index(log, "Registration of the containerd container factory successfully")
	if crio < 0 || containerd < 0 {
		t.Fatalf("the log does not say which handlers were registered (%d, %d)", crio, containerd)
	}
	if crio < containerd {
		return "crio first"
	}
	return "containerd first"
}
