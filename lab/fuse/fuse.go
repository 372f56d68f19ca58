// Package fuse mounts a filesystem whose server is broken in a known way: it hangs, or it answers zeros. For tests of
// what has to live with such filesystems. The server is in the process itself; it needs root and /dev/fuse.
package fuse

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Server is how the server behaves.
type Server int

const (
	// Hangs takes every request and answers none.
	Hangs Server = iota
	// Zeros has one empty directory, whose attributes are all zero, as are the filesystem's figures.
	Zeros
)

// Mount is a mounted filesystem.
type Mount struct {
	dir    string
	device *os.File
	kind   Server
	asked  atomic.Int64
	served sync.WaitGroup
	closed atomic.Bool
}

// New mounts a filesystem on a directory and answers for it until Close.
func New(dir string, kind Server) (*Mount, error) {
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("mount a filesystem without a good server on %s: open /dev/fuse: %w", dir, err)
	}
	options := fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fd)
	if err := unix.Mount("broken", dir, "fuse", unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
		return nil, errors.Join(fmt.Errorf("mount a filesystem without a good server on %s: %w", dir, err), unix.Close(fd))
	}
	// Only now: poll(2) on a device that serves no mount yet never wakes up.
	m := &Mount{dir: dir, device: os.NewFile(uintptr(fd), "/dev/fuse"), kind: kind}
	m.served.Go(m.serve)
	return m, nil
}

// Asked is how many questions came, greetings aside.
func (m *Mount) Asked() int64 { return m.asked.Load() }

// Close ends the server, so that whoever waits for it gets an error, and unmounts. A second time it does nothing.
func (m *Mount) Close() error {
	if m.closed.Swap(true) {
		return nil
	}
	err := errors.Join(m.device.Close(), unix.Unmount(m.dir, unix.MNT_DETACH))
	m.served.Wait()
	if err != nil {
		return fmt.Errorf("remove the filesystem on %s: %w", m.dir, err)
	}
	return nil
}

// Operations of the protocol (linux/fuse.h).
const (
	opLookup      = 1
	opForget      = 2
	opGetattr     = 3
	opStatfs      = 17
	opRelease     = 18
	opInit        = 26
	opOpendir     = 27
	opReaddir     = 28
	opReleasedir  = 29
	opInterrupt   = 36
	opDestroy     = 38
	opBatchForget = 42
)

// Sizes of the protocol's structures.
const (
	inHeader  = 40
	outHeader = 16
	initOut   = 64
	attrOut   = 104
	openOut   = 16
	statfsOut = 80
)

func (m *Mount) serve() {
	request := make([]byte, 1<<20)
	for {
		n, err := m.device.Read(request)
		switch {
		case errors.Is(err, unix.ENOENT), errors.Is(err, unix.EINTR): // a request that was taken back
			continue
		case err != nil: // unmounted, or closed
			return
		case n < inHeader:
			continue
		}
		operation := binary.NativeEndian.Uint32(request[4:])
		answer, problem, wanted := m.answer(operation)
		if !wanted {
			continue
		}
		out := make([]byte, outHeader, outHeader+len(answer))
		binary.NativeEndian.PutUint32(out, uint32(outHeader+len(answer)))
		binary.NativeEndian.PutUint32(out[4:], uint32(-int32(problem)))
		copy(out[8:], request[8:16]) // the request's number
		// An error is that nobody waits any more.
		_, _ = m.device.Write(append(out, answer...)) //nolint:errcheck // see above
	}
}

// answer gives the answer to a request; wanted is false if there is none.
func (m *Mount) answer(operation uint32) (answer []byte, problem unix.Errno, wanted bool) {
	switch operation {
	case opInit:
		answer = make([]byte, initOut)
		binary.NativeEndian.PutUint32(answer, 7)       // the protocol's version
		binary.NativeEndian.PutUint32(answer[4:], 31)  // and the minor one
		binary.NativeEndian.PutUint16(answer[16:], 12) // requests in the background
		binary.NativeEndian.PutUint16(answer[18:], 9)
		binary.NativeEndian.PutUint32(answer[20:], 4096) // longest write
		return answer, 0, true
	case opForget, opBatchForget, opInterrupt:
		return nil, 0, false
	}
	m.asked.Add(1)
	if m.kind == Hangs {
		return nil, 0, false
	}
	switch operation {
	case opGetattr:
		answer = make([]byte, attrOut)
		binary.NativeEndian.PutUint32(answer[16+60:], unix.S_IFDIR) // the kernel refuses another type than it knows
		return answer, 0, true
	case opOpendir:
		return make([]byte, openOut), 0, true
	case opStatfs:
		return make([]byte, statfsOut), 0, true
	case opReaddir, opRelease, opReleasedir, opDestroy:
		return nil, 0, true
	case opLookup:
		return nil, unix.ENOENT, true
	default:
		return nil, unix.ENOSYS, true
	}
}
