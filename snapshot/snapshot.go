// Package snapshot reads containerd's store through its API: which snapshots
// there are, whose they are, and where their bytes lie. It reads only.
//
// It knows containerd and the tree walk, not the CRI and not the layout of the
// node; agent puts them together. It may import fsstats/walk, fsstats/quota
// and fsstats/index, and nothing else of ours.
package snapshot

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	introspectionapi "github.com/containerd/containerd/api/services/introspection/v1"
	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	versionapi "github.com/containerd/containerd/api/services/version/v1"
	"github.com/containerd/containerd/api/types"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
)

// Class says what a snapshot is for.
type Class string

// The classes of snapshots.
const (
	// Image is a committed layer. It is read-only and shared.
	Image Class = "image"
	// Extraction is a layer that is being unpacked.
	Extraction Class = "extraction"
	// Container is the writable layer of a container.
	Container Class = "container"
	// Sandbox is the writable layer of a pod's sandbox.
	Sandbox Class = "sandbox"
	// View is a read-only look at layers. It has nothing of its own.
	View Class = "view"
	// Other is everything else that is written to: image volumes, snapshots
	// made by hand, left-overs.
	Other Class = "other"
)

// Layer is one snapshot.
type Layer struct {
	Snapshotter string
	Key         string
	Class       Class
	// ContainerID is set for Container and Sandbox.
	ContainerID string
	CreatedAt   time.Time
}

// Snapshotter is a snapshot plugin of containerd.
type Snapshotter struct {
	Name string
	// Root is where it says that its data is, empty if it does not say
	// (the export "root" of the plugin, CTD-4).
	Root string
}

// Inventory is what the store held at one moment. Its parts are read one after
// the other, so a snapshot that comes or goes meanwhile may be missing or be of
// class [Other].
type Inventory struct {
	// Snapshotters are those that containerd could start, by name.
	Snapshotters []Snapshotter
	// Unread names the snapshotters whose layers could not be listed: nothing
	// is known of what they hold now.
	Unread []string
	// ContentRoot is where the content store is: compressed layers and
	// unfinished downloads. Empty if containerd does not say.
	ContentRoot string
	// Layers are in the order of snapshotter and key.
	Layers []Layer
}

// Usage is what a snapshot takes by containerd's own count.
type Usage struct {
	Bytes, Inodes int64
}

// Store reads one namespace of a containerd.
type Store struct {
	conn      grpc.ClientConnInterface
	namespace string
	// once, if it is not nil, remembers the first answer of Inventory.
	once *onceInventory
}

type onceInventory struct {
	sync.Once
	inventory Inventory
	err       error
}

// NewStore returns a Store on a connection to containerd's socket. CRI keeps
// its things in the namespace "k8s.io".
func NewStore(conn grpc.ClientConnInterface, namespace string) *Store {
	return &Store{conn: conn, namespace: namespace}
}

// ReadOnce returns a Store that reads its inventory once and then tells the same,
// for a command that looks at it from several sides.
func (s *Store) ReadOnce() *Store {
	return &Store{conn: s.conn, namespace: s.namespace, once: &onceInventory{}}
}

// namespaceHeader names the namespace of a call (containerd, pkg/namespaces:
// GRPCHeader).
const namespaceHeader = "containerd-namespace"

func (s *Store) in(ctx context.Context) context.Context {
	return metadata.AppendToOutgoingContext(ctx, namespaceHeader, s.namespace)
}

// Version returns containerd's version as it says it itself, such as "v2.4.2".
func (s *Store) Version(ctx context.Context) (string, error) {
	v, err := versionapi.NewVersionClient(s.conn).Version(ctx, &emptypb.Empty{})
	if err != nil {
		return "", fmt.Errorf("ask containerd for its version: %w", err)
	}
	return v.GetVersion(), nil
}

// Plugin types and exports (containerd, plugins/types.go and plugins/snapshots).
const (
	snapshotterType = "io.containerd.snapshotter.v1"
	contentType     = "io.containerd.content.v1"
	rootExport      = "root"
)

// listTimeout bounds the listing of one snapshotter: one behind a socket may
// hang (CTD-57), and must not take the time of the others.
const listTimeout = 10 * time.Second

// ErrUnread says that some snapshotters could not be read; the others were.
var ErrUnread = errors.New("a snapshotter can't be read")

