package kubelet

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cleave-cri/cleave/doctor"
)

// settingsOf are what a kubelet v1.37.2 with these arguments, file and drop-ins has.
func settingsOf(t *testing.T, args []string, files written) Settings {
	t.Helper()
	s, err := assemble(args, files)
	if err != nil {
		t.Fatal(err)
	}
	s.PID, s.Version, s.Started = 42, Version{1, 37, 2, "v1.37.2"}, time.Now()
	return s
}

// plainNode has all on two disks without reserve, and nothing against any mode.
func plainNode(mode string) Facts {
	yes, inodes := true, uint64(6_553_600)
	f := Facts{Mode: mode, Socket: "/run/cleave/cleave.sock", SameMounts: &yes, VarRunIsRun: &yes,
		NodeFS:  &Disk{Device: "8:1", CapacityBytes: 100 << 30, AttainableBytes: 100 << 30, Inodes: &inodes},
		ImageFS: &Disk{Device: "8:2", CapacityBytes: 200 << 30, AttainableBytes: 200 << 30, Inodes: &inodes},
	}
	f.Logs = f.NodeFS
	if mode == "crio" {
		f.Socket = "/run/crio/crio.sock"
	}
	return f
}

func expect(t *testing.T, got doctor.Result, level doctor.Level, reasons ...string) {
	t.Helper()
	if got.Level != level || (level == doctor.Pass) != (got.Remedy == "") {
		t.Errorf("got %+v, want %s", got, level)
	}
	for _, want := range reasons {
		if !strings.Contains(got.Reason+" -> "+got.Remedy, want) {
			t.Errorf("%q is not in %q -> %q", want, got.Reason, got.Remedy)
		}
	}
}

func TestFound(t *testing.T) {
	t.Parallel()
	s := settingsOf(t, []string{"--unheard-of=1"}, written{})
	expect(t, Found(s, nil), doctor.Pass, "process 42, v1.37.2", "--unheard-of")
	s.Sources = []Source{{Kind: File, Path: "/etc/k.yaml", Modified: s.Started.Add(time.Minute)}}
	expect(t, Found(s, nil), doctor.Warn, "/etc/k.yaml changed since", "restart the kubelet")
	expect(t, Found(Settings{}, ErrNotRunning), doctor.Pass, "no kubelet runs here")
	expect(t, Found(Settings{}, fmt.Errorf("%w: 1, 2", ErrSeveral)), doctor.Warn, "several kubelets")
	expect(t, Found(Settings{}, ErrGone), doctor.Warn, "again")
	expect(t, Found(Settings{}, fmt.Errorf("x: %w", &FileError{Path: "/c", Line: 3, Err: errors.New("bad")})), doctor.Warn, "/c:3: bad", "correct the file")
	expect(t, Found(Settings{}, os.ErrPermission), doctor.Warn, "as root")
}

func TestModeCRI(t *testing.T) {
	t.Parallel()
	const ours = "--container-runtime-endpoint=unix:///var/run/cleave/cleave.sock"
	cases := []struct {
		name    string
		args    []string
		mode    string
		change  func(*Settings, *Facts)
		want    doctor.Level
		reasons []string
	}{
		{"works", []string{ours}, "cri", nil, doctor.Pass, []string{"flag --container-runtime-endpoint"}},
		{"without a scheme", []string{"--container-runtime-endpoint=/run/cleave/cleave.sock"}, "cri", nil, doctor.Pass, nil},
		{"on containerd", nil, "cri", nil, doctor.Warn, []string{"containerd.sock", "kubelet's default", "set containerRuntimeEndpoint: unix:///run/cleave/cleave.sock"}},
		{"images asked elsewhere", []string{ours, "--image-service-endpoint=unix:///run/containerd/containerd.sock"}, "cri", nil, doctor.Warn, []string{"imageServiceEndpoint", "flag --image-service-endpoint"}},
		{"images asked here too", []string{ours, "--image-service-endpoint=/run/cleave/cleave.sock"}, "cri", nil, doctor.Pass, nil},
		{"an old kubelet", []string{ours}, "cri", func(s *Settings, _ *Facts) { s.Version = Version{1, 31, 4, "v1.31.4"} }, doctor.Fail, []string{"KSS-2", "v1.31.4", "upgrade"}},
		{"an old kubelet on one disk", []string{ours}, "cri", func(s *Settings, f *Facts) { s.Version = Version{1, 31, 4, "v1.31.4"}; f.ImageFS = f.NodeFS }, doctor.Pass, nil},
		{"an old kubelet, disks not known", []string{ours}, "cri", func(s *Settings, f *Facts) { s.Version = Version{1, 31, 4, "v1.31.4"}; f.ImageFS = nil }, doctor.Fail, nil},
		{"an unknown version", []string{ours}, "cri", func(s *Settings, _ *Facts) { s.Version = Version{} }, doctor.Warn, []string{"can't be read"}},
		{"another mode", nil, "observe", nil, doctor.Pass, []string{"configured for mode observe"}},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			s, f := settingsOf(t, tc.args, written{}), plainNode(tc.mode)
			if tc.change != nil {
				tc.change(&s, &f)
			}
			expect(t, ModeCRI(s, f), tc.want, tc.reasons...)
		})
	}
}

