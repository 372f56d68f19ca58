package install_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/cleave-cri/cleave/lab/janitor"
	"github.com/cleave-cri/cleave/lab/need"
	"github.com/cleave-cri/cleave/systemd"
	"github.com/cleave-cri/cleave/systemd/install"
	"github.com/cleave-cri/cleave/systemd/install/endpoint"
	"github.com/cleave-cri/cleave/systemd/install/transaction"
)

func TestMain(m *testing.M) {
	janitor.Main()
	// Each step is written to disk for sure; a filesystem in memory makes that quick.
	const memory = "/dev/shm"
	if info, err := os.Stat(memory); err == nil && info.IsDir() && os.Getenv("TMPDIR") == "" {
		if err := os.Setenv("TMPDIR", memory); err != nil {
			panic(err)
		}
	}
	os.Exit(m.Run())
}

const (
	containerd = "unix:///run/containerd/containerd.sock"
	cleave     = "unix:///run/cleave/cleave.sock"
	stateDir   = "var/lib/cleave/install"
)

// shape is a node as files, and what an install makes of them.
type shape struct {
	want  endpoint.Shape
	files map[string]string
	// changed are the kubelet's files afterwards.
	changed map[string]string
}

const kubeadmUnit = `[Unit]
Description=kubelet: The Kubernetes Node Agent
[Service]
ExecStart=/usr/bin/kubelet
Restart=always
`

const kubeadmDropIn = `# Note: This dropin only works with kubeadm and kubelet v1.11+
[Service]
Environment="KUBELET_KUBECONFIG_ARGS=--bootstrap-kubeconfig=/etc/kubernetes/bootstrap-kubelet.conf --kubeconfig=/etc/kubernetes/kubelet.conf"
Environment="KUBELET_CONFIG_ARGS=--config=/var/lib/kubelet/config.yaml"
EnvironmentFile=-/var/lib/kubelet/kubeadm-flags.env
EnvironmentFile=-/etc/default/kubelet
ExecStart=
ExecStart=/usr/bin/kubelet $KUBELET_KUBECONFIG_ARGS $KUBELET_CONFIG_ARGS $KUBELET_KUBEADM_ARGS $KUBELET_EXTRA_ARGS
`

// settings have a comment, an unknown field and no newline at the end.
const settings = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n# keep me\nfutureField: {a: 1} # and me\n" +
	"containerRuntimeEndpoint: \"unix:///run/containerd/containerd.sock\"   # the runtime\nmaxPods: 110"

func shapes() map[string]shape {
	return map[string]shape{
		"kubeadm flags file": {
			endpoint.KubeadmFlags,
			map[string]string{
				"usr/lib/systemd/system/kubelet.service":                   kubeadmUnit,
				"usr/lib/systemd/system/kubelet.service.d/10-kubeadm.conf": kubeadmDropIn,
				"var/lib/kubelet/config.yaml":                              "kind: KubeletConfiguration\n",
				"var/lib/kubelet/kubeadm-flags.env":                        "KUBELET_KUBEADM_ARGS=\"--container-runtime-endpoint=unix:///run/containerd/containerd.sock --pod-infra-container-image=registry.k8s.io/pause:3.10\"\n",
				"etc/default/kubelet":                                      "KUBELET_EXTRA_ARGS=--v=2\n",
			},
			map[string]string{"var/lib/kubelet/kubeadm-flags.env": "KUBELET_KUBEADM_ARGS=\"--container-runtime-endpoint=unix:///run/cleave/cleave.sock --pod-infra-container-image=registry.k8s.io/pause:3.10\"\n"},
		},
		"kubeadm instance configuration": {
			endpoint.KubeadmInstance,
			map[string]string{
				"usr/lib/systemd/system/kubelet.service":                   kubeadmUnit,
				"usr/lib/systemd/system/kubelet.service.d/10-kubeadm.conf": kubeadmDropIn,
				"var/lib/kubelet/kubeadm-flags.env":                        "KUBELET_KUBEADM_ARGS=\"\"\n",
				"var/lib/kubelet/instance-config.yaml":                     "containerRuntimeEndpoint: \"unix:///run/containerd/containerd.sock\"\n",
				"var/lib/kubelet/config.yaml":                              settings,
			},
			map[string]string{
				"var/lib/kubelet/instance-config.yaml": "containerRuntimeEndpoint: \"unix:///run/cleave/cleave.sock\"\n",
				"var/lib/kubelet/config.yaml":          strings.Replace(settings, containerd, cleave, 1),
			},
		},
		"config file": {
			endpoint.File,
			map[string]string{
				"etc/systemd/system/kubelet.service": "[Service]\nExecStart=/opt/bin/kubelet \\\n  # the file\n  --config=/etc/kubernetes/kubelet.yaml \\\n  --kubeconfig /etc/kubernetes/kubeconfig\n",
				"etc/kubernetes/kubelet.yaml":        "kind: KubeletConfiguration\r\n# none is named\r\nmaxPods: 50",
			},
			map[string]string{"etc/kubernetes/kubelet.yaml": "kind: KubeletConfiguration\r\n# none is named\r\nmaxPods: 50\r\ncontainerRuntimeEndpoint: unix:///run/cleave/cleave.sock\r\n"},
		},
		"drop-in directory": {
			endpoint.DropIn,
			map[string]string{
				"etc/systemd/system/kubelet.service":            "[Service]\nExecStart=/usr/bin/kubelet --config=/etc/kubernetes/kubelet.yaml --config-dir=/etc/kubernetes/kubelet.conf.d\n",
				"etc/kubernetes/kubelet.yaml":                   settings,
				"etc/kubernetes/kubelet.conf.d/10-reserve.conf": "kind: KubeletConfiguration\napiVersion: kubelet.config.k8s.io/v1beta1\nsystemReserved: {memory: 1Gi}\n",
			},
			map[string]string{"etc/kubernetes/kubelet.conf.d/99-cleave.conf": "# Written by `cleave install`.\napiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\ncontainerRuntimeEndpoint: unix:///run/cleave/cleave.sock\n"},
		},
		"k3s with an external containerd": {
			endpoint.K3s,
			map[string]string{
				"etc/systemd/system/k3s.service":          "[Service]\nEnvironmentFile=-/etc/default/%N\nExecStart=/usr/local/bin/k3s \\\n    server \\\n",
				"etc/rancher/k3s/config.yaml":             "# cluster\ntoken: secret\ncontainer-runtime-endpoint: /run/containerd/old.sock\n",
				"etc/rancher/k3s/config.yaml.d/50-r.yaml": "container-runtime-endpoint: unix:///run/containerd/containerd.sock # ours\nnode-label: [a=b]\n",
			},
			map[string]string{"etc/rancher/k3s/config.yaml.d/50-r.yaml": "container-runtime-endpoint: unix:///run/cleave/cleave.sock # ours\nnode-label: [a=b]\n"},
		},
		"hand-written unit": {
			endpoint.Unit,
			map[string]string{
				"etc/systemd/system/kubelet.service": "# by hand\n[Service]\n# was: --container-runtime-endpoint=unix:///run/crio/crio.sock\nExecStart=/usr/local/bin/kubelet --container-runtime-endpoint unix:///run/containerd/containerd.sock \\\n\t--register-node=true\n",
			},
			map[string]string{
				"etc/systemd/system/kubelet.service": "# by hand\n[Service]\n# was: --container-runtime-endpoint=unix:///run/crio/crio.sock\nExecStart=/usr/local/bin/kubelet --container-runtime-endpoint unix:///run/cleave/cleave.sock \\\n\t--register-node=true\n",
			},
		},
	}
}

