package quota

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// FS is a filesystem, reached by a folder on it that stays open. Trees are named by their path below that folder. Its
// methods may be called from several goroutines, until it is closed.
type FS struct {
	dir  *os.File
	kind int64 // its magic number, statfs(2)
	dev  uint64
}

var _ Ledger = (*FS)(nil)

// Open opens a filesystem by a folder on it.
func Open(path string) (*FS, error) {
	dir, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open a filesystem: %w", err)
	}
	return Of(dir)
}

// Of is Open by a folder that is open for reading already. The FS takes it over, and closes it at once with an error.
func Of(dir *os.File) (*FS, error) {
	var fs unix.Statfs_t
	if err := retry(func() error { return unix.Fstatfs(int(dir.Fd()), &fs) }); err != nil {
		return nil, errors.Join(fmt.Errorf("open a filesystem: statfs %s: %w", dir.Name(), err), dir.Close())
	}
	node, err := inodeOf(dir.Fd())
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open a filesystem: %s: %w", dir.Name(), err), dir.Close())
	}
	return &FS{dir: dir, kind: int64(fs.Type), dev: node.device}, nil //nolint:unconvert // its size differs between architectures
}

// Close closes the folder.
func (f *FS) Close() error { return f.dir.Close() }

// Path is the folder that the filesystem was opened by.
func (f *FS) Path() string { return f.dir.Name() }

// Type is the filesystem's type: ext4, xfs, btrfs, or its magic number.
func (f *FS) Type() string {
	switch f.kind {
	case unix.EXT4_SUPER_MAGIC:
		return "ext4"
	case unix.XFS_SUPER_MAGIC:
		return "xfs"
	case unix.BTRFS_SUPER_MAGIC:
		return "btrfs"
	}
	return fmt.Sprintf("type 0x%x", f.kind)
}

// Supports tells whether the filesystem offers a feature as it is mounted now: nil if it does, an error that matches
// ErrNotSupported if it does not, another one if that could not be found out. It changes nothing.
func (f *FS) Supports(feature Feature) error {
	switch feature {
	case ProjectUsage, ProjectLimits:
		return f.supportsProjects(feature)
	case Bulkstat:
		return f.supportsBulkstat()
	case Qgroups:
		return f.supportsQgroups()
	}
	return f.lacks(feature, "cleave does not know this feature", "")
}

func (f *FS) lacks(feature Feature, reason, needs string) error {
	return &NotSupportedError{Feature: feature, Path: f.Path(), Filesystem: f.Type(), Reason: reason, Needs: needs}
}

// Of include/uapi/linux/quota.h and dqblk_xfs.h; what x/sys lacks.
const (
	projectQuota = 2 // PRJQUOTA

	qGetQuota     = 0x800007 // Q_GETQUOTA
	qSetQuota     = 0x800008 // Q_SETQUOTA
	qGetNextQuota = 0x800009 // Q_GETNEXTQUOTA, Linux 4.6
	qState        = 0x5808   // Q_XGETQSTATV, also answered for ext4 (fs/quota/quota.c)

	stateVersion    = 1      // FS_QSTATV_VERSION1
	projectCounts   = 1 << 4 // FS_QUOTA_PDQ_ACCT
	projectEnforces = 1 << 5 // FS_QUOTA_PDQ_ENFD

	limitsValid = 1<<0 | 1<<2 // QIF_BLIMITS, QIF_ILIMITS

	limitUnitBytes = 1024 // QIF_DQBLKSIZE
)

// account is struct if_nextdqblk, of which struct if_dqblk is all but the last field.
type account struct {
	hardBlocks, softBlocks, bytes  uint64
	hardInodes, softInodes, inodes uint64
	blockDeadline, inodeDeadline   uint64
	valid                          uint32
	id                             uint32
}

// quotaState is struct fs_quota_statv.
type quotaState struct {
	version int8
	_       uint8
	flags   uint16
	_       [148]byte
}

