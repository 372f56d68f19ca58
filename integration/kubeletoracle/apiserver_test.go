package kubeletoracle

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/cleave-cri/cleave/agent/decide"
	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/integration/toolchain/bin"
	"github.com/cleave-cri/cleave/kube"
	"github.com/cleave-cri/cleave/lab/janitor"
	lab "github.com/cleave-cri/cleave/lab/kube"
	"github.com/cleave-cri/cleave/lab/need"
)

func TestMain(m *testing.M) {
	janitor.Main()
	os.Exit(m.Run())
}

const (
	// apiPods is how many pods are made, apiPasses how many passes they are compared in, and perPass how many are there in one.
	apiPods, apiPasses, perPass = 600, 400, 60
	// apiPatience bounds what is waited for: far longer than it should take on a busy machine.
	apiPatience = 4 * time.Minute
)

// TestPodsOfAnAPIServer takes random pods through a real API server, which fills in what they leave unsaid. The kubelet's code gets
// the objects as the server gives them out; the engine gets what kube.Watch reads of them and agent/decide makes of that. In every
// pass both rank them alike, pick the same, and find the same ones above their limits.
func TestPodsOfAnAPIServer(t *testing.T) {
	need.Root(t)
	run := need.Lab(t)
	ctx, cancel := context.WithTimeout(t.Context(), apiPatience)
	defer cancel()
	paths, err := bin.Get(ctx, os.Stderr, "apiserver", "etcd")
	if err != nil {
		t.Fatal(err)
	}
	plane, err := lab.StartControlPlane(ctx, lab.ControlPlaneOptions{Dir: filepath.Join(run.Dir(), "plane"), APIServer: paths[0], Etcd: paths[1], Env: run.Env()})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), apiPatience)
		defer cancel()
		if err := plane.Close(ctx); err != nil {
			t.Error(err)
		}
	}()
	d := dice{rand.New(rand.NewPCG(*seed, 8))}
	quiet := plane.REST()
	quiet.QPS, quiet.WarningHandler = -1, rest.NoWarnings{} // it warns about fractions of bytes
	admin, err := kubernetes.NewForConfig(quiet)
	if err != nil {
		t.Fatal(err)
	}
	made := createPods(ctx, t, admin, d)
	ours := watchPods(ctx, t, plane, len(made))
	done, queue := tally{}, []engine.Pod(nil)
	for number := *seed; done.steps < apiPasses; number++ {
		sc := newScenario(number)
		sc.made = made
		layout := engine.Detected{ImageApart: d.chance(60), ContainerApart: d.chance(40)}
		for i := range sc.Steps {
			st := &sc.Steps[i]
			if st.Layout != nil {
				st.Layout = &layout
			}
			if len(queue) < perPass { // each its turn
				d.Shuffle(len(ours), func(a, b int) { ours[a], ours[b] = ours[b], ours[a] })
				queue = ours
			}
			st.Pods, queue = slices.Clone(queue[:perPass]), queue[perPass:]
			if done.steps == 0 && i == 1 {
				st.Pods = slices.Clone(ours) // all at once
			}
			now := time.Date(2000, 1, 1, 0, 0, 10*i+1, 0, time.UTC)
			st.Summary = d.summary(now, st.Pods, 40)
			if st.Summary != nil && d.chance(80) {
				withinLimits(st.Summary, st.Pods)
			}
		}
		if difference := play(t, &sc, &done); difference != "" {
			t.Fatalf("kubelet and engine differ in scenario %d of -seed %d: %s", number, *seed, difference)
		}
	}
	for name, count := range map[string]int{"evictions": done.evictions, "evictions over a limit": done.limits} {
		if count < 20 {
			t.Errorf("only %d %s in %d passes: they no longer show anything", count, name, done.steps)
		}
	}
	least := done.steps
	for uid, p := range made {
		if n := done.ranked[uid]; n < 1 {
			t.Errorf("pod %s was never ranked", p.Name)
		} else {
			least = min(least, n)
		}
	}
	t.Logf("%d pods in %d passes: %d evictions, %d passes with pods above limits, each pod ranked %d times at least", len(made), done.steps, done.evictions, done.limits, least)
}

