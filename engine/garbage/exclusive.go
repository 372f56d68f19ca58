package garbage

import (
	"slices"
	"time"
)

// Layer is one layer of an image as it lies on the disk.
type Layer struct {
	// ID is the same for layers that share their bytes.
	ID string
	// Bytes are those of the unpacked layer, in allocated blocks.
	Bytes int64
}

// ForSpaceExclusive plans like ForSpace, but counts what really comes free: a
// layer's bytes when the last image that has it goes, and not before (GAP-25).
// all are the remembered images, the used ones included, and layers are those
// of each by key. Images that free nothing, because others that stay have all
// their layers, are not removed. An image whose layers are not known is left
// alone, and so are all layers that it might share: nothing is planned then.
func (p ImagePolicy) ForSpaceExclusive(all Images, layers map[string][]Layer, unused []Image, needBytes int64, began time.Time) ImagePlan {
	users := map[string]int{}
	for k := range all {
		known, ok := layers[k]
		if !ok {
			return ImagePlan{NeedBytes: needBytes}
		}
		for _, l := range known {
			users[l.ID]++
		}
	}
	freed := map[string]bool{}
	plan := p.plan(unused, needBytes, began, func(image Image) (gain int64) {
		for _, l := range layers[image.Key()] {
			if users[l.ID]--; users[l.ID] == 0 {
				freed[l.ID] = true
				gain += l.Bytes
			}
		}
		return gain
	})
	kept := ImagePlan{NeedBytes: plan.NeedBytes, Reserve: plan.Reserve, Young: plan.Young}
	for i, image := range plan.Remove {
		if slices.ContainsFunc(layers[image.Key()], func(l Layer) bool { return freed[l.ID] }) {
			kept.Remove = append(kept.Remove, image)
			kept.GainBytes = append(kept.GainBytes, plan.GainBytes[i])
		}
	}
	return kept
}
