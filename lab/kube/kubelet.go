package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"go.yaml.in/yaml/v3"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	stats "k8s.io/kubelet/pkg/apis/stats/v1alpha1"

	"github.com/cleave-cri/cleave/lab/enclave"
)

// KubeletOptions say how a kubelet runs.
type KubeletOptions struct {
	// Binary is the path of the program. Required.
	Binary string
	// Dir is the folder for its configuration and log; made. Required.
	Dir string
	// RootDir is the kubelet's root directory, PodLogsDir the folder of pods' logs; both are made, and may be on disks of the
	// lab. Empty means folders in Dir.
	RootDir, PodLogsDir string
	// Endpoint is containerRuntimeEndpoint. Required.
	Endpoint string
	// Containerd is the path of containerd's own socket. The kubelet's cAdvisor asks it about sandboxes, at a path that no setting
	// changes; a link is made there. Required.
	Containerd string
	// Cgroup is a cgroup for all pods, without leading slash, made below the root of each hierarchy. Required: a second kubelet
	// on the root ends the pods of the first (TH-6).
	Cgroup string
	// Settings are further keys of its configuration; they replace ours.
	Settings map[string]any
	// Args are further arguments.
	Args []string
	// Env is its environment.
	Env []string
}

// NodeName is the name of the lab's only node.
const NodeName = "lab"

// Kubelet is a real kubelet, running or not. Its methods are for one caller at a time.
type Kubelet struct {
	process process
	// plane is nil for one that stands alone.
	plane        *ControlPlane
	port, health int
	manifests    string
}

// NewKubelet prepares a kubelet of a control plane, or with nil one that stands alone: then it runs the pods of the files in
// [Kubelet.Manifests] and nobody else's. It starts nothing.
func NewKubelet(plane *ControlPlane, o KubeletOptions) (*Kubelet, error) {
	orIn := func(path, name string) string {
		if path == "" {
			return filepath.Join(o.Dir, name)
		}
		return path
	}
	root, logs := orIn(o.RootDir, "root"), orIn(o.PodLogsDir, "pods")
	manifests := filepath.Join(o.Dir, "manifests")
	for _, dir := range []string{o.Dir, root, logs, manifests} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, fmt.Errorf("prepare a kubelet: %w", err)
		}
	}
	if err := makeCgroups(o.Cgroup); err != nil {
		return nil, err
	}
	if err := linkContainerd(o.Containerd); err != nil {
		return nil, err
	}
	ports, err := freePorts(3)
	if err != nil {
		return nil, err
	}
	var args []string
	if plane != nil {
		kubeconfig := filepath.Join(o.Dir, "kubeconfig")
		if err := plane.WriteKubeconfig(kubeconfig); err != nil {
			return nil, err
		}
		args = append(args, "--kubeconfig="+kubeconfig)
	}
	settings := map[string]any{
		"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
		"containerRuntimeEndpoint": o.Endpoint,
		"address":                  "0.0.0.0", "port": ports[0], "readOnlyPort": ports[1], "healthzPort": ports[2],
		"authentication": map[string]any{"anonymous": map[string]any{"enabled": true}, "webhook": map[string]any{"enabled": false}},
		"authorization":  map[string]any{"mode": "AlwaysAllow"},
		"cgroupRoot":     "/" + o.Cgroup, "cgroupDriver": "cgroupfs", "failCgroupV1": false, "failSwapOn": false,
		"enforceNodeAllocatable": []string{"none"},
		"podLogsDir":             logs, "staticPodPath": manifests,
		"volumePluginDir":           filepath.Join(o.Dir, "plugins"),
		"nodeStatusReportFrequency": "10s", "nodeStatusUpdateFrequency": "2s", "syncFrequency": "10s",
		"shutdownGracePeriod": "0s",
	}
	maps.Copy(settings, o.Settings)
	text, err := yaml.Marshal(settings)
	if err != nil {
		return nil, fmt.Errorf("prepare a kubelet: %w", err)
	}
	file := filepath.Join(o.Dir, "config.yaml")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		return nil, fmt.Errorf("prepare a kubelet: %w", err)
	}
	args = append(args,
		"--config="+file, "--root-dir="+root, "--cert-dir="+filepath.Join(o.Dir, "pki"),
		"--hostname-override="+NodeName, "--node-ip="+enclave.Address, "--v=2",
	)
	return &Kubelet{
		process:   process{binary: o.Binary, args: append(args, o.Args...), env: o.Env, log: filepath.Join(o.Dir, "kubelet.log")},
		plane:     plane,
		port:      portOf(settings["readOnlyPort"], ports[1]),
		health:    portOf(settings["healthzPort"], ports[2]),
		manifests: manifests,
	}, nil
}

// linkContainerd puts a link to containerd's socket where cAdvisor looks for it. /run is the lab's own (see lab/enclave).
func linkContainerd(socket string) error {
	const path = "/run/containerd/containerd.sock"
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return fmt.Errorf("link containerd's socket: %w", err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("link containerd's socket: %w", err)
	}
	return os.Symlink(socket, path)
}

func portOf(value any, otherwise int) int {
	if port, ok := value.(int); ok {
		return port
	}
	return otherwise
}

// Start starts the kubelet and waits until it says that its node is ready; one that stands alone, that it is healthy.
func (k *Kubelet) Start(ctx context.Context) error {
	if k.plane == nil {
		return k.process.start(ctx, func(ctx context.Context) error {
			return get(ctx, "http://127.0.0.1:"+strconv.Itoa(k.health)+"/healthz")
		})
	}
	began := metav1.NewTime(time.Now().Truncate(time.Second))
	return k.process.start(ctx, func(ctx context.Context) error {
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

// Manifests is the folder for files of static pods, unless the settings name another one.
func (k *Kubelet) Manifests() string { return k.manifests }

// Node is the node as the API server has it; it needs one.
func (k *Kubelet) Node(ctx context.Context) (*corev1.Node, error) {
	return k.plane.client.CoreV1().Nodes().Get(ctx, NodeName, metav1.GetOptions{})
}

// Summary is /stats/summary.
func (k *Kubelet) Summary(ctx context.Context) (_ *stats.Summary, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://127.0.0.1:"+strconv.Itoa(k.port)+"/stats/summary", nil)
	if err != nil {
		return nil, err
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, fmt.Errorf("ask the kubelet for its summary: %w", err)
	}
	defer func() { err = errors.Join(err, answer.Body.Close()) }()
	if answer.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("ask the kubelet for its summary: it answers %s", answer.Status)
	}
	var s stats.Summary
	if err := json.NewDecoder(answer.Body).Decode(&s); err != nil {
		return nil, fmt.Errorf("read the kubelet's summary: %w", err)
	}
	return &s, nil
}

// PID is the process started last, 0 while none was.
func (k *Kubelet) PID() int {
	if k.process.cmd == nil {
		return 0
	}
	return k.process.cmd.Process.Pid
}

// Stop ends the kubelet with SIGTERM; pods go on.
func (k *Kubelet) Stop(ctx context.Context) error { return k.process.stop(ctx) }

// Kill ends the kubelet with SIGKILL; pods go on.
func (k *Kubelet) Kill(ctx context.Context) error { return k.process.signal(ctx, syscall.SIGKILL) }

// LogFile is the path of its log.
func (k *Kubelet) LogFile() string { return k.process.log }

// LogTail is the end of its log.
func (k *Kubelet) LogTail() string { return k.process.tail() }
