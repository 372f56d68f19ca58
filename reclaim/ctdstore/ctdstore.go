// Package ctdstore asks containerd's store, beyond what the CRI tells, about one
// image that is about to be deleted: its names, who uses it in any namespace,
// whether it can be pulled again; and makes containerd collect its garbage. It
// implements reclaim.ImageStore, and only agent and reclaim's tests may import it.
package ctdstore

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	contentapi "github.com/containerd/containerd/api/services/content/v1"
	imagesapi "github.com/containerd/containerd/api/services/images/v1"
	leasesapi "github.com/containerd/containerd/api/services/leases/v1"
	namespacesapi "github.com/containerd/containerd/api/services/namespaces/v1"
	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/cleave-cri/cleave/reclaim"
)

// What containerd calls things (containerd, pkg/namespaces, pkg/labels, pkg/gc,
// internal/cri/labels).
const (
	namespaceHeader = "containerd-namespace"
	sourceLabel     = "containerd.io/distribution.source."
	contentRef      = "containerd.io/gc.ref.content"
	expireLabel     = "containerd.io/gc.expire"
	pinnedLabel     = "io.cri-containerd.pinned"
	pinnedValue     = "pinned"

	// readyTimeout bounds the question whether a snapshotter answers.
	readyTimeout = 5 * time.Second
	// leaseLife is how long a collection that was broken off leaves its lease.
	leaseLife = 5 * time.Minute
	// maxBlobs bounds the blobs of one image: an index of many platforms has some
	// hundred.
	maxBlobs = 10_000
)

// Store asks one containerd.
type Store struct {
	conn        grpc.ClientConnInterface
	namespace   string
	snapshotter string
}

var _ reclaim.ImageStore = (*Store)(nil)

// New returns a Store on a connection to containerd's socket. namespace is that
// of the CRI, snapshotter the one that its images are unpacked to.
func New(conn grpc.ClientConnInterface, namespace, snapshotter string) *Store {
	return &Store{conn: conn, namespace: namespace, snapshotter: snapshotter}
}

func in(ctx context.Context, namespace string) context.Context {
	return metadata.AppendToOutgoingContext(ctx, namespaceHeader, namespace)
}

// Image implements [reclaim.ImageStore]. The CRI keeps an image under its id,
// too, as a name like its others (containerd, internal/cri/server/images).
func (s *Store) Image(ctx context.Context, names []string) (reclaim.ImageFacts, error) {
	var facts reclaim.ImageFacts
	target, err := s.target(in(ctx, s.namespace), names)
	if err != nil {
		return facts, err
	}
	namespaces, err := namespacesapi.NewNamespacesClient(s.conn).List(ctx, &namespacesapi.ListNamespacesRequest{})
	if err != nil {
		return facts, fmt.Errorf("list namespaces: %w", err)
	}
	for _, n := range namespaces.GetNamespaces() {
		if err := s.users(ctx, n.GetName(), target, &facts); err != nil {
			return facts, err
		}
	}
	facts.NotPullable, err = s.notPullable(in(ctx, s.namespace), target, facts.Names)
	return facts, err
}

// target is the digest that an image's names stand for. CRI removes names one by
// one, so a removal that was broken off leaves some of them.
func (s *Store) target(ctx context.Context, names []string) (string, error) {
	client := imagesapi.NewImagesClient(s.conn)
	var target string
	var missing error
	for _, name := range names {
		own, err := client.Get(ctx, &imagesapi.GetImageRequest{Name: name})
		if status.Code(err) == codes.NotFound {
			missing = err
			continue
		}
		if err != nil {
			return "", fmt.Errorf("read image %q: %w", name, err)
		}
		digest := own.GetImage().GetTarget().GetDigest()
		if digest == "" || target != "" && digest != target {
			return "", fmt.Errorf("read image %q: its target is %q, and %q by another name", name, digest, target)
		}
		target = digest
	}
	if target == "" {
		return "", fmt.Errorf("read image %q: no name of it is there: %w", names, missing)
	}
	return target, nil
}

