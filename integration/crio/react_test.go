package crio

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/agent"
	"github.com/cleave-cri/cleave/agent/ephemeral"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/kube/report"
	"github.com/cleave-cri/cleave/lab/kube"
	"github.com/cleave-cri/cleave/lab/node"
	"github.com/cleave-cri/cleave/lab/pod"
)

// runsEnv is how often each case of TestKSS24_CleaveEvictsTheFiller is run in the long form; `make test-evictors` sets it.
const runsEnv = "CLEAVE_KSS24_RUNS"

// KSS-24 turned round: cleave's figures are seconds old where the kubelet's are a minute old, so with it the one that fills the disk
// goes, at any speed, and the innocent stays: through the API, or by what labs have without one, which ends the pod's sandbox and leaves
// its record to a kubelet that may run it anew. Both evictors are on.
func TestKSS24_CleaveEvictsTheFiller(t *testing.T) {
	runs := 1
	if v := os.Getenv(runsEnv); v != "" {
		var err error
		if runs, err = strconv.Atoi(v); err != nil || runs < 1 {
			t.Fatalf("%s=%q is no number", runsEnv, v)
		}
	}
	for _, tc := range []struct {
		mode     config.Mode
		separate bool
		by       config.EvictBy
		rate     int
		long     bool
	}{
		{config.ModeCRIO, false, config.EvictByKubernetes, 100, false},
		{config.ModeCRI, false, config.EvictByKubernetes, 100, true},
		{config.ModeCRI, true, config.EvictByKubernetes, 100, true},
		{config.ModeCRIO, false, config.EvictByKubernetes, 10, true},
		{config.ModeCRI, false, config.EvictByKubernetes, 10, true},
		{config.ModeCRIO, false, config.EvictStandalone, 100, true},
		{config.ModeCRI, false, config.EvictStandalone, 100, true},
		{config.ModeCRIO, false, config.EvictStandalone, 10, true},
		{config.ModeCRI, false, config.EvictStandalone, 10, true},
	} {
		layout := engine.Split
		if tc.separate {
			layout = engine.Separate
		}
		t.Run(fmt.Sprintf("%s, %s, by %s, %d MiB a second", tc.mode, layout, tc.by, tc.rate), func(t *testing.T) {
			if tc.long && !long() {
				t.Skipf("takes minutes: `make test-crio` runs it")
			}
			for n := range runs {
				t.Run(fmt.Sprint("run ", n+1), func(t *testing.T) { evictsTheFiller(t, tc.mode, tc.separate, tc.by, tc.rate) })
			}
		})
	}
}

