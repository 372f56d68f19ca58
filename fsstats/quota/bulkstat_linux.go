package quota

import (
	"context"
	"errors"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Of fs/xfs/libxfs/xfs_fs.h; the call and its structures are there since Linux 5.5.
const (
	xfsBulkstat   = 0x8040587f // XFS_IOC_BULKSTAT
	bulkstatBatch = 1024       // inodes per call: 192 KiB of answers
)

// bulkHeader is struct xfs_bulk_ireq.
type bulkHeader struct {
	from     uint64 // the first inode wanted; the kernel moves it on
	flags    uint32
	wanted   uint32
	answered uint32
	group    uint32
	_        [5]uint64
}

// bulkInode is struct xfs_bulkstat.
type bulkInode struct {
	number, size, blocks, flags     uint64
	atime, mtime, ctime, btime      int64
	generation, uid, gid, project   uint32
	_                               [4]uint32 // nanoseconds
	blockBytes, device              uint32
	_                               [2]uint32 // hints for allocation
	links, extents, attributeBlocks uint32
	_                               [6]uint16
	_                               uint64
	_                               [6]uint64
}

type bulkRequest struct {
	bulkHeader
	inodes [bulkstatBatch]bulkInode
}

// Bulk is what a bulk reading counts for a project.
type Bulk struct {
	Usage
	// Deleted is the part of Usage that no name leads to any more: deleted files that somebody still has open.
	Deleted Usage `json:"deleted"`
}

// BulkUsage reads all inodes of an xfs and sums them up per project, 0 for those without. Project IDs need no quota for
// that. It is no snapshot: what changes meanwhile is counted as it was or as it is. It fails with ErrNotSupported on other
// filesystems.
func (f *FS) BulkUsage(ctx context.Context) (map[uint32]Bulk, error) {
	if err := f.isXFS(); err != nil {
		return nil, err
	}
	sums := make(map[uint32]Bulk)
	request := bulkRequest{bulkHeader: bulkHeader{wanted: bulkstatBatch}}
	for {
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("read all inodes of %s: %w", f.Path(), err)
		}
		request.answered = 0
		if err := f.bulkstat(&request); err != nil {
			return nil, err
		}
		if request.answered == 0 {
			return sums, nil
		}
		for i := range min(request.answered, bulkstatBatch) {
			n := &request.inodes[i]
			one := Usage{Bytes: n.blocks * uint64(n.blockBytes), Inodes: 1}
			sum := sums[n.project]
			sum.add(one)
			if n.links == 0 {
				sum.Deleted.add(one)
			}
			sums[n.project] = sum
		}
	}
}

func (u *Usage) add(v Usage) {
	u.Bytes += v.Bytes
	u.Inodes += v.Inodes
}

func (f *FS) bulkstat(request *bulkRequest) error {
	err := ioctl(f.dir, xfsBulkstat, unsafe.Pointer(request))
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENOTTY):
		return f.lacks(Bulkstat, "the kernel, Linux "+kernelRelease()+", does not have the call", "Linux 5.5")
	case errors.Is(err, unix.EPERM):
		return f.lacks(Bulkstat, "the kernel lets only CAP_SYS_ADMIN read all inodes", "root in the initial user namespace")
	case errors.Is(err, unix.EINVAL):
		// fs/xfs/xfs_ioctl.c: not through an idmapped mount.
		return f.lacks(Bulkstat, "the kernel refuses it on this mount", "a mount that is not idmapped")
	}
	return fmt.Errorf("read all inodes of %s: %w", f.Path(), err)
}

func (f *FS) isXFS() error {
	if f.kind != unix.XFS_SUPER_MAGIC {
		return f.lacks(Bulkstat, "only xfs has it", "")
	}
	return nil
}

func (f *FS) supportsBulkstat() error {
	if err := f.isXFS(); err != nil {
		return err
	}
	return f.bulkstat(&bulkRequest{bulkHeader: bulkHeader{wanted: 1}})
}
