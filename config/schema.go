package config

import (
	"strconv"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/cleave-cri/cleave/config/strict"
)

// section is a mapping of the file: its keys in the order in which they are
// written.
type section []field

// field is a key: a section, a list of texts, or a value.
type field struct {
	key   string
	sub   section
	list  *[]string
	value value
}

// value is what a key without a section below it holds.
type value interface {
	// decode sets the value from a scalar that is not null; the error says what
	// it should have been, for people.
	decode(n *yaml.Node) error
	// encode gives the scalar that decode reads.
	encode() *yaml.Node
}

// schema is all keys of the file, bound to the fields of c.
func schema(c *Config) section {
	return section{
		{key: "version", value: intValue{&c.Version}},
		{key: "mode", value: textValue{(*string)(&c.Mode)}},
		{key: "runtime", sub: section{
			{key: "endpoint", value: endpointValue{&c.Runtime.Endpoint}},
			{key: "namespace", value: textValue{&c.Runtime.Namespace}},
		}},
		{key: "listen", sub: section{
			{key: "endpoint", value: endpointValue{&c.Listen.Endpoint}},
		}},
		{key: "control", sub: section{
			{key: "endpoint", value: endpointValue{&c.Control.Endpoint}},
		}},
		{key: "crio", sub: section{
			{key: "nriEndpoint", value: endpointValue{&c.CRIO.NRIEndpoint}},
			{key: "kubeletTokenFile", value: textValue{&c.CRIO.KubeletTokenFile}},
		}},
		{key: "reclaim", sub: section{
			{key: "enabled", value: boolValue{&c.Reclaim.Enabled}},
			{key: "evict", value: boolValue{&c.Reclaim.Evict}},
			{key: "evictBy", value: textValue{(*string)(&c.Reclaim.EvictBy)}},
			{key: "keepLogs", value: boolValue{&c.Reclaim.KeepLogs}},
			{key: "kubeconfig", value: textValue{&c.Reclaim.Kubeconfig}},
		}},
		{key: "kube", sub: section{
			{key: "admission", value: boolValue{&c.Kube.Admission}},
			{key: "conditions", value: boolValue{&c.Kube.Conditions}},
			{key: "events", value: boolValue{&c.Kube.Events}},
			{key: "taint", value: boolValue{&c.Kube.Taint}},
		}},
		{key: "stateDir", value: textValue{&c.StateDir}},
		{key: "filesystems", sub: section{
			{key: "nodefs", value: textValue{&c.Filesystems.NodeFS}},
			{key: "logs", value: textValue{&c.Filesystems.Logs}},
			{key: "imagefs", value: textValue{&c.Filesystems.ImageFS}},
			{key: "containerfs", value: textValue{&c.Filesystems.ContainerFS}},
		}},
		{key: "measure", sub: section{
			{key: "period", value: durationValue{&c.Measure.Period}},
			{key: "maxCorePercent", value: intValue{&c.Measure.MaxCorePercent}},
		}},
		{key: "memory", sub: section{
			{key: "limit", value: bytesValue{&c.Memory.LimitBytes}},
		}},
		{key: "log", sub: section{
			{key: "level", value: textValue{&c.Log.Level}},
			{key: "format", value: textValue{&c.Log.Format}},
		}},
		{key: "metrics", sub: section{
			{key: "address", value: textValue{&c.Metrics.Address}},
		}},
		{key: "limits", sub: section{
			{key: "writableLayer", value: bytesValue{&c.Limits.WritableLayerBytes}},
			{key: "fromPods", value: boolValue{&c.Limits.FromPods}},
		}},
		{key: "snapshotter", sub: section{
			{key: "imageRoot", value: textValue{&c.Snapshotter.ImageRoot}},
			{key: "containerRoot", value: textValue{&c.Snapshotter.ContainerRoot}},
			{key: "database", value: textValue{&c.Snapshotter.Database}},
			{key: "endpoint", value: endpointValue{&c.Snapshotter.Endpoint}},
			{key: "statusEndpoint", value: endpointValue{&c.Snapshotter.StatusEndpoint}},
			{key: "requireMountpoints", value: boolValue{&c.Snapshotter.RequireMountpoints}},
			{key: "namespaces", list: &c.Snapshotter.Namespaces},
			{key: "remapIDs", value: boolValue{&c.Snapshotter.RemapIDs}},
			{key: "parallelUnpack", value: boolValue{&c.Snapshotter.ParallelUnpack}},
			{key: "syncOnCommit", value: boolValue{&c.Snapshotter.SyncOnCommit}},
			{key: "mountOptions", list: &c.Snapshotter.MountOptions},
			{key: "projectQuota", value: boolValue{&c.Snapshotter.ProjectQuota}},
			{key: "usageMaxAge", value: durationValue{&c.Snapshotter.UsageMaxAge}},
			{key: "deletionsPerSecond", value: intValue{&c.Snapshotter.DeletionsPerSecond}},
			{key: "cleanupMaxPercent", value: intValue{&c.Snapshotter.CleanupMaxPercent}},
		}},
	}
}

