// Package stage sets a split node up on one machine, as a scenario describes it:
// its filesystems on loop devices, a private containerd with its images, a kubelet's
// deputy, and cleave. It is what `cleave lab` works on.
//
// Everything of a stage is in a janitor's run and goes away with it, whatever
// happens to the process; one that is kept goes by [Down]. It needs root, mkfs and
// mount.
package stage

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/garbage"
	"github.com/cleave-cri/cleave/engine/sim"
	"github.com/cleave-cri/cleave/lab/deputy"
	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/image"
	"github.com/cleave-cri/cleave/lab/janitor"
	"github.com/cleave-cri/cleave/lab/node"
	"github.com/cleave-cri/cleave/lab/plane"
	"github.com/cleave-cri/cleave/lab/pod"
	"github.com/cleave-cri/cleave/lab/podapi"
	"github.com/cleave-cri/cleave/lab/runtime"
	"github.com/cleave-cri/cleave/lab/scenario"
	"github.com/cleave-cri/cleave/reclaim/seen"
)

// Options say how a scenario's node is made. Programs are required.
type Options struct {
	Programs Programs
	// FS is the type of filesystems of which the scenario does not say it; empty
	// means ext4.
	FS disk.FS
	// Mode is cleave's; empty means cri.
	Mode config.Mode
	// Kubelet is for a real kubelet and API server, not the deputy. They use fixed
	// paths: call [Enter] first.
	Kubelet bool
	// Profile is who decides: cleave, or the kubelet, beside which cleave reclaims and
	// evicts nothing. Empty means cleave.
	Profile sim.Profile
	// Step is told what is done now; nil for nobody.
	Step func(format string, args ...any)
}

// Stage is a node that runs.
type Stage struct {
	Scenario *scenario.Scenario
	Node     *node.Node
	// Deputy is nil where there is a real kubelet; Plane and Kubelet where there is
	// none.
	Deputy  *deputy.Deputy
	Plane   *plane.ControlPlane
	Kubelet *plane.Kubelet
	// API is the API server that pods are made at.
	API *podapi.Client
	// Images are the ids of images on the node, by the scenario's names.
	Images map[string]string
	// Mode is cleave's, Profile who decides.
	Mode    config.Mode
	Profile sim.Profile

	o   Options
	run *janitor.Run
	// alone keeps other kubelets away, for as long as this program runs.
	alone io.Closer
}

// Reference is the name by which an image of a scenario is pulled.
func Reference(image string) string { return "registry.lab/" + strings.ToLower(image) + ":1" }

// Start makes a scenario's node in a run and waits until cleave answers. If it
// can't, the caller's closing of the run takes everything down.
func Start(ctx context.Context, run *janitor.Run, s *scenario.Scenario, o Options) (_ *Stage, err error) {
	o.FS, o.Mode, o.Profile = cmp.Or(o.FS, disk.Ext4), cmp.Or(o.Mode, config.ModeCRI), cmp.Or(o.Profile, sim.CleaveProfile)
	if o.Step == nil {
		o.Step = func(string, ...any) {}
	}
	st := &Stage{Scenario: s, Images: map[string]string{}, Mode: o.Mode, Profile: o.Profile, o: o, run: run}
	if err := room(run.Dir(), s); err != nil {
		return nil, err
	}
	options := node.Options{
		Containerd: o.Programs.Containerd, Shim: o.Programs.Shim, Cleave: o.Programs.Cleave, Lean: true,
		Disks: st.disks(), Configure: st.configure, Runtime: st.runtime, Before: st.furnish,
	}
	if st.split() {
		options.Split = &node.SplitOptions{Images: s.Layout.ImageFS, Containers: s.Layout.ContainerFS}
	}
	o.Step("make %d filesystems and start containerd", len(s.Filesystems))
	if st.Node, err = node.Start(ctx, run, options); err != nil {
		return nil, errors.Join(hinted(err), st.stopKubelet(context.WithoutCancel(ctx)))
	}
	o.Step("cleave answers, in mode %s", o.Mode)
	if o.Kubelet {
		if err := st.startKubelet(ctx); err != nil {
			return nil, errors.Join(err, st.Close(context.WithoutCancel(ctx)))
		}
		o.Step("the kubelet answers, and its node is known to the API server")
	}
	return st, nil
}

// hinted says what to do about errors that people meet.
func hinted(err error) error {
	if strings.Contains(err.Error(), "failed to setup loop device") {
		return fmt.Errorf("%w\nno loop device can be had: see `losetup --list` and detach what nobody needs, or load the module with a larger max_loop", err)
	}
	return err
}

