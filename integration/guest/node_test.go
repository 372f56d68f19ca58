package guest

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"
	"time"

	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/integration/toolchain/bin"
	"github.com/cleave-cri/cleave/lab/guest"
	"github.com/cleave-cri/cleave/lab/guestnode"
	"github.com/cleave-cri/cleave/lab/janitor"
	"github.com/cleave-cri/cleave/lab/need"
)

// TestNode runs the course of package inside on a node in a guest: systemd as PID 1, cgroup v2 with the systemd driver,
// containerd and cleave as units, split over two disks.
func TestNode(t *testing.T) {
	run, system := lab(t)
	course(t, run, system, "TestNode", guestnode.Options{})
}

// TestKubelet runs the one that needs a kubelet, with etcd and an API server beside it. Writable layers have their pods' limits.
func TestKubelet(t *testing.T) {
	run, system := lab(t)
	o := withKubernetes(t, "CLEAVE_INSIDE_KUBERNETES")
	o.Configure = func(c *config.Config) {
		c.Snapshotter.ProjectQuota, c.Limits.FromPods, c.Reclaim.Enabled = true, true, true
	}
	o.Command += "\nexport CLEAVE_INSIDE_QUOTA='Disk quota exceeded'" // what ext4 says
	course(t, run, system, "TestKubelet", o)
}

// packagesEnv is a folder with two versions of the package, 1.deb and 2.deb.
const packagesEnv = "CLEAVE_GUEST_PACKAGES"

// TestSystemd runs the one of cleave's units and package: install and uninstall, a broken configuration, a cleave that hangs, one
// that can't be started or has no memory, an upgrade under load.
func TestSystemd(t *testing.T) {
	run, system := lab(t)
	dir := os.Getenv(packagesEnv)
	if dir == "" {
		t.Fatalf("it has no packages: run `make test-systemd-vm`, which makes them and sets %s", packagesEnv)
	}
	o := guestnode.Options{Files: map[string]guest.File{}}
	for _, name := range []string{"1.deb", "2.deb"} {
		o.Files[guestnode.PackagesDir+"/"+name] = guest.File{Path: filepath.Join(dir, name)}
	}
	course(t, run, system, "TestSystemd", o)
}

// TestInstall runs the one of `cleave install` on a node that had none: a kubelet that runs is told cleave's socket, containerd the
// split snapshotter, and all is taken back, the snapshotter's roots too.
func TestInstall(t *testing.T) {
	run, system := lab(t)
	peers, err := bin.Get(t.Context(), t.Output(), "kubelet")
	if err != nil {
		t.Fatal(err)
	}
	o := guestnode.Options{Plain: true, Command: guestnode.StartKubelet + "\nexport CLEAVE_INSIDE_PLAIN=1"}
	if err := guestnode.AddKubelet(&o, peers[0]); err != nil {
		t.Fatal(err)
	}
	course(t, run, system, "TestInstall", o)
}

// TestCRIO runs the one in mode crio: the kubelet takes cleave for CRI-O, sees both disks, and evicts by them.
func TestCRIO(t *testing.T) {
	run, system := lab(t)
	const plugins = "/usr/lib/cni" // where the distribution's package has them
	if _, err := os.Stat(filepath.Join(plugins, "bridge")); err != nil {
		need.Skip(t, "needs CNI plugins: %v; `make deps` installs them", err)
	}
	o := withKubernetes(t, "CLEAVE_INSIDE_CRIO")
	err := guestnode.AddCRIO(&o, plugins, map[string]any{
		// Thresholds that the course reaches with some hundred mebibytes on a disk of 2 GiB, and no waiting.
		"evictionHard": map[string]string{
			"memory.available": "10Mi", "nodefs.available": "60%", "nodefs.inodesFree": "1%", "imagefs.available": "2%", "imagefs.inodesFree": "1%",
		},
		"evictionPressureTransitionPeriod": "5s", "volumeStatsAggPeriod": "5s", "nodeStatusUpdateFrequency": "2s",
		"imageGCHighThresholdPercent": 100, "imageGCLowThresholdPercent": 99,
	})
	if err != nil {
		t.Fatal(err)
	}
	course(t, run, system, "TestCRIO", o)
}

// withKubernetes is a node with etcd, API server and kubelet, which says so by a variable.
func withKubernetes(t *testing.T, variable string) guestnode.Options {
	t.Helper()
	peers, err := bin.Get(t.Context(), t.Output(), "etcd", "kube-apiserver", "kubelet")
	if err != nil {
		t.Fatal(err)
	}
	o := guestnode.Options{Command: guestnode.StartKubernetes + "\nexport " + variable + "=1"}
	if err := guestnode.AddKubernetes(&o, guestnode.Kubernetes{Etcd: peers[0], APIServer: peers[1], Kubelet: peers[2]}); err != nil {
		t.Fatal(err)
	}
	return o
}

// course boots a node and runs one of the tests of package inside there, after o's own command.
func course(t *testing.T, run *janitor.Run, system guest.System, test string, o guestnode.Options) {
	t.Helper()
	peers, err := bin.Get(t.Context(), t.Output(), "containerd", "shim", "ctr", "crictl")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	cleave, err := guestnode.BuildCleave(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	tests, err := guestnode.BuildTest(t.Context(), dir, "github.com/cleave-cri/cleave/integration/guest/inside")
	if err != nil {
		t.Fatal(err)
	}
	o.Containerd, o.Shim, o.Ctr, o.Crictl, o.Cleave = peers[0], peers[1], peers[2], peers[3], cleave
	o.Command += "\nexport CLEAVE_INSIDE_GUEST=1 CLEAVE_REQUIRE_ROOT_TESTS=1\n./inside.test -test.v -test.timeout 55m -test.run '^" + test + "$'"
	prepared, err := guestnode.Prepare(t.Context(), dir, o)
	if err != nil {
		t.Fatal(err)
	}
	prepared.System, prepared.Limit = system, time.Hour
	prepared.Files["inside.test"] = guest.File{Path: tests}
	r, err := guest.Run(t.Context(), run, prepared)
	t.Logf("the guest lived %s and said:\n%s", r.Took.Round(time.Second), r.Said)
	if err != nil {
		keepJournal(t, r)
		t.Fatal(err)
	}
	if !regexp.MustCompile(`(?m)^--- PASS: ` + test + ` `).MatchString(r.Said) {
		t.Error("the course did not run in the guest")
	}
}

// keepJournal shows the end of what the guest's units logged.
func keepJournal(t *testing.T, r guest.Result) {
	t.Helper()
	journal, err := os.ReadFile(filepath.Join(r.Output, "journal.log"))
	if err != nil {
		t.Logf("no journal: %v", err)
		return
	}
	t.Logf("the guest's journal:\n%s", journal[max(0, len(journal)-30_000):])
}
