// Package deputy stands in for a kubelet and its API server where the lab runs
// without them: one small process that cleave takes for a kubelet, by its name and
// arguments, and that answers what cleave asks an API server about one node.
//
// It does of a kubelet's work what the lab needs: it runs pods through a CRI
// endpoint, starts containers again, rotates their logs as the kubelet does,
// compression included, and ends pods that are deleted or evicted. It looks at no
// disk, evicts nobody and collects nothing: with it cleave is alone. It knows no
// disruption budgets, no roles and no admission.
//
// For the lab. It needs root. The process is the program itself, started again:
// main, or TestMain, calls Main right after janitor.Main.
package deputy

import (
	"bufio"
	"context"
	"crypto/subtle"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"go.yaml.in/yaml/v3"
	"golang.org/x/sync/errgroup"

	"github.com/cleave-cri/cleave/lab/pod"
	"github.com/cleave-cri/cleave/lab/podapi"
	"github.com/cleave-cri/cleave/lab/runtime"
)

const (
	// deputyEnv tells a process that it is a deputy; the value is its folder.
	deputyEnv = "CLEAVE_LAB_DEPUTY"

	optionsFile    = "deputy.json"
	kubeconfigFile = "kubeconfig"
	logFile        = "deputy.log"

	startLimit = 30 * time.Second
	// NodeName is the name of the one node.
	NodeName = "lab"
)

// Options say what a deputy does. All but Settings and Env are required.
type Options struct {
	// Dir is the folder for its files; made.
	Dir string
	// Endpoint is the CRI endpoint that it runs pods through, as a kubelet has it.
	Endpoint string
	// RootDir and PodLogsDir are the kubelet's folders, on the disks where they
	// belong; made.
	RootDir, PodLogsDir string
	// CgroupParent is the pods' cgroup parent, as CRI wants it.
	CgroupParent string
	// Settings are keys of the kubelet's configuration that cleave is to find.
	Settings map[string]any
	// LogMaxBytes and LogMaxFiles are by which logs are rotated; 0 means the
	// kubelet's 10 MiB and 5.
	LogMaxBytes int64
	LogMaxFiles int
	// Env is its environment.
	Env []string `json:"-"`

	// Identity is made by Start.
	Identity Identity
}

// Deputy is a deputy's process. Its methods are for one caller at a time.
type Deputy struct {
	dir string
	cmd *exec.Cmd
	end chan struct{} // closed when cmd has ended
}

// Main turns this process into a deputy if it was started as one, and does not
// return then.
func Main() {
	dir := os.Getenv(deputyEnv)
	if dir == "" {
		return
	}
	if err := serve(dir); err != nil {
		fmt.Fprintln(os.Stderr, "deputy:", err)
		os.Exit(1) //nolint:forbidigo // this is the deputy's main
	}
	os.Exit(0) //nolint:forbidigo // this is the deputy's main
}

// Start starts a deputy and waits until it answers. The CRI endpoint need not be
// there yet. ctx bounds the start, not the life.
func Start(ctx context.Context, o Options) (*Deputy, error) {
	d := &Deputy{dir: o.Dir, end: make(chan struct{})}
	if err := d.prepare(o); err != nil {
		return nil, fmt.Errorf("prepare the kubelet's deputy: %w", err)
	}
	log, err := os.OpenFile(d.LogFile(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("start the kubelet's deputy: %w", err)
	}
	heard, said, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start the kubelet's deputy: %w", err), log.Close())
	}
	cmd := exec.Command("/proc/self/exe") //nolint:noctx // it outlives ctx
	// By these cleave finds its kubelet, and what that is set up with.
	cmd.Args = []string{
		"kubelet", "--config=" + d.at("config.yaml"), "--kubeconfig=" + d.Kubeconfig(), "--root-dir=" + o.RootDir, "--hostname-override=" + NodeName,
	}
	cmd.Env = append(o.Env, deputyEnv+"="+o.Dir)
	cmd.Stdout, cmd.Stderr = said, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	err = cmd.Start()
	if closed := errors.Join(log.Close(), said.Close()); err == nil {
		err = closed
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start the kubelet's deputy: %w", err), heard.Close())
	}
	d.cmd = cmd
	go func() { // ends with the process, which Stop or the run's janitor ends
		_ = cmd.Wait() //nolint:errcheck // how it ended is in its log
		close(d.end)
	}()
	if err := d.wait(ctx, heard); err != nil {
		return nil, errors.Join(err, d.Stop(context.WithoutCancel(ctx)))
	}
	return d, nil
}

// wait waits until the process says that it answers.
func (d *Deputy) wait(ctx context.Context, heard *os.File) error {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	defer heard.Close()                                                              //nolint:errcheck // only read
	stop := context.AfterFunc(ctx, func() { _ = heard.SetReadDeadline(time.Now()) }) //nolint:errcheck // pipes have deadlines
	defer stop()
	line, err := bufio.NewReader(heard).ReadString('\n')
	if err != nil || line != ready+"\n" {
		return fmt.Errorf("the kubelet's deputy does not answer: %w\n%s", errors.Join(err, ctx.Err()), runtime.Tail(d.LogFile(), 20))
	}
	return nil
}

