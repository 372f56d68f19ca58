package boltfile

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// ErrDamaged says that a database's pages make no sense.
var ErrDamaged = errors.New("the database is damaged")

// Verify reads all pages of the bbolt database at path that are in use, and says
// with [ErrDamaged] what is wrong. It reads the file and does not map it: bbolt
// itself ends the process at a page that lies beyond the file's end, or panics in
// a goroutine of its own, or runs in a circle. Only a database that nobody writes
// to can be verified; while somebody has it open to write, it is [ErrLocked].
//
// The format is that of bbolt 1.5, internal/common: page.go, meta.go, bucket.go.
func Verify(path string) (err error) {
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("verify the database: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			err = fmt.Errorf("%w: find it with `fuser %s` and stop it first", ErrLocked, path)
		}
		return fmt.Errorf("verify the database %s: %w", path, err)
	}
	// Closing alone would not do, see Lock.
	defer func() { err = errors.Join(err, unix.Flock(int(f.Fd()), unix.LOCK_UN)) }()
	info, err := f.Stat()
	if err != nil {
		return fmt.Errorf("verify the database: %w", err)
	}
	if err := verify(f, info.Size()); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

const (
	pageHeaderBytes = 16 // id, flags, count, overflow
	elementBytes    = 16 // of a branch and of a leaf
	bucketBytes     = 16 // root, sequence
	metaBytes       = 64

	branchPage   = 0x01
	leafPage     = 0x02
	freelistPage = 0x10
	bucketLeaf   = 0x01 // an element of a leaf that is a bucket

	noFreelist = ^uint64(0)
	// manyFree as a count says that the first entry is the count.
	manyFree = 0xffff
)

// native is the order of bytes that bbolt writes.
var native = binary.NativeEndian

func damaged(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrDamaged, fmt.Sprintf(format, args...))
}

// meta is what a meta page says.
type meta struct {
	pageBytes      int64
	root, freelist uint64
	pages          uint64 // number of pages that were ever given out
	transaction    uint64
}

// parseMeta wants the page's content behind its header.
func parseMeta(b []byte) (m meta, ok bool) {
	const magic, version = 0xED0CDAED, 2
	sum := fnv.New64a()
	_, _ = sum.Write(b[:metaBytes-8])
	if native.Uint32(b) != magic || native.Uint32(b[4:]) != version || native.Uint64(b[56:]) != sum.Sum64() {
		return meta{}, false
	}
	m = meta{
		pageBytes: int64(native.Uint32(b[8:])), root: native.Uint64(b[16:]), freelist: native.Uint64(b[32:]),
		pages: native.Uint64(b[40:]), transaction: native.Uint64(b[48:]),
	}
	return m, m.pageBytes >= 1<<10 && m.pageBytes <= 1<<24 && m.pageBytes&(m.pageBytes-1) == 0
}

// readMeta finds the newest meta page that is whole: a crash may leave one of the
// two half written. The second page's place is known only from the page's size,
// so all sizes are tried, as bbolt does.
func readMeta(r io.ReaderAt, sizeBytes int64) (newest meta, found bool) {
	look := func(at int64) {
		b := make([]byte, metaBytes)
		if at+pageHeaderBytes+metaBytes > sizeBytes {
			return
		}
		if _, err := r.ReadAt(b, at+pageHeaderBytes); err != nil {
			return
		}
		m, ok := parseMeta(b)
		if ok && (at == 0 || at == m.pageBytes) && (!found || m.transaction > newest.transaction) {
			newest, found = m, true
		}
	}
	look(0)
	for bytes := int64(1 << 10); bytes <= 1<<24; bytes <<= 1 {
		look(bytes)
	}
	return newest, found
}

func verify(r io.ReaderAt, sizeBytes int64) error {
	m, ok := readMeta(r, sizeBytes)
	if !ok {
		return damaged("neither of its two first pages is whole")
	}
	if have := uint64(sizeBytes / m.pageBytes); m.pages > have {
		return damaged("it was cut off: %d pages are there of %d", have, m.pages)
	}
	v := verifier{file: r, meta: m, used: make([]bool, m.pages)}
	pending := []subtree{{page: m.root}}
	for len(pending) > 0 {
		next := pending[len(pending)-1]
		pending = pending[:len(pending)-1]
		id := next.page
		kind, count, body, err := v.page(id)
		if err != nil {
			return err
		}
		if kind != branchPage && kind != leafPage {
			return damaged("page %d is of the kind %#x, not one of a tree", id, kind)
		}
		below, err := next.elements(kind, count, body)
		if err != nil {
			return fmt.Errorf("page %d: %w", id, err)
		}
		pending = append(pending, below...)
	}
	if m.freelist == noFreelist {
		return nil
	}
	return v.free()
}

// verifier remembers which pages are in use.
type verifier struct {
	file io.ReaderAt
	meta meta
	used []bool
}

