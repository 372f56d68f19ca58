package inventory

import (
	"cmp"
	"slices"
	"time"
)

// Figure is what something takes on one filesystem.
type Figure struct {
	// Filesystem is the caller's name of it, the same for the same one.
	Filesystem string
	// Bytes are those of allocated blocks; Inodes each count once.
	Bytes, Inodes int64
}

// Figures tells what parts of a store take. ok is false where that is not known
// (yet); what would come free is then not known either.
type Figures interface {
	// Snapshot is what a snapshot has by itself, without its parents.
	Snapshot(namespace string, s *Snapshot) (f Figure, ok bool)
	// Blob is what a blob takes.
	Blob(b *Blob) (f Figure, ok bool)
	// Ingest is what a download takes so far.
	Ingest(in *Ingest) (f Figure, ok bool)
}

// Amount is a sum over parts of the store.
type Amount struct {
	// PerFilesystem is what they take, one figure for each filesystem, by name.
	PerFilesystem []Figure
	// Unknown is the number of parts of which no figure is known: with any, the
	// figures are a lower bound.
	Unknown int
}

// On returns what there is of an amount on a filesystem; zero if nothing is.
func (a Amount) On(filesystem string) Figure {
	for _, f := range a.PerFilesystem {
		if f.Filesystem == filesystem {
			return f
		}
	}
	return Figure{Filesystem: filesystem}
}

// Bytes is the sum over all filesystems.
func (a Amount) Bytes() int64 {
	var sum int64
	for _, f := range a.PerFilesystem {
		sum += f.Bytes
	}
	return sum
}

func (a *Amount) add(f Figure) {
	i, ok := slices.BinarySearchFunc(a.PerFilesystem, f.Filesystem, func(have Figure, name string) int { return cmp.Compare(have.Filesystem, name) })
	if !ok {
		a.PerFilesystem = slices.Insert(a.PerFilesystem, i, Figure{Filesystem: f.Filesystem})
	}
	a.PerFilesystem[i].Bytes += f.Bytes
	a.PerFilesystem[i].Inodes += f.Inodes
}

// Key names an image.
type Key struct {
	Namespace string
	// ID is the digest of its configuration, which is the CRI's ID of it; for
	// one that can't be resolved the name of its only record.
	ID string
}

func (k Key) compare(other Key) int {
	return cmp.Or(cmp.Compare(k.Namespace, other.Namespace), cmp.Compare(k.ID, other.ID))
}

// Image is an image as the CRI counts them: all records that lead to one
// configuration.
type Image struct {
	Key
	// Names are those of its records, sorted.
	Names []string
	// Resolved says that manifest and configuration are there, for this node's
	// platform. CRI does not list an image without.
	Resolved bool
	// CreatedAt is when the first of the records was made.
	CreatedAt time.Time
	// ReportedBytes is the size that the CRI reports: of its compressed layers
	// and documents.
	ReportedBytes int64
	// Nominal is what all of its layers and blobs take, shared or not.
	Nominal Amount
	// Exclusive is what comes free if it alone is removed: neither other images
	// nor leases, containers or namespaces hold it.
	Exclusive Amount
	// Duplicate is what its compressed layers take that are there unpacked too.
	Duplicate Amount
	// Pinned images are never to be removed.
	Pinned bool
	// Repullable says that it can be had again: it has a digest in a
	// repository, all that is there of it was pulled from that, and it was pulled
	// from the repository of each of its names. An imported image never is.
	Repullable bool
	// NotRepullable says why not.
	NotRepullable string
	// Users are who runs on it or was made from it, in any namespace.
	Users []User
}

// UserKind is what uses an image.
type UserKind string

// The kinds of users.
const (
	UserContainer UserKind = "container"
	UserSandbox   UserKind = "sandbox"
	// UserVolume is an image volume or a snapshot made by hand.
	UserVolume UserKind = "snapshot"
	// UserUnpack is a layer that is being unpacked on top of the image's.
	UserUnpack UserKind = "unpack"
)

// User is somebody who uses an image.
type User struct {
	Kind UserKind
	// Namespace of containerd, and ID there: of a container or sandbox, or the
	// key of a snapshot.
	Namespace, ID string
}

// Picture is what a store holds and who owns it. It does not change, and may be
// used by several callers at once.
type Picture struct {
	// At is when the reading began that it is made from.
	At time.Time
	// Unread says what could not be read. While there is any, nothing may be
	// deleted on the picture's word.
	Unread []string
	// Unsettled says that the store was changing all the time while it was read.
	// Figures may be off by what changed.
	Unsettled bool
	// Images are sorted by key.
	Images []Image
	// Total is what all snapshots, blobs and downloads take together, Duplicate what
	// compressed layers take that are there unpacked too.
	Total, Duplicate Amount

	store  *store
	byKey  map[Key]int
	groups []group
	// mortal are the nodes that die when all images go.
	mortal []bool
}

// Image finds an image by its key.
func (p *Picture) Image(k Key) (Image, bool) {
	i, ok := p.byKey[k]
	if !ok {
		return Image{}, false
	}
	return p.Images[i], true
}

// Freed is what comes free by removing images together: a layer that only they
// share is in it. Images that the picture does not have free nothing.
func (p *Picture) Freed(images ...Key) Amount {
	r := p.Removal()
	for _, k := range images {
		r.Remove(k)
	}
	return r.Freed()
}

// Removal takes images away one after the other, for a planner. The picture
// stays as it is. It is for one caller.
type Removal struct {
	picture *Picture
	death   *death
	removed map[Key]bool
	freed   Amount
}

// Removal begins with nothing removed.
func (p *Picture) Removal() *Removal {
	return &Removal{picture: p, death: p.store.graph.death(), removed: map[Key]bool{}}
}

// Remove takes one more image away and returns what that frees beyond those
// before. A second time, or for an image that the picture does not have, it is
// nothing.
func (r *Removal) Remove(k Key) Amount {
	i, ok := r.picture.byKey[k]
	if !ok || r.removed[k] {
		return Amount{}
	}
	r.removed[k] = true
	more := r.picture.store.amount(r.death.remove(r.picture.groups[i].records))
	for _, f := range more.PerFilesystem {
		r.freed.add(f)
	}
	r.freed.Unknown += more.Unknown
	return more
}

// Freed is what all removals so far free.
func (r *Removal) Freed() Amount {
	return Amount{PerFilesystem: slices.Clone(r.freed.PerFilesystem), Unknown: r.freed.Unknown}
}
