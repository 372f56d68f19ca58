package index

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/cleave-cri/cleave/fsstats/walk"
)

// world is a node that is not there: trees of so many bytes and inodes on
// filesystems.
type world struct {
	mu sync.Mutex
	// All guarded by mu.
	trees   map[string]*tree
	unowned map[FS]int64
	blocked map[string]chan struct{} // measuring a path waits for its channel
	broken  map[string]error
	asked   int // questions about filesystems
	order   []string
	// readings counts measurements by path, slow those that were paced.
	readings, slow map[string]int
	spaceError     error
	// perInode is what looking at an inode takes.
	perInode time.Duration
	// remembered is the memory of trees, if there is to be one; updates counts its
	// uses by path. What it is asked to look at is in looked.
	remembered bool
	updates    map[string]int
	looked     []string
}

// fakeMemory remembers a tree of the world.
type fakeMemory struct {
	w    *world
	path string
}

func (m *fakeMemory) Folders() int { return 1 + int(m.w.trees[m.path].inodes/100) }

func (m *fakeMemory) Again(ctx context.Context, _ walk.Options, look []string) (walk.Fresh, error) {
	f := walk.Fresh{Started: time.Now(), Looked: int64(m.Folders())}
	m.w.mu.Lock()
	t := m.w.trees[m.path]
	m.w.updates[m.path]++
	m.w.looked = append(m.w.looked, look...)
	f.Bytes, f.Inodes = t.bytes-t.hidden, t.inodes
	err, takes := t.forgotten, time.Duration(f.Looked)*m.w.perInode
	m.w.mu.Unlock()
	if err != nil {
		return f, err
	}
	select {
	case <-time.After(takes):
	case <-ctx.Done():
		return f, ctx.Err()
	}
	f.Finished = time.Now()
	return f, nil
}

type tree struct {
	fs            FS
	bytes, inodes int64
	written       uint64
	knowsWritten  bool
	// hidden is how much of bytes only a measurement of everything finds; it is none
	// after one. forgotten is what a memory of the tree says.
	hidden    int64
	forgotten error
	// twice is what the next measurement counts twice.
	twice int64
}

// perInode is what looking at an inode takes, unless said otherwise.
const perInode = 1500 * time.Nanosecond

func newWorld() *world {
	return &world{
		trees: map[string]*tree{}, unowned: map[FS]int64{}, blocked: map[string]chan struct{}{}, broken: map[string]error{},
		readings: map[string]int{}, slow: map[string]int{}, updates: map[string]int{}, perInode: perInode,
	}
}

func (w *world) space(path string) (Space, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.asked++
	if w.spaceError != nil {
		return Space{}, w.spaceError
	}
	t := w.trees[path]
	if t == nil {
		return Space{}, fmt.Errorf("find %s: %w", path, fs.ErrNotExist)
	}
	s := Space{FS: t.fs, UsedBytes: w.unowned[t.fs], At: time.Now()}
	inodes := int64(0)
	for _, other := range w.trees {
		if other.fs == t.fs {
			s.UsedBytes += other.bytes
			inodes += other.inodes
		}
	}
	s.UsedInodes = &inodes
	return s, nil
}

func (w *world) measure(ctx context.Context, what Subject) (Figure, error) {
	f := Figure{Started: time.Now(), How: Walked}
	w.mu.Lock()
	t, blocked, broken := w.trees[what.Path], w.blocked[what.Path], w.broken[what.Path]
	w.readings[what.Path]++
	w.order = append(w.order, what.Path)
	if what.EntriesPerSecond > 0 {
		w.slow[what.Path]++
	}
	if t != nil {
		f.Bytes, f.Inodes = t.bytes+t.twice, t.inodes
		t.hidden, t.twice = 0, 0
		if m := (&fakeMemory{w, what.Path}); w.remembered && m.Folders() <= what.RememberFolders {
			f.Memory = m
		}
	}
	each := w.perInode
	w.mu.Unlock()
	if blocked != nil {
		select {
		case <-blocked:
		case <-ctx.Done():
			return Figure{}, ctx.Err()
		}
	}
	if broken != nil {
		return Figure{}, broken
	}
	if t == nil {
		return Figure{}, fmt.Errorf("walk %s: %w", what.Path, fs.ErrNotExist)
	}
	takes := time.Duration(f.Inodes) * each
	if what.EntriesPerSecond > 0 {
		takes = max(takes, time.Duration(f.Inodes)*time.Second/time.Duration(what.EntriesPerSecond))
	}
	select {
	case <-time.After(takes):
	case <-ctx.Done():
		return Figure{}, ctx.Err()
	}
	f.Finished, f.Cost = time.Now(), time.Duration(f.Inodes)*each
	return f, nil
}

func (w *world) written(_ Kind, id string) (uint64, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	t := w.trees["/"+id]
	if t == nil || !t.knowsWritten {
		return 0, false
	}
	return t.written, true
}

func (w *world) do(change func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	change()
}

// bytes is what a tree really has.
func (w *world) bytes(id string) (n int64) {
	w.do(func() { n = w.trees["/"+id].bytes })
	return n
}

// read gives how often each tree was measured.
func (w *world) read() (readings map[string]int) {
	w.do(func() { readings = maps.Clone(w.readings) })
	return readings
}

// questions gives how often somebody asked about a filesystem.
func (w *world) questions() (n int) {
	w.do(func() { n = w.asked })
	return n
}

// add makes so many trees on a filesystem and gives their owners.
func (w *world) add(fs FS, n int, inodes int64) (owners []Owner) {
	for range n {
		id := fmt.Sprintf("c%03d", len(w.trees))
		w.trees["/"+id] = &tree{fs: fs, bytes: 4096 * inodes, inodes: inodes, knowsWritten: true}
		owners = append(owners, Owner{Kind: "container", ID: id, Parts: []Part{{Name: "writable", Path: "/" + id}}})
	}
	return owners
}

func (w *world) options() Options {
	return Options{Space: w.space, Measure: w.measure, Written: w.written}
}

