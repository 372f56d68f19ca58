package janitor_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/janitor"
	"github.com/cleave-cri/cleave/lab/need"
	"github.com/cleave-cri/cleave/lab/sweep"
)

// victimEnv makes this program one that makes a lab run and is then killed; the value is the base folder.
const victimEnv = "CLEAVE_TEST_VICTIM"

func TestMain(m *testing.M) {
	if os.Getenv("CLEAVE_TEST_FORGETFUL") == "" {
		janitor.Main()
	}
	if base := os.Getenv(victimEnv); base != "" {
		if err := victim(base); err != nil {
			fmt.Println("error:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// victim makes one of each kind of thing, says where, and waits to be killed.
func victim(base string) error {
	ctx := context.Background()
	run, err := janitor.Start(ctx, janitor.Options{Base: base})
	if err != nil {
		return err
	}
	if os.Getenv("CLEAVE_TEST_FORGETFUL") == "" {
		if _, err := disk.Make(ctx, run.Dir(), disk.Spec{Name: "d", SizeBytes: 32 << 20}); err != nil {
			return err
		}
	}
	// A process in a session of its own that works in the mount, and has a child that has lost its parent.
	cmd := exec.Command("sh", "-c", "(sleep 9999 &) ; exec sleep 9999")
	cmd.Env = run.Env()
	cmd.Dir = filepath.Join(run.Dir(), "d", "fs")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	// One that carries no mark and is in the run's cgroup.
	group := filepath.Join(hierarchy(), run.Cgroup())
	if err := os.MkdirAll(filepath.Join(group, "pod"), 0o755); err != nil {
		return err
	}
	inGroup := exec.Command("sh", "-c", "echo $$ > "+group+"/pod/cgroup.procs && exec sleep 9999")
	if err := inGroup.Start(); err != nil {
		return err
	}
	for procs := []byte(nil); len(procs) == 0; { // it runs when it is in its group
		var err error
		if procs, err = os.ReadFile(group + "/pod/cgroup.procs"); err != nil {
			return err
		}
	}
	fmt.Println(run.Dir())
	select {}
}

// startVictim returns the victim and its run's folder.
func startVictim(t *testing.T, base string) (*exec.Cmd, string) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), victimEnv+"="+base)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || strings.HasPrefix(line, "error") {
		t.Fatalf("the victim said %q (%v)", line, err)
	}
	dir := strings.TrimSpace(line)
	t.Cleanup(func() { // in case the test fails: nothing to do otherwise
		if err := sweep.All(context.Background(), sweep.Scope{Dir: dir, Cgroup: "cleave-lab-" + filepath.Base(dir)}); err != nil {
			t.Error(err)
		}
	})
	return cmd, dir
}

// hierarchy is one hierarchy of cgroups: one of version 1 where there are several, else the only one.
func hierarchy() string {
	if v1 := "/sys/fs/cgroup/pids"; exists(v1) {
		return v1
	}
	return "/sys/fs/cgroup"
}

// Whoever presses Ctrl-C, or whose test is killed by a time limit, must not have to clean up by hand.
func TestNothingIsLeft(t *testing.T) {
	t.Parallel()
	need.Loop(t)
	for _, tc := range []struct {
		name string
		kill func(*exec.Cmd) error
	}{
		{"SIGKILL", func(c *exec.Cmd) error { return c.Process.Kill() }},
		{"Ctrl-C to the process group", func(c *exec.Cmd) error { return syscall.Kill(-c.Process.Pid, syscall.SIGINT) }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			cmd, dir := startVictim(t, t.TempDir())
			if err := tc.kill(cmd); err != nil {
				t.Fatal(err)
			}
			_ = cmd.Wait() //nolint:errcheck // killed: its status says nothing
			waitGone(t, dir)
		})
	}
}

