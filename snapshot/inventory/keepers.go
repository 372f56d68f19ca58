package inventory

import (
	"cmp"
	"slices"
)

// KeeperKind is what keeps something from being collected.
type KeeperKind string

// The kinds of keepers.
const (
	KeeperImage     KeeperKind = "image"
	KeeperContainer KeeperKind = "container"
	KeeperSandbox   KeeperKind = "sandbox"
	KeeperLease     KeeperKind = "lease"
	KeeperIngest    KeeperKind = "ingest"
	// KeeperBlob and KeeperSnapshot have a label that makes them stay.
	KeeperBlob     KeeperKind = "blob"
	KeeperSnapshot KeeperKind = "snapshot"
)

// Keeper is somebody who keeps a part of an image.
type Keeper struct {
	Kind KeeperKind
	// Namespace of containerd, and ID there: of an image as in [Key], else of
	// the container, sandbox or lease, the reference of an ingest, the digest
	// of a blob, or the key of a snapshot.
	Namespace, ID string
	// Kept is what it keeps of the image. Others may keep the same.
	Kept Amount
}

// Keepers are those who keep what does not come free with an image, who keeps
// most first.
func (p *Picture) Keepers(k Key) []Keeper {
	i, ok := p.byKey[k]
	if !ok {
		return nil
	}
	s := p.store
	dead := map[int32]bool{}
	for _, n := range s.graph.death().remove(p.groups[i].records) {
		dead[n] = true
	}
	r := newReach(s.graph)
	stays := map[int32]bool{}
	for _, n := range r.of(p.groups[i].records) {
		if s.weighs[n] && !dead[n] {
			stays[n] = true
		}
	}
	if len(stays) == 0 {
		return nil
	}
	return p.keepers(stays, i)
}

// keepers are those who keep some of the nodes, but for one image.
func (p *Picture) keepers(stays map[int32]bool, without int) (out []Keeper) {
	s, r := p.store, newReach(p.store.graph)
	look := func(nodes []int32, kind KeeperKind, namespace, id string) {
		var kept []int32
		for _, n := range r.of(nodes) {
			if stays[n] {
				kept = append(kept, n)
			}
		}
		if len(kept) > 0 {
			out = append(out, Keeper{Kind: kind, Namespace: namespace, ID: id, Kept: s.amount(kept)})
		}
	}
	for j := range p.groups {
		if j != without {
			look(s.living(p.groups[j].records), KeeperImage, p.Images[j].Namespace, p.Images[j].ID)
		}
	}
	roots := slices.Clone(s.graph.roots)
	slices.Sort(roots)
	for _, n := range slices.Compact(roots) {
		if kind, id := s.keeper(n); kind != "" {
			look([]int32{n}, kind, s.contents.Namespaces[s.objects[n].namespace].Name, id)
		}
	}
	slices.SortFunc(out, func(a, b Keeper) int {
		return cmp.Or(cmp.Compare(b.Kept.Bytes(), a.Kept.Bytes()), cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.ID, b.ID))
	})
	return out
}

// Leftover is what is still there of something.
type Leftover struct {
	// There is what is there, Uncollected what of it nobody keeps: containerd's
	// next collection removes it.
	There, Uncollected Amount
	// Keepers are those who keep the rest, who keeps most first.
	Keepers []Keeper
}

// Leftover finds what is still there of parts, by their IDs, such as those of an
// image that has been removed since they were listed.
func (p *Picture) Leftover(ids []string) (out Leftover) {
	s := p.store
	wanted := map[string]bool{}
	for _, id := range ids {
		wanted[id] = true
	}
	stays := map[int32]bool{}
	var there, dead []int32
	for i := range s.objects {
		n := int32(i)
		if !s.weighs[n] || !wanted[s.partID(n)] {
			continue
		}
		stays[n] = true
		if there = append(there, n); !s.graph.lives(n) {
			dead = append(dead, n)
		}
	}
	if len(stays) == 0 {
		return out
	}
	out.There, out.Uncollected = s.amount(there), s.amount(dead)
	out.Keepers = p.keepers(stays, -1)
	return out
}

func (s *store) living(nodes []int32) (out []int32) {
	for _, n := range nodes {
		if s.graph.lives(n) {
			out = append(out, n)
		}
	}
	return out
}

// keeper says what a root is that is no image.
func (s *store) keeper(n int32) (kind KeeperKind, id string) {
	o := s.objects[n]
	ns := &s.contents.Namespaces[o.namespace]
	switch o.kind {
	case nodeContainer:
		if ns.Containers[o.index].Labels[LabelKind] == KindSandbox {
			return KeeperSandbox, ns.Containers[o.index].ID
		}
		return KeeperContainer, ns.Containers[o.index].ID
	case nodeSandbox:
		return KeeperSandbox, ns.Sandboxes[o.index].ID
	case nodeLease:
		return KeeperLease, ns.Leases[o.index].ID
	case nodeIngest:
		return KeeperIngest, ns.Ingests[o.index].Ref
	case nodeBlob:
		return KeeperBlob, ns.Blobs[o.index].Digest
	case nodeSnapshot:
		return KeeperSnapshot, ns.Snapshots[o.index].Key
	default:
		return "", ""
	}
}
