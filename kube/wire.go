package kube

import (
	"bytes"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
)

// The annotations by which the kubelet marks static and mirror pods (pkg/kubelet/types/pod_update.go).
const (
	annotationSource = "kubernetes.io/config.source"
	annotationMirror = "kubernetes.io/config.mirror"
	annotationHash   = "kubernetes.io/config.hash"
)

// wirePod is a pod as it is read: of a v1 Pod only what a Pod needs. All sources read it. Beside the whole type it takes a tenth
// of the memory of a node with long environments and managed fields, and it survives amounts that are none.
type wirePod struct {
	metav1.TypeMeta
	Metadata wireMeta   `json:"metadata"`
	Spec     wireSpec   `json:"spec"`
	Status   wireStatus `json:"status"`
}

type wirePodList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata"`
	Items           []wirePod `json:"items"`
}

type wireMeta struct {
	Name              string                  `json:"name"`
	Namespace         string                  `json:"namespace"`
	UID               string                  `json:"uid"`
	ResourceVersion   string                  `json:"resourceVersion"`
	DeletionTimestamp *string                 `json:"deletionTimestamp"`
	Annotations       wireAnnotations         `json:"annotations"`
	OwnerReferences   []metav1.OwnerReference `json:"ownerReferences"`
}

// wireAnnotations keeps the few that matter; others may be 256 KiB in all.
type wireAnnotations map[string]string

// UnmarshalJSON implements [json.Unmarshaler].
func (a *wireAnnotations) UnmarshalJSON(data []byte) error {
	var all map[string]string
	if err := json.Unmarshal(data, &all); err != nil {
		return err
	}
	*a = nil
	for _, key := range []string{annotationSource, annotationMirror, annotationHash, metav1.InitialEventsAnnotationKey} {
		if value, ok := all[key]; ok {
			if *a == nil {
				*a = wireAnnotations{}
			}
			(*a)[key] = strings.Clone(value)
		}
	}
	return nil
}

type wireSpec struct {
	NodeName       string            `json:"nodeName"`
	Priority       *int32            `json:"priority"`
	PriorityClass  string            `json:"priorityClassName"`
	Grace          *int64            `json:"terminationGracePeriodSeconds"`
	Containers     []wireContainer   `json:"containers"`
	InitContainers []wireContainer   `json:"initContainers"`
	Overhead       map[string]amount `json:"overhead"`
	Resources      *wireResources    `json:"resources"`
	Volumes        []wireVolume      `json:"volumes"`
	Tolerations    []wireToleration  `json:"tolerations"`
}

type wireContainer struct {
	Name          string        `json:"name"`
	RestartPolicy string        `json:"restartPolicy"`
	Resources     wireResources `json:"resources"`
}

type wireResources struct {
	Requests map[string]amount `json:"requests"`
	Limits   map[string]amount `json:"limits"`
}

type wireVolume struct {
	Name     string `json:"name"`
	EmptyDir *struct {
		Medium    string  `json:"medium"`
		SizeLimit *amount `json:"sizeLimit"`
	} `json:"emptyDir"`
	ConfigMap *struct{} `json:"configMap"`
	GitRepo   *struct{} `json:"gitRepo"`
	HostPath  *struct{} `json:"hostPath"`
}

type wireToleration struct {
	Key      string `json:"key"`
	Operator string `json:"operator"`
	Value    string `json:"value"`
	Effect   string `json:"effect"`
}

type wireStatus struct {
	Phase          string                `json:"phase"`
	QoS            string                `json:"qosClass"`
	Containers     []wireContainerStatus `json:"containerStatuses"`
	InitContainers []wireContainerStatus `json:"initContainerStatuses"`
}

type wireContainerStatus struct {
	Name               string            `json:"name"`
	AllocatedResources map[string]amount `json:"allocatedResources"`
}

// amount is a quantity, or what was written instead of one.
type amount struct {
	q     *resource.Quantity
	fault string
}

// maxAmount is how long what is written for an amount may be: nobody writes more.
const maxAmount = 100

// endless is an exponent of more than three digits. The library of quantities (apimachinery 0.37) would think for minutes about
// some of them.
var endless = regexp.MustCompile(`[eE][+-]?0*[1-9][0-9]{3,}$`)

