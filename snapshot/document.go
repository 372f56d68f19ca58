package snapshot

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"

	contentapi "github.com/containerd/containerd/api/services/content/v1"
	"github.com/containerd/platforms"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/cleave-cri/cleave/snapshot/inventory"
)

// maxDocumentBytes is the largest index, manifest or configuration that is read;
// registries take 4 MiB of a manifest. An image with a larger one counts as one
// that can't be resolved.
const maxDocumentBytes = 8 << 20

// descriptor is a reference in an index or manifest (OCI image-spec,
// descriptor.md).
type descriptor struct {
	Digest   string              `json:"digest"`
	Size     int64               `json:"size"`
	Platform *platforms.Platform `json:"platform"`
}

// imageDocument is what matters of an index, a manifest or an image's
// configuration; the fields tell which of them it is.
type imageDocument struct {
	Manifests []descriptor `json:"manifests"`
	Config    *descriptor  `json:"config"`
	Layers    []descriptor `json:"layers"`
	RootFS    struct {
		DiffIDs []string `json:"diff_ids"`
	} `json:"rootfs"`
}

// documentKind is what a document is expected to be.
type documentKind int

const (
	manifestOrIndex documentKind = iota
	configuration
)

// parseDocument reads an index, manifest or configuration.
func parseDocument(content []byte, kind documentKind, platform platforms.MatchComparer) (inventory.Document, error) {
	var d imageDocument
	if kind == configuration {
		// A configuration has a "config" too, of another form.
		var c struct {
			RootFS struct {
				DiffIDs []string `json:"diff_ids"`
			} `json:"rootfs"`
		}
		if err := json.Unmarshal(content, &c); err != nil {
			return inventory.Document{}, err
		}
		return inventory.Document{ChainIDs: chainIDs(c.RootFS.DiffIDs), SizeBytes: int64(len(content))}, nil
	}
	if err := json.Unmarshal(content, &d); err != nil {
		return inventory.Document{}, err
	}
	out := inventory.Document{SizeBytes: int64(len(content))}
	if d.Config != nil {
		out.Config, out.ConfigSizeBytes = d.Config.Digest, d.Config.Size
		for _, l := range d.Layers {
			out.Layers = append(out.Layers, inventory.Descriptor{Digest: l.Digest, SizeBytes: l.Size})
		}
		return out, nil
	}
	for _, m := range forPlatform(d.Manifests, platform) {
		out.Manifests = append(out.Manifests, m.Digest)
	}
	return out, nil
}

// forPlatform are the manifests of an index that suit a platform, in the order in
// which containerd takes them: those that say for which platform they are before
// those that don't (containerd, core/images/image.go: Manifest).
func forPlatform(all []descriptor, platform platforms.MatchComparer) (out []descriptor) {
	for _, m := range all {
		if m.Platform == nil || platform.Match(*m.Platform) {
			out = append(out, m)
		}
	}
	slices.SortStableFunc(out, func(a, b descriptor) int {
		switch {
		case a.Platform == nil && b.Platform == nil:
			return 0
		case a.Platform == nil:
			return 1
		case b.Platform == nil:
			return -1
		case platform.Less(*a.Platform, *b.Platform):
			return -1
		case platform.Less(*b.Platform, *a.Platform):
			return 1
		default:
			return 0
		}
	})
	return out
}

// chainIDs name the snapshots of layers by what is in them and below them (OCI
// image-spec, config.md, "Layer ChainID").
func chainIDs(diffIDs []string) []string {
	out := make([]string, len(diffIDs))
	for i, diff := range diffIDs {
		if i == 0 {
			out[i] = diff
			continue
		}
		sum := sha256.Sum256([]byte(out[i-1] + " " + diff))
		out[i] = "sha256:" + hex.EncodeToString(sum[:])
	}
	return out
}

// readBlob reads a small blob of one namespace. ok is false if it is gone.
func (r *Reader) readBlob(ctx context.Context, namespace, digest string) (content []byte, ok bool, err error) {
	ctx = withNamespace(ctx, namespace)
	stream, err := contentapi.NewContentClient(r.conn).Read(ctx, &contentapi.ReadContentRequest{Digest: digest})
	for err == nil {
		var part *contentapi.ReadContentResponse
		if part, err = stream.Recv(); err == nil {
			content = append(content, part.GetData()...)
		}
	}
	switch {
	case errors.Is(err, io.EOF):
		return content, true, nil
	case status.Code(err) == codes.NotFound:
		return nil, false, nil
	default:
		return nil, false, fmt.Errorf("read blob %s: %w", digest, err)
	}
}
