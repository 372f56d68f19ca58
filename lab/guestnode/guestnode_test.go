package guestnode

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/lab/busybox"
	"github.com/cleave-cri/cleave/lab/guest"
	"github.com/cleave-cri/cleave/lab/need"
)

func TestPrepare(t *testing.T) {
	t.Parallel()
	if _, err := busybox.Find(); errors.Is(err, busybox.ErrMissing) {
		need.Skip(t, "needs a static busybox: %v", err)
	}
	good := Options{Containerd: "/c", Shim: "/s", Ctr: "/ctr", Crictl: "/crictl", Cleave: "/cleave", Command: "true"}
	with := func(change func(*Options)) Options {
		o := good
		change(&o)
		return o
	}
	tests := []struct {
		name    string
		o       Options
		refused string
	}{
		{"good", good, ""},
		{"more programs and files", with(func(o *Options) {
			o.Programs = map[string]string{"kubelet": "/k"}
			o.Files = map[string]guest.File{"/etc/systemd/system/kubelet.service": {Content: []byte("[Service]\n")}}
		}), ""},
		{"no shim", with(func(o *Options) { o.Shim = "" }), "containerd-shim-runc-v2"},
		{"a file with a relative path", with(func(o *Options) { o.Files = map[string]guest.File{"etc/x": {}} }), "absolute"},
		{"a file with a path that leads elsewhere", with(func(o *Options) { o.Files = map[string]guest.File{"/etc/../x": {}} }), "clean"},
		{"a configuration that cleave would refuse", with(func(o *Options) { o.Configure = func(c *config.Config) { c.StateDir = "relative" } }), "stateDir"},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			o, err := Prepare(t.Context(), t.TempDir(), tc.o)
			if tc.refused != "" {
				if err == nil || !strings.Contains(err.Error(), tc.refused) {
					t.Errorf("got %v, want an error with %q", err, tc.refused)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			want := []string{"root/usr/local/bin/cleave", "root/etc/systemd/system/cleave.service", "root/etc/cleave/config.yaml", "root/etc/containerd/config.toml"}
			for name := range tc.o.Programs {
				want = append(want, "root/usr/local/bin/"+name)
			}
			for name := range tc.o.Files {
				want = append(want, "root"+name)
			}
			images := 0
			for name, f := range o.Files {
				if filepath.Dir(name) == "images" {
					images++
					if info, err := os.Stat(f.Path); err != nil || info.Size() == 0 {
						t.Errorf("%s: %v, %v", name, info, err)
					}
				}
			}
			for _, name := range want {
				if _, ok := o.Files[name]; !ok {
					t.Errorf("%s is not passed in", name)
				}
			}
			if images != 2 {
				t.Errorf("%d images are passed in", images)
			}
		})
	}
}

// TestPlain: a node before cleave came has its program and its configuration, and nothing that starts it.
func TestPlain(t *testing.T) {
	t.Parallel()
	if _, err := busybox.Find(); errors.Is(err, busybox.ErrMissing) {
		need.Skip(t, "needs a static busybox: %v", err)
	}
	o := Options{Containerd: "/c", Shim: "/s", Ctr: "/ctr", Crictl: "/crictl", Cleave: "/cleave", Plain: true}
	if err := AddKubelet(&o, ""); err == nil {
		t.Error("a kubelet without a program was taken")
	}
	if err := AddKubelet(&o, "/k"); err != nil {
		t.Fatal(err)
	}
	got, err := Prepare(t.Context(), t.TempDir(), o)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"usr/local/bin/cleave", "usr/local/bin/kubelet", "etc/cleave/config.yaml", "etc/systemd/system/containerd.service", "etc/systemd/system/kubelet.service"} {
		if _, ok := got.Files["root/"+name]; !ok {
			t.Errorf("%s is not passed in", name)
		}
	}
	for name := range got.Files {
		if strings.HasPrefix(name, "root/etc/systemd/system/cleave") {
			t.Errorf("%s is passed in", name)
		}
	}
	if strings.Contains(got.Command, "cleave snapshotter") || strings.Contains(got.Command, "start cleave") {
		t.Errorf("it starts cleave:\n%s", got.Command)
	}
	for _, name := range []string{"root/etc/kubernetes/kubelet.yaml", "root/etc/crictl.yaml"} {
		if text := string(got.Files[name].Content); !strings.Contains(text, "unix:///run/containerd/containerd.sock") {
			t.Errorf("%s is\n%s", name, text)
		}
	}
}

func TestAddCRIO(t *testing.T) {
	t.Parallel()
	var o Options
	if err := AddCRIO(&o, "/plugins", nil); err == nil || !strings.Contains(err.Error(), "AddKubernetes") {
		t.Errorf("a node without a kubelet: %v", err)
	}
	o.Configure = func(c *config.Config) { c.Measure.MaxCorePercent = 7 }
	if err := AddKubernetes(&o, Kubernetes{Etcd: "/e", APIServer: "/a", Kubelet: "/k"}); err != nil {
		t.Fatal(err)
	}
	plain := o.Files["/etc/kubernetes/kubelet.yaml"]
	if err := AddCRIO(&o, "/plugins", map[string]any{"podLogsDir": "/elsewhere", "syncFrequency": "10s"}); err != nil {
		t.Fatal(err)
	}
	got := map[string]any{}
	if err := yaml.Unmarshal(o.Files["/etc/kubernetes/kubelet.yaml"].Content, &got); err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]string{
		"cgroupDriver": "systemd", "containerRuntimeEndpoint": "unix:///var/run/crio/crio.sock", "podLogsDir": "/elsewhere", "syncFrequency": "10s",
	} {
		if got[key] != want {
			t.Errorf("the kubelet's %s is %v, want %s", key, got[key], want)
		}
	}
	if !strings.Contains(string(plain.Content), "cleave.sock") {
		t.Errorf("the kubelet of a node in mode cri has\n%s", plain.Content)
	}
	text, err := cleaveConfig(o.Configure)
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := config.Parse("cleave.yaml", text)
	if err != nil {
		t.Fatal(err)
	}
	if cfg.Mode != config.ModeCRIO || cfg.Listen.Endpoint.Path() != CRIOSocket || cfg.Filesystems.NodeFS != KubeletDir || cfg.Measure.MaxCorePercent != 7 {
		t.Errorf("cleave has\n%s", text)
	}
	if f := o.Files["/opt/cni/bin/bridge"]; f.Path != "/plugins/bridge" {
		t.Errorf("the plugin comes from %q", f.Path)
	}
}
