package cgroup

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cleave-cri/cleave/lab/janitor"
	"github.com/cleave-cri/cleave/lab/need"
)

func TestMain(m *testing.M) {
	janitor.Main()
	os.Exit(m.Run())
}

func TestPodsPath(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ driver, root, want string }{
		{"cgroupfs", "", "/kubepods"},
		{"cgroupfs", "/lab/x", "/lab/x/kubepods"},
		{"systemd", "", "/kubepods.slice"},
		{"systemd", "/", "/kubepods.slice"},
		{"systemd", "/a/b-c", "/a.slice/a-b_c.slice/a-b_c-kubepods.slice"},
	} {
		if got := Pods(tc.driver, tc.root); got != tc.want {
			t.Errorf("%s, %q: %s, want %s", tc.driver, tc.root, got, tc.want)
		}
	}
	if got := Slice("a-b-c.slice"); got != "/a.slice/a-b.slice/a-b-c.slice" {
		t.Errorf("slice: %s", got)
	}
}

func TestOf(t *testing.T) {
	t.Parallel()
	const v1 = "9:memory:/user.slice\n8:cpu,cpuacct:/other\n0::/unified\n"
	for _, tc := range []struct {
		unified    bool
		text, want string
	}{{false, v1, "/user.slice"}, {true, v1, "/unified"}, {true, "0::/system.slice/a:b.service\n", "/system.slice/a:b.service"}, {false, "0::/x\n", ""}, {true, "garbage", ""}} {
		if got := (Reader{Unified: tc.unified}).Of([]byte(tc.text)); got != tc.want {
			t.Errorf("%q: %q, want %q", tc.text, got, tc.want)
		}
	}
}

func shown(t *testing.T, r Reader, path string) string {
	t.Helper()
	c := r.Read(path)
	out := "not there"
	if c.Exists == nil || c.Problem != "" {
		return "not known: " + c.Problem
	}
	if *c.Exists {
		out = "no limit"
	}
	if c.LimitBytes != nil {
		out = fmt.Sprint(*c.LimitBytes)
	}
	if *c.Exists != (c.UsedBytes != nil) {
		out += ", use not known"
	}
	return out
}

// TestUnified reads files as version 2 has them.
func TestUnified(t *testing.T) {
	t.Parallel()
	mount := t.TempDir()
	write := func(dir string, files map[string]string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Join(mount, dir), 0o755); err != nil {
			t.Fatal(err)
		}
		for name, text := range files {
			if err := os.WriteFile(filepath.Join(mount, dir, name), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	with := func(limit string) map[string]string {
		return map[string]string{"cgroup.controllers": "memory\n", "memory.max": limit + "\n", "memory.current": "4096\n", "memory.stat": "anon 0\n"}
	}
	write("kubepods.slice", with("31138512896"))
	write("free.slice", with("max"))
	r := Reader{Mount: mount, Unified: true}
	for path, want := range map[string]string{"/kubepods.slice": "31138512896", "/free.slice": "no limit", "/none": "not there"} {
		if got := shown(t, r, path); got != want {
			t.Errorf("%s: %s, want %s", path, got, want)
		}
	}
}

// TestThisKernel sets a limit and reads it.
func TestThisKernel(t *testing.T) {
	t.Parallel()
	need.Root(t)
	run := need.Lab(t)
	r := System()
	root, limit := "/sys/fs/cgroup", "memory.max"
	if !r.Unified {
		root, limit = "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
	}
	if _, err := os.Stat(filepath.Join(root, limit)); err != nil && !r.Unified {
		t.Skipf("no memory controller here: %v", err)
	}
	dir := filepath.Join(root, run.Cgroup())
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.Remove(dir); err != nil {
			t.Error(err)
		}
	})
	if got := shown(t, r, run.Cgroup()); got != "no limit" {
		t.Errorf("without a limit: %s", got)
	}
	if err := os.WriteFile(filepath.Join(dir, limit), []byte("104857600"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := shown(t, r, run.Cgroup()); got != "104857600" {
		t.Errorf("with a limit: %s", got)
	}
	if got := shown(t, r, "/"+strings.Repeat("x", 20)); got != "not there" {
		t.Errorf("one that is not there: %s", got)
	}
}
