// Package pod runs pods through any CRI endpoint, containerd's own or one in front of it: host-network pods, which need
// no CNI plugin, with containers that write, wait or fail as a test needs.
//
// For integration tests, the demo and the lab.
package pod

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	imagesapi "github.com/containerd/containerd/api/services/images/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/fieldmaskpb"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const (
	// callLimit bounds a call whose context has no earlier deadline: two seconds, crictl's default, are too few on a busy machine.
	callLimit = time.Minute
	// pullLimit is the same for PullImage.
	pullLimit = 5 * time.Minute
	// maxMessageBytes is the largest answer taken, well above what containerd sends.
	maxMessageBytes = 64 << 20
)

// Client talks to one CRI endpoint. Runtime and Images are the services themselves, for calls without a helper here.
type Client struct {
	Runtime runtimeapi.RuntimeServiceClient
	Images  runtimeapi.ImageServiceClient

	conn *grpc.ClientConn
}

// Dial makes a client for an endpoint such as unix:///run/containerd/containerd.sock. It connects with the first call.
func Dial(endpoint string) (*Client, error) {
	conn, err := grpc.NewClient(endpoint,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessageBytes), grpc.MaxCallSendMsgSize(maxMessageBytes)))
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", endpoint, err)
	}
	return &Client{Runtime: runtimeapi.NewRuntimeServiceClient(conn), Images: runtimeapi.NewImageServiceClient(conn), conn: conn}, nil
}

// Conn is the connection, for calls that are no CRI methods.
func (c *Client) Conn() *grpc.ClientConn { return c.conn }

// Close closes the connection.
func (c *Client) Close() error { return c.conn.Close() }

// Pull pulls an image and returns its reference, as CRI gives it.
func (c *Client) Pull(ctx context.Context, image string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, pullLimit)
	defer cancel()
	answer, err := c.Images.PullImage(ctx, &runtimeapi.PullImageRequest{Image: &runtimeapi.ImageSpec{Image: image}})
	if err != nil {
		return "", fmt.Errorf("pull %s: %w", image, err)
	}
	return answer.GetImageRef(), nil
}

// namespace is containerd's for what the CRI has; pinned is the label of an image that the CRI calls pinned.
const (
	namespace = "k8s.io"
	pinned    = "io.cri-containerd.pinned"
)

// Pin marks an image, by one of its names in containerd, as one that is never collected.
func (c *Client) Pin(ctx context.Context, name string) error {
	ctx = metadata.AppendToOutgoingContext(ctx, "containerd-namespace", namespace)
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	images := imagesapi.NewImagesClient(c.conn)
	got, err := images.Get(ctx, &imagesapi.GetImageRequest{Name: name})
	if err != nil {
		return fmt.Errorf("pin %s: %w", name, err)
	}
	own := got.GetImage()
	if own.Labels == nil {
		own.Labels = map[string]string{}
	}
	own.Labels[pinned] = "pinned"
	if _, err := images.Update(ctx, &imagesapi.UpdateImageRequest{Image: own, UpdateMask: &fieldmaskpb.FieldMask{Paths: []string{"labels." + pinned}}}); err != nil {
		return fmt.Errorf("pin %s: %w", name, err)
	}
	return nil
}

// Spec says what pod to run.
type Spec struct {
	// Name of the pod; required.
	Name string
	// Namespace; empty means default.
	Namespace string
	// UID; empty means a random one.
	UID string
	// CgroupParent as CRI wants it, such as runtime.Containerd.CgroupParent gives it.
	CgroupParent string
	// LogDir is the folder of the containers' logs; empty means that nothing is logged.
	LogDir string
	// Labels and Annotations of the sandbox.
	Labels, Annotations map[string]string
}

// Pod is a running pod.
type Pod struct {
	// ID of the sandbox.
	ID string
	// Config is what the sandbox was made with.
	Config *runtimeapi.PodSandboxConfig

	client   *Client
	attempts atomic.Uint32
}

// Run runs a pod's sandbox on the host's network.
func (c *Client) Run(ctx context.Context, s Spec) (*Pod, error) {
	if s.Namespace == "" {
		s.Namespace = "default"
	}
	if s.UID == "" {
		s.UID = strings.ToLower(rand.Text())
	}
	config := &runtimeapi.PodSandboxConfig{
		Metadata:     &runtimeapi.PodSandboxMetadata{Name: s.Name, Namespace: s.Namespace, Uid: s.UID},
		LogDirectory: s.LogDir,
		Labels:       s.Labels,
		Annotations:  s.Annotations,
		Linux: &runtimeapi.LinuxPodSandboxConfig{
			CgroupParent:    s.CgroupParent,
			SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{NamespaceOptions: hostNetwork()},
		},
	}
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	answer, err := c.Runtime.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: config})
	if err != nil {
		return nil, fmt.Errorf("run pod %s/%s: %w", s.Namespace, s.Name, err)
	}
	return &Pod{ID: answer.GetPodSandboxId(), Config: config, client: c}, nil
}

// hostNetwork must be in both the pod's and the containers' configurations.
func hostNetwork() *runtimeapi.NamespaceOption {
	return &runtimeapi.NamespaceOption{Network: runtimeapi.NamespaceMode_NODE, Pid: runtimeapi.NamespaceMode_CONTAINER, Ipc: runtimeapi.NamespaceMode_POD}
}

