// Package flight keeps the last decisions in one file of a fixed size, as records
// of engine/record: a flight recorder.
//
// The space is taken when the file is made, so that recording needs none: a full
// disk is when it is needed. Records are compressed and written one behind the
// other, and at the end of the file from its beginning again, over the oldest.
// Each has a number and a checksum. A crash at any moment costs the records that
// were being written, and those that they were being written over.
//
// A record of a pass that deleted or evicted something is synced (fdatasync(2))
// when it has been written, others within ten seconds or with the next one. A
// recorder that can't keep up or can't write counts that and stops nobody.
//
// It imports engine/record and reclaim/slotfile. agent and explain may import it.
package flight

import (
	"bytes"
	"cmp"
	"compress/flate"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/cleave-cri/cleave/engine/record"
	"github.com/cleave-cri/cleave/reclaim/slotfile"
)

const (
	// FileName is the file's name below the state folder.
	FileName = "flight.rec"
	// SizeBytes is a good size for the file: some hundred decisions of a large
	// node, some ten thousand of a small one.
	SizeBytes = 16 << 20

	fileMark    = "cleaveFR"
	version     = 1
	headerBytes = 4096 // of the file: mark, version (4), zeroes

	// A record's head: mark (8), number (8), length (4), checksum (4) of all that
	// and of what follows. JSON that is compressed may have the mark in it, but no
	// checksum that is right.
	recordMark  = "\xffcleave\xfe"
	recordBytes = 24
	// align is what records begin at a multiple of.
	align = 64

	// queued is how many records wait to be written. They refer to what decisions
	// were made from, so there are few.
	queued = 16
	// syncEvery is the longest time that a record may not be synced.
	syncEvery = 10 * time.Second
)

var (
	// ErrLocked says that another process records into the file.
	ErrLocked = errors.New("another process records into it")
	// ErrTooLarge says that a record takes more than a quarter of the file.
	ErrTooLarge = errors.New("larger than a quarter of the file")
)

var table = crc32.MakeTable(crc32.Castagnoli)

// Counters are what a recorder has done since it was opened.
type Counters struct {
	// Written records; Dropped ones, because too many waited; Failed ones, and
	// the last error.
	Written, Dropped, Failed uint64
	Error                    string `json:",omitempty"`
}

// Recorder writes records. Append may be called from several goroutines.
type Recorder struct {
	file *os.File
	size int64
	note string

	queue chan entry
	mu    sync.RWMutex
	ended bool // guarded by mu; queue is closed
	done  chan struct{}

	written, dropped, failed atomic.Uint64
	problem                  atomic.Pointer[string]
}

type entry struct {
	record record.Record
	acted  bool
}

// Open opens a recorder's file, or makes one of sizeBytes bytes. What is in a
// file of that size stays; Note says if it was something else. Close ends what it
// starts.
func Open(path string, sizeBytes int64) (_ *Recorder, err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the flight recorder: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("open the flight recorder %s: %w", path, err), f.Close())
		}
	}()
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		if errors.Is(err, syscall.EWOULDBLOCK) {
			err = ErrLocked
		}
		return nil, err
	}
	r := &Recorder{file: f, size: sizeBytes, queue: make(chan entry, queued), done: make(chan struct{})}
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, errors.New("it is no regular file; remove it")
	}
	header := append([]byte(fileMark), version, 0, 0, 0)
	there := make([]byte, len(header))
	_, readErr := f.ReadAt(there, 0)
	if info.Size() != sizeBytes || readErr != nil || !bytes.Equal(there, header) {
		if info.Size() > 0 {
			r.note = "the flight recorder's file had another size or format, and begins anew"
		}
		if err := f.Truncate(0); err != nil {
			return nil, err
		}
	}
	if err := slotfile.Preallocate(f, sizeBytes); err != nil {
		return nil, fmt.Errorf("take %d bytes: %w", sizeBytes, err)
	}
	if _, err := f.WriteAt(header, 0); err != nil {
		return nil, err
	}
	frames, err := scan(f, sizeBytes)
	if err != nil {
		return nil, err
	}
	at, number := int64(headerBytes), uint64(0)
	if n := len(frames); n > 0 {
		at, number = frames[n-1].end(), frames[n-1].number
	}
	go r.write(at, number)
	return r, nil
}

