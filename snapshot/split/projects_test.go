package split

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"

	"github.com/cleave-cri/cleave/fsstats/index"
	"github.com/cleave-cri/cleave/fsstats/quota"
	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/need"
)

// bulkLedger is the account of an xfs without quota: usage is what its inodes say, limits are in memory and stop nobody.
// The kernel's own account and that it stops writers is shown in a guest (integration/guest).
type bulkLedger struct {
	mu     sync.Mutex
	limits map[uint32]quota.Limit // guarded by mu
	err    error                  // guarded by mu
}

func newBulkLedger() *bulkLedger { return &bulkLedger{limits: map[uint32]quota.Limit{}} }

// on is the ledger as options want it.
func (l *bulkLedger) on(fs *quota.FS) quota.Ledger { return bulkAccount{l, fs} }

func (l *bulkLedger) fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.err = err
}

type bulkAccount struct {
	*bulkLedger
	fs *quota.FS
}

func (a bulkAccount) all() (map[uint32]quota.Project, error) {
	bulk, err := a.fs.BulkUsage(context.Background())
	if err != nil {
		return nil, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	projects := map[uint32]quota.Project{}
	for id, b := range bulk {
		projects[id] = quota.Project{ID: id, Usage: b.Usage, Limit: a.limits[id]}
	}
	for id, l := range a.limits {
		projects[id] = quota.Project{ID: id, Usage: bulk[id].Usage, Limit: l}
	}
	return projects, a.err
}

func (a bulkAccount) Project(id uint32) (quota.Project, error) {
	projects, err := a.all()
	p := projects[id]
	p.ID = id
	return p, err
}

func (a bulkAccount) NextProject(from uint32) (next quota.Project, found bool, _ error) {
	projects, err := a.all()
	for id, p := range projects {
		if id >= from && (p.Usage != quota.Usage{} || p.Limit != quota.Limit{}) && (!found || id < next.ID) {
			next, found = p, true
		}
	}
	return next, found, err
}

func (a bulkAccount) SetLimit(id uint32, l quota.Limit) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.limits[id] = l
	if (l == quota.Limit{}) {
		delete(a.limits, id)
	}
	return a.err
}

// withProjects is a snapshotter whose container root is on an xfs with projects.
func withProjects(t *testing.T) (Options, *bulkLedger) {
	t.Helper()
	o, _ := onDisks(t, disk.XFS, 0, 0)
	ledger := newBulkLedger()
	o.ProjectQuota, o.ledger = true, ledger.on
	return o, ledger
}

// ownName is containerd's name of a snapshot.
func ownName(key string) string {
	_, own := splitKey(key)
	return own
}