// withinLimits lets pods with a limit use nothing: one above its limit ends the pass before pods are ranked.
func withinLimits(s *engine.Summary, pods []engine.Pod) {
	limited := map[string]bool{}
	for i := range pods {
		p := &pods[i]
		limited[p.UID] = p.Limit() != nil || slices.ContainsFunc(p.Volumes, func(v engine.Volume) bool { return v.SizeLimit != nil }) ||
			slices.ContainsFunc(slices.Concat(p.Containers, p.InitContainers), func(c engine.Container) bool { return c.Limits.EphemeralStorage != nil })
	}
	for i := range s.Pods {
		p := &s.Pods[i]
		if !limited[p.UID] {
			continue
		}
		p.EphemeralStorage = nil
		for j := range p.Containers {
			p.Containers[j].RootFS, p.Containers[j].Logs = nil, nil
		}
		for j := range p.Volumes {
			p.Volumes[j].UsedBytes = ptr[uint64](0)
		}
	}
}

// createPods makes the pods and returns them as the API server has them, by UID.
func createPods(ctx context.Context, t *testing.T, client kubernetes.Interface, d dice) map[string]*corev1.Pod {
	t.Helper()
	for name, value := range map[string]int32{"less": -5, "more": 100, "most": 1_000_000_000} {
		class := &schedulingv1.PriorityClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Value: value}
		if _, err := client.SchedulingV1().PriorityClasses().Create(ctx, class, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	for name, overhead := range map[string]corev1.ResourceList{
		"both":   {corev1.ResourceEphemeralStorage: resource.MustParse("1Gi"), corev1.ResourceMemory: resource.MustParse("100Mi")},
		"disk":   {corev1.ResourceEphemeralStorage: resource.MustParse("512Mi")},
		"memory": {corev1.ResourceMemory: resource.MustParse("1Gi")},
		"none":   {},
	} {
		class := &nodev1.RuntimeClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Handler: "runc", Overhead: &nodev1.Overhead{PodFixed: overhead}}
		if _, err := client.NodeV1().RuntimeClasses().Create(ctx, class, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	count := map[string]int{}
	for i := range apiPods {
		pod := d.apiPod(i)
		if _, err := client.CoreV1().Pods("default").Create(ctx, pod, metav1.CreateOptions{}); err != nil {
			t.Fatalf("create %s: %v", text(t, pod), err)
		}
	}
	list, err := client.CoreV1().Pods("").List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + lab.NodeName})
	if err != nil {
		t.Fatal(err)
	}
	made := map[string]*corev1.Pod{}
	for i := range list.Items {
		p := &list.Items[i]
		made[string(p.UID)] = p
		for what, so := range map[string]bool{
			"pods with a priority": p.Spec.Priority != nil && *p.Spec.Priority != 0, "pods with overhead": len(p.Spec.Overhead) > 0,
			"pods with resources at pod level": p.Spec.Resources != nil, "pods with init containers": len(p.Spec.InitContainers) > 0,
			"pods with a sidecar": strings.Contains(text(t, p.Spec.InitContainers), "Always"), "pods with a limit": strings.Contains(text(t, p.Spec.Containers), "limits"),
			"critical pods": p.Spec.Priority != nil && *p.Spec.Priority >= engine.SystemCritical,
		} {
			if so {
				count[what]++
			}
		}
	}
	if len(count) != 7 || len(made) != apiPods {
		t.Fatalf("%d pods, %v", len(made), count)
	}
	for what, n := range count {
		if n < 10 {
			t.Errorf("only %d %s", n, what)
		}
	}
	return made
}

// watchPods are the pods as cleave knows them.
func watchPods(ctx context.Context, t *testing.T, plane *lab.ControlPlane, want int) []engine.Pod {
	t.Helper()
	client, err := kube.NewClientFor(plane.REST(), lab.NodeName, true)
	if err != nil {
		t.Fatal(err)
	}
	source := kube.NewWatch(client)
	watching, stop := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = source.Run(watching) //nolint:errcheck // the context's
	}()
	defer func() { stop(); <-ended }()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		snapshot := source.Pods()
		pods, left := decide.Pods(kube.Merge(snapshot), time.Now(), apiPatience)
		if len(pods) == want && len(left) == 0 {
			return pods
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("%d pods are known of %d; left out: %q; %s", len(pods), want, left, snapshot.Problem)
		}
	}
}

