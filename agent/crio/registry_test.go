package crio

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/proxy/criocompat"
)

// fakeRuntime has one container, c1 of sandbox s1.
type fakeRuntime struct {
	lists   atomic.Int32
	there   atomic.Bool
	running bool
	info    string
	network *runtimeapi.PodSandboxNetworkStatus
}

func (f *fakeRuntime) ListContainers(context.Context, *runtimeapi.ListContainersRequest, ...grpc.CallOption) (*runtimeapi.ListContainersResponse, error) {
	f.lists.Add(1)
	if !f.there.Load() {
		return &runtimeapi.ListContainersResponse{}, nil
	}
	return &runtimeapi.ListContainersResponse{Containers: []*runtimeapi.Container{{Id: "c1"}}}, nil
}

func (f *fakeRuntime) ContainerStatus(_ context.Context, in *runtimeapi.ContainerStatusRequest, _ ...grpc.CallOption) (*runtimeapi.ContainerStatusResponse, error) {
	if in.GetContainerId() != "c1" || !in.GetVerbose() {
		return nil, status.Error(codes.NotFound, "no such container")
	}
	state := runtimeapi.ContainerState_CONTAINER_CREATED
	if f.running {
		state = runtimeapi.ContainerState_CONTAINER_RUNNING
	}
	return &runtimeapi.ContainerStatusResponse{
		Status: &runtimeapi.ContainerStatus{
			Id: "c1", State: state, CreatedAt: 5, Image: &runtimeapi.ImageSpec{Image: "busybox:1"}, LogPath: "/log",
			Labels: map[string]string{"l": "1"}, Annotations: map[string]string{"a": "2"},
		},
		Info: map[string]string{"info": f.info},
	}, nil
}

func (f *fakeRuntime) PodSandboxStatus(_ context.Context, in *runtimeapi.PodSandboxStatusRequest, _ ...grpc.CallOption) (*runtimeapi.PodSandboxStatusResponse, error) {
	if in.GetPodSandboxId() != "s1" {
		return nil, status.Error(codes.NotFound, "no such sandbox")
	}
	return &runtimeapi.PodSandboxStatusResponse{Status: &runtimeapi.PodSandboxStatus{Network: f.network}}, nil
}

func rootOf(_ context.Context, id string) (string, error) { return "/roots/" + id, nil }

func TestKSS9_WhatIsSaidOfAContainer(t *testing.T) {
	t.Parallel()
	want := criocompat.Container{
		Name: "c1", Image: "busybox:1", CreatedTime: 5, LogPath: "/log", Root: "/roots/c1",
		Labels: map[string]string{"l": "1"}, Annotations: map[string]string{"a": "2"},
	}
	f := &fakeRuntime{info: `{"sandboxID":"s1","pid":42,"more":{}}`, network: &runtimeapi.PodSandboxNetworkStatus{
		Ip: "10.0.0.5", AdditionalIps: []*runtimeapi.PodIP{{Ip: "fd00::5"}},
	}}
	f.there.Store(true)
	r := NewRegistry(f, rootOf)
	want.IP, want.IPs = "10.0.0.5", []string{"10.0.0.5", "fd00::5"}
	got, err := r.Container(t.Context(), criocompat.Alias("c1"))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("before it runs it has no process: %s", diff)
	}
	f.running, want.PID = true, 42
	if got, err = r.Container(t.Context(), criocompat.Alias("c1")); err != nil || !cmp.Equal(want, got) {
		t.Errorf("running: %v %s", err, cmp.Diff(want, got))
	}
	f.network, want.IP, want.IPs = nil, "", nil
	if got, err = r.Container(t.Context(), criocompat.Alias("c1")); err != nil || !cmp.Equal(want, got) {
		t.Errorf("in the host's network: %v %s", err, cmp.Diff(want, got))
	}
}

func TestUnknownAliasesDoNotListForEach(t *testing.T) {
	t.Parallel()
	f := &fakeRuntime{info: `{"sandboxID":"s1"}`}
	r := NewRegistry(f, rootOf)
	now := time.Unix(1000, 0)
	r.now = func() time.Time { return now }
	for range 1000 {
		if _, err := r.Container(t.Context(), criocompat.Alias("c1")); !errors.Is(err, criocompat.ErrUnknown) {
			t.Fatal(err)
		}
	}
	if n := f.lists.Load(); n != 1 {
		t.Errorf("%d lists within no time", n)
	}
	f.there.Store(true)
	now = now.Add(listGapMin)
	if _, err := r.Container(t.Context(), criocompat.Alias("c1")); err != nil {
		t.Error(err)
	}
}

func TestContainerThatIsGoneIsUnknown(t *testing.T) {
	t.Parallel()
	f := &fakeRuntime{}
	r := NewRegistry(f, rootOf)
	r.ids[criocompat.Alias("gone")] = "gone"
	if _, err := r.Container(t.Context(), criocompat.Alias("gone")); !errors.Is(err, criocompat.ErrUnknown) {
		t.Error(err)
	}
}

func TestWhatTheRuntimeSaysMalformedIsAnError(t *testing.T) {
	t.Parallel()
	f := &fakeRuntime{info: `{"pid":"x"`}
	f.there.Store(true)
	if _, err := NewRegistry(f, rootOf).Container(t.Context(), criocompat.Alias("c1")); err == nil {
		t.Error("no error")
	}
}
