package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/resource"
)

func quantity(text string) *resource.Quantity {
	q := resource.MustParse(text)
	return &q
}

// decode reads one pod as all sources do.
func decode(t testing.TB, text string) (*Pod, error) {
	t.Helper()
	var w wirePod
	if err := json.Unmarshal([]byte(text), &w); err != nil {
		t.Fatal(err)
	}
	return w.pod()
}

var sameQuantity = cmp.Comparer(func(a, b resource.Quantity) bool { return a.Cmp(b) == 0 })

func TestPodIsReadWhole(t *testing.T) {
	t.Parallel()
	got, err := decode(t, `{"apiVersion":"v1","kind":"Pod",
"metadata":{"name":"web-1","namespace":"shop","uid":"u1","resourceVersion":"7","deletionTimestamp":"2026-01-01T00:00:00Z",
  "annotations":{"other":"x"},"managedFields":[{"manager":"m","fieldsV1":{"f:spec":{}}}],
  "ownerReferences":[{"apiVersion":"v1","kind":"Thing","name":"no","uid":"1"},{"apiVersion":"apps/v1","kind":"ReplicaSet","name":"web","uid":"2","controller":true}]},
"spec":{"nodeName":"n","priority":-5,"terminationGracePeriodSeconds":30,
  "overhead":{"memory":"10Mi","ephemeral-storage":"1Mi"},
  "resources":{"requests":{"memory":"64Mi"},"limits":{"cpu":"1"}},
  "tolerations":[{"key":"node.kubernetes.io/disk-pressure","operator":"Exists","effect":"NoSchedule"}],
  "initContainers":[{"name":"first","resources":{"requests":{"ephemeral-storage":"4Gi"}}},
    {"name":"side","restartPolicy":"Always","resources":{"requests":{"ephemeral-storage":"512Mi"}}}],
  "containers":[{"name":"main","env":[{"name":"A","value":"B"}],"resources":{"requests":{"ephemeral-storage":"1Gi","memory":"32Mi"},"limits":{"ephemeral-storage":"0"}}}],
  "volumes":[{"name":"d","emptyDir":{"sizeLimit":"1Gi"}},{"name":"m","emptyDir":{"medium":"Memory"}},{"name":"c","configMap":{"name":"x"}},
    {"name":"h","hostPath":{"path":"/"}},{"name":"g","gitRepo":{"repository":"x"}},{"name":"s","secret":{"secretName":"x"}}]},
"status":{"phase":"Running","qosClass":"Burstable","containerStatuses":[{"name":"main","allocatedResources":{"memory":"48Mi"}}]}}`)
	if err != nil {
		t.Fatal(err)
	}
	priority, grace := int32(-5), int64(30)
	want := &Pod{
		UID: "u1", APIUID: "u1", Namespace: "shop", Name: "web-1", Owner: "ReplicaSet shop/web", Priority: &priority, GraceSeconds: &grace,
		InitContainers: []Container{
			{Name: "first", Requests: Amounts{EphemeralStorage: quantity("4Gi")}},
			{Name: "side", Sidecar: true, Requests: Amounts{EphemeralStorage: quantity("512Mi")}},
		},
		// What the kubelet has allocated counts, not what somebody would like by now.
		Containers: []Container{{Name: "main", Requests: Amounts{EphemeralStorage: quantity("1Gi"), Memory: quantity("48Mi")}, Limits: Amounts{EphemeralStorage: quantity("0")}}},
		Overhead:   Amounts{EphemeralStorage: quantity("1Mi"), Memory: quantity("10Mi")},
		PodLevel:   true, PodLevelMemory: quantity("64Mi"),
		Volumes: []Volume{
			{Name: "d", Kind: EmptyDirDisk, SizeLimit: quantity("1Gi")}, {Name: "m", Kind: EmptyDirMemory}, {Name: "c", Kind: ConfigMap},
			{Name: "h", Kind: HostPath}, {Name: "g", Kind: GitRepo}, {Name: "s", Kind: OtherVolume},
		},
		QoS: "Burstable", Phase: "Running", Terminating: true, ToleratesDiskPressure: true,
	}
	if diff := cmp.Diff(want, got, sameQuantity); diff != "" {
		t.Errorf("pod (-want +got):\n%s", diff)
	}
}

