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

// evictedByKubelet says whether a kubelet has evicted a pod: it stays, and has failed.
func evictedByKubelet(p *corev1.Pod) bool {
	return p.Status.Phase == corev1.PodFailed && p.Status.Reason == "Evicted"
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
		if r.evicted[p.UID] || !evictedByKubelet(p) {
			continue
		}
		r.evicted[p.UID] = true
		why, _, _ := strings.Cut(p.Status.Message, ". ")
		r.kubelets = append(r.kubelets, sim.Event{At: at, By: byKubelet, What: sim.PodEvicted, Subject: p.Name, Detail: why})
	}
}
