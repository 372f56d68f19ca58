package guest

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"
	"time"

	"github.com/cleave-cri/cleave/integration/toolchain/bin"
	"github.com/cleave-cri/cleave/lab/guest"
	"github.com/cleave-cri/cleave/lab/guestnode"
)

// TestNode runs the course of package inside on a node in a guest: systemd as PID 1, cgroup v2 with the systemd driver,
// containerd and cleave as units, split over two disks.
func TestNode(t *testing.T) {
	run, system := lab(t)
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
	o, err := guestnode.Prepare(t.Context(), dir, guestnode.Options{
		Containerd: peers[0], Shim: peers[1], Ctr: peers[2], Crictl: peers[3], Cleave: cleave,
		Command: "export CLEAVE_INSIDE_GUEST=1 CLEAVE_REQUIRE_ROOT_TESTS=1\n./inside.test -test.v -test.timeout 15m",
	})
	if err != nil {
		t.Fatal(err)
	}
	o.System, o.Limit = system, 20*time.Minute
	o.Files["inside.test"] = guest.File{Path: tests}
	r, err := guest.Run(t.Context(), run, o)
	t.Logf("the guest lived %s and said:\n%s", r.Took.Round(time.Second), r.Said)
	if err != nil {
		keepJournal(t, r)
		t.Fatal(err)
	}
	if !regexp.MustCompile(`(?m)^--- PASS: TestNode `).MatchString(r.Said) {
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
