package split

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/fsstats/quota"
	"github.com/cleave-cri/cleave/fsstats/walk"
	"github.com/cleave-cri/cleave/snapshot/split/fault"
	"github.com/cleave-cri/cleave/snapshot/split/fence"
)

// Options say where a snapshotter keeps its things and how it works.
type Options struct {
	// ImageRoot is the folder for image layers, on the image filesystem.
	// Absolute, without comma, colon or backslash, which overlayfs's options
	// can't hold. Required.
	ImageRoot string
	// ContainerRoot is the folder for everything else: writable layers, views,
	// image volumes. The same rules. It may be on the same filesystem as
	// ImageRoot, not inside it. Required.
	ContainerRoot string
	// Database is the file with the records. Its folder also holds the lock
	// and the ballast. It must lie in neither root, and best on a third
	// filesystem (CTD-66). Required.
	Database string

	// DatabaseBytes is how much is reserved for the database beforehand: about
	// 1 KiB per snapshot that exists at once. 1 MiB to 1 GiB; 0 means 32 MiB.
	DatabaseBytes int64
	// BallastBytes is the size of the file that is given up when the
	// database's disk is full. 0 means 4 MiB.
	BallastBytes int64

	// RequireMountpoints: each root must itself be a mount point of the host,
	// or the fence closes. Without it, a root whose filesystem is not mounted
	// is still noticed by its missing marker.
	RequireMountpoints bool
	// Namespaces are containerd's namespaces that are served; keys of others
	// are refused. Empty means all.
	Namespaces []string
	// RemapIDs: the labels with ID mappings that containerd sets for user
	// namespaces become mount options, and the upper folder belongs to the
	// mapped root. Needs the capability "remap-ids" in containerd's
	// configuration. Without it the labels mean nothing.
	RemapIDs bool
	// Rebase: layers may be unpacked in parallel and get their parent at Commit.
	// Needs the capability "rebase" in containerd's configuration.
	Rebase bool
	// SyncOnCommit: the image filesystem is synced before Commit of a layer
	// returns, so that a loss of power leaves no layer that is recorded and
	// incomplete. It makes each layer wait for all dirty data of that filesystem.
	SyncOnCommit bool
	// ProjectQuota: each new writable layer gets a project ID, by which the kernel
	// counts it, and can be limited by [Snapshotter.SetLimit]. It needs ext4 or xfs
	// with project quota below ContainerRoot; where that is missing nothing is
	// limited, and the status says why.
	ProjectQuota bool
	// AnyContainerd: removals and clean-ups need no containerd confirmed by
	// [Snapshotter.ConfirmContainerd]. For tests and for single use.
	AnyContainerd bool
	// MountOptions are added to those of every overlay, last. "index=off" is
	// the default where the kernel knows it and nothing else is given.
	MountOptions []string

	// UsageMaxAge is how old an answer about a writable snapshot may be, save while
	// nothing changes on its filesystem or the index is behind with its work; see
	// [Snapshotter.Usage]. 0 means
	// 5 s; negative: always measured.
	UsageMaxAge time.Duration
	// DeletionRate is how many names the trash deletes per second and root. 0
	// means 20 000; negative: no limit.
	DeletionRate int
	// CleanupMaxShare is which share of the folders in both roots a clean-up may
	// take away at once, 0 to 1; more than that has to be confirmed. 0 means
	// 0.1. CleanupMinCount folders are always allowed; 0 means 16.
	CleanupMaxShare float64
	CleanupMinCount int

	// CleanupWait is how long Cleanup waits at most for the trash to be empty. 0 means 5 s; negative: not at all.
	CleanupWait time.Duration

	// Log is required.
	Log *zap.Logger

	// sources are the kernel's files, other ones in tests.
	sources fence.Sources
	// faults is called at fault points in tests.
	faults func(fault.Point)
	// ledger stands for a filesystem's project accounts in tests.
	ledger func(*quota.FS) quota.Ledger
	// walk measures a folder; walk.Measure save in tests.
	walk func(ctx context.Context, root string, opt walk.Options) (walk.Usage, error)
}

// Defaults of Options.
const (
	defaultDatabaseBytes   = 32 << 20
	defaultBallastBytes    = 4 << 20
	defaultUsageMaxAge     = 5 * time.Second
	defaultDeletionRate    = 20_000
	defaultCleanupMaxShare = 0.1
	defaultCleanupMinCount = 16
	defaultCleanupWait     = 5 * time.Second
)

