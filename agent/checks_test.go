package agent

import (
	"strings"
	"testing"

	"github.com/cleave-cri/cleave/doctor"
	"github.com/cleave-cri/cleave/fsstats"
)

func TestJudgeLayout(t *testing.T) {
	t.Parallel()
	at := func(role fsstats.Role, minor uint32, note string) fsstats.Place {
		return fsstats.Place{Role: role, Filesystem: fsstats.Filesystem{Device: fsstats.Device{Major: 8, Minor: minor}, CapacityBytes: 1 << 30}, Note: note}
	}
	cases := []struct {
		name    string
		places  []fsstats.Place
		problem string
		want    doctor.Level
		reason  []string
	}{
		{"healthy", []fsstats.Place{at(fsstats.NodeFS, 1, ""), at(fsstats.ImageFS, 2, ""), at(fsstats.ContainerFS, 1, "")}, "",
			doctor.Pass, []string{"split", "imagefs on 8:2"}},
		{"a folder is missing", []fsstats.Place{at(fsstats.NodeFS, 1, "/var/lib/kubelet does not exist"), at(fsstats.ImageFS, 1, ""), at(fsstats.ContainerFS, 1, "")}, "",
			doctor.Warn, []string{"single", "nodefs: /var/lib/kubelet does not exist"}},
		{"figures are not whole", []fsstats.Place{at(fsstats.NodeFS, 1, ""), at(fsstats.ImageFS, 2, ""), at(fsstats.ContainerFS, 2, "")}, "a layer can't be read",
			doctor.Warn, []string{"dedicated", "a layer can't be read"}},
		{"a role is nowhere", []fsstats.Place{at(fsstats.NodeFS, 1, ""), at(fsstats.ContainerFS, 1, "")}, "",
			doctor.Fail, []string{"not known"}},
		{"nothing", nil, "", doctor.Fail, []string{"not known"}},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			got := judgeLayout(fsstats.Layout{Places: tc.places}, tc.problem)
			if got.Level != tc.want || (got.Level == doctor.Pass) != (got.Remedy == "") {
				t.Errorf("got %+v, want %s", got, tc.want)
			}
			for _, want := range tc.reason {
				if !strings.Contains(got.Reason, want) {
					t.Errorf("the reason %q is without %q", got.Reason, want)
				}
			}
		})
	}
}
