package split

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/fsstats/index"
	"github.com/cleave-cri/cleave/snapshot/split/fence"
)

// fakeDisk is a filesystem and one snapshot on it.
type fakeDisk struct {
	mu       sync.Mutex
	used     int64         // guarded by mu; of the filesystem
	bytes    int64         // guarded by mu; of the snapshot
	measured int           // guarded by mu
	gate     chan struct{} // guarded by mu; what measures waits for it, if it is there
	problem  error         // guarded by mu
}

func (d *fakeDisk) do(f func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f()
}

func (d *fakeDisk) space(string) (s index.Space, err error) {
	d.do(func() { s = index.Space{FS: "disk", UsedBytes: d.used, At: time.Now()} })
	return s, nil
}

func (d *fakeDisk) measure(ctx context.Context, _ subject, _ int) (f figure, err error) {
	var gate chan struct{}
	d.do(func() { d.measured++; gate = d.gate; f.Bytes, err = d.bytes, d.problem })
	f.started, f.how = time.Now(), index.Walked
	if gate != nil {
		select {
		case <-gate:
		case <-ctx.Done():
			return f, ctx.Err()
		}
	}
	f.At = time.Now()
	return f, err
}

// theSnapshot is the one that a fakeDisk has.
var theSnapshot = subject{id: "7", root: fence.Container}

// holdingOne runs a holder of a fakeDisk's snapshot, in a bubble of virtual time, when its first figure is there.
func holdingOne(t *testing.T, test func(t *testing.T, h *holder, d *fakeDisk)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		d := &fakeDisk{used: 1 << 30, bytes: 100}
		h, err := newHolder(held{
			list: func(context.Context) ([]holding, error) {
				return []holding{{subject: theSnapshot, path: "/containers/snapshots/7", kind: kindWritable, created: time.Unix(1, 0)}}, nil
			},
			space: d.space, measure: d.measure,
		}, zap.NewNop())
		if err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { h.run(ctx) })
		defer running.Wait()
		defer stop()
		if _, ok := h.fresh(t.Context(), theSnapshot, 10*time.Second); ok {
			t.Error("a figure was there before anything was measured")
		}
		<-time.After(3 * time.Second)
		if f, ok := h.last(theSnapshot); !ok || f.Bytes != 100 {
			t.Fatalf("the first figure is %+v, %v", f, ok)
		}
		test(t, h, d)
	})
}

// TestQuietDiskIsNotMeasured: containerd asks each 10 s, nothing is written: each answer is there at once, and nothing is measured for it.
func TestQuietDiskIsNotMeasured(t *testing.T) {
	t.Parallel()
	holdingOne(t, func(t *testing.T, h *holder, d *fakeDisk) {
		<-time.After(time.Minute)
		measured := 0
		d.do(func() { measured = d.measured })
		for range 100 {
			asked := time.Now()
			if f, ok := h.fresh(t.Context(), theSnapshot, 10*time.Second); !ok || f.Bytes != 100 || time.Since(asked) != 0 {
				t.Fatalf("got %+v, %v after %s", f, ok, time.Since(asked))
			}
			<-time.After(10 * time.Second)
		}
		d.do(func() {
			if d.measured != measured {
				t.Errorf("it was measured %d times more", d.measured-measured)
			}
		})
	})
}

// TestBusyDiskIsMeasuredForWhoAsks: a container writes after a long rest; the next answer has it, give or take UsageMaxAge.
func TestBusyDiskIsMeasuredForWhoAsks(t *testing.T) {
	t.Parallel()
	holdingOne(t, func(t *testing.T, h *holder, d *fakeDisk) {
		// Others write for half an hour, so that the index comes round to this one seldom.
		for range 1800 {
			d.do(func() { d.used++ })
			<-time.After(time.Second)
		}
		for range 20 {
			d.do(func() { d.used += 1 << 20; d.bytes += 1 << 20 })
			written := time.Now()
			<-time.After(11 * time.Second)
			f, ok := h.fresh(t.Context(), theSnapshot, 10*time.Second)
			if want := d.bytes; !ok || f.Bytes != want || f.started.Before(written) {
				t.Fatalf("got %+v, %v, want %d bytes", f, ok, want)
			}
		}
	})
}

