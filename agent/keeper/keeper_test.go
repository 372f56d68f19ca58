package keeper

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
	"go.uber.org/zap/zaptest/observer"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/garbage"
	"github.com/cleave-cri/cleave/engine/record"
)

const (
	gib      = int64(1) << 30
	capacity = 100 * gib
	// short is from when on images and pods go.
	short = 10 * gib
)

// world is a node with one disk, on which images lie that nobody uses, and pods.
type world struct {
	mu        sync.Mutex
	available int64
	images    map[string]int64 // what each frees
	pods      map[string]int64 // what each uses
	calls     []string         // what was deleted and ended
	records   []record.Record
	passes    []time.Time
	lookError error
	planError error
	runError  error
	// eats is what others use up after each deletion, pause how long one takes that tidies up.
	eats    int64
	pause   time.Duration
	evicted time.Time // when the last pod was told to go
	// holds keeps evicted pods on the node until stays is closed.
	holds      bool
	stays      chan struct{}
	evictError error
	// taken is what the pod "second" writes while one goes.
	taken int64
	// slow is how long it takes to delete images; meanwhile the pods change places.
	slow time.Duration
	// hard says of each pod that was told to go whether it was for a hard threshold.
	hard []bool
}

func (w *world) with(f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f()
}

func (w *world) done() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.calls)
}

func (w *world) observe() engine.Observations {
	return engine.Observations{engine.NodeFSAvailable: {Available: w.available, Capacity: capacity, Time: time.Now()}}
}

func (w *world) look(context.Context) (engine.Input, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.passes = append(w.passes, time.Now())
	if w.lookError != nil {
		return engine.Input{}, w.lookError
	}
	unsigned := func(v int64) *uint64 { u := uint64(v); return &u }
	fs := &engine.FSStats{Time: time.Now(), AvailableBytes: unsigned(w.available), CapacityBytes: unsigned(capacity), UsedBytes: unsigned(capacity - w.available)}
	in := engine.Input{Now: time.Now(), Layout: &engine.Detected{}, Summary: &engine.Summary{NodeFS: fs, ImageFS: fs, ContainerFS: fs}}
	for uid, bytes := range w.pods {
		in.Pods = append(in.Pods, engine.Pod{UID: uid, Namespace: "shop", Name: uid, Containers: []engine.Container{{Name: "c"}}})
		used := &engine.FSStats{Time: time.Now(), UsedBytes: unsigned(bytes)}
		in.Summary.Pods = append(in.Summary.Pods, engine.PodStats{UID: uid, Containers: []engine.ContainerStats{{Name: "c", RootFS: used}}, EphemeralStorage: used})
	}
	return in, nil
}

func (w *world) glance(context.Context) (engine.Observations, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.observe(), nil
}

func setup(engine.Input) (Setup, error) {
	options := engine.Cleave()
	options.Forecast = false // these tests are about what is, not about what comes
	return Setup{Config: engine.Config{
		Thresholds:       []engine.Threshold{{Signal: engine.NodeFSAvailable, Value: engine.Value{Quantity: resource.NewQuantity(short, resource.BinarySI)}}},
		TransitionPeriod: 5 * time.Minute, Options: options,
	}}, nil
}

// images is the reclaim of the world's images.
type images struct{ *world }

func (i images) Plan(_ context.Context, want Want) (record.Step, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	step := record.Step{Kind: engine.UnusedImages}
	if i.planError != nil {
		return step, i.planError
	}
	left := want.NeedBytes
	for _, id := range slices.Sorted(keys(i.images)) {
		if left <= 0 {
			break
		}
		bytes := i.images[id]
		step.Items = append(step.Items, record.Item{ID: id, Rule: "GAP-25", ExpectedBytes: &bytes})
		if left != garbage.Everything {
			left -= bytes
		}
	}
	return step, nil
}

func (i images) Run(_ context.Context, _ Want, step record.Step) (record.Step, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.runError != nil {
		return step, i.runError
	}
	if i.slow > 0 {
		i.mu.Unlock()
		time.Sleep(i.slow) //nolint:forbidigo // in synctest
		i.mu.Lock()
		i.pods["modest"], i.pods["greedy"] = i.pods["greedy"], i.pods["modest"]
	}
	for n := range step.Items {
		bytes := i.images[step.Items[n].ID]
		delete(i.images, step.Items[n].ID)
		i.available += bytes - i.eats
		i.calls = append(i.calls, "image "+step.Items[n].ID)
		step.Items[n].ActualBytes = &bytes
	}
	return step, nil
}

