// Package image builds container images on the spot and serves them from a registry in this process, so that tests and
// the demo need nothing from outside: a busybox image, an image for pod sandboxes, random images of any shape.
//
// For integration tests, the demo and the lab.
package image

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/cleave-cri/cleave/lab/busybox"
)

// Config is what an image says about how to run it, and files added to its only layer.
type Config struct {
	// User is a name or number, with or without a group; empty means root.
	User string
	// Entrypoint and Cmd are as in a Dockerfile. With both empty the image runs a shell.
	Entrypoint, Cmd []string
	// Env is added to PATH.
	Env []string
	// Files are more files, by absolute path; mode 0644, owner root. They replace the image's own.
	Files map[string]string
	// Programs are more programs, by absolute path; mode 0755, owner root.
	Programs map[string]string
	// SetUID are programs by absolute path that run as root whoever starts them (mode 4755, owner root).
	SetUID map[string][]byte
	// Labels of the image.
	Labels map[string]string
}

// passwd and group have the users that images of tests commonly run as.
const (
	passwd = "root:x:0:0:root:/root:/bin/sh\nwww-data:x:33:33:www-data:/var/www:/bin/false\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\n"
	group  = "root:x:0:\nwww-data:x:33:\nnogroup:x:65534:\n"
)

// Busybox builds an image of the machine's static busybox: all its programs in /bin, and what a container expects of a
// root folder. The same busybox and Config give the same image.
func Busybox(ctx context.Context, c Config) (v1.Image, error) {
	content, err := busyboxLayer(ctx, c)
	if err != nil {
		return nil, err
	}
	// Not packed: it would take most of the time of tests with many images, under the race detector above all.
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(content)), nil },
		tarball.WithCompressionLevel(gzip.NoCompression), tarball.WithCompressedCaching)
	if err != nil {
		return nil, fmt.Errorf("make the busybox layer: %w", err)
	}
	image, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		return nil, fmt.Errorf("add the busybox layer: %w", err)
	}
	file, err := image.ConfigFile()
	if err != nil {
		return nil, fmt.Errorf("make the busybox image's configuration: %w", err)
	}
	file = file.DeepCopy()
	file.Architecture, file.OS = runtime.GOARCH, "linux"
	file.Config = v1.Config{
		User: c.User, Entrypoint: c.Entrypoint, Cmd: c.Cmd, Labels: c.Labels,
		Env: append([]string{"PATH=/bin"}, c.Env...),
	}
	if len(c.Entrypoint) == 0 && len(c.Cmd) == 0 {
		file.Config.Cmd = []string{"sh"}
	}
	image, err = mutate.ConfigFile(image, file)
	if err != nil {
		return nil, fmt.Errorf("set the busybox image's configuration: %w", err)
	}
	return image, nil
}

// Pause builds the image that pod sandboxes run: it waits, and ends when told to.
func Pause(ctx context.Context) (v1.Image, error) {
	return Busybox(ctx, Config{Entrypoint: []string{"/bin/sh", "-c", `trap "exit 0" TERM INT; while :; do sleep 86400 & wait $!; done`}})
}

// Random builds an image of random files: layers layers of layerBytes bytes each. The same numbers give the same image.
// It can be pulled and unpacked, not run. Its layers are not compressed: random bytes get no smaller by it, only late.
func Random(seed int64, layers int, layerBytes int64) (v1.Image, error) {
	source := random.WithSource(rand.NewSource(seed))
	image := v1.Image(empty.Image)
	for range layers {
		made, err := random.Layer(layerBytes, types.DockerUncompressedLayer, source)
		if err != nil {
			return nil, fmt.Errorf("make a random layer of %d bytes: %w", layerBytes, err)
		}
		content, err := made.Uncompressed()
		if err != nil {
			return nil, fmt.Errorf("open a random layer: %w", err)
		}
		tar, err := io.ReadAll(content)
		if err := errors.Join(err, content.Close()); err != nil {
			return nil, fmt.Errorf("read a random layer: %w", err)
		}
		if image, err = mutate.AppendLayers(image, static.NewLayer(tar, types.DockerUncompressedLayer)); err != nil {
			return nil, fmt.Errorf("add a random layer: %w", err)
		}
	}
	return image, nil
}

// Save writes an image to a file under a name, as `docker save` does, for machines that no registry can be reached from.
func Save(path, ref string, image v1.Image) error {
	tag, err := name.NewTag(ref)
	if err != nil {
		return fmt.Errorf("read the image name %q: %w", ref, err)
	}
	if err := tarball.WriteToFile(path, tag, image); err != nil {
		return fmt.Errorf("save %s: %w", ref, err)
	}
	return nil
}

// busyboxLayer writes the layer as an uncompressed tar file.
func busyboxLayer(ctx context.Context, c Config) ([]byte, error) {
	path, err := busybox.Find()
	if err != nil {
		return nil, err
	}
	program, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read busybox: %w", err)
	}
	applets, err := exec.CommandContext(ctx, path, "--list").Output()
	if err != nil {
		return nil, fmt.Errorf("ask %s for its programs: %w", path, err)
	}
	w := &layerWriter{}
	w.tar = tar.NewWriter(&w.content)
	for _, dir := range []string{"bin", "dev", "etc", "home", "proc", "root", "run", "sys", "usr", "var"} {
		w.add(tar.Header{Typeflag: tar.TypeDir, Name: dir + "/", Mode: 0o755}, nil)
	}
	w.add(tar.Header{Typeflag: tar.TypeDir, Name: "tmp/", Mode: 0o1777}, nil)
	w.add(tar.Header{Typeflag: tar.TypeReg, Name: "bin/busybox", Mode: 0o755}, program)
	for name := range strings.FieldsSeq(string(applets)) {
		if name != "busybox" {
			w.add(tar.Header{Typeflag: tar.TypeSymlink, Name: "bin/" + name, Linkname: "busybox", Mode: 0o777}, nil)
		}
	}
	files := map[string]string{"/etc/passwd": passwd, "/etc/group": group, "/etc/hosts": "", "/etc/hostname": "", "/etc/resolv.conf": ""}
	maps.Copy(files, c.Files)
	for _, name := range slices.Sorted(maps.Keys(files)) {
		w.add(tar.Header{Typeflag: tar.TypeReg, Name: strings.TrimPrefix(name, "/"), Mode: 0o644}, []byte(files[name]))
	}
	for _, name := range slices.Sorted(maps.Keys(c.Programs)) {
		w.add(tar.Header{Typeflag: tar.TypeReg, Name: strings.TrimPrefix(name, "/"), Mode: 0o755}, []byte(c.Programs[name]))
	}
	for _, name := range slices.Sorted(maps.Keys(c.SetUID)) {
		w.add(tar.Header{Typeflag: tar.TypeReg, Name: strings.TrimPrefix(name, "/"), Mode: 0o4755}, c.SetUID[name])
	}
	if w.err == nil {
		w.err = w.tar.Close()
	}
	if w.err != nil {
		return nil, fmt.Errorf("write the busybox layer: %w", w.err)
	}
	return w.content.Bytes(), nil
}

// layerWriter keeps the first error, so that the list of files above stays a list.
type layerWriter struct {
	content bytes.Buffer
	tar     *tar.Writer
	err     error
}

func (w *layerWriter) add(h tar.Header, content []byte) {
	if w.err != nil {
		return
	}
	h.Size = int64(len(content))
	h.ModTime = time.Unix(0, 0) // the same files give the same digest
	h.Format = tar.FormatPAX
	if w.err = w.tar.WriteHeader(&h); w.err == nil {
		_, w.err = w.tar.Write(content)
	}
}