// TestAnswerDoesNotWaitForAWalk: while a walk does not end the last figure is given after half a second, until that is too
// old to stand for anything.
func TestAnswerDoesNotWaitForAWalk(t *testing.T) {
	t.Parallel()
	holdingOne(t, func(t *testing.T, h *holder, d *fakeDisk) {
		gate := make(chan struct{})
		d.do(func() { d.gate, d.bytes, d.used = gate, 5000, d.used+4900 })
		before, ok := h.last(theSnapshot)
		if !ok {
			t.Fatal("the first figure is gone")
		}
		<-time.After(time.Minute)
		asked := time.Now()
		f, ok := h.fresh(t.Context(), theSnapshot, 10*time.Second)
		if !ok || f != before || time.Since(asked) != usageWait {
			t.Errorf("got %+v, %v after %s, want %+v after %s", f, ok, time.Since(asked), before, usageWait)
		}
		short, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		asked = time.Now()
		if f, ok := h.fresh(short, theSnapshot, 10*time.Second); !ok || f != before || time.Since(asked) != time.Millisecond {
			t.Errorf("who had a millisecond got %+v, %v after %s", f, ok, time.Since(asked))
		}
		<-time.After(mayBeBehind)
		if f, ok := h.fresh(t.Context(), theSnapshot, 10*time.Second); ok {
			t.Errorf("a figure of %s ago was given: %+v", time.Since(f.At), f)
		}
		close(gate)
		d.do(func() { d.gate = nil })
		<-time.After(time.Second)
		if f, ok := h.fresh(t.Context(), theSnapshot, 10*time.Second); !ok || f.Bytes != 5000 {
			t.Errorf("when the walk has ended the figure is %+v, %v", f, ok)
		}
	})
}

// TestWhatCantBeMeasuredIsNotGiven: an old figure does not hide that there is no new one.
func TestWhatCantBeMeasuredIsNotGiven(t *testing.T) {
	t.Parallel()
	holdingOne(t, func(t *testing.T, h *holder, d *fakeDisk) {
		d.do(func() { d.problem, d.used = errors.New("input/output error"), d.used+1 })
		<-time.After(time.Minute)
		if f, ok := h.fresh(t.Context(), theSnapshot, 10*time.Second); ok {
			t.Errorf("got %+v", f)
		}
		if f, ok := h.last(theSnapshot); !ok || f.Bytes != 100 {
			t.Errorf("the last good figure is %+v, %v", f, ok)
		}
	})
}

// TestUsagesTellsAll: the figure of each snapshot, how it was got and when, for real, also after a restart.
func TestUsagesTellsAll(t *testing.T) {
	t.Parallel()
	o := folders(t)
	o.UsageMaxAge = 0
	s := initialised(t, o)
	base, layer := addLayer(t, s, 1, "")
	key, upper := addContainer(t, s, 2, base)
	if err := os.WriteFile(filepath.Join(upper, "written"), make([]byte, 300_000), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := s.View(t.Context(), "k8s.io/9/view", base); err != nil {
		t.Fatal(err)
	}
	unpacked, opt := extraction(4, "")
	if _, err := s.Prepare(t.Context(), unpacked, "", opt); err != nil {
		t.Fatal(err)
	}
	settle(t, s)
	all := func() map[string]SnapshotUsage {
		t.Helper()
		list, err := s.Usages(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		byKind := map[string]SnapshotUsage{}
		for _, u := range list {
			byKind[u.Kind] = u
		}
		if len(list) != 4 || len(byKind) != 4 {
			t.Fatalf("got %+v", list)
		}
		return byKind
	}
	_, name := splitKey(key)
	eventually(t, "each has its figure", func() bool {
		for kind, folder := range map[string]string{"layer": filepath.Dir(layer), "writable": filepath.Dir(upper)} {
			u := all()[kind]
			bytes, inodes := du(t, folder)
			if u.Figure == nil || u.Figure.Bytes != bytes || u.Figure.Inodes != inodes || u.Folder != folder || u.Figure.How != index.Walked || u.Figure.Finished.IsZero() {
				return false
			}
		}
		u := all()
		return u["view"].Figure != nil && u["extraction"].Figure != nil && u["writable"].Name == name && u["writable"].Namespace == "k8s.io"
	})
	was := *all()["writable"].Figure
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = opened(t, o)
	eventually(t, "the figure is there again", func() bool {
		f := all()["writable"].Figure
		return f != nil && f.Bytes == was.Bytes && !f.Finished.Before(was.Finished)
	})
	if err := s.Remove(t.Context(), key); err != nil {
		t.Fatal(err)
	}
	if list, err := s.Usages(t.Context()); err != nil || len(list) != 3 {
		t.Errorf("got %+v, %v", list, err)
	}
}