func (o Options) withDefaults() Options {
	setDefault(&o.DatabaseBytes, defaultDatabaseBytes)
	setDefault(&o.BallastBytes, defaultBallastBytes)
	setDefault(&o.UsageMaxAge, defaultUsageMaxAge)
	setDefault(&o.DeletionRate, defaultDeletionRate)
	setDefault(&o.CleanupMaxShare, defaultCleanupMaxShare)
	setDefault(&o.CleanupMinCount, defaultCleanupMinCount)
	setDefault(&o.CleanupWait, defaultCleanupWait)
	if o.sources.BootID == "" {
		o.sources = fence.Kernel()
	}
	if o.faults == nil {
		o.faults = fault.Reach
	}
	if o.walk == nil {
		o.walk = walk.Measure
	}
	return o
}

func setDefault[T comparable](v *T, value T) {
	var zero T
	if *v == zero {
		*v = value
	}
}

// validate reports all faults of the options, also how the roots lie to each
// other as far as they exist.
func (o Options) validate() error {
	var errs []error
	for _, p := range []struct{ name, path string }{
		{"ImageRoot", o.ImageRoot}, {"ContainerRoot", o.ContainerRoot}, {"Database", o.Database},
	} {
		switch {
		case p.path == "":
			errs = append(errs, fmt.Errorf("%s is missing", p.name))
		case !filepath.IsAbs(p.path) || filepath.Clean(p.path) != p.path:
			errs = append(errs, fmt.Errorf("%s %q is not an absolute path in its shortest form", p.name, p.path))
		case strings.ContainsAny(p.path, ",:\\\n") && p.name != "Database":
			errs = append(errs, fmt.Errorf("%s %q has a comma, colon, backslash or line end, which mount options can't hold", p.name, p.path))
		}
	}
	if o.Log == nil {
		errs = append(errs, errors.New("no logger (Log) is given"))
	}
	if o.DatabaseBytes < 1<<20 || o.DatabaseBytes > 1<<30 {
		errs = append(errs, fmt.Errorf("DatabaseBytes is %d, want %d to %d", o.DatabaseBytes, 1<<20, 1<<30))
	}
	if o.BallastBytes < 0 || o.CleanupMinCount < 0 {
		errs = append(errs, errors.New("BallastBytes and CleanupMinCount can't be negative"))
	}
	if o.CleanupMaxShare < 0 || o.CleanupMaxShare > 1 {
		errs = append(errs, fmt.Errorf("CleanupMaxShare is %v, want a share from 0 to 1", o.CleanupMaxShare))
	}
	for _, option := range o.MountOptions {
		for part := range strings.SplitSeq(option, ",") {
			key, _, _ := strings.Cut(part, "=")
			if slices.Contains([]string{"", "lowerdir", "lowerdir+", "datadir+", "upperdir", "workdir", "uidmap", "gidmap"}, key) {
				errs = append(errs, fmt.Errorf("MountOptions has %q, which is the snapshotter's own", option))
			}
		}
	}
	if len(errs) > 0 {
		return fmt.Errorf("options of the snapshotter: %w", errors.Join(errs...))
	}
	return o.validatePlaces()
}

// validatePlaces looks where the paths really lead.
func (o Options) validatePlaces() error {
	image, container := realPath(o.ImageRoot), realPath(o.ContainerRoot)
	database := realPath(o.Database)
	switch {
	case within(image, container), within(container, image):
		return fmt.Errorf("the roots %s and %s lie one in the other: give each its own folder beside the other", o.ImageRoot, o.ContainerRoot)
	case within(database, image), within(database, container):
		return fmt.Errorf("the database %s lies in a root: put it outside of both, best on a third filesystem", o.Database)
	}
	return nil
}

// realPath follows the symlinks of the part of path that exists.
func realPath(path string) string {
	for rest := ""; ; {
		real, err := filepath.EvalSymlinks(path)
		if err == nil {
			return filepath.Join(real, rest)
		}
		if !errors.Is(err, os.ErrNotExist) || path == "/" {
			return filepath.Join(path, rest)
		}
		path, rest = filepath.Dir(path), filepath.Join(filepath.Base(path), rest)
	}
}

// within reports whether path is dir or below it, by path elements.
func within(path, dir string) bool {
	rel, err := filepath.Rel(dir, path)
	return err == nil && rel != ".." && !strings.HasPrefix(rel, "../")
}

func (o Options) root(role fence.Role) string {
	if role == fence.Image {
		return o.ImageRoot
	}
	return o.ContainerRoot
}

func (o Options) roots() map[fence.Role]string {
	return map[fence.Role]string{fence.Image: o.ImageRoot, fence.Container: o.ContainerRoot}
}
