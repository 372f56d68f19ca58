package fence

import (
	"errors"
	"fmt"

	"github.com/cleave-cri/cleave/snapshot/split/rootdir"
)

// ErrBusy says that another snapshotter, or a check, works on a root.
var ErrBusy = errors.New("another snapshotter works on the root")

// Lock makes sure that nobody else works on a root, until the root is closed. The
// lock beside the database would not do: a copy of the database at another path
// has another one. The error is an [Unfit].
func Lock(role Role, root *rootdir.Root) error {
	err := root.Lock()
	switch {
	case err == nil:
		return nil
	case errors.Is(err, rootdir.ErrLocked):
		return &Unfit{
			What:   fmt.Sprintf("another snapshotter or check works on the %s root %s, by another database", role, root.Path()),
			Remedy: "find it with `fuser -v` on the root and stop it; one pair of roots has one database", busy: true,
		}
	case errors.Is(err, errors.ErrUnsupported):
		return &Unfit{
			What:   fmt.Sprintf("the filesystem of the %s root %s has no locks: %v", role, root.Path(), err),
			Remedy: "use a local filesystem such as ext4 or xfs",
		}
	}
	return fmt.Errorf("the %s root: %w", role, err)
}
