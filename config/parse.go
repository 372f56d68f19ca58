package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"go.yaml.in/yaml/v3"
)

// Parse reads a configuration from data; keys that are not in it have their
// defaults. name stands for the file in messages.
//
// Whatever is wrong is an error of type Faults, which has all faults: syntax,
// unknown and repeated keys, wrong types, values that Validate refuses, a second
// document. Anchors, aliases, merge keys and explicit tags are refused, so that
// the file is what it looks like. If the version is not the known one, only that
// is reported, because everything else may mean something else there.
func Parse(name string, data []byte) (Config, error) {
	p := &parser{file: name, places: map[string]place{}}
	c := p.parse(data)
	if len(p.faults) > 0 {
		return Config{}, p.faults.sorted()
	}
	return c, nil
}

// parser collects what is wrong with one file.
type parser struct {
	file   string
	faults Faults
	// places is where each key's value was seen.
	places map[string]place
}

type place struct {
	line, column int
	bad          bool // a fault was reported there already
}

func (p *parser) fault(at *yaml.Node, key, format string, args ...any) {
	p.faults = append(p.faults, Fault{
		File: p.file, Line: at.Line, Column: at.Column, Key: key, Message: fmt.Sprintf(format, args...),
	})
}

func (p *parser) parse(data []byte) Config {
	start := &yaml.Node{Line: 1, Column: 1}
	if len(data) > maxFileBytes {
		p.fault(start, "", "the file is larger than %s", formatBytes(maxFileBytes))
		return Config{}
	}
	c := Default()
	root := p.document(data)
	switch {
	case len(p.faults) > 0:
		return Config{}
	case root == nil || isNull(root):
		p.fault(start, "version", "is missing; write version: %d", Version)
		return Config{}
	case !p.version(root):
		return Config{}
	}
	all := schema(&c)
	p.section(root, all, all, "")
	p.validate(c)
	return c
}

// document gives the only document's top node, or nil if there is none.
func (p *parser) document(data []byte) *yaml.Node {
	decoder := yaml.NewDecoder(bytes.NewReader(data))
	var first, second yaml.Node
	err := decoder.Decode(&first)
	if err == nil {
		err = decoder.Decode(&second)
		if err == nil {
			p.fault(&second, "", "a second document starts here; the file must hold one")
		}
	}
	if err != nil && !errors.Is(err, io.EOF) {
		p.syntax(data, err)
	}
	if len(first.Content) == 0 {
		return nil
	}
	return first.Content[0]
}

// syntax reports an error of the YAML library, which has a line in its text and
// no column: the column is where that line's text starts.
func (p *parser) syntax(data []byte, err error) {
	at := &yaml.Node{Line: 1, Column: 1}
	message := strings.TrimPrefix(err.Error(), "yaml: ")
	if m := regexp.MustCompile(`^line (\d+): (?s)(.*)$`).FindStringSubmatch(message); m != nil {
		if line, err := strconv.Atoi(m[1]); err == nil && line > 0 {
			at.Line, message = line, m[2]
		}
	}
	if lines := bytes.Split(data, []byte("\n")); at.Line <= len(lines) {
		text := lines[at.Line-1]
		at.Column += len(text) - len(bytes.TrimLeft(text, " \t"))
	}
	p.fault(at, "", "not YAML: %s", message)
}

// version looks for a known version before anything else is looked at.
func (p *parser) version(root *yaml.Node) bool {
	if root.Kind != yaml.MappingNode {
		return true // section says what is wrong
	}
	for i := 0; i+1 < len(root.Content); i += 2 {
		if root.Content[i].Value != "version" {
			continue
		}
		n, got := root.Content[i+1], 0
		if n.Kind != yaml.ScalarNode || (intValue{&got}).decode(n) != nil {
			return true
		}
		if got != Version {
			p.fault(n, "version", "%s", versionMessage(got))
			return false
		}
		return true
	}
	p.fault(root, "version", "is missing; write version: %d", Version)
	return false
}

func versionMessage(got int) string {
	return fmt.Sprintf("is %d, but this cleave knows version %d only", got, Version)
}

// section decodes the mapping n. path is that of n, empty for the whole file;
// all is the schema of the whole file.
func (p *parser) section(n *yaml.Node, s, all section, path string) {
	if !p.plain(n, path) || (path != "" && isNull(n)) {
		return
	}
	if n.Kind != yaml.MappingNode {
		what := "the file"
		if path != "" {
			what = "this"
		}
		p.fault(n, path, "%s must be keys with values below them (key: value), not %s", what, kindOf(n))
		return
	}
	seen := map[string]*yaml.Node{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		if !p.plain(key, path) {
			continue
		}
		if key.Kind != yaml.ScalarNode {
			p.fault(key, path, "a key must be a name, not %s", kindOf(key))
			continue
		}
		keyPath := join(path, key.Value)
		if before := seen[key.Value]; before != nil {
			p.fault(key, keyPath, "is given twice, first on line %d", before.Line)
			continue
		}
		seen[key.Value] = key
		f, ok := s.find(key.Value)
		if !ok {
			p.fault(key, keyPath, "unknown key%s", hint(key.Value, s, all, path))
			continue
		}
		before := len(p.faults)
		switch {
		case f.sub != nil:
			p.section(value, f.sub, all, keyPath)
		case f.list != nil:
			p.list(value, f.list, keyPath)
		default:
			p.value(value, f.value, keyPath)
		}
		p.places[keyPath] = place{line: value.Line, column: value.Column, bad: len(p.faults) > before}
	}
}

