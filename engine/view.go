package engine

import (
	"errors"
	"fmt"
	"strings"
)

// View is what a kubelet has to tell a node's disks apart by: what it was told
// at its start and what the runtime reports. The simulator and doctor use it to
// say what a kubelet makes of a node.
type View struct {
	// Endpoint is the kubelet's containerRuntimeEndpoint.
	Endpoint string
	// StatsFromCRI is the kubelet's gate PodAndContainerStatsFromCRI, off by
	// default; NoSeparateDiskGC is KubeletSeparateDiskGC turned off.
	StatsFromCRI, NoSeparateDiskGC bool
	// NodeDevice is the device of the kubelet's root directory as cAdvisor
	// names it (OBS-3).
	NodeDevice string
	// Images and Containers are the two lists of the runtime's ImageFsInfo.
	Images, Containers []ReportedFS
	// ImageLabel and ContainerLabel are what cAdvisor found at the paths that
	// CRI-O's own endpoint names; nil if it could not. They exist only for an
	// endpoint of CRI-O's.
	ImageLabel, ContainerLabel *LabelledFS
}

// ReportedFS is one entry of ImageFsInfo.
type ReportedFS struct {
	// Mountpoint is the path in the entry's filesystem id; empty for none.
	Mountpoint string
	// Stats are the runtime's time, bytes and inodes used; cAdvisor's for the
	// mountpoint are the rest (LAY-3).
	Stats FSStats
	// Device is cAdvisor's name for the mountpoint's device.
	Device string
	// Cold says that cAdvisor has no sample of the device yet; it is then
	// passed over.
	Cold bool
	// Err is why cAdvisor could not resolve the mountpoint (OBS-9).
	Err error
}

// LabelledFS is a filesystem that cAdvisor found by label.
type LabelledFS struct {
	Device string
	Stats  FSStats
}

const crioSocket = "run/crio/crio.sock"

// The reasons why a kubelet can't tell what is where.
var (
	ErrNoFilesystems = errors.New("the runtime reports no filesystem")
	ErrNoLabel       = errors.New("no path of images or containers is known for this endpoint")
	ErrNoDevice      = errors.New("no reported filesystem has a device")
)

// CAdvisor says whether the kubelet takes figures from cAdvisor and not from
// the runtime. The text of the endpoint alone decides (LAY-1).
func (v View) CAdvisor() bool { return !v.StatsFromCRI && v.crio() }

func (v View) crio() bool { return strings.HasSuffix(v.Endpoint, crioSocket) }

// Filesystems are imagefs and containerfs as the kubelet measures them. An
// error means that its whole summary fails (OBS-17), and with it all eviction.
func (v View) Filesystems() (image, container *FSStats, err error) {
	if v.CAdvisor() {
		return v.labelled()
	}
	if len(v.Images) == 0 {
		return nil, nil, ErrNoFilesystems
	}
	first := v.Images[0] // LAY-2: no other entry and no other list is read
	if first.Mountpoint != "" && first.Err != nil {
		return nil, nil, fmt.Errorf("measure %s: %w", first.Mountpoint, first.Err)
	}
	stats := first.Stats
	if first.Mountpoint == "" || first.Cold { // OBS-16
		stats = FSStats{Time: stats.Time, UsedBytes: stats.UsedBytes, InodesUsed: stats.InodesUsed}
	}
	return &stats, &stats, nil
}

// labelled is Filesystems from cAdvisor's figures (LAY-4).
func (v View) labelled() (image, container *FSStats, err error) {
	if v.ImageLabel == nil {
		return nil, nil, ErrNoLabel
	}
	if v.NoSeparateDiskGC {
		return &v.ImageLabel.Stats, &v.ImageLabel.Stats, nil
	}
	if len(v.Images) == 0 || len(v.Containers) == 0 {
		return nil, nil, ErrNoFilesystems
	}
	image = &v.ImageLabel.Stats
	a, b := v.Images[0].Mountpoint, v.Containers[0].Mountpoint
	if a == "" || b == "" || a == b {
		return image, image, nil
	}
	if v.ContainerLabel == nil {
		return nil, nil, ErrNoLabel
	}
	if v.ImageLabel.Device == v.ContainerLabel.Device {
		return image, image, nil
	}
	return image, &v.ContainerLabel.Stats, nil
}

// Detect is the kubelet's answer to how filesystems are shared; an error is
// tried again in the next pass (LAY-8). That containers could not be told apart
// is none: the kubelet takes them to be with the images then (LAY-7), and so
// containerd can never be split.
func (v View) Detect() (Detected, error) {
	device, err := v.imageDevice()
	if err != nil {
		return Detected{}, err
	}
	var d Detected
	if d.ImageApart = device != v.NodeDevice; !d.ImageApart {
		image, container, err := v.Filesystems()
		if err != nil {
			return Detected{}, err
		}
		d.ImageApart = !image.alike(container) // LAY-6
	}
	// The labels are CRI-O's whatever the figures come from (LAY-15).
	if v.crio() && v.ImageLabel != nil && v.ContainerLabel != nil {
		d.ContainerApart = v.ImageLabel.Device != v.ContainerLabel.Device
	}
	return d, nil
}

// imageDevice is the device that images are on (LAY-5).
func (v View) imageDevice() (string, error) {
	if v.CAdvisor() {
		if v.ImageLabel == nil {
			return "", ErrNoLabel
		}
		return v.ImageLabel.Device, nil
	}
	for _, f := range v.Images {
		switch {
		case f.Mountpoint == "" || f.Cold:
			continue
		case f.Err != nil:
			return "", fmt.Errorf("resolve %s: %w", f.Mountpoint, f.Err)
		default:
			return f.Device, nil
		}
	}
	return "", ErrNoDevice
}

// alike compares figures as LAY-6 does: used bytes and times do not matter.
func (f *FSStats) alike(o *FSStats) bool {
	same := func(a, b *uint64) bool { return a == b || a != nil && b != nil && *a == *b }
	return same(f.AvailableBytes, o.AvailableBytes) && same(f.CapacityBytes, o.CapacityBytes) &&
		same(f.InodesUsed, o.InodesUsed) && same(f.InodesFree, o.InodesFree) && same(f.Inodes, o.Inodes)
}
