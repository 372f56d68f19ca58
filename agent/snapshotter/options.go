package snapshotter

import (
	"errors"
	"path/filepath"
	"runtime"

	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/snapshot/split"
	"github.com/cleave-cri/cleave/snapshot/split/ctdconfig"
)

// ErrNotConfigured says that the configuration has no roots for the snapshotter.
var ErrNotConfigured = errors.New("the snapshotter is not configured: set snapshotter.imageRoot and snapshotter.containerRoot to two folders, on the filesystems that shall have image layers and containers' writes")

// StoreOptions are the options of the store for a configuration.
func StoreOptions(cfg config.Config, log *zap.Logger) (split.Options, error) {
	s := cfg.Snapshotter
	if !s.Enabled() {
		return split.Options{}, ErrNotConfigured
	}
	rate := s.DeletionsPerSecond
	if rate == 0 {
		rate = -1 // no limit, where 0 is the default
	}
	return split.Options{
		ImageRoot:          filepath.Clean(s.ImageRoot),
		ContainerRoot:      filepath.Clean(s.ContainerRoot),
		Database:           filepath.Clean(s.Database),
		RequireMountpoints: s.RequireMountpoints,
		Namespaces:         s.Namespaces,
		RemapIDs:           s.RemapIDs,
		Rebase:             s.ParallelUnpack,
		SyncOnCommit:       s.SyncOnCommit,
		MountOptions:       s.MountOptions,
		ProjectQuota:       s.ProjectQuota,
		UsageMaxAge:        s.UsageMaxAge,
		DeletionRate:       rate,
		CleanupMaxShare:    float64(s.CleanupMaxPercent) / 100,
		Log:                log,
	}, nil
}

// ContainerdOptions are what containerd's configuration has to say for a
// configuration of ours.
func ContainerdOptions(cfg config.Config, dropIn string, maxConcurrentUnpacks int) (ctdconfig.Options, error) {
	s := cfg.Snapshotter
	if !s.Enabled() {
		return ctdconfig.Options{}, ErrNotConfigured
	}
	path, err := filepath.Abs(dropIn)
	if err != nil {
		return ctdconfig.Options{}, err
	}
	return ctdconfig.Options{
		Address:              s.Endpoint.Path(),
		ImageRoot:            filepath.Clean(s.ImageRoot),
		Platform:             "linux/" + runtime.GOARCH,
		RemapIDs:             s.RemapIDs,
		Rebase:               s.ParallelUnpack,
		MaxConcurrentUnpacks: maxConcurrentUnpacks,
		DropIn:               path,
	}, nil
}
