package kubelet

import (
	"debug/buildinfo"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// asKubelet makes this test program stand still like a kubelet: it is copied
// under that name and started with a kubelet's arguments.
const asKubelet = "CLEAVE_TEST_AS_KUBELET"

func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == "--version" {
		// A kubelet that is asked has no environment.
		if _, err := os.Stdout.WriteString("Kubernetes v1.36.3\n"); err != nil {
			os.Exit(1)
		}
		os.Exit(0)
	}
	if os.Getenv(asKubelet) == "" {
		os.Exit(m.Run())
	}
	if _, err := os.Stdout.WriteString("ready\n"); err != nil {
		os.Exit(1)
	}
	// Ends with the test, whatever becomes of that: then the pipe closes.
	if _, err := io.Copy(io.Discard, os.Stdin); err != nil {
		os.Exit(1)
	}
	os.Exit(0)
}

// fakeNode is a /proc with made-up processes, and the file trees they see.
type fakeNode struct {
	t   *testing.T
	dir string
}

func newFakeNode(t *testing.T) fakeNode {
	t.Helper()
	n := fakeNode{t, t.TempDir()}
	n.write("proc/stat", "cpu 1 2 3\nbtime 1700000000\n")
	n.write("proc/self/cmdline", "kubelet\x00") // not a number: not a process
	return n
}

func (n fakeNode) path(name string) string { return filepath.Join(n.dir, name) }

func (n fakeNode) write(name, content string) {
	n.t.Helper()
	if err := os.MkdirAll(filepath.Dir(n.path(name)), 0o755); err != nil {
		n.t.Fatal(err)
	}
	if err := os.WriteFile(n.path(name), []byte(content), 0o644); err != nil {
		n.t.Fatal(err)
	}
}

func (n fakeNode) link(name, to string) {
	n.t.Helper()
	if err := os.MkdirAll(filepath.Dir(n.path(name)), 0o755); err != nil {
		n.t.Fatal(err)
	}
	if err := os.Symlink(to, n.path(name)); err != nil {
		n.t.Fatal(err)
	}
}

// process makes a process; its file tree is the folder root/PID.
func (n fakeNode) process(pid int, args ...string) {
	n.t.Helper()
	p := "proc/" + strconv.Itoa(pid)
	n.write(p+"/cmdline", strings.Join(args, "\x00")+"\x00")
	n.write(p+"/status", "Name:\tx\nUid:\t0\t0\t0\t0\n")
	// The name in brackets may hold anything.
	n.write(p+"/stat", fmt.Sprintf("%d (a) b) S 1 1 1 0 -1 4194560 1 0 0 0 1 1 0 0 20 0 9 0 %d 1 1 1", pid, 100*pid))
	tree := "root/" + strconv.Itoa(pid)
	if err := os.MkdirAll(n.path(tree), 0o755); err != nil {
		n.t.Fatal(err)
	}
	n.link(p+"/root", n.path(tree))
	n.link(p+"/cwd", n.path(tree)+"/srv")
}

func (n fakeNode) find(choice Choice) (Settings, error) {
	return Reader{Proc: n.path("proc")}.Find(n.t.Context(), choice)
}

