package agent

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/cleave-cri/cleave/agent/ephemeral"
	"github.com/cleave-cri/cleave/agent/peaks"
	"github.com/cleave-cri/cleave/kube"
)

func TestWhatPodsUseOfWhatTheyRequest(t *testing.T) {
	t.Parallel()
	quantity := func(text string) *resource.Quantity { q := resource.MustParse(text); return &q }
	now := time.Now()
	use := func(bytes uint64) *ephemeral.Use { return &ephemeral.Use{Device: "8:1", Bytes: bytes, At: now} }
	held := []ephemeral.Pod{
		{UID: "1", Namespace: "shop", Name: "web-1", Containers: []ephemeral.ContainerUse{
			{Name: "main", Running: true, Layer: use(100), LogFiles: use(10)}, {Name: "main", Layer: use(7)},
		}, Volumes: []ephemeral.VolumeUse{{Name: "data", Counted: true, Use: use(1000)}}},
		{UID: "2", Namespace: "shop", Name: "bare", Containers: []ephemeral.ContainerUse{{Name: "main", Running: true, Layer: use(5)}}},
		{UID: "3", Namespace: "shop", Name: "unmeasured", Containers: []ephemeral.ContainerUse{{Name: "main", Running: true}}},
		{UID: "4", Namespace: "shop", Name: "unknown", Containers: []ephemeral.ContainerUse{{Name: "main", Running: true, Layer: use(5)}}},
	}
	spec := func(uid, name, owner string, c ...kube.Container) *kube.Pod {
		return &kube.Pod{UID: uid, Namespace: "shop", Name: name, Owner: owner, Containers: c}
	}
	view := kube.Merge(kube.Snapshot{Source: "test", AsOf: now, Pods: []*kube.Pod{
		spec("1", "web-1", "ReplicaSet shop/web", kube.Container{Name: "main", Requests: kube.Amounts{EphemeralStorage: quantity("1Ki")}, Limits: kube.Amounts{EphemeralStorage: quantity("2Ki")}}),
		spec("2", "bare", "", kube.Container{Name: "main", Requests: kube.Amounts{Memory: quantity("1Gi")}}),
		spec("3", "unmeasured", ""),
	}})
	request, limit := int64(1024), int64(2048)
	want := []peaks.Use{
		{Workload: "ReplicaSet shop/web", RequestBytes: &request, LimitBytes: &limit, Bytes: 1110, Containers: map[string]uint64{"main": 110}},
		{Workload: "Pod shop/bare", Bytes: 5, Containers: map[string]uint64{"main": 5}},
	}
	if diff := cmp.Diff(want, uses(held, view)); diff != "" {
		t.Error(diff)
	}
}

func TestRequestsForPeople(t *testing.T) {
	t.Parallel()
	const mib = int64(1) << 20
	number := func(n int64) *int64 { return &n }
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	var r Requests
	for _, w := range []peaks.Workload{
		{Name: "ReplicaSet shop/web", Pods: 2, PeakBytes: 300 << 20, Containers: map[string]uint64{"main": 200 << 20, "log": 1 << 20}, FirstSeen: start, LastSeen: start.Add(3 * time.Hour)},
		{Name: "DaemonSet sys/agent", Pods: 1, PeakBytes: 100 << 20, RequestBytes: number(100 * mib), LimitBytes: number(105 * mib), FirstSeen: start, LastSeen: start.Add(50 * time.Hour)},
		{Name: "Pod shop/quiet", PeakBytes: 10, RequestBytes: number(mib), FirstSeen: start, LastSeen: start.Add(30 * time.Second)},
		// A name that an API server takes from anybody's controller, and a clock that was set back a day.
		{Name: "X\x1b[2J shop/odd", PeakBytes: 10, RequestBytes: number(mib), FirstSeen: start, LastSeen: start.Add(-24 * time.Hour)},
	} {
		r = append(r, Request{Workload: w, Suggestion: w.Suggest()})
	}
	var text strings.Builder
	if err := r.WriteText(&text, start); err != nil {
		t.Fatal(err)
	}
	const want = `WORKLOAD             PODS  REQUEST  LIMIT    PEAK     SEEN FOR  SUGGESTION
ReplicaSet shop/web  2     -        -        300.0Mi  3h        request 368.0Mi: without one it is among the first to go
  container log                              1.0Mi
  container main                             200.0Mi
DaemonSet sys/agent  1     100.0Mi  105.0Mi  100.0Mi  2d        request 100.0Mi, limit 208.0Mi: it came near its limit
Pod shop/quiet       0     1.0Mi    -        10       30s       fits
X\x1b[2J shop/odd    0     1.0Mi    -        10       0s        fits
`
	if diff := cmp.Diff(want, text.String()); diff != "" {
		t.Error(diff)
	}
	text.Reset()
	if err := (Requests{}).WriteText(&text, start); err != nil || !strings.Contains(text.String(), "No workload") {
		t.Errorf("%q, %v", text.String(), err)
	}
}
