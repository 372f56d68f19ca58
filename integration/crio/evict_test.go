package crio

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/lab/image"
	"github.com/cleave-cri/cleave/lab/kube"
	"github.com/cleave-cri/cleave/lab/node"
	"github.com/cleave-cri/cleave/lab/pod"
)

// transition is how long there has to be room before a condition ends.
const transition = 5 * time.Second

// eviction are the kubelet's settings for these tests: thresholds that a test reaches within seconds, and no waiting.
func eviction(hard map[string]string) map[string]any {
	all := map[string]string{"memory.available": "10Mi", "nodefs.available": "2%", "nodefs.inodesFree": "1%", "imagefs.available": "2%", "imagefs.inodesFree": "1%"}
	for signal, threshold := range hard {
		all[signal] = threshold
	}
	return map[string]any{
		"evictionHard": all, "evictionPressureTransitionPeriod": transition.String(), "imageMinimumGCAge": "1s", "volumeStatsAggPeriod": "5s",
		"imageGCHighThresholdPercent": 100, "imageGCLowThresholdPercent": 99, // only eviction removes images here
	}
}

// script is a pod that runs a shell script.
func script(name, text string) kube.PodSpec {
	return kube.PodSpec{Name: name, Image: node.BusyboxImage, Command: []string{"sh", "-c", text}, Once: true}
}

// evicted says whether a pod was, and why.
func evicted(p *corev1.Pod) bool {
	return p.Status.Phase == corev1.PodFailed && p.Status.Reason == "Evicted"
}

// stillRuns fails the test if a pod is not as it was started.
func (c *cluster) stillRuns(ctx context.Context, t *testing.T, name string) {
	t.Helper()
	p, err := c.plane.Pod(ctx, name)
	if err != nil {
		t.Errorf("pod %s: %v", name, err)
		return
	}
	if p.Status.Phase != corev1.PodRunning || p.Status.ContainerStatuses[0].RestartCount != 0 {
		t.Errorf("pod %s is %s (%s %s), restarted %d times", name, p.Status.Phase, p.Status.Reason, p.Status.Message, p.Status.ContainerStatuses[0].RestartCount)
	}
}

// pressure says whether the node has DiskPressure.
func (c *cluster) pressure(ctx context.Context) (bool, error) {
	n, err := c.kubelet.Node(ctx)
	if err != nil {
		return false, err
	}
	for _, condition := range n.Status.Conditions {
		if condition.Type == corev1.NodeDiskPressure {
			return condition.Status == corev1.ConditionTrue, nil
		}
	}
	return false, fmt.Errorf("the node has no condition DiskPressure")
}

