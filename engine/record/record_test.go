package record

import (
	"bytes"
	"errors"
	"flag"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/garbage"
)

var update = flag.Bool("update", false, "write testdata/pressure.jsonl anew")

var noon = time.Date(2026, time.March, 1, 12, 0, 0, 0, time.UTC)

func ptr[T any](v T) *T { return &v }

// pressure is a node of two pods on a full disk; its images are looked at, and
// after they are gone a pod has to go.
func pressure(t testing.TB) Record {
	t.Helper()
	thresholds, err := engine.Parse(engine.Settings{
		Hard: map[string]string{"nodefs.available": "10%"}, Soft: map[string]string{"imagefs.available": "20Gi"},
		SoftGrace: map[string]string{"imagefs.available": "1m"}, MinReclaim: map[string]string{"nodefs.available": "1Gi"},
	})
	if err != nil {
		t.Fatal(err)
	}
	const gib = 1 << 30
	disk := func(available uint64) *engine.FSStats {
		return &engine.FSStats{Time: noon, AvailableBytes: ptr(available), CapacityBytes: ptr(uint64(100 * gib)), InodesFree: ptr(uint64(1000)), Inodes: ptr(uint64(6000))}
	}
	usage := func(uid string, used uint64) engine.PodStats {
		return engine.PodStats{UID: uid, Containers: []engine.ContainerStats{{Name: "app", RootFS: &engine.FSStats{UsedBytes: ptr(used)}}}}
	}
	r := Record{
		Decider: "cleave",
		Config:  engine.Config{Thresholds: thresholds, TransitionPeriod: 5 * time.Minute, LimitIsolation: true, Options: engine.Cleave()},
		Input: engine.Input{
			Now: noon, Layout: &engine.Detected{},
			Pods:    []engine.Pod{{UID: "1", Name: "small", Namespace: "shop"}, {UID: "2", Name: "large", Namespace: "shop", Owner: "ReplicaSet shop/large"}},
			Summary: &engine.Summary{NodeFS: disk(6 * gib), ImageFS: disk(6 * gib), ContainerFS: disk(6 * gib), Pods: []engine.PodStats{usage("1", gib), usage("2", 30*gib)}},
		},
		After: &engine.Summary{NodeFS: disk(7 * gib), ImageFS: disk(7 * gib), ContainerFS: disk(7 * gib)},
	}
	r.Next, r.Decision = r.Config.Sync(r.State, r.Input)
	if r.Decision.Victim == nil || r.Decision.Victim.UID != "2" {
		t.Fatalf("%+v", r.Decision)
	}
	images := ImageChoice{
		Policy: garbage.ImagePolicy{HighPercent: 85, LowPercent: 80, MinAge: 2 * time.Minute, Options: garbage.Cleave()},
		Known: garbage.Images{
			"old": {ID: "old", FirstSeen: noon.Add(-time.Hour), SizeBytes: gib}, "used": {ID: "used", FirstSeen: noon.Add(-time.Hour), LastUsed: noon},
		},
		InUse:     map[string]bool{"used": true},
		Layers:    map[string][]garbage.Layer{"old": {{ID: "base", Bytes: gib}, {ID: "old", Bytes: gib}}, "used": {{ID: "base", Bytes: gib}}},
		NeedBytes: *r.Decision.NeedBytes, Began: noon,
	}
	containers := ContainerChoice{
		Policy: garbage.ContainerPolicy{PerContainer: 1, Total: -1, NoneUnderPressure: true}, Now: noon, Pressure: true,
		Containers: []garbage.Container{{ID: "dead", PodUID: "1", Name: "app", State: garbage.Exited, CreatedAt: noon.Add(-time.Hour)}},
		Pods:       garbage.Pods{Fate: map[string]garbage.PodFate{"1": garbage.Alive}, SourcesReady: true, Synced: true}, Bytes: map[string]int64{"dead": 4096},
	}
	logs := LogChoice{Gone: []garbage.LogFile{{Path: "gone", Bytes: 5}}, Rotated: []garbage.LogFile{{Path: "0.log.1", Bytes: 7, WrittenAt: noon}}, NeedBytes: 6}
	r.Steps = []Step{
		{Kind: engine.DeadContainers, Containers: &containers, Items: containers.Items()},
		{Kind: engine.OldLogs, Logs: &logs, Items: logs.Items()},
		{Kind: engine.UnusedImages, Images: &images, Items: images.Items()},
	}
	r.Steps[0].Items[0].ActualBytes = ptr(int64(4096))
	r.Steps[2].Items[0].Error = "read-only file system"
	r.Verdict = &Verdict{}
	r.Verdict.Resolved, r.Verdict.Still = r.Config.Resolved(r.Next, r.Decision, r.After)
	r.Evicted = []Evicted{{UID: "2", At: noon, ExpectedBytes: ptr(int64(30 * gib)), ActualBytes: ptr(int64(29 * gib))}}
	return r
}

func encoded(t testing.TB, records ...Record) []byte {
	t.Helper()
	var out []byte
	for _, r := range records {
		var err error
		if out, err = Append(out, r); err != nil {
			t.Fatal(err)
		}
	}
	return out
}

