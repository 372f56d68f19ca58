// Package record is how a decision is written down, so that it can be explained
// and made again: with which options, from what, what was decided, what was
// picked to go, what came of it.
//
// A file of records has one JSON object on each line. Keys are the names of the
// fields here and in package engine. Whoever writes files and rotates them is
// elsewhere; like engine, which alone it imports, this package is values and
// functions.
package record

import (
	"cmp"
	"slices"
	"time"

	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/garbage"
)

// Format is the version of the format that this package writes, and the only
// one that it reads.
const Format = 1

// Record is one pass: what went into a decision and what came out.
type Record struct {
	// Format is the version of this format, Engine that of the engine which
	// decided (engine.Version).
	Format, Engine int
	// Decider is who decided: the name of a profile.
	Decider string
	// Config, State and Input are what Sync was given; State is from before
	// the pass.
	Config engine.Config
	State  engine.State
	Input  engine.Input
	// Next and Decision are what Sync returned.
	Next     engine.State
	Decision engine.Decision
	// Steps is what was picked for each kind of reclaim that was begun, in
	// order.
	Steps []Step `json:",omitempty"`
	// After was measured when the reclaim had ended; nil if that failed or if
	// there was no reclaim. Verdict is what was made of it.
	After   *engine.Summary `json:",omitempty"`
	Verdict *Verdict        `json:",omitempty"`
	// Evicted are the pods that went because of this pass.
	Evicted []Evicted `json:",omitempty"`
	// Collection says that this was no pass: something was tidied up while nothing was short. Steps is then what was picked; Config,
	// State, Input but for its time, Next and Decision are empty.
	Collection *Collection `json:",omitempty"`
	// Departure says that this was no pass either: an eviction of an earlier one came to its end. All but Input's time is empty.
	Departure *Departure `json:",omitempty"`
}

// Pass says whether this is one: whether something was decided.
func (r Record) Pass() bool { return r.Collection == nil && r.Departure == nil }

// Collection is tidying up without pressure.
type Collection struct {
	// Name is what is tidied up, for people.
	Name string
	// Asked says that somebody asked for it, not the clock.
	Asked bool `json:",omitempty"`
}

// Step is one kind of reclaim. One of the choices is set: what there was to
// pick from. Items are what was picked.
type Step struct {
	Kind       engine.Reclaim
	Images     *ImageChoice     `json:",omitempty"`
	Containers *ContainerChoice `json:",omitempty"`
	Logs       *LogChoice       `json:",omitempty"`
	Items      []Item           `json:",omitempty"`
}

// Need is how much a step is to free, in bytes; false if all that it can.
func (s Step) Need() (bytes int64, limited bool) {
	switch {
	case s.Images != nil && s.Images.NeedBytes != garbage.Everything:
		return s.Images.NeedBytes, true
	case s.Logs != nil && s.Logs.NeedBytes != garbage.Everything:
		return s.Logs.NeedBytes, true
	default:
		return 0, false
	}
}

// Item is one thing that was to go, and what came of it.
type Item struct {
	// ID is an image's key, a container's id or a log's path.
	ID string
	// Rule is the rule by which it goes.
	Rule string
	// ExpectedBytes is what was to come free, where that is known.
	ExpectedBytes *int64 `json:",omitempty"`
	// ActualBytes is what came free by the filesystem's own figures; nil while
	// it was not measured. Error is why the thing is still there.
	ActualBytes *int64 `json:",omitempty"`
	Error       string `json:",omitempty"`
	// Note is what else came to light: who holds what did not come free.
	Note string `json:",omitempty"`
	// OthersWrote says that others took space while it went, so that what came
	// free is at least ActualBytes.
	OthersWrote bool `json:",omitempty"`
}

// Verdict says whether the reclaim was enough (engine.Config.Resolved).
type Verdict struct {
	Resolved bool
	// Freed is what was set free by then and may have been on its way; the
	// option AwaitFreed counts it.
	Freed []engine.Freed `json:",omitempty"`
	// Still are the thresholds that were not resolved.
	Still []engine.Threshold `json:",omitempty"`
}

// Evicted is one pod that went.
type Evicted struct {
	UID string
	At  time.Time
	// ExpectedBytes is what the pod had on the filesystem under pressure,
	// ActualBytes what came free; nil while not known.
	ExpectedBytes, ActualBytes *int64 `json:",omitempty"`
	Error                      string `json:",omitempty"`
}

// Departure is the end of an eviction: the pod is gone, or stays.
type Departure struct {
	UID, Namespace, Name string
	Cause                engine.Cause
	// Told is when it was told to go.
	Told time.Time
	// ExpectedBytes is what it had where space was short, ActualBytes by how
	// much more was available there when it was gone, whatever others wrote and
	// deleted meanwhile; nil while not known.
	ExpectedBytes, ActualBytes *int64 `json:",omitempty"`
	// Error is why it stays; empty if it is gone.
	Error string `json:",omitempty"`
}