// split says whether writable layers and images are apart, which takes the split
// snapshotter.
func (s *Stage) split() bool { return s.Scenario.Layout.ContainerFS != s.Scenario.Layout.ImageFS }

func typeOf(f scenario.Filesystem, standard disk.FS) disk.FS {
	return cmp.Or(disk.FS(f.Type), standard)
}

func (s *Stage) disks() []disk.Spec {
	var out []disk.Spec
	for _, f := range s.Scenario.Filesystems {
		spec := disk.Spec{Name: f.Name, SizeBytes: f.SizeBytes, FS: typeOf(f, s.o.FS), Net: true}
		if spec.FS == disk.XFS {
			// Else a file that grows takes up to as much again ahead of itself, of which no
			// simulator knows (xfs(5)).
			spec.Options = []string{"allocsize=64k"}
		}
		if spec.FS == disk.Ext4 {
			spec.MkfsArgs = []string{"-m", "0"} // nothing is kept for root, who all of the lab is
			if f.Inodes > 0 {
				spec.MkfsArgs = append(spec.MkfsArgs, "-N", fmt.Sprint(f.Inodes))
			}
		}
		out = append(out, spec)
	}
	return out
}

// at is a folder on the disk of a filesystem of the scenario.
func at(disks map[string]*disk.Disk, filesystem, folder string) string {
	return filepath.Join(disks[filesystem].Path(), folder)
}

func (s *Stage) configure(cfg *config.Config, disks map[string]*disk.Disk) {
	cfg.Mode = s.o.Mode
	cfg.Filesystems.NodeFS = at(disks, s.Scenario.Layout.NodeFS, "kubelet")
	cfg.Filesystems.Logs = at(disks, s.Scenario.Layout.NodeFS, "pods")
	cleaves := s.o.Profile == sim.CleaveProfile
	cfg.Reclaim.Enabled, cfg.Reclaim.Evict = cleaves, cleaves
	if s.o.Kubelet {
		cfg.Reclaim.Kubeconfig = s.account()
	}
}

func (s *Stage) runtime(o *runtime.Options, disks map[string]*disk.Disk) {
	o.Root = at(disks, s.Scenario.Layout.ImageFS, "containerd")
	if dir := s.o.Programs.runcDir(); dir != "" {
		o.Env = append(slices.Clone(o.Env), "PATH="+strings.Join([]string{filepath.Dir(o.Shim), dir, os.Getenv("PATH")}, ":"))
	}
}

// furnish fills the node while cleave does not run yet: what is used, images, the
// deputy, and what cleave would know of images if it had been here before.
func (s *Stage) furnish(ctx context.Context, n *node.Node) error {
	s.Node = n
	for _, f := range s.Scenario.Filesystems {
		if err := occupy(ctx, n.Disks[f.Name].Path(), f); err != nil {
			return err
		}
	}
	s.o.Step("pull %d images", len(s.Scenario.Images))
	for i := range s.Scenario.Images {
		if err := s.image(ctx, &s.Scenario.Images[i]); err != nil {
			return err
		}
	}
	if err := s.remember(); err != nil {
		return err
	}
	if s.o.Kubelet {
		return s.startPlane(ctx)
	}
	k := s.Scenario.Kubelet
	var err error
	s.Deputy, err = deputy.Start(ctx, deputy.Options{
		Dir: filepath.Join(s.run.Dir(), "kubelet"), Endpoint: n.Cleave.Endpoint(), CgroupParent: n.Runtime.CgroupParent(), Env: s.run.Env(),
		RootDir: n.Cleave.Config().Filesystems.NodeFS, PodLogsDir: n.Cleave.Config().Filesystems.Logs,
		Settings: settings(k), LogMaxBytes: k.ContainerLogMaxSizeBytes, LogMaxFiles: k.ContainerLogMaxFiles,
	})
	if err != nil {
		return err
	}
	access, err := podapi.ReadKubeconfig(s.Deputy.Kubeconfig())
	if err != nil {
		return err
	}
	s.API = podapi.NewClient(access)
	return nil
}

