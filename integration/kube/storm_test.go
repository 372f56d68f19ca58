package kube

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/cleave-cri/cleave/agent/decide"
	"github.com/cleave-cri/cleave/agent/keeper"
	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/record"
	"github.com/cleave-cri/cleave/kube"
	"github.com/cleave-cri/cleave/kube/evict"
)

// recreates takes the part of a controller: as long as no pod of it is on the node and stays, it makes one. It returns the UIDs of all
// that it has made.
func (c *cluster) recreates(t *testing.T, node string) (made func() []string) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var mu sync.Mutex
	var uids []string
	done := make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for {
			if uid, err := recreate(ctx, c.admin, node); err == nil && uid != "" {
				mu.Lock()
				uids = append(uids, uid)
				mu.Unlock()
			}
			select {
			case <-tick.C:
			case <-ctx.Done():
				return
			}
		}
	}()
	t.Cleanup(func() { cancel(); <-done })
	return func() []string {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(uids)
	}
}

// recreate makes a pod if there is none that stays; what could not be done is done the next time.
func recreate(ctx context.Context, admin kubernetes.Interface, node string) (uid string, _ error) {
	list, err := admin.CoreV1().Pods("default").List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + node})
	if err != nil || slices.ContainsFunc(list.Items, func(p corev1.Pod) bool { return p.DeletionTimestamp == nil }) {
		return "", err
	}
	yes := true
	pod, err := admin.CoreV1().Pods("default").Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "web-", OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "web", UID: "web", Controller: &yes}}},
		Spec:       corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "main", Image: "none"}}},
	}, metav1.CreateOptions{})
	if err != nil {
		return "", err
	}
	pod.Status.Phase = corev1.PodRunning
	_, err = admin.CoreV1().Pods("default").UpdateStatus(ctx, pod, metav1.UpdateOptions{})
	return string(pod.UID), err
}

// filled is a node on which each pod of the API server fills the disk to below its threshold, and nothing else does.
type filled struct {
	source  *kube.Watch
	evictor *evict.Evictor
	// maxAge is how old what is known of pods may be.
	maxAge atomic.Int64

	mu      sync.Mutex
	records []record.Record // guarded by mu; of all passes
}

const gib = int64(1) << 30

func (f *filled) figures(pods int) *engine.FSStats {
	available, size := uint64(max(0, 11*gib-2*gib*int64(pods))), uint64(100*gib) //nolint:gosec // not below zero
	return &engine.FSStats{Time: time.Now(), AvailableBytes: &available, CapacityBytes: &size}
}

func (f *filled) look(context.Context) (engine.Input, error) {
	view := kube.Merge(f.source.Pods())
	pods, _ := decide.Pods(view, time.Now(), time.Duration(f.maxAge.Load()))
	fs := f.figures(len(view.All()))
	in := engine.Input{Now: time.Now(), Layout: &engine.Detected{}, Summary: &engine.Summary{NodeFS: fs, ImageFS: fs, ContainerFS: fs}, Pods: pods}
	for _, p := range pods {
		used := uint64(2 * gib)
		layer := &engine.FSStats{Time: time.Now(), UsedBytes: &used}
		in.Summary.Pods = append(in.Summary.Pods, engine.PodStats{UID: p.UID, Containers: []engine.ContainerStats{{Name: "main", RootFS: layer}}, EphemeralStorage: layer})
	}
	return in, nil
}

func (f *filled) glance(ctx context.Context) (engine.Observations, error) {
	in, err := f.look(ctx)
	return in.Summary.Observe(), err
}

func (f *filled) passed(r record.Record) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.records = append(f.records, r)
}

func (f *filled) seen() []record.Record {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.records)
}

// Evict implements [keeper.Evictor].
func (f *filled) Evict(ctx context.Context, e engine.Eviction, hard bool) (*int64, error) {
	known, ok := kube.Merge(f.source.Pods()).Pod(e.UID, e.Namespace, e.Name)
	if !ok {
		return nil, errors.New("it is not known")
	}
	_, err := f.evictor.Evict(ctx, evict.Order{Pod: *known.Pod, Hard: hard})
	return nil, err
}

// keeper evicts on such a node, at most so many pods of an owner in an hour.
func (f *filled) keeper(ownerPerHour int) *keeper.Keeper {
	return keeper.New(keeper.Parts{
		Decider: "test", Look: f.look, Glance: f.glance, Evictor: f, Passed: f.passed, Log: zap.NewNop(),
		Config: func(engine.Input) (keeper.Setup, error) {
			return keeper.Setup{Config: engine.Config{
				Thresholds: []engine.Threshold{{Signal: engine.NodeFSAvailable, Value: engine.Value{Quantity: resource.NewQuantity(10*gib, resource.BinarySI)}}},
				Options:    engine.Cleave(), OwnerPerHour: ownerPerHour, BackOff: time.Millisecond, FreedWait: time.Second,
			}}, nil
		},
	})
}

// testStorm is T26: a controller makes each evicted pod anew at once. After as many as an owner may lose in an hour the next one stays,
// and the decision says why.
func (c *cluster) testStorm(t *testing.T) {
	t.Parallel()
	const node, most = "storm-node", 4
	client := c.full(t, node)
	c.ends(t, node)
	made := c.recreates(t, node)
	source, stop := watching(t, client)
	defer stop()
	f := &filled{source: source, evictor: evict.New(client, evict.Options{})}
	f.maxAge.Store(int64(time.Minute))
	k := f.keeper(most)
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { k.Run(ctx) })
	defer func() { cancel(); running.Wait() }()
	barred := func(r record.Record) bool { return r.Decision.NoVictim == "BreakStorms" }
	eventually(t, "the breaker trips and stays so", func(context.Context) error {
		var after int
		for _, r := range f.seen() {
			if barred(r) && r.Decision.Barred[0].Why == engine.OwnerPerHour {
				after++
			}
		}
		if after < 4 {
			return fmt.Errorf("%d passes say so; %d pods were made; %+v", after, len(made()), k.Status())
		}
		return nil
	})
	var evicted int
	for _, r := range f.seen() {
		evicted += len(r.Evicted)
		if barred(r) && evicted == most {
			b := r.Decision.Barred[0]
			if b.Owner != "ReplicaSet default/web" || b.Went != most || b.Until.Sub(r.Input.Now) < 50*time.Minute {
				t.Errorf("it says %+v", b)
			}
		}
	}
	uids := made()
	if evicted != most || len(uids) != most+1 {
		t.Fatalf("%d were evicted and %d made", evicted, len(uids))
	}
	list, err := c.admin.CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{FieldSelector: "spec.nodeName=" + node})
	if err != nil || len(list.Items) != 1 || string(list.Items[0].UID) != uids[most] || list.Items[0].DeletionTimestamp != nil {
		t.Errorf("left are %+v, %v", list.Items, err)
	}
}
