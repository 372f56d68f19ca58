// Package web is what cleave shows to programs: its metrics, in the text format of Prometheus. It gets values and knows nobody
// who has them: agent hands them in, and only agent may import it. It imports nothing else of this module.
//
// Every metric's name begins with cleave_. docs/metrics.md lists them all, and is tested to.
package web

import (
	"fmt"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Values are what the metrics show at one moment.
type Values struct {
	// Version is cleave's own.
	Version string
	// Kubelet is about the kubelet in mode crio, nil in other modes.
	Kubelet *Kubelet
}

// Kubelet is how a kubelet in mode crio sees the disks.
type Kubelet struct {
	// Split says that the kubelet was told of two disks.
	Split bool
	// SummaryRight says whether its summary has the disks as they are; nil while that is not known.
	SummaryRight *bool
	// Problems is how many things keep the kubelet from seeing the disks as they are; `cleave status` names them.
	Problems int
	// Unmeasured is how many containers it does not measure until they are created anew.
	Unmeasured int
}

// metric is one metric, what it means, and how it is got.
type metric struct {
	description *prometheus.Desc
	name, help  string
	labels      []string
	collect     func(v Values, put func(value float64, labels ...string))
}

// metrics are all of them, in the order of their names.
func metrics() []metric {
	ofKubelet := func(value func(Kubelet) (float64, bool)) func(Values, func(float64, ...string)) {
		return func(v Values, put func(float64, ...string)) {
			if v.Kubelet == nil {
				return
			}
			if x, ok := value(*v.Kubelet); ok {
				put(x)
			}
		}
	}
	all := []metric{
		{
			name: "cleave_build_info", help: "Always 1; the label is cleave's version.", labels: []string{"version"},
			collect: func(v Values, put func(float64, ...string)) { put(1, v.Version) },
		},
		{
			name: "cleave_kubelet_problems", help: "In mode crio: how many things keep the kubelet from seeing the disks as they are. cleave status names them.",
			collect: ofKubelet(func(k Kubelet) (float64, bool) { return float64(k.Problems), true }),
		},
		{
			name: "cleave_kubelet_summary_right", help: "In mode crio: 1 if the kubelet's summary has the disks as they are, 0 if not; missing while that is not known.",
			collect: ofKubelet(func(k Kubelet) (float64, bool) {
				if k.SummaryRight == nil {
					return 0, false
				}
				return truth(*k.SummaryRight), true
			}),
		},
		{
			name: "cleave_kubelet_told_split", help: "In mode crio: 1 if the kubelet was told that images and containers are on two disks, 0 if of one.",
			collect: ofKubelet(func(k Kubelet) (float64, bool) { return truth(k.Split), true }),
		},
		{
			name: "cleave_kubelet_unmeasured_containers", help: "In mode crio: containers that the kubelet does not measure until they are created anew.",
			collect: ofKubelet(func(k Kubelet) (float64, bool) { return float64(k.Unmeasured), true }),
		},
	}
	for i := range all {
		all[i].description = prometheus.NewDesc(all[i].name, all[i].help, all[i].labels, nil)
	}
	return all
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// collector asks for the values anew each time.
type collector struct {
	metrics []metric
	values  func() Values
}

var _ prometheus.Collector = collector{}

// Describe implements [prometheus.Collector].
func (c collector) Describe(to chan<- *prometheus.Desc) {
	for _, m := range c.metrics {
		to <- m.description
	}
}

// Collect implements [prometheus.Collector].
func (c collector) Collect(to chan<- prometheus.Metric) {
	v := c.values()
	for _, m := range c.metrics {
		m.collect(v, func(value float64, labels ...string) {
			got, err := prometheus.NewConstMetric(m.description, prometheus.GaugeValue, value, labels...)
			if err != nil {
				got = prometheus.NewInvalidMetric(m.description, err)
			}
			to <- got
		})
	}
}

// Metrics answers with the metrics of what values returns, which is called for each answer and must not block. One registry of its
// own: nothing that a library registers by itself gets into it.
func Metrics(values func() Values) (http.Handler, error) {
	registry := prometheus.NewRegistry()
	if err := registry.Register(collector{metrics(), values}); err != nil {
		return nil, fmt.Errorf("register metrics: %w", err)
	}
	return promhttp.HandlerFor(registry, promhttp.HandlerOpts{}), nil
}
