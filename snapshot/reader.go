package snapshot

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	contentapi "github.com/containerd/containerd/api/services/content/v1"
	imagesapi "github.com/containerd/containerd/api/services/images/v1"
	leasesapi "github.com/containerd/containerd/api/services/leases/v1"
	namespacesapi "github.com/containerd/containerd/api/services/namespaces/v1"
	sandboxapi "github.com/containerd/containerd/api/services/sandbox/v1"
	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/platforms"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/cleave-cri/cleave/snapshot/inventory"
)

const (
	// maxRounds is how often the store is read again because it changed
	// meanwhile.
	maxRounds = 4
	// resyncAfter is when all snapshots are listed again although no event said
	// so: views and changed labels have none (CTD-92).
	resyncAfter = 10 * time.Minute
	// documentReads is how many documents are read at the same time.
	documentReads = 4
	// maxLevels is how deep documents are followed: indexes in indexes, a
	// manifest, a configuration.
	maxLevels = 8
)

// Reader reads everything that a containerd holds, in all namespaces. What is
// dear is read once: documents never change, and of snapshots only those are
// asked for again that an event was about, as long as [Reader.Follow] runs. All
// else containerd answers from its own database, in streams where there are.
type Reader struct {
	conn     grpc.ClientConnInterface
	platform platforms.MatchComparer
	changes  *changes

	// mu makes readings wait for each other. It is held while containerd is
	// asked: there is one reading at a time, and no other use of it.
	mu sync.Mutex
	// documents are by digest; guarded by mu.
	documents map[string]inventory.Document
	// snapshots are by place; guarded by mu.
	snapshots map[place]map[string]inventory.Snapshot
	// stream is that of the events that keep snapshots up to date; guarded by mu.
	stream uint64
	// listed is when the snapshots of a place were listed; guarded by mu.
	listed map[place]time.Time
}

// place is a snapshotter in a namespace.
type place struct{ namespace, snapshotter string }

// NewReader returns a Reader on a connection to containerd's socket.
func NewReader(conn grpc.ClientConnInterface) *Reader {
	return &Reader{
		conn: conn, platform: platforms.Only(platforms.DefaultSpec()), changes: newChanges(),
		documents: map[string]inventory.Document{}, snapshots: map[place]map[string]inventory.Snapshot{}, listed: map[place]time.Time{},
	}
}

func withNamespace(ctx context.Context, namespace string) context.Context {
	return metadata.AppendToOutgoingContext(ctx, namespaceHeader, namespace)
}

// Read returns what the store holds now. If something changes meanwhile it reads
// again, some times. Without [Reader.Follow] it can't tell, and says that the
// contents are unsettled.
//
// A snapshotter that does not answer is no error but told in Unread.
func (r *Reader) Read(ctx context.Context) (*inventory.Contents, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for round := 1; ; round++ {
		// What is told from now on is not in what is read.
		told := r.changes.take()
		if !told.following || told.stream != r.stream {
			clear(r.snapshots)
			r.stream = told.stream
		}
		for at, keys := range told.snapshots {
			if err := r.renew(ctx, at, keys); err != nil {
				delete(r.snapshots, at) // listing says what is wrong
			}
		}
		c, err := r.readAll(ctx)
		if err != nil {
			return nil, err
		}
		settled := told.following && r.changes.same(told.generation)
		if settled || !told.following || round == maxRounds {
			c.Unsettled = !settled
			return c, nil
		}
	}
}

func (r *Reader) readAll(ctx context.Context) (*inventory.Contents, error) {
	c := &inventory.Contents{At: time.Now()}
	var plugins Inventory
	if err := (&Store{conn: r.conn}).readPlugins(ctx, &plugins); err != nil {
		return nil, err
	}
	c.ContentRoot = plugins.ContentRoot
	for _, sn := range plugins.Snapshotters {
		c.Snapshotters = append(c.Snapshotters, inventory.Snapshotter(sn))
	}
	list, err := namespacesapi.NewNamespacesClient(r.conn).List(ctx, &namespacesapi.ListNamespacesRequest{})
	if err != nil {
		return nil, fmt.Errorf("list containerd's namespaces: %w", err)
	}
	for _, ns := range list.GetNamespaces() {
		read, unread, err := r.readNamespace(ctx, ns.GetName(), c.Snapshotters)
		if err != nil {
			return nil, fmt.Errorf("read namespace %s: %w", ns.GetName(), err)
		}
		c.Namespaces = append(c.Namespaces, read)
		c.Unread = append(c.Unread, unread...)
	}
	slices.SortFunc(c.Namespaces, func(a, b inventory.Namespace) int { return cmp.Compare(a.Name, b.Name) })
	if err := r.readDocuments(ctx, c.Namespaces); err != nil {
		return nil, err
	}
	// A reading may go on while the picture of the one before is made.
	c.Documents = make(map[string]inventory.Document, len(r.documents))
	for digest, d := range r.documents {
		c.Documents[digest] = d
	}
	return c, nil
}

