// Package store joins what containerd's store holds with what that takes on this
// node's disks, for `cleave images` and `cleave orphans` and for whoever plans
// deletions. It only looks. agent and cmd may import it.
package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"

	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/snapshot"
	"github.com/cleave-cri/cleave/snapshot/inventory"
)

// usageCalls is how many questions for the usage of a layer run at a time.
const usageCalls = 4

// Measurer finds out what parts of a store take, each committed layer once: they
// don't change.
type Measurer struct {
	conn   grpc.ClientConnInterface
	prober *fsstats.Prober

	// mu makes measurings wait for each other.
	mu sync.Mutex
	// usage is of committed layers; guarded by mu.
	usage map[layer]snapshot.Usage
}

// layer is a snapshot of a namespace.
type layer struct{ namespace, snapshotter, key string }

// NewMeasurer returns a Measurer that has measured nothing.
func NewMeasurer(conn grpc.ClientConnInterface) *Measurer {
	return &Measurer{conn: conn, prober: fsstats.NewProber(), usage: map[layer]snapshot.Usage{}}
}

// builtin are containerd's own snapshotters that keep everything below one root.
// Of others it is known only where the layers of images are.
var builtin = []string{"overlayfs", "native", "btrfs", "erofs"}

// disks is what parts of one reading take. It implements [inventory.Figures].
type disks struct {
	usage map[layer]snapshot.Usage
	// roots are the filesystems of snapshotters, by name.
	roots map[string]string
	// blobs and content are the folder and the filesystem of the content store.
	blobs, content string
}

var _ inventory.Figures = disks{}

// Measure measures the parts of contents. What can't be measured is unknown in the
// result, and problems says why; a snapshotter that is away is one of them. Layers
// of containers are not measured: a container's removal is not an image's.
func (m *Measurer) Measure(ctx context.Context, c *inventory.Contents) (figures inventory.Figures, problems []error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	d := disks{usage: map[layer]snapshot.Usage{}, roots: map[string]string{}}
	for _, sn := range c.Snapshotters {
		if sn.Root == "" {
			continue
		}
		// The layers may be mounted below the root.
		device, err := m.deviceOf(filepath.Join(sn.Root, "snapshots"), sn.Root)
		if err != nil {
			if !errors.Is(err, os.ErrNotExist) {
				problems = append(problems, fmt.Errorf("find the filesystem of snapshotter %s: %w", sn.Name, err))
			}
			continue
		}
		d.roots[sn.Name] = device
	}
	if c.ContentRoot != "" {
		d.blobs = filepath.Join(c.ContentRoot, "blobs")
		device, err := m.deviceOf(d.blobs, c.ContentRoot)
		if err != nil {
			problems = append(problems, fmt.Errorf("find the filesystem of the content store: %w", err))
		}
		d.content = device
	}
	problems = append(problems, m.askUsage(ctx, c, d.usage)...)
	m.usage = map[layer]snapshot.Usage{}
	for at, usage := range d.usage {
		m.usage[at] = usage
	}
	return d, problems
}

// deviceOf names the filesystem of the first path that exists.
func (m *Measurer) deviceOf(paths ...string) (string, error) {
	var first error
	for _, path := range paths {
		fs, err := m.prober.FilesystemOf(path)
		if err == nil {
			return fs.Device.String(), nil
		}
		if first == nil || !errors.Is(err, os.ErrNotExist) {
			first = err
		}
	}
	return "", first
}

// askUsage asks for layers that are not known yet. Those that are written to
// containerd would walk (CTD-8), so only what belongs to no container is asked
// for of them, and again each time.
func (m *Measurer) askUsage(ctx context.Context, c *inventory.Contents, usage map[layer]snapshot.Usage) (problems []error) {
	var mu sync.Mutex
	var g errgroup.Group
	g.SetLimit(usageCalls)
	for n := range c.Namespaces {
		ns := &c.Namespaces[n]
		store := snapshot.NewStore(m.conn, ns.Name)
		owned := map[layer]bool{}
		for i := range ns.Containers {
			owned[layer{ns.Name, ns.Containers[i].Snapshotter, ns.Containers[i].SnapshotKey}] = true
		}
		for i := range ns.Snapshots {
			sn := &ns.Snapshots[i]
			at := layer{ns.Name, sn.Snapshotter, sn.Key}
			if sn.Kind == inventory.View || owned[at] {
				continue
			}
			if known, ok := m.usage[at]; ok && sn.Kind == inventory.Committed {
				mu.Lock()
				usage[at] = known
				mu.Unlock()
				continue
			}
			g.Go(func() error {
				if ctx.Err() != nil {
					return nil
				}
				u, err := store.Usage(ctx, snapshot.Layer{Snapshotter: at.snapshotter, Key: at.key})
				mu.Lock()
				defer mu.Unlock()
				switch {
				case errors.Is(err, snapshot.ErrGone):
				case err != nil:
					problems = append(problems, err)
				default:
					usage[at] = u
				}
				return nil
			})
		}
	}
	if err := g.Wait(); err != nil {
		problems = append(problems, err)
	}
	if err := ctx.Err(); err != nil {
		problems = append(problems, err)
	}
	return problems
}

// Snapshot implements [inventory.Figures].
func (d disks) Snapshot(namespace string, s *inventory.Snapshot) (inventory.Figure, bool) {
	device, ok := d.roots[s.Snapshotter]
	if !ok || (!slices.Contains(builtin, s.Snapshotter) && !ofImage(s)) {
		return inventory.Figure{}, false
	}
	if s.Kind == inventory.View {
		return inventory.Figure{Filesystem: device}, true // a folder with nothing in it
	}
	u, ok := d.usage[layer{namespace, s.Snapshotter, s.Key}]
	return inventory.Figure{Filesystem: device, Bytes: u.Bytes, Inodes: u.Inodes}, ok
}

// ofImage says whether a snapshot is surely a layer that was unpacked: its name is
// that of its content. A copy with other owners is not, for one (CTD-30).
func ofImage(s *inventory.Snapshot) bool {
	return s.Kind == inventory.Committed && strings.HasPrefix(s.Key, "sha256:")
}

// blockBytes is the size in which a file's blocks are counted (stat(2)).
const blockBytes = 512

// Blob implements [inventory.Figures].
func (d disks) Blob(b *inventory.Blob) (inventory.Figure, bool) {
	algorithm, hex, ok := strings.Cut(b.Digest, ":")
	if d.content == "" || !ok || strings.ContainsRune(b.Digest, '/') {
		return inventory.Figure{}, false
	}
	bytes, ok := blocksOf(filepath.Join(d.blobs, algorithm, hex))
	return inventory.Figure{Filesystem: d.content, Bytes: bytes, Inodes: 1}, ok
}

// blocksOf is what a file takes; false if it is not there.
func blocksOf(path string) (int64, bool) {
	info, err := os.Lstat(path)
	if err != nil {
		return 0, false
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, false
	}
	return st.Blocks * blockBytes, true
}

// Ingest implements [inventory.Figures]. Its bytes are what was downloaded.
func (d disks) Ingest(in *inventory.Ingest) (inventory.Figure, bool) {
	return inventory.Figure{Filesystem: d.content, Bytes: in.OffsetBytes, Inodes: 1}, d.content != ""
}
