package reclaim

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/engine/garbage"
	"github.com/cleave-cri/cleave/engine/record"
)

const (
	// startMargin is how long a container that was made and not started is left
	// alone: somebody may be about to start it. The kubelet removes it at once
	// (CGC-3); it does so itself in the goroutine that would start it.
	startMargin = 2 * time.Minute
	// stopSeconds is how long a container in an unknown state has to end (CGC-8).
	stopSeconds = 2
)

// Labels by which the kubelet marks what it makes (kubelet, pkg/types).
const (
	uidLabel  = "io.kubernetes.pod.uid"
	nameLabel = "io.kubernetes.container.name"
)

// PodFates knows what is to become of what pods left behind.
type PodFates interface {
	Pods(ctx context.Context) (garbage.Pods, error)
}

// Containers deletes dead containers and sandboxes through the CRI, by the
// kubelet's rules (CGC).
type Containers struct {
	Site
	Runtime runtimeapi.RuntimeServiceClient
	Pods    PodFates
	// LogDir is the pods' log directory, the kubelet's podLogsDir. The logs of a
	// container go with it (LOG-16), if they are in there.
	LogDir string
}

// Choice reads what there is to pick from. bytes are what containers and
// sandboxes have on the filesystem in question, by id, as far as it is known.
// Containers without the kubelet's labels are somebody else's, and are left out.
func (x *Containers) Choice(ctx context.Context, policy garbage.ContainerPolicy, bytes map[string]int64, pressure bool) (record.ContainerChoice, error) {
	c := record.ContainerChoice{Policy: policy, Pressure: pressure, Bytes: bytes}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	// Pods first: whoever is in the lists is of a pod that was known before.
	var err error
	if c.Pods, err = x.Pods.Pods(ctx); err != nil {
		return c, fmt.Errorf("ask for the fate of pods: %w", err)
	}
	containers, err := x.Runtime.ListContainers(ctx, &runtimeapi.ListContainersRequest{})
	if err != nil {
		return c, fmt.Errorf("list containers: %w", err)
	}
	sandboxes, err := x.Runtime.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
	if err != nil {
		return c, fmt.Errorf("list sandboxes: %w", err)
	}
	c.Now = time.Now()
	for _, r := range containers.GetContainers() {
		listed := garbage.Container{
			ID: r.GetId(), PodUID: r.GetLabels()[uidLabel], Name: r.GetLabels()[nameLabel], SandboxID: r.GetPodSandboxId(),
			State: stateOf(r.GetState()), CreatedAt: time.Unix(0, r.GetCreatedAt()),
		}
		foreign := listed.PodUID == "" || listed.Name == ""
		starting := listed.State == garbage.Created && c.Now.Sub(listed.CreatedAt) < startMargin
		if foreign || starting {
			// It stays in the list, as what is never picked, for its sandbox's sake.
			listed.State = garbage.Running
		}
		c.Containers = append(c.Containers, listed)
	}
	if pressure && policy.NoneUnderPressure {
		garbage.KeepLast(c.Containers, c.Pods)
	}
	for _, r := range sandboxes.GetItems() {
		if r.GetMetadata().GetUid() == "" || r.GetLabels()[uidLabel] == "" {
			continue
		}
		c.Sandboxes = append(c.Sandboxes, garbage.Sandbox{
			ID: r.GetId(), PodUID: r.GetMetadata().GetUid(), Ready: r.GetState() == runtimeapi.PodSandboxState_SANDBOX_READY, CreatedAt: time.Unix(0, r.GetCreatedAt()),
		})
	}
	return c, nil
}

func stateOf(s runtimeapi.ContainerState) garbage.ContainerState {
	switch s {
	case runtimeapi.ContainerState_CONTAINER_CREATED:
		return garbage.Created
	case runtimeapi.ContainerState_CONTAINER_RUNNING:
		return garbage.Running
	case runtimeapi.ContainerState_CONTAINER_EXITED:
		return garbage.Exited
	default:
		return garbage.Unknown
	}
}

// Check looks whether a step could be carried out now, and deletes nothing.
// A sandbox whose containers are to go in the same step still has them then.
func (x *Containers) Check(ctx context.Context, step record.Step) (record.Step, error) {
	before := map[string]bool{}
	return check(ctx, step, func(ctx context.Context, item record.Item) (removal, error) {
		r, err := x.examine(ctx, step, item, before)
		before[item.ID] = true
		return r, err
	})
}

// Run deletes the containers and sandboxes of a step. The returned step says what
// came of each; it is good also beside an error.
func (x *Containers) Run(ctx context.Context, step record.Step) (record.Step, error) {
	return x.run(ctx, step, func(ctx context.Context, item record.Item) (removal, error) {
		return x.examine(ctx, step, item, nil)
	})
}

