package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	stats "k8s.io/kubelet/pkg/apis/stats/v1alpha1"

	"github.com/cleave-cri/cleave/agent/crio"
	"github.com/cleave-cri/cleave/agent/kubeletapi"
	"github.com/cleave-cri/cleave/agent/page"
	"github.com/cleave-cri/cleave/agent/rootbind"
	"github.com/cleave-cri/cleave/config/kubelet"
	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/proxy"
	"github.com/cleave-cri/cleave/proxy/criocompat"
	"github.com/cleave-cri/cleave/proxy/criocompat/containers"
	"github.com/cleave-cri/cleave/proxy/criocompat/nriplugin"
	"github.com/cleave-cri/cleave/proxy/criocompat/podlabel"
	"github.com/cleave-cri/cleave/proxy/diskstats"
	"github.com/cleave-cri/cleave/proxy/unixsock"
	"github.com/cleave-cri/cleave/snapshot"
	"github.com/cleave-cri/cleave/web"
)

// crioMode is what mode crio has besides the rest: the look-alike of CRI-O, what the kubelet was told, and the plugin that names
// containers' cgroups.
type crioMode struct {
	endpoint *criocompat.Server
	keeper   *crio.Keeper
	plugin   *nriplugin.Plugin
	roots    *rootbind.Roots
	store    *snapshot.Store
	kept     *diskstats.Kept
	events   *nodeEvents
	log      *zap.Logger
}

// openCRIO makes the parts of mode crio. It starts nothing but the endpoint, which gets its connections from the proxy.
func (a *agent) openCRIO() (*crioMode, error) {
	// The folder is empty after a boot, as is what a kubelet keeps in mind.
	runtimeDir := filepath.Dir(a.cfg.Control.Endpoint.Path())
	if err := unixsock.EnsureFolder(a.cfg.Control.Endpoint.Path()); err != nil {
		return nil, err
	}
	roots, err := rootbind.Open(filepath.Join(runtimeDir, "roots"))
	if err != nil {
		return nil, err
	}
	store := snapshot.NewStore(a.upstream, a.cfg.Runtime.Namespace)
	registry := containers.New(runtimeapi.NewRuntimeServiceClient(a.upstream), containerRoots{store, roots})
	events := newNodeEvents(a.cfg.Listen.Endpoint.Path(), a.log.Named("events"))
	m := &crioMode{
		events: events, roots: roots, store: store, log: a.log.Named("crio"),
		keeper: crio.NewKeeper(filepath.Join(runtimeDir, "kubelet-told.json"), crio.Sources{
			Tell:     events.tell,
			Kubelet:  a.kubeletOf,
			Running:  runningKubelets(a.cfg.Listen.Endpoint.Path()),
			Disks:    a.observer.disks,
			Driver:   cgroupDriver(a.upstream),
			Mounted:  crio.Mounted,
			Summary:  summaryOf(kubeletapi.Client{TokenFile: a.cfg.CRIO.KubeletTokenFile}),
			Capacity: a.observer.capacity,
		}, a.log.Named("crio")),
		plugin: nriplugin.New(nriplugin.Config{
			Socket: a.cfg.CRIO.NRIEndpoint.Path(), Created: registry.Created, Log: a.log.Named("nri"),
		}),
	}
	m.endpoint = criocompat.New(criocompat.Config{Informer: m.keeper, Registry: registry, Log: m.log})
	m.kept = diskstats.Keep(told{observer: a.observer, keeper: m.keeper})
	return m, nil
}

// run keeps what mode crio has besides going until ctx ends.
func (m *crioMode) run(ctx context.Context) error {
	parts, ctx := errgroup.WithContext(ctx)
	parts.Go(func() error { return m.plugin.Run(ctx) })
	parts.Go(func() error { m.keeper.Watch(ctx); return nil })
	parts.Go(func() error { m.tidyRoots(ctx); return nil })
	parts.Go(func() error { m.events.run(ctx); return nil })
	return parts.Wait()
}

