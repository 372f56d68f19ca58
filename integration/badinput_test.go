package integration

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cleave-cri/cleave/lab/need"
)

// TestBadInputIsSaidInWords starts the program with what people get wrong and
// looks for a message that says what, where, and what to do.
func TestBadInputIsSaidInWords(t *testing.T) {
	t.Parallel()
	need.Root(t)
	binary := cleaveBinary(t)
	live := filepath.Join(t.TempDir(), "live.sock")
	l, err := net.Listen("unix", live)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() }) //nolint:errcheck // end of test

	file := func(t *testing.T, text string) string {
		t.Helper()
		path := filepath.Join(t.TempDir(), "config.yaml")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	cases := []struct {
		name string
		args func(t *testing.T) []string
		user uint32
		want []string
	}{
		{"unknown key", func(t *testing.T) []string {
			return []string{"config", "--config", file(t, "version: 1\nruntim:\n  endpoint: /x\n")}
		}, 0, []string{"config.yaml:2:1", "runtim", "runtime"}},
		{"bad quantity", func(t *testing.T) []string {
			return []string{"serve", "--config", file(t, "version: 1\nmemory:\n  limit: 12 parsecs\n")}
		}, 0, []string{"config.yaml:3:10", "memory.limit", "parsecs"}},
		{"all faults at once", func(t *testing.T) []string {
			return []string{"config", "--config", file(t, "version: 1\nmode: fast\nmeasure:\n  period: soon\n")}
		}, 0, []string{"config.yaml:2:7", "config.yaml:4:11"}},
		{"missing file", func(*testing.T) []string { return []string{"config", "--config", "/nonexistent/config.yaml"} }, 0,
			[]string{"/nonexistent/config.yaml", "does not exist", "cleave config"}},
		{"mode crio on another socket", func(t *testing.T) []string {
			return []string{"config", "--config", file(t, "version: 1\nmode: crio\nlisten: {endpoint: /run/x.sock}\n")}
		}, 0, []string{"config.yaml:3:20", "/run/crio/crio.sock"}},
		{"relative socket", func(*testing.T) []string { return []string{"config", "--listen", "cleave.sock"} }, 0,
			[]string{"listen", "absolute"}},
		{"listen path in use by a live server", func(t *testing.T) []string {
			return []string{"serve", "--passthrough", "--listen", live}
		}, 0, []string{live, "in use", "stop it first"}},
		{"listen path is a file", func(t *testing.T) []string {
			return []string{"serve", "--passthrough", "--listen", file(t, "precious")}
		}, 0, []string{"not a socket", "move it away"}},
		{"listen folder missing", func(*testing.T) []string {
			return []string{"serve", "--passthrough", "--listen", "/nonexistent/folder/cleave.sock"}
		}, 0, []string{"/nonexistent/folder", "create"}},
		{"passthrough with a file", func(*testing.T) []string { return []string{"serve", "--passthrough", "--config", "/x"} }, 0,
			[]string{"--passthrough reads no configuration file"}},
		{"not root", func(*testing.T) []string { return []string{"serve", "--passthrough"} }, 65534,
			[]string{"needs root"}},
		{"nobody runs", func(t *testing.T) []string {
			return []string{"status", "--control", filepath.Join(t.TempDir(), "control.sock")}
		}, 0, []string{"not running", "cleave serve"}},
		{"config is a named pipe", func(t *testing.T) []string {
			path := filepath.Join(t.TempDir(), "pipe")
			if err := syscall.Mkfifo(path, 0o600); err != nil {
				t.Fatal(err)
			}
			return []string{"config", "--config", path}
		}, 0, []string{"pipe", "not a regular file"}},
		// Past the flags that don't count: it is the live socket that stops it.
		{"passthrough looks only at what counts", func(*testing.T) []string {
			return []string{"serve", "--passthrough", "--mode", "crio", "--state-dir", "relative", "--listen", live}
		}, 0, []string{live, "in use"}},
		{"passthrough on the runtime's socket", func(*testing.T) []string {
			return []string{"serve", "--passthrough", "--listen", live, "--runtime-endpoint", live}
		}, 0, []string{"also runtime.endpoint"}},
		{"unknown output", func(*testing.T) []string { return []string{"status", "-o", "xml"} }, 0, []string{"xml", "json"}},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			ctx := bounded(t)
			args := tc.args(t)
			program := binary
			cmd := exec.CommandContext(ctx, program, args...)
			if tc.user != 0 {
				// The program itself lies where only root may look.
				fd, err := os.Open(program)
				if err != nil {
					t.Fatal(err)
				}
				defer fd.Close() //nolint:errcheck // end of test
				cmd = exec.CommandContext(ctx, "/proc/self/fd/3", args...)
				cmd.ExtraFiles = []*os.File{fd}
				cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: tc.user, Gid: tc.user}}
			}
			out, err := cmd.CombinedOutput()
			if err == nil {
				t.Fatalf("cleave %v went well:\n%s", args, out)
			}
			for _, want := range tc.want {
				if !strings.Contains(string(out), want) {
					t.Errorf("cleave %v says\n%s\nwithout %q", args, out, want)
				}
			}
			if strings.Contains(string(out), "panic") {
				t.Errorf("cleave %v panics:\n%s", args, out)
			}
		})
	}
	if text, err := os.ReadFile(live); err == nil {
		t.Errorf("the live socket has become a file: %q", text)
	}
	if conn, err := net.Dial("unix", live); err != nil {
		t.Errorf("the live server lost its socket: %v", err)
	} else if err := conn.Close(); err != nil {
		t.Error(err)
	}
}

