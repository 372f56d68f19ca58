package plane

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/cleave-cri/cleave/lab/enclave"
	"github.com/cleave-cri/cleave/lab/podapi"
)

// Options say what to run. Dir, Etcd, APIServer and Env are required.
type Options struct {
	// Dir is the folder for everything; it is made.
	Dir string
	// Etcd and APIServer are the paths of the programs.
	Etcd, APIServer string
	// Env is the environment of both.
	Env []string
	// Restrict lets users do what roles allow, and nodes what is theirs (Node, RBAC, NodeRestriction). Otherwise everybody may do
	// everything.
	Restrict bool
	// Audit writes every request to AuditLog.
	Audit bool
	// FreePriorities takes priorities of pods as they are. Otherwise only a class of priorities can give one.
	FreePriorities bool
}

// ControlPlane is an etcd and an API server on the loopback, with one node. Whoever has the token may do everything.
type ControlPlane struct {
	etcd, server process
	access       podapi.Access
	nodeToken    string
	audit        string
}

// Start starts both and returns when the API server is ready.
func Start(ctx context.Context, o Options) (_ *ControlPlane, err error) {
	if err := os.MkdirAll(o.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("start a control plane: %w", err)
	}
	ports, err := freePorts(3)
	if err != nil {
		return nil, err
	}
	store, peer, secure := ports[0], ports[1], ports[2]
	at := func(name string) string { return filepath.Join(o.Dir, name) }
	url := func(port int) string { return fmt.Sprintf("http://127.0.0.1:%d", port) }
	token, nodeToken, err := writeSecrets(at("token.csv"), at("service-account.key"))
	if err != nil {
		return nil, err
	}
	// It signs its own certificate.
	c := &ControlPlane{access: podapi.Access{Server: fmt.Sprintf("https://127.0.0.1:%d", secure), Token: token}, nodeToken: nodeToken}
	// No controller makes service accounts, none taints and untaints nodes (KSS-15).
	off := []string{"ServiceAccount", "TaintNodesByCondition"}
	if o.FreePriorities {
		off = append(off, "Priority")
	}
	authorization := "AlwaysAllow"
	var more []string
	if o.Restrict {
		authorization = "Node,RBAC"
		more = append(more, "--enable-admission-plugins=NodeRestriction")
	}
	if o.Audit {
		c.audit = at("audit.log")
		const policy = "apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\nrules: [{level: Metadata}]\n"
		if err := os.WriteFile(at("audit.yaml"), []byte(policy), 0o600); err != nil {
			return nil, fmt.Errorf("start a control plane: %w", err)
		}
		more = append(more, "--audit-policy-file="+at("audit.yaml"), "--audit-log-path="+c.audit, "--audit-log-mode=blocking")
	}
	c.etcd = process{binary: o.Etcd, env: o.Env, log: at("etcd.log"), args: []string{
		"--name=lab", "--data-dir=" + at("etcd"), "--unsafe-no-fsync",
		"--listen-client-urls=" + url(store), "--advertise-client-urls=" + url(store),
		"--listen-peer-urls=" + url(peer), "--initial-advertise-peer-urls=" + url(peer), "--initial-cluster=lab=" + url(peer),
	}}
	c.server = process{binary: o.APIServer, env: o.Env, log: at("kube-apiserver.log"), args: []string{
		"--etcd-servers=" + url(store), "--bind-address=127.0.0.1", "--advertise-address=" + enclave.Address, "--secure-port=" + strconv.Itoa(secure), "--cert-dir=" + at("certs"),
		"--token-auth-file=" + at("token.csv"), "--authorization-mode=" + authorization, "--service-cluster-ip-range=10.255.0.0/24",
		"--service-account-issuer=https://lab.invalid", "--service-account-key-file=" + at("service-account.key"),
		"--service-account-signing-key-file=" + at("service-account.key"),
		"--disable-admission-plugins=" + strings.Join(off, ","),
		"--kubelet-preferred-address-types=InternalIP",
	}}
	c.server.args = append(c.server.args, more...)
	if err := c.etcd.start(ctx, func(ctx context.Context) error { return get(ctx, url(store)+"/health") }); err != nil {
		return nil, errors.Join(err, c.Close(context.WithoutCancel(ctx)))
	}
	if err := c.StartServer(ctx); err != nil {
		return nil, errors.Join(err, c.Close(context.WithoutCancel(ctx)))
	}
	return c, nil
}

