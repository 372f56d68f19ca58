package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"

	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/agent/kubeletapi"
	"github.com/cleave-cri/cleave/agent/upstream"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/config/kubelet"
	"github.com/cleave-cri/cleave/doctor"
	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/proxy/criocompat"
	"github.com/cleave-cri/cleave/proxy/criocompat/nriplugin"
	"github.com/cleave-cri/cleave/proxy/unixsock"
	"github.com/cleave-cri/cleave/snapshot"
)

// Examine runs all checks of `cleave doctor` for a configuration. Nothing on
// the node is changed, and no running cleave is needed.
func Examine(ctx context.Context, cfg config.Config) ([]doctor.Result, error) {
	conn, err := upstream.Connect(cfg.Runtime.Endpoint.Path(), upstream.Plain(cfg.Runtime.Endpoint.Path()))
	if err != nil {
		return nil, err
	}
	runtime, own, control := cfg.Runtime.Endpoint.Path(), cfg.Listen.Endpoint.Path(), cfg.Control.Endpoint.Path()
	results := doctor.Run(ctx, []doctor.Check{
		{Name: "root", Run: checkRoot},
		unixsock.CheckAnswers("runtime socket", "the container runtime", runtime, "start it, or set runtime.endpoint", doctor.Fail),
	})
	store := snapshot.NewStore(conn, cfg.Runtime.Namespace).ReadOnce()
	var checks []doctor.Check
	// What the runtime would have to tell is not asked if it does not answer.
	if results[len(results)-1].Level == doctor.Pass {
		checks = append(checks, store.Checks()...)
	}
	checks = append(checks,
		unixsock.CheckAnswers("cleave socket", "cleave", own, "start `cleave serve`", doctor.Warn),
		unixsock.CheckAnswers("control socket", "cleave", control, "start `cleave serve`", doctor.Warn),
		unixsock.CheckSameAccess("socket access", own, runtime),
		doctor.Check{Name: "cleave to runtime", Run: func(ctx context.Context) doctor.Result { return checkThrough(ctx, own) }},
	)
	o, err := newObserver(cfg, observed{store: store, filesystems: fsstats.NewProber(), mountpoints: mountpoints(conn)}, zap.NewNop())
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	var split *SnapshotterStatus
	if cfg.Snapshotter.Enabled() {
		split = snapshotterStatus(ctx, cfg.Snapshotter.StatusEndpoint)
		checks = append(checks, doctor.Check{Name: "split snapshotter", Run: func(context.Context) doctor.Result { return judgeSnapshotter(split) }})
	}
	checks = append(checks, doctor.Check{Name: "layout", Run: func(ctx context.Context) doctor.Result {
		if split != nil && len(split.Away) > 0 {
			return judgeAway(split.Away[0])
		}
		return checkLayout(ctx, cfg.Mode, control, o)
	}})
	if cfg.Mode == config.ModeCRIO {
		checks = append(checks, nriplugin.CheckEnabled(cfg.CRIO.NRIEndpoint.Path()), criocompat.CheckReached(own))
	}
	results = append(results, doctor.Run(ctx, checks)...)
	results = append(results, examineKubelet(ctx, cfg, kubelet.Reader{}, o)...)
	return results, conn.Close()
}

// examineKubelet checks the node's kubelet, if there is one.
func examineKubelet(ctx context.Context, cfg config.Config, reader kubelet.Reader, o *observer) []doctor.Result {
	// A check that hangs is left behind, so what it found comes over a channel.
	found := make(chan []doctor.Check, 1)
	results := doctor.Run(ctx, []doctor.Check{{Name: "kubelet", Run: func(ctx context.Context) doctor.Result {
		s, err := reader.Find(ctx, kubelet.Choice{Endpoints: []string{cfg.Listen.Endpoint.Path(), crioEndpoint}})
		if err == nil {
			s = versioned(ctx, reader, s)
			checks := append(kubelet.Checks(s, kubeletFacts(ctx, cfg, reader, s, o)), rightsChecks(cfg.Reclaim.Kubeconfig, s)...)
			found <- append(checks, pageCheck(kubeletapi.Client{TokenFile: cfg.CRIO.KubeletTokenFile}, s))
		}
		return kubelet.Found(s, err)
	}}})
	select {
	case checks := <-found:
		results = append(results, doctor.Run(ctx, checks)...)
	default:
	}
	return results
}