func keys[V any](m map[string]V) func(func(string) bool) {
	return func(yield func(string) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
}

// nothing reclaims nothing.
type nothing struct{ kind engine.Reclaim }

func (n nothing) Plan(context.Context, Want) (record.Step, error) {
	return record.Step{Kind: n.kind}, nil
}

func (n nothing) Run(_ context.Context, _ Want, s record.Step) (record.Step, error) { return s, nil }

func (w *world) Evict(ctx context.Context, e engine.Eviction, hard bool) (*int64, error) {
	w.with(func() { w.evicted = time.Now() })
	w.with(func() { w.calls, w.hard = append(w.calls, "pod "+e.UID), append(w.hard, hard) })
	if w.holds {
		select {
		case <-w.stays:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.evictError != nil {
		return nil, w.evictError
	}
	gained := w.pods[e.UID] - w.taken
	w.available += gained
	if w.taken > 0 {
		w.pods["second"] += w.taken
	}
	delete(w.pods, e.UID)
	return &gained, nil
}

func (w *world) parts() Parts {
	return Parts{
		Decider: "cleave", Look: w.look, Glance: w.glance, Config: setup, Evictor: w, Log: zap.NewNop(),
		Reclaimers: map[engine.Reclaim]Reclaimer{
			engine.UnusedImages: images{w}, engine.DeadContainers: nothing{engine.DeadContainers}, engine.OldLogs: nothing{engine.OldLogs},
		},
		Record: func(r record.Record, _ bool) { w.with(func() { w.records = append(w.records, r) }) },
	}
}

// run lets a keeper look after a world while f goes on, in time that only passes when all wait.
func run(t *testing.T, w *world, p Parts, f func(t *testing.T, k *Keeper)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w.stays = make(chan struct{}) // one of the bubble's
		ctx, stop := context.WithCancel(t.Context())
		k := New(p)
		ended := make(chan struct{})
		go func() { defer close(ended); k.Run(ctx) }()
		f(t, k)
		stop()
		<-ended
	})
}

func equal(t *testing.T, what string, got []string, want ...string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("%s: %q, want %q", what, got, want)
	}
}

func TestREC6_ReclaimThatIsEnoughSparesThePod(t *testing.T) {
	t.Parallel()
	w := &world{available: 9 * gib, images: map[string]int64{"a": 5 * gib, "b": 5 * gib}, pods: map[string]int64{"greedy": 30 * gib}}
	run(t, w, w.parts(), func(t *testing.T, k *Keeper) {
		time.Sleep(time.Minute) //nolint:forbidigo // in synctest
		equal(t, "done", w.done(), "image a")
		w.with(func() {
			if len(w.records) == 0 {
				t.Fatal("nothing is recorded")
			}
			r := w.records[0]
			if r.Verdict == nil || !r.Verdict.Resolved || len(r.Steps) != 3 || r.Decision.Victim == nil {
				t.Errorf("recorded %+v, verdict %+v", r.Steps, r.Verdict)
			}
		})
		s := k.Status()
		if s.Counts.Deleted != 1 || s.Counts.GainedBytes != 5*gib || s.Counts.ExpectedBytes != 5*gib || s.Counts.Evicted != 0 || s.Outcome != engine.Calm {
			t.Errorf("status %+v", s)
		}
	})
}

func TestSYN29_APodGoesIfReclaimWasNotEnough(t *testing.T) {
	t.Parallel()
	w := &world{available: 2 * gib, images: map[string]int64{"a": gib}, pods: map[string]int64{"greedy": 30 * gib, "modest": gib}, holds: true}
	run(t, w, w.parts(), func(t *testing.T, k *Keeper) {
		time.Sleep(5 * time.Second) //nolint:forbidigo // in synctest
		// It is on its way: nobody else goes meanwhile.
		equal(t, "done", w.done(), "image a", "pod greedy")
		if s := k.Status(); len(s.Leaving) != 1 || s.Leaving[0] != "greedy" {
			t.Errorf("status %+v", s)
		}
		close(w.stays)
		time.Sleep(time.Minute) //nolint:forbidigo // in synctest
		equal(t, "done", w.done(), "image a", "pod greedy")
		if s := k.Status(); len(s.Leaving) != 0 || s.Counts.Evicted != 1 || s.Outcome != engine.Calm {
			t.Errorf("status %+v", s)
		}
	})
}

// With the kubelet's defaults a soft threshold gives no more grace than a hard one, but it asks disruption budgets.
func TestSYN29_ASoftEvictionIsToldAsOne(t *testing.T) {
	t.Parallel()
	for grace, hard := range map[time.Duration]bool{0: true, time.Second: false} {
		w := &world{available: 2 * gib, pods: map[string]int64{"greedy": 30 * gib}}
		p := w.parts()
		p.Config = func(in engine.Input) (Setup, error) {
			s, err := setup(in)
			s.Config.Thresholds[0].Grace = grace
			return s, err
		}
		run(t, w, p, func(t *testing.T, _ *Keeper) {
			time.Sleep(time.Minute) //nolint:forbidigo // in synctest
			equal(t, "done", w.done(), "pod greedy")
			w.with(func() {
				if !slices.Equal(w.hard, []bool{hard}) {
					t.Errorf("with a grace of %s hard was %v", grace, w.hard)
				}
			})
		})
	}
}

// A reclaim takes minutes, and the ranking is from before.
func TestNobodyGoesByAnOldRanking(t *testing.T) {
	t.Parallel()
	w := &world{available: 2 * gib, images: map[string]int64{"a": gib}, pods: map[string]int64{"greedy": 30 * gib, "modest": gib}, slow: time.Minute}
	run(t, w, w.parts(), func(t *testing.T, _ *Keeper) {
		time.Sleep(2 * time.Minute) //nolint:forbidigo // in synctest
		equal(t, "done", w.done(), "image a", "pod modest")
	})
}

