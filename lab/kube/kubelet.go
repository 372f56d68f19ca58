package kube

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/cleave-cri/cleave/lab/plane"
)

// KubeletOptions say how a kubelet runs.
type KubeletOptions = plane.KubeletOptions

// NodeName is the name of the lab's only node.
const NodeName = plane.NodeName

// Kubelet is a real kubelet, running or not. Its methods are for one caller at a time.
type Kubelet struct {
	*plane.Kubelet

	// plane is nil for one that stands alone.
	plane *ControlPlane
}

// NewKubelet prepares a kubelet of a control plane, or with nil one that stands alone: then it runs the pods of the files in
// [plane.Kubelet.Manifests] and nobody else's. It starts nothing.
func NewKubelet(c *ControlPlane, o KubeletOptions) (*Kubelet, error) {
	var kubeconfig func(string) error
	if c != nil {
		kubeconfig = c.WriteKubeconfig
	}
	k, err := plane.NewKubelet(kubeconfig, o)
	if err != nil {
		return nil, err
	}
	return &Kubelet{Kubelet: k, plane: c}, nil
}

// Start starts the kubelet and waits until it says that its node is ready; one that stands alone, that it is healthy.
func (k *Kubelet) Start(ctx context.Context) error {
	if k.plane == nil {
		return k.Kubelet.Start(ctx)
	}
	began := metav1.NewTime(time.Now().Truncate(time.Second))
	return k.StartUntil(ctx, func(ctx context.Context) error {
		node, err := k.Node(ctx)
		if err != nil {
			return err
		}
		for _, c := range node.Status.Conditions {
			if c.Type != corev1.NodeReady {
				continue
			}
			if c.Status == corev1.ConditionTrue && !c.LastHeartbeatTime.Before(&began) {
				return nil
			}
			return fmt.Errorf("node is not ready: %s: %s", c.Reason, c.Message)
		}
		return errors.New("node has no condition Ready")
	})
}

// Node is the node as the API server has it; it needs one.
func (k *Kubelet) Node(ctx context.Context) (*corev1.Node, error) {
	return k.plane.client.CoreV1().Nodes().Get(ctx, NodeName, metav1.GetOptions{})
}
