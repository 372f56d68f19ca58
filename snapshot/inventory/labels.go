package inventory

import (
	"strings"
	"time"
)

// Labels of containerd's collector (containerd, core/metadata/gc.go; CTD-80,
// CTD-94).
const (
	labelCollector = "containerd.io/gc."
	labelRoot      = "containerd.io/gc.root"
	labelExpire    = "containerd.io/gc.expire"
	labelFlat      = "containerd.io/gc.flat"

	labelContentRef  = "containerd.io/gc.ref.content"
	labelImageRef    = "containerd.io/gc.ref.image"
	labelSnapshotRef = "containerd.io/gc.ref.snapshot."

	labelContainerBack = "containerd.io/gc.bref.container"
	labelContentBack   = "containerd.io/gc.bref.content"
	labelImageBack     = "containerd.io/gc.bref.image"
	labelSnapshotBack  = "containerd.io/gc.bref.snapshot."

	labelSnapshotIf = "containerd.io/gc.cond.snapshot"
	labelUsedAt     = "containerd.io/gc.cond.value-usedat"
)

// Matters says whether a label has a meaning here; others need not be kept.
func Matters(label string) bool {
	switch label {
	case LabelPinned, LabelKind, LabelPodUID, LabelPodName:
		return true
	}
	return strings.HasPrefix(label, labelCollector) || strings.HasPrefix(label, LabelSource)
}

// nodeKind is what a node of the graph stands for.
type nodeKind uint8

const (
	nodeBlob nodeKind = iota
	nodeSnapshot
	nodeRecord
	nodeContainer
	nodeLease
	nodeIngest
	nodeSandbox
	// nodeBytes are the bytes of a blob that several namespaces, or an ingest,
	// have a part in.
	nodeBytes
	// nodeFlat is a blob or snapshot without what it refers to, for leases that
	// hold just these.
	nodeFlat
	// nodeName is a name that something has attached itself to.
	nodeName
)

// target is what a label names.
type target struct {
	kind nodeKind
	// snapshotter is set for nodeSnapshot.
	snapshotter, key string
}

// named says whether label is name, alone or with something after a dot or
// slash.
func named(label, name string) bool {
	rest, ok := strings.CutPrefix(label, name)
	return ok && (rest == "" || rest[0] == '.' || rest[0] == '/')
}

// snapshotterOf is the snapshotter's name at the end of a label that begins with
// prefix; after a slash anything may follow.
func snapshotterOf(label, prefix string) (name string, ok bool) {
	rest, ok := strings.CutPrefix(label, prefix)
	name, _, _ = strings.Cut(rest, "/")
	return name, ok
}

// refersTo is what an object with this label refers to.
func refersTo(label, value string) (target, bool) {
	if named(label, labelContentRef) {
		return target{kind: nodeBlob, key: value}, true
	}
	if named(label, labelImageRef) {
		return target{kind: nodeRecord, key: value}, true
	}
	if name, ok := snapshotterOf(label, labelSnapshotRef); ok {
		return target{kind: nodeSnapshot, snapshotter: name, key: value}, true
	}
	return target{}, false
}

// keptBy is what refers to an object with this label: a reference backwards.
func keptBy(label, value string) (target, bool) {
	if named(label, labelContainerBack) {
		return target{kind: nodeContainer, key: value}, true
	}
	if named(label, labelContentBack) {
		return target{kind: nodeBlob, key: value}, true
	}
	if named(label, labelImageBack) {
		return target{kind: nodeRecord, key: value}, true
	}
	if name, ok := snapshotterOf(label, labelSnapshotBack); ok {
		return target{kind: nodeSnapshot, snapshotter: name, key: value}, true
	}
	return target{}, false
}

// isRoot says whether an object keeps itself.
func isRoot(labels map[string]string) bool {
	for label := range labels {
		if strings.HasPrefix(label, labelRoot) {
			return true
		}
	}
	return false
}

// expired says whether a lease or image has passed its time. An unreadable time
// is none, as for containerd.
func expired(labels map[string]string, now time.Time) bool {
	value, ok := labels[labelExpire]
	if !ok {
		return false
	}
	at, err := time.Parse(time.RFC3339, value)
	return err == nil && now.After(at)
}

// condition is a reference to a snapshot that holds as long as that was used
// lately, or not lately.
type condition struct {
	snapshot target
	within   time.Duration
	younger  bool
}

// conditionsOf reads a label such as containerd.io/gc.cond.snapshot.NAME with
// the value usedat<24h|KEY. Several conditions are separated by commas, and any
// of them is enough; what can't be read is none.
func conditionsOf(label, value string) (out []condition) {
	rest, ok := strings.CutPrefix(label, labelSnapshotIf)
	if !ok {
		return nil
	}
	name, _, _ := strings.Cut(strings.TrimLeft(rest, "./"), "/")
	all, key, ok := strings.Cut(value, "|")
	if !ok {
		return nil
	}
	for text := range strings.SplitSeq(all, ",") {
		i := strings.IndexAny(text, "!<>=")
		if i < 0 || text[:i] != "usedat" || (text[i] != '<' && text[i] != '>') {
			continue
		}
		within, err := time.ParseDuration(text[i+1:])
		if err != nil {
			continue
		}
		out = append(out, condition{snapshot: target{kind: nodeSnapshot, snapshotter: name, key: key}, within: within, younger: text[i] == '<'})
	}
	return out
}

// meets says whether a snapshot with these labels fulfils a condition.
func (c condition) meets(labels map[string]string, now time.Time) bool {
	for label, value := range labels {
		if !strings.HasPrefix(label, labelUsedAt) {
			continue
		}
		at, err := time.Parse(time.RFC3339, value)
		if err != nil {
			continue
		}
		if age := now.Sub(at); (c.younger && age < c.within) || (!c.younger && age > c.within) {
			return true
		}
	}
	return false
}
