package reclaimtest

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/garbage"
	"github.com/cleave-cri/cleave/engine/record"
	"github.com/cleave-cri/cleave/reclaim"
)

// Fates are pods' fates that a test sets.
type Fates struct {
	mu   sync.Mutex
	pods garbage.Pods // guarded by mu
}

// Set sets a pod's fate.
func (f *Fates) Set(uid string, fate garbage.PodFate) {
	f.mu.Lock()
	defer f.mu.Unlock()
	next := map[string]garbage.PodFate{uid: fate}
	for k, v := range f.pods.Fate {
		if k != uid {
			next[k] = v
		}
	}
	f.pods = garbage.Pods{Fate: next, SourcesReady: true, Synced: true}
}

// Pods implements [reclaim.PodFates].
func (f *Fates) Pods(context.Context) (garbage.Pods, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.pods, nil
}

// Memory remembers images in memory only.
type Memory struct{ images garbage.Images }

// Look implements [reclaim.Memory].
func (m *Memory) Look(list []garbage.Listed, users []garbage.ImageUser, began, now time.Time) (garbage.Images, map[string]bool) {
	next, inUse := m.images.Look(list, users, began, now)
	m.images = next
	return next, inUse
}

// Unlocked is a lock that nobody else knows.
type Unlocked struct{}

// Named implements [reclaim.ImageLock].
func (Unlocked) Named([]string) error { return nil }

// Delete implements [reclaim.ImageLock].
func (Unlocked) Delete([]string) (func(), error) { return func() {}, nil }

// Runs is a layer of which images can be run; others can't.
var Runs = garbage.Layer{ID: "runs", Bytes: 2 << 20}

// World is a runtime that the suite makes things in. All of it is on one
// filesystem, which nobody else writes to.
type World struct {
	Images     *reclaim.Images
	Containers *reclaim.Containers
	Fates      *Fates
	// Pull makes an image of layers and pulls it; layers with the same ID are one.
	Pull func(t testing.TB, name string, layers ...garbage.Layer) (id string)
	// Pin pins an image, Remove removes one behind everybody's back.
	Pin, Remove func(t testing.TB, id string)
	// Run makes a container that runs, of an image with the layer Runs; End ends
	// it, so that it has exited.
	Run func(t testing.TB, uid, name, image string) (id string)
	End func(t testing.TB, id string)
	// Inventory is what a choice needs.
	Inventory func(t testing.TB) reclaim.ImageInventory
}

const mib = 1 << 20

