package ctdstore

import (
	"context"
	"fmt"
	"strings"

	contentapi "github.com/containerd/containerd/api/services/content/v1"
	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/cleave-cri/cleave/engine/garbage"
	"github.com/cleave-cri/cleave/reclaim"
)

// snapshotRef is the label of a blob that names the top snapshot of an image
// (containerd, core/unpack); the snapshotter's name follows.
const snapshotRef = "containerd.io/gc.ref.snapshot."

// blockBytes is what files take in steps of, on the filesystems that there are.
const blockBytes = 4096

// Inventory reads facts and layers of images, each given by all its names and its
// id first, one image after the other, by containerd's own count: snapshots as they were measured when they were
// committed, blobs by their length in whole blocks. layers and blobs say which of
// the two are on the filesystem in question. For many images snapshot/inventory
// is the better source. An image that can't be read, such as one whose names stand for several manifests, is left out: it stays, and
// is no reason for others to stay.
func (s *Store) Inventory(ctx context.Context, images [][]string, layers, blobs bool) (reclaim.ImageInventory, error) {
	out := reclaim.ImageInventory{Facts: map[string]reclaim.ImageFacts{}, Layers: map[string][]garbage.Layer{}}
	known := &measured{snapshots: map[string]snapshot{}}
	for _, names := range images {
		id := names[0]
		var own []garbage.Layer
		facts, err := s.Image(ctx, names)
		if err == nil {
			own, err = s.layersOf(in(ctx, s.namespace), names, layers, blobs, known)
		}
		if err != nil {
			if code := status.Code(err); ctx.Err() != nil || code == codes.Unavailable || code == codes.DeadlineExceeded || code == codes.Canceled {
				return out, err
			}
			continue
		}
		out.Facts[id], out.Layers[id] = facts, own
	}
	return out, nil
}

// measured is what was read for other images before.
type measured struct{ snapshots map[string]snapshot }

type snapshot struct {
	parent string
	bytes  int64
}

func (s *Store) layersOf(ctx context.Context, names []string, layers, blobs bool, known *measured) ([]garbage.Layer, error) {
	target, err := s.target(ctx, names)
	if err != nil {
		return nil, err
	}
	out := []garbage.Layer{}
	content := contentapi.NewContentClient(s.conn)
	tops := map[string]bool{}
	next, seen := []string{target}, map[string]bool{}
	for len(next) > 0 && len(seen) < maxBlobs {
		digest := next[len(next)-1]
		next = next[:len(next)-1]
		if seen[digest] {
			continue
		}
		seen[digest] = true
		answer, err := content.Info(ctx, &contentapi.InfoRequest{Digest: digest})
		if status.Code(err) == codes.NotFound {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read blob %s: %w", digest, err)
		}
		if blobs {
			out = append(out, garbage.Layer{ID: digest, Bytes: (answer.GetInfo().GetSize() + blockBytes - 1) / blockBytes * blockBytes})
		}
		for label, value := range answer.GetInfo().GetLabels() {
			switch {
			case label == snapshotRef+s.snapshotter:
				tops[value] = true
			case label == contentRef || strings.HasPrefix(label, contentRef+"."):
				next = append(next, value)
			}
		}
	}
	if !layers {
		return out, nil
	}
	chain := map[string]bool{}
	for top := range tops {
		for key := top; key != "" && !chain[key]; key = known.snapshots[key].parent {
			chain[key] = true
			if err := s.measure(ctx, key, known); err != nil {
				return nil, err
			}
			out = append(out, garbage.Layer{ID: "snapshot " + key, Bytes: known.snapshots[key].bytes})
		}
	}
	return out, nil
}

func (s *Store) measure(ctx context.Context, key string, known *measured) error {
	if _, ok := known.snapshots[key]; ok {
		return nil
	}
	client := snapshotsapi.NewSnapshotsClient(s.conn)
	info, err := client.Stat(ctx, &snapshotsapi.StatSnapshotRequest{Snapshotter: s.snapshotter, Key: key})
	if err != nil {
		return fmt.Errorf("read snapshot %s: %w", key, err)
	}
	usage, err := client.Usage(ctx, &snapshotsapi.UsageRequest{Snapshotter: s.snapshotter, Key: key})
	if err != nil {
		return fmt.Errorf("measure snapshot %s: %w", key, err)
	}
	known.snapshots[key] = snapshot{parent: info.GetInfo().GetParent(), bytes: usage.GetSize()}
	return nil
}
