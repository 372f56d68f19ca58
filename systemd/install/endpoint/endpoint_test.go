package endpoint_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cleave-cri/cleave/systemd/install/endpoint"
)

const (
	old      = "unix:///run/containerd/containerd.sock"
	wanted   = "unix:///run/cleave/cleave.sock"
	unit     = "etc/systemd/system/kubelet.service"
	file     = "etc/kubelet.yaml"
	withFile = "[Service]\nExecStart=/usr/bin/kubelet --config /etc/kubelet.yaml\n"
)

func tree(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// TestRefused: what is not understood for sure is not changed, and the message
// says what it is about.
func TestRefused(t *testing.T) {
	t.Parallel()
	flag := "--container-runtime-endpoint=" + old
	for _, tc := range []struct {
		name  string
		files map[string]string
		says  string
	}{
		{"no kubelet at all", nil, "no kubelet.service"},
		{"started by a shell", map[string]string{unit: "[Service]\nExecStart=/bin/sh -c 'exec kubelet " + flag + "'\n"}, "shell"},
		{"nothing says where", map[string]string{unit: "[Service]\nExecStart=/usr/bin/kubelet --v=2\n"}, "neither"},
		{"no command", map[string]string{unit: "[Service]\nType=notify\n"}, "no ExecStart"},
		{"another image endpoint as a flag", map[string]string{unit: "[Service]\nExecStart=/usr/bin/kubelet " + flag + " --image-service-endpoint=unix:///x\n"}, "image-service-endpoint"},
		{"another image endpoint in the file", map[string]string{unit: withFile, file: "imageServiceEndpoint: unix:///x\n"}, "imageServiceEndpoint"},
		{"the flag twice in one file", map[string]string{unit: "[Service]\nExecStart=/usr/bin/kubelet " + flag + " " + flag + "\n"}, "2 times"},
		{"the file is away", map[string]string{unit: withFile}, "kubelet.yaml"},
		{"the file is no YAML", map[string]string{unit: withFile, file: "a: [\n"}, "kubelet.yaml"},
		{"two documents", map[string]string{unit: withFile, file: "a: 1\n---\nb: 2\n"}, "several documents"},
		{"a number for the endpoint", map[string]string{unit: withFile, file: "containerRuntimeEndpoint: 7\n"}, "no text"},
		{"an anchor", map[string]string{unit: withFile, file: "containerRuntimeEndpoint: &e " + old + "\nother: *e\n"}, "without touching anything else"},
		{"a folded value", map[string]string{unit: withFile, file: "containerRuntimeEndpoint: >-\n  " + old + "\n"}, "without touching anything else"},
		{"flow style", map[string]string{unit: withFile, file: "{kind: KubeletConfiguration, containerRuntimeEndpoint: '" + old + "'}\n"}, "without touching anything else"},
		{"the text is in another value too", map[string]string{unit: withFile, file: "text: |\n  x\ncontainerRuntimeEndpoint: " + old + "\nmore: '\n\ncontainerRuntimeEndpoint: a'\n"}, "without touching anything else"},
		{"JSON without the key", map[string]string{unit: withFile, file: "{\"kind\": \"KubeletConfiguration\"}\n"}, "without touching anything else"},
		{
			"a later drop-in", map[string]string{
				unit: "[Service]\nExecStart=/usr/bin/kubelet --config-dir=/etc/kubelet.d\n", "etc/kubelet.d/99-z.conf": "containerRuntimeEndpoint: " + old + "\n",
			}, "99-z.conf",
		},
		{"k3s with its own containerd", map[string]string{"etc/systemd/system/k3s.service": "[Service]\nExecStart=/usr/local/bin/k3s server\n"}, "containerd of its own"},
		{
			"a distribution's unit whose flag is in a variable", map[string]string{
				"usr/lib/systemd/system/kubelet.service": "[Service]\nEnvironment=\"ARGS=" + flag + "\"\nExecStart=/usr/bin/kubelet $ARGS\n",
			}, "belongs to the distribution",
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			f, err := endpoint.Find(tree(t, tc.files))
			if err == nil {
				_, err = f.Set(wanted)
			}
			if !errors.Is(err, endpoint.ErrUnknown) || !strings.Contains(err.Error(), tc.says) {
				t.Errorf("got %v, want ErrUnknown that says %q", err, tc.says)
			}
		})
	}
}