// TestGolden keeps the format: a change of it needs another number, or records
// of yesterday can't be read.
func TestGolden(t *testing.T) {
	t.Parallel()
	const file = "testdata/pressure.jsonl"
	got := encoded(t, pressure(t))
	if *update {
		if err := os.WriteFile(file, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(want, got) {
		t.Errorf("the format, or the decision, is another one than in %s:\n%s", file, cmp.Diff(string(want), string(got)))
	}
}

// TestReadBackIsTheSame is that writing again what was read changes nothing.
func TestReadBackIsTheSame(t *testing.T) {
	t.Parallel()
	first := encoded(t, pressure(t), Record{Decider: "kubelet"})
	reader := NewReader(bytes.NewReader(first))
	var again []byte
	for {
		r, err := reader.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if r.Format != Format || r.Engine != engine.Version {
			t.Errorf("format %d, engine %d", r.Format, r.Engine)
		}
		again = append(again, encoded(t, r)...)
	}
	if diff := cmp.Diff(string(first), string(again)); diff != "" {
		t.Error(diff)
	}
	if reader.Line() != 3 { // the end was looked for there
		t.Errorf("line %d", reader.Line())
	}
}

func TestWhatIsRefused(t *testing.T) {
	t.Parallel()
	good := string(encoded(t, Record{Decider: "kubelet"}))
	for _, tc := range []struct {
		name, text, want string
		is               error
	}{
		{"another format", `{"Format":2,"Engine":1}` + "\n", "line 1: unknown format 2, this cleave reads 1", ErrFormat},
		{"no format", `{"Engine":1}` + "\n", "no Format and Engine", ErrFormat},
		{"an unknown key", strings.Replace(good, `"Decider"`, `"Who":1,"Decider"`, 1), `unknown field "Who"`, nil},
		{"an unknown key of a later engine", `{"Format":1,"Engine":99,"Later":true}` + "\n", `engine 99 wrote "Later", which engine 4 does not know`, nil},
		{"another kind of value", strings.Replace(good, `"kubelet"`, `7`, 1), "not a record", nil},
		{"no JSON", "disk full\n", "not a record", nil},
		{"an amount without end", `{"Format":1,"Engine":1,"Decision":{"Victim":{"Limit":"1e-100000000"}}}` + "\n", `"1e-100000000" is no amount`, nil},
		{"a huge amount", `{"Format":1,"Engine":1,"Decision":{"Victim":{"Limit":"9e999999999"}}}` + "\n", `"9e999999999" is no amount`, nil},
		{"a huge amount with blanks", `{"Format":1,"Engine":1,"Decision":{"Victim":{"Limit": " 9E+999999999 "}}}` + "\n", `"9E+999999999" is no amount`, nil},
		{"a huge amount without quotes", `{"Format":1,"Engine":1,"Decision":{"Victim":{"Limit":9e999999999}}}` + "\n", `"9e999999999" is no amount`, nil},
		{"a huge amount in disguise", `{"Format":1,"Engine":1,"Decision":{"Victim":{"Limit":"\u0039e999999999"}}}` + "\n", `"9e999999999" is no amount`, nil},
		{"a huge threshold", `{"Format":1,"Engine":1,"Config":{"Thresholds":[{"Signal":"nodefs.available","Value":"1E99999999999"}]}}` + "\n", `"1E99999999999" is no amount`, nil},
		{"an escaped huge threshold", `{"Format":1,"Engine":1,"Config":{"Thresholds":[{"Signal":"nodefs.available","Value":"1\u004599999999999"}]}}` + "\n", `"1E99999999999" is no amount`, nil},
		{"an empty line", "\n" + good, "line 1: not a record", nil},
		{"two on a line", strings.TrimSpace(good) + good, "not a record", nil},
		{"cut off", good + good[:len(good)-5], "line 2: the file ends within a record", ErrTruncated},
		{"cut off at the line break", strings.TrimSpace(good), "ends within", ErrTruncated},
		{"too long", `{"Format":1,"Engine":1,"Decider":"` + strings.Repeat("x", MaxBytes) + "\"}\n", "longer than 16 MiB", ErrTooLarge},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			reader := NewReader(strings.NewReader(tc.text))
			var err error
			for err == nil {
				_, err = reader.Next()
			}
			if !strings.Contains(err.Error(), tc.want) || tc.is != nil && !errors.Is(err, tc.is) {
				t.Errorf("%v, want %s", err, tc.want)
			}
			if _, again := reader.Next(); !errors.Is(again, err) {
				t.Errorf("then %v", again)
			}
		})
	}
	if _, err := Append(nil, Record{Decider: strings.Repeat("x", MaxBytes)}); !errors.Is(err, ErrTooLarge) {
		t.Errorf("written all the same: %v", err)
	}
}

