// Package nriplugin is the plugin by which containerd gives containers the
// cgroup names that the kubelet's cAdvisor takes for CRI-O's (KSS-6, KSS-7). It
// answers NRI's CreateContainer and nothing else, stays connected, and knows
// which containers were made without it. Only agent and cmd may import it.
package nriplugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/nri/pkg/api"
	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/doctor"
	"github.com/cleave-cri/cleave/proxy/criocompat"
	"github.com/cleave-cri/cleave/proxy/unixsock"
)

// DefaultSocket is where containerd listens for plugins unless it is configured
// otherwise (NRI, pkg/api: DefaultSocketPath).
const DefaultSocket = api.DefaultSocketPath

// Errors that callers can tell apart.
var (
	// ErrDisabled says that nobody listens on NRI's socket: NRI is disabled in
	// containerd, or containerd does not run.
	ErrDisabled = errors.New("nobody listens on NRI's socket")
	// ErrNotRegistered says that containerd would create a container without
	// asking this plugin.
	ErrNotRegistered = errors.New("cleave's NRI plugin is not registered with containerd")
)

const (
	// pluginName and pluginIndex name the plugin; those with lower indices are
	// asked before it. It comes late so that it sees a cgroup that another one has
	// chosen: two that set the same thing make the creation of a container fail.
	pluginName  = "cleave"
	pluginIndex = "95"

	// settled is how long a registration has to last until the next attempt after
	// its end is made at once.
	settled = time.Second
	// pauseMin and pauseMax bound the pause before an attempt otherwise.
	pauseMin = 50 * time.Millisecond
	pauseMax = 500 * time.Millisecond

	// refusedKept bounds the containers that are remembered because their cgroups
	// could not be named.
	refusedKept = 1000

	// unseen is how long after the plugin has heard of it a container may not yet
	// be where others look: the runtime tells of it before it makes it.
	unseen = 2 * time.Minute
)

// Config is what a plugin needs.
type Config struct {
	// Socket is the path of NRI's socket; empty means [DefaultSocket].
	Socket string
	// Created, if set, is told of each container that gets a name, before
	// containerd knows the container itself. It must not block: containerd waits
	// for it, and drops the plugin after 2 s.
	Created func(containerID string)
	// Log takes the plugin's messages.
	Log *zap.Logger
}

// Plugin is a connection to containerd's NRI that is made again whenever it ends.
// Create it with [New] and run [Plugin.Run].
type Plugin struct {
	cfg  Config
	log  *zap.Logger
	dial func(ctx context.Context, path string) (net.Conn, error)

	mu sync.Mutex
	// changed is closed and replaced when state changes. Guarded by mu, as is all
	// that follows.
	changed chan struct{}
	state   state
	// driver is that of the last container that was seen.
	driver   criocompat.Driver
	nameless map[string]Container
	named    int64
	refused  int64
}

// state is whether containerd asks the plugin.
type state struct {
	registered bool
	since      time.Time
	// reason says why it is not registered.
	reason error
	// registrations counts them.
	registrations int64
	// runtime and version are the runtime's name and version as it told.
	runtime, version string
}

// Container is a container whose cgroup the kubelet's cAdvisor does not take.
type Container struct {
	ID        string `json:"id"`
	Name      string `json:"name"`
	Pod       string `json:"pod"`
	Namespace string `json:"namespace"`
	// CgroupsPath is the cgroup that it has.
	CgroupsPath string `json:"cgroupsPath"`
	// heardOf is when the runtime told of it.
	heardOf time.Time
}

// Status is what a plugin knows of itself.
type Status struct {
	Registered bool `json:"registered"`
	// Since is when it was registered or last ceased to be; zero before the first
	// time.
	Since time.Time `json:"since,omitzero"`
	// Reason says why it is not registered.
	Reason string `json:"reason,omitempty"`
	// Registrations counts them since the start: one, if nothing ever broke.
	Registrations int64 `json:"registrations"`
	// Runtime and RuntimeVersion are as the runtime told.
	Runtime        string `json:"runtime,omitempty"`
	RuntimeVersion string `json:"runtimeVersion,omitempty"`
	// Driver is how the runtime makes cgroups, empty before the first container.
	Driver criocompat.Driver `json:"cgroupDriver,omitempty"`
	// Named counts containers that were created with a name, Refused those whose cgroup had no
	// known form and was left as it was.
	Named   int64 `json:"named"`
	Refused int64 `json:"refused,omitempty"`
	// Unmeasured is how many containers the kubelet does not measure.
	Unmeasured int `json:"unmeasured"`
}

// New returns a plugin that is not connected yet.
func New(cfg Config) *Plugin {
	p := &Plugin{
		cfg: cfg,
		log: cfg.Log,
		dial: func(ctx context.Context, path string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		},
		changed:  make(chan struct{}),
		state:    state{reason: errors.New("it has not connected yet")},
		nameless: map[string]Container{},
	}
	p.cfg.Socket = cmp.Or(cfg.Socket, DefaultSocket)
	if p.log == nil {
		p.log = zap.NewNop()
	}
	return p
}

