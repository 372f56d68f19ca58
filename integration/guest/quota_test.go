package guest

import (
	"regexp"
	"slices"
	"testing"
	"time"

	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/guest"
	"github.com/cleave-cri/cleave/lab/guestnode"
)

// TestQuota runs the tests of fsstats/quota that need project quota, in a kernel that has it, on ext4 and xfs.
func TestQuota(t *testing.T) {
	run, system := lab(t)
	program, err := guestnode.BuildTest(t.Context(), t.TempDir(), "github.com/cleave-cri/cleave/fsstats/quota")
	if err != nil {
		t.Fatal(err)
	}
	const size = 512 << 20
	withQuota := []string{"-O", "quota,project", "-E", "quotatype=prjquota"}
	r, err := guest.Run(t.Context(), run, guest.Options{
		System: system,
		Limit:  10 * time.Minute,
		Files:  map[string]guest.File{"quota.test": {Path: program}},
		Disks: []disk.Spec{
			{Name: "ext4", SizeBytes: size, MkfsArgs: withQuota},
			{Name: "xfs", SizeBytes: size, FS: disk.XFS},
			{Name: "counting", SizeBytes: size, MkfsArgs: withQuota},
			{Name: "ext4-plain", SizeBytes: size},
			{Name: "xfs-plain", SizeBytes: size, FS: disk.XFS},
		},
		Command: `
set -e
for name in ext4 xfs counting ext4-plain xfs-plain; do
	options=defaults
	case $name in ext4 | xfs) options=prjquota ;; esac
	mkdir /mnt/$name
	mount -o $options /dev/disk/by-id/virtio-$name /mnt/$name
	mounts=$mounts,$name=/mnt/$name
done
export CLEAVE_QUOTA_MOUNTS=${mounts#,} CLEAVE_REQUIRE_ROOT_TESTS=1
exec ./quota.test -test.v -test.timeout 8m -test.run '^TestQuota'
`,
	})
	t.Logf("the guest lived %s; its tests said:\n%s", r.Took.Round(time.Second), r.Said)
	if err != nil {
		t.Fatal(err)
	}
	passed := regexp.MustCompile(`(?m)^ *--- PASS: (\S+)`).FindAllStringSubmatch(r.Said, -1)
	for _, test := range []string{"KernelKeepsTheContract", "Assign", "IsChosen", "LimitOnAContainersLayer", "OfTreesThatAreGone", "AgreesWithDu"} {
		for _, fs := range []string{"ext4", "xfs"} {
			want := "TestQuota" + test + "/" + fs
			if !slices.ContainsFunc(passed, func(m []string) bool { return m[1] == want }) {
				t.Errorf("%s did not run", want)
			}
		}
	}
	if skipped := regexp.MustCompile(`(?m)^ *--- SKIP.*`).FindAllString(r.Said, -1); len(skipped) > 0 {
		t.Errorf("skipped: %v", skipped)
	}
}

// TestQuotaNode runs the course about limits of package inside on a node with containerd and the split snapshotter, with the
// writable layers on each of the filesystems that have project quota.
func TestQuotaNode(t *testing.T) {
	run, system := lab(t)
	faulty, err := guestnode.BuildCleave(t.Context(), t.TempDir(), "faultpoints")
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		fs disk.FS
		// overLimit is what a writer is told.
		overLimit string
	}{
		{disk.Ext4, "Disk quota exceeded"},
		{disk.XFS, "No space left on device"},
	} {
		t.Run(string(tc.fs), func(t *testing.T) {
			course(t, run, system, "TestQuotaNode", guestnode.Options{
				ContainersFS: tc.fs,
				Programs:     map[string]string{"cleave-faultpoints": faulty},
				Configure: func(c *config.Config) {
					c.Snapshotter.ProjectQuota, c.Limits.WritableLayerBytes = true, 32<<20
				},
				Command: "export CLEAVE_INSIDE_QUOTA='" + tc.overLimit + "'",
			})
		})
	}
}
