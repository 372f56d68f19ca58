package crio

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/proxy/criocompat"
)

var (
	diskA  = Disk{Mountpoint: "/var/lib/images", Device: "8:1"}
	diskB  = Disk{Mountpoint: "/var/lib/containers", Device: "8:2"}
	diskC  = Disk{Mountpoint: "/mnt/new", Device: "8:3"}
	split  = Disks{Known: true, Images: diskA, Containers: diskB, NodeDevice: "8:2"}
	one    = Disks{Known: true, Images: diskB, Containers: diskB, NodeDevice: "8:2"}
	all    = []string{"8:1", "8:2"}
	proved = Kubelet{PID: 7, StartTicks: 100, Version: "v1.37.2"}
)

func TestKSS3_WhatAKubeletIsTold(t *testing.T) {
	t.Parallel()
	refused := proved
	refused.Refused = "it is too old"
	elsewhere, here := proved, proved
	elsewhere.NodeDevice, here.NodeDevice = "8:9", "8:3"
	for _, tc := range []struct {
		name    string
		kubelet Kubelet
		disks   Disks
		want    criocompat.Info
		unsplit string
	}{
		{"split", proved, split, criocompat.Info{StorageRoot: "/var/lib/containers", StorageImage: "/var/lib/images"}, ""},
		{"one disk", proved, one, criocompat.Info{StorageRoot: "/var/lib/containers"}, ""},
		{"images and containers together, apart from the kubelet", proved, Disks{Known: true, Images: diskA, Containers: diskA, NodeDevice: "8:2"},
			criocompat.Info{StorageRoot: "/var/lib/images"}, ""},
		{"KSS-2: a kubelet that is not proved", refused, split, criocompat.Info{StorageRoot: "/var/lib/images"}, "too old"},
		{"LAY-13: three disks", proved, Disks{Known: true, Images: diskA, Containers: diskC, NodeDevice: "8:2"},
			criocompat.Info{StorageRoot: "/var/lib/images"}, "three disks"},
		{"LAY-13: the kubelet's root directory is elsewhere than cleave thinks", elsewhere, split, criocompat.Info{StorageRoot: "/var/lib/images"}, "three disks"},
		{"the kubelet's root directory is with containers, though cleave thinks otherwise", here, Disks{Known: true, Images: diskA, Containers: diskC, NodeDevice: "8:2"},
			criocompat.Info{StorageRoot: "/mnt/new", StorageImage: "/var/lib/images"}, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			told := decide(tc.kubelet, tc.disks, all)
			tc.want.StorageDriver, tc.want.CgroupDriver = "overlay", "cgroupfs"
			if diff := cmp.Diff(tc.want, told.info("cgroupfs")); diff != "" {
				t.Error(diff)
			}
			if (told.Unsplit != "") != (tc.unsplit != "") || !strings.Contains(told.Unsplit, tc.unsplit) {
				t.Errorf("said %q, want %q", told.Unsplit, tc.unsplit)
			}
		})
	}
}

// keeperOf returns a keeper over values that the test may change.
func keeperOf(t *testing.T, path string, now *Disks, mounted *[]string, running *[]Kubelet) *Keeper {
	t.Helper()
	return NewKeeper(path, Sources{
		Kubelet: func(_ context.Context, pid int32) (Kubelet, error) {
			for _, k := range *running {
				if k.PID == pid {
					return k, nil
				}
			}
			return Kubelet{}, ErrStranger
		},
		Running:  func(context.Context) ([]Kubelet, error) { return *running, nil },
		Disks:    func() Disks { return *now },
		Driver:   func(context.Context) (criocompat.Driver, error) { return "cgroupfs", nil },
		Mounted:  func() ([]string, error) { return *mounted, nil },
		Summary:  func(context.Context, int32) (Figures, error) { return Figures{}, ErrNotAllowed },
		Capacity: func(string) (uint64, bool) { return 0, false },
	}, zap.NewNop())
}

