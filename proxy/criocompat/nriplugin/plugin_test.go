package nriplugin

import (
	"context"
	"errors"
	"io"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"

	"github.com/cleave-cri/cleave/doctor"
	"github.com/cleave-cri/cleave/proxy/criocompat"
)

// requestTimeout is how long the runtime waits for a plugin in these tests; a busy
// machine must not reach it. In containerd it is 2 s.
const requestTimeout = 30 * time.Second

func TestMain(m *testing.M) {
	adaptation.SetPluginRequestTimeout(requestTimeout)
	goleak.VerifyTestMain(m,
		// NRI's own, which end some time after their connections.
		goleak.IgnoreAnyFunction("github.com/containerd/nri/pkg/adaptation.(*plugin).close"))
}

// patience bounds what a test waits for.
const patience = time.Minute

// runtime is NRI's side of a runtime: the code that containerd runs.
type runtime struct {
	*adaptation.Adaptation
	socket string
	mu     sync.Mutex
	pods   []*api.PodSandbox // guarded by mu
	has    []*api.Container  // guarded by mu
}

func newRuntime(t *testing.T, dir string) *runtime {
	t.Helper()
	r := &runtime{socket: filepath.Join(dir, "nri.sock")}
	sync := func(ctx context.Context, tell adaptation.SyncCB) error {
		r.mu.Lock()
		pods, has := r.pods, r.has
		r.mu.Unlock()
		_, err := tell(ctx, pods, has)
		return err
	}
	update := func(context.Context, []*api.ContainerUpdate) ([]*api.ContainerUpdate, error) { return nil, nil }
	var err error
	r.Adaptation, err = adaptation.New("containerd", "v2.4.2", sync, update, adaptation.WithSocketPath(r.socket),
		adaptation.WithPluginPath(filepath.Join(dir, "plugins")), adaptation.WithPluginConfigPath(filepath.Join(dir, "conf.d")))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func (r *runtime) start(t *testing.T) {
	t.Helper()
	if err := r.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Stop)
}

// create asks the plugins about a container as containerd does, and returns the
// cgroup that it gets.
func (r *runtime) create(t *testing.T, id, cgroup string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	// As containerd does around the creation, so that no plugin is half there.
	defer r.BlockPluginSync().Unblock()
	answer, err := r.CreateContainer(ctx, &api.CreateContainerRequest{
		Pod:       &api.PodSandbox{Id: "pod", Name: "p", Namespace: "n"},
		Container: &api.Container{Id: id, PodSandboxId: "pod", Name: id, Linux: &api.LinuxContainer{CgroupsPath: cgroup}},
	})
	if err != nil {
		t.Fatalf("create %s: %v", id, err)
	}
	return answer.GetAdjust().GetLinux().GetCgroupsPath()
}

func run(t *testing.T, p *Plugin) {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		select {
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(patience):
			t.Error("the plugin does not end")
		}
		if p.Registered() {
			t.Error("the plugin says that it is registered after its end")
		}
	})
}

func wait(t *testing.T, p *Plugin) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := p.Wait(ctx); err != nil {
		t.Fatal(err)
	}
}

// until waits until a condition of the plugin's status holds.
func until(t *testing.T, p *Plugin, holds func(Status) bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for {
		p.mu.Lock()
		changed := p.changed
		p.mu.Unlock()
		if holds(p.Status()) {
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			t.Fatalf("it does not come: %+v", p.Status())
		}
	}
}

func all(string) bool { return true }

