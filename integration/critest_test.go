package integration

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	goruntime "runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/integration/toolchain/bin"
	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/enclave"
	"github.com/cleave-cri/cleave/lab/image"
	"github.com/cleave-cri/cleave/lab/need"
	"github.com/cleave-cri/cleave/lab/node"
	"github.com/cleave-cri/cleave/lab/runtime"
)

// focusedSpecs are the critest specs of every test run: quick ones that
// together call most of the CRI, streaming, logs, stats and images included.
var focusedSpecs = []string{
	"Runtime info runtime should support returning runtime info runtime should return version info [Conformance]",
	"Runtime info runtime should support returning runtime info runtime should return runtime conditions [Conformance]",
	"PodSandbox runtime should support basic operations on PodSandbox runtime should support running PodSandbox [Conformance]",
	"PodSandbox runtime should support basic operations on PodSandbox runtime should support stopping PodSandbox [Conformance]",
	"PodSandbox runtime should support basic operations on PodSandbox runtime should support preserving PodSandbox attributes [Conformance]",
	"PodSandbox runtime should support metrics operations runtime should support listing pod sandbox metrics [Conformance]",
	"Container runtime should support basic operations on container runtime should support starting container [Conformance]",
	"Container runtime should support basic operations on container runtime should support stopping container [Conformance]",
	"Container runtime should support basic operations on container runtime should support removing running container [Conformance]",
	"Container runtime should support basic operations on container runtime should support execSync [Conformance]",
	"Container runtime should support basic operations on container runtime should support execSync with timeout [Conformance]",
	"Container runtime should support basic operations on container runtime should support listing container stats [Conformance]",
	"Container runtime should support basic operations on container runtime should support listing stats for containers filtered by labels [Conformance]",
	"Container runtime should support adding volume and device runtime should support starting container with volume [Conformance]",
	"Multiple Containers [Conformance] when running multiple containers in a pod should support network",
	"Multiple Containers [Conformance] when running multiple containers in a pod should support container log",
	"Streaming runtime should support streaming interfaces runtime should support exec with tty=false and stdin=false [Conformance]",
	"Streaming runtime should support streaming interfaces runtime should support portforward [Conformance]",
	"Image Manager public image with tag should be pulled and removed [Conformance]",
	"Image Manager public image should timeout if requested [Conformance]",
	"Image Manager image status should support all kinds of references [Conformance]",
	"Image Manager listImage should get exactly 3 repoTags in the result image [Conformance]",
	"Image Identifier Consistency should return the same image identifier across all APIs [Conformance]",
	"Idempotence StopContainer should not return an error if not found",
	"Security Context NamespaceOption runtime should support HostNetwork is true",
}

// TestCritestPassesTheSameBothWays runs Kubernetes' own specs for container
// runtimes on containerd and on cleave in front of it: some of them, or all.
func TestCritestPassesTheSameBothWays(t *testing.T) {
	t.Parallel()
	if os.Getenv(critestEnv) == "full" {
		critestFull(t)
		return
	}
	direct, through := critestBothWays(t, focusedSpecs)
	for _, name := range focusedSpecs {
		for side, specs := range map[string]map[string]spec{"direct": direct, "through cleave": through} {
			if s, ran := specs[name]; !ran {
				t.Errorf("critest has no spec %q", name)
			} else if !s.passed() {
				t.Errorf("%s: %s: %s: %s", side, name, s.State, s.why())
			}
		}
	}
}

