package slotfile_test

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/janitor"
	"github.com/cleave-cri/cleave/lab/need"
	"github.com/cleave-cri/cleave/reclaim/slotfile"
)

func TestMain(m *testing.M) {
	janitor.Main()
	os.Exit(m.Run())
}

// A value is replaced on a disk that has not a byte left.
func TestFullDisks(t *testing.T) {
	t.Parallel()
	need.Loop(t)
	for _, kind := range disk.Filesystems() {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			d, err := disk.Make(t.Context(), need.Lab(t).Dir(), disk.Spec{Name: "full", SizeBytes: 400 << 20, FS: kind})
			if err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(d.Path(), "state")
			f, err := slotfile.Open(path, 1<<20)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close() //nolint:errcheck // the disk goes
			fill(t, filepath.Join(d.Path(), "fill"))
			value := make([]byte, f.MaxBytes())
			for i := range 10 {
				value[0] = byte(i)
				if err := f.Save(value, 1); err != nil {
					t.Fatalf("save %d on a full disk: %v", i, err)
				}
			}
			again, err := slotfile.Open(path, 1<<20)
			if err != nil {
				t.Fatal(err)
			}
			defer again.Close() //nolint:errcheck // the disk goes
			if got, _, err := again.Load(); err != nil || got[0] != 9 {
				t.Errorf("read: %v", err)
			}
		})
	}
}

// fill writes until there is no space left.
func fill(t *testing.T, path string) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close() //nolint:errcheck // it only takes space
	chunk := make([]byte, 1<<20)
	for len(chunk) > 0 {
		_, err := f.Write(chunk)
		switch {
		case errors.Is(err, syscall.ENOSPC):
			chunk = chunk[:len(chunk)/2]
		case err != nil:
			t.Fatal(err)
		}
		if errors.Is(f.Sync(), syscall.ENOSPC) {
			chunk = chunk[:len(chunk)/2]
		}
	}
}