func TestAPodThatStaysIsToldAgain(t *testing.T) {
	t.Parallel()
	w := &world{available: 2 * gib, pods: map[string]int64{"greedy": 30 * gib}, evictError: errors.New("the API server is away")}
	p := w.parts()
	p.Config = func(in engine.Input) (Setup, error) {
		s, err := setup(in)
		s.Config.Options.BreakStorms = false
		return s, err
	}
	run(t, w, p, func(t *testing.T, _ *Keeper) {
		time.Sleep(3 * time.Second) //nolint:forbidigo // in synctest
		if got := w.done(); len(got) < 2 {
			t.Errorf("done: %q", got)
		}
		w.with(func() { w.evictError = nil })
		time.Sleep(time.Minute) //nolint:forbidigo // in synctest
		w.with(func() {
			if len(w.pods) != 0 {
				t.Error("the pod is still there")
			}
			// Each end is written down with what came of it.
			var ends []record.Departure
			for _, r := range w.records {
				if d := r.Departure; d != nil {
					ends = append(ends, *d)
					if r.Pass() || r.Input.Now.Before(d.Told) || d.Told.IsZero() || d.UID != "greedy" || d.Namespace != "shop" || d.ExpectedBytes == nil || *d.ExpectedBytes != 30*gib {
						t.Errorf("recorded %+v", r)
					}
				}
			}
			if n := len(ends); n < 3 || ends[0].Error != "the API server is away" || ends[0].ActualBytes != nil || ends[n-1].Error != "" || *ends[n-1].ActualBytes != 30*gib {
				t.Errorf("recorded %+v", ends)
			}
		})
	})
}

// A pod that went by itself is neither one that stays nor one that was evicted, and what it had is awaited as of any other.
func TestGAP17_APodThatWentByItself(t *testing.T) {
	t.Parallel()
	w := &world{available: 5 * gib, pods: map[string]int64{"first": 60 * gib, "second": 20 * gib}, evictError: fmt.Errorf("evict it: %w", ErrGone)}
	run(t, w, w.parts(), func(t *testing.T, k *Keeper) {
		time.Sleep(time.Second) //nolint:forbidigo // in synctest
		w.with(func() { delete(w.pods, "first") })
		time.Sleep(20 * time.Second) //nolint:forbidigo // in synctest
		equal(t, "done", w.done(), "pod first")
		w.with(func() {
			i := slices.IndexFunc(w.records, func(r record.Record) bool { return r.Departure != nil })
			if i < 0 || w.records[i].Departure.Error != "" || w.records[i].Departure.UID != "first" {
				t.Errorf("recorded %+v", w.records)
			}
		})
		if c := k.Status().Counts; c.EvictionsFailed != 0 {
			t.Errorf("counted %+v", c)
		}
	})
}

// Evictions that fail are tried less and less often, and don't count as ones that took place: else thirty of them, within moments,
// would forbid all evictions of the next hour.
func TestEvictionsThatFailDontUseUpTheBounds(t *testing.T) {
	t.Parallel()
	w := &world{available: 2 * gib, pods: map[string]int64{"greedy": 30 * gib, "modest": gib}, evictError: errors.New("not allowed to")}
	run(t, w, w.parts(), func(t *testing.T, _ *Keeper) {
		time.Sleep(30 * time.Minute) //nolint:forbidigo // in synctest
		got := w.done()
		if len(got) < 20 || len(got) > 45 || slices.Contains(got, "pod modest") {
			t.Errorf("%d evictions were tried in 30 min: %q", len(got), got)
		}
		w.with(func() { w.evictError = nil })
		time.Sleep(2 * time.Minute) //nolint:forbidigo // in synctest
		w.with(func() {
			if _, there := w.pods["greedy"]; there || len(w.pods) != 1 {
				t.Errorf("pods that stay: %v", w.pods)
			}
		})
	})
}

// A fast fill is seen when it happens, not when the rest is over.
func TestAGlanceSeesAFastFill(t *testing.T) {
	t.Parallel()
	w := &world{available: 60 * gib, images: map[string]int64{"a": 20 * gib}, pods: map[string]int64{"greedy": 30 * gib}}
	run(t, w, w.parts(), func(t *testing.T, _ *Keeper) {
		time.Sleep(30 * time.Second) //nolint:forbidigo // in synctest
		w.with(func() {
			if len(w.passes) > 10 {
				t.Errorf("%d passes in 30 s in which nothing happened", len(w.passes))
			}
			w.available = 9 * gib
		})
		time.Sleep(glancePeriod + time.Millisecond) //nolint:forbidigo // in synctest
		equal(t, "done", w.done(), "image a")
	})
}

