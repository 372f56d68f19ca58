package crio

import (
	"cmp"
	"context"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cleave-cri/cleave/agent/flight"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/explain"
	"github.com/cleave-cri/cleave/integration/matrix/cell"
	"github.com/cleave-cri/cleave/integration/toolchain/bin"
	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/enclave"
	"github.com/cleave-cri/cleave/lab/janitor"
	"github.com/cleave-cri/cleave/lab/kube"
	"github.com/cleave-cri/cleave/lab/need"
	"github.com/cleave-cri/cleave/lab/node"
	"github.com/cleave-cri/cleave/lab/runtime"
)

// The disks of a node.
const (
	diskImages     = "images"
	diskContainers = "containers"
	// diskNode is the kubelet's, on a node with three.
	diskNode = "node"
)

// cluster is a control plane and its one node.
type cluster struct {
	plane   *kube.ControlPlane
	node    *node.Node
	kubelet *kube.Kubelet
	// alone keeps other kubelets away.
	alone io.Closer
}

// options say what node a test wants.
type options struct {
	// direct puts the kubelet on containerd itself, without cleave between.
	direct bool
	// mode is cleave's; empty means crio.
	mode config.Mode
	// settings are further keys of the kubelet's configuration.
	settings map[string]any
	// kubelet is the name of the kubelet in the toolchain; empty means the newest.
	kubelet string
	// containerd is what runs containers; the zero value means the newest.
	containerd cell.Containerd
	// cleave changes cleave's configuration; nil means no change.
	cleave func(*config.Config)
	// containersBytes is the size of the disk of writable layers; 0 means 2 GiB.
	containersBytes int64
	// separate gives the kubelet's files, volumes and logs a third disk, of 120 GiB; it is sparse, as the others are.
	separate bool
	// account has cleave ask the API server with an identity that is not the kubelet's.
	account bool
	// audit has the API server note every request.
	audit bool
}

// programs are the paths of what a node is made of.
type programs struct{ containerd, shim, kubelet, apiserver, etcd string }

// programs finds them, and builds those that the toolchain's cache lacks.
func (o options) programs(ctx context.Context) (programs, error) {
	runs := o.containerd
	if runs == (cell.Containerd{}) {
		runs = cell.Containerds()[0]
	}
	paths, err := bin.Get(ctx, os.Stderr, runs.Name, runs.Shim, cmp.Or(o.kubelet, "kubelet"), "apiserver", "etcd")
	if err != nil {
		return programs{}, err
	}
	return programs{containerd: paths[0], shim: paths[1], kubelet: paths[2], apiserver: paths[3], etcd: paths[4]}, nil
}

// start makes a split node: image layers on one disk of 1 GiB, writable layers, volumes and logs on another of 2 GiB; or a separate one.
func start(t *testing.T, o options) *cluster {
	t.Helper()
	need.Root(t)
	need.Loop(t)
	need.Tools(t, "runc")
	ctx, cancel := context.WithTimeout(t.Context(), 3*patience) // another node may be there first
	t.Cleanup(cancel)
	c := &cluster{}
	run := need.Lab(t)
	t.Cleanup(func() { c.close(t) })
	if err := c.launch(ctx, t, run, o); err != nil {
		t.Fatal(err)
	}
	return c
}

