// Package flock takes locks between processes. It imports nothing of ours.
package flock

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"
)

// retryEvery is how often a lock that is held is tried again.
const retryEvery = 50 * time.Millisecond

// Take makes the file if it is missing and takes an exclusive lock on it, which the kernel drops with the last process
// that holds the file open, so it is never stale. While another holds it Take waits until ctx ends; waiting, if not
// nil, is called once before that.
func Take(ctx context.Context, path string, waiting func()) (*os.File, error) {
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open lock: %w", err)
	}
	return take(ctx, file, waiting)
}

// TakeFolder is Take for a folder, which has to be there: whoever sees the same one takes turns.
func TakeFolder(ctx context.Context, path string, waiting func()) (*os.File, error) {
	folder, err := os.OpenFile(path, os.O_RDONLY|syscall.O_DIRECTORY, 0)
	if err != nil {
		return nil, fmt.Errorf("open folder to lock: %w", err)
	}
	return take(ctx, folder, waiting)
}

func take(ctx context.Context, file *os.File, waiting func()) (*os.File, error) {
	tick := time.NewTicker(retryEvery)
	defer tick.Stop()
	for told := false; ; told = true {
		err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return file, nil
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, errors.Join(fmt.Errorf("lock %s: %w", file.Name(), err), file.Close())
		}
		if !told && waiting != nil {
			waiting()
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(fmt.Errorf("wait for the lock %s: %w", file.Name(), ctx.Err()), file.Close())
		case <-tick.C:
		}
	}
}
