package orphan

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/cleave-cri/cleave/fsstats"
)

// All that reads /proc and cgroups is in this file.

// deleted is what the kernel appends to the name of a file that has none any
// more (proc_pid_fd(5)).
const deleted = " (deleted)"

// errGone says that a process has ended or a file was closed since it was listed.
var errGone = errors.New("it is gone")

// unlessGone turns the errors by which that shows into errGone.
func unlessGone(err error) error {
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("%w: %w", errGone, err)
	}
	return err
}

// process is a process that is looked at. Its folder in /proc stays open, so that
// another process with its number can't be taken for it.
type process struct {
	pid  int
	name string // pid in digits
	dir  *os.File
}

func openProcess(pid int) (*process, error) {
	name := strconv.Itoa(pid)
	dir, err := os.Open("/proc/" + name)
	if err != nil {
		return nil, unlessGone(err)
	}
	return &process{pid: pid, name: name, dir: dir}, nil
}

func (p *process) close() {
	_ = p.dir.Close() //nolint:errcheck // only read
}

// attributes is what has to be known of a file.
type attributes struct {
	device  fsstats.Device
	inode   uint64
	mount   uint64 // 0 before Linux 5.8
	links   uint32
	bytes   int64
	regular bool
}

// stat follows a link of the process's folder. It asks no server and opens
// nothing.
func (p *process) stat(link string) (attributes, error) {
	var stx unix.Statx_t
	const (
		flags = unix.AT_NO_AUTOMOUNT | unix.AT_STATX_DONT_SYNC
		mask  = unix.STATX_TYPE | unix.STATX_NLINK | unix.STATX_INO | unix.STATX_BLOCKS | unix.STATX_MNT_ID
	)
	for {
		err := unix.Statx(int(p.dir.Fd()), link, flags, mask, &stx)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return attributes{}, unlessGone(os.NewSyscallError("statx", err))
		}
		break
	}
	a := attributes{
		device:  fsstats.Device{Major: stx.Dev_major, Minor: stx.Dev_minor},
		inode:   stx.Ino,
		links:   stx.Nlink,
		bytes:   int64(stx.Blocks) * 512,
		regular: stx.Mode&unix.S_IFMT == unix.S_IFREG,
	}
	if stx.Mask&unix.STATX_MNT_ID != 0 {
		a.mount = stx.Mnt_id
	}
	return a, nil
}

// descriptors calls found for each open file that is deleted, and entry before
// each open file. It ends with the first error of either.
func (p *process) descriptors(entry func() error, found func(link, name string, mapped bool) error) error {
	dir, err := openAt(p.dir, "fd")
	if err != nil {
		return err
	}
	defer dir.Close() //nolint:errcheck // only read
	buffer := make([]byte, 4096+len(deleted))
	for {
		names, err := dir.Readdirnames(256)
		for _, name := range names {
			if err := entry(); err != nil {
				return err
			}
			n, err := unix.Readlinkat(int(dir.Fd()), name, buffer)
			switch {
			case errors.Is(err, unix.ENAMETOOLONG): // then its attributes tell
				n = copy(buffer, "(a name too long to be told)"+deleted)
			case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ESRCH):
				continue
			case err != nil:
				return fmt.Errorf("read the link fd/%s: %w", name, err)
			}
			target := string(buffer[:n])
			if !strings.HasSuffix(target, deleted) || target[0] != '/' || inMemoryName(target) {
				continue
			}
			if err := found("fd/"+name, target, false); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return unlessGone(err)
		}
	}
}

// inMemoryName says whether a name is one that the kernel gives to memory.
func inMemoryName(target string) bool {
	return strings.HasPrefix(target, "/memfd:") || strings.HasPrefix(target, "/SYSV") || target == "/dev/zero"+deleted ||
		strings.HasPrefix(target, "/anon_hugepage") || strings.HasPrefix(target, "/drm mm object")
}

// mappings does the same for files that are mapped, each once.
func (p *process) mappings(entry func() error, found func(link, name string, mapped bool) error) error {
	f, err := openAt(p.dir, "maps")
	if err != nil {
		return err
	}
	defer f.Close() //nolint:errcheck // only read
	known := map[string]bool{}
	lines := bufio.NewScanner(f)
	lines.Buffer(make([]byte, 0, 8<<10), 64<<10)
	for lines.Scan() {
		if err := entry(); err != nil {
			return err
		}
		area, file, name, ok := parseMapping(lines.Bytes())
		if !ok || known[file] {
			continue
		}
		known[file] = true
		if err := found("map_files/"+area, name, true); err != nil {
			return err
		}
	}
	return unlessGone(lines.Err())
}