// When the janitor was killed too, as when a machine's memory runs out, the next run cleans up.
func TestStaleRunIsCleanedByTheNext(t *testing.T) {
	t.Parallel()
	need.Loop(t)
	base := t.TempDir()
	cmd, dir := startVictim(t, base)
	janitorPID := janitorOf(t, dir)
	if err := syscall.Kill(janitorPID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() //nolint:errcheck // killed: its status says nothing
	if !processesIn(t, dir) {
		t.Fatal("the stale run has no processes: the test shows nothing")
	}
	var said strings.Builder
	// The lock of the dead goes only when the kernel has torn them down, so the first start may be a moment too early.
	for deadline := time.Now().Add(20 * time.Second); exists(dir) && time.Now().Before(deadline); {
		run, err := janitor.Start(t.Context(), janitor.Options{Base: base, Log: &said})
		if err != nil {
			t.Fatal(err)
		}
		if err := run.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	waitGone(t, dir)
	if want := "lab: cleaned what an earlier run left in " + dir + "\n"; said.String() != want {
		t.Errorf("said %q, want %q", said.String(), want)
	}
}

func TestARunLeavesOthersAlone(t *testing.T) {
	t.Parallel()
	need.Root(t)
	base := t.TempDir()
	first, err := janitor.Start(t.Context(), janitor.Options{Base: base})
	if err != nil {
		t.Fatal(err)
	}
	second, err := janitor.Start(t.Context(), janitor.Options{Base: base})
	if err != nil {
		t.Fatal(err)
	}
	if first.Dir() == second.Dir() {
		t.Errorf("both runs have %s", first.Dir())
	}
	if err := second.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if !exists(first.Dir()) {
		t.Error("the end of one run removed the other")
	}
	if err := first.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if err := first.Close(t.Context()); err != nil {
		t.Errorf("a second Close: %v", err)
	}
	if exists(first.Dir()) {
		t.Error("the folder is still there")
	}
}

// TestLeft: a live run is told apart from one that nobody has any more, and a kept one is neither.
func TestLeft(t *testing.T) {
	t.Parallel()
	need.Root(t)
	o := janitor.Options{Base: t.TempDir()}
	live, err := janitor.Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	base := filepath.Dir(live.Dir())
	for _, name := range []string{"0000dead/lock", "0000beef/lock", "0000beef/keep", "other/lock"} {
		file := filepath.Join(base, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o700), os.WriteFile(file, nil, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	had, stale, err := janitor.Left(t.Context(), o)
	if err != nil || len(had) != 1 || had[0] != live.Dir() || len(stale) != 1 || stale[0] != filepath.Join(base, "0000dead") {
		t.Errorf("somebody has %v, nobody %v, %v", had, stale, err)
	}
	if err := live.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if had, _, err := janitor.Left(t.Context(), o); err != nil || len(had) > 0 {
		t.Errorf("after its end somebody has %v, %v", had, err)
	}
}

func TestKeepAndClean(t *testing.T) {
	t.Parallel()
	need.Loop(t)
	o := janitor.Options{Base: t.TempDir()}
	run, err := janitor.Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	d, err := disk.Make(t.Context(), run.Dir(), disk.Spec{Name: "d", SizeBytes: 32 << 20})
	if err != nil {
		t.Fatal(err)
	}
	if err := janitor.Clean(t.Context(), run.Dir()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("cleaning a run that is not kept gave %v", err)
	}
	if err := run.Keep(t.Context()); err != nil {
		t.Fatal(err)
	}
	next, err := janitor.Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if err := next.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if !exists(filepath.Join(d.Path(), "lost+found")) {
		t.Error("the kept run's disk is gone")
	}
	kept, err := janitor.Kept(o)
	if err != nil || len(kept) != 1 || kept[0] != run.Dir() {
		t.Errorf("kept runs are %v (%v), want %s", kept, err, run.Dir())
	}
	if err := janitor.Clean(t.Context(), run.Dir()); err != nil {
		t.Error(err)
	}
	waitGone(t, run.Dir())
}

// A program that forgot to call Main would start itself again and again; it must be told instead.
func TestMainWasForgotten(t *testing.T) {
	t.Parallel()
	need.Root(t)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), victimEnv+"="+t.TempDir(), "CLEAVE_TEST_FORGETFUL=1")
	out, err := cmd.Output()
	if err == nil || !strings.Contains(string(out), "is janitor.Main the first call") {
		t.Errorf("got %q (%v), want to be told about janitor.Main", out, err)
	}
}

func TestBaseMustBeOurs(t *testing.T) {
	t.Parallel()
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(t.TempDir(), link); err != nil {
		t.Fatal(err)
	}
	if _, err := janitor.Start(t.Context(), janitor.Options{Base: link}); err == nil || !strings.Contains(err.Error(), "no folder of ours") {
		t.Errorf("got %v, want the link refused", err)
	}
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// waitGone waits until the folder is gone, and then nothing else may be left.
func waitGone(t *testing.T, dir string) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	limit := time.After(30 * time.Second)
	for exists(dir) || processesIn(t, dir) { // the janitor itself is the last to go
		select {
		case <-limit:
			report, err := os.ReadFile(filepath.Join(dir, "janitor.log"))
			t.Fatalf("%s or processes of it are still there; report: %s (%v)", dir, report, err)
		case <-tick.C:
		}
	}
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(table), dir) {
		t.Error("mounts are left")
	}
	loops, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range loops {
		if backing, err := os.ReadFile(f); err == nil && strings.Contains(string(backing), dir) {
			t.Errorf("%s is left", f)
		}
	}
	if group := filepath.Join(hierarchy(), "cleave-lab-"+filepath.Base(dir)); exists(group) {
		t.Errorf("%s is left", group)
	}
}

// processesIn looks for processes by their environment, their cgroup and their arguments.
func processesIn(t *testing.T, dir string) bool {
	t.Helper()
	for _, name := range []string{"environ", "cgroup", "cmdline"} {
		files, err := filepath.Glob("/proc/[0-9]*/" + name)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			content, err := os.ReadFile(f)
			if err == nil && (strings.Contains(string(content), "="+dir) || strings.Contains(string(content), "cleave-lab-"+filepath.Base(dir)) || strings.Contains(string(content), dir)) {
				return true
			}
		}
	}
	return false
}