// inBubble runs an index in a bubble of time.
func inBubble(t *testing.T, prepare func(w *world) ([]Owner, Options), test func(t *testing.T, w *world, x *Index)) {
	t.Helper()
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		owners, opt := prepare(w)
		x, err := New(opt)
		if err != nil {
			t.Fatal(err)
		}
		if err := x.SetOwners(owners); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- x.Run(ctx) }()
		defer func() { // also if the test ends early
			cancel()
			if err := <-ended; err != nil {
				t.Errorf("Run: %v", err)
			}
		}()
		synctest.Wait()
		test(t, w, x)
	})
}

func pass(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

func partOf(t *testing.T, x *Index, id string) PartView {
	t.Helper()
	o, ok := x.View().Owner("container", id)
	if !ok || len(o.Parts) == 0 {
		t.Fatalf("there is no %s", id)
	}
	return o.Parts[0]
}

func bytesOf(t *testing.T, x *Index, id string) int64 {
	t.Helper()
	p := partOf(t, x, id)
	if p.Figure == nil {
		return -1
	}
	return p.Figure.Bytes
}

// checkSums: on every filesystem, owned and unattributed together are what is used.
func checkSums(t *testing.T, v *View) {
	t.Helper()
	for _, a := range v.Filesystems {
		if a.OwnedBytes+a.UnattributedBytes != a.UsedBytes || a.OvercountedBytes != max(-a.UnattributedBytes, 0) {
			t.Errorf("%s: owned %d + unattributed %d are not used %d; overcounted %d", a.FS, a.OwnedBytes, a.UnattributedBytes, a.UsedBytes, a.OvercountedBytes)
		}
		kinds := int64(0)
		for _, k := range a.Kinds {
			kinds += k.Bytes
		}
		if kinds != a.OwnedBytes {
			t.Errorf("%s: kinds have %d bytes, owned are %d", a.FS, kinds, a.OwnedBytes)
		}
	}
}

// TestIdleNodeCostsNothing: forty containers with a million inodes; after the first
// figures nothing is looked at but the filesystem, until the slow refresh.
func TestIdleNodeCostsNothing(t *testing.T) {
	inBubble(t, func(w *world) ([]Owner, Options) {
		return w.add("8:1", 40, 25_000), w.options()
	}, func(t *testing.T, w *world, x *Index) {
		pass(time.Minute)
		v := x.View()
		if n := v.Filesystems[0].Unmeasured; n != 0 || v.Entries.First != 1_000_000 {
			t.Fatalf("after a minute %d parts have no figure, %d entries were looked at", n, v.Entries.First)
		}
		if a := v.Filesystems[0]; a.UnattributedBytes != 0 || *a.UnattributedInodes != 0 || a.OwnedBytes != 4096*1_000_000 {
			t.Errorf("attribution = %+v, want all owned", a)
		}
		before := v.Entries
		asked := w.questions()
		pass(10 * time.Minute)
		if diff := cmp.Diff(before, x.View().Entries); diff != "" {
			t.Errorf("work on an idle node (-before +after):\n%s", diff)
		}
		if n := w.questions() - asked; n > 10*60+1 {
			t.Errorf("%d questions in 10 minutes, want one a second", n)
		}

		// The slow refresh bounds every age, and stays within its pace.
		for range 120 {
			pass(time.Minute)
			v := x.View()
			if age := v.At.Sub(v.Filesystems[0].Oldest); age > time.Hour {
				t.Fatalf("a figure is %v old, want at most an hour", age)
			}
		}
		v = x.View()
		if n := v.Entries.Refresh; n < 2_000_000 || n > 6_000_000 {
			t.Errorf("%d entries refreshed in two hours, want a few passes of a million", n)
		}
		if v.Entries.Hot != before.Hot || v.Entries.Suspect != before.Suspect {
			t.Errorf("entries = %+v, want refreshes only", v.Entries)
		}
	})
}

// TestOneWriterAmongForty: its figure is never older than two seconds, and all
// measuring together takes no more than 3 % of a core.
func TestOneWriterAmongForty(t *testing.T) {
	inBubble(t, func(w *world) ([]Owner, Options) {
		return w.add("8:1", 40, 25_000), w.options()
	}, func(t *testing.T, w *world, x *Index) {
		pass(time.Minute)
		before := x.View().Entries
		const perTick, tick, seconds = 5 << 20, 100 * time.Millisecond, 300
		for i := range seconds * int(time.Second/tick) {
			w.do(func() {
				w.trees["/c007"].bytes += perTick
				w.trees["/c007"].written++
			})
			pass(tick)
			if i < 30 {
				continue
			}
			if lag := time.Since(partOf(t, x, "c007").Figure.Started); lag > 2*time.Second {
				t.Fatalf("the writer's figure is %v old", lag)
			}
			checkSums(t, x.View())
		}
		e := x.View().Entries
		inodes := e.Hot + e.Suspect + e.Refresh - before.Hot - before.Suspect - before.Refresh
		if percent := 100 * float64(time.Duration(inodes)*perInode) / float64(seconds*time.Second); percent > 3 {
			t.Errorf("measuring took %.2f %% of a core, want at most 3", percent)
		}
		pass(2 * time.Second)
		if got, want := bytesOf(t, x, "c007"), w.bytes("c007"); got != want {
			t.Errorf("at rest %d bytes, want %d", got, want)
		}
	})
}

// TestUpdatesKeepAWriterFresh: where walks take five times as long as they should,
// a tree that is remembered is still never older than two seconds, and says from
// when what it says is.
func TestUpdatesKeepAWriterFresh(t *testing.T) {
	inBubble(t, func(w *world) ([]Owner, Options) {
		w.remembered, w.perInode = true, 5*perInode
		opt := w.options()
		opt.Writing = func(_ Kind, id string) []string {
			return []string{"/" + id + "/log/a", "/" + id + "x/b", "/c", "/" + id}
		}
		return w.add("8:1", 40, 25_000), opt
	}, func(t *testing.T, w *world, x *Index) {
		pass(5 * time.Minute)
		before := x.View().Entries
		if before.Update != 0 {
			t.Errorf("%d inodes were looked at for updates before anybody wrote", before.Update)
		}
		const perTick, tick, seconds = 5 << 20, 100 * time.Millisecond, 300
		for i := range seconds * int(time.Second/tick) {
			w.do(func() {
				w.trees["/c007"].bytes += perTick
				w.trees["/c007"].written++
			})
			pass(tick)
			if i < 50 {
				continue
			}
			f := partOf(t, x, "c007").Figure
			now := time.Now()
			if lag := now.Sub(f.Started); lag > 1500*time.Millisecond {
				t.Fatalf("the writer's figure is %v old", lag)
			}
			if f.How != Updated || f.Memory != nil || f.Proven.IsZero() || f.Proven.After(f.Started) {
				t.Fatalf("figure = %+v, want one that says that it was brought up to date", f)
			}
			if age := now.Sub(f.Proven); age > 15*time.Second {
				t.Fatalf("the last walk was begun %v ago", age)
			}
			if oldest := x.View().Filesystems[0].Oldest; oldest.After(f.Proven) {
				t.Fatalf("the oldest figure is said to be of %v, the writer's was proved at %v", oldest, f.Proven)
			}
			checkSums(t, x.View())
		}
		e := x.View().Entries
		inodes := e.Update + e.Hot + e.Suspect + e.Refresh - before.Hot - before.Suspect - before.Refresh
		if percent := 100 * float64(time.Duration(inodes)*5*perInode) / float64(seconds*time.Second); percent > 3 {
			t.Errorf("measuring took %.2f %% of a core, want at most 3", percent)
		}
		w.do(func() {
			if want := "/log/a"; len(w.looked) < seconds/2 || slices.ContainsFunc(w.looked, func(path string) bool { return path != want }) {
				t.Errorf("it was asked to look at %d paths, such as %q, want %q each time", len(w.looked), w.looked[:min(len(w.looked), 5)], want)
			}
		})
		pass(30 * time.Second)
		if got, want := bytesOf(t, x, "c007"), w.bytes("c007"); got != want {
			t.Errorf("at rest %d bytes, want %d", got, want)
		}
	})
}

// TestUpdatesProveNothing: what they can't see is found by the measurement that
// follows, while the owner writes and after it has stopped.
func TestUpdatesProveNothing(t *testing.T) {
	inBubble(t, func(w *world) ([]Owner, Options) {
		w.remembered = true
		return w.add("8:1", 10, 1000), w.options()
	}, func(t *testing.T, w *world, x *Index) {
		pass(time.Minute)
		w.do(func() { w.trees["/c003"].written++; w.trees["/c003"].bytes++ })
		pass(10 * time.Second)
		missed := 0
		for range 100 {
			w.do(func() {
				w.trees["/c003"].written++
				w.trees["/c003"].bytes += 4096
				w.trees["/c003"].hidden += 4096
			})
			pass(time.Second)
			if got := w.bytes("c003") - bytesOf(t, x, "c003"); got > 8*4096 {
				t.Fatalf("%d bytes are not known of, want at most those of some seconds", got)
			} else if got > 4096 {
				missed++
			}
			checkSums(t, x.View())
		}
		if missed == 0 {
			t.Error("nothing was ever missed: this test shows nothing")
		}
		w.do(func() { w.trees["/c003"].written++; w.trees["/c003"].bytes++; w.trees["/c003"].hidden = 1 << 20 })
		pass(10 * time.Second)
		if got, want := bytesOf(t, x, "c003"), w.bytes("c003"); got != want {
			t.Errorf("at rest %d bytes, want %d", got, want)
		}
		if f := partOf(t, x, "c003").Figure; time.Since(f.ProvenAt()) > 11*time.Second {
			t.Errorf("figure = %+v, want one that was proved after the last write", f)
		}
	})
}

// TestAMemoryThatForgets: the tree is measured as one of which nothing is
// remembered.
func TestAMemoryThatForgets(t *testing.T) {
	inBubble(t, func(w *world) ([]Owner, Options) {
		w.remembered = true
		return w.add("8:1", 3, 1000), w.options()
	}, func(t *testing.T, w *world, x *Index) {
		pass(time.Minute)
		w.do(func() { w.trees["/c001"].forgotten = walk.ErrForgotten })
		for i := range 60 {
			w.do(func() {
				w.trees["/c001"].written++
				w.trees["/c001"].bytes += 4096
			})
			pass(time.Second)
			p := partOf(t, x, "c001")
			if lag := time.Since(p.Figure.Started); i > 2 && lag > 2*time.Second || p.Problem != "" {
				t.Fatalf("the figure is %v old, problem %q", lag, p.Problem)
			}
		}
	})
}

// TestMemoryIsBounded: of so many directories as may be remembered, and not one
// more; those of trees that nobody writes to any more make room.
func TestMemoryIsBounded(t *testing.T) {
	inBubble(t, func(w *world) ([]Owner, Options) {
		w.remembered = true
		opt := w.options()
		opt.MostFolders = 25 // two trees of eleven
		return w.add("8:1", 3, 1000), opt
	}, func(t *testing.T, w *world, x *Index) {
		write := func(ids ...string) {
			w.do(func() { clear(w.updates) })
			for range 60 {
				w.do(func() {
					for _, id := range ids {
						w.trees["/"+id].written++
						w.trees["/"+id].bytes += 4096
					}
				})
				pass(time.Second)
			}
		}
		updated := func() (n int) {
			w.do(func() {
				for _, times := range w.updates {
					if times > 20 {
						n++
					}
				}
			})
			return n
		}
		pass(time.Minute)
		write("c000", "c001", "c002")
		if n := updated(); n != 2 {
			t.Errorf("%d trees were brought up to date, want the two that there is room for", n)
		}
		pass(10 * time.Minute)
		for _, id := range []string{"c000", "c001", "c002"} {
			write(id)
			if n := updated(); n != 1 {
				t.Errorf("%s: %d trees were brought up to date, want it", id, n)
			}
			pass(10 * time.Minute)
		}
	})
}

// TestHintsOnlyOrderTheWork: one whose hint says nothing is found as well.
func TestHintsOnlyOrderTheWork(t *testing.T) {
	inBubble(t, func(w *world) ([]Owner, Options) {
		return w.add("8:1", 10, 1000), w.options()
	}, func(t *testing.T, w *world, x *Index) {
		pass(time.Minute)
		w.do(func() { w.trees["/c003"].bytes -= 4096 }) // a file deleted: nothing written
		pass(11 * time.Minute)
		if got := bytesOf(t, x, "c003"); got != 4096*999 {
			t.Errorf("%d bytes, want %d", got, 4096*999)
		}
		// A file replaced by one of the same size elsewhere moves no figure of the
		// filesystem: the refresh finds it.
		w.do(func() {
			w.trees["/c001"].bytes += 4096
			w.trees["/c002"].bytes -= 4096
		})
		pass(time.Hour)
		if one, two := bytesOf(t, x, "c001"), bytesOf(t, x, "c002"); one != 4096*1001 || two != 4096*999 {
			t.Errorf("%d and %d bytes, want %d and %d", one, two, 4096*1001, 4096*999)
		}
	})
}

// TestBusyFilesystemWithoutHints: parts are looked at less and less often while
// their figures stay the same, and the one that grows comes first.
func TestBusyFilesystemWithoutHints(t *testing.T) {
	inBubble(t, func(w *world) ([]Owner, Options) {
		owners := w.add("8:1", 10, 100)
		for _, t := range w.trees {
			t.knowsWritten = false
		}
		return owners, w.options()
	}, func(t *testing.T, w *world, x *Index) {
		for range 1800 {
			w.do(func() { w.trees["/c005"].bytes += 4096 })
			pass(time.Second)
		}
		if n := w.read()["/c005"]; n < 170 {
			t.Errorf("the growing one was measured %d times in half an hour, want each 10 s", n)
		}
		for id, n := range w.read() {
			if id != "/c005" && (n < 6 || n > 15) {
				t.Errorf("%s was measured %d times in half an hour, want less and less often", id, n)
			}
		}
	})
}

// TestAnOverdrawnFilesystemIsMeasuredAgain: a figure that can't be right, because
// more is held than is used, is looked at again at once; where files share extents
// it never comes right, and that is soon given up.
func TestAnOverdrawnFilesystemIsMeasuredAgain(t *testing.T) {
	inBubble(t, func(w *world) ([]Owner, Options) {
		owners := w.add("8:1", 3, 1000)
		w.trees["/c001"].twice = 8 << 20
		for _, t := range w.trees {
			t.knowsWritten = false
		}
		return owners, w.options()
	}, func(t *testing.T, w *world, x *Index) {
		pass(100 * time.Millisecond)
		if got := bytesOf(t, x, "c001"); got <= w.bytes("c001") {
			t.Fatalf("%d bytes, want the wrong figure first", got)
		}
		w.do(func() { w.unowned["8:1"] += 4096 })
		pass(3 * time.Second)
		if got := bytesOf(t, x, "c001"); got != w.bytes("c001") {
			t.Errorf("%d bytes after 3 s, want %d", got, w.bytes("c001"))
		}
		w.do(func() { clear(w.readings) })
		for i := range int64(1800) {
			w.do(func() { w.unowned["8:1"] = i%2*4096 - 16<<20 })
			pass(time.Second)
		}
		for id, n := range w.read() {
			if n > 20 {
				t.Errorf("%s was measured %d times in half an hour of shared extents, want less and less often", id, n)
			}
		}
	})
}

// TestAHungFilesystemStopsNothingElse: a walk that never ends, and a filesystem
// that gives no figures.
func TestAHungFilesystemStopsNothingElse(t *testing.T) {
	inBubble(t, func(w *world) ([]Owner, Options) {
		owners := append(w.add("8:1", 3, 100), w.add("8:17", 3, 100)...)
		w.blocked["/c000"] = make(chan struct{})
		return owners, w.options()
	}, func(t *testing.T, w *world, x *Index) {
		pass(time.Minute)
		for _, id := range []string{"c003", "c004", "c005"} {
			if bytesOf(t, x, id) < 0 {
				t.Errorf("%s has no figure", id)
			}
		}
		p := partOf(t, x, "c000")
		if p.Figure != nil || p.Measuring.IsZero() || time.Since(p.Measuring) < 50*time.Second {
			t.Errorf("part = %+v, want one that is being measured for a minute", p)
		}
		w.do(func() {
			w.trees["/c004"].bytes += 1 << 20
			w.trees["/c004"].written++
		})
		// What is told first may be of others, or of before.
		began := time.Now()
		for bytesOf(t, x, "c004") != 409600+1<<20 && time.Since(began) < time.Minute {
			<-x.Changed()
		}
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("the change was told after %v: %d bytes", took, bytesOf(t, x, "c004"))
		}
		w.do(func() { close(w.blocked["/c000"]) })
		pass(time.Minute)
		for _, id := range []string{"c000", "c001", "c002"} {
			if bytesOf(t, x, id) < 0 {
				t.Errorf("%s has no figure after the hang", id)
			}
		}

		w.do(func() { w.spaceError = errors.New("the filesystem does not answer") })
		pass(time.Minute)
		for _, a := range x.View().Filesystems {
			if a.Problem == "" || time.Since(a.At) < 50*time.Second {
				t.Errorf("%s: problem %q, figures of %v; want a problem and old figures", a.FS, a.Problem, a.At)
			}
		}
		checkSums(t, x.View())
	})
}

