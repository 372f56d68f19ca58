// Package layers makes image layers of the awkward kind from a seed: whiteouts,
// opaque folders, hard links, extended attributes, setuid files, devices, and
// names that change their kind from layer to layer. Each layer is made for those
// below it, so that what it takes away is there.
//
// For integration tests and the lab.
package layers

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// Top is the folder that all of it lies in.
const Top = "t"

// Whiteouts as the image format has them (OCI image-spec, layer.md, "Whiteouts").
const (
	whiteout = ".wh."
	opaque   = ".wh..wh..opq"
)

// Append adds count layers to an image. The same seed gives the same layers.
func Append(image v1.Image, seed uint64, count int) (v1.Image, error) {
	for i, content := range Make(seed, count) {
		layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(content)), nil })
		if err != nil {
			return nil, fmt.Errorf("make layer %d of seed %d: %w", i, seed, err)
		}
		if image, err = mutate.AppendLayers(image, layer); err != nil {
			return nil, fmt.Errorf("add layer %d of seed %d: %w", i, seed, err)
		}
	}
	return image, nil
}

// Make returns the layers as tar files, the lowest first.
func Make(seed uint64, count int) [][]byte {
	g := &generator{rand: rand.New(rand.NewPCG(seed, 1)), below: map[string]bool{}, folders: map[string]tar.Header{}} //nolint:gosec // it has to be the same each time
	out := make([][]byte, count)
	for i := range out {
		out[i] = g.layer(i)
	}
	return out
}

// generator knows what there is after the layers so far.
type generator struct {
	rand *rand.Rand
	// below are the names of the layers so far, true for folders.
	below map[string]bool
	// folders are the headers of folders as last written.
	folders map[string]tar.Header

	// Of the layer that is being made:
	tar   *tar.Writer
	now   map[string]bool // names that it has put there, true for folders
	gone  map[string]bool // names that it has taken away
	links []string        // files in it that a hard link may name
}

const (
	stepsPerLayer = 30
	maxDepth      = 4
)

func (g *generator) layer(index int) []byte {
	var b bytes.Buffer
	g.tar, g.now, g.gone, g.links = tar.NewWriter(&b), map[string]bool{}, map[string]bool{}, nil
	if index == 0 {
		g.folder(Top)
	}
	for range stepsPerLayer {
		g.step()
	}
	// A mark of each layer, which no later one touches.
	mark := path.Join(Top, "layer-"+strconv.Itoa(index))
	g.write(tar.Header{Typeflag: tar.TypeReg, Name: mark, Mode: 0o644}, []byte{byte(index)})
	delete(g.now, mark)
	if err := g.tar.Close(); err != nil {
		panic(err) // a buffer takes everything
	}
	maps.Copy(g.below, g.now)
	return b.Bytes()
}

// step does one thing to the tree.
func (g *generator) step() {
	switch g.rand.IntN(12) {
	case 0, 1:
		g.remove()
	case 2:
		g.empty()
	case 3, 4:
		if name := g.fresh(); name != "" {
			g.folder(name)
		}
	case 5:
		g.link()
	default:
		if name := g.fresh(); name != "" {
			g.file(name)
		}
	}
}

// remove takes away something of the layers below, with all that is in it.
func (g *generator) remove() {
	name := g.pick(func(name string, _ bool) bool { return name != Top && !g.touched(name) })
	if name == "" {
		return
	}
	g.write(tar.Header{Typeflag: tar.TypeReg, Name: path.Join(path.Dir(name), whiteout+path.Base(name)), Mode: 0o644}, nil)
	g.forget(name, true)
	g.gone[name] = true
	// Sometimes there is a file of that name again.
	if g.rand.IntN(3) == 0 {
		g.file(name)
	}
}

// empty makes a folder of the layers below opaque, and puts something into it.
func (g *generator) empty() {
	name := g.pick(func(name string, folder bool) bool { return folder && name != Top && !g.touched(name) })
	if name == "" {
		return
	}
	g.folder(name)
	g.write(tar.Header{Typeflag: tar.TypeReg, Name: path.Join(name, opaque), Mode: 0o644}, nil)
	g.forget(name, false)
	g.file(path.Join(name, g.name()))
}

// link gives a file of this layer a second name.
func (g *generator) link() {
	name := g.fresh()
	if name == "" || len(g.links) == 0 {
		return
	}
	target := g.links[g.rand.IntN(len(g.links))]
	if target == name {
		return
	}
	g.replace(name)
	g.write(tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: target, Mode: 0o644}, nil)
}

func (g *generator) folder(name string) {
	if folder, there := g.below[name]; there && !folder {
		g.replace(name)
	}
	g.write(tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: g.mode(0o1777 | 0o2000)}, nil)
}