func TestModeCRIO(t *testing.T) {
	t.Parallel()
	const ours = "--container-runtime-endpoint=unix:///var/run/crio/crio.sock"
	no := false
	cases := []struct {
		name    string
		args    []string
		change  func(*Settings, *Facts)
		reasons []string
	}{
		{"nothing against it", []string{ours}, nil, nil},
		{"cleave itself is on the socket", []string{ours}, func(_ *Settings, f *Facts) { f.Sockets = []Socket{{crioSocket, "cleave"}} }, nil},
		{"too old", []string{ours}, func(s *Settings, _ *Facts) { s.Version = Version{1, 31, 0, "v1.31.0"} }, []string{"KSS-2", "upgrade"}},
		{"not proved", []string{ours}, func(s *Settings, _ *Facts) { s.Version = Version{1, 33, 9, "v1.33.9"} }, []string{"not run with kubelet v1.33.9", "v1.34 to v1.37"}},
		{"newer than proved", []string{ours}, func(s *Settings, _ *Facts) { s.Version = Version{1, 38, 0, "v1.38.0"} }, []string{"not run with"}},
		{"unknown version", []string{ours}, func(s *Settings, _ *Facts) { s.Version = Version{} }, []string{"version can't be read", "is not known"}},
		{"gate on", []string{ours, "--feature-gates=" + GateStatsFromCRI + "=true"}, nil, []string{"KSS-1", "flag --feature-gates", "to false"}},
		{"gate on with all betas", []string{ours, "--feature-gates=AllBeta=true"}, nil, []string{"KSS-1", "flag --feature-gates"}},
		{"no garbage collection on split disks", []string{ours, "--feature-gates=" + GateSeparateDiskGC + "=false"}, nil, []string{"LAY-14"}},
		{"isolation off", []string{ours, "--local-storage-capacity-isolation=false"}, nil, []string{"OBS-12", "flag --local-storage"}},
		{"another endpoint", nil, nil, []string{"does not end in run/crio/crio.sock", "kubelet's default"}},
		{"images asked elsewhere", []string{ours, "--image-service-endpoint=unix:///run/x.sock"}, nil, []string{"imageServiceEndpoint"}},
		{"a real CRI-O", []string{ours}, func(_ *Settings, f *Facts) { f.RunsCRIO = []int{7} }, []string{"real CRI-O", "process 7"}},
		{"somebody on the socket", []string{ours}, func(_ *Settings, f *Facts) { f.Sockets = []Socket{{crioSocket, "podman"}} }, []string{"in use by podman"}},
		{"somebody unknown on the socket", []string{ours}, func(_ *Settings, f *Facts) { f.Sockets = []Socket{{crioSocket, ""}} }, []string{"a process that is not known"}},
		{"/var/run is a folder", []string{ours}, func(_ *Settings, f *Facts) { f.VarRunIsRun = &no }, []string{"KSS-4"}},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			s, f := settingsOf(t, tc.args, written{}), plainNode("crio")
			if tc.change != nil {
				tc.change(&s, &f)
			}
			want := doctor.Pass
			if len(tc.reasons) > 0 {
				want = doctor.Fail
			}
			expect(t, ModeCRIO(s, f), want, tc.reasons...)
			if f.Mode = "cri"; strings.Contains(tc.name, "gate on") {
				// The endpoint alone makes the kubelet mix its figures.
				expect(t, ModeCRIO(s, f), doctor.Fail, "LAY-15")
			} else {
				expect(t, ModeCRIO(s, f), doctor.Pass)
			}
		})
	}
}

