// Package allocatable explains what pods can request of a node and why: capacity less what is reserved and what evictions keep
// free (NAL-1), compared with what the node publishes and with the limits that the kernel really has. It is pure: values in, a
// report out. It imports nothing of ours but its sibling's values; agent gathers the facts.
package allocatable

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
)

// Setting is a value of the kubelet's as text, and where it stands.
type Setting struct{ Text, From string }

// Settings are those of the kubelet that count.
type Settings struct {
	// KubeReserved and SystemReserved map a resource to a quantity.
	KubeReserved, SystemReserved map[string]Setting
	// Hard is evictionHard: signal to threshold.
	Hard map[string]Setting
	// IgnoreEviction is --experimental-allocatable-ignore-eviction (NAL-4).
	IgnoreEviction bool
	// Enforce is enforceNodeAllocatable.
	Enforce []string
	// KubeCgroup and SystemCgroup are kubeReservedCgroup and systemReservedCgroup; empty if not set.
	KubeCgroup, SystemCgroup string
}

// Filesystem is one of the node's.
type Filesystem struct {
	// Roles are what is on it: nodefs, imagefs, containerfs.
	Roles []string
	// Device names it.
	Device        string
	CapacityBytes uint64
}

// Amounts of a node, in bytes, as they are published. Nil is not known.
type Amounts struct {
	MemoryBytes, EphemeralStorageBytes *int64
}

// Cgroup is one as the kernel has it.
type Cgroup struct {
	// Path is below the hierarchy of memory.
	Path string `json:"path"`
	// Exists is nil if that could not be found out.
	Exists *bool `json:"exists,omitempty"`
	// LimitBytes is its limit of memory, nil if it has none.
	LimitBytes *uint64 `json:"limitBytes,omitempty"`
	// UsedBytes is its working set, nil if that is not known.
	UsedBytes *uint64 `json:"usedBytes,omitempty"`
	// Problem says why something is not known.
	Problem string `json:"problem,omitempty"`
}

// Input are all facts. What is nil is not known, and nothing is concluded from it.
type Input struct {
	Settings Settings
	// MemoryBytes is the machine's, of which HugePagesBytes are huge pages.
	MemoryBytes, HugePagesBytes uint64
	Filesystems                 []Filesystem
	// Capacity and Published are what the node publishes as status.capacity and status.allocatable.
	Capacity, Published *Amounts
	// Pods is the cgroup of all pods.
	Pods *Cgroup
	// KubeCgroup and SystemCgroup are those that the settings name.
	KubeCgroup, SystemCgroup *Cgroup
	// KubeUsedBytes and SystemUsedBytes are the working sets of the kubelet with the runtime, and of other daemons.
	KubeUsedBytes, SystemUsedBytes *uint64
}

// Term is one that is taken off.
type Term struct {
	Name string `json:"name"`
	// Bytes is rounded up.
	Bytes int64 `json:"bytes"`
	// exact counts: an amount may have parts of a byte, as the kubelet reckons with them.
	exact resource.Quantity
	// From says where it is set, with its text.
	From string `json:"from,omitempty"`
}

// Resource is one that pods can request.
type Resource struct {
	// Name is memory or ephemeral-storage, or "filesystem" and its roles.
	Name          string `json:"name"`
	CapacityBytes int64  `json:"capacityBytes"`
	Terms         []Term `json:"terms"`
	// AllocatableBytes is what is left, never less than 0 (NAL-1). WithheldBytes is all that was taken off.
	AllocatableBytes int64 `json:"allocatableBytes"`
	WithheldBytes    int64 `json:"withheldBytes"`
	// Clamped says that more is reserved than there is.
	Clamped bool `json:"clamped,omitempty"`
	// PublishedBytes is what the node publishes, nil if it was not compared.
	PublishedBytes *int64 `json:"publishedBytes,omitempty"`
	// EnforcedBytes is the limit that the kubelet gives the pods' cgroup: for memory, and only if pods are enforced.
	EnforcedBytes *int64 `json:"enforcedBytes,omitempty"`
	// Notes explain what is surprising.
	Notes []string `json:"notes,omitempty"`
}

// Finding is something that somebody should look at.
type Finding struct {
	Text   string `json:"text"`
	Remedy string `json:"remedy,omitempty"`
}