// A disk that was mounted later is none to the kubelet: naming it fails the whole summary.
func TestKSS19_AYoungerFilesystemIsNotNamed(t *testing.T) {
	t.Parallel()
	now, mounted, running := split, all, []Kubelet{proved}
	path := filepath.Join(t.TempDir(), "told.json")
	k := keeperOf(t, path, &now, &mounted, &running)
	if _, err := k.Info(t.Context(), proved.PID); err != nil {
		t.Fatal(err)
	}
	now.Images, mounted = diskC, []string{"8:1", "8:2", "8:3"}
	for _, who := range []struct {
		name   string
		keeper *Keeper
	}{{"the same cleave", k}, {"a cleave started anew", keeperOf(t, path, &now, &mounted, &running)}} {
		images, containers, problems := who.keeper.Named(now)
		if images != diskA || containers != diskB {
			t.Errorf("%s names %v and %v, want what the kubelet was told", who.name, images, containers)
		}
		if len(problems) != 1 || !strings.Contains(problems[0], "restart the kubelet") {
			t.Errorf("%s says %q", who.name, problems)
		}
	}
	// A kubelet started now knows it.
	running = []Kubelet{{PID: 8, StartTicks: 200}}
	if _, err := k.Info(t.Context(), 8); err != nil {
		t.Fatal(err)
	}
	if images, _, problems := k.Named(now); images != diskC || len(problems) != 0 {
		t.Errorf("named %v with %q to the new kubelet", images, problems)
	}
}

// A disk that the kubelet knows but was not told of is as little measured: what it measures was settled at its start.
func TestKSS19_WhatIsMovedIsSaid(t *testing.T) {
	t.Parallel()
	known := []string{"8:1", "8:2", "8:3"}
	refused := proved
	refused.Refused = "it is too old"
	for _, tc := range []struct {
		name               string
		kubelet            Kubelet
		told, now          Disks
		images, containers Disk
		problems           []string // parts of them
	}{
		{"as told", proved, split, split, diskA, diskB, nil},
		{"by another path", proved, split, Disks{Known: true, Images: Disk{"/also", "8:1"}, Containers: diskB}, Disk{"/also", "8:1"}, diskB, nil},
		{"the images' disk is gone", proved, split, one, diskA, diskB, []string{"images are on /var/lib/containers now"}},
		{"images moved", proved, split, Disks{Known: true, Images: diskC, Containers: diskB}, diskA, diskB, []string{"images are on /mnt/new now"}},
		{"one disk became two", proved, one, split, diskB, diskB, []string{"images are on /var/lib/images now"}},
		{"containers moved away", proved, one, Disks{Known: true, Images: diskB, Containers: diskC}, diskB, diskB, []string{"containers are on /mnt/new now"}},
		{"everything moved", proved, one, Disks{Known: true, Images: diskC, Containers: diskC}, diskB, diskB, []string{"images are on", "containers are on"}},
		{"told of one of two", refused, split, split, diskA, diskA, nil},
		{"not known, as after a start of cleave", proved, split, Disks{Images: diskC, Containers: diskC}, diskA, diskB, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			now, running := tc.told, []Kubelet{tc.kubelet}
			k := keeperOf(t, filepath.Join(t.TempDir(), "told.json"), &now, &known, &running)
			if _, err := k.Info(t.Context(), tc.kubelet.PID); err != nil {
				t.Fatal(err)
			}
			images, containers, problems := k.Named(tc.now)
			if images != tc.images || containers != tc.containers {
				t.Errorf("named %v and %v, want %v and %v", images, containers, tc.images, tc.containers)
			}
			if len(problems) != len(tc.problems) {
				t.Fatalf("problems %q, want %q", problems, tc.problems)
			}
			for i, part := range tc.problems {
				if !strings.Contains(problems[i], part) || !strings.Contains(problems[i], "restart the kubelet") {
					t.Errorf("problem %q, want %q", problems[i], part)
				}
			}
		})
	}
}

