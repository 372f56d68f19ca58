package ctdconfig

import (
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the golden files anew")

// checkGolden compares with the golden file of a name, or with -update writes it.
func checkGolden(t *testing.T, name string, got []byte) {
	t.Helper()
	golden := filepath.Join("testdata", name+".golden")
	if *update {
		if err := os.WriteFile(golden, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// dumped is what the parts of `containerd config dump` look like that a plan is
// made from; more stands for more lines of the same.
func dumped(version, more string) string {
	return "version = " + version + "\n" + `disabled_plugins = []
imports = ['/etc/containerd/conf.d/*.toml']
[plugins.'io.containerd.cri.v1.images']
snapshotter = 'overlayfs'
disable_snapshot_annotations = true
discard_unpacked_layers = false
max_concurrent_downloads = 3
use_local_image_pull = false
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
snapshotter = ''
` + more
}

const (
	mainFile = "/etc/containerd/config.toml"
	importer = "version = 3\nimports = [\"/etc/containerd/conf.d/*.toml\"]\n"
)

func usual() Options {
	return Options{
		Address: "/run/cleave/snapshotter.sock", ImageRoot: "/var/lib/images", Platform: "linux/amd64",
		RemapIDs: true, Rebase: true, DropIn: DefaultDropIn,
	}
}

func TestDropInGolden(t *testing.T) {
	t.Parallel()
	cases := []struct {
		name, main, dump string
		change           func(*Options)
	}{
		{"version2", strings.Replace(importer, "3", "2", 1), dumped("4", ""), nil},
		{"version3", importer, dumped("3", ""), nil},
		{"version4", strings.Replace(importer, "3", "4", 1), dumped("4", ""), nil},
		{"no_capabilities", importer, dumped("4", ""), func(o *Options) { o.RemapIDs, o.Rebase = false, false }},
		{"parallel", importer, dumped("4", ""), func(o *Options) { o.MaxConcurrentUnpacks = 4 }},
		{"keeps_entries", importer, dumped("4", `
[[plugins.'io.containerd.transfer.v1.local'.unpack_config]]
platform = 'linux/arm64'
snapshotter = 'native'
differ = 'odd "name"'
config_type = ''
layer_types = ['a', 'b']
optional = true
limit = 7
[[plugins.'io.containerd.transfer.v1.local'.unpack_config]]
platform = 'linux/amd64'
snapshotter = 'cleave'
differ = 'walking'
`), nil},
		{"overlayfs_disabled", importer, strings.Replace(dumped("4", ""), "disabled_plugins = []", "disabled_plugins = ['io.containerd.snapshotter.v1.overlayfs']", 1), nil},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			o := usual()
			if tc.change != nil {
				tc.change(&o)
			}
			p, err := Make(Facts{Dump: []byte(tc.dump), MainPath: mainFile, Main: []byte(tc.main)}, o)
			if err != nil {
				t.Fatal(err)
			}
			if err := p.Err(); err != nil {
				t.Fatal(err)
			}
			checkGolden(t, tc.name, p.Content)
			if _, err := parse("", p.Content); err != nil {
				t.Error(err)
			}
			if state, _ := inspect(p.Content); state != written {
				t.Errorf("the drop-in is not taken for our own: %v", state)
			}
		})
	}
}

func TestConflicts(t *testing.T) {
	t.Parallel()
	own := func() []byte {
		p, err := Make(Facts{Dump: []byte(dumped("4", "")), MainPath: mainFile, Main: []byte(importer)}, usual())
		if err != nil {
			t.Fatal(err)
		}
		return p.Content
	}()
	proxy := func(address string) string {
		return "[proxy_plugins.cleave]\ntype = 'snapshot'\naddress = '" + address + "'\ncapabilities = ['rebase', 'only-remap-ids', 'remap-ids']\n" +
			"[proxy_plugins.cleave.exports]\naddress = '" + address + "'\nroot = '/var/lib/images'\n"
	}
	swap := func(old, now string) string { return strings.Replace(dumped("4", ""), old, now, 1) }
	cases := []struct {
		name, dump string
		dropIn     []byte
		change     func(*Options)
		want       []string // pieces of the only conflict; none: no conflict
	}{
		{name: "none", dump: dumped("4", "")},
		{name: "proxy plugin of the same name elsewhere", dump: dumped("4", proxy("/run/other.sock")), want: []string{"proxy_plugins.cleave", "/run/other.sock"}},
		{name: "proxy plugin with the same values", dump: dumped("4", proxy("/run/cleave/snapshotter.sock"))},
		{name: "proxy plugin of our own drop-in, other options now", dump: dumped("4", proxy("/run/cleave/snapshotter.sock")), dropIn: own, change: func(o *Options) { o.ImageRoot = "/elsewhere" }},
		{name: "proxy plugin overrides our own drop-in", dump: dumped("4", proxy("/run/other.sock")), dropIn: own, want: []string{"proxy_plugins.cleave", "/run/other.sock"}},
		{name: "snapshotter of a runtime", dump: swap("snapshotter = ''", "snapshotter = 'nydus'"), want: []string{"runtimes.runc.snapshotter", `"nydus"`, "0 bytes"}},
		{name: "snapshotter of a runtime is ours", dump: swap("snapshotter = ''", "snapshotter = 'cleave'")},
		{name: "snapshotter of a runtime's platform", dump: dumped("4", "[plugins.'io.containerd.cri.v1.images'.runtime_platforms.kata]\nsnapshotter = 'devmapper'\n"), want: []string{"runtime_platforms.kata.snapshotter", `"devmapper"`}},
		{name: "snapshot annotations", dump: swap("disable_snapshot_annotations = true", "disable_snapshot_annotations = false"), want: []string{"disable_snapshot_annotations", "older path"}},
		{name: "discarded layers", dump: swap("discard_unpacked_layers = false", "discard_unpacked_layers = true"), want: []string{"discard_unpacked_layers", "older path"}},
		{name: "CRI disabled", dump: swap("disabled_plugins = []", "disabled_plugins = ['io.containerd.grpc.v1.cri']"), want: []string{"io.containerd.grpc.v1.cri is disabled"}},
		{name: "transfer disabled", dump: swap("disabled_plugins = []", "disabled_plugins = ['io.containerd.transfer.v1.local']"), want: []string{"transfer.v1.local is disabled"}},
		{name: "what is not needed is disabled", dump: swap("disabled_plugins = []", "disabled_plugins = ['io.containerd.snapshotter.v1.zfs']")},
		{name: "drop-in of somebody else", dump: dumped("4", ""), dropIn: []byte("version = 3\n"), want: []string{DefaultDropIn, "not written by cleave"}},
		{name: "drop-in is empty", dump: dumped("4", ""), dropIn: []byte{}, want: []string{"not written by cleave"}},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			o := usual()
			if tc.change != nil {
				tc.change(&o)
			}
			p, err := Make(Facts{Dump: []byte(tc.dump), MainPath: mainFile, Main: []byte(importer), DropIn: tc.dropIn}, o)
			if err != nil {
				t.Fatal(err)
			}
			if len(tc.want) == 0 {
				if err := p.Err(); err != nil {
					t.Errorf("got %v, want no conflict", err)
				}
				return
			}
			if err := p.Err(); !errors.Is(err, ErrConflict) {
				t.Errorf("got %v, want ErrConflict", err)
			}
			if len(p.Conflicts) != 1 {
				t.Fatalf("got %v, want one conflict", p.Conflicts)
			}
			for _, piece := range tc.want {
				if got := p.Conflicts[0].String(); !strings.Contains(got, piece) {
					t.Errorf("got %q, want %q in it", got, piece)
				}
			}
		})
	}
}