// TestRead: the files are those that the kubelet sees, absolute symlinks and a
// relative path included, not those of this process.
func TestRead(t *testing.T) {
	t.Parallel()
	n := newFakeNode(t)
	n.process(41, "/bin/sh", "-c", "kubelet")
	n.process(42, "/usr/bin/kubelet", "--config=../etc/kubelet.yaml", "--config-dir=/etc/kubelet.conf.d", "--root-dir=data/")
	n.link("root/42/etc/kubelet.yaml", "/opt/real.yaml")
	n.write("root/42/opt/real.yaml", head+"cgroupRoot: /base\nstaticPodPath: manifests\n")
	n.write("root/42/etc/kubelet.conf.d/20-b.conf", head+"cgroupRoot: /second\n")
	n.write("root/42/etc/kubelet.conf.d/10-a/z.conf", head+"cgroupRoot: /first\nimageServiceEndpoint: unix:///i.sock\n")
	n.write("root/42/etc/kubelet.conf.d/30-not-me.yaml", "[")
	s, err := n.find(Choice{})
	if err != nil {
		t.Fatal(err)
	}
	var sources []string
	for _, source := range s.Sources {
		sources = append(sources, source.Path)
	}
	got := []string{fmt.Sprint(s.PID), fmt.Sprint(s.StartTicks), s.Started.UTC().Format(time.RFC3339), s.CgroupRoot.Value, s.ImageEndpoint.Value, s.StaticPodPath.Value, s.RootDir.Value, s.Version.String()}
	want := []string{"42", "4200", "2023-11-14T22:14:02Z", "/second", "unix:///i.sock", "/etc/manifests", "/srv/data", "unknown version"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if diff := cmp.Diff([]string{"/etc/kubelet.yaml", "/etc/kubelet.conf.d/10-a/z.conf", "/etc/kubelet.conf.d/20-b.conf"}, sources); diff != "" {
		t.Errorf("sources -want +got:\n%s", diff)
	}
	// All of them are younger than that process.
	if len(s.ChangedSince()) != 3 {
		t.Errorf("changed since: %q", s.ChangedSince())
	}
	s.Started = time.Now().Add(time.Hour)
	if len(s.ChangedSince()) != 0 {
		t.Errorf("changed since an hour from now: %q", s.ChangedSince())
	}
}

// TestReadBadFiles: none of them makes us wait, or read without end.
func TestReadBadFiles(t *testing.T) {
	t.Parallel()
	cases := []struct {
		name string
		make func(n fakeNode)
		want string
	}{
		{"missing", func(fakeNode) {}, "no such file"},
		{"a pipe without a writer", func(n fakeNode) {
			if err := syscall.Mkfifo(n.path("root/42/c"), 0o600); err != nil {
				t.Fatal(err)
			}
		}, "not a regular file"},
		{"a folder", func(n fakeNode) { n.write("root/42/c/x", "") }, "not a regular file"},
		{"a gigabyte", func(n fakeNode) {
			n.write("root/42/c", "")
			if err := os.Truncate(n.path("root/42/c"), 1<<30); err != nil {
				t.Fatal(err)
			}
		}, "larger than 1048576 bytes"},
		{"a link out of the tree", func(n fakeNode) { n.link("root/42/c", "../../../../../../../etc/passwd") }, "no such file"},
		{"a link to itself", func(n fakeNode) { n.link("root/42/c", "/c") }, "too many levels"},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			n := newFakeNode(t)
			n.process(42, "kubelet", "--config=/c")
			tc.make(n)
			_, err := n.find(Choice{})
			var inFile *FileError
			if !errors.As(err, &inFile) || !strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), "/c") {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
}

func TestReadDropIns(t *testing.T) {
	t.Parallel()
	cases := []struct {
		name, arg string
		make      func(n fakeNode)
		want      string // the cgroup root, or an error
	}{
		{"none there", "/d", func(n fakeNode) {}, "no such file"},
		{"empty", "/d", func(n fakeNode) { n.write("root/42/d/x", "") }, ""},
		// filepath.WalkDir does not follow it.
		{"a link to a folder has none", "/l", func(n fakeNode) { n.write("root/42/d/x.conf", head+"cgroupRoot: /x\n"); n.link("root/42/l", "/d") }, ""},
		{"unless a slash follows", "/l/", func(n fakeNode) { n.write("root/42/d/x.conf", head+"cgroupRoot: /x\n"); n.link("root/42/l", "/d") }, "/x"},
		{"a file itself", "/x.conf", func(n fakeNode) { n.write("root/42/x.conf", head+"cgroupRoot: /x\n") }, "/x"},
		{"a link to a file", "/d", func(n fakeNode) { n.write("root/42/y", head+"cgroupRoot: /y\n"); n.link("root/42/d/x.conf", "/y") }, "/y"},
		{"a link to a folder is read as a file", "/d", func(n fakeNode) { n.write("root/42/y/z", ""); n.link("root/42/d/x.conf", "/y") }, "not a regular file"},
		{"too deep", "/d", func(n fakeNode) { n.write("root/42/d/"+strings.Repeat("a/", 40)+"x.conf", head) }, "nested more than"},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			n := newFakeNode(t)
			n.process(42, "kubelet", "--config-dir="+tc.arg)
			tc.make(n)
			s, err := n.find(Choice{})
			if err != nil {
				if tc.want == "" || !strings.Contains(err.Error(), tc.want) {
					t.Errorf("got %v, want %q", err, tc.want)
				}
				return
			}
			if s.CgroupRoot.Value != tc.want {
				t.Errorf("got %q, want %q", s.CgroupRoot.Value, tc.want)
			}
		})
	}
}

