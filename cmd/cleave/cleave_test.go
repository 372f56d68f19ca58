package main

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"

	"github.com/cleave-cri/cleave/agent"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/doctor"
	"github.com/cleave-cri/cleave/fsstats"
)

// run runs a command line and returns what it printed.
func run(t *testing.T, args ...string) (string, error) {
	t.Helper()
	cmd := root()
	var out strings.Builder
	cmd.SetOut(&out)
	cmd.SetErr(&out)
	cmd.SetArgs(args)
	err := cmd.ExecuteContext(t.Context())
	return out.String(), err
}

func writeConfig(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestCtrlCEndsWhatReads: a file may be a pipe that nobody writes to.
func TestCtrlCEndsWhatReads(t *testing.T) {
	t.Parallel()
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"explain", pipe}, {"replay", pipe}, {"timeline", pipe}} {
		t.Run(args[0], func(t *testing.T) {
			t.Parallel()
			ctx, interrupt := context.WithTimeout(t.Context(), 200*time.Millisecond)
			defer interrupt()
			cmd := root()
			cmd.SetOut(io.Discard)
			cmd.SetErr(io.Discard)
			cmd.SetArgs(args)
			if err := cmd.ExecuteContext(ctx); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("it ended with %v", err)
			}
		})
	}
	// Nobody writes to it: it is an empty scenario.
	if _, err := run(t, "simulate", pipe); err == nil {
		t.Error("a pipe that nobody writes to is a scenario")
	}
	// Let go of what is left behind.
	for range 3 {
		f, err := os.OpenFile(pipe, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestFlagsOverrideTheFile: each flag alone changes the effective configuration
// in its one field, against a file that sets it otherwise.
func TestFlagsOverrideTheFile(t *testing.T) {
	t.Parallel()
	file := writeConfig(t, `version: 1
mode: observe
runtime: {endpoint: /file/runtime.sock}
listen: {endpoint: /file/listen.sock}
control: {endpoint: /file/control.sock}
stateDir: /file/state
log: {level: warn, format: console}
`)
	base, err := config.Load(file)
	if err != nil {
		t.Fatal(err)
	}
	cases := []struct {
		flag, value string
		change      func(*config.Config)
	}{
		{"", "", func(*config.Config) {}},
		{"runtime-endpoint", "unix:///flag.sock", func(c *config.Config) { c.Runtime.Endpoint = "/flag.sock" }},
		{"listen", "/flag.sock", func(c *config.Config) { c.Listen.Endpoint = "/flag.sock" }},
		{"control", "/flag.sock", func(c *config.Config) { c.Control.Endpoint = "/flag.sock" }},
		{"state-dir", "/flag", func(c *config.Config) { c.StateDir = "/flag" }},
		{"mode", "cri", func(c *config.Config) { c.Mode = config.ModeCRI }},
		{"log-level", "debug", func(c *config.Config) { c.Log.Level = "debug" }},
		{"log-format", "json", func(c *config.Config) { c.Log.Format = "json" }},
	}
	for _, tc := range cases {
		t.Run("--"+tc.flag, func(t *testing.T) {
			t.Parallel()
			args := []string{"config", "--config", file}
			if tc.flag != "" {
				args = append(args, "--"+tc.flag, tc.value)
			}
			out, err := run(t, args...)
			if err != nil {
				t.Fatal(err)
			}
			got, err := config.Parse("output", []byte(out))
			if err != nil {
				t.Fatalf("the output is no configuration: %v\n%s", err, out)
			}
			want := base
			tc.change(&want)
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("effective configuration (-want +got):\n%s", diff)
			}
		})
	}
}

// TestFlagsAreValidated: a bad value is told with its key, as one in a file is.
func TestFlagsAreValidated(t *testing.T) {
	t.Parallel()
	file := writeConfig(t, "version: 1\n")
	for _, tc := range []struct{ flag, value, want string }{
		{"--mode", "fast", "mode"},
		{"--state-dir", "relative", "stateDir"},
		{"--log-level", "loud", "log.level"},
		{"--log-format", "xml", "log.format"},
		{"--listen", "relative", "listen"},
		{"--control", "/run/cleave/cleave.sock", "control.endpoint"},
		{"--environment", "x", "unknown flag"},
	} {
		t.Run(tc.flag, func(t *testing.T) {
			t.Parallel()
			if out, err := run(t, "config", "--config", file, tc.flag, tc.value); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v with output %q, want an error about %s", err, out, tc.want)
			}
		})
	}
}

// serveStatus answers as a running cleave would, and returns its socket.
func serveStatus(t *testing.T, s agent.Status) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "cmd")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "control.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/status", func(w http.ResponseWriter, _ *http.Request) {
		if err := json.NewEncoder(w).Encode(s); err != nil {
			t.Error(err)
		}
	})
	server := &http.Server{Handler: mux, ReadHeaderTimeout: time.Minute}
	var served sync.WaitGroup
	served.Go(func() { _ = server.Serve(l) }) //nolint:errcheck // ends with Close
	t.Cleanup(func() {
		if err := server.Close(); err != nil {
			t.Error(err)
		}
		served.Wait()
		if err := os.Remove(dir); err != nil {
			t.Error(err)
		}
	})
	return path
}