// TestChanged are places of which only the endpoint may change.
func TestChanged(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name        string
		files       map[string]string
		path, after string
	}{
		{
			"JSON", map[string]string{unit: withFile, file: "{\"kind\": \"KubeletConfiguration\",\n \"containerRuntimeEndpoint\" : \"" + old + "\", \"maxPods\": 5}\n"},
			"/" + file, "{\"kind\": \"KubeletConfiguration\",\n \"containerRuntimeEndpoint\" : \"" + wanted + "\", \"maxPods\": 5}\n",
		},
		{
			"single quotes and a comment of the same text", map[string]string{unit: withFile, file: "# containerRuntimeEndpoint: a\ncontainerRuntimeEndpoint: '" + old + "' # b\n"},
			"/" + file, "# containerRuntimeEndpoint: a\ncontainerRuntimeEndpoint: '" + wanted + "' # b\n",
		},
		{
			"a file of variables", map[string]string{
				unit: "[Service]\nEnvironmentFile=/etc/sysconfig/kubelet\nExecStart=/usr/bin/kubelet --v=2 $ARGS\n", "etc/sysconfig/kubelet": "# ARGS\nARGS='--container-runtime-endpoint " + old + " --v=4'\n",
			},
			"/etc/sysconfig/kubelet", "# ARGS\nARGS='--container-runtime-endpoint " + wanted + " --v=4'\n",
		},
		{
			"a distribution's unit", map[string]string{
				"usr/lib/systemd/system/kubelet.service": "[Service]\nExecStart=/usr/bin/kubelet \\\n --container-runtime-endpoint=" + old + "\n",
			},
			"/etc/systemd/system/kubelet.service.d/99-cleave.conf",
			"# Written by `cleave install`: the command of /usr/lib/systemd/system/kubelet.service with another endpoint.\n[Service]\nExecStart=\n" +
				"ExecStart=/usr/bin/kubelet   --container-runtime-endpoint=" + wanted + "\n",
		},
		{
			"the last flag counts", map[string]string{
				unit: "[Service]\nEnvironment=A=--container-runtime-endpoint=unix:///first.sock\nExecStart=/usr/bin/kubelet ${A} --container-runtime-endpoint " + old + "\n",
			},
			"/" + unit, "[Service]\nEnvironment=A=--container-runtime-endpoint=unix:///first.sock\nExecStart=/usr/bin/kubelet ${A} --container-runtime-endpoint " + wanted + "\n",
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			f, err := endpoint.Find(tree(t, tc.files))
			if err != nil {
				t.Fatal(err)
			}
			changes, err := f.Set(wanted)
			if err != nil || len(changes) != 1 || f.Endpoint != old {
				t.Fatalf("found %s, changes %v (%v)", f.Endpoint, changes, err)
			}
			if c := changes[0]; c.Path != tc.path || c.After != tc.after {
				t.Errorf("%s becomes\n%q, want %s\n%q", c.Path, c.After, tc.path, tc.after)
			}
			if none, err := f.Set(f.Endpoint); err != nil || len(none) != 0 {
				t.Errorf("what is so already is changed: %v (%v)", none, err)
			}
		})
	}
}

// FuzzConfiguration: whatever a kubelet's file is, a change that is offered leaves
// every byte but the endpoint.
func FuzzConfiguration(f *testing.F) {
	f.Add("kind: KubeletConfiguration\ncontainerRuntimeEndpoint: " + old + "\n")
	f.Add("{\"containerRuntimeEndpoint\": \"" + old + "\"}")
	f.Add("a: &x 1\r\nb: *x")
	f.Fuzz(func(t *testing.T, text string) {
		found, err := endpoint.Find(tree(t, map[string]string{unit: withFile, file: text}))
		if err != nil {
			return
		}
		changes, err := found.Set(wanted)
		if err != nil || len(changes) == 0 {
			return
		}
		after := changes[0].After
		if changes[0].Old == "" {
			if !strings.HasPrefix(after, text) {
				t.Errorf("%q became %q", text, after)
			}
			return
		}
		if back := strings.Replace(after, wanted, changes[0].Old, 1); back != text && !strings.Contains(text, wanted) {
			t.Errorf("%q became %q", text, after)
		}
	})
}
