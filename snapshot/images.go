package snapshot

import (
	"context"
	"fmt"

	imagesapi "github.com/containerd/containerd/api/services/images/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/fieldmaskpb"
)

// managedLabel is on the images that CRI looks after (containerd,
// internal/cri/labels: ImageLabelKey).
const (
	managedLabel = "io.cri-containerd.image"
	managedValue = "managed"
)

// AnnounceImages makes CRI look again at its images that known does not have,
// and returns their number. CRI reads its images when containerd starts, and
// leaves out those whose snapshotter does not answer just then; it takes them in
// when an image is updated (containerd 2.4, internal/cri/server/images/check.go
// and events.go). The update changes nothing.
func (s *Store) AnnounceImages(ctx context.Context, known func(name string) bool) (int, error) {
	ctx = s.in(ctx)
	client := imagesapi.NewImagesClient(s.conn)
	list, err := client.List(ctx, &imagesapi.ListImagesRequest{Filters: []string{`labels."` + managedLabel + `"==` + managedValue}})
	if err != nil {
		return 0, fmt.Errorf("list containerd's images: %w", err)
	}
	n := 0
	for _, image := range list.GetImages() {
		if image.GetLabels()[managedLabel] != managedValue || known(image.GetName()) {
			continue
		}
		_, err := client.Update(ctx, &imagesapi.UpdateImageRequest{
			Image: image, UpdateMask: &fieldmaskpb.FieldMask{Paths: []string{"labels." + managedLabel}},
		})
		switch {
		case status.Code(err) == codes.NotFound: // removed meanwhile
		case err != nil:
			return n, fmt.Errorf("announce image %q: %w", image.GetName(), err)
		default:
			n++
		}
	}
	return n, nil
}