// Report is what there is to say.
type Report struct {
	Resources []Resource `json:"resources"`
	// Cgroups are the pods', the kubelet's and the system's, as far as they are known.
	Cgroups  map[string]Cgroup `json:"cgroups,omitempty"`
	Findings []Finding         `json:"findings,omitempty"`
	// Unknown lists what could not be compared, and why.
	Unknown []string `json:"unknown,omitempty"`
}

func (r *Report) find(remedy, format string, args ...any) {
	r.Findings = append(r.Findings, Finding{Text: fmt.Sprintf(format, args...), Remedy: remedy})
}

// The signals of evictionHard that count for what a node publishes (NAL-2).
const (
	memorySignal = "memory.available"
	nodefsSignal = "nodefs.available"
	memory       = "memory"
	storage      = "ephemeral-storage"
)

// Explain makes the report. An error is a setting with which no kubelet starts.
func Explain(in Input) (Report, error) {
	r := Report{Cgroups: map[string]Cgroup{}}
	calc := calculator{in: in}
	mem := calc.node(memory, int64(min(in.MemoryBytes, math.MaxInt64)), memorySignal)
	if in.HugePagesBytes > 0 {
		mem.take(term("huge pages", *resource.NewQuantity(int64(min(in.HugePagesBytes, math.MaxInt64)), resource.BinarySI), "the kernel's pool of huge pages"))
	}
	mem.finish()
	calc.enforced(&mem)
	r.Resources = append(r.Resources, mem)
	node := slices.IndexFunc(in.Filesystems, func(f Filesystem) bool { return slices.Contains(f.Roles, "nodefs") })
	if node < 0 {
		r.Unknown = append(r.Unknown, "which filesystem is nodefs is not known: ephemeral storage is left out")
	} else {
		disk := calc.node(storage, int64(min(in.Filesystems[node].CapacityBytes, math.MaxInt64)), nodefsSignal)
		disk.finish()
		disk.note("nothing in the kernel enforces it (NAL-7): the kubelet evicts pods over their limits")
		if slices.ContainsFunc(in.Filesystems, func(f Filesystem) bool { return !slices.Contains(f.Roles, "nodefs") }) {
			disk.note("it is of nodefs alone: another filesystem adds nothing, although what pods write there counts against their requests (NAL-5, GAP-40)")
		}
		r.Resources = append(r.Resources, disk)
		for _, f := range in.Filesystems {
			r.Resources = append(r.Resources, calc.filesystem(f))
		}
	}
	r.compare(in)
	r.limits(in)
	r.tokens(in)
	r.daemons(in)
	return r, errors.Join(calc.faults...)
}

// calculator computes resources and collects what is wrong in settings.
type calculator struct {
	in     Input
	faults []error
}

// node is a resource of the whole node. Its last term is the hard threshold's.
func (c *calculator) node(name string, capacity int64, signal string) Resource {
	r := Resource{Name: name, CapacityBytes: capacity}
	c.reserved(&r, name)
	if _, ok := c.in.Settings.Hard[signal]; ok && c.in.Settings.IgnoreEviction {
		r.note("evictions keep nothing back: --experimental-allocatable-ignore-eviction is set (NAL-4)")
	} else if ok {
		r.take(c.threshold(signal, capacity))
	}
	return r
}

func (c *calculator) reserved(r *Resource, name string) {
	for _, set := range []struct {
		name string
		from map[string]Setting
	}{{"kube-reserved", c.in.Settings.KubeReserved}, {"system-reserved", c.in.Settings.SystemReserved}} {
		s, ok := set.from[name]
		if !ok {
			continue
		}
		q, err := parseQuantity(s.Text)
		if err != nil || q.Sign() < 0 {
			c.faults = append(c.faults, fmt.Errorf("%s of %s is %q (%s), which is no amount; no kubelet starts with it (NAL-10)", set.name, name, s.Text, s.From))
			continue
		}
		r.take(term(set.name, q, fmt.Sprintf("%s (%s)", s.Text, s.From)))
	}
}

