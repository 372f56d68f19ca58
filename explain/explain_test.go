package explain

import (
	"bytes"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/record"
)

var update = flag.Bool("update", false, "write testdata/explained.golden anew")

const gib = 1 << 30

var noon = time.Date(2026, time.March, 1, 12, 0, 0, 0, time.UTC)

func ptr[T any](v T) *T { return &v }

// full is a node on which one pod goes and each other one stays for another
// reason.
func full(t *testing.T, options engine.Options) record.Record {
	t.Helper()
	thresholds, err := engine.Parse(engine.Settings{Hard: map[string]string{"nodefs.available": "10%"}})
	if err != nil {
		t.Fatal(err)
	}
	disk := &engine.FSStats{Time: noon, AvailableBytes: ptr(uint64(5 * gib)), CapacityBytes: ptr(uint64(100 * gib))}
	r := record.Record{
		Decider: "cleave", Config: engine.Config{Thresholds: thresholds, Options: options},
		Input: engine.Input{Now: noon, Layout: &engine.Detected{ImageApart: true}, Summary: &engine.Summary{NodeFS: disk}},
	}
	for _, p := range []struct {
		name     string
		used     uint64
		request  string
		priority int32
		static   bool
	}{
		{"greedy", 30 * gib, "", 0, false}, {"smaller", 20 * gib, "", 0, false}, {"important", 40 * gib, "", 1000, false},
		{"behaved", 50 * gib, "60Gi", 0, false}, {"static", 60 * gib, "", 0, true}, {"twin", 30 * gib, "", 0, false}, {"last", gib, "", 0, false},
	} {
		pod := engine.Pod{UID: p.name, Name: p.name, Namespace: "shop", Priority: &p.priority, Static: p.static, Volumes: []engine.Volume{{Name: "v", Kind: engine.EmptyDirDisk}}}
		c := engine.Container{Name: "app"}
		if p.request != "" {
			c.Requests.EphemeralStorage = quantity(t, p.request)
		}
		pod.Containers = []engine.Container{c}
		r.Input.Pods = append(r.Input.Pods, pod)
		r.Input.Summary.Pods = append(r.Input.Summary.Pods, engine.PodStats{UID: p.name, Volumes: []engine.VolumeStats{{Name: "v", FSStats: engine.FSStats{UsedBytes: &p.used}}}})
	}
	r.Next, r.Decision = r.Config.Sync(r.State, r.Input)
	return r
}

