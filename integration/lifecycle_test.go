package integration

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	"github.com/cleave-cri/cleave/lab/node"
	"github.com/cleave-cri/cleave/proxy/proxytest"
)

// locked reports whether a cleave has the lock of a state folder.
func locked(t *testing.T, stateDir string) bool {
	t.Helper()
	f, err := os.Open(filepath.Join(stateDir, "lock"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close() //nolint:errcheck // only read
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err != nil && !errors.Is(err, unix.EWOULDBLOCK) {
		t.Fatal(err)
	}
	return err != nil
}

// TestChangedStateFolderAtHandover: the successor has the lock of the new folder,
// and the old one is free for another cleave.
func TestChangedStateFolderAtHandover(t *testing.T) {
	t.Parallel()
	run, c := beforeEcho(t)
	ctx := bounded(t)
	cfg := c.Config()
	old := cfg.StateDir
	cfg.StateDir = filepath.Join(run.Dir(), "other-state")
	s := reconfigure(ctx, t, c, cfg)
	if !locked(t, cfg.StateDir) || lockNote(t, cfg.StateDir) != s.PID {
		t.Errorf("the new folder is not the successor's")
	}
	eventually(ctx, t, "the old folder's lock", func() (string, bool) { return old, !locked(t, old) })
	callOK(ctx, t, c.Socket())
}

// held makes a call that the echo runtime answers after a day, and returns when
// it is in flight. The function ends it.
func held(ctx context.Context, t *testing.T, c *node.Cleave) (done <-chan proxytest.Outcome, end func()) {
	t.Helper()
	before, err := c.Status(ctx)
	if err != nil {
		t.Fatal(err)
	}
	conn := rawDial(t, c)
	ctx, end = context.WithCancel(ctx)
	outcome := make(chan proxytest.Outcome, 1)
	go func() {
		outcome <- proxytest.Do(ctx, conn, proxytest.Call{
			Method: "/runtime.v1.ImageService/PullImage", Requests: [][]byte{{}}, Metadata: metadata.MD{proxytest.Hold: {"24h"}},
		})
	}()
	eventually(ctx, t, "the long call", func() (string, bool) {
		s, err := c.Status(ctx)
		return fmt.Sprint(s.Proxy.CallsInFlight, err), err == nil && s.Proxy.CallsInFlight > before.Proxy.CallsInFlight
	})
	return outcome, end
}

// TestLockGoesWithTheSuccessor: the successor is killed while the old process
// still finishes a long call. A new cleave can be started all the same, and the
// long call is not lost.
func TestLockGoesWithTheSuccessor(t *testing.T) {
	t.Parallel()
	_, c := beforeEcho(t)
	ctx := bounded(t)
	first, err := c.Status(ctx)
	if err != nil {
		t.Fatal(err)
	}
	long, end := held(ctx, t, c)
	defer end()
	waitOld, err := c.HandOver(ctx)
	if err != nil {
		t.Fatal(err)
	}
	second, err := c.Status(ctx)
	if err != nil {
		t.Fatal(err)
	}
	eventually(ctx, t, "the lock's note", func() (string, bool) {
		note := lockNote(t, c.Config().StateDir)
		return fmt.Sprint(note), note == second.PID
	})
	if err := syscall.Kill(second.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(ctx, t, "the lock", func() (string, bool) { return c.LogTail(3), !locked(t, c.Config().StateDir) })
	if err := c.Start(ctx); err != nil {
		t.Fatalf("a new cleave: %v", err)
	}
	callOK(ctx, t, c.Socket())
	if err := syscall.Kill(first.PID, 0); err != nil {
		t.Errorf("the old process is gone with a call in flight: %v", err)
	}
	select {
	case got := <-long:
		t.Errorf("the long call was lost: %v %s", got.Code, got.Message)
	default:
	}
	end()
	if got := <-long; got.Code != codes.Canceled {
		t.Errorf("the long call ended with %v %s", got.Code, got.Message)
	}
	if err := waitOld(ctx); err != nil {
		t.Error(err)
	}
}

// TestOrphanedSuccessorServes kills the old process while its successor is still
// starting: that one has all it needs and serves.
func TestOrphanedSuccessorServes(t *testing.T) {
	t.Parallel()
	_, c := beforeEcho(t)
	ctx := bounded(t)
	before, err := c.Status(ctx)
	if err != nil {
		t.Fatal(err)
	}
	// The successor gets as far as its configuration.
	opens, release := hangs(t, c.ConfigFile())
	if err := syscall.Kill(before.PID, syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	var successor int
	select {
	case successor = <-opens:
	case <-ctx.Done():
		t.Fatalf("no successor reads its configuration:\n%s", c.LogTail(10))
	}
	if err := syscall.Kill(before.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { end(t, successor); ended(t, successor) })
	ended(t, before.PID) // only then is nobody at the other end of the pipe
	release()
	eventually(ctx, t, "the successor", func() (string, bool) {
		s, err := c.Status(ctx)
		return fmt.Sprint(s.PID, err), err == nil && s.PID == successor
	})
	callOK(ctx, t, c.Socket())
	if log := c.LogTail(20); !strings.Contains(log, "the old process was not told that this one serves") {
		t.Errorf("the old process was told, so it was killed too late:\n%s", log)
	}
	if !locked(t, c.Config().StateDir) {
		t.Error("the successor has no lock")
	}
}

// hangs makes every open of a file or folder wait in the kernel, until it is
// released or the test ends: fanotify(7), FAN_OPEN_PERM. The channel gives the
// first process that waits.
func hangs(t *testing.T, path string) (opens <-chan int, release func()) {
	t.Helper()
	fd, err := unix.FanotifyInit(unix.FAN_CLASS_CONTENT|unix.FAN_CLOEXEC|unix.FAN_NONBLOCK, unix.O_RDONLY|unix.O_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "fanotify")
	waits := make(chan int, 1)
	over := make(chan struct{})
	release = sync.OnceFunc(func() {
		if err := f.Close(); err != nil { // lets all go on that wait
			t.Error(err)
		}
		<-over
	})
	t.Cleanup(release)
	if err := unix.FanotifyMark(fd, unix.FAN_MARK_ADD, unix.FAN_OPEN_PERM|unix.FAN_ONDIR, unix.AT_FDCWD, path); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(over)
		event := make([]byte, unsafe.Sizeof(unix.FanotifyEventMetadata{}))
		if n, err := f.Read(event); err == nil && n == len(event) {
			// The kernel's own struct, whose last fields are the descriptor and
			// the process.
			file := int32(binary.NativeEndian.Uint32(event[len(event)-8:])) //nolint:gosec // a descriptor
			waits <- int(binary.NativeEndian.Uint32(event[len(event)-4:]))
			_ = unix.Close(int(file)) //nolint:errcheck // not needed
		}
	}()
	return waits, release
}

// TestHungMeasurementDoesNotHoldUpTheEnd: the walk of a container's layer waits
// in the kernel for a file system that does not answer. Calls pass, and cleave
// ends when it is told to.
func TestHungMeasurementDoesNotHoldUpTheEnd(t *testing.T) {
	t.Parallel()
	n := startNode(t, node.Options{})
	ctx := bounded(t)
	c := dial(t, n.Cleave.Endpoint())
	id := startWriter(ctx, t, n, c, "hung", "mkdir /hung; sleep 1000")
	eventually(ctx, t, "the folder", func() (string, bool) {
		_, err := c.Exec(ctx, id, "/bin/ls", "/hung")
		return fmt.Sprint(err), err == nil
	})
	opens, _ := hangs(t, filepath.Join(upperOf(ctx, t, n, id), "hung"))
	select {
	case <-opens:
	case <-ctx.Done():
		t.Fatal("no measurement comes by")
	}
	if _, err := c.Runtime.Version(ctx, versionRequest); err != nil {
		t.Errorf("a call meanwhile: %v", err)
	}
	// The wait for a measurement may have used up the time that there was.
	stopping := bounded(t)
	began := time.Now()
	if err := n.Cleave.Stop(stopping); err != nil {
		t.Fatal(err)
	}
	// The kernel ends a process only when all its threads leave the kernel, and
	// such a wait can be left by a signal that kills.
	if took := time.Since(began); took > 30*time.Second {
		t.Errorf("it took %s to end", took)
	}
	if log := n.Cleave.LogTail(10); !strings.Contains(log, "a measurement hangs and is left behind") {
		t.Errorf("the log does not say what hangs:\n%s", log)
	}
	if _, err := os.Lstat(n.Cleave.Socket()); !os.IsNotExist(err) {
		t.Errorf("the socket is still there: %v", err)
	}
}