func TestVersions(t *testing.T) {
	t.Parallel()
	cases := []struct{ name, dump, main, want string }{
		{"1", dumped("4", ""), "version = 1\n", "config migrate"},
		{"none, which means 1", dumped("4", ""), "root = '/x'\n", "has no version"},
		{"unknown", dumped("4", ""), "version = 5\n", "would not start"},
		{"newer than containerd", dumped("3", ""), "version = 4\n", "would not start"},
		{"containerd 1", dumped("2", ""), "version = 2\n", "before 2.0"},
		{"containerd of the future", dumped("5", ""), "version = 4\n", "upgrade cleave"},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			_, err := Make(Facts{Dump: []byte(tc.dump), MainPath: mainFile, Main: []byte(tc.main)}, usual())
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q in it", err, tc.want)
			}
		})
	}
}

func TestSyntaxErrorsHaveAPlace(t *testing.T) {
	t.Parallel()
	cases := []struct {
		name, main   string
		line, column int
	}{
		{"no value", "version = 3\nroot =\n", 2, 7},
		{"key twice", "version = 3\nroot = 'a'\nroot = 'b'\n", 3, 1},
		{"table not closed", "version = 3\n[plugins\n", 2, 9},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			_, err := Make(Facts{Dump: []byte(dumped("4", "")), MainPath: mainFile, Main: []byte(tc.main)}, usual())
			var syntax SyntaxError
			if !errors.As(err, &syntax) {
				t.Fatalf("got %v, want a SyntaxError", err)
			}
			if syntax.File != mainFile || syntax.Line != tc.line || syntax.Column != tc.column {
				t.Errorf("got %v, want line %d, column %d", err, tc.line, tc.column)
			}
		})
	}
}