// Note says that what the file had is lost; empty if it is not.
func (r *Recorder) Note() string { return r.note }

// Append hands a record over and returns at once; nobody may change what it
// refers to afterwards. acted says that something was deleted or evicted.
func (r *Recorder) Append(rec record.Record, acted bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if r.ended {
		r.dropped.Add(1)
		return
	}
	select {
	case r.queue <- entry{rec, acted}:
	default:
		r.dropped.Add(1)
	}
}

// Counters returns what has been done so far.
func (r *Recorder) Counters() Counters {
	c := Counters{Written: r.written.Load(), Dropped: r.dropped.Load(), Failed: r.failed.Load()}
	if p := r.problem.Load(); p != nil {
		c.Error = *p
	}
	return c
}

// Close writes what waits, syncs and closes the file. If that takes longer than
// ctx, the disk hangs and its writing is left behind.
func (r *Recorder) Close(ctx context.Context) error {
	r.mu.Lock()
	if !r.ended {
		r.ended = true
		close(r.queue)
	}
	r.mu.Unlock()
	select {
	case <-r.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("close the flight recorder: %w", ctx.Err())
	}
}

func (r *Recorder) write(at int64, number uint64) {
	defer close(r.done)
	defer func() { r.fail(r.file.Close()) }()
	var unsynced bool
	timer := time.NewTimer(syncEvery)
	defer timer.Stop()
	sync := func() {
		if unsynced {
			r.fail(r.file.Sync())
		}
		unsynced = false
	}
	defer sync()
	for {
		select {
		case e, ok := <-r.queue:
			if !ok {
				return
			}
			frame, err := encode(e.record, number+1)
			if err == nil && int64(len(frame)) > (r.size-headerBytes)/4 {
				err = fmt.Errorf("write record of %d bytes: %w", len(frame), ErrTooLarge)
			}
			if err == nil {
				if at+int64(len(frame)) > r.size {
					at = headerBytes
				}
				_, err = r.file.WriteAt(frame, at)
			}
			if err != nil {
				r.failed.Add(1)
				r.fail(err)
				continue
			}
			number++
			at += int64(len(frame))
			unsynced = true
			if e.acted {
				sync()
			}
			r.written.Add(1)
		case <-timer.C:
			sync()
			timer.Reset(syncEvery)
		}
	}
}

func (r *Recorder) fail(err error) {
	if err != nil {
		text := err.Error()
		r.problem.Store(&text)
	}
}