// set decodes a scalar by read.
func set[T any](to *T, n *yaml.Node, read func(*yaml.Node) (T, error)) error {
	v, err := read(n)
	if err != nil {
		return err
	}
	*to = v
	return nil
}

type textValue struct{ to *string }

func (v textValue) decode(n *yaml.Node) error { return set(v.to, n, strict.Text) }

func (v textValue) encode() *yaml.Node {
	n := new(yaml.Node)
	n.SetString(*v.to)
	return n
}

type intValue struct{ to *int }

func (v intValue) decode(n *yaml.Node) error { return set(v.to, n, strict.Int) }

func (v intValue) encode() *yaml.Node {
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: strict.TagInt, Value: strconv.Itoa(*v.to)}
}

type boolValue struct{ to *bool }

func (v boolValue) decode(n *yaml.Node) error { return set(v.to, n, strict.Bool) }

func (v boolValue) encode() *yaml.Node {
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: strict.TagBool, Value: strconv.FormatBool(*v.to)}
}

type durationValue struct{ to *time.Duration }

func (v durationValue) decode(n *yaml.Node) error { return set(v.to, n, strict.Duration) }

func (v durationValue) encode() *yaml.Node {
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: strict.TagText, Value: v.to.String()}
}

type bytesValue struct{ to *int64 }

func (v bytesValue) decode(n *yaml.Node) error { return set(v.to, n, strict.Bytes) }

func (v bytesValue) encode() *yaml.Node {
	text := strict.FormatBytes(*v.to)
	tag := strict.TagText
	if _, err := strconv.ParseInt(text, 10, 64); err == nil {
		tag = strict.TagInt
	}
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: tag, Value: text}
}

type endpointValue struct{ to *Endpoint }

func (v endpointValue) decode(n *yaml.Node) error {
	var s string
	if err := (textValue{&s}).decode(n); err != nil {
		return err
	}
	e, err := ParseEndpoint(s)
	if err != nil {
		return err
	}
	*v.to = e
	return nil
}

func (v endpointValue) encode() *yaml.Node {
	s := v.to.String()
	return textValue{&s}.encode()
}

// YAML writes the configuration so that Parse gives it back: all keys, without
// comments. c should be valid.
func (c Config) YAML() ([]byte, error) {
	return yaml.Marshal(schema(&c).encode())
}

func (s section) encode() *yaml.Node {
	n := &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map"}
	for _, f := range s {
		var v *yaml.Node
		switch {
		case f.sub != nil:
			v = f.sub.encode()
		case f.list != nil:
			v = encodeList(*f.list)
		default:
			v = f.value.encode()
		}
		n.Content = append(n.Content, &yaml.Node{Kind: yaml.ScalarNode, Tag: strict.TagText, Value: f.key}, v)
	}
	return n
}

func encodeList(list []string) *yaml.Node {
	n := &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq", Style: yaml.FlowStyle}
	for i := range list {
		n.Content = append(n.Content, textValue{&list[i]}.encode())
	}
	return n
}
