package snapshot

import (
	"context"
	"testing"

	imagesapi "github.com/containerd/containerd/api/services/images/v1"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// imageClient answers without a connection.
type imageClient struct {
	grpc.ClientConnInterface

	images  []*imagesapi.Image
	fails   map[string]error
	updated []string
}

func (c *imageClient) Invoke(_ context.Context, method string, in, out any, _ ...grpc.CallOption) error {
	switch in := in.(type) {
	case *imagesapi.ListImagesRequest:
		if answer, ok := out.(*imagesapi.ListImagesResponse); ok {
			answer.Images = c.images
		}
		return nil
	case *imagesapi.UpdateImageRequest:
		if paths := in.GetUpdateMask().GetPaths(); len(paths) != 1 || paths[0] != "labels.io.cri-containerd.image" {
			return status.Errorf(codes.InvalidArgument, "the update changes %v", paths)
		}
		c.updated = append(c.updated, in.GetImage().GetName())
		return c.fails[in.GetImage().GetName()]
	default:
		return status.Error(codes.Unimplemented, method)
	}
}

func TestAnnounceImages(t *testing.T) {
	t.Parallel()
	managed := map[string]string{managedLabel: managedValue}
	images := []*imagesapi.Image{
		{Name: "known", Labels: managed}, {Name: "lost", Labels: managed}, {Name: "not CRI's"}, {Name: "gone", Labels: managed}, {Name: "lost too", Labels: managed},
	}
	cases := []struct {
		name    string
		fails   map[string]error
		updated []string
		n       int
		fail    bool
	}{
		{"those that are not known", map[string]error{"gone": status.Error(codes.NotFound, "x")}, []string{"lost", "gone", "lost too"}, 2, false},
		{"stops at an error", map[string]error{"lost": status.Error(codes.Unavailable, "x")}, []string{"lost"}, 0, true},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			c := &imageClient{images: images, fails: tc.fails}
			n, err := NewStore(c, "k8s.io").AnnounceImages(t.Context(), func(name string) bool { return name == "known" })
			if n != tc.n || (err != nil) != tc.fail {
				t.Errorf("got %d, %v; want %d", n, err, tc.n)
			}
			if diff := cmp.Diff(tc.updated, c.updated); diff != "" {
				t.Errorf("updated (-want +got):\n%s", diff)
			}
		})
	}
}