// ContainerSpec says what container to run.
type ContainerSpec struct {
	// Name of the container and, with .log, of its log; required.
	Name string
	// Image must have been pulled; required.
	Image string
	// Command replaces the image's entrypoint, Args its arguments; both empty means the image's own.
	Command, Args []string
	// Env holds variables by name.
	Env map[string]string
	// Mounts are bind mounts.
	Mounts []*runtimeapi.Mount
	// Labels and Annotations of the container.
	Labels, Annotations map[string]string
	// Edit may change the configuration just before it is sent; nil means no change.
	Edit func(*runtimeapi.ContainerConfig)
}

// Create makes a container in the pod and returns its id. Containers made again under one name count as attempts.
func (p *Pod) Create(ctx context.Context, s ContainerSpec) (string, error) {
	config := &runtimeapi.ContainerConfig{
		Metadata:    &runtimeapi.ContainerMetadata{Name: s.Name, Attempt: p.attempts.Add(1) - 1},
		Image:       &runtimeapi.ImageSpec{Image: s.Image},
		Command:     s.Command,
		Args:        s.Args,
		Mounts:      s.Mounts,
		Labels:      s.Labels,
		Annotations: s.Annotations,
		Linux: &runtimeapi.LinuxContainerConfig{
			SecurityContext: &runtimeapi.LinuxContainerSecurityContext{NamespaceOptions: hostNetwork()},
		},
	}
	for _, key := range slices.Sorted(maps.Keys(s.Env)) {
		config.Envs = append(config.Envs, &runtimeapi.KeyValue{Key: key, Value: []byte(s.Env[key])})
	}
	if p.Config.GetLogDirectory() != "" {
		config.LogPath = s.Name + ".log"
	}
	if s.Edit != nil {
		s.Edit(config)
	}
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	answer, err := p.client.Runtime.CreateContainer(ctx, &runtimeapi.CreateContainerRequest{PodSandboxId: p.ID, Config: config, SandboxConfig: p.Config})
	if err != nil {
		return "", fmt.Errorf("create container %s in pod %s: %w", s.Name, p.Config.GetMetadata().GetName(), err)
	}
	return answer.GetContainerId(), nil
}

// Start makes and starts a container and returns its id.
func (p *Pod) Start(ctx context.Context, s ContainerSpec) (string, error) {
	id, err := p.Create(ctx, s)
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	if _, err := p.client.Runtime.StartContainer(ctx, &runtimeapi.StartContainerRequest{ContainerId: id}); err != nil {
		return "", fmt.Errorf("start container %s in pod %s: %w", s.Name, p.Config.GetMetadata().GetName(), err)
	}
	return id, nil
}

// Exec runs a command in a container and returns what it wrote to standard output. An exit code other than 0 is an
// error that has what it wrote to standard error.
func (c *Client) Exec(ctx context.Context, containerID string, command ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	answer, err := c.Runtime.ExecSync(ctx, &runtimeapi.ExecSyncRequest{ContainerId: containerID, Cmd: command})
	if err != nil {
		return "", fmt.Errorf("run %q in container %s: %w", command, containerID, err)
	}
	if answer.GetExitCode() != 0 {
		return string(answer.GetStdout()), fmt.Errorf("run %q in container %s: exit code %d: %s", command, containerID, answer.GetExitCode(), strings.TrimSpace(string(answer.GetStderr())))
	}
	return string(answer.GetStdout()), nil
}

// Stats returns a container's statistics.
func (c *Client) Stats(ctx context.Context, containerID string) (*runtimeapi.ContainerStats, error) {
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	answer, err := c.Runtime.ContainerStats(ctx, &runtimeapi.ContainerStatsRequest{ContainerId: containerID})
	if err != nil {
		return nil, fmt.Errorf("read the stats of container %s: %w", containerID, err)
	}
	return answer.GetStats(), nil
}

// Wait waits until a container has ended and returns its exit code. It asks ten times a second, because events can be
// lost while the runtime restarts.
func (c *Client) Wait(ctx context.Context, containerID string) (int32, error) {
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		answer, err := c.Runtime.ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: containerID})
		if err != nil && status.Code(err) != codes.Unavailable {
			return 0, fmt.Errorf("wait for container %s: %w", containerID, err)
		}
		if err == nil && answer.GetStatus().GetState() == runtimeapi.ContainerState_CONTAINER_EXITED {
			return answer.GetStatus().GetExitCode(), nil
		}
		select {
		case <-ctx.Done():
			return 0, fmt.Errorf("wait for container %s: %w", containerID, ctx.Err())
		case <-tick.C:
		}
	}
}

// RemoveContainer ends a container at once and removes it.
func (c *Client) RemoveContainer(ctx context.Context, containerID string) error {
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	if _, err := c.Runtime.RemoveContainer(ctx, &runtimeapi.RemoveContainerRequest{ContainerId: containerID}); err != nil {
		return fmt.Errorf("remove container %s: %w", containerID, err)
	}
	return nil
}

// Remove ends the pod with all its containers and removes it.
func (p *Pod) Remove(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	_, stopped := p.client.Runtime.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: p.ID})
	_, removed := p.client.Runtime.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: p.ID})
	if removed != nil {
		return fmt.Errorf("remove pod %s: %w", p.Config.GetMetadata().GetName(), errors.Join(stopped, removed))
	}
	return nil
}
