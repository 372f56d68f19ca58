// Package runtime runs a real containerd of one's own: own root, state, sockets (gRPC, ttrpc, debug, NRI, shims), own
// runc folder and configuration, so that it shares nothing with another containerd on the machine. It can be stopped,
// killed and started again as often as a test likes, and closing it ends its shims and containers too.
//
// For integration tests, the demo and the lab. It needs root, and runc in PATH.
package runtime

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/moby/sys/mountinfo"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/lab/sweep"
)

const (
	socketName = "c.sock"
	nriName    = "nri.sock"
	logName    = "containerd.log"
	configName = "config.toml"

	// maxSocketPath is what a unix socket's address holds; the longest name we put below Dir is a shim's: s/ and 64 digits.
	maxSocketPath = 107
	longestSocket = len("/s/") + 64

	// newestConfig is the newest version of containerd's configuration, oldestConfig the oldest that is written.
	newestConfig, oldestConfig = 4, 3

	startLimit = 60 * time.Second
	stopLimit  = 20 * time.Second
)

// Options say how a containerd is set up. Dir, Containerd and Shim are required.
type Options struct {
	// Dir is the folder that everything but Root and SnapshotterRoots lies in. It is made, and must be short: at most
	// 40 bytes, because of the sockets in it. It must belong to this containerd alone.
	Dir string
	// Containerd and Shim are the paths of the binaries.
	Containerd, Shim string
	// ConfigVersion is the version of the configuration to write: 4, or 3 for one that does not know 4, which has to be
	// apart (lab/enclave), because its shims use a fixed folder below /run. 0 means 4.
	ConfigVersion int

	// Root is containerd's root folder, where images and snapshots are; empty means Dir/root.
	Root string
	// Snapshotter is the one that pods get; empty means overlayfs.
	Snapshotter string
	// SnapshotterRoots gives snapshotters (by name, such as overlayfs) a root folder of their own, for instance on
	// another disk.
	SnapshotterRoots map[string]string
	// CertsDir is a folder with hosts.toml files, as image.Registry.WriteHosts makes it. Empty: no registry is set up.
	CertsDir string
	// SandboxImage is the image that pod sandboxes run; empty means registry.k8s.io/pause:3.10.
	SandboxImage string
	// Cgroup is the cgroup below each hierarchy's root that pods are meant to be in, without a leading slash. See CgroupParent.
	Cgroup string
	// CNIBinDir and CNIConfDir are for pods with a network of their own; empty means folders in Dir that don't exist.
	CNIBinDir, CNIConfDir string
	// LogLevel is containerd's; empty means info.
	LogLevel string
	// Env is added to the environment, as KEY=value.
	Env []string
	// Imports are configuration files that are read after this one: paths, or patterns with a star.
	Imports []string
	// ExtraConfig is TOML text put at the end of the configuration, such as a proxy_plugins table. Tables that are
	// already there can't be repeated.
	ExtraConfig string
}

// Containerd is one containerd, running or not. Its methods are for one caller at a time.
type Containerd struct {
	o      Options
	cmd    *exec.Cmd
	exited chan struct{} // closed when cmd has ended
}

// New makes the folders and the configuration. It starts nothing.
func New(o Options) (*Containerd, error) {
	if err := o.check(); err != nil {
		return nil, fmt.Errorf("set up containerd in %q: %w", o.Dir, err)
	}
	orElse := func(value *string, otherwise string) {
		if *value == "" {
			*value = otherwise
		}
	}
	if err := os.MkdirAll(o.Dir, 0o711); err != nil {
		return nil, fmt.Errorf("make containerd's folder: %w", err)
	}
	dir, err := filepath.EvalSymlinks(o.Dir)
	if err != nil {
		return nil, fmt.Errorf("find containerd's folder: %w", err)
	}
	o.Dir = dir
	orElse(&o.Root, filepath.Join(o.Dir, "root"))
	orElse(&o.Snapshotter, "overlayfs")
	orElse(&o.SandboxImage, "registry.k8s.io/pause:3.10")
	orElse(&o.CNIBinDir, filepath.Join(o.Dir, "cni", "bin"))
	orElse(&o.CNIConfDir, filepath.Join(o.Dir, "cni", "conf.d"))
	orElse(&o.LogLevel, "info")
	o.ConfigVersion = cmp.Or(o.ConfigVersion, newestConfig)
	for _, sub := range []string{"tmp", "s"} {
		if err := os.MkdirAll(filepath.Join(o.Dir, sub), 0o711); err != nil {
			return nil, fmt.Errorf("make containerd's folders: %w", err)
		}
	}
	if err := os.WriteFile(filepath.Join(o.Dir, configName), []byte(o.config()), 0o600); err != nil {
		return nil, fmt.Errorf("write containerd's configuration: %w", err)
	}
	return &Containerd{o: o}, nil
}

