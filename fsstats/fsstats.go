// Package fsstats tells on which filesystem a path really is and how full that
// filesystem is, as the kernel sees it, and what layout the filesystems of a
// node form. It imports nothing else of this module; the agent, the proxy's
// interceptors and the checks of `cleave doctor` may import it.
//
// # What a filesystem is
//
// Two paths are on one filesystem if the mounts they are on have the same
// device number in /proc/self/mountinfo, field 3 (proc_pid_mountinfo(5)). That
// number is the superblock's, so it is the same through bind mounts, and for
// all subvolumes of one btrfs. The st_dev of stat(2) is not good enough: btrfs
// gives each subvolume its own (btrfs(5), "subvolumes"), and mountinfo knows
// none of those. Which mount a path is on is asked from the kernel
// (STATX_MNT_ID of statx(2), Linux 5.8; before that "mnt_id" of
// /proc/self/fdinfo, proc_pid_fdinfo(5), Linux 3.15). Path prefixes are never
// compared, and symlinks are followed by the kernel only.
//
// Limits of this rule: filesystems of one ZFS pool have a device number each
// although they share their space, and so have the shares of one NFS server.
package fsstats

import (
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"sync"
	"time"
)

// Errors that callers can tell apart with errors.Is. A path that does not exist
// is reported as fs.ErrNotExist, one that may not be searched as
// fs.ErrPermission.
var (
	// ErrMountUnknown says that the mount of a path is not in this process's
	// mount table, also not after reading it again: it was unmounted lazily,
	// or it lies outside this process's root directory.
	ErrMountUnknown = errors.New("mount is not in this process's mount table")
	// ErrNoCapacity says that neither a path nor any of its parents is on a
	// filesystem with a capacity above zero.
	ErrNoCapacity = errors.New("no parent directory is on a filesystem with a capacity")
	// ErrNotAbsolute says that a path does not start at the root directory.
	ErrNotAbsolute = errors.New("path is not absolute")
	// ErrNoAnswer says that the kernel has not answered about a path in time:
	// a network filesystem whose server is gone, a frozen filesystem, a disk
	// that hangs.
	ErrNoAnswer = errors.New("the filesystem does not answer")
)

// Device is the number of a filesystem's superblock as in mountinfo. For a
// filesystem on one block device it is that device's number; btrfs, overlayfs,
// tmpfs and network filesystems have a made-up one with major number 0. It is
// stable as long as the filesystem is mounted, not over reboots.
type Device struct {
	Major uint32 `json:"major"`
	Minor uint32 `json:"minor"`
}

// String gives the form that mountinfo and lsblk use: "8:17".
func (d Device) String() string { return fmt.Sprintf("%d:%d", d.Major, d.Minor) }

// Filesystem is one filesystem with its figures at one moment. Figures come
// from statfs(2); they are those of the whole filesystem, unless a project
// quota with a limit covers the path asked about, in which case ext4 and xfs
// answer with the project's figures.
type Filesystem struct {
	// Device identifies the filesystem; see the package comment.
	Device Device `json:"device"`
	// FSID is f_fsid of statfs(2) as 16 hex digits, empty if the kernel tells
	// none. ext4 and btrfs make it of their UUID, xfs of the device's number.
	FSID string `json:"fsid,omitempty"`
	// Source is what was mounted, for instance "/dev/sdb1" (mountinfo field 10).
	Source string `json:"source"`
	// Type is the kernel's name of the filesystem type, for instance "ext4".
	Type string `json:"type"`
	// Mountpoint is where the mount that holds the path sits. One filesystem
	// may be mounted at several places; do not compare Mountpoints, compare
	// Devices.
	Mountpoint string `json:"mountpoint"`

	// CapacityBytes is f_blocks: all blocks that the filesystem hands out,
	// including those kept for root. 0 for filesystems that store nothing
	// (proc, sysfs, an automount point that was not triggered yet).
	CapacityBytes uint64 `json:"capacityBytes"`
	// AvailableBytes is f_bavail: what a process without privileges can still
	// write. It is the figure the kubelet's thresholds look at.
	AvailableBytes uint64 `json:"availableBytes"`
	// FreeBytes is f_bfree: what root can still write. FreeBytes -
	// AvailableBytes is the reserve for root (5 % on a default ext4).
	FreeBytes uint64 `json:"freeBytes"`
	// UsedBytes is f_blocks - f_bfree. It is not CapacityBytes -
	// AvailableBytes: the reserve for root is neither used nor available.
	UsedBytes uint64 `json:"usedBytes"`

	// InodesTotal and InodesFree are f_files and f_ffree. Both are nil if the
	// filesystem has no limit of inodes (f_files is 0, as on btrfs): an inode
	// threshold does not apply to it. xfs makes inodes as it needs them and
	// gives here what would fit, so its total moves.
	InodesTotal *uint64 `json:"inodesTotal,omitempty"`
	InodesFree  *uint64 `json:"inodesFree,omitempty"`

	// MeasuredAt is when statfs(2) was asked.
	MeasuredAt time.Time `json:"measuredAt"`
}

