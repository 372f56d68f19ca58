package plane

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

	"go.yaml.in/yaml/v3"
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

const kubeconfigFile = "kubeconfig"

// Kubelet is a real kubelet, running or not. Its methods are for one caller at a time.
type Kubelet struct {
	process      process
	port, health int
	manifests    string
	kubeconfig   string
}

// NewKubelet prepares a kubelet. It starts nothing. writeKubeconfig writes the file with which it reaches its API server; with nil it
// stands alone, and runs the pods of the files in [Kubelet.Manifests] and nobody else's.
func NewKubelet(writeKubeconfig func(path string) error, o KubeletOptions) (*Kubelet, error) {
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
	if writeKubeconfig != nil {
		kubeconfig := filepath.Join(o.Dir, kubeconfigFile)
		if err := writeKubeconfig(kubeconfig); err != nil {
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
		port:      portOf(settings["readOnlyPort"], ports[1]),
		health:    portOf(settings["healthzPort"], ports[2]),
		manifests: manifests, kubeconfig: filepath.Join(o.Dir, kubeconfigFile),
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

// Start starts the kubelet and waits until it says that it is healthy.
func (k *Kubelet) Start(ctx context.Context) error {
	return k.StartUntil(ctx, func(ctx context.Context) error {
		return get(ctx, "http://127.0.0.1:"+strconv.Itoa(k.health)+"/healthz")
	})
}

// StartUntil starts the kubelet and waits until answers returns no error.
func (k *Kubelet) StartUntil(ctx context.Context, answers func(context.Context) error) error {
	return k.process.start(ctx, answers)
}

// Kubeconfig is the file with which it reaches its API server, if it has one.
func (k *Kubelet) Kubeconfig() string { return k.kubeconfig }

// Manifests is the folder for files of static pods, unless the settings name another one.
func (k *Kubelet) Manifests() string { return k.manifests }

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
func (k *Kubelet) PID() int { return k.process.pid() }

// Stop ends the kubelet with SIGTERM; pods go on.
func (k *Kubelet) Stop(ctx context.Context) error { return k.process.stop(ctx) }

// Kill ends the kubelet with SIGKILL; pods go on.
func (k *Kubelet) Kill(ctx context.Context) error { return k.process.signal(ctx, syscall.SIGKILL) }

// LogFile is the path of its log.
func (k *Kubelet) LogFile() string { return k.process.log }

// LogTail is the end of its log.
func (k *Kubelet) LogTail() string { return k.process.tail() }
