package kubeletapi

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// listening returns the TCP ports on which a process listens, by its own descriptors (proc_pid_net(5), proc_pid_fd(5)). The
// process has to be in the network namespace of cleave, for otherwise its ports are not reached.
func listening(proc string, pid int) (map[int32]bool, error) {
	proc = cmp.Or(proc, "/proc")
	at := func(who string, elements ...string) string {
		return filepath.Join(append([]string{proc, who}, elements...)...)
	}
	who := strconv.Itoa(pid)
	ours, err := os.Readlink(at("self", "ns", "net"))
	if err != nil {
		return nil, err
	}
	theirs, err := os.Readlink(at(who, "ns", "net"))
	if err != nil {
		return nil, err
	}
	if ours != theirs {
		return nil, fmt.Errorf("process %d is in another network namespace", pid)
	}
	sockets := map[string]int32{}
	for _, table := range []string{"tcp", "tcp6"} {
		if err := readTable(at(who, "net", table), sockets); err != nil {
			return nil, err
		}
	}
	entries, err := os.ReadDir(at(who, "fd"))
	if err != nil {
		return nil, err
	}
	ports := map[int32]bool{}
	for _, e := range entries {
		target, err := os.Readlink(at(who, "fd", e.Name()))
		if err != nil {
			continue // closed meanwhile
		}
		inode, ok := strings.CutPrefix(target, "socket:[")
		if port, known := sockets[strings.TrimSuffix(inode, "]")]; ok && known {
			ports[port] = true
		}
	}
	return ports, nil
}

// readTable adds the listening sockets of a table of /proc: inode number to port.
func readTable(path string, sockets map[string]int32) error {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // a kernel without IPv6
	}
	if err != nil {
		return err
	}
	defer f.Close() //nolint:errcheck // only read
	const (
		local, state, inode = 1, 3, 9
		listens             = "0A" // TCP_LISTEN
	)
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) <= inode || fields[state] != listens {
			continue
		}
		_, hex, ok := strings.Cut(fields[local], ":")
		if !ok {
			continue
		}
		port, err := strconv.ParseInt(hex, 16, 32)
		if err != nil {
			continue
		}
		sockets[fields[inode]] = int32(port)
	}
	return lines.Err()
}