// TestProtectedPods: whoever the kubelet never evicts says so, by whichever of its marks.
func TestProtectedPods(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ name, annotations, spec, uid, apiUID, protected string }{
		{"a usual pod", `{}`, `"priority":1999999999`, "u", "u", ""},
		{"of the kubelet's API source", `{"kubernetes.io/config.source":"api"}`, `"priority":0`, "u", "u", ""},
		{"system-critical", `{}`, `"priority":2000000000`, "u", "u", "its priority is system-critical"},
		{"of a critical class, not admitted yet", `{}`, `"priorityClassName":"system-node-critical"`, "u", "u", "its priority is system-critical"},
		{"static, of the kubelet", `{"kubernetes.io/config.source":"file","kubernetes.io/config.hash":"u"}`, `"priority":0`, "u", "", "it is a static pod"},
		{"from a page", `{"kubernetes.io/config.source":"http"}`, `"priority":0`, "u", "", "it is a static pod"},
		{"a mirror", `{"kubernetes.io/config.mirror":"hash","kubernetes.io/config.source":"file"}`, `"priority":0`, "hash", "u", "it is a static pod"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			p, err := decode(t, fmt.Sprintf(`{"metadata":{"name":"p","namespace":"n","uid":"u","annotations":%s},"spec":{"containers":[{"name":"c"}],%s}}`, tc.annotations, tc.spec))
			if err != nil {
				t.Fatal(err)
			}
			if p.UID != tc.uid || p.APIUID != tc.apiUID || p.Protected() != tc.protected {
				t.Errorf("UID %q, at the API server %q, protected: %q; want %q, %q, %q", p.UID, p.APIUID, p.Protected(), tc.uid, tc.apiUID, tc.protected)
			}
		})
	}
}

// TestAbsurdAmounts: what is no amount is not 0 but a fault, at once, and hides nothing else.
func TestAbsurdAmounts(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		text string
		want *resource.Quantity
	}{
		{`"1Gi"`, quantity("1Gi")},
		{`1073741824`, quantity("1Gi")},
		{`"0"`, quantity("0")},
		{`"9E"`, quantity("9E")},
		{`"1e3"`, quantity("1e3")},
		{`"1e999999999"`, nil},
		{`"1e-100000000"`, nil},
		{`"-1Gi"`, nil},
		{`"much"`, nil},
		{`"` + strings.Repeat("9", 5000) + `"`, nil},
		{`true`, nil},
		{`{"a":1}`, nil},
	} {
		t.Run(tc.text[:min(20, len(tc.text))], func(t *testing.T) {
			t.Parallel()
			p, err := decode(t, `{"metadata":{"name":"p","namespace":"n","uid":"u"},"spec":{"containers":[{"name":"c","resources":{"requests":{"ephemeral-storage":`+tc.text+`,"memory":"1Mi"}}}]}}`)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, p.Containers[0].Requests.EphemeralStorage, sameQuantity); diff != "" {
				t.Errorf("request (-want +got):\n%s", diff)
			}
			if (tc.want == nil) != (len(p.Faults) == 1) {
				t.Errorf("faults %q", p.Faults)
			}
			if p.Containers[0].Requests.Memory == nil {
				t.Error("the amount beside it is lost")
			}
		})
	}
}

// TestPodsWithoutNames: nobody could know which pod is meant, and so nobody is told about it.
func TestPodsWithoutNames(t *testing.T) {
	t.Parallel()
	for _, meta := range []string{`{"name":"p","namespace":"n"}`, `{"name":"p","uid":"u"}`, `{"namespace":"n","uid":"u"}`, `{}`} {
		if p, err := decode(t, `{"metadata":`+meta+`,"spec":{"containers":[{"name":"c"}]}}`); err == nil {
			t.Errorf("%s is taken for %+v", meta, p)
		}
	}
}

// FuzzPods: whatever a source answers is an error or pods, soon and without a panic.
func FuzzPods(f *testing.F) {
	f.Add(`{"kind":"PodList","items":[{"metadata":{"name":"p","namespace":"n","uid":"u"},"spec":{"containers":[{"name":"c","resources":{"requests":{"memory":"1e9"}}}]}}]}`)
	f.Add(`{"kind":"PodList","items":null}`)
	f.Add(`{"kind":"PodList","items":[{"spec":{"volumes":[{"emptyDir":{"sizeLimit":1e400}}]}}]}`)
	f.Fuzz(func(t *testing.T, text string) {
		pods, err := readPods([]byte(text))
		if err != nil && len(pods) > 0 && pods[0].Metadata.Name == "impossible" {
			t.Error("pods beside an error")
		}
		for i := range pods {
			p, err := pods[i].pod()
			if err == nil && (p.UID == "" || p.Name == "" || p.Namespace == "") {
				t.Errorf("%+v has no name", p)
			}
		}
	})
}