// node is a shape on disk, with a systemctl that only writes down what it does.
type node struct {
	t        *testing.T
	root     string
	did      []string
	told     []string
	failAt   int // the number of the action that fails, from 1; 0 for none
	redirect bool
	onStep   func(title string)
	onAction func()
}

func newNode(t *testing.T, files map[string]string) *node {
	t.Helper()
	return newNodeAt(t, t.TempDir(), files)
}

func newNodeAt(t *testing.T, root string, files map[string]string) *node {
	t.Helper()
	n := &node{t: t, root: root}
	for name, text := range files {
		writeFile(t, filepath.Join(n.root, name), text)
	}
	for _, dir := range []string{"etc/systemd/system", "var/lib"} {
		if err := os.MkdirAll(filepath.Join(n.root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return n
}

func writeFile(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o640); err != nil {
		t.Fatal(err)
	}
}

var errInjected = errors.New("injected")

// Perform does what can be seen in files of what systemctl does.
func (n *node) Perform(_ context.Context, a transaction.Action) error {
	n.did = append(n.did, a.String())
	if n.onAction != nil {
		n.onAction()
	}
	if len(n.did) == n.failAt {
		return fmt.Errorf("%s: %w", a, errInjected)
	}
	link := filepath.Join(n.root, systemd.AdminDir, "enabled~"+strings.Join(a.Args, " "))
	switch a.Verb {
	case install.VerbEnable:
		if err := os.Symlink("somewhere", link); !errors.Is(err, fs.ErrExist) {
			return err
		}
	case install.VerbDisable:
		if err := os.Remove(link); !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

func (n *node) installer() install.Installer {
	return install.Installer{
		Place:     transaction.Place{Dir: filepath.Join(n.root, stateDir), Root: n.root},
		Performer: n,
		Tell: func(s string) {
			n.told = append(n.told, s)
			if n.onStep != nil {
				n.onStep(s)
			}
		},
	}
}

func (n *node) plan() install.Plan {
	n.t.Helper()
	p, err := install.Make(n.wish())
	if err != nil {
		n.t.Fatal(err)
	}
	return p
}

func (n *node) undo() install.Plan {
	n.t.Helper()
	p, err := n.installer().Undo(nil)
	if err != nil {
		n.t.Fatal(err)
	}
	return p
}

func (n *node) wish() install.Wish {
	n.t.Helper()
	f, err := endpoint.Find(n.root)
	if err != nil {
		n.t.Fatal(err)
	}
	dropIn := []byte("version = 3\n")
	w := install.Wish{
		Root: n.root, Mode: "cri", Kubelet: f, Endpoint: cleave, Runtime: "/run/containerd/containerd.sock",
		Executable: systemd.Executable,
		Setting: systemd.Setting{
			Listen: "/run/cleave/cleave.sock", Roots: []string{"/mnt/i", "/mnt/c"},
			SnapshotterSockets: []string{"/run/cleave/snapshotter.sock", "/run/cleave/snapshotter-status.sock"},
		},
		ConfigPath: "/etc/cleave/config.yaml", Example: []byte("version: 1\nmode: crio # which\n"),
		ContainerdUnit: "containerd.service", ContainerdPath: "/etc/containerd/conf.d/99-cleave-snapshotter.toml", ContainerdDropIn: dropIn,
	}
	if n.redirect {
		w.Redirect = &install.Redirect{
			From: "/run/containerd/containerd.sock", To: behind, Path: "/etc/containerd/conf.d/99-cleave-redirect.toml", DropIn: []byte("version = 3 # elsewhere\n"),
		}
		w.Runtime, w.Setting.Listen, w.Setting.FolderMode = behind, w.Redirect.From, "0711"
	}
	return w
}

const behind = "/run/containerd/behind-cleave.sock"

// files is all that is on the node but the journal's folder: contents, modes and
// links.
func (n *node) files() map[string]string {
	n.t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(n.root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(n.root, path)
		if err != nil {
			return err
		}
		if strings.HasPrefix(rel, "var/lib/cleave") {
			return nil
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		text := info.Mode().String() + " "
		switch {
		case info.Mode().IsRegular():
			content, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			text += string(content)
		case info.Mode()&fs.ModeSymlink != 0:
			to, err := os.Readlink(path)
			if err != nil {
				return err
			}
			text += to
		}
		out[rel] = text
		return nil
	})
	if err != nil {
		n.t.Fatal(err)
	}
	return out
}

func (n *node) same(want map[string]string, when string) {
	n.t.Helper()
	if d := cmp.Diff(want, n.files()); d != "" {
		n.t.Errorf("%s the node is not as it was (-want +got):\n%s", when, d)
	}
}

// TestInAndOut installs on each shape, looks at what is changed, and takes all
// of it away again.
func TestInAndOut(t *testing.T) {
	t.Parallel()
	for name, s := range shapes() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, s.files)
			before := n.files()
			f, err := endpoint.Find(n.root)
			if err != nil || f.Shape != s.want || endpoint.Socket(f.Endpoint) != "/run/containerd/containerd.sock" {
				t.Fatalf("found %s with %s (%v), want %s", f.Shape, f.Endpoint, err, s.want)
			}
			p := n.plan()
			var shown strings.Builder
			if err := p.Write(&shown); err != nil {
				t.Fatal(err)
			}
			n.same(before, "after making and showing a plan")
			if !strings.Contains(shown.String(), "+++ b/") || !strings.Contains(shown.String(), "systemctl restart "+f.Service) {
				t.Errorf("the plan does not show what it does:\n%s", &shown)
			}
			if err := n.installer().Run(t.Context(), p); err != nil {
				t.Fatal(err)
			}
			after := n.files()
			for file, text := range s.changed {
				if got := after[file]; !strings.HasSuffix(got, " "+text) {
					t.Errorf("%s is\n%q, want\n%q", file, got, text)
				}
				if was, ok := before[file]; ok && strings.Fields(was)[0] != strings.Fields(after[file])[0] {
					t.Errorf("%s has another mode now", file)
				}
			}
			for file := range before {
				if _, meant := s.changed[file]; !meant && before[file] != after[file] {
					t.Errorf("%s was changed", file)
				}
			}
			if !strings.HasSuffix(after["etc/cleave/config.yaml"], "mode: cri # which\n") {
				t.Errorf("the configuration is %q", after["etc/cleave/config.yaml"])
			}
			if again, err := endpoint.Find(n.root); err != nil || again.Endpoint != cleave {
				t.Errorf("the kubelet is told %q afterwards (%v)", again.Endpoint, err)
			}
			inOrder(t, n.did, "start cleave-snapshotter.service", "check snapshotter", "restart containerd.service", "check runtime /run/containerd/containerd.sock",
				"start cleave.service", "check cleave /run/cleave/cleave.sock", "restart "+f.Service, "check kubelet "+cleave+" "+f.Service)

			n.did = nil
			if err := n.installer().Run(t.Context(), p); !errors.Is(err, install.ErrInstalled) {
				t.Errorf("a second install ended with %v", err)
			}
			if _, err := n.installer().Undo([]string{"k8s.io: abc"}); err == nil || !strings.Contains(err.Error(), "k8s.io: abc") {
				t.Errorf("an uninstall with a container on the snapshotter ended with %v", err)
			}
			undo, err := n.installer().Undo(nil)
			if err != nil {
				t.Fatal(err)
			}
			if err := n.installer().Run(t.Context(), undo); err != nil {
				t.Fatal(err)
			}
			n.same(before, "after the uninstall")
			inOrder(t, n.did, "restart "+f.Service, "check kubelet "+f.Endpoint+" "+f.Service, "stop cleave.socket cleave.service cleave-passthrough.service", "release-snapshots",
				"restart containerd.service", "stop cleave-snapshotter.socket cleave-snapshotter.service", "daemon-reload")
			if _, err := n.installer().Undo(nil); !errors.Is(err, install.ErrNotInstalled) {
				t.Errorf("a second uninstall ended with %v", err)
			}
		})
	}
}

