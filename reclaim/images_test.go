package reclaim_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/garbage"
	"github.com/cleave-cri/cleave/engine/record"
	"github.com/cleave-cri/cleave/proxy/imagelock"
	"github.com/cleave-cri/cleave/reclaim"
	"github.com/cleave-cri/cleave/reclaim/reclaimtest"
	"github.com/cleave-cri/cleave/reclaim/seen"
)

const gib = 1 << 30

func layer(id string, bytes int64) garbage.Layer { return garbage.Layer{ID: id, Bytes: bytes} }

// fake is a world on a runtime in memory.
func fake(*testing.T) (*reclaimtest.World, *reclaimtest.Runtime) {
	r := reclaimtest.NewRuntime()
	site := reclaim.Site{Space: r, Holders: holders{r}}
	fates := &reclaimtest.Fates{}
	return &reclaimtest.World{
		Images:     &reclaim.Images{Site: site, CRI: r.Images, Runtime: r.Containers, Store: r, Lock: reclaimtest.Unlocked{}, Memory: &reclaimtest.Memory{}},
		Containers: &reclaim.Containers{Site: site, Runtime: r.Containers, Pods: fates},
		Fates:      fates,
		Pull:       func(_ testing.TB, name string, layers ...garbage.Layer) string { return r.Pull(name, layers...) },
		Pin:        func(_ testing.TB, id string) { r.Pin(id) },
		Remove: func(t testing.TB, id string) {
			if err := reclaimtest.Remove(t.Context(), r, id); err != nil {
				t.Error(err)
			}
		},
		Run:       func(_ testing.TB, uid, name, image string) string { return r.RunContainer(uid, name, image) },
		End:       func(_ testing.TB, id string) { r.Exit(id) },
		Inventory: func(testing.TB) reclaim.ImageInventory { return r.Inventory() },
	}, r
}

type holders struct{ r *reclaimtest.Runtime }

func (h holders) Holders(context.Context, string, record.Item, int64) string { return h.r.Holder() }

func TestSuite(t *testing.T) {
	t.Parallel()
	reclaimtest.Suite(t, func(t *testing.T) *reclaimtest.World {
		w, _ := fake(t)
		return w
	})
}

func pick(t *testing.T, w *reclaimtest.World, policy garbage.ImagePolicy, need int64) record.Step {
	t.Helper()
	choice, err := w.Images.Choice(t.Context(), policy, w.Inventory(t), need)
	if err != nil {
		t.Fatal(err)
	}
	return record.Step{Kind: engine.UnusedImages, Images: &choice, Items: choice.Items()}
}

var plain = garbage.ImagePolicy{Options: garbage.Cleave()}

// T4: a planner by nominal size stops after A and B.
func TestT4_ExclusiveBytes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, _ := fake(t)
		var images []string
		for _, layers := range [][]garbage.Layer{
			{layer("shared", 4*gib), layer("a", gib)}, {layer("shared", 4*gib), layer("b", 2*gib)}, {layer("c", 4*gib)},
		} {
			images = append(images, w.Pull(t, "app", layers...))
			pick(t, w, plain, 0)
			time.Sleep(time.Minute) //nolint:forbidigo // time is the bubble's
		}
		done, err := w.Images.Run(t.Context(), pick(t, w, plain, 8*gib))
		if err != nil || len(done.Items) != 3 {
			t.Fatalf("%+v: %v", done.Items, err)
		}
		for i, want := range []int64{1 * gib, 6 * gib, 4 * gib} {
			if got := done.Items[i]; got.ID != images[i] || *got.ExpectedBytes != want || *got.ActualBytes != want {
				t.Errorf("item %d: %s, %d expected, %d came free; want %s, %d", i, got.ID, *got.ExpectedBytes, *got.ActualBytes, images[i], want)
			}
		}
	})
}

