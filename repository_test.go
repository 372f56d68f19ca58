// Package cleave is only this test: the repository keeps its own rules, as far
// as no linter knows them.
package cleave

import (
	"bytes"
	"encoding/json"
	"errors"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"net/url"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestEveryPackageHasADocComment also looks at packages of tests only.
func TestEveryPackageHasADocComment(t *testing.T) {
	t.Parallel()
	documented := map[string]bool{}
	for file := range repositoryFiles(t) {
		if !strings.HasSuffix(file, ".go") || slices.Contains(strings.Split(file, "/"), "testdata") {
			continue
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.PackageClauseOnly|parser.ParseComments)
		if err != nil {
			t.Error(err)
			continue
		}
		doc := parsed.Doc.Text()
		want := "Package " + parsed.Name.Name + " "
		if parsed.Name.Name == "main" {
			want = "Command "
		}
		if doc != "" && !strings.HasSuffix(parsed.Name.Name, "_test") && !strings.HasPrefix(doc, want) {
			t.Errorf("%s: the doc comment does not begin with %q", file, want)
		}
		dir := path.Dir(file)
		documented[dir] = documented[dir] || doc != ""
	}
	for dir, ok := range documented {
		if !ok {
			t.Errorf("package %s has no doc comment", dir)
		}
	}
}

// TestNoFileNamesThisMachine keeps paths and hosts of whoever builds out of
// the repository.
func TestNoFileNamesThisMachine(t *testing.T) {
	t.Parallel()
	var machine []string
	here, err := filepath.Abs(".")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Count(here, "/") > 1 { // a folder in the root may well have a common name
		machine = append(machine, here)
	}
	for _, variable := range []string{"GOMODCACHE", "GOCACHE", "GOPATH"} {
		out, err := exec.CommandContext(t.Context(), "go", "env", variable).Output()
		if err != nil {
			t.Fatal(err)
		}
		machine = append(machine, strings.TrimSpace(string(out)))
	}
	out, err := exec.CommandContext(t.Context(), "go", "env", "GOPROXY").Output()
	if err != nil {
		t.Fatal(err)
	}
	for proxy := range strings.FieldsFuncSeq(string(out), func(r rune) bool { return r == ',' || r == '|' || r == '\n' }) {
		if u, err := url.Parse(proxy); err == nil && u.Host != "" && u.Host != "proxy.golang.org" {
			machine = append(machine, u.Host)
		}
	}
	homes := regexp.MustCompile(`/(home|Users)/[a-z][a-z0-9_-]*/`)
	for file, content := range repositoryFiles(t) {
		for _, name := range machine {
			if name != "" && bytes.Contains(content, []byte(name)) {
				t.Errorf("%s names %s, which only this machine has", file, name)
			}
		}
		if found := homes.Find(content); found != nil {
			t.Errorf("%s names somebody's folder %s", file, found)
		}
	}
}

// TestEveryDependencyIsExplained compares what our packages import with
// docs/dependencies.md.
func TestEveryDependencyIsExplained(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("docs/dependencies.md")
	if err != nil {
		t.Fatal(err)
	}
	explained := map[string]bool{}
	for line := range strings.Lines(string(text)) {
		cells := strings.Split(line, "|")
		if len(cells) < 5 {
			continue
		}
		for _, m := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(cells[1], -1) {
			explained[m[1]] = len(strings.Fields(cells[2])) > 2 && strings.TrimSpace(cells[3]) != ""
		}
	}
	direct := directDependencies(t)
	for _, module := range direct {
		if !explained[module] {
			t.Errorf("docs/dependencies.md does not say what %s is for and who keeps it", module)
		}
	}
	if len(direct) == 0 {
		t.Error("no direct dependency was found")
	}
}

// directDependencies lists the modules that our packages and their tests
// import, whatever go.mod's comments say.
func directDependencies(t *testing.T) []string {
	t.Helper()
	type listed struct {
		ImportPath                         string
		Imports, TestImports, XTestImports []string
		Module                             *struct {
			Path string
			Main bool
		}
	}
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "-test", "-json=ImportPath,Imports,TestImports,XTestImports,Module", "./...").Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			t.Fatalf("list packages: %v\n%s", err, exit.Stderr)
		}
		t.Fatal(err)
	}
	module := map[string]string{}
	imported := map[string]bool{}
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p listed
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		switch {
		case p.Module == nil: // of the standard library, or a test's main
		case !p.Module.Main:
			module[p.ImportPath] = p.Module.Path
		default:
			for _, i := range slices.Concat(p.Imports, p.TestImports, p.XTestImports) {
				imported[i] = true
			}
		}
	}
	var direct []string
	for i := range imported {
		if m := module[i]; m != "" && !slices.Contains(direct, m) {
			direct = append(direct, m)
		}
	}
	slices.Sort(direct)
	return direct
}

// repositoryFiles gives the files that are or could be committed, with their
// content.
func repositoryFiles(t *testing.T) func(yield func(string, []byte) bool) {
	t.Helper()
	return func(yield func(string, []byte) bool) {
		t.Helper()
		err := filepath.WalkDir(".", func(file string, entry fs.DirEntry, err error) error {
			switch {
			case err != nil:
				return err
			case entry.IsDir():
				if slices.Contains([]string{".git", "bin", "dist"}, file) {
					return fs.SkipDir
				}
				return nil
			case !entry.Type().IsRegular():
				return nil
			}
			content, err := os.ReadFile(file)
			if err != nil {
				return err
			}
			if !yield(file, content) {
				return fs.SkipAll
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	}
}