// Inventory reads the store. Where only some snapshotters fail, for instance one
// whose process is down, it returns what the others hold together with an error
// that wraps [ErrUnread]; after any other error the Inventory is empty.
func (s *Store) Inventory(ctx context.Context) (Inventory, error) {
	if s.once == nil {
		return s.readInventory(ctx)
	}
	s.once.Do(func() { s.once.inventory, s.once.err = s.readInventory(ctx) })
	return s.once.inventory, s.once.err
}

func (s *Store) readInventory(ctx context.Context) (Inventory, error) {
	ctx = s.in(ctx)
	var inv Inventory
	if err := s.readPlugins(ctx, &inv); err != nil {
		return Inventory{}, err
	}
	owners, err := s.owners(ctx)
	if err != nil {
		return Inventory{}, err
	}
	var errs []error
	for _, sn := range inv.Snapshotters {
		layers, err := s.readLayers(ctx, sn.Name, owners)
		if ctx.Err() != nil {
			return Inventory{}, fmt.Errorf("list snapshots of %s: %w", sn.Name, ctx.Err())
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%w: %w", ErrUnread, err))
			inv.Unread = append(inv.Unread, sn.Name)
			continue
		}
		inv.Layers = append(inv.Layers, layers...)
	}
	slices.SortFunc(inv.Layers, func(a, b Layer) int {
		return cmp.Or(cmp.Compare(a.Snapshotter, b.Snapshotter), cmp.Compare(a.Key, b.Key))
	})
	return inv, errors.Join(errs...)
}

func (s *Store) readPlugins(ctx context.Context, inv *Inventory) error {
	plugins, err := introspectionapi.NewIntrospectionClient(s.conn).Plugins(ctx, &introspectionapi.PluginsRequest{
		Filters: []string{"type==" + snapshotterType, "type==" + contentType},
	})
	if err != nil {
		return fmt.Errorf("list containerd's plugins: %w", err)
	}
	for _, p := range plugins.GetPlugins() {
		switch {
		case p.GetInitErr() != nil:
			// Not usable here, for instance for a filesystem that is not there.
		case p.GetType() == snapshotterType:
			inv.Snapshotters = append(inv.Snapshotters, Snapshotter{Name: p.GetID(), Root: p.GetExports()[rootExport]})
		case p.GetType() == contentType:
			inv.ContentRoot = p.GetExports()[rootExport]
		}
	}
	slices.SortFunc(inv.Snapshotters, func(a, b Snapshotter) int { return cmp.Compare(a.Name, b.Name) })
	return nil
}

// owner is a container as far as its snapshot is concerned.
type owner struct {
	id      string
	sandbox bool
}

type layerKey struct{ snapshotter, key string }

// kindLabel tells a pod's sandbox from its containers (containerd,
// internal/cri/labels).
const (
	kindLabel   = "io.cri-containerd.kind"
	kindSandbox = "sandbox"
)

func (s *Store) owners(ctx context.Context) (map[layerKey]owner, error) {
	// The stream has no limit of size, unlike the list.
	stream, err := containersapi.NewContainersClient(s.conn).ListStream(ctx, &containersapi.ListContainersRequest{})
	if err != nil {
		return nil, fmt.Errorf("list containers: %w", err)
	}
	owners := map[layerKey]owner{}
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return owners, nil
		}
		if err != nil {
			return nil, fmt.Errorf("list containers: %w", err)
		}
		c := m.GetContainer()
		owners[layerKey{c.GetSnapshotter(), c.GetSnapshotKey()}] = owner{id: c.GetID(), sandbox: c.GetLabels()[kindLabel] == kindSandbox}
	}
}

func (s *Store) readLayers(ctx context.Context, snapshotter string, owners map[layerKey]owner) ([]Layer, error) {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	var layers []Layer
	stream, err := snapshotsapi.NewSnapshotsClient(s.conn).List(ctx, &snapshotsapi.ListSnapshotsRequest{Snapshotter: snapshotter})
	if err != nil {
		return nil, fmt.Errorf("list snapshots of %s: %w", snapshotter, err)
	}
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return layers, nil
		}
		if err != nil {
			return nil, fmt.Errorf("list snapshots of %s: %w", snapshotter, err)
		}
		for _, info := range m.GetInfo() {
			o, owned := owners[layerKey{snapshotter, info.GetName()}]
			layer := Layer{
				Snapshotter: snapshotter,
				Key:         info.GetName(),
				Class:       classOf(info.GetKind(), info.GetName(), o, owned),
				CreatedAt:   info.GetCreatedAt().AsTime(),
			}
			if layer.Class == Container || layer.Class == Sandbox {
				layer.ContainerID = o.id
			}
			layers = append(layers, layer)
		}
	}
}

