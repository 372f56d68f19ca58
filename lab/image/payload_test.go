package image_test

import (
	"archive/tar"
	"debug/elf"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/cleave-cri/cleave/lab/image"
)

// The program in the sandboxes' image runs on this machine, waits, and takes no
// signal for a reason to end by itself.
func TestWaitingWaits(t *testing.T) {
	t.Parallel()
	built, err := image.Waiting()
	if err != nil {
		t.Fatal(err)
	}
	layers, err := built.Layers()
	if err != nil || len(layers) != 1 {
		t.Fatalf("%d layers, %v", len(layers), err)
	}
	content, err := layers[0].Uncompressed()
	if err != nil {
		t.Fatal(err)
	}
	archive := tar.NewReader(content)
	header, err := archive.Next()
	if err != nil || header.Name != "pause" || header.Mode != 0o755 {
		t.Fatalf("%+v, %v", header, err)
	}
	program, err := io.ReadAll(archive)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "pause")
	if err := os.WriteFile(path, program, 0o700); err != nil {
		t.Fatal(err)
	}
	if f, err := elf.Open(path); err != nil || f.Type != elf.ET_EXEC {
		t.Fatalf("no program: %v", err)
	} else if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(path)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	// Asleep is state S, the first word after the program's name (proc_pid_stat(5)).
	state := ""
	for state != "S" && state != "Z" && t.Context().Err() == nil {
		text, err := os.ReadFile("/proc/" + strconv.Itoa(cmd.Process.Pid) + "/stat")
		if err != nil {
			t.Fatal(err)
		}
		_, rest, _ := strings.Cut(string(text), ") ")
		state, _, _ = strings.Cut(rest, " ")
	}
	if err := cmd.Process.Kill(); err != nil || state != "S" {
		t.Errorf("its state is %s: %v", state, err)
	}
	// A program that crashes ends before the signal comes, or by another one.
	if err := cmd.Wait(); err == nil || err.Error() != "signal: killed" {
		t.Errorf("it ended with %v", err)
	}
}

// Layers of one name are shared, and images of two names are two.
func TestPayloadShares(t *testing.T) {
	t.Parallel()
	base := image.Layer{Name: "base", Bytes: 100 << 10, Files: 3}
	digests := func(name string, layers ...image.Layer) (string, []string) {
		built, err := image.Payload(name, layers)
		if err != nil {
			t.Fatal(err)
		}
		digest, err := built.Digest()
		if err != nil {
			t.Fatal(err)
		}
		manifest, err := built.Manifest()
		if err != nil {
			t.Fatal(err)
		}
		var out []string
		for _, l := range manifest.Layers {
			out = append(out, l.Digest.String())
		}
		return digest.String(), out
	}
	a, layersA := digests("a", base, image.Layer{Name: "a", Bytes: 1 << 10})
	b, layersB := digests("b", base, image.Layer{Name: "b", Bytes: 1 << 10})
	c, layersC := digests("c", base, image.Layer{Name: "a", Bytes: 1 << 10})
	if layersA[0] != layersB[0] || layersA[1] == layersB[1] || layersA[1] != layersC[1] {
		t.Errorf("layers %v, %v, %v", layersA, layersB, layersC)
	}
	if a == b || a == c || b == c {
		t.Errorf("images %s, %s, %s", a, b, c)
	}
}
