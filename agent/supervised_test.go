package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/agent/upstream"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/lab/need"
	"github.com/cleave-cri/cleave/proxy/unixsock"
)

// serveEnv makes this program a cleave with the configuration file of that name.
const serveEnv = "CLEAVE_TEST_SERVE"

// TestMain lets this program be the service, and its own successor.
func TestMain(m *testing.M) {
	path := os.Getenv(serveEnv)
	if path == "" {
		os.Exit(m.Run())
	}
	if err := serveForTest(path); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func serveForTest(path string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	cfg, err := config.Load(path)
	if err != nil {
		return err
	}
	log, err := NewLog(cfg.Log)
	if err != nil {
		return err
	}
	executable, err := os.Executable()
	if err != nil {
		return err
	}
	return Serve(ctx, cfg, Options{Version: "test", Handover: make(chan os.Signal), Executable: executable, Log: log})
}

// slowRuntime answers Version, and StopContainer when it is released.
type slowRuntime struct {
	runtimeapi.UnimplementedRuntimeServiceServer
	began, release chan struct{}
}

func (*slowRuntime) Version(context.Context, *runtimeapi.VersionRequest) (*runtimeapi.VersionResponse, error) {
	return &runtimeapi.VersionResponse{RuntimeName: "slow"}, nil
}

func (r *slowRuntime) StopContainer(ctx context.Context, _ *runtimeapi.StopContainerRequest) (*runtimeapi.StopContainerResponse, error) {
	r.began <- struct{}{}
	select {
	case <-r.release:
	case <-ctx.Done():
	}
	return &runtimeapi.StopContainerResponse{}, nil
}

// patience bounds each wait; all of them end in some seconds.
const patience = 2 * time.Minute

// manager is a service manager as small as can be: it listens for the service,
// starts it and hears what it says.
type manager struct {
	t       *testing.T
	dir     string
	cfg     config.Config
	notes   *net.UnixConn
	listen  *net.UnixListener
	runtime *slowRuntime
	ended   map[int]chan error
}

// note is a message from the service and the process that sent it.
type note struct {
	pid   int
	lines []string
}

func (n note) has(line string) bool { return slices.Contains(n.lines, line) }

func (n note) value(key string) string {
	for _, l := range n.lines {
		if v, ok := strings.CutPrefix(l, key+"="); ok {
			return v
		}
	}
	return ""
}

func newManager(t *testing.T) *manager {
	t.Helper()
	need.Root(t)
	dir, err := os.MkdirTemp("", "svc") // a socket's path is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	m := &manager{t: t, dir: dir, cfg: config.Default(), ended: map[int]chan error{},
		runtime: &slowRuntime{began: make(chan struct{}, 1), release: make(chan struct{})}}
	runtime, err := net.Listen("unix", filepath.Join(dir, "runtime.sock"))
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	runtimeapi.RegisterRuntimeServiceServer(server, m.runtime)
	served := make(chan error, 1)
	go func() { served <- server.Serve(runtime) }()
	t.Cleanup(func() {
		server.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})

	if m.notes, err = net.ListenUnixgram("unixgram", &net.UnixAddr{Name: filepath.Join(dir, "notify"), Net: "unixgram"}); err != nil {
		t.Fatal(err)
	}
	if err := passCredentials(m.notes); err != nil {
		t.Fatal(err)
	}
	m.cfg.Listen.Endpoint = config.Endpoint(filepath.Join(dir, "cleave.sock"))
	if m.listen, err = unixsock.Listen(m.cfg.Listen.Endpoint.Path(), unixsock.RootOnly); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(m.notes.Close(), m.listen.Close()); err != nil {
			t.Error(err)
		}
	})
	m.configure("cri")
	return m
}

func passCredentials(c *net.UnixConn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var sockErr error
	err = raw.Control(func(fd uintptr) {
		sockErr = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_PASSCRED, 1)
	})
	return errors.Join(err, sockErr)
}

func (m *manager) configure(mode string) {
	m.t.Helper()
	m.cfg.Control.Endpoint = config.Endpoint(filepath.Join(m.dir, "control.sock"))
	text := fmt.Sprintf("version: 1\nmode: %s\nruntime: {endpoint: %s}\nlisten: {endpoint: %s}\ncontrol: {endpoint: %s}\nstateDir: %s\nfilesystems: {nodefs: %s, logs: %s}\n",
		mode, filepath.Join(m.dir, "runtime.sock"), m.cfg.Listen.Endpoint.Path(), m.cfg.Control.Endpoint.Path(), filepath.Join(m.dir, "state"), m.dir, m.dir)
	if err := os.WriteFile(filepath.Join(m.dir, "config.yaml"), []byte(text), 0o600); err != nil {
		m.t.Fatal(err)
	}
}

