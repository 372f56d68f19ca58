package quota_test

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/cleave-cri/cleave/fsstats/quota"
	"github.com/cleave-cri/cleave/fsstats/quota/quotatest"
	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/du"
	"github.com/cleave-cri/cleave/lab/janitor"
	"github.com/cleave-cri/cleave/lab/need"
)

func TestFakeKeepsTheContract(t *testing.T) {
	t.Parallel()
	quotatest.Ledger(t, func(*testing.T) quotatest.Bench {
		f := quotatest.NewFake()
		return quotatest.Bench{
			Ledger: f,
			Write:  func(_ testing.TB, id uint32, bytes uint64) error { return f.Write(id, bytes) },
			Remove: func(_ testing.TB, id uint32) { f.Remove(id) },
		}
	})
}

// make1 makes a filesystem and opens it.
func make1(t *testing.T, run *janitor.Run, spec disk.Spec) (*quota.FS, string) {
	t.Helper()
	need.Loop(t)
	need.Tools(t, "mkfs."+string(spec.FS))
	if spec.SizeBytes == 0 {
		spec.SizeBytes = 320 << 20
	}
	d, err := disk.Make(t.Context(), run.Dir(), spec)
	if err != nil {
		t.Fatal(err)
	}
	return open(t, d.Path()), d.Path()
}

func open(t testing.TB, path string) *quota.FS {
	t.Helper()
	fs, err := quota.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := fs.Close(); err != nil {
			t.Error(err)
		}
	})
	return fs
}

// TestWhatIsNotSupportedSaysWhy: no filesystem here is mounted with project quota, whatever the kernel can do.
func TestWhatIsNotSupportedSaysWhy(t *testing.T) {
	t.Parallel()
	run := need.Lab(t)
	tmp := filepath.Join(run.Dir(), "tmpfs")
	if err := errors.Join(os.Mkdir(tmp, 0o700), unix.Mount("tmpfs", tmp, "tmpfs", 0, "")); err != nil {
		t.Fatal(err)
	}
	none := map[quota.Feature]string{
		quota.ProjectUsage:  "only ext4 and xfs",
		quota.ProjectLimits: "only ext4 and xfs",
		quota.Bulkstat:      "only xfs",
		quota.Qgroups:       "only btrfs",
	}
	with := func(change map[quota.Feature]string) map[quota.Feature]string {
		m := maps.Clone(none)
		maps.Copy(m, change)
		return m
	}
	tests := []struct {
		fs   disk.FS
		why  map[quota.Feature]string // empty: supported
		best quota.Feature
	}{
		{disk.Ext4, with(map[quota.Feature]string{quota.ProjectUsage: "needs", quota.ProjectLimits: "needs"}), ""},
		{disk.XFS, with(map[quota.Feature]string{quota.ProjectUsage: "needs", quota.ProjectLimits: "needs", quota.Bulkstat: ""}), quota.Bulkstat},
		{disk.Btrfs, with(map[quota.Feature]string{quota.Qgroups: "needs `btrfs quota enable`"}), ""},
		{"tmpfs", none, ""},
	}
	for _, tc := range tests {
		t.Run(string(tc.fs), func(t *testing.T) {
			var fs *quota.FS
			if tc.fs == "tmpfs" {
				fs = open(t, tmp)
			} else {
				fs, _ = make1(t, run, disk.Spec{Name: string(tc.fs), FS: tc.fs})
			}
			for feature, why := range tc.why {
				err := fs.Supports(feature)
				if why == "" {
					if err != nil {
						t.Errorf("%s: %v", feature, err)
					}
					continue
				}
				t.Log(err)
				var not *quota.NotSupportedError
				if !errors.Is(err, quota.ErrNotSupported) || !errors.As(err, &not) || not.Feature != feature || !strings.Contains(err.Error(), why) {
					t.Errorf("%s: got %v, want one that says %q", feature, err, why)
				}
			}
			best, err := quota.Best(fs)
			if best != tc.best || (tc.best == "") != errors.Is(err, quota.ErrNotSupported) {
				t.Errorf("the best is %q (%v), want %q", best, err, tc.best)
			}
			// Reading and limiting say the same as the question.
			for name, err := range map[string]error{
				"Project":     second(fs.Project(7)),
				"NextProject": third(fs.NextProject(1)),
				"SetLimit":    fs.SetLimit(7, quota.Limit{Bytes: 1}),
			} {
				if !errors.Is(err, quota.ErrNotSupported) {
					t.Errorf("%s: %v", name, err)
				}
			}
			if tc.best != quota.Bulkstat {
				if _, err := fs.BulkUsage(t.Context()); !errors.Is(err, quota.ErrNotSupported) {
					t.Errorf("BulkUsage: %v", err)
				}
			}
			if _, err := fs.Qgroup("."); !errors.Is(err, quota.ErrNotSupported) {
				t.Errorf("Qgroup: %v", err)
			}
		})
	}
}