func (c *calculator) threshold(signal string, capacity int64) Term {
	s := c.in.Settings.Hard[signal]
	amount, err := thresholdAmount(s.Text, capacity)
	if err != nil {
		c.faults = append(c.faults, fmt.Errorf("evictionHard[%s] is %q (%s): %w", signal, s.Text, s.From, err))
	}
	return term("hard eviction threshold", amount, fmt.Sprintf("%s<%s (%s)", signal, s.Text, s.From))
}

// filesystem is one disk: reservations count on nodefs, and the highest of the thresholds of what is on it. It is published nowhere.
func (c *calculator) filesystem(f Filesystem) Resource {
	capacity := int64(min(f.CapacityBytes, math.MaxInt64))
	r := Resource{Name: "filesystem of " + strings.Join(f.Roles, ", ") + " (" + f.Device + ")", CapacityBytes: capacity}
	if slices.Contains(f.Roles, "nodefs") {
		quiet := calculator{in: c.in} // the same faults were found before
		quiet.reserved(&r, storage)
	}
	var highest *Term
	for _, role := range f.Roles {
		signal := role + ".available"
		if _, ok := c.in.Settings.Hard[signal]; !ok || role == "containerfs" {
			continue // the kubelet replaces that of containerfs by another filesystem's (THR-20)
		}
		if t := c.threshold(signal, capacity); highest == nil || t.Bytes > highest.Bytes {
			highest = &t
		}
	}
	if highest != nil {
		r.take(*highest)
	} else {
		r.note("no hard threshold keeps anything free here")
	}
	r.finish()
	return r
}

func term(name string, amount resource.Quantity, from string) Term {
	return Term{Name: name, Bytes: amount.Value(), exact: amount, From: from}
}

func (r *Resource) take(t Term) { r.Terms = append(r.Terms, t) }

func (r *Resource) note(format string, args ...any) {
	r.Notes = append(r.Notes, fmt.Sprintf(format, args...))
}

// less is the capacity without the terms that count, down to 0; short says that they were more.
func (r *Resource) less(counts func(Term) bool) (left int64, short bool) {
	q := resource.NewQuantity(r.CapacityBytes, resource.BinarySI)
	for _, t := range r.Terms {
		if counts(t) {
			q.Sub(t.exact)
		}
	}
	if q.Sign() < 0 {
		return 0, true
	}
	return q.Value(), false
}

// finish subtracts.
func (r *Resource) finish() {
	var all resource.Quantity
	for _, t := range r.Terms {
		all.Add(t.exact)
	}
	r.WithheldBytes = all.Value()
	r.AllocatableBytes, r.Clamped = r.less(func(Term) bool { return true })
	if r.Clamped {
		r.note("more is withheld than there is: a kubelet does not start with that (NAL-6), and one that runs publishes 0")
	}
}

// enforced is the limit of the pods' cgroup: evictions are to happen before it is reached, so their part is not withheld (NAL-7).
// Huge pages are not, either: they are no part of what the cgroup counts.
func (c *calculator) enforced(r *Resource) {
	if !slices.Contains(c.in.Settings.Enforce, "pods") {
		return
	}
	limit, _ := r.less(func(t Term) bool { return t.Name == "kube-reserved" || t.Name == "system-reserved" })
	r.EnforcedBytes = &limit
	for _, t := range r.Terms {
		if t.Name == "hard eviction threshold" && t.Bytes > 0 {
			r.note("the pods' cgroup is limited to %s, not to %s: the kubelet leaves the part of evictions out there (NAL-7). When all pods together use more than %s it evicts (THR-19), and at %s the kernel kills (NAL-8)",
				gib(limit), gib(r.AllocatableBytes), gib(max(0, limit-t.Bytes)), gib(limit))
		}
	}
}