func janitorOf(t *testing.T, dir string) int {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if args, err := os.ReadFile(f); err == nil && string(args) == "cleave-lab-janitor\x00"+dir+"\x00" {
			var pid int
			if _, err := fmt.Sscanf(f, "/proc/%d/", &pid); err == nil {
				return pid
			}
		}
	}
	t.Fatal("no janitor found")
	return 0
}

// A run's janitor that was removing its folder failed with "directory not
// empty": another run that started in this moment had made the lock again.
func TestFolderThatIsBeingRemovedIsLeftAlone(t *testing.T) {
	t.Parallel()
	need.Root(t)
	base := t.TempDir()
	start := func() {
		run, err := janitor.Start(t.Context(), janitor.Options{Base: base})
		if err != nil {
			t.Fatal(err)
		}
		if err := run.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	dir := filepath.Join(base, "0123abcd")
	if err := os.MkdirAll(filepath.Join(dir, "not-yet-removed"), 0o700); err != nil {
		t.Fatal(err)
	}
	start()
	if exists(filepath.Join(dir, "lock")) || !exists(filepath.Join(dir, "not-yet-removed")) {
		t.Error("a start meddled with a folder that is being removed")
	}
	long := time.Now().Add(-time.Hour)
	if err := os.Chtimes(dir, long, long); err != nil {
		t.Fatal(err)
	}
	start()
	if exists(dir) {
		t.Error("a folder whose janitor was killed while removing it stays")
	}
}

// A run that was kept is cleaned by whoever is told to, and that one may be killed at any moment: with the mark that it is kept and no lock
// a folder would have stayed for ever.
func TestAKeptFolderThatIsHalfRemovedDoesNotStay(t *testing.T) {
	t.Parallel()
	need.Root(t)
	for _, files := range [][]string{{"keep"}, {"keep", "disk.img"}, {"lock"}, {"lock", "disk.img"}, {}} {
		t.Run(strings.Join(files, " and "), func(t *testing.T) {
			t.Parallel()
			base := t.TempDir()
			dir := filepath.Join(base, "0123abcd")
			if err := os.MkdirAll(dir, 0o700); err != nil {
				t.Fatal(err)
			}
			for _, name := range files {
				if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			long := time.Now().Add(-time.Hour)
			if err := os.Chtimes(dir, long, long); err != nil {
				t.Fatal(err)
			}
			if kept, err := janitor.Kept(janitor.Options{Base: base}); err != nil || len(kept) > 0 {
				t.Errorf("kept: %q, %v", kept, err)
			}
			run, err := janitor.Start(t.Context(), janitor.Options{Base: base})
			if err != nil {
				t.Fatal(err)
			}
			if err := run.Close(t.Context()); err != nil {
				t.Fatal(err)
			}
			if exists(dir) {
				t.Error("the folder stays")
			}
		})
	}
}
