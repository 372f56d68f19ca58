package agent

import (
	"github.com/cleave-cri/cleave/agent/limits"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/kube"
)

// podLimits is the [limits.Source] of pods' own limits: a container's writable layer
// may take what its limit of ephemeral storage says, and no more than all may by the
// configuration. The kubelet evicts a pod some time after it took more (LSE-9,
// LSE-12); the kernel lets it take no more.
type podLimits struct {
	pods kube.View
	// most is the configuration's limit of each, 0 for none.
	most uint64
}

var _ limits.Source = podLimits{}

// WritableLayer implements [limits.Source]. A container without a limit of its own
// may take what the others may; of a pod that is not known, or can't be read whole,
// nothing is known.
func (p podLimits) WritableLayer(c limits.Container) (bytes uint64, known bool) {
	k, ok := p.pods.Pod(c.PodUID, c.PodNamespace, c.PodName)
	if !ok || len(k.Pod.Faults) > 0 {
		return 0, false
	}
	own, ok := ownLimit(k.Pod, c.Name)
	switch {
	case !ok:
		return 0, false
	case own == 0:
		return p.most, true
	case p.most == 0:
		return max(own, config.MinLayerBytes), true
	default:
		return min(max(own, config.MinLayerBytes), p.most), true
	}
}

// ownLimit is a container's limit of ephemeral storage in bytes, 0 for none, which
// is also what the kubelet takes a container's limit of 0 for (LSE-8). ok is false if the pod has no
// such container, as with ephemeral containers, which have no resources.
func ownLimit(pod *kube.Pod, name string) (bytes uint64, ok bool) {
	for _, list := range [][]kube.Container{pod.Containers, pod.InitContainers} {
		for _, c := range list {
			if c.Name != name {
				continue
			}
			if q := c.Limits.EphemeralStorage; q != nil {
				return uint64(max(q.Value(), 0)), true //nolint:gosec // not negative
			}
			return 0, true
		}
	}
	return 0, false
}

// limitSource tells what each container may take, as is known now.
func (a *agent) limitSource() limits.Source {
	most := uint64(max(a.cfg.Limits.WritableLayerBytes, 0)) //nolint:gosec // not negative
	if !a.cfg.Limits.FromPods {
		return limits.Same(most)
	}
	return podLimits{pods: a.pods(), most: most}
}

// pods are those of this node that are known from Kubernetes, now.
func (a *agent) pods() kube.View {
	if a.decisions == nil {
		return kube.View{}
	}
	return a.decisions.cluster.Load().view()
}
