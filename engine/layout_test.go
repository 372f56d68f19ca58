package engine

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestLAY_Layouts(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		in   Detected
		want Layout
	}{
		{"LAY-9: single", Detected{}, Single},
		{"LAY-10: dedicated", Detected{ImageApart: true}, Dedicated},
		{"LAY-11: split", Detected{ImageApart: true, ContainerApart: true}, Split},
		{"LAY-12: odd", Detected{ContainerApart: true}, Odd},
		{"LAY-14: refused", Detected{ImageApart: true, ContainerApart: true, Refused: true}, Inert},
	} {
		if got := tc.in.Layout(); got != tc.want {
			t.Errorf("%s: %s", tc.name, got)
		}
	}
}

// containerFS lists the containerfs thresholds that a layout leads to.
func containerFS(list []Threshold) string {
	var out []string
	for _, th := range list {
		if strings.HasPrefix(string(th.Signal), "containerfs") {
			out = append(out, th.String())
		}
	}
	slices.Sort(out)
	return strings.Join(out, "; ")
}

func TestTHR20_THR21_THR22_ContainerThresholds(t *testing.T) {
	t.Parallel()
	all := thresholds(t, "nodefs.available<10%,imagefs.available<15%,nodefs.inodesFree<5%", "nodefs.available<20%", "nodefs.available=1m")
	ofUser := thresholds(t, "imagefs.available<15%,containerfs.available<50%")
	for _, tc := range []struct {
		name        string
		list        []Threshold
		layout      Layout
		want        string
		overwritten []Signal
	}{
		{"THR-20: single takes nodefs's", all, Single, "containerfs.available < 10%; containerfs.available < 20% for 1m0s; containerfs.inodesFree < 5%; containerfs.inodesFree: none", nil},
		{"THR-20: so does split", all, Split, "containerfs.available < 10%; containerfs.available < 20% for 1m0s; containerfs.inodesFree < 5%; containerfs.inodesFree: none", nil},
		{"THR-20: dedicated takes imagefs's", all, Dedicated, "containerfs.available < 15%; containerfs.available: none; containerfs.inodesFree: none; containerfs.inodesFree: none", nil},
		{"THR-20: what the user wrote is overwritten", ofUser, Dedicated, "containerfs.available < 15%; containerfs.available: none; containerfs.inodesFree: none; containerfs.inodesFree: none", []Signal{ContainerFSAvailable}},
		{"THR-21: no source, four that are never met", thresholds(t, "imagefs.available<15%"), Single, "containerfs.available: none; containerfs.available: none; containerfs.inodesFree: none; containerfs.inodesFree: none", nil},
		{"THR-22: odd leaves all as it is", ofUser, Odd, "containerfs.available < 50%", nil},
		{"LAY-14: so does inert", ofUser, Inert, "containerfs.available < 50%", nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			before := slices.Clone(tc.list)
			got, overwritten := WithContainerFS(tc.list, tc.layout)
			if s := containerFS(got); s != tc.want {
				t.Errorf("got  %s\nwant %s", s, tc.want)
			}
			if diff := cmp.Diff(tc.overwritten, overwritten); diff != "" {
				t.Error(diff)
			}
			for i := range before {
				if !before[i].Same(tc.list[i]) {
					t.Errorf("the list was changed: %v", tc.list)
				}
			}
		})
	}
	if (Threshold{Inert: true}).met(Observation{Available: -1}, true) {
		t.Error("THR-21: an inert threshold is met")
	}
}

// TestTHR11_THR20_TwoHardOnes came out of the comparison with the kubelet: a
// soft containerfs threshold without grace is hard as well, and of two hard
// ones only the last is overwritten, whatever their values.
func TestTHR11_THR20_TwoHardOnes(t *testing.T) {
	t.Parallel()
	list := thresholds(t, "containerfs.available<10Gi", "containerfs.available<100.0%", "containerfs.available=0s")
	got, _ := WithContainerFS(list, Split)
	if s := containerFS(got); !strings.Contains(s, "< 10Gi") || strings.Contains(s, "100%") {
		t.Errorf("got %s, want 10Gi to be left", s)
	}
}

func TestTHR23_AddedThresholdsWaitForTheSecondPass(t *testing.T) {
	t.Parallel()
	low := Summary{ContainerFS: disk(gib), NodeFS: disk(50 * gib)}
	n := newNode(t, "nodefs.available<10Gi")
	wantOutcome(t, n.pass(0, low), Calm)
	wantPressure(t, n.State, false)
	wantOutcome(t, n.pass(10, low), Pressure)
	wantPressure(t, n.State, true)

	// 1Gi becomes 10Gi in its place, and that counts at once.
	n = newNode(t, "nodefs.available<10Gi,containerfs.available<1Gi")
	low.ContainerFS = disk(5 * gib)
	if d := n.pass(0, low); d.Outcome != Pressure || len(d.Overwritten) != 1 {
		t.Errorf("%+v", d)
	}
	// Whether the reclaim was enough is judged by the completed list at once.
	n = newNode(t, "nodefs.available<10Gi")
	d := n.pass(0, Summary{NodeFS: disk(gib)})
	if ok, _ := n.Resolved(n.State, d, &Summary{NodeFS: disk(50 * gib), ContainerFS: disk(gib)}); ok {
		t.Error("containerfs is short, and the reclaim passes for enough")
	}
}

