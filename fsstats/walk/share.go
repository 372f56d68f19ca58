package walk

import (
	"bytes"
	"context"
)

// How one worker gives another half of what it has. Only what is small goes
// from hand to hand: the names of directories, or directory entries as the
// kernel gave them. The other worker opens the directory for itself.

// leastGiftBytes is the least of entries that are worth a gift, about 60 of
// them: 0.1 ms of work for the 10 µs that giving takes.
const leastGiftBytes = 2 << 10

// dot is the name of a directory in itself.
var dot = [...]byte{'.', 0}

// giveNames gives directories that have still to be visited to whoever is idle:
// half of those of the lowest directory on the stack that has some and is open.
// Of the directory at the top at least one stays.
func (w *walker) giveNames(ctx context.Context) {
	top := len(w.stack) - 1
	for level := 0; level <= top; level++ {
		if level == 1 {
			level = max(level, top-maxOpen) // those between are closed
		}
		d := &w.stack[level]
		if d.fd < 0 || d.next >= d.end {
			continue
		}
		from, ok := half(w.names[d.next:d.end], level == top)
		if !ok {
			continue
		}
		from += d.next
		if w.give(ctx, level, gift{names: w.names[from:d.end]}) {
			d.end = from
		}
		return
	}
}

// half gives where the second half of names begins; all of them if there is but
// one and none has to be kept.
func half(names []byte, keepOne bool) (from int, ok bool) {
	middle := bytes.IndexByte(names[(len(names)-1)/2:], 0)
	from = (len(names)-1)/2 + middle + 1
	if from < len(names) {
		return from, true
	}
	// The last name reaches over the middle.
	from = bytes.LastIndexByte(names[:len(names)-1], 0) + 1
	return from, from > 0 || !keepOne
}

// giveEntries gives the second half of entries of d, the top of the stack, to
// whoever is idle. keep is how many bytes stay, last the offset of the last entry
// of all. ok is false if nothing was given, keep is all then.
func (w *walker) giveEntries(ctx context.Context, d *dir, entries []byte) (keep int, last int64, ok bool) {
	keep = len(entries)
	for at := 0; at < len(entries); {
		entry, size, ok := parseEntry(entries[at:])
		if !ok {
			return len(entries), 0, false
		}
		at += size
		last = entry.offset
		if at >= len(entries)/2 && keep == len(entries) {
			keep = at
		}
	}
	if keep == len(entries) || !w.give(ctx, len(w.stack)-1, gift{entries: entries[keep:]}) {
		return len(entries), 0, false
	}
	return keep, last, true
}

// give gives work below a level of the stack to whoever is idle, if there is
// still somebody and the directory can be opened once more.
func (w *walker) give(ctx context.Context, level int, g gift) bool {
	if !w.claim() {
		return false
	}
	d := &w.stack[level]
	fd, err := openDir(d.fd, &dot[0])
	if err != nil {
		w.release()
		return false
	}
	g.fd, g.id, g.path = fd, d.id, w.path(level)
	g.entries, g.names = bytes.Clone(g.entries), bytes.Clone(g.names)
	w.start(ctx, g)
	return true
}
