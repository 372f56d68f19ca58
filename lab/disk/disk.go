// Package disk makes a filesystem of its own: a sparse file, formatted, on a loop device, mounted. Removing it undoes
// all of it. The loop device is set to free itself when the filesystem is unmounted, so that none is ever left.
//
// For integration tests, the demo and the lab. It needs root, mount(8) and the mkfs of the filesystem.
package disk

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/moby/sys/mountinfo"

	"github.com/cleave-cri/cleave/lab/sweep"
)

// FS is a type of filesystem, as mount(8) calls it.
type FS string

// The filesystems that can be made.
const (
	Ext4  FS = "ext4"
	XFS   FS = "xfs"
	Btrfs FS = "btrfs"
)

// Filesystems lists all of them, for tests that run on each.
func Filesystems() []FS { return []FS{Ext4, XFS, Btrfs} }

// minXFSBytes is the smallest filesystem that mkfs.xfs makes.
const minXFSBytes = 300 << 20

// Spec says what to make.
type Spec struct {
	// Name names the folder and the filesystem's files; a single path element.
	Name string
	// SizeBytes is the size of the device. The file is sparse: it takes what is written. At least 300 MiB for xfs, 128 MiB for btrfs.
	SizeBytes int64
	// FS is the type; empty means ext4.
	FS FS
	// MkfsArgs are added to the arguments of mkfs.
	MkfsArgs []string
	// Options are mount options, such as noatime.
	Options []string
	// Net says that SizeBytes is what statfs(2) is to give, not the device's size.
	Net bool
}

// Disk is a mounted filesystem.
type Disk struct {
	dir    string
	device string
	fs     FS
}

// Make makes and mounts a filesystem below dir, in a new folder of the Spec's name. If a step fails, the steps before
// it are undone.
func Make(ctx context.Context, dir string, spec Spec) (*Disk, error) {
	if spec.Net {
		return makeNet(ctx, dir, spec)
	}
	return makeDisk(ctx, dir, spec)
}

func makeDisk(ctx context.Context, dir string, spec Spec) (_ *Disk, err error) {
	if err := spec.check(); err != nil {
		return nil, err
	}
	dir, err = filepath.EvalSymlinks(dir)
	if err != nil {
		return nil, fmt.Errorf("make disk %s: %w", spec.Name, err)
	}
	d := &Disk{dir: filepath.Join(dir, spec.Name), fs: spec.FS}
	if err := os.Mkdir(d.dir, 0o755); err != nil {
		return nil, fmt.Errorf("make disk %s: %w", spec.Name, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.Close(context.WithoutCancel(ctx)))
		}
	}()
	if err := os.Mkdir(d.Path(), 0o755); err != nil {
		return nil, fmt.Errorf("make disk %s: %w", spec.Name, err)
	}
	if err := image(ctx, d.Image(), spec); err != nil {
		return nil, err
	}
	// mount(8) attaches the loop device, sets it to free itself, and copes with others who want one at the same time.
	options := strings.Join(append([]string{"loop"}, spec.Options...), ",")
	if err := run(ctx, "mount", "-t", string(spec.FS), "-o", options, d.Image(), d.Path()); err != nil {
		return nil, fmt.Errorf("mount disk %s: %w", spec.Name, err)
	}
	infos, err := mountinfo.GetMounts(mountinfo.SingleEntryFilter(d.Path()))
	if err != nil {
		return nil, fmt.Errorf("find the device of disk %s: %w", spec.Name, err)
	}
	if len(infos) != 1 {
		return nil, fmt.Errorf("find the device of disk %s: nothing is mounted on %s", spec.Name, d.Path())
	}
	d.device = infos[0].Source
	return d, nil
}

// makeNet makes a filesystem of a capacity by statfs(2): what it takes for itself
// comes on top of it.
func makeNet(ctx context.Context, dir string, spec Spec) (*Disk, error) {
	capacity := spec.SizeBytes
	const tries = 3
	for try := 1; ; try++ {
		d, err := makeDisk(ctx, dir, spec)
		if err != nil {
			return nil, err
		}
		var s syscall.Statfs_t
		if err := syscall.Statfs(d.Path(), &s); err != nil {
			return nil, errors.Join(fmt.Errorf("measure disk %s: %w", spec.Name, err), d.Close(context.WithoutCancel(ctx)))
		}
		got := int64(s.Blocks) * s.Bsize //nolint:gosec // of a small disk
		missing := capacity - got
		// Within half a hundredth: steps of block groups.
		if try == tries || missing < capacity/200 && missing > -capacity/200 {
			return d, nil
		}
		if err := d.Close(ctx); err != nil {
			return nil, err
		}
		spec.SizeBytes += missing
	}
}

