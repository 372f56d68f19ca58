package sim

import (
	"time"
)

// disk is a filesystem while it is played.
type disk struct {
	spec               *Filesystem
	used, inodes       int64
	least, leastInodes int64
	arriving           []arrival
}

// arrival is deleted space that is not free yet.
type arrival struct {
	at            int64 // tick
	bytes, inodes int64
}

func newDisk(f *Filesystem) *disk {
	d := &disk{spec: f, used: f.UsedBytes, inodes: f.UsedInodes}
	d.least, d.leastInodes = d.free(), d.freeInodes()
	return d
}

func (d *disk) free() int64       { return d.spec.CapacityBytes - d.used }
func (d *disk) freeInodes() int64 { return d.spec.Inodes - d.inodes }

// take takes as much as there is; ok says that it was all.
func (d *disk) take(bytes, inodes int64) (gotBytes, gotInodes int64, ok bool) {
	gotBytes, gotInodes = min(bytes, d.free()), inodes
	if d.spec.Inodes > 0 {
		gotInodes = min(inodes, d.freeInodes())
	}
	d.used += gotBytes
	d.inodes += gotInodes
	d.least, d.leastInodes = min(d.least, d.free()), min(d.leastInodes, d.freeInodes())
	return gotBytes, gotInodes, gotBytes == bytes && gotInodes == inodes
}

// give returns space; it comes free now or later.
func (d *disk) give(tick, bytes, inodes int64) {
	if d.spec.FreesAfter > 0 {
		d.arriving = append(d.arriving, arrival{at: tick + ticks(d.spec.FreesAfter), bytes: bytes, inodes: inodes})
		return
	}
	d.used -= bytes
	d.inodes -= inodes
}

// arrive frees what is due.
func (d *disk) arrive(tick int64) {
	for len(d.arriving) > 0 && d.arriving[0].at <= tick {
		d.used -= d.arriving[0].bytes
		d.inodes -= d.arriving[0].inodes
		d.arriving = d.arriving[1:]
	}
}

// ticks is a time in steps, rounded up.
func ticks(d time.Duration) int64 { return int64((d + Tick - 1) / Tick) }

// bag is what somebody has on a disk.
type bag struct {
	on            *disk
	bytes, inodes int64
	// hiddenBytes are deleted and open: on the disk, but found by no walk.
	hiddenBytes int64
	// seenBytes and seenInodes are what the kubelet's last walk found.
	seenBytes, seenInodes int64
}

func (b *bag) walk() { b.seenBytes, b.seenInodes = b.bytes, b.inodes }

// clear deletes all of it.
func (b *bag) clear(tick int64) (bytes int64) {
	bytes = b.bytes + b.hiddenBytes
	b.on.give(tick, bytes, b.inodes)
	b.bytes, b.inodes, b.hiddenBytes = 0, 0, 0
	return bytes
}

// flow is a Writer while its container runs.
type flow struct {
	spec        *Writer
	to          *bag
	begun       int64 // tick
	from, until int64 // ticks; until < 0 for ever
	unlinkAt    int64 // tick; < 0 for never
	written     int64
	// file is what is in the file that may be unlinked.
	file int64
	// left are tenths of bytes and inodes that did not make a whole one.
	left, leftInodes int64
	// short says that the last write did not fit.
	short bool
}

const ticksPerSecond = int64(time.Second / Tick)

func newFlow(w *Writer, to *bag, now int64) flow {
	f := flow{spec: w, to: to, begun: now, from: now + ticks(w.From), until: -1, unlinkAt: -1}
	if w.Until > 0 {
		f.until = now + ticks(w.Until)
	}
	if w.UnlinksAfter != nil {
		f.unlinkAt = now + ticks(*w.UnlinksAfter)
	}
	return f
}

// step writes what is due in one tick; false if it did not fit.
func (f *flow) step(now int64) bool {
	w := f.spec
	var bytes, inodes int64
	if now == f.begun {
		bytes, inodes = w.AtOnceBytes, w.AtOnceInodes
	}
	if now >= f.from && (f.until < 0 || now < f.until) {
		f.left += w.BytesPerSecond
		f.leftInodes += w.InodesPerSecond
		bytes += f.left / ticksPerSecond
		inodes += f.leftInodes / ticksPerSecond
		f.left %= ticksPerSecond
		f.leftInodes %= ticksPerSecond
	}
	if now == f.unlinkAt {
		f.to.bytes -= f.file
		f.to.hiddenBytes += f.file
	}
	if w.AtMostBytes > 0 {
		bytes = min(bytes, w.AtMostBytes-f.written)
	}
	if bytes == 0 && inodes == 0 {
		f.short = false
		return true
	}
	gotBytes, gotInodes, ok := f.to.on.take(bytes, inodes)
	f.written += gotBytes
	f.to.inodes += gotInodes
	if f.unlinkAt >= 0 && now >= f.unlinkAt {
		f.to.hiddenBytes += gotBytes
	} else {
		f.to.bytes += gotBytes
		f.file += gotBytes
	}
	f.short = !ok
	return ok
}