// users adds what one namespace has of the image with this target.
func (s *Store) users(ctx context.Context, namespace, target string, facts *reclaim.ImageFacts) error {
	ctx = in(ctx, namespace)
	list, err := imagesapi.NewImagesClient(s.conn).List(ctx, &imagesapi.ListImagesRequest{Filters: []string{`target.digest=="` + target + `"`}})
	if err != nil {
		return fmt.Errorf("list images of namespace %s: %w", namespace, err)
	}
	names := map[string]bool{}
	for _, image := range list.GetImages() {
		if image.GetTarget().GetDigest() != target {
			continue
		}
		names[image.GetName()] = true
		if namespace == s.namespace {
			facts.Names = append(facts.Names, image.GetName())
			facts.Pinned = facts.Pinned || image.GetLabels()[pinnedLabel] == pinnedValue
		}
	}
	if len(names) == 0 {
		return nil
	}
	stream, err := containersapi.NewContainersClient(s.conn).ListStream(ctx, &containersapi.ListContainersRequest{})
	for err == nil {
		var m *containersapi.ListContainerMessage
		if m, err = stream.Recv(); err == nil && names[m.GetContainer().GetImage()] {
			facts.Users = append(facts.Users, fmt.Sprintf("container %s of namespace %s", m.GetContainer().GetID(), namespace))
		}
	}
	if !errors.Is(err, io.EOF) {
		return fmt.Errorf("list containers of namespace %s: %w", namespace, err)
	}
	return nil
}

// notPullable says why an image can't be pulled again: a blob of it that is here
// came from no registry, or a name of it is not of a repository that its manifest
// came from. Blobs name those below them in their labels; those that are not here,
// of other platforms or discarded, do not matter.
func (s *Store) notPullable(ctx context.Context, target string, names []string) (why string, _ error) {
	client := contentapi.NewContentClient(s.conn)
	next, seen := []string{target}, map[string]bool{}
	for len(next) > 0 {
		digest := next[len(next)-1]
		next = next[:len(next)-1]
		if seen[digest] {
			continue
		}
		if seen[digest] = true; len(seen) > maxBlobs {
			return fmt.Sprintf("it has more than %d blobs", maxBlobs), nil
		}
		answer, err := client.Info(ctx, &contentapi.InfoRequest{Digest: digest})
		if status.Code(err) == codes.NotFound && digest != target {
			continue
		}
		if err != nil {
			return "", fmt.Errorf("read blob %s: %w", digest, err)
		}
		sources := map[string]bool{}
		for label, value := range answer.GetInfo().GetLabels() {
			if host, ok := strings.CutPrefix(label, sourceLabel); ok && value != "" {
				for repository := range strings.SplitSeq(value, ",") {
					sources[host+"/"+repository] = true
				}
			}
			if label == contentRef || strings.HasPrefix(label, contentRef+".") {
				next = append(next, value)
			}
		}
		if len(sources) == 0 {
			return "its blob " + digest + " came from no registry", nil
		}
		if digest != target {
			continue
		}
		for _, name := range names {
			if r := repositoryOf(name); r != "" && !sources[r] {
				return fmt.Sprintf("it did not come from where %q says", name), nil
			}
		}
	}
	return "", nil
}

// repositoryOf is a full name without its registry's port, its tag and its digest,
// as labels have it (containerd, core/remotes/docker/handler.go); empty for an id.
func repositoryOf(name string) string {
	name, _, _ = strings.Cut(name, "@")
	host, repository, ok := strings.Cut(name, "/")
	if !ok {
		return ""
	}
	if port := strings.LastIndexByte(host, ':'); port >= 0 && !strings.HasSuffix(host, "]") {
		host = host[:port]
	}
	host = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	if tag := strings.LastIndexByte(repository, ':'); tag >= 0 {
		repository = repository[:tag]
	}
	return host + "/" + repository
}

// Ready implements [reclaim.ImageStore]: the snapshotter has to answer.
func (s *Store) Ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(in(ctx, s.namespace), readyTimeout)
	defer cancel() // ends the listing, too
	stream, err := snapshotsapi.NewSnapshotsClient(s.conn).List(ctx, &snapshotsapi.ListSnapshotsRequest{Snapshotter: s.snapshotter})
	if err == nil {
		_, err = stream.Recv()
	}
	if err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("snapshotter %s does not answer: %w", s.snapshotter, err)
	}
	return nil
}

// Collect implements [reclaim.ImageStore]. Deleting a lease waits for a
// collection (containerd, api/services/leases: DeleteRequest.sync). containerd
// collects by itself, too, but only after a rest of fifty times as long as its last
// collection took (pkg/gc: pause_threshold 0.02).
func (s *Store) Collect(ctx context.Context) error {
	ctx = in(ctx, s.namespace)
	leases := leasesapi.NewLeasesClient(s.conn)
	name := "cleave-collect-" + rand.Text()
	if _, err := leases.Create(ctx, &leasesapi.CreateRequest{ID: name, Labels: map[string]string{
		expireLabel: time.Now().Add(leaseLife).UTC().Format(time.RFC3339),
	}}); err != nil {
		return fmt.Errorf("collect garbage: make a lease: %w", err)
	}
	if _, err := leases.Delete(ctx, &leasesapi.DeleteRequest{ID: name, Sync: true}); err != nil {
		return fmt.Errorf("collect garbage: delete the lease: %w", err)
	}
	return nil
}
