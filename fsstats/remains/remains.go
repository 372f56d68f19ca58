// Package remains tells when folders that somebody else deletes are gone, also where they are renamed first, and when the filesystem must
// count their space as available. It deletes nothing.
package remains

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// mostEntries bounds one look at a folder: with more folders in it and no file it counts as not empty.
const mostEntries = 1000

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
	handles []unix.FileHandle
}

// Find finds those of the folders that are on the filesystem that is mounted at mount. It returns [ErrUnknown] if none is, or if one of
// them can't be had: it is not there, or the filesystem gives no handles.
func Find(mount string, folders []string) (Folders, error) {
	var on, at unix.Stat_t
	if err := unix.Stat(mount, &on); err != nil {
		return Folders{}, fmt.Errorf("%w: stat %s: %w", ErrUnknown, mount, err)
	}
	f := Folders{mount: mount}
	for _, folder := range folders {
		if err := unix.Lstat(folder, &at); err != nil {
			return Folders{}, fmt.Errorf("%w: stat %s: %w", ErrUnknown, folder, err)
		}
		if at.Dev != on.Dev {
			continue
		}
		handle, _, err := unix.NameToHandleAt(unix.AT_FDCWD, folder, 0)
		if err != nil {
			return Folders{}, fmt.Errorf("%w: name_to_handle_at %s: %w", ErrUnknown, folder, err)
		}
		f.handles = append(f.handles, handle)
	}
	if len(f.handles) == 0 {
		return Folders{}, fmt.Errorf("%w: none of them is on the filesystem of %s", ErrUnknown, mount)
	}
	return f, nil
}

// Emptied says whether no file is left in any of the folders, wherever they are by now. It needs CAP_DAC_READ_SEARCH
// (open_by_handle_at(2)). On a filesystem that hangs it hangs.
func (f Folders) Emptied() (bool, error) {
	mount, err := unix.Open(f.mount, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false, fmt.Errorf("%w: open %s: %w", ErrUnknown, f.mount, err)
	}
	defer func() { _ = unix.Close(mount) }() //nolint:errcheck // it was read only
	for _, handle := range f.handles {
		if empty, err := emptied(mount, handle); err != nil || !empty {
			return false, err
		}
	}
	return len(f.handles) > 0, nil
}

// errFile ends a look at a folder.
var errFile = errors.New("it is not empty")

func emptied(mount int, handle unix.FileHandle) (bool, error) {
	fd, err := unix.OpenByHandleAt(mount, handle, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC)
	if errors.Is(err, unix.ESTALE) {
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("%w: open_by_handle_at: %w", ErrUnknown, err)
	}
	defer func() { _ = unix.Close(fd) }() //nolint:errcheck // it was read only
	entries := 0
	err = filepath.WalkDir(fmt.Sprintf("/proc/self/fd/%d/.", fd), func(_ string, e fs.DirEntry, err error) error {
		entries++
		switch {
		case errors.Is(err, fs.ErrNotExist): // it went meanwhile
			return nil
		case err != nil:
			return err
		case !e.IsDir() || entries > mostEntries:
			return errFile
		}
		return nil
	})
	if err == nil || errors.Is(err, errFile) {
		return err == nil, nil
	}
	return false, fmt.Errorf("look for files: %w", err)
}
