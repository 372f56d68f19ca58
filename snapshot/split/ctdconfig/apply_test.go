package ctdconfig

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/cleave-cri/cleave/integration/toolchain/bin"
)

// node is a folder like a node's /etc/containerd, with the real containerd to
// read it.
type node struct {
	target Target
	o      Options
}

func newNode(t *testing.T, main string) *node {
	t.Helper()
	containerd, err := bin.Path(t.Context(), "containerd")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	o := usual()
	o.DropIn = filepath.Join(dir, "conf.d", "99-cleave-snapshotter.toml")
	n := &node{target: Target{Containerd: containerd, MainFile: filepath.Join(dir, "config.toml"), BackupDir: filepath.Join(dir, "backup")}, o: o}
	n.writeMain(t, strings.ReplaceAll(main, "DIR", dir))
	return n
}

func (n *node) writeMain(t *testing.T, text string) {
	t.Helper()
	if err := os.WriteFile(n.target.MainFile, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// dump asks the real containerd, and fails if it does not take the files, or
// takes them with a warning about one of our keys.
func (n *node) dump(t *testing.T) tree {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), n.target.Containerd, "--config", n.target.MainFile, "config", "dump")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v\n%s", err, stderr.String())
	}
	if strings.Contains(stderr.String(), "unknown key") {
		t.Errorf("containerd does not know a key: %s", stderr.String())
	}
	parsed, err := parse("dump", out)
	if err != nil {
		t.Fatal(err)
	}
	return parsed
}

const imports = "imports = [\"DIR/conf.d/*.toml\"]\n"

// main files like those of real nodes, with settings that must survive.
var mains = map[string]string{
	"version 2": "version = 2\n" + imports + `
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "registry.example.org/pause:1"
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "overlayfs"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = true
[plugins."io.containerd.grpc.v1.cri".registry]
config_path = "/etc/containerd/certs.d"
`,
	"version 3": "version = 3\n" + imports + `
[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "registry.example.org/pause:1"
[plugins."io.containerd.cri.v1.images".registry]
config_path = "/etc/containerd/certs.d"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
SystemdCgroup = true
[[plugins."io.containerd.transfer.v1.local".unpack_config]]
platform = "linux/arm64"
snapshotter = "native"
[proxy_plugins.other]
type = "snapshot"
address = "/run/other.sock"
`,
	"version 4": "version = 4\n" + imports + `
[plugins."io.containerd.server.v1.grpc"]
address = "/run/elsewhere.sock"
[plugins."io.containerd.cri.v1.images"]
snapshotter = "native"
`,
	"empty": "version = 3\n" + imports,
}

