package split

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/fsstats/quota"
	"github.com/cleave-cri/cleave/snapshot/split/fault"
	"github.com/cleave-cri/cleave/snapshot/split/fence"
	"github.com/cleave-cri/cleave/snapshot/split/rootdir"
)

// projectIDs are given to writable layers. They are far from those that people
// choose and from the kubelet's, which go up from 1048577 (Kubernetes,
// pkg/volume/util/fsquota).
var projectIDs = quota.Range{First: 0x43000000, Last: 0x43ffffff}

// projectLimit bounds the work of giving a new layer a project ID: a pod's start
// waits for it.
const projectLimit = 2 * time.Second

// escapedBytes is how much more a walk may find than the kernel counts, because
// files come and go meanwhile.
const escapedBytes = 4 << 20

// HowQuota is how a figure came about that the kernel counted.
const HowQuota = "quota"

// projects gives writable layers project IDs of their own, by which the kernel
// counts them and holds them to limits. What it gave is on the folders and in the
// kernel's accounts; it keeps nothing itself.
type projects struct {
	log *zap.Logger
	// ledger stands for the filesystem's own in tests; nil is that.
	ledger func(*quota.FS) quota.Ledger

	mu sync.Mutex
	// missing is why the filesystem gives no limits, problem why the last layer
	// got no ID or an ID was not tidied up.
	missing, problem string // guarded by mu
	failures         int64  // guarded by mu
	// due: limits may be left of layers that are gone.
	due bool // guarded by mu
	// distrusted are the IDs of snapshots that have files outside of their project.
	distrusted map[string]bool // guarded by mu
}

func newProjects(o Options) *projects {
	if !o.ProjectQuota {
		return nil
	}
	return &projects{log: o.Log, ledger: o.ledger, due: true, distrusted: map[string]bool{}}
}

// ProjectStatus is about project quota.
type ProjectStatus struct {
	// Missing is why the container root's filesystem can't hold layers to limits;
	// Problem why the last try to give an ID or to take one back failed, of which
	// Failures counts those since the start.
	Missing  string `json:"missing,omitempty"`
	Problem  string `json:"problem,omitempty"`
	Failures int64  `json:"failures,omitempty"`
}

// status is nil without the option.
func (p *projects) status() *ProjectStatus {
	if p == nil {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return &ProjectStatus{Missing: p.missing, Problem: p.problem, Failures: p.failures}
}

// on opens the folder of snapshots of a root, whose names are those of the trees.
// Not the root itself: the fence has a lock on that.
func (p *projects) on(root *rootdir.Root, do func(*quota.Assigner) error) (err error) {
	dir, err := root.Open(snapshotsDir)
	if err != nil {
		return err
	}
	filesystem, err := quota.Of(dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, filesystem.Close()) }()
	o := quota.AssignerOptions{Range: projectIDs}
	if p.ledger != nil {
		o.Ledger = p.ledger(filesystem)
	} else if err := filesystem.Supports(quota.ProjectLimits); err != nil {
		return err
	}
	a, err := quota.NewAssigner(filesystem, o)
	if err != nil {
		return err
	}
	return do(a)
}

// assign gives a new folder below snapshots its project ID, and reports false if
// it has none or not all of one. That is told and no reason to make no snapshot:
// the pod then has no limit, as without the option.
func (p *projects) assign(ctx context.Context, root *rootdir.Root, name string) bool {
	ctx, cancel := context.WithTimeout(ctx, projectLimit)
	defer cancel()
	err := p.on(root, func(a *quota.Assigner) error {
		_, err := a.Assign(ctx, name)
		return err
	})
	p.note(err)
	return err == nil
}

// note keeps what went wrong, nil for nothing, and logs it if it is new.
func (p *projects) note(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case err == nil:
		p.missing, p.problem = "", ""
	case errors.Is(err, quota.ErrNotSupported):
		if p.missing != err.Error() {
			p.log.Warn("writable layers have no limits", zap.Error(err))
		}
		p.missing = err.Error()
	default:
		p.failures++
		if p.problem != err.Error() {
			p.log.Warn("a writable layer has no project ID, or one was not taken back", zap.Error(err))
		}
		p.problem = err.Error()
	}
}

