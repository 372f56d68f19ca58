package agent

import (
	"context"
	"errors"
	"io/fs"
	"path/filepath"
	"time"

	"github.com/cleave-cri/cleave/agent/du"
	"github.com/cleave-cri/cleave/engine"
)

const (
	// remainsWait is how long what is left of a pod is looked at: as long as its space is waited for.
	remainsWait = 30 * time.Second
	// remainsEvery is the time between two looks.
	remainsEvery = 500 * time.Millisecond
	// mostRemains bounds one look at a folder: with more entries it counts as not empty.
	mostRemains = 1000
)

// comesBack is how long the space of a file that is deleted may take until statfs counts it, by the filesystem's type. ext4 counts it
// before unlink returns (fs/ext4/mballoc.c: ext4_free_blocks adds to s_freeclusters_counter); xfs frees inodes in the background
// (fs/xfs/xfs_icache.c: inodegc). Others, such as btrfs, may take as long as a transaction, and are not known here.
var comesBack = map[string]time.Duration{"ext4": 0, "xfs": 3 * time.Second}

// remains are the folders that a pod had when it was told to go.
type remains struct {
	// paths are nil while they are not known.
	paths []string
	// settles is what comesBack says of their filesystem.
	settles time.Duration
}

// remainsOf are those of a pod that goes for a signal; nothing is known if one of its folders is not, or of what type their filesystem is.
func (d *decisions) remainsOf(e engine.Eviction) remains {
	role := roleOf(engine.Signal(e.Cause))
	f, err := d.free(role)
	if err != nil {
		return remains{}
	}
	settles, ok := comesBack[f.Type]
	if !ok {
		return remains{}
	}
	return remains{paths: foldersOf(d.observer.surveyed.Load(), e), settles: settles}
}

// foldersOf lists the folders in which a pod has what comes free when it goes: its layers, logs, and the volumes that are its own. Not those
// on which something is mounted, which is not deleted or is no disk. It lists none if they are not all known.
func foldersOf(s *survey, e engine.Eviction) (paths []string) {
	who, err := podNamed(s, du.Request{Namespace: e.Namespace, Pod: e.UID})
	if err != nil || who.uid != e.UID || len(who.containers) == 0 {
		return nil
	}
	uppers := map[string]string{} // by container
	for _, l := range s.layers {
		uppers[l.layer.ContainerID] = l.folders.Upper
	}
	for _, c := range who.containers {
		if uppers[c.ID] == "" {
			return nil
		}
		paths = append(paths, uppers[c.ID])
	}
	for _, l := range s.folders.Logs {
		if l.UID == who.uid {
			paths = append(paths, l.Path)
		}
	}
	for _, p := range s.folders.Pods {
		for _, v := range p.Volumes {
			if p.UID == who.uid && !v.Mounted {
				paths = append(paths, v.Path)
			}
		}
	}
	return paths
}

// gone waits until no file is left in any of the folders and the space of those that were has come back. It is false where that is not
// known, or did not happen in time: then it may still come.
func (r remains) gone(ctx context.Context) bool {
	if len(r.paths) == 0 {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, remainsWait)
	defer cancel()
	for {
		answer := make(chan bool, 1)
		go func() { answer <- emptied(r.paths) }() // ends when the filesystem answers; there is one at most for an eviction
		select {
		case empty := <-answer:
			switch {
			case empty:
				return sleep(ctx, r.settles, nil)
			case !sleep(ctx, remainsEvery, nil):
				return false
			}
		case <-ctx.Done():
			return false
		}
	}
}

// emptied says whether there is no file in any of the folders. A folder that can't be read is not empty.
func emptied(paths []string) bool {
	for _, path := range paths {
		entries := 0
		err := filepath.WalkDir(path, func(_ string, e fs.DirEntry, err error) error {
			if entries++; err != nil {
				return err
			}
			if !e.IsDir() || entries > mostRemains {
				return errFile
			}
			return nil
		})
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return false
		}
	}
	return true
}

// errFile ends a look at a folder.
var errFile = errors.New("it is not empty")
