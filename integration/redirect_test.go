package integration

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/integration/toolchain/bin"
	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/node"
	"github.com/cleave-cri/cleave/lab/runtime"
	"github.com/cleave-cri/cleave/snapshot/split/ctdconfig"
)

// redirected is a node whose containerd has moved, with cleave on its socket.
type redirected struct {
	*node.Node
	ctr string
	ctdconfig.Redirect
}

// redirect makes one, as `cleave install --redirect` does it: by the drop-in that
// is planned from the configuration. before runs while containerd is where it was.
func redirect(ctx context.Context, t *testing.T, before func(n *node.Node)) redirected {
	t.Helper()
	n := startNode(t, node.Options{Runtime: func(o *runtime.Options, _ map[string]*disk.Disk) {
		o.Imports = []string{filepath.Join(o.Dir, "conf.d", "*.toml")}
	}})
	peers, err := bin.Get(ctx, os.Stderr, "containerd", "ctr")
	if err != nil {
		t.Fatal(err)
	}
	before(n)
	dropIn := ctdconfig.RedirectBeside(n.Runtime.ConfigFile())
	r, plan, err := ctdconfig.ExamineRedirect(ctx, ctdconfig.Target{Containerd: peers[0], MainFile: n.Runtime.ConfigFile()}, dropIn)
	if err == nil {
		err = plan.Err()
	}
	if err != nil {
		t.Fatal(err)
	}
	if r.From != n.Runtime.Socket() {
		t.Fatalf("containerd is said to listen on %s, and does on %s", r.From, n.Runtime.Socket())
	}
	if err := os.MkdirAll(filepath.Dir(dropIn), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dropIn, plan.Content, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := n.Runtime.Stop(ctx); err != nil {
		t.Fatal(err)
	}
	c, err := n.Another(cleaveBinary(t), "inplace", func(c *config.Config) {
		c.Listen.Endpoint, c.Runtime.Endpoint = config.Endpoint(r.From), config.Endpoint(r.To)
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(ctx); err != nil {
		t.Fatal(err)
	}
	stopAtEnd(t, c)
	// It returns when the CRI answers where containerd was, which is through cleave.
	if err := n.Runtime.Start(ctx); err != nil {
		t.Fatalf("%v\ncleave's log:\n%s", err, c.LogTail(20))
	}
	return redirected{n, peers[1], r}
}

// ctr runs containerd's own client against a socket and returns what it says.
func (r redirected) run(ctx context.Context, socket, namespace, stdin string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, r.ctr, append([]string{"--address", socket, "--namespace", namespace}, args...)...) //nolint:gosec // a program of the toolchain
	cmd.Env = append(os.Environ(), "CONTAINERD_SUPPRESS_DEPRECATION_WARNINGS=1")
	cmd.Stdin = strings.NewReader(stdin)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	return out.String(), err
}

// differs is what differs between two runs of the same commands: times, ages,
// speeds, process numbers and generated names.
var differs = regexp.MustCompile(`\d{4}-\d\d-\d\d[T ][0-9:.]+( ?\+0000 UTC|Z)?|\d+ (seconds?|minutes?)( ago)?|Less than a second( ago)?|elapsed: +[0-9.]+ ?s|[0-9.]+ [KMG]?i?B/s|total: +[0-9.]+ [KMG]?i?B?|in: [0-9.]+m?s|[0-9.]+m?s\b`)

// TestRedirectEqualsContainerd: with cleave in containerd's place ctr does by way
// of it, over images, content, snapshots, leases, tasks, transfers and events, what
// it does with containerd itself; and of a pod that was there before, containerd
// still learns what happens to it.
func TestRedirectEqualsContainerd(t *testing.T) {
	t.Parallel()
	ctx := bounded(t)
	var id string
	r := redirect(ctx, t, func(n *node.Node) {
		id = startWriter(ctx, t, n, dial(t, n.Runtime.Endpoint()), "earlier", "sleep 1000")
	})
	// Names of one length, for tables.
	want := r.course(ctx, t, r.To, "direct1")
	got := r.course(ctx, t, r.From, "through")
	failed := 0
	for _, said := range want {
		if strings.Contains(said, ": exit status ") {
			failed++
		}
	}
	// Content of another size than expected, a command that exits 7, a task that is none.
	if len(want) < 45 || failed != 3 {
		t.Errorf("%d commands were compared, of which %d failed directly, and 3 should:\n%s", len(want), failed, strings.Join(want, "\n"))
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("by way of cleave differs from direct (-direct +through):\n%s", diff)
	}

	events := r.events(ctx, t, "k8s.io")
	if _, err := dial(t, "unix://"+r.From).Runtime.StopContainer(ctx, &runtimeapi.StopContainerRequest{ContainerId: id}); err != nil {
		t.Fatal(err)
	}
	eventually(ctx, t, "the end of a container that an earlier shim has", func() (string, bool) {
		said := events()
		return said, strings.Contains(said, "/tasks/exit") && strings.Contains(said, id)
	})
}

// events are what `ctr events` has said so far, in all namespaces, by way of cleave.
// It returns when the stream is there.
func (r redirected) events(ctx context.Context, t *testing.T, namespace string) func() string {
	t.Helper()
	var mu sync.Mutex
	var said bytes.Buffer // guarded by mu
	ctx, cancel := context.WithCancel(ctx)
	cmd := exec.CommandContext(ctx, r.ctr, "--address", r.From, "--namespace", namespace, "events") //nolint:gosec // a program of the toolchain
	cmd.Stdout = writer(func(p []byte) (int, error) {
		mu.Lock()
		defer mu.Unlock()
		return said.Write(p)
	})
	if err := cmd.Start(); err != nil {
		cancel()
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		_ = cmd.Wait() //nolint:errcheck // it was killed
	})
	all := func() string {
		mu.Lock()
		defer mu.Unlock()
		return said.String()
	}
	n := 0
	eventually(ctx, t, "the stream of events", func() (string, bool) {
		n++
		if out, err := r.run(ctx, r.To, "direct1", "", "namespaces", "label", "direct1", fmt.Sprintf("probe=%d", n)); err != nil {
			return out, false
		}
		return all(), strings.Contains(all(), "/namespaces/update")
	})
	return all
}

type writer func([]byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }

// course runs the same commands against a socket, in a namespace of its own. Each gives a line with what it said, save what differs each time.
func (r redirected) course(ctx context.Context, t *testing.T, socket, namespace string) []string {
	t.Helper()
	const image = node.BusyboxImage
	dir := t.TempDir()
	certs := filepath.Join(r.Run.Dir(), "certs")
	tar := filepath.Join(dir, "image.tar")
	var out []string
	step := func(stdin string, show func(string) string, args ...string) string {
		said, err := r.run(ctx, socket, namespace, stdin, args...)
		if show != nil {
			said = show(said)
		}
		own := strings.NewReplacer(dir, "DIR", namespace, "NAMESPACE")
		said = differs.ReplaceAllString(own.Replace(said), "~")
		out = append(out, fmt.Sprintf("%s: %v\n%s", own.Replace(strings.Join(args, " ")), err, said))
		return said
	}
	quiet := func(string) string { return "" } // progress, which is drawn by the clock
	pids := func(s string) string { return regexp.MustCompile(`\b\d{2,}\b| +`).ReplaceAllString(s, "_") }
	labels := func(s string) string {
		all := strings.Split(strings.TrimSpace(s), ",")
		slices.Sort(all)
		return strings.Join(all, ",")
	}

	step("", nil, "version")
	step("", nil, "plugins", "ls")
	step("", nil, "namespaces", "create", namespace)
	step("", quiet, "images", "pull", "--hosts-dir", certs, "--platform", "linux/amd64", image)
	step("", quiet, "images", "pull", "--local", "--hosts-dir", certs, "--platform", "linux/amd64", node.PauseImage)
	step("", nil, "images", "ls")
	step("", nil, "images", "check")
	list := step("", nil, "content", "ls", "-q")
	for _, digest := range strings.Fields(list) {
		step("", func(s string) string { return fmt.Sprintf("%d bytes, %x", len(s), s[:min(len(s), 64)]) }, "content", "get", digest)
	}
	step("some content", nil, "content", "ingest", "--expected-size", "12", "some-ref")
	step("wrong content", nil, "content", "ingest", "--expected-size", "12", "wrong-ref")
	step("", quiet, "images", "export", "--platform", "linux/amd64", tar, image)
	step("", quiet, "images", "import", "--platform", "linux/amd64", "--index-name", "docker.io/library/again:1", tar)
	step("", nil, "images", "tag", image, "docker.io/library/tagged:1")
	step("", labels, "images", "label", image, "a=b")
	step("", nil, "images", "ls", "-q")
	step("", nil, "leases", "create", "--id", "mine", "--expires", "1h")
	step("", nil, "leases", "ls")
	step("", nil, "snapshots", "ls")
	step("", nil, "snapshots", "prepare", "work")
	step("", nil, "snapshots", "commit", "done", "work")
	step("", nil, "snapshots", "info", "done")
	step("", nil, "snapshots", "usage")
	step("", nil, "snapshots", "rm", "done")
	step("", nil, "run", "-d", "--cgroup", "/"+r.Run.Cgroup()+"/equal", image, "one", "/bin/sleep", "1000")
	step("", pids, "tasks", "ls")
	step("", pids, "tasks", "ps", "one")
	step("", nil, "containers", "ls")
	step("hello", nil, "tasks", "exec", "--exec-id", "e", "one", "/bin/cat")
	step("", nil, "tasks", "exec", "--exec-id", "f", "one", "/bin/sh", "-c", "exit 7")
	step("", nil, "tasks", "pause", "one")
	step("", pids, "tasks", "ls")
	step("", nil, "tasks", "resume", "one")
	step("", nil, "run", "--rm", "--cgroup", "/"+r.Run.Cgroup()+"/equal", image, "two", "/bin/echo", "in front")
	step("", nil, "tasks", "kill", "-s", "SIGKILL", "one")
	step("", nil, "tasks", "delete", "--force", "one")
	step("", nil, "containers", "delete", "one")
	step("", nil, "tasks", "delete", "none")
	step("", nil, "leases", "rm", "mine")
	for _, name := range []string{image, node.PauseImage, "docker.io/library/tagged:1", "docker.io/library/again:1"} {
		step("", nil, "images", "rm", "--sync", name)
	}
	step("", nil, "content", "prune", "references")
	step("", nil, "images", "ls", "-q")
	step("", nil, "content", "ls", "-q")
	step("", nil, "snapshots", "ls")
	return out
}