// T5, T6 and T7: target of a periodic run; the oldest candidate is pinned.
func TestT5_T6_T7_PeriodicCollection(t *testing.T) {
	t.Parallel()
	capacity, available := uint64(107374182400), uint64(12884901888)
	policy := garbage.ImagePolicy{HighPercent: 85, LowPercent: 80}
	need, err := policy.Need(&available, &capacity)
	if err != nil || need.UsedPercent != 88 || need.Bytes != 8589934592 {
		t.Fatalf("T5: %+v, %v", need, err)
	}
	w, _ := fake(t)
	pause := w.Pull(t, "registry.k8s.io/pause:3.10", layer("pause", 298685))
	w.Pin(t, pause)
	pick(t, w, policy, 0) // the oldest
	for _, name := range []string{"a", "b", "c"} {
		w.Pull(t, name, layer(name, 4294967296))
		pick(t, w, policy, 0)
	}
	done, err := w.Images.Run(t.Context(), pick(t, w, policy, need.Bytes))
	if err != nil || len(done.Items) != 2 || slices.ContainsFunc(done.Items, func(i record.Item) bool { return i.ID == pause || *i.ActualBytes != 4294967296 }) {
		t.Errorf("T5, T7: %+v, %v", done.Items, err)
	}
	halfPercent := capacity / 200
	full := garbage.ImagePolicy{HighPercent: 100, LowPercent: 100, Options: garbage.Cleave()}
	if need, err = full.Need(&halfPercent, &capacity); err != nil || need.Bytes >= 0 {
		t.Fatalf("T6: %+v, %v", need, err)
	}
	if step := pick(t, w, full, need.Bytes); len(step.Items) > 0 {
		t.Errorf("T6: %+v", step.Items)
	}
}

// T8: what was seen before a restart counts after it.
func TestT8_AgeOverRestarts(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	policy := garbage.ImagePolicy{MinAge: 10 * time.Minute, Options: garbage.Cleave()}
	synctest.Test(t, func(t *testing.T) {
		w, _ := fake(t)
		id := w.Pull(t, "app", layer("app", gib))
		before, err := seen.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		w.Images.Memory = before
		pick(t, w, policy, gib)
		if err := errors.Join(before.Save(nil, true), before.Close()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(3 * time.Minute) //nolint:forbidigo // time is the bubble's
		after, err := seen.Open(dir)
		if err != nil || after.Note() != "" {
			t.Fatal(err, after.Note())
		}
		defer after.Close() //nolint:errcheck // read only
		w.Images.Memory = after
		time.Sleep(10 * time.Second) //nolint:forbidigo // time is the bubble's
		if step := pick(t, w, policy, gib); len(step.Items) > 0 {
			t.Errorf("10 s after the restart: %+v", step.Items)
		}
		time.Sleep(6*time.Minute + 50*time.Second - time.Millisecond) //nolint:forbidigo // time is the bubble's
		if step := pick(t, w, policy, gib); len(step.Items) > 0 {
			t.Errorf("just before it is old enough: %+v", step.Items)
		}
		time.Sleep(time.Millisecond) //nolint:forbidigo // time is the bubble's
		step := pick(t, w, policy, gib)
		if _, err := w.Images.Run(t.Context(), step); err != nil || len(step.Items) != 1 || step.Items[0].ID != id {
			t.Errorf("6m50s later: %+v, %v", step.Items, err)
		}
	})
}

// Each of these keeps an image from being picked, and ends a step that has it.
func TestNeverACandidate(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name, why string
		happen    func(t *testing.T, w *reclaimtest.World, r *reclaimtest.Runtime, id string)
	}{
		{"pinned", "pinned", func(t *testing.T, w *reclaimtest.World, _ *reclaimtest.Runtime, id string) { w.Pin(t, id) }},
		{"running", "in use", func(t *testing.T, w *reclaimtest.World, _ *reclaimtest.Runtime, id string) { w.Run(t, "u", "a", id) }},
		{"by its name", "in use", func(t *testing.T, w *reclaimtest.World, _ *reclaimtest.Runtime, _ string) {
			w.Run(t, "u", "a", "app:1")
		}},
		{"image volume", "in use", func(t *testing.T, w *reclaimtest.World, r *reclaimtest.Runtime, id string) {
			r.Mount(w.Run(t, "u", "a", "another"), id)
		}},
		{"image volume by name", "in use", func(t *testing.T, w *reclaimtest.World, r *reclaimtest.Runtime, _ string) {
			r.Mount(w.Run(t, "u", "a", "another"), "app:1")
		}},
		{"another namespace", "in use by container x of namespace moby", func(_ *testing.T, _ *reclaimtest.World, r *reclaimtest.Runtime, id string) {
			r.UsedBy(id, "container x of namespace moby")
		}},
		{"imported", "can't be pulled again", func(_ *testing.T, _ *reclaimtest.World, r *reclaimtest.Runtime, id string) { r.NotPullable(id) }},
		{"named by a call", "named by a call", func(t *testing.T, w *reclaimtest.World, _ *reclaimtest.Runtime, _ string) {
			book := imagelock.New()
			book.Restore([]imagelock.Mention{{Name: "app:1", Method: "CreateContainer", At: time.Now()}}, true)
			w.Images.Lock = book
		}},
		{"calls not seen", "not all calls", func(_ *testing.T, w *reclaimtest.World, _ *reclaimtest.Runtime, _ string) {
			w.Images.Lock = imagelock.New()
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			w, r := fake(t)
			id := w.Pull(t, "app:1", layer("app", gib))
			step := pick(t, w, plain, garbage.Everything)
			if len(step.Items) != 1 {
				t.Fatalf("picked %+v", step.Items)
			}
			tc.happen(t, w, r, id)
			done, err := w.Images.Run(t.Context(), step)
			if !errors.Is(err, reclaim.ErrSurprise) || !strings.Contains(done.Items[0].Error, tc.why) {
				t.Errorf("a step that has it: %v", err)
			}
			again := pick(t, w, plain, garbage.Everything)
			if len(again.Items) > 0 {
				t.Errorf("picked: %+v", again.Items)
			}
			if why := again.Images.Kept[id]; why != "" && !strings.Contains(why, tc.why) {
				t.Errorf("kept because %s", why)
			}
			if calls := r.Calls(); len(calls) > 0 {
				t.Errorf("calls: %v", calls)
			}
		})
	}
}