// A fast fill is seen coming by glances, as long before as a deletion takes.
func TestAFastFillIsSeenComing(t *testing.T) {
	t.Parallel()
	const step, every = 512 << 20, 50 * time.Millisecond // 10 GiB a second
	for _, tc := range []struct {
		name string
		lead time.Duration
		want []string
	}{
		{"two seconds before", 2 * time.Second, []string{"image a"}},
		{"a millisecond before", time.Millisecond, nil},
	} {
		w := &world{available: 40 * gib, images: map[string]int64{"a": 25 * gib, "b": 25 * gib}, pods: map[string]int64{"greedy": 30 * gib}}
		p := w.parts()
		p.Config = func(in engine.Input) (Setup, error) {
			s, err := setup(in)
			s.Config.Options.Forecast, s.Config.Horizon = true, tc.lead
			return s, err
		}
		run(t, w, p, func(t *testing.T, k *Keeper) {
			time.Sleep(time.Second) //nolint:forbidigo // in synctest
			for range 32 {          // 16 GiB of 30
				w.with(func() { w.available -= step })
				time.Sleep(every) //nolint:forbidigo // in synctest
			}
			equal(t, tc.name, w.done(), tc.want...)
			w.with(func() {
				for _, r := range w.records {
					if r.Decision.Outcome == engine.Foreseen && (len(r.Decision.Coming) != 1 || r.Decision.Coming[0].In > tc.lead) {
						t.Errorf("%s: %+v", tc.name, r.Decision)
					}
					if differences, err := record.Replay(r); err != nil || len(differences) > 0 {
						t.Errorf("made again: %v, %v", differences, err)
					}
				}
			})
		})
	}
}

// A deletion that took long is begun as much earlier the next time, if that comes soon.
func TestTheLeadIsWhatADeletionTook(t *testing.T) {
	t.Parallel()
	const unknown = 2 * time.Second
	for _, tc := range []struct{ took, ago, want time.Duration }{
		{time.Millisecond, time.Second, leastLead}, {4 * time.Second, time.Second, 4 * time.Second}, {time.Minute, time.Second, mostLead},
		{time.Millisecond, leadFor, unknown}, {time.Minute, leadFor, unknown},
	} {
		k := New(Parts{})
		if c := k.leading(engine.Config{Horizon: unknown}); c.Horizon != unknown {
			t.Errorf("before the first: horizon %s", c.Horizon)
		}
		k.lasted, k.measured = tc.took, time.Now().Add(-tc.ago)
		if c := k.leading(engine.Config{Horizon: unknown}); c.Horizon != tc.want {
			t.Errorf("%s after one that took %s: horizon %s, want %s", tc.ago, tc.took, c.Horizon, tc.want)
		}
	}
}

// The nearer a threshold, the smaller the steps that are looked at.
func TestNear(t *testing.T) {
	t.Parallel()
	lines := []line{{engine.NodeFSAvailable, 10, 50}}
	for available, want := range map[int64]bool{50: false, 41: false, 39: true, 10: true, 9: true, 60: false} {
		if got := near(lines, engine.Observations{engine.NodeFSAvailable: {Available: available}}); got != want {
			t.Errorf("%d available: %v, want %v", available, got, want)
		}
	}
	if near(lines, engine.Observations{}) || near(nil, engine.Observations{engine.NodeFSAvailable: {}}) {
		t.Error("what is not seen is near")
	}
}

func TestObserveDoesNothing(t *testing.T) {
	t.Parallel()
	w := &world{available: 2 * gib, images: map[string]int64{"a": gib}, pods: map[string]int64{"greedy": 30 * gib}}
	p := w.parts()
	p.Observe = true
	run(t, w, p, func(t *testing.T, k *Keeper) {
		time.Sleep(time.Minute) //nolint:forbidigo // in synctest
		equal(t, "done", w.done())
		w.with(func() {
			if len(w.records) == 0 || len(w.records[0].Steps) == 0 || len(w.records[0].Evicted) != 0 {
				t.Errorf("records %+v", w.records)
			}
			if len(w.records) > 3 {
				t.Errorf("%d records of one and the same", len(w.records))
			}
		})
		if s := k.Status(); s.Outcome != engine.Pressure || s.Counts.Acted != 0 || s.Threshold == "" {
			t.Errorf("status %+v", s)
		}
	})
}

// `cleave gc` reaches a keeper that observes, too.
func TestObserveDoesNothingWhenAsked(t *testing.T) {
	t.Parallel()
	w := &world{available: 50 * gib, images: map[string]int64{"a": gib}}
	p := w.parts()
	p.Observe, p.Collectors = true, []Collector{tidy{w}}
	run(t, w, p, func(t *testing.T, k *Keeper) {
		if _, err := k.Collect(t.Context(), false); !errors.Is(err, ErrObserves) {
			t.Errorf("asked to tidy up: %v, want ErrObserves", err)
		}
		steps, err := k.Collect(t.Context(), true)
		if err != nil || len(steps) != 1 || len(steps[0].Items) != 1 {
			t.Errorf("a dry run: %+v, %v", steps, err)
		}
		equal(t, "done", w.done())
	})
}

// A plan that does not hold is made anew, some times; nobody goes for it before.
func TestNobodyGoesForAPlanThatDidNotHold(t *testing.T) {
	t.Parallel()
	w := &world{available: 9 * gib, images: map[string]int64{"a": 5 * gib}, pods: map[string]int64{"greedy": 30 * gib}, runError: errors.New("it is in use now")}
	run(t, w, w.parts(), func(t *testing.T, _ *Keeper) {
		time.Sleep(glancePeriod) //nolint:forbidigo // in synctest
		w.with(func() { w.runError = nil })
		time.Sleep(time.Minute) //nolint:forbidigo // in synctest
		equal(t, "done", w.done(), "image a")
	})
	w = &world{available: 9 * gib, images: map[string]int64{"a": 5 * gib}, pods: map[string]int64{"greedy": 30 * gib}, runError: errors.New("it can't be deleted")}
	run(t, w, w.parts(), func(t *testing.T, _ *Keeper) {
		time.Sleep(time.Minute) //nolint:forbidigo // in synctest
		equal(t, "done", w.done(), "pod greedy")
	})
}

