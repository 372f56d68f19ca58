// Package quota reads what filesystems count by themselves, so that nobody has to walk: project quota of ext4 and xfs, a
// bulk reading of all inodes of xfs, qgroups of btrfs. With project quota it also gives trees project IDs and sets hard
// limits on them. It imports nothing of ours; fsstats, snapshot and the agent may import it.
//
// What a filesystem can do is asked of the kernel at run time ([FS.Supports]). Asking and reading never change anything.
// What is not there is an error that matches [ErrNotSupported] and says why, and what is needed.
//
// # Project quota
//
// Every inode of ext4 and xfs can have a project ID. A directory with the inherit flag gives its ID to what is made in it
// (FS_XFLAG_PROJINHERIT, ioctl_xfs_fsgetxattr(2)), overlayfs's copies included, and the kernel sums up blocks and inodes per
// ID. Reading a sum is one call, whatever the number of files. ID 0 is everything that has no project.
//
// A writer over its hard limit gets EDQUOT from ext4 and ENOSPC from xfs. ext4 does not hold back a process with
// CAP_SYS_RESOURCE (fs/quota/dquot.c, ignore_hardlimit): root on the node, or a privileged container in a volume. What is
// written through an overlay is written without that capability (fs/overlayfs/super.c, since Linux 4.10), so that a layer's
// limit holds for privileged containers too, but for stores into mapped files, which reach ext4 with the process's own
// rights. xfs holds back everybody. statfs(2) in a tree with a limit answers with the limit's figures.
package quota

import (
	"errors"
	"fmt"
	"strings"
)

// Errors that callers can tell apart with errors.Is.
var (
	// ErrNotSupported says that kernel, filesystem or mount lacks a feature. The error is a [NotSupportedError].
	ErrNotSupported = errors.New("not supported here")
	// ErrInconsistent says that the kernel itself calls its figures wrong at the moment: btrfs is still counting, or has
	// lost count until `btrfs quota rescan`.
	ErrInconsistent = errors.New("the filesystem's own count is incomplete")
	// ErrNotSubvolume says that a path is no root of a btrfs subvolume, so there is no qgroup that counts it alone.
	ErrNotSubvolume = errors.New("not the root of a subvolume")
	// ErrProjectZero says that something was asked for project 0, which is the rest of the filesystem: a limit on it
	// would stop everybody.
	ErrProjectZero = errors.New("project 0 is the rest of the filesystem")
)

// A Feature is one thing that a filesystem may offer.
type Feature string

// The features.
const (
	// ProjectUsage: the kernel counts per project.
	ProjectUsage Feature = "project quota"
	// ProjectLimits: the kernel holds writers to projects' limits.
	ProjectLimits Feature = "project limits"
	// Bulkstat: one pass over all inodes of an xfs, half a microsecond each, for all projects at once.
	Bulkstat Feature = "xfs bulkstat"
	// Qgroups: btrfs counts per subvolume.
	Qgroups Feature = "btrfs qgroups"
)

// NotSupportedError says what is missing, and what would bring it. It matches [ErrNotSupported].
type NotSupportedError struct {
	Feature Feature
	// Path is the folder that was asked about, Filesystem its type.
	Path, Filesystem string
	// Reason is what the kernel said or is known not to do, Needs what would help: a version, an option, a command.
	Reason, Needs string
}

func (e *NotSupportedError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s on %s (%s): %s", e.Feature, e.Path, e.Filesystem, e.Reason)
	if e.Needs != "" {
		fmt.Fprintf(&b, "; needs %s", e.Needs)
	}
	return b.String()
}

// Is makes errors.Is(err, ErrNotSupported) true.
func (e *NotSupportedError) Is(target error) bool { return target == ErrNotSupported }

// Usage is what a project takes.
type Usage struct {
	// Bytes are allocated blocks, those promised to delayed writes included. Deleted files count until they are closed,
	// and on xfs a moment longer.
	Bytes uint64 `json:"bytes"`
	// Inodes counts files, folders and everything else with a name.
	Inodes uint64 `json:"inodes"`
}

// Limit is a hard limit. Zero means none.
type Limit struct {
	// Bytes is kept by the kernel in units of 1 KiB (struct if_dqblk, quotactl(2)) or of its blocks, rounded up.
	Bytes  uint64 `json:"bytes"`
	Inodes uint64 `json:"inodes"`
}

// Project is a project's account.
type Project struct {
	ID    uint32 `json:"id"`
	Usage Usage  `json:"usage"`
	Limit Limit  `json:"limit"`
}

// empty is an account that says nothing: nobody uses the ID.
func (p Project) empty() bool { return p.Usage == Usage{} && p.Limit == Limit{} }

// A Ledger is a filesystem's account of its projects. quotatest.Ledger is the suite that every implementation passes.
type Ledger interface {
	// Project reads one account. One that the filesystem does not have is an empty one. It fails with
	// ErrNotSupported where nothing is counted.
	Project(id uint32) (Project, error)
	// NextProject reads the account with the lowest ID from an ID on that is not empty; found is false if there is none.
	NextProject(from uint32) (p Project, found bool, err error)
	// SetLimit sets both limits of a project, or takes them away. One below the usage is accepted and stops
	// further writing. It fails with ErrProjectZero, and with ErrNotSupported where limits are not enforced.
	SetLimit(id uint32, l Limit) error
}

// Best names the best way in which a filesystem counts by itself: project quota before a bulk reading, btrfs's own.
// Where there is none the error gives the reason for each and matches ErrNotSupported; the caller has to walk.
func Best(fs *FS) (Feature, error) {
	var why []error
	for _, feature := range []Feature{ProjectUsage, Bulkstat, Qgroups} {
		err := fs.Supports(feature)
		if err == nil {
			return feature, nil
		}
		why = append(why, err)
	}
	return "", errors.Join(why...)
}