func (o Options) check() error {
	if !filepath.IsAbs(o.Dir) {
		return errors.New("the folder must be an absolute path")
	}
	if n := len(o.Dir) + longestSocket; n > maxSocketPath {
		return fmt.Errorf("the folder's path is %d bytes too long for the sockets in it; set TMPDIR to a shorter one", n-maxSocketPath)
	}
	if o.ConfigVersion != 0 && (o.ConfigVersion < oldestConfig || o.ConfigVersion > newestConfig) {
		return fmt.Errorf("a configuration of version %d can't be written, only %d to %d", o.ConfigVersion, oldestConfig, newestConfig)
	}
	if filepath.Base(o.Shim) != "containerd-shim-runc-v2" {
		return fmt.Errorf("the shim must be a file named containerd-shim-runc-v2, not %q", o.Shim)
	}
	for _, binary := range []string{o.Containerd, o.Shim} {
		if info, err := os.Stat(binary); err != nil || !info.Mode().IsRegular() {
			return fmt.Errorf("there is no binary %q; build it with `make toolchain`", binary)
		}
	}
	values := append([]string{o.Dir, o.Root, o.Snapshotter, o.CertsDir, o.SandboxImage, o.CNIBinDir, o.CNIConfDir, o.LogLevel}, o.Imports...)
	for name, root := range o.SnapshotterRoots {
		values = append(values, name, root)
	}
	for _, v := range values {
		if strings.ContainsFunc(v, func(r rune) bool { return r < ' ' || r == 0x7f }) {
			return fmt.Errorf("%q has control characters in it", v)
		}
	}
	return nil
}

// Endpoint is the address of the CRI services, as kubelet and crictl want it.
func (c *Containerd) Endpoint() string { return "unix://" + c.Socket() }

// Socket is the path of containerd's socket, as ctr wants it.
func (c *Containerd) Socket() string { return filepath.Join(c.o.Dir, socketName) }

// NRISocket is the path of the socket for NRI plugins.
func (c *Containerd) NRISocket() string { return filepath.Join(c.o.Dir, nriName) }

// Dir is the folder of this containerd.
func (c *Containerd) Dir() string { return c.o.Dir }

// Root is containerd's root folder.
func (c *Containerd) Root() string { return c.o.Root }

// State is containerd's state folder.
func (c *Containerd) State() string { return filepath.Join(c.o.Dir, "state") }

// ConfigFile is the path of the configuration. It may be changed between Stop and Start.
func (c *Containerd) ConfigFile() string { return filepath.Join(c.o.Dir, configName) }

// LogFile is the path of the log, which all starts append to.
func (c *Containerd) LogFile() string { return filepath.Join(c.o.Dir, logName) }

// CgroupParent is what pod configurations should name as cgroup_parent; empty if Options.Cgroup was.
func (c *Containerd) CgroupParent() string {
	if c.o.Cgroup == "" {
		return ""
	}
	return "/" + c.o.Cgroup
}

// PID is the process id while containerd runs, else 0.
func (c *Containerd) PID() int {
	if !c.running() {
		return 0
	}
	return c.cmd.Process.Pid
}

func (c *Containerd) running() bool {
	if c.cmd == nil {
		return false
	}
	select {
	case <-c.exited:
		return false
	default:
		return true
	}
}

