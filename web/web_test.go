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

func TestMetrics(t *testing.T) {
	t.Parallel()
	right, wrong := true, false
	for _, tc := range []struct {
		name string
		v    Values
		want string
	}{
		{"another mode", Values{Version: "v1"}, `cleave_build_info{version="v1"} 1`},
		{"split and right", Values{Version: "v1", Kubelet: &Kubelet{Split: true, SummaryRight: &right}}, `cleave_build_info{version="v1"} 1
cleave_kubelet_problems 0
cleave_kubelet_summary_right 1
cleave_kubelet_told_split 1
cleave_kubelet_unmeasured_containers 0`},
		{"wrong", Values{Version: "v1", Kubelet: &Kubelet{Problems: 2, SummaryRight: &wrong, Unmeasured: 3}}, `cleave_build_info{version="v1"} 1
cleave_kubelet_problems 2
cleave_kubelet_summary_right 0
cleave_kubelet_told_split 0
cleave_kubelet_unmeasured_containers 3`},
		{"not known", Values{Version: "v1", Kubelet: &Kubelet{Split: true}}, `cleave_build_info{version="v1"} 1
cleave_kubelet_problems 0
cleave_kubelet_told_split 1
cleave_kubelet_unmeasured_containers 0`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			if diff := cmp.Diff(tc.want, page(t, tc.v)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// The names and helps are as Prometheus's own lint wants them.
func TestMetricsPassTheLint(t *testing.T) {
	t.Parallel()
	right := true
	registry := prometheus.NewRegistry()
	if err := registry.Register(collector{metrics(), func() Values { return Values{Version: "v1", Kubelet: &Kubelet{SummaryRight: &right}} }}); err != nil {
		t.Fatal(err)
	}
	problems, err := testutil.GatherAndLint(registry)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

// docs/metrics.md has each metric, and nothing that is none.
func TestDocumentationHasEachMetric(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, m := range metrics() {
		labels := "–"
		if len(m.labels) > 0 {
			labels = "`" + strings.Join(m.labels, "`, `") + "`"
		}
		want = append(want, fmt.Sprintf("| `%s` | %s | %s |", m.name, labels, m.help))
	}
	var got []string
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "| `cleave_") {
			got = append(got, strings.TrimSpace(line))
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("docs/metrics.md is not what cleave has (-cleave +page):\n%s", diff)
	}
}