func mustMounts(t *testing.T, s *Snapshotter, key string) []mount.Mount {
	t.Helper()
	mounts, err := s.Mounts(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	return mounts
}

// TestProjectsOfWritableLayers goes through the life of limits: given at Prepare, set, kept over a restart, counted, and free
// again only when the layer is gone.
func TestProjectsOfWritableLayers(t *testing.T) {
	t.Parallel()
	o, ledger := withProjects(t)
	s := initialised(t, o)
	base, _ := addLayer(t, s, 1, "")
	first, upper := addContainer(t, s, 2, base)
	second, _ := addContainer(t, s, 3, base)
	if _, err := s.View(t.Context(), "k8s.io/4/view", base); err != nil {
		t.Fatal(err)
	}
	unpacked, opt := extraction(5, "")
	if _, err := s.Prepare(t.Context(), unpacked, "", opt); err != nil {
		t.Fatal(err)
	}
	limits := func() map[string]LayerLimit {
		t.Helper()
		list, err := s.Limits(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		byName := map[string]LayerLimit{}
		for _, l := range list {
			byName[l.Name] = l
		}
		return byName
	}
	had := limits()
	one, two := had[ownName(first)], had[ownName(second)]
	if len(had) != 2 || one.Project != projectIDs.First || two.Project != projectIDs.First+1 || one.LimitBytes != 0 {
		t.Fatalf("the writable layers, and nobody else, should have an ID each and no limit: %+v", had)
	}

	got, err := s.SetLimit(t.Context(), "k8s.io", ownName(first), 8<<20)
	if err != nil || got.Project != one.Project || got.LimitBytes != 8<<20 {
		t.Fatalf("got %+v, %v", got, err)
	}
	if now := limits()[ownName(second)]; now.LimitBytes != 0 {
		t.Errorf("the neighbour has a limit now: %+v", now)
	}
	for why, name := range map[string]string{"a container that is not there": "nobody", "a layer": layerDigest(1), "a view": "view", "an extraction": ownName(unpacked)} {
		if _, err := s.SetLimit(t.Context(), "k8s.io", name, 1<<20); !errdefs.IsNotFound(err) {
			t.Errorf("a limit for %s gave %v", why, err)
		}
	}
	if _, err := s.SetLimit(t.Context(), "other", ownName(first), 1<<20); !errdefs.IsNotFound(err) {
		t.Errorf("a limit in another namespace gave %v", err)
	}

	if err := os.WriteFile(filepath.Join(upper, "written"), make([]byte, 300_000), 0o600); err != nil {
		t.Fatal(err)
	}
	root, err := s.gate.Root("container")
	if err != nil {
		t.Fatal(err)
	}
	if err := root.SyncFilesystem(); err != nil { // the bulk reading counts what is on the disk
		t.Fatal(err)
	}
	bytes, inodes := du(t, filepath.Dir(upper))
	usage, err := s.Usage(t.Context(), first)
	if err != nil || usage.Size != bytes || usage.Inodes != inodes {
		t.Errorf("usage %+v, %v; du says %d bytes, %d inodes", usage, err, bytes, inodes)
	}
	if f, ok := s.lastFigure(subject{id: filepath.Base(filepath.Dir(upper)), root: "container"}); !ok || f.how != HowQuota {
		t.Errorf("the figure is %+v, and should be by quota", f)
	}

	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = opened(t, o)
	if now := limits(); now[ownName(first)].LimitBytes != 8<<20 || now[ownName(second)].Project != two.Project {
		t.Errorf("after a restart: %+v", now)
	}
	third, _ := addContainer(t, s, 6, base)
	if now := limits()[ownName(third)]; now.Project == one.Project || now.Project == two.Project || now.LimitBytes != 0 {
		t.Errorf("a new layer has %+v, of which the others have %+v", now, had)
	}

	// The files are gone and the limit is there: nobody may get the ID.
	if err := s.Remove(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	settle(t, s)
	fourth, _ := addContainer(t, s, 7, base)
	if now := limits()[ownName(fourth)]; now.Project == one.Project || now.LimitBytes != 0 {
		t.Errorf("a new layer got the ID of one that is gone, with its limit: %+v", now)
	}
	s.tidyProjects(t.Context())
	ledger.mu.Lock()
	if len(ledger.limits) != 0 {
		t.Errorf("limits are left: %v", ledger.limits)
	}
	ledger.mu.Unlock()
	fifth, _ := addContainer(t, s, 8, base)
	if now := limits()[ownName(fifth)]; now.Project != one.Project || now.LimitBytes != 0 {
		t.Errorf("the ID that is free again went to nobody: %+v", now)
	}
	mustBeClean(t, s, o)
}

// TestFilesOutsideOfTheProject: a container gives a large file another project, so the kernel's count lacks it. The slow refresh
// finds that out, and the layer is walked from then on.
func TestFilesOutsideOfTheProject(t *testing.T) {
	t.Parallel()
	need.Tools(t, "xfs_io")
	o, _ := withProjects(t)
	s := initialised(t, o)
	key, upper := addContainer(t, s, 1, "")
	large := filepath.Join(upper, "large")
	if err := os.WriteFile(large, make([]byte, 2*escapedBytes), 0o600); err != nil {
		t.Fatal(err)
	}
	sh(t, "sync", "-f", upper) // the bulk reading counts what is on the disk
	what := subject{id: filepath.Base(filepath.Dir(upper)), root: "container"}
	const slowly = 1_000_000
	bytes, _ := du(t, filepath.Dir(upper))
	if f, err := s.measureAt(t.Context(), what, slowly); err != nil || f.how != HowQuota || f.Bytes != bytes {
		t.Errorf("with all in the project: %+v, %v, want %d bytes", f, err, bytes)
	}
	sh(t, "xfs_io", "-c", "chproj 0", large)
	if f, err := s.measureAt(t.Context(), what, 0); err != nil || f.how != HowQuota || f.Bytes > bytes-escapedBytes {
		t.Errorf("the kernel's count is %+v, %v", f, err)
	}
	if f, err := s.measureAt(t.Context(), what, slowly); err != nil || f.how != index.Walked || f.Bytes != bytes {
		t.Errorf("the slow refresh says %+v, %v, want %d bytes", f, err, bytes)
	}
	if usage, err := s.Usage(t.Context(), key); err != nil || usage.Size != bytes {
		t.Errorf("usage %+v, %v, want %d bytes", usage, err, bytes)
	}
}

// TestProjectsThatCantBeGiven: a snapshot is made all the same, whole and without a half ID; the status says why, and it can't
// be limited, also later.
func TestProjectsThatCantBeGiven(t *testing.T) {
	t.Parallel()
	o, ledger := withProjects(t)
	s := initialised(t, o)
	base, _ := addLayer(t, s, 1, "")
	ledger.fail(errors.New("input/output error"))
	key, upper := addContainer(t, s, 2, base)
	st, err := s.Status(t.Context())
	if err != nil || st.Projects == nil || st.Projects.Failures == 0 || !strings.Contains(st.Projects.Problem, "input/output error") {
		t.Errorf("status %+v, %v", st.Projects, err)
	}
	ledger.fail(nil)
	mounted(t, filepath.Dir(o.Database), mustMounts(t, s, key), func(path string) {
		// A copy up is a rename from the work folder to the upper one.
		if err := os.Rename(filepath.Join(path, "layer-1"), filepath.Join(path, "moved")); err != nil {
			t.Error(err)
		}
	})
	if !exists(filepath.Join(upper, "moved")) {
		t.Error("nothing was written")
	}
	if _, err := s.SetLimit(t.Context(), "k8s.io", ownName(key), 1<<20); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "replace the container") {
		t.Errorf("a limit for it gave %v", err)
	}
	if list, err := s.Limits(t.Context()); err != nil || len(list) != 0 {
		t.Errorf("got %+v, %v", list, err)
	}
	if usage, err := s.Usage(t.Context(), key); err != nil || usage.Size == 0 {
		t.Errorf("usage %+v, %v", usage, err)
	}
	next, _ := addContainer(t, s, 3, base)
	if _, err := s.SetLimit(t.Context(), "k8s.io", ownName(next), 1<<20); err != nil {
		t.Errorf("a limit for the next one: %v", err)
	}
	if st, err := s.Status(t.Context()); err != nil || st.Projects.Problem != "" {
		t.Errorf("status %+v, %v", st.Projects, err)
	}
	mustBeClean(t, s, o)
}

// TestProjectQuotaThatIsNotThere: on a filesystem without it everything goes on, and it is said in words.
func TestProjectQuotaThatIsNotThere(t *testing.T) {
	t.Parallel()
	o := folders(t)
	plain := initialised(t, o)
	key, _ := addContainer(t, plain, 1, "")
	if _, err := plain.SetLimit(t.Context(), "k8s.io", ownName(key), 1<<20); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "snapshotter.projectQuota") {
		t.Errorf("without the option a limit gave %v", err)
	}
	if st, err := plain.Status(t.Context()); err != nil || st.Projects != nil {
		t.Errorf("without the option the status has %+v, %v", st.Projects, err)
	}
	if err := plain.Close(); err != nil {
		t.Fatal(err)
	}
	for _, kind := range []disk.FS{disk.Ext4, disk.Btrfs} {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			o, _ := onDisks(t, kind, 256<<20, 256<<20)
			o.ProjectQuota = true
			s := initialised(t, o)
			key, _ := addContainer(t, s, 1, "")
			_, err := s.SetLimit(t.Context(), "k8s.io", ownName(key), 1<<20)
			if !errdefs.IsFailedPrecondition(err) || !errors.Is(err, quota.ErrNotSupported) || !strings.Contains(err.Error(), "project limits on "+o.ContainerRoot) {
				t.Errorf("a limit gave %v", err)
			}
			st, err := s.Status(t.Context())
			if err != nil || st.Projects == nil || !strings.Contains(st.Projects.Missing, "project limits on "+o.ContainerRoot) {
				t.Errorf("status %+v, %v", st.Projects, err)
			}
			mustBeClean(t, s, o)
		})
	}
}
