package inventory

import (
	"cmp"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"
)

// OrphanKind is what has no owner.
type OrphanKind string

// The kinds of orphans.
const (
	OrphanImage    OrphanKind = "image"
	OrphanBlob     OrphanKind = "blob"
	OrphanSnapshot OrphanKind = "snapshot"
	OrphanIngest   OrphanKind = "ingest"
	OrphanLease    OrphanKind = "lease"
	OrphanLogs     OrphanKind = "logs"
	OrphanMount    OrphanKind = "mount"
	// OrphanFile is a file or folder of the store that containerd has no record
	// of.
	OrphanFile OrphanKind = "file"
)

// Orphan is something that nobody owns.
type Orphan struct {
	Kind OrphanKind `json:"kind"`
	// Namespace is containerd's, empty for what is in none.
	Namespace string `json:"namespace,omitempty"`
	// ID is the key, digest, reference, lease or path.
	ID string `json:"id"`
	// Proof says by what facts nobody owns it, a sentence.
	Proof string `json:"proof"`
	// Since is when it was made or last written; zero if that is not known.
	Since time.Time `json:"since,omitzero"`
	// Takes is what it takes, as far as that is known.
	Takes Amount `json:"takes"`
}

// Surroundings is what lies around the store on this node. What is nil was not
// looked at.
type Surroundings struct {
	// CRINamespace is the namespace of the CRI, such as k8s.io.
	CRINamespace string
	// Logs are the folders below the kubelet's folder for pod logs.
	Logs []Folder
	// Pods are the UIDs that the kubelet has a folder for; Logs need it.
	Pods map[string]bool
	// Mounts are the mount points that were there before the store was read and
	// after it.
	Mounts []string
	// StateDir is containerd's state folder; Mounts need it.
	StateDir string
	// Blobs are the files of the content store that were there before the store
	// was read and after it; Name is the digest.
	Blobs []Folder
}

// Folder is a folder or file that was looked at.
type Folder struct {
	// Path is absolute; Name is what it stands for, such as a digest.
	Path, Name string
	ModifiedAt time.Time
	// Takes is what it takes, as far as that is known.
	Takes Figure
	Known bool
}

const (
	// orphanAge is how old something has to be to be called an orphan. Between
	// two calls of one client a thing may have no owner yet.
	orphanAge = 2 * time.Minute
	// ingestAge is how long nothing may have been written to a download that no
	// lease holds; containerd itself waits 24 h (CTD-85).
	ingestAge = time.Hour
)

// sandboxID is the form of the IDs that CRI gives to sandboxes and containers.
var sandboxID = regexp.MustCompile(`^[0-9a-f]{64}$`)

// Orphans lists what has no owner, largest first. There are none while a part of
// the store is unread: an owner could be there.
func (p *Picture) Orphans(around Surroundings) []Orphan {
	if len(p.Unread) > 0 {
		return nil
	}
	c := p.store.contents
	known := p.knownIDs()
	var out []Orphan
	for n := range c.Namespaces {
		out = append(out, p.ofNamespace(int32(n))...)
	}
	for i := range p.Images {
		if im := &p.Images[i]; im.Namespace == around.CRINamespace && !im.Resolved && p.old(im.CreatedAt) {
			out = append(out, Orphan{Kind: OrphanImage, Namespace: im.Namespace, ID: im.ID, Since: im.CreatedAt, Takes: im.Exclusive,
				Proof: "it has no manifest or configuration for this platform, so CRI does not list it and the kubelet never removes it"})
		}
	}
	out = append(out, p.strayBlobs(around.Blobs)...)
	out = append(out, p.strayLogs(around, known)...)
	out = append(out, p.strayMounts(around, known)...)
	slices.SortFunc(out, func(a, b Orphan) int {
		return cmp.Or(cmp.Compare(b.Takes.Bytes(), a.Takes.Bytes()), cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.ID, b.ID))
	})
	return out
}

