// Package node puts a whole node together on one machine: disks of its own, a
// private containerd on them, a registry with images, and cleave in front. It is
// what the integration tests, the benchmarks, the demo and the lab run on.
//
// It needs root. Everything that it makes belongs to a janitor's run and goes
// away with it, whatever happens to the process.
package node

import (
	"context"
	"errors"
	"path/filepath"

	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/image"
	"github.com/cleave-cri/cleave/lab/janitor"
	"github.com/cleave-cri/cleave/lab/pod"
	"github.com/cleave-cri/cleave/lab/runtime"
)

// The images that every node can pull.
const (
	PauseImage   = "registry.k8s.io/pause:3.10"
	BusyboxImage = "docker.io/library/busybox:1"
)

// Options say what node to make. The zero value is a node with one filesystem,
// the machine's own, and no cleave.
type Options struct {
	// Containerd and Shim are the paths of the programs to run.
	Containerd, Shim string
	// Disks are made first; Layout names them.
	Disks []disk.Spec
	// Runtime changes the options of containerd; nil means none. The disks are
	// there already, by name.
	Runtime func(*runtime.Options, map[string]*disk.Disk)
	// Cleave is the path of the program to put in front; empty means none.
	Cleave string
	// Configure changes cleave's configuration; nil means no change.
	Configure func(*config.Config, map[string]*disk.Disk)
	// Split puts the node on the split snapshotter; nil means containerd's own.
	// It needs Cleave.
	Split *SplitOptions
	// Lean makes do without busybox: sandboxes run a program that only waits, and
	// there is no busybox image.
	Lean bool
	// Before is called when all but cleave runs; nil for nothing.
	Before func(context.Context, *Node) error
}

// Node is a node that runs.
type Node struct {
	Run      *janitor.Run
	Disks    map[string]*disk.Disk
	Registry *image.Registry
	Runtime  *runtime.Containerd
	// Cleave is nil if none was asked for, and so is Split.
	Cleave *Cleave
	Split  *Split
}

// Start makes a node and waits until it answers. If it can't, what was made is
// taken down again.
func Start(ctx context.Context, run *janitor.Run, o Options) (_ *Node, err error) {
	n := &Node{Run: run, Disks: map[string]*disk.Disk{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, n.Close(context.WithoutCancel(ctx)))
		}
	}()
	for _, spec := range o.Disks {
		d, err := disk.Make(ctx, run.Dir(), spec)
		if err != nil {
			return nil, err
		}
		n.Disks[spec.Name] = d
	}
	if err := n.startRegistry(ctx, o.Lean); err != nil {
		return nil, err
	}
	if err := n.makeRuntime(o); err != nil {
		return nil, err
	}
	if o.Cleave == "" {
		return n, n.Runtime.Start(ctx)
	}
	if err := n.makeCleave(o); err != nil {
		return nil, err
	}
	if err := n.startRuntime(ctx, o); err != nil {
		return nil, err
	}
	if o.Before != nil {
		if err := o.Before(ctx, n); err != nil {
			return nil, err
		}
	}
	return n, n.Cleave.Start(ctx)
}

// makeCleave prepares cleave, without starting it.
func (n *Node) makeCleave(o Options) error {
	dir := filepath.Join(n.Run.Dir(), "cleave")
	cfg := n.config()
	if o.Split != nil {
		if err := configureSplit(&cfg, dir, n.Disks, *o.Split); err != nil {
			return err
		}
	}
	if o.Configure != nil {
		o.Configure(&cfg, n.Disks)
	}
	var err error
	n.Cleave, err = newCleave(o.Cleave, dir, n.Run.Env(), cfg)
	return err
}

// startRuntime starts containerd, after the snapshotter if there is one.
func (n *Node) startRuntime(ctx context.Context, o Options) (err error) {
	if o.Split == nil {
		return n.Runtime.Start(ctx)
	}
	if n.Split, err = newSplit(ctx, n.Cleave, o.Containerd, n.Runtime, n.Run.Env(), *o.Split); err != nil {
		return err
	}
	if err := n.Split.Start(ctx); err != nil {
		return err
	}
	if err := n.Runtime.Start(ctx); err != nil {
		return err
	}
	return n.Split.WaitKnown(ctx, n.Runtime.PID())
}

