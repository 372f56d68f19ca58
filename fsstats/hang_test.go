package fsstats

import (
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// hangingSource is a kernel in which one path hangs until it is let go.
type hangingSource struct {
	*fakeSource
	path string
	let  chan struct{}
	// looks counts the questions about the path.
	looks atomic.Int32
}

func (h *hangingSource) look(p string) (spot, error) {
	if p == h.path || h.path != "" && strings.HasPrefix(p, h.path+"/") {
		h.looks.Add(1)
		<-h.let
	}
	return h.fakeSource.look(p)
}

// TestAPathThatHangsHoldsUpNothingElse: the server behind one role is gone; all
// other roles are found, the hanging one is asked about once, and when it
// answers again it is back.
func TestAPathThatHangsHoldsUpNothingElse(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		src := &hangingSource{
			fakeSource: &fakeSource{table: twoDisks, files: map[string]spot{"/": disk(1, 1000), "/mnt/b": disk(2, 2000), "/srv/images": disk(3, 1000)}},
			path:       "/mnt/b",
			let:        make(chan struct{}),
		}
		p := &Prober{src: src, now: time.Now, limit: probeLimit}
		paths := map[Role]string{NodeFS: "/", ImageFS: "/mnt/b", ContainerFS: "/srv/images"}

		began := time.Now()
		layout, err := p.Resolve(paths)
		if took := time.Since(began); took != probeLimit {
			t.Errorf("took %s, want %s", took, probeLimit)
		}
		if !errors.Is(err, ErrNoAnswer) {
			t.Errorf("error %v, want ErrNoAnswer", err)
		}
		if _, ok := layout.Get(ImageFS); ok {
			t.Error("the hanging role has a place")
		}
		for _, r := range []Role{NodeFS, ContainerFS} {
			if _, ok := layout.Get(r); !ok {
				t.Errorf("%s has no place", r)
			}
		}

		began = time.Now()
		for range 10 {
			if _, err := p.FilesystemOf("/mnt/b"); !errors.Is(err, ErrNoAnswer) {
				t.Errorf("error %v, want ErrNoAnswer", err)
			}
		}
		if took := time.Since(began); took != 0 || src.looks.Load() != 1 {
			t.Errorf("asked again: %s, %d questions, want none more", took, src.looks.Load())
		}

		close(src.let)
		synctest.Wait()
		layout, err = p.Resolve(paths)
		if _, ok := layout.Get(ImageFS); !ok || err != nil {
			t.Errorf("after the path answers again: place %t, error %v", ok, err)
		}
	})
}

// TestThereAreNoThreadsWithoutEnd: of very many paths that hang only so many are
// asked about, and when they answer all is as before.
func TestThereAreNoThreadsWithoutEnd(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		src := &hangingSource{
			fakeSource: &fakeSource{table: twoDisks, files: map[string]spot{"/": disk(1, 1000), "/mnt/b": disk(2, 2000)}},
			path:       "/mnt/b",
			let:        make(chan struct{}),
		}
		p := &Prober{src: src, now: time.Now, limit: probeLimit}
		for i := range mostHanging + 20 {
			if _, err := p.FilesystemOf(fmt.Sprintf("/mnt/b/%d", i)); !errors.Is(err, ErrNoAnswer) {
				t.Fatalf("path %d: error %v, want ErrNoAnswer", i, err)
			}
		}
		if n := src.looks.Load(); n != mostHanging {
			t.Errorf("%d questions hang, want %d", n, mostHanging)
		}
		close(src.let)
		synctest.Wait()
		if _, err := p.FilesystemOf("/mnt/b"); err != nil {
			t.Errorf("after all answered: %v", err)
		}
	})
}
