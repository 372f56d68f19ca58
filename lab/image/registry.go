package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
)

// minSlowBytes is the size from which a blob is slowed down: an image's configuration is not, its layers are.
const minSlowBytes = 64 << 10

// Registry serves images on the loopback address, under whatever registry's name they were pushed.
type Registry struct {
	server *http.Server
	addr   string
	served chan error
	sizes  registry.BlobStatHandler

	mu   sync.Mutex
	slow map[string]time.Duration // guarded by mu; by repository path
}

// Serve starts an empty registry on a free port. Images are kept in memory.
func Serve(ctx context.Context) (*Registry, error) {
	var lc net.ListenConfig
	listener, err := lc.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("listen for the image registry: %w", err)
	}
	blobs := registry.NewInMemoryBlobHandler()
	sizes, ok := blobs.(registry.BlobStatHandler)
	if !ok {
		return nil, errors.Join(errors.New("the image registry's blobs tell no size"), listener.Close())
	}
	r := &Registry{addr: listener.Addr().String(), served: make(chan error, 1), sizes: sizes, slow: map[string]time.Duration{}}
	quiet := log.New(io.Discard, "", 0)
	handler := r.handler(registry.New(registry.Logger(quiet), registry.WithBlobHandler(blobs)))
	r.server = &http.Server{Handler: handler, ErrorLog: quiet, ReadHeaderTimeout: time.Minute}
	go func() { r.served <- r.server.Serve(listener) }()
	return r, nil
}

// Addr is the registry's address, host:port.
func (r *Registry) Addr() string { return r.addr }

// Close ends the registry and all its connections.
func (r *Registry) Close() error {
	closed := r.server.Close()
	if err := <-r.served; !errors.Is(err, http.ErrServerClosed) {
		return errors.Join(closed, err)
	}
	return closed
}

// Push makes an image available under a full name, such as registry.k8s.io/pause:3.10 or docker.io/library/busybox:1,
// and returns its digest.
func (r *Registry) Push(ctx context.Context, ref string, image v1.Image) (string, error) {
	target, err := r.reference(ref)
	if err != nil {
		return "", err
	}
	if err := remote.Write(target, image, remote.WithContext(ctx)); err != nil {
		return "", fmt.Errorf("push %s to the lab's registry: %w", ref, err)
	}
	digest, err := image.Digest()
	if err != nil {
		return "", fmt.Errorf("take the digest of %s: %w", ref, err)
	}
	return digest.String(), nil
}

// Slow makes each layer of a repository (the name in ref, its tag or digest does not matter) take this long to
// download, spread evenly. Zero makes it fast again. A download that runs keeps its pace.
func (r *Registry) Slow(ref string, layerTime time.Duration) error {
	target, err := r.reference(ref)
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.slow[target.Context().RepositoryStr()] = layerTime
	return nil
}

// WriteHosts makes dir a hosts.toml folder (containerd's registry config_path) that sends every pull, whatever the
// registry's name, to this registry and nowhere else.
func (r *Registry) WriteHosts(dir string) error {
	all := filepath.Join(dir, "_default")
	if err := os.MkdirAll(all, 0o755); err != nil {
		return fmt.Errorf("make the hosts.toml folder: %w", err)
	}
	url := "http://" + r.addr
	content := fmt.Sprintf("server = %q\n\n[host.%q]\n  capabilities = [\"pull\", \"resolve\"]\n", url, url)
	if err := os.WriteFile(filepath.Join(all, "hosts.toml"), []byte(content), 0o644); err != nil {
		return fmt.Errorf("write hosts.toml: %w", err)
	}
	return nil
}

