// Package orphan finds files that have no name any more and still take space,
// because a process has them open or mapped: what du can't see and statfs counts.
// The agent and the usage index may import it; it imports fsstats and fsstats/pace
// of this module.
//
// # How they are found
//
// Through /proc/PID/fd and /proc/PID/maps of the processes that the caller names
// (proc_pid_fd(5), proc_pid_maps(5)). The name of an open file is read first, which
// asks no filesystem; only where the kernel says that it is deleted are its
// attributes asked for (statx(2) through the descriptor's link, AT_STATX_DONT_SYNC,
// so that a network or FUSE filesystem answers from memory). Nothing is opened, so
// nothing is kept alive, and no filesystem that hangs is waited for. A file that
// still has another name is none: walks count it.
//
// # Which filesystem they are on
//
// That of the mount they were opened by, looked up in the process's own mount
// table. A file of an overlay lies in the overlay's upper folder.
//
// # What is not found
//
// Files that nobody but the kernel holds (the backing file of a loop device, a swap
// file), files that are in flight over a unix socket, and files of processes that
// were not named. Files in memory (memfd, tmpfs, SysV) are left out. Of a file that
// is only mapped the size is known only with CAP_SYS_ADMIN or
// CAP_CHECKPOINT_RESTORE.
package orphan

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/fsstats/pace"
)

const (
	// maxErrors is how many errors a Report keeps.
	maxErrors = 8
	// maxFiles is how many files a Report lists one by one: the largest. The
	// sums have all.
	maxFiles = 1000
)

// Holder is a group of processes that are one owner to the caller, such as a
// container.
type Holder struct {
	ID   string
	PIDs []int
}

// Options say how files are looked for.
type Options struct {
	// EntriesPerSecond is how many open files and mappings are looked at per
	// second at most; 0 or less means no limit. One costs about 1 µs.
	EntriesPerSecond int
	// DeviceOf says on which filesystem a path of this mount namespace is. It is
	// asked for the upper folders of overlays. Without it files of overlays are
	// Unplaced.
	DeviceOf func(path string) (fsstats.Device, error)
}

// Place is an owner on a filesystem.
type Place struct {
	Holder string         `json:"holder"`
	Device fsstats.Device `json:"device"`
}

// File is one file without a name.
type File struct {
	Place
	// Inode is its number; together with StatDevice it names the file.
	Inode      uint64         `json:"inode"`
	StatDevice fsstats.Device `json:"statDevice"`
	// Bytes is 512 × st_blocks.
	Bytes int64 `json:"bytes"`
	// PID is one process that has it, Name the last name it had there.
	PID  int    `json:"pid"`
	Name string `json:"name"`
	// Mapped says that it was found as a mapping only.
	Mapped bool `json:"mapped,omitempty"`
}

// Sum is what an owner holds on one filesystem.
type Sum struct {
	Bytes int64 `json:"bytes"`
	Files int64 `json:"files"`
}

// Report is what was found between Started and Finished.
type Report struct {
	// Sums are all files. A file that several owners hold counts once, for the
	// first of them in the order in which they were named.
	Sums map[Place]Sum `json:"-"`
	// Overlays are those among Sums that lie in the upper folder of an overlay: what
	// a container has in its writable layer, and not in a volume.
	Overlays map[Place]Sum `json:"-"`
	// Files are the largest of them, the largest first.
	Files []File `json:"files"`
	// Unplaced is what is known to be held, but not on which filesystem.
	Unplaced Sum       `json:"unplaced"`
	Started  time.Time `json:"started"`
	Finished time.Time `json:"finished"`
	// Partial says that the sums are a lower bound: something could not be read
	// or ctx ended. Processes that ended meanwhile do not make it so.
	Partial    bool    `json:"partial,omitempty"`
	Unreadable int64   `json:"unreadable,omitempty"`
	Errors     []error `json:"-"`
	// Entries is how many open files and mappings were looked at.
	Entries int64 `json:"entries"`
}

// Find looks through the processes of all holders. The error is ctx's, with what
// was found so far; everything else that goes wrong is told in the Report.
func Find(ctx context.Context, holders []Holder, opt Options) (Report, error) {
	s := &search{
		opt:    opt,
		pace:   pace.NewBudget(opt.EntriesPerSecond).Worker(),
		seen:   map[identity]bool{},
		tables: map[string]mountTable{},
		uppers: map[string]fsstats.Device{},
	}
	s.report.Started, s.report.Sums, s.report.Overlays = time.Now(), map[Place]Sum{}, map[Place]Sum{}
	var err error
	for _, h := range holders {
		for _, pid := range h.PIDs {
			if err = s.process(ctx, h.ID, pid); err != nil {
				break
			}
		}
		if err != nil {
			break
		}
	}
	s.trim()
	s.report.Finished = time.Now()
	s.report.Partial = err != nil || s.report.Unreadable > 0
	if err != nil {
		return s.report, fmt.Errorf("look for deleted files that are still open: %w", err)
	}
	return s.report, nil
}

type identity struct {
	device fsstats.Device
	inode  uint64
}

