package agent

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/agent/ephemeral"
	"github.com/cleave-cri/cleave/agent/standalone"
)

// workloads are the pods and containers that the runtime has.
type workloads struct {
	sandboxes  []ephemeral.Sandbox
	containers []ephemeral.Container
}

// workloadsFunc asks the runtime for its pods and containers.
type workloadsFunc func(ctx context.Context) (workloads, error)

// pidFunc asks the runtime for the first process of a container or sandbox, as
// this process sees it; ok is false if it has none.
type pidFunc func(ctx context.Context, id string) (pid int, ok bool)

// askWorkloads asks by the CRI, not through the proxy.
func askWorkloads(conn grpc.ClientConnInterface) workloadsFunc {
	return func(ctx context.Context) (workloads, error) {
		ctx, cancel := context.WithTimeout(ctx, askTimeout)
		defer cancel()
		client := runtimeapi.NewRuntimeServiceClient(conn)
		sandboxes, err := client.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
		if err != nil {
			return workloads{}, fmt.Errorf("ask the runtime for its pods: %w", err)
		}
		containers, err := client.ListContainers(ctx, &runtimeapi.ListContainersRequest{})
		if err != nil {
			return workloads{}, fmt.Errorf("ask the runtime for its containers: %w", err)
		}
		var w workloads
		for _, s := range sandboxes.GetItems() {
			m := s.GetMetadata()
			w.sandboxes = append(w.sandboxes, ephemeral.Sandbox{
				ID: s.GetId(), Namespace: m.GetNamespace(), Name: m.GetName(), UID: m.GetUid(),
				Ready: s.GetState() == runtimeapi.PodSandboxState_SANDBOX_READY, CreatedAt: time.Unix(0, s.GetCreatedAt()),
				Static: standalone.Static(s.GetAnnotations()),
			})
		}
		for _, c := range containers.GetContainers() {
			w.containers = append(w.containers, ephemeral.Container{
				ID: c.GetId(), Name: c.GetMetadata().GetName(), SandboxID: c.GetPodSandboxId(),
				Running: c.GetState() == runtimeapi.ContainerState_CONTAINER_RUNNING,
			})
		}
		return w, nil
	}
}

// askPID asks containerd for a container's task.
func askPID(conn grpc.ClientConnInterface, namespace string) pidFunc {
	return func(ctx context.Context, id string) (pid int, ok bool) {
		ctx, cancel := context.WithTimeout(ctx, askTimeout)
		defer cancel()
		ctx = metadata.AppendToOutgoingContext(ctx, "containerd-namespace", namespace)
		answer, err := tasksapi.NewTasksClient(conn).Get(ctx, &tasksapi.GetRequest{ContainerID: id})
		if err != nil {
			return 0, false // it has ended, or has not begun
		}
		pid = int(answer.GetProcess().GetPid())
		return pid, pid > 0
	}
}

// pidBook remembers the first process of each running container.
type pidBook struct {
	ask  pidFunc
	pids map[string]int
	// silent is how many questions brought nothing, of those whose process is not known.
	silent map[string]int
}

// of gives the processes of all that run; only of new ones it asks. All questions
// together get the time of one: whose process is not known has no hints meanwhile,
// which is better than that nothing is known of anybody. Those that brought nothing
// most often come last, so that a shim that hangs holds up no other for ever.
func (b *pidBook) of(ctx context.Context, w workloads) map[string]int {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	now, silent := map[string]int{}, map[string]int{}
	var unknown []string
	add := func(id string) {
		if pid, known := b.pids[id]; known {
			now[id] = pid
			return
		}
		unknown = append(unknown, id)
	}
	for _, s := range w.sandboxes {
		if s.Ready {
			add(s.ID)
		}
	}
	for _, c := range w.containers {
		if c.Running {
			add(c.ID)
		}
	}
	slices.SortStableFunc(unknown, func(x, y string) int { return cmp.Compare(b.silent[x], b.silent[y]) })
	for _, id := range unknown {
		silent[id] = b.silent[id]
		if ctx.Err() != nil {
			continue
		}
		if pid, ok := b.ask(ctx, id); ok {
			now[id] = pid
			delete(silent, id)
		} else {
			silent[id]++
		}
	}
	b.pids, b.silent = now, silent
	return now
}

// podsOf gives the containers and sandboxes of each pod, by UID.
func podsOf(w workloads) map[string][]string {
	pods, uids := map[string][]string{}, map[string]string{}
	for _, s := range w.sandboxes {
		uids[s.ID] = s.UID
		pods[s.UID] = append(pods[s.UID], s.ID)
	}
	for _, c := range w.containers {
		if uid, ok := uids[c.SandboxID]; ok {
			pods[uid] = append(pods[uid], c.ID)
		}
	}
	return pods
}