// evictsTheFiller fails the test unless cleave evicts the writer, before the kubelet evicts anybody, and nobody else goes; then its
// containers are gone and its bytes are back, and when the transition period is over the node's condition is, too.
//
// The disk of writable layers has 20 GiB (sparse), of which 94 % are there at the start: so cleave's margin of 2 % is 400 MiB, some
// seconds of the fast writer, in which cleave has to know who writes and have the pod ended. On a disk of 2 GiB it would be 40 MiB, less
// than one burst of that writer, and the kubelet, which looks each 10 s and believes figures of a minute ago, would now and then be first
// and wrong. On a separate node the innocent has more than the writer ever gets, on another disk.
func evictsTheFiller(t *testing.T, mode config.Mode, separate bool, by config.EvictBy, rate int) {
	t.Helper()
	settings := eviction(map[string]string{"nodefs.available": "89%"})
	c := start(t, options{mode: mode, separate: separate, settings: settings, containersBytes: 20 << 30, cleave: func(cfg *config.Config) {
		cfg.Reclaim.Enabled, cfg.Reclaim.Evict, cfg.Reclaim.EvictBy = true, true, by
		cfg.Kube.Events, cfg.Kube.Conditions = true, true
	}})
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	stays := innocent()
	if separate {
		stays.Command = []string{"sh", "-c", "fallocate -l 2000M /data/f; sleep 100000"}
	}
	for _, s := range []kube.PodSpec{stays, fill(rate)} {
		if _, err := c.plane.Run(ctx, s); err != nil {
			t.Fatal(err)
		}
	}
	eventually(ctx, t, "cleave decides", func() error {
		s, err := c.node.Cleave.Status(ctx)
		switch {
		case err != nil:
			return err
		case s.Reclaim == nil || s.Reclaim.LookedAt == nil || s.Reclaim.Problem != "" || s.Reclaim.Outcome != engine.Calm:
			return fmt.Errorf("its status is %+v", s.Reclaim)
		case separate != (s.Layout == fsstats.LayoutSeparate):
			t.Fatalf("the layout is %s", s.Layout)
		}
		return nil
	})
	eventually(ctx, t, "the conditions are there", func() error {
		return c.conditions(ctx, corev1.ConditionFalse, corev1.ConditionFalse, corev1.ConditionFalse)
	})
	containers := c.node.Disks[diskContainers].Path()
	before, err := availableBytes(containers)
	if err != nil {
		t.Fatal(err)
	}
	writer, err := c.plane.Pod(ctx, "writer")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.plane.Exec(ctx, "writer", "touch", "/go"); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	eventually(ctx, t, "the writer is gone", func() error {
		if p, err := c.plane.Pod(ctx, "innocent"); err != nil || evicted(p) {
			t.Fatalf("innocent went first: %v", err)
		}
		p, err := c.plane.Pod(ctx, "writer")
		switch {
		case apierrors.IsNotFound(err):
			return nil
		case err != nil:
			return err
		case evicted(p):
			t.Fatalf("the kubelet was first: %s", p.Status.Message)
		case by == config.EvictStandalone:
			return c.without(ctx, writer.Status.ContainerStatuses[0].ContainerID)
		}
		return errors.New("it is there")
	})
	s, err := c.node.Cleave.Status(ctx)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("gone after %s: %+v", time.Since(began).Round(100*time.Millisecond), s.Reclaim.Counts)
	if s.Reclaim.Counts.Evicted != 1 {
		t.Errorf("cleave evicted %d pods", s.Reclaim.Counts.Evicted)
	}
	if by == config.EvictStandalone { // the API server is told nothing of it
		eventually(ctx, t, "the disk has room", func() error {
			s, err := c.node.Cleave.Status(ctx)
			if err == nil && s.Reclaim.Outcome != engine.Calm {
				err = fmt.Errorf("cleave says %q", s.Reclaim.Outcome)
			}
			return err
		})
		c.stillRuns(ctx, t, "innocent")
		return
	}
	told := c.event(ctx, t, report.Evicting, "writer")
	if told.Regarding.Kind != "Pod" || told.Type != "Warning" || !strings.Contains(told.Note, "bytes, less than") || !strings.Contains(told.Note, "Container main uses") {
		t.Errorf("the event on the writer: %+v", told)
	}
	if told := c.event(ctx, t, report.ThresholdMet, kube.NodeName); !strings.Contains(told.Note, "fs.available < ") || separate && !strings.Contains(told.Note, "containerfs") {
		t.Errorf("the event on the node: %+v", told)
	}
	eventually(ctx, t, "the writer's containers are gone and its bytes are back", func() error {
		if err := c.noContainers(ctx, "writer"); err != nil {
			return err
		}
		now, err := availableBytes(containers)
		if err == nil && now+16<<20 < before {
			err = fmt.Errorf("%d bytes are available of %d that were", now, before)
		}
		return err
	})
	back := time.Now()
	// It looks four times a second.
	eventually(ctx, t, "the log says what came free", func() error {
		if log := c.node.Cleave.LogTail(200); !strings.Contains(log, "a pod was evicted and is gone") || !strings.Contains(log, `"measured":true`) {
			return errors.New("it does not")
		}
		return nil
	})
	eventually(ctx, t, "the conditions say that there is room", func() error {
		return c.conditions(ctx, corev1.ConditionFalse, corev1.ConditionFalse, corev1.ConditionFalse)
	})
	s, err = c.node.Cleave.Status(ctx)
	if err != nil || s.Reclaim.Outcome != engine.Calm || s.Reclaim.Counts.Evicted != 1 {
		t.Errorf("in the end cleave says %+v, %v", s.Reclaim, err)
	}
	// It looks once a second while a threshold is met, and the condition's times are whole seconds.
	if kept := c.since(ctx, t, "CleaveContainerFSPressure").Sub(back); kept < transition-2*time.Second {
		t.Errorf("the condition ended %s after there was room, the transition period is %s", kept, transition)
	}
	for kind, was := range map[corev1.NodeConditionType]bool{"CleaveNodeFSPressure": !separate, "CleaveImageFSPressure": false} {
		if since := c.since(ctx, t, kind); since.After(began) != was {
			t.Errorf("%s is over since %s, was there: %t", kind, since, was)
		}
	}
	if on, err := c.pressure(ctx); on || err != nil {
		t.Errorf("the kubelet has seen pressure: %t, %v", on, err)
	}
	c.stillRuns(ctx, t, "innocent")
}

// noContainers fails while the runtime has a container of a pod.
func (c *cluster) noContainers(ctx context.Context, name string) error {
	client, err := pod.Dial(c.node.Cleave.Endpoint())
	if err != nil {
		return err
	}
	defer client.Close() //nolint:errcheck // only asked
	list, err := client.Runtime.ListContainers(ctx, &runtimeapi.ListContainersRequest{Filter: &runtimeapi.ContainerFilter{
		LabelSelector: map[string]string{"io.kubernetes.pod.name": name},
	}})
	if err == nil && len(list.GetContainers()) > 0 {
		err = fmt.Errorf("there are %d", len(list.GetContainers()))
	}
	return err
}