// TestRedirect: containerd moves before cleave takes its place, and back after
// cleave has left; the kubelet's files stay as they are.
func TestRedirect(t *testing.T) {
	t.Parallel()
	n := newNode(t, shapes()["config file"].files)
	n.redirect = true
	kubelet := n.files()["etc/kubernetes/kubelet.yaml"]
	writeFile(t, filepath.Join(n.root, "etc/cleave/config.yaml"),
		"version: 1\nlisten:\n  # here\n  endpoint: \"unix:///run/cleave/cleave.sock\" # for now\nruntime:\n    namespace: k8s.io")
	before := n.files()
	if err := n.installer().Run(t.Context(), n.plan()); err != nil {
		t.Fatal(err)
	}
	after := n.files()
	if after["etc/kubernetes/kubelet.yaml"] != kubelet {
		t.Error("the kubelet's file was changed")
	}
	want := "version: 1\nlisten:\n  # here\n  endpoint: unix:///run/containerd/containerd.sock # for now\n" +
		"runtime:\n    endpoint: unix:///run/containerd/behind-cleave.sock\n    namespace: k8s.io\nmode: cri\n"
	if _, got, _ := strings.Cut(after["etc/cleave/config.yaml"], " "); got != want {
		t.Errorf("the configuration is\n%s\nwant\n%s", got, want)
	}
	for file, text := range map[string]string{
		"etc/systemd/system/cleave.socket.d/50-cleave-install.conf":  "ListenStream=/run/containerd/containerd.sock\nDirectoryMode=0711\n",
		"etc/systemd/system/cleave.service.d/50-cleave-install.conf": "ReadWritePaths=-/run/containerd\n",
		"etc/cleave/passthrough.env":                                 "--listen=/run/containerd/containerd.sock --runtime-endpoint=" + behind + "\n",
	} {
		if !strings.HasSuffix(after[file], text) {
			t.Errorf("%s is %q, want %q at its end", file, after[file], text)
		}
	}
	told := "check kubelet unix:///run/containerd/containerd.sock kubelet.service"
	inOrder(t, n.did, "start cleave-snapshotter.service", "restart containerd.service", "check runtime "+behind, "start cleave.socket", "start cleave.service",
		"check cleave /run/containerd/containerd.sock", told)
	if restarts := slices.DeleteFunc(slices.Clone(n.did), func(a string) bool { return a != "restart containerd.service" }); len(restarts) != 1 {
		t.Errorf("containerd was restarted %d times", len(restarts))
	}
	n.did = nil
	undo, err := n.installer().Undo(nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := n.installer().Run(t.Context(), undo); err != nil {
		t.Fatal(err)
	}
	n.same(before, "after the uninstall")
	inOrder(t, n.did, "stop cleave.socket cleave.service cleave-passthrough.service", "release-snapshots", "restart containerd.service", "check runtime /run/containerd/containerd.sock", told)

	w := n.wish()
	w.States = map[string]install.UnitState{systemd.Socket: {Active: true}}
	if _, err := install.Make(w); err == nil || !strings.Contains(err.Error(), "systemctl stop") {
		t.Errorf("with a cleave that runs: %v", err)
	}
}

// TestConfigurationsThatAreNotEdited: what can't be set alone is left to people.
func TestConfigurationsThatAreNotEdited(t *testing.T) {
	t.Parallel()
	for name, text := range map[string]string{
		"a table in one line":  "version: 1\nruntime: {endpoint: /run/containerd/containerd.sock}\n",
		"an empty table":       "version: 1\nruntime:\nlisten:\n  endpoint: /a\n",
		"an anchor":            "version: 1\nruntime:\n  endpoint: &a /run/containerd/containerd.sock\nlisten:\n  endpoint: *a\n",
		"a value of two lines": "version: 1\nruntime:\n  endpoint: >-\n    /run/containerd/containerd.sock\n",
		"all in one line":      "{version: 1}\n",
		"no table":             "- version\n",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, shapes()["config file"].files)
			n.redirect = true
			writeFile(t, filepath.Join(n.root, "etc/cleave/config.yaml"), text)
			if _, err := install.Make(n.wish()); err == nil || !strings.Contains(err.Error(), "/etc/cleave/config.yaml") {
				t.Errorf("got %v", err)
			}
		})
	}
}