// reference translates a full image name to the one under which this registry has it: the registry's name becomes the
// first part of the path.
func (r *Registry) reference(ref string) (name.Reference, error) {
	parsed, err := name.ParseReference(ref)
	if err != nil {
		return nil, fmt.Errorf("read the image name %q: %w", ref, err)
	}
	host := parsed.Context().RegistryStr()
	if host == name.DefaultRegistry {
		host = "docker.io" // as containerd calls it
	}
	repository := r.addr + "/" + hostPath(host) + "/" + parsed.Context().RepositoryStr()
	separator := ":"
	if _, ok := parsed.(name.Digest); ok {
		separator = "@"
	}
	target, err := name.ParseReference(repository+separator+parsed.Identifier(), name.Insecure)
	if err != nil {
		return nil, fmt.Errorf("translate the image name %q: %w", ref, err)
	}
	return target, nil
}

// hostPath makes a registry's name, which may have a port, a part of a repository's path.
func hostPath(host string) string { return strings.ReplaceAll(host, ":", "_") }

// handler puts the registry's name that containerd asked for (its parameter ns) into the path, gives open ranges an
// end, and slows blobs down.
func (r *Registry) handler(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
		if ns := request.URL.Query().Get("ns"); ns != "" {
			if rest, ok := strings.CutPrefix(request.URL.Path, "/v2/"); ok && rest != "" {
				request = request.Clone(request.Context())
				request.URL.Path, request.URL.RawPath = "/v2/"+hostPath(ns)+"/"+rest, ""
			}
		}
		repository, digest, isBlob := strings.Cut(strings.TrimPrefix(request.URL.Path, "/v2/"), "/blobs/")
		if isBlob && request.Method == http.MethodGet {
			request = r.closeRange(request, repository, digest)
			r.mu.Lock()
			total := r.slow[repository]
			r.mu.Unlock()
			if total > 0 {
				w = &slowWriter{ResponseWriter: w, ctx: request.Context(), total: total}
			}
		}
		next.ServeHTTP(w, request)
	})
}

// closeRange gives the end to a range that has none ("bytes=100-"), with which containerd goes on with a download that
// was broken off: the library's registry understands closed ranges only. Every other request stays as it is.
func (r *Registry) closeRange(request *http.Request, repository, digest string) *http.Request {
	open, ok := strings.CutPrefix(request.Header.Get("Range"), "bytes=")
	if !ok {
		return request
	}
	start, err := strconv.ParseInt(strings.TrimSuffix(open, "-"), 10, 64)
	if err != nil || start < 0 || !strings.HasSuffix(open, "-") {
		return request
	}
	hash, err := v1.NewHash(digest)
	if err != nil {
		return request
	}
	size, err := r.sizes.Stat(request.Context(), repository, hash)
	if err != nil || start >= size {
		return request
	}
	request = request.Clone(request.Context())
	request.Header.Set("Range", fmt.Sprintf("bytes=%d-%d", start, size-1))
	return request
}

// slowWriter spreads a response over a time. It lives as long as one request, whose context it has.
type slowWriter struct {
	http.ResponseWriter
	ctx   context.Context //nolint:containedctx // an http.ResponseWriter has no other way to learn that the client has gone
	total time.Duration
}

// Write writes in pieces, each followed by its share of the total time.
func (w *slowWriter) Write(content []byte) (int, error) {
	length, err := strconv.Atoi(w.Header().Get("Content-Length"))
	if err != nil || length < minSlowBytes {
		return w.ResponseWriter.Write(content) //nolint:wrapcheck // io.Writer
	}
	const pieces = 100
	piece := max(1, length/pieces)
	written := 0
	for written < len(content) {
		end := min(len(content), written+piece)
		n, err := w.ResponseWriter.Write(content[written:end])
		written += n
		if err != nil {
			return written, fmt.Errorf("write a slow blob: %w", err)
		}
		if err := http.NewResponseController(w.ResponseWriter).Flush(); err != nil {
			return written, fmt.Errorf("write a slow blob: %w", err)
		}
		timer := time.NewTimer(time.Duration(int64(w.total) * int64(n) / int64(length)))
		select {
		case <-w.ctx.Done():
			timer.Stop()
			return written, fmt.Errorf("write a slow blob: %w", w.ctx.Err())
		case <-timer.C:
		}
	}
	return written, nil
}
