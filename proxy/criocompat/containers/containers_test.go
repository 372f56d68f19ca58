package containers

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/proxy/criocompat"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fake is a runtime with some containers, in sandbox "box".
type fake struct {
	mu    sync.Mutex
	has   map[string]*runtimeapi.ContainerStatus // guarded by mu
	info  string
	lists int // guarded by mu
	down  error
	hang  bool
}

func (f *fake) ready(ctx context.Context) error {
	if f.hang {
		<-ctx.Done()
		return status.FromContextError(ctx.Err()).Err()
	}
	return f.down
}

func (f *fake) ListContainers(ctx context.Context, _ *runtimeapi.ListContainersRequest, _ ...grpc.CallOption) (*runtimeapi.ListContainersResponse, error) {
	f.mu.Lock()
	f.lists++
	f.mu.Unlock()
	if err := f.ready(ctx); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	out := &runtimeapi.ListContainersResponse{}
	for id := range f.has {
		out.Containers = append(out.Containers, &runtimeapi.Container{Id: id})
	}
	return out, nil
}

func (f *fake) ContainerStatus(ctx context.Context, in *runtimeapi.ContainerStatusRequest, _ ...grpc.CallOption) (*runtimeapi.ContainerStatusResponse, error) {
	if err := f.ready(ctx); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.has[in.GetContainerId()]
	if s == nil {
		return nil, status.Error(codes.NotFound, "no")
	}
	return &runtimeapi.ContainerStatusResponse{Status: s, Info: map[string]string{"info": f.info}}, nil
}

func (f *fake) PodSandboxStatus(_ context.Context, in *runtimeapi.PodSandboxStatusRequest, _ ...grpc.CallOption) (*runtimeapi.PodSandboxStatusResponse, error) {
	if in.GetPodSandboxId() != "box" {
		return nil, status.Error(codes.NotFound, "no")
	}
	return &runtimeapi.PodSandboxStatusResponse{Status: &runtimeapi.PodSandboxStatus{Network: &runtimeapi.PodSandboxNetworkStatus{
		Ip: "10.0.0.1", AdditionalIps: []*runtimeapi.PodIP{{Ip: "fd00::1"}},
	}}}, nil
}

func (f *fake) add(id string, s *runtimeapi.ContainerStatus) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.has == nil {
		f.has = map[string]*runtimeapi.ContainerStatus{}
	}
	f.has[id] = s
}

func (f *fake) remove(id string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.has, id)
}

// roots are in one folder; err, if set, instead.
type roots struct{ err error }

func (r roots) Root(_ context.Context, id string) (string, error) { return "/roots/" + id, r.err }

func TestContainer(t *testing.T) {
	t.Parallel()
	running := &runtimeapi.ContainerStatus{
		State: runtimeapi.ContainerState_CONTAINER_RUNNING, CreatedAt: 5, LogPath: "/log",
		Image:  &runtimeapi.ImageSpec{Image: "sha256:1", UserSpecifiedImage: "busybox"},
		Labels: map[string]string{"l": "1"}, Annotations: map[string]string{"a": "1"},
	}
	created := &runtimeapi.ContainerStatus{State: runtimeapi.ContainerState_CONTAINER_CREATED, Image: &runtimeapi.ImageSpec{Image: "sha256:1"}}
	const info = `{"pid":7,"sandboxID":"box","config":{"more":[1]}}`
	for name, tc := range map[string]struct {
		status *runtimeapi.ContainerStatus
		info   string
		roots  roots
		down   error
		want   criocompat.Container
		bad    string
	}{
		"running": {status: running, info: info, want: criocompat.Container{
			Name: "c", PID: 7, Image: "busybox", CreatedTime: 5, LogPath: "/log", Root: "/roots/c",
			Labels: running.Labels, Annotations: running.Annotations, IP: "10.0.0.1", IPs: []string{"10.0.0.1", "fd00::1"},
		}},
		"not started": {status: created, info: info, want: criocompat.Container{
			Name: "c", Image: "sha256:1", Root: "/roots/c", IP: "10.0.0.1", IPs: []string{"10.0.0.1", "fd00::1"},
		}},
		"another runtime's info": {status: created, info: "[]", want: criocompat.Container{Name: "c", Image: "sha256:1", Root: "/roots/c"}},
		"sandbox is gone":        {status: created, info: `{"sandboxID":"other"}`, want: criocompat.Container{Name: "c", Image: "sha256:1", Root: "/roots/c"}},
		"no root":                {status: running, roots: roots{errors.New("no snapshot")}, bad: "find the root of container c: no snapshot"},
		"runtime down":           {status: running, down: status.Error(codes.Unavailable, "down"), bad: "ask the runtime about container c: rpc error: code = Unavailable desc = down"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := &fake{info: tc.info, down: tc.down}
			f.add("c", tc.status)
			c := New(f, tc.roots)
			c.Created("c")
			got, err := c.Container(t.Context(), criocompat.Alias("c"))
			if fmt.Sprint(err) != tc.bad && (tc.bad != "" || err != nil) {
				t.Errorf("error %v, want %q", err, tc.bad)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("container (-want +got):\n%s", diff)
			}
		})
	}
}