func inOrder(t *testing.T, did []string, want ...string) {
	t.Helper()
	at := 0
	for _, w := range want {
		i := slices.Index(did[at:], w)
		if i < 0 {
			t.Errorf("%q is not done, or not after what comes before it, in:\n  %s", w, strings.Join(did, "\n  "))
			return
		}
		at += i + 1
	}
}

// TestFailureAtEveryStep: whatever action or change of a file fails, in an install
// or an uninstall, every file is as it was before.
func TestFailureAtEveryStep(t *testing.T) {
	t.Parallel()
	for name, s := range shapes() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, uninstall := range []bool{false, true} {
				action := true
				for at := 1; ; at++ {
					failed := func(spoil func(n *node)) bool {
						n := newNode(t, s.files)
						n.redirect = s.want == endpoint.File
						p := n.plan()
						if uninstall {
							if err := n.installer().Run(t.Context(), p); err != nil {
								t.Fatal(err)
							}
							var err error
							if p, err = n.installer().Undo(nil); err != nil {
								t.Fatal(err)
							}
						}
						before := n.files()
						n.did, n.told = nil, nil
						spoil(n)
						err := n.installer().Run(t.Context(), p)
						if err == nil {
							return false
						}
						var f *transaction.Failure
						if !errors.As(err, &f) || len(f.Left) > 0 {
							t.Errorf("failed at %d with %v", at, err)
						}
						n.same(before, fmt.Sprintf("uninstall %v, after a failure at %d (%v)", uninstall, at, err))
						// The journal is gone, and it can be tried again: of that some will do.
						if at%4 != 0 {
							return true
						}
						n.failAt, n.onStep = 0, nil
						if err := n.installer().Run(t.Context(), p); err != nil {
							t.Errorf("uninstall %v, tried again after a failure at %d: %v", uninstall, at, err)
						}
						return true
					}
					action = action && failed(func(n *node) { n.failAt = at })
					edit := failed(func(n *node) {
						steps := 0
						n.onStep = func(string) {
							if steps++; steps == at {
								loseSwapped(t, n.root)
							}
						}
					})
					if !action && !edit {
						if at < 13 {
							t.Errorf("uninstall %v: only %d failures could be made", uninstall, at-1)
						}
						break
					}
				}
			}
		})
	}
}

