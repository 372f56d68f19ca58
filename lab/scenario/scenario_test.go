package scenario

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cleave-cri/cleave/config/strict"
	"github.com/cleave-cri/cleave/engine"
)

var update = flag.Bool("update", false, "write testdata/wrong.golden anew")

// TestAllFaultsTogether holds every kind of fault, each with its place.
func TestAllFaultsTogether(t *testing.T) {
	t.Parallel()
	_, err := Load("testdata/wrong.yaml")
	var faults strict.Faults
	if !errors.As(err, &faults) {
		t.Fatal(err)
	}
	got := err.Error() + "\n"
	if *update {
		if err := os.WriteFile("testdata/wrong.golden", []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile("testdata/wrong.golden")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Error(diff)
	}
	for _, f := range faults {
		if f.File == "" || f.Line == 0 || f.Column == 0 {
			t.Errorf("no place: %+v", f)
		}
	}
}

// manyPods are so many entries of 2000 pods each: more than there is room for, if
// they were made before they are counted.
func manyPods(entries int) string {
	var b strings.Builder
	for i := range entries {
		fmt.Fprintf(&b, "  many%d: {count: 2000, containers: {c: {image: i}}}\n", i)
	}
	return b.String()
}

func TestWhatIsRefused(t *testing.T) {
	t.Parallel()
	const good = "version: 1\nlasts: 1m\nfilesystems: {disk: {size: 1Gi}}\n"
	if _, err := Parse("good", []byte(good)); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct{ name, text, want string }{
		{"nothing", "", "f:1:1: the file is empty"},
		{"another version", strings.Replace(good, "1", "2", 1), "f:1:1: version: is 2, but this cleave knows version 1 only"},
		{"no version", good[len("version: 1\n"):], "version: is 0"},
		{"two documents", good + "---\n" + good, "a second document starts here"},
		{"no YAML", "a: [", "not YAML"},
		{"a list", "- a", "the file must be keys with values"},
		{"no filesystem", "version: 1\nlasts: 1m\n", "filesystems: there must be one"},
		{"too long", strings.Replace(good, "1m", "1000h", 1), "f:2:8: lasts: must be from 1s"},
		{"an amount without end", good + "kubelet: {evictionHard: {nodefs.available: 1e-100000000}}\n", `"1e-100000000" is no amount`},
		{"a huge amount", good + "kubelet: {evictionHard: {nodefs.available: 1e99999999999}}\n", `"1e99999999999" is no amount`},
		{"too many pods of several", good + "images: {i: {}}\npods:\n" + manyPods(600), "pods: are more than 2000"},
		{"too many pods", good + "images: {i: {}}\npods: {p: {count: 2001, containers: {c: {image: i}}}}\n", "count must be from 1 to 2000"},
		{"a name with a blank", good + "images: {a b: {}}\n", `"a b" is no name`},
		{"a name that leads out", good + "host: {x/../../etc: {on: disk, writes: {atOnce: 1}}}\n", `"x/../../etc" is no name`},
		{"a name from the root", good + "host: {/etc: {on: disk, writes: {atOnce: 1}}}\n", `"/etc" is no name`},
		{"a name twice", good + "images: {i: {}}\npods:\n  p-1: {containers: {c: {image: i}}}\n  p: {count: 2, containers: {c: {image: i}}}\n", `"p-1" is there twice`},
		{"a file that is too large", strings.Repeat("#", maxFileBytes+1), "larger than 1Mi"},
		{"a log that is unlinked", good + "images: {i: {}}\npods: {p: {containers: {c: {image: i, writes: [{to: log, atOnce: 1, unlinksAfter: 1s}]}}}}\n", "a log is not unlinked"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			if _, err := Parse("f", []byte(tc.text)); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%v, want %s", err, tc.want)
			}
		})
	}
	if _, err := Load(filepath.Join(t.TempDir(), "missing.yaml")); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

