package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/moby/sys/mountinfo"

	"github.com/cleave-cri/cleave/agent/page"
	"github.com/cleave-cri/cleave/engine/record"
	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/fsstats/orphan"
	"github.com/cleave-cri/cleave/reclaim"
	"github.com/cleave-cri/cleave/snapshot/inventory"
)

const (
	// namedHolders is how many holders are named; of the rest the number is told.
	namedHolders = 3
	// leastHeldBytes is below what a holder is not worth a word.
	leastHeldBytes = 1 << 20
	// holdersGrace is how long a look has to notice that its time is over.
	holdersGrace = time.Second
)

// holders find out who holds what did not come free.
type holders struct{ d *decisions }

var _ reclaim.Holders = holders{}

// Holders implements [reclaim.Holders]: parts of an image that are still in containerd's store, and who keeps them there; files
// that have no name any more and are open; overlays that are mounted on layers that have gone.
func (h holders) Holders(ctx context.Context, kind string, item record.Item, missingBytes int64) string {
	return inTime(ctx, &h.d.explaining, func() string { return h.look(ctx, kind, item, missingBytes) })
}

// inTime returns what look finds out until ctx ends. A look that does not notice that hangs in the kernel, as on layers of a FUSE
// filesystem whose process is stopped, and is left behind: it is there to explain, and nothing must wait for that. busy is set
// meanwhile, so that there is one at most.
func inTime(ctx context.Context, busy *atomic.Bool, look func() string) string {
	if !busy.CompareAndSwap(false, true) {
		return "who holds them is not looked for, because a filesystem did not answer the last time"
	}
	found := make(chan string, 1)
	go func() { // ends when the filesystems answer
		defer busy.Store(false)
		found <- look()
	}()
	select {
	case text := <-found:
		return text
	case <-ctx.Done():
	}
	grace := time.NewTimer(holdersGrace)
	defer grace.Stop()
	select {
	case text := <-found:
		return text
	case <-grace.C:
		return "who holds them can't be found out, because a filesystem does not answer"
	}
}

func (h holders) look(ctx context.Context, kind string, item record.Item, missingBytes int64) string {
	role := h.d.space.role.Load()
	if role == nil {
		return ""
	}
	place, ok := h.d.observer.newest.Load().layout.Get(*role)
	if !ok || place.Missing {
		return ""
	}
	device := place.Filesystem.Device
	var found []string
	var unknown []error
	left := missingBytes
	if kind == "image" {
		text, bytes, err := h.inStore(ctx, item.ID, device.String())
		found, left = append(found, text...), left-bytes
		unknown = append(unknown, err)
	}
	if left > leastHeldBytes {
		pids, err := processes()
		text, bytes, err2 := h.open(ctx, device, pids)
		found, left = append(found, text...), left-bytes
		unknown = append(unknown, err, err2)
	}
	if kind == "image" && left > leastHeldBytes {
		text, err := mountsOnNothing()
		found, unknown = append(found, text...), append(unknown, err)
	}
	if err := errors.Join(unknown...); err != nil {
		found = append(found, "not all could be looked at: "+strings.ReplaceAll(err.Error(), "\n", "; "))
	}
	if len(found) == 0 {
		return "nobody is known to hold them; others may have written meanwhile"
	}
	return strings.Join(found, "; ")
}

// inStore is what is there of an image that is gone.
func (h holders) inStore(ctx context.Context, id, filesystem string) (found []string, bytes int64, _ error) {
	layers := h.d.picked.Load()
	if layers == nil {
		return nil, 0, nil
	}
	ids := make([]string, 0, len((*layers)[id]))
	for _, l := range (*layers)[id] {
		ids = append(ids, l.ID)
	}
	h.d.stock.Forget(ctx)
	p, err := h.d.stock.Picture(ctx, 0, nil)
	if err != nil {
		return nil, 0, err
	}
	left := p.Leftover(ids)
	if b := left.Uncollected.On(filesystem).Bytes; b > 0 {
		found = append(found, "containerd has not collected "+held(b)+" yet")
	}
	for i, k := range left.Keepers {
		if i == namedHolders {
			found = append(found, fmt.Sprintf("%d more", len(left.Keepers)-i))
			break
		}
		found = append(found, fmt.Sprintf("%s %s of namespace %s keeps %s", k.Kind, nameOf(p, k), k.Namespace, held(k.Kept.On(filesystem).Bytes)))
	}
	return found, left.There.On(filesystem).Bytes, nil
}