// parseMapping takes a line of /proc/PID/maps apart, if it is that of a file that
// is deleted: its area of addresses, its device and inode as one word, its name.
func parseMapping(line []byte) (area, file, name string, ok bool) {
	if !bytes.HasSuffix(line, []byte(deleted)) {
		return "", "", "", false
	}
	var fields [5][]byte // area, permissions, offset, device, inode
	rest := line
	for i := range fields {
		fields[i], rest, ok = bytes.Cut(rest, []byte{' '})
		if !ok || len(fields[i]) == 0 {
			return "", "", "", false
		}
	}
	name = string(bytes.TrimLeft(rest, " "))
	if name == "" || name[0] != '/' || inMemoryName(name) || string(fields[4]) == "0" {
		return "", "", "", false
	}
	from, to, ok := bytes.Cut(fields[0], []byte{'-'})
	if !ok {
		return "", "", "", false
	}
	// map_files has the addresses without leading zeros.
	area = string(bytes.TrimLeft(from, "0")) + "-" + string(bytes.TrimLeft(to, "0"))
	return area, string(fields[3]) + " " + string(fields[4]), name, true
}

func openAt(dir *os.File, name string) (*os.File, error) {
	fd, err := unix.Openat(int(dir.Fd()), name, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, unlessGone(&os.PathError{Op: "open", Path: dir.Name() + "/" + name, Err: err})
	}
	return os.NewFile(uintptr(fd), dir.Name()+"/"+name), nil
}

// mount is what has to be known of a mount.
type mount struct {
	device fsstats.Device
	fstype string
	// upper is the upper folder of an overlay.
	upper string
}

// mountTable is a mount table by mount ID.
type mountTable map[uint64]mount

func namespaceOf(pid string) (string, error) {
	name, err := os.Readlink("/proc/" + pid + "/ns/mnt")
	return name, unlessGone(err)
}

func readMounts(pid string) (mountTable, error) {
	f, err := os.Open("/proc/" + pid + "/mountinfo")
	if err != nil {
		return nil, unlessGone(err)
	}
	defer f.Close() //nolint:errcheck // only read
	table, err := parseMounts(f)
	return table, unlessGone(err)
}

// parseMounts reads a mount table (proc_pid_mountinfo(5)). Lines of any length are
// taken: those of overlays with hundreds of layers are long, and their upper folder
// is near the end. Lines it does not understand are left out.
func parseMounts(r io.Reader) (mountTable, error) {
	table := mountTable{}
	for in := bufio.NewReaderSize(r, 64<<10); ; {
		line, err := in.ReadString('\n')
		if id, m, ok := parseMount(strings.TrimSuffix(line, "\n")); ok {
			table[id] = m
		}
		if errors.Is(err, io.EOF) {
			return table, nil
		}
		if err != nil {
			return nil, err
		}
	}
}

func parseMount(line string) (id uint64, m mount, ok bool) {
	front, back, ok := strings.Cut(line, " - ")
	if !ok {
		return 0, mount{}, false
	}
	fields, tail := strings.Fields(front), strings.SplitN(back, " ", 3)
	if len(fields) < 6 || len(tail) < 3 {
		return 0, mount{}, false
	}
	id, err := strconv.ParseUint(fields[0], 10, 64)
	if err != nil {
		return 0, mount{}, false
	}
	major, minor, _ := strings.Cut(fields[2], ":")
	maj, err := strconv.ParseUint(major, 10, 32)
	if err != nil {
		return 0, mount{}, false
	}
	min, err := strconv.ParseUint(minor, 10, 32)
	if err != nil {
		return 0, mount{}, false
	}
	m = mount{device: fsstats.Device{Major: uint32(maj), Minor: uint32(min)}, fstype: tail[0]}
	if m.fstype == "overlay" {
		for option := range strings.SplitSeq(tail[2], ",") {
			if upper, ok := strings.CutPrefix(option, "upperdir="); ok && strings.HasPrefix(upper, "/") {
				m.upper = unescape(upper)
			}
		}
	}
	return id, m, true
}

// unescape undoes the escapes of the mount table: a backslash and three octal
// digits.
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var out strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if c, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				out.WriteByte(byte(c))
				i += 3
				continue
			}
		}
		out.WriteByte(s[i])
	}
	return out.String()
}

// Processes lists the processes of a cgroup and of all below it. folder is the
// cgroup's folder in any hierarchy, of version 1 or 2. One that is gone has none.
func Processes(folder string) ([]int, error) {
	var pids []int
	entries, err := os.ReadDir(folder)
	if err != nil {
		if errors.Is(unlessGone(err), errGone) {
			return nil, nil
		}
		return nil, fmt.Errorf("list the processes of a cgroup: %w", err)
	}
	content, err := os.ReadFile(filepath.Join(folder, "cgroup.procs"))
	switch {
	case err == nil:
		for line := range strings.Lines(string(content)) {
			pid, err := strconv.Atoi(strings.TrimSpace(line))
			if err != nil {
				return nil, fmt.Errorf("list the processes of the cgroup %s: %q is no number", folder, line)
			}
			if pid > 0 { // 0 is one outside of our PID namespace
				pids = append(pids, pid)
			}
		}
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENODEV):
	case errors.Is(err, unix.EOPNOTSUPP): // threaded: its processes are listed further up (cgroups(7))
	default:
		return nil, fmt.Errorf("list the processes of a cgroup: %w", err)
	}
	for _, e := range entries {
		if !e.IsDir() {
			continue
		}
		below, err := Processes(filepath.Join(folder, e.Name()))
		if err != nil {
			return nil, err
		}
		pids = append(pids, below...)
	}
	return pids, nil
}
