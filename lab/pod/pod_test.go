package pod_test

import (
	"context"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/lab/pod"
)

// fake answers as a runtime would and keeps what it was asked. lab/runtime has the tests against a real one.
type fake struct {
	runtimeapi.UnimplementedRuntimeServiceServer

	mu        sync.Mutex
	sandboxes []*runtimeapi.PodSandboxConfig // guarded by mu
	created   []*runtimeapi.ContainerConfig  // guarded by mu
	asked     int                            // guarded by mu; how often for a container's status
}

func (f *fake) RunPodSandbox(_ context.Context, r *runtimeapi.RunPodSandboxRequest) (*runtimeapi.RunPodSandboxResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sandboxes = append(f.sandboxes, r.GetConfig())
	return &runtimeapi.RunPodSandboxResponse{PodSandboxId: "pod-id"}, nil
}

func (f *fake) CreateContainer(_ context.Context, r *runtimeapi.CreateContainerRequest) (*runtimeapi.CreateContainerResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if r.GetPodSandboxId() != "pod-id" {
		return nil, status.Errorf(codes.NotFound, "no pod %q", r.GetPodSandboxId())
	}
	f.created = append(f.created, r.GetConfig())
	return &runtimeapi.CreateContainerResponse{ContainerId: r.GetConfig().GetMetadata().GetName() + "-id"}, nil
}

func (*fake) StartContainer(context.Context, *runtimeapi.StartContainerRequest) (*runtimeapi.StartContainerResponse, error) {
	return &runtimeapi.StartContainerResponse{}, nil
}

func (*fake) ExecSync(_ context.Context, r *runtimeapi.ExecSyncRequest) (*runtimeapi.ExecSyncResponse, error) {
	if r.GetCmd()[0] == "false" {
		return &runtimeapi.ExecSyncResponse{ExitCode: 1, Stdout: []byte("half"), Stderr: []byte("it broke\n")}, nil
	}
	return &runtimeapi.ExecSyncResponse{Stdout: []byte("done\n")}, nil
}

// ContainerStatus is first unreachable, as during a restart, then running, then ended.
func (f *fake) ContainerStatus(_ context.Context, r *runtimeapi.ContainerStatusRequest) (*runtimeapi.ContainerStatusResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asked++
	switch {
	case r.GetContainerId() == "lost-id":
		return nil, status.Error(codes.NotFound, "lost")
	case f.asked == 1:
		return nil, status.Error(codes.Unavailable, "restarting")
	case f.asked == 2:
		return &runtimeapi.ContainerStatusResponse{Status: &runtimeapi.ContainerStatus{State: runtimeapi.ContainerState_CONTAINER_RUNNING}}, nil
	}
	return &runtimeapi.ContainerStatusResponse{Status: &runtimeapi.ContainerStatus{State: runtimeapi.ContainerState_CONTAINER_EXITED, ExitCode: 5}}, nil
}

func start(t *testing.T) (*fake, *pod.Client) {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "s")
	var lc net.ListenConfig
	listener, err := lc.Listen(t.Context(), "unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	f, server := &fake{}, grpc.NewServer()
	runtimeapi.RegisterRuntimeServiceServer(server, f)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	client, err := pod.Dial("unix://" + socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := client.Close(); err != nil {
			t.Error(err)
		}
		server.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return f, client
}

func TestPodsAreOnTheHostsNetwork(t *testing.T) {
	t.Parallel()
	f, client := start(t)
	p, err := client.Run(t.Context(), pod.Spec{Name: "p", CgroupParent: "/lab", LogDir: "/logs"})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := p.Start(t.Context(), pod.ContainerSpec{Name: "c", Image: "i", Env: map[string]string{"B": "2", "A": "1"}}); err != nil {
			t.Fatal(err)
		}
	}
	edited := func(c *runtimeapi.ContainerConfig) { c.Tty = true }
	id, err := p.Create(t.Context(), pod.ContainerSpec{Name: "d", Image: "i", Edit: edited})
	if err != nil || id != "d-id" {
		t.Fatalf("id is %q (%v)", id, err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	sandbox := f.sandboxes[0]
	if got := sandbox.GetLinux().GetSecurityContext().GetNamespaceOptions().GetNetwork(); got != runtimeapi.NamespaceMode_NODE {
		t.Errorf("the sandbox's network is %s", got)
	}
	if m := sandbox.GetMetadata(); m.GetNamespace() != "default" || m.GetUid() == "" || sandbox.GetLinux().GetCgroupParent() != "/lab" {
		t.Errorf("the sandbox is %v", sandbox)
	}
	for i, c := range f.created {
		if got := c.GetLinux().GetSecurityContext().GetNamespaceOptions().GetNetwork(); got != runtimeapi.NamespaceMode_NODE {
			t.Errorf("the network of container %d is %s", i, got)
		}
		if got := c.GetMetadata().GetAttempt(); int(got) != i {
			t.Errorf("the attempt of container %d is %d", i, got)
		}
	}
	if env := f.created[0].GetEnvs(); len(env) != 2 || env[0].GetKey() != "A" || string(env[0].GetValue()) != "1" {
		t.Errorf("environment is %v", env)
	}
	if got := f.created[2]; !got.GetTty() || got.GetLogPath() != "d.log" {
		t.Errorf("the edited container is %v", got)
	}
}

func TestExec(t *testing.T) {
	t.Parallel()
	_, client := start(t)
	if out, err := client.Exec(t.Context(), "id", "true"); err != nil || out != "done\n" {
		t.Errorf("got %q, %v", out, err)
	}
	out, err := client.Exec(t.Context(), "id", "false")
	if err == nil || !strings.HasSuffix(err.Error(), "exit code 1: it broke") || out != "half" {
		t.Errorf("got %q, %v", out, err)
	}
}

func TestWait(t *testing.T) {
	t.Parallel()
	_, client := start(t)
	if code, err := client.Wait(t.Context(), "c-id"); err != nil || code != 5 {
		t.Errorf("exit code is %d (%v), want 5 in spite of a restart", code, err)
	}
	if _, err := client.Wait(t.Context(), "lost-id"); status.Code(err) != codes.NotFound {
		t.Errorf("got %v, want to be told that the container is lost", err)
	}
}