// search is one call of Find.
type search struct {
	opt    Options
	pace   *pace.Worker
	report Report
	// seen are the files that count already.
	seen map[identity]bool
	// tables are mount tables by mount namespace; uppers are where overlays'
	// upper folders are.
	tables map[string]mountTable
	uppers map[string]fsstats.Device
}

func (s *search) process(ctx context.Context, holder string, pid int) error {
	p, err := openProcess(pid)
	if err != nil {
		s.unreadable(pid, err)
		return nil
	}
	defer p.close()
	found := func(link, name string, mapped bool) error {
		return s.look(p, holder, link, name, mapped)
	}
	err = p.descriptors(func() error { return s.entry(ctx) }, found)
	if err == nil {
		err = p.mappings(func() error { return s.entry(ctx) }, found)
	}
	if err != nil && ctx.Err() == nil {
		s.unreadable(pid, err)
		return nil
	}
	return err
}

func (s *search) entry(ctx context.Context) error {
	s.report.Entries++
	return s.pace.Entry(ctx)
}

// look counts the file that a link of /proc/PID leads to, if it has no name.
func (s *search) look(p *process, holder, link, name string, mapped bool) error {
	a, err := p.stat(link)
	if err != nil {
		s.unreadable(p.pid, fmt.Errorf("%s, which was %q: %w", link, name, err))
		return nil
	}
	id := identity{a.device, a.inode}
	if a.links > 0 || !a.regular || s.seen[id] {
		return nil
	}
	device, where, err := s.place(p, a)
	if err != nil {
		s.unreadable(p.pid, err)
	}
	if where == inMemory {
		return nil
	}
	s.seen[id] = true
	if where == unknown {
		s.report.Unplaced.Bytes += a.bytes
		s.report.Unplaced.Files++
		return nil
	}
	at := Place{Holder: holder, Device: device}
	add(s.report.Sums, at, a.bytes)
	if where == inOverlay {
		add(s.report.Overlays, at, a.bytes)
	}
	s.report.Files = append(s.report.Files, File{
		Place: at, Inode: a.inode, StatDevice: a.device, Bytes: a.bytes, PID: p.pid, Name: strings.TrimSuffix(name, deleted), Mapped: mapped,
	})
	if len(s.report.Files) >= 2*maxFiles {
		s.trim()
	}
	return nil
}

func add(sums map[Place]Sum, at Place, bytes int64) {
	sum := sums[at]
	sum.Bytes += bytes
	sum.Files++
	sums[at] = sum
}

// trim keeps the largest files.
func (s *search) trim() {
	slices.SortFunc(s.report.Files, func(a, b File) int {
		return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.Inode, b.Inode), cmp.Compare(a.Holder, b.Holder))
	})
	s.report.Files = s.report.Files[:min(len(s.report.Files), maxFiles)]
}

// whereabouts is what is known of the filesystem of a file.
type whereabouts int

const (
	onDisk    whereabouts = iota
	inOverlay             // on a disk too, in an overlay's upper folder
	inMemory
	unknown
)

// place says on which filesystem a file is.
func (s *search) place(p *process, a attributes) (fsstats.Device, whereabouts, error) {
	m, ok, err := s.mountOf(p, a.mount)
	switch {
	case err != nil:
		return fsstats.Device{}, unknown, err
	case !ok && a.device.Major != 0: // a disk's own number
		return a.device, onDisk, nil
	case !ok: // unmounted lazily, or before Linux 5.8
		return fsstats.Device{}, unknown, nil
	case memoryOnly[m.fstype]:
		return fsstats.Device{}, inMemory, nil
	case m.fstype != "overlay":
		return m.device, onDisk, nil
	case m.upper == "" || s.opt.DeviceOf == nil:
		return fsstats.Device{}, unknown, nil
	}
	device, known := s.uppers[m.upper]
	if !known {
		device, err = s.opt.DeviceOf(m.upper)
		if err != nil {
			return fsstats.Device{}, unknown, fmt.Errorf("find the upper folder of an overlay: %w", err)
		}
		s.uppers[m.upper] = device
	}
	return device, inOverlay, nil
}

// memoryOnly are filesystem types that keep nothing on a disk.
var memoryOnly = map[string]bool{"tmpfs": true, "ramfs": true, "hugetlbfs": true, "devtmpfs": true, "proc": true, "sysfs": true, "mqueue": true}

// mountOf finds a mount in the process's table, or in ours for files that were
// handed to the process.
func (s *search) mountOf(p *process, id uint64) (mount, bool, error) {
	for _, pid := range []string{p.name, "self"} {
		namespace, err := namespaceOf(pid)
		if err != nil {
			return mount{}, false, err
		}
		table, known := s.tables[namespace]
		if !known {
			if table, err = readMounts(pid); err != nil {
				return mount{}, false, err
			}
			s.tables[namespace] = table
		}
		if m, ok := table[id]; ok {
			return m, true, nil
		}
	}
	return mount{}, false, nil
}

// unreadable notes what could not be read, unless its process has just ended or
// its file was just closed.
func (s *search) unreadable(pid int, err error) {
	if errors.Is(err, errGone) {
		return
	}
	s.report.Unreadable++
	if len(s.report.Errors) < maxErrors {
		s.report.Errors = append(s.report.Errors, fmt.Errorf("process %d: %w", pid, err))
	}
}
