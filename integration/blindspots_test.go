package integration

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/node"
	"github.com/cleave-cri/cleave/lab/pod"
	"github.com/cleave-cri/cleave/lab/runtime"
)

// layerOf asks for one container's writable layer.
func layerOf(ctx context.Context, t *testing.T, c *pod.Client, id string) *runtimeapi.FilesystemUsage {
	t.Helper()
	s, err := c.Stats(ctx, id)
	if err != nil {
		t.Fatal(err)
	}
	return s.GetWritableLayer()
}

// TestCTD13_ChurnIsMeasured: files come and go in a container all the time, at
// which containerd's own walk gives up again and again and reports 0 bytes. The
// figure through cleave, once there is one, never falls to nothing.
func TestCTD13_ChurnIsMeasured(t *testing.T) {
	t.Parallel()
	n := startNode(t, node.Options{})
	ctx := bounded(t)
	through, direct := dial(t, n.Cleave.Endpoint()), dial(t, n.Runtime.Endpoint())
	const big = 20 << 20
	id := startWriter(ctx, t, n, through, "churn", "dd if=/dev/zero of=/big bs=1M count=20; mkdir /d; for i in $(seq 2000); do : > /d/$i; done; touch /ready; "+
		"while true; do touch /d/a /d/b /d/c; rm /d/a /d/b /d/c; done")
	waitForFile(ctx, t, through, id, "/ready")
	eventually(ctx, t, "the first figure", func() (string, bool) {
		got := layerOf(ctx, t, through, id)
		return fmt.Sprint(got), got.GetUsedBytes().GetValue() >= big
	})
	asked, blind := 0, 0
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	// Long enough for two rounds of containerd's own measuring (CTD-9: 10 s each).
	for end := time.Now().Add(22 * time.Second); time.Now().Before(end); asked++ {
		<-tick.C
		got := layerOf(ctx, t, through, id)
		if got.GetUsedBytes().GetValue() < big || got.GetUsedBytes().GetValue() > big+4<<20 || got.GetTimestamp() == 0 || got.GetFsId().GetMountpoint() == "" {
			t.Fatalf("through cleave the layer is %v, want at least %d bytes", got, big)
		}
		if layerOf(ctx, t, direct, id).GetUsedBytes().GetValue() == 0 {
			blind++
		}
	}
	t.Logf("containerd itself said 0 bytes in %d of %d answers", blind, asked)
}

// otherRuntime gives containerd a second runtime with a snapshotter of its own.
func otherRuntime(o *runtime.Options, _ map[string]*disk.Disk) {
	o.ExtraConfig = `
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.other]
runtime_type = "io.containerd.runc.v2"
snapshotter = "native"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.other.options]
Root = "` + o.Dir + `/runc-other"
`
}

// TestCTD14_SecondSnapshotterIsMeasured: a container of a runtime with another
// snapshotter has 0 bytes on no filesystem for containerd, and through cleave
// what it wrote.
func TestCTD14_SecondSnapshotterIsMeasured(t *testing.T) {
	t.Parallel()
	n := startNode(t, node.Options{Runtime: otherRuntime})
	ctx := bounded(t)
	through, direct := dial(t, n.Cleave.Endpoint()), dial(t, n.Runtime.Endpoint())
	if _, err := through.Pull(ctx, node.BusyboxImage); err != nil {
		t.Fatal(err)
	}
	p, err := through.Run(ctx, n.PodSpec("usual"))
	if err != nil {
		t.Fatal(err)
	}
	cfg, ok := proto.Clone(p.Config).(*runtimeapi.PodSandboxConfig)
	if !ok {
		t.Fatal("the clone of a sandbox's configuration is none")
	}
	cfg.Metadata.Name, cfg.Metadata.Uid = "other", "other-"+cfg.GetMetadata().GetUid()
	sandbox, err := through.Runtime.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: cfg, RuntimeHandler: "other"})
	if err != nil {
		t.Fatal(err)
	}
	p.ID, p.Config = sandbox.GetPodSandboxId(), cfg
	id, err := p.Start(ctx, pod.ContainerSpec{
		Name: "writer", Image: node.BusyboxImage,
		Command: []string{"/bin/sh", "-c", "dd if=/dev/zero of=/big bs=1M count=8; touch /ready; sleep 1000"},
	})
	if err != nil {
		t.Fatal(err)
	}
	waitForFile(ctx, t, through, id, "/ready")
	eventually(ctx, t, "the layer through cleave", func() (string, bool) {
		got := layerOf(ctx, t, through, id)
		return fmt.Sprint(got), got.GetUsedBytes().GetValue() >= 8<<20 && got.GetTimestamp() > 0 && got.GetFsId().GetMountpoint() != ""
	})
	if got := layerOf(ctx, t, direct, id); got.GetUsedBytes().GetValue() != 0 || got.GetFsId().GetMountpoint() != "" {
		t.Errorf("CTD-14 no longer holds: containerd says %v", got)
	}
}