// close ends the endpoint, once the proxy gives it no more connections, and lets go of the containers' roots; they stay.
func (m *crioMode) close(ctx context.Context) error {
	return errors.Join(m.endpoint.Shutdown(ctx), m.roots.Close())
}

// tidyPeriod is how often the roots of containers that are gone are taken away.
const tidyPeriod = 30 * time.Second

// tidyRoots takes away the roots of containers that containerd says are gone, now and then until ctx ends.
func (m *crioMode) tidyRoots(ctx context.Context) {
	tick := time.NewTicker(tidyPeriod)
	defer tick.Stop()
	failing := ""
	for {
		removed, err := m.roots.Tidy(func(id string) bool {
			_, err := m.store.ContainerFolders(ctx, id)
			return !errors.Is(err, snapshot.ErrGone) // whatever else it is, it may be there
		})
		if len(removed) > 0 {
			m.log.Info("roots of containers that are gone were taken away", zap.Strings("container_ids", removed))
		}
		text := ""
		if err != nil {
			text = err.Error()
		}
		if text != failing && text != "" {
			m.log.Warn("a container's root can't be taken away", zap.Error(err))
		}
		failing = text
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// disks says where things lie by the newest picture.
func (o *observer) disks() crio.Disks {
	p := o.newest.Load()
	missing := false
	at := func(role fsstats.Role) (crio.Disk, bool) {
		place, ok := p.layout.Get(role)
		missing = missing || place.Missing && role != fsstats.NodeFS // the kubelet makes its own
		return crio.Disk{Mountpoint: place.Reported, Device: place.Filesystem.Device.String()}, ok
	}
	images, okImages := at(fsstats.ImageFS)
	containers, okContainers := at(fsstats.ContainerFS)
	node, okNode := at(fsstats.NodeFS)
	return crio.Disks{
		Known:   okImages && okContainers && okNode && !p.facts.Images.Guessed && !p.facts.Containers.Guessed,
		Missing: missing, Images: images, Containers: containers, NodeDevice: node.Device,
	}
}

// capacity is that of the filesystem with this device in the newest picture, in bytes.
func (o *observer) capacity(device string) (uint64, bool) {
	for _, place := range o.newest.Load().layout.Places {
		if place.Filesystem.Device.String() == device {
			return place.Filesystem.CapacityBytes, true
		}
	}
	return 0, false
}

// summaryOf reads what a kubelet reports of the runtime's disks.
func summaryOf(client kubeletapi.Client) func(context.Context, int32) (crio.Figures, error) {
	return func(ctx context.Context, pid int32) (crio.Figures, error) {
		settings, err := kubelet.Reader{}.Read(int(pid))
		if err != nil {
			return crio.Figures{}, fmt.Errorf("%w: %w", crio.ErrNotAllowed, err)
		}
		summary, err := client.Summary(ctx, settings)
		if err != nil {
			return crio.Figures{}, unseen(err)
		}
		return capacitiesOf(summary.Node.Runtime), nil
	}
}

func capacitiesOf(r *stats.RuntimeStats) (f crio.Figures) {
	if r == nil {
		return f
	}
	f.ImagesBytes, f.ContainersBytes = capacityOf(r.ImageFs), capacityOf(r.ContainerFs)
	if a, b := r.ImageFs, r.ContainerFs; a != nil && b != nil {
		f.Alike = alike(a.AvailableBytes, b.AvailableBytes) && alike(a.UsedBytes, b.UsedBytes) && alike(a.InodesFree, b.InodesFree) &&
			a.UsedBytes != nil && *a.UsedBytes > 0
	}
	return f
}

// alike says that two figures are the same, or both unknown.
func alike(a, b *uint64) bool { return a == b || a != nil && b != nil && *a == *b }

// unseen tells a summary that can't be seen, of which nothing is concluded, from one that the kubelet can't make.
func unseen(err error) error {
	switch {
	case errors.Is(err, kubeletapi.ErrNotAllowed), errors.Is(err, kubeletapi.ErrNoCredentials):
		return fmt.Errorf("%w: %w: name a token that may get nodes/stats, in crio.kubeletTokenFile", crio.ErrNotAllowed, err)
	case errors.Is(err, kubeletapi.ErrNoServer):
		return fmt.Errorf("%w: %w", crio.ErrNotAllowed, err)
	}
	return err
}

func capacityOf(fs *stats.FsStats) uint64 {
	if fs == nil || fs.CapacityBytes == nil {
		return 0
	}
	return *fs.CapacityBytes
}

// containerRoots finds the folder in which "diff" is a container's writable layer, or makes it.
type containerRoots struct {
	store *snapshot.Store
	roots *rootbind.Roots
}

var _ containers.Roots = containerRoots{}

// Root implements [containers.Roots].
func (r containerRoots) Root(ctx context.Context, containerID string) (string, error) {
	folders, err := r.store.ContainerFolders(ctx, containerID)
	if errors.Is(err, snapshot.ErrGone) {
		return "", criocompat.ErrUnknown
	}
	if err != nil {
		return "", err
	}
	// The split snapshotter names it so (KSS-10).
	if filepath.Base(folders.Upper) == "diff" {
		return filepath.Dir(folders.Upper), nil
	}
	if folders.Upper == "" {
		return "", fmt.Errorf("the snapshotter does not say in which folder the writable layer of container %s is", containerID)
	}
	return r.roots.Bind(containerID, folders.Upper)
}

// kubeletOf reads who a process is that asks for the node's disks.
func (a *agent) kubeletOf(ctx context.Context, pid int32) (crio.Kubelet, error) {
	return whoAsks(ctx, kubelet.Reader{}, a.cfg.Listen.Endpoint.Path(), pid, func(path string) (string, error) {
		fs, err := fsstats.NewProber().FilesystemOf(path)
		return fs.Device.String(), err
	})
}

// whoAsks tells the kubelet from others that look for CRI-O: every cAdvisor does, that of a monitoring pod as well as that of a
// kubelet with another runtime. Only a kubelet of ours is asked for its version, which means that its program is run. deviceOf says on
// which filesystem a path is.
func whoAsks(ctx context.Context, reader kubelet.Reader, listen string, pid int32, deviceOf func(path string) (string, error)) (crio.Kubelet, error) {
	settings, err := reader.Read(int(pid))
	switch {
	case err == nil && isRuntimeOf(settings, listen):
		k := crioKubelet(versioned(ctx, reader, settings))
		var around kubelet.Facts
		reader.Surroundings(ctx, settings.PID, &around)
		if around.SameMounts == nil {
			return k, nil
		}
		k.OtherMounts = !*around.SameMounts
		// Its nodefs is where its root directory is (OBS-3), whatever cleave's configuration says.
		if device, err := deviceOf(settings.RootDir.Value); err == nil && !k.OtherMounts {
			k.NodeDevice = device
		}
		return k, nil
	case err == nil:
		return crio.Kubelet{}, fmt.Errorf("%w: %s, process %d, has the runtime %q", crio.ErrStranger, reader.NameOf(int(pid)), pid, settings.RuntimeEndpoint.Value)
	case pid == 0:
		return crio.Kubelet{Unread: true}, errors.New("it is in another PID namespace than cleave")
	case reader.NameOf(int(pid)) == "kubelet", errors.Is(err, kubelet.ErrEmbedded):
		return unread(reader, int(pid)), err
	}
	return crio.Kubelet{}, fmt.Errorf("%w: %w", crio.ErrStranger, err)
}

// unread is a kubelet whose settings can't be read.
func unread(reader kubelet.Reader, pid int) crio.Kubelet {
	ticks, err := reader.Started(pid)
	if err != nil {
		ticks = 0 // it has ended: no process started then
	}
	return crio.Kubelet{PID: int32(pid), StartTicks: ticks, Unread: true} //nolint:gosec // the kernel's numbers end at 2^22
}

// isRuntimeOf says whether a kubelet's runtime is cleave on a socket. Its file may have another path for the kubelet, but then the
// name's end is what makes the kubelet ask there (KSS-1).
func isRuntimeOf(s kubelet.Settings, listen string) bool {
	endpoint := s.RuntimeEndpoint.Value
	return strings.HasSuffix(endpoint, strings.TrimPrefix(criocompat.Socket, "/var/")) || slices.Contains(sameSocket(listen), kubelet.SocketPath(endpoint))
}

// versioned asks a kubelet's program for its version if that is not known otherwise. Where it can't be asked it stays unknown.
func versioned(ctx context.Context, reader kubelet.Reader, s kubelet.Settings) kubelet.Settings {
	if s.Version.Known() {
		return s
	}
	if v, err := reader.AskVersion(ctx, s); err == nil {
		s.Version = v
	}
	return s
}

// runningKubelets lists the kubelets whose runtime is cleave on a socket, and those whose settings can't be read. It is for one caller at a time: a kubelet's settings and
// version, which its whole program has to be opened for, are read once in its life.
func runningKubelets(listen string) func(context.Context) ([]crio.Kubelet, error) {
	type seen struct {
		ticks uint64
		is    crio.Kubelet
		ours  bool
	}
	known := map[int]seen{}
	return func(ctx context.Context) ([]crio.Kubelet, error) {
		reader := kubelet.Reader{}
		pids, err := reader.Named(ctx, "kubelet")
		if err != nil {
			return nil, err
		}
		now := map[int]seen{}
		var ours []crio.Kubelet
		for _, pid := range pids {
			ticks, err := reader.Started(pid)
			if err != nil {
				continue // it has ended
			}
			k, ok := known[pid]
			if !ok || k.ticks != ticks {
				settings, err := reader.Read(pid)
				if err != nil {
					ours = append(ours, unread(reader, pid))
					continue
				}
				settings = versioned(ctx, reader, settings)
				k = seen{settings.StartTicks, crioKubelet(settings), isRuntimeOf(settings, listen)}
			}
			now[pid] = k
			if k.ours {
				ours = append(ours, k.is)
			}
		}
		known = now
		return ours, nil
	}
}

// sameSocket are the usual names of a socket: /var/run is a link to /run.
func sameSocket(path string) []string {
	short := strings.TrimPrefix(path, "/var")
	return []string{short, "/var" + short}
}

// crioKubelet says what may be told to a kubelet with these settings.
func crioKubelet(s kubelet.Settings) crio.Kubelet {
	k := crio.Kubelet{PID: int32(s.PID), StartTicks: s.StartTicks, Version: s.Version.Text} //nolint:gosec // the kernel's numbers end at 2^22
	k.StatsFromCRI, _ = s.Gate(kubelet.GateStatsFromCRI)
	separateGC, known := s.Gate(kubelet.GateSeparateDiskGC)
	k.Refused = refusal(s.Version, k.StatsFromCRI, separateGC || !known)
	return k
}

// refusal says why no split may be reported to a kubelet, empty if it may. docs/compatibility.md is the proof for the versions.
func refusal(v kubelet.Version, statsFromCRI, separateGC bool) string {
	switch {
	case statsFromCRI:
		return "its feature gate " + kubelet.GateStatsFromCRI + " is on, with which it measures as if there were one disk: switch the gate off, or use mode cri"
	case !separateGC:
		return "its feature gate " + kubelet.GateSeparateDiskGC + " is off, with which it evicts nothing on two disks (LAY-14): switch the gate on, or use mode cri"
	case !v.Known():
		return "its version is not known, and an old one would act on the wrong disk: use mode cri"
	case !v.ProvedWithCRIO():
		return fmt.Sprintf("its version %s is none that this cleave is proved with (%s): use mode cri, or another version", v, kubelet.ProvedRange())
	}
	return ""
}

// driverPause is the pause before the runtime is asked again that broke off.
const driverPause = 100 * time.Millisecond

// cgroupDriver asks the runtime how it makes cgroups, until it has said so once. A runtime that is away, hangs or is restarted meanwhile
// has until ctx ends: the kubelet that waits for the answer never asks again (KSS-18).
func cgroupDriver(conn grpc.ClientConnInterface) func(context.Context) (criocompat.Driver, error) {
	var known atomic.Pointer[criocompat.Driver]
	return func(ctx context.Context) (criocompat.Driver, error) {
		if d := known.Load(); d != nil {
			return *d, nil
		}
		answer, err := runtimeapi.NewRuntimeServiceClient(conn).RuntimeConfig(ctx, &runtimeapi.RuntimeConfigRequest{}, grpc.WaitForReady(true))
		for status.Code(err) == codes.Unavailable && sleep(ctx, driverPause, nil) {
			answer, err = runtimeapi.NewRuntimeServiceClient(conn).RuntimeConfig(ctx, &runtimeapi.RuntimeConfigRequest{}, grpc.WaitForReady(true))
		}
		if err != nil {
			return "", err
		}
		driver := criocompat.Cgroupfs
		if answer.GetLinux().GetCgroupDriver() == runtimeapi.CgroupDriver_SYSTEMD {
			driver = criocompat.Systemd
		}
		known.Store(&driver)
		return driver, nil
	}
}

// threeDisks says why mode crio can't work with a layout, empty if it can: the kubelet would act on the wrong disk (LAY-13).
func threeDisks(layout fsstats.Layout) string {
	if layout.Kind() != fsstats.LayoutSeparate {
		return ""
	}
	at := func(role fsstats.Role) string {
		place, _ := layout.Get(role)
		return fmt.Sprintf("%s (device %s)", place.Reported, place.Filesystem.Device)
	}
	return fmt.Sprintf("images on %s, writable layers on %s and the kubelet's files on %s are on three disks, and a kubelet knows two",
		at(fsstats.ImageFS), at(fsstats.ContainerFS), at(fsstats.NodeFS))
}

const threeDisksRemedy = "put writable layers on the disk of the kubelet's root directory, or use mode cri"

// told are the facts for a kubelet in mode crio: the disks under the names that it can measure.
type told struct {
	observer *observer
	keeper   *crio.Keeper
}

var _ diskstats.Source = told{}

// Facts implements [diskstats.Source].
func (t told) Facts() *diskstats.Facts {
	facts, now := t.observer.Facts(), t.observer.disks()
	images, containers, _ := t.keeper.Named(now)
	if images == now.Images && containers == now.Containers {
		return facts
	}
	changed := *facts
	changed.Images.Guessed, changed.Containers.Guessed = false, false
	if containers.Device == images.Device {
		changed.Containers = changed.Images
	}
	changed.Images.Mountpoint, changed.Images.Device = images.Mountpoint, images.Device
	changed.Containers.Mountpoint, changed.Containers.Device = containers.Mountpoint, containers.Device
	return &changed
}

// Wanted implements [diskstats.Source].
func (t told) Wanted() { t.observer.Wanted() }

// configure gives the proxy what mode crio has besides.
func (m *crioMode) configure(c *proxy.Config) {
	c.Admit = m.endpoint.Admit
	c.Interceptors[runtimeapi.ImageService_ImageFsInfo_FullMethodName] = m.kept.Rewrite
	c.Fallbacks = map[string]proxy.AnswerFunc{runtimeapi.ImageService_ImageFsInfo_FullMethodName: m.kept.Fallback}
	c.Interceptors[runtimeapi.RuntimeService_Status_FullMethodName] = m.plugin.RuntimeStatus
	c.Requests = map[string]proxy.RequestFunc{}
	for method, fn := range podlabel.Requests() {
		c.Requests[method] = fn
	}
	for method, fn := range podlabel.Answers() {
		if before := c.Interceptors[method]; before != nil {
			fn = proxy.Chain(before, fn)
		}
		c.Interceptors[method] = fn
	}
	// Without the plugin a container would never be measured by the kubelet (KSS-6).
	c.Gates = map[string]proxy.GateFunc{
		runtimeapi.RuntimeService_CreateContainer_FullMethodName: m.plugin.Wait,
		runtimeapi.RuntimeService_RestorePod_FullMethodName:      m.plugin.Wait,
	}
}

// CRIOStatus is how mode crio is: what the kubelet was told, and whether it measures containers.
type CRIOStatus struct {
	Kubelet  crio.Status       `json:"kubelet"`
	Endpoint criocompat.Status `json:"endpoint"`
	Plugin   nriplugin.Status  `json:"plugin"`
	// Unmeasured are the containers that the kubelet can't measure until they are created anew.
	Unmeasured []nriplugin.Container `json:"unmeasured,omitempty"`
	// Problems are all that keeps the kubelet from seeing the disks as they are, each with what to do.
	Problems []string `json:"problems,omitempty"`
}

func (m *crioMode) status(now crio.Disks, p *picture) *CRIOStatus {
	_, _, younger := m.keeper.Named(now)
	s := &CRIOStatus{
		Kubelet: m.keeper.Status(), Endpoint: m.endpoint.Status(), Plugin: m.plugin.Status(),
		Unmeasured: m.plugin.Unmeasured(p.readAt, func(id string) bool { _, ok := p.facts.Layers[id]; return ok }),
	}
	s.Problems = append(slices.Clone(s.Kubelet.Problems), younger...)
	if !s.Plugin.Registered {
		s.Problems = append(s.Problems, "containerd does not ask cleave's NRI plugin, so no container can be created: "+s.Plugin.Reason)
	}
	return s
}

// values are for the metrics.
func (s *CRIOStatus) values() *web.Kubelet {
	v := &web.Kubelet{Problems: len(s.Problems), Unmeasured: len(s.Unmeasured)}
	if t := s.Kubelet.Told; t != nil {
		v.Split = t.Split
	}
	if seen := s.Kubelet.Summary; seen != nil && seen.Unknown == "" {
		right := seen.Wrong == ""
		v.SummaryRight = &right
	}
	return v
}

// unmeasuredShown is how many containers are named one by one on a page.
const unmeasuredShown = 5

func (s *CRIOStatus) writeText(out *page.Writer) {
	switch t := s.Kubelet.Told; {
	case t == nil:
		out.Printf("No kubelet has asked for the disks yet.\n")
	case t.Split:
		out.Printf("The kubelet (pid %d, %s) was told of two disks: images on %s, containers on %s.\n",
			t.Kubelet.PID, cmp.Or(t.Kubelet.Version, "unknown version"), t.Images.Mountpoint, t.Containers.Mountpoint)
	default:
		out.Printf("The kubelet (pid %d, %s) was told of one disk: %s.\n", t.Kubelet.PID, cmp.Or(t.Kubelet.Version, "unknown version"), t.Images.Mountpoint)
	}
	if seen := s.Kubelet.Summary; seen != nil {
		switch {
		case seen.Unknown != "":
			out.Printf("Whether its summary has them is not known: %s\n", seen.Unknown)
		case seen.RightAt != nil && seen.Wrong == "":
			out.Printf("Its summary has them as they are.\n")
		default:
			out.Printf("Its summary does not have them as they are: %s\n", seen.Wrong)
		}
	}
	for _, p := range s.Problems {
		out.Printf("! Kubelet: %s\n", p)
	}
	if n := len(s.Unmeasured); n > 0 {
		out.Printf("! %d containers are not measured by the kubelet until they are created anew:\n", n)
		for _, c := range s.Unmeasured[:min(n, unmeasuredShown)] {
			out.Printf("    %s of pod %s/%s\n", c.Name, c.Namespace, c.Pod)
		}
		if n > unmeasuredShown {
			out.Printf("    and %d more (--output json has all)\n", n-unmeasuredShown)
		}
	}
}
