package kubelet

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// errNotRegular says that a path names a pipe, a device or the like.
var errNotRegular = errors.New("not a regular file")

// root is the file tree as one process sees it: with its mounts, and with its
// root folder for absolute symlinks.
type root struct {
	dir *os.File
	// cwd is the process's working folder, as the process sees it.
	cwd string
}

// openRoot opens the tree below dir, for instance /proc/42/root.
func openRoot(dir, cwd string) (*root, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	return &root{dir: f, cwd: cwd}, nil
}

func (r *root) close() error { return r.dir.Close() }

// abs makes a name absolute, as the process would. A / at the end stays, because
// it makes the kernel follow a symlink.
func (r *root) abs(name string) string {
	out := name
	if !filepath.IsAbs(name) {
		out = filepath.Join(r.cwd, name)
	}
	out = filepath.Clean(out)
	if strings.HasSuffix(name, "/") && out != "/" {
		out += "/"
	}
	return out
}

// open opens a path of the process's tree, confined to it: openat2(2),
// RESOLVE_IN_ROOT. Magic links are not followed.
func (r *root) open(path string, flags uint64) (*os.File, error) {
	fd, err := unix.Openat2(int(r.dir.Fd()), path, &unix.OpenHow{
		Flags:   flags | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}

// read reads a regular file, up to limit bytes. It neither waits for a pipe's
// writer nor opens a device: it looks first, by O_PATH.
func (r *root) read(path string, limit int64) (data []byte, modified time.Time, err error) {
	place, err := r.open(path, unix.O_PATH)
	if err != nil {
		return nil, time.Time{}, err
	}
	defer place.Close() //nolint:errcheck // only looked at
	info, err := place.Stat()
	if err != nil {
		return nil, time.Time{}, err
	}
	if !info.Mode().IsRegular() {
		return nil, time.Time{}, fmt.Errorf("%w: %s", errNotRegular, info.Mode().Type())
	}
	// Opened again through the descriptor, so it is the file that was looked at.
	f, err := os.Open("/proc/self/fd/" + strconv.Itoa(int(place.Fd())))
	if err != nil {
		return nil, time.Time{}, err
	}
	defer f.Close() //nolint:errcheck // only read
	data, err = readAll(f, limit)
	return data, info.ModTime(), err
}

func readAll(r io.Reader, limit int64) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err == nil && int64(len(data)) > limit {
		return nil, fmt.Errorf("larger than %d bytes", limit)
	}
	return data, err
}

func (r *root) config(name string) (file, error) {
	return r.file(File, r.abs(name))
}

func (r *root) file(kind Kind, path string) (file, error) {
	data, modified, err := r.read(path, maxFileBytes)
	if err != nil {
		return file{}, &FileError{Path: path, Err: fmt.Errorf("read the kubelet's configuration: %w", err)}
	}
	return file{source: Source{Kind: kind, Path: path, Modified: modified}, data: data}, nil
}

// Limits of a folder of drop-ins.
const (
	maxDropIns      = 1_000
	maxDropInDepth  = 32
	maxFolderWidth  = 10_000
	dropInExtension = ".conf"
)

// dropIns reads the files *.conf below a folder, folders within folders too, each
// folder in the order of its names. A folder that is a symlink itself has no
// drop-ins, for the kubelet walks without following symlinks
// (mergeKubeletConfigurations, filepath.WalkDir).
func (r *root) dropIns(folder string) ([]file, error) {
	var out []file
	var walk func(path string, depth int) error
	one := func(path string) error {
		if filepath.Ext(path) != dropInExtension {
			return nil
		}
		if len(out) == maxDropIns {
			return fmt.Errorf("more than %d drop-ins", maxDropIns)
		}
		f, err := r.file(DropIn, path)
		out = append(out, f)
		return err
	}
	walk = func(path string, depth int) error {
		if depth > maxDropInDepth {
			return fmt.Errorf("folders nested more than %d deep", maxDropInDepth)
		}
		entries, err := r.list(path)
		if err != nil {
			return err
		}
		for _, e := range entries {
			below := filepath.Join(path, e.Name())
			if e.IsDir() {
				err = walk(below, depth+1)
			} else {
				err = one(below)
			}
			if err != nil {
				return err
			}
		}
		return nil
	}
	fault := func(err error) ([]file, error) {
		var known *FileError
		if errors.As(err, &known) {
			return nil, err
		}
		return nil, &FileError{Path: folder, Err: fmt.Errorf("read the kubelet's drop-ins: %w", err)}
	}
	path := r.abs(folder)
	place, err := r.open(path, unix.O_PATH|unix.O_NOFOLLOW)
	if err != nil {
		return fault(err)
	}
	info, err := place.Stat()
	if closeErr := place.Close(); err == nil {
		err = closeErr
	}
	switch {
	case err != nil:
	case info.IsDir():
		err = walk(path, 0)
	default:
		err = one(path)
	}
	if err != nil {
		return fault(err)
	}
	return out, nil
}

func (r *root) list(path string) ([]fs.DirEntry, error) {
	d, err := r.open(path, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return nil, err
	}
	defer d.Close() //nolint:errcheck // only read
	entries, err := d.ReadDir(maxFolderWidth + 1)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	if err == nil && len(entries) > maxFolderWidth {
		err = fmt.Errorf("%s has more than %d entries", path, maxFolderWidth)
	}
	slices.SortFunc(entries, func(a, b fs.DirEntry) int { return strings.Compare(a.Name(), b.Name()) })
	return entries, err
}

// stat looks at a path of the tree, following symlinks.
func (r *root) stat(path string) (fs.FileInfo, error) {
	f, err := r.open(path, unix.O_PATH)
	if err != nil {
		return nil, err
	}
	defer f.Close() //nolint:errcheck // only looked at
	return f.Stat()
}

// labelOf gives the SELinux label of a path, empty if it has none.
func labelOf(path string) (string, error) {
	buffer := make([]byte, 4096)
	n, err := unix.Getxattr(path, "security.selinux", buffer)
	switch {
	case errors.Is(err, unix.ENODATA), errors.Is(err, unix.EOPNOTSUPP):
		return "", nil
	case err != nil:
		return "", &fs.PathError{Op: "getxattr", Path: path, Err: err}
	}
	return strings.TrimRight(string(buffer[:n]), "\x00"), nil
}
