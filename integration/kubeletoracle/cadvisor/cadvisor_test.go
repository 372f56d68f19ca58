package cadvisor

import (
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/cadvisor/lib/container"
	"github.com/google/cadvisor/lib/container/containerd"
	"github.com/google/cadvisor/lib/container/crio"
	"github.com/google/cadvisor/lib/fs"
	info "github.com/google/cadvisor/lib/model"
	"github.com/google/cadvisor/lib/watcher"

	"github.com/cleave-cri/cleave/agent/rootbind"
	"github.com/cleave-cri/cleave/lab/janitor"
	"github.com/cleave-cri/cleave/lab/need"
	"github.com/cleave-cri/cleave/proxy/criocompat"
)

// inside is set in the process that has mounts of its own.
const inside = "CLEAVE_TEST_INSIDE"

func TestMain(m *testing.M) {
	janitor.Main()
	os.Exit(m.Run())
}

// alone lets a test go on in a process with a /run of its own, because cAdvisor asks
// on a socket whose path no flag changes (KSS-4). It reports whether this is that
// process.
func alone(t *testing.T) bool {
	t.Helper()
	need.Root(t)
	if os.Getenv(inside) == "" {
		self, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.CommandContext(t.Context(), self, "-test.run=^"+t.Name()+"$", "-test.v")
		cmd.Env = append(os.Environ(), inside+"=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
		out, err := cmd.CombinedOutput()
		if err != nil || !strings.Contains(string(out), "--- PASS: "+t.Name()) {
			t.Errorf("%v\n%s", err, out)
		}
		return false
	}
	if err := errors.Join(
		syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""),
		syscall.Mount("tmpfs", "/run", "tmpfs", 0, "mode=755"),
		os.MkdirAll(filepath.Dir(crio.CrioSocket), 0o755),
	); err != nil {
		t.Fatal(err)
	}
	return true
}

// node answers cAdvisor's questions.
type node struct {
	driver     criocompat.Driver
	containers map[string]criocompat.Container // by alias
}

func (n *node) Info(context.Context, int32) (criocompat.Info, error) {
	return criocompat.Info{StorageDriver: "overlay", StorageRoot: "/containers", StorageImage: "/images", CgroupDriver: n.driver}, nil
}

func (n *node) Container(_ context.Context, alias string) (criocompat.Container, error) {
	c, ok := n.containers[alias]
	if !ok {
		return c, criocompat.ErrUnknown
	}
	return c, nil
}

// serve answers on cAdvisor's socket.
func serve(t *testing.T, n *node) {
	t.Helper()
	s := criocompat.New(criocompat.Config{Informer: n, Registry: n})
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: crio.CrioSocket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	all.Go(func() {
		for {
			conn, err := l.AcceptUnix()
			if err != nil {
				return
			}
			all.Go(func() {
				if s.Admit(conn)(context.Background()) {
					t.Error("cAdvisor's connection was taken for gRPC")
				}
			})
		}
	})
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := errors.Join(l.Close(), s.Shutdown(ctx)); err != nil {
			t.Error(err)
		}
		all.Wait()
	})
}

// machine is all that handlers want to know of a machine when they are made.
type machine struct{ info.MachineInfoFactory }

const id = "4f1d6c3f9a6a7c1b2d3e4f5061728394a5b6c7d8e9f00112233445566778899a"

