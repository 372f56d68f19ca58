// Package lastlogs keeps the ends of the logs of pods that were evicted, whose own files go with the pod. They are in one file of
// fixed size, whose space is taken when it is made, so that keeping them needs none: evictions take place on full disks. Its slots
// are written in turn, over the oldest. Logs may hold secrets: the file is root's alone.
//
// It imports agent/page and reclaim/slotfile of this module; agent and cmd may import it.
package lastlogs

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/cleave-cri/cleave/agent/page"
	"github.com/cleave-cri/cleave/reclaim/slotfile"
)

const (
	// FileName is the file's name below the state folder.
	FileName = "evicted.logs"
	// MaxBytes is how much of the end of a log is kept.
	MaxBytes = 64 << 10
	// slots is how many logs are kept; the file has 8 MiB.
	slots     = 120
	headBytes = 4 << 10
	slotBytes = headBytes + MaxBytes
	// SizeBytes is the file's.
	SizeBytes = slots * slotBytes

	// A slot's head: mark (8), number (8), length of what is said of the log (4) and of its text (4), checksum (4) of all
	// of these and of both; then what is said, as JSON.
	mark       = "cleaveLL"
	fixedBytes = 28
)

var table = crc32.MakeTable(crc32.Castagnoli)

// Log is the end of one.
type Log struct {
	Namespace, Pod, UID, Container string
	// File is its path below the pods' log directory.
	File string
	// At is when it was read, SizeBytes what the whole file had.
	At        time.Time
	SizeBytes int64
	// Text is its end.
	Text []byte `json:"-"`
}

// Keeper keeps them. Its methods may be called from several goroutines.
type Keeper struct {
	mu     sync.Mutex
	file   *os.File // guarded by mu
	number uint64   // of the newest; guarded by mu
}

// Open opens the file, or makes it. A file that is none of this package is emptied.
func Open(path string) (_ *Keeper, err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the logs of evicted pods: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("open the logs of evicted pods %s: %w", path, err), f.Close())
		}
	}()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, errors.New("it is no regular file; remove it")
	}
	if err := f.Chmod(0o600); err != nil { // whoever made it
		return nil, err
	}
	if info.Size() != SizeBytes {
		if err := f.Truncate(0); err != nil {
			return nil, err
		}
	}
	if err := slotfile.Preallocate(f, SizeBytes); err != nil {
		return nil, fmt.Errorf("take %d bytes: %w", SizeBytes, err)
	}
	k := &Keeper{file: f}
	list, err := scan(f)
	if err != nil {
		return nil, err
	}
	if n := len(list); n > 0 {
		k.number = list[n-1].number
	}
	return k, nil
}

// Keep writes a log's end down, and returns when it would outlast a loss of power. Of a longer text the end is kept.
func (k *Keeper) Keep(l Log) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	slot, err := encode(l, k.number+1)
	if err != nil {
		return fmt.Errorf("keep the log of %s/%s: %w", l.Namespace, l.Pod, err)
	}
	if _, err := k.file.WriteAt(slot, int64(k.number%slots)*slotBytes); err != nil {
		return fmt.Errorf("keep the log of %s/%s: %w", l.Namespace, l.Pod, err)
	}
	k.number++
	if err := k.file.Sync(); err != nil {
		return fmt.Errorf("keep the log of %s/%s: %w", l.Namespace, l.Pod, err)
	}
	return nil
}

// Close closes the file.
func (k *Keeper) Close() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.file.Close()
}

func encode(l Log, number uint64) ([]byte, error) {
	said, err := json.Marshal(l)
	if err != nil {
		return nil, err
	}
	if len(said) > headBytes-fixedBytes {
		return nil, errors.New("its names are too long")
	}
	l.Text = l.Text[max(0, len(l.Text)-MaxBytes):]
	slot := make([]byte, headBytes+len(l.Text))
	copy(slot, mark)
	binary.LittleEndian.PutUint64(slot[8:], number)
	binary.LittleEndian.PutUint32(slot[16:], uint32(len(said)))   //nolint:gosec // bounded above
	binary.LittleEndian.PutUint32(slot[20:], uint32(len(l.Text))) //nolint:gosec // bounded above
	copy(slot[fixedBytes:], said)
	copy(slot[headBytes:], l.Text)
	binary.LittleEndian.PutUint32(slot[24:], sum(slot, len(said), len(l.Text)))
	return slot, nil
}

