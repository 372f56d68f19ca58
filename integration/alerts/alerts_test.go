package alerts

import (
	"encoding/json"
	"log/slog"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/promql/promqltest"
	"github.com/prometheus/prometheus/rules"

	"github.com/cleave-cri/cleave/web"
)

const (
	alertsFile    = "../../deploy/alerts.yaml"
	dashboardFile = "../../deploy/dashboard.json"
)

func shipped(t *testing.T) map[string]rulefmt.Rule {
	t.Helper()
	groups, errs := rulefmt.ParseFile(alertsFile, false, model.LegacyValidation, parser.NewParser(parser.Options{}), slog.Default())
	for _, err := range errs {
		t.Fatal(err)
	}
	out := map[string]rulefmt.Rule{}
	for _, g := range groups.Groups {
		for _, r := range g.Rules {
			if _, twice := out[r.Alert]; twice || r.Alert == "" {
				t.Errorf("rule %q is there twice, or is no alert", r.Alert)
			}
			out[r.Alert] = r
		}
	}
	return out
}

// usesWhatThereIs fails where an expression names a metric that cleave does not have, or a label that the metric has not.
func usesWhatThereIs(t *testing.T, what, expr string) {
	t.Helper()
	parsed, err := parser.NewParser(parser.Options{}).ParseExpr(expr)
	if err != nil {
		t.Errorf("%s: %v", what, err)
		return
	}
	all := map[string]bool{}
	parser.Inspect(parsed, func(n parser.Node, _ []parser.Node) error {
		selector, ok := n.(*parser.VectorSelector)
		if !ok {
			return nil
		}
		has, err := web.LabelsOf(selector.Name)
		if err != nil {
			t.Errorf("%s: %v", what, err)
			return nil
		}
		has = append(has, "instance", labels.MetricName) // the first is Prometheus's own
		for _, l := range has {
			all[l] = true
		}
		for _, m := range selector.LabelMatchers {
			if !slices.Contains(has, m.Name) {
				t.Errorf("%s: %s has no label %s", what, selector.Name, m.Name)
			}
		}
		return nil
	})
	if len(all) == 0 {
		t.Errorf("%s: it asks for nothing of cleave's", what)
	}
	parser.Inspect(parsed, func(n parser.Node, _ []parser.Node) error {
		if by, ok := n.(*parser.AggregateExpr); ok {
			for _, l := range by.Grouping {
				if !all[l] {
					t.Errorf("%s: grouped by %s, which no metric in it has", what, l)
				}
			}
		}
		return nil
	})
}

func TestAlertsUseWhatThereIs(t *testing.T) {
	t.Parallel()
	for name, r := range shipped(t) {
		usesWhatThereIs(t, name, r.Expr)
		if !slices.Contains([]string{"info", "warning", "critical"}, r.Labels["severity"]) || r.Annotations["summary"] == "" || r.Annotations["description"] == "" {
			t.Errorf("%s: a rule has a severity, a summary and a description", name)
		}
	}
}

// trial is what makes an alert fire, and what does not. Both are loaded for an hour, one sample a minute.
type trial struct {
	fires, silent string
	// says is in the summary.
	says string
}

