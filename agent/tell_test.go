package agent

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

	"go.uber.org/zap"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/cleave-cri/cleave/agent/pressure"
	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/record"
	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/kube"
	"github.com/cleave-cri/cleave/kube/report"
	"github.com/cleave-cri/cleave/proxy/admission"
)

// apiNode is what the API server has of the node.
type apiNode struct {
	mu         sync.Mutex
	conditions map[report.Filesystem]bool
	tainted    bool
	// writes are those of the taint, sets those of conditions.
	writes, sets int
	err          error
}

func (n *apiNode) Set(_ context.Context, f report.Filesystem, pressure bool, message string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.sets++
	if message == "" {
		return errors.New("without figures")
	}
	if n.err == nil {
		n.conditions[f] = pressure
	}
	return n.err
}

func (n *apiNode) Clear(context.Context) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.err == nil {
		clear(n.conditions)
	}
	return n.err
}

func (n *apiNode) taint(_ context.Context, on bool) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.writes++
	if n.err == nil {
		n.tainted = on
	}
	return n.err
}

// told is how often a condition was written.
func (n *apiNode) told() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.sets
}

// is says how the node is, in a line.
func (n *apiNode) is() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	var on []string
	for f, pressure := range n.conditions {
		on = append(on, fmt.Sprintf("%s=%t", f, pressure))
	}
	slices.Sort(on)
	return strings.Join(append(on, fmt.Sprintf("tainted=%t", n.tainted)), " ")
}

func wereSeen(images pressure.Filesystem) pressure.Picture {
	images.Role, images.Text = fsstats.ImageFS, "1 of 2"
	return pressure.Picture{At: time.Now(), Filesystems: []pressure.Filesystem{{Role: fsstats.NodeFS, Text: "2 of 2"}, images}}
}

// telling runs a teller of a node in virtual time.
func telling(t *testing.T, node *apiNode, change func(*teller), use func(t *testing.T, x *teller)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		x := &teller{conditions: node, taint: node.taint, keepConditions: true, keepTaint: true, log: zap.NewNop(), woken: make(chan struct{}, 1)}
		change(x)
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { x.run(ctx) })
		synctest.Wait()
		use(t, x)
		cancel()
		running.Wait()
	})
}

// The conditions follow each filesystem, the taint a hard threshold alone, and nothing is left when nobody keeps it up.
func TestTheClusterSeesTheDisks(t *testing.T) {
	t.Parallel()
	node := &apiNode{conditions: map[report.Filesystem]bool{report.ContainerFS: true}, tainted: true} // a killed process left it
	telling(t, node, func(*teller) {}, func(t *testing.T, x *teller) {
		for _, step := range []struct {
			images pressure.Filesystem
			want   string
		}{
			{pressure.Filesystem{}, "ContainerFS=true ImageFS=false NodeFS=false tainted=false"},
			{pressure.Filesystem{Short: true}, "ContainerFS=true ImageFS=true NodeFS=false tainted=false"},
			{pressure.Filesystem{Short: true, Hard: true}, "ContainerFS=true ImageFS=true NodeFS=false tainted=true"},
			{pressure.Filesystem{}, "ContainerFS=true ImageFS=false NodeFS=false tainted=false"},
			{pressure.Filesystem{Short: true, Hard: true}, "ContainerFS=true ImageFS=true NodeFS=false tainted=true"},
		} {
			x.show(wereSeen(step.images))
			synctest.Wait()
			if got := node.is(); got != step.want || len(x.Status().Problems) > 0 {
				t.Errorf("%+v: %s, want %s; %v", step.images, got, step.want, x.Status().Problems)
			}
		}
		before := node.writes
		for range 60 {
			x.show(wereSeen(pressure.Filesystem{Short: true, Hard: true}))
			<-time.After(time.Second)
		}
		if node.writes != before {
			t.Errorf("the taint was written %d times within a minute, although nothing changed", node.writes-before)
		}
		node.mu.Lock()
		node.tainted = false // by somebody else
		node.mu.Unlock()
		<-time.After(taintEvery + tellEvery)
		synctest.Wait()
		if got := node.is(); !strings.Contains(got, "tainted=true") {
			t.Errorf("after somebody took the taint away: %s", got)
		}
	})
	if got := node.is(); got != "tainted=false" {
		t.Errorf("in the end %s", got)
	}
}

// What is not wanted is not kept, and what an earlier process left of it goes.
func TestWhatIsNotWantedGoes(t *testing.T) {
	t.Parallel()
	node := &apiNode{conditions: map[report.Filesystem]bool{report.ImageFS: true}, tainted: true}
	telling(t, node, func(x *teller) { x.keepConditions, x.keepTaint = false, false }, func(t *testing.T, x *teller) {
		x.show(wereSeen(pressure.Filesystem{Short: true, Hard: true}))
		synctest.Wait()
		if got := node.is(); got != "tainted=false" || x.Status() != nil {
			t.Errorf("%s, %+v", got, x.Status())
		}
	})
}