// old says whether something was there long enough to have an owner. A time in
// the future, after the clock was set back, is not.
func (p *Picture) old(at time.Time) bool { return p.At.Sub(at) >= orphanAge }

// ofNamespace finds what nothing refers to, and leases that nobody ends.
func (p *Picture) ofNamespace(n int32) (out []Orphan) {
	s := p.store
	ns := &s.contents.Namespaces[n]
	own := func(node int32) Amount { return s.amount([]int32{s.carrier(node)}) }
	for i := range ns.Snapshots {
		sn := &ns.Snapshots[i]
		node := s.byName[name{n, nodeSnapshot, sn.Snapshotter, sn.Key}]
		if !s.graph.lives(node) && !s.graph.lives(s.carrier(node)) && p.old(sn.CreatedAt) {
			out = append(out, Orphan{Kind: OrphanSnapshot, Namespace: ns.Name, ID: sn.Snapshotter + "/" + sn.Key, Since: sn.CreatedAt, Takes: own(node),
				Proof: "no image, container, lease, other snapshot or label refers to it; containerd's next collection removes it"})
		}
	}
	for i := range ns.Blobs {
		b := &ns.Blobs[i]
		node := s.byName[name{n, nodeBlob, "", b.Digest}]
		if !s.graph.lives(node) && !s.graph.lives(s.carrier(node)) && p.old(b.CreatedAt) {
			out = append(out, Orphan{Kind: OrphanBlob, Namespace: ns.Name, ID: b.Digest, Since: b.CreatedAt, Takes: own(node),
				Proof: "no image, lease, other blob or label refers to it; containerd's next collection removes it"})
		}
	}
	leased := map[string]bool{}
	for i := range ns.Leases {
		for _, r := range ns.Leases[i].Resources {
			if r.Type == "ingests" {
				leased[r.ID] = true
			}
		}
		out = append(out, p.ofLease(n, &ns.Leases[i])...)
	}
	for i := range ns.Ingests {
		in := &ns.Ingests[i]
		if idle := p.At.Sub(in.UpdatedAt); !leased[in.Ref] && idle >= ingestAge {
			out = append(out, Orphan{Kind: OrphanIngest, Namespace: ns.Name, ID: in.Ref, Since: in.UpdatedAt,
				Takes: own(s.byName[name{n, nodeIngest, "", in.Ref}]),
				Proof: fmt.Sprintf("no lease holds it, and nothing was written to it for %s; containerd gives it up a day after its start", idle.Round(time.Minute))})
		}
	}
	return out
}

// ofLease finds leases of CRI whose sandbox is gone: they have no end (CTD-86).
func (p *Picture) ofLease(n int32, l *Lease) []Orphan {
	s := p.store
	ns := &s.contents.Namespaces[n]
	_, ends := l.Labels[labelExpire]
	if ends || !sandboxID.MatchString(l.ID) || !p.old(l.CreatedAt) {
		return nil
	}
	for _, kind := range []nodeKind{nodeContainer, nodeSandbox} {
		if _, ok := s.find(n, target{kind: kind, key: l.ID}); ok {
			return nil
		}
	}
	node := s.byName[name{n, nodeLease, "", l.ID}]
	return []Orphan{{Kind: OrphanLease, Namespace: ns.Name, ID: l.ID, Since: l.CreatedAt, Takes: s.amount(s.graph.death().remove([]int32{node})),
		Proof: "it has the form of a sandbox's ID and no end, as CRI makes them for image volumes, and there is no such sandbox or container"}}
}

// strayBlobs finds files of the content store that no namespace has a record of.
func (p *Picture) strayBlobs(files []Folder) (out []Orphan) {
	recorded := map[string]bool{}
	for n := range p.store.contents.Namespaces {
		ns := &p.store.contents.Namespaces[n]
		for i := range ns.Blobs {
			recorded[ns.Blobs[i].Digest] = true
		}
		for i := range ns.Ingests {
			recorded[ns.Ingests[i].Expected] = true
		}
	}
	for _, f := range files {
		if !recorded[f.Name] && p.old(f.ModifiedAt) {
			out = append(out, Orphan{Kind: OrphanFile, ID: f.Path, Since: f.ModifiedAt, Takes: f.amount(),
				Proof: "no namespace of containerd has a record of this blob"})
		}
	}
	return out
}

