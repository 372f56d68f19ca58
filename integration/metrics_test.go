package integration

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/lab/node"
	"github.com/cleave-cri/cleave/lab/pod"
)

// TestSeriesGoWithTheirContainer: within a minute of a container's end /metrics has no series of it, and within a minute of its pod's
// removal none of the pod. Those of another pod stay all the while.
func TestSeriesGoWithTheirContainer(t *testing.T) {
	t.Parallel()
	n := startNode(t, node.Options{})
	ctx := bounded(t)
	through := dial(t, n.Cleave.Endpoint())
	if _, err := through.Pull(ctx, node.BusyboxImage); err != nil {
		t.Fatal(err)
	}
	start := func(name string) (*pod.Pod, string) {
		p, err := through.Run(ctx, n.PodSpec(name))
		if err != nil {
			t.Fatal(err)
		}
		id, err := p.Start(ctx, pod.ContainerSpec{Name: "writer", Image: node.BusyboxImage, Command: []string{"/bin/sh", "-c", "dd if=/dev/zero of=/f bs=1M count=2; exec sleep 1000"}})
		if err != nil {
			t.Fatal(err)
		}
		return p, id
	}
	ends, endsID := start("ends")
	start("stays")
	series := func(ctx context.Context, name, metric string) (found []string, err error) {
		page, err := n.Cleave.Metrics(ctx)
		for line := range strings.Lines(page) {
			if strings.HasPrefix(line, metric) && strings.Contains(line, `pod="`+name+`"`) {
				found = append(found, strings.TrimSpace(line))
			}
		}
		return found, err
	}
	const ofContainers, ofAny = "cleave_container_", "cleave_"
	for _, name := range []string{"ends", "stays"} {
		eventually(ctx, t, "there are series of pod "+name+" and its container", func() (string, bool) {
			container, err := series(ctx, name, ofContainers+"rootfs_bytes{")
			of, err2 := series(ctx, name, "cleave_pod_held_bytes{")
			return fmt.Sprint(container, of, err, err2), len(container) == 1 && len(of) == 1
		})
	}
	gone := func(what, metric string) {
		t.Helper()
		minute, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		eventually(minute, t, what, func() (string, bool) {
			left, err := series(minute, "ends", metric)
			return fmt.Sprint(left, err), err == nil && len(left) == 0
		})
		if stays, err := series(ctx, "stays", ofContainers); err != nil || len(stays) == 0 {
			t.Errorf("%s: the other container has series %q, %v", what, stays, err)
		}
	}
	if _, err := through.Runtime.StopContainer(ctx, &runtimeapi.StopContainerRequest{ContainerId: endsID}); err != nil {
		t.Fatal(err)
	}
	gone("the container that has ended has no series", ofContainers)
	if err := ends.Remove(ctx); err != nil {
		t.Fatal(err)
	}
	gone("the pod that is removed has no series", ofAny)
}