// UnmarshalJSON implements [json.Unmarshaler]. It never fails: one pod's nonsense must not hide all others.
func (a *amount) UnmarshalJSON(data []byte) error {
	text := string(data)
	if len(data) > 0 && data[0] == '"' {
		if err := json.Unmarshal(data, &text); err != nil {
			a.fault = "is no amount"
			return nil //nolint:nilerr // see above
		}
	}
	text = strings.TrimSpace(text)
	switch {
	case text == "null" || text == "":
		return nil
	case len(text) > maxAmount:
		a.fault = fmt.Sprintf("is no amount: %q…", text[:20])
		return nil
	case endless.MatchString(text):
		a.fault = fmt.Sprintf("is no amount that a node can have: %s", text)
		return nil
	}
	q, err := resource.ParseQuantity(text)
	switch {
	case err != nil:
		a.fault = fmt.Sprintf("is no amount: %q", text)
	case q.Sign() < 0:
		a.fault = fmt.Sprintf("is less than nothing: %s", text)
	default:
		a.q = &q
	}
	return nil
}

// GetObjectMeta lets client-go see what it needs.
func (p *wirePod) GetObjectMeta() metav1.Object {
	return &metav1.ObjectMeta{
		Name: p.Metadata.Name, Namespace: p.Metadata.Namespace, UID: types.UID(p.Metadata.UID), ResourceVersion: p.Metadata.ResourceVersion,
		Annotations: p.Metadata.Annotations,
	}
}

// DeepCopyObject implements [apiruntime.Object]. Nobody changes one, so that a copy may share.
func (p *wirePod) DeepCopyObject() apiruntime.Object { out := *p; return &out }

// DeepCopyObject implements [apiruntime.Object].
func (l *wirePodList) DeepCopyObject() apiruntime.Object {
	out := *l
	out.Items = slices.Clone(l.Items)
	return &out
}

// readPods reads a list of pods as JSON.
func readPods(data []byte) ([]wirePod, error) {
	var list struct {
		Kind  string          `json:"kind"`
		Items json.RawMessage `json:"items"`
	}
	if err := json.Unmarshal(data, &list); err != nil {
		return nil, err
	}
	items := bytes.TrimSpace(list.Items)
	if list.Kind != "PodList" {
		return nil, fmt.Errorf("it is a %q, not a PodList", list.Kind)
	}
	if len(items) == 0 || bytes.Equal(items, []byte("null")) {
		return nil, nil // as a kubelet without pods writes it
	}
	var pods []wirePod
	err := json.Unmarshal(items, &pods)
	return pods, err
}

// reader turns one wirePod into a Pod and collects faults.
type reader struct{ faults []string }

// pod is the Pod that is meant, or an error if nobody could know which pod that is.
func (p *wirePod) pod() (*Pod, error) {
	var r reader
	m := &p.Metadata
	out := &Pod{
		UID: m.UID, APIUID: m.UID, Namespace: m.Namespace, Name: m.Name,
		Owner: m.owner(), Priority: p.Spec.Priority, GraceSeconds: p.Spec.Grace,
		QoS: p.Status.QoS, Phase: p.Status.Phase, Terminating: m.DeletionTimestamp != nil,
		ToleratesDiskPressure: slices.ContainsFunc(p.Spec.Tolerations, wireToleration.diskPressure),
	}
	if source, ok := m.Annotations[annotationSource]; ok && source != "api" {
		out.Static = true
		out.APIUID = ""
	}
	if hash, ok := m.Annotations[annotationMirror]; ok {
		// The runtime has the static pod's UID, which the kubelet makes from the file; the mirror keeps it as its hash.
		out.Mirror, out.Static = true, true
		out.UID, out.APIUID = hash, m.UID
	}
	switch {
	case m.Name == "" || m.Namespace == "":
		return nil, fmt.Errorf("pod %q in namespace %q with UID %q has no full name", m.Name, m.Namespace, m.UID)
	case out.UID == "":
		return nil, fmt.Errorf("pod %s has no UID", out)
	case len(p.Spec.Containers) == 0:
		r.add("it has no containers")
	}
	// The API server sets the priority of these classes; a kubelet that no API server has told about it may not have it.
	if out.Priority == nil && (p.Spec.PriorityClass == "system-node-critical" || p.Spec.PriorityClass == "system-cluster-critical") {
		critical := SystemCritical
		out.Priority = &critical
	}
	out.Containers = r.containers(p.Spec.Containers, p.Status.Containers)
	out.InitContainers = r.containers(p.Spec.InitContainers, p.Status.InitContainers)
	out.Overhead = r.amounts("overhead", p.Spec.Overhead)
	r.podLevel(out, p.Spec.Resources)
	for i := range p.Spec.Volumes {
		out.Volumes = append(out.Volumes, r.volume(&p.Spec.Volumes[i]))
	}
	out.Faults = r.faults
	return out, nil
}