// critestFull runs all of the specs. Those that can't pass on a test machine,
// or not always, are listed in docs/critest.md, each with the reason: no more,
// no less.
func critestFull(t *testing.T) {
	t.Helper()
	direct, through := critestBothWays(t, nil)
	listed := cannotPass(t)
	var both, neither, differing []string
	for _, name := range slices.Sorted(maps.Keys(direct)) {
		switch d, c := direct[name], through[name]; {
		case listed[name] == varies:
			neither = append(neither, fmt.Sprintf("%s: varies: now direct %s, through cleave %s", name, d.State, c.State))
		case d.passed() && c.passed():
			both = append(both, fmt.Sprintf("%s (%.1f s, %.1f s)", name, d.RunTime.Seconds(), c.RunTime.Seconds()))
		case !d.passed() && d.State == c.State:
			neither = append(neither, fmt.Sprintf("%s: %s: %s", name, d.State, d.why()))
		default:
			differing = append(differing, fmt.Sprintf("%s: direct %s %s, through cleave %s %s", name, d.State, d.why(), c.State, c.why()))
		}
	}
	for _, group := range []struct {
		what  string
		specs []string
	}{{"passed both ways", both}, {"passed neither way", neither}, {"different", differing}} {
		fmt.Printf("critest: %d %s\n", len(group.specs), group.what)
		for _, line := range group.specs {
			fmt.Println("  ", line)
		}
	}
	if len(differing) > 0 {
		t.Errorf("%d specs differ:\n%s", len(differing), strings.Join(differing, "\n"))
	}
	for name, s := range direct {
		state, known := listed[name]
		delete(listed, name)
		switch {
		case state == varies:
		case s.passed() && known:
			t.Errorf("%s passes now: take it off %s", name, critestDoc)
		case !s.passed() && !known:
			t.Errorf("%s is not in %s: %s: %s", name, critestDoc, s.State, s.why())
		case known && state != s.State:
			t.Errorf("%s is %s, not %s as %s has it: %s", name, s.State, state, critestDoc, s.why())
		}
	}
	for name := range through {
		if _, ran := direct[name]; !ran {
			t.Errorf("%s ran through cleave only", name)
		}
	}
	for name := range listed {
		t.Errorf("%s is in %s, but critest has no such spec", name, critestDoc)
	}
}

const (
	critestEnv = "CLEAVE_CRITEST" // full: all specs
	critestDoc = "docs/critest.md"

	// varies is said of a spec that passes or not from one run to the next,
	// without cleave: it is not compared.
	varies = "varies"
)

// spec is what a ginkgo report says about one spec.
type spec struct {
	ContainerHierarchyTexts []string
	LeafNodeType            string
	LeafNodeText            string
	State                   string
	RunTime                 time.Duration
	Failure                 struct{ Message string }
}

func (s spec) name() string {
	return strings.TrimPrefix(strings.Join(append(s.ContainerHierarchyTexts, s.LeafNodeText), " "), "[k8s.io] ")
}

func (s spec) passed() bool { return s.State == "passed" }

// why is the first lines of why it did not pass.
func (s spec) why() string {
	lines := strings.Split(strings.TrimSpace(s.Failure.Message), "\n")
	return strings.Join(lines[:min(len(lines), 3)], " | ")
}

// critestBothWays runs specs, or all of them, on containerd and then through
// cleave on the same node, in the same order.
func critestBothWays(t *testing.T, names []string) (direct, through map[string]spec) {
	t.Helper()
	need.Tools(t, "nsenter", "iptables", "ipcmk")
	if _, err := os.Stat(cniPlugins); err != nil {
		need.Skip(t, "no CNI plugins: %v", err)
	}
	critest, err := bin.Path(t.Context(), "critest")
	if err != nil {
		t.Fatal(err)
	}
	removeCgroupsAtEnd(t)
	var own *enclave.Enclave
	n := startNode(t, node.Options{Runtime: func(o *runtime.Options, _ map[string]*disk.Disk) { own = withNetwork(t, o) }})
	// The registry is the machine's, containerd is in the namespace.
	if err := own.Forward(n.Registry.Addr()); err != nil {
		t.Fatal(err)
	}
	pushCritestImages(t, n.Registry)
	side := func(name, endpoint string) map[string]spec {
		begin := time.Now()
		specs := runCritest(t, n, own.Args(critest), name, endpoint, names)
		removeAllPods(t, n)
		passed := 0
		for _, s := range specs {
			if s.passed() {
				passed++
			}
		}
		t.Logf("%s: %d of %d specs passed in %s", name, passed, len(specs), time.Since(begin).Round(100*time.Millisecond))
		return specs
	}
	return side("direct", n.Runtime.Endpoint()), side("through", n.Cleave.Endpoint())
}

const (
	cniPlugins = "/usr/lib/cni" // where Debian puts them
	podSubnet  = "10.88.0.0/16" // nobody else is in the namespace
)

