package deputy

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/lab/pod"
)

// RestartsAfter is the annotation, with a slash and a container's name behind it, by
// which a container that has ended is started again after a duration. Without it is
// not: a kubelet would wait for 10 s, then longer and longer.
const RestartsAfter = "restarts-after.lab.cleave-cri.github.io"

const (
	// lookEvery is how often it is looked at a pod's containers.
	lookEvery = 500 * time.Millisecond
	// again is the rest after a call that failed: a runtime that is killed comes
	// back.
	again = 500 * time.Millisecond
)

// keeper runs the pods of a cluster.
type keeper struct {
	o       Options
	client  *pod.Client
	cluster *cluster
	group   *errgroup.Group
}

// life is one pod on its way.
type life struct {
	*keeper
	key  string
	spec *corev1.Pod
	pod  *pod.Pod
	// restarts counts starts of each container after the first, current is the id of
	// its newest instance, endedAt when that was seen to have ended.
	restarts map[string]int
	current  map[string]string
	endedAt  map[string]time.Time
	said     string
}

// pod runs a pod until it is deleted and gone, or ctx ends.
func (k *keeper) pod(ctx context.Context, key string) {
	spec := k.cluster.pod(key)
	if spec == nil {
		return
	}
	l := &life{keeper: k, key: key, spec: spec, restarts: map[string]int{}, current: map[string]string{}, endedAt: map[string]time.Time{}}
	for ctx.Err() == nil {
		now := k.cluster.pod(key)
		if now == nil || now.UID != spec.UID {
			return
		}
		wait := lookEvery
		if now.DeletionTimestamp != nil {
			if err := l.end(ctx, *now.DeletionGracePeriodSeconds); err == nil {
				k.cluster.remove(key, spec.UID)
				return
			} else {
				l.say(err)
				wait = again
			}
		} else if err := l.step(ctx); err != nil {
			l.say(err)
			wait = again
		}
		l.rest(ctx, wait)
	}
}

// rest waits for a while, or until the pod is told to go.
func (l *life) rest(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	before := l.terminating()
	for {
		news := l.cluster.changed()
		if l.terminating() != before {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
			return
		case <-news:
		}
	}
}

func (l *life) terminating() bool {
	p := l.cluster.pod(l.key)
	return p == nil || p.DeletionTimestamp != nil
}

// say writes to the deputy's log what could not be done, once.
func (l *life) say(err error) {
	if text := err.Error(); text != l.said {
		l.said = text
		fmt.Fprintf(os.Stderr, "%s pod %s: %s; trying again\n", time.Now().UTC().Format(time.RFC3339), l.key, text)
	}
}

func (l *life) uid() string { return string(l.spec.UID) }

// volumes is the folder of the pod's emptyDirs, logs that of its logs; both are
// named as the kubelet names them.
func (l *life) volumes() string {
	return filepath.Join(l.o.RootDir, "pods", l.uid(), "volumes", "kubernetes.io~empty-dir")
}

func (l *life) logs() string {
	return filepath.Join(l.o.PodLogsDir, fmt.Sprintf("%s_%s_%s", l.spec.Namespace, l.spec.Name, l.uid()))
}

func (l *life) labels(container string) map[string]string {
	out := map[string]string{"io.kubernetes.pod.name": l.spec.Name, "io.kubernetes.pod.namespace": l.spec.Namespace, "io.kubernetes.pod.uid": l.uid()}
	if container != "" {
		out["io.kubernetes.container.name"] = container
	}
	return out
}

// step does what is next for a pod that is to live.
func (l *life) step(ctx context.Context) error {
	if l.pod == nil {
		if err := l.begin(ctx); err != nil {
			return err
		}
	}
	states, err := l.states(ctx)
	if err != nil {
		return err
	}
	now := time.Now()
	for i := range l.spec.Spec.Containers {
		c := &l.spec.Spec.Containers[i]
		id, started := l.current[c.Name]
		if started && states[id] == runtimeapi.ContainerState_CONTAINER_RUNNING {
			continue
		}
		if started {
			if l.endedAt[c.Name].IsZero() {
				l.endedAt[c.Name] = now
			}
			after, err := time.ParseDuration(l.spec.Annotations[RestartsAfter+"/"+c.Name])
			if err != nil || now.Sub(l.endedAt[c.Name]) < after {
				continue
			}
			l.restarts[c.Name]++
		}
		if err := l.start(ctx, c); err != nil {
			if started {
				l.restarts[c.Name]--
			}
			return err
		}
	}
	l.report(states)
	return nil
}

// begin makes the pod's folders and its sandbox.
func (l *life) begin(ctx context.Context) error {
	dirs := []string{l.logs()}
	for _, v := range l.spec.Spec.Volumes {
		if v.EmptyDir != nil {
			dirs = append(dirs, filepath.Join(l.volumes(), v.Name))
		}
	}
	for _, c := range l.spec.Spec.Containers {
		dirs = append(dirs, filepath.Join(l.logs(), c.Name))
	}
	for _, dir := range dirs {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("make its folders: %w", err)
		}
	}
	p, err := l.client.Run(ctx, pod.Spec{
		Name: l.spec.Name, Namespace: l.spec.Namespace, UID: l.uid(), CgroupParent: l.o.CgroupParent, LogDir: l.logs(), Labels: l.labels(""),
	})
	if err != nil {
		return err
	}
	l.pod = p
	return nil
}

