package inventory

import (
	"cmp"
	"regexp"
	"slices"
	"strings"
)

// extractionKey is the form of the key under which containerd unpacks a layer
// (CTD-24, CTD-26).
var extractionKey = regexp.MustCompile(`^extract-\S+ sha256:[0-9a-f]{64}$`)

// remapSuffix ends the key of a copy of an image's layers with other owners
// (CTD-30).
const remapSuffix = "-remap"

// use finds the users of images: containers by the image's name, and by the
// layer that their snapshot starts from, whatever the name says now. Images with
// the same layers can't be told apart by these, so they are in use together. An
// image of the same ID in another namespace is the same image.
func (p *Picture) use() {
	c := p.store.contents
	byID := map[string][]int{}
	byChain := map[name][]int{}
	byRecord := map[int32]int{}
	for i := range p.Images {
		byID[p.Images[i].ID] = append(byID[p.Images[i].ID], i)
		if top := p.groups[i].topChain(); top != "" {
			k := name{namespace: p.namespace(p.Images[i].Namespace), key: top}
			byChain[k] = append(byChain[k], i)
		}
		for _, r := range p.groups[i].records {
			byRecord[r] = i
		}
	}
	used := func(images []int, u User) {
		for _, i := range images {
			for _, same := range byID[p.Images[i].ID] {
				if users := &p.Images[same].Users; !slices.Contains(*users, u) {
					*users = append(*users, u)
				}
			}
		}
	}
	for n := range c.Namespaces {
		ns := &c.Namespaces[n]
		at := int32(n)
		owners := map[name]User{}
		for i := range ns.Containers {
			ct := &ns.Containers[i]
			u := User{Kind: UserContainer, Namespace: ns.Name, ID: ct.ID}
			if ct.Labels[LabelKind] == KindSandbox {
				u.Kind = UserSandbox
			}
			owners[name{at, nodeSnapshot, ct.Snapshotter, ct.SnapshotKey}] = u
			if record, ok := p.store.find(at, target{kind: nodeRecord, key: ct.Image}); ok {
				used([]int{byRecord[record]}, u)
			} else {
				used(byID[ct.Image], u)
			}
		}
		for i := range ns.Snapshots {
			sn := &ns.Snapshots[i]
			if sn.Kind == Committed {
				continue
			}
			u, owned := owners[name{at, nodeSnapshot, sn.Snapshotter, sn.Key}]
			switch {
			case owned:
			case sn.Kind == Active && extractionKey.MatchString(sn.Key):
				u = User{Kind: UserUnpack, Namespace: ns.Name, ID: sn.Key}
			default:
				u = User{Kind: UserVolume, Namespace: ns.Name, ID: sn.Key}
			}
			used(byChain[name{namespace: at, key: p.store.base(at, sn)}], u)
		}
	}
	for i := range p.Images {
		slices.SortFunc(p.Images[i].Users, func(a, b User) int {
			return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.ID, b.ID))
		})
	}
}

// base is the layer of an image that a snapshot starts from.
func (s *store) base(n int32, sn *Snapshot) string {
	parent := sn.Parent
	for range maxNesting {
		if !strings.HasSuffix(parent, remapSuffix) {
			break
		}
		node, ok := s.byName[name{n, nodeSnapshot, sn.Snapshotter, parent}]
		if !ok {
			break
		}
		parent = s.contents.Namespaces[n].Snapshots[s.objects[node].index].Parent
	}
	return parent
}
