// Package owners names who holds bytes on a node: from containerd's snapshots, the
// CRI's lists and the names of folders it makes the owners of a usage index. It is
// pure: it looks at nothing. Only agent may import it; it imports fsstats/index.
//
// Rules in brackets (ACC-9) are those of the project's kubelet facts.
package owners

import (
	"cmp"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cleave-cri/cleave/fsstats/index"
)

// The kinds of owners, and what identifies one of each.
const (
	// Container: the container's ID. Its layer and the deleted files that it has
	// open.
	Container index.Kind = "container"
	// Sandbox: the sandbox's ID.
	Sandbox index.Kind = "sandbox"
	// Pod: the pod's UID. Its logs and its folder, also when the pod is gone and
	// they are not.
	Pod index.Kind = "pod"
	// Image: snapshotter and key of a committed layer.
	Image index.Kind = "image layer"
	// Unpacking: snapshotter and key of a layer that is being unpacked.
	Unpacking index.Kind = "layer being unpacked"
	// Other: snapshotter and key of any other snapshot, such as an image volume.
	Other index.Kind = "other snapshot"
	// Content: the content store, of which there is one.
	Content index.Kind = "content store"
	// Kubelet: the kubelet, of which there is one. What is in its folder and in no
	// pod's.
	Kubelet index.Kind = "kubelet"
	// Volume: a folder of this node that a local volume or a CSI driver gives to
	// pods, by its path.
	Volume index.Kind = "local volume"
	// Unknown: a folder, by its path, among the pods' log folders that is none of
	// theirs by its name. It counts as nobody's.
	Unknown index.Kind = "folder of nobody"
)

// The names of parts.
const (
	// Layer is what is written to a snapshot.
	Layer = "layer"
	// Logs is a pod's log folder without those of its containers. A container's is
	// Logs, a slash and the container's name.
	Logs = "logs"
	// Rest is what is in a pod's folder besides, its etc-hosts included (ACC-22).
	Rest = "other files"
	// Ingests are downloads that have not ended.
	Ingests = "ingests"
	// Blobs is the rest of the content store.
	Blobs = "blobs"
	// Files are the only part of some owners.
	Files = "files"
	// OpenDeleted are deleted files that are still open; the filesystem follows.
	OpenDeleted = "open-deleted"
)

// The plugins of volumes that the kubelet counts for the pod (ACC-2), as folders
// below "volumes" are called.
const (
	PluginEmptyDir  = "kubernetes.io~empty-dir"
	PluginConfigMap = "kubernetes.io~configmap"
)

// ContainerLogs names the part that is a container's log folder.
func ContainerLogs(container string) string { return Logs + "/" + container }

// VolumePart names the part that is a volume.
func VolumePart(plugin, name string) string { return plugin + "/" + name }

// OpenDeletedOn names the part that is the deleted files on a filesystem.
func OpenDeletedOn(device string) string { return OpenDeleted + " on " + device }

// Snapshot is one of containerd's.
type Snapshot struct {
	Kind index.Kind
	// ID is the container's or sandbox's, or snapshotter and key.
	ID string
	// Folder holds what is written to it. It is empty where the figure is given by
	// somebody else.
	Folder string
}

// Key is the snapshot's in the index.
func (s Snapshot) Key() index.Key { return index.Key{Kind: s.Kind, ID: s.ID, Part: Layer} }

// PodFolder is a folder below <kubelet's root>/pods.
type PodFolder struct {
	UID     string
	Path    string
	Volumes []VolumeFolder
}

// VolumeFolder is a folder below a pod's "volumes".
type VolumeFolder struct {
	Plugin, Name string
	Path         string
	// Mounted says that something is mounted on it, or below it where the plugin
	// does so. Source is then the folder of this node that is, empty if it is none
	// or lies on no filesystem of the node's roles.
	Mounted bool
	Source  string
}

// LogFolder is a pod's log folder.
type LogFolder struct {
	// UID is empty where the name is none that the kubelet gives.
	UID  string
	Path string
	// Containers are the names of the folders in it.
	Containers []string
}

// Folders is what was found below the kubelet's root and the folder of logs.
type Folders struct {
	// KubeletRoot and LogRoot are without symlinks, empty while unknown.
	KubeletRoot, LogRoot string
	Pods                 []PodFolder
	Logs                 []LogFolder
}

// OpenFile is what a container holds in deleted files on one filesystem.
type OpenFile struct {
	Container, Device string
}

// Known is all that is known of who there is.
type Known struct {
	Snapshots []Snapshot
	// ContentRoot is the content store's folder, empty while unknown.
	ContentRoot string
	// Foreign are folders whose content is counted by snapshots, one by one:
	// nothing above them is counted as a whole.
	Foreign []string
	Folders Folders
	Open    []OpenFile
}

