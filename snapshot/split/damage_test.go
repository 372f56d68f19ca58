package split

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	bolt "go.etcd.io/bbolt"

	"github.com/cleave-cri/cleave/snapshot/split/boltfile"
)

// TestDamagedDatabase: whoever has a database with a damaged page gets told so by
// the start and by a check, which neither hang nor end the process, and finds all
// layers where they were.
func TestDamagedDatabase(t *testing.T) {
	t.Parallel()
	pageBytes := int64(os.Getpagesize())
	zero := func(first, last int64) func(*os.File) error {
		return func(f *os.File) error {
			_, err := f.WriteAt(make([]byte, (last-first+1)*pageBytes), first*pageBytes)
			return err
		}
	}
	for _, tc := range []struct {
		name   string
		damage func(*os.File) error
	}{
		{"pages of zeros", zero(2, 11)},
		{"cut to three pages", func(f *os.File) error { return f.Truncate(3 * pageBytes) }},
		{"cut to one page and a half", func(f *os.File) error { return f.Truncate(pageBytes * 3 / 2) }},
		{"both first pages of zeros", zero(0, 1)},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			o := folders(t)
			s := initialised(t, o)
			_, layer := addLayer(t, s, 1, "")
			for i := range 40 { // more than fits on few pages
				addContainer(t, s, i+2, layerName(1))
			}
			settle(t, s)
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			if err := boltfile.Verify(o.Database); err != nil {
				t.Fatalf("before the damage: %v", err)
			}
			f, err := os.OpenFile(o.Database, os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(tc.damage(f), f.Close()); err != nil {
				t.Fatal(err)
			}
			before, err := os.ReadFile(o.Database)
			if err != nil {
				t.Fatal(err)
			}
			told := func(what string, err error) {
				t.Helper()
				if !errors.Is(err, boltfile.ErrDamaged) {
					t.Fatalf("%s: %v", what, err)
				}
				for _, part := range []string{o.Database, "is damaged", "stop containerd", "backup"} {
					if !strings.Contains(err.Error(), part) {
						t.Errorf("%s does not say %q: %v", what, part, err)
					}
				}
			}
			_, err = Check(t.Context(), o)
			told("check", err)
			_, err = Repair(t.Context(), o, nil)
			told("repair", err)
			_, err = Open(t.Context(), o)
			told("open", err)
			told("unpin", Unpin(t.Context(), o))
			lock, err := boltfile.TakeLock(o.Database)
			if err != nil {
				t.Fatalf("the lock is still held: %v", err)
			}
			if err := lock.Close(); err != nil {
				t.Error(err)
			}
			if after, err := os.ReadFile(o.Database); err != nil || string(after) != string(before) {
				t.Errorf("the database was changed: %v", err)
			}
			if !exists(layer) {
				t.Error("a layer was deleted")
			}
		})
	}
}

// TestPanicWhileReading: a panic while the database is read leaves it so that it
// can be closed.
func TestPanicWhileReading(t *testing.T) {
	t.Parallel()
	o := folders(t)
	s := initialised(t, o)
	func() {
		defer func() {
			if recover() == nil {
				t.Error("the panic was swallowed")
			}
		}()
		_ = s.db.read(t.Context(), func(context.Context, *bolt.Bucket) error { panic("as bbolt does on a page that makes no sense") }) //nolint:errcheck // it panics
	}()
	closed := make(chan error, 1)
	go func() { closed <- s.Close() }()
	select {
	case err := <-closed:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(60 * time.Second):
		t.Fatal("the database is not closed: its transaction is still open")
	}
}