// While it is not known what may go, because the runtime does not answer, no pod goes, however long that is, and it is said why.
func TestNobodyGoesWhileNothingIsKnown(t *testing.T) {
	t.Parallel()
	away := fmt.Errorf("%w: containerd is away", ErrUnknown)
	for _, when := range []string{"planned", "carried out"} {
		w := &world{available: 9 * gib, images: map[string]int64{"a": 5 * gib}, pods: map[string]int64{"greedy": 30 * gib}}
		if w.runError = away; when == "planned" {
			w.runError, w.planError = nil, away
		}
		p := w.parts()
		core, logged := observer.New(zap.WarnLevel)
		p.Log = zap.New(core)
		run(t, w, p, func(t *testing.T, k *Keeper) {
			time.Sleep(time.Minute) //nolint:forbidigo // in synctest
			equal(t, when, w.done())
			if s := k.Status(); !strings.Contains(s.Held, "containerd is away") || s.Outcome != engine.Pressure {
				t.Errorf("status %+v", s)
			}
			if n := logged.Len(); n != 1 {
				t.Errorf("%s: the same was logged %d times in a minute: the log is on the disk that is full", when, n)
			}
			w.with(func() {
				if n := len(w.passes); n > 75 {
					t.Errorf("%d passes in a minute in which nothing could be done", n)
				}
				w.runError, w.planError = nil, nil
			})
			time.Sleep(2 * time.Second) //nolint:forbidigo // in synctest
			equal(t, when, w.done(), "image a")
			if s := k.Status(); s.Held != "" {
				t.Errorf("status %+v", s)
			}
		})
	}
}

// What can't be planned for another reason than a missing fact, such as a folder of logs that can't be read, holds nobody for ever.
func TestAPlanThatCantBeMadeHoldsNobodyForEver(t *testing.T) {
	t.Parallel()
	w := &world{available: 9 * gib, planError: errors.New("the folder of logs is a symlink"), pods: map[string]int64{"greedy": 30 * gib}}
	run(t, w, w.parts(), func(t *testing.T, k *Keeper) {
		time.Sleep(glancePeriod) //nolint:forbidigo // in synctest
		equal(t, "done at once", w.done())
		time.Sleep(time.Minute) //nolint:forbidigo // in synctest
		equal(t, "done", w.done(), "pod greedy")
		if s := k.Status(); s.Held != "" {
			t.Errorf("status %+v", s)
		}
	})
}

// While a pod is on its way out of one disk, which takes minutes, the images of another one go that is short, too; pods of that one wait.
func TestTwoDisksAreShortAtOnce(t *testing.T) {
	t.Parallel()
	w := &world{available: gib, pods: map[string]int64{"greedy": 30 * gib}, holds: true}
	other := &world{available: 50 * gib, images: map[string]int64{"a": 5 * gib, "b": 5 * gib}, pods: map[string]int64{}}
	p := w.parts()
	p.Reclaimers[engine.UnusedImages] = images{other}
	p.Glance = func(ctx context.Context) (engine.Observations, error) {
		seen, err := w.glance(ctx)
		images, err2 := other.glance(ctx)
		seen[engine.ImageFSAvailable] = images[engine.NodeFSAvailable]
		return seen, errors.Join(err, err2)
	}
	p.Look = func(ctx context.Context) (engine.Input, error) {
		in, err := w.look(ctx)
		images, err2 := other.look(ctx)
		in.Layout = &engine.Detected{ImageApart: true, ContainerOffNode: true}
		in.Summary.ImageFS, in.Summary.ContainerFS = images.Summary.NodeFS, images.Summary.NodeFS
		for i := range in.Summary.Pods {
			c := &in.Summary.Pods[i].Containers[0]
			c.Logs, c.RootFS = c.RootFS, nil
		}
		return in, errors.Join(err, err2)
	}
	p.Config = func(in engine.Input) (Setup, error) {
		s, err := setup(in)
		of := s.Config.Thresholds[0]
		of.Signal = engine.ImageFSAvailable
		s.Config.Thresholds = append(s.Config.Thresholds, of)
		return s, err
	}
	run(t, w, p, func(t *testing.T, k *Keeper) {
		time.Sleep(5 * time.Second) //nolint:forbidigo // in synctest
		equal(t, "done on the first disk", w.done(), "pod greedy")
		equal(t, "done on the other", other.done())
		other.with(func() { other.available = 8 * gib })
		time.Sleep(2 * time.Second) //nolint:forbidigo // in synctest
		equal(t, "done on the first disk", w.done(), "pod greedy")
		equal(t, "done on the other", other.done(), "image a")
		if c := k.Status().Counts; c.Deleted != 1 || c.GainedBytes != 5*gib || c.Evicted != 1 {
			t.Errorf("counted %+v", c)
		}
		w.with(func() {
			var recorded int
			for _, r := range w.records {
				if len(r.Steps) > 0 && r.Decision.Threshold.Signal != engine.NodeFSAvailable { // imagefs or containerfs, which are one
					recorded++
					if len(r.Evicted) > 0 || r.Decision.Victim != nil {
						t.Errorf("recorded %+v", r)
					}
				}
				if differences, err := record.Replay(r); err != nil || len(differences) > 0 {
					t.Errorf("made again: %v, %v", differences, err)
				}
			}
			if recorded != 1 {
				t.Errorf("%d records of the other disk", recorded)
			}
		})
		close(w.stays)
	})
}

