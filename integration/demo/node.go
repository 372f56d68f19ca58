package main

import (
	"context"
	"path/filepath"

	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/integration/toolchain/bin"
	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/image"
	"github.com/cleave-cri/cleave/lab/node"
	"github.com/cleave-cri/cleave/lab/runtime"
)

// The two disks, by name.
const (
	imagesDisk = "images"
	nodeDisk   = "node"
)

const (
	imagesDiskBytes = 512 << 20
	nodeDiskBytes   = 256 << 20
)

// startNode makes a node as one finds it where containerd has a disk of its own
// (layout dedicated): containerd's root and its snapshots on one filesystem, the
// kubelet's folder and the pods' logs on another.
func (d *demo) startNode(ctx context.Context, cleave string) error {
	peers, err := bin.Get(ctx, d.progress.out, "containerd", "shim")
	if err != nil {
		return err
	}
	d.node, err = node.Start(ctx, d.lab, node.Options{
		Containerd: peers[0],
		Shim:       peers[1],
		Cleave:     cleave,
		Disks: []disk.Spec{
			{Name: imagesDisk, SizeBytes: imagesDiskBytes, FS: disk.Ext4},
			{Name: nodeDisk, SizeBytes: nodeDiskBytes, FS: disk.Ext4},
		},
		Runtime: func(o *runtime.Options, disks map[string]*disk.Disk) {
			for _, name := range []string{imagesDisk, nodeDisk} {
				d.progress.step("disk %-8s%s, %s on %s", name, disks[name].Device(), disks[name].FS(), disks[name].Path())
			}
			o.Root = filepath.Join(disks[imagesDisk].Path(), "containerd")
			o.SnapshotterRoots = map[string]string{"overlayfs": filepath.Join(disks[imagesDisk].Path(), "overlayfs")}
		},
		Configure: func(c *config.Config, disks map[string]*disk.Disk) {
			d.progress.step("containerd answers, an unmodified one; it looks at sizes every 10 s, as it does by default")
			c.Filesystems.NodeFS = filepath.Join(disks[nodeDisk].Path(), "kubelet")
			c.Filesystems.Logs = filepath.Join(disks[nodeDisk].Path(), "pods")
			// The lab measures more often than cleave does by default; the demo shall not look better than life.
			c.Measure = config.Default().Measure
		},
	})
	if err != nil {
		return err
	}
	d.progress.step("cleave answers in front of it, with its default settings")
	app, err := image.Busybox(ctx, image.Config{Files: map[string]string{"/opt/model": randomText(appFileBytes)}})
	if err != nil {
		return err
	}
	_, err = d.node.Registry.Push(ctx, appImage, app)
	return err
}