// Same says whether f and g are one filesystem. It is more careful than comparing
// devices where time has passed between f and g: the number of a device that was
// taken away is given to the next one.
func (f Filesystem) Same(g Filesystem) bool {
	return f.Device == g.Device && f.FSID == g.FSID && f.Type == g.Type
}

// ID names the filesystem as far as Same tells filesystems apart, for instance
// "8:17 ext4 6b1c5e0fd2b1a9c4". It is for maps and files of our own; people see it
// only where they debug.
func (f Filesystem) ID() string {
	return fmt.Sprintf("%s %s %s", f.Device, f.Type, f.FSID)
}

// InodesUsed gives f_files - f_ffree; ok is false if the filesystem has no
// limit of inodes, because then the kernel tells no number either.
func (f Filesystem) InodesUsed() (used uint64, ok bool) {
	if f.InodesTotal == nil || f.InodesFree == nil {
		return 0, false
	}
	return saturatingSub(*f.InodesTotal, *f.InodesFree), true
}

// Prober asks the kernel of the mount namespace it runs in. It holds no open
// files; its methods may be called from several goroutines.
//
// A probe blocks as long as the kernel does: forever on a network filesystem
// whose server is gone. Nothing can cancel that. So each path is asked about in
// a goroutine of its own, which is left behind with [ErrNoAnswer] when its time
// is over; while it hangs the same path is not asked about again. One path that
// hangs leaves at most one goroutine and one thread of the kernel's waiting, and
// does not touch the others, up to a thousand that hang at once.
type Prober struct {
	src source
	now func() time.Time
	// limit is how long a path may take, zero for any time.
	limit time.Duration

	mu sync.Mutex
	// hanging are the paths whose question was left behind, with the time when
	// it was put; guarded by mu.
	hanging map[string]time.Time
}

// probeLimit is how long a path may take: statfs and an open without reading
// take microseconds, and some hundred milliseconds on a network filesystem in
// trouble.
const probeLimit = 2 * time.Second

// mostHanging is how many paths may hang at once; then no other is asked about until
// one answers. The Go runtime ends a program that has 10 000 threads
// (runtime/debug, SetMaxThreads), and each that hangs holds one.
const mostHanging = 1000

// NewProber returns a Prober for this process's mount namespace.
func NewProber() *Prober {
	return &Prober{src: kernelSource{}, now: time.Now, limit: probeLimit}
}

// ask puts a question about a path and waits for its answer within the limit.
func ask[T any](p *Prober, path string, question func() (T, error)) (T, error) {
	if p.limit <= 0 {
		return question()
	}
	var none T
	began := p.now()
	if since, hangs := p.hangs(path); hangs {
		return none, noAnswer(path, since)
	}
	if p.full() {
		return none, fmt.Errorf("find filesystem of %q: %w: %d others hang, and no more are tried", path, ErrNoAnswer, mostHanging)
	}
	type answer struct {
		value T
		err   error
	}
	answers := make(chan answer, 1)
	go func() {
		value, err := question()
		answers <- answer{value, err}
		p.forget(path)
	}()
	timer := time.NewTimer(p.limit)
	defer timer.Stop()
	select {
	case a := <-answers:
		return a.value, a.err
	case <-timer.C:
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case a := <-answers: // just now; forget comes after it and may have been here already
		return a.value, a.err
	default:
	}
	if p.hanging == nil {
		p.hanging = map[string]time.Time{}
	}
	p.hanging[path] = began
	return none, noAnswer(path, began)
}

// noAnswer has the same words as long as a path hangs: what is said on change
// only is then said once.
func noAnswer(path string, since time.Time) error {
	return fmt.Errorf("find filesystem of %q: %w since %s", path, ErrNoAnswer, since.UTC().Format("2006-01-02 15:04:05Z"))
}

