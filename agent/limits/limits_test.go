package limits

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/agent/snapshotter"
	"github.com/cleave-cri/cleave/snapshot/split"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const mib = 1 << 20

// byName is a Source that knows some containers.
type byName map[string]uint64

func (s byName) WritableLayer(c Container) (uint64, bool) {
	bytes, known := s[c.Name]
	return bytes, known
}

func named(names ...string) (out []Container) {
	for _, n := range names {
		out = append(out, Container{ID: "id-" + n, Name: n})
	}
	return out
}

func account(name string, limit uint64) split.LayerLimit {
	return split.LayerLimit{Namespace: "k8s.io", Name: "id-" + name, LimitBytes: limit}
}

func TestPlanned(t *testing.T) {
	t.Parallel()
	source := byName{"a": 5 * mib, "b": 7 * mib, "free": 0}
	for _, tc := range []struct {
		name       string
		containers []Container
		accounts   []split.LayerLimit
		want       plan
	}{
		{name: "nobody"},
		{"a new one", named("a"), []split.LayerLimit{account("a", 0)}, plan{changes: []change{{"id-a", 5 * mib}}}},
		{"all is as wanted", named("a", "b"), []split.LayerLimit{account("a", 5*mib), account("b", 7*mib)}, plan{limited: 2}},
		{"rounded by the kernel", named("a"), []split.LayerLimit{account("a", 5*mib+roundBytes-1)}, plan{limited: 1}},
		{"another limit than wanted", named("a", "b"), []split.LayerLimit{account("a", 6*mib), account("b", 6*mib)}, plan{changes: []change{{"id-a", 5 * mib}, {"id-b", 7 * mib}}}},
		{"one too many", named("free"), []split.LayerLimit{account("free", 5*mib)}, plan{changes: []change{{"id-free", 0}}}},
		{"none and none wanted", named("free"), []split.LayerLimit{account("free", 0)}, plan{}},
		{"nothing is known of it", named("stranger"), []split.LayerLimit{account("stranger", 9*mib)}, plan{}},
		{"it has no account", named("a", "free", "stranger"), nil, plan{without: 1}},
		{"an account of nobody", nil, []split.LayerLimit{account("a", 5*mib)}, plan{}},
		{"of another namespace", named("a"), []split.LayerLimit{{Namespace: "other", Name: "id-a"}}, plan{without: 1}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			for range 3 {
				rand.Shuffle(len(tc.containers), func(i, j int) {
					tc.containers[i], tc.containers[j] = tc.containers[j], tc.containers[i]
				})
				got := planned(tc.containers, tc.accounts, "k8s.io", source)
				if diff := cmp.Diff(tc.want, got, cmp.AllowUnexported(plan{}, change{})); diff != "" {
					t.Errorf("(-want +got):\n%s", diff)
				}
			}
		})
	}
}

// fakeNode is a runtime and a snapshotter.
type fakeNode struct {
	mu         sync.Mutex
	containers []Container       // guarded by mu
	limits     map[string]uint64 // guarded by mu, by name
	refused    map[string]string // guarded by mu
	down       error             // guarded by mu
	broken     bool              // guarded by mu
	looks      int               // guarded by mu
	calls      int               // guarded by mu; of SetLimit
}

func (n *fakeNode) do(f func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	f()
}

func (n *fakeNode) list(context.Context) (out []Container, _ error) {
	n.do(func() { n.looks++; out = slices.Clone(n.containers) })
	return out, nil
}

func (n *fakeNode) Limits(context.Context) (out []split.LayerLimit, err error) {
	n.do(func() {
		if n.broken {
			panic("a bug")
		}
		for name, limit := range n.limits {
			out = append(out, split.LayerLimit{Namespace: "k8s.io", Name: name, LimitBytes: limit})
		}
		err = n.down
	})
	return out, err
}

func (n *fakeNode) SetLimit(_ context.Context, r snapshotter.LimitRequest) (a snapshotter.LimitAnswer, err error) {
	n.do(func() {
		n.calls++
		if reason := n.refused[r.Snapshot]; reason != "" {
			a.Refused = reason
			return
		}
		if _, ok := n.limits[r.Snapshot]; !ok {
			a.Unknown = true
			return
		}
		n.limits[r.Snapshot] = r.Bytes
		a.Limit = &split.LayerLimit{Namespace: r.Namespace, Name: r.Snapshot, LimitBytes: r.Bytes}
		err = n.down
	})
	return a, err
}

func (n *fakeNode) add(name string) {
	n.do(func() { n.containers, n.limits["id-"+name] = append(n.containers, named(name)...), 0 })
}