// ParseLogFolder takes the name of a pod's log folder apart: <namespace>_<name>_<uid>
// (ACC-9). No part of it may hold an underscore or be empty.
func ParseLogFolder(name string) (namespace, pod, uid string, ok bool) {
	parts := strings.Split(name, "_")
	if len(parts) != 3 || slices.Contains(parts, "") {
		return "", "", "", false
	}
	return parts[0], parts[1], parts[2], true
}

// List makes the owners, in the order of kind and ID. Each path is in it once: the
// first one that names it, in the order of the fields of [Known], has it.
func List(k Known) []index.Owner {
	l := list{owners: map[id]*index.Owner{}, paths: map[string]bool{}}
	for _, s := range k.Snapshots {
		l.add(s.Kind, s.ID, Layer, s.Folder)
	}
	if k.ContentRoot != "" {
		l.add(Content, "", Blobs, k.ContentRoot)
		l.add(Content, "", Ingests, filepath.Join(k.ContentRoot, "ingest"))
	}
	for _, p := range k.Folders.Pods {
		l.addPod(p, k)
	}
	for _, f := range k.Folders.Logs {
		l.addLogs(f)
	}
	l.addKubelet(k)
	for _, o := range k.Open {
		l.add(Container, o.Container, OpenDeletedOn(o.Device), "")
	}
	return l.sorted()
}

type id struct {
	kind index.Kind
	id   string
}

type list struct {
	owners map[id]*index.Owner
	paths  map[string]bool
}

// rank is how soon a kind's first figures are wanted: the CRI's answers have the
// layers.
func rank(kind index.Kind) int {
	switch kind {
	case Container, Sandbox:
		return 3
	case Pod:
		return 2
	case Other, Unpacking:
		return 1
	}
	return 0
}

// add adds a part; an empty path means that its figure is given.
func (l *list) add(kind index.Kind, name, part, path string) {
	if path != "" {
		path = filepath.Clean(path)
		if l.paths[path] {
			return
		}
		l.paths[path] = true
	}
	who := id{kind, name}
	o := l.owners[who]
	if o == nil {
		o = &index.Owner{Kind: kind, ID: name, Rank: rank(kind)}
		l.owners[who] = o
	}
	if slices.ContainsFunc(o.Parts, func(p index.Part) bool { return p.Name == part }) {
		return
	}
	o.Parts = append(o.Parts, index.Part{Name: part, Path: path})
}

func (l *list) addPod(p PodFolder, k Known) {
	for _, v := range p.Volumes {
		switch {
		case v.Source != "" && k.holds(v.Source): // its files are counted already
		case v.Source != "":
			l.add(Volume, v.Source, Files, v.Source)
		case v.Mounted: // another filesystem, in memory or elsewhere
		default:
			l.add(Pod, p.UID, VolumePart(v.Plugin, v.Name), v.Path)
		}
	}
	l.add(Pod, p.UID, Rest, p.Path)
}

func (l *list) addLogs(f LogFolder) {
	if f.UID == "" {
		l.add(Unknown, f.Path, Files, f.Path)
		return
	}
	for _, c := range f.Containers {
		l.add(Pod, f.UID, ContainerLogs(c), filepath.Join(f.Path, c))
	}
	l.add(Pod, f.UID, Logs, f.Path)
}

// holds says whether a folder has others in it that are counted for themselves, as
// one that is the whole node.
func (k Known) holds(folder string) bool {
	inside := append([]string{k.Folders.KubeletRoot, k.Folders.LogRoot, k.ContentRoot}, k.Foreign...)
	return slices.ContainsFunc(inside, func(path string) bool { return path != "" && Within(path, folder) })
}

// addKubelet adds what is the kubelet's own. Where its root holds what snapshots
// count one by one, only those folders of it that are surely its own.
func (l *list) addKubelet(k Known) {
	root := k.Folders.KubeletRoot
	if root == "" {
		return
	}
	if !slices.ContainsFunc(k.Foreign, func(f string) bool { return Within(f, root) }) {
		l.add(Kubelet, "", Files, root)
		return
	}
	for _, name := range []string{"pods", "plugins"} {
		l.add(Kubelet, "", name, filepath.Join(root, name))
	}
}

// Within says whether a path is the same as another or below it, by its elements.
func Within(path, above string) bool {
	rel, err := filepath.Rel(above, path)
	return err == nil && filepath.IsLocal(rel)
}

func (l *list) sorted() []index.Owner {
	out := make([]index.Owner, 0, len(l.owners))
	for _, o := range l.owners {
		out = append(out, *o)
	}
	slices.SortFunc(out, func(a, b index.Owner) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.ID, b.ID))
	})
	return out
}
