package record

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/cleave-cri/cleave/engine"
)

// Difference is a place where this engine comes to something else than was
// recorded.
type Difference struct {
	// Path is where, as in Decision.Victim.UID.
	Path string
	// Recorded and Now are the two values as JSON; empty for none.
	Recorded, Now string
}

func (d Difference) String() string {
	shown := func(s string) string {
		switch {
		case s == "":
			return "nothing"
		case len(s) > 200:
			return s[:200] + "…"
		default:
			return s
		}
	}
	return fmt.Sprintf("%s: recorded %s, now %s", d.Path, shown(d.Recorded), shown(d.Now))
}

// Replay makes the decision of a record again, with what it was made from, and
// lists what is different: nothing if the same engine version wrote it.
func Replay(r Record) ([]Difference, error) {
	return compare(r, Again(r))
}

// Again is the record that this engine makes of the same input. What came of it
// (figures after the reclaim, actual bytes, errors, who went) is as it was.
func Again(r Record) Record {
	again := r
	again.Engine = engine.Version
	if r.Pass() {
		again.Next, again.Decision = r.Config.Sync(r.State, r.Input)
	}
	again.Steps = slices.Clone(r.Steps)
	for i := range again.Steps {
		items, ok := again.Steps[i].items()
		if !ok {
			continue
		}
		for j := range items {
			if k := slices.IndexFunc(r.Steps[i].Items, func(it Item) bool { return it.ID == items[j].ID }); k >= 0 {
				items[j].ActualBytes, items[j].Error = r.Steps[i].Items[k].ActualBytes, r.Steps[i].Items[k].Error
			}
		}
		again.Steps[i].Items = items
	}
	if r.Verdict != nil {
		again.Verdict = &Verdict{Freed: r.Verdict.Freed}
		state := again.Next
		state.Freed = r.Verdict.Freed
		again.Verdict.Resolved, again.Verdict.Still = r.Config.Resolved(state, again.Decision, r.After)
	}
	return again
}

// compare looks at what an engine decides. What it decides from is the same.
func compare(recorded, now Record) ([]Difference, error) {
	type decided struct {
		Next     engine.State
		Decision engine.Decision
		Steps    [][]Item
		Verdict  *Verdict
	}
	tree := func(r Record) (any, error) {
		d := decided{Next: r.Next, Decision: r.Decision, Verdict: r.Verdict}
		for _, s := range r.Steps {
			d.Steps = append(d.Steps, s.Items)
		}
		text, err := json.Marshal(d)
		if err != nil {
			return nil, fmt.Errorf("compare records: %w", err)
		}
		var out any
		decoder := json.NewDecoder(bytes.NewReader(text))
		decoder.UseNumber()
		if err := decoder.Decode(&out); err != nil {
			return nil, fmt.Errorf("compare records: %w", err)
		}
		return out, nil
	}
	a, err := tree(recorded)
	if err != nil {
		return nil, err
	}
	b, err := tree(now)
	if err != nil {
		return nil, err
	}
	var out []Difference
	differ(&out, "", a, b)
	return out, nil
}

// differ walks two trees. A list that is empty and one that is missing are the
// same, and so are "1Gi" and "1073741824".
func differ(out *[]Difference, path string, a, b any) {
	switch x := a.(type) {
	case map[string]any:
		if y, ok := b.(map[string]any); ok {
			both := map[string]bool{}
			for key := range x {
				both[key] = true
			}
			for key := range y {
				both[key] = true
			}
			for _, key := range slices.Sorted(maps.Keys(both)) {
				differ(out, strings.TrimPrefix(path+"."+key, "."), x[key], y[key])
			}
			return
		}
	case []any:
		if y, ok := b.([]any); ok {
			for i := range max(len(x), len(y)) {
				differ(out, fmt.Sprintf("%s[%d]", path, i), at(x, i), at(y, i))
			}
			return
		}
	}
	if empty(a) && empty(b) || text(a) == text(b) || sameAmount(a, b) {
		return
	}
	*out = append(*out, Difference{Path: path, Recorded: text(a), Now: text(b)})
}

func at(list []any, i int) any {
	if i < len(list) {
		return list[i]
	}
	return nil
}

func empty(v any) bool {
	switch v := v.(type) {
	case nil:
		return true
	case []any:
		return len(v) == 0
	case map[string]any:
		return len(v) == 0
	default:
		return false
	}
}

func sameAmount(a, b any) bool {
	x, ok := a.(string)
	y, also := b.(string)
	if !ok || !also {
		return false
	}
	p, err := engine.ParseQuantity(x)
	if err != nil {
		return false
	}
	q, err := engine.ParseQuantity(y)
	return err == nil && p.Cmp(q) == 0
}

func text(v any) string {
	if v == nil {
		return ""
	}
	out, err := json.Marshal(v)
	if err != nil {
		return fmt.Sprint(v)
	}
	return string(out)
}
