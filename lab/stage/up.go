package stage

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/config/strict"
	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/sim"
	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/flock"
	"github.com/cleave-cri/cleave/lab/janitor"
	"github.com/cleave-cri/cleave/lab/scenario"
)

// Sizes are the layout of a node that is made without a scenario, and the sizes of
// its filesystems as people write them.
type Sizes struct {
	Layout                   string
	Node, Images, Containers string
}

// The names of filesystems and of the one image of such a node.
const (
	nodeDisk, imageDisk, containerDisk = "node", "images", "containers"
	someImage                          = "app"
)

// Scenario is a node of a layout on which nothing happens.
func (s Sizes) Scenario() (*scenario.Scenario, error) {
	roles := scenario.Layout{NodeFS: nodeDisk, ImageFS: nodeDisk, ContainerFS: nodeDisk}
	disks := []struct{ name, flag, size string }{{nodeDisk, "size", s.Node}}
	images := struct{ name, flag, size string }{imageDisk, "images-size", s.Images}
	containers := struct{ name, flag, size string }{containerDisk, "containers-size", s.Containers}
	switch s.Layout {
	case "single":
	case "dedicated":
		roles.ImageFS, roles.ContainerFS = imageDisk, imageDisk
		disks = append(disks, images)
	case "split":
		roles.ImageFS = imageDisk
		disks = append(disks, images)
	case "separate":
		roles.ImageFS, roles.ContainerFS = imageDisk, containerDisk
		disks = append(disks, images, containers)
	default:
		return nil, fmt.Errorf("--layout %q: choose single, dedicated, split or separate", s.Layout)
	}
	out, err := scenario.Parse("defaults", []byte("version: 1\nlasts: 1m\nfilesystems: {node: {size: 1Gi}}\n"))
	if err != nil {
		return nil, err
	}
	out.Title, out.Layout, out.Filesystems = "a node of layout "+s.Layout, roles, nil
	out.Images = []scenario.Image{{Name: someImage, OnNode: true, Layers: []scenario.Layer{{Name: someImage, Bytes: 8 << 20}}}}
	for _, d := range disks {
		bytes, err := strict.Bytes(&yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: d.size})
		if err != nil {
			return nil, fmt.Errorf("--%s %q: %w", d.flag, d.size, err)
		}
		out.Filesystems = append(out.Filesystems, scenario.Filesystem{Name: d.name, SizeBytes: bytes})
	}
	return out, nil
}

// check refuses what flags can't be.
func (o Options) check() error {
	if fs := cmp.Or(o.FS, disk.Ext4); !contains(disk.Filesystems(), fs) {
		return fmt.Errorf("--fs %q: choose ext4, xfs or btrfs", fs)
	}
	switch cmp.Or(o.Mode, config.ModeCRI) {
	case config.ModeCRI, config.ModeObserve:
	case config.ModeCRIO:
		if !o.Kubelet {
			return errors.New("--mode crio: only a real kubelet takes cleave for CRI-O: add --kubelet, or choose cri or observe")
		}
	default:
		return fmt.Errorf("--mode %q: choose cri, crio or observe", o.Mode)
	}
	switch profile := cmp.Or(o.Profile, sim.CleaveProfile); {
	case profile == sim.CleaveProfile:
	case profile != sim.KubeletProfile:
		return fmt.Errorf("--profile %q: choose kubelet or cleave", profile)
	case !o.Kubelet:
		return errors.New("--profile kubelet: the lab's stand-in for a kubelet evicts nobody: add --kubelet")
	}
	return nil
}

func contains(list []disk.FS, fs disk.FS) bool {
	for _, have := range list {
		if have == fs {
			return true
		}
	}
	return false
}

// Ready says what is missing for a scenario's node: on this machine, in the scenario,
// among programs, which it finds.
func Ready(s *scenario.Scenario, o *Options) error {
	if err := o.check(); err != nil {
		return err
	}
	if err := Machine(Types(s, cmp.Or(o.FS, disk.Ext4))); err != nil {
		return err
	}
	if err := Playable(s, cmp.Or(o.FS, disk.Ext4)); err != nil {
		return err
	}
	if o.Mode == config.ModeCRIO && Layout(s.Layout) == string(engine.Separate) {
		return errors.New("--mode crio: a kubelet that speaks to CRI-O can't know three disks apart: choose cri, or another layout")
	}
	if o.Kubelet {
		if err := playableBy(s, cmp.Or(o.Profile, sim.CleaveProfile)); err != nil {
			return err
		}
	}
	programs, err := o.Programs.Find(o.Kubelet)
	o.Programs = programs
	return err
}

// closeLimit bounds the taking down of a node.
const closeLimit = 2 * time.Minute

// Up makes a node and leaves it running.
func Up(ctx context.Context, out io.Writer, sizes Sizes, o Options) error {
	s, err := sizes.Scenario()
	if err != nil {
		return err
	}
	if err := Ready(s, &o); err != nil {
		return err
	}
	// Another that is just being made is waited for, and is then there.
	turn, err := flock.TakeFolder(ctx, os.TempDir(), func() { fmt.Fprintln(out, "waiting for another lab that is being made") })
	if err != nil {
		return err
	}
	defer turn.Close() //nolint:errcheck // it ends with this program anyway
	kept, err := Kept()
	if err != nil {
		return err
	}
	if len(kept) > 0 {
		return fmt.Errorf("a lab is up already, in %s: `cleave lab down` ends it", kept[0].Dir)
	}
	run, err := janitor.Start(ctx, janitor.Options{Log: out})
	if err != nil {
		return err
	}
	began := time.Now()
	o.Step = func(format string, args ...any) {
		fmt.Fprintf(out, "%6.1fs  %s\n", time.Since(began).Seconds(), fmt.Sprintf(format, args...))
	}
	st, err := Start(ctx, run, s, o)
	if err == nil {
		var a About
		if a, err = st.Keep(ctx); err == nil {
			fmt.Fprintln(out)
			a.Write(out)
			a.Hints(out)
			return nil
		}
	}
	closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeLimit)
	defer cancel()
	if ctx.Err() != nil {
		err = errors.New("interrupted")
	}
	return errors.Join(err, run.Close(closing))
}

// Down takes down all that is kept, and tells.
func Down(ctx context.Context, out io.Writer) error {
	down, err := down(ctx, out)
	for _, dir := range down {
		fmt.Fprintf(out, "took down %s: no process, no mount, no loop device, no cgroup, no file is left\n", dir)
	}
	if err == nil && len(down) == 0 {
		fmt.Fprintln(out, "no lab is up")
	}
	return err
}

// List shows the nodes that are up.
func List(out io.Writer) error {
	kept, err := Kept()
	if err != nil {
		return err
	}
	for i, a := range kept {
		if i > 0 {
			fmt.Fprintln(out, strings.Repeat("-", 3))
		}
		a.Write(out)
	}
	if len(kept) == 0 {
		fmt.Fprintln(out, "no lab is up")
	}
	return nil
}
