package agent

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/agent/owners"
	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/fsstats/index"
	"github.com/cleave-cri/cleave/fsstats/orphan"
	"github.com/cleave-cri/cleave/snapshot"
)

const (
	// openGap is by how much the part of a filesystem that nobody owns has to move
	// before deleted files that are still open are looked for.
	openGap = 32 << 20
	// openEvery is the shortest time between two searches.
	openEvery = 10 * time.Second
	// openSettle is how long a gap has to stand: a file that was just written is in
	// nobody's figure yet.
	openSettle = 2 * time.Second
	// openMaxAge is when a search that has found something is made again whatever
	// the signs say.
	openMaxAge = 5 * time.Minute
	// openEntriesPerSecond is how many open files are looked at in a second.
	openEntriesPerSecond = 50_000
	// openTimeout bounds a search; with what was found until then it goes on.
	openTimeout = 30 * time.Second
)

// openBook finds deleted files that containers have open, when the part of a
// filesystem that nobody owns has moved.
type openBook struct {
	processes func(container string) []int
	where     func(path string) (fsstats.Filesystem, error)

	mu     sync.Mutex
	report *orphan.Report // guarded by mu; nil before the first search

	// Used by one goroutine only.
	searched time.Time
	// gaps are what nobody owned at the last search, by filesystem.
	gaps map[index.FS]int64
	// moved is since when a gap is another one than then.
	moved time.Time
}

func newOpenBook(processes func(string) []int, where func(string) (fsstats.Filesystem, error)) *openBook {
	return &openBook{processes: processes, where: where}
}

// held lists who holds what, in the order of container and filesystem.
func (b *openBook) held() (out []owners.OpenFile) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.report == nil {
		return nil
	}
	for place, sum := range b.report.Sums {
		if sum.Bytes > 0 {
			out = append(out, owners.OpenFile{Container: place.Holder, Device: place.Device.String()})
		}
	}
	slices.SortFunc(out, func(x, y owners.OpenFile) int {
		return cmp.Or(cmp.Compare(x.Container, y.Container), cmp.Compare(x.Device, y.Device))
	})
	return out
}

// due says whether to search now, given what nobody owns.
func (b *openBook) due(now time.Time, gaps map[index.FS]int64) bool {
	moved := false
	for fs, gap := range gaps {
		if d := gap - b.gaps[fs]; d >= openGap || d <= -openGap {
			moved = true
		}
	}
	switch {
	case !moved:
		b.moved = time.Time{}
	case b.moved.IsZero():
		b.moved = now
	}
	if now.Sub(b.searched) < openEvery {
		return false
	}
	return moved && now.Sub(b.moved) >= openSettle || len(b.held()) > 0 && now.Sub(b.searched) >= openMaxAge
}

// search looks through the processes of containers. In the report there is nothing
// that counted says somebody has counted already.
func (b *openBook) search(ctx context.Context, containers []string, counted func(orphan.Place) bool) (orphan.Report, error) {
	var holders []orphan.Holder
	for _, id := range containers {
		if pids := b.processes(id); len(pids) > 0 {
			holders = append(holders, orphan.Holder{ID: id, PIDs: pids})
		}
	}
	limited, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	report, err := orphan.Find(limited, holders, orphan.Options{
		EntriesPerSecond: openEntriesPerSecond,
		DeviceOf: func(path string) (fsstats.Device, error) {
			f, err := b.where(path)
			return f.Device, err
		},
	})
	if ctx.Err() != nil {
		return report, ctx.Err()
	}
	leaveOut(&report, counted)
	b.searched, b.moved = time.Now(), time.Time{}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.report = &report
	return report, err
}

// leaveOut takes from a report's sums the files in writable layers that are counted:
// the kernel's counter of a project has those of its layer. Those in volumes it has
// not.
func leaveOut(report *orphan.Report, counted func(orphan.Place) bool) {
	for place, layer := range report.Overlays {
		if !counted(place) {
			continue
		}
		sum := report.Sums[place]
		sum.Bytes, sum.Files = sum.Bytes-layer.Bytes, sum.Files-layer.Files
		if report.Sums[place] = sum; sum.Files <= 0 {
			delete(report.Sums, place)
		}
	}
}

// watchGap looks for deleted files that are still open when there is a sign of any,
// until ctx ends.
func (o *observer) watchGap(ctx context.Context) {
	tick := time.NewTicker(publishPeriod)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			if gaps := o.newest.Load().gaps(); o.open.due(now, gaps) {
				o.searchOpen(ctx)
			}
		}
	}
}

// countedLayers says of which containers' layers the figures have deleted files too:
// those that are the kernel's counters of projects. A layer without a project is
// walked, and no walk sees them.
func (o *observer) countedLayers(s *survey) func(orphan.Place) bool {
	if !o.projects {
		return func(orphan.Place) bool { return false }
	}
	return s.counted(figuresOf(o.index.View()))
}

// counted is [observer.countedLayers] with the figures of the index.
func (s *survey) counted(figures map[index.Key]index.PartView) func(orphan.Place) bool {
	layers := map[orphan.Place]bool{}
	for _, l := range s.layers {
		if l.layer.Class != snapshot.Container || !l.given || l.filesystem == nil {
			continue
		}
		if f := figures[l.key].Figure; f == nil || f.How != index.Walked && f.How != index.Updated {
			layers[orphan.Place{Holder: l.layer.ContainerID, Device: l.filesystem.Device}] = true
		}
	}
	return func(at orphan.Place) bool { return layers[at] }
}

// newestOf finds filesystems by their numbers. Of two that had the same one, one after
// the other, it is the one that was seen last.
func newestOf(known map[index.FS]fsstats.Filesystem) map[fsstats.Device]index.FS {
	out := map[fsstats.Device]index.FS{}
	for fs, f := range known {
		if other, taken := out[f.Device]; !taken || known[other].MeasuredAt.Before(f.MeasuredAt) {
			out[f.Device] = fs
		}
	}
	return out
}

// searchOpen looks for them and tells the index.
func (o *observer) searchOpen(ctx context.Context) {
	s := o.surveyed.Load()
	var running []string
	for _, c := range s.workloads.containers {
		if c.Running {
			running = append(running, c.ID)
		}
	}
	report, err := o.open.search(ctx, running, o.countedLayers(s))
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		o.log.Warn("not all open files were looked at", zap.Error(err))
	}
	o.setOwners()
	filesystems := newestOf(o.known(s))
	var figures []index.Put
	for place, sum := range report.Sums {
		key := index.Key{Kind: owners.Container, ID: place.Holder, Part: owners.OpenDeletedOn(place.Device.String())}
		figures = append(figures, index.Put{Key: key, FS: filesystems[place.Device], Figure: index.Figure{
			Bytes: sum.Bytes, Inodes: sum.Files, Started: report.Started, Finished: report.Finished,
			How: "open files", Partial: report.Partial,
		}})
	}
	o.index.PutAll(figures)
	o.publish()
	o.open.gaps = o.newest.Load().gaps()
}
