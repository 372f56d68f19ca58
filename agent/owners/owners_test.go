package owners

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/cleave-cri/cleave/fsstats/index"
)

// lines are owners in short.
func lines(list []index.Owner) (out []string) {
	for _, o := range list {
		for _, p := range o.Parts {
			out = append(out, fmt.Sprintf("%s %q %s: %s", o.Kind, o.ID, p.Name, p.Path))
		}
	}
	return out
}

func TestList(t *testing.T) {
	t.Parallel()
	pod := func(v ...VolumeFolder) Folders {
		return Folders{KubeletRoot: "/k", LogRoot: "/logs", Pods: []PodFolder{{UID: "u", Path: "/k/pods/u", Volumes: v}}}
	}
	cases := []struct {
		name  string
		known Known
		want  []string
	}{
		{"nothing is known", Known{}, nil},
		{
			"layers: walked, or given by somebody else",
			Known{Snapshots: []Snapshot{{Container, "c", "/s/1/fs"}, {Sandbox, "s", ""}, {Image, "overlayfs/l", ""}}},
			[]string{`container "c" layer: /s/1/fs`, `image layer "overlayfs/l" layer: `, `sandbox "s" layer: `},
		},
		{
			"the content store and what is being downloaded",
			Known{ContentRoot: "/c"},
			[]string{`content store "" blobs: /c`, `content store "" ingests: /c/ingest`},
		},
		{
			"ACC-2: volumes in the pod's folder, without those that are mounted from elsewhere",
			Known{Folders: pod(
				VolumeFolder{Plugin: PluginEmptyDir, Name: "e", Path: "/k/pods/u/volumes/e"},
				VolumeFolder{Plugin: PluginEmptyDir, Name: "memory", Path: "/k/pods/u/volumes/m", Mounted: true},
				VolumeFolder{Plugin: PluginConfigMap, Name: "c", Path: "/k/pods/u/volumes/c"},
				VolumeFolder{Plugin: "kubernetes.io~local-volume", Name: "l", Path: "/k/pods/u/volumes/l", Mounted: true, Source: "/data/l"},
			)},
			[]string{
				`kubelet "" files: /k`, `local volume "/data/l" files: /data/l`,
				`pod "u" kubernetes.io~empty-dir/e: /k/pods/u/volumes/e`, `pod "u" kubernetes.io~configmap/c: /k/pods/u/volumes/c`,
				`pod "u" other files: /k/pods/u`,
			},
		},
		{
			"a local volume that two pods use counts once",
			Known{Folders: Folders{KubeletRoot: "/k", Pods: []PodFolder{
				{UID: "u", Path: "/k/pods/u", Volumes: []VolumeFolder{{Plugin: "p", Name: "l", Mounted: true, Source: "/data/l"}}},
				{UID: "w", Path: "/k/pods/w", Volumes: []VolumeFolder{{Plugin: "p", Name: "l", Mounted: true, Source: "/data/l"}}},
			}}},
			[]string{`kubelet "" files: /k`, `local volume "/data/l" files: /data/l`, `pod "u" other files: /k/pods/u`, `pod "w" other files: /k/pods/w`},
		},
		{
			"a local volume that holds the node itself is none",
			Known{ContentRoot: "/c", Folders: pod(VolumeFolder{Plugin: "p", Name: "root", Mounted: true, Source: "/"})},
			[]string{`content store "" blobs: /c`, `content store "" ingests: /c/ingest`, `kubelet "" files: /k`, `pod "u" other files: /k/pods/u`},
		},
		{
			"ACC-9, ACC-10: log folders of containers, and the pod's without them",
			Known{Folders: Folders{LogRoot: "/logs", Logs: []LogFolder{{UID: "u", Path: "/logs/n_p_u", Containers: []string{"a", "b"}}}}},
			[]string{`pod "u" logs/a: /logs/n_p_u/a`, `pod "u" logs/b: /logs/n_p_u/b`, `pod "u" logs: /logs/n_p_u`},
		},
		{
			"a folder among the pods' logs that is no pod's",
			Known{Folders: Folders{LogRoot: "/logs", Logs: []LogFolder{{Path: "/logs/old"}}}},
			[]string{`folder of nobody "/logs/old" files: /logs/old`},
		},
		{
			"the kubelet's root holds containerd's layers: it is not counted as a whole",
			Known{Folders: Folders{KubeletRoot: "/k"}, Foreign: []string{"/k/containerd/overlayfs"}},
			[]string{`kubelet "" pods: /k/pods`, `kubelet "" plugins: /k/plugins`},
		},
		{
			"a name that only begins alike is not inside",
			Known{Folders: Folders{KubeletRoot: "/k"}, Foreign: []string{"/k2/overlayfs"}},
			[]string{`kubelet "" files: /k`},
		},
		{
			"one path has one owner",
			Known{ContentRoot: "/same", Folders: Folders{KubeletRoot: "/same/"}},
			[]string{`content store "" blobs: /same`, `content store "" ingests: /same/ingest`},
		},
		{
			"ACC-16: deleted files that are open, on each filesystem",
			Known{Snapshots: []Snapshot{{Container, "c", "/s/1/fs"}}, Open: []OpenFile{{"c", "8:1"}, {"c", "8:17"}}},
			[]string{`container "c" layer: /s/1/fs`, `container "c" open-deleted on 8:1: `, `container "c" open-deleted on 8:17: `},
		},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			got := lines(List(tc.known))
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			// The index takes all of them.
			x, err := index.New(index.Options{Space: func(string) (index.Space, error) { return index.Space{}, nil }})
			if err != nil {
				t.Fatal(err)
			}
			if err := x.SetOwners(List(tc.known)); err != nil {
				t.Errorf("the index refuses some: %v", err)
			}
		})
	}
}

// TestTheOrderOfFoldersDoesNotMatter: the same node has the same owners.
func TestTheOrderOfFoldersDoesNotMatter(t *testing.T) {
	t.Parallel()
	k := Known{Folders: Folders{KubeletRoot: "/k", LogRoot: "/l", Pods: []PodFolder{{UID: "a", Path: "/k/pods/a"}, {UID: "b", Path: "/k/pods/b"}}}}
	want := lines(List(k))
	slices.Reverse(k.Folders.Pods)
	if diff := cmp.Diff(want, lines(List(k))); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestParseLogFolder(t *testing.T) {
	t.Parallel()
	cases := []struct {
		name                string
		namespace, pod, uid string
		ok                  bool
	}{
		{"kube-system_etcd-1_0123-45", "kube-system", "etcd-1", "0123-45", true},
		{"a_b", "", "", "", false},
		{"a_b_c_d", "", "", "", false},
		{"a__c", "", "", "", false},
		{"", "", "", "", false},
		{"lost+found", "", "", "", false},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			namespace, pod, uid, ok := ParseLogFolder(tc.name)
			if namespace != tc.namespace || pod != tc.pod || uid != tc.uid || ok != tc.ok {
				t.Errorf("%q, %q, %q, %v, want %q, %q, %q, %v", namespace, pod, uid, ok, tc.namespace, tc.pod, tc.uid, tc.ok)
			}
		})
	}
}