// states are those of the pod's containers, by id.
func (l *life) states(ctx context.Context) (map[string]runtimeapi.ContainerState, error) {
	answer, err := l.client.Runtime.ListContainers(ctx, &runtimeapi.ListContainersRequest{Filter: &runtimeapi.ContainerFilter{PodSandboxId: l.pod.ID}})
	if err != nil {
		return nil, fmt.Errorf("list its containers: %w", err)
	}
	out := map[string]runtimeapi.ContainerState{}
	for _, c := range answer.GetContainers() {
		out[c.GetId()] = c.GetState()
	}
	return out, nil
}

// start makes and starts a container, after its image is there.
func (l *life) start(ctx context.Context, c *corev1.Container) error {
	answer, err := l.client.Images.ImageStatus(ctx, &runtimeapi.ImageStatusRequest{Image: &runtimeapi.ImageSpec{Image: c.Image}})
	if err != nil {
		return fmt.Errorf("look for image %s: %w", c.Image, err)
	}
	if answer.GetImage() == nil {
		if _, err := l.client.Pull(ctx, c.Image); err != nil {
			return err
		}
	}
	env := map[string]string{}
	for _, v := range c.Env {
		env[v.Name] = v.Value
	}
	attempt := l.restarts[c.Name]
	id, err := l.pod.Start(ctx, pod.ContainerSpec{
		Name: c.Name, Image: c.Image, Command: c.Command, Args: c.Args, Env: env, Labels: l.labels(c.Name), Mounts: l.mounts(c),
		Annotations: map[string]string{"io.kubernetes.container.restartCount": strconv.Itoa(attempt)},
		Edit: func(config *runtimeapi.ContainerConfig) {
			config.LogPath = filepath.Join(c.Name, strconv.Itoa(attempt)+".log")
		},
	})
	if err != nil {
		return err
	}
	l.current[c.Name] = id
	delete(l.endedAt, c.Name)
	return nil
}

func (l *life) mounts(c *corev1.Container) []*runtimeapi.Mount {
	var out []*runtimeapi.Mount
	for _, m := range c.VolumeMounts {
		for _, v := range l.spec.Spec.Volumes {
			switch {
			case v.Name != m.Name:
			case v.EmptyDir != nil:
				out = append(out, &runtimeapi.Mount{ContainerPath: m.MountPath, HostPath: filepath.Join(l.volumes(), v.Name), Readonly: m.ReadOnly})
			case v.HostPath != nil:
				out = append(out, &runtimeapi.Mount{ContainerPath: m.MountPath, HostPath: v.HostPath.Path, Readonly: m.ReadOnly})
			}
		}
	}
	return out
}

// report writes the pod's status, if it is news.
func (l *life) report(states map[string]runtimeapi.ContainerState) {
	var list []corev1.ContainerStatus
	running, ended := 0, 0
	for _, c := range l.spec.Spec.Containers {
		s := corev1.ContainerStatus{Name: c.Name, Image: c.Image, ContainerID: "containerd://" + l.current[c.Name], RestartCount: int32(l.restarts[c.Name])} //nolint:gosec // a small number
		switch {
		case states[l.current[c.Name]] == runtimeapi.ContainerState_CONTAINER_RUNNING, l.endedAt[c.Name].IsZero():
			running++
			s.Ready, s.State.Running = true, &corev1.ContainerStateRunning{}
		default:
			ended++
			s.State.Terminated = &corev1.ContainerStateTerminated{FinishedAt: metav1.NewTime(l.endedAt[c.Name].Truncate(time.Second))}
		}
		list = append(list, s)
	}
	phase := corev1.PodRunning
	if running == 0 && ended > 0 && !l.comesBack() {
		phase = corev1.PodSucceeded
	}
	now := l.cluster.pod(l.key)
	if now == nil || now.Status.Phase == phase && sameStatuses(now.Status.ContainerStatuses, list) {
		return
	}
	l.cluster.update(l.key, l.spec.UID, func(p *corev1.Pod) {
		p.Status.Phase, p.Status.ContainerStatuses = phase, list
		if p.Status.StartTime == nil {
			began := metav1.Now()
			p.Status.StartTime = &began
		}
	})
}

// comesBack says whether any container is started again.
func (l *life) comesBack() bool {
	for _, c := range l.spec.Spec.Containers {
		if l.spec.Annotations[RestartsAfter+"/"+c.Name] != "" {
			return true
		}
	}
	return false
}

func sameStatuses(a, b []corev1.ContainerStatus) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i].ContainerID != b[i].ContainerID || a[i].Ready != b[i].Ready || a[i].RestartCount != b[i].RestartCount {
			return false
		}
	}
	return true
}

// end ends the pod and takes away what it had, in the kubelet's order: containers,
// sandbox, volumes, logs.
func (l *life) end(ctx context.Context, graceSeconds int64) error {
	if l.pod != nil {
		for _, id := range l.current {
			// One that is gone is no error to CRI.
			if _, err := l.client.Runtime.StopContainer(ctx, &runtimeapi.StopContainerRequest{ContainerId: id, Timeout: graceSeconds}); err != nil {
				return fmt.Errorf("stop a container: %w", err)
			}
		}
		if err := l.pod.Remove(ctx); err != nil {
			return err
		}
	}
	for _, dir := range []string{filepath.Join(l.o.RootDir, "pods", l.uid()), l.logs()} {
		if err := removeBelow(dir); err != nil {
			return fmt.Errorf("remove what the pod had: %w", err)
		}
	}
	return nil
}

// removeBelow removes a folder of the deputy's own, without leaving its parent.
func removeBelow(dir string) error {
	parent, err := os.OpenRoot(filepath.Dir(dir))
	if os.IsNotExist(err) {
		return nil
	}
	if err != nil {
		return err
	}
	err = parent.RemoveAll(filepath.Base(dir))
	if closed := parent.Close(); err == nil {
		err = closed
	}
	return err
}