// ImageChoice is what images were picked from, for space.
type ImageChoice struct {
	Policy garbage.ImagePolicy
	Known  garbage.Images
	// InUse are the keys of the images that containers use, or that stay for
	// another reason; Kept has the reasons by key, where they are not plain use.
	InUse map[string]bool
	Kept  map[string]string `json:",omitempty"`
	// Layers are those of each image by key. If they are nil, reported sizes
	// count, as in the kubelet.
	Layers map[string][]garbage.Layer `json:",omitempty"`
	// NeedBytes is what has to come free; garbage.Everything for all that can.
	NeedBytes int64
	// Began is when the run began.
	Began time.Time
	// ByAge says that images go because of their age, and since when that was watched (IGC-12); nil if they go for space.
	ByAge *time.Time `json:",omitempty"`
}

// TooOld are the images that are to go because of their age, first to go first.
func (c ImageChoice) TooOld() []garbage.Image {
	if c.ByAge == nil {
		return nil
	}
	remove, _ := c.Policy.TooOld(c.Known.Unused(c.InUse), c.Began, *c.ByAge)
	return remove
}

// aged picks by age.
func (c ImageChoice) aged() (out []Item) {
	old := c.TooOld()
	plan := c.Policy.ForSpace(old, garbage.Everything, c.Began)
	if c.Layers != nil {
		plan = c.Policy.ForSpaceExclusive(c.Known, c.Layers, old, garbage.Everything, c.Began)
	}
	gain := map[string]int64{}
	for i, image := range plan.Remove {
		gain[image.Key()] = plan.GainBytes[i]
	}
	for _, image := range old {
		bytes := gain[image.Key()] // an image that frees nothing goes all the same
		out = append(out, Item{ID: image.Key(), Rule: "IGC-12", ExpectedBytes: &bytes})
	}
	return out
}

// Items picks.
func (c ImageChoice) Items() []Item {
	if c.ByAge != nil {
		return c.aged()
	}
	unused := c.Known.Unused(c.InUse)
	var plan garbage.ImagePlan
	rule := "IGC-17"
	if c.NeedBytes == garbage.Everything {
		rule = "IGC-20"
	}
	if c.Layers != nil {
		plan = c.Policy.ForSpaceExclusive(c.Known, c.Layers, unused, c.NeedBytes, c.Began)
		rule = "GAP-25"
	} else {
		plan = c.Policy.ForSpace(unused, c.NeedBytes, c.Began)
	}
	out := make([]Item, 0, len(plan.Remove))
	for i, image := range plan.Remove {
		out = append(out, Item{ID: image.Key(), Rule: rule, ExpectedBytes: &plan.GainBytes[i]})
	}
	return out
}

// ContainerChoice is what dead containers, and sandboxes, were picked from.
type ContainerChoice struct {
	Policy     garbage.ContainerPolicy
	Containers []garbage.Container
	Sandboxes  []garbage.Sandbox `json:",omitempty"`
	Pods       garbage.Pods
	Now        time.Time
	// Pressure says that it was reclaim that asked, not the clock.
	Pressure bool
	// Bytes are what containers and sandboxes have, by id, as far as that is
	// known.
	Bytes map[string]int64 `json:",omitempty"`
}

// Items picks: containers, and then the sandboxes that have none any more.
func (c ContainerChoice) Items() []Item {
	var out []Item
	add := func(id, rule string) {
		item := Item{ID: id, Rule: rule}
		if bytes, ok := c.Bytes[id]; ok {
			item.ExpectedBytes = &bytes
		}
		out = append(out, item)
	}
	gone := map[string]bool{}
	for _, r := range c.Policy.Dead(c.Containers, c.Pods, c.Now, c.Pressure) {
		gone[r.Container.ID] = true
		add(r.Container.ID, r.Rule)
	}
	left := slices.DeleteFunc(slices.Clone(c.Containers), func(d garbage.Container) bool { return gone[d.ID] })
	for _, s := range garbage.Sandboxes(c.Sandboxes, left, c.Pods, c.Pressure) {
		add(s.ID, "CGC-9")
	}
	return out
}

// LogChoice is what rotated logs, and logs of pods that are gone, were picked
// from.
type LogChoice struct {
	// Gone are logs of pods that are gone; all of them go.
	Gone []garbage.LogFile `json:",omitempty"`
	// Rotated go oldest first until NeedBytes came free.
	Rotated   []garbage.LogFile `json:",omitempty"`
	NeedBytes int64
}

// Items picks.
func (c LogChoice) Items() []Item {
	var out []Item
	need := c.NeedBytes
	gone := slices.SortedFunc(slices.Values(c.Gone), func(a, b garbage.LogFile) int { return cmp.Compare(a.Path, b.Path) })
	for _, f := range gone {
		out = append(out, Item{ID: f.Path, Rule: "CGC-10", ExpectedBytes: &f.Bytes})
		need -= f.Bytes
	}
	for _, f := range garbage.RotatedLogs(c.Rotated, need) {
		out = append(out, Item{ID: f.Path, Rule: "GAP-1", ExpectedBytes: &f.Bytes})
	}
	return out
}

// items are what a step picks from what it was given; false if it was given
// nothing.
func (s Step) items() ([]Item, bool) {
	switch {
	case s.Images != nil:
		return s.Images.Items(), true
	case s.Containers != nil:
		return s.Containers.Items(), true
	case s.Logs != nil:
		return s.Logs.Items(), true
	default:
		return nil, false
	}
}
