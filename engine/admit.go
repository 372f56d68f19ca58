package engine

// Newcomer is what admission asks of a pod that is to start on the node.
type Newcomer struct {
	// Critical is Pod.Critical.
	Critical bool
	// BestEffort is the QoS class of pods without any request or limit.
	BestEffort bool
	// ToleratesMemoryPressure: the pod tolerates the taint of that name with
	// the effect NoSchedule.
	ToleratesMemoryPressure bool
}

// Admit says whether the kubelet lets a pod start while s holds, and by which
// rule. What counts are the conditions in memory, not those that the API
// shows (ADM-5). Under disk pressure no toleration helps (ADM-3).
func (s State) Admit(n Newcomer) (ok bool, rule string) {
	switch {
	case len(s.Conditions) == 0 || n.Critical:
		return true, "ADM-1"
	case len(s.Conditions) == 1 && s.Conditions[0] == MemoryPressure:
		return !n.BestEffort || n.ToleratesMemoryPressure, "ADM-2"
	default:
		return false, "ADM-3"
	}
}
