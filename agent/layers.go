package agent

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"maps"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/agent/owners"
	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/fsstats/index"
	"github.com/cleave-cri/cleave/proxy/diskstats"
	"github.com/cleave-cri/cleave/snapshot"
)

// layerID names a snapshot for as long as it lives.
type layerID struct {
	snapshotter, key string
	created          time.Time
}

func (a layerID) compare(b layerID) int {
	return cmp.Or(cmp.Compare(a.snapshotter, b.snapshotter), cmp.Compare(a.key, b.key), a.created.Compare(b.created))
}

// layerState is what is remembered of a snapshot between two passes.
type layerState struct {
	layer snapshot.Layer
	// asked says that folders were asked for and answered.
	asked   bool
	folders snapshot.Folders
	// filesystem is the one that the layer is on, nil while unknown.
	filesystem *fsstats.Filesystem
	// used is what it takes, nil while unknown. The book knows nothing of it.
	used *diskstats.Usage
}

// snapshot names a layer for the index. Its folder is empty where the figure is
// given: by containerd for a committed layer, by whoever has its files for others.
func (l *layerState) snapshot(given bool) owners.Snapshot {
	s := owners.Snapshot{Kind: kindOf(l.layer.Class), ID: l.layer.ContainerID}
	if s.ID == "" {
		s.ID = l.layer.Snapshotter + "/" + l.layer.Key
	}
	if !given {
		s.Folder = l.folders.Upper
	}
	return s
}

func kindOf(c snapshot.Class) index.Kind {
	switch c {
	case snapshot.Image:
		return owners.Image
	case snapshot.Extraction:
		return owners.Unpacking
	case snapshot.Container:
		return owners.Container
	case snapshot.Sandbox:
		return owners.Sandbox
	case snapshot.View, snapshot.Other:
	}
	return owners.Other
}

// place is a path and the filesystem that it is on.
type place struct {
	path       string
	filesystem fsstats.Filesystem
}

// layerBook remembers the runtime's snapshots between two passes, and where each
// is. One goroutine uses it.
type layerBook struct {
	store       store
	filesystems filesystems
	log         *zap.Logger
	// theirs are the roots of a snapshotter that measures its layers itself.
	theirs []string
	// at tells what is being looked at, for whoever waits for it.
	at func(what string)

	layers map[layerID]*layerState
	// snapshotters, contentRoot and readAt are from when the store was last
	// read; readAt is zero before that.
	snapshotters []snapshot.Snapshotter
	contentRoot  string
	readAt       time.Time
	// committed is where each snapshotter's committed layers are, by name.
	committed map[string]place
}

// refresh reads the store and finds out where everything is. It returns what could
// not be found out; what was known before stays.
func (b *layerBook) refresh(ctx context.Context, now time.Time) []error {
	problems := b.readStore(ctx, now)
	b.findCommitted()
	b.findUppers()
	return problems
}

// given says that a layer is not walked by this process: it is committed, nobody
// says where it is, or its snapshotter measures it.
func (b *layerBook) given(l *layerState) bool {
	return l.layer.Class == snapshot.Image || l.folders.Upper == "" ||
		slices.ContainsFunc(b.theirs, func(root string) bool { return owners.Within(l.folders.Upper, root) })
}

// split says that a layer is the split snapshotter's.
func (b *layerBook) split(l *layerState) bool {
	return slices.ContainsFunc(b.theirs, func(root string) bool {
		return l.folders.Upper != "" && owners.Within(l.folders.Upper, root) || owners.Within(b.committed[l.layer.Snapshotter].path, root)
	})
}

func (b *layerBook) readStore(ctx context.Context, now time.Time) []error {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	b.at("containerd's store")
	inv, err := b.store.Inventory(ctx)
	if err != nil && !errors.Is(err, snapshot.ErrUnread) {
		return []error{err}
	}
	var problems []error
	if err != nil {
		problems = append(problems, err)
	}
	b.snapshotters, b.contentRoot, b.readAt = inv.Snapshotters, inv.ContentRoot, now
	return append(problems, b.follow(ctx, inv)...)
}

// follow brings the remembered layers up to date with the store: forgets those
// that are gone and finds the folders of new ones. Layers of a snapshotter that
// could not be read are kept.
func (b *layerBook) follow(ctx context.Context, inv snapshot.Inventory) (problems []error) {
	seen := make(map[layerID]bool, len(inv.Layers))
	for _, l := range inv.Layers {
		id := layerID{l.Snapshotter, l.Key, l.CreatedAt}
		seen[id] = true
		state := b.layers[id]
		if state == nil {
			state = &layerState{}
			b.layers[id] = state
		}
		state.layer = l // an owner may come after its snapshot
		if l.Class == snapshot.Image || l.Class == snapshot.View || state.asked {
			continue
		}
		folders, err := b.store.Folders(ctx, l)
		switch {
		case err == nil:
			state.asked, state.folders = true, folders
		case errors.Is(err, snapshot.ErrGone): // the next pass forgets it
			b.log.Debug("a snapshot was removed since it was listed", zap.String("key", l.Key))
		default:
			problems = append(problems, err)
		}
	}
	maps.DeleteFunc(b.layers, func(id layerID, _ *layerState) bool {
		return !seen[id] && !slices.Contains(inv.Unread, id.snapshotter)
	})
	return problems
}

// sorted returns the layers in the order of snapshotter and key, so that what
// depends on the order is the same in each pass.
func (b *layerBook) sorted() []*layerState {
	out := make([]*layerState, 0, len(b.layers))
	for _, id := range slices.SortedFunc(maps.Keys(b.layers), layerID.compare) {
		out = append(out, b.layers[id])
	}
	return out
}

