package split

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/cleave-cri/cleave/lab/need"
	"github.com/cleave-cri/cleave/snapshot/split/fault"
	"github.com/cleave-cri/cleave/snapshot/split/fence"
)

// hungMount mounts a filesystem without a server over a folder: each question
// about it waits. The function that is returned ends that.
func hungMount(t *testing.T, at string) (end func()) {
	t.Helper()
	device, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		need.Skip(t, "no FUSE here: %v", err)
	}
	if err := unix.Mount("hung", at, "fuse", unix.MS_NODEV|unix.MS_NOSUID, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", device.Fd())); err != nil {
		need.Skip(t, "FUSE can't be mounted here: %v", errors.Join(err, device.Close()))
	}
	ended := false
	end = func() {
		if ended {
			return
		}
		ended = true
		// What waits is told that the server is gone.
		if err := errors.Join(device.Close(), unix.Unmount(at, unix.MNT_DETACH)); err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(end)
	return end
}

// TestARootThatHangsHoldsUpNothingElse: the image root's filesystem stops to
// answer, for real. Status, usage and all reads go on, what needs the root is
// refused with the reason, and when it is gone all goes on as before.
func TestARootThatHangsHoldsUpNothingElse(t *testing.T) {
	t.Parallel()
	o := folders(t)
	s := initialised(t, o)
	base, _ := addLayer(t, s, 1, "")
	key, _ := addContainer(t, s, 2, base)
	settle(t, s)
	end := hungMount(t, o.ImageRoot)

	// The calls have 20 times the limit that the fence gives to a question.
	ctx, cancel := context.WithTimeout(t.Context(), 40*time.Second)
	defer cancel()
	done := make(chan struct{})
	go func() {
		defer close(done)
		if _, err := s.Prepare(ctx, containerKey(3), base); !errors.Is(err, fence.ErrNoAnswer) || !errdefs.IsFailedPrecondition(err) {
			t.Errorf("prepare: %v, want it refused because the root does not answer", err)
		}
		if err := s.Cleanup(ctx); !errors.Is(err, fence.ErrNoAnswer) {
			t.Errorf("clean up: %v, want it refused because the root does not answer", err)
		}
		if _, err := s.Usage(ctx, key); err != nil {
			t.Errorf("usage of a container: %v", err)
		}
		if _, err := s.Usage(ctx, base); err != nil {
			t.Errorf("usage of a layer: %v", err)
		}
		if _, err := s.Mounts(ctx, key); err != nil {
			t.Errorf("mounts: %v", err)
		}
		st, err := s.Status(ctx)
		if err != nil || !st.Fence.Closed || len(st.Fence.Reasons) != 1 || st.Fence.Reasons[0].Root != o.ImageRoot {
			t.Errorf("status: %+v, %v", st.Fence, err)
		}
		if st.Image.Open || st.Image.FreeBytes != nil || !st.Container.Open || st.Container.FreeBytes == nil || len(st.Notes) > 1 {
			t.Errorf("status of the roots: %+v, %+v, %q", st.Image, st.Container, st.Notes)
		}
	}()
	select {
	case <-done:
	case <-ctx.Done():
		end()
		<-done
		t.Fatal("a root that hangs held up all else")
	}

	end()
	eventually(t, "the root is used again", func() bool {
		_, err := s.Prepare(t.Context(), containerKey(3), base)
		return err == nil
	})
	if err := s.Cleanup(t.Context()); err != nil {
		t.Error(err)
	}
	mustBeClean(t, s, o)
}

// TestUnmountedRootIsUnknown: no figure of a root that is not there is given, and
// one reason says what is wrong.
func TestUnmountedRootIsUnknown(t *testing.T) {
	t.Parallel()
	o := folders(t)
	s := initialised(t, o)
	if st, err := s.Status(t.Context()); err != nil || st.Image.FreeBytes == nil || len(st.Notes) == 0 {
		t.Fatalf("before: %+v, %v", st, err)
	}
	if err := errors.Join(os.Rename(o.ImageRoot, o.ImageRoot+"-away"), os.Mkdir(o.ImageRoot, 0o700)); err != nil {
		t.Fatal(err)
	}
	if err := s.Cleanup(t.Context()); !errdefs.IsFailedPrecondition(err) {
		t.Fatalf("got %v", err)
	}
	st, err := s.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(st.Fence.Reasons) != 1 || len(st.Image.Errors) > 0 || st.Image.Trash.LastError != "" {
		t.Errorf("root %+v", st.Image)
		t.Errorf("reasons %+v, want the first that is wrong", st.Fence.Reasons)
	}
	if st.Image.Open || st.Image.FreeBytes != nil || st.Image.Device != 0 {
		t.Errorf("the missing root: %+v, want nothing known", st.Image)
	}
	for _, n := range st.Notes {
		if strings.Contains(n, "one filesystem") {
			t.Errorf("note %q about a root that is not there", n)
		}
	}
	text, err := json.Marshal(st)
	if err != nil || strings.Contains(string(text), "0001-01-01") {
		t.Errorf("%s, %v: a time that never was", text, err)
	}
}

// TestWriterThatHangs: a disk that hangs in the middle of a change holds up the
// writers after it no longer than they want to wait, and no reader.
func TestWriterThatHangs(t *testing.T) {
	t.Parallel()
	o := folders(t)
	reached, goOn := make(chan struct{}), make(chan struct{})
	var first atomic.Bool
	o.faults = func(p fault.Point) {
		if p == fault.CreateRenamed && first.CompareAndSwap(false, true) {
			close(reached)
			<-goOn
		}
	}
	s := initialised(t, o)
	ended := make(chan error, 1)
	go func() {
		_, err := s.Prepare(t.Context(), containerKey(1), "")
		ended <- err
	}()
	<-reached
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := s.Prepare(ctx, containerKey(2), ""); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a writer that waits: %v, want its deadline", err)
	}
	if _, err := s.Status(t.Context()); err != nil {
		t.Errorf("status: %v", err)
	}
	if _, err := s.Stat(t.Context(), containerKey(1)); !errdefs.IsNotFound(err) {
		t.Errorf("stat of what is not committed: %v", err)
	}
	close(goOn)
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if _, err := s.Prepare(t.Context(), containerKey(2), ""); err != nil {
		t.Errorf("afterwards: %v", err)
	}
	mustBeClean(t, s, o)
}