func (n *Node) startRegistry(ctx context.Context, lean bool) error {
	var err error
	if n.Registry, err = image.Serve(ctx); err != nil {
		return err
	}
	if lean {
		waiting, err := image.Waiting()
		if err != nil {
			return err
		}
		_, err = n.Registry.Push(ctx, PauseImage, waiting)
		return err
	}
	pause, err := image.Pause(ctx)
	if err != nil {
		return err
	}
	if _, err := n.Registry.Push(ctx, PauseImage, pause); err != nil {
		return err
	}
	busybox, err := image.Busybox(ctx, image.Config{})
	if err != nil {
		return err
	}
	_, err = n.Registry.Push(ctx, BusyboxImage, busybox)
	return err
}

func (n *Node) makeRuntime(o Options) error {
	r := runtime.Options{
		Dir:          filepath.Join(n.Run.Dir(), "ctd"),
		Containerd:   o.Containerd,
		Shim:         o.Shim,
		CertsDir:     filepath.Join(n.Run.Dir(), "certs"),
		SandboxImage: PauseImage,
		Cgroup:       n.Run.Cgroup(),
		Env:          n.Run.Env(),
	}
	if o.Split != nil {
		r.Imports = []string{dropIns(r.Dir)}
	}
	if o.Runtime != nil {
		o.Runtime(&r, n.Disks)
	}
	if err := n.Registry.WriteHosts(r.CertsDir); err != nil {
		return err
	}
	var err error
	n.Runtime, err = runtime.New(r)
	return err
}

// config is cleave's configuration for this node.
func (n *Node) config() config.Config {
	cfg := config.Default()
	cfg.Runtime.Endpoint = config.Endpoint(n.Runtime.Socket())
	cfg.CRIO.NRIEndpoint = config.Endpoint(n.Runtime.NRISocket())
	cfg.Filesystems.NodeFS = n.Run.Dir()
	cfg.Filesystems.Logs = n.Run.Dir()
	cfg.Measure.Period = cfg.Measure.Period / 10
	cfg.Measure.MaxCorePercent = 100
	return cfg
}

// Passthrough puts a second cleave in front of the same containerd, one that is
// started with --passthrough.
func (n *Node) Passthrough(ctx context.Context, binary string) (*Cleave, error) {
	c, err := newPassthrough(binary, filepath.Join(n.Run.Dir(), "passthrough"), n.Run.Env(), config.Endpoint(n.Runtime.Socket()))
	if err != nil {
		return nil, err
	}
	return c, c.Start(ctx)
}

// Another puts one more cleave in front of the same containerd, under a name
// of its own.
func (n *Node) Another(binary, name string, change func(*config.Config)) (*Cleave, error) {
	cfg := n.config()
	if change != nil {
		change(&cfg)
	}
	return newCleave(binary, filepath.Join(n.Run.Dir(), name), n.Run.Env(), cfg)
}

// Alone is a cleave in a run that has no node: in front of a runtime that the
// caller makes.
func (n *Node) Alone(binary string, runtime config.Endpoint) (*Cleave, error) {
	cfg := config.Default()
	cfg.Runtime.Endpoint = runtime
	return newCleave(binary, filepath.Join(n.Run.Dir(), "cleave"), n.Run.Env(), cfg)
}

// PodSpec is a pod that fits this node.
func (n *Node) PodSpec(name string) pod.Spec {
	return pod.Spec{Name: name, CgroupParent: n.Runtime.CgroupParent()}
}

// Close ends cleave, containerd and all containers and removes the disks. The
// run is the caller's to close.
func (n *Node) Close(ctx context.Context) error {
	var errs []error
	if n.Cleave != nil {
		errs = append(errs, n.Cleave.Stop(ctx))
	}
	if n.Runtime != nil {
		errs = append(errs, n.Runtime.Close(ctx))
	}
	if n.Split != nil {
		errs = append(errs, n.Split.Stop(ctx))
	}
	if n.Registry != nil {
		errs = append(errs, n.Registry.Close())
	}
	for _, d := range n.Disks {
		errs = append(errs, d.Close(ctx))
	}
	return errors.Join(errs...)
}