// TestARefreshThatHangsStopsNoOther: what is on other filesystems does not get older
// than it may.
func TestARefreshThatHangsStopsNoOther(t *testing.T) {
	inBubble(t, func(w *world) ([]Owner, Options) {
		owners, opt := append(w.add("8:1", 2, 100), w.add("8:17", 20, 100)...), w.options()
		opt.MaxAge, opt.Period = time.Hour, time.Minute
		return owners, opt
	}, func(t *testing.T, w *world, x *Index) {
		pass(5 * time.Minute)
		w.do(func() {
			w.blocked["/c000"] = make(chan struct{})
			clear(w.readings)
		})
		pass(5 * time.Hour)
		for i := range 20 {
			id := fmt.Sprintf("c%03d", 2+i)
			if p := partOf(t, x, id); p.Figure == nil || time.Since(p.Figure.Finished) > time.Hour+time.Minute {
				t.Errorf("%s has a figure of %v, want none older than an hour", id, p.Figure)
			}
		}
		if n := w.read()["/c001"]; n > 1 { // before it hung
			t.Errorf("a tree on the filesystem that hangs was measured %d times, want once at most", n)
		}
		w.do(func() { close(w.blocked["/c000"]); delete(w.blocked, "/c000") })
		pass(time.Hour)
		for _, id := range []string{"c000", "c001"} {
			if p := partOf(t, x, id); time.Since(p.Figure.Finished) > time.Hour+time.Minute {
				t.Errorf("%s has a figure of %v, want none older than an hour", id, p.Figure)
			}
		}
	})
}

