package kubeletoracle

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	statsapi "k8s.io/kubelet/pkg/apis/stats/v1alpha1"
	"k8s.io/kubernetes/pkg/features"
	"k8s.io/kubernetes/pkg/kubelet/eviction"
	evictionapi "k8s.io/kubernetes/pkg/kubelet/eviction/api"
	"k8s.io/kubernetes/pkg/kubelet/lifecycle"
	"k8s.io/utils/clock"

	"github.com/cleave-cri/cleave/engine"
)

// pass is what the kubelet did in one pass of its loop.
type pass struct {
	at time.Time
	// resource is what the node's event says is short.
	resource string
	reclaim  []engine.Reclaim
	// order are the pods as the kubelet left them: ranked, if it came to that.
	order []*corev1.Pod
	kills []kill
}

// kill is one pod that the kubelet evicted.
type kill struct {
	uid         string
	grace       int64
	message     string
	annotations map[string]string
	status      corev1.PodStatus
}

// kubelet is the kubelet's eviction manager in the world of a scenario. All of
// its methods are called by the manager's one goroutine, while the test waits.
type kubelet struct {
	manager eviction.Manager
	admit   lifecycle.PodAdmitHandler
	ctx     context.Context //nolint:containedctx // the manager's, for as long as it runs
	// made are pods that were not made up here, by UID.
	made map[string]*corev1.Pod

	step     step
	passes   int
	measured int
	did      pass
	killedAt time.Time
	cleanUp  time.Duration
}

var (
	_ eviction.DiskInfoProvider = (*kubelet)(nil)
	_ eviction.ImageGC          = (*kubelet)(nil)
	_ eviction.ContainerGC      = (*kubelet)(nil)
	_ record.EventRecorder      = (*kubelet)(nil)
)

// gates sets the kubelet's feature gates.
func gates(sc *scenario) error {
	// The second gate asks for a chain of others that are on by default.
	return utilfeature.DefaultMutableFeatureGate.SetFromMap(map[string]bool{
		string(features.KubeletSeparateDiskGC):                        !sc.NoSeparateDiskGC,
		string(features.InPlacePodVerticalScalingMemoryBackedVolumes): sc.MemoryByKernel,
	})
}

func newKubelet(ctx context.Context, sc *scenario, thresholds []evictionapi.Threshold) *kubelet {
	k := &kubelet{ctx: klog.NewContext(ctx, logr.Discard()), made: sc.made}
	k.manager, k.admit = eviction.NewManager(k, eviction.Config{
		PressureTransitionPeriod: sc.TransitionPeriod,
		MaxPodGracePeriodSeconds: sc.MaxPodGraceSeconds,
		Thresholds:               thresholds,
	}, k.kill, k, k, k, &corev1.ObjectReference{Kind: "Node", Name: "node"}, clock.RealClock{}, sc.LimitIsolation)
	return k
}

// start begins the loop with a first step.
func (k *kubelet) start(first step) {
	k.step = first
	k.manager.Start(k.ctx, k, k.pods, k.cleanedUp, interval)
}

// begin is called by whatever the manager does first in a pass.
func (k *kubelet) begin() {
	if k.did.at.IsZero() {
		k.passes++
		k.did.at = time.Now()
	}
}

func (k *kubelet) HasDedicatedImageFs(context.Context) (bool, error) {
	k.begin()
	if k.step.Layout == nil {
		return false, errors.New("not now")
	}
	return k.step.Layout.ImageApart, nil
}

func (k *kubelet) HasDedicatedContainerFs(context.Context) (bool, error) {
	if !k.step.Layout.ContainerApart {
		return false, errors.New("no label for imagefs") // what containerd's users see
	}
	return true, nil
}

func (k *kubelet) pods() []*corev1.Pod {
	k.begin()
	for i := range k.step.Pods {
		p := k.made[k.step.Pods[i].UID].DeepCopy()
		if p == nil {
			p = kubeletPod(&k.step.Pods[i])
		}
		k.did.order = append(k.did.order, p)
	}
	return k.did.order
}

func (k *kubelet) Get(_ context.Context, update bool) (*statsapi.Summary, error) {
	if !update {
		return nil, errors.New("the loop always asks for new figures")
	}
	k.measured++
	figures := k.step.Summary
	if k.measured > 1 {
		figures = k.step.After
	}
	if figures == nil {
		return nil, errors.New("no figures")
	}
	return kubeletSummary(figures), nil
}

func (k *kubelet) GetCPUAndMemoryStats(context.Context) (*statsapi.Summary, error) {
	return nil, errors.New("not asked for")
}

func (k *kubelet) DeleteUnusedImages(context.Context) error {
	k.did.reclaim = append(k.did.reclaim, engine.UnusedImages)
	return errors.New("as if one image could not be removed") // REC-4: no matter
}

func (k *kubelet) DeleteAllUnusedContainers(context.Context) error {
	k.did.reclaim = append(k.did.reclaim, engine.DeadContainers)
	return errors.New("as if the runtime had refused")
}

func (k *kubelet) kill(pod *corev1.Pod, evicted bool, grace *int64, change func(*corev1.PodStatus)) error {
	if !evicted {
		return errors.New("not an eviction")
	}
	last := &k.did.kills[len(k.did.kills)-1] // its event came first
	last.uid, last.grace = string(pod.UID), *grace
	change(&last.status)
	k.killedAt, k.cleanUp = time.Now(), k.step.CleanUp
	return errors.New("as if it had not ended in time") // SYN-35: it counts all the same
}

func (k *kubelet) cleanedUp(*corev1.Pod) bool { return time.Since(k.killedAt) >= k.cleanUp }

func (k *kubelet) Event(runtime.Object, string, string, string) {}

func (k *kubelet) Eventf(_ runtime.Object, _, _, _ string, args ...any) {
	k.did.resource = fmt.Sprint(args...)
}

func (k *kubelet) AnnotatedEventf(_ runtime.Object, annotations map[string]string, _, _, _ string, args ...any) {
	k.did.kills = append(k.did.kills, kill{message: fmt.Sprint(args...), annotations: annotations})
}

// conditions are what the kubelet tells the node's status.
func (k *kubelet) conditions() []engine.Condition {
	var out []engine.Condition
	if k.manager.IsUnderMemoryPressure() {
		out = append(out, engine.MemoryPressure)
	}
	if k.manager.IsUnderDiskPressure() {
		out = append(out, engine.DiskPressure)
	}
	if k.manager.IsUnderPIDPressure() {
		out = append(out, engine.PIDPressure)
	}
	return out
}

// admits asks the kubelet whether a newcomer may start.
func (k *kubelet) admits(n *newcomer) bool {
	pod := kubeletPod(&n.Pod)
	pod.Status.QOSClass = corev1.PodQOSBurstable
	if n.BestEffort {
		pod.Status.QOSClass = corev1.PodQOSBestEffort
	}
	pod.Spec.Tolerations = []corev1.Toleration{{Key: corev1.TaintNodeDiskPressure, Operator: corev1.TolerationOpExists}}
	if n.Tolerates {
		pod.Spec.Tolerations = append(pod.Spec.Tolerations, corev1.Toleration{
			Key: corev1.TaintNodeMemoryPressure, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule,
		})
	}
	return k.admit.Admit(k.ctx, &lifecycle.PodAdmitAttributes{Pod: pod}).Admit
}
