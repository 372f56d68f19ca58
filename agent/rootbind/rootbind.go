// Package rootbind gives each container's writable layer a second name that
// cAdvisor's handler for CRI-O takes: it measures the folder "diff" in a
// container's root (KSS-10), while overlayfs in containerd calls that folder "fs",
// and it follows no symlink there, so the second name is a bind mount:
//
//	/run/cleave/roots/ID/diff   the container's upper folder, read-only
//
// The split snapshotter calls the folder "diff" itself and needs none of this.
//
// The mounts can't be bound again, so that they get into no container that has
// the host's files mounted, and they stay when cleave ends: the kubelet goes on
// measuring while cleave is restarted. Whoever comes next finds and tidies them
// up. Nothing is ever deleted but empty folders and mounts of one's own, in the
// folder that the package was given. Only agent may import it.
package rootbind

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/cleave-cri/cleave/snapshot/split/rootdir"
)

// Errors that callers can tell apart.
var (
	// ErrNotSupported says that the kernel lacks what is needed.
	ErrNotSupported = fmt.Errorf("bind mounts of containers' roots need Linux 5.12: %w", errors.ErrUnsupported)
	// ErrID says that a name is no container's ID.
	ErrID = errors.New("no container's ID")
)

// diff is the last element of a root, the one that cAdvisor adds.
const diff = "diff"

// layersMax bounds how many mounts are taken from one folder. There is one, and
// more only if somebody else mounted over it.
const layersMax = 16

// ids are the IDs that containerd allows (containerd, pkg/identifiers), but for
// names that mean something to a filesystem.
var ids = regexp.MustCompile(`^[A-Za-z0-9]+(?:[._-][A-Za-z0-9]+)*$`)

const idMax = 76

// Roots is a folder of roots. Its methods may be called from several goroutines.
type Roots struct {
	path string

	mu  sync.Mutex
	dir *rootdir.Root // guarded by mu
}

// Open opens a folder of roots, and makes it if it is not there; the one that it is
// in has to be. The folder is mounted over itself, so that nothing that is mounted
// in it gets into other mount namespaces.
func Open(path string) (*Roots, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("open the folder of roots: %w", err)
	}
	if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("make the folder of roots: %w", err)
	}
	dir, err := rootdir.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open the folder of roots: %w", err)
	}
	place, err := dir.Place()
	if err == nil && !place.IsMountRootKnown {
		err = ErrNotSupported
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("look at the folder of roots: %w", err), dir.Close())
	}
	if !place.IsMountRoot {
		// By descriptors, so that it is the folder that was opened.
		if err := dir.Do("mount", func(fd int) error { return bind(fd, fd, &unix.MountAttr{}) }); err != nil {
			return nil, errors.Join(err, dir.Close())
		}
		// What is open is the folder below the mount.
		under := dir
		dir, err = rootdir.Open(path)
		if err = errors.Join(err, under.Close()); err != nil {
			return nil, fmt.Errorf("open the folder of roots: %w", err)
		}
		if place, err = dir.Place(); err != nil || !place.IsMountRoot {
			return nil, errors.Join(fmt.Errorf("the folder of roots %s was exchanged while it was opened", path), err, dir.Close())
		}
	}
	// Also where the folder is mounted already, by one that died before this.
	if err := dir.Do("make private", func(fd int) error {
		return setattr(fd, &unix.MountAttr{Propagation: unix.MS_UNBINDABLE})
	}); err != nil {
		return nil, errors.Join(err, dir.Close())
	}
	return &Roots{path: path, dir: dir}, nil
}

// Close lets go of the folder. The mounts stay.
func (r *Roots) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.dir.Close()
}

// Path returns the root of a container, whether or not it is bound.
func (r *Roots) Path(containerID string) string { return filepath.Join(r.path, containerID) }

// Bind makes a container's upper folder known as "diff" in its root, and returns
// the root. It does nothing if that is so already, and binds anew if another folder
// is there.
func (r *Roots) Bind(containerID, upper string) (root string, err error) {
	if err := valid(containerID); err != nil {
		return "", err
	}
	source, err := os.OpenFile(upper, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return "", fmt.Errorf("open the writable layer of container %s: %w", containerID, err)
	}
	defer func() { err = errors.Join(err, source.Close()) }()
	var want unix.Stat_t
	if err := onFile(source, func(fd int) error { return unix.Fstat(fd, &want) }); err != nil {
		return "", fmt.Errorf("look at the writable layer of container %s: %w", containerID, err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	place := filepath.Join(containerID, diff)
	if err := errors.Join(r.dir.Ensure(containerID, 0o700), r.dir.Ensure(place, 0o700)); err != nil {
		return "", fmt.Errorf("make the root of container %s: %w", containerID, err)
	}
	now, err := r.dir.Stat(place)
	if err != nil {
		return "", err
	}
	if now.IsMountRoot && now.Device == want.Dev && now.Inode == want.Ino {
		return r.Path(containerID), nil
	}
	if err := r.unmountLocked(containerID); err != nil {
		return "", err
	}
	target, err := r.dir.Open(place)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, target.Close()) }()
	err = onFile(source, func(from int) error {
		return onFile(target, func(to int) error {
			return bind(from, to, &unix.MountAttr{
				Attr_set:    unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC,
				Propagation: unix.MS_UNBINDABLE,
			})
		})
	})
	if err != nil {
		return "", fmt.Errorf("bind the writable layer of container %s: %w", containerID, err)
	}
	return r.Path(containerID), nil
}