func TestThresholds(t *testing.T) {
	t.Parallel()
	file := []string{"--config=/c"}
	both := []string{"--config=/c", "--config-dir=/d"}
	cases := []struct {
		name    string
		args    []string
		files   written
		change  func(*Facts)
		want    doctor.Level
		reasons []string
	}{
		{"defaults", file, written{base: head}, nil, doctor.Pass, []string{"kubelet's default"}},
		{"no file", nil, written{}, nil, doctor.Warn, []string{"nodefs.available, nodefs.inodesFree, imagefs.available, imagefs.inodesFree", "THR-14"}},
		{"a memory tweak", file, written{base: head + "evictionHard: {memory.available: 1Gi}\n"}, nil, doctor.Warn, []string{"nodefs.available", "/c:3", "THR-15"}},
		{"one is left out", file, written{base: head + "evictionHard:\n  nodefs.available: 10%\n  nodefs.inodesFree: 5%\n  imagefs.available: 15%\n"}, nil, doctor.Warn, []string{"for imagefs.inodesFree:"}},
		{"on one disk either name will do", file, written{base: head + "evictionHard:\n  imagefs.available: 10%\n  nodefs.inodesFree: 5%\n"},
			func(f *Facts) { f.ImageFS = f.NodeFS }, doctor.Pass, nil},
		{"inodes that can't run out", file, written{base: head + "evictionHard:\n  nodefs.available: 10%\n  imagefs.available: 15%\n"},
			func(f *Facts) { f.NodeFS.Inodes, f.ImageFS.Inodes = nil, nil }, doctor.Pass, nil},
		{"a soft one watches too", file, written{base: head + "evictionHard: {}\nevictionSoft: {nodefs.available: 10%, nodefs.inodesFree: 5%, imagefs.available: 15%, imagefs.inodesFree: 5%}\nevictionSoftGracePeriod: {nodefs.available: 1m, nodefs.inodesFree: 1m, imagefs.available: 1m, imagefs.inodesFree: 1m}\n"}, nil, doctor.Pass, nil},
		{"one is switched off", file, written{base: head + "mergeDefaultEvictionSettings: true\nevictionHard: {nodefs.available: 0%}\n"}, nil, doctor.Warn, []string{"for nodefs.available:"}},
		{"merging in a drop-in", both, written{base: head + "evictionHard: {nodefs.available: 10%}\n", folder: []string{head + "mergeDefaultEvictionSettings: true\n"}}, nil, doctor.Warn, []string{"THR-17", "/d/0.conf:3"}},
		{"more than the disk has", file, written{base: head + "mergeDefaultEvictionSettings: true\nevictionHard: {nodefs.available: 101Gi}\n"}, nil, doctor.Fail, []string{"nodefs.available<101Gi (/c:4)", "even when the disk is empty, where 100.0 GiB of 100.0 GiB are available"}},
		{"as much as the disk has", file, written{base: head + "mergeDefaultEvictionSettings: true\nevictionHard: {nodefs.available: 100Gi}\n"}, nil, doctor.Pass, nil},
		{"more than root's reserve leaves", file, written{base: head + "mergeDefaultEvictionSettings: true\nevictionHard: {nodefs.available: 96%}\n"},
			func(f *Facts) { f.NodeFS.AttainableBytes = 95 << 30 }, doctor.Fail, []string{"even when the disk is empty"}},
		{"a number without quotes", file, written{base: head + "mergeDefaultEvictionSettings: true\nevictionHard: {imagefs.inodesFree: 1000}\n"},
			nil, doctor.Fail, []string{"must be a string"}},
		{"absolute inodes on btrfs", file, written{base: head + "mergeDefaultEvictionSettings: true\nevictionHard: {imagefs.inodesFree: '1000'}\n"},
			func(f *Facts) { f.ImageFS.Inodes = nil }, doctor.Fail, []string{"imagefs.inodesFree<1000", "0 inodes of 0 inodes"}},
		{"a share of inodes on btrfs", file, written{base: head}, func(f *Facts) { f.ImageFS.Inodes = nil }, doctor.Pass, nil},
		{"never", file, written{base: head + "mergeDefaultEvictionSettings: true\nevictionHard: {imagefs.available: 0.0%}\n"}, nil, doctor.Warn, []string{"can't be met"}},
		{"disks not known", file, written{base: head + "mergeDefaultEvictionSettings: true\nevictionHard: {nodefs.available: 101Gi}\n"}, func(f *Facts) { f.NodeFS = nil }, doctor.Pass, nil},
		{"containerfs", file, written{base: head + "mergeDefaultEvictionSettings: true\nevictionHard: {containerfs.available: 5%}\n"}, nil, doctor.Warn, []string{"THR-20"}},
		{"no such signal", file, written{base: head + "mergeDefaultEvictionSettings: true\nevictionHard: {rootfs.available: 5%}\n"}, nil, doctor.Fail, []string{"no such signal"}},
		{"no threshold at all", file, written{base: head + "mergeDefaultEvictionSettings: true\nevictionHard: {nodefs.available: ten}\n"}, nil, doctor.Fail, []string{`"ten" is neither`}},
		{"soft without grace", file, written{base: head + "evictionSoft: {memory.available: 1Gi}\n"}, nil, doctor.Fail, []string{"evictionSoft memory.available<1Gi (/c:3)", "THR-10"}},
		{"no transition", append([]string{"--eviction-pressure-transition-period=0"}, file...), written{base: head}, nil, doctor.Warn, []string{"SYN-13", "flag --eviction-pressure"}},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			s, err := assemble(tc.args, tc.files)
			if err != nil {
				if tc.want != doctor.Fail || !strings.Contains(err.Error(), tc.reasons[0]) {
					t.Error(err)
				}
				return
			}
			f := plainNode("cri")
			if tc.change != nil {
				tc.change(&f)
			}
			expect(t, Thresholds(s, f), tc.want, tc.reasons...)
		})
	}
}