// Suite tests that what may go goes, and nothing else.
func Suite(t *testing.T, make func(t *testing.T) *World) {
	t.Helper()
	own := func(id string, n int64) garbage.Layer { return garbage.Layer{ID: id, Bytes: n * mib} }

	// T4: shared layers count when the last image that has them goes.
	t.Run("images go in order and free what was promised", func(t *testing.T) {
		w := make(t)
		shared := own("shared", 8)
		a := w.Pull(t, "registry.example/t4/a:1", shared, own("a", 2))
		b := w.Pull(t, "registry.example/t4/b:1", shared, own("b", 4))
		c := w.Pull(t, "registry.example/t4/c:1", own("c", 8))
		w.pick(t) // seen in this order
		step := w.pick(t)
		if got := ids(step); !sameSet(got, a, b, c) {
			t.Fatalf("picked %v", got)
		}
		done := w.carryOut(t, step, nil)
		Exact(t, done)
		if list := ids(w.pick(t)); len(list) > 0 {
			t.Errorf("a second plan has %v", list)
		}
	})
	t.Run("no more images go than needed", func(t *testing.T) {
		w := make(t)
		for _, name := range []string{"a", "b", "c", "d"} {
			w.Pull(t, "registry.example/need/"+name+":1", own(name, 8))
		}
		step := w.pickFor(t, 12*mib)
		done := w.carryOut(t, step, nil)
		if len(done.Items) != 2 || len(ids(w.pick(t))) != 2 {
			t.Errorf("%d went, %d are left", len(done.Items), len(ids(w.pick(t))))
		}
	})
	t.Run("what is used or pinned stays", func(t *testing.T) {
		w := make(t)
		running := w.Pull(t, "registry.example/used/running:1", Runs, own("r", 1))
		exited := w.Pull(t, "registry.example/used/exited:1", Runs, own("e", 1))
		pinned := w.Pull(t, "registry.example/used/pinned:1", own("p", 1))
		free := w.Pull(t, "registry.example/used/free:1", own("f", 1))
		w.Run(t, "uid-running", "app", running)
		w.End(t, w.Run(t, "uid-exited", "app", exited))
		w.Pin(t, pinned)
		step := w.pick(t)
		if got := ids(step); !slices.Equal(got, []string{free}) {
			t.Fatalf("picked %v, want %s", got, free)
		}
		w.carryOut(t, step, nil)
	})
	// Between the plan and the act things happen.
	for name, happen := range map[string]func(*testing.T, *World, string){
		"a container began to use it": func(t *testing.T, w *World, id string) { w.Run(t, "uid-late", "app", id) },
		"a container used it and has exited": func(t *testing.T, w *World, id string) {
			w.End(t, w.Run(t, "uid-late", "app", id))
		},
		"it was pinned":                   func(t *testing.T, w *World, id string) { w.Pin(t, id) },
		"it was removed by somebody else": func(t *testing.T, w *World, id string) { w.Remove(t, id) },
	} {
		t.Run("a step ends when "+name, func(t *testing.T) {
			w := make(t)
			w.Pull(t, "registry.example/late/a:1", Runs, own("a", 1))
			w.Pull(t, "registry.example/late/b:1", Runs, own("b", 1))
			step := w.pick(t)
			if len(step.Items) != 2 {
				t.Fatalf("picked %v", ids(step))
			}
			happen(t, w, step.Items[0].ID)
			done := w.carryOut(t, step, reclaim.ErrSurprise)
			if done.Items[0].Error == "" || done.Items[1].Error != "" || done.Items[1].ActualBytes != nil {
				t.Errorf("what came of it: %+v", done.Items)
			}
			if left := w.known(t); !left[step.Items[1].ID] {
				t.Errorf("the second one went all the same; left %v", left)
			}
		})
	}
	// T29: a dead container goes, a living pod's does not.
	t.Run("dead containers go", func(t *testing.T) {
		w := make(t)
		image := w.Pull(t, "registry.example/dead/app:1", Runs)
		w.Fates.Set("uid-alive", garbage.Alive)
		w.Fates.Set("uid-gone", garbage.Gone)
		alive := w.Run(t, "uid-alive", "app", image)
		dead := w.Run(t, "uid-gone", "app", image)
		w.End(t, dead)
		choice, err := w.Containers.Choice(t.Context(), garbage.ContainerPolicy{PerContainer: 1, Total: -1}, nil, true)
		if err != nil {
			t.Fatal(err)
		}
		step := record.Step{Kind: engine.DeadContainers, Containers: &choice, Items: choice.Items()}
		if got := ids(step); !slices.Contains(got, dead) || slices.Contains(got, alive) {
			t.Fatalf("picked %v, dead is %s, alive %s", got, dead, alive)
		}
		if checked, err := w.Containers.Check(t.Context(), step); err != nil {
			t.Fatalf("a dry run: %v: %+v", err, checked.Items)
		}
		if _, err := w.Containers.Run(t.Context(), step); err != nil {
			t.Fatal(err)
		}
		left, err := w.Containers.Choice(t.Context(), garbage.ContainerPolicy{PerContainer: 1, Total: -1}, nil, true)
		if err != nil || len(left.Containers) != 1 || left.Containers[0].ID != alive || left.Containers[0].State != garbage.Running {
			t.Errorf("left are %+v (%v)", left.Containers, err)
		}
	})
	t.Run("a step ends when a pod is alive after all", func(t *testing.T) {
		w := make(t)
		image := w.Pull(t, "registry.example/revived/app:1", Runs)
		w.Fates.Set("uid-gone", garbage.Gone)
		w.End(t, w.Run(t, "uid-gone", "app", image))
		choice, err := w.Containers.Choice(t.Context(), garbage.ContainerPolicy{PerContainer: 1, Total: -1}, nil, true)
		if err != nil {
			t.Fatal(err)
		}
		w.Fates.Set("uid-gone", garbage.Alive)
		step := record.Step{Kind: engine.DeadContainers, Containers: &choice, Items: choice.Items()}
		if _, err := w.Containers.Run(t.Context(), step); len(step.Items) == 0 || !errors.Is(err, reclaim.ErrSurprise) {
			t.Errorf("%d picked: %v", len(step.Items), err)
		}
		if left, err := w.Containers.Choice(t.Context(), garbage.ContainerPolicy{}, nil, true); err != nil || len(left.Containers) != 1 {
			t.Errorf("left are %+v (%v)", left.Containers, err)
		}
	})
}

