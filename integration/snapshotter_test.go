package integration

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	leasesapi "github.com/containerd/containerd/api/services/leases/v1"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/agent/snapshotter"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/integration/toolchain/bin"
	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/image"
	"github.com/cleave-cri/cleave/lab/need"
	"github.com/cleave-cri/cleave/lab/node"
	"github.com/cleave-cri/cleave/lab/pod"
	"github.com/cleave-cri/cleave/lab/runtime"
	"github.com/cleave-cri/cleave/snapshot"
	"github.com/cleave-cri/cleave/snapshot/split/ctdconfig"
)

// leakBytes is what may differ between before and after: ext4's folders never
// shrink, xfs frees late.
const leakBytes = 256 << 10

// splitNode is a node whose containerd was moved to the split snapshotter in the
// way that the documentation tells.
type splitNode struct {
	*node.Node
	cfg    config.Config
	file   string // cleave's configuration
	log    string
	client *pod.Client

	cmd *exec.Cmd
	end chan struct{} // closed when cmd has ended

	// offered is the socket for containerd as a service manager would hold it,
	// nil if the snapshotter makes its own.
	offered *os.File
}

// startBare makes a node without a cleave in front of containerd.
func startBare(t *testing.T, o node.Options) *node.Node {
	t.Helper()
	need.Loop(t)
	need.Tools(t, "runc")
	peers, err := bin.Get(bounded(t), os.Stderr, "containerd", "shim")
	if err != nil {
		t.Fatal(err)
	}
	o.Containerd, o.Shim = peers[0], peers[1]
	n, err := node.Start(bounded(t), need.Lab(t), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("containerd's log:\n%s", n.Runtime.LogTail(40))
		}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := n.Close(ctx); err != nil {
			t.Errorf("take the node down: %v", err)
		}
	})
	return n
}

// startSplit makes the node and starts the snapshotter. unpacks is containerd's
// max_concurrent_unpacks.
func startSplit(t *testing.T, kind disk.FS, unpacks int) *splitNode {
	t.Helper()
	n := prepareSplit(t, kind)
	n.migrate(bounded(t), t, unpacks)
	return n
}

// prepareSplit makes a node on overlayfs whose containerd reads drop-ins, and
// cleave's configuration for it.
func prepareSplit(t *testing.T, kind disk.FS) *splitNode {
	t.Helper()
	n := &splitNode{}
	n.Node = startBare(t, node.Options{Disks: twoDisks(kind), Runtime: func(o *runtime.Options, _ map[string]*disk.Disk) {
		o.Imports = []string{filepath.Join(o.Dir, "conf.d", "*.toml")}
	}})
	dir := filepath.Join(n.Run.Dir(), "split")
	n.cfg = config.Default()
	n.cfg.StateDir = filepath.Join(dir, "state")
	n.cfg.Runtime.Endpoint = config.Endpoint(n.Runtime.Socket())
	n.cfg.Snapshotter.ImageRoot = filepath.Join(n.Disks["images"].Path(), "layers")
	n.cfg.Snapshotter.ContainerRoot = filepath.Join(n.Disks["containers"].Path(), "writable")
	n.cfg.Snapshotter.Database = filepath.Join(dir, "db", "metadata.db")
	n.cfg.Snapshotter.Endpoint = config.Endpoint(filepath.Join(dir, "s.sock"))
	n.cfg.Snapshotter.StatusEndpoint = config.Endpoint(filepath.Join(dir, "t.sock"))
	n.file, n.log = filepath.Join(dir, "config.yaml"), filepath.Join(dir, "log")
	for _, folder := range []string{dir, n.cfg.Snapshotter.ImageRoot, n.cfg.Snapshotter.ContainerRoot} {
		if err := os.Mkdir(folder, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	n.writeConfig(t)
	n.client = dial(t, n.Runtime.Endpoint())
	return n
}

// migrate takes the steps of the documentation.
func (n *splitNode) migrate(ctx context.Context, t *testing.T, unpacks int) {
	t.Helper()
	n.cleave(ctx, t, "snapshotter", "init")
	n.useIn(ctx, t, n.Runtime, unpacks)
	n.start(ctx, t)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the snapshotter's log:\n%s", n.tail(60))
		}
	})
	if err := n.Runtime.Restart(ctx); err != nil {
		t.Fatal(err)
	}
	n.waitPoked(ctx, t)
}

