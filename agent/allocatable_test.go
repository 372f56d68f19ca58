package agent

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/cleave-cri/cleave/config/kubelet"
	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/kube/allocatable"
)

func TestNodeMemory(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	expect := func(total, huge uint64, ok bool) {
		t.Helper()
		gotTotal, gotHuge, err := nodeMemory(root)
		if gotTotal != total || gotHuge != huge || (err == nil) != ok {
			t.Errorf("%d, %d, %v; want %d, %d", gotTotal, gotHuge, err, total, huge)
		}
	}
	expect(0, 0, false)
	write("proc/meminfo", "MemFree: 1 kB\n")
	expect(0, 0, false)
	write("proc/meminfo", "MemTotal:       33554432 kB\nMemFree:        1 kB\n")
	expect(32<<30, 0, true)
	write("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "512\n")
	write("sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages", "2\n")
	expect(32<<30, 3<<30, true)
	write("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "many\n")
	expect(0, 0, false)
}

func TestFilesystemsByDevice(t *testing.T) {
	t.Parallel()
	fs := func(minor uint32, bytes uint64) fsstats.Filesystem {
		return fsstats.Filesystem{Device: fsstats.Device{Major: 8, Minor: minor}, CapacityBytes: bytes}
	}
	got := byDevice(fsstats.Layout{Places: []fsstats.Place{
		{Role: fsstats.ContainerFS, Filesystem: fs(1, 10)}, {Role: fsstats.ImageFS, Filesystem: fs(2, 20)}, {Role: fsstats.NodeFS, Filesystem: fs(1, 10)},
	}})
	want := []allocatable.Filesystem{{Roles: []string{"nodefs", "containerfs"}, Device: "8:1", CapacityBytes: 10}, {Roles: []string{"imagefs"}, Device: "8:2", CapacityBytes: 20}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	// What is made there later may be on another disk.
	if got := byDevice(fsstats.Layout{Places: []fsstats.Place{{Role: fsstats.NodeFS, Missing: true, Filesystem: fs(1, 10)}}}); len(got) != 0 {
		t.Errorf("a missing place: %+v", got)
	}
}

// TestRightsNeedAKubeconfig: a kubelet without an API server has no rights to check, one whose file can't be read is told.
func TestRightsNeedAKubeconfig(t *testing.T) {
	t.Parallel()
	if checks := rightsChecks("", kubelet.Settings{}); len(checks) != 0 {
		t.Errorf("checks: %+v", checks)
	}
	checks := rightsChecks("", kubelet.Settings{Kubeconfig: kubelet.Setting[string]{Value: filepath.Join(t.TempDir(), "none")}})
	if len(checks) != 1 || checks[0].Run(t.Context()).Level != "warn" {
		t.Errorf("checks: %+v", checks)
	}
}