func TestFind(t *testing.T) {
	t.Parallel()
	n := newFakeNode(t)
	if _, err := n.find(Choice{}); !errors.Is(err, ErrNotRunning) {
		t.Errorf("nobody: %v", err)
	}
	if _, err := n.find(Choice{PID: 7}); !errors.Is(err, ErrGone) {
		t.Errorf("a number that nobody has: %v", err)
	}
	n.process(5, "/usr/bin/kubelet", "--container-runtime-endpoint=unix:///run/other.sock")
	if s, err := n.find(Choice{}); err != nil || s.PID != 5 {
		t.Errorf("the only one: %d, %v", s.PID, err)
	}
	// In the second one's mounts cleave's socket has another name.
	n.process(6, "kubelet", "--container-runtime-endpoint=unix:///run/inside.sock")
	socket := n.path("root/6/run/inside.sock")
	n.write("root/6/run/x", "")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() //nolint:errcheck // ends with the test
	ours := n.path("cleave.sock")
	if err := os.Link(socket, ours); err != nil {
		t.Fatal(err)
	}
	if _, err := n.find(Choice{}); !errors.Is(err, ErrSeveral) || !strings.Contains(err.Error(), "process 5") || !strings.Contains(err.Error(), "unix:///run/inside.sock") {
		t.Errorf("two, and no socket to tell them apart: %v", err)
	}
	if s, err := n.find(Choice{Endpoints: []string{"/run/cleave/none.sock", ours}}); err != nil || s.PID != 6 {
		t.Errorf("two, one of them on our socket: %d, %v", s.PID, err)
	}
	if s, err := n.find(Choice{Endpoints: []string{"/run/cleave/none.sock", "/var/run/other.sock"}}); err != nil || s.PID != 5 {
		t.Errorf("two, one of them on a socket that does not exist yet: %d, %v", s.PID, err)
	}
	n.process(7, "k3s agent")
	n.process(8, "/hyperkube", "kubelet", "--root-dir=/h")
	if _, err := n.find(Choice{PID: 7}); !errors.Is(err, ErrEmbedded) {
		t.Errorf("k3s: %v", err)
	}
	if s, err := n.find(Choice{PID: 8}); err != nil || s.RootDir.Value != "/h" {
		t.Errorf("hyperkube: %+v, %v", s.RootDir, err)
	}
}

// TestProcessEndsMeanwhile: what is left of a process's folder at each moment of
// its end is told from an error.
func TestProcessEndsMeanwhile(t *testing.T) {
	t.Parallel()
	for _, missing := range []string{"stat", "cmdline", "cwd", "root"} {
		t.Run(missing, func(t *testing.T) {
			t.Parallel()
			n := newFakeNode(t)
			n.process(42, "kubelet")
			if err := os.Remove(n.path("proc/42/" + missing)); err != nil {
				t.Fatal(err)
			}
			if _, err := (Reader{Proc: n.path("proc")}).Read(42); !errors.Is(err, ErrGone) {
				t.Errorf("got %v", err)
			}
		})
	}
	n := newFakeNode(t)
	n.process(42, "kubelet")
	n.write("proc/42/cmdline", "")
	if _, err := (Reader{Proc: n.path("proc")}).Read(42); !errors.Is(err, ErrGone) {
		t.Errorf("a zombie: %v", err)
	}
	n.write("proc/42/stat", "42 (kubelet S")
	if _, err := (Reader{Proc: n.path("proc")}).Read(42); err == nil || errors.Is(err, ErrGone) {
		t.Errorf("a stat file that can't be: %v", err)
	}
}

