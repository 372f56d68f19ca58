package installer

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cleave-cri/cleave/snapshot/split/ctdconfig"
)

// process writes a process's files as /proc has them.
func process(t *testing.T, proc, pid string, args, variables []string) {
	t.Helper()
	dir := filepath.Join(proc, pid)
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, words := range map[string][]string{"cmdline": args, "environ": variables} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(strings.Join(append(words, ""), "\x00")), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// TestStrandedShims: a shim of this containerd that tells what happens elsewhere
// forbids a redirect; others' shims and other programs don't.
func TestStrandedShims(t *testing.T) {
	t.Parallel()
	r := ctdconfig.Redirect{From: "/run/containerd/containerd.sock", To: "/run/containerd/behind-cleave.sock", TTRPC: "/run/containerd/containerd.sock.ttrpc"}
	shim := func(address string) []string {
		return []string{"/usr/bin/containerd-shim-runc-v2", "-namespace", "k8s.io", "-id", "abc", "-address", address}
	}
	proc := t.TempDir()
	process(t, proc, "1", []string{"/sbin/init"}, nil)
	process(t, proc, "2", nil, nil) // the kernel's
	process(t, proc, "3", shim(r.From), []string{"PATH=/bin", "TTRPC_ADDRESS=" + r.TTRPC})
	process(t, proc, "4", shim("/var/run/containerd/containerd.sock"), []string{"TTRPC_ADDRESS=/var/run/containerd/containerd.sock.ttrpc"})
	process(t, proc, "5", shim("/run/docker/containerd/containerd.sock"), []string{"TTRPC_ADDRESS=/run/docker/containerd/containerd.sock.ttrpc"})
	if got, err := strandedShims(proc, r); err != nil || len(got) > 0 {
		t.Errorf("got %q, %v, want none", got, err)
	}
	process(t, proc, "6", shim(r.From), []string{"TTRPC_ADDRESS=/run/older.ttrpc"})
	process(t, proc, "7", shim(r.From), []string{"PATH=/bin"})
	got, err := strandedShims(proc, r)
	if err != nil || len(got) != 2 || !strings.Contains(got[0], "process 6, containerd-shim-runc-v2, container abc") || !strings.Contains(got[1], "process 7") {
		t.Errorf("got %q, %v, want processes 6 and 7", got, err)
	}
	if err := os.Mkdir(filepath.Join(proc, "8"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(proc, "8", "cmdline"), 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := strandedShims(proc, r); err == nil {
		t.Error("a process that can't be looked at was passed over")
	}
}