func (f Folder) amount() Amount {
	if !f.Known {
		return Amount{Unknown: 1}
	}
	return Amount{PerFilesystem: []Figure{f.Takes}}
}

// known are the containers, sandboxes and pods that containerd has a record of.
type known struct {
	// ids are by namespace and ID, pods by UID.
	ids  map[[2]string]bool
	pods map[string]bool
}

func (p *Picture) knownIDs() known {
	k := known{ids: map[[2]string]bool{}, pods: map[string]bool{}}
	for n := range p.store.contents.Namespaces {
		ns := &p.store.contents.Namespaces[n]
		for i := range ns.Containers {
			k.ids[[2]string{ns.Name, ns.Containers[i].ID}] = true
			k.pods[ns.Containers[i].Labels[LabelPodUID]] = true
		}
		for i := range ns.Sandboxes {
			k.ids[[2]string{ns.Name, ns.Sandboxes[i].ID}] = true
			k.pods[ns.Sandboxes[i].Labels[LabelPodUID]] = true
		}
	}
	return k
}

// podLogs is the form of the kubelet's folder for a pod's logs,
// NAMESPACE_NAME_UID (kubelet, pkg/kubelet/kuberuntime/helpers.go:
// BuildPodLogsDirectory).
var podLogs = regexp.MustCompile(`^[^_]+_[^_]+_([0-9a-f][0-9a-f-]{30,})$`)

// strayLogs finds log folders of pods that neither containerd nor the kubelet
// knows. A folder of another form is nobody's to judge.
func (p *Picture) strayLogs(around Surroundings, k known) (out []Orphan) {
	if around.Pods == nil {
		return nil
	}
	for _, f := range around.Logs {
		m := podLogs.FindStringSubmatch(f.Name)
		if m == nil || k.pods[m[1]] || around.Pods[m[1]] || !p.old(f.ModifiedAt) {
			continue
		}
		out = append(out, Orphan{Kind: OrphanLogs, ID: f.Path, Since: f.ModifiedAt, Takes: f.amount(),
			Proof: "no container or sandbox belongs to pod " + m[1] + ", and the kubelet has no folder for it"})
	}
	return out
}

// strayMounts finds mounts for containers and sandboxes that are gone. Those of
// pods are not judged: a pod may wait for something with its volumes mounted and
// no sandbox, and only the API server knows whether there still is one.
func (p *Picture) strayMounts(around Surroundings, k known) (out []Orphan) {
	for _, m := range around.Mounts {
		if proof := strayMount(m, around, k); proof != "" {
			out = append(out, Orphan{Kind: OrphanMount, ID: m, Proof: proof})
		}
	}
	return out
}

func strayMount(mountpoint string, around Surroundings, k known) (proof string) {
	parts, ok := below(mountpoint, around.StateDir)
	switch {
	case !ok:
		return ""
	case len(parts) >= 4 && parts[0] == "io.containerd.runtime.v2.task" && !k.ids[[2]string{parts[1], parts[2]}]:
		return "containerd has no container " + parts[2] + " in namespace " + parts[1]
	case len(parts) >= 4 && parts[0] == "io.containerd.grpc.v1.cri" && parts[1] == "sandboxes" && !k.ids[[2]string{around.CRINamespace, parts[2]}]:
		return "containerd has no sandbox " + parts[2] + " in namespace " + around.CRINamespace
	default:
		return ""
	}
}

// below takes a path apart that lies in a folder.
func below(file, folder string) (parts []string, ok bool) {
	if folder == "" {
		return nil, false
	}
	rest, ok := strings.CutPrefix(path.Clean(file), strings.TrimSuffix(path.Clean(folder), "/")+"/")
	if !ok {
		return nil, false
	}
	return strings.Split(rest, "/"), true
}
