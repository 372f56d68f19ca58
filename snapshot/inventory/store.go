package inventory

import "strings"

// object is a node of the graph with what it stands for.
type object struct {
	kind nodeKind
	// namespace and index are its place in the Contents; of nodeBytes, that of
	// one of its blobs.
	namespace, index int32
}

// store is the graph over a store's contents.
type store struct {
	contents *Contents
	objects  []object
	graph    *graph
	// figures of nodes that have bytes of their own, by node; known says that
	// there is one.
	figures []Figure
	known   []bool
	weighs  []bool

	byName map[name]int32
	// names are nodes for names that something has attached itself to, apart
	// from the object of that name: whoever refers to the name keeps what is
	// attached to it, even if there is no such object (any more).
	names map[name]int32
	bytes map[string]int32 // nodeBytes by digest
	flat  map[int32]int32
	// flatSnapshot are those nodeFlat that stand for a snapshot, not a blob.
	flatSnapshot map[int32]bool
	edges        []edge
	roots        []int32
}

// name is what an object is called in its namespace.
type name struct {
	namespace        int32
	kind             nodeKind
	snapshotter, key string
}

func newStore(c *Contents, figures Figures) *store {
	n := 0
	for i := range c.Namespaces {
		ns := &c.Namespaces[i]
		n += len(ns.Images) + len(ns.Blobs) + len(ns.Ingests) + len(ns.Leases) + len(ns.Snapshots) + len(ns.Containers) + len(ns.Sandboxes)
	}
	s := &store{
		contents: c, objects: make([]object, 0, n), byName: make(map[name]int32, n), names: map[name]int32{},
		bytes: map[string]int32{}, flat: map[int32]int32{}, flatSnapshot: map[int32]bool{}, edges: make([]edge, 0, 4*n),
	}
	s.list()
	s.share()
	for i := range c.Namespaces {
		s.attach(int32(i), &c.Namespaces[i])
	}
	for i := range c.Namespaces {
		s.refer(int32(i), &c.Namespaces[i])
	}
	s.graph = newGraph(len(s.objects), s.edges, s.roots)
	s.weigh(figures)
	s.edges, s.roots, s.names = nil, nil, nil
	return s
}

func (s *store) node(kind nodeKind, namespace, index int) int32 {
	s.objects = append(s.objects, object{kind: kind, namespace: int32(namespace), index: int32(index)})
	return int32(len(s.objects) - 1)
}

// list makes a node of everything.
func (s *store) list() {
	for n := range s.contents.Namespaces {
		ns := &s.contents.Namespaces[n]
		add := func(kind nodeKind, snapshotter, key string, i int) {
			s.byName[name{int32(n), kind, snapshotter, key}] = s.node(kind, n, i)
		}
		for i := range ns.Images {
			add(nodeRecord, "", ns.Images[i].Name, i)
		}
		for i := range ns.Blobs {
			add(nodeBlob, "", ns.Blobs[i].Digest, i)
		}
		for i := range ns.Snapshots {
			add(nodeSnapshot, ns.Snapshots[i].Snapshotter, ns.Snapshots[i].Key, i)
		}
		for i := range ns.Containers {
			add(nodeContainer, "", ns.Containers[i].ID, i)
		}
		for i := range ns.Leases {
			add(nodeLease, "", ns.Leases[i].ID, i)
		}
		for i := range ns.Ingests {
			add(nodeIngest, "", ns.Ingests[i].Ref, i)
		}
		for i := range ns.Sandboxes {
			add(nodeSandbox, "", ns.Sandboxes[i].ID, i)
		}
	}
}

// share gives a blob that more than one namespace has, or that an ingest
// anywhere is to become, a node for its bytes: they go with the last of these
// (containerd, core/metadata/content.go: garbageCollect).
func (s *store) share() {
	common := map[string]bool{}
	if len(s.contents.Namespaces) > 1 {
		seen := map[string]bool{}
		for n := range s.contents.Namespaces {
			for _, b := range s.contents.Namespaces[n].Blobs {
				if seen[b.Digest] {
					common[b.Digest] = true
				}
				seen[b.Digest] = true
			}
		}
	}
	for n := range s.contents.Namespaces {
		for _, in := range s.contents.Namespaces[n].Ingests {
			if in.Expected != "" {
				common[in.Expected] = true
			}
		}
	}
	if len(common) == 0 {
		return
	}
	for n := range s.contents.Namespaces {
		for i, b := range s.contents.Namespaces[n].Blobs {
			if !common[b.Digest] {
				continue
			}
			node, ok := s.bytes[b.Digest]
			if !ok {
				node = s.node(nodeBytes, n, i)
				s.bytes[b.Digest] = node
			}
			s.edge(s.byName[name{int32(n), nodeBlob, "", b.Digest}], node)
		}
	}
}

func (s *store) edge(from, to int32) { s.edges = append(s.edges, edge{from, to}) }

// find returns the node that a label, lease or record names. Something that is
// not there keeps nothing.
func (s *store) find(namespace int32, t target) (int32, bool) {
	node, ok := s.byName[name{namespace, t.kind, t.snapshotter, t.key}]
	return node, ok
}

