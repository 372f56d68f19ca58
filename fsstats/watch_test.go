package fsstats

import (
	"context"
	"errors"
	"os"
	"reflect"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cleave-cri/cleave/lab/fuse"
	"github.com/cleave-cri/cleave/lab/need"
)

// changingSource is a kernel whose files and mount table change, and in which
// paths hang.
type changingSource struct {
	mu    sync.Mutex
	fake  *fakeSource              // guarded by mu
	hangs map[string]chan struct{} // guarded by mu
}

func (c *changingSource) look(p string) (spot, error) {
	c.mu.Lock()
	hang := c.hangs[p]
	c.mu.Unlock()
	if hang != nil {
		<-hang
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.fake.look(p)
}

func (c *changingSource) readlink(p string) (string, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.fake.readlink(p)
}

func (c *changingSource) mounts() (map[uint64]mount, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.fake.mounts()
}

func (c *changingSource) change(do func(f *fakeSource)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	do(c.fake)
}

// watching runs a Watcher of nodefs on 8:1 and imagefs on 8:17 in a bubble of
// time, until the test function returns.
func watching(t *testing.T, test func(t *testing.T, w *Watcher, src *changingSource, mountChanged func())) {
	t.Helper()
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		src := &changingSource{
			fake:  &fakeSource{table: twoDisks, fills: true, files: map[string]spot{"/": disk(1, 1000), "/node": disk(1, 1000), "/mnt/b": disk(2, 2000)}},
			hangs: map[string]chan struct{}{},
		}
		changes := make(chan struct{})
		w := newWatcher(&Prober{src: src, now: time.Now, limit: probeLimit}, func(ctx context.Context, changed func()) error {
			for {
				select {
				case <-ctx.Done():
					return nil
				case <-changes:
					changed()
				}
			}
		})
		w.SetPaths(map[Role]string{NodeFS: "/node", ImageFS: "/mnt/b"})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- w.Run(ctx) }()
		synctest.Wait()
		test(t, w, src, func() {
			changes <- struct{}{}
			synctest.Wait()
		})
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
}