func trials() map[string]trial {
	return map[string]trial{
		"CleaveFilesystemFillsSoon": {
			fires:  `cleave_forecast_seconds{instance="n1",signal="imagefs.available"} 300x60`,
			silent: `cleave_forecast_seconds{instance="n1",signal="imagefs.available"} 3000x60`,
			says:   "imagefs.available on n1 will be short in 5m",
		},
		"CleaveFilesystemStuck": {
			fires:  `cleave_filesystem_stuck{instance="n1",role="imagefs",device="8:1",mountpoint="/images"} 1x60`,
			silent: `cleave_filesystem_stuck{instance="n1",role="imagefs",device="8:1",mountpoint="/images"} 0x60`,
			says:   "imagefs on n1",
		},
		"CleaveInodesShort": {
			fires: `cleave_filesystem_inodes{instance="n1",role="nodefs",device="8:1",mountpoint="/"} 1000x60
  cleave_filesystem_inodes_free{instance="n1",role="nodefs",device="8:1",mountpoint="/"} 40x60`,
			silent: `cleave_filesystem_inodes{instance="n1",role="nodefs",device="8:1",mountpoint="/"} 1000x60
  cleave_filesystem_inodes_free{instance="n1",role="nodefs",device="8:1",mountpoint="/"} 60x60`,
			says: "8:1 on n1 has 4%",
		},
		"CleaveBytesOfNobody": {
			fires: `cleave_filesystem_capacity_bytes{instance="n1",role="nodefs",device="8:1",mountpoint="/"} 1000x60
  cleave_filesystem_unattributed_bytes{instance="n1",role="nodefs",device="8:1",mountpoint="/"} 300x60`,
			silent: `cleave_filesystem_capacity_bytes{instance="n1",role="nodefs",device="8:1",mountpoint="/"} 1000x60
  cleave_filesystem_unattributed_bytes{instance="n1",role="nodefs",device="8:1",mountpoint="/"} -300x60`,
			says: "30% of device 8:1",
		},
		"CleaveDeletedFilesOpen": {
			fires: `cleave_filesystem_capacity_bytes{instance="n1",role="nodefs",device="8:1",mountpoint="/"} 1000x60
  cleave_filesystem_open_deleted_bytes{instance="n1",role="nodefs",device="8:1",mountpoint="/"} 100x60`,
			silent: `cleave_filesystem_capacity_bytes{instance="n1",role="nodefs",device="8:1",mountpoint="/"} 1000x60
  cleave_filesystem_open_deleted_bytes{instance="n1",role="nodefs",device="8:1",mountpoint="/"} 0x40 100x9`, // not for long enough
			says: "10% of device 8:1",
		},
		"CleaveFiguresOld": {
			fires: `cleave_survey_age_seconds{instance="n1"} 0+60x60`, silent: `cleave_survey_age_seconds{instance="n1"} 10x60`, says: "cleave on n1",
		},
		"CleaveDecidesNothing": {
			fires: `cleave_decider_blind{instance="n1"} 1x60`, silent: `cleave_decider_blind{instance="n1"} 0x60`, says: "cleave on n1",
		},
		"CleaveEvicts": {
			fires:  `cleave_evictions_total{instance="n1",reason="nodefs.available"} 1x55 2x4`,
			silent: `cleave_evictions_total{instance="n1",reason="nodefs.available"} 2x60`,
			says:   "on n1 for nodefs.available",
		},
		"CleaveEvictionsFail": {
			fires: `cleave_evictions_failed_total{instance="n1"} 0x55 1x4`, silent: `cleave_evictions_failed_total{instance="n1"} 1x60`, says: "on n1",
		},
		"CleaveDeletionsFreeTooLittle": {
			fires: `cleave_deletion_expected_bytes_total{instance="n1",kind="images",rule="GAP-25"} 0+100000000x60
  cleave_deletion_gained_bytes_total{instance="n1",kind="images",rule="GAP-25"} 0+10000000x60`,
			silent: `cleave_deletion_expected_bytes_total{instance="n1",kind="images",rule="GAP-25"} 0+100000000x60
  cleave_deletion_gained_bytes_total{instance="n1",kind="images",rule="GAP-25"} 0+99000000x60`,
			says: "on n1",
		},
		"CleaveAnswersUncorrected": {
			fires:  `cleave_proxy_fallbacks_total{instance="n1",method="ListContainers",reason="slow"} 0+5x60`,
			silent: `cleave_proxy_fallbacks_total{instance="n1",method="ListContainers",reason="slow"} 0+0.5x60`,
			says:   "ListContainers on n1",
		},
		"CleaveRuntimeAway": {
			fires: `cleave_proxy_calls_total{instance="n1",method="Version",code="OK"} 100x60
  cleave_proxy_calls_total{instance="n1",method="Version",code="Unavailable"} 0+60x60`,
			silent: `cleave_proxy_calls_total{instance="n1",method="Version",code="OK"} 0+600x60
  cleave_proxy_calls_total{instance="n1",method="Version",code="Unavailable"} 0+1x60`,
			says: "on n1",
		},
		"CleaveKubeletSeesWrongDisks": {
			fires:  `cleave_kubelet_summary_right{instance="n1"} 0x60`,
			silent: "cleave_kubelet_summary_right{instance=\"n1\"} 1x60\n  cleave_kubelet_problems{instance=\"n1\"} 0x60",
			says:   "The kubelet on n1",
		},
		"CleaveRecordsLost": {
			fires:  `cleave_records_total{instance="n1",result="dropped"} 0x55 3x4`,
			silent: `cleave_records_total{instance="n1",result="written"} 0+3x60`,
			says:   "on n1",
		},
	}
}