// quotactl is quotactl_fd(2), Linux 5.14, for project quota. Unlike quotactl(2) it needs no path of a block device.
func (f *FS) quotactl(command int, id uint32, addr unsafe.Pointer) error {
	for {
		_, _, errno := unix.Syscall6(unix.SYS_QUOTACTL_FD, f.dir.Fd(), uintptr(command<<8|projectQuota), uintptr(id), uintptr(addr), 0, 0)
		switch errno {
		case 0:
			return nil
		case unix.EINTR:
		default:
			return errno
		}
	}
}

// kernelHasQuotactl tells whether the call exists: on a descriptor that doesn't, it then fails because of that.
func kernelHasQuotactl() bool {
	_, _, errno := unix.Syscall6(unix.SYS_QUOTACTL_FD, ^uintptr(0), uintptr(qState<<8|projectQuota), 0, 0, 0, 0)
	return errno != unix.ENOSYS
}

func (f *FS) supportsProjects(feature Feature) error {
	var needs string
	switch f.kind {
	case unix.EXT4_SUPER_MAGIC:
		needs = "`tune2fs -O project -Q prjquota` on the unmounted filesystem and the mount option prjquota"
	case unix.XFS_SUPER_MAGIC:
		needs = "the mount option prjquota from the first mount on: a remount does not turn it on"
	default:
		return f.lacks(feature, "only ext4 and xfs have project quota", "")
	}
	if !kernelHasQuotactl() {
		return f.lacks(feature, "the kernel, Linux "+kernelRelease()+", has no quotactl_fd(2)", "Linux 5.14 or newer, built with CONFIG_QUOTACTL and CONFIG_QFMT_V2 (ext4) or CONFIG_XFS_QUOTA (xfs)")
	}
	state := quotaState{version: stateVersion}
	err := f.quotactl(qState, 0, unsafe.Pointer(&state))
	switch {
	case errors.Is(err, unix.ENOSYS), errors.Is(err, unix.ESRCH), errors.Is(err, unix.EINVAL):
		// fs/quota/quota.c: no quota operations, or nothing is turned on.
		return f.lacks(feature, "no quota is turned on", needs)
	case err != nil:
		return fmt.Errorf("ask %s for its quota: %w", f.Path(), err)
	case state.flags&projectCounts == 0:
		return f.lacks(feature, "quota is turned on, but not for projects", needs)
	case feature == ProjectLimits && state.flags&projectEnforces == 0:
		return f.lacks(feature, "projects are counted, but not held to limits", "the mount option prjquota (not pqnoenforce)")
	}
	return nil
}

// notCounting turns the kernel's "no such quota" into the reason.
func (f *FS) notCounting(what string, err error) error {
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.ENOSYS) {
		if reason := f.supportsProjects(ProjectUsage); reason != nil {
			return reason
		}
	}
	return fmt.Errorf("%s on %s: %w", what, f.Path(), err)
}

// Project reads the account of a project.
func (f *FS) Project(id uint32) (Project, error) {
	var a account
	err := f.quotactl(qGetQuota, id, unsafe.Pointer(&a))
	if errors.Is(err, unix.ENOENT) { // xfs: nobody has used it
		return Project{ID: id}, f.supportsProjects(ProjectUsage)
	}
	if err != nil {
		return Project{}, f.notCounting(fmt.Sprintf("read project %d", id), err)
	}
	return a.project(id), nil
}

// NextProject reads the first account from an ID on that is not empty.
func (f *FS) NextProject(from uint32) (Project, bool, error) {
	for {
		var a account
		err := f.quotactl(qGetNextQuota, from, unsafe.Pointer(&a))
		if errors.Is(err, unix.ENOENT) {
			return Project{}, false, f.supportsProjects(ProjectUsage)
		}
		if err != nil {
			return Project{}, false, f.notCounting(fmt.Sprintf("look for projects from %d on", from), err)
		}
		if a.id < from {
			return Project{}, false, fmt.Errorf("look for projects from %d on: the kernel answered with %d", from, a.id)
		}
		// An ID that was used once may be there with nothing in it.
		if p := a.project(a.id); !p.empty() {
			return p, true, nil
		}
		if a.id == math.MaxUint32 {
			return Project{}, false, nil
		}
		from = a.id + 1
	}
}