func TestPodLogs(t *testing.T) {
	t.Parallel()
	s, f := settingsOf(t, nil, written{}), plainNode("cri")
	expect(t, PodLogs(s, f), doctor.Pass, "8:1")
	f.Logs = f.ImageFS
	expect(t, PodLogs(s, f), doctor.Warn, "as images are", "8:2")
	f.Logs = &Disk{Device: "8:3"}
	expect(t, PodLogs(s, f), doctor.Warn, "/var/log/pods is on 8:3", "nobody notices")
	no := false
	f.Logs, f.SameMounts = nil, &no
	expect(t, PodLogs(s, f), doctor.Pass, "not checked", "other mounts")
}

func TestKubeadm(t *testing.T) {
	t.Parallel()
	s, f := settingsOf(t, []string{"--container-runtime-endpoint=unix:///run/crio/crio.sock"}, written{}), plainNode("crio")
	f.Kubeadm = true
	expect(t, Kubeadm(s, f), doctor.Pass)
	f.Sockets = []Socket{{Path: "/var/run/containerd/containerd.sock"}, {Path: crioSocket}}
	expect(t, Kubeadm(s, f), doctor.Warn, "/var/run/containerd/containerd.sock, /var/run/crio/crio.sock", "--cri-socket unix:///run/crio/crio.sock")
	f.Kubeadm = false
	expect(t, Kubeadm(s, f), doctor.Pass, "not used here")
}

func TestUsesKubeadm(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	if UsesKubeadm(root) {
		t.Error("found in an empty folder")
	}
	if err := os.MkdirAll(filepath.Join(root, "usr/bin/kubeadm"), 0o755); err != nil {
		t.Fatal(err)
	}
	if !UsesKubeadm(root) {
		t.Error("not found")
	}
}