// KSS-24, the middle row's rule in the third row's time: the kubelet knows what each writable layer holds (its figures are up to a
// minute old), so the one that fills the disk goes, not the one that has most in a volume.
func TestKSS24_TheFillerIsEvictedNotTheInnocent(t *testing.T) {
	c := start(t, options{settings: eviction(map[string]string{"nodefs.available": "60%"})})
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := c.plane.Run(ctx, innocent()); err != nil {
		t.Fatal(err)
	}
	if _, err := c.plane.Run(ctx, script("writer", "dd if=/dev/zero of=/f bs=1M count=300; sleep 100000")); err != nil {
		t.Fatal(err)
	}
	limited, err := c.plane.Run(ctx, kube.PodSpec{
		Name: "limited", Image: node.BusyboxImage, EphemeralStorage: "20Mi", Once: true,
		Command: []string{"sh", "-c", "dd if=/dev/zero of=/f bs=1M count=40; sleep 100000"},
	})
	if err != nil {
		t.Fatal(err)
	}
	bounded, err := c.plane.Run(ctx, kube.PodSpec{
		Name: "bounded", Image: node.BusyboxImage, EmptyDir: "/data", SizeLimit: "20Mi", Once: true,
		Command: []string{"sh", "-c", "dd if=/dev/zero of=/data/f bs=1M count=40; sleep 100000"},
	})
	if err != nil {
		t.Fatal(err)
	}
	// A kubelet that starts measures at once; one that runs does so once a minute.
	if err := errors.Join(c.kubelet.Stop(ctx), c.kubelet.Start(ctx)); err != nil {
		t.Fatal(err)
	}
	// Limits are the kubelet's to enforce, on the writable layer and on volumes.
	for pod, reason := range map[string]string{limited.Name: "exceeds the total limit of containers", bounded.Name: "exceeds the limit"} {
		p, err := c.plane.WaitPod(ctx, pod, "be evicted", evicted)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(strings.ToLower(p.Status.Message), reason) {
			t.Errorf("pod %s was evicted because %q", pod, p.Status.Message)
		}
	}
	eventually(ctx, t, "the kubelet knows what the writer holds", func() error {
		used, err := c.rootfs(ctx, "writer")
		if err == nil && used < 290<<20 {
			err = fmt.Errorf("it thinks %d bytes", used)
		}
		return err
	})
	if on, err := c.pressure(ctx); on || err != nil {
		t.Fatalf("there is disk pressure too early: %v, %v", on, err)
	}
	if _, err := c.plane.Exec(ctx, "writer", "dd", "if=/dev/zero", "of=/g", "bs=1M", "count=500"); err != nil {
		t.Fatal(err)
	}
	p, err := c.plane.WaitPod(ctx, "writer", "be evicted", evicted)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("the writer was evicted: %s", p.Status.Message)
	eventually(ctx, t, "the pressure is over", func() error {
		if on, err := c.pressure(ctx); on || err != nil {
			return fmt.Errorf("pressure is %v, %w", on, err)
		}
		return nil
	})
	c.stillRuns(ctx, t, "innocent")
}

// innocent has 100 MiB in a volume and never writes again.
func innocent() kube.PodSpec {
	s := script("innocent", "dd if=/dev/zero of=/data/f bs=1M count=100; sleep 100000")
	s.EmptyDir = "/data"
	return s
}

// rootfs is what the kubelet thinks that a pod's writable layer holds.
func (c *cluster) rootfs(ctx context.Context, pod string) (uint64, error) {
	s, err := c.kubelet.Summary(ctx)
	if err != nil {
		return 0, err
	}
	for _, p := range s.Pods {
		if p.PodRef.Name == pod && len(p.Containers) == 1 && p.Containers[0].Rootfs != nil && p.Containers[0].Rootfs.UsedBytes != nil {
			return *p.Containers[0].Rootfs.UsedBytes, nil
		}
	}
	return 0, fmt.Errorf("the summary has no figure for pod %s", pod)
}

// Images that nobody uses go when their disk is full; no pod does.
func TestKSS5_UnusedImagesGoBeforeAnyPod(t *testing.T) {
	c := start(t, options{settings: eviction(map[string]string{"imagefs.available": "70%"})})
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := c.plane.Run(ctx, innocent()); err != nil {
		t.Fatal(err)
	}
	client, err := pod.Dial(c.node.Cleave.Endpoint())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close() //nolint:errcheck // only asked
	// The kubelet removes only images that it has seen before, and it looks when it starts and then every five minutes.
	c.fillImages(ctx, t, client, "old", 3)
	if err := errors.Join(c.kubelet.Stop(ctx), c.kubelet.Start(ctx)); err != nil {
		t.Fatal(err)
	}
	eventually(ctx, t, "the kubelet has seen the images", func() error {
		n, err := c.kubelet.Node(ctx)
		if err == nil && !slices.ContainsFunc(n.Status.Images, func(i corev1.ContainerImage) bool { return unusedImage(i.Names) }) {
			err = fmt.Errorf("the node has %v", n.Status.Images)
		}
		return err
	})
	c.fillImages(ctx, t, client, "new", 2)
	eventually(ctx, t, "the images that nobody uses are gone", func() error {
		left, err := c.unusedImages(ctx, client)
		if err == nil && left > 2 {
			err = fmt.Errorf("%d are left", left)
		}
		return err
	})
	eventually(ctx, t, "the pressure is over", func() error {
		if on, err := c.pressure(ctx); on || err != nil {
			return fmt.Errorf("pressure is %v, %w", on, err)
		}
		return nil
	})
	c.stillRuns(ctx, t, "innocent")
}

