package inventory

// graph is who keeps whom, by the rules of containerd's collector: what is
// reachable from a root stays. Nodes are numbers.
//
// For "what dies with these" it counts references, which is exact where nothing
// refers to itself in a circle. So nodes that do are put together first: they
// live and die as one.
type graph struct {
	// edges of node n are to[from[n]:from[n+1]], with repetitions.
	from, to []int32
	// roots are references from outside the graph, with repetitions.
	roots []int32
	// part is the circle that a living node belongs to, most often alone; -1
	// for a dead one.
	part []int32
	// members of part p are member[first[p]:first[p+1]].
	first, member []int32
	// held counts the references to each part from other parts and from outside.
	held []int32
}

// edge is a reference.
type edge struct{ from, to int32 }

// newGraph takes nodes 0 to n-1.
func newGraph(n int, edges []edge, roots []int32) *graph {
	g := &graph{from: make([]int32, n+1), to: make([]int32, len(edges)), roots: roots}
	for _, e := range edges {
		g.from[e.from+1]++
	}
	for i := range n {
		g.from[i+1] += g.from[i]
	}
	next := append([]int32(nil), g.from[:n]...)
	for _, e := range edges {
		g.to[next[e.from]] = e.to
		next[e.from]++
	}
	g.findParts(n)
	g.count()
	return g
}

func (g *graph) edges(n int32) []int32 { return g.to[g.from[n]:g.from[n+1]] }

// lives says whether a node is reachable from a root.
func (g *graph) lives(n int32) bool { return g.part[n] >= 0 }

func (g *graph) members(part int32) []int32 { return g.member[g.first[part]:g.first[part+1]] }

// findParts is Tarjan's algorithm for strongly connected components, from the
// roots, with a stack of its own: chains of references can be long.
func (g *graph) findParts(n int) {
	g.part = make([]int32, n)
	order, low := make([]int32, n), make([]int32, n) // order from 1; 0: not seen
	waiting := make([]bool, n)
	for i := range g.part {
		g.part[i] = -1
	}
	type visit struct{ node, edge int32 }
	var path []visit
	var pending []int32
	seen := int32(0)
	enter := func(node int32) {
		seen++
		order[node], low[node] = seen, seen
		waiting[node] = true
		pending = append(pending, node)
		path = append(path, visit{node: node})
	}
	g.first = append(g.first, 0)
	for _, root := range g.roots {
		if order[root] != 0 {
			continue
		}
		enter(root)
		for len(path) > 0 {
			at := &path[len(path)-1]
			if edges := g.edges(at.node); int(at.edge) < len(edges) {
				to := edges[at.edge]
				at.edge++
				switch {
				case order[to] == 0:
					enter(to)
				case waiting[to]:
					low[at.node] = min(low[at.node], order[to])
				}
				continue
			}
			node := at.node
			path = path[:len(path)-1]
			if len(path) > 0 {
				above := path[len(path)-1].node
				low[above] = min(low[above], low[node])
			}
			if low[node] != order[node] {
				continue
			}
			part := int32(len(g.first) - 1)
			for {
				last := pending[len(pending)-1]
				pending = pending[:len(pending)-1]
				waiting[last] = false
				g.part[last] = part
				g.member = append(g.member, last)
				if last == node {
					break
				}
			}
			g.first = append(g.first, int32(len(g.member)))
		}
	}
}

func (g *graph) count() {
	g.held = make([]int32, len(g.first)-1)
	for _, root := range g.roots {
		g.held[g.part[root]]++
	}
	for _, node := range g.member {
		for _, to := range g.edges(node) {
			if g.part[to] != g.part[node] {
				g.held[g.part[to]]++
			}
		}
	}
}

// death is what dies when nodes are removed, one after the other. The graph stays
// as it is. It is for one caller.
type death struct {
	g *graph
	// lost counts the references to a part that are gone.
	lost []int32
	gone []bool // by part
	// touched are the parts to forget again.
	touched []int32
	stack   []int32
}

func (g *graph) death() *death {
	return &death{g: g, lost: make([]int32, len(g.held)), gone: make([]bool, len(g.held))}
}

// remove takes nodes away, whoever refers to them, and returns all nodes that die
// of it, these included. A dead node is passed over, and so is one in a circle
// with others: what would be left of that is not counted, so it is too little
// rather than too much.
func (d *death) remove(nodes []int32) (dead []int32) {
	for _, n := range nodes {
		part := d.g.part[n]
		if part < 0 || d.gone[part] || len(d.g.members(part)) != 1 {
			continue
		}
		d.gone[part] = true
		d.touched = append(d.touched, part)
		d.stack = append(d.stack, part)
		for len(d.stack) > 0 {
			part := d.stack[len(d.stack)-1]
			d.stack = d.stack[:len(d.stack)-1]
			for _, node := range d.g.members(part) {
				dead = append(dead, node)
				for _, to := range d.g.edges(node) {
					d.loses(d.g.part[to], part)
				}
			}
		}
	}
	return dead
}

// loses takes one reference from a part that is gone.
func (d *death) loses(part, from int32) {
	if part == from || d.gone[part] {
		return
	}
	d.lost[part]++
	d.touched = append(d.touched, part)
	if d.lost[part] == d.g.held[part] {
		d.gone[part] = true
		d.stack = append(d.stack, part)
	}
}

// again makes d as new, at the cost of what was done with it.
func (d *death) again() {
	for _, part := range d.touched {
		d.lost[part], d.gone[part] = 0, false
	}
	d.touched = d.touched[:0]
}