func (p *parser) value(n *yaml.Node, v value, path string) {
	switch {
	case !p.plain(n, path):
	case n.Kind != yaml.ScalarNode:
		p.fault(n, path, "must be one value, not %s", kindOf(n))
	case isNull(n):
		p.fault(n, path, "has no value; leave the key out for the default")
	default:
		if err := v.decode(n); err != nil {
			p.fault(n, path, "%s", err)
		}
	}
}

// list decodes a list of texts, each once; an empty one is nil.
func (p *parser) list(n *yaml.Node, to *[]string, path string) {
	switch {
	case !p.plain(n, path):
		return
	case isNull(n):
		p.fault(n, path, "has no value; leave the key out for the default, or write [] for an empty list")
		return
	case n.Kind != yaml.SequenceNode:
		p.fault(n, path, "must be a list, such as [a, b], not %s", kindOf(n))
		return
	}
	var list []string
	for _, element := range n.Content {
		var text string
		before := len(p.faults)
		p.value(element, textValue{&text}, path)
		switch {
		case len(p.faults) > before:
		case slices.Contains(list, text):
			p.fault(element, path, "%s is listed twice", shown(text))
		default:
			list = append(list, text)
		}
	}
	*to = list
}

// plain refuses what makes YAML mean something else than it shows.
func (p *parser) plain(n *yaml.Node, path string) bool {
	switch {
	case n.Kind == yaml.AliasNode, n.Anchor != "":
		p.fault(n, path, "anchors and aliases (& and *) are not supported")
	case n.Style&yaml.TaggedStyle != 0:
		p.fault(n, path, "tags (!) are not supported")
	default:
		return true
	}
	return false
}

// validate adds what Validate says, at the places of the file.
func (p *parser) validate(c Config) {
	for _, f := range c.faults() {
		at, ok := p.places[f.Key]
		if !ok {
			at, ok = p.places[f.other]
		}
		if !ok {
			at = place{line: 1, column: 1}
		}
		if at.bad {
			continue
		}
		f.File, f.Line, f.Column = p.file, at.line, at.column
		p.faults = append(p.faults, f)
	}
}

func isNull(n *yaml.Node) bool {
	return n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null"
}

func kindOf(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "keys with values below them"
	case yaml.SequenceNode:
		return "a list"
	default:
		return shown(n.Value)
	}
}

// join adds a key of the file to a path; a key that is no sensible name is
// quoted.
func join(path, key string) string {
	if key == "" || len(key) > 60 || strings.ContainsFunc(key, func(r rune) bool { return !unicode.IsLetter(r) && !unicode.IsDigit(r) && r != '-' && r != '_' }) {
		key = shown(key)
	}
	if path == "" {
		return key
	}
	return path + "." + key
}

func (s section) find(key string) (field, bool) {
	for _, f := range s {
		if f.key == key {
			return f, true
		}
	}
	return field{}, false
}

// hint says which key may have been meant: one of this section that is spelled
// much alike, or one of another section with this very name.
func hint(key string, s, all section, path string) string {
	const far = 3
	best, distance := "", far
	for _, f := range s {
		if d := editDistance(strings.ToLower(key), strings.ToLower(f.key)); d < distance && d <= (len(f.key)+1)/3 {
			best, distance = f.key, d
		}
	}
	if best != "" {
		return fmt.Sprintf("; did you mean %q?", best)
	}
	var elsewhere []string
	for _, f := range all {
		if f.key == key {
			elsewhere = append(elsewhere, f.key)
		}
		if _, ok := f.sub.find(key); ok {
			elsewhere = append(elsewhere, f.key+"."+key)
		}
	}
	if len(elsewhere) > 0 {
		return "; there is " + strings.Join(elsewhere, ", ")
	}
	known := make([]string, len(s))
	for i, f := range s {
		known[i] = f.key
	}
	where := "the file"
	if path != "" {
		where = path
	}
	return fmt.Sprintf("; %s has %s", where, strings.Join(known, ", "))
}

// editDistance is how many letters have to be put in, left out or replaced to
// make b of a (Levenshtein); neighbours swapped count once.
func editDistance(a, b string) int {
	if len(a) > 60 {
		return len(a)
	}
	x, y := []rune(a), []rune(b)
	d := make([][]int, len(x)+1)
	for i := range d {
		d[i] = make([]int, len(y)+1)
		d[i][0] = i
	}
	for j := range d[0] {
		d[0][j] = j
	}
	for i := 1; i <= len(x); i++ {
		for j := 1; j <= len(y); j++ {
			cost := 1
			if x[i-1] == y[j-1] {
				cost = 0
			}
			d[i][j] = min(d[i-1][j]+1, d[i][j-1]+1, d[i-1][j-1]+cost)
			if i > 1 && j > 1 && x[i-1] == y[j-2] && x[i-2] == y[j-1] {
				d[i][j] = min(d[i][j], d[i-2][j-2]+1)
			}
		}
	}
	return d[len(x)][len(y)]
}
