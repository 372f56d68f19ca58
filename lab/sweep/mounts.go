package sweep

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

type mount struct {
	path   string
	source string
}

// Mounts unmounts what is mounted in the scope's folder, and filesystems on the scope's loop devices wherever they are
// mounted. One that is busy is detached: its processes have been ended by then, so nothing keeps it for long.
func Mounts(ctx context.Context, s Scope) error {
	return until(ctx, func() (string, error) {
		loops, err := loopsOf(s)
		if err != nil {
			return "", err
		}
		mounts, err := mountsOf(s, loops)
		if err != nil || len(mounts) == 0 {
			return "", err
		}
		// The kernel lists mounts in the order they were made, so the last one is never under another.
		for _, m := range slices.Backward(mounts) {
			err := syscall.Unmount(m.path, unix.UMOUNT_NOFOLLOW)
			if errors.Is(err, syscall.EBUSY) {
				err = syscall.Unmount(m.path, unix.UMOUNT_NOFOLLOW|unix.MNT_DETACH)
			}
			if err != nil && !errors.Is(err, syscall.EINVAL) && !errors.Is(err, syscall.ENOENT) {
				return "", fmt.Errorf("unmount %s: %w", m.path, err)
			}
		}
		return fmt.Sprintf("unmount %d filesystems of %s, the last is %s", len(mounts), s.Dir, mounts[len(mounts)-1].path), nil
	})
}

func mountsOf(s Scope, loops []string) ([]mount, error) {
	infos, err := mountinfo.GetMounts(nil)
	if err != nil {
		return nil, fmt.Errorf("list mounts: %w", err)
	}
	var mounts []mount
	for _, i := range infos {
		if s.holds(i.Mountpoint) || slices.Contains(loops, i.Source) {
			mounts = append(mounts, mount{path: i.Mountpoint, source: i.Source})
		}
	}
	return mounts, nil
}

// Loops frees the loop devices whose backing file lies in the scope's folder.
func Loops(ctx context.Context, s Scope) error {
	return until(ctx, func() (string, error) {
		loops, err := loopsOf(s)
		if err != nil || len(loops) == 0 {
			return "", err
		}
		for _, device := range loops {
			if err := freeLoop(device); err != nil {
				return "", err
			}
		}
		return fmt.Sprintf("free %s", strings.Join(loops, ", ")), nil
	})
}

// freeLoop asks the kernel to free a device. On one still in use this succeeds and takes effect with the last user.
func freeLoop(device string) (err error) {
	file, err := os.Open(device)
	if err != nil {
		return fmt.Errorf("open loop device: %w", err)
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	if err := unix.IoctlSetInt(int(file.Fd()), unix.LOOP_CLR_FD, 0); err != nil && !errors.Is(err, unix.ENXIO) && !errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("free loop device %s: %w", device, err)
	}
	return nil
}

func loopsOf(s Scope) ([]string, error) {
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return nil, fmt.Errorf("list loop devices: %w", err)
	}
	var loops []string
	for _, f := range files {
		backing, err := os.ReadFile(f)
		if err != nil {
			continue // freed since the list was made
		}
		if s.holds(strings.TrimSuffix(strings.TrimSpace(string(backing)), " (deleted)")) {
			loops = append(loops, "/dev/"+filepath.Base(filepath.Dir(filepath.Dir(f))))
		}
	}
	return loops, nil
}
