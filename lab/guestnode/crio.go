package guestnode

import (
	"embed"
	"errors"
	"fmt"
	"maps"
	"path"
	"path/filepath"

	"go.yaml.in/yaml/v3"

	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/lab/guest"
	"github.com/cleave-cri/cleave/systemd"
)

//go:embed crio
var crioFiles embed.FS

// CRIOSocket is where the kubelet of a node in mode crio finds its runtime.
const CRIOSocket = "/run/crio/crio.sock"

// KubeletDir and PodLogsDir are the kubelet's root directory and the pods' logs on a node in mode crio: on the disk of the writable
// layers, so that there are two disks in all.
const (
	KubeletDir = "/mnt/" + ContainersDisk + "/kubelet"
	PodLogsDir = "/mnt/" + ContainersDisk + "/pods"
)

// AddCRIO puts a node with Kubernetes into mode crio: the kubelet takes cleave for CRI-O, keeps its files beside the writable layers,
// and pods have a network of their own, by the plugins of that folder on the host. settings are further keys of the kubelet's
// configuration; they replace ours. It comes after AddKubernetes.
func AddCRIO(o *Options, plugins string, settings map[string]any) error {
	const kubeletYAML = "/etc/kubernetes/kubelet.yaml"
	base, ok := o.Files[kubeletYAML]
	if !ok {
		return errors.New("put a node in a guest into mode crio: it has no kubelet; call AddKubernetes first")
	}
	o.Files = maps.Clone(o.Files)
	kubelet := map[string]any{}
	if err := yaml.Unmarshal(base.Content, &kubelet); err != nil {
		return fmt.Errorf("read the kubelet's configuration: %w", err)
	}
	// By /var/run, as the kubelet's own constant is and as manuals for CRI-O have it.
	kubelet["containerRuntimeEndpoint"] = "unix:///var" + CRIOSocket
	kubelet["podLogsDir"] = PodLogsDir
	maps.Copy(kubelet, settings)
	text, err := yaml.Marshal(kubelet)
	if err != nil {
		return fmt.Errorf("write the kubelet's configuration: %w", err)
	}
	o.Files[kubeletYAML] = guest.File{Content: text}
	for name, at := range map[string]string{
		"10-bridge.conflist": "/etc/cni/net.d/10-bridge.conflist",
		"crictl.yaml":        "/etc/crictl.yaml",
		"kubelet.default":    "/etc/default/kubelet",
	} {
		content, err := crioFiles.ReadFile(path.Join("crio", name))
		if err != nil {
			return err
		}
		add(o.Files, at, content)
	}
	dropIns, err := systemd.DropIns(systemd.Setting{Listen: CRIOSocket, HostMounts: true})
	if err != nil {
		return err
	}
	for _, f := range dropIns {
		o.Files["/etc/systemd/system/"+f.Name] = guest.File{Content: f.Content}
	}
	for _, name := range []string{"bridge", "host-local", "loopback"} {
		o.Files["/opt/cni/bin/"+name] = guest.File{Path: filepath.Join(plugins, name)}
	}
	before := o.Configure
	o.Configure = func(c *config.Config) {
		c.Mode = config.ModeCRIO
		c.Settle()
		c.Filesystems.NodeFS, c.Filesystems.Logs = KubeletDir, PodLogsDir
		if before != nil {
			before(c)
		}
	}
	return nil
}