// pageCheck is whether the kubelet says which pods it has. Most don't allow it to their own identity, and little is lost then.
func pageCheck(client kubeletapi.Client, s kubelet.Settings) doctor.Check {
	return doctor.Check{Name: "pods of the kubelet", Run: func(ctx context.Context) doctor.Result {
		const lost = "pods are known from the API server alone, and from 5 minutes after that is away nobody is ranked"
		switch _, err := client.Pods(ctx, s); {
		case err == nil:
			return doctor.Passed("the kubelet says which pods it has, also while the API server is away")
		case errors.Is(err, kubeletapi.ErrNotAllowed), errors.Is(err, kubeletapi.ErrNoCredentials), errors.Is(err, kubeletapi.ErrNoServer):
			return doctor.Passed("the kubelet is not asked for its pods: %v; %s. A token that may get nodes/pods (crio.kubeletTokenFile) changes that", err, lost)
		default:
			return doctor.Warned(fmt.Sprintf("ask the kubelet for its pods: %v; %s", err, lost), "look whether the kubelet answers on its own port")
		}
	}}
}

// crioEndpoint is cleave's socket in mode crio.
const crioEndpoint = "/run/crio/crio.sock"

// kubeletFacts looks at what is around a kubelet.
func kubeletFacts(ctx context.Context, cfg config.Config, reader kubelet.Reader, s kubelet.Settings, o *observer) kubelet.Facts {
	f := kubelet.Facts{Mode: string(cfg.Mode), Socket: cfg.Listen.Endpoint.Path(), Kubeadm: kubelet.UsesKubeadm("/")}
	if cfg.Mode == config.ModeCRIO {
		f.Socket = crioEndpoint
	}
	reader.Surroundings(ctx, s.PID, &f)
	for _, path := range kubelet.KubeadmSockets() {
		if owner, answers := ownerOf(ctx, reader, path); answers {
			f.Sockets = append(f.Sockets, kubelet.Socket{Path: path, Owner: owner})
		}
	}
	// Paths of a kubelet with other mounts mean something else here.
	if f.SameMounts != nil && *f.SameMounts {
		prober := fsstats.NewProber()
		f.NodeFS, f.Logs = diskAt(prober, s.RootDir.Value), diskAt(prober, s.PodLogsDir.Value)
		if layout, _, err := layoutNow(ctx, cfg.Control.Endpoint.Path(), o); err == nil {
			if place, ok := layout.Get(fsstats.ImageFS); ok && !place.Missing {
				f.ImageFS = diskOf(place.Filesystem)
			}
		}
	}
	const containerdRoot = "/var/lib/containerd"
	models := [][2]string{{cfg.Listen.Endpoint.Path(), cfg.Runtime.Endpoint.Path()}}
	if cfg.Snapshotter.Enabled() {
		models = append(models, [2]string{cfg.Snapshotter.ImageRoot, containerdRoot}, [2]string{cfg.Snapshotter.ContainerRoot, containerdRoot})
	}
	f.SELinux = kubelet.LookSELinux("/sys/fs/selinux", models)
	return f
}

// ownerOf says whether somebody answers on a socket, and what its program is
// called, if the kernel tells it.
func ownerOf(ctx context.Context, reader kubelet.Reader, path string) (owner string, answers bool) {
	if alive, err := unixsock.Alive(path); err != nil || !alive {
		return "", false
	}
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
	if err != nil {
		return "", true // it answered a moment ago
	}
	defer conn.Close() //nolint:errcheck // nothing was sent
	unix, ok := conn.(*net.UnixConn)
	if !ok {
		return "", true
	}
	peer, err := unixsock.PeerOf(unix)
	if err != nil || peer.PID <= 0 {
		return "", true
	}
	return reader.NameOf(int(peer.PID)), true
}

// diskAt is the filesystem that a path is on, or nil if that is not known.
func diskAt(prober *fsstats.Prober, path string) *kubelet.Disk {
	fs, err := prober.FilesystemOf(path)
	if err != nil {
		return nil
	}
	return diskOf(fs)
}

func diskOf(fs fsstats.Filesystem) *kubelet.Disk {
	d := &kubelet.Disk{Device: fs.Device.String(), CapacityBytes: fs.CapacityBytes, AttainableBytes: fs.CapacityBytes, Inodes: fs.InodesTotal}
	if fs.FreeBytes > fs.AvailableBytes {
		d.AttainableBytes -= min(d.AttainableBytes, fs.FreeBytes-fs.AvailableBytes)
	}
	return d
}