// encode makes a record's bytes in the file, padded.
func encode(rec record.Record, number uint64) ([]byte, error) {
	line, err := record.Append(nil, rec)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	b.Write(make([]byte, recordBytes))
	w, err := flate.NewWriter(&b, flate.BestSpeed)
	if err != nil {
		return nil, err
	}
	if _, err := w.Write(line); err != nil {
		return nil, err
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	length := b.Len() - recordBytes
	b.Write(make([]byte, padded(int64(b.Len()))-int64(b.Len())))
	all := b.Bytes()
	copy(all, recordMark)
	binary.LittleEndian.PutUint64(all[8:], number)
	binary.LittleEndian.PutUint32(all[16:], uint32(length)) //nolint:gosec // compressed, from at most record.MaxBytes
	binary.LittleEndian.PutUint32(all[20:], checksum(all, length))
	return all, nil
}

func checksum(frame []byte, length int) uint32 {
	return crc32.Update(crc32.Checksum(frame[:20], table), table, frame[recordBytes:recordBytes+length])
}

func padded(n int64) int64 { return (n + align - 1) / align * align }

// frame is one whole record in a file.
type frame struct {
	at     int64
	number uint64
	length int
}

func (f frame) end() int64 { return f.at + padded(int64(recordBytes+f.length)) }

// damagedTimes bounds what of a damaged file is read: as many times its size. A whole file has each byte in one record.
const damagedTimes = 4

// scan lists the whole records of a file, oldest first. What is damaged is left out.
func scan(f io.ReaderAt, size int64) ([]frame, error) {
	var out []frame
	head := make([]byte, recordBytes)
	chunk := make([]byte, 1<<20)
	damaged := int64(0)
	for at := int64(headerBytes); at < size; {
		n, err := f.ReadAt(chunk[:min(int64(len(chunk)), size-at)], at)
		if n == 0 && err != nil {
			if errors.Is(err, io.EOF) {
				break
			}
			return nil, fmt.Errorf("read the flight recorder: %w", err)
		}
		next := at + int64(n)/align*align
		if int64(n) < align {
			break
		}
		for o := 0; o+align <= n; o += align {
			if string(chunk[o:o+len(recordMark)]) != recordMark {
				continue
			}
			copy(head, chunk[o:o+recordBytes])
			fr := frame{at: at + int64(o), number: binary.LittleEndian.Uint64(head[8:]), length: int(binary.LittleEndian.Uint32(head[16:]))}
			if fr.length > record.MaxBytes || fr.end() > size || damaged > damagedTimes*size {
				continue
			}
			whole := make([]byte, recordBytes+fr.length)
			if _, err := f.ReadAt(whole, fr.at); err != nil {
				if errors.Is(err, io.EOF) {
					continue
				}
				return nil, fmt.Errorf("read the flight recorder: %w", err)
			}
			if checksum(whole, fr.length) != binary.LittleEndian.Uint32(head[20:]) {
				damaged += int64(len(whole))
				continue
			}
			out = append(out, fr)
			next = fr.end()
			if next-at >= int64(n)/align*align {
				break
			}
			o = int(next-at) - align
			next = at + int64(n)/align*align
		}
		at = next
	}
	slices.SortFunc(out, func(a, b frame) int { return cmp.Compare(a.number, b.number) })
	return out, nil
}

// Is reports whether a file is a flight recorder's, by its first bytes.
func Is(f io.ReaderAt) bool {
	b := make([]byte, len(fileMark))
	n, _ := f.ReadAt(b, 0) //nolint:errcheck // too short is no recorder's
	return string(b[:n]) == fileMark
}

// Lines reads a recorder's file, oldest record first, as the lines that
// record.NewReader reads. It may be at work meanwhile: a record that is
// overwritten before it is read is left out.
func Lines(f io.ReaderAt, size int64) (io.Reader, error) {
	head := make([]byte, len(fileMark)+4)
	if _, err := f.ReadAt(head, 0); err != nil || string(head[:len(fileMark)]) != fileMark {
		return nil, errors.New("it is no file of a flight recorder")
	}
	if v := binary.LittleEndian.Uint32(head[len(fileMark):]); v != version {
		return nil, fmt.Errorf("it is a flight recorder's file of version %d, this cleave reads %d; use the cleave that wrote the file", v, version)
	}
	frames, err := scan(f, size)
	if err != nil {
		return nil, err
	}
	return &lines{file: f, frames: frames}, nil
}

type lines struct {
	file   io.ReaderAt
	frames []frame
	rest   []byte
}

// Read implements [io.Reader].
func (l *lines) Read(b []byte) (int, error) {
	for len(l.rest) == 0 {
		if len(l.frames) == 0 {
			return 0, io.EOF
		}
		fr := l.frames[0]
		l.frames = l.frames[1:]
		whole := make([]byte, recordBytes+fr.length)
		if _, err := l.file.ReadAt(whole, fr.at); err != nil {
			return 0, fmt.Errorf("read the flight recorder: %w", err)
		}
		if binary.LittleEndian.Uint64(whole[8:]) != fr.number || checksum(whole, fr.length) != binary.LittleEndian.Uint32(whole[20:]) {
			continue
		}
		var err error
		if l.rest, err = io.ReadAll(io.LimitReader(flate.NewReader(bytes.NewReader(whole[recordBytes:])), record.MaxBytes+1)); err != nil {
			return 0, fmt.Errorf("read the flight recorder: record %d: %w", fr.number, err)
		}
	}
	n := copy(b, l.rest)
	l.rest = l.rest[n:]
	return n, nil
}
