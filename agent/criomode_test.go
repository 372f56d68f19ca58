package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	stats "k8s.io/kubelet/pkg/apis/stats/v1alpha1"

	"github.com/cleave-cri/cleave/agent/crio"
	"github.com/cleave-cri/cleave/agent/kubeletapi"
	"github.com/cleave-cri/cleave/agent/page"
	"github.com/cleave-cri/cleave/config/kubelet"
	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/proxy/criocompat"
	"github.com/cleave-cri/cleave/proxy/criocompat/nriplugin"
	"github.com/cleave-cri/cleave/web"
)

func TestKSS2_ToWhichKubeletsASplitIsReported(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name    string
		version kubelet.Version
		gates   string // those that are set
		want    string // a part of the reason; empty means that it is reported
	}{
		{"proved", kubelet.Version{Major: 1, Minor: 37, Patch: 2, Text: "v1.37.2"}, "", ""},
		{"a distribution's", kubelet.Version{Major: 1, Minor: 37, Text: "v1.37.1-gke.7"}, "", ""},
		{"too old", kubelet.Version{Major: 1, Minor: 31, Text: "v1.31.9"}, "", "v1.31.9"},
		{"not tried yet", kubelet.Version{Major: 1, Minor: 38, Text: "v1.38.0"}, "", "v1.38.0"},
		{"unknown", kubelet.Version{}, "", "not known"},
		{"KSS-18: with the gate", kubelet.Version{Major: 1, Minor: 37, Text: "v1.37.2"}, "PodAndContainerStatsFromCRI=true", kubelet.GateStatsFromCRI},
		{"KSS-18: with all gates of that stage", kubelet.Version{Major: 1, Minor: 37, Text: "v1.37.2"}, "AllBeta=true", kubelet.GateStatsFromCRI},
		{"without the gate", kubelet.Version{Major: 1, Minor: 37, Text: "v1.37.2"}, "PodAndContainerStatsFromCRI=false KubeletSeparateDiskGC=true", ""},
		{"LAY-14: it would evict nothing", kubelet.Version{Major: 1, Minor: 37, Text: "v1.37.2"}, "KubeletSeparateDiskGC=false", kubelet.GateSeparateDiskGC},
		{"LAY-14: all gates of that stage off", kubelet.Version{Major: 1, Minor: 34, Text: "v1.34.4"}, "AllBeta=false", kubelet.GateSeparateDiskGC},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			got := crioKubelet(kubelet.Settings{Version: tc.version, FeatureGates: gates(tc.gates)}).Refused
			if (got == "") != (tc.want == "") || !strings.Contains(got, tc.want) {
				t.Errorf("refused because %q, want %q", got, tc.want)
			}
		})
	}
}

func gates(set string) kubelet.Map[bool] {
	m := kubelet.Map[bool]{Entries: map[string]kubelet.Setting[bool]{}}
	for one := range strings.FieldsSeq(set) {
		name, value, _ := strings.Cut(one, "=")
		m.Entries[name] = kubelet.Setting[bool]{Value: value == "true"}
	}
	return m
}