// While others use up what comes free, images go one after the other, no pod goes before the last of them, and nobody waits a second.
func TestADiskThatFillsUpFasterThanItIsFreed(t *testing.T) {
	t.Parallel()
	w := &world{available: 9 * gib, images: map[string]int64{}, pods: map[string]int64{"greedy": 90 * gib}, eats: 4 * gib}
	for _, id := range []string{"a", "b", "c", "d", "e", "f"} {
		w.images[id] = 4 * gib
	}
	began := time.Now()
	run(t, w, w.parts(), func(t *testing.T, _ *Keeper) {
		began = time.Now()
		time.Sleep(2 * time.Second) //nolint:forbidigo // in synctest
		w.with(func() {
			if n := len(w.calls); n != 7 || w.calls[6] != "pod greedy" {
				t.Errorf("done %q", w.calls)
			}
			if took := w.evicted.Sub(began); took > time.Second {
				t.Errorf("the pod went after %s", took)
			}
		})
	})
}

// A second pod takes at once what the first gave back: it goes as soon as nothing is left of the first, and where that can't be told only
// when its space is waited for no more.
func TestGAP17_WhatCameAndWasTakenIsNotAwaited(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		remains func(engine.Eviction) Remains
		want    time.Duration
	}{
		"nothing is left":    {func(engine.Eviction) Remains { return func(context.Context) bool { return rests(3 * time.Second) } }, 3 * time.Second},
		"it stays":           {func(engine.Eviction) Remains { return func(context.Context) bool { return !rests(3 * time.Second) } }, 30 * time.Second},
		"nobody can tell":    {nil, 30 * time.Second},
		"of this one nobody": {func(engine.Eviction) Remains { return nil }, 30 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := &world{available: 5 * gib, pods: map[string]int64{"first": 60 * gib, "second": 20 * gib}, taken: 60 * gib}
			parts := w.parts()
			parts.Remains = tc.remains
			run(t, w, parts, func(t *testing.T, _ *Keeper) {
				began := time.Now()
				rests(time.Second)
				equal(t, "done", w.done(), "pod first")
				w.with(func() { w.taken = 0 })
				rests(time.Minute)
				equal(t, "done", w.done(), "pod first", "pod second")
				w.with(func() {
					if took := w.evicted.Sub(began); took < tc.want || took > tc.want+2*time.Second {
						t.Errorf("the second went after %s, want %s", took, tc.want)
					}
				})
			})
		})
	}
}

// rests lets time pass.
func rests(d time.Duration) bool {
	time.Sleep(d) //nolint:forbidigo // in synctest
	return true
}

// The sooner a line is met at the present speed, the sooner is the next glance.
func TestSoon(t *testing.T) {
	t.Parallel()
	lines := []line{{engine.NodeFSAvailable, 1000, 9000}}
	at := func(available int64) engine.Observations {
		return engine.Observations{engine.NodeFSAvailable: {Available: available}}
	}
	now := time.Now()
	for _, tc := range []struct {
		name          string
		before, after int64
		want          time.Duration
	}{
		{"nothing moves", 9000, 9000, glancePeriod},
		{"it gets more", 5000, 9000, glancePeriod},
		{"far away", 9000, 8999, glancePeriod},
		{"in 40 ms", 3000, 1800, 20 * time.Millisecond},
		{"at any moment", 3000, 1001, glanceLeast},
		{"it is met", 3000, 900, glancePeriod},
	} {
		if got := soon(lines, glimpse{now, at(tc.before)}, glimpse{now.Add(60 * time.Millisecond), at(tc.after)}); got != tc.want {
			t.Errorf("%s: %s, want %s", tc.name, got, tc.want)
		}
	}
	if got := soon(lines, glimpse{}, glimpse{now, at(1001)}); got != glancePeriod {
		t.Errorf("after the first glance: %s", got)
	}
}

// Somebody who tidies up lets a pass in between that has to act.
func TestPressureDoesNotWaitForTidyingUp(t *testing.T) {
	t.Parallel()
	for _, asked := range []bool{true, false} {
		w := &world{available: 50 * gib, images: map[string]int64{"a": gib, "b": gib, "c": gib}, pods: map[string]int64{"greedy": 30 * gib}, pause: 10 * time.Second}
		p := w.parts()
		p.Reclaimers[engine.UnusedImages] = nothing{engine.UnusedImages}
		p.Collectors = []Collector{all{w}}
		run(t, w, p, func(t *testing.T, k *Keeper) {
			time.Sleep(time.Second) //nolint:forbidigo // in synctest
			ended := make(chan error, 1)
			if asked {
				go func() { _, err := k.Collect(t.Context(), false); ended <- err }()
			} else {
				time.Sleep(collectPeriod) //nolint:forbidigo // in synctest
				ended <- nil
			}
			time.Sleep(time.Second) //nolint:forbidigo // in synctest
			w.with(func() { w.available = 2 * gib })
			time.Sleep(11 * time.Second) //nolint:forbidigo // in synctest
			done := w.done()
			if len(done) < 2 || done[0] != "image a" || done[1] != "pod greedy" {
				t.Errorf("asked %t: done %q", asked, done)
			}
			if err := <-ended; err != nil {
				t.Error(err)
			}
		})
	}
}

