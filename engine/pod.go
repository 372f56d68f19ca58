package engine

import "k8s.io/apimachinery/pkg/api/resource"

// SystemCritical is the priority from which on a pod is never evicted.
const SystemCritical int32 = 2_000_000_000

// Pod is what decisions need of a pod's specification, as allocated (SYN-4).
type Pod struct {
	UID, Namespace, Name string
	// Owner is what would make the pod anew, such as "ReplicaSet shop/web";
	// empty if nothing would.
	Owner string `json:",omitempty"`
	// Priority is nil if none was set, which counts as 0.
	Priority *int32
	// Static and Mirror pods come from a file on the node.
	Static, Mirror bool
	// GraceSeconds is the pod's terminationGracePeriodSeconds; nil if unset.
	GraceSeconds *int64
	// Containers and InitContainers in the order of the specification.
	Containers, InitContainers []Container
	// Overhead is the runtime class's, on top of the containers'.
	Overhead Amounts
	// PodLevel says that cpu, memory or huge pages are requested or limited
	// for the pod as a whole, and PodLevelMemory is such a request of memory.
	PodLevel       bool
	PodLevelMemory *resource.Quantity
	Volumes        []Volume
}

// Container is what decisions need of a container's specification.
type Container struct {
	Name string
	// Sidecar is an init container that restarts always.
	Sidecar          bool
	Requests, Limits Amounts
}

// Amounts of resources. Nil means that nothing is said, which is not 0 (LSE-8).
type Amounts struct {
	EphemeralStorage, Memory *resource.Quantity
}

// VolumeKind says where a volume's bytes are and whose they are.
type VolumeKind string

// The kinds that decisions tell apart.
const (
	// EmptyDirDisk, ConfigMap and GitRepo are the local ephemeral volumes:
	// the pod's own bytes on nodefs (ACC-2).
	EmptyDirDisk VolumeKind = "emptyDir"
	ConfigMap    VolumeKind = "configMap"
	GitRepo      VolumeKind = "gitRepo"
	// HostPath is on the node, but not the pod's.
	HostPath VolumeKind = "hostPath"
	// EmptyDirMemory is an emptyDir in memory or huge pages.
	EmptyDirMemory VolumeKind = "emptyDir in memory"
	// OtherVolume is any other: secrets and tokens in memory, claims, CSI, images.
	OtherVolume VolumeKind = "other"
)

// Local says whether the kubelet ranks pods by volumes of this kind (RANK-5).
func (k VolumeKind) Local() bool { return k.Ephemeral() || k == HostPath }

// Ephemeral says whether volumes of this kind are part of a pod's ephemeral
// storage (ACC-2).
func (k VolumeKind) Ephemeral() bool {
	return k == EmptyDirDisk || k == ConfigMap || k == GitRepo
}

// Volume is what decisions need of a volume's specification.
type Volume struct {
	Name string
	Kind VolumeKind
	// SizeLimit is an emptyDir's; nil or 0 for none.
	SizeLimit *resource.Quantity
}

// Critical says that the pod is never evicted: it is static, a mirror, or of
// system-critical priority (SYN-33).
func (p *Pod) Critical() bool {
	return p.Static || p.Mirror || p.priority() >= SystemCritical
}

func (p *Pod) priority() int32 {
	if p.Priority == nil {
		return 0
	}
	return *p.Priority
}

// Request is what the pod requests of a resource, in its unit. Of resources
// that nobody can request it is 0 (RANK-15).
func (p *Pod) Request(r Resource) resource.Quantity { return p.request(r, false) }

// request is Request; keep is the option KeepRequests.
func (p *Pod) request(r Resource, keep bool) resource.Quantity {
	get := amountsOf(r)
	if get == nil {
		return resource.Quantity{}
	}
	var total resource.Quantity
	switch {
	case !p.PodLevel || keep && r == EphemeralStorage:
		total = p.aggregate(func(c *Container) *resource.Quantity { return get(&c.Requests) }).q
		// A request at pod level can only be one of memory: without PodLevel
		// there is none.
	case r == Memory && p.PodLevelMemory != nil:
		total = p.PodLevelMemory.DeepCopy()
	}
	if over := get(&p.Overhead); over != nil && !total.IsZero() { // RANK-18
		total.Add(*over)
	}
	return total
}

// Limit is the ephemeral storage that the pod's containers may use together,
// in bytes; nil if none of them says anything (LSE-6).
func (p *Pod) Limit() *resource.Quantity {
	if total := p.limit(); total.given {
		return &total.q
	}
	return nil
}

func (p *Pod) limit() sum {
	total := p.aggregate(func(c *Container) *resource.Quantity { return c.Limits.EphemeralStorage })
	if p.Overhead.EphemeralStorage != nil && !total.q.IsZero() {
		total.q.Add(*p.Overhead.EphemeralStorage)
	}
	return total
}

func amountsOf(r Resource) func(*Amounts) *resource.Quantity {
	switch r {
	case EphemeralStorage:
		return func(a *Amounts) *resource.Quantity { return a.EphemeralStorage }
	case Memory:
		return func(a *Amounts) *resource.Quantity { return a.Memory }
	default:
		return nil
	}
}

// aggregate is what a pod needs of something at most at any one time: init
// containers run one after the other before the regular ones, sidecars from
// their place on for good (RANK-17). Nothing is given if no container says
// anything.
func (p *Pod) aggregate(amount func(*Container) *resource.Quantity) sum {
	var running, starting, sidecars sum
	for i := range p.Containers {
		running.add(amount(&p.Containers[i]))
	}
	for i := range p.InitContainers {
		c := &p.InitContainers[i]
		now := amount(c)
		if c.Sidecar {
			running.add(now)
			sidecars.add(now)
			starting = larger(starting, sidecars)
		} else {
			both := sidecars.clone()
			both.add(now)
			starting = larger(starting, both)
		}
	}
	return larger(running, starting)
}

// sum is an amount; the zero sum is nothing at all, which is not 0.
type sum struct {
	q     resource.Quantity
	given bool
}

// add adds an amount; nil is nothing at all.
func (s *sum) add(q *resource.Quantity) {
	switch {
	case q == nil:
	case s.given:
		s.q.Add(*q)
	default:
		s.q, s.given = q.DeepCopy(), true
	}
}

func (s *sum) clone() sum { return sum{q: s.q.DeepCopy(), given: s.given} }

// larger is a copy of the larger one, nothing being less than anything.
func larger(a, b sum) sum {
	if b.given && (!a.given || a.q.Cmp(b.q) < 0) {
		return b.clone()
	}
	return a
}

// compare is a.Cmp(*b), which may rewrite a: what is compared here belongs to
// others.
func compare(a, b *resource.Quantity) int {
	q := *a
	return q.Cmp(*b)
}
