package kube

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/remotecommand"
)

// Namespace is where the lab's pods are.
const Namespace = metav1.NamespaceDefault

// PodSpec is a pod of one container for the lab's node.
type PodSpec struct {
	// Name of the pod. Required.
	Name string
	// Image is what it runs. Required.
	Image string
	// Command is what runs. Required.
	Command []string
	// EphemeralStorage is the container's limit, a quantity; empty means none. EphemeralRequest is the request.
	EphemeralStorage, EphemeralRequest string
	// EmptyDir, if not empty, is where a volume of the node's disk is mounted; SizeLimit is its limit, a quantity.
	EmptyDir, SizeLimit string
	// HostNetwork puts the pod into the node's network.
	HostNetwork bool
	// Priority of the pod; nil means none.
	Priority *int32
	// Stdin keeps the container's standard input open for attach.
	Stdin bool
	// Once says that it is not started again when it has ended.
	Once bool
}

func (s PodSpec) pod(node string) (*corev1.Pod, error) {
	grace := int64(1)
	c := corev1.Container{Name: "main", Image: s.Image, ImagePullPolicy: corev1.PullIfNotPresent, Command: s.Command, Stdin: s.Stdin}
	amounts := func(text string) (corev1.ResourceList, error) {
		if text == "" {
			return nil, nil
		}
		q, err := resource.ParseQuantity(text)
		return corev1.ResourceList{corev1.ResourceEphemeralStorage: q}, err
	}
	var err, err2 error
	c.Resources.Limits, err = amounts(s.EphemeralStorage)
	c.Resources.Requests, err2 = amounts(s.EphemeralRequest)
	if err := errors.Join(err, err2); err != nil {
		return nil, fmt.Errorf("pod %s: %w", s.Name, err)
	}
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: s.Name, Namespace: Namespace},
		Spec: corev1.PodSpec{
			NodeName: node, HostNetwork: s.HostNetwork, TerminationGracePeriodSeconds: &grace, Priority: s.Priority,
			Tolerations: []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
		},
	}
	if s.Once {
		pod.Spec.RestartPolicy = corev1.RestartPolicyNever
	}
	if s.EmptyDir != "" {
		source := &corev1.EmptyDirVolumeSource{}
		if s.SizeLimit != "" {
			limit, err := resource.ParseQuantity(s.SizeLimit)
			if err != nil {
				return nil, fmt.Errorf("pod %s: %w", s.Name, err)
			}
			source.SizeLimit = &limit
		}
		pod.Spec.Volumes = []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{EmptyDir: source}}}
		c.VolumeMounts = []corev1.VolumeMount{{Name: "data", MountPath: s.EmptyDir}}
	}
	pod.Spec.Containers = []corev1.Container{c}
	return pod, nil
}

// Run creates a pod and waits until it is running and ready.
func (c *ControlPlane) Run(ctx context.Context, s PodSpec) (*corev1.Pod, error) {
	if err := c.Create(ctx, s); err != nil {
		return nil, err
	}
	return c.WaitPod(ctx, s.Name, "run", Runs)
}

// Create creates a pod and does not wait.
func (c *ControlPlane) Create(ctx context.Context, s PodSpec) error {
	pod, err := s.pod(c.node)
	if err != nil {
		return err
	}
	if _, err := c.client.CoreV1().Pods(Namespace).Create(ctx, pod, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("create pod %s: %w", s.Name, err)
	}
	return nil
}

// Runs says whether a pod is running and ready, for WaitPod.
func Runs(p *corev1.Pod) bool {
	statuses := p.Status.ContainerStatuses
	return p.Status.Phase == corev1.PodRunning && len(statuses) == len(p.Spec.Containers) && statuses[0].Ready
}

// Pod is a pod as the API server has it.
func (c *ControlPlane) Pod(ctx context.Context, name string) (*corev1.Pod, error) {
	return c.client.CoreV1().Pods(Namespace).Get(ctx, name, metav1.GetOptions{})
}

// WaitPod waits until a pod is as ok wants it; what says for people what that is.
func (c *ControlPlane) WaitPod(ctx context.Context, name, what string, ok func(*corev1.Pod) bool) (*corev1.Pod, error) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		pod, err := c.Pod(ctx, name)
		if err == nil && ok(pod) {
			return pod, nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			if pod != nil {
				err = errors.Join(err, fmt.Errorf("it is %s: %s %s", pod.Status.Phase, pod.Status.Reason, statusesOf(pod)))
			}
			return pod, fmt.Errorf("pod %s does not %s: %w (%w)", name, what, ctx.Err(), err)
		}
	}
}

func statusesOf(p *corev1.Pod) string {
	var parts []string
	for _, s := range p.Status.ContainerStatuses {
		switch {
		case s.State.Waiting != nil:
			parts = append(parts, s.State.Waiting.Reason+" "+s.State.Waiting.Message)
		case s.State.Terminated != nil:
			parts = append(parts, s.State.Terminated.Reason+" "+s.State.Terminated.Message)
		}
	}
	return strings.Join(parts, "; ")
}

// Delete deletes a pod and waits until it is gone.
func (c *ControlPlane) Delete(ctx context.Context, name string) error {
	err := c.client.CoreV1().Pods(Namespace).Delete(ctx, name, metav1.DeleteOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete pod %s: %w", name, err)
	}
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		if _, err := c.Pod(ctx, name); apierrors.IsNotFound(err) {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("pod %s is not gone: %w", name, ctx.Err())
		}
	}
}

// Exec runs a command in a pod's container through the API server and the kubelet, and returns what it prints.
func (c *ControlPlane) Exec(ctx context.Context, pod string, command ...string) (string, error) {
	return c.ExecWith(ctx, pod, nil, command...)
}

// ExecWith does the same with a standard input, if it is not nil.
func (c *ControlPlane) ExecWith(ctx context.Context, pod string, in io.Reader, command ...string) (string, error) {
	var out, errOut bytes.Buffer
	err := c.Stream(ctx, pod, "exec", &corev1.PodExecOptions{Command: command, Stdin: in != nil, Stdout: true, Stderr: true},
		remotecommand.StreamOptions{Stdin: in, Stdout: &out, Stderr: &errOut})
	if err != nil {
		return out.String(), fmt.Errorf("run %v in pod %s: %w: %s", command, pod, err, errOut.String())
	}
	return out.String(), nil
}

// Stream opens exec or attach of a pod's container, with the options of the subresource.
func (c *ControlPlane) Stream(ctx context.Context, pod, subresource string, options apiruntime.Object, streams remotecommand.StreamOptions) error {
	request := c.client.CoreV1().RESTClient().Get().Resource("pods").Namespace(Namespace).Name(pod).
		SubResource(subresource).VersionedParams(options, scheme.ParameterCodec)
	executor, err := remotecommand.NewWebSocketExecutor(c.rest, http.MethodGet, request.URL().String())
	if err != nil {
		return fmt.Errorf("open %s of pod %s: %w", subresource, pod, err)
	}
	return executor.StreamWithContext(ctx, streams)
}

// Logs opens the log of a pod's container.
func (c *ControlPlane) Logs(ctx context.Context, pod string, o *corev1.PodLogOptions) (io.ReadCloser, error) {
	return c.client.CoreV1().Pods(Namespace).GetLogs(pod, o).Stream(ctx)
}
