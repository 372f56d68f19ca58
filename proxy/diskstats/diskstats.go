package diskstats

import (
	"context"
	"fmt"
	"slices"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Rewrite has the form of an interceptor of the proxy: it takes an encoded
// answer and returns the better one, or nil to leave it.
type Rewrite = func(ctx context.Context, answer []byte) ([]byte, error)

// Rewrites returns the interceptors by full method name.
func Rewrites(source Source) map[string]Rewrite {
	return map[string]Rewrite{
		runtimeapi.ImageService_ImageFsInfo_FullMethodName:               rewrite(source, fixImageFsInfo),
		runtimeapi.RuntimeService_ContainerStats_FullMethodName:          rewrite(source, fixContainerStats),
		runtimeapi.RuntimeService_ListContainerStats_FullMethodName:      rewrite(source, fixListContainerStats),
		runtimeapi.RuntimeService_StreamContainerStats_FullMethodName:    rewrite(source, fixStreamContainerStats),
		runtimeapi.RuntimeService_PodSandboxStats_FullMethodName:         rewrite(source, fixPodSandboxStats),
		runtimeapi.RuntimeService_ListPodSandboxStats_FullMethodName:     rewrite(source, fixListPodSandboxStats),
		runtimeapi.RuntimeService_StreamPodSandboxStats_FullMethodName:   rewrite(source, fixStreamPodSandboxStats),
		runtimeapi.RuntimeService_ListPodSandboxMetrics_FullMethodName:   rewrite(source, fixListPodSandboxMetrics),
		runtimeapi.RuntimeService_StreamPodSandboxMetrics_FullMethodName: rewrite(source, fixStreamPodSandboxMetrics),
	}
}

// rewrite decodes an answer, lets fix change it, and encodes it again if fix
// says that it did. Fields of a newer CRI that this build does not know are
// kept (protobuf's unknown fields).
func rewrite[M any, P interface {
	*M
	proto.Message
}](source Source, fix func(P, *view) (changed bool)) Rewrite {
	return func(_ context.Context, answer []byte) ([]byte, error) {
		message := P(new(M))
		if err := proto.Unmarshal(answer, message); err != nil {
			return nil, fmt.Errorf("decode %s: %w", message.ProtoReflect().Descriptor().FullName(), err)
		}
		v := view{Facts: source.Facts()}
		changed := fix(message, &v)
		if v.missed {
			source.Wanted()
		}
		if !changed {
			return nil, nil
		}
		better, err := proto.Marshal(message)
		if err != nil {
			return nil, fmt.Errorf("encode %s: %w", message.ProtoReflect().Descriptor().FullName(), err)
		}
		return better, nil
	}
}

// view is the facts as one rewrite sees them.
type view struct {
	*Facts
	// missed is set when a fact was looked for that is not there.
	missed bool
	// strict says that only what is known to be right passes.
	strict bool
}

func fixContainerStats(m *runtimeapi.ContainerStatsResponse, v *view) bool {
	return fixStats(m.GetStats(), v)
}

func fixListContainerStats(m *runtimeapi.ListContainerStatsResponse, v *view) bool {
	return fixAllStats(m.GetStats(), v)
}

func fixStreamContainerStats(m *runtimeapi.StreamContainerStatsResponse, v *view) bool {
	return fixAllStats(m.GetContainerStats(), v)
}

func fixPodSandboxStats(m *runtimeapi.PodSandboxStatsResponse, v *view) bool {
	return fixAllStats(m.GetStats().GetLinux().GetContainers(), v)
}

func fixListPodSandboxStats(m *runtimeapi.ListPodSandboxStatsResponse, v *view) bool {
	return fixPods(m.GetStats(), v)
}

func fixStreamPodSandboxStats(m *runtimeapi.StreamPodSandboxStatsResponse, v *view) bool {
	return fixPods(m.GetPodSandboxStats(), v)
}

func fixPods(pods []*runtimeapi.PodSandboxStats, v *view) (changed bool) {
	for _, pod := range pods {
		changed = fixAllStats(pod.GetLinux().GetContainers(), v) || changed
	}
	return changed
}

func fixAllStats(stats []*runtimeapi.ContainerStats, v *view) (changed bool) {
	for _, s := range stats {
		changed = fixStats(s, v) || changed
	}
	return changed
}

// fixStats makes writable_layer name the filesystem that the layer is really
// on, and replaces the runtime's blind figures (0 bytes at time 0 or on no
// filesystem: CTD-10, CTD-13, CTD-14) by measured ones. Without any the whole
// field is left out: unknown is not zero.
func fixStats(stats *runtimeapi.ContainerStats, v *view) (changed bool) {
	if stats == nil {
		return false
	}
	layer, known := v.Layers[stats.GetAttributes().GetId()]
	if !blind(stats.GetWritableLayer()) {
		if !known {
			v.missed = true
			return false
		}
		if stats.GetWritableLayer().GetFsId().GetMountpoint() == layer.Mountpoint {
			return false
		}
		stats.WritableLayer.FsId = &runtimeapi.FilesystemIdentifier{Mountpoint: layer.Mountpoint}
		return true
	}
	if !known || layer.Used == nil {
		v.missed = true
		changed = stats.GetWritableLayer() != nil
		stats.WritableLayer = nil
		return changed
	}
	if stats.GetWritableLayer() == nil {
		stats.WritableLayer = &runtimeapi.FilesystemUsage{}
	}
	setUsage(stats.GetWritableLayer(), layer.Mountpoint, *layer.Used)
	return true
}

// blind reports whether the runtime gave no real figure. A sample that was
// taken has a time above 0 (CRI, FilesystemUsage.timestamp) and a filesystem.
func blind(u *runtimeapi.FilesystemUsage) bool {
	return u == nil || u.GetTimestamp() <= 0 || u.GetFsId().GetMountpoint() == "" || u.GetUsedBytes() == nil || u.GetInodesUsed() == nil
}

func setUsage(u *runtimeapi.FilesystemUsage, mountpoint string, used Usage) {
	u.FsId = &runtimeapi.FilesystemIdentifier{Mountpoint: mountpoint}
	u.Timestamp = used.At.UnixNano()
	u.UsedBytes = &runtimeapi.UInt64Value{Value: used.Bytes}
	u.InodesUsed = &runtimeapi.UInt64Value{Value: used.Inodes}
}

// fixImageFsInfo gives both lists an entry that says where image layers and
// where writable layers are and what they take there. The kubelet reads the
// first entry of each list, crashes on a nil figure and goes blind on an empty
// list (CTD-3, CTD-20).
//
// An answer that has both lists, complete and right by device, stays as it is.
func fixImageFsInfo(m *runtimeapi.ImageFsInfoResponse, v *view) bool {
	if v.right(m.GetImageFilesystems(), v.Images) && v.right(m.GetContainerFilesystems(), v.Containers) {
		return v.nameAlike(m.GetImageFilesystems()[0], m.GetContainerFilesystems()[0])
	}
	// The runtime has one figure for everything in its snapshotter (CTD-2).
	// While there is no better one it stands for both lists, as the kubelet
	// itself does with a runtime that fills only one.
	image, container := first(m.GetImageFilesystems()), first(m.GetContainerFilesystems())
	if container == nil {
		container = image
	}
	m.ImageFilesystems = v.list(m.GetImageFilesystems(), image, v.Images)
	m.ContainerFilesystems = v.list(m.GetContainerFilesystems(), container, v.Containers)
	return true
}

// nameAlike gives both entries one name if they are known to be on one
// filesystem: the kubelet takes different strings for different disks.
func (v *view) nameAlike(image, container *runtimeapi.FilesystemUsage) (changed bool) {
	a, b := image.GetFsId().GetMountpoint(), container.GetFsId().GetMountpoint()
	if a == b || v.Devices[a] == "" || v.Devices[a] != v.Devices[b] {
		return false
	}
	container.FsId = &runtimeapi.FilesystemIdentifier{Mountpoint: a}
	return true
}

func first(list []*runtimeapi.FilesystemUsage) *runtimeapi.FilesystemUsage {
	if len(list) == 0 {
		return nil
	}
	return list[0]
}

// right reports whether a list needs no change: every entry is complete, and
// the first, which is the one that counts, names the filesystem of the store.
// A mountpoint of which nothing is known is not taken for wrong, unless v is strict.
func (v *view) right(list []*runtimeapi.FilesystemUsage, store Store) bool {
	if len(list) == 0 || slices.ContainsFunc(list, blind) {
		return false
	}
	if store.Guessed {
		return true
	}
	device, known := v.Devices[list[0].GetFsId().GetMountpoint()]
	if !known {
		v.missed = true
		return !v.strict
	}
	return device == store.Device
}

// list returns a list whose first entry describes the store, made from the
// runtime's own entry so that fields of a newer CRI survive; complete further
// entries follow as they are.
func (v *view) list(upstream []*runtimeapi.FilesystemUsage, own *runtimeapi.FilesystemUsage, store Store) []*runtimeapi.FilesystemUsage {
	entry := &runtimeapi.FilesystemUsage{}
	if own != nil {
		entry = proto.CloneOf(own)
	}
	if named := own.GetFsId().GetMountpoint(); store.Guessed && named != "" {
		store.Mountpoint = named
	}
	if store.Mountpoint == "" {
		return upstream // nobody knows a place: there is nothing true to say
	}
	switch {
	case store.Used != nil:
		setUsage(entry, store.Mountpoint, *store.Used)
	case blind(entry):
		// Nobody has measured: what the whole filesystem holds is the
		// smallest figure known not to be too small.
		setUsage(entry, store.Mountpoint, store.Whole)
	default:
		entry.FsId = &runtimeapi.FilesystemIdentifier{Mountpoint: store.Mountpoint}
	}
	list := []*runtimeapi.FilesystemUsage{entry}
	for _, further := range upstream[min(1, len(upstream)):] {
		if !blind(further) {
			list = append(list, further)
		}
	}
	return list
}