// snapshotsFolder is where containerd's own snapshotters and cleave's keep their
// layers below their root (CTD-21). It may be a mount of another disk.
const snapshotsFolder = "snapshots"

// findCommitted finds out where each snapshotter's committed layers really are:
// where a container's nearest lower layer is; without a container, in the folder
// for snapshots below the snapshotter's root, or else in that root. All committed
// layers of one snapshotter count as being in one place.
func (b *layerBook) findCommitted() {
	committed := map[string]place{}
	lowers := b.lowers()
	for _, sn := range b.snapshotters {
		var named []place
		if sn.Root != "" {
			for _, folder := range []string{filepath.Join(sn.Root, snapshotsFolder), sn.Root} {
				if fs, err := b.filesystemOf(folder); err == nil {
					named = append(named, place{folder, fs})
				}
			}
		}
		if lower, ok := lowers[sn.Name]; ok {
			// A layer's own folder goes when it goes; name one that stays.
			stable := place{lower.filesystem.Mountpoint, lower.filesystem}
			for _, n := range slices.Backward(named) {
				if n.filesystem.Device == lower.filesystem.Device {
					stable = n
				}
			}
			committed[sn.Name] = stable
		} else if len(named) > 0 {
			committed[sn.Name] = named[0]
		}
	}
	b.committed = committed
	for _, state := range b.layers {
		if state.layer.Class != snapshot.Image {
			continue
		}
		state.filesystem = nil
		if where, ok := committed[state.layer.Snapshotter]; ok {
			state.filesystem = &where.filesystem
		}
	}
}

// lowers returns, by snapshotter, a committed layer that a container uses: the
// first one that can be looked at. Where one does not answer the others are not asked:
// each would take its time.
func (b *layerBook) lowers() map[string]place {
	out, hangs := map[string]place{}, map[string]bool{}
	for _, state := range b.sorted() {
		sn := state.layer.Snapshotter
		if _, have := out[sn]; have || hangs[sn] || state.folders.Lower == "" || !ofContainer(state.layer) {
			continue
		}
		fs, err := b.filesystemOf(state.folders.Lower)
		switch {
		case err == nil:
			out[sn] = place{state.folders.Lower, fs}
		case errors.Is(err, fsstats.ErrNoAnswer):
			hangs[sn] = true
		}
	}
	return out
}

func ofContainer(l snapshot.Layer) bool {
	return l.Class == snapshot.Container || l.Class == snapshot.Sandbox
}

func (b *layerBook) filesystemOf(path string) (fsstats.Filesystem, error) {
	b.at("the filesystem of " + path)
	return b.filesystems.FilesystemOf(path)
}

// findUppers finds out on which filesystem each writable layer is, as far as that
// can be looked at. Where one does not answer the others that were last seen there are
// not asked, and stay as they were: each would take its time, and a thread for as long
// as the disk hangs. Of those that were not seen yet that goes for all of a snapshotter.
func (b *layerBook) findUppers() {
	hangs := map[string]bool{}
	for _, state := range b.sorted() { // the same one is the first each time
		where := "snapshotter " + state.layer.Snapshotter
		if state.filesystem != nil {
			where = state.filesystem.ID()
		}
		if state.folders.Upper == "" || hangs[where] {
			continue
		}
		fs, err := b.filesystemOf(state.folders.Upper)
		switch {
		case err == nil:
			state.filesystem = &fs
		case errors.Is(err, fsstats.ErrNoAnswer):
			hangs[where] = true
		}
	}
}

// imagePath returns the path that names the filesystem of image layers best.
// named is the one that the runtime names for its default snapshotter: it stays
// where it is right, and gives way where it does not exist (CTD-4) or the layers
// are on another filesystem.
func (b *layerBook) imagePath(named string) string {
	i := slices.IndexFunc(b.snapshotters, func(sn snapshot.Snapshotter) bool {
		return sn.Root == named || strings.HasSuffix(path.Base(named), "."+sn.Name)
	})
	if i < 0 {
		return named
	}
	where, ok := b.committed[b.snapshotters[i].Name]
	if !ok {
		return named
	}
	fsNamed, err := b.filesystemOf(named)
	if errors.Is(err, fs.ErrNotExist) || (err == nil && fsNamed.Device != where.filesystem.Device) {
		return where.path
	}
	return named
}

// containerPath is where the writable layers really are: the filesystem that
// holds most of them, empty if there are none. Where that is the filesystem of
// images their path names it best.
func (b *layerBook) containerPath(imagePath string) string {
	counts := map[fsstats.Device]int{}
	places := map[fsstats.Device]string{}
	for _, l := range b.layers {
		if l.filesystem == nil || !ofContainer(l.layer) {
			continue
		}
		device, mountpoint := l.filesystem.Device, l.filesystem.Mountpoint
		counts[device]++
		if known, ok := places[device]; !ok || mountpoint < known {
			places[device] = mountpoint
		}
	}
	if len(counts) == 0 {
		return ""
	}
	best := slices.MinFunc(slices.Collect(maps.Keys(counts)), func(x, y fsstats.Device) int {
		return cmp.Or(cmp.Compare(counts[y], counts[x]), cmp.Compare(places[x], places[y]))
	})
	if image, err := b.filesystemOf(imagePath); err == nil && image.Device == best {
		return imagePath
	}
	return places[best]
}

// unlessGone drops the error of a folder that went with its snapshot since that
// was listed.
func unlessGone(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