// page reads a page with what follows it, which may be in use only once.
func (v *verifier) page(id uint64) (kind uint16, count int, body []byte, err error) {
	if id < 2 || id >= v.meta.pages {
		return 0, 0, nil, damaged("page %d is pointed to, and there are %d", id, v.meta.pages)
	}
	header := make([]byte, pageHeaderBytes)
	at := int64(id) * v.meta.pageBytes
	if _, err := v.file.ReadAt(header, at); err != nil {
		return 0, 0, nil, fmt.Errorf("read page %d: %w", id, err)
	}
	if says := native.Uint64(header); says != id {
		return 0, 0, nil, damaged("page %d calls itself page %d", id, says)
	}
	overflow := uint64(native.Uint32(header[12:]))
	if overflow >= v.meta.pages-id {
		return 0, 0, nil, damaged("page %d is longer than the database", id)
	}
	for i := id; i <= id+overflow; i++ {
		if v.used[i] {
			return 0, 0, nil, damaged("page %d is used twice", i)
		}
		v.used[i] = true
	}
	body = make([]byte, int64(overflow+1)*v.meta.pageBytes-pageHeaderBytes)
	if _, err := v.file.ReadAt(body, at+pageHeaderBytes); err != nil {
		return 0, 0, nil, fmt.Errorf("read page %d: %w", id, err)
	}
	return native.Uint16(header[8:]), int(native.Uint16(header[10:])), body, nil
}

// subtree is a page of a tree and the keys that may be in and below it: from the
// first on, and less than to. nil: any.
type subtree struct {
	page     uint64
	from, to []byte
}

// elements looks at the elements of the page, and gives what they point to.
func (s subtree) elements(kind uint16, count int, body []byte) (below []subtree, err error) {
	if count*elementBytes > len(body) {
		return nil, damaged("%d elements are too many", count)
	}
	if kind == branchPage && count == 0 {
		return nil, damaged("a branch without elements")
	}
	last := s.from
	for i := range count {
		at := uint64(i * elementBytes)
		e := body[at : at+elementBytes]
		var position, keyBytes, valueBytes uint64
		if kind == branchPage {
			position, keyBytes = uint64(native.Uint32(e)), uint64(native.Uint32(e[4:]))
		} else {
			position, keyBytes, valueBytes = uint64(native.Uint32(e[4:])), uint64(native.Uint32(e[8:])), uint64(native.Uint32(e[12:]))
		}
		begin := at + position
		if begin+keyBytes+valueBytes > uint64(len(body)) {
			return nil, damaged("element %d lies beyond its page", i)
		}
		key, value := body[begin:begin+keyBytes], body[begin+keyBytes:begin+keyBytes+valueBytes]
		if order := bytes.Compare(last, key); order > 0 || order == 0 && i > 0 || s.to != nil && bytes.Compare(key, s.to) >= 0 {
			return nil, damaged("element %d is out of order", i)
		}
		last = key
		switch {
		case kind == branchPage:
			if i > 0 {
				below[i-1].to = key
			}
			below = append(below, subtree{page: native.Uint64(e[8:]), from: key, to: s.to})
		case native.Uint32(e)&bucketLeaf != 0:
			pages, err := bucket(value)
			if err != nil {
				return nil, fmt.Errorf("element %d: %w", i, err)
			}
			below = append(below, pages...)
		}
	}
	return below, nil
}

// bucket gives the pages that a bucket points to: its root, or none if it is so
// small that its only page is in the value itself.
func bucket(value []byte) (below []subtree, err error) {
	if len(value) < bucketBytes {
		return nil, damaged("a bucket of %d bytes", len(value))
	}
	if root := native.Uint64(value); root != 0 {
		return []subtree{{page: root}}, nil
	}
	page := value[bucketBytes:]
	if len(page) < pageHeaderBytes || native.Uint16(page[8:]) != leafPage {
		return nil, damaged("a small bucket without its page")
	}
	return subtree{}.elements(leafPage, int(native.Uint16(page[10:])), page[pageHeaderBytes:])
}

// free looks at the list of free pages, when all that are in use are known.
func (v *verifier) free() error {
	id := v.meta.freelist
	kind, count, body, err := v.page(id)
	if err != nil {
		return err
	}
	if kind != freelistPage {
		return damaged("page %d is of the kind %#x, not the list of free pages", id, kind)
	}
	n := uint64(count)
	if count == manyFree {
		n, body = native.Uint64(body), body[8:]
	}
	if n > uint64(len(body)/8) {
		return damaged("the list of free pages on page %d is longer than its page", id)
	}
	for i := range n {
		page := native.Uint64(body[i*8:])
		if page < 2 || page >= v.meta.pages {
			return damaged("page %d is free, and there are %d", page, v.meta.pages)
		}
		if v.used[page] {
			return damaged("page %d is free and in use, or free twice", page)
		}
		v.used[page] = true
	}
	return nil
}
