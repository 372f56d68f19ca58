package engine

import "slices"

// IfShort are the decisions that a pass would come to if on each filesystem its
// most urgent threshold were due, met or not, and reclaim freed nothing: who
// would go first there, and why. They are in the order of the signals. s is the
// state that Sync returned, in the input that it was given; nothing of it is
// changed, and nobody goes for it.
//
// HoldFire and AwaitFreed count for a threshold that is met only: before that
// nobody knows whose the bytes will be that are missing then.
func (c Config) IfShort(s State, in Input) []Decision {
	if s.Layout == nil || s.Layout.Refused || in.Summary == nil {
		return nil
	}
	layout := c.Options.layout(*s.Layout)
	stats, seen := c.Options.credible(in.Summary), c.Options.believed(in.Summary.Observe())
	disks := map[string][]Threshold{}
	for _, t := range c.all(*s.Layout) {
		if _, ok := seen[t.Signal]; ok && !t.Inert && t.Signal.disk(layout) != "" {
			disk := t.Signal.disk(layout)
			disks[disk] = append(disks[disk], t)
		}
	}
	out := make([]Decision, 0, len(disks))
	for _, list := range disks {
		t := byUrgency(list, seen)[0]
		with := c
		if !t.met(seen[t.Signal], false) {
			with.Options.HoldFire, with.Options.AwaitFreed = false, false
		}
		due := []Threshold{t}
		out = append(out, with.relieve(Decision{Due: due, Choices: due}, s, in, stats, seen, t))
	}
	slices.SortFunc(out, func(a, b Decision) int { return compareThresholds(a.Threshold, b.Threshold) })
	return out
}