// TestWhyThisOneAndNotThatOne holds the sentences.
func TestWhyThisOneAndNotThatOne(t *testing.T) {
	t.Parallel()
	r := full(t, engine.Options{})
	r.Evicted = []record.Evicted{{UID: "greedy", ExpectedBytes: ptr(int64(30 * gib)), ActualBytes: ptr(int64(29 * gib))}}
	cleave := full(t, engine.Cleave())
	cleave.Steps = []record.Step{{Kind: engine.OldLogs, Logs: &record.LogChoice{}, Items: []record.Item{{ID: "0.log.1", Rule: "GAP-1", ExpectedBytes: ptr(int64(gib)), ActualBytes: ptr(int64(gib))}, {ID: "b", Rule: "GAP-1", Error: "read-only file system"}}}}
	cleave.Verdict = &record.Verdict{Resolved: true}
	held := cleave
	held.Steps, held.Verdict = nil, &record.Verdict{Still: held.Decision.Due}
	held.Decision.Victim, held.Decision.NoVictim = nil, "HoldFire"
	held.Decision.Hold = &engine.Hold{Holds: true, Since: noon, GrewBytes: 20 * gib, NobodysBytes: 19 * gib, Who: []engine.Suspect{{Name: "backup", Bytes: 19 * gib}}}
	barred := held
	barred.Verdict, barred.Decision.Hold, barred.Decision.NoVictim = nil, nil, "BreakStorms"
	barred.Decision.Barred = []engine.Bar{{UID: "greedy", Owner: "ReplicaSet shop/greedy", Why: engine.OwnerPerHour, Went: 4, Until: noon.Add(time.Hour)}}
	limit := record.Record{Decider: "kubelet", Input: r.Input, Decision: engine.Decision{Outcome: engine.OverLimit, Rule: "SYN-18", Limits: []engine.Eviction{{UID: "last", Cause: engine.EmptyDirLimit, Subject: "v", Limit: *quantity(t, "1Gi")}}}}
	var out strings.Builder
	for _, tc := range []struct {
		name, pod string
		r         record.Record
	}{
		{"kubelet", "", r}, {"kubelet, --pod static", "static", r}, {"kubelet, --pod shop/behaved", "shop/behaved", r}, {"kubelet, --pod other", "other", r},
		{"the reclaim was enough", "greedy", cleave}, {"held", "", held}, {"barred", "", barred}, {"limit", "", limit},
	} {
		out.WriteString("# " + tc.name + "\n" + strings.Join(Sentences(tc.r, tc.pod), "\n") + "\n\n")
	}
	const golden = "testdata/explained.golden"
	if *update {
		if err := os.WriteFile(golden, []byte(out.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), out.String()); diff != "" {
		t.Error(diff)
	}
}

// TestIfShort holds what is said of a shortage that is not there.
func TestIfShort(t *testing.T) {
	t.Parallel()
	r := full(t, engine.Cleave())
	r.Input.Summary.NodeFS.AvailableBytes = ptr(uint64(40 * gib))
	r.Next, r.Decision = r.Config.Sync(r.State, r.Input)
	list := r.Config.IfShort(r.Next, r.Input)
	if r.Decision.Outcome != engine.Calm || len(list) != 1 {
		t.Fatalf("%s, and %d decisions", r.Decision.Outcome, len(list))
	}
	r.Decision = list[0]
	for pod, want := range map[string][]string{
		"":             {"nodefs.available has 40.0Gi available of 100.0Gi; the threshold is 10.0Gi, a hard one.", "shop/greedy would go first: it is number 2 of 7. It uses 30.0Gi"},
		"shop/behaved": {"nodefs.available has 40.0Gi", "Not shop/behaved, number 7: it uses 50.0Gi, not more than it requests (RANK-9)."},
		"static":       {"nodefs.available has 40.0Gi", "Not shop/static, number 1: it never goes"},
	} {
		got := IfShort(r, pod)
		if len(got) < len(want) {
			t.Errorf("%s: %q", pod, got)
			continue
		}
		for i, w := range want {
			if !strings.HasPrefix(got[i], w) {
				t.Errorf("%s: %q, want %q", pod, got[i], w)
			}
		}
	}
	if got := IfShort(r, "other"); got != nil {
		t.Errorf("of a pod that is not there: %q", got)
	}
	if s := Standing(r, "last"); s != "It uses 1.0Gi, 1.0Gi more than it requests (RANK-9), at priority 0." {
		t.Errorf("last: %q", s)
	}
}

func written(t *testing.T, records ...record.Record) (file string, text []byte) {
	t.Helper()
	var err error
	for _, r := range records {
		if text, err = record.Append(text, r); err != nil {
			t.Fatal(err)
		}
	}
	file = filepath.Join(t.TempDir(), "records.jsonl")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return file, text
}

func TestReplayFiles(t *testing.T) {
	t.Parallel()
	r := full(t, engine.Cleave())
	other := full(t, engine.Cleave())
	other.Decision.Ranking = slices.Clone(other.Decision.Ranking)
	other.Decision.Victim.UID = "twin"
	file, text := written(t, r, other)
	var out bytes.Buffer
	err := Replay(&out, file)
	if !errors.Is(err, ErrDifferent) || !strings.Contains(err.Error(), "1 of 2 records") {
		t.Error(err)
	}
	want := "record 2, engine 4, cleave: 1 differences\n  Decision.Victim.UID: recorded \"twin\", now \"greedy\"\n2 decisions made again, 1 otherwise\n"
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Error(diff)
	}

	// Another engine, and a file that is cut off.
	if err := os.WriteFile(file, bytes.Replace(text[:len(text)-9], []byte(`"Engine":4`), []byte(`"Engine":0`), 1), 0o600); err != nil {
		t.Fatal(err)
	}
	out.Reset()
	if err := Replay(&out, file); err != nil || !strings.Contains(out.String(), "is not whole and is left out") || !strings.Contains(out.String(), "1 decisions made again, 0 otherwise; 1 are of another engine than 4") {
		t.Errorf("%v, %s", err, &out)
	}
	out.Reset()
	if err := Explain(&out, file, ""); err != nil || !strings.Contains(out.String(), "shop/greedy goes") {
		t.Errorf("%v, %s", err, &out)
	}
	if err := Explain(&out, file, "nobody"); err == nil || !strings.Contains(err.Error(), `no record with a pod "nobody"`) {
		t.Error(err)
	}
	if err := Replay(&out, filepath.Join(t.TempDir(), "missing")); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

func quantity(t *testing.T, s string) *resource.Quantity {
	t.Helper()
	q, err := resource.ParseQuantity(s)
	if err != nil {
		t.Fatal(err)
	}
	return &q
}

// TestForeseenWithoutAFigure: a record that was written by hand, or cut down.
func TestForeseenWithoutAFigure(t *testing.T) {
	t.Parallel()
	r := full(t, engine.Cleave())
	r.Decision = engine.Decision{Outcome: engine.Foreseen, Threshold: r.Config.Thresholds[0]}
	got := Sentences(r, "")
	if len(got) == 0 || !strings.Contains(got[0], "was falling; soon it would be below 10.0Gi") {
		t.Errorf("%q", got)
	}
	r.Decision.Coming = []engine.Coming{{In: 7 * time.Second}}
	if got := Sentences(r, ""); !strings.Contains(got[0], "was falling; in 7s it would be below 10.0Gi") {
		t.Errorf("%q", got)
	}
}

// TestInodesLessBytes_RANK16: the kubelet subtracts bytes from inodes; what comes
// out is no number of inodes.
func TestInodesLessBytes_RANK16(t *testing.T) {
	t.Parallel()
	thresholds, err := engine.Parse(engine.Settings{Hard: map[string]string{"nodefs.inodesFree": "1000"}})
	if err != nil {
		t.Fatal(err)
	}
	story := func(options engine.Options) string {
		r := record.Record{Decider: "kubelet", Config: engine.Config{Thresholds: thresholds, Options: options}}
		inodes := func(n uint64) []engine.ContainerStats {
			return []engine.ContainerStats{{Name: "c", RootFS: &engine.FSStats{InodesUsed: &n}}}
		}
		r.Input = engine.Input{
			Now: noon, Layout: &engine.Detected{},
			Summary: &engine.Summary{
				NodeFS: &engine.FSStats{Time: noon, InodesFree: ptr(uint64(1)), Inodes: ptr(uint64(9000))},
				Pods:   []engine.PodStats{{UID: "a", Containers: inodes(5000)}, {UID: "b", Containers: inodes(4000)}},
			},
			Pods: []engine.Pod{
				{UID: "a", Name: "a", Containers: []engine.Container{{Name: "c", Requests: engine.Amounts{EphemeralStorage: quantity(t, "10Gi")}}}},
				{UID: "b", Name: "b", Containers: []engine.Container{{Name: "c", Requests: engine.Amounts{EphemeralStorage: quantity(t, "20Gi")}}}},
			},
		}
		r.Next, r.Decision = r.Config.Sync(r.State, r.Input)
		return strings.Join(Sentences(r, ""), "\n")
	}
	got := story(engine.Options{})
	for _, want := range []string{
		"less the bytes that it requests, -10737413240 (RANK-16)", "less the bytes that it requests that is -21474832480, of a -10737413240 (RANK-16)",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
	if strings.Contains(got, "-10737413240 inodes") {
		t.Errorf("bytes are told as inodes:\n%s", got)
	}
	if got := story(engine.Cleave()); strings.Contains(got, "RANK-16") {
		t.Errorf("the profile does without:\n%s", got)
	}
}
