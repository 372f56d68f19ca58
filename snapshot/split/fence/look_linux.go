package fence

import (
	"bufio"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/cleave-cri/cleave/snapshot/split/rootdir"
)

// Sources are the files of the kernel that are read. Tests have their own.
type Sources struct {
	// BootID differs from boot to boot; "/proc/sys/kernel/random/boot_id".
	BootID string
	// HostMounts is the host's table of mounts; "/proc/1/mountinfo".
	HostMounts string
	// Ask is called with a root's path before the kernel is asked about it; a
	// test lets it hang. nil: nothing is called.
	Ask func(path string)
}

func (s Sources) about(path string) {
	if s.Ask != nil {
		s.Ask(path)
	}
}

// Kernel gives the kernel's own files.
func Kernel() Sources {
	return Sources{BootID: "/proc/sys/kernel/random/boot_id", HostMounts: "/proc/1/mountinfo"}
}

// ReadBootID reads the ID of this boot.
func (s Sources) ReadBootID() (string, error) {
	id, err := os.ReadFile(s.BootID)
	if err != nil {
		return "", err
	}
	return strings.TrimSpace(string(id)), nil
}

// look opens the root at path and gathers what Judge wants to know. The root is
// nil if it can't be opened.
func (s Sources) look(path, bootID string) (*rootdir.Root, rootdir.Place, Seen) {
	seen := Seen{Path: path, BootID: bootID}
	root, err := rootdir.Open(path)
	if err != nil {
		seen.OpenErr = err
		return nil, rootdir.Place{}, seen
	}
	place, err := root.Place()
	if err != nil {
		seen.OpenErr = err
		return nil, rootdir.Place{}, closing(root, seen)
	}
	seen.Device = place.Device
	seen.Marker, seen.MarkerErr = ReadMarker(root)
	seen.UUID, seen.UUIDErr = UUID(root)
	seen.IsMount, seen.MountErr = s.isMount(path, place)
	return root, place, seen
}

func closing(root *rootdir.Root, seen Seen) Seen {
	seen.OpenErr = errors.Join(seen.OpenErr, root.Close())
	return seen
}

// isMount says whether the folder is a mount point that the host sees too: in
// this process's mounts by the kernel's word, in the host's by its table.
func (s Sources) isMount(path string, place rootdir.Place) (bool, error) {
	if place.IsMountRootKnown && !place.IsMountRoot {
		return false, nil
	}
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return false, err
	}
	own, err := readMounts("/proc/self/mountinfo")
	if err != nil {
		return false, err
	}
	host, err := readMounts(s.HostMounts)
	if err != nil {
		return false, err
	}
	return sameMount(own, host, real, place.Mount), nil
}

// sameMount says whether the mount with this ID sits on path, and the host has
// the same filesystem there. ID 0 stands for the topmost mount on path.
func sameMount(own, host []mountLine, path string, id uint64) bool {
	device := ""
	for _, m := range own {
		if m.mountpoint == path && (id == 0 || m.id == id) {
			device = m.device
		}
	}
	onHost := ""
	for _, m := range host {
		if m.mountpoint == path {
			onHost = m.device // the last one covers those before it
		}
	}
	return device != "" && device == onHost
}

// mountLine is what is needed of a line of a table of mounts.
type mountLine struct {
	id                 uint64
	device, mountpoint string
}

func readMounts(path string) (_ []mountLine, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	var lines []mountLine
	// A line can be long: an overlay of many layers.
	in := bufio.NewReader(f)
	for {
		line, readErr := in.ReadString('\n')
		if m, ok := parseMount(line); ok {
			lines = append(lines, m)
		}
		if readErr != nil {
			if line == "" || len(lines) > 0 {
				return lines, nil
			}
			return nil, fmt.Errorf("read %s: %w", path, readErr)
		}
	}
}

// parseMount reads the first five fields of a line of mountinfo: mount ID,
// parent, device, root, mountpoint (proc_pid_mountinfo(5)).
func parseMount(line string) (mountLine, bool) {
	fields := strings.SplitN(line, " ", 6)
	if len(fields) < 6 {
		return mountLine{}, false
	}
	id, err := strconv.ParseUint(fields[0], 10, 64)
	if err != nil {
		return mountLine{}, false
	}
	return mountLine{id: id, device: fields[2], mountpoint: unescape(fields[4])}, true
}

// unescape undoes the kernel's octal escapes of space, tab, newline and
// backslash.
func unescape(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if c, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(c))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// Requests of ioctl(2), and where the UUID lies in their answers. The general
// one is in Linux since 6.9 (linux/fs.h); the others are older, of one
// filesystem each (linux/ext4.h, xfs's xfs_fs.h, linux/btrfs.h). A filesystem
// that doesn't know a request says ENOTTY.
var uuidRequests = []struct {
	request      uintptr
	size, offset int
	prepare      func(b []byte)
}{
	{request: 0x80111500, size: 17, offset: 1},                                        // FS_IOC_GETFSUUID
	{request: 0x8400941f, size: 1024, offset: 16},                                     // BTRFS_IOC_FS_INFO
	{request: 0x80705864, size: 112, offset: 64},                                      // XFS_IOC_FSGEOMETRY_V1
	{request: 0x8008662c, size: 24, offset: 8, prepare: func(b []byte) { b[0] = 16 }}, // EXT4_IOC_GETFSUUID
}

// UUID is the filesystem's own UUID as hex digits. A filesystem that has none is
// errors.ErrUnsupported.
func UUID(root *rootdir.Root) (string, error) {
	var uuid [16]byte
	err := root.Do("ask for the filesystem's UUID of", func(fd int) error {
		for _, r := range uuidRequests {
			answer := make([]byte, r.size)
			if r.prepare != nil {
				r.prepare(answer)
			}
			_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), r.request, uintptr(unsafe.Pointer(&answer[0])))
			if errno == 0 {
				copy(uuid[:], answer[r.offset:])
				return nil
			}
			if errno != unix.ENOTTY && errno != unix.EINVAL && errno != unix.EOPNOTSUPP {
				return errno
			}
		}
		return errors.ErrUnsupported
	})
	if err != nil {
		return "", err
	}
	if uuid == [16]byte{} {
		return "", fmt.Errorf("the UUID of the filesystem of %s is all zeros: %w", root.Path(), errors.ErrUnsupported)
	}
	return hex.EncodeToString(uuid[:]), nil
}

// MustBeMount says why a root is not a mount point of the host.
func (s Sources) MustBeMount(root *rootdir.Root) error {
	place, err := root.Place()
	if err != nil {
		return err
	}
	ok, err := s.isMount(root.Path(), place)
	if err != nil {
		return fmt.Errorf("find out whether %s is a mount point: %w", root.Path(), err)
	}
	if !ok {
		return fmt.Errorf("%s is not a mount point of the host: mount its filesystem there, or allow a plain folder in the configuration", root.Path())
	}
	return nil
}
