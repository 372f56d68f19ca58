package fence

import (
	"errors"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"
	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/snapshot/split/rootdir"
)

// hanging is a kernel in which one path hangs from stop until it is let go.
type hanging struct {
	path  string
	stop  atomic.Bool
	let   chan struct{}
	asked atomic.Int32 // questions about the path while it hangs
}

func (h *hanging) ask(path string) {
	if path == h.path && h.stop.Load() {
		h.asked.Add(1)
		<-h.let
	}
}

// gateOn makes two roots in plain folders and a gate on them.
func gateOn(t *testing.T, suits func(Role, *rootdir.Root) error) (*Gate, *hanging) {
	t.Helper()
	paths, want := map[Role]string{Image: t.TempDir(), Container: t.TempDir()}, map[Role]Want{}
	sources := Kernel()
	for _, role := range Roles() {
		root, err := rootdir.Open(paths[role])
		if err != nil {
			t.Fatal(err)
		}
		if err := WriteMarker(root, "ID", role); err != nil {
			t.Fatal(err)
		}
		recorded, err := Record(root, sources)
		if err := errors.Join(err, root.Close()); err != nil {
			t.Fatal(err)
		}
		want[role] = Want{Identity: "ID", Role: role, Recorded: recorded}
	}
	h := &hanging{path: paths[Image], let: make(chan struct{})}
	sources.Ask = h.ask
	g, err := NewGate(paths, want, sources, zap.NewNop(), suits)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	})
	return g, h
}

func suitsAlways(Role, *rootdir.Root) error { return nil }

// TestARootThatHangs: the disk below one root stops to answer. That is found out
// once, within the limit, with one question left behind; all else is answered
// at once, and when the disk answers again the gate opens with the root it held.
func TestARootThatHangs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g, h := gateOn(t, suitsAlways)
		if err := g.Verify(); err != nil {
			t.Fatal(err)
		}
		held, err := g.Root(Image)
		if err != nil {
			t.Fatal(err)
		}
		<-g.Opened()

		h.stop.Store(true)
		began := time.Now()
		err = g.Quick()
		if took := time.Since(began); took != askLimit {
			t.Errorf("took %s, want %s", took, askLimit)
		}
		if !errors.Is(err, ErrNoAnswer) || !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), h.path) {
			t.Errorf("error %v, want ErrNoAnswer with the root", err)
		}

		began = time.Now()
		for range 10 {
			if err := g.Quick(); !errors.Is(err, ErrNoAnswer) {
				t.Errorf("error %v, want ErrNoAnswer", err)
			}
			if _, err := g.Root(Image); !errors.Is(err, ErrNoAnswer) {
				t.Errorf("the hanging root is given: %v", err)
			}
			if _, err := g.Space(Image); !errors.Is(err, ErrNoAnswer) {
				t.Errorf("the space of the hanging root: %v", err)
			}
			if _, err := g.Root(Container); err != nil {
				t.Errorf("the other root: %v", err)
			}
			if space, err := g.Space(Container); err != nil || space.FreeBytes == 0 {
				t.Errorf("the space of the other root: %+v, %v", space, err)
			}
			if reasons, _ := g.State(); len(reasons) != 1 || reasons[0].Remedy == "" {
				t.Errorf("reasons: %+v", reasons)
			}
		}
		if took := time.Since(began); took != 0 || h.asked.Load() != 1 {
			t.Errorf("%s, %d questions, want none more", took, h.asked.Load())
		}

		h.stop.Store(false)
		close(h.let)
		synctest.Wait()
		if err := g.Quick(); err != nil {
			t.Errorf("it answers again: %v", err)
		}
		if again, err := g.Root(Image); err != nil || again != held {
			t.Errorf("another root is held than before, %v", err)
		}
		select {
		case <-g.Opened():
		default:
			t.Error("the opening is not told")
		}
	})
}

// TestARootThatHangsWhileItIsTaken: what comes too late is closed and not used.
func TestARootThatHangsWhileItIsTaken(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		let, took := make(chan struct{}), make(chan *rootdir.Root, 10)
		var hangs atomic.Bool
		hangs.Store(true)
		g, _ := gateOn(t, func(role Role, root *rootdir.Root) error {
			if role == Container && hangs.Load() {
				took <- root
				<-let
			}
			return nil
		})
		if err := g.Verify(); !errors.Is(err, ErrNoAnswer) {
			t.Fatalf("got %v, want ErrNoAnswer", err)
		}
		if _, err := g.Root(Image); err != nil {
			t.Errorf("the other root: %v", err)
		}
		hangs.Store(false)
		close(let)
		synctest.Wait()
		if _, err := (<-took).Place(); !errors.Is(err, os.ErrClosed) {
			t.Errorf("the root of the late answer is still open: %v", err)
		}
		if err := g.Verify(); err != nil {
			t.Error(err)
		}
	})
}

// TestRemedies: what a person is told fits the kernel's error number.
func TestRemedies(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		err  error
		want string
	}{
		{syscall.EACCES, "let root read"},
		{syscall.ENOTDIR, "make it a folder"},
		{syscall.EROFS, "writable"},
		{syscall.ENOSPC, "make some room"},
		{syscall.EIO, "kernel's log"},
		{syscall.EUCLEAN, "kernel's log"},
		{syscall.ENOTCONN, "its server"},
		{syscall.EMFILE, "open files"},
		{syscall.ENOENT, "restore what is missing"},
		{errors.ErrUnsupported, "overlayfs"},
		{errors.New("else"), "otherwise"},
	} {
		got := remedy(&os.PathError{Op: "open", Path: "/x", Err: tc.err}, Image, "otherwise")
		if !strings.Contains(got, tc.want) || strings.Contains(got, "%") {
			t.Errorf("%v: %q, want %q", tc.err, got, tc.want)
		}
	}
	reason, _ := Judge(Want{Role: Image}, Seen{Path: "/i", OpenErr: &os.PathError{Op: "open", Path: "/i", Err: syscall.EIO}})
	if !strings.Contains(reason.Remedy, "check the disk") {
		t.Errorf("a disk that fails: %+v", reason)
	}
	unfit := finding{}.because(side{path: "/i"}, &Unfit{What: "what", Remedy: "do"})
	if unfit.reason != (Reason{Root: "/i", What: "what", Remedy: "do"}) {
		t.Errorf("an error with its own remedy: %+v", unfit.reason)
	}
}
