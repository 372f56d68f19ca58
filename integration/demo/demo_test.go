package main

import (
	"bufio"
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cleave-cri/cleave/lab/janitor"
	"github.com/cleave-cri/cleave/lab/need"
	"github.com/cleave-cri/cleave/lab/node"
)

// patience bounds what a test waits for, far longer than it should take.
const patience = 2 * time.Minute

// demoRun is a demo in a process group of its own, as a terminal would start it.
type demoRun struct {
	cmd   *exec.Cmd
	lines *bufio.Scanner
	said  strings.Builder
	// dir is the run's folder, known once it was said.
	dir string
}

func startDemo(t *testing.T, args ...string) *demoRun {
	t.Helper()
	need.Loop(t)
	need.Tools(t, "runc", "du")
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	d := &demoRun{cmd: exec.CommandContext(ctx, "/proc/self/exe", append([]string{"-scenario", "../../docs/lab/demo.yaml"}, args...)...)}
	d.cmd.Env = append(os.Environ(), asDemo+"=1")
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	d.cmd.Stdout, d.cmd.Stderr = w, w
	if err := d.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	d.lines = bufio.NewScanner(r)
	t.Cleanup(func() {
		_ = d.cmd.Process.Kill() //nolint:errcheck // it should have ended
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Logf("the demo said:\n%s", d.said.String())
		}
	})
	return d
}

// readTo reads what the demo says up to a text; it fails the test if that does not come.
func (d *demoRun) readTo(t *testing.T, text string) {
	t.Helper()
	for d.lines.Scan() {
		line := d.lines.Text()
		d.said.WriteString(line + "\n")
		if _, dir, ok := strings.Cut(line, "everything of this run is in "); ok {
			d.dir = dir
		}
		if strings.Contains(line, text) {
			return
		}
	}
	t.Fatalf("the demo ended and did not say %q", text)
}

// end reads the rest and returns the exit code, -1 for a signal.
func (d *demoRun) end(t *testing.T) int {
	t.Helper()
	for d.lines.Scan() {
		d.said.WriteString(d.lines.Text() + "\n")
	}
	_ = d.cmd.Wait() //nolint:errcheck // its status is looked at
	return d.cmd.ProcessState.ExitCode()
}

// TestNothingIsLeft breaks the demo off at several moments. Whoever does that
// must not find mounts, loop devices, processes or cgroups of it afterwards.
func TestNothingIsLeft(t *testing.T) {
	cleave := buildCleave(t)
	group := func(d *demoRun) error { return syscall.Kill(-d.cmd.Process.Pid, syscall.SIGINT) }
	alone := func(d *demoRun) error { return d.cmd.Process.Kill() }
	for _, tc := range []struct {
		name, at string
		kill     func(*demoRun) error
		wantCode int
	}{
		{"killed while it makes disks", "everything of this run is in", alone, -1},
		{"Ctrl-C while containerd starts", "disk node", group, 1},
		{"killed while pods start", "pod churn", alone, -1},
		{"Ctrl-C while pods start", "pod many", group, 1},
		{"killed while it asks", "all is written", alone, -1},
		{"Ctrl-C while it asks", "all is written", group, 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			d := startDemo(t, "-cleave", cleave)
			d.readTo(t, tc.at)
			if err := tc.kill(d); err != nil {
				t.Fatal(err)
			}
			if code := d.end(t); code != tc.wantCode {
				t.Errorf("exit code is %d, want %d", code, tc.wantCode)
			}
			if tc.wantCode == 1 {
				for _, want := range []string{"demo: interrupted\n", "nothing is left"} {
					if !strings.Contains(d.said.String(), want) {
						t.Errorf("it did not say %q", want)
					}
				}
			}
			waitGone(t, d.dir)
		})
	}
	t.Run("Ctrl-C, and killed while it takes down", func(t *testing.T) {
		t.Parallel()
		d := startDemo(t, "-cleave", cleave)
		d.readTo(t, "cleave answers")
		if err := group(d); err != nil {
			t.Fatal(err)
		}
		d.readTo(t, "take everything down")
		if err := alone(d); err != nil {
			t.Fatal(err)
		}
		d.end(t)
		waitGone(t, d.dir)
	})
}

