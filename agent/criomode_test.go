package agent

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/cleave-cri/cleave/agent/crio"
	"github.com/cleave-cri/cleave/agent/page"
	"github.com/cleave-cri/cleave/config/kubelet"
	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/proxy/criocompat/nriplugin"
	"github.com/cleave-cri/cleave/web"
)

func TestKSS2_ToWhichKubeletsASplitIsReported(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name    string
		version kubelet.Version
		gate    bool
		want    string // a part of the reason; empty means that it is reported
	}{
		{"proved", kubelet.Version{Major: 1, Minor: 37, Patch: 2, Text: "v1.37.2"}, false, ""},
		{"a distribution's", kubelet.Version{Major: 1, Minor: 37, Text: "v1.37.1-gke.7"}, false, ""},
		{"too old", kubelet.Version{Major: 1, Minor: 31, Text: "v1.31.9"}, false, "v1.31.9"},
		{"not tried yet", kubelet.Version{Major: 1, Minor: 38, Text: "v1.38.0"}, false, "v1.38.0"},
		{"unknown", kubelet.Version{}, false, "not known"},
		{"KSS-18: with the gate", kubelet.Version{Major: 1, Minor: 37, Text: "v1.37.2"}, true, kubelet.GateStatsFromCRI},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			got := refusal(tc.version, tc.gate)
			if (got == "") != (tc.want == "") || !strings.Contains(got, tc.want) {
				t.Errorf("refused because %q, want %q", got, tc.want)
			}
		})
	}
}

func TestLAY13_ThreeDisksAreRefused(t *testing.T) {
	t.Parallel()
	layout := func(node, images, containers uint32) fsstats.Layout {
		at := func(role fsstats.Role, minor uint32) fsstats.Place {
			return fsstats.Place{Role: role, Reported: "/" + string(role), Filesystem: fsstats.Filesystem{Device: fsstats.Device{Major: 8, Minor: minor}}}
		}
		return fsstats.Layout{Places: []fsstats.Place{at(fsstats.NodeFS, node), at(fsstats.ImageFS, images), at(fsstats.ContainerFS, containers)}}
	}
	for _, fine := range []fsstats.Layout{layout(1, 1, 1), layout(1, 2, 2), layout(1, 2, 1), {}} {
		if reason := threeDisks(fine); reason != "" {
			t.Errorf("%s is refused: %s", fine.Kind(), reason)
		}
	}
	if reason := threeDisks(layout(1, 2, 3)); !strings.Contains(reason, "/containerfs (device 8:3)") {
		t.Errorf("three disks: %q", reason)
	}
}

func TestCRIOStatusText(t *testing.T) {
	t.Parallel()
	s := &CRIOStatus{
		Kubelet: crio.Status{Told: &crio.Told{
			Kubelet: crio.Kubelet{PID: 7, Version: "v1.37.2"}, Split: true,
			Images: crio.Disk{Mountpoint: "/images"}, Containers: crio.Disk{Mountpoint: "/containers"},
		}, Summary: &crio.SummaryStatus{Wrong: "it has no imageFs"}},
		Problems:   []string{"it is so: do that"},
		Unmeasured: []nriplugin.Container{{Name: "c", Pod: "p", Namespace: "n"}},
	}
	var b strings.Builder
	s.writeText(page.NewWriter(&b))
	want := `The kubelet (pid 7, v1.37.2) was told of two disks: images on /images, containers on /containers.
Its summary does not have them as they are: it has no imageFs
! Kubelet: it is so: do that
! 1 containers are not measured by the kubelet until they are created anew:
    c of pod n/p
`
	if diff := cmp.Diff(want, b.String()); diff != "" {
		t.Error(diff)
	}
	wrong := false
	if diff := cmp.Diff(&web.Kubelet{Split: true, SummaryRight: &wrong, Problems: 1, Unmeasured: 1}, s.values()); diff != "" {
		t.Error(diff)
	}
	s.Kubelet.Summary.Unknown = "it does not show it"
	if got := s.values().SummaryRight; got != nil {
		t.Errorf("a summary that can't be seen is %v", *got)
	}
}