// SetLimit sets or clears the hard limits of a project.
func (f *FS) SetLimit(id uint32, l Limit) error {
	if id == 0 {
		return fmt.Errorf("limit a project on %s: %w", f.Path(), ErrProjectZero)
	}
	if err := f.supportsProjects(ProjectLimits); err != nil {
		return err
	}
	a := account{hardBlocks: limitUnits(l.Bytes), hardInodes: l.Inodes, valid: limitsValid}
	if err := f.quotactl(qSetQuota, id, unsafe.Pointer(&a)); err != nil {
		return f.notCounting(fmt.Sprintf("limit project %d to %d bytes and %d inodes", id, l.Bytes, l.Inodes), err)
	}
	return nil
}

// limitUnits rounds up, so that a limit, however small, never becomes none.
func limitUnits(bytes uint64) uint64 {
	units := bytes / limitUnitBytes
	if bytes%limitUnitBytes != 0 {
		units++
	}
	return units
}

func (a account) project(id uint32) Project {
	limit := Limit{Bytes: math.MaxUint64, Inodes: a.hardInodes}
	if a.hardBlocks <= math.MaxUint64/limitUnitBytes {
		limit.Bytes = a.hardBlocks * limitUnitBytes
	}
	return Project{ID: id, Usage: Usage{Bytes: a.bytes, Inodes: a.inodes}, Limit: limit}
}

// Of include/uapi/linux/fs.h: struct fsxattr, ioctl_xfs_fsgetxattr(2).
const (
	fsGetXattr     = 0x801c581f // FS_IOC_FSGETXATTR
	fsSetXattr     = 0x401c5820 // FS_IOC_FSSETXATTR
	projectInherit = 0x200      // FS_XFLAG_PROJINHERIT
)

type fileAttributes struct {
	flags, extentBytes, extents, project, cowExtentBytes uint32
	_                                                    [8]byte
}

func ioctl(file *os.File, request uintptr, argument unsafe.Pointer) error {
	for {
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, file.Fd(), request, uintptr(argument))
		switch errno {
		case 0:
			return nil
		case unix.EINTR:
		default:
			return errno
		}
	}
}

// projectOf reads the project of an open file.
func projectOf(file *os.File) (fileAttributes, error) {
	var a fileAttributes
	if err := ioctl(file, fsGetXattr, unsafe.Pointer(&a)); err != nil {
		return a, fmt.Errorf("read the project of %s: %w", file.Name(), err)
	}
	return a, nil
}

// setProject changes the project of an open file, and makes a folder give it on.
func setProject(file *os.File, id uint32, inherit bool) error {
	a, err := projectOf(file)
	if err != nil {
		return err
	}
	a.project = id
	if inherit {
		a.flags |= projectInherit
	}
	if err := ioctl(file, fsSetXattr, unsafe.Pointer(&a)); err != nil {
		return fmt.Errorf("give %s the project %d: %w", file.Name(), id, err)
	}
	return nil
}

// openTree opens a folder below the filesystem's, without symlinks and on the same mount.
func (f *FS) openTree(name string) (*os.File, error) {
	path := filepath.Join(f.Path(), name)
	if name == "." || !filepath.IsLocal(name) || filepath.Clean(name) != name {
		return nil, fmt.Errorf("open tree %q of %s: the name must be a clean path below it", name, f.Path())
	}
	how := unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV | unix.RESOLVE_NO_MAGICLINKS,
	}
	var fd int
	err := retry(func() (err error) {
		fd, err = unix.Openat2(int(f.dir.Fd()), name, &how)
		return err
	})
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}

