package quota

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Of include/uapi/linux/btrfs.h and btrfs_tree.h.
const (
	btrfsTreeSearch  = 0xd0009411 // BTRFS_IOC_TREE_SEARCH
	btrfsInodeLookup = 0xd0009412 // BTRFS_IOC_INO_LOOKUP

	quotaTree      = 8   // BTRFS_QUOTA_TREE_OBJECTID
	subvolumeInode = 256 // BTRFS_FIRST_FREE_OBJECTID: the inode of every subvolume's root

	qgroupStatusKey = 240
	qgroupInfoKey   = 242
	qgroupLimitKey  = 244

	qgroupOn           = 1 << 0 // BTRFS_QGROUP_STATUS_FLAG_ON
	qgroupRescan       = 1 << 1
	qgroupInconsistent = 1 << 2

	qgroupLimitReferenced = 1 << 0 // BTRFS_QGROUP_LIMIT_MAX_RFER
	qgroupLimitExclusive  = 1 << 1
)

// Qgroup is what btrfs counts for one subvolume. The figures move when a transaction is committed, by default every 30
// seconds; syncfs(2) commits one. There is no count of inodes.
type Qgroup struct {
	// Subvolume is its ID.
	Subvolume uint64 `json:"subvolume"`
	// ReferencedBytes are all extents that the subvolume reaches, ExclusiveBytes those that nobody else does.
	ReferencedBytes uint64 `json:"referencedBytes"`
	ExclusiveBytes  uint64 `json:"exclusiveBytes"`
	// Hard limits of the same figures; nil where there is none.
	ReferencedLimitBytes *uint64 `json:"referencedLimitBytes,omitempty"`
	ExclusiveLimitBytes  *uint64 `json:"exclusiveLimitBytes,omitempty"`
}

// Qgroup reads what btrfs counts for the subvolume whose root a tree is. It fails with ErrNotSupported where quota is not
// enabled, with ErrNotSubvolume, and with ErrInconsistent while the figures are known to be wrong.
func (f *FS) Qgroup(tree string) (_ Qgroup, err error) {
	if err := f.supportsQgroups(); err != nil {
		return Qgroup{}, err
	}
	dir, err := f.openSubvolume(tree)
	if err != nil {
		return Qgroup{}, err
	}
	defer func() { err = errors.Join(err, dir.Close()) }()
	node, err := inodeOf(dir.Fd())
	if err != nil {
		return Qgroup{}, err
	}
	if node.number != subvolumeInode {
		return Qgroup{}, fmt.Errorf("read the qgroup of %s: %w", dir.Name(), ErrNotSubvolume)
	}
	id, err := subvolumeOf(dir)
	if err != nil {
		return Qgroup{}, err
	}
	if err := qgroupsAreRight(dir); err != nil {
		return Qgroup{}, err
	}
	return readQgroup(dir, id)
}

func readQgroup(dir *os.File, id uint64) (Qgroup, error) {
	// struct btrfs_qgroup_info_item: generation, referenced, compressed, exclusive, compressed.
	info, found, err := searchQuota(dir, qgroupInfoKey, id)
	if err != nil {
		return Qgroup{}, err
	}
	if !found || len(info) < 40 {
		return Qgroup{}, fmt.Errorf("read the qgroup 0/%d of %s: there is none: %w", id, dir.Name(), ErrInconsistent)
	}
	q := Qgroup{Subvolume: id, ReferencedBytes: binary.LittleEndian.Uint64(info[8:]), ExclusiveBytes: binary.LittleEndian.Uint64(info[24:])}
	// struct btrfs_qgroup_limit_item: flags, referenced, exclusive, and two that do nothing.
	limit, found, err := searchQuota(dir, qgroupLimitKey, id)
	if err != nil {
		return Qgroup{}, err
	}
	if found && len(limit) >= 24 {
		flags := binary.LittleEndian.Uint64(limit)
		if flags&qgroupLimitReferenced != 0 {
			q.ReferencedLimitBytes = pointer(binary.LittleEndian.Uint64(limit[8:]))
		}
		if flags&qgroupLimitExclusive != 0 {
			q.ExclusiveLimitBytes = pointer(binary.LittleEndian.Uint64(limit[16:]))
		}
	}
	return q, nil
}

func pointer(v uint64) *uint64 { return &v }

