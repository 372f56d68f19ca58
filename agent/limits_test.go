package agent

import (
	"bytes"
	"context"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/agent/limits"
	"github.com/cleave-cri/cleave/agent/page"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/proxy"
)

// TestWhereLimitsAreKept: only where the snapshotter can keep them and cleave may act; what is done to an answer already is
// still done.
func TestWhereLimitsAreKept(t *testing.T) {
	t.Parallel()
	const method = runtimeapi.RuntimeService_CreateContainer_FullMethodName
	for _, tc := range []struct {
		name   string
		change func(*config.Config)
		want   bool
	}{
		{"all is there", func(*config.Config) {}, true},
		{"in mode crio", func(c *config.Config) { c.Mode = config.ModeCRIO }, true},
		{"in mode observe", func(c *config.Config) { c.Mode = config.ModeObserve }, false},
		{"without project quota", func(c *config.Config) { c.Snapshotter.ProjectQuota = false }, false},
		{"without the snapshotter", func(c *config.Config) { c.Snapshotter.ImageRoot, c.Snapshotter.ContainerRoot = "", "" }, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			cfg := config.Default()
			cfg.Snapshotter.ImageRoot, cfg.Snapshotter.ContainerRoot, cfg.Snapshotter.ProjectQuota = "/a", "/b", true
			tc.change(&cfg)
			a := &agent{cfg: cfg, log: zap.NewNop()}
			none := proxy.Config{Interceptors: map[string]proxy.AnswerFunc{}}
			a.openLimits(&none)
			if (a.limits != nil) != tc.want || (none.Interceptors[method] != nil) != tc.want {
				t.Fatalf("kept: %t, told of new containers: %t", a.limits != nil, none.Interceptors[method] != nil)
			}
			if !tc.want {
				return
			}
			if answer, err := none.Interceptors[method](t.Context(), []byte("its own")); answer != nil || err != nil {
				t.Errorf("the runtime's answer became %q, %v", answer, err)
			}
			other := proxy.Config{Interceptors: map[string]proxy.AnswerFunc{
				method: func(_ context.Context, answer []byte) ([]byte, error) {
					return append([]byte("better than "), answer...), nil
				},
			}}
			a.openLimits(&other)
			if answer, err := other.Interceptors[method](t.Context(), []byte("its own")); string(answer) != "better than its own" || err != nil {
				t.Errorf("the answer became %q, %v", answer, err)
			}
		})
	}
}

// listing is a runtime that lists containers.
type listing struct {
	runtimeapi.RuntimeServiceClient

	answer *runtimeapi.ListContainersResponse
}

func (l listing) ListContainers(context.Context, *runtimeapi.ListContainersRequest, ...grpc.CallOption) (*runtimeapi.ListContainersResponse, error) {
	return l.answer, nil
}

func TestContainersOfPods(t *testing.T) {
	t.Parallel()
	got, err := containersOf(listing{answer: &runtimeapi.ListContainersResponse{Containers: []*runtimeapi.Container{
		{Id: "1", Labels: map[string]string{
			"io.kubernetes.container.name": "web", "io.kubernetes.pod.name": "shop", "io.kubernetes.pod.namespace": "prod", "io.kubernetes.pod.uid": "u",
		}},
		{Id: "2"}, // made by hand
	}}})(t.Context())
	want := []limits.Container{{ID: "1", Name: "web", PodUID: "u", PodName: "shop", PodNamespace: "prod"}, {ID: "2"}}
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
}

func TestLimitsForPeople(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		status limits.Status
		want   string
	}{
		{limits.Status{}, ""},
		{limits.Status{Limited: 3, Without: 1}, "Limits: 3 writable layers have theirs, 1 have none and should\n"},
		{limits.Status{Problem: "it is not running"}, "! Limits of writable layers: it is not running\n"},
	} {
		var b bytes.Buffer
		writeLimits(page.NewWriter(&b), tc.status)
		if got := b.String(); got != tc.want || strings.Contains(got, "%!") {
			t.Errorf("%+v is told as %q, want %q", tc.status, got, tc.want)
		}
	}
}
