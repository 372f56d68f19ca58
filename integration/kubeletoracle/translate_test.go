package kubeletoracle

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	statsapi "k8s.io/kubelet/pkg/apis/stats/v1alpha1"
	kubetypes "k8s.io/kubernetes/pkg/kubelet/types"

	"github.com/cleave-cri/cleave/engine"
)

// The functions here say in the kubelet's words what a scenario says in ours.

func kubeletPod(p *engine.Pod) *corev1.Pod {
	out := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{UID: types.UID(p.UID), Namespace: p.Namespace, Name: p.Name, Annotations: map[string]string{}},
		Spec: corev1.PodSpec{
			Priority:                      p.Priority,
			TerminationGracePeriodSeconds: p.GraceSeconds,
			Overhead:                      kubeletAmounts(p.Overhead),
		},
	}
	if p.Static {
		out.Annotations[kubetypes.ConfigSourceAnnotationKey] = "file"
	}
	if p.Mirror {
		out.Annotations[kubetypes.ConfigMirrorAnnotationKey] = "x"
	}
	if p.PodLevel {
		out.Spec.Resources = &corev1.ResourceRequirements{}
		if p.PodLevelMemory != nil {
			out.Spec.Resources.Requests = corev1.ResourceList{corev1.ResourceMemory: *p.PodLevelMemory}
		} else {
			out.Spec.Resources.Limits = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1")}
		}
	}
	for i := range p.Containers {
		out.Spec.Containers = append(out.Spec.Containers, kubeletContainer(&p.Containers[i]))
	}
	for i := range p.InitContainers {
		out.Spec.InitContainers = append(out.Spec.InitContainers, kubeletContainer(&p.InitContainers[i]))
	}
	for _, v := range p.Volumes {
		out.Spec.Volumes = append(out.Spec.Volumes, corev1.Volume{Name: v.Name, VolumeSource: kubeletVolume(v)})
	}
	return out
}

func kubeletContainer(c *engine.Container) corev1.Container {
	out := corev1.Container{Name: c.Name, Resources: corev1.ResourceRequirements{Requests: kubeletAmounts(c.Requests), Limits: kubeletAmounts(c.Limits)}}
	if c.Sidecar {
		always := corev1.ContainerRestartPolicyAlways
		out.RestartPolicy = &always
	}
	return out
}

func kubeletAmounts(a engine.Amounts) corev1.ResourceList {
	out := corev1.ResourceList{}
	if a.EphemeralStorage != nil {
		out[corev1.ResourceEphemeralStorage] = *a.EphemeralStorage
	}
	if a.Memory != nil {
		out[corev1.ResourceMemory] = *a.Memory
	}
	return out
}

func kubeletVolume(v engine.Volume) corev1.VolumeSource {
	switch v.Kind {
	case engine.EmptyDirDisk:
		return corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{SizeLimit: v.SizeLimit}}
	case engine.EmptyDirMemory:
		return corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumMemory, SizeLimit: v.SizeLimit}}
	case engine.ConfigMap:
		return corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{}}
	case engine.GitRepo:
		return corev1.VolumeSource{GitRepo: &corev1.GitRepoVolumeSource{}}
	case engine.HostPath:
		return corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{}}
	default:
		return corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{}}
	}
}

func kubeletSummary(s *engine.Summary) *statsapi.Summary {
	out := &statsapi.Summary{Node: statsapi.NodeStats{
		Memory: kubeletMemory(s.Memory),
		Fs:     kubeletFS(s.NodeFS),
		Runtime: &statsapi.RuntimeStats{
			ImageFs:     kubeletFS(s.ImageFS),
			ContainerFs: kubeletFS(s.ContainerFS),
		},
	}}
	if s.AllocatableMemory != nil {
		out.Node.SystemContainers = []statsapi.ContainerStats{{Name: statsapi.SystemContainerPods, Memory: kubeletMemory(s.AllocatableMemory)}}
	}
	if p := s.Processes; p != nil {
		out.Node.Rlimit = &statsapi.RlimitStats{Time: metav1.NewTime(p.Time), MaxPID: p.MaxPID, NumOfRunningProcesses: p.RunningCount}
	}
	for i := range s.Pods {
		p := &s.Pods[i]
		pod := statsapi.PodStats{
			PodRef:           statsapi.PodReference{UID: p.UID},
			EphemeralStorage: kubeletFS(p.EphemeralStorage),
			ProcessStats:     &statsapi.ProcessStats{ProcessCount: p.ProcessCount},
		}
		if p.MemoryBytes != nil {
			pod.Memory = &statsapi.MemoryStats{WorkingSetBytes: p.MemoryBytes}
		}
		for _, c := range p.Containers {
			container := statsapi.ContainerStats{Name: c.Name, Rootfs: kubeletFS(c.RootFS), Logs: kubeletFS(c.Logs)}
			if c.MemoryBytes != nil {
				container.Memory = &statsapi.MemoryStats{WorkingSetBytes: c.MemoryBytes}
			}
			pod.Containers = append(pod.Containers, container)
		}
		for _, v := range p.Volumes {
			pod.VolumeStats = append(pod.VolumeStats, statsapi.VolumeStats{Name: v.Name, FsStats: *kubeletFS(&v.FSStats)})
		}
		out.Pods = append(out.Pods, pod)
	}
	return out
}

func kubeletMemory(m *engine.MemoryStats) *statsapi.MemoryStats {
	if m == nil {
		return nil
	}
	return &statsapi.MemoryStats{Time: metav1.NewTime(m.Time), AvailableBytes: m.AvailableBytes, WorkingSetBytes: m.WorkingSetBytes}
}

func kubeletFS(f *engine.FSStats) *statsapi.FsStats {
	if f == nil {
		return nil
	}
	return &statsapi.FsStats{
		Time:           metav1.NewTime(f.Time),
		AvailableBytes: f.AvailableBytes, CapacityBytes: f.CapacityBytes, UsedBytes: f.UsedBytes,
		InodesFree: f.InodesFree, Inodes: f.Inodes, InodesUsed: f.InodesUsed,
	}
}