// Containers that were made before cleave came are found in the runtime's list,
// which many questions for unknown ones don't ask for each time.
func TestUnknownAliases(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := &fake{}
		f.add("old", &runtimeapi.ContainerStatus{})
		c := New(f, roots{})
		var all sync.WaitGroup
		for i := range 50 {
			all.Go(func() {
				if _, err := c.Container(t.Context(), criocompat.Alias(fmt.Sprint(i))); !errors.Is(err, criocompat.ErrUnknown) {
					t.Errorf("%d: %v", i, err)
				}
			})
			all.Go(func() {
				if got, err := c.Container(t.Context(), criocompat.Alias("old")); err != nil || got.Name != "old" {
					t.Errorf("old: %v, %v", got, err)
				}
			})
		}
		all.Wait()
		if f.lists != 1 {
			t.Errorf("%d lists for a hundred questions", f.lists)
		}
		f.add("new", &runtimeapi.ContainerStatus{})
		time.Sleep(refreshPause) //nolint:forbidigo // the bubble's clock
		if _, err := c.Container(t.Context(), criocompat.Alias("new")); err != nil || f.lists != 2 {
			t.Errorf("later: %v after %d lists", err, f.lists)
		}
	})
}

// One that was announced is unknown, not an error, until the runtime has it, and is
// forgotten when it does not come.
func TestAnnounced(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := &fake{}
		c := New(f, roots{})
		ask := func() error {
			_, err := c.Container(t.Context(), criocompat.Alias("c"))
			return err
		}
		c.Created("c")
		if err := ask(); !errors.Is(err, criocompat.ErrUnknown) {
			t.Errorf("before: %v", err)
		}
		f.add("c", &runtimeapi.ContainerStatus{})
		if err := ask(); err != nil || f.lists != 0 {
			t.Errorf("there: %v, %d lists", err, f.lists)
		}
		c.Created("never")
		for range 2 {
			if err := c.Refresh(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if len(c.known) != 2 || len(c.announced) != 1 {
			t.Errorf("known %v, announced %v", c.known, c.announced)
		}
		f.remove("c")
		time.Sleep(expected + 1) //nolint:forbidigo // the bubble's clock
		if err := c.Refresh(t.Context()); err != nil {
			t.Fatal(err)
		}
		if len(c.known) != 0 || len(c.announced) != 0 {
			t.Errorf("known %v, announced %v", c.known, c.announced)
		}
	})
}

// A runtime that is down or hangs ends the question in time, and what is known stays.
// A node on which cAdvisor never asks for a list makes containers for months.
func TestAnnouncedAreForgotten(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := &fake{}
		c := New(f, roots{})
		for i := range 1000 {
			c.Created(fmt.Sprint(i))
			time.Sleep(time.Second) //nolint:forbidigo // the bubble's clock
		}
		if known, announced := len(c.known), len(c.announced); known > 130 || announced > 130 {
			t.Errorf("%d containers are known and %d announced, and each is long gone", known, announced)
		}
		// One that is there nevertheless is found.
		f.add("0", &runtimeapi.ContainerStatus{})
		if got, err := c.Container(t.Context(), criocompat.Alias("0")); err != nil || got.Name != "0" {
			t.Errorf("%+v, %v", got, err)
		}
	})
}

func TestRuntimeThatDoesNotAnswer(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := &fake{hang: true}
		c := New(f, roots{})
		c.Created("c")
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		began := time.Now()
		var all sync.WaitGroup
		for _, id := range []string{"c", "a", "b"} {
			all.Go(func() {
				if _, err := c.Container(ctx, criocompat.Alias(id)); err == nil || time.Since(began) != time.Second {
					t.Errorf("%s: %v after %s", id, err, time.Since(began))
				}
			})
		}
		all.Wait()
		f.hang, f.down = false, status.Error(codes.Unavailable, "down")
		if err := c.Refresh(t.Context()); status.Code(errors.Unwrap(err)) != codes.Unavailable || len(c.known) != 1 {
			t.Errorf("%v, known %v", err, c.known)
		}
	})
}