// diskMetrics are the disk metrics of one container, by name.
func diskMetrics(ctx context.Context, t *testing.T, c *pod.Client, id string) map[string]uint64 {
	t.Helper()
	answer, err := c.Runtime.ListPodSandboxMetrics(ctx, &runtimeapi.ListPodSandboxMetricsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]uint64{}
	for _, p := range answer.GetPodMetrics() {
		for _, m := range p.GetContainerMetrics() {
			if m.GetContainerId() != id {
				continue
			}
			for _, metric := range m.GetMetrics() {
				if strings.HasPrefix(metric.GetName(), "container_fs_") {
					found[metric.GetName()] = metric.GetValue().GetValue()
				}
			}
		}
	}
	return found
}

// TestDiskMetricsOfPods compares ListPodSandboxMetrics through cleave with du.
func TestDiskMetricsOfPods(t *testing.T) {
	t.Parallel()
	n := startNode(t, node.Options{Disks: twoDisks(disk.Ext4), Runtime: onImagesDisk})
	ctx := bounded(t)
	through := dial(t, n.Cleave.Endpoint())
	id := startWriter(ctx, t, n, through, "metrics", "dd if=/dev/zero of=/big bs=1M count=20; sync; touch /ready; sleep 1000")
	waitForFile(ctx, t, through, id, "/ready")
	want, _ := measure(ctx, t, upperOf(ctx, t, n, id))
	// containerd names the layer's inodes as if they were the filesystem's.
	eventually(ctx, t, "usage and inodes", func() (string, bool) {
		s, err := n.Cleave.Status(ctx)
		if err != nil {
			return err.Error(), false
		}
		var inodes uint64
		for _, fs := range s.Filesystems {
			if fs.Mountpoint == n.Disks["images"].Path() && fs.InodesTotal != nil {
				inodes = *fs.InodesTotal
			}
		}
		got := diskMetrics(ctx, t, through, id)
		return fmt.Sprintf("%v; du says %d bytes, the filesystem has %d inodes", got, want, inodes),
			got["container_fs_usage_bytes"] == want && inodes > 0 && got["container_fs_inodes_total"] == inodes
	})
}

// TestEventsSoonAfterTheRuntimesReturn: containerd was away so long that cleave
// tries at its slowest. From when its own socket answers again it takes a second
// at most until a new event stream is accepted, which then tells events.
func TestEventsSoonAfterTheRuntimesReturn(t *testing.T) {
	t.Parallel()
	n := startNode(t, node.Options{})
	ctx := bounded(t)
	through, direct := dial(t, n.Cleave.Endpoint()), dial(t, n.Runtime.Endpoint())
	if err := n.Runtime.Kill(); err != nil {
		t.Fatal(err)
	}
	away := time.Now()
	eventually(ctx, t, "three seconds of trying", func() (string, bool) {
		_, err := through.Runtime.Version(ctx, versionRequest)
		return fmt.Sprint(err), codeOf(err) == codes.Unavailable && time.Since(away) > 3*time.Second
	})
	started := make(chan error, 1)
	go func() { started <- n.Runtime.Start(ctx) }()
	answers := make(chan time.Time, 1)
	go func() {
		for ctx.Err() == nil {
			// A connection of its own each time, without back-off.
			c, err := pod.Dial(n.Runtime.Endpoint())
			if err != nil {
				break
			}
			_, err = c.Runtime.Version(ctx, versionRequest)
			_ = c.Close() //nolint:errcheck // it was for one question
			if err == nil {
				break
			}
		}
		answers <- time.Now()
	}()
	accepted := make(chan told, 1)
	go func() { accepted <- firstEvent(ctx, through) }()
	if err := <-started; err != nil {
		t.Fatal(err)
	}
	back := <-answers
	if _, err := direct.Pull(ctx, node.BusyboxImage); err != nil {
		t.Fatal(err)
	}
	// A stream that is open by now tells of the first pod.
	var got told
	for i := 0; got.event == nil && got.err == nil; i++ {
		if _, err := direct.Run(ctx, n.PodSpec(fmt.Sprint("told", i))); err != nil {
			t.Fatal(err)
		}
		patient := time.NewTimer(5 * time.Second)
		select {
		case got = <-accepted:
		case <-patient.C:
		}
		patient.Stop()
	}
	if got.err != nil {
		t.Fatal(got.err)
	}
	late := got.opened.Sub(back)
	t.Logf("accepted %s after the runtime's own answer", late)
	if late > time.Second {
		t.Errorf("an event stream is accepted %s after the runtime answers itself, want a second at most", late)
	}
}

// told is the first event of a stream, and when the stream was opened.
type told struct {
	opened time.Time
	event  *runtimeapi.ContainerEventResponse
	err    error
}

// firstEvent opens event streams, one as soon as the one before was refused,
// until one tells something.
func firstEvent(ctx context.Context, c *pod.Client) told {
	for {
		opened := time.Now()
		stream, err := c.Runtime.GetContainerEvents(ctx, eventsRequest)
		if err == nil {
			var event *runtimeapi.ContainerEventResponse
			if event, err = stream.Recv(); err == nil {
				return told{opened, event, nil}
			}
		}
		if codeOf(err) != codes.Unavailable {
			return told{opened, nil, fmt.Errorf("an event stream is refused: %w", err)}
		}
	}
}
