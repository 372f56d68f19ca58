package agent

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cleave-cri/cleave/agent/kubeletapi"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/config/kubelet"
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

// TestExamineKubelet is about a kubelet that is only files below a made-up
// /proc; the filesystems and sockets around it are those of this machine.
func TestExamineKubelet(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	proc := filepath.Join(dir, "proc")
	write := func(name, content string) {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	cfg := config.Default()
	cfg.Control.Endpoint = config.Endpoint(filepath.Join(dir, "control.sock"))
	cfg.Filesystems = config.Filesystems{NodeFS: dir, Logs: dir, ImageFS: dir, ContainerFS: dir}

	o := made(t, cfg, observed{
		store: &node{}, filesystems: fsstats.NewProber(),
		mountpoints: func(context.Context) ([]string, []string, error) { return nil, nil, nil },
	})
	write("proc/stat", "btime 1700000000\n")
	results := examineKubelet(t.Context(), cfg, kubelet.Reader{Proc: proc}, o)
	if len(results) != 1 || results[0].Level != doctor.Pass || !strings.Contains(results[0].Reason, "no kubelet") {
		t.Errorf("without a kubelet: %+v", results)
	}

	write("proc/42/cmdline", "kubelet\x00--config=/k.yaml\x00--root-dir="+dir+"\x00")
	write("proc/42/stat", "42 (kubelet) S 1 1 1 0 -1 4194560 1 0 0 0 1 1 0 0 20 0 9 0 12345 1 1 1")
	write("proc/42/status", "Uid:\t0\t0\t0\t0\n")
	write("root/k.yaml", "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\npodLogsDir: "+dir+"\nevictionHard: {memory.available: 1Gi}\n")
	write("root/run/x", "")
	for link, to := range map[string]string{
		"proc/42/root": filepath.Join(dir, "root"), "proc/42/cwd": "/", "root/var": "/", "proc/42/ns/mnt": "mnt:[1]", "proc/self/ns/mnt": "mnt:[1]",
	} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, link)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(to, filepath.Join(dir, link)); err != nil {
			t.Fatal(err)
		}
	}
	got := map[string]doctor.Result{}
	for _, r := range examineKubelet(t.Context(), cfg, kubelet.Reader{Proc: proc}, o) {
		got[r.Check] = r
	}
	for check, want := range map[string]struct {
		level  doctor.Level
		reason string
	}{
		"kubelet":              {doctor.Warn, "/k.yaml changed since"},
		"mode cri":             {doctor.Warn, "containerd.sock"},
		"kubelet's thresholds": {doctor.Warn, "nodefs.available"},
		"disk of pod logs":     {doctor.Pass, "are on one filesystem"},
	} {
		if r := got[check]; r.Level != want.level || !strings.Contains(r.Reason, want.reason) {
			t.Errorf("%s: got %+v, want %s with %q", check, r, want.level, want.reason)
		}
	}
	for _, check := range []string{"mode crio", "kubeadm", "SELinux labels"} {
		if got[check].Level == "" {
			t.Errorf("no check %q", check)
		}
	}
}

// TestOwnerOf: who listens is known by the kernel's word.
func TestOwnerOf(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(t.TempDir(), "s")
	if _, answers := ownerOf(t.Context(), kubelet.Reader{}, socket); answers {
		t.Error("a socket that does not exist answers")
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	owner, answers := ownerOf(t.Context(), kubelet.Reader{}, socket)
	if !answers || owner != filepath.Base(os.Args[0]) {
		t.Errorf("got %q, %v, want this program, %q", owner, answers, os.Args[0])
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestDiskOf(t *testing.T) {
	t.Parallel()
	inodes := uint64(5)
	got := diskOf(fsstats.Filesystem{Device: fsstats.Device{Major: 8, Minor: 1}, CapacityBytes: 100, FreeBytes: 60, AvailableBytes: 55, InodesTotal: &inodes})
	if got.Device != "8:1" || got.CapacityBytes != 100 || got.AttainableBytes != 95 || *got.Inodes != 5 {
		t.Errorf("got %+v", got)
	}
}

// That the kubelet's page can't be read is told, and no fault of the node; that it answers nonsense is one.
func TestPagesThatCantBeRead(t *testing.T) {
	t.Parallel()
	answer := func(code int) kubelet.Settings {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(code) }))
		t.Cleanup(server.Close)
		address, ok := server.Listener.Addr().(*net.TCPAddr)
		if !ok {
			t.Fatal("no TCP address")
		}
		return kubelet.Settings{PID: os.Getpid(), ReadOnlyPort: kubelet.Setting[int32]{Value: int32(address.Port)}} //nolint:gosec // a port
	}
	for _, tc := range []struct {
		name  string
		s     kubelet.Settings
		level doctor.Level
		want  string
	}{
		{"it answers", answer(http.StatusOK), doctor.Pass, "says which pods it has"},
		{"not allowed", answer(http.StatusForbidden), doctor.Pass, "crio.kubeletTokenFile"},
		{"no server", kubelet.Settings{PID: os.Getpid(), Port: kubelet.Setting[int32]{Value: 1}}, doctor.Pass, "is not asked for its pods"},
		{"broken", answer(http.StatusInternalServerError), doctor.Warn, "it answers 500"},
	} {
		if got := pageCheck(kubeletapi.Client{}, tc.s).Run(t.Context()); got.Level != tc.level || !strings.Contains(got.Reason, tc.want) {
			t.Errorf("%s: %+v", tc.name, got)
		}
	}
}