// compare holds the figures against what the node publishes.
func (r *Report) compare(in Input) {
	if in.Published == nil {
		r.Unknown = append(r.Unknown, "what the node publishes is not known")
		return
	}
	for i := range r.Resources {
		res := &r.Resources[i]
		var published, capacity *int64
		switch res.Name {
		case memory:
			published = in.Published.MemoryBytes
			if in.Capacity != nil {
				capacity = in.Capacity.MemoryBytes
			}
		case storage:
			published = in.Published.EphemeralStorageBytes
			if in.Capacity != nil {
				capacity = in.Capacity.EphemeralStorageBytes
			}
		default:
			continue
		}
		if published == nil {
			r.Unknown = append(r.Unknown, "the node publishes no "+res.Name)
			continue
		}
		res.PublishedBytes = published
		switch {
		case *published == res.AllocatableBytes:
		case capacity != nil && *capacity != res.CapacityBytes:
			why := "the machine has changed since the kubelet was started"
			if res.Name == storage {
				why = "the kubelet reads the size of nodefs once, when it starts (NAL-5)"
			}
			r.find("restart the kubelet", "the node publishes a capacity of %s of %s, and there are %s: %s", exact(*capacity), res.Name, exact(res.CapacityBytes), why)
		default:
			r.find("restart the kubelet; if that does not help, look who else changes the node's status",
				"the node publishes %s of allocatable %s, and its settings make %s: it runs with others, or somebody else writes its status", exact(*published), res.Name, exact(res.AllocatableBytes))
		}
	}
}

// limits holds the limit of the pods' cgroup against what the kubelet would set.
func (r *Report) limits(in Input) {
	if in.Pods == nil {
		r.Unknown = append(r.Unknown, "the pods' cgroup was not looked at")
		return
	}
	r.Cgroups["pods"] = *in.Pods
	want := r.Resources[0].EnforcedBytes
	got := in.Pods.LimitBytes
	switch {
	case in.Pods.Problem != "" || in.Pods.Exists == nil:
		r.Unknown = append(r.Unknown, fmt.Sprintf("the limit of cgroup %s is not known: %s", in.Pods.Path, in.Pods.Problem))
	case !*in.Pods.Exists:
		r.Unknown = append(r.Unknown, fmt.Sprintf("there is no cgroup %s: the kubelet has no pods here, or its cgroups are elsewhere", in.Pods.Path))
	case want == nil && got != nil:
		r.find("", "the pods' cgroup %s is limited to %s, although enforceNodeAllocatable does not name pods: a limit of earlier settings stays until somebody takes it away", in.Pods.Path, exact(int64(min(*got, math.MaxInt64))))
	case want != nil && got == nil:
		r.find("restart the kubelet", "the pods' cgroup %s has no limit, and the kubelet's settings make one of %s", in.Pods.Path, exact(*want))
	case want != nil && !near(*got, *want):
		r.find("restart the kubelet", "the pods' cgroup %s is limited to %s, and the kubelet's settings make that %s", in.Pods.Path, exact(int64(min(*got, math.MaxInt64))), exact(*want))
	}
}

// pageBytes is the largest page size of a platform that cleave is built for: the kernel rounds limits down to pages.
const pageBytes = 64 << 10

func near(got uint64, want int64) bool {
	return got <= math.MaxInt64 && int64(got) <= want && want-int64(got) < pageBytes
}

// tokens checks enforceNodeAllocatable.
func (r *Report) tokens(in Input) {
	s := in.Settings
	has := func(token string) bool { return slices.Contains(s.Enforce, token) }
	if has("none") && len(s.Enforce) > 1 {
		r.find("leave either out", "enforceNodeAllocatable names none together with others: no kubelet starts with that")
	}
	if !has("pods") {
		r.find("add pods to enforceNodeAllocatable", "enforceNodeAllocatable does not name pods: nothing but evictions keeps all pods together from taking the memory that is reserved")
	}
	for _, d := range []struct {
		token, setting, path string
		cgroup               *Cgroup
		reserved             map[string]Setting
	}{
		{"kube-reserved", "kubeReservedCgroup", s.KubeCgroup, in.KubeCgroup, s.KubeReserved},
		{"system-reserved", "systemReservedCgroup", s.SystemCgroup, in.SystemCgroup, s.SystemReserved},
	} {
		if d.cgroup != nil {
			r.Cgroups[d.token] = *d.cgroup
		}
		whole, compressible := has(d.token), has(d.token+"-compressible")
		if !whole && !compressible {
			continue
		}
		name := d.token
		if !whole {
			name += "-compressible"
		}
		if whole && compressible {
			r.find("leave either out", "enforceNodeAllocatable names %s and %s-compressible: no kubelet starts with both", d.token, d.token)
		}
		switch {
		case d.path == "":
			r.find("set "+d.setting, "enforceNodeAllocatable names %s, and %s is not set: no kubelet starts with that", name, d.setting)
		case d.cgroup != nil && d.cgroup.Exists != nil && !*d.cgroup.Exists:
			r.find("make it before the kubelet starts, as a slice of systemd", "enforceNodeAllocatable names %s, and there is no cgroup %s: the kubelet does not make it and does not start without", name, d.cgroup.Path)
		}
		if whole {
			remedy := "enforce pods alone, or " + d.token + "-compressible; enforce " + d.token + " only after the daemons' use was watched for long"
			_, memoryToo := d.reserved[memory]
			text := fmt.Sprintf("%s is enforced: what is reserved becomes the most that these daemons get. Under load they starve for CPU", d.token)
			if memoryToo {
				text += ", and when they need more memory the kernel kills one of them, which may be the kubelet or the runtime"
			}
			r.find(remedy, "%s", text)
		}
	}
}