// TestAnAnswerNeverWaits: with every measurement held, the view is the one of
// before, with its time.
func TestAnAnswerNeverWaits(t *testing.T) {
	inBubble(t, func(w *world) ([]Owner, Options) {
		return w.add("8:1", 1, 100), w.options()
	}, func(t *testing.T, w *world, x *Index) {
		pass(time.Minute)
		before := *partOf(t, x, "c000").Figure
		gate := make(chan struct{})
		w.do(func() {
			w.blocked["/c000"] = gate
			w.trees["/c000"].bytes *= 2
			w.trees["/c000"].written++
		})
		pass(time.Minute)
		began := time.Now()
		got := partOf(t, x, "c000")
		if took := time.Since(began); took != 0 {
			t.Errorf("the answer took %v", took)
		}
		if diff := cmp.Diff(before, *got.Figure); diff != "" || got.Measuring.IsZero() {
			t.Errorf("part = %+v, want the figure of before, being measured (-want +got):\n%s", got, diff)
		}
		close(gate)
	})
}

// TestTheOneThatIsAskedAboutVanishes: a filesystem is asked about by a path of one
// of its parts; when that goes, by another's.
func TestTheOneThatIsAskedAboutVanishes(t *testing.T) {
	inBubble(t, func(w *world) ([]Owner, Options) {
		return w.add("8:1", 3, 100), w.options()
	}, func(t *testing.T, w *world, x *Index) {
		pass(time.Minute)
		w.do(func() { delete(w.trees, "/c000") })
		pass(3 * time.Second)
		a := x.View().Filesystems[0]
		if a.Problem != "" || time.Since(a.At) > 2*time.Second || a.UsedBytes != 2*409600 {
			t.Errorf("attribution = %+v, want fresh figures without a problem", a)
		}
		if p := partOf(t, x, "c000"); p.Problem == "" || p.Figure == nil {
			t.Errorf("part = %+v, want a problem, and the last figure", p)
		}
		w.do(func() { w.trees["/c000"] = &tree{fs: "8:1", bytes: 1, inodes: 1} })
		pass(2 * placeEvery)
		if p := partOf(t, x, "c000"); p.Problem != "" || p.Figure.Bytes != 1 {
			t.Errorf("part = %+v, want the new figure", p)
		}
	})
}

