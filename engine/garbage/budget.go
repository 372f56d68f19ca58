package garbage

import (
	"cmp"
	"slices"
)

// PodLogs are the logs of one pod.
type PodLogs struct {
	UID string
	// WrittenBytes are those of the files that are written to; they stay.
	WrittenBytes int64
	// Rotated are the files that can go.
	Rotated []LogFile
}

func (p PodLogs) bytes() int64 {
	sum := p.WrittenBytes
	for _, f := range p.Rotated {
		sum += f.Bytes
	}
	return sum
}

// LogBudget picks rotated logs to delete so that all logs of a node fit into a
// budget (GAP-36); the kubelet limits each container by itself and nothing in
// all. Shares are fair: each pod may have the same, and what one does not need
// is shared by the others. Of a pod above its share the oldest files go, as many
// as it takes. Nothing goes while all together fit.
func LogBudget(pods []PodLogs, budgetBytes int64) []LogFile {
	var total int64
	for _, p := range pods {
		total += p.bytes()
	}
	if total <= budgetBytes {
		return nil
	}
	share := fairShare(pods, budgetBytes)
	var out []LogFile
	for _, p := range slices.SortedFunc(slices.Values(pods), func(a, b PodLogs) int { return cmp.Compare(a.UID, b.UID) }) {
		out = append(out, RotatedLogs(p.Rotated, p.bytes()-share)...)
	}
	return out
}

// fairShare is the largest share with which all fit: smaller ones are served in
// full, the rest is divided.
func fairShare(pods []PodLogs, budgetBytes int64) int64 {
	sizes := make([]int64, len(pods))
	for i, p := range pods {
		sizes[i] = p.bytes()
	}
	slices.Sort(sizes)
	for i, size := range sizes {
		if share := budgetBytes / int64(len(sizes)-i); size > share {
			return max(0, share)
		}
		budgetBytes -= size
	}
	return budgetBytes
}