// withNetwork gives a containerd a network namespace of its own, with pod
// networks in it: no bridge, port or packet filter rule is the machine's.
func withNetwork(t *testing.T, o *runtime.Options) *enclave.Enclave {
	t.Helper()
	dir := filepath.Dir(o.Dir)
	own, err := enclave.New(filepath.Join(dir, "enclave"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := own.Close(); err != nil {
			t.Error(err)
		}
	})
	wrappers, conf := filepath.Join(dir, "in-net"), filepath.Join(dir, "cni.d")
	for _, d := range []string{wrappers, conf} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if o.Containerd, err = own.Wrap(wrappers, o.Containerd); err != nil {
		t.Fatal(err)
	}
	o.CNIBinDir, o.CNIConfDir = cniPlugins, conf
	network, err := json.Marshal(map[string]any{
		"cniVersion": "1.0.0", "name": "critest",
		"plugins": []map[string]any{
			{"type": "ptp", "ipam": map[string]any{
				"type": "host-local", "dataDir": filepath.Join(dir, "addresses"),
				"ranges": [][]map[string]string{{{"subnet": podSubnet}}}, "routes": []map[string]string{{"dst": "0.0.0.0/0"}},
			}},
			{"type": "portmap", "capabilities": map[string]bool{"portMappings": true}},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(conf, "critest.conflist"), network, 0o600); err != nil {
		t.Fatal(err)
	}
	return own
}

// pushCritestImages makes the images whose names critest has built in. What
// is in them is what the specs expect of them.
func pushCritestImages(t *testing.T, r *image.Registry) {
	t.Helper()
	const (
		e2e   = "registry.k8s.io/e2e-test-images/"
		tools = "gcr.io/k8s-staging-cri-tools/"
	)
	ctx := t.Context()
	uid, err := buildEffectiveUID(ctx, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	// A pod's first process is seen in its containers: a spec looks for a sleep there and must not find this one's.
	pause := image.Config{Entrypoint: []string{"/bin/sh", "-c", `trap "exit 0" TERM INT; tail -f /dev/null & wait`}}
	// Images that must differ do so by a label; each name is one image.
	labelled := func(label string) image.Config { return image.Config{Labels: map[string]string{"image": label}} }
	// They look like the servers they stand for: name in the log, file with the pid, title of the first process.
	webServer := func(name string, port int) image.Config {
		program := "/usr/sbin/" + name
		return image.Config{
			Entrypoint: []string{program, name + ": master process"},
			Programs: map[string]string{program: fmt.Sprintf(`#!/bin/sh
trap exit TERM
mkdir -p /var/run && echo $$ >/var/run/%[1]s.pid
echo %[1]s serves port %[2]d
httpd -f -p %[2]d -h /srv &
wait
`, name, port)},
			Files: map[string]string{"/srv/index.html": "<p>it works</p>\n"},
		}
	}
	busybox := labelled("busybox")
	// What Debian's busybox lacks.
	busybox.Programs = map[string]string{
		"/bin/pgrep": "#!/bin/sh\nexec pidof \"$@\"\n",
		"/bin/ipcs":  "#!/bin/sh\nexec cat /proc/sysvipc/shm\n",
	}
	images := map[string]image.Config{
		node.PauseImage:                     pause,
		e2e + "busybox:1.29-2":              busybox,
		e2e + "nginx:1.14-2":                webServer("nginx", 80),
		e2e + "httpd:2.4.39-4":              webServer("httpd", 80),
		e2e + "nonewprivs:1.3":              {Entrypoint: []string{"/effectiveuid"}, SetUID: map[string][]byte{"/effectiveuid": uid}},
		tools + "test-image-user-uid":       {User: "1002"},
		tools + "test-image-user-username":  {User: "www-data"},
		tools + "test-image-user-uid-group": {User: "1003:users"},
		tools + "test-image-latest":         labelled("latest"),
		tools + "test-image-tag:test":       labelled("tag"),
		tools + "test-image-tag:all":        labelled("all references"),
		tools + "test-image-1":              labelled("1"),
		tools + "test-image-2":              labelled("2"),
		tools + "test-image-3":              labelled("3"),
		tools + "test-image-tags:1":         labelled("tags"),
		tools + "test-image-tags:2":         labelled("tags"),
		tools + "test-image-tags:3":         labelled("tags"),
		"registry.k8s.io/pause:3.9":         labelled("two registries"),
		"k8s.gcr.io/pause:3.9":              labelled("two registries"),
		tools + "test-image-predefined-group": {
			User: "1000",
			Files: map[string]string{
				"/etc/passwd": "root:x:0:0:root:/root:/bin/sh\ndefault-user:x:1000:1000::/home:/bin/sh\n",
				"/etc/group":  "root:x:0:\ndefault-user:x:1000:\ngroup-defined-in-image:x:50000:default-user\n",
			},
		},
		tools + "test-image-user-username-group": {User: "www-data:100"},
	}
	images[tools+"hostnet-nginx-"+goruntime.GOARCH] = webServer("nginx", 12003)
	for name, config := range images {
		var built v1.Image
		if built, err = image.Busybox(ctx, config); err == nil {
			_, err = r.Push(ctx, name, built)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// buildEffectiveUID builds integration/effectiveuid as a static program.
func buildEffectiveUID(ctx context.Context, dir string) ([]byte, error) {
	path := filepath.Join(dir, "effectiveuid")
	cmd := exec.CommandContext(ctx, "go", "build", "-o", path, "./effectiveuid")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("build effectiveuid: %w\n%s", err, out)
	}
	return os.ReadFile(path)
}

// runCritest runs critest against an endpoint and returns what its report says
// by the specs' names. That specs fail is no error here.
func runCritest(t *testing.T, n *node.Node, argv []string, side, endpoint string, names []string) map[string]spec {
	t.Helper()
	dir := filepath.Join(n.Run.Dir(), side)
	if err := os.Mkdir(dir, 0o755); err != nil { //nolint:gosec // containers run as others mount folders from here
		t.Fatal(err)
	}
	report := filepath.Join(dir, "report.json")
	argv = append(argv,
		"-config="+filepath.Join(dir, "none"), "-runtime-endpoint="+endpoint, "-image-endpoint="+endpoint,
		"-nri-socket="+filepath.Join(n.Runtime.Dir(), "nri.sock"),
		"-ginkgo.seed=1", // the same order on both sides
		"-ginkgo.no-color", "-ginkgo.timeout=25m", "-ginkgo.json-report="+report)
	for _, name := range names {
		argv = append(argv, "-ginkgo.focus="+regexp.QuoteMeta(name)+"$")
	}
	limit := 3 * time.Minute
	if len(names) == 0 {
		limit = 28 * time.Minute
	}
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...) //nolint:gosec // the tool that we built
	var output bytes.Buffer
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, &output, &output
	cmd.Env = append(n.Run.Env(), "TMPDIR="+dir)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGINT) } // it tidies up and still reports
	cmd.WaitDelay = 30 * time.Second
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("%s: run critest: %v", side, err)
	}
	text, err := os.ReadFile(report)
	if err != nil {
		t.Fatalf("%s: critest left no report: %v\n%s", side, err, output.Bytes())
	}
	var suites []struct{ SpecReports []spec }
	if err := json.Unmarshal(text, &suites); err != nil {
		t.Fatalf("%s: read critest's report: %v", side, err)
	}
	specs := map[string]spec{}
	for _, suite := range suites {
		for _, s := range suite.SpecReports {
			switch {
			case s.LeafNodeType != "It":
				if s.State == "failed" { // of the suite, such as BeforeSuite
					t.Errorf("%s: critest's %s failed: %s", side, s.LeafNodeType, s.Failure.Message)
				}
			case strings.Contains(s.name(), "benchmark"): // critest leaves them out unless told to run only them
			case len(names) > 0 && !slices.Contains(names, s.name()):
			default:
				specs[s.name()] = s
			}
		}
	}
	return specs
}

// removeAllPods removes what failed specs may have left.
func removeAllPods(t *testing.T, n *node.Node) {
	t.Helper()
	c := dial(t, n.Runtime.Endpoint())
	ctx := bounded(t)
	answer, err := c.Runtime.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range answer.GetItems() {
		_, err := c.Runtime.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: p.GetId()})
		if err == nil {
			_, err = c.Runtime.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: p.GetId()})
		}
		if err != nil {
			t.Errorf("remove pod %s, left by a spec: %v", p.GetMetadata().GetName(), err)
		}
	}
}