func (f *FS) supportsQgroups() error {
	if f.kind != unix.BTRFS_SUPER_MAGIC {
		return f.lacks(Qgroups, "only btrfs has them", "")
	}
	status, found, err := searchQuota(f.dir, qgroupStatusKey, 0)
	switch {
	case errors.Is(err, unix.EPERM):
		return f.lacks(Qgroups, "the kernel lets only CAP_SYS_ADMIN read them", "root in the initial user namespace")
	case err != nil:
		return err
	case !found || len(status) < 24 || binary.LittleEndian.Uint64(status[16:])&qgroupOn == 0:
		return f.lacks(Qgroups, "quota is not enabled on this filesystem", "`btrfs quota enable`")
	}
	return nil
}

// qgroupsAreRight looks at the flags in struct btrfs_qgroup_status_item: version, generation, flags, progress.
func qgroupsAreRight(dir *os.File) error {
	status, found, err := searchQuota(dir, qgroupStatusKey, 0)
	if err != nil {
		return err
	}
	if !found || len(status) < 24 {
		return fmt.Errorf("read the qgroups of %s: %w", dir.Name(), ErrInconsistent)
	}
	switch flags := binary.LittleEndian.Uint64(status[16:]); {
	case flags&qgroupRescan != 0:
		return fmt.Errorf("read the qgroups of %s: a rescan is under way: %w", dir.Name(), ErrInconsistent)
	case flags&qgroupInconsistent != 0:
		return fmt.Errorf("read the qgroups of %s: `btrfs quota rescan` would count anew: %w", dir.Name(), ErrInconsistent)
	}
	return nil
}

// searchQuota reads one item of the quota tree: its objectid is 0, its offset the qgroup (btrfs_tree.h). found is false
// if there is no such item, or no such tree.
func searchQuota(dir *os.File, kind uint32, id uint64) (_ []byte, found bool, _ error) {
	// struct btrfs_ioctl_search_args, 4 KiB: the key, then headers with items.
	var a struct {
		tree, minObject, maxObject, minOffset, maxOffset, minTransaction, maxTransaction uint64
		minKind, maxKind, items                                                          uint32
		_                                                                                [36]byte
		answer                                                                           [3992]byte
	}
	a.tree, a.minOffset, a.maxOffset, a.maxTransaction = quotaTree, id, id, ^uint64(0)
	a.minKind, a.maxKind, a.items = kind, kind, 1
	err := ioctl(dir, btrfsTreeSearch, unsafe.Pointer(&a))
	if errors.Is(err, unix.ENOENT) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, fmt.Errorf("search the quota tree of %s: %w", dir.Name(), err)
	}
	if a.items == 0 {
		return nil, false, nil
	}
	// struct btrfs_ioctl_search_header: transaction, objectid, offset (8 bytes each), type, length (4 each).
	const header = 32
	length := binary.NativeEndian.Uint32(a.answer[28:])
	if binary.NativeEndian.Uint64(a.answer[16:]) != id || binary.NativeEndian.Uint32(a.answer[24:]) != kind || length > uint32(len(a.answer)-header) {
		return nil, false, fmt.Errorf("search the quota tree of %s for item %d of %d: the kernel answered with another", dir.Name(), kind, id)
	}
	return append([]byte(nil), a.answer[header:header+length]...), true, nil
}

// subvolumeOf asks in which subvolume an open folder is.
func subvolumeOf(dir *os.File) (uint64, error) {
	// struct btrfs_ioctl_ino_lookup_args: 4 KiB in all; tree 0 asks for that of the descriptor.
	var a struct {
		tree, object uint64
		_            [4080]byte
	}
	a.object = subvolumeInode
	if err := ioctl(dir, btrfsInodeLookup, unsafe.Pointer(&a)); err != nil {
		return 0, fmt.Errorf("find the subvolume of %s: %w", dir.Name(), err)
	}
	return a.tree, nil
}

// openSubvolume is openTree, and takes the folder itself too: nothing is written to what it opens.
func (f *FS) openSubvolume(tree string) (*os.File, error) {
	if tree != "." {
		return f.openTree(tree)
	}
	place, err := openPlace(f.dir, ".")
	if err != nil {
		return nil, err
	}
	dir, err := reopen(place)
	return dir, errors.Join(err, place.Close())
}
