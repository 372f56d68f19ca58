package integration

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/agent/rootbind"
	"github.com/cleave-cri/cleave/integration/toolchain/bin"
	"github.com/cleave-cri/cleave/lab/need"
	"github.com/cleave-cri/cleave/lab/node"
	"github.com/cleave-cri/cleave/lab/pod"
	"github.com/cleave-cri/cleave/proxy"
	"github.com/cleave-cri/cleave/proxy/criocompat"
	"github.com/cleave-cri/cleave/proxy/criocompat/containers"
	"github.com/cleave-cri/cleave/proxy/criocompat/nriplugin"
	"github.com/cleave-cri/cleave/proxy/criocompat/podlabel"
	"github.com/cleave-cri/cleave/proxy/unixsock"
)

// crioParts are the parts of mode crio before a real containerd, without the agent.
type crioParts struct {
	plugin *nriplugin.Plugin
	// stop ends the plugin and waits for that; start begins it again.
	stop, start func()
	through     *pod.Client
}

// uppers are roots as the integration test needs them: the folder above the layer.
type uppers struct{ n *node.Node }

func (u uppers) Root(_ context.Context, id string) (string, error) {
	upper, err := u.n.Runtime.UpperOf(id)
	return filepath.Dir(upper), err
}

func newCrioParts(t *testing.T, n *node.Node, direct *pod.Client) *crioParts {
	t.Helper()
	known := containers.New(direct.Runtime, uppers{n})
	p := &crioParts{plugin: nriplugin.New(nriplugin.Config{
		Socket: filepath.Join(n.Runtime.Dir(), "nri.sock"), Created: known.Created,
	})}
	answers := map[string]proxy.AnswerFunc{runtimeapi.RuntimeService_Status_FullMethodName: p.plugin.RuntimeStatus}
	for method, fn := range podlabel.Answers() {
		answers[method] = fn
	}
	requests := map[string]proxy.RequestFunc{}
	for method, fn := range podlabel.Requests() {
		requests[method] = fn
	}
	small := criocompat.New(criocompat.Config{Registry: known})
	server, err := proxy.New(proxy.Config{
		Upstream: n.Runtime.Socket(), Interceptors: answers, Requests: requests, Admit: small.Admit,
		Gates: map[string]proxy.GateFunc{runtimeapi.RuntimeService_CreateContainer_FullMethodName: p.plugin.Wait},
	})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(n.Run.Dir(), "crio.sock")
	l, err := unixsock.Listen(path, unixsock.RootOnly)
	if err != nil {
		t.Fatal(err)
	}
	var served, registered sync.WaitGroup
	served.Go(func() {
		if err := server.Serve(l); err != nil {
			t.Error(err)
		}
	})
	p.start = func() {
		ctx, cancel := context.WithCancel(context.Background())
		registered.Go(func() {
			if err := p.plugin.Run(ctx); err != nil {
				t.Error(err)
			}
		})
		p.stop = func() { cancel(); registered.Wait() }
	}
	p.start()
	t.Cleanup(func() {
		p.stop()
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := errors.Join(server.Drain(ctx), small.Shutdown(ctx)); err != nil {
			t.Error(err)
		}
		served.Wait()
	})
	p.through = dial(t, "unix://"+path)
	return p
}

func (p *crioParts) wait(ctx context.Context, t *testing.T) {
	t.Helper()
	eventually(ctx, t, "the plugin's registration", func() (string, bool) {
		return fmt.Sprintf("%+v", p.plugin.Status()), p.plugin.Registered()
	})
}

// cgroupsOf are the cgroups of a container's first process.
func cgroupsOf(ctx context.Context, t *testing.T, c *pod.Client, id string) string {
	t.Helper()
	answer, err := c.Runtime.ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: id, Verbose: true})
	if err != nil {
		t.Fatal(err)
	}
	var verbose struct {
		PID int `json:"pid"`
	}
	if err := json.Unmarshal([]byte(answer.GetInfo()["info"]), &verbose); err != nil {
		t.Fatal(err)
	}
	cgroups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", verbose.PID))
	if err != nil {
		t.Fatal(err)
	}
	return string(cgroups)
}

