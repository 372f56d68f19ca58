package ephemeral

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

const (
	node  = "8:1"
	disk  = "8:17"
	mib   = 1 << 20
	block = 4096
)

func use(device string, bytes, inodes uint64) *Use {
	return &Use{Device: device, Bytes: bytes, Inodes: inodes}
}

func at(u *Use, second int64) *Use {
	u.At = time.Unix(second, 0)
	return u
}

func TestWhatAPodUses(t *testing.T) {
	t.Parallel()
	cases := []struct {
		name    string
		pod     Pod
		kubelet *Use
		on      []Use
		held    []Use
		unknown int
	}{
		{
			name: "ACC-1: the worked example, layers on another disk",
			pod: Pod{
				Containers: []ContainerUse{{Name: "c", Running: true, Layer: use(disk, 314572800, 300), LogFiles: use(node, 20971520, 3)}},
				Volumes:    []VolumeUse{{Counted: true, Use: use(node, 1073741824, 9)}, {Counted: true, Use: use(node, 8192, 2)}},
				EtcHosts:   use(node, block, 1),
			},
			// ACC-23: 300 + 3 + 11 + 1.
			kubelet: use("", 1409298432, 315),
			on:      []Use{*use(node, 20971520+1073741824+8192+block, 15), *use(disk, 314572800, 300)},
			held:    []Use{*use(node, 1073741824+8192, 11), *use(disk, 314572800, 300)},
		},
		{
			name: "ACC-2: a volume of another kind is held and not counted",
			pod: Pod{
				Containers: []ContainerUse{{Name: "c", Running: true, Layer: use(disk, block, 1)}},
				Volumes:    []VolumeUse{{Use: use(node, 7*mib, 7)}},
			},
			kubelet: use("", block, 1),
			on:      []Use{*use(disk, block, 1)},
			held:    []Use{*use(node, 7*mib, 7), *use(disk, block, 1)},
		},
		{
			name: "ACC-3: a dead container's 5 GiB are held and not counted",
			pod: Pod{Containers: []ContainerUse{
				{Name: "c", Layer: use(disk, 5<<30, 5)},
				{Name: "c", Running: true, Layer: use(disk, block, 1)},
			}},
			kubelet: use("", block, 1),
			on:      []Use{*use(disk, block, 1)},
			held:    []Use{*use(disk, 5<<30+block, 6)},
		},
		{
			name: "ACC-4: nothing runs, so there is no record",
			pod: Pod{
				Containers: []ContainerUse{{Name: "c", Layer: use(disk, 5<<30, 5)}},
				Volumes:    []VolumeUse{{Counted: true, Use: use(node, mib, 1)}},
			},
			held: []Use{*use(node, mib, 1), *use(disk, 5<<30, 5)},
		},
		{
			name:    "ACC-4, ACC-8: a layer without a figure is no record either",
			pod:     Pod{Containers: []ContainerUse{{Name: "c", Running: true, LogFiles: use(node, mib, 1)}}},
			held:    []Use{},
			unknown: 1,
		},
		{
			name: "ACC-7: the time is the latest of the parts'",
			pod: Pod{
				Containers: []ContainerUse{{Name: "c", Running: true, Layer: at(use(disk, 1, 1), 5), LogFiles: at(use(node, 1, 1), 9)}},
				Volumes:    []VolumeUse{{Counted: true, Use: at(use(node, 1, 1), 3)}},
			},
			kubelet: at(use("", 3, 3), 9),
			on:      []Use{*at(use(node, 2, 2), 9), *at(use(disk, 1, 1), 5)},
			held:    []Use{*at(use(node, 1, 1), 3), *at(use(disk, 1, 1), 5)},
		},
		{
			name: "ACC-9: two running containers of one name count their common log folder twice",
			pod: Pod{Containers: []ContainerUse{
				{Name: "c", Running: true, Layer: use(disk, block, 1), LogFiles: use(node, mib, 3)},
				{Name: "c", Running: true, Layer: use(disk, block, 1), LogFiles: use(node, mib, 3)},
			}, Besides: []Use{*use(node, mib+block, 4)}},
			kubelet: use("", 2*mib+2*block, 8),
			on:      []Use{*use(node, 2*mib, 6), *use(disk, 2*block, 2)},
			held:    []Use{*use(node, mib+block, 4), *use(disk, 2*block, 2)},
		},
		{
			name: "ACC-10: files directly in the pod's log folder",
			pod: Pod{
				Containers: []ContainerUse{{Name: "c", Running: true, Layer: use(disk, block, 1), LogFiles: use(node, mib, 3)}},
				LogFiles:   use(node, 2*block, 2),
			},
			kubelet: use("", mib+3*block, 6),
			on:      []Use{*use(node, mib+2*block, 5), *use(disk, block, 1)},
			held:    []Use{*use(disk, block, 1)},
		},
		{
			name: "ACC-16: 8 GiB deleted and open are held, where the kubelet sees none",
			pod: Pod{Containers: []ContainerUse{{
				Name: "c", Running: true, Layer: use(disk, block, 1), OpenDeleted: []Use{*use(disk, 8<<30, 1), *use(node, mib, 1)},
			}}},
			kubelet: use("", block, 1),
			on:      []Use{*use(disk, block, 1)},
			held:    []Use{*use(node, mib, 1), *use(disk, 8<<30+block, 2)},
		},
		{
			name: "figures of a broken filesystem don't wrap",
			pod: Pod{Containers: []ContainerUse{
				{Name: "a", Running: true, Layer: use(disk, ^uint64(0), 1)}, {Name: "b", Running: true, Layer: use(node, 2, 1)},
			}},
			kubelet: use("", ^uint64(0), 2),
			on:      []Use{*use(node, 2, 1), *use(disk, ^uint64(0), 1)},
			held:    []Use{*use(node, 2, 1), *use(disk, ^uint64(0), 1)},
		},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			want := Usage{Kubelet: tc.kubelet, KubeletOn: tc.on, HeldOn: tc.held, Unknown: tc.unknown}
			if diff := cmp.Diff(want, Of(tc.pod)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestACC5_WhichSandboxCounts(t *testing.T) {
	t.Parallel()
	s := func(id, name string, ready bool, second int64) Sandbox {
		return Sandbox{ID: id, Namespace: "n", Name: name, UID: "u" + id, Ready: ready, CreatedAt: time.Unix(second, 0)}
	}
	cases := []struct {
		name string
		all  []Sandbox
		want []string
	}{
		{"none", nil, nil},
		{"a single one in any state", []Sandbox{s("1", "a", false, 1)}, []string{"1"}},
		{"several: all that are ready", []Sandbox{s("1", "a", true, 1), s("2", "a", false, 9), s("3", "a", true, 3)}, []string{"1", "3"}},
		{"none of several is ready: the newest", []Sandbox{s("1", "a", false, 1), s("2", "a", false, 9), s("3", "a", false, 3)}, []string{"2"}},
		{"each name for itself", []Sandbox{s("2", "b", false, 1), s("1", "a", false, 1)}, []string{"1", "2"}},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			var got []string
			for _, s := range Current(tc.all) {
				got = append(got, s.ID)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}
