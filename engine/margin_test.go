package engine

import (
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// oneDisk is a node whose filesystems all have so many bytes and 1 000 000
// inodes.
func oneDisk(capacity int64) Observations {
	f := &FSStats{AvailableBytes: bytes(capacity / 2), CapacityBytes: bytes(capacity), InodesFree: bytes(500_000), Inodes: bytes(1_000_000)}
	return (&Summary{NodeFS: f, ImageFS: f, ContainerFS: f}).Observe()
}

func written(list []Threshold) string {
	var out []string
	for _, t := range list {
		out = append(out, t.String())
	}
	return strings.Join(out, "; ")
}

func TestMarginAboveTheKubelet(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name     string
		list     []Threshold
		layout   Layout
		capacity int64
		want     string
	}{
		{"2 % of a small disk", thresholds(t, "nodefs.available<1Gi"), Dedicated, 10 * gib, "nodefs.available < 1288490188"},
		{"2 GiB of a large one", thresholds(t, "nodefs.available<10Gi"), Dedicated, 1000 * gib, "nodefs.available < 12Gi"},
		{"grace stays", thresholds(t, "", "nodefs.available<10Gi", "nodefs.available=1m"), Dedicated, 1000 * gib, "nodefs.available < 12Gi for 1m0s"},
		{"inodes by share alone", thresholds(t, "nodefs.inodesFree<5%"), Dedicated, gib, "nodefs.inodesFree < 70000"},
		{"one disk has one line, the strictest", thresholds(t, "nodefs.available<10Gi,imagefs.available<15Gi"), Single, 1000 * gib, "nodefs.available < 17Gi; imagefs.available < 17Gi"},
		{"two disks have two", thresholds(t, "nodefs.available<10Gi,imagefs.available<15Gi"), Dedicated, 1000 * gib, "nodefs.available < 12Gi; imagefs.available < 17Gi"},
		{"memory is the kubelet's", thresholds(t, "memory.available<1Gi,pid.available<5"), Single, gib, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			got, missing := DefaultMargin().Above(tc.list, tc.layout, oneDisk(tc.capacity))
			if s := written(got); s != tc.want || len(missing) > 0 {
				t.Errorf("%s, missing %v; want %s", s, missing, tc.want)
			}
			if bad := Overlaps(got, tc.list, tc.layout, oneDisk(tc.capacity)); len(bad) > 0 {
				t.Errorf("overlaps: %v", bad)
			}
		})
	}
	if got, missing := DefaultMargin().Above(thresholds(t, "nodefs.available<1Gi"), Single, nil); len(got) > 0 || len(missing) != 1 {
		t.Errorf("without a capacity: %v, missing %v", got, missing)
	}
}

func TestOverlapsAreNamed(t *testing.T) {
	t.Parallel()
	kubelet := thresholds(t, "nodefs.available<10Gi,imagefs.available<15Gi,nodefs.inodesFree<5%")
	ours := thresholds(t, "nodefs.available<12Gi")
	seen := oneDisk(100 * gib)
	got := Overlaps(ours, kubelet, Single, seen)
	if len(got) != 1 || got[0].String() != "nodefs.available < 12Gi is at 12Gi, the kubelet's imagefs.available < 15Gi at 15Gi: raise the first or lower the second" {
		t.Errorf("%v", got)
	}
	if got := Overlaps(ours, kubelet, Dedicated, seen); len(got) > 0 {
		t.Errorf("on two disks: %v", got)
	}
	if got := Overlaps(thresholds(t, "nodefs.available<10Gi"), kubelet, Dedicated, seen); len(got) != 1 {
		t.Errorf("equal lines: %v", got)
	}
}

func TestPropertyMarginsNeverOverlap(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		list := anyConfig(t).Thresholds
		layout := rapid.SampledFrom([]Layout{Single, Dedicated, Split, Separate, ContainersAlone}).Draw(t, "layout")
		node, other := rapid.Int64Range(100, 1<<50).Draw(t, "node"), rapid.Int64Range(100, 1<<50).Draw(t, "other")
		seen := oneDisk(node)
		if layout != Single {
			image := oneDisk(other)
			seen[ImageFSAvailable] = image[ImageFSAvailable]
			if layout == Dedicated {
				seen[ContainerFSAvailable] = image[ContainerFSAvailable]
			}
		}
		if layout == ContainersAlone {
			seen[ImageFSAvailable] = seen[NodeFSAvailable]
		}
		ours, _ := DefaultMargin().Above(list, layout, seen)
		if bad := Overlaps(ours, list, layout, seen); len(bad) > 0 {
			t.Fatalf("%v", bad)
		}
	})
}