func TestLabels(t *testing.T) {
	t.Parallel()
	f := plainNode("cri")
	expect(t, Labels(Settings{}, f), doctor.Pass, "not checked")
	f.SELinux = SELinux{Enabled: true, Enforcing: true, Labels: []Label{
		{Path: "/a", Label: "system_u:object_r:container_var_lib_t:s0", Model: "/m", ModelLabel: "unconfined_u:object_r:container_var_lib_t:s0:c1,c2"},
	}}
	expect(t, Labels(Settings{}, f), doctor.Pass, "1 of cleave's paths")
	f.SELinux.Labels = append(f.SELinux.Labels, Label{Path: "/b", Label: "system_u:object_r:unlabeled_t:s0", Model: "/m", ModelLabel: "system_u:object_r:container_var_lib_t:s0"})
	expect(t, Labels(Settings{}, f), doctor.Fail, "/b is system_u:object_r:unlabeled_t:s0", "semanage fcontext -a -e /m /b && restorecon -R /b")
	f.SELinux.Enforcing = false
	expect(t, Labels(Settings{}, f), doctor.Warn, "permissive")
	f.SELinux.Labels = []Label{{Path: "/b", Err: os.ErrPermission}}
	expect(t, Labels(Settings{}, f), doctor.Warn, "permission denied")
}

func TestLookSELinux(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if got := LookSELinux(dir, nil); got.Enabled {
		t.Error("SELinux without its file system")
	}
	if err := os.WriteFile(filepath.Join(dir, "enforce"), []byte("1"), 0o644); err != nil {
		t.Fatal(err)
	}
	got := LookSELinux(dir, [][2]string{{dir, dir}, {dir, filepath.Join(dir, "missing")}})
	if !got.Enabled || !got.Enforcing || len(got.Labels) != 1 || got.Labels[0].Err != nil || got.Labels[0].Label != got.Labels[0].ModelLabel {
		t.Errorf("got %+v", got)
	}
}

func TestSurroundings(t *testing.T) {
	t.Parallel()
	n := newFakeNode(t)
	n.process(42, "kubelet")
	n.process(43, "/usr/bin/crio", "--x")
	n.link("proc/42/ns/mnt", "mnt:[1]")
	n.link("proc/self/ns/mnt", "mnt:[1]")
	n.write("root/42/run/x", "")
	n.link("root/42/var/run", "/run") // absolute, in the kubelet's own tree
	look := func() (f Facts) {
		Reader{Proc: n.path("proc")}.Surroundings(t.Context(), 42, &f)
		return f
	}
	f := look()
	if f.SameMounts == nil || !*f.SameMounts || f.VarRunIsRun == nil || !*f.VarRunIsRun || fmt.Sprint(f.RunsCRIO) != "[43]" {
		t.Errorf("got %+v", f)
	}
	if err := os.Remove(n.path("root/42/var/run")); err != nil {
		t.Fatal(err)
	}
	n.write("root/42/var/run/x", "")
	if f := look(); f.VarRunIsRun == nil || *f.VarRunIsRun {
		t.Errorf("/var/run is a folder of its own: %+v", f)
	}
	if err := os.Remove(n.path("proc/42/ns/mnt")); err != nil {
		t.Fatal(err)
	}
	if f := look(); f.SameMounts != nil {
		t.Error("mounts that can't be compared are said to be known")
	}
	if name := (Reader{Proc: n.path("proc")}).NameOf(43); name != "crio" {
		t.Errorf("process 43 is called %q", name)
	}
}

// FuzzThreshold: no threshold makes us panic or think for long, and what is met
// by an empty disk is more than it has.
func FuzzThreshold(f *testing.F) {
	f.Add("10%", uint64(1000), uint64(900))
	f.Add("1e-100000000", uint64(1), uint64(1))
	f.Add("NaN%", uint64(0), uint64(0))
	f.Add("0x1p3%", uint64(1<<63), uint64(1))
	f.Fuzz(func(t *testing.T, text string, capacity, attainable uint64) {
		v, err := judge(text, capacity, min(capacity, attainable))
		if err != nil && v != "" {
			t.Errorf("%q is %s and wrong: %v", text, v, err)
		}
		if more, err := judge(text, capacity, capacity); v == never && err == nil && more != never {
			t.Errorf("%q depends on what is attainable: %s, %s", text, v, more)
		}
	})
}