// TestEveryKey reads a file that has them all.
func TestEveryKey(t *testing.T) {
	t.Parallel()
	got, err := Load("testdata/all.yaml")
	if err != nil {
		t.Fatal(err)
	}
	thresholds, err := engine.Parse(engine.Settings{
		Hard: map[string]string{"nodefs.available": "10%"}, Soft: map[string]string{"imagefs.available": "20Gi"},
		SoftGrace: map[string]string{"imagefs.available": "1m"}, MinReclaim: map[string]string{"nodefs.available": "1Gi"},
	})
	if err != nil {
		t.Fatal(err)
	}
	last, err := engine.Parse(engine.Settings{Hard: map[string]string{"nodefs.available": "5%"}})
	if err != nil {
		t.Fatal(err)
	}
	want := &Scenario{
		Title: "everything", Lasts: time.Hour, PullBytesPerSecond: 1 << 20,
		Filesystems: []Filesystem{
			{Name: "root", SizeBytes: 1 << 30, Inodes: 100, UsedBytes: 1 << 20, UsedInodes: 7, FreesAfter: 5 * time.Second}, {Name: "images", SizeBytes: 2 << 30, Type: "xfs"},
		},
		Layout: Layout{NodeFS: "root", ImageFS: "images", ContainerFS: "root"},
		Images: []Image{
			{Name: "app", Layers: []Layer{{Name: "base", Bytes: 1 << 20}, {Name: "own", Bytes: 5, Inodes: 6}}, ReportedBytes: 9, Pinned: true, UnusedFor: time.Hour},
		},
		Pods: []Pod{{
			Name: "web", Namespace: "shop", Priority: 7, Static: true, Owner: "ReplicaSet web", AnewAfter: ptr(time.Second), Grace: ptr(time.Minute), Starts: 2 * time.Second,
			PodLevelMemoryBytes: 3, Volumes: []Volume{{Name: "data", Kind: engine.EmptyDirDisk, SizeLimitBytes: 4}, {Name: "host", Kind: engine.HostPath}},
			Containers: []Container{{
				Name: "app", Image: "app", RequestBytes: ptr(int64(0)), LimitBytes: ptr(int64(8)), ExitsAfter: 3 * time.Second, RestartsAfter: ptr(time.Duration(0)),
				Writes: []Write{
					{To: "layer", AtOnceBytes: 1, AtOnceInodes: 2, BytesPerSecond: 3, InodesPerSecond: 4, From: time.Second, Until: time.Minute, AtMostBytes: 5, UnlinksAfter: ptr(time.Second)},
					{To: "volume data", BytesPerSecond: 1},
				},
			}},
		}},
		Host:   []HostProcess{{Name: "backup", Filesystem: "root", Write: Write{BytesPerSecond: 1}}},
		Faults: []Fault{{Kind: MissingPodStats, From: time.Second, Until: time.Minute, Pods: []string{"web"}}, {Kind: DiskFull, From: 2 * time.Second, On: "images"}},
		Kubelet: Kubelet{
			Thresholds: thresholds, PressureTransitionPeriod: time.Minute, MaxPodGraceSeconds: 9, ImageGCHighPercent: 90, ImageGCLowPercent: 70, ImageMinimumAge: time.Second,
			ImageMaximum: time.Hour, ContainerLogMaxSizeBytes: 1 << 20, ContainerLogMaxFiles: 3, CRIO: true,
		},
		Cleave: Cleave{LastResort: last, Options: map[string]bool{"Batch": true}, LogBudgetBytes: 6, OwnerPerHour: 2, PerHour: 3},
		Expect: map[string]Expect{"cleave": {
			Evicted: new([]string), NotEvicted: []string{"web"}, EvictionsAtLeast: ptr(0), EvictionsAtMost: ptr(1), PressureAtLeast: ptr(2), PressureAtMost: ptr(3),
			ImagesRemoved: &[]string{"app"}, ImagesKept: []string{"app"}, NoSpaceAtLeast: map[string]time.Duration{"web": 0}, NoSpaceAtMost: map[string]time.Duration{"backup": time.Second},
			AvailableAtLeast: map[string]int64{"root": 1}, HeldBackBy: []string{"HoldFire"},
		}},
		Lab: &LabExpect{
			Layout: "split", DeadRemovedAtLeast: ptr(1), UnattributedAtLeast: map[string]int64{"root": 2}, OpenDeletedAtLeast: map[string]int64{"web": 3},
			LogsAtMost: map[string]int64{"web": 4}, Running: []string{"web"}, Says: []string{"Layout"},
		},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func ptr[T any](v T) *T { return &v }

func TestDefaults(t *testing.T) {
	t.Parallel()
	k := defaults()
	if len(k.Thresholds) != 4 || k.ImageGCHighPercent != 85 || k.PressureTransitionPeriod != 5*time.Minute {
		t.Errorf("%+v", k)
	}
}

func FuzzParse(f *testing.F) {
	files, err := filepath.Glob("../../docs/examples/*.yaml")
	if err != nil {
		f.Fatal(err)
	}
	for _, file := range append(files, "testdata/wrong.yaml", "testdata/all.yaml") {
		data, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		s, err := Parse("f", data)
		if (s == nil) == (err == nil) {
			t.Fatalf("%v, %v", s, err)
		}
		var faults strict.Faults
		if err != nil && (!errors.As(err, &faults) || len(faults) == 0) {
			t.Fatalf("no faults: %v", err)
		}
	})
}
