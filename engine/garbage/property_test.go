package garbage

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// store are images with layers, some of them shared, used or pinned.
type store struct {
	known  Images
	layers map[string][]Layer
	inUse  map[string]bool
}

func anyStore(t *rapid.T) store {
	s := store{known: Images{}, layers: map[string][]Layer{}, inUse: map[string]bool{}}
	for i := range rapid.IntRange(0, 8).Draw(t, "images") {
		id := fmt.Sprintf("image-%d", i)
		s.known[id] = Image{
			ID: id, FirstSeen: at("08:00:00").Add(time.Duration(rapid.IntRange(0, 3).Draw(t, "seen")) * time.Minute), SizeBytes: rapid.Int64Range(0, 9).Draw(t, "size"),
			Pinned: rapid.IntRange(0, 4).Draw(t, "pinned") == 0,
		}
		s.inUse[id] = rapid.IntRange(0, 3).Draw(t, "used") == 0
		for j := range rapid.IntRange(0, 4).Draw(t, "layers") {
			layer := rapid.IntRange(0, 9).Draw(t, "layer")
			s.layers[id] = append(s.layers[id], Layer{ID: fmt.Sprintf("layer-%d-%d", j, layer), Bytes: int64(layer + 1)})
		}
		if s.layers[id] == nil {
			s.layers[id] = []Layer{}
		}
	}
	return s
}

// used is what all layers of the images that are left take.
func (s store) used(without ...Image) int64 {
	gone, seen := map[string]bool{}, map[string]bool{}
	for _, i := range without {
		gone[i.Key()] = true
	}
	var sum int64
	for id, layers := range s.layers {
		for _, l := range layers {
			if !gone[id] && !seen[l.ID] {
				seen[l.ID] = true
				sum += l.Bytes
			}
		}
	}
	return sum
}

// TestPropertyExclusivePlans: nothing that is used or pinned goes, what is
// promised comes free, no image more goes than needed, a second plan for the
// rest plans nothing, and the order of maps does not matter.
func TestPropertyExclusivePlans(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		s := anyStore(t)
		need := rapid.Int64Range(-1, 40).Draw(t, "need")
		policy := ImagePolicy{Options: Cleave()}
		plan := policy.ForSpaceExclusive(s.known, s.layers, s.known.Unused(s.inUse), need, at("12:00:00"))
		var promised int64
		for i, image := range plan.Remove {
			if image.Pinned || s.inUse[image.Key()] {
				t.Fatalf("%s goes", image.ID)
			}
			if promised >= need {
				t.Fatalf("%s goes for nothing: %d of %d", image.ID, promised, need)
			}
			promised += plan.GainBytes[i]
		}
		if freed := s.used() - s.used(plan.Remove...); freed != promised {
			t.Fatalf("%d come free, %d were promised", freed, promised)
		}
		for _, image := range plan.Remove {
			delete(s.known, image.Key())
			delete(s.layers, image.Key())
		}
		if again := policy.ForSpaceExclusive(s.known, s.layers, s.known.Unused(s.inUse), need-promised, at("12:00:00")); promised >= need && len(again.Remove) > 0 {
			t.Fatalf("then %v", again.Remove)
		}
	})
}

// TestPropertyLogBudget: what is promised fits, as far as rotated logs allow;
// whoever is within a fair share loses nothing; order does not matter.
func TestPropertyLogBudget(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var pods []PodLogs
		for i := range rapid.IntRange(0, 6).Draw(t, "pods") {
			p := PodLogs{UID: fmt.Sprintf("pod-%d", i), WrittenBytes: rapid.Int64Range(0, 20).Draw(t, "written")}
			for j := range rapid.IntRange(0, 4).Draw(t, "rotated") {
				p.Rotated = append(p.Rotated, LogFile{Path: fmt.Sprintf("%s/%d", p.UID, j), Bytes: rapid.Int64Range(0, 20).Draw(t, "bytes"), WrittenAt: at("12:00:00").Add(time.Duration(j) * time.Second)})
			}
			pods = append(pods, p)
		}
		budget := rapid.Int64Range(0, 200).Draw(t, "budget")
		gone := map[string]bool{}
		list := LogBudget(pods, budget)
		for _, f := range list {
			gone[f.Path] = true
		}
		var total int64
		modest := true // all that is written to fits into equal shares
		for _, p := range pods {
			left := p.WrittenBytes
			lost := false
			for _, f := range p.Rotated {
				if gone[f.Path] {
					lost = true
					continue
				}
				left += f.Bytes
			}
			if lost && p.bytes() <= budget/int64(len(pods)) {
				t.Fatalf("%s is within its share and loses logs", p.UID)
			}
			total += left
			modest = modest && p.WrittenBytes <= budget/int64(len(pods))
		}
		if total > budget && modest {
			t.Fatalf("%d are left of %d", total, budget)
		}
		shuffled := append([]PodLogs(nil), pods...)
		rand.Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
		if diff := cmp.Diff(list, LogBudget(shuffled, budget)); diff != "" {
			t.Fatal(diff)
		}
	})
}