// Too young, and facts that can't be had: nothing is deleted, and it is said.
func TestStepsThatDoNotHold(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name, why string
		happen    func(w *reclaimtest.World, r *reclaimtest.Runtime, step *record.Step)
	}{
		{"young", "too young", func(_ *reclaimtest.World, _ *reclaimtest.Runtime, step *record.Step) {
			step.Images.Policy.MinAge = time.Hour
		}},
		{"snapshotter away", "would not come free: no answer", func(_ *reclaimtest.World, r *reclaimtest.Runtime, _ *record.Step) {
			r.Away(errors.New("no answer"))
		}},
		{"free space can't be read", "read the free space", func(w *reclaimtest.World, _ *reclaimtest.Runtime, _ *record.Step) {
			w.Images.Space = noSpace{}
		}},
		{"not among what was picked from", "not among", func(_ *reclaimtest.World, _ *reclaimtest.Runtime, step *record.Step) {
			step.Items[0].ID = "sha256:other"
		}},
		{"no choice", "no choice", func(_ *reclaimtest.World, _ *reclaimtest.Runtime, step *record.Step) { step.Images = nil }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			w, r := fake(t)
			w.Pull(t, "app:1", layer("app", gib))
			step := pick(t, w, plain, garbage.Everything)
			tc.happen(w, r, &step)
			done, err := w.Images.Run(t.Context(), step)
			if !errors.Is(err, reclaim.ErrSurprise) || !strings.Contains(done.Items[0].Error, tc.why) {
				t.Errorf("%v: %+v", err, done.Items)
			}
			if calls := r.Calls(); len(calls) > 0 {
				t.Errorf("calls: %v", calls)
			}
		})
	}
}

type noSpace struct{}

func (noSpace) AvailableBytes(context.Context) (int64, error) { return 0, errors.New("hangs") }