// StartServer starts the API server and returns when it is ready. Start has done so.
func (c *ControlPlane) StartServer(ctx context.Context) error {
	api := podapi.NewClient(c.access)
	defer api.Close()
	return c.server.start(ctx, api.Ready)
}

// KillServer ends the API server at once; what it knows stays in etcd. At SIGTERM it would wait for its watchers, for a minute.
func (c *ControlPlane) KillServer(ctx context.Context) error {
	return c.server.signal(ctx, syscall.SIGKILL)
}

// AuditLog is the file with a line for each request, if that was wanted.
func (c *ControlPlane) AuditLog() string { return c.audit }

// Access is how the API server is reached by one who may do everything.
func (c *ControlPlane) Access() podapi.Access { return c.access }

// NodeToken is the lab's node's, as its kubelet has it.
func (c *ControlPlane) NodeToken() string { return c.nodeToken }

// WriteKubeconfig writes a file with which a kubelet, cleave or kubectl reaches the API server.
func (c *ControlPlane) WriteKubeconfig(path string) error { return WriteKubeconfig(path, c.access) }

// WriteKubeconfig writes such a file for an API server that signs its own certificate.
func WriteKubeconfig(path string, a podapi.Access) error {
	text := fmt.Sprintf(`apiVersion: v1
kind: Config
current-context: lab
clusters: [{name: lab, cluster: {server: %q, insecure-skip-tls-verify: true}}]
users: [{name: lab, user: {token: %q}}]
contexts: [{name: lab, context: {cluster: lab, user: lab}}]
`, a.Server, a.Token)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		return fmt.Errorf("write a kubeconfig: %w", err)
	}
	return nil
}

// PIDs are the processes started last, by what they are.
func (c *ControlPlane) PIDs() map[string]int {
	return map[string]int{"etcd": c.etcd.pid(), "API server": c.server.pid()}
}

// LogTail is the end of the API server's log.
func (c *ControlPlane) LogTail() string { return c.server.tail() }

// Close ends both programs.
func (c *ControlPlane) Close(ctx context.Context) error {
	return errors.Join(c.server.stop(ctx), c.etcd.stop(ctx))
}

// writeSecrets writes the tokens of a user who may do everything and of the lab's node, and the key that signs service accounts'
// tokens.
func writeSecrets(tokens, key string) (token, node string, _ error) {
	random := make([]byte, 32)
	if _, err := rand.Read(random); err != nil {
		return "", "", fmt.Errorf("make tokens: %w", err)
	}
	token, node = hex.EncodeToString(random[:16]), hex.EncodeToString(random[16:])
	lines := token + ",lab,lab,system:masters\n" + node + ",system:node:" + NodeName + ",node,system:nodes\n"
	if err := os.WriteFile(tokens, []byte(lines), 0o600); err != nil {
		return "", "", fmt.Errorf("write the API server's tokens: %w", err)
	}
	private, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return "", "", fmt.Errorf("make a key for service accounts: %w", err)
	}
	block := pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(private)})
	if err := os.WriteFile(key, block, 0o600); err != nil {
		return "", "", fmt.Errorf("write the key for service accounts: %w", err)
	}
	return token, node, nil
}

// freePorts finds ports of the loopback that nobody listens on now.
func freePorts(n int) ([]int, error) {
	ports := make([]int, 0, n)
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, fmt.Errorf("find a free port: %w", err)
		}
		address, ok := l.Addr().(*net.TCPAddr)
		if err := l.Close(); err != nil || !ok {
			return nil, fmt.Errorf("find a free port: %v %w", l.Addr(), err)
		}
		ports = append(ports, address.Port)
	}
	return ports, nil
}

// get succeeds if a page answers with 200.
func get(ctx context.Context, url string) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	if err := answer.Body.Close(); err != nil {
		return err
	}
	if answer.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answers %s", url, answer.Status)
	}
	return nil
}
