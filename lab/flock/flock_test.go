package flock

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
)

func TestTakeWaitsForTheHolderAndSaysSoOnce(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "lock")
	first, err := Take(t.Context(), path, func() { t.Error("waits for a lock that nobody holds") })
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	told := 0
	if _, err := Take(ctx, path, func() { told++; cancel() }); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want the context's", err)
	}
	if told != 1 {
		t.Errorf("told %d times, want once", told)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	second, err := Take(t.Context(), path, nil)
	if err != nil {
		t.Fatalf("after the holder has gone: %v", err)
	}
	if err := second.Close(); err != nil {
		t.Error(err)
	}
}