// ready is what a deputy says when it answers.
const ready = "ready"

func (d *Deputy) at(name string) string { return filepath.Join(d.dir, name) }

// Kubeconfig is the file with which its API server is reached.
func (d *Deputy) Kubeconfig() string { return d.at(kubeconfigFile) }

// LogFile is the path of its log.
func (d *Deputy) LogFile() string { return d.at(logFile) }

// PID is its process.
func (d *Deputy) PID() int { return d.cmd.Process.Pid }

// Stop ends it; pods go on.
func (d *Deputy) Stop(ctx context.Context) error {
	if err := d.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop the kubelet's deputy: %w", err)
	}
	select {
	case <-d.end:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("stop the kubelet's deputy (pid %d): %w", d.PID(), ctx.Err())
	}
}

// prepare writes what the process reads, and what cleave reads about it.
func (d *Deputy) prepare(o Options) error {
	manifests := d.at("manifests")
	for _, dir := range []string{o.Dir, o.RootDir, o.PodLogsDir, manifests} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	port, err := freePort()
	if err != nil {
		return err
	}
	if o.Identity, err = newIdentity(); err != nil {
		return err
	}
	settings := map[string]any{
		"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
		"containerRuntimeEndpoint": o.Endpoint, "podLogsDir": o.PodLogsDir, "staticPodPath": manifests,
		"cgroupDriver": "cgroupfs", "cgroupRoot": o.CgroupParent, "enforceNodeAllocatable": []string{"none"},
	}
	for key, value := range o.Settings {
		settings[key] = value
	}
	config, err := yaml.Marshal(settings)
	if err != nil {
		return err
	}
	options, err := json.Marshal(o)
	if err != nil {
		return err
	}
	for name, text := range map[string][]byte{"config.yaml": config, optionsFile: options, kubeconfigFile: kubeconfig(fmt.Sprintf("127.0.0.1:%d", port), o.Identity)} {
		if err := os.WriteFile(d.at(name), text, 0o600); err != nil {
			return err
		}
	}
	return nil
}

func kubeconfig(address string, i Identity) []byte {
	return fmt.Appendf(nil, `apiVersion: v1
kind: Config
current-context: lab
clusters: [{name: lab, cluster: {server: "https://%s", certificate-authority-data: %s}}]
users: [{name: lab, user: {token: %q}}]
contexts: [{name: lab, context: {cluster: lab, user: lab}}]
`, address, base64.StdEncoding.EncodeToString(i.CertPEM), i.Token)
}

// freePort finds a port of the loopback that nobody listens on now.
func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	address, ok := l.Addr().(*net.TCPAddr)
	if err := l.Close(); err != nil || !ok {
		return 0, fmt.Errorf("find a free port: %v: %w", l.Addr(), err)
	}
	return address.Port, nil
}

// serve is what the process does.
func serve(dir string) error {
	text, err := os.ReadFile(filepath.Join(dir, optionsFile))
	if err != nil {
		return err
	}
	var o Options
	if err := json.Unmarshal(text, &o); err != nil {
		return fmt.Errorf("read %s: %w", optionsFile, err)
	}
	access, err := podapi.ReadKubeconfig(filepath.Join(dir, kubeconfigFile))
	if err != nil {
		return err
	}
	secure, err := o.Identity.tls()
	if err != nil {
		return err
	}
	listener, err := net.Listen("tcp", strings.TrimPrefix(access.Server, "https://"))
	if err != nil {
		return err
	}
	client, err := pod.Dial(o.Endpoint)
	if err != nil {
		return errors.Join(err, listener.Close())
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT) //nolint:forbidigo // called by the deputy's main
	defer stop()
	signal.Ignore(syscall.SIGHUP, syscall.SIGPIPE)

	group, ctx := errgroup.WithContext(ctx)
	cluster := newCluster()
	keep := &keeper{o: o, client: client, cluster: cluster, group: group}
	cluster.added = func(key string) { group.Go(func() error { keep.pod(ctx, key); return nil }) }
	server := &http.Server{Handler: guarded(o.Identity.Token, cluster.handler(ctx)), TLSConfig: secure, ReadHeaderTimeout: 10 * time.Second}
	group.Go(func() error { keep.rotate(ctx); return nil })
	group.Go(func() error {
		if err := server.ServeTLS(listener, "", ""); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})
	group.Go(func() error {
		<-ctx.Done()
		return server.Close()
	})
	fmt.Println(ready)
	if err := os.Stdout.Close(); err != nil {
		return err
	}
	return errors.Join(group.Wait(), client.Close())
}

// guarded asks each caller for the token: whoever may make pods is root.
func guarded(token string, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if subtle.ConstantTimeCompare([]byte(r.Header.Get("Authorization")), []byte("Bearer "+token)) != 1 {
			fail(w, http.StatusUnauthorized, "Unauthorized", "the token is missing or wrong")
			return
		}
		next.ServeHTTP(w, r)
	})
}
