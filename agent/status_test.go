package agent

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cleave-cri/cleave/agent/ephemeral"
	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/proxy"
)

// TestStatusText shows what an operator reads: a node whose images have a disk,
// while the log folder is not there yet and a layer has no figure.
func TestStatusText(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	measured := now.Add(-3 * time.Second)
	total, free := uint64(1000), uint64(600)
	node := fsstats.Filesystem{
		Device: fsstats.Device{Major: 8, Minor: 1}, Source: "/dev/sda1", Type: "ext4", Mountpoint: "/",
		CapacityBytes: 64 << 30, AvailableBytes: 40 << 30, UsedBytes: 22 << 30, InodesTotal: &total, InodesFree: &free,
	}
	images := fsstats.Filesystem{
		Device: fsstats.Device{Minor: 42}, Source: "/dev/sdb", Type: "btrfs", Mountpoint: "/images",
		CapacityBytes: 8 << 30, AvailableBytes: 5 << 30, UsedBytes: 3 << 30,
	}
	unowned, oldest := int64(300), now.Add(-time.Minute)
	s := Status{
		Version: "1.2.3", Mode: "cri", PID: 7, StartedAt: now.Add(-90 * time.Second), Listen: "unix:///c.sock",
		Runtime: RuntimeStatus{Endpoint: "unix:///r.sock", Name: "containerd", Version: "v2.4.2"},
		Layout:  fsstats.LayoutDedicated,
		Roles: []fsstats.Place{
			{Role: fsstats.NodeFS, Reported: "/var/lib/kubelet", Filesystem: node},
			{Role: fsstats.ImageFS, Reported: "/images/io.containerd.snapshotter.v1.overlayfs", Filesystem: images},
			{Role: fsstats.ContainerFS, Reported: "/images/io.containerd.snapshotter.v1.overlayfs", Filesystem: images},
			{Role: fsstats.Logs, Reported: "/var/log", Filesystem: node, Note: "/var/log/pods does not exist"},
		},
		Filesystems: []FilesystemStatus{
			{Filesystem: node, Roles: []fsstats.Role{fsstats.NodeFS, fsstats.Logs}, Account: Account{
				Classes:           []ClassUsage{{Class: classLogs, Bytes: 1 << 30, Inodes: 100}},
				UnattributedBytes: 21 << 30, UnattributedInodes: &unowned, ReservedBytes: 2 << 30, Oldest: &oldest, Partial: 1,
				Known: []KnownUsage{{Path: "/var/log/pods/lost", Bytes: 1 << 20, Inodes: 2}},
			}},
			{Filesystem: images, Roles: []fsstats.Role{fsstats.ImageFS, fsstats.ContainerFS}, Account: Account{UnattributedBytes: -4096, Classes: []ClassUsage{
				{Class: classImages, Bytes: 2 << 30, Inodes: 12345}, {Class: classContainers, Bytes: 5 << 20, Inodes: 6, Unmeasured: 1},
			}}},
		},
		Stuck: []StuckRole{{Role: fsstats.ContainerFS, Since: now.Add(-7 * time.Second), Reason: "it does not answer"}},
		Pods: []ephemeral.Usage{
			{Namespace: "a", Name: "small", HeldOn: []ephemeral.Use{{Bytes: 1 << 10}}},
			{Namespace: "b", Name: "large", HeldOn: []ephemeral.Use{{Bytes: 1 << 20}, {Bytes: 1 << 20}}, Kubelet: &ephemeral.Use{Bytes: 1 << 20}, Unknown: 1},
		},
		MeasuredAt: &measured, MeasureSeconds: 0.055, Problem: "one layer can't be read",
		Snapshotter: &SnapshotterStatus{Endpoint: "unix:///t.sock", Problems: []string{"nothing is made or deleted, image: it is not mounted: mount it"}},
		Proxy:       proxy.Counters{Calls: 12, CallsInFlight: 1, Connections: 2, Fallbacks: []proxy.Fallback{{Method: "/m", Reason: "slow", Count: 4}}},
	}
	want := `cleave 1.2.3, mode cri, pid 7, up 1m30s
  listens on unix:///c.sock
  runtime is unix:///r.sock (containerd v2.4.2)
  12 calls, 1 in flight, 2 connections
  ! 4 answers of /m went through uncorrected (slow)

Layout: dedicated (images and writable layers share a filesystem of their own)
Who is there was found out 3s ago in 55ms.
! Figures are incomplete: one layer can't be read
! Split snapshotter: nothing is made or deleted, image: it is not mounted: mount it

ROLE         DEVICE  PATH
nodefs       8:1     /var/lib/kubelet
imagefs      0:42    /images/io.containerd.snapshotter.v1.overlayfs
containerfs  0:42    /images/io.containerd.snapshotter.v1.overlayfs
logs         8:1     /var/log
! logs: /var/log/pods does not exist
! containerfs: nothing new for 7s: it does not answer

Device 8:1 (/dev/sda1), ext4 on /: nodefs, logs
  capacity 64.0Gi, used 22.0Gi, available 40.0Gi, inodes used 400 of 1000
        pods' logs   1.0Gi  100 inodes
    not attributed  21.0Gi  300 inodes
    of that in /var/log/pods/lost, which belongs to no pod: 1.0Mi, 2 inodes
  2.0Gi more can be written by root only
  all figures are of 1m0s ago or later, 1 of them lower bounds

Device 0:42 (/dev/sdb), btrfs on /images: imagefs, containerfs
  capacity 8.0Gi, used 3.0Gi, available 5.0Gi, inodes without limit
        image layers   2.0Gi  12345 inodes
    container layers   5.0Mi      6 inodes  + 1 not measured
      not attributed  -4.0Ki             -
    below zero: files share extents, or something was deleted since it was measured

POD THAT HOLDS MOST  HOLDS  THE KUBELET COUNTS
b/large              2.0Mi  1.0Mi  + 1 not measured
a/small              1.0Ki  nothing of it
`
	var got strings.Builder
	if err := s.WriteText(&got, now); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got.String()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