// TestStatusOutput: -o json is what the control socket says, and text is for people.
func TestStatusOutput(t *testing.T) {
	t.Parallel()
	total := uint64(10)
	fs := fsstats.Filesystem{Device: fsstats.Device{Major: 8, Minor: 1}, Source: "/dev/sda1", Type: "ext4", Mountpoint: "/", CapacityBytes: 1 << 30, InodesTotal: &total, InodesFree: &total}
	want := agent.Status{
		Version: "1.2.3", Mode: "cri", PID: 42, Listen: "unix:///l.sock",
		Runtime:     agent.RuntimeStatus{Endpoint: "unix:///r.sock", Name: "containerd", Version: "v2.4.2"},
		Roles:       []fsstats.Place{{Role: fsstats.NodeFS, Reported: "/", Filesystem: fs}},
		Filesystems: []agent.FilesystemStatus{{Filesystem: fs, Roles: []fsstats.Role{fsstats.NodeFS}, Account: agent.Account{Classes: []agent.ClassUsage{{Class: "images", Bytes: 1}}}}},
	}
	socket := serveStatus(t, want)
	file := writeConfig(t, "version: 1\n")
	out, err := run(t, "status", "--config", file, "--control", socket, "-o", "json")
	if err != nil {
		t.Fatal(err)
	}
	var got agent.Status
	decoder := json.NewDecoder(strings.NewReader(out))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&got); err != nil {
		t.Fatalf("%v:\n%s", err, out)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("status (-want +got):\n%s", diff)
	}
	out, err = run(t, "status", "--config", file, "--control", socket)
	if err != nil || !strings.Contains(out, "pid 42") || !strings.Contains(out, "v2.4.2") {
		t.Errorf("for people: %v\n%s", err, out)
	}
}

// TestDoctorOutput: without a runtime some checks fail, which the exit code says;
// both forms have the same results.
func TestDoctorOutput(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := writeConfig(t, "version: 1\n")
	args := []string{
		"doctor", "--config", file, "--runtime-endpoint", filepath.Join(dir, "r"),
		"--listen", filepath.Join(dir, "l"), "--control", filepath.Join(dir, "c"),
	}
	out, err := run(t, append(args, "-o", "json")...)
	if err == nil || !strings.Contains(err.Error(), "at least one check failed") {
		t.Errorf("error %v, want one that says that a check failed", err)
	}
	var results []doctor.Result
	if err := json.Unmarshal([]byte(out), &results); err != nil {
		t.Fatalf("%v:\n%s", err, out)
	}
	levels := map[string]doctor.Level{}
	for _, r := range results {
		levels[r.Check] = r.Level
		if (r.Level == doctor.Pass) != (r.Remedy == "") || r.Reason == "" {
			t.Errorf("%+v: what is not good has a remedy", r)
		}
	}
	if levels["runtime socket"] != doctor.Fail || levels["cleave socket"] != doctor.Warn {
		t.Errorf("levels %v", levels)
	}
	text, err := run(t, args...)
	if err == nil {
		t.Error("for people it went well")
	}
	for check, level := range levels {
		if !strings.Contains(text, string(level)+"  "+check) {
			t.Errorf("for people there is no %s of %s:\n%s", level, check, text)
		}
	}
}

// TestUnknownOutput: a form that does not exist is refused before anything is asked.
func TestUnknownOutput(t *testing.T) {
	t.Parallel()
	file := writeConfig(t, "version: 1\n")
	for _, command := range []string{"status", "doctor"} {
		if _, err := run(t, command, "--config", file, "-o", "xml"); err == nil || !strings.Contains(err.Error(), "choose text, json or yaml") {
			t.Errorf("%s: %v", command, err)
		}
	}
}

// TestPassthroughLooksAtWhatCounts: what is wrong in a flag that does not count
// there is no reason to refuse it.
func TestPassthroughLooksAtWhatCounts(t *testing.T) {
	t.Parallel()
	s := settingsFlags(&cobra.Command{})
	if err := s.flags.Parse([]string{"--mode", "crio", "--state-dir", "relative", "--listen", "/run/cleave/control.sock"}); err != nil {
		t.Fatal(err)
	}
	cfg, err := s.loadPassthrough()
	if err != nil || cfg.Listen.Endpoint != "/run/cleave/control.sock" {
		t.Errorf("got %v, %v", cfg.Listen.Endpoint, err)
	}
	if err := s.flags.Parse([]string{"--log-level", "loud"}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.loadPassthrough(); err == nil || !strings.Contains(err.Error(), "log.level") {
		t.Errorf("a bad log level: %v", err)
	}
}

func TestVersion(t *testing.T) {
	t.Parallel()
	out, err := run(t, "version")
	if err != nil || !strings.HasPrefix(out, "cleave "+version+" go") {
		t.Errorf("got %q, %v", out, err)
	}
}
