package reclaim

import (
	"os"
	"strings"
	"testing"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	contentapi "github.com/containerd/containerd/api/services/content/v1"
	imagesapi "github.com/containerd/containerd/api/services/images/v1"
	namespacesapi "github.com/containerd/containerd/api/services/namespaces/v1"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/fieldmaskpb"
)

func syncfs(f *os.File) error { return unix.Syncfs(int(f.Fd())) }

// unlabel makes an image's first blob look as if it had been imported.
func (n *realNode) unlabel(t *testing.T, id string) {
	t.Helper()
	ctx := metadata.AppendToOutgoingContext(bounded(t), "containerd-namespace", namespace)
	own, err := imagesapi.NewImagesClient(n.client.Conn()).Get(ctx, &imagesapi.GetImageRequest{Name: id})
	if err != nil {
		t.Fatal(err)
	}
	content := contentapi.NewContentClient(n.client.Conn())
	info, err := content.Info(ctx, &contentapi.InfoRequest{Digest: own.GetImage().GetTarget().GetDigest()})
	if err != nil {
		t.Fatal(err)
	}
	update := &contentapi.UpdateRequest{Info: info.GetInfo(), UpdateMask: &fieldmaskpb.FieldMask{}}
	for label := range info.GetInfo().GetLabels() {
		if strings.HasPrefix(label, "containerd.io/distribution.source.") {
			update.Info.Labels[label] = ""
			update.UpdateMask.Paths = append(update.UpdateMask.Paths, "labels."+label)
		}
	}
	if len(update.UpdateMask.Paths) == 0 {
		t.Fatal("a pulled image has no label that says from where")
	}
	if _, err := content.Update(ctx, update); err != nil {
		t.Fatal(err)
	}
}

// useElsewhere makes a container of another namespace use an image with the same
// target.
func (n *realNode) useElsewhere(t *testing.T, id string) {
	t.Helper()
	ctx := metadata.AppendToOutgoingContext(bounded(t), "containerd-namespace", namespace)
	images := imagesapi.NewImagesClient(n.client.Conn())
	own, err := images.Get(ctx, &imagesapi.GetImageRequest{Name: id})
	if err != nil {
		t.Fatal(err)
	}
	const other = "elsewhere"
	if _, err := namespacesapi.NewNamespacesClient(n.client.Conn()).Create(bounded(t), &namespacesapi.CreateNamespaceRequest{Namespace: &namespacesapi.Namespace{Name: other}}); err != nil {
		t.Fatal(err)
	}
	ctx = metadata.AppendToOutgoingContext(bounded(t), "containerd-namespace", other)
	if _, err := images.Create(ctx, &imagesapi.CreateImageRequest{Image: &imagesapi.Image{Name: "their/name:1", Target: own.GetImage().GetTarget()}}); err != nil {
		t.Fatal(err)
	}
	if _, err := containersapi.NewContainersClient(n.client.Conn()).Create(ctx, &containersapi.CreateContainerRequest{Container: &containersapi.Container{
		ID: "theirs", Image: "their/name:1", Runtime: &containersapi.Container_Runtime{Name: "io.containerd.runc.v2"},
	}}); err != nil {
		t.Fatal(err)
	}
}

// forget takes one name from an image, as a removal does one by one.
func (n *realNode) forget(t *testing.T, name string) {
	t.Helper()
	ctx := metadata.AppendToOutgoingContext(bounded(t), "containerd-namespace", namespace)
	if _, err := imagesapi.NewImagesClient(n.client.Conn()).Delete(ctx, &imagesapi.DeleteImageRequest{Name: name}); err != nil {
		t.Fatal(err)
	}
}

// rename gives an image one more name.
func (n *realNode) rename(t *testing.T, from, to string) {
	t.Helper()
	ctx := metadata.AppendToOutgoingContext(bounded(t), "containerd-namespace", namespace)
	client := imagesapi.NewImagesClient(n.client.Conn())
	own, err := client.Get(ctx, &imagesapi.GetImageRequest{Name: from})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.Create(ctx, &imagesapi.CreateImageRequest{Image: &imagesapi.Image{Name: to, Target: own.GetImage().GetTarget()}}); err != nil {
		t.Fatal(err)
	}
}
