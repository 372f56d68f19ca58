package integration

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/google/go-cmp/cmp"
	bolt "go.etcd.io/bbolt"
	"google.golang.org/grpc/metadata"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/node"
	"github.com/cleave-cri/cleave/lab/pod"
	"github.com/cleave-cri/cleave/snapshot"
	"github.com/cleave-cri/cleave/snapshot/split/ctdconfig"
	"github.com/cleave-cri/cleave/snapshot/split/fence"
)

// fenceNode is a node whose roots are mount points, so that they can be taken
// away and swapped as a whole. Its disks are mounted a second time: what lies on
// them can be seen meanwhile.
type fenceNode struct {
	*node.Node
	client  *pod.Client
	store   *snapshot.Store
	witness witness
	holds   map[string]string
}

func startFenceNode(t *testing.T) *fenceNode {
	t.Helper()
	n := &fenceNode{holds: map[string]string{}}
	n.Node = startSplitNode(t, node.Options{
		Disks: twoDisks(disk.Ext4),
		Configure: func(c *config.Config, disks map[string]*disk.Disk) {
			c.Snapshotter.ImageRoot, c.Snapshotter.ContainerRoot = disks["images"].Path(), disks["containers"].Path()
			c.Snapshotter.RequireMountpoints = true
		},
	}, node.SplitOptions{Images: "images", Containers: "containers"})
	n.client = dial(t, n.Runtime.Endpoint())
	n.store = snapshot.NewStore(n.client.Conn(), "k8s.io")
	ctx := bounded(t)
	n.hold(ctx, t)
	if _, err := n.client.Pull(ctx, node.BusyboxImage); err != nil {
		t.Fatal(err)
	}
	n.witness = startWitness(ctx, t, n.Node, n.client, node.BusyboxImage)
	return n
}

// hold mounts the disks a second time.
func (n *fenceNode) hold(ctx context.Context, t *testing.T) {
	t.Helper()
	for name, d := range n.Disks {
		n.holds[name] = filepath.Join(n.Run.Dir(), "hold-"+name)
		if err := os.MkdirAll(n.holds[name], 0o700); err != nil {
			t.Fatal(err)
		}
		command(ctx, t, "mount", d.Device(), n.holds[name])
	}
}

func (n *fenceNode) away(ctx context.Context, t *testing.T, name string) {
	t.Helper()
	command(ctx, t, "umount", "-l", n.Disks[name].Path())
}

func (n *fenceNode) mount(ctx context.Context, t *testing.T, device, on string) {
	t.Helper()
	command(ctx, t, "mount", n.Disks[device].Device(), n.Disks[on].Path())
}

// files lists what lies on both disks, but for what the witness is just writing.
func (n *fenceNode) files(t *testing.T) []string {
	t.Helper()
	var out []string
	for name, root := range n.holds {
		if err := filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			rel, relErr := filepath.Rel(root, path)
			if !strings.HasSuffix(rel, "diff/next") {
				out = append(out, name+"/"+rel)
			}
			return errors.Join(err, relErr)
		}); err != nil {
			t.Fatal(err)
		}
	}
	slices.Sort(out)
	return out
}

// served makes sure that reads are answered, and that the container runs on.
func (n *fenceNode) served(ctx context.Context, t *testing.T) {
	t.Helper()
	inventory, err := n.store.Inventory(ctx)
	i := slices.IndexFunc(inventory.Layers, func(l snapshot.Layer) bool { return l.ContainerID == n.witness.id })
	if err != nil || i < 0 {
		t.Errorf("list snapshots: %v, %v", inventory.Layers, err)
		return
	}
	if f, err := n.store.Folders(ctx, inventory.Layers[i]); err != nil || f.Upper == "" || f.Lower == "" {
		t.Errorf("mounts of a snapshot: %+v, %v", f, err)
	}
	in := metadata.AppendToOutgoingContext(ctx, "containerd-namespace", "k8s.io")
	if _, err := snapshotsapi.NewSnapshotsClient(n.client.Conn()).Stat(in, &snapshotsapi.StatSnapshotRequest{Snapshotter: ctdconfig.Snapshotter, Key: n.witness.id}); err != nil {
		t.Errorf("stat of a snapshot: %v", err)
	}
	answer, err := n.client.Images.ListImages(ctx, &runtimeapi.ListImagesRequest{})
	if err != nil || len(answer.GetImages()) < 2 {
		t.Errorf("list images: %v, %v", answer.GetImages(), err)
	}
	if s, err := n.client.Stats(ctx, n.witness.id); err != nil || s.GetAttributes().GetId() != n.witness.id {
		t.Errorf("stats: %v, %v", s, err)
	}
	n.witness.undisturbed(ctx, t)
}