// pass lets time go by.
func pass(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

func standing(t *testing.T, w *Watcher, r Role) Standing {
	t.Helper()
	s, ok := w.View().Standing(r)
	if !ok {
		t.Fatalf("nothing is known of %s", r)
	}
	return s
}

func TestWatcherKeepsFiguresFresh(t *testing.T) {
	watching(t, func(t *testing.T, w *Watcher, _ *changingSource, _ func()) {
		first := standing(t, w, NodeFS)
		if !first.Good() || w.View().Layout.SameFilesystem(NodeFS, ImageFS) {
			t.Fatalf("standing = %+v, want a good one, apart from imagefs", first)
		}
		pass(10*watchPeriod + watchPeriod/2)
		now := standing(t, w, NodeFS)
		if age := time.Since(now.Last.Filesystem.MeasuredAt); age > watchPeriod {
			t.Errorf("figures are %v old, want at most %v", age, watchPeriod)
		}
		if now.Last.Filesystem.FreeBytes >= first.Last.Filesystem.FreeBytes {
			t.Errorf("%d bytes free, before %d: no new figures", now.Last.Filesystem.FreeBytes, first.Last.Filesystem.FreeBytes)
		}
		if moves := w.View().Moves; moves != 2 {
			t.Errorf("%d moves, want 2: figures are none", moves)
		}
	})
}

// TestWatcherMarksAHungFilesystem: the last good figures stay, with their age;
// the other role's are as fresh as ever.
func TestWatcherMarksAHungFilesystem(t *testing.T) {
	watching(t, func(t *testing.T, w *Watcher, src *changingSource, _ func()) {
		hang := make(chan struct{})
		src.change(func(*fakeSource) { src.hangs["/mnt/b"] = hang })
		good := standing(t, w, ImageFS).Last.Filesystem.MeasuredAt
		pass(time.Minute)
		s := standing(t, w, ImageFS)
		if !s.Stuck() || s.Good() || s.Last == nil || !s.Last.Filesystem.MeasuredAt.Equal(good) {
			t.Errorf("standing = %+v, want a stuck one with figures of %v", s, good)
		}
		if since := s.ProblemSince.Sub(good); since < probeLimit || since > watchPeriod+probeLimit {
			t.Errorf("a problem %v after the last good answer, want %v after the next question", since, probeLimit)
		}
		v := w.View()
		if _, ok := v.Layout.Get(ImageFS); ok || v.Layout.Kind() != LayoutUnknown {
			t.Error("the layout that deletions go by has the stuck filesystem")
		}
		if p, ok := v.LastGood.Get(ImageFS); !ok || !p.Filesystem.MeasuredAt.Equal(good) {
			t.Errorf("last good place = %+v, want the one of %v", p, good)
		}
		if age := time.Since(standing(t, w, NodeFS).Last.Filesystem.MeasuredAt); age > watchPeriod {
			t.Errorf("the other filesystem's figures are %v old", age)
		}

		src.change(func(*fakeSource) { delete(src.hangs, "/mnt/b") })
		close(hang)
		pass(2 * watchPeriod)
		if s := standing(t, w, ImageFS); !s.Good() {
			t.Errorf("after it answers again: %+v", s)
		}
	})
}

// TestWatcherNoticesMountsAtOnce: the disk is mounted after we were started, as
// after a boot in the wrong order.
func TestWatcherNoticesMountsAtOnce(t *testing.T) {
	watching(t, func(t *testing.T, w *Watcher, src *changingSource, mountChanged func()) {
		w.SetPaths(map[Role]string{NodeFS: "/node", ImageFS: "/late"})
		synctest.Wait()
		pass(watchGap)
		s := standing(t, w, ImageFS)
		if !s.Last.Missing || !w.View().Layout.SameFilesystem(NodeFS, ImageFS) {
			t.Fatalf("standing = %+v, want a missing path on the root filesystem", s)
		}
		<-w.Moved()
		began := time.Now()
		src.change(func(f *fakeSource) { f.files["/late"] = disk(8, 500) })
		mountChanged()
		<-w.Moved()
		if took := time.Since(began); took > watchGap {
			t.Errorf("noticed after %v, want at once", took)
		}
		if s := standing(t, w, ImageFS); s.Last.Missing || s.Last.Filesystem.Device != (Device{8, 49}) {
			t.Errorf("standing = %+v, want 8:49", s)
		}

		// And it vanishes again, at run time.
		src.change(func(f *fakeSource) { delete(f.files, "/late") })
		mountChanged()
		<-w.Moved()
		if s := standing(t, w, ImageFS); !s.Last.Missing || s.Last.Note == "" {
			t.Errorf("standing = %+v, want a missing path and a note", s)
		}
	})
}

// TestWatcherSeesADeviceNumberUsedAgain: another disk with the number of the one
// before is another filesystem.
func TestWatcherSeesADeviceNumberUsedAgain(t *testing.T) {
	watching(t, func(t *testing.T, w *Watcher, src *changingSource, mountChanged func()) {
		before, moves := *standing(t, w, ImageFS).Last, w.View().Moves
		src.change(func(f *fakeSource) {
			other := disk(2, 2000)
			other.space.fsid = "0123456789abcdef"
			f.files["/mnt/b"] = other
		})
		mountChanged()
		pass(watchGap)
		after := *standing(t, w, ImageFS).Last
		if before.Filesystem.Device != after.Filesystem.Device || before.Filesystem.Same(after.Filesystem) {
			t.Errorf("device %v and %v, want the same number and not the same filesystem", before.Filesystem, after.Filesystem)
		}
		if w.View().Moves != moves+1 {
			t.Errorf("%d moves, want one more than %d", w.View().Moves, moves)
		}
	})
}

func TestWatcherForgetsPaths(t *testing.T) {
	watching(t, func(t *testing.T, w *Watcher, _ *changingSource, _ func()) {
		w.SetPaths(map[Role]string{NodeFS: "/node"})
		pass(3 * watchPeriod)
		if _, ok := w.View().Standing(ImageFS); ok {
			t.Error("a role without a path has a standing")
		}
		w.SetPaths(map[Role]string{NodeFS: "relative"})
		pass(3 * watchPeriod)
		if s := standing(t, w, NodeFS); s.Good() || s.Stuck() || s.Last != nil || s.Problem == nil {
			t.Errorf("standing = %+v, want a problem and nothing of the old path", s)
		}
	})
}

// runWatcher runs a Watcher on this kernel.
func runWatcher(t *testing.T, paths map[Role]string) *Watcher {
	t.Helper()
	w, err := NewWatcher()
	if err != nil {
		t.Fatal(err)
	}
	w.SetPaths(paths)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- w.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	})
	return w
}