// file makes anything that is no folder.
func (g *generator) file(name string) {
	g.replace(name)
	switch g.rand.IntN(10) {
	case 0:
		g.write(tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: g.name() + "/../" + g.name(), Mode: 0o777}, nil)
	case 1:
		// Not 0:0, which is a whiteout of overlayfs.
		g.write(tar.Header{Typeflag: tar.TypeChar, Name: name, Mode: 0o600, Devmajor: 1, Devminor: 1 + int64(g.rand.IntN(9))}, nil)
	case 2:
		g.write(tar.Header{Typeflag: tar.TypeBlock, Name: name, Mode: 0o600, Devmajor: 7, Devminor: int64(g.rand.IntN(9))}, nil)
	case 3:
		g.write(tar.Header{Typeflag: tar.TypeFifo, Name: name, Mode: 0o600}, nil)
	default:
		content := make([]byte, g.rand.IntN(8000))
		for i := range content {
			content[i] = byte(g.rand.IntN(256)) //nolint:gosec // below 256
		}
		g.links = append(g.links, name)
		g.write(tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: g.mode(0o7777)}, content)
	}
}

// replace notes that what is below a name is hidden.
func (g *generator) replace(name string) { g.forget(name, true) }

// forget takes a name and all below it out of what is there.
func (g *generator) forget(name string, itself bool) {
	for other := range g.below {
		if strings.HasPrefix(other, name+"/") || itself && other == name {
			delete(g.below, other)
		}
	}
}

// touched says whether this layer has something at a name or below it.
func (g *generator) touched(name string) bool {
	for other := range g.now {
		if other == name || strings.HasPrefix(other, name+"/") {
			return true
		}
	}
	return false
}

// fresh is a name that this layer has neither used nor taken away, in a folder
// that is there. It may be one of the layers below. A folder in the place of one
// taken away would have to be opaque; see empty.
func (g *generator) fresh() string {
	parent := Top
	for range g.rand.IntN(maxDepth) {
		var inside []string
		for _, names := range []map[string]bool{g.below, g.now} {
			for name, folder := range names {
				if folder && path.Dir(name) == parent && !slices.Contains(inside, name) {
					inside = append(inside, name)
				}
			}
		}
		inside = slices.DeleteFunc(inside, func(name string) bool { folder, there := g.now[name]; return there && !folder })
		if len(inside) == 0 {
			break
		}
		slices.Sort(inside)
		parent = inside[g.rand.IntN(len(inside))]
	}
	name := path.Join(parent, g.name())
	if g.touched(name) || g.gone[name] {
		return ""
	}
	return name
}

// pick chooses among the names of the layers below.
func (g *generator) pick(ok func(name string, folder bool) bool) string {
	var names []string
	for _, name := range slices.Sorted(maps.Keys(g.below)) {
		if ok(name, g.below[name]) {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return ""
	}
	return names[g.rand.IntN(len(names))]
}

// name is one of few, so that names come again from layer to layer.
func (g *generator) name() string {
	return []string{"a", "b", "c", "d", "e", "with space", "ü", "-x", ".hidden"}[g.rand.IntN(9)]
}

// mode gives permissions, with some of the bits allowed beside them.
func (g *generator) mode(allowed int64) int64 {
	return (0o400 | int64(g.rand.IntN(0o10000))) & allowed
}

// write adds an entry, and before it the folders that it is in, as the usual
// builders of images do: without them a layer that is unpacked on its own would
// not know their owner and mode.
func (g *generator) write(h tar.Header, content []byte) {
	name := strings.TrimSuffix(h.Name, "/")
	if parent := path.Dir(name); parent != "." && !g.now[parent] {
		header := g.folders[parent]
		g.now[parent] = true
		g.write(header, nil)
	}
	isWhiteout := strings.HasPrefix(path.Base(name), whiteout)
	if h.Format == tar.FormatUnknown {
		h.Size = int64(len(content))
		h.Format = tar.FormatPAX
		h.ModTime = time.Unix(1_500_000_000+int64(g.rand.IntN(1_000_000)), 0)
		if !isWhiteout {
			h.Uid, h.Gid = g.rand.IntN(3)*1000, g.rand.IntN(3)*1000
			if (h.Typeflag == tar.TypeReg || h.Typeflag == tar.TypeDir) && g.rand.IntN(4) == 0 {
				h.PAXRecords = map[string]string{"SCHILY.xattr.user.lab": g.name(), "SCHILY.xattr.trusted.lab": "t"}
			}
		}
	}
	if !isWhiteout {
		g.now[name] = h.Typeflag == tar.TypeDir
	}
	if h.Typeflag == tar.TypeDir {
		g.folders[name] = h
	}
	err := g.tar.WriteHeader(&h)
	if err == nil {
		_, err = g.tar.Write(content)
	}
	if err != nil {
		panic(err) // a buffer takes everything, and the headers are ours
	}
}
