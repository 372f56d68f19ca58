package kube

import (
	"errors"
	"fmt"
	"math"
	"syscall"

	stats "k8s.io/kubelet/pkg/apis/stats/v1alpha1"
)

// EqualsDisk holds a summary's figures of a filesystem against statfs(2) of its mountpoint: the same capacity, and as much
// available within a hundredth.
func EqualsDisk(got *stats.FsStats, mountpoint string) error {
	if got == nil || got.CapacityBytes == nil || got.AvailableBytes == nil {
		return errors.New("no figures")
	}
	var s syscall.Statfs_t
	if err := syscall.Statfs(mountpoint, &s); err != nil {
		return fmt.Errorf("hold figures against %s: %w", mountpoint, err)
	}
	size := uint64(s.Bsize) //nolint:gosec // the kernel's block size
	if *got.CapacityBytes != s.Blocks*size {
		return fmt.Errorf("capacity is %d, the disk has %d", *got.CapacityBytes, s.Blocks*size)
	}
	return Within("availableBytes", *got.AvailableBytes, s.Bavail*size)
}

// Within is an error if a figure is more than a hundredth off.
func Within(what string, got, want uint64) error {
	const share = 0.01
	if math.Abs(float64(got)-float64(want)) > share*float64(want) {
		return fmt.Errorf("%s is %d, want %d", what, got, want)
	}
	return nil
}
