package inside

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cleave-cri/cleave/agent"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/lab/guestnode"
)

// kubernetesEnv is set where the node has Kubernetes on it too.
const kubernetesEnv = "CLEAVE_INSIDE_KUBERNETES"

// Answers that callers tell apart.
var (
	errNotFound = errors.New("not found")
	errExists   = errors.New("there already")
)

// ask calls the API server or the kubelet and reads its answer into a value, if there is one to read it into.
func ask(ctx context.Context, method, url string, send, answer any) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	var body io.Reader
	if send != nil {
		content, err := json.Marshal(send)
		if err != nil {
			return err
		}
		body = bytes.NewReader(content)
	}
	request, err := http.NewRequestWithContext(ctx, method, url, body)
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Authorization", "Bearer "+guestnode.Token)
	client := http.Client{Transport: &http.Transport{
		TLSClientConfig:   &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // both made their own certificates, here, a minute ago
		DisableKeepAlives: true,
	}}
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close() //nolint:errcheck // only read
	content, err := io.ReadAll(response.Body)
	switch {
	case err != nil:
		return err
	case response.StatusCode == http.StatusNotFound:
		return fmt.Errorf("%s %s: %w: %s", method, url, errNotFound, content)
	case response.StatusCode == http.StatusConflict:
		return fmt.Errorf("%s %s: %w: %s", method, url, errExists, content)
	case response.StatusCode >= 300:
		return fmt.Errorf("%s %s: %s: %s", method, url, response.Status, content)
	case answer == nil:
		return nil
	}
	return json.Unmarshal(content, answer)
}

type object = map[string]any

// TestKubelet is a course over a node with a kubelet: a pod of the API server runs through cleave under the systemd driver,
// and in the kubelet's summary images are on one disk and the container's writable layer on the other. (The summary's
// containerFs is the images' disk: without its feature gate the kubelet asks only CRI-O's endpoint for another.) The kernel
// keeps the writable layer below the limit that the pod's specification has for the container.
func TestKubelet(t *testing.T) {
	inGuest(t)
	if os.Getenv(kubernetesEnv) != "1" {
		t.Skip("the node has no Kubernetes: the host's TestKubelet boots one that has")
	}
	waitForImages(t, cleaveSocket)
	eventually(t, "the node is registered", func() error {
		return ask(t.Context(), http.MethodGet, guestnode.APIServerURL+"/api/v1/nodes/"+guestnode.NodeName, nil, nil)
	})
	const pods = guestnode.APIServerURL + "/api/v1/namespaces/default/pods"
	pod := object{
		"apiVersion": "v1", "kind": "Pod",
		"metadata": object{"name": "course"},
		"spec": object{
			"nodeName": guestnode.NodeName, "hostNetwork": true, "terminationGracePeriodSeconds": 1,
			"containers": []object{{
				"name": "main", "image": guestnode.BusyboxImage, "imagePullPolicy": "Never",
				"command":   []string{"/bin/sh", "-c", "dd if=/dev/zero of=/written bs=65536 count=128; exec sleep 86400"},
				"resources": object{"limits": object{"memory": "64Mi", "ephemeral-storage": fmt.Sprint(layerLimitBytes)}},
			}},
		},
	}
	// A new API server makes the namespace a moment after it answers.
	eventually(t, "the API server takes a pod", func() error {
		if err := ask(t.Context(), http.MethodPost, pods, pod, nil); !errors.Is(err, errExists) {
			return err
		}
		return nil
	})
	var container string
	eventually(t, "the pod runs", func() error {
		var pod struct {
			Status struct {
				Phase             string
				ContainerStatuses []struct{ ContainerID string }
			}
		}
		if err := ask(t.Context(), http.MethodGet, pods+"/course", nil, &pod); err != nil {
			return err
		}
		if pod.Status.Phase != "Running" || len(pod.Status.ContainerStatuses) != 1 {
			return fmt.Errorf("it is %+v", pod.Status)
		}
		container = strings.TrimPrefix(pod.Status.ContainerStatuses[0].ContainerID, "containerd://")
		return nil
	})
	// The systemd driver: slices below slices.
	cgroups, err := filepath.Glob("/sys/fs/cgroup/kubepods.slice/kubepods-*.slice/kubepods-*-pod*.slice/cri-containerd-" + container + ".scope")
	if err != nil || len(cgroups) != 1 {
		t.Fatalf("the container's cgroups are %v, %v", cgroups, err)
	}
	if got := read(t, filepath.Join(cgroups[0], "memory.max")); got != "67108864" {
		t.Errorf("its memory.max is %s", got)
	}
	eventually(t, "the kubelet's summary", func() error {
		type filesystem struct{ CapacityBytes, UsedBytes uint64 }
		var summary struct {
			Node struct {
				Runtime struct{ ImageFs filesystem }
			}
			Pods []struct {
				PodRef     struct{ Name string }
				Containers []struct{ Rootfs filesystem }
			}
		}
		if err := ask(t.Context(), http.MethodGet, guestnode.KubeletURL+"/stats/summary", nil, &summary); err != nil {
			return err
		}
		for _, p := range summary.Pods {
			if p.PodRef.Name != "course" || len(p.Containers) != 1 || p.Containers[0].Rootfs.UsedBytes < 8<<20 {
				continue
			}
			images, layer := summary.Node.Runtime.ImageFs.CapacityBytes, p.Containers[0].Rootfs.CapacityBytes
			if images != capacity(t, "/mnt/images") || layer != capacity(t, "/mnt/containers") {
				return fmt.Errorf("images are on a disk of %d bytes, the layer on one of %d", images, layer)
			}
			return nil
		}
		return fmt.Errorf("it has %+v", summary)
	})
	eventually(t, "the container's layer has its limit", func() error {
		s, err := agent.FetchStatus(t.Context(), config.Default().Control.Endpoint.Path())
		if err == nil && (s.Limits == nil || s.Limits.Limited != 1 || s.Limits.Problem != "") {
			err = fmt.Errorf("it is %+v", s.Limits)
		}
		return err
	})
	crictlPod{container: container}.isHeld(t)
	if err := ask(t.Context(), http.MethodDelete, pods+"/course", nil, nil); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the pod goes away", func() error {
		switch err := ask(t.Context(), http.MethodGet, pods+"/course", nil, nil); {
		case errors.Is(err, errNotFound):
			return nil
		case err != nil:
			return err
		}
		return errors.New("it is still there")
	})
	if _, err := os.Stat(cgroups[0]); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its cgroup is still there: %v", err)
	}
}

func capacity(t *testing.T, path string) uint64 {
	t.Helper()
	var fs syscall.Statfs_t
	if err := syscall.Statfs(path, &fs); err != nil {
		t.Fatal(err)
	}
	return fs.Blocks * uint64(fs.Frsize)
}