// An API server that is away at the start, as after a power cut, is asked again: else the taint of an earlier process would keep pods off
// this node for ever.
func TestWhatIsNotWantedGoesLater(t *testing.T) {
	t.Parallel()
	node := &apiNode{conditions: map[report.Filesystem]bool{report.ImageFS: true}, tainted: true, err: errors.New("no route")}
	telling(t, node, func(x *teller) { x.keepConditions, x.keepTaint = true, false }, func(t *testing.T, x *teller) {
		x.show(wereSeen(pressure.Filesystem{}))
		synctest.Wait()
		if s := x.Status(); len(s.Problems) != 1 || !strings.Contains(s.Problems[0], "no route") {
			t.Errorf("while it is away: %+v", s)
		}
		node.mu.Lock()
		node.err = nil
		node.mu.Unlock()
		<-time.After(tellEvery)
		synctest.Wait()
		if got := node.is(); got != "ImageFS=false NodeFS=false tainted=false" || len(x.Status().Problems) > 0 {
			t.Errorf("when it is back: %s, %+v", got, x.Status())
		}
	})
}

// A process that never looked at the disks, such as a successor whose handover failed, takes nothing away that another one keeps.
func TestWhoSawNothingTakesNothingAway(t *testing.T) {
	t.Parallel()
	node := &apiNode{conditions: map[report.Filesystem]bool{report.ImageFS: true}, tainted: true}
	telling(t, node, func(*teller) {}, func(*testing.T, *teller) {})
	if got := node.is(); got != "ImageFS=true tainted=true" {
		t.Errorf("in the end %s", got)
	}
}

// A write without an answer may have come to pass.
func TestATaintThatMayBeThereGoes(t *testing.T) {
	t.Parallel()
	node := &apiNode{conditions: map[report.Filesystem]bool{}}
	telling(t, node, func(x *teller) {
		x.taint = func(ctx context.Context, on bool) error {
			err := node.taint(ctx, on)
			if on {
				err = errors.New("no answer")
			}
			return err
		}
	}, func(_ *testing.T, x *teller) {
		x.show(wereSeen(pressure.Filesystem{Short: true, Hard: true}))
		synctest.Wait()
	})
	if got := node.is(); got != "tainted=false" {
		t.Errorf("in the end %s", got)
	}
}

// What was seen long ago is not told as if it were so now, and nothing is taken back for it.
func TestOldFiguresAreNotToldAgain(t *testing.T) {
	t.Parallel()
	node := &apiNode{conditions: map[report.Filesystem]bool{}}
	telling(t, node, func(*teller) {}, func(t *testing.T, x *teller) {
		x.show(wereSeen(pressure.Filesystem{Short: true, Hard: true}))
		<-time.After(tellMaxAge + tellEvery)
		synctest.Wait()
		before := node.told()
		<-time.After(tellMaxAge)
		synctest.Wait()
		if n := node.told() - before; n != 0 {
			t.Errorf("conditions were written %d times although nobody looked", n)
		}
		if s := x.Status(); len(s.Problems) != 1 || !strings.Contains(s.Problems[0], "not been looked at") {
			t.Errorf("%+v", s)
		}
		if got := node.is(); got != "ImageFS=true NodeFS=false tainted=true" {
			t.Error(got)
		}
	})
}

// Without a right, or as the node itself, it is said once in status and everything else goes on.
func TestWhatCanNotBeToldIsSaid(t *testing.T) {
	t.Parallel()
	denied := apierrors.NewForbidden(schema.GroupResource{Resource: "nodes"}, "n", errors.New("no right"))
	node := &apiNode{conditions: map[report.Filesystem]bool{}, err: denied}
	telling(t, node, func(x *teller) { x.taint = nil }, func(t *testing.T, x *teller) {
		x.show(wereSeen(pressure.Filesystem{Short: true, Hard: true}))
		synctest.Wait()
		if s := x.Status(); len(s.Problems) != 1 || !strings.Contains(s.Problems[0], "no right") || !strings.Contains(s.Problems[0], report.ErrIdentity.Error()) || s.Tainted != nil {
			t.Errorf("%+v", s)
		}
		node.mu.Lock()
		node.err = nil
		node.mu.Unlock()
		<-time.After(tellEvery)
		synctest.Wait()
		if got := node.is(); got != "ImageFS=true NodeFS=false tainted=false" {
			t.Errorf("with the right: %s", got)
		}
	})
}