func (n *fakeNode) limit(name string) (l uint64) {
	n.do(func() { l = n.limits["id-"+name] })
	return l
}

// keeping runs a Keeper of a fake node in a bubble of virtual time, after its first look.
func keeping(t *testing.T, test func(t *testing.T, k *Keeper, n *fakeNode)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		n := &fakeNode{limits: map[string]uint64{}, refused: map[string]string{}}
		n.add("a")
		k := New(Options{Containers: n.list, Layers: n, Namespace: "k8s.io", Source: func() Source { return Same(5 * mib) }, Log: zap.NewNop()})
		ctx, stop := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { k.Run(ctx) })
		defer running.Wait()
		defer stop()
		<-time.After(gap)
		if s := k.Status(); n.limit("a") != 5*mib || s.Limited != 1 || s.Set != 1 || s.Problem != "" || s.At.IsZero() {
			t.Fatalf("at the start the limit is %d, status %+v", n.limit("a"), s)
		}
		test(t, k, n)
	})
}

// TestNewContainerIsLimitedAtOnce: without delay for one, and with few looks for many.
func TestNewContainerIsLimitedAtOnce(t *testing.T) {
	t.Parallel()
	keeping(t, func(t *testing.T, k *Keeper, n *fakeNode) {
		n.add("b")
		if answer, err := k.Created(t.Context(), []byte("anything")); answer != nil || err != nil {
			t.Errorf("the interceptor changes the answer: %q, %v", answer, err)
		}
		synctest.Wait()
		if n.limit("b") != 5*mib {
			t.Error("the new one has no limit")
		}
		looks := 0
		n.do(func() { looks = n.looks })
		for i := range 1000 {
			n.add(fmt.Sprint("c", i))
			if _, err := k.Created(t.Context(), nil); err != nil {
				t.Fatal(err)
			}
		}
		<-time.After(2 * gap)
		n.do(func() {
			if n.looks-looks > 3 {
				t.Errorf("%d looks for a thousand", n.looks-looks)
			}
		})
		if s := k.Status(); s.Limited != 1002 {
			t.Errorf("status %+v", s)
		}
	})
}

// TestLimitsComeRight: what was not told or was lost is found within a minute; while all is well nothing is set.
func TestLimitsComeRight(t *testing.T) {
	t.Parallel()
	keeping(t, func(t *testing.T, k *Keeper, n *fakeNode) {
		n.add("untold")
		n.do(func() { n.limits["id-a"] = 0 })
		<-time.After(period + gap)
		if n.limit("untold") != 5*mib || n.limit("a") != 5*mib {
			t.Errorf("limits %d, %d", n.limit("untold"), n.limit("a"))
		}
		calls := 0
		n.do(func() { calls = n.calls })
		<-time.After(time.Hour)
		n.do(func() {
			if n.calls != calls {
				t.Errorf("%d limits were set while all was well", n.calls-calls)
			}
		})
		if s := k.Status(); s.Set != calls {
			t.Errorf("status %+v, want %d set", s, calls)
		}
	})
}

// TestWhatKeepsLimitsAway: a snapshotter that is away, one layer that is refused, a bug. All are told, and none stops the
// others or the rest of cleave.
func TestWhatKeepsLimitsAway(t *testing.T) {
	t.Parallel()
	keeping(t, func(t *testing.T, k *Keeper, n *fakeNode) {
		n.do(func() { n.down = errors.New("the snapshotter is not running") })
		n.add("b")
		if _, err := k.Created(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		<-time.After(time.Second)
		if s := k.Status(); s.Problem != "the snapshotter is not running" || s.Limited != 1 {
			t.Errorf("status %+v", s)
		}
		n.do(func() { n.down, n.refused["id-a"], n.limits["id-a"] = nil, "made before", 0 })
		<-time.After(lastRetry + gap)
		if s := k.Status(); s.Problem != "made before" || s.Limited != 1 || s.Without != 1 || n.limit("b") != 5*mib {
			t.Errorf("status %+v, the other has %d", s, n.limit("b"))
		}
		n.do(func() { n.broken = true })
		<-time.After(lastRetry + gap)
		if s := k.Status(); !strings.Contains(s.Problem, "a bug") {
			t.Errorf("status %+v", s)
		}
		n.do(func() { n.broken = false; clear(n.refused) })
		<-time.After(lastRetry + gap)
		if s := k.Status(); s.Problem != "" || s.Limited != 2 || s.Without != 0 {
			t.Errorf("status %+v", s)
		}
	})
}
