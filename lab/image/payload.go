package image

import (
	"archive/tar"
	"bytes"
	"debug/elf"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"runtime"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// Layer is a layer of bytes that can't be compressed. Layers of one name and one
// size are the same layer.
type Layer struct {
	Name string
	// Bytes is what the layer takes where it is unpacked, and once more as a blob.
	Bytes int64
	// Files are its files besides the one that has its bytes; empty ones.
	Files int64
}

// Payload builds an image that takes known amounts. It has no program: what runs on
// it has to be mounted. Two names give two images, whatever their layers.
func Payload(name string, layers []Layer) (v1.Image, error) {
	image := empty.Image
	for _, l := range layers {
		layer, err := l.layer()
		if err != nil {
			return nil, err
		}
		if image, err = mutate.AppendLayers(image, layer); err != nil {
			return nil, fmt.Errorf("add layer %s: %w", l.Name, err)
		}
	}
	return configured(image, v1.Config{Cmd: []string{"/none"}, Labels: map[string]string{"name": name}})
}

func configured(image v1.Image, c v1.Config) (v1.Image, error) {
	file, err := image.ConfigFile()
	if err != nil {
		return nil, fmt.Errorf("make an image's configuration: %w", err)
	}
	file = file.DeepCopy()
	file.Architecture, file.OS, file.Config = runtime.GOARCH, "linux", c
	if image, err = mutate.ConfigFile(image, file); err != nil {
		return nil, fmt.Errorf("set an image's configuration: %w", err)
	}
	return image, nil
}

func (l Layer) layer() (v1.Layer, error) {
	seed := fnv.New64()
	fmt.Fprint(seed, l.Name)
	var key [32]byte
	binary.LittleEndian.PutUint64(key[:], seed.Sum64())
	content := make([]byte, l.Bytes)
	_, _ = rand.NewChaCha8(key).Read(content) //nolint:errcheck // never fails, says its documentation
	dir := fmt.Sprintf("layer-%x", seed.Sum64())
	w := &layerWriter{}
	w.tar = tar.NewWriter(&w.content)
	w.add(tar.Header{Typeflag: tar.TypeDir, Name: dir + "/", Mode: 0o755}, nil)
	w.add(tar.Header{Typeflag: tar.TypeReg, Name: dir + "/bytes", Mode: 0o644}, content)
	for i := range l.Files {
		w.add(tar.Header{Typeflag: tar.TypeReg, Name: fmt.Sprintf("%s/%d", dir, i), Mode: 0o644}, nil)
	}
	if w.err == nil {
		w.err = w.tar.Close()
	}
	if w.err != nil {
		return nil, fmt.Errorf("write layer %s: %w", l.Name, w.err)
	}
	return static.NewLayer(w.content.Bytes(), types.OCIUncompressedLayer), nil
}

// Waiting builds an image for pod sandboxes whose only file is a program of some
// hundred bytes that waits for ever. Unlike Pause it needs nothing of the machine.
func Waiting() (v1.Image, error) {
	program, err := waiter(runtime.GOARCH)
	if err != nil {
		return nil, err
	}
	w := &layerWriter{}
	w.tar = tar.NewWriter(&w.content)
	w.add(tar.Header{Typeflag: tar.TypeReg, Name: "pause", Mode: 0o755}, program)
	if w.err == nil {
		w.err = w.tar.Close()
	}
	if w.err != nil {
		return nil, fmt.Errorf("write the layer of the sandboxes' image: %w", w.err)
	}
	image, err := mutate.AppendLayers(empty.Image, static.NewLayer(w.content.Bytes(), types.OCIUncompressedLayer))
	if err != nil {
		return nil, fmt.Errorf("add the layer of the sandboxes' image: %w", err)
	}
	return configured(image, v1.Config{Entrypoint: []string{"/pause"}})
}

// waiter is a static program that calls ppoll(2) on nothing, again and again.
func waiter(arch string) ([]byte, error) {
	var code []byte
	var machine elf.Machine
	switch arch {
	case "amd64":
		machine = elf.EM_X86_64
		code = []byte{
			0x31, 0xff, // xor edi, edi: no descriptors
			0x31, 0xf6, // xor esi, esi
			0x31, 0xd2, // xor edx, edx: no timeout
			0x4d, 0x31, 0xd2, // xor r10, r10: no mask
			0xb8, 0x0f, 0x01, 0x00, 0x00, // mov eax, 271: ppoll
			0x0f, 0x05, // syscall
			0xeb, 0xee, // jmp to the beginning
		}
	case "arm64":
		machine = elf.EM_AARCH64
		for _, word := range []uint32{
			0xd2800000, // mov x0, #0: no descriptors
			0xd2800001, // mov x1, #0
			0xd2800002, // mov x2, #0: no timeout
			0xd2800003, // mov x3, #0: no mask
			0xd2800928, // mov x8, #73: ppoll
			0xd4000001, // svc #0
			0x17fffffa, // b to the beginning
		} {
			code = binary.LittleEndian.AppendUint32(code, word)
		}
	default:
		return nil, fmt.Errorf("make a program that waits: not for %s, only for amd64 and arm64", arch)
	}
	const base, headers = 0x400000, 64 + 56
	size := uint64(headers + len(code)) //nolint:gosec // some hundred
	var out bytes.Buffer
	ident := [elf.EI_NIDENT]byte{0x7f, 'E', 'L', 'F', byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT)}
	for _, part := range []any{
		elf.Header64{
			Ident: ident, Type: uint16(elf.ET_EXEC), Machine: uint16(machine), Version: uint32(elf.EV_CURRENT),
			Entry: base + headers, Phoff: 64, Ehsize: 64, Phentsize: 56, Phnum: 1, Shentsize: 64,
		},
		elf.Prog64{Type: uint32(elf.PT_LOAD), Flags: uint32(elf.PF_R | elf.PF_X), Vaddr: base, Paddr: base, Filesz: size, Memsz: size, Align: 0x10000},
		code,
	} {
		if err := binary.Write(&out, binary.LittleEndian, part); err != nil {
			return nil, fmt.Errorf("make a program that waits: %w", err)
		}
	}
	return out.Bytes(), nil
}
