// Package remains tells when folders that somebody else deletes are gone, also where they are renamed first, and when the filesystem must
// count their space as available. It deletes nothing.
package remains

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// mostFolders bounds one look at a folder: with more folders in it and no file it counts as not empty.
const mostFolders = 1000

// ErrUnknown says that it can't be told of these folders.
var ErrUnknown = errors.New("it can't be told when they are gone")

// settles is how long statfs may take to count the space of a file that is deleted, by the filesystem's type, generously. ext4 counts it
// before unlink returns (fs/ext4/mballoc.c: ext4_free_blocks adds to s_freeclusters_counter), unless something else has the inode for a
// moment. xfs frees inodes in the background (fs/xfs/xfs_icache.c: inodegc). Others may take as long as a transaction, as btrfs does.
var settles = map[string]time.Duration{"ext4": 2 * time.Second, "xfs": 3 * time.Second}

// Settles is how long statfs may take to count what was deleted, on a filesystem of a type as the kernel names it. ok is false where that
// is not known.
func Settles(fsType string) (wait time.Duration, ok bool) {
	wait, ok = settles[fsType]
	return wait, ok
}

// Folders are folders on one filesystem. They hold nothing open: a filesystem can be unmounted meanwhile.
type Folders struct {
	// mount is where the filesystem is mounted.
	mount string
	// handles name the folders. A path would not do: the split snapshotter renames layers before it deletes them, and the kubelet volumes
	// (pkg/volume/emptydir).
	handles []handle
}

type handle struct {
	unix.FileHandle
	// stays says that the folder may stay if there is no file in it.
	stays bool
}

// Find finds those of the folders that are on the filesystem that is mounted at mount. Those of goes are to go themselves: only when a
// folder is gone is it sure that the space of its files is free, because names go before blocks. Those of stays are to lose their files. It
// returns [ErrUnknown] if none is on that filesystem, or if one can't be had: it is not there, or the filesystem gives no handles.
func Find(mount string, goes, stays []string) (Folders, error) {
	var on unix.Stat_t
	if err := unix.Stat(mount, &on); err != nil {
		return Folders{}, fmt.Errorf("%w: stat %s: %w", ErrUnknown, mount, err)
	}
	f := Folders{mount: mount}
	for i, folder := range slices.Concat(goes, stays) {
		var at unix.Stat_t
		if err := unix.Lstat(folder, &at); err != nil {
			return Folders{}, fmt.Errorf("%w: stat %s: %w", ErrUnknown, folder, err)
		}
		if at.Dev != on.Dev {
			continue
		}
		h, _, err := unix.NameToHandleAt(unix.AT_FDCWD, folder, 0)
		if err != nil {
			return Folders{}, fmt.Errorf("%w: name_to_handle_at %s: %w", ErrUnknown, folder, err)
		}
		f.handles = append(f.handles, handle{h, i >= len(goes)})
	}
	if len(f.handles) == 0 {
		return Folders{}, fmt.Errorf("%w: none of them is on the filesystem of %s", ErrUnknown, mount)
	}
	return f, nil
}

// Gone says whether all that were to go are gone, wherever they were renamed to, and no file is left in the others. It needs
// CAP_DAC_READ_SEARCH (open_by_handle_at(2)). On a filesystem that hangs it hangs.
func (f Folders) Gone() (bool, error) {
	mount, err := unix.Open(f.mount, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false, fmt.Errorf("%w: open %s: %w", ErrUnknown, f.mount, err)
	}
	defer func() { _ = unix.Close(mount) }() //nolint:errcheck // it was read only
	for _, h := range f.handles {
		if gone, err := h.gone(mount); err != nil || !gone {
			return false, err
		}
	}
	return true, nil
}

func (h handle) gone(mount int) (bool, error) {
	fd, err := unix.OpenByHandleAt(mount, h.FileHandle, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC)
	if errors.Is(err, unix.ESTALE) {
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("%w: open_by_handle_at: %w", ErrUnknown, err)
	}
	defer func() { _ = unix.Close(fd) }() //nolint:errcheck // it was read only
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return false, fmt.Errorf("%w: fstat: %w", ErrUnknown, err)
	}
	if st.Nlink == 0 || !h.stays {
		return st.Nlink == 0, nil // somebody has it open yet
	}
	most := mostFolders
	file, err := hasFile(fmt.Sprintf("/proc/self/fd/%d", fd), &most)
	return !file && err == nil, err
}

// hasFile says whether there is a file in a folder or below it. It counts a folder down from most, and says yes at 0.
func hasFile(folder string, most *int) (_ bool, err error) {
	f, err := os.Open(folder)
	if errors.Is(err, os.ErrNotExist) { // it went meanwhile
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look for files: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	for {
		entries, err := f.ReadDir(64) // some at a time: there may be millions
		for _, e := range entries {
			if *most--; !e.IsDir() || *most <= 0 {
				return true, nil
			}
			if file, err := hasFile(filepath.Join(folder, e.Name()), most); file || err != nil {
				return file, err
			}
		}
		switch {
		case errors.Is(err, io.EOF), errors.Is(err, os.ErrNotExist):
			return false, nil
		case err != nil:
			return false, fmt.Errorf("look for files: %w", err)
		}
	}
}
