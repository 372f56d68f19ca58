package image_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"

	"github.com/cleave-cri/cleave/lab/busybox"
	"github.com/cleave-cri/cleave/lab/image"
	"github.com/cleave-cri/cleave/lab/need"
)

func requireBusybox(t *testing.T) {
	t.Helper()
	if _, err := busybox.Find(); err != nil {
		need.Skip(t, "needs busybox: %v", err)
	}
}

func serve(t *testing.T) *image.Registry {
	t.Helper()
	r, err := image.Serve(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

func TestBusybox(t *testing.T) {
	t.Parallel()
	requireBusybox(t)
	build := func() v1.Image {
		img, err := image.Busybox(t.Context(), image.Config{
			User: "www-data", Cmd: []string{"true"}, Env: []string{"A=b"},
			Files:    map[string]string{"/etc/motd": "hi\n", "/etc/hostname": "lab\n"},
			Programs: map[string]string{"/bin/greet": "#!/bin/sh\n"}, SetUID: map[string][]byte{"/bin/become": []byte("elf")},
		})
		if err != nil {
			t.Fatal(err)
		}
		return img
	}
	first, second := digest(t, build()), digest(t, build())
	if first != second {
		t.Errorf("two builds give %s and %s", first, second)
	}
	img := build()
	file, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if got := file.Config; got.User != "www-data" || strings.Join(got.Cmd, " ") != "true" || strings.Join(got.Env, " ") != "PATH=/bin A=b" {
		t.Errorf("configuration is %+v", got)
	}
	content, mode := map[string]string{}, map[string]int64{}
	reader := tar.NewReader(mutate.Extract(img))
	for {
		h, err := reader.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(reader)
		if err != nil {
			t.Fatal(err)
		}
		name := "/" + strings.Trim(h.Name, "/")
		content[name], mode[name] = h.Linkname+string(body), h.Mode
	}
	for path, want := range map[string]string{"/etc/motd": "hi\n", "/etc/hostname": "lab\n", "/bin/sh": "busybox", "/bin/sleep": "busybox"} {
		if got := content[path]; got != want {
			t.Errorf("%s is %q, want %q", path, got, want)
		}
	}
	for path, want := range map[string]int64{"/etc/motd": 0o644, "/bin/greet": 0o755, "/bin/become": 0o4755} {
		if got := mode[path]; got != want {
			t.Errorf("the mode of %s is %#o, want %#o", path, got, want)
		}
	}
	if _, ok := content["/tmp"]; !ok || !strings.HasPrefix(content["/etc/passwd"], "root:") {
		t.Error("there is no /tmp, or no root in /etc/passwd")
	}
}

func TestRandomIsTheSameForTheSameSeed(t *testing.T) {
	t.Parallel()
	build := func(seed int64) string {
		img, err := image.Random(seed, 3, 10_000)
		if err != nil {
			t.Fatal(err)
		}
		layers, err := img.Layers()
		if err != nil || len(layers) != 3 {
			t.Errorf("%d layers (%v), want 3", len(layers), err)
		}
		return digest(t, img)
	}
	first, again, other := build(1), build(1), build(2)
	if first != again {
		t.Error("one seed gave two images")
	}
	if first == other {
		t.Error("two seeds gave one image")
	}
}

// containerd asks for an image by the path alone and names the registry in the parameter ns: both names must be found,
// and neither under the other's.
func TestOneRegistryForAllNames(t *testing.T) {
	t.Parallel()
	r := serve(t)
	pushed := map[string]string{}
	for seed, ref := range []string{"registry.k8s.io/thing:1", "docker.io/library/thing:1", "localhost:5000/thing:1"} {
		img, err := image.Random(int64(seed), 1, 100)
		if err != nil {
			t.Fatal(err)
		}
		if pushed[ref], err = r.Push(t.Context(), ref, img); err != nil {
			t.Fatal(err)
		}
	}
	for ref, path := range map[string]string{
		"registry.k8s.io/thing:1":     "/v2/thing/manifests/1?ns=registry.k8s.io",
		"docker.io/library/thing:1":   "/v2/library/thing/manifests/1?ns=docker.io",
		"localhost:5000/thing:1":      "/v2/thing/manifests/1?ns=localhost:5000",
		"nowhere.invalid/thing:1":     "/v2/thing/manifests/1?ns=nowhere.invalid",
		"docker.io/library/nothing:1": "/v2/library/nothing/manifests/1?ns=docker.io",
	} {
		response := get(t.Context(), t, r, path)
		if got := response.Header.Get("Docker-Content-Digest"); got != pushed[ref] {
			t.Errorf("%s gave %q, want %q", path, got, pushed[ref])
		}
		if found := response.StatusCode == http.StatusOK; found != (pushed[ref] != "") {
			t.Errorf("%s gave status %d", path, response.StatusCode)
		}
	}
	dir := t.TempDir()
	if err := r.WriteHosts(dir); err != nil {
		t.Fatal(err)
	}
	hosts, err := os.ReadFile(filepath.Join(dir, "_default", "hosts.toml"))
	if err != nil || strings.Count(string(hosts), "http://"+r.Addr()) != 2 {
		t.Errorf("hosts.toml is %q (%v)", hosts, err)
	}
}

func TestSlowLayer(t *testing.T) {
	t.Parallel()
	r := serve(t)
	path, _ := pushLayer(t, r, "slow")
	const pace = 300 * time.Millisecond
	if err := r.Slow("registry.k8s.io/slow", pace); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	get(t.Context(), t, r, path)
	if took := time.Since(start); took < pace*9/10 {
		t.Errorf("a slow layer took %s, want at least about %s", took, pace)
	}
	if err := r.Slow("registry.k8s.io/slow", time.Hour); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+r.Addr()+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = response.Body.Close() }() //nolint:errcheck // its context has ended
	if _, err := io.Copy(io.Discard, response.Body); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a client that gave up got %v", err)
	}
}