func sum(slot []byte, said, text int) uint32 {
	s := crc32.Checksum(slot[:24], table)
	s = crc32.Update(s, table, slot[fixedBytes:fixedBytes+said])
	return crc32.Update(s, table, slot[headBytes:headBytes+text])
}

type numbered struct {
	number uint64
	log    Log
}

// scan reads all whole slots, oldest first.
func scan(f io.ReaderAt) (out []numbered, _ error) {
	slot := make([]byte, slotBytes)
	for i := range int64(slots) {
		n, err := f.ReadAt(slot, i*slotBytes)
		if err != nil && (n == 0 || !errors.Is(err, io.EOF)) {
			if errors.Is(err, io.EOF) {
				break
			}
			return nil, fmt.Errorf("read the logs of evicted pods: %w", err)
		}
		if n < slotBytes || string(slot[:len(mark)]) != mark {
			continue
		}
		said, text := int64(binary.LittleEndian.Uint32(slot[16:])), int64(binary.LittleEndian.Uint32(slot[20:]))
		if said > headBytes-fixedBytes || text > MaxBytes || sum(slot, int(said), int(text)) != binary.LittleEndian.Uint32(slot[24:]) {
			continue // a crash while it was written
		}
		entry := numbered{number: binary.LittleEndian.Uint64(slot[8:])}
		if json.Unmarshal(slot[fixedBytes:fixedBytes+said], &entry.log) != nil {
			continue
		}
		entry.log.Text = bytes.Clone(slot[headBytes : headBytes+text])
		out = append(out, entry)
	}
	slices.SortFunc(out, func(a, b numbered) int { return cmp.Compare(a.number, b.number) })
	return out, nil
}

// Read reads the logs of a file, oldest first. Somebody may write to it meanwhile.
func Read(f io.ReaderAt) (out []Log, _ error) {
	list, err := scan(f)
	for _, n := range list {
		out = append(out, n.log)
	}
	return out, err
}

// Logs are logs that were kept, the oldest first.
type Logs []Shown

// Shown is a log for people and programs.
type Shown struct {
	Log
	// Lines is its text as it is, with what is no UTF-8 replaced.
	Lines string `json:"text"`
}

// ReadFile reads the logs of a file. since leaves out what is older; with a pod's name, "name" or "namespace/name", or its UID, there
// are only those of that one.
func ReadFile(path string, since time.Time, pod string) (out Logs, _ error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("%w: no logs are kept; reclaim.keepLogs keeps those of pods that are evicted from then on", err)
	}
	if err != nil {
		return nil, err
	}
	list, err := Read(f)
	for _, l := range list {
		if !l.At.Before(since) && (pod == "" || pod == l.UID || pod == l.Pod || pod == l.Namespace+"/"+l.Pod) {
			out = append(out, Shown{Log: l, Lines: strings.ToValidUTF8(string(l.Text), "\ufffd")})
		}
	}
	return out, errors.Join(err, f.Close())
}

// WriteText prints logs for people. Each line is written as [page.Name] writes it, so that no log changes the terminal.
func (logs Logs) WriteText(w io.Writer, _ time.Time) error {
	out := page.NewWriter(w)
	if len(logs) == 0 {
		out.Printf("No log is kept for that.\n")
	}
	for i, l := range logs {
		if i > 0 {
			out.Printf("\n")
		}
		out.Printf("%s, container %s of %s/%s (%s), the last %d bytes of %d:\n", l.At.UTC().Format(time.RFC3339), l.Container, l.Namespace, l.Pod, l.UID, len(l.Text), l.SizeBytes)
		for line := range strings.Lines(string(l.Text)) {
			out.Printf("  %s\n", page.Name(strings.TrimSuffix(line, "\n")))
		}
	}
	return out.Err()
}
