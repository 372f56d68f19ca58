package integration

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cleave-cri/cleave/agent"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/du"
	"github.com/cleave-cri/cleave/lab/fuse"
	"github.com/cleave-cri/cleave/lab/node"
	"github.com/cleave-cri/cleave/lab/pod"
)

// partsOf gives the parts of an owner whose names begin so.
func partsOf(u agent.Usage, kind, id, prefix string) (out []agent.PartUsage) {
	for _, o := range u.Owners {
		if o.Kind != kind || o.ID != id {
			continue
		}
		for _, p := range o.Parts {
			if strings.HasPrefix(p.Name, prefix) {
				out = append(out, p)
			}
		}
	}
	return out
}

// sumsHold fails unless what is owned and what is not is what is used.
func sumsHold(t *testing.T, s agent.Status) {
	t.Helper()
	for _, f := range s.Filesystems {
		var classes uint64
		for _, c := range f.Classes {
			classes += c.Bytes
		}
		if classes != f.OwnedBytes || int64(f.OwnedBytes)+f.UnattributedBytes != int64(f.UsedBytes) {
			t.Errorf("on %s %d bytes by class, %d owned, %d not: want %d used", f.Mountpoint, classes, f.OwnedBytes, f.UnattributedBytes, f.UsedBytes)
		}
	}
}

// TestADeletedFileThatIsOpenIsItsContainers: 8 GiB that du can't see and statfs
// counts (ACC-16) belong to the container that has them open, until it closes them.
func TestADeletedFileThatIsOpenIsItsContainers(t *testing.T) {
	t.Parallel()
	const size = 8 << 30
	// xfs needs no blocks of its own for a file of this many extents, so the figure
	// is that of the file; space that is reserved and not written takes none of the
	// image's.
	n := startNode(t, node.Options{Disks: []disk.Spec{{Name: "images", SizeBytes: 12 << 30, FS: disk.XFS}}, Runtime: onImagesDisk})
	ctx := bounded(t)
	through := dial(t, n.Cleave.Endpoint())
	id := startWriter(ctx, t, n, through, "holder",
		fmt.Sprintf("fallocate -l %d /big && exec 3<>/big && rm /big && touch /ready; while [ ! -e /close ]; do usleep 50000; done; exec 3>&-; sleep 1000", int64(size)))
	eventually(ctx, t, "the file is made and deleted", func() (string, bool) {
		_, err := through.Exec(ctx, id, "/bin/cat", "/ready")
		return fmt.Sprint(err), err == nil
	})
	eventually(ctx, t, "the deleted file is the container's", func() (string, bool) {
		u, err := n.Cleave.Usage(ctx)
		open := partsOf(u, "container", id, "open-deleted")
		device := ""
		if layer := partsOf(u, "container", id, "layer"); len(layer) == 1 {
			device = layer[0].Device
		}
		return fmt.Sprintf("%+v, %v", open, err), len(open) == 1 && open[0].Figure != nil && open[0].Figure.Bytes == size &&
			open[0].Figure.Inodes == 1 && open[0].Device != "" && open[0].Device == device
	})
	s, err := n.Cleave.Status(ctx)
	if err != nil {
		t.Fatal(err)
	}
	sumsHold(t, s)
	for _, p := range s.Pods {
		if p.Name != "holder" {
			continue
		}
		if p.Kubelet == nil || p.Kubelet.Bytes > 1<<20 {
			t.Errorf("the kubelet would count %+v, want next to nothing (ACC-16)", p.Kubelet)
		}
		held := uint64(0)
		for _, on := range p.HeldOn {
			held += on.Bytes
		}
		if held < size || held > size+1<<20 {
			t.Errorf("the pod holds %d bytes, want the 8 GiB and next to nothing else", held)
		}
	}
	if _, err := through.Exec(ctx, id, "/bin/touch", "/close"); err != nil {
		t.Fatal(err)
	}
	eventually(ctx, t, "it is closed and nobody's any more", func() (string, bool) {
		u, err := n.Cleave.Usage(ctx)
		open := partsOf(u, "container", id, "open-deleted")
		return fmt.Sprintf("%+v, %v", open, err), err == nil && len(open) == 0
	})
}

// kubeletFolder is a kubelet's root directory as far as figures go, with one pod.
type kubeletFolder struct{ root, logs, uid string }

func (k kubeletFolder) volume(plugin, name string) string {
	return filepath.Join(k.root, "pods", k.uid, "volumes", plugin, name)
}

func (k kubeletFolder) podLogs(name string) string {
	return filepath.Join(k.logs, "default_"+name+"_"+k.uid)
}

func write(t *testing.T, path string, bytes int) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, make([]byte, bytes), 0o600)); err != nil {
		t.Fatal(err)
	}
}

