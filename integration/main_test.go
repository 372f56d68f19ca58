// Package integration tests cleave as it is used: the real program between real
// clients and a real containerd with runc, on filesystems of its own. It needs
// root; what it runs against is pinned in integration/toolchain.
package integration

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/integration/toolchain/bin"
	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/janitor"
	"github.com/cleave-cri/cleave/lab/need"
	"github.com/cleave-cri/cleave/lab/node"
	"github.com/cleave-cri/cleave/lab/pod"
)

// The main goroutine stays on the process's first thread. containerd's mount package changes the working folder of the thread that it
// mounts on and gives that up, which Go can't do with the first one: it would keep a test's filesystem busy for ever.
func init() { runtime.LockOSThread() }

func TestMain(m *testing.M) {
	janitor.Main()
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "cleave-integration")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir) //nolint:errcheck,forbidigo // holds one program of ours
	buildCleave = sync.OnceValues(func() (string, error) {
		return node.BuildCleave(context.Background(), dir, true)
	})
	buildFaulty = sync.OnceValues(func() (string, error) {
		return node.BuildCleave(context.Background(), dir, true, "faultpoints")
	})
	return m.Run()
}

// buildCleave builds the program under test, with the race detector, once;
// buildFaulty the same with fault points.
var buildCleave, buildFaulty func() (string, error)

func cleaveBinary(t testing.TB) string {
	t.Helper()
	binary, err := buildCleave()
	if err != nil {
		t.Fatal(err)
	}
	return binary
}

// patience bounds what a test waits for: far longer than it should take on a
// busy machine, far shorter than the test run's own limit.
const patience = 4 * time.Minute

func bounded(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// startNode makes a node with cleave in front and takes it down at the end.
func startNode(t testing.TB, o node.Options) *node.Node {
	t.Helper()
	need.Root(t)
	need.Tools(t, "runc")
	if len(o.Disks) > 0 {
		need.Loop(t)
	}
	run := need.Lab(t)
	peers, err := bin.Get(bounded(t), os.Stderr, "containerd", "shim")
	if err != nil {
		t.Fatal(err)
	}
	o.Containerd, o.Shim = peers[0], peers[1]
	o.Cleave = cleaveBinary(t)
	n, err := node.Start(bounded(t), run, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("cleave's log:\n%s\ncontainerd's log:\n%s", n.Cleave.LogTail(40), n.Runtime.LogTail(40))
		}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := n.Close(ctx); err != nil {
			t.Errorf("take the node down: %v", err)
		}
		noRace(t, n.Cleave)
	})
	return n
}

// stopAtEnd ends a cleave at the end of the test.
func stopAtEnd(t testing.TB, c *node.Cleave) {
	t.Helper()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := c.Stop(ctx); err != nil {
			t.Error(err)
		}
		noRace(t, c)
	})
}

// noRace fails the test if the race detector in a cleave process found one.
func noRace(t testing.TB, c *node.Cleave) {
	t.Helper()
	noRaceIn(t, c.LogFile())
}

func dial(t testing.TB, endpoint string) *pod.Client {
	t.Helper()
	c, err := pod.Dial(endpoint)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

// twoDisks are small filesystems for images and for containers.
func twoDisks(fs disk.FS) []disk.Spec {
	const size = 400 << 20
	return []disk.Spec{{Name: "images", SizeBytes: size, FS: fs}, {Name: "containers", SizeBytes: size, FS: fs}}
}

// startAlone starts a cleave in front of a runtime socket that is not a node's,
// and ends it with the test.
func startAlone(t testing.TB, run *janitor.Run, runtimeSocket string) *node.Cleave {
	t.Helper()
	c := alone(t, run, runtimeSocket)
	if err := c.Start(bounded(t)); err != nil {
		t.Fatal(err)
	}
	stopAtEnd(t, c)
	return c
}

// alone prepares a cleave in front of a runtime socket that is not a node's.
func alone(t testing.TB, run *janitor.Run, runtimeSocket string) *node.Cleave {
	t.Helper()
	n := &node.Node{Run: run}
	c, err := n.Alone(cleaveBinary(t), config.Endpoint(runtimeSocket))
	if err != nil {
		t.Fatal(err)
	}
	return c
}