// A download that was broken off goes on where it was: containerd asks for a range without an end then.
func TestRangesOfALayer(t *testing.T) {
	t.Parallel()
	r := serve(t)
	path, layer := pushLayer(t, r, "ranges")
	size := len(layer)
	last := strconv.Itoa(size - 1)
	for asked, want := range map[string]struct {
		status int
		body   []byte
	}{
		"":                                  {http.StatusOK, layer},
		"bytes=0-":                          {http.StatusPartialContent, layer},
		"bytes=1000-":                       {http.StatusPartialContent, layer[1000:]},
		"bytes=" + last + "-":               {http.StatusPartialContent, layer[size-1:]},
		"bytes=5-9":                         {http.StatusPartialContent, layer[5:10]},
		"bytes=" + strconv.Itoa(size) + "-": {http.StatusRequestedRangeNotSatisfiable, nil},
		"bytes=-5":                          {http.StatusRequestedRangeNotSatisfiable, nil},
		"bytes=--5-":                        {http.StatusRequestedRangeNotSatisfiable, nil},
		"bytes=x-":                          {http.StatusRequestedRangeNotSatisfiable, nil},
	} {
		response, body := getRange(t.Context(), t, r, path, asked)
		if response.StatusCode != want.status || want.body != nil && !bytes.Equal(body, want.body) {
			t.Errorf("the range %q gave status %d and %d bytes, want %d and %d", asked, response.StatusCode, len(body), want.status, len(want.body))
		}
	}
}

// pushLayer pushes an image of one layer to registry.k8s.io under this name; it returns the layer's path in the
// registry, and its content.
func pushLayer(t *testing.T, r *image.Registry, name string) (path string, content []byte) {
	t.Helper()
	img, err := image.Random(7, 1, 200_000)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Push(t.Context(), "registry.k8s.io/"+name+":1", img); err != nil {
		t.Fatal(err)
	}
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	layer, err := layers[0].Digest()
	if err != nil {
		t.Fatal(err)
	}
	blob, err := layers[0].Compressed()
	if err != nil {
		t.Fatal(err)
	}
	if content, err = io.ReadAll(blob); err != nil {
		t.Fatal(err)
	}
	return "/v2/" + name + "/blobs/" + layer.String() + "?ns=registry.k8s.io", content
}

// get reads an answer to its end.
func get(ctx context.Context, t *testing.T, r *image.Registry, path string) *http.Response {
	t.Helper()
	response, _ := getRange(ctx, t, r, path, "")
	return response
}

// getRange reads the answer to a request for a range, or for all where none is named.
func getRange(ctx context.Context, t *testing.T, r *image.Registry, path, asked string) (*http.Response, []byte) {
	t.Helper()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+r.Addr()+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	if asked != "" {
		request.Header.Set("Range", asked)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	if err := response.Body.Close(); err != nil {
		t.Fatal(err)
	}
	return response, body
}

func digest(t *testing.T, img v1.Image) string {
	t.Helper()
	d, err := img.Digest()
	if err != nil {
		t.Fatal(err)
	}
	return d.String()
}