func (n *splitNode) writeConfig(t *testing.T) {
	t.Helper()
	text, err := n.cfg.YAML()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(n.file, text, 0o600); err != nil {
		t.Fatal(err)
	}
}

// useIn installs the drop-in beside a containerd's configuration.
func (n *splitNode) useIn(ctx context.Context, t *testing.T, c *runtime.Containerd, unpacks int) {
	t.Helper()
	containerd, err := bin.Path(ctx, "containerd")
	if err != nil {
		t.Fatal(err)
	}
	n.cleave(ctx, t, "containerd-config", "--write", "--containerd", containerd, "--containerd-config", c.ConfigFile(), "--max-concurrent-unpacks", fmt.Sprint(unpacks))
}

// cleave runs a command with the node's configuration, and fails if it does.
func (n *splitNode) cleave(ctx context.Context, t *testing.T, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(ctx, cleaveBinary(t), append(args, "--config", n.file)...).CombinedOutput()
	if err != nil {
		t.Fatalf("cleave %v: %v\n%s", args, err, out)
	}
	return string(out)
}

// start starts the snapshotter's process and waits until it answers.
func (n *splitNode) start(ctx context.Context, t *testing.T) {
	t.Helper()
	log, err := os.OpenFile(n.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close() //nolint:errcheck // the process has its own
	cmd := exec.Command(cleaveBinary(t), "snapshotter", "--config", n.file)
	if n.offered != nil {
		// The process has to be named in its environment (sd_listen_fds(3)).
		cmd = exec.Command("/bin/sh", append([]string{"-c", `LISTEN_FDS=1 LISTEN_PID=$$ exec "$0" "$@"`}, cmd.Args...)...)
		cmd.ExtraFiles = []*os.File{n.offered}
	}
	cmd.Env, cmd.Stdout, cmd.Stderr = n.Run.Env(), log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	end := make(chan struct{})
	go func() { _ = cmd.Wait(); close(end) }() //nolint:errcheck // how it ended is in its log
	n.cmd, n.end = cmd, end
	t.Cleanup(func() { n.signal(t, cmd, end, syscall.SIGTERM) })
	eventually(ctx, t, "the snapshotter's start", func() (string, bool) {
		select {
		case <-end:
			t.Fatalf("the snapshotter ended at its start:\n%s", n.tail(20))
		default:
		}
		s, err := snapshotter.FetchStatus(ctx, n.cfg.Snapshotter.StatusEndpoint.Path())
		return fmt.Sprint(err), err == nil && s.PID == cmd.Process.Pid
	})
}

// signal ends the process and waits for it.
func (n *splitNode) signal(t *testing.T, cmd *exec.Cmd, end chan struct{}, sig syscall.Signal) {
	t.Helper()
	select {
	case <-end:
		return
	default:
	}
	if err := cmd.Process.Signal(sig); err != nil {
		t.Error(err)
	}
	select {
	case <-end:
	case <-time.After(patience):
		t.Errorf("the snapshotter does not end after %v:\n%s", sig, n.tail(20))
		return
	}
	if sig == syscall.SIGTERM && cmd.ProcessState.ExitCode() != 0 {
		t.Errorf("the snapshotter ended with %v:\n%s", cmd.ProcessState, n.tail(20))
	}
	if text, err := os.ReadFile(n.log); err != nil || strings.Contains(string(text), "DATA RACE") {
		t.Errorf("data race in the snapshotter (%v):\n%s", err, text)
	}
}

func (n *splitNode) stop(t *testing.T, sig syscall.Signal) {
	t.Helper()
	n.signal(t, n.cmd, n.end, sig)
}

func (n *splitNode) tail(lines int) string {
	text, err := os.ReadFile(n.log)
	if err != nil {
		return err.Error()
	}
	all := strings.Split(strings.TrimRight(string(text), "\n"), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

func (n *splitNode) status(ctx context.Context, t *testing.T) snapshotter.Status {
	t.Helper()
	s, err := snapshotter.FetchStatus(ctx, n.cfg.Snapshotter.StatusEndpoint.Path())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// waitPoked waits until containerd is known and has cleaned up.
func (n *splitNode) waitPoked(ctx context.Context, t *testing.T) {
	t.Helper()
	eventually(ctx, t, "the poke", func() (string, bool) {
		c := n.status(ctx, t).Containerd
		return fmt.Sprintf("%+v", c), c.PokedAt != nil && int(c.PID) == n.Runtime.PID()
	})
}

// collect makes containerd tell the snapshotter what has been removed.
func (n *splitNode) collect(ctx context.Context, t *testing.T) {
	t.Helper()
	if err := snapshot.NewStore(n.client.Conn(), n.cfg.Runtime.Namespace).Poke(ctx, ctdconfig.Snapshotter); err != nil {
		t.Fatal(err)
	}
}

// collectWithout makes containerd collect while the snapshotter makes nothing, so
// that it can't be poked: to delete a lease in step waits for a collection.
func (n *splitNode) collectWithout(ctx context.Context, t *testing.T) {
	t.Helper()
	ctx = metadata.AppendToOutgoingContext(ctx, "containerd-namespace", n.cfg.Runtime.Namespace)
	leases := leasesapi.NewLeasesClient(n.client.Conn())
	lease, err := leases.Create(ctx, &leasesapi.CreateRequest{ID: "collect"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := leases.Delete(ctx, &leasesapi.DeleteRequest{ID: lease.GetLease().GetID(), Sync: true}); err != nil {
		t.Fatal(err)
	}
}

// usedBytes is what df says of a disk, once all of it is written.
func usedBytes(t *testing.T, d *disk.Disk) int64 {
	t.Helper()
	if err := exec.CommandContext(t.Context(), "sync", "-f", d.Path()).Run(); err != nil {
		t.Fatal(err)
	}
	var st syscall.Statfs_t
	if err := syscall.Statfs(d.Path(), &st); err != nil {
		t.Fatal(err)
	}
	return int64(st.Blocks-st.Bfree) * st.Bsize //nolint:gosec // far below 2^63
}

// wait for a disk to have not more than leakBytes above a figure.
func waitFreed(ctx context.Context, t *testing.T, d *disk.Disk, before int64) {
	t.Helper()
	eventually(ctx, t, "the space of "+d.Path()+" to come back", func() (string, bool) {
		now := usedBytes(t, d)
		return fmt.Sprintf("%d bytes, %d before", now, before), now <= before+leakBytes
	})
}

// writer runs a pod with a container that has written this many MiB.
func (n *splitNode) writer(ctx context.Context, t *testing.T, name string, mib int) (*pod.Pod, string) {
	t.Helper()
	p, err := n.client.Run(ctx, n.PodSpec(name))
	if err != nil {
		t.Fatal(err)
	}
	id, err := p.Start(ctx, pod.ContainerSpec{Name: "c", Image: node.BusyboxImage, Command: []string{"sh", "-c", "exec sleep 100000"}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := n.client.Exec(ctx, id, "dd", "if=/dev/zero", "of=/big", "bs=1M", fmt.Sprintf("count=%d", mib)); err != nil {
		t.Fatal(err)
	}
	return p, id
}

func (n *splitNode) pull(ctx context.Context, t *testing.T, ref string) {
	t.Helper()
	if _, err := n.client.Pull(ctx, ref); err != nil {
		t.Fatal(err)
	}
}

// TestSplitPutsBytesWhereTheyBelong: layers on the image filesystem, what
// containers write on the other, and all of it goes away again.
func TestSplitPutsBytesWhereTheyBelong(t *testing.T) {
	t.Parallel()
	for _, kind := range []disk.FS{disk.Ext4, disk.XFS} {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			n := startSplit(t, kind, 1)
			ctx := bounded(t)
			images, containers := n.Disks["images"], n.Disks["containers"]
			const ref = "example.org/layered:1"
			big, err := image.Random(7, 5, 2<<20)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := n.Registry.Push(ctx, ref, big); err != nil {
				t.Fatal(err)
			}
			n.pull(ctx, t, node.BusyboxImage)
			imagesBefore, containersBefore := usedBytes(t, images), usedBytes(t, containers)
			n.pull(ctx, t, ref)
			if grown := usedBytes(t, images) - imagesBefore; grown < 10<<20 || grown > 12<<20 {
				t.Errorf("a pull of 10 MiB of layers took %d bytes of the image filesystem", grown)
			}
			if grown := usedBytes(t, containers) - containersBefore; grown > leakBytes {
				t.Errorf("a pull took %d bytes of the containers' filesystem", grown)
			}

			imagesBefore = usedBytes(t, images)
			p, id := n.writer(ctx, t, "writer", 20)
			if grown := usedBytes(t, containers) - containersBefore; grown < 20<<20 || grown > 22<<20 {
				t.Errorf("20 MiB written took %d bytes of the containers' filesystem", grown)
			}
			// The sandbox image was unpacked meanwhile; it is busybox once more.
			s := n.status(ctx, t)
			if s.Store.Container.Writable.Count != 2 || s.Store.Image.Writable.Count != 0 || s.Store.Container.Layers.Count != 0 || s.Store.Image.Layers.Count < 6 {
				t.Errorf("the snapshotter counts %+v and %+v", s.Store.Image, s.Store.Container)
			}
			info, err := n.client.Images.ImageFsInfo(ctx, &runtimeapi.ImageFsInfoRequest{})
			if err != nil {
				t.Fatal(err)
			}
			if got := info.GetImageFilesystems()[0].GetFsId().GetMountpoint(); got != n.cfg.Snapshotter.ImageRoot {
				t.Errorf("containerd names %q as image filesystem, want %q", got, n.cfg.Snapshotter.ImageRoot)
			}
			eventually(ctx, t, "containerd's own figure of the writable layer", func() (string, bool) {
				s, err := n.client.Stats(ctx, id)
				used := s.GetWritableLayer().GetUsedBytes().GetValue()
				return fmt.Sprint(used, err), err == nil && used >= 20<<20 && used < 21<<20
			})
			if got := n.cleave(ctx, t, "snapshotter", "status"); !strings.Contains(got, "writable") || !strings.Contains(got, "fence:       open") {
				t.Errorf("status says:\n%s", got)
			}

			if err := p.Remove(ctx); err != nil {
				t.Fatal(err)
			}
			waitFreed(ctx, t, containers, containersBefore)
			if _, err := n.client.Images.RemoveImage(ctx, &runtimeapi.RemoveImageRequest{Image: &runtimeapi.ImageSpec{Image: ref}}); err != nil {
				t.Fatal(err)
			}
			waitFreed(ctx, t, images, imagesBefore-10<<20)
			n.checkOffline(ctx, t)
		})
	}
}

// checkOffline runs `cleave snapshotter check`, which refuses while the
// snapshotter runs and must find nothing when it does not.
func (n *splitNode) checkOffline(ctx context.Context, t *testing.T) {
	t.Helper()
	out, err := exec.CommandContext(ctx, cleaveBinary(t), "snapshotter", "check", "--config", n.file).CombinedOutput()
	if err == nil {
		t.Errorf("check is not refused while the snapshotter runs:\n%s", out)
	}
	n.stop(t, syscall.SIGTERM)
	if out := n.cleave(ctx, t, "snapshotter", "check", "--repair"); !strings.Contains(out, "all is as it should be") {
		t.Errorf("check says:\n%s", out)
	}
}

// TestClosedFenceServesReads takes a root's marker away, as if another disk were
// in its place: nothing is made or deleted, containers run on, and all is well
// again when the marker is back, without a restart.
func TestClosedFenceServesReads(t *testing.T) {
	t.Parallel()
	n := startSplit(t, disk.XFS, 1)
	ctx := bounded(t)
	n.pull(ctx, t, node.BusyboxImage)
	p, id := n.writer(ctx, t, "stays", 3)
	marker := filepath.Join(n.cfg.Snapshotter.ContainerRoot, "cleave-root.json")
	before := n.folders(t)

	n.stop(t, syscall.SIGTERM)
	if err := os.Rename(marker, marker+".away"); err != nil {
		t.Fatal(err)
	}
	n.start(ctx, t)
	if out := n.cleave(ctx, t, "snapshotter", "status"); !strings.Contains(out, "CLOSED") || !strings.Contains(out, n.cfg.Snapshotter.ContainerRoot) {
		t.Errorf("status says:\n%s", out)
	}
	if s := n.status(ctx, t); !s.Store.Fence.Closed || len(s.Store.Fence.Reasons) == 0 {
		t.Errorf("the fence is open: %+v", s.Store.Fence)
	}
	if _, err := n.client.Exec(ctx, id, "true"); err != nil {
		t.Errorf("the container does not run on: %v", err)
	}
	// The reads: containerd lists and mounts what there is.
	inventory, err := snapshot.NewStore(n.client.Conn(), "k8s.io").Inventory(ctx)
	if err != nil || !slices.ContainsFunc(inventory.Layers, func(l snapshot.Layer) bool { return l.Snapshotter == "cleave" && l.ContainerID == id }) {
		t.Errorf("the snapshots can't be listed: %v %v", inventory.Layers, err)
	}
	if _, err := n.client.Run(ctx, n.PodSpec("refused")); err == nil || !strings.Contains(err.Error(), n.cfg.Snapshotter.ContainerRoot) {
		t.Errorf("a new pod gives %v, want an error that names the root", err)
	}
	if err := p.Remove(ctx); err != nil { // containerd forgets it; the snapshotter keeps it
		t.Errorf("remove the pod: %v", err)
	}
	n.collectWithout(ctx, t) // it asks the snapshotter now, and not some time later
	if diff := cmp.Diff(before, n.folders(t)); diff != "" {
		t.Errorf("folders (-before +now):\n%s", diff)
	}

	if err := os.Rename(marker+".away", marker); err != nil {
		t.Fatal(err)
	}
	n.waitPoked(ctx, t)
	eventually(ctx, t, "the removed pod's snapshots to go", func() (string, bool) {
		c := n.status(ctx, t).Store.Container
		return fmt.Sprintf("%+v", c), c.Writable.Count == 0 && c.Trash.Entries == 0
	})
	if _, id := n.writer(ctx, t, "new", 1); id == "" {
		t.Error("no new container")
	}
}

// TestMigrationAndBack takes a node with pods to the split snapshotter and back
// again, in the steps of docs/snapshotter.md.
func TestMigrationAndBack(t *testing.T) {
	t.Parallel()
	n := prepareSplit(t, disk.Ext4)
	ctx := bounded(t)
	n.pull(ctx, t, node.BusyboxImage)
	old, oldID := n.writer(ctx, t, "old", 2)
	containers := n.Disks["containers"]

	n.migrate(ctx, t, 1)
	if _, err := n.client.Exec(ctx, oldID, "true"); err != nil {
		t.Errorf("a container from before does not run on: %v", err)
	}
	// The image is unpacked again by the first container, not pulled.
	if err := n.Registry.Slow(node.BusyboxImage, time.Hour); err != nil {
		t.Fatal(err)
	}
	before := usedBytes(t, containers)
	fresh, freshID := n.writer(ctx, t, "new", 5)
	if grown := usedBytes(t, containers) - before; grown < 5<<20 {
		t.Errorf("a new container took %d bytes of the containers' filesystem, want 5 MiB", grown)
	}
	inventory, err := snapshot.NewStore(n.client.Conn(), "k8s.io").Inventory(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for id, want := range map[string]string{oldID: "overlayfs", freshID: "cleave"} {
		if !slices.ContainsFunc(inventory.Layers, func(l snapshot.Layer) bool { return l.ContainerID == id && l.Snapshotter == want }) {
			t.Errorf("container %s is not on %s", id, want)
		}
	}
	if err := old.Remove(ctx); err != nil {
		t.Errorf("remove the pod from before: %v", err)
	}

	if err := fresh.Remove(ctx); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(ctx, cleaveBinary(t), "containerd-config", "--remove", "--containerd-config", n.Runtime.ConfigFile()).CombinedOutput()
	if err != nil || !strings.Contains(string(out), "is removed") {
		t.Fatalf("%v: %s", err, out)
	}
	if err := n.Runtime.Restart(ctx); err != nil {
		t.Fatal(err)
	}
	n.stop(t, syscall.SIGTERM)
	before = usedBytes(t, containers)
	if _, id := n.writer(ctx, t, "back", 5); id == "" {
		t.Error("no container")
	}
	if grown := usedBytes(t, containers) - before; grown > leakBytes {
		t.Errorf("back on overlayfs, a container took %d bytes of the containers' filesystem", grown)
	}
}

// TestCTD63_RemovalWhileDownLeaksNothing: containerd forgets what it could not
// tell the snapshotter; the poke after the start makes up for it.
func TestCTD63_RemovalWhileDownLeaksNothing(t *testing.T) {
	t.Parallel()
	for _, kind := range []disk.FS{disk.Ext4, disk.XFS} {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			n := startSplit(t, kind, 1)
			ctx := bounded(t)
			containers := n.Disks["containers"]
			n.pull(ctx, t, node.BusyboxImage)
			// Once before, so that what stays in any case is there.
			first, _ := n.writer(ctx, t, "first", 1)
			if err := first.Remove(ctx); err != nil {
				t.Fatal(err)
			}
			eventually(ctx, t, "the first pod to be gone", func() (string, bool) {
				// What is removed while containerd collects waits for its next collection.
				n.collect(ctx, t)
				c := n.status(ctx, t).Store.Container
				return fmt.Sprintf("%+v", c), c.Writable.Count == 0 && c.Trash.Entries == 0
			})
			before := usedBytes(t, containers)
			_, id := n.writer(ctx, t, "writer", 20)
			n.stop(t, syscall.SIGKILL)
			if err := n.client.RemoveContainer(ctx, id); err != nil {
				t.Fatal(err)
			}
			// Then containerd's collection fails, and is not repeated by itself.
			eventually(ctx, t, "containerd's collection to fail", func() (string, bool) {
				log, err := os.ReadFile(n.Runtime.LogFile())
				return fmt.Sprint(err), strings.Contains(string(log), "snapshot garbage collection failed")
			})
			// xfs frees late, so the first pod's space may have come back only now.
			if now := usedBytes(t, containers); now < before+16<<20 {
				t.Fatalf("the space is free while the snapshotter is down: %d, %d before", now, before)
			}
			n.start(ctx, t)
			n.waitPoked(ctx, t)
			waitFreed(ctx, t, containers, before)
		})
	}
}

// TestRestartsDisturbNoContainer restarts the snapshotter and containerd, gently
// and not, under a running container.
func TestRestartsDisturbNoContainer(t *testing.T) {
	t.Parallel()
	n := startSplit(t, disk.Ext4, 1)
	ctx := bounded(t)
	n.pull(ctx, t, node.BusyboxImage)
	_, id := n.writer(ctx, t, "stays", 3)
	for i, step := range []struct {
		name string
		do   func() error
	}{
		{"snapshotter stopped and started", func() error { n.stop(t, syscall.SIGTERM); n.start(ctx, t); return nil }},
		{"snapshotter killed and started", func() error { n.stop(t, syscall.SIGKILL); n.start(ctx, t); return nil }},
		{"containerd restarted", func() error { return n.Runtime.Restart(ctx) }},
		{"containerd killed and started", func() error {
			if err := n.Runtime.Kill(); err != nil {
				return err
			}
			return n.Runtime.Start(ctx)
		}},
		{"both killed, containerd first back", func() error {
			n.stop(t, syscall.SIGKILL)
			if err := n.Runtime.Kill(); err != nil {
				return err
			}
			if err := n.Runtime.Start(ctx); err != nil {
				return err
			}
			n.start(ctx, t)
			return nil
		}},
	} {
		if err := step.do(); err != nil {
			t.Fatalf("%s: %v", step.name, err)
		}
		n.waitPoked(ctx, t)
		// A containerd that starts while the snapshotter is away forgets its
		// images for the CRI; it is told of them.
		eventually(ctx, t, step.name+": CRI's images", func() (string, bool) {
			got, err := n.client.Images.ImageStatus(ctx, &runtimeapi.ImageStatusRequest{Image: &runtimeapi.ImageSpec{Image: node.BusyboxImage}})
			return fmt.Sprint(got, err), err == nil && got.GetImage() != nil
		})
		out, err := n.client.Exec(ctx, id, "sh", "-c", "echo more >> /small; wc -l < /small; stat -c %s /big")
		if want := fmt.Sprintf("%d\n%d\n", i+1, 3<<20); err != nil || out != want {
			t.Errorf("%s: the container says %q (%v), want %q", step.name, out, err, want)
		}
		p, _ := n.writer(ctx, t, fmt.Sprintf("new-%d", i), 1)
		if err := p.Remove(ctx); err != nil {
			t.Errorf("%s: %v", step.name, err)
		}
	}
	// While the snapshotter is away, containers run on, and a new pod fails at once.
	n.stop(t, syscall.SIGTERM)
	if _, err := n.client.Exec(ctx, id, "true"); err != nil {
		t.Errorf("without the snapshotter: %v", err)
	}
	began := time.Now()
	if _, err := n.client.Run(ctx, n.PodSpec("refused")); err == nil || time.Since(began) > 20*time.Second {
		t.Errorf("a pod without the snapshotter: %v after %v, want an error soon", err, time.Since(began))
	}
}

// TestOfferedSocketBridgesARestart: with a socket that a service manager holds,
// calls wait while the snapshotter is away, and a containerd that starts then
// keeps its images.
func TestOfferedSocketBridgesARestart(t *testing.T) {
	t.Parallel()
	n := prepareSplit(t, disk.Ext4)
	ctx := bounded(t)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: n.cfg.Snapshotter.Endpoint.Path(), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	if n.offered, err = l.File(); err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.offered.Close(); err != nil {
			t.Error(err)
		}
	})
	n.migrate(ctx, t, 1)
	n.pull(ctx, t, node.BusyboxImage)
	n.writer(ctx, t, "before", 1) // the sandbox's image is there, too

	n.stop(t, syscall.SIGTERM)
	ran := make(chan error, 1)
	run := func(name string) {
		go func() { _, err := n.client.Run(ctx, n.PodSpec(name)); ran <- err }()
	}
	run("waits")
	queued := func() (string, bool) {
		table, err := os.ReadFile("/proc/net/unix")
		for line := range strings.Lines(string(table)) {
			// A connection that nobody has accepted yet has the listener's path
			// and no inode.
			if f := strings.Fields(line); len(f) == 8 && f[7] == n.cfg.Snapshotter.Endpoint.Path() && f[6] == "0" {
				return "", true
			}
		}
		return fmt.Sprint("not connected ", err), false
	}
	refused := false
	eventually(ctx, t, "containerd to wait", func() (string, bool) {
		select {
		case err := <-ran:
			// The call went out on the old connection in the moment of its end;
			// containerd then says Unavailable until it has connected again.
			t.Logf("a pod was refused: %v", err)
			refused = true
		default:
		}
		_, waits := queued()
		return "not connected", waits || refused
	})
	n.start(ctx, t)
	if refused {
		n.waitPoked(ctx, t)
		run("after")
	}
	if err := <-ran; err != nil {
		t.Errorf("a pod begun while the snapshotter was away, or after: %v", err)
	}
	n.waitPoked(ctx, t)

	n.stop(t, syscall.SIGKILL)
	if err := n.Runtime.Kill(); err != nil {
		t.Fatal(err)
	}
	go func() { ran <- n.Runtime.Start(ctx) }()
	eventually(ctx, t, "the new containerd to wait", queued)
	n.start(ctx, t)
	if err := <-ran; err != nil {
		t.Fatal(err)
	}
	got, err := n.client.Images.ImageStatus(ctx, &runtimeapi.ImageStatusRequest{Image: &runtimeapi.ImageSpec{Image: node.BusyboxImage}})
	if err != nil || got.GetImage() == nil {
		t.Errorf("the image is lost: %v %v", got, err)
	}
	n.waitPoked(ctx, t)
	if log, err := os.ReadFile(n.log); err != nil || strings.Contains(string(log), "left out images") {
		t.Errorf("containerd had left out images (%v):\n%s", err, n.tail(20))
	}
}

// folders lists what lies in both roots.
func (n *splitNode) folders(t *testing.T) []string {
	t.Helper()
	var out []string
	for _, root := range []string{n.cfg.Snapshotter.ImageRoot, n.cfg.Snapshotter.ContainerRoot} {
		entries, err := filepath.Glob(filepath.Join(root, "snapshots", "*"))
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, entries...)
	}
	return out
}

// TestCTD32_AnotherContainerdDeletesNothing connects a containerd with a fresh
// root, which would remove all that it does not know: beside the known one, and
// in its place.
func TestCTD32_AnotherContainerdDeletesNothing(t *testing.T) {
	t.Parallel()
	n := startSplit(t, disk.Ext4, 1)
	ctx := bounded(t)
	n.pull(ctx, t, node.BusyboxImage)
	_, id := n.writer(ctx, t, "stays", 3)
	before := n.folders(t)
	if len(before) < 3 {
		t.Fatalf("folders: %v", before)
	}

	binaries, err := bin.Get(ctx, os.Stderr, "containerd", "shim")
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(n.Run.Dir(), "ctd2")
	fresh, err := runtime.New(runtime.Options{
		Dir: dir, Containerd: binaries[0], Shim: binaries[1], Env: n.Run.Env(), Imports: []string{filepath.Join(dir, "conf.d", "*.toml")},
	})
	if err != nil {
		t.Fatal(err)
	}
	n.useIn(ctx, t, fresh, 1)
	if err := fresh.Start(ctx); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := fresh.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	// poke makes the fresh one remove what it does not know.
	poke := func() {
		t.Helper()
		conn, err := grpc.NewClient("unix://"+fresh.Socket(), grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		if err := snapshot.NewStore(conn, "k8s.io").Poke(ctx, "cleave"); err != nil {
			t.Logf("the poke says %v", err)
		}
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	}
	refused := n.status(ctx, t).Calls.Refused
	poke()
	eventually(ctx, t, "a deletion to be refused", func() (string, bool) {
		s := n.status(ctx, t)
		return fmt.Sprintf("%+v", s.Calls), s.Calls.Refused > refused
	})
	check := func(when string) {
		t.Helper()
		now := n.folders(t)
		for _, f := range before {
			if !slices.Contains(now, f) {
				t.Errorf("%s: %s is gone", when, f)
			}
		}
	}
	check("beside the known containerd")

	// In its place: the snapshotter is told to work for the fresh one.
	if err := n.Runtime.Kill(); err != nil {
		t.Fatal(err)
	}
	n.stop(t, syscall.SIGTERM)
	own := n.cfg.Runtime.Endpoint
	n.cfg.Runtime.Endpoint = config.Endpoint(fresh.Socket())
	n.writeConfig(t)
	n.start(ctx, t)
	eventually(ctx, t, "the fresh one to be refused", func() (string, bool) {
		s := n.status(ctx, t)
		return fmt.Sprintf("%+v", s.Containerd), s.Containerd.PID == 0 && strings.Contains(s.Containerd.Reason, "belong to")
	})
	poke()
	eventually(ctx, t, "a deletion to be refused", func() (string, bool) {
		s := n.status(ctx, t)
		return fmt.Sprintf("%+v", s.Calls), s.Calls.Refused > 0
	})
	check("in the place of the known containerd")

	// And back.
	n.stop(t, syscall.SIGTERM)
	n.cfg.Runtime.Endpoint = own
	n.writeConfig(t)
	n.start(ctx, t)
	if err := n.Runtime.Start(ctx); err != nil {
		t.Fatal(err)
	}
	n.waitPoked(ctx, t)
	check("back again")
	if out, err := n.client.Exec(ctx, id, "stat", "-c", "%s", "/big"); err != nil || out != fmt.Sprintln(3<<20) {
		t.Errorf("the container says %q, %v", out, err)
	}
}