// distrust notes that a snapshot has files that its project does not count. A
// process that is in no user namespace of its own can give its files another
// project (ioctl_xfs_fsgetxattr(2)), also through an overlay. Such a layer is walked
// from now on.
func (p *projects) distrust(id string, bytes int64) {
	p.mu.Lock()
	known := p.distrusted[id]
	p.distrusted[id] = true
	p.mu.Unlock()
	if !known {
		p.log.Warn("a container has taken files out of its project, so its limit does not count them; its layer is measured by walks",
			zap.String("id", id), zap.Int64("bytes", bytes))
	}
}

// usage gives the kernel's count for a snapshot's folder; false if it has none, or
// not all is in it.
func (p *projects) usage(root *rootdir.Root, id string) (f figure, ok bool) {
	p.mu.Lock()
	distrusted := p.distrusted[id]
	p.mu.Unlock()
	if distrusted {
		return figure{}, false
	}
	f.started, f.how = time.Now(), HowQuota
	err := p.on(root, func(a *quota.Assigner) error {
		account, err := a.Project(id)
		if account.Usage.Bytes > math.MaxInt64 || account.Usage.Inodes > math.MaxInt64 {
			return fmt.Errorf("the kernel counts %+v, which can't be", account.Usage)
		}
		f.Bytes, f.Inodes = int64(account.Usage.Bytes), int64(account.Usage.Inodes) //nolint:gosec // looked at above
		return err
	})
	f.At = time.Now()
	// A folder is an inode: an account without one is not this folder's.
	return f, err == nil && f.Inodes > 0
}

// removed says that a layer is gone, so that there is a limit to take away when
// its files are too.
func (p *projects) removed(id string) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.due = true
	delete(p.distrusted, id)
}

// tidy takes limits off the IDs of layers that are gone, so that these can be
// given again, and looks whether the filesystem can do what is wanted of it. empty
// says that nothing waited in the trash when it was called.
func (p *projects) tidy(ctx context.Context, root *rootdir.Root, empty bool) {
	p.mu.Lock()
	due, missing := p.due, p.missing != ""
	p.mu.Unlock()
	if !due && !missing {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, projectLimit)
	defer cancel()
	var cleared []uint32
	err := p.on(root, func(a *quota.Assigner) (err error) {
		cleared, err = a.Tidy(ctx)
		return err
	})
	p.note(err)
	if len(cleared) > 0 {
		p.log.Debug("project IDs of layers that are gone are free again", zap.Uint32s("projects", cleared))
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	// xfs counts what was deleted for a moment longer; there is a next time if something was cleared.
	p.due = err != nil || !empty || len(cleared) > 0
}

// tidyProjects does what is due about project IDs.
func (s *Snapshotter) tidyProjects(ctx context.Context) {
	if s.projects == nil {
		return
	}
	root, err := s.gate.Root(fence.Container)
	if err != nil {
		return // the fence's reasons say why
	}
	s.projects.tidy(ctx, root, s.bins[fence.Container].Stats().Entries == 0)
}

// LayerLimit is the kernel's account of a writable layer.
type LayerLimit struct {
	// Namespace and Name are containerd's for the snapshot.
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name"`
	// Project is the layer's project ID.
	Project uint32 `json:"project"`
	// LimitBytes is how much the layer may take, its work folder included, 0 for
	// no limit; UsedBytes how much it does.
	LimitBytes uint64 `json:"limitBytes"`
	UsedBytes  uint64 `json:"usedBytes"`
	UsedInodes uint64 `json:"usedInodes"`
}

func layerLimit(namespace, name string, p quota.Project) LayerLimit {
	return LayerLimit{
		Namespace: namespace, Name: name, Project: p.ID,
		LimitBytes: p.Limit.Bytes, UsedBytes: p.Usage.Bytes, UsedInodes: p.Usage.Inodes,
	}
}

// SetLimit limits what a writable layer may take, in bytes, or takes its limit
// away with 0, and returns the account as it then is: the kernel rounds up to
// whole KiB. A limit below what is there already deletes nothing; it stops further
// writing. It stays until the snapshot is removed, over restarts and reboots.
//
// namespace and name are containerd's; a container's snapshot has the container's
// ID for a name. The error is a errdefs.ErrNotFound if there is no such writable
// layer, and a errdefs.ErrFailedPrecondition if it can't be limited.
func (s *Snapshotter) SetLimit(ctx context.Context, namespace, name string, bytes uint64) (_ LayerLimit, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("limit the writable layer %q of namespace %q: %w", shortKey(name), shortKey(namespace), err)
		}
	}()
	if s.projects == nil {
		return LayerLimit{}, classed(errdefs.ErrFailedPrecondition, "limits are not turned on: set snapshotter.projectQuota and restart the snapshotter")
	}
	if err := s.gate.Quick(); err != nil {
		return LayerLimit{}, err
	}
	id, err := s.writableID(ctx, namespace, name)
	if err != nil {
		return LayerLimit{}, err
	}
	root, err := s.gate.Root(fence.Container)
	if err != nil {
		return LayerLimit{}, err
	}
	var account quota.Project
	err = s.projects.on(root, func(a *quota.Assigner) (err error) {
		account, err = a.SetLimit(id, quota.Limit{Bytes: bytes})
		return err
	})
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return LayerLimit{}, classed(errdefs.ErrNotFound, "it was removed meanwhile")
	case errors.Is(err, quota.ErrNoProject):
		return LayerLimit{}, classed(errdefs.ErrFailedPrecondition, "it has no project ID, because it was made before project quota was there: replace the container (%w)", err)
	case errors.Is(err, quota.ErrNotSupported), errors.Is(err, quota.ErrForeignProject):
		return LayerLimit{}, classed(errdefs.ErrFailedPrecondition, "%w", err)
	case err != nil:
		return LayerLimit{}, err
	}
	return layerLimit(namespace, name, account), nil
}

