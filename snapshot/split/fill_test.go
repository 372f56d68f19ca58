package split

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cleave-cri/cleave/fsstats/walk"
)

// TestRetriesGrow: the pauses double up to the longest, what succeeds or is gone
// is forgotten, and everything is counted.
func TestRetriesGrow(t *testing.T) {
	t.Parallel()
	f := newFiller()
	now := time.Unix(1000, 0)
	if ids, all := f.take(now); len(ids) > 0 || !all {
		t.Fatalf("at the start: %v, %v, want all", ids, all)
	}
	why := errors.New("input/output error")
	for i, want := range []time.Duration{1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300} {
		if first := f.fail("7", why, now); first != (i == 0) {
			t.Errorf("try %d: first is %v", i, first)
		}
		want *= time.Second
		if got := f.untilRetry(now); got != want {
			t.Errorf("after try %d it waits %s, want %s", i, got, want)
		}
		if ids, all := f.take(now.Add(want - 1)); len(ids) > 0 || all {
			t.Errorf("too early: %v, %v", ids, all)
		}
		now = now.Add(want)
		if ids, _ := f.take(now); len(ids) != 1 {
			t.Errorf("it is not tried again: %v", ids)
		}
	}
	if waiting, m := f.status(); waiting != 1 || m.Failing != 1 || m.Failures != 11 || m.Reason != why.Error() {
		t.Errorf("status: %d, %+v", waiting, m)
	}
	f.done("7")
	f.fail("", why, now)
	if ids, all := f.take(now.Add(time.Second)); len(ids) > 0 || !all {
		t.Errorf("a look through the database that has failed: %v, %v", ids, all)
	}
	f.done("")
	if waiting, m := f.status(); waiting != 0 || m.Failing != 0 || m.Failures != 12 || m.Reason != "" {
		t.Errorf("status: %d, %+v", waiting, m)
	}
	if got := f.untilRetry(now); got != lastRetry {
		t.Errorf("with nothing to do it waits %s", got)
	}
}

// TestPartOfAFigureIsNone: while something in a layer can't be read its usage is
// not known, which is told and tried again; nobody is given the part that was
// read. When it can be read all of it is there.
func TestPartOfAFigureIsNone(t *testing.T) {
	t.Parallel()
	o := folders(t)
	var broken atomic.Bool
	broken.Store(true)
	o.walk = func(ctx context.Context, root string, opt walk.Options) (walk.Usage, error) {
		u, err := walk.Measure(ctx, root, opt)
		if broken.Load() {
			u.Partial, u.Unreadable, u.Errors = true, 2, []error{errors.New("input/output error")}
		}
		return u, err
	}
	s := initialised(t, o)
	layer, _ := addLayer(t, s, 1, "")
	settle(t, s)
	if usage, err := s.Usage(t.Context(), layer); !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "input/output error") || usage.Size != 0 {
		t.Errorf("usage %+v, %v, want none and why", usage, err)
	}
	st, err := s.Status(t.Context())
	if err != nil || st.Measuring.Failing != 1 || st.Measuring.Failures == 0 || !strings.Contains(st.Measuring.Reason, "input/output error") || st.Unstored != 1 {
		t.Errorf("status: %+v, %d, %v", st.Measuring, st.Unstored, err)
	}
	if st.Image.Layers.Unmeasured != 1 || st.Image.Layers.Bytes != 0 {
		t.Errorf("layers: %+v, want one that is not measured", st.Image.Layers)
	}

	broken.Store(false)
	eventually(t, "the layer is measured", func() bool {
		st, err := s.Status(t.Context())
		return err == nil && st.Measuring.Failing == 0 && st.Image.Layers.Unmeasured == 0 && st.Image.Layers.Bytes >= 10_000
	})
	if usage, err := s.Usage(t.Context(), layer); err != nil || usage.Size < 10_000 {
		t.Errorf("usage %+v, %v", usage, err)
	}
	if r := mustBeClean(t, s, o); len(r.Notes) > 0 {
		t.Errorf("the figure is not stored: %v", r.Notes)
	}
}
