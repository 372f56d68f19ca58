package garbage

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
)

// Image is what is remembered of an image between two looks.
type Image struct {
	// ID and Handler as the runtime lists it.
	ID, Handler string
	// FirstSeen is when a look first listed it; LastUsed when a look last
	// found it in use, the zero time for never.
	FirstSeen, LastUsed time.Time
	// SizeBytes is what the runtime reports. What comes free can be more or
	// less (IGC-18).
	SizeBytes int64
	// Pinned images are never deleted.
	Pinned bool
}

// Key is under what the image is remembered.
func (a Image) Key() string { return key(a.ID, a.Handler) }

// Listed is an image as the runtime lists it.
type Listed struct {
	ID string
	// Handler is the runtime class's handler that pulled it; empty unless the
	// gate RuntimeClassInImageCriAPI tells images apart by it (IGC-7).
	Handler   string
	SizeBytes int64
	Pinned    bool
}

// ImageUser is a container, in any state, dead ones included (IGC-1).
type ImageUser struct {
	// ImageID is the runtime's id of its image, Handler as in Listed.
	ImageID, Handler string
	// Volumes are the images mounted into it, as its status names them; the
	// kubelet knows no handler of those.
	Volumes []string
}

func key(id, handler string) string {
	if handler == "" {
		return id
	}
	return id + "," + handler
}

// Images remembers images by key. The zero value is that of a kubelet just
// started (IGC-5).
type Images map[string]Image

// Look is one detection: what to remember after the runtime listed images and
// containers. began is when the run began that looks, now is when the lists
// were there; both in the same run, so now is not before began. Sandboxes are
// not asked: an image that only a sandbox uses is safe only if it is pinned
// (IGC-3). inUse are the keys that containers use.
func (i Images) Look(list []Listed, users []ImageUser, began, now time.Time) (next Images, inUse map[string]bool) {
	inUse = make(map[string]bool, min(len(users), len(list)))
	for _, u := range users {
		inUse[key(u.ImageID, u.Handler)] = true
		for _, v := range u.Volumes {
			if slices.ContainsFunc(list, func(l Listed) bool { return l.ID == v }) {
				inUse[v] = true
			}
		}
	}
	next = make(Images, len(list)) // records of vanished images are dropped (IGC-4)
	for _, l := range list {
		k := key(l.ID, l.Handler)
		record, ok := i[k]
		if !ok {
			record = Image{ID: l.ID, Handler: l.Handler, FirstSeen: began}
		}
		if inUse[k] {
			record.LastUsed = now
		}
		record.SizeBytes, record.Pinned = l.SizeBytes, l.Pinned
		next[k] = record
	}
	return next, inUse
}

// Unused are the images that may be deleted, first to go first: neither in use
// nor pinned, never used ones first, then by last use, then by age (IGC-8).
func (i Images) Unused(inUse map[string]bool) []Image {
	records := make([]Image, 0, max(0, len(i)-len(inUse)))
	for k, record := range i {
		if !inUse[k] && !record.Pinned {
			records = append(records, record)
		}
	}
	sorted := make([]int32, len(records)) // numbers are moved, then each record once
	for j := range sorted {
		sorted[j] = int32(j)
	}
	slices.SortFunc(sorted, func(i, j int32) int {
		a, b := &records[i], &records[j]
		if c := a.before(b); c != 0 {
			return c
		}
		if c := strings.Compare(a.ID, b.ID); c != 0 {
			return c
		}
		return strings.Compare(a.Handler, b.Handler)
	})
	out := make([]Image, len(records))
	for j, k := range sorted {
		out[j] = records[k]
	}
	return out
}

// before is the kubelet's order, in which images can be equal.
func (a *Image) before(b *Image) int {
	if c := a.LastUsed.Compare(b.LastUsed); c != 0 {
		return c
	}
	return a.FirstSeen.Compare(b.FirstSeen)
}

// Equal says whether the kubelet may delete a and b in any order.
func (a Image) Equal(b Image) bool { return a.before(&b) == 0 }

