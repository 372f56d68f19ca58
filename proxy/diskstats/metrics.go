package diskstats

import (
	"slices"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// The disk metrics of a container, as ListMetricDescriptors names them (CTD-16).
const (
	metricUsageBytes  = "container_fs_usage_bytes"
	metricLimitBytes  = "container_fs_limit_bytes"
	metricInodesTotal = "container_fs_inodes_total"
	metricInodesFree  = "container_fs_inodes_free"

	// metricLastSeen is there for every container; its labels are those of
	// the disk metrics but for the last, the device.
	metricLastSeen = "container_last_seen"
	// deviceLabel is what containerd writes as the device of a disk metric.
	deviceLabel = "/"
)

func fixListPodSandboxMetrics(m *runtimeapi.ListPodSandboxMetricsResponse, v *view) bool {
	return fixPodMetrics(m.GetPodMetrics(), v)
}

func fixStreamPodSandboxMetrics(m *runtimeapi.StreamPodSandboxMetricsResponse, v *view) bool {
	return fixPodMetrics(m.GetPodSandboxMetrics(), v)
}

func fixPodMetrics(pods []*runtimeapi.PodSandboxMetrics, v *view) (changed bool) {
	for _, pod := range pods {
		for _, c := range pod.GetContainerMetrics() {
			changed = fixContainerMetrics(c, v) || changed
		}
	}
	return changed
}

// fixContainerMetrics corrects the disk metrics of one container by what was
// measured: the runtime's usage is that of the whole filesystem when its walk
// fails, and its inodes_total is the container's own count (CTD-16). The other
// two are right and fresh; where the runtime gave none at all they are added.
func fixContainerMetrics(c *runtimeapi.ContainerMetrics, v *view) bool {
	if c == nil {
		return false
	}
	layer, known := v.Layers[c.GetContainerId()]
	if !known || layer.Used == nil {
		v.missed = true
		return false
	}
	at := layer.Used.At
	changed := setMetric(c, metricUsageBytes, layer.Used.Bytes, at)
	if layer.CapacityBytes == 0 {
		return changed // nothing is known of the filesystem
	}
	if findMetric(c, metricLimitBytes) == nil {
		changed = setMetric(c, metricLimitBytes, layer.CapacityBytes, at) || changed
	}
	if layer.InodesTotal == nil || layer.InodesFree == nil {
		return dropMetric(c, metricInodesTotal) || changed
	}
	if findMetric(c, metricInodesFree) == nil {
		changed = setMetric(c, metricInodesFree, *layer.InodesFree, at) || changed
	}
	return setMetric(c, metricInodesTotal, *layer.InodesTotal, at) || changed
}

// setMetric gives a metric its value and the time of its measurement, and adds
// it where it is missing and the container's labels are known.
func setMetric(c *runtimeapi.ContainerMetrics, name string, value uint64, at time.Time) bool {
	metric := findMetric(c, name)
	if metric == nil {
		seen := findMetric(c, metricLastSeen)
		if seen == nil {
			return false
		}
		metric = &runtimeapi.Metric{
			Name:        name,
			MetricType:  runtimeapi.MetricType_GAUGE,
			LabelValues: append(slices.Clone(seen.GetLabelValues()), deviceLabel),
		}
		c.Metrics = append(c.Metrics, metric)
	} else if metric.GetValue() != nil && metric.GetValue().GetValue() == value {
		return false
	}
	metric.Value = &runtimeapi.UInt64Value{Value: value}
	metric.Timestamp = at.UnixNano()
	return true
}

func findMetric(c *runtimeapi.ContainerMetrics, name string) *runtimeapi.Metric {
	for _, m := range c.GetMetrics() {
		if m.GetName() == name {
			return m
		}
	}
	return nil
}

func dropMetric(c *runtimeapi.ContainerMetrics, name string) bool {
	before := len(c.GetMetrics())
	c.Metrics = slices.DeleteFunc(c.Metrics, func(m *runtimeapi.Metric) bool { return m.GetName() == name })
	return len(c.GetMetrics()) != before
}
