package agent

import (
	"context"
	"fmt"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/agent/limits"
	"github.com/cleave-cri/cleave/agent/page"
	"github.com/cleave-cri/cleave/agent/snapshotter"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/proxy"
	"github.com/cleave-cri/cleave/snapshot/split"
)

// openLimits makes what keeps writable layers under their limits, where the
// snapshotter can do that and this process may act. It is told of each container
// that is made.
func (a *agent) openLimits(c *proxy.Config) {
	if a.cfg.Mode == config.ModeObserve || !a.cfg.Snapshotter.Enabled() || !a.cfg.Snapshotter.ProjectQuota {
		return
	}
	a.limits = limits.New(limits.Options{
		Containers: containersOf(runtimeapi.NewRuntimeServiceClient(a.upstream)),
		Layers:     layersAt(a.cfg.Snapshotter.StatusEndpoint.Path()),
		Namespace:  a.cfg.Runtime.Namespace,
		Source:     a.limitSource,
		Log:        a.log.Named("limits"),
	})
	const method = runtimeapi.RuntimeService_CreateContainer_FullMethodName
	created := proxy.AnswerFunc(a.limits.Created)
	if before := c.Interceptors[method]; before != nil {
		created = proxy.Chain(before, created)
	}
	c.Interceptors[method] = created
}

// The labels by which the kubelet tells whose a container is
// (k8s.io/kubelet/pkg/types, labels.go).
const (
	labelContainerName = "io.kubernetes.container.name"
	labelPodName       = "io.kubernetes.pod.name"
	labelPodNamespace  = "io.kubernetes.pod.namespace"
	labelPodUID        = "io.kubernetes.pod.uid"
)

// containersOf lists a runtime's containers.
func containersOf(runtime runtimeapi.RuntimeServiceClient) func(context.Context) ([]limits.Container, error) {
	return func(ctx context.Context) ([]limits.Container, error) {
		answer, err := runtime.ListContainers(ctx, &runtimeapi.ListContainersRequest{})
		if err != nil {
			return nil, fmt.Errorf("ask the runtime: %w", err)
		}
		out := make([]limits.Container, 0, len(answer.GetContainers()))
		for _, c := range answer.GetContainers() {
			labels := c.GetLabels()
			out = append(out, limits.Container{
				ID: c.GetId(), Name: labels[labelContainerName],
				PodUID: labels[labelPodUID], PodName: labels[labelPodName], PodNamespace: labels[labelPodNamespace],
			})
		}
		return out, nil
	}
}

// layersAt is the snapshotter that answers on a status socket.
type layersAt string

var _ limits.Layers = layersAt("")

// Limits implements [limits.Layers].
func (l layersAt) Limits(ctx context.Context) ([]split.LayerLimit, error) {
	return snapshotter.FetchLimits(ctx, string(l))
}

// SetLimit implements [limits.Layers].
func (l layersAt) SetLimit(ctx context.Context, r snapshotter.LimitRequest) (snapshotter.LimitAnswer, error) {
	return snapshotter.SetLimit(ctx, string(l), r)
}

// writeLimits tells people how the limits are.
func writeLimits(out *page.Writer, s limits.Status) {
	if s.Limited > 0 || s.Without > 0 {
		out.Printf("Limits: %d writable layers have theirs, %d have none and should\n", s.Limited, s.Without)
	}
	if s.Problem != "" {
		out.Printf("! Limits of writable layers: %s\n", s.Problem)
	}
}