func checkRoot(context.Context) doctor.Result {
	if os.Geteuid() != 0 {
		return doctor.Failed("not root: most of what follows can't be looked at", "run `cleave doctor` as root")
	}
	return doctor.Passed("running as root")
}

// checkThrough calls the runtime by way of cleave's own socket.
func checkThrough(ctx context.Context, socket string) doctor.Result {
	conn, err := upstream.Connect(socket, upstream.Plain(socket))
	if err != nil {
		return doctor.Failed(err.Error(), "start `cleave serve`")
	}
	s := runtimeStatus(ctx, conn, socket)
	if err := conn.Close(); err != nil {
		return doctor.Failed(err.Error(), "start `cleave serve`")
	}
	if s.Error != "" {
		return doctor.Warned("the runtime does not answer through cleave: "+s.Error, "start `cleave serve` and the runtime")
	}
	return doctor.Passed("%s %s answers through cleave", s.Name, s.Version)
}

// checkLayout judges how the node's filesystems are shared.
func checkLayout(ctx context.Context, mode config.Mode, control string, o *observer) doctor.Result {
	layout, problem, err := layoutNow(ctx, control, o)
	switch {
	case errors.Is(err, errNotSaid):
		return doctor.Warned("the layout is not known: "+err.Error(), "start the runtime, or set filesystems.imagefs in the configuration")
	case errors.Is(err, errPaths):
		return doctor.Failed(err.Error(), "correct the paths under filesystems in the configuration")
	case err != nil:
		return doctor.Failed(err.Error(), "look at the log of `cleave serve`")
	}
	if reason := threeDisks(layout); reason != "" && mode == config.ModeCRIO {
		return doctor.Failed("mode crio can't work here: "+reason, threeDisksRemedy)
	}
	return judgeLayout(layout, problem)
}

// errPaths says that the paths of the configuration can't be looked at.
var errPaths = errors.New("look at the configured paths")

// layoutNow takes the layout from the cleave that runs; without one it finds it out by an observer of its own.
func layoutNow(ctx context.Context, control string, o *observer) (layout fsstats.Layout, problem string, err error) {
	status, err := FetchStatus(ctx, control)
	if err == nil {
		return fsstats.Layout{Places: status.Roles}, status.Problem, nil
	}
	if !errors.Is(err, ErrNotRunning) {
		return fsstats.Layout{}, "", err
	}
	layout, err = o.locate(ctx)
	if err != nil && !errors.Is(err, errNotSaid) {
		err = fmt.Errorf("%w: %w", errPaths, err)
	}
	return layout, "", err
}

func judgeSnapshotter(s *SnapshotterStatus) doctor.Result {
	if len(s.Problems) == 0 {
		return doctor.Passed("its roots are the right ones, containerd is recognised")
	}
	return doctor.Failed(strings.Join(s.Problems, "; "), "`cleave snapshotter status` says more")
}

// judgeAway is the judgement of a layout of which a root is away.
func judgeAway(away RootAway) doctor.Result {
	return doctor.Failed(fmt.Sprintf("it can't be told while a root of the split snapshotter is away: %s: %s", away.Path, away.Reason), away.Remedy)
}

func judgeLayout(layout fsstats.Layout, problem string) doctor.Result {
	kind := layout.Kind()
	var places, notes []string
	for _, p := range layout.Places {
		places = append(places, fmt.Sprintf("%s on %s", p.Role, p.Filesystem.Device))
		if p.Note != "" {
			notes = append(notes, fmt.Sprintf("%s: %s", p.Role, p.Note))
		}
	}
	if problem != "" {
		notes = append(notes, problem)
	}
	switch {
	case kind == fsstats.LayoutUnknown:
		return doctor.Failed("the filesystem of a role is not known", "correct the paths under filesystems in the configuration")
	case len(notes) > 0:
		return doctor.Warned(fmt.Sprintf("%s (%s); %s", kind, strings.Join(places, ", "), strings.Join(notes, "; ")),
			"correct the paths under filesystems in the configuration, or make the missing folders")
	default:
		return doctor.Passed("%s (%s)", kind, strings.Join(places, ", "))
	}
}