// TestNumberIsReused: between two readings another process took the number. The
// arguments come through a pipe, so that it happens just then.
func TestNumberIsReused(t *testing.T) {
	t.Parallel()
	n := newFakeNode(t)
	n.process(42, "kubelet")
	if err := os.Remove(n.path("proc/42/cmdline")); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(n.path("proc/42/cmdline"), 0o600); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		_, err := (Reader{Proc: n.path("proc")}).Read(42)
		done <- err
	}()
	// Opening waits for the reader, which has read the time of start by then.
	args, err := os.OpenFile(n.path("proc/42/cmdline"), os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	n.write("proc/42/stat", "42 (kubelet) S 1 1 1 0 -1 4194560 1 0 0 0 1 1 0 0 20 0 9 0 9999 1 1 1")
	if _, err := args.WriteString("kubelet\x00"); err != nil {
		t.Fatal(err)
	}
	if err := args.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-done; !errors.Is(err, ErrGone) {
		t.Errorf("got %v", err)
	}
}

// TestArgumentsWithoutEnd: more than the kernel allows is not read.
func TestArgumentsWithoutEnd(t *testing.T) {
	t.Parallel()
	n := newFakeNode(t)
	n.process(42, "kubelet")
	if err := os.Truncate(n.path("proc/42/cmdline"), 1<<30); err != nil {
		t.Fatal(err)
	}
	if _, err := (Reader{Proc: n.path("proc")}).Read(42); err == nil || !strings.Contains(err.Error(), "larger than") {
		t.Errorf("got %v", err)
	}
}

// standing is a process of the kernel's that stands still like a kubelet.
type standing struct {
	*exec.Cmd
	stop io.Closer
}

func (s standing) pid() int { return s.Process.Pid }

// end lets it end.
func (s standing) end(t *testing.T) {
	t.Helper()
	if err := s.stop.Close(); err != nil {
		t.Fatal(err)
	}
	if err := s.Wait(); err != nil {
		t.Error(err)
	}
}

// standAsKubelet starts this program from a folder under a kubelet's name, with attributes of its process if they are given. It
// works in that folder.
func standAsKubelet(t *testing.T, dir string, attributes *syscall.SysProcAttr, args ...string) standing {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile(self)
	if err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(dir, "kubelet")
	// While it is open for writing no other test may fork: the child would hold it open, and the kernel would not run it (ETXTBSY).
	syscall.ForkLock.RLock()
	err = os.WriteFile(name, program, 0o755)
	syscall.ForkLock.RUnlock()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), name, args...)
	cmd.Env, cmd.Dir, cmd.SysProcAttr = append(os.Environ(), asKubelet+"=1"), dir, attributes
	stop, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(out, make([]byte, len("ready\n"))); err != nil {
		t.Fatal(err)
	}
	return standing{cmd, stop}
}

// TestRealProcess reads a process that the kernel has, in a working folder of
// its own.
func TestRealProcess(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "c.yaml"), []byte(head+"podLogsDir: logs\nevictionHard: {nodefs.available: 7%}\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	before := time.Now()
	cmd := standAsKubelet(t, dir, nil, "--config", "c.yaml", "--container-runtime-endpoint=unix:///run/cleave test.sock", "--eviction-soft", "", "-v=2")
	// Others may run kubelets here; this one is found among them.
	found, err := Reader{}.Named(t.Context(), "kubelet")
	if err != nil {
		t.Fatal(err)
	}
	if os.Geteuid() == 0 && !slices.Contains(found, cmd.pid()) { // a kubelet is root
		t.Errorf("process %d is not among %v", cmd.pid(), found)
	}
	s, err := Reader{}.Find(t.Context(), Choice{PID: cmd.pid()})
	if err != nil {
		t.Fatal(err)
	}
	got := []string{s.RuntimeEndpoint.Value, s.PodLogsDir.Value, fmt.Sprint(s.EvictionHard.Values()), s.EvictionSoft.From.String(), s.EvictionHard.From.String()}
	want := []string{"unix:///run/cleave test.sock", filepath.Join(dir, "logs"), "map[nodefs.available:7%]", "flag --eviction-soft", filepath.Join(dir, "c.yaml") + ":4"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	// The clock of boot and that of day drift apart a little.
	if d := s.Started.Sub(before).Abs(); d > time.Minute {
		t.Errorf("it is said to have started at %s, %s off", s.Started, d)
	}
	if s.Version.Known() {
		t.Errorf("a test program has the version %s", s.Version)
	}
	cmd.end(t)
	if _, err := (Reader{}).Read(cmd.pid()); !errors.Is(err, ErrGone) {
		t.Errorf("after its end: %v", err)
	}
}

// Whoever calls himself kubelet in a pod is not looked at.
func TestOthersAreNotTheKubelet(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes namespaces")
	}
	for name, attributes := range map[string]*syscall.SysProcAttr{
		"in a pod":                    {Cloneflags: syscall.CLONE_NEWPID},
		"with users of its own":       {Cloneflags: syscall.CLONE_NEWUSER, UidMappings: []syscall.SysProcIDMap{{HostID: 0, Size: 1}}},
		"in the host's PIDs, no root": {Credential: &syscall.Credential{Uid: 65534, Gid: 65534}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir, err := os.MkdirTemp("", "cleave-kubelet-")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := os.RemoveAll(dir); err != nil {
					t.Error(err)
				}
			})
			if err := os.Chmod(dir, 0o755); err != nil { // for the other user
				t.Fatal(err)
			}
			cmd := standAsKubelet(t, dir, attributes, "--container-runtime-endpoint=unix:///run/crio/crio.sock")
			found, err := Reader{}.Named(t.Context(), "kubelet")
			if err != nil {
				t.Fatal(err)
			}
			if slices.Contains(found, cmd.pid()) {
				t.Errorf("process %d is taken for the node's kubelet", cmd.pid())
			}
			cmd.end(t)
		})
	}
}

