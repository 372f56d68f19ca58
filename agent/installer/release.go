package installer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	contentapi "github.com/containerd/containerd/api/services/content/v1"
	leasesapi "github.com/containerd/containerd/api/services/leases/v1"
	namespacesapi "github.com/containerd/containerd/api/services/namespaces/v1"
	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/fieldmaskpb"

	"github.com/cleave-cri/cleave/agent/upstream"
	"github.com/cleave-cri/cleave/snapshot/split/ctdconfig"
)

// gcLabel on an image's config says that containerd is to keep a snapshot of
// ours (containerd, docs/garbage-collection.md).
const gcLabel = "containerd.io/gc.ref.snapshot." + ctdconfig.Snapshotter

// leaseName is the name of the lease that is made to have garbage collected.
const leaseName = "cleave-uninstall"

// namespaceHeader is how a call names its namespace (containerd, pkg/namespaces).
const namespaceHeader = "containerd-namespace"

// store is containerd's, as far as the split snapshotter's snapshots go.
type store struct {
	conn io.Closer

	namespaces namespacesapi.NamespacesClient
	users      containersapi.ContainersClient
	content    contentapi.ContentClient
	snapshots  snapshotsapi.SnapshotsClient
	leases     leasesapi.LeasesClient
}

func (n node) store() (*store, error) {
	path := n.cfg.Runtime.Endpoint.Path()
	conn, err := upstream.Connect(path, upstream.Plain(path))
	if err != nil {
		return nil, err
	}
	return newStore(conn, conn), nil
}

func newStore(conn grpc.ClientConnInterface, closer io.Closer) *store {
	return &store{
		conn: closer, namespaces: namespacesapi.NewNamespacesClient(conn), users: containersapi.NewContainersClient(conn),
		content: contentapi.NewContentClient(conn), snapshots: snapshotsapi.NewSnapshotsClient(conn),
		leases: leasesapi.NewLeasesClient(conn),
	}
}

func (s *store) close() error { return s.conn.Close() }

func in(ctx context.Context, namespace string) context.Context {
	return metadata.AppendToOutgoingContext(ctx, namespaceHeader, namespace)
}

// spaces are all of containerd's namespaces.
func (s *store) spaces(ctx context.Context) ([]string, error) {
	answer, err := s.namespaces.List(ctx, &namespacesapi.ListNamespacesRequest{})
	if err != nil {
		return nil, fmt.Errorf("ask containerd for its namespaces: %w", errgrpc.ToNative(err))
	}
	var out []string
	for _, n := range answer.GetNamespaces() {
		out = append(out, n.GetName())
	}
	slices.Sort(out)
	return out, nil
}

// containers lists the containers that use the split snapshotter, each with its
// namespace.
func (s *store) containers(ctx context.Context) ([]string, error) {
	spaces, err := s.spaces(ctx)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, space := range spaces {
		answer, err := s.users.List(in(ctx, space), &containersapi.ListContainersRequest{})
		if err != nil {
			return nil, fmt.Errorf("ask containerd for the containers of %s: %w", space, errgrpc.ToNative(err))
		}
		for _, c := range answer.GetContainers() {
			if c.GetSnapshotter() == ctdconfig.Snapshotter {
				out = append(out, space+": "+c.GetID())
			}
		}
	}
	return out, nil
}

