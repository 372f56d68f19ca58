package split

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
)

// maxMappings is how many lines a mapping of IDs may have: the kernel's limit
// (user_namespaces(7)).
const maxMappings = 340

// mapping is what the labels for a user namespace ask for.
type mapping struct {
	// uids and gids are in the form of overlayfs's callers: inside:outside:count,
	// separated by commas.
	uids, gids string
	// rootUID and rootGID are what 0 inside is outside.
	rootUID, rootGID uint32
}

// mappingOf reads the labels that containerd's client sets for user namespaces
// (CTD-30). Without any it returns nil. A pod can set these labels too (CTD-25),
// and their text ends up among mount options, so only what is surely a mapping
// passes.
func mappingOf(labels map[string]string) (*mapping, error) {
	uids, hasUIDs := labels[snapshots.LabelSnapshotUIDMapping]
	gids, hasGIDs := labels[snapshots.LabelSnapshotGIDMapping]
	if !hasUIDs && !hasGIDs {
		return nil, nil //nolint:nilnil // no mapping is not an error
	}
	var (
		m   mapping
		err error
	)
	if m.uids, m.rootUID, err = parseMapping(uids); err != nil {
		return nil, classed(errdefs.ErrInvalidArgument, "label %s %.64q: %w", snapshots.LabelSnapshotUIDMapping, uids, err)
	}
	if m.gids, m.rootGID, err = parseMapping(gids); err != nil {
		return nil, classed(errdefs.ErrInvalidArgument, "label %s %.64q: %w", snapshots.LabelSnapshotGIDMapping, gids, err)
	}
	return &m, nil
}

// parseMapping reads lines "inside:outside:count" and returns them in the plain
// form, and what 0 inside is outside.
func parseMapping(text string) (plain string, root uint32, err error) {
	type span struct{ inside, outside, count uint64 }
	var (
		spans   []span
		hasRoot bool
		out     []string
	)
	for line := range strings.SplitSeq(text, ",") {
		if len(spans) == maxMappings {
			return "", 0, fmt.Errorf("more than %d lines", maxMappings)
		}
		fields := strings.Split(line, ":")
		if len(fields) != 3 {
			return "", 0, fmt.Errorf("line %.32q is not inside:outside:count", line)
		}
		var n [3]uint64
		for i, f := range fields {
			if n[i], err = strconv.ParseUint(f, 10, 32); err != nil || strconv.FormatUint(n[i], 10) != f {
				return "", 0, fmt.Errorf("line %.32q: %.16q is not a number of 32 bits", line, f)
			}
		}
		s := span{n[0], n[1], n[2]}
		// The highest number stands for "none" (chown(2)).
		if s.count == 0 || s.inside+s.count > math.MaxUint32 || s.outside+s.count > math.MaxUint32 {
			return "", 0, fmt.Errorf("line %.32q is empty or goes beyond the highest ID", line)
		}
		for _, o := range spans {
			if s.inside < o.inside+o.count && o.inside < s.inside+s.count || s.outside < o.outside+o.count && o.outside < s.outside+s.count {
				return "", 0, fmt.Errorf("line %.32q overlaps another", line)
			}
		}
		if s.inside == 0 {
			root, hasRoot = uint32(s.outside), true
		}
		spans = append(spans, s)
		out = append(out, line)
	}
	if !hasRoot {
		return "", 0, fmt.Errorf("ID 0 is not mapped")
	}
	return strings.Join(out, ","), root, nil
}