// removeCgroupsAtEnd removes the folder that containerd makes in each hierarchy
// for pods without a cgroup parent, which is what critest's are: if it was not
// there before and nobody else uses it.
func removeCgroupsAtEnd(t *testing.T) {
	t.Helper()
	folders := func() []string {
		var all []string
		for _, pattern := range []string{"/sys/fs/cgroup/k8s.io", "/sys/fs/cgroup/*/k8s.io"} {
			found, err := filepath.Glob(pattern)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, found...)
		}
		return all
	}
	before := folders()
	t.Cleanup(func() {
		for _, f := range folders() {
			if slices.Contains(before, f) {
				continue
			}
			if err := os.Remove(f); err != nil && !errors.Is(err, fs.ErrNotExist) {
				t.Logf("a cgroup of containerd's stays: %v", err)
			}
		}
	})
}

// cannotPass reads the table of docs/critest.md: the state of each spec that
// does not pass, or varies, by name.
func cannotPass(t *testing.T) map[string]string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", critestDoc))
	if err != nil {
		t.Fatal(err)
	}
	row := regexp.MustCompile("(?m)^\\| `(.+)` \\| (skipped|failed|" + varies + ") \\| .+ \\|$")
	listed := map[string]string{}
	for _, m := range row.FindAllStringSubmatch(string(text), -1) {
		listed[m[1]] = m[2]
	}
	return listed
}
