package fsstats

import (
	"bufio"
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"

	"github.com/moby/sys/mountinfo"
)

// maxLine is the longest line of a mount table that is kept whole. The parser
// refuses lines of 64 KiB; an overlay of hundreds of layers, mounted through
// fsconfig(2), has longer ones.
const maxLine = 32 << 10

// parseMounts reads a mount table in the form of /proc/self/mountinfo
// (proc_pid_mountinfo(5)), by mount ID.
func parseMounts(r io.Reader) (map[uint64]mount, error) {
	short, err := withoutLongOptions(r)
	if err != nil {
		return nil, err
	}
	infos, err := mountinfo.GetMountsFromReader(short, nil)
	if err != nil {
		return nil, err
	}
	table := make(map[uint64]mount, len(infos))
	for _, i := range infos {
		if i.ID < 0 || i.Major < 0 || i.Minor < 0 {
			return nil, fmt.Errorf("mount at %q has negative numbers", i.Mountpoint)
		}
		table[uint64(i.ID)] = mount{
			device:     Device{Major: uint32(i.Major), Minor: uint32(i.Minor)},
			mountpoint: i.Mountpoint,
			root:       i.Root,
			fstype:     i.FSType,
			from:       i.Source,
		}
	}
	return table, nil
}

// withoutLongOptions copies r and leaves out the last field, the filesystem's
// own options, where a line is longer than maxLine.
func withoutLongOptions(r io.Reader) (io.Reader, error) {
	var (
		out bytes.Buffer
		in  = bufio.NewReaderSize(r, 64<<10)
	)
	for {
		line, err := in.ReadBytes('\n')
		if err != nil && !errors.Is(err, io.EOF) {
			return nil, err
		}
		if len(line) > maxLine {
			if space := bytes.LastIndexByte(line, ' '); space >= 0 {
				line = append(line[:space:space], " rw\n"...)
			}
		}
		out.Write(line)
		if err != nil {
			return &out, nil
		}
	}
}

// Mount is one mount of the mount table (proc_pid_mountinfo(5)).
type Mount struct {
	// Device identifies the filesystem; see the package comment.
	Device Device
	// Mountpoint is where it is mounted, Root which folder of the filesystem is:
	// "/" for the whole of it.
	Mountpoint, Root string
	// Type is the kernel's name of the filesystem type.
	Type string
}

// Mounts lists the mount table in the order of mountpoints; of those at one
// mountpoint the one mounted last comes last. No filesystem is asked.
func (p *Prober) Mounts() ([]Mount, error) {
	table, err := p.src.mounts()
	if err != nil {
		return nil, fmt.Errorf("read mount table: %w", err)
	}
	list := make([]Mount, 0, len(table))
	for _, id := range slices.Sorted(maps.Keys(table)) {
		m := table[id]
		list = append(list, Mount{Device: m.device, Mountpoint: m.mountpoint, Root: m.root, Type: m.fstype})
	}
	slices.SortStableFunc(list, func(a, b Mount) int { return cmp.Compare(a.Mountpoint, b.Mountpoint) })
	return list, nil
}