// The digits of an image's id, after its colon too, are no amount.
func TestAnImageWhoseIDHasAnExponent(t *testing.T) {
	t.Parallel()
	const id = "sha256:9e29325aa0000000000000000000000000000000000000000000000000000000"
	r := Record{Decider: "cleave", Steps: []Step{{Kind: engine.UnusedImages, Images: &ImageChoice{
		Known: garbage.Images{id: {ID: id}, "9e99999": {ID: "9e99999"}}, InUse: map[string]bool{id: true}, Kept: map[string]string{id: `named by "x:9e99999"`},
	}, Items: []Item{{ID: "9e99999", Error: `"9e99999"`}}}}}
	line, err := Append(nil, r)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := NewReader(bytes.NewReader(line)).Next(); err != nil {
		t.Error(err)
	}
}

// A choice of containers picks sandboxes that will have none any more (CGC-9).
func TestChoiceOfSandboxes(t *testing.T) {
	t.Parallel()
	c := ContainerChoice{
		Policy:     garbage.ContainerPolicy{PerContainer: 1, Total: -1},
		Containers: []garbage.Container{{ID: "dead", PodUID: "gone", Name: "app", SandboxID: "box", State: garbage.Exited}, {ID: "runs", PodUID: "alive", SandboxID: "other", State: garbage.Running}},
		Sandboxes:  []garbage.Sandbox{{ID: "box", PodUID: "gone"}, {ID: "other", PodUID: "alive", Ready: true}},
		Pods:       garbage.Pods{Fate: map[string]garbage.PodFate{"gone": garbage.Gone, "alive": garbage.Alive}, SourcesReady: true, Synced: true},
		Bytes:      map[string]int64{"box": 7},
	}
	seven := int64(7)
	if diff := cmp.Diff([]Item{{ID: "dead", Rule: "CGC-4"}, {ID: "box", Rule: "CGC-9", ExpectedBytes: &seven}}, c.Items()); diff != "" {
		t.Errorf("picked (-want +got):\n%s", diff)
	}
	c.Pods.SourcesReady = false
	if got := c.Items(); len(got) > 0 {
		t.Errorf("while its container stays: %+v", got)
	}
}

// TestAPodCalledLikeAnAmount: a name is no amount, and two of them are compared
// as names.
func TestAPodCalledLikeAnAmount(t *testing.T) {
	t.Parallel()
	r := Record{Decider: "kubelet", Input: engine.Input{Pods: []engine.Pod{{UID: "9e999999999", Name: "1e-100000000"}}}}
	r.Decision.Victim = &engine.Eviction{UID: "9e999999999"}
	got, err := NewReader(strings.NewReader(string(encoded(t, r)))).Next()
	if err != nil || got.Input.Pods[0].Name != "1e-100000000" {
		t.Fatalf("%v, %+v", err, got.Input.Pods)
	}
	other := got
	other.Decision.Victim = &engine.Eviction{UID: "9e999999998"}
	differences, err := compare(got, other)
	if err != nil || len(differences) != 1 || differences[0].Path != "Decision.Victim.UID" {
		t.Errorf("%v, %v", err, differences)
	}
}

func TestReplay(t *testing.T) {
	t.Parallel()
	read, err := NewReader(bytes.NewReader(encoded(t, pressure(t)))).Next()
	if err != nil {
		t.Fatal(err)
	}
	differences, err := Replay(read)
	if err != nil || len(differences) > 0 {
		t.Errorf("the same engine decides otherwise: %v, %v", differences, err)
	}

	// As if another engine had written it.
	read.Decision.Victim.UID = "1"
	read.Decision.Due = read.Decision.Due[:1]
	read.Steps[2].Items = append(read.Steps[2].Items, Item{ID: "young", Rule: "IGC-17"})
	read.Verdict.Resolved = true
	if differences, err = Replay(read); err != nil {
		t.Fatal(err)
	}
	var paths []string
	for _, d := range differences {
		paths = append(paths, d.Path)
	}
	want := []string{"Decision.Due[1]", "Decision.Victim.UID", "Steps[2][1]", "Verdict.Resolved"}
	if diff := cmp.Diff(want, paths); diff != "" {
		t.Error(diff)
	}
	if s := differences[1].String(); s != `Decision.Victim.UID: recorded "1", now "2"` {
		t.Error(s)
	}
}

func FuzzReader(f *testing.F) {
	good := encoded(f, pressure(f))
	f.Add(good)
	f.Add(good[:len(good)/2])
	f.Add([]byte(`{"Format":1,"Engine":1,"State":{"Layout":{}},"Config":{"LimitIsolation":true},"Input":{"Summary":{}}}` + "\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		reader := NewReader(bytes.NewReader(data))
		for {
			r, err := reader.Next()
			if err != nil {
				return
			}
			// What can be read can be decided again, and then holds.
			again := Again(r)
			line, err := Append(nil, again)
			if err != nil {
				continue // a time beyond the year 9999
			}
			back, err := NewReader(bytes.NewReader(line)).Next()
			if err != nil {
				t.Fatalf("what was written can't be read: %v", err)
			}
			if _, err := Replay(back); err != nil {
				t.Fatal(err)
			}
		}
	})
}