func TestContainersGetTheirNames(t *testing.T) {
	t.Parallel()
	r := newRuntime(t, t.TempDir())
	r.pods = []*api.PodSandbox{{Id: "pod", Name: "p", Namespace: "n"}}
	named, _, err := criocompat.CgroupsPath("/k/named", "named")
	if err != nil {
		t.Fatal(err)
	}
	r.has = []*api.Container{
		{Id: "old", PodSandboxId: "pod", Name: "app", State: api.ContainerState_CONTAINER_RUNNING, Linux: &api.LinuxContainer{CgroupsPath: "/k/old"}},
		{Id: "dead", PodSandboxId: "pod", State: api.ContainerState_CONTAINER_STOPPED, Linux: &api.LinuxContainer{CgroupsPath: "/k/dead"}},
		{Id: "named", PodSandboxId: "pod", State: api.ContainerState_CONTAINER_RUNNING, Linux: &api.LinuxContainer{CgroupsPath: named}},
	}
	r.start(t)
	var told []string
	p := New(Config{Socket: r.socket, Created: func(id string) { told = append(told, id) }})
	run(t, p)
	wait(t, p)
	for _, c := range []struct{ id, cgroup, want string }{
		{"a", "/kubepods/pod1/a", "/kubepods/pod1/crio-" + criocompat.Alias("a") + "-a"},
		{"b", "k.slice:cri-containerd:b", "k.slice:crio:" + criocompat.Alias("b") + "-b"},
		{"c", "/somebody/elses", ""},
		{"d", "", ""},
	} {
		if got := r.create(t, c.id, c.cgroup); got != c.want {
			t.Errorf("the cgroup of %s becomes %q, want %q", c.id, got, c.want)
		}
	}
	if !slices.Equal(told, []string{"a", "b"}) {
		t.Errorf("told of %v", told)
	}
	got := p.Status()
	want := Status{
		Registered: true, Since: got.Since, Registrations: 1, Runtime: "containerd", RuntimeVersion: "v2.4.2",
		Driver: criocompat.Systemd, Named: 2, Refused: 2, Unmeasured: 3,
	}
	if diff := cmp.Diff(want, got); diff != "" || got.Since.IsZero() {
		t.Errorf("status (-want +got):\n%s", diff)
	}
	wantOld := []Container{
		{ID: "old", Name: "app", Pod: "p", Namespace: "n", CgroupsPath: "/k/old"},
		{ID: "c", Name: "c", Pod: "p", Namespace: "n", CgroupsPath: "/somebody/elses"},
		{ID: "d", Name: "d", Pod: "p", Namespace: "n"},
	}
	if diff := cmp.Diff(wantOld, p.Unmeasured(later(), all), cmpopts.IgnoreUnexported(Container{})); diff != "" {
		t.Errorf("unmeasured (-want +got):\n%s", diff)
	}
	// Somebody who has not looked yet, or who looked before they were there, knows nothing of them.
	for _, asOf := range []time.Time{{}, time.Now().Add(-time.Hour), time.Now()} {
		if got := p.Unmeasured(asOf, func(string) bool { return false }); len(got) != len(wantOld) {
			t.Errorf("as of %s there are %v", asOf, got)
		}
	}
	if got := p.Unmeasured(later(), func(id string) bool { return id == "c" }); len(got) != 1 || got[0].ID != "c" || p.Status().Unmeasured != 1 {
		t.Errorf("after the others have gone: %v", got)
	}
}

// later is when whoever looks sees all containers that were told of until now.
func later() time.Time { return time.Now().Add(unseen) }

// The state of a large node comes in several messages.
func TestManyContainersBefore(t *testing.T) {
	t.Parallel()
	r := newRuntime(t, t.TempDir())
	const count = 3000
	for i := range count {
		id := criocompat.Alias(string(rune(i)))
		r.pods = append(r.pods, &api.PodSandbox{Id: "pod" + id, Name: "p", Namespace: "n"})
		r.has = append(r.has, &api.Container{
			Id: id, PodSandboxId: "pod" + id, State: api.ContainerState_CONTAINER_RUNNING,
			Linux: &api.LinuxContainer{CgroupsPath: "/k/" + id}, Labels: map[string]string{"much": strings.Repeat("x", 4<<10)},
		})
	}
	r.start(t)
	p := New(Config{Socket: r.socket})
	run(t, p)
	wait(t, p)
	old := p.Unmeasured(later(), all)
	if len(old) != count || old[0].Pod != "p" || old[count-1].Pod != "p" {
		t.Errorf("%d containers from before, want %d, all with their pods", len(old), count)
	}
}

// While containerd is away, or without NRI, the plugin says so, and it is back when
// containerd is.
func TestContainerdComesAndGoes(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	p := New(Config{Socket: filepath.Join(dir, "nri.sock")})
	hangUp := hangsUp(p)
	run(t, p)
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := p.Wait(ctx); !errors.Is(err, ErrNotRegistered) {
		t.Errorf("before containerd: %v, want %v", err, ErrNotRegistered)
	}
	until(t, p, func(s Status) bool { return strings.Contains(s.Reason, ErrDisabled.Error()) })
	for round := range int64(3) {
		r := newRuntime(t, dir)
		if err := r.Start(); err != nil {
			t.Fatal(err)
		}
		wait(t, p)
		if got := r.create(t, "a", "/k/a"); got == "" {
			t.Errorf("round %d: a container got no name", round)
		}
		r.Stop()
		hangUp()
		until(t, p, func(s Status) bool { return !s.Registered })
	}
	if got := p.Status().Registrations; got != 3 {
		t.Errorf("%d registrations in 3 rounds", got)
	}
}