func second[T any](_ T, err error) error        { return err }
func third[T, U any](_ T, _ U, err error) error { return err }

// TestAskingChangesNothing: what was off before is off after it, and no file has got a project.
func TestAskingChangesNothing(t *testing.T) {
	t.Parallel()
	run := need.Lab(t)
	for _, kind := range disk.Filesystems() {
		fs, dir := make1(t, run, disk.Spec{Name: string(kind), FS: kind})
		before := changed(t, dir)
		for range 2 { // as the first answer, so the second
			for _, feature := range []quota.Feature{quota.ProjectUsage, quota.ProjectLimits, quota.Bulkstat, quota.Qgroups} {
				first := fs.Supports(feature)
				if again := fs.Supports(feature); (first == nil) != (again == nil) {
					t.Errorf("%s on %s: first %v, then %v", feature, kind, first, again)
				}
			}
			_, _ = quota.Best(fs) //nolint:errcheck // its answer is another test's
		}
		if after := changed(t, dir); after != before {
			t.Errorf("%s: %s became %s", kind, before, after)
		}
		if kind == disk.Btrfs {
			continue
		}
		if id, inherits, err := quota.ProjectOf(dir); err != nil || id != 0 || inherits {
			t.Errorf("%s: its folder has project %d, inherits %v, %v", kind, id, inherits, err)
		}
	}
}

// changed is what any writing to a filesystem would move: its space, after all is on the disk, and the time of change of
// its folder.
func changed(t *testing.T, dir string) string {
	t.Helper()
	file, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	var fs unix.Statfs_t
	var st unix.Stat_t
	if err := errors.Join(unix.Syncfs(int(file.Fd())), unix.Fstatfs(int(file.Fd()), &fs), unix.Fstat(int(file.Fd()), &st), file.Close()); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%d of %d blocks, %d inodes, changed at %v", fs.Bfree, fs.Blocks, fs.Ffree, st.Ctim)
}

