package crio

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/cleave-cri/cleave/agent/kubeletapi"
	"github.com/cleave-cri/cleave/config/kubelet"
	"github.com/cleave-cri/cleave/kube"
	"github.com/cleave-cri/cleave/kube/allocatable"
	"github.com/cleave-cri/cleave/kube/evict"
	lab "github.com/cleave-cri/cleave/lab/kube"
	"github.com/cleave-cri/cleave/lab/node"
)

// TestWhatTheKubeletSays: the API server and the kubelet tell the same of one pod; a static pod is known to both by one UID, and
// protected; an eviction ends with the containers; and what `cleave allocatable` computes is what the node publishes and what the
// kernel enforces.
func TestWhatTheKubeletSays(t *testing.T) {
	static := t.TempDir()
	c := start(t, options{settings: map[string]any{
		"staticPodPath": static, "enforceNodeAllocatable": []string{"pods"},
		"kubeReserved": map[string]string{"memory": "256Mi", "ephemeral-storage": "100Mi"}, "systemReserved": map[string]string{"memory": "128Mi"},
		"evictionHard": map[string]string{"memory.available": "100Mi", "nodefs.available": "3%", "imagefs.available": "2%"},
	}})
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	manifest := fmt.Sprintf("apiVersion: v1\nkind: Pod\nmetadata: {name: static}\nspec:\n  containers: [{name: main, image: %q, command: [sleep, \"100000\"]}]\n", node.BusyboxImage)
	if err := os.WriteFile(filepath.Join(static, "pod.yaml"), []byte(manifest), 0o600); err != nil {
		t.Fatal(err)
	}
	made, err := c.plane.Run(ctx, lab.PodSpec{Name: "usual", Image: node.BusyboxImage, Command: []string{"sleep", "100000"}, EphemeralRequest: "10Mi", EphemeralStorage: "20Mi", EmptyDir: "/data", SizeLimit: "5Mi"})
	if err != nil {
		t.Fatal(err)
	}

	client, err := kube.NewClientFor(c.plane.REST(), lab.NodeName, true)
	if err != nil {
		t.Fatal(err)
	}
	api := kube.NewWatch(client)
	// As cleave asks.
	page, err := kube.NewKubeletPods(kube.KubeletPodsOptions{Ask: c.page, Every: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	files := kube.NewManifests(static, lab.NodeName, time.Second)
	running, stop := context.WithCancel(ctx)
	done := make(chan error, 3)
	for _, run := range []func(context.Context) error{api.Run, page.Run, files.Run} {
		go func() { done <- run(running) }()
	}
	t.Cleanup(func() {
		stop()
		for range 3 {
			if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		}
	})
	uid := string(made.UID)
	var both [2]kube.Pod
	eventually(ctx, t, "both know the same pods", func() error {
		var names [2][]string
		for i, s := range []kube.Snapshot{api.Pods(), page.Pods()} {
			for _, p := range s.Pods {
				names[i] = append(names[i], p.String()+" "+p.UID+" "+p.Protected())
				if p.UID == uid {
					both[i] = *p
				}
			}
			if len(s.Pods) != 2 {
				return fmt.Errorf("%s: %q %s", s.Source, names[i], s.Problem)
			}
		}
		less := cmpopts.SortSlices(func(a, b string) bool { return a < b })
		if diff := cmp.Diff(names[0], names[1], less); diff != "" || !strings.Contains(fmt.Sprint(names[0]), "it is a static pod") {
			return fmt.Errorf("API server and kubelet: %s", diff)
		}
		if !files.Pods().AsOf.IsZero() && len(files.Pods().Static) == 1 && files.Pods().Static[0] == "default/static-lab" {
			return nil
		}
		return fmt.Errorf("files: %+v", files.Pods())
	})
	same := cmp.Comparer(func(a, b resource.Quantity) bool { return a.Cmp(b) == 0 })
	if diff := cmp.Diff(both[0], both[1], same, cmpopts.IgnoreFields(kube.Pod{}, "Phase", "QoS")); diff != "" {
		t.Errorf("of one pod the API server and the kubelet say (-API +kubelet):\n%s", diff)
	}
	view := kube.Merge(api.Pods(), page.Pods(), files.Pods())
	for _, k := range view.All() {
		if (k.Pod.Protected() != "") != (k.Pod.Name == "static-lab") {
			t.Errorf("%s is protected: %q", k.Pod, k.Pod.Protected())
		}
		if _, err := evict.New(client, evict.Options{}).Evict(ctx, evict.Order{Pod: *k.Pod, Hard: true}); k.Pod.Name == "static-lab" && !errors.Is(err, evict.ErrProtected) || k.Pod.Name == "usual" && err != nil {
			t.Errorf("evict %s: %v", k.Pod, err)
		}
	}
	eventually(ctx, t, "both know that the pod is gone", func() error {
		for _, s := range []kube.Snapshot{api.Pods(), page.Pods()} {
			if len(s.Pods) != 1 || s.Pods[0].Name != "static-lab" {
				return fmt.Errorf("%+v", s)
			}
		}
		return nil
	})

	// The node's status follows the kubelet's start.
	eventually(ctx, t, "cleave allocatable agrees with the node and the kernel", func() error {
		var out, errOut bytes.Buffer
		cmd := exec.CommandContext(ctx, c.node.Cleave.Binary(), "allocatable", "-o", "json", "--config", c.node.Cleave.ConfigFile()) //nolint:gosec // our own
		cmd.Stdout, cmd.Stderr = &out, &errOut
		if err := cmd.Run(); err != nil {
			return fmt.Errorf("%w: %s", err, &errOut)
		}
		var r allocatable.Report
		if err := json.Unmarshal(out.Bytes(), &r); err != nil {
			return err
		}
		found := map[string]allocatable.Resource{}
		for _, res := range r.Resources {
			found[res.Name] = res
		}
		memory, storage, pods := found["memory"], found["ephemeral-storage"], r.Cgroups["pods"]
		switch {
		case memory.PublishedBytes == nil || *memory.PublishedBytes != memory.AllocatableBytes || memory.AllocatableBytes+484<<20 != memory.CapacityBytes:
			return fmt.Errorf("memory: %s", &out)
		case storage.PublishedBytes == nil || *storage.PublishedBytes != storage.AllocatableBytes || storage.CapacityBytes == 0:
			return fmt.Errorf("ephemeral storage: %s", &out)
		case pods.LimitBytes == nil || memory.EnforcedBytes == nil || int64(*pods.LimitBytes) > *memory.EnforcedBytes || *memory.EnforcedBytes-int64(*pods.LimitBytes) >= 64<<10:
			return fmt.Errorf("the pods' cgroup: %s", &out)
		case len(r.Resources) != 4:
			return fmt.Errorf("not one line for each of two disks: %s", &out)
		}
		for _, f := range r.Findings {
			if strings.Contains(f.Text, "publishes") || strings.Contains(f.Text, "pods' cgroup") {
				return fmt.Errorf("found %+v", f)
			}
		}
		return nil
	})
}

// page is what the kubelet has at /pods, asked as cleave does.
func (c *cluster) page(ctx context.Context) ([]byte, error) {
	s, err := kubelet.Reader{}.Find(ctx, kubelet.Choice{PID: c.kubelet.PID()})
	if err != nil {
		return nil, err
	}
	return kubeletapi.Client{}.Pods(ctx, s)
}
