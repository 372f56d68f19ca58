package garbage

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// TestSeedT4_GAP25 is a node whose unused images share layers. By reported sizes
// A and B are enough for 11 GiB, and 7 come free.
func TestSeedT4_GAP25(t *testing.T) {
	t.Parallel()
	shared := Layer{"shared", 4 * gib}
	layers := map[string][]Layer{
		"A": {shared, {"a", gib}}, "B": {shared, {"b", 2 * gib}}, "C": {{"c", 4 * gib}},
		"D": {{"used", 9 * gib}}, "U": {{"used", 9 * gib}},
	}
	known := Images{}
	for i, id := range []string{"D", "A", "B", "C", "U"} {
		image := Image{ID: id, FirstSeen: at("08:00:00"), LastUsed: at(fmt.Sprintf("08:0%d:00", i))}
		for _, l := range layers[id] {
			image.SizeBytes += l.Bytes
		}
		known[id] = image
	}
	unused := known.Unused(map[string]bool{"U": true})
	if plan := (ImagePolicy{}).ForSpace(unused[1:], 11*gib, at("12:00:00")); ids(plan.Remove) != "A B" {
		t.Errorf("by reported sizes: %s", ids(plan.Remove))
	}
	plan := ImagePolicy{}.ForSpaceExclusive(known, layers, unused, 11*gib, at("12:00:00"))
	if diff := cmp.Diff([]int64{gib, 6 * gib, 4 * gib}, plan.GainBytes); diff != "" || ids(plan.Remove) != "A B C" {
		t.Errorf("%s: %s", ids(plan.Remove), diff) // D frees nothing, because U stays
	}
	delete(layers, "U")
	if plan := (ImagePolicy{}).ForSpaceExclusive(known, layers, unused, 11*gib, at("12:00:00")); len(plan.Remove) > 0 {
		t.Errorf("a missing fact: %s", ids(plan.Remove))
	}
}

func TestPropertyExclusiveBytes(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		known, layers := Images{}, map[string][]Layer{}
		inUse := map[string]bool{}
		for i := range rapid.IntRange(0, 8).Draw(t, "images") {
			id := fmt.Sprintf("image-%d", i)
			for j := range 6 {
				if rapid.Bool().Draw(t, "layer") {
					layers[id] = append(layers[id], Layer{fmt.Sprint(j), int64(1 + j)})
				}
			}
			if layers[id] == nil {
				layers[id] = []Layer{}
			}
			known[id] = Image{ID: id, Pinned: rapid.IntRange(0, 5).Draw(t, "pinned") == 0}
			inUse[id] = rapid.IntRange(0, 3).Draw(t, "used") == 0
		}
		need := rapid.Int64Range(1, 30).Draw(t, "need")
		plan := ImagePolicy{}.ForSpaceExclusive(known, layers, known.Unused(inUse), need, at("12:00:00"))
		// What is on the disk without the removed images tells what came free.
		size := func(without []Image) (sum int64) {
			seen := map[string]bool{}
			for id, list := range layers {
				if slices.ContainsFunc(without, func(i Image) bool { return i.ID == id }) {
					continue
				}
				for _, l := range list {
					if !seen[l.ID] {
						seen[l.ID] = true
						sum += l.Bytes
					}
				}
			}
			return sum
		}
		var promised int64
		for _, g := range plan.GainBytes {
			promised += g
		}
		if got := size(nil) - size(plan.Remove); got != promised {
			t.Fatalf("promised %d, freed %d", promised, got)
		}
		for _, image := range plan.Remove {
			if inUse[image.ID] || image.Pinned {
				t.Fatalf("%s must stay", image.ID)
			}
		}
		if n := len(plan.Remove); n > 0 && size(nil)-size(plan.Remove[:n-1]) >= need {
			t.Fatalf("%s is removed without need: %d, %v", plan.Remove[n-1].ID, need, plan.GainBytes)
		}
		if promised < need && len(plan.Reserve) > 0 {
			t.Fatalf("%d of %d, and %s are left", promised, need, ids(plan.Reserve))
		}
	})
}

func TestOptionAgeNeedsMinAge_GAP27(t *testing.T) {
	t.Parallel()
	now := at("12:00:00")
	unused := []Image{
		{ID: "just-pulled", FirstSeen: now},
		{ID: "never-used", FirstSeen: now.Add(-2 * time.Hour)},
	}
	for careful, want := range map[bool]string{false: "just-pulled never-used", true: "never-used"} {
		p := ImagePolicy{HighPercent: 85, LowPercent: 80, MinAge: 2 * time.Minute, MaxAge: time.Hour, Options: ImageOptions{AgeNeedsMinAge: careful}}
		if remove, _ := p.TooOld(unused, now, now.Add(-3*time.Hour)); ids(remove) != want {
			t.Errorf("with the option %t: %s, want %s", careful, ids(remove), want)
		}
	}
}

// TestOptionNoNeedNoRemoval is T6: both marks at 100 %, 0.5 % available.
func TestOptionNoNeedNoRemoval(t *testing.T) {
	t.Parallel()
	for careful, want := range map[bool]string{false: "a", true: ""} {
		p := ImagePolicy{HighPercent: 100, LowPercent: 100, Options: ImageOptions{NoNeedNoRemoval: careful}}
		need, err := p.Need(ptr(50), ptr(10000))
		if err != nil || need.Bytes != -50 || !need.Over {
			t.Fatalf("%+v, %v", need, err)
		}
		if plan := p.ForSpace(sized(1, 1), need.Bytes, at("12:00:00")); ids(plan.Remove) != want {
			t.Errorf("with the option %t: %s, want %q", careful, ids(plan.Remove), want)
		}
	}
}
