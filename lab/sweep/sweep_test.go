package sweep_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cleave-cri/cleave/lab/sweep"
)

// Somebody else's process must survive, even when it works in the folder or has its name in an argument.
func TestProcessesEndsOnlyItsOwn(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	neighbour := dir + "x"
	start := func(mark string, args ...string) (pid int, ended chan struct{}) {
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), sweep.MarkEnv+"="+mark)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ended = make(chan struct{})
		go func() {
			_ = cmd.Wait() //nolint:errcheck // killed: its status says nothing
			close(ended)
		}()
		t.Cleanup(func() {
			_ = cmd.Process.Kill() //nolint:errcheck // most are dead already
			<-ended
		})
		return cmd.Process.Pid, ended
	}
	_, mine := start(dir, "sleep", "9999")
	_, below := start(filepath.Join(dir, "a", "b"), "sleep", "9999")
	_, stubborn := start(dir, "sh", "-c", "trap '' TERM INT HUP; while :; do sleep 9999; done")
	other, _ := start("", "sleep", "9999")
	reader, _ := start("", "tail", "-f", "/dev/null", dir)
	near, _ := start(neighbour, "sleep", "9999")

	if err := sweep.Processes(t.Context(), sweep.Scope{Dir: dir}); err != nil {
		t.Fatal(err)
	}
	for name, ended := range map[string]chan struct{}{"marked with the folder": mine, "marked with a folder below": below, "one that ignores signals": stubborn} {
		select {
		case <-ended:
		case <-time.After(10 * time.Second):
			t.Errorf("a process %s still runs", name)
		}
	}
	for name, pid := range map[string]int{"without a mark": other, "that reads the folder": reader, "of a folder whose name begins alike": near} {
		if err := syscall.Kill(pid, 0); err != nil {
			t.Errorf("a process %s was ended: %v", name, err)
		}
	}
}

func TestFilesRefusesWhileMounted(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("needs root to mount") // need imports janitor and that imports sweep: a test of sweep can't use it
	}
	precious := t.TempDir()
	if err := os.WriteFile(filepath.Join(precious, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "run")
	target := filepath.Join(dir, "mnt")
	if err := os.MkdirAll(target, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount(precious, target, "", syscall.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	s := sweep.Scope{Dir: dir}
	if err := sweep.Files(s); err == nil || !strings.Contains(err.Error(), "still mounted") {
		t.Errorf("got %v, want a refusal", err)
	}
	if err := sweep.All(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	if err := sweep.Files(s); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(precious, "file")); err != nil {
		t.Errorf("what was mounted is gone: %v", err)
	}
	if _, err := os.Lstat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the folder is still there: %v", err)
	}
	if err := sweep.Files(s); err != nil {
		t.Errorf("a second time: %v", err)
	}
}

// What has to go last stays until nothing else is left.
func TestFilesRemovesTheLockLast(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "run")
	stuck := filepath.Join(dir, "stuck")
	if err := os.MkdirAll(filepath.Join(stuck, "in"), 0o700); err != nil {
		t.Fatal(err)
	}
	lock := filepath.Join(dir, "lock")
	if err := os.WriteFile(lock, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := immutable(stuck, true); err != nil {
		t.Skipf("needs a folder that can't be removed: %v", err)
	}
	s := sweep.Scope{Dir: dir, Last: "lock"}
	failed := sweep.Files(s)
	if err := immutable(stuck, false); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(lock); failed == nil || err != nil {
		t.Errorf("got %v, and the lock: %v", failed, err)
	}
	if err := sweep.Files(s); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the folder is still there: %v", err)
	}
}

// immutable makes a folder one that root can't change (FS_IMMUTABLE_FL), and back.
func immutable(dir string, on bool) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }() //nolint:errcheck // nothing was written to it
	flags, err := unix.IoctlGetInt(int(f.Fd()), unix.FS_IOC_GETFLAGS)
	if err != nil {
		return err
	}
	const immutable = 0x10 // FS_IMMUTABLE_FL of linux/fs.h
	if flags &^= immutable; on {
		flags |= immutable
	}
	return unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, flags)
}

func TestScopesThatReachTooFar(t *testing.T) {
	t.Parallel()
	for _, s := range []sweep.Scope{
		{}, {Dir: "/"}, {Dir: "/tmp"}, {Dir: "tmp/x"}, {Dir: "/tmp/x/"}, {Dir: "/tmp/../x"}, {Dir: "/tmp/x", Cgroup: "/"},
		{Dir: "/tmp/x", Cgroup: "."}, {Dir: "/tmp/x", Cgroup: ".."}, {Dir: "/tmp/x", Cgroup: "a/../.."}, {Dir: "/tmp/x", Cgroup: "a/"},
	} {
		if err := sweep.All(context.Background(), s); err == nil {
			t.Errorf("%+v was taken", s)
		}
		if err := sweep.Files(s); err == nil {
			t.Errorf("%+v was taken for its files", s)
		}
	}
}