// fillImages pulls images of 60 MiB that nobody uses.
func (c *cluster) fillImages(ctx context.Context, t *testing.T, client *pod.Client, tag string, count int) {
	t.Helper()
	for n := range count {
		img, err := image.Random(time.Now().UnixNano(), 1, 60<<20)
		if err != nil {
			t.Fatal(err)
		}
		name := fmt.Sprintf("docker.io/library/unused:%s-%d", tag, n)
		if _, err := c.node.Registry.Push(ctx, name, img); err != nil {
			t.Fatal(err)
		}
		if _, err := client.Pull(ctx, name); err != nil {
			t.Fatal(err)
		}
	}
}

func unusedImage(names []string) bool {
	return slices.ContainsFunc(names, func(name string) bool { return strings.Contains(name, "library/unused:") })
}

// unusedImages counts those of fillImages that are still there.
func (c *cluster) unusedImages(ctx context.Context, client *pod.Client) (int, error) {
	answer, err := client.Images.ListImages(ctx, &runtimeapi.ListImagesRequest{})
	if err != nil {
		return 0, err
	}
	left := 0
	for _, image := range answer.GetImages() {
		if unusedImage(image.GetRepoTags()) {
			left++
		}
	}
	return left, nil
}

// fill is a pod that fills its writable layer to 1500 MiB, after it is told to by a file.
func fill(mebibytesPerSecond int) kube.PodSpec {
	write := "dd if=/dev/zero of=/f bs=1M count=1500"
	if mebibytesPerSecond > 0 {
		write = fmt.Sprintf("n=0; while [ $n -lt 1500 ]; do dd if=/dev/zero bs=1M count=%d 2>/dev/null >>/f; n=$((n+%d)); sleep 1; done",
			mebibytesPerSecond, mebibytesPerSecond)
	}
	return script("writer", "while [ ! -e /go ]; do sleep 0.1; done; "+write+"; sleep 100000")
}

// KSS-24 as it was measured: a disk of 2 GiB, 30 % of it to be left, a pod with 100 MiB in a volume, another that fills its writable
// layer to 1500 MiB. Whom does the kubelet evict first?
func TestKSS24_WhoIsEvictedFirst(t *testing.T) {
	for _, tc := range []struct {
		name   string
		direct bool
		rate   int // MiB/s; 0: as fast as it goes
		first  string
		long   bool
	}{
		// Wrong, and what everybody has today: the kubelet on containerd itself ranks by the figures of another disk.
		{"on containerd, 1500 MiB at once", true, 0, "innocent", false},
		// The known limit: the kubelet's figures are up to a minute old, and this took a few seconds.
		{"through cleave, 1500 MiB at once", false, 0, "innocent", true},
		{"through cleave, 10 MiB/s", false, 10, "writer", true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if tc.long && !long() {
				t.Skipf("takes minutes: `make test-crio` runs it")
			}
			c := start(t, options{direct: tc.direct, settings: eviction(map[string]string{"nodefs.available": "30%"})})
			ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
			defer cancel()
			for _, s := range []kube.PodSpec{innocent(), fill(tc.rate)} {
				if _, err := c.plane.Run(ctx, s); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := c.plane.Exec(ctx, "writer", "touch", "/go"); err != nil {
				t.Fatal(err)
			}
			var first string
			eventually(ctx, t, "somebody is evicted", func() error {
				for _, name := range []string{"innocent", "writer"} {
					if p, err := c.plane.Pod(ctx, name); err == nil && evicted(p) {
						first = name
						return nil
					}
				}
				return errors.New("nobody was")
			})
			if first != tc.first {
				t.Errorf("%s was evicted first, want %s", first, tc.first)
			}
			if tc.first == "writer" {
				eventually(ctx, t, "the pressure is over", func() error {
					if on, err := c.pressure(ctx); on || err != nil {
						return fmt.Errorf("pressure is %v, %w", on, err)
					}
					return nil
				})
				c.stillRuns(ctx, t, "innocent")
			}
		})
	}
}
