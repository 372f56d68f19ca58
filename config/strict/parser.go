package strict

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"
	"unicode"

	"go.yaml.in/yaml/v3"
)

// Parser collects what is wrong with one file.
type Parser struct {
	File   string
	Faults Faults
}

// Fault notes that something is wrong at a node.
func (p *Parser) Fault(at *yaml.Node, key, format string, args ...any) {
	p.Faults = append(p.Faults, Fault{
		File: p.File, Line: at.Line, Column: at.Column, Key: key, Message: fmt.Sprintf(format, args...),
	})
}

// Document gives the only document's top node, or nil if there is none.
func (p *Parser) Document(data []byte) *yaml.Node {
	decoder := yaml.NewDecoder(bytes.NewReader(data))
	var first, second yaml.Node
	err := decoder.Decode(&first)
	if err == nil {
		err = decoder.Decode(&second)
		if err == nil {
			p.Fault(&second, "", "a second document starts here; the file must hold one")
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
func (p *Parser) syntax(data []byte, err error) {
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
	p.Fault(at, "", "not YAML: %s", message)
}

// Plain refuses what makes YAML mean something else than it shows.
func (p *Parser) Plain(n *yaml.Node, path string) bool {
	switch {
	case n.Kind == yaml.AliasNode, n.Anchor != "":
		p.Fault(n, path, "anchors and aliases (& and *) are not supported")
	case n.Style&yaml.TaggedStyle != 0:
		p.Fault(n, path, "tags (!) are not supported")
	default:
		return true
	}
	return false
}

// IsNull says whether a key has no value.
func IsNull(n *yaml.Node) bool {
	return n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null"
}

// KindOf says what a node is, for people.
func KindOf(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "keys with values below them"
	case yaml.SequenceNode:
		return "a list"
	default:
		return Shown(n.Value)
	}
}

// Join adds a key of the file to a path; a key that is no sensible name is
// quoted.
func Join(path, key string) string {
	if key == "" || len(key) > 60 || strings.ContainsFunc(key, func(r rune) bool { return !unicode.IsLetter(r) && !unicode.IsDigit(r) && r != '-' && r != '_' }) {
		key = Shown(key)
	}
	if path == "" {
		return key
	}
	return path + "." + key
}

// Shown quotes a value for a message, cut to a readable length.
func Shown(s string) string {
	const most = 60
	if len(s) > most {
		return fmt.Sprintf("%q…", strings.ToValidUTF8(s[:most], ""))
	}
	return fmt.Sprintf("%q", s)
}

// Closest is the one of the known keys that is spelled much like key; empty if
// none is.
func Closest(key string, known []string) string {
	const far = 3
	best, distance := "", far
	for _, k := range known {
		if d := editDistance(strings.ToLower(key), strings.ToLower(k)); d < distance && d <= (len(k)+1)/3 {
			best, distance = k, d
		}
	}
	return best
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

// Keys goes through the mapping n: each calls visit once for each key that is
// given for the first time, with the path of its value. What is no mapping, and
// what is no key, is a fault. what stands for n in messages.
func (p *Parser) Keys(n *yaml.Node, path, what string, visit func(key, value *yaml.Node, path string)) {
	if !p.Plain(n, path) {
		return
	}
	if n.Kind != yaml.MappingNode {
		p.Fault(n, path, "%s must be keys with values below them (key: value), not %s", what, KindOf(n))
		return
	}
	seen := map[string]*yaml.Node{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		if !p.Plain(key, path) {
			continue
		}
		if key.Kind != yaml.ScalarNode {
			p.Fault(key, path, "a key must be a name, not %s", KindOf(key))
			continue
		}
		keyPath := Join(path, key.Value)
		if before := seen[key.Value]; before != nil {
			p.Fault(key, keyPath, "is given twice, first on line %d", before.Line)
			continue
		}
		seen[key.Value] = key
		visit(key, value, keyPath)
	}
}
