package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/cleave-cri/cleave/agent"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/lab/runtime"
	"github.com/cleave-cri/cleave/proxy/unixsock"
)

// Cleave is a `cleave serve` of one's own: the real program in a process. Its
// methods are for one caller at a time.
type Cleave struct {
	binary string
	args   []string
	env    []string
	cfg    config.Config
	log    string

	cmd *exec.Cmd     // the process started last, nil while none was
	end chan struct{} // closed when cmd has ended

	held *net.UnixListener // nil if cleave makes its socket itself
}

// BuildCleave builds the program into a folder and returns its path. race adds
// the race detector, tags are build tags.
func BuildCleave(ctx context.Context, dir string, race bool, tags ...string) (string, error) {
	binary := filepath.Join(dir, strings.Join(append([]string{"cleave"}, tags...), "-"))
	args := []string{"build", "-o", binary, "-tags", strings.Join(tags, ",")}
	if race {
		args = append(args, "-race")
	}
	cmd := exec.CommandContext(ctx, "go", append(args, "github.com/cleave-cri/cleave/cmd/cleave")...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build cleave: %w\n%s", err, out)
	}
	return binary, nil
}

// newCleave prepares a cleave with all its paths below dir, save a socket that cfg
// has somewhere else than usual. It is not started.
func newCleave(binary, dir string, env []string, cfg config.Config) (*Cleave, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("prepare cleave: %w", err)
	}
	if cfg.Listen.Endpoint == config.Default().Listen.Endpoint {
		cfg.Listen.Endpoint = config.Endpoint(filepath.Join(dir, "cleave.sock"))
	}
	if cfg.Mode == config.ModeCRIO {
		// The one place where a kubelet looks for CRI-O; whoever runs this has to be apart (lab/enclave).
		cfg.Listen.Endpoint = "/run/crio/crio.sock"
		if err := os.MkdirAll("/run/crio", 0o755); err != nil {
			return nil, fmt.Errorf("prepare cleave: %w", err)
		}
	}
	cfg.Control.Endpoint = config.Endpoint(filepath.Join(dir, "control.sock"))
	cfg.StateDir = filepath.Join(dir, "state")
	text, err := cfg.YAML()
	if err != nil {
		return nil, fmt.Errorf("prepare cleave: %w", err)
	}
	file := filepath.Join(dir, "config.yaml")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		return nil, fmt.Errorf("prepare cleave: %w", err)
	}
	return &Cleave{
		binary: binary, env: env, cfg: cfg, log: filepath.Join(dir, "log"),
		args: []string{"serve", "--config", file},
	}, nil
}

// newPassthrough prepares a cleave that is started with --passthrough.
func newPassthrough(binary, dir string, env []string, runtime config.Endpoint) (*Cleave, error) {
	c, err := newCleave(binary, dir, env, config.Default())
	if err != nil {
		return nil, err
	}
	c.args = []string{"serve", "--passthrough", "--listen", c.cfg.Listen.Endpoint.String(), "--runtime-endpoint", runtime.String()}
	return c, nil
}

// startLimit bounds the wait for a cleave to answer.
const startLimit = 20 * time.Second

// Start starts the process and waits until somebody answers on its socket.
func (c *Cleave) Start(ctx context.Context) error {
	log, err := os.OpenFile(c.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("start cleave: %w", err)
	}
	cmd := exec.Command(c.binary, c.args...) //nolint:gosec,noctx // our own program; it outlives ctx
	cmd.Env, cmd.Stdout, cmd.Stderr = c.env, log, log
	if c.held != nil {
		socket, err := c.held.File()
		if err != nil {
			return errors.Join(fmt.Errorf("start cleave: %w", err), log.Close())
		}
		defer socket.Close() //nolint:errcheck // the process has its own
		// The shell has the process number that the program then has (sd_listen_fds(3)).
		cmd = exec.Command("/bin/sh", append([]string{"-c", `LISTEN_PID=$$ exec "$0" "$@"`, c.binary}, c.args...)...) //nolint:gosec,noctx // as above
		cmd.Env, cmd.Stdout, cmd.Stderr = append(slices.Clip(c.env), "LISTEN_FDS=1", "LISTEN_FDNAMES=cleave.socket"), log, log
		cmd.ExtraFiles = []*os.File{socket}
	}
	// A group of its own: Ctrl-C in a terminal is for the program that runs the lab, and a kept node outlives the terminal.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	err = errors.Join(cmd.Start(), log.Close())
	if err != nil {
		return fmt.Errorf("start cleave: %w", err)
	}
	end := make(chan struct{})
	c.cmd, c.end = cmd, end
	// Ends with the process, which Stop or the run's janitor ends. How it ended
	// is in its log.
	go func() {
		_ = cmd.Wait() //nolint:errcheck // see above
		close(end)
	}()
	return c.waitFor(ctx, cmd.Process.Pid, end)
}

// Hold listens on cleave's socket from now on and gives it to each process that is
// started, as systemd does by cleave.socket: while none runs, connections wait.
// It is for a cleave that does not run; Release ends it.
func (c *Cleave) Hold() error {
	l, err := unixsock.Listen(c.Socket(), unixsock.RootOnly)
	if err != nil {
		return fmt.Errorf("hold cleave's socket: %w", err)
	}
	c.held = l
	return nil
}

// Release stops listening; the socket's file goes.
func (c *Cleave) Release() error {
	if c.held == nil {
		return nil
	}
	err := errors.Join(c.held.Close(), os.Remove(c.Socket()))
	c.held = nil
	if err != nil {
		return fmt.Errorf("release cleave's socket: %w", err)
	}
	return nil
}

