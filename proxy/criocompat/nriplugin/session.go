package nriplugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/net/multiplex"
	"github.com/containerd/nri/pkg/version"
	"github.com/containerd/ttrpc"
	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/cleave-cri/cleave/proxy/criocompat"
)

// serviceName is the ttrpc service of a plugin (NRI, pkg/api/api.proto).
const serviceName = "nri.pkg.api.v1alpha1.Plugin"

// session is one connection to containerd's NRI.
//
// It speaks the protocol with NRI's messages and connection multiplexer but not
// with NRI's stub: a stub whose connection ends between registration and
// configuration waits for the latter for ever, with its lock held (NRI 0.12.3,
// pkg/stub: Start), and it takes socket and name from the environment.
type session struct {
	plugin *Plugin
	// registered is closed when the runtime has told the plugin what there is,
	// after which it asks the plugin about every new container.
	registered chan struct{}
	// closed is closed when the connection has ended.
	closed chan struct{}

	mu sync.Mutex
	// pending are containers without a name and pods are all pods of a
	// synchronization, which may come in parts.
	pending []Container                // guarded by mu
	pods    map[string]*api.PodSandbox // guarded by mu
	driver  criocompat.Driver          // guarded by mu; that of the containers there are
	at      time.Time                  // guarded by mu; when it was registered
	name    string                     // guarded by mu; the runtime's
	version string                     // guarded by mu; the runtime's
}