// hangsUp makes a plugin's connections such that the test can end them as the death
// of the runtime's process does; Adaptation.Stop leaves them open.
func hangsUp(p *Plugin) (hangUp func()) {
	var newest atomic.Pointer[net.UnixConn]
	dial := p.dial
	p.dial = func(ctx context.Context, path string) (net.Conn, error) {
		conn, err := dial(ctx, path)
		if uc, ok := conn.(*net.UnixConn); ok {
			newest.Store(uc)
		}
		return conn, err
	}
	return func() {
		conn := newest.Load()
		_ = errors.Join(conn.CloseRead(), conn.CloseWrite()) //nolint:errcheck // it may have ended
	}
}

// A plugin that containerd has dropped because it was too slow is back at once.
//
// It runs alone, because NRI's limit is one for all.
func TestTooSlow(t *testing.T) {
	r := newRuntime(t, t.TempDir())
	r.start(t)
	release := make(chan struct{})
	var slow atomic.Bool
	slow.Store(true)
	p := New(Config{Socket: r.socket, Created: func(string) {
		if slow.Swap(false) {
			<-release
		}
	}})
	run(t, p)
	wait(t, p)
	adaptation.SetPluginRequestTimeout(10 * time.Millisecond)
	defer adaptation.SetPluginRequestTimeout(requestTimeout)
	if got := r.create(t, "a", "/k/a"); got != "" {
		t.Errorf("the container that the plugin was too slow for got %q", got)
	}
	adaptation.SetPluginRequestTimeout(requestTimeout)
	// Also while the request hangs that it was too slow for.
	until(t, p, func(s Status) bool { return s.Registered && s.Registrations == 2 })
	close(release)
	if got := r.create(t, "b", "/k/b"); got == "" {
		t.Error("the next container got no name")
	}
}

// A plugin that breaks on a container breaks neither the container nor cleave.
func TestPanic(t *testing.T) {
	t.Parallel()
	r := newRuntime(t, t.TempDir())
	r.start(t)
	p := New(Config{Socket: r.socket, Created: func(id string) {
		if id == "a" {
			panic("no")
		}
	}})
	run(t, p)
	wait(t, p)
	if got := r.create(t, "a", "/k/a"); got != "" {
		t.Errorf("a: %q", got)
	}
	if got := r.create(t, "b", "/k/b"); got == "" {
		t.Error("b got no name")
	}
}

// chooser is another plugin, which chooses cgroups.
type chooser struct{}

func (chooser) CreateContainer(context.Context, *api.PodSandbox, *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	adjust := &api.ContainerAdjustment{}
	adjust.SetLinuxCgroupsPath("/chosen")
	return adjust, nil, nil
}

// Two plugins that choose a cgroup make the creation of a container fail; ours
// comes after others and lets theirs be.
func TestAnotherPluginChoosesTheCgroup(t *testing.T) {
	t.Parallel()
	r := newRuntime(t, t.TempDir())
	r.start(t)
	other, err := stub.New(chooser{}, stub.WithPluginName("other"), stub.WithPluginIdx("10"), stub.WithSocketPath(r.socket))
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	defer other.Stop()
	p := New(Config{Socket: r.socket})
	run(t, p)
	wait(t, p)
	if got := r.create(t, "a", "/k/a"); got != "/chosen" {
		t.Errorf("the cgroup is %q, want the other plugin's", got)
	}
	if old := p.Unmeasured(later(), all); len(old) != 1 || old[0].CgroupsPath != "/chosen" {
		t.Errorf("unmeasured are %v", old)
	}
}

// When one cleave takes over from another, both are registered for a while: the
// container gets its name once, and neither takes it for another plugin's.
func TestTwoOfUs(t *testing.T) {
	t.Parallel()
	r := newRuntime(t, t.TempDir())
	r.has = []*api.Container{{Id: "old", Linux: &api.LinuxContainer{CgroupsPath: "k.slice:cri-containerd:old"}}}
	r.start(t)
	var told atomic.Int64
	both := []*Plugin{}
	for range 2 {
		p := New(Config{Socket: r.socket, Created: func(string) { told.Add(1) }})
		run(t, p)
		wait(t, p)
		if got := p.Status().Driver; got != criocompat.Systemd {
			t.Errorf("the driver of what there is: %q", got)
		}
		both = append(both, p)
	}
	if got := r.create(t, "a", "/k/a"); got != "/k/crio-"+criocompat.Alias("a")+"-a" {
		t.Errorf("the cgroup is %q", got)
	}
	for _, p := range both {
		if got := p.Status(); got.Named != 1 || got.Refused != 0 || got.Unmeasured != 1 || got.Driver != criocompat.Cgroupfs {
			t.Errorf("status %+v", got)
		}
	}
	if told.Load() != 2 {
		t.Errorf("%d were told", told.Load())
	}
}