// start starts the service, with the socket, the environment and the watchdog
// that systemd would give it.
func (m *manager) start() (pid int) {
	m.t.Helper()
	self, err := os.Executable()
	if err != nil {
		m.t.Fatal(err)
	}
	// The shell has the process number that the program then has.
	cmd := exec.Command("/bin/sh", "-c", `LISTEN_PID=$$ WATCHDOG_PID=$$ exec "$0"`, self) //nolint:noctx // it is ended below
	cmd.Env = append(os.Environ(), serveEnv+"="+filepath.Join(m.dir, "config.yaml"),
		"NOTIFY_SOCKET="+filepath.Join(m.dir, "notify"), "LISTEN_FDS=1", "LISTEN_FDNAMES=cleave.socket",
		"WATCHDOG_USEC="+strconv.FormatInt((3*time.Second).Microseconds(), 10))
	cmd.Stderr = os.Stderr
	f, err := m.listen.File()
	if err != nil {
		m.t.Fatal(err)
	}
	cmd.ExtraFiles = []*os.File{f}
	if err := errors.Join(cmd.Start(), f.Close()); err != nil {
		m.t.Fatal(err)
	}
	pid = cmd.Process.Pid
	ended := make(chan error, 1)
	m.ended[pid] = ended
	go func() { ended <- cmd.Wait() }()
	m.t.Cleanup(func() { _ = cmd.Process.Kill() }) //nolint:errcheck // it is over
	return pid
}

// hear waits for a message.
func (m *manager) hear(what string, wanted func(note) bool) note {
	m.t.Helper()
	if err := m.notes.SetReadDeadline(time.Now().Add(patience)); err != nil {
		m.t.Fatal(err)
	}
	var heard []note
	for {
		text, oob := make([]byte, 4096), make([]byte, 128)
		n, on, _, _, err := m.notes.ReadMsgUnix(text, oob)
		if err != nil {
			m.t.Fatalf("waiting for %s: %v; heard %v", what, err, heard)
		}
		messages, err := syscall.ParseSocketControlMessage(oob[:on])
		if err != nil || len(messages) == 0 {
			m.t.Fatalf("a message without credentials: %v", err)
		}
		from, err := syscall.ParseUnixCredentials(&messages[0])
		if err != nil {
			m.t.Fatal(err)
		}
		got := note{int(from.Pid), strings.Split(string(text[:n]), "\n")}
		if wanted(got) {
			return got
		}
		heard = append(heard, got)
	}
}

// ready waits for READY of a process, and looks that a call is answered then.
func (m *manager) ready(pid int) note {
	m.t.Helper()
	n := m.hear(fmt.Sprintf("READY of %d", pid), func(n note) bool { return n.has("READY=1") && n.pid == pid })
	if got := n.value("MAINPID"); got != strconv.Itoa(pid) {
		m.t.Errorf("READY names the main process %s, want %d", got, pid)
	}
	if err := m.version(); err != nil {
		m.t.Errorf("READY was said and a call failed: %v", err)
	}
	return n
}

// connect is a connection that waits for a server.
func (m *manager) connect() *grpc.ClientConn {
	m.t.Helper()
	conn, err := upstream.Connect("", upstream.Plain(m.cfg.Listen.Endpoint.Path()))
	if err != nil {
		m.t.Fatal(err)
	}
	m.t.Cleanup(func() { _ = conn.Close() }) //nolint:errcheck // it is over
	return conn
}

func (m *manager) version() error {
	m.t.Helper()
	ctx, cancel := context.WithTimeout(m.t.Context(), patience)
	defer cancel()
	a, err := runtimeapi.NewRuntimeServiceClient(m.connect()).Version(ctx, &runtimeapi.VersionRequest{}, grpc.WaitForReady(true))
	if err == nil && a.GetRuntimeName() != "slow" {
		return fmt.Errorf("another runtime answered: %v", a)
	}
	return err
}

// slowCall makes a call that is answered when the runtime is released, and
// returns when the runtime has it.
func (m *manager) slowCall() <-chan error {
	m.t.Helper()
	out := make(chan error, 1)
	client := runtimeapi.NewRuntimeServiceClient(m.connect())
	go func() {
		_, err := client.StopContainer(m.t.Context(), &runtimeapi.StopContainerRequest{ContainerId: "c"})
		out <- err
	}()
	<-m.runtime.began
	return out
}

func (m *manager) waitEnd(pid int) error {
	m.t.Helper()
	select {
	case err := <-m.ended[pid]:
		return err
	case <-time.After(patience):
		m.t.Fatalf("process %d goes on", pid)
		return nil
	}
}

func (m *manager) handOver() int {
	m.t.Helper()
	ctx, cancel := context.WithTimeout(m.t.Context(), patience)
	defer cancel()
	pid, err := AskHandover(ctx, m.cfg.Control.Endpoint.Path())
	if err != nil {
		m.t.Fatal(err)
	}
	return pid
}

func alive(n note) bool { return n.has("WATCHDOG=1") }

