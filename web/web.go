// Package web is what cleave shows to programs: its metrics, in the text format of Prometheus. It gets values and knows nobody
// who has them: agent hands them in, and only agent may import it. It imports nothing else of this module.
//
// Every metric's name begins with cleave_. docs/metrics.md lists them all, and is tested to.
package web

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

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
		put := func(got prometheus.Metric, err error) {
			if err != nil {
				got = prometheus.NewInvalidMetric(m.description, err)
			}
			to <- got
		}
		value := prometheus.GaugeValue
		if m.kind == counter {
			value = prometheus.CounterValue
		}
		m.collect(&v, putter{
			value: func(x float64, labels ...string) {
				put(prometheus.NewConstMetric(m.description, value, x, valid(labels)...))
			},
			histogram: func(count uint64, sum float64, buckets map[float64]uint64, labels ...string) {
				put(prometheus.NewConstHistogram(m.description, count, sum, buckets, valid(labels)...))
			},
		})
	}
}

// valid makes text of labels, as one that is none would spoil all metrics. Names in Kubernetes are text; paths need not be.
func valid(labels []string) []string {
	for i, l := range labels {
		labels[i] = strings.ToValidUTF8(l, "\ufffd")
	}
	return labels
}

// scrapesAtOnce is how many answers are made at a time; who is one more is told to come again.
const scrapesAtOnce = 2

// Metrics answers with the metrics of what values returns, which is called for each answer and must not block. One registry of its
// own: nothing that a library registers by itself gets into it.
func Metrics(values func() Values) (http.Handler, error) {
	registry := prometheus.NewRegistry()
	if err := registry.Register(collector{metrics(), values}); err != nil {
		return nil, fmt.Errorf("register metrics: %w", err)
	}
	// What can be shown is shown when one value can't.
	return promhttp.HandlerFor(registry, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError, MaxRequestsInFlight: scrapesAtOnce}), nil
}

// serveTimeout bounds how long somebody who asks over the network may take for anything.
const serveTimeout = 10 * time.Second

// Server answers with metrics, and with nothing else, to whoever may connect.
func Server(metrics http.Handler) *http.Server {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", metrics)
	return &http.Server{
		Handler: mux, ReadHeaderTimeout: serveTimeout, ReadTimeout: serveTimeout, WriteTimeout: serveTimeout, IdleTimeout: time.Minute,
		MaxHeaderBytes: 16 << 10,
	}
}

// Document writes the table of all metrics, as docs/metrics.md has it.
func Document(w io.Writer) error {
	lines := []string{"| metric | kind | labels | meaning |", "| --- | --- | --- | --- |"}
	for _, m := range metrics() {
		labels := "–"
		if len(m.labels) > 0 {
			labels = "`" + strings.Join(m.labels, "`, `") + "`"
		}
		lines = append(lines, fmt.Sprintf("| `%s` | %s | %s | %s |", m.name, m.kind, labels, m.help))
	}
	_, err := io.WriteString(w, strings.Join(lines, "\n")+"\n")
	return err
}

// Names are those of all metrics, as queries name them: of a histogram those of its three series.
func Names() (names []string) {
	for _, m := range metrics() {
		if m.kind != histogram {
			names = append(names, m.name)
			continue
		}
		for _, suffix := range []string{"_bucket", "_count", "_sum"} {
			names = append(names, m.name+suffix)
		}
	}
	return names
}

// errNone is for values that say nothing.
var errNone = errors.New("there is no such metric")

// LabelsOf are the labels that a name has, as [Names] gives it.
func LabelsOf(name string) ([]string, error) {
	for _, m := range metrics() {
		switch {
		case m.name == name:
			return m.labels, nil
		case m.kind == histogram && name == m.name+"_bucket":
			return append([]string{"le"}, m.labels...), nil
		case m.kind == histogram && (name == m.name+"_count" || name == m.name+"_sum"):
			return m.labels, nil
		}
	}
	return nil, fmt.Errorf("%w: %s", errNone, name)
}