func TestLAY13_AThirdDiskIsTakenForNodeFS(t *testing.T) {
	t.Parallel()
	n := newNode(t, "nodefs.available<10%").settled(Detected{ImageApart: true, ContainerApart: true})
	third := &FSStats{AvailableBytes: bytes(49 * gib), CapacityBytes: bytes(500 * gib)}
	n.pods = []Pod{{UID: "innocent", Volumes: []Volume{{Name: "v", Kind: EmptyDirDisk}}}, {UID: "writer"}}
	n.stats = []PodStats{{UID: "innocent", Volumes: []VolumeStats{{Name: "v", FSStats: FSStats{UsedBytes: bytes(60 * gib)}}}}, usage("writer", 50*gib)}
	d := n.pass(0, Summary{NodeFS: disk(90 * gib), ImageFS: disk(90 * gib), ContainerFS: third})
	if d.Threshold.Signal != ContainerFSAvailable || victim(d) != "innocent" {
		t.Errorf("threshold %s, victim %s: the kubelet kills who has nothing there", d.Threshold, victim(d))
	}
}

func TestLAY14_RefusedSplitMakesEvictionInert(t *testing.T) {
	t.Parallel()
	n := newNode(t, "nodefs.available<10Gi")
	n.NoSeparateDiskGC, n.LimitIsolation = true, true
	n.layout = Detected{ImageApart: true, ContainerApart: true}
	wantOutcome(t, n.disk(0, gib), Refused)
	wantPressure(t, n.State, false)
	d := n.disk(10, gib)
	if d.Outcome != Pressure || d.Victim != nil || len(d.Reclaim) != 0 || d.NoVictim != "SYN-24" {
		t.Errorf("%+v", d)
	}
	wantPressure(t, n.State, true)
	n.pods[0].Containers = []Container{{Limits: Amounts{EphemeralStorage: q("1")}}}
	n.stats[0].EphemeralStorage = &FSStats{UsedBytes: bytes(2)}
	wantOutcome(t, n.disk(20, gib), OverLimit)
}

// crioView is a kubelet at CRI-O's socket with images on a and containers on b.
func crioView(a, b string) View {
	f := func(device string, v int64) *LabelledFS {
		return &LabelledFS{Device: device, Stats: FSStats{AvailableBytes: bytes(v), CapacityBytes: bytes(100)}}
	}
	return View{
		Endpoint: "unix:///run/crio/crio.sock", NodeDevice: "sda",
		Images: []ReportedFS{{Mountpoint: "/images", Device: a}}, Containers: []ReportedFS{{Mountpoint: "/containers", Device: b}},
		ImageLabel: f(a, int64(len(a))), ContainerLabel: f(b, int64(2*len(b))),
	}
}

// criView is a kubelet at containerd's socket.
func criView(images ...ReportedFS) View {
	return View{Endpoint: "unix:///run/containerd/containerd.sock", NodeDevice: "sda", Images: images}
}

func TestLAY1_TheEndpointsTextDecides(t *testing.T) {
	t.Parallel()
	for endpoint, want := range map[string]bool{
		"unix:///run/crio/crio.sock": true, "/var/run/crio/crio.sock": true, "unix:///host/run/crio/crio.sock": true,
		"unix:///run/containerd/containerd.sock": false, "unix:///run/crio/crio.sock2": false, "unix:///crio.sock": false, "": false,
	} {
		if got := (View{Endpoint: endpoint}).CAdvisor(); got != want {
			t.Errorf("%q: from cAdvisor is %t", endpoint, got)
		}
		if (View{Endpoint: endpoint, StatsFromCRI: true}).CAdvisor() {
			t.Errorf("%q: from cAdvisor in spite of the gate", endpoint)
		}
	}
}

func TestLAY2_LAY3_OBS14_OneRecordForBoth(t *testing.T) {
	t.Parallel()
	v := criView(
		ReportedFS{Mountpoint: "/a", Device: "sdb", Stats: FSStats{Time: start, UsedBytes: bytes(5), InodesUsed: bytes(6), AvailableBytes: bytes(7), CapacityBytes: bytes(8)}},
		ReportedFS{Mountpoint: "/b", Device: "sdc"},
	)
	v.Containers = []ReportedFS{{Mountpoint: "/c", Device: "sdd", Stats: FSStats{UsedBytes: bytes(99)}}}
	image, container, err := v.Filesystems()
	if err != nil || image != container || *image.UsedBytes != 5 || *image.AvailableBytes != 7 || !image.Time.Equal(start) {
		t.Errorf("%+v, %+v, %v", image, container, err)
	}
	if _, _, err := criView().Filesystems(); !errors.Is(err, ErrNoFilesystems) {
		t.Errorf("empty list: %v", err)
	}
}