// TestPodsAreCountedAsTheKubeletDoes: logs, volumes and etc-hosts of a pod that
// runs (ACC-1), while a filesystem that hangs is mounted in one of its volumes, and
// then the folder of logs goes away and comes back as another one that hangs.
func TestPodsAreCountedAsTheKubeletDoes(t *testing.T) {
	t.Parallel()
	var k kubeletFolder
	n := startNode(t, node.Options{
		Disks: []disk.Spec{{Name: "node", SizeBytes: 400 << 20, MkfsArgs: []string{"-b", "4096"}}, {Name: "images", SizeBytes: 400 << 20}}, Runtime: onImagesDisk,
		Configure: func(c *config.Config, disks map[string]*disk.Disk) {
			k = kubeletFolder{root: filepath.Join(disks["node"].Path(), "kubelet"), logs: filepath.Join(disks["node"].Path(), "logs"), uid: "0123-4567"}
			c.Filesystems.NodeFS, c.Filesystems.Logs = k.root, k.logs
			write(t, filepath.Join(k.root, "cpu_manager_state"), 10)
			write(t, filepath.Join(k.logs, "stray", "file"), 1<<20)
		},
	})
	ctx := bounded(t)
	through := dial(t, n.Cleave.Endpoint())
	if _, err := through.Pull(ctx, node.BusyboxImage); err != nil {
		t.Fatal(err)
	}
	emptyDir := k.volume("kubernetes.io~empty-dir", "cache")
	write(t, filepath.Join(emptyDir, "deep", "file"), 3<<20)
	write(t, filepath.Join(k.volume("kubernetes.io~configmap", "conf"), "key"), 100)
	write(t, filepath.Join(k.root, "pods", k.uid, "etc-hosts"), 300)
	write(t, filepath.Join(k.podLogs("counted"), "writer", "0.log"), 1<<20)
	write(t, filepath.Join(k.podLogs("counted"), "writer", "below", "not.log"), 1<<20)        // ACC-9: sub-directories are ignored
	write(t, filepath.Join(k.podLogs("counted"), "pod.log"), 5000)                            // ACC-10
	volumes, _, err := du.Measure(ctx, emptyDir, k.volume("kubernetes.io~configmap", "conf")) // it would wait for what hangs
	if err != nil {
		t.Fatal(err)
	}
	hangs := filepath.Join(emptyDir, "fuse")
	if err := os.Mkdir(hangs, 0o700); err != nil {
		t.Fatal(err)
	}
	inVolume, err := fuse.New(hangs, fuse.Hangs)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeFUSE(t, inVolume) })
	spec := n.PodSpec("counted")
	spec.UID = k.uid
	p, err := through.Run(ctx, spec)
	if err != nil {
		t.Fatal(err)
	}
	id, err := p.Start(ctx, pod.ContainerSpec{Name: "writer", Image: node.BusyboxImage, Command: []string{"/bin/sh", "-c", "dd if=/dev/zero of=/f bs=1M count=2; sync; sleep 1000"}})
	if err != nil {
		t.Fatal(err)
	}
	const logs, podLog, etcHosts = 1 << 20, 8192, 4096 // blocks of 4 KiB (ACC-14)
	eventually(ctx, t, "the pod is counted as the kubelet does", func() (string, bool) {
		s, err := n.Cleave.Status(ctx)
		if err != nil {
			return err.Error(), false
		}
		sumsHold(t, s)
		layer, _ := measure(ctx, t, upperOf(ctx, t, n, id))
		want := layer + volumes + logs + podLog + etcHosts
		for _, got := range s.Pods {
			if got.UID == k.uid && got.Kubelet != nil && len(got.KubeletOn) == 2 {
				return fmt.Sprintf("%+v (%d), want %d", got, got.Kubelet.Bytes, want), layer >= 2<<20 && got.Kubelet.Bytes == want
			}
		}
		return fmt.Sprintf("%+v, want %d", s.Pods, want), false
	})
	if n := inVolume.Asked(); n > 0 {
		t.Errorf("the filesystem in the volume was asked %d times", n)
	}
	s, err := n.Cleave.Status(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range s.Filesystems {
		if f.Roles[0] == fsstats.NodeFS && (len(f.Known) != 1 || f.Known[0].Bytes < 1<<20 || filepath.Base(f.Known[0].Path) != "stray") {
			t.Errorf("folders of nobody: %+v, want the one among the logs", f.Known)
		}
	}
	k.logsVanish(ctx, t, n)
	closeFUSE(t, inVolume)
}

// logsVanish takes the folder of logs away, and brings it back as a filesystem that
// hangs. Whoever asks gets an answer all the time.
func (k kubeletFolder) logsVanish(ctx context.Context, t *testing.T, n *node.Node) {
	t.Helper()
	if err := os.Rename(k.logs, k.logs+".away"); err != nil {
		t.Fatal(err)
	}
	place := func() (fsstats.Place, agent.Status) {
		s, err := n.Cleave.Status(ctx)
		if err != nil {
			t.Fatal(err)
		}
		sumsHold(t, s)
		p, _ := fsstats.Layout{Places: s.Roles}.Get(fsstats.Logs)
		return p, s
	}
	eventually(ctx, t, "the folder of logs is told to be missing", func() (string, bool) {
		p, _ := place()
		return fmt.Sprintf("%+v", p), p.Missing && p.Note != ""
	})
	if err := os.Mkdir(k.logs, 0o700); err != nil {
		t.Fatal(err)
	}
	m, err := fuse.New(k.logs, fuse.Hangs)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeFUSE(t, m) })
	eventually(ctx, t, "the folder of logs is told to be stuck", func() (string, bool) {
		_, s := place()
		return fmt.Sprintf("%+v", s.Stuck), len(s.Stuck) == 1 && s.Stuck[0].Role == fsstats.Logs && strings.Contains(s.Stuck[0].Reason, "does not answer")
	})
	// All else goes on.
	before := time.Now()
	if _, err := n.Cleave.WaitMeasuredAfter(ctx, before); err != nil {
		t.Errorf("the containers' figures don't go on beside a folder of logs that hangs: %v", err)
	}
	closeFUSE(t, m)
	eventually(ctx, t, "it is found again", func() (string, bool) {
		p, s := place()
		return fmt.Sprintf("%+v %+v", p, s.Stuck), len(s.Stuck) == 0 && !p.Missing
	})
}

func closeFUSE(t *testing.T, m *fuse.Mount) {
	t.Helper()
	if err := m.Close(); err != nil {
		t.Error(err)
	}
}
