package inventory

import (
	"cmp"
	"slices"
	"strings"
)

// group is the records of one image, as nodes.
type group struct {
	records []int32
	// documents are the digests from its target to its configuration; chainIDs
	// name its layers' snapshots, the lowest first.
	documents []string
	layers    []Descriptor
	chainIDs  []string
}

// topChain is the name of the snapshot that containers of the image start from.
func (g *group) topChain() string {
	if len(g.chainIDs) == 0 {
		return ""
	}
	return g.chainIDs[len(g.chainIDs)-1]
}

// Build makes the picture. The contents must not be changed afterwards.
func Build(c *Contents, figures Figures) *Picture {
	p := &Picture{At: c.At, Unread: slices.Clone(c.Unread), Unsettled: c.Unsettled, store: newStore(c, figures), byKey: map[Key]int{}}
	p.gather()
	p.sum()
	p.use()
	return p
}

// gather puts the records together that lead to one configuration.
func (p *Picture) gather() {
	c := p.store.contents
	strangers := map[Key]string{}
	for n := range c.Namespaces {
		ns := &c.Namespaces[n]
		for i := range ns.Images {
			r := &ns.Images[i]
			found, size := p.store.resolve(int32(n), r.Target)
			id, resolved := r.Name, len(found.documents) > 0
			if resolved {
				id = found.documents[len(found.documents)-1]
			}
			key := Key{Namespace: ns.Name, ID: id}
			at, ok := p.byKey[key]
			if !ok {
				at = len(p.Images)
				p.byKey[key] = at
				p.Images = append(p.Images, Image{Key: key, Resolved: resolved, CreatedAt: r.CreatedAt, ReportedBytes: size})
				p.groups = append(p.groups, found)
			}
			image, g := &p.Images[at], &p.groups[at]
			image.Names = append(image.Names, r.Name)
			image.Pinned = image.Pinned || r.Labels[LabelPinned] == PinnedValue
			if r.CreatedAt.Before(image.CreatedAt) {
				image.CreatedAt = r.CreatedAt
			}
			g.records = append(g.records, p.store.byName[name{int32(n), nodeRecord, "", r.Name}])
			p.repull(image, g, int32(n), r)
			if name := p.store.stranger(int32(n), r); name != "" && resolved {
				strangers[key] = name
			}
		}
	}
	for key, name := range strangers {
		image := &p.Images[p.byKey[key]]
		image.Repullable, image.NotRepullable = false, "it was not pulled by its name "+name
	}
	// By key, the groups with their images.
	order := make([]int, len(p.Images))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return p.Images[a].compare(p.Images[b].Key) })
	images, groups := make([]Image, len(order)), make([]group, len(order))
	for i, from := range order {
		images[i], groups[i] = p.Images[from], p.groups[from]
		slices.Sort(images[i].Names)
		p.byKey[images[i].Key] = i
	}
	p.Images, p.groups = images, groups
}

// maxNesting is how deep an index may lie in indexes.
const maxNesting = 8

// resolve follows an image's target to the manifest for this platform and its
// configuration, as CRI does (containerd, core/images/image.go: Manifest). The
// last of the group's documents is the configuration; there are none if
// something of it is not there.
func (s *store) resolve(n int32, digest string) (g group, reportedBytes int64) {
	for range maxNesting {
		document, ok := s.contents.Documents[digest]
		if _, there := s.byName[name{n, nodeBlob, "", digest}]; !ok || !there {
			return group{}, 0
		}
		g.documents = append(g.documents, digest)
		reportedBytes += document.SizeBytes
		switch {
		case document.Config != "":
			config, ok := s.contents.Documents[document.Config]
			if _, there := s.byName[name{n, nodeBlob, "", document.Config}]; !ok || !there {
				return group{}, 0
			}
			g.documents = append(g.documents, document.Config)
			g.layers, g.chainIDs = document.Layers, config.ChainIDs
			reportedBytes += document.ConfigSizeBytes
			for _, l := range document.Layers {
				reportedBytes += l.SizeBytes
			}
			return g, reportedBytes
		case len(document.Manifests) > 0:
			digest = document.Manifests[0]
		default:
			return group{}, 0
		}
	}
	return group{}, 0
}

// repull finds out whether an image can be had again by one of its records.
func (p *Picture) repull(image *Image, g *group, n int32, r *Record) {
	if image.Repullable {
		return
	}
	host, repository, digest := repoDigest(r.Name)
	switch {
	case !image.Resolved:
		image.NotRepullable = "its manifest or configuration is not in the store"
	case digest == "" || digest != r.Target:
		if image.NotRepullable == "" {
			image.NotRepullable = "it has no digest in a repository"
		}
	default:
		image.NotRepullable = p.store.notFrom(g, n, host, repository)
		image.Repullable = image.NotRepullable == ""
	}
}

// stranger is a record's name if its target was not pulled from the repository in
// it: with a tag that somebody gave by hand it can be pulled by other names, but
// not by this one. A name without repository, such as an ID, is none.
func (s *store) stranger(n int32, r *Record) string {
	host, repository := repositoryOf(r.Name)
	if b := s.blob(n, r.Target); host == "" || b != nil && slices.Contains(strings.Split(b.Labels[LabelSource+host], ","), repository) {
		return ""
	}
	return r.Name
}