func TestMerge(t *testing.T) {
	t.Parallel()
	begin := time.Unix(1000, 0)
	at := func(seconds int) time.Time { return begin.Add(time.Duration(seconds) * time.Second) }
	critical, low := SystemCritical, int32(1)
	pod := func(uid, name string, change ...func(*Pod)) *Pod {
		p := &Pod{UID: uid, APIUID: uid, Namespace: "n", Name: name, Priority: &low}
		for _, c := range change {
			c(p)
		}
		return p
	}
	static := func(p *Pod) { p.Static = true }
	api := Snapshot{Source: SourceAPIServer, AsOf: at(10), Pods: []*Pod{
		pod("a", "a"), pod("old", "same"),
		pod("b", "b", func(p *Pod) { p.Priority = &critical }),
	}}
	kubelet := Snapshot{Source: SourceKubelet, AsOf: at(20), Problem: "left out: one", Pods: []*Pod{
		pod("b", "b"), pod("new", "same"), pod("s", "etcd-n", static),
	}}
	files := Snapshot{Source: SourceManifests, AsOf: at(20), Static: []string{"n/a"}}
	silent := Snapshot{Source: "silent", Pods: []*Pod{pod("x", "x")}}

	v := Merge(api, kubelet, files, silent)
	known := func(uid, name string) string {
		k, ok := v.Pod(uid, "n", name)
		if !ok {
			return "not known"
		}
		return fmt.Sprintf("%s, %s old: %s", k.Source, k.Age(at(25)), k.Pod.Protected())
	}
	for _, tc := range []struct{ what, uid, name, want string }{
		{"what the API server alone knows is as old as that, and a file of the name protects it", "a", "a", "API server, 15s old: it is a static pod"},
		{"of two the newer counts, but the protection of either", "b", "b", "kubelet, 5s old: its priority is system-critical"},
		{"two pods of one name are two", "old", "same", "API server, 15s old: "},
		{"the successor too", "new", "same", "kubelet, 5s old: "},
		{"a static pod of the kubelet", "s", "etcd-n", "kubelet, 5s old: it is a static pod"},
		{"what a source without an answer holds is not known", "x", "x", "not known"},
		{"a UID with another name is not known", "a", "b", "not known"},
		{"nor is one that nobody has", "z", "a", "not known"},
	} {
		if got := known(tc.uid, tc.name); got != tc.want {
			t.Errorf("%s: got %q, want %q", tc.what, got, tc.want)
		}
	}
	if len(v.All()) != 5 || !v.StaticName("n", "a") || v.StaticName("n", "b") {
		t.Errorf("all: %+v", v.All())
	}
	var states []string
	for _, s := range v.Sources {
		states = append(states, fmt.Sprintf("%s %d %s", s.Name, s.Pods, s.Problem))
	}
	want := []string{"API server 3 ", "kubelet 3 left out: one", "static pods 1 ", "silent 1 it has not answered yet"}
	if diff := cmp.Diff(want, states); diff != "" {
		t.Errorf("sources (-want +got):\n%s", diff)
	}
	if k, _ := v.Pod("b", "n", "b"); k.Age(at(0)) != 0 {
		t.Errorf("a clock that went back makes an age of %s", k.Age(at(0)))
	}
}

// TestMergeKeepsWhatItIsGiven: sources hand out their own pods.
func TestMergeKeepsWhatItIsGiven(t *testing.T) {
	t.Parallel()
	plain := &Pod{UID: "a", Namespace: "n", Name: "a"}
	Merge(Snapshot{AsOf: time.Unix(1, 0), Pods: []*Pod{plain}}, Snapshot{AsOf: time.Unix(2, 0), Pods: []*Pod{{UID: "a", Namespace: "n", Name: "a", Static: true}}})
	if plain.Static || plain.APIUID != "" {
		t.Errorf("a source's pod was changed: %+v", plain)
	}
}

func TestStaticPods(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("etcd.yaml", "apiVersion: v1\nkind: Pod\nmetadata:\n  name: etcd\n  namespace: kube-system\n")
	write("json", `{"kind":"Pod","metadata":{"name":"plain"}}`)
	write(".hidden.yaml", "kind: Pod\nmetadata: {name: hidden}\n")
	if err := os.Mkdir(filepath.Join(dir, "folder"), 0o700); err != nil {
		t.Fatal(err)
	}
	m := NewManifests(dir, "Node-1", time.Second)
	m.read()
	names := func() []string {
		s := m.Pods()
		slices.Sort(s.Static)
		return s.Static
	}
	want := []string{"default/plain-node-1", "kube-system/etcd-node-1"}
	if diff := cmp.Diff(want, names()); diff != "" || m.Pods().Problem != "" {
		t.Errorf("static pods (-want +got):\n%s%s", diff, m.Pods().Problem)
	}
	// A file that somebody is writing makes nobody less protected.
	write("etcd.yaml", "kind: [")
	m.read()
	if diff := cmp.Diff(want, names()); diff != "" || !strings.Contains(m.Pods().Problem, "etcd.yaml") {
		t.Errorf("static pods beside a broken file (-want +got):\n%s%s", diff, m.Pods().Problem)
	}
	missing := NewManifests(filepath.Join(dir, "missing"), "n", time.Second)
	missing.read()
	if s := missing.Pods(); s.AsOf.IsZero() || len(s.Static) > 0 || s.Problem != "" {
		t.Errorf("without a folder: %+v", s)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := m.Run(ctx); err == nil {
		t.Error("Run went on after its context")
	}
}
