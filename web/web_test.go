package web

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

func page(t *testing.T, v Values) string {
	t.Helper()
	handler, err := Metrics(func() Values { return v })
	if err != nil {
		t.Fatal(err)
	}
	answer := httptest.NewRecorder()
	handler.ServeHTTP(answer, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", nil))
	if answer.Code != http.StatusOK {
		t.Fatalf("answers %d: %s", answer.Code, answer.Body)
	}
	var lines []string
	for line := range strings.Lines(answer.Body.String()) {
		if !strings.HasPrefix(line, "#") {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	return strings.Join(lines, "\n")
}

// leftOut is what is always there.
const leftOut = `cleave_series_left_out{kind="container"} 0
cleave_series_left_out{kind="image"} 0
cleave_series_left_out{kind="pod"} 0`

func TestMetrics(t *testing.T) {
	t.Parallel()
	right, wrong := true, false
	for _, tc := range []struct {
		name string
		v    Values
		want string
	}{
		{"another mode", Values{Version: "v1"}, "cleave_build_info{version=\"v1\"} 1\n" + leftOut},
		{"split and right", Values{Version: "v1", Kubelet: &Kubelet{Split: true, SummaryRight: &right}}, `cleave_build_info{version="v1"} 1
cleave_kubelet_problems 0
cleave_kubelet_summary_right 1
cleave_kubelet_told_split 1
cleave_kubelet_unmeasured_containers 0
` + leftOut},
		{"wrong", Values{Version: "v1", Kubelet: &Kubelet{Problems: 2, SummaryRight: &wrong, Unmeasured: 3}}, `cleave_build_info{version="v1"} 1
cleave_kubelet_problems 2
cleave_kubelet_summary_right 0
cleave_kubelet_told_split 0
cleave_kubelet_unmeasured_containers 3
` + leftOut},
		{"not known", Values{Version: "v1", Kubelet: &Kubelet{Split: true}}, `cleave_build_info{version="v1"} 1
cleave_kubelet_problems 0
cleave_kubelet_told_split 1
cleave_kubelet_unmeasured_containers 0
` + leftOut},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			if diff := cmp.Diff(tc.want, page(t, tc.v)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func ptr[T any](v T) *T { return &v }

// full has something of everything.
func full() Values {
	return Values{
		Version: "v1", HeapBytes: ptr(uint64(5)),
		Kubelet: &Kubelet{SummaryRight: ptr(true)},
		Filesystems: []Filesystem{
			{
				Role: "nodefs", Device: "8:1", Mountpoint: "/", CapacityBytes: 100, AvailableBytes: 40, UsedBytes: 55, ReservedBytes: 5, Inodes: ptr(uint64(10)), InodesFree: ptr(uint64(4)),
				Classes: []Class{{"pods' logs", 7, 2}}, UnattributedBytes: ptr(int64(-3)), OpenDeletedBytes: ptr(uint64(6)), Unmeasured: 1, OldestSeconds: ptr(2.5),
			},
			{Role: "imagefs", Device: "8:2", Mountpoint: "/odd\xff", CapacityBytes: 100, Stuck: true},
		},
		Containers: []Container{{"default", "web", "u1", "app", ptr(uint64(8)), ptr(uint64(9)), nil}, {"default", "web", "u1", "new", nil, nil, ptr(uint64(1))}},
		Pods:       []Pod{{"default", "web", "u1", 17, ptr(uint64(3)), ptr(uint64(9)), nil}, {"default", "web", "u2", 17, nil, nil, ptr(uint64(4))}},
		Images:     []Image{{"registry.example/app:1", 1000}},
		Proxy: &Proxy{
			InFlight: 1, Connections: 2, Bounds: []float64{0.1, 1},
			Methods:   []Method{{"Version", map[string]int64{"OK": 3, "none": 1}, 1.5, []int64{2, 3, 4}}, {"GetContainerEvents", map[string]int64{"none": 1}, 0, nil}},
			Fallbacks: []Fallback{{"ListContainers", "slow", 2}},
		},
		Reclaim: &Reclaim{
			Decisions: map[string]int64{"calm": 10, "pressure": 1}, Deletions: []Deletion{{"images", "GAP-25", 2, 1, 100, 90}},
			Evictions: map[string]int64{"nodefs.available": 1}, EvictionsFailed: 0, Forecast: map[string]float64{"imagefs.available": 30}, Records: map[string]uint64{"written": 2, "dropped": 0, "failed": 0},
		},
		Survey: &Survey{Entries: map[string]int64{"first": 100, "refresh": 5}, Seconds: ptr(0.5), AgeSeconds: ptr(3.0)},
	}
}

func TestAllMetrics(t *testing.T) {
	t.Parallel()
	want := `cleave_build_info{version="v1"} 1
cleave_container_logs_bytes{container="app",namespace="default",pod="web",uid="u1"} 9
cleave_container_open_deleted_bytes{container="new",namespace="default",pod="web",uid="u1"} 1
cleave_container_rootfs_bytes{container="app",namespace="default",pod="web",uid="u1"} 8
cleave_decider_blind 0
cleave_decisions_total{outcome="calm"} 10
cleave_decisions_total{outcome="pressure"} 1
cleave_deletion_expected_bytes_total{kind="images",rule="GAP-25"} 100
cleave_deletion_gained_bytes_total{kind="images",rule="GAP-25"} 90
cleave_deletions_failed_total{kind="images",rule="GAP-25"} 1
cleave_deletions_total{kind="images",rule="GAP-25"} 2
cleave_evictions_failed_total 0
cleave_evictions_total{reason="nodefs.available"} 1
cleave_filesystem_available_bytes{device="8:1",mountpoint="/",role="nodefs"} 40
cleave_filesystem_available_bytes{device="8:2",mountpoint="/odd�",role="imagefs"} 0
cleave_filesystem_capacity_bytes{device="8:1",mountpoint="/",role="nodefs"} 100
cleave_filesystem_capacity_bytes{device="8:2",mountpoint="/odd�",role="imagefs"} 100
cleave_filesystem_class_used_bytes{class="pods' logs",device="8:1",role="nodefs"} 7
cleave_filesystem_class_used_inodes{class="pods' logs",device="8:1",role="nodefs"} 2
cleave_filesystem_figures_age_seconds{device="8:1",mountpoint="/",role="nodefs"} 2.5
cleave_filesystem_inodes{device="8:1",mountpoint="/",role="nodefs"} 10
cleave_filesystem_inodes_free{device="8:1",mountpoint="/",role="nodefs"} 4
cleave_filesystem_open_deleted_bytes{device="8:1",mountpoint="/",role="nodefs"} 6
cleave_filesystem_reserved_bytes{device="8:1",mountpoint="/",role="nodefs"} 5
cleave_filesystem_reserved_bytes{device="8:2",mountpoint="/odd�",role="imagefs"} 0
cleave_filesystem_stuck{device="8:1",mountpoint="/",role="nodefs"} 0
cleave_filesystem_stuck{device="8:2",mountpoint="/odd�",role="imagefs"} 1
cleave_filesystem_unattributed_bytes{device="8:1",mountpoint="/",role="nodefs"} -3
cleave_filesystem_unmeasured{device="8:1",mountpoint="/",role="nodefs"} 1
cleave_filesystem_unmeasured{device="8:2",mountpoint="/odd�",role="imagefs"} 0
cleave_filesystem_used_bytes{device="8:1",mountpoint="/",role="nodefs"} 55
cleave_filesystem_used_bytes{device="8:2",mountpoint="/odd�",role="imagefs"} 0
cleave_forecast_seconds{signal="imagefs.available"} 30
cleave_heap_bytes 5
cleave_image_exclusive_bytes{image="registry.example/app:1"} 1000
cleave_kubelet_problems 0
cleave_kubelet_summary_right 1
cleave_kubelet_told_split 0
cleave_kubelet_unmeasured_containers 0
cleave_pod_empty_dir_bytes{namespace="default",pod="web",uid="u1"} 3
cleave_pod_held_bytes{namespace="default",pod="web",uid="u1"} 17
cleave_pod_held_bytes{namespace="default",pod="web",uid="u2"} 17
cleave_pod_kubelet_bytes{namespace="default",pod="web",uid="u2"} 4
cleave_pod_logs_bytes{namespace="default",pod="web",uid="u1"} 9
cleave_proxy_call_duration_seconds_bucket{method="Version",le="0.1"} 2
cleave_proxy_call_duration_seconds_bucket{method="Version",le="1"} 3
cleave_proxy_call_duration_seconds_bucket{method="Version",le="+Inf"} 4
cleave_proxy_call_duration_seconds_sum{method="Version"} 1.5
cleave_proxy_call_duration_seconds_count{method="Version"} 4
cleave_proxy_calls_in_flight 1
cleave_proxy_calls_total{code="OK",method="Version"} 3
cleave_proxy_calls_total{code="none",method="GetContainerEvents"} 1
cleave_proxy_calls_total{code="none",method="Version"} 1
cleave_proxy_connections 2
cleave_proxy_fallbacks_total{method="ListContainers",reason="slow"} 2
cleave_records_total{result="dropped"} 0
cleave_records_total{result="failed"} 0
cleave_records_total{result="written"} 2
cleave_series_left_out{kind="container"} 0
cleave_series_left_out{kind="image"} 0
cleave_series_left_out{kind="pod"} 0
cleave_survey_age_seconds 3
cleave_survey_seconds 0.5
cleave_walk_entries_total{reason="first"} 100
cleave_walk_entries_total{reason="refresh"} 5`
	if diff := cmp.Diff(want, page(t, full())); diff != "" {
		t.Error(diff)
	}
}

// The smallest are left out where there are too many, and how many is told.
func TestSeriesAreCapped(t *testing.T) {
	t.Parallel()
	v := Values{}
	for i := range MaxContainers + 5 {
		v.Containers = append(v.Containers, Container{Container: fmt.Sprint(i), RootFSBytes: ptr(uint64(i))})
	}
	for i := range MaxPods + 3 {
		v.Pods = append(v.Pods, Pod{UID: fmt.Sprint(i)})
	}
	for i := range MaxImages + 2 {
		v.Images = append(v.Images, Image{Image: fmt.Sprint(i)})
	}
	got := page(t, v)
	for name, want := range map[string]int{"cleave_container_rootfs_bytes{": MaxContainers, "cleave_pod_held_bytes{": MaxPods, "cleave_image_exclusive_bytes{": MaxImages} {
		if n := strings.Count(got, name); n != want {
			t.Errorf("%d series of %s, want %d", n, name, want)
		}
	}
	for kind, want := range map[string]int{"container": 5, "pod": 3, "image": 2} {
		if line := fmt.Sprintf("cleave_series_left_out{kind=%q} %d", kind, want); !strings.Contains(got, line) {
			t.Errorf("%s is missing", line)
		}
	}
}

// One value that can't be shown, here labels that are there twice, does not take the others along.
func TestOneBadValue(t *testing.T) {
	t.Parallel()
	v := full()
	v.Images = append(v.Images, v.Images[0])
	if got := page(t, v); !strings.Contains(got, "cleave_filesystem_available_bytes{") {
		t.Errorf("all is gone:\n%s", got)
	}
}

// The names and helps are as Prometheus's own lint wants them.
func TestMetricsPassTheLint(t *testing.T) {
	t.Parallel()
	registry := prometheus.NewPedanticRegistry()
	if err := registry.Register(collector{metrics(), full}); err != nil {
		t.Fatal(err)
	}
	problems, err := testutil.GatherAndLint(registry)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
	// Each metric has a value in full, so that none is passed over here.
	gathered, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	if len(gathered) != len(metrics()) {
		t.Errorf("%d metrics of %d have a value", len(gathered), len(metrics()))
	}
}

// docs/metrics.md has each metric, and nothing that is none. CLEAVE_WRITE_DOCS=1 writes its table.
func TestDocumentationHasEachMetric(t *testing.T) {
	t.Parallel()
	const path, begin, end = "../docs/metrics.md", "<!-- metrics: generated -->\n", "<!-- end of metrics -->\n"
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(text), begin)
	got, after, okEnd := strings.Cut(rest, end)
	if !ok || !okEnd {
		t.Fatalf("%s has no %q and %q", path, begin, end)
	}
	var want strings.Builder
	if err := Document(&want); err != nil {
		t.Fatal(err)
	}
	if os.Getenv("CLEAVE_WRITE_DOCS") != "" {
		if err := os.WriteFile(path, []byte(before+begin+want.String()+end+after), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := cmp.Diff(want.String(), got); diff != "" {
		t.Errorf("docs/metrics.md is not what cleave has; make docs writes it (-cleave +page):\n%s", diff)
	}
}

func TestServerHasMetricsOnly(t *testing.T) {
	t.Parallel()
	handler, err := Metrics(full)
	if err != nil {
		t.Fatal(err)
	}
	server := Server(handler)
	for _, tc := range []struct {
		method, path string
		want         int
	}{{http.MethodGet, "/metrics", http.StatusOK}, {http.MethodPost, "/metrics", http.StatusMethodNotAllowed}, {http.MethodGet, "/v1/status", http.StatusNotFound}, {http.MethodPost, "/v1/handover", http.StatusNotFound}} {
		answer := httptest.NewRecorder()
		server.Handler.ServeHTTP(answer, httptest.NewRequestWithContext(t.Context(), tc.method, tc.path, nil))
		if answer.Code != tc.want {
			t.Errorf("%s %s: %d, want %d", tc.method, tc.path, answer.Code, tc.want)
		}
	}
}

func TestNamesHaveLabels(t *testing.T) {
	t.Parallel()
	for _, name := range Names() {
		if _, err := LabelsOf(name); err != nil {
			t.Error(err)
		}
	}
	if labels, err := LabelsOf("cleave_proxy_call_duration_seconds_bucket"); err != nil || !cmp.Equal(labels, []string{"le", "method"}) {
		t.Errorf("%v, %v", labels, err)
	}
	if _, err := LabelsOf("cleave_none"); err == nil {
		t.Error("any name has labels")
	}
}