func TestRealContainerdTakesTheDropIn(t *testing.T) {
	t.Parallel()
	for name, main := range mains {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, main)
			n.o.MaxConcurrentUnpacks = 3
			before := n.dump(t)
			p, err := Write(t.Context(), n.target, n.o)
			if err != nil {
				t.Fatal(err)
			}
			if p.Unchanged || p.Replaces {
				t.Errorf("the first write is said to change nothing or to replace something: %+v", p)
			}
			after := n.dump(t)
			want := map[string]any{
				"type": "snapshot", "address": n.o.Address, "platform": "", "capabilities": []any{"remap-ids", "only-remap-ids", "rebase"},
				"exports": map[string]any{"root": n.o.ImageRoot, "address": n.o.Address},
			}
			if diff := cmp.Diff(want, map[string]any(after.table("proxy_plugins", Snapshotter))); diff != "" {
				t.Errorf("proxy plugin (-want +got):\n%s", diff)
			}
			if sn, _ := after.text("plugins", pluginImages, "snapshotter"); sn != Snapshotter {
				t.Errorf("CRI's snapshotter is %q", sn)
			}
			if v, _ := after.integer("plugins", pluginTransfer, "max_concurrent_unpacks"); v != 3 {
				t.Errorf("max_concurrent_unpacks is %d, want 3", v)
			}
			var got []string
			for _, e := range after.list("plugins", pluginTransfer, "unpack_config") {
				e := tree(e.(map[string]any)) //nolint:errcheck // a panic fails the test as well
				platform, _ := e.text("platform")
				snapshotter, _ := e.text("snapshotter")
				got = append(got, platform+" "+snapshotter)
			}
			first := "linux/amd64 overlayfs"
			if name == "version 3" {
				first = "linux/arm64 native"
			}
			if diff := cmp.Diff([]string{first, "linux/amd64 cleave"}, got); diff != "" {
				t.Errorf("unpack_config (-want +got):\n%s", diff)
			}

			text, err := os.ReadFile(n.o.DropIn)
			if err != nil {
				t.Fatal(err)
			}
			again, err := Write(t.Context(), n.target, n.o)
			if err != nil || !again.Unchanged {
				t.Errorf("a second write changes something: %+v, %v", again, err)
			}
			if now, err := os.ReadFile(n.o.DropIn); err != nil || string(now) != string(text) {
				t.Errorf("a second write changed the file (%v)", err)
			}
			removed, err := Remove(n.o.DropIn)
			if err != nil || !removed {
				t.Errorf("remove: %v %v", removed, err)
			}
			if diff := cmp.Diff(before, n.dump(t)); diff != "" {
				t.Errorf("after the removal (-before +after):\n%s", diff)
			}
			if removed, err := Remove(n.o.DropIn); err != nil || removed {
				t.Errorf("a second removal: %v %v", removed, err)
			}
		})
	}
}

