package integration

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/cleave-cri/cleave/agent"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/lab/need"
	"github.com/cleave-cri/cleave/lab/node"
	"github.com/cleave-cri/cleave/proxy/proxytest"
	"github.com/cleave-cri/cleave/proxy/unixsock"
)

// TestRuntimeEndpointThatLeadsBackToCleave: a call must not go round without
// end, whatever way leads to cleave's own sockets and whenever it comes to be.
func TestRuntimeEndpointThatLeadsBackToCleave(t *testing.T) {
	t.Parallel()
	need.Root(t)
	const wrong = "leads to cleave's own socket"
	for _, of := range []string{"cleave.sock", "control.sock"} {
		t.Run("symlink before the start to "+of, func(t *testing.T) {
			t.Parallel()
			run := need.Lab(t)
			loop := filepath.Join(run.Dir(), "loop.sock")
			c := alone(t, run, loop)
			if err := os.Symlink(filepath.Join(filepath.Dir(c.Socket()), of), loop); err != nil {
				t.Fatal(err)
			}
			err := c.Start(bounded(t))
			if err == nil || !strings.Contains(err.Error(), wrong) || !strings.Contains(err.Error(), loop) {
				t.Errorf("it starts: %v", err)
			}
			if _, err := os.Lstat(c.Socket()); !os.IsNotExist(err) {
				t.Errorf("its socket is left behind: %v", err)
			}
			stopAtEnd(t, c)
		})
	}
	for name, lead := range map[string]func(t *testing.T, socket, loop string){
		"symlink": func(t *testing.T, socket, loop string) {
			t.Helper()
			if err := os.Symlink(socket, loop); err != nil {
				t.Fatal(err)
			}
		},
		"bind mount": func(t *testing.T, socket, loop string) {
			t.Helper()
			if err := os.WriteFile(loop, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := unix.Mount(socket, loop, "", unix.MS_BIND, ""); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := unix.Unmount(loop, 0); err != nil {
					t.Error(err)
				}
			})
		},
	} {
		t.Run(name+" while it runs", func(t *testing.T) {
			t.Parallel()
			run := need.Lab(t)
			ctx := bounded(t)
			loop := filepath.Join(run.Dir(), "loop.sock")
			c := startAlone(t, run, loop)
			conn := rawDial(t, c)
			if got := proxytest.Do(ctx, conn, version); got.Code != codes.Unavailable {
				t.Fatalf("without a runtime: %v %s", got.Code, got.Message)
			}
			lead(t, c.Socket(), loop)
			eventually(ctx, t, "a message that says what is wrong", func() (string, bool) {
				got := proxytest.Do(ctx, conn, version)
				return got.Message, got.Code == codes.Unavailable && strings.Contains(got.Message, wrong) && strings.Contains(got.Message, c.Socket())
			})
			s, err := c.Status(ctx)
			if err != nil || s.Proxy.CallsInFlight != 0 {
				t.Errorf("%d calls go round, %v", s.Proxy.CallsInFlight, err)
			}
			// A successor would start with it, and is refused.
			if err := c.Signal(ctx, syscall.SIGHUP); err != nil {
				t.Fatal(err)
			}
			eventually(ctx, t, "the log", func() (string, bool) {
				log := c.LogTail(10)
				return log, strings.Contains(log, "no new process took over") && strings.Contains(log, wrong)
			})
		})
	}
}

// liveAt starts a server of somebody else at a path.
func liveAt(t *testing.T, path string) {
	t.Helper()
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() }) //nolint:errcheck // end of test
}

// runtimeComes starts an echo runtime on a socket with an access of its own.
func runtimeComes(t *testing.T, socket string, access unixsock.Access) {
	t.Helper()
	l, err := unixsock.Listen(socket, access)
	if err != nil {
		t.Fatal(err)
	}
	echo := proxytest.NewEchoRuntime()
	var served sync.WaitGroup
	served.Go(func() { _ = echo.Serve(l) }) //nolint:errcheck // ends with Stop
	t.Cleanup(func() { echo.Stop(); served.Wait() })
}