// release removes the split snapshotter's snapshots through containerd, with the
// labels that keep them: only layers of images, which can be unpacked again. A
// container, or a snapshot that somebody writes to or looks into, stops it before
// anything is removed.
func (s *store) release(ctx context.Context) error {
	inUse, err := s.containers(ctx)
	if err != nil {
		return err
	}
	spaces, err := s.spaces(ctx)
	if err != nil {
		return err
	}
	layers := map[string][]*snapshotsapi.Info{}
	for _, space := range spaces {
		list, err := s.list(in(ctx, space))
		if err != nil {
			return fmt.Errorf("ask containerd for the snapshots of %s: %w", space, err)
		}
		for _, info := range list {
			if info.GetKind() != snapshotsapi.Kind_COMMITTED {
				inUse = append(inUse, space+": snapshot "+info.GetName())
			}
		}
		layers[space] = list
	}
	if len(inUse) > 0 {
		return fmt.Errorf("the split snapshotter is in use, and no snapshot was removed:\n  %s", strings.Join(inUse, "\n  "))
	}
	for _, space := range spaces {
		if err := s.unlabel(in(ctx, space)); err != nil {
			return fmt.Errorf("take the labels off the images of %s: %w", space, err)
		}
		for _, info := range childrenFirst(layers[space]) {
			_, err := s.snapshots.Remove(in(ctx, space), &snapshotsapi.RemoveSnapshotRequest{Snapshotter: ctdconfig.Snapshotter, Key: info.GetName()})
			// containerd's own garbage collection may be faster, now that the labels are gone.
			if err := errgrpc.ToNative(err); err != nil && !errdefs.IsNotFound(err) {
				return fmt.Errorf("remove the snapshot %s of %s: %w", info.GetName(), space, err)
			}
		}
		if err := s.collect(in(ctx, space)); err != nil {
			return fmt.Errorf("have containerd clean up after the snapshots of %s: %w", space, err)
		}
	}
	return nil
}

// collect has containerd collect garbage, and waits for it. A snapshot that was removed is
// only forgotten by containerd; the snapshotter is told by the collection, some time
// later (core/metadata, snapshotter.Remove), and by then containerd may have been
// restarted without it. A lease that is deleted synchronously makes it happen now.
func (s *store) collect(ctx context.Context) error {
	_, err := s.leases.Create(ctx, &leasesapi.CreateRequest{ID: leaseName})
	if err := errgrpc.ToNative(err); err != nil && !errdefs.IsAlreadyExists(err) {
		return err
	}
	_, err = s.leases.Delete(ctx, &leasesapi.DeleteRequest{ID: leaseName, Sync: true})
	return errgrpc.ToNative(err)
}

func (s *store) list(ctx context.Context) ([]*snapshotsapi.Info, error) {
	stream, err := s.snapshots.List(ctx, &snapshotsapi.ListSnapshotsRequest{Snapshotter: ctdconfig.Snapshotter})
	if err != nil {
		return nil, errgrpc.ToNative(err)
	}
	var out []*snapshotsapi.Info
	for {
		answer, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			return nil, errgrpc.ToNative(err)
		}
		out = append(out, answer.GetInfo()...)
	}
}

// unlabel takes our label off all content. An update with an empty value takes a
// label away (containerd, core/metadata/boltutil, WriteLabels).
func (s *store) unlabel(ctx context.Context) error {
	stream, err := s.content.List(ctx, &contentapi.ListContentRequest{Filters: []string{fmt.Sprintf("labels.%q", gcLabel)}})
	if err != nil {
		return errgrpc.ToNative(err)
	}
	var digests []string
	for {
		answer, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return errgrpc.ToNative(err)
		}
		for _, info := range answer.GetInfo() {
			if info.GetLabels()[gcLabel] != "" {
				digests = append(digests, info.GetDigest())
			}
		}
	}
	for _, d := range digests {
		_, err := s.content.Update(ctx, &contentapi.UpdateRequest{
			Info:       &contentapi.Info{Digest: d, Labels: map[string]string{gcLabel: ""}},
			UpdateMask: &fieldmaskpb.FieldMask{Paths: []string{"labels." + gcLabel}},
		})
		if err := errgrpc.ToNative(err); err != nil && !errdefs.IsNotFound(err) {
			return err
		}
	}
	return nil
}

// childrenFirst orders snapshots so that each comes before its parent, which
// can't be removed while it has a child.
func childrenFirst(list []*snapshotsapi.Info) []*snapshotsapi.Info {
	byName := map[string]*snapshotsapi.Info{}
	for _, info := range list {
		byName[info.GetName()] = info
	}
	depth := func(info *snapshotsapi.Info) (n int) {
		for ; info != nil && n <= len(list); n++ {
			info = byName[info.GetParent()]
		}
		return n
	}
	out := slices.Clone(list)
	slices.SortStableFunc(out, func(a, b *snapshotsapi.Info) int { return depth(b) - depth(a) })
	return out
}