// A drop-in that is there and is set over by a later one is not as it should be.
func TestWriteSeesThatItsFileHasNoEffect(t *testing.T) {
	t.Parallel()
	n := newNode(t, "version = 3\n"+imports)
	if _, err := Write(t.Context(), n.target, n.o); err != nil {
		t.Fatal(err)
	}
	later := filepath.Join(filepath.Dir(n.o.DropIn), "zz.toml")
	if err := os.WriteFile(later, []byte("version = 3\n[plugins.'io.containerd.cri.v1.images']\nsnapshotter = 'overlayfs'\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	p, err := Write(t.Context(), n.target, n.o)
	if !errors.Is(err, ErrConflict) || !strings.Contains(err.Error(), "has no effect") {
		t.Errorf("%+v, %v", p, err)
	}
}

func TestWriteKeepsABackup(t *testing.T) {
	t.Parallel()
	n := newNode(t, mains["empty"])
	if _, err := Write(t.Context(), n.target, n.o); err != nil {
		t.Fatal(err)
	}
	// Somebody edits it, and it is written anew.
	edit := func(text string) string { return text + "# a remark\n" }
	old, err := os.ReadFile(n.o.DropIn)
	if err != nil {
		t.Fatal(err)
	}
	edited := edit(string(old))
	if err := os.WriteFile(n.o.DropIn, []byte(edited), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Remove(n.o.DropIn); !errors.Is(err, ErrNotOurs) {
		t.Errorf("an edited file is removed: %v", err)
	}
	p, err := Write(t.Context(), n.target, n.o)
	if err != nil || !p.Replaces {
		t.Fatalf("%+v, %v", p, err)
	}
	backups, err := filepath.Glob(filepath.Join(n.target.BackupDir, "*"))
	if err != nil || len(backups) != 1 {
		t.Fatalf("backups: %v %v", backups, err)
	}
	if text, err := os.ReadFile(backups[0]); err != nil || string(text) != edited {
		t.Errorf("the backup is %q (%v), want the edited file", text, err)
	}
	now, err := os.ReadFile(n.o.DropIn)
	if err != nil || string(now) != string(old) {
		t.Errorf("the file is not as planned (%v)", err)
	}
	info, err := os.Stat(n.o.DropIn)
	if err != nil || info.Mode().Perm() != 0o644 {
		t.Errorf("mode %v (%v), want 0644", info.Mode(), err)
	}
	left, err := filepath.Glob(filepath.Join(filepath.Dir(n.o.DropIn), ".*"))
	if err != nil || len(left) != 0 {
		t.Errorf("left behind: %v %v", left, err)
	}
}

// Another drop-in that comes later takes the snapshotter back: nothing of ours
// may stay, and what was there before must.
func TestWriteIsUndoneWhenItDoesNotTakeEffect(t *testing.T) {
	t.Parallel()
	n := newNode(t, mains["empty"])
	if err := os.Mkdir(filepath.Dir(n.o.DropIn), 0o755); err != nil {
		t.Fatal(err)
	}
	late := filepath.Join(filepath.Dir(n.o.DropIn), "99-z.toml")
	if err := os.WriteFile(late, []byte("version = 3\n[plugins.\"io.containerd.cri.v1.images\"]\nsnapshotter = \"native\"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := Write(t.Context(), n.target, n.o)
	if !errors.Is(err, ErrConflict) || !strings.Contains(err.Error(), `snapshotter is "native"`) {
		t.Errorf("got %v, want the key that another file sets", err)
	}
	if _, err := os.Lstat(n.o.DropIn); !os.IsNotExist(err) {
		t.Errorf("the drop-in stayed: %v", err)
	}
	if err := os.Remove(late); err != nil {
		t.Fatal(err)
	}
	if _, err := Write(t.Context(), n.target, n.o); err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadFile(n.o.DropIn)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(late, []byte("version = 3\n[plugins.\"io.containerd.transfer.v1.local\"]\nmax_concurrent_unpacks = 2\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	n.o.MaxConcurrentUnpacks = 5
	if _, err := Write(t.Context(), n.target, n.o); !errors.Is(err, ErrConflict) {
		t.Errorf("got %v, want ErrConflict", err)
	}
	if now, err := os.ReadFile(n.o.DropIn); err != nil || string(now) != string(before) {
		t.Errorf("what was there before is not back (%v)", err)
	}
}

func TestNothingIsWrittenWhenItMayNotBe(t *testing.T) {
	t.Parallel()
	cases := []struct {
		name, main string
		change     func(*node)
		want       string
	}{
		{"no imports", "version = 3\n", nil, "add this line"},
		{"conflict", "version = 3\n" + imports + "[plugins.\"io.containerd.cri.v1.images\"]\ndiscard_unpacked_layers = true\n", nil, "discard_unpacked_layers"},
		{"no TOML", "version = 3\n" + imports + "[plugins\n", nil, "config.toml:3:9: "},
		{"containerd refuses the file", "version = 3\nroot = 7\n" + imports, nil, "config dump"},
		{"no main file", "", func(n *node) { n.target.MainFile += ".missing" }, "--containerd-config"},
		{"main file is a folder", "", func(n *node) { n.target.MainFile = filepath.Dir(n.target.MainFile) }, "not a regular file"},
		{"no containerd", "version = 3\n" + imports, func(n *node) { n.target.Containerd = "/nowhere/containerd" }, "--containerd"},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, tc.main)
			if tc.change != nil {
				tc.change(n)
			}
			if _, err := Write(t.Context(), n.target, n.o); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q in it", err, tc.want)
			}
			if _, err := os.Lstat(filepath.Dir(n.o.DropIn)); !os.IsNotExist(err) {
				t.Errorf("something was written: %v", err)
			}
		})
	}
}

func TestWriteStopsWithItsContext(t *testing.T) {
	t.Parallel()
	n := newNode(t, mains["empty"])
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Write(ctx, n.target, n.o); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want the context's error", err)
	}
}

func TestRemoveLeavesWhatIsNotOurs(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "x.toml")
	if err := os.WriteFile(path, []byte("version = 3\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Remove(path); !errors.Is(err, ErrNotOurs) {
		t.Errorf("got %v, want ErrNotOurs", err)
	}
	if _, err := os.Stat(path); err != nil {
		t.Error(err)
	}
}