// readNamespace reads leases first: what a pull has made is held by its lease
// until the image is there. It reads them again at the end, and takes both: a
// lease that came or went meanwhile counts.
func (r *Reader) readNamespace(ctx context.Context, name string, snapshotters []inventory.Snapshotter) (_ inventory.Namespace, unread []string, _ error) {
	ctx = withNamespace(ctx, name)
	ns := inventory.Namespace{Name: name}
	before, err := r.readLeases(ctx)
	if err != nil {
		return ns, nil, err
	}
	for _, read := range []func(context.Context, *inventory.Namespace) error{r.readContainers, r.readSandboxes, r.readImages, r.readContent, r.readIngests} {
		if err := read(ctx, &ns); err != nil {
			return ns, nil, err
		}
	}
	for _, sn := range snapshotters {
		if err := r.readSnapshots(ctx, place{name, sn.Name}); err != nil {
			if ctx.Err() != nil {
				return ns, nil, err
			}
			unread = append(unread, err.Error())
		}
	}
	after, err := r.readLeases(ctx)
	if err != nil {
		return ns, nil, err
	}
	ns.Leases = bothLeases(before, after)
	more, err := r.readNamed(ctx, &ns)
	if err != nil {
		return ns, nil, err
	}
	unread = append(unread, more...)
	for at, snapshots := range r.snapshots {
		if at.namespace == name {
			for _, s := range snapshots {
				ns.Snapshots = append(ns.Snapshots, s)
			}
		}
	}
	slices.SortFunc(ns.Snapshots, func(a, b inventory.Snapshot) int {
		return cmp.Or(cmp.Compare(a.Snapshotter, b.Snapshotter), cmp.Compare(a.Key, b.Key))
	})
	return ns, unread, nil
}

// bothLeases joins two readings of the leases.
func bothLeases(before, after []inventory.Lease) []inventory.Lease {
	for _, l := range before {
		i := slices.IndexFunc(after, func(other inventory.Lease) bool { return other.ID == l.ID })
		if i < 0 {
			after = append(after, l)
			continue
		}
		for _, res := range l.Resources {
			if !slices.Contains(after[i].Resources, res) {
				after[i].Resources = append(after[i].Resources, res)
			}
		}
	}
	return after
}

func (r *Reader) readLeases(ctx context.Context) (out []inventory.Lease, _ error) {
	client := leasesapi.NewLeasesClient(r.conn)
	list, err := client.List(ctx, &leasesapi.ListRequest{})
	if err != nil {
		return nil, fmt.Errorf("list leases: %w", err)
	}
	for _, l := range list.GetLeases() {
		resources, err := client.ListResources(ctx, &leasesapi.ListResourcesRequest{ID: l.GetID()})
		if status.Code(err) == codes.NotFound {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("list what lease %s holds: %w", l.GetID(), err)
		}
		lease := inventory.Lease{ID: l.GetID(), Labels: thatMatter(l.GetLabels()), CreatedAt: l.GetCreatedAt().AsTime()}
		for _, res := range resources.GetResources() {
			lease.Resources = append(lease.Resources, inventory.Resource{Type: res.GetType(), ID: res.GetID()})
		}
		out = append(out, lease)
	}
	return out, nil
}

// thatMatter leaves out the labels that say nothing here.
func thatMatter(labels map[string]string) map[string]string {
	var out map[string]string
	for label, value := range labels {
		if inventory.Matters(label) {
			if out == nil {
				out = make(map[string]string, len(labels))
			}
			out[label] = value
		}
	}
	return out
}

func (r *Reader) readContainers(ctx context.Context, ns *inventory.Namespace) error {
	stream, err := containersapi.NewContainersClient(r.conn).ListStream(ctx, &containersapi.ListContainersRequest{})
	for err == nil {
		var m *containersapi.ListContainerMessage
		if m, err = stream.Recv(); err == nil {
			c := m.GetContainer()
			ns.Containers = append(ns.Containers, inventory.Container{
				ID: c.GetID(), Image: c.GetImage(), Snapshotter: c.GetSnapshotter(), SnapshotKey: c.GetSnapshotKey(),
				SandboxID: c.GetSandbox(), Labels: thatMatter(c.GetLabels()),
			})
		}
	}
	if !errors.Is(err, io.EOF) {
		return fmt.Errorf("list containers: %w", err)
	}
	return nil
}