func TestVersionOf(t *testing.T) {
	t.Parallel()
	kubernetes := func(version string) debug.Module { return debug.Module{Path: "k8s.io/kubernetes", Version: version} }
	flags := func(s string) []debug.BuildSetting {
		return []debug.BuildSetting{{Key: "CGO_ENABLED", Value: "0"}, {Key: "-ldflags", Value: s}}
	}
	dep := kubernetes("v1.36.1")
	other := kubernetes("v0.0.0")
	other.Replace = &debug.Module{Path: "example.com/fork", Version: "v1.35.9-fork"}
	cases := []struct {
		name string
		info buildinfo.BuildInfo
		want Version
	}{
		{"stamped", buildinfo.BuildInfo{Main: kubernetes("(devel)"), Settings: flags("-s -w -X k8s.io/client-go/pkg/version.gitVersion=v1.0.0 -X 'k8s.io/component-base/version.gitVersion=v1.37.2-gke.1'")}, Version{1, 37, 2, "v1.37.2-gke.1"}},
		{"module", buildinfo.BuildInfo{Main: kubernetes("v1.37.2")}, Version{1, 37, 2, "v1.37.2"}},
		{"dependency", buildinfo.BuildInfo{Main: debug.Module{Path: "example.com/kubelet", Version: "v9.9.9"}, Deps: []*debug.Module{&dep}}, Version{1, 36, 1, "v1.36.1"}},
		{"replaced", buildinfo.BuildInfo{Deps: []*debug.Module{&other}}, Version{1, 35, 9, "v1.35.9-fork"}},
		{"its own tree", buildinfo.BuildInfo{Main: kubernetes("(devel)")}, Version{}},
		{"untagged", buildinfo.BuildInfo{Main: kubernetes("v0.0.0-20260101000000-abcdef")}, Version{}},
		{"another program", buildinfo.BuildInfo{Main: debug.Module{Path: "example.com/x", Version: "v1.37.2"}}, Version{}},
		{"nonsense", buildinfo.BuildInfo{Main: kubernetes("v1.99999.0")}, Version{}},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			if got := versionOf(&tc.info); got != tc.want {
				t.Errorf("got %+v, want %+v", got, tc.want)
			}
		})
	}
	if (Version{}).AtLeast(0, 0) || !(Version{1, 32, 0, "v1.32.0"}).AtLeast(1, 32) || (Version{1, 31, 9, "v1.31.9"}).AtLeast(1, 32) {
		t.Error("AtLeast is wrong")
	}
}

func FuzzStat(f *testing.F) {
	f.Add("42 (a) b) S 1 1 1 0 -1 4194560 1 0 0 0 1 1 0 0 20 0 9 0 4200 1 1 1")
	f.Add(")")
	f.Fuzz(func(t *testing.T, s string) {
		if _, err := parseStarted(s); err == nil && !strings.Contains(s, ")") {
			t.Errorf("%q was understood", s)
		}
	})
}
