// Package diskstats holds the interceptors that make the CRI tell the truth
// about filesystems: ImageFsInfo, the stats calls and the disk metrics. They
// are pure rewrites of one answer by facts that somebody else has measured
// before; they do no I/O and wait for nothing.
//
// agent supplies the facts; only agent may import this package.
package diskstats

import "time"

// Source has the facts ready.
type Source interface {
	// Facts returns the newest facts, never nil. It does not block. The value
	// is shared and must not be changed.
	Facts() *Facts
	// Wanted says that an answer would have needed something that the facts
	// do not have: the layer of a container that is new. It does not block.
	Wanted()
}

// Facts is what is known about the node's disks at one moment.
type Facts struct {
	// Images is where image layers are, Containers where writable layers are.
	Images, Containers Store
	// Devices tells, by path, on which filesystem the mountpoints are that
	// the runtime has been seen to name. The strings identify a filesystem
	// and mean nothing else.
	Devices map[string]string
	// Layers are the writable layers by container ID.
	Layers map[string]Layer
}

// Store is one of the two filesystems that ImageFsInfo is about.
type Store struct {
	// Mountpoint is the path to name: it exists and has a capacity. The same
	// for both stores when they share a filesystem. Empty while unknown.
	Mountpoint string
	// Guessed says that nobody has confirmed the place yet, neither the
	// runtime nor the configuration: what the runtime names itself goes first.
	Guessed bool
	// Device identifies the filesystem as in [Facts.Devices].
	Device string
	// Used is what the store's own things take, nil while not yet measured.
	Used *Usage
	// Whole is what is used on the filesystem altogether.
	Whole Usage
}

// Usage is a measured amount.
type Usage struct {
	// Bytes are allocated bytes, each inode's once.
	Bytes uint64
	// Inodes are files, folders and everything else that has an inode.
	Inodes uint64
	// At is when it was measured.
	At time.Time
}

// Layer is a container's writable layer.
type Layer struct {
	// Mountpoint is the path that names the layer's filesystem, the same
	// string as in [Store.Mountpoint] if it is that filesystem.
	Mountpoint string
	// Used is nil while not yet measured.
	Used *Usage
	// CapacityBytes is that of the layer's filesystem, 0 while unknown.
	CapacityBytes uint64
	// InodesTotal and InodesFree are those of the layer's filesystem, nil
	// while unknown or where there is no such limit.
	InodesTotal, InodesFree *uint64
}
