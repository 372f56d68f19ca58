package integration

import (
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cleave-cri/cleave/agent/du"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/node"
	"github.com/cleave-cri/cleave/lab/pod"
)

// TestDU: cleave finds in a running pod what takes most, be it in the writable layer, in a volume, in logs, or deleted and open.
func TestDU(t *testing.T) {
	t.Parallel()
	var k kubeletFolder
	n := startNode(t, node.Options{
		Disks: []disk.Spec{{Name: "node", SizeBytes: 400 << 20}, {Name: "images", SizeBytes: 400 << 20}}, Runtime: onImagesDisk,
		Configure: func(c *config.Config, disks map[string]*disk.Disk) {
			k = kubeletFolder{root: filepath.Join(disks["node"].Path(), "kubelet"), logs: filepath.Join(disks["node"].Path(), "logs"), uid: "89ab-cdef"}
			c.Filesystems.NodeFS, c.Filesystems.Logs = k.root, k.logs
		},
	})
	ctx := bounded(t)
	through := dial(t, n.Cleave.Endpoint())
	if _, err := through.Pull(ctx, node.BusyboxImage); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(k.volume("kubernetes.io~empty-dir", "cache"), "odd\xffname"), 9<<20)
	write(t, filepath.Join(k.podLogs("greedy"), "writer", "0.log"), 5<<20)
	spec := n.PodSpec("greedy")
	spec.UID = k.uid
	p, err := through.Run(ctx, spec)
	if err != nil {
		t.Fatal(err)
	}
	id, err := p.Start(ctx, pod.ContainerSpec{Name: "writer", Image: node.BusyboxImage, Command: []string{"/bin/sh", "-c",
		"mkdir -p /var/dump; dd if=/dev/zero of=/var/dump/core bs=1M count=7; ln -s / /var/dump/way-out;" +
			"dd if=/dev/zero of=/gone bs=1M count=11; exec 3<>/gone; rm /gone; sync; touch /ready; sleep 1000"}})
	if err != nil {
		t.Fatal(err)
	}
	eventually(ctx, t, "the container has written", func() (string, bool) {
		_, err := through.Exec(ctx, id, "/bin/cat", "/ready")
		return fmt.Sprint(err), err == nil
	})
	ask := func(args ...string) (report du.Report, said string, _ error) {
		out, err := exec.CommandContext(ctx, cleaveBinary(t), append([]string{"du", "-o", "json", "--config", n.Cleave.ConfigFile()}, args...)...).Output()
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			return report, string(exit.Stderr), err
		}
		return report, string(out), errors.Join(err, json.Unmarshal(out, &report))
	}
	var report du.Report
	eventually(ctx, t, "all is found", func() (string, bool) {
		var said string
		var err error
		if report, said, err = ask("greedy"); err != nil {
			return said, false // the pod is not known yet
		}
		return said, len(report.Open) > 0 && len(report.Places) >= 4
	})
	if report.Partial || report.Pod != "greedy" || report.UID != k.uid {
		t.Errorf("%+v", report)
	}
	largest := map[string]du.Held{}
	for _, f := range report.Places {
		if len(f.Files) > 0 {
			largest[strings.TrimSpace(f.What+" "+f.Container)] = f.Files[0]
		}
	}
	for what, want := range map[string]struct {
		path  string
		bytes int64
	}{
		"writable layer writer": {"/var/dump/core", 7 << 20}, "volume cache": {`/odd\xffname`, 9 << 20}, "logs writer": {"/0.log", 5 << 20},
	} {
		if got := largest[what]; got.Path != want.path || got.Bytes < want.bytes || got.Bytes > want.bytes+1<<20 {
			t.Errorf("%s: %+v, want %+v", what, got, want)
		}
	}
	if f := report.Open[0]; f.Name != "/gone" || f.Bytes < 11<<20 || f.Container != "writer" || f.Device == "" {
		t.Errorf("deleted and open: %+v", report.Open)
	}
	one, said, err := ask("greedy/writer")
	if err != nil || slices.ContainsFunc(one.Places, func(f du.Found) bool { return f.Container != "writer" }) || len(one.Places) != 2 {
		t.Errorf("of the container: %+v, %v, %s", one, err, said)
	}
	if _, said, err := ask("nobody"); err == nil || !strings.Contains(said, "crictl pods") {
		t.Errorf("a pod that is not there: %v, %s", err, said)
	}
}
