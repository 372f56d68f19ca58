package walk

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

// generated is a directory of so many files that are not there: the first
// directory that is read has them.
type generated struct {
	files int
	// next is the first file that was not listed yet.
	next atomic.Int64
	// looked is how many were looked at.
	looked atomic.Int64
}

func (g *generated) readDir(_ int, buffer []byte) (n int, err error) {
	for {
		i := g.next.Load()
		if i >= int64(g.files) {
			return n, nil
		}
		name := fmt.Sprintf("%08d", i)
		const size = 32 // 19 bytes, the name, zeros up to a multiple of 8
		if n+size > len(buffer) {
			return n, nil
		}
		e := buffer[n : n+size]
		clear(e)
		binary.NativeEndian.PutUint64(e, uint64(i)+1)
		binary.NativeEndian.PutUint64(e[8:], uint64(i)+1)
		binary.NativeEndian.PutUint16(e[16:], size)
		e[18] = unix.DT_REG
		copy(e[19:], name)
		n += size
		g.next.Store(i + 1)
	}
}

func (g *generated) statAt(at int, _ *byte, a *attributes) error {
	if err := statFD(at, a); err != nil { // the mount's and device's number
		return err
	}
	i := g.looked.Add(1)
	a.inode, a.blocks, a.links, a.isDir = uint64(i), 8, 1, false
	return nil
}

// TestT12_PaceOfAMillionEntries: 10⁶ entries at 50 000 a second take 20 s, by one
// worker and by two.
func TestT12_PaceOfAMillionEntries(t *testing.T) {
	t.Parallel()
	const files, perSecond = 1_000_000, 50_000
	for workers := 1; workers <= 2; workers++ {
		t.Run(fmt.Sprint("workers ", workers), func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			synctest.Test(t, func(t *testing.T) {
				g := &generated{files: files}
				began := time.Now()
				// Also in between: never much more than the budget allows.
				var watched atomic.Bool
				watch := time.AfterFunc(5*time.Second, func() {
					watched.Store(true)
					if n := g.looked.Load(); n < 5*perSecond*9/10 || n > 5*perSecond*11/10 {
						t.Errorf("%d entries after 5 s, want %d", n, 5*perSecond)
					}
				})
				defer watch.Stop()
				u, err := measure(t.Context(), dir, Options{EntriesPerSecond: perSecond, Workers: workers}, g, maxLinked)
				must(t, err)
				if u.Inodes != files+1 || u.Bytes < files*4096 || u.Partial {
					t.Errorf("usage = %+v, want %d files of 4096 bytes", u, files)
				}
				if took := time.Since(began); took < 18*time.Second || took > 22*time.Second || !watched.Load() {
					t.Errorf("took %v, want 20 s ± 10 %%", took)
				}
			})
		})
	}
}

// TestBothWorkersWork: one folder with nothing but files is divided too.
func TestBothWorkersWork(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	g := &crowd{}
	g.both = make(chan struct{})
	for i := range 5000 {
		write(t, filepath.Join(dir, fmt.Sprint(i)), 0)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	g.ctx = ctx
	u, err := measure(ctx, dir, Options{Workers: 2}, g, maxLinked)
	must(t, err)
	if u.Inodes != 5001 {
		t.Errorf("usage = %+v, want 5001 inodes", u)
	}
}

// crowd is the kernel, and lets nobody go on before two look at once.
type crowd struct {
	kernelLister
	ctx    context.Context //nolint:containedctx // a test's
	inside atomic.Int32
	calls  atomic.Int32
	both   chan struct{}
	opened atomic.Bool
}

func (c *crowd) statAt(at int, name *byte, a *attributes) error {
	// The first hundred calls pass, so that there is something to give.
	if c.calls.Add(1) > 100 {
		if c.inside.Add(1) == 2 && !c.opened.Swap(true) {
			close(c.both)
		}
		select {
		case <-c.both:
		case <-c.ctx.Done():
			return unix.ETIMEDOUT
		}
		c.inside.Add(-1)
	}
	return c.kernelLister.statAt(at, name, a)
}

// TestAPanicComesToTheCaller: also one of the second worker, so that whoever
// catches panics around a walk has them all.
func TestAPanicComesToTheCaller(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for i := range 5000 {
		write(t, filepath.Join(dir, fmt.Sprint(i)), 0)
	}
	defer func() {
		if r := recover(); r != "broken" {
			t.Errorf("recovered %v, want the panic", r)
		}
	}()
	_, err := measure(t.Context(), dir, Options{Workers: 2}, &breaking{}, maxLinked)
	t.Errorf("no panic, error %v", err)
}

// breaking breaks in all calls but those of the first caller.
type breaking struct {
	kernelLister
	first atomic.Pointer[attributes]
}

func (b *breaking) statAt(at int, name *byte, a *attributes) error {
	b.first.CompareAndSwap(nil, a)
	if b.first.Load() != a {
		panic("broken")
	}
	return b.kernelLister.statAt(at, name, a)
}

// TestMoreLinksThanCanBeRemembered: beyond the bound each name counts its share.
func TestMoreLinksThanCanBeRemembered(t *testing.T) {
	t.Parallel()
	dir, outside := t.TempDir(), t.TempDir()
	for i := range 50 {
		path := filepath.Join(dir, fmt.Sprint("file", i))
		write(t, path, 10_000)
		for j := range 6 {
			must(t, os.Link(path, filepath.Join(dir, fmt.Sprint("link", i, "-", j))))
		}
	}
	settle(t, dir)
	whole := measureTree(t, dir)
	if whole.Inodes != 51 || whole.Apportioned != 0 {
		t.Fatalf("usage = %+v, want 51 inodes", whole)
	}
	got, err := measure(t.Context(), dir, Options{}, kernelLister{}, 10)
	must(t, err)
	if got.Bytes != whole.Bytes || got.Inodes != whole.Inodes || got.Apportioned != 40*7 || got.Partial {
		t.Errorf("usage = %+v, want the same bytes and inodes as %+v and 280 names apportioned", got, whole)
	}
	// With names outside it is a lower bound.
	for i := range 50 {
		must(t, os.Link(filepath.Join(dir, fmt.Sprint("file", i)), filepath.Join(outside, fmt.Sprint(i))))
	}
	got, err = measure(t.Context(), dir, Options{}, kernelLister{}, 10)
	must(t, err)
	if got.Inodes != 1+10+35 || got.Bytes >= whole.Bytes {
		t.Errorf("usage = %+v, want 46 inodes: of 40 files seven eighths", got)
	}
}

func TestHalf(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		names := rapid.SliceOfN(rapid.StringMatching(`[a-z]{1,20}`), 1, 50).Draw(t, "names")
		keepOne := rapid.Bool().Draw(t, "keep one")
		all := strings.Join(names, "\x00") + "\x00"
		from, ok := half([]byte(all), keepOne)
		switch {
		case len(names) == 1 && keepOne:
			if ok {
				t.Fatal("gave away the only one")
			}
			return
		case !ok:
			t.Fatal("gave nothing")
		case from >= len(all) || from > 0 && all[from-1] != 0 || from == 0 && len(names) > 1:
			t.Fatalf("gives %q of %q", all[from:], all)
		}
	})
}