// launch starts everything; what it has started is in c even if it fails.
func (c *cluster) launch(ctx context.Context, t *testing.T, run *janitor.Run, o options) error {
	t.Helper()
	p, err := o.programs(ctx)
	if err != nil {
		return err
	}
	at := func(name string) string { return filepath.Join(run.Dir(), name) }
	c.plane, err = kube.StartControlPlane(ctx, kube.ControlPlaneOptions{Dir: at("plane"), Etcd: p.etcd, APIServer: p.apiserver, Env: run.Env(), Audit: o.audit})
	if err != nil {
		return err
	}
	// After the start of the control plane, so that others have their turn meanwhile.
	if c.alone, err = enclave.Alone(ctx, func() { t.Log("waits for another node with a kubelet to end") }); err != nil {
		return err
	}
	if o.account {
		if err := c.plane.WriteKubeconfig(at("account.kubeconfig")); err != nil {
			return err
		}
	}
	disks, kubelets := []disk.Spec{
		{Name: diskImages, FS: disk.Ext4, SizeBytes: 1 << 30},
		{Name: diskContainers, FS: disk.Ext4, SizeBytes: cmp.Or(o.containersBytes, 2<<30)},
	}, diskContainers
	if o.separate {
		disks, kubelets = append(disks, disk.Spec{Name: diskNode, FS: disk.Ext4, SizeBytes: 120 << 30}), diskNode
	}
	c.node, err = node.Start(ctx, run, node.Options{
		Containerd: p.containerd, Shim: p.shim,
		Cleave: os.Getenv(cleaveEnv), Disks: disks,
		Configure: func(cfg *config.Config, disks map[string]*disk.Disk) {
			cfg.Mode = cmp.Or(o.mode, config.ModeCRIO)
			cfg.Filesystems.NodeFS = filepath.Join(disks[kubelets].Path(), "kubelet")
			cfg.Filesystems.Logs = filepath.Join(disks[kubelets].Path(), "pods")
			if o.account {
				cfg.Reclaim.Kubeconfig = at("account.kubeconfig")
			}
			if o.cleave != nil {
				o.cleave(cfg)
			}
		},
		Split: &node.SplitOptions{Images: diskImages, Containers: diskContainers},
		Runtime: func(r *runtime.Options, _ map[string]*disk.Disk) {
			r.CNIBinDir, r.CNIConfDir = "/usr/lib/cni", at("cni")
			r.ConfigVersion = o.containerd.ConfigVersion
			writeNetwork(t, at("cni"))
		},
	})
	if err != nil {
		return err
	}
	endpoint := "unix:///var" + c.node.Cleave.Socket()
	if o.mode == config.ModeCRI {
		endpoint = c.node.Cleave.Endpoint()
	}
	if o.direct {
		endpoint = c.node.Runtime.Endpoint()
	}
	disk := c.node.Disks[kubelets].Path()
	c.kubelet, err = kube.NewKubelet(c.plane, kube.KubeletOptions{
		Binary: p.kubelet, Dir: at("kubelet"), Env: run.Env(), Endpoint: endpoint, Containerd: c.node.Runtime.Socket(), Cgroup: run.Cgroup(), Settings: o.settings,
		RootDir: filepath.Join(disk, "kubelet"), PodLogsDir: filepath.Join(disk, "pods"),
	})
	if err != nil {
		return err
	}
	return c.kubelet.Start(ctx)
}

func (c *cluster) close(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience)
	defer cancel()
	if c.kubelet != nil {
		if err := c.kubelet.Stop(ctx); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Logf("kubelet's log:\n%s", c.kubelet.LogTail())
		}
	}
	if c.node != nil {
		if t.Failed() && c.node.Cleave != nil {
			t.Logf("cleave's log:\n%s", c.node.Cleave.LogTail(40))
			t.Logf("its decisions:\n%s", c.decisions())
		}
		if err := c.node.Close(ctx); err != nil {
			t.Error(err)
		}
	}
	if c.alone != nil {
		if err := c.alone.Close(); err != nil {
			t.Error(err)
		}
	}
	if c.plane != nil {
		if err := c.plane.Close(ctx); err != nil {
			t.Error(err)
		}
	}
}

// decisions is what cleave has recorded of the disks, in words.
func (c *cluster) decisions() string {
	var text strings.Builder
	if err := explain.Explain(&text, filepath.Join(c.node.Cleave.Config().StateDir, flight.FileName), ""); err != nil {
		return err.Error()
	}
	return text.String()
}

// writeNetwork gives pods a bridge of their own; it goes with the network namespace.
func writeNetwork(t *testing.T, dir string) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(map[string]any{
		"cniVersion": "1.0.0", "name": "lab",
		"plugins": []any{map[string]any{
			"type": "bridge", "bridge": "cleave0", "isGateway": true,
			"ipam": map[string]any{
				"type": "host-local", "dataDir": filepath.Join(dir, "addresses"),
				"ranges": []any{[]any{map[string]any{"subnet": "10.254.0.0/24"}}},
				"routes": []any{map[string]any{"dst": "0.0.0.0/0"}},
			},
		}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "10-lab.conflist"), text, 0o600); err != nil {
		t.Fatal(err)
	}
}
