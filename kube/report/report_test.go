package report

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// fakeEvents remembers what it is told.
type fakeEvents struct {
	mu               sync.Mutex
	created, patched []eventsv1.Event // guarded by mu
	err              error            // guarded by mu
}

// told are the events so far.
func (f *fakeEvents) told() (created, patched []eventsv1.Event) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.created), slices.Clone(f.patched)
}

func (f *fakeEvents) fail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.err = err
}

func (f *fakeEvents) CreateEvent(_ context.Context, e *eventsv1.Event) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err == nil {
		f.created = append(f.created, *e)
	}
	return f.err
}

func (f *fakeEvents) PatchEvent(_ context.Context, e *eventsv1.Event) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err == nil {
		f.patched = append(f.patched, *e)
	}
	return f.err
}

// tell runs Events in a bubble of virtual time.
func tell(t *testing.T, use func(t *testing.T, e *Events, api *fakeEvents)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		api := &fakeEvents{}
		e := NewEvents(api, "node-1")
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- e.Run(ctx) }()
		use(t, e, api)
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("Run ended with %v", err)
		}
	})
}

// pass lets virtual time pass.
func pass(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

var web = &PodRef{Namespace: "shop", Name: "web", UID: "u"}

func TestEventsAreTold(t *testing.T) {
	t.Parallel()
	tell(t, func(t *testing.T, e *Events, api *fakeEvents) {
		e.Tell(Event{Reason: Evicting, Warning: true, Pod: web, Note: "0 of 10 Gi left"})
		e.Tell(Event{Reason: ImagesRemoved, Note: strings.Repeat("ä", 2000)})
		synctest.Wait()
		created, _ := api.told()
		if len(created) != 2 {
			t.Fatalf("created %+v", created)
		}
		pod, node := created[0], created[1]
		if pod.Namespace != "shop" || pod.Regarding.Kind != "Pod" || pod.Regarding.UID != "u" || pod.Type != "Warning" || pod.Reason != "DiskEvicting" || pod.Note != "0 of 10 Gi left" || pod.Series != nil {
			t.Errorf("on the pod: %+v", pod)
		}
		if node.Namespace != "default" || node.Regarding.Kind != "Node" || node.Regarding.Name != "node-1" || node.Type != "Normal" || len(node.Note) > 1024 || !strings.HasSuffix(node.Note, "…") {
			t.Errorf("on the node: %+v", node)
		}
		for reason, action := range actions {
			if action == "" {
				t.Errorf("%s has no action", reason)
			}
		}
	})
}

// TestEventsAreCounted: what happens again and again is one event, told once a minute at most; after a while it is a new one.
func TestEventsAreCounted(t *testing.T) {
	t.Parallel()
	tell(t, func(t *testing.T, e *Events, api *fakeEvents) {
		for range 30 { // 5 minutes
			e.Tell(Event{Reason: ThresholdMet, Warning: true, Note: "short"})
			pass(10 * time.Second)
		}
		created, patched := api.told()
		if len(created) != 1 || len(patched) < 3 || len(patched) > 5 {
			t.Fatalf("created %d, patched %d", len(created), len(patched))
		}
		pass(time.Minute)
		_, patched = api.told()
		if last := patched[len(patched)-1]; last.Series == nil || last.Series.Count != 30 || last.Name != created[0].Name {
			t.Errorf("in the end %+v", last)
		}
		pass(window)
		e.Tell(Event{Reason: ThresholdMet, Warning: true, Note: "short"})
		synctest.Wait()
		if created, _ = api.told(); len(created) != 2 || created[1].Name == created[0].Name {
			t.Errorf("created %d", len(created))
		}
	})
}

// TestEventsAreFew: a storm of different events does not become a storm at the API server, and what is dropped is counted.
func TestEventsAreFew(t *testing.T) {
	t.Parallel()
	tell(t, func(t *testing.T, e *Events, api *fakeEvents) {
		const storm = 2000
		for i := range storm {
			e.Tell(Event{Reason: Evicting, Pod: &PodRef{Namespace: "n", Name: fmt.Sprintf("p%d", i)}})
		}
		synctest.Wait()
		if created, _ := api.told(); len(created) > atOnce {
			t.Errorf("%d at once", len(created))
		}
		pass(time.Minute)
		if created, _ := api.told(); len(created) > atOnce+perMinute+1 {
			t.Errorf("%d within a minute", len(created))
		}
		pass(time.Hour)
		c := e.Counters()
		if created, _ := api.told(); len(created)+int(c.Dropped) != storm || c.Waiting != 0 || len(created) < maxWaiting {
			t.Errorf("%d told, %+v", len(created), c)
		}
	})
}

// TestEventsNobodyTakes: failures are counted and said, and end when the API server takes events again.
func TestEventsNobodyTakes(t *testing.T) {
	t.Parallel()
	tell(t, func(t *testing.T, e *Events, api *fakeEvents) {
		api.fail(errors.New("not allowed"))
		e.Tell(Event{Reason: Evicting, Pod: web})
		synctest.Wait()
		if c := e.Counters(); c.Failed != 1 || c.Waiting != 0 || !strings.Contains(c.Problem, "not allowed") {
			t.Errorf("%+v", c)
		}
		api.fail(nil)
		e.Tell(Event{Reason: Evicting, Pod: web})
		synctest.Wait()
		if created, _ := api.told(); e.Counters().Problem != "" || len(created) != 1 || created[0].Series != nil {
			t.Errorf("%+v, created %+v", e.Counters(), created)
		}
	})
}

// TestEventNames: a pod's name may be as long as the API allows.
func TestEventNames(t *testing.T) {
	t.Parallel()
	e := NewEvents(nil, strings.Repeat("n", 253))
	for _, name := range []string{strings.Repeat("p", 253), strings.Repeat("p", 235) + "." + strings.Repeat("q", 17)} {
		got := e.make(Event{Reason: Evicting, Pod: &PodRef{Namespace: "n", Name: name}}, time.Now())
		if len(got.Name) > 253 || strings.Contains(got.Name, "..") || len(got.ReportingInstance) > 128 {
			t.Errorf("name %q, instance %q", got.Name, got.ReportingInstance)
		}
	}
}

// fakeNode is a node at an API server that knows resource versions.
type fakeNode struct {
	node    corev1.Node
	err     error
	patches int
	// meanwhile happens before a patch of taints: somebody else's change.
	meanwhile func(*corev1.Node)
}

func (f *fakeNode) NodeObject(context.Context) (*corev1.Node, error) {
	return f.node.DeepCopy(), f.err
}

func (f *fakeNode) PatchCondition(_ context.Context, c corev1.NodeCondition) error {
	f.patches++
	if f.err != nil {
		return f.err
	}
	f.node.Status.Conditions = slices.DeleteFunc(f.node.Status.Conditions, func(old corev1.NodeCondition) bool { return old.Type == c.Type })
	f.node.Status.Conditions = append(f.node.Status.Conditions, c)
	return nil
}

func (f *fakeNode) DropCondition(_ context.Context, kind corev1.NodeConditionType) error {
	f.node.Status.Conditions = slices.DeleteFunc(f.node.Status.Conditions, func(old corev1.NodeCondition) bool { return old.Type == kind })
	return f.err
}

func (f *fakeNode) PatchTaints(_ context.Context, version string, taints []corev1.Taint) error {
	f.patches++
	if f.meanwhile != nil {
		f.meanwhile(&f.node)
	}
	if version != f.node.ResourceVersion {
		return apierrors.NewConflict(schema.GroupResource{Resource: "nodes"}, "n", errors.New("changed"))
	}
	f.node.Spec.Taints = taints
	return f.err
}

func TestConditions(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		api := &fakeNode{}
		c := NewConditions(api)
		set := func(pressure bool, want int) corev1.NodeCondition {
			t.Helper()
			if err := c.Set(t.Context(), ImageFS, pressure, "3 of 10 Gi left"); err != nil || api.patches != want {
				t.Fatalf("%d patches, %v; want %d", api.patches, err, want)
			}
			return api.node.Status.Conditions[len(api.node.Status.Conditions)-1]
		}
		first := set(true, 1)
		if first.Type != "CleaveImageFSPressure" || first.Status != corev1.ConditionTrue || first.Message != "3 of 10 Gi left" || first.Reason == "" {
			t.Errorf("%+v", first)
		}
		pass(time.Minute)
		set(true, 1) // nothing new
		pass(heartbeat)
		if again := set(true, 2); !again.LastTransitionTime.Equal(&first.LastTransitionTime) || again.LastHeartbeatTime.Equal(&first.LastHeartbeatTime) {
			t.Errorf("still so: %+v after %+v", again, first)
		}
		if off := set(false, 3); off.Status != corev1.ConditionFalse || off.LastTransitionTime.Equal(&first.LastTransitionTime) {
			t.Errorf("over: %+v", off)
		}

		api.err = apierrors.NewForbidden(schema.GroupResource{Resource: "nodes"}, "n", errors.New("may not"))
		for range 5 {
			if err := c.Set(t.Context(), NodeFS, true, ""); !apierrors.IsForbidden(err) || c.Problem() == nil {
				t.Fatalf("without the right: %v", err)
			}
			pass(time.Minute)
		}
		if api.patches != 4 {
			t.Errorf("tried %d times without the right", api.patches-3)
		}
		api.err = nil
		pass(restAfterDenial)
		set(true, 5)
		if err := c.Clear(t.Context()); err != nil || len(api.node.Status.Conditions) > 0 {
			t.Errorf("left: %+v, %v", api.node.Status.Conditions, err)
		}
	})
}