// TestPathsThatHangHoldUpNoWriter: each of forty takes two seconds to give no
// answer; the one that writes elsewhere is measured as ever.
func TestPathsThatHangHoldUpNoWriter(t *testing.T) {
	inBubble(t, func(w *world) ([]Owner, Options) {
		owners, opt := w.add("8:1", 1, 100), w.options()
		for i := range 40 {
			id := fmt.Sprintf("hung%02d", i)
			owners = append(owners, Owner{Kind: "container", ID: id, Parts: []Part{{"writable", "/" + id}}})
		}
		opt.Space = func(path string) (Space, error) {
			if strings.HasPrefix(path, "/hung") {
				<-time.After(2 * time.Second)
				return Space{}, errors.New("the filesystem does not answer")
			}
			return w.space(path)
		}
		return owners, opt
	}, func(t *testing.T, w *world, x *Index) {
		pass(5 * time.Second)
		for i := range 200 {
			w.do(func() {
				w.trees["/c000"].bytes += 4096
				w.trees["/c000"].written++
			})
			pass(time.Second)
			// Before that nothing was written, and the figure is an old one.
			if lag := time.Since(partOf(t, x, "c000").Figure.Started); i > 2 && lag > 2*time.Second {
				t.Fatalf("the writer's figure is %v old", lag)
			}
		}
		if p := partOf(t, x, "hung39"); p.Problem == "" || p.FS != "" {
			t.Errorf("part = %+v, want a problem", p)
		}
	})
}

// TestALargeTreeHoldsUpNoWriter: a walk of an hour on the same disk.
func TestALargeTreeHoldsUpNoWriter(t *testing.T) {
	inBubble(t, func(w *world) ([]Owner, Options) {
		owners := w.add("8:1", 2, 100)
		w.trees["/c001"].knowsWritten = false
		return owners, w.options()
	}, func(t *testing.T, w *world, x *Index) {
		pass(time.Minute)
		w.do(func() {
			w.blocked["/c001"] = make(chan struct{})
			w.trees["/c001"].bytes++
		})
		pass(time.Minute)
		if p := partOf(t, x, "c001"); p.Measuring.IsZero() {
			t.Fatal("the large one is not being measured; this test shows nothing")
		}
		for range 60 {
			w.do(func() {
				w.trees["/c000"].bytes += 4096
				w.trees["/c000"].written++
			})
			pass(time.Second)
		}
		if lag := time.Since(partOf(t, x, "c000").Figure.Started); lag > 2*time.Second {
			t.Errorf("the writer's figure is %v old", lag)
		}
		w.do(func() { close(w.blocked["/c001"]) })
	})
}

