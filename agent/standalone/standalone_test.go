package standalone

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/reclaim/reclaimtest"
)

// marked is a runtime whose sandboxes have annotations, and which notes the grace that containers get.
type marked struct {
	runtimeapi.RuntimeServiceClient
	annotations map[string]string
	grace       *[]int64
}

func (m marked) ListPodSandbox(ctx context.Context, in *runtimeapi.ListPodSandboxRequest, _ ...grpc.CallOption) (*runtimeapi.ListPodSandboxResponse, error) {
	answer, err := m.RuntimeServiceClient.ListPodSandbox(ctx, in)
	for _, s := range answer.GetItems() {
		s.Annotations = m.annotations
	}
	return answer, err
}

func (m marked) StopContainer(ctx context.Context, in *runtimeapi.StopContainerRequest, _ ...grpc.CallOption) (*runtimeapi.StopContainerResponse, error) {
	*m.grace = append(*m.grace, in.GetTimeout())
	return m.RuntimeServiceClient.StopContainer(ctx, in)
}

// eviction is of the pod that a container is in.
func eviction(t *testing.T, r *reclaimtest.Runtime, container string) engine.Eviction {
	t.Helper()
	sandboxes, err := r.Containers.ListPodSandbox(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range sandboxes.GetItems() {
		if s.GetId() == r.SandboxOf(container) {
			m := s.GetMetadata()
			return engine.Eviction{UID: m.GetUid(), Namespace: m.GetNamespace(), Name: m.GetName()}
		}
	}
	t.Fatal("it has no sandbox")
	return engine.Eviction{}
}

func TestEvict(t *testing.T) {
	t.Parallel()
	r := reclaimtest.NewRuntime()
	image := r.Pull("app:1")
	greedy, dead, innocent := r.RunContainer("u1", "app", image), r.RunContainer("u1", "old", image), r.RunContainer("u2", "app", image)
	r.SetState(dead, runtimeapi.ContainerState_CONTAINER_EXITED)
	e := eviction(t, r, greedy)
	var grace []int64
	v := Evictor{Runtime: marked{r.Containers, map[string]string{configSource: "api"}, &grace}}
	if err := v.Evict(t.Context(), e, true); err != nil {
		t.Fatal(err)
	}
	sandboxes, err := r.Containers.ListPodSandbox(t.Context(), nil)
	if err != nil || slices.ContainsFunc(sandboxes.GetItems(), func(s *runtimeapi.PodSandbox) bool { return s.GetMetadata().GetUid() == "u1" }) {
		t.Errorf("it is still there: %v, %v", sandboxes.GetItems(), err)
	}
	if got := r.SandboxOf(innocent); got == "" {
		t.Error("the other pod is gone")
	}
	calls := strings.Join(r.Calls(), "\n")
	if strings.Contains(calls, "StopContainer "+dead) || !strings.Contains(calls, "StopContainer "+greedy) || strings.Contains(calls, innocent) {
		t.Errorf("calls:\n%s", calls)
	}
	if !slices.Equal(grace, []int64{2}) {
		t.Errorf("grace %v, want the least of 2 s", grace)
	}
	if err := v.Evict(t.Context(), e, true); err == nil || !strings.Contains(err.Error(), "no pod with UID u1") {
		t.Errorf("a second time: %v", err)
	}
}

// Another pod that has its name by now stays, and so does one that a file makes.
func TestWhoStays(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name        string
		annotations map[string]string
		change      func(*engine.Eviction)
		want        string
		protected   bool
	}{
		{"another UID", nil, func(e *engine.Eviction) { e.UID = "u0" }, "no pod with UID u0", false},
		{"another namespace", nil, func(e *engine.Eviction) { e.Namespace = "kube-system" }, "no pod with UID", false},
		{"static", map[string]string{configSource: "file"}, nil, "a file of the node", true},
		{"mirror", map[string]string{configSource: "api", configMirror: "x"}, nil, "a file of the node", true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			r := reclaimtest.NewRuntime()
			e := eviction(t, r, r.RunContainer("u1", "app", r.Pull("app:1")))
			if tc.change != nil {
				tc.change(&e)
			}
			before := len(r.Calls())
			var grace []int64
			err := Evictor{Runtime: marked{r.Containers, tc.annotations, &grace}}.Evict(t.Context(), e, false)
			if err == nil || !strings.Contains(err.Error(), tc.want) || errors.Is(err, ErrProtected) != tc.protected {
				t.Errorf("got %v, want %q in it", err, tc.want)
			}
			if calls := r.Calls()[before:]; len(calls) > 0 {
				t.Errorf("calls: %q", calls)
			}
		})
	}
}

// What can't be stopped is not removed.
func TestStopThatFails(t *testing.T) {
	t.Parallel()
	r := reclaimtest.NewRuntime()
	app := r.RunContainer("u1", "app", r.Pull("app:1"))
	stuck := errors.New("it does not stop")
	r.Before(func(call string) error {
		if strings.HasPrefix(call, "StopContainer") {
			return stuck
		}
		return nil
	})
	if err := (Evictor{Runtime: r.Containers}).Evict(t.Context(), eviction(t, r, app), true); !errors.Is(err, stuck) {
		t.Errorf("got %v", err)
	}
	if calls := strings.Join(r.Calls(), "\n"); strings.Contains(calls, "PodSandbox") {
		t.Errorf("calls:\n%s", calls)
	}
}
