package index

import (
	"cmp"
	"slices"
	"time"
)

// Known is a part of what nobody owns that can be named: the filesystem's own
// records, other folders.
type Known struct {
	Name  string
	Bytes int64
}

// Attribution says who holds what is used on a filesystem. Always
//
//	OwnedBytes + UnattributedBytes = UsedBytes
//
// and the same of inodes where the kernel counts them.
type Attribution struct {
	FS FS
	// At is when the kernel said what is used; figures of parts have their own
	// times, the oldest is Oldest.
	At        time.Time
	UsedBytes int64
	// OwnedBytes is the sum of all parts that have a figure.
	OwnedBytes int64
	// UnattributedBytes is used and owned by nobody we know. It is negative where
	// parts count more than is used: files that share their blocks (reflinks), or
	// figures that are older than what was deleted since.
	UnattributedBytes int64
	// OvercountedBytes is how far it is below zero.
	OvercountedBytes int64
	// KnownBytes are parts of UnattributedBytes, the largest first.
	KnownBytes []Known

	// UsedInodes and UnattributedInodes are nil where the kernel counts none.
	UsedInodes         *int64
	OwnedInodes        int64
	UnattributedInodes *int64

	// Kinds are the sums by kind, in the order of kinds.
	Kinds []KindSum
	// Unmeasured is how many parts have no figure yet; what they hold is in
	// UnattributedBytes. Partial is how many have a lower bound only.
	Unmeasured, Partial int
	// Oldest is when the oldest of the figures was begun, zero without any. Of one
	// that was brought up to date that is when everything was last measured.
	Oldest time.Time
	// Problem says why At is not now.
	Problem string
}

// KindSum is what all owners of a kind hold.
type KindSum struct {
	Kind   Kind
	Bytes  int64
	Inodes int64
}

// held is a part of a filesystem; figure is nil while unknown.
type held struct {
	key    Key
	figure *Figure
}

// attribute is a pure function.
func attribute(s Space, parts []held, known []Known) Attribution {
	a := Attribution{FS: s.FS, At: s.At, UsedBytes: s.UsedBytes, UsedInodes: s.UsedInodes}
	kinds := map[Kind]int{}
	for _, p := range parts {
		if p.figure == nil {
			a.Unmeasured++
			continue
		}
		i, ok := kinds[p.key.Kind]
		if !ok {
			i = len(a.Kinds)
			kinds[p.key.Kind] = i
			a.Kinds = append(a.Kinds, KindSum{Kind: p.key.Kind})
		}
		a.Kinds[i].Bytes += p.figure.Bytes
		a.Kinds[i].Inodes += p.figure.Inodes
		a.OwnedBytes += p.figure.Bytes
		a.OwnedInodes += p.figure.Inodes
		if p.figure.Partial {
			a.Partial++
		}
		if proven := p.figure.ProvenAt(); a.Oldest.IsZero() || proven.Before(a.Oldest) {
			a.Oldest = proven
		}
	}
	slices.SortFunc(a.Kinds, func(x, y KindSum) int { return cmp.Compare(x.Kind, y.Kind) })
	a.UnattributedBytes = a.UsedBytes - a.OwnedBytes
	a.OvercountedBytes = max(-a.UnattributedBytes, 0)
	if s.UsedInodes != nil {
		rest := *s.UsedInodes - a.OwnedInodes
		a.UnattributedInodes = &rest
	}
	a.KnownBytes = slices.SortedFunc(slices.Values(known), func(x, y Known) int {
		return cmp.Or(cmp.Compare(y.Bytes, x.Bytes), cmp.Compare(x.Name, y.Name))
	})
	return a
}