// Each rule fires for what it is about and not for what is well, by Prometheus's own engine, minute by minute.
func TestEachAlertFiresAndRests(t *testing.T) {
	t.Parallel()
	all := trials()
	for name, r := range shipped(t) {
		tc, ok := all[name]
		if !ok {
			t.Errorf("%s is not tried", name)
			continue
		}
		delete(all, name)
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if summary, ok := firing(t, name, r, tc.fires); !ok {
				t.Error("it does not fire")
			} else if !strings.Contains(summary, tc.says) {
				t.Errorf("it says %q, want %q in it", summary, tc.says)
			}
			if summary, ok := firing(t, name, r, tc.silent); ok {
				t.Errorf("it fires where all is well: %s", summary)
			}
		})
	}
	for name := range all {
		t.Errorf("%s is tried and not shipped", name)
	}
}

// firing evaluates a rule for an hour, each minute, and says whether it fires at its end, with which summary.
func firing(t *testing.T, name string, r rulefmt.Rule, series string) (summary string, _ bool) {
	t.Helper()
	store := promqltest.LoadedStorage(t, "load 1m\n  "+series)
	defer store.Close() //nolint:errcheck // it is in memory
	expr, err := parser.NewParser(parser.Options{}).ParseExpr(r.Expr)
	if err != nil {
		t.Fatal(err)
	}
	rule := rules.NewAlertingRule(name, expr, time.Duration(r.For), 0, labels.FromMap(r.Labels), labels.FromMap(r.Annotations), labels.EmptyLabels(), "", true, slog.Default())
	engine := promqltest.NewTestEngine(t, false, 5*time.Minute, 100_000)
	query := rules.EngineQueryFunc(engine, store)
	for minute := range 60 {
		if _, err := rule.Eval(t.Context(), 0, time.Unix(0, 0).Add(time.Duration(minute)*time.Minute), query, nil, 0); err != nil {
			t.Fatal(err)
		}
	}
	for _, a := range rule.ActiveAlerts() {
		if a.State == rules.StateFiring {
			return a.Annotations.Get("summary"), true
		}
	}
	return "", false
}

// The dashboard asks for what there is.
func TestDashboardUsesWhatThereIs(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(dashboardFile)
	if err != nil {
		t.Fatal(err)
	}
	var dashboard struct {
		Panels []struct {
			ID      int    `json:"id"`
			Title   string `json:"title"`
			Type    string `json:"type"`
			Targets []struct {
				Expr string `json:"expr"`
			} `json:"targets"`
		} `json:"panels"`
		Templating struct {
			List []struct {
				Name string `json:"name"`
			} `json:"list"`
		} `json:"templating"`
	}
	if err := json.Unmarshal(text, &dashboard); err != nil {
		t.Fatal(err)
	}
	ids, queries := map[int]bool{}, 0
	for _, p := range dashboard.Panels {
		if ids[p.ID] || p.Title == "" {
			t.Errorf("panel %d, %q: each has a number and a title of its own", p.ID, p.Title)
		}
		ids[p.ID] = true
		if p.Type != "row" && len(p.Targets) == 0 {
			t.Errorf("%s asks for nothing", p.Title)
		}
		for _, target := range p.Targets {
			queries++
			usesWhatThereIs(t, p.Title, strings.NewReplacer("$__rate_interval", "5m", "$instance", ".*").Replace(target.Expr))
		}
	}
	if queries < 20 {
		t.Errorf("only %d queries", queries)
	}
}
