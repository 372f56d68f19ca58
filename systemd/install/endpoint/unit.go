package endpoint

import (
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cleave-cri/cleave/systemd"
)

// unitDirs are the folders that systemd reads units from, the first before the
// others (systemd.unit(5), "Unit File Load Path").
func unitDirs() []string {
	return []string{systemd.AdminDir, "/run/systemd/system", "/usr/local/lib/systemd/system", systemd.VendorDir, "/lib/systemd/system"}
}

// unitFile is a file that a unit is made of.
type unitFile struct {
	path string
	text string
}

// word is one argument of a command and the file it is written in.
type word struct {
	text string
	file string
}

// service is what a unit says about its process.
type service struct {
	files []unitFile
	// argv is the last ExecStart with its variables replaced.
	argv []word
	// execFile is the file of that ExecStart, exec its value as written.
	execFile string
	exec     string
}

// tree is the node's files.
type tree struct{ root string }

// errMissing says that there is no such file.
var errMissing = errors.New("there is no such file")

func (t tree) read(path string) (string, error) {
	text, err := os.ReadFile(filepath.Join(t.root, path))
	if errors.Is(err, fs.ErrNotExist) {
		return "", errMissing
	}
	return string(text), err
}

func (t tree) exists(path string) bool {
	_, err := os.Stat(filepath.Join(t.root, path))
	return err == nil
}

// list gives the names in a folder that end in suffix, in order.
func (t tree) list(dir, suffix string) []string {
	entries, err := os.ReadDir(filepath.Join(t.root, dir))
	if err != nil {
		return nil
	}
	var out []string
	for _, e := range entries {
		if !e.IsDir() && strings.HasSuffix(e.Name(), suffix) && !strings.HasPrefix(e.Name(), ".") {
			out = append(out, e.Name())
		}
	}
	return out
}

// service reads a unit with its drop-ins; errMissing if there is none.
func (t tree) service(name string) (service, error) {
	var s service
	for _, dir := range unitDirs() {
		text, err := t.read(filepath.Join(dir, name))
		if errors.Is(err, errMissing) {
			continue
		}
		if err != nil {
			return service{}, err
		}
		s.files = append(s.files, unitFile{filepath.Join(dir, name), text})
		break
	}
	if len(s.files) == 0 {
		return service{}, errMissing
	}
	dropIns := map[string]string{} // name to path: of one name the first folder's counts
	for _, dir := range unitDirs() {
		for _, base := range t.list(filepath.Join(dir, name+".d"), ".conf") {
			if _, ok := dropIns[base]; !ok {
				dropIns[base] = filepath.Join(dir, name+".d", base)
			}
		}
	}
	for _, base := range slices.Sorted(maps.Keys(dropIns)) {
		text, err := t.read(dropIns[base])
		if err != nil {
			return service{}, err
		}
		s.files = append(s.files, unitFile{dropIns[base], text})
	}
	s.command(t)
	return s, nil
}

// command puts the arguments together as systemd does: the last ExecStart, with
// variables of Environment and, over these, of EnvironmentFile (systemd.exec(5)).
func (s *service) command(t tree) {
	variables := map[string]word{}
	var environmentFiles []string
	for _, f := range s.files {
		for _, a := range assignments(f.text) {
			switch a.key {
			case "ExecStart":
				s.exec, s.execFile = a.value, f.path
			case "Environment":
				if a.value == "" {
					clear(variables)
				}
				for _, w := range words(a.value) {
					if name, value, ok := strings.Cut(w, "="); ok {
						variables[name] = word{value, f.path}
					}
				}
			case "EnvironmentFile":
				if a.value == "" {
					environmentFiles = nil
				} else {
					environmentFiles = append(environmentFiles, strings.TrimPrefix(a.value, "-"))
				}
			}
		}
	}
	for _, path := range environmentFiles {
		text, err := t.read(path)
		if err != nil {
			continue // one that is missing is usual
		}
		for name, value := range environment(text) {
			variables[name] = word{value, path}
		}
	}
	for _, w := range words(s.exec) {
		s.argv = append(s.argv, s.expand(w, variables)...)
	}
}

// expand replaces variables: $NAME as a word of its own becomes as many words as
// it has, ${NAME} is replaced in its place (systemd.service(5), "Command lines").
func (s *service) expand(w string, variables map[string]word) []word {
	if name, ok := strings.CutPrefix(w, "$"); ok && !strings.HasPrefix(name, "{") && !strings.HasPrefix(name, "$") {
		v := variables[name]
		var out []word
		for _, part := range words(v.text) {
			out = append(out, word{part, v.file})
		}
		return out
	}
	out := word{w, s.execFile}
	for name, v := range variables {
		if strings.Contains(out.text, "${"+name+"}") {
			out = word{strings.ReplaceAll(out.text, "${"+name+"}", v.text), v.file}
		}
	}
	return []word{out}
}

// assignment is one key=value of a unit file.
type assignment struct{ key, value string }

// assignments reads the section Service, with lines that go on after a
// backslash, and without comments (systemd.syntax(7)).
func assignments(text string) []assignment {
	var out []assignment
	var section, pending string
	for line := range strings.SplitSeq(text, "\n") {
		line = strings.TrimRight(line, "\r")
		trimmed := strings.TrimSpace(line)
		if strings.HasPrefix(trimmed, "#") || strings.HasPrefix(trimmed, ";") {
			continue // also between lines that belong together
		}
		if rest, goesOn := strings.CutSuffix(line, `\`); goesOn {
			pending += rest + " "
			continue
		}
		trimmed = strings.TrimSpace(pending + line)
		pending = ""
		if strings.HasPrefix(trimmed, "[") && strings.HasSuffix(trimmed, "]") {
			section = trimmed
			continue
		}
		if key, value, ok := strings.Cut(trimmed, "="); ok && section == "[Service]" {
			out = append(out, assignment{strings.TrimSpace(key), strings.TrimSpace(value)})
		}
	}
	return out
}

// environment reads a file of NAME=value lines; quotes around a value go.
func environment(text string) map[string]string {
	out := map[string]string{}
	for _, a := range assignments("[Service]\n" + text) {
		out[a.key] = strings.Trim(a.value, `"'`)
	}
	return out
}

// words splits at blanks, but for those in quotes.
func words(s string) []string {
	var out []string
	var word strings.Builder
	var quote rune
	inWord := false
	for _, r := range s {
		switch {
		case quote != 0 && r == quote:
			quote = 0
		case quote != 0:
			word.WriteRune(r)
		case r == '"' || r == '\'':
			quote, inWord = r, true
		case r == ' ' || r == '\t' || r == '\n':
			if inWord {
				out = append(out, word.String())
				word.Reset()
			}
			inWord = false
		default:
			word.WriteRune(r)
			inWord = true
		}
	}
	if inWord {
		out = append(out, word.String())
	}
	return out
}

// flag is the value of the last of a command's flags of a name, and the file it
// is written in.
func (s *service) flag(name string) (value, file string, found bool) {
	for i, w := range s.argv {
		if rest, ok := strings.CutPrefix(w.text, "--"+name+"="); ok {
			value, file, found = rest, w.file, true
		} else if w.text == "--"+name && i+1 < len(s.argv) {
			value, file, found = s.argv[i+1].text, s.argv[i+1].file, true
		}
	}
	return value, file, found
}