func TestImportLine(t *testing.T) {
	t.Parallel()
	const add = `imports = ["/etc/containerd/conf.d/*.toml"]`
	cases := []struct{ name, main, line, hint string }{
		{"pattern", `imports = ["/etc/containerd/conf.d/*.toml"]`, "", ""},
		{"the very file", `imports = ["/etc/containerd/conf.d/99-cleave-snapshotter.toml"]`, "", ""},
		{"relative to the main file", `imports = ["conf.d/*"]`, "", ""},
		{"not clean", `imports = ["/etc//containerd/./conf.d/*.toml"]`, "", ""},
		{"none", `root = "/x"`, add, "add this line"},
		{"empty", `imports = []`, add, "replace"},
		{"of another folder", `imports = ["/etc/other/*.toml", "/a\"b"]`, `imports = ["/etc/other/*.toml", "/a\"b", "/etc/containerd/conf.d/*.toml"]`, "replace"},
		{"pattern of other names", `imports = ["/etc/containerd/conf.d/[0-8]*.toml"]`, `imports = ["/etc/containerd/conf.d/[0-8]*.toml", "/etc/containerd/conf.d/*.toml"]`, "replace"},
		// Without a star containerd takes the name literally.
		{"question mark is no pattern", `imports = ["/etc/containerd/conf.d/99-cleave-snapshotter.tom?"]`, `imports = ["/etc/containerd/conf.d/99-cleave-snapshotter.tom?", "/etc/containerd/conf.d/*.toml"]`, "replace"},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			p, err := Make(Facts{Dump: []byte(dumped("4", "")), MainPath: mainFile, Main: []byte("version = 3\n" + tc.main + "\n")}, usual())
			if err != nil {
				t.Fatal(err)
			}
			if p.ImportLine != tc.line || !strings.Contains(p.ImportHint, tc.hint) || (tc.line == "") != (p.Err() == nil) {
				t.Errorf("got line %q, hint %q, error %v; want line %q, hint with %q", p.ImportLine, p.ImportHint, p.Err(), tc.line, tc.hint)
			}
		})
	}
}

func TestNotes(t *testing.T) {
	t.Parallel()
	swap := func(old, now string) string { return strings.Replace(dumped("4", ""), old, now, 1) }
	cases := []struct {
		name, dump string
		change     func(*Options)
		want       string
	}{
		{"old containers", dumped("4", ""), nil, `stay there until they are replaced`},
		{"older path", swap("use_local_image_pull = false", "use_local_image_pull = true"), nil, "use_local_image_pull is true: containerd pulls by its older path"},
		{"older path by downloads", swap("max_concurrent_downloads = 3", "max_concurrent_downloads = 9"), nil, "max_concurrent_downloads of io.containerd.cri.v1.images is 9"},
		{"older path by mirrors", dumped("4", "[plugins.'io.containerd.cri.v1.images'.registry.mirrors.x]\nendpoint = ['y']\n"), nil, "registry.mirrors is set"},
		{"parallel without rebase", dumped("4", ""), func(o *Options) { o.Rebase, o.MaxConcurrentUnpacks = false, 2 }, "does not declare rebase"},
		{"EROFS images", dumped("4", "[plugins.'io.containerd.snapshotter.v1.erofs']\nroot_path = ''\n"), nil, "EROFS"},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			o := usual()
			if tc.change != nil {
				tc.change(&o)
			}
			p, err := Make(Facts{Dump: []byte(tc.dump), MainPath: mainFile, Main: []byte(importer)}, o)
			if err != nil {
				t.Fatal(err)
			}
			if got := strings.Join(p.Notes, "\n"); !strings.Contains(got, tc.want) {
				t.Errorf("got %q, want %q in it", got, tc.want)
			}
		})
	}
}

func TestOptionsRefused(t *testing.T) {
	t.Parallel()
	cases := []struct {
		name   string
		change func(*Options)
		want   string
	}{
		{"relative socket", func(o *Options) { o.Address = "run/x" }, "socket"},
		{"no image root", func(o *Options) { o.ImageRoot = "" }, "image root"},
		{"line break", func(o *Options) { o.ImageRoot = "/a\nb" }, "control characters"},
		{"no platform", func(o *Options) { o.Platform = "" }, "platform"},
		{"negative unpacks", func(o *Options) { o.MaxConcurrentUnpacks = -1 }, "-1"},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			o := usual()
			tc.change(&o)
			if _, err := Make(Facts{Dump: []byte(dumped("4", "")), MainPath: mainFile, Main: []byte(importer)}, o); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q in it", err, tc.want)
			}
		})
	}
}

// FuzzMake: whatever is in the files, a plan is TOML, and a second one with it
// in place is the same.
func FuzzMake(f *testing.F) {
	f.Add(dumped("4", ""), importer)
	f.Add(dumped("3", "[[plugins.'io.containerd.transfer.v1.local'.unpack_config]]\nplatform = '\\u0001'\n"), importer)
	f.Add("version = 4", "version = 2\nimports = ['*']")
	f.Fuzz(func(t *testing.T, dump, main string) {
		facts := Facts{Dump: []byte(dump), MainPath: mainFile, Main: []byte(main)}
		p, err := Make(facts, usual())
		if err != nil {
			return
		}
		if _, err := parse("", p.Content); err != nil {
			t.Fatalf("the plan is no TOML: %v\n%s", err, p.Content)
		}
		facts.DropIn = p.Content
		again, err := Make(facts, usual())
		if err != nil || !again.Unchanged {
			t.Fatalf("a second plan differs (%v):\n%s", err, again.Content)
		}
	})
}