// settings are the kubelet's, as its configuration file has them.
func settings(k scenario.Kubelet) map[string]any {
	hard, soft, grace, least := map[string]string{}, map[string]string{}, map[string]string{}, map[string]string{}
	for _, t := range k.Thresholds {
		name := string(t.Signal)
		if t.Hard() {
			hard[name] = t.Value.String()
		} else {
			soft[name], grace[name] = t.Value.String(), t.Grace.String()
		}
		if t.MinReclaim != nil {
			least[name] = t.MinReclaim.String()
		}
	}
	out := map[string]any{
		"evictionHard": hard, "evictionSoft": soft, "evictionSoftGracePeriod": grace, "evictionMinimumReclaim": least,
		"evictionPressureTransitionPeriod": k.PressureTransitionPeriod.String(), "evictionMaxPodGracePeriod": k.MaxPodGraceSeconds,
		"imageGCHighThresholdPercent": k.ImageGCHighPercent, "imageGCLowThresholdPercent": k.ImageGCLowPercent,
		"imageMinimumGCAge": k.ImageMinimumAge.String(), "imageMaximumGCAge": k.ImageMaximum.String(),
	}
	if k.ContainerLogMaxSizeBytes > 0 {
		out["containerLogMaxSize"] = fmt.Sprint(k.ContainerLogMaxSizeBytes)
	}
	if k.ContainerLogMaxFiles > 0 {
		out["containerLogMaxFiles"] = k.ContainerLogMaxFiles
	}
	return out
}

// image puts an image into the registry and, if it is to be there, on the node.
func (s *Stage) image(ctx context.Context, spec *scenario.Image) error {
	var layers []image.Layer
	for _, l := range spec.Layers {
		// It is there unpacked, and as a blob.
		layers = append(layers, image.Layer{Name: l.Name, Bytes: l.Bytes / 2, Files: l.Inodes})
	}
	built, err := image.Payload(spec.Name, layers)
	if err != nil {
		return err
	}
	ref := Reference(spec.Name)
	if _, err := s.Node.Registry.Push(ctx, ref, built); err != nil {
		return err
	}
	if !spec.OnNode {
		return nil
	}
	client, err := pod.Dial(s.Node.Runtime.Endpoint())
	if err != nil {
		return err
	}
	id, err := client.Pull(ctx, ref)
	if err == nil {
		s.Images[spec.Name] = id
	}
	if err == nil && spec.Pinned {
		err = client.Pin(ctx, id)
	}
	return errors.Join(err, client.Close())
}

// known is for how long images are known that were never used.
const known = 24 * time.Hour

// remember writes down when images were seen and used, as a cleave that ran on this
// node before would have. It also says that nobody has named an image since: nobody
// could, and else none would be deleted in the first two minutes.
func (s *Stage) remember() error {
	dir := s.Node.Cleave.Config().StateDir
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("remember images: %w", err)
	}
	store, err := seen.Open(dir)
	if err != nil {
		return err
	}
	var list []garbage.Listed
	used := map[time.Duration][]garbage.ImageUser{}
	oldest := time.Duration(0)
	for _, i := range s.Scenario.Images {
		id, ok := s.Images[i.Name]
		if !ok {
			continue
		}
		list = append(list, garbage.Listed{ID: id, Pinned: i.Pinned})
		if i.UnusedFor > 0 {
			used[i.UnusedFor] = append(used[i.UnusedFor], garbage.ImageUser{ImageID: id})
			oldest = max(oldest, i.UnusedFor)
		}
	}
	now := time.Now()
	first := now.Add(-oldest - known)
	store.Look(list, nil, first, first)
	for _, ago := range slices.Backward(slices.Sorted(maps.Keys(used))) {
		store.Look(list, used[ago], now.Add(-ago), now.Add(-ago))
	}
	return errors.Join(store.Save(nil, true), store.Close())
}

// PodsDir is the folder of the pods' logs.
func (s *Stage) PodsDir() string { return s.Node.Cleave.Config().Filesystems.Logs }

// Listed are the references of the scenario's images that are on the node, by the
// scenario's names.
func (s *Stage) Listed(ctx context.Context) (map[string]bool, error) {
	client, err := pod.Dial(s.Node.Runtime.Endpoint())
	if err != nil {
		return nil, err
	}
	answer, err := client.Images.ListImages(ctx, &runtimeapi.ListImagesRequest{})
	if err := errors.Join(err, client.Close()); err != nil {
		return nil, fmt.Errorf("list images: %w", err)
	}
	out := map[string]bool{}
	for _, i := range s.Scenario.Images {
		out[i.Name] = slices.ContainsFunc(answer.GetImages(), func(have *runtimeapi.Image) bool {
			return slices.Contains(have.GetRepoTags(), Reference(i.Name))
		})
	}
	return out, nil
}

