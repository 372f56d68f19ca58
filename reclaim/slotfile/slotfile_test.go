package slotfile

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

const slot = 8192

func open(t *testing.T, path string) *File {
	t.Helper()
	f, err := Open(path, slot)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() }) //nolint:errcheck // a temporary file's
	return f
}

func load(t *testing.T, path string) (string, uint32) {
	t.Helper()
	f := open(t, path)
	value, version, err := f.Load()
	if err != nil {
		t.Fatal(err)
	}
	return string(value), version
}

func TestValuesOutlastTheProcess(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "state")
	if v, _ := load(t, path); v != "" {
		t.Errorf("a new file has %q", v)
	}
	for i := range 5 {
		f := open(t, path)
		if _, _, err := f.Load(); err != nil {
			t.Fatal(err)
		}
		for j := range 3 {
			if err := f.Save(fmt.Appendf(nil, "value %d.%d", i, j), uint32(i)); err != nil {
				t.Fatal(err)
			}
		}
		if v, version := load(t, path); v != fmt.Sprintf("value %d.2", i) || version != uint32(i) {
			t.Errorf("read %q, version %d", v, version)
		}
	}
	f := open(t, path)
	if _, _, err := f.Load(); err != nil {
		t.Fatal(err)
	}
	if err := f.Save(make([]byte, f.MaxBytes()+1), 1); !errors.Is(err, ErrTooLarge) {
		t.Errorf("too large: %v", err)
	}
	if err := f.Save(bytes.Repeat([]byte("x"), f.MaxBytes()), 1); err != nil {
		t.Error(err)
	}
	if v, _ := load(t, path); len(v) != f.MaxBytes() {
		t.Errorf("read %d bytes", len(v))
	}
}

// A write that is broken off after any number of bytes leaves the value before.
func TestTornWrites(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "state")
	f := open(t, path)
	for _, v := range []string{"first", "second"} {
		if err := f.Save([]byte(v), 1); err != nil {
			t.Fatal(err)
		}
	}
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Save([]byte("third"), 1); err != nil {
		t.Fatal(err)
	}
	after, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for n := 0; n <= headBytes+len("second"); n++ {
		torn := append(bytes.Clone(after[:n]), before[n:]...)
		other := filepath.Join(dir, fmt.Sprint(n))
		if err := os.WriteFile(other, torn, 0o600); err != nil {
			t.Fatal(err)
		}
		if v, _ := load(t, other); v != "second" && v != "third" {
			t.Errorf("torn after %d bytes: %q", n, v)
		}
	}
}

func TestDamagedFiles(t *testing.T) {
	t.Parallel()
	for name, content := range map[string][]byte{
		"rubbish":             bytes.Repeat([]byte("rubbish!"), 2*slot/8),
		"a length beyond all": append([]byte(mark+"\x01\x00\x00\x00\xff\xff\xff\xff"), make([]byte, 2*slot-16)...),
		"one bit":             append([]byte{0, 0, 0, 1}, make([]byte, 2*slot-4)...),
	} {
		path := filepath.Join(t.TempDir(), "state")
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		f := open(t, path)
		if _, _, err := f.Load(); !errors.Is(err, ErrDamaged) {
			t.Errorf("%s: %v", name, err)
		}
		if err := f.Save([]byte("new"), 1); err != nil {
			t.Fatal(err)
		}
		if v, _ := load(t, path); v != "new" {
			t.Errorf("%s, and then: %q", name, v)
		}
	}
	path := filepath.Join(t.TempDir(), "state")
	if err := os.WriteFile(path, []byte("of another size"), 0o600); err != nil {
		t.Fatal(err)
	}
	if v, _ := load(t, path); v != "" {
		t.Errorf("of another size: %q", v)
	}
	if err := os.Symlink(path, path+".link"); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(path+".link", slot); !errors.Is(err, syscall.ELOOP) {
		t.Errorf("a symlink: %v", err)
	}
}
