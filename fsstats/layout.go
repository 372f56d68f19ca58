package fsstats

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
)

// Role is what a path is for on a node.
type Role string

// The roles, in the order in which a Layout lists them.
const (
	// NodeFS is the kubelet's root directory.
	NodeFS Role = "nodefs"
	// ImageFS is where image layers are.
	ImageFS Role = "imagefs"
	// ContainerFS is where containers' writable layers are.
	ContainerFS Role = "containerfs"
	// Logs is where containers' logs are.
	Logs Role = "logs"
	// Content is containerd's content store: the compressed layers.
	Content Role = "content"
)

// Roles returns all roles in their order.
func Roles() []Role { return []Role{NodeFS, ImageFS, ContainerFS, Logs, Content} }

// LayoutKind names how nodefs, imagefs and containerfs share filesystems.
type LayoutKind string

const (
	// LayoutUnknown: at least one of nodefs, imagefs and containerfs is not
	// known. Nothing may be deleted or evicted on such a layout.
	LayoutUnknown LayoutKind = "unknown"
	// LayoutSingle: all three on one filesystem.
	LayoutSingle LayoutKind = "single"
	// LayoutDedicated: imagefs and containerfs share one, nodefs is apart.
	LayoutDedicated LayoutKind = "dedicated"
	// LayoutSplit: containerfs and nodefs share one, imagefs is apart.
	// That is what KEP-4191 supports.
	LayoutSplit LayoutKind = "split"
	// LayoutSeparate: containerfs shares with neither of the others. Usually
	// these are three filesystems; images on nodefs with containers apart is
	// the same to the kubelet, which understands neither.
	LayoutSeparate LayoutKind = "separate"
)

// Place is where one role's path really is.
type Place struct {
	Role Role `json:"role"`
	// Configured is the path as it was asked for.
	Configured string `json:"configured"`
	// Path is Configured without symlinks; if Configured does not exist, it is
	// the nearest parent that does.
	Path string `json:"path"`
	// Missing says that Configured does not exist. What is made there later
	// may turn out to be on another filesystem: nothing may be deleted or
	// evicted on the strength of this Place.
	Missing bool `json:"missing,omitempty"`
	// Reported is the path to name to others, such as the kubelet. It exists
	// and its filesystem has a capacity above zero. It is Path, or the nearest
	// parent of Path that fits; for containerfs it is the Reported of imagefs
	// if both are on one filesystem, because the kubelet takes different
	// strings for different disks.
	Reported string `json:"reported"`
	// Note says for people why Path or Reported differs from what one would
	// expect; empty if there is nothing to say.
	Note string `json:"note,omitempty"`
	// Filesystem is the one that Reported is on. Places on one filesystem have
	// the same figures.
	Filesystem Filesystem `json:"filesystem"`
}

// Layout is which role is where. It is a value: it does not change, and the
// figures in it are as old as their MeasuredAt.
type Layout struct {
	// Places has one entry for each role that was asked for and could be
	// found, in the order of Roles.
	Places []Place `json:"places"`
}

// Get returns the Place of a role; ok is false if it is not known.
func (l Layout) Get(r Role) (p Place, ok bool) {
	for _, p := range l.Places {
		if p.Role == r {
			return p, true
		}
	}
	return Place{}, false
}

// SameFilesystem says whether a and b are on one filesystem. It is false if one
// of them is not known: ask Get where that matters.
func (l Layout) SameFilesystem(a, b Role) bool {
	pa, okA := l.Get(a)
	pb, okB := l.Get(b)
	return okA && okB && pa.Filesystem.Device == pb.Filesystem.Device
}

// Sharing returns the roles that are on one filesystem with r, r itself
// included, in the order of Roles; none if r is not known.
func (l Layout) Sharing(r Role) []Role {
	var out []Role
	for _, p := range l.Places {
		if l.SameFilesystem(r, p.Role) {
			out = append(out, p.Role)
		}
	}
	return out
}

// Kind classifies the layout by devices.
func (l Layout) Kind() LayoutKind {
	for _, r := range []Role{NodeFS, ImageFS, ContainerFS} {
		if _, ok := l.Get(r); !ok {
			return LayoutUnknown
		}
	}
	imagesOnNode := l.SameFilesystem(ImageFS, NodeFS)
	containersOnNode := l.SameFilesystem(ContainerFS, NodeFS)
	containersOnImages := l.SameFilesystem(ContainerFS, ImageFS)
	switch {
	case imagesOnNode && containersOnNode:
		return LayoutSingle
	case containersOnImages:
		return LayoutDedicated
	case containersOnNode:
		return LayoutSplit
	default:
		return LayoutSeparate
	}
}