// repositoryOf takes a name such as host:5000/path/name:tag apart, with or
// without tag and digest; empty for one without a repository. The registry's
// name is without its port, as it is in labels (containerd,
// core/remotes/docker/handler.go).
func repositoryOf(name string) (host, repository string) {
	name, _, _ = strings.Cut(name, "@")
	host, repository, ok := strings.Cut(name, "/")
	if !ok {
		return "", ""
	}
	if port := strings.LastIndexByte(host, ':'); port >= 0 && !strings.HasSuffix(host, "]") {
		host = host[:port]
	}
	host = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	if tag := strings.LastIndexByte(repository, ':'); tag >= 0 {
		repository = repository[:tag]
	}
	return host, repository
}

// repoDigest takes a name such as host:5000/path/name@sha256:... apart. digest is
// empty for any other.
func repoDigest(name string) (host, repository, digest string) {
	name, digest, ok := strings.Cut(name, "@")
	if !ok {
		return "", "", ""
	}
	host, repository = repositoryOf(name)
	if host == "" {
		return "", "", ""
	}
	return host, repository, digest
}

// notFrom says what of an image was not pulled from a repository, empty if all
// was. A layer may come from another repository of the same registry, which then
// has it too; documents may not.
func (s *store) notFrom(g *group, n int32, host, repository string) string {
	label := LabelSource + host
	for _, digest := range g.documents {
		if b := s.blob(n, digest); b == nil || !slices.Contains(strings.Split(b.Labels[label], ","), repository) {
			return "blob " + digest + " was not pulled from " + host + "/" + repository
		}
	}
	for _, l := range g.layers {
		// A layer that is not there as a blob was thrown away after it was
		// unpacked, or never needed.
		if b := s.blob(n, l.Digest); b != nil && b.Labels[label] == "" {
			return "layer " + l.Digest + " was not pulled from " + host
		}
	}
	return ""
}

func (s *store) blob(n int32, digest string) *Blob {
	node, ok := s.byName[name{n, nodeBlob, "", digest}]
	if !ok {
		return nil
	}
	return &s.contents.Namespaces[n].Blobs[s.objects[node].index]
}

// sum adds up what images take and would free.
func (p *Picture) sum() {
	reach := newReach(p.store.graph)
	death := p.store.graph.death()
	duplicates := map[int32]bool{}
	for i := range p.Images {
		image, g := &p.Images[i], &p.groups[i]
		image.Nominal = p.store.amount(reach.of(g.records))
		image.Exclusive = p.store.amount(death.remove(g.records))
		death.again()
		twice := p.store.duplicates(p.namespace(image.Namespace), g)
		image.Duplicate = p.store.amount(twice)
		for _, node := range twice {
			duplicates[node] = true
		}
	}
	all, twice := []int32(nil), []int32(nil)
	for node := range p.store.objects {
		n := int32(node)
		all = append(all, n)
		if duplicates[n] {
			twice = append(twice, n)
		}
	}
	p.Total, p.Duplicate = p.store.amount(all), p.store.amount(twice)
	p.mortal = make([]bool, len(p.store.objects))
	for i := range p.groups {
		for _, n := range death.remove(p.groups[i].records) {
			p.mortal[n] = true
		}
	}
}

func (p *Picture) namespace(wanted string) int32 {
	i, _ := slices.BinarySearchFunc(p.store.contents.Namespaces, wanted, func(ns Namespace, name string) int { return cmp.Compare(ns.Name, name) })
	return int32(i)
}

// duplicates are the nodes with the bytes of those compressed layers that are
// there unpacked as well.
func (s *store) duplicates(n int32, g *group) (out []int32) {
	if len(g.layers) != len(g.chainIDs) {
		return nil // not layers in the usual sense
	}
	for i, l := range g.layers {
		node, ok := s.byName[name{n, nodeBlob, "", l.Digest}]
		if !ok || !s.unpacked(n, g.chainIDs[i]) {
			continue
		}
		if carrier := s.carrier(node); !slices.Contains(out, carrier) {
			out = append(out, carrier)
		}
	}
	return out
}

func (s *store) unpacked(n int32, chainID string) bool {
	for _, sn := range s.contents.Snapshotters {
		if _, ok := s.byName[name{n, nodeSnapshot, sn.Name, chainID}]; ok {
			return true
		}
	}
	return false
}

// reach follows references.
type reach struct {
	g     *graph
	seen  []int32
	round int32
	stack []int32
}

func newReach(g *graph) *reach { return &reach{g: g, seen: make([]int32, len(g.part))} }

// of returns nodes and all that they refer to. The result is valid until the
// next call.
func (r *reach) of(nodes []int32) (out []int32) {
	r.round++
	r.stack = append(r.stack[:0], nodes...)
	for len(r.stack) > 0 {
		n := r.stack[len(r.stack)-1]
		r.stack = r.stack[:len(r.stack)-1]
		if r.seen[n] == r.round {
			continue
		}
		r.seen[n] = r.round
		out = append(out, n)
		r.stack = append(r.stack, r.g.edges(n)...)
	}
	return out
}