func TestRankDecidesWhoIsFirst(t *testing.T) {
	inBubble(t, func(w *world) ([]Owner, Options) {
		owners := w.add("8:1", 4, 100)
		owners[2].Rank, owners[3].Rank = 10, 5
		return owners, w.options()
	}, func(t *testing.T, w *world, _ *Index) {
		pass(10 * time.Second)
		var order []string
		w.do(func() { order = slices.Clone(w.order) })
		if diff := cmp.Diff([]string{"/c002", "/c003", "/c000", "/c001"}, order); diff != "" {
			t.Errorf("order (-want +got):\n%s", diff)
		}
	})
}

// TestPartsThatComeAndGo: a container that ends is forgotten with its figure, one
// whose folder vanishes keeps it and says so, and a disk that is swapped is
// another filesystem.
func TestPartsThatComeAndGo(t *testing.T) {
	inBubble(t, func(w *world) ([]Owner, Options) {
		return w.add("8:1", 3, 100), w.options()
	}, func(t *testing.T, w *world, x *Index) {
		pass(time.Minute)
		w.do(func() { delete(w.trees, "/c001") })
		pass(time.Minute)
		if p := partOf(t, x, "c001"); p.Figure == nil || !strings.Contains(p.Problem, "gone") {
			t.Errorf("a folder that vanished: %+v, want its last figure and a problem", p)
		}
		if err := x.SetOwners(slices.DeleteFunc(ownersOf(x), func(o Owner) bool { return o.ID == "c001" })); err != nil {
			t.Fatal(err)
		}
		if _, ok := x.View().Owner("container", "c001"); ok {
			t.Error("an owner that is gone is still there")
		}
		checkSums(t, x.View())

		w.do(func() {
			w.trees["/c000"].fs, w.trees["/c000"].bytes = "8:17", 5<<20
		})
		x.Moved()
		pass(5 * time.Second)
		if p := partOf(t, x, "c000"); p.FS != "8:17" || p.Figure.Bytes != 5<<20 {
			t.Errorf("after the move: %+v, want 5 MiB on 8:17", p)
		}
		if n := len(x.View().Filesystems); n != 2 {
			t.Errorf("%d filesystems, want 2", n)
		}
		checkSums(t, x.View())
	})
}

// ownersOf gives the owners of a view again.
func ownersOf(x *Index) (owners []Owner) {
	for _, o := range x.View().Owners {
		owner := Owner{Kind: o.Kind, ID: o.ID}
		for _, p := range o.Parts {
			owner.Parts = append(owner.Parts, Part{Name: p.Name, Path: p.Path})
		}
		owners = append(owners, owner)
	}
	return owners
}

// TestABrokenMeasurementIsTold: the last good figure stays; it is not tried again
// and again; a panic is a problem like others.
func TestABrokenMeasurementIsTold(t *testing.T) {
	inBubble(t, func(w *world) ([]Owner, Options) {
		opt := w.options()
		opt.Measure = func(ctx context.Context, what Subject) (Figure, error) {
			if what.Path == "/c001" {
				panic("out of range")
			}
			return w.measure(ctx, what)
		}
		return w.add("8:1", 2, 100), opt
	}, func(t *testing.T, w *world, x *Index) {
		pass(time.Minute)
		if p := partOf(t, x, "c001"); p.Figure != nil || !strings.Contains(p.Problem, "out of range") {
			t.Errorf("part = %+v, want a problem and no figure", p)
		}
		w.do(func() {
			w.broken["/c000"] = errors.New("input/output error")
			w.trees["/c000"].bytes++
			w.readings["/c000"] = 0
		})
		pass(10 * time.Minute)
		if p := partOf(t, x, "c000"); p.Figure == nil || p.Figure.Bytes != 409600 || !strings.Contains(p.Problem, "input/output") {
			t.Errorf("part = %+v, want the figure of before and a problem", p)
		}
		if n := w.read()["/c000"]; n < 2 || n > 10 {
			t.Errorf("tried %d times in ten minutes, want less and less often", n)
		}
		checkSums(t, x.View())
	})
}

// TestGivenFigures: what others measure counts like the rest; files that share
// their blocks make more than is used, which is told.
func TestGivenFigures(t *testing.T) {
	inBubble(t, func(w *world) ([]Owner, Options) {
		owners := w.add("8:1", 1, 100)
		owners[0].Parts = append(owners[0].Parts, Part{Name: "deleted, open"})
		opt := w.options()
		w.unowned["8:1"] = 1000
		opt.Known = func(FS) []Known { return []Known{{"journal", 300}, {"inode tables", 600}} }
		return append(owners, Owner{Kind: "image", ID: "sha256:1", Parts: []Part{{Name: "layer"}}}), opt
	}, func(t *testing.T, w *world, x *Index) {
		pass(10 * time.Second)
		a := x.View().Filesystems[0]
		if a.Unmeasured != 0 || a.UnattributedBytes != 1000 {
			t.Errorf("attribution = %+v, want 1000 bytes unattributed", a)
		}
		if diff := cmp.Diff([]Known{{"inode tables", 600}, {"journal", 300}}, a.KnownBytes); diff != "" {
			t.Errorf("known (-want +got):\n%s", diff)
		}
		w.do(func() { w.unowned["8:1"] += 8 << 30 })
		x.Put(Key{"container", "c000", "deleted, open"}, "8:1", Figure{Bytes: 8 << 30, Inodes: 1, How: "open files"})
		x.Put(Key{"image", "sha256:1", "layer"}, "8:1", Figure{Bytes: 2000})
		x.Put(Key{"image", "gone", "layer"}, "8:1", Figure{Bytes: 2000})
		pass(2 * time.Second)
		a = x.View().Filesystems[0]
		if a.UnattributedBytes != -1000 || a.OvercountedBytes != 1000 {
			t.Errorf("attribution = %+v, want 1000 bytes overcounted", a)
		}
		want := []KindSum{{"container", 409600 + 8<<30, 101}, {"image", 2000, 0}}
		if diff := cmp.Diff(want, a.Kinds); diff != "" {
			t.Errorf("kinds (-want +got):\n%s", diff)
		}
		o, _ := x.View().Owner("container", "c000")
		if p, _ := o.Part("deleted, open"); p.Figure.How != "open files" || p.FS != "8:1" {
			t.Errorf("part = %+v", p)
		}
		checkSums(t, x.View())
	})
}

