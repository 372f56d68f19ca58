package integration

import (
	"context"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/lab/image"
	"github.com/cleave-cri/cleave/lab/need"
	"github.com/cleave-cri/cleave/lab/node"
	"github.com/cleave-cri/cleave/lab/pod"
)

var (
	versionRequest = &runtimeapi.VersionRequest{}
	eventsRequest  = &runtimeapi.GetEventsRequest{}
)

func codeOf(err error) codes.Code { return status.Code(err) }

func descriptors(t *testing.T, pid int) int {
	t.Helper()
	list, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

const (
	slowImage = "docker.io/library/slow:1"
	pullTime  = 60 * time.Second
	stopTime  = 30 * time.Second
)

// longCalls starts a pull and a stop that take long, and waits until both have
// reached the runtime.
func longCalls(ctx context.Context, t *testing.T, n *node.Node, id string) (pull, stop <-chan error) {
	t.Helper()
	c := dial(t, n.Cleave.Endpoint())
	before, err := n.Cleave.Status(ctx)
	if err != nil {
		t.Fatal(err)
	}
	pulled, stopped := make(chan error, 1), make(chan error, 1)
	go func() {
		_, err := c.Pull(ctx, slowImage)
		pulled <- err
	}()
	go func() {
		_, err := c.Runtime.StopContainer(ctx, &runtimeapi.StopContainerRequest{ContainerId: id, Timeout: int64(stopTime / time.Second)})
		stopped <- err
	}()
	eventually(ctx, t, "the long calls", func() (string, bool) {
		s, err := n.Cleave.Status(ctx)
		return fmt.Sprintf("%d in flight, %v", s.Proxy.CallsInFlight, err), err == nil && s.Proxy.CallsInFlight >= before.Proxy.CallsInFlight+2
	})
	return pulled, stopped
}

// pushSlow has the registry serve an image that takes pullTime.
func pushSlow(ctx context.Context, t *testing.T, n *node.Node, ref string) {
	t.Helper()
	slow, err := image.Random(1, 1, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := n.Registry.Push(ctx, ref, slow); err != nil {
		t.Fatal(err)
	}
	if err := n.Registry.Slow(ref, pullTime); err != nil {
		t.Fatal(err)
	}
}

// stubborn ignores SIGTERM, so that stopping it takes the whole timeout.
const stubborn = "trap '' TERM; touch /ready; while true; do sleep 1; done"

// TestStopGivesCallsTenSeconds ends cleave with SIGTERM while a pull of 60 s and
// short calls are in flight.
func TestStopGivesCallsTenSeconds(t *testing.T) {
	t.Parallel()
	n := startNode(t, node.Options{})
	ctx := bounded(t)
	pushSlow(ctx, t, n, slowImage)
	c := dial(t, n.Cleave.Endpoint())
	id := startWriter(ctx, t, n, c, "stubborn", stubborn)
	waitForFile(ctx, t, c, id, "/ready")
	pull, stop := longCalls(ctx, t, n, id)
	short := make(chan error, 1)
	go func() {
		_, err := c.Exec(ctx, id, "/bin/sleep", "3")
		short <- err
	}()
	eventually(ctx, t, "the short call", func() (string, bool) {
		s, err := n.Cleave.Status(ctx)
		return fmt.Sprint(s.Proxy.CallsInFlight, err), err == nil && s.Proxy.CallsInFlight >= 3
	})
	if err := n.Cleave.Signal(ctx, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	told := time.Now()
	if err := <-short; err != nil {
		t.Errorf("the short call: %v", err)
	}
	for name, ch := range map[string]<-chan error{"pull": pull, "stop": stop} {
		if err := <-ch; codeOf(err) != codes.Unavailable || !strings.Contains(err.Error(), "cleave") {
			t.Errorf("the long %s ended with %v, want Unavailable from cleave", name, err)
		}
		if had := time.Since(told); had < 9*time.Second || had > 15*time.Second {
			t.Errorf("the long %s had %s to end, want about ten seconds", name, had)
		}
	}
	if err := n.Cleave.Stop(ctx); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(n.Cleave.Socket()); !os.IsNotExist(err) {
		t.Errorf("the socket is still there: %v", err)
	}
}

func waitForFile(ctx context.Context, t *testing.T, c *pod.Client, id, path string) {
	t.Helper()
	eventually(ctx, t, path, func() (string, bool) {
		_, err := c.Exec(ctx, id, "/bin/cat", path)
		return fmt.Sprint(err), err == nil
	})
}

// TestHandoverToABrokenConfigurationIsNone breaks the configuration before the
// handover: the new process ends at once, and the old one goes on.
func TestHandoverToABrokenConfigurationIsNone(t *testing.T) {
	t.Parallel()
	need.Root(t)
	ctx := bounded(t)
	c := startAlone(t, need.Lab(t), "/nonexistent/runtime.sock")
	before, err := c.Status(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(c.ConfigFile(), []byte("version: 1\nmode: perpetual motion\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := c.Signal(ctx, syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	eventually(ctx, t, "the log", func() (string, bool) {
		log := c.LogTail(10)
		return log, strings.Contains(log, "no new process took over") && strings.Contains(log, "config.yaml:2:7")
	})
	after, err := c.Status(ctx)
	if err != nil || after.PID != before.PID {
		t.Errorf("process %d answers (%v), want the old one, %d", after.PID, err, before.PID)
	}
	if _, err := dial(t, c.Endpoint()).Runtime.Version(ctx, versionRequest); codeOf(err) != codes.Unavailable || !strings.Contains(err.Error(), "/nonexistent/runtime.sock") {
		t.Errorf("a call after it: %v", err)
	}
}