// TestServiceLife is a service's life under its manager: started with a socket,
// replaced, killed, started again while a caller waits, ended.
func TestServiceLife(t *testing.T) {
	t.Parallel()
	m := newManager(t)
	first := m.start()
	n := m.ready(first)
	if want := "Serving the kubelet on " + m.cfg.Listen.Endpoint.Path() + ", mode cri"; n.value("STATUS") != want {
		t.Errorf("got the status %q, want %q", n.value("STATUS"), want)
	}
	for range 2 {
		m.hear("a sign of life", func(n note) bool { return alive(n) && n.pid == first })
	}

	slow := m.slowCall()
	before := monotonic(t)
	second := m.handOver()
	n = m.hear("RELOADING", func(n note) bool { return n.has("RELOADING=1") })
	if usec, err := strconv.ParseUint(n.value("MONOTONIC_USEC"), 10, 64); err != nil || usec < before || usec > monotonic(t) {
		t.Errorf("RELOADING at %q, want a time from %d to now: %v", n.value("MONOTONIC_USEC"), before, err)
	}
	m.ready(second)
	m.hear("the successor's sign of life", func(n note) bool {
		if alive(n) && n.pid == first {
			t.Error("the old process goes on pinging after it was replaced")
		}
		return alive(n) && n.pid == second
	})
	close(m.runtime.release)
	if err := <-slow; err != nil {
		t.Errorf("the call in flight was lost: %v", err)
	}
	if err := m.waitEnd(first); err != nil {
		t.Errorf("the old process ended with %v", err)
	}

	// Nobody serves, and a caller waits on the manager's socket.
	if err := syscall.Kill(second, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	waiting := make(chan error, 1)
	go func() { waiting <- m.version() }()
	third := m.start()
	m.ready(third)
	if err := <-waiting; err != nil {
		t.Errorf("a call made while nobody served failed: %v", err)
	}

	if err := syscall.Kill(third, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	m.hear("STOPPING", func(n note) bool { return n.has("STOPPING=1") && n.pid == third })
	if err := m.waitEnd(third); err != nil {
		t.Errorf("told to stop it ended with %v", err)
	}
	if _, err := os.Lstat(m.cfg.Listen.Endpoint.Path()); err != nil {
		t.Errorf("the manager's socket was taken away: %v", err)
	}
	if _, err := os.Lstat(m.cfg.Control.Endpoint.Path()); !os.IsNotExist(err) {
		t.Errorf("cleave's own socket stayed: %v", err)
	}
}

func monotonic(t *testing.T) uint64 {
	t.Helper()
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		t.Fatal(err)
	}
	return uint64(now.Nano() / 1000)
}

// TestReloadWithBrokenConfiguration: the old process goes on, and who asked for
// the handover is told why.
func TestReloadWithBrokenConfiguration(t *testing.T) {
	t.Parallel()
	m := newManager(t)
	pid := m.start()
	m.ready(pid)
	m.configure("nonsense")
	if _, err := AskHandover(t.Context(), m.cfg.Control.Endpoint.Path()); err == nil || !strings.Contains(err.Error(), "ended before it was ready") {
		t.Errorf("the handover ended with %v, want that the new process ended", err)
	}
	n := m.ready(pid)
	if s := n.value("STATUS"); !strings.HasPrefix(s, "No new process took over, the old one goes on") {
		t.Errorf("got the status %q", s)
	}
	m.hear("a sign of life", func(n note) bool { return alive(n) && n.pid == pid })
}

// TestSuccessorDies while the old process still answers calls: the old one is
// the main process again, so that the manager notices its end and starts another.
func TestSuccessorDies(t *testing.T) {
	t.Parallel()
	m := newManager(t)
	first := m.start()
	m.ready(first)
	slow := m.slowCall()
	second := m.handOver()
	m.ready(second)
	if err := syscall.Kill(second, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	m.hear("the old process as main process", func(n note) bool {
		return n.pid == first && n.value("MAINPID") == strconv.Itoa(first) && !n.has("READY=1")
	})
	close(m.runtime.release)
	if err := <-slow; err != nil {
		t.Errorf("the call in flight was lost: %v", err)
	}
	if err := m.waitEnd(first); err == nil {
		t.Error("the old process ended as if all was well: with Restart=on-failure nobody would be started")
	}
	third := m.start()
	m.ready(third)
}

// TestWhoIsToBlame: only a cleave that gives no answer while the runtime does is
// one to be ended.
func TestWhoIsToBlame(t *testing.T) {
	t.Parallel()
	answers := func(context.Context) error { return nil }
	hangs := func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
	refuses := func(context.Context) error { return status.Error(codes.Unavailable, "no runtime") }
	for _, tc := range []struct {
		name            string
		through, direct asker
		answered        bool
		runtime         bool // is something wrong with it?
	}{
		{"all is well", answers, answers, true, false},
		{"cleave says that the runtime is away", refuses, hangs, true, true},
		{"the runtime hangs", hangs, hangs, true, true},
		{"the runtime hangs, then refuses", hangs, refuses, true, true},
		{"cleave hangs", hangs, answers, false, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				b := pulse{through: tc.through, direct: tc.direct, limit: time.Second}.look(t.Context())
				if b.answered != tc.answered || (b.runtime != nil) != tc.runtime {
					t.Errorf("got %+v, want answered %v and a runtime with an error %v", b, tc.answered, tc.runtime)
				}
			})
		})
	}
}
