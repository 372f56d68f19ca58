// Package guestnode makes a guest a node as production runs them: systemd as PID 1, cgroup v2 with the systemd driver,
// containerd by its usual unit, and cleave's snapshotter and proxy as units in front of it, with image layers and writable
// layers on disks of their own. Images come in as files, for there is no network but the guest's own loopback.
//
// AddKubernetes puts etcd, an API server and the kubelet beside that, AddCRIO makes it a node in mode crio; other programs, units
// and files can be passed in too.
package guestnode

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/guest"
	"github.com/cleave-cri/cleave/lab/image"
	"github.com/cleave-cri/cleave/systemd"
)

// Images that every node has.
const (
	PauseImage   = "registry.k8s.io/pause:3.10"
	BusyboxImage = "docker.io/library/busybox:1"
)

// Disks of every node, mounted below /mnt. On the containers' disk are folders kubelet and pods for a kubelet that keeps its files
// and the pods' logs there.
const (
	ImagesDisk     = "images"
	ContainersDisk = "containers"
)

// PackagesDir is where packages lie in a guest that is to install them.
const PackagesDir = "/opt/packages"

// diskBytes is the size of each of the disks; the files are sparse.
const diskBytes = 2 << 30

//go:embed units
var units embed.FS

// Options of a node.
type Options struct {
	// Containerd, Shim, Ctr and Crictl are the paths of the programs to pass in.
	Containerd, Shim, Ctr, Crictl string
	// Cleave is the path of a cleave built by BuildCleave.
	Cleave string
	// Programs are more programs, by their name in /usr/local/bin.
	Programs map[string]string
	// Files are more files, by absolute path in the guest: units, configurations. They replace the node's own.
	Files map[string]guest.File
	// ContainersFS is the filesystem of the containers' disk, with project quota: ext4, which "" means, or xfs.
	ContainersFS disk.FS
	// Plain makes a node before cleave came to it: containerd alone, with its own snapshotter. cleave's program and
	// configuration lie there, and its disks are mounted.
	Plain bool
	// Configure changes cleave's configuration; nil means no change.
	Configure func(*config.Config)
	// Command is a shell script that runs when the node is up: all units active, images imported.
	Command string
}

// Prepare makes what Run of package guest needs of a node; System and Limit are left to the caller. Files on the way lie
// in dir.
func Prepare(ctx context.Context, dir string, o Options) (guest.Options, error) {
	files := map[string]guest.File{}
	root := func(name string, f guest.File) { files[path.Join("root", name)] = f }
	for name, program := range map[string]string{
		"containerd": o.Containerd, "containerd-shim-runc-v2": o.Shim, "ctr": o.Ctr, "crictl": o.Crictl, "cleave": o.Cleave,
	} {
		if program == "" {
			return guest.Options{}, fmt.Errorf("prepare a node in a guest: no path of %s is given", name)
		}
		root("usr/local/bin/"+name, guest.File{Path: program})
	}
	for name, program := range o.Programs {
		root("usr/local/bin/"+name, guest.File{Path: program})
	}
	if err := addUnits(root, o.Plain); err != nil {
		return guest.Options{}, err
	}
	cleave, err := cleaveConfig(o.Configure)
	if err != nil {
		return guest.Options{}, err
	}
	root("etc/cleave/config.yaml", guest.File{Content: cleave, Mode: 0o600})
	root("etc/containerd/config.toml", guest.File{Content: []byte(containerdConfig)})
	root("etc/crictl.yaml", guest.File{Content: []byte(crictlConfig)})
	for name, f := range o.Files {
		if !path.IsAbs(name) || path.Clean(name) != name {
			return guest.Options{}, fmt.Errorf("prepare a node in a guest: file %q: the path must be absolute and clean", name)
		}
		root(name, f)
	}
	if err := addImages(ctx, dir, files); err != nil {
		return guest.Options{}, err
	}
	containers := disk.Spec{Name: ContainersDisk, SizeBytes: diskBytes, FS: o.ContainersFS}
	if containers.FS != disk.XFS { // which has it by its mount option alone
		containers.MkfsArgs = []string{"-O", "quota,project", "-E", "quotatype=prjquota"}
	}
	start := startAll
	if o.Plain {
		start = startPlain
	}
	return guest.Options{
		Command:   setUp + start + "\n" + o.Command,
		Files:     files,
		MemoryMiB: 3072, // only what is used is taken; an API server and a kubelet need more than the rest
		Disks: []disk.Spec{
			{Name: ImagesDisk, SizeBytes: diskBytes, FS: disk.XFS},
			containers,
		},
	}, nil
}