func (p *Prober) hangs(path string) (since time.Time, hangs bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	since, hangs = p.hanging[path]
	return since, hangs
}

func (p *Prober) full() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.hanging) >= mostHanging
}

func (p *Prober) forget(path string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.hanging, path)
}

// FilesystemOf tells on which filesystem path is, following symlinks, and
// measures it. path must be absolute and exist; it may be anything that has a
// name, not just a directory. Nothing is opened for reading and no automount is
// triggered.
//
// Errors wrap ErrNotAbsolute, fs.ErrNotExist, fs.ErrPermission, ErrMountUnknown,
// ErrNoAnswer or the kernel's own error number.
func (p *Prober) FilesystemOf(path string) (Filesystem, error) {
	return ask(p, path, func() (Filesystem, error) {
		s := session{src: p.src, now: p.now}
		_, f, err := s.filesystemOf(path)
		return f, err
	})
}

// source is what this package needs to know from the kernel.
type source interface {
	// look follows path to its end and says where that is. A missing path is
	// an error that wraps fs.ErrNotExist.
	look(path string) (spot, error)
	// readlink gives the target of path, without following it, and false if
	// path is not a symlink.
	readlink(path string) (target string, isLink bool)
	// mounts reads the mount table.
	mounts() (map[uint64]mount, error)
}

// spot is a place in the tree of files.
type spot struct {
	path    string // absolute, without symlinks and dots
	mountID uint64
	space   space
}

// space is what statfs(2) says, in blocks of blockBytes.
type space struct {
	blockBytes                uint64
	blocks, free, available   uint64
	inodesTotal, inodesUnused uint64
	fsid                      string
}

// mount is one line of the mount table.
type mount struct {
	device                         Device
	mountpoint, fstype, from, root string
}

// session is one question to the kernel: all its parts are answered from one
// mount table, which is read again only when a path is on a newer mount.
type session struct {
	src   source
	now   func() time.Time
	table map[uint64]mount
}

func (s *session) filesystemOf(path string) (spot, Filesystem, error) {
	if !filepath.IsAbs(path) {
		return spot{}, Filesystem{}, fmt.Errorf("find filesystem of %q: %w", path, ErrNotAbsolute)
	}
	// A mount may come or go between looking at the path and reading the
	// table. Mount IDs are used again by the kernel, hence look twice as well.
	for attempt := 0; ; attempt++ {
		at := s.now()
		sp, err := s.src.look(path)
		if err != nil {
			return spot{}, Filesystem{}, fmt.Errorf("find filesystem of %q: %w", path, err)
		}
		if s.table == nil {
			if s.table, err = s.src.mounts(); err != nil {
				return spot{}, Filesystem{}, fmt.Errorf("read mount table: %w", err)
			}
		}
		if m, ok := s.table[sp.mountID]; ok {
			return sp, newFilesystem(m, sp.space, at), nil
		}
		if attempt > 0 {
			return spot{}, Filesystem{}, fmt.Errorf("find filesystem of %q (mount %d): %w", path, sp.mountID, ErrMountUnknown)
		}
		s.table = nil
	}
}

// newFilesystem puts the mount table's and statfs's words together.
func newFilesystem(m mount, sp space, at time.Time) Filesystem {
	available := sp.available
	if available > math.MaxInt64 {
		// A filesystem filled beyond root's reserve: a negative number in an
		// unsigned field.
		available = 0
	}
	f := Filesystem{
		Device:         m.device,
		FSID:           sp.fsid,
		Source:         m.from,
		Type:           m.fstype,
		Mountpoint:     m.mountpoint,
		CapacityBytes:  saturatingMul(sp.blocks, sp.blockBytes),
		AvailableBytes: saturatingMul(available, sp.blockBytes),
		FreeBytes:      saturatingMul(sp.free, sp.blockBytes),
		UsedBytes:      saturatingMul(saturatingSub(sp.blocks, sp.free), sp.blockBytes),
		MeasuredAt:     at,
	}
	if sp.inodesTotal > 0 {
		total, unused := sp.inodesTotal, sp.inodesUnused
		f.InodesTotal, f.InodesFree = &total, &unused
	}
	return f
}

func saturatingSub(a, b uint64) uint64 {
	if b > a {
		return 0
	}
	return a - b
}

func saturatingMul(a, b uint64) uint64 {
	if b != 0 && a > math.MaxUint64/b {
		return math.MaxUint64
	}
	return a * b
}
