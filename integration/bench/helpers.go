package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"os/exec"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// The helpers are this program, started again as processes of their own, as a
// runtime and a proxy would be.
const (
	helperRelay  = "typed-relay"
	helperReplay = "replay"
	helperBytes  = "byte-relay"
)

// outputOfHelper runs a helper to its end and gives what it printed.
func outputOfHelper(ctx context.Context, name string, args ...string) (string, error) {
	executable, err := os.Executable()
	if err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, executable, append([]string{name}, args...)...) //nolint:gosec // ourselves
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("run %s: %w", name, err)
	}
	return string(out), nil
}

// startHelper starts a helper and waits until its socket is there. The function
// that it returns ends it.
func startHelper(ctx context.Context, env []string, socket, name string, args ...string) (stop func() error, _ error) {
	executable, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(executable, append([]string{name}, args...)...) //nolint:gosec,noctx // ourselves
	cmd.Env, cmd.Stderr = env, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	stop = func() error {
		if err := cmd.Process.Kill(); err != nil {
			return err
		}
		_ = cmd.Wait() //nolint:errcheck // killed
		return nil
	}
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for range 500 {
		if _, err := os.Stat(socket); err == nil {
			return stop, nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, errors.Join(ctx.Err(), stop())
		}
	}
	return nil, errors.Join(fmt.Errorf("start %s: no socket", name), stop())
}

// typedRelay is a proxy as one would write it by hand: every message decoded
// and encoded again. It is here to be compared with.
type typedRelay struct {
	runtimeapi.UnimplementedRuntimeServiceServer
	to runtimeapi.RuntimeServiceClient
}

func (r *typedRelay) Version(ctx context.Context, m *runtimeapi.VersionRequest) (*runtimeapi.VersionResponse, error) {
	return r.to.Version(ctx, m)
}

func (r *typedRelay) ListContainers(ctx context.Context, m *runtimeapi.ListContainersRequest) (*runtimeapi.ListContainersResponse, error) {
	return r.to.ListContainers(ctx, m)
}

func serveTypedRelay(ctx context.Context, upstream, socket string) error {
	conn, err := grpc.NewClient("unix://"+upstream, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(math.MaxInt32)))
	if err != nil {
		return err
	}
	return serveTyped(ctx, socket, &typedRelay{to: runtimeapi.NewRuntimeServiceClient(conn)})
}

// serveByteRelay passes bytes between two unix sockets and understands nothing:
// the least that any process in between can cost.
func serveByteRelay(ctx context.Context, upstream, socket string) error {
	l, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	context.AfterFunc(ctx, func() { _ = l.Close() }) //nolint:errcheck // the end
	for {
		caller, err := l.Accept()
		if err != nil {
			return err
		}
		runtime, err := (&net.Dialer{}).DialContext(ctx, "unix", upstream)
		if err != nil {
			return errors.Join(err, caller.Close())
		}
		for _, way := range [][2]net.Conn{{caller, runtime}, {runtime, caller}} {
			// Ends when either side closes; the process is killed at the end.
			go func() {
				buffer := make([]byte, 64<<10)
				// The plain types keep io from splicing: a proxy has to see the bytes.
				_, _ = io.CopyBuffer(struct{ io.Writer }{way[1]}, struct{ io.Reader }{way[0]}, buffer) //nolint:errcheck // one side has gone
				_ = way[1].Close()                                                                     //nolint:errcheck // ditto
			}()
		}
	}
}

// replay answers ListContainers with an answer made once, of half a megabyte.
type replay struct {
	runtimeapi.UnimplementedRuntimeServiceServer
	answer *runtimeapi.ListContainersResponse
}

func (r *replay) ListContainers(context.Context, *runtimeapi.ListContainersRequest) (*runtimeapi.ListContainersResponse, error) {
	return r.answer, nil
}

func (r *replay) Version(context.Context, *runtimeapi.VersionRequest) (*runtimeapi.VersionResponse, error) {
	return &runtimeapi.VersionResponse{Version: "0.1.0", RuntimeName: "replay", RuntimeVersion: "v0", RuntimeApiVersion: "v1"}, nil
}

func serveReplay(ctx context.Context, socket string) error {
	return serveTyped(ctx, socket, &replay{answer: largeAnswer()})
}

func serveTyped(ctx context.Context, socket string, service runtimeapi.RuntimeServiceServer) error {
	l, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	runtimeapi.RegisterRuntimeServiceServer(server, service)
	context.AfterFunc(ctx, server.Stop)
	return server.Serve(l)
}

// largeAnswer is a list as a node with some 500 containers gives it: each with
// the labels and annotations that a kubelet sets.
func largeAnswer() *runtimeapi.ListContainersResponse {
	const size = 500_000
	answer := &runtimeapi.ListContainersResponse{}
	for i, bytes := 0, 0; bytes < size; i++ {
		id := fmt.Sprintf("%064x", i*2654435761)
		c := &runtimeapi.Container{
			Id: id, PodSandboxId: fmt.Sprintf("%064x", i*40503),
			Metadata:    &runtimeapi.ContainerMetadata{Name: fmt.Sprintf("container-%d", i), Attempt: 1},
			Image:       &runtimeapi.ImageSpec{Image: "sha256:" + id, UserSpecifiedImage: "registry.example/team/service:1.2.3"},
			ImageRef:    "sha256:" + id,
			State:       runtimeapi.ContainerState_CONTAINER_RUNNING,
			CreatedAt:   1700000000000000000 + int64(i),
			Labels:      kubeletLabels(fmt.Sprintf("container-%d", i), i),
			Annotations: kubeletAnnotations(),
		}
		answer.Containers = append(answer.Containers, c)
		bytes += sizeOf(c)
	}
	return answer
}

// kubeletLabels are the labels that a kubelet gives to a container
// (kubernetes, pkg/kubelet/kuberuntime/labels.go).
func kubeletLabels(name string, i int) map[string]string {
	return map[string]string{
		"io.kubernetes.container.name": name,
		"io.kubernetes.pod.name":       fmt.Sprintf("service-%d-7f9c6d5b8-x2v4q", i),
		"io.kubernetes.pod.namespace":  "production",
		"io.kubernetes.pod.uid":        fmt.Sprintf("0f1e2d3c-4b5a-6978-8796-%012d", i),
	}
}

// kubeletAnnotations are the annotations that it gives (ditto).
func kubeletAnnotations() map[string]string {
	return map[string]string{
		"io.kubernetes.container.hash":                     "3f2a91bc",
		"io.kubernetes.container.ports":                    `[{"name":"http","containerPort":8080,"protocol":"TCP"}]`,
		"io.kubernetes.container.restartCount":             "1",
		"io.kubernetes.container.terminationMessagePath":   "/dev/termination-log",
		"io.kubernetes.container.terminationMessagePolicy": "File",
		"io.kubernetes.pod.terminationGracePeriod":         "30",
	}
}