// What is told to an unproved kubelet in /info, ImageFsInfo must not contradict.
func TestKSS2_OneDiskToldIsOneDiskNamed(t *testing.T) {
	t.Parallel()
	old := proved
	old.Refused = "kubelet v1.31.0 is too old"
	now, mounted, running := split, all, []Kubelet{old}
	k := keeperOf(t, filepath.Join(t.TempDir(), "told.json"), &now, &mounted, &running)
	if _, err := k.Info(t.Context(), old.PID); err != nil {
		t.Fatal(err)
	}
	if images, containers, _ := k.Named(now); images != diskA || containers != diskA {
		t.Errorf("named %v and %v", images, containers)
	}
	k.look(t.Context(), time.Now())
	if p := k.Status().Problems; len(p) != 1 || !strings.Contains(p[0], "too old") {
		t.Errorf("the status says %q", p)
	}
}

func TestAKubeletWithOtherMountsIsSaid(t *testing.T) {
	t.Parallel()
	apart := proved
	apart.OtherMounts = true
	now, mounted, running := split, all, []Kubelet{apart}
	k := keeperOf(t, filepath.Join(t.TempDir(), "told.json"), &now, &mounted, &running)
	if _, err := k.Info(t.Context(), apart.PID); err != nil {
		t.Fatal(err)
	}
	k.look(t.Context(), time.Now())
	if p := k.Status().Problems; len(p) != 1 || !strings.Contains(p[0], "mount namespace") {
		t.Errorf("the status says %q", p)
	}
}

func TestKSS18_AKubeletThatDidNotAskIsTold(t *testing.T) {
	t.Parallel()
	now, mounted, running := split, all, []Kubelet{proved}
	k := keeperOf(t, filepath.Join(t.TempDir(), "told.json"), &now, &mounted, &running)
	began := time.Now()
	k.look(t.Context(), began)
	if p := k.Status().Problems; p != nil {
		t.Errorf("at once: %q", p)
	}
	k.look(t.Context(), began.Add(askGrace))
	if p := k.Status().Problems; len(p) != 1 || !strings.Contains(p[0], "restarted") {
		t.Errorf("after its grace: %q", p)
	}
	if _, err := k.Info(t.Context(), proved.PID); err != nil {
		t.Fatal(err)
	}
	k.look(t.Context(), began.Add(2*askGrace))
	if p := k.Status().Problems; p != nil {
		t.Errorf("after it asked: %q", p)
	}
	// The next one with the same number is another.
	running = []Kubelet{{PID: proved.PID, StartTicks: 999}}
	k.look(t.Context(), began.Add(3*askGrace))
	k.look(t.Context(), began.Add(4*askGrace))
	if p := k.Status().Problems; len(p) != 1 {
		t.Errorf("its successor: %q", p)
	}
}

// While one cleave takes over from another, a kubelet that starts may ask either.
func TestTheOldCleaveWasAsked(t *testing.T) {
	t.Parallel()
	now, mounted, running := one, all, []Kubelet{proved}
	path := filepath.Join(t.TempDir(), "told.json")
	before, after := keeperOf(t, path, &now, &mounted, &running), keeperOf(t, path, &now, &mounted, &running)
	now = split
	if _, err := before.Info(t.Context(), proved.PID); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	after.look(t.Context(), began)
	after.look(t.Context(), began.Add(askGrace))
	if s := after.Status(); len(s.Problems) != 0 || s.Told == nil || !s.Told.Split || !s.Told.Kubelet.same(proved) {
		t.Errorf("the new one knows %+v", s)
	}
	// What somebody else was told long ago is not taken from the file.
	running = []Kubelet{{PID: 8, StartTicks: 200}}
	after.look(t.Context(), began.Add(2*askGrace))
	after.look(t.Context(), began.Add(3*askGrace))
	if p := after.Status().Problems; len(p) != 1 || !strings.Contains(p[0], "has not asked") {
		t.Errorf("of the next kubelet it says %q", p)
	}
}