// Close ends the node. The run is the caller's to close.
func (s *Stage) Close(ctx context.Context) error {
	if s.API != nil {
		s.API.Close()
	}
	err := s.stopKubelet(ctx)
	if s.Node != nil {
		err = errors.Join(err, s.Node.Close(ctx))
	}
	return err
}

// stopKubelet ends the kubelet and its API server, or the deputy.
func (s *Stage) stopKubelet(ctx context.Context) error {
	var errs []error
	if s.Deputy != nil {
		errs = append(errs, s.Deputy.Stop(ctx))
	}
	if s.Kubelet != nil {
		errs = append(errs, s.Kubelet.Stop(ctx))
	}
	if s.alone != nil {
		errs = append(errs, s.alone.Close())
	}
	if s.Plane != nil {
		errs = append(errs, s.Plane.Close(ctx))
	}
	return errors.Join(errs...)
}

// occupy takes what a filesystem has in use from the beginning, besides images. What
// it already takes for itself is part of that.
func occupy(ctx context.Context, path string, f scenario.Filesystem) error {
	if f.UsedInodes > 0 {
		if err := flood(ctx, filepath.Join(path, "used"), f.UsedInodes); err != nil {
			return fmt.Errorf("take inodes of filesystem %s: %w", f.Name, err)
		}
	}
	var st syscall.Statfs_t
	if err := syscall.Statfs(path, &st); err != nil {
		return fmt.Errorf("take %d bytes of filesystem %s: %w", f.UsedBytes, f.Name, err)
	}
	own := int64(st.Blocks-st.Bfree) * st.Bsize //nolint:gosec // of a small disk
	if f.UsedBytes <= own {
		return nil
	}
	if err := allocate(filepath.Join(path, "used-by-the-system"), f.UsedBytes-own); err != nil {
		return fmt.Errorf("take %d bytes of filesystem %s: %w", f.UsedBytes, f.Name, err)
	}
	return nil
}

// flood makes so many empty files below dir, until ctx ends: a disk may have millions.
func flood(ctx context.Context, dir string, files int64) error {
	for i := range files {
		if err := ctx.Err(); err != nil {
			return err
		}
		folder := filepath.Join(dir, fmt.Sprint(i/1000))
		if i%1000 == 0 {
			if err := os.MkdirAll(folder, 0o755); err != nil {
				return err
			}
		}
		f, err := os.Create(filepath.Join(folder, fmt.Sprint(i)))
		if err != nil {
			return err
		}
		if err := f.Close(); err != nil {
			return err
		}
	}
	return nil
}

// allocate makes a file of so many bytes without writing them (fallocate(2)).
func allocate(file string, bytes int64) error {
	f, err := os.OpenFile(file, os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(syscall.Fallocate(int(f.Fd()), 0, 0, bytes), f.Close())
}

// Fill takes all that is left of a filesystem, and keeps it.
func (s *Stage) Fill(filesystem string) error {
	path := s.Node.Disks[filesystem].Path()
	var st syscall.Statfs_t
	if err := syscall.Statfs(path, &st); err != nil {
		return fmt.Errorf("fill filesystem %s: %w", filesystem, err)
	}
	// As much as is left now: what comes free meanwhile is not taken again. A file needs
	// something besides its bytes, so pieces get smaller.
	left := int64(st.Bavail) * st.Bsize //nolint:gosec // of a small disk
	for piece, i := left, 0; piece >= st.Bsize && left >= st.Bsize; i++ {
		file := filepath.Join(path, fmt.Sprintf("full-%d", i))
		err := allocate(file, min(piece, left))
		switch {
		case err == nil:
			left -= min(piece, left)
		case errors.Is(err, syscall.ENOSPC):
			piece /= 2
			if err := os.Remove(file); err != nil && !errors.Is(err, os.ErrNotExist) {
				return fmt.Errorf("fill filesystem %s: %w", filesystem, err)
			}
		default:
			return fmt.Errorf("fill filesystem %s: %w", filesystem, err)
		}
	}
	return nil
}

// Layout is what a scenario's layout is called.
func Layout(l scenario.Layout) string {
	switch {
	case l.ImageFS == l.NodeFS && l.ContainerFS == l.NodeFS:
		return string(engine.Single)
	case l.ContainerFS == l.ImageFS:
		return string(engine.Dedicated)
	case l.ContainerFS == l.NodeFS:
		return string(engine.Split)
	default:
		return string(engine.Separate)
	}
}