func (r *Reader) readSandboxes(ctx context.Context, ns *inventory.Namespace) error {
	list, err := sandboxapi.NewStoreClient(r.conn).List(ctx, &sandboxapi.StoreListRequest{})
	if err != nil {
		return fmt.Errorf("list sandboxes: %w", err)
	}
	for _, s := range list.GetList() {
		ns.Sandboxes = append(ns.Sandboxes, inventory.Sandbox{ID: s.GetSandboxID(), Labels: thatMatter(s.GetLabels())})
	}
	return nil
}

func (r *Reader) readImages(ctx context.Context, ns *inventory.Namespace) error {
	list, err := imagesapi.NewImagesClient(r.conn).List(ctx, &imagesapi.ListImagesRequest{})
	if err != nil {
		return fmt.Errorf("list images: %w", err)
	}
	for _, i := range list.GetImages() {
		ns.Images = append(ns.Images, inventory.Record{
			Name: i.GetName(), Target: i.GetTarget().GetDigest(), Labels: thatMatter(i.GetLabels()), CreatedAt: i.GetCreatedAt().AsTime(),
		})
	}
	return nil
}

func (r *Reader) readContent(ctx context.Context, ns *inventory.Namespace) error {
	stream, err := contentapi.NewContentClient(r.conn).List(ctx, &contentapi.ListContentRequest{})
	for err == nil {
		var m *contentapi.ListContentResponse
		if m, err = stream.Recv(); err == nil {
			for _, b := range m.GetInfo() {
				ns.Blobs = append(ns.Blobs, inventory.Blob{
					Digest: b.GetDigest(), SizeBytes: b.GetSize(), Labels: thatMatter(b.GetLabels()), CreatedAt: b.GetCreatedAt().AsTime(),
				})
			}
		}
	}
	if !errors.Is(err, io.EOF) {
		return fmt.Errorf("list content: %w", err)
	}
	return nil
}

func (r *Reader) readIngests(ctx context.Context, ns *inventory.Namespace) error {
	list, err := contentapi.NewContentClient(r.conn).ListStatuses(ctx, &contentapi.ListStatusesRequest{})
	if err != nil {
		return fmt.Errorf("list downloads: %w", err)
	}
	for _, in := range list.GetStatuses() {
		ns.Ingests = append(ns.Ingests, inventory.Ingest{
			Ref: in.GetRef(), OffsetBytes: in.GetOffset(), TotalBytes: in.GetTotal(), Expected: in.GetExpected(),
			StartedAt: in.GetStartedAt().AsTime(), UpdatedAt: in.GetUpdatedAt().AsTime(),
		})
	}
	return nil
}

// readSnapshots lists a snapshotter, unless what is known of it is kept up to
// date by events: containerd asks the snapshotter for every single one (CTD-6).
func (r *Reader) readSnapshots(ctx context.Context, at place) error {
	if r.snapshots[at] != nil && time.Since(r.listed[at]) < resyncAfter {
		return nil
	}
	delete(r.snapshots, at)
	listed := time.Now()
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	snapshots := map[string]inventory.Snapshot{}
	stream, err := snapshotsapi.NewSnapshotsClient(r.conn).List(ctx, &snapshotsapi.ListSnapshotsRequest{Snapshotter: at.snapshotter})
	for err == nil {
		var m *snapshotsapi.ListSnapshotsResponse
		if m, err = stream.Recv(); err == nil {
			for _, info := range m.GetInfo() {
				snapshots[info.GetName()] = snapshotOf(at.snapshotter, info)
			}
		}
	}
	if !errors.Is(err, io.EOF) {
		return fmt.Errorf("list snapshots of %s in namespace %s: %w", at.snapshotter, at.namespace, err)
	}
	r.snapshots[at], r.listed[at] = snapshots, listed
	return nil
}

func snapshotOf(snapshotter string, info *snapshotsapi.Info) inventory.Snapshot {
	kind := inventory.Active
	switch info.GetKind() {
	case snapshotsapi.Kind_COMMITTED:
		kind = inventory.Committed
	case snapshotsapi.Kind_VIEW:
		kind = inventory.View
	default:
	}
	return inventory.Snapshot{
		Snapshotter: snapshotter, Key: info.GetName(), Parent: info.GetParent(), Kind: kind,
		Labels: thatMatter(info.GetLabels()), CreatedAt: info.GetCreatedAt().AsTime(),
	}
}

