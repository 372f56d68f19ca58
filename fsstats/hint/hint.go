// Package hint tells from cheap counters of the kernel who may have written to a
// disk lately. A hint orders work and proves nothing: a deletion moves no counter
// of these, nor does making an empty file. It imports nothing else of this module; the agent may import it.
//
// A hint is a number. If it is another one than before, there was a write; that
// it is larger means nothing, because counters go with the processes that had
// them.
package hint

import (
	"bytes"
	"errors"
	"hash/fnv"
	"io"
	"os"
	"path/filepath"
	"strconv"
)

// maxBytes is how much of a file of the kernel's is read: io.stat has a line for
// each disk.
const maxBytes = 64 << 10

// OfProcesses is the sum of what processes have made dirty or written past the
// page cache: write_bytes of /proc/PID/io (proc_pid_io(5)), stores into mapped
// files included. What they sent to sockets and pipes does not count. It needs the
// right to trace them. ok is false if none of them could be read.
func OfProcesses(pids []int) (counter uint64, ok bool) {
	var buffer [1024]byte
	for _, pid := range pids {
		content, err := read("/proc/"+strconv.Itoa(pid)+"/io", buffer[:])
		if err != nil {
			continue // it has ended
		}
		if n, found := field(content, "write_bytes: "); found {
			counter += n
			ok = true
		}
	}
	return counter, ok
}

// OfCgroup is made from the counters of a cgroup of version 2: what it has
// written to disks (io.stat, at the time of the write to the disk) and what it has
// in memory to be written (memory.stat, at once). ok is false where the cgroup has
// neither, as on version 1.
func OfCgroup(folder string) (counter uint64, ok bool) {
	buffer := make([]byte, maxBytes)
	sum := fnv.New64a()
	if content, err := read(filepath.Join(folder, "io.stat"), buffer); err == nil {
		ok = true
		for line := range bytes.Lines(content) {
			for _, name := range []string{" wbytes=", " dbytes="} {
				n, _ := field(line, name)
				sum.Write(strconv.AppendUint(nil, n, 16))
			}
		}
	}
	if content, err := read(filepath.Join(folder, "memory.stat"), buffer); err == nil {
		for _, name := range []string{"\nfile_dirty ", "\nfile_writeback "} {
			n, found := field(content, name)
			ok = ok || found
			sum.Write(strconv.AppendUint([]byte{' '}, n, 16))
		}
	}
	if !ok {
		return 0, false
	}
	return sum.Sum64(), true
}

// field finds the number behind a name.
func field(content []byte, name string) (n uint64, found bool) {
	_, rest, found := bytes.Cut(content, []byte(name))
	if !found {
		return 0, false
	}
	end := 0
	for end < len(rest) && rest[end] >= '0' && rest[end] <= '9' {
		end++
	}
	n, err := strconv.ParseUint(string(rest[:end]), 10, 64)
	return n, err == nil
}

func read(path string, buffer []byte) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close() //nolint:errcheck // only read
	n, err := io.ReadFull(f, buffer)
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		err = nil
	}
	return buffer[:n], err
}