// TestTwoOnOneStateFolder starts a second cleave on the state folder of a first.
func TestTwoOnOneStateFolder(t *testing.T) {
	t.Parallel()
	need.Root(t)
	run := need.Lab(t)
	ctx := bounded(t)
	first := startAlone(t, run, "/nonexistent/runtime.sock")
	cfg := first.Config()
	out, err := exec.CommandContext(ctx, first.Binary(), "serve", "--state-dir", cfg.StateDir,
		"--listen", filepath.Join(run.Dir(), "second.sock"), "--control", filepath.Join(run.Dir(), "second-control.sock")).CombinedOutput()
	if err == nil || !strings.Contains(string(out), cfg.StateDir) || !strings.Contains(string(out), "another cleave uses this state folder") {
		t.Errorf("the second one: %v\n%s", err, out)
	}
	if _, err := first.Status(ctx); err != nil {
		t.Errorf("the first one has suffered: %v", err)
	}
}

// TestRuntimeSocketMissingOrNoSocket has cleave in front of nothing and of a
// plain file: it serves, and says to callers what is wrong.
func TestRuntimeSocketMissingOrNoSocket(t *testing.T) {
	t.Parallel()
	need.Root(t)
	plain := filepath.Join(t.TempDir(), "plain")
	if err := os.WriteFile(plain, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct{ path, want string }{
		"missing":      {"/nonexistent/runtime.sock", "does not exist"},
		"not a socket": {plain, "not a socket"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx := bounded(t)
			c := startAlone(t, need.Lab(t), tc.path)
			began := time.Now()
			_, err := dial(t, c.Endpoint()).Runtime.Version(ctx, versionRequest)
			if err == nil || !strings.Contains(err.Error(), tc.path) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("after %s the caller got %v, want %q and %q", time.Since(began), err, tc.path, tc.want)
			}
			s, err := c.Status(ctx)
			if err != nil || !strings.Contains(s.Runtime.Error, tc.path) {
				t.Errorf("status says %+v, %v", s.Runtime, err)
			}
			out, err := exec.CommandContext(ctx, c.Binary(), "doctor", "--config", c.ConfigFile()).CombinedOutput()
			if err == nil || !strings.Contains(string(out), "fail  runtime socket") {
				t.Errorf("doctor: %v\n%s", err, out)
			}
		})
	}
}