// An inode is what is asked of statx(2) about one.
type inode struct {
	number uint64
	// born is the time of birth in nanoseconds, 0 where the filesystem keeps none.
	born   int64
	device uint64
	links  uint32
	format uint16
}

func (i inode) isDir() bool     { return i.format == unix.S_IFDIR }
func (i inode) isRegular() bool { return i.format == unix.S_IFREG }

func inodeOf(fd uintptr) (inode, error) {
	var s unix.Statx_t
	const flags = unix.AT_EMPTY_PATH | unix.AT_STATX_DONT_SYNC | unix.AT_NO_AUTOMOUNT
	const mask = unix.STATX_TYPE | unix.STATX_INO | unix.STATX_NLINK | unix.STATX_BTIME
	if err := retry(func() error { return unix.Statx(int(fd), "", flags, mask, &s) }); err != nil {
		return inode{}, os.NewSyscallError("statx", err)
	}
	i := inode{number: s.Ino, device: unix.Mkdev(s.Dev_major, s.Dev_minor), links: s.Nlink, format: s.Mode & unix.S_IFMT}
	if s.Mask&unix.STATX_BTIME != 0 {
		i.born = s.Btime.Sec*1e9 + int64(s.Btime.Nsec)
	}
	return i, nil
}

// openPlace opens an entry of a folder as a mere place: no device is touched by that (open(2), O_PATH).
func openPlace(dir *os.File, name string) (*os.File, error) {
	var fd int
	err := retry(func() (err error) {
		fd, err = unix.Openat(int(dir.Fd()), name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: filepath.Join(dir.Name(), name), Err: err}
	}
	return os.NewFile(uintptr(fd), filepath.Join(dir.Name(), name)), nil
}

// reopen opens the very file of a place for reading.
func reopen(place *os.File) (*os.File, error) {
	var fd int
	err := retry(func() (err error) {
		fd, err = unix.Open(fmt.Sprintf("/proc/self/fd/%d", place.Fd()), unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: place.Name(), Err: err}
	}
	return os.NewFile(uintptr(fd), place.Name()), nil
}

// readAttribute reads an extended attribute; found is false if there is none.
func readAttribute(file *os.File, name string) (value string, found bool, err error) {
	buffer := make([]byte, 256)
	var n int
	err = retry(func() (err error) {
		n, err = unix.Fgetxattr(int(file.Fd()), name, buffer)
		return err
	})
	if errors.Is(err, unix.ENODATA) {
		return "", false, nil
	}
	if err != nil {
		return "", false, fmt.Errorf("read %s of %s: %w", name, file.Name(), err)
	}
	return string(buffer[:n]), true, nil
}

func writeAttribute(file *os.File, name, value string) error {
	if err := retry(func() error { return unix.Fsetxattr(int(file.Fd()), name, []byte(value), 0) }); err != nil {
		return fmt.Errorf("write %s of %s: %w", name, file.Name(), err)
	}
	return nil
}

// tryLock takes the lock on the filesystem's folder that keeps assigners apart; the kernel drops it with a process's end.
func (f *FS) tryLock() (unlock func() error, taken bool, err error) {
	// A description of its own: flock(2) is held by that, so two of one process keep each other out too.
	var fd int
	err = retry(func() (err error) {
		fd, err = unix.Openat(int(f.dir.Fd()), ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return nil, false, &os.PathError{Op: "open", Path: f.Path(), Err: err}
	}
	file := os.NewFile(uintptr(fd), f.Path())
	err = retry(func() error { return unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB) })
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil, false, file.Close()
	}
	if err != nil {
		return nil, false, errors.Join(fmt.Errorf("lock %s: %w", f.Path(), err), file.Close())
	}
	return file.Close, true, nil
}

// kernelRelease is for reasons that name it.
func kernelRelease() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "of unknown version"
	}
	release, _, _ := strings.Cut(string(u.Release[:]), "\x00")
	return release
}

func retry(call func() error) error {
	for {
		if err := call(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