func TestLAY4_OBS15_SplitFigures(t *testing.T) {
	t.Parallel()
	image, container, err := crioView("sdb", "sda1").Filesystems()
	if err != nil || *image.AvailableBytes != 3 || *container.AvailableBytes != 8 {
		t.Errorf("%v, %v, %v", image, container, err)
	}
	for _, tc := range []struct {
		name   string
		change func(*View)
		err    error
	}{
		{"one mountpoint", func(v *View) { v.Containers[0].Mountpoint = "/images" }, nil},
		{"one device", func(v *View) { v.ContainerLabel.Device = "sdb" }, nil},
		{"no filesystem id", func(v *View) { v.Containers[0].Mountpoint = "" }, nil},
		{"gate off", func(v *View) { v.NoSeparateDiskGC = true; v.Containers = nil }, nil},
		{"no container list", func(v *View) { v.Containers = nil }, ErrNoFilesystems},
		{"no label", func(v *View) { v.ContainerLabel = nil }, ErrNoLabel},
		{"no label of images", func(v *View) { v.ImageLabel = nil }, ErrNoLabel},
	} {
		v := crioView("sdb", "sda1")
		tc.change(&v)
		image, container, err := v.Filesystems()
		if !errors.Is(err, tc.err) || err == nil && image != container {
			t.Errorf("%s: %v, %v, %v", tc.name, image, container, err)
		}
	}
}

func TestLAY5_LAY6_LAY7_LAY15_Detection(t *testing.T) {
	t.Parallel()
	broken := errors.New("not in the partition map")
	disabled := crioView("sdb", "sda")
	disabled.StatsFromCRI = true
	sameDevice := crioView("sda", "sdb")
	for _, tc := range []struct {
		name string
		view View
		want Detected
		err  error
	}{
		{"LAY-5: other device", criView(ReportedFS{Mountpoint: "/a", Device: "sdb"}), Detected{ImageApart: true}, nil},
		{"LAY-5: same device", criView(ReportedFS{Mountpoint: "/a", Device: "sda"}), Detected{}, nil},
		{"LAY-5: entries without id or sample are passed over", criView(ReportedFS{}, ReportedFS{Mountpoint: "/a", Cold: true}, ReportedFS{Mountpoint: "/b", Device: "sdb"}), Detected{ImageApart: true}, nil},
		{"LAY-5: none is left", criView(ReportedFS{}), Detected{}, ErrNoDevice},
		{"OBS-9: one that can't be resolved fails all", criView(ReportedFS{Mountpoint: "/a", Err: broken}, ReportedFS{Mountpoint: "/b", Device: "sdb"}), Detected{}, broken},
		{"LAY-6: one device, two sets of figures", sameDevice, Detected{ImageApart: true, ContainerApart: true}, nil},
		{"LAY-7: split", crioView("sdb", "sda"), Detected{ImageApart: true, ContainerApart: true}, nil},
		{"LAY-7: no labels, no split", func() View {
			v := crioView("sdb", "sda")
			v.ContainerLabel = nil
			v.Containers[0].Mountpoint = "/images"
			return v
		}(), Detected{ImageApart: true}, nil},
		{"LAY-15: figures of one, labels of the other", disabled, Detected{ImageApart: true, ContainerApart: true}, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			got, err := tc.view.Detect()
			if !errors.Is(err, tc.err) || got != tc.want {
				t.Errorf("%+v, %v; want %+v, %v", got, err, tc.want, tc.err)
			}
		})
	}
	if !(&FSStats{UsedBytes: bytes(1), Time: start}).alike(&FSStats{UsedBytes: bytes(2)}) || (&FSStats{Inodes: bytes(1)}).alike(&FSStats{}) {
		t.Error("LAY-6: used bytes or times matter, or inodes don't")
	}
}

func TestOBS9_OBS16_OBS17_WhatFailsAndWhatIsLeftOut(t *testing.T) {
	t.Parallel()
	figures := FSStats{Time: start, UsedBytes: bytes(5), AvailableBytes: bytes(7), CapacityBytes: bytes(8), InodesFree: bytes(1), Inodes: bytes(2)}
	for _, f := range []ReportedFS{{Stats: figures}, {Mountpoint: "/a", Cold: true, Stats: figures}} {
		image, _, err := criView(f).Filesystems()
		if err != nil {
			t.Fatal(err)
		}
		seen := (&Summary{NodeFS: disk(gib), ImageFS: image, ContainerFS: image}).Observe()
		if len(seen) != 1 || *image.UsedBytes != 5 {
			t.Errorf("OBS-16: seen %v of %+v", seen, f)
		}
	}
	broken := errors.New("no such file or directory")
	if _, _, err := criView(ReportedFS{Mountpoint: "/a", Err: broken}).Filesystems(); !errors.Is(err, broken) {
		t.Errorf("OBS-9, OBS-17: %v", err)
	}
}