// nameOf is what people call a keeper.
func nameOf(p *inventory.Picture, k inventory.Keeper) string {
	if image, ok := p.Image(inventory.Key{Namespace: k.Namespace, ID: k.ID}); ok && k.Kind == inventory.KeeperImage && len(image.Names) > 0 {
		return image.Names[0]
	}
	return k.ID
}

// processes are those of the node.
func processes() (pids []int, _ error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// open looks for deleted files on a filesystem that processes have open.
func (h holders) open(ctx context.Context, device fsstats.Device, pids []int) (found []string, bytes int64, _ error) {
	processes := make([]orphan.Holder, 0, len(pids))
	for _, pid := range pids {
		processes = append(processes, orphan.Holder{ID: strconv.Itoa(pid), PIDs: []int{pid}})
	}
	report, err := orphan.Find(ctx, processes, orphan.Options{
		EntriesPerSecond: openEntriesPerSecond,
		DeviceOf: func(path string) (fsstats.Device, error) {
			f, err := h.d.observer.filesystems.FilesystemOf(path)
			return f.Device, err
		},
	})
	type holder struct {
		pid   string
		bytes int64
	}
	var list []holder
	for at, sum := range report.Sums {
		if at.Device == device && sum.Bytes >= leastHeldBytes {
			list = append(list, holder{at.Holder, sum.Bytes})
			bytes += sum.Bytes
		}
	}
	slices.SortFunc(list, func(a, b holder) int {
		if a.bytes != b.bytes {
			return int(max(-1, min(1, b.bytes-a.bytes)))
		}
		return strings.Compare(a.pid, b.pid)
	})
	for i, l := range list {
		if i == namedHolders {
			found = append(found, fmt.Sprintf("%d more processes", len(list)-i))
			break
		}
		found = append(found, fmt.Sprintf("%s (process %s) has deleted files open, %s", commandOf(l.pid), l.pid, held(l.bytes)))
	}
	return found, bytes, err
}

// commandOf is a process's name (proc_pid_comm(5)).
func commandOf(pid string) string {
	name, err := os.ReadFile(filepath.Join("/proc", pid, "comm"))
	if err != nil {
		return "a program that has ended"
	}
	return strings.TrimSpace(string(name))
}

// mountsOnNothing are overlays with a lower folder that is not there any more: as long as they are mounted, files of it that are in
// use take space.
func mountsOnNothing() (found []string, _ error) {
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("overlay"))
	if err != nil {
		return nil, fmt.Errorf("read the mount table: %w", err)
	}
	gone := 0
	for _, m := range mounts {
		for option := range strings.SplitSeq(m.VFSOptions, ",") {
			lower, ok := strings.CutPrefix(option, "lowerdir=")
			if !ok || !slices.ContainsFunc(strings.Split(lower, ":"), missing) {
				continue
			}
			if gone++; gone <= namedHolders {
				found = append(found, "the mount at "+m.Mountpoint+" is on layers that have gone")
			}
		}
	}
	if gone > namedHolders {
		found = append(found, fmt.Sprintf("%d more mounts", gone-namedHolders))
	}
	return found, nil
}

// missing says that an absolute path is surely not there.
func missing(path string) bool {
	if !filepath.IsAbs(path) {
		return false
	}
	_, err := os.Lstat(path)
	return errors.Is(err, os.ErrNotExist)
}

func held(bytes int64) string { return page.Bytes(uint64(max(bytes, 0))) } //nolint:gosec // not below zero
