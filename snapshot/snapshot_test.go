package snapshot

import (
	"strings"
	"testing"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/api/types"
)

func TestCTD26_ClassIsDecidedByKindOwnerAndKey(t *testing.T) {
	t.Parallel()
	chain := "sha256:" + strings.Repeat("a", 64)
	cases := []struct {
		name  string
		kind  snapshotsapi.Kind
		key   string
		owner *owner
		want  Class
	}{
		{"committed layer", snapshotsapi.Kind_COMMITTED, chain, nil, Image},
		{"container", snapshotsapi.Kind_ACTIVE, strings.Repeat("1", 64), &owner{id: "c"}, Container},
		{"sandbox", snapshotsapi.Kind_ACTIVE, strings.Repeat("2", 64), &owner{id: "s", sandbox: true}, Sandbox},
		{"extraction", snapshotsapi.Kind_ACTIVE, "extract-123-AbC_ " + chain, nil, Extraction},
		{"container named like an extraction", snapshotsapi.Kind_ACTIVE, "extract-foo", &owner{id: "c"}, Container},
		{"snapshot named like an extraction", snapshotsapi.Kind_ACTIVE, "extract-foo", nil, Other},
		{"extraction with something behind it", snapshotsapi.Kind_ACTIVE, "extract-1 " + chain + "/x", nil, Other},
		{"image volume", snapshotsapi.Kind_ACTIVE, "/run/containerd/io.containerd.grpc.v1.cri/image-volumes/s/d", nil, Other},
		{"view of a layer", snapshotsapi.Kind_VIEW, "extract-1 " + chain, nil, View},
		{"view that a container runs on", snapshotsapi.Kind_VIEW, "ro", &owner{id: "c"}, Container},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			var o owner
			if tc.owner != nil {
				o = *tc.owner
			}
			if got := classOf(tc.kind, tc.key, o, tc.owner != nil); got != tc.want {
				t.Errorf("class %q, want %q", got, tc.want)
			}
		})
	}
}

func TestCTD22_UpperFolderOfMounts(t *testing.T) {
	t.Parallel()
	cases := []struct {
		name   string
		mounts []*types.Mount
		want   string
		ok     bool
	}{
		{"none", nil, "", false},
		{"overlay", []*types.Mount{{Type: "overlay", Source: "overlay", Options: []string{"workdir=/s/2/work", "upperdir=/s/2/fs", "lowerdir=/s/1/fs", "index=off"}}}, "/s/2/fs", true},
		{"overlay without upper: a view", []*types.Mount{{Type: "overlay", Source: "overlay", Options: []string{"lowerdir=/s/2/fs:/s/1/fs"}}}, "", false},
		{"no parent", []*types.Mount{{Type: "bind", Source: "/s/3/fs", Options: []string{"rw", "rbind"}}}, "/s/3/fs", true},
		{"view of one layer", []*types.Mount{{Type: "bind", Source: "/s/3/fs", Options: []string{"ro", "rbind"}}}, "/s/3/fs", false},
		{"block device", []*types.Mount{{Type: "ext4", Source: "/dev/mapper/x"}}, "", false},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			got, ok := upperOf(tc.mounts)
			if ok != tc.ok || (ok && got != tc.want) {
				t.Errorf("upper %q %v, want %q %v", got, ok, tc.want, tc.ok)
			}
		})
	}
}
