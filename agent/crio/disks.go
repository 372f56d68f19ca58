package crio

import (
	"cmp"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/cleave-cri/cleave/proxy/criocompat"
)

// Disks is where things lie on the node now.
type Disks struct {
	// Known says that the places of images and of containers are known, be it from the configuration alone.
	Known bool
	// Missing says that a path of them is not there, so that the disk named is that of a folder above: it may be mounted yet.
	Missing bool
	// Images and Containers are where image layers and writable layers are.
	Images, Containers Disk
	// NodeDevice is the filesystem of the kubelet's root directory as cleave is configured. The kubelet's own goes first.
	NodeDevice string
}

// Disk is one of them.
type Disk struct {
	// Mountpoint is the path to name.
	Mountpoint string `json:"mountpoint"`
	// Device identifies the filesystem: major and minor number as in the mount table.
	Device string `json:"device"`
}

func (d Disk) complete() bool { return filepath.IsAbs(d.Mountpoint) && d.Device != "" }

// Split says that images and containers are on different filesystems.
func (d Disks) Split() bool { return d.Known && d.Images.Device != d.Containers.Device }

// Kubelet is what has to be known of a kubelet before it is told of a split.
type Kubelet struct {
	PID int32
	// StartTicks is when it started, in the kernel's clock ticks since boot (proc_pid_stat(5), starttime). With PID it names the
	// process within one boot.
	StartTicks uint64
	// Version is the kubelet's, such as v1.37.2; empty while unknown.
	Version string
	// StatsFromCRI is the feature gate PodAndContainerStatsFromCRI.
	StatsFromCRI bool
	// Refused says why a split must not be told to it, for people, with what to do; empty if nothing speaks against it.
	Refused string
	// Unread says that its settings can't be read, so that its runtime may be another than cleave.
	Unread bool
	// NodeDevice is the filesystem of its root directory, empty while unknown.
	NodeDevice string
	// OtherMounts says that it has another mount namespace than cleave.
	OtherMounts bool
}

// same says whether two are the same process.
func (k Kubelet) same(o Kubelet) bool { return k.PID == o.PID && k.StartTicks == o.StartTicks }

// Told is what a kubelet has been told. It holds for that process's life: the kubelet never asks again (KSS-18).
type Told struct {
	Kubelet Kubelet `json:"kubelet"`
	// Split says that two disks were named.
	Split bool `json:"split"`
	// Unsplit says why only one was named though there are two; empty otherwise.
	Unsplit string `json:"unsplit,omitempty"`
	// Images and Containers are what was named.
	Images     Disk `json:"images"`
	Containers Disk `json:"containers"`
	// Devices are those that were mounted at that moment. The kubelet's cAdvisor reads the mount table then and never again: a
	// filesystem that comes later is none to it (OBS-8).
	Devices []string `json:"devices"`
}

// decide returns what a kubelet is told about the node's disks.
func decide(k Kubelet, d Disks, mounted []string) Told {
	t := Told{Kubelet: k, Split: d.Split(), Images: d.Images, Containers: d.Containers, Devices: mounted}
	switch {
	case !t.Split:
	case d.Containers.Device != cmp.Or(k.NodeDevice, d.NodeDevice):
		// With a third disk the kubelet would act on the wrong one (LAY-13).
		t.Unsplit = "containers are on a disk of their own, apart from the kubelet's root directory and from images; " +
			"the kubelet can't handle three disks: put containers on the kubelet's disk, or use mode cri"
	case k.Refused != "":
		t.Unsplit = k.Refused
	}
	if t.Unsplit != "" {
		t.Split, t.Containers = false, t.Images
	}
	return t
}

// info is the answer for cAdvisor.
func (t Told) info(driver criocompat.Driver) criocompat.Info {
	i := criocompat.Info{StorageDriver: "overlay", StorageRoot: t.Containers.Mountpoint, CgroupDriver: driver}
	if t.Split {
		i.StorageImage = t.Images.Mountpoint
	}
	return i
}

// pinned returns the disk to name now. The kubelet found out at its start on which filesystems images and containers are, and takes
// all figures from there for the rest of its life (OBS-8): the old name stays, which is what it measures, and the problem says what
// to do (KSS-19).
func (t Told) pinned(was, now Disk, what string) (_ Disk, problem string) {
	if now.Device == was.Device {
		return now, ""
	}
	why := "which it was not told of and does not measure"
	if !slices.Contains(t.Devices, now.Device) {
		why = "which was mounted after it had started and which it can't measure"
	}
	return was, fmt.Sprintf("%s are on %s now, %s: the kubelet (pid %d) still measures %s: restart the kubelet",
		what, cmp.Or(now.Mountpoint, now.Device), why, t.Kubelet.PID, was.Mountpoint)
}
