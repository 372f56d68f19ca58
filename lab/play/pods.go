package play

import (
	"cmp"
	"fmt"
	"path/filepath"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/lab/deputy"
	"github.com/cleave-cri/cleave/lab/scenario"
	"github.com/cleave-cri/cleave/lab/stage"
	"github.com/cleave-cri/cleave/lab/writer"
)

// podOf is a pod of a scenario as the API server takes it. program is what its
// containers run, notes the folder in which they note that they had no space.
func podOf(p *scenario.Pod, program, notes string) (*corev1.Pod, error) {
	grace := int64(30)
	if p.Grace != nil {
		grace = int64(p.Grace.Seconds())
	}
	hostPath := func(name, path string) corev1.Volume {
		return corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: path}}}
	}
	out := &corev1.Pod{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Name: p.Name, Namespace: p.Namespace, Annotations: map[string]string{}},
		Spec: corev1.PodSpec{
			NodeName: deputy.NodeName, HostNetwork: true, TerminationGracePeriodSeconds: &grace, Priority: &p.Priority, RestartPolicy: corev1.RestartPolicyNever,
			Tolerations: []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
			Volumes:     []corev1.Volume{hostPath("lab-program", program), hostPath("lab-notes", notes)},
		},
	}
	if p.Owner != "" {
		kind, name, ok := strings.Cut(p.Owner, " ")
		if !ok {
			kind, name = "ReplicaSet", p.Owner
		}
		yes := true
		out.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: kind, Name: filepath.Base(name), UID: "lab", Controller: &yes}}
	}
	for _, v := range p.Volumes {
		volume := corev1.Volume{Name: v.Name}
		switch v.Kind {
		case engine.HostPath:
			return nil, fmt.Errorf("pod %s: volume %s: the lab has no hostPath volumes; write host: for what is outside of pods", p.Name, v.Name)
		default:
			volume.EmptyDir = &corev1.EmptyDirVolumeSource{SizeLimit: amount(&v.SizeLimitBytes)}
		}
		out.Spec.Volumes = append(out.Spec.Volumes, volume)
	}
	for _, c := range p.Containers {
		container, err := containerOf(p, &c)
		if err != nil {
			return nil, err
		}
		if c.RestartsAfter != nil {
			out.Annotations[deputy.RestartsAfter+"/"+c.Name] = c.RestartsAfter.String()
		}
		out.Spec.Containers = append(out.Spec.Containers, container)
	}
	return out, nil
}

func containerOf(p *scenario.Pod, c *scenario.Container) (corev1.Container, error) {
	name, value, err := writer.Container{Name: p.Name + "." + c.Name, Writes: c.Writes, ExitsAfter: c.ExitsAfter}.Env()
	if err != nil {
		return corev1.Container{}, err
	}
	out := corev1.Container{
		Name: c.Name, Image: stage.Reference(c.Image), ImagePullPolicy: corev1.PullIfNotPresent, Command: []string{writer.Program},
		Env: []corev1.EnvVar{{Name: name, Value: value}},
		VolumeMounts: []corev1.VolumeMount{
			{Name: "lab-program", MountPath: writer.Program, ReadOnly: true}, {Name: "lab-notes", MountPath: writer.Notes},
		},
	}
	for _, v := range p.Volumes {
		out.VolumeMounts = append(out.VolumeMounts, corev1.VolumeMount{Name: v.Name, MountPath: filepath.Join(writer.Volumes, v.Name)})
	}
	if c.RequestBytes != nil {
		out.Resources.Requests = corev1.ResourceList{corev1.ResourceEphemeralStorage: *cmp.Or(amount(c.RequestBytes), &resource.Quantity{})}
	}
	if c.LimitBytes != nil {
		out.Resources.Limits = corev1.ResourceList{corev1.ResourceEphemeralStorage: *cmp.Or(amount(c.LimitBytes), &resource.Quantity{})}
	}
	return out, nil
}

// amount is nil for nothing.
func amount(bytes *int64) *resource.Quantity {
	if bytes == nil || *bytes == 0 {
		return nil
	}
	return resource.NewQuantity(*bytes, resource.BinarySI)
}