// link makes a reference. Who removes an image that is a root by itself removes it
// whoever refers to it, so such references don't count.
func (s *store) link(from int32, namespace int32, t target) {
	if at, ok := s.names[name{namespace, t.kind, t.snapshotter, t.key}]; ok {
		s.edge(from, at)
	}
	if to, ok := s.find(namespace, t); ok && !s.rootRecord(to) {
		s.edge(from, to)
	}
}

// rootRecord says that a node is an image that is a root by itself.
func (s *store) rootRecord(node int32) bool {
	o := s.objects[node]
	return o.kind == nodeRecord && !expired(s.contents.Namespaces[o.namespace].Images[o.index].Labels, s.contents.At)
}

// refer makes the references of a namespace. Labels come in any order, and so do
// edges: what is reachable and how much that is does not depend on it.
func (s *store) refer(n int32, ns *Namespace) {
	for i := range ns.Images {
		r := &ns.Images[i]
		node := s.byName[name{n, nodeRecord, "", r.Name}]
		if s.rootRecord(node) {
			s.roots = append(s.roots, node)
		}
		s.link(node, n, target{kind: nodeBlob, key: r.Target})
		s.linkLabels(node, n, r.Labels)
		s.linkIf(node, n, r.Labels)
	}
	for i := range ns.Blobs {
		b := &ns.Blobs[i]
		node := s.byName[name{n, nodeBlob, "", b.Digest}]
		s.linkLabels(node, n, b.Labels)
		s.linkIf(node, n, b.Labels)
		if isRoot(b.Labels) {
			s.roots = append(s.roots, node)
		}
	}
	for i := range ns.Snapshots {
		sn := &ns.Snapshots[i]
		node := s.byName[name{n, nodeSnapshot, sn.Snapshotter, sn.Key}]
		if sn.Parent != "" {
			s.link(node, n, target{kind: nodeSnapshot, snapshotter: sn.Snapshotter, key: sn.Parent})
		}
		s.linkLabels(node, n, sn.Labels)
		if isRoot(sn.Labels) {
			s.roots = append(s.roots, node)
		}
	}
	for i := range ns.Containers {
		c := &ns.Containers[i]
		node := s.byName[name{n, nodeContainer, "", c.ID}]
		s.roots = append(s.roots, node)
		if c.Snapshotter != "" {
			s.link(node, n, target{kind: nodeSnapshot, snapshotter: c.Snapshotter, key: c.SnapshotKey})
		}
		s.linkLabels(node, n, c.Labels)
	}
	for i := range ns.Sandboxes {
		node := s.byName[name{n, nodeSandbox, "", ns.Sandboxes[i].ID}]
		s.roots = append(s.roots, node)
		s.linkLabels(node, n, ns.Sandboxes[i].Labels)
	}
	for i := range ns.Ingests {
		// When an ingest expires containerd does not tell; it is taken as kept.
		in := &ns.Ingests[i]
		node := s.byName[name{n, nodeIngest, "", in.Ref}]
		s.roots = append(s.roots, node)
		if in.Expected == "" {
			continue
		}
		s.link(node, n, target{kind: nodeBlob, key: in.Expected})
		if bytes, ok := s.bytes[in.Expected]; ok {
			s.edge(node, bytes)
		}
	}
	for i := range ns.Leases {
		s.lease(n, &ns.Leases[i])
	}
}

func (s *store) linkLabels(node, n int32, labels map[string]string) {
	for label, value := range labels {
		if t, ok := refersTo(label, value); ok {
			s.link(node, n, t)
		}
	}
}

// attach makes the references by which objects attach themselves to others.
// Containers and images that don't expire are there anyway.
func (s *store) attach(n int32, ns *Namespace) {
	for i := range ns.Images {
		if node := s.byName[name{n, nodeRecord, "", ns.Images[i].Name}]; !s.rootRecord(node) {
			s.attachTo(node, n, ns.Images[i].Labels)
		}
	}
	for i := range ns.Blobs {
		s.attachTo(s.byName[name{n, nodeBlob, "", ns.Blobs[i].Digest}], n, ns.Blobs[i].Labels)
	}
	for i := range ns.Snapshots {
		sn := &ns.Snapshots[i]
		s.attachTo(s.byName[name{n, nodeSnapshot, sn.Snapshotter, sn.Key}], n, sn.Labels)
	}
}

func (s *store) attachTo(node, n int32, labels map[string]string) {
	for label, value := range labels {
		t, ok := keptBy(label, value)
		if !ok {
			continue
		}
		key := name{n, t.kind, t.snapshotter, t.key}
		at, ok := s.names[key]
		if !ok {
			at = s.node(nodeName, int(n), 0)
			s.names[key] = at
			if object, ok := s.find(n, t); ok {
				s.edge(object, at)
			}
		}
		s.edge(at, node)
	}
}

// linkIf makes the references that depend on when a snapshot was used.
func (s *store) linkIf(node, n int32, labels map[string]string) {
	for label, value := range labels {
		for _, c := range conditionsOf(label, value) {
			to, ok := s.find(n, c.snapshot)
			if !ok {
				continue
			}
			o := s.objects[to]
			if c.meets(s.contents.Namespaces[o.namespace].Snapshots[o.index].Labels, s.contents.At) {
				s.edge(node, to)
			}
		}
	}
}