// TestBulkUsage: each project's bytes are du's, through overlay too, and a deleted file counts while it is open.
func TestBulkUsage(t *testing.T) {
	t.Parallel()
	run := need.Lab(t)
	need.Tools(t, "du")
	fs, dir := make1(t, run, disk.Spec{Name: "x", FS: disk.XFS})
	trees := map[uint32]string{1001: filepath.Join(dir, "a"), 1002: filepath.Join(dir, "b")}
	for id, tree := range trees {
		if err := errors.Join(os.Mkdir(tree, 0o700), quota.SetProject(tree, id, true)); err != nil {
			t.Fatal(err)
		}
		for i := range 3000 { // more than one batch
			name := filepath.Join(tree, fmt.Sprintf("d%02d", i%50))
			if err := os.MkdirAll(name, 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(name, fmt.Sprint(i)), make([]byte, int(id-1000)*i), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := errors.Join(os.Link(filepath.Join(tree, "d00", "0"), filepath.Join(tree, "link")), os.Symlink("link", filepath.Join(tree, "symlink"))); err != nil {
			t.Fatal(err)
		}
	}
	lower := filepath.Join(run.Dir(), "lower")
	merged := filepath.Join(run.Dir(), "merged")
	upper, work := filepath.Join(trees[1001], "fs"), filepath.Join(trees[1001], "work")
	for _, d := range []string{lower, merged, upper, work} {
		if err := os.Mkdir(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(lower, "copied-up"), make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("overlay", merged, "overlay", 0, "lowerdir="+lower+",upperdir="+upper+",workdir="+work); err != nil {
		t.Fatal(err)
	}
	appendTo(t, filepath.Join(merged, "copied-up"), 100_000)
	appendTo(t, filepath.Join(merged, "made"), 300_000)

	flush(t, dir)
	bulk, err := fs.BulkUsage(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for id, tree := range trees {
		bytes, inodes, err := du.Measure(t.Context(), tree)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(quota.Bulk{Usage: quota.Usage{Bytes: bytes, Inodes: inodes}}, bulk[id]); diff != "" {
			t.Errorf("project %d, -du +ours:\n%s", id, diff)
		}
	}

	file, err := os.Create(filepath.Join(trees[1002], "deleted"))
	if err != nil {
		t.Fatal(err)
	}
	_, err = file.Write(make([]byte, 8<<20))
	if err := errors.Join(err, file.Sync(), os.Remove(file.Name())); err != nil {
		t.Fatal(err)
	}
	after, err := fs.BulkUsage(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	deleted := after[1002].Deleted
	if deleted.Bytes < 8<<20 || deleted.Inodes != 1 {
		t.Errorf("a deleted file of 8 MiB that is open counts as %+v", deleted)
	}
	if got, want := after[1002].Bytes, bulk[1002].Bytes+deleted.Bytes; got != want {
		t.Errorf("the project has %d bytes, want %d", got, want)
	}
	if err := file.Close(); err != nil {
		t.Fatal(err)
	}
}

// BenchmarkBulkUsage gives the time of a pass over 20 000 inodes, and per inode.
func BenchmarkBulkUsage(b *testing.B) {
	need.Loop(b)
	run := need.Lab(b)
	d, err := disk.Make(b.Context(), run.Dir(), disk.Spec{Name: "x", FS: disk.XFS, SizeBytes: 512 << 20})
	if err != nil {
		b.Fatal(err)
	}
	for i := range 100 {
		folder := filepath.Join(d.Path(), fmt.Sprint(i))
		if err := errors.Join(os.Mkdir(folder, 0o700), quota.SetProject(folder, uint32(1000+i), true)); err != nil {
			b.Fatal(err)
		}
		for j := range 200 {
			if err := os.WriteFile(filepath.Join(folder, fmt.Sprint(j)), []byte("x"), 0o600); err != nil {
				b.Fatal(err)
			}
		}
	}
	fs := open(b, d.Path())
	var inodes uint64
	b.ReportAllocs()
	for b.Loop() {
		bulk, err := fs.BulkUsage(b.Context())
		if err != nil {
			b.Fatal(err)
		}
		for _, project := range bulk {
			inodes += project.Inodes
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(inodes), "ns/inode")
}

func appendTo(t *testing.T, path string, bytes int) {
	t.Helper()
	file, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	_, err = file.Write(make([]byte, bytes))
	if err := errors.Join(err, file.Close()); err != nil {
		t.Fatal(err)
	}
}

func flush(t *testing.T, dir string) {
	t.Helper()
	file, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(unix.Syncfs(int(file.Fd())), file.Close()); err != nil {
		t.Fatal(err)
	}
}

// TestQgroup reads what btrfs itself shows, follows a write after a sync, and tells a limit.
func TestQgroup(t *testing.T) {
	t.Parallel()
	run := need.Lab(t)
	need.Tools(t, "btrfs")
	fs, dir := make1(t, run, disk.Spec{Name: "b", FS: disk.Btrfs})
	btrfs := func(args ...string) {
		t.Helper()
		if out, err := exec.CommandContext(t.Context(), "btrfs", args...).CombinedOutput(); err != nil {
			t.Fatalf("btrfs %v: %v\n%s", args, err, out)
		}
	}
	one, other := filepath.Join(dir, "one"), filepath.Join(dir, "other")
	btrfs("subvolume", "create", one)
	btrfs("subvolume", "create", other)
	if _, err := fs.Qgroup("one"); !errors.Is(err, quota.ErrNotSupported) {
		t.Errorf("before quota is enabled: %v", err)
	}
	btrfs("quota", "enable", dir)
	btrfs("quota", "rescan", "-w", dir)
	if best, err := quota.Best(fs); best != quota.Qgroups {
		t.Errorf("the best is %q, %v", best, err)
	}
	get := func(tree string) quota.Qgroup {
		t.Helper()
		q, err := fs.Qgroup(tree)
		if err != nil {
			t.Fatal(err)
		}
		return q
	}
	before := get("one")
	appendTo(t, filepath.Join(one, "file"), 8<<20)
	flush(t, dir)
	after := get("one")
	out, err := exec.CommandContext(t.Context(), "btrfs", "qgroup", "show", "--raw", dir).Output()
	if err != nil {
		t.Fatal(err)
	}
	line := regexp.MustCompile(fmt.Sprintf(`(?m)^0/%d\s+%d\s+%d\b`, after.Subvolume, after.ReferencedBytes, after.ExclusiveBytes))
	if !line.Match(out) {
		t.Errorf("we read %+v, btrfs shows\n%s", after, out)
	}
	if grown := after.ExclusiveBytes - before.ExclusiveBytes; grown < 8<<20 || grown > 9<<20 {
		t.Errorf("8 MiB grew it by %d: %+v, %+v", grown, before, after)
	}
	if got := get("other"); got.ExclusiveBytes != before.ExclusiveBytes || got.Subvolume == after.Subvolume {
		t.Errorf("the other subvolume: %+v", got)
	}
	if after.ReferencedLimitBytes != nil || after.ExclusiveLimitBytes != nil {
		t.Errorf("there is a limit that nobody set: %+v", after)
	}
	btrfs("subvolume", "snapshot", one, filepath.Join(dir, "copy"))
	flush(t, dir)
	if q := get("one"); q.ExclusiveBytes >= 8<<20 || q.ReferencedBytes != after.ReferencedBytes {
		t.Errorf("what a copy shares is still exclusive: %+v", q)
	}
	btrfs("qgroup", "limit", "30M", one)
	if q := get("one"); q.ReferencedLimitBytes == nil || *q.ReferencedLimitBytes != 30<<20 || q.ExclusiveLimitBytes != nil {
		t.Errorf("a limit of 30 MiB reads as %+v", q)
	}
	if err := os.Mkdir(filepath.Join(one, "folder"), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := fs.Qgroup("one/folder"); !errors.Is(err, quota.ErrNotSubvolume) {
		t.Errorf("a folder: %v", err)
	}
	if q := get("."); q.Subvolume != 5 {
		t.Errorf("the top is %+v", q)
	}
	// Putting one that shares extents under another leaves the count incomplete (btrfs-qgroup(8), "assign").
	btrfs("qgroup", "create", "1/1", dir)
	btrfs("qgroup", "assign", "--no-rescan", fmt.Sprintf("0/%d", after.Subvolume), "1/1", dir)
	if q, err := fs.Qgroup("one"); !errors.Is(err, quota.ErrInconsistent) {
		t.Errorf("before a rescan: %+v, %v", q, err)
	}
}

func TestLimitUnits(t *testing.T) {
	t.Parallel()
	for bytes, want := range map[uint64]uint64{0: 0, 1: 1, 1023: 1, 1024: 1, 1025: 2, math.MaxUint64: 1 << 54} {
		if got := quota.LimitUnits(bytes); got != want {
			t.Errorf("%d bytes are %d units, want %d", bytes, got, want)
		}
	}
}

func TestParseProjects(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name, content string
		want          []uint32
		refused       string
	}{
		{"nothing", "", nil, ""},
		{"projects", "# comment\n\n10:/export/a\n 11 : /export/b:c\n", []uint32{10, 11}, ""},
		{"projid", "builds:20\nlogs:21\n", []uint32{20, 21}, ""},
		{"a name of digits may be either", "30:31\n", []uint32{30, 31}, ""},
		{"no end of line", "10:/a", []uint32{10}, ""},
		{"neither", "10:/a\nrubbish\n", nil, `line 2, "rubbish"`},
		{"too large for an ID", "4294967296:/a\n", nil, "line 1"},
		{"negative", "-1:/a\n", nil, "line 1"},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			ids := map[uint32]bool{}
			err := quota.ParseProjects(tc.content, ids)
			if tc.refused != "" {
				if err == nil || !strings.Contains(err.Error(), tc.refused) {
					t.Errorf("got %v, want an error with %q", err, tc.refused)
				}
				return
			}
			if got := slices.Sorted(maps.Keys(ids)); err != nil || !slices.Equal(got, tc.want) {
				t.Errorf("got %v, %v, want %v", got, err, tc.want)
			}
		})
	}
}

func FuzzParseProjects(f *testing.F) {
	f.Add("10:/export/a\nname:20\n# comment\n")
	f.Add("30:31")
	f.Fuzz(func(t *testing.T, content string) {
		ids := map[uint32]bool{}
		if err := quota.ParseProjects(content, ids); err != nil {
			return
		}
		// Every line that is taken names at least one ID.
		for line := range strings.Lines(content) {
			if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") && len(ids) == 0 {
				t.Errorf("%q named no ID and was taken", line)
			}
		}
	})
}
