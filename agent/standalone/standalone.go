// Package standalone evicts pods through the container runtime alone, for labs without an API server: it stops the pod's
// containers and its sandbox and removes both. Nobody keeps the pod from being made again: a kubelet that wants it makes a new one.
// It imports engine of this module; only agent may import it.
package standalone

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/engine"
)

const (
	// leastGrace is what containers have at least to end, also for a hard threshold: the kubelet's own floor (kuberuntime,
	// minimumGracePeriodInSeconds).
	leastGrace = 2 * time.Second
	// callTimeout is how long the runtime may take for one call besides the grace.
	callTimeout = 30 * time.Second
)

// ErrProtected says that a pod never goes.
var ErrProtected = errors.New("it is protected")

// Evictor ends pods. Its fields are required.
type Evictor struct {
	Runtime runtimeapi.RuntimeServiceClient
}

// Annotations by which a kubelet marks what it does not have from the API server (kubelet, pkg/kubelet/types/pod_update.go).
const (
	configSource = "kubernetes.io/config.source"
	configMirror = "kubernetes.io/config.mirror"
)

// Static says whether a sandbox with these annotations is of a pod that a file or URL of the node makes, and not the API server.
func Static(annotations map[string]string) bool {
	source, ok := annotations[configSource]
	_, mirror := annotations[configMirror]
	return ok && source != "api" || mirror
}

// Evict ends a pod and returns when the runtime has nothing of it any more.
func (v Evictor) Evict(ctx context.Context, e engine.Eviction, _ bool) error {
	name := e.Namespace + "/" + e.Name
	sandboxes, err := v.sandboxes(ctx, e)
	if err != nil {
		return fmt.Errorf("evict %s: %w", name, err)
	}
	if len(sandboxes) == 0 {
		return fmt.Errorf("evict %s: the runtime has no pod with UID %s", name, e.UID)
	}
	grace := max(time.Duration(e.GraceSeconds)*time.Second, leastGrace)
	for _, s := range sandboxes {
		if err := v.end(ctx, s.GetId(), grace); err != nil {
			return fmt.Errorf("evict %s: %w", name, err)
		}
	}
	return nil
}

// sandboxes are the pod's, in any state; they are looked for anew, because what was decided by may be some seconds old.
func (v Evictor) sandboxes(ctx context.Context, e engine.Eviction) (out []*runtimeapi.PodSandbox, _ error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	answer, err := v.Runtime.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
	if err != nil {
		return nil, fmt.Errorf("list sandboxes: %w", err)
	}
	for _, s := range answer.GetItems() {
		m := s.GetMetadata()
		if m.GetUid() != e.UID || m.GetNamespace() != e.Namespace || m.GetName() != e.Name {
			continue
		}
		if Static(s.GetAnnotations()) {
			return nil, fmt.Errorf("%w: a file of the node makes it", ErrProtected)
		}
		out = append(out, s)
	}
	return out, nil
}

// end stops what runs in a sandbox, the sandbox, and removes both.
func (v Evictor) end(ctx context.Context, sandbox string, grace time.Duration) error {
	listing, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	answer, err := v.Runtime.ListContainers(listing, &runtimeapi.ListContainersRequest{Filter: &runtimeapi.ContainerFilter{PodSandboxId: sandbox}})
	if err != nil {
		return fmt.Errorf("list the containers of sandbox %s: %w", sandbox, err)
	}
	stopping, cancelStop := context.WithTimeout(ctx, grace+callTimeout)
	defer cancelStop()
	stops, stopping := errgroup.WithContext(stopping)
	for _, c := range answer.GetContainers() {
		if c.GetState() != runtimeapi.ContainerState_CONTAINER_RUNNING {
			continue
		}
		stops.Go(func() error {
			request := &runtimeapi.StopContainerRequest{ContainerId: c.GetId(), Timeout: int64(grace / time.Second)}
			if _, err := v.Runtime.StopContainer(stopping, request); err != nil {
				return fmt.Errorf("stop container %s: %w", c.GetId(), err)
			}
			return nil
		})
	}
	if err := stops.Wait(); err != nil {
		return err
	}
	ctx, cancelEnd := context.WithTimeout(ctx, callTimeout)
	defer cancelEnd()
	if _, err := v.Runtime.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: sandbox}); err != nil {
		return fmt.Errorf("stop sandbox %s: %w", sandbox, err)
	}
	// Its containers and their layers go with it: until then no space comes free.
	if _, err := v.Runtime.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: sandbox}); err != nil {
		return fmt.Errorf("remove sandbox %s: %w", sandbox, err)
	}
	return nil
}