// The cgroups of our containers are taken by the handler for CRI-O, with the labels
// by which the kubelet knows them; those of sandboxes and of containers from before
// are not. What the handler for containerd makes of our names is no ID that
// containerd knows.
func TestHandlersPickOurCgroups(t *testing.T) {
	if !alone(t) {
		return
	}
	labels := map[string]string{"io.kubernetes.container.name": "app", "io.kubernetes.pod.uid": "u"}
	n := &node{containers: map[string]criocompat.Container{criocompat.Alias(id): {
		Name: id, PID: os.Getpid(), Image: "busybox", Labels: labels, Root: "/r",
		Annotations: map[string]string{"io.kubernetes.container.restartCount": "3"}, IPs: []string{"10.0.0.9"},
	}}}
	serve(t, n)
	type want struct {
		name             string
		handled, ignored bool
	}
	for driver, cases := range map[criocompat.Driver][]want{
		criocompat.Cgroupfs: {
			{name: "/kubepods/burstable/pod1/" + base(t, "/kubepods/burstable/pod1/"+id), handled: true},
			{name: "/kubepods/burstable/pod1/" + id},
			{name: "/kubepods/burstable/pod1"},
		},
		criocompat.Systemd: {
			{name: "/kubepods.slice/kubepods-pod1.slice/" + base(t, "kubepods-pod1.slice:cri-containerd:"+id), handled: true},
			{name: "/kubepods.slice/kubepods-pod1.slice/cri-containerd-" + id + ".scope"},
			{name: "/kubepods.slice/kubepods-pod1.slice"},
			{name: "/kubepods.slice/kubepods-pod1.slice/crio-" + criocompat.Alias(id) + "-" + id, ignored: true},
		},
	} {
		n.driver = driver
		container.ClearContainerHandlerFactories()
		if err := crio.Register(machine{}, nil, container.MetricSet{container.DiskUsageMetrics: {}}); err != nil {
			t.Fatal(err)
		}
		for _, c := range cases {
			handler, accepted, err := container.NewContainerHandler(c.name, watcher.Raw, nil, true)
			if c.handled != (handler != nil && accepted) || c.ignored != (handler == nil && err == nil) {
				t.Errorf("%s %s: handler %v, accepted %v, %v", driver, c.name, handler, accepted, err)
				continue
			}
			if !c.handled {
				continue
			}
			reference, err := handler.ContainerReference()
			if err != nil || reference.Id != criocompat.Alias(id) || reference.Namespace != "crio" {
				t.Errorf("%s: reference %+v, %v", c.name, reference, err)
			}
			got := handler.GetContainerLabels()
			if got["io.kubernetes.container.name"] != "app" || got["restartcount"] != "3" || handler.GetContainerIPAddress() != "10.0.0.9" {
				t.Errorf("%s: labels %v, address %s", c.name, got, handler.GetContainerIPAddress())
			}
			if theirs := containerd.ContainerNameToContainerdID(c.name); theirs != criocompat.Alias(id) || theirs == id {
				t.Errorf("the handler for containerd would ask for %s", theirs)
			}
		}
	}
}

// base is the last part of the cgroup that runc makes of a cgroup path.
func base(t *testing.T, path string) string {
	t.Helper()
	ours, driver, err := criocompat.CgroupsPath(path, id)
	if err != nil {
		t.Fatal(err)
	}
	if driver == criocompat.Systemd {
		// runc, docs/systemd.md: "slice:prefix:name" is the unit prefix-name.scope in slice.
		_, rest, _ := strings.Cut(ours, ":")
		return strings.ReplaceAll(rest, ":", "-") + ".scope"
	}
	return filepath.Base(ours)
}

// cAdvisor's client understands our answers, and asks again for a container that is
// not known: anything but 404 would make it give up.
func TestClientUnderstands(t *testing.T) {
	if !alone(t) {
		return
	}
	n := &node{driver: criocompat.Systemd, containers: map[string]criocompat.Container{criocompat.Alias(id): {Name: id, IPs: []string{"10.0.0.9"}}}}
	serve(t, n)
	client, err := crio.Client()
	if err != nil {
		t.Fatal(err)
	}
	got, err := client.Info()
	want := crio.Info{StorageDriver: "overlay", StorageRoot: "/containers", StorageImage: "/images", CgroupDriver: "systemd"}
	if err != nil || got != want {
		t.Errorf("info %+v, %v", got, err)
	}
	c, err := client.ContainerInfo(criocompat.Alias(id))
	if err != nil || c.Name != id || c.IP != "10.0.0.9" || c.Labels == nil {
		t.Errorf("container %+v, %v", c, err)
	}
	if _, err := client.ContainerInfo(criocompat.Alias("other")); !errors.Is(err, crio.ErrContainerNotFound) {
		t.Errorf("an unknown one: %v, want %v", err, crio.ErrContainerNotFound)
	}
}

// cAdvisor's walk sees through a bind mount what it does not see through a symlink
// (KSS-10), and that on the layer's own device.
func TestWalkThroughABind(t *testing.T) {
	need.Root(t)
	run := need.Lab(t)
	upper := filepath.Join(run.Dir(), "snapshot", "fs")
	if err := os.MkdirAll(filepath.Join(upper, "a", "b"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(upper, "a", "file"), make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	roots, err := rootbind.Open(filepath.Join(run.Dir(), "roots"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := roots.Clear(); err != nil {
			t.Error(err)
		}
	})
	root, err := roots.Bind(id, upper)
	if err != nil {
		t.Fatal(err)
	}
	want, err := fs.GetDirUsage(upper)
	if err != nil {
		t.Fatal(err)
	}
	got, err := fs.GetDirUsage(filepath.Join(root, "diff"))
	if err != nil || got != want || got.Bytes < 1<<20 || got.Inodes != 4 {
		t.Errorf("through the bind %+v, %v, directly %+v", got, err, want)
	}
	link := filepath.Join(run.Dir(), "link")
	if err := os.Symlink(upper, link); err != nil {
		t.Fatal(err)
	}
	if through, err := fs.GetDirUsage(link); err == nil && through.Inodes > 1 {
		t.Errorf("through a symlink it sees %+v: then no bind is needed any more", through)
	}
}