// until waits for a condition, for a minute at most.
func until(t *testing.T, what string, condition func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !condition() {
		select {
		case <-ctx.Done():
			t.Fatalf("waited a minute for: %s", what)
		case <-tick.C:
		}
	}
}

func TestWatcherOnThisKernel(t *testing.T) {
	t.Parallel()
	need.FUSE(t)
	dir := t.TempDir()
	node, images := mkdir(t, dir, "node"), mkdir(t, dir, "images with spaces\tand tabs")
	w := runWatcher(t, map[Role]string{NodeFS: node, ImageFS: images})
	until(t, "both roles", func() bool { return len(w.View().Layout.Places) == 2 })
	if !w.View().Layout.SameFilesystem(NodeFS, ImageFS) {
		t.Fatal("two folders of one filesystem are on two")
	}

	attach(t, images, "-t", "tmpfs", "-o", "size=16m", "none", images)
	until(t, "the new mount", func() bool { return !w.View().Layout.SameFilesystem(NodeFS, ImageFS) })
	if p, _ := w.View().Layout.Get(ImageFS); p.Filesystem.Mountpoint != images || p.Filesystem.CapacityBytes != 16<<20 {
		t.Errorf("place = %+v, want a disk of 16 MiB at %q", p, images)
	}

	hung := mkdir(t, dir, "hung")
	m, err := fuse.New(hung, fuse.Hangs)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	zeros := mkdir(t, dir, "zeros")
	z, err := fuse.New(zeros, fuse.Zeros)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := z.Close(); err != nil {
			t.Error(err)
		}
	})
	w.SetPaths(map[Role]string{NodeFS: node, ImageFS: images, ContainerFS: hung, Logs: zeros})
	until(t, "the stuck mark", func() bool { s, _ := w.View().Standing(ContainerFS); return s.Stuck() })
	before := time.Now()
	until(t, "fresh figures of the others", func() bool {
		s, _ := w.View().Standing(ImageFS)
		return s.Good() && s.Last.Filesystem.MeasuredAt.After(before)
	})
	p, ok := w.View().Layout.Get(Logs)
	if !ok || p.Reported != dir || !strings.Contains(p.Note, "without capacity") {
		t.Errorf("a filesystem of zeros: place = %+v, want %s to stand for it", p, dir)
	}
}

// TestMountTableIsReadOnChangeOnly: and a change is never missed.
func TestMountTableIsReadOnChangeOnly(t *testing.T) {
	t.Parallel()
	need.Root(t)
	src, err := newCachedSource()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := src.close(); err != nil {
			t.Error(err)
		}
	})
	read := func() map[uint64]mount {
		table, err := src.mounts()
		if err != nil {
			t.Fatal(err)
		}
		return table
	}
	// Others mount things at the same time, but not always.
	until(t, "two reads of one table", func() bool {
		one, two := read(), read()
		return reflect.ValueOf(one).Pointer() == reflect.ValueOf(two).Pointer()
	})
	for i := range 20 {
		dir := mkdir(t, t.TempDir(), "mount")
		attach(t, dir, "-t", "tmpfs", "none", dir)
		found := false
		for _, m := range read() {
			found = found || m.mountpoint == dir
		}
		if !found {
			t.Fatalf("mount %d is not in the table", i)
		}
	}
}

// TestTableAskedForAfterTheEnd: a measurement that was left behind may still ask
// when the watcher is closed, and gets an error.
func TestTableAskedForAfterTheEnd(t *testing.T) {
	t.Parallel()
	src, err := newCachedSource()
	if err != nil {
		t.Fatal(err)
	}
	began, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		once := sync.OnceFunc(func() { close(began) })
		for {
			_, err := src.mounts()
			once()
			if err != nil {
				ended <- err
				return
			}
		}
	}()
	<-began
	if err := src.close(); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		if !errors.Is(err, os.ErrClosed) {
			t.Errorf("it ended with %v, want %v", err, os.ErrClosed)
		}
	case <-time.After(time.Minute):
		t.Error("it goes on asking a watcher that is closed")
	}
}