// What answers on the socket and is no NRI, or hangs up, is left alone after a
// while, and never taken for a registration.
func TestSomethingElseOnTheSocket(t *testing.T) {
	t.Parallel()
	for name, serve := range map[string]func(net.Conn){
		"hangs up": func(net.Conn) {},
		"garbage": func(c net.Conn) {
			_, _ = c.Write([]byte("HTTP/1.1 400 Bad Request\r\n\r\nnot here")) //nolint:errcheck // as far as it goes
		},
		"a huge frame": func(c net.Conn) { _, _ = c.Write([]byte{0, 0, 0, 1, 0, 0x3f, 0xff, 0xff, 1}) }, //nolint:errcheck // as far as it goes
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), "s")
			l, err := net.Listen("unix", path)
			if err != nil {
				t.Fatal(err)
			}
			var served sync.WaitGroup
			served.Go(func() {
				for {
					c, err := l.Accept()
					if err != nil {
						return
					}
					serve(c)
					_ = c.Close() //nolint:errcheck // that is the point
				}
			})
			defer served.Wait()
			defer l.Close() //nolint:errcheck // end of test
			p := New(Config{Socket: path})
			run(t, p)
			until(t, p, func(s Status) bool { return s.Reason != "it has not connected yet" })
			if got := p.Status(); got.Registered || got.Registrations != 0 {
				t.Errorf("status %+v", got)
			}
		})
	}
}

// A runtime that takes the connection and says nothing is given up in time, and
// asked again.
func TestSilentRuntime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var dials atomic.Int64
		p := New(Config{})
		p.dial = func(context.Context, string) (net.Conn, error) {
			dials.Add(1)
			here, there := net.Pipe()
			go func() {
				_, _ = io.Copy(io.Discard, there) //nolint:errcheck // ends with the other end
			}()
			return here, nil
		}
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- p.Run(ctx) }()
		short, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		began := time.Now()
		if err := p.Wait(short); !errors.Is(err, ErrNotRegistered) || time.Since(began) != 5*time.Second {
			t.Errorf("Wait: %v after %s", err, time.Since(began))
		}
		time.AfterFunc(time.Minute, stop)
		if err := <-done; err != nil {
			t.Error(err)
		}
		if got := dials.Load(); got < 5 || got > 13 {
			t.Errorf("%d attempts in a minute", got)
		}
		if got := p.Status(); got.Registered || got.Reason != "cleave is stopping" {
			t.Errorf("status %+v", got)
		}
	})
}

// Whatever the runtime says of a container, the answer is no error, which would
// fail the container, and names its cgroup rightly or not at all.
func FuzzCreateContainer(f *testing.F) {
	for _, cgroup := range []string{"/k/a", "k.slice:cri-containerd:a", ""} {
		request, err := proto.Marshal(&api.CreateContainerRequest{
			Pod: &api.PodSandbox{}, Container: &api.Container{Id: "a", Linux: &api.LinuxContainer{CgroupsPath: cgroup}},
		})
		if err != nil {
			f.Fatal(err)
		}
		f.Add(request)
	}
	f.Fuzz(func(t *testing.T, request []byte) {
		s := &session{plugin: New(Config{})}
		req := &api.CreateContainerRequest{}
		if proto.Unmarshal(request, req) != nil {
			return
		}
		answer, err := s.service().Methods["CreateContainer"](t.Context(), func(into any) error {
			return proto.Unmarshal(request, into.(proto.Message)) //nolint:errcheck // it is one
		})
		if err != nil {
			t.Fatalf("an error to %v: %v", req, err)
		}
		got := answer.(*api.CreateContainerResponse).GetAdjust().GetLinux().GetCgroupsPath() //nolint:errcheck // it is one
		if got != "" && !criocompat.Named(got, req.GetContainer().GetId()) {
			t.Errorf("%v gets %q", req, got)
		}
	})
}

func TestCheckEnabled(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	r := newRuntime(t, dir)
	check := func() doctor.Result { return doctor.Run(t.Context(), []doctor.Check{CheckEnabled(r.socket)})[0] }
	if got := check(); got.Level != doctor.Fail || !strings.Contains(got.Remedy, "disable = false") {
		t.Errorf("without NRI: %+v", got)
	}
	r.start(t)
	if got := check(); got.Level != doctor.Pass {
		t.Errorf("with NRI: %+v", got)
	}
}