func TestNewsForTheCluster(t *testing.T) {
	t.Parallel()
	available, size := uint64(1<<29), uint64(10<<30)
	of := func(change func(*record.Record)) record.Record {
		fs := &engine.FSStats{Time: time.Now(), AvailableBytes: &available, CapacityBytes: &size}
		r := record.Record{Input: engine.Input{Summary: &engine.Summary{ImageFS: fs}}, Decision: engine.Decision{
			Outcome: engine.Pressure, Threshold: engine.Threshold{Signal: engine.ImageFSAvailable, Value: engine.Value{Quantity: resource.NewQuantity(1<<30, resource.BinarySI)}},
		}}
		change(&r)
		return r
	}
	const short = "DiskThresholdMet imagefs.available: imagefs.available < 1Gi: 512.0Mi of 10.0Gi are left, less than 1.0Gi (536870912 of 10737418240 bytes, less than 1073741824)."
	for _, tc := range []struct {
		name   string
		change func(*record.Record)
		want   []string
	}{
		{"calm", func(r *record.Record) { r.Decision.Outcome = engine.Calm }, nil},
		{"a pod goes", func(*record.Record) {}, []string{short}},
		{"a pod would go", func(r *record.Record) { r.Decision.Victim = &engine.Eviction{Namespace: "shop", Name: "web"} }, []string{
			short, "DiskEvictionHeld imagefs.available: No pod is evicted, because cleave is set up not to; it would be shop/web. ",
		}},
		{"held", func(r *record.Record) {
			r.Decision.NoVictim, r.Decision.Hold = "HoldFire", &engine.Hold{Holds: true, GrewBytes: 4 << 30, NobodysBytes: 3 << 30}
		}, []string{short, "DiskEvictionHeld imagefs.available: No pod is evicted, because most of what grew is no pod's (3.0Gi of 4.0Gi). "}},
		{"accounts are late", func(r *record.Record) {
			r.Decision.NoVictim, r.Decision.Hold = "HoldFire", &engine.Hold{Late: true, GrewBytes: 4 << 30, NobodysBytes: 1 << 30}
		}, []string{short}},
		{"accounts are late, and most is nobody's", func(r *record.Record) {
			r.Decision.NoVictim, r.Decision.Hold = "HoldFire", &engine.Hold{Holds: true, Late: true, GrewBytes: 4 << 30, NobodysBytes: 3 << 30}
		}, []string{short, "DiskEvictionHeld imagefs.available: No pod is evicted, because most of what grew is no pod's (3.0Gi of 4.0Gi). "}},
		{"accounts are late, and it is no matter", func(r *record.Record) {
			r.Decision.NoVictim, r.Decision.Hold = "OnlyWhoHelps", &engine.Hold{Holds: true, Late: true, GrewBytes: 4 << 30, NobodysBytes: 3 << 30}
		}, []string{short, "DiskEvictionHeld imagefs.available: No pod is evicted, because no pod has anything there that would come free. "}},
		{"too many went", func(r *record.Record) {
			r.Decision.NoVictim, r.Decision.Barred = "BreakStorms", []engine.Bar{{Why: engine.OwnerPerHour, Went: 4, Until: time.Date(2026, 1, 1, 13, 0, 0, 0, time.UTC)}}
		}, []string{short, "DiskEvictionHeld imagefs.available: No pod is evicted, because too many went lately; owner's cap: 4 went within the hour, the next may at 13:00:00. "}},
		{"images were enough", func(r *record.Record) {
			r.Decision.NoVictim, r.Verdict = "OnlyWhoHelps", &record.Verdict{Resolved: true}
		}, []string{short}},
		{"space is on its way", func(r *record.Record) { r.Decision.NoVictim = "AwaitFreed" }, []string{short}},
		{"without figures", func(r *record.Record) { r.Input.Summary = nil }, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			got := newsOf(of(tc.change), tc.name != "a pod would go")
			if len(got) != len(tc.want) {
				t.Fatalf("%+v", got)
			}
			for i, e := range got {
				if text := fmt.Sprintf("%s %s: %s", e.Reason, e.About, e.Note); !strings.HasPrefix(text, tc.want[i]) || !e.Warning {
					t.Errorf("%q, want %q", text, tc.want[i])
				}
			}
		})
	}
}