// Somebody who looks at /info by hand changes nothing for the kubelet.
func TestAskingByHandChangesNothing(t *testing.T) {
	t.Parallel()
	now, mounted, running := split, all, []Kubelet{proved}
	k := keeperOf(t, filepath.Join(t.TempDir(), "told.json"), &now, &mounted, &running)
	if _, err := k.Info(t.Context(), proved.PID); err != nil {
		t.Fatal(err)
	}
	info, err := k.Info(t.Context(), 4711)
	if err != nil || info.Split() {
		t.Errorf("a stranger gets %+v, %v", info, err)
	}
	if told := k.Status().Told; told == nil || !told.Split || told.Kubelet.PID != proved.PID {
		t.Errorf("told is %+v", told)
	}
}

// A stranger that asks before the kubelet does is not taken for it.
func TestAStrangerIsNotRemembered(t *testing.T) {
	t.Parallel()
	now, mounted, running := split, all, []Kubelet{proved}
	path := filepath.Join(t.TempDir(), "told.json")
	k := keeperOf(t, path, &now, &mounted, &running)
	if info, err := k.Info(t.Context(), 4711); err != nil || info.Split() {
		t.Errorf("a stranger gets %+v, %v", info, err)
	}
	if told := k.Status().Told; told != nil {
		t.Errorf("told is %+v", told)
	}
	if told, err := readTold(path); told != nil || err != nil {
		t.Errorf("written down: %+v, %v", told, err)
	}
}

// Who may be the kubelet, though it can't be read, is told of one disk, and hears of one from ImageFsInfo as well.
func TestKSS2_AKubeletThatCannotBeReadIsNotContradicted(t *testing.T) {
	t.Parallel()
	now, mounted, running := split, all, []Kubelet{proved}
	k := keeperOf(t, filepath.Join(t.TempDir(), "told.json"), &now, &mounted, &running)
	if _, err := k.Info(t.Context(), proved.PID); err != nil {
		t.Fatal(err)
	}
	next := Kubelet{PID: 8, StartTicks: 200, Unread: true}
	running = []Kubelet{next}
	k.sources.Kubelet = func(context.Context, int32) (Kubelet, error) {
		return next, errors.New("its configuration has a key that is not known")
	}
	if info, err := k.Info(t.Context(), 8); err != nil || info.Split() {
		t.Fatalf("told %+v, %v", info, err)
	}
	if images, containers, _ := k.Named(now); images != diskA || containers != diskA {
		t.Errorf("told of one disk, but %v and %v are named", images, containers)
	}
	k.look(t.Context(), time.Now())
	if p := k.Status().Problems; len(p) != 1 || !strings.Contains(p[0], "a key that is not known") {
		t.Errorf("the status says %q", p)
	}
	// One that can't be read and has not asked may have another runtime.
	running = []Kubelet{{PID: 9, StartTicks: 300, Unread: true}}
	k.look(t.Context(), time.Now())
	k.look(t.Context(), time.Now().Add(askGrace))
	if p := k.Status().Problems; len(p) != 0 {
		t.Errorf("of another kubelet the status says %q", p)
	}
}

func TestNothingKnownIsNoAnswer(t *testing.T) {
	t.Parallel()
	now, mounted, running := Disks{}, all, []Kubelet{proved}
	k := keeperOf(t, filepath.Join(t.TempDir(), "told.json"), &now, &mounted, &running)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if info, err := k.Info(ctx, proved.PID); err == nil {
		t.Errorf("answered %+v", info)
	}
}

func TestRecordThatIsNoneIsTold(t *testing.T) {
	t.Parallel()
	for name, text := range map[string]string{"empty": "", "garbage": "{{", "a later version": `{"version": 9}`,
		// With what it does not say the kubelet would be named nothing, and be blind.
		"nothing told": `{"version": 1}`, "no disks": `{"version": 1, "told": {"split": true}}`,
		"half of it": `{"version": 1, "told": {"split": true, "images": {"mountpoint": "/i", "device": "8:1"}, "containers": {"mountpoint": "c", "device": "8:2"}}}`,
	} {
		path := filepath.Join(t.TempDir(), "told.json")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if told, err := readTold(path); err == nil || told != nil {
			t.Errorf("%s: %+v, %v", name, told, err)
		}
	}
	if told, err := readTold(filepath.Join(t.TempDir(), "none")); err != nil || told != nil {
		t.Errorf("no file: %+v, %v", told, err)
	}
}