// extractionKey is the form of the key under which containerd unpacks a layer,
// as its clients see it. A container's name can't hold a space, so none looks
// like this (CTD-24, CTD-26).
var extractionKey = regexp.MustCompile(`^extract-\S+ sha256:[0-9a-f]{64}$`)

// classOf decides by the snapshot's kind, its owner, and the form of its key,
// never by labels: pods and images can set those (CTD-25).
func classOf(kind snapshotsapi.Kind, key string, o owner, owned bool) Class {
	switch {
	case kind == snapshotsapi.Kind_COMMITTED:
		return Image
	case kind == snapshotsapi.Kind_VIEW && !owned:
		return View
	case owned && o.sandbox:
		return Sandbox
	case owned:
		return Container
	case kind == snapshotsapi.Kind_ACTIVE && extractionKey.MatchString(key):
		return Extraction
	default:
		return Other
	}
}

// ErrGone says that a snapshot is no longer there: it was removed after it was
// listed.
var ErrGone = errors.New("the snapshot is gone")

// goneIfSaid gives an error of containerd that means so the class [ErrGone].
func goneIfSaid(err error) error {
	if status.Code(err) == codes.NotFound {
		return fmt.Errorf("%w: %w", ErrGone, err)
	}
	return err
}

// Folders are the places in the file system that a snapshot uses.
type Folders struct {
	// Upper holds what is written to the snapshot. It is empty where there is
	// no such folder: for a view, or a snapshotter that uses block devices.
	Upper string
	// Lower is the folder of the committed layer directly below, empty if there
	// is none or the snapshotter does not say.
	Lower string
}

// Folders asks where a snapshot's bytes are. It does not work for committed
// layers, which can't be mounted.
func (s *Store) Folders(ctx context.Context, l Layer) (Folders, error) {
	m, err := snapshotsapi.NewSnapshotsClient(s.conn).Mounts(s.in(ctx), &snapshotsapi.MountsRequest{Snapshotter: l.Snapshotter, Key: l.Key})
	if err != nil {
		return Folders{}, fmt.Errorf("ask for the mounts of snapshot %q of %s: %w", l.Key, l.Snapshotter, goneIfSaid(err))
	}
	return foldersOf(m.GetMounts()), nil
}

// ContainerFolders asks where a container's writable layer is. The error is [ErrGone] if there is no such container.
func (s *Store) ContainerFolders(ctx context.Context, containerID string) (Folders, error) {
	answer, err := containersapi.NewContainersClient(s.conn).Get(s.in(ctx), &containersapi.GetContainerRequest{ID: containerID})
	if err != nil {
		return Folders{}, fmt.Errorf("ask for container %s: %w", containerID, goneIfSaid(err))
	}
	c := answer.GetContainer()
	return s.Folders(ctx, Layer{Snapshotter: c.GetSnapshotter(), Key: c.GetSnapshotKey()})
}

// foldersOf finds the folders in the mounts that a snapshotter gives: the upper
// and the nearest lower directory of an overlay; the source of a bind mount,
// which is how a snapshot without parent is mounted, and read-only how a view of
// a single layer is (CTD-22).
func foldersOf(mounts []*types.Mount) Folders {
	if len(mounts) == 0 {
		return Folders{}
	}
	var f Folders
	last := mounts[len(mounts)-1]
	switch last.GetType() {
	case "overlay":
		for _, o := range last.GetOptions() {
			if upper, ok := strings.CutPrefix(o, "upperdir="); ok {
				f.Upper = upper
			}
			if lowers, ok := strings.CutPrefix(o, "lowerdir="); ok {
				f.Lower, _, _ = strings.Cut(lowers, ":")
			}
		}
	case "bind":
		if slices.Contains(last.GetOptions(), "ro") {
			f.Lower = last.GetSource()
		} else {
			f.Upper = last.GetSource()
		}
	}
	return f
}

// Usage asks containerd what a snapshot takes. For a committed layer the answer
// is a stored figure and costs nothing; for any other containerd walks (CTD-8).
func (s *Store) Usage(ctx context.Context, l Layer) (Usage, error) {
	u, err := snapshotsapi.NewSnapshotsClient(s.conn).Usage(s.in(ctx), &snapshotsapi.UsageRequest{Snapshotter: l.Snapshotter, Key: l.Key})
	if err != nil {
		return Usage{}, fmt.Errorf("ask for the usage of snapshot %q of %s: %w", l.Key, l.Snapshotter, goneIfSaid(err))
	}
	return Usage{Bytes: u.GetSize(), Inodes: u.GetInodes()}, nil
}