// Resolve finds out where each role's path is. Roles with an empty path, and
// unknown roles, are left out. A path that does not exist stands for its nearest
// existing parent (with Missing and a Note); through a symlink without target,
// that is a parent of the target. A filesystem with zero capacity stands for the
// one its mountpoint's parent is on.
//
// If some roles can't be found, the Layout holds the others and the error joins
// one error per role, each naming role and path; they wrap what FilesystemOf's
// errors wrap, and ErrNoCapacity. A path that hangs costs 2 s once and none of
// the other roles.
func (p *Prober) Resolve(paths map[Role]string) (Layout, error) {
	s := &session{src: p.src, now: p.now}
	var (
		l    Layout
		errs []error
	)
	for _, r := range Roles() {
		path := paths[r]
		if path == "" {
			continue
		}
		asked := s
		place, err := ask(p, path, func() (Place, error) { return asked.locate(path) })
		if errors.Is(err, ErrNoAnswer) {
			s = &session{src: p.src, now: p.now} // the question that hangs keeps its own
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", r, err))
			continue
		}
		place.Role = r
		l.Places = append(l.Places, place)
	}
	return unify(l), errors.Join(errs...)
}

// unify makes one filesystem look like one. Places on one filesystem were
// measured one after the other while others wrote to it; they all get the
// figures of the first, because the kubelet takes different figures for
// different disks (LAY-6 of the project's kubelet facts). Different capacities
// are left alone: there a project quota is at work. containerfs gets all of
// imagefs's answer, the reported path included.
func unify(l Layout) Layout {
	places := slices.Clone(l.Places)
	for i := range places {
		f := &places[i].Filesystem
		for _, first := range places[:i] {
			if first.Filesystem.Device == f.Device && first.Filesystem.CapacityBytes == f.CapacityBytes {
				mountpoint, from := f.Mountpoint, f.Source
				*f = first.Filesystem
				f.Mountpoint, f.Source = mountpoint, from
				break
			}
		}
	}
	out := Layout{Places: places}
	if out.SameFilesystem(ImageFS, ContainerFS) {
		images, _ := out.Get(ImageFS)
		for i := range places {
			if places[i].Role == ContainerFS {
				places[i].Reported, places[i].Filesystem = images.Reported, images.Filesystem
			}
		}
	}
	return out
}

// locate finds the nearest existing parent of path, and from there the nearest
// parent with a capacity.
func (s *session) locate(path string) (Place, error) {
	sp, f, missing, err := s.nearest(path)
	if err != nil {
		return Place{}, err
	}
	place := Place{Configured: path, Path: sp.path, Missing: missing, Reported: sp.path, Filesystem: f}
	var notes []string
	if missing {
		notes = append(notes, fmt.Sprintf("%s does not exist; its nearest existing parent is %s", path, sp.path))
	}
	for place.Filesystem.CapacityBytes == 0 {
		parent := filepath.Dir(place.Reported)
		if parent == place.Reported {
			return Place{}, fmt.Errorf("find filesystem of %q: %w", path, ErrNoCapacity)
		}
		up, upFS, err := s.filesystemOf(parent)
		if err != nil {
			return Place{}, err
		}
		place.Reported, place.Filesystem = up.path, upFS
	}
	if place.Reported != place.Path {
		notes = append(notes, fmt.Sprintf("%s is on a filesystem without capacity (%s, %s); %s stands for it",
			place.Path, f.Type, f.Device, place.Reported))
	}
	place.Note = strings.Join(notes, "; ")
	return place, nil
}

// maxLinks is how many symlinks without a target nearest follows; the kernel
// gives up after as many (path_resolution(7)).
const maxLinks = 40

// nearest is filesystemOf for the nearest existing parent of path.
func (s *session) nearest(path string) (sp spot, f Filesystem, missing bool, err error) {
	links := 0
	for candidate := path; ; missing = true {
		sp, f, err = s.filesystemOf(candidate)
		if !errors.Is(err, fs.ErrNotExist) {
			return sp, f, missing, err
		}
		parent, ok := parentOf(candidate)
		if !ok {
			return spot{}, Filesystem{}, true, err
		}
		target, isLink := s.src.readlink(candidate)
		switch {
		case !isLink:
			candidate = parent
		case links == maxLinks:
			return spot{}, Filesystem{}, true, fmt.Errorf("follow symlink %q: more than %d links", candidate, maxLinks)
		case filepath.IsAbs(target):
			links++
			candidate = target
		default:
			links++
			candidate = strings.TrimRight(parent, "/") + "/" + target
		}
	}
}

// parentOf cuts the last element off path. Unlike filepath.Dir it does not fold
// "..", which is wrong behind a symlink. ok is false for the root directory.
func parentOf(path string) (parent string, ok bool) {
	path = strings.TrimRight(path, "/")
	if path == "" {
		return "", false
	}
	parent = strings.TrimRight(path[:strings.LastIndexByte(path, '/')+1], "/")
	if parent == "" {
		return "/", true
	}
	return parent, true
}
