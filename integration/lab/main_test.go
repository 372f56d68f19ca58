// Package lab tests `cleave lab` as it is used: the real program makes nodes, plays
// scenarios of docs/lab on them, and leaves nothing behind. It needs root; containerd
// is the one that is pinned in integration/toolchain.
package lab

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cleave-cri/cleave/integration/toolchain/bin"
	"github.com/cleave-cri/cleave/lab/janitor"
	"github.com/cleave-cri/cleave/lab/need"
)

func TestMain(m *testing.M) {
	janitor.Main()
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "cleave-lab-test")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir) //nolint:errcheck,forbidigo // holds one program of ours
	build = sync.OnceValues(func() (string, error) {
		path := filepath.Join(dir, "cleave")
		// Static, as `make build` makes it: containers run it too.
		cmd := exec.Command("go", "build", "-o", path, "github.com/cleave-cri/cleave/cmd/cleave")
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return "", fmt.Errorf("build cleave: %w\n%s", err, out)
		}
		return path, nil
	})
	return m.Run()
}

// build builds the program, once.
var build func() (string, error)

// patience bounds what a test waits for: far longer than it should take.
const patience = 5 * time.Minute

// lab is one user of the command, with a folder for labs of his own.
type lab struct {
	cleave, tmp, path string
}

func newLab(t *testing.T) *lab {
	t.Helper()
	need.Loop(t)
	need.Tools(t, "runc", "mkfs.ext4")
	cleave, err := build()
	if err != nil {
		t.Fatal(err)
	}
	peers, err := bin.Get(t.Context(), os.Stderr, "containerd", "shim")
	if err != nil {
		t.Fatal(err)
	}
	// Short, for the sockets in it.
	tmp, err := os.MkdirTemp("/tmp", "l")
	if err != nil {
		t.Fatal(err)
	}
	l := &lab{cleave: cleave, tmp: tmp, path: filepath.Dir(peers[0]) + ":" + os.Getenv("PATH")}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if out, err := l.command(ctx, "down").CombinedOutput(); err != nil {
			t.Errorf("lab down: %v\n%s", err, out)
		}
		if left := l.left(); len(left) > 0 {
			t.Errorf("left: %s", left)
			return
		}
		if err := os.Remove(filepath.Join(tmp, "cleave-lab", "lock")); err != nil {
			t.Error(err)
		}
		if err := os.Remove(filepath.Join(tmp, "cleave-lab")); err != nil {
			t.Error(err)
		}
		if err := os.Remove(tmp); err != nil {
			t.Error(err)
		}
	})
	return l
}

// addKubelet puts a kubelet, its API server and etcd into the user's PATH.
func (l *lab) addKubelet(t *testing.T) {
	t.Helper()
	peers, err := bin.Get(t.Context(), os.Stderr, "kubelet", "apiserver", "etcd")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range peers {
		l.path = filepath.Dir(p) + ":" + l.path
	}
}

func (l *lab) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, l.cleave, append([]string{"lab"}, args...)...)
	cmd.Env = append(os.Environ(), "TMPDIR="+l.tmp, "PATH="+l.path)
	// It ends as a user's does, so that it can clean up.
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = time.Minute
	return cmd
}

// run runs a command of the lab and returns what it said and its exit code.
func (l *lab) run(t *testing.T, args ...string) (string, int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var out bytes.Buffer
	cmd := l.command(ctx, args...)
	cmd.Stdout, cmd.Stderr = &out, &out
	_ = cmd.Run() //nolint:errcheck // its code is looked at
	return out.String(), cmd.ProcessState.ExitCode()
}

var runFolder = regexp.MustCompile(`^[0-9a-f]{8}$`)

// left is what is left of labs: folders, mounts, loop devices, processes.
func (l *lab) left() (left []string) {
	base := filepath.Join(l.tmp, "cleave-lab")
	entries, err := os.ReadDir(base)
	if err != nil && !os.IsNotExist(err) {
		return []string{err.Error()}
	}
	for _, e := range entries {
		if runFolder.MatchString(e.Name()) {
			left = append(left, "folder "+e.Name())
		}
	}
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil || strings.Contains(string(table), base+"/") {
		left = append(left, fmt.Sprintf("a mount below %s, or %v", base, err))
	}
	files, _ := filepath.Glob("/sys/block/loop*/loop/backing_file") //nolint:errcheck // a constant pattern
	for _, f := range files {
		if backing, err := os.ReadFile(f); err == nil && strings.HasPrefix(string(backing), base+"/") {
			left = append(left, "a loop device: "+f)
		}
	}
	environs, _ := filepath.Glob("/proc/[0-9]*/environ") //nolint:errcheck // a constant pattern
	for _, f := range environs {
		if env, err := os.ReadFile(f); err == nil && strings.Contains(string(env), base+"/") {
			left = append(left, "a process: "+f)
		}
	}
	return left
}

// waitNothingLeft waits until a janitor has done its work.
func (l *lab) waitNothingLeft(t *testing.T) {
	t.Helper()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(patience); ; <-tick.C {
		left := l.left()
		if len(left) == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("left: %s", left)
		}
	}
}
