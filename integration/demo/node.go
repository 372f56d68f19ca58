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
	imagesDiskBytes = 256 << 20
	nodeDiskBytes   = 512 << 20
)

// startNode makes a node of layout split: image layers and containerd's root on
// one filesystem, what containers write with the kubelet's folder and the pods'
// logs on another.
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
		},
		Split: &node.SplitOptions{Images: imagesDisk, Containers: nodeDisk},
		Configure: func(c *config.Config, disks map[string]*disk.Disk) {
			c.Filesystems.NodeFS = filepath.Join(disks[nodeDisk].Path(), "kubelet")
			c.Filesystems.Logs = filepath.Join(disks[nodeDisk].Path(), "pods")
			// The lab measures more often than cleave does by default; the demo shall not look better than life.
			c.Measure = config.Default().Measure
		},
	})
	if err != nil {
		return err
	}
	d.progress.step("containerd answers, an unmodified one, on cleave's snapshotter; it looks at sizes every 10 s, as by default")
	d.progress.step("cleave answers in front of it, with its default settings")
	app, err := image.Busybox(ctx, image.Config{Files: map[string]string{"/opt/model": randomText(appFileBytes)}})
	if err != nil {
		return err
	}
	_, err = d.node.Registry.Push(ctx, appImage, app)
	return err
}
