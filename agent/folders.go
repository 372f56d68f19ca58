package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/cleave-cri/cleave/agent/owners"
	"github.com/cleave-cri/cleave/fsstats"
)

// foldersTimeout is how long the folders of pods may take to list. Where they take
// longer the filesystem hangs, and the last list stays.
const foldersTimeout = 2 * time.Second

// folderBook lists the folders of pods, at most one list at a time. One goroutine
// uses it.
type folderBook struct {
	mounts func() ([]fsstats.Mount, error)
	last   owners.Folders
	// running gives the result of a list that is under way, nil while none is.
	running chan listed
	since   time.Time
}

type listed struct {
	folders owners.Folders
	err     error
}

// list lists the folders below the kubelet's root and the folder of logs. With an
// error the list is the last good one.
func (b *folderBook) list(ctx context.Context, kubeletRoot, logRoot string, local map[fsstats.Device]bool) (owners.Folders, error) {
	if b.running == nil {
		b.running, b.since = make(chan listed, 1), time.Now()
		results := b.running
		go func() { // ends when the filesystem answers; there is one at most
			folders, err := listFolders(kubeletRoot, logRoot, local, b.mounts)
			results <- listed{folders, err}
		}()
	}
	timer := time.NewTimer(foldersTimeout)
	defer timer.Stop()
	select {
	case r := <-b.running:
		b.running = nil
		if r.err != nil {
			return b.last, r.err
		}
		b.last = r.folders
		return b.last, nil
	case <-timer.C:
		return b.last, fmt.Errorf("list the folders of pods below %s and %s: %w since %s", kubeletRoot, logRoot,
			fsstats.ErrNoAnswer, b.since.UTC().Format("2006-01-02 15:04:05Z"))
	case <-ctx.Done():
		return b.last, ctx.Err()
	}
}

// listFolders lists the folders of pods. An empty root is not looked at. local are
// the filesystems on which folders are that volumes may be made of.
func listFolders(kubeletRoot, logRoot string, local map[fsstats.Device]bool, mounts func() ([]fsstats.Mount, error)) (owners.Folders, error) {
	f := owners.Folders{KubeletRoot: kubeletRoot, LogRoot: logRoot}
	table, err := mounts()
	if err != nil {
		return f, err
	}
	mounted := mountBook{local: local, all: table, at: map[string]fsstats.Mount{}}
	for _, m := range table {
		mounted.at[m.Mountpoint] = m // the last one covers those before
	}
	if kubeletRoot != "" {
		pods := filepath.Join(kubeletRoot, "pods")
		uids, err := foldersIn(pods)
		if err != nil {
			return f, err
		}
		for _, uid := range uids {
			p, err := podFolder(filepath.Join(pods, uid), uid, mounted)
			if err != nil {
				return f, err
			}
			f.Pods = append(f.Pods, p)
		}
	}
	if logRoot == "" || logRoot == kubeletRoot {
		return f, nil
	}
	names, err := foldersIn(logRoot)
	if err != nil {
		return f, err
	}
	for _, name := range names {
		l := owners.LogFolder{Path: filepath.Join(logRoot, name)}
		_, _, l.UID, _ = owners.ParseLogFolder(name)
		if l.UID != "" {
			if l.Containers, err = foldersIn(l.Path); err != nil {
				return f, err
			}
		}
		f.Logs = append(f.Logs, l)
	}
	return f, nil
}

// volumesFolder is where a pod's volumes are, by plugin and name.
const volumesFolder = "volumes"

func podFolder(path, uid string, mounted mountBook) (owners.PodFolder, error) {
	p := owners.PodFolder{UID: uid, Path: path}
	plugins, err := foldersIn(filepath.Join(path, volumesFolder))
	if err != nil {
		return p, err
	}
	for _, plugin := range plugins {
		folder := filepath.Join(path, volumesFolder, plugin)
		names, err := foldersIn(folder)
		if err != nil {
			return p, err
		}
		for _, name := range names {
			v := owners.VolumeFolder{Plugin: plugin, Name: name, Path: filepath.Join(folder, name)}
			// CSI drivers get a folder "mount" in the volume's.
			for _, at := range []string{v.Path, filepath.Join(v.Path, "mount")} {
				if m, ok := mounted.at[at]; ok {
					v.Mounted, v.Source = true, mounted.source(m)
					break
				}
			}
			p.Volumes = append(p.Volumes, v)
		}
	}
	return p, nil
}

// foldersIn lists the folders in a folder by name, without following symlinks; one
// that is not there has none. What is mounted in it is not asked.
func foldersIn(path string) (names []string, _ error) {
	entries, err := os.ReadDir(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, e := range entries {
		if e.IsDir() {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// mountBook knows what is mounted where.
type mountBook struct {
	local map[fsstats.Device]bool
	all   []fsstats.Mount
	at    map[string]fsstats.Mount
}

// source finds the folder of this node that a mount shows: the same folder by way
// of another mount of the filesystem, the shortest. It is empty if there is none or
// the filesystem is none of the node's.
func (b mountBook) source(m fsstats.Mount) string {
	if !b.local[m.Device] {
		return ""
	}
	best := ""
	for _, other := range b.all {
		if other.Device != m.Device || other.Mountpoint == m.Mountpoint || strings.Contains(other.Mountpoint, "/"+volumesFolder+"/") {
			continue
		}
		rel, err := filepath.Rel(other.Root, m.Root)
		if err != nil || !filepath.IsLocal(rel) {
			continue
		}
		path := filepath.Join(other.Mountpoint, rel)
		if best == "" || cmp.Or(cmp.Compare(len(path), len(best)), strings.Compare(path, best)) < 0 {
			best = path
		}
	}
	return best
}

// devicesOf are the filesystems of a layout.
func devicesOf(l fsstats.Layout) map[fsstats.Device]bool {
	out := map[fsstats.Device]bool{}
	for _, p := range l.Places {
		out[p.Filesystem.Device] = true
	}
	return out
}

// pathOf is where a role's folder really is, empty if it is not there.
func pathOf(l fsstats.Layout, role fsstats.Role) string {
	i := slices.IndexFunc(l.Places, func(p fsstats.Place) bool { return p.Role == role })
	if i < 0 || l.Places[i].Missing {
		return ""
	}
	return l.Places[i].Path
}