// loseSwapped takes away the new files that are not in place yet, so that the
// next change fails.
func loseSwapped(t *testing.T, root string) {
	t.Helper()
	err := filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".cleave-swap") {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if strings.Contains(string(text), "cleave") {
			return os.Remove(path)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// TestPowerCut: whenever the power goes, the rest can be done, or all of it taken
// back.
func TestPowerCut(t *testing.T) {
	t.Parallel()
	for name, s := range shapes() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, s.files)
			n.redirect = s.want == endpoint.File
			before := n.files()
			var cuts []string
			cut := func() {
				to := filepath.Join(t.TempDir(), "cut")
				if err := os.CopyFS(to, os.DirFS(n.root)); err != nil {
					t.Fatal(err)
				}
				cuts = append(cuts, to)
			}
			n.onStep, n.onAction = func(string) { cut() }, cut
			if err := n.installer().Run(t.Context(), n.plan()); err != nil {
				t.Fatal(err)
			}
			after := n.files()
			if len(cuts) < 20 {
				t.Fatalf("only %d cuts", len(cuts))
			}
			for i, root := range cuts {
				again := filepath.Join(t.TempDir(), "again")
				if err := os.CopyFS(again, os.DirFS(root)); err != nil {
					t.Fatal(err)
				}
				c := &node{t: t, root: root}
				if err := c.installer().Run(t.Context(), install.Plan{}); !errors.Is(err, transaction.ErrUnfinished) {
					t.Errorf("cut %d: another start ended with %v", i, err)
				}
				if found, err := c.installer().Resume(t.Context()); err != nil || !found {
					t.Errorf("cut %d: resuming: %v, %v", i, found, err)
				}
				c.same(modesOf(after, c.files()), fmt.Sprintf("cut %d, after resuming", i))
				c = &node{t: t, root: again}
				if found, err := c.installer().Revert(t.Context()); err != nil || !found {
					t.Errorf("cut %d: reverting: %v, %v", i, found, err)
				}
				c.same(modesOf(before, c.files()), fmt.Sprintf("cut %d, after reverting", i))
			}
		})
	}
}

