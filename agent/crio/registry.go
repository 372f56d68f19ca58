package crio

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/proxy/criocompat"
)

// Runtime is what the registry asks the runtime; the CRI's client has it.
type Runtime interface {
	ListContainers(ctx context.Context, in *runtimeapi.ListContainersRequest, opts ...grpc.CallOption) (*runtimeapi.ListContainersResponse, error)
	ContainerStatus(ctx context.Context, in *runtimeapi.ContainerStatusRequest, opts ...grpc.CallOption) (*runtimeapi.ContainerStatusResponse, error)
	PodSandboxStatus(ctx context.Context, in *runtimeapi.PodSandboxStatusRequest, opts ...grpc.CallOption) (*runtimeapi.PodSandboxStatusResponse, error)
}

// RootFunc returns the folder in which "diff" is a container's writable layer, for as long as the container is there.
type RootFunc func(ctx context.Context, containerID string) (string, error)

// listGapMin is the shortest time between two listings of all containers, however many aliases are asked for that nobody knows.
const listGapMin = 200 * time.Millisecond

// Registry finds containers by their aliases. It implements [criocompat.Registry].
type Registry struct {
	runtime Runtime
	root    RootFunc
	now     func() time.Time

	mu       sync.Mutex
	ids      map[string]string // guarded by mu; from alias to container
	listedAt time.Time         // guarded by mu
	listing  chan struct{}     // guarded by mu; closed when the listing under way has ended, nil if there is none
}

var _ criocompat.Registry = (*Registry)(nil)

// NewRegistry returns a registry that knows no container yet.
func NewRegistry(runtime Runtime, root RootFunc) *Registry {
	return &Registry{runtime: runtime, root: root, now: time.Now, ids: map[string]string{}}
}

// Container implements [criocompat.Registry].
func (r *Registry) Container(ctx context.Context, alias string) (criocompat.Container, error) {
	id, ok := r.id(alias)
	if !ok {
		if err := r.list(ctx); err != nil {
			return criocompat.Container{}, err
		}
		if id, ok = r.id(alias); !ok {
			return criocompat.Container{}, criocompat.ErrUnknown
		}
	}
	return r.describe(ctx, id)
}

// Created notes a container that is being made. It does not block. (It may be asked for before the runtime lists it.)
func (r *Registry) Created(containerID string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ids[criocompat.Alias(containerID)] = containerID
}

func (r *Registry) id(alias string) (string, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	id, ok := r.ids[alias]
	return id, ok
}

// list reads all containers' IDs. One listing runs at a time, and whoever comes meanwhile waits for its result; one that has just
// ended is new enough.
func (r *Registry) list(ctx context.Context) error {
	r.mu.Lock()
	if running := r.listing; running != nil {
		r.mu.Unlock()
		select {
		case <-running:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if r.now().Sub(r.listedAt) < listGapMin {
		r.mu.Unlock()
		return nil
	}
	done := make(chan struct{})
	r.listing = done
	r.mu.Unlock()

	answer, err := r.runtime.ListContainers(ctx, &runtimeapi.ListContainersRequest{})
	ids := make(map[string]string, len(answer.GetContainers()))
	for _, c := range answer.GetContainers() {
		ids[criocompat.Alias(c.GetId())] = c.GetId()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	defer close(done)
	r.listing = nil
	if err != nil {
		return fmt.Errorf("list the runtime's containers: %w", err)
	}
	r.ids, r.listedAt = ids, r.now()
	return nil
}

// describe asks the runtime what cAdvisor wants to know of a container.
func (r *Registry) describe(ctx context.Context, id string) (criocompat.Container, error) {
	answer, err := r.runtime.ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: id, Verbose: true})
	if status.Code(err) == codes.NotFound {
		return criocompat.Container{}, criocompat.ErrUnknown
	}
	if err != nil {
		return criocompat.Container{}, fmt.Errorf("ask the runtime for container %s: %w", id, err)
	}
	info, err := parseInfo(answer.GetInfo()["info"])
	if err != nil {
		return criocompat.Container{}, fmt.Errorf("read what the runtime says of container %s: %w", id, err)
	}
	root, err := r.root(ctx, id)
	if err != nil {
		return criocompat.Container{}, err
	}
	s := answer.GetStatus()
	c := criocompat.Container{
		Name: id, Image: s.GetImage().GetImage(), CreatedTime: s.GetCreatedAt(), Labels: s.GetLabels(), Annotations: s.GetAnnotations(),
		LogPath: s.GetLogPath(), Root: root,
	}
	if s.GetState() == runtimeapi.ContainerState_CONTAINER_RUNNING {
		c.PID = info.PID
	}
	if info.SandboxID == "" {
		return c, nil
	}
	sandbox, err := r.runtime.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: info.SandboxID})
	if err != nil {
		return criocompat.Container{}, fmt.Errorf("ask the runtime for the sandbox of container %s: %w", id, err)
	}
	network := sandbox.GetStatus().GetNetwork()
	if c.IP = network.GetIp(); c.IP != "" {
		c.IPs = []string{c.IP}
	}
	for _, more := range network.GetAdditionalIps() {
		c.IPs = append(c.IPs, more.GetIp())
	}
	return c, nil
}

// verbose is what containerd tells of a container in addition (CRI ContainerStatus, verbose).
type verbose struct {
	SandboxID string `json:"sandboxID"`
	PID       int    `json:"pid"`
}

func parseInfo(text string) (verbose, error) {
	var v verbose
	if text == "" {
		return v, nil
	}
	err := json.Unmarshal([]byte(text), &v)
	return v, err
}
