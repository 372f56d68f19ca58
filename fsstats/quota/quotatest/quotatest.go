// Package quotatest is the contract of quota.Ledger as tests, and a ledger in memory that passes them, for tests of those
// who use one. Only tests may import it.
package quotatest

import (
	"errors"
	"math"
	"slices"
	"sync"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/cleave-cri/cleave/fsstats/quota"
)

// Bench is a ledger and somebody who writes on its filesystem.
type Bench struct {
	quota.Ledger
	// Write makes one more inode of a project with so many bytes in it and returns what the writer was told. Bytes are a
	// multiple of 64 KiB.
	Write func(t testing.TB, id uint32, bytes uint64) error
	// Remove removes everything of a project.
	Remove func(t testing.TB, id uint32)
	// SlackBytes is how much more than the bytes written the filesystem may count: its own blocks per inode.
	SlackBytes uint64
}

// Ledger runs the contract. open gives a bench on which projects 1000 to 1999 are unused; it is used by one test at a time.
func Ledger(t *testing.T, open func(t *testing.T) Bench) {
	t.Helper()
	const kib, mib = 1 << 10, 1 << 20
	project := func(t *testing.T, b Bench, id uint32) quota.Project {
		t.Helper()
		p, err := b.Project(id)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	limit := func(t *testing.T, b Bench, id uint32, l quota.Limit) {
		t.Helper()
		if err := b.SetLimit(id, l); err != nil {
			t.Fatal(err)
		}
	}
	known := func(t *testing.T, b Bench) []uint32 {
		t.Helper()
		var ids []uint32
		for from := uint32(1000); ; {
			p, found, err := b.NextProject(from)
			if err != nil {
				t.Fatal(err)
			}
			if !found || p.ID > 1999 {
				return ids
			}
			if p != project(t, b, p.ID) {
				t.Errorf("next says %v, project says %v", p, project(t, b, p.ID))
			}
			ids, from = append(ids, p.ID), p.ID+1
		}
	}
	held := func(err error) bool {
		return errors.Is(err, syscall.EDQUOT) || errors.Is(err, syscall.ENOSPC)
	}

	t.Run("an unused project is empty", func(t *testing.T) {
		b := open(t)
		if diff := cmp.Diff(quota.Project{ID: 1500}, project(t, b, 1500)); diff != "" {
			t.Error(diff)
		}
		if ids := known(t, b); ids != nil {
			t.Errorf("projects %v are known", ids)
		}
	})
	t.Run("usage is counted", func(t *testing.T) {
		b := open(t)
		for range 2 {
			if err := b.Write(t, 1001, mib); err != nil {
				t.Fatal(err)
			}
		}
		u := project(t, b, 1001).Usage
		if u.Bytes < 2*mib || u.Bytes > 2*mib+b.SlackBytes || u.Inodes < 2 {
			t.Errorf("2 files of 1 MiB count as %+v", u)
		}
		b.Remove(t, 1001)
		if p := project(t, b, 1001); p != (quota.Project{ID: 1001}) {
			t.Errorf("when all is removed there is %+v", p)
		}
	})
	t.Run("projects are found in order", func(t *testing.T) {
		b := open(t)
		for _, id := range []uint32{1700, 1002, 1300} {
			if err := b.Write(t, id, 64*kib); err != nil {
				t.Fatal(err)
			}
		}
		if got, want := known(t, b), []uint32{1002, 1300, 1700}; !slices.Equal(got, want) {
			t.Errorf("got %v, want %v", got, want)
		}
		if _, found, err := b.NextProject(math.MaxUint32 - 1); err != nil || found {
			t.Errorf("beyond the last project: found %v, %v", found, err)
		}
	})
	t.Run("a limit alone makes a project known", func(t *testing.T) {
		b := open(t)
		limit(t, b, 1003, quota.Limit{Bytes: 8 * mib, Inodes: 10})
		if got := project(t, b, 1003); got != (quota.Project{ID: 1003, Limit: quota.Limit{Bytes: 8 * mib, Inodes: 10}}) {
			t.Errorf("got %+v", got)
		}
		if got := known(t, b); !slices.Equal(got, []uint32{1003}) {
			t.Errorf("known are %v", got)
		}
		limit(t, b, 1003, quota.Limit{})
		if got := known(t, b); got != nil {
			t.Errorf("with the limit gone %v are known", got)
		}
	})
	t.Run("a limit is rounded up, never to none", func(t *testing.T) {
		b := open(t)
		for _, bytes := range []uint64{1, 64*kib - 1, mib + 1} {
			limit(t, b, 1004, quota.Limit{Bytes: bytes})
			if got := project(t, b, 1004).Limit.Bytes; got < bytes || got > bytes+64*kib {
				t.Errorf("a limit of %d became %d", bytes, got)
			}
		}
		limit(t, b, 1004, quota.Limit{})
	})
	t.Run("a limit on project 0 is refused", func(t *testing.T) {
		b := open(t)
		if err := b.SetLimit(0, quota.Limit{Bytes: mib}); !errors.Is(err, quota.ErrProjectZero) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("bytes hold a writer back, and nobody else", func(t *testing.T) {
		b := open(t)
		limit(t, b, 1005, quota.Limit{Bytes: 8 * mib})
		if err := b.Write(t, 1005, 4*mib); err != nil {
			t.Fatalf("below the limit: %v", err)
		}
		if err := b.Write(t, 1005, 64*mib); !held(err) {
			t.Errorf("64 MiB into 8 MiB gave %v", err)
		}
		if u := project(t, b, 1005).Usage; u.Bytes > 8*mib {
			t.Errorf("it takes %d bytes", u.Bytes)
		}
		if err := b.Write(t, 1006, 12*mib); err != nil {
			t.Errorf("another project: %v", err)
		}
		limit(t, b, 1005, quota.Limit{})
		if err := b.Write(t, 1005, 12*mib); err != nil {
			t.Errorf("with the limit gone: %v", err)
		}
	})
	t.Run("inodes hold a writer back", func(t *testing.T) {
		b := open(t)
		if err := b.Write(t, 1007, 64*kib); err != nil {
			t.Fatal(err)
		}
		n := project(t, b, 1007).Usage.Inodes
		limit(t, b, 1007, quota.Limit{Inodes: n + 1})
		if err := b.Write(t, 1007, 64*kib); err != nil {
			t.Fatalf("the last one allowed: %v", err)
		}
		if err := b.Write(t, 1007, 64*kib); !held(err) {
			t.Errorf("one more than allowed gave %v", err)
		}
	})
	t.Run("a limit below the usage stops, and takes nothing", func(t *testing.T) {
		b := open(t)
		if err := b.Write(t, 1008, 4*mib); err != nil {
			t.Fatal(err)
		}
		before := project(t, b, 1008).Usage
		limit(t, b, 1008, quota.Limit{Bytes: mib})
		if err := b.Write(t, 1008, mib); !held(err) {
			t.Errorf("got %v", err)
		}
		if after := project(t, b, 1008).Usage; after.Bytes < before.Bytes {
			t.Errorf("%+v became %+v", before, after)
		}
	})
}

// Fake is a ledger in memory. Its methods may be called from several goroutines.
type Fake struct {
	mu       sync.Mutex
	projects map[uint32]quota.Project // guarded by mu
	err      error                    // guarded by mu
}

var _ quota.Ledger = (*Fake)(nil)

// NewFake makes an empty ledger.
func NewFake() *Fake { return &Fake{projects: map[uint32]quota.Project{}} }

// Fail makes all methods return an error from now on; nil ends that.
func (f *Fake) Fail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.err = err
}

// Project reads an account.
func (f *Fake) Project(id uint32) (quota.Project, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	p := f.projects[id]
	p.ID = id
	return p, f.err
}

// NextProject looks for an account.
func (f *Fake) NextProject(from uint32) (next quota.Project, found bool, _ error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for id, p := range f.projects {
		p.ID = id
		empty := p.Usage == quota.Usage{} && p.Limit == quota.Limit{}
		if id >= from && !empty && (!found || id < next.ID) {
			next, found = p, true
		}
	}
	return next, found, f.err
}

// SetLimit sets limits, rounded up to 1 KiB.
func (f *Fake) SetLimit(id uint32, l quota.Limit) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err != nil {
		return f.err
	}
	if id == 0 {
		return quota.ErrProjectZero
	}
	if rest := l.Bytes % 1024; rest != 0 {
		l.Bytes += 1024 - rest
	}
	p := f.projects[id]
	p.Limit = l
	f.projects[id] = p
	return nil
}

// Write makes one more inode of so many bytes, as far as the limits allow.
func (f *Fake) Write(id uint32, bytes uint64) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	p := f.projects[id]
	if p.Limit.Inodes != 0 && p.Usage.Inodes+1 > p.Limit.Inodes || p.Limit.Bytes != 0 && p.Usage.Bytes+bytes > p.Limit.Bytes {
		return syscall.EDQUOT
	}
	p.Usage.Bytes += bytes
	p.Usage.Inodes++
	f.projects[id] = p
	return nil
}

// Remove removes everything of a project but its limit.
func (f *Fake) Remove(id uint32) {
	f.mu.Lock()
	defer f.mu.Unlock()
	p := f.projects[id]
	p.Usage = quota.Usage{}
	f.projects[id] = p
}