// apiPod is a pod that an API server takes.
func (d dice) apiPod(i int) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("pod-%03d", i)},
		Spec: corev1.PodSpec{
			NodeName: lab.NodeName, TerminationGracePeriodSeconds: maybe(d, 30, pick[int64](d, 1, 30, 300)),
			PriorityClassName: pick(d, "", "", "less", "more", "more", "most"),
		},
	}
	if d.chance(4) {
		p.Spec.PriorityClassName = pick(d, "system-node-critical", "system-cluster-critical")
	}
	if d.chance(25) {
		p.Spec.RuntimeClassName = maybe(d, 0, pick(d, "both", "disk", "memory", "none"))
	}
	podLevel, limits := d.chance(25), d.chance(30)
	for j := range 1 + d.IntN(3) {
		p.Spec.Containers = append(p.Spec.Containers, d.apiContainer(fmt.Sprintf("c%d", j), limits, podLevel))
	}
	for j := range d.IntN(4) {
		c := d.apiContainer(fmt.Sprintf("i%d", j), limits, podLevel)
		if d.chance(50) {
			always := corev1.ContainerRestartPolicyAlways
			c.RestartPolicy = &always
		}
		p.Spec.InitContainers = append(p.Spec.InitContainers, c)
	}
	if podLevel {
		r := &corev1.ResourceRequirements{Requests: corev1.ResourceList{}, Limits: corev1.ResourceList{}}
		if d.chance(60) { // more than all of them together
			r.Requests[corev1.ResourceMemory] = resource.MustParse(pick(d, "10Gi", "16Gi", "20Gi"))
		}
		if d.chance(30) {
			r.Limits[corev1.ResourceMemory] = resource.MustParse(pick(d, "20Gi", "40Gi"))
		}
		if d.chance(50) || len(r.Requests)+len(r.Limits) == 0 {
			r.Limits[corev1.ResourceCPU] = resource.MustParse("2")
		}
		p.Spec.Resources = r
	}
	for j := range d.IntN(5) {
		v := corev1.Volume{Name: fmt.Sprintf("v%d", j)}
		size := func() *resource.Quantity {
			if d.chance(70) {
				return nil
			}
			return quantity(pick(d, "0", "1Gi", "100Gi", "1536Mi"))
		}
		switch d.IntN(10) {
		case 0, 1, 2:
			v.EmptyDir = &corev1.EmptyDirVolumeSource{SizeLimit: size()}
		case 3:
			v.EmptyDir = &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumMemory, SizeLimit: size()}
		case 4:
			v.ConfigMap = &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: "c"}}
		case 5:
			v.GitRepo = &corev1.GitRepoVolumeSource{Repository: "git.invalid"}
		case 6, 7:
			v.HostPath = &corev1.HostPathVolumeSource{Path: "/srv"}
		case 8:
			v.Secret = &corev1.SecretVolumeSource{SecretName: "s"}
		default:
			v.Projected = &corev1.ProjectedVolumeSource{}
		}
		p.Spec.Volumes = append(p.Spec.Volumes, v)
	}
	return p
}

// apiContainer is a container. small says that what it requests has to fit into what the pod does.
func (d dice) apiContainer(name string, limited, small bool) corev1.Container {
	c := corev1.Container{Name: name, Image: "none", Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{}, Limits: corev1.ResourceList{}}}
	amount := func(what corev1.ResourceName) *resource.Quantity {
		if small && what == corev1.ResourceMemory {
			return maybe(d, 40, resource.MustParse(pick(d, "0", "1Gi", "512Mi", "1", "1073741825")))
		}
		return d.amount(50)
	}
	for _, what := range []corev1.ResourceName{corev1.ResourceEphemeralStorage, corev1.ResourceMemory} {
		request, limit := amount(what), (*resource.Quantity)(nil)
		if limited {
			limit = amount(what)
		}
		if limited && what == corev1.ResourceEphemeralStorage && d.chance(60) {
			limit = quantity("9223372036854775807") // or every pass would end with limits
		}
		if request != nil && limit != nil && request.Cmp(*limit) > 0 {
			request, limit = limit, request
		}
		if request != nil {
			c.Resources.Requests[what] = *request
		}
		if limit != nil {
			c.Resources.Limits[what] = *limit
		}
	}
	return c
}
