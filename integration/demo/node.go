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
		Disks:      d.disks(),
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
	for _, i := range d.scenario.Images {
		bytes := int64(0)
		for _, l := range i.Layers[1:] { // busybox is the first
			bytes += l.Bytes
		}
		built, err := image.Busybox(ctx, image.Config{Files: map[string]string{"/opt/model": randomText(int(bytes))}})
		if err != nil {
			return err
		}
		if _, err := d.node.Registry.Push(ctx, reference(i.Name), built); err != nil {
			return err
		}
	}
	return nil
}

// disks are the scenario's filesystems.
func (d *demo) disks() (out []disk.Spec) {
	for _, f := range d.scenario.Filesystems {
		out = append(out, disk.Spec{Name: f.Name, SizeBytes: f.SizeBytes, FS: disk.Ext4})
	}
	return out
}
