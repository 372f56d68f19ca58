package stage

import (
	"context"
	"errors"
	"math"
	"os"
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
		{"images more than an int64", good + "images: {a: {layers: {l1: 4Ei, l2: 4Ei, l3: 4Ei, l4: 4Ei}}}\n", disk.Ext4, []string{"the lab makes at most 1Gi"}},
		{"files of images", good + "images: {a: {layers: {l1: {size: 1, inodes: 4Ei}, l2: {size: 1, inodes: 4Ei}}}}\n", disk.Ext4, []string{"images: they have more than 100000 files"}},
		{"no names of Kubernetes", good + "images: {a: {}}\nhost: {a/b: {on: disk, writes: {atOnce: 1}}}\npods: {P: {namespace: ../x, volumes: {v/w: {}}, containers: {c.d: {image: a}}}}\n", disk.Ext4,
			[]string{"host.a/b: the name", "pods.P: the name", `pods.P: the namespace "../x"`, "pods.P.volumes.v/w: the name", "pods.P.containers.c.d: the name"}},
		{"a volume of the lab's own", good + "images: {a: {}}\npods: {p: {volumes: {lab-notes: {}}, containers: {c: {image: a}}}}\n", disk.Ext4, []string{"pods.p.volumes.lab-notes: the name"}},
		{"a disk in the place of the lab's files", "version: 1\nlasts: 1m\nfilesystems: {keep: {size: 500Mi}, a/b: {size: 500Mi}}\n", disk.Ext4,
			[]string{"filesystems.keep: the lab has something else of that name", "filesystems.a/b: the name"}},
		{"a disk that overlayfs takes for two", "version: 1\nlasts: 1m\nfilesystems: {\"a:b\": {size: 500Mi}}\n", disk.Ext4, []string{`filesystems.a:b: the name "a:b"`}},
		{"images as a registry has them", good + "images: {App: {}, a.b-c_d: {}, team/app: {}, \"0\": {}}\n", disk.Ext4, nil},
		{"images as no registry has them", good + "images: {\"a:b\": {}, \"a@b\": {}, _a: {}, a..b: {}, a-: {}, .a: {}}\n", disk.Ext4,
			[]string{"images.a:b: the name", "images.a@b: the name", "images._a: the name", "images.a..b: the name", "images.a-: the name", "images..a: the name"}},
		{"images that are one", good + "images: {App: {}, app: {}}\n", disk.Ext4, []string{`this is the image "App": choose another name`}},
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

// TestRoom: disks that no machine has room for are refused, however many.
func TestRoom(t *testing.T) {
	t.Parallel()
	s := &scenario.Scenario{}
	for range 33 {
		s.Filesystems = append(s.Filesystems, scenario.Filesystem{Name: "disk", SizeBytes: math.MaxInt64 / 16})
		if err := room(t.TempDir(), s); err == nil || !strings.Contains(err.Error(), "free some") {
			t.Errorf("%d disks: %v", len(s.Filesystems), err)
		}
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

// TestTakingInodesEnds: somebody who changes his mind does not wait for millions of files.
func TestTakingInodesEnds(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := flood(t.Context(), dir, 1500); err != nil {
		t.Fatal(err)
	}
	for folder, want := range map[string]int{"/0": 1000, "/1": 500} {
		if files, err := os.ReadDir(dir + folder); err != nil || len(files) != want {
			t.Errorf("%d files in %s, %v", len(files), folder, err)
		}
	}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	empty := t.TempDir()
	err := flood(over, empty, math.MaxInt64)
	if files, _ := os.ReadDir(empty); !errors.Is(err, context.Canceled) || len(files) > 0 { //nolint:errcheck // it is there
		t.Errorf("%v, %d made", err, len(files))
	}
}
