package agent

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// ErrLocked says that another process works on the state folder.
var ErrLocked = errors.New("another cleave uses this state folder")

const lockName = "lock"

// lockState makes the state folder if it is missing and takes its lock, which
// lasts until the file is closed, in this process and in those that inherited it.
func lockState(dir string) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the state folder: %w", err)
	}
	path := filepath.Join(dir, lockName)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|syscall.O_CLOEXEC, 0o600)
	if errors.Is(err, syscall.EROFS) || errors.Is(err, syscall.ENOSPC) {
		// A lock that is there from before does as well.
		if old, oldErr := os.OpenFile(path, os.O_RDONLY|syscall.O_CLOEXEC, 0); oldErr == nil {
			f, err = old, nil
		}
	}
	if err != nil {
		return nil, fmt.Errorf("open the lock of the state folder: %w: choose another folder (stateDir), or run `cleave serve --passthrough`, which needs none", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		owner := lockOwner(path)
		if errors.Is(err, unix.EWOULDBLOCK) {
			err = fmt.Errorf("%w: stop process %s first, or choose another folder (stateDir)", ErrLocked, owner)
		}
		return nil, errors.Join(fmt.Errorf("lock the state folder %s: %w", dir, err), f.Close())
	}
	writeOwner(f)
	return f, nil
}

// isLockOf reports whether an open file is the lock of a state folder.
func isLockOf(f *os.File, dir string) bool {
	own, err := f.Stat()
	if err != nil {
		return false
	}
	there, err := os.Stat(filepath.Join(dir, lockName))
	return err == nil && os.SameFile(own, there)
}

// writeOwner notes this process in the lock file, for messages only: on a full
// or read-only disk the note is missing or old, and cleave serves all the same.
// It writes before it cuts, so that a block once had is never given up.
func writeOwner(f *os.File) {
	note := strconv.Itoa(os.Getpid()) + "\n"
	if _, err := f.WriteAt([]byte(note), 0); err != nil {
		return
	}
	_ = f.Truncate(int64(len(note))) //nolint:errcheck // for messages only
}

func lockOwner(path string) string {
	pid, err := os.ReadFile(path)
	if err != nil || len(pid) == 0 {
		return "(unknown)"
	}
	first, _, _ := strings.Cut(string(pid), "\n")
	return first
}