// TestKeepAndDown runs the demo to its end, talks to what it leaves running as
// it says one should, and takes it down.
func TestKeepAndDown(t *testing.T) {
	d := startDemo(t, "-cleave", buildCleave(t), "-keep")
	d.readTo(t, "all is written")
	t.Cleanup(func() { // in case the test fails: nothing to do otherwise
		if kept, err := janitor.Kept(janitor.Options{}); err == nil && len(kept) > 0 && strings.Contains(strings.Join(kept, "\n"), d.dir) {
			if err := janitor.Clean(context.Background(), d.dir); err != nil {
				t.Error(err)
			}
		}
	})
	if code := d.end(t); code != 0 {
		t.Fatalf("exit code is %d", code)
	}
	if want := `ok     cleave status says "Layout: split"`; !strings.Contains(d.said.String(), want) {
		t.Errorf("what the scenario expects is not checked: there is no %q", want)
	}
	for comment, want := range map[string]string{
		"# through cleave":           "churn",
		"# directly":                 "churn",
		"# both lists of filesyste":  "containerFilesystems",
		"# what cleave sees":         "Layout: split",
		"# what the snapshotter hol": "fence:       open",
	} {
		command := strings.Fields(after(t, d.said.String(), comment))
		out, err := exec.CommandContext(t.Context(), command[0], command[1:]...).CombinedOutput() //nolint:gosec // what the demo says
		if err != nil || !strings.Contains(string(out), want) {
			t.Errorf("%q: %v, want %q in\n%s", command, err, want, out)
		}
	}
	down := startDemo(t, "-down", d.dir)
	if code := down.end(t); code != 0 || !strings.Contains(down.said.String(), "took down "+d.dir) {
		t.Errorf("exit code is %d:\n%s", code, down.said.String())
	}
	waitGone(t, d.dir)
}

// after returns the line after the one that begins with mark.
func after(t *testing.T, text, mark string) string {
	t.Helper()
	_, rest, ok := strings.Cut(text, "\n"+mark)
	if !ok {
		t.Fatalf("no %q was said", mark)
	}
	_, rest, _ = strings.Cut(rest, "\n")
	line, _, _ := strings.Cut(rest, "\n")
	return line
}

func buildCleave(t *testing.T) string {
	t.Helper()
	need.Root(t)
	binary, err := node.BuildCleave(t.Context(), t.TempDir(), true)
	if err != nil {
		t.Fatal(err)
	}
	return binary
}

// waitGone waits until nothing of a run is left.
func waitGone(t *testing.T, dir string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		left := leftOf(t, dir)
		if len(left) == 0 {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("of %s are left: %s", dir, strings.Join(left, ", "))
		}
	}
}

// leftOf lists what is left of a run: files, mounts, loop devices, processes by
// what they were started with, and cgroups.
func leftOf(t *testing.T, dir string) (left []string) {
	t.Helper()
	if dir == "" {
		t.Fatal("the run's folder is not known")
	}
	if _, err := os.Lstat(dir); err == nil {
		left = append(left, dir)
	}
	group := "cleave-lab-" + filepath.Base(dir)
	for pattern, texts := range map[string][]string{
		"/proc/self/mountinfo":               {dir},
		"/sys/block/loop*/loop/backing_file": {dir},
		"/proc/[0-9]*/environ":               {"=" + dir},
		"/proc/[0-9]*/cmdline":               {dir},
		"/proc/[0-9]*/cgroup":                {group},
	} {
		for _, file := range glob(t, pattern) {
			content := read(file)
			for _, text := range texts {
				if strings.Contains(content, text) {
					left = append(left, file)
				}
			}
		}
	}
	for _, pattern := range []string{"/sys/fs/cgroup/" + group, "/sys/fs/cgroup/*/" + group} {
		left = append(left, glob(t, pattern)...)
	}
	return left
}

func glob(t *testing.T, pattern string) []string {
	t.Helper()
	files, err := filepath.Glob(pattern)
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// read returns what is in a file; nothing if it has gone.
func read(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close() //nolint:errcheck // only read
	content, err := io.ReadAll(f)
	if err != nil {
		return ""
	}
	return string(content)
}