// Detach unmounts the filesystem from its place and keeps the device: whoever uses
// it goes on. The function returned mounts it there again.
func (d *Disk) Detach(ctx context.Context) (attach func(context.Context) error, _ error) {
	// The open folder keeps the device from freeing itself: a second device for the
	// same file would destroy the filesystem.
	held, err := os.Open(d.Path())
	if err != nil {
		return nil, fmt.Errorf("unmount the disk in %s: %w", d.dir, err)
	}
	if err := run(ctx, "umount", "--lazy", d.Path()); err != nil {
		return nil, errors.Join(fmt.Errorf("unmount the disk in %s: %w", d.dir, err), held.Close())
	}
	return func(ctx context.Context) error {
		err := run(ctx, "mount", "-t", string(d.fs), d.device, d.Path())
		if err != nil {
			err = fmt.Errorf("mount the disk in %s again: %w", d.dir, err)
		}
		return errors.Join(err, held.Close())
	}, nil
}

// Image makes only the sparse file, formatted, for a virtual machine or whoever else mounts it. Mount options of the Spec
// have no meaning here. It needs neither root nor a loop device.
func Image(ctx context.Context, path string, spec Spec) error {
	if err := spec.check(); err != nil {
		return err
	}
	return image(ctx, path, spec)
}

// check refuses what can't be made, and names the type that an empty one means.
func (s *Spec) check() error {
	if s.FS == "" {
		s.FS = Ext4
	}
	if s.Name == "" || s.Name != filepath.Base(s.Name) {
		return fmt.Errorf("make a disk named %q: the name must be a single path element", s.Name)
	}
	if s.FS == XFS && s.SizeBytes < minXFSBytes {
		return fmt.Errorf("make disk %s: %d bytes are too few for xfs, which wants at least %d", s.Name, s.SizeBytes, minXFSBytes)
	}
	return nil
}

func image(ctx context.Context, path string, spec Spec) error {
	quiet := map[FS][]string{
		// No lazy initialisation: it would write to the disk later, while a test measures.
		Ext4:  {"-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0"},
		XFS:   {"-q", "-f"},
		Btrfs: {"-q", "-f"},
	}
	args, known := quiet[spec.FS]
	if !known {
		return fmt.Errorf("format %s: filesystem %q is not one of %v", path, spec.FS, Filesystems())
	}
	if err := sparse(path, spec.SizeBytes); err != nil {
		return fmt.Errorf("make disk %s: %w", spec.Name, err)
	}
	if err := run(ctx, "mkfs."+string(spec.FS), append(append(args, spec.MkfsArgs...), path)...); err != nil {
		return fmt.Errorf("format %s: %w", path, err)
	}
	return nil
}

// Path is where the filesystem is mounted.
func (d *Disk) Path() string { return filepath.Join(d.dir, "fs") }

// Image is the sparse file that backs the device.
func (d *Disk) Image() string { return filepath.Join(d.dir, "image") }

// Device is the loop device, such as /dev/loop3.
func (d *Disk) Device() string { return d.device }

// FS is the filesystem's type.
func (d *Disk) FS() FS { return d.fs }

// Close unmounts the filesystem, frees the device and removes the files. Processes that still use it are not ended:
// then the filesystem is detached, and Close waits some seconds for the device to become free.
func (d *Disk) Close(ctx context.Context) error {
	s := sweep.Scope{Dir: d.dir}
	if err := errors.Join(sweep.Mounts(ctx, s), sweep.Loops(ctx, s)); err != nil {
		return fmt.Errorf("remove the disk in %s: %w", d.dir, err)
	}
	return sweep.Files(s)
}

func sparse(path string, sizeBytes int64) (err error) {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("make its file: %w", err)
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	if err := file.Truncate(sizeBytes); err != nil {
		return fmt.Errorf("make its file of %d bytes: %w", sizeBytes, err)
	}
	return nil
}

// run runs a tool and puts what it said into the error.
func run(ctx context.Context, name string, args ...string) error {
	var output bytes.Buffer
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdout, cmd.Stderr = &output, &output
	if err := cmd.Run(); err != nil {
		if errors.Is(err, exec.ErrNotFound) {
			return fmt.Errorf("%w; `make deps` installs it", err)
		}
		return fmt.Errorf("%s: %w: %s", name, err, strings.TrimSpace(output.String()))
	}
	return nil
}