func (w *World) pick(t testing.TB) record.Step { return w.pickFor(t, garbage.Everything) }

func (w *World) pickFor(t testing.TB, need int64) record.Step {
	t.Helper()
	choice, err := w.Images.Choice(t.Context(), garbage.ImagePolicy{Options: garbage.Cleave()}, w.Inventory(t), need)
	if err != nil {
		t.Fatal(err)
	}
	return record.Step{Kind: engine.UnusedImages, Images: &choice, Items: choice.Items()}
}

// known are the images that are there.
func (w *World) known(t testing.TB) map[string]bool {
	t.Helper()
	out := map[string]bool{}
	for key := range w.pick(t).Images.Known {
		out[key] = true
	}
	return out
}

// carryOut runs a step, after a dry run that comes to the same, and checks what
// must hold for each.
func (w *World) carryOut(t testing.TB, step record.Step, want error) record.Step {
	t.Helper()
	before := w.known(t)
	if _, err := w.Images.Check(t.Context(), step); !errors.Is(err, want) {
		t.Errorf("a dry run: %v, want %v", err, want)
	}
	if after := w.known(t); len(after) != len(before) {
		t.Errorf("a dry run left %d of %d images", len(after), len(before))
	}
	done, err := w.Images.Run(t.Context(), step)
	if !errors.Is(err, want) {
		t.Fatalf("run: %v, want %v: %+v", err, want, done.Items)
	}
	after := w.known(t)
	for i, item := range done.Items {
		if item.ActualBytes != nil && item.Error == "" && after[item.ID] {
			t.Errorf("%s went and is there", item.ID)
		}
		if step.Items[i].ActualBytes != nil {
			t.Error("the plan was written to")
		}
	}
	for id := range before {
		if !after[id] && !slices.Contains(ids(step), id) {
			t.Errorf("%s went and was not picked", id)
		}
	}
	return done
}

// Exact checks that what came free is what was promised, to 1 % or 1 MiB for
// each item.
func Exact(t testing.TB, step record.Step) {
	t.Helper()
	for _, item := range step.Items {
		if item.ActualBytes == nil || item.ExpectedBytes == nil {
			t.Errorf("%s: promised %v, freed %v: %s", item.ID, item.ExpectedBytes, item.ActualBytes, item.Error)
			continue
		}
		if off := max(*item.ActualBytes-*item.ExpectedBytes, *item.ExpectedBytes-*item.ActualBytes); off > max(mib, *item.ExpectedBytes/100) {
			t.Errorf("%s: promised %d, freed %d (%s)", item.ID, *item.ExpectedBytes, *item.ActualBytes, item.Note)
		}
	}
}

func ids(step record.Step) (out []string) {
	for _, i := range step.Items {
		out = append(out, i.ID)
	}
	return out
}

func sameSet(got []string, want ...string) bool {
	got = slices.Sorted(slices.Values(got))
	slices.Sort(want)
	return slices.Equal(got, want)
}