func TestTaint(t *testing.T) {
	t.Parallel()
	theirs := corev1.Taint{Key: "theirs", Effect: corev1.TaintEffectNoExecute}
	api := &fakeNode{node: corev1.Node{Spec: corev1.NodeSpec{Taints: []corev1.Taint{theirs}}}}
	api.node.ResourceVersion = "1"
	keys := func() string {
		var out []string
		for _, taint := range api.node.Spec.Taints {
			out = append(out, taint.Key+":"+string(taint.Effect))
		}
		return strings.Join(out, " ")
	}
	const both = "theirs:NoExecute cleave-cri.github.io/disk-pressure:NoSchedule"
	for _, step := range []struct {
		on      bool
		want    string
		patches int
	}{{false, "theirs:NoExecute", 0}, {true, both, 1}, {true, both, 1}, {false, "theirs:NoExecute", 2}} {
		if err := Taint(t.Context(), api, true, step.on); err != nil || keys() != step.want || api.patches != step.patches {
			t.Errorf("%t: %q after %d patches, %v; want %+v", step.on, keys(), api.patches, err, step)
		}
	}
	// Somebody else taints at the same time: theirs stays, too.
	api.meanwhile = func(n *corev1.Node) {
		n.ResourceVersion, api.meanwhile = "2", nil
		n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: "late", Effect: corev1.TaintEffectNoSchedule})
	}
	if err := Taint(t.Context(), api, true, true); err != nil || keys() != "theirs:NoExecute late:NoSchedule cleave-cri.github.io/disk-pressure:NoSchedule" {
		t.Errorf("%q, %v", keys(), err)
	}
	api.meanwhile = func(n *corev1.Node) { n.ResourceVersion += "x" }
	if err := Taint(t.Context(), api, true, false); !apierrors.IsConflict(err) || !strings.Contains(keys(), TaintKey) {
		t.Errorf("a node that never rests: %v", err)
	}
	if err := Taint(t.Context(), api, false, true); !errors.Is(err, ErrIdentity) {
		t.Errorf("a node's own identity: %v", err)
	}
}