// TestManyGivenFiguresAreOneView: giving a thousand figures makes one View, and none
// where all of them are known.
func TestManyGivenFiguresAreOneView(t *testing.T) {
	views := 0
	inBubble(t, func(w *world) ([]Owner, Options) {
		owners, opt := w.add("8:1", 1, 1), w.options()
		opt.Period, opt.MaxAge = time.Hour, 24*time.Hour // nothing else happens
		opt.Known = func(FS) []Known { views++; return nil }
		for i := range 1000 {
			owners = append(owners, Owner{Kind: "image", ID: fmt.Sprint(i), Parts: []Part{{Name: "layer"}}})
		}
		return owners, opt
	}, func(t *testing.T, _ *world, x *Index) {
		var all []Put
		for i := range 1000 {
			all = append(all, Put{Key{"image", fmt.Sprint(i), "layer"}, "8:1", Figure{Bytes: int64(i), Finished: time.Now()}})
		}
		for _, tc := range []struct {
			name   string
			change func()
			want   int
		}{
			{"all are new", func() {}, 1},
			{"all are known", func() {}, 0},
			{"one has grown", func() { all[7].Figure.Bytes++ }, 1},
			{"one is elsewhere", func() { all[7].FS = "8:2" }, 1},
			{"one is younger", func() { all[7].Figure.Finished = time.Now().Add(time.Second) }, 1},
			{"one has gone", func() { all[7].Key.ID = "gone" }, 0},
		} {
			tc.change()
			views = 0
			x.PutAll(all)
			if views != tc.want {
				t.Errorf("%s: %d views, want %d", tc.name, views, tc.want)
			}
		}
		if o, _ := x.View().Owner("image", "8"); len(o.Parts) != 1 || o.Parts[0].Figure == nil || o.Parts[0].Figure.Bytes != 8 || o.Parts[0].Figure.How != Given {
			t.Errorf("layer 8 = %+v", o)
		}
	})
}

func TestOwnersThatCantBe(t *testing.T) {
	t.Parallel()
	w := newWorld()
	x, err := New(w.options())
	if err != nil {
		t.Fatal(err)
	}
	err = x.SetOwners([]Owner{
		{Kind: "pod", ID: "a", Parts: []Part{{"volumes", "/pods/a"}, {"relative", "pods/a"}, {"volumes", "/pods/b"}}},
		{Kind: "pod", ID: "b", Parts: []Part{{"volumes", "/pods/./a/"}}},
	})
	for _, want := range []string{`pod a, relative: the path "pods/a" is not absolute`, "pod a, volumes is named twice", "pod b, volumes: pod a, volumes has the same path /pods/a"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q in it", err, want)
		}
	}
	if o, ok := x.View().Owner("pod", "a"); !ok || len(o.Parts) != 1 {
		t.Errorf("owner = %+v, want the one good part", o)
	}
	if _, err := New(Options{}); err == nil {
		t.Error("an index without a filesystem to ask")
	}
}

// TestNestedPartsCountOnce: by elements of paths, not by prefix.
func TestNestedPartsCountOnce(t *testing.T) {
	t.Parallel()
	b := newBook(Options{SuspectEvery: time.Second})
	if err := b.setOwners([]Owner{
		{Kind: "kubelet", ID: "", Parts: []Part{{"own files", "/var/lib/kubelet"}}},
		{Kind: "other", ID: "foo", Parts: []Part{{"x", "/var/lib/kubelet-foo"}, {"y", "/var/lib/kubelet/pods.old"}}},
		{Kind: "pod", ID: "a", Parts: []Part{{"dir", "/var/lib/kubelet/pods/a"}, {"empty", "/var/lib/kubelet/pods/a/volumes/e"}}},
		{Kind: "root", ID: "", Parts: []Part{{"rest", "/"}}},
	}); err != nil {
		t.Fatal(err)
	}
	got := map[string][]string{}
	for _, p := range b.parts {
		got[p.path] = p.without
	}
	want := map[string][]string{
		"/":                                 {"/var/lib/kubelet", "/var/lib/kubelet-foo"},
		"/var/lib/kubelet":                  {"/var/lib/kubelet/pods/a", "/var/lib/kubelet/pods.old"},
		"/var/lib/kubelet-foo":              nil,
		"/var/lib/kubelet/pods.old":         nil,
		"/var/lib/kubelet/pods/a":           {"/var/lib/kubelet/pods/a/volumes/e"},
		"/var/lib/kubelet/pods/a/volumes/e": nil,
	}
	if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("left out (-want +got):\n%s", diff)
	}
}

// TestRestart: figures survive with their times, and if nothing has changed on the
// disk meanwhile nothing is measured; one that changed is.
func TestRestart(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name    string
		change  func(w *world)
		wantNew int // trees that are measured again
	}{
		{"nothing happened", func(*world) {}, 0},
		{"one has grown", func(w *world) { w.trees["/c001"].bytes++ }, 3},
		{"another disk", func(w *world) {
			for _, t := range w.trees {
				t.fs = "8:2"
			}
		}, 3},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			synctest.Test(t, func(t *testing.T) {
				w := newWorld()
				owners, opt := w.add("8:1", 3, 100), w.options()
				opt.StateFile = filepath.Join(dir, "usage.json")
				run := func(d time.Duration) *Index {
					x, err := New(opt)
					if err != nil {
						t.Fatal(err)
					}
					if err := x.SetOwners(owners); err != nil {
						t.Fatal(err)
					}
					ctx, cancel := context.WithTimeout(t.Context(), d)
					defer cancel()
					if err := x.Run(ctx); err != nil {
						t.Fatal(err)
					}
					return x
				}
				before := run(time.Minute)
				w.do(func() { clear(w.readings) })
				pass(time.Minute)
				w.do(func() { tc.change(w) })
				after := run(5 * time.Minute)
				if n := len(w.read()); n != tc.wantNew {
					t.Errorf("%d trees were measured again, want %d: %v", n, tc.wantNew, w.read())
				}
				if got := after.View().Problem; got != "" {
					t.Errorf("problem %q", got)
				}
				for _, o := range owners {
					a, b := partOf(t, before, o.ID), partOf(t, after, o.ID)
					if tc.wantNew == 0 && !a.Figure.Finished.Equal(b.Figure.Finished) {
						t.Errorf("%s: figure of %v, want the one of %v", o.ID, b.Figure.Finished, a.Figure.Finished)
					}
					if b.Figure.Bytes != w.bytes(o.ID) {
						t.Errorf("%s: %d bytes, want %d", o.ID, b.Figure.Bytes, w.bytes(o.ID))
					}
				}
			})
		})
	}
}