// waitFor waits until the socket answers, and with a control socket until it is
// the given process that does.
func (c *Cleave) waitFor(ctx context.Context, pid int, end <-chan struct{}) error {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		if c.answers(ctx, pid) {
			return nil
		}
		select {
		case <-tick.C:
		case <-end:
			return fmt.Errorf("cleave ended at its start:\n%s", c.LogTail(20))
		case <-ctx.Done():
			return fmt.Errorf("cleave does not answer: %w\n%s", ctx.Err(), c.LogTail(20))
		}
	}
}

func (c *Cleave) answers(ctx context.Context, pid int) bool {
	if c.args[1] == "--passthrough" {
		_, err := os.Stat(c.cfg.Listen.Endpoint.Path())
		return err == nil
	}
	s, err := agent.FetchStatus(ctx, c.cfg.Control.Endpoint.Path())
	return err == nil && s.PID == pid
}

// Status asks the control socket.
func (c *Cleave) Status(ctx context.Context) (agent.Status, error) {
	return agent.FetchStatus(ctx, c.cfg.Control.Endpoint.Path())
}

// Metrics are what it shows to Prometheus.
func (c *Cleave) Metrics(ctx context.Context) (string, error) {
	return agent.FetchMetrics(ctx, c.cfg.Control.Endpoint.Path())
}

// Usage asks the control socket who holds what.
func (c *Cleave) Usage(ctx context.Context) (agent.Usage, error) {
	return agent.FetchUsage(ctx, c.cfg.Control.Endpoint.Path())
}

// WaitMeasured waits until all that containers wrote before now is in their
// figures.
func (c *Cleave) WaitMeasured(ctx context.Context) (agent.Status, error) {
	return c.WaitMeasuredAfter(ctx, time.Now())
}

// WaitMeasuredAfter waits until all that containers wrote before a moment is in
// their figures.
func (c *Cleave) WaitMeasuredAfter(ctx context.Context, moment time.Time) (agent.Status, error) {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		s, err := c.Status(ctx)
		if err == nil && s.FiguresSince != nil && s.FiguresSince.After(moment) {
			return s, nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return s, fmt.Errorf("wait for cleave's next measurement: %w", errors.Join(ctx.Err(), err))
		}
	}
}

// HandOver sends SIGHUP and waits until another process answers the control
// socket. The old process goes on until its calls are answered; the function
// returned waits for that.
func (c *Cleave) HandOver(ctx context.Context) (waitOld func(context.Context) error, _ error) {
	pid, end := c.serving(ctx)
	if err := syscall.Kill(pid, syscall.SIGHUP); err != nil {
		return nil, fmt.Errorf("hand cleave over: %w", err)
	}
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		if s, err := c.Status(ctx); err == nil && s.PID != pid {
			break
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, fmt.Errorf("no successor of cleave came: %w\n%s", ctx.Err(), c.LogTail(20))
		}
	}
	return func(ctx context.Context) error { return waitGone(ctx, pid, end) }, nil
}

// waitGone waits for the end of a process, our child or not.
func waitGone(ctx context.Context, pid int, end <-chan struct{}) error {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		if errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
			return nil
		}
		select {
		case <-tick.C:
		case <-end:
			end = nil
		case <-ctx.Done():
			return fmt.Errorf("process %d has not ended: %w", pid, ctx.Err())
		}
	}
}

// serving returns the process that serves now, which may be a successor of the
// one that we started, and the channel that is closed when ours has ended.
func (c *Cleave) serving(ctx context.Context) (pid int, end <-chan struct{}) {
	pid = c.cmd.Process.Pid
	if s, err := c.Status(ctx); err == nil {
		pid = s.PID
	}
	return pid, c.end
}

// Signal sends a signal to the process that serves now.
func (c *Cleave) Signal(ctx context.Context, sig syscall.Signal) error {
	pid, _ := c.serving(ctx)
	if err := syscall.Kill(pid, sig); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("signal cleave: %w", err)
	}
	return nil
}

// WaitGone waits for the end of the process that was started last.
func (c *Cleave) WaitGone(ctx context.Context) error { return waitGone(ctx, c.cmd.Process.Pid, c.end) }

// Stop ends the process with SIGTERM and waits for it.
func (c *Cleave) Stop(ctx context.Context) error {
	if c.cmd == nil {
		return nil
	}
	pid, end := c.serving(ctx)
	if err := syscall.Kill(pid, syscall.SIGTERM); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("stop cleave: %w", err)
	}
	return waitGone(ctx, pid, end)
}

// Kill ends the process that serves now with SIGKILL and waits for it.
func (c *Cleave) Kill(ctx context.Context) error {
	pid, end := c.serving(ctx)
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		return fmt.Errorf("kill cleave: %w", err)
	}
	return waitGone(ctx, pid, end)
}

// Endpoint is what a kubelet would be given.
func (c *Cleave) Endpoint() string { return c.cfg.Listen.Endpoint.String() }

// Socket is the path of that socket.
func (c *Cleave) Socket() string { return c.cfg.Listen.Endpoint.Path() }

// Config is the configuration that it runs with.
func (c *Cleave) Config() config.Config { return c.cfg }

// ConfigFile is the path of the configuration file that it is started with.
func (c *Cleave) ConfigFile() string { return filepath.Join(filepath.Dir(c.log), "config.yaml") }

// Binary is the path of the program.
func (c *Cleave) Binary() string { return c.binary }

// LogFile is the path of its log.
func (c *Cleave) LogFile() string { return c.log }

// LogTail returns the last lines of the log, or says why it can't.
func (c *Cleave) LogTail(lines int) string { return runtime.Tail(c.log, lines) }
