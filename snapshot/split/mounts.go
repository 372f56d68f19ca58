package split

import (
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
)

// Names below a root. An ID's folder holds the upper folder and, for what can be
// written to, overlayfs's work folder. The upper folder's name is the one that
// cAdvisor looks for (CTD-135).
const (
	snapshotsDir = "snapshots"
	upperName    = "diff"
	workName     = "work"
	// emptyName is a folder that stays empty: the lower folder of a layer that
	// is unpacked before its parent is known.
	emptyName = "empty"
	// temporaryPrefix begins the names of folders that have no ID yet.
	temporaryPrefix = "new-"
)

// layers is what the mounts of a snapshot are made of.
type layers struct {
	kind snapshots.Kind
	// upper and work are the snapshot's own folders.
	upper, work string
	// lowers are the upper folders of the parents, nearest first.
	lowers []string
	// empty is the empty lower folder if the snapshot is a layer that is
	// unpacked without its parent, else "".
	empty string
	ids   *mapping
	// options are added to an overlay's.
	options []string
}

// mounts gives the mounts as containerd's overlayfs snapshotter would (CTD-22),
// with one difference: a layer that is unpacked without its parent is an
// overlay on an empty folder. On a bind mount containerd would lose all its
// whiteouts (CTD-34).
func (l layers) mounts() []mount.Mount {
	var options []string
	if l.ids != nil {
		options = append(options, "uidmap="+l.ids.uids, "gidmap="+l.ids.gids)
	}
	lowers := l.lowers
	if l.empty != "" && l.kind == snapshots.KindActive && len(lowers) == 0 {
		lowers = []string{l.empty}
	}
	switch {
	case len(lowers) == 0:
		access := "rw"
		if l.kind == snapshots.KindView {
			access = "ro"
		}
		return []mount.Mount{{Type: "bind", Source: l.upper, Options: append(options, access, "rbind")}}
	case l.kind == snapshots.KindView && len(lowers) == 1:
		return []mount.Mount{{Type: "bind", Source: lowers[0], Options: append(options, "ro", "rbind")}}
	case l.kind == snapshots.KindActive:
		options = append(options, "workdir="+l.work, "upperdir="+l.upper)
	}
	options = append(options, "lowerdir="+strings.Join(lowers, ":"))
	return []mount.Mount{{Type: "overlay", Source: "overlay", Options: slices.Concat(options, l.options)}}
}

// idDir is an ID's folder, relative to its root.
func idDir(id string) string { return filepath.Join(snapshotsDir, id) }
