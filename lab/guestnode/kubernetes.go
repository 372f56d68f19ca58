package guestnode

import (
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"embed"
	"encoding/pem"
	"errors"
	"fmt"
	"maps"
	"path"

	"github.com/cleave-cri/cleave/lab/guest"
)

//go:embed kubernetes
var kubernetes embed.FS

// Kubernetes says where its programs are.
type Kubernetes struct{ Etcd, APIServer, Kubelet string }

// What a node with Kubernetes listens on, inside the guest. Whoever says the token may do everything: nobody else can reach
// it.
const (
	APIServerURL = "https://127.0.0.1:6443"
	KubeletURL   = "https://127.0.0.1:10250"
	// Token is for the API server's Authorization header; the kubelet asks for none.
	Token = "guest"
	// NodeName is the node's name.
	NodeName = "guest"
)

// StartKubernetes is a shell script that starts what AddKubernetes passed in, and returns when the API server answers and
// the kubelet runs. The node has an address, which the kubelet wants, on an interface that leads nowhere. It becomes Ready
// only with a CNI plugin; pods on the host's network that name the node run all the same.
const StartKubernetes = `set -x
ip link add node type dummy
ip address add 10.99.0.1/24 dev node
ip link set node up
ip route add default dev node
systemctl start etcd kube-apiserver kubelet
set +x
`

// AddKubernetes adds etcd, the API server and the kubelet as units to a node, with the kubelet behind cleave and on the
// systemd driver.
func AddKubernetes(o *Options, k Kubernetes) error {
	o.Programs, o.Files = maps.Clone(o.Programs), maps.Clone(o.Files)
	if o.Programs == nil {
		o.Programs = map[string]string{}
	}
	if o.Files == nil {
		o.Files = map[string]guest.File{}
	}
	for name, program := range map[string]string{"etcd": k.Etcd, "kube-apiserver": k.APIServer, "kubelet": k.Kubelet} {
		if program == "" {
			return fmt.Errorf("put Kubernetes on a node in a guest: no path of %s is given", name)
		}
		o.Programs[name] = program
	}
	entries, err := kubernetes.ReadDir("kubernetes")
	if err != nil {
		return err
	}
	for _, e := range entries {
		content, err := kubernetes.ReadFile(path.Join("kubernetes", e.Name()))
		if err != nil {
			return err
		}
		dir := "/etc/kubernetes"
		if path.Ext(e.Name()) == ".service" {
			dir = "/etc/systemd/system"
		}
		add(o.Files, path.Join(dir, e.Name()), content)
	}
	// The API server wants a key for tokens of service accounts, though nobody has one here.
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return fmt.Errorf("make the API server's key: %w", err)
	}
	add(o.Files, "/etc/kubernetes/accounts.key", pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)}))
	return nil
}

//go:embed kubelet
var kubelet embed.FS

// ManifestsDir is where a kubelet that is alone finds its pods.
const ManifestsDir = "/var/lib/manifests"

// StartKubelet is for Options.Command.
const StartKubelet = `mkdir -p ` + ManifestsDir + `
systemctl start kubelet
`

// AddKubelet puts a kubelet beside containerd on a plain node, with no cluster: it runs the pods of ManifestsDir.
func AddKubelet(o *Options, program string) error {
	if program == "" {
		return errors.New("put a kubelet on a node in a guest: no path of it is given")
	}
	o.Programs, o.Files = maps.Clone(o.Programs), maps.Clone(o.Files)
	if o.Programs == nil {
		o.Programs = map[string]string{}
	}
	if o.Files == nil {
		o.Files = map[string]guest.File{}
	}
	o.Programs["kubelet"] = program
	for name, at := range map[string]string{
		"kubelet.service": "/etc/systemd/system/kubelet.service", "kubelet.yaml": "/etc/kubernetes/kubelet.yaml", "crictl.yaml": "/etc/crictl.yaml",
	} {
		content, err := kubelet.ReadFile(path.Join("kubelet", name))
		if err != nil {
			return err
		}
		add(o.Files, at, content)
	}
	return nil
}

// add adds a file, unless the caller has one of his own in its place.
func add(files map[string]guest.File, name string, content []byte) {
	if _, ok := files[name]; !ok {
		files[name] = guest.File{Content: content}
	}
}