// TestAccessOfAnothersFileStays puts a symlink to a file of somebody else where
// cleave's socket was; then the runtime comes with an open socket.
func TestAccessOfAnothersFileStays(t *testing.T) {
	t.Parallel()
	need.Root(t)
	run := need.Lab(t)
	ctx := bounded(t)
	socket := filepath.Join(run.Dir(), "echo.sock")
	c := startAlone(t, run, socket)
	precious := filepath.Join(run.Dir(), "shadow")
	if err := os.WriteFile(precious, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(c.Socket()); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(precious, c.Socket()); err != nil {
		t.Fatal(err)
	}
	runtimeComes(t, socket, unixsock.Access{UID: 1234, GID: 1234, Mode: 0o666})
	eventually(ctx, t, "the connect", func() (string, bool) {
		s, err := c.Status(ctx) // it asks the runtime
		log := c.LogTail(10)
		return fmt.Sprint(s.Runtime, err, log), strings.Contains(log, "don't follow the runtime's")
	})
	info, err := os.Stat(precious)
	if err != nil {
		t.Fatal(err)
	}
	if st, ok := info.Sys().(*syscall.Stat_t); !ok || st.Uid != 0 || info.Mode().Perm() != 0o600 {
		t.Errorf("the other's file now is %v of user %d", info.Mode(), st.Uid)
	}
}

// TestRemovedSocketsComeBackWithHandover takes both socket files away from under
// cleave: nobody new reaches it until it is told to hand over.
func TestRemovedSocketsComeBackWithHandover(t *testing.T) {
	t.Parallel()
	_, c := beforeEcho(t)
	ctx := bounded(t)
	before, err := c.Status(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{c.Socket(), c.Config().Control.Endpoint.Path()} {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.Signal(ctx, syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	eventually(ctx, t, "a successor", func() (string, bool) {
		s, err := c.Status(ctx)
		return fmt.Sprint(s.PID, err), err == nil && s.PID != before.PID
	})
	if got := proxytest.Do(ctx, rawDial(t, c), version); got.Code != codes.OK {
		t.Errorf("a call on the new socket: %v %s", got.Code, got.Message)
	}
	eventually(ctx, t, "the lock's note", func() (string, bool) {
		s, err := c.Status(ctx)
		note := lockNote(t, c.Config().StateDir)
		return fmt.Sprint(note, s.PID, err), err == nil && note == s.PID && note != before.PID
	})
	// The new files are the successor's, which takes them away at its end.
	if err := c.Stop(ctx); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{c.Socket(), c.Config().Control.Endpoint.Path()} {
		if _, err := os.Lstat(path); !os.IsNotExist(err) {
			t.Errorf("%s is still there: %v", path, err)
		}
	}
}

// TestSomebodyElseAtOurPath: cleave's socket file was replaced by another live
// server's. No successor takes that away, and neither does cleave's end.
func TestSomebodyElseAtOurPath(t *testing.T) {
	t.Parallel()
	_, c := beforeEcho(t)
	ctx := bounded(t)
	caller := rawDial(t, c)
	if got := proxytest.Do(ctx, caller, version); got.Code != codes.OK {
		t.Fatal(got.Code, got.Message)
	}
	if err := os.Remove(c.Socket()); err != nil {
		t.Fatal(err)
	}
	liveAt(t, c.Socket())
	theirs, err := unixsock.IDOf(c.Socket())
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Signal(ctx, syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	eventually(ctx, t, "the log", func() (string, bool) {
		log := c.LogTail(10)
		return log, strings.Contains(log, "no new process took over") && strings.Contains(log, "in use by a running server")
	})
	if got := proxytest.Do(ctx, caller, version); got.Code != codes.OK {
		t.Errorf("a caller from before: %v %s", got.Code, got.Message)
	}
	if s, err := c.Status(ctx); err != nil || lockNote(t, c.Config().StateDir) != s.PID {
		t.Errorf("the lock names process %d, not the one that serves, %d (%v)", lockNote(t, c.Config().StateDir), s.PID, err)
	}
	if err := c.Stop(ctx); err != nil {
		t.Fatal(err)
	}
	if now, err := unixsock.IDOf(c.Socket()); err != nil || now != theirs {
		t.Errorf("the other's socket is gone: %v %v, want %v", now, err, theirs)
	}
}

// lockNote is the process that the lock of a state folder names.
func lockNote(t *testing.T, stateDir string) int {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(stateDir, "lock"))
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		t.Fatal(err)
	}
	return pid
}

// reconfigure writes a changed configuration for a running cleave, tells it, and
// returns the successor's status, which ends with the test.
func reconfigure(ctx context.Context, t *testing.T, c *node.Cleave, cfg config.Config) agent.Status {
	t.Helper()
	before, err := c.Status(ctx)
	if err != nil {
		t.Fatal(err)
	}
	text, err := cfg.YAML()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(c.ConfigFile(), text, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := c.Signal(ctx, syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	var s agent.Status
	eventually(ctx, t, "a successor", func() (string, bool) {
		s, err = agent.FetchStatus(ctx, cfg.Control.Endpoint.Path())
		return fmt.Sprintf("%d, %v: %s", s.PID, err, c.LogTail(5)), err == nil && s.PID != before.PID
	})
	t.Cleanup(func() {
		end(t, s.PID)
		ended(t, s.PID)
	})
	return s
}

// end asks a process of this test to end; it may be gone already.
func end(t *testing.T, pid int) {
	t.Helper()
	if err := syscall.Kill(pid, syscall.SIGTERM); err != nil && err != syscall.ESRCH {
		t.Error(err)
	}
}

// ended waits for the end of a process.
func ended(t *testing.T, pid int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	eventually(ctx, t, "the end of a process", func() (string, bool) {
		return fmt.Sprint(pid), syscall.Kill(pid, 0) == syscall.ESRCH
	})
}

// TestChangedSocketPathsAtHandover: the successor serves on the new paths, and
// the files of the old ones are gone.
func TestChangedSocketPathsAtHandover(t *testing.T) {
	t.Parallel()
	run, c := beforeEcho(t)
	ctx := bounded(t)
	cfg := c.Config()
	cfg.Listen.Endpoint = config.Endpoint(filepath.Join(run.Dir(), "new.sock"))
	cfg.Control.Endpoint = config.Endpoint(filepath.Join(run.Dir(), "new-control.sock"))
	old := rawDial(t, c)
	if got := proxytest.Do(ctx, old, version); got.Code != codes.OK {
		t.Fatal(got.Code, got.Message)
	}
	s := reconfigure(ctx, t, c, cfg)
	callOK(ctx, t, cfg.Listen.Endpoint.Path())
	for _, path := range []string{c.Socket(), c.Config().Control.Endpoint.Path()} {
		eventually(ctx, t, "the old file", func() (string, bool) {
			_, err := os.Lstat(path)
			return fmt.Sprint(path, err), os.IsNotExist(err)
		})
	}
	end(t, s.PID)
	ended(t, s.PID)
	if left, err := filepath.Glob(filepath.Join(run.Dir(), "new*.sock")); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v %v", left, err)
	}
}

func callOK(ctx context.Context, t *testing.T, socket string) {
	t.Helper()
	conn, err := proxytest.Dial(socket)
	if err != nil {
		t.Fatal(err)
	}
	got := proxytest.Do(ctx, conn, version)
	if err := conn.Close(); err != nil {
		t.Error(err)
	}
	if got.Code != codes.OK {
		t.Errorf("a call on %s: %v %s", socket, got.Code, got.Message)
	}
}
