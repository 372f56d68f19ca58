package boltfile

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	bolt "go.etcd.io/bbolt"
)

// someDatabase has branches, long values, buckets in buckets, small ones too, and
// free pages.
func someDatabase(t testing.TB) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "db")
	db, err := bolt.Open(path, 0o600, &bolt.Options{NoSync: true, PageSize: 1 << 10})
	if err != nil {
		t.Fatal(err)
	}
	for round := range 3 {
		err = errors.Join(err, db.Update(func(tx *bolt.Tx) error {
			outer, err := tx.CreateBucketIfNotExists([]byte("outer"))
			if err != nil {
				return err
			}
			for i := range 60 {
				if err := outer.Put(fmt.Appendf(nil, "key %d", i), bytes.Repeat([]byte{byte(i)}, 20*(i+round))); err != nil {
					return err
				}
			}
			inner, err := outer.CreateBucketIfNotExists([]byte("inner"))
			if err != nil {
				return err
			}
			_, err = inner.CreateBucketIfNotExists([]byte("empty"))
			return errors.Join(err, inner.Put([]byte("k"), []byte("v")), outer.Delete(fmt.Appendf(nil, "key %d", round)))
		}))
	}
	if err := errors.Join(err, db.Close()); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestVerifyAgainstBbolt damages each page in turn. What passes must be a database
// that bbolt finds no fault with either.
func TestVerifyAgainstBbolt(t *testing.T) {
	t.Parallel()
	path := someDatabase(t)
	if err := Verify(path); err != nil {
		t.Fatalf("a whole one: %v", err)
	}
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	m, ok := readMeta(bytes.NewReader(whole), int64(len(whole)))
	if !ok || m.pageBytes != 1<<10 || m.pages < 20 {
		t.Fatalf("the first pages: %+v, %v", m, ok)
	}
	found := 0
	for page := int64(2); page < int64(m.pages); page++ {
		for _, offset := range []int64{0, 8, 10, 12, 16, 20, 24} { // id, kind, count, overflow, the first element
			content := bytes.Clone(whole)
			content[page<<10+offset] ^= 0x5a
			err := verify(bytes.NewReader(content), int64(len(content)))
			if err == nil {
				bboltAgrees(t, page, offset, content)
				continue
			}
			if !errors.Is(err, ErrDamaged) {
				t.Errorf("page %d, byte %d: %v", page, offset, err)
			}
			found++
		}
	}
	if found < 50 {
		t.Errorf("%d damages were found", found)
	}
	for size := range int64(m.pages) {
		if err := verify(bytes.NewReader(whole[:size<<10]), size<<10); !errors.Is(err, ErrDamaged) {
			t.Errorf("cut to %d pages: %v", size, err)
		}
	}
}

func bboltAgrees(t *testing.T, page, offset int64, content []byte) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "db")
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	db, err := bolt.Open(path, 0o600, &bolt.Options{ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	err = db.View(func(tx *bolt.Tx) error {
		for err := range tx.Check() {
			t.Errorf("page %d, byte %d: passed, and bbolt says: %v", page, offset, err)
		}
		return nil
	})
	if err := errors.Join(err, db.Close()); err != nil {
		t.Error(err)
	}
}

// TestVerifyWhileWritten: a database that somebody writes to would look damaged.
func TestVerifyWhileWritten(t *testing.T) {
	t.Parallel()
	path := someDatabase(t)
	db, err := bolt.Open(path, 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := Verify(path); !errors.Is(err, ErrLocked) {
		t.Errorf("while it is open: %v", err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	if err := Verify(path); err != nil {
		t.Errorf("when it is closed: %v", err)
	}
}

func FuzzVerify(f *testing.F) {
	whole, err := os.ReadFile(someDatabase(f))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(uint32(2<<10), []byte{0, 0, 0, 0})
	f.Add(uint32(3<<10+10), []byte{0xff, 0xff})
	f.Fuzz(func(t *testing.T, at uint32, with []byte) {
		content := bytes.Clone(whole)
		copy(content[int(at)%len(content):], with)
		if err := verify(bytes.NewReader(content), int64(len(content))); err != nil && !errors.Is(err, ErrDamaged) {
			t.Error(err)
		}
	})
}