// examine picks again, from what is now: an item may go only if it would be
// picked by the same rule. without are containers that count as gone.
func (x *Containers) examine(ctx context.Context, step record.Step, item record.Item, without map[string]bool) (removal, error) {
	planned := step.Containers
	if planned == nil {
		return removal{}, errors.New("the step has no choice of containers")
	}
	now, err := x.Choice(ctx, planned.Policy, nil, planned.Pressure)
	if err != nil {
		return removal{}, err
	}
	containers := now.Containers
	now.Containers = nil
	for _, c := range containers {
		if !without[c.ID] {
			now.Containers = append(now.Containers, c)
		}
	}
	picked := false
	for _, again := range now.Items() {
		picked = picked || again.ID == item.ID && again.Rule == item.Rule
	}
	for _, c := range planned.Containers {
		if c.ID != item.ID {
			continue
		}
		for _, fresh := range containers {
			switch {
			case fresh.ID != item.ID:
			case fresh.State == garbage.Running:
				return removal{}, errors.New("it runs, or is about to")
			case !picked:
				return removal{}, fmt.Errorf("by rule %s it would stay now", item.Rule)
			default:
				return removal{what: "container", late: true, delete: func(ctx context.Context) error { return x.removeContainer(ctx, fresh) }}, nil
			}
		}
		return removal{}, errGone
	}
	for _, s := range planned.Sandboxes {
		if s.ID != item.ID {
			continue
		}
		for _, fresh := range now.Sandboxes {
			switch {
			case fresh.ID != item.ID:
			case !picked:
				return removal{}, fmt.Errorf("by rule %s it would stay now", item.Rule)
			default:
				return removal{what: "sandbox", late: true, delete: func(ctx context.Context) error { return x.removeSandbox(ctx, fresh.ID) }}, nil
			}
		}
		return removal{}, errGone
	}
	return removal{}, errors.New("it is not among what was picked from")
}

// removeContainer takes the kubelet's steps (CGC-8); one that fails ends it.
func (x *Containers) removeContainer(ctx context.Context, c garbage.Container) error {
	if c.State == garbage.Unknown {
		if _, err := x.Runtime.StopContainer(ctx, &runtimeapi.StopContainerRequest{ContainerId: c.ID, Timeout: stopSeconds}); err != nil {
			return fmt.Errorf("stop the container, whose state is unknown: %w", err)
		}
	}
	// Just before: the runtime ends a container that runs, to remove it.
	answer, err := x.Runtime.ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: c.ID})
	if err != nil {
		return fmt.Errorf("look at the container: %w", err)
	}
	s := answer.GetStatus()
	if s.GetState() == runtimeapi.ContainerState_CONTAINER_RUNNING || s.GetId() != c.ID {
		return fmt.Errorf("%w: the container runs", ErrSurprise)
	}
	if err := x.removeLogs(s.GetLogPath()); err != nil {
		return fmt.Errorf("remove the container's logs: %w", err)
	}
	if _, err := x.Runtime.RemoveContainer(ctx, &runtimeapi.RemoveContainerRequest{ContainerId: c.ID}); err != nil {
		return fmt.Errorf("remove the container: %w", err)
	}
	return nil
}

// removeLogs removes the files of one container's log, current and rotated
// (LOG-16). What is not in the pods' log directory, or is no regular file there,
// stays.
func (x *Containers) removeLogs(path string) error {
	rel, ok := strings.CutPrefix(filepath.Clean(path), filepath.Clean(x.LogDir)+"/")
	parts := strings.Split(rel, "/")
	if !ok || x.LogDir == "" || len(parts) != 3 || !podDir.MatchString(parts[0]) || !currentLog.MatchString(parts[2]) {
		return nil
	}
	root, err := openLogs(x.LogDir)
	if err != nil {
		return err
	}
	defer root.close()
	return root.removeLog(parts[0], parts[1], parts[2])
}

// removeSandbox stops a sandbox and removes it; if it can't be stopped it stays
// (CGC-9).
func (x *Containers) removeSandbox(ctx context.Context, id string) error {
	if _, err := x.Runtime.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: id}); err != nil {
		return fmt.Errorf("stop the sandbox: %w", err)
	}
	// The runtime removes a sandbox's containers with it.
	list, err := x.Runtime.ListContainers(ctx, &runtimeapi.ListContainersRequest{Filter: &runtimeapi.ContainerFilter{PodSandboxId: id}})
	if err != nil {
		return fmt.Errorf("list the sandbox's containers: %w", err)
	}
	if n := len(list.GetContainers()); n > 0 {
		return fmt.Errorf("%w: the sandbox has got %d containers", ErrSurprise, n)
	}
	if _, err := x.Runtime.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: id}); err != nil && status.Code(err) != codes.NotFound {
		return fmt.Errorf("remove the sandbox: %w", err)
	}
	return nil
}
