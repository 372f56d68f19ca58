package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/moby/sys/mountinfo"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

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

// upperOf finds the folder of a container's or sandbox's writable layer by the
// overlay that is mounted for it.
func (l *look) upperOf(id string) (string, error) {
	root := filepath.Join(l.node.Runtime.State(), "io.containerd.runtime.v2.task", "k8s.io", id, "rootfs")
	mounts, err := mountinfo.GetMounts(mountinfo.SingleEntryFilter(root))
	if err != nil {
		return "", fmt.Errorf("look for the overlay of %s: %w", id, err)
	}
	for _, m := range mounts {
		for option := range strings.SplitSeq(m.VFSOptions, ",") {
			if upper, ok := strings.CutPrefix(option, "upperdir="); ok {
				return upper, nil
			}
		}
	}
	return "", fmt.Errorf("no overlay is mounted on %s", root)
}

// du measures folders with GNU du, which shares no code with containerd or
// cleave. A file that is in several of them counts once.
func du(ctx context.Context, paths ...string) (amount, error) {
	var a amount
	for _, unit := range []struct {
		flag string
		to   *uint64
	}{{"--block-size=1", &a.bytes}, {"--inodes", &a.inodes}} {
		args := append([]string{"--summarize", "--one-file-system", "--total", unit.flag, "--"}, paths...)
		var stderr bytes.Buffer
		cmd := exec.CommandContext(ctx, "du", args...)
		cmd.Env = append(os.Environ(), "LC_ALL=C")
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		// It ends with 1 when files have gone while it walked, and counts the rest.
		if exit := (*exec.ExitError)(nil); err != nil && (!errors.As(err, &exit) || !onlyGone(stderr.String())) {
			return amount{}, fmt.Errorf("du: %w: %s", err, strings.TrimSpace(stderr.String()))
		}
		fields := strings.Fields(string(out))
		if len(fields) < 2 {
			return amount{}, fmt.Errorf("du: it said %q", out)
		}
		if *unit.to, err = strconv.ParseUint(fields[len(fields)-2], 10, 64); err != nil {
			return amount{}, fmt.Errorf("du: %w", err)
		}
	}
	return a, nil
}

func onlyGone(complaints string) bool {
	for line := range strings.Lines(complaints) {
		if !strings.HasSuffix(strings.TrimSpace(line), ": No such file or directory") {
			return false
		}
	}
	return complaints != ""
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