// Run keeps the plugin registered until ctx is done, and then returns nil. A
// connection that ends after it was good, because containerd found the plugin too
// slow or was restarted, is made again at once; while containerd is away it is
// tried about twice a second.
func (p *Plugin) Run(ctx context.Context) error {
	pause := time.Duration(0)
	for {
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			p.set(func(s *state) { s.registered, s.reason = false, errors.New("cleave is stopping") })
			return nil
		}
		lasted, err := p.connect(ctx)
		if ctx.Err() == nil {
			p.lost(err)
		}
		if lasted >= settled {
			pause = 0
		} else {
			pause = min(max(2*pause, pauseMin), pauseMax)
		}
	}
}

// connect makes one connection and serves it to its end. It returns how long the
// plugin was registered.
func (p *Plugin) connect(ctx context.Context) (lasted time.Duration, _ error) {
	conn, err := p.dial(ctx, p.cfg.Socket)
	if err != nil {
		return 0, dialError(p.cfg.Socket, err)
	}
	s := &session{
		plugin: p, registered: make(chan struct{}), closed: make(chan struct{}),
		pods: map[string]*api.PodSandbox{},
	}
	return s.run(ctx, conn)
}

func dialError(path string, err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ENOTSOCK) {
		return fmt.Errorf("connect to %s: %w: %w", path, ErrDisabled, err)
	}
	return fmt.Errorf("connect to %s: %w", path, err)
}

// lost notes that the plugin is not registered, and logs it when that is new.
func (p *Plugin) lost(err error) {
	was := p.set(func(s *state) {
		if s.registered {
			s.since = time.Now()
		}
		s.registered, s.reason = false, err
	})
	switch {
	case was.registered:
		p.log.Warn("the NRI plugin was disconnected; no container is created through cleave until it is back", zap.Error(err))
	case was.reason == nil || was.reason.Error() != err.Error():
		p.log.Warn("the NRI plugin is not registered; no container is created through cleave until it is", zap.Error(err))
	}
}

// set changes the state, wakes who waits for that, and returns the old one.
func (p *Plugin) set(change func(*state)) (was state) {
	p.mu.Lock()
	defer p.mu.Unlock()
	was = p.state
	change(&p.state)
	close(p.changed)
	p.changed = make(chan struct{})
	return was
}

// Registered reports whether containerd asks the plugin about each container that
// it creates.
func (p *Plugin) Registered() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.state.registered
}

// Wait returns nil as soon as the plugin is registered. When ctx is done before, it
// returns an error that is [ErrNotRegistered] and says why.
func (p *Plugin) Wait(ctx context.Context) error {
	for {
		p.mu.Lock()
		now, changed := p.state, p.changed
		p.mu.Unlock()
		if now.registered {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", ErrNotRegistered, now.reason)
		}
	}
}

// Status returns what the plugin knows of itself.
func (p *Plugin) Status() Status {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := Status{
		Registered:     p.state.registered,
		Since:          p.state.since,
		Registrations:  p.state.registrations,
		Runtime:        p.state.runtime,
		RuntimeVersion: p.state.version,
		Driver:         p.driver,
		Named:          p.named,
		Refused:        p.refused,
		Unmeasured:     len(p.nameless),
	}
	if !s.Registered {
		s.Reason = p.state.reason.Error()
	}
	return s
}

// Unmeasured returns, by namespace, pod and name, the containers that the kubelet
// does not measure until they are created anew: those made before cleave came or
// while the plugin was away, and those whose cgroup another plugin chose. exists
// says which there were when somebody looked, at the time asOf, zero if nobody has
// yet. Others are forgotten, unless they were heard of so shortly before, or after
// that, that they may not have been seen. It is not called with anything locked.
func (p *Plugin) Unmeasured(asOf time.Time, exists func(containerID string) bool) []Container {
	p.mu.Lock()
	all := make([]Container, 0, len(p.nameless))
	for _, c := range p.nameless {
		all = append(all, c)
	}
	p.mu.Unlock()
	var gone []string
	all = slices.DeleteFunc(all, func(c Container) bool {
		if asOf.Sub(c.heardOf) < unseen || exists(c.ID) {
			return false
		}
		gone = append(gone, c.ID)
		return true
	})
	p.mu.Lock()
	for _, id := range gone {
		delete(p.nameless, id)
	}
	p.mu.Unlock()
	slices.SortFunc(all, func(a, b Container) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Pod, b.Pod),
			cmp.Compare(a.Name, b.Name), cmp.Compare(a.ID, b.ID))
	})
	return all
}

// CheckEnabled is the check that containerd listens for NRI plugins on a socket.
// containerd logs that a plugin connected and said nothing.
func CheckEnabled(socket string) doctor.Check {
	const remedy = "set disable = false in section [plugins.'io.containerd.nri.v1.nri'] of containerd's configuration " +
		"(NRI is on by default since containerd 2.0) and restart containerd, or set the socket's path in cleave's; mode crio needs it"
	return doctor.Check{Name: "NRI enabled in containerd", Run: func(context.Context) doctor.Result {
		switch alive, err := unixsock.Alive(socket); {
		case err != nil:
			return doctor.Failed(err.Error(), remedy)
		case !alive:
			return doctor.Failed(fmt.Sprintf("%v: %s", ErrDisabled, socket), remedy)
		}
		return doctor.Passed("containerd takes NRI plugins on %s", socket)
	}}
}