// Remove takes a container's root away; the writable layer stays as it is. One that
// is not there is no error.
func (r *Roots) Remove(containerID string) error {
	if err := valid(containerID); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.removeLocked(containerID)
}

func (r *Roots) removeLocked(id string) error {
	if _, err := r.dir.Stat(id); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err := r.unmountLocked(id); err != nil {
		return err
	}
	// Both fail on what is not empty.
	if err := r.dir.RemoveDir(filepath.Join(id, diff)); err != nil {
		return err
	}
	return r.dir.RemoveDir(id)
}

// unmountLocked takes what is mounted on a root's diff away. What is mounted
// elsewhere is not touched: the root itself must not be a mount (RESOLVE_NO_XDEV).
func (r *Roots) unmountLocked(id string) error {
	for range layersMax {
		place, err := r.dir.Stat(filepath.Join(id, diff))
		if errors.Is(err, fs.ErrNotExist) || err == nil && !place.IsMountRoot {
			return nil
		}
		if err != nil {
			return err
		}
		root, err := r.dir.Open(id)
		if err != nil {
			return err
		}
		// umount2 knows no descriptors; the way through /proc leads to the folder
		// that is open. Detached, because cAdvisor may be walking in it.
		err = unix.Unmount(filepath.Join(rootdir.FDPath(root), diff), unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if err = errors.Join(err, root.Close()); err != nil {
			return fmt.Errorf("unmount %s: %w", filepath.Join(r.path, id, diff), err)
		}
	}
	return fmt.Errorf("unmount %s: %d mounts are on it and more", filepath.Join(r.path, id, diff), layersMax)
}

// List returns the containers that have a root here, in order. Names that are no
// container's are left out.
func (r *Roots) List() ([]string, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.listLocked()
}

func (r *Roots) listLocked() ([]string, error) {
	names, err := r.dir.Names(".")
	if err != nil {
		return nil, err
	}
	names = slices.DeleteFunc(names, func(name string) bool { return valid(name) != nil })
	slices.Sort(names)
	return names, nil
}

// Tidy takes away the roots of containers that there are no more, and returns
// whose these were. exists is asked about each just before; it must be sure: a
// caller that could not ask the runtime does not call Tidy. A root that can't be
// taken away is left, and the error says why; the others go nevertheless.
func (r *Roots) Tidy(exists func(containerID string) bool) (removed []string, err error) {
	names, err := r.List()
	if err != nil {
		return nil, err
	}
	for _, id := range names {
		if exists(id) {
			continue
		}
		if removeErr := r.Remove(id); removeErr != nil {
			err = errors.Join(err, removeErr)
			continue
		}
		removed = append(removed, id)
	}
	return removed, err
}

// Clear takes everything away, the folder included, for a node that goes back to
// containerd alone. The Roots can't be used after that.
func (r *Roots) Clear() error {
	_, err := r.Tidy(func(string) bool { return false })
	r.mu.Lock()
	defer r.mu.Unlock()
	if err = errors.Join(err, r.dir.Close()); err != nil {
		return err
	}
	if err := unix.Unmount(r.path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
		return &os.PathError{Op: "unmount", Path: r.path, Err: err}
	}
	// Fails on what is not empty, or still mounted.
	if err := unix.Rmdir(r.path); err != nil {
		return &os.PathError{Op: "remove", Path: r.path, Err: err}
	}
	return nil
}

func valid(id string) error {
	if len(id) > idMax || !ids.MatchString(id) {
		return fmt.Errorf("%.100q: %w", id, ErrID)
	}
	return nil
}

// bind mounts one open folder on another, with attributes that hold before anybody
// can see the mount (open_tree(2), mount_setattr(2), move_mount(2)).
func bind(from, to int, attr *unix.MountAttr) error {
	tree, err := unix.OpenTree(from, "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err != nil {
		return kernelError("open_tree", err)
	}
	defer unix.Close(tree) //nolint:errcheck // mounted or not, nothing is lost
	if err := setattr(tree, attr); err != nil {
		return err
	}
	return kernelError("move_mount", unix.MoveMount(tree, "", to, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH))
}

func setattr(mount int, attr *unix.MountAttr) error {
	if *attr == (unix.MountAttr{}) {
		return nil
	}
	return kernelError("mount_setattr", unix.MountSetattr(mount, "", unix.AT_EMPTY_PATH, attr))
}

func kernelError(call string, err error) error {
	if errors.Is(err, unix.ENOSYS) {
		return ErrNotSupported
	}
	return os.NewSyscallError(call, err)
}

// onFile calls f with a file's descriptor, which stays open meanwhile.
func onFile(file *os.File, f func(fd int) error) error {
	conn, err := file.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	if err := conn.Control(func(fd uintptr) { inner = f(int(fd)) }); err != nil {
		return err
	}
	return inner
}