// TestPowerCutAtTheEnd: all is done, and the power goes while what lies beside the
// files is taken away. The rest can be done all the same, or all be taken back.
func TestPowerCutAtTheEnd(t *testing.T) {
	t.Parallel()
	for _, uninstall := range []bool{false, true} {
		n := newNode(t, shapes()["kubeadm instance configuration"].files)
		n.redirect = uninstall
		p := n.plan()
		if uninstall {
			if err := n.installer().Run(t.Context(), p); err != nil {
				t.Fatal(err)
			}
			p = n.undo()
		}
		before := n.files()
		var last string
		n.onAction = func() {
			last = filepath.Join(t.TempDir(), "cut")
			if err := os.CopyFS(last, os.DirFS(n.root)); err != nil {
				t.Fatal(err)
			}
		}
		if err := n.installer().Run(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		after := n.files()
		for gone := 1; ; gone++ {
			cut := func() (*node, bool) {
				c := &node{t: t, root: filepath.Join(t.TempDir(), "again")}
				if err := os.CopyFS(c.root, os.DirFS(last)); err != nil {
					t.Fatal(err)
				}
				left := gone
				for _, s := range p.Steps {
					if s.Edit == nil || left == 0 {
						continue
					}
					path := filepath.Join(c.root, filepath.Dir(s.Edit.Path), "."+filepath.Base(s.Edit.Path)+".cleave-swap")
					if err := os.Remove(path); err == nil {
						left--
					} else if !errors.Is(err, fs.ErrNotExist) {
						t.Fatal(err)
					}
				}
				return c, left == 0
			}
			c, more := cut()
			if !more {
				if gone < 3 {
					t.Errorf("uninstall %v: only %d files lay beside others", uninstall, gone-1)
				}
				break
			}
			if found, err := c.installer().Resume(t.Context()); err != nil || !found {
				t.Errorf("uninstall %v, %d gone: resuming: %v, %v", uninstall, gone, found, err)
			}
			c.same(modesOf(after, c.files()), fmt.Sprintf("uninstall %v, %d gone, after resuming", uninstall, gone))
			c, _ = cut()
			if found, err := c.installer().Revert(t.Context()); err != nil || !found {
				t.Errorf("uninstall %v, %d gone: reverting: %v, %v", uninstall, gone, found, err)
			}
			c.same(modesOf(before, c.files()), fmt.Sprintf("uninstall %v, %d gone, after reverting", uninstall, gone))
		}
	}
}

// TestPowerCutWhileStaging: of a file that was to be laid beside another there may
// be nothing, or a part.
func TestPowerCutWhileStaging(t *testing.T) {
	t.Parallel()
	for _, part := range []float64{0, 0.5} {
		n := newNode(t, shapes()["config file"].files)
		before := n.files()
		cut := filepath.Join(t.TempDir(), "cut")
		n.onStep = func(string) {
			if _, err := os.Stat(cut); err == nil {
				return
			}
			if err := os.CopyFS(cut, os.DirFS(n.root)); err != nil {
				t.Fatal(err)
			}
		}
		if err := n.installer().Run(t.Context(), n.plan()); err != nil {
			t.Fatal(err)
		}
		swap := filepath.Join(cut, "etc/kubernetes/.kubelet.yaml.cleave-swap")
		info, err := os.Stat(swap)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(swap, int64(part*float64(info.Size()))); err != nil {
			t.Fatal(err)
		}
		c := &node{t: t, root: cut}
		if found, err := c.installer().Revert(t.Context()); err != nil || !found {
			t.Errorf("with %v of a file: reverting: %v, %v", part, found, err)
		}
		c.same(modesOf(before, c.files()), fmt.Sprintf("with %v of a file, after reverting", part))
	}
}

// TestRecordGoesBeforeTheJournal: an uninstall that can't take the record away, or
// ends just then, is unfinished; it can be resumed, and is not begun anew.
func TestRecordGoesBeforeTheJournal(t *testing.T) {
	t.Parallel()
	need.Lab(t)
	n := newNode(t, shapes()["config file"].files)
	before := n.files()
	if err := n.installer().Run(t.Context(), n.plan()); err != nil {
		t.Fatal(err)
	}
	undo := n.undo()
	record := filepath.Join(n.root, stateDir, "installed.json")
	// Nobody can remove a file that is a mount point.
	if err := syscall.Mount(record, record, "", syscall.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	err := n.installer().Run(t.Context(), undo)
	if err := syscall.Unmount(record, 0); err != nil {
		t.Fatal(err)
	}
	if !errors.Is(err, syscall.EBUSY) {
		t.Errorf("it ended with %v", err)
	}
	if _, err := n.installer().Undo(nil); !errors.Is(err, transaction.ErrUnfinished) {
		t.Errorf("another uninstall is planned: %v", err)
	}
	// The power goes between the two.
	if err := os.Remove(record); err != nil {
		t.Fatal(err)
	}
	if _, err := n.installer().Undo(nil); !errors.Is(err, transaction.ErrUnfinished) || errors.Is(err, install.ErrNotInstalled) {
		t.Errorf("without the record: %v", err)
	}
	n.did = nil
	if found, err := n.installer().Revert(t.Context()); err != nil || !found {
		t.Errorf("reverting what was done: %v, %v", found, err)
	}
	n.same(before, "after an uninstall that only had a journal left")
	if len(n.did) > 0 {
		t.Errorf("it did %q", n.did)
	}
	if _, err := n.installer().Undo(nil); !errors.Is(err, install.ErrNotInstalled) {
		t.Errorf("afterwards: %v", err)
	}
}

// TestUnderWayIsNotUninstalled: an install that is under way is told apart from none,
// after which `cleave uninstall --purge` would delete what it is about to use.
func TestUnderWayIsNotUninstalled(t *testing.T) {
	t.Parallel()
	n := newNode(t, shapes()["config file"].files)
	asked := 0
	n.onAction = func() {
		asked++
		other := &node{t: t, root: n.root}
		if _, err := other.installer().Undo(nil); !errors.Is(err, transaction.ErrBusy) || errors.Is(err, install.ErrNotInstalled) {
			t.Errorf("in the middle of an install: %v", err)
		}
	}
	if err := n.installer().Run(t.Context(), n.plan()); err != nil || asked == 0 {
		t.Errorf("%v, asked %d times", err, asked)
	}
}

// TestFolderThatBecameALink: a folder that the install made, and that somebody
// moved elsewhere, is not taken from them.
func TestFolderThatBecameALink(t *testing.T) {
	t.Parallel()
	n := newNode(t, shapes()["config file"].files)
	if err := n.installer().Run(t.Context(), n.plan()); err != nil {
		t.Fatal(err)
	}
	made := filepath.Join(n.root, "etc/containerd/conf.d")
	err := os.Rename(made, made+".moved")
	if err == nil {
		err = os.Symlink("conf.d.moved", made)
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := n.installer().Run(t.Context(), n.undo()); err != nil {
		t.Fatal(err)
	}
	if to, err := os.Readlink(made); err != nil || to != "conf.d.moved" {
		t.Errorf("the link is %q, %v", to, err)
	}
	if left, err := os.ReadDir(made); err != nil || len(left) > 0 {
		t.Errorf("left in it are %v, %v", left, err)
	}
}

// TestSnapshotsAreRemovedBeforeContainerdMayMove: once the redirect is taken out, a
// restart of the machine has containerd where cleave's configuration does not say.
func TestSnapshotsAreRemovedBeforeContainerdMayMove(t *testing.T) {
	t.Parallel()
	n := newNode(t, shapes()["config file"].files)
	n.redirect = true
	if err := n.installer().Run(t.Context(), n.plan()); err != nil {
		t.Fatal(err)
	}
	var order []string
	for _, s := range n.undo().Steps {
		if s.Edit != nil && s.Edit.Purpose == "redirect" {
			order = append(order, "redirect")
		}
		for _, a := range s.Do {
			if a.Verb == install.VerbRelease {
				order = append(order, "release")
			}
		}
	}
	if d := cmp.Diff([]string{"release", "redirect"}, order); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

// modesOf takes the modes of files from a second tree: a copy of a tree has others.
func modesOf(files, modes map[string]string) map[string]string {
	out := maps.Clone(files)
	for name, text := range files {
		mode, _, _ := strings.Cut(modes[name], " ")
		_, rest, _ := strings.Cut(text, " ")
		out[name] = mode + " " + rest
	}
	return out
}

// TestChangedSinceTheInstall: in a file that somebody changed only the endpoint
// is set back, and what cannot be told apart is refused.
func TestChangedSinceTheInstall(t *testing.T) {
	t.Parallel()
	n := newNode(t, shapes()["kubeadm instance configuration"].files)
	if err := n.installer().Run(t.Context(), n.plan()); err != nil {
		t.Fatal(err)
	}
	config := filepath.Join(n.root, "var/lib/kubelet/config.yaml")
	writeFile(t, config, "kind: KubeletConfiguration\ncontainerRuntimeEndpoint: unix:///run/cleave/cleave.sock\nmaxPods: 250\n")
	writeFile(t, filepath.Join(n.root, "etc/cleave/config.yaml"), "version: 1\nmode: observe\n")
	undo, err := n.installer().Undo(nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(undo.Notes) != 1 || !strings.Contains(undo.Notes[0], "/etc/cleave/config.yaml") {
		t.Errorf("the notes are %q, want one about the configuration", undo.Notes)
	}
	if err := n.installer().Run(t.Context(), undo); err != nil {
		t.Fatal(err)
	}
	if got := n.files()["var/lib/kubelet/config.yaml"]; !strings.HasSuffix(got, "endpoint: unix:///run/containerd/containerd.sock\nmaxPods: 250\n") &&
		!strings.HasSuffix(got, "Endpoint: unix:///run/containerd/containerd.sock\nmaxPods: 250\n") {
		t.Errorf("the kubelet's file is %q", got)
	}

	n = newNode(t, shapes()["drop-in directory"].files)
	if err := n.installer().Run(t.Context(), n.plan()); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"etc/kubernetes/kubelet.conf.d/99-cleave.conf", "etc/containerd/conf.d/99-cleave-snapshotter.toml"} {
		full := filepath.Join(n.root, path)
		text, err := os.ReadFile(full)
		if err != nil {
			t.Fatal(err)
		}
		writeFile(t, full, string(text)+"# mine\n")
		if _, err := n.installer().Undo(nil); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("with %s changed: %v", path, err)
		}
		writeFile(t, full, string(text))
	}
}

// TestFileChangedWhileInstalling: what somebody else wrote meanwhile is not lost.
func TestFileChangedWhileInstalling(t *testing.T) {
	t.Parallel()
	n := newNode(t, shapes()["config file"].files)
	p := n.plan()
	path := filepath.Join(n.root, "etc/kubernetes/kubelet.yaml")
	writeFile(t, path, "kind: KubeletConfiguration # new\n")
	if err := n.installer().Run(t.Context(), p); !errors.Is(err, transaction.ErrChanged) {
		t.Errorf("a stale plan ended with %v", err)
	}
	p = n.plan()
	n.onStep = func(title string) {
		if title == "change /etc/kubernetes/kubelet.yaml" {
			writeFile(t, path, "kind: KubeletConfiguration # newer\n")
		}
	}
	if err := n.installer().Run(t.Context(), p); !errors.Is(err, transaction.ErrChanged) {
		t.Errorf("a file that was changed under way ended with %v", err)
	}
	if got := n.files()["etc/kubernetes/kubelet.yaml"]; !strings.HasSuffix(got, "# newer\n") {
		t.Errorf("the other's file is %q", got)
	}
}

// TestTwoAtOnce: the second is refused while the first is at it.
func TestTwoAtOnce(t *testing.T) {
	t.Parallel()
	n := newNode(t, shapes()["config file"].files)
	p := n.plan()
	tried := 0
	n.onAction = func() {
		tried++
		second := &node{t: t, root: n.root}
		if err := second.installer().Run(t.Context(), p); !errors.Is(err, transaction.ErrBusy) {
			t.Errorf("a second install ended with %v", err)
		}
		if _, err := second.installer().Revert(t.Context()); !errors.Is(err, transaction.ErrBusy) {
			t.Errorf("a second one that reverts ended with %v", err)
		}
		if err := second.installer().Ready(); !errors.Is(err, transaction.ErrBusy) {
			t.Errorf("a second one that only looks ended with %v", err)
		}
	}
	if err := n.installer().Run(t.Context(), p); err != nil || tried == 0 {
		t.Errorf("%v, %d tries", err, tried)
	}
}

// TestToldToStop: Ctrl-C in the middle takes everything back.
func TestToldToStop(t *testing.T) {
	t.Parallel()
	n := newNode(t, shapes()["config file"].files)
	before := n.files()
	ctx, cancel := context.WithCancel(t.Context())
	n.onStep = func(title string) {
		if strings.HasPrefix(title, "start cleave.service") {
			cancel()
		}
	}
	if err := n.installer().Run(ctx, n.plan()); !errors.Is(err, context.Canceled) {
		t.Errorf("it ended with %v", err)
	}
	n.same(before, "after it was told to stop")
}

// TestNoRoom: whichever disk is full or read-only, nothing is changed and nothing is
// started.
func TestNoRoom(t *testing.T) {
	t.Parallel()
	run := need.Lab(t)
	for _, where := range []string{"etc", "var/lib/kubelet", stateDir} {
		for name, why := range map[string]error{"full": syscall.ENOSPC, "read-only": syscall.EROFS} {
			t.Run(name+" "+where, func(t *testing.T) {
				s := shapes()["kubeadm instance configuration"]
				n := newNodeAt(t, filepath.Join(run.Dir(), name, where), nil)
				disk := filepath.Join(n.root, where)
				if err := os.MkdirAll(disk, 0o755); err != nil {
					t.Fatal(err)
				}
				if err := syscall.Mount("tmpfs", disk, "tmpfs", 0, "size=64k"); err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() {
					if err := syscall.Unmount(disk, 0); err != nil {
						t.Error(err)
					}
				})
				for name, text := range s.files {
					writeFile(t, filepath.Join(n.root, name), text)
				}
				if err := os.MkdirAll(filepath.Join(n.root, systemd.AdminDir), 0o755); err != nil {
					t.Fatal(err)
				}
				if errors.Is(why, syscall.ENOSPC) {
					fill(t, filepath.Join(disk, "fill"))
				} else if err := syscall.Mount("", disk, "", syscall.MS_REMOUNT|syscall.MS_RDONLY, ""); err != nil {
					t.Fatal(err)
				}
				before := n.files()
				if err := n.installer().Run(t.Context(), n.plan()); !errors.Is(err, why) {
					t.Errorf("it ended with %v", err)
				}
				n.same(before, "with no room")
				if len(n.did) > 0 {
					t.Errorf("it did %q", n.did)
				}
			})
		}
	}
}

// fill writes a file until no byte more has room.
func fill(t *testing.T, path string) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close() //nolint:errcheck // a test's own
	for {
		if _, err := f.Write(make([]byte, 4<<10)); err != nil {
			if !errors.Is(err, syscall.ENOSPC) {
				t.Fatal(err)
			}
			return
		}
	}
}

// TestPackagedUnitsAreNotWritten: where a package brought the units, only what is
// this node's own is added.
func TestPackagedUnitsAreNotWritten(t *testing.T) {
	t.Parallel()
	n := newNode(t, shapes()["config file"].files)
	units, err := systemd.Units(systemd.Executable)
	if err != nil {
		t.Fatal(err)
	}
	for _, u := range units {
		writeFile(t, filepath.Join(n.root, systemd.VendorDir, u.Name), string(u.Content))
	}
	for _, s := range n.plan().Steps {
		if s.Edit != nil && filepath.Dir(s.Edit.Path) == systemd.AdminDir {
			t.Errorf("it would write %s", s.Edit.Path)
		}
	}
}

// TestCleaveThatRunsAlready works by the new configuration afterwards, and by the
// old one when that is taken back.
func TestCleaveThatRunsAlready(t *testing.T) {
	t.Parallel()
	n := newNode(t, map[string]string{"etc/cleave/config.yaml": "version: 1\nmode: cri\n"})
	p, err := install.Make(install.Wish{
		Root: n.root, Mode: "observe", Executable: systemd.Executable, Setting: systemd.Setting{Listen: "/run/cleave/cleave.sock"},
		Runtime: "/run/containerd/containerd.sock", ConfigPath: "/etc/cleave/config.yaml", ConfiguredMode: "cri",
		States: map[string]install.UnitState{systemd.Service: {Enabled: true, Active: true}, systemd.Socket: {Enabled: true, Active: true}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := n.installer().Run(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	want := []string{"daemon-reload", "stop cleave.socket cleave.service", "start cleave.socket", "start cleave.service"}
	if d := cmp.Diff(append(slices.Clone(want), "check cleave /run/cleave/cleave.sock"), n.did); d != "" {
		t.Errorf("the install did (-want +got):\n%s", d)
	}
	n.did = nil
	undo, err := n.installer().Undo(nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := n.installer().Run(t.Context(), undo); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, n.did); d != "" {
		t.Errorf("the uninstall did (-want +got):\n%s", d)
	}
}