func (r *reader) add(format string, args ...any) {
	const most = 8 // the first ones tell enough
	if len(r.faults) < most {
		r.faults = append(r.faults, fmt.Sprintf(format, args...))
	}
}

func (r *reader) amounts(what string, from map[string]amount) Amounts {
	return Amounts{EphemeralStorage: r.amount(what, from, "ephemeral-storage"), Memory: r.amount(what, from, "memory")}
}

func (r *reader) amount(what string, from map[string]amount, name string) *resource.Quantity {
	a := from[name]
	if a.fault != "" {
		r.add("%s of %s %s", what, name, a.fault)
	}
	return a.q
}

func (r *reader) containers(specs []wireContainer, statuses []wireContainerStatus) []Container {
	if len(specs) == 0 {
		return nil
	}
	out := make([]Container, 0, len(specs))
	for i := range specs {
		s := &specs[i]
		c := Container{
			Name: s.Name, Sidecar: s.RestartPolicy == "Always",
			Requests: r.amounts("container "+s.Name+"'s request", s.Resources.Requests),
			Limits:   r.amounts("container "+s.Name+"'s limit", s.Resources.Limits),
		}
		for j := range statuses {
			// The kubelet decides by what it has allocated, which lags behind a resize (SYN-4).
			if statuses[j].Name == s.Name {
				if q := r.amount("container "+s.Name+"'s allocation", statuses[j].AllocatedResources, "memory"); q != nil {
					c.Requests.Memory = q
				}
			}
		}
		out = append(out, c)
	}
	return out
}

// podLevel reads the pod's own resources: cpu, memory and huge pages can be given for a pod as a whole, nothing else can.
func (r *reader) podLevel(out *Pod, from *wireResources) {
	if from == nil {
		return
	}
	for _, list := range []map[string]amount{from.Requests, from.Limits} {
		for name := range list {
			out.PodLevel = out.PodLevel || name == "cpu" || name == "memory" || strings.HasPrefix(name, "hugepages-")
		}
	}
	out.PodLevelMemory = r.amount("the pod's request", from.Requests, "memory")
}

func (r *reader) volume(v *wireVolume) Volume {
	out := Volume{Name: v.Name, Kind: OtherVolume}
	switch {
	case v.EmptyDir != nil:
		out.Kind = EmptyDirDisk
		if v.EmptyDir.Medium != "" {
			out.Kind = EmptyDirMemory
		}
		if limit := v.EmptyDir.SizeLimit; limit != nil {
			if limit.fault != "" {
				r.add("volume %s's sizeLimit %s", v.Name, limit.fault)
			}
			out.SizeLimit = limit.q
		}
	case v.ConfigMap != nil:
		out.Kind = ConfigMap
	case v.GitRepo != nil:
		out.Kind = GitRepo
	case v.HostPath != nil:
		out.Kind = HostPath
	}
	return out
}

// owner is the controller that would make the pod anew. One of a kind that has the pod's node for its owner does not.
func (m *wireMeta) owner() string {
	for i := range m.OwnerReferences {
		o := &m.OwnerReferences[i]
		if o.Controller != nil && *o.Controller && o.Kind != "Node" {
			return o.Kind + " " + m.Namespace + "/" + o.Name
		}
	}
	return ""
}

// diskPressure says whether the toleration tolerates node.kubernetes.io/disk-pressure:NoSchedule, as the scheduler would
// (k8s.io/api/core/v1, Toleration.ToleratesTaint).
func (t wireToleration) diskPressure() bool {
	if t.Effect != "" && t.Effect != "NoSchedule" {
		return false
	}
	switch t.Operator {
	case "Exists":
		return t.Key == "" || t.Key == DiskPressure
	case "", "Equal":
		return t.Key == DiskPressure && t.Value == ""
	}
	return false
}

// DiskPressure is the key of the taint that the node controller sets for the kubelet's condition of that name.
const DiskPressure = "node.kubernetes.io/disk-pressure"