// containerd restarts while a step is carried out: the step ends, nothing after
// it is tried, and what did go is noted.
func TestRuntimeRestartsMidPlan(t *testing.T) {
	t.Parallel()
	w, r := fake(t)
	for _, name := range []string{"a", "b", "c"} {
		w.Pull(t, name, layer(name, gib))
	}
	n := 0
	r.Before(func(string) error {
		if n++; n == 2 {
			return status.Error(codes.Unavailable, "connection refused")
		}
		return nil
	})
	done, err := w.Images.Run(t.Context(), pick(t, w, plain, garbage.Everything))
	if status.Code(err) != codes.Unavailable {
		t.Errorf("the error is %v", err)
	}
	if *done.Items[0].ActualBytes != gib || !strings.Contains(done.Items[1].Error, "refused") || done.Items[2].Error != "" || len(r.Calls()) != 2 {
		t.Errorf("%+v, calls %v", done.Items, r.Calls())
	}
	r.Before(nil)
	if done, err = w.Images.Run(t.Context(), pick(t, w, plain, garbage.Everything)); err != nil || len(done.Items) != 2 {
		t.Errorf("the next run: %+v, %v", done.Items, err)
	}
}

// Calls that need an image wait until it is gone, and others do not.
func TestImagesAreLockedWhileTheyGo(t *testing.T) {
	t.Parallel()
	w, r := fake(t)
	book := imagelock.New()
	book.Restore(nil, true)
	w.Images.Lock = book
	id := w.Pull(t, "app:1", layer("app", gib))
	r.Before(func(string) error {
		if _, err := book.Delete([]string{id}); err != nil {
			t.Error(err) // a deletion does not keep another one out
		}
		return nil
	})
	if _, err := w.Images.Run(t.Context(), pick(t, w, plain, garbage.Everything)); err != nil {
		t.Error(err)
	}
}

// Space that comes late is waited for, five seconds in all; what does not come is
// explained.
func TestSpaceThatComesLate(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, r := fake(t)
		for _, name := range []string{"a", "b", "c", "d"} {
			w.Pull(t, name, layer(name, gib))
		}
		r.Late(2 * time.Second)
		r.Hold("a shim holds it")
		began := time.Now()
		done, err := w.Images.Run(t.Context(), pick(t, w, plain, garbage.Everything))
		if err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took > 5*time.Second+time.Millisecond || took < 5*time.Second {
			t.Errorf("it took %s", took)
		}
		for i, item := range done.Items {
			if late := i > 1; late != strings.Contains(item.Note, "did not come free: a shim holds it") || late != (*item.ActualBytes == 0) {
				t.Errorf("item %d: %d came free: %q", i, *item.ActualBytes, item.Note)
			}
		}
	})
}

// eaten is a filesystem that others fill up meanwhile.
type eaten struct {
	reclaim.Space
	perSecond int64
	since     time.Time
}

func (e eaten) AvailableBytes(ctx context.Context) (int64, error) {
	available, err := e.Space.AvailableBytes(ctx)
	return available - int64(time.Since(e.since).Seconds()*float64(e.perSecond)), err
}

// While the disk fills up nobody waits for bytes that others have taken already:
// the next image goes at once. That they wrote is said, and nobody is blamed.
func TestOthersFillTheDiskMeanwhile(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, r := fake(t)
		for _, name := range []string{"a", "b", "c", "d"} {
			w.Pull(t, name, layer(name, gib/2))
		}
		r.Before(func(string) error { time.Sleep(100 * time.Millisecond); return nil }) //nolint:forbidigo // time is the bubble's
		w.Images.Space = eaten{r, gib, time.Now()}
		began := time.Now()
		done, err := w.Images.Run(t.Context(), pick(t, w, plain, garbage.Everything))
		if err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took > time.Second {
			t.Errorf("four deletions of 0.1 s took %s", took)
		}
		for i, item := range done.Items {
			if n := *item.ActualBytes; n < gib/2-gib/10 || n > gib/2 || n < gib/2 && !strings.HasSuffix(item.Note, "bytes did not come free: others wrote meanwhile") {
				t.Errorf("item %d: %d came free: %q", i, n, item.Note)
			}
		}
	})
}