// Every cAdvisor asks for the disks, and so does whoever tries the socket out. Only what the kubelet is told counts.
func TestKSS18_WhoAsksForTheDisks(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	write("proc/stat", "btime 1700000000\n")
	write("tree/bad.yaml", "kind: KubeletConfiguration\napiVersion: kubelet.config.k8s.io/v1beta1\nport: [\n")
	if err := errors.Join(os.MkdirAll(filepath.Join(dir, "proc/self/ns"), 0o755), os.Symlink("mnt:[1]", filepath.Join(dir, "proc/self/ns/mnt"))); err != nil {
		t.Fatal(err)
	}
	devices := func(path string) (string, error) {
		device, ok := map[string]string{"/var/lib/kubelet": "8:1", "/data/kubelet": "8:7"}[path]
		if !ok {
			return "", os.ErrNotExist
		}
		return device, nil
	}
	reader := kubelet.Reader{Proc: filepath.Join(dir, "proc")}
	const ours = "--container-runtime-endpoint=unix:///var/run/crio/crio.sock"
	for i, tc := range []struct {
		name     string
		args     []string
		mounts   string // its mount namespace; ours is 1
		stranger bool
		err      string // a part of another error
		device   string
	}{
		{"the kubelet", []string{"/usr/bin/kubelet", ours}, "1", false, "", "8:1"},
		{"the kubelet under another name", []string{"/opt/kubelet-1.37", ours}, "1", false, "", "8:1"},
		{"the kubelet sees the socket elsewhere", []string{"kubelet", "--container-runtime-endpoint=unix:///host/run/crio/crio.sock"}, "1", false, "", "8:1"},
		{"the kubelet with a disk of its own", []string{"kubelet", ours, "--root-dir=/data/kubelet"}, "1", false, "", "8:7"},
		{"the kubelet with other mounts", []string{"kubelet", ours}, "2", false, "", ""},
		{"the kubelet without a root directory yet", []string{"kubelet", ours, "--root-dir=/nowhere"}, "1", false, "", ""},
		{"a cAdvisor of its own", []string{"/usr/bin/cadvisor", "-logtostderr", "--housekeeping_interval=10s"}, "1", true, "", ""},
		{"curl", []string{"curl", "--unix-socket=/run/crio/crio.sock", "--url=http://crio/info"}, "1", true, "", ""},
		{"curl with an argument", []string{"curl", "--unix-socket", "/run/crio/crio.sock", "http://crio/info"}, "1", true, "", ""},
		{"the kubelet of containerd", []string{"kubelet", "--container-runtime-endpoint=unix:///run/containerd/containerd.sock"}, "1", true, "", ""},
		{"a kubelet whose file is wrong", []string{"kubelet", "--config=/bad.yaml", ours}, "1", false, "bad.yaml", ""},
		{"k3s", []string{"/usr/local/bin/k3s server"}, "1", false, "part of another program", ""},
	} {
		pid := int32(100 + i) //nolint:gosec // a handful
		of := fmt.Sprintf("proc/%d/", pid)
		write(of+"cmdline", strings.Join(tc.args, "\x00")+"\x00")
		write(of+"stat", fmt.Sprintf("%d (x) S 1%s 4242 0\n", pid, strings.Repeat(" 0", 17)))
		if err := errors.Join(os.Mkdir(filepath.Join(dir, of, "ns"), 0o755), os.Symlink("mnt:["+tc.mounts+"]", filepath.Join(dir, of, "ns/mnt")),
			os.Symlink(filepath.Join(dir, "tree"), filepath.Join(dir, of, "root")), os.Symlink("/", filepath.Join(dir, of, "cwd"))); err != nil {
			t.Fatal(err)
		}
		k, err := whoAsks(t.Context(), reader, "/run/crio/crio.sock", pid, devices)
		switch {
		case tc.stranger:
			if !errors.Is(err, crio.ErrStranger) {
				t.Errorf("%s is taken for the kubelet: %+v, %v", tc.name, k, err)
			}
		case errors.Is(err, crio.ErrStranger), (err == nil) != (tc.err == ""), err != nil && !strings.Contains(err.Error(), tc.err):
			t.Errorf("%s: %+v, %v", tc.name, k, err)
		case k.PID != pid || k.StartTicks != 4242 || k.OtherMounts != (tc.mounts == "2") || k.NodeDevice != tc.device:
			t.Errorf("%s is %+v", tc.name, k)
		}
	}
	if _, err := whoAsks(t.Context(), reader, "/run/crio/crio.sock", 4711, devices); !errors.Is(err, crio.ErrStranger) {
		t.Errorf("one that has ended: %v", err)
	}
	if _, err := whoAsks(t.Context(), reader, "/run/crio/crio.sock", 0, devices); err == nil || errors.Is(err, crio.ErrStranger) {
		t.Errorf("one of another PID namespace: %v", err)
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

// What can't be seen is no reason to restart the kubelet.
func TestASummaryThatCannotBeSeenIsNotWrong(t *testing.T) {
	t.Parallel()
	for _, err := range []error{kubeletapi.ErrNotAllowed, kubeletapi.ErrNoCredentials, kubeletapi.ErrNoServer} {
		if got := unseen(fmt.Errorf("ask: %w", err)); !errors.Is(got, crio.ErrNotAllowed) || !errors.Is(got, err) {
			t.Errorf("%v becomes %v", err, got)
		}
	}
	if failed := errors.New("it answers 500"); errors.Is(unseen(failed), crio.ErrNotAllowed) {
		t.Error("a summary that fails is taken for one that is not shown")
	}
}

// A kubelet that does not split gives one disk's figures twice.
func TestFiguresOfASummary(t *testing.T) {
	t.Parallel()
	disk := func(available, used, inodes uint64) *stats.FsStats {
		capacity := uint64(1000)
		return &stats.FsStats{CapacityBytes: &capacity, AvailableBytes: &available, UsedBytes: &used, InodesFree: &inodes}
	}
	without := disk(500, 5, 5)
	without.InodesFree = nil // btrfs
	for name, tc := range map[string]struct {
		in   *stats.RuntimeStats
		want crio.Figures
	}{
		"nothing":                 {nil, crio.Figures{}},
		"no containerFs":          {&stats.RuntimeStats{ImageFs: disk(500, 5, 5)}, crio.Figures{ImagesBytes: 1000}},
		"one disk twice":          {&stats.RuntimeStats{ImageFs: disk(500, 5, 5), ContainerFs: disk(500, 5, 5)}, crio.Figures{ImagesBytes: 1000, ContainersBytes: 1000, Alike: true}},
		"one without inodes":      {&stats.RuntimeStats{ImageFs: without, ContainerFs: without}, crio.Figures{ImagesBytes: 1000, ContainersBytes: 1000, Alike: true}},
		"two disks":               {&stats.RuntimeStats{ImageFs: disk(500, 5, 5), ContainerFs: disk(501, 5, 5)}, crio.Figures{ImagesBytes: 1000, ContainersBytes: 1000}},
		"two disks, fresh":        {&stats.RuntimeStats{ImageFs: disk(1000, 0, 9), ContainerFs: disk(1000, 0, 9)}, crio.Figures{ImagesBytes: 1000, ContainersBytes: 1000}},
		"one of them with inodes": {&stats.RuntimeStats{ImageFs: without, ContainerFs: disk(500, 5, 5)}, crio.Figures{ImagesBytes: 1000, ContainersBytes: 1000}},
	} {
		if got := capacitiesOf(tc.in); got != tc.want {
			t.Errorf("%s: %+v, want %+v", name, got, tc.want)
		}
	}
}

// restarting is a runtime that takes no call at first and breaks off the next ones.
type restarting struct {
	grpc.ClientConnInterface
	away   time.Duration
	breaks int
	calls  int
}

func (r *restarting) Invoke(ctx context.Context, _ string, _, reply any, _ ...grpc.CallOption) error {
	if r.calls++; r.calls == 1 && !sleep(ctx, r.away, nil) {
		return status.FromContextError(ctx.Err()).Err()
	}
	if r.calls <= r.breaks {
		return status.Error(codes.Unavailable, "broken off")
	}
	if answer, ok := reply.(*runtimeapi.RuntimeConfigResponse); ok {
		answer.Linux = &runtimeapi.LinuxRuntimeConfiguration{CgroupDriver: runtimeapi.CgroupDriver_CGROUPFS}
	}
	return nil
}

// KSS-18: a kubelet that is started while containerd is, gets its answer nevertheless.
func TestTheDriverIsWaitedFor(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		r := &restarting{away: 20 * time.Second, breaks: 3}
		ask := cgroupDriver(r)
		if driver, err := ask(ctx); err != nil || driver != criocompat.Cgroupfs {
			t.Errorf("got %q, %v", driver, err)
		}
		if _, err := ask(ctx); err != nil || r.calls != 4 {
			t.Errorf("%d calls, %v", r.calls, err)
		}
		if driver, err := cgroupDriver(&restarting{away: time.Hour})(ctx); err == nil {
			t.Errorf("one that never comes says %q", driver)
		}
		if ctx.Err() == nil {
			t.Error("it was given up early")
		}
	})
}
