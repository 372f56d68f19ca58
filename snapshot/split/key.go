package split

import (
	"regexp"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"

	"github.com/cleave-cri/cleave/snapshot/split/fence"
)

// maxKeyBytes is the longest key that is taken; the database could hold 32 KiB.
const maxKeyBytes = 8 << 10

// labelParentChain is what containerd's unpacker sets on every layer but the
// lowest (CTD-24, CTD-34).
const labelParentChain = "containerd.io/snapshot/parent-chain-id"

// scopedKey is how containerd's metadata layer names snapshots to a backend:
// namespace, number, the caller's key (CTD-23).
var scopedKey = regexp.MustCompile(`(?s)^([^/]+)/[0-9]+/(.*)$`)

// extractionKey is the caller's key of a layer being unpacked (CTD-24). No name
// of a container can look so: it has no space.
var extractionKey = regexp.MustCompile(`^extract-[^ /]+ (sha256:[0-9a-f]{64})$`)

// splitKey parts a key. A key that has no namespace is its own caller's key.
func splitKey(key string) (namespace, own string) {
	m := scopedKey.FindStringSubmatch(key)
	if m == nil {
		return "", key
	}
	return m[1], m[2]
}

// checkKey refuses keys that are not served.
func checkKey(key string, namespaces []string) error {
	if key == "" || len(key) > maxKeyBytes {
		return classed(errdefs.ErrInvalidArgument, "a key has 1 to %d bytes, this one %d", maxKeyBytes, len(key))
	}
	if len(namespaces) == 0 {
		return nil
	}
	if namespace, _ := splitKey(key); !slices.Contains(namespaces, namespace) {
		return classed(errdefs.ErrInvalidArgument, "key %q is of the namespace %q; this snapshotter serves only %s: add it to its configuration or use another snapshotter",
			key, namespace, strings.Join(namespaces, ", "))
	}
	return nil
}

// placeOf decides on which root a new snapshot goes, by the shape of its key
// (CTD-26). Pods and images can set labels (CTD-25), so a label never moves
// anything to the image root: the one looked at must agree with the key.
func placeOf(kind snapshots.Kind, key string, labels map[string]string) fence.Role {
	_, own := splitKey(key)
	m := extractionKey.FindStringSubmatch(own)
	if kind == snapshots.KindActive && m != nil && labels[snapshots.LabelSnapshotRef] == m[1] {
		return fence.Image
	}
	return fence.Container
}