// writableID finds the newest writable layer of a name. Older ones of that name
// are of containers that are gone and not cleared away yet.
func (s *Snapshotter) writableID(ctx context.Context, namespace, name string) (newest string, err error) {
	highest := uint64(0)
	err = s.eachSnapshot(ctx, func(id string, info snapshots.Info, rec record) error {
		if of, own := splitKey(info.Name); of != namespace || own != name || !isWritable(info, rec) {
			return nil
		}
		n, err := strconv.ParseUint(id, 10, 64)
		if err == nil && n > highest {
			newest, highest = id, n
		}
		return err
	})
	if err == nil && newest == "" {
		err = classed(errdefs.ErrNotFound, "there is none")
	}
	return newest, err
}

func isWritable(info snapshots.Info, rec record) bool {
	return info.Kind == snapshots.KindActive && rec.Root == fence.Container
}

// Limits tells the accounts of all writable layers that have one, by the names.
func (s *Snapshotter) Limits(ctx context.Context) ([]LayerLimit, error) {
	out := []LayerLimit{}
	if s.projects == nil {
		return out, nil
	}
	if err := s.gate.Quick(); err != nil {
		return nil, fmt.Errorf("read the limits of writable layers: %w", err)
	}
	keys := map[string]string{}
	err := s.eachSnapshot(ctx, func(id string, info snapshots.Info, rec record) error {
		if isWritable(info, rec) {
			keys[id] = info.Name
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read the limits of writable layers: %w", err)
	}
	root, err := s.gate.Root(fence.Container)
	if err != nil {
		return nil, fmt.Errorf("read the limits of writable layers: %w", err)
	}
	err = s.projects.on(root, func(a *quota.Assigner) error {
		for id, key := range keys {
			account, err := a.Project(id)
			if errors.Is(err, fs.ErrNotExist) || errors.Is(err, quota.ErrNoProject) || errors.Is(err, quota.ErrForeignProject) {
				continue // it went away, or has none
			}
			if err != nil {
				return err
			}
			namespace, name := splitKey(key)
			out = append(out, layerLimit(namespace, name, account))
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read the limits of writable layers: %w", err)
	}
	slices.SortFunc(out, func(a, b LayerLimit) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name), cmp.Compare(a.Project, b.Project))
	})
	return out, nil
}

// makeWritable is makeTemporary, with a project ID if there is to be one. A folder
// that got only half of one is not used: nothing could be renamed between its
// folders (EXDEV).
func (s *Snapshotter) makeWritable(ctx context.Context, root *rootdir.Root) (string, error) {
	path, err := s.makeTemporary(root, snapshots.KindActive)
	if err != nil || s.projects == nil {
		return path, err
	}
	if s.projects.assign(ctx, root, filepath.Base(path)) {
		s.opts.faults(fault.CreateMarked)
		return path, nil
	}
	s.dropTemporary(root, path)
	return s.makeTemporary(root, snapshots.KindActive)
}
