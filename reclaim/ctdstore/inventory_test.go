package ctdstore

import (
	"context"
	"fmt"
	"io"
	"testing"

	contentapi "github.com/containerd/containerd/api/services/content/v1"
	imagesapi "github.com/containerd/containerd/api/services/images/v1"
	namespacesapi "github.com/containerd/containerd/api/services/namespaces/v1"
	"github.com/containerd/containerd/api/types"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// store is containerd's, with images by name whose manifest is their only blob.
type store struct {
	targets map[string]string
	away    string // a blob about which nobody answers
}

func (s store) Invoke(_ context.Context, method string, args, reply any, _ ...grpc.CallOption) error {
	image := func(name, target string) *imagesapi.Image {
		return &imagesapi.Image{Name: name, Target: &types.Descriptor{Digest: target}}
	}
	switch r := reply.(type) {
	case *imagesapi.GetImageResponse:
		asked, ok := args.(*imagesapi.GetImageRequest)
		target := s.targets[asked.GetName()]
		if !ok || target == "" {
			return status.Error(codes.NotFound, asked.GetName())
		}
		r.Image = image(asked.GetName(), target)
	case *imagesapi.ListImagesResponse:
		for name, target := range s.targets {
			r.Images = append(r.Images, image(name, target))
		}
	case *namespacesapi.ListNamespacesResponse:
		r.Namespaces = []*namespacesapi.Namespace{{Name: "k8s.io"}}
	case *contentapi.InfoResponse:
		if asked, ok := args.(*contentapi.InfoRequest); !ok || asked.GetDigest() == s.away {
			return status.Error(codes.Unavailable, "containerd is being restarted")
		}
		r.Info = &contentapi.Info{Size: 1, Labels: map[string]string{sourceLabel + "docker.io": "library/app"}}
	default:
		return fmt.Errorf("%s is not asked in this test", method)
	}
	return nil
}

func (store) NewStream(context.Context, *grpc.StreamDesc, string, ...grpc.CallOption) (grpc.ClientStream, error) {
	return noContainers{}, nil
}

type noContainers struct{ grpc.ClientStream }

func (noContainers) SendMsg(any) error { return nil }
func (noContainers) CloseSend() error  { return nil }
func (noContainers) RecvMsg(any) error { return io.EOF }

// One image that can't be understood stays; the others may go all the same. Where containerd does not answer nothing is known.
func TestAnOddImageIsNoReasonForOthersToStay(t *testing.T) {
	t.Parallel()
	s := store{targets: map[string]string{"good": "sha256:1", "docker.io/library/app:1": "sha256:1", "odd": "sha256:2", "docker.io/library/app:2": "sha256:3"}}
	images := [][]string{{"odd", "docker.io/library/app:2"}, {"good", "docker.io/library/app:1"}, {"vanished"}}
	got, err := New(s, "k8s.io", "overlayfs").Inventory(t.Context(), images, false, true)
	if err != nil {
		t.Fatal(err)
	}
	if f, ok := got.Facts["good"]; !ok || f.NotPullable != "" || len(got.Layers["good"]) != 1 {
		t.Errorf("the good one: %+v, %v", f, got.Layers["good"])
	}
	if len(got.Facts) != 1 || len(got.Layers) != 1 {
		t.Errorf("facts %v, layers %v", got.Facts, got.Layers)
	}
	s.away = "sha256:1"
	if got, err := New(s, "k8s.io", "overlayfs").Inventory(t.Context(), images, false, true); status.Code(err) != codes.Unavailable {
		t.Errorf("while containerd is away: %v, %v", got.Facts, err)
	}
}