// since is when a condition of the node was last another one.
func (c *cluster) since(ctx context.Context, t *testing.T, kind corev1.NodeConditionType) time.Time {
	t.Helper()
	n, err := c.kubelet.Node(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, condition := range n.Status.Conditions {
		if condition.Type == kind {
			return condition.LastTransitionTime.Time
		}
	}
	t.Fatalf("the node has no condition %s", kind)
	return time.Time{}
}

// without says that the runtime has a container still, by the API's name for it.
func (c *cluster) without(ctx context.Context, id string) (err error) {
	client, err := pod.Dial(c.node.Runtime.Endpoint())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, client.Close()) }()
	_, id, _ = strings.Cut(id, "://")
	answer, err := client.Runtime.ListContainers(ctx, &runtimeapi.ListContainersRequest{Filter: &runtimeapi.ContainerFilter{Id: id}})
	if err == nil && len(answer.GetContainers()) > 0 {
		err = fmt.Errorf("the runtime has %v", answer.GetContainers())
	}
	return err
}

// event is the last one with a reason that cleave has told about an object.
func (c *cluster) event(ctx context.Context, t *testing.T, reason report.Reason, name string) (found eventsv1.Event) {
	t.Helper()
	eventually(ctx, t, fmt.Sprintf("there is an event %s about %s", reason, name), func() error {
		list, err := c.plane.Client().EventsV1().Events(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, e := range list.Items {
			if e.Reason == string(reason) && e.ReportingController == report.Controller && e.Regarding.Name == name {
				found = e
				return nil
			}
		}
		return fmt.Errorf("there is none among %d", len(list.Items))
	})
	return found
}

// conditions says how those of the node differ from what they should be.
func (c *cluster) conditions(ctx context.Context, node, images, containers corev1.ConditionStatus) error {
	n, err := c.kubelet.Node(ctx)
	if err != nil {
		return err
	}
	got := map[string]corev1.ConditionStatus{}
	for _, condition := range n.Status.Conditions {
		got[string(condition.Type)] = condition.Status
	}
	for kind, want := range map[string]corev1.ConditionStatus{"CleaveNodeFSPressure": node, "CleaveImageFSPressure": images, "CleaveContainerFSPressure": containers} {
		if got[kind] != want {
			err = errors.Join(err, fmt.Errorf("%s is %q", kind, got[kind]))
		}
	}
	return err
}

// wouldGo fails unless the status and `cleave explain` say that a pod would go first on the disk of writable layers, which is no more
// than a ranking: nothing is short.
func (c *cluster) wouldGo(ctx context.Context, name string, bytes int64) error {
	s, err := c.node.Cleave.Status(ctx)
	if err != nil {
		return err
	}
	i := slices.IndexFunc(s.Reclaim.Next, func(n agent.NextPods) bool {
		return n.Signal == engine.NodeFSAvailable || n.Signal == engine.ContainerFSAvailable // one disk
	})
	if i < 0 {
		return fmt.Errorf("nothing is said of that disk: %+v", s.Reclaim)
	}
	n := s.Reclaim.Next[i]
	if n.Met || n.Nobody != "" || n.Count != 1 || len(n.Pods) != 1 || n.Pods[0].Name != name || n.Pods[0].Used == nil || *n.Pods[0].Used < bytes {
		return fmt.Errorf("it is said %+v", n)
	}
	out, err := exec.CommandContext(ctx, c.node.Cleave.Binary(), "explain", name, "--config", c.node.Cleave.ConfigFile()).CombinedOutput() //nolint:gosec // our own
	if err != nil || !strings.Contains(string(out), "/"+name+" would go first: it is number 1 of 1.") {
		return fmt.Errorf("cleave explain says %s: %w", out, err)
	}
	return nil
}

// tainted says whether cleave's taint is on the node.
func (c *cluster) tainted(ctx context.Context) (bool, error) {
	n, err := c.kubelet.Node(ctx)
	if err != nil {
		return false, err
	}
	return slices.ContainsFunc(n.Spec.Taints, func(taint corev1.Taint) bool {
		return taint.Key == report.TaintKey && taint.Effect == corev1.TaintEffectNoSchedule
	}), nil
}

// TestANodeThatIsFullTakesNoPods: a disk fills up to where cleave would act, if it might evict, and the kubelet does not. The cluster
// sees it, and no pod comes but those that tolerate it; when there is room again all of that ends.
func TestANodeThatIsFullTakesNoPods(t *testing.T) {
	const kubeletPercent, oursPercent = 30, 32
	c := start(t, options{
		mode: config.ModeCRI, account: true, settings: eviction(map[string]string{"nodefs.available": fmt.Sprintf("%d%%", kubeletPercent)}),
		cleave: func(cfg *config.Config) {
			cfg.Reclaim.Enabled = true
			cfg.Kube = config.Kube{Admission: true, Conditions: true, Events: true, Taint: true}
		},
	})
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := c.plane.Run(ctx, innocent()); err != nil {
		t.Fatal(err)
	}
	eventually(ctx, t, "the conditions say that there is room", func() error {
		return c.conditions(ctx, corev1.ConditionFalse, corev1.ConditionFalse, corev1.ConditionFalse)
	})
	eventually(ctx, t, "cleave knows what the innocent has", func() error {
		s, err := c.node.Cleave.Status(ctx)
		if err == nil && !slices.ContainsFunc(s.Pods, func(u ephemeral.Usage) bool {
			return u.Name == "innocent" && u.Kubelet != nil && u.Kubelet.Bytes >= 100<<20
		}) {
			err = fmt.Errorf("it knows %+v", s.Pods)
		}
		return err
	})
	eventually(ctx, t, "it is told that the innocent would go first", func() error { return c.wouldGo(ctx, "innocent", 100<<20) })
	disk := c.node.Disks[diskContainers].Path()
	var fs unix.Statfs_t
	if err := unix.Statfs(disk, &fs); err != nil {
		t.Fatal(err)
	}
	size, block := int64(fs.Blocks)*fs.Bsize, fs.Bsize //nolint:gosec // 2 GiB
	left := size * (kubeletPercent + oursPercent) / 200
	hog, err := os.Create(filepath.Join(disk, "hog"))
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(unix.Fallocate(int(hog.Fd()), 0, 0, int64(fs.Bavail)*block-left), hog.Close()); err != nil { //nolint:gosec // 2 GiB
		t.Fatal(err)
	}
	eventually(ctx, t, "the conditions say that the disk is short", func() error {
		return c.conditions(ctx, corev1.ConditionTrue, corev1.ConditionFalse, corev1.ConditionTrue)
	})
	eventually(ctx, t, "the node is tainted", func() error {
		if on, err := c.tainted(ctx); !on || err != nil {
			return fmt.Errorf("tainted: %t, %w", on, err)
		}
		return nil
	})
	// What fills it is no pod's, so that not even a report names the innocent.
	if told := c.event(ctx, t, report.HeldFire, kube.NodeName); !strings.Contains(told.Note, "most of what grew is no pod's") {
		t.Errorf("why nobody goes: %q", told.Note)
	}
	if _, err := c.plane.Run(ctx, script("tolerant", "sleep 100000")); err != nil {
		t.Fatal(err)
	}
	usual := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "usual", Namespace: kube.Namespace}, Spec: corev1.PodSpec{
		NodeName: kube.NodeName, Containers: []corev1.Container{{Name: "main", Image: node.BusyboxImage, Command: []string{"sleep", "100000"}, ImagePullPolicy: corev1.PullIfNotPresent}},
	}}
	if _, err := c.plane.Client().CoreV1().Pods(kube.Namespace).Create(ctx, usual, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	p, err := c.plane.WaitPod(ctx, "usual", "be refused", func(p *corev1.Pod) bool {
		return len(p.Status.ContainerStatuses) == 1 && p.Status.ContainerStatuses[0].State.Waiting != nil && p.Status.ContainerStatuses[0].State.Waiting.Reason == "CreateContainerError"
	})
	if err != nil {
		t.Fatal(err)
	}
	if said := p.Status.ContainerStatuses[0].State.Waiting.Message; !strings.Contains(said, "is full, so no container is made") || !strings.Contains(said, "left") {
		t.Errorf("it was refused because %q", said)
	}
	if on, err := c.pressure(ctx); on || err != nil {
		t.Errorf("the kubelet saw it, too: %t, %v", on, err)
	}
	c.stillRuns(ctx, t, "innocent")
	if err := os.Remove(filepath.Join(disk, "hog")); err != nil {
		t.Fatal(err)
	}
	eventually(ctx, t, "the conditions say that there is room again", func() error {
		return c.conditions(ctx, corev1.ConditionFalse, corev1.ConditionFalse, corev1.ConditionFalse)
	})
	eventually(ctx, t, "the taint is gone", func() error {
		if on, err := c.tainted(ctx); on || err != nil {
			return fmt.Errorf("tainted: %t, %w", on, err)
		}
		return nil
	})
	// The kubelet tries again with "usual", too, but takes its time.
	usual.Name = "later"
	if _, err := c.plane.Client().CoreV1().Pods(kube.Namespace).Create(ctx, usual, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.plane.WaitPod(ctx, "later", "run", kube.Runs); err != nil {
		t.Fatal(err)
	}
	c.stillRuns(ctx, t, "innocent")
}