// setUp makes the node by the commands that an operator uses. Every step that fails ends it, and is the last that is said.
const setUp = `set -eu
PATH=/usr/local/bin:$PATH
set -x
cp -r --preserve=mode root/. /
mkdir -p /mnt/images /mnt/containers /var/lib/kubelet /var/log/pods /run/cleave
mount /dev/disk/by-id/virtio-images /mnt/images
mount -o prjquota /dev/disk/by-id/virtio-containers /mnt/containers
mkdir /mnt/images/cleave /mnt/containers/cleave /mnt/containers/kubelet /mnt/containers/pods
systemctl daemon-reload
`

// startAll starts what is on the node, startPlain what is on one before cleave came.
const (
	startAll = `cleave snapshotter init
cleave containerd-config --write
systemctl start cleave-snapshotter containerd cleave
for image in images/*.tar; do
	ctr --namespace k8s.io images import --snapshotter cleave "$image"
done
set +x
`
	startPlain = `systemctl start containerd
for image in images/*.tar; do
	ctr --namespace k8s.io images import "$image"
done
set +x
`
)

// containerdConfig is what a node's operator has: the default, with the systemd driver.
const containerdConfig = `version = 3
imports = ["/etc/containerd/conf.d/*.toml"]

[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = "` + PauseImage + `"

[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
SystemdCgroup = true
`

// crictlConfig: two seconds, crictl's default, are too few in a guest, and would leave half-made pods behind.
const crictlConfig = `runtime-endpoint: unix:///run/cleave/cleave.sock
image-endpoint: unix:///run/cleave/cleave.sock
timeout: 60
`

func cleaveConfig(change func(*config.Config)) ([]byte, error) {
	cfg := config.Default()
	cfg.Snapshotter.ImageRoot = "/mnt/" + ImagesDisk + "/cleave"
	cfg.Snapshotter.ContainerRoot = "/mnt/" + ContainersDisk + "/cleave"
	cfg.Measure.MaxCorePercent = 100
	if change != nil {
		change(&cfg)
	}
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("configure cleave: %w", err)
	}
	return cfg.YAML()
}

// addUnits adds cleave's own units, as they are in packages, for the program's place in a guest, and containerd's.
func addUnits(root func(string, guest.File), plain bool) error {
	own, err := systemd.Units("/usr/local/bin/cleave")
	if err != nil {
		return err
	}
	for _, f := range own {
		if !plain {
			root("etc/systemd/system/"+f.Name, guest.File{Content: f.Content})
		}
	}
	return fs.WalkDir(units, "units", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		content, err := units.ReadFile(name)
		root("etc/systemd/system/"+path.Base(name), guest.File{Content: content})
		return err
	})
}

func addImages(ctx context.Context, dir string, files map[string]guest.File) error {
	pause, err := image.Pause(ctx)
	if err != nil {
		return err
	}
	busybox, err := image.Busybox(ctx, image.Config{})
	if err != nil {
		return err
	}
	for ref, img := range map[string]v1.Image{PauseImage: pause, BusyboxImage: busybox} {
		name := strings.NewReplacer("/", "_", ":", "_").Replace(ref) + ".tar"
		if err := image.Save(filepath.Join(dir, name), ref, img); err != nil {
			return err
		}
		files["images/"+name] = guest.File{Path: filepath.Join(dir, name), Mode: 0o644}
	}
	return nil
}

// BuildCleave builds the program as it is shipped, so that it runs in any root, and returns its path. With build tags its
// name has those too.
func BuildCleave(ctx context.Context, dir string, tags ...string) (string, error) {
	program := filepath.Join(dir, strings.Join(append([]string{"cleave"}, tags...), "-"))
	return program, build(ctx, "go", "build", "-trimpath", "-ldflags", "-s -w", "-tags", strings.Join(tags, ","), "-o", program, "github.com/cleave-cri/cleave/cmd/cleave")
}

// BuildTest builds the tests of a package as a program that runs in any root, and returns its path.
func BuildTest(ctx context.Context, dir, pkg string) (string, error) {
	program := filepath.Join(dir, path.Base(pkg)+".test")
	return program, build(ctx, "go", "test", "-c", "-ldflags", "-s -w", "-o", program, pkg)
}

func build(ctx context.Context, command ...string) error {
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	cmd.Env = append(slices.DeleteFunc(os.Environ(), func(e string) bool { return strings.HasPrefix(e, "CGO_ENABLED=") }), "CGO_ENABLED=0")
	out, err := cmd.CombinedOutput()
	if err != nil {
		return errors.Join(fmt.Errorf("%s: %w", strings.Join(command, " "), err), errors.New(strings.TrimSpace(string(out))))
	}
	return nil
}