// renew asks again for snapshots that events were about.
func (r *Reader) renew(ctx context.Context, at place, keys map[string]bool) error {
	snapshots := r.snapshots[at]
	if snapshots == nil {
		return nil // the next listing has them
	}
	if len(keys) > 100 && len(keys) > len(snapshots)/2 {
		delete(r.snapshots, at) // listing is less work
		return nil
	}
	for key := range keys {
		s, ok, err := r.stat(ctx, at, key)
		if err != nil {
			return err
		}
		if !ok {
			delete(snapshots, key)
			continue
		}
		snapshots[key] = s
	}
	return nil
}

func (r *Reader) stat(ctx context.Context, at place, key string) (_ inventory.Snapshot, ok bool, _ error) {
	ctx, cancel := context.WithTimeout(withNamespace(ctx, at.namespace), listTimeout)
	defer cancel()
	answer, err := snapshotsapi.NewSnapshotsClient(r.conn).Stat(ctx, &snapshotsapi.StatSnapshotRequest{Snapshotter: at.snapshotter, Key: key})
	if status.Code(err) == codes.NotFound {
		return inventory.Snapshot{}, false, nil
	}
	if err != nil {
		return inventory.Snapshot{}, false, fmt.Errorf("ask for snapshot %q of %s in namespace %s: %w", key, at.snapshotter, at.namespace, err)
	}
	return snapshotOf(at.snapshotter, answer.GetInfo()), true, nil
}

// readNamed asks for snapshots that containers and leases name and no event told
// of: there is none for a view.
func (r *Reader) readNamed(ctx context.Context, ns *inventory.Namespace) (unread []string, _ error) {
	missing := map[place]map[string]bool{}
	want := func(snapshotter, key string) {
		at := place{ns.Name, snapshotter}
		if snapshots := r.snapshots[at]; snapshots != nil {
			if _, ok := snapshots[key]; !ok {
				if missing[at] == nil {
					missing[at] = map[string]bool{}
				}
				missing[at][key] = true
			}
		}
	}
	for i := range ns.Containers {
		want(ns.Containers[i].Snapshotter, ns.Containers[i].SnapshotKey)
	}
	for i := range ns.Leases {
		for _, res := range ns.Leases[i].Resources {
			if snapshotter, ok := res.Snapshotter(); ok {
				want(snapshotter, res.ID)
			}
		}
	}
	for at, keys := range missing {
		if err := r.renew(ctx, at, keys); err != nil {
			if ctx.Err() != nil {
				return nil, err
			}
			unread = append(unread, err.Error())
		}
	}
	return unread, nil
}

// readDocuments reads the documents that are not known yet, level by level, and
// forgets those that no image leads to any more.
func (r *Reader) readDocuments(ctx context.Context, namespaces []inventory.Namespace) error {
	type wanted struct {
		digest string
		kind   documentKind
	}
	where := map[wanted]string{} // a namespace that has it
	for i := range namespaces {
		for _, record := range namespaces[i].Images {
			where[wanted{record.Target, manifestOrIndex}] = namespaces[i].Name
		}
	}
	sizes := map[[2]string]int64{}
	for i := range namespaces {
		for j := range namespaces[i].Blobs {
			sizes[[2]string{namespaces[i].Name, namespaces[i].Blobs[j].Digest}] = namespaces[i].Blobs[j].SizeBytes
		}
	}
	keep := map[string]inventory.Document{}
	for range maxLevels {
		var mu sync.Mutex
		next := map[wanted]string{}
		g, ctx := errgroup.WithContext(ctx)
		g.SetLimit(documentReads)
		for w, namespace := range where {
			if size, there := sizes[[2]string{namespace, w.digest}]; !there || size > maxDocumentBytes {
				continue
			}
			document, ok := r.documents[w.digest]
			g.Go(func() error {
				if !ok {
					content, there, err := r.readBlob(ctx, namespace, w.digest)
					if err != nil || !there {
						return err
					}
					if document, err = parseDocument(content, w.kind, r.platform); err != nil {
						return nil //nolint:nilerr // the image can't be resolved; containerd can't either
					}
				}
				mu.Lock()
				defer mu.Unlock()
				keep[w.digest] = document
				if document.Config != "" {
					next[wanted{document.Config, configuration}] = namespace
				} else if len(document.Manifests) > 0 {
					next[wanted{document.Manifests[0], manifestOrIndex}] = namespace
				}
				return nil
			})
		}
		if err := g.Wait(); err != nil {
			return fmt.Errorf("read the images' documents: %w", err)
		}
		where = next
	}
	r.documents = keep
	return nil
}

// ContentRoot asks where the content store is, an empty path if containerd does
// not say.
func (s *Store) ContentRoot(ctx context.Context) (string, error) {
	var inv Inventory
	err := s.readPlugins(ctx, &inv)
	return inv.ContentRoot, err
}