// all tidies all images up, each of which takes some time.
type all struct{ *world }

func (all) Name() string { return "all images" }

func (c all) Plan(ctx context.Context) (record.Step, error) {
	return images(c).Plan(ctx, Want{NeedBytes: garbage.Everything})
}

func (c all) Run(ctx context.Context, s record.Step) (record.Step, error) {
	time.Sleep(c.pause) //nolint:forbidigo // in synctest
	return images(c).Run(ctx, Want{}, s)
}

// What surprised in the last pass under pressure is no reason to hurry when the pressure is over, and neither is a line of old.
func TestTheHurryEnds(t *testing.T) {
	t.Parallel()
	count := func(w *world) (n int) {
		w.with(func() { n = len(w.passes) })
		return n
	}
	w := &world{available: 9 * gib, images: map[string]int64{"a": 5 * gib}, runError: errors.New("it is in use now")}
	run(t, w, w.parts(), func(t *testing.T, _ *Keeper) {
		time.Sleep(glancePeriod / 2) //nolint:forbidigo // in synctest
		w.with(func() { w.available = 50 * gib })
		time.Sleep(time.Second) //nolint:forbidigo // in synctest
		before := count(w)
		time.Sleep(time.Minute) //nolint:forbidigo // in synctest
		if n := count(w) - before; n > 10 {
			t.Errorf("%d passes in a calm minute after a surprise", n)
		}
	})
	w = &world{available: 50 * gib}
	run(t, w, w.parts(), func(t *testing.T, _ *Keeper) {
		time.Sleep(time.Second) //nolint:forbidigo // in synctest
		w.with(func() { w.available, w.lookError = gib, errors.New("no layout") })
		time.Sleep(time.Minute) //nolint:forbidigo // in synctest
		if n := count(w); n < 50 || n > 70 {
			t.Errorf("%d passes in a minute in which nothing could be seen", n)
		}
	})
}

func TestBlindnessDecidesNothing(t *testing.T) {
	t.Parallel()
	w := &world{available: 2 * gib, pods: map[string]int64{"greedy": 30 * gib}, lookError: errors.New("no layout")}
	run(t, w, w.parts(), func(t *testing.T, k *Keeper) {
		time.Sleep(time.Minute) //nolint:forbidigo // in synctest
		equal(t, "done", w.done())
		if s := k.Status(); s.Problem == "" || s.LookedAt != nil {
			t.Errorf("status %+v", s)
		}
		w.with(func() { w.lookError = nil })
		time.Sleep(engine.LongestRest + time.Second) //nolint:forbidigo // in synctest
		equal(t, "done", w.done(), "pod greedy")
		if s := k.Status(); s.Problem != "" {
			t.Errorf("status %+v", s)
		}
	})
}

// tidy is a collector of the world's images.
type tidy struct{ *world }

func (tidy) Name() string { return "images" }

func (c tidy) Plan(ctx context.Context) (record.Step, error) {
	return images(c).Plan(ctx, Want{NeedBytes: 1})
}

func (c tidy) Run(ctx context.Context, s record.Step) (record.Step, error) {
	return images(c).Run(ctx, Want{}, s)
}

func TestTidyingUpWaitsForCalm(t *testing.T) {
	t.Parallel()
	w := &world{available: 50 * gib, images: map[string]int64{"a": gib, "b": gib}}
	p := w.parts()
	p.Collectors = []Collector{tidy{w}}
	run(t, w, p, func(t *testing.T, k *Keeper) {
		time.Sleep(collectPeriod + time.Second) //nolint:forbidigo // in synctest
		equal(t, "done", w.done(), "image a")
		steps, err := k.Collect(t.Context(), true)
		if err != nil || len(steps) != 1 || len(steps[0].Items) != 1 || steps[0].Items[0].ID != "b" {
			t.Errorf("it would do %+v, %v", steps, err)
		}
		equal(t, "done", w.done(), "image a")
		steps, err = k.Collect(t.Context(), false)
		if err != nil || len(steps) != 1 || steps[0].Items[0].ActualBytes == nil {
			t.Errorf("it did %+v, %v", steps, err)
		}
		equal(t, "done", w.done(), "image a", "image b")
		if c := k.Status().Counts; c.Deleted != 2 || c.GainedBytes != 2*gib || c.ExpectedBytes != 2*gib {
			t.Errorf("counted %+v", c)
		}
		// Both are recorded, the dry run is not.
		var recorded []string
		w.with(func() {
			for _, r := range w.records {
				if r.Collection == nil || len(r.Steps) != 1 || len(r.Steps[0].Items) != 1 || r.Input.Now.IsZero() {
					t.Errorf("record %+v", r)
					continue
				}
				recorded = append(recorded, fmt.Sprintf("%s %s %t %t", r.Collection.Name, r.Steps[0].Items[0].ID, r.Collection.Asked, *r.Steps[0].Items[0].ActualBytes == gib))
				if differences, err := record.Replay(r); err != nil || len(differences) > 0 {
					t.Errorf("made again: %v, %v", differences, err)
				}
			}
		})
		equal(t, "recorded", recorded, "images a false true", "images b true true")
	})
}