// ImagePolicy is how the kubelet's image garbage collection is set up.
type ImagePolicy struct {
	// HighPercent of imagefs used starts it, and it goes on down to
	// LowPercent; the kubelet's defaults are 85 and 80.
	HighPercent, LowPercent int
	// MinAge is how long an image has to be known before it is deleted for
	// space; the default is 2m.
	MinAge time.Duration
	// MaxAge is how long an image may be unused; 0, the default, for ever.
	MaxAge time.Duration
	// Options are improvements on the kubelet, all off in its profile.
	Options ImageOptions
}

// ImageOptions are improvements on the kubelet's choice of images, each to be
// switched by itself.
type ImageOptions struct {
	// AgeNeedsMinAge keeps the maximum age from removing what is younger than
	// the minimum age, and counts the age of an image that was never used from
	// when it was first seen (GAP-27).
	AgeNeedsMinAge bool
	// NoNeedNoRemoval removes nothing for a need of 0 or less, where the
	// kubelet removes one image.
	NoNeedNoRemoval bool
	// StartEarlier starts collection two points below HighPercent, but above
	// LowPercent: before the kubelet's own, and before eviction, whose
	// threshold is one point further (GAP-28).
	StartEarlier bool
}

// Cleave are the options of the cleave profile: all of them.
func Cleave() ImageOptions {
	return ImageOptions{AgeNeedsMinAge: true, NoNeedNoRemoval: true, StartEarlier: true}
}

// Validate says what the kubelet's configuration would not accept (IGC-23).
func (p ImagePolicy) Validate() error {
	var faults []error
	fault := func(format string, args ...any) { faults = append(faults, fmt.Errorf(format, args...)) }
	for _, percent := range []struct {
		name  string
		value int
	}{{"imageGCHighThresholdPercent", p.HighPercent}, {"imageGCLowThresholdPercent", p.LowPercent}} {
		if percent.value < 0 || percent.value > 100 {
			fault("%s is %d, not from 0 to 100", percent.name, percent.value)
		}
	}
	if p.LowPercent >= p.HighPercent {
		fault("imageGCLowThresholdPercent is %d, not below imageGCHighThresholdPercent, %d", p.LowPercent, p.HighPercent)
	}
	if p.MinAge < 0 {
		fault("imageMinimumGCAge is %s, less than 0", p.MinAge)
	}
	if p.MaxAge < 0 {
		fault("imageMaximumGCAge is %s, less than 0", p.MaxAge)
	}
	if p.MaxAge != 0 && p.MaxAge <= p.MinAge {
		fault("imageMaximumGCAge is %s, not above imageMinimumGCAge, %s", p.MaxAge, p.MinAge)
	}
	return errors.Join(faults...)
}

// Runs says whether periodic collection runs at all (IGC-9). Deleting all
// unused images under pressure works even if it does not (IGC-20).
func (p ImagePolicy) Runs() bool { return p.HighPercent != 100 || p.MaxAge != 0 }

// TooOld splits unused images into those to delete because of their age and
// the rest. Nothing is too old until the kubelet itself has run longer than
// the maximum age. An image that was never used is infinitely old, and the
// minimum age does not protect it (IGC-12).
func (p ImagePolicy) TooOld(unused []Image, began, kubeletStart time.Time) (remove, rest []Image) {
	if p.MaxAge == 0 || began.Sub(kubeletStart) <= p.MaxAge {
		return nil, unused
	}
	for _, image := range unused {
		since, young := image.LastUsed, false
		if p.Options.AgeNeedsMinAge {
			young = began.Sub(image.FirstSeen) < p.MinAge
			if since.IsZero() {
				since = image.FirstSeen
			}
		}
		if began.Sub(since) > p.MaxAge && !young {
			remove = append(remove, image)
		} else {
			rest = append(rest, image)
		}
	}
	return remove, rest
}

