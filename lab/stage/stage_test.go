package stage

import (
	"strings"
	"testing"

	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/scenario"
)

// TestPlayable: what a real node can't do is refused, with its place and what to do.
func TestPlayable(t *testing.T) {
	t.Parallel()
	const good = "version: 1\nlasts: 1m\nfilesystems: {disk: {size: 500Mi}, other: {size: 500Mi}}\n"
	for _, tc := range []struct {
		name, text string
		fs         disk.FS
		want       []string
	}{
		{"good", good, disk.Ext4, nil},
		{"too long", strings.Replace(good, "1m", "2h", 1), disk.Ext4, []string{"lasts: 2h0m0s is longer than 1h0m0s"}},
		{"too small", strings.Replace(good, "500Mi", "299Mi", 1), disk.XFS, []string{"filesystems.disk: 299Mi is too small for xfs"}},
		{"small, but of another type", strings.Replace(good, "size: 500Mi", "size: 299Mi, type: ext4", 1), disk.XFS, nil},
		{"inodes on xfs", strings.Replace(good, "500Mi", "500Mi, inodes: 9", 1), disk.XFS, []string{"only ext4 has a number of inodes"}},
		{"inodes on ext4", strings.Replace(good, "500Mi", "500Mi, inodes: 9", 1), disk.Ext4, nil},
		{"late space", strings.Replace(good, "500Mi", "500Mi, freesAfter: 1s", 1), disk.Ext4, []string{"freesAfter is for the simulator"}},
		{"containers alone", good + "layout: {nodefs: disk, imagefs: disk, containerfs: other}\n", disk.Ext4, []string{"none of the four layouts"}},
		{"images too large", good + "images: {a: {layers: {l: 2Gi}}}\n", disk.Ext4, []string{"they take 2Gi, and the lab makes at most 1Gi"}},
		{"no snapshotter", good + "faults: [{kind: snapshotter killed, from: 1s, until: 2s}]\n", disk.Ext4, []string{"in the layouts split and separate only"}},
		{"all at once", good + "pullBytesPerSecond: 1\ncleave: {perHour: 3}\nimages: {a: {reported: 3}}\npods: {p: {static: true, podLevelMemory: 1, containers: {c: {image: a}}}}\nfaults: [{kind: images stay}]\n", disk.Ext4,
			[]string{"pullBytesPerSecond", "cleave: options", "images.a: reported", "pods.p: static", "pods.p: podLevelMemory", `faults[0]: "images stay" is for the simulator`}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			s, err := scenario.Parse("f", []byte(tc.text))
			if err != nil {
				t.Fatal(err)
			}
			err = Playable(s, tc.fs)
			if (err == nil) != (len(tc.want) == 0) {
				t.Errorf("%v, want %q", err, tc.want)
			}
			for _, want := range tc.want {
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("%v, want %q", err, want)
				}
			}
		})
	}
}

func TestSizes(t *testing.T) {
	t.Parallel()
	for layout, disks := range map[string]int{"single": 1, "dedicated": 2, "split": 2, "separate": 3} {
		s, err := Sizes{Layout: layout, Node: "1Gi", Images: "2Gi", Containers: "3Gi"}.Scenario()
		if err != nil || len(s.Filesystems) != disks || Layout(s.Layout) != layout {
			t.Errorf("%s: %+v, %v", layout, s, err)
			continue
		}
		if err := Playable(s, disk.Ext4); err != nil {
			t.Errorf("%s: %v", layout, err)
		}
	}
	for _, bad := range []Sizes{{Layout: "none", Node: "1Gi"}, {Layout: "single", Node: "much"}, {Layout: "split", Node: "1Gi", Images: "-1"}} {
		if _, err := bad.Scenario(); err == nil || !strings.HasPrefix(err.Error(), "--") {
			t.Errorf("%+v: %v", bad, err)
		}
	}
}
