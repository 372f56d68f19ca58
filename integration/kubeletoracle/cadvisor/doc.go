// Package cadvisor is only tests: it holds proxy/criocompat and agent/rootbind
// against the code of the kubelet's own cAdvisor, unmodified: its client, which
// asks on the fixed socket of CRI-O, its handlers, which pick cgroups by name, and
// its walk of a writable layer.
package cadvisor