// TestCrioPartsBeforeContainerd: with a real containerd and runc containers get
// cgroups that cAdvisor takes and go on working, sandboxes have the label POD where
// containerd keeps them and nowhere where the CRI shows them, and no container is
// made without its name.
func TestCrioPartsBeforeContainerd(t *testing.T) {
	t.Parallel()
	need.Root(t)
	need.Tools(t, "runc")
	run := need.Lab(t)
	peers, err := bin.Get(bounded(t), os.Stderr, "containerd", "shim")
	if err != nil {
		t.Fatal(err)
	}
	n, err := node.Start(bounded(t), run, node.Options{Containerd: peers[0], Shim: peers[1]})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("containerd's log:\n%s", n.Runtime.LogTail(40))
		}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := n.Close(ctx); err != nil {
			t.Errorf("take the node down: %v", err)
		}
	})
	ctx := bounded(t)
	direct := dial(t, n.Runtime.Endpoint())
	if _, err := direct.Pull(ctx, node.BusyboxImage); err != nil {
		t.Fatal(err)
	}
	sleeper := pod.ContainerSpec{Name: "app", Image: node.BusyboxImage, Command: []string{"sleep", "1000"}}

	before, err := direct.Run(ctx, n.PodSpec("before"))
	if err != nil {
		t.Fatal(err)
	}
	old, err := before.Start(ctx, sleeper)
	if err != nil {
		t.Fatal(err)
	}

	parts := newCrioParts(t, n, direct)
	parts.wait(ctx, t)
	if list := parts.plugin.Unmeasured(time.Time{}, func(string) bool { return true }); len(list) != 1 || list[0].ID != old || list[0].Pod != "before" {
		t.Errorf("unmeasured are %v, want the container from before, %s", list, old)
	}

	events, err := parts.through.Runtime.GetContainerEvents(ctx, &runtimeapi.GetEventsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	spec := n.PodSpec("after")
	spec.Labels = map[string]string{"io.kubernetes.pod.name": "after"}
	after, err := parts.through.Run(ctx, spec)
	if err != nil {
		t.Fatal(err)
	}
	labelled := sleeper
	labelled.Labels = map[string]string{podlabel.Label: "app"}
	id, err := after.Start(ctx, labelled)
	if err != nil {
		t.Fatal(err)
	}

	t.Run("cgroup", func(t *testing.T) {
		cgroups := cgroupsOf(ctx, t, direct, id)
		if want := "/crio-" + criocompat.Alias(id) + "-" + id; !strings.Contains(cgroups, want) {
			t.Errorf("the container is in\n%swant %s", cgroups, want)
		}
		stats, err := direct.Stats(ctx, id)
		if err != nil || stats.GetMemory().GetWorkingSetBytes().GetValue() == 0 {
			t.Errorf("containerd's own figures: %v, %v", stats, err)
		}
		if out, err := parts.through.Exec(ctx, id, "echo", "hello"); err != nil || out != "hello\n" {
			t.Errorf("exec: %q, %v", out, err)
		}
	})

	t.Run("container asked for by cAdvisor", func(t *testing.T) {
		got := askAsCAdvisor(ctx, t, filepath.Join(run.Dir(), "crio.sock"), "/containers/"+criocompat.Alias(id))
		var c criocompat.Container
		if err := json.Unmarshal(got, &c); err != nil {
			t.Fatalf("%s: %v", got, err)
		}
		upper, err := n.Runtime.UpperOf(id)
		if err != nil {
			t.Fatal(err)
		}
		own := fmt.Sprintf("/proc/%d/cgroup", c.PID)
		if cgroups, err := os.ReadFile(own); err != nil || !strings.Contains(string(cgroups), criocompat.Alias(id)) {
			t.Errorf("process %d is not the container's: %s, %v", c.PID, cgroups, err)
		}
		if c.Name != id || c.Root != filepath.Dir(upper) || c.Image != node.BusyboxImage || c.CreatedTime == 0 ||
			!maps.Equal(c.Labels, labelled.Labels) {
			t.Errorf("%+v", c)
		}
	})

	t.Run("label", func(t *testing.T) {
		request := &runtimeapi.PodSandboxStatusRequest{PodSandboxId: after.ID, Verbose: true}
		kept, err := direct.Runtime.PodSandboxStatus(ctx, request)
		if err != nil {
			t.Fatal(err)
		}
		if kept.GetStatus().GetLabels()[podlabel.Label] != podlabel.Value || !shows(&runtimeapi.PodSandboxStatusResponse{Info: kept.GetInfo()}) ||
			!shows(&runtimeapi.PodSandboxStatusResponse{Status: kept.GetStatus()}) {
			t.Errorf("containerd does not keep the label: %v", kept)
		}
		shown, err := parts.through.Runtime.PodSandboxStatus(ctx, request)
		if err != nil {
			t.Fatal(err)
		}
		if !maps.Equal(shown.GetStatus().GetLabels(), spec.Labels) || shows(shown) {
			t.Errorf("the label is shown: %v", shown)
		}
		if !json.Valid([]byte(shown.GetInfo()["info"])) {
			t.Errorf("info is no JSON any more: %s", shown.GetInfo()["info"])
		}
		list, err := parts.through.Runtime.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{
			Filter: &runtimeapi.PodSandboxFilter{LabelSelector: spec.Labels},
		})
		if err != nil || len(list.GetItems()) != 1 || shows(list) {
			t.Errorf("the list: %v, %v", list, err)
		}
		stats, err := parts.through.Runtime.ListPodSandboxStats(ctx, &runtimeapi.ListPodSandboxStatsRequest{})
		if err != nil || len(stats.GetStats()) != 2 || shows(stats) {
			t.Errorf("stats: %v, %v", stats, err)
		}
		// The sandbox's making and start and the container's; those of the other pod
		// were kept for whoever listens first.
		for seen := 0; seen < 4; {
			event, err := events.Recv()
			if err != nil {
				t.Fatal(err)
			}
			if shows(event) {
				t.Errorf("an event: %v", event)
			}
			if event.GetPodSandboxStatus().GetId() == after.ID {
				seen++
			}
		}
	})

	t.Run("root", func(t *testing.T) {
		if _, err := parts.through.Exec(ctx, id, "sh", "-c", "echo written >/file"); err != nil {
			t.Fatal(err)
		}
		upper, err := n.Runtime.UpperOf(id)
		if err != nil {
			t.Fatal(err)
		}
		roots, err := rootbind.Open(filepath.Join(run.Dir(), "roots"))
		if err != nil {
			t.Fatal(err)
		}
		root, err := roots.Bind(id, upper)
		if err != nil {
			t.Fatal(err)
		}
		if content, err := os.ReadFile(filepath.Join(root, "diff", "file")); err != nil || string(content) != "written\n" {
			t.Errorf("%q, %v", content, err)
		}
		// containerd removes a container whose layer is bound.
		if err := direct.RemoveContainer(ctx, id); err != nil {
			t.Error(err)
		}
		if removed, err := roots.Tidy(func(string) bool { return false }); err != nil || len(removed) != 1 {
			t.Errorf("tidied %v, %v", removed, err)
		}
		if err := roots.Clear(); err != nil {
			t.Error(err)
		}
	})

	t.Run("plugin away", func(t *testing.T) {
		parts.stop()
		defer func() { parts.start(); parts.wait(ctx, t) }()
		if _, message := readiness(ctx, t, parts.through); !strings.Contains(message, "not registered") {
			t.Errorf("the runtime is ready, or says %q", message)
		}
		if ready, message := readiness(ctx, t, direct); !ready {
			t.Errorf("containerd itself: %q", message)
		}
		began := time.Now()
		_, err := after.Create(ctx, sleeper)
		if status.Code(errors.Unwrap(err)) != codes.Unavailable || !strings.Contains(err.Error(), "not registered") || time.Since(began) < proxy.GateLimit {
			t.Errorf("after %s: %v, want Unavailable after %s", time.Since(began), err, proxy.GateLimit)
		}
	})

	t.Run("containerd restarted", func(t *testing.T) {
		registrations := parts.plugin.Status().Registrations
		if err := n.Runtime.Restart(ctx); err != nil {
			t.Fatal(err)
		}
		eventually(ctx, t, "the plugin's next registration", func() (string, bool) {
			s := parts.plugin.Status()
			return fmt.Sprintf("%+v", s), s.Registered && s.Registrations > registrations
		})
		var next string
		eventually(ctx, t, "the next container", func() (string, bool) {
			var err error
			next, err = after.Start(ctx, sleeper)
			return fmt.Sprint(err), err == nil
		})
		if cgroups := cgroupsOf(ctx, t, direct, next); !strings.Contains(cgroups, criocompat.Alias(next)) {
			t.Errorf("it is in\n%s", cgroups)
		}
		if list := parts.plugin.Unmeasured(time.Time{}, func(string) bool { return true }); len(list) != 1 || list[0].ID != old {
			t.Errorf("unmeasured are %v, want the one from before", list)
		}
	})
	for _, p := range []*pod.Pod{after, before} {
		if err := p.Remove(ctx); err != nil {
			t.Error(err)
		}
	}
}

