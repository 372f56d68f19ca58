package play

import (
	"context"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/cleave-cri/cleave/engine/sim"
	"github.com/cleave-cri/cleave/lab/plane"
)

// byKubelet says of an event that a real kubelet did it.
const byKubelet = "kubelet"

// evictedByKubelet says whether a kubelet has evicted a pod, and why: it stays, and has this condition. Only one whose containers
// ended with an error has also failed.
func evictedByKubelet(p *corev1.Pod) (why string, _ bool) {
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.DisruptionTarget && c.Reason == corev1.PodReasonTerminationByKubelet && c.Status == corev1.ConditionTrue {
			why, _, _ = strings.Cut(c.Message, ". ")
			return why, true
		}
	}
	return "", false
}

// heedKubelet keeps what a real kubelet has done so far. What can't be asked now the
// next look tells.
func (r *run) heedKubelet(ctx context.Context) {
	if r.stage.Kubelet == nil {
		return
	}
	pods, err := r.stage.API.Pods(ctx)
	if err != nil {
		return
	}
	node, err := r.stage.API.Node(ctx, plane.NodeName)
	if err != nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	at := time.Since(r.t0)
	pressed := false
	for _, c := range node.Status.Conditions {
		pressed = pressed || c.Type == corev1.NodeDiskPressure && c.Status == corev1.ConditionTrue
	}
	if pressed && !r.pressed {
		r.kubelets = append(r.kubelets, sim.Event{At: at, By: byKubelet, What: sim.ThresholdDue, Subject: "the kubelet's node"})
	}
	r.pressed = pressed
	for i := range pods {
		p := &pods[i]
		why, ok := evictedByKubelet(p)
		if r.evicted[p.UID] || !ok {
			continue
		}
		r.evicted[p.UID] = true
		r.kubelets = append(r.kubelets, sim.Event{At: at, By: byKubelet, What: sim.PodEvicted, Subject: p.Name, Detail: why})
	}
}