// run registers the plugin over a connection and returns when that has ended,
// which it has when ctx is done.
func (s *session) run(ctx context.Context, conn net.Conn) (lasted time.Duration, err error) {
	mux := multiplex.Multiplex(conn)
	listener, err := mux.Listen(multiplex.PluginServiceConn)
	if err != nil {
		return 0, errors.Join(fmt.Errorf("share the connection to NRI: %w", err), mux.Close())
	}
	outward, err := mux.Open(multiplex.RuntimeServiceConn)
	if err != nil {
		return 0, errors.Join(fmt.Errorf("share the connection to NRI: %w", err), mux.Close())
	}
	server, err := ttrpc.NewServer()
	if err != nil {
		return 0, errors.Join(fmt.Errorf("serve NRI: %w", err), mux.Close())
	}
	server.RegisterService(serviceName, s.service())
	var served sync.WaitGroup
	served.Go(func() {
		_ = server.Serve(context.WithoutCancel(ctx), listener) //nolint:errcheck // ends with the connection or Close
	})
	client := ttrpc.NewClient(outward, ttrpc.WithOnClose(func() { close(s.closed) }))
	defer func() {
		// Whatever they say, the connection is over.
		_, _ = client.Close(), server.Close() //nolint:errcheck // see above
		_, _ = listener.Close(), mux.Close()  //nolint:errcheck // see above
		served.Wait()
		s.mu.Lock()
		defer s.mu.Unlock()
		if !s.at.IsZero() {
			lasted = time.Since(s.at)
		}
	}()

	// Configuration and synchronization belong to the registration and take no
	// longer, or something is wrong at the other end.
	begin, cancel := context.WithTimeout(ctx, api.DefaultPluginRegistrationTimeout)
	defer cancel()
	if _, err := api.NewRuntimeClient(client).RegisterPlugin(begin, &api.RegisterPluginRequest{
		PluginName: pluginName, PluginIdx: pluginIndex, NRIVersion: version.GetFromBuildInfo(),
	}); err != nil {
		return 0, fmt.Errorf("register with NRI: %w", err)
	}
	select {
	case <-s.registered:
	case <-s.closed:
		return 0, errors.New("containerd closed the connection before the plugin was registered; its log says why")
	case <-begin.Done():
		return 0, fmt.Errorf("wait to be registered with NRI: %w", begin.Err())
	}
	select {
	case <-s.closed:
		return 0, errors.New("the connection to NRI ended; containerd stopped, or found the plugin too slow")
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}

// service is what the runtime may call. What is not here is answered Unimplemented
// by ttrpc, and the runtime calls it only where a plugin asked for it.
func (s *session) service() *ttrpc.ServiceDesc {
	return &ttrpc.ServiceDesc{Methods: map[string]ttrpc.Method{
		"Configure":   method(s, s.configure, nil),
		"Synchronize": method(s, s.synchronize, nil),
		// An error would fail the container, so a container without a name it is.
		"CreateContainer": method(s, s.createContainer, &api.CreateContainerResponse{}),
		"Shutdown": method(s, func(*api.Empty) (*api.Empty, error) {
			return &api.Empty{}, nil // the end of the connection follows
		}, nil),
	}}
}

// method makes a ttrpc method of a function. A panic ends the call and nothing
// else; it is answered with broken, or with an error if that is nil.
func method[Req, Resp any](s *session, fn func(*Req) (*Resp, error), broken *Resp) ttrpc.Method {
	return func(_ context.Context, unmarshal func(any) error) (answer any, err error) {
		defer func() {
			if p := recover(); p != nil {
				s.plugin.log.Error("the NRI plugin broke on a request", zap.Any("panic", p), zap.Stack("stack"))
				if answer = broken; broken == nil {
					answer, err = nil, status.Errorf(codes.Internal, "cleave's NRI plugin broke: %v", p)
				}
			}
		}()
		req := new(Req)
		if err := unmarshal(req); err != nil {
			return nil, err
		}
		return fn(req)
	}
}

func (s *session) configure(req *api.ConfigureRequest) (*api.ConfigureResponse, error) {
	s.mu.Lock()
	s.name, s.version = req.GetRuntimeName(), req.GetRuntimeVersion()
	s.mu.Unlock()
	var events api.EventMask
	events.Set(api.Event_CREATE_CONTAINER)
	return &api.ConfigureResponse{Events: int32(events)}, nil
}

// synchronize takes what there is. The last part is the end of the registration:
// containerd holds up the creation of containers from before this call until it
// asks the plugin about them (internal/cri/server: BlockPluginSync).
func (s *session) synchronize(req *api.SynchronizeRequest) (*api.SynchronizeResponse, error) {
	s.mu.Lock()
	for _, pod := range req.GetPods() {
		s.pods[pod.GetId()] = pod
	}
	for _, c := range req.GetContainers() {
		cgroup := c.GetLinux().GetCgroupsPath()
		if cgroup != "" {
			s.driver = criocompat.DriverOf(cgroup)
		}
		if c.GetState() == api.ContainerState_CONTAINER_STOPPED || criocompat.Named(cgroup, c.GetId()) {
			continue
		}
		s.pending = append(s.pending, containerOf(s.pods[c.GetPodSandboxId()], c))
	}
	if req.GetMore() {
		s.mu.Unlock()
		return &api.SynchronizeResponse{More: true}, nil
	}
	nameless, name, runtimeVersion, driver := s.pending, s.name, s.version, s.driver
	s.pending = nil
	clear(s.pods)
	first := s.at.IsZero()
	if first {
		s.at = time.Now()
	}
	s.mu.Unlock()
	if first {
		s.plugin.begin(nameless, name, runtimeVersion, driver)
		close(s.registered)
	}
	return &api.SynchronizeResponse{}, nil
}

// begin notes that the plugin is registered, and which containers were made
// without it.
func (p *Plugin) begin(nameless []Container, runtime, version string, driver criocompat.Driver) {
	p.mu.Lock()
	p.driver = cmp.Or(driver, p.driver)
	p.nameless = make(map[string]Container, len(nameless))
	for _, c := range nameless {
		p.nameless[c.ID] = c
	}
	p.mu.Unlock()
	p.set(func(st *state) {
		st.registered, st.reason, st.since = true, nil, time.Now()
		st.runtime, st.version = runtime, version
		st.registrations++
	})
	p.log.Info("the NRI plugin is registered", zap.String("runtime", runtime), zap.String("version", version))
	if len(nameless) > 0 {
		p.log.Warn("containers that were created without cleave are not measured by the kubelet until they are created anew",
			zap.Int("containers", len(nameless)))
	}
}

// createContainer names the cgroup of a new container. It never answers with an
// error, because that would fail the container.
func (s *session) createContainer(req *api.CreateContainerRequest) (*api.CreateContainerResponse, error) {
	p, c := s.plugin, req.GetContainer()
	present := c.GetLinux().GetCgroupsPath()
	if criocompat.Named(present, c.GetId()) {
		// While one cleave takes over from another both are asked.
		p.note(criocompat.DriverOf(present), c.GetId())
		return &api.CreateContainerResponse{}, nil
	}
	path, driver, err := criocompat.CgroupsPath(present, c.GetId())
	if err != nil {
		p.mu.Lock()
		p.refused++
		if len(p.nameless) < refusedKept {
			p.nameless[c.GetId()] = containerOf(req.GetPod(), c)
		}
		p.mu.Unlock()
		p.log.Warn("a container keeps the name of its cgroup, and so the kubelet does not measure it; does another NRI plugin choose it?",
			zap.String("container_id", c.GetId()), zap.Error(err))
		return &api.CreateContainerResponse{}, nil
	}
	p.note(driver, c.GetId())
	adjust := &api.ContainerAdjustment{}
	adjust.SetLinuxCgroupsPath(path)
	return &api.CreateContainerResponse{Adjust: adjust}, nil
}

// note notes that a container has its name.
func (p *Plugin) note(driver criocompat.Driver, id string) {
	p.mu.Lock()
	p.named++
	p.driver = driver
	p.mu.Unlock()
	if p.cfg.Created != nil {
		p.cfg.Created(id)
	}
}

func containerOf(pod *api.PodSandbox, c *api.Container) Container {
	return Container{
		ID: c.GetId(), Name: c.GetName(), Pod: pod.GetName(), Namespace: pod.GetNamespace(),
		CgroupsPath: c.GetLinux().GetCgroupsPath(), heardOf: time.Now(),
	}
}