// Need is how much periodic collection has to free.
type Need struct {
	// UsedPercent of the filesystem, rounded up: 84.01 % is 85 (IGC-14).
	UsedPercent int
	// Over says that UsedPercent is at the high mark.
	Over bool
	// Bytes to free; may be 0 or less at odd settings.
	Bytes int64
}

// ErrNoCapacity says that the size of imagefs is 0 or not known (IGC-13).
var ErrNoCapacity = errors.New("the image filesystem has no capacity")

// Need compares imagefs with the marks. Blocks reserved for root count as used
// (IGC-16). A nil figure counts as 0.
func (p ImagePolicy) Need(availableBytes, capacityBytes *uint64) (Need, error) {
	var available, capacity int64
	if capacityBytes != nil {
		capacity = int64(*capacityBytes)
	}
	if availableBytes != nil {
		available = int64(*availableBytes)
	}
	available = min(available, capacity)
	if capacity == 0 {
		return Need{}, ErrNoCapacity
	}
	n := Need{UsedPercent: 100 - int(available*100/capacity)}
	high := p.HighPercent
	if p.Options.StartEarlier {
		high = min(high, max(high-2, p.LowPercent+1))
	}
	if n.Over = n.UsedPercent >= high; n.Over {
		n.Bytes = capacity*int64(100-p.LowPercent)/100 - available
	}
	return n, nil
}

// Everything is the need of reclaim under pressure: all that can go (IGC-20).
const Everything int64 = math.MaxInt64

// ImagePlan lists what to delete for space.
type ImagePlan struct {
	NeedBytes int64
	// Remove, in this order, frees NeedBytes by reported sizes, or is all
	// that can go. At least one image goes if any can, whatever the need.
	Remove []Image
	// GainBytes is what each of Remove is expected to free, in order.
	GainBytes []int64
	// Reserve goes on where Remove ends: whoever carries it out takes from it,
	// in order, for what could not be removed.
	Reserve []Image
	// Young images are kept because of the minimum age.
	Young []Image
}

// ForSpace plans deletions from unused, which Unused ordered (IGC-17), by
// reported sizes.
func (p ImagePolicy) ForSpace(unused []Image, needBytes int64, began time.Time) ImagePlan {
	return p.plan(unused, needBytes, began, func(image Image) int64 { return image.SizeBytes })
}

// plan goes through unused in order; gain is asked once of each that goes.
func (p ImagePolicy) plan(unused []Image, needBytes int64, began time.Time, gain func(Image) int64) ImagePlan {
	plan := ImagePlan{NeedBytes: needBytes, Remove: make([]Image, 0, len(unused)), GainBytes: make([]int64, 0, len(unused))}
	freed, enough := int64(0), p.Options.NoNeedNoRemoval && needBytes <= 0
	for _, image := range unused {
		switch {
		case !image.LastUsed.Before(began):
			continue // a container was seen to use it since
		case began.Sub(image.FirstSeen) < p.MinAge:
			plan.Young = append(plan.Young, image)
		case enough:
			plan.Reserve = append(plan.Reserve, image)
		default:
			g := gain(image)
			plan.Remove = append(plan.Remove, image)
			plan.GainBytes = append(plan.GainBytes, g)
			freed += g
			enough = freed >= needBytes
		}
	}
	return plan
}

// ErrFreedTooLittle says that less came free than was needed (IGC-19).
var ErrFreedTooLittle = errors.New("freed less than was needed")

// Judge says how the kubelet takes a run of periodic collection: an error of
// any removal makes the run one, whatever it freed; else freeing too little
// does. tidy says that records of image pulls are pruned after it (IGC-19).
func (n Need) Judge(freedBytes int64, removals error) (tidy bool, err error) {
	switch {
	case !n.Over:
		return false, removals
	case removals != nil:
		return false, removals
	case freedBytes < n.Bytes:
		return true, fmt.Errorf("%w: %d of %d bytes, %d%% were used", ErrFreedTooLittle, freedBytes, n.Bytes, n.UsedPercent)
	default:
		return true, nil
	}
}