func (s *store) lease(n int32, l *Lease) {
	if expired(l.Labels, s.contents.At) {
		return
	}
	node := s.byName[name{n, nodeLease, "", l.ID}]
	s.roots = append(s.roots, node)
	_, flat := l.Labels[labelFlat]
	for _, r := range l.Resources {
		t, ok := r.target()
		if !ok {
			continue
		}
		if !flat {
			s.link(node, n, t)
			continue
		}
		s.linkFlat(node, n, t)
	}
}

// target is what a lease's resource names.
func (r Resource) target() (target, bool) {
	switch r.Type {
	case "content":
		return target{kind: nodeBlob, key: r.ID}, true
	case "images":
		return target{kind: nodeRecord, key: r.ID}, true
	case "ingests":
		return target{kind: nodeIngest, key: r.ID}, true
	}
	if name, ok := r.Snapshotter(); ok {
		return target{kind: nodeSnapshot, snapshotter: name, key: r.ID}, true
	}
	return target{}, false
}

// Snapshotter is the snapshotter of a resource that is a snapshot.
func (r Resource) Snapshotter() (name string, ok bool) {
	return strings.CutPrefix(r.Type, "snapshots/")
}

// linkFlat holds an object without what it refers to by labels: of an image its
// target, of a snapshot its parents too (containerd, core/metadata/gc.go:
// references).
func (s *store) linkFlat(from, n int32, t target) {
	to, ok := s.find(n, t)
	if !ok {
		return // what is attached to a name is not held flat
	}
	switch o := s.objects[to]; o.kind {
	case nodeBlob:
		s.edge(from, s.flatOf(to))
	case nodeSnapshot:
		s.edge(from, s.flatOf(to))
	case nodeRecord:
		blob, ok := s.find(n, target{kind: nodeBlob, key: s.contents.Namespaces[o.namespace].Images[o.index].Target})
		switch {
		case !ok:
		case s.rootRecord(to):
			// The record may go, and then nothing is left that the lease names.
			s.edge(to, s.flatOf(blob))
		default:
			s.edge(from, s.flatOf(blob))
		}
	default:
		s.edge(from, to)
	}
}

// flatOf returns the node that stands for an object alone. The object has its
// bytes by it.
func (s *store) flatOf(node int32) int32 {
	if flat, ok := s.flat[node]; ok {
		return flat
	}
	o := s.objects[node]
	flat := s.node(nodeFlat, int(o.namespace), int(o.index))
	s.flat[node] = flat
	s.edge(node, flat)
	if o.kind == nodeBlob {
		if bytes, ok := s.bytes[s.contents.Namespaces[o.namespace].Blobs[o.index].Digest]; ok {
			s.edge(flat, bytes)
		}
		return flat
	}
	s.flatSnapshot[flat] = true
	sn := &s.contents.Namespaces[o.namespace].Snapshots[o.index]
	if sn.Parent == "" {
		return flat
	}
	if parent, ok := s.find(o.namespace, target{kind: nodeSnapshot, snapshotter: sn.Snapshotter, key: sn.Parent}); ok {
		s.edge(flat, s.flatOf(parent))
	}
	return flat
}

// carrier is the node that has the bytes of a blob or snapshot: itself, or a node
// for its bytes or for it alone.
func (s *store) carrier(node int32) int32 {
	o := s.objects[node]
	if o.kind == nodeBlob {
		if bytes, ok := s.bytes[s.contents.Namespaces[o.namespace].Blobs[o.index].Digest]; ok {
			return bytes
		}
	}
	if flat, ok := s.flat[node]; ok {
		return flat
	}
	return node
}

// weigh asks for the figure of every node that has bytes of its own.
func (s *store) weigh(figures Figures) {
	s.figures = make([]Figure, len(s.objects))
	s.known, s.weighs = make([]bool, len(s.objects)), make([]bool, len(s.objects))
	for node := range s.objects {
		o := s.objects[node]
		if o.kind != nodeBlob && o.kind != nodeSnapshot && o.kind != nodeIngest {
			continue
		}
		at := s.carrier(int32(node))
		if s.weighs[at] {
			continue // the same blob in another namespace
		}
		s.weighs[at] = true
		ns := &s.contents.Namespaces[o.namespace]
		switch o.kind {
		case nodeBlob:
			s.figures[at], s.known[at] = figures.Blob(&ns.Blobs[o.index])
		case nodeSnapshot:
			s.figures[at], s.known[at] = figures.Snapshot(ns.Name, &ns.Snapshots[o.index])
		default:
			s.figures[at], s.known[at] = figures.Ingest(&ns.Ingests[o.index])
		}
	}
}

// amount adds up what nodes take.
func (s *store) amount(nodes []int32) (a Amount) {
	for _, n := range nodes {
		switch {
		case !s.weighs[n]:
		case s.known[n]:
			a.add(s.figures[n])
		default:
			a.Unknown++
		}
	}
	return a
}
