package main

import (
	"context"
	"fmt"
	"syscall"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/lab/du"
	"github.com/cleave-cri/cleave/lab/pod"
)

// layerOf asks an endpoint for a container's writable layer.
func layerOf(ctx context.Context, c *pod.Client, id string) (figure, error) {
	s, err := c.Stats(ctx, id)
	if err != nil {
		return figure{}, err
	}
	return figureOf(s.GetWritableLayer()), nil
}

// imageFsInfo asks an endpoint for both lists.
func imageFsInfo(ctx context.Context, c *pod.Client) (fsInfo, error) {
	answer, err := c.Images.ImageFsInfo(ctx, &runtimeapi.ImageFsInfoRequest{})
	if err != nil {
		return fsInfo{}, fmt.Errorf("ask for ImageFsInfo: %w", err)
	}
	var info fsInfo
	for _, u := range answer.GetImageFilesystems() {
		info.images = append(info.images, figureOf(u))
	}
	for _, u := range answer.GetContainerFilesystems() {
		info.containers = append(info.containers, figureOf(u))
	}
	return info, nil
}

// figureOf takes over what an answer says; nil is a figure that is not given.
func figureOf(u *runtimeapi.FilesystemUsage) figure {
	if u == nil || u.GetUsedBytes() == nil || u.GetInodesUsed() == nil {
		return figure{}
	}
	return figure{
		given:      true,
		amount:     amount{bytes: u.GetUsedBytes().GetValue(), inodes: u.GetInodesUsed().GetValue()},
		timestamp:  u.GetTimestamp(),
		mountpoint: u.GetFsId().GetMountpoint(),
	}
}

// measure takes the amount that GNU du finds.
func measure(ctx context.Context, paths ...string) (amount, error) {
	bytes, inodes, err := du.Measure(ctx, paths...)
	return amount{bytes: bytes, inodes: inodes}, err
}

// available asks the kernel what anybody may still write.
func available(path string) (amount, error) {
	var s syscall.Statfs_t
	if err := syscall.Statfs(path, &s); err != nil {
		return amount{}, fmt.Errorf("statfs %s: %w", path, err)
	}
	return amount{bytes: s.Bavail * uint64(s.Frsize)}, nil //nolint:gosec // a block's size is positive
}

// statfs asks the kernel what is used on a filesystem.
func statfs(path string) (amount, error) {
	var s syscall.Statfs_t
	if err := syscall.Statfs(path, &s); err != nil {
		return amount{}, fmt.Errorf("statfs %s: %w", path, err)
	}
	unit := uint64(s.Frsize) //nolint:gosec // a block's size is positive
	return amount{bytes: (s.Blocks - s.Bfree) * unit, inodes: s.Files - s.Ffree}, nil
}
