package inventory

// Part is a layer or blob of an image, for a planner that shares them out among
// images itself.
type Part struct {
	// ID is the same for the same bytes.
	ID string
	// Figure is what it takes; Known says whether that is known.
	Figure Figure
	Known  bool
	// Held says that it stays even if all images go: containers, leases or
	// labels keep it.
	Held bool
}

// Parts are the layers and blobs that an image refers to, each once.
func (p *Picture) Parts(k Key) []Part {
	i, ok := p.byKey[k]
	if !ok {
		return nil
	}
	return p.parts(newReach(p.store.graph), i)
}

// AllParts are the parts of each image, in the order of Images.
func (p *Picture) AllParts() [][]Part {
	r := newReach(p.store.graph)
	out := make([][]Part, len(p.Images))
	for i := range out {
		out[i] = p.parts(r, i)
	}
	return out
}

func (p *Picture) parts(r *reach, i int) (out []Part) {
	s := p.store
	for _, n := range r.of(p.groups[i].records) {
		if s.weighs[n] {
			out = append(out, Part{ID: s.partID(n), Figure: s.figures[n], Known: s.known[n], Held: !p.mortal[n]})
		}
	}
	return out
}

// partID names the bytes of a node.
func (s *store) partID(n int32) string {
	o := s.objects[n]
	ns := &s.contents.Namespaces[o.namespace]
	switch {
	case o.kind == nodeSnapshot, o.kind == nodeFlat && s.flatSnapshot[n]:
		sn := &ns.Snapshots[o.index]
		return ns.Name + "/" + sn.Snapshotter + "/" + sn.Key
	default:
		return ns.Blobs[o.index].Digest
	}
}