// collected counts how often the runtime is told to collect.
type collected struct {
	reclaim.ImageStore
	times *int
}

func (c collected) Collect(ctx context.Context) error {
	*c.times++
	return c.ImageStore.Collect(ctx)
}

// A disk that is written to so fast that a deletion takes seconds, in which more is written than comes free: what came is seen all the
// same, the runtime is not told to collect once more, which takes seconds, too, and what came counts for the need.
func TestOthersWriteMoreThanComesFree(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, r := fake(t)
		for _, name := range []string{"a", "b", "c", "d"} {
			w.Pull(t, name, layer(name, gib/2))
		}
		r.Before(func(call string) error {
			if strings.HasPrefix(call, "RemoveImage") {
				time.Sleep(2 * time.Second) //nolint:forbidigo // time is the bubble's
			}
			return nil
		})
		w.Images.Space = eaten{r, gib, time.Now()}
		times := 0
		w.Images.Store = collected{w.Images.Store, &times}
		step := pick(t, w, plain, garbage.Everything)
		step.Images.NeedBytes = gib * 3 / 4
		done, err := w.Images.Run(t.Context(), step)
		if err != nil {
			t.Fatal(err)
		}
		for i, item := range done.Items {
			if went := i < 2; went != (item.ActualBytes != nil) {
				t.Errorf("item %d: %+v", i, item)
			} else if went && (*item.ActualBytes < gib/3 || *item.ActualBytes > gib/2 || !item.OthersWrote) {
				t.Errorf("item %d: %d came free: %q", i, *item.ActualBytes, item.Note)
			}
		}
		if times > 0 {
			t.Errorf("the runtime was told to collect %d times", times)
		}
	})
}

// An image that has to stay is not picked again at once by an inventory that does
// not know why, so that the next plan comes further.
func TestAnImageThatHadToStayIsNotPickedAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, r := fake(t)
		first, second := w.Pull(t, "a", layer("a", gib)), w.Pull(t, "b", layer("b", gib))
		old := r.Inventory()
		r.UsedBy(first, "container c of namespace other")
		w.Inventory = func(testing.TB) reclaim.ImageInventory { return old }
		done, err := w.Images.Run(t.Context(), pick(t, w, plain, garbage.Everything))
		if !errors.Is(err, reclaim.ErrSurprise) || len(r.Calls()) > 0 {
			t.Fatalf("%+v, %v, calls %v", done.Items, err, r.Calls())
		}
		step := pick(t, w, plain, garbage.Everything)
		if len(step.Items) != 1 || step.Items[0].ID != second || !strings.Contains(step.Images.Kept[first], "in use by container c") {
			t.Errorf("picked %+v, kept %v", step.Items, step.Images.Kept)
		}
		time.Sleep(time.Minute) //nolint:forbidigo // time is the bubble's
		if items := pick(t, w, plain, garbage.Everything).Items; len(items) != 2 {
			t.Errorf("a minute later: picked %+v", items)
		}
	})
}

func TestPage(t *testing.T) {
	t.Parallel()
	w, _ := fake(t)
	id := w.Pull(t, "app:1", layer("app", 3*gib/2))
	step := pick(t, w, plain, garbage.Everything)
	var plan, after strings.Builder
	if err := reclaim.Page(&plan, step); err != nil {
		t.Fatal(err)
	}
	want := "  " + id + "  GAP-25  1.5Gi\nunused images: 1 to go, to free 1.5Gi\n"
	if plan.String() != want {
		t.Errorf("the plan:\n%swant:\n%s", plan.String(), want)
	}
	checked, err := w.Images.Check(t.Context(), step)
	if err == nil {
		plan.Reset()
		err = reclaim.Page(&plan, checked)
	}
	if err != nil || plan.String() != want {
		t.Errorf("a dry run says something else (%v):\n%s", err, plan.String())
	}
	done, err := w.Images.Run(t.Context(), step)
	if err == nil {
		err = reclaim.Page(&after, done)
	}
	if err != nil || !strings.Contains(after.String(), "freed 1.5Gi") {
		t.Errorf("%v:\n%s", err, after.String())
	}
}
