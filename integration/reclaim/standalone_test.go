package reclaim

import (
	"slices"
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/agent/standalone"
	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/reclaim/reclaimtest"
)

// A pod that is evicted through the runtime is gone with its containers, and with what they wrote; another one runs on.
func TestStandaloneEviction(t *testing.T) {
	t.Parallel()
	n := start(t, disk.Ext4, "overlayfs", 1<<30)
	w := n.world(t)
	id := w.Pull(t, "registry.example/standalone/app:1", reclaimtest.Runs)
	greedy, innocent := w.Run(t, "uid-greedy", "app", id), w.Run(t, "uid-innocent", "app", id)
	ctx := bounded(t)
	v := standalone.Evictor{Runtime: n.client.Runtime}
	var e engine.Eviction
	boxes, err := n.client.Runtime.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range boxes.GetItems() {
		if m := b.GetMetadata(); m.GetUid() == "uid-greedy" {
			e = engine.Eviction{UID: m.GetUid(), Namespace: m.GetNamespace(), Name: m.GetName()}
		}
	}
	other := e
	other.UID = "uid-before"
	if err := v.Evict(ctx, other, true); err == nil || !strings.Contains(err.Error(), "no pod with UID") {
		t.Errorf("a pod of that name that was there before: %v", err)
	}
	if err := v.Evict(ctx, e, true); err != nil {
		t.Fatal(err)
	}
	containers, err := n.client.Runtime.ListContainers(ctx, &runtimeapi.ListContainersRequest{})
	if err != nil {
		t.Fatal(err)
	}
	is := func(id string) func(*runtimeapi.Container) bool {
		return func(c *runtimeapi.Container) bool { return c.GetId() == id }
	}
	if slices.ContainsFunc(containers.GetContainers(), is(greedy)) {
		t.Error("its container is still there")
	}
	i := slices.IndexFunc(containers.GetContainers(), is(innocent))
	if i < 0 || containers.GetContainers()[i].GetState() != runtimeapi.ContainerState_CONTAINER_RUNNING {
		t.Errorf("the other pod's container does not run: %v", containers.GetContainers())
	}
	layers, err := n.store.Image(ctx, []string{id})
	if err != nil || slices.ContainsFunc(layers.Users, func(u string) bool { return strings.Contains(u, greedy) }) {
		t.Errorf("containerd still has its container: %v, %v", layers.Users, err)
	}
}
