// Package need says what a test needs of the machine. Where it isn't there the test is skipped with the reason, or
// fails when CLEAVE_REQUIRE_ROOT_TESTS=1 is set, as `make test` and CI do: a kind of tests that never runs is no test.
package need

import (
	"context"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/cleave-cri/cleave/lab/janitor"
)

// RequireEnv is the environment variable that turns skipping into failing.
const RequireEnv = "CLEAVE_REQUIRE_ROOT_TESTS"

// Skip ends the test because the machine lacks something: it skips, or fails where RequireEnv is set to 1.
func Skip(t testing.TB, format string, args ...any) {
	t.Helper()
	if os.Getenv(RequireEnv) == "1" {
		t.Fatalf(format+" ("+RequireEnv+"=1 makes this a failure)", args...)
	}
	t.Skipf(format, args...)
}

// Root lets the test go on only as root.
func Root(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		Skip(t, "needs root: run it as root, or with sudo")
	}
}

// Tools lets the test go on only where these programs are in PATH.
func Tools(t testing.TB, names ...string) {
	t.Helper()
	for _, name := range names {
		if _, err := exec.LookPath(name); err != nil {
			Skip(t, "needs %s: run `make deps`, which installs it", name)
		}
	}
}

// Loop lets the test go on only where loop devices can be had.
func Loop(t testing.TB) {
	t.Helper()
	Root(t)
	if _, err := os.Stat("/dev/loop-control"); err != nil {
		Skip(t, "needs loop devices: %v", err)
	}
	Tools(t, "losetup", "mount")
}

// FUSE lets the test go on only where filesystems can be served by the process itself.
func FUSE(t testing.TB) {
	t.Helper()
	Root(t)
	if _, err := os.Stat("/dev/fuse"); err != nil {
		Skip(t, "needs FUSE: %v", err)
	}
}

// Lab starts a lab run that is closed, with everything in it, when the test ends. The test's TestMain must call
// janitor.Main first.
func Lab(t testing.TB) *janitor.Run {
	t.Helper()
	Root(t)
	run, err := janitor.Start(t.Context(), janitor.Options{Log: t.Output()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Minute)
		defer cancel()
		if err := run.Close(ctx); err != nil {
			t.Errorf("clean up the lab run: %v", err)
		}
	})
	return run
}