// TestFenceUnderContainerd takes the roots away from a snapshotter at work, swaps
// them, covers them and changes a marker: nothing is deleted although containerd
// removes a pod, reads are answered, containers run on, status and log say why,
// and it recovers without a restart. Then the same for wrong databases, and for a
// reboot that numbers the devices anew.
func TestFenceUnderContainerd(t *testing.T) {
	t.Parallel()
	n := startFenceNode(t)
	ctx := bounded(t)
	marker := filepath.Join(n.holds["images"], fence.MarkerName)
	good, err := os.ReadFile(marker)
	if err != nil {
		t.Fatal(err)
	}
	write := func(content []byte) {
		t.Helper()
		if err := os.WriteFile(marker, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, tc := range []struct {
		name     string
		take     func()
		want     string
		giveBack func()
	}{
		{name: "image root unmounted", want: "the image root is not a mount point", take: func() { n.away(ctx, t, "images") }, giveBack: func() { n.mount(ctx, t, "images", "images") }},
		{name: "container root unmounted", want: "the container root is not a mount point", take: func() { n.away(ctx, t, "containers") }, giveBack: func() { n.mount(ctx, t, "containers", "containers") }},
		{name: "swapped", want: "this is the container root, configured as the image root", take: func() {
			n.away(ctx, t, "images")
			n.away(ctx, t, "containers")
			n.mount(ctx, t, "images", "containers")
			n.mount(ctx, t, "containers", "images")
		}, giveBack: func() {
			n.away(ctx, t, "images")
			n.away(ctx, t, "containers")
			n.mount(ctx, t, "images", "images")
			n.mount(ctx, t, "containers", "containers")
		}},
		{name: "empty", want: "has no " + fence.MarkerName, take: func() { command(ctx, t, "mount", "-t", "tmpfs", "tmpfs", n.Disks["containers"].Path()) }, giveBack: func() { n.away(ctx, t, "containers") }},
		{name: "marker altered", want: "the image root belongs to snapshotter", take: func() {
			write([]byte(strings.Replace(string(good), `"identity": "`, `"identity": "X`, 1)))
		}, giveBack: func() { write(good) }},
	} {
		settled := n.folders(t)
		victim, err := n.client.Run(ctx, n.PodSpec("victim"))
		if err != nil {
			t.Fatalf("%s: %v", tc.name, err)
		}
		before := n.files(t)
		tc.take()
		_, err = n.client.Run(ctx, n.PodSpec("refused"))
		if err == nil || !strings.Contains(err.Error(), "nothing is written or deleted") || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: a new pod gives %v, want it refused because %q", tc.name, err, tc.want)
		}
		if err := victim.Remove(ctx); err != nil { // containerd forgets it, the snapshotter keeps it
			t.Errorf("%s: %v", tc.name, err)
		}
		n.served(ctx, t)
		if err := n.store.Poke(ctx, ctdconfig.Snapshotter); err == nil {
			t.Errorf("%s: containerd compared its snapshots", tc.name)
		}
		if out, err := n.Split.Run(ctx, "snapshotter", "status"); err != nil || !strings.Contains(out, "CLOSED") || !strings.Contains(out, tc.want) || !strings.Contains(out, "-> ") {
			t.Errorf("%s: status says %v\n%s", tc.name, err, out)
		}
		if !strings.Contains(n.Split.LogTail(40), tc.want) {
			t.Errorf("%s: the log does not say %q:\n%s", tc.name, tc.want, n.Split.LogTail(40))
		}
		if diff := cmp.Diff(before, n.files(t)); diff != "" {
			t.Errorf("%s: files (-before +now):\n%s", tc.name, diff)
		}

		tc.giveBack()
		p, err := n.client.Run(ctx, n.PodSpec("recovered"))
		if err != nil {
			t.Fatalf("%s: not recovered: %v", tc.name, err)
		}
		if err := p.Remove(ctx); err != nil {
			t.Fatalf("%s: not recovered: %v", tc.name, err)
		}
		eventually(ctx, t, tc.name+": the removed pods to go", func() (string, bool) {
			now := n.folders(t)
			return fmt.Sprint(now), slices.Equal(settled, now)
		})
	}
	n.wrongDatabases(ctx, t)
	n.reboot(ctx, t)
}

// folders lists the folders of snapshots on both disks.
func (n *fenceNode) folders(t *testing.T) []string {
	t.Helper()
	var out []string
	for _, name := range []string{"images", "containers"} {
		names, err := filepath.Glob(filepath.Join(n.holds[name], "snapshots", "*"))
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, names...)
	}
	return out
}

