package agent

import (
	"strings"
	"testing"
	"time"

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

// TestLayoutWithARootAway: while the image disk is not mounted, what is below its
// mount point must not be taken for the place of images.
func TestLayoutWithARootAway(t *testing.T) {
	t.Parallel()
	node := fsstats.Filesystem{Device: fsstats.Device{Major: 8, Minor: 1}, CapacityBytes: 1 << 30}
	roles := []fsstats.Place{
		{Role: fsstats.NodeFS, Configured: "/var/lib/kubelet", Filesystem: node},
		{Role: fsstats.ImageFS, Configured: "/srv/images", Note: "/srv/images/snapshots does not exist", Filesystem: node},
		{Role: fsstats.ContainerFS, Configured: "/srv/images-not", Filesystem: node},
	}
	away := RootAway{Path: "/srv/images", Reason: "the image root is not a mount point of the host", Remedy: "mount the image filesystem there"}
	s := Status{Layout: fsstats.LayoutSingle, Roles: roles, Snapshotter: &SnapshotterStatus{Away: []RootAway{away}}}
	s.withoutRootsAway()
	if s.Layout != fsstats.LayoutUnknown || s.Roles[1].Note != away.Reason || s.Roles[0].Note != "" || s.Roles[2].Note != "" {
		t.Errorf("layout %s, roles %+v", s.Layout, s.Roles)
	}
	if roles[1].Note == away.Reason {
		t.Error("the picture that others read was changed")
	}
	var text strings.Builder
	if err := s.WriteText(&text, time.Now()); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(text.String(), "Layout: unknown (/srv/images: the image root is not a mount point of the host)") {
		t.Errorf("the status does not say why:\n%s", text.String())
	}
	r := judgeAway(away)
	if r.Level != doctor.Fail || r.Remedy != away.Remedy || !strings.Contains(r.Reason, away.Path) {
		t.Errorf("doctor: %+v", r)
	}
	s = Status{Layout: fsstats.LayoutSingle, Roles: roles, Snapshotter: &SnapshotterStatus{}}
	if s.withoutRootsAway(); s.Layout != fsstats.LayoutSingle {
		t.Errorf("without a root away the layout is %s", s.Layout)
	}
}
