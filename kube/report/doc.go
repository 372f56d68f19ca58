// Package report tells the cluster what happens to this node's disks: events on pods and on the node, a condition of the node for
// each filesystem, and a taint that keeps new pods away. It imports nothing of ours; agent may import it.
//
// Nothing waits for it, and nothing depends on it: what can't be said is counted.
package report