// Start starts containerd and returns when its CRI services answer and say that the runtime is ready. If that does not
// come to pass, containerd is killed and the error has the end of its log. ctx bounds the start, not the life.
func (c *Containerd) Start(ctx context.Context) error {
	if c.running() {
		return fmt.Errorf("start containerd in %s: it runs already as pid %d", c.o.Dir, c.PID())
	}
	log, err := os.OpenFile(c.LogFile(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("open containerd's log: %w", err)
	}
	cmd := exec.Command(c.o.Containerd, "--config", c.ConfigFile())
	cmd.Dir = c.o.Dir
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Env = append(os.Environ(), "PATH="+filepath.Dir(c.o.Shim)+":"+os.Getenv("PATH"), "TMPDIR="+filepath.Join(c.o.Dir, "tmp"))
	cmd.Env = append(append(cmd.Env, c.o.Env...), sweep.MarkEnv+"="+c.o.Dir)
	// A group of its own: Ctrl-C in a terminal is for the program that runs the lab, and it decides what ends first.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	startErr := cmd.Start()
	if err := log.Close(); err != nil && startErr == nil {
		startErr = err
	}
	if startErr != nil {
		return fmt.Errorf("start containerd: %w", startErr)
	}
	exited := make(chan struct{})
	go func() {
		_ = cmd.Wait() //nolint:errcheck // how it ended is in the log; that it ended is what counts
		close(exited)
	}()
	c.cmd, c.exited = cmd, exited
	if err := c.ready(ctx); err != nil {
		return errors.Join(fmt.Errorf("start containerd in %s: %w\n%s", c.o.Dir, err, c.LogTail(20)), c.Kill())
	}
	return nil
}

// ready waits until the runtime says that it is.
func (c *Containerd) ready(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	conn, err := grpc.NewClient(c.Endpoint(), grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithConnectParams(grpc.ConnectParams{
		// It is asked again soon, and less often the longer it takes: one that hangs must not cost its machine a core.
		Backoff: backoff.Config{BaseDelay: 20 * time.Millisecond, Multiplier: 1.3, MaxDelay: 250 * time.Millisecond}, MinConnectTimeout: time.Second,
	}))
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	client := runtimeapi.NewRuntimeServiceClient(conn)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	last := errors.New("it did not answer")
	for {
		answer, err := client.Status(ctx, &runtimeapi.StatusRequest{})
		if err == nil {
			if runtimeReady(answer) {
				return nil
			}
			err = fmt.Errorf("the runtime is not ready: %v", answer.GetStatus().GetConditions())
		}
		if ctx.Err() == nil {
			last = err
		}
		select {
		case <-c.exited:
			return fmt.Errorf("it ended with %s", c.cmd.ProcessState)
		case <-ctx.Done():
			return fmt.Errorf("wait for it: %w (%w)", ctx.Err(), last)
		case <-tick.C:
		}
	}
}

func runtimeReady(answer *runtimeapi.StatusResponse) bool {
	for _, condition := range answer.GetStatus().GetConditions() {
		if condition.GetType() == runtimeapi.RuntimeReady {
			return condition.GetStatus()
		}
	}
	return false
}

// Stop ends containerd with SIGTERM and waits for it; after 20 seconds, or when ctx ends, it is killed. Shims and
// containers go on, as they do when a node's containerd is restarted.
func (c *Containerd) Stop(ctx context.Context) error {
	if !c.running() {
		return nil
	}
	if err := c.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop containerd: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, stopLimit)
	defer cancel()
	select {
	case <-c.exited:
		return nil
	case <-ctx.Done():
		return errors.Join(fmt.Errorf("stop containerd in %s: it did not end: %w; killed", c.o.Dir, ctx.Err()), c.Kill())
	}
}

// Kill ends containerd with SIGKILL and waits for it. Shims and containers go on.
func (c *Containerd) Kill() error {
	if !c.running() {
		return nil
	}
	if err := c.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill containerd: %w", err)
	}
	<-c.exited
	return nil
}

// Restart stops and starts containerd.
func (c *Containerd) Restart(ctx context.Context) error {
	if err := c.Stop(ctx); err != nil {
		return err
	}
	return c.Start(ctx)
}

// Close ends containerd, its shims and all its containers, and unmounts what they had mounted. Files stay, for whoever
// made Dir to remove.
func (c *Containerd) Close(ctx context.Context) error {
	killed := c.Kill()
	return errors.Join(killed, sweep.All(ctx, sweep.Scope{Dir: c.o.Dir, Cgroup: c.o.Cgroup}))
}

// LogTail returns the last lines of the log, or says why it can't.
func (c *Containerd) LogTail(lines int) string { return Tail(c.LogFile(), lines) }

// Tail returns the last lines of a log file, of its last 64 KiB, or says why it can't.
func Tail(path string, lines int) string {
	const tailBytes = 64 << 10
	file, err := os.Open(path)
	if err != nil {
		return fmt.Sprintf("no log: %v", err)
	}
	defer func() { _ = file.Close() }() //nolint:errcheck // opened for reading only
	if info, err := file.Stat(); err == nil && info.Size() > tailBytes {
		if _, err := file.Seek(-tailBytes, io.SeekEnd); err != nil {
			return fmt.Sprintf("no log: %v", err)
		}
	}
	content, err := io.ReadAll(file)
	if err != nil {
		return fmt.Sprintf("no log: %v", err)
	}
	all := bytes.Split(bytes.TrimSpace(content), []byte("\n"))
	return string(bytes.Join(all[max(0, len(all)-lines):], []byte("\n")))
}

// UpperOf returns the folder of a running container's or sandbox's writable layer, by the overlay that is mounted for it.
func (c *Containerd) UpperOf(id string) (string, error) { return UpperIn(c.State(), id) }

// UpperIn is UpperOf for a containerd that somebody else runs, by its state folder.
func UpperIn(state, id string) (string, error) {
	root := filepath.Join(state, "io.containerd.runtime.v2.task", "k8s.io", id, "rootfs")
	mounts, err := mountinfo.GetMounts(mountinfo.SingleEntryFilter(root))
	if err != nil {
		return "", fmt.Errorf("look for the overlay of %s: %w", id, err)
	}
	for _, m := range mounts {
		for option := range strings.SplitSeq(m.VFSOptions, ",") {
			if upper, ok := strings.CutPrefix(option, "upperdir="); ok {
				return upper, nil
			}
		}
	}
	return "", fmt.Errorf("no overlay is mounted on %s", root)
}
