// Package containers answers cAdvisor's questions about containers (KSS-9) from the
// CRI of the runtime: it knows which container an alias stands for, and asks the
// runtime for the rest when it is asked itself, which is once or twice in a
// container's life. Where a container's root is it is told. Only agent may import
// it.
package containers

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

// Runtime is the part of the CRI that is needed.
type Runtime interface {
	ListContainers(ctx context.Context, in *runtimeapi.ListContainersRequest, opts ...grpc.CallOption) (*runtimeapi.ListContainersResponse, error)
	ContainerStatus(ctx context.Context, in *runtimeapi.ContainerStatusRequest, opts ...grpc.CallOption) (*runtimeapi.ContainerStatusResponse, error)
	PodSandboxStatus(ctx context.Context, in *runtimeapi.PodSandboxStatusRequest, opts ...grpc.CallOption) (*runtimeapi.PodSandboxStatusResponse, error)
}

// Roots knows where containers' writable layers are.
type Roots interface {
	// Root returns the folder in which "diff", a real folder, is a container's
	// writable layer. It returns when ctx is done.
	Root(ctx context.Context, containerID string) (string, error)
}

const (
	// expected is how long a container that was announced may take to be in the
	// runtime's list; then it is forgotten.
	expected = 2 * time.Minute
	// refreshPause is the least time between two lists that are asked for because
	// an alias is not known.
	refreshPause = 200 * time.Millisecond
)

// Containers is a [criocompat.Registry]. Create it with [New].
type Containers struct {
	runtime Runtime
	roots   Roots

	// refreshing is held while the list is asked for.
	refreshing chan struct{}

	mu sync.Mutex
	// known are containers by alias; announced, by ID, when those were that the
	// runtime has not listed yet. Both guarded by mu.
	known     map[string]string
	announced map[string]time.Time
	listed    time.Time // guarded by mu
}

var _ criocompat.Registry = (*Containers)(nil)

// New returns a registry that knows no container yet.
func New(runtime Runtime, roots Roots) *Containers {
	return &Containers{
		runtime: runtime, roots: roots, refreshing: make(chan struct{}, 1),
		known: map[string]string{}, announced: map[string]time.Time{},
	}
}

// Created announces a container that the runtime is about to create. It does not
// block: it is for the NRI plugin, which has to answer at once.
//
// Those that were announced long ago are forgotten: cAdvisor asks at once for a new
// container, and for the sake of one that it asks for later the list is asked for.
func (c *Containers) Created(containerID string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for id, at := range c.announced {
		if time.Since(at) > expected {
			delete(c.announced, id)
			delete(c.known, criocompat.Alias(id))
		}
	}
	c.known[criocompat.Alias(containerID)] = containerID
	c.announced[containerID] = time.Now()
}

// Refresh asks the runtime which containers there are and forgets the others, but
// for those that were announced not long ago. Whoever watches the node calls it now
// and then, so that what is known does not grow.
func (c *Containers) Refresh(ctx context.Context) error {
	select {
	case c.refreshing <- struct{}{}:
		defer func() { <-c.refreshing }()
	case <-ctx.Done():
		return ctx.Err()
	}
	return c.refresh(ctx)
}

func (c *Containers) refresh(ctx context.Context) error {
	answer, err := c.runtime.ListContainers(ctx, &runtimeapi.ListContainersRequest{})
	if err != nil {
		return fmt.Errorf("list the containers: %w", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.listed = time.Now()
	c.known = make(map[string]string, len(answer.GetContainers()))
	for _, container := range answer.GetContainers() {
		c.known[criocompat.Alias(container.GetId())] = container.GetId()
		delete(c.announced, container.GetId())
	}
	for id, at := range c.announced {
		if time.Since(at) > expected {
			delete(c.announced, id)
			continue
		}
		c.known[criocompat.Alias(id)] = id
	}
	return nil
}

// Container implements [criocompat.Registry].
func (c *Containers) Container(ctx context.Context, alias string) (criocompat.Container, error) {
	id, err := c.find(ctx, alias)
	if err != nil {
		return criocompat.Container{}, err
	}
	answer, err := c.runtime.ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: id, Verbose: true})
	switch {
	case status.Code(err) == codes.NotFound:
		return criocompat.Container{}, fmt.Errorf("%w (the runtime does not know %s, or not yet)", criocompat.ErrUnknown, id)
	case err != nil:
		return criocompat.Container{}, fmt.Errorf("ask the runtime about container %s: %w", id, err)
	}
	root, err := c.roots.Root(ctx, id)
	if err != nil {
		return criocompat.Container{}, fmt.Errorf("find the root of container %s: %w", id, err)
	}
	s := answer.GetStatus()
	verbose := verboseOf(answer.GetInfo())
	out := criocompat.Container{
		Name: id, PID: verbose.PID, Image: imageOf(s.GetImage()), CreatedTime: s.GetCreatedAt(),
		Labels: s.GetLabels(), Annotations: s.GetAnnotations(), LogPath: s.GetLogPath(), Root: root,
	}
	if s.GetState() != runtimeapi.ContainerState_CONTAINER_RUNNING {
		out.PID = 0 // of a process that is not there yet, or no more
	}
	out.IPs = c.addresses(ctx, verbose.SandboxID)
	if len(out.IPs) > 0 {
		out.IP = out.IPs[0]
	}
	return out, nil
}

// find returns the ID that an alias stands for. It asks the runtime if the alias is
// not known, for cleave may have come after the container.
func (c *Containers) find(ctx context.Context, alias string) (string, error) {
	look := func() (id string, known, recent bool) {
		c.mu.Lock()
		defer c.mu.Unlock()
		id, known = c.known[alias]
		return id, known, time.Since(c.listed) < refreshPause
	}
	if id, known, recent := look(); known {
		return id, nil
	} else if recent {
		return "", criocompat.ErrUnknown
	}
	select {
	case c.refreshing <- struct{}{}:
		defer func() { <-c.refreshing }()
	case <-ctx.Done():
		return "", ctx.Err()
	}
	// Another question may have had the list made while this one waited.
	id, known, recent := look()
	if !known && !recent {
		if err := c.refresh(ctx); err != nil {
			return "", err
		}
		id, known, _ = look()
	}
	if !known {
		return "", criocompat.ErrUnknown
	}
	return id, nil
}

// verbose is what containerd tells in the verbose part of a container's status.
type verbose struct {
	PID       int    `json:"pid"`
	SandboxID string `json:"sandboxID"`
}

// verboseOf reads it as far as it is there: without it network figures are missing,
// and no more.
func verboseOf(info map[string]string) (v verbose) {
	if json.Unmarshal([]byte(info["info"]), &v) != nil {
		return verbose{}
	}
	return v
}

// imageOf prefers the name that the pod's spec has.
func imageOf(image *runtimeapi.ImageSpec) string {
	if name := image.GetUserSpecifiedImage(); name != "" {
		return name
	}
	return image.GetImage()
}

// addresses are those of a sandbox, nil if they can't be had: they are for people.
func (c *Containers) addresses(ctx context.Context, sandbox string) []string {
	if sandbox == "" {
		return nil
	}
	answer, err := c.runtime.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: sandbox})
	if err != nil {
		return nil
	}
	network := answer.GetStatus().GetNetwork()
	if network.GetIp() == "" {
		return nil
	}
	all := []string{network.GetIp()}
	for _, more := range network.GetAdditionalIps() {
		all = append(all, more.GetIp())
	}
	return all
}