func TestEventsHaveTheFigures(t *testing.T) {
	t.Parallel()
	number := func(n int64) *int64 { return &n }
	if e := removedEvent(record.Step{Items: []record.Item{{ID: "kept", ExpectedBytes: number(7)}}}); e != nil {
		t.Errorf("nothing went: %+v", e)
	}
	e := removedEvent(record.Step{Items: []record.Item{{ExpectedBytes: number(1000), ActualBytes: number(1024)}, {ID: "kept", ExpectedBytes: number(7)}, {ExpectedBytes: number(2000), ActualBytes: number(2048)}}})
	if e == nil || e.Reason != report.ImagesRemoved || e.Note != "Removed 2 images: 3.0Ki came free (3072 bytes; 3000 were expected)." {
		t.Errorf("%+v", e)
	}
	limit := *resource.NewQuantity(1<<30, resource.BinarySI)
	for want, e := range map[string]engine.Eviction{
		"Evicted at once: of nodefs.available 512.0Mi are left, less than 1.0Gi (536870912 bytes, less than 1073741824). Container c uses 3Gi and requests 1Gi.": {
			Cause: engine.Cause(engine.NodeFSAvailable), Available: 1 << 29, Limit: limit,
			Offenders: []engine.Offender{{Name: "c", Usage: resource.MustParse("3Gi"), Request: resource.MustParse("1Gi")}},
		},
		"Evicted at once: of nodefs.inodesFree 3 are left, less than 1073741824.":      {Cause: engine.Cause(engine.NodeFSInodesFree), Available: 3, Limit: limit},
		"Evicted at once: c is above its limit of 1.0Gi (ephemeralcontainerfs.limit).": {Cause: engine.ContainerLimit, Subject: "c", Limit: limit},
		"Evicted at once: the pod is above its limit of 1.0Gi (ephemeralpodfs.limit).": {Cause: engine.PodLimit, Limit: limit},
	} {
		if got := evictionNote(e, true); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// GAP-38: who tolerates a full disk, or has to run whatever happens, gets its containers; so does everybody of whom it is not known.
func TestWhoGetsNoContainer(t *testing.T) {
	t.Parallel()
	now := time.Now()
	priority := kube.SystemCritical
	pods := []*kube.Pod{
		{UID: "1", Namespace: "shop", Name: "web"},
		{UID: "2", Namespace: "shop", Name: "tolerant", ToleratesDiskPressure: true},
		{UID: "3", Namespace: "shop", Name: "critical", Priority: &priority},
		{UID: "4", Namespace: "shop", Name: "file-node", Static: true},
	}
	full := pressure.Picture{At: now, Filesystems: []pressure.Filesystem{{Role: fsstats.NodeFS}, {Role: fsstats.ContainerFS, Short: true, Hard: true, Text: "1 of 10 Gi left"}}}
	soft := pressure.Picture{At: now, Filesystems: []pressure.Filesystem{{Role: fsstats.ContainerFS, Short: true}}}
	old := full
	old.At = now.Add(-admissionMaxAge - time.Second)
	for _, tc := range []struct {
		name     string
		picture  pressure.Picture
		pod      admission.Pod
		podsAge  time.Duration
		wantNone bool
	}{
		{"usual", full, admission.Pod{UID: "1", Namespace: "shop", Name: "web"}, 0, true},
		{"only soft", soft, admission.Pod{UID: "1", Namespace: "shop", Name: "web"}, 0, false},
		{"nothing is known of the disks", pressure.Picture{}, admission.Pod{UID: "1", Namespace: "shop", Name: "web"}, 0, false},
		{"the disks were seen long ago", old, admission.Pod{UID: "1", Namespace: "shop", Name: "web"}, 0, false},
		{"the pod was seen long ago", full, admission.Pod{UID: "1", Namespace: "shop", Name: "web"}, podsMaxAge + time.Second, false},
		{"tolerates it", full, admission.Pod{UID: "2", Namespace: "shop", Name: "tolerant"}, 0, false},
		{"critical", full, admission.Pod{UID: "3", Namespace: "shop", Name: "critical"}, 0, false},
		{"static", full, admission.Pod{UID: "4", Namespace: "shop", Name: "file-node"}, 0, false},
		{"static by its own word", full, admission.Pod{UID: "1", Namespace: "shop", Name: "web", Static: true}, 0, false},
		{"not known", full, admission.Pod{UID: "9", Namespace: "shop", Name: "web"}, 0, false},
		{"of another name", full, admission.Pod{UID: "1", Namespace: "shop", Name: "other"}, 0, false},
		{"nobody at all", full, admission.Pod{}, 0, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			view := kube.Merge(kube.Snapshot{Source: "test", AsOf: now.Add(-tc.podsAge), Pods: pods})
			got := noContainer(tc.picture, view, tc.pod, now)
			if (got != "") != tc.wantNone {
				t.Errorf("%q", got)
			}
			if tc.wantNone && got != "containerfs is full, so no container is made for pod shop/web, which does not tolerate node.kubernetes.io/disk-pressure: 1 of 10 Gi left" {
				t.Errorf("%q", got)
			}
		})
	}
}
