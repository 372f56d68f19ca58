package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/moby/sys/mountinfo"
	"google.golang.org/grpc"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/agent/upstream"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/config/kubelet"
	"github.com/cleave-cri/cleave/fsstats/walk"
	"github.com/cleave-cri/cleave/snapshot"
	"github.com/cleave-cri/cleave/snapshot/inventory"
)

// lookTimeout bounds a command's look at the store.
const lookTimeout = 2 * time.Minute

// connected calls do with a connection to the runtime.
func connected(ctx context.Context, cfg config.Config, do func(context.Context, *grpc.ClientConn) error) error {
	path := cfg.Runtime.Endpoint.Path()
	conn, err := upstream.Connect(path, upstream.Plain(path))
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	return errors.Join(do(ctx, conn), conn.Close())
}

// picture reads and measures the store once.
func picture(ctx context.Context, conn grpc.ClientConnInterface) (*inventory.Picture, []error, error) {
	return NewMeasurer(conn).picture(ctx)
}

// Images reads the store and lists its images. What was measured before is not measured again.
func (m *Measurer) Images(ctx context.Context) (Images, error) {
	p, problems, err := m.picture(ctx)
	if err != nil {
		return Images{}, err
	}
	return imagesOf(p, problems), nil
}

func (m *Measurer) picture(ctx context.Context) (*inventory.Picture, []error, error) {
	read := func(ctx context.Context) (*inventory.Contents, error) { return snapshot.ReadContents(ctx, m.conn) }
	return Picture(ctx, read, m)
}

// Picture makes a picture of what read reads. What could not be measured is unknown
// in it, and problems says why.
func Picture(ctx context.Context, read func(context.Context) (*inventory.Contents, error), m *Measurer) (_ *inventory.Picture, problems []error, _ error) {
	contents, err := read(ctx)
	if err != nil {
		return nil, nil, err
	}
	figures, problems := m.Measure(ctx, contents)
	if err := ctx.Err(); err != nil {
		return nil, nil, fmt.Errorf("measure the store: %w", err)
	}
	return inventory.Build(contents, figures), problems, nil
}

// ListImages looks at the store of the configured runtime and lists its images.
func ListImages(ctx context.Context, cfg config.Config) (list Images, _ error) {
	return list, connected(ctx, cfg, func(ctx context.Context, conn *grpc.ClientConn) error {
		p, problems, err := picture(ctx, conn)
		if err != nil {
			return err
		}
		list = imagesOf(p, problems)
		return nil
	})
}

// ListOrphans looks at the store and what is around it and lists what has no
// owner. Nothing is removed.
func ListOrphans(ctx context.Context, cfg config.Config) (list Orphans, _ error) {
	return list, connected(ctx, cfg, func(ctx context.Context, conn *grpc.ClientConn) error {
		logs, pods := cfg.Filesystems.Logs, filepath.Join(cfg.Filesystems.NodeFS, "pods")
		if s, err := (kubelet.Reader{}).Find(ctx, kubelet.Choice{Endpoints: []string{cfg.Listen.Endpoint.Path()}}); err == nil {
			logs, pods = s.PodLogsDir.Value, filepath.Join(s.RootDir.Value, "pods")
		}
		// What is looked at before and after the store was read had no owner all
		// the time, if it has none in it.
		mountsBefore, err := mountpoints()
		if err != nil {
			return err
		}
		plugins, err := snapshot.NewStore(conn, cfg.Runtime.Namespace).ContentRoot(ctx)
		if err != nil {
			return err
		}
		blobsBefore := files(filepath.Join(plugins, "blobs"), 2)
		around := inventory.Surroundings{CRINamespace: cfg.Runtime.Namespace, Logs: files(logs, 1)}
		p, problems, err := picture(ctx, conn)
		if err != nil {
			return err
		}
		mountsAfter, err := mountpoints()
		if err != nil {
			return err
		}
		for _, m := range mountsBefore {
			if slices.Contains(mountsAfter, m) {
				around.Mounts = append(around.Mounts, m)
			}
		}
		for _, b := range blobsBefore {
			if bytes, ok := blocksOf(b.Path); ok {
				b.Name = filepath.Base(filepath.Dir(b.Path)) + ":" + b.Name
				b.Takes, b.Known = inventory.Figure{Bytes: bytes, Inodes: 1}, true
				around.Blobs = append(around.Blobs, b)
			}
		}
		around.Pods = names(pods)
		if around.StateDir, err = stateDir(ctx, conn); err != nil {
			problems = append(problems, fmt.Errorf("mounts are not judged: %w", err))
		}
		if around.Pods == nil {
			problems = append(problems, fmt.Errorf("logs are not judged: the kubelet's folder %s can't be read", pods))
		}
		list = orphansOf(p, p.Orphans(around), problems)
		for i := range list.Orphans {
			list.Orphans[i].measureLogs(ctx)
		}
		return nil
	})
}

// measureLogs walks an orphaned log folder.
func (o *Orphan) measureLogs(ctx context.Context) {
	if o.Kind != inventory.OrphanLogs {
		return
	}
	if used, err := walk.Measure(ctx, o.ID, walk.Options{EntriesPerSecond: 100_000}); err == nil {
		o.Bytes = &used.Bytes
	}
}

func mountpoints() ([]string, error) {
	infos, err := mountinfo.GetMounts(nil)
	if err != nil {
		return nil, fmt.Errorf("read the mount table: %w", err)
	}
	out := make([]string, len(infos))
	for i, info := range infos {
		out[i] = info.Mountpoint
	}
	return out, nil
}

// files lists what lies depth folders below dir, as far as it can be read. Nothing
// is followed: an entry that is no folder has nothing below it.
func files(dir string, depth int) (out []inventory.Folder) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if depth > 1 {
			if e.IsDir() {
				out = append(out, files(path, depth-1)...)
			}
			continue
		}
		if info, err := e.Info(); err == nil {
			out = append(out, inventory.Folder{Path: path, Name: e.Name(), ModifiedAt: info.ModTime()})
		}
	}
	return out
}

// names are the entries of a folder; nil if it can't be read.
func names(dir string) map[string]bool {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil
	}
	out := make(map[string]bool, len(entries))
	for _, e := range entries {
		out[e.Name()] = true
	}
	return out
}

// stateDir asks for containerd's state folder: CRI's lies in it (containerd,
// internal/cri/server/status.go: the verbose answer has CRI's configuration).
func stateDir(ctx context.Context, conn grpc.ClientConnInterface) (string, error) {
	answer, err := runtimeapi.NewRuntimeServiceClient(conn).Status(ctx, &runtimeapi.StatusRequest{Verbose: true})
	if err != nil {
		return "", fmt.Errorf("ask containerd for its state folder: %w", err)
	}
	var cri struct {
		StateDir string `json:"stateDir"`
	}
	if err := json.Unmarshal([]byte(answer.GetInfo()["config"]), &cri); err != nil {
		return "", fmt.Errorf("ask containerd for its state folder: read its configuration: %w", err)
	}
	if !filepath.IsAbs(cri.StateDir) {
		return "", errors.New("containerd does not say where its state folder is")
	}
	return filepath.Dir(cri.StateDir), nil
}
