package flock

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

func TestTakeWaitsForTheHolderAndSaysSoOnce(t *testing.T) {
	t.Parallel()
	waitsForTheHolder(t, filepath.Join(t.TempDir(), "lock"), Take)
	waitsForTheHolder(t, t.TempDir(), TakeFolder)
	if _, err := TakeFolder(t.Context(), filepath.Join(t.TempDir(), "missing"), nil); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a folder that is not there: %v", err)
	}
}

func waitsForTheHolder(t *testing.T, path string, take func(ctx context.Context, path string, waiting func()) (*os.File, error)) {
	t.Helper()
	first, err := take(t.Context(), path, func() { t.Error("waits for a lock that nobody holds") })
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	told := 0
	if _, err := take(ctx, path, func() { told++; cancel() }); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want the context's", err)
	}
	if told != 1 {
		t.Errorf("told %d times, want once", told)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	second, err := take(t.Context(), path, nil)
	if err != nil {
		t.Fatalf("after the holder has gone: %v", err)
	}
	if err := second.Close(); err != nil {
		t.Error(err)
	}
}