// daemons holds the memory that daemons use against what is reserved for them.
func (r *Report) daemons(in Input) {
	for _, d := range []struct {
		what, setting string
		used          *uint64
		reserved      map[string]Setting
	}{
		{"the kubelet and the runtime", "kube-reserved", in.KubeUsedBytes, in.Settings.KubeReserved},
		{"other daemons", "system-reserved", in.SystemUsedBytes, in.Settings.SystemReserved},
	} {
		if d.used == nil {
			r.Unknown = append(r.Unknown, fmt.Sprintf("what %s use of memory was not measured", d.what))
			continue
		}
		var reserved int64
		if s, ok := d.reserved[memory]; ok {
			q, err := parseQuantity(s.Text)
			if err != nil {
				continue // it is a fault
			}
			reserved = q.Value()
		}
		if used := int64(min(*d.used, math.MaxInt64)); used > reserved {
			r.find(fmt.Sprintf("set %s of memory to %s or more", d.setting, roundUp(used)),
				"%s use %s of memory now, and %s is %s: what they use more is taken from what pods were promised", d.what, exact(used), d.setting, exact(reserved))
		}
	}
}

// roundUp is an amount that leaves some room, in whole 64 Mi.
func roundUp(bytes int64) string {
	const step = 64 << 20
	if bytes > math.MaxInt64/2 {
		return exact(bytes)
	}
	return fmt.Sprintf("%dMi", (bytes+bytes/8+step-1)/step*step>>20)
}

// gib writes bytes for people, as the platform's documentation does: "28.9Gi".
func gib(bytes int64) string {
	text := strconv.FormatFloat(float64(bytes)/(1<<30), 'f', 1, 64)
	return strings.TrimSuffix(text, ".0") + "Gi"
}

// exact adds the bytes.
func exact(bytes int64) string { return fmt.Sprintf("%s (%d bytes)", gib(bytes), bytes) }

var (
	errThreshold = errors.New("it is neither a percentage from 0% to 100% nor an amount above 0; no kubelet starts with it")
	// plain is what is given to the library of quantities, which thinks for minutes about exponents of many digits.
	plain = regexp.MustCompile(`^[+-]?[0-9.]{1,40}([numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{1,3})?$`)
)

func parseQuantity(text string) (resource.Quantity, error) {
	if !plain.MatchString(text) {
		return resource.Quantity{}, fmt.Errorf("%q is no amount", text)
	}
	return resource.ParseQuantity(text)
}

// thresholdAmount is what a threshold comes to: a share has 32 bits only, as the kubelet's, and the loss shows (NAL-3, THR-8).
func thresholdAmount(text string, capacity int64) (resource.Quantity, error) {
	var nothing resource.Quantity
	share, ok := strings.CutSuffix(text, "%")
	if !ok {
		q, err := parseQuantity(text)
		if err != nil || q.Sign() <= 0 {
			return nothing, errThreshold
		}
		return q, nil
	}
	if text == "0%" || text == "100%" {
		return nothing, nil // dropped (THR-5)
	}
	percent, err := strconv.ParseFloat(share, 32)
	if err != nil || percent < 0 || float32(percent)/100 > 1 || math.IsNaN(percent) {
		return nothing, errThreshold
	}
	return *resource.NewQuantity(int64(float64(capacity)*float64(float32(percent)/100)), resource.BinarySI), nil
}

// Names are the cgroups of a report in order.
func (r Report) Names() []string { return slices.Sorted(maps.Keys(r.Cgroups)) }
