package install

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// setting is a value of cleave's configuration: a key at the outermost level, or
// one in the table of that name.
type setting struct{ table, key, value string }

// put writes the value into a YAML text and changes nothing else. Values are words
// and endpoints, which need no quotes.
func (s setting) put(text []byte) ([]byte, error) {
	table := s.table
	if table == "" {
		s.table, table = s.key, ""
	}
	top, err := topLevel(text)
	if err != nil {
		return nil, err
	}
	out, err := s.place(text, top, table)
	if err != nil {
		return nil, err
	}
	again, err := topLevel(out)
	if err != nil || !onlySets(top, again, s) {
		return nil, s.refused()
	}
	return out, nil
}

func (s setting) refused() error {
	name := s.key
	if s.table != s.key {
		name = s.table + "." + s.key
	}
	return fmt.Errorf("%s is written in a way that can't be changed without touching anything else: set it to %s yourself first", name, s.value)
}

func (s setting) place(text []byte, top *yaml.Node, table string) ([]byte, error) {
	name, value := find(top, s.table)
	switch {
	case name == nil && table == "":
		return addLines(text, len(text), s.key+": "+s.value+"\n"), nil
	case name == nil:
		return addLines(text, len(text), s.table+":\n  "+s.key+": "+s.value+"\n"), nil
	case table == "":
		return s.replace(text, value)
	case value.Kind != yaml.MappingNode || value.Style&yaml.FlowStyle != 0 || len(value.Content) == 0:
		return nil, s.refused()
	}
	first := value.Content[0]
	if _, old := find(value, s.key); old != nil {
		return s.replace(text, old)
	}
	return addLines(text, offset(text, first.Line, 1), strings.Repeat(" ", first.Column-1)+s.key+": "+s.value+"\n"), nil
}

// replace puts the value in place of a plain or quoted one.
func (s setting) replace(text []byte, old *yaml.Node) ([]byte, error) {
	at := offset(text, old.Line, old.Column)
	written := old.Value
	switch {
	case old.Kind != yaml.ScalarNode || old.Anchor != "" || old.Tag != "!!str":
		return nil, s.refused()
	case old.Style == yaml.DoubleQuotedStyle:
		written = `"` + written + `"`
	case old.Style == yaml.SingleQuotedStyle:
		written = "'" + written + "'"
	}
	if written == "" || at < 0 || !strings.HasPrefix(string(text[at:]), written) {
		return nil, s.refused()
	}
	return slices.Concat(text[:at], []byte(s.value), text[at+len(written):]), nil
}

// topLevel decodes a text's one document, an empty one too.
func topLevel(text []byte) (*yaml.Node, error) {
	d := yaml.NewDecoder(strings.NewReader(string(text)))
	var doc yaml.Node
	if err := d.Decode(&doc); errors.Is(err, io.EOF) {
		return &yaml.Node{Kind: yaml.MappingNode}, nil
	} else if err != nil {
		return nil, err
	}
	if len(doc.Content) != 1 || doc.Content[0].Kind != yaml.MappingNode || doc.Content[0].Style&yaml.FlowStyle != 0 {
		return nil, errors.New("it is not a table of keys, each on a line of its own")
	}
	return doc.Content[0], nil
}

func find(table *yaml.Node, key string) (name, value *yaml.Node) {
	for i := 0; i+1 < len(table.Content); i += 2 {
		if table.Content[i].Value == key {
			return table.Content[i], table.Content[i+1]
		}
	}
	return nil, nil
}

// offset is where a line's column is, both counted from 1; -1 if it is nowhere. The
// parser counts characters, which is bytes where all before it on the line are ASCII.
func offset(text []byte, line, column int) int {
	at := 0
	for l := 1; l < line; l++ {
		i := strings.IndexByte(string(text[at:]), '\n')
		if i < 0 {
			return -1
		}
		at += i + 1
	}
	if at += column - 1; at > len(text) {
		return -1
	}
	return at
}

func addLines(text []byte, at int, lines string) []byte {
	if at == len(text) && at > 0 && text[at-1] != '\n' {
		lines = "\n" + lines
	}
	return slices.Concat(text[:at], []byte(lines), text[at:])
}

// onlySets reports whether the second table is the first with the value in it.
func onlySets(before, after *yaml.Node, s setting) bool {
	var a, b map[string]any
	if before.Decode(&a) != nil || after.Decode(&b) != nil {
		return false
	}
	inA, inB := a, b
	if a == nil {
		a, inA = map[string]any{}, map[string]any{}
	}
	if s.table != s.key {
		tableB, ok := b[s.table].(map[string]any)
		if !ok {
			return false
		}
		inB = tableB
		if tableA, ok := a[s.table].(map[string]any); ok {
			inA = tableA
		} else {
			inA = map[string]any{}
			a[s.table] = inA
		}
	}
	if inB[s.key] != s.value {
		return false
	}
	delete(inA, s.key)
	delete(inB, s.key)
	x, errA := yaml.Marshal(a)
	y, errB := yaml.Marshal(b)
	return errA == nil && errB == nil && string(x) == string(y)
}
