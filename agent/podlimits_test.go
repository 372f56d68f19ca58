package agent

import (
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/cleave-cri/cleave/agent/limits"
	"github.com/cleave-cri/cleave/kube"
)

func storage(limit string) kube.Amounts {
	q := resource.MustParse(limit)
	return kube.Amounts{EphemeralStorage: &q}
}

// TestLimitsOfPods: what a container may write by its pod's specification and the configuration.
func TestLimitsOfPods(t *testing.T) {
	t.Parallel()
	const mib = 1 << 20
	pod := &kube.Pod{
		UID: "u", Namespace: "shop", Name: "web",
		Containers: []kube.Container{
			{Name: "limited", Limits: storage("2Gi")},
			{Name: "free"},
			{Name: "zero", Limits: storage("0")},
			{Name: "absurd", Limits: storage("100")},
			{Name: "negative", Limits: storage("-5Gi")},
			{Name: "endless", Limits: storage("1e30")},
			{Name: "requests", Requests: storage("3Gi")},
		},
		InitContainers: []kube.Container{{Name: "init", Limits: storage("5Mi")}},
	}
	odd := &kube.Pod{UID: "odd", Namespace: "shop", Name: "odd", Faults: []string{"a limit can't be read"}, Containers: pod.Containers}
	view := kube.Merge(kube.Snapshot{Source: "API server", AsOf: time.Now(), Pods: []*kube.Pod{pod, odd}})
	of := func(name string) limits.Container {
		return limits.Container{ID: "id", Name: name, PodUID: "u", PodNamespace: "shop", PodName: "web"}
	}
	for _, tc := range []struct {
		name      string
		container limits.Container
		most      uint64
		want      uint64
		known     bool
	}{
		{"its own", of("limited"), 0, 2048 * mib, true},
		{"its own, below what all may", of("limited"), 4096 * mib, 2048 * mib, true},
		{"its own is more than all may", of("limited"), 1024 * mib, 1024 * mib, true},
		{"an init container's", of("init"), 0, 5 * mib, true},
		{"none", of("free"), 0, 0, true},
		{"none, but all have one", of("free"), 7 * mib, 7 * mib, true},
		{"a limit of 0 is none", of("zero"), 7 * mib, 7 * mib, true},
		{"too little to start in", of("absurd"), 7 * mib, mib, true},
		{"a negative one is none", of("negative"), 7 * mib, 7 * mib, true},
		{"more than there can be", of("endless"), 7 * mib, 7 * mib, true},
		{"a request is no limit", of("requests"), 0, 0, true},
		{"one that the specification has not", of("debugger"), 7 * mib, 0, false},
		{"of a pod that is not known", limits.Container{Name: "limited", PodUID: "other", PodNamespace: "shop", PodName: "web"}, 7 * mib, 0, false},
		{"of a pod that is called otherwise", limits.Container{Name: "limited", PodUID: "u", PodNamespace: "shop", PodName: "db"}, 7 * mib, 0, false},
		{"of a pod that can't be read whole", limits.Container{Name: "limited", PodUID: "odd", PodNamespace: "shop", PodName: "odd"}, 7 * mib, 0, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			bytes, known := podLimits{pods: view, most: tc.most}.WritableLayer(tc.container)
			if bytes != tc.want || known != tc.known {
				t.Errorf("%d bytes, known %v; want %d, %v", bytes, known, tc.want, tc.known)
			}
		})
	}
}