// shows reports whether a message has the label with the value of sandboxes anywhere,
// texts in JSON included.
func shows(m proto.Message) bool {
	text := strings.NewReplacer(`\`, "", " ", "").Replace(prototext.Format(m))
	return strings.Contains(text, `key:"`+podlabel.Label+`"`+"\n"+`value:"POD"`) || strings.Contains(text, `"`+podlabel.Label+`":"POD"`)
}

// askAsCAdvisor makes a request on a unix socket and returns the answer's body.
func askAsCAdvisor(ctx context.Context, t *testing.T, socket, path string) []byte {
	t.Helper()
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}}
	defer transport.CloseIdleConnections()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://crio"+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	answer, err := transport.RoundTrip(request)
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(answer.Body)
	if err = errors.Join(err, answer.Body.Close()); err != nil || answer.StatusCode != http.StatusOK {
		t.Fatalf("GET %s: %s %s, %v", path, answer.Status, body, err)
	}
	return body
}

// readiness is what the runtime says of itself.
func readiness(ctx context.Context, t *testing.T, c *pod.Client) (ready bool, message string) {
	t.Helper()
	answer, err := c.Runtime.Status(ctx, &runtimeapi.StatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, condition := range answer.GetStatus().GetConditions() {
		if condition.GetType() == runtimeapi.RuntimeReady {
			return condition.GetStatus(), condition.GetMessage()
		}
	}
	t.Fatal("nothing is said of readiness")
	return false, ""
}
