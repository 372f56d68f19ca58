package kubeletapi

import (
	"bufio"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// listening returns the TCP ports on which a process listens, and at which addresses, by its own descriptors (proc_pid_net(5), proc_pid_fd(5)). The
// process has to be in the network namespace of cleave, for otherwise its ports are not reached.
func listening(proc string, pid int) (map[int32][]netip.Addr, error) {
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
	sockets := map[string]netip.AddrPort{}
	for _, table := range []string{"tcp", "tcp6"} {
		if err := readTable(at(who, "net", table), sockets); err != nil {
			return nil, err
		}
	}
	entries, err := os.ReadDir(at(who, "fd"))
	if err != nil {
		return nil, err
	}
	ports := map[int32][]netip.Addr{}
	for _, e := range entries {
		target, err := os.Readlink(at(who, "fd", e.Name()))
		if err != nil {
			continue // closed meanwhile
		}
		inode, ok := strings.CutPrefix(target, "socket:[")
		if at, known := sockets[strings.TrimSuffix(inode, "]")]; ok && known {
			port := int32(at.Port())
			ports[port] = append(ports[port], at.Addr())
		}
	}
	return ports, nil
}

// readTable adds the listening sockets of a table of /proc: inode number to address.
func readTable(path string, sockets map[string]netip.AddrPort) error {
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
		if at, ok := parseLocal(fields[local]); ok {
			sockets[fields[inode]] = at
		}
	}
	return lines.Err()
}

// parseLocal reads an address and port as the tables have them: in base 16, the address as the machine's own 32-bit numbers, which hold
// the bytes in network order (proc_pid_net(5)).
func parseLocal(text string) (netip.AddrPort, bool) {
	address, port, _ := strings.Cut(text, ":")
	number, err := strconv.ParseUint(port, 16, 16)
	if err != nil {
		return netip.AddrPort{}, false
	}
	const word = 8 // digits
	var bytes []byte
	for ; len(address) >= word; address = address[word:] {
		v, err := strconv.ParseUint(address[:word], 16, 32)
		if err != nil {
			return netip.AddrPort{}, false
		}
		bytes = binary.NativeEndian.AppendUint32(bytes, uint32(v))
	}
	a, ok := netip.AddrFromSlice(bytes)
	return netip.AddrPortFrom(a, uint16(number)), ok && address == ""
}