// exact asks for less than all its items, each of which frees more than it was to.
type exact struct{ *world }

func (exact) Name() string { return "some images" }

func (c exact) Plan(ctx context.Context) (record.Step, error) {
	step, err := images(c).Plan(ctx, Want{NeedBytes: garbage.Everything})
	step.Images = &record.ImageChoice{NeedBytes: 2 * gib}
	return step, err
}

func (c exact) Run(ctx context.Context, s record.Step) (record.Step, error) {
	return images(c).Run(ctx, Want{}, s)
}

// What came free of one item counts for the others of the same collection.
func TestTidyingUpEndsWhenItIsEnough(t *testing.T) {
	t.Parallel()
	w := &world{available: 50 * gib, images: map[string]int64{"a": gib, "b": gib, "c": gib, "d": gib}}
	p := w.parts()
	p.Collectors = []Collector{exact{w}}
	run(t, w, p, func(t *testing.T, k *Keeper) {
		if steps, err := k.Collect(t.Context(), false); err != nil || len(steps) != 1 || len(steps[0].Items) != 4 || steps[0].Items[2].ActualBytes != nil {
			t.Errorf("it did %+v, %v", steps, err)
		}
		equal(t, "done", w.done(), "image a", "image b")
	})
}

// barren is a collector that has work to do to find out that there is nothing.
type barren struct {
	plans *int
	step  record.Step
}

func (barren) Name() string { return "nothing" }

func (b barren) Plan(context.Context) (record.Step, error) { *b.plans++; return b.step, nil }

func (barren) Run(_ context.Context, s record.Step) (record.Step, error) { return s, nil }

func TestWhatIsLookedForInVainIsLookedForLessOften(t *testing.T) {
	t.Parallel()
	for kind, atLeast := range map[engine.Reclaim]int{"": 50, engine.UnusedImages: 9} {
		w, plans := &world{available: 50 * gib}, 0
		p := w.parts()
		p.Collectors = []Collector{barren{&plans, record.Step{Kind: kind}}}
		run(t, w, p, func(t *testing.T, _ *Keeper) {
			time.Sleep(10 * time.Minute) //nolint:forbidigo // in synctest
		})
		if plans < atLeast || kind != "" && plans > 11 {
			t.Errorf("kind %q was looked for %d times in 10 min", kind, plans)
		}
	}
}

// counting counts how often a kind is planned.
type counting struct {
	Reclaimer
	plans *int
}

func (c counting) Plan(ctx context.Context, want Want) (record.Step, error) {
	*c.plans++
	return c.Reclaimer.Plan(ctx, want)
}

// REC-9: while nothing can be done about a shortage, containerd is not asked about all images each second. Before a pod goes it is.
func TestREC9_AReclaimThatHadNothingRests(t *testing.T) {
	t.Parallel()
	w, plans := &world{available: 2 * gib}, 0
	p := w.parts()
	p.Reclaimers[engine.UnusedImages] = counting{images{w}, &plans}
	run(t, w, p, func(t *testing.T, _ *Keeper) {
		time.Sleep(time.Minute) //nolint:forbidigo // in synctest
		w.with(func() {
			if plans < 5 || plans > 8 {
				t.Errorf("images were looked for %d times in a minute of %d passes", plans, len(w.passes))
			}
			w.images, w.pods = map[string]int64{"a": 20 * gib}, map[string]int64{"greedy": 30 * gib}
		})
		time.Sleep(2 * time.Second) //nolint:forbidigo // in synctest
		equal(t, "done", w.done(), "image a")
	})
}

func TestPlanChangesNothing(t *testing.T) {
	t.Parallel()
	w := &world{available: 50 * gib, images: map[string]int64{"a": gib, "b": gib}}
	run(t, w, w.parts(), func(t *testing.T, k *Keeper) {
		for need, want := range map[int64]int{garbage.Everything: 2, gib: 1} {
			steps, err := k.Plan(t.Context(), engine.NodeFSAvailable, engine.Single, need)
			if err != nil {
				t.Fatal(err)
			}
			items := 0
			for _, s := range steps {
				items += len(s.Items)
			}
			if items != want {
				t.Errorf("for %d bytes %d items, want %d", need, items, want)
			}
		}
		equal(t, "done", w.done())
	})
}

// The end of the keeper ends what it does, and an eviction that is under way is not waited for for ever.
func TestTheEndEndsAll(t *testing.T) {
	t.Parallel()
	w := &world{available: 2 * gib, pods: map[string]int64{"greedy": 30 * gib}, holds: true}
	run(t, w, w.parts(), func(t *testing.T, _ *Keeper) {
		time.Sleep(time.Second) //nolint:forbidigo // in synctest
		equal(t, "done", w.done(), "pod greedy")
	})
}