// wrongDatabases starts the snapshotter with a database that has lost its
// records, and with that of other roots.
func (n *fenceNode) wrongDatabases(ctx context.Context, t *testing.T) {
	t.Helper()
	database := n.Split.Config().Snapshotter.Database
	emptied := filepath.Join(n.Run.Dir(), "emptied.db")
	other := n.otherDatabase(ctx, t)
	own, err := n.ownDatabase(ctx, t)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(emptied, own, 0o600); err != nil {
		t.Fatal(err)
	}
	db, err := bolt.Open(emptied, 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(db.Update(func(tx *bolt.Tx) error {
		// containerd's part of it, and the snapshots in cleave's; the identity stays.
		b := tx.Bucket([]byte("cleave"))
		if err := errors.Join(tx.DeleteBucket([]byte("v1")), b.DeleteBucket([]byte("snapshots")), b.Delete([]byte("highest"))); err != nil {
			return err
		}
		_, err := b.CreateBucket([]byte("snapshots"))
		return err
	}), db.Close()); err != nil {
		t.Fatal(err)
	}
	before := n.files(t)
	for _, tc := range []struct{ name, database, status, log string }{
		{"database emptied", emptied, "ALARM: ", "a clean-up is not done until it is confirmed"},
		{"database of another node", other, "the image root belongs to snapshotter", "the image root belongs to snapshotter"},
	} {
		content, err := os.ReadFile(tc.database)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(database, content, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := n.Split.Start(ctx); err != nil {
			t.Fatalf("%s: %v", tc.name, err)
		}
		// containerd has them compared, and wants new ones, all the same.
		var refused error
		for range 4 {
			refused = errors.Join(refused, n.store.Poke(ctx, ctdconfig.Snapshotter))
		}
		if refused == nil {
			t.Errorf("%s: snapshots are made", tc.name)
		}
		if out, err := n.Split.Run(ctx, "snapshotter", "status"); err != nil || !strings.Contains(out, tc.status) {
			t.Errorf("%s: status says %v, want %q\n%s", tc.name, err, tc.status, out)
		}
		if !strings.Contains(n.Split.LogTail(40), tc.log) {
			t.Errorf("%s: the log does not say %q:\n%s", tc.name, tc.log, n.Split.LogTail(40))
		}
		n.witness.undisturbed(ctx, t)
		if err := n.Split.Stop(ctx); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(before, n.files(t)); diff != "" {
			t.Errorf("%s: files (-before +now):\n%s", tc.name, diff)
		}
	}
	if err := os.WriteFile(database, own, 0o600); err != nil {
		t.Fatal(err)
	}
	n.works(ctx, t, "after-databases")
}

// ownDatabase stops the snapshotter and reads its database.
func (n *fenceNode) ownDatabase(ctx context.Context, t *testing.T) ([]byte, error) {
	t.Helper()
	if err := n.Split.Stop(ctx); err != nil {
		return nil, err
	}
	return os.ReadFile(n.Split.Config().Snapshotter.Database)
}

// otherDatabase makes one for other roots, in the same way.
func (n *fenceNode) otherDatabase(ctx context.Context, t *testing.T) string {
	t.Helper()
	dir := filepath.Join(n.Run.Dir(), "other")
	cfg := n.Split.Config()
	s := &cfg.Snapshotter
	s.RequireMountpoints = false
	s.ImageRoot, s.ContainerRoot, s.Database = filepath.Join(dir, "i"), filepath.Join(dir, "c"), filepath.Join(dir, "db", "metadata.db")
	for _, d := range []string{dir, s.ImageRoot, s.ContainerRoot} {
		if err := os.Mkdir(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	text, err := cfg.YAML()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "config.yaml")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	command(ctx, t, n.Split.Binary(), "snapshotter", "init", "--config", file)
	return s.Database
}

// works starts the snapshotter and makes sure that all is well.
func (n *fenceNode) works(ctx context.Context, t *testing.T, name string) {
	t.Helper()
	if err := n.Split.Start(ctx); err != nil {
		t.Fatal(err)
	}
	if n.Runtime.PID() == 0 {
		if err := n.Runtime.Start(ctx); err != nil {
			t.Fatal(err)
		}
		n.client.Conn().ResetConnectBackoff()
	}
	if err := n.Split.WaitKnown(ctx, n.Runtime.PID()); err != nil {
		t.Fatal(err)
	}
	p, err := n.client.Run(ctx, n.PodSpec(name))
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	if _, err := p.Start(ctx, pod.ContainerSpec{Name: "c", Image: node.BusyboxImage, Command: []string{"sleep", "100000"}}); err != nil {
		t.Errorf("%s: %v", name, err)
	}
	if err := p.Remove(ctx); err != nil {
		t.Errorf("%s: %v", name, err)
	}
}

// reboot ends all processes, attaches the disks in another order, and gives the
// snapshotter another boot_id, in a mount namespace of its own.
func (n *fenceNode) reboot(ctx context.Context, t *testing.T) {
	t.Helper()
	before, err := n.Split.Status(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(n.Runtime.Close(ctx), n.Split.Stop(ctx)); err != nil {
		t.Fatal(err)
	}
	was := n.devices(ctx, t)
	for _, name := range []string{"images", "containers"} {
		command(ctx, t, "umount", n.holds[name])
	}
	// Others take loop devices too, so that now and then each gets the one that it had.
	for tries := 1; ; tries++ {
		for _, name := range []string{"images", "containers"} {
			command(ctx, t, "umount", n.Disks[name].Path())
		}
		n.mountLoop(ctx, t, n.Disks["containers"].Image(), n.Disks["containers"].Path())
		n.mountLoop(ctx, t, n.Disks["images"].Image(), n.Disks["images"].Path())
		now := n.devices(ctx, t)
		if was["images"] != now["images"] || was["containers"] != now["containers"] {
			break
		}
		if tries == 10 {
			t.Fatalf("the devices have the numbers that they had, ten times: %v", now)
		}
	}
	boot := filepath.Join(n.Run.Dir(), "boot_id")
	if err := os.WriteFile(boot, []byte("00000000-0000-4000-8000-000000000000\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	n.Split.Within("unshare", "--mount", "sh", "-c", `mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"`, boot)
	n.works(ctx, t, "after-reboot")
	after, err := n.Split.Status(ctx)
	if err != nil || after.Store.Fence.Closed || after.Store.Identity != before.Store.Identity || after.Store.Image.Layers.Count != before.Store.Image.Layers.Count {
		t.Errorf("after the reboot: %+v, %v; before: %+v", after.Store, err, before.Store)
	}
	// The container is dead, what it wrote is there.
	if text, err := os.ReadFile(filepath.Join(n.witness.upper, "count")); err != nil || strings.TrimSpace(string(text)) == "" {
		t.Errorf("what a container wrote before the reboot: %q, %v", text, err)
	}
}

func (n *fenceNode) mountLoop(ctx context.Context, t *testing.T, image, path string) {
	t.Helper()
	command(ctx, t, "mount", "-o", "loop", image, path)
}

// devices are the device numbers of the disks.
func (n *fenceNode) devices(ctx context.Context, t *testing.T) map[string]string {
	t.Helper()
	out := map[string]string{}
	for name, d := range n.Disks {
		number, err := exec.CommandContext(ctx, "stat", "-c", "%d", d.Path()).Output()
		if err != nil {
			t.Fatal(err)
		}
		out[name] = strings.TrimSpace(string(number))
	}
	return out
}

// command runs a program that must succeed.
func command(ctx context.Context, t *testing.T, name string, args ...string) {
	t.Helper()
	if out, err := exec.CommandContext(ctx, name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %v: %v: %s", name, args, err, out)
	}
}