// TestStateFilesThatCantBeUsed: the index starts fresh, and says so until it has
// written a good one.
func TestStateFilesThatCantBeUsed(t *testing.T) {
	t.Parallel()
	good := `{"version":1,"savedAt":"2026-08-22T10:00:00Z","spaces":[],"parts":[]}`
	for _, tc := range []struct{ name, content, want string }{
		{"empty", "", "unexpected end"},
		{"half", good[:40], "unexpected end"},
		{"newer", strings.Replace(good, `"version":1`, `"version":2,"more":true`, 1), "version 2"},
		{"no version", `{}`, "version 0"},
		{"unknown key", strings.Replace(good, `"spaces"`, `"places"`, 1), "unknown field"},
		{"something behind", good + good, "after top-level value"},
		{"an absurd figure", strings.Replace(good, `"parts":[]`, `"parts":[{"key":{"kind":"c","id":"x","part":"p"},"figure":{"bytes":-1,"how":"walk"}}]`, 1), "can't be one"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), "usage.json")
			if err := os.WriteFile(path, []byte(tc.content), 0o600); err != nil {
				t.Fatal(err)
			}
			w := newWorld()
			opt := w.options()
			opt.StateFile = path
			x, err := New(opt)
			if err != nil {
				t.Fatal(err)
			}
			if got := x.View().Problem; !strings.Contains(got, tc.want) || !strings.Contains(got, "starts fresh") {
				t.Errorf("problem %q, want %q and that it starts fresh", got, tc.want)
			}
			if err := x.save(); err != nil {
				t.Fatal(err)
			}
			if x, err = New(opt); err != nil || x.View().Problem != "" {
				t.Errorf("after it was written: %v, problem %q", err, x.View().Problem)
			}
		})
	}
}

// TestTheClockWasSetBack: figures of a state file that are younger than now would
// not be measured again for as long as the clock was set back by.
func TestTheClockWasSetBack(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		owners, opt := w.add("8:1", 1, 100), w.options()
		opt.StateFile = filepath.Join(dir, "usage.json")
		later := time.Now().Add(8 * time.Hour)
		s := state{
			Version: stateVersion, SavedAt: later,
			Spaces: []keptSpace{{Space: Space{FS: "8:1", UsedBytes: 1, At: later}, Changed: later}},
			Parts: []keptPart{{
				Key: Key{"container", "c000", "writable"}, Path: "/c000", FS: "8:1", Interval: time.Second,
				Figure: Figure{Bytes: 1, Inodes: 1, Started: later, Finished: later, How: Walked},
			}},
		}
		content, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(opt.StateFile, content, 0o600); err != nil {
			t.Fatal(err)
		}
		x, err := New(opt)
		if err != nil {
			t.Fatal(err)
		}
		if got := x.View().Problem; !strings.Contains(got, "set back") || !strings.Contains(got, "starts fresh") {
			t.Errorf("problem %q, want that the clock was set back", got)
		}
		if err := x.SetOwners(owners); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := x.Run(ctx); err != nil {
			t.Fatal(err)
		}
		if p := partOf(t, x, "c000"); p.Figure == nil || p.Figure.Bytes != w.bytes("c000") || p.Figure.Finished.After(time.Now()) {
			t.Errorf("part = %+v, want %d bytes of now", p, w.bytes("c000"))
		}
	})
}

// TestStateFileThatCantBeWritten: that is told until it can, and nothing else is
// left beside it.
func TestStateFileThatCantBeWritten(t *testing.T) {
	dir := t.TempDir()
	inBubble(t, func(w *world) ([]Owner, Options) {
		opt := w.options()
		opt.StateFile = filepath.Join(dir, "not yet", "usage.json")
		opt.SaveEvery = time.Second
		return w.add("8:1", 1, 10), opt
	}, func(t *testing.T, _ *world, x *Index) {
		pass(10 * time.Second)
		if got := x.View().Problem; !strings.Contains(got, "no such file") {
			t.Errorf("problem %q, want why the state can't be written", got)
		}
		if err := os.Mkdir(filepath.Join(dir, "not yet"), 0o700); err != nil {
			t.Fatal(err)
		}
		pass(10 * time.Second)
		if got := x.View().Problem; got != "" {
			t.Errorf("problem %q after it could be written", got)
		}
		if names, err := os.ReadDir(filepath.Join(dir, "not yet")); err != nil || len(names) != 1 {
			t.Errorf("%v, %v, want the state file alone", names, err)
		}
	})
}

func FuzzDecodeState(f *testing.F) {
	f.Add([]byte(`{"version":1,"savedAt":"2026-08-22T10:00:00Z","spaces":[],"parts":[]}`))
	f.Fuzz(func(t *testing.T, content []byte) {
		s, err := decode(content)
		if err != nil {
			return
		}
		for _, p := range s.Parts {
			if p.Figure.Bytes < 0 || p.Figure.Inodes < 0 || p.Interval < 0 {
				t.Errorf("took %+v", p)
			}
		}
	})
}
