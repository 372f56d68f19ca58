// Package slotfile keeps a small value in a file whose space was taken once, so
// that replacing it never needs space: a full disk is when it is needed. It has
// two slots. A value is written to the older one and synced; a crash at any moment
// leaves the other one whole, and a value that is not whole is not read.
//
// It imports nothing of this module. reclaim/seen and agent may import it.
package slotfile

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	// headBytes is a slot's head: mark (8), version (4), length (4), number (8),
	// checksum of all that and of the value (4).
	headBytes = 28
	mark      = "cleaveSL"

	// noCopyOnWrite is FS_NOCOW_FL of linux/fs.h.
	noCopyOnWrite = 0x0080_0000
)

var (
	// ErrDamaged says that there is something in the file and no slot of it is
	// whole.
	ErrDamaged = errors.New("no slot is whole")
	// ErrTooLarge says that a value does not fit in a slot.
	ErrTooLarge = errors.New("larger than a slot")
)

var table = crc32.MakeTable(crc32.Castagnoli)

// File is an open file. It is for one caller at a time.
type File struct {
	file      *os.File
	slotBytes int64
	number    uint64 // of the newest value
	newest    int    // its slot
}

// Open opens a file, or makes one with room for two values of slotBytes bytes,
// heads included. A file of another size is made anew, and its content is lost.
func Open(path string, slotBytes int64) (_ *File, err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open state: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close())
		}
	}()
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("open state: %w", err)
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("open state: %s is no regular file; remove it", path)
	}
	if info.Size() != 2*slotBytes {
		if err := f.Truncate(0); err != nil {
			return nil, fmt.Errorf("make state %s: %w", path, err)
		}
	}
	// Also where the size is right: a crash may have come before it, and it costs
	// nothing if the space is taken.
	if err := Preallocate(f, 2*slotBytes); err != nil {
		return nil, fmt.Errorf("make state %s: %w", path, err)
	}
	if err := syncDir(filepath.Dir(path)); err != nil {
		return nil, fmt.Errorf("make state %s: %w", path, err)
	}
	return &File{file: f, slotBytes: slotBytes, newest: 1}, nil
}

// Restore opens a file as Open does and decodes its value, which is JSON, into a
// value. What can't be understood is no error: note says what is lost then, and
// into may have been changed.
func Restore(path string, slotBytes int64, version uint32, into any) (_ *File, note string, err error) {
	f, err := Open(path, slotBytes)
	if err != nil {
		return nil, "", err
	}
	value, ver, err := f.Load()
	switch {
	case errors.Is(err, ErrDamaged):
		return f, err.Error(), nil
	case err != nil:
		return nil, "", errors.Join(err, f.Close())
	case value == nil:
		return f, "", nil
	case ver != version:
		return f, fmt.Sprintf("the file has version %d, this cleave knows %d", ver, version), nil
	}
	if err := json.Unmarshal(value, into); err != nil {
		return f, err.Error(), nil
	}
	return f, "", nil
}

// Preallocate takes space for a file, so that writing to it later needs none
// (fallocate(2)). On filesystems that copy on write it asks for writing in place;
// it has to be called while the file is empty for that (chattr(1), C). Space that
// is taken already is not asked for again: a full xfs refuses that.
func Preallocate(f *os.File, bytes int64) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok && info.Size() >= bytes && st.Blocks*512 >= bytes {
		return nil
	}
	conn, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	if err := conn.Control(func(fd uintptr) {
		// Other filesystems have no such flag, which is as good. Nothing depends
		// on it where it is refused but the promise itself.
		if flags, err := unix.IoctlGetInt(int(fd), unix.FS_IOC_GETFLAGS); err == nil && flags&noCopyOnWrite == 0 {
			_ = unix.IoctlSetPointerInt(int(fd), unix.FS_IOC_SETFLAGS, flags|noCopyOnWrite) //nolint:errcheck // see above
		}
		for {
			if inner = unix.Fallocate(int(fd), 0, 0, bytes); !errors.Is(inner, unix.EINTR) {
				return
			}
		}
	}); err != nil {
		return err
	}
	if errors.Is(inner, unix.EOPNOTSUPP) {
		inner = fmt.Errorf("%w: the filesystem can't take space beforehand", errors.ErrUnsupported)
	}
	return inner
}

// Load returns the newest whole value and its version, nil if there was never
// one.
func (s *File) Load() (value []byte, version uint32, err error) {
	empty := true
	for slot := range 2 {
		v, number, ver, blank, err := s.read(slot)
		if err != nil {
			return nil, 0, err
		}
		empty = empty && blank
		if v != nil && (value == nil || number > s.number) {
			value, version = v, ver
			s.number, s.newest = number, slot
		}
	}
	if value == nil && !empty {
		return nil, 0, fmt.Errorf("read state %s: %w", s.file.Name(), ErrDamaged)
	}
	return value, version, nil
}

// read reads one slot. A nil value means that it is not whole, blank that
// nothing was ever written there.
func (s *File) read(slot int) (value []byte, number uint64, version uint32, blank bool, err error) {
	head := make([]byte, headBytes)
	if _, err := s.file.ReadAt(head, int64(slot)*s.slotBytes); err != nil {
		return nil, 0, 0, false, fmt.Errorf("read state %s: %w", s.file.Name(), err)
	}
	if [headBytes]byte(head) == [headBytes]byte{} {
		return nil, 0, 0, true, nil
	}
	length := int64(binary.LittleEndian.Uint32(head[12:]))
	if string(head[:8]) != mark || length > s.slotBytes-headBytes {
		return nil, 0, 0, false, nil
	}
	value = make([]byte, length)
	if _, err := s.file.ReadAt(value, int64(slot)*s.slotBytes+headBytes); err != nil {
		return nil, 0, 0, false, fmt.Errorf("read state %s: %w", s.file.Name(), err)
	}
	if sum(head, value) != binary.LittleEndian.Uint32(head[24:]) {
		return nil, 0, 0, false, nil
	}
	return value, binary.LittleEndian.Uint64(head[16:]), binary.LittleEndian.Uint32(head[8:]), false, nil
}

func sum(head, value []byte) uint32 {
	return crc32.Update(crc32.Checksum(head[:24], table), table, value)
}

// Save replaces the value. When it returns nil, the value outlasts a loss of
// power. Load must have been called before.
func (s *File) Save(value []byte, version uint32) error {
	if int64(len(value)) > s.slotBytes-headBytes {
		return fmt.Errorf("write state %s: %d bytes: %w", s.file.Name(), len(value), ErrTooLarge)
	}
	slot := 1 - s.newest
	all := make([]byte, headBytes, headBytes+len(value))
	copy(all, mark)
	binary.LittleEndian.PutUint32(all[8:], version)
	binary.LittleEndian.PutUint32(all[12:], uint32(len(value))) //nolint:gosec // not above slotBytes
	binary.LittleEndian.PutUint64(all[16:], s.number+1)
	binary.LittleEndian.PutUint32(all[24:], sum(all, value))
	if _, err := s.file.WriteAt(append(all, value...), int64(slot)*s.slotBytes); err != nil {
		return fmt.Errorf("write state %s: %w", s.file.Name(), err)
	}
	if err := s.file.Sync(); err != nil {
		return fmt.Errorf("write state %s: %w", s.file.Name(), err)
	}
	s.number, s.newest = s.number+1, slot
	return nil
}

// MaxBytes is the largest value that fits.
func (s *File) MaxBytes() int { return int(s.slotBytes - headBytes) }

// Close closes the file.
func (s *File) Close() error { return s.file.Close() }

func syncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
