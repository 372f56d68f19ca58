// Package guest is the tests that boot a Linux of their own, because what they are about is in the kernel or in systemd:
// project quota, cgroup v2, units. They run only by their make targets, which install what a guest needs.
package guest

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/guest"
	"github.com/cleave-cri/cleave/lab/janitor"
	"github.com/cleave-cri/cleave/lab/need"
)

// guestEnv is set by the make targets. Without it nothing boots: that is no lack of the machine, which need would make
// a failure of, but the choice of whoever runs the tests.
const guestEnv = "CLEAVE_GUEST"

func TestMain(m *testing.M) {
	janitor.Main()
	os.Exit(m.Run())
}

// lab starts a run and gets the guests' root, or skips.
func lab(t *testing.T) (*janitor.Run, guest.System) {
	t.Helper()
	if os.Getenv(guestEnv) != "1" {
		t.Skipf("boots a guest: run `make test-guest`, `make test-guest-crio` or `make test-quota-vm`, which set %s=1", guestEnv)
	}
	need.Tools(t, "qemu-system-x86_64", "mmdebstrap", "mke2fs", "mkfs.xfs")
	run := need.Lab(t)
	system, err := guest.Root(t.Context(), run, t.Output())
	if err != nil {
		t.Fatal(err)
	}
	return run, system
}

// TestGuestIsARealNode shows what the other tests rely on: systemd as PID 1 with no failed unit, cgroup v2 with its
// controllers, project quota on extra disks, files in and out, the command's exit code, and the image that stays.
func TestGuestIsARealNode(t *testing.T) {
	run, system := lab(t)
	input := filepath.Join(t.TempDir(), "input")
	if err := os.WriteFile(input, []byte("from the host\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	r, err := guest.Run(t.Context(), run, guest.Options{
		System: system,
		Files:  map[string]guest.File{"sub/input": {Path: input, Mode: 0o640}, "inline": {Content: []byte("text\n")}},
		Disks: []disk.Spec{
			{Name: "e", SizeBytes: 64 << 20, MkfsArgs: []string{"-O", "quota,project"}},
			{Name: "x", SizeBytes: 320 << 20, FS: disk.XFS},
		},
		Command: `
exec >out/said 2>&1
touch /written-to-the-root
cat /proc/1/comm
stat -f -c %T /sys/fs/cgroup
cat /sys/fs/cgroup/cgroup.controllers
systemctl --failed --no-legend
cat sub/input inline
stat -c %a sub/input
for fs in e x; do
	mkdir /mnt/$fs && mount -o prjquota /dev/disk/by-id/virtio-$fs /mnt/$fs && findmnt -n -o FSTYPE,OPTIONS /mnt/$fs
done
exit 3
`,
	})
	if !errors.Is(err, guest.ErrFailed) || r.Exit != 3 {
		t.Fatalf("a command that exits 3 gave exit %d and error %v\n%s", r.Exit, err, r.Console)
	}
	t.Logf("the guest lived %s", r.Took.Round(100*time.Millisecond))
	said, err := os.ReadFile(filepath.Join(r.Output, "said"))
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s", said)
	want := []string{
		"systemd\ncgroup2fs\n", "cpuset cpu io memory ", " pids ", "\nfrom the host\ntext\n640\n",
		"ext4 ", "xfs ", "prjquota",
	}
	for _, w := range want {
		if !strings.Contains(string(said), w) {
			t.Errorf("the guest did not say %q", w)
		}
	}
	if journal, err := os.ReadFile(filepath.Join(r.Output, "journal.log")); err != nil || !strings.Contains(string(journal), "systemd") {
		t.Errorf("the journal did not come out: %v", err)
	}

	again, err := guest.Run(t.Context(), run, guest.Options{System: system, Command: "test ! -e /written-to-the-root && test ! -e out/said"})
	if err != nil {
		t.Errorf("what a guest writes to its root is seen by the next: %v", err)
	}
	if again.Exit != 0 {
		t.Errorf("the second guest's command ended with %d", again.Exit)
	}
}

// TestGuestThatDoesNotEnd is ended at its limit, and the error shows how far it came.
func TestGuestThatDoesNotEnd(t *testing.T) {
	run, system := lab(t)
	_, err := guest.Run(t.Context(), run, guest.Options{System: system, Limit: 3 * time.Second, Command: "true"})
	if err == nil || !strings.Contains(err.Error(), "did not end within its limit of 3s") || errors.Is(err, guest.ErrFailed) {
		t.Fatalf("a guest that had 3 seconds gave %v", err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("the caller has had enough"))
	if _, err := guest.Run(ctx, run, guest.Options{System: system, Command: "true"}); err == nil {
		t.Error("a guest whose context is over ran")
	}
}
