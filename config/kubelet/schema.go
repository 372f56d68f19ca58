package kubelet

import (
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// field is one setting: its key in files, its flag, and how it is read.
type field struct {
	// key is empty for what only flags can set, flag for what only files can.
	key, flag string
	slot      slot
}

// slot is where a setting goes, and the kubelet's rules for its type.
type slot interface {
	// decode takes a value from a file.
	decode(n *node) error
	// parse takes a value from the command line; first is false for a flag that
	// was already given.
	parse(s string, first bool, from Origin) error
	// tree gives the value as the kubelet writes it between the file and the
	// drop-ins, or nil if it leaves it out.
	tree() *node
	// fill sets the default if the kubelet would: it takes an empty string, a
	// duration of 0 and a missing pointer for "not given".
	fill()
	// reset takes the value away.
	reset()
}

// The kubelet's defaults (DEF-1 ff. of v1.37.2).
const (
	defaultEndpoint  = "unix:///run/containerd/containerd.sock"
	defaultRootDir   = "/var/lib/kubelet"
	defaultPodLogs   = "/var/log/pods"
	defaultAllocated = "pods"
	defaultPort      = 10250
	// legacyReadOnlyPort is the default where there is no file of --config (applyLegacyDefaults).
	legacyReadOnlyPort = 10255
)

// defaultHard is evictionHard on Linux (DEF-1).
func defaultHard() map[string]string {
	return map[string]string{
		"memory.available":   "100Mi",
		"nodefs.available":   "10%",
		"nodefs.inodesFree":  "5%",
		"imagefs.available":  "15%",
		"imagefs.inodesFree": "5%",
	}
}

// schema lists all settings of s.
func schema(s *Settings) []field {
	return []field{
		{"containerRuntimeEndpoint", "container-runtime-endpoint", &textSlot{to: &s.RuntimeEndpoint, standard: defaultEndpoint}},
		{"imageServiceEndpoint", "image-service-endpoint", &textSlot{to: &s.ImageEndpoint}},
		{"", "root-dir", &textSlot{to: &s.RootDir, standard: defaultRootDir}},
		{"podLogsDir", "", &textSlot{to: &s.PodLogsDir, standard: defaultPodLogs}},
		{"staticPodPath", "pod-manifest-path", &textSlot{to: &s.StaticPodPath}},
		{"address", "address", &textSlot{to: &s.Address, standard: "0.0.0.0"}},
		{"port", "port", &intSlot{to: &s.Port, standard: defaultPort}},
		{"readOnlyPort", "read-only-port", &intSlot{to: &s.ReadOnlyPort}},
		{"", "kubeconfig", &textSlot{to: &s.Kubeconfig}},
		{"evictionHard", "eviction-hard", &mapSlot[string]{to: &s.EvictionHard, separator: "<", decodeOne: asText, parseOne: plainText}},
		{"evictionSoft", "eviction-soft", &mapSlot[string]{to: &s.EvictionSoft, separator: "<", decodeOne: asText, parseOne: plainText}},
		{"evictionSoftGracePeriod", "eviction-soft-grace-period", &mapSlot[string]{to: &s.EvictionSoftGracePeriod, separator: "=", decodeOne: asText, parseOne: plainText}},
		{"evictionMinimumReclaim", "eviction-minimum-reclaim", &mapSlot[string]{to: &s.EvictionMinimumReclaim, separator: "=", decodeOne: asText, parseOne: plainText}},
		{"mergeDefaultEvictionSettings", "", &boolSlot{to: &s.MergeDefaultEviction}},
		{"evictionPressureTransitionPeriod", "eviction-pressure-transition-period", &durationSlot{to: &s.EvictionPressureTransition, standard: 5 * time.Minute}},
		{"evictionMaxPodGracePeriod", "eviction-max-pod-grace-period", &intSlot{to: &s.EvictionMaxPodGraceSeconds}},
		{"", "experimental-allocatable-ignore-eviction", &boolSlot{to: &s.AllocatableIgnoresEviction}},
		{"imageGCHighThresholdPercent", "image-gc-high-threshold", &intSlot{to: &s.ImageGCHighPercent, standard: 85, pointer: true}},
		{"imageGCLowThresholdPercent", "image-gc-low-threshold", &intSlot{to: &s.ImageGCLowPercent, standard: 80, pointer: true}},
		{"imageMinimumGCAge", "minimum-image-ttl-duration", &durationSlot{to: &s.ImageMinimumGCAge, standard: 2 * time.Minute}},
		{"imageMaximumGCAge", "", &durationSlot{to: &s.ImageMaximumGCAge}},
		{"", "minimum-container-ttl-duration", &durationSlot{to: &s.MinimumContainerTTL}},
		{"", "maximum-dead-containers-per-container", &intSlot{to: &s.MaxDeadPerContainer, standard: 1, pointer: true}},
		{"", "maximum-dead-containers", &intSlot{to: &s.MaxDeadContainers, standard: -1, pointer: true}},
		{"containerLogMaxSize", "container-log-max-size", &textSlot{to: &s.ContainerLogMaxSize, standard: "10Mi"}},
		{"containerLogMaxFiles", "container-log-max-files", &intSlot{to: &s.ContainerLogMaxFiles, standard: 5, pointer: true}},
		{"featureGates", "feature-gates", &mapSlot[bool]{to: &s.FeatureGates, separator: "=", decodeOne: asBool, parseOne: strconv.ParseBool, keep: true}},
		{"cgroupDriver", "cgroup-driver", &textSlot{to: &s.CgroupDriver, standard: "cgroupfs"}},
		{"cgroupRoot", "cgroup-root", &textSlot{to: &s.CgroupRoot}},
		{"systemReserved", "system-reserved", &mapSlot[string]{to: &s.SystemReserved, separator: "=", decodeOne: asText, parseOne: plainText}},
		{"kubeReserved", "kube-reserved", &mapSlot[string]{to: &s.KubeReserved, separator: "=", decodeOne: asText, parseOne: plainText}},
		{"enforceNodeAllocatable", "enforce-node-allocatable", &listSlot{to: &s.EnforceNodeAllocatable, standard: defaultAllocated}},
		{"systemReservedCgroup", "system-reserved-cgroup", &textSlot{to: &s.SystemReservedCgroup}},
		{"kubeReservedCgroup", "kube-reserved-cgroup", &textSlot{to: &s.KubeReservedCgroup}},
		{"", "hostname-override", &textSlot{to: &s.NodeName}},
		{"localStorageCapacityIsolation", "local-storage-capacity-isolation", &boolSlot{to: &s.LocalStorageCapacityIsolation, standard: true}},
	}
}

// decodeTree takes all known keys from root. Unknown ones are left alone: the
// kubelet logs them and goes on. folded is how it reads after drop-ins were laid
// over the file: names in any case, in the order of the alphabet.
func decodeTree(root *node, fields []field, folded bool) error {
	entries := root.entries
	if folded {
		entries = root.sorted()
	}
	for _, e := range entries {
		f, ok := find(fields, e.key, folded)
		if !ok {
			continue
		}
		if err := f.slot.decode(e.value); err != nil {
			from, key := e.value.from, e.key
			var inside *entryError
			if errors.As(err, &inside) {
				from, key, err = inside.from, key+"."+inside.key, inside.err
			}
			return &FileError{Path: from.Name, Line: from.Line, Key: key, Err: err}
		}
	}
	return nil
}

func find(fields []field, key string, folded bool) (field, bool) {
	for _, f := range fields {
		if f.key != "" && f.key == key {
			return f, true
		}
	}
	if folded {
		for _, f := range fields {
			if f.key != "" && strings.EqualFold(f.key, key) {
				return f, true
			}
		}
	}
	return field{}, false
}

func mismatch(n *node, want kind) error {
	got := string(n.kind)
	if n.text != "" {
		got = n.text
	}
	return fmt.Errorf("must be %s, not %s", want, shown(got))
}

func asText(n *node) (string, error) {
	switch n.kind {
	case text:
		return n.text, nil
	case null:
		return "", nil
	default:
		return "", mismatch(n, text)
	}
}

func asBool(n *node) (bool, error) {
	switch n.kind {
	case boolean:
		return n.text == "true", nil
	case null:
		return false, nil
	default:
		return false, mismatch(n, boolean)
	}
}

func plainText(s string) (string, error) { return s, nil }

var (
	standardOrigin = Origin{Kind: Default}
	errNoPair      = errors.New("is not a list of name and value pairs")
)

type textSlot struct {
	to       *Setting[string]
	standard string
}

func (s *textSlot) decode(n *node) error {
	v, err := asText(n)
	if err == nil && n.kind != null {
		*s.to = Setting[string]{v, n.from}
	}
	return err
}

func (s *textSlot) parse(v string, _ bool, from Origin) error {
	*s.to = Setting[string]{v, from}
	return nil
}

func (s *textSlot) tree() *node {
	if s.to.Value == "" {
		return nil
	}
	return &node{kind: text, text: s.to.Value, from: s.to.From}
}

func (s *textSlot) fill() {
	if s.to.Value == "" {
		*s.to = Setting[string]{s.standard, standardOrigin}
	}
}

func (s *textSlot) reset() { *s.to = Setting[string]{} }

// boolSlot is a pointer in files: null is "not given".
type boolSlot struct {
	to       *Setting[bool]
	standard bool
}

func (s *boolSlot) decode(n *node) error {
	v, err := asBool(n)
	if err != nil {
		return err
	}
	if n.kind == null {
		s.reset()
		return nil
	}
	*s.to = Setting[bool]{v, n.from}
	return nil
}

func (s *boolSlot) parse(v string, _ bool, from Origin) error {
	b, err := strconv.ParseBool(v)
	if err == nil {
		*s.to = Setting[bool]{b, from}
	}
	return err
}

func (s *boolSlot) tree() *node {
	return &node{kind: boolean, text: strconv.FormatBool(s.to.Value), from: s.to.From}
}

func (s *boolSlot) fill() {
	if !s.to.From.IsSet() {
		*s.to = Setting[bool]{s.standard, standardOrigin}
	}
}

func (s *boolSlot) reset() { *s.to = Setting[bool]{} }

type intSlot struct {
	to       *Setting[int32]
	standard int32
	// pointer: 0 is a value, null is "not given". Otherwise 0 is "not given".
	pointer bool
}

func (s *intSlot) decode(n *node) error {
	switch {
	case n.kind == null && s.pointer:
		s.reset()
		return nil
	case n.kind == null:
		return nil
	case n.kind != number:
		return mismatch(n, number)
	}
	v, err := strconv.ParseInt(n.text, 10, 32)
	if err != nil {
		return fmt.Errorf("%s is not a whole number of 32 bits", shown(n.text))
	}
	*s.to = Setting[int32]{int32(v), n.from}
	return nil
}

func (s *intSlot) parse(v string, _ bool, from Origin) error {
	i, err := strconv.ParseInt(v, 0, 32)
	if err == nil {
		*s.to = Setting[int32]{int32(i), from}
	}
	return err
}

func (s *intSlot) tree() *node {
	if s.to.Value == 0 && !s.pointer {
		return nil
	}
	return &node{kind: number, text: strconv.Itoa(int(s.to.Value)), from: s.to.From}
}

func (s *intSlot) fill() {
	if !s.to.From.IsSet() || s.to.Value == 0 && !s.pointer && s.standard != 0 {
		*s.to = Setting[int32]{s.standard, standardOrigin}
	}
}

func (s *intSlot) reset() { *s.to = Setting[int32]{} }

type durationSlot struct {
	to       *Setting[time.Duration]
	standard time.Duration
}

func (s *durationSlot) decode(n *node) error {
	if n.kind != text {
		return fmt.Errorf("must be a duration such as 5m0s, not %s", n.kind)
	}
	v, err := time.ParseDuration(n.text)
	if err != nil {
		return fmt.Errorf("%s is not a duration such as 5m0s", shown(n.text))
	}
	*s.to = Setting[time.Duration]{v, n.from}
	return nil
}

func (s *durationSlot) parse(v string, _ bool, from Origin) error {
	d, err := time.ParseDuration(v)
	if err == nil {
		*s.to = Setting[time.Duration]{d, from}
	}
	return err
}

func (s *durationSlot) tree() *node {
	return &node{kind: text, text: s.to.Value.String(), from: s.to.From}
}

func (s *durationSlot) fill() {
	if s.to.Value == 0 {
		*s.to = Setting[time.Duration]{s.standard, standardOrigin}
	}
}

func (s *durationSlot) reset() { *s.to = Setting[time.Duration]{} }

type mapSlot[T any] struct {
	to        *Map[T]
	separator string
	decodeOne func(*node) (T, error)
	parseOne  func(string) (T, error)
	// keep: a flag adds to what files gave; otherwise its first use clears that
	// (THR-18).
	keep bool
}

func (s *mapSlot[T]) decode(n *node) error {
	switch n.kind {
	case null:
		s.reset()
		return nil
	case object:
	default:
		return mismatch(n, object)
	}
	if s.to.Entries == nil {
		s.to.Entries = map[string]Setting[T]{}
	}
	s.to.From = n.from
	for _, e := range n.entries {
		v, err := s.decodeOne(e.value)
		if err != nil {
			return &entryError{key: e.key, from: e.value.from, err: err}
		}
		s.to.Entries[e.key] = Setting[T]{v, e.value.from}
	}
	return nil
}

// entryError is a fault in one entry of a map.
type entryError struct {
	key  string
	from Origin
	err  error
}

func (e *entryError) Error() string { return fmt.Sprintf("%s: %v", e.key, e.err) }
func (e *entryError) Unwrap() error { return e.err }

func (s *mapSlot[T]) parse(v string, first bool, from Origin) error {
	if s.to.Entries == nil || first && !s.keep {
		s.to.Entries = map[string]Setting[T]{}
	}
	s.to.From = from
	for pair := range strings.SplitSeq(v, ",") {
		if pair == "" {
			continue
		}
		key, value, ok := strings.Cut(pair, s.separator)
		if !ok {
			return fmt.Errorf("%s %w (name%svalue)", shown(pair), errNoPair, s.separator)
		}
		one, err := s.parseOne(strings.TrimSpace(value))
		if err != nil {
			return err
		}
		s.to.Entries[strings.TrimSpace(key)] = Setting[T]{one, from}
	}
	return nil
}

func (s *mapSlot[T]) tree() *node {
	if len(s.to.Entries) == 0 {
		return nil
	}
	out := &node{kind: object, from: s.to.From}
	for _, key := range s.to.Keys() {
		e := s.to.Entries[key]
		n := &node{kind: text, from: e.From}
		switch v := any(e.Value).(type) {
		case bool:
			n.kind, n.text = boolean, strconv.FormatBool(v)
		case string:
			n.text = v
		}
		out.entries = append(out.entries, entry{key, n})
	}
	return out
}

func (s *mapSlot[T]) fill()  {}
func (s *mapSlot[T]) reset() { *s.to = Map[T]{} }

type listSlot struct {
	to       *Setting[[]string]
	standard string
}

func (s *listSlot) decode(n *node) error {
	switch n.kind {
	case null:
		s.reset()
		return nil
	case list:
	default:
		return mismatch(n, list)
	}
	out := []string{}
	for _, item := range n.items {
		v, err := asText(item)
		if err != nil {
			return err
		}
		out = append(out, v)
	}
	*s.to = Setting[[]string]{out, n.from}
	return nil
}

func (s *listSlot) parse(v string, first bool, from Origin) error {
	var values []string
	if v != "" {
		var err error
		values, err = csv.NewReader(strings.NewReader(v)).Read()
		if errors.Is(err, io.EOF) {
			return errors.New("is an empty line")
		}
		if err != nil {
			return err
		}
	}
	if first {
		s.to.Value = []string{}
	}
	s.to.Value = append(s.to.Value, values...)
	s.to.From = from
	return nil
}

func (s *listSlot) tree() *node {
	if len(s.to.Value) == 0 {
		return nil
	}
	out := &node{kind: list, from: s.to.From}
	for _, v := range s.to.Value {
		out.items = append(out.items, &node{kind: text, text: v, from: s.to.From})
	}
	return out
}

func (s *listSlot) fill() {
	if s.to.Value == nil {
		*s.to = Setting[[]string]{[]string{s.standard}, standardOrigin}
	}
}

func (s *listSlot) reset() { *s.to = Setting[[]string]{} }

// resolve makes the paths of the file of --config absolute, as the kubelet does:
// relative to that file. It does not do so for drop-ins and flags.
func (s *Settings) resolve(folder string) {
	for _, path := range []*Setting[string]{&s.StaticPodPath, &s.PodLogsDir} {
		if path.Value != "" && !filepath.IsAbs(path.Value) {
			path.Value = filepath.Join(folder, path.Value)
		}
	}
}
