package bin

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestEveryRecipeIsPinned(t *testing.T) {
	t.Parallel()
	root, err := checkout()
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for _, g := range recipes() {
		version, err := pinned(root, g)
		if err != nil {
			t.Error(err)
		}
		if !strings.HasPrefix(version, "v") {
			t.Errorf("%s is pinned to %q", g.module, version)
		}
		mod, err := os.ReadFile(filepath.Join(moduleDir(root, g), "go.mod"))
		if err != nil {
			t.Fatal(err)
		}
		for _, b := range g.binaries {
			if !strings.Contains(string(mod), b.pkg) {
				t.Errorf("go.mod of %s has no tool directive for %s", g.name, b.pkg)
			}
			for _, name := range []string{b.name, b.alias} {
				if name != "" && names[name] {
					t.Errorf("two binaries are called %s", name)
				}
				names[name] = true
			}
			if b.cold == 0 {
				t.Errorf("nobody says how long %s takes", b.name)
			}
		}
	}
}

// Two checkouts with the same pins share a binary; a changed pin must not find the old one.
func TestCacheKey(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	g := group{name: "thing", module: "example.org/thing", binaries: []binary{{name: "thing", pkg: "example.org/thing"}}}
	write := func(mod, sum string) {
		if err := os.MkdirAll(moduleDir(root, g), 0o755); err != nil {
			t.Fatal(err)
		}
		for name, content := range map[string]string{"go.mod": mod, "go.sum": sum} {
			if err := os.WriteFile(filepath.Join(moduleDir(root, g), name), []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	key := func(g group) string {
		k, err := cacheKey(root, g)
		if err != nil {
			t.Fatal(err)
		}
		return k
	}
	write("a", "b")
	first := key(g)
	if again := key(g); again != first {
		t.Errorf("the same pins give %s and %s", first, again)
	}
	seen := map[string]string{first: "the first"}
	for name, content := range map[string][2]string{"another go.mod": {"A", "b"}, "another go.sum": {"a", "B"}, "content moved between the files": {"ab", ""}} {
		write(content[0], content[1])
		k := key(g)
		if other, ok := seen[k]; ok {
			t.Errorf("%s has the key of %s", name, other)
		}
		seen[k] = name
	}
	write("a", "b")
	g.binaries[0].test = true
	if _, ok := seen[key(g)]; ok {
		t.Error("another recipe has an old key")
	}
}

func TestUnknownName(t *testing.T) {
	t.Parallel()
	_, err := Get(t.Context(), io.Discard, "containerd", "dockerd")
	if err == nil || !strings.Contains(err.Error(), `"dockerd"`) || !strings.Contains(err.Error(), "kubelet") {
		t.Errorf("got %v, want the unknown name and the known ones", err)
	}
}

func TestProgramName(t *testing.T) {
	t.Parallel()
	for pkg, want := range map[string]string{
		"go.etcd.io/etcd/server/v3":                              "server",
		"gotest.tools/gotestsum":                                 "gotestsum",
		"github.com/golangci/golangci-lint/v2/cmd/golangci-lint": "golangci-lint",
	} {
		if got := programName(pkg); got != want {
			t.Errorf("%s gives %s, want %s", pkg, got, want)
		}
	}
}
