package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/lab/pod"
	"github.com/cleave-cri/cleave/lab/scenario"
)

// reference is the name by which an image of the scenario is pulled.
func reference(image string) string { return "registry.example/demo/" + image + ":1" }

// workload is a pod with one container that writes known amounts.
type workload struct {
	name, image string
	// dataMiB go into one file of the writable layer, and files small ones.
	dataMiB, files int
	// volumeMiB go into an emptyDir.
	volumeMiB int
	// logLines go to the log.
	logLines int
	// churn goes on for ever, creating and deleting files.
	churn bool
}

// logLineBytes is how long a line is that a workload logs.
const logLineBytes = 100

// workloads are the scenario's pods, as shells can play them.
func workloads(s *scenario.Scenario) ([]workload, error) {
	if s.Layout != (scenario.Layout{NodeFS: nodeDisk, ImageFS: imagesDisk, ContainerFS: nodeDisk}) {
		return nil, fmt.Errorf("the demo is about a filesystem %q for images and one %q for all else", imagesDisk, nodeDisk)
	}
	var out []workload
	for _, p := range s.Pods {
		if len(p.Containers) != 1 || len(p.Volumes) > 1 {
			return nil, fmt.Errorf("the demo's pods have one container and at most one volume, %s has others", p.Name)
		}
		w := workload{name: p.Name, image: reference(p.Containers[0].Image)}
		for _, write := range p.Containers[0].Writes {
			mebibytes := int(write.AtOnceBytes >> 20)
			switch write.To {
			case scenario.ToLayer:
				w.dataMiB, w.files, w.churn = mebibytes, int(write.AtOnceInodes), write.InodesPerSecond > 0
			case scenario.ToLog:
				w.logLines = int(write.AtOnceBytes / logLineBytes)
			default:
				w.volumeMiB = mebibytes
			}
		}
		out = append(out, w)
	}
	return out, nil
}

// doneFile appears in the writable layer when all is written.
const doneFile = "done"

// does says in a few words what the workload writes into its layer.
func (w workload) does() string {
	parts := []string{fmt.Sprintf("%d MiB", w.dataMiB)}
	if w.files > 0 {
		parts = append(parts, fmt.Sprintf("%d files", w.files))
	}
	if w.churn {
		parts = append(parts, "some come and go")
	}
	return strings.Join(parts, ", ")
}

// script is what the container runs.
func (w workload) script() string {
	lines := []string{
		// Allocated blocks are what is counted, so they must be allocated.
		fmt.Sprintf("dd if=/dev/zero of=/data bs=1M count=%d conv=fsync 2>/dev/null", w.dataMiB),
		fmt.Sprintf("mkdir /files; i=0; while [ $i -lt %d ]; do echo x >/files/$i; i=$((i+1)); done", w.files),
		fmt.Sprintf("yes $(printf %%0%dd 0) | head -n %d", logLineBytes-1, w.logLines),
	}
	if w.volumeMiB > 0 {
		lines = append(lines, fmt.Sprintf("dd if=/dev/zero of=/cache/data bs=1M count=%d conv=fsync 2>/dev/null", w.volumeMiB))
	}
	lines = append(lines, "echo >/"+doneFile)
	if w.churn {
		// Empty files, so that the figure in bytes stays; in the folder of many others, so that a walk which has read
		// the folder comes late to them; in two sets, so that there always are some which are about to go.
		lines = append(lines, "cd /files; a=$(seq 20 | sed 's/^/y/'); b=$(seq 20 | sed 's/^/z/')",
			"while :; do touch $a; rm -f $b; usleep 1000; touch $b; rm -f $a; usleep 1000; done")
	}
	return strings.Join(append(lines, "exec sleep 86400"), "\n")
}

// running is a workload's container.
type running struct {
	workload
	sandboxID, containerID string
	// upper is the folder of its writable layer, sandboxUpper that of the pod's pause container.
	upper, sandboxUpper string
	// logs and volumes are folders on the node's disk.
	logs, volumes string
}

// start pulls a workload's image and starts its pod.
func (l *look) start(ctx context.Context, w workload) (running, error) {
	r := running{workload: w}
	if _, err := l.through.Pull(ctx, w.image); err != nil {
		return r, err
	}
	spec, cfg := l.node.PodSpec(w.name), l.node.Cleave.Config().Filesystems
	spec.UID = "uid-" + w.name
	// By these crictl tells which pod a container is in.
	spec.Labels = map[string]string{"io.kubernetes.pod.name": w.name, "io.kubernetes.pod.namespace": "default"}
	// Logs are where a kubelet has them.
	spec.LogDir = filepath.Join(cfg.Logs, "default_"+w.name+"_"+spec.UID)
	r.logs, r.volumes = spec.LogDir, filepath.Join(cfg.NodeFS, "pods", spec.UID, "volumes")
	cache := filepath.Join(r.volumes, "kubernetes.io~empty-dir", "cache")
	for _, dir := range []string{filepath.Join(spec.LogDir, w.name), cache} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return r, fmt.Errorf("make the folders of pod %s: %w", w.name, err)
		}
	}
	p, err := l.through.Run(ctx, spec)
	if err != nil {
		return r, err
	}
	r.sandboxID = p.ID
	r.containerID, err = p.Start(ctx, pod.ContainerSpec{
		Name: w.name, Image: w.image, Command: []string{"/bin/sh", "-c", w.script()},
		Labels: spec.Labels,
		Mounts: []*runtimeapi.Mount{{ContainerPath: "/cache", HostPath: cache}},
		Edit:   func(c *runtimeapi.ContainerConfig) { c.LogPath = filepath.Join(w.name, "0.log") },
	})
	if err != nil {
		return r, err
	}
	if r.upper, err = l.node.Runtime.UpperOf(r.containerID); err != nil {
		return r, err
	}
	r.sandboxUpper, err = l.node.Runtime.UpperOf(r.sandboxID)
	return r, err
}

// waitWritten waits until a workload has written what it should.
func (l *look) waitWritten(ctx context.Context, r running) error {
	ctx, cancel := context.WithTimeout(ctx, writeLimit)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		if _, err := os.Stat(filepath.Join(r.upper, doneFile)); err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("wait until pod %s has written everything: %w", r.name, ctx.Err())
		}
	}
}

// randomText returns bytes that don't compress, the same every time.
func randomText(size int) string {
	content := make([]byte, size)
	_, _ = rand.NewChaCha8([32]byte{}).Read(content) //nolint:errcheck // never fails, says its documentation
	return string(content)
}
